"""What lesson 15 stands on: an emulated cluster, jobs on two nodes, and the reading of their logs.

The cluster computes what one process does, and takes the time that it should.
"""

import contextlib
import math
import re
from pathlib import Path

import pytest

from course.check import check
from course.exercises import l15
from course.labs import emulate, l12_paced_pipeline, l15_hybrid
from course.labs.l14_cluster import Lab
from course.pool.ranks import RankError
from labcode import recipes
from labcode.comm.counting import counted, totals
from labcode.measure import metrics
from labcode.perf import alpha_beta
from labcode.perf import step as expected
from labcode.perf import traffic as placement
from labcode.slurm.run.outcome import Outcome
from labcode.topology import GridShape

COMPLETED = Outcome("COMPLETED")

# ---- what the log of a job says


def form(tp, pp, micro, batch, nodes=2, ranks_per_node=2):
    fields = {
        "parallel.tp": tp,
        "parallel.pp": pp,
        "train.micro_batch": micro,
        "train.global_batch": batch,
    }
    return {"nodes": nodes, "ranks_per_node": ranks_per_node} | fields


FIRST = "4 ranks on 2 nodes (n1: 0, 1; n2: 2, 3), gloo on cpu; grid dp 2 x pp 2 x cp 1 x tp 1; "
FIRST += "16 samples a step = dp 2 x 8 micro-batches of 1"
LOG = f"{FIRST}\nstep 3/12 | loss 3.9000 | lr 1e-3\n"
LOG += "step 12/12 | loss 3.3115 | lr 1e-3\nstep 12/12 | validation loss 3.3\n"
HERE = LOG.replace("2 nodes (n1: 0, 1; n2: 2, 3)", "1 node")
REFERENCE = [{"step": 3, "loss": 3.9}, {"step": 12, "loss": 3.31152}, {"step": 12, "val_loss": 3.3}]
OTHER_PLACES = LOG.replace("n1: 0, 1; n2: 2, 3", "n1: 0, 2; n2: 1, 3")


def submitted(log, on_slurm=True, outcome=COMPLETED):
    return l15_hybrid.Submitted(outcome, log, Path("runs/hybrid-7"), on_slurm)


LOGS = {
    "right, on the cluster": (submitted(LOG), None),
    "right, on this machine": (submitted(HERE, on_slurm=False), None),
    "failed": (
        submitted(LOG, outcome=Outcome("FAILED", "rank 1: killed")),
        "FAILED: rank 1: killed",
    ),
    "nothing in the log": (submitted(""), "no line"),
    "two jobs of two": (submitted(LOG.replace("4 ranks", "2 ranks")), "several jobs, not one"),
    "one after the other over the nodes": (
        submitted(OTHER_PLACES),
        "n1: 0, 2; n2: 1, 3: they do not fill one node after the other",
    ),
    "all on one node": (submitted(HERE), "on one node: they do not fill"),
    "another grid": (submitted(LOG.replace("pp 2", "pp 1").replace("tp 1", "tp 2")), "pp 1 x tp 2"),
    "another batch": (submitted(LOG.replace("16 samples", "32 samples")), "32 samples a step"),
    "other micro-batches": (submitted(LOG.replace("of 1\n", "of 2\n")), "micro-batches of 2"),
    "cut short": (submitted(LOG.replace("step 12/12", "step 9/12")), "ends at step 9 of 12"),
    "no step": (submitted(FIRST), "ends at step 0 of 12"),
    "another loss": (submitted(LOG.replace("3.3115", "3.3215")), "trained something else"),
}


@pytest.mark.parametrize("name", LOGS)
def test_the_log_of_the_submitted_run(judged, name):
    done, hint = LOGS[name]
    assert judged(lambda: l15.script(form(1, 2, 1, 16), lambda job: done, REFERENCE), hint)


def test_the_blanks_of_the_script_are_all_that_the_form_asks_for():
    text = l15_hybrid.blank_script()
    assert text.count("____") == 6 and "dp=1" not in text
    for what in (
        "--nodes=____",
        "--ntasks-per-node=____",
        *(f"--{name} ____" for name in l15_hybrid.FIELDS),
    ):
        assert what in text
    assert l15_hybrid.job(form(2, 2, 2, 16)).check() == GridShape(tp=2, pp=2)


# ---- the emulated cluster

BATCH, MICRO = 8, 2
LAYOUTS_OF_FOUR = {
    "dp 4": GridShape(dp=4),
    "tp 2, pp 2": GridShape(tp=2, pp=2),
    "tp 2, pp 2, the other order": GridShape(tp=2, pp=2, order="pp-dp-cp-tp"),
    "tp 2, dp 2": GridShape(tp=2, dp=2),
}


