"""The life of a run under faults: nothing is lost, one line says why, all ranks end alike."""

import os
import shutil
import signal
import time
from functools import partial

import pytest
from covering import first
from faults.forks import start, train

SMALL = [
    "gpt_tiny",
    "--model.num_layers=1",
    "--model.hidden_size=16",
    "--model.num_heads=2",
    "--model.context_length=16",
    "--train.steps=3",
    "--train.global_batch=4",
    "--train.eval_batches=1",
    "--train.sample_tokens=4",
    "--train.log_every=1",
]
RUN = [*SMALL, "--train.out=run"]


def contents(folder):
    found = {}
    for path in sorted(folder.rglob("*")):
        found[str(path.relative_to(folder))] = path.read_bytes() if path.is_file() else None
    return found


def names(folder):
    return {path.name for path in folder.iterdir()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Where a finished run with checkpoints lies."""
    folder = tmp_path_factory.mktemp("finished")
    assert train([*RUN, "--checkpoint.every=2"], cwd=folder).codes == [0]
    return folder


@pytest.fixture
def written(finished, tmp_path):
    """A copy of it."""
    shutil.copytree(finished / "run", tmp_path / "run")
    return tmp_path


def before(owner, name, act):
    """Patch a method: `act(its number of calls so far)` first."""
    work = getattr(owner, name)
    calls = 0

    def patched(*args, **options):
        nonlocal calls
        calls += 1
        act(calls)
        return work(*args, **options)

    setattr(owner, name, patched)


def rank():
    return int(os.environ.get("RANK", "0"))


def signalled_in(where, *numbers, ranks=(0, 1), call=1):
    """A patch: this process gets signals at a certain point of its life."""
    from labcode.run import run
    from labcode.train import build
    from labcode.train.checkpoint import store as checkpoint
    from labcode.train.observers import result
    from labcode.train.step import TrainStep

    owner = {
        "_model": build,
        "__call__": TrainStep,
        "finish": result.Result,
        "write_result": result,
        "make_task": run,
        "_write_files": checkpoint,
    }[where]

    def act(calls):
        if calls == call and rank() in ranks:
            for number in numbers:
                os.kill(os.getpid(), number)
                time.sleep(0.05)

    before(owner, where, act)


def failing_in(where, error, ranks=(0,), call=1):
    """A patch: something raises on some ranks."""
    import torch

    from labcode.data.text import TextDataset
    from labcode.parallel.model import ParallelModel
    from labcode.run import run

    owner = {
        "to_empty": torch.nn.Module,
        "__getitem__": TextDataset,
        "step": torch.optim.AdamW,
        "forward_backward": ParallelModel,
        "open_log": run,
    }[where]

    def act(calls):
        if calls == call and rank() in ranks:
            raise error

    before(owner, where, act)


NO_MEMORY = RuntimeError("[enforce fail at alloc_cpu.cpp:127] . can't allocate memory: 9 bytes")


# ---- what does not begin leaves all as it was


@pytest.mark.parametrize(
    "args",
    [
        ["--train.global_batch=1000000"],
        ["--optim.beta1=1.5"],
        ["--data.val_fraction=0.99999"],
        ["--parallel.bucket_mb=nan"],
    ],
)
@pytest.mark.parametrize("out", [[], ["--train.out=run", "--train.overwrite"]])
def test_a_refused_command_leaves_nothing_behind_and_an_old_run_alone(written, args, out):
    old = contents(written)
    done = train([*SMALL, *out, *args], cwd=written)
    assert done.codes == [2]
    assert len(done.errors) == 1
    assert done.tracebacks == 0
    assert contents(written) == old


@pytest.mark.parametrize(
    ("patch", "codes", "text"),
    [
        (partial(signalled_in, "_model", signal.SIGINT), [130, 130], "before the first step"),
        (
            partial(signalled_in, "__call__", signal.SIGINT),
            [130, 130],
            "before the first step",
        ),
        (partial(failing_in, "to_empty", NO_MEMORY, ranks=[1]), [2, 2], "error: rank 1: "),
        (partial(failing_in, "to_empty", MemoryError(), ranks=[0]), [2, 2], "not enough memory"),
        (partial(failing_in, "to_empty", MemoryError(), ranks=[1]), [2, 2], "rank 1: MemoryErr"),
        (partial(failing_in, "forward_backward", NO_MEMORY, ranks=[1]), [2, 2], "error: rank 1: "),
        (partial(failing_in, "open_log", OSError(28, "No space"), ranks=[0]), [2, 2], "no space"),
    ],
)
def test_an_old_run_is_back_if_the_new_one_ends_before_its_first_step(written, patch, codes, text):
    old = contents(written)
    done = train([*RUN, "--train.overwrite"], cwd=written, ranks=2, patch=patch)
    assert done.codes == codes
    assert text in done.err[0] + done.err[1]
    assert len(done.errors) == (codes == [2, 2])
    assert done.tracebacks == 0
    assert contents(written) == old


@pytest.mark.parametrize("failing", [{"ranks": [1]}, {"call": 2}])
def test_an_old_run_is_beside_the_new_one_that_has_begun(written, failing):
    """In the first case rank 0 has done its first step when rank 1 fails in its own."""
    patch = partial(failing_in, "step", NO_MEMORY, **failing)
    old = contents(written / "run")
    done = train([*RUN, "--train.overwrite"], cwd=written, ranks=2, patch=patch)
    assert done.codes == [2, 2] and len(done.errors) == 1
    assert names(written) == {"run", "run.old-1"}
    assert contents(written / "run.old-1") == old


@pytest.mark.parametrize("args", [["--train.overwrite"], ["--checkpoint.resume"]])
@pytest.mark.parametrize("step", [1, 2])
def test_after_a_kill_an_old_run_is_beside_the_new_one(written, args, step):
    old = contents(written / "run")
    kill = partial(signalled_in, "__call__", signal.SIGKILL, ranks=[0], call=step)
    done = train([*RUN, "--train.overwrite"], cwd=written, patch=kill)
    assert done.codes == [-signal.SIGKILL]
    assert train([*RUN, *args], cwd=written).codes == [0]
    assert contents(written / "run.old-1") == old
    assert ("run.old-2" in names(written)) == (args == ["--train.overwrite"])


@pytest.mark.parametrize("change", [["--model.hidden_size=32"], ["--train.steps=1"]])
def test_a_refused_resume_leaves_the_folder_as_it_was(written, change):
    old = contents(written)
    done = train([*RUN, "--checkpoint.resume", *change], cwd=written)
    assert done.codes == [2]
    assert len(done.errors) == 1
    assert contents(written) == old


def test_a_run_that_is_done_says_that_only_its_result_is_written(written):
    done = train([*RUN, "--checkpoint.resume"], cwd=written)
    assert done.codes == [0]
    assert "3 steps are done, train.steps is 3: only the result is written" in done.out[0]


def test_a_folder_without_its_config_counts_as_new(tmp_path):
    (tmp_path / "run").mkdir()
    done = train([*RUN, "--checkpoint.resume"], cwd=tmp_path)
    assert done.codes == [0]


def test_a_second_job_in_the_folder_is_told_who_holds_it(tmp_path):
    args = [*RUN, "--checkpoint.resume", "--train.steps=100000"]
    env = {"SLURM_JOB_ID": "4711"}
    with start(args, cwd=tmp_path, env=env) as first:
        first.until(lambda: "step 1/" in first.text())
        second = train(args, cwd=tmp_path, patch=impatient)
        assert second.codes == [2]
        assert f"run is in use by process {first.pids[0]} on " in second.errors[0]
        assert ", job 4711, since " in second.errors[0]
        first.signal(0, signal.SIGTERM)
        # an attempt that comes while the one before it ends
        with start(args, cwd=tmp_path) as third:
            assert first.wait().codes == [0]
            third.until(lambda: "resuming from run/checkpoints/" in third.text())
            third.signal(0, signal.SIGTERM)
            assert third.wait().codes == [0]


def impatient():
    from labcode.run import run_lock

    run_lock.WAIT_S = 0.2


def elsewhere():
    """Rank 1 is on a node that has folders of its own."""
    from labcode.run import run

    run.SHARED_WAIT_S = 0.2
    if rank() == 1:
        os.makedirs("node1")
        os.chdir("node1")


@pytest.mark.parametrize("args", [["--checkpoint.resume"], ["--checkpoint.every=1"]])
def test_a_folder_that_one_rank_does_not_see_is_told_by_that_rank(written, args):
    (written / "run").rename(written / "other")
    if args == ["--checkpoint.resume"]:
        (written / "other").rename(written / "run")
    old = contents(written)
    done = train([*RUN, *args], cwd=written, ranks=2, patch=elsewhere)
    assert done.codes == [2, 2]
    (line,) = done.errors
    assert "rank 1: " in line and "run as this rank sees it on " in line
    assert "choose a train.out that all nodes share" in line
    (written / "node1").rmdir()
    assert contents(written) == old


# ---- what one rank alone knows


@pytest.mark.parametrize(
    ("where", "error", "text"),
    [
        ("__getitem__", OSError(5, "Input/output error", "tokens.bin"), "tokens.bin: input/output"),
        ("__getitem__", ValueError("t2m has NaN at\ntime 7"), "t2m has NaN at time 7"),
        ("forward_backward", NO_MEMORY, "not enough memory: [enforce fail"),
        ("forward_backward", MemoryError(), "not enough memory"),
    ],
)
@pytest.mark.parametrize("failing", first(1, [1, 0]))
def test_what_one_rank_alone_knows_is_one_line_and_no_traceback(
    tmp_path, where, error, text, failing
):
    patch = partial(failing_in, where, error, ranks=[failing], call=3)
    done = train(RUN, cwd=tmp_path, ranks=2, patch=patch)
    assert done.codes == [2, 2]
    assert done.errors == [line for line in done.err[failing].splitlines() if line]
    assert done.errors[0].startswith(f"error: rank {failing}: after step 2: {text}")
    (line,) = done.err[1 - failing].splitlines()
    assert line.startswith(f"rank {1 - failing}: after step 2: the connection to another rank")


def test_a_bug_keeps_its_traceback_where_it_happens(tmp_path):
    patch = partial(failing_in, "forward_backward", TypeError("a bug"), ranks=[1], call=3)
    done = train(RUN, cwd=tmp_path, ranks=2, patch=patch)
    assert done.err[1].count("Traceback") == 1 and "TypeError: a bug" in done.err[1]
    (line,) = done.err[0].splitlines()
    assert "the connection to another rank was lost" in line
    assert done.codes == [2, 1]


def update_to_infinity():
    """The gradient of the last step is finite, what it makes of a weight is not."""
    import torch

    step = torch.optim.AdamW.step
    calls = 0

    def patched(self, *args, **options):
        nonlocal calls
        calls += 1
        done = step(self, *args, **options)
        if calls == 3 and rank() == 1:
            with torch.no_grad():
                self.param_groups[0]["params"][-1].view(-1)[0] = float("inf")
        return done

    torch.optim.AdamW.step = patched


@pytest.mark.parametrize("grid", [[], ["--parallel.tp=2"]])
@pytest.mark.parametrize("checkpoints", [[], ["--checkpoint.every=2"]])
def test_the_update_of_the_last_step_is_checked_like_every_other(tmp_path, grid, checkpoints):
    args = [*RUN, *grid, *checkpoints]
    done = train(args, cwd=tmp_path, ranks=2, patch=update_to_infinity)
    assert done.codes == [2, 2]
    (line,) = done.errors
    assert line.startswith("error: after step 3: ")
    assert " not finite on rank 1" in line
    assert done.tracebacks == 0
    assert not (tmp_path / "run" / "weights.pt").exists()
    assert not (tmp_path / "run" / "checkpoints" / "step-00000003").exists()


# ---- signals

ON = ["--checkpoint.every=2"]


@pytest.mark.parametrize(
    ("where", "numbers", "ranks", "steps"),
    [
        ("_write_files", [signal.SIGINT], [0, 1], 2),
        # to one rank: rank 0 keeps the store here, in which the word of another one is left; under
        # torchrun, whose agent keeps it, that works both ways
        ("_write_files", [signal.SIGINT], [1], 2),
        ("finish", [signal.SIGINT], [0, 1], 3),
        ("__call__", [signal.SIGINT, signal.SIGINT], [0, 1], 1),
    ],
)
def test_ctrl_c_is_130_on_all_ranks_and_no_traceback(tmp_path, where, numbers, ranks, steps):
    call = 2 if where == "__call__" else 1
    patch = partial(signalled_in, where, *numbers, ranks=ranks, call=call)
    done = train([*RUN, *ON], cwd=tmp_path, ranks=2, patch=patch)
    assert done.codes == [130, 130], done.err
    line = f"interrupted after step {steps}: its metrics are in run"
    assert "".join(done.err).splitlines() == [line]


def failing_after_ctrl_c(error, because):
    """A patch: the second step ends with an error, after a Ctrl-C or because of it."""
    from labcode.train.step import TrainStep

    def act(calls):
        if calls < 2:
            return
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)  # broken off at once
        except KeyboardInterrupt as cause:
            if because:
                raise error from cause
        raise error

    before(TrainStep, "__call__", act)


@pytest.mark.parametrize("because", [False, True])
def test_an_error_after_ctrl_c_is_shown_unless_ctrl_c_is_its_cause(tmp_path, because):
    error = TypeError("a bug")
    done = train(RUN, cwd=tmp_path, patch=partial(failing_after_ctrl_c, error, because))
    assert done.codes == [130], done.err
    lines = done.err[0].splitlines()
    assert lines[-1] == "interrupted after step 1: its metrics are in run"
    assert ("TypeError: a bug" in lines) == (not because)


@pytest.mark.parametrize(
    ("number", "where", "checkpoints"),
    [
        (signal.SIGTERM, "finish", ON),
        (signal.SIGTERM, "write_result", []),
        (signal.SIGUSR1, "finish", []),
        (signal.SIGUSR1, "write_result", ON),
    ],
)
def test_a_signal_while_the_result_is_written_does_not_stop_it(
    tmp_path, number, where, checkpoints
):
    ranks = [0] if where == "write_result" else [0, 1]
    patch = partial(signalled_in, where, number, ranks=ranks)
    done = train([*RUN, *checkpoints], cwd=tmp_path, ranks=2, patch=patch)
    assert done.codes == [0, 0], done.err
    assert "".join(done.err) == ""
    assert (tmp_path / "run" / "result.txt").exists()


@pytest.mark.parametrize("where", ["make_task", "_model"])
def test_a_signal_in_set_up_ends_the_run_before_its_first_step(tmp_path, where):
    patch = partial(signalled_in, where, signal.SIGUSR1, ranks=[1])
    done = train([*RUN, *ON], cwd=tmp_path, ranks=2, patch=patch)
    assert done.codes == [0, 0], done.err
    assert "stopped by SIGUSR1 before step 1: resume with the same command" in done.err[0]
    done = train([*RUN, "--checkpoint.resume"], cwd=tmp_path, ranks=2)
    assert done.codes == [0, 0]
    assert (tmp_path / "run" / "result.txt").exists()


def test_a_signal_in_the_first_step_ends_the_run_behind_it(tmp_path):
    patch = partial(signalled_in, "__call__", signal.SIGUSR1, ranks=[1])
    done = train([*RUN, *ON], cwd=tmp_path, ranks=2, patch=patch)
    assert done.codes == [0, 0], done.err
    assert "stopped by SIGUSR1 after step 1, with a checkpoint: resume from it" in done.err[0]
    assert (tmp_path / "run" / "checkpoints" / "step-00000001").is_dir()
    done = train([*RUN, "--checkpoint.resume"], cwd=tmp_path, ranks=2)
    assert done.codes == [0, 0]
    assert "resuming from run/checkpoints/step-00000001" in done.out[0]


def test_a_signal_in_the_last_step_stops_nothing(tmp_path):
    patch = partial(signalled_in, "__call__", signal.SIGTERM, call=3)
    done = train([*RUN, *ON], cwd=tmp_path, ranks=2, patch=patch)
    assert done.codes == [0, 0]
    assert "stopped" not in "".join(done.err)
    assert (tmp_path / "run" / "result.txt").exists()
    # for which a job script looks before it puts the job back into the queue
    assert not (tmp_path / "run" / "stopped").exists()


def repeated():
    """A job script repeats its signal until the ranks have ended."""
    from labcode.runtime import bootstrap

    def act(_):
        os.kill(os.getpid(), signal.SIGUSR1)

    before(bootstrap, "stop", act)
    import atexit

    atexit.register(act, 0)
    signalled_in("__call__", signal.SIGUSR1)


def test_a_signal_that_is_repeated_does_not_kill_a_rank_that_ends(tmp_path):
    done = train([*RUN, *ON], cwd=tmp_path, ranks=2, patch=repeated)
    assert done.codes == [0, 0]


def no_reader():
    """Stdout is a pipe whose reader has ended, as `head -1` does."""
    if rank() == 0:
        reading, writing = os.pipe()
        os.dup2(writing, 1)
        os.close(reading)
        os.close(writing)


def test_output_that_nobody_reads_is_no_traceback(tmp_path):
    done = train(RUN, cwd=tmp_path, ranks=2, patch=no_reader)
    assert done.codes == [2, 2]
    assert done.tracebacks == 0
    assert "the program that reads this one's output has ended" in "".join(done.err)
