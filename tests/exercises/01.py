"""Answers to the exercises of lesson 01, processes and collectives."""

import torch
import torch.distributed as dist
from answers import Answers

from labcode.comm import ring
from labcode.teach.exercises import l01

STILL_ALL = "What in your code still speaks of all of them"


def exchange(outgoing, incoming, group):
    """As the lesson has it."""
    rank = dist.get_rank(group)
    p = dist.get_world_size(group)
    send = dist.P2POp(dist.isend, outgoing, group=group, group_peer=(rank + 1) % p)
    receive = dist.P2POp(dist.irecv, incoming, group=group, group_peer=(rank - 1) % p)
    for message in dist.batch_isend_irecv([send, receive]):
        message.wait()


# ---- 1.1 the first half of the ring


def half(chunks, group, first=0, steps=0, growing=-1, in_world=False, divide=False):
    """The right half, or one with a mistake."""
    rank = dist.get_rank() if in_world else dist.get_rank(group)
    p = dist.get_world_size(group)
    arrived = torch.empty_like(chunks[0])
    for step in range(p - 1 + steps):
        exchange(chunks[(rank + first - step) % p], arrived, group)
        chunks[(rank + first - step + growing) % p] += arrived
    if divide:
        chunks[(rank + 1) % p] /= p


def half_with_a_place_that_moves(chunks, group):
    p = dist.get_world_size(group)
    place = dist.get_rank(group)
    for _ in range(p - 1):
        arrived = torch.zeros_like(chunks[place])
        exchange(chunks[place], arrived, group)
        place = (place - 1) % p
        chunks[place].add_(arrived)


def half_with_send_and_receive(chunks, group):
    rank = dist.get_rank(group)
    p = dist.get_world_size(group)
    for step in range(p - 1):
        outgoing = chunks[(rank - step) % p]
        work = dist.isend(outgoing, group=group, group_dst=(rank + 1) % p)
        arrived = torch.empty_like(outgoing)
        dist.recv(arrived, group=group, group_src=(rank - 1) % p)
        work.wait()
        chunks[(rank - step - 1) % p] += arrived
    return chunks


def half_of_a_beginner(chunks, group):
    """With an if for each turn round the end, in place of %."""
    rank = group.rank()
    p = group.size()
    i = rank
    for _ in range(p - 1):
        arrived = torch.zeros(chunks[0].shape, dtype=chunks[0].dtype)
        exchange(chunks[i], arrived, group)
        i = i - 1
        if i < 0:
            i = p - 1
        chunks[i][:] = chunks[i] + arrived


def half_that_copies(chunks, group):
    rank = dist.get_rank(group)
    p = dist.get_world_size(group)
    for step in range(p - 1):
        exchange(chunks[(rank - step) % p], chunks[(rank - step - 1) % p], group)


def half_in_a_new_tensor(chunks, group):
    rank = dist.get_rank(group)
    p = dist.get_world_size(group)
    arrived = torch.empty_like(chunks[0])
    for step in range(p - 1):
        exchange(chunks[(rank - step) % p], arrived, group)
        place = (rank - step - 1) % p
        chunks[place] = chunks[place] + arrived


def half_with_another_name(chunks, group):
    rank = dist.get_rank(group)
    p = dist.get_world_size(group)
    arrived = torch.empty_like(chunks[0])
    for step in range(p - 1):
        exchange(chunks[(rank - step) % p], arrived, group)
        growing = chunks[(rank - step - 1) % p]
        growing = growing + arrived


def half_with_all_reduce(chunks, group):
    for chunk in chunks:
        dist.all_reduce(chunk, group=group)


def half_without_a_turn(chunks, group):
    rank = dist.get_rank(group)
    p = dist.get_world_size(group)
    arrived = torch.empty_like(chunks[0])
    for step in range(p - 1):
        exchange(chunks[(rank - step) % p], arrived, group)
        chunks[rank + step + 1] += arrived


