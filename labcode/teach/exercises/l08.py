"""Checks of lesson 08, communicator grids. The text of each assertion is a hint."""

import contextlib
import itertools
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from labcode.config import GPTConfig
from labcode.perf.traffic import across_nodes, step_traffic
from labcode.pool.ranks import RankError, Ranks
from labcode.recipes import gpt_shape
from labcode.teach.check import Exercise, due
from labcode.teach.labs import l08_costs
from labcode.topology import AXES, GridShape
from labcode.units import si

EXERCISES = {
    "8.1": Exercise(
        praise="one division with remainder for each axis, in any order",
        hints=(
            "How do you turn 3725 seconds into hours, minutes and seconds?",
            "`divmod(rank, size)` gives what is left for the slower axes, and the coordinate.",
            "Which axis comes first: the one that changes at every rank, or the slowest one?",
        ),
    ),
    "8.2": Exercise(
        praise="every rank once, along one axis, along several, and in every order",
        hints=(
            "Two ranks belong together if they agree in some coordinates. In which?",
            "Those coordinates, as a tuple, can be the key of a dictionary of lists.",
            'For `("dp", "cp")` the other two axes must agree. Which must agree for `()`?',
        ),
    ),
    "8.3": Exercise(
        praise="all ranks make all groups in one order, and each keeps its own",
        hints=(
            "Which of the groups does a rank have to make: its own, or all?",
            "What is the same on all ranks: the order of the dictionary, or the names in it?",
            "`sorted(groups_of)` gives the names of the axes in the order of the alphabet.",
        ),
    ),
    "8.4": Exercise(
        praise="the best of 24, for small and large batches and nodes",
        hints=(
            "`replace(shape, order=order)` is the same grid in another order.",
            "`step_traffic` gives one dictionary for each axis. What do you do with all four?",
            "The batch and the size of a node are arguments. Are both used?",
        ),
    ),
    "8.5": Exercise(
        praise="it fits, and little time is lost beside 3.4 s of computing",
        hints=(
            "Which line of the table is the largest? Which size makes it smaller?",
            "tp spends seconds inside the node as well. How much of it do you need for the memory?",
            "The pipeline idles less if there are more micro-batches: batch/dp of them.",
        ),
    ),
}

ORDERS = ["-".join(order) for order in itertools.permutations(AXES)]
PATIENCE_S = 5.0  # for answers that run in the notebook itself


@contextlib.contextmanager
def _bounded(hint: str) -> Iterator[None]:
    """Raise an AssertionError with `hint` if the block takes longer than `PATIENCE_S`."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread gets signals
        return

    def stop(*_: Any) -> None:
        raise AssertionError(f"it did not come to an end within {PATIENCE_S:g} s: {hint}")

    handler = signal.signal(signal.SIGALRM, stop)
    timer = signal.setitimer(signal.ITIMER_REAL, PATIENCE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


def _does_the_work(name: str) -> Callable[..., Any]:
    def stop(*_: Any, **__: Any) -> Any:
        raise AssertionError(f"GridShape.{name} does the work for you: use sizes and order")

    return stop


@contextlib.contextmanager
def _from_scratch() -> Iterator[None]:
    """Without the arithmetic of GridShape."""
    with contextlib.ExitStack() as stack:
        for name in ("coords", "rank", "groups"):
            stack.enter_context(mock.patch.object(GridShape, name, _does_the_work(name)))
        yield


def _sizes(shape: GridShape) -> dict[str, int]:
    return {axis: shape.size(axis) for axis in AXES}


# ---- 8.1

LOOP = "does the loop also end for an axis of size 1, and for rank 0?"

SHAPES = (
    GridShape(dp=2, pp=2, tp=4),
    GridShape(dp=2, pp=2, tp=4, order="dp-pp-tp-cp"),
    GridShape(dp=3, pp=2, cp=2, tp=4),
    GridShape(dp=3, cp=2, tp=2, order="pp-cp-tp-dp"),
    GridShape(),
)


def coords_of(my_coords: Callable[..., Any]) -> None:
    """The learner's `my_coords(rank, sizes, order)` -> {axis: coordinate}."""
    for shape in SHAPES:
        sizes = _sizes(shape)
        for rank in range(shape.world_size):
            with _bounded(LOOP), _from_scratch():
                found = due(my_coords(rank, dict(sizes), shape.order))
            _check_coords(shape, rank, found)


