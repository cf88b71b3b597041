"""What all figures share: alternative text, small files, legible colours; shown once."""

import base64
import re

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest

from course.figures import plot
from course.figures.style import PALETTE, colour_of, ink_on
from labcode.parallel.sharding import Shard
from labcode.perf.breakdown import StepTimes
from labcode.perf.memory_timeline import CATEGORIES, MemoryTimeline
from labcode.perf.pipeline import StageTimes, simulate
from labcode.run.sweep_table import Row, Tradeoff
from labcode.schedules import schedule
from labcode.topology import GridShape

ALT = "Four words at least"
MIB = 2**20

FOUR_SHARES = [[0.1, 0.1], [0.1, 0.1, 0.1], [0.1, 0.1], [0.3]]
TWO_BY_TWO = GridShape(dp=2, tp=2)
STEP = plot.StepLanes(backward=[(0, 1), (1, 2)], sent=[(1, 3)])
STEP_TIMES = StepTimes(1, 100.0, 40.0, 30.0, 20.0, 10.0, 50.0, 20.0, {"forward": 60.0})
STEP_MEMORY = MemoryTimeline(
    1,
    [0.0, 1.0, 2.0],
    {name: [5 * MIB, 9 * MIB, 5 * MIB] for name in CATEGORIES},
    [("forward", 0.0, 1.0), ("backward", 1.0, 2.5)],
)
TRAINED = plot.LossCurve([0, 5], [0.0, 1.0], [0.0, 1e6], [3.0, 2.0])
LINE = simulate(schedule("zero_bubble", 4, 8), StageTimes(1, 1, 1))
SWEPT = [
    Row("a", "gpt", 4, 1e-3, 0, val_loss=2.5),
    Row("b", "gpt", 8, 1e-3, 0, val_loss=2.3),
    Row("c", "gpt", 4, 1e-2, 0, "diverged"),
]

