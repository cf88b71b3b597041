"""Checks of lesson 04, data parallel by hand."""

import functools
import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from course.answer import Exercise, Hint
from course.exercises import l04_plain, rehearsal, scripts, small_gpt
from course.exercises.expect import (
    careless,
    confirm,
    diagnose,
    distance,
    own_answers,
    plural,
    refuse,
    run,
    settle,
    times,
)
from course.exercises.memory import KeptForBackward
from course.exercises.simulated import Event, Outcome, here, simulate
from course.labs import l04_by_hand, l04_script
from course.pool.ranks import Ranks
from labcode.models.gpt import loss as gpt_loss
from labcode.runtime.units import ranks_text

WEIGHTS_CHANGED = "the weights have changed: average the gradients only"
OUTSIDE = (
    "there are gradients of ranks outside of the group in it: which group does your all-reduce use?"
)
ROUNDED = 0.01  # bfloat16 keeps three digits
COUNT_ROUNDING = 1e-6  # the weights may be float32, a seventh of which is off by 1e-8


def _away(what: str, off: float) -> str:
    """How far a gradient is from what it should be: "12% away from the mean"."""
    if off < ROUNDED:
        return (
            f"{off:.1g} of its length away from {what}: is it rounded on its way, to a type with "
            "fewer digits?"
        )
    return f"{off:.0%} away from {what}"


# ---- 4.1


