"""A job on its way: submit(job, site) -> handle with wait() and log().

submit      to SLURM where there is one, else to this machine
handle      follows a job to its end, through requeues; shows its log
outcome     why it ended, and which rank failed first
client      sbatch, squeue, scontrol, scancel, sinfo as functions with a time limit
answers     what these print, as data
local       a job without SLURM, one torchrun for each emulated node
supervisor  keeps such a job and leaves nothing behind
"""
