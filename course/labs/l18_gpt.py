"""Lesson 18: a small GPT, the tensors of one of its layers, and finished versions of exercises.

Held by: tests/unit/test_l18_labs.py
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from labcode.comm.grid import Grid
from labcode.config import GPTConfig, ParallelConfig, TextData
from labcode.data import text
from labcode.models import gpt, layers
from labcode.models.parallelize import parallelize
from labcode.precision import formats
from labcode.precision.fp8 import CurrentScaling, DelayedScaling, Fp8, Recipe
from labcode.topology import GridShape

CHARACTERS = 83  # of the text that the course ships
CONFIG = GPTConfig(
    vocab_size=CHARACTERS, context_length=64, num_layers=2, num_heads=4, hidden_size=64
)
BATCH = 16
LR = 1e-3
LAYER = "blocks.1.mlp.up"  # whose tensors are looked at
# four ranks each
LAYOUTS = {
    "DDP": (GridShape(dp=4), ParallelConfig()),
    "TP": (GridShape(tp=4), ParallelConfig()),
    "FSDP": (GridShape(dp=4), ParallelConfig(zero_stage=3)),
    "dp 2 x tp 2": (GridShape(dp=2, tp=2), ParallelConfig()),
}
PARTS = ("hardly any", "half", "nearly all")
SHARED_OVER = {"all": ("dp", "cp", "tp"), "tp": ("tp",), "none": ()}


@cache
def windows() -> text.TextDataset:
    """Windows of Shakespeare's characters."""
    return text.load(TextData(), CONFIG.context_length).train


def part_in_words(share: float) -> str:
    """Which of PARTS a share is nearest to, a number from 0 to 1."""
    return PARTS[round(2 * share)]


def batch(step: int, size: int = BATCH) -> tuple[Tensor, Tensor]:
    """Tokens and targets of a step, each [size, S] int64; the same at each call."""
    generator = np.random.default_rng(step)
    return windows()[generator.integers(len(windows()), size=size)]


def new_model(seed: int = 0) -> gpt.GPT:
    """The GPT of this lesson: 2 layers, 64 features, the same weights at each call."""
    return layers.initialize(gpt.GPT(CONFIG), seed=seed)


