"""Lesson 18: layers of Transformer Engine on the grid, with a stand-in for the library.

The stand-in takes the arguments of `te.TransformerLayer` and computes what they say, with a norm
and an MLP, in float64: a right answer is then that of one process.
"""

import contextlib
import sys
import types
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from course.labs import l18_transformer_engine as with_te
from labcode.comm.collectives import all_gather, reduce_scatter
from labcode.comm.grid import Grid
from labcode.topology import GridShape

SIZES = with_te.Sizes(hidden_size=8, ffn_hidden_size=16, num_attention_heads=2)
TOKENS = 4
SAMPLES = 6
CPU = torch.device("cpu")


def whole(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class StandIn(nn.Module):
    """A norm, a column-parallel and a row-parallel linear layer, the tokens cut in between."""

    def __init__(
        self,
        hidden_size,
        ffn_hidden_size,
        num_attention_heads,
        *,
        params_dtype,
        device,
        set_parallel_mode=False,
        tp_group=None,
        sequence_parallel=False,
    ):
        super().__init__()
        self.arguments = dict(locals())
        self.group = tp_group if set_parallel_mode and sequence_parallel else None
        part, parts = 0, 1
        if self.group is not None:
            part, parts = dist.get_rank(self.group), dist.get_world_size(self.group)
        up = whole(ffn_hidden_size, hidden_size, seed=1).chunk(parts)[part]
        down = whole(hidden_size, ffn_hidden_size, seed=2).chunk(parts, dim=1)[part]
        self.norm = nn.LayerNorm(hidden_size, dtype=torch.float64)
        self.up = nn.Parameter(up.clone())
        self.down = nn.Parameter(down.clone())
        for param in self.norm.parameters():
            param.sequence_parallel = parts > 1

    def forward(self, x):
        x = self.norm(x)
        if self.group is not None:
            x = all_gather(x, self.group, 0)
        y = torch.relu(x @ self.up.T) @ self.down.T
        return y if self.group is None else reduce_scatter(y, self.group, 0)


@contextlib.contextmanager
def installed():
    """The stand-in is what is imported; the recipe and group of each autocast are handed out."""
    seen = []

    @contextlib.contextmanager
    def autocast(*, enabled, recipe, amax_reduction_group):
        seen.append((enabled, recipe, dist.get_process_group_ranks(amax_reduction_group)))
        yield

    module = types.ModuleType("transformer_engine.pytorch")
    module.TransformerLayer = StandIn
    module.autocast = autocast
    with mock.patch.dict(sys.modules, {"transformer_engine.pytorch": module}):
        yield seen


def data(grid, layout):
    """This rank's part of the same input and output gradient, whatever the layout."""
    parts = []
    for seed in (3, 4):
        samples = whole(TOKENS, SAMPLES, SIZES.hidden_size, seed=seed)
        own = samples.chunk(grid.size("dp"), dim=1)[grid.coord("dp")]
        tp = dist.get_world_size(layout.tp_group)
        parts.append(own.chunk(tp)[dist.get_rank(layout.tp_group)])
    return parts


def in_one_process():
    """The gradient of each weight, a mean over dp 2 of sums."""
    layer = StandIn(*SIZES, params_dtype=torch.bfloat16, device=CPU)
    x, dy = (whole(TOKENS, SAMPLES, SIZES.hidden_size, seed=seed) for seed in (3, 4))
    layer(x).backward(dy)
    return {name: param.grad / 2 for name, param in layer.named_parameters()}


def stepped(build, shape):
    with installed() as seen:
        grid = Grid.create(shape)
        layout = build(grid, SIZES, device=CPU)
        for _ in range(2):  # what is left of one step does not reach the next
            with_te.step(layout, *data(grid, layout), "a recipe")
        layer = layout.module.module
        arguments = layer.arguments
        tp_group = arguments["tp_group"]
        return {
            "autocast": seen[0],
            "over": dist.get_process_group_ranks(layout.module.process_group),
            "tp_group": tp_group and dist.get_process_group_ranks(tp_group),
            "parallel": (arguments["set_parallel_mode"], arguments["sequence_parallel"]),
            "dtype": arguments["params_dtype"],
            "grads": {name: param.grad for name, param in layer.named_parameters()},
        }


def test_a_layer_under_ddp_shares_its_scales_over_dp(ranks2):
    expected = in_one_process()
    for found in ranks2.run(stepped, with_te.data_parallel, GridShape(dp=2)):
        assert found["autocast"] == (True, "a recipe", [0, 1])
        assert found["over"] == [0, 1]
        assert found["tp_group"] is None
        assert found["parallel"] == (False, False)
        assert found["dtype"] == torch.bfloat16
        for name, grad in found["grads"].items():
            torch.testing.assert_close(grad, expected[name], rtol=0, atol=1e-12)


def test_under_tp_the_scales_are_shared_over_dp_and_tp(ranks4):
    """The norm sees half of the tokens: without the sum over tp its gradient would be a part."""
    expected = in_one_process()
    answers = ranks4.run(stepped, with_te.tensor_parallel, GridShape(dp=2, tp=2))
    for rank, found in enumerate(answers):
        tp = rank % 2
        assert found["autocast"] == (True, "a recipe", [0, 1, 2, 3])
        assert found["over"] == [tp, tp + 2]
        assert found["tp_group"] == [rank - tp, rank - tp + 1]
        assert found["parallel"] == (True, True)
        wanted = dict(expected)
        wanted["up"] = wanted["up"].chunk(2)[tp]
        wanted["down"] = wanted["down"].chunk(2, dim=1)[tp]
        for name, grad in found["grads"].items():
            torch.testing.assert_close(grad, wanted[name], rtol=0, atol=1e-12)


def units():
    """The units of FSDP1 and FSDP2, the groups of layers, what a rank keeps, and each autocast."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    with installed() as seen:
        grid = Grid.create(GridShape(dp=2))
        older = with_te.fully_sharded_1(grid, SIZES, 3, device=CPU)
        newer = with_te.fully_sharded_2(grid, SIZES, 3, device=CPU)
        wrapped = []
        for module in older.module.modules():
            if isinstance(module, FullyShardedDataParallel):
                wrapped.append(type(module.module).__name__)
        sharded = []
        for name, module in newer.module.named_modules():
            if isinstance(module, FSDPModule):
                sharded.append(name)
        groups = []
        for layer in newer.module:
            groups.append((layer.arguments["tp_group"], layer.arguments["set_parallel_mode"]))
        for layout in (older, newer):
            with_te.step(layout, *data(grid, layout), "a recipe")
        kept = sum(param.to_local().numel() for param in newer.module.parameters())
        return wrapped, sharded, groups, kept, seen


def test_fsdp_makes_a_unit_of_each_layer_which_knows_of_no_group(ranks2):
    numbers = 3 * (2 * 8 + 2 * 16 * 8)
    for wrapped, sharded, groups, kept, seen in ranks2.run(units):
        assert wrapped == ["Sequential", "StandIn", "StandIn", "StandIn"]
        assert sharded == ["", "0", "1", "2"]
        assert groups == [(None, False)] * 3
        assert kept == numbers // 2
        assert seen == [(True, "a recipe", [0, 1])] * 2


def drawn():
    """What a layer that draws its weights gets on each rank of tp."""
    seen = []

    def layer(*_sizes, **_arguments):
        seen.append(torch.randn(2).tolist())
        return nn.Linear(2, 2)

    with installed():
        sys.modules["transformer_engine.pytorch"].TransformerLayer = layer
        with_te.tensor_parallel(Grid.create(GridShape(dp=2, tp=2)), SIZES, CPU)
    return seen


def test_the_ranks_of_tp_draw_different_weights_and_those_of_dp_the_same(ranks4):
    first, second, third, fourth = ranks4.run(drawn)
    assert first == third
    assert second == fourth
    assert first != second


def own_batch():
    grid = Grid.create(GridShape(dp=2, tp=2))
    cut = with_te.Layout(nn.Identity(), grid.group(), grid.group("tp"))
    x, dy = with_te.batch(cut, SIZES, 8, 3, CPU)
    return list(x.shape), list(dy.shape), x.dtype


def test_a_rank_of_tp_has_its_part_of_the_tokens_first(ranks4):
    assert ranks4.run(own_batch) == [([4, 3, 8], [4, 3, 8], torch.bfloat16)] * 4


@pytest.mark.parametrize(
    ("name", "num_gpus", "sizes"),
    [
        ("tensor parallel", 4, (2, 2)),
        ("tensor parallel", 1, (1, 1)),
        ("tensor parallel", 3, (3, 1)),
        ("data parallel", 4, (4, 1)),
        ("FSDP2", 2, (2, 1)),
    ],
)
def test_the_gpus_of_a_machine_are_used_as_a_grid(name, num_gpus, sizes):
    shape = with_te.shape_for(name, num_gpus)
    assert (shape.dp, shape.tp) == sizes


# ---- without the library


def test_without_the_library_there_is_one_line_that_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)
    with pytest.raises(ValueError, match=r"^Transformer Engine is not installed: on a") as caught:
        with_te.transformer_engine()
    line = str(caught.value)
    assert "NVIDIA GPU" in line
    assert line.endswith("pip install --no-build-isolation 'transformer_engine[pytorch]'")
    assert "\n" not in line
    assert with_te.why_not() == line


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError("libcudart.so.12: cannot open\nshared object"), r"\(libcudart.so.12: .* shared"),
        (AssertionError("versions differ"), r"\(versions differ\)"),
        (ModuleNotFoundError("No module named 'einops'", name="einops"), r"\(einops is missing\)"),
    ],
    ids=["library", "versions", "dependency"],
)
def test_what_cannot_be_loaded_says_why(monkeypatch, error, reason):
    def fails(_name):
        raise error

    monkeypatch.setattr(with_te.importlib, "import_module", fails)
    with pytest.raises(
        ValueError, match=f"^Transformer Engine cannot be loaded {reason}"
    ) as caught:
        with_te.transformer_engine()
    assert "\n" not in str(caught.value)


def test_a_machine_without_a_gpu_or_without_fp8_is_told_so(monkeypatch):
    module = types.ModuleType("transformer_engine.pytorch")
    module.is_fp8_available = lambda return_reason: (False, "compute capability 8.9 is needed")
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "there is no GPU" in with_te.why_not()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert with_te.why_not() == "compute capability 8.9 is needed"
    module.is_fp8_available = lambda return_reason: (True, "")
    assert with_te.why_not() == ""


def test_the_steps_that_warm_up_do_not_count():
    calls = []
    seconds = with_te.measured_step_s(lambda: calls.append(1), CPU)
    assert len(calls) == with_te.WARM_UP + 1 + 20
    assert 0 < seconds < 1
