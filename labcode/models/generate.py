"""Text from a GPT, one token at a time, with the keys and values of earlier tokens kept.

A token's keys and values depend on the tokens before it alone, so they are computed once:

    without cache    token t is computed from t tokens again    S + (S+1) + ... tokens to compute
    with cache       prompt once, then one token at a time      S + 1 + 1 + ...

Generation keeps 2 numbers for each token, layer and key/value feature. Nothing here knows of ranks:
an attention that holds a part of the heads keeps the keys and values of these.

Shapes: B samples, S tokens of the prompt, T new tokens, V vocabulary, N query heads, K key/value
heads, D features of a head.
Source: Shazeer 2019 (arXiv:1911.02150), section 2.4, for generation one token at a time.
Held by: tests/unit/test_generate_cache.py, tests/ranks/test_two_fleets.py
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn


class Generated(NamedTuple):
    """Text and how likely it was.

    Args:
        tokens: [B, S + T] int64, the prompt and what follows.
        log_probs: [B, T], of each new token under `softmax(logits / temperature)`; 0 after the end.
        counts: [B, T] bool, whether a new token belongs to the text: up to its first end.
    """

    tokens: torch.Tensor
    log_probs: torch.Tensor
    counts: torch.Tensor


class CachedAttention(nn.Module):
    """Causal attention of new tokens to all so far; it stands in for `CoreAttention`.

    Args:
        max_tokens: Number of tokens that there is room for.
    """

    def __init__(self, max_tokens: int) -> None:
        super().__init__()
        self.max_tokens = max_tokens
        self.num_kept = 0
        self.keys: torch.Tensor | None = None  # [B, K, max_tokens, D], from the first call on
        self.values: torch.Tensor | None = None

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [B, N, Q, D], k and v [B, K, Q, D] of the Q newest tokens to [B, N, Q, D]."""
        if self.keys is None or self.values is None:
            batch, heads, _, features = k.shape
            self.keys = k.new_empty(batch, heads, self.max_tokens, features)
            self.values = torch.empty_like(self.keys)
        first = self.num_kept
        self.num_kept += k.shape[2]
        self.keys[:, :, first : self.num_kept] = k
        self.values[:, :, first : self.num_kept] = v
        # Query number i is token first + i and sees the tokens 0 to first + i. `is_causal=True`
        # would line up query 0 with key 0.
        visible = torch.ones(k.shape[2], self.num_kept, dtype=torch.bool, device=q.device)
        return F.scaled_dot_product_attention(
            q,
            self.keys[:, :, : self.num_kept],
            self.values[:, :, : self.num_kept],
            attn_mask=visible.tril(first),
            enable_gqa=q.shape[1] != k.shape[1],
        )


@contextlib.contextmanager
def cached_attention(model: nn.Module, max_tokens: int) -> Iterator[None]:
    """Inside it every block keeps keys and values of what it has seen, for `max_tokens` tokens."""
    cores = []
    for module in model.modules():
        if hasattr(module, "core"):
            cores.append((module, module.core))
    for attention, _ in cores:
        attention.core = CachedAttention(max_tokens)
    try:
        yield
    finally:
        for attention, core in cores:
            attention.core = core


def _as_it_is(logits: torch.Tensor) -> torch.Tensor:
    return logits


@torch.no_grad()
def generate(
    model: nn.Module,
    prompts: torch.Tensor,
    num_tokens: int,
    *,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
    end: int | None = None,
    whole: Callable[[torch.Tensor], torch.Tensor] = _as_it_is,
) -> Generated:
    """Extend each prompt by `num_tokens` tokens, drawn from `softmax(logits / temperature)`.

    Args:
        model: A GPT, or this rank's part of one (`ParallelModel.module`), whole in its sequence.
        prompts: [B, S] int64, all of one length; S + num_tokens at most the context length.
        num_tokens: T
        temperature: 0 takes the most likely token; its log-probabilities are those of 1.
        generator: A CPU generator; every rank of a model needs one in the same state, since each
            draws for itself. None: torch's global one.
        end: The token that ends a text; what follows it does not count.
        whole: Makes whole logits [B, V] of this rank's columns [B, V/tp], the same on all ranks:
            `parallel.tensor.whole_logits`.
    """
    length = prompts.shape[1]
    tokens = prompts
    log_probs = []
    counts = []
    going_on = torch.ones(len(prompts), dtype=torch.bool, device=prompts.device)  # [B]
    was_training = model.training
    model.eval()
    with cached_attention(model, length + num_tokens):
        new = prompts
        positions = torch.arange(length, device=prompts.device)
        for step in range(num_tokens):
            logits = whole(model(new, positions)[:, -1])  # [B, V]
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            scores = (wide / (temperature or 1.0)).log_softmax(-1)
            if temperature == 0:
                new = scores.argmax(-1, keepdim=True)  # [B, 1]
            else:
                chances = scores.exp().cpu()
                new = torch.multinomial(chances, 1, generator=generator).to(tokens.device)
            chosen = scores.gather(-1, new).squeeze(-1)  # [B]
            log_probs.append(chosen.masked_fill(~going_on, 0.0))
            counts.append(going_on)
            if end is not None:
                going_on = going_on & (new.squeeze(-1) != end)
            tokens = torch.cat((tokens, new), dim=1)
            positions = torch.tensor([length + step], device=prompts.device)
    model.train(was_training)
    return Generated(tokens, torch.stack(log_probs, 1), torch.stack(counts, 1))
