"""Every figure of the course in one call; it is shown when it is the last expression of a cell.

    plot.lines({"ring": times_s}, x=sizes, xlabel="bytes", alt="Time grows linearly with size")
    plot.bars(by_cost, caption="08.orders")

`alt` says what the figure shows, for a reader who cannot see it. A lesson names a caption instead,
from captions/08.yaml, which holds title, labels and alt text: they often answer a prediction. This
module is the one that lessons import; the drawings themselves are in the files beside it.
"""

from labcode.teach.figures.adapters import ways_over_nodes
from labcode.teach.figures.attention import causal
from labcode.teach.figures.charts import bars, curves, heatmap, lines
from labcode.teach.figures.checkpointing import activation_checkpointing
from labcode.teach.figures.chunks import chunks
from labcode.teach.figures.clinic import calls, ward_round
from labcode.teach.figures.collectives import collective, collectives, ring
from labcode.teach.figures.data_parallel import (
    accumulation,
    buckets,
    clipping,
    copies,
    data_parallel,
    sample_weights,
)
from labcode.teach.figures.debugging import reduction_groups, spread_of_parts, watched_layer
from labcode.teach.figures.equal_training import epochs, losses_of_ranks, off_one_process
from labcode.teach.figures.experts import expert_loads, expert_rows
from labcode.teach.figures.fragments import fragments
from labcode.teach.figures.grid import grid
from labcode.teach.figures.jobs import launch_chain, second_attempt
from labcode.teach.figures.large_batch import (
    gradient_noise,
    local_steps,
    rates_against_batch,
    speed_and_price,
    steps_against_batch,
    sweep,
)
from labcode.teach.figures.layer import around_a_layer, kept
from labcode.teach.figures.local_updates import LossCurve, loss_against_cost
from labcode.teach.figures.low_precision import (
    delayed_scaling,
    format_ranges,
    fp8_linear,
    scale_blocks,
)
from labcode.teach.figures.messages import rounds
from labcode.teach.figures.nodes import transports
from labcode.teach.figures.one_device import formats, fusion, gradient_range, launches
from labcode.teach.figures.overlap import StepLanes, overlap
from labcode.teach.figures.pipeline import halves, pipeline, stages
from labcode.teach.figures.planning import layout_map, scaling, step_anatomy, step_parts
from labcode.teach.figures.profile import memory_timeline, step_breakdown
from labcode.teach.figures.progress import progress
from labcode.teach.figures.rank_order import digits, links
from labcode.teach.figures.ring_attention import ring_attention, ring_gradients, ulysses
from labcode.teach.figures.row_exchange import row_exchange
from labcode.teach.figures.sharded import hybrid_sharding, tokens_that_hide, zero, zero_steps
from labcode.teach.figures.survival import boxes, runs, save_steps
from labcode.teach.figures.tensor_flow import column_then_row, layouts, tensor_parallel_mlp
from labcode.teach.figures.timeline import timeline
from labcode.teach.figures.weights import cuts

__all__ = [
    "LossCurve",
    "StepLanes",
    "accumulation",
    "activation_checkpointing",
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
    "ulysses",
    "ward_round",
    "watched_layer",
    "ways_over_nodes",
    "zero",
    "zero_steps",
]
