"""Answers that a generator has drawn, with what a learner has to know of them.

Held by: tests/ranks/test_two_fleets.py
"""

from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from labcode.models.generate import generate
from labcode.parallel.model import ParallelModel
from labcode.parallel.tensor import whole_logits


class Batch(NamedTuple):
    """B answers of at most T tokens to prompts of S tokens.

    Args:
        tokens: [B, S + T] int64
        log_probs: [B, T], of the new tokens under the model that drew them.
        counts: [B, T] bool, up to the end of each answer.
        version: Of the weights that the generator had.
    """

    tokens: torch.Tensor
    log_probs: torch.Tensor
    counts: torch.Tensor
    version: int = 0


def draw(
    model: ParallelModel,
    prompts: torch.Tensor,
    num_new: int,
    random: torch.Generator,
    *,
    end: int,
    version: int = 0,
) -> Batch:
    """Answers of a model to prompts [B, S]; its ranks need generators in the same state.

    Every rank answers all prompts it is given: they are not divided over dp. A generator with dp
    above 1 gives each of its replicas other prompts and joins their batches, or it does the same
    work in each of them.
    """
    group = model.grid.group("tp")
    whole = partial(whole_logits, group=group, vocab_size=model.config.vocab_size)
    drawn = generate(model.module, prompts, num_new, generator=random, end=end, whole=whole)
    return Batch(*drawn, version)


def empty(num_answers: int, prompt_length: int, num_new: int) -> Batch:
    """What a rank gives that waits for the batch of another one."""
    tokens = torch.zeros(num_answers, prompt_length + num_new, dtype=torch.int64)
    log_probs = torch.zeros(num_answers, num_new, dtype=torch.float64)
    return Batch(tokens, log_probs, torch.zeros(num_answers, num_new, dtype=torch.bool))


def share(batch: Batch, source: int, group: dist.ProcessGroup) -> Batch:
    """The batch of rank `source`, on every rank; what the others give has the same shapes.

    Communicates: two broadcasts, of the tokens and of the rest in float64.
    """
    version = torch.full_like(batch.log_probs[:, :1], batch.version, dtype=torch.float64)
    tokens = batch.tokens.clone()
    numbers = torch.cat((batch.log_probs.double(), batch.counts.double(), version), dim=1)
    for tensor in (tokens, numbers):
        dist.broadcast(tensor, src=source, group=group)
    num_new = batch.counts.shape[1]
    log_probs, counts, version = numbers.split((num_new, num_new, 1), dim=1)
    return Batch(tokens, log_probs, counts.bool(), int(version[0]))
