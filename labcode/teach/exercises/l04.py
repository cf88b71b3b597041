"""Checks of lesson 04, data parallel by hand. The text of each assertion is a hint."""

import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from labcode.comm.counting import counted
from labcode.models.gpt import loss as gpt_loss
from labcode.pool.ranks import RankError, Ranks
from labcode.pool.record import ranks_text
from labcode.teach.check import Exercise, is_stub, reason
from labcode.teach.exercises import scripts, small_gpt
from labcode.teach.exercises.all_reduces import Sent, Watch
from labcode.teach.exercises.on_ranks import without
from labcode.teach.exercises.script_source import what_stays_on_the_cpu
from labcode.teach.exercises.scripts import distance
from labcode.teach.labs import l04_by_hand

EXERCISES = {
    "4.1": Exercise(
        praise="the mean over four ranks, and over each pair",
        hints=(
            "An all-reduce adds up. What turns a sum over the group into a mean?",
            "How many ranks does the group have? It need not be the world size.",
        ),
    ),
    "4.2": Exercise(
        praise="every sample of every rank has the same weight",
        hints=(
            "Which number do all ranks need before they can weigh their gradients? Who knows it?",
            "The gradient of a mean over `mine` samples, times `mine`, is the gradient of a sum.",
        ),
    ),
    "4.3": Exercise(
        praise="the gradient of the whole batch, and it travelled once",
        hints=(
            "What is in `.grad` before your first backward?",
            "There are two divisions: by the number of micro-batches, and by the number of ranks.",
        ),
    ),
    "4.4": Exercise(
        praise="one and two ranks train like one process, and only rank 0 speaks and saves",
        hints=(
            "The number of samples that all ranks read together is `global_batch`. How many does "
            "one rank read?",
            "The loss that rank 0 knows is that of its own samples. Which collective gives it the "
            "sum over all ranks?",
            "`DistributedDataParallel` keeps your model in its attribute `module`.",
        ),
    ),
}


class _Result(NamedTuple):
    """What a rank has after the learner's function.

    Args:
        own: Its own gradient before.
        found: Its gradient afterwards.
        sent: Its all-reduces.
    """

    own: torch.Tensor
    found: torch.Tensor
    sent: list[Sent]


# ---- 4.1


