"""The output folder of a run: what may be overwritten, and what comes back."""

import json
import os

import pytest

from labcode import recipes
from labcode.train import run_folder, run_lock
from labcode.train.run_folder import RunFolder
from labcode.train.run_lock import RunLock

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


def test_the_old_run_comes_back_unless_the_first_step_of_the_new_one_stands(here):
    before = an_old_run(here)
    folder = overwriting()
    folder.look()
    assert (here / "run" / "weights.pt").exists()
    folder.claim()
    (here / "run" / "metrics.jsonl").write_text("new")
    assert not (here / "run" / "weights.pt").exists()
    folder.close()
    assert contents(here) == before


def test_the_old_run_goes_when_the_first_step_of_the_new_one_stands(here):
    an_old_run(here)
    folder = overwriting()
    folder.look()
    folder.claim()
    folder.keep()
    folder.close()
    assert set(contents(here)) == {"run", "run/config.json"}


@pytest.mark.parametrize("kind", [overwriting, resuming, lambda: RunFolder(config())])
@pytest.mark.parametrize("killed_in", ["rename", "claim"])
def test_a_kill_before_the_first_step_is_repaired_by_whoever_comes_next(
    here, capsys, kind, killed_in
):
    before = an_old_run(here)
    if killed_in == "rename":
        os.rename("run", "run.set-aside")
    else:
        killed = overwriting()
        killed.look()
        killed.claim()
        for lock in (killed._lock, killed._old_lock):
            lock._file.close()  # as the kernel does it
    folder = kind()
    try:
        folder.look()
    except ValueError as error:
        assert "run exists already" in str(error)
    folder.close()
    assert contents(here) == before
    assert capsys.readouterr().out.count("run that another one was about to overwrite is back") == 1


def test_what_a_kill_left_of_an_old_run_that_was_being_removed_goes(here):
    before = an_old_run(here)
    (here / "run.discarded" / "checkpoints").mkdir(parents=True)
    folder = resuming()
    folder.look()
    folder.close()
    assert contents(here) == before


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
        with pytest.raises(ValueError, match="is not the folder of a run: nothing was removed"):
            overwriting(name).look()
        with pytest.raises(ValueError, match="is not the folder of a run: nothing was changed"):
            resuming(name).look()


@pytest.mark.parametrize(
    "name", ["thesis.txt", "checkpoints/best", "tensorboard/notes.md", "weights.pt.partial", ".git"]
)
def test_a_run_with_something_else_in_it_is_not_overwritten(here, name):
    an_old_run(here)
    path = here / "run" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("years")
    before = contents(here)
    folder = overwriting()
    with pytest.raises(ValueError, match="holds what no run has written, ") as caught:
        folder.look()
    assert name in str(caught.value)
    folder.close()
    assert contents(here) == before


def test_paths_that_are_never_removed(here, monkeypatch):
    an_old_run(here)
    monkeypatch.chdir(here / "run" / "checkpoints")
    for name in (".", "..", "../../run", str(here / "run"), "/"):
        with pytest.raises(ValueError, match=r"working directory or above it|exists already"):
            overwriting(name).look()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(here / "run"))
    with pytest.raises(ValueError, match="your home or above it"):
        overwriting().look()
    monkeypatch.undo()
    monkeypatch.chdir(here)
    (here / "link").symlink_to("run")
    with pytest.raises(ValueError, match=r"link is a link to .*run, which is never removed"):
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


def test_a_name_that_the_old_run_would_need_is_in_the_way(here):
    an_old_run(here)
    (here / "run.set-aside").mkdir()
    with pytest.raises(ValueError, match=r"run\.set-aside is in the way"):
        overwriting().look()


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


def test_a_run_that_was_set_aside_by_a_living_one_is_in_use(here):
    an_old_run(here)
    first = overwriting()
    first.look()
    first.claim()
    second = resuming()
    with pytest.raises(ValueError, match=r"run\.set-aside is in use by process"):
        second.look()
    second.close()
    first.keep()
    first.close()
    assert set(contents(here)) == {"run", "run/config.json"}


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
