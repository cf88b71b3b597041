"""Checks of lesson 08, communicator grids."""

import functools
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from labcode.comm.grid import Grid
from labcode.config import GPTConfig
from labcode.perf.traffic import across_nodes, step_traffic
from labcode.pool.ranks import Ranks
from labcode.recipes import gpt_shape
from labcode.teach.check import Exercise, Hint, due
from labcode.teach.exercises.expect import confirm, own_answers, refuse, settle
from labcode.teach.exercises.in_notebook import bounded, without
from labcode.teach.exercises.simulated import Event, Outcome, here, simulate
from labcode.teach.labs import l08_costs
from labcode.topology import AXES, GridShape
from labcode.units import si

ORDERS = ["-".join(order) for order in itertools.permutations(AXES)]
LOOP = "does the loop also end for an axis of size 1, and for rank 0?"


def _by_hand(function: Callable[..., Any], *args: Any) -> Any:
    """What a learner's function returns, written without the arithmetic of GridShape."""
    with without(GridShape.coords, GridShape.rank, GridShape.groups):
        return due(bounded(LOOP, function, *args))


def _sizes(shape: GridShape) -> dict[str, int]:
    return {axis: shape.size(axis) for axis in AXES}


def _changed(name: str, value: Any, before: Any) -> dict[str, bool]:
    """As a row of a table: an argument is no longer what it was."""
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
        "a grid has the same coordinates whatever its `order` says": in_one_order,
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
    for shape in (*SHAPES[:4], four_axes, replace(four_axes, order="pp-tp-dp-cp")):
        for axes in COMBINATIONS:
            case = f"groups along {', '.join(axes) or 'no axis'} of {shape}: "
            sizes = _sizes(shape)
            groups = _as_lists(case, _by_hand(my_groups, sizes, shape.order, axes))
            _are_groups(case, shape, axes, groups)
            refuse(_changed("sizes", sizes, _sizes(shape)), case)


def _as_lists(case: str, groups: Any) -> list[list[int]]:
    """The learner's groups as lists; a dictionary or a flat list is told what is wanted."""
    wanted = "give a list of lists of ranks"
    if isinstance(groups, (Mapping, str, int)):
        raise Hint(f"{case}it returned {groups!r:.60}; {wanted}")
    found = []
    for group in groups:
        if isinstance(group, (int, str)):
            raise Hint(f"{case}{group!r} is no group; {wanted}")
        found.append([int(rank) for rank in due(group)])
    return found


