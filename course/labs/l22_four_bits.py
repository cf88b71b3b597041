"""Lesson 22: sums of few bits, and a small GPT whose linear layers compute in four bits.

Held by: tests/unit/test_l22_labs.py
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course.labs import l18_gpt
from labcode.models import gpt
from labcode.precision import formats

HOPPER_BITS = 13  # of the fraction that a sum keeps
HOPPER_TERMS = 32  # products that one instruction adds to a sum
BLOCK = formats.NVFP4.block
STEPS = 120


# ---- sums of few bits


def add_aligned(terms: Tensor, fraction_bits: int) -> Tensor:
    """Exercise 22.1, finished: a sum of numbers that are cut off where the largest ends.

    Args:
        terms: [.., n] float64.
        fraction_bits: Number of fraction bits of the largest term that are kept.

    Returns:
        [..]
    """
    largest = terms.abs().amax(-1, keepdim=True)
    _, exponent = torch.frexp(largest)
    unit = torch.ldexp(torch.ones_like(largest), exponent - 1 - fraction_bits)
    return (torch.trunc(terms / unit) * unit).sum(-1)


def short_product(
    a: Tensor, b: Tensor, piece: int | None = None, fraction_bits: int = HOPPER_BITS
) -> Tensor:
    """Exercise 22.2, finished: a b^T with the sums that the tensor cores of Hopper keep.

    Args:
        a: [M, K]
        b: [N, K]
        piece: Number of products after which a sum is added to one in float64 and begins anew;
            None: never.
        fraction_bits: Number of fraction bits of a sum.

    Returns:
        [M, N] float64.

    Source: DeepSeek-AI 2024 (arXiv:2412.19437), section 3.3.2, with its footnote on the alignment
    """
    a = a.double()
    b = b.double()
    total = a.new_zeros(len(a), len(b))
    running = torch.zeros_like(total)
    for start in range(0, a.shape[1], HOPPER_TERMS):
        end = start + HOPPER_TERMS
        products = a[:, None, start:end] * b[None, :, start:end]  # [M, N, 32]
        terms = torch.cat([running[..., None], products], -1)
        running = add_aligned(terms, fraction_bits)
        if piece and end % piece == 0:
            total += running
            running = torch.zeros_like(total)
    return total + running


def numbers(kind: str, length: int, rows: int = 24) -> tuple[Tensor, Tensor]:
    """Two matrices [rows, length] of numbers of e4m3.

    Args:
        kind: "of both signs" or "positive".
        length: Number of terms in each sum of their product.
        rows: Number of rows of each factor.
    """
    generator = torch.Generator().manual_seed(length)
    draw = torch.randn if kind == "of both signs" else torch.rand
    both = draw(2, rows, length, generator=generator)
    a, b = both.to(torch.float8_e4m3fn).float()
    return a, b


def relative_distance(found: Tensor, truth: Tensor) -> float:
    """|found - truth| / |truth|, in the 2-norm."""
    return ((found - truth).norm() / truth.norm()).item()


# ---- scales for tiles


def quantize_tiles(x: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Exercise 22.3, finished: (x in e4m3, a scale for each tile of rows x columns numbers).

    Args:
        x: [R, C]
        rows: Number of rows of a tile; divides R.
        columns: Number of columns of a tile; divides C.

    Returns:
        [R, C] float8_e4m3fn, and [R / rows, C / columns] float32.
    """
    tiles = x.float().unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    # [R / rows, rows, C / columns, columns]
    amax = tiles.abs().amax((1, 3), keepdim=True)
    scale = formats.scale_for(amax, formats.E4M3)
    scaled = (tiles * scale).clamp(-448, 448).reshape(x.shape)
    return scaled.to(torch.float8_e4m3fn), scale[:, 0, :, 0]


def through_tiles(x: Tensor, rows: int, columns: int) -> Tensor:
    """What becomes of x, [R, C], by `quantize_tiles` and back."""
    q, scale = quantize_tiles(x, rows, columns)
    whole = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return q.float() / whole


