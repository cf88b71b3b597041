"""Answers to the exercises of lesson 01, processes and collectives."""

import torch
import torch.distributed as dist
from answers import Answers, changed

from labcode.comm import ring

STILL_ALL = "What in your code still speaks of all of them"


def exchange(outgoing, incoming, group):
    """As the lesson has it."""
    rank = dist.get_rank(group)
    p = dist.get_world_size(group)
    send = dist.P2POp(dist.isend, outgoing, group=group, group_peer=(rank + 1) % p)
    receive = dist.P2POp(dist.irecv, incoming, group=group, group_peer=(rank - 1) % p)
    for message in dist.batch_isend_irecv([send, receive]):
        message.wait()


# ---- 1.0 from each rank to the next


def passed_on_by_cases(x, rank, p):
    if rank == 0:
        dist.send(x, 1)
    elif rank == p - 1:
        dist.recv(x, rank - 1)
    else:
        dist.recv(x, rank - 1)
        dist.send(x, rank + 1)


def passed_on_with_a_copy(x, rank, p):
    if rank != 0:
        arrived = torch.zeros_like(x)
        dist.recv(arrived, src=rank - 1)
        x.copy_(arrived)
    if rank + 1 < p:
        dist.isend(x, dst=rank + 1).wait()


def passed_on_in_a_loop(x, rank, p):
    for sender in range(p - 1):
        if rank == sender:
            dist.send(x, dst=sender + 1)
        elif rank == sender + 1:
            dist.recv(x, src=sender)


def passed_on_by_the_root(x, rank, p):
    if rank > 0:
        dist.recv(x, src=0)
        return
    for other in range(1, p):
        dist.send(x, dst=other)


def passed_on_returned(x, rank, p):
    if rank > 0:
        x = torch.zeros_like(x)
        dist.recv(x, src=rank - 1)
    if rank < p - 1:
        dist.send(x, dst=rank + 1)
    return x


def passed_on_too_early(x, rank, p):
    own = x.clone()
    if rank < p - 1:
        dist.send(own, dst=rank + 1)
    if rank > 0:
        dist.recv(own, src=rank - 1)


RECEIVES = "dist.recv(x, src=rank - 1)"
SENDS_ON = "dist.send(x, dst=rank + 1)"

PASS_ON = Answers(
    solves="pass_on",
    right={
        "in three cases": passed_on_by_cases,
        "into a tensor of its own": passed_on_with_a_copy,
        "a loop over the senders": passed_on_in_a_loop,
    },
    wrong={
        "the root sends to all": (passed_on_by_the_root, "from another rank than the one before"),
        "returned": (passed_on_returned, "receive into x itself"),
        "sends before it has received": (passed_on_too_early, "x is its own tensor still"),
        "four ranks for p": (changed("rank < p - 1 => rank < 3"), "on 2 ranks"),
        "the last one sends, too": (changed("rank < p - 1 => rank < p"), "on 4 ranks"),
        "rank 0 waits, too": (changed("rank > 0 => rank >= 0"), "on 4 ranks"),
        "nobody sends": (changed(f"{SENDS_ON} => pass"), "recv"),
        "dist.broadcast": (
            changed(
                f"{RECEIVES} => pass",
                f"{SENDS_ON} => pass",
                "if rank > 0: => dist.broadcast(x, src=0)\n    if rank > 0:",
            ),
            "broadcast does the work for you",
        ),
        "a new tensor": (
            changed(
                f"{RECEIVES} => arrived = torch.zeros_like(x)\n        "
                "dist.recv(arrived, src=rank - 1)"
            ),
            "x is its own tensor still",
        ),
    },
)


# ---- 1.1 the first half of the ring


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


def half_without_the_group(chunks, group):
    arrived = torch.empty_like(chunks[0])
    exchange(chunks[0], arrived)  # pyright: ignore  (a learner's mistake)


EXCHANGE = "exchange(outgoing, arrived, group)"
ADD = "growing += arrived"
SEND = "dist.send(outgoing, group=group, group_dst=(rank + 1) % p)"
RECEIVE = "dist.recv(arrived, group=group, group_src=(rank - 1) % p)"
ISEND = "dist.isend(outgoing, group=group, group_dst=(rank + 1) % p)"
IRECV = "dist.irecv(arrived, group=group, group_src=(rank - 1) % p)"
NEXT = "\n        "  # a line of the loop
OUT = "\n    "  # a line after it, or before it

