"""What all tests share: tiers, lanes, and what may be tried again.

`make test` runs all tests but those marked `release`; those run in `make test-release`, a part of
them in each CI run, and where a change touches what they prove (tests/changed.py). Tests marked
`lesson` execute a notebook, with nothing beside them.

Two workers of pytest-xdist run tests at the same time. Tests that share something costly (a pool of
ranks, a cluster, a fixture of their module) share a group, and with it a worker.
"""

import functools
import re
import signal
from collections.abc import Callable, Iterable
from pathlib import Path

import changed
import hypothesis
import parts
import psutil
import pytest
from faults import waiting

from labcode import processes

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
        "--part",
        choices=("all", "commit"),
        default="all",
        help="commit: of the tests marked release a quarter, another one at each commit",
    )
    parser.addoption(
        "--changed",
        action="store_true",
        help="of the tests marked release those that prove what this change touches",
    )


def is_release(item: pytest.Item) -> bool:
    return item.get_closest_marker("release") is not None


def is_chosen(item: pytest.Item, part: int | None, change: changed.Change | None) -> bool:
    """Whether a test runs; only one of the release tier may be left to another run."""
    if not is_release(item):
        return True
    if change is None and part is None:
        return True
    if change is not None and change.touches(item):
        return True
    return part is not None and parts.of_test(item.nodeid) == part


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


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Hand out groups of tests to the workers, the largest group first."""
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
    """Note in the report what tools/ci.py asks for: a test's full name, and whether it is real."""
    item.user_properties.append(("nodeid", item.nodeid))
    if item.nodeid.startswith(REAL):
        item.add_marker(pytest.mark.real)
        item.user_properties.append(("real", "yes"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part = parts.of_this_commit() if config.getoption("--part") == "commit" else None
    change = changed.since_base() if config.getoption("--changed") else None
    if change is not None and change.is_too_large:
        config.stash[TOO_LARGE] = change
    left_out = [item for item in items if not is_chosen(item, part, change)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if is_chosen(item, part, change)]


TOO_LARGE = pytest.StashKey[changed.Change]()


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    """Say so where a change is not proved by this run alone."""
    change = config.stash.get(TOO_LARGE, None)
    if change is not None:
        terminalreporter.write_line(
            f"{len(change.paths)} files and {len(change.lessons)} lessons changed, more than one "
            "run can prove: `make test-release` runs all of the release tier"
        )
