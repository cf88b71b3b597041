"""What the lessons run their experiments on: apparatus that makes a laptop behave like a cluster.

    module                lesson   what it is
    clock                          emulated time: a device or link is busy, the rank sleeps
    lNN_by_hand           02, ..   solutions that later cells show and use, written by the builder
    l04_script            04       the model and the data of the learner's DDP script
    run_file              04, 13   runs a learner's script on a rank
    l05_slow_link         05       all-reduces over a link of given alpha and beta
    l06_slow_link         06       data parallelism and local SGD train a small GPT over that link
    l08_costs             08       memory, seconds on links and idle stages of a grid of H100 nodes
    l08_nodes             08       an all-reduce over two nodes in three ways, on paced links
    l09_shards            09, 12   a module beside its shard: errors, collectives, steps of AdamW
    l10_small_gpt         10, 11   a small GPT, a few steps on one process or on a grid
    l11_slow_ring         11       a ring whose blocks and messages take a given time
    l12_paced_pipeline    12, 15   a pipeline whose actions take a given time; its time lines
    l13_layouts           13       bytes kept and seconds sent of a layout, and the best one
    l13_script            13       the model and the samples of the learner's FSDP2 script
    l13_units             13       units of ZeRO-3 that take a given time to compute and to gather
    l14_cluster           14, 15   a small SLURM on this machine, which runs what a lesson submits
    l14_faults            14       what breaks that cluster for a while
    l14_nccl_example      14       the log of NCCL on two nodes
    l15_hybrid            15       the jobs of lesson 15, with and without a limit on memory
    papers                11, ..   published numbers that a lesson asks for
    emulate               08, 15    a GPT that trains on an emulated cluster of given speeds

A lab never holds what its lesson is about: that is on screen there, or in the rooms below.
"""