REDUCE_SCATTER = Answers(
    solves="reduce_scatter_half",
    right={
        "a place that moves": half_with_a_place_that_moves,
        "isend and recv": half_with_send_and_receive,
        "a beginner's": half_of_a_beginner,
        "in turns": half_in_turns,
    },
    wrong={
        "one chunk off": (
            changed(
                "(rank - step) % p => (rank + 1 - step) % p", "(rank - step - 1) => (rank - step)"
            ),
            "is finished, and it should be chunks[1]",
        ),
        "copies": (
            changed("(outgoing, arrived, => (outgoing, growing,", f"{ADD} => pass"),
            "nothing from number",
        ),
        "adds to the chunk it sends": (
            changed("(rank - step - 1) => (rank - step)"),
            "chunks[1] should be finished, but it holds nothing from number",
        ),
        "a step too many": (changed("range(p - 1) => range(p)"), "bytes were sent in 4 messages"),
        "the mean": (
            changed(f"{ADD} => {ADD}{NEXT}if step == p - 2:{NEXT}    growing /= p"),
            "not their sum",
        ),
        "a new tensor in the list": (
            changed(f"{ADD} => chunks[(rank - step - 1) % p] = growing + arrived"),
            "but it is a new tensor",
        ),
        "a new tensor": (
            changed(f"{ADD} => growing = growing + arrived"),
            "all chunks are as they were",
        ),
        "dist.all_reduce": (
            changed(f"{EXCHANGE} => dist.all_reduce(outgoing, group=group)"),
            "all_reduce does the work for you",
        ),
        "labcode's": (
            changed(f"{EXCHANGE} => ring.reduce_scatter_phase(chunks, group)"),
            "ring.reduce_scatter_phase is labcode's own answer",
        ),
        "nothing": (changed(f"{EXCHANGE} => pass", f"{ADD} => pass"), "nothing was sent"),
        "straight to its rank": (
            half_sent_straight,
            "on a ring it sends to its right neighbour only, which is number 1",
        ),
        "a barrier in each step": (
            changed(f"{ADD} => {ADD}{NEXT}dist.barrier(group)"),
            "and none is needed",
        ),
        "exchange without the group": (
            half_without_the_group,
            "TypeError: exchange() missing 1 required positional argument: 'group'",
        ),
        "an index too large": (
            changed("chunks[(rank - step - 1) % p] => chunks[rank + step + 1]"),
            "IndexError: list index out of range",
        ),
        "receives first": (
            changed(f"{EXCHANGE} => {RECEIVE}{NEXT}{SEND}"),
            "all of them wait in recv, and none sends",
        ),
        "sends first": (
            changed(f"{EXCHANGE} => {SEND}{NEXT}{RECEIVE}"),
            "all of them wait in send, and none receives",
        ),
        "no wait": (
            changed(f"{EXCHANGE} => {ISEND}{NEXT}{IRECV}"),
            "3 irecvs started and 0 waited for",
        ),
        "no wait, then a barrier": (
            changed(f"{EXCHANGE} => {ISEND}{NEXT}{IRECV}{NEXT}dist.barrier(group)"),
            "3 irecvs started and 0 waited for",
        ),
        "waits for one of two": (
            changed(f"{EXCHANGE} => work = {ISEND}{NEXT}{IRECV}{NEXT}work.wait()"),
            "3 irecvs started and 0 waited for",
        ),
        "no wait for what it sends": (
            changed(f"{EXCHANGE} => {ISEND}{NEXT}{IRECV}.wait()"),
            "3 isends started and 0 waited for",
        ),
        "adds nan": (
            changed(f"{ADD} => growing += arrived + float('nan')"),
            "holds nan, which nobody put in",
        ),
        "adds inf": (
            changed(f"{ADD} => growing += arrived + float('inf')"),
            "holds inf, which nobody put in",
        ),
        "forgets the group": (
            changed("get_rank(group) => get_rank()", "get_world_size(group) => get_world_size()"),
            STILL_ALL,
        ),
        "the world's rank": (changed("get_rank(group) => get_rank()"), STILL_ALL),
        "no end": (
            changed(
                "for step in range(p - 1): => step = 0\n    while step < p - 1:",
                f"{EXCHANGE} => pass",
            ),
            "does your loop end?",
        ),
        "a table of steps": (
            changed("range(p - 1) => (0, 1, 2)[: p - 1]"),
            "with ranks 0-3 it is right; in the group of ranks 0-5:",
        ),
    },
)


# ---- 1.2 the whole ring


def whole_by_rows(x, group):
    """Receives into a tensor of its own and copies, with reshape in place of view."""
    p = group.size()
    rank = group.rank()
    chunks = x.reshape(p, -1)
    half_of_a_beginner(chunks, group)
    arrived = torch.empty_like(chunks[0])
    for step in range(p - 1):
        exchange(chunks[(rank + 1 - step) % p], arrived, group)
        chunks[(rank - step) % p] = arrived


