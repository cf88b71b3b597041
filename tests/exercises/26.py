"""Answers to the exercises of lesson 26, two fleets."""

import math

import torch
import torch.distributed as dist
from answers import Answers, changed

from course.labs import l26_by_hand as by_hand

# ---- 26.1 advantages


def by_var_mean(rewards):
    variance, mean = torch.var_mean(rewards, dim=-1, keepdim=True)
    return (rewards - mean) / (variance.sqrt() + 1e-6)


def with_unsqueeze(rewards):
    mean = rewards.mean(-1).unsqueeze(-1)
    std = rewards.std(-1).unsqueeze(-1)
    return (rewards - mean) / (std + 1e-6)


def by_a_loop(rewards):
    groups = rewards.reshape(-1, rewards.shape[-1])
    done = [(group - group.mean()) / (group.std() + 1e-6) for group in groups]
    return torch.stack(done).reshape(rewards.shape)


ABOVE = "rewards - rewards.mean(-1, keepdim=True)"
DEVIATION = "(rewards.std(-1, keepdim=True) + 1e-6)"

ADVANTAGES = Answers(
    solves="advantages",
    right={
        "var_mean": by_var_mean,
        "unsqueeze": with_unsqueeze,
        "a loop": by_a_loop,
        "another small number": changed("1e-6 => 1e-8"),
    },
    wrong={
        "the mean of all": (changed(f"{ABOVE} => rewards - rewards.mean()"), "over all groups"),
        "the deviation of all": (
            changed(f"{DEVIATION} => (rewards.std() + 1e-6)"),
            "the deviation is that over all groups",
        ),
        "both of all": (
            changed(
                f"{ABOVE} => rewards - rewards.mean()", f"{DEVIATION} => (rewards.std() + 1e-6)"
            ),
            "mean and deviation are those over all groups",
        ),
        "the first dim": (changed("(-1, keepdim=True) => (0)"), "run over the first dim"),
        "no keepdim": (changed("(-1, keepdim=True) => (-1)"), "keep the dim"),
        "no keepdim of the mean": (
            changed("mean(-1, keepdim=True) => mean(-1)"),
            "the mean of gro",
        ),
        "no keepdim of the deviation": (
            changed("std(-1, keepdim=True) => std(-1)"),
            "the deviation of group 0",
        ),
        "not divided": (changed(f" / {DEVIATION} => "), "still to be divided"),
        "not compared": (changed(f"{ABOVE} => rewards"), "where is the mean of their group"),
        "the variance": (changed("std(-1 => var(-1"), "divided by the variance"),
        "G in the denominator": (changed("std(-1, => std(-1, correction=0,"), "with G - 1"),
        "the sign": (changed("return above => return -above"), "the sign is wrong"),
        "0 / 0": (changed(" + 1e-6 => "), "what keeps 0 / 0 away"),
        "the best of the group": (
            changed(f"{ABOVE} => rewards - rewards.amax(-1, keepdim=True)"),
            "compared with the best",
        ),
        "in place": (
            changed(
                f"above = {ABOVE} => rewards -= rewards.mean(-1, keepdim=True)\n    above = rewards"
            ),
            "has changed rewards",
        ),
        "no brackets": (
            changed("return above / => return rewards - rewards.mean(-1, keepdim=True) /"),
            "what do brackets do",
        ),
        "no sign": (changed("return above => return above.abs()"), "no advantage is below 0"),
        "the median": (
            changed(f"{ABOVE} => rewards - rewards.median(-1, keepdim=True).values"),
            "advantages of a group add up to",
        ),
        "the norm": (
            changed("rewards.std(-1, keepdim=True) => rewards.norm(dim=-1, keepdim=True)"),
            "right up to a factor",
        ),
        "a small number that is not small": (changed("1e-6 => 1e-2"), "right up to a factor"),
        "dim 1": (changed("(-1, => (1,"), "a group lies along the last one"),
        "no return": (changed("return above => above"), "returned None"),
    },
    takes_ranks=False,
)


