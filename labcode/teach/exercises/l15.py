"""Checks of lesson 15, hybrid training. The text of each assertion is a hint."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from labcode import recipes
from labcode.config import GPTConfig
from labcode.perf.alpha_beta import Link
from labcode.perf.pipeline import StageTimes, Timeline, simulate
from labcode.perf.step import ClusterModel, iteration_parts
from labcode.schedules import schedule
from labcode.slurm.script.job import Job
from labcode.teach.check import Exercise, due
from labcode.teach.labs.l15_hybrid import FIELDS, RECIPE, SHORT, SIZE, Submitted, job
from labcode.topology import GridShape

EXERCISES = {
    "15.1": Exercise("and what does not fit is refused before anything starts"),
    "15.2": Exercise("bubble included, and gradients once a step"),
    "15.3": Exercise("the same for a trace of any profiler"),
    "15.4": Exercise("four ranks on two nodes, and the loss of plain dp"),
    "15.5": Exercise(),
}

# ---- 15.1

FITS = (  # world, tp, pp, global batch, micro-batch
    (4, 2, 2, 16, 2),
    (64, 8, 4, 512, 4),
    (16, 1, 1, 32, 1),
    (384, 8, 12, 1536, 1),
)
REFUSED = {
    (6, 2, 2, 16, 2): "6 ranks over tp*pp = 4",
    (64, 8, 4, 511, 1): "511 samples over dp = 2",
    (64, 8, 4, 16, 3): "16 samples over micro*dp = 6",
}


Layout = Callable[[int, int, int, int, int], tuple[int, int, int]]


def layout(my_layout: Layout) -> None:
    """The learner's arithmetic of a world size, and what it refuses.

    Args:
        my_layout: `my_layout(world, tp, pp, global_batch, micro_batch)`
            -> (dp, local batch, micro-batches).
    """
    for numbers in FITS:
        _check_layout(numbers, due(my_layout(*numbers)))
    for numbers, what in REFUSED.items():
        _check_refusal(my_layout, numbers, what)


def _check_layout(numbers: tuple[int, int, int, int, int], found: Any) -> None:
    world, tp, pp, global_batch, micro = numbers
    case = f"world {world}, tp {tp}, pp {pp}, global batch {global_batch}, micro-batch {micro}: "
    assert isinstance(found, tuple) and len(found) == 3, (
        case + f"{found}: give (dp, local batch, micro-batches)"
    )
    dp, local, count = due(*found)
    assert all(isinstance(value, int) for value in found), (
        case + f"{found}: give whole numbers, // makes them"
    )
    assert dp == world // (tp * pp), case + (f"dp = {dp}, but {dp}*{tp}*{pp} ranks are not {world}")
    assert local == global_batch // dp, case + (
        f"local batch {local}: {dp} replicas of tp*pp ranks share the {global_batch} samples"
    )
    assert count == local // micro, case + (
        f"{count} micro-batches of {micro} are not the {local} samples of a replica"
    )


def _check_refusal(my_layout: Layout, numbers: tuple[int, int, int, int, int], what: str) -> None:
    try:
        found = my_layout(*numbers)
    except ValueError:
        return
    raise AssertionError(
        f"{what}: your function gives {found}, and should raise a ValueError, as it leaves a rest"
    )


# ---- 15.2

MODEL = GPTConfig(
    vocab_size=64,
    context_length=32,
    num_layers=2,
    num_heads=4,
    hidden_size=64,
    positions="rotary",
    tie_embeddings=False,
)
CLUSTER = ClusterModel(0.075e9, inside=Link(2e-4, 4.5e6), between=Link(1e-3, 0.5e6))


Iteration = Callable[[int, int, float, float], float]


def iteration(my_iteration: Iteration) -> None:
    """The learner's time of a step, against the parts of the model.

        (m + pp - 1) * micro_s + dp_s

    Args:
        my_iteration: `my_iteration(m, pp, micro_s, dp_s)` -> seconds.
    """
    cases = (
        (16, 4, 0.02, 0.5),
        (8, 1, 0.1, 0.6),
        (4, 2, 0.1, 0.0),
        (4, 2, 0.1, 0.3),
        (1, 4, 1.0, 0.0),
    )
    for m, pp, micro_s, dp_s in cases:
        _check_iteration(m, pp, micro_s, dp_s, due(my_iteration(m, pp, micro_s, dp_s)))
    parts = iteration_parts(MODEL, GridShape(tp=2, pp=2), 8, 2, CLUSTER)
    whole_s = sum(parts.values())
    m = 4
    micro_s = (parts["compute"] + parts["tp"] + parts["pp"]) / m
    found_s = my_iteration(m, 2, micro_s, parts["dp"])
    assert math.isclose(found_s, whole_s), (
        f"the 2 x 2 run takes {whole_s:.3g} s by its parts, your function says {found_s:.3g} s"
    )


def _check_iteration(m: int, pp: int, micro_s: float, dp_s: float, found: float) -> None:
    case = f"m={m}, pp={pp}, micro_s={micro_s}, dp_s={dp_s}: "
    pipeline_s = (m + pp - 1) * micro_s
    right_s = pipeline_s + dp_s
    # What people write, with its hint. Some of these are right for some numbers: with pp = 1 there
    # is no bubble to forget, and with dp_s = 0 there are no gradients to forget.
    mistakes = [
        (m * micro_s + dp_s, "this has no bubble: the last stage begins pp - 1 micro-batches late"),
        (pipeline_s, "the gradients are still to be averaged over dp"),
        (
            (m + pp - 1) * (micro_s + dp_s),
            "gradients are averaged once a step, not once a micro-batch",
        ),
        ((m + pp) * micro_s + dp_s, "one too many: the bubble is pp - 1 micro-batches"),
    ]
    if dp_s >= pipeline_s:
        hint = "nothing overlaps here: the gradients travel after the last backward"
        mistakes.insert(0, (dp_s, hint))
    for mistaken_s, hint in mistakes:
        harmless = math.isclose(mistaken_s, right_s)
        assert harmless or not math.isclose(found, mistaken_s), case + hint
    assert math.isclose(found, right_s), (
        case + f"{found:.3g} s; a stage is busy for m micro-batches and waits for pp - 1"
    )


# ---- 15.3


Gap = tuple[float, float]  # start_s, stop_s


def gaps(my_gaps: Callable[[Timeline, int], Sequence[Gap]]) -> None:
    """The learner's search for the times in which a rank does nothing.

    Args:
        my_gaps: `my_gaps(line, rank)` -> [(start_s, stop_s)].
    """
    for name, p, m in (("1f1b", 2, 4), ("gpipe", 4, 4), ("1f1b", 4, 8)):
        line = simulate(schedule(name, p, m), StageTimes(1, 1, 1))
        # the rows of different ranks are mixed, as in a trace
        mixed = sorted(line.rows, key=lambda row: (row.start_s, -row.rank))
        shuffled = Timeline(tuple(mixed))
        for rank in range(p):
            case = f"{name}, {p} ranks, {m} micro-batches, rank {rank}: "
            found = due(my_gaps(shuffled, rank))
            _check_gaps(_without_empty(found), _gaps(line, rank), line.total_s, case)


def _gaps(line: Timeline, rank: int) -> list[Gap]:
    rows = sorted((row.start_s, row.stop_s) for row in line.rows if row.rank == rank)
    edges = [(0.0, 0.0), *rows, (line.total_s, line.total_s)]
    return _without_empty((before[1], after[0]) for before, after in pairwise(edges))


def _without_empty(gaps: Iterable[Sequence[float]]) -> list[Gap]:
    """In order; each gap may be a tuple or a list."""
    return sorted((start_s, stop_s) for start_s, stop_s in gaps if stop_s - start_s > 1e-9)


def _idle_s(gaps: list[Gap]) -> float:
    return sum(stop_s - start_s for start_s, stop_s in gaps)


def _check_gaps(found: list[Gap], right: list[Gap], total_s: float, case: str) -> None:
    inner = [gap for gap in right if gap[0] > 0 and gap[1] < total_s]
    assert found != inner or inner == right, case + (
        "the gaps between actions are right; "
        "the rank is also idle before its first and after its last"
    )
    assert math.isclose(_idle_s(found), _idle_s(right), abs_tol=1e-9), (
        case + f"idle for {_idle_s(found):g} units, the rows say {_idle_s(right):g}"
    )
    assert found == right, case + f"{found}, expected {right}"


# ---- 15.4

_FIRST = re.compile(
    r"^(?P<world>\d+) ranks? on (?:1 node|\d+ nodes \((?P<nodes>.*?)\)), .*; "
    r"grid dp (?P<dp>\d+) x pp (?P<pp>\d+) x cp \d+ x tp (?P<tp>\d+); "
    r"(?P<samples>\d+) samples a step = "
    r"dp \d+ x (?P<count>\d+) micro-batches of (?P<micro>\d+)",
    re.MULTILINE,
)
_STEP = re.compile(r"step (\d+)/\d+ \| loss ([\d.]+)")


def form(form: Mapping[str, Any], nodes: int = 2, ranks_per_node: int = 2) -> None:
    """The learner's numbers for gpt_tiny on a small cluster.

    Args:
        form: {"nodes": .., "ranks_per_node": .., "parallel.tp": .., ...}.
        nodes, ranks_per_node: Of the cluster.
    """
    missing = [name for name in SIZE + FIELDS if name not in due(form)]
    assert not missing, f"the form has no {', '.join(missing)}"
    values = due(*(form[name] for name in SIZE + FIELDS))
    assert all(isinstance(value, int) for value in values), "all six are whole numbers"
    asked, per_node, tp, pp, micro, global_batch = values
    world = nodes * ranks_per_node
    assert per_node <= ranks_per_node, (
        f"{per_node} ranks per node: a node has {ranks_per_node} GPUs, one for each rank"
    )
    assert asked <= nodes, f"{asked} nodes: there are {nodes}, and the job would wait for ever"
    assert asked * per_node == world, (
        f"{asked} nodes x {per_node} ranks leave GPUs idle: there are {world}"
    )
    wanted_batch = RECIPE.train.global_batch
    assert global_batch == wanted_batch, (
        f"global batch {global_batch}: "
        f"the learning rate of the recipe was chosen for {wanted_batch}"
    )
    assert tp <= ranks_per_node, f"tp={tp} leaves the node, which has {ranks_per_node} ranks"
    try:
        changes = {name: form[name] for name in FIELDS}
        shape = recipes.with_changes(RECIPE, changes).check(world)
    except ValueError as error:
        raise AssertionError(str(error)) from None
    parts = tp * pp
    assert parts >= world, f"a rank holds 1/{parts} of the layers, and there is room for 1/{world}"
    count = global_batch // (micro * shape.dp)
    assert (pp - 1) / count <= 1 / 8, (
        f"{count} micro-batches: the bubble is {pp - 1}/{count} of the work, wanted is 1/8"
    )
    assert micro > 1, (
        "micro-batch 1 works, but a message of two samples costs hardly more than "
        "one of one sample: take 2"
    )


def script(
    blanks: Mapping[str, Any],
    run: Callable[[Job], Submitted],
    reference: Sequence[Mapping[str, float]],
) -> None:
    """The learner's form for 15.4, submitted: what its log says.

    Args:
        blanks: The form.
        run: `Submit`, or another function that runs a job to its end.
        reference: Rows of metrics of the same training on another grid.
    """
    form(blanks)
    done = run(job(blanks))
    assert done.outcome.ok, f"the job ended as {done.outcome}: read {done.out}.log"
    _check_first_line(blanks, done)
    _check_last_loss(done, reference)


def _check_first_line(blanks: Mapping[str, Any], done: Submitted) -> None:
    first = _FIRST.search(done.log)
    assert first, (
        f'{done.out}.log has no line "... ranks on ...; grid ...": '
        "no rank came as far as its first step"
    )
    world = int(first["world"])
    wanted = blanks["nodes"] * blanks["ranks_per_node"]
    assert world == wanted, (
        f"the log says {world} ranks, the form {wanted}: these are several jobs, not one"
    )
    if done.on_slurm:
        assert first["nodes"] == "n1: 0, 1; n2: 2, 3", (
            f"the ranks sit on {first['nodes'] or 'one node'}: tp is not inside the nodes"
        )
    same_pp = int(first["pp"]) == blanks["parallel.pp"]
    same_tp = int(first["tp"]) == blanks["parallel.tp"]
    assert same_pp and same_tp, (
        f"the log says pp {first['pp']} x tp {first['tp']}, and the form does not"
    )
    same_samples = int(first["samples"]) == blanks["train.global_batch"]
    same_micro = int(first["micro"]) == blanks["train.micro_batch"]
    assert same_samples and same_micro, (
        f"the log says {first['samples']} samples a step in micro-batches of {first['micro']} "
        f"(dp {first['dp']} x {first['count']}), and the form does not"
    )


def _check_last_loss(done: Submitted, reference: Sequence[Mapping[str, float]]) -> None:
    losses = {int(step): float(loss) for step, loss in _STEP.findall(done.log)}
    last_step = max(losses, default=0)
    steps = SHORT["train.steps"]
    assert last_step == steps, f"the log ends at step {last_step} of {steps}"
    loss = losses[last_step]
    right = [row["loss"] for row in reference if "loss" in row][-1]
    assert abs(loss - right) < 1e-3, (
        f"the last loss is {loss}, on another grid {right:.4f}: these trained something else"
    )


# ---- 15.5


def reading(
    answer: tuple[float, float, float, float],
    *,
    iterations: int,
    samples: int,
    step_s: float,
    world: int,
    tp: int,
    pp: int,
    micro: int,
    tokens: int,
) -> None:
    """What the learner reads from a line of a log.

    Args:
        answer: (global batch, micro-batches, tokens/s of one GPU, share of the time idle).
        iterations, samples: What the line says was done.
        step_s: Seconds of an iteration.
        world, tp, pp: GPUs, and how many of them the model is cut over.
        micro: Samples of a micro-batch.
        tokens: Of a sample.
    """
    answer = due(answer)
    assert isinstance(answer, tuple) and len(answer) == 4, f"{answer}: give four numbers"
    batch, count, speed, idle = due(*answer)
    assert batch == samples // iterations, (
        f"global batch {batch}: {samples:,} samples were read in {iterations} iterations"
    )
    dp = world // (tp * pp)
    assert count != batch // micro, (
        f"{count} micro-batches: these are those of all replicas, and there are {dp} of them"
    )
    assert count == batch // (dp * micro), (
        f"{count} micro-batches of {micro} over dp = {dp} are not {batch} samples"
    )
    tokens_per_s = batch * tokens / step_s
    assert not math.isclose(speed, tokens_per_s, rel_tol=0.02), (
        f"{speed:.4g} tokens/s is the speed of all {world} GPUs"
    )
    assert math.isclose(speed, tokens_per_s / world, rel_tol=0.02), (
        f"{speed:.4g} tokens/s: samples * tokens / seconds / GPUs"
    )
    assert not math.isclose(idle, (pp - 1) / count, rel_tol=0.005), (
        f"{idle:.4f} is bubble / work; asked is a share of the time"
    )
    assert math.isclose(idle, (pp - 1) / (count + pp - 1), rel_tol=0.005), (
        f"{idle:.4f}: the share of the time is (pp-1)/(m+pp-1)"
    )