def whole_after_skipping_the_first(x, group):
    p = dist.get_world_size(group)
    chunks = list(x.flatten().chunk(p))  # a view, as x is contiguous
    ring.reduce_scatter_phase(chunks, group)
    place = (dist.get_rank(group) + 1) % p
    for _ in range(p - 1):
        exchange(chunks[place], chunks[(place - 1) % p], group)
        place = (place - 1) % p


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


ALL = "rank = dist.get_rank(group)"
LAST = "exchange(finished, next_finished, group)"

WHOLE = Answers(
    solves="ring_all_reduce",
    right={
        "the first half of labcode": whole_after_skipping_the_first,
        "copied back": changed(
            f"{ALL} => given = x{OUT}x = x.clone(){OUT}{ALL}",
            f"{LAST} => {LAST}{OUT}given.copy_(x)",
        ),
        "rows of a matrix": whole_by_rows,
    },
    wrong={
        "on a copy": (
            changed("list(x.view(-1) => list(x.clone().view(-1)"),
            "x is as it was before",
        ),
        "a new name for x": (changed(f"{ALL} => x = x.clone(){OUT}{ALL}"), "x is as it was before"),
        "returned": (
            changed(
                f"{ALL} => x = x.clone(){OUT}{ALL}",
                f"{LAST} => {LAST}{OUT}return x",
            ),
            "what is returned is the sum, but x is not",
        ),
        "half of it": (
            changed(f"{LAST} => pass"),
            "only chunk 1 of x holds the sum, after 3 messages: that is the first half",
        ),
        "the mean": (changed(f"{LAST} => {LAST}{OUT}x /= p"), "x holds the mean"),
        "one chunk off": (
            changed(
                "(rank + 1 - step) => (rank - step)",
                "next_finished = chunks[(rank - step) => next_finished = chunks[(rank - step - 1)",
            ),
            "no chunk of x holds the sum",
        ),
        "adds in the second half": (
            changed(
                f"{LAST} => arrived = torch.empty_like(finished){NEXT}"
                f"exchange(finished, arrived, group){NEXT}next_finished += arrived"
            ),
            "chunks 0, 2 and 3 of x hold more than the sum",
        ),
        "whole tensors": (whole_sending_everything, "bytes were sent in"),
        "a star": (whole_as_a_star, "bytes were sent in"),
        "dist.all_reduce": (
            changed(f"{LAST} => dist.all_reduce(x, group=group)"),
            "all_reduce does the work for you",
        ),
        "labcode's": (ring.all_reduce, "ring.all_reduce is labcode's own answer"),
        "labcode's star": (ring.star_all_reduce, "ring.star_all_reduce is labcode's own answer"),
        "forgets the group": (
            changed(f"{ALL} => group = dist.group.WORLD{OUT}{ALL}"),
            STILL_ALL,
        ),
        "cut along the first dim": (
            changed("x.view(-1).chunk(p) => x.chunk(p)"),
            "list index out of range, with x of shape [2, 6]: into how many chunks was it cut?",
        ),
        "a step too few": (
            changed("range(p - 1) => range(p - 2)"),
            "only chunks 0, 1 and 3 of x hold the sum: which chunk did the left neighbour finish",
        ),
        "no wait": (
            changed(
                f"{LAST} => dist.isend(finished, group=group, group_dst=(rank + 1) % p){NEXT}"
                "dist.irecv(next_finished, group=group, group_src=(rank - 1) % p)"
            ),
            "6 irecvs started and 3 waited for",
        ),
    },
)


# ---- 1.3 a broadcast in few rounds


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


