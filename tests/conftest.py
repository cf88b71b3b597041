"""What all tests share: no test is timed, and who waits for background work comes last.

A session fixture may begin long work in the background: lessons, trainings, stories of SLURM. It
begins with the first test of its file (`pytest.mark.usefixtures`), and tests marked `waits`, which
ask for the results, are put behind all others. That saves time and nothing else: any test runs
alone, and in any order.
"""

import time
from collections.abc import Callable, Iterable

import hypothesis
import psutil
import pytest

from labcode import processes

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=waits)  # stable: everything else keeps its order
