"""Pools of ranks that the tests of a session share; each starts when a test first asks for it."""

import pytest

from labcode.comm.ranks import Ranks


def _pool(n):
    @pytest.fixture(scope="session", name=f"ranks{n}")
    def ranks():
        with Ranks(n) as pool:
            yield pool

    return ranks


ranks1, ranks2, ranks4 = _pool(1), _pool(2), _pool(4)
