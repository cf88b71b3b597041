"""Which tests of the release tier a run has time for.

Every test stands on a circle, as long as it takes (tests/costs.json), in an order that mixes long
and short ones. A landing runs an eighth of the circle, and the next landing begins with what did
not fit into this one: after eight landings each test has run. Besides, a run proves what the change
touches: up to a budget of seconds, those first that ran the longest ago, and at least one test of
each subject.
"""

import functools
import json
import subprocess
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COSTS = Path(__file__).with_name("costs.json")
TURNS = 8  # landings until each test has run
# Commits of one landing lie closer together: between two landings CI runs twice.
BETWEEN_LANDINGS_S = 3600
UNKNOWN_S = 10.0  # of a test that nobody has timed yet
UNKNOWN_LESSON_S = 60.0

NOT, THROUGH, ITSELF = 0, 1, 2  # how a change touches a test


@dataclass(frozen=True)
class Candidate:
    """A test that a run may choose.

    Args:
        name: Name as pytest has it, with its parameters.
        subject: What it proves together with others.
        seconds: How long it takes.
        touched: NOT, THROUGH what it uses, or ITSELF.
        beside: Tests with the same name here stand beside each other; empty: it stands alone.
    """

    name: str
    subject: str
    seconds: float
    touched: int = NOT
    beside: str = ""

    def place(self) -> tuple[int, str]:
        """Where it stands on the circle: the same in every session."""
        return zlib.crc32((self.beside or self.name).encode()), self.name


@functools.cache
def costs() -> dict[str, float]:
    """{name of a test: its seconds}, as `make durations` has written them."""
    tiers = json.loads(COSTS.read_text(encoding="utf-8"))
    return {name: seconds for rows in tiers.values() for name, seconds in rows.items()}


def landing() -> int:
    """How many landings there have been, by the times of the commits; 0 without git."""
    command = ["git", "log", "--format=%ct"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return landings(int(line) for line in done.stdout.split())


def landings(times: Iterable[int]) -> int:
    """The number of groups of commits that more than an hour separates.

    Args:
        times: When each commit was made, in seconds.
    """
    before = None
    count = 0
    for time in sorted(times):
        if before is None or time - before > BETWEEN_LANDINGS_S:
            count += 1
        before = time
    return count


def chosen(candidates: Sequence[Candidate], turn: int, budget_s: float) -> set[str]:
    """The names of the tests that a run has time for.

    Args:
        candidates: All that it may choose from.
        turn: The number of the landing.
        budget_s: How long those may take, besides, that the change touches. What is to be proved of
            each subject may go beyond it.
    """
    inside, later = in_turn(candidates, turn)
    names = {candidate.name for candidate in inside}
    touched = [each for each in [*later, *inside] if each.touched]
    return names | _touched(touched, names, budget_s)


def in_turn(candidates: Sequence[Candidate], turn: int) -> tuple[list[Candidate], list[Candidate]]:
    """(those whose turn it is, the others in the order in which their turn comes)."""
    ordered = sorted(candidates, key=Candidate.place)
    whole = sum(each.seconds for each in ordered)
    now: list[Candidate] = []
    behind: list[Candidate] = []
    before: list[Candidate] = []
    start = 0.0
    for each in ordered:
        part = min(int(TURNS * start / whole), TURNS - 1) if whole else 0
        start += each.seconds
        if part == turn % TURNS:
            now.append(each)
        elif part > turn % TURNS:
            behind.append(each)
        else:
            before.append(each)
    return now, [*behind, *before]


def _touched(touched: Sequence[Candidate], names: set[str], budget_s: float) -> set[str]:
    """One test of each subject that a change touches, and more while there is time.

    Args:
        touched: In the order of their turns.
        names: Those that run anyway.
        budget_s: The time.
    """
    ordered = sorted(touched, key=lambda each: -each.touched)
    by_subject: dict[str, list[Candidate]] = {}
    for each in ordered:
        by_subject.setdefault(each.subject, []).append(each)
    found = set()
    left_s = budget_s
    for tests in by_subject.values():
        if any(each.name in names for each in tests):
            continue
        fits = [each for each in tests if each.seconds <= left_s]
        first = fits[0] if fits else min(tests, key=lambda each: each.seconds)
        found.add(first.name)
        left_s -= first.seconds
    for each in ordered:
        if each.name not in names | found and each.seconds <= left_s:
            found.add(each.name)
            left_s -= each.seconds
    return found
