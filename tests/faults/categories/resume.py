"""The folder of a run to be resumed: odd JSON, strange names, another text, grid or model."""

import errno
import json
import os
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from .. import fixtures
from ..cases import EITHER, REFUSED, TRAINS, Case, Room
from ..fixtures import RESUME
from ..injection import unreadable
from .damaged_checkpoints import NEWEST

ODD = [None, [], {}, "", "x", -1, 0, 3.5, True, [1], {"a": 1}, 10**30]
KEYS = ("step", "config", "grid", "files", "data")
# lines of metrics.jsonl
ROWS = [
    "null",
    "[]",
    "3",
    '"step"',
    "{}",
    '{"loss": 1.0}',
    '{"step": null, "loss": 1.0}',
    '{"step": "3", "loss": 1.0}',
    '{"step": [3]}',
    '{"step": 1e400, "loss": NaN}',
    '{"step": 3, "loss"',
    "\x00\x00\x00",
    "\ufeff{}",
    "[" * 5000,
]


def cases(rng: random.Random) -> list[Case]:
    made = []
    for key in KEYS:
        for value in rng.sample(ODD, 6):
            made.append(_same(f"run.json: {key} is {value!r}", partial(_set, key, value)))
    for text in ("null", "[]", "3", '"x"', "{}", "[" * 5000, '{"step": 6}', "\ufeff{}"):
        made.append(_same(f"run.json is {text[:10]}", partial(_text, "run.json", text)))
    for row in ROWS:
        place = rng.choice(["first", "last", "alone"])
        made.append(_same(f"metrics.jsonl: {place} {row[:20]!r}", partial(_row, place, row)))
    for what, change in CHANGES.items():
        made.append(_same(what, change))
    for what, (args, names) in ARGUMENTS.items():
        made.append(_other(what, args, names))
    for what, (args, answer) in ALLOWED.items():
        made.append(_other(what, args, [], answer))
    made += [_grid_of(2, TRAINS), _grid_of(3, REFUSED)]  # 3 do not divide the batch
    made += [_text_changed(what) for what in TEXTS]
    for what, change in BEGINNINGS.items():
        made.append(_begin(what, change))
    made.append(Case("two jobs at once", answer=EITHER, prepare=_put, act=_two, replaced=["run"]))
    made.append(
        Case(
            "two jobs at once, 2 ranks",
            answer=EITHER,
            ranks=2,
            prepare=_put2,
            act=_two,
            replaced=["run"],
        )
    )
    for number in (errno.EIO, errno.EACCES, errno.ESTALE):
        for text in ("run.json", "tensors.json", ".bin", "metrics.jsonl", NEWEST):
            made.append(_unreadable(number, text))
    return made


def _put(folder: Path) -> None:
    fixtures.put_killed_run(folder)


def _put2(folder: Path) -> None:
    fixtures.put_killed_run(folder, 2)


def _same(what: str, change: Callable[[Path], object]) -> Case:
    """Run the same command on a changed folder: refused, or resumed bit for bit."""
    names = ["run/", "run:", "run.json", "metrics", "checkpoint", "step-", "config"]
    return Case(
        what,
        names=names,
        answer=EITHER,
        prepare=partial(_prepare, change),
        act=_resume,
        replaced=["run"],
    )


def _prepare(change: Callable[[Path], object], folder: Path) -> None:
    fixtures.put_killed_run(folder)
    change(folder / "run")


def _resume(room: Room) -> None:
    done = room.train(*RESUME, patch=room.case.patch)
    if set(done.codes) == {0}:
        # rows of earlier steps are as the case left them
        begins = room.case.what.startswith("begins")
        fixtures.compare_with_whole(
            room, room.folder / "run", room.case.ranks, after_step=0 if begins else 6
        )


def _other(what: str, args: list[str], names: list[str], answer: str = REFUSED) -> Case:
    """Another command on the folder as it is."""
    return Case(
        what,
        [*RESUME, *args],
        names,
        answer,
        prepare=_put,
        replaced=["run"] if answer != REFUSED else [],
    )


