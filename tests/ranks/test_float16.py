"""Training in float16: a gradient that overflows on one rank is left out on all of them."""

import math
import signal
from functools import partial

import pytest
from covering import first
from faults import fixtures, forks
from faults.cases import BASE
from faults.injection import all_of, at_step, die, left_out_steps_move_nothing

from labcode.measure import metrics

ARGS = (
    *BASE,
    "--train.steps=10",
    "--train.global_batch=4",
    "--train.log_every=1",
    "--train.dtype=float16",
    "--train.out=run",
)
LINE = (
    "step 4: a gradient overflows float16 with a loss scale of 65536; its update is left out, "
    "the scale is 32768 now"
)
SAVES = ("--checkpoint.every=3", "--checkpoint.keep=9")


def on_last_rank(steps, change):
    """A patch: in some steps `change(output)` is what the last rank's MLPs give."""
    import torch.distributed as dist

    from labcode.run import run

    original = run.build

    def build(*args):
        training = original(*args)

        def hook(module, args, output):
            is_last = dist.get_rank() == dist.get_world_size() - 1
            if output.requires_grad and training.steps_done + 1 in steps and is_last:
                return change(output)
            return output

        # tp cuts what this gives: no other rank has the same numbers
        for name, module in training.model.module.named_modules():
            if name.endswith("mlp.up"):
                module.register_forward_hook(hook)
        return training

    run.build = build


def overflow(steps, factor=math.inf):
    """A patch: in some steps the last rank's backward meets a gradient that is not finite."""

    def change(output):
        output.register_hook(lambda grad: grad * factor)
        return output

    on_last_rank(steps, change)


def nan_in_step_4():
    """A patch: an activation of step 4 is NaN, and so the loss is."""
    on_last_rank((4,), lambda output: output * math.nan)


IN_STEP_4 = partial(overflow, (4,))


def train(folder, *args, ranks=2, patch=IN_STEP_4):
    return forks.train([*ARGS, *args], cwd=folder, ranks=ranks, patch=patch, timeout_s=300)


def losses(folder):
    return {row["step"]: row["loss"] for row in metrics.read(folder / "run") if "loss" in row}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """One process, whose backward overflows in step 4."""
    folder = tmp_path_factory.mktemp("alone")
    done = train(folder, ranks=1)
    assert done.codes == [0], done.err
    return folder


LAYOUTS = (
    (),
    ("--parallel.tp=2",),
    ("--parallel.zero_stage=3",),  # PyTorch's FSDP2
    ("--train.micro_batch=1", "--parallel.data_parallel=labcode"),
    ("--parallel.cp=2", "--train.reduce_dtype=float16"),
    ("--parallel.pp=2", "--train.micro_batch=1"),
    ("--parallel.data_parallel=labcode", "--parallel.zero_stage=1"),
    ("--parallel.data_parallel=labcode", "--parallel.zero_stage=2"),
    ("--parallel.data_parallel=labcode", "--parallel.zero_stage=3"),
    ("--parallel.zero_stage=1",),  # PyTorch's ZeroRedundancyOptimizer
)


@pytest.mark.parametrize("layout", first(3, LAYOUTS), ids=" ".join)
def test_an_overflow_on_one_rank_leaves_the_step_out_on_all(tmp_path, alone, layout):
    done = train(tmp_path, *layout, patch=partial(all_of, IN_STEP_4, left_out_steps_move_nothing))
    assert done.codes == [0, 0], done.err
    assert [text.splitlines().count(LINE) for text in done.out] == [1, 0]
    rows = metrics.read(tmp_path / "run")
    (row,) = [row for row in rows if "overflows" in row]
    assert row == {"step": 4, "loss_scale": 2.0**15, "overflows": 1}
    assert not any("bad_steps" in row for row in rows)
    found = losses(tmp_path)
    assert list(found) == [1, 2, 3, 5, 6, 7, 8, 9, 10]
    assert found == pytest.approx(losses(alone), rel=0.01)


def test_it_learns_what_float32_learns(tmp_path):
    found = []
    for dtype in ("float16", "float32"):
        folder = tmp_path / dtype
        folder.mkdir()
        done = train(folder, f"--train.dtype={dtype}", ranks=1, patch=None)
        assert done.codes == [0], done.err
        found.append(losses(folder))
    assert found[0] == pytest.approx(found[1], rel=1e-3)
    assert found[0] != found[1]


def test_the_first_scale_is_found_where_it_was_far_too_large(tmp_path):
    def large():
        from labcode.train.loss_scale import LossScaler

        LossScaler.__init__.__defaults__ = (2.0**40, 2000)

    done = train(tmp_path, "--train.steps=25", patch=large)
    assert done.codes == [0, 0], done.err
    scales = [row["loss_scale"] for row in metrics.read(tmp_path / "run") if "overflows" in row]
    assert scales == [2.0 ** (39 - number) for number in range(len(scales))]
    assert 3 < len(scales) < 25  # overflows of the numbers themselves, nothing is injected here
    assert list(losses(tmp_path)) == list(range(len(scales) + 1, 26))


@pytest.mark.parametrize("update", first(1, [5, 8]))
def test_a_killed_run_resumes_with_its_scale_bit_for_bit(tmp_path, update):
    whole = tmp_path / "whole"
    killed = tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    poison = partial(overflow, (4, 7))
    done = train(whole, *SAVES, patch=poison)
    assert done.codes == [0, 0], done.err
    done = train(killed, *SAVES, patch=partial(all_of, poison, partial(at_step, update, die)))
    assert set(done.codes) == {-signal.SIGKILL}, done.err
    done = train(killed, *SAVES, "--checkpoint.resume", patch=poison)
    assert done.codes == [0, 0], done.err
    assert fixtures.differs(killed / "run", whole / "run") == ""
    rows = metrics.read(killed / "run")
    assert [row["loss_scale"] for row in rows if "overflows" in row] == [2.0**15, 2.0**14]


def test_a_loss_that_is_not_finite_is_a_bad_step_and_no_overflow(tmp_path):
    done = train(tmp_path, patch=nan_in_step_4)
    assert done.codes == [2, 2]
    (line,) = done.errors
    assert line.startswith("error: after step 3: the gradient norm is nan: lower optim.lr")
    done = train(tmp_path, "--train.on_bad_step=skip", "--train.out=skips", patch=nan_in_step_4)
    assert done.codes == [0, 0], done.err
    rows = metrics.read(tmp_path / "skips")
    assert [row["step"] for row in rows if "bad_steps" in row] == [4]
    assert not any("overflows" in row for row in rows)


def test_a_gradient_that_is_always_nan_ends_the_run_when_no_scale_is_left(tmp_path):
    done = train(tmp_path, "--train.steps=40", patch=partial(overflow, range(1, 99), math.nan))
    assert done.codes == [2, 2]
    (line,) = done.errors
    assert line.startswith("error: after step 16: the gradient norm is nan: lower optim.lr")
