"""Answers to the exercises of lesson 08, communicator grids."""

import itertools
import math

import numpy as np
import torch
import torch.distributed as dist
from answers import Answers, changed

from course.labs import l08_by_hand
from labcode.topology import GridShape

# ---- 8.1 coordinates


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


def coords_by_listing(rank, sizes, order):
    """A beginner's way: all combinations in order, then the one with this number."""
    axes = order.split("-")
    everything = itertools.product(*(range(sizes[axis]) for axis in reversed(axes)))
    return dict(zip(reversed(axes), list(everything)[rank]))


def coords_with_numpy_numbers(rank, sizes, order):
    axes = order.split("-")[::-1]
    places = np.unravel_index(rank, [sizes[axis] for axis in axes])
    return dict(zip(axes, places))


def coords_with_torch(rank, sizes, order):
    """torch.unravel_index imports sympy when it is first called."""
    axes = order.split("-")[::-1]
    places = torch.unravel_index(torch.tensor(rank), [sizes[axis] for axis in axes])
    return dict(zip(axes, places))


REMAINDER = "coords[axis] = rank % sizes[axis]"
QUOTIENT = "rank = rank // sizes[axis]"

COORDS = Answers(
    solves="my_coords",
    takes_ranks=False,
    right={
        "divmod": coords_with_divmod,
        "strides": coords_with_strides,
        "all combinations": coords_by_listing,
        "numbers of numpy": coords_with_numpy_numbers,
        "torch": coords_with_torch,
    },
    wrong={
        "order backwards": (
            changed('order.split("-") => order.split("-")[::-1]'),
            "read backwards",
        ),
        "always the usual order": (
            changed('order.split("-") => ("tp", "cp", "dp", "pp")'),
            "your coordinates are the same whatever `order` says",
        ),
        "into the argument": (
            changed(
                f"{REMAINDER} => rank, sizes[axis] = divmod(rank, sizes[axis])",
                f"{QUOTIENT} => pass",
                "return coords => return sizes",
            ),
            "it has changed `sizes`",
        ),
        "fractions": (
            changed(f"{QUOTIENT} => rank = rank / sizes[axis]"),
            "not a whole number",
        ),
        "never divided": (changed(f"{QUOTIENT} => pass"), "how many ranks do the faster axes fill"),
        "slow axes left out": (
            changed(f"{REMAINDER} => if rank == 0:\n            break\n        {REMAINDER}"),
            "no coordinate for dp, pp, cp, tp",
        ),
        "quotient and rest swapped": (
            changed("[axis] = rank % => [axis] = rank //", "rank = rank // => rank = rank %"),
            "its coordinates go from 0 to",
        ),
        "a list": (changed("return coords => return list(coords.values())"), "give a dictionary"),
        "an endless loop": (
            changed(f"{QUOTIENT} => while rank >= 0:\n            {REMAINDER}"),
            "did not come to an end",
        ),
        "GridShape.coords": (
            changed("return coords => return GridShape(**sizes, order=order).coords(rank)"),
            "GridShape.coords is labcode's own answer",
        ),
    },
)

# ---- 8.2 groups


def groups_with_groupby(sizes, order, axes):
    def fixed(rank):
        coords = coords_with_divmod(rank, sizes, order)
        return [place for axis, place in coords.items() if axis not in axes]

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
        own = coords_with_divmod(rank, sizes, order)
        members = []
        for other in world:
            theirs = coords_with_divmod(other, sizes, order)
            if all(own[axis] == theirs[axis] for axis in sizes if axis not in axes):
                members.append(other)
        found.add(tuple(members))
    return found


def neighbours(sizes, order, axes):
    """Right only where the axes are the fastest."""
    size = math.prod(sizes[axis] for axis in axes)
    world_size = math.prod(sizes.values())
    return [list(range(i, i + size)) for i in range(0, world_size, size)]


AGREE = "if axis not in axes"
RETURN = "return list(together.values())"
ONE_FOR_EACH_RANK = """found = []
    for rank in range(world_size):
        found += [group for group in together.values() if rank in group]
    return found"""

