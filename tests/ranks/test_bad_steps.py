"""A batch with NaN or with huge values in it, met on one rank: what the run does by its rule."""

import multiprocessing
import signal
from functools import partial

import pytest
from covering import first
from faults import fixtures, forks
from faults.cases import WEATHER
from faults.injection import all_of, at_step, die, left_out_steps_move_nothing

from labcode.measure import metrics

ARGS = (
    *WEATHER,
    "--train.steps=12",
    "--train.global_batch=4",
    "--train.log_every=1",
    "--train.dtype=float64",
    "--train.out=run",
)
SKIP = "--train.on_bad_step=skip"
ROLLBACK = ("--train.on_bad_step=rollback", "--checkpoint.every=3", "--checkpoint.keep=9")


def poison(steps, factor):
    """A patch: the last sample of the batch of some steps is multiplied, on whoever reads it."""
    from labcode.data.loader import Loader

    original = Loader.take

    def poisoned(self, step):
        batches = original(self, step)
        order = self.batches
        if step + 1 in steps and order.dp_coord == order.dp_size - 1:
            batches[-1][0][-1].mul_(factor)
        return batches

    Loader.take = poisoned


NAN_IN_STEP_5 = partial(poison, (5,), float("nan"))


def may_have_children():
    """A patch: the ranks of these tests are daemons of multiprocessing, which may have none."""
    multiprocessing.current_process()._config["daemon"] = False


def train(folder, *args, ranks=2, patch=NAN_IN_STEP_5):
    return forks.train([*ARGS, *args], cwd=folder, ranks=ranks, patch=patch)


def losses(folder):
    return {row["step"]: row["loss"] for row in metrics.read(folder / "run") if "loss" in row}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """One process that leaves out step 5."""
    folder = tmp_path_factory.mktemp("alone")
    done = train(folder, SKIP, ranks=1)
    assert done.codes == [0], done.err
    return folder


def test_by_default_a_bad_step_ends_the_run_in_one_line(tmp_path):
    done = train(tmp_path)
    assert done.codes == [2, 2]
    (line,) = done.errors
    assert line.startswith("error: after step 4: the gradient norm is nan: lower optim.lr")


LAYOUTS = (
    (),
    ("--parallel.tp=2",),
    ("--parallel.zero_stage=3",),  # PyTorch's FSDP2
    ("--parallel.zero_stage=1",),  # PyTorch's ZeroRedundancyOptimizer
    ("--parallel.data_parallel=labcode", "--parallel.zero_stage=1"),
    ("--parallel.data_parallel=labcode", "--parallel.zero_stage=2"),
    ("--parallel.data_parallel=labcode", "--parallel.zero_stage=3"),
)


@pytest.mark.parametrize(
    "layout",
    first(3, LAYOUTS),
    ids=" ".join,
)
def test_a_skipped_step_is_left_out_on_all_ranks(tmp_path, alone, layout):
    done = train(tmp_path, SKIP, *layout)
    assert done.codes == [0, 0], done.err
    line = "step 5 is bad, the gradient norm is nan: its update is left out"
    assert [text.splitlines().count(line) for text in done.out] == [1, 0]
    rows = metrics.read(tmp_path / "run")
    assert [row for row in rows if "bad_steps" in row] == [{"step": 5, "bad_steps": 1}]
    found = losses(tmp_path)
    assert list(found) == [1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 12]  # its batch is not read again
    assert found == pytest.approx(losses(alone), abs=1e-9)


def test_a_skipped_step_changes_neither_the_weights_nor_the_optimizer(tmp_path):
    done = train(tmp_path, SKIP, patch=partial(all_of, NAN_IN_STEP_5, left_out_steps_move_nothing))
    assert done.codes == [0, 0], done.err


def test_too_many_bad_steps_end_the_run(tmp_path):
    patch = partial(poison, range(5, 99), float("nan"))
    done = train(tmp_path, SKIP, "--train.bad_in_a_row=2", patch=patch)
    assert done.codes == [2, 2]
    (line,) = done.errors
    assert line.startswith(
        "error: after step 6: the gradient norm is nan, and train.bad_in_a_row=2"
    )


SPIKE = partial(poison, (20,), 1e4)
LONG = ("--train.steps=26", "--train.spike_factor=5")


@pytest.mark.release
def test_a_rolled_back_run_goes_on_past_the_spike_and_resumes_bit_for_bit(tmp_path):
    whole = tmp_path / "whole"
    whole.mkdir()
    done = train(whole, *ROLLBACK, *LONG, patch=SPIKE)
    assert done.codes == [0, 0], done.err
    (line,) = [line for line in done.out[0].splitlines() if "is bad" in line]
    assert line.startswith("step 20 is bad, the gradient norm is ")
    assert line.endswith(": back to step-00000018, the batches of steps 19 to 20 are left out")
    # killed before the spike, and after it but before the next checkpoint
    for update in (19, 20):
        folder = tmp_path / f"killed-{update}"
        folder.mkdir()
        patch = partial(all_of, SPIKE, partial(at_step, update, die))
        done = train(folder, *ROLLBACK, *LONG, patch=patch)
        assert set(done.codes) == {-signal.SIGKILL}, done.err
        done = train(folder, *ROLLBACK, *LONG, "--checkpoint.resume", patch=SPIKE)
        assert done.codes == [0, 0], done.err
        assert "resuming from run/checkpoints/step-00000018" in done.out[0]
        assert fixtures.differs(folder / "run", whole / "run") == ""
    # workers have read ahead of the step that the run goes back from
    folder = tmp_path / "workers"
    folder.mkdir()
    patch = partial(all_of, SPIKE, may_have_children)
    done = train(folder, *ROLLBACK, *LONG, "--loader.workers=2", patch=patch)
    assert done.codes == [0, 0], done.err
    assert line in done.out[0]
    assert done.left == []
    assert fixtures.differs(folder / "run", whole / "run") == ""


def test_before_the_first_checkpoint_a_rollback_is_a_skip(tmp_path, alone):
    done = train(tmp_path, *ROLLBACK[:1], "--checkpoint.every=100", ranks=1)
    assert done.codes == [0], done.err
    assert "step 5 is bad, the gradient norm is nan: its update is left out" in done.out[0]
    assert losses(tmp_path) == losses(alone)
