"""FP8 training: the three products of a linear layer with 8-bit operands, and their scales.

    forward            y  = x W^T     x and W in e4m3
    input gradient     dx = dy W      dy in e5m2, W in e4m3
    weight gradient    dW = dy^T x    dy in e5m2, x in e4m3

Each operand is multiplied by a scale before the cast, and the product is divided by both. A recipe
says where a scale comes from:

    DelayedScaling     the largest amax of the last steps; one all-reduce of all amaxes a step
    CurrentScaling     the amax of the tensor itself; an all-reduce for each operand, if shared
    BlockScaling       a power of two for each 32 numbers (MXFP8); nothing is communicated

    fp8 = Fp8(DelayedScaling(), group)
    fp8.convert(model)          # its linear layers compute in FP8 from now on
    ...                         # forward, backward, optimizer
    fp8.finish_step()           # the amaxes of this step go into the histories

`with fp8.autocast(model):` around a forward does the same for that forward and its backward alone.

On a GPU with FP8 the products run through `torch._scaled_mm`; elsewhere the 8-bit numbers are
multiplied in float32, which gives the same products, as two of them multiply exactly.

Source: Micikevicius et al. 2022 (arXiv:2209.05433); Transformer Engine, user guide, "FP8 primer".
Held by: tests/ranks/test_fp8.py, tests/unit/test_fp8_products.py
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from labcode.config import Fp8Config
from labcode.parallel.linear import GradientStore, computed_or_kept, current_store, narrowed
from labcode.precision.formats import (
    E4M3,
    E5M2,
    MXFP8,
    BlockFormat,
    Format,
    cast_blocks,
    scale_for,
)
from labcode.runtime.suggest import unknown

FP8_CAPABILITY = (8, 9)  # of the first GPUs that multiply in FP8: Ada and Hopper
TILE = 16  # what K and N of a product in FP8 must be multiples of on a GPU
OPERANDS = {"input": E4M3, "weight": E4M3, "gradient": E5M2}


# ---- recipes


@dataclass(frozen=True)
class DelayedScaling:
    """The scale comes from the amaxes of the last steps.

    Args:
        history_length: How many steps are remembered. Transformer Engine's default is 1024.
        margin: Powers of two that are left free for growth.
        amax: "max" of the history, or the "most_recent".
    """

    history_length: int = 16
    margin: int = 0
    amax: Literal["max", "most_recent"] = "max"


@dataclass(frozen=True)
class CurrentScaling:
    """The scale comes from the tensor itself, which is looked at twice.

    Communicates: in training an all-reduce of 4 bytes for each operand, before its cast; in a
        validation nothing.

    Args:
        margin: Powers of two that are left free.
    """

    margin: int = 0


@dataclass(frozen=True)
class BlockScaling:
    """A scale for each block of numbers along the sum of a product; gradients in e4m3, too.

    Args:
        to: The format of the blocks.
    """

    to: BlockFormat = MXFP8


Recipe = DelayedScaling | CurrentScaling | BlockScaling


def make_recipe(settings: Fp8Config) -> Recipe:
    """The recipe of a run."""
    if settings.recipe == "delayed":
        return DelayedScaling(settings.history_length, settings.margin, settings.amax)
    if settings.recipe == "current":
        return CurrentScaling(settings.margin)
    return BlockScaling()


# ---- tensors of 8 bits


class Fp8Matrix(NamedTuple):
    """A matrix as the operand of products, [R, C].

    Args:
        rows: For a product whose sum runs along a row: 8-bit numbers, or float32 ones on the grid
            of a block format.
        columns: For a sum along a column. The same tensor unless scales belong to blocks.
        scale: The factor by which the numbers are too large, float32 without dims; 1 for block
            formats.
    """

    rows: torch.Tensor
    columns: torch.Tensor
    scale: torch.Tensor


def quantize(x: torch.Tensor, to: Format, scale: torch.Tensor) -> torch.Tensor:
    """`x * scale` in 8 bits; what is too large saturates.

    Args:
        x: A tensor of any shape.
        to: e4m3 or e5m2.
        scale: float32 without dims.
    """
    assert to.dtype is not None
    # Clamped first: PyTorch's cast to e5m2 makes infinity of what is too large (torch 2.13).
    scaled = x.float() * scale
    return scaled.clamp(-to.largest, to.largest).to(to.dtype)


def dequantize(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The numbers that an 8-bit tensor stands for, in float32."""
    return x.float() / scale