def _check_coords(shape: GridShape, rank: int, found: Any) -> None:
    case = f"rank {rank} of {shape}: "
    expected = shape.coords(rank)
    assert isinstance(found, Mapping), (
        case + f"it returned {found!r}; give a dictionary {{axis: coordinate}}"
    )
    missing = [axis for axis in AXES if axis not in found]
    assert not missing, case + f"no coordinate for {', '.join(missing)}"
    assert set(found) == set(AXES), case + f"it names {sorted(set(found) - set(AXES))}, no axis"
    for axis in AXES:
        value = found[axis]
        assert isinstance(value, int), case + f"{axis} is {value!r}, not a whole number"
        assert 0 <= value < shape.size(axis), (
            case + f"{axis} is {value}, but its coordinates go from 0 to {shape.size(axis) - 1}"
        )
    reversed_order = replace(shape, order="-".join(reversed(shape.axes)))
    is_backwards = dict(found) == reversed_order.coords(rank)
    assert dict(found) == expected or not is_backwards, (
        case + "these are the coordinates for the order read backwards: the first axis of the "
        "order is the fastest"
    )
    wrong = [axis for axis in shape.axes if found[axis] != expected[axis]]
    assert not wrong, (
        case + f"{wrong[0]} is not {found[wrong[0]]}: how many ranks do the faster axes fill, "
        "before this axis moves on by one?"
    )


# ---- 8.2

COMBINATIONS = (("tp",), ("dp",), ("pp",), ("dp", "cp"), ("cp", "tp"), AXES, ())


def groups_of(my_groups: Callable[..., Any]) -> None:
    """The learner's `my_groups(sizes, order, axes)`: all groups along one or several axes."""
    four_axes = GridShape(dp=2, pp=2, cp=2, tp=2)
    for shape in (*SHAPES[:4], four_axes, replace(four_axes, order="pp-tp-dp-cp")):
        sizes = _sizes(shape)
        for axes in COMBINATIONS:
            with _bounded(LOOP), _from_scratch():
                groups = due(my_groups(dict(sizes), shape.order, axes))
            _check_groups(shape, axes, groups)


def _check_groups(shape: GridShape, axes: Sequence[str], groups: Any) -> None:
    case = f"groups along {', '.join(axes) or 'no axis'} of {shape}: "
    found = _as_lists(case, groups)
    expected = shape.groups(*axes)
    members = sorted(itertools.chain.from_iterable(found))
    size = shape.size(*axes)
    twice = sorted({rank for rank in members if members.count(rank) > 1})
    assert not twice, case + f"rank {twice[0]} is in more than one group"
    missing = [rank for rank in range(shape.world_size) if rank not in members]
    assert not missing, case + f"rank {missing[0]} is in no group"
    assert len(members) == shape.world_size, case + f"there is no rank {members[-1]}"
    ascending = [sorted(group) for group in found]
    others = [axis for axis in AXES if axis not in axes]
    is_the_rest = sorted(ascending) == sorted(shape.groups(*others))
    assert not is_the_rest or sorted(ascending) == sorted(expected), (
        case + f"{found[0]} is a group along the other axes: in which coordinates must the ranks "
        "of a group agree?"
    )
    for group in found:
        assert len(group) == size, (
            case + f"{group} should have {size} ranks: in which coordinates must the ranks of "
            "a group agree?"
        )
    for group in ascending:
        assert group in expected, (
            case + f"{group} do not belong together: {_why(shape, group, axes)}"
        )
    assert found == ascending, case + f"in {_unsorted(found)} the ranks do not ascend"


def _as_lists(case: str, groups: Any) -> list[list[int]]:
    """The learner's groups as lists; a dictionary or a flat list is told what is wanted."""
    wanted = "give a list of lists of ranks"
    assert not isinstance(groups, (Mapping, str, int)), (
        case + f"it returned {groups!r:.60}; {wanted}"
    )
    found = []
    for group in groups:
        assert not isinstance(group, (int, str)), case + f"{group!r} is no group; {wanted}"
        found.append([int(rank) for rank in due(group)])
    return found


def _why(shape: GridShape, group: Sequence[int], axes: Sequence[str]) -> str:
    """The axis along which two ranks of a group should agree, and do not."""
    first = shape.coords(group[0])
    for rank in group[1:]:
        coords = shape.coords(rank)
        for axis in AXES:
            if axis not in axes and coords[axis] != first[axis]:
                return f"ranks {group[0]} and {rank} differ in {axis}"
    return "other ranks belong to them"


def _unsorted(groups: Sequence[Sequence[int]]) -> Sequence[int]:
    for group in groups:
        if list(group) != sorted(group):
            return group
    return groups[0]


# ---- 8.3

CONNECTED = GridShape(dp=2, tp=2)


class _Made(NamedTuple):
    """What stands for a group while the calls are only written down."""

    ranks: tuple[int, ...]


