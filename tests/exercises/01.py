"""Answers to the exercises of lesson 01, processes and collectives."""

import math

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
    """A deadlock: gloo's send returns when its tensor has been taken."""
    rank = dist.get_rank(group)
    p = dist.get_world_size(group)
    arrived = torch.empty_like(chunks[0])
    for step in range(p - 1):
        dist.send(chunks[(rank - step) % p], group=group, group_dst=(rank + 1) % p)
        dist.recv(arrived, group=group, group_src=(rank - 1) % p)
        chunks[(rank - step - 1) % p] += arrived


def half_in_turns(chunks, group):
    """Even numbers send first, the others receive first."""
    rank = dist.get_rank(group)
    p = dist.get_world_size(group)
    arrived = torch.empty_like(chunks[0])
    for step in range(p - 1):
        outgoing = chunks[(rank - step) % p]
        if rank % 2 == 0:
            dist.send(outgoing, group=group, group_dst=(rank + 1) % p)
            dist.recv(arrived, group=group, group_src=(rank - 1) % p)
        else:
            dist.recv(arrived, group=group, group_src=(rank - 1) % p)
            dist.send(outgoing, group=group, group_dst=(rank + 1) % p)
        chunks[(rank - step - 1) % p] += arrived


def half_without_wait(chunks, group, waits=()):
    rank = dist.get_rank(group)
    p = dist.get_world_size(group)
    arrived = torch.zeros_like(chunks[0])
    for step in range(p - 1):
        requests = [
            dist.isend(chunks[(rank - step) % p], group=group, group_dst=(rank + 1) % p),
            dist.irecv(arrived, group=group, group_src=(rank - 1) % p),
        ]
        for number in waits:
            requests[number].wait()
        chunks[(rank - step - 1) % p] += arrived


def half_that_waits_for_one(chunks, group):
    half_without_wait(chunks, group, waits=[0])


def half_without_wait_for_sends(chunks, group):
    half_without_wait(chunks, group, waits=[1])


def half_with_barrier(chunks, group):
    rank = dist.get_rank(group)
    p = dist.get_world_size(group)
    for step in range(p - 1):
        arrived = torch.empty_like(chunks[0])
        dist.isend(chunks[(rank - step) % p], group=group, group_dst=(rank + 1) % p)
        dist.irecv(arrived, group=group, group_src=(rank - 1) % p)
        dist.barrier(group)
        chunks[(rank - step - 1) % p] += arrived


def half_with_nan(chunks, group, extra=float("nan")):
    rank = dist.get_rank(group)
    p = dist.get_world_size(group)
    arrived = torch.empty_like(chunks[0])
    for step in range(p - 1):
        exchange(chunks[(rank - step) % p], arrived, group)
        chunks[(rank - step - 1) % p] += arrived + extra


def half_with_inf(chunks, group):
    half_with_nan(chunks, group, extra=float("inf"))


def half_sent_straight(chunks, group):
    """No ring: every contribution goes to its rank at once."""
    rank = dist.get_rank(group)
    p = dist.get_world_size(group)
    arrivals = {}
    messages = []
    for other in range(p):
        if other == rank:
            continue
        arrivals[other] = torch.empty_like(chunks[0])
        wanted = chunks[(other + 1) % p]
        messages.append(dist.P2POp(dist.isend, wanted, group=group, group_peer=other))
        messages.append(dist.P2POp(dist.irecv, arrivals[other], group=group, group_peer=other))
    for message in dist.batch_isend_irecv(messages):
        message.wait()
    for arrived in arrivals.values():
        chunks[(rank + 1) % p] += arrived


def half_with_a_barrier_too_many(chunks, group):
    rank = dist.get_rank(group)
    p = dist.get_world_size(group)
    arrived = torch.empty_like(chunks[0])
    for step in range(p - 1):
        exchange(chunks[(rank - step) % p], arrived, group)
        chunks[(rank - step - 1) % p] += arrived
        dist.barrier(group)


def half_without_the_group(chunks, group):
    arrived = torch.empty_like(chunks[0])
    exchange(chunks[0], arrived)  # pyright: ignore  (a learner's mistake)