def half_that_sends_first(chunks, group):
    """A deadlock, as soon as nobody has room for what it is sent."""
    rank = dist.get_rank(group)
    p = dist.get_world_size(group)
    arrived = torch.empty_like(chunks[0])
    for step in range(p - 1):
        dist.recv(arrived, group=group, group_src=(rank - 1) % p)
        dist.send(chunks[(rank - step) % p], group=group, group_dst=(rank + 1) % p)
        chunks[(rank - step - 1) % p] += arrived


def half_in_the_world(chunks, group):
    half(chunks, dist.group.WORLD)


def half_of_labcode(chunks, group):
    ring.reduce_scatter_phase(chunks, group)


def half_that_never_ends(chunks, group):
    step = 0
    while step < dist.get_world_size(group) - 1:
        chunks[0] += 0


REDUCE_SCATTER = Answers(
    check=l01.reduce_scatter_half,
    right={
        "indices": half,
        "a place that moves": half_with_a_place_that_moves,
        "isend and recv": half_with_send_and_receive,
        "a beginner's": half_of_a_beginner,
    },
    wrong={
        "one chunk off": (
            lambda chunks, group: half(chunks, group, first=1),
            "is finished, and it should be chunks[1]",
        ),
        "copies": (half_that_copies, "nothing from number"),
        "adds to the chunk it sends": (
            lambda chunks, group: half(chunks, group, growing=0),
            "chunks[1] should be finished, but it holds nothing from number",
        ),
        "a step too many": (
            lambda chunks, group: half(chunks, group, steps=1),
            "bytes were sent in 4 messages",
        ),
        "the mean": (lambda chunks, group: half(chunks, group, divide=True), "not their sum"),
        "a new tensor in the list": (half_in_a_new_tensor, "but it is a new tensor"),
        "a new tensor": (half_with_another_name, "all chunks are as they were"),
        "dist.all_reduce": (half_with_all_reduce, "all_reduce does the work for you"),
        "labcode's": (half_of_labcode, "ring.reduce_scatter_phase is labcode's own answer"),
        "nothing": (lambda chunks, group: None, "nothing was sent"),
        "an index too large": (half_without_a_turn, "IndexError: list index out of range"),
        "receives first": (half_that_sends_first, "every rank that a call needs has to make it"),
        "forgets the group": (half_in_the_world, STILL_ALL),
        "the world's rank": (lambda chunks, group: half(chunks, group, in_world=True), STILL_ALL),
        "no end": (half_that_never_ends, "still at work after 15 s"),
    },
)


# ---- 1.2 the whole ring


def whole(x, group, copies=False, divide=False, phases=2, turn=0):
    p = dist.get_world_size(group)
    rank = dist.get_rank(group)
    flat = x.clone().view(-1) if copies else x.view(-1)
    chunks = list(flat.chunk(p))
    half(chunks, group)
    for step in range((phases - 1) * (p - 1)):
        finished = chunks[(rank + 1 - step + turn) % p]
        exchange(finished, chunks[(rank - step + turn) % p], group)
    if divide:
        x /= p


def whole_after_skipping_the_first(x, group):
    p = dist.get_world_size(group)
    chunks = list(x.flatten().chunk(p))  # a view, as x is contiguous
    ring.reduce_scatter_phase(chunks, group)
    place = (dist.get_rank(group) + 1) % p
    for _ in range(p - 1):
        exchange(chunks[place], chunks[(place - 1) % p], group)
        place = (place - 1) % p


def whole_by_copying_back(x, group):
    work = x.clone()
    whole(work, group)
    x.copy_(work)
    return x


def whole_with_an_arrival(x, group):
    """Receives into a tensor of its own and copies, with reshape in place of view."""
    p = group.size()
    rank = group.rank()
    chunks = x.reshape(p, -1)
    half(chunks, group)
    arrived = torch.empty_like(chunks[0])
    for step in range(p - 1):
        exchange(chunks[(rank + 1 - step) % p], arrived, group)
        chunks[(rank - step) % p] = arrived