class _Rehearsal(NamedTuple):
    """What one rank would do: the groups that it makes, in order, and which it keeps."""

    made: list[tuple[int, ...]]
    kept: dict[str, Any]


def _in_own_order(rank: int) -> dict[str, list[list[int]]]:
    """{axis: its groups}, on rank 3 in another order of the axes, as from a set of names."""
    groups_of = {axis: CONNECTED.groups(axis) for axis in ("tp", "dp", "pp")}
    names = list(groups_of)
    if rank == 3:
        names.reverse()
    return {name: groups_of[name] for name in names}


def _rehearse(rank: int, connect: Callable[..., Any]) -> _Rehearsal:
    """The learner's calls of new_group on one rank, without making a group."""
    made = []

    def new_group(ranks: Sequence[int] | None = None, *_: Any, **__: Any) -> Any:
        members = tuple(ranks) if ranks is not None else tuple(range(dist.get_world_size()))
        made.append(members)
        if rank in members:
            return _Made(members)
        return dist.GroupMember.NON_GROUP_MEMBER

    with mock.patch.object(dist, "new_group", new_group):
        kept = due(connect(rank, _in_own_order(rank)))
    assert isinstance(kept, Mapping), f"it returned {kept!r:.60}; give a dictionary {{axis: group}}"
    plain = {}
    for axis, group in kept.items():
        plain[axis] = group.ranks if isinstance(group, _Made) else None
    return _Rehearsal(made, plain)


def _sums(rank: int, connect: Callable[..., Any]) -> dict[str, int]:
    """The sum of the ranks over each of this rank's groups."""
    groups = connect(rank, _in_own_order(rank))
    found = {}
    for axis in ("dp", "tp", "pp"):
        total = torch.tensor(rank)
        dist.all_reduce(total, group=groups[axis])
        found[axis] = total.item()
    return found


def connected(connect: Callable[..., Any], ranks: Ranks) -> None:
    """The learner's `connect(rank, groups_of)` -> {axis: this rank's group}, on four ranks."""
    rehearsals = ranks.run(_rehearse, connect)
    _check_made(rehearsals)
    for rank, rehearsal in enumerate(rehearsals):
        _check_kept(rank, rehearsal.kept)
    try:
        of_ranks = ranks.run(_sums, connect)
    except RankError as error:
        raise AssertionError(f"the groups do not work: {error}") from None
    for rank, sums in enumerate(of_ranks):
        for axis, found in sums.items():
            expected = sum(_own(rank, axis))
            assert found == expected, (
                f"the sum of the ranks over the {axis} group of rank {rank} is {found}, "
                f"not {expected}"
            )


def _own(rank: int, axis: str) -> list[int]:
    for group in CONNECTED.groups(axis):
        if rank in group:
            return group
    raise ValueError(rank)


def _check_made(rehearsals: Sequence[_Rehearsal]) -> None:
    """All ranks make all groups, in the same order."""
    first = rehearsals[0].made
    assert first, "rank 0 makes no group: which call makes one?"
    wanted = []
    for axis in ("tp", "dp", "pp"):
        wanted += [tuple(group) for group in CONNECTED.groups(axis)]
    for rank, rehearsal in enumerate(rehearsals):
        missing = [list(group) for group in wanted if group not in rehearsal.made]
        assert not missing or rank in missing[0], (
            f"rank {rank} does not make the group {missing[0]}: "
            "it is no member, but a group is made by all ranks"
        )
        assert not missing, f"rank {rank} does not make the group {missing[0]}"
        for number, (own, other) in enumerate(zip(rehearsal.made, first)):
            assert own == other, (
                f"call {number + 1} of new_group: rank 0 makes {list(other)}, rank {rank} makes "
                f"{list(own)}; each rank has the dictionary in an order of its own"
            )
        assert len(rehearsal.made) == len(first), (
            f"rank 0 makes {len(first)} groups, rank {rank} makes {len(rehearsal.made)}"
        )


def _check_kept(rank: int, kept: Mapping[str, Any]) -> None:
    for axis in ("tp", "dp", "pp"):
        assert axis in kept, f"rank {rank} returns no group for {axis}"
        assert kept[axis] is not None, (
            f"rank {rank} keeps a group for {axis} in which it is not: "
            "new_group returns something also to those who are not members"
        )
        expected = _own(rank, axis)
        assert list(kept[axis]) == expected, (
            f"rank {rank} keeps {list(kept[axis])} for {axis}, and its group is {expected}"
        )


# ---- 8.4


