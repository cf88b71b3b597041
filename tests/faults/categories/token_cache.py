"""The files of tokens in the cache: cut, zeroed, of another text; made anew or refused."""

import json
import os
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from labcode.train.chaos.damage import append, cut, fill, flip, folder_instead, loop, noise, write

from .. import fixtures, forks
from ..cases import BASE, EITHER, REFUSED, TRAINS, Case, Room

BPE = ("--data.tokenizer=bpe", "--data.bpe_vocab_size=300")
TEXT = "to be or not to be, that is the question\n" * 200
CACHE = "--data.cache_dir=cache"

Damage = Callable[[Path], object]


@fixtures.once
def _prepared(kind: str) -> Path:
    """A folder with a text, its token files in `cache` and a run on them."""
    folder = fixtures.made(f"tokens-{kind}")
    (folder / "mine.txt").write_text(TEXT)
    done = forks.train([*BASE, *_words(kind)], cwd=folder, timeout_s=300)
    assert done.codes == [0], done.err
    return folder


def _words(kind: str) -> list[str]:
    words = ["--data.path=mine.txt", CACHE, "--train.out=out", "--train.log_every=1"]
    return [*words, *BPE] if kind == "bpe" else words


def cases(rng: random.Random) -> list[Case]:
    made = []
    for kind in ("char", "bpe"):
        for suffix in ("bin", "json"):
            for what, damage in _damages(rng).items():
                made.append(_case(f"{kind}: {suffix} {what}", kind, partial(_at, suffix, damage)))
        for what, change in _descriptions().items():
            made.append(_case(f"{kind}: {what}", kind, partial(_at, "json", change)))
        made.append(
            _case(f"{kind}: the lock is a folder", kind, partial(_at, "lock", folder_instead))
        )
    for what, (path, prepare, answer) in PLACES.items():
        words = [f"--data.cache_dir={path}", "--train.out=out"]
        names = [path or "cache_dir", "cache"]
        made.append(Case(what, words, names, answer, prepare=prepare, replaced=["cache", "out"]))
    return made


def _case(what: str, kind: str, damage: Damage) -> Case:
    return Case(
        what,
        _words(kind),
        ["cache", ".bin", ".json", ".lock"],
        EITHER,
        prepare=partial(_prepare, kind, damage),
        act=partial(_train_and_compare, kind),
        replaced=["cache"],
    )


def _prepare(kind: str, damage: Damage, folder: Path) -> None:
    source = _prepared(kind)
    shutil.copy(source / "mine.txt", folder)
    shutil.copytree(source / "cache", folder / "cache")
    damage(folder / "cache")


def _train_and_compare(kind: str, room: Room) -> None:
    # it may make them anew even if it is refused later
    room.began = True
    done = room.train(*_words(kind))
    if set(done.codes) == {0}:
        difference = fixtures.differs(room.folder / "out", _prepared(kind) / "out")
        if difference:
            room.flag("wrong", difference)
    elif (room.folder / "out").exists():
        room.flag("left behind", "out")


def _at(suffix: str, damage: Damage, cache: Path) -> None:
    (path,) = cache.glob(f"*.{suffix}")
    damage(path)


def _damages(rng: random.Random) -> dict[str, Damage]:
    return {
        "removed": Path.unlink,
        "empty": partial(write, b""),
        "cut in half": partial(cut, 0.5),
        "one byte short": partial(cut, -1),
        "one byte long": append,
        "zeroed": partial(fill, b"\0"),
        "all 0xff": partial(fill, b"\xff"),
        "noise": partial(noise, rng.random()),
        "a folder": folder_instead,
        "a link to itself": loop,
        "with a bit flipped": partial(flip, rng.random()),
        "with a bit flipped elsewhere": partial(flip, rng.random()),
    }


def _descriptions() -> dict[str, Damage]:
    """The description, changed in one place."""
    changes: dict[str, Damage] = {}
    values = {
        "dtype": ["<u4", "<i2", "object", "x", None],
        "num_tokens": [0, -1, "many"],
        "tokenizer": [None, {"kind": "char", "characters": "ab"}, {"kind": "other"}],
        "text_sha256": ["0" * 64],
        "vocab_size": [3],
        "format": [99],
    }
    for key, options in values.items():
        for value in options:
            changes[f"{key} is {value!r}"] = partial(_set, key, value)
    changes["a list"] = partial(write, b"[1]")
    return changes


def _set(key: str, value: object, path: Path) -> None:
    about = json.loads(path.read_text())
    about[key] = value
    path.write_text(json.dumps(about))


def _file(folder: Path) -> None:
    (folder / "cache").write_text("a file")


def _link(folder: Path) -> None:
    os.symlink("cache", folder / "cache")


Prepare = Callable[[Path], object] | None
PLACES: dict[str, tuple[str, Prepare, str]] = {
    "the cache is a file": ("cache", _file, REFUSED),
    "the cache is a link to itself": ("cache", _link, REFUSED),
    "the cache is below a file": ("cache/x", _file, REFUSED),
    "the cache is in /proc": ("/proc/cache", None, REFUSED),
    "the cache is /dev/null": ("/dev/null", None, REFUSED),
    "the cache has no name": ("", None, REFUSED),
    "the cache is deep": ("cache/a/b/c", None, TRAINS),
}
