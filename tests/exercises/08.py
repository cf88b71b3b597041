"""Answers to the exercises of lesson 08, communicator grids."""

import itertools
import math
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from answers import Answers, changed

from labcode.perf.traffic import step_traffic
from labcode.topology import AXES, GridShape

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
            "whatever its `order` says",
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
        "neighbours": (neighbours, "differ in"),
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

# ---- 8.4 the best order


def crossing_by_nodes(sent, ranks_per_node):
    """Looks the node of each rank up in a list of nodes."""
    last = max(max(link) for link in sent) if sent else 0
    node_of = [rank // ranks_per_node for rank in range(last + 1)]
    return sum(sent[link] for link in sent if node_of[link[0]] != node_of[link[1]])


def crossing_with_numpy(sent, ranks_per_node):
    links = np.array(list(sent), dtype=int).reshape(-1, 2) // ranks_per_node
    return float(np.array(list(sent.values()))[links[:, 0] != links[:, 1]].sum())


def best_with_a_dictionary(model, shape, ranks_per_node, global_batch):
    bytes_of = {}
    for axes in itertools.permutations(["dp", "pp", "cp", "tp"]):
        order = f"{axes[0]}-{axes[1]}-{axes[2]}-{axes[3]}"
        ordered = GridShape(shape.dp, shape.pp, shape.cp, shape.tp, order)
        traffic = step_traffic(model, ordered, global_batch=global_batch)
        bytes_of[order] = sum(crossing_by_nodes(traffic[axis], ranks_per_node) for axis in axes)
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


CROSSES = "if node_of_sender != node_of_receiver"
ADD = "total += my_crossing(sent, ranks_per_node)"
TRAFFIC = "step_traffic(model, ordered, global_batch=global_batch)"
OF_TWO_AXES = f"""traffic = {TRAFFIC}
        for sent in (traffic["tp"], traffic["dp"]):"""
CP_LAST = """if not order.endswith("cp"):
            continue
        ordered ="""

BEST = Answers(
    solves=("my_crossing", "best_order"),
    takes_ranks=False,
    right={
        "a dictionary": (crossing_by_nodes, best_with_a_dictionary),
        "sorted pairs": (crossing_with_numpy, best_by_sorting),
    },
    wrong={
        "by distance": (
            changed(f"{CROSSES} => if abs(sender - receiver) >= ranks_per_node"),
            "on which node is each rank",
        ),
        "what stays": (
            changed(f"{CROSSES} => if node_of_sender == node_of_receiver"),
            "stay inside the nodes",
        ),
        "one way only": (
            changed(f"{CROSSES} => if node_of_sender < node_of_receiver"),
            "on which node is each rank",
        ),
        "all links": (
            changed(f"{ADD} => total += sum(sent.values())"),
            "does each order get a grid",
        ),
        "the largest axis": (
            changed(f"{ADD} => total = max(total, my_crossing(sent, ranks_per_node))"),
            "all axes count together",
        ),
        "the worst": (
            changed("total < fewest => total > fewest", 'float("inf") => -1'),
            "the worst of all",
        ),
        "always the usual one": (
            changed('return best => return "tp-cp-dp-pp"'),
            "whatever is asked",
        ),
        "replace forgotten": (
            changed("step_traffic(model, ordered => step_traffic(model, shape"),
            "whatever is asked",
        ),
        "cp last": (changed(f"ordered = => {CP_LAST}"), "ends with cp"),
        "tp and dp alone": (
            changed(f"for sent in {TRAFFIC}.values(): => {OF_TWO_AXES}"),
            "do all axes count",
        ),
        "scatter/gather": (
            changed("=global_batch => =global_batch, scatter_gather=True"),
            "the whole of act is sent",
        ),
        "activations of 4 bytes": (
            changed("=global_batch => =global_batch, value_bytes=4"),
            "with value_bytes=4",
        ),
        "gradients of 2 bytes": (
            changed("=global_batch => =global_batch, gradient_bytes=2"),
            "with gradient_bytes=2",
        ),
        "the model of the notebook": (
            changed('step_traffic(model => step_traffic(gpt_shape("gpt_7b")'),
            "the argument `model`",
        ),
        "another batch": (changed("=global_batch => =8"), "the batch and the node size"),
        "nodes of 8": (
            changed("+= my_crossing(sent, ranks_per_node) => += my_crossing(sent, 8)"),
            "between nodes, another order",
        ),
        "a tuple": (
            changed('return best => return tuple(best.split("-"))'),
            "names all four axes",
        ),
        "the bytes": (changed("return best => return fewest"), "the order is asked for"),
        "every link counts": (changed(f"{CROSSES} => if True"), "on which node is each rank"),
        "the argument emptied": (
            changed(
                "in sent.items(): => in list(sent.items()):\n        del sent[sender, receiver]"
            ),
            "it has changed `sent`",
        ),
        "across_nodes": (
            changed("return total => return across_nodes(sent, ranks_per_node)"),
            "labcode's own answer",
        ),
        "across_nodes within": (
            changed(f"{ADD} => total += across_nodes(sent, ranks_per_node)"),
            "labcode's own answer",
        ),
        "None": ((crossing_by_nodes, None), "best_order is None"),
    },
)

# ---- 8.5 a grid for 64 GPUs

DESIGN = Answers(
    solves="my_grid",
    takes_ranks=False,
    right={
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
