"""Lesson 09, and 10: a module beside this rank's shard of it, and a few steps of training."""

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from labcode.comm.counting import counted, totals
from labcode.parallel.model import ParallelModel

Change = Callable[[nn.Module], nn.Module]
SPELLINGS = {
    r"s(?:hard)?\W*?(?:dim\W*?)?(-[12]|[01])\W*": "Shard",
    r"r(?:eplicate)?\W*": "Replicate",
    r"p(?:artial)?\W*(?:sum)?\W*": "Partial",
}
Totals = dict[str, tuple[int, int]]  # {kind: (how many, their bytes)}


def difference(
    make: Callable[[], nn.Module], shard: Change, features: int = 64
) -> tuple[str, str, str]:
    """How far this rank's shard is from the whole: its output and its gradients.

    Both modules are drawn from one seed, in float64, and read the same [2, 16, features].

    Args:
        make: Makes the whole module.
        shard: Turns it into this rank's shard.
        features: Number of features of the input.

    Returns:
        The largest difference relative to the largest value, as text with one digit: of the output,
        of the input gradient and of the gradients of the weights, all weights together.
    """
    whole, true_x, true_y = _forward_and_backward(make, features)
    own, x, y = _forward_and_backward(make, features, shard)
    true_gradients = {name: _gradient(weight) for name, weight in whole.named_parameters()}
    found = []
    true = []
    for name, weight in own.named_parameters():
        grad = _gradient(weight)
        if isinstance(grad, DTensor):
            grad = grad.full_tensor()
            true.append(true_gradients[name].flatten())
        else:
            true.append(_own_part(own, name, true_gradients[name]).flatten())
        found.append(grad.flatten())
    return (
        _relative_error(y, true_y),
        _relative_error(_gradient(x), _gradient(true_x)),
        _relative_error(torch.cat(found), torch.cat(true)),
    )


def is_exact(differences: Iterable[str]) -> bool:
    """Whether all that `difference` returned is rounding."""
    return all(float(text) < 1e-12 for text in differences)


def _forward_and_backward(
    make: Callable[[], nn.Module], features: int, change: Change | None = None
) -> tuple[nn.Module, Tensor, Tensor]:
    """The module with its gradients, its input and its output."""
    torch.manual_seed(0)
    x = torch.randn(2, 16, features, dtype=torch.float64, requires_grad=True)
    module = make().double()
    if change is not None:
        module = change(module)
    y = module(x)
    y.square().mean().backward()
    return module, x, y.detach()


def _gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def _own_part(module: nn.Module, name: str, whole: Tensor) -> Tensor:
    """What this rank holds of a whole weight, or of its gradient."""
    layer_name, _, own_name = name.rpartition(".")
    layer = module.get_submodule(layer_name)
    shards = getattr(layer, "shards", {})
    if own_name not in shards:
        return whole
    group = layer.group
    assert isinstance(group, dist.ProcessGroup)
    return shards[own_name].take(whole, group.rank(), group.size())


def _relative_error(found: Tensor, true: Tensor) -> str:
    error = (found - true).abs().max() / true.abs().max()
    return f"{error.item():.0e}"


def count_collectives(module: nn.Module, x: Tensor) -> tuple[Totals, Totals]:
    """What one forward and one backward of `module(x)` start.

    Args:
        module: Module on this rank.
        x: Input of the module, which gets a gradient.

    Returns:
        {kind: (how many, their bytes)} of forward, and of backward.
    """
    with counted() as forward:
        y = module(x.requires_grad_())
    with counted() as backward:
        y.square().mean().backward()
    return totals(forward), totals(backward)


def adamw_steps(
    model: nn.Module,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    batches: Iterable[tuple[Tensor, Tensor]],
    share: Callable[[Tensor], Tensor] | None = None,
    finish: Callable[[], None] | None = None,
    lr: float = 3e-3,
) -> Tensor:
    """One step of AdamW for each batch.

    Args:
        model: Whole, or what `parallelize` made of it.
        loss_of: `loss_of(output, targets)`.
        batches: (inputs, targets), the same on every rank.
        share: Picks the samples of this rank; None: all.
        finish: Called after each backward: `model.finish_gradient_sync` of a parallel model.
        lr: Learning rate.

    Returns:
        The losses, [batches].
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    for inputs, targets in batches:
        if share is not None:
            inputs = share(inputs)
            targets = share(targets)
        loss = loss_of(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        if finish is not None:
            finish()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def weights_table(model: ParallelModel) -> str:
    """One line for each weight of a parallel model: its whole shape, and that of this rank's part.

    Blocks but the first are left out.
    """
    lines = [f"{'weight':32}{'whole':12}on this rank"]
    for name, param in model.module.named_parameters():
        whole = list(model.shardings[name].shape)
        own = list(param.shape)
        held = "the whole" if own == whole else str(own)
        if not name.startswith("blocks.") or name.startswith("blocks.0."):
            lines.append(f"{name:32}{whole!s:12}{held}")
    return "\n".join(lines)


def spelled(layout: Any) -> Any:
    """The layout of a matrix as the lesson writes it, for one that is written in another way.

    That is "shard 1", "Shard(-1)" or "partial", a placement of PyTorch, or what PyTorch prints for
    one: "S(1)", "Shard(dim=1)", "P(sum)". All else is left as it is.
    """
    placement = layout
    if isinstance(layout, (tuple, list)) and len(layout) == 1:
        placement = layout[0]
    text = placement.__name__ if isinstance(placement, type) else str(placement)
    for spelling, name in SPELLINGS.items():
        found = re.fullmatch(spelling, text.strip().lower())
        if found and found.groups():
            return f"{name}({int(found[1]) % 2})"
        if found:
            return f"{name}()"
    return layout


class SeparateAttention(nn.Module):
    """Causal attention with three layers q, k and v, as most published code has them.

        proj(core(q(x), k(x), v(x)))

    The number of heads is read off the width of q, so each of the layers may hold a part of them.

    Args:
        hidden_size: H.
        num_heads: Number of heads of the whole layer.
    """

    def __init__(self, hidden_size: int = 64, num_heads: int = 4) -> None:
        super().__init__()
        self.head_size = hidden_size // num_heads
        self.q = nn.Linear(hidden_size, hidden_size)
        self.k = nn.Linear(hidden_size, hidden_size)
        self.v = nn.Linear(hidden_size, hidden_size)
        self.proj = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        q = self._heads(self.q(x))
        k = self._heads(self.k(x))
        v = self._heads(self.v(x))
        core = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(core.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        """[B, S, heads * head size] -> [B, heads, S, head size]."""
        return x.unflatten(-1, (-1, self.head_size)).transpose(1, 2)
