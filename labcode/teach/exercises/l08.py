"""Checks of lesson 08, communicator grids. The text of each assertion is a hint."""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from labcode.config import GPTConfig
from labcode.perf.flops import training_flops_per_sample
from labcode.perf.traffic import across_nodes, step_traffic
from labcode.recipes import gpt_shape
from labcode.teach.check import Exercise, due
from labcode.topology import AXES, GridShape
from labcode.units import si

EXERCISES = {
    "8.1": Exercise("no rank twice, none left out"),
    "8.2": Exercise("a partition along every axis, in every order"),
    "8.3": Exercise("the best of 24, for small and large batches and nodes"),
    "8.4": Exercise("it fits, and communication and idling cost little beside 3.4 s of computing"),
}

# Bytes per second each way and GPU; sources in the lesson.
NVLINK = 450e9
INFINIBAND = 50e9

ORDERS = ["-".join(order) for order in itertools.permutations(AXES)]


# ---- 8.1


def rank_of(my_rank: Callable[..., Any]) -> None:
    """The learner's `my_rank(shape, tp, cp, dp, pp)` for the order tp-cp-dp-pp."""
    shape = GridShape(dp=3, pp=2, cp=2, tp=4)
    assert due(my_rank(shape, 0, 0, 0, 0)) == 0, "all coordinates 0 is rank 0"
    for axis in ("tp", "cp", "dp", "pp"):
        coords = dict.fromkeys(AXES, 0)
        coords[axis] = 1
        found = my_rank(shape, **coords)
        assert found == shape.rank(**coords), (
            f"in {shape} one step along {axis} lands on rank {found}; "
            "it has to pass over all that the faster axes fill"
        )
    for other in (shape, GridShape(), GridShape(dp=5, tp=2), GridShape(pp=3, cp=4)):
        found = [my_rank(other, **other.coords(rank)) for rank in range(other.world_size)]
        twice = _first_repeated(found)
        assert twice is None, f"in {other} two places got rank {twice}"
        assert found == list(range(other.world_size)), f"in {other} the ranks come out as {found}"


def _first_repeated(ranks: list) -> Any:
    for rank in ranks:
        if ranks.count(rank) > 1:
            return rank
    return None


# ---- 8.2


def groups_of(my_groups: Callable[[GridShape, str], Any]) -> None:
    """The learner's `my_groups(shape, axis)`, in any order of the groups."""
    shapes = (
        GridShape(dp=2, pp=2, tp=4),
        GridShape(dp=2, pp=2, tp=4, order="dp-pp-tp-cp"),
        GridShape(dp=3, cp=2, tp=2),
    )
    for shape, axis in itertools.product(shapes, AXES):
        groups = due(my_groups(shape, axis))
        _check_groups(shape, axis, groups)


def _check_groups(shape: GridShape, axis: str, groups: Iterable) -> None:
    case = f"{axis} groups of {shape}: "
    found = [due(list(group)) for group in groups]
    members = sorted(itertools.chain.from_iterable(found))
    assert members == list(range(shape.world_size)), case + "each rank belongs to exactly one group"
    for group in found:
        assert len(group) == shape.size(axis), (
            case + f"{group} should have {shape.size(axis)} ranks, the size of the axis: "
            "which coordinates do they share?"
        )
    ascending = [sorted(group) for group in found]
    assert sorted(ascending) == sorted(shape.groups(axis)), (
        case + f"they came out as {found}; "
        f"the ranks of a group agree in every coordinate but {axis}"
    )
    assert found == ascending, case + f"{found}: the ranks of a group ascend"


# ---- 8.3


def _crossing(model: GPTConfig, shape: GridShape, ranks_per_node: int, global_batch: int) -> float:
    """Bytes between nodes in one step."""
    traffic = step_traffic(model, shape, global_batch=global_batch)
    return sum(across_nodes(sent, ranks_per_node) for sent in traffic.values())


