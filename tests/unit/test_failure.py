"""Who reports an error of a run, and in which words."""

import errno

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from labcode import recipes
from labcode.run import failure
from labcode.run.failure import RefusedError
from labcode.run.run_folder import RunFolder
from labcode.runtime import bootstrap
from labcode.runtime.agreement import PeerError
from labcode.runtime.bootstrap import Place

NO_SPACE = OSError(errno.ENOSPC, "No space left on device", "run/metrics.jsonl")


@pytest.mark.parametrize(
    ("place", "error", "steps_done", "line"),
    [
        (Place(3, 8), ValueError("no GPU"), None, "error: rank 3: no GPU"),
        (Place(0, 8), ValueError("no GPU"), None, "error: rank 0: no GPU"),
        (Place(), ValueError("no data"), None, "error: no data"),
        (
            Place(3, 8),
            NO_SPACE,
            17,
            "error: rank 3: after step 17: run/metrics.jsonl: no space left on device",
        ),
        (Place(0, 8), RefusedError("tp=3"), None, "error: tp=3"),
        (Place(3, 8), RefusedError("tp=3"), None, ""),
        (Place(0, 8), PeerError("rank 5: full"), 2, "error: after step 2: rank 5: full"),
        (Place(5, 8), PeerError("rank 5: full"), 2, ""),
    ],
)
def test_a_rank_reports_what_it_alone_knows_and_rank_0_what_all_know(
    capsys, place, error, steps_done, line
):
    assert failure.fail(place, error, steps_done) == failure.FAILED
    assert capsys.readouterr().err.strip() == line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("no GPU"), "error: rank 3: no GPU"),
        (RefusedError("tp=3"), "error: tp=3"),
        (
            RuntimeError("Connection reset by peer"),
            "rank 3: the connection to another rank was lost: ",
        ),
    ],
)
def test_the_line_is_handed_to_torchrun_which_repeats_it(tmp_path, monkeypatch, error, line):
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    failure.fail(Place(3, 8), error)
    repeated = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(file))
    text, _ = ChildFailedError("labcode.train", {3: repeated})._format_failure(0, 3, repeated)
    assert f"traceback : {line}" in text


def test_an_error_file_that_cannot_be_written_changes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "gone" / "error.json"))
    assert failure.fail(Place(3, 8), ValueError("no GPU")) == failure.FAILED
    assert capsys.readouterr().err == "error: rank 3: no GPU\n"


def test_a_wrong_command_line_is_reported_by_rank_0(capsys, monkeypatch):
    for rank, line in ((0, "error: unknown recipe"), (1, "")):
        monkeypatch.setattr(bootstrap, "read_environment", lambda rank=rank: Place(rank, 2))
        assert failure.refuse_command(ValueError("unknown recipe")) == failure.FAILED
        assert capsys.readouterr().err.strip() == line


def made():
    """The folder of a run whose first step stands."""
    folder = RunFolder(recipes.gpt_tiny())
    folder.look()
    out = folder.claim()
    folder.keep()
    folder.close()
    return out


def test_runs_without_a_name_are_numbered_without_end(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert made().name == "gpt_tiny-001"
    for number in range(2, 1000):
        (tmp_path / "runs" / f"gpt_tiny-{number:03d}").mkdir()
    assert made().name == "gpt_tiny-1000"
    assert made().name == "gpt_tiny-1001"