# ---- 26.2 the loss


def loss_by_answers(new, old, advantage, counts, low=0.2, high=0.2, average="token"):
    """One answer after the other."""
    total = 0.0
    num_answers, num_places = counts.shape
    old = old.detach()
    advantage = advantage.detach()
    for number in range(num_answers):
        kept = counts[number]
        ratio = (new[number][kept] - old[number][kept]).exp()
        plain = ratio * advantage[number]
        bounded = torch.clamp(ratio, 1 - low, 1 + high) * advantage[number]
        gain = torch.min(plain, bounded)
        if average == "sequence":
            total = total + gain.mean() / num_answers
        elif average == "token":
            total = total + gain.sum() / counts.sum()
        else:
            total = total + gain.sum() / (num_answers * num_places)
    return -total


def loss_as_a_maximum(new, old, advantage, counts, low=0.2, high=0.2, average="token"):
    """The larger of two losses is the smaller of two gains."""
    ratio = new.exp() / old.detach().exp()
    a = advantage.detach().unsqueeze(1)
    losses = torch.max(-a * ratio, -a * ratio.clip(1 - low, 1 + high))
    losses = losses.masked_fill(~counts, 0.0)
    if average == "token":
        return losses.sum() / counts.sum()
    if average == "sequence":
        return (losses.sum(1) / counts.sum(1)).mean()
    return losses.mean()


def loss_by_where(new, old, advantage, counts, low=0.2, high=0.2, average="token"):
    """Clipped above for good answers, below for bad ones."""
    with torch.no_grad():
        before = old.clone()
        a = advantage[:, None].expand_as(before)
    ratio = torch.exp(new - before)
    bounded = torch.where(a > 0, ratio.clamp(max=1 + high), ratio.clamp(min=1 - low))
    gain = bounded * a * counts
    per_answer = gain.sum(-1)
    if average == "sequence":
        return -(per_answer / counts.sum(-1)).mean()
    return -per_answer.sum() / (counts.sum() if average == "token" else counts.numel())


MINIMUM = "torch.minimum(ratio * a, clipped * a)"
TOKEN = "weights = mask / mask.sum()\n"
SEQUENCE = "mask / mask.sum(1, keepdim=True) / len(mask)"