def _set(key: str, value: object, run: Path) -> None:
    path = run / "checkpoints" / NEWEST / "run.json"
    about = json.loads(path.read_text())
    about[key] = value
    path.write_text(json.dumps(about))


def _text(name: str, text: str, run: Path) -> None:
    folder = run / "checkpoints" / NEWEST if name == "run.json" else run
    (folder / name).write_text(text)


def _row(place: str, row: str, run: Path) -> None:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines()
    lines = {"first": [row, *lines], "last": [*lines, row], "alone": [row]}[place]
    path.write_text("\n".join(lines) + "\n")


def _rename(old: str, new: str, run: Path) -> None:
    (run / old).rename(run / new)


def _moved_and_linked(run: Path) -> None:
    (run / "checkpoints").rename(run / "elsewhere")
    (run / "checkpoints").symlink_to("elsewhere")


def _newest_linked(run: Path) -> None:
    (run / "checkpoints" / NEWEST).rename(run / "there")
    (run / "checkpoints" / NEWEST).symlink_to("../there")


def _remove(name: str, run: Path) -> None:
    path = run / name
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def _make(name: str, run: Path) -> None:
    (run / name).mkdir(parents=True)


def _touch(name: str, run: Path) -> None:
    (run / name).write_text("")


def _nothing(run: Path) -> None:
    """Leave the folder as it is."""


def _lock_of_a_dead_one(run: Path) -> None:
    for name in (".lock", "lock", "run.lock", "train.lock"):
        (run / name).write_text("999999 n1\n")


CHANGES: dict[str, Callable[[Path], object]] = {
    "nothing changed": _nothing,
    "config.json empty": partial(_text, "config.json", ""),
    "config.json of somebody else": partial(_text, "config.json", '{"scripts": {}}'),
    "config.json is null": partial(_text, "config.json", "null"),
    "no config.json": partial(_remove, "config.json"),
    "no metrics.jsonl": partial(_remove, "metrics.jsonl"),
    "metrics.jsonl empty": partial(_text, "metrics.jsonl", ""),
    "no tensorboard": partial(_remove, "tensorboard"),
    "a folder named metrics.jsonl": lambda run: (
        _remove("metrics.jsonl", run),
        _make("metrics.jsonl", run),
    ),
    "a folder named weights.pt": partial(_make, "weights.pt"),
    "a file named tensorboard": lambda run: (
        _remove("tensorboard", run),
        _touch("tensorboard", run),
    ),
    "checkpoints are elsewhere, with a link": _moved_and_linked,
    "the newest is elsewhere, with a link": _newest_linked,
    "an empty step-00000007": partial(_make, "checkpoints/step-00000007"),
    "an empty step-99999999": partial(_make, "checkpoints/step-99999999"),
    "a folder step-abc": partial(_make, "checkpoints/step-abc"),
    "a folder step-7": partial(_make, "checkpoints/step-7"),
    "a file step-00000007": partial(_touch, "checkpoints/step-00000007"),
    "a file named notes.txt": partial(_touch, "checkpoints/notes.txt"),
    "the newest under another name": partial(
        _rename, f"checkpoints/{NEWEST}", "checkpoints/step-00000007"
    ),
    "the newest gone": partial(_remove, f"checkpoints/{NEWEST}"),
    "a lock of one that died": _lock_of_a_dead_one,
    "an unfinished weights.pt": partial(_touch, "weights.pt.0123456789abcdef.partial"),
}

