"""The figures hold what was asked for: boxes, colours by group, labels, numbers; and each carries its alternative text."""

import re

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import FancyBboxPatch, Rectangle

from labcode.teach.figures import plot
from labcode.teach.figures.style import PALETTE, colour_of, ink_on
from labcode.topology import GridShape

ALT = "Four words at least"


def texts(picture):
    return [text.get_text() for axes in picture.axes for text in axes.texts if text.get_text()]


def boxes_by_group(picture):
    """{group: colours of its boxes} of a grid drawing."""
    found = {}
    for patch in picture.axes[0].patches:
        if isinstance(patch, FancyBboxPatch) and (patch.get_gid() or "").startswith("group"):
            found.setdefault(int(patch.get_gid().split()[1]), []).append(
                to_hex(patch.get_facecolor()).upper()
            )
    return found


def from_ranks(picture):
    """How many boxes of a collective show data of each rank, before and after together."""
    gids = [patch.get_gid() for patch in picture.axes[0].patches if isinstance(patch, Rectangle)]
    return {gid: gids.count(gid) for gid in gids}


@pytest.mark.parametrize(
    ("shape", "color_by", "nodes"),
    [
        (GridShape(dp=2, tp=4), "tp", 2),
        (GridShape(dp=2, tp=4), "dp", 2),
        (GridShape(dp=2, pp=2, cp=2, tp=2), ("dp", "cp"), 4),
        (GridShape(dp=4, pp=4, tp=4), "pp", 8),
        (GridShape(), "tp", 1),
    ],
)
def test_grid_draws_each_rank_in_the_colour_of_its_group(shape, color_by, nodes):
    picture = plot.grid(shape, color_by=color_by, nodes=nodes, alt=ALT)
    groups = shape.groups(*([color_by] if isinstance(color_by, str) else color_by))
    drawn = boxes_by_group(picture)
    assert {group: len(colours) for group, colours in drawn.items()} == {
        i: len(g) for i, g in enumerate(groups)
    }
    assert all(set(colours) == {colour_of(group).upper()} for group, colours in drawn.items())
    assert len({colours[0] for colours in drawn.values()}) == len(groups)  # no two groups alike
    labels = texts(picture)
    assert {str(rank) for rank in range(shape.world_size)} <= set(labels)
    assert [label for label in labels if label.startswith("node")] == (
        [f"node {i}" for i in range(nodes)] if nodes > 1 else []
    )


def test_grid_puts_ranks_on_their_nodes():
    picture = plot.grid(GridShape(dp=2, tp=2), color_by="tp", nodes=2, alt=ALT)
    place = {text.get_text(): text.get_position() for text in picture.axes[0].texts}
    node_of = {rank: place[str(rank)][0] > place["node 1"][0] for rank in range(4)}
    assert node_of == {0: False, 1: False, 2: True, 3: True}


def test_grid_refuses_what_it_cannot_draw():
    with pytest.raises(ValueError, match="at most 64"):
        plot.grid(GridShape(dp=65), alt=ALT)
    with pytest.raises(ValueError, match="do not fill 3 nodes"):
        plot.grid(GridShape(dp=4), nodes=3, alt=ALT)


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
    picture = plot.collective(name, 4, alt=ALT)
    held = from_ranks(picture)
    assert (held.get("from 0", 0), held.get("from 3", 0)) == HOLDINGS[name]
    colours = {
        p.get_gid(): to_hex(p.get_facecolor()).upper()
        for p in picture.axes[0].patches
        if p.get_gid() != "empty"
    }
    assert all(colour == PALETTE[int(gid.split()[1])] for gid, colour in colours.items())
    assert {"rank 0", "rank 3", "before", "after"} <= set(texts(picture))


def test_collective_labels():
    assert texts(plot.collective("all_reduce", 4, alt=ALT)).count("A+B+C+D") == 4
    after = texts(plot.collective("all_to_all", 2, alt=ALT))
    assert after[after.index("after") : -2] == ["after", "A0", "B0", "A1", "B1"]
    with pytest.raises(ValueError, match="choose one of broadcast"):
        plot.collective("all_reduce_sum", alt=ALT)
    with pytest.raises(ValueError, match="2 to 8"):
        plot.collective("gather", 9, alt=ALT)


def test_lines_draws_each_series_and_the_references():
    picture = plot.lines(
        {"ring": [1, 2, 4], "tree": ([0, 5], [3, 3])},
        x=[1, 10, 100],
        xlabel="bytes",
        logx=True,
        reference={"floor": 1},
        alt=ALT,
    )
    (axes,) = picture.axes
    data = {
        line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines
    }
    assert (
        data["ring"] == ([1, 10, 100], [1, 2, 4])
        and data["tree"] == ([0, 5], [3, 3])
        and data["floor"][1] == [1, 1]
    )
    assert axes.get_xscale() == "log" and axes.get_xlabel() == "bytes"
    ring, tree, _ = axes.lines
    assert ring.get_color() != tree.get_color() and ring.get_marker() != tree.get_marker()
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["ring", "tree", "floor"]