def _crossing(model: GPTConfig, shape: GridShape, ranks_per_node: int, global_batch: int) -> float:
    """Bytes between nodes in one step."""
    traffic = step_traffic(model, shape, global_batch=global_batch)
    return sum(across_nodes(sent, ranks_per_node) for sent in traffic.values())


CASES = (  # shape, ranks per node, global batch
    (GridShape(dp=2, pp=2, cp=2, tp=2), 8, 256),
    (GridShape(dp=2, pp=2, tp=4), 8, 256),
    (GridShape(dp=2, pp=2, tp=4), 8, 4096),
    (GridShape(dp=2, pp=2, tp=4), 4, 256),
    (GridShape(dp=2, pp=2, cp=2, tp=2), 2, 64),
    # in these two no order with the smallest largest axis has the smallest sum
    (GridShape(dp=4, pp=2, cp=2, tp=2), 4, 32),
    (GridShape(dp=2, pp=2, cp=2, tp=4), 2, 32),
)


def best_order(best: Callable[[GPTConfig, GridShape, int, int], Any], model: GPTConfig) -> None:
    """The learner's order of the axes with the fewest bytes between nodes.

    Args:
        best: `best(model, shape, ranks_per_node, global_batch)` -> "tp-cp-dp-pp", for instance.
        model: What is trained.
    """
    for shape, ranks_per_node, batch in CASES:
        order = due(best(model, shape, ranks_per_node, batch))
        assert not isinstance(order, (int, float)), (
            f"it returned {order!r}, which may be the bytes; the order is asked for"
        )
        is_order = isinstance(order, str) and order in ORDERS
        assert is_order, (
            f"it returned {order!r}; "
            "an order is a text such as 'tp-cp-dp-pp' that names all four axes"
        )
        costs = {}
        largest = {}
        for name in ORDERS:
            ordered = replace(shape, order=name)
            costs[name] = _crossing(model, ordered, ranks_per_node, batch)
            traffic = step_traffic(model, ordered, global_batch=batch)
            crossing = [across_nodes(sent, ranks_per_node) for sent in traffic.values()]
            largest[name] = max(crossing)
        _check_order(shape, ranks_per_node, batch, order, costs, largest)


def _check_order(
    shape: GridShape,
    ranks_per_node: int,
    batch: int,
    order: str,
    costs: Mapping[str, float],
    largest: Mapping[str, float],
) -> None:
    found = costs[order]
    least = min(costs.values())
    num_nodes = shape.world_size // ranks_per_node
    advice = "does the comparison use the batch and the node size that are given?"
    if found == max(costs.values()):
        advice = "it is the worst of all: is the smallest wanted, or the largest?"
    elif largest[order] <= min(largest.values()) * (1 + 1e-9):
        advice = "its largest axis is small, but the bytes of all axes count together"
    assert found <= least * (1 + 1e-9), (
        f"{num_nodes} nodes of {ranks_per_node}, batch {batch}: "
        f"{order} sends {si(found, 'B')} between nodes, another order {si(least, 'B')}; {advice}"
    )


# ---- 8.5

GPUS = 64
BATCH = 512
ROOM_BYTES = 60e9  # for weights, gradients and optimizer of each GPU
LOST_S = 0.45  # of a step: on the links and idle


def design(shape: Any) -> None:
    """The learner's grid for 13 billion parameters on 64 GPUs; prints what it costs."""
    shape = due(shape)
    assert isinstance(shape, GridShape), f"{shape!r} is not a GridShape"
    assert shape.world_size == GPUS, f"dp*pp*cp*tp = {shape.world_size}, and there are {GPUS} GPUs"
    model = gpt_shape("gpt_13b")
    try:
        found = l08_costs.costs(model, shape, BATCH)
    except ValueError as error:  # the model does not divide over this grid
        raise AssertionError(str(error)) from None
    print(l08_costs.table(found))
    assert found.memory_bytes <= ROOM_BYTES, (
        f"weights and optimizer take {si(found.memory_bytes, 'B')} on each GPU, "
        f"{si(ROOM_BYTES, 'B')} are allowed"
    )
    link_s = sum(found.link_s.values())
    advice = "most of it is idle time: try fewer stages, or more micro-batches"
    if link_s > found.idle_s:
        worst = max(found.link_s, key=lambda axis: found.link_s[axis])
        place = "over links that leave the node" if found.leaves_node[worst] else "inside the node"
        advice = f"most of it is spent by {worst}, {place}"
    assert found.lost_s <= LOST_S, (
        f"{shape}: {link_s:.2f} s on the links and {found.idle_s:.2f} s of idle stages, "
        f"together above {LOST_S} s: {advice}"
    )
