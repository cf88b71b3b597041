"""Tensor parallelism written out: every layer's matrix products are shared by the ranks of a group.

    column-parallel   Y_r = X W_r^T          each rank has some output features   X whole, Y cut
    row-parallel      Y = sum_r X_r W_r^T    each rank has some input features    X cut, Y whole

A column-parallel layer followed by a row-parallel one needs one sum forward and one backward; what
lies between them (GELU, attention head by head) works on each part alone. The layers are made from
plain ones, hold the same numbers and have the same parameter names. With `sequence=True` the whole
X and Y are parts of the sequence (`parallel.sequence`).

Shapes: B samples, S tokens, H hidden features, F features inside, V vocabulary, p ranks of the
group ("tp" in shapes).
Source: Shoeybi et al. 2019 (arXiv:1909.08053), section 3.
Held by: tests/ranks/test_tensor.py
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from labcode.comm.collectives import copy_to, reduce_from
from labcode.parallel.linear import PLAIN_PRODUCT, Product, linear, narrowed
from labcode.parallel.sequence import gathered_linear, scatter_sequence
from labcode.parallel.sharding import Shard

IGNORED = -100  # a target that does not count, as in F.cross_entropy


class ColumnParallelLinear(nn.Module):
    """This rank's output features of a linear layer: [B, S, H] to [B, S, F/tp].

    Communicates: forward nothing; backward an all-reduce of the input's gradient, B*S*H numbers.
        With `sequence` an all-gather of the input forward, the same again and a reduce-scatter
        backward.

    Args:
        layer: The whole layer, [F, H]; on any device, also meta.
        group: The ranks that share it.
        sections: Rows that are cut each by itself, such as those of q, k and v; None: one section.
        copies: How many ranks hold the same piece of each section (`Shard.copies`).
        sequence: The input is this rank's part of the sequence, [B, S/tp, H].
        product: The matrix products to compute with.

    Attributes:
        shards: {name of a parameter: how it is cut over tp}.
    """

    def __init__(
        self,
        layer: nn.Linear,
        group: dist.ProcessGroup,
        sections: tuple[int, ...] | None = None,
        *,
        copies: tuple[int, ...] | None = None,
        sequence: bool = False,
        product: Product = PLAIN_PRODUCT,
    ) -> None:
        super().__init__()
        shard = Shard(0, sections, copies)
        self.group = group
        self.product = product
        self.shards = {"weight": shard, "bias": shard}
        self.multiply = gathered_linear if sequence else copied_linear
        self.weight = own_part(layer.weight, shard, group)  # [F/tp, H]
        self.bias = None if layer.bias is None else own_part(layer.bias, shard, group)  # [F/tp]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, H], or [B, S/tp, H] with `sequence`, to [B, S, F/tp]."""
        return self.multiply(x, self.weight, self.bias, self.group, self.product)


class RowParallelLinear(nn.Module):
    """A linear layer whose input features are sharded: [B, S, F/tp] to [B, S, H].

    The bias is whole on every rank and added after the sum: before it, it would count p times.

    Communicates: forward an all-reduce of the output, B*S*H numbers, backward nothing. With
        `sequence` a reduce-scatter forward and an all-gather backward.

    Args:
        layer: The whole layer, [H, F]; on any device, also meta.
        group: The ranks that share it.
        sequence: The output is this rank's part of the sequence, [B, S/tp, H].
        product: The matrix products to compute with.

    Attributes:
        shards: {name of a parameter: how it is cut over tp}.
    """

    def __init__(
        self,
        layer: nn.Linear,
        group: dist.ProcessGroup,
        *,
        sequence: bool = False,
        product: Product = PLAIN_PRODUCT,
    ) -> None:
        super().__init__()
        shard = Shard(1)
        self.group = group
        self.product = product
        self.shards = {"weight": shard}
        self.leave = scatter_sequence if sequence else reduce_from
        self.weight = own_part(layer.weight, shard, group)  # [H, F/tp]
        self.bias = layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, F/tp] to [B, S, H], or to [B, S/tp, H] with `sequence`."""
        y = linear(x, self.weight, None, self.product)
        y = self.leave(y, self.group)
        if self.bias is None:
            return y
        return y + self.bias.to(y.dtype)  # under autocast: not wider than the product


class VocabParallelEmbedding(nn.Module):
    """An embedding whose rows are sharded.

    A rank looks up the tokens that it has and gives zeros for the others; the sum is the embedding.

    Communicates: forward an all-reduce of the output, B*S*H numbers, backward nothing. With
        `sequence` a reduce-scatter forward and an all-gather backward.

    Args:
        embedding: The whole table, [V, H]; on any device, also meta. V need not be a multiple of p.
        group: The ranks that share it.
        sequence: The output is this rank's part of the sequence, [B, S/tp, H].

    Attributes:
        shards: {name of a parameter: how it is cut over tp}.
    """

    def __init__(
        self, embedding: nn.Embedding, group: dist.ProcessGroup, *, sequence: bool = False
    ) -> None:
        super().__init__()
        shard = Shard(0)
        self.group = group
        self.shards = {"weight": shard}
        self.leave = scatter_sequence if sequence else reduce_from
        self.vocab_size = embedding.num_embeddings
        self.first = first_row(self.vocab_size, group)
        self.weight = own_part(embedding.weight, shard, group)  # [V/tp, H]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[B, S] int64 to [B, S, H], or to [B, S/tp, H] with `sequence`."""
        _check_in_vocabulary(tokens, self.vocab_size)
        row = tokens - self.first  # [B, S]
        elsewhere = (row < 0) | (row >= self.weight.shape[0])
        # A token of another rank looks up row 0, so that the shape depends on no value, and its
        # result is then masked. masked_fill lets no gradient through to row 0 either.
        x = F.embedding(row.masked_fill(elsewhere, 0), self.weight)  # [B, S, H]
        return self.leave(x.masked_fill(elsewhere[..., None], 0), self.group)