def product(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """`a b^T` of the numbers that two operands stand for, summed in float32.

    Args:
        a: [M, K], 8 bits or float32.
        b: [N, K], as a.
        a_scale, b_scale: See `Fp8Matrix.scale`.
        dtype: What the sums are rounded to.

    Returns:
        [M, N]

    Held by: tests/unit/test_fp8_products.py::test_the_emulated_product_is_that_of_scaled_mm
    """
    if a.dtype != torch.float32 and multiplies_in_fp8(a.device) and _in_whole_tiles(a, b):
        # cuBLAS takes the first factor by rows and the second by columns, [M, K] and [K, N], and
        # multiplies by scales where ours divide.
        return torch._scaled_mm(
            _contiguous(a),
            _contiguous(b).T,
            scale_a=1 / a_scale,
            scale_b=1 / b_scale,
            out_dtype=dtype,
        )
    # Numbers of 4 significant bits multiply exactly in float32; a GPU adds in another order.
    return ((a.float() @ b.float().T) / (a_scale * b_scale)).to(dtype)


def _contiguous(x: torch.Tensor) -> torch.Tensor:
    """The matrix with its rows one after the other, as `torch._scaled_mm` wants it."""
    return x if x.is_contiguous() else _on(x, torch.Tensor.contiguous)(x)


def multiplies_in_fp8(device: torch.device) -> bool:
    """Whether a device has products of 8-bit numbers that are faster than others."""
    if device.type != "cuda" or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device) >= FP8_CAPABILITY


def _in_whole_tiles(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether `torch._scaled_mm` takes a [M, K] and b [N, K] on a GPU: K and N in sixteens."""
    return a.shape[1] % TILE == 0 and b.shape[0] % TILE == 0


# ---- one pass over a tensor


def _on(x: torch.Tensor, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a tensor; for one on a GPU it is compiled, unless the whole model is.

    A cast is five operations. Each one alone reads and writes the whole tensor, and on an H100 they
    took longer than the product gained; a compiled kernel does all of them on the way
    (`benchmarks/fp8.py`).
    """
    is_alone = x.is_cuda and not torch.compiler.is_compiling()
    return _compiled(function) if is_alone else function


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)


def _amax(x: torch.Tensor) -> torch.Tensor:
    """The largest |x|, float32 without dims."""
    return x.abs().amax().float()