def _averaged(rank: int, average: Callable[..., Any], grouping: Sequence[Sequence[int]]) -> _Result:
    group = small_gpt.own_group(grouping)
    members = dist.get_process_group_ranks(group)
    share = small_gpt.shares(members, [4] * len(members))[members.index(rank)]
    module = small_gpt.model()
    params = list(module.parameters())
    frozen = params[len(params) // 2]  # others come behind it
    frozen.requires_grad_(False)
    small_gpt.backward(module, share)
    own = small_gpt.gradient(module).clone()
    with torch.no_grad():
        for param in params:
            param += rank  # other weights on each rank: who sends weights changes them
    before = small_gpt.weights(module)
    watch = Watch()
    with without(l04_by_hand.average_gradients), watch.active():
        _average_some(average, module, group)
        sent = watch.taken()
    assert torch.equal(before, small_gpt.weights(module)), (
        "the weights have changed: average the gradients only"
    )
    assert frozen.grad is None, (
        "the parameter that is not trained had no gradient, and now it has one: the optimizer will "
        "treat it like the others, and weight decay alone makes it shrink"
    )
    return _Result(own, small_gpt.gradient(module), sent)


def _check_waits(case: str, sent: Sequence[Sent]) -> None:
    """Every all-reduce was waited for before anybody used its result."""
    asynchronous = [one for one in sent if one.is_async]
    arrived = [one for one in asynchronous if one.arrived]
    number = len(asynchronous)
    assert len(arrived) == number, (
        case + f"{number} all-reduce{'s were' if number > 1 else ' was'} started with "
        f"async_op=True and {len(arrived)} waited for: before wait() has returned nobody knows "
        "what a tensor holds"
    )
    assert not any(one.touched for one in arrived), (
        case + "a tensor was changed while its all-reduce was under way: what comes after wait()?"
    )


def _average_some(average: Callable[..., Any], module: nn.Module, group: dist.ProcessGroup) -> None:
    """Call the learner's function, and explain what happens at a frozen parameter."""
    try:
        average(module, group)
    except (TypeError, AttributeError) as error:
        assert "NoneType" not in str(error), (
            "one parameter is not trained, its `.grad` is None: leave it alone"
        )
        raise


def average_gradients(average: Callable[..., Any], ranks: Ranks) -> None:
    """The learner's `average_gradients(model, group)` on all ranks, and on two pairs."""
    for grouping in small_gpt.GROUPINGS:
        results = small_gpt.run(ranks, _averaged, average, grouping)
        for members in grouping:
            _check_average(members, results)


def _check_average(members: Sequence[int], results: Sequence[_Result]) -> None:
    case = small_gpt.named(members)
    p = len(members)
    owns = [results[rank].own for rank in members]
    expected = torch.stack(owns).mean(0)
    world_mean = torch.stack([result.own for result in results]).mean(0)
    for rank in members:
        found = results[rank].found
        _check_waits(case, results[rank].sent)
        assert small_gpt.distance(found, results[rank].own) > 1e-9, (
            case + f"rank {rank} still has its own gradient: is the result written into .grad?"
        )
        too_long = small_gpt.times_too_long(found, expected)
        assert too_long is None or abs(too_long - 1) < 1e-9, (
            case + f"right direction, but {too_long:.3g} times as long as the mean: the group has "
            f"{p} ranks"
        )
        in_world = small_gpt.times_too_long(found, world_mean)
        assert in_world is None or len(results) == p, (
            case + f"rank {rank} has gradients of ranks outside of the group: "
            "which group does your all-reduce use?"
        )
        _check_all_reached(case, rank, results[rank], expected)
        off = small_gpt.distance(found, expected)
        others = _who_is_right(members, results, expected)
        assert off < 1e-9, case + f"rank {rank} is {_far(off, 'the mean')}{others}"


def _who_is_right(
    members: Sequence[int], results: Sequence[_Result], expected: torch.Tensor
) -> str:
    """ ", and rank 0 is right"; "" if none is."""
    right = []
    for rank in members:
        if small_gpt.distance(results[rank].found, expected) < 1e-9:
            right.append(rank)
    if not right:
        return ""
    return f", and {ranks_text(right)} {'is' if len(right) == 1 else 'are'} right"


def _check_all_reached(case: str, rank: int, result: _Result, expected: torch.Tensor) -> None:
    """No parameter still has its own gradient, while others have the mean."""
    wrong = (result.found - expected).abs() > 1e-9 * expected.abs().max()
    left = int(wrong.sum())
    assert left == 0 or not torch.equal(result.found[wrong], result.own[wrong]), (
        case + f"rank {rank} still has its own gradient in {left} of {len(wrong)} numbers, and "
        "the mean in the others: does your loop reach every parameter?"
    )


ROUNDED = 0.01  # bfloat16 keeps three digits


def _far(off: float, what: str) -> str:
    """How far a gradient is from what it should be: "12% away from the mean"."""
    if off < ROUNDED:
        return (
            f"{off:.1g} of its length away from {what}: is it rounded on its way, to a type with "
            "fewer digits?"
        )
    return f"{off:.0%} away from {what}"


# ---- 4.2


# (groups, samples of each of their ranks); last a rank that has none
UNEVEN = (
    (small_gpt.GROUPINGS[0], (7, 3, 3, 3)),
    (small_gpt.GROUPINGS[1], (7, 3)),
    (small_gpt.GROUPINGS[0], (7, 3, 0, 6)),
)


def _weighed(
    rank: int,
    average: Callable[..., Any],
    grouping: Sequence[Sequence[int]],
    sizes: Sequence[int],
) -> _Result:
    group = small_gpt.own_group(grouping)
    members = dist.get_process_group_ranks(group)
    place = members.index(rank)
    share = small_gpt.shares(members, sizes)[place]
    module = small_gpt.model()
    small_gpt.backward(module, share)  # without a sample the loss is nan, and the gradients are 0
    own = small_gpt.gradient(module).clone()
    watch = Watch()
    with watch.active():
        average(module, sizes[place], group)
        sent = watch.taken()
    return _Result(own, small_gpt.gradient(module), sent)


def average_uneven(average: Callable[..., Any], ranks: Ranks) -> None:
    """The learner's `average_uneven(model, mine, group)` on shares of different sizes."""
    for grouping, sizes in UNEVEN:
        case = f"with {' + '.join(map(str, sizes))} samples: "
        try:
            results = small_gpt.run(ranks, _weighed, average, grouping, sizes)
        except RankError as error:
            # with the same code all went well where every rank had a sample
            if 0 not in sizes or is_stub(error):
                raise
            raise AssertionError(case + reason(error)) from None
        weights = torch.tensor([sizes[rank % len(sizes)] for rank in range(len(results))])
        owns = torch.stack([result.own for result in results])
        in_world = weights.to(owns) @ owns
        for members in grouping:
            own_results = [results[rank] for rank in members]
            _check_weights(case, members, sizes, own_results, in_world)


def _check_weights(
    case: str,
    members: Sequence[int],
    sizes: Sequence[int],
    results: Sequence[_Result],
    in_world: torch.Tensor,
) -> None:
    for result in results:
        _check_waits(case, result.sent)
    expected = small_gpt.gradient_of(small_gpt.joined(small_gpt.shares(members, sizes)))
    owns = torch.stack([result.own for result in results])
    found = results[0].found
    assert small_gpt.distance(found, owns[0]) > 1e-9, (
        case + "the first rank still has its own gradient: did anything travel?"
    )
    for result in results:
        assert small_gpt.distance(result.found, found) < 1e-9, (
            case + "the ranks end up with different gradients: weigh first, then send"
        )
    assert small_gpt.distance(found, owns.mean(0)) > 1e-9, (
        case + "that is the mean of the means: a rank with 3 samples counts as much as one with 7"
    )
    assert small_gpt.distance(found, owns.sum(0)) > 1e-9, (
        case + "that is the plain sum: weigh each rank's gradient before it travels"
    )
    _check_slips(case, found, owns, sizes)
    # the weights may be float32, a seventh of which is off by 1e-8
    too_long = small_gpt.times_too_long(found, expected, rounding=1e-6)
    assert too_long is None or abs(too_long - 1) < 1e-6, (
        case + f"right direction, but {too_long:.3g} times as long as it should be: "
        "the weights of the ranks must add up to 1"
    )
    of_world = small_gpt.times_too_long(found, in_world, rounding=1e-6)
    assert of_world is None or too_long is not None, (
        case + "there are gradients of ranks outside of the group in it: which group does your "
        "all-reduce use?"
    )
    off = small_gpt.distance(found, expected)
    assert off < 1e-6, case + _far(off, "the gradient of all samples")


def _check_slips(case: str, found: torch.Tensor, owns: torch.Tensor, sizes: Sequence[int]) -> None:
    """Sums of the ranks' means with wrong weights, up to a factor."""
    alike = small_gpt.times_too_long(found, owns.sum(0), rounding=1e-6)
    assert alike is None, (
        case + "that is the sum of the ranks' means, all with the same weight, divided by some "
        "number: what turns the mean over `mine` samples into a sum?"
    )
    inverse = torch.zeros_like(found)
    for own, size in zip(owns, sizes):
        if size:
            inverse += own / size
    assert small_gpt.times_too_long(found, inverse, rounding=1e-6) is None, (
        case + "a rank with few samples counts for more than one with many: look at your weights "
        "once more"
    )


# ---- 4.3


class _Accumulated(NamedTuple):
    """What a rank has after a step with accumulation.

    Args:
        before: The gradient of the step before, which was still there.
        share: The gradient of its own share.
        last: That of the last micro-batch.
        found: Its gradient afterwards.
        sent_bytes: What it gave to collectives.
        broadcasts: Whether a broadcast was one of them.
        parts: How many samples the model saw each time.
        passes: "F" for each forward, "B" for each backward, in order.
    """

    before: torch.Tensor
    share: torch.Tensor
    last: torch.Tensor
    found: torch.Tensor
    sent_bytes: int
    broadcasts: bool
    parts: list[int]
    passes: str


def _accumulated(
    rank: int,
    accumulate: Callable[..., Any],
    num_micro_batches: int,
    grouping: Sequence[Sequence[int]],
) -> _Accumulated:
    group = small_gpt.own_group(grouping)
    members = dist.get_process_group_ranks(group)
    inputs, targets = small_gpt.shares(members, [4] * len(members))[members.index(rank)]
    share = small_gpt.gradient_of((inputs, targets))
    last = (inputs.chunk(num_micro_batches)[-1], targets.chunk(num_micro_batches)[-1])
    module = small_gpt.model()
    old = small_gpt.shares(members, [4] * len(members), step=1)[members.index(rank)]
    small_gpt.backward(module, old)  # of the step before: still there
    before = small_gpt.gradient(module).clone()
    weights = small_gpt.weights(module)
    parts: list[int] = []
    passes: list[str] = []

    def note_forward(_: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
        parts.append(len(args[0]))
        passes.append("F")
        if output.requires_grad:
            output.register_hook(lambda _: passes.append("B"))

    module.register_forward_hook(note_forward)
    with counted() as calls:
        accumulate(module, inputs, targets, num_micro_batches, group)
    assert torch.equal(weights, small_gpt.weights(module)), (
        "the weights have changed: asked is the gradient, the step comes after this function"
    )
    sent_bytes = sum(call.num_bytes for call in calls)
    found = small_gpt.gradient(module)
    last_gradient = small_gpt.gradient_of(last)
    return _Accumulated(
        before=before,
        share=share,
        last=last_gradient,
        found=found,
        sent_bytes=sent_bytes,
        broadcasts=any(call.kind == "broadcast" for call in calls),
        parts=parts,
        passes="".join(passes),
    )


def accumulated_gradients(accumulate: Callable[..., Any], ranks: Ranks) -> None:
    """The learner's `accumulated_gradients(model, inputs, targets, num_micro_batches, group)`."""
    for grouping in small_gpt.GROUPINGS:
        for num_micro_batches in (1, 2, 4):
            results = small_gpt.run(ranks, _accumulated, accumulate, num_micro_batches, grouping)
            in_world = torch.stack([result.share for result in results]).mean(0)
            for members in grouping:
                own_results = [results[rank] for rank in members]
                _check_accumulated(members, own_results, num_micro_batches, in_world)


def _check_accumulated(
    members: Sequence[int], results: Sequence[_Accumulated], m: int, in_world: torch.Tensor
) -> None:
    p = len(members)
    case = f"with {m} micro-batch{'' if m == 1 else 'es'} on {p} ranks: "
    before = torch.stack([result.before for result in results]).mean(0)
    last = torch.stack([result.last for result in results]).mean(0)
    expected = small_gpt.gradient_of(small_gpt.joined(small_gpt.shares(members, [4] * p)))
    for result in results:
        _check_passes(case, result, m)
        found = result.found
        too_long = small_gpt.times_too_long(found, expected)
        assert too_long is None or abs(too_long - 1) < 1e-9, (
            case + f"right direction, but {too_long:.3g} times as long as it should be: "
            f"count the divisions, by {m} and by {p}"
        )
        leftover = small_gpt.distance(found - expected, before)
        assert leftover > 1e-9, (
            case + "the gradient of the step before is still in it: backward adds to what is there"
        )
        if too_long is None:
            _check_what_is_missing(case, result, last, in_world, m)
        off = small_gpt.distance(found, expected)
        assert off < 1e-9, case + _far(off, "the gradient of the whole batch")
        once = found.nbytes
        times = f"{result.sent_bytes / once:.0f} times the gradients' bytes travelled: "
        is_once = result.sent_bytes < 1.5 * once
        assert is_once or not result.broadcasts, (
            case + times + "there is a broadcast among what was sent, and the ranks' weights are "
            "equal already (wrapping a model in DDP sends its weights)"
        )
        assert is_once, case + times + "send them once, after the last micro-batch"


def _check_passes(case: str, result: _Accumulated, m: int) -> None:
    """The model sees m parts of the same size, and backward follows each of them."""
    assert result.parts, case + "the model was never called"
    largest = max(result.parts)
    size = 4 // m
    assert largest <= size, (
        case + f"the model saw {largest} samples at once; a micro-batch of a share of 4 has {size}"
    )
    listed = ", ".join(map(str, result.parts))
    calls = "once" if len(result.parts) == 1 else f"{len(result.parts)} times"
    samples = "sample" if result.parts == [1] else "samples"
    assert result.parts == [size] * m, (
        case + f"the model was called {calls}, with {listed} {samples}: into how many parts do you "
        "cut the share?"
    )
    assert "FF" not in result.passes, (
        case + "the next forward began before the backward of the micro-batch before: then all "
        "their activations are in memory together, and nothing is saved"
    )


def _check_what_is_missing(
    case: str, result: _Accumulated, last: torch.Tensor, in_world: torch.Tensor, m: int
) -> None:
    """Gradients in a wrong direction: whose are they?"""
    found = result.found
    assert small_gpt.times_too_long(found, result.share) is None, (
        case + "the gradient is that of the rank's own share: where do the others come in?"
    )
    assert small_gpt.times_too_long(found, in_world) is None, (
        case + "there are gradients of ranks outside of the group in it: which group do you "
        "average over?"
    )
    alone = small_gpt.times_too_long(found, last) is not None
    assert m == 1 or not alone, (
        case + "only the last micro-batch is in it: when do you set the gradients to zero?"
    )


# ---- 4.4

SCRIPT = "train_04.py"
HEADER = '''"""The script of lesson 04. Start it with: torchrun --nproc-per-node=2 train_04.py"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from labcode.models import gpt
from labcode.teach.labs.l04_by_hand import build_model, dataset


'''
FOOTER = """

if __name__ == "__main__":
    main(Path("."))
    assert not dist.is_initialized(), "LEFT OPEN"
"""
EPOCHS = 2
GLOBAL_BATCH = 16


def script(main: Callable[..., Any] | str, folder: Path | str = "runs") -> None:
    """The learner's `main(folder)`, as a file that torchrun starts on one and on two ranks.

    Args:
        main: The function, or its source.
        folder: Where the file `train_04.py` is written.
    """
    source = scripts.source_of(main)
    path = Path(folder) / SCRIPT
    scripts.write(path, HEADER, source, FOOTER)
    for nproc in (1, 2):
        _check_run(path, nproc)
    scripts.check_device(source)
    left = what_stays_on_the_cpu(source)
    assert not left, (
        f"here, without GPUs, all is right; with GPUs, {left} would stay on the CPU: see point 4"
    )


def _check_run(path: Path, nproc: int) -> None:
    weights_path = path.parent / "weights.pt"
    weights_path.unlink(missing_ok=True)
    case = f"on {nproc} rank{'s' if nproc > 1 else ''}: "
    output = scripts.run(case, path, nproc=nproc)
    _check_output(case, output)
    assert weights_path.exists(), case + "there is no file weights.pt in the folder it was given"
    found = torch.load(weights_path, weights_only=True, map_location="cpu")
    weights_path.unlink()
    _check_names(case, found)
    _check_training(case, found, output, nproc)


def _check_output(case: str, output: str) -> None:
    lines = [line for line in output.splitlines() if "epoch" in line]
    speakers = {line.split("]")[0].lstrip("[") for line in lines}
    assert lines, case + 'nothing like "epoch 0: loss 3.1234" was printed'
    assert speakers == {"rank 0"}, case + "more than one rank prints: let rank 0 alone do it"
    assert len(lines) == EPOCHS, (
        case + f"{len(lines)} lines were printed for {EPOCHS} epochs: print one after each epoch"
    )


def _check_names(case: str, found: Any) -> None:
    expected = l04_by_hand.build_model().state_dict()
    assert isinstance(found, dict), (
        case + f"weights.pt holds a {type(found).__name__}: save the model's state_dict()"
    )
    wrapped = all(name.startswith("module.") for name in found)
    assert not wrapped, (
        case + "all names in weights.pt begin with `module.`: save the model inside DDP, or "
        "nobody can load it without DDP"
    )
    assert found.keys() == expected.keys(), case + "weights.pt does not hold the model's weights"


def _check_training(case: str, found: dict[str, torch.Tensor], output: str, nproc: int) -> None:
    """Compare with one process, and name the mistake if another training was done."""
    losses = [float(value) for value in re.findall(r"loss\s+([0-9.]+)", output)]
    assert len(losses) == EPOCHS, case + 'write the loss as in "epoch 0: loss 3.1234"'
    right = _reference()
    off = distance(found, right.weights)
    if off > 1e-3:
        mistakes = {**(ON_SEVERAL_RANKS if nproc > 1 else {}), **MISTAKES}
        for mistake, settings in mistakes.items():
            other = _reference(**settings)
            assert distance(found, other.weights) > 1e-3, case + mistake
        raise AssertionError(
            case + f"the weights are {off:.1%} away from those of one process with the same "
            "batches: print which samples each rank reads, and the loss of each step"
        )
    for epoch, (printed, expected) in enumerate(zip(losses, right.losses)):
        assert abs(printed - expected) < 2e-3, (
            case + f"epoch {epoch} prints the loss {printed:.4f}, and the mean over all steps and "
            f"ranks is {expected:.4f}"
        )


MISTAKES: dict[str, dict[str, Any]] = {
    "every epoch has the same batches: tell the sampler the epoch with set_epoch": {
        "set_epoch": False
    },
    "each rank reads `global_batch` samples in a step: all ranks together should": {
        "global_batch": 2 * GLOBAL_BATCH
    },
    "the samples are not shuffled": {"shuffle": False},
    "it made one epoch instead of two": {"epochs": 1},
    "all ranks together read half of `global_batch` samples in a step": {
        "global_batch": GLOBAL_BATCH // 2
    },
    "the learning rate is not 3e-3": {"lr": 1e-3},
    "the weights are those from the start: does the optimizer hold the parameters of this model, "
    "and are the gradients still there when it makes its step?": {"epochs": 0},
    "the gradients of earlier steps are still in those of the next": {"zero": False},
}
ON_SEVERAL_RANKS: dict[str, dict[str, Any]] = {
    "rank 0 has learned from its own samples only, though one rank alone is right: are the "
    "gradients averaged, and does forward go through the DDP object?": {"replicas": 2},
}


@functools.cache
def _reference(**settings: Any) -> "_Reference":
    """The run with these settings; it is computed once."""
    with torch.random.fork_rng():
        return _Reference(**settings)


class _Reference:
    """What one process gets with the batches that the ranks read together.

    Attributes:
        losses: Mean loss of each epoch.
        weights: By name, at the end.
    """

    def __init__(
        self,
        *,
        set_epoch: bool = True,
        shuffle: bool = True,
        global_batch: int = GLOBAL_BATCH,
        epochs: int = EPOCHS,
        lr: float = 3e-3,
        zero: bool = True,
        replicas: int = 1,
    ) -> None:
        torch.manual_seed(0)  # what rank 0 draws: see `run_file`
        module = l04_by_hand.build_model()
        optimizer = torch.optim.AdamW(module.parameters(), lr=lr)
        samples = l04_by_hand.dataset
        # with one replica its order is that of all ranks together, batch by batch
        order = DistributedSampler(samples, num_replicas=replicas, rank=0, shuffle=shuffle)
        loader = DataLoader(samples, batch_size=global_batch // replicas, sampler=order)
        self.losses: list[float] = []
        for epoch in range(epochs):
            if set_epoch:
                order.set_epoch(epoch)
            self.losses.append(_train_epoch(module, optimizer, loader, zero))
        self.weights = module.state_dict()


def _train_epoch(
    module: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader, zero: bool
) -> float:
    total = 0.0
    for inputs, targets in loader:
        loss = gpt_loss(module(inputs), targets)
        if zero:
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / len(loader)
