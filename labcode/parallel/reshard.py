"""Weights from one layout to another, point to point: from the ranks that train to others.

Reinforcement learning has two fleets. The learner updates the weights, cut for training; the
generator writes text with them, cut for generation. After each update every rank of the generator
needs its part of each weight anew. A plan says which block goes from which rank to which:

    learner, fsdp 4     generator, tp 2         rows of one weight
    rank 0  rows 0-3
    rank 1  rows 4-7    rank 4  rows 0-7        0 -> 4 rows 0-3,  1 -> 4 rows 4-7
    rank 2  rows 8-11   rank 5  rows 8-15       2 -> 5 rows 8-11, 3 -> 5 rows 12-15
    rank 3  rows 12-15

Each number travels once to each rank that needs it, so that a rank receives its part and nothing
else. The usual way is simpler and dearer: collect each weight whole on the learner, and broadcast
it; then every rank of a generator of tp = t receives t times its part (`gather_and_broadcast`).

What others do: OpenRLHF gathers a weight on the learner's first rank, which broadcasts it to all
ranks of all engines (`openrlhf/trainer/ray/ppo_actor.py`, commit 012aae8). slime gathers over tp
and broadcasts in buckets of `update_weight_buffer_size`; a `weight_version` goes with them
(`slime/backends/megatron_utils/update_weight_utils.py`). NeMo-RL broadcasts whole weights unless
`refit_transport: nccl_reshard` sends from shard to shard, which "provides the best performance for
large models" (docs.nvidia.com/nemo/rl, Weight Refit). torchforge's trainer puts its state dict into
TorchStore, from which the generator fetches it.

Held by: tests/unit/test_reshard.py, tests/ranks/test_fleets.py
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from labcode.parallel.boxes import Box, boxes_of
from labcode.parallel.model import ParallelModel

Boxes = Mapping[str, Sequence[Box]]  # {name of a weight: what a rank has of it}
Layout = Mapping[int, Boxes]  # {global rank: what it has}
VERSION_BYTES = 8  # of the int64 that goes with each message


class Move(NamedTuple):
    """A block of a weight that one rank sends to another.

    Args:
        name: The weight.
        source: The global rank that sends it.
        target: The global rank that receives it.
        read: Where it lies in the sender's part.
        write: Where it lies in the receiver's part.
    """

    name: str
    source: int
    target: int
    read: Box
    write: Box

    @property
    def num_values(self) -> int:
        """How many numbers are sent."""
        return math.prod(self.write.sizes)


def plan(sources: Layout, targets: Layout) -> list[Move]:
    """Which block goes from which rank to which: arithmetic, nothing is communicated.

    Each number that a rank of `targets` needs is sent to it once. Where several ranks have it, the
    one sends it that has the least to send so far.

    Args:
        sources: What each rank has that sends.
        targets: What each rank needs; other ranks.

    Returns:
        The moves, the same list on every rank that calls it with the same layouts.

    Raises:
        ValueError: A rank is on both sides, or no rank has a number that one needs.

    Held by: tests/unit/test_reshard.py
    """
    both = sorted(sources.keys() & targets.keys())
    if both:
        raise ValueError(
            f"ranks {both} are to send and to receive: give fleets without a rank in common"
        )
    holders = _holders(sources)
    num_sent = dict.fromkeys(sources, 0)  # numbers, by rank
    moves = []
    for target, name, box in _each_box(targets):
        num_found = 0
        for copies in holders.get(name, ()):
            write = box.common(copies[0][1])
            if write is None:
                continue
            source, held = copies[0]
            for rank, same in copies:
                if num_sent[rank] < num_sent[source]:
                    source = rank
                    held = same
            read = held.common(box)
            assert read is not None, "if a box meets another one, that one meets it"
            move = Move(name, source, target, read, write)
            moves.append(move)
            num_sent[source] += move.num_values
            num_found += move.num_values
        if num_found != math.prod(box.sizes):
            raise ValueError(
                f"rank {target} needs {math.prod(box.sizes)} numbers of {name} from "
                f"{list(box.offsets)} on, and the ranks that send have {num_found} of them: "
                "give both fleets the same model"
            )
    return moves


def _each_box(layout: Layout) -> Iterable[tuple[int, str, Box]]:
    for rank, boxes in layout.items():
        for name, own in boxes.items():
            for box in own:
                yield rank, name, box


def _holders(layout: Layout) -> dict[str, list[list[tuple[int, Box]]]]:
    """For each weight its different blocks, each as the ranks that have it and where."""
    found: dict[str, dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[int, Box]]]] = {}
    for rank, name, box in _each_box(layout):
        of_weight = found.setdefault(name, {})
        of_weight.setdefault((box.offsets, box.sizes), []).append((rank, box))
    return {name: list(blocks.values()) for name, blocks in found.items()}


def send_bytes(moves: Iterable[Move], rank: int, value_bytes: int) -> int:
    """What a rank sends in one exchange: its blocks, and a version to each receiver.

    Args:
        moves: The plan.
        rank: Global rank.
        value_bytes: Size of one number on the way.
    """
    own = [move for move in moves if move.source == rank]
    receivers = {move.target for move in own}
    return sum(move.num_values for move in own) * value_bytes + len(receivers) * VERSION_BYTES


def recv_bytes(moves: Iterable[Move], rank: int, value_bytes: int) -> int:
    """What a rank receives in one exchange: its blocks, and a version from each sender."""
    own = [move for move in moves if move.target == rank]
    senders = {move.source for move in own}
    return sum(move.num_values for move in own) * value_bytes + len(senders) * VERSION_BYTES


# ---- layouts of models


def parts_of(model: ParallelModel) -> dict[str, torch.Tensor]:
    """This rank's part of each weight, by its name in the whole model; not copies.

    A tied weight has its first name, so that a stage with the head alone has the embedding.
    """
    tied = model.plan.tied
    return {
        tied[0] if name in tied else name: weight.detach() for name, weight in model.weights.items()
    }


def boxes_of_model(model: ParallelModel) -> dict[str, list[Box]]:
    """The blocks of which this rank's parts are made, under the names of `parts_of`."""
    own = [boxes_of(model.shardings[name], model.grid) for name in model.weights]
    return dict(zip(parts_of(model), own, strict=True))