def _average(
    rank: int,
    average: Callable[..., Any],
    grouping: Sequence[Sequence[int]],
    one_is_frozen: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rank's own gradient, and its gradient afterwards."""
    group = small_gpt.own_group(grouping)
    members = dist.get_process_group_ranks(group)
    share = small_gpt.shares(members, [4] * len(members))[members.index(rank)]
    module = small_gpt.model()
    params = list(module.parameters())
    frozen = params[len(params) // 2]  # others come behind it
    frozen.requires_grad_(not one_is_frozen)
    small_gpt.backward(module, share)
    own = small_gpt.gradient(module).clone()
    with torch.no_grad():
        for param in params:
            param += rank  # other weights on each rank: who sends weights changes them
    before = small_gpt.weights(module)
    average(module, group)
    mistakes = {
        WEIGHTS_CHANGED: not torch.equal(before, small_gpt.weights(module)),
        "the parameter that is not trained had no gradient, and now it has one: the optimizer "
        "will treat it like the others, and weight decay alone makes it shrink": (
            one_is_frozen and frozen.grad is not None
        ),
    }
    refuse(mistakes)
    return own, small_gpt.gradient(module)


def _check_frozen_left_alone(
    outcome: Outcome, average: Callable[..., Any], grouping: Sequence[Sequence[int]]
) -> None:
    """Where the function has stumbled over a None, that was not the gradient that is not there.

    Otherwise it runs where all parameters are trained; what a collective returns is None there too.
    """
    if not any("NoneType" in str(error) for error in outcome.errors.values()):
        return
    all_trained = simulate(len(outcome.results), _average, average, grouping, False)
    if not all_trained.errors:
        raise Hint("one parameter is not trained, its `.grad` is None: leave it alone")


def average_gradients(average: Callable[..., Any], ranks: Ranks | None = None) -> str:
    """The learner's `average_gradients(model, group)` on all ranks, and on two pairs."""
    ours = own_answers(l04_by_hand.average_gradients)
    for grouping in small_gpt.GROUPINGS:
        outcome = simulate(4, _average, average, grouping, ours=ours)
        _check_frozen_left_alone(outcome, average, grouping)
        settle(outcome)
        of_world = torch.stack([own for own, _ in outcome.results]).mean(0)
        for members in grouping:
            case = small_gpt.named(members)
            mean = torch.stack([outcome.results[rank][0] for rank in members]).mean(0)
            right = [r for r in members if distance(outcome.results[r][1], mean) < 1e-9]
            for rank in members:
                refuse(careless(outcome.of(rank)), case)
                _check_mean(case, rank, len(members), outcome.results[rank], mean, of_world, right)
    return confirm(ranks, outcome, _average, average, grouping)


def _check_mean(
    case: str,
    rank: int,
    p: int,
    result: tuple[torch.Tensor, torch.Tensor],
    mean: torch.Tensor,
    of_world: torch.Tensor,
    right: Sequence[int],
) -> None:
    """A rank of a group has the mean over it.

    Args:
        case: What a hint begins with.
        rank: Rank in the world.
        p: Size of its group.
        result: The rank's own gradient, and the one afterwards.
        mean: Mean over its group.
        of_world: Mean over all ranks.
        right: The ranks of the group that have the mean.
    """
    own, found = result
    wrong = (found - mean).abs() > 1e-9 * mean.abs().max()
    left = int(wrong.sum())
    not_reached = left < len(wrong) and torch.equal(found[wrong], own[wrong])
    others = ""
    if right:
        others = f", and {ranks_text(right)} {'is' if len(right) == 1 else 'are'} right"
    mistakes = {
        f"rank {rank} still has its own gradient: is the result written into .grad?": own,
        "right direction, but {times:.3g} times as long as the mean: the group has "
        f"{p} ranks": times(mean),
        f"rank {rank} has gradients of ranks outside of the group: which group does your "
        "all-reduce use?": times(of_world),
        f"rank {rank} still has its own gradient in {left} of {len(wrong)} numbers, and the mean "
        "in the others: does your loop reach every parameter?": not_reached,
    }
    away = _away("the mean", distance(found, mean))
    diagnose(case, found, mean, mistakes, f"rank {rank} is {away}{others}")


# ---- 4.2


# (groups, samples of each of their ranks); last a rank that has none
UNEVEN = (
    (small_gpt.GROUPINGS[0], (7, 3, 3, 3)),
    (small_gpt.GROUPINGS[1], (7, 3)),
    (small_gpt.GROUPINGS[0], (7, 3, 0, 6)),
)


def _weigh(
    rank: int,
    average: Callable[..., Any],
    grouping: Sequence[Sequence[int]],
    sizes: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rank's own gradient, and its gradient afterwards."""
    group = small_gpt.own_group(grouping)
    members = dist.get_process_group_ranks(group)
    place = members.index(rank)
    share = small_gpt.shares(members, sizes)[place]
    module = small_gpt.model()
    small_gpt.backward(module, share)  # without a sample the loss is nan, and the gradients are 0
    own = small_gpt.gradient(module).clone()
    average(module, sizes[place], group)
    return own, small_gpt.gradient(module)


def average_uneven(average: Callable[..., Any], ranks: Ranks | None = None) -> str:
    """The learner's `average_uneven(model, mine, group)` on shares of different sizes."""
    for grouping, sizes in UNEVEN:
        case = f"with {' + '.join(map(str, sizes))} samples: "
        outcome = run(_weigh, average, grouping, sizes, case=case)
        weights = torch.tensor([sizes[rank % len(sizes)] for rank in range(4)])
        owns = torch.stack([own for own, _ in outcome.results])
        of_world = weights.to(owns) @ owns
        for members in grouping:
            results = [outcome.results[rank] for rank in members]
            for rank in members:
                refuse(careless(outcome.of(rank)), case)
            _check_weighed(case, members, sizes, results, of_world)
    return confirm(ranks, outcome, _weigh, average, grouping, sizes)


def _check_weighed(
    case: str,
    members: Sequence[int],
    sizes: Sequence[int],
    results: Sequence[tuple[torch.Tensor, torch.Tensor]],
    of_world: torch.Tensor,
) -> None:
    """All ranks of a group have the gradient of all its samples."""
    truth = small_gpt.gradient_of(small_gpt.joined(small_gpt.shares(members, sizes)))
    owns = torch.stack([own for own, _ in results])
    found = results[0][1]
    differ = any(distance(other, found) > 1e-9 for _, other in results)
    inverse = torch.zeros_like(found)
    for own, size in zip(owns, sizes):
        if size:
            inverse += own / size
    refuse(
        {
            "the first rank still has its own gradient: did anything travel?": owns[0],
            "the ranks end up with different gradients: weigh first, then send": differ,
        },
        case,
        found,
    )
    mistakes = {
        "that is the mean of the means: a rank with 3 samples counts as much as one with 7": (
            owns.mean(0)
        ),
        "that is the plain sum: weigh each rank's gradient before it travels": owns.sum(0),
        "that is the sum of the ranks' means, all with the same weight, divided by some number: "
        "what turns the mean over `mine` samples into a sum?": times(owns.sum(0)),
        "a rank with few samples counts for more than one with many: look at your weights once "
        "more": times(inverse),
        "right direction, but {times:.3g} times as long as it should be: the weights of the ranks "
        "must add up to 1": times(truth),
        OUTSIDE: times(of_world),
    }
    away = _away("the gradient of all samples", distance(found, truth))
    diagnose(case, found, truth, mistakes, away, COUNT_ROUNDING)


# ---- 4.3


class _Accumulated(NamedTuple):
    """What a rank has after a step with accumulation.

    Args:
        before: The gradient of the step before, which was still there.
        share: The gradient of its own share.
        last: Gradient of the last micro-batch.
        found: Gradient afterwards.
    """

    before: torch.Tensor
    share: torch.Tensor
    last: torch.Tensor
    found: torch.Tensor


def _accumulate(
    rank: int,
    accumulate: Callable[..., Any],
    num_micro_batches: int,
    grouping: Sequence[Sequence[int]],
) -> _Accumulated:
    group = small_gpt.own_group(grouping)
    members = dist.get_process_group_ranks(group)
    inputs, targets = small_gpt.shares(members, [4] * len(members))[members.index(rank)]
    last = (inputs.chunk(num_micro_batches)[-1], targets.chunk(num_micro_batches)[-1])
    module = small_gpt.model()
    old = small_gpt.shares(members, [4] * len(members), step=1)[members.index(rank)]
    small_gpt.backward(module, old)  # of the step before: still there
    before = small_gpt.gradient(module).clone()
    weights = small_gpt.weights(module)

    def note_forward(_: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
        here().note("forward", len(args[0]))
        if output.requires_grad:
            output.register_hook(lambda _: here().note("backward"))

    module.register_forward_hook(note_forward)
    with KeptForBackward() as kept:
        module.register_forward_pre_hook(lambda *_: here().note("kept", kept.num_bytes()))
        accumulate(module, inputs, targets, num_micro_batches, group)
    is_changed = not torch.equal(weights, small_gpt.weights(module))
    refuse(
        {
            "the weights have changed: asked is the gradient, the step comes after this function": (
                is_changed
            )
        }
    )
    share = small_gpt.gradient_of((inputs, targets))
    return _Accumulated(before, share, small_gpt.gradient_of(last), small_gpt.gradient(module))


def accumulated_gradients(accumulate: Callable[..., Any], ranks: Ranks | None = None) -> str:
    """The learner's `accumulated_gradients(model, inputs, targets, num_micro_batches, group)`."""
    for grouping in small_gpt.GROUPINGS:
        for m in (1, 2, 4):
            outcome = run(_accumulate, accumulate, m, grouping)
            of_world = torch.stack([result.share for result in outcome.results]).mean(0)
            for members in grouping:
                case = f"with {plural(m, 'micro-batch')} on {len(members)} ranks: "
                results = [outcome.results[rank] for rank in members]
                for rank in members:
                    _check_passes(case, outcome.of(rank, "forward", "backward"), m)
                    _check_graphs_freed(case, outcome.of(rank, "kept"))
                    refuse(careless(outcome.of(rank)), case)
                    _check_accumulated(case, members, results, outcome.results[rank], m, of_world)
                    _check_sent(case, outcome.of(rank), outcome.results[rank].found.nbytes)
    return confirm(ranks, outcome, _accumulate, accumulate, m, grouping)


def _check_passes(case: str, notes: Sequence[Event], m: int) -> None:
    """The model sees m parts of the same size, and backward follows each of them."""
    parts = [note.value for note in notes if note.kind == "forward"]
    size = 4 // m
    listed = ", ".join(map(str, parts))
    calls = "once" if len(parts) == 1 else f"{len(parts)} times"
    samples = "sample" if parts == [1] else "samples"
    kinds = [note.kind for note in notes]
    together = ("forward", "forward") in itertools.pairwise(kinds)
    largest = max(parts, default=0)
    mistakes = {
        "the model was never called": not parts,
        f"the model saw {largest} samples at once; a micro-batch of a share of 4 has {size}": (
            largest > size
        ),
        f"the model was called {calls}, with {listed} {samples}: into how many parts do you cut "
        "the share?": parts != [size] * m,
        "the next forward began before the backward of the micro-batch before: then all their "
        "activations are in memory together, and nothing is saved": together,
    }
    refuse(mistakes, case)


def _check_graphs_freed(case: str, notes: Sequence[Event]) -> None:
    """When a forward begins, nothing is kept of the micro-batches before it."""
    most = max((note.value for note in notes), default=0)
    hint = (
        f"when the next forward begins, {most:,} bytes are still kept for the backward of the "
        "micro-batches before, which is over: who keeps their graphs?"
    )
    refuse({hint: most > 0}, case)


def _check_accumulated(
    case: str,
    members: Sequence[int],
    results: Sequence[_Accumulated],
    result: _Accumulated,
    m: int,
    of_world: torch.Tensor,
) -> None:
    """A rank has the gradient of the group's whole batch."""
    p = len(members)
    truth = small_gpt.gradient_of(small_gpt.joined(small_gpt.shares(members, [4] * p)))
    found = result.found
    before = torch.stack([one.before for one in results]).mean(0)
    last = torch.stack([one.last for one in results]).mean(0)
    mistakes = {
        "right direction, but {times:.3g} times as long as it should be: count the divisions, by "
        f"{m} and by {p}": times(truth),
        "the gradient of the step before is still in it: backward adds to what is there": (
            truth + before
        ),
        "the gradient is that of the rank's own share: where do the others come in?": times(
            result.share
        ),
        OUTSIDE: times(of_world),
        "only the last micro-batch is in it: when do you set the gradients to zero?": times(last),
    }
    away = _away("the gradient of the whole batch", distance(found, truth))
    diagnose(case, found, truth, mistakes, away)


def _check_sent(case: str, events: Sequence[Event], gradient_bytes: int) -> None:
    """The gradients travelled once."""
    sent_bytes = sum(event.num_bytes for event in events)
    is_more = sent_bytes > 1.5 * gradient_bytes
    often = f"{sent_bytes / gradient_bytes:.0f} times the gradients' bytes travelled: "
    broadcasts = [event for event in events if event.kind == "broadcast"]
    mistakes = {
        f"{often}there is a broadcast among what was sent, and the ranks' weights are equal "
        "already (wrapping a model in DDP sends its weights)": is_more and broadcasts,
        f"{often}send them once, after the last micro-batch": is_more,
    }
    refuse(mistakes, case)


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
from course.labs.l04_script import build_model, dataset


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
    _check_rehearsal(path)
    for nproc in (1, 2):
        _check_run(path, nproc)


class _NotedSamples(TensorDataset):
    """The samples; a simulated rank notes which of them it reads."""

    def __getitem__(self, index: Any) -> Any:
        here().note("read", str(index))  # a number, or a slice of them
        return super().__getitem__(index)


def _check_rehearsal(path: Path) -> None:
    """On two simulated ranks they join, meet in every call, and share the samples."""
    case = "on 2 ranks: "
    samples = _NotedSamples(*l04_script.dataset.tensors)
    outcome = rehearsal.rehearse(path.read_text(), str(path.resolve()), 2, dataset=samples)
    rehearsal.tell(case, path.name, outcome)
    share = len(samples) // 2
    read = []
    for rank in range(2):
        indices = [one.value for one in outcome.of(rank, "read")]
        read.append(set(indices[:share]))
    both = read[0] & read[1]
    hint = (
        f"of the first {share} samples that rank 0 reads rank 1 reads {len(both)} too, and in an "
        "epoch each sample belongs to one rank: does the DataLoader have a DistributedSampler? "
        "(With shuffle=True alone each rank shuffles for itself.)"
    )
    refuse({hint: both and not outcome.errors}, case)


def _check_run(path: Path, nproc: int) -> None:
    weights_path = path.parent / "weights.pt"
    weights_path.unlink(missing_ok=True)
    case = f"on {nproc} rank{'s' if nproc > 1 else ''}: "
    output = scripts.run(case, path, nproc=nproc)
    _check_output(case, output)
    no_file = "there is no file weights.pt in the folder it was given"
    refuse({no_file: not weights_path.exists()}, case)
    found = torch.load(weights_path, weights_only=True, map_location="cpu")
    weights_path.unlink()
    _check_names(case, found)
    _check_training(case, found, output, nproc)


def _check_output(case: str, output: str) -> None:
    lines = [line for line in output.splitlines() if "epoch" in line]
    speakers = {line.split("]")[0].lstrip("[") for line in lines}
    mistakes = {
        'nothing like "epoch 0: loss 3.1234" was printed': not lines,
        "more than one rank prints: let rank 0 alone do it": speakers != {"rank 0"},
        f"{len(lines)} lines were printed for {EPOCHS} epochs: print one after each epoch": (
            len(lines) != EPOCHS
        ),
    }
    refuse(mistakes, case)


def _check_names(case: str, found: Any) -> None:
    expected = l04_script.build_model().state_dict()
    if not isinstance(found, dict):
        kind = type(found).__name__
        raise Hint(f"{case}weights.pt holds a {kind}: save the model's state_dict()")
    mistakes = {
        "all names in weights.pt begin with `module.`: save the model inside DDP, or nobody can "
        "load it without DDP": all(name.startswith("module.") for name in found),
        "weights.pt does not hold the model's weights": found.keys() != expected.keys(),
    }
    refuse(mistakes, case)


def _check_training(case: str, found: dict[str, torch.Tensor], output: str, nproc: int) -> None:
    """Compare with one process, and name the mistake if another training was done."""
    losses = [float(value) for value in re.findall(r"loss\s+([0-9.]+)", output)]
    refuse({'write the loss as in "epoch 0: loss 3.1234"': len(losses) != EPOCHS}, case)
    right = _reference()
    off = scripts.distance(found, right.weights)
    if off > 1e-3:
        mistakes = {**(ON_SEVERAL_RANKS if nproc > 1 else {}), **MISTAKES}
        for mistake, settings in mistakes.items():
            other = _reference(**settings)
            refuse({mistake: scripts.distance(found, other.weights) < 1e-3}, case)
        raise Hint(
            f"{case}the weights are {off:.1%} away from those of one process with the same "
            "batches: print which samples each rank reads, and the loss of each step"
        )
    for epoch, (printed, expected) in enumerate(zip(losses, right.losses)):
        other_loss = (
            f"epoch {epoch} prints the loss {printed:.4f}, and the mean over all steps and ranks "
            f"is {expected:.4f}"
        )
        refuse({other_loss: abs(printed - expected) > 2e-3}, case)


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
        weights: Weights by name, at the end.
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
        module = l04_script.build_model()
        optimizer = torch.optim.AdamW(module.parameters(), lr=lr)
        samples = l04_script.dataset
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


EXERCISES = {
    "4.1": Exercise(
        check=average_gradients,
        praise="the mean over four ranks, and over each pair",
        hints=(
            "An all-reduce adds up. What turns a sum over the group into a mean?",
            "How many ranks does the group have? It need not be the world size.",
        ),
    ),
    "4.2": Exercise(
        check=average_uneven,
        praise="every sample of every rank has the same weight",
        hints=(
            "Which number do all ranks need before they can weigh their gradients? Who knows it?",
            "The gradient of a mean over `mine` samples, times `mine`, is the gradient of a sum.",
        ),
    ),
    "4.3": Exercise(
        check=accumulated_gradients,
        praise="the gradient of the whole batch, and it travelled once",
        hints=(
            "What is in `.grad` before your first backward?",
            "There are two divisions: by the number of micro-batches, and by the number of ranks.",
        ),
    ),
    "4.4": Exercise(
        check=script,
        praise="one and two ranks train like one process, and only rank 0 speaks and saves",
        hints=(
            "The number of samples that all ranks read together is `global_batch`. How many does "
            "one rank read?",
            "The loss that rank 0 knows is that of its own samples. Which collective gives it the "
            "sum over all ranks?",
            "`DistributedDataParallel` keeps your model in its attribute `module`.",
        ),
    ),
    "4.5": Exercise(
        check=l04_plain.script,
        praise="one and two ranks train alike, each sample of validation counts once, and a run "
        "goes on from its checkpoint",
        hints=(
            "`with model.no_sync():` is for all micro-batches of a step but one. For which?",
            "Each rank knows the sum of its own losses and the number of its own samples. What has "
            "to be added up over the ranks before you divide?",
            "What does AdamW keep besides the weights, and what happens to a run that loses it?",
            "What is left of a file if the run is killed in the middle of writing it? And on which "
            "device do samples, and what is read, have to be?",
        ),
    ),
}
