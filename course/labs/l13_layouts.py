"""Lesson 13: what a layout of sharded data parallelism keeps and sends, and the best one.

With N parameters in mixed precision (2-byte weights and gradients, 12 bytes for the optimizer),
k = 2 for the stages 0 to 2 (an all-reduce, or a reduce-scatter and an all-gather) and k = 3 for
stage 3 (two all-gathers and a reduce-scatter):

    one copy over all P ranks         k (P-1)/P 2N bytes over the slowest link
    a copy in each of n nodes of s    k (s-1)/s 2N bytes inside, then 2 (n-1)/n 2N between nodes

The last term is what a whole node sends: each of its s ranks all-reduces 1/s of the gradients.
Latencies are left out.

Source: Zhao et al. 2023 (PyTorch FSDP, arXiv:2304.11277), section 3.2.2, for hybrid sharding.
Held by: tests/exercises/13.py
"""

from typing import NamedTuple

from labcode.perf.state_memory import state_bytes

VALUE_BYTES = 2
OPTIMIZER_BYTES = 12


class Situation(NamedTuple):
    """A model and a cluster.

    Args:
        about: Description in words.
        num_parameters: Number of parameters of the model.
        num_layers: Number of equal units into which its weights are divided.
        nodes, ranks_per_node: Number of nodes of the cluster, and of ranks on each.
        room_bytes: Room of a rank in bytes, for weights, gradients and optimizer.
        inside_bytes_per_s: Bytes per second of the link between two ranks of a node.
        between_bytes_per_s: Bytes per second of the link of a node to another one.
    """

    about: str
    num_parameters: int
    num_layers: int
    nodes: int
    ranks_per_node: int
    room_bytes: float
    inside_bytes_per_s: float
    between_bytes_per_s: float


class Layout(NamedTuple):
    """A choice, with what it costs.

    Args:
        stage: Stage of ZeRO, 0 to 3.
        ranks_of_a_copy: Number of ranks over which a copy of the model is divided.
        kept_bytes: Bytes that each rank keeps.
        sending_s: Seconds of a step, if nothing is hidden behind computing.
    """

    stage: int
    ranks_of_a_copy: int
    kept_bytes: float
    sending_s: float


def candidates(situation: Situation) -> list[tuple[int, int]]:
    """(stage, ranks of a copy): every stage over all ranks, and stage 3 inside each node."""
    everyone = situation.nodes * situation.ranks_per_node
    over_all = [(stage, everyone) for stage in range(4)]
    return [*over_all, (3, situation.ranks_per_node)]


def cost_of(situation: Situation, stage: int, ranks_of_a_copy: int) -> Layout:
    """A layout with its costs."""
    kept = state_bytes(
        situation.num_parameters,
        stage,
        ranks_of_a_copy,
        weight_bytes=VALUE_BYTES,
        gradient_bytes=VALUE_BYTES,
        optimizer_bytes=OPTIMIZER_BYTES,
    ).total
    message_bytes = VALUE_BYTES * situation.num_parameters
    times = 2
    if stage == 3:
        times = 3
        kept += 2 * message_bytes / situation.num_layers  # the unit in use, and the next one
    link = situation.inside_bytes_per_s
    if ranks_of_a_copy > situation.ranks_per_node:
        link = min(link, situation.between_bytes_per_s)
    p = ranks_of_a_copy
    sending_s = times * (p - 1) / p * message_bytes / link
    copies = situation.nodes * situation.ranks_per_node // ranks_of_a_copy
    if copies > 1:
        between = 2 * (copies - 1) / copies * message_bytes
        sending_s += between / situation.between_bytes_per_s
    return Layout(stage, ranks_of_a_copy, kept, sending_s)


def best(situation: Situation) -> Layout:
    """The layout that sends for the shortest time among those that fit."""
    fitting = []
    for stage, ranks_of_a_copy in candidates(situation):
        layout = cost_of(situation, stage, ranks_of_a_copy)
        if layout.kept_bytes <= situation.room_bytes:
            fitting.append(layout)
    return min(fitting, key=_sending_s)


def _sending_s(layout: Layout) -> float:
    return layout.sending_s


BILLION = 10**9
CASES = (
    Situation("1 billion on 4 nodes", BILLION, 24, 4, 8, 60e9, 450e9, 200e9),
    Situation("7 billion on 4 nodes", 7 * BILLION, 32, 4, 8, 60e9, 450e9, 200e9),
    Situation("25 billion on 16 nodes", 25 * BILLION, 48, 16, 8, 60e9, 450e9, 200e9),
    Situation("70 billion on 64 nodes", 70 * BILLION, 80, 64, 8, 60e9, 450e9, 200e9),
    Situation("70 billion on 8 large nodes", 70 * BILLION, 80, 8, 72, 60e9, 900e9, 200e9),
    Situation("the same with fast links between", 70 * BILLION, 80, 8, 72, 60e9, 900e9, 3600e9),
    Situation("30 billion in 4 layers", 30 * BILLION, 4, 4, 16, 40e9, 900e9, 100e9),
    Situation("7 billion on one node", 7 * BILLION, 32, 1, 8, 60e9, 450e9, 200e9),
    Situation("7 billion on one node, less room", 7 * BILLION, 32, 1, 8, 20e9, 450e9, 200e9),
)
