"""A file is whole or not there, whatever ends the process that writes it."""

import os
import uuid

import pytest

from labcode.runtime import files


def test_a_file_is_replaced_as_a_whole_and_nothing_is_left_beside_it(tmp_path):
    path = tmp_path / "weights.pt"
    files.write_atomically(path, b"old")
    files.write_atomically(path, b"n", memoryview(b"ew"))
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["weights.pt"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_what_ends_the_writing_leaves_the_old_file(tmp_path, monkeypatch, error):
    def fail(descriptor):
        raise error

    path = tmp_path / "weights.pt"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(type(error)):
        files.write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["weights.pt"]


def test_the_file_is_on_the_disk_before_its_new_name_and_the_name_after_it(tmp_path, monkeypatch):
    events = []
    fsync = os.fsync
    replace = os.replace

    def watched_fsync(descriptor):
        events.append("folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file")
        fsync(descriptor)

    def watched_replace(source, target):
        events.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", watched_replace)
    files.write_atomically(tmp_path / "run.json", b"{}")
    assert events == ["file", "rename", "folder"]


def test_a_system_that_cannot_sync_folders_is_no_error(tmp_path, monkeypatch):
    def refuse(path, flags):
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "open", refuse)
    files.sync_folder(tmp_path)


def test_only_unfinished_files_of_our_own_are_removed(tmp_path):
    kept = ["weights.pt", "mine.partial", "step-00000002.partial", f"{'g' * 32}.partial"]
    for name in kept:
        (tmp_path / name).write_bytes(b"")
    folder = tmp_path / f"folder.{uuid.uuid4().hex}.partial"
    folder.mkdir()
    (tmp_path / f"weights.pt.{uuid.uuid4().hex}.partial").write_bytes(b"half")
    files.remove_unfinished(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted([*kept, folder.name])
    files.remove_unfinished(tmp_path / "nowhere")
