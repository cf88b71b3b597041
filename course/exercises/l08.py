"""Checks of lesson 08, communicator grids."""

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from course.answer import Exercise, Hint, due
from course.exercises.expect import (
    TOLERANCE,
    careless,
    confirm,
    diagnose,
    distance,
    own_answers,
    refuse,
    run,
    settle,
    tensor,
    times,
)
from course.exercises.in_notebook import bounded, without
from course.exercises.simulated import Event, Outcome, here, simulate
from course.labs import l08_by_hand, l08_costs
from course.pool.ranks import Ranks
from labcode.comm.grid import Grid
from labcode.config import GPTConfig
from labcode.perf.alpha_beta import COLLECTIVES, bytes_sent
from labcode.recipes import gpt_shape
from labcode.runtime.units import si, type_in_words
from labcode.topology import AXES, GridShape

ORDERS = ["-".join(order) for order in itertools.permutations(AXES)]
TWO_LEVELS = own_answers(l08_by_hand.all_reduce_in_two_levels)
LOOP = "does the loop also end for an axis of size 1, and for rank 0?"


def _by_hand(function: Callable[..., Any], *args: Any) -> Any:
    """What a learner's function returns, written without the arithmetic of GridShape."""
    with without(GridShape.coords, GridShape.rank, GridShape.groups):
        return due(bounded(LOOP, function, *args))


def _sizes(shape: GridShape) -> dict[str, int]:
    return {axis: shape.size(axis) for axis in AXES}


def _changed(name: str, value: Any, before: Any) -> dict[str, bool]:
    """Row of a table: an argument is no longer what it was."""
    hint = f"it has changed `{name}`, which belongs to the caller: {before} has become {value}"
    return {hint: value != before}


# ---- 8.1

SHAPES = (
    GridShape(dp=2, pp=2, tp=4),
    GridShape(dp=2, pp=2, tp=4, order="dp-pp-tp-cp"),
    GridShape(dp=3, pp=2, cp=2, tp=4),
    GridShape(dp=3, cp=2, tp=2, order="pp-cp-tp-dp"),
    GridShape(),
)

Place = tuple[GridShape, int]  # a rank of a grid


def coords_of(my_coords: Callable[..., Any]) -> None:
    """The learner's `my_coords(rank, sizes, order)` -> {axis: coordinate}."""
    found: dict[Place, dict[str, int]] = {}
    for shape in SHAPES:
        for rank in range(shape.world_size):
            case = _case(shape, rank)
            sizes = _sizes(shape)
            coords = _by_hand(my_coords, rank, sizes, shape.order)
            found[shape, rank] = _plain_coords(case, shape, coords)
            refuse(_changed("sizes", sizes, _sizes(shape)), case)
    for (shape, rank), coords in found.items():
        expected = shape.coords(rank)
        wrong = [axis for axis in shape.axes if coords[axis] != expected[axis]]
        if wrong:
            case = f"{_case(shape, rank)}{wrong[0]} is not {coords[wrong[0]]}: "
            refuse(_coords_mistakes(found), case)


def _case(shape: GridShape, rank: int) -> str:
    return f"rank {rank} of {shape}: "


def _plain_coords(case: str, shape: GridShape, found: Any) -> dict[str, int]:
    """What the learner returned, with numbers of numpy or torch as plain ones."""
    if not isinstance(found, Mapping):
        raise Hint(f"{case}it returned {found!r}; give a dictionary {{axis: coordinate}}")
    missing = [axis for axis in AXES if axis not in found]
    others = sorted(set(found) - set(AXES), key=str)
    mistakes = {
        f"no coordinate for {', '.join(missing)}": missing,
        f"it names {others}, no axis": others,
    }
    refuse(mistakes, case)
    plain = {}
    for axis in AXES:
        last = shape.size(axis) - 1
        try:
            value = operator.index(found[axis])
        except TypeError:
            raise Hint(f"{case}{axis} is {found[axis]!r}, not a whole number") from None
        if not 0 <= value <= last:
            raise Hint(f"{case}{axis} is {value}, but its coordinates go from 0 to {last}")
        plain[axis] = value
    return plain