GROUPS = Answers(
    solves="my_groups",
    takes_ranks=False,
    right={
        "groupby": groups_with_groupby,
        "numpy": groups_with_numpy,
        "a set of tuples": groups_as_sets_would,
    },
    wrong={
        "the other axes": (
            changed(f"{AGREE} => if axis in axes"),
            "in which coordinates must the ranks",
        ),
        "neighbours": (neighbours, "in which order do you read the axes"),
        "the first axis only": (
            changed(f"{AGREE} => {AGREE}[:1]"),
            "in which coordinates must the ranks",
        ),
        "the first group only": (changed(f"{RETURN} => {RETURN}[:1]"), "is in no group"),
        "order ignored": (
            changed('order.split("-") => "tp-cp-dp-pp".split("-")'),
            "dp-pp-tp-cp",
        ),
        "descending": (changed(".append(rank) => .insert(0, rank)"), "do not ascend"),
        "a dictionary returned": (
            changed(f"{RETURN} => return together"),
            "give a list of lists",
        ),
        "GridShape.groups": (
            changed(f"{RETURN} => return GridShape(**sizes, order=order).groups(*axes)"),
            "GridShape.groups is labcode's own answer",
        ),
        "the argument emptied": (
            changed(f"{RETURN} => for axis in axes:\n        sizes.pop(axis)\n    {RETURN}"),
            "it has changed `sizes`",
        ),
        "a group for each rank": (
            changed(f"{RETURN} => {ONE_FOR_EACH_RANK}"),
            "in more than one group",
        ),
        "reads the order from its end": (
            changed('order.split("-") => reversed(order.split("-"))'),
            "is a group of the order dp-pp-cp-tp: in which order do you read the axes",
        ),
        "reads the sizes in their order": (
            changed('order.split("-") => sizes'),
            "is a group of the order dp-pp-cp-tp: in which order do you read the axes",
        ),
    },
)

# ---- 8.3 process groups


def connect_by_a_list_of_names(rank, groups_of):
    own = {}
    for axis in ("dp", "pp", "cp", "tp"):
        if axis not in groups_of:
            continue
        made = [dist.new_group(ranks=members) for members in groups_of[axis]]
        number = [rank in members for members in groups_of[axis]].index(True)
        own[axis] = made[number]
    return own


def connect_by_enumeration(rank, groups_of):
    own = {}
    for axis in sorted(groups_of):
        own[axis], _ = dist.new_subgroups_by_enumeration(groups_of[axis])
    return own


def connect_in_the_order_of_rank_0(rank, groups_of):
    names = [list(groups_of)]
    dist.broadcast_object_list(names, src=0)
    own = {}
    for axis in names[0]:
        for members in groups_of[axis]:
            group = dist.new_group(members)
            if rank in members:
                own[axis] = group
    return own


MAKE_AND_KEEP = """group = dist.new_group(members)
            if rank in members:
                own[axis] = group"""
MEMBERS_ALONE = """if rank in members:
                own[axis] = dist.new_group(members, use_local_synchronization=True)"""

