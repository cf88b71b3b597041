"""What lessons use and no other room: nothing else of labcode imports this one.

check.py     check(), which runs an exercise's check and prints its hint; compare(), a prediction
             beside a measurement
figures/     every figure; lessons import `plot` from here
labs/        the apparatus of single lessons, lNN_*.py: a slow link, a paced pipeline, a cluster
exercises/   lNN.py: what the check cells of lesson NN call
"""