def _amax_and_cast(
    x: torch.Tensor, to: Format, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the largest |x|, `quantize`), where the scale does not depend on x."""
    return _amax(x), quantize(x, to, scale)


# ---- scales


class Scaling:
    """Casts one operand of one layer, and remembers what its recipe needs.

    Args:
        recipe: Where the scale comes from.
        to: The format.
        group: The ranks that use the same scale; None: this rank has its own.

    Attributes:
        history: [history_length] float32, the amaxes of the last steps, newest first; 0 where there
            was none.
        amax: The largest |x| of this step so far, float32 without dims.
    """

    def __init__(self, recipe: Recipe, to: Format, group: dist.ProcessGroup | None) -> None:
        self.recipe = recipe
        self.to = to
        self.group = group
        length = recipe.history_length if isinstance(recipe, DelayedScaling) else 0
        self.history = torch.zeros(length)
        self.amax = torch.zeros(())

    @property
    def scale(self) -> torch.Tensor:
        """What delayed scaling multiplies by in this step, float32 without dims."""
        assert isinstance(self.recipe, DelayedScaling)
        # The maximum over the history, by default: after one quiet step the next must not overflow.
        # In the first step the history is all 0, for which `scale_for` gives a scale of 1.
        amax = self.history[0] if self.recipe.amax == "most_recent" else self.history.max()
        return scale_for(amax, self.to, self.recipe.margin)

    def cast(self, x: torch.Tensor, *, record: bool) -> Fp8Matrix:
        """The matrix in 8 bits.

        Args:
            x: [R, C]
            record: This is training, whose amaxes decide later scales; False: a validation.
        """
        if isinstance(self.recipe, BlockScaling):
            return _cast_both_ways(x.detach().float(), self.recipe.to)
        x = x.detach()
        if isinstance(self.recipe, CurrentScaling):
            amax = _on(x, _amax)(x)
            # In a validation each rank has a scale of its own: dp may cut the last batch unevenly,
            # and text is sampled on one rank alone. A collective would wait for the others.
            group = self.group if record else None
            shared = reduced_amaxes([amax], group)[0]
            scale = scale_for(shared, self.to, self.recipe.margin)
            data = _on(x, quantize)(x, self.to, scale)
        else:
            if self.history.device != x.device:
                self.history = self.history.to(x.device)
                self.amax = self.amax.to(x.device)
            # The scale is known before x is: cast and amax are one pass over it. What has grown by
            # more than the margin since the last steps saturates.
            scale = self.scale
            amax, data = _on(x, _amax_and_cast)(x, self.to, scale)
        if record:
            # An amax that is not finite would make the scale 1 for a whole history: left out.
            # where() and no `if`, for which a GPU would have to be waited for.
            finite = torch.where(amax.isfinite(), amax, torch.zeros_like(amax))
            # The largest of all micro-batches of the step; it is used from the next step on.
            self.amax = torch.maximum(self.amax.to(x.device), finite)
        return Fp8Matrix(data, data, scale)

    def push(self, amax: torch.Tensor) -> None:
        """End a step: its amax becomes the newest of the history."""
        self.history = torch.cat([amax.reshape(1), self.history[:-1].to(amax.device)])
        self.amax = torch.zeros_like(amax)


def _cast_both_ways(x: torch.Tensor, to: BlockFormat) -> Fp8Matrix:
    """A float32 matrix with its blocks along rows, and with its blocks along columns.

    A block lies along the sum of a product, and the three products of a layer sum along different
    dims. So each operand is cast twice, from the float32 numbers: the transpose of one cast is not
    the other.
    """
    columns = _cast_padded(x.T.contiguous(), to).T
    return Fp8Matrix(_cast_padded(x, to), columns, x.new_ones(()))


def _cast_padded(x: torch.Tensor, to: BlockFormat) -> torch.Tensor:
    """`cast_blocks` of any number of columns.

    The last block is filled up with zeros, which change neither its scale nor a sum. The number of
    tokens is rarely chosen: a ViT has 150 of them, and a text is sampled one token after the other.
    """
    length = x.shape[1]
    padded = F.pad(x, (0, -length % to.block))
    return cast_blocks(padded, to)[:, :length]


def reduced_amaxes(
    amaxes: list[torch.Tensor], group: dist.ProcessGroup | None
) -> list[torch.Tensor]:
    """The largest of each over a group.

    Communicates: one all-reduce, of 4 bytes for each amax; nothing without a group, or with one of
        a single rank.

    Args:
        amaxes: float32 without dims; not changed.
        group: None: this rank alone.
    """
    if group is None or group.size() == 1 or not amaxes:
        return amaxes
    together = torch.stack(amaxes)
    dist.all_reduce(together, op=dist.ReduceOp.MAX, group=group)
    return list(together.unbind())


# ---- the layer


class Fp8Product:
    """The products of one linear layer in FP8; what `parallel.linear.linear` calls.

    Args:
        name: The name of the layer, as in the state dict.
        recipe: Where scales come from.
        group: The ranks that share them.
    """

    def __init__(self, name: str, recipe: Recipe, group: dist.ProcessGroup | None) -> None:
        self.name = name
        self.scalings: dict[str, Scaling] = {}
        for operand, to in OPERANDS.items():
            self.scalings[operand] = Scaling(recipe, to, group)

    def __call__(
        self, x: torch.Tensor, weight: nn.Parameter, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """`x W^T + bias`, [.., H] to [.., F]."""
        x_narrow, weight_narrow, bias_narrow = narrowed(x, weight, bias)
        store = current_store.get()
        record = torch.is_grad_enabled()
        return _Fp8Linear.apply(
            x_narrow, weight_narrow, bias_narrow, weight, self.scalings, record, store
        )

    # ---- in a checkpoint

    @property
    def state(self) -> torch.Tensor:
        """The histories of input, weight and gradient, [3, history_length] float32."""
        return torch.stack([scaling.history.cpu() for scaling in self.scalings.values()])

    @state.setter
    def state(self, found: torch.Tensor) -> None:
        for scaling, history in zip(self.scalings.values(), found, strict=True):
            scaling.history = history.clone()


class _Fp8Linear(torch.autograd.Function):
    """A linear layer of three FP8 products. What backward needs is kept in 8 bits."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        param: nn.Parameter,
        scalings: dict[str, Scaling],
        record: bool,
        store: GradientStore | None,
    ) -> torch.Tensor:
        x8 = scalings["input"].cast(x.flatten(0, -2), record=record)  # [T, H]
        w8 = scalings["weight"].cast(weight, record=record)  # [F, H]
        ctx.save_for_backward(x8.columns, x8.scale, w8.columns, w8.scale)
        ctx.param = param
        ctx.scaling = scalings["gradient"]
        ctx.store = store
        y = product(x8.rows, w8.rows, x8.scale, w8.scale, x.dtype)  # [T, F]
        y = y.unflatten(0, x.shape[:-1])
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        x8, x_scale, w8, w_scale = ctx.saved_tensors
        (dy,) = grads
        rows = dy.flatten(0, -2)  # [T, F]
        dy8 = ctx.scaling.cast(rows, record=True)

        def grad_weight() -> torch.Tensor:
            return product(dy8.columns.T, x8.T, dy8.scale, x_scale, dy.dtype)  # [F, T] [T, H]

        def grad_input() -> torch.Tensor:
            return product(dy8.rows, w8.T, dy8.scale, w_scale, dy.dtype)  # [T, F] [F, H]

        return wanted_gradients(ctx, dy, grad_input, grad_weight)


