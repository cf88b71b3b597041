"""Lesson 19: a training with Transformer Engine's debug features, to be read where it is not there.

The calls are those that a user of Transformer Engine writes; what they do for labcode's layers is
`debug.on_layers`. The layer is that of lesson 18.

Source: Transformer Engine 2.20.0.dev0 (August 2026), user guide, "Precision debug tools", and
    debug/features/utils; nvdlfw_inspect 0.2.2.
Held by: tests/ranks/test_l19_transformer_engine.py with a stand-in for the library.
"""

import contextlib
import importlib
import io
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import nvdlfw_inspect.api as debug_api
import torch
from torch import Tensor

from course.labs.l18_transformer_engine import (
    Sizes,
    sum_shared_gradients,
    tensor_parallel,
    transformer_engine,
)
from labcode.comm.grid import Grid
from labcode.debug.on_layers import forget_handlers


def train_with_features(
    grid: Grid,
    sizes: Sizes,
    device: torch.device,
    steps: Sequence[Sequence[tuple[Tensor, Tensor]]],
    recipe: Any,
    tb_writer: Any = None,
) -> None:
    """Train a layer that tp cuts, with the features that `look.yaml` names.

    Args:
        grid: Over which the layer is spread.
        sizes: Of the layer.
        device: Where.
        steps: For each step its micro-batches: an input and the gradient of the output.
        recipe: Of FP8.
        tb_writer: A SummaryWriter, on one rank of each pipeline stage; None on the others.
    """
    te = transformer_engine()
    te_debug: Any = importlib.import_module("transformer_engine.debug")
    debug_api.initialize(
        config_file="look.yaml",
        feature_dirs=[str(Path(te_debug.__file__).parent / "features")],
        log_dir="debug",
        default_logging_enabled=True,
        tb_writer=tb_writer,
    )
    debug_api.set_tensor_reduction_group(grid.group("dp", "tp"))
    te_debug.set_weight_tensor_tp_group_reduce(True)
    layout = tensor_parallel(grid, sizes, device)
    debug_api.infer_and_assign_layer_names(layout.module)
    for micro_batches in steps:
        layout.module.zero_grad()
        for x, dy in micro_batches:
            with te.autocast(recipe=recipe, amax_reduction_group=layout.amax_group):
                y = layout.module(x)
            y.backward(dy)
        sum_shared_gradients(layout)
        # here the optimizer makes its step
        debug_api.step()
    debug_api.end_debug()


def quietly(work: Callable[..., Any], *args: Any) -> Any:
    """What `work` returns, without what nvdlfw_inspect says of itself; its files are closed.

    It calls a collective of torch by a name that is about to go, and every rank is told so.
    """
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore", FutureWarning)
            return work(*args)
    finally:
        forget_handlers()
