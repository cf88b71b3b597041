"""What a checkpoint says of itself is believed only as far as it can be checked."""

import dataclasses
import itertools
import json
import os

import pytest

from labcode.train.checkpoint import folder as checkpoint_folder
from labcode.train.checkpoint.folder import About, read_about
from labcode.train.checkpoint.tensors import DamagedError, StoredFile

ABOUT = About(
    step=6,
    config={"name": "gpt_tiny", "optim": {"lr": 1e-3, "betas": (0.9, float("inf"))}},
    grid={"dp": 2, "order": "tp-cp-dp-pp"},
    data_sha256="ab" * 32,
    files={"tensors.json": StoredFile(2, "cd" * 32), "rank-0.bin": StoredFile(4, "ef" * 32)},
)


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "step-00000006"
    folder.mkdir()
    (folder / "run.json").write_bytes(ABOUT.to_json())
    return folder


def write(folder, tree):
    """Write any JSON with the checksum that belongs to it, as a stranger would."""
    if isinstance(tree, dict):
        tree = {**tree, "sha256": checkpoint_folder._checksum(tree)}
    (folder / "run.json").write_text(json.dumps(tree))


def tree_of(folder):
    tree = json.loads((folder / "run.json").read_text())
    del tree["sha256"]
    return tree


def test_what_was_written_is_read(folder):
    found = read_about(folder)
    assert dataclasses.replace(found, config=ABOUT.config) == ABOUT
    assert found.config == {"name": "gpt_tiny", "optim": {"lr": 1e-3, "betas": [0.9, float("inf")]}}


def test_every_flipped_bit_is_seen(folder):
    path = folder / "run.json"
    content = path.read_bytes()
    written = read_about(folder)
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        try:
            # a space may be another kind of space
            assert read_about(folder) == written
        except DamagedError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 500,
        b"\xff\xfe",
        b"nonsense",
        b"[",
        b"[" * 100_000,
        b"9" * 5000,
        b"null",
        b"3",
        b'"text"',
        b"[]",
        b"{}",
        b'{"sha256": 3}',
        b'{"sha256": {}}',
        b'{"step": 6, "files": {}}',
    ],
)
def test_json_of_another_shape_is_damage(folder, content):
    (folder / "run.json").write_bytes(content)
    with pytest.raises(DamagedError, match=r"run\.json") as error:
        read_about(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["step", "config", "grid", "data_sha256", "files"])
def test_fields_of_another_type_are_damage_also_where_the_checksum_is_right(folder, name):
    tree = tree_of(folder)
    for value in (None, True, 2.5, "6", -1, [], [{}], {"a": 3}, {"tensors.json": None}, "missing"):
        odd = {**tree, name: value}
        if value == "missing":
            del odd[name]
        if type(value) is type(tree[name]) and name in ("config", "grid", "data_sha256"):
            continue
        write(folder, odd)
        with pytest.raises(DamagedError):
            read_about(folder)


@pytest.mark.parametrize("name", ["", ".", "..", "../run", "/etc/passwd", "a/b", "a\\b", "a\0b"])
def test_names_that_lead_out_of_the_folder_are_refused(folder, name):
    tree = tree_of(folder)
    tree["files"][name] = tree["files"]["rank-0.bin"]
    write(folder, tree)
    with pytest.raises(DamagedError, match="which is no name in its folder"):
        read_about(folder)


def test_a_folder_with_the_name_of_another_step_is_damage(folder):
    other = folder.rename(folder.with_name("step-00000008"))
    with pytest.raises(DamagedError, match=r"run\.json is of step-00000006"):
        read_about(other)


def test_every_file_belongs_to_one_rank_that_which_wrote_it():
    names = ["tensors.json", *(f"rank-{rank}.bin" for rank in range(12))]
    shares = [checkpoint_folder.share_of(rank, 12, names) for rank in range(12)]
    assert shares[0] == ["tensors.json", "rank-0.bin"]
    assert shares[10] == ["rank-10.bin"]
    # fewer ranks read it: each file once
    shares = [checkpoint_folder.share_of(rank, 5, names) for rank in range(5)]
    assert sorted(itertools.chain(*shares)) == sorted(names)


def test_what_says_nothing_about_a_file_is_no_damage(folder, monkeypatch):
    def fail(path):
        raise PermissionError(13, "Permission denied", str(path))

    (folder / "a").write_bytes(b"text")
    files = {"a": checkpoint_folder.stored(folder / "a")}
    checkpoint_folder.verify(folder, files, files)
    monkeypatch.setattr(checkpoint_folder, "stored", fail)
    with pytest.raises(PermissionError):
        checkpoint_folder.verify(folder, files, files)


@pytest.mark.parametrize("kind", ["gone", "shorter", "other", "link", "pipe", "folder"])
def test_a_file_that_is_not_as_it_was_written_is_named(folder, kind):
    path = folder / "a"
    path.write_bytes(b"text")
    files = {"a": checkpoint_folder.stored(path)}
    path.unlink()
    if kind == "shorter":
        path.write_bytes(b"tex")
    elif kind == "other":
        path.write_bytes(b"test")
    elif kind == "link":
        (folder / "b").write_bytes(b"text")
        path.symlink_to(folder / "b")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    with pytest.raises(DamagedError, match=r"^a "):
        checkpoint_folder.verify(folder, files, files)