def _coords_mistakes(found: Mapping[Place, dict[str, int]]) -> dict[str, bool]:
    """What wrong coordinates have in common on all ranks of all grids."""
    backwards = {shape: "-".join(reversed(shape.axes)) for shape in SHAPES}
    in_one_order = False
    for order in ORDERS:
        in_one_order = in_one_order or _agree(found, dict.fromkeys(SHAPES, order))
    return {
        "the order is read backwards; its first axis is the fastest": _agree(found, backwards),
        "your coordinates are the same whatever `order` says": in_one_order,
        "how many ranks do the faster axes fill, before this axis moves on by one?": True,
    }


def _agree(found: Mapping[Place, dict[str, int]], order_of: Mapping[GridShape, str]) -> bool:
    """Whether these are the coordinates that the ranks have in other orders of the axes."""
    for (shape, rank), coords in found.items():
        if replace(shape, order=order_of[shape]).coords(rank) != coords:
            return False
    return True


# ---- 8.2

COMBINATIONS = (("tp",), ("dp",), ("pp",), ("dp", "cp"), ("cp", "tp"), AXES, ())


def groups_of(my_groups: Callable[..., Any]) -> None:
    """The learner's `my_groups(sizes, order, axes)`: all groups along one or several axes."""
    four_axes = GridShape(dp=2, pp=2, cp=2, tp=2)
    different = GridShape(dp=5, pp=2, tp=3)  # tells another order from other axes
    for shape in (different, *SHAPES[:4], four_axes, replace(four_axes, order="pp-tp-dp-cp")):
        for axes in COMBINATIONS:
            case = f"groups along {', '.join(axes) or 'no axis'} of {shape}: "
            sizes = _sizes(shape)
            groups = _as_lists(case, _by_hand(my_groups, sizes, shape.order, axes))
            _check_groups(case, shape, axes, groups)
            refuse(_changed("sizes", sizes, _sizes(shape)), case)


def _as_lists(case: str, groups: Any) -> list[list[int]]:
    """The learner's groups as lists; a dictionary or a flat list is told what is wanted."""
    wanted = "give a list of lists of ranks"
    if isinstance(groups, (Mapping, str, int)):
        kind = "dictionary" if isinstance(groups, Mapping) else type(groups).__name__
        raise Hint(f"{case}it returned a {kind}; {wanted}")
    found = []
    for group in groups:
        if isinstance(group, (int, str)):
            raise Hint(f"{case}{group!r} is no group; {wanted}")
        found.append([int(rank) for rank in due(group)])
    return found


def _check_groups(
    case: str, shape: GridShape, axes: Sequence[str], found: Sequence[list[int]]
) -> None:
    """Every rank is in one group, with those that agree in all other axes."""
    members = sorted(itertools.chain.from_iterable(found))
    twice = [rank for rank in members if members.count(rank) > 1]
    if twice:
        raise Hint(f"{case}rank {twice[0]} is in more than one group")
    missing = [rank for rank in range(shape.world_size) if rank not in members]
    if missing:
        raise Hint(f"{case}rank {missing[0]} is in no group")
    if len(members) > shape.world_size:
        raise Hint(f"{case}there is no rank {members[-1]}")
    ascending = [sorted(group) for group in found]
    truth = shape.groups(*axes)
    size = shape.size(*axes)
    in_which = "in which coordinates must the ranks of a group agree?"
    for order in ORDERS:
        of_order = replace(shape, order=order).groups(*axes)
        if sorted(ascending) == sorted(of_order) and sorted(of_order) != sorted(truth):
            raise Hint(
                f"{case}{found[0]} is a group of the order {order}: in which order do you read the "
                "axes, and which of them is the fastest?"
            )
    others = shape.groups(*[axis for axis in AXES if axis not in axes])
    are_others = sorted(ascending) == sorted(others)
    if are_others and sorted(others) != sorted(truth):
        raise Hint(f"{case}{found[0]} is a group along the other axes: {in_which}")
    for group in found:
        if len(group) != size:
            raise Hint(f"{case}{group} should have {size} ranks: {in_which}")
    for group in ascending:
        if group not in truth:
            raise Hint(f"{case}{group} do not belong together: {_why_apart(shape, group, axes)}")
    for group in found:
        if group != sorted(group):
            raise Hint(f"{case}in {group} the ranks do not ascend")