FIGURES = {
    "lines": lambda alt: plot.lines({"a": [1, 2]}, alt=alt),
    "activation_checkpointing": lambda alt: plot.activation_checkpointing(3, alt=alt),
    "bars": lambda alt: plot.bars({"a": 1}, alt=alt),
    "curves": lambda alt: plot.curves({"a": [{"step": 1, "loss": 2}]}, alt=alt),
    "heatmap": lambda alt: plot.heatmap([[1, 2]], alt=alt),
    "grid": lambda alt: plot.grid(GridShape(dp=8, tp=8), nodes=8, alt=alt),
    "collective": lambda alt: plot.collective("all_to_all", 8, alt=alt),
    "collectives": lambda alt: plot.collectives(["gather", "reduce"], 4, alt=alt),
    "ring": lambda alt: plot.ring(4, alt=alt),
    "rounds": lambda alt: plot.rounds([[(0, 1)], [(0, 2)]], 3, alt=alt),
    "timeline": lambda alt: plot.timeline([("a", "b", 0, 1)], alt=alt),
    "pipeline": lambda alt: plot.pipeline({"simulated": LINE}, title="t", alt=alt),
    "stages": lambda alt: plot.stages(4, 4, title="t", alt=alt),
    "halves": lambda alt: plot.halves(title="t", alt=alt),
    "causal": lambda alt: plot.causal(4, alt=alt),
    "chunks": lambda alt: plot.chunks({"tiles": (90, 180)}, ((60, 120), (30, 90)), alt=alt),
    "cuts": lambda alt: plot.cuts({"w": ((8, 4), Shard(0))}, 2, alt=alt),
    "data_parallel": lambda alt: plot.data_parallel(4, alt=alt),
    "sample_weights": lambda alt: plot.sample_weights(FOUR_SHARES, alt=alt),
    "accumulation": lambda alt: plot.accumulation(4, alt=alt),
    "copies": lambda alt: plot.copies(4, alt=alt),
    "buckets": lambda alt: plot.buckets([3, 1, 2], [[2, 1], [0]], 4, alt=alt),
    "clipping": lambda alt: plot.clipping([2.0, -6.0], 1.0, alt=alt),
    "overlap": lambda alt: plot.overlap({"one": STEP}, alt=alt),
    "digits": lambda alt: plot.digits(GridShape(dp=2, pp=2, tp=4), alt=alt),
    "ways_over_nodes": lambda alt: plot.ways_over_nodes(alt=alt),
    "links": lambda alt: plot.links(TWO_BY_TWO, axes_shown=["tp", "dp"], nodes=2, alt=alt),
    "tensor_parallel_mlp": lambda alt: plot.tensor_parallel_mlp(alt=alt),
    "column_then_row": lambda alt: plot.column_then_row(alt=alt),
    "layouts": lambda alt: plot.layouts(alt=alt),
    "kept": lambda alt: plot.kept(tp=4, alt=alt),
    "around_a_layer": lambda alt: plot.around_a_layer(alt=alt),
    "ring_attention": lambda alt: plot.ring_attention(4, alt=alt),
    "ring_gradients": lambda alt: plot.ring_gradients(4, alt=alt),
    "ulysses": lambda alt: plot.ulysses(4, alt=alt),
    "launch_chain": lambda alt: plot.launch_chain(alt=alt),
    "zero": lambda alt: plot.zero(4, alt=alt),
    "zero_steps": lambda alt: plot.zero_steps(alt=alt),
    "tokens_that_hide": lambda alt: plot.tokens_that_hide(4e14, {"a": 5e10}, alt=alt),
    "hybrid_sharding": lambda alt: plot.hybrid_sharding(2, 4, alt=alt),
    "boxes": lambda alt: plot.boxes([((0, 0), (2, 4))], ((1, 1), (1, 3)), alt=alt),
    "row_exchange": lambda alt: plot.row_exchange(
        [{"a": (0, 1)}, {"b": (1, 2)}], experts_per_rank=2, alt=alt
    ),
    "runs": lambda alt: plot.runs({"a run": [("work", 0, 60), ("save", 60, 65)]}, alt=alt),
    "save_steps": lambda alt: plot.save_steps({"before": {"step-4": "whole"}}, alt=alt),
    "delayed_scaling": lambda alt: plot.delayed_scaling([1, 1, 4, 1, 1], history=2, alt=alt),
    "format_ranges": lambda alt: plot.format_ranges(["float32", "e4m3"], alt=alt),
    "formats": lambda alt: plot.formats({"float16": (5, 10)}, alt=alt),
    "fp8_linear": lambda alt: plot.fp8_linear(alt=alt),
    "scale_blocks": lambda alt: plot.scale_blocks({"one": (8, 8), "tiles": (1, 4)}, alt=alt),
    "expert_rows": lambda alt: plot.expert_rows([[2, 0], [0, 3]], 4, alt=alt),
    "expert_loads": lambda alt: plot.expert_loads(
        {"one": [[0.5, 0.5], [0.4, 0.6]]}, width=1, alt=alt
    ),
    "packed_row": lambda alt: plot.packed_row([("ab", "XY"), ("c", "Z")], alt=alt),
    "adapters": lambda alt: plot.adapters({"one": {"W": "rows", "B": "rows"}}, 2, alt=alt),
    "two_fleets": lambda alt: plot.two_fleets([0, 1], [2, 3], alt=alt),
    "two_cuts": lambda alt: plot.two_cuts(
        (4, 2), {0: (0, 0, 2, 2), 1: (2, 0, 2, 2)}, {2: [(0, 0, 4, 1)]}, alt=alt
    ),
    "fragments": lambda alt: plot.fragments([[(1, True), (2, False)], [(2, False)]], 3, alt=alt),
    "fusion": lambda alt: plot.fusion(["* 2", "+ 1"], alt=alt),
    "gradient_range": lambda alt: plot.gradient_range(
        {"all": [0.5, 1e-9, 0.0]}, least=2**-25, most=65504, alt=alt
    ),
    "gradient_noise": lambda alt: plot.gradient_noise(alt=alt),
    "sweep": lambda alt: plot.sweep(SWEPT, alt=alt),
    "steps_against_batch": lambda alt: plot.steps_against_batch(
        {4: 900.0, 16: 300.0, 64: 150.0}, Tradeoff(100, 3200, 0.0), alt=alt, noise_scale=20
    ),
    "local_steps": lambda alt: plot.local_steps(alt=alt),
    "rates_against_batch": lambda alt: plot.rates_against_batch(
        {4: [3e-3, 1e-2], 16: [1e-2]}, {"a rule": [4e-3, 8e-3]}, alt=alt
    ),
    "speed_and_price": lambda alt: plot.speed_and_price(
        {1: 1.0, 2: 0.6}, {1: 1.0, 2: 1.2}, alt=alt
    ),
    "watched_layer": lambda alt: plot.watched_layer(alt=alt),
    "spread_of_parts": lambda alt: plot.spread_of_parts({"a": [1, 2], "b": [5, 7]}, alt=alt),
    "reduction_groups": lambda alt: plot.reduction_groups(
        GridShape(dp=2, tp=2), [(), ("tp",)], alt=alt
    ),
    "launches": lambda alt: plot.launches({"short": (5, 2)}, alt=alt),
    "second_attempt": lambda alt: plot.second_attempt(alt=alt),
    "step_breakdown": lambda alt: plot.step_breakdown({"a": STEP_TIMES}, alt=alt),
    "step_anatomy": lambda alt: plot.step_anatomy(3, 4, alt=alt),
    "layout_map": lambda alt: plot.layout_map(
        {"tp 1": [(1.0, 20.0), (2.0, 90.0)], "tp 2": [(1.5, 10.0)]},
        limit_gib=40.0,
        named={"the fastest": (1.0, 20.0)},
        alt=alt,
    ),
    "scaling": lambda alt: plot.scaling({"strong": [(8, 0.9, "dp"), (16, 0.8, "tp")]}, alt=alt),
    "step_parts": lambda alt: plot.step_parts(
        {"dp 2": {"product": 2.0, "bubble": 0.5}, "tp 2": {"product": 2.0, "tp": 0.7}}, alt=alt
    ),
    "loss_against_cost": lambda alt: plot.loss_against_cost({"one": TRAINED}, alt=alt),
    "ward_round": lambda alt: plot.ward_round({"one": {"a sign": 0.5, "another": 0.0}}, alt=alt),
    "calls": lambda alt: plot.calls({"rank 0": ["a", "b"], "rank 1": ["a", "c"]}, alt=alt),
    "memory_timeline": lambda alt: plot.memory_timeline(STEP_MEMORY, alt=alt),
}
AS_WIDE = (
    "heatmap",
    "grid",
    "cuts",
    "launch_chain",
    "second_attempt",
    "save_steps",
    "sweep",
)  # as their content


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_carries_its_alternative_text_and_is_small(name):
    picture = FIGURES[name]('Two "quoted" <words> & more')
    bundle, metadata = picture._repr_mimebundle_()
    png = picture.png()
    assert set(bundle) == {"text/html", "image/png", "text/plain"}
    assert 'alt="Two &quot;quoted&quot; &lt;words&gt; &amp; more"' in bundle["text/html"]
    width = int(re.search(r'width="(\d+)"', bundle["text/html"])[1])
    assert 300 < width < 720 or name in AS_WIDE
    # what strips HTML shows the PNG, in the same size, and finds the text beside it
    assert metadata["image/png"]["alt"] == picture.alt
    assert metadata["image/png"]["width"] == width
    assert base64.b64decode(bundle["image/png"]) == png  # drawn twice, and the same
    assert png[:4] == b"\x89PNG"
    pixels = int.from_bytes(png[16:20], "big")
    assert pixels // 2 == width  # sharp on a screen with two dots a pixel
    assert 1_000 < len(png) < 90_000