def train(
    model: torch.nn.Module,
    steps: int,
    *,
    bfloat16: bool = False,
    after_step: Callable[[], None] | None = None,
) -> list[float]:
    """Train with AdamW; the loss of each step, in nats.

    Args:
        model: Any that takes tokens.
        steps: How many.
        bfloat16: What is not in FP8 is in bfloat16, by autocast.
        after_step: Called after each step of the optimizer.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    losses = []
    for step in range(steps):
        tokens, targets = batch(step)
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            loss = gpt.loss(model(tokens), targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if after_step is not None:
            after_step()
        losses.append(loss.item())
    return losses


def tensors(steps: int = 40) -> dict[str, Tensor]:
    """Input, weight and gradient of the output of one linear layer, after some training.

    Args:
        steps: Number of steps of training.
    """
    model = new_model()
    train(model, steps)
    layer = cast(torch.nn.Linear, model.get_submodule(LAYER))
    found: dict[str, Tensor] = {}

    def note_input(module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        found["input"] = inputs[0].detach().flatten()
        found["weight"] = layer.weight.detach().flatten()
        output.register_hook(note_gradient)

    def note_gradient(gradient: Tensor) -> None:
        found["gradient of the output"] = gradient.flatten()

    handle = layer.register_forward_hook(note_input)
    tokens, targets = batch(steps)
    gpt.loss(model(tokens), targets).backward()
    handle.remove()
    return found


def gradient_errors(recipe: Recipe, *, head_too: bool = False, steps: int = 40) -> dict[str, float]:
    """{linear layer: |g - g32| / |g32|} of the gradients of the weights, after some training.

    Here g is the gradient with the products in FP8, and g32 that in float32.

    Args:
        recipe: Recipe of FP8.
        head_too: The head computes in FP8 as well.
        steps: Number of steps of training, in float32.
    """
    model = new_model()
    train(model, steps)
    wanted = _gradients(model, steps)
    in_fp8 = Fp8(recipe, skip=() if head_too else ("head",))
    found = _gradients(in_fp8.convert(model), steps)
    errors = {}
    for name, true in wanted.items():
        errors[name] = ((found[name] - true).norm() / true.norm()).item()
    return errors


def _gradients(model: torch.nn.Module, step: int) -> dict[str, Tensor]:
    """The gradient of the weight of each linear layer of the blocks, for the batch of a step."""
    tokens, targets = batch(step)
    model.zero_grad()
    gpt.loss(model(tokens), targets).backward()
    found = {}
    for name, param in model.named_parameters():
        if name.startswith("blocks.") and param.dim() == 2:
            assert param.grad is not None
            found[name.removesuffix(".weight")] = param.grad.clone()
    return found


def kept_bytes(function: Callable[..., Tensor], *inputs: Tensor) -> int:
    """What autograd keeps of a call for its backward.

    Args:
        function: Called with the inputs.
        inputs: Tensors.
    """
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    def same(tensor: Tensor) -> Tensor:
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, same):
        output = function(*inputs)
    found = sum(kept.values())
    del output
    return found


def smooth(values: Sequence[float], width: int = 10) -> list[float]:
    """The mean of each value and those before it, `width` of them at most."""
    found = []
    for place in range(1, len(values) + 1):
        window = values[max(0, place - width) : place]
        found.append(sum(window) / len(window))
    return found


# ---- formats side by side


class Option(NamedTuple):
    """A format to choose.

    Args:
        bits: Bits for each number, with its part of the scales of blocks.
        cast: x as this format holds it.
    """

    bits: float
    cast: Callable[[Tensor], Tensor]


def _with_one_scale(x: Tensor, to: formats.Format) -> Tensor:
    scale = formats.scale_for(x.abs().max(), to)
    return formats.cast(x * scale, to) / scale


def _as_int8(x: Tensor) -> Tensor:
    """255 numbers at equal distances, one scale."""
    amax = x.abs().max()
    scale = torch.where(amax > 0, 127 / amax, torch.ones_like(amax))
    return torch.round(x * scale).clamp(-127, 127) / scale


OPTIONS = {
    "nvfp4": Option(formats.NVFP4.bits_per_number, partial(formats.cast_blocks, to=formats.NVFP4)),
    "int8": Option(8, _as_int8),
    "e4m3": Option(8, partial(_with_one_scale, to=formats.E4M3)),
    "e5m2": Option(8, partial(_with_one_scale, to=formats.E5M2)),
    "mxfp8": Option(formats.MXFP8.bits_per_number, partial(formats.cast_blocks, to=formats.MXFP8)),
    "bfloat16": Option(16, partial(formats.cast, to=formats.BFLOAT16)),
}


def with_outlier(size: float, rows: int = 64, features: int = 512) -> Tensor:
    """[rows, features] of ordinary numbers, one feature of them so many times larger."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(rows, features, generator=generator)
    x[:, 100] *= size
    return x


def relative_error(x: Tensor, found: Tensor, where: Tensor | None = None) -> float:
    """The mean of |found - x| / |x| over the numbers that are not zero; 0 if there are none.

    Args:
        x: What was cast.
        found: What became of it.
        where: Which numbers count; None: all.
    """
    counts = x != 0
    if where is not None:
        counts &= where
    if not counts.any():
        return 0.0
    return ((found - x).abs()[counts] / x.abs()[counts]).mean().item()


def cases() -> dict[str, Tensor]:
    """Tensors of several kinds, [64, 512] each."""
    generator = torch.Generator().manual_seed(9)
    ordinary = torch.randn(64, 512, generator=generator)
    even = 2 * torch.rand(64, 512, generator=generator) - 1
    powers = torch.randint(-40, 1, (64, 1), generator=generator)
    wide = torch.ldexp(torch.sign(ordinary) + 0.2 * ordinary, powers.expand(64, 512))
    return {
        "ordinary numbers": ordinary,
        "spread evenly": even,
        "an outlier of 10,000": with_outlier(1e4),
        "40 powers of two": wide,
        "zeros": torch.zeros(64, 512),
    }


