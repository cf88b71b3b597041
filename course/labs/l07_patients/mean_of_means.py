"""Patient: padding, so that micro-batches and ranks have unequal numbers of targets."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from course.labs.l07_patients.common import (
    IGNORED,
    padded_samples,
    small_model,
    unwatched,
)

COMPLAINT = "With padding, two ranks train a slightly different model from one process."
FINDING = "mean of means"


def run(healthy: bool = False, watch: Callable[..., Any] = unwatched) -> float:
    """Norm of the gradient of the last step; a step has 2 micro-batches."""
    torch.manual_seed(0)
    data = padded_samples()
    model = DDP(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    batches = list(loader)
    norm = 0.0
    with watch(model, optimizer, loader=loader):
        for first in range(0, len(batches), 2):
            micro_batches = batches[first : first + 2]
            num_targets = torch.tensor(0)
            if healthy:
                for _, targets in micro_batches:
                    num_targets += (targets != IGNORED).sum()
                dist.all_reduce(num_targets)
            optimizer.zero_grad()
            for number, (inputs, targets) in enumerate(micro_batches):
                model.require_backward_grad_sync = number == 1
                logits = model(inputs)
                if healthy:
                    losses = cross_entropy(logits, targets, reduction="sum")
                    # DDP divides by the ranks
                    loss = losses * dist.get_world_size() / num_targets
                else:
                    loss = cross_entropy(logits, targets) / 2
                loss.backward()
            gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
            norm = torch.cat(gradients).norm().item()
            optimizer.step()
    return norm