def _are_groups(
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
    """As `_in_own_order`, and a `set` of its axes has the same order."""
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
        raise Hint(f"it returned a {type(kept).__name__}; give a dictionary {{axis: group}}")
    here().note("connected")
    for axis in ORDER_ON_RANK[0]:
        _is_own(rank, axis, kept)
    sums = {}
    for axis in ORDER_ON_RANK[0]:
        total = torch.tensor(rank)
        dist.all_reduce(total, group=kept[axis])
        sums[axis] = total.item()
    return sums


def _is_own(rank: int, axis: str, kept: Mapping[str, Any]) -> None:
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
    _are_made(outcome)
    settle(outcome)
    with_sets = simulate(4, _connect, connect, _in_order_of_hashes, ours=ours)
    _are_in_one_order(with_sets)  # nothing else: such names are not found in other dictionaries
    return confirm(ranks, outcome, _connect, connect, _in_own_order)


def _are_made(outcome: Outcome) -> None:
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
    _are_in_one_order(outcome)


def _are_in_one_order(outcome: Outcome) -> None:
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

LINKS = {(0, 1): 5.0, (1, 0): 7.0, (3, 4): 11.0, (4, 3): 13.0, (7, 8): 17.0, (2, 13): 19.0}


def _count_crossing(crossing: Callable[..., Any]) -> None:
    """The learner's bytes of the links whose ends are on different nodes."""
    for ranks_per_node in (8, 4, 2, 1):
        case = f"my_crossing with nodes of {ranks_per_node}, links {LINKS}: "
        sent = dict(LINKS)
        with without(across_nodes):
            found = due(bounded("does your loop end?", crossing, sent, ranks_per_node))
        refuse(_changed("sent", sent, LINKS), case)
        if not isinstance(found, (int, float)):
            raise Hint(f"{case}it returned {found!r:.60}; one number of bytes is asked for")
        truth = across_nodes(LINKS, ranks_per_node)
        inside = sum(LINKS.values()) - truth
        if found != truth:
            mistakes = {
                f"{found:g} B stay inside the nodes: those that cross are asked for": (
                    found == inside
                ),
                f"it gives {found:g} B, and {truth:g} B cross: on which node is each rank?": True,
            }
            refuse(mistakes, case)


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


@functools.cache
def _costs(case: _Case, **how: Any) -> Costs:
    """{order: {axis: bytes between nodes in one step}}."""
    costs = {}
    for order in ORDERS:
        shape = replace(case.shape, order=order)
        traffic = step_traffic(case.model, shape, global_batch=case.batch, **how)
        crossing = {}
        for axis, sent in traffic.items():
            crossing[axis] = across_nodes(sent, case.ranks_per_node)
        costs[order] = crossing
    return costs


def _total(crossing: OfAxes, axes: Sequence[str] = AXES) -> float:
    return sum(crossing[axis] for axis in axes)


def _less_the_total(crossing: OfAxes) -> float:
    return -_total(crossing)


def _largest(crossing: OfAxes) -> float:
    return max(crossing.values())


def best_order(
    crossing: Callable[[Mapping[tuple[int, int], float], int], Any],
    best: Callable[[GPTConfig, GridShape, int, int], Any],
) -> None:
    """The learner's order of the axes with the fewest bytes between nodes.

    Args:
        crossing: `crossing({(sender, receiver): bytes}, ranks_per_node)` -> bytes between nodes.
        best: `best(model, shape, ranks_per_node, global_batch)` -> "tp-cp-dp-pp", for instance.
    """
    for name, function in (("my_crossing", crossing), ("best_order", best)):
        refuse({f"{name} is None: write a function": function is None})
    _count_crossing(crossing)
    cases = _cases()
    orders = []
    for case in cases:
        with without(across_nodes):
            order = due(bounded("does your loop end?", best, *case))
        mistakes = {
            f"it returned {order!r}, which may be the bytes; the order is asked for": (
                isinstance(order, (int, float))
            ),
            f"it returned {order!r}; an order is a text such as 'tp-cp-dp-pp' that names all four "
            "axes": order not in ORDERS,
        }
        refuse(mistakes)
        orders.append(order)
    for case, order in zip(cases, orders):
        costs = _costs(case)
        found = _total(costs[order])
        least = min(_total(crossing) for crossing in costs.values())
        if found > least * (1 + 1e-9):
            num_nodes = case.shape.world_size // case.ranks_per_node
            text = (
                f"{num_nodes} nodes of {case.ranks_per_node}, batch {case.batch}: {order} sends "
                f"{si(found, 'B')} between nodes, another order {si(least, 'B')}; "
            )
            _explain_orders(text, cases, orders)


OTHER_SETTINGS: dict[str, dict[str, Any]] = {
    "with scatter/gather it is the best, and here the whole of act is sent": {
        "scatter_gather": True
    },
    "with value_bytes=4 it is the best: leave step_traffic's settings alone": {"value_bytes": 4},
    "with gradient_bytes=2 it is the best: leave step_traffic's settings alone": {
        "gradient_bytes": 2
    },
}


def _explain_orders(case: str, cases: Sequence[_Case], orders: Sequence[str]) -> None:
    """Say what the orders of all cases have in common: the mistake that would give them."""
    all_costs = [_costs(one) for one in cases]
    mistakes = {
        f"you choose {orders[0]} whatever is asked: does each order get a grid of its own?": (
            len(set(orders)) == 1
        ),
        "it is the worst of all: is the smallest wanted, or the largest?": (
            _are_best(orders, all_costs, _less_the_total)
        ),
    }
    for axis in AXES:
        last = [order for order in ORDERS if order.endswith(axis)]
        first = [order for order in ORDERS if order.startswith(axis)]
        for where, allowed in (("ends with", last), ("begins with", first)):
            text = f"every order that you choose {where} {axis}: are all 24 tried?"
            mistakes[text] = _are_best(orders, all_costs, allowed=allowed)
    mistakes["its largest axis is small, but the bytes of all axes count together"] = _are_best(
        orders, all_costs, _largest
    )
    refuse(mistakes, case)
    for text, how in OTHER_SETTINGS.items():
        refuse({text: _are_best(orders, [_costs(one, **how) for one in cases])}, case)
    of_one_model = [_costs(one._replace(model=cases[0].model)) for one in cases]
    mistakes = {
        "for another model it is the best: is it the argument `model` that is asked?": _are_best(
            orders, of_one_model
        ),
    }
    for axes in (("tp", "dp", "pp"), ("tp", "dp"), ("tp", "pp"), ("tp",)):
        text = f"by {' and '.join(axes)} alone it is the best: do all axes count?"
        mistakes[text] = _are_best(orders, all_costs, functools.partial(_total, axes=axes))
    refuse(mistakes, case)
    raise Hint(
        f"{case}does the comparison use the model, the batch and the node size that are given?"
    )


def _are_best(
    orders: Sequence[str],
    all_costs: Sequence[Costs],
    cost: Callable[[OfAxes], float] = _total,
    allowed: Sequence[str] = ORDERS,
) -> bool:
    """Whether every order is the best by this cost, among those that are allowed."""
    for order, costs in zip(orders, all_costs):
        least = min(cost(costs[name]) for name in allowed)
        if order not in allowed or cost(costs[order]) > least + abs(least) * 1e-9:
            return False
    return True


# ---- 8.5

GPUS = 64
BATCH = 512
ROOM_BYTES = 60e9  # for weights, gradients and optimizer of each GPU
LOST_S = 0.45  # of a step: on the links and idle


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
        check=best_order,
        praise="the best of 24, for small and large batches and nodes",
        hints=(
            "Ranks fill the nodes in order. On which node is rank 11, if a node holds 8 ranks?",
            "`replace(shape, order=order)` is the same grid in another order.",
            "`step_traffic` gives one dictionary for each axis. What do you do with all four?",
        ),
    ),
    "8.5": Exercise(
        check=design,
        praise="it fits, and little time is lost beside 3.4 s of computing",
        hints=(
            "Which line of the table is the largest? Which size makes it smaller?",
            "tp spends seconds inside the node as well. How much of it do you need for the memory?",
            "The pipeline idles less if there are more micro-batches: batch/dp of them.",
        ),
    ),
}
