"""Drawings of collectives show whose data is where; the ring's steps are the algorithm's."""

import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from course.figures import plot
from course.figures.collectives import ring_states
from course.figures.style import PALETTE

ALT = "Four words at least"
SHEET = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all")


def texts(axes):
    return [text.get_text() for text in axes.texts if text.get_text()]


def gids(axes):
    return [patch.get_gid() for patch in axes.patches if patch.get_gid()]


# ---- one collective

# For 4 ranks: boxes before and after that hold data of rank 0, and of rank 3.
HOLDINGS = {
    "broadcast": (1 + 4, 0),
    "scatter": (4 + 4, 0),
    "gather": (1 + 1, 1 + 1),
    "all_gather": (1 + 4, 1 + 4),
    "reduce": (1 + 1, 1 + 1),
    "all_reduce": (1 + 4, 1 + 4),
    "reduce_scatter": (4 + 4, 4 + 4),
    "all_to_all": (4 + 4, 4 + 4),
}


@pytest.mark.parametrize("name", HOLDINGS)
def test_collective_shows_whose_data_is_where(name):
    (axes,) = plot.collective(name, 4, alt=ALT).axes
    boxes = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    held = [box.get_gid() for box in boxes]
    assert (held.count("from 0"), held.count("from 3")) == HOLDINGS[name]
    for box in boxes:
        if box.get_gid() != "empty":
            source = int(box.get_gid().split()[1])
            assert to_hex(box.get_facecolor()).upper() == PALETTE[source]
    assert {"rank 0", "rank 3", "before", "after"} <= set(texts(axes))


def test_collective_labels():
    (axes,) = plot.collective("all_reduce", 4, alt=ALT).axes
    assert texts(axes).count("A+B+C+D") == 4
    (axes,) = plot.collective("all_to_all", 2, alt=ALT).axes
    after = texts(axes)
    assert after[after.index("after") : -2] == ["after", "A0", "B0", "A1", "B1"]
    with pytest.raises(ValueError, match="choose one of broadcast"):
        plot.collective("all_reduce_sum", alt=ALT)
    with pytest.raises(ValueError, match="2 to 8"):
        plot.collective("gather", 9, alt=ALT)


# Boxes without data: room for what comes, and a tensor that is not defined afterwards.
EMPTY = {"broadcast": ["", "", ""], "reduce": ["?", "?", "?"]}


@pytest.mark.parametrize("name", HOLDINGS)
def test_an_empty_box_is_room_or_undefined_and_else_nothing_is_drawn(name):
    (axes,) = plot.collective(name, 4, alt=ALT).axes
    empty = EMPTY.get(name, [])
    assert gids(axes).count("empty") == len(empty)
    assert texts(axes).count("?") == empty.count("?")


# ---- a sheet of them


def test_a_sheet_holds_the_panels_of_the_single_drawings():
    sheet = plot.collectives(SHEET, 4, alt=ALT)
    for axes, name in zip(sheet.axes, SHEET):
        (single,) = plot.collective(name, 4, alt=ALT).axes
        assert axes.get_title(loc="left") == name
        assert gids(axes) == gids(single)
        assert texts(axes) == texts(single)
    assert len(plot.collectives(SHEET[:3], 2, alt=ALT).axes) == 4  # the fourth place stays empty


# ---- the ring


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_a_ring_ends_with_every_sum_on_every_rank(n):
    states = ring_states(n)
    assert len(states) == 2 * (n - 1) + 1
    for chunks in states[-1]:
        for sources in chunks:
            assert sorted(sources) == list(range(n))
    # After the reduce-scatter each rank has one finished chunk.
    for rank, chunks in enumerate(states[n - 1]):
        finished = [chunk for chunk in range(n) if len(chunks[chunk]) == n]
        assert finished == [(rank + 1) % n]


def test_the_drawn_steps_are_those_of_the_algorithm():
    """Play the index arithmetic of comm.ring with sets of ranks in place of numbers."""
    n = 4
    held = [[(rank,)] * n for rank in range(n)]
    for step in range(n - 1):
        out = [held[rank][(rank - step) % n] for rank in range(n)]
        for rank in range(n):
            arrived = out[(rank - 1) % n]
            chunk = (rank - step - 1) % n
            held[rank][chunk] = arrived + held[rank][chunk]
        assert held == ring_states(n)[step + 1]
    for step in range(n - 1):
        out = [held[rank][(rank + 1 - step) % n] for rank in range(n)]
        for rank in range(n):
            held[rank][(rank - step) % n] = out[(rank - 1) % n]
        assert held == ring_states(n)[n + step]


def test_the_rows_and_columns_of_the_ring_have_names():
    picture = plot.ring(4, alt=ALT)
    first = texts(picture.axes[0])
    assert first == ["chunk", "0", "1", "2", "3", "rank 0", "rank 1", "rank 2", "rank 3"]
    second = texts(picture.axes[1])
    assert second == ["0", "1", "2", "3", "rank 0", "rank 1", "rank 2", "rank 3"]
    assert "rank 0" in texts(picture.axes[5])  # the first step of the second row


def test_the_ring_frames_what_arrived():
    picture = plot.ring(4, alt=ALT)
    arrived = {}
    for axes in picture.axes:
        if axes.get_title():
            arrived[axes.get_title()] = gids(axes).count("arrived")
    assert arrived == {
        "before": 0,
        "step 1: add": 4,
        "step 2: add": 4,
        "step 3: add": 4,
        "step 4: copy": 4,
        "step 5: copy": 4,
        "step 6: copy": 4,
    }


# ---- errors and sizes


def test_what_cannot_be_drawn_is_named():
    with pytest.raises(ValueError, match="two or more"):
        plot.collectives(["gather"], alt=ALT)
    with pytest.raises(ValueError, match="at most 4 ranks"):
        plot.collectives(["gather", "reduce"], 5, alt=ALT)
    with pytest.raises(ValueError, match="no drawing of 'sum'"):
        plot.collectives(["gather", "sum"], alt=ALT)
    with pytest.raises(ValueError, match="2 to 5 ranks"):
        plot.ring(6, alt=ALT)
    with pytest.raises(ValueError, match="say in one sentence"):
        plot.ring(alt="poor")


def test_pictures_are_small():
    for picture in (plot.collectives(SHEET, alt=ALT), plot.ring(5, alt=ALT)):
        assert 1_000 < len(picture.png()) < 60_000
