"""The memory table of the ZeRO paper."""

import pytest

from labcode.perf.state_memory import state_bytes

MIXED = {"weight_bytes": 2, "gradient_bytes": 2, "optimizer_bytes": 12}


@pytest.mark.parametrize(
    ("stage", "gigabytes"),
    [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)],
)
def test_the_example_in_the_first_figure_of_the_paper(stage: int, gigabytes: float) -> None:
    """7.5 billion parameters, 64 ranks, mixed precision with Adam."""
    found = state_bytes(7_500_000_000, stage, 64, **MIXED)
    assert found.total / 1e9 == pytest.approx(gigabytes, abs=0.05)


def test_each_stage_divides_one_thing_more() -> None:
    assert state_bytes(100, 0, 4) == (400, 400, 800)
    assert state_bytes(100, 1, 4) == (400, 400, 200)
    assert state_bytes(100, 2, 4) == (400, 100, 200)
    assert state_bytes(100, 3, 4) == (100, 100, 200)


@pytest.mark.parametrize(
    ("stage", "ranks", "words"), [(4, 2, "stages 1, 2 and 3"), (1, 0, "at least 1")]
)
def test_what_does_not_exist_is_refused(stage: int, ranks: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        state_bytes(1, stage, ranks)