def _why_apart(shape: GridShape, group: Sequence[int], axes: Sequence[str]) -> str:
    """The axis along which two ranks of a group should agree, and do not."""
    first = shape.coords(group[0])
    for rank in group[1:]:
        coords = shape.coords(rank)
        for axis in AXES:
            if axis not in axes and coords[axis] != first[axis]:
                return f"ranks {group[0]} and {rank} differ in {axis}"
    return "other ranks belong to them"


# ---- 8.3

CONNECTED = GridShape(dp=2, tp=2)
OWN_ORDER = "each rank has the dictionary, and each set, in an order of its own"
ORDER_ON_RANK = (  # in which each rank has the dictionary, as from a set of names
    ("tp", "dp", "pp"),
    ("dp", "pp", "tp"),
    ("pp", "tp", "dp"),
    ("pp", "dp", "tp"),
)


class _Name(str):
    """An axis whose place in a `set` is that of this rank's own order, and not a matter of luck.

    Python hashes texts differently in each process, and alike on ranks that share one. So a loop
    over a set of them would be right here, and once in a while on real ranks.
    """

    __slots__ = ("place",)
    place: int

    def __hash__(self) -> int:
        return self.place

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True

    def __ne__(self, other: object) -> bool:
        return not self == other


def _in_own_order(rank: int) -> dict[str, list[list[int]]]:
    """{axis: its groups}, on each rank in another order of the axes."""
    return {axis: CONNECTED.groups(axis) for axis in ORDER_ON_RANK[rank]}


def _in_order_of_hashes(rank: int) -> dict[str, list[list[int]]]:
    """Like `_in_own_order`, and a `set` of its axes has the same order."""
    groups_of: dict[str, list[list[int]]] = {}
    for place, axis in enumerate(ORDER_ON_RANK[rank]):
        name = _Name(axis)
        name.place = place
        groups_of[name] = CONNECTED.groups(axis)
    return groups_of


def _connect(
    rank: int,
    connect: Callable[..., Any],
    groups_on: Callable[[int], dict[str, list[list[int]]]],
) -> dict[str, int]:
    """The sum of the ranks over each of this rank's groups, which the learner's code makes."""
    groups_of = groups_on(rank)
    kept = due(connect(rank, groups_of))
    refuse(_changed("groups_of", groups_of, groups_on(rank)))
    if not isinstance(kept, Mapping):
        raise Hint(f"it returned {type_in_words(kept)}; give a dictionary {{axis: group}}")
    here().note("connected")
    for axis in ORDER_ON_RANK[0]:
        _check_own(rank, axis, kept)
    sums = {}
    for axis in ORDER_ON_RANK[0]:
        total = torch.tensor(rank)
        dist.all_reduce(total, group=kept[axis])
        sums[axis] = total.item()
    return sums


def _check_own(rank: int, axis: str, kept: Mapping[str, Any]) -> None:
    """What is kept for an axis is this rank's own group."""
    if axis not in kept:
        raise Hint(f"it returns no group for {axis}")
    group = kept[axis]
    if isinstance(group, (list, tuple)):
        raise Hint(f"it keeps {group} for {axis}: keep what new_group returns for these ranks")
    if not isinstance(group, dist.ProcessGroup):
        raise Hint(
            f"it keeps a group for {axis} in which it is not: new_group returns something also to "
            "those who are not members"
        )
    members = dist.get_process_group_ranks(group)
    (own,) = [ranks for ranks in CONNECTED.groups(axis) if rank in ranks]
    if members != own:
        raise Hint(f"it keeps {members} for {axis}, and its group is {own}")


def connected(connect: Callable[..., Any], ranks: Ranks | None = None) -> str:
    """The learner's `connect(rank, groups_of)` -> {axis: this rank's group}, on four ranks."""
    ours = own_answers(Grid.create.__func__)
    outcome = simulate(4, _connect, connect, _in_own_order, ours=ours)
    _check_made(outcome)
    settle(outcome)
    with_sets = simulate(4, _connect, connect, _in_order_of_hashes, ours=ours)
    _check_in_one_order(with_sets)  # nothing else: such names are not found in other dictionaries
    return confirm(ranks, outcome, _connect, connect, _in_own_order)


