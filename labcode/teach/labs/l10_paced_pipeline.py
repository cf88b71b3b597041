"""A pipeline of small stages that take as long as one wants: time lines that are fair where ranks share cores.

Four ranks that compute on two cores wait for a core, not for each other, and a schedule cannot be seen. Here each action
does its arithmetic, which is small, and then sleeps until its time is up. A sleeping rank needs no core: it stands for a
rank whose device is busy. Messages, their order and the waiting for them are real, and so are the gradients.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from labcode.comm.counting import counted, totals
from labcode.parallel.pipeline import Pipeline
from labcode.perf.pipeline import Bar, StageTimes, Timeline
from labcode.schedules import Action, Actions, make_plan, ticks
from labcode.teach.figures import plot
from labcode.teach.figures.style import Picture

WIDTH, BATCH = 16, 4
AT_ONCE = StageTimes(0, 0, 0)


class Stage(nn.Module):
    """`tanh(x A + b)`, float64; the first stage reads the inputs, which come as x or beside it."""

    def __init__(self, number: int):
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        for param in self.parameters():
            param.data = (
                torch.randn(param.shape, dtype=torch.float64, generator=generator) / WIDTH**0.5
            )

    def forward(self, x, inputs=None):
        """[BATCH, WIDTH] -> [BATCH, WIDTH]."""
        return torch.tanh(self.linear(inputs if x is None else x))

    def gradient(self) -> torch.Tensor:
        """Of all weights, one row."""
        return torch.cat([param.grad.flatten() for param in self.parameters()])


def batches(num_microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, the same in every process: [micro-batches, BATCH, WIDTH] each."""
    generator = torch.Generator().manual_seed(1000)
    return torch.randn(
        2, num_microbatches, BATCH, WIDTH, dtype=torch.float64, generator=generator
    ).unbind()


def gradients(num_stages: int, num_microbatches: int) -> dict[int, torch.Tensor]:
    """{stage: gradient} of the mean loss, computed in one process without a pipeline."""
    stages = [Stage(number) for number in range(num_stages)]
    F.mse_loss(
        nn.Sequential(*stages)(x := batches(num_microbatches)[0]), batches(len(x))[1]
    ).backward()
    return {number: stage.gradient() for number, stage in enumerate(stages)}


@dataclass(frozen=True)
class Played:
    """What a schedule did on one rank.

    Args:
        rows: For each step that was timed: (action, start, stop), seconds of a clock that all ranks of a machine share. An
            action starts when its input is there.
        begins: When each step began.
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

    def __init__(self, stage_s: StageTimes):
        self.stage_s = stage_s
        self.rows: list[tuple[Action, float, float]] = []
        self.peak = 0
        self._held = 0

    def __call__(self, action: Action, started_s: float, stopped_s: float) -> None:
        """Wait until the action has taken its time."""
        self._held += self._HELD[action.kind]
        self.peak = max(self.peak, self._held)
        rest_s = started_s + self.stage_s.of(action.kind) - stopped_s
        if rest_s > 0:
            time.sleep(rest_s)
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
        num_stages, num_microbatches: Of the pipeline.
        stage_s: How long the actions of any stage take.
        repeats: Steps on the clock.
        stages: Modules to take in place of `Stage`, by their number.
    """
    own = {
        stage: (stages or {}).get(stage) or Stage(stage)
        for stage in sorted({action.stage for action in actions[rank]})
    }
    empty = torch.empty(BATCH, WIDTH, dtype=torch.float64)

    def boundary(inputs: torch.Tensor) -> torch.Tensor:
        return empty.clone()

    plan = make_plan(actions, num_stages, num_microbatches)
    pipeline = Pipeline(own, plan, dist.group.WORLD, F.mse_loss, boundary)
    inputs, targets = batches(num_microbatches)
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
    """The measured time line of all ranks, that of the step of median length."""
    steps = []
    for step, begins in enumerate(zip(*(one.begins for one in played))):
        zero = min(begins)
        rows = [
            Bar(rank, action, start - zero, stop - zero)
            for rank, one in enumerate(played)
            for action, start, stop in one.rows[step]
        ]
        steps.append(Timeline(tuple(rows)))
    return sorted(steps, key=lambda line: line.total_s)[len(steps) // 2]


def difference(played: Sequence[Played], num_stages: int, num_microbatches: int) -> float:
    """The largest difference between a gradient of the pipeline and that of one process."""
    whole = gradients(num_stages, num_microbatches)
    return max(
        (grad - whole[stage]).abs().max().item()
        for one in played
        for stage, grad in one.gradients.items()
    )


def picture(simulated: Timeline, measured: Timeline, *, title: str, alt: str) -> Picture:
    """The simulated time line above the measured one, in the same colours and on one axis."""
    return plot.timeline(
        bars(simulated, "simulated") + bars(measured, "measured"), xlabel="ms", title=title, alt=alt
    )


def bars(line: Timeline, name: str = "rank") -> list[tuple[str, str, float, float]]:
    """Rows for `plot.timeline`, in milliseconds; a rank's second stage is written small: f and b.

    Each rank's rows come by kind, not by time, because kinds get their colours in the order of their first rows.
    """
    rows, first = [], {}
    for rank, (kind, stage, microbatch), start, stop in line.rows:
        letter = kind if first.setdefault(rank, stage) == stage else kind.lower()
        rows.append(
            (rank, "FBIWfbiw".index(letter), f"{letter} {microbatch}", 1e3 * start, 1e3 * stop)
        )
    return [(f"{name} {rank}", *row) for rank, _, *row in sorted(rows)]


def table(actions: Actions, num_stages: int) -> str:
    """The schedule as text, one line for each rank and one column for each tick; a point where the rank waits."""
    rows = ticks(actions, num_stages)
    first = {rank: next(action.stage for action in row if action) for rank, row in rows.items()}
    wide = (
        3 if len(rows[0]) <= 30 else 2
    )  # characters of a column: a line has to fit beside the file list

    def cell(rank, action):
        if action is None:
            return "·"
        return (action.kind if action.stage == first[rank] else action.kind.lower()) + str(
            action.microbatch
        )

    lines = {
        rank: "".join(cell(rank, action).ljust(wide) for action in row)
        for rank, row in rows.items()
    }
    return "\n".join(f"rank {rank}  {line}".rstrip() for rank, line in lines.items())
