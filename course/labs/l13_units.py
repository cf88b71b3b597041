"""Lesson 13: units that take a given time to compute and to gather, so that a laptop can show both.

Real ranks run labcode's FullyShardedModule, with its hooks and its collectives. Two things are
emulated: a layer sleeps for as long as a device would compute, and what is sent counts as under
way for as long as a link would carry it, one message after the other. A sleeping rank needs no
core, so times come out as predicted on two cores for four ranks.

Held by: tests/ranks/test_units_lab.py
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from course.labs.clock import EmulatedResource, sleep_until
from course.pool.ranks import Ranks
from labcode.parallel.zero import FullyShardedModule, parameters

WIDTH = 16  # of the layers; their arithmetic takes no time that counts
REPEATS = 3

Span = tuple[str, str, float, float]  # lane, label, start and stop in seconds


class Speeds(NamedTuple):
    """What things take, in seconds.

    Args:
        forward_s, backward_s: Seconds of one layer.
        message_s: To gather the weights of one layer, or to reduce-scatter their gradients.
    """

    forward_s: float
    backward_s: float
    message_s: float


class Played(NamedTuple):
    """One step, forward and backward.

    Args:
        step_s: Its time, of the slowest rank; the median of some steps.
        most_whole: The most layers whose weights were whole at once.
        spans: What rank 0 computed (F and B with the number of the layer) and sent (G for a gather,
            R for a reduce-scatter, with the number of the unit) in the last step.
    """

    step_s: float
    most_whole: int
    spans: list[Span]


def play(
    ranks: Ranks,
    num_layers: int,
    speeds: Speeds,
    *,
    layers_per_unit: int = 1,
    prefetch: bool = True,
    reshard: bool = True,
) -> Played:
    """Some steps of a model of equal layers under ZeRO-3.

    Args:
        ranks: Number of ranks over which the weights are divided.
        num_layers: Number of layers of the model.
        speeds: What a layer takes.
        layers_per_unit: How many layers are gathered together.
        prefetch: Gather the next unit while one computes.
        reshard: Give the weights back between forward and backward.
    """
    answers = ranks.run(_steps, num_layers, layers_per_unit, speeds, prefetch, reshard)
    times = [of_rank for of_rank, _, _ in answers]
    by_step = [max(of_ranks) for of_ranks in zip(*times)]
    most_whole = max(most for _, most, _ in answers)
    return Played(statistics.median(by_step), most_whole, answers[0][2])


def _steps(
    rank: int,
    num_layers: int,
    layers_per_unit: int,
    speeds: Speeds,
    prefetch: bool,
    reshard: bool,
) -> tuple[list[float], int, list[Span]]:
    """(seconds of each step, most layers whole at once, the spans of the last step) of a rank."""
    torch.set_num_threads(1)
    clock = _Clock(speeds)
    blocks = nn.ModuleList()
    for first in range(0, num_layers, layers_per_unit):
        numbers = range(first, min(first + layers_per_unit, num_layers))
        blocks.append(nn.Sequential(*(_Layer(number, clock) for number in numbers)))
    model = _Stack(blocks)
    world = dist.group.WORLD
    assert world is not None
    sharded = FullyShardedModule(model, world, reshard_after_forward=reshard, prefetch=prefetch)
    clock.count_whole = lambda: _whole_layers(sharded, list(blocks))
    x = torch.randn(4, WIDTH)
    times = []
    with _over_the_link(clock, sharded.units):
        for _ in range(REPEATS):
            dist.barrier()
            clock.begin()
            sharded(x).sum().backward()
            sharded.finish_gradient_sync()
            times.append(time.perf_counter() - clock.started_s)
    return times, clock.most_whole, clock.spans


def _whole_layers(sharded: FullyShardedModule, blocks: Sequence[nn.Module]) -> int:
    """How many layers are in memory, or arriving there."""
    count = 0
    for unit, block in zip(sharded.units, blocks):
        if unit._is_whole or unit._gathering is not None:
            count += len(list(block.children()))
    return count


class _Stack(nn.Module):
    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class _Clock:
    """The device and the link of a rank, and what they did in a step."""

    def __init__(self, speeds: Speeds) -> None:
        self.speeds = speeds
        self.link = EmulatedResource()
        self.started_s = 0.0
        self.spans: list[Span] = []
        self.most_whole = 0
        self.count_whole: Callable[[], int] = int

    def begin(self) -> None:
        """A step starts now."""
        self.spans = []
        self.link = EmulatedResource()
        self.started_s = time.perf_counter()

    def compute(self, label: str, seconds: float) -> None:
        """Sleep while the device computes."""
        begin_s = time.perf_counter()
        self.most_whole = max(self.most_whole, self.count_whole())
        sleep_until(begin_s + seconds)
        self._note("device", label, begin_s, begin_s + seconds)

    def send(self, label: str, seconds: float) -> float:
        """Put a message on the link; when it has arrived."""
        begin_s, end_s = self.link.take(seconds)
        self._note("link", label, begin_s, end_s)
        return end_s

    def _note(self, lane: str, label: str, begin_s: float, end_s: float) -> None:
        self.spans.append((lane, label, begin_s - self.started_s, end_s - self.started_s))


class _Layer(nn.Module):
    """A linear layer that takes its time."""

    def __init__(self, number: int, clock: _Clock) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.number = number
        self.clock = clock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.clock.compute(f"F{self.number + 1}", self.clock.speeds.forward_s)
        return _Slow.apply(self.linear(x), self.clock, self.number)


class _Slow(torch.autograd.Function):
    """Nothing in forward; in backward the time of a layer."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, clock: _Clock, number: int) -> torch.Tensor:
        ctx.clock = clock
        ctx.number = number
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.clock.compute(f"B{ctx.number + 1}", ctx.clock.speeds.backward_s)
        return grad, None, None


@contextlib.contextmanager
def _over_the_link(clock: _Clock, units: Sequence[parameters.Unit]) -> Iterator[None]:
    """Within it what FullyShardedModule starts arrives as late as over the link."""
    numbers = {unit: number for number, unit in enumerate(units, 1)}
    current = 0  # the number of the unit that starts something

    def of_a_unit(method: Callable[[parameters.Unit], None]) -> Callable[[parameters.Unit], None]:
        def noted(unit: parameters.Unit) -> None:
            nonlocal current
            current = numbers.get(unit, 0)
            method(unit)

        return noted

    def slow(start: Callable[..., Any], name: str) -> Callable[..., Any]:
        def started(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> Callable[[], Any]:
            finish = start(x, group, dim)
            whole = x.numel() * (group.size() if name == "G" else 1)
            arrived_s = clock.send(f"{name}{current}", whole / WIDTH**2 * clock.speeds.message_s)

            def finish_late() -> Any:
                result = finish()
                sleep_until(arrived_s)
                return result

            return finish_late

        return started

    gather = slow(parameters.start_all_gather, "G")
    reduce = slow(parameters.start_reduce_scatter, "R")
    with (
        mock.patch.object(parameters, "start_all_gather", gather),
        mock.patch.object(parameters, "start_reduce_scatter", reduce),
        mock.patch.object(parameters.Unit, "start_gather", of_a_unit(parameters.Unit.start_gather)),
        mock.patch.object(parameters.Unit, "reduce", of_a_unit(parameters.Unit.reduce)),
    ):
        yield
