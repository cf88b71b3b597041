"""What lessons use and no other room: nothing else of labcode imports this one.

answer.py    what an exercise is, and what its check says of an answer
check.py     what lessons import: check(), which runs an exercise's check and says what is wrong;
             hint(); with compare.py, a prediction beside a measurement, and show.py, show_source()
progress.py  the status line of a long cell; noting what has passed
tracebacks.py  the learner's own lines, without those of the library
figures/     every figure; lessons import `plot` from here
labs/        the apparatus of single lessons, lNN_*.py: a slow link, a paced pipeline, a cluster
exercises/   lNN.py: what the check cells of lesson NN call
"""
