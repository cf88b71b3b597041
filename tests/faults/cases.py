"""What a case of the trial is, and the room in which it is played.

A category is a module with `cases(rng) -> list[Case]`. Most cases are one line of a table:
arguments, files to prepare, and what must be said. A case that needs more than one training has an
`act`.
"""

import hashlib
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import forks
from .forks import Done, Patch, Running

# A training that takes a tenth of a second.
BASE = (
    "gpt_tiny",
    "--model.num_layers=2",
    "--model.hidden_size=16",
    "--model.num_heads=2",
    "--model.context_length=16",
    "--train.steps=2",
    "--train.global_batch=4",
    "--train.eval_batches=1",
    "--train.sample_tokens=4",
)
WEATHER = (
    "vit_tiny",
    "--model.num_layers=1",
    "--model.hidden_size=16",
    "--model.num_heads=2",
    "--train.steps=2",
    "--train.global_batch=2",
    "--train.eval_batches=1",
)

REFUSED = "refused"  # must be answered in one line
TRAINS = "trains"  # must train, or go on
EITHER = "either"  # may do either


@dataclass(frozen=True)
class Case:
    """One fault.

    Args:
        what: In words, for the reader of the results.
        args: What is added to `base` on the command line.
        names: The line must contain one of them: the field or the file that is wrong.
        answer: REFUSED, TRAINS or EITHER.
        ranks: How many processes.
        prepare: Called with the case's folder, in which the training runs: writes files.
        patch: Called in each rank before it trains.
        act: What happens, where it is more than one training.
        replaced: Paths in the folder that a training which begins may change, by their beginning.
        base: The command.
    """

    what: str
    args: Sequence[str] = ()
    names: Sequence[str] = ()
    answer: str = REFUSED
    ranks: int = 1
    prepare: "Callable[[Path], object] | None" = None
    patch: "Patch | None" = None
    act: "Callable[[Room], object] | None" = None
    replaced: Sequence[str] = ()
    base: Sequence[str] = BASE


@dataclass
class Room:
    """Where a case is played.

    Args:
        case: The case.
        folder: Its working folder, empty before `prepare`.
        tmp: What its processes use for temporary files.
        cache: Token files, shared by all cases.
        rng: Random numbers of this case.
        flags: What was found wrong: "lost", "wrong", "left behind", "unclear", each with a reason.
        answer: The training whose words are judged.
        began: A training in it made steps, so that files of `replaced` may change.
        commands: All command lines, for the record.
    """

    case: Case
    folder: Path
    tmp: Path
    cache: Path
    rng: random.Random
    flags: list[tuple[str, str]] = field(default_factory=list)
    answer: Done | None = None
    began: bool = False
    commands: list[str] = field(default_factory=list)

    def flag(self, kind: str, why: str) -> None:
        """Note something that must not be."""
        self.flags.append((kind, why))

    def start(
        self,
        *args: str,
        ranks: int | None = None,
        patch: Patch | None = None,
        base: Sequence[str] | None = None,
    ) -> Running:
        """Begin a training in the folder."""
        base = self.case.base if base is None else base
        if base[0].startswith("gpt") and not any("data.cache_dir" in word for word in args):
            args = (f"--data.cache_dir={self.cache}", *args)
        ranks = ranks or self.case.ranks
        self.commands.append(f"{ranks} x {' '.join(map(str, args))}")
        return forks.start(
            [*base, *args],
            cwd=self.folder,
            ranks=ranks,
            env={"TMPDIR": str(self.tmp)},
            patch=patch,
        )

    def train(
        self,
        *args: str,
        ranks: int | None = None,
        patch: Patch | None = None,
        base: Sequence[str] | None = None,
    ) -> Done:
        """A training from its beginning to its end; the last one is what is judged."""
        with self.start(*args, ranks=ranks, patch=patch, base=base) as running:
            done = running.wait()
        self.answer = done
        return done

    def play(self) -> None:
        """Do what the case says."""
        case = self.case
        if case.act is not None:
            case.act(self)
            return
        self.train(*case.args, patch=case.patch)


def contents(folder: Path) -> dict[str, str]:
    """Every path below a folder with a digest of what is there."""
    found = {}
    for path in sorted(folder.rglob("*")):
        found[str(path.relative_to(folder))] = _digest(path)
    return found


def stands(path: str, digest: str, after: dict[str, str]) -> bool:
    """Whether a file is as it was, in its place or in that of a run that was overwritten.

    Args:
        path: Path of the file, RUN/NAME.
        digest: What it was.
        after: `contents` of the folder now.
    """
    run, _, name = path.partition("/")
    for other in after:
        top, _, other_name = other.partition("/")
        is_run = top == run or top.startswith(f"{run}.old-")
        if is_run and other_name == name and after[other] == digest:
            return True
    return False


def _digest(path: Path) -> str:
    if path.is_symlink():
        return f"link to {os.readlink(path)}"
    if path.is_dir():
        return "folder"
    if not path.is_file():
        return "special"
    try:
        if path.stat().st_size > 2**26:
            return f"{path.stat().st_size} bytes"
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        return f"unreadable: {error.strerror}"
