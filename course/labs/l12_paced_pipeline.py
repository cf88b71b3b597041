"""Lesson 12: a pipeline of small stages that take as long as one wants.

Four ranks that compute on two cores wait for a core, not for each other, and a schedule cannot be
seen. Here each action does its arithmetic, which is small, and then sleeps until its time is up. A
sleeping rank needs no core: it stands for a rank whose device is busy. Messages, their order and
the waiting for them are real, and so are the gradients.
"""

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from course.figures import plot
from course.figures.pipeline import Note
from course.figures.style import Picture
from course.labs.clock import sleep_until
from course.pool.ranks import Ranks
from labcode.comm.counting import counted, totals
from labcode.parallel.model import ParallelModel
from labcode.parallel.pipeline import Pipeline
from labcode.perf.pipeline import Bar, StageTimes, Timeline, simulate
from labcode.schedules import Action, Actions, make_plan, schedule, ticks

WIDTH = 16
BATCH = 4
AT_ONCE = StageTimes(0, 0, 0)


class Stage(nn.Module):
    """`tanh(x A + b)`, float64; the first stage reads the inputs, which come as x or beside it.

    Args:
        number: Number of the stage; its weights are drawn from it.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        for param in self.parameters():
            drawn = torch.randn(param.shape, dtype=torch.float64, generator=generator)
            param.data = drawn / WIDTH**0.5

    def forward(self, x: torch.Tensor | None, inputs: torch.Tensor | None = None) -> torch.Tensor:
        """[BATCH, WIDTH] -> [BATCH, WIDTH]."""
        return torch.tanh(self.linear(inputs if x is None else x))

    def gradient(self) -> torch.Tensor:
        """Gradient of all weights, in one row."""
        rows = []
        for param in self.parameters():
            assert param.grad is not None
            rows.append(param.grad.flatten())
        return torch.cat(rows)


def batches(num_microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, the same in every process: [micro-batches, BATCH, WIDTH] each."""
    generator = torch.Generator().manual_seed(1000)
    size = (2, num_microbatches, BATCH, WIDTH)
    inputs, targets = torch.randn(size, dtype=torch.float64, generator=generator)
    return inputs, targets


def gradients(num_stages: int, num_microbatches: int) -> dict[int, torch.Tensor]:
    """{stage: gradient} of the mean loss, computed in one process without a pipeline."""
    stages = [Stage(number) for number in range(num_stages)]
    inputs, targets = batches(num_microbatches)
    F.mse_loss(nn.Sequential(*stages)(inputs), targets).backward()
    return {number: stage.gradient() for number, stage in enumerate(stages)}


@dataclass(frozen=True)
class Played:
    """What a schedule did on one rank.

    Args:
        rows: For each step that was timed: (action, start, stop), in seconds of a clock that all
            ranks of a machine share. An action starts when its input is there.
        begins: Times at which each step began.
        peak: Most stage-micro-batches whose activations the rank held at once.
        sent: (messages, their bytes) of one step.
        gradients: {stage: gradient} of one step.
    """

    rows: list[list[tuple[Action, float, float]]]
    begins: list[float]
    peak: int
    sent: tuple[int, int]
    gradients: dict[int, torch.Tensor]


class Pace:
    """An `on_action` of a pipeline that makes every action take its time, and takes notes.

    Args:
        stage_s: How long the actions of any stage take, from when their input is there.

    Attributes:
        rows: (action, started_s, stopped_s) of each action.
        peak: Most stage-micro-batches whose activations were held at once.
    """

    # how many stage-micro-batches an action begins to hold, or lets go of
    _HELD: ClassVar = {"F": +1, "B": -1, "I": 0, "W": -1}

    def __init__(self, stage_s: StageTimes) -> None:
        self.stage_s = stage_s
        self.rows: list[tuple[Action, float, float]] = []
        self.peak = 0
        self._held = 0

    def __call__(self, action: Action, started_s: float, stopped_s: float) -> None:
        """Wait until the action has taken its time."""
        self._held += self._HELD[action.kind]
        self.peak = max(self.peak, self._held)
        sleep_until(started_s + self.stage_s.of(action.kind))
        self.rows.append((action, started_s, time.perf_counter()))


