"""Checks of lesson 08, communicator grids. The text of each assertion is a hint."""

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from labcode.comm.grid import Grid, group_of
from labcode.config import GPTConfig
from labcode.perf.traffic import across_nodes, step_traffic
from labcode.pool.ranks import Ranks
from labcode.recipes import gpt_shape
from labcode.teach.check import Exercise, due
from labcode.teach.exercises.in_notebook import bounded
from labcode.teach.exercises.on_ranks import in_groups, without
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
            "Which order of the names could every rank find by itself, without asking the others?",
        ),
    ),
    "8.4": Exercise(
        praise="the best of 24, for small and large batches and nodes",
        hints=(
            "Ranks fill the nodes in order. On which node is rank 11, if a node holds 8 ranks?",
            "`replace(shape, order=order)` is the same grid in another order.",
            "`step_traffic` gives one dictionary for each axis. What do you do with all four?",
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


def _assert_kept(case: str, name: str, value: Any, before: Any) -> None:
    """An argument is still what it was."""
    assert value == before, (
        f"{case}it has changed `{name}`, which belongs to the caller: {before} has become {value}"
    )


# ---- 8.1

LOOP = "does the loop also end for an axis of size 1, and for rank 0?"

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
            sizes = _sizes(shape)
            with _from_scratch():
                coords = due(bounded(LOOP, my_coords, rank, sizes, shape.order))
            case = _case(shape, rank)
            found[shape, rank] = _plain_coords(case, shape, coords)
            _assert_kept(case, "sizes", sizes, _sizes(shape))
    _check_coords(found)


def _case(shape: GridShape, rank: int) -> str:
    return f"rank {rank} of {shape}: "


def _plain_coords(case: str, shape: GridShape, found: Any) -> dict[str, int]:
    """What the learner returned, with numbers of numpy or torch as plain ones."""
    assert isinstance(found, Mapping), (
        case + f"it returned {found!r}; give a dictionary {{axis: coordinate}}"
    )
    missing = [axis for axis in AXES if axis not in found]
    assert not missing, case + f"no coordinate for {', '.join(missing)}"
    assert set(found) == set(AXES), case + f"it names {sorted(set(found) - set(AXES))}, no axis"
    plain = {}
    for axis in AXES:
        try:
            value = operator.index(found[axis])
        except TypeError:
            raise AssertionError(case + f"{axis} is {found[axis]!r}, not a whole number") from None
        assert 0 <= value < shape.size(axis), (
            case + f"{axis} is {value}, but its coordinates go from 0 to {shape.size(axis) - 1}"
        )
        plain[axis] = value
    return plain


def _check_coords(found: Mapping[Place, dict[str, int]]) -> None:
    """The coordinates of all ranks of all grids, and what the mistake has in common."""
    for (shape, rank), coords in found.items():
        expected = shape.coords(rank)
        wrong = [axis for axis in shape.axes if coords[axis] != expected[axis]]
        assert not wrong, (
            _case(shape, rank) + f"{wrong[0]} is not {coords[wrong[0]]}: {_why_coords(found)}"
        )


def _why_coords(found: Mapping[Place, dict[str, int]]) -> str:
    def agree(order_of: Callable[[GridShape], str]) -> bool:
        """Whether these are the coordinates in another order, for every rank of every grid."""
        for (shape, rank), coords in found.items():
            if replace(shape, order=order_of(shape)).coords(rank) != coords:
                return False
        return True

    if agree(_backwards):
        return "the order is read backwards; its first axis is the fastest"
    for order in ORDERS:
        if agree(lambda shape, order=order: order):
            return "a grid has the same coordinates whatever its `order` says"
    return "how many ranks do the faster axes fill, before this axis moves on by one?"


def _backwards(shape: GridShape) -> str:
    return "-".join(reversed(shape.axes))


# ---- 8.2

COMBINATIONS = (("tp",), ("dp",), ("pp",), ("dp", "cp"), ("cp", "tp"), AXES, ())


def groups_of(my_groups: Callable[..., Any]) -> None:
    """The learner's `my_groups(sizes, order, axes)`: all groups along one or several axes."""
    four_axes = GridShape(dp=2, pp=2, cp=2, tp=2)
    for shape in (*SHAPES[:4], four_axes, replace(four_axes, order="pp-tp-dp-cp")):
        for axes in COMBINATIONS:
            sizes = _sizes(shape)
            with _from_scratch():
                groups = due(bounded(LOOP, my_groups, sizes, shape.order, axes))
            case = f"groups along {', '.join(axes) or 'no axis'} of {shape}: "
            _check_groups(case, shape, axes, groups)
            _assert_kept(case, "sizes", sizes, _sizes(shape))


def _check_groups(case: str, shape: GridShape, axes: Sequence[str], groups: Any) -> None:
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


OWN_ORDER = "each rank has the dictionary, and each set, in an order of its own"

ORDER_ON_RANK = (  # in which each rank has the dictionary, as from a set of names
    ("tp", "dp", "pp"),
    ("dp", "pp", "tp"),
    ("pp", "tp", "dp"),
    ("pp", "dp", "tp"),
)


class _Name(str):
    """An axis whose place in a `set` is that of this rank's own order, and not a matter of luck.

    Python hashes texts differently in each process. So a loop over a set of them takes four ranks
    through the same order once in a while, and would be right then.
    """

    __slots__ = ("place",)
    place: int

    def __hash__(self) -> int:
        return self.place

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True

    def __ne__(self, other: object) -> bool:
        return not self == other


def _name(text: str, place: int) -> _Name:
    name = _Name(text)
    name.place = place
    return name


class _Made(NamedTuple):
    """One group that a rank asked for.

    Args:
        ranks: Its members.
        by_members: Whether only they have to ask (`use_local_synchronization`).
    """

    ranks: tuple[int, ...]
    by_members: bool


class _Rehearsal(NamedTuple):
    """What one rank would do.

    Args:
        made: The groups that it asks for, in order.
        made_with_sets: The same where the order of a `set` is this rank's own; None if the code
            does not work with such names.
        kept: {axis: the members of the group that it returns; None for what is no group}.
    """

    made: list[_Made]
    made_with_sets: list[_Made] | None
    kept: dict[str, Any]


def _in_own_order(rank: int) -> dict[str, list[list[int]]]:
    """{axis: its groups}, on each rank in another order of the axes."""
    return {axis: CONNECTED.groups(axis) for axis in ORDER_ON_RANK[rank]}


def _in_order_of_hashes(rank: int) -> dict[str, list[list[int]]]:
    """As `_in_own_order`, and a `set` of its axes has the same order."""
    groups_of: dict[str, list[list[int]]] = {}
    for place, axis in enumerate(ORDER_ON_RANK[rank]):
        groups_of[_name(axis, place)] = CONNECTED.groups(axis)
    return groups_of


def _call(rank: int, connect: Callable[..., Any]) -> Mapping[str, Any]:
    """What the learner's function returns; labcode's own is refused."""
    groups_of = _in_own_order(rank)
    with without(Grid.create.__func__):
        kept = due(connect(rank, groups_of))
    _assert_kept("", "groups_of", groups_of, _in_own_order(rank))
    assert isinstance(kept, Mapping), f"it returned {kept!r:.60}; give a dictionary {{axis: group}}"
    return kept


def _rehearse(group: dist.ProcessGroup, connect: Callable[..., Any]) -> _Rehearsal:
    """The learner's calls on this rank, with groups that the check has made beforehand.

    So they are real groups, with a rank, a size and members, and nobody waits for a rank that asks
    for the groups in another order. Whatever way of torch's the learner takes, it ends in the one
    function that is replaced here.
    """
    rank = group.rank()
    ready = {}
    for size in range(1, group.size() + 1):
        for members in itertools.combinations(range(group.size()), size):
            ready[members] = group_of(members)
    made = []

    def hand_out(ranks: Sequence[int] | None = None, *_: Any, **options: Any) -> Any:
        members = tuple(sorted(ranks)) if ranks is not None else tuple(range(group.size()))
        made.append(_Made(members, bool(options.get("use_local_synchronization"))))
        own = ready[members]
        return dist.GroupMember.NON_GROUP_MEMBER if own is None else own

    made_with_sets: list[_Made] | None = None
    with mock.patch.object(dist.distributed_c10d, "_new_group_with_tag", hand_out):
        kept = _call(rank, connect)
        made_first = list(made)
        made.clear()
        with contextlib.suppress(Exception):  # such names are not found in other dictionaries
            connect(rank, _in_order_of_hashes(rank))
            made_with_sets = list(made)
    members_of = {}
    for axis, own in kept.items():
        is_group = isinstance(own, dist.ProcessGroup)
        members_of[axis] = dist.get_process_group_ranks(own) if is_group else None
    return _Rehearsal(made_first, made_with_sets, members_of)


def _sums(group: dist.ProcessGroup, connect: Callable[..., Any]) -> dict[str, int]:
    """The sum of the ranks over each of this rank's groups, which the learner's code makes."""
    rank = group.rank()
    groups = _call(rank, connect)
    found = {}
    for axis in ("dp", "tp", "pp"):
        total = torch.tensor(rank)
        dist.all_reduce(total, group=groups[axis])
        found[axis] = total.item()
    return found


def connected(connect: Callable[..., Any], ranks: Ranks) -> None:
    """The learner's `connect(rank, groups_of)` -> {axis: this rank's group}, on four ranks."""
    world = (tuple(range(CONNECTED.world_size)),)
    (rehearsals,) = in_groups(ranks, world, _rehearse, connect)
    _check_made(rehearsals)
    for rank, rehearsal in enumerate(rehearsals):
        _check_kept(rank, rehearsal.kept)
    (of_ranks,) = in_groups(ranks, world, _sums, connect)
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
    """Every group is made by all ranks, or by all its members; and in the same order."""
    assert rehearsals[0].made, "rank 0 makes no group: which call makes one?"
    for rank, rehearsal in enumerate(rehearsals):
        _check_complete(rank, rehearsal.made)
    _check_same_order([rehearsal.made for rehearsal in rehearsals])
    with_sets = [rehearsal.made_with_sets for rehearsal in rehearsals]
    if None not in with_sets:
        _check_same_order([made for made in with_sets if made is not None])


def _check_complete(rank: int, made: Sequence[_Made]) -> None:
    by_all = [group.ranks for group in made if not group.by_members]
    by_members = [group.ranks for group in made if group.by_members]
    for axis in ("tp", "dp", "pp"):
        for group in CONNECTED.groups(axis):
            if tuple(group) in by_members:
                continue
            is_member = rank in group
            if by_members and not is_member:
                continue  # its members make it by themselves
            assert tuple(group) in by_all or is_member, (
                f"rank {rank} does not make the group {group}: "
                "it is no member, but a group is made by all ranks"
            )
            assert tuple(group) in by_all, f"rank {rank} does not make the group {group}"


def _check_same_order(made: Sequence[Sequence[_Made]]) -> None:
    """Any two ranks make the groups that concern both in the same order."""
    for first, second in itertools.combinations(range(len(made)), 2):
        ours = _shared(made[first], second)
        theirs = _shared(made[second], first)
        for number, (own, other) in enumerate(zip(ours, theirs)):
            assert own == other, (
                f"call {number + 1} of new_group: rank {first} makes {list(own.ranks)}, rank "
                f"{second} makes {list(other.ranks)}; {OWN_ORDER}"
            )
        assert len(ours) == len(theirs), (
            f"rank {first} makes {len(ours)} groups, rank {second} makes {len(theirs)}"
        )
        for group in ours:
            if not group.by_members:
                continue
            here = _number_of(group, made[first])
            there = _number_of(group, made[second])
            assert here == there, (
                f"{list(group.ranks)} is call {here} of new_group on rank {first} and call {there} "
                f"on rank {second}, so they wait for each other; {OWN_ORDER}"
            )


def _number_of(group: _Made, made: Sequence[_Made]) -> int:
    """Which call made it, from 1: torch puts the number of a rank's groups into such a name."""
    return 1 + made.index(group)


def _shared(made: Sequence[_Made], other: int) -> list[_Made]:
    """The groups in whose making another rank takes part."""
    return [group for group in made if not group.by_members or other in group.ranks]


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

LINKS = {(0, 1): 5.0, (1, 0): 7.0, (3, 4): 11.0, (4, 3): 13.0, (7, 8): 17.0, (2, 13): 19.0}


def _check_crossing(crossing: Callable[..., Any]) -> None:
    """The learner's bytes of the links whose ends are on different nodes."""
    for ranks_per_node in (8, 4, 2, 1):
        sent = dict(LINKS)
        with without(across_nodes):
            found = due(bounded("does your loop end?", crossing, sent, ranks_per_node))
        case = f"my_crossing with nodes of {ranks_per_node}, links {LINKS}: "
        _assert_kept(case, "sent", sent, LINKS)
        expected = across_nodes(LINKS, ranks_per_node)
        inside = sum(LINKS.values()) - expected
        is_number = isinstance(found, (int, float))
        assert is_number, case + f"it returned {found!r:.60}; one number of bytes is asked for"
        assert found == expected or found != inside, (
            case + f"{found:g} B stay inside the nodes: those that cross are asked for"
        )
        assert found == expected, (
            case + f"it gives {found:g} B, and {expected:g} B cross: on which node is each rank?"
        )


class _Case(NamedTuple):
    """What an order is asked for."""

    model: GPTConfig
    shape: GridShape
    ranks_per_node: int
    batch: int


def _cases() -> list[_Case]:
    model = gpt_shape("gpt_7b")
    four_axes = GridShape(dp=2, pp=2, cp=2, tp=2)
    without_cp = GridShape(dp=2, pp=2, tp=4)
    return [
        _Case(model, four_axes, 8, 256),
        _Case(model, without_cp, 8, 256),
        _Case(model, without_cp, 8, 4096),
        _Case(model, without_cp, 4, 256),
        _Case(model, four_axes, 2, 64),
        # in these two no order with the smallest largest axis has the smallest sum
        _Case(model, GridShape(dp=4, pp=2, cp=2, tp=2), 4, 32),
        _Case(model, GridShape(dp=2, pp=2, cp=2, tp=4), 2, 32),
        # with scatter/gather another order would be the best
        _Case(model, without_cp, 8, 1024),
        # where pp and dp send the same bytes depends on the model: 400 and 600 sequences
        _Case(model, without_cp, 8, 512),
        _Case(gpt_shape("gpt_13b"), without_cp, 8, 512),
    ]


OfAxes = dict[str, float]  # {axis: bytes that cross}
Costs = dict[str, OfAxes]  # of each order


def _crossing_of(case: _Case, **how: Any) -> Costs:
    """{order: {axis: bytes between nodes in one step}}."""
    costs = {}
    for order in ORDERS:
        traffic = step_traffic(
            case.model, replace(case.shape, order=order), global_batch=case.batch, **how
        )
        crossing = {}
        for axis, sent in traffic.items():
            crossing[axis] = across_nodes(sent, case.ranks_per_node)
        costs[order] = crossing
    return costs


def _total(crossing: OfAxes) -> float:
    return sum(crossing.values())


def best_order(
    crossing: Callable[[Mapping[tuple[int, int], float], int], Any],
    best: Callable[[GPTConfig, GridShape, int, int], Any],
) -> None:
    """The learner's order of the axes with the fewest bytes between nodes.

    Args:
        crossing: `crossing({(sender, receiver): bytes}, ranks_per_node)` -> bytes between nodes.
        best: `best(model, shape, ranks_per_node, global_batch)` -> "tp-cp-dp-pp", for instance.
    """
    assert crossing is not None, "my_crossing is None: write a function"
    assert best is not None, "best_order is None: write a function"
    _check_crossing(crossing)
    cases = _cases()
    orders = []
    for case in cases:
        with without(across_nodes):
            order = due(bounded("does your loop end?", best, *case))
        assert not isinstance(order, (int, float)), (
            f"it returned {order!r}, which may be the bytes; the order is asked for"
        )
        is_order = isinstance(order, str) and order in ORDERS
        assert is_order, (
            f"it returned {order!r}; "
            "an order is a text such as 'tp-cp-dp-pp' that names all four axes"
        )
        orders.append(order)
    all_costs = [_crossing_of(case) for case in cases]
    for case, order, costs in zip(cases, orders, all_costs):
        found = _total(costs[order])
        least = min(_total(crossing) for crossing in costs.values())
        num_nodes = case.shape.world_size // case.ranks_per_node
        assert found <= least * (1 + 1e-9), (
            f"{num_nodes} nodes of {case.ranks_per_node}, batch {case.batch}: {order} sends "
            f"{si(found, 'B')} between nodes, another order {si(least, 'B')}; "
            f"{_why_order(cases, orders, all_costs)}"
        )


def _why_order(cases: Sequence[_Case], orders: Sequence[str], all_costs: Sequence[Costs]) -> str:
    """What the orders of all cases have in common: the mistake that would give them."""

    def chosen(
        cost: Callable[[OfAxes], float] = _total,
        allowed: Callable[[str], bool] = lambda order: True,
        of_cases: Sequence[Costs] = all_costs,
    ) -> bool:
        """Whether every order is the best by this cost, among those that are allowed."""
        for order, costs in zip(orders, of_cases):
            least = min(cost(costs[name]) for name in ORDERS if allowed(name))
            if not allowed(order) or cost(costs[order]) > least + abs(least) * 1e-9:
                return False
        return True

    if len(set(orders)) == 1:
        return f"you choose {orders[0]} whatever is asked: does each order get a grid of its own?"
    if chosen(cost=lambda crossing: -_total(crossing)):
        return "it is the worst of all: is the smallest wanted, or the largest?"
    for axis in AXES:
        for place, where in ((-1, "ends with"), (0, "begins with")):
            if chosen(allowed=lambda name, a=axis, p=place: name.split("-")[p] == a):
                return f"every order that you choose {where} {axis}: are all 24 tried?"
    if chosen(cost=lambda crossing: max(crossing.values())):
        return "its largest axis is small, but the bytes of all axes count together"
    if chosen(of_cases=[_crossing_of(case, scatter_gather=True) for case in cases]):
        return "with scatter/gather it is the best, and here the whole of act is sent"
    one_model = [_crossing_of(case._replace(model=cases[0].model)) for case in cases]
    if chosen(of_cases=one_model):
        return "for another model it is the best: is it the argument `model` that is asked?"
    for setting, value in (("value_bytes", 4), ("gradient_bytes", 2)):
        if chosen(of_cases=[_crossing_of(case, **{setting: value}) for case in cases]):
            return f"with {setting}={value} it is the best: leave step_traffic's settings alone"
    for axes in (("tp", "dp", "pp"), ("tp", "dp"), ("tp", "pp"), ("tp",)):
        if chosen(cost=lambda crossing, axes=axes: sum(crossing[axis] for axis in axes)):
            return f"by {' and '.join(axes)} alone it is the best: do all axes count?"
    return "does the comparison use the model, the batch and the node size that are given?"


# ---- 8.5

GPUS = 64
BATCH = 512
ROOM_BYTES = 60e9  # for weights, gradients and optimizer of each GPU
LOST_S = 0.45  # of a step: on the links and idle


def design(shape: Any) -> None:
    """The learner's grid for 13 billion parameters on 64 GPUs; prints what it costs."""
    if shape is ...:
        raise NotImplementedError("exercise")
    assert isinstance(shape, GridShape), (
        f"my_grid is {shape!r:.60}, which is not a GridShape: write `GridShape(dp=.., ...)`"
    )
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
    if found.lost_s > LOST_S:
        advice = _why_this_order(model, shape, found) or advice
    assert found.lost_s <= LOST_S, (
        f"{shape}: {link_s:.2f} s on the links and {found.idle_s:.2f} s of idle stages, "
        f"together above {LOST_S} s: {advice}"
    )


def _why_this_order(model: GPTConfig, shape: GridShape, found: l08_costs.Costs) -> str:
    """The axis for which another order of the same sizes would be good enough; "" if none is."""
    ordered = [replace(shape, order=order) for order in ORDERS]
    best = min(
        (l08_costs.costs(model, other, BATCH) for other in ordered), key=lambda costs: costs.lost_s
    )
    if best.lost_s > LOST_S:
        return ""
    worst = max(found.link_s, key=lambda axis: found.link_s[axis] - best.link_s[axis])
    return (
        f"the sizes are good, and in another order {worst} spends {best.link_s[worst]:.3f} s in "
        f"place of {found.link_s[worst]:.3f} s: which axes leave the node?"
    )
