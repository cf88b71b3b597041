"""Solutions that cells of lesson 26 show and use; `make notebooks` writes this."""

from typing import NamedTuple
import math
import torch
import torch.distributed as dist


def advantages(rewards):
    """[.., G] -> [.., G]: how much better than its group each answer is."""
    above = rewards - rewards.mean(-1, keepdim=True)
    return above / (rewards.std(-1, keepdim=True) + 1e-6)


def grpo_loss(new, old, advantage, counts, low=0.2, high=0.2, average="token"):
    """[B, T], [B, T], [B], [B, T] -> a number."""
    ratio = torch.exp(new - old.detach())
    clipped = ratio.clamp(1 - low, 1 + high)
    a = advantage.detach()[:, None]
    gain = torch.minimum(ratio * a, clipped * a)
    mask = counts.to(gain.dtype)
    if average == "sequence":
        weights = mask / mask.sum(1, keepdim=True) / len(mask)
    elif average == "token":
        weights = mask / mask.sum()
    else:
        weights = mask / mask.numel()
    return -(weights * gain).sum()


class Box(NamedTuple):
    """A block of a whole weight: where it begins along each dim, and its sizes."""

    offsets: tuple
    sizes: tuple


class Move(NamedTuple):
    """A block that a rank sends to another one; ranks are those of the whole job."""

    source: int
    target: int
    block: Box


def common(one, other):
    """Two boxes -> the box that both have, or None."""
    offsets = []
    sizes = []
    for dim in range(len(one.offsets)):
        first = max(one.offsets[dim], other.offsets[dim])
        end = min(
            one.offsets[dim] + one.sizes[dim],
            other.offsets[dim] + other.sizes[dim],
        )
        if end <= first:
            return None
        offsets.append(first)
        sizes.append(end - first)
    return Box(tuple(offsets), tuple(sizes))


def inside(part, box, block):
    """The numbers of a block, as a view of the part whose box is given."""
    for dim in range(part.dim()):
        first = block.offsets[dim] - box.offsets[dim]
        part = part.narrow(dim, first, block.sizes[dim])
    return part


def plan(sources, targets):
    """{rank: box} of those who send and of those who need -> list of moves."""
    num_sent = dict.fromkeys(sources, 0)
    moves = []
    for target in sorted(targets):
        holders = {}
        for source in sorted(sources):
            block = common(sources[source], targets[target])
            if block is not None:
                holders.setdefault(block, []).append(source)
        for block, replicas in holders.items():
            source = min(replicas, key=num_sent.get)
            num_sent[source] += math.prod(block.sizes)
            moves.append(Move(source, target, block))
    return moves


def exchange(moves, box, part):
    """Send and receive the blocks of a plan; `part` of a target is filled."""
    rank = dist.get_rank()
    started = []
    arriving = []
    for move in moves:
        if move.source == rank:
            block = inside(part, box, move.block).contiguous()
            started.append(dist.isend(block, move.target))
        if move.target == rank:
            block = torch.empty(move.block.sizes, dtype=part.dtype)
            started.append(dist.irecv(block, move.source))
            arriving.append((move.block, block))
    for work in started:
        work.wait()
    for place, block in arriving:
        inside(part, box, place).copy_(block)