def _check_made(outcome: Outcome) -> None:
    """Every group is made by all ranks, or by all its members; and in the same order."""
    for rank, made in enumerate(outcome.made):
        if not outcome.of(rank, "connected"):
            continue  # an error has stopped it
        if not made:
            raise Hint(f"rank {rank} makes no group: which call makes one?")
        by_members = any(_is_by_members(one) for one in made)
        groups = {one.group for one in made}
        for axis in ORDER_ON_RANK[0]:
            for members in CONNECTED.groups(axis):
                is_member = rank in members
                if tuple(members) in groups or (by_members and not is_member):
                    continue
                why = "" if is_member else ": it is no member, but a group is made by all ranks"
                raise Hint(f"rank {rank} does not make the group {members}{why}")
    _check_in_one_order(outcome)


def _check_in_one_order(outcome: Outcome) -> None:
    """Any two ranks make the groups that concern both in the same order.

    torch names a group by the number of groups before it, so one that its members make has the same
    name on all of them only if they have made as many.
    """
    for first, second in itertools.combinations(range(4), 2):
        ours = _shared(outcome.made[first], second)
        theirs = _shared(outcome.made[second], first)
        for number, (own, other) in enumerate(zip(ours, theirs)):
            if own.group != other.group:
                raise Hint(
                    f"call {number + 1} of new_group: rank {first} makes {list(own.group)}, rank "
                    f"{second} makes {list(other.group)}; {OWN_ORDER}"
                )
            if own.group_name != other.group_name:
                place = outcome.made[first].index(own) + 1
                other_place = outcome.made[second].index(other) + 1
                raise Hint(
                    f"{list(own.group)} is call {place} of new_group on rank {first} and call "
                    f"{other_place} on rank {second}, so they wait for each other; {OWN_ORDER}"
                )
        are_complete = outcome.of(first, "connected") and outcome.of(second, "connected")
        if are_complete and len(ours) != len(theirs):
            raise Hint(f"rank {first} makes {len(ours)} groups, rank {second} makes {len(theirs)}")


def _shared(made: Sequence[Event], other: int) -> list[Event]:
    """The groups in whose making another rank takes part."""
    return [one for one in made if other in one.group or not _is_by_members(one)]


def _is_by_members(made: Event) -> bool:
    """Whether only its members make a group, with `use_local_synchronization`."""
    return not made.group_name.isdigit()


# ---- 8.4

# tp holds the ranks of a node, dp those of one place in all nodes: neighbours share a node, or do
# not; one node; a GPU in each node; more than two of either
NODES = (
    GridShape(tp=2, dp=2),
    GridShape(tp=2, dp=2, order="dp-tp-cp-pp"),
    GridShape(tp=4),
    GridShape(dp=4),
    GridShape(tp=3, dp=2),
    GridShape(tp=2, dp=3),
)
LENGTH = 24  # of x; every node size above divides it


def _sum_of_nodes(rank: int, all_reduce: Callable[..., Any], nodes: GridShape) -> torch.Tensor:
    """What the learner's function returns on this rank."""
    grid = Grid.create(nodes)
    x = _numbers(rank)
    here().note("asked")
    total = due(all_reduce(x, grid.group("tp"), grid.group("dp")))
    tensor(total, x.shape)
    refuse(
        {
            "it has changed x, which belongs to the caller: return the sum in a new tensor": (
                not torch.equal(x, _numbers(rank))
            )
        }
    )
    return total


def _numbers(rank: int) -> torch.Tensor:
    """[LENGTH] of a rank, which the judge draws as well."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(LENGTH, generator=generator, dtype=torch.float64)


def in_two_levels(all_reduce: Callable[..., Any], ranks: Ranks | None = None) -> str:
    """The learner's `all_reduce_in_two_levels(x, inside, between)`: its sum, and its bytes."""
    for nodes in NODES:
        outcome = _run_on(nodes, all_reduce)
        for rank in range(nodes.world_size):
            events = outcome.parts(rank, "asked")[0]
            _check_in_levels(nodes, rank, events)
            _check_sum(nodes, rank, outcome.results[rank])
            _check_cheap(nodes, rank, events)
    return confirm(ranks, _run_on(NODES[0], all_reduce), _sum_of_nodes, all_reduce, NODES[0])


