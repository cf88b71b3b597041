"""What the check cells of a lesson call: one module per lesson, `l01`, `l02`, ... `from labcode.teach.exercises import l01`.

Each function takes what the learner wrote (a value, a function, a class), and the ranks where it needs them, and asserts.
The text of an AssertionError is the hint that the learner reads: say what was expected, what was found, where to look.
"""
