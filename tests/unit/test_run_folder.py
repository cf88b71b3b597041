"""The output folder of a run: what may be overwritten, and what comes back."""

import json
import os

import pytest

from labcode import recipes
from labcode.run import run_folder, run_lock
from labcode.run.run_folder import RunFolder
from labcode.run.run_lock import RunLock

UNFINISHED = "weights.pt." + "0" * 32 + ".partial"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_lock, "WAIT_S", 0.1)
    return tmp_path


def config(out="run", **changes):
    named = {name.replace("_", ".", 1): value for name, value in changes.items()}
    return recipes.with_changes(recipes.gpt_tiny(), {"train.out": out} | named)


def an_old_run(here, name="run"):
    """A finished run; returns its files."""
    folder = RunFolder(config(name))
    folder.look()
    out = here / folder.claim()
    folder.keep()
    folder.close()
    (out / "weights.pt").write_text("weeks of work")
    (out / "checkpoints" / "step-00000004").mkdir(parents=True)
    return contents(here)


def contents(folder):
    found = {}
    for path in sorted(folder.rglob("*")):
        found[str(path.relative_to(folder))] = path.read_bytes() if path.is_file() else None
    return found


def overwriting(out="run"):
    return RunFolder(config(out, train_overwrite=True))


def resuming(out="run"):
    return RunFolder(config(out, checkpoint_resume=True))


# ---- overwrite


def test_a_run_that_is_overwritten_gets_the_next_free_name(here, capsys):
    before = an_old_run(here)
    for number in (1, 2):
        folder = overwriting()
        folder.look()
        assert (here / "run" / "config.json").exists()
        folder.claim()
        folder.keep()
        folder.close()
        line = f"run: the run that was there is now run.old-{number}\n"
        assert capsys.readouterr().out == line
    found = contents(here)
    assert {path.partition("/")[0] for path in found} == {"run", "run.old-1", "run.old-2"}
    for path, content in before.items():
        assert found[f"run.old-1{path.removeprefix('run')}"] == content


def test_an_old_run_has_its_name_again_if_the_new_one_does_not_begin(here):
    before = an_old_run(here)
    folder = overwriting()
    folder.look()
    folder.claim()
    (here / "run" / "metrics.jsonl").write_text("new")
    folder.close()
    assert contents(here) == before


def test_after_a_kill_the_old_run_is_beside_the_new_one(here):
    before = an_old_run(here)
    killed = overwriting()
    killed.look()
    killed.claim()
    killed._lock._file.close()  # as the kernel does it
    folder = overwriting()
    folder.look()
    folder.claim()
    folder.keep()
    folder.close()
    found = contents(here)
    for path, content in before.items():
        assert found[f"run.old-1{path.removeprefix('run')}"] == content
    assert "run.old-2/config.json" in found


def test_a_parent_that_cannot_be_written_to_is_refused_before_anything_is_touched(
    here, monkeypatch
):
    before = an_old_run(here)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    folder = overwriting()
    with pytest.raises(ValueError, match=r"is read-only here: choose another train\.out"):
        folder.look()
    folder.close()
    assert contents(here) == before


def test_a_rename_that_fails_leaves_the_old_run(here, monkeypatch):
    before = an_old_run(here)
    folder = overwriting()
    folder.look()

    def refused(old, new):
        raise OSError(30, "Read-only file system", old)

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", refused)
        with pytest.raises(OSError, match="Read-only"):
            folder.claim()
    folder.close()
    assert contents(here) == before


def test_a_folder_of_somebody_else_is_never_overwritten(here):
    (here / "proj").mkdir()
    (here / "proj" / "config.json").write_text("{}")
    (here / "proj" / "thesis.txt").write_text("years")
    (here / "list").mkdir()
    (here / "list" / "config.json").write_text("[1, 2]")
    for name in ("proj", "list"):
        with pytest.raises(ValueError, match="is not the folder of a run: nothing was changed"):
            overwriting(name).look()
        with pytest.raises(ValueError, match="is not the folder of a run: nothing was changed"):
            resuming(name).look()


def test_folders_that_never_get_another_name(here, monkeypatch):
    an_old_run(here)
    monkeypatch.chdir(here / "run" / "checkpoints")
    for name in (".", "..", "../../run", str(here / "run"), "/"):
        with pytest.raises(ValueError, match=r"working directory or above it"):
            overwriting(name).look()
    monkeypatch.chdir(here)
    (here / "link").symlink_to("run")
    with pytest.raises(ValueError, match=r"link is a link to .*run: name the folder itself"):
        overwriting("link").look()
    (here / "file").write_text("text")
    for kind in (overwriting, resuming):
        with pytest.raises(ValueError, match="file is a file"):
            kind("file").look()
        with pytest.raises(ValueError, match="file is a file"):
            kind("file/below").look()