@pytest.mark.parametrize("name", FIGURES)
@pytest.mark.parametrize("poor", ["", "plot", None])
def test_a_figure_without_alternative_text_is_refused(name, poor):
    with pytest.raises(ValueError, match="say in one sentence"):
        FIGURES[name](poor)


def test_every_function_of_plot_is_tested_here():
    assert set(plot.__all__) - set(FIGURES) == {
        "transports",  # in the tests of NCCL's log
        "losses_of_ranks",  # this one and the next two: in test_figures_data_parallel.py
        "off_one_process",
        "epochs",
        "progress",  # in test_course.py; it says itself what it shows
        "LossCurve",  # what `loss_against_cost` draws
        "StepLanes",  # what `overlap` draws
    }


def test_the_style_ends_with_the_drawing():
    before = dict(mpl.rcParams)
    plot.bars({"a": 1}, alt=ALT).png()
    assert dict(mpl.rcParams) == before


def test_a_picture_is_shown_once_and_saved(tmp_path):
    picture = plot.bars({"a": 1}, alt=ALT)
    # pyplot does not know it, so the inline backend does not show it a second time.
    assert plt.get_fignums() == []
    picture.save(tmp_path / "bars.png")
    assert (tmp_path / "bars.png").read_bytes() == picture.png()
    assert repr(picture) == f"Figure: {ALT}"


def luminance(colour):
    weights = (0.2126, 0.7152, 0.0722)
    total = 0.0
    for weight, channel in zip(weights, bytes.fromhex(colour[1:])):
        value = channel / 255
        linear = value / 12.92 if channel <= 10 else ((value + 0.055) / 1.055) ** 2.4
        total += weight * linear
    return total


@pytest.mark.parametrize("i", range(2 * len(PALETTE)))
def test_palette_is_legible(i):
    colour = colour_of(i)
    low, high = sorted((luminance(colour), luminance(ink_on(colour))))
    assert (high + 0.05) / (low + 0.05) > 4.5  # WCAG AA for text
