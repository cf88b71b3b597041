"""Lesson 07: what is done with the patients of the clinic, on each rank of a pool.

    signs(charts(pair, 1))     where the ranks of patient 1 agree and should not, and the reverse
    examine(pair, 1)           what `doctor.watch` says of it, on each rank

Patients have numbers, from 1 on, in the order of `l07_patients.NAMES`: a name would give the
diagnosis away.
"""

import contextlib
import inspect
import io
import itertools
import math
import os
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from course.labs import l07_patients
from course.labs.l07_patients.common import (
    CONTEXT,
    NUM_CHARACTERS,
    apart,
    small_model,
    text_samples,
    widest_gap,
)
from course.pool.ranks import Ranks
from labcode import doctor
from labcode.parallel import batch_norm

LIMIT_S = 10.0  # how late a rank may come to a collective; on a busy machine 3 s were too few
TOLERANCE = 1e-9  # relative; ranks that agree agree bit for bit

Run = Callable[..., Any]


def name_of(number: int) -> str:
    """The name of a patient.

    Raises:
        ValueError: There is no such patient.
    """
    if not 1 <= number <= len(l07_patients.NAMES):
        raise ValueError(f"there is no patient {number}: there are 1 to {len(l07_patients.NAMES)}")
    return l07_patients.NAMES[number - 1]


def complaint(number: int) -> str:
    """What a patient complains of."""
    return l07_patients.patient(name_of(number)).COMPLAINT


def script(number: int, healthy: bool = False) -> Run:
    """A patient's training, or that of its healthy twin: a function of `watch`."""

    def run_patient(watch: Run) -> Any:
        return l07_patients.patient(name_of(number)).run(healthy, watch)

    return run_patient