def half_that_receives_first(chunks, group):
    """A deadlock: nobody comes to its send."""
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
        "in turns": half_in_turns,
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
        "straight to its rank": (
            half_sent_straight,
            "on a ring it sends to its right neighbour only, which is number 1",
        ),
        "a barrier in each step": (half_with_a_barrier_too_many, "and none is needed"),
        "exchange without the group": (
            half_without_the_group,
            "TypeError: exchange() missing 1 required positional argument: 'group'",
        ),
        "an index too large": (half_without_a_turn, "IndexError: list index out of range"),
        "receives first": (half_that_receives_first, "all of them wait in recv, and none sends"),
        "sends first": (half_that_sends_first, "all of them wait in send, and none receives"),
        "no wait": (half_without_wait, "`irecv` returned a request, and nobody waited for it"),
        "no wait, then a barrier": (
            half_with_barrier,
            "`irecv` returned a request, and nobody waited for it",
        ),
        "waits for one of two": (
            half_that_waits_for_one,
            "`irecv` returned a request, and nobody waited for it",
        ),
        "no wait for what it sends": (
            half_without_wait_for_sends,
            "`isend` returned a request, and nobody waited for it",
        ),
        "adds nan": (half_with_nan, "holds nan, which nobody put in"),
        "adds inf": (half_with_inf, "holds inf, which nobody put in"),
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


def whole_along_the_first_dim(x, group):
    p = dist.get_world_size(group)
    rank = dist.get_rank(group)
    chunks = list(x.chunk(p))
    half(chunks, group)
    for step in range(p - 1):
        exchange(chunks[(rank + 1 - step) % p], chunks[(rank - step) % p], group)


def whole_without_wait(x, group):
    p = dist.get_world_size(group)
    rank = dist.get_rank(group)
    chunks = list(x.view(-1).chunk(p))
    half(chunks, group)
    for step in range(p - 1):
        dist.isend(chunks[(rank + 1 - step) % p], group=group, group_dst=(rank + 1) % p)
        dist.irecv(chunks[(rank - step) % p], group=group, group_src=(rank - 1) % p)


def whole_but_for_the_last_step(x, group):
    p = dist.get_world_size(group)
    rank = dist.get_rank(group)
    chunks = list(x.view(-1).chunk(p))
    half(chunks, group)
    for step in range(p - 2):
        exchange(chunks[(rank + 1 - step) % p], chunks[(rank - step) % p], group)


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
        "half of it": (
            lambda x, group: whole(x, group, phases=1),
            "only chunk 1 of x holds the sum, after 3 messages: that is the first half",
        ),
        "the mean": (lambda x, group: whole(x, group, divide=True), "x holds the mean"),
        "one chunk off": (lambda x, group: whole(x, group, turn=-1), "no chunk of x holds the sum"),
        "adds in the second half": (
            whole_adding_twice,
            "chunks 0, 2 and 3 of x hold more than the sum",
        ),
        "whole tensors": (whole_sending_everything, "bytes were sent in"),
        "a star": (whole_as_a_star, "bytes were sent in"),
        "dist.all_reduce": (whole_with_pytorch, "all_reduce does the work for you"),
        "labcode's": (ring.all_reduce, "ring.all_reduce is labcode's own answer"),
        "labcode's star": (ring.star_all_reduce, "ring.star_all_reduce is labcode's own answer"),
        "forgets the group": (lambda x, group: whole(x, dist.group.WORLD), STILL_ALL),
        "cut along the first dim": (
            whole_along_the_first_dim,
            "list index out of range, with x of shape [2, 6]: into how many chunks was it cut?",
        ),
        "a step too few": (
            whole_but_for_the_last_step,
            "only chunks 0, 1 and 3 of x hold the sum: which chunk did the left neighbour finish",
        ),
        "no wait": (whole_without_wait, "returned a request, and nobody waited for it"),
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


def tree_by_ranges(x, root, group):
    p = dist.get_world_size(group)
    place = (dist.get_rank(group) - root) % p
    first = 0
    stop = p
    while stop - first > 1:
        middle = (first + stop + 1) // 2
        if place == first:
            dist.send(x, group=group, group_dst=(middle + root) % p)
        if place == middle:
            dist.recv(x, group=group, group_src=(first + root) % p)
        if place < middle:
            stop = middle
        else:
            first = middle


def tree_from_the_parent(x, root, group, waits=True):
    p = dist.get_world_size(group)
    place = (dist.get_rank(group) - root) % p
    if place:
        parent = place - (1 << place.bit_length() - 1)
        dist.recv(x, group=group, group_src=(parent + root) % p)
    distance = 1 << place.bit_length()
    requests = []
    while place + distance < p:
        requests.append(dist.isend(x, group=group, group_dst=(place + distance + root) % p))
        distance *= 2
    if waits:
        for request in requests:
            request.wait()