def run_schedule(
    rank: int,
    actions: Actions,
    num_stages: int,
    num_microbatches: int,
    stage_s: StageTimes = AT_ONCE,
    repeats: int = 1,
    stages: Mapping[int, nn.Module] | None = None,
) -> Played:
    """Run a schedule on this rank: one step to look at, then `repeats` steps on the clock.

    Args:
        rank: This rank.
        actions: The schedule of all ranks.
        num_stages, num_microbatches: Sizes of the pipeline.
        stage_s: How long the actions of any stage take.
        repeats: Steps on the clock.
        stages: Modules to take in place of `Stage`, by their number.
    """
    own: dict[int, nn.Module] = {}
    for number in sorted({action.stage for action in actions[rank]}):
        own[number] = Stage(number)
        if stages is not None and number in stages:
            own[number] = stages[number]
    empty = torch.empty(BATCH, WIDTH, dtype=torch.float64)

    def boundary(inputs: torch.Tensor) -> torch.Tensor:
        return empty.clone()

    plan = make_plan(actions, num_stages, num_microbatches)
    group = dist.group.WORLD
    assert group is not None
    pipeline = Pipeline(own, plan, group, F.mse_loss, boundary)
    inputs, targets = (whole.unbind() for whole in batches(num_microbatches))
    first = Pace(AT_ONCE)
    with counted() as calls:
        pipeline.step(inputs, targets, on_action=first)
    grads = {stage: module.gradient() for stage, module in own.items() if isinstance(module, Stage)}
    rows = []
    begins = []
    for _ in range(repeats):
        pace = Pace(stage_s)
        dist.barrier()
        begins.append(time.perf_counter())
        pipeline.step(inputs, targets, on_action=pace)
        rows.append(pace.rows)
    return Played(rows, begins, first.peak, totals(calls).get("send", (0, 0)), grads)


