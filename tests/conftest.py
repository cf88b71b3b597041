"""What all tests share: no test is timed, and who waits for background work comes last.

A session fixture may begin long work in the background: lessons, trainings, stories of SLURM. It
begins with the first test of its file (`pytest.mark.usefixtures`), and tests marked `waits`, which
ask for the results, are put behind all others. That saves time and nothing else: any test runs
alone, and in any order.
"""

import signal
import time
from collections.abc import Callable, Iterable

import commit_part
import hypothesis
import psutil
import pytest

from labcode import processes

# A shell that starts the tests in the background has them, and all that they start, ignore SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)

hypothesis.settings.register_profile("course", deadline=None)
hypothesis.settings.load_profile("course")


SURVIVORS_LIMIT_S = 120.0  # for a test that hangs, not for a busy machine


@pytest.fixture
def survivors() -> Callable[[Iterable[psutil.Process]], list[psutil.Process]]:
    """Gives processes that are to end the time for it, and says which are still alive then."""

    def wait(members: Iterable[psutil.Process]) -> list[psutil.Process]:
        left = list(members)
        deadline = time.monotonic() + SURVIVORS_LIMIT_S
        while left and time.monotonic() < deadline:
            time.sleep(0.02)
            left = [process for process in left if processes.alive(process)]
        return left

    return wait


def waits(item: pytest.Item) -> bool:
    return item.get_closest_marker("waits") is not None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part",
        choices=("all", "commit"),
        default="all",
        help="commit: of the expensive tests (full) a third, other ones at other commits",
    )


def chosen(item: pytest.Item, part: int | None) -> bool:
    """Whether a test runs; only expensive ones may be left to another commit.

    Student versions have a third of their own, in tests/notebooks/test_lessons.py.
    """
    expensive = item.get_closest_marker("full") is not None
    rotates = expensive and item.get_closest_marker("students") is None
    return part is None or not rotates or commit_part.of_test(item.nodeid) == part


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=waits)  # stable: everything else keeps its order
    part = commit_part.of_this_commit() if config.getoption("--part") == "commit" else None
    left_out = [item for item in items if not chosen(item, part)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if chosen(item, part)]
