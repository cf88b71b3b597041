"""Disks that fill up at every size, of bytes and of files: one line, and what stands is whole."""

import json
import random
import shutil
from functools import partial

from .. import disks, fixtures
from ..cases import EITHER, Case, Room
from ..fixtures import LONG
from ..injection import all_of
from .numerics import not_finite

SIZES_KIB = (4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768)
INODES = (2, 3, 4, 5, 6, 8, 10, 12, 14, 18)
NAMES = ["no space left", "disk", "space"]


def cases(rng: random.Random) -> list[Case]:
    if not disks.allowed():
        return []
    made = []
    for size in SIZES_KIB:
        ranks = rng.choice([1, 1, 2])
        made.append(_case(f"{size} KiB", f"size={size}k", ranks))
    for inodes in INODES:
        ranks = rng.choice([1, 1, 2])
        made.append(_case(f"{inodes} files and folders", f"size=8m,nr_inodes={inodes}", ranks))
    for size in (64, 96, 256):
        act = partial(_overwrite, size)
        made.append(
            Case(f"a run is replaced with {size} KiB free", names=NAMES, answer=EITHER, act=act)
        )
    made.append(Case("a disk that may only be read", names=["read-only"], act=_read_only))
    return made


def _case(what: str, options: str, ranks: int) -> Case:
    act = partial(_fill_and_go_on, options)
    return Case(f"{what}, {ranks} ranks", names=NAMES, answer=EITHER, ranks=ranks, act=act)


def _fill_and_go_on(options: str, room: Room) -> None:
    """A run that the disk is too small for, and the same on a larger one: bit for bit."""
    long = [*LONG[:-1], "--train.out=disk/run"]
    with disks.small_disk(room.folder / "disk", options) as disk:
        answer = room.train(*long, patch=disk.enter)
        kept = room.tmp / "kept"
        disk.copy_to(kept)
    (room.folder / "disk").rmdir()
    (room.folder / "disk").symlink_to(kept)
    _check_lines(room)
    if set(answer.codes) != {0} and (kept / "run").exists():
        done = room.train(*long, "--checkpoint.resume")
        if set(done.codes) != {0}:
            room.flag("wrong", f"cannot go on with more space: {done.errors or done.codes}")
        fixtures.compare_with_whole(room, kept / "run", room.case.ranks)
    unfinished = [path.name for path in kept.rglob("*.partial")]
    if unfinished:
        room.flag("left behind", ", ".join(unfinished))
    (room.folder / "disk").unlink()
    shutil.rmtree(kept)
    room.answer = answer
    room.began = True


def _check_lines(room: Room) -> None:
    """Every line of the metrics is whole."""
    metrics = room.folder / "disk" / "run" / "metrics.jsonl"
    if not metrics.is_file():
        return
    text = metrics.read_text()
    if text and not text.endswith("\n"):
        room.flag("wrong", "the last line of metrics.jsonl is not whole")
    for line in text.splitlines():
        json.loads(line)


def _overwrite(free_kib: int, room: Room) -> None:
    """The old run stays where the new one does not fit beside it."""
    old = fixtures.whole(1)
    size = sum(path.stat().st_size // 4096 * 4 + 8 for path in old.rglob("*"))
    with disks.small_disk(room.folder / "disk", f"size={size + free_kib}k") as disk:
        fill = partial(shutil.copytree, old, room.folder / "disk" / "run")
        args = [*LONG[:-1], "--train.out=disk/run", "--train.overwrite"]
        answer = room.train(*args, patch=partial(all_of, disk.enter, fill))
        kept = room.tmp / "kept"
        disk.copy_to(kept)
    (room.folder / "disk").rmdir()
    whole = [path for path in kept.rglob("weights.pt") if path.is_file()]
    begun = kept / "run" / "metrics.jsonl"
    if not whole and not (begun.is_file() and '"step": 1' in begun.read_text()):
        room.flag("lost", "neither the old run nor a new one is there")
    if not_finite(kept / "run"):
        room.flag("wrong", "not finite")
    shutil.rmtree(kept)
    room.answer = answer


def _read_only(room: Room) -> None:
    with disks.small_disk(room.folder / "disk", "size=1m") as disk:
        disk.remount("ro")
        room.train("--train.out=disk/run", patch=disk.enter)
    (room.folder / "disk").rmdir()