LOSS = Answers(
    solves="grpo_loss",
    right={
        "one answer after the other": loss_by_answers,
        "a maximum of losses": loss_as_a_maximum,
        "where": loss_by_where,
        "losses": changed("-(weights * gain).sum() => (weights * -gain).sum()"),
    },
    wrong={
        "the sign": (changed("return -( => return ("), "the sign is wrong"),
        "the larger": (changed("torch.minimum => torch.maximum"), "the gain is the smaller"),
        "no clip": (changed(f"{MINIMUM} => ratio * a"), "nothing is clipped"),
        "the clip alone": (changed(f"{MINIMUM} => clipped * a"), "is pulled back"),
        "the minimum of ratios": (
            changed(f"{MINIMUM} => torch.minimum(ratio, clipped) * a"),
            "A may be negative",
        ),
        "upside down": (changed("new - old.detach() => old.detach() - new"), "upside down"),
        "no exponential": (changed(f"{MINIMUM} => (new - old) * a"), "the exponential of that"),
        "low and high exchanged": (
            changed("clamp(1 - low, 1 + high) => clamp(1 - high, 1 + low)"),
            "low and high are exchanged",
        ),
        "fixed at 0.2": (
            changed("clamp(1 - low, 1 + high) => clamp(0.8, 1.2)"),
            "whatever low and high are",
        ),
        "the advantage across": (
            changed("detach()[:, None] => detach()"),
            "meets token t of all answers",
        ),
        "all places": (changed("counts.to( => torch.ones_like(counts).to("), "behind the end"),
        "the mean of masked gains": (
            changed(f"{TOKEN} => weights = mask / mask.numel()\n"),
            'that is the average "constant"',
        ),
        "the sum": (changed(f"{TOKEN} => weights = mask\n"), "by what is it divided"),
        "always by sequence": (
            changed(f"{TOKEN} => weights = {SEQUENCE}\n"),
            'that is the average "sequence"',
        ),
        "no mean over answers": (changed(" / len(mask) => "), "the mean over answers"),
        "T in place of the length": (
            changed("mask / mask.sum(1, keepdim=True) / => mask / mask.shape[1] /"),
            'that is the average "constant"',
        ),
        "always by token": (changed("mask.numel() => mask.sum()"), 'that is the average "token"'),
        "the longest answer": (
            changed("mask.numel() => (len(mask) * mask.sum(1).max())"),
            "T is the number of columns",
        ),
        "no mean over tokens": (
            changed("mask.numel() => len(mask)"),
            "by what is it still divided",
        ),
        "a number of Python": (changed(".sum()\n => .sum().item()\n"), "a float"),
        "the ratio detached": (
            changed("torch.exp(new - old.detach()) => torch.exp(new - old).detach()"),
            "no gradient flows",
        ),
        "new is constant, and old not": (
            changed("new - old.detach() => new.detach() - old"),
            "no gradient flows",
        ),
        "a gradient to old": (changed("old.detach() => old"), "a gradient flows to `old` too"),
        "a gradient to the advantage": (
            changed("advantage.detach() => advantage"),
            "a gradient flows to `advantage` too",
        ),
        "the clipped ratio detached": (
            changed("clipped = ratio => clipped = ratio.detach()"),
            "what is detached",
        ),
        "T in place of N": (
            changed("/ len(mask) => / mask.shape[1]"),
            "of two answers of 3 tokens and 1",
        ),
        "lengths of other answers": (
            changed("mask.sum(1, keepdim=True) => mask.sum(1)"),
            "by the length of answer t",
        ),
        "old is new": (changed("new - old.detach() => new - new.detach()"), "every ratio is 1"),
        "bounds exchanged": (
            changed("clamp(1 - low, 1 + high) => clamp(1 + high, 1 - low)"),
            "the larger bound first",
        ),
        "low and high as bounds": (
            changed("clamp(1 - low, 1 + high) => clamp(low, high)"),
            "its bounds are 1 - low and 1 + high",
        ),
        "low alone": (
            changed("clamp(1 - low, 1 + high) => clamp(1 - low, 1 + low)"),
            "made of low",
        ),
        "high alone": (
            changed("clamp(1 - low, 1 + high) => clamp(1 - high, 1 + high)"),
            "made of high",
        ),
        "the difference clipped": (
            changed("new - old.detach()) => (new - old.detach()).clamp(-low, high))"),
            "one token with A = 1 and ratio 0.3",
        ),
        "logarithms divided": (
            changed("torch.exp(new - old.detach()) => new / old.detach()"),
            "log-probabilities are divided",
        ),
        "no ratio": (changed("new - old.detach() => new"), "without the generator's"),
        "log p": (changed(f"{MINIMUM} => new * a"), "log p times A"),
        "one ratio for an answer": (
            changed(
                "torch.exp(new - old.detach()) => torch.exp(((new - old.detach()) * counts)"
                ".sum(1, keepdim=True) / counts.sum(1, keepdim=True)).expand_as(new)"
            ),
            "each token has its own",
        ),
        "normalised again": (
            changed(
                "a = advantage.detach()[:, None] => a = advantage.detach()[:, None]\n"
                "    a = (a - a.mean()) / (a.std() + 1e-6)"
            ),
            "normalised once more",
        ),
        "the plain ratio detached": (
            changed("(ratio * a, => (ratio.detach() * a,"),
            "its gradient is wrong",
        ),
        "one for each token": (
            changed("return -(weights * gain).sum() => return -(weights * gain)"),
            "the loss is one number",
        ),
        "no return": (changed("return -(weights => -(weights"), "returned None"),
    },
    takes_ranks=False,
)