def _run_on(nodes: GridShape, all_reduce: Callable[..., Any]) -> Outcome:
    case = _nodes_text(nodes)
    return run(_sum_of_nodes, all_reduce, nodes, size=nodes.world_size, case=case, ours=TWO_LEVELS)


def _nodes_text(nodes: GridShape) -> str:
    return f"ranks of the nodes {nodes.groups('tp')}: "


def _check_sum(nodes: GridShape, rank: int, found: torch.Tensor) -> None:
    """The result is the sum over all ranks."""
    total = _sum_over(range(nodes.world_size))
    of_node = _sum_over(_members(nodes, "tp", rank))
    of_place = _sum_over(_members(nodes, "dp", rank))
    g = nodes.tp
    each = LENGTH // g
    is_right = []
    for part, right in zip(found.split(each), total.split(each)):
        is_right.append(distance(part, right) < TOLERANCE)
    diagnose(
        f"{_nodes_text(nodes)}on rank {rank}: ",
        found,
        total,
        {
            "it is the sum over the ranks of its own node: what do the other nodes add?": of_node,
            "it is the sum over one rank of each node: what do their neighbours add?": of_place,
            "it is x, and no sum": _numbers(rank),
            "it is {times:.3g} times the sum": times(total),
            f"{sum(is_right)} of its {g} parts are right: which part does each rank of the node "
            "have, and where does the all-gather put it?": any(is_right),
        },
    )


def _sum_over(ranks: Sequence[int]) -> torch.Tensor:
    return torch.stack([_numbers(one) for one in ranks]).sum(0)


def _members(nodes: GridShape, axis: str, rank: int) -> list[int]:
    (own,) = [members for members in nodes.groups(axis) if rank in members]
    return own


def _check_in_levels(nodes: GridShape, rank: int, events: Sequence[Event]) -> None:
    """Each collective is among the ranks of one node, or among one rank of each node."""
    node = set(_members(nodes, "tp", rank))
    place = set(_members(nodes, "dp", rank))
    for one in events:
        members = set(one.group)
        if one.kind in ("send", "recv", "barrier") or members <= node or members <= place:
            continue
        raise Hint(
            f"{_nodes_text(nodes)}{one.kind} over {list(one.group)}, which are several ranks of "
            "several nodes: inside a node first, then between them (without `group=` a call goes "
            "to all ranks)"
        )


def _check_cheap(nodes: GridShape, rank: int, events: Sequence[Event]) -> None:
    """A rank sends to other nodes what an all-reduce of its part of x needs, and no more."""
    calls = [one for one in events if len(one.group) > 1 and one.kind != "barrier"]
    refuse(careless(calls), _nodes_text(nodes))
    node = set(_members(nodes, "tp", rank))
    between = 0.0
    for one in calls:
        if _is_inside(one, node) or one.kind == "recv":
            continue
        known = one.kind in COLLECTIVES
        between += bytes_sent(one.kind, len(one.group), one.num_bytes) if known else one.num_bytes
    part = bytes_sent("all_reduce", nodes.dp, LENGTH * 8 / nodes.tp)
    if between > part * (1 + 1e-9):
        why = (
            f"the {nodes.tp} ranks of a node hold the same sum, so how much of it need each of "
            "them send?"
        )
        if nodes.tp > 1 and not _is_inside(calls[0], node):
            why = "you begin between the nodes, with all of x: scatter inside a node first"
        raise Hint(
            f"{_nodes_text(nodes)}the sum is right, but rank {rank} sends {between:g} B to other "
            f"nodes, and {part:g} B are enough: {why}"
        )


def _is_inside(one: Event, node: set[int]) -> bool:
    """Whether what a rank sends stays in its node."""
    return set(one.group) <= node or (one.kind == "send" and one.peer in node)


# ---- 8.5

GPUS = 64
BATCH = 512
ROOM_BYTES = 30e9  # for weights, gradients and optimizer of each GPU
LOST_S = 0.3  # of a step: on the links and idle