@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_path_is_an_unset_variable(name):
    with pytest.raises(ValueError, match=r"train\.out is empty"):
        RunFolder(config(name)).look()


# ---- new folders


@pytest.mark.parametrize("kind", [overwriting, resuming, lambda: RunFolder(config())])
@pytest.mark.parametrize("left", [[], [UNFINISHED], ["run.lock"]])
def test_what_a_kill_leaves_before_the_config_is_written_counts_as_new(here, kind, left):
    (here / "run").mkdir()
    for name in left:
        (here / "run" / name).write_text("half")
    folder = kind()
    folder.look()
    folder.claim()
    folder.keep()
    folder.close()
    assert set(contents(here)) == {"run", "run/config.json"}


def test_a_folder_with_an_empty_folder_of_checkpoints_counts_as_new(here):
    (here / "run" / "checkpoints").mkdir(parents=True)
    folder = resuming()
    folder.look()
    folder.claim()
    folder.keep()
    folder.close()
    assert "run/config.json" in contents(here)


def test_a_run_that_does_not_begin_leaves_no_folder_behind(here):
    (here / "mine").mkdir()
    (here / "empty").mkdir()
    for out in (None, "new", "mine/deep/new", "empty"):
        folder = RunFolder(config(out))
        folder.look()
        path = folder.claim()
        (path / "metrics.jsonl").write_text("")
        (path / "tensorboard").mkdir()
        folder.close()
        folder.close()
        assert set(contents(here)) == {"mine", "empty"}


def test_unfinished_files_of_killed_runs_are_removed_on_resume(here):
    before = set(an_old_run(here))
    (here / "run" / UNFINISHED).write_text("half of the weights")
    folder = resuming()
    folder.look()
    folder.claim()
    folder.keep()
    folder.close()
    assert set(contents(here)) == before


# ---- resume


def test_a_resume_that_does_not_begin_leaves_the_folder_as_it_was(here):
    before = an_old_run(here)
    folder = RunFolder(config(checkpoint_resume=True, train_steps=77))
    folder.look()
    folder.claim()
    assert json.loads((here / "run" / "config.json").read_text())["train"]["steps"] == 77
    folder.close()
    assert contents(here) == before


def test_a_link_to_a_run_may_be_resumed(here):
    an_old_run(here)
    (here / "link").symlink_to("run")
    folder = resuming("link")
    folder.look()
    folder.claim()
    folder.keep()
    folder.close()
    assert (here / "link").is_symlink()


# ---- two runs in one folder


@pytest.mark.parametrize("kind", [overwriting, resuming])
def test_a_run_in_use_is_refused_with_its_holder(here, monkeypatch, kind):
    an_old_run(here)
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    first = resuming()
    first.look()
    first.claim()
    first.keep()
    holder = rf"run is in use by process {os.getpid()} on .*, job 4711, since .*: wait until it has"
    second = kind()
    with pytest.raises(ValueError, match=holder):
        second.look()
    second.close()
    first.close()
    third = kind()
    third.look()
    third.close()


def test_of_two_runs_that_begin_in_one_folder_one_is_refused(here):
    first = resuming()
    second = resuming()
    first.look()
    second.look()
    first.claim()
    with pytest.raises(ValueError, match="run is in use by process"):
        second.claim()
    second.close()
    first.keep()
    first.close()
    assert set(contents(here)) == {"run", "run/config.json"}
    late = RunFolder(config())
    late.path = run_folder.Path("run")  # it has looked before `first` began
    with pytest.raises(ValueError, match="run was taken by another run meanwhile"):
        late.claim()
    late.close()
    assert set(contents(here)) == {"run", "run/config.json"}


def test_two_numbered_runs_get_two_folders(here):
    first = RunFolder(config(None))
    second = RunFolder(config(None))
    assert first.look() == second.look()
    assert first.claim() != second.claim()
    first.close()
    assert set(contents(here)) == {
        "runs",
        "runs/gpt_tiny-002",
        "runs/gpt_tiny-002/config.json",
        "runs/gpt_tiny-002/run.lock",
    }
    second.close()
    # the first one had made it, and could not remove it
    assert set(contents(here)) == {"runs"}


def test_a_file_system_without_locks_is_no_reason_to_stop(here, monkeypatch):
    def unsupported(file, how):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(run_lock.fcntl, "flock", unsupported)
    lock = RunLock(here)
    lock.take()
    assert "process" in (here / "run.lock").read_text()
    lock.release()
    assert contents(here) == {}
