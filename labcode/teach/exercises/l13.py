"""Checks of lesson 13, hybrid training. Each assertion's text is a hint."""

import math
import re
from itertools import pairwise

from labcode import recipes
from labcode.config import GPTConfig
from labcode.perf.alpha_beta import Link
from labcode.perf.pipeline import StageTimes, Timeline, simulate
from labcode.perf.step import ClusterModel, iteration_parts
from labcode.schedules import schedule
from labcode.teach.check import due
from labcode.teach.labs.l13_hybrid import FIELDS, RECIPE, SHORT, SIZE, job
from labcode.topology import GridShape

# ---- 13.1

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


def layout(my_layout) -> None:
    """The learner's `my_layout(world, tp, pp, global_batch, micro_batch)`: (dp, local batch, micro-batches)."""
    for world, tp, pp, global_batch, micro in FITS:
        case = (
            f"world {world}, tp {tp}, pp {pp}, global batch {global_batch}, micro-batch {micro}: "
        )
        found = due(my_layout(world, tp, pp, global_batch, micro))
        assert isinstance(found, tuple) and len(found) == 3, (
            case + f"{found}: give (dp, local batch, micro-batches)"
        )
        dp, local, count = due(*found)
        assert all(isinstance(value, int) for value in found), (
            case + f"{found}: give whole numbers, // makes them"
        )
        right = world // (tp * pp)
        assert dp == right, case + f"dp = {dp}, but {dp}*{tp}*{pp} ranks are not {world}"
        assert local == global_batch // dp, case + (
            f"local batch {local}: {dp} replicas of tp*pp ranks share the {global_batch} samples"
        )
        assert count == local // micro, (
            case + f"{count} micro-batches of {micro} are not the {local} samples of a replica"
        )
    for args, what in REFUSED.items():
        try:
            found = my_layout(*args)
        except ValueError:
            continue
        raise AssertionError(
            f"{what}: your function gives {found}, and should raise a ValueError, as it leaves a rest"
        )


# ---- 13.2

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


def iteration(my_iteration) -> None:
    """The learner's `my_iteration(m, pp, micro_s, dp_s)` against the parts of the model."""
    cases = (
        (16, 4, 0.02, 0.5),
        (8, 1, 0.1, 0.6),
        (4, 2, 0.1, 0.0),
        (4, 2, 0.1, 0.3),
        (1, 4, 1.0, 0.0),
    )
    for m, pp, micro_s, dp_s in cases:
        case = f"m={m}, pp={pp}, micro_s={micro_s}, dp_s={dp_s}: "
        found, right = due(my_iteration(m, pp, micro_s, dp_s)), (m + pp - 1) * micro_s + dp_s
        assert (
            not math.isclose(found, max(right - dp_s, dp_s)) or right - dp_s > dp_s or not dp_s
        ), case + ("nothing overlaps here: the gradients travel after the last backward")
        assert not math.isclose(found, m * micro_s + dp_s) or pp == 1, case + (
            "this has no bubble: the last stage begins pp - 1 micro-batches late"
        )
        assert not math.isclose(found, right - dp_s) or not dp_s, (
            case + "the gradients are still to be averaged over dp"
        )
        assert not math.isclose(found, (m + pp - 1) * (micro_s + dp_s)) or not dp_s, case + (
            "gradients are averaged once a step, not once a micro-batch"
        )
        assert not math.isclose(found, (m + pp) * micro_s + dp_s), (
            case + "one too many: the bubble is pp - 1 micro-batches"
        )
        assert math.isclose(found, right), (
            case + f"{found:.3g} s; a stage is busy for m micro-batches and waits for pp - 1"
        )
    parts = iteration_parts(MODEL, GridShape(tp=2, pp=2), 8, 2, CLUSTER)
    whole = sum(parts.values())
    found = my_iteration(4, 2, (parts["compute"] + parts["tp"] + parts["pp"]) / 4, parts["dp"])
    assert math.isclose(found, whole), (
        f"the 2 x 2 run takes {whole:.3g} s by its parts, your function says {found:.3g} s"
    )


# ---- 13.3


def gaps(my_gaps) -> None:
    """The learner's `my_gaps(line, rank)`: [(start_s, stop_s)] in which the rank does nothing."""
    for name, p, m in (("1f1b", 2, 4), ("gpipe", 4, 4), ("1f1b", 4, 8)):
        line = simulate(schedule(name, p, m), StageTimes(1, 1, 1))
        shuffled = Timeline(
            tuple(sorted(line.rows, key=lambda row: (row.start_s, -row.rank)))
        )  # ranks mixed, as a trace is
        for rank in range(p):
            case = f"{name}, {p} ranks, {m} micro-batches, rank {rank}: "
            found = [tuple(map(float, gap)) for gap in due(my_gaps(shuffled, rank))]
            found = sorted(gap for gap in found if gap[1] - gap[0] > 1e-9)
            rows = sorted((row.start_s, row.stop_s) for row in line.rows if row.rank == rank)
            edges = [(0.0, 0.0), *rows, (line.total_s, line.total_s)]
            right = [(a[1], b[0]) for a, b in pairwise(edges) if b[0] - a[1] > 1e-9]
            idle, expected = (sum(stop - start for start, stop in gaps) for gaps in (found, right))
            inner = [gap for gap in right if gap[0] > 0 and gap[1] < line.total_s]
            assert found != inner or inner == right, case + (
                "the gaps between actions are right; the rank is also idle before its first and after its last"
            )
            assert math.isclose(idle, expected, abs_tol=1e-9), (
                case + f"idle for {idle:g} units, the rows say {expected:g}"
            )
            assert found == right, case + f"{found}, expected {right}"


# ---- 13.4

