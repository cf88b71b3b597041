"""Every figure of the course in one call; it is shown when it is the last expression of a cell.

    plot.lines({"ring": times_s}, x=sizes, xlabel="bytes", alt="Time grows linearly with size")
    plot.bars(by_cost, caption="08.orders")

`alt` says what the figure shows, for a reader who cannot see it. A lesson names a caption instead,
from captions/08.yaml, which holds title, labels and alt text: they often answer a prediction. This
module is the one that lessons import; the drawings themselves are in the files beside it.
"""

from course.figures.adapters import ways_over_nodes
from course.figures.attention import causal
from course.figures.charts import bars, curves, heatmap, lines
from course.figures.checkpointing import activation_checkpointing
from course.figures.chunks import chunks
from course.figures.clinic import calls, ward_round
from course.figures.collectives import collective, collectives, ring
from course.figures.data_parallel import (
    accumulation,
    buckets,
    clipping,
    copies,
    data_parallel,
    sample_weights,
)
from course.figures.debugging import reduction_groups, spread_of_parts, watched_layer
from course.figures.equal_training import epochs, losses_of_ranks, off_one_process
from course.figures.experts import expert_loads, expert_rows
from course.figures.fragments import fragments
from course.figures.grid import grid
from course.figures.jobs import launch_chain, second_attempt
from course.figures.large_batch import (
    gradient_noise,
    local_steps,
    rates_against_batch,
    speed_and_price,
    steps_against_batch,
    sweep,
)
from course.figures.layer import around_a_layer, kept
from course.figures.local_updates import LossCurve, loss_against_cost
from course.figures.low_precision import (
    delayed_scaling,
    format_ranges,
    fp8_linear,
    scale_blocks,
)
from course.figures.messages import rounds
from course.figures.nodes import transports
from course.figures.one_device import formats, fusion, gradient_range, launches
from course.figures.overlap import StepLanes, overlap
from course.figures.pipeline import halves, pipeline, stages
from course.figures.planning import layout_map, scaling, step_anatomy, step_parts
from course.figures.profile import memory_timeline, step_breakdown
from course.figures.progress import progress
from course.figures.rank_order import digits, links
from course.figures.ring_attention import ring_attention, ring_gradients, ulysses
from course.figures.row_exchange import row_exchange
from course.figures.sharded import hybrid_sharding, tokens_that_hide, zero, zero_steps
from course.figures.survival import boxes, runs, save_steps
from course.figures.tensor_flow import column_then_row, layouts, tensor_parallel_mlp
from course.figures.timeline import timeline
from course.figures.tuning import adapters, packed_row
from course.figures.two_fleets import two_cuts, two_fleets
from course.figures.weights import cuts

__all__ = [
    "LossCurve",
    "StepLanes",
    "accumulation",
    "activation_checkpointing",
    "adapters",
    "around_a_layer",
    "bars",
    "boxes",
    "buckets",
    "calls",
    "causal",
    "chunks",
    "clipping",
    "collective",
    "collectives",
    "column_then_row",
    "copies",
    "curves",
    "cuts",
    "data_parallel",
    "delayed_scaling",
    "digits",
    "epochs",
    "expert_loads",
    "expert_rows",
    "format_ranges",
    "formats",
    "fp8_linear",
    "fragments",
    "fusion",
    "gradient_noise",
    "gradient_range",
    "grid",
    "halves",
    "heatmap",
    "hybrid_sharding",
    "kept",
    "launch_chain",
    "launches",
    "layout_map",
    "layouts",
    "lines",
    "links",
    "local_steps",
    "loss_against_cost",
    "losses_of_ranks",
    "memory_timeline",
    "off_one_process",
    "overlap",
    "packed_row",
    "pipeline",
    "progress",
    "rates_against_batch",
    "reduction_groups",
    "ring",
    "ring_attention",
    "ring_gradients",
    "rounds",
    "row_exchange",
    "runs",
    "sample_weights",
    "save_steps",
    "scale_blocks",
    "scaling",
    "second_attempt",
    "speed_and_price",
    "spread_of_parts",
    "stages",
    "step_anatomy",
    "step_breakdown",
    "step_parts",
    "steps_against_batch",
    "sweep",
    "tensor_parallel_mlp",
    "timeline",
    "tokens_that_hide",
    "transports",
    "two_cuts",
    "two_fleets",
    "ulysses",
    "ward_round",
    "watched_layer",
    "ways_over_nodes",
    "zero",
    "zero_steps",
]