def best_order(best: Callable[[GPTConfig, GridShape, int, int], Any], model: GPTConfig) -> None:
    """The learner's order of the axes with the fewest bytes between nodes.

    Args:
        best: `best(model, shape, ranks_per_node, global_batch)` -> "tp-cp-dp-pp", for instance.
        model: What is trained.
    """
    grid = GridShape(dp=2, pp=2, cp=2, tp=2)
    flat = GridShape(dp=2, pp=2, tp=4)
    cases = (  # shape, ranks per node, global batch
        (grid, 8, 256),
        (flat, 8, 256),
        (flat, 8, 4096),
        (flat, 4, 256),
        (grid, 2, 64),
    )
    for shape, ranks_per_node, batch in cases:
        order = due(best(model, shape, ranks_per_node, batch))
        is_order = isinstance(order, str) and order in ORDERS
        assert is_order, (
            f"it returned {order!r}; "
            "an order is a text such as 'tp-cp-dp-pp' that names all four axes"
        )
        costs = {}
        for name in ORDERS:
            ordered = replace(shape, order=name)
            costs[name] = _crossing(model, ordered, ranks_per_node, batch)
        found = costs[order]
        least = min(costs.values())
        num_nodes = shape.world_size // ranks_per_node
        assert found <= least * (1 + 1e-9), (
            f"{num_nodes} nodes of {ranks_per_node}, batch {batch}: "
            f"{order} sends {si(found, 'B')} between nodes, another order {si(least, 'B')}; "
            "compare all 24, with the batch and the node size that are given"
        )


# ---- 8.4

GPUS = 64
PER_NODE = 8
BATCH = 512
ROOM_BYTES = 60e9  # for weights and optimizer, of each GPU
LOST_S = 0.45  # of a step: on the links and idle
FLOPS_PER_S = 0.4 * 989e12  # of a GPU


def _link_s(model: GPTConfig, shape: GridShape) -> float:
    """Seconds of a step on the links, nothing overlapped."""
    total = 0.0
    for sent in step_traffic(model, shape, global_batch=BATCH).values():
        slowest = 0.0  # in a ring the slowest link decides
        for (source, target), num_bytes in sent.items():
            is_inside = source // PER_NODE == target // PER_NODE
            bytes_per_s = NVLINK if is_inside else INFINIBAND
            slowest = max(slowest, num_bytes / bytes_per_s)
        total += slowest
    return total


def _idle_s(model: GPTConfig, shape: GridShape) -> float:
    """Seconds of a step that the stages of the pipeline stand idle."""
    compute_s = training_flops_per_sample(model) * BATCH / GPUS / FLOPS_PER_S
    micro_batches = BATCH // shape.dp
    return compute_s * (shape.pp - 1) / micro_batches


def design(shape: GridShape) -> None:
    """The learner's grid for 13 billion parameters on 64 GPUs: it fits, and little time is lost."""
    shape = due(shape)
    assert isinstance(shape, GridShape), f"{shape!r} is not a GridShape"
    assert shape.world_size == GPUS, f"dp*pp*cp*tp = {shape.world_size}, and there are {GPUS} GPUs"
    model = gpt_shape("gpt_13b")
    try:
        link_s = _link_s(model, shape)
    except ValueError as error:  # the model does not divide over this grid
        raise AssertionError(str(error)) from None
    idle_s = _idle_s(model, shape)
    size = 16 * model.num_parameters / (shape.tp * shape.pp)  # bytes a parameter, as in the lesson
    assert size <= ROOM_BYTES, (
        f"weights and optimizer take {si(size, 'B')} on each GPU, {si(ROOM_BYTES, 'B')} are allowed"
    )
    advice = "try fewer stages, or fewer copies"
    if link_s > idle_s:
        advice = "which axis sends most of that, and over which links?"
    assert link_s + idle_s <= LOST_S, (
        f"{shape}: {link_s:.2f} s on the links and {idle_s:.2f} s of idle stages, "
        f"together above {LOST_S} s: {advice}"
    )