CONNECT = Answers(
    solves="connect",
    right={
        "a list of names": connect_by_a_list_of_names,
        "compared with NON_GROUP_MEMBER": changed(
            "if rank in members => if group != dist.GroupMember.NON_GROUP_MEMBER"
        ),
        "get_rank of the group": changed("if rank in members => if dist.get_rank(group) >= 0"),
        "new_subgroups_by_enumeration": connect_by_enumeration,
        "the members alone": changed(f"{MAKE_AND_KEEP} => {MEMBERS_ALONE}"),
        "a sorted set": changed("sorted(groups_of) => sorted(set(groups_of))"),
        "a copy with names of its own": changed(
            "own = {} => own = {}\n    by_name = dict(groups_of.items())",
            'sorted(groups_of) => [axis for axis in ("tp", "cp", "dp", "pp") if axis in by_name]',
            "groups_of[axis] => by_name[axis]",
        ),
        "the order of rank 0": connect_in_the_order_of_rank_0,
    },
    wrong={
        "in its own order": (changed("sorted(groups_of) => groups_of"), "an order of its own"),
        "a set": (
            changed("sorted(groups_of) => set(groups_of)"),
            "each set, in an order of its own",
        ),
        "the members alone, in their own order": (
            changed("sorted(groups_of) => groups_of", f"{MAKE_AND_KEEP} => {MEMBERS_ALONE}"),
            "is call 1 of new_group on rank 0 and call 3 on rank 1",
        ),
        "the argument emptied": (
            changed("groups_of[axis] => groups_of.pop(axis)"),
            "it has changed `groups_of`",
        ),
        "Grid.create": (
            changed(
                "own = {} => grid = Grid.create(GridShape(dp=2, tp=2))\n"
                "    return {axis: grid.group(axis) for axis in groups_of}"
            ),
            "labcode's own answer",
        ),
        "only its own groups": (
            changed(
                f"{MAKE_AND_KEEP} => if rank in members:\n"
                "                own[axis] = dist.new_group(members)"
            ),
            "it is no member, but a group",
        ),
        "keeps the last": (changed("if rank in members => if True"), "in which it is not"),
        "the members": (
            changed("own[axis] = group => own[axis] = members"),
            "keep what new_group returns",
        ),
        "the default group": (
            changed("own = {} => return dict.fromkeys(groups_of, dist.group.WORLD)"),
            "makes no group",
        ),
        "a list": (changed("return own => return list(own.values())"), "give a dictionary"),
        "no groups of one": (
            changed(
                "in groups_of[axis]: => in filter(lambda ranks: len(ranks) > 1, groups_of[axis]):"
            ),
            "does not make the group [0]",
        ),
    },
)

# ---- 8.4 an all-reduce in two levels


def levels_with_all_to_all(x, inside, between):
    """The parts of the node by hand: exchanged, added up, and exchanged back."""
    g = inside.size()
    parts = [torch.empty_like(part) for part in x.chunk(g)]
    dist.all_to_all(parts, list(x.chunk(g)), group=inside)
    own = torch.stack(parts).sum(0)
    dist.all_reduce(own, group=between)
    back = [torch.empty_like(own) for _ in range(g)]
    dist.all_gather(back, own, group=inside)
    return torch.cat(back)


def levels_with_an_all_reduce_inside(x, inside, between):
    """More than is needed inside the node, and as little as possible between the nodes."""
    total = x.clone()
    dist.all_reduce(total, group=inside)
    parts = list(total.chunk(dist.get_world_size(inside)))
    own = parts[dist.get_rank(inside)].clone()
    dist.all_reduce(own, group=between)
    dist.all_gather(parts, own, group=inside)
    return total