# ---- 26.3 boxes


def common_by_ranges(one, other):
    found = []
    for a, n, b, m in zip(one.offsets, one.sizes, other.offsets, other.sizes):
        both = range(max(a, b), min(a + n, b + m))
        if not both:
            return None
        found.append((both.start, len(both)))
    offsets, sizes = zip(*found)
    return by_hand.Box(offsets, sizes)


def common_by_tensors(one, other):
    starts = torch.tensor([one.offsets, other.offsets])
    ends = starts + torch.tensor([one.sizes, other.sizes])
    first = starts.amax(0)
    sizes = ends.amin(0) - first
    if (sizes <= 0).any():
        return None
    return by_hand.Box(tuple(first.tolist()), tuple(sizes.tolist()))


def common_as_lists(one, other):
    offsets = [max(pair) for pair in zip(one.offsets, other.offsets)]
    ends = [
        min(one.offsets[dim] + one.sizes[dim], other.offsets[dim] + other.sizes[dim])
        for dim in range(len(offsets))
    ]
    sizes = [end - first for first, end in zip(offsets, ends)]
    return (offsets, sizes) if min(sizes) > 0 else None


def inside_by_slices(part, box, block):
    places = []
    for begin, first, size in zip(box.offsets, block.offsets, block.sizes):
        places.append(slice(first - begin, first - begin + size))
    return part[tuple(places)]


def inside_by_strides(part, box, block):
    start = part.storage_offset()
    for dim, stride in enumerate(part.stride()):
        start += (block.offsets[dim] - box.offsets[dim]) * stride
    return torch.as_strided(part, block.sizes, part.stride(), start)


FIRST = "first = block.offsets[dim] - box.offsets[dim]"
NOTHING = """if end <= first:
            return None"""

BOXES = Answers(
    solves=("common", "inside"),
    right={
        "ranges and slices": (common_by_ranges, inside_by_slices),
        "tensors and strides": (common_by_tensors, inside_by_strides),
        "lists": (common_as_lists, by_hand.inside),
    },
    wrong={
        "never None": (changed(f"{NOTHING}\n => pass\n"), "return None and not"),
        "None if smaller only": (changed("end <= first => end < first"), "that only touch"),
        "None at once": (
            changed("offsets = []\n => return None\n    offsets = []\n"),
            "returned None",
        ),
        "ends for sizes": (
            changed("sizes.append(end - first) => sizes.append(end)"),
            "you give the ends",
        ),
        "the smaller beginning": (changed("first = max( => first = min("), "both are there from"),
        "the larger end": (changed("end = min( => end = max("), "both are there for"),
        "offsets within the first": (
            changed("offsets.append(first) => offsets.append(first - one.offsets[dim])"),
            "yours count within the first box",
        ),
        "one dim": (
            changed("for dim in range(len(one.offsets)) => for dim in range(1)"),
            "for 2 dims",
        ),
        "numbers for one dim": (
            changed("return Box(tuple(offsets), tuple(sizes)) => return Box(offsets[0], sizes[0])"),
            "return a Box(offsets, sizes)",
        ),
        "offsets of the whole weight": (
            changed(f"{FIRST} => first = block.offsets[dim]"),
            "Where does the part begin",
        ),
        "offsets added": (
            changed("block.offsets[dim] - box => block.offsets[dim] + box"),
            "Where does the part begin",
        ),
        "from the beginning": (changed(f"{FIRST} => first = 0"), "these are other numbers"),
        "rows only": (
            changed("for dim in range(part.dim()) => for dim in range(1)"),
            "dim 1 is still whole",
        ),
        "the end in place of the length": (
            changed("first, block.sizes[dim]) => first, first + block.sizes[dim])"),
            "Where does the part begin",
        ),
        "a copy": (changed("return part\n => return part.clone()\n"), "it returned a copy"),
        "offsets and sizes exchanged": (
            changed("Box(tuple(offsets), tuple(sizes)) => Box(tuple(sizes), tuple(offsets))"),
            "offsets and sizes are exchanged",
        ),
        "always two dims": (
            changed("for dim in range(len(one.offsets)) => for dim in range(2)"),
            "and here it is 1",
        ),
        "two dims of a part": (
            changed("for dim in range(part.dim()) => for dim in range(2)"),
            "and here it is 1",
        ),
        "a view that is lost": (
            changed("part = part.narrow => part.narrow"),
            "`narrow` changes nothing",
        ),
        "the last dim alone": (
            changed("for dim in range(part.dim()) => for dim in (part.dim() - 1,)"),
            "dim 0 is still whole",
        ),
        "no return of inside": (changed("return part\n => part\n"), "returned None"),
        "no return of common": (changed("return Box( => Box("), "returned None"),
    },
    takes_ranks=False,
)