@pytest.fixture(scope="module")
def alone(ranks1):
    return ranks1.run(emulate.timed_steps, l15.MODEL, GridShape(), BATCH, MICRO, repeats=1)[0].loss


@pytest.mark.parametrize("name", LAYOUTS_OF_FOUR)
def test_an_emulated_cluster_takes_its_time_and_changes_no_loss(ranks4, alone, name):
    shape = LAYOUTS_OF_FOUR[name]
    run = ranks4.run(emulate.timed_steps, l15.MODEL, shape, BATCH, MICRO, l15.CLUSTER, repeats=1)
    assert all(math.isclose(one.loss, alone, rel_tol=1e-5) for one in run)
    parts = expected.iteration_parts(l15.MODEL, shape, BATCH, MICRO, l15.CLUSTER)
    # not below what the model says: sleeps can only be late. The head counts for one stage and the
    # mean for the model
    assert emulate.step_s(run) > 0.95 * sum(parts.values())


@pytest.mark.parametrize("name", LAYOUTS_OF_FOUR)
def test_the_bytes_of_each_link_are_those_of_the_formula(ranks4, name):
    shape = LAYOUTS_OF_FOUR[name]
    run = ranks4.run(emulate.timed_steps, l15.MODEL, shape, BATCH, MICRO, repeats=1)
    m, act = BATCH // MICRO // shape.dp, MICRO * 32 * 64 * 4
    wanted = {}
    for group in shape.groups("tp"):
        wanted |= placement.ring(
            "all_reduce", group, m * (4 * l15.MODEL.num_layers + 2) / shape.pp * act
        )
    for a, b in (group for group in shape.groups("pp") if shape.pp == 2):
        wanted |= {(a, b): m * act, (b, a): m * act}
    for group in shape.groups("dp"):
        wanted |= placement.ring("all_reduce", group, 4 * run[0].num_parameters)
    assert emulate.traffic(run, at_least=2000) == wanted


def test_messages_are_those_that_are_counted_elsewhere(ranks2):
    def both(rank):
        with counted() as calls:
            [own] = [emulate.timed_steps(rank, l15.MODEL, GridShape(pp=2), BATCH, MICRO, repeats=0)]
        return own.sent, totals(calls)

    for sent, found in ranks2.run(both):
        noted = [message.num_bytes for message in sent if message.kind == "send"]
        assert (len(noted), sum(noted)) == found["send"]
        assert all(message.members in ((0, 1), (1, 0)) for message in sent)


def test_gradients_in_the_background_change_no_loss_and_no_bytes(ranks4, alone):
    shape = GridShape(dp=4)
    args = (l15.MODEL, shape, BATCH, MICRO, l15.CLUSTER)
    run = ranks4.run(emulate.timed_steps, *args, repeats=1, overlap=True)
    assert all(math.isclose(one.loss, alone, rel_tol=1e-5) for one in run)
    sent = placement.ring("all_reduce", [0, 1, 2, 3], 4 * run[0].num_parameters)
    # beside the gradients there are the loss and other messages of some bytes
    assert emulate.traffic(run) == pytest.approx(sent, rel=0.01)
    # not below what the model says: sleeps can only be late
    parts = expected.iteration_parts(*args, "overlapped")
    assert emulate.step_s(run) > 0.95 * sum(parts.values())


def test_a_group_has_the_rate_of_two_levels_and_a_message_that_of_one_link():
    cluster = l15.CLUSTER
    assert cluster.link([0, 1]) == cluster.link([2, 3]) == cluster.inside
    assert cluster.link([1, 2]) == cluster.message_link([0, 1, 2, 3]) == cluster.between
    assert cluster.message_link([0, 1]) == cluster.message_link([0]) == cluster.inside
    link = cluster.link([0, 1, 2, 3])
    assert link.beta_bytes_per_s == 3 * cluster.between.beta_bytes_per_s
    assert link.alpha_s == (cluster.inside.alpha_s + cluster.between.alpha_s) / 2
    parts = expected.iteration_parts(l15.MODEL, GridShape(dp=4), BATCH, MICRO, cluster)
    assert parts["dp"] == alpha_beta.time_s("all_reduce", 4, 4 * l15.MODEL.num_parameters, link)
    assert parts["tp"] == parts["pp"] == parts["bubble"] == 0


