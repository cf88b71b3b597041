"""Lesson 19: the calls of Transformer Engine's debug tools, with a stand-in for the library."""

import contextlib
import os
import sys
import types
from pathlib import Path
from unittest import mock

import nvdlfw_inspect.api as debug_api
import pytest
import torch
import torch.distributed as dist
from torch import nn

from course.labs import l19_transformer_engine as with_te
from course.labs.l18_transformer_engine import Sizes
from labcode.comm.grid import Grid
from labcode.debug import on_layers
from labcode.topology import GridShape

LOOK = """
look:
  enabled: True
  layers:
    layer_types: [module]
  transformer_engine:
    LogTensorStats:
      enabled: True
      tensors: [activation]
      stats: [mean, l1_norm]
"""


class StandIn(nn.Linear):
    """A layer that offers its input to the features, as those of Transformer Engine do."""

    def __init__(self, hidden_size, *_sizes, params_dtype, device, **_parallel):
        assert debug_api.DEBUG_MANAGER is not None, "initialize comes before the first layer"
        super().__init__(hidden_size, hidden_size)
        self.name = None

    def forward(self, input):
        debug_api.transformer_engine.inspect_tensor(
            self.name,
            tensor_name="activation",
            tensor=input.detach(),
            iteration=debug_api.DEBUG_MANAGER._trainer_iteration_count,
            group=debug_api.get_tensor_reduction_group(),
        )
        return super().forward(input)


@contextlib.contextmanager
def installed(folder, weights):
    """The stand-in is what is imported, with labcode's features in the place of its own."""

    @contextlib.contextmanager
    def autocast(*, recipe, amax_reduction_group):
        yield

    te = types.ModuleType("transformer_engine.pytorch")
    te.TransformerLayer = StandIn
    te.autocast = autocast
    of_debug = types.ModuleType("transformer_engine.debug")
    of_debug.__file__ = str(Path(on_layers.__file__))
    of_debug.set_weight_tensor_tp_group_reduce = weights.append
    modules = {"transformer_engine.pytorch": te, "transformer_engine.debug": of_debug}
    before = os.getcwd()
    os.chdir(folder)
    try:
        with mock.patch.dict(sys.modules, modules):
            yield
    finally:
        os.chdir(before)


def trained(folder):
    """[(name, step, value)] of this rank's file, and what was said about weights."""
    weights = []
    rank = dist.get_rank()
    grid = Grid.create(GridShape(dp=2, tp=2))
    x = torch.full((1, 2, 4), float(rank))
    steps = [[(x, x)], [(x, x), (x, x), (x, x)]]
    with installed(folder, weights):
        sizes = Sizes(4, 4, 1)
        cpu = torch.device("cpu")
        with_te.quietly(with_te.train_with_features, grid, sizes, cpu, steps, "a recipe")
    path = Path(folder, "debug", on_layers.STATISTICS, f"nvdlfw_inspect_globalrank-{rank}.log")
    lines = [line.split(" - INFO - ")[1].split() for line in path.read_text().splitlines()]
    return [(name, step, value) for name, step, value in lines], weights


def test_a_training_makes_the_calls_in_their_order(ranks4, tmp_path):
    """Every rank's file has both steps, reduced over all ranks and over the micro-batches."""
    (tmp_path / "look.yaml").write_text(LOOK)
    expected = []
    for step, total in ((0, 8 * (0 + 1 + 2 + 3)), (1, 3 * 8 * (0 + 1 + 2 + 3))):
        for name, value in (("mean", 1.5), ("l1_norm", total)):
            key = f"model.module_activation_{name}"
            expected.append((key, f"iteration={step:06d}", f"value={value:.4f}"))
    for lines, weights in ranks4.run(trained, str(tmp_path)):
        assert lines == expected
        assert weights == [True]


def spoken():
    """What is on stderr of work that warns, and how many handlers are left."""
    import io
    import logging
    import warnings

    def work(number):
        print("a line", file=sys.stderr)
        warnings.warn("of a name", FutureWarning, stacklevel=1)
        return number + 1

    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        answer = with_te.quietly(work, 1)
    handlers = [logging.getLogger(name).handlers for name in on_layers.LOGGERS]
    return answer, said.getvalue(), handlers


def test_what_the_library_says_of_itself_is_left_out(ranks1):
    assert ranks1.run(spoken) == [(2, "", [[], []])]


def test_without_the_library_one_line_says_so():
    grid = mock.Mock()
    with pytest.raises(ValueError, match="Transformer Engine is not installed"):
        with_te.train_with_features(grid, Sizes(4, 4, 1), torch.device("cpu"), [], None)