# ---- 26.4 the plan


def plan_by_sources(sources, targets):
    """Who has the same box is put together first."""
    replicas = {}
    for rank, box in sorted(sources.items()):
        replicas.setdefault(box, []).append(rank)
    sent = dict.fromkeys(sources, 0)
    moves = []
    for box, members in replicas.items():
        for target, needed in sorted(targets.items()):
            block = by_hand.common(box, needed)
            if block is None:
                continue
            source = sorted(members, key=lambda rank: (sent[rank], rank))[0]
            sent[source] += math.prod(block.sizes)
            moves.append(by_hand.Move(source, target, block))
    return moves


def plan_with_a_minimum(sources, targets):
    """The best of all who have a block, found by going through them."""
    load = dict.fromkeys(sources, 0)
    moves = []
    sources = {rank: sources[rank] for rank in sorted(sources)}
    for target in sorted(targets):
        needed = targets[target]
        done = set()
        for held in sources.values():
            block = by_hand.common(needed, held)
            if block is None or block in done:
                continue
            done.add(block)
            able = [rank for rank in sources if sources[rank] == held]
            best = able[0]
            for rank in able[1:]:
                if load[rank] < load[best]:
                    best = rank
            load[best] += math.prod(block.sizes)
            moves.append(by_hand.Move(best, target, block))
    return moves


def plan_in_turn(sources, targets):
    """Replicas take turns, however large a block is."""
    sources = dict(sorted(sources.items()))
    boxes = list(dict.fromkeys(sources.values()))
    turns = dict.fromkeys(boxes, 0)
    moves = []
    for target in sorted(targets):
        for box in boxes:
            block = by_hand.common(box, targets[target])
            if block is not None:
                members = [rank for rank, own in sources.items() if own == box]
                source = members[turns[box] % len(members)]
                turns[box] += 1
                moves.append((source, target, block))
    return moves


CHOICE = "source = min(replicas, key=num_sent.get)"
APPEND = "moves.append(Move(source, target, block))"
REPLICAS = f"""for block, replicas in holders.items():
            {CHOICE}
            num_sent[source] += math.prod(block.sizes)
            {APPEND}"""
EACH = f"""for block, replicas in holders.items():
            for source in replicas:
                {APPEND}"""

