"""Checks of lesson 07, communicator grids. Each assertion's text is a hint."""

import itertools
from dataclasses import replace

from labcode.perf import traffic as placement
from labcode.perf.flops import training_flops_per_sample
from labcode.recipes import gpt_shape
from labcode.teach.check import due
from labcode.topology import AXES, GridShape
from labcode.units import si

NVLINK, INFINIBAND = 450e9, 50e9  # bytes per second each way and GPU; sources in the lesson
ORDERS = ["-".join(order) for order in itertools.permutations(AXES)]

# ---- 7.1


def rank_of(my_rank) -> None:
    """The learner's `my_rank(shape, tp, cp, dp, pp)` for the order tp-cp-dp-pp."""
    shape = GridShape(dp=3, pp=2, cp=2, tp=4)
    assert due(my_rank(shape, 0, 0, 0, 0)) == 0, "all coordinates 0 is rank 0"
    for axis in ("tp", "cp", "dp", "pp"):
        found, wanted = (
            my_rank(shape, **dict.fromkeys(("tp", "cp", "dp", "pp"), 0) | {axis: 1}),
            shape.rank(**{axis: 1}),
        )
        assert found == wanted, (
            f"in {shape} one step along {axis} lands on rank {found}; it has to pass over all that the faster axes fill"
        )
    for other in (shape, GridShape(), GridShape(dp=5, tp=2), GridShape(pp=3, cp=4)):
        found = [my_rank(other, **other.coords(rank)) for rank in range(other.world_size)]
        twice = next((rank for rank in found if found.count(rank) > 1), None)
        assert twice is None, f"in {other} two places got rank {twice}"
        assert found == list(range(other.world_size)), f"in {other} the ranks come out as {found}"


# ---- 7.2


def groups_of(my_groups) -> None:
    """The learner's `my_groups(shape, axis)`, in any order of the groups."""
    shapes = [
        GridShape(dp=2, pp=2, tp=4),
        GridShape(dp=2, pp=2, tp=4, order="dp-pp-tp-cp"),
        GridShape(dp=3, cp=2, tp=2),
    ]
    for shape in shapes:
        for axis in AXES:
            groups, case = due(my_groups(shape, axis)), f"{axis} groups of {shape}: "
            groups = [due(list(group)) for group in groups]
            members = sorted(itertools.chain.from_iterable(groups))
            assert members == list(range(shape.world_size)), (
                case + "each rank belongs to exactly one group"
            )
            wrong = next((group for group in groups if len(group) != shape.size(axis)), None)
            assert wrong is None, (
                case
                + f"{wrong} should have {shape.size(axis)} ranks, the size of the axis: which coordinates do they share?"
            )
            assert sorted(sorted(group) for group in groups) == sorted(shape.groups(axis)), (
                case
                + f"they came out as {groups}; the ranks of a group agree in every coordinate but {axis}"
            )
            assert all(group == sorted(group) for group in groups), (
                case + f"{groups}: the ranks of a group ascend"
            )


# ---- 7.3


def _crossing(model, shape, ranks_per_node, global_batch):
    traffic = placement.step_traffic(model, shape, global_batch=global_batch)
    return sum(placement.across_nodes(sent, ranks_per_node) for sent in traffic.values())


def best_order(best, model) -> None:
    """The learner's `best(model, shape, ranks_per_node, global_batch)`: an order with the fewest bytes between nodes."""
    grid, flat = GridShape(dp=2, pp=2, cp=2, tp=2), GridShape(dp=2, pp=2, tp=4)
    for shape, ranks_per_node, batch in (
        (grid, 8, 256),
        (flat, 8, 256),
        (flat, 8, 4096),
        (flat, 4, 256),
        (grid, 2, 64),
    ):
        order = due(best(model, shape, ranks_per_node, batch))
        named = isinstance(order, str) and order in ORDERS
        assert named, (
            f"it returned {order!r}; an order is a text such as 'tp-cp-dp-pp' that names all four axes"
        )
        costs = {
            name: _crossing(model, replace(shape, order=name), ranks_per_node, batch)
            for name in ORDERS
        }
        found, least = costs[order], min(costs.values())
        assert found <= least * (1 + 1e-9), (
            f"{shape.world_size // ranks_per_node} nodes of {ranks_per_node}, batch {batch}: {order} sends {si(found, 'B')} "
            f"between nodes, another order {si(least, 'B')}; compare all 24, with the batch and the node size that are given"
        )


# ---- 7.4

GPUS, PER_NODE, BATCH, ROOM_BYTES, LOST_S = 64, 8, 512, 60e9, 0.45


def _lost_s(model, shape):
    """(seconds on the links, seconds that the stages of the pipeline stand idle) of one step, nothing overlapped."""
    node = [rank // PER_NODE for rank in range(GPUS)]
    on_links = 0.0
    for sent in placement.step_traffic(model, shape, global_batch=BATCH).values():
        times = (
            size / (NVLINK if node[a] == node[b] else INFINIBAND) for (a, b), size in sent.items()
        )
        on_links += max(times, default=0.0)  # in a ring the slowest link decides
    computing = training_flops_per_sample(model) * BATCH / GPUS / (0.4 * 989e12)
    return on_links, computing * (shape.pp - 1) / (BATCH // shape.dp)


def design(shape) -> None:
    """The learner's grid for 13 billion parameters on 64 GPUs, 8 to a node: it fits, and little time is lost."""
    shape, model = due(shape), gpt_shape("gpt_13b")
    assert isinstance(shape, GridShape), f"{shape!r} is not a GridShape"
    assert shape.world_size == GPUS, f"dp*pp*cp*tp = {shape.world_size}, and there are {GPUS} GPUs"
    try:
        on_links, idle = _lost_s(model, shape)
    except ValueError as error:
        raise AssertionError(str(error)) from None
    size = 16 * model.num_parameters / (shape.tp * shape.pp)
    assert size <= ROOM_BYTES, (
        f"weights and optimizer take {si(size, 'B')} on each GPU, {si(ROOM_BYTES, 'B')} are allowed"
    )
    advice = (
        "which axis sends most of that, and over which links?"
        if on_links > idle
        else "try fewer stages, or fewer copies"
    )
    assert on_links + idle <= LOST_S, (
        f"{shape}: {on_links:.2f} s on the links and {idle:.2f} s of idle stages, together above {LOST_S} s: {advice}"
    )