def tree_for_four_at_most(x, root, group):
    p = dist.get_world_size(group)
    place = (dist.get_rank(group) - root) % p
    for have_it in (1, 2):
        if place < have_it and place + have_it < p:
            dist.send(x, group=group, group_dst=(place + have_it + root) % p)
        elif have_it <= place < 2 * have_it:
            dist.recv(x, group=group, group_src=(place - have_it + root) % p)


def table_for_three_and_four(x, root, group):
    p = dist.get_world_size(group)
    place = (dist.get_rank(group) - root) % p
    if place == 0:
        dist.send(x, group=group, group_dst=(1 + root) % p)
        dist.send(x, group=group, group_dst=(2 + root) % p)
    if place == 1:
        dist.recv(x, group=group, group_src=root)
        if p == 4:
            dist.send(x, group=group, group_dst=(3 + root) % p)
    if place == 2:
        dist.recv(x, group=group, group_src=root)
    if place == 3:
        dist.recv(x, group=group, group_src=(1 + root) % p)


def lists_for_three_and_four(x, root, group):
    pairs = {3: [(0, 1), (0, 2)], 4: [(0, 1), (0, 2), (1, 3)]}
    p = dist.get_world_size(group)
    place = (dist.get_rank(group) - root) % p
    for sender, receiver in pairs[p]:
        if place == sender:
            dist.send(x, group=group, group_dst=(receiver + root) % p)
        if place == receiver:
            dist.recv(x, group=group, group_src=(sender + root) % p)


def tree_with_barriers(x, root, group):
    """To keep the rounds apart."""
    p = dist.get_world_size(group)
    place = (dist.get_rank(group) - root) % p
    have_it = 1
    while have_it < p:
        if place < have_it and place + have_it < p:
            dist.send(x, group=group, group_dst=(place + have_it + root) % p)
        elif have_it <= place < 2 * have_it:
            dist.recv(x, group=group, group_src=(place - have_it + root) % p)
        dist.barrier(group)
        have_it *= 2


def rounded_down(x, root, group):
    p = dist.get_world_size(group)
    place = (dist.get_rank(group) - root) % p
    for number in range(int(math.log2(p))):
        have_it = 2**number
        if place < have_it and place + have_it < p:
            dist.send(x, group=group, group_dst=(place + have_it + root) % p)
        elif have_it <= place < 2 * have_it:
            dist.recv(x, group=group, group_src=(place - have_it + root) % p)


def no_bound(x, root, group):
    """Sends to places that do not exist, which the remainder turns into others."""
    p = dist.get_world_size(group)
    place = (dist.get_rank(group) - root) % p
    have_it = 1
    while have_it < p:
        if place < have_it:
            dist.send(x, group=group, group_dst=(place + have_it + root) % p)
        elif place < 2 * have_it:
            dist.recv(x, group=group, group_src=(place - have_it + root) % p)
        have_it *= 2


