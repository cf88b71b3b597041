"""Plays cases, some at a time, and counts what became of them."""

import importlib
import json
import random
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from types import ModuleType

from . import categories, fixtures
from .cases import Case, Room, contents
from .forks import Done
from .verdicts import COLUMNS, FLAGS, Result, judge


def category(name: str) -> ModuleType:
    """The module of a category."""
    return importlib.import_module(f".{name}", categories.__name__)


def cases_of(name: str, seed: int) -> list[Case]:
    """All cases of a category; the same for the same seed."""
    return category(name).cases(random.Random(f"{seed} {name}"))


def sample(cases: Sequence[Case], limit: int | None, seed: int) -> list[int]:
    """Numbers of some cases, drawn at random."""
    numbers = list(range(len(cases)))
    if limit is None or limit >= len(cases):
        return numbers
    return sorted(random.Random(f"{seed} sample").sample(numbers, limit))


def play(name: str, number: int, case: Case, seed: int) -> Result:
    """Play one case in a folder of its own."""
    place = Path(tempfile.mkdtemp(prefix=f"labcode-faults-{name}-{number}-"))
    room = Room(
        case,
        folder=place / "folder",
        tmp=place / "tmp",
        cache=fixtures.cache(),
        rng=random.Random(f"{seed} {name} {number}"),
    )
    room.folder.mkdir()
    room.tmp.mkdir()
    try:
        if case.prepare is not None:
            case.prepare(room.folder)
        before = contents(room.folder)
        room.play()
        return judge(name, number, room, before)
    except Exception:
        # a mistake of the trial itself: seen, and counted as bad
        text = traceback.format_exc()
        nothing = Done([], [], [], hung=False, left=[], seconds=0.0)
        answer = room.answer or nothing
        return Result(
            name, number, case.what, room.commands, "silent", {"why": [text]}, answer.codes
        )
    finally:
        shutil.rmtree(place, ignore_errors=True)


def play_all(
    name: str,
    seed: int,
    *,
    numbers: Iterable[int] | None = None,
    parallel: int = 2,
    report: Callable[[Result], object] | None = None,
) -> list[Result]:
    """Play cases of a category.

    Args:
        name: The category.
        seed: Seed of its cases.
        numbers: Which of them; None is all.
        parallel: How many at a time.
        report: Called with each result as it comes.
    """
    cases = cases_of(name, seed)
    chosen = list(range(len(cases)) if numbers is None else numbers)
    fixtures.cache()
    results = []
    with ThreadPoolExecutor(parallel) as pool:
        futures = []
        for number in chosen:
            futures.append(pool.submit(play, name, number, cases[number], seed))
        for future in as_completed(futures):
            result = future.result()
            results.append(result)
            if report is not None:
                report(result)
    results.sort(key=_number)
    return results


def _number(result: Result) -> int:
    return result.number


def write(results: Sequence[Result], path: Path) -> None:
    """One JSON line a case."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        for result in results:
            file.write(json.dumps(result.as_json()) + "\n")


# ---- the table


def table(results: dict[str, list[Result]]) -> str:
    """The counts of each category and of all, as Markdown."""
    head = ["category", "tried", *COLUMNS, "as it should be"]
    rows = [_row(name, found) for name, found in results.items()]
    everything = [result for found in results.values() for result in found]
    rows.append(_row("**all**", everything))
    lines = [_line(head), _line(["---", *["---:"] * (len(head) - 1)])]
    lines += [_line(row) for row in rows]
    return "\n".join(lines)


def _row(name: str, results: Sequence[Result]) -> list[str]:
    row = [name, str(len(results))]
    for column in COLUMNS:
        row.append(str(count(results, column)))
    good = sum(result.good for result in results)
    share = 100 * good / len(results) if results else 100.0
    row.append(f"{share:.1f} %")
    return row


def count(results: Sequence[Result], column: str) -> int:
    """How many results are of a column of the table."""
    if column in FLAGS:
        return sum(column in result.flags for result in results)
    return sum(result.answer == column for result in results)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def seconds_since(started: float) -> str:
    return f"{time.monotonic() - started:.0f} s"