def test_bars_stand_and_lie():
    standing = plot.bars({"2 ranks": 0.707, "4 ranks": 0.866}, ylabel="error", alt=ALT).axes[0]
    assert [patch.get_height() for patch in standing.patches] == [0.707, 0.866]
    assert standing.get_ylabel() == "error" and [t.get_text() for t in standing.texts] == [
        "0.707",
        "0.866",
    ]
    long = {
        f"a rather long label, number {i}": {"predicted": i + 1, "measured": i + 2}
        for i in range(3)
    }
    lying = plot.bars(long, ylabel="ms", alt=ALT).axes[0]
    assert [patch.get_width() for patch in lying.patches] == [
        1,
        2,
        3,
        2,
        3,
        4,
    ] and lying.get_xlabel() == "ms"
    assert len({to_hex(patch.get_facecolor()) for patch in lying.patches}) == 2


def test_curves_pass_over_rows_without_the_key():
    rows = [{"step": s, "loss": 5.0 - s, "val_loss": 4.0 if s == 2 else None} for s in range(4)]
    assert list(plot.curves({"run": rows}, alt=ALT).axes[0].lines[0].get_ydata()) == [5, 4, 3, 2]
    assert list(plot.curves({"run": rows}, y="val_loss", alt=ALT).axes[0].lines[0].get_xdata()) == [
        2
    ]
    with pytest.raises(ValueError, match="no row of 'run' holds both 'step' and 'lr'"):
        plot.curves({"run": rows}, y="lr", alt=ALT)


def test_heatmap_and_field():
    matrix = np.arange(6).reshape(2, 3)
    axes = plot.heatmap(matrix, rows=["a", "b"], unit="MB", alt=ALT).axes[0]
    assert np.array_equal(axes.images[0].get_array(), matrix) and [
        t.get_text() for t in axes.texts
    ] == list("012345")
    maps = {"now": np.full((4, 8), 280.0), "later": np.full((4, 8), 290.0)}
    now, later = (axes.images[0] for axes in plot.field(maps, unit="K", alt=ALT).axes[:2])
    assert now.get_clim() == later.get_clim() == (280, 290)
    assert plot.field(np.array([[-1.0, 3.0]]), diverging=True, alt=ALT).axes[0].images[
        0
    ].get_clim() == (-3, 3)


def test_timeline_has_a_lane_for_each_name_and_a_colour_for_each_kind():
    rows = [("rank 0", "forward 1", 0, 2), ("rank 0", "forward 2", 2, 4), ("rank 1", "send", 2, 3)]
    picture = plot.timeline(rows, xlabel="ms", alt=ALT)
    (axes,) = picture.axes
    bars = [
        (bar.get_x(), bar.get_width(), round(bar.get_y() + bar.get_height() / 2))
        for bar in axes.patches
    ]
    assert bars == [(0, 2, 0), (2, 2, 0), (2, 1, 1)]
    first, second, send = (to_hex(bar.get_facecolor()) for bar in axes.patches)
    assert first == second != send
    assert [text.get_text() for text in picture.figure.legends[0].get_texts()] == [
        "forward",
        "send",
    ]
    with pytest.raises(ValueError, match="stops before it starts"):
        plot.timeline([("rank 0", "a", 2, 1)], alt=ALT)
    with pytest.raises(ValueError, match="at least one"):
        plot.timeline([], alt=ALT)


FIGURES = {
    "lines": lambda alt: plot.lines({"a": [1, 2]}, alt=alt),
    "bars": lambda alt: plot.bars({"a": 1}, alt=alt),
    "curves": lambda alt: plot.curves({"a": [{"step": 1, "loss": 2}]}, alt=alt),
    "heatmap": lambda alt: plot.heatmap([[1, 2]], alt=alt),
    "field": lambda alt: plot.field(np.random.default_rng(0).normal(size=(90, 180)), alt=alt),
    "grid": lambda alt: plot.grid(GridShape(dp=8, tp=8), nodes=8, alt=alt),
    "collective": lambda alt: plot.collective("all_to_all", 8, alt=alt),
    "timeline": lambda alt: plot.timeline([("a", "b", 0, 1)], alt=alt),
}


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_carries_its_alternative_text_and_is_small(name):
    picture = FIGURES[name]('Two "quoted" <words> & more')
    bundle = picture._repr_mimebundle_()
    assert set(bundle) == {"text/html", "text/plain"}
    assert 'alt="Two &quot;quoted&quot; &lt;words&gt; &amp; more"' in bundle["text/html"]
    assert 300 < int(re.search(r'width="(\d+)"', bundle["text/html"])[1]) < 720 or name in (
        "heatmap",
        "grid",
    )
    assert picture.png()[:4] == b"\x89PNG" and 1_000 < len(picture.png()) < 60_000
    assert picture.png() == picture.png()
    for poor in ("", "plot", None):
        with pytest.raises(ValueError, match="say in one sentence"):
            FIGURES[name](poor)


def test_a_picture_is_shown_once_and_saved(tmp_path):
    import matplotlib.pyplot as plt

    picture = plot.bars({"a": 1}, alt=ALT)
    assert (
        plt.get_fignums() == []
    )  # pyplot does not know it, so the inline backend does not show it a second time
    picture.save(tmp_path / "bars.png")
    assert (tmp_path / "bars.png").read_bytes() == picture.png()
    assert repr(picture) == f"Figure: {ALT}"


def test_palette_is_legible():
    def luminance(colour):
        linear = [
            ((c / 255 + 0.055) / 1.055) ** 2.4 if c > 10 else c / 255 / 12.92
            for c in bytes.fromhex(colour[1:])
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for colour in [colour_of(i) for i in range(2 * len(PALETTE))]:
        low, high = sorted((luminance(colour), luminance(ink_on(colour))))
        assert (high + 0.05) / (low + 0.05) > 4.5  # WCAG AA for text