PLAN = Answers(
    solves="plan",
    right={
        "by sources": plan_by_sources,
        "going through all": plan_with_a_minimum,
        "a tuple": changed("return moves => return tuple(moves)"),
    },
    wrong={
        "each replica sends": (changed(f"{REPLICAS} => {EACH}"), "of ranks with the same box one"),
        "always the first": (changed(f"{CHOICE} => source = replicas[0]"), "different amounts"),
        "always the last": (changed(f"{CHOICE} => source = replicas[-1]"), "different amounts"),
        "never counted": (
            changed("num_sent[source] += math.prod(block.sizes) => pass"),
            "different amounts",
        ),
        "messages are counted": (
            changed("num_sent[source] += math.prod(block.sizes) => num_sent[source] += 1"),
            "messages are spread evenly",
        ),
        "in turn": (plan_in_turn, "messages are spread evenly"),
        "whole parts are counted": (
            changed("math.prod(block.sizes) => math.prod(sources[source].sizes)"),
            "messages are spread evenly",
        ),
        "rows are counted": (
            changed("math.prod(block.sizes) => block.sizes[0]"),
            "are spread evenly",
        ),
        "sizes are added": (changed("math.prod(block.sizes) => sum(block.sizes)"), "spread evenly"),
        "targets as they come": (changed("sorted(targets) => targets"), "in another order"),
        "sources as they come": (changed("sorted(sources) => sources"), "in another order"),
        "the most loaded": (changed("min(replicas => max(replicas"), "different amounts"),
        "whole parts": (
            changed("common(sources[source], targets[target]) => sources[source]"),
            "What do both have in common",
        ),
        "what is needed": (
            changed("common(sources[source], targets[target]) => targets[target]"),
            "What do both have in common",
        ),
        "only whole parts that fit": (
            changed("if block is not None => if block == sources[source]"),
            "from nobody",
        ),
        "one block for each target": (
            changed(f"{APPEND} => {APPEND}\n            break"),
            "from nobody",
        ),
        "all blocks, also none": (
            changed("if block is not None => if True"),
            "'NoneType' object has no attribute 'sizes'",
        ),
        "source and target exchanged": (
            changed("Move(source, target, block) => Move(target, source, block)"),
            "source and target are exchanged",
        ),
        "ranks counted in their fleet": (
            changed("Move(source, target => Move(source, target - min(targets)"),
            "counted from 0 in each fleet",
        ),
        "from equal ranks": (
            changed("in sorted(sources): => in sorted(sources)[target % len(sources) :: 99]:"),
            "from nobody",
        ),
        "a set": (changed("return moves => return set(moves)"), "return a list of moves"),
        "no return": (changed("return moves => moves"), "returned None"),
    },
    takes_ranks=False,
)


# ---- 26.5 the exchange


def exchange_in_a_batch(moves, box, part):
    """batch_isend_irecv."""
    rank = dist.get_rank()
    operations, arriving = [], []
    for source, target, block in moves:
        if rank == source:
            own = by_hand.inside(part, box, block).clone().contiguous()
            operations.append(dist.P2POp(dist.isend, own, target))
        elif rank == target:
            buffer = part.new_empty(block.sizes)
            operations.append(dist.P2POp(dist.irecv, buffer, source))
            arriving.append((block, buffer))
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    for block, buffer in arriving:
        by_hand.inside(part, box, block)[:] = buffer


def exchange_one_by_one(moves, box, part):
    """Move after move; as no rank sends and receives, nobody waits in a circle."""
    rank = dist.get_rank()
    for move in moves:
        if rank == move.source:
            dist.send(by_hand.inside(part, box, move.block).contiguous(), move.target)
        if rank == move.target:
            buffer = torch.zeros(move.block.sizes, dtype=part.dtype)
            dist.recv(buffer, move.source)
            by_hand.inside(part, box, move.block).copy_(buffer)


def exchange_as_they_come(moves, box, part):
    """All are started; then each is waited for and copied."""
    rank = dist.get_rank()
    leaving, arriving = [], []
    for move in moves:
        if rank == move.source:
            own = by_hand.inside(part, box, move.block).clone().contiguous()
            leaving.append(dist.isend(own, move.target))
        elif rank == move.target:
            buffer = part.new_empty(move.block.sizes)
            arriving.append((move.block, buffer, dist.irecv(buffer, move.source)))
    for block, buffer, work in arriving:
        work.wait()
        by_hand.inside(part, box, block).copy_(buffer)
    for work in leaving:
        work.wait()


