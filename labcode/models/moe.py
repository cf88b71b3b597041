"""A mixture of experts: many MLPs of which each token uses a few; knows nothing of ranks.

A router gives each token a score for each expert; the token's output is the weighted sum of what
the k experts with the largest scores make of it:

    y_t = sum over e in top-k(t) of  w_te expert_e(x_t)        (+ shared(x_t))

So a layer has the parameters of all experts, and the FLOPs of k. What is computed is sorted by
expert first, so that each expert reads its tokens as one matrix: `Dispatch` is that permutation,
and `combine` undoes it.

Shapes: B samples, S tokens, H hidden features, T tokens of one call (B*S), E experts, k experts of
a token, F features inside one expert, R rows: pairs of a token and one of its experts (T*k, but for
those that are dropped).

Source: Shazeer et al. 2017 (arXiv:1701.06538), section 2, for the layer; Fedus et al. 2021
    (arXiv:2101.03961), section 2.2, for the balance loss and the capacity.
Held by: tests/unit/test_moe.py
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from labcode.models.layers import MLP, activation

MLPs = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Enter = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]
]
Travel = Callable[[torch.Tensor, torch.Tensor, MLPs], torch.Tensor]

SCORINGS = ("softmax", "softmax_of_chosen", "sigmoid")


class Routing(NamedTuple):
    """Which experts each token uses, and with which weights.

    Args:
        weights: [B, S, k], by which the outputs of the experts are multiplied.
        experts: [B, S, k] int64, the numbers of the experts, the largest score first.
    """

    weights: torch.Tensor
    experts: torch.Tensor


class Router(nn.Module):
    """Scores each token for each expert and chooses k.

        logits = x W^T                                          [B, S, E], in float32 or wider
        softmax              w = the k largest of softmax(logits)                 (Switch, OLMoE)
        softmax_of_chosen    w = softmax of the k largest logits                  (Mixtral)
        sigmoid              w = the k largest of sigmoid(logits), divided by their sum
                                                                                  (DeepSeek-V3)

    `softmax_of_chosen` is `softmax` divided by the sum of the chosen: the denominator of the whole
    softmax cancels. The choice itself has no gradient; the weights have, and through them the
    router learns.

    Args:
        hidden_size: H
        num_experts: E
        top_k: k
        scoring: One of `SCORINGS`.
        balance: Weight of the balance loss of each sequence; 0: none.
        z_loss: Weight of the mean of logsumexp(logits)^2, which keeps logits small; 0: none.
        bias_rate: The step by which the bias of an expert moves that gets too many or too few
            tokens; 0: no biases.

    Attributes:
        bias: [E], added to the scores for the choice alone, not for the weights; None without
            `bias_rate`. No gradient reaches it, so that an optimizer leaves it alone, and it is
            stored and divided as the weights are.
        load: [E] int64, rows that each expert got in the forwards whose backward has run since
            it was last zeroed.
        sum_counts: What adds up [B, E] counts over the ranks that hold other tokens of the same
            sequences; alone there are none.
        losses: Losses of the same forwards, without `loss_scale`; they hang on no graph.
        loss_scale: Factor of this router's losses in backward: the weight of a micro-batch's mean
            loss in that of a step.

    Source: Fedus et al. 2021 (arXiv:2101.03961), eq. 1 and 4 to 6; Jiang et al. 2024
        (arXiv:2401.04088), section 2.1; Zoph et al. 2022 (arXiv:2202.08906), eq. 5, for the
        z-loss; DeepSeek-AI 2024 (arXiv:2412.19437), eq. 12 to 20, for the bias and the loss of
        each sequence.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        scoring: str = "softmax",
        balance: float = 0.0,
        z_loss: float = 0.0,
        bias_rate: float = 0.0,
    ) -> None:
        super().__init__()
        if scoring not in SCORINGS:
            raise ValueError(f"scoring={scoring!r}: choose {' or '.join(SCORINGS)}")
        if not 1 <= top_k <= num_experts:
            raise ValueError(
                f"top_k={top_k} of {num_experts} experts: a token uses from 1 to {num_experts}"
            )
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.top_k = top_k
        self.scoring = scoring
        self.balance = balance
        self.z_loss = z_loss
        self.bias_rate = bias_rate
        self.bias = None
        if bias_rate:
            self.bias = nn.Parameter(torch.zeros(num_experts), requires_grad=False)
        self.load: torch.Tensor | None = None
        self.losses: list[torch.Tensor] = []
        self.sum_counts: Callable[[torch.Tensor], torch.Tensor] = _alone
        self.loss_scale: torch.Tensor | float = 1.0

    @property
    def num_experts(self) -> int:
        """E"""
        return self.weight.shape[0]

    def forward(self, x: torch.Tensor) -> Routing:
        """[B, S, H] -> the routing of its tokens.

        If gradients are on, the losses of this router are attached to the weights: their gradients
        flow when those of the weights do.
        """
        wide = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.to(wide), self.weight.to(wide))  # [B, S, E]
            scores = logits.sigmoid() if self.scoring == "sigmoid" else logits.softmax(-1)
            preference = scores if self.bias is None else scores + self.bias.to(wide)
            experts = preference.topk(self.top_k, -1).indices
            weights = scores.gather(-1, experts)  # [B, S, k]
            if self.scoring != "softmax":
                weights = weights / weights.sum(-1, keepdim=True)
            if torch.is_grad_enabled():
                weights = self._with_losses(weights, logits, scores, experts)
        return Routing(weights, experts)

    def counts(self, experts: torch.Tensor) -> torch.Tensor:
        """[B, S, k] -> [B, E] int64: how many rows of each sequence go to each expert."""
        rows = experts.flatten(1)  # [B, S*k]
        counts = rows.new_zeros(rows.shape[0], self.num_experts)
        return counts.scatter_add_(1, rows, torch.ones_like(rows))

    def move_of_bias(self, load: torch.Tensor) -> torch.Tensor:
        """By how much a step moves the biases, towards an even load: [E], float64.

            rate * sign(mean load - load_e)

        Args:
            load: [E] int64, rows of all tokens of the step.
        """
        wide = load.double()
        return self.bias_rate * (wide.mean() - wide).sign()

    def _with_losses(
        self,
        weights: torch.Tensor,
        logits: torch.Tensor,
        scores: torch.Tensor,
        experts: torch.Tensor,
    ) -> torch.Tensor:
        """The weights, with the losses of this router attached to them.

        The balance loss of a sequence is E sum_e f_e P_e: f_e the fraction of its rows that go to
        expert e, P_e the mean over its tokens of the score of e divided by the sum of all scores.
        f has no gradient. A rank that holds some of the tokens adds its own part of P, with the f
        of all.
        """
        own = self.counts(experts)
        all_counts = self.sum_counts(own).to(logits.dtype)  # [B, E]
        rows = all_counts.sum(-1)  # [B]: S*k of the whole sequence
        loss = logits.new_zeros(())
        if self.balance:
            fraction = all_counts / rows[:, None]  # f, [B, E]
            # P, [B, E]: this rank's tokens summed, divided by the S of the whole sequence, rows / k
            mean_score = (scores / scores.sum(-1, keepdim=True)).sum(1) * self.top_k / rows[:, None]
            per_sequence = self.num_experts * (fraction * mean_score).sum(-1)
            loss = loss + self.balance * per_sequence.mean()
        if self.z_loss:
            squares = logits.logsumexp(-1).square().sum(1) * self.top_k / rows  # [B]
            loss = loss + self.z_loss * squares.mean()
        return _AttachLoss.apply(weights, loss, self, own.sum(0))


