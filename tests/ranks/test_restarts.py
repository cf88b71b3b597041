"""torchrun starts the ranks again after one has died: the run goes on from its last checkpoint."""

import os
import shutil
import signal
import subprocess
import sys
from functools import partial

import pytest
import torch.distributed as dist
from faults import fixtures, forks
from faults.cases import BASE
from faults.injection import at_step, die
from faults.waiting import free_port

from labcode.runtime import launch

ARGS = (
    *BASE,
    "--train.steps=8",
    "--train.log_every=1",
    "--checkpoint.keep=9",
    "--model.dropout=0.1",
)
# `dying.py MOMENTS ARGS` trains; a rank kills itself after the step that is named for its attempt
DYING = """
import os, signal, sys, threading, time

def prepare():
    while "labcode.train.loop" not in sys.modules:
        time.sleep(0.005)
    from labcode.train.step import TrainStep
    # RANK:STEP of each attempt; the last one of "1:7,0:6," is left alone
    moments = [*sys.argv[1].split(","), ""]
    rank, _, last = moments[int(os.environ["TORCHELASTIC_RESTART_COUNT"])].partition(":")
    original = TrainStep.__call__

    def step(self):
        if os.environ["RANK"] == rank and self.training.steps_done == int(last):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self)

    TrainStep.__call__ = step

threading.Thread(target=prepare, daemon=True).start()
from labcode.train.__main__ import main
sys.exit(main(sys.argv[2:]))
"""


def undisturbed(folder, ranks):
    args = [*ARGS, f"--data.cache_dir={fixtures.cache()}", "--train.out=run"]
    done = forks.train([*args, "--checkpoint.every=3"], cwd=folder, ranks=ranks)
    assert set(done.codes) == {0}, done.err
    return folder / "run"


@pytest.fixture(scope="module")
def whole1(tmp_path_factory):
    """The run of one rank that nobody disturbed."""
    return undisturbed(tmp_path_factory.mktemp("whole1"), 1)


@pytest.fixture(scope="module")
def whole2(tmp_path_factory):
    """The same on two ranks that torchrun starts, as it starts those that are killed: a fork of a
    process that has computed before may take other kernels, whose last bit differs.
    """
    folder = tmp_path_factory.mktemp("whole2")
    args = [*ARGS, f"--data.cache_dir={fixtures.cache()}", f"--train.out={folder / 'run'}"]
    one_thread = {"OMP_NUM_THREADS": "1"}
    launch.run("labcode.train", *args, "--checkpoint.every=3", env_extra=one_thread, echo=False)
    return folder / "run"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def dying(tmp_path, monkeypatch):
    """The module `dying` for `launch.run`, in an empty working folder."""
    (tmp_path / "dying.py").write_text(DYING)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    return "dying"


@pytest.mark.release
def test_a_run_whose_ranks_are_killed_twice_ends_as_the_one_that_nobody_disturbed(
    dying, tmp_path, whole2
):
    done = launch.run(
        dying,
        "1:7,0:6",  # the second attempt resumes from step 6, and is killed in its first step
        *ARGS,
        f"--data.cache_dir={fixtures.cache()}",
        "--checkpoint.every=3",
        restarts=2,
        echo=False,
    )
    assert fixtures.differs(tmp_path / "runs/gpt_tiny-001", whole2) == ""
    # one folder, although the command names none
    assert names(tmp_path / "runs") == ["gpt_tiny-001"]
    resuming = "resuming from runs/gpt_tiny-001/checkpoints/step-00000006"
    assert done.output.count(resuming) == 2


@pytest.mark.release
def test_ranks_that_die_in_every_attempt_are_one_line_after_the_last(dying):
    with pytest.raises(launch.LaunchError) as caught:
        launch.run(dying, "1:0,1:0", *ARGS, "--train.out=run", restarts=1, echo=False)
    line = str(caught.value)
    assert line.startswith("rank 1 failed after") and "\n" not in line
    assert line.endswith("s and 1 restart: killed by signal 9")


