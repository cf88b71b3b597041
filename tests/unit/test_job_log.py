"""What failed first in a job, from what it printed: `labcode.slurm.log`, and the command for it."""

import io
from pathlib import Path

import pytest
import yaml

from labcode.doctor import __main__ as doctor
from labcode.slurm.log import lines, story, tell
from labcode.slurm.log.kinds import KINDS

LOGS = yaml.safe_load(Path(__file__).with_name("job_logs.yaml").read_text(encoding="utf-8"))
FAILED = LOGS["failed"]
RIGHT = LOGS["right"]
LINES = LOGS["lines"]


def told(files: dict[str, str]) -> str:
    return "\n".join(tell.tell(story.read(files)))


@pytest.mark.parametrize("name", FAILED)
def test_what_failed_first_is_found(name: str) -> None:
    log = FAILED[name]
    first = story.read(log["files"]).first
    text = told(log["files"])
    kind = first.kind.name if first else None
    assert kind == log.get("kind"), text
    assert (first.rank if first else None) == log.get("rank"), text
    if "host" in log:
        assert first is not None and first.host == log["host"], text
    for words in log.get("words", ()):
        assert words in text


@pytest.mark.parametrize("name", RIGHT)
def test_a_job_in_which_nothing_failed_is_not_blamed(name: str) -> None:
    assert story.read({"job.out": RIGHT[name]}).first is None, told({"job.out": RIGHT[name]})


@pytest.mark.parametrize("kind", LINES)
def test_the_words_of_each_kind_are_known(kind: str) -> None:
    for line in LINES[kind]:
        first = story.read({"job.out": line}).first
        assert first is not None and first.kind.name == kind, line


def test_each_kind_says_what_it_means_and_reads_as_a_sentence() -> None:
    names = [kind.name for kind in KINDS if kind.name]
    assert len(set(names)) == len(names)
    for kind in KINDS:
        if kind.name:
            assert kind.means and not kind.means.endswith("."), kind.name
            assert not kind.do.endswith("."), kind.name
            assert all(name in names for name in kind.because), kind.name


@pytest.mark.parametrize(
    ("written", "rank", "host", "text"),
    [
        ("[rank3]: ValueError: x", 3, None, "ValueError: x"),
        ("[rank3]:[E321 02:07:08.4 P.cpp:607] [Rank 3] slow", 3, None, "[E321 02:07:08.4"),
        ("[default1]:[rank11]: ValueError: x", 11, None, "ValueError: x"),
        ("[default1]:ValueError: x", 1, None, "ValueError: x"),
        ("[1,3]<stderr>:ValueError: x", 3, None, "ValueError: x"),
        ("[3]<stderr>:ValueError: x", 3, None, "ValueError: x"),
        ("2026-11-28T10:00:01.884Z: [1,3]<stdout>:ValueError: x", 3, None, "ValueError: x"),
        ("2026-11-28 10:00:01.043 +08:00 ValueError: x", None, None, "ValueError: x"),
        ("[2026-11-28 10:00:01] n1:7:9 [0] NCCL WARN bad", None, "n1", "n1:7:9"),
        ("(Worker pid=71, ip=10.0.0.2) ValueError: x", None, "10.0.0.2", "ValueError: x"),
        ("gpu01:700:900 [0] NCCL WARN bad", None, "gpu01", "gpu01:700:900"),
        ("\x1b[31m[rank0]: ValueError: x\x1b[0m", 0, None, "ValueError: x"),
        ("\x1b[?25l\x1b[2K[rank0]: ValueError: x\x1b[?25h", 0, None, "ValueError: x"),
        ("[80746] nothing of a launcher", None, None, "[80746]"),
    ],
)
def test_what_a_launcher_writes_before_a_line_is_read_and_taken_off(
    written: str, rank: int | None, host: str | None, text: str
) -> None:
    (line,) = lines.read_lines({"job.out": written})
    assert (line.rank, line.host) == (rank, host)
    assert line.text.startswith(text)


def test_a_progress_bar_is_one_line_of_the_file() -> None:
    written = "step 1\r\nx:  1%\rx:  2%\rValueError: x\nend\n"
    found = lines.read_lines({"job.out": written})
    assert [(line.number, line.text) for line in found] == [
        (1, "step 1"),
        (2, "x:  1%"),
        (2, "x:  2%"),
        (2, "ValueError: x"),
        (3, "end"),
    ]