def exchange_flat(moves, box, part):
    """Blocks as rows of numbers."""
    me = dist.get_rank()
    sends = [move for move in moves if move.source == me]
    receives = [move for move in moves if move.target == me]
    flat = [by_hand.inside(part, box, move.block).reshape(-1).contiguous() for move in sends]
    places = [part.new_empty(math.prod(move.block.sizes)) for move in receives]
    works = [dist.isend(data, move.target) for data, move in zip(flat, sends)]
    works += [dist.irecv(data, move.source) for data, move in zip(places, receives)]
    for work in works:
        work.wait()
    for data, move in zip(places, receives):
        by_hand.inside(part, box, move.block).copy_(data.view(move.block.sizes))


READ = "block = inside(part, box, move.block).contiguous()"
SEND = "started.append(dist.isend(block, move.target))"
RECEIVE = "started.append(dist.irecv(block, move.source))"
WRITE = "inside(part, box, place).copy_(block)"
WAIT = """for work in started:
        work.wait()"""

EXCHANGE = Answers(
    solves="exchange",
    right={
        "in a batch": exchange_in_a_batch,
        "each copied when it is there": exchange_as_they_come,
        "flat": exchange_flat,
        "new_empty": changed(
            "torch.empty(move.block.sizes, dtype=part.dtype) => part.new_empty(move.block.sizes)"
        ),
    },
    wrong={
        "the whole part is sent": (
            changed(f"{READ} => block = part.contiguous()"),
            "send of float64 [6, 8] to rank 2",
        ),
        "read from the beginning": (
            changed(
                f"{READ} => rows, columns = move.block.sizes\n"
                "            block = part[:rows, :columns].contiguous()"
            ),
            "does a sender read its block",
        ),
        "read at the place in the whole": (
            changed(
                f"{READ} => block = inside(part, Box((0, 0), box.sizes), move.block).contiguous()"
            ),
            "Where does the part begin",
        ),
        "written at the beginning": (
            changed(f"{WRITE} => part[: place.sizes[0], : place.sizes[1]].copy_(block)"),
            "were not written",
        ),
        "written nowhere": (changed(f"{WRITE} => pass"), "nothing has arrived"),
        "written into a copy": (
            changed(f"{WRITE} => inside(part, box, place).clone().copy_(block)"),
            "nothing has arrived",
        ),
        "a new tensor is returned": (
            changed(
                f"{WRITE} => part = part.clone()\n        inside(part, box, place).copy_(block)",
                "copy_(block)\n => copy_(block)\n    return part\n",
            ),
            "write into the one that is given",
        ),
        "not waited for": (changed(f"{WAIT} => pass"), "without wait()"),
        "sends are not waited for": (
            changed(f"{SEND} => dist.isend(block, move.target)"),
            "without wait()",
        ),
        "one by one": (exchange_one_by_one, "it waits for a message before it starts 1 of its 2"),
        "a wait for each at once": (
            changed(
                f"{SEND} => dist.isend(block, move.target).wait()",
                f"{RECEIVE} => dist.irecv(block, move.source).wait()",
            ),
            "start all with isend and irecv",
        ),
        "sends at once": (
            changed(f"{SEND} => dist.send(block, move.target)"),
            "start all with isend and irecv",
        ),
        "receives at once": (
            changed(f"{RECEIVE} => dist.recv(block, move.source)"),
            "start all with isend and irecv",
        ),
        "copied before the wait": (
            changed(
                "arriving.append((move.block, block)) => inside(part, box, move.block).copy_(block)"
            ),
            "before anything had been waited for",
        ),
        "waited for last": (
            changed(
                f"{WAIT} => pass",
                f"{WRITE} => {WRITE}\n    for work in started:\n        work.wait()",
            ),
            "before anything had been waited for",
        ),
        "waited for twice": (
            changed(f"{WAIT} => {WAIT}\n        work.wait()"),
            "was waited for twice",
        ),
        "one buffer for all": (
            changed(
                "arriving = [] => arriving = []\n"
                "    buffer = torch.empty(part.numel(), dtype=part.dtype)",
                "torch.empty(move.block.sizes, dtype=part.dtype) => "
                "buffer[: math.prod(move.block.sizes)].view(move.block.sizes)",
            ),
            "while its irecv was under way",
        ),
        "with gaps": (changed(".contiguous() => "), "a message has to be contiguous"),
        "received into the part": (
            changed(
                "block = torch.empty(move.block.sizes, dtype=part.dtype) => "
                "block = inside(part, box, move.block)"
            ),
            "a message has to be contiguous",
        ),
        "float32": (changed(", dtype=part.dtype => "), "recv of float32"),
        "nobody receives": (changed(f"{RECEIVE} => pass"), "ranks 0 and 1 wait in send"),
        "sent to oneself": (
            changed("isend(block, move.target) => isend(block, rank)"),
            "from a rank to itself",
        ),
        "received from the target": (
            changed("irecv(block, move.source) => irecv(block, move.target)"),
            "from a rank to itself",
        ),
        "only the first move": (
            changed("for move in moves: => for move in moves[:1]:"),
            "were not written",
        ),
        "a broadcast": (
            changed(
                f"{SEND} => pass",
                f"{RECEIVE} => pass",
                f"{WAIT} => whole = torch.ones(1, dtype=part.dtype)\n"
                "    dist.broadcast(whole, src=0)",
            ),
            "send blocks from rank to rank",
        ),
        "labcode's own": (by_hand.exchange, "labcode's own answer"),
    },
)


