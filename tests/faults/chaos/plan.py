"""Which faults a training meets: drawn from a seed, the same for the same seed."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from labcode.runtime import suggest

# kind: what is done
KINDS = {
    "kill": "SIGKILL to a rank",
    "kill_all": "SIGKILL to all ranks at once",
    "kill_saving": "SIGKILL to a rank that writes a checkpoint",
    "kill_starting": "SIGKILL to a rank, and to one that starts after it",
    "kill_torchrun": "SIGKILL to torchrun",
    "hang": "SIGSTOP to a rank, until the others have waited in vain",
    "starve": "SIGSTOP and SIGCONT to a rank, in bursts",
    "ask_usr1": "SIGUSR1 to a rank: a checkpoint is asked for",
    "ask_term": "SIGTERM to torchrun: a checkpoint is asked for",
    "truncate": "the newest checkpoint is cut short while the run is down",
    "corrupt": "a bit of the newest checkpoint is flipped while the run is down",
    "full_disk": "the disk is full when a checkpoint is written",
    "quota": "no file may grow beyond a limit (RLIMIT_FSIZE)",
    "cut": "the network cable of a node is pulled, until its ranks have waited in vain",
}
DAMAGES = ("truncate", "corrupt")
NEEDS_DISK = ("full_disk",)
NEEDS_TORCHRUN = ("kill_starting", "kill_torchrun", "ask_term")
NEEDS_CLUSTER = ("cut",)


@dataclass(frozen=True)
class Fault:
    """One fault.

    Args:
        number: Counted from 1.
        kind: One of `KINDS`.
        after_steps: It comes when so many steps have been done since the run began or resumed.
        rank: Who is hit, where one is.
        draw: From 0 to 1: a place in a file, or a moment.
    """

    number: int
    kind: str
    after_steps: int
    rank: int
    draw: float


def check_kinds(kinds: Sequence[str]) -> None:
    """Raises ValueError if one of them is not of `KINDS`."""
    for kind in kinds:
        if kind not in KINDS:
            raise ValueError(suggest.unknown("kind of fault", kind, KINDS))


def plan(seed: int, count: int, *, kinds: Sequence[str], every: int, ranks: int) -> list[Fault]:
    """Draw faults: every kind equally often, in a random order.

    Args:
        seed: The same seed gives the same faults.
        count: How many.
        kinds: Some of `KINDS`.
        every: Steps between checkpoints: a fault comes within twice as many.
        ranks: Number of ranks of the job.

    Raises:
        ValueError: There is no such kind.
    """
    check_kinds(kinds)
    rng = random.Random(seed)
    faults: list[Fault] = []
    while len(faults) < count:
        for kind in rng.sample(list(kinds), len(kinds)):
            number = len(faults) + 1
            after_steps = rng.randint(1, 2 * every)
            faults.append(Fault(number, kind, after_steps, rng.randrange(ranks), rng.random()))
    return faults[:count]