def test_hosts_before_the_lines_of_pdsh_are_read() -> None:
    written = "10.0.0.1: step 1\n10.0.0.2: step 1\n10.0.0.1: step 2\n10.0.0.2: KeyError: 'x'\n"
    first = story.read({"job.out": written}).first
    assert first is not None and (first.host, first.what) == ("10.0.0.2", "KeyError: 'x'")


def test_the_times_of_loggers_can_be_compared() -> None:
    written = [
        "2026-11-28T10:00:01.5 a",
        "b",
        "[E1128 10:00:02.250000000 c.cpp:1] c",
        "[2026-11-28 10:00:03,500] [INFO] d",
    ]
    found = lines.read_lines({"job.out": "\n".join(written)})
    first_s = found[0].time_s or 0.0
    later = [(line.time_s or 0.0) - first_s for line in found]
    assert later == pytest.approx([0.0, 0.0, 0.75, 2.0])


def test_names_of_files_tell_ranks_where_several_do() -> None:
    of_ranks = {f"logs/0/{rank}/stderr.log": "x" for rank in range(3)}
    assert [line.rank for line in lines.read_lines(of_ranks)] == [0, 1, 2]
    of_a_job = {"train-4711.out": "x", "train-4711.err": "x"}
    assert {line.rank for line in lines.read_lines(of_a_job)} == {None}


def test_of_several_files_the_earlier_time_is_the_first() -> None:
    late = "2026-11-28 10:05:00 step 8\nValueError: late\n"
    early = "2026-11-28 10:01:00 step 7\nKeyError: 'early'\n"
    first = story.read({"rank_0.log": late, "rank_1.log": early}).first
    assert first is not None and (first.rank, first.what) == (1, "KeyError: 'early'")


def test_an_error_after_which_others_went_on_is_still_told_of() -> None:
    log = FAILED["an error that was handled, then the time limit"]
    text = told(log["files"])
    assert "Said before, and steps went on:\n    Python exception: ValueError: bad answer" in text


def test_files_of_one_name_are_told_apart_and_may_name_the_host() -> None:
    files = {"n1/job.err": "ncclRemoteError: x\n", "n2/job.err": "KeyError: 'x'\n"}
    told_by = "srun: error: n2: task 4: Exited with exit code 1\n"
    first = story.read({**files, "slurm-17.out": told_by}).first
    assert first is not None
    assert (first.line.place, first.host) == ("n2/job.err, line 1", "n2")


def test_an_attempt_before_a_requeue_is_another_job() -> None:
    before = "ValueError: long ago\n"
    requeued = "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT x DUE TO JOB REQUEUE ***\n"
    first = story.read({"j.log": before + requeued + "KeyError: 'now'\n"}).first
    assert first is not None and first.what == "KeyError: 'now'"


# ---- the command


def run(*words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = doctor.main(list(words))
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_command_says_what_failed_first_and_ends_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.err"
    path.write_text("[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB\n")
    code, out, err = run("job", str(path), capsys=capsys)
    assert (code, err) == (1, "")
    assert out.startswith("rank 3 failed first: out of GPU memory (job.err, line 1)\n")
    path.write_text("step 1 | loss 3.1\n")
    code, out, err = run("job", str(path), capsys=capsys)
    assert code == 0
    assert out == (
        "There is no failure here that I know. The last lines are:\n    step 1 | loss 3.1\n"
    )


def test_a_misspelled_log_is_answered_with_the_one_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "slurm-17.out").touch()
    _, _, err = run("job", str(tmp_path / "slurm-7.out"), capsys=capsys)
    assert f"did you mean {tmp_path}/slurm-17.out? " in err


@pytest.mark.parametrize("command", ["job", "nccl"])
def test_a_file_that_cannot_be_read_is_one_line(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    binary = tmp_path / "core"
    binary.write_bytes(b"\x7fELF\0\0")
    cases = {
        str(tmp_path / "none.log"): "no such file or directory: give the files that the job wrote",
        str(tmp_path): f"is a folder: give the files in it, such as {tmp_path}/*.err",
        str(binary): "is no text: give what the job printed, its stdout or stderr",
    }
    for name, words in cases.items():
        code, out, err = run(command, name, capsys=capsys)
        assert (code, out) == (2, "")
        assert err.startswith(f"error: {name}") and err.endswith(f"{words}\n")
        assert err.count("\n") == 1


def test_a_log_can_come_from_a_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = b"step 3\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(log)))
    assert doctor.main(["job", "-"]) == 1
    assert "out of memory" in capsys.readouterr().out