def design(shape: Any) -> None:
    """The learner's grid for 13 billion parameters on 64 GPUs; prints what it costs."""
    if not isinstance(shape, GridShape):
        raise Hint(
            f"my_grid is {shape!r:.60}, which is not a GridShape: write `GridShape(dp=.., ...)`"
        )
    if shape.world_size != GPUS:
        raise Hint(f"dp*pp*cp*tp = {shape.world_size}, and there are {GPUS} GPUs")
    model = gpt_shape("gpt_13b")
    try:
        found = l08_costs.costs(model, shape, BATCH)
    except ValueError as error:  # the model does not divide over this grid
        raise Hint(str(error)) from None
    print(l08_costs.table(found))
    if found.memory_bytes > ROOM_BYTES:
        raise Hint(
            f"weights and optimizer take {si(found.memory_bytes, 'B')} on each GPU, "
            f"{si(ROOM_BYTES, 'B')} are allowed"
        )
    if found.lost_s > LOST_S:
        link_s = sum(found.link_s.values())
        advice = _why_this_order(model, shape, found) or _where_it_is_lost(found)
        raise Hint(
            f"{shape}: {link_s:.2f} s on the links and {found.idle_s:.2f} s of idle stages, "
            f"together above {LOST_S} s: {advice}"
        )


def _where_it_is_lost(found: l08_costs.Costs) -> str:
    """What most of the lost time goes into."""
    if sum(found.link_s.values()) <= found.idle_s:
        return "most of it is idle time: try fewer stages, or more micro-batches"
    worst = max(found.link_s, key=lambda axis: found.link_s[axis])
    place = "over links that leave the node" if found.leaves_node[worst] else "inside the node"
    return f"most of it is spent by {worst}, {place}"


def _why_this_order(model: GPTConfig, shape: GridShape, found: l08_costs.Costs) -> str:
    """The axis for which another order of the same sizes would be good enough; "" if none is."""
    ordered = [l08_costs.costs(model, replace(shape, order=order), BATCH) for order in ORDERS]
    best = min(ordered, key=lambda costs: costs.lost_s)
    if best.lost_s > LOST_S:
        return ""
    worst = max(found.link_s, key=lambda axis: found.link_s[axis] - best.link_s[axis])
    return (
        f"the sizes are good, and in another order {worst} spends {best.link_s[worst]:.3f} s in "
        f"place of {found.link_s[worst]:.3f} s: which axes leave the node?"
    )


EXERCISES = {
    "8.1": Exercise(
        check=coords_of,
        praise="one division with remainder for each axis, in any order",
        hints=(
            "How do you turn 3725 seconds into hours, minutes and seconds?",
            "`divmod(rank, size)` gives what is left for the slower axes, and the coordinate.",
            "Which axis comes first: the one that changes at every rank, or the slowest one?",
        ),
    ),
    "8.2": Exercise(
        check=groups_of,
        praise="every rank once, along one axis, along several, and in every order",
        hints=(
            "Two ranks belong together if they agree in some coordinates. In which?",
            "Those coordinates, as a tuple, can be the key of a dictionary of lists.",
            'For `("dp", "cp")` the other two axes must agree. Which must agree for `()`?',
        ),
    ),
    "8.3": Exercise(
        check=connected,
        praise="all ranks make all groups in one order, and each keeps its own",
        hints=(
            "Which of the groups does a rank have to make: its own, or all?",
            "What is the same on all ranks: the order of the dictionary, or the names in it?",
            "Which order of the names could every rank find by itself, without asking the others?",
        ),
    ),
    "8.4": Exercise(
        check=in_two_levels,
        praise="each adapter carries its own part, and nothing twice",
        hints=(
            "After the first level each rank of a node should have a part of the node's sum. Which "
            "collective gives each rank one part of a sum?",
            "Which ranks have the same part of their node's sum? Those add them up.",
            "`list(x.chunk(p))` are p views of x. `dist.reduce_scatter` and `dist.all_gather` take "
            "such a list.",
        ),
    ),
    "8.5": Exercise(
        check=design,
        praise="it fits, and little time is lost beside 1.9 s of computing",
        hints=(
            "Which line of the table is the largest? Which size makes it smaller?",
            "tp spends seconds inside the node as well. How much of it do you need for the memory?",
            "The pipeline idles less if there are more micro-batches: batch/dp of them.",
        ),
    ),
}
