"""Lesson 08: all-reduces of four ranks on two nodes, over links whose speed is given.

The messages are real; each takes the time that the link between its two ranks would need, as in
`labs.emulate`. A GPU has an adapter of its own, so two messages that leave a node by different GPUs
do not wait for each other.

Held by: tests/ranks/test_nodes_lab.py
"""

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from course.labs.emulate import emulated
from course.labs.l08_by_hand import all_reduce_in_two_levels
from labcode.comm.grid import Grid
from labcode.perf.alpha_beta import Link
from labcode.perf.step import ClusterModel
from labcode.topology import GridShape

INSIDE = 200e6  # bytes per second
ADAPTER = 5e6  # so slow that what a busy machine adds counts little
NUM_BYTES = 4_000_000  # of the tensor, in float32
TWO_NODES = ClusterModel(
    math.inf, inside=Link(0.0, INSIDE), between=Link(0.0, ADAPTER), ranks_per_node=2
)
NODES = GridShape(tp=2, dp=2)  # tp: the ranks of a node; dp: one rank of each node

AllReduce = Callable[[torch.Tensor, Grid], torch.Tensor]


def median_s(rank: int, all_reduce: AllReduce, repeats: int = 3) -> float:
    """Seconds of an all-reduce on this rank, the median of some; every rank calls it.

    Raises:
        AssertionError: The sum is wrong.
    """
    grid = Grid.create(NODES)
    x = torch.full((NUM_BYTES // 4,), float(rank + 1))
    seconds = []
    for _ in range(repeats):
        dist.barrier()
        begin_s = time.perf_counter()
        with emulated(TWO_NODES):
            total = all_reduce(x.clone(), grid)
        seconds.append(time.perf_counter() - begin_s)
        assert torch.all(total == 10), "the sum of 1, 2, 3 and 4 is 10"
    return statistics.median(seconds)


def on_rings(x: torch.Tensor, grid: Grid, rings: Sequence[Sequence[int]]) -> torch.Tensor:
    """Sum `x` over all ranks, on several rings at a time, each with a part of it.

    Communicates: 2 (p-1) messages on each ring, of 1/p of its part.

    Args:
        x: [N], summed in place.
        grid: Grid of all ranks.
        rings: For each the ranks in the order in which messages go round.
    """
    del grid  # all ranks take part
    parts = x.tensor_split(len(rings))
    num_steps = 2 * (len(rings[0]) - 1)
    for step in range(num_steps):
        arrived = []
        operations = []
        for part, ring in zip(parts, rings):
            p = len(ring)
            place = ring.index(dist.get_rank())
            chunks = part.tensor_split(p)
            leaves = chunks[(place - step) % p]
            grows = chunks[(place - step - 1) % p]
            buffer = torch.empty_like(grows)
            operations.append(dist.P2POp(dist.isend, leaves, ring[(place + 1) % p]))
            operations.append(dist.P2POp(dist.irecv, buffer, ring[place - 1]))
            arrived.append((grows, buffer, step < p - 1))
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        for grows, buffer, is_partial in arrived:
            if is_partial:
                grows += buffer
            else:
                grows.copy_(buffer)
    return x


one_ring = functools.partial(on_rings, rings=[(0, 1, 2, 3)])
two_rings = functools.partial(on_rings, rings=[(0, 1, 2, 3), (1, 0, 3, 2)])


def two_levels(x: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Sum `x` inside the nodes, between them, and inside again: the solution of exercise 8.4."""
    return all_reduce_in_two_levels(x, grid.group("tp"), grid.group("dp"))
