"""How far predictions are off: what `benchmarks/planner.py` prints and the tests hold.

A predictor is a function from a published run to seconds. Relative errors are |predicted/measured -
1|. Calibrated means one factor for each stack (source, GPU, precision), from all of its other runs
("leave one out").
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from labcode.perf.estimate import fit_scale, step_parts
from labcode.perf.flops import transformer_flops_per_sample
from labcode.perf.layout_memory import layout_memory
from labcode.perf.published import PublishedRun
from labcode.runtime.units import GIB

Predictor = Callable[[PublishedRun], float]
RULE_OF_THUMB = 0.45


@dataclass(frozen=True)
class Spread:
    """Relative errors of some runs.

    Args:
        count: Runs.
        median, p90: Median and 90th percentile of the absolute relative errors.
        ratio: The median of predicted over measured: above 1 is too slow.
    """

    count: int
    median: float
    p90: float
    ratio: float


def predicted_s(run: PublishedRun) -> float:
    """Seconds of a step by `estimate`."""
    return sum(step_parts(run.model, run.shape, run.cluster, run.settings).values())


def rule_of_thumb_s(run: PublishedRun) -> float:
    """Seconds of a step if every training reached 45 % of the datasheet's peak.

    What activation checkpointing computes again counts, or the rule would be far worse.
    """
    again = run.settings.activation_checkpointing
    if again == "operators":
        again = "selective"
    flops = transformer_flops_per_sample(run.model, activation_checkpointing=again)
    peak = run.shape.world_size * run.cluster.gpu.peak(run.settings.dtype)
    return run.settings.global_batch * flops / (RULE_OF_THUMB * peak)


def timed(runs: Iterable[PublishedRun]) -> list[PublishedRun]:
    """Those of which a step time is known."""
    return [run for run in runs if run.step_s is not None]


def spread(ratios: Sequence[float]) -> Spread:
    """Errors of predicted over measured times."""
    errors = sorted(abs(ratio - 1) for ratio in ratios)
    return Spread(
        count=len(errors),
        median=statistics.median(errors),
        p90=errors[min(len(errors) - 1, int(0.9 * len(errors)))],
        ratio=statistics.median(ratios),
    )


def ratios(runs: Iterable[PublishedRun], predictor: Predictor = predicted_s) -> list[float]:
    """Predicted over measured seconds of each timed run."""
    found = []
    for run in timed(runs):
        assert run.step_s is not None
        found.append(predictor(run) / run.step_s)
    return found


def calibrated_ratios(
    runs: Iterable[PublishedRun], predictor: Predictor = predicted_s
) -> list[float]:
    """The same after one factor for each stack; a stack of a single run has none and is left out.

    Held by: tests/unit/test_accuracy.py
    """
    by_stack = defaultdict(list)
    for run in timed(runs):
        by_stack[run.stack].append((run.step_s, predictor(run)))
    found = []
    for times in by_stack.values():
        if len(times) < 2:
            continue
        for left_out, (measured, predicted) in enumerate(times):
            others = times[:left_out] + times[left_out + 1 :]
            scale = fit_scale(*zip(*others, strict=True))
            found.append(scale * predicted / measured)
    return found


class Pick(NamedTuple):
    """The layout of a sweep that is predicted as the fastest.

    Args:
        chosen: It.
        best: Layout that was measured as the fastest.
    """

    chosen: PublishedRun
    best: PublishedRun

    @property
    def regret(self) -> float:
        """How much longer the chosen one takes: 0.1 is a tenth."""
        assert self.chosen.step_s is not None and self.best.step_s is not None
        return self.chosen.step_s / self.best.step_s - 1


def picks(runs: Iterable[PublishedRun], predictor: Predictor = predicted_s) -> list[Pick]:
    """What is chosen in each sweep.

    A sweep are the runs of one source with the same model, number of GPUs, batch and precision. Of
    layouts that were measured more than once the first measurement is taken, and layouts predicted
    to be equal keep the table's order.
    """
    sweeps = defaultdict(list)
    for run in timed(runs):
        key = (run.stack, run.model, run.shape.world_size, run.settings.global_batch)
        sweeps[key].append(run)
    found = []
    for sweep in sweeps.values():
        if len(sweep) > 1:
            found.append(Pick(min(sweep, key=predictor), min(sweep, key=_measured)))
    return found


def regrets(runs: Iterable[PublishedRun], predictor: Predictor = predicted_s) -> list[float]:
    """For each sweep, how much longer the layout takes that is predicted as the fastest."""
    return [pick.regret for pick in picks(runs, predictor)]


def _measured(run: PublishedRun) -> float:
    assert run.step_s is not None
    return run.step_s


@dataclass(frozen=True)
class Verdicts:
    """Who is predicted to run out of memory.

    Args:
        found: Runs that ran out of memory and were predicted to.
        out_of_memory: Runs that ran out of memory.
        refused: Runs that fitted and were predicted not to.
        fitting: Runs that fitted.
    """

    found: int
    out_of_memory: int
    refused: int
    fitting: int


@dataclass(frozen=True)
class MemoryAccuracy:
    """How memory is predicted.

    Args:
        raw: Errors without calibration.
        calibrated: Errors after one number of bytes for each stack, from its other runs.
        verdicts: Verdicts without calibration.
        calibrated_verdicts: Verdicts with it, where a stack's runs give one.
        offsets: {stack: GiB that its runs take more than predicted}.
    """

    raw: Spread
    calibrated: Spread
    verdicts: Verdicts
    calibrated_verdicts: Verdicts
    offsets: dict[tuple[str, str, str], float]


def memory_accuracy(runs: Sequence[PublishedRun]) -> MemoryAccuracy:
    """Predicted against measured memory, and who is predicted to run out of it."""
    by_stack = defaultdict(list)
    for run in runs:
        if run.memory_bytes is not None:
            by_stack[run.stack].append((run.memory_bytes, predicted_bytes(run)))
    raw = []
    calibrated = []
    offsets = {}
    for stack, pairs in by_stack.items():
        offsets[stack] = _offset(pairs) / GIB
        for left_out, (measured, predicted) in enumerate(pairs):
            raw.append(predicted / measured)
            others = pairs[:left_out] + pairs[left_out + 1 :]
            if others:
                calibrated.append((predicted + _offset(others)) / measured)
    return MemoryAccuracy(
        raw=spread(raw),
        calibrated=spread(calibrated),
        verdicts=_verdicts(runs, {}),
        calibrated_verdicts=_verdicts(runs, offsets),
        offsets=offsets,
    )


def predicted_bytes(run: PublishedRun) -> float:
    """Bytes of the fullest rank by `layout_memory`."""
    return sum(layout_memory(run.model, run.shape, run.settings).values())


def _offset(pairs: Sequence[tuple[float, float]]) -> float:
    return statistics.median(measured - predicted for measured, predicted in pairs)


def _verdicts(runs: Sequence[PublishedRun], offsets: dict[tuple[str, str, str], float]) -> Verdicts:
    ended: list[bool] = []
    fitted: list[bool] = []
    for run in runs:
        predicted = predicted_bytes(run) + offsets.get(run.stack, 0.0) * GIB
        refused = predicted > run.cluster.gpu.memory_bytes
        if run.out_of_memory:
            ended.append(refused)
        elif run.step_s is not None:
            fitted.append(refused)
    return Verdicts(ended.count(True), len(ended), fitted.count(True), len(fitted))
