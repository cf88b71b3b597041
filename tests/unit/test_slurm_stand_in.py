"""What stands in for SLURM in lesson 14 does what SLURM does, as far as a batch script can tell."""

from collections.abc import Callable
from pathlib import Path

import pytest
from faults.waiting import HANG_S, comes

from course.labs.l14_stand_in import FAILED_RANKS, FAILING, StandInJob, split_options

HEAD = """\
#!/bin/bash
#SBATCH --job-name=trial
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
set -euo pipefail
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`run(body)`: (state, restarts, log) of a script; `signal_at` is a text in its log."""
    monkeypatch.chdir(tmp_path)

    def run(body: str, signal_at: str = "") -> tuple[str, int, str]:
        Path("trial.sbatch").write_text(HEAD + body)
        job = StandInJob(Path("trial.sbatch"))
        told = not signal_at

        def has_ended() -> bool:
            nonlocal told
            if not told and signal_at in job.log.read_text():
                job.signal_script()
                told = True
            return job.poll() != "RUNNING"

        try:
            comes(has_ended, HANG_S, 0.05)
            return job.poll(), job.restarts, job.log.read_text()
        finally:
            job.close()

    return run


Run = Callable[..., tuple[str, int, str]]


def test_srun_starts_the_tasks_of_all_nodes(run: Run) -> None:
    body = "srun bash -c 'echo $SLURM_PROCID $SLURM_LOCALID $SLURM_NODEID $SLURM_STEP_NUM_TASKS'\n"
    state, restarts, log = run(body)
    assert (state, restarts) == ("COMPLETED", 0)
    assert sorted(log.splitlines()) == ["0 0 0 4", "1 1 0 4", "2 0 1 4", "3 1 1 4"]


def test_the_first_host_can_be_connected_to(run: Run) -> None:
    body = 'scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1\n'
    assert run(body)[2] == "127.0.0.1\n"


def test_a_task_that_fails_ends_the_others_if_srun_was_told_so(run: Run) -> None:
    task = "[ $SLURM_PROCID = 1 ] && exit 3; sleep 60"
    state, _, log = run(f"srun --kill-on-bad-exit=1 bash -c '{task}'\n")
    assert state == "FAILED"
    assert "task 1: Exited with exit code 3" in log


def test_where_ranks_are_to_fail_only_the_training_does(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FAILING, "1")
    state, _, log = run("srun echo here\nsrun python -m labcode.train gpt_tiny\n")
    assert state == "FAILED"
    assert log.splitlines() == ["here"] * 4 + [FAILED_RANKS]


def test_a_job_that_is_told_to_stop_is_requeued(run: Run) -> None:
    body = """\
stopped=no
trap 'stopped=yes' USR1
srun bash -c 'trap "echo told; exit 0" USR1
echo up $SLURM_RESTART_COUNT
if [ $SLURM_RESTART_COUNT = 0 ]; then sleep 60 & wait; fi' &
wait $! || true
if [ $stopped = yes ]; then
    scancel --signal=USR1 "$SLURM_JOB_ID"
    wait
    scontrol requeue "$SLURM_JOB_ID"
fi
"""
    state, restarts, log = run(body, signal_at="up 0\nup 0\nup 0\nup 0")
    assert (state, restarts) == ("COMPLETED", 1)
    assert log.split() == ["up", "0"] * 4 + ["told"] * 4 + ["up", "1"] * 4


def test_a_job_can_cancel_itself(run: Run) -> None:
    assert run('scancel "$SLURM_JOB_ID"\n')[0] == "CANCELLED"


def test_options_of_srun_end_where_the_command_begins() -> None:
    words = ["--kill-on-bad-exit=1", "-N", "2", "--ntasks-per-node", "1", "-u", "python", "-m", "x"]
    options, command = split_options(words)
    assert options == {
        "kill-on-bad-exit": "1",
        "nodes": "2",
        "ntasks-per-node": "1",
        "u": "1",
    }
    assert command == ["python", "-m", "x"]