class _AttachLoss(torch.autograd.Function):
    """A tensor, with a loss that gets its gradient when the tensor gets one.

    A loss that is added at the end of the model would have to travel there: through all layers, and
    in a pipeline through all stages. Megatron-LM does the same (`MoEAuxLossAutoScaler`). The rows
    are counted here too, in backward, which runs once where activation checkpointing runs forward
    twice.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, loss: torch.Tensor, router: Router, counts: torch.Tensor
    ) -> torch.Tensor:
        ctx.router = router
        ctx.counts = counts
        ctx.loss = loss.detach()
        ctx.like_loss = loss.new_ones(())
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        load = ctx.router.load
        ctx.router.load = ctx.counts if load is None else load + ctx.counts
        ctx.router.losses.append(ctx.loss)
        # The gradient of a loss with respect to itself is 1, times its weight in the step. It does
        # not depend on `grad`, which only says that backward has come here.
        return grad, ctx.like_loss * ctx.router.loss_scale, None, None


def _alone(x: torch.Tensor) -> torch.Tensor:
    return x


class Dispatch(NamedTuple):
    """The rows of some tokens, sorted by expert.

    Args:
        order: [R] int64; row r is choice `order[r] % k` of token `order[r] // k`.
        counts: [E] int64, rows of each expert; they lie one after the other.
    """

    order: torch.Tensor
    counts: torch.Tensor


def dispatch(experts: torch.Tensor, num_experts: int, capacity_factor: float = 0.0) -> Dispatch:
    """Sort the rows of some tokens by expert; within an expert as the tokens stand.

    With a capacity an expert takes at most C rows of each sequence: first choices before second
    ones, and earlier tokens before later ones. What is left out is dropped; its token keeps what
    its other experts give, and the residual.

        C = ceil(capacity_factor * S * k / E)

    Args:
        experts: [B, S, k]
        num_experts: E
        capacity_factor: 0: no capacity, nothing is dropped.

    Source: Lepikhin et al. 2020 (arXiv:2006.16668), algorithm 1, whose groups are sequences here.
    """
    flat = experts.flatten()  # [B, S, k] -> [T*k]
    # Stable: within an expert the rows stay in the order of the tokens, the same at every run.
    order = flat.argsort(stable=True)
    if capacity_factor:
        order = order[_has_room(experts, num_experts, capacity_factor).flatten()[order]]
    return Dispatch(order, torch.bincount(flat[order], minlength=num_experts))


def capacity(num_tokens: int, num_experts: int, top_k: int, factor: float) -> int:
    """Rows of a sequence that one expert takes at most."""
    return math.ceil(factor * num_tokens * top_k / num_experts)


def _has_room(experts: torch.Tensor, num_experts: int, factor: float) -> torch.Tensor:
    """[B, S, k] bool: whether a row is among the first C of its expert and sequence."""
    batch, length, top_k = experts.shape
    in_order = experts.transpose(1, 2).flatten(1)  # [B, k*S]: all first choices, then all second
    chosen = F.one_hot(in_order, num_experts)  # [B, k*S, E]
    place = chosen.cumsum(1).gather(2, in_order[..., None]).squeeze(2) - 1  # [B, k*S]
    has_room = place < capacity(length, num_experts, top_k, factor)
    return has_room.view(batch, top_k, length).transpose(1, 2)  # [B, k*S] -> [B, k, S] -> [B, S, k]


def combine(rows: torch.Tensor, order: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Bring each token's rows back to it, and add them up by their weights.

    Args:
        rows: [R, H], what the experts made, in the order of `dispatch`.
        order: [R]
        weights: [B, S, k]

    Returns:
        [B, S, H]
    """
    num_rows = len(order)
    place = torch.full((weights.numel(),), num_rows, device=order.device)  # of a dropped row
    place[order] = torch.arange(num_rows, device=order.device)
    # A gather of each token's rows and not an `index_add`: on a GPU that would sum in another order
    # each time, and so give other last bits.
    nothing = rows.new_zeros(1, rows.shape[1])
    parts = torch.cat((rows, nothing))[place].view(*weights.shape, -1)  # [B, S, k, H]
    return (parts * weights[..., None].to(rows.dtype)).sum(-2)


