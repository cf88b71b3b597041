"""SIGKILL at chosen moments of a run, then the same command again: it must go on bit for bit."""

import random
import signal
from functools import partial
from pathlib import Path

from .. import fixtures, forks, waiting
from ..cases import BASE, TRAINS, Case, Room, contents, stands
from ..fixtures import LONG, RESUME
from ..forks import Running
from ..injection import at_event, count_events, die, on_rank

PEERS_S = 0.3  # how soon torchrun tells the others
NEW = "new run"
RESUMED = "resumed run"
IN_BACKGROUND = "new run that saves in the background"
OVERWRITTEN = "run that replaces another"
# what is killed, on how many ranks: how many moments
PLANS = {
    (NEW, 1): 80,
    (NEW, 2): 40,
    (IN_BACKGROUND, 2): 20,
    (RESUMED, 1): 40,
    (RESUMED, 2): 15,
    (OVERWRITTEN, 1): 12,
}
EVENTS = 300  # about as many as the longest has; a number beyond the last one kills nothing


def cases(rng: random.Random) -> list[Case]:
    made = []
    for (what, ranks), count in PLANS.items():
        moments = _spread(rng, count)
        for moment in moments:
            rank = rng.randrange(ranks)
            made.append(
                Case(
                    f"{what}, rank {rank} of {ranks} killed at {100 * moment:.1f} % of its events",
                    answer=TRAINS,
                    ranks=ranks,
                    prepare=_prepare(what, ranks),
                    act=partial(_kill_and_go_on, what, rank, moment),
                    replaced=["run"],
                )
            )
    return made


def _spread(rng: random.Random, count: int) -> list[float]:
    """Parts of a run, evenly spread, each moved a little; the first twelve events are all there."""
    first = [event / EVENTS for event in range(1, 13)]
    rest = count - len(first)
    return first + [(number + rng.random()) / rest for number in range(rest)]


def _prepare(what: str, ranks: int):
    if what == RESUMED:
        return partial(fixtures.put_killed_run, ranks=ranks)
    if what == OVERWRITTEN:
        return _old_run
    return None


def _old_run(folder: Path) -> None:
    fixtures.put_finished_run(folder)
    (folder / "run" / "result.txt").write_text("the old run")


@fixtures.once
def num_events(what: str, ranks: int, rank: int) -> int:
    """How many events a rank has, counted in a run that nobody kills."""
    folder = fixtures.made(f"events-{what}-{ranks}-{rank}".replace(" ", "-"))
    counted = folder / "count"
    place = folder / "folder"
    place.mkdir()
    prepare = _prepare(what, ranks)
    if prepare is not None:
        prepare(place)
    patch = partial(on_rank, rank, partial(count_events, str(counted)))
    command = [*BASE, f"--data.cache_dir={fixtures.cache()}", *_args(what)]
    forks.train(command, cwd=place, ranks=ranks, patch=patch)
    return int(counted.read_text().strip() or 0)


def _args(what: str) -> tuple[str, ...]:
    if what == OVERWRITTEN:
        return (*LONG, "--train.overwrite")
    if what == IN_BACKGROUND:
        return (*RESUME, "--checkpoint.in_background")
    return RESUME


def _kill_and_go_on(what: str, rank: int, moment: float, room: Room) -> None:
    event = max(1, round(moment * num_events(what, room.case.ranks, rank)))
    if moment * EVENTS < 12.5 and abs(moment * EVENTS - round(moment * EVENTS)) < 1e-6:
        event = round(moment * EVENTS)  # one of the first, as it is
    before = contents(room.folder)
    patch = partial(on_rank, rank, partial(at_event, event, die))
    with room.start(*_args(what), patch=patch) as running:
        end_with_peers(running, rank)
        first = running.wait()
    if first.hung:
        room.flag("wrong", "the other ranks did not end")
    run = room.folder / "run"
    if what == OVERWRITTEN:
        _check_old_run(room, before)
        room.train(*LONG, "--train.overwrite")
    else:
        room.train(*RESUME)
    fixtures.compare_with_whole(room, run, room.case.ranks)


def end_with_peers(running: Running, rank: int) -> None:
    """Once a rank has died the others get SIGTERM, as from torchrun, and later SIGKILL."""
    waiting.until(lambda: not running.alive() or running.ended(rank))
    for number, pause_s in ((signal.SIGTERM, PEERS_S), (signal.SIGKILL, 5.0)):
        if not waiting.comes(lambda: not running.alive(), within_s=pause_s):
            for other in range(len(running.pids)):
                running.signal(other, number)


def _check_old_run(room: Room, before: dict[str, str]) -> None:
    """After a kill the old run is whole, here or beside."""
    after = contents(room.folder)
    lost = [path for path, digest in before.items() if not stands(path, digest, after)]
    if lost:
        room.flag("lost", f"gone or changed: {', '.join(lost[:3])}")