def timeline(played: Sequence[Played]) -> Timeline:
    """The measured time line of all ranks, that of the step of median length.

    Args:
        played: What each of all ranks played.
    """
    lines = [_step_timeline(played, step) for step in range(len(played[0].begins))]
    return sorted(lines, key=lambda line: line.total_s)[len(lines) // 2]


def _step_timeline(played: Sequence[Played], step: int) -> Timeline:
    """Counted from when the first rank began."""
    zero_s = min(one.begins[step] for one in played)
    bars = []
    for rank, one in enumerate(played):
        for action, start_s, stop_s in one.rows[step]:
            bars.append(Bar(rank, action, start_s - zero_s, stop_s - zero_s))
    return Timeline(tuple(bars))


def difference(played: Sequence[Played], num_stages: int, num_microbatches: int) -> float:
    """The largest difference between a gradient of the pipeline and that of one process.

    Args:
        played: What each of all ranks played.
        num_stages, num_microbatches: Sizes of the pipeline.
    """
    whole = gradients(num_stages, num_microbatches)
    largest = 0.0
    for one in played:
        for stage, grad in one.gradients.items():
            largest = max(largest, (grad - whole[stage]).abs().max().item())
    return largest


# ---- what a lesson does


@dataclass(frozen=True)
class Experiment:
    """A schedule simulated, and run on the clock.

    Args:
        simulated, measured: Timelines of the schedule.
        played: What it did on each rank.
        stages_per_rank: Number of stages on each rank in the schedule.
        is_right: Whether its gradients are those of one process, to 1e-12.
    """

    simulated: Timeline
    measured: Timeline
    played: list[Played]
    stages_per_rank: int
    is_right: bool

    @property
    def kept(self) -> list[float]:
        """Most micro-batches that each rank kept at once, in whole ranks' worth of layers."""
        return [one.peak / self.stages_per_rank for one in self.played]

    @property
    def messages(self) -> int:
        """Messages of one step, of all ranks."""
        return sum(one.sent[0] for one in self.played)

    def picture(self, *, title: str, alt: str, notes: Sequence[Note] = ()) -> Picture:
        """The simulated time line above the measured one, on one axis."""
        lines = {"simulated": self.simulated, "measured": self.measured}
        return plot.pipeline(lines, title=title, alt=alt, notes=notes)


def play(
    ranks: Ranks, name: str, num_microbatches: int, stage_s: StageTimes, stages_per_rank: int = 1
) -> Experiment:
    """Simulate a schedule, run it three times on the clock, and say if its gradients are right.

    Args:
        ranks: Pool that it runs on.
        name: Name of the schedule.
        num_microbatches: Number of micro-batches of a step.
        stage_s: What all layers of one rank take for one micro-batch.
        stages_per_rank: v; each stage then takes 1/v of `stage_s`.
    """
    num_stages = ranks.n * stages_per_rank
    actions = schedule(name, num_stages, num_microbatches, ranks.n)
    one_stage_s = part_of(stage_s, stages_per_rank)
    played = ranks.run(run_schedule, actions, num_stages, num_microbatches, one_stage_s, repeats=3)
    is_right = difference(played, num_stages, num_microbatches) < 1e-12
    print(f"{name}: the gradients are those of one process: {is_right}")
    simulated = simulate(actions, one_stage_s)
    return Experiment(simulated, timeline(played), played, stages_per_rank, is_right)


def part_of(stage_s: StageTimes, parts: int) -> StageTimes:
    """The times of a stage that is one of `parts` equal ones."""
    return StageTimes(stage_s.forward_s / parts, stage_s.input_s / parts, stage_s.weight_s / parts)


def with_shorter_warmup(interleaved: Actions, stages_per_rank: int) -> Actions:
    """The interleaved schedule with p - 1 - r forwards less in the warm-up of rank r.

    Args:
        interleaved: Warm-up as published: 2 (p - 1 - r) + (v - 1) p forwards come first.
        stages_per_rank: v
    """
    num_ranks = len(interleaved)
    shorter = {}
    for rank, order in interleaved.items():
        forwards = [action for action in order if action.kind == "F"]
        backwards = [action for action in order if action.kind == "B"]
        warmup = (stages_per_rank - 1) * num_ranks + num_ranks - 1 - rank
        pairs = zip(forwards[warmup:], backwards)
        alternating = itertools.chain.from_iterable(pairs)
        left = backwards[len(forwards) - warmup :]
        shorter[rank] = [*forwards[:warmup], *alternating, *left]
    return shorter


def in_words(one: float, other: float) -> str:
    """Whether `one` is "more", "less" or "the same", compared with `other`."""
    if abs(one - other) < 1e-9:
        return "the same"
    return "more" if one > other else "less"


def forget_tied_weights(model: ParallelModel) -> None:
    """Make a model treat its tied weights as two that have nothing to do with each other.

    Args:
        model: What `parallelize` returned on this rank.
    """
    forgetful = {}
    for name, sharding in model.shardings.items():
        forgetful[name] = replace(sharding, tied=False)
    model.shardings = forgetful


def gaps(line: Timeline, rank: int) -> dict[str, list[tuple[float, float]]]:
    """When a rank of 1F1B waits, by the place in the schedule: {letter: [(start, stop)]}, seconds.

    a is before its first forward, b before its first backward, c between two backwards, d at the
    end.

    Args:
        line: The timeline of 1F1B.
        rank: Rank whose gaps are asked for.
    """
    found: dict[str, list[tuple[float, float]]] = {"a": [], "b": [], "c": [], "d": []}
    clock_s = 0.0
    before = ""
    for bar in line.rows:
        if bar.rank != rank:
            continue
        if bar.start_s > clock_s + 1e-9:
            letter = {"": "a", "F": "b", "B": "c"}[before]
            found[letter].append((clock_s, bar.start_s))
        clock_s = bar.stop_s
        before = bar.action.kind
    if line.total_s > clock_s + 1e-9:
        found["d"].append((clock_s, line.total_s))
    return found


def notes(line: Timeline, rank: int) -> list[Note]:
    """The letters of `gaps` for a figure."""
    found = []
    for letter, spans in gaps(line, rank).items():
        for start_s, stop_s in spans:
            found.append(Note(rank, start_s, stop_s, letter))
    return found


# ---- what a lesson shows


def table(actions: Actions, num_stages: int) -> str:
    """The schedule as text: a line for each rank, a column for each tick, a point for waiting.

    Args:
        actions: {rank: its actions}.
        num_stages: Number of stages of the pipeline.
    """
    lines = []
    for rank, row in ticks(actions, num_stages).items():
        first = actions[rank][0].stage
        width = 3 if len(row) <= 30 else 2  # a line has to fit beside JupyterLab's file list
        text = "".join(_cell(action, first).ljust(width) for action in row)
        lines.append(f"rank {rank}  {text}".rstrip())
    return "\n".join(lines)


def _cell(action: Action | None, first: int) -> str:
    if action is None:
        return "·"
    kind = action.kind if action.stage == first else action.kind.lower()
    return f"{kind}{action.microbatch}"
