"""What the lessons run their experiments on: apparatus that makes a laptop behave like a cluster.

    module                lesson   what it is
    clock                          emulated time: a device or link is busy, the rank sleeps
    l04_slow_link         04       all-reduces over a link of given alpha and beta
    l08_shards            08, 10   a module beside its shard: errors, collectives, steps of AdamW
    l10_paced_pipeline    10, 13   a pipeline whose actions take a given time; its time lines
    l12_cluster           12, 13   a small SLURM on this machine, which runs what a lesson submits
    l12_faults            12       what breaks that cluster for a while
    l12_nccl_example      12       the log of NCCL on two nodes
    l13_hybrid            13       the jobs of lesson 13, with and without a limit on memory
    emulate               13       a GPT that trains on an emulated cluster of given speeds

A lab never holds what its lesson is about: that is on screen there, or in the rooms below.
"""