# ---- 26.6 the clinic

DIAGNOSES = Answers(
    solves="diagnoses",
    right={
        "another order": {"Z": "stale", "Y": "adapters", "X": "shard"},
        "small letters and large": {"x": "Shard", "y": "ADAPTERS", "z": "stale"},
        "with a blank": {"X": "shard", "Y": "adapters", "Z": "stale "},
    },
    wrong={
        "X and Y exchanged": (
            {"X": "adapters", "Y": "shard", "Z": "stale"},
            "as they add nothing at first",
        ),
        "X and Z exchanged": (
            {"X": "stale", "Y": "adapters", "Z": "shard"},
            "before the first update there is no older version",
        ),
        "Y and Z exchanged": (
            {"X": "shard", "Y": "stale", "Z": "adapters"},
            "Y: with old weights all of them would differ",
        ),
        "Z has adapters": (
            {"X": "shard", "Y": "adapters", "Z": "adapters"},
            "Z: adapters stand beside some weights",
        ),
        "Y has a shard": ({"X": "shard", "Y": "shard", "Z": "stale"}, "Y's is 1"),
        "half": ({"X": "half", "Y": "adapters", "Z": "stale"}, "both ranks have the same"),
        "half of Z": ({"X": "shard", "Y": "adapters", "Z": "half"}, "both ranks differ"),
        "the dtype": ({"X": "shard", "Y": "adapters", "Z": "dtype"}, "arrived as they are"),
        "the temperature": (
            {"X": "temperature", "Y": "adapters", "Z": "stale"},
            "changes log-probs, and no weight",
        ),
        "one is missing": ({"X": "shard", "Y": "adapters"}, "Z has no diagnosis"),
        "free words": (
            {"X": "wrong rows", "Y": "adapters", "Z": "stale"},
            "there is no 'wrong rows'",
        ),
        "a list": (["shard", "adapters", "stale"], "give a dict"),
    },
    takes_ranks=False,
)

ANSWERS = {
    "26.1": ADVANTAGES,
    "26.2": LOSS,
    "26.3": BOXES,
    "26.4": PLAN,
    "26.5": EXCHANGE,
    "26.6": DIAGNOSES,
}