# `two_nodes.py ARGS` trains; rank 1 kills itself before step 5, while rank 0 computes for long
TWO_NODES = """
import os, pathlib, signal, sys, threading, time

def prepare():
    while "labcode.train.loop" not in sys.modules:
        time.sleep(0.005)
    from labcode.train.step import TrainStep
    original = TrainStep.__call__
    is_first = not pathlib.Path("killed").exists()

    def step(self):
        if is_first and self.training.steps_done == 4:
            if os.environ["RANK"] == "1":
                pathlib.Path("killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(10)
        return original(self)

    TrainStep.__call__ = step

threading.Thread(target=prepare, daemon=True).start()
from labcode.train.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.release
def test_two_torchruns_restart_though_only_one_of_them_counts_it(tmp_path, whole2):
    """The node whose rank was killed counts a restart. The other one is busy and does not notice
    that its peer is gone; its torchrun starts it again because the first one does, and does not
    count that.
    """
    (tmp_path / "two_nodes.py").write_text(TWO_NODES)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    port = free_port()
    torchrun += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=job"]
    run = ["two_nodes.py", *ARGS, f"--data.cache_dir={fixtures.cache()}", "--train.out=run"]
    command = [*torchrun, "--max-restarts=2", *run, "--checkpoint.every=3"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "LABCODE_MEET_TIMEOUT_S": "100"}
    nodes = []
    for name in ("a.log", "b.log"):
        with open(tmp_path / name, "wb") as log:
            node = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=log, stderr=log)
        nodes.append(node)
    try:
        codes = [node.wait(timeout=400) for node in nodes]
    finally:
        for node in nodes:
            node.terminate()
    logs = [(tmp_path / name).read_text() for name in ("a.log", "b.log")]
    assert codes == [0, 0], logs
    assert sum(log.count("failed (exitcode: -9)") for log in logs) == 1
    assert sum(log.count("resuming from run/checkpoints/step-00000003") for log in logs) == 1
    assert fixtures.differs(tmp_path / "run", whole2) == ""


# ---- without torchrun: attempts that share a store, as it gives them one


@pytest.fixture
def attempt(tmp_path):
    """`attempt(number, *args)`: that attempt of a job of one rank, in tmp_path."""
    port = free_port()
    store = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
    one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    job = {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

    def train(number, *args, patch=None):
        env = one | job | place | {"TORCHELASTIC_RESTART_COUNT": str(number)}
        words = [*ARGS, f"--data.cache_dir={fixtures.cache()}", *args]
        return forks.train(words, cwd=tmp_path, env=env, patch=patch)

    yield train
    del store


def steps(folder):
    return sorted(fixtures.losses_of(folder))


IN_STEP_5 = partial(at_step, 5, die)


def test_a_restarted_run_without_checkpoints_begins_again_in_its_own_folder(attempt, tmp_path):
    assert attempt(0, "--train.out=run", patch=IN_STEP_5).codes == [-signal.SIGKILL]
    assert steps(tmp_path / "run") == [1, 2, 3, 4]
    done = attempt(1, "--train.out=run")
    assert done.codes == [0], done.err
    assert steps(tmp_path / "run") == list(range(1, 9))
    assert steps(tmp_path / "run.old-1") == [1, 2, 3, 4]
    assert names(tmp_path) == ["run", "run.old-1"]


def test_an_error_that_every_attempt_meets_is_said_once(attempt, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    args = ("--train.out=other", "--checkpoint.every=2")
    first = attempt(0, *args)
    line = "error: other exists already"
    assert (first.codes, len(first.errors)) == ([2], 1) and first.errors[0].startswith(line)
    again = attempt(1, *args)
    assert (again.codes, again.err) == ([2], [""])
    assert names(tmp_path / "other") == ["notes.txt"]


@pytest.mark.parametrize("step", [1, 5])
def test_a_restart_of_a_run_that_overwrites_another(attempt, tmp_path, whole1, step):
    shutil.copytree(whole1, tmp_path / "run")
    (tmp_path / "run" / "result.txt").write_text("the old run")
    args = ("--train.out=run", "--train.overwrite", "--checkpoint.every=3")
    assert attempt(0, *args, patch=partial(at_step, step, die)).codes == [-signal.SIGKILL]
    done = attempt(1, *args)
    assert done.codes == [0], done.err
    assert (tmp_path / "run.old-1" / "result.txt").read_text() == "the old run"
    assert ("resuming from run/checkpoints/step-00000003" in done.out[0]) == (step == 5)
    assert fixtures.differs(tmp_path / "run", whole1) == ""
    assert names(tmp_path) == ["run", "run.old-1"]