class Experts(nn.Module):
    """The MLPs, without biases, and what brings the tokens to them and back.

    Args:
        hidden_size: H
        ffn_size: F, of one expert.
        num_experts: E
        kind: See `layers.MLP`.
        capacity_factor: See `dispatch`.

    Attributes:
        up: [E, F, H], or [E, 2F, H] with the gate above it for "swiglu".
        down: [E, H, F]
        enter: Applied to the tokens and to the weights and numbers of their experts, before.
        travel: `travel(rows, counts, mlps)` brings rows to their experts, and back what `mlps`
            made of them.
        leave: Applied to the output. Alone, all three do nothing of their own.
        num_rows, num_dropped: Rows that came, and those of them that were dropped, in the forwards
            for which gradients are wanted since both were last zeroed; activation checkpointing
            counts both twice.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        num_experts: int,
        *,
        kind: str = "swiglu",
        capacity_factor: float = 0.0,
    ) -> None:
        super().__init__()
        if capacity_factor < 0 or 0 < capacity_factor < 1:
            raise ValueError(
                f"capacity_factor={capacity_factor:g}: below 1 rows are dropped even if all "
                "experts get the same number; give at least 1, or 0 for no capacity"
            )
        self.num_experts = num_experts
        self.kind = kind
        self.capacity_factor = capacity_factor
        self.enter: Enter = _as_they_are
        self.travel: Travel = _stay
        self.leave: Callable[[torch.Tensor], torch.Tensor] = _alone
        self.num_rows = 0
        self.num_dropped = 0
        rows = 2 * ffn_size if kind == "swiglu" else ffn_size
        self.up = nn.Parameter(torch.empty(num_experts, rows, hidden_size))
        self.down = nn.Parameter(torch.empty(num_experts, hidden_size, ffn_size))

    def forward(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """[B, S, H] -> [B, S, H]."""
        x, weights, experts = self.enter(x, *routing)
        order, counts = dispatch(experts, self.num_experts, self.capacity_factor)
        if torch.is_grad_enabled():
            self.num_rows += experts.numel()
            self.num_dropped += experts.numel() - len(order)
        # [B, S, H] -> [T, H] -> [R, H]: a token stands there once for each of its experts
        rows = x.flatten(0, 1)[order // experts.shape[-1]]
        done = self.travel(rows, counts, self.mlps)
        return self.leave(combine(done, order, weights))

    def mlps(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Each expert's MLP on its rows, which lie one after the other; an expert may have none.

        Args:
            rows: [R, H]
            counts: [E] int64, rows of each expert.

        Returns:
            [R, H]
        """
        # A loop over experts, each a product of its own size: easy to read, and on a GPU E small
        # kernels where a grouped product is one. tolist() waits for the GPU.
        done = []
        for number, own in enumerate(rows.split(counts.tolist())):
            inside = activation(F.linear(own, self.up[number]), self.kind)
            done.append(F.linear(inside, self.down[number]))
        return torch.cat(done)