def cheapest(x: Tensor, most_error: float) -> str | None:
    """Exercise 18.10, finished: the format with the fewest bits that is good enough.

    Args:
        x: [.., a multiple of 32]
        most_error: Largest relative error.

    Returns:
        Its name in OPTIONS; None: there is none.
    """
    good = []
    for name, option in OPTIONS.items():
        error = relative_error(x, option.cast(x))
        if error <= most_error:  # never true of nan
            good.append((option.bits, error, name))
    return min(good)[2] if good else None


# ---- on ranks


def scale_on_a_grid(share: str) -> float:
    """Train some steps on dp 2 x tp 2; the scale of the input of an MLP's second layer.

    Args:
        share: Which ranks use the same scales: "all", "tp" or "none".
    """
    _, in_fp8 = _trained_on("dp 2 x tp 2", share, DelayedScaling(history_length=4), 3)
    scaling = in_fp8.products["blocks.1.mlp.down"].scalings["input"]
    return scaling.scale.item()


def first_loss(layout: str, share: str) -> float:
    """The loss of the first step with current scaling, the mean over all samples.

    Args:
        layout: A key of LAYOUTS.
        share: Which ranks use the same scales.
    """
    losses, _ = _trained_on(layout, share, CurrentScaling(), 1)
    return losses[0]


def _trained_on(layout: str, share: str, recipe: Recipe, steps: int) -> tuple[list[float], Fp8]:
    """(The loss of each step, the FP8 of the model) after some steps on this rank's part."""
    shape, parallel = LAYOUTS[layout]
    grid = Grid.create(shape)
    in_fp8 = Fp8(recipe, grid.group(*SHARED_OVER[share]))
    with torch.device("meta"):
        whole = gpt.GPT(CONFIG)
    model = parallelize(whole, grid, parallel, seed=0, fp8=in_fp8)
    optimizer = torch.optim.AdamW(model.weights.values(), lr=LR)
    losses = []
    for step in range(steps):
        tokens, targets = batch(step)
        own = slice(grid.coord("dp"), None, shape.dp)  # of the samples
        loss = model.forward_backward([(tokens[own], targets[own])])
        optimizer.step()
        optimizer.zero_grad()
        in_fp8.finish_step()
        mean = torch.tensor(float(loss))
        dist.all_reduce(mean, group=grid.group("dp"))
        losses.append(mean.item() / shape.dp)
    return losses, in_fp8


# ---- finished versions


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Exercise 18.5: (x * scale in 8 bits, the scale, a float32 tensor without dims).

    Args:
        x: Tensor of any shape and floating dtype.
        dtype: `torch.float8_e4m3fn` or `torch.float8_e5m2`.
    """
    largest = torch.finfo(dtype).max
    amax = x.detach().abs().max().float()
    scale = torch.where(amax > 0, largest / amax, torch.ones_like(amax))
    scaled = (x.detach().float() * scale).clamp(-largest, largest)
    return scaled.to(dtype), scale


class _Fp8Linear(torch.autograd.Function):
    """Exercise 18.7."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x8, x_scale = quantize(x.reshape(-1, x.shape[-1]), torch.float8_e4m3fn)
        w8, w_scale = quantize(weight, torch.float8_e4m3fn)
        ctx.save_for_backward(x8, x_scale, w8, w_scale)
        ctx.dtypes = (x.dtype, weight.dtype)
        y = (x8.float() / x_scale) @ (w8.float() / w_scale).T
        return y.to(x.dtype).reshape(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x8, x_scale, w8, w_scale = ctx.saved_tensors
        x_dtype, w_dtype = ctx.dtypes
        (dy,) = grads
        dy8, dy_scale = quantize(dy.reshape(-1, dy.shape[-1]), torch.float8_e5m2)
        gradient = dy8.float() / dy_scale
        dx = gradient @ (w8.float() / w_scale)
        dw = gradient.T @ (x8.float() / x_scale)
        return dx.to(x_dtype).reshape(*dy.shape[:-1], w8.shape[1]), dw.to(w_dtype)


def fp8_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Exercise 18.7, finished: y = x W^T with all three products of 8-bit operands.

    Args:
        x: [..., in]
        weight: [out, in]
    """
    return _Fp8Linear.apply(x, weight)