def whole_adding_twice(x, group):
    p = dist.get_world_size(group)
    rank = dist.get_rank(group)
    chunks = list(x.view(-1).chunk(p))
    half(chunks, group)
    arrived = torch.empty_like(chunks[0])
    for step in range(p - 1):
        exchange(chunks[(rank + 1 - step) % p], arrived, group)
        chunks[(rank - step) % p] += arrived


def whole_sending_everything(x, group):
    """Passes whole tensors round: right, but p/2 times the bytes."""
    p = dist.get_world_size(group)
    passing = x.clone()
    for _ in range(p - 1):
        arrived = torch.empty_like(x)
        exchange(passing, arrived, group)
        x += arrived
        passing = arrived


def whole_as_a_star(x, group):
    if dist.get_rank(group) != 0:
        dist.send(x, group=group, group_dst=0)
        dist.recv(x, group=group, group_src=0)
        return
    for other in range(1, dist.get_world_size(group)):
        arrived = torch.empty_like(x)
        dist.recv(arrived, group=group, group_src=other)
        x += arrived
    for other in range(1, dist.get_world_size(group)):
        dist.send(x, group=group, group_dst=other)


def whole_with_pytorch(x, group):
    dist.all_reduce(x, group=group)


def whole_with_a_new_tensor(x, group):
    y = x.clone()
    whole(y, group)
    x = y


def whole_returned(x, group):
    y = x.clone()
    whole(y, group)
    return y


WHOLE = Answers(
    check=l01.ring_all_reduce,
    right={
        "views": whole,
        "the first half of labcode": whole_after_skipping_the_first,
        "copied back": whole_by_copying_back,
        "rows of a matrix": whole_with_an_arrival,
    },
    wrong={
        "on a copy": (lambda x, group: whole(x, group, copies=True), "x is as it was before"),
        "a new name for x": (whole_with_a_new_tensor, "x is as it was before"),
        "returned": (whole_returned, "what is returned is the sum, but x is not"),
        "half of it": (lambda x, group: whole(x, group, phases=1), "of x holds the sum"),
        "the mean": (lambda x, group: whole(x, group, divide=True), "x holds the mean"),
        "one chunk off": (lambda x, group: whole(x, group, turn=-1), "no chunk of x holds the sum"),
        "adds in the second half": (whole_adding_twice, "holds more than the sum"),
        "whole tensors": (whole_sending_everything, "bytes were sent in"),
        "a star": (whole_as_a_star, "bytes were sent in"),
        "dist.all_reduce": (whole_with_pytorch, "all_reduce does the work for you"),
        "labcode's": (ring.all_reduce, "ring.all_reduce is labcode's own answer"),
        "labcode's star": (ring.star_all_reduce, "ring.star_all_reduce is labcode's own answer"),
        "forgets the group": (lambda x, group: whole(x, dist.group.WORLD), STILL_ALL),
    },
)


# ---- 1.3 a broadcast in few rounds


def tree(x, root, group, relative=True):
    p = dist.get_world_size(group)
    shift = root if relative else 0
    place = (dist.get_rank(group) - shift) % p
    have_it = 1
    while have_it < p:
        if place < have_it and place + have_it < p:
            dist.send(x, group=group, group_dst=(place + have_it + shift) % p)
        elif have_it <= place < 2 * have_it:
            dist.recv(x, group=group, group_src=(place - have_it + shift) % p)
        have_it *= 2


def tree_by_halves(x, root, group):
    """From far to near: the root sends across the middle first."""
    p = dist.get_world_size(group)
    place = (dist.get_rank(group) - root) % p
    distance = 1
    while distance < p:
        distance *= 2
    distance //= 2
    while distance >= 1:
        if place % (2 * distance) == 0 and place + distance < p:
            dist.send(x, group=group, group_dst=(place + distance + root) % p)
        elif place % (2 * distance) == distance:
            dist.recv(x, group=group, group_src=(place - distance + root) % p)
        distance //= 2