def test_what_is_left_of_the_messages_of_dp():
    args = (l15.MODEL, GridShape(dp=4), 16, 2, l15.CLUSTER)
    plain, overlapped, sharded = (
        expected.iteration_parts(*args, how) for how in ("plain", "overlapped", "sharded")
    )
    compute_s = plain["compute"] / 2  # of one of the two micro-batches
    assert overlapped["dp"] == pytest.approx(plain["dp"] - 2 / 3 * compute_s)
    assert sharded["dp"] == pytest.approx(2 * (1.5 * plain["dp"] - compute_s))
    for parts in (overlapped, sharded):
        assert parts | {"dp": 0} == plain | {"dp": 0}
    large = expected.iteration_parts(l15.MODEL, GridShape(dp=4), 64, 16, l15.CLUSTER, "sharded")
    assert large["dp"] == 0
    with pytest.raises(ValueError, match='pp=2 and "sharded"'):
        expected.iteration_parts(l15.MODEL, GridShape(dp=2, pp=2), 8, 2, l15.CLUSTER, "sharded")


def test_the_time_line_and_the_formula_say_the_same(ranks4):
    args = (l15.MODEL, GridShape(tp=2, pp=2), BATCH, MICRO, l15.CLUSTER)
    parts, line = expected.iteration_parts(*args), expected.time_line(*args)
    assert math.isclose(line.total_s, sum(parts.values()))
    assert math.isclose(line.busy_s(), parts["compute"] + parts["tp"])
    measured = l12_paced_pipeline.timeline(ranks4.run(emulate.timed_steps, *args, repeats=1))
    assert [row.action for row in measured.rows if row.rank in (0, 2)] == [
        row.action for row in line.rows
    ]
    assert measured.rows[-1].stop_s > 0


def test_a_batch_that_cannot_be_cut_is_refused(ranks2):
    with pytest.raises(RankError, match=r"global_batch=9 is no multiple of micro_batch\*dp = 2\*1"):
        ranks2.run(emulate.timed_steps, l15.MODEL, GridShape(pp=2), 9, 2)


def test_the_published_speeds_follow_from_the_bubble():
    """What section 1 quotes: Narayanan et al. 2021, table 2."""
    for pp, batch, found in (
        (12, 1536, {384: 153, 768: 149, 1536: 141}),
        (35, 2240, {560: 171, 1120: 167, 2240: 159}),
    ):
        shares = {world: (m := batch // (world // (8 * pp))) / (m + pp - 1) for world in found}
        first = next(iter(found))
        for world, speed in found.items():
            assert math.isclose(found[first] * shares[world] / shares[first], speed, rel_tol=0.02)


def test_the_recipe_is_the_one_that_the_exercise_describes():
    recipe = recipes.get("gpt_tiny")
    assert (recipe.model.num_layers, recipe.model.num_heads, recipe.train.global_batch) == (
        2,
        4,
        16,
    )


# ---- the jobs, on this machine without SLURM: on a cluster the lesson itself runs them

ON_FOUR = form(2, 2, 2, 16)
RIGHT = form(1, 2, 1, 16)
WIDE = ON_FOUR | {
    "train.global_batch": 32,
    "train.steps": 1,
    "model.vocab_size": 65536,
    "model.hidden_size": 32,
}


@pytest.fixture(scope="module")
def without_slurm(tmp_path_factory):
    """`Submit` where there is no cluster."""
    with contextlib.chdir(tmp_path_factory.mktemp("jobs")):
        yield l15_hybrid.Submit(Lab(None, "none"))


@pytest.mark.release
def test_the_right_form_passes_and_is_run_only_once(without_slurm, ranks4, capsys):
    reference = ranks4.run(l15_hybrid.plain, {"train.global_batch": 16})[0]
    check("15.4", RIGHT, without_slurm, reference)
    done = without_slurm(l15_hybrid.job(RIGHT))
    out = capsys.readouterr().out
    assert "[v] 15.4" in out and out.count("this machine, no SLURM") == 1
    assert metrics.read(done.out)[-1]["step"] == 12 and not done.limited


@pytest.mark.release
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="limits of another process need Linux"
)
def test_with_the_limit_micro_batch_32_runs_out_of_memory_on_the_last_stage_and_2_does_not(
    without_slurm,
):
    limit = l15_hybrid.LIMIT_BYTES
    large = without_slurm(l15_hybrid.job(WIDE | {"train.micro_batch": 32}, name="micro32"), limit)
    assert large.limited and not large.outcome.ok
    died = [line for line in l15_hybrid.last_words(large.log) if "can't allocate memory" in line]
    assert died and {line.split(":")[0] for line in died} <= {"rank 2", "rank 3"}
    assert set(re.findall(r"you tried to allocate (\d+)", large.log)) == {str(32 * 128 * 32768 * 4)}
    small = without_slurm(l15_hybrid.job(WIDE | {"train.micro_batch": 2}, name="micro2"), limit)
    assert small.limited and small.outcome.ok and l15_hybrid.last_words(small.log) == []
