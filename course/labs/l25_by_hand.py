"""Solutions that cells of lesson 25 show and use; `make notebooks` writes this."""

from labcode.comm.collectives import copy_to
from labcode.comm.collectives import reduce_from
from labcode.perf.fits import answer
from torch import nn
import torch
import torch.distributed as dist
import torch.nn.functional as F


def targets_of(prompt, answer):
    """The token that comes next at each place; -100 where it is the prompt's."""
    return [-100] * (len(prompt) - 1) + answer


def pack(pairs):
    """tokens, targets and positions [S], and the mask [S, S] of one row."""
    tokens = []
    targets = []
    positions = []
    documents = []
    for number, (prompt, answer) in enumerate(pairs):
        own = (prompt + answer)[:-1]
        tokens += own
        targets += [-100] * (len(prompt) - 1) + answer
        positions += range(len(own))
        documents += [number] * len(own)
    document = torch.tensor(documents)
    same = document[:, None] == document[None, :]
    mask = same.tril()
    return torch.tensor(tokens), torch.tensor(targets), torch.tensor(positions), mask


class MaskedAttention(nn.Module):
    """Attention in which a token sees what a mask [S, S] allows."""

    def __init__(self, mask):
        super().__init__()
        self.mask = mask

    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)

def with_mask(model, mask):
    """The same model, whose layers all use this mask."""
    for block in model.blocks:
        block.attention.core = MaskedAttention(mask)
    return model


def backward_of_step(model, micro_batches, group):
    """Gradients of the mean over all tokens of the group; returns that mean."""
    count = torch.zeros((), dtype=torch.float64)
    for _, targets in micro_batches:
        count += (targets != -100).sum()
    dist.all_reduce(count, group=group)
    total = torch.zeros((), dtype=torch.float64)
    for tokens, targets in micro_batches:
        logits = model(tokens)
        loss = F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), reduction="sum"
        )
        (loss * group.size() / count).backward()
        total += loss.detach()
    dist.all_reduce(total, group=group)
    return total / count


class Lora(nn.Module):
    """A frozen linear layer with an adapter that trains."""

    def __init__(self, layer, rank, alpha):
        super().__init__()
        self.layer = layer
        self.scale = alpha / rank
        self.is_merged = False
        layer.requires_grad_(False)
        num_out, num_in = layer.weight.shape
        a = torch.randn(rank, num_in, dtype=layer.weight.dtype) / num_in**0.5
        b = torch.zeros(num_out, rank, dtype=layer.weight.dtype)
        self.a = nn.Parameter(a)
        self.b = nn.Parameter(b)

    def forward(self, x):
        """[.., in] -> [.., out]"""
        y = self.layer(x)
        if self.is_merged:
            return y
        return y + self.scale * (x @ self.a.T) @ self.b.T

    @torch.no_grad()
    def merge(self):
        """Put the adapter into the weight of the layer."""
        self.layer.weight += self.scale * self.b @ self.a
        self.is_merged = True


class TunedMLP:
    """An MLP whose two layers have an adapter, cut over a group."""

    def __init__(self, up, down, scale, group):
        self.scale = scale
        self.group = group
        p = group.size()
        number = group.rank()
        w, a, b = up
        own_w = w.chunk(p, 0)[number].clone()
        own_b = b.chunk(p, 0)[number].clone()
        self.up = (own_w, a.clone().requires_grad_(), own_b.requires_grad_())
        w, a, b = down
        own_w = w.chunk(p, 1)[number].clone()
        own_a = a.chunk(p, 1)[number].clone()
        self.down = (own_w, own_a.requires_grad_(), b.clone().requires_grad_())

    def product(self, x, w, a, b):
        """W x + s B A x, with what of each this rank has."""
        return x @ w.T + self.scale * (x @ a.T) @ b.T

    def forward(self, x):
        """[T, H] -> [T, H]"""
        x = copy_to(x, self.group)
        inner = F.gelu(self.product(x, *self.up))
        return reduce_from(self.product(inner, *self.down), self.group)

    def finish(self):
        """After backward: every gradient is that of one process."""
        dist.all_reduce(self.up[1].grad, group=self.group)
        dist.all_reduce(self.down[2].grad, group=self.group)
