"""The output folder: somebody else's, a link, this one, one that two runs want; and overwriting."""

import json
import os
import random
from functools import partial
from pathlib import Path

from .. import fixtures
from ..cases import EITHER, REFUSED, TRAINS, Case, Room, contents, stands
from ..forks import Done
from ..injection import at_step, during, fail, on_rank

OVERWRITE = "--train.overwrite"
RESUME = "--checkpoint.resume"
BUILD = ("labcode.run.run", "build")

# what makes a run impossible after the command line was read: arguments, patch, words of the line
IMPOSSIBLE = {
    "a batch larger than the data": (["--train.global_batch=1000000"], None, ["global_batch"]),
    "beta1 1.5": (["--optim.beta1=1.5"], None, ["beta1"]),
    "beta2 nan": (["--optim.beta2=nan"], None, ["beta2"]),
    "bucket_mb nan": (["--parallel.bucket_mb=nan"], None, ["bucket_mb"]),
    "val_fraction 0.99999": (["--data.val_fraction=0.99999"], None, ["val_fraction", "batch"]),
    "a model for no memory": (
        ["--model.hidden_size=100000000"],
        None,
        ["memory", "bytes", "hidden"],
    ),
    "no such text": (["--data.path=nowhere.txt"], None, ["nowhere.txt"]),
    "an empty path": (["--data.path="], None, ["path"]),
    "a grid that does not fit": (["--parallel.tp=3"], None, ["tp"]),
    "a negative seed": (["--train.seed=-1"], None, ["seed"]),
    "no memory": ([], partial(during, *BUILD, partial(fail, "MemoryError")), ["memory"]),
    "a full disk in set-up": (
        [],
        partial(during, *BUILD, partial(fail, "OSError", 28, "No space left on device")),
        ["no space left"],
    ),
    "Ctrl-C in set-up": (
        [],
        partial(during, *BUILD, partial(fail, "KeyboardInterrupt")),
        ["interrupted"],
    ),
    "an error in the first step": (
        [],
        partial(at_step, 1, partial(fail, "OSError", 5, "Input/output error", "tokens.bin")),
        ["tokens.bin"],
    ),
    "Ctrl-C in the first step": (
        [],
        partial(at_step, 1, partial(fail, "KeyboardInterrupt")),
        ["interrupted"],
    ),
    "a loss that is no number in the first step": (
        ["--optim.lr=1e38", "--optim.min_lr=1e38", "--optim.warmup_steps=0", "--train.steps=1"],
        None,
        ["lr", "finite", "nan", "inf"],
    ),
}

# the content of a config.json that is not that of a run here
FOREIGN_CONFIGS = {
    "empty": "{}",
    "of a model": json.dumps({"architectures": ["GPT2"], "model_type": "gpt2", "n_layer": 12}),
    "of a program": json.dumps({"name": "app", "version": "1.0", "scripts": {"build": "x"}}),
    "a list": "[1, 2]",
    "null": "null",
    "no JSON": "name = 'x'",
    "with a name": json.dumps({"name": "gpt_tiny"}),
    "with the same sections": json.dumps({"name": "x", "model": 3, "train": "y"}),
}


def cases(rng: random.Random) -> list[Case]:
    made = []
    for what, (args, patch, names) in IMPOSSIBLE.items():
        made.append(_overwriting(what, args, patch, names, ranks=1))
        if rng.random() < 0.7:
            made.append(_overwriting(what, args, patch, names, ranks=2))
    for what, text in FOREIGN_CONFIGS.items():
        for out in ("proj", "."):
            words = [f"--train.out={out}", rng.choice([OVERWRITE, OVERWRITE, RESUME])]
            prepare = partial(_project, out, text)
            made.append(
                Case(f"out={out}, a config.json {what}, {words[1]}", words, prepare=prepare)
            )
    for what, (out, prepare, answer, names) in _places().items():
        for extra in ([], [OVERWRITE], [RESUME]):
            if extra and out == "/":
                continue  # a mistake here would cost more than a test
            words = [f"--train.out={out}", *extra]
            replaced = [] if answer == REFUSED else ["run", "out", "elsewhere"]
            expected = answer if not extra or answer == REFUSED else EITHER
            text = f"out is {what} {' '.join(extra)}"
            made.append(Case(text, words, names, expected, prepare=prepare, replaced=replaced))
    for taken in (998, 999, 1200):
        made.append(Case(f"{taken} runs are there", answer=TRAINS, prepare=partial(_runs, taken)))
    for count in (2, 2, 4):
        made.append(Case(f"{count} runs at once", answer=TRAINS, act=partial(_at_once, count, "")))
        made.append(
            Case(
                f"{count} runs at once in one folder",
                answer=EITHER,
                act=partial(_at_once, count, "out"),
            )
        )
    return made


def _overwriting(what: str, args: list[str], patch, names: list[str], ranks: int) -> Case:
    """An old run must be as it was after a command that may not or cannot replace it."""
    if patch is not None and ranks > 1:
        patch = partial(on_rank, 1, patch)
    return Case(
        f"{OVERWRITE} and {what} on {ranks} ranks",
        ["--train.out=run", OVERWRITE, *args],
        names,
        ranks=ranks,
        prepare=fixtures.put_finished_run,
        patch=patch,
        act=partial(_refused_and_mended, args, patch),
    )


