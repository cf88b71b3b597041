"""Tensor parallelism written out: every layer's matrix products are shared by the ranks of one group.

    column-parallel   Y_r = X W_r^T          each rank has some output features      X whole, Y cut
    row-parallel      Y = sum_r X_r W_r^T    each rank has some input features       X cut, Y whole after a sum

A column-parallel layer followed by a row-parallel one needs one sum forward and one backward; what lies between them
(GELU, attention head by head) works on each part alone. The layers are made from plain ones, hold the same numbers and
have the same parameter names. With `sequence=True` the whole X and Y are parts of the sequence (`parallel.sequence`).

Shapes: B samples, S tokens, H hidden features, F features inside, V vocabulary, p ranks of the group ("tp" in shapes).
Source: Shoeybi et al. 2019 (arXiv:1909.08053), section 3.
Held by: tests/ranks/test_tensor.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from labcode.comm.collectives import copy_to, reduce_from
from labcode.parallel.sequence import gathered_linear, narrowed, scatter_sequence
from labcode.parallel.sharding import Split

IGNORED = -100  # a target that does not count, as in F.cross_entropy


class ColumnParallelLinear(nn.Module):
    """This rank's output features of a linear layer: [B, S, H] to [B, S, F/tp].

    Communicates: forward nothing; backward an all-reduce of the input's gradient, B*S*H numbers. With `sequence` an
        all-gather of the input forward, the same again and a reduce-scatter backward.

    Args:
        linear: The whole layer, [F, H]; on any device, also meta.
        group: The ranks that share it.
        sections: Rows that are cut each by itself, such as those of q, k and v; None: one section.
        sequence: The input is this rank's part of the sequence, [B, S/tp, H].
    """

    def __init__(
        self, linear: nn.Linear, group: dist.ProcessGroup, sections=None, *, sequence=False
    ):
        super().__init__()
        self.group = group
        self.splits = {"weight": Split(0, sections), "bias": Split(0, sections)}
        self.multiply = gathered_linear if sequence else copied_linear
        self.weight = own_part(linear.weight, self.splits["weight"], group)  # [F/tp, H]
        self.bias = own_part(linear.bias, self.splits["bias"], group)  # [F/tp]

    def forward(self, x):
        """[B, S, H], or [B, S/tp, H] with `sequence`, to [B, S, F/tp]."""
        return self.multiply(x, self.weight, self.bias, self.group)


class RowParallelLinear(nn.Module):
    """A linear layer whose input features are shared out: [B, S, F/tp] to [B, S, H].

    The bias is whole on every rank and added after the sum: added before it, it would count p times.

    Communicates: forward an all-reduce of the output, B*S*H numbers, backward nothing. With `sequence` a reduce-scatter
        forward and an all-gather backward.

    Args:
        linear: The whole layer, [H, F]; on any device, also meta.
        group: The ranks that share it.
        sequence: The output is this rank's part of the sequence, [B, S/tp, H].
    """

    def __init__(self, linear: nn.Linear, group: dist.ProcessGroup, *, sequence=False):
        super().__init__()
        self.group = group
        self.splits = {"weight": Split(1)}
        self.leave = scatter_sequence if sequence else reduce_from
        self.weight = own_part(linear.weight, self.splits["weight"], group)  # [H, F/tp]
        self.bias = linear.bias

    def forward(self, x):
        """[B, S, F/tp] to [B, S, H], or to [B, S/tp, H] with `sequence`."""
        y = self.leave(F.linear(x, self.weight), self.group)
        return (
            y if self.bias is None else y + self.bias.to(y.dtype)
        )  # autocast: not wider than the product


class VocabParallelEmbedding(nn.Module):
    """An embedding whose rows are shared out: a rank looks up the tokens that it has, zero for the others, and all add up.

    Communicates: forward an all-reduce of the output, B*S*H numbers, backward nothing. With `sequence` a reduce-scatter
        forward and an all-gather backward.

    Args:
        embedding: The whole table, [V, H]; on any device, also meta. V need not be a multiple of p.
        group: The ranks that share it.
        sequence: The output is this rank's part of the sequence, [B, S/tp, H].
    """

    def __init__(self, embedding: nn.Embedding, group: dist.ProcessGroup, *, sequence=False):
        super().__init__()
        self.group = group
        self.splits = {"weight": Split(0)}
        self.leave = scatter_sequence if sequence else reduce_from
        self.vocab_size = embedding.num_embeddings
        self.first = first_row(self.vocab_size, group)
        self.weight = own_part(embedding.weight, self.splits["weight"], group)  # [V/tp, H]

    def forward(self, tokens):
        """[B, S] int64 to [B, S, H], or to [B, S/tp, H] with `sequence`."""
        _in_vocabulary(tokens, self.vocab_size)
        row = tokens - self.first
        elsewhere = (row < 0) | (row >= self.weight.shape[0])
        x = F.embedding(row.masked_fill(elsewhere, 0), self.weight)  # [B, S, H]
        return self.leave(x.masked_fill(elsewhere[..., None], 0), self.group)


def vocab_parallel_cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, group: dist.ProcessGroup, vocab_size: int
) -> torch.Tensor:
    """Cross-entropy of each token from logits that are cut over the vocabulary; the whole logits exist nowhere.

        loss = log(sum_v exp(z_v - m)) - (z_target - m),    m = max_v z_v

    m, the sum and z_target are one number per token: B*S of each instead of B*S*V logits travel.

    Communicates: forward an all-reduce (max) of B*S numbers and one (sum) of 2*B*S, backward nothing.

    Args:
        logits: [.., V/tp], this rank's columns.
        targets: [..] int64, the same on every rank; -100 does not count.
        group: The ranks that share the vocabulary.
        vocab_size: V

    Returns:
        [..] nats, float32 or wider, 0 where the target is -100.
    """
    _in_vocabulary(targets.masked_fill(targets == IGNORED, 0), vocab_size)
    return _VocabParallelCrossEntropy.apply(logits, targets, first_row(vocab_size, group), group)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, first, group):
        wide = torch.promote_types(logits.dtype, torch.float32)
        peak = logits.amax(-1).to(wide)  # [..]
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
        shifted = logits.to(wide) - peak[..., None]
        column = targets - first
        elsewhere = (column < 0) | (column >= logits.shape[-1])  # on another rank, or -100
        column = column.masked_fill(elsewhere, 0)[..., None]  # [.., 1]
        own_target = shifted.gather(-1, column).squeeze(-1).masked_fill(elsewhere, 0)
        exps = shifted.exp_()
        sums = torch.stack((exps.sum(-1), own_target))  # [2, ..]: one message instead of two
        dist.all_reduce(sums, group=group)
        denominator, target = sums
        counts = targets != IGNORED
        ctx.save_for_backward(exps.div_(denominator[..., None]), column, elsewhere, counts)
        ctx.dtype = logits.dtype
        return (denominator.log() - target) * counts

    @staticmethod
    def backward(ctx, grad):
        softmax, column, elsewhere, counts = ctx.saved_tensors
        one = torch.ones((), dtype=softmax.dtype, device=softmax.device)
        minus_one_hot = -one.expand_as(column).masked_fill(elsewhere[..., None], 0)
        grad_logits = softmax.scatter_add(-1, column, minus_one_hot) * (grad * counts)[..., None]
        return grad_logits.to(ctx.dtype), None, None, None


def copied_linear(x, weight, bias, group):
    """`x @ weight.T + bias` of a whole x: forward nothing travels, backward the gradient of x is summed over the group.

    In the plain form of f, which waits for the sum. It could travel beside the product that gives the weight's gradient, as
    it does in Megatron-LM and, under sequence parallelism, in `gathered_linear`.
    """
    (x,) = narrowed(x)  # before f, or under autocast its gradient would travel in the wider dtype
    return F.linear(copy_to(x, group), weight, bias)


def _in_vocabulary(tokens, vocab_size):
    """A token that no rank has would pass for a vector of zeros; a plain embedding raises."""
    torch._assert_async(
        ((tokens >= 0) & (tokens < vocab_size)).all(), f"a token is outside 0 to {vocab_size - 1}"
    )


def own_part(
    whole: nn.Parameter | None, split: Split, group: dist.ProcessGroup
) -> nn.Parameter | None:
    """This rank's part of a whole parameter, as a parameter of its own that is frozen if the whole is."""
    if whole is None:
        return None
    return nn.Parameter(
        split.take(whole.detach(), group.rank(), group.size()), requires_grad=whole.requires_grad
    )


def first_row(size: int, group: dist.ProcessGroup) -> int:
    """Index of the first of this rank's rows, when `size` rows are shared out as `Split` does."""
    even, longer = divmod(size, group.size())
    return group.rank() * even + min(group.rank(), longer)
