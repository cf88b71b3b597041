"""The products of an FP8 layer, one by one: which of them run in FP8, with which scales.

    y  = x W^T     gemm "fprop"     activation, weight
    dx = dy W      gemm "dgrad"     gradient, weight
    dW = dy^T x    gemm "wgrad"     gradient, activation

`Fp8Product` keeps 8-bit operands alone for backward. Here the operands are kept as they came, too,
so that a product may run without FP8 (DisableQuantizationGEMM, and FakeQuant, which then rounds its
operands by itself), or with a scale from its own tensor on this rank alone (PerTensorScaling), and
so that what a cast has lost can be counted (LogFp8TensorStats), in the recipe of the run or in
another one. It costs the memory that FP8 saves.

Held by: tests/unit/test_fp8_debug.py, tests/ranks/test_debug.py
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import nn

from labcode.debug.debug_config import BLOCKS, CURRENT, DELAYED
from labcode.parallel.linear import (
    PLAIN_PRODUCT,
    MatrixProduct,
    current_store,
    narrowed,
)
from labcode.precision.formats import Format, scale_for
from labcode.precision.fp8 import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Fp8Matrix,
    Fp8Product,
    Recipe,
    Scaling,
    product,
    quantize,
    wanted_gradients,
)

OPERANDS = {"activation": "input", "weight": "weight", "gradient": "gradient"}

# told of each cast (tensor name, the cast)
OnCast = Callable[[str, "Cast"], None]


def recipe_name(recipe: Recipe) -> str:
    """A recipe's name in Transformer Engine's statistics."""
    if isinstance(recipe, DelayedScaling):
        return DELAYED
    return CURRENT if isinstance(recipe, CurrentScaling) else BLOCKS


@dataclass(frozen=True)
class CastErrors:
    """What a cast to 8 bits has lost; parts of a tensor add up.

    Args:
        count: Number of values.
        underflows: Number of values that are not 0 before the cast and 0 after it.
        overflows: Number of values that are too large for the format, and became its largest
            number.
        squares: Sum of the squares of the errors.
        scale_inv_min, scale_inv_max: Smallest and largest 1 / scale of the parts.
    """

    count: float = 0.0
    underflows: float = 0.0
    overflows: float = 0.0
    squares: float = 0.0
    scale_inv_min: float = math.inf
    scale_inv_max: float = 0.0

    def __add__(self, other: "CastErrors") -> "CastErrors":
        return CastErrors(
            self.count + other.count,
            self.underflows + other.underflows,
            self.overflows + other.overflows,
            self.squares + other.squares,
            min(self.scale_inv_min, other.scale_inv_min),
            max(self.scale_inv_max, other.scale_inv_max),
        )

    def numbers(self) -> list[float]:
        """All sums, to be sent; `CastErrors(*numbers)` is the same again."""
        return list(astuple(self))

    def statistic(self, name: str) -> float:
        """A statistic by its name in Transformer Engine's LogFp8TensorStats."""
        if name == "underflows%":
            return 100 * self.underflows / max(1.0, self.count)
        if name == "overflows%":
            return 100 * self.overflows / max(1.0, self.count)
        if name == "mse":
            return self.squares / max(1.0, self.count)
        return {"scale_inv_min": self.scale_inv_min, "scale_inv_max": self.scale_inv_max}[name]


@dataclass(frozen=True)
class Cast:
    """An operand before and after its cast.

    Args:
        before: [R, C], as it was.
        after: By `scaling`.
        scaling: What has cast it.
    """

    before: torch.Tensor
    after: Fp8Matrix
    scaling: Scaling

    def errors(self, recipe: str = "", columnwise: bool = False) -> CastErrors:
        """What the cast has lost, or what that of another recipe would lose.

        Another recipe casts the tensor once more, with a scale of this rank alone. In mxfp8 it is
        e4m3 for gradients, too, as such a run would have it; Transformer Engine keeps the format of
        the tensor.

        Args:
            recipe: Its name in Transformer Engine's statistics; "": that of the run.
            columnwise: Whether it is the cast for sums along columns.
        """
        scaling = self.scaling
        made = self.after
        if recipe not in ("", recipe_name(scaling.recipe)):
            other = CurrentScaling() if recipe == CURRENT else BlockScaling()
            scaling = Scaling(other, scaling.to, None)
            made = scaling.cast(self.before, record=False)
        to = None if isinstance(scaling.recipe, BlockScaling) else scaling.to
        rows = made.columns if columnwise else made.rows
        return count_errors(self.before, made._replace(rows=rows), to)


def count_errors(x: torch.Tensor, made: Fp8Matrix, to: Format | None) -> CastErrors:
    """What a cast of x has lost.

    Args:
        x: [R, C], as it was.
        made: Its cast, of which the rows are looked at.
        to: The format; None for block formats, in which nothing is too large.
    """
    limit = math.inf
    if to is not None:
        # half a step above the largest number; the product with a scale may end just above it
        limit = to.largest + to.spacing(to.largest) / 2
    wide = x.detach().float()
    after = made.rows.float()
    errors = after / made.scale - wide
    lost = (after == 0) & (wide != 0)
    too_large = (wide * made.scale).abs() >= limit
    # stacked, so that a GPU waits once and not four times
    sums = [lost.sum(), too_large.sum(), errors.double().square().sum(), 1 / made.scale.double()]
    underflows, overflows, squares, scale_inv = torch.stack([s.double() for s in sums]).tolist()
    return CastErrors(float(x.numel()), underflows, overflows, squares, scale_inv, scale_inv)


