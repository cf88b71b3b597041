"""The machine that teaches: what the lessons import, and nobody else but tests and tools.

    lab           what the first cell of a lesson imports: ranks, checks, predictions, figures
    check         check("4.1", ...), hint, yours; answers are judged by exercises/
    answer        what an exercise is, and what is said of an answer; below all checks
    exercises/    a file a lesson: cases, mistakes and hints; simulated/ has ranks as threads of one
                  process, on which an answer is tried first
    pool/         the ranks behind a notebook, `Ranks(4).run(fn)` and `%%px`
    labs/         what a lesson runs beside its cells; `l04_by_hand` is written from its solution
    figures/      every figure, one call each: `plot.name(...)`; captions/ has titles and alt texts
    catalog       the lessons on this disk, ways through them, what is done: `python -m labcode`
    compare progress show tracebacks     predictions, progress of long cells, sources, short errors

It imports labcode from above. labcode can be used without it.
"""