def _as_they_are(
    x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return x, weights, experts


def _stay(rows: torch.Tensor, counts: torch.Tensor, mlps: MLPs) -> torch.Tensor:
    return mlps(rows, counts)


class MoE(nn.Module):
    """In place of the MLP of a layer: router, experts, and an MLP that every token uses, if any.

    Args:
        hidden_size: H
        ffn_size: F, of one expert.
        num_experts: E
        top_k: k
        shared_ffn_size: Features inside the MLP that all tokens use; 0: there is none.
        kind: See `layers.MLP`.
        capacity_factor: See `dispatch`.
        scoring, balance, z_loss, bias_rate: See `Router`.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        num_experts: int,
        top_k: int,
        *,
        shared_ffn_size: int = 0,
        kind: str = "swiglu",
        capacity_factor: float = 0.0,
        scoring: str = "softmax",
        balance: float = 0.0,
        z_loss: float = 0.0,
        bias_rate: float = 0.0,
    ) -> None:
        super().__init__()
        self.router = Router(
            hidden_size,
            num_experts,
            top_k,
            scoring=scoring,
            balance=balance,
            z_loss=z_loss,
            bias_rate=bias_rate,
        )
        self.experts = Experts(
            hidden_size, ffn_size, num_experts, kind=kind, capacity_factor=capacity_factor
        )
        self.shared = None
        if shared_ffn_size:
            self.shared = MLP(hidden_size, shared_ffn_size, kind=kind, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, H] -> [B, S, H]."""
        out = self.experts(x, self.router(x))
        if self.shared is not None:
            out = out + self.shared(x)
        return out
