"""Answers to the exercises of lesson 08, communicator grids."""

import contextlib
import io
import itertools
import math
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from answers import Answers

from labcode.comm.grid import Grid
from labcode.perf.traffic import across_nodes, step_traffic
from labcode.recipes import gpt_shape
from labcode.teach.exercises import l08
from labcode.topology import AXES, GridShape

ORDERS = ["-".join(order) for order in itertools.permutations(AXES)]

# ---- 8.1 coordinates


def coords(rank, sizes, order):
    found = {}
    for axis in order.split("-"):
        found[axis] = rank % sizes[axis]
        rank = rank // sizes[axis]
    return found


def coords_with_divmod(rank, sizes, order):
    found = {}
    for axis in order.split("-"):
        rank, found[axis] = divmod(rank, sizes[axis])
    return found


def coords_with_strides(rank, sizes, order):
    stride = 1
    found = {}
    for axis in order.split("-"):
        found[axis] = (rank // stride) % sizes[axis]
        stride *= sizes[axis]
    return found


def coords_with_numpy(rank, sizes, order):
    axes = order.split("-")[::-1]
    places = np.unravel_index(rank, [sizes[axis] for axis in axes])
    return {axis: int(place) for axis, place in zip(axes, places)}


def coords_by_listing(rank, sizes, order):
    """A beginner's way: all combinations in order, then the one with this number."""
    axes = order.split("-")
    everything = itertools.product(*(range(sizes[axis]) for axis in reversed(axes)))
    return dict(zip(reversed(axes), list(everything)[rank]))


def coords_backwards(rank, sizes, order):
    return coords(rank, sizes, "-".join(reversed(order.split("-"))))


def coords_in_the_usual_order(rank, sizes, order):
    return coords(rank, sizes, "tp-cp-dp-pp")


def coords_without_dividing(rank, sizes, order):
    return {axis: rank % sizes[axis] for axis in order.split("-")}


def coords_while_left(rank, sizes, order):
    """Leaves out the slow axes of small ranks."""
    found = {}
    for axis in order.split("-"):
        if rank == 0:
            break
        rank, found[axis] = divmod(rank, sizes[axis])
    return found


def coords_quotient_and_rest_swapped(rank, sizes, order):
    found = {}
    for axis in order.split("-"):
        found[axis], rank = divmod(rank, sizes[axis])
    return found


def coords_as_a_list(rank, sizes, order):
    return list(coords(rank, sizes, order).values())


def coords_without_end(rank, sizes, order):
    found = {}
    for axis in order.split("-"):
        found[axis] = 0
        while rank >= 0:
            found[axis] = rank % sizes[axis]
    return found


def coords_with_numpy_numbers(rank, sizes, order):
    axes = order.split("-")[::-1]
    places = np.unravel_index(rank, [sizes[axis] for axis in axes])
    return dict(zip(axes, places))


def coords_with_torch(rank, sizes, order):
    """torch.unravel_index imports sympy when it is first called."""
    axes = order.split("-")[::-1]
    places = torch.unravel_index(torch.tensor(rank), [sizes[axis] for axis in axes])
    return dict(zip(axes, places))


def coords_with_axes_written_down(rank, sizes, order):
    found = {}
    for axis in ("tp", "cp", "dp", "pp"):
        rank, found[axis] = divmod(rank, sizes[axis])
    return found


def coords_into_the_argument(rank, sizes, order):
    for axis in order.split("-"):
        rank, sizes[axis] = divmod(rank, sizes[axis])
    return sizes


def coords_with_halves(rank, sizes, order):
    return {axis: place / 1 for axis, place in coords(rank, sizes, order).items()}


def coords_from_the_library(rank, sizes, order):
    return GridShape(**sizes, order=order).coords(rank)


COORDS = Answers(
    check=lambda answer, ranks: l08.coords_of(answer),
    right={
        "remainder": coords,
        "divmod": coords_with_divmod,
        "strides": coords_with_strides,
        "numpy": coords_with_numpy,
        "all combinations": coords_by_listing,
        "numbers of numpy": coords_with_numpy_numbers,
        "torch": coords_with_torch,
    },
    wrong={
        "order backwards": (coords_backwards, "read backwards"),
        "always the usual order": (coords_in_the_usual_order, "whatever its `order` says"),
        "axes written down": (coords_with_axes_written_down, "whatever its `order` says"),
        "into the argument": (coords_into_the_argument, "it has changed `sizes`"),
        "fractions": (coords_with_halves, "not a whole number"),
        "never divided": (coords_without_dividing, "how many ranks do the faster axes fill"),
        "slow axes left out": (coords_while_left, "no coordinate for dp, pp, cp, tp"),
        "quotient and rest swapped": (
            coords_quotient_and_rest_swapped,
            "its coordinates go from 0 to",
        ),
        "a list": (coords_as_a_list, "give a dictionary"),
        "an endless loop": (coords_without_end, "did not come to an end"),
        "GridShape.coords": (coords_from_the_library, "coords does the work for you"),
    },
)


# ---- 8.2 groups


def groups(sizes, order, axes):
    together = {}
    for rank in range(math.prod(sizes.values())):
        where = coords(rank, sizes, order)
        fixed = tuple(where[axis] for axis in sizes if axis not in axes)
        together.setdefault(fixed, []).append(rank)
    return list(together.values())


def groups_with_groupby(sizes, order, axes):
    def fixed(rank):
        return [place for axis, place in coords(rank, sizes, order).items() if axis not in axes]

    in_order = sorted(range(math.prod(sizes.values())), key=fixed)
    return [sorted(members) for _, members in itertools.groupby(in_order, fixed)]


def groups_with_numpy(sizes, order, axes):
    slow_first = order.split("-")[::-1]
    cube = np.arange(math.prod(sizes.values())).reshape([sizes[axis] for axis in slow_first])
    outside = [i for i, axis in enumerate(slow_first) if axis not in axes]
    inside = [i for i, axis in enumerate(slow_first) if axis in axes]
    size = math.prod(sizes[axis] for axis in axes)
    return cube.transpose(outside + inside).reshape(-1, size).tolist()


def groups_as_sets_would(sizes, order, axes):
    """Asks for each rank who agrees with it, and keeps each answer once; tuples."""
    world = range(math.prod(sizes.values()))
    found = set()
    for rank in world:
        own = coords(rank, sizes, order)
        members = []
        for other in world:
            theirs = coords(other, sizes, order)
            if all(own[axis] == theirs[axis] for axis in sizes if axis not in axes):
                members.append(other)
        found.add(tuple(members))
    return found


def groups_that_agree_along(sizes, order, axes):
    """Groups by the coordinates that should differ."""
    others = tuple(axis for axis in sizes if axis not in axes)
    return groups(sizes, order, others)


def neighbours(sizes, order, axes):
    """Right only where the axes are the fastest."""
    size = math.prod(sizes[axis] for axis in axes)
    world_size = math.prod(sizes.values())
    return [list(range(i, i + size)) for i in range(0, world_size, size)]


def first_axis_only(sizes, order, axes):
    return groups(sizes, order, axes[:1])


def first_group_only(sizes, order, axes):
    return groups(sizes, order, axes)[:1]


def usual_order(sizes, order, axes):
    return groups(sizes, "tp-cp-dp-pp", axes)


def descending(sizes, order, axes):
    return [group[::-1] for group in groups(sizes, order, axes)]


def as_a_dictionary(sizes, order, axes):
    return dict(enumerate(groups(sizes, order, axes)))


def from_the_library(sizes, order, axes):
    return GridShape(**sizes, order=order).groups(*axes)


def groups_by_emptying(sizes, order, axes):
    found = groups(dict(sizes), order, axes)
    for axis in axes:
        sizes.pop(axis)
    return found


def one_for_each_rank(sizes, order, axes):
    found = []
    for rank in range(math.prod(sizes.values())):
        for group in groups(sizes, order, axes):
            if rank in group:
                found.append(group)
    return found


GROUPS = Answers(
    check=lambda answer, ranks: l08.groups_of(answer),
    right={
        "a dictionary": groups,
        "groupby": groups_with_groupby,
        "numpy": groups_with_numpy,
        "a set of tuples": groups_as_sets_would,
    },
    wrong={
        "the other axes": (groups_that_agree_along, "in which coordinates must the ranks"),
        "neighbours": (neighbours, "differ in"),
        "the first axis only": (first_axis_only, "in which coordinates must the ranks"),
        "the first group only": (first_group_only, "is in no group"),
        "order ignored": (usual_order, "dp-pp-tp-cp"),
        "descending": (descending, "do not ascend"),
        "a dictionary returned": (as_a_dictionary, "give a list of lists"),
        "GridShape.groups": (from_the_library, "groups does the work for you"),
        "the argument emptied": (groups_by_emptying, "it has changed `sizes`"),
        "a group for each rank": (one_for_each_rank, "in more than one group"),
    },
)


# ---- 8.3 process groups


def connect_sorted(rank, groups_of):
    own = {}
    for axis in sorted(groups_of):
        for members in groups_of[axis]:
            group = dist.new_group(members)
            if rank in members:
                own[axis] = group
    return own


def connect_by_a_list_of_names(rank, groups_of):
    own = {}
    for axis in ("dp", "pp", "cp", "tp"):
        if axis not in groups_of:
            continue
        made = [dist.new_group(ranks=members) for members in groups_of[axis]]
        number = [rank in members for members in groups_of[axis]].index(True)
        own[axis] = made[number]
    return own


def connect_comparing(rank, groups_of):
    own = {}
    for axis, all_members in sorted(groups_of.items()):
        for members in all_members:
            group = dist.new_group(members)
            if group != dist.GroupMember.NON_GROUP_MEMBER:
                own[axis] = group
    return own


def connect_in_its_own_order(rank, groups_of):
    own = {}
    for axis in groups_of:
        for members in groups_of[axis]:
            group = dist.new_group(members)
            if rank in members:
                own[axis] = group
    return own


def connect_only_its_own(rank, groups_of):
    own = {}
    for axis in sorted(groups_of):
        for members in groups_of[axis]:
            if rank in members:
                own[axis] = dist.new_group(members)
    return own


def connect_keeps_the_last(rank, groups_of):
    own = {}
    for axis in sorted(groups_of):
        for members in groups_of[axis]:
            own[axis] = dist.new_group(members)
    return own


def connect_returns_members(rank, groups_of):
    own = {}
    for axis in sorted(groups_of):
        for members in groups_of[axis]:
            dist.new_group(members)
            if rank in members:
                own[axis] = members
    return own


def connect_the_world(rank, groups_of):
    return dict.fromkeys(groups_of, dist.group.WORLD)


def connect_asking_for_the_rank(rank, groups_of):
    own = {}
    for axis in sorted(groups_of):
        for members in groups_of[axis]:
            group = dist.new_group(members)
            if dist.get_rank(group) >= 0:
                own[axis] = group
    return own


def connect_by_enumeration(rank, groups_of):
    own = {}
    for axis in sorted(groups_of):
        own[axis], _ = dist.new_subgroups_by_enumeration(groups_of[axis])
    return own


def connect_locally(rank, groups_of):
    """Only its own, as PyTorch allows where the members alone synchronize."""
    own = {}
    for axis in sorted(groups_of):
        for members in groups_of[axis]:
            if rank in members:
                own[axis] = dist.new_group(members, use_local_synchronization=True)
    return own


def connect_locally_in_its_own_order(rank, groups_of):
    own = {}
    for axis in groups_of:
        for members in groups_of[axis]:
            if rank in members:
                own[axis] = dist.new_group(members, use_local_synchronization=True)
    return own


def connect_over_a_set(rank, groups_of):
    """Right by luck, where four ranks happen to order a set alike."""
    own = {}
    for axis in set(groups_of):
        for members in sorted(groups_of[axis]):
            group = dist.new_group(members)
            if rank in members:
                own[axis] = group
    return own


def connect_over_a_lucky_set(rank, groups_of):
    """As on ranks whose hashes are the same: the plain names come in one order everywhere."""
    names = set(groups_of)
    if all(type(name) is str for name in names):
        names = sorted(names)
    return connect_in_its_own_order(rank, {name: groups_of[name] for name in names})


def connect_by_a_sorted_set(rank, groups_of):
    return connect_in_its_own_order(
        rank, {name: groups_of[name] for name in sorted(set(groups_of))}
    )


def connect_by_a_copy(rank, groups_of):
    """Looks names up that are written in the code, as far as they are there."""
    by_name = dict(groups_of.items())
    axes = [axis for axis in ("tp", "cp", "dp", "pp") if axis in by_name]
    return connect_in_its_own_order(rank, {axis: by_name[axis] for axis in axes})


def connect_turned_on_rank_3(rank, groups_of):
    names = list(groups_of)
    if rank == 3:
        names = names[::-1]
    return connect_in_its_own_order(rank, {name: groups_of[name] for name in names})


def connect_by_emptying(rank, groups_of):
    own = {}
    for axis in sorted(groups_of):
        for members in groups_of.pop(axis):
            group = dist.new_group(members)
            if rank in members:
                own[axis] = group
    return own


def connect_with_a_grid(rank, groups_of):
    grid = Grid.create(GridShape(dp=2, tp=2))
    return {axis: grid.group(axis) for axis in groups_of}


def connect_a_list(rank, groups_of):
    return list(connect_sorted(rank, groups_of).values())


def connect_without_groups_of_one(rank, groups_of):
    own = {}
    for axis in sorted(groups_of):
        for members in groups_of[axis]:
            if len(members) > 1:
                group = dist.new_group(members)
                if rank in members:
                    own[axis] = group
    return own


CONNECT = Answers(
    check=l08.connected,
    right={
        "sorted": connect_sorted,
        "a list of names": connect_by_a_list_of_names,
        "compared with NON_GROUP_MEMBER": connect_comparing,
        "get_rank of the group": connect_asking_for_the_rank,
        "new_subgroups_by_enumeration": connect_by_enumeration,
        "the members alone": connect_locally,
        "a sorted set": connect_by_a_sorted_set,
        "a copy with names of its own": connect_by_a_copy,
    },
    wrong={
        "in its own order": (connect_in_its_own_order, "an order of its own"),
        "a set": (connect_over_a_set, "in an order of its own"),
        "a set that is the same by luck": (connect_over_a_lucky_set, "each set, in an order"),
        "the members alone, in their own order": (
            connect_locally_in_its_own_order,
            "is call 1 of new_group on rank 0 and call 3 on rank 1",
        ),
        "turned on rank 3": (connect_turned_on_rank_3, "an order of its own"),
        "the argument emptied": (connect_by_emptying, "it has changed `groups_of`"),
        "Grid.create": (connect_with_a_grid, "labcode's own answer"),
        "only its own groups": (connect_only_its_own, "it is no member, but a group"),
        "keeps the last": (connect_keeps_the_last, "in which it is not"),
        "the members": (connect_returns_members, "in which it is not"),
        "the default group": (connect_the_world, "makes no group"),
        "a list": (connect_a_list, "give a dictionary"),
        "no groups of one": (connect_without_groups_of_one, "does not make the group [0]"),
    },
)


# ---- 8.4 the best order


def crossing(sent, ranks_per_node):
    total = 0
    for (sender, receiver), num_bytes in sent.items():
        if sender // ranks_per_node != receiver // ranks_per_node:
            total += num_bytes
    return total


def crossing_by_nodes(sent, ranks_per_node):
    """Looks the node of each rank up in a list of nodes."""
    last = max(max(link) for link in sent) if sent else 0
    node_of = [rank // ranks_per_node for rank in range(last + 1)]
    return sum(sent[link] for link in sent if node_of[link[0]] != node_of[link[1]])


def crossing_with_numpy(sent, ranks_per_node):
    links = np.array(list(sent), dtype=int).reshape(-1, 2) // ranks_per_node
    return float(np.array(list(sent.values()))[links[:, 0] != links[:, 1]].sum())


def crossing_by_distance(sent, ranks_per_node):
    """Takes ranks that are far apart for ranks on different nodes."""
    return sum(size for (a, b), size in sent.items() if abs(a - b) >= ranks_per_node)


def staying(sent, ranks_per_node):
    return sum(sent.values()) - crossing(sent, ranks_per_node)


def crossing_of_all_links(sent, ranks_per_node):
    return sum(sent.values())


def crossing_one_way(sent, ranks_per_node):
    return sum(size for (a, b), size in sent.items() if a // ranks_per_node < b // ranks_per_node)


def crossing_by_emptying(sent, ranks_per_node):
    total = 0
    while sent:
        (a, b), size = sent.popitem()
        if a // ranks_per_node != b // ranks_per_node:
            total += size
    return total


def crossing_of(model, shape, ranks_per_node, batch, **how):
    traffic = step_traffic(model, shape, global_batch=batch, **how)
    return {axis: crossing(sent, ranks_per_node) for axis, sent in traffic.items()}


def total(of_axes):
    return sum(of_axes.values())


def best(
    model,
    shape,
    ranks_per_node,
    global_batch,
    cost=total,
    choose=min,
    orders=ORDERS,
    **how,
):
    def of_order(order):
        ordered = replace(shape, order=order)
        return cost(crossing_of(model, ordered, ranks_per_node, global_batch, **how))

    return choose(orders, key=of_order)


def best_with_a_dictionary(model, shape, ranks_per_node, global_batch):
    bytes_of = {}
    for axes in itertools.permutations(["dp", "pp", "cp", "tp"]):
        order = f"{axes[0]}-{axes[1]}-{axes[2]}-{axes[3]}"
        ordered = GridShape(shape.dp, shape.pp, shape.cp, shape.tp, order)
        bytes_of[order] = total(crossing_of(model, ordered, ranks_per_node, global_batch))
    return min(bytes_of, key=lambda order: bytes_of[order])


def best_by_sorting(model, shape, ranks_per_node, global_batch):
    pairs = []
    for axes in itertools.permutations(AXES):
        order = "-".join(axes)
        ordered = replace(shape, order=order)
        crossing = 0
        for sent in step_traffic(model, ordered, global_batch=global_batch).values():
            for (sender, receiver), num_bytes in sent.items():
                if sender // ranks_per_node != receiver // ranks_per_node:
                    crossing += num_bytes
        pairs.append((crossing, order))
    pairs.sort()
    return pairs[0][1]


def best_of_one_batch(model, shape, ranks_per_node, global_batch):
    return best(model, shape, ranks_per_node, 8)


def best_on_nodes_of_8(model, shape, ranks_per_node, global_batch):
    return best(model, shape, 8, global_batch)


def best_of_all_links(model, shape, ranks_per_node, global_batch):
    """Counts what stays inside as well: all orders are the same."""
    return best(model, shape, 1, global_batch)


def best_of_one_model(model, shape, ranks_per_node, global_batch):
    """Takes the notebook's model in place of its own argument."""
    return best(gpt_shape("gpt_7b"), shape, ranks_per_node, global_batch)


def best_without_replace(model, shape, ranks_per_node, global_batch):
    return min(ORDERS, key=lambda order: total(crossing_of(model, shape, ranks_per_node, 64)))


def best_with_cp_last(*args):
    return best(*args, orders=[order for order in ORDERS if order.endswith("cp")])


def best_by_the_library(model, shape, ranks_per_node, global_batch):
    def of_order(order):
        traffic = step_traffic(model, replace(shape, order=order), global_batch=global_batch)
        return sum(across_nodes(sent, ranks_per_node) for sent in traffic.values())

    return min(ORDERS, key=of_order)


def fewest_bytes(model, shape, ranks_per_node, global_batch):
    order = best(model, shape, ranks_per_node, global_batch)
    return total(crossing_of(model, replace(shape, order=order), ranks_per_node, global_batch))


def best_order_of(answer, ranks):
    crossing, best = answer() if callable(answer) else answer
    l08.best_order(crossing, best)


def with_best(best):
    """A right count of what crosses, with this way to choose."""
    return crossing, best


BEST = Answers(
    check=best_order_of,
    right={
        "min with a key": (crossing, best),
        "a dictionary": (crossing_by_nodes, best_with_a_dictionary),
        "sorted pairs": (crossing_with_numpy, best_by_sorting),
    },
    wrong={
        "by distance": ((crossing_by_distance, best), "on which node is each rank"),
        "what stays": ((staying, best), "stay inside the nodes"),
        "one way only": ((crossing_one_way, best), "on which node is each rank"),
        "all links": (with_best(best_of_all_links), "does each order get a grid"),
        "the largest axis": (
            with_best(lambda *args: best(*args, cost=lambda sent: max(sent.values()))),
            "all axes count together",
        ),
        "the worst": (with_best(lambda *args: best(*args, choose=max)), "the worst of all"),
        "always the usual one": (with_best(lambda *args: "tp-cp-dp-pp"), "whatever is asked"),
        "replace forgotten": (with_best(best_without_replace), "whatever is asked"),
        "cp last": (with_best(best_with_cp_last), "ends with cp"),
        "tp and dp alone": (
            with_best(lambda *args: best(*args, cost=lambda sent: sent["tp"] + sent["dp"])),
            "do all axes count",
        ),
        "scatter/gather": (
            with_best(lambda *args: best(*args, scatter_gather=True)),
            "the whole of act is sent",
        ),
        "activations of 4 bytes": (
            with_best(lambda *args: best(*args, value_bytes=4)),
            "with value_bytes=4",
        ),
        "gradients of 2 bytes": (
            with_best(lambda *args: best(*args, gradient_bytes=2)),
            "with gradient_bytes=2",
        ),
        "the model of the notebook": (with_best(best_of_one_model), "the argument `model`"),
        "another batch": (with_best(best_of_one_batch), "the batch and the node size"),
        "nodes of 8": (with_best(best_on_nodes_of_8), "between nodes, another order"),
        "a tuple": (
            with_best(lambda *args: tuple(best(*args).split("-"))),
            "names all four axes",
        ),
        "the bytes": (with_best(fewest_bytes), "the order is asked for"),
        "every link counts": ((crossing_of_all_links, best), "on which node is each rank"),
        "the argument emptied": ((crossing_by_emptying, best), "it has changed `sent`"),
        "across_nodes": ((across_nodes, best), "labcode's own answer"),
        "across_nodes within": (with_best(best_by_the_library), "labcode's own answer"),
        "None": ((crossing, None), "best_order is None"),
    },
)


# ---- 8.5 a grid for 64 GPUs


def designed(answer, ranks):
    """The check without the table that it prints first."""
    with contextlib.redirect_stdout(io.StringIO()):
        l08.design(answer() if callable(answer) else answer)


DESIGN = Answers(
    check=designed,
    right={
        "pipeline and tensor": GridShape(dp=4, pp=8, tp=2),
        "pipeline alone": GridShape(dp=8, pp=8),
        "pipeline and context": GridShape(dp=4, pp=8, cp=2),
    },
    wrong={
        "tp fills the node": (GridShape(dp=8, tp=8), "most of it is spent by tp, inside the node"),
        "tp across nodes": (
            GridShape(tp=8, dp=8, order="dp-pp-tp-cp"),
            "by tp, over links that leave",
        ),
        "too few ranks": (GridShape(dp=4, tp=8), "there are 64 GPUs"),
        "does not fit": (GridShape(dp=64), "are allowed"),
        "a tuple": ((8, 8, 1, 1), "is not a GridShape"),
        "None": (None, "my_grid is None"),
        "stages of unequal depth": (GridShape(dp=4, pp=16), "not divisible by pp=16"),
        "Llama's order": (
            GridShape(dp=4, pp=8, tp=2, order="tp-cp-pp-dp"),
            "in another order dp spends 0.011 s",
        ),
        "much dp": (GridShape(dp=16, pp=4), "above 0.45 s"),
    },
)


ANSWERS = {
    "8.1": COORDS,
    "8.2": GROUPS,
    "8.3": CONNECT,
    "8.4": BEST,
    "8.5": DESIGN,
}
