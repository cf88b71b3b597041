"""SIGINT, SIGTERM and SIGUSR1 at any moment: in set-up, in a step, in a save, at the end."""

import random
import signal
import time
from functools import partial
from pathlib import Path

from .. import fixtures
from ..cases import EITHER, Case, Room, wait_until
from ..fixtures import RESUME
from ..injection import at_event, on_rank
from .kills import NEW, num_events

MANY = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
# signal, ranks, who gets it, how often: how many moments
BY_EVENT = {
    (signal.SIGTERM, 1, "all", 1): 8,
    (signal.SIGUSR1, 1, "all", 1): 6,
    (signal.SIGINT, 1, "all", 1): 8,
    (signal.SIGINT, 1, "all", 2): 3,
    (signal.SIGTERM, 2, "one", 1): 6,
    (signal.SIGUSR1, 2, "one", 1): 3,
    (signal.SIGTERM, 2, "all", 2): 4,
    (signal.SIGINT, 2, "all", 1): 6,
    (signal.SIGINT, 2, "all", 2): 2,
}
RANDOM_MOMENTS = 20
TWICE_S = 0.05


def cases(rng: random.Random) -> list[Case]:
    made = []
    for (number, ranks, who, times), count in BY_EVENT.items():
        for index in range(count):
            moment = (index + rng.random()) / count
            rank = rng.randrange(ranks)
            where = f"at {100 * moment:.1f} % of the events of rank {rank}"
            act = partial(_signal_at_event, number, rank, moment, who, times)
            made.append(_case(number, ranks, who, times, where, act))
    for _ in range(RANDOM_MOMENTS):
        number = rng.choice(MANY)
        ranks = rng.choice([1, 2])
        delay_s = rng.uniform(0.0, 1.0)
        act = partial(_signal_after, number, delay_s)
        made.append(_case(number, ranks, "all", 1, f"after {delay_s:.2f} s", act))
    return made


def _case(number: int, ranks: int, who: str, times: int, where: str, act) -> Case:
    name = signal.Signals(number).name
    often = "twice " if times == 2 else ""
    return Case(f"{name} {often}to {who} of {ranks}, {where}", answer=EITHER, ranks=ranks, act=act)


def _signal_at_event(
    number: int, rank: int, moment: float, who: str, times: int, room: Room
) -> None:
    event = max(1, round(moment * num_events(NEW, room.case.ranks, rank)))
    now = room.tmp / "now"
    patch = partial(on_rank, rank, partial(at_event, event, partial(_reach, str(now))))
    with room.start(*RESUME, patch=patch) as running:
        wait_until(lambda: now.exists() or not running.alive())
        targets = [rank] if who == "one" else range(room.case.ranks)
        for _ in range(times):
            for target in targets:
                running.signal(target, number)
            time.sleep(TWICE_S)
        room.answer = running.wait()
    now.unlink(missing_ok=True)
    _go_on(room, number)


def _reach(now: str) -> None:
    """Say that the event is reached, and give the signal time to arrive in it."""
    Path(now).touch()
    time.sleep(0.1)


def _signal_after(number: int, delay_s: float, room: Room) -> None:
    with room.start(*RESUME) as running:
        time.sleep(delay_s)
        for target in range(room.case.ranks):
            running.signal(target, number)
        room.answer = running.wait()
    _go_on(room, number)


def _go_on(room: Room, number: int) -> None:
    """What the signal left must go on to the same end, whatever it was."""
    answer = room.answer
    assert answer is not None
    run = room.folder / "run"
    text = "\n".join(answer.err)
    if set(answer.codes) == {0} and "stopped by" not in text and not (run / "weights.pt").exists():
        room.flag("wrong", "code 0, but the run is neither at its end nor stopped")
    if number != signal.SIGINT and "error: " in text:
        room.flag("wrong", "a signal is no error")
    done = room.train(*RESUME)
    room.answer = answer
    if set(done.codes) != {0}:
        room.flag("wrong", f"cannot resume: {done.errors or done.codes}")
    fixtures.compare_with_whole(room, run, room.case.ranks)