def vocab_parallel_cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, group: dist.ProcessGroup, vocab_size: int
) -> torch.Tensor:
    """Cross-entropy of each token from logits that are cut over the vocabulary.

        loss = log(sum_v exp(z_v - m)) - (z_target - m),    m = max_v z_v

    m, the sum and z_target are one number per token: B*S of each travel instead of B*S*V logits,
    and the whole logits exist nowhere.

    Communicates: forward an all-reduce (max) of B*S numbers and one (sum) of 2*B*S; backward
        nothing.

    Args:
        logits: [.., V/tp], this rank's columns.
        targets: [..] int64, the same on every rank; -100 does not count.
        group: The ranks that share the vocabulary.
        vocab_size: V

    Returns:
        [..] nats, float32 or wider, 0 where the target is -100.
    """
    _check_in_vocabulary(targets.masked_fill(targets == IGNORED, 0), vocab_size)
    return _VocabParallelCrossEntropy.apply(logits, targets, first_row(vocab_size, group), group)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        first: int,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        # The maximum of all ranks, not of this one's columns: exponentials of different ranks are
        # added up, so they must be relative to the same number.
        peak = logits.amax(-1).to(wide)  # [..]
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
        shifted = logits.to(wide) - peak[..., None]

        column = targets - first
        elsewhere = (column < 0) | (column >= logits.shape[-1])  # on another rank, or -100
        column = column.masked_fill(elsewhere, 0)[..., None]  # [.., 1]
        # [.., V/tp] -> [.., 1] -> [..]; exactly one rank has a target's logit, the others add 0
        own_target = shifted.gather(-1, column).squeeze(-1).masked_fill(elsewhere, 0)

        exps = shifted.exp_()  # in place: the shifted logits are not needed any more
        sums = torch.stack((exps.sum(-1), own_target))  # [2, ..]: one message instead of two
        dist.all_reduce(sums, group=group)
        denominator, target = sums
        counts = targets != IGNORED

        # In place again: what is kept for backward is the one tensor of the size of the logits.
        softmax = exps.div_(denominator[..., None])
        ctx.save_for_backward(softmax, column, elsewhere, counts)
        ctx.dtype = logits.dtype
        return (denominator.log() - target) * counts

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        """d loss / d z_v = softmax_v - [v is the target], on this rank's columns."""
        softmax, column, elsewhere, counts = ctx.saved_tensors
        one = torch.ones((), dtype=softmax.dtype, device=softmax.device)
        minus_one_hot = -one.expand_as(column).masked_fill(elsewhere[..., None], 0)
        grad_logits = softmax.scatter_add(-1, column, minus_one_hot)
        grad_logits = grad_logits * (grad * counts)[..., None]
        return grad_logits.to(ctx.dtype), None, None, None


@torch.no_grad()
def whole_logits(logits: torch.Tensor, group: dist.ProcessGroup, vocab_size: int) -> torch.Tensor:
    """Whole logits on every rank, to draw the next token from; without gradients.

    Communicates: an all-reduce of the whole logits, in which each rank adds its columns to zeros:
        the parts may differ in size, which an all-gather does not allow.

    Args:
        logits: [.., V/tp], this rank's columns.
        group: The ranks that share the vocabulary.
        vocab_size: V

    Returns:
        [.., V], bit for bit the same on every rank.
    """
    whole = logits.new_zeros(*logits.shape[:-1], vocab_size)
    first = first_row(vocab_size, group)
    whole[..., first : first + logits.shape[-1]] = logits
    dist.all_reduce(whole, group=group)
    return whole


def copied_linear(
    x: torch.Tensor,
    weight: nn.Parameter,
    bias: torch.Tensor | None,
    group: dist.ProcessGroup,
    product: Product = PLAIN_PRODUCT,
) -> torch.Tensor:
    """`x @ weight.T + bias` of a whole x: the gradient of x is summed over the group in backward.

    This is f in its plain form, which waits for the sum. It could travel beside the product that
    gives the weight's gradient, as it does in Megatron-LM and, under sequence parallelism, in
    `gathered_linear`.
    """
    # narrowed before f: under autocast its gradient would travel in the wider dtype
    (x_narrow,) = narrowed(x)
    assert x_narrow is not None
    return linear(copy_to(x_narrow, group), weight, bias, product)


def _check_in_vocabulary(tokens: torch.Tensor, vocab_size: int) -> None:
    """Raise for a token that no rank has, as a plain embedding does: it would pass for zeros."""
    # Asserted on the device: an `if` would make a GPU wait at every step.
    inside = ((tokens >= 0) & (tokens < vocab_size)).all()
    torch._assert_async(inside, f"a token is outside 0 to {vocab_size - 1}")


def own_part(whole: torch.Tensor, shard: Shard, group: dist.ProcessGroup) -> nn.Parameter:
    """This rank's part of a whole parameter, as a parameter of its own; frozen if the whole is."""
    part = shard.take(whole.detach(), group.rank(), group.size())
    return nn.Parameter(part, requires_grad=whole.requires_grad)


def first_row(size: int, group: dist.ProcessGroup) -> int:
    """Index of the first of this rank's rows when `size` rows are cut as `Shard` cuts them."""
    even, longer = divmod(size, group.size())
    return group.rank() * even + min(group.rank(), longer)