def tree_by_lists(x, root, group):
    """Plans the rounds with lists first, then does its own part."""
    p = dist.get_world_size(group)
    order = [(root + i) % p for i in range(p)]
    messages = []
    holders = order[:1]
    waiting = order[1:]
    while waiting:
        pairs = list(zip(list(holders), list(waiting)))
        for sender, receiver in pairs:
            messages.append((sender, receiver))
            holders.append(receiver)
            waiting.remove(receiver)
    rank = dist.get_rank(group)
    for sender, receiver in messages:
        if rank == sender:
            dist.send(x, group=group, group_dst=receiver)
        if rank == receiver:
            dist.recv(x, group=group, group_src=sender)


def tree_in_ranks_of_the_world(x, root, group):
    """With dst and src, translated."""
    members = dist.get_process_group_ranks(group)
    p = len(members)
    place = (members.index(dist.get_rank()) - root) % p
    have_it = 1
    while have_it < p:
        partner = members[(place + have_it + root) % p]
        source = members[(place - have_it + root) % p]
        if place < have_it and place + have_it < p:
            dist.send(x, dst=partner, group=group)
        elif have_it <= place < 2 * have_it:
            dist.recv(x, src=source, group=group)
        have_it *= 2


def star(x, root, group):
    if dist.get_rank(group) != root:
        dist.recv(x, group=group, group_src=root)
        return
    for rank in range(dist.get_world_size(group)):
        if rank != root:
            dist.send(x, group=group, group_dst=rank)


def chain(x, root, group):
    p = dist.get_world_size(group)
    place = (dist.get_rank(group) - root) % p
    if place > 0:
        dist.recv(x, group=group, group_src=(place - 1 + root) % p)
    if place < p - 1:
        dist.send(x, group=group, group_dst=(place + 1 + root) % p)


def power_of_two_only(x, root, group):
    p = dist.get_world_size(group)
    place = (dist.get_rank(group) - root) % p
    have_it = 1
    while 2 * have_it <= p:
        if place < have_it:
            dist.send(x, group=group, group_dst=(place + have_it + root) % p)
        elif place < 2 * have_it:
            dist.recv(x, group=group, group_src=(place - have_it + root) % p)
        have_it *= 2


def with_broadcast(x, root, group):
    dist.broadcast(x, group=group, group_src=root)


def with_dst(x, root, group):
    """Numbers of the group where PyTorch takes ranks of the world."""
    p = dist.get_world_size(group)
    place = (dist.get_rank(group) - root) % p
    have_it = 1
    while have_it < p:
        if place < have_it and place + have_it < p:
            dist.send(x, (place + have_it + root) % p, group=group)
        elif have_it <= place < 2 * have_it:
            dist.recv(x, (place - have_it + root) % p, group=group)
        have_it *= 2


def into_a_copy(x, root, group):
    tree(x.clone(), root, group)


def returned(x, root, group):
    y = x.clone()
    tree(y, root, group)
    return y


def never_doubles(x, root, group):
    p = dist.get_world_size(group)
    place = (dist.get_rank(group) - root) % p
    have_it = 1
    while have_it < p:
        pass
    return place


def only_half_of_it_sends(x, root, group):
    """The receivers forget to receive in the second round."""
    p = dist.get_world_size(group)
    place = (dist.get_rank(group) - root) % p
    have_it = 1
    while have_it < p:
        if place < have_it and place + have_it < p:
            dist.send(x, group=group, group_dst=(place + have_it + root) % p)
        elif place == have_it:
            dist.recv(x, group=group, group_src=(place - have_it + root) % p)
        have_it *= 2


TREE = Answers(
    check=l01.tree_broadcast,
    right={
        "near to far": tree,
        "far to near": tree_by_halves,
        "planned": tree_by_lists,
        "dst and src": tree_in_ranks_of_the_world,
    },
    wrong={
        "a star": (star, "it takes 3 rounds, and 2 are enough"),
        "a chain": (chain, "it takes 3 rounds, and 2 are enough"),
        "powers of two only": (power_of_two_only, "number 2 holds its own tensor afterwards"),
        "root ignored": (
            lambda x, root, group: tree(x, root, group, relative=False),
            "with root 1, everybody holds the tensor of number 0",
        ),
        "dist.broadcast": (with_broadcast, "broadcast does the work for you"),
        "into a copy": (into_a_copy, "holds its own tensor afterwards"),
        "returned": (returned, "what is returned is the root's tensor"),
        "nothing": (lambda x, root, group: None, "holds its own tensor afterwards"),
        "group numbers as ranks of the world": (with_dst, STILL_ALL),
        "forgets the group": (lambda x, root, group: tree(x, root, dist.group.WORLD), STILL_ALL),
        "never doubles": (never_doubles, "still at work after 15 s"),
        "a receive is missing": (
            only_half_of_it_sends,
            "rank 1 waits in send of float32 [3] to rank 3",
        ),
    },
)