_FIRST = re.compile(
    r"^(\d+) ranks? on (?:1 node|\d+ nodes \((.*?)\)), .*; grid dp (\d+) x pp (\d+) x cp \d+ x tp (\d+); "
    r"(\d+) samples a step = dp \d+ x (\d+) micro-batches of (\d+)",
    re.MULTILINE,
)
_STEP = re.compile(r"step (\d+)/\d+ \| loss ([\d.]+)")


def form(form, nodes: int = 2, ranks_per_node: int = 2) -> None:
    """The learner's {"nodes": .., "ranks_per_node": .., "parallel.tp": .., ...} for gpt_tiny on a cluster of that size."""
    missing = [name for name in SIZE + FIELDS if name not in due(form)]
    assert not missing, f"the form has no {', '.join(missing)}"
    values = due(*(form[name] for name in SIZE + FIELDS))
    assert all(isinstance(value, int) for value in values), "all six are whole numbers"
    asked, per_node, tp, pp, micro, global_batch = values
    assert per_node <= ranks_per_node, (
        f"{per_node} ranks per node: a node has {ranks_per_node} GPUs, one for each rank"
    )
    assert asked <= nodes, f"{asked} nodes: there are {nodes}, and the job would wait for ever"
    world = nodes * ranks_per_node
    assert asked * per_node == world, (
        f"{asked} nodes x {per_node} ranks leave GPUs idle: there are {world}"
    )
    assert global_batch == RECIPE.train.global_batch, (
        f"global batch {global_batch}: the learning rate of the recipe was chosen for {RECIPE.train.global_batch}"
    )
    assert tp <= ranks_per_node, f"tp={tp} leaves the node, which has {ranks_per_node} ranks"
    try:
        shape = recipes.with_changes(RECIPE, {name: form[name] for name in FIELDS}).check(world)
    except ValueError as error:
        raise AssertionError(str(error)) from None
    parts = tp * pp
    assert parts >= world, f"a rank holds 1/{parts} of the layers, and there is room for 1/{world}"
    count = global_batch // (micro * shape.dp)
    assert (pp - 1) / count <= 1 / 8, (
        f"{count} micro-batches: the bubble is {pp - 1}/{count} of the work, wanted is 1/8"
    )
    assert micro > 1, (
        "micro-batch 1 works, but a message of two samples costs hardly more than one of one sample: take 2"
    )


def script(blanks, run, reference) -> None:
    """The learner's form for 13.4, submitted: what its log says.

    Args:
        blanks: The form.
        run: `Submit`, or another function from a job to a `Submitted`.
        reference: Rows of metrics of the same training in another layout.
    """
    form(blanks)
    done = run(job(blanks))
    assert done.outcome.ok, f"the job ended as {done.outcome}: read {done.out}.log"
    first = _FIRST.search(done.log)
    assert first, (
        f'{done.out}.log has no line "... ranks on ...; grid ...": no rank came as far as its first step'
    )
    world, nodes, dp, pp, tp, samples, count, micro = first.groups()
    wanted = blanks["nodes"] * blanks["ranks_per_node"]
    assert int(world) == wanted, (
        f"the log says {world} ranks, the form {wanted}: these are several jobs, not one"
    )
    if done.on_slurm:
        assert nodes == "n1: 0, 1; n2: 2, 3", (
            f"the ranks sit on {nodes or 'one node'}: tp is not inside the nodes"
        )
    grid = (int(pp), int(tp))
    assert grid == (blanks["parallel.pp"], blanks["parallel.tp"]), (
        f"the log says pp {pp} x tp {tp}, and the form does not"
    )
    cut = (int(samples), int(micro))
    assert cut == (blanks["train.global_batch"], blanks["train.micro_batch"]), (
        f"the log says {samples} samples a step in micro-batches of {micro} (dp {dp} x {count}), and the form does not"
    )
    last_step, loss = max(
        ((int(step), float(loss)) for step, loss in _STEP.findall(done.log)), default=(0, math.nan)
    )
    assert last_step == SHORT["train.steps"], (
        f"the log ends at step {last_step} of {SHORT['train.steps']}"
    )
    right = [row["loss"] for row in reference if "loss" in row][-1]
    assert abs(loss - right) < 1e-3, (
        f"the last loss is {loss}, on another grid {right:.4f}: these trained something else"
    )


# ---- 13.5


def reading(answer, *, iterations, samples, step_s, world, tp, pp, micro, tokens) -> None:
    """The learner's (global batch, micro-batches, tokens/s of one GPU, share of the time idle) from a line of a log."""
    answer = due(answer)
    assert isinstance(answer, tuple) and len(answer) == 4, f"{answer}: give four numbers"
    batch, count, speed, idle = due(*answer)
    assert batch == samples // iterations, (
        f"global batch {batch}: {samples:,} samples were read in {iterations} iterations"
    )
    dp = world // (tp * pp)
    right = batch // (dp * micro)
    assert count != batch // micro, (
        f"{count} micro-batches: these are those of all replicas, and there are {dp} of them"
    )
    assert count == right, (
        f"{count} micro-batches of {micro} over dp = {dp} are not {batch} samples"
    )
    total = batch * tokens / step_s
    assert not math.isclose(speed, total, rel_tol=0.02), (
        f"{speed:.4g} tokens/s is the speed of all {world} GPUs"
    )
    assert math.isclose(speed, total / world, rel_tol=0.02), (
        f"{speed:.4g} tokens/s: samples * tokens / seconds / GPUs"
    )
    assert not math.isclose(idle, (pp - 1) / count, rel_tol=0.005), (
        f"{idle:.4f} is bubble / work; asked is a share of the time"
    )
    assert math.isclose(idle, (pp - 1) / (count + pp - 1), rel_tol=0.005), (
        f"{idle:.4f}: the share of the time is (pp-1)/(m+pp-1)"
    )
