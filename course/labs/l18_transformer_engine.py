"""Lesson 18: layers of Transformer Engine on our grid, to be read where it is not installed.

Three layouts of one layer: data parallel, tensor parallel with sequence parallelism, fully sharded.
Its own collectives run inside the layer; the wrappers are PyTorch's.

Shapes: S tokens, B samples, H features, t ranks of tp. Its layers hold [S, B, H], the sequence
first, so that the rows of several ranks lie one behind the other after an all-gather.

Source: Transformer Engine 2.20.0.dev0 (August 2026), user guide, "Performance optimizations", which
    before was "Multi-GPU training"; examples/pytorch/fsdp/fsdp.py; tests/pytorch/distributed.
Held by: tests/ranks/test_l18_transformer_engine.py with a stand-in for the library;
    tests/gpu/test_transformer_engine_gpu.py with the library.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.nn.parallel import DistributedDataParallel

from labcode.comm.grid import Grid
from labcode.measure.device_speed import median_s
from labcode.topology import GridShape

INSTALL = "pip install --no-build-isolation 'transformer_engine[pytorch]'"
WARM_UP = 10  # steps that do not count: kernels are chosen, and the first scales are found


class Sizes(NamedTuple):
    """Sizes of one transformer layer, in the order in which `te.TransformerLayer` takes them."""

    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int


class Layout(NamedTuple):
    """A layer that is spread over ranks.

    Args:
        module: What is called.
        amax_group: The ranks that share the scales.
        tp_group: The ranks that cut the tokens between the products; one rank without tp.
    """

    module: nn.Module
    amax_group: dist.ProcessGroup
    tp_group: dist.ProcessGroup


def transformer_engine() -> Any:
    """The module `transformer_engine.pytorch`.

    Raises:
        ValueError: It is not installed, or cannot be loaded.
    """
    try:
        return importlib.import_module("transformer_engine.pytorch")
    except ModuleNotFoundError as error:
        why = "is not installed"
        if error.name and not error.name.startswith("transformer_engine"):
            why = f"cannot be loaded ({error.name} is missing)"
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        # a wheel for another CUDA or another torch, or only the part for another framework
        why = f"cannot be loaded ({' '.join(str(error).split())})"
    raise ValueError(f"Transformer Engine {why}: on a machine with an NVIDIA GPU, {INSTALL}")


def why_not() -> str:
    """Why no FP8 step of Transformer Engine can run on this machine, in one line; "" if one can."""
    try:
        te = transformer_engine()
    except ValueError as error:
        return str(error)
    if not torch.cuda.is_available():
        return "Transformer Engine is installed, but there is no GPU, and it has none for CPUs"
    is_available, reason = te.is_fp8_available(return_reason=True)
    return "" if is_available else reason


# ---- the layouts


def plain_layer(sizes: Sizes, device: torch.device) -> nn.Module:
    """Attention and MLP with their norms, whole on this rank."""
    te = transformer_engine()
    return te.TransformerLayer(*sizes, params_dtype=torch.bfloat16, device=device)


def data_parallel(grid: Grid, sizes: Sizes, device: torch.device) -> Layout:
    """Copies of a layer."""
    dp_group = grid.group("dp")
    ddp = DistributedDataParallel(plain_layer(sizes, device), process_group=dp_group)
    return Layout(ddp, amax_group=dp_group, tp_group=grid.group())


def tensor_parallel(grid: Grid, sizes: Sizes, device: torch.device) -> Layout:
    """A layer cut over tp, its tokens between the products too; copies of it over dp."""
    te = transformer_engine()
    torch.manual_seed(grid.coord("tp"))  # or all ranks of tp would draw the same part of a weight
    layer = te.TransformerLayer(
        *sizes,
        set_parallel_mode=True,
        tp_group=grid.group("tp"),
        sequence_parallel=True,
        params_dtype=torch.bfloat16,
        device=device,
    )
    ddp = DistributedDataParallel(layer, process_group=grid.group("dp"))
    return Layout(ddp, amax_group=grid.group("dp", "tp"), tp_group=grid.group("tp"))


def fully_sharded_1(grid: Grid, sizes: Sizes, num_layers: int, device: torch.device) -> Layout:
    """Layers that know of no group, each a unit of FSDP1."""
    te = transformer_engine()
    model = nn.Sequential(*[plain_layer(sizes, device) for _ in range(num_layers)])
    find_layers = functools.partial(
        transformer_auto_wrap_policy, transformer_layer_cls={te.TransformerLayer}
    )
    dp_group = grid.group("dp")
    fsdp = FullyShardedDataParallel(
        model,
        process_group=dp_group,
        auto_wrap_policy=find_layers,
        use_orig_params=True,
        device_id=device,
    )
    return Layout(fsdp, amax_group=dp_group, tp_group=grid.group())


def fully_sharded_2(grid: Grid, sizes: Sizes, num_layers: int, device: torch.device) -> Layout:
    """The same with FSDP2."""
    model = nn.Sequential(*[plain_layer(sizes, device) for _ in range(num_layers)])
    for layer in model:
        fully_shard(layer, mesh=grid.mesh["dp"])
    fully_shard(model, mesh=grid.mesh["dp"])
    return Layout(model, amax_group=grid.group("dp"), tp_group=grid.group())


# ---- a step


def step(layout: Layout, x: Tensor, dy: Tensor, recipe: Any) -> None:
    """Forward in FP8, backward, and what is left to do for the gradients."""
    te = transformer_engine()
    layout.module.zero_grad()
    with te.autocast(enabled=True, recipe=recipe, amax_reduction_group=layout.amax_group):
        y = layout.module(x)
    y.backward(dy)
    sum_shared_gradients(layout)


def sum_shared_gradients(layout: Layout) -> None:
    """Sum the gradients of weights that see only a part of the tokens over tp.

    Transformer Engine marks them `sequence_parallel`, and leaves the sum to its caller.
    """
    for param in layout.module.parameters():
        if getattr(param, "sequence_parallel", False):
            dist.all_reduce(param.grad, group=layout.tp_group)


def batch(
    layout: Layout, sizes: Sizes, tokens: int, samples: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """This rank's input and the gradient of its output, [S/t, B, H] each.

    Args:
        layout: Says over how many ranks the tokens are cut.
        sizes: Sizes of the layer.
        tokens: S, of a whole sequence.
        samples: B, of this rank.
        device: Where.
    """
    own_tokens = tokens // dist.get_world_size(layout.tp_group)
    shape = (own_tokens, samples, sizes.hidden_size)
    x = torch.randn(shape, dtype=torch.bfloat16, device=device)
    return x, torch.randn_like(x)


def measured_step_s(work: Callable[[], None], device: torch.device) -> float:
    """Median seconds of a step, after some that do not count.

    Args:
        work: A step.
        device: What is waited for.
    """
    for _ in range(WARM_UP):
        work()
    return median_s(device, work, repeats=20)


# ---- for one cell: a step of each layout on the GPUs of this machine

GUIDE = Sizes(hidden_size=4096, ffn_hidden_size=16384, num_attention_heads=32)
NUM_LAYERS = 2  # of the fully sharded models
LAYOUTS: dict[str, Callable[..., Layout]] = {
    "data parallel": data_parallel,
    "tensor parallel": tensor_parallel,
    "FSDP1": functools.partial(fully_sharded_1, num_layers=NUM_LAYERS),
    "FSDP2": functools.partial(fully_sharded_2, num_layers=NUM_LAYERS),
}


def shape_for(name: str, num_gpus: int) -> GridShape:
    """tp 2 for the layout that uses it, where the GPUs can be paired; the others are dp."""
    if name == "tensor parallel" and num_gpus % 2 == 0:
        return GridShape(dp=num_gpus // 2, tp=2)
    return GridShape(dp=num_gpus)


def measure(name: str, sizes: Sizes = GUIDE, tokens: int = 2048, samples: int = 4) -> float:
    """Seconds of a step on the GPU of each rank; every rank of the job calls it.

    Args:
        name: A key of LAYOUTS.
        sizes: Sizes of the layer; those of the guide.
        tokens: S
        samples: B of each rank.

    Raises:
        ValueError: Transformer Engine is not there.
    """
    te_recipe = importlib.import_module("transformer_engine.common.recipe")
    grid = Grid.create(shape_for(name, dist.get_world_size()))
    device = torch.device("cuda", torch.cuda.current_device())
    layout = LAYOUTS[name](grid, sizes, device=device)
    x, dy = batch(layout, sizes, tokens, samples, device)
    recipe = te_recipe.DelayedScaling(amax_history_len=16, amax_compute_algo="max")
    return measured_step_s(functools.partial(step, layout, x, dy, recipe), device)