def receives_in_the_background(x, root, group):
    p = dist.get_world_size(group)
    place = (dist.get_rank(group) - root) % p
    have_it = 1
    while have_it < p:
        if place < have_it and place + have_it < p:
            dist.send(x, group=group, group_dst=(place + have_it + root) % p)
        elif have_it <= place < 2 * have_it:
            dist.irecv(x, group=group, group_src=(place - have_it + root) % p)
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
        "by ranges": tree_by_ranges,
        "from the parent": tree_from_the_parent,
    },
    wrong={
        "a star": (star, "it takes 3 rounds, and 2 are enough"),
        "a chain": (chain, "it takes 3 rounds, and 2 are enough"),
        "powers of two only": (
            power_of_two_only,
            "wrong: in a group of 3 with root 0, number 2 receives nothing\n",
        ),
        "rounded down": (
            rounded_down,
            "wrong: in a group of 3 with root 0, number 2 receives nothing\n",
        ),
        "no bound": (
            no_bound,
            "wrong: in a group of 3 with root 0, number 1 sends to number 0, which does not wait",
        ),
        "for four at most": (
            tree_for_four_at_most,
            "wrong: in a group of 5 with root 0, number 4 receives nothing\n",
        ),
        "a table for three and four": (
            table_for_three_and_four,
            "wrong: in a group of 5 with root 0, number 3 waits for a tensor from number 1, which",
        ),
        "lists for three and four": (
            lists_for_three_and_four,
            "in a group of 5 with root 0, KeyError: 5",
        ),
        "no wait for what it sends": (
            lambda x, root, group: tree_from_the_parent(x, root, group, waits=False),
            "`isend` returned a request, and nobody waited for it",
        ),
        "no wait for what comes": (
            receives_in_the_background,
            "`irecv` returned a request, and nobody waited for it",
        ),
        "root ignored": (
            lambda x, root, group: tree(x, root, group, relative=False),
            "with root 1, everybody holds the tensor of number 0",
        ),
        "dist.broadcast": (with_broadcast, "broadcast does the work for you"),
        "barriers": (
            tree_with_barriers,
            "a barrier makes every rank wait for all others, and none is needed",
        ),
        "into a copy": (into_a_copy, "holds its own tensor afterwards"),
        "returned": (returned, "what is returned is the root's tensor"),
        "nothing": (lambda x, root, group: None, "holds its own tensor afterwards"),
        "group numbers as ranks of the world": (
            with_dst,
            "a rank of the world which is not in the group: use group_dst and group_src",
        ),
        "forgets the group": (
            lambda x, root, group: tree(x, root, dist.group.WORLD),
            "a message was called for in another group than the one it was given",
        ),
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


def mean_with_messages(loss, group):
    p = dist.get_world_size(group)
    if dist.get_rank(group) != 0:
        dist.send(loss, group=group, group_dst=0)
        return None
    total = loss.clone()
    other = torch.empty_like(loss)
    for source in range(1, p):
        dist.recv(other, group=group, group_src=source)
        total += other
    return total / p


def mean_by_heart(loss, group):
    return {4: 25.0, 3: 20.0}[group.size()] if group.rank() == 0 else None


def mean_without_wait(loss, group):
    total = loss.clone()
    dist.all_reduce(total, group=group, async_op=True)
    return total / group.size() if group.rank() == 0 else None


def mean_of_nothing(loss, group):
    total = summed(loss, group)
    return total / 0 * 0 if group.rank() == 0 else None


def others_bring_nothing(loss, group):
    own = loss.clone() if group.rank() == 0 else torch.zeros_like(loss)
    dist.all_reduce(own, group=group)
    return own / group.size() if group.rank() == 0 else None


def mean_as_text(loss, group):
    mean = summed(loss, group) / group.size()
    return f"{mean.item():.3f}" if group.rank() == 0 else None


def text_on_all(loss, group):
    return f"{(summed(loss, group) / group.size()).item():.3f}"


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
        "messages": mean_with_messages,
    },
    wrong={
        "in place": (mean_in_place, "the loss that it was given has changed"),
        "on all ranks": (
            lambda loss, group: summed(loss, group) / dist.get_world_size(group),
            ", and not None",
        ),
        "the sum": (sum_on_rank_0, "the sum of the losses"),
        "divided by 4": (divided_by_four, ", and the mean of the losses is"),
        "its own loss": (
            lambda loss, group: loss if dist.get_rank(group) == 0 else None,
            "nothing was sent: number 0 knows no loss but its own",
        ),
        "known by heart": (mean_by_heart, "nothing was sent"),
        "no wait": (mean_without_wait, "with `async_op=True` returned a request, and nobody"),
        "nan": (mean_of_nothing, "number 0 returned nan"),
        "others bring nothing": (others_bring_nothing, "returned its own loss divided by 4"),
        "text": (mean_as_text, "and the mean is a number"),
        "text on all": (text_on_all, ", and not None"),
        "rank 0 alone": (
            rank_0_alone,
            "rank 0 waits in all_reduce of float32 [], ranks 1, 2 and 3",
        ),
        "forgets the group": (in_the_world, STILL_ALL),
        "rank 0 of the world": (on_rank_0_of_the_world, "it returned None on every rank"),
        "another rank": (on_rank_1_of_the_world, "in a group of 4, number 2 returned"),
        "nothing": (lambda loss, group: None, "it returned None"),
    },
)


ANSWERS = {
    "1.1": REDUCE_SCATTER,
    "1.2": WHOLE,
    "1.3": TREE,
    "1.4": MENDED,
}