# other commands: arguments, words of the line
ARGUMENTS: dict[str, tuple[list[str], list[str]]] = {
    "another hidden size": (["--model.hidden_size=32"], ["hidden_size"]),
    "more layers": (["--model.num_layers=3"], ["num_layers"]),
    "another dropout": (["--model.dropout=0.2"], ["dropout"]),
    "another batch": (["--train.global_batch=8"], ["global_batch"]),
    "another seed": (["--train.seed=1"], ["seed"]),
    "another dtype": (["--train.dtype=float64"], ["dtype"]),
    "another context": (["--model.context_length=8"], ["context_length"]),
    "learned positions": (["--model.positions=learned"], ["positions"]),
    "untied embeddings": (["--model.no-tie_embeddings"], ["tie_embeddings"]),
    "another tokenizer": (["--data.tokenizer=bpe"], ["tokenizer"]),
    "and overwrite": (["--train.overwrite"], ["overwrite"]),
    "a folder that is a file": (["--train.out=run/config.json"], ["config.json"]),
    "no folder": (["--train.out=None"], ["train.out"]),
}
ALLOWED: dict[str, tuple[list[str], str]] = {
    "more steps": (["--train.steps=10"], TRAINS),
    "another learning rate": (["--optim.lr=0.001"], TRAINS),
    "another interval": (["--checkpoint.every=1"], TRAINS),
    "keep one": (["--checkpoint.keep=1"], TRAINS),
    "fewer steps than done": (["--train.steps=3"], EITHER),
    "no sample": (["--train.sample_tokens=0"], TRAINS),
    "micro-batches of one": (["--train.micro_batch=1"], TRAINS),
    "a folder that is not there": (["--train.out=new"], TRAINS),
}
TEXTS = ("longer", "other characters", "same size", "gone", "empty")


def _grid_of(ranks: int, answer: str) -> Case:
    return Case(
        f"on {ranks} ranks in place of 1",
        RESUME,
        [] if answer == TRAINS else ["global_batch"],
        answer,
        ranks=ranks,
        prepare=_put,
        replaced=["run"] if answer == TRAINS else [],
    )


def _text_changed(what: str) -> Case:
    """Another text under the same path."""
    text = "--data.path=mine.txt"
    return Case(
        f"the text is {what}",
        [*RESUME, text],
        ["mine.txt", "text", "data"],
        act=partial(_change_text, what),
    )


def _change_text(what: str, room: Room) -> None:
    text = room.folder / "mine.txt"
    words = "to be or not to be, that is the question\n" * 200
    text.write_text(words)
    room.train(*RESUME, "--data.path=mine.txt", "--train.steps=4")
    new = {
        "longer": words + "more\n",
        "other characters": words + "xyz?!\n",
        "same size": words.replace("q", "z"),
        "gone": "",
        "empty": "",
    }[what]
    text.write_text(new)
    if what == "gone":
        text.unlink()
    kept = sorted(path.name for path in (room.folder / "run" / "checkpoints").iterdir())
    room.train(*RESUME, "--data.path=mine.txt")
    if sorted(path.name for path in (room.folder / "run" / "checkpoints").iterdir()) != kept:
        room.flag("lost", "checkpoints changed")


BEGINNINGS: dict[str, Callable[[Path], object]] = {
    "nothing": _nothing,
    "an empty folder": partial(_make, "run"),
    "an empty folder of checkpoints": partial(_make, "run/checkpoints"),
    "what a kill left before config.json": lambda folder: (
        _make("run", folder),
        _touch("run/config.json.0123456789abcdef0123456789abcdef.partial", folder),
    ),
}


def _begin(what: str, change: Callable[[Path], object]) -> Case:
    """Where a run has not begun, the same command begins it: a job that is queued again."""
    return Case(f"begins in {what}", answer=TRAINS, prepare=change, act=_resume, replaced=["run"])


def _two(room: Room) -> None:
    """One of them goes on, the other says in a line that the folder is taken."""
    first = room.start(*RESUME)
    second = room.start(*RESUME)
    ends = [first.wait(), second.wait()]
    went_on = [done for done in ends if set(done.codes) == {0}]
    refused = [done for done in ends if set(done.codes) != {0}]
    if not went_on:
        room.flag("wrong", "neither went on")
    else:
        fixtures.compare_with_whole(room, room.folder / "run", room.case.ranks)
    room.began = True
    room.answer = refused[0] if refused else ends[0]


def _unreadable(number: int, text: str) -> Case:
    """A disk that fails, a file that may not be read, a mount that is stale."""
    name = errno.errorcode[number]
    return Case(
        f"{name} at every {text}",
        names=["run", os.strerror(number)],
        answer=EITHER,
        prepare=_put,
        patch=partial(unreadable, text, number),
        act=_resume,
        replaced=["run"],
    )
