"""Ranks for the tests on a GPU: with one GPU, two ranks share it over gloo."""

import pytest

from course.pool.ranks import Ranks


@pytest.fixture(scope="session")
def alone():
    with Ranks(1, device="cuda") as pool:
        yield pool


@pytest.fixture(scope="session")
def pair():
    with Ranks(2, device="cuda") as pool:
        yield pool