def layouts_of_fleets(
    boxes: Boxes, is_source: bool, group: dist.ProcessGroup
) -> tuple[dict[int, Boxes], dict[int, Boxes]]:
    """What each rank of two fleets has: (the ranks that send, those that receive).

    Communicates: an all-gather of the boxes, once; no weights.

    Args:
        boxes: This rank's own, from `boxes_of_model`.
        is_source: Whether this rank's fleet sends.
        group: The ranks of both fleets.
    """
    told: list[tuple[bool, Boxes]] = [(False, {})] * group.size()
    dist.all_gather_object(told, (is_source, boxes), group=group)
    sources = {}
    targets = {}
    for rank, (sends, theirs) in zip(dist.get_process_group_ranks(group), told, strict=True):
        (sources if sends else targets)[rank] = theirs
    return sources, targets


# ---- the exchange


@torch.no_grad()
def exchange(
    moves: Sequence[Move],
    parts: Mapping[str, torch.Tensor],
    version: int,
    group: dist.ProcessGroup,
    dtype: torch.dtype,
) -> int:
    """Send and receive the blocks of a plan; every rank that has a part in it calls it.

    Communicates: between two ranks that share blocks one message with all of them, and one with
        the version; all of them at once. `send_bytes` and `recv_bytes` say how much.

    Args:
        moves: The plan, the same on all ranks; or some of its moves, such as those of one layer,
            since the messages of one call exist beside the weights.
        parts: This rank's parts; what it receives is written into them.
        version: The number of this state of the weights; of a rank that receives it is not read.
        group: The ranks of both fleets.
        dtype: The dtype in which the weights travel, such as that of the generator.

    Returns:
        The version of the weights: that of the senders.

    Raises:
        ValueError: The senders have sent different versions.

    Held by: tests/ranks/test_fleets.py::test_the_generator_gets_the_slices_of_the_whole_weights
    """
    rank = dist.get_rank()
    device = next(iter(parts.values())).device
    outgoing: dict[int, list[torch.Tensor]] = {}
    arriving: dict[int, list[Move]] = {}
    for move in moves:  # in the order of the plan, so that both ends cut a message in the same way
        if move.source == rank:
            block = move.read.view(parts[move.name])
            outgoing.setdefault(move.target, []).append(block.flatten().to(dtype))
        elif move.target == rank:
            arriving.setdefault(move.source, []).append(move)
    operations = []
    versions = {}
    messages = {}
    own_version = torch.tensor(version, device=device)
    for target, blocks in outgoing.items():
        operations.append(dist.P2POp(dist.isend, own_version, target, group))
        operations.append(dist.P2POp(dist.isend, torch.cat(blocks), target, group))
    for source, theirs in arriving.items():
        length = sum(move.num_values for move in theirs)
        versions[source] = torch.empty_like(own_version)
        messages[source] = torch.empty(length, dtype=dtype, device=device)
        operations.append(dist.P2POp(dist.irecv, versions[source], source, group))
        operations.append(dist.P2POp(dist.irecv, messages[source], source, group))
    # All are under way before one is waited for: otherwise two ranks could wait for each other.
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    for source, theirs in arriving.items():
        blocks = messages[source].split([move.num_values for move in theirs])
        for move, block in zip(theirs, blocks, strict=True):
            place = move.write.view(parts[move.name])
            place.copy_(block.view(move.write.sizes))
    return _one_version({source: int(sent) for source, sent in versions.items()}, version)