class DebuggedFp8Product:
    """Stands for an `Fp8Product` while a layer is debugged.

    Args:
        inner: The product whose scales and histories are used.
        disabled: Products that run without FP8.
        per_tensor: {(gemm, tensor): powers of two left free} of operands with a scale of their own.
        on_cast: Called for every cast of a training step; None: not called.
        plain: Computes the products without FP8.
    """

    def __init__(
        self,
        inner: Fp8Product,
        disabled: Collection[str],
        per_tensor: Mapping[tuple[str, str], int],
        on_cast: OnCast | None = None,
        plain: MatrixProduct = PLAIN_PRODUCT,
    ) -> None:
        self.inner = inner
        self.disabled = disabled
        self.per_tensor = per_tensor
        self.on_cast = on_cast
        self.plain = plain

    def __call__(
        self, x: torch.Tensor, weight: nn.Parameter, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """`x W^T + bias`, [.., H] to [.., F]."""
        x_narrow, weight_narrow, bias_narrow = narrowed(x, weight, bias)
        record = torch.is_grad_enabled()
        store = current_store.get()
        return _DebuggedLinear.apply(
            x_narrow, weight_narrow, bias_narrow, weight, self, record, store
        )

    def scaling(self, tensor: str) -> Scaling:
        """What casts an operand."""
        return self.inner.scalings[OPERANDS[tensor]]

    def cast(self, tensor: str, x: torch.Tensor, record: bool) -> Fp8Matrix:
        """An operand as the recipe casts it; told to `on_cast`."""
        scaling = self.scaling(tensor)
        made = scaling.cast(x, record=record)
        if record and self.on_cast is not None:
            self.on_cast(tensor, Cast(x.detach(), made, scaling))
        return made

    def operand(self, gemm: str, tensor: str, x: torch.Tensor, made: Fp8Matrix) -> Fp8Matrix:
        """An operand of one product: as the recipe made it, or with a scale of its own."""
        if (gemm, tensor) not in self.per_tensor:
            return made
        to = self.scaling(tensor).to
        scale = scale_for(x.detach().abs().amax(), to, self.per_tensor[gemm, tensor])
        # one scale for the whole tensor: the cast for sums along columns is the same
        data = quantize(x.detach(), to, scale)
        return Fp8Matrix(data, data, scale)


class _DebuggedLinear(torch.autograd.Function):
    """A linear layer of three products, each with or without FP8."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        param: nn.Parameter,
        debugged: DebuggedFp8Product,
        record: bool,
        store: Any,
    ) -> torch.Tensor:
        rows = x.flatten(0, -2)  # [T, H]
        x8 = debugged.cast("activation", rows, record)
        w8 = debugged.cast("weight", weight, record)
        ctx.save_for_backward(rows, weight)
        # As attributes, since they are tuples. The hooks of activation checkpointing see what is in
        # save_for_backward alone, so that these stay in memory even where a layer is checkpointed.
        ctx.x8 = x8
        ctx.w8 = w8
        ctx.param = param
        ctx.debugged = debugged
        ctx.store = store
        if "fprop" in debugged.disabled:
            return debugged.plain.forward(x, weight, bias)
        a = debugged.operand("fprop", "activation", rows, x8)
        b = debugged.operand("fprop", "weight", weight, w8)
        y = product(a.rows, b.rows, a.scale, b.scale).to(x.dtype)
        y = y.unflatten(0, x.shape[:-1])
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        x, weight = ctx.saved_tensors
        debugged = ctx.debugged
        (dy,) = grads
        rows = dy.flatten(0, -2)  # [T, F]
        # Cast even if no product reads it: the history of delayed scaling goes on with its amax,
        # and the layer may be in FP8 again in the next step.
        dy8 = debugged.cast("gradient", rows, True)

        def grad_weight() -> torch.Tensor:
            if "wgrad" in debugged.disabled:
                return debugged.plain.grad_weight(rows, x)
            a = debugged.operand("wgrad", "gradient", rows, dy8)
            b = debugged.operand("wgrad", "activation", x, ctx.x8)
            return product(a.columns.T, b.columns.T, a.scale, b.scale).to(dy.dtype)

        def grad_input() -> torch.Tensor:
            if "dgrad" in debugged.disabled:
                return debugged.plain.grad_input(rows, weight)
            a = debugged.operand("dgrad", "gradient", rows, dy8)
            b = debugged.operand("dgrad", "weight", weight, ctx.w8)
            return product(a.rows, b.columns.T, a.scale, b.scale).to(dy.dtype)

        return wanted_gradients(ctx, dy, grad_input, grad_weight)