P = "p = dist.get_world_size(group)"
TREE = Answers(
    solves="tree_broadcast",
    right={
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
            changed("while have_it < p => while 2 * have_it <= p"),
            "wrong: in a group of 3 with root 0, number 2 receives nothing",
        ),
        "no bound": (
            changed(" and place + have_it < p => "),
            "wrong: in a group of 3 with root 0, rank 1 waits in send of float32 [3] to rank 0",
        ),
        "for four at most": (
            changed("while have_it < p => while have_it < min(p, 4)"),
            "wrong: in a group of 5 with root 0, number 4 receives nothing",
        ),
        "a table for three and four": (
            table_for_three_and_four,
            "wrong: in a group of 5 with root 0, rank 3 waits in recv of float32 [3] from rank 1",
        ),
        "lists for three and four": (
            lists_for_three_and_four,
            "in a group of 5 with root 0, on rank 0: KeyError: 5",
        ),
        "no wait for what it sends": (
            changed("dist.send => dist.isend"),
            "isends started and 0 waited for",
        ),
        "no wait for what comes": (
            changed("dist.recv => dist.irecv"),
            "1 irecv started and 0 waited for",
        ),
        "root ignored": (
            changed("- root) % p => - 0) % p", "have_it + root) => have_it)"),
            "with root 1, everybody holds the tensor of number 0",
        ),
        "dist.broadcast": (
            changed(f"{P} => return dist.broadcast(x, group=group, group_src=root)\n    {P}"),
            "broadcast does the work for you",
        ),
        "barriers": (
            changed("have_it *= 2 => dist.barrier(group)\n        have_it *= 2"),
            "a barrier makes every rank wait for all others, and none is needed",
        ),
        "into a copy": (
            changed(f"{P} => x = x.clone()\n    {P}"),
            "holds its own tensor afterwards",
        ),
        "returned": (
            changed(f"{P} => x = x.clone()\n    {P}", "have_it *= 2 => have_it *= 2\n    return x"),
            "what is returned is the root's tensor",
        ),
        "nothing": (changed("while have_it < p => while False"), "number 1 receives nothing"),
        "group numbers as ranks of the world": (
            changed("group_dst=( => dst=(", "group_src=( => src=("),
            "group_dst and group_src count within the group",
        ),
        "forgets the group": (changed(f"{P} => group = dist.group.WORLD\n    {P}"), STILL_ALL),
        "never doubles": (changed("have_it *= 2 => pass"), "does your loop end?"),
        "a receive is missing": (
            changed("have_it <= place < 2 * have_it => place == have_it"),
            "rank 1 waits in send of float32 [3] to rank 3",
        ),
        "rounds for up to eight ranks": (
            changed(
                "    have_it = 1  # the places 0 to have_it - 1 hold the tensor\n => ",
                "while have_it < p: => for have_it in (1, 2, 4):",
                "        have_it *= 2\n => ",
            ),
            "in a group of 9 with root 0, number 8 receives nothing",
        ),
    },
)


# ---- 1.4 mend it


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


SUM = "dist.all_reduce(total, group=group)"
IF = "if dist.get_rank(group) == 0:"
MEAN = "return total / dist.get_world_size(group)"

MENDED = Answers(
    solves="mean_loss",
    right={
        "reduce": mean_with_reduce,
        "all_gather": mean_with_gather,
        "objects": mean_of_objects,
        "messages": mean_with_messages,
    },
    wrong={
        "in place": (changed("loss.clone() => loss"), "the loss that it was given has changed"),
        "on all ranks": (changed(f"{IF} => if True:"), ", and not None"),
        "the sum": (changed(f"{MEAN} => return total"), "the sum of the losses"),
        "divided by 4": (
            changed("dist.get_world_size(group) => 4"),
            ", and the mean of the losses is",
        ),
        "its own loss": (
            changed(f"{SUM} => pass"),
            "nothing was sent: number 0 knows no loss but its own",
        ),
        "no wait": (
            changed(f"{SUM} => dist.all_reduce(total, group=group, async_op=True)"),
            "1 all-reduce started and 0 waited for",
        ),
        "nan": (changed(f"{MEAN} => return total / 0 * 0"), "number 0 returned nan"),
        "others bring nothing": (
            changed(
                "loss.clone() => loss.clone() if group.rank() == 0 else torch.zeros_like(loss)"
            ),
            "returned its own loss divided by 4",
        ),
        "text": (
            changed(f"{MEAN} => return f'{{(total / group.size()).item():.3f}}'"),
            "and the mean is a number",
        ),
        "rank 0 alone": (
            changed(f"{SUM} => if dist.get_rank(group) == 0: {SUM}"),
            "rank 0 waits in all_reduce of float32 []",
        ),
        "forgets the group": (
            changed("group=group => group=None", "(group) => ()"),
            STILL_ALL,
        ),
        "rank 0 of the world": (
            changed("get_rank(group) => get_rank()"),
            "it returned None on every rank",
        ),
        "another rank": (changed(f"{IF} => if dist.get_rank() in (0, 2):"), "number 2 returned"),
        "nothing": (changed(f"    {MEAN} =>     pass"), "it returned None"),
    },
)


ANSWERS = {
    "1.0": PASS_ON,
    "1.1": REDUCE_SCATTER,
    "1.2": WHOLE,
    "1.3": TREE,
    "1.4": MENDED,
}
