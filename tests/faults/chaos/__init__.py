"""A training that is disturbed on purpose, and what became of it.

    python -m tests.faults chaos gpt_tiny --faults 20 --seed 1
    python -m tests.faults chaos gpt_tiny --faults 20 --cluster NAME    # of slurm/cluster up 2

The training runs under torchrun, which starts its ranks again. By a seeded plan they are killed,
stopped and starved, checkpoints are damaged, the disk is filled; after each fault the run is
started again as a user or SLURM would. In the end its losses and weights are compared, bit for bit,
with a run that nobody disturbed.

    plan      which faults, in which order, how far apart; no processes
    inject    what each of them does to a running job
    job       the torchrun, its ranks, what they have done so far
    slurm_job the same on the nodes of a local SLURM cluster, which have a network to cut
    account   what a fault has cost: steps and bytes; the table and the JSON
    command   the command line
    small     a small training for the tests

Held by: tests/faults/test_chaos.py
"""