def _one_version(of_sources: Mapping[int, int], own: int) -> int:
    """The version that all senders have sent; on a rank that only sends its own."""
    found = set(of_sources.values()) or {own}
    if len(found) > 1:
        in_order = sorted(of_sources.items())
        said = ", ".join(f"rank {source} version {sent}" for source, sent in in_order)
        raise ValueError(
            f"the weights are of different versions, {said}: every rank that sends has to call "
            "exchange after the same step"
        )
    return found.pop()


class StaleError(ValueError):
    """Weights or samples are older than the learner allows."""


def check_lag(version: int, newest: int, max_lag: int) -> int:
    """How many updates of the weights a version lies behind the newest one.

    Args:
        version: Of the weights that the generator has, or that a sample was drawn with.
        newest: Of the weights that the learner has.
        max_lag: How many it may lie behind; 0: every sample is from the newest weights.

    Raises:
        StaleError: It lies further behind, or is newer than the newest.

    Source: the same bound is `max_staleness` in TorchRL's StalenessAwareSampler; NeMo-RL keeps a
        `target_weight_versions` of its samples (docs.nvidia.com/nemo/rl, weight_sync.interfaces).
    Held by: tests/unit/test_reshard.py::test_weights_may_lie_so_far_behind
    """
    lag = newest - version
    if not 0 <= lag <= max_lag:
        raise StaleError(
            f"version {version} of the weights is {lag} updates behind the learner's {newest}, and "
            f"max_lag is {max_lag}: exchange weights before you generate, or raise max_lag"
        )
    return lag


# ---- the usual way, to compare with


@torch.no_grad()
def gather_and_broadcast(
    model: ParallelModel, is_source: bool, group: dist.ProcessGroup | None, dtype: torch.dtype
) -> None:
    """Collect each weight whole on the ranks that send; its first one sends it to all of `group`.

    Communicates: for each weight what `ParamSharding.full` does on the ranks that send, and a
        broadcast of the whole weight: each rank that receives gets all of it and keeps its part.

    Args:
        model: This rank's model, of the fleet that sends or of the other one.
        is_source: Which of them.
        group: The first rank of the fleet that sends, which comes first, and all that receive; None
            on the other ranks that send.
        dtype: The dtype in which the weights travel.
    """
    tied = model.plan.tied[1:]  # the same weight under another name
    if is_source:
        for name, whole in model.full_state_dict():
            if group is not None and name not in tied:
                dist.broadcast(whole.to(dtype), group=group, group_src=0)
        return
    parts = parts_of(model)
    boxes = boxes_of_model(model)
    example = next(iter(parts.values()))
    for name, (_, shape) in model.full_weights.items():
        if name in tied:
            continue
        whole = example.new_empty(shape, dtype=dtype)
        dist.broadcast(whole, group=group, group_src=0)
        for box in boxes.get(name, ()):
            in_whole = box._replace(own_offsets=box.offsets)
            box.view(parts[name]).copy_(in_whole.view(whole))