def wanted_gradients(
    ctx: Any,
    dy: torch.Tensor,
    grad_input: Callable[[], torch.Tensor],
    grad_weight: Callable[[], torch.Tensor],
) -> tuple[torch.Tensor | None, ...]:
    """(dx, dw, db) where autograd wants them, and None for the four other inputs of forward.

    Args:
        ctx: What the layer's Function has kept, with its `param` and `store`.
        dy: The gradient of the output, [.., F].
        grad_input: Computes dx, [T, H].
        grad_weight: Computes dw, [F, H]; it may be put off (`parallel.deferred`).
    """
    dx = None
    if ctx.needs_input_grad[0]:
        dx = grad_input().unflatten(0, dy.shape[:-1])
    dw = None
    if ctx.param.requires_grad:
        dw = computed_or_kept(ctx.param, grad_weight, ctx.store)
    db = dy.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
    return dx, dw, db, None, None, None, None


class ProductLinear(nn.Module):
    """A linear layer with a product of its own; parameters and names are those of `nn.Linear`."""

    def __init__(self, layer: nn.Linear, multiply: Fp8Product) -> None:
        super().__init__()
        self.weight = cast(nn.Parameter, layer.weight)
        self.bias = layer.bias
        self.product = multiply

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[.., H] to [.., F]."""
        return self.product(x, self.weight, self.bias)


# ---- a model


def _ends_in(name: str, end: str) -> bool:
    """Whether a module's name is these words, or ends in them after a dot."""
    return name == end or name.endswith(f".{end}")


