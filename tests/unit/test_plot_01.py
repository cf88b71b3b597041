"""The drawings of lesson 01: sheets of collectives, and the ring, whose every step is the step of the real algorithm."""

import pytest

from labcode.teach.figures import plot
from labcode.teach.figures.collectives import ring_states

ALT = "Four words at least"
SHEET = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all")


def gids(axes):
    return [patch.get_gid() for patch in axes.patches if patch.get_gid()]


def test_a_sheet_holds_the_panels_of_the_single_drawings():
    sheet = plot.collectives(SHEET, 4, alt=ALT)
    for axes, name in zip(sheet.axes, SHEET):
        single = plot.collective(name, 4, alt=ALT).axes[0]
        assert axes.get_title(loc="left") == name
        assert gids(axes) == gids(single)
        assert [t.get_text() for t in axes.texts] == [t.get_text() for t in single.texts]
    assert len(plot.collectives(SHEET[:3], 2, alt=ALT).axes) == 4  # the fourth place stays empty


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_a_ring_ends_with_every_sum_on_every_rank(n):
    states = ring_states(n)
    assert len(states) == 2 * (n - 1) + 1
    for chunks in states[-1]:
        assert [sorted(sources) for sources in chunks] == [list(range(n))] * n
    finished = [[c for c in range(n) if len(chunks[c]) == n] for chunks in states[n - 1]]
    assert finished == [
        [(rank + 1) % n] for rank in range(n)
    ]  # after the reduce-scatter: one chunk each


def test_the_drawn_steps_are_those_of_the_algorithm():
    """Play the index arithmetic of comm.ring with sets of ranks in place of numbers."""
    n = 4
    held = [[(rank,)] * n for rank in range(n)]
    for step in range(n - 1):
        out = [held[rank][(rank - step) % n] for rank in range(n)]
        for rank in range(n):
            held[rank][(rank - step - 1) % n] = (
                out[(rank - 1) % n] + held[rank][(rank - step - 1) % n]
            )
        assert held == ring_states(n)[step + 1]
    for step in range(n - 1):
        out = [held[rank][(rank + 1 - step) % n] for rank in range(n)]
        for rank in range(n):
            held[rank][(rank - step) % n] = out[(rank - 1) % n]
        assert held == ring_states(n)[n + step]


def test_the_ring_frames_what_arrived():
    picture = plot.ring(4, alt=ALT)
    titles = [axes.get_title() for axes in picture.axes if axes.get_title()]
    assert sorted(titles) == sorted(
        ["before", *(f"step {s}: {'add' if s < 4 else 'copy'}" for s in range(1, 7))]
    )
    for axes in picture.axes:
        if axes.get_title():
            assert gids(axes).count("arrived") == (0 if axes.get_title() == "before" else 4)


def test_what_cannot_be_drawn_is_named():
    for call, message in (
        (lambda: plot.collectives(["gather"], alt=ALT), "two or more"),
        (lambda: plot.collectives(["gather", "reduce"], 5, alt=ALT), "at most 4 ranks"),
        (lambda: plot.collectives(["gather", "sum"], alt=ALT), "no drawing of 'sum'"),
        (lambda: plot.ring(6, alt=ALT), "2 to 5 ranks"),
        (lambda: plot.ring(alt="poor"), "say in one sentence"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_pictures_are_small():
    for picture in (plot.collectives(SHEET, alt=ALT), plot.ring(5, alt=ALT)):
        assert 1_000 < len(picture.png()) < 60_000


@pytest.mark.parametrize(("scale", "plain"), [(1, True), (1e-3, False), (1e4, False)])
def test_small_numbers_on_a_log_axis_are_written_plainly(scale, plain):
    picture = plot.lines({"a": [scale * 1.7, scale * 40]}, logy=True, alt=ALT)
    picture.png()  # labels are made when it is drawn
    axis = picture.axes[0].yaxis
    labels = {
        label.get_text() for label in [*axis.get_ticklabels(), *axis.get_ticklabels(minor=True)]
    }
    assert ({"2", "10", "40"} <= labels) == plain