def _refused_and_mended(args: list[str], patch, room: Room) -> None:
    before = contents(room.folder)
    room.train("--train.out=run", OVERWRITE, *args, patch=patch)
    after = contents(room.folder)
    changed = [path for path in before if not stands(path, before[path], after)]
    new = [path for path in after if path not in before]
    assert room.answer is not None
    has_begun = any("after step" in text for text in room.answer.err)
    if changed:
        room.flag("lost", f"gone or changed: {', '.join(changed[:4])}")
    if new and not has_begun:
        room.flag("left behind", f"{', '.join(new[:4])}")


def _project(out: str, text: str, folder: Path) -> None:
    """Somebody's work with a config.json."""
    place = folder / out
    (place / "src").mkdir(parents=True)
    (place / "src" / "main.c").write_text("int main(void) { return 0; }")
    (place / "thesis.txt").write_text("years of work")
    (place / "config.json").write_text(text)


def _places() -> dict[str, tuple]:
    """What `out` may be: the word, what is prepared, the answer, words of the line."""
    return {
        "a finished run": ("run", fixtures.put_finished_run, EITHER, ["run"]),
        "a finished run with a slash": ("run/", fixtures.put_finished_run, EITHER, ["run"]),
        "a run by a detour": ("run/../run", fixtures.put_finished_run, EITHER, ["run"]),
        "this folder": (".", _thesis, REFUSED, ["."]),
        "the folder above": ("..", _thesis, REFUSED, [".."]),
        "the root": ("/", _thesis, REFUSED, ["/"]),
        "this folder, a run": (".", _run_here, REFUSED, ["."]),
        "a folder of others": ("mine", partial(_thesis, name="mine/thesis.txt"), REFUSED, ["mine"]),
        "an empty folder": ("out", partial(_folder, "out"), EITHER, ["out"]),
        "a file": ("file", partial(_thesis, name="file"), REFUSED, ["file"]),
        "below a file": ("file/out", partial(_thesis, name="file"), REFUSED, ["file"]),
        "a link to a run": ("link", _link_to_run, REFUSED, ["link"]),
        "a link to a folder of others": ("link", _link_to_thesis, REFUSED, ["link"]),
        "a link to nothing": ("link", partial(_link, "nowhere"), REFUSED, ["link"]),
        "a link to itself": ("link", partial(_link, "link"), REFUSED, ["link"]),
        "a pipe": ("pipe", _pipe, REFUSED, ["pipe"]),
        "a device": ("/dev/null", None, REFUSED, ["/dev/null"]),
        "in /proc": ("/proc/out", None, REFUSED, ["/proc/out"]),
        "too long": ("x" * 300, None, REFUSED, ["name too long", "xxx"]),
        "empty": ("", None, REFUSED, ["out"]),
        "inside a run": ("run/checkpoints", fixtures.put_finished_run, REFUSED, ["checkpoints"]),
    }


def _thesis(folder: Path, name: str = "thesis.txt") -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("years of work")


def _folder(name: str, folder: Path) -> None:
    (folder / name).mkdir()


def _run_here(folder: Path) -> None:
    fixtures.put_finished_run(folder)
    for path in (folder / "run").iterdir():
        path.rename(folder / path.name)
    (folder / "run").rmdir()


def _link(target: str, folder: Path) -> None:
    (folder / "link").symlink_to(target)


def _link_to_run(folder: Path) -> None:
    fixtures.put_finished_run(folder)
    _link("run", folder)


def _link_to_thesis(folder: Path) -> None:
    _thesis(folder, "mine/thesis.txt")
    _link("mine", folder)


def _pipe(folder: Path) -> None:
    os.mkfifo(folder / "pipe")


def _runs(count: int, folder: Path) -> None:
    for number in range(1, count + 1):
        (folder / "runs" / f"gpt_tiny-{number:03d}").mkdir(parents=True)


def _at_once(count: int, out: str, room: Room) -> None:
    """Several commands at the same time: each has a folder, or says that it cannot have it."""
    args = [f"--train.out={out}"] if out else []
    runs = [room.start(*args) for _ in range(count)]
    found = [run.wait() for run in runs]
    trained = [done for done in found if set(done.codes) == {0}]
    if len(trained) != (1 if out else count):
        room.flag("wrong", f"{len(trained)} of {count} trained")
    folders = [room.folder / out] if out else list((room.folder / "runs").iterdir())
    for folder in folders:
        if not (folder / "weights.pt").is_file():
            room.flag("wrong", f"{folder.name} has no weights")
    refused = [done for done in found if done not in trained]
    room.answer = _worst(refused) or found[0]


def _worst(refused: list[Done]) -> Done | None:
    for done in refused:
        if done.hung or done.tracebacks or len(done.errors) != 1:
            return done
    return refused[0] if refused else None