class Fp8:
    """The FP8 of one model: which layers compute in it, and their scales.

    Args:
        recipe: Where scales come from.
        group: The ranks that share scales: all that have parts or copies of the same layers, so
            never those of pp. None: each rank has its own.
        skip: Layers whose name ends in one of these stay as they are.

    Raises:
        ValueError: `convert` finds no layer, or `history_length` is not positive.
    """

    def __init__(
        self,
        recipe: Recipe,
        group: dist.ProcessGroup | None = None,
        skip: Iterable[str] = ("head",),
    ) -> None:
        if isinstance(recipe, DelayedScaling) and recipe.history_length < 1:
            raise ValueError(f"history_length={recipe.history_length}: remember at least one step")
        self.recipe = recipe
        self.group = group
        self.skip = tuple(skip)
        self.products: dict[str, Fp8Product] = {}

    def check_skipped(self, model: nn.Module) -> None:
        """Refuse a name to skip that no layer has: a typing error would convert that layer.

        Args:
            model: The whole model, not the part of a rank; may be on the meta device.

        Raises:
            ValueError: A name of `skip` is not how some module's name ends.

        Held by: tests/unit/test_fp8_products.py::test_a_misspelt_layer_to_skip_is_refused
        """
        names = [name for name, _ in model.named_modules() if name]
        last_words = sorted({name.rpartition(".")[2] for name in names})
        for end in self.skip:
            if not any(_ends_in(name, end) for name in names):
                words = [word for word in last_words if not word.isdigit()]
                raise ValueError(unknown("layer in fp8.skip", end, words + names, listed=words))

    def convert(self, model: nn.Module) -> nn.Module:
        """Let the linear layers of a model compute in FP8; the model is changed in place."""
        for name, module in list(model.named_modules()):
            if self._is_skipped(name):
                continue
            multiply = self.products.get(name) or Fp8Product(name, self.recipe, self.group)
            if isinstance(module, nn.Linear):
                model.set_submodule(name, ProductLinear(module, multiply))
            elif hasattr(module, "product") and hasattr(module, "weight"):
                own: Any = module  # a layer of the grid, whose product is an attribute of its own
                own.product = multiply
            else:
                continue
            self.products[name] = multiply
        if not self.products:
            raise ValueError(
                f"no linear layer to compute in FP8 beside those that are skipped "
                f"({', '.join(self.skip)}): change fp8.skip"
            )
        return model

    @contextlib.contextmanager
    def autocast(self, model: nn.Module) -> Iterator[nn.Module]:
        """Let the layers compute in FP8 inside the `with`; behind it they are as before.

            for x, target in batches:
                with fp8.autocast(model):
                    loss = loss_of(model(x), target)
                loss.backward()
                optimizer.step()
                fp8.finish_step()

        A backward computes as its forward did, inside or outside. Histories stay from one `with` to
        the next. Nothing is communicated on the way in or out.

        Args:
            model: Changed in place, and back again.

        Raises:
            ValueError: See `convert`.

        Source: `fp8_autocast` of Transformer Engine, which takes the recipe and the group here.
        Held by: tests/unit/test_fp8_products.py::test_autocast_lasts_as_long_as_the_with
        """
        before = []
        for name, module in model.named_modules():
            before.append((name, module, getattr(module, "product", None)))
        try:
            yield self.convert(model)
        finally:
            for name, module, multiply in before:
                if isinstance(module, nn.Linear) and name in self.products:
                    model.set_submodule(name, module)
                elif multiply is not None:
                    module.product = multiply

    def _is_skipped(self, name: str) -> bool:
        return any(_ends_in(name, end) for end in self.skip)

    def scalings(self) -> Iterator[tuple[str, Scaling]]:
        """("blocks.0.mlp.up.weight", its scaling) of every operand of every layer."""
        for name, multiply in self.products.items():
            for operand, scaling in multiply.scalings.items():
                yield f"{name}.{operand}", scaling

    @torch.no_grad()
    def finish_step(self) -> None:
        """Put the amaxes of this step into the histories; once after each optimizer step.

        Communicates: with delayed scaling one all-reduce, of 4 bytes for each operand of each
            layer; otherwise nothing.

        Source: Transformer Engine, `FP8GlobalStateManager.reduce_and_update_fp8_tensors`, which
            puts the amaxes of all layers into one message as well; it sends those of the forward
            and those of backward each in one of their own.
        Held by: tests/ranks/test_fp8.py::test_delayed_scaling_communicates_once_a_step
        """
        if not isinstance(self.recipe, DelayedScaling):
            return
        scalings = [scaling for _, scaling in self.scalings()]
        shared = reduced_amaxes([scaling.amax for scaling in scalings], self.group)
        for scaling, amax in zip(scalings, shared):
            scaling.push(amax)