def in_a_folder(pair: Ranks, work: Run, *args: Any) -> list[Any]:
    """Call `work(*args)` on all ranks, in one new folder, with a folder `runs` in it."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "runs").mkdir()
        return pair.run(_there, folder, work, *args)


def _there(folder: str, work: Run, *args: Any) -> Any:
    before = os.getcwd()
    os.chdir(folder)
    try:
        return work(*args)
    finally:
        os.chdir(before)


# ---- vital signs


class Chart:
    """Notes what a training loop does on this rank, while a `with` block lasts.

    Communicates: nothing.

    Args:
        model: The model as the loop calls it.
        optimizer: Ends a step.
        loader: Not looked at; patients give it.

    Attributes:
        inputs: One number for each forward pass: the same for the same inputs.
        weights: One number for each optimizer step, the sum of all absolute weights before it.
        gradients: One number for each optimizer step, the norm of all gradients.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any = None
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.inputs: list[float] = []
        self.weights: list[float] = []
        self.gradients: list[float] = []

    def __enter__(self) -> "Chart":
        self.handles = [
            self.model.register_forward_pre_hook(self.note_inputs),
            self.optimizer.register_step_pre_hook(self.note_step),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

    def note_inputs(self, _: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        values = args[0].detach().contiguous()
        self.inputs.append(float(zlib.crc32(values.numpy().tobytes())))

    def note_step(self, *_: Any) -> None:
        weights = 0.0
        squares = 0.0
        for param in self.model.parameters():
            weights += float(param.detach().double().abs().sum())
            if param.grad is not None:
                squares += float(param.grad.double().square().sum())
        self.weights.append(weights)
        self.gradients.append(squares**0.5)


@dataclass
class Charted:
    """The vital signs of one rank, as plain numbers: see `Chart`."""

    inputs: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    gradients: list[float] = field(default_factory=list)


def charts(pair: Ranks, number: int, healthy: bool = False) -> list[Charted]:
    """Train a patient, or its healthy twin, on two ranks and note the vital signs of each."""
    return in_a_folder(pair, _charted, number, healthy)


def _charted(number: int, healthy: bool) -> Charted:
    seen: list[Chart] = []

    def watch(*args: Any, **kwargs: Any) -> Chart:
        seen.append(Chart(*args, **kwargs))
        return seen[0]

    script(number, healthy)(watch)
    chart = seen[0]
    return Charted(chart.inputs, chart.weights, chart.gradients)


def signs(charts: Sequence[Charted]) -> dict[str, float]:
    """What the charts of all ranks say together; a healthy training has 0 in each.

    Args:
        charts: Charts in rank order.

    Returns:
        same inputs: Share of the forward passes in which rank 1 got what rank 0 got.
        inputs again: Share of the forward passes of rank 0 whose inputs it has had before.
        first weights, last weights: Relative difference between ranks before the first step and
            before the last one.
        gradients: The largest relative difference of their norm between ranks, over all steps.
    """
    first, second = charts[0], charts[1]
    same = [one == other for one, other in zip(first.inputs, second.inputs)]
    again = [value in first.inputs[:place] for place, value in enumerate(first.inputs)]
    return {
        "same inputs": sum(same) / len(same),
        "inputs again": sum(again) / len(again),
        "first weights": _gap(first.weights[:1], second.weights[:1]),
        "gradients": _gap(first.gradients, second.gradients),
        "last weights": _gap(first.weights[-1:], second.weights[-1:]),
    }


def _gap(ones: Sequence[float], others: Sequence[float]) -> float:
    largest = 0.0
    for one, other in zip(ones, others):
        size = max(abs(one), abs(other))
        if size > 0 and abs(one - other) / size > TOLERANCE:
            largest = max(largest, abs(one - other) / size)
    return largest


# ---- what the doctor says


@dataclass
class Examined:
    """A training under `doctor.watch`, as one rank saw it.

    Args:
        number: What the script returned; None if it did not come so far.
        findings: Names of what was found, the same on all ranks.
        says: The findings as the doctor prints them.
        evidence: The number of the first one; 0 if there is none.
        error: What ended the script early.
        steps: Optimizer steps, as far as they were noted.
        end: Sum of the absolute weights when the loop ended; None if nobody watched.
        watched: Whether the training took place under `watch` at all.
        inputs: A checksum of the inputs of each of the first forward passes.
        epochs: What the sampler was told of each pass through it.
        seed: Seed of torch's generator when the block began.
        is_wrapped_twice: Whether there is a DDP inside the DDP.
        num_saved: Files that this rank wrote with torch.save.
    """

    number: Any = None
    findings: list[str] = field(default_factory=list)
    says: list[str] = field(default_factory=list)
    evidence: float = 0.0
    error: str = ""
    steps: int = 0
    end: float | None = None
    watched: bool = False
    inputs: list[int] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    seed: int = 0
    is_wrapped_twice: bool = False
    num_saved: int = 0


def under_watch(trained: Run, catch: bool = True) -> Examined:
    """Call `trained(watch)` on this rank, with the doctor as the one who watches.

    Args:
        trained: Trains inside `with watch(model, optimizer, ...)`.
        catch: Take errors down; else they are raised, unless the doctor has stopped the training.
    """
    seen: list[Any] = []
    found = Examined()

    def watch(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        found.seed = torch.initial_seed()
        found.is_wrapped_twice = sum(isinstance(part, DDP) for part in model.modules()) > 1
        seen.append(doctor.watch(model, *args, quiet=True, limit_s=LIMIT_S, **kwargs))
        return seen[-1]

    try:
        found.number = trained(watch)
    except RuntimeError as error:
        found.error = str(error)
        is_ours = bool(seen) and bool(seen[-1].findings)
        if not (catch or is_ours):
            raise
    if seen:
        watched = seen[-1]
        found.watched = True
        found.findings = [finding.name for finding in watched.findings]
        found.says = [str(finding) for finding in watched.findings]
        found.evidence = watched.findings[0].evidence if watched.findings else 0.0
        found.steps = len(watched.facts.syncs)
        found.end = watched.facts.end
        found.inputs = list(watched.facts.inputs)
        found.epochs = list(watched.facts.epochs)
        found.num_saved = len(watched.facts.saved)
    return found


def examine(pair: Ranks, number: int, healthy: bool = False) -> list[Examined]:
    """Train a patient, or its healthy twin, on two ranks under the doctor's eyes."""
    return in_a_folder(pair, _examined, number, healthy)


def _examined(number: int, healthy: bool) -> Examined:
    return under_watch(script(number, healthy))


def watched(number: int) -> Any:
    """Train a patient under `doctor.watch` on this rank, and let its errors through."""

    def watch(*args: Any, **kwargs: Any) -> Any:
        return doctor.watch(*args, quiet=True, limit_s=LIMIT_S, **kwargs)

    return script(number)(watch)


def count_messages(model: DDP) -> list[int]:
    """A list that grows by one for each message of gradients that this model sends."""
    messages: list[int] = []

    def averaged(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        messages.append(bucket.index())
        work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        assert work is not None
        return work.get_future().then(_first)

    model.register_comm_hook(None, averaged)
    return messages


def _first(done: torch.futures.Future) -> torch.Tensor:
    return done.value()[0]


# ---- pieces of advice, put to the test


def gap_after_other_seeds(rank: int) -> float:
    """Build the model from another seed on each rank, wrap it, train: do the weights differ?"""
    torch.manual_seed(rank)
    model = DDP(small_model())
    train(model, steps=4)
    return apart(model)


def gaps_with_batch_norm(rank: int) -> tuple[float, float]:
    """Train with DDP and a plain BatchNorm, on other samples on each rank: what differs?

    Returns:
        The largest difference between a weight here and the mean over all ranks, and the same of
        the running averages.
    """
    torch.manual_seed(0)
    layers = small_model()
    layers.insert(3, nn.BatchNorm1d(64))
    model = DDP(layers)
    train(model, steps=4)
    averages = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    return apart(model), widest_gap(averages)


def wrapped(module: nn.Module, synced: bool) -> DDP:
    """`DDP(module, forward_sync_buffers=synced)`, on a PyTorch before 2.13 too.

    There the argument is called `broadcast_buffers` and switches the sending at the start as well;
    the attribute of that name is read in forward alone.
    """
    if "forward_sync_buffers" in inspect.signature(DDP.__init__).parameters:
        return DDP(module, forward_sync_buffers=synced)
    model = DDP(module)
    model.broadcast_buffers = synced
    return model


def loss_with_batch_norm(
    rank: int, samples: int, synchronised: bool, num_steps: int = 256
) -> float:
    """Train a model with BatchNorm; the loss of 512 samples that it has not seen, in nats.

    Args:
        rank: This one.
        samples: Number of samples in a step, on each rank.
        synchronised: The statistics are those of all ranks' samples.
        num_steps: Number of steps of the optimizer, whatever the number of samples.
    """
    torch.manual_seed(0)
    inputs, targets = text_samples(2048 + 512).tensors
    data = TensorDataset(inputs[:2048], targets[:2048])
    layers = small_model()
    layers.insert(3, nn.BatchNorm1d(64))
    world = dist.group.WORLD
    if synchronised and world is not None:
        batch_norm.convert(layers, world)
    model = DDP(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=samples, sampler=sampler)
    for epoch in range(math.ceil(num_steps / len(loader))):
        sampler.set_epoch(epoch)
        left = num_steps - epoch * len(loader)
        for own_inputs, own_targets in itertools.islice(loader, left):
            optimizer.zero_grad()
            cross_entropy(model(own_inputs), own_targets).backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        return cross_entropy(model(inputs[2048:]), targets[2048:]).item()


def step_and_difference(rank: int, link_s: float) -> tuple[float, float]:
    """(Seconds of a whole step, what is left without forward and backward); the least of five each.

    Args:
        rank: This one.
        link_s: How long each bucket of gradients is on its way before it is reduced.
    """

    def slow_link(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        time.sleep(link_s)
        work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        assert work is not None
        return work.get_future().then(_first)

    torch.manual_seed(0)
    model = DDP(small_model())
    model.register_comm_hook(None, slow_link)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps_s = []
    differences_s = []
    for step in range(5):
        began = time.perf_counter()
        optimizer.zero_grad()
        forward_began = time.perf_counter()
        _loss(model, rank, step).backward()
        backward_ended = time.perf_counter()
        optimizer.step()
        ended = time.perf_counter()
        steps_s.append(ended - began)
        differences_s.append((ended - began) - (backward_ended - forward_began))
    return min(steps_s), min(differences_s)


def gradient_gap_without_no_sync(rank: int) -> float:
    """The gradient of two micro-batches, once with no_sync() and once without: their difference."""
    with_it = _accumulated(rank, quiet=True)
    without = _accumulated(rank, quiet=False)
    return float((with_it - without).abs().max() / with_it.abs().max())


def messages_in_a_step(rank: int, search: bool) -> int:
    """All-reduces in the third step, counted by the profiler.

    Args:
        rank: This one.
        search: Whether DDP searches for unused parameters.
    """
    torch.manual_seed(0)
    model = DDP(small_model(), find_unused_parameters=search)
    train(model, steps=2, rank=rank)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        train(model, steps=1, rank=rank)
    events = seen.events() or ()
    return sum(event.name == "gloo:all_reduce" for event in events)


class Checkpointed(nn.Module):
    """The small model; its hidden layer is computed again in backward.

    Args:
        is_on: Whether it is.
    """

    def __init__(self, is_on: bool) -> None:
        super().__init__()
        self.layers = small_model()
        self.is_on = is_on

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        embed, flatten, wide, relu, narrow = self.layers
        x = flatten(embed(inputs))
        if self.is_on:
            hidden = checkpoint(lambda given: relu(wide(given)), x, use_reentrant=False)
        else:
            hidden = relu(wide(x))
        return narrow(hidden)


def gradient_gap_with_checkpointing(rank: int) -> float:
    """The gradient under DDP with and without activation checkpointing: their difference."""
    found = []
    for is_on in (False, True):
        torch.manual_seed(0)
        model = DDP(Checkpointed(is_on))
        _loss(model, rank, 0).backward()
        found.append(_flat_gradient(model))
    return float((found[0] - found[1]).abs().max() / found[0].abs().max())


def _batch(rank: int, step: int, size: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randint(0, NUM_CHARACTERS, (size, CONTEXT), generator=draw)
    targets = torch.randint(0, NUM_CHARACTERS, (size,), generator=draw)
    return inputs, targets


def _loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    inputs, targets = _batch(rank, step)
    return cross_entropy(model(inputs), targets)


def train(model: nn.Module, steps: int, rank: int | None = None) -> None:
    """Steps of SGD on random characters; each rank has its own."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    where = dist.get_rank() if rank is None else rank
    for step in range(steps):
        optimizer.zero_grad()
        _loss(model, where, step).backward()
        optimizer.step()


def _accumulated(rank: int, quiet: bool) -> torch.Tensor:
    torch.manual_seed(0)
    model = DDP(small_model())
    with model.no_sync() if quiet else contextlib.nullcontext():
        (_loss(model, rank, 0) / 2).backward()
    (_loss(model, rank, 1) / 2).backward()
    return _flat_gradient(model)


def _flat_gradient(model: nn.Module) -> torch.Tensor:
    grads = [param.grad.flatten() for param in model.parameters() if param.grad is not None]
    return torch.cat(grads)


def as_saved_from_gpu_0(state: Mapping[str, Any]) -> io.BytesIO:
    """A file of a state dict as a process would have written it whose tensors are on GPU 0."""
    file = io.BytesIO()
    with mock.patch.object(torch.serialization, "location_tag", lambda storage: "cuda:0"):
        torch.save(state, file)
    file.seek(0)
    return file


# ---- ranks that are not equally fast


def step_of_unequal_ranks(
    rank: int, shares: Sequence[int], sample_s: Sequence[float], num_steps: int = 6
) -> tuple[float, float]:
    """Seconds of a step, and the norm of the first gradient, with these shares of the batch.

    A rank works `sample_s` seconds on each of its samples: it sleeps, so that the two cores of this
    machine do not decide. Losses are summed and divided by the whole batch, so that each sample
    counts once.

    Args:
        rank: This one.
        shares: Samples of each rank.
        sample_s: Seconds that each rank needs for a sample.
        num_steps: How many are timed; the median counts.
    """
    torch.manual_seed(0)
    model = DDP(small_model())
    whole_inputs, whole_targets = _batch(0, 0, sum(shares))
    own = slice(sum(shares[:rank]), sum(shares[: rank + 1]))
    times = []
    norm = 0.0
    for step in range(num_steps):
        model.zero_grad()
        dist.barrier()
        began = time.perf_counter()
        losses = cross_entropy(model(whole_inputs[own]), whole_targets[own], reduction="sum")
        time.sleep(shares[rank] * sample_s[rank])
        (losses * dist.get_world_size() / sum(shares)).backward()
        times.append(time.perf_counter() - began)
        if step == 0:
            norm = float(_flat_gradient(model).norm())
    return sorted(times)[num_steps // 2], norm


# ---- scaling efficiency


class _Layers(nn.Sequential):
    """Four square layers."""

    def __init__(self, width: int) -> None:
        super().__init__(*(nn.Linear(width, width, bias=False) for _ in range(4)))


def step_s(rank: int, width: int, batch: int, alone: bool, num_steps: int = 15) -> float:
    """Seconds of forward and backward of four layers; the fastest.

    Args:
        rank: This one.
        width: Width of the layers; they have 4 width^2 weights.
        batch: Samples of this rank.
        alone: Rank 0 works by itself, and the others not at all.
        num_steps: How many are timed.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if alone and rank != 0:
        return 0.0
    model = _Layers(width) if alone else DDP(_Layers(width))
    x = torch.randn(batch, width)
    times = []
    for _ in range(num_steps):
        model.zero_grad()
        began = time.perf_counter()
        model(x).square().mean().backward()
        times.append(time.perf_counter() - began)
    return min(times)


def message_s(width: int, num_messages: int = 15) -> float:
    """Seconds of an all-reduce of the gradients of four such layers; the fastest."""
    values = torch.zeros(4 * width * width)
    times = []
    for _ in range(num_messages):
        began = time.perf_counter()
        dist.all_reduce(values)
        times.append(time.perf_counter() - began)
    return min(times)
