"""Lesson 17: the small GPT and the batches of the ranks of which one computes wrongly.

Held by: tests/unit/test_l17_labs.py
"""

import hashlib
from collections.abc import Iterable

import torch
from torch.nn.functional import cross_entropy

from labcode.config import GPTConfig
from labcode.models.gpt import GPT
from labcode.models.layers import initialize

VOCABULARY = 65
CONFIG = GPTConfig(vocab_size=VOCABULARY, context_length=32, hidden_size=64)
SAMPLES = 4
FIRST_SEED = 10  # here the broken rank 2 has neither the largest loss or norm nor the smallest


def small_gpt() -> GPT:
    """Four blocks, with the same weights on every rank."""
    return initialize(GPT(CONFIG), seed=0)


def backward(model: GPT, batch: int) -> float:
    """Leave the gradients of one batch in the model; returns its loss.

    Args:
        model: A model of `small_gpt`; the gradients that it had are gone.
        batch: Number of the batch, which says what its tokens are.
    """
    random = torch.Generator().manual_seed(FIRST_SEED + batch)
    size = (SAMPLES, CONFIG.context_length + 1)
    tokens = torch.randint(VOCABULARY, size, generator=random)
    model.zero_grad()
    logits = model(tokens[:, :-1])  # [samples, context, vocabulary]
    loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    return loss.item()


def checksum(tensors: Iterable[torch.Tensor | None]) -> str:
    """Eight hexadecimal digits that depend on every bit of some tensors.

    Args:
        tensors: Tensors in an order that is the same everywhere.
    """
    digest = hashlib.sha256()
    for tensor in tensors:
        if tensor is not None:
            digest.update(tensor.detach().numpy().tobytes())
    return digest.hexdigest()[:8]