def with_massive_numbers(size: float) -> Tensor:
    """[256, 512] of ordinary numbers, three of them so many times larger."""
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(256, 512, generator=generator)
    for row, column in ((3, 100), (70, 100), (200, 401)):
        x[row, column] = size
    return x


# ---- four bits


def hadamard(x: Tensor, signs: Tensor) -> Tensor:
    """Exercise 22.5, finished: each 16 neighbours of the last dim, rotated together.

    Args:
        x: [.., n]; n is a multiple of 16.
        signs: [16] of 1 and -1.
    """
    matrix = torch.ones(1, 1)
    while len(matrix) < BLOCK:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    blocks = x.unflatten(-1, (-1, BLOCK)) * signs
    return (blocks @ matrix / math.sqrt(BLOCK)).flatten(-2)


SIGNS = torch.where(torch.rand(BLOCK, generator=torch.Generator().manual_seed(1)) < 0.5, -1.0, 1.0)


def rotated(x: Tensor) -> Tensor:
    """`hadamard` with one choice of signs."""
    return hadamard(x, SIGNS)


def to_nvfp4(
    x: Tensor,
    *,
    square: bool = False,
    stochastic: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    """What a matrix [R, C] becomes in NVFP4; blocks of 16 along its rows.

    Args:
        x: float32. Rows, and for squares columns too, are filled up with zeros to whole blocks.
        square: A scale for each 16 x 16 numbers.
        stochastic: Stochastic rounding.
        generator: Generator of the chance with which it rounds.
    """
    rows, columns = x.shape
    below = -rows % BLOCK if square else 0
    padded = nn.functional.pad(x, (0, -columns % BLOCK, 0, below))
    if square:
        found = formats.cast_squares(padded, formats.NVFP4)
    else:
        rounding: formats.Rounding = "stochastic" if stochastic else "nearest"
        found = formats.cast_blocks(padded, formats.NVFP4, rounding=rounding, generator=generator)
    return found[:rows, :columns]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a training in NVFP4 does beside the cast.

    Args:
        stochastic: Gradients are rounded by chance.
        is_rotated: The operands of the weight gradient go through `rotated`.
        head_too: The last layer computes in four bits as well.
    """

    stochastic: bool = True
    is_rotated: bool = True
    head_too: bool = True


def products(
    x: Tensor,
    w: Tensor,
    dy: Tensor,
    quantize: Callable[..., Tensor],
    rotate: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Exercise 22.6, finished: the three products of a linear layer, (y, dx, dw).

    Args:
        x: [T, H]
        w: [F, H]
        dy: [T, F]
        quantize: A function such as `to_nvfp4`.
        rotate: A function such as `rotated`.
    """
    weight = quantize(w, square=True)
    y = quantize(x) @ weight.T
    dx = quantize(dy, stochastic=True) @ weight
    dw = quantize(rotate(dy.T), stochastic=True) @ quantize(rotate(x.T)).T
    return y, dx, dw


class _FourBits(torch.autograd.Function):
    """y = x w^T with three products of operands in NVFP4."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, recipe: Recipe, chance: torch.Generator) -> Tensor:
        rows = x.flatten(0, -2).float()
        weight = to_nvfp4(w.float(), square=True)
        ctx.save_for_backward(rows, weight)
        ctx.recipe = recipe
        ctx.chance = chance
        ctx.like = x
        return (to_nvfp4(rows) @ weight.T).to(x.dtype).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        rows, weight = ctx.saved_tensors
        dy = grads[0].flatten(0, -2).float()
        how = {"stochastic": ctx.recipe.stochastic, "generator": ctx.chance}
        rotate = rotated if ctx.recipe.is_rotated else torch.clone
        dx = to_nvfp4(dy, **how) @ weight
        dw = to_nvfp4(rotate(dy.T), **how) @ to_nvfp4(rotate(rows.T)).T
        return dx.to(ctx.like.dtype).view_as(ctx.like), dw, None, None


class _Linear(nn.Module):
    """A linear layer in four bits; its parameters are those of the layer that it replaces."""

    def __init__(self, layer: nn.Linear, recipe: Recipe, chance: torch.Generator) -> None:
        super().__init__()
        self.weight = layer.weight
        self.bias = layer.bias
        self.recipe = recipe
        self.chance = chance

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            x = x.to(torch.get_autocast_dtype("cpu"))
        y = _FourBits.apply(x, self.weight, self.recipe, self.chance)
        return y if self.bias is None else y + self.bias.to(y.dtype)


def in_four_bits(model: nn.Module, recipe: Recipe, seed: int = 0) -> nn.Module:
    """Let the linear layers of a model compute in NVFP4; changed in place."""
    chance = torch.Generator().manual_seed(seed)
    for name, module in list(model.named_modules()):
        is_head = name.rpartition(".")[2] == "head"
        if isinstance(module, nn.Linear) and (recipe.head_too or not is_head):
            model.set_submodule(name, _Linear(module, recipe, chance))
    return model


def operands_of_the_head(steps: int = 80) -> tuple[Tensor, Tensor]:
    """(gradient of the logits [T, V], input of the head [T, H]) after some training in float32.

    Args:
        steps: Number of steps of training.
    """
    model = l18_gpt.new_model()
    l18_gpt.train(model, steps)
    found: dict[str, Tensor] = {}

    def note(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        found["input"] = inputs[0].detach().flatten(0, -2)
        output.register_hook(note_gradient)

    def note_gradient(gradient: Tensor) -> None:
        found["gradient"] = gradient.flatten(0, -2)

    handle = model.get_submodule("head").register_forward_hook(note)
    tokens, targets = l18_gpt.batch(steps)
    gpt.loss(model(tokens), targets).backward()
    handle.remove()
    return found["gradient"], found["input"]


RUNS: dict[str, Recipe | None] = {
    "bfloat16": None,
    "to nearest": Recipe(stochastic=False, is_rotated=False),
    "stochastic gradients": Recipe(is_rotated=False),
    "stochastic and rotated": Recipe(),
    "the head in bfloat16": Recipe(head_too=False),
}


def trained(run: str, seed: int, steps: int = STEPS) -> list[float]:
    """The loss of each step of a training of lesson 18's GPT.

    Args:
        run: A key of RUNS.
        seed: Seed of the weights at the start and of the rounding by chance.
        steps: How many.
    """
    model: nn.Module = l18_gpt.new_model(seed)
    recipe = RUNS[run]
    if recipe is not None:
        model = in_four_bits(model, recipe, seed)
    return l18_gpt.train(model, steps, bfloat16=True)


def my_share(jobs: list[tuple[str, int]], steps: int = STEPS) -> dict[tuple[str, int], list[float]]:
    """The trainings that this rank does: every n-th of the jobs, (run, seed)."""
    own = jobs[dist.get_rank() :: dist.get_world_size()]
    return {(run, seed): trained(run, seed, steps) for run, seed in own}


def all_trained(ranks: Any, steps: int = STEPS) -> dict[tuple[str, int], list[float]]:
    """{(run, seed): loss of each step}: bfloat16 with three seeds, the others with two.

    Args:
        ranks: Ranks, as `course.lab.Ranks` makes them, that share the work.
        steps: Number of steps of each training.
    """
    jobs = [("bfloat16", seed) for seed in (0, 1, 2)]
    for run in RUNS:
        if run != "bfloat16":
            jobs.append((run, 0))
    jobs += [("to nearest", 1), ("stochastic gradients", 1)]
    jobs.sort(key=lambda job: job[0] == "bfloat16")  # the long ones first
    found: dict[tuple[str, int], list[float]] = {}
    for share in ranks.run(my_share, jobs, steps):
        found |= share
    return found
