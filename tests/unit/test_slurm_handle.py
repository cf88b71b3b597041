"""Following a job: a controller that is silent, ranks that hang, one of an array. No cluster."""

from pathlib import Path

import pytest

from labcode.slurm.run import handle
from labcode.slurm.run.answers import JobInfo
from labcode.slurm.run.client import Client, Unreachable
from labcode.slurm.run.handle import JobFailed, SlurmHandle

STEPS = "step 1/40 | loss 4.1\nstep 2/40 | loss 4.0\n"


def job(state: str, log: Path | None = None, number: str = "17", requeue: str = "0") -> JobInfo:
    fields = {"JobState": state, "Requeue": requeue}
    return JobInfo(
        number, "gpt", state, "", (1, 0), 0, "n[1-2]", "00:08:00", "00:10:00", log, fields
    )


class Scripted(Client):
    """A cluster that gives these answers, one after the other, and then the last one again."""

    def __init__(self, *answers: list[JobInfo] | Unreachable) -> None:
        super().__init__()
        self.__dict__["answers"] = list(answers)

    def jobs(self, number: str) -> list[JobInfo]:
        answers = self.__dict__["answers"]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Unreachable):
            raise answer
        return answer

    def cancel(self, number: str, signal: str | None = None) -> None:
        raise AssertionError("nobody asked for that")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handle, "POLL_S", (0.01, 0.01))
    monkeypatch.setattr(handle, "AGAIN_S", 0.01)


SILENT = Unreachable("scontrol: Unable to contact slurm controller (connect failure)")


def test_a_silent_controller_is_told_of_once_and_the_log_is_shown_meanwhile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "17.log"
    log.write_text(STEPS)
    running = [job("RUNNING", log)]
    client = Scripted(running, SILENT, SILENT, SILENT, running, [job("COMPLETED", log)])
    assert SlurmHandle(client, "17").wait().ok
    said = capsys.readouterr().out
    assert said.count("the controller does not answer, and is asked again and again") == 1
    assert said.count("step 2/40") == 1


def test_a_controller_that_stays_silent_leaves_the_job_and_how_to_follow_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handle, "GONE_S", 0.05)
    client = Scripted([job("RUNNING")], SILENT)
    with pytest.raises(Unreachable) as caught:
        SlurmHandle(client, "17").wait(echo=False)
    assert str(caught.value) == (
        f"{SILENT}; job 17 needs no controller and goes on: "
        "`python -m labcode.slurm status 17` asks again, and cancel in place of status ends it"
    )


def test_of_an_array_the_task_that_failed_is_named(tmp_path: Path) -> None:
    log = tmp_path / "21_3.log"
    log.write_text("error: rank 0: task three is ill\n")
    tasks = [job("COMPLETED", number=f"21_{task}") for task in range(8)]
    tasks[3] = job("FAILED", log, number="21_3")
    with pytest.raises(JobFailed) as caught:
        SlurmHandle(Scripted(tasks), "21").wait(echo=False)
    assert str(caught.value) == (
        "job 21 FAILED: task 3 of an array of 8 (21_3): rank 0: task three is ill"
    )


@pytest.mark.parametrize(
    ("quiet_s", "expected"),
    [
        (0.0, "no step since"),
        (60.0, "the time limit of 00:10:00 was reached before a checkpoint was written"),
    ],
)
def test_ranks_that_hang_until_the_time_limit_are_said_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet_s: float, expected: str
) -> None:
    monkeypatch.setattr(handle, "QUIET_S", quiet_s)
    log = tmp_path / "17.log"
    log.write_text(STEPS)
    ended = job("TIMEOUT", log, requeue="1")
    outcome = SlurmHandle(Scripted([job("RUNNING", log)], [ended]), "17").wait(
        echo=False, check=False
    )
    assert outcome.reason.startswith(expected)
    if not quiet_s:
        assert outcome.reason.endswith("(the time limit of 00:10:00 ended it)")
        assert "--parallel.collective_timeout_s" in outcome.reason


def test_a_job_that_takes_steps_until_its_limit_does_not_hang() -> None:
    pace = handle._Pace()
    assert pace.hang(1e9) == ""  # no step was ever seen
    for now_s in (0.0, 100.0, 110.0):
        pace.step(now_s)
    assert pace.hang(110.0 + 999.0) == ""  # less than ten times its slowest step
    assert "no step since" in pace.hang(110.0 + 1001.0)
