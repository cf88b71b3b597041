"""What all tests share: tiers, lanes, and what may be tried again.

`make test` runs all tests but those marked `release`. Those run in `make test-release`, and in each
run of CI as many as it has time for (tests/choice.py): what a change touches (tests/changed.py),
and those whose turn it is. Tests marked `lesson` execute a notebook, with nothing beside them.

Two workers of pytest-xdist run tests at the same time. Tests that share something costly (a pool of
ranks, a cluster, a fixture of their module) share a group, and with it a worker.
"""

import collections
import functools
import re
import signal
from collections.abc import Callable, Iterable
from pathlib import Path

import changed
import choice
import hypothesis
import psutil
import pytest
from faults import waiting

from labcode.runtime import processes

# A shell that starts the tests in the background has them, and all that they start, ignore SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run, so that a red run is a defect of this change.
hypothesis.settings.register_profile(
    "course",
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("course")


ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def survivors() -> Callable[[Iterable[psutil.Process]], list[psutil.Process]]:
    """Gives processes that are to end the time for it, and says which are still alive then."""

    def wait(members: Iterable[psutil.Process]) -> list[psutil.Process]:
        left = list(members)

        def are_gone() -> bool:
            left[:] = [process for process in left if processes.alive(process)]
            return not left

        waiting.comes(are_gone, waiting.HANG_S)
        return left

    return wait


# ---- which tests run


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--changed",
        action="store_true",
        help="of the tests marked release those that prove what this change touches",
    )
    parser.addoption(
        "--budget",
        type=float,
        metavar="SECONDS",
        help="of the tests marked release those whose turn it is at this landing, and as many of "
        "those that --changed would choose as take this long",
    )


# Half a minute, which the first of them that runs pays for.
SHARE_A_LONG_FIXTURE = ("tests/faults/test_faults.py", "tests/notebooks/test_book_pages.py")


def is_release(item: pytest.Item) -> bool:
    return item.get_closest_marker("release") is not None


def subject_of(item: pytest.Item) -> str:
    """What is proved at least once where a change touches it: a file, or a lesson's answers.

    Lessons that are executed are one subject: what a change of many of them leaves to later
    landings is held by the answers of each, most of which are tried in every run.
    """
    file = item.nodeid.partition("::")[0]
    number = changed.lesson_of(item)
    is_lesson = item.get_closest_marker("lesson") is not None
    return file if number is None or is_lesson else f"answers of lesson {number}"


def candidate(item: pytest.Item, change: changed.Change) -> choice.Candidate:
    is_lesson = item.get_closest_marker("lesson") is not None
    unknown_s = choice.UNKNOWN_LESSON_S if is_lesson else choice.UNKNOWN_S
    seconds = choice.costs().get(item.nodeid, unknown_s)
    file = item.nodeid.partition("::")[0]
    beside = file if file in SHARE_A_LONG_FIXTURE else ""
    return choice.Candidate(item.nodeid, subject_of(item), seconds, change.touches(item), beside)


def left_out(config: pytest.Config, items: list[pytest.Item]) -> list[pytest.Item]:
    """The tests marked release that this run has not chosen."""
    budget_s = config.getoption("--budget")
    if budget_s is None and not config.getoption("--changed"):
        return []
    change = changed.since_base()
    known = [candidate(item, change) for item in items if is_release(item)]
    if budget_s is None:
        names = {each.name for each in known if each.touched}
    else:
        workers = getattr(config, "workerinput", {}).get("workercount", 1)
        names = choice.chosen(known, choice.landing(), budget_s * workers)
    return [item for item in items if is_release(item) and item.nodeid not in names]


# ---- which tests share a worker

POOL = re.compile(r"\branks[1248]\b|\bgetfixturevalue\(f?\"ranks")
EXERCISE = re.compile(r"\[(\d+)\.\d")


@functools.cache
def shares_pools(file: str) -> bool:
    """Whether the tests of a file ask for the pools of the session, by name or at run time."""
    return POOL.search((ROOT / file).read_text()) is not None


def group_of(nodeid: str) -> str:
    """The tests of a group run on one worker, one after the other."""
    file = nodeid.partition("::")[0]
    if file.startswith("tests/slurm"):
        return "a cluster"
    if file.startswith("tests/exercises"):
        exercise = EXERCISE.search(nodeid)
        return f"answers of lesson {exercise[1]}" if exercise else file
    if file.startswith("tests/unit"):
        return nodeid
    return "pools" if shares_pools(file) else file


def longest_first(items: list[pytest.Item]) -> list[pytest.Item]:
    """The groups that take longest first, so that no worker is left with one in the end."""
    seconds: dict[str, float] = collections.defaultdict(float)
    for item in items:
        seconds[group_of(item.nodeid)] += choice.costs().get(item.nodeid, 0.0)
    return sorted(items, key=lambda item: -seconds[group_of(item.nodeid)])


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Hand out groups of tests to the workers, in the order of `longest_first`."""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return ByGroup(config, log)


# ---- which tests may be tried again

# Real processes, a real SLURM, a real browser: a failure there may be the machine's. Numbers, text
# and parsers fail for a defect alone.
REAL = (
    "tests/exercises",
    "tests/faults",
    "tests/notebooks",
    "tests/ranks",
    "tests/slurm",
    "tests/unit/test_launch.py",
    "tests/unit/test_loader.py",
    "tests/unit/test_processes.py",
    "tests/unit/test_slurm_hand_down.py",
    "tests/unit/test_slurm_local.py",
)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Note in the report a test's full name and tier, and whether it is real, for tools/."""
    item.user_properties.append(("nodeid", item.nodeid))
    if item.get_closest_marker("lesson") is not None:
        item.user_properties.append(("tier", "lessons"))
    elif is_release(item):
        item.user_properties.append(("tier", "release"))
    if item.nodeid.startswith(REAL):
        item.add_marker(pytest.mark.real)
        item.user_properties.append(("real", "yes"))


@pytest.hookimpl(trylast=True)  # of the tests that -m has left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    unchosen = left_out(config, items)
    if unchosen:
        config.hook.pytest_deselected(items=unchosen)
        names = {item.nodeid for item in unchosen}
        items[:] = [item for item in items if item.nodeid not in names]
    if hasattr(config, "workerinput"):
        items[:] = longest_first(items)
