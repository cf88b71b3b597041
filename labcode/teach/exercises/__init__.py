"""What the check cells call: one module per lesson, `from labcode.teach.exercises import l01`.

    on_ranks  how a learner's code runs on ranks and in groups of them, and what ends it
    scripts   how a learner's function becomes a script that torchrun starts
    l00   a share of the items, a mean over the ranks
    l01   the two halves of a ring, a broadcast in few rounds, a mended script
    l04   averages of gradients, uneven shares, accumulation, a training script for torchrun
    l05   an all-reduce of buckets, overlapped DDP, no_sync, clipping, a hook that compresses
    l08   coordinates and groups for any order, process groups, the best order, a grid for 64 GPUs
    l09   f and g, column- and row-parallel layers, Llama's MLP; embedding and loss of a vocabulary
    l10   sequence parallelism
    l11   context parallelism: the ring
    l12   pipeline parallelism
    l13   sharded data parallelism: own rows, a sharded optimizer, a borrowed weight, a layout, an
          FSDP2 script
    l14   ranks by node, a batch script, one that saves and requeues, faults from symptoms
    l15   hybrid training

`on_ranks` and `watch` are how checks run that code on ranks.

Each function takes what the learner wrote (a value, a function, a class), and the ranks where it
needs them, and asserts. The text of an AssertionError is the hint that the learner reads: say what
was expected, what was found, where to look.
"""
