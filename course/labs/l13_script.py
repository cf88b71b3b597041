"""Lesson 13: the model and the samples of the learner's FSDP2 script."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labcode.config import GPTConfig
from labcode.models.gpt import GPT
from labcode.models.layers import initialize

CONFIG = GPTConfig(vocab_size=65, num_layers=2, num_heads=2, hidden_size=32, context_length=16)
SAMPLES = 8  # of a micro-batch, over all ranks
MICRO_BATCHES = 2  # of a step


def build_model() -> nn.Module:
    """A GPT of two blocks in float32, with the same weights on every rank."""
    return initialize(GPT(CONFIG), seed=0)


def micro_batches(step: int, device: torch.device | str) -> list[tuple[Tensor, Tensor]]:
    """This rank's part of both micro-batches of a step, as (inputs, targets).

    Rank 0 prints which step it reads.

    Args:
        step: Counted from 0.
        device: Device of the tensors.

    Raises:
        ValueError: The samples cannot be dealt out evenly.
    """
    rank = dist.get_rank()
    p = dist.get_world_size()
    if SAMPLES % p:
        raise ValueError(f"{SAMPLES} samples cannot be divided over {p} ranks: take 1, 2, 4 or 8")
    if rank == 0:
        print(f"step {step}")
    parts = []
    for tokens in tokens_of(step):
        own = tokens.chunk(p)[rank].to(device)
        parts.append((own[:, :-1], own[:, 1:]))
    return parts


def tokens_of(step: int) -> Tensor:
    """All tokens of a step, [micro-batch, sample, position]."""
    generator = torch.Generator().manual_seed(step)
    shape = (MICRO_BATCHES, SAMPLES, CONFIG.context_length + 1)
    assert CONFIG.vocab_size is not None
    return torch.randint(CONFIG.vocab_size, shape, generator=generator)
