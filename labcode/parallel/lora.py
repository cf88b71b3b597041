"""Layers with a LoRA adapter under tensor parallelism: what of A and B is cut, and who sums what.

    column-parallel   y_r = W_r x + s B_r (A x)            B is cut as W is, A is whole on each rank
    row-parallel      y = sum_r (W_r x_r + s B (A_r x_r))  A is cut as W is, B is whole on each rank

The product of a rank's parts is its part of the whole product, B_r A and B A_r, so that an adapter
can be merged into W without a message.

The matrix that is whole gets a partial gradient: A of a column-parallel layer is read by B_r alone
on each rank, and B of a row-parallel one sees A_r x_r alone. It names itself in `partial`, and
`parallel.sharding` sums it after backward: r * in or r * out numbers a step, whatever the number of
tokens. Forward and backward need no further message, except under sequence parallelism in a
column-parallel layer, where A x of the other ranks' tokens is gathered: B*S*r numbers and not the
B*S*H of x.

`peft` cuts the same way for Megatron-LM (`lora/tp_layer.py`), but gives each adapter sums of its
own: of A_r x_r forward in a row-parallel layer, of A's output gradient backward in a
column-parallel one, B*S*r numbers in each layer and micro-batch. No gradient is partial then.

Shapes: B samples, S tokens, r the rank of the adapter, tp ranks.
Held by: tests/ranks/test_lora.py
"""

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from labcode.comm.collectives import all_gather, copy_to
from labcode.parallel.linear import linear, narrowed
from labcode.parallel.sequence import SEQUENCE_DIM, gathered_linear
from labcode.parallel.tensor import ColumnParallelLinear, RowParallelLinear, own_part


class WithAdapter(Protocol):
    """A whole linear layer with an adapter, such as `models.lora.LoraLinear`.

    Attributes:
        lora_a: [r, in]
        lora_b: [out, r]
        scale: alpha / r
    """

    weight: Any
    bias: Any
    lora_a: Any
    lora_b: Any
    scale: float


class LoraColumnParallelLinear(ColumnParallelLinear):
    """This rank's output features of a linear layer with an adapter: [B, S, H] to [B, S, F/tp].

    Communicates: forward nothing; backward one all-reduce of the input's gradient, which is that of
        the layer and of the adapter together. With `sequence` what the plain layer does, and an
        all-gather of [B, S/tp, r] forward with a reduce-scatter of [B, S, r] backward.

    Args:
        layer: The whole layer, [F, H].
        group: The ranks that share it.
        options: As those of `ColumnParallelLinear`.

    Attributes:
        shards: {name of a parameter: how it is cut over tp}.
        partial: Parameters that are whole and get a part of their gradient on each rank of tp.
    """

    def __init__(self, layer: WithAdapter, group: dist.ProcessGroup, **options: Any) -> None:
        super().__init__(layer, group, **options)  # pyright: ignore[reportArgumentType]
        shard = self.shards["weight"]
        self.shards = {**self.shards, "lora_b": shard}
        self.partial = ("lora_a",)
        self.sequence = self.multiply is gathered_linear
        self.scale = layer.scale
        self.lora_a = nn.Parameter(layer.lora_a.detach(), layer.lora_a.requires_grad)  # [r, H]
        self.lora_b = own_part(layer.lora_b, shard, group)  # [F/tp, r]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, H], or [B, S/tp, H] with `sequence`, to [B, S, F/tp]."""
        (narrow,) = narrowed(x)  # once: both products keep the same tensor for backward
        assert narrow is not None
        if self.sequence:
            y = gathered_linear(narrow, self.weight, self.bias, self.group, self.product)
            # A before the gather: what travels has r features and not H
            inner = linear(narrow, self.lora_a, None)  # [B, S/tp, r]
            inner = all_gather(inner, self.group, SEQUENCE_DIM)  # [B, S, r]
        else:
            whole = copy_to(narrow, self.group)
            y = linear(whole, self.weight, self.bias, self.product)
            inner = linear(whole, self.lora_a, None)  # [B, S, r]
        return y + self.scale * linear(inner, self.lora_b, None)


class LoraRowParallelLinear(RowParallelLinear):
    """A linear layer with an adapter whose input features are sharded: [B, S, F/tp] to [B, S, H].

    Both products are linear, so that B can be applied to this rank's part of A x, and one sum over
    the ranks serves both.

    Communicates: what `RowParallelLinear` does.

    Args:
        layer: The whole layer, [H, F].
        group: The ranks that share it.
        options: As those of `RowParallelLinear`.

    Attributes:
        shards: {name of a parameter: how it is cut over tp}.
        partial: Parameters that are whole and get a part of their gradient on each rank of tp.
    """

    def __init__(self, layer: WithAdapter, group: dist.ProcessGroup, **options: Any) -> None:
        super().__init__(layer, group, **options)  # pyright: ignore[reportArgumentType]
        shard = self.shards["weight"]
        self.shards = {**self.shards, "lora_a": shard}
        self.partial = ("lora_b",)
        self.scale = layer.scale
        self.lora_a = own_part(layer.lora_a, shard, group)  # [r, F/tp]
        self.lora_b = nn.Parameter(layer.lora_b.detach(), layer.lora_b.requires_grad)  # [H, r]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, F/tp] to [B, S, H], or to [B, S/tp, H] with `sequence`."""
        (narrow,) = narrowed(x)
        assert narrow is not None
        y = linear(narrow, self.weight, None, self.product)
        inner = linear(narrow, self.lora_a, None)  # [B, S, r], this rank's part of the sum
        y = y + self.scale * linear(inner, self.lora_b, None)
        y = self.leave(y, self.group)
        if self.bias is None:
            return y
        return y + self.bias.to(y.dtype)
