"""A module beside its share on a rank: what the lesson on tensor parallelism measures again and again."""

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import nn

from labcode.comm.counting import counted, totals

Change = Callable[[nn.Module], nn.Module]


def difference(make: Callable[[], nn.Module], shard: Change, features: int = 64) -> tuple[str, str]:
    """How far the output and the input gradient of this rank's share are from those of the whole module, in float64.

    Both modules are drawn from one seed and read the same [2, 16, features]; a difference is the largest one, relative to
    the largest value, as text with one digit.

    Args:
        make: Makes the whole module.
        shard: Turns it into this rank's share.
        features: Of the input.
    """
    results = []
    for change in (lambda module: module, shard):
        torch.manual_seed(0)
        x = torch.randn(2, 16, features, dtype=torch.float64, requires_grad=True)
        y = change(make().double())(x)
        y.square().mean().backward()
        results.append((y.detach(), x.grad))
    return tuple(
        f"{((own - true).abs().max() / true.abs().max()).item():.0e}" for true, own in zip(*results)
    )


def count_collectives(module: nn.Module, x: torch.Tensor) -> tuple[dict, dict]:
    """What one forward and one backward of `module(x)` start: for each {kind: (how many, their bytes)}."""
    with counted() as forward:
        y = module(x.requires_grad_())
    with counted() as backward:
        y.square().mean().backward()
    return totals(forward), totals(backward)


def adamw_steps(
    model: nn.Module,
    loss_of: Callable,
    batches: Iterable,
    share: Callable = lambda x: x,
    finish: Callable[[], None] = lambda: None,
    lr: float = 3e-3,
) -> torch.Tensor:
    """One step of AdamW for each batch; returns the losses.

    Args:
        model: Whole, or what `parallelize` made of it.
        loss_of: `loss_of(output, targets)`.
        batches: (inputs, targets), the same on every rank.
        share: Picks the samples of this rank.
        finish: Called after each backward: `model.finish_gradient_sync` of a parallel model.
        lr: Learning rate.
    """
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=lr), []
    for inputs, targets in batches:
        loss = loss_of(model(share(inputs)), share(targets))
        optimizer.zero_grad()
        loss.backward()
        finish()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


class SeparateAttention(nn.Module):
    """Causal attention whose q, k and v are three layers, as most published code has them: `proj(core(q(x), k(x), v(x)))`.

    How many heads there are is read off the width of q, so each of the layers may hold a part of them.
    """

    def __init__(self, hidden_size: int = 64, num_heads: int = 4):
        super().__init__()
        self.head_size = hidden_size // num_heads
        self.q, self.k, self.v, self.proj = (nn.Linear(hidden_size, hidden_size) for _ in range(4))

    def forward(self, x):
        """[B, S, H] -> [B, S, H]."""
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        return self.proj(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