# ---- 1.4 mend it


def summed(loss, group):
    total = loss.clone()
    dist.all_reduce(total, group=group)
    return total


def mean_with_all_reduce(loss, group):
    mean = summed(loss, group) / dist.get_world_size(group)
    return mean if dist.get_rank(group) == 0 else None


def mean_with_reduce(loss, group):
    total = loss.clone()
    dist.reduce(total, group=group, group_dst=0)
    if dist.get_rank(group) == 0:
        return total.item() / group.size()
    return None


def mean_with_gather(loss, group):
    p = dist.get_world_size(group)
    parts = [torch.zeros_like(loss) for _ in range(p)]
    dist.all_gather(parts, loss, group=group)
    if group.rank() == 0:
        return torch.stack(parts).mean()
    return None


def mean_of_objects(loss, group):
    losses = [None] * group.size()
    dist.all_gather_object(losses, loss.item(), group=group)
    return sum(losses) / len(losses) if group.rank() == 0 else None


def mean_in_place(loss, group):
    dist.all_reduce(loss, group=group)
    return loss / dist.get_world_size(group) if dist.get_rank(group) == 0 else None


def rank_0_alone(loss, group):
    if dist.get_rank(group) == 0:
        return summed(loss, group) / dist.get_world_size(group)
    return None


def sum_on_rank_0(loss, group):
    total = summed(loss, group)
    return total if dist.get_rank(group) == 0 else None


def divided_by_four(loss, group):
    total = summed(loss, group)
    return total / 4 if dist.get_rank(group) == 0 else None


def in_the_world(loss, group):
    total = loss.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size() if dist.get_rank() == 0 else None


def on_rank_0_of_the_world(loss, group):
    mean = summed(loss, group) / dist.get_world_size(group)
    return mean if dist.get_rank() == 0 else None


def on_rank_1_of_the_world(loss, group):
    mean = summed(loss, group) / dist.get_world_size(group)
    return mean if dist.get_rank() in (0, 2) else None


MENDED = Answers(
    check=l01.mended,
    right={
        "all_reduce": mean_with_all_reduce,
        "reduce": mean_with_reduce,
        "all_gather": mean_with_gather,
        "objects": mean_of_objects,
    },
    wrong={
        "in place": (mean_in_place, "the loss that it was given has changed"),
        "on all ranks": (
            lambda loss, group: summed(loss, group) / dist.get_world_size(group),
            "number 1 returned 25, and it should be None",
        ),
        "the sum": (sum_on_rank_0, "the sum of the losses"),
        "divided by 4": (divided_by_four, "number 0 returned 15, and the mean of the losses is 20"),
        "its own loss": (
            lambda loss, group: loss if dist.get_rank(group) == 0 else None,
            "the mean of the losses is 25",
        ),
        "rank 0 alone": (
            rank_0_alone,
            "rank 0 waits in all_reduce of float32 [], ranks 1, 2 and 3",
        ),
        "forgets the group": (in_the_world, STILL_ALL),
        "rank 0 of the world": (on_rank_0_of_the_world, "it returned None on every rank"),
        "another rank": (on_rank_1_of_the_world, "number 2 returned 25, and it should be None"),
        "nothing": (lambda loss, group: None, "it returned None"),
    },
)


ANSWERS = {
    "1.1": REDUCE_SCATTER,
    "1.2": WHOLE,
    "1.3": TREE,
    "1.4": MENDED,
}