def levels_asynchronously(x, inside, between):
    own = torch.zeros(len(x) // inside.size(), dtype=x.dtype)
    work = dist.reduce_scatter(own, list(x.chunk(inside.size())), group=inside, async_op=True)
    work.wait()
    work = dist.all_reduce(own, group=between, async_op=True)
    work.wait()
    whole = torch.empty_like(x)
    dist.all_gather(list(whole.chunk(inside.size())), own, group=inside)
    return whole


def levels_by_a_tree_between(x, inside, between):
    """Between the nodes to the first of them and back, as a tree of two levels would."""
    own = torch.empty_like(x.chunk(inside.size())[0])
    dist.reduce_scatter(own, list(x.chunk(inside.size())), group=inside)
    parts = [torch.empty_like(part) for part in own.tensor_split(between.size())]
    mine = parts[between.rank()]
    dist.reduce_scatter(mine, list(own.tensor_split(between.size())), group=between)
    dist.all_gather(parts, mine, group=between)
    whole = torch.empty_like(x)
    dist.all_gather(list(whole.chunk(inside.size())), torch.cat(parts), group=inside)
    return whole


SCATTER = "dist.reduce_scatter(own, list(x.chunk(g)), group=inside)"
BETWEEN = "dist.all_reduce(own, group=between)"
GATHER = "dist.all_gather(list(total.chunk(g)), own, group=inside)"


def whole_sums_between(x, inside, between):
    total = x.clone()
    dist.all_reduce(total, group=inside)
    dist.all_reduce(total, group=between)
    return total


def flat(x, inside, between):
    total = x.clone()
    dist.all_reduce(total)
    return total


def in_place(x, inside, between):
    dist.all_reduce(x, group=inside)
    own = x.chunk(inside.size())[inside.rank()].clone()
    dist.all_reduce(own, group=between)
    dist.all_gather(list(x.chunk(inside.size())), own, group=inside)
    return x


LEVELS = Answers(
    solves="all_reduce_in_two_levels",
    right={
        "all-to-all": levels_with_all_to_all,
        "an all-reduce inside": levels_with_an_all_reduce_inside,
        "asynchronous": levels_asynchronously,
        "reduce-scatter and all-gather between": levels_by_a_tree_between,
    },
    wrong={
        "whole sums between": (whole_sums_between, "B are enough"),
        "a flat all-reduce": (flat, "several ranks of several nodes"),
        "groups exchanged": (
            changed(
                "g = inside.size() => inside, between = between, inside\n    g = inside.size()"
            ),
            "B are enough: you begin between the nodes",
        ),
        "the world in the middle": (
            changed(f"{BETWEEN} => dist.all_reduce(own)"),
            "without `group=` a call goes to all ranks",
        ),
        "nothing between": (changed(f"{BETWEEN} => pass"), "the sum over the ranks of its own"),
        "no gather": (changed("return total => return own"), "expected is [24]"),
        "gather forgotten": (changed(f"{GATHER} => total.zero_()"), "away from the right one"),
        "only its own part": (
            changed(f"{GATHER} => total.chunk(g)[inside.rank()].copy_(own)"),
            "of its 2 parts are right",
        ),
        "parts in another order": (
            changed("list(total.chunk(g)) => list(total.chunk(g))[::-1]"),
            "on rank 0",
        ),
        "the mean": (
            changed(
                f"{BETWEEN} => {BETWEEN}\n    own /= g * between.size()",
            ),
            "0.25 times the sum",
        ),
        "inside alone": (
            changed(f"{BETWEEN} => dist.all_reduce(own, group=inside)"),
            "on rank 0",
        ),
        "in place": (in_place, "it has changed x"),
        "nothing returned": (changed("return total => pass"), "None"),
        "not waited for": (
            changed("own, group=between => own, group=between, async_op=True"),
            "",
        ),
        "only a rank of each node": (
            changed(f"{BETWEEN} => if inside.rank() == 0:\n        {BETWEEN}"),
            "of its 2 parts are right",
        ),
        "labcode's": (l08_by_hand.all_reduce_in_two_levels, "labcode's own answer"),
    },
)

# ---- 8.5 a grid for 64 GPUs

DESIGN = Answers(
    solves="my_grid",
    takes_ranks=False,
    right={
        "pipeline and dp": GridShape(dp=16, pp=4),
        "two stages": GridShape(dp=32, pp=2),
        "a little tp": GridShape(dp=32, tp=2),
        "three axes": GridShape(dp=16, pp=2, tp=2),
        "pipeline alone": GridShape(dp=8, pp=8),
        "pipeline and context": GridShape(dp=16, pp=2, cp=2),
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
        "much tp": (GridShape(dp=16, tp=4), "above 0.3 s"),
        "tp slowest": (
            GridShape(dp=16, pp=2, tp=2, order="dp-pp-cp-tp"),
            "in another order",
        ),
    },
)

ANSWERS = {
    "8.1": COORDS,
    "8.2": GROUPS,
    "8.3": CONNECT,
    "8.4": LEVELS,
    "8.5": DESIGN,
}
