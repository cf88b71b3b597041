"""What many cases begin with, made once: token files, a run that was killed, the run that was not.

A run here has 8 steps and a checkpoint after every 2 of them. `killed(ranks)` was killed in step 7
and has those of 2, 4 and 6; `whole(ranks)` came to its end. Whatever goes on from the first must
end bit for bit as the second.
"""

import atexit
import functools
import json
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from . import forks
from .cases import BASE, Room

T = TypeVar("T")

# steps of the learning-rate schedule, and all that makes a result
LONG = (
    "--train.steps=8",
    "--train.log_every=1",
    "--checkpoint.every=2",
    "--checkpoint.keep=9",
    "--model.dropout=0.1",
    "--train.out=run",
)
RESUME = (*LONG, "--checkpoint.resume")
KILLED_IN_STEP = 7

_lock = threading.RLock()


def once(make: Callable[..., T]) -> Callable[..., T]:
    """A function whose results are kept, also where several threads ask for them at once."""
    kept = functools.cache(make)

    @functools.wraps(make)
    def locked(*args: Any) -> T:
        with _lock:
            return kept(*args)

    return locked


def one_at_a_time() -> threading.RLock:
    """A lock for what two threads may not do at once."""
    return _lock


@once
def place() -> Path:
    """A folder that goes with this process."""
    folder = Path(tempfile.mkdtemp(prefix="labcode-faults-fixtures-"))
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # not a fork of it
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


@once
def cache() -> Path:
    """A folder with the token files of the course's text."""
    folder = place() / "cache"
    done = forks.train(
        [*BASE, f"--data.cache_dir={folder}", "--train.out=run"], cwd=made("first"), timeout_s=300
    )
    assert done.codes == [0], done.err
    return folder


def made(name: str) -> Path:
    """A new folder for a fixture."""
    folder = place() / name
    folder.mkdir()
    return folder


@once
def whole(ranks: int = 1) -> Path:
    """The folder `run` of a training that came to its end."""
    folder = made(f"whole-{ranks}")
    done = forks.train(
        [*BASE, f"--data.cache_dir={cache()}", *LONG], cwd=folder, ranks=ranks, timeout_s=300
    )
    assert set(done.codes) == {0}, done.err
    return folder / "run"


@once
def killed(ranks: int = 1) -> Path:
    """The folder `run` of a training that was killed in step 7."""
    folder = made(f"killed-{ranks}")
    done = forks.train(
        [*BASE, f"--data.cache_dir={cache()}", *LONG],
        cwd=folder,
        ranks=ranks,
        timeout_s=300,
        patch=functools.partial(die_in_step, KILLED_IN_STEP),
    )
    assert set(done.codes) == {-signal.SIGKILL}, done.err
    return folder / "run"


def die_in_step(step: int) -> None:
    """A patch: SIGKILL in the optimizer's step of that number."""
    in_step(step, functools.partial(os.kill, os.getpid(), signal.SIGKILL))


def in_step(step: int, act: Callable[[], object], *, before: bool = True) -> None:
    """A patch: do something in the optimizer's step of that number, counted from 1."""
    import torch

    original = torch.optim.AdamW.step
    steps = 0

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == step and before:
            act()
        result = original(self, *args, **options)
        if steps == step and not before:
            act()
        return result

    torch.optim.AdamW.step = counted  # pyright: ignore


def put_killed_run(folder: Path, ranks: int = 1) -> Path:
    """A copy of `killed(ranks)` at FOLDER/run."""
    shutil.copytree(killed(ranks), folder / "run", symlinks=True)
    return folder / "run"


def put_finished_run(folder: Path, name: str = "run") -> Path:
    """A copy of `whole(1)` at FOLDER/NAME."""
    shutil.copytree(whole(1), folder / name)
    return folder / name


def compare_with_whole(room: Room, run: Path, ranks: int, *, after_step: int = 0) -> None:
    """Flag a run of the same settings that is not bit for bit the whole one.

    Args:
        room: Folder of the case.
        run: The folder of the run.
        ranks: How many it has.
        after_step: Losses up to here are not compared.
    """
    difference = differs(run, whole(ranks), after_step)
    if difference:
        room.flag("wrong", difference)


def differs(run: Path, reference: Path, after_step: int = 0) -> str:
    """Where the weights or losses of two runs differ; empty if they are the same."""
    import torch

    if not (run / "weights.pt").is_file():
        return "there is no weights.pt"
    found = torch.load(run / "weights.pt", weights_only=True)
    wanted = torch.load(reference / "weights.pt", weights_only=True)
    for name, tensor in wanted.items():
        if name not in found or not torch.equal(found[name], tensor):
            return f"weights differ at {name}"
    losses = losses_of(run)
    for step, wanted_losses in losses_of(reference).items():
        if step > after_step and losses.get(step) != wanted_losses:
            return f"step {step} has {losses.get(step)}, not {wanted_losses}"
    return ""


def losses_of(run: Path) -> dict[int, dict[str, float]]:
    """What was logged of each step and does not depend on the clock."""
    losses: dict[int, dict[str, float]] = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        found = {name: row[name] for name in ("loss", "val_loss", "grad_norm", "lr") if name in row}
        if found:
            losses.setdefault(row["step"], {}).update(found)
    return losses
