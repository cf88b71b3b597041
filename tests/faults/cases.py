"""What a case of the trial is, and the room in which it is played.

A category is a module with `cases(rng) -> list[Case]`. Most cases are one line of a table:
arguments, files to prepare, and what must be said. A case that needs more than one training has an
`act`.
"""

import hashlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import forks
from .forks import Done, Env, Patch, Running

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
LIMIT_S = 30.0  # beyond what the work needs: after that a training hangs
WORK_S = 10.0
MOST_PATIENCE = 2.5  # times as long on a busy machine

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
        env: Environment variables, as for `forks.train`.
        prepare: Called with the case's folder, in which the training runs: writes files.
        patch: Called in each rank before it trains.
        act: What happens, where it is more than one training.
        replaced: Paths in the folder that a training which begins may change, by their beginning.
        base: The command.
        waits: It mostly sleeps: others run beside it.
        limit_s: Time after which it hangs; None is the rule for all.
    """

    what: str
    args: Sequence[str] = ()
    names: Sequence[str] = ()
    answer: str = REFUSED
    ranks: int = 1
    env: "Env | Sequence[Env] | None" = None
    prepare: "Callable[[Path], object] | None" = None
    patch: "Patch | None" = None
    act: "Callable[[Room], object] | None" = None
    replaced: Sequence[str] = ()
    base: Sequence[str] = BASE
    waits: bool = False
    limit_s: float | None = None


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
        env: Env | Sequence[Env] | None = None,
        patch: Patch | None = None,
        base: Sequence[str] | None = None,
        limit_s: float | None = None,
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
            env=self._environments(env, ranks),
            timeout_s=scaled(limit_s or self.case.limit_s or LIMIT_S + WORK_S),
            patch=patch,
        )

    def train(
        self,
        *args: str,
        ranks: int | None = None,
        env: Env | Sequence[Env] | None = None,
        patch: Patch | None = None,
        base: Sequence[str] | None = None,
        limit_s: float | None = None,
    ) -> Done:
        """A training from its beginning to its end; the last one is what is judged."""
        with self.start(
            *args, ranks=ranks, env=env, patch=patch, base=base, limit_s=limit_s
        ) as running:
            done = running.wait()
        self.answer = done
        return done

    def play(self) -> None:
        """Do what the case says."""
        case = self.case
        if case.act is not None:
            case.act(self)
            return
        self.train(*case.args, env=case.env, patch=case.patch)

    def _environments(self, env: Env | Sequence[Env] | None, ranks: int) -> list[Env]:
        own = {"TMPDIR": str(self.tmp)}
        if env is None:
            return [own] * ranks
        if isinstance(env, dict):
            return [own | env] * ranks
        return [own | dict(one) for one in env]  # pyright: ignore


def scaled(seconds: float) -> float:
    """A time limit for a machine that others use too."""
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    return seconds * min(MOST_PATIENCE, max(1.0, load))


def contents(folder: Path) -> dict[str, str]:
    """Every path below a folder with a digest of what is there."""
    found = {}
    for path in sorted(folder.rglob("*")):
        found[str(path.relative_to(folder))] = _digest(path)
    return found


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


def wait_until(condition: Callable[[], object], limit_s: float = 30.0) -> bool:
    """Whether something came true in time."""
    deadline = time.monotonic() + scaled(limit_s)
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def as_done(process: subprocess.Popen, limit_s: float) -> Done:
    """The end of a real process with pipes for stdout and stderr, as that of a fork.

    It was started with `start_new_session=True`.
    """
    started = time.monotonic()
    hung = False
    try:
        out, err = process.communicate(timeout=scaled(limit_s))
    except subprocess.TimeoutExpired:
        hung = True
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
    return Done(
        codes=[process.returncode],
        out=[out],
        err=[err],
        hung=hung,
        left=[],
        seconds=time.monotonic() - started,
    )
