"""The checks of the exercises: one module per lesson, whose `EXERCISES` the check cells reach.

    simulated/    ranks as threads of one process: how a learner's code for ranks is run
    contract      a check as a table: cases, promises, mistakes with examples
    solution      a lesson's solution, and with the change that a mistake makes
    expect        what all checks share: runs, tables of mistakes, guards
    memory        what a rank has made and still holds
    in_notebook   a learner's code without ranks comes to an end
    scripts       how a learner's function becomes a script that torchrun starts
    small_gpt     a small GPT, its batches and gradients, for lessons 04 and 05
    lNN           the exercises of lesson NN

Each check takes what the learner wrote (a value, a function, a class), and the ranks where it needs
them, and raises `Hint`: say what was expected, what was found, where to look.
"""
