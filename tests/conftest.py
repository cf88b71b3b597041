"""What all tests share: no test is timed, and who waits for background work comes last.

A session fixture may begin long work in the background: lessons, trainings, stories of SLURM. It
begins with the first test of its file (`pytest.mark.usefixtures`), and tests marked `waits`, which
ask for the results, are put behind all others. That saves time and nothing else: any test runs
alone, and in any order.
"""

import hypothesis
import pytest

hypothesis.settings.register_profile("course", deadline=None)
hypothesis.settings.load_profile("course")


def waits(item: pytest.Item) -> bool:
    return item.get_closest_marker("waits") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=waits)  # stable: everything else keeps its order
