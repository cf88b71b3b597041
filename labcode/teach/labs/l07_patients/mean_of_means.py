"""Patient: rows of unequal length."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

from labcode.teach.labs.l07_patients.common import small_model, text_samples, unwatched

COMPLAINT = "Two ranks with unequal numbers of targets train to another model than one."
FINDING = "mean of means"


def run(healthy: bool = False, watch: Callable[..., Any] = unwatched) -> float:
    """Norm of the gradient of the first step."""
    torch.manual_seed(0)
    data = text_samples(512)
    model = DDP(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    count = 48 if dist.get_rank() == 0 else 16
    start = 0 if dist.get_rank() == 0 else 48
    total = 64
    norms = []
    with watch(model, optimizer):
        for step in range(4):
            first = 64 * step + start
            inputs, targets = data[first : first + count]
            logits = model(inputs)
            if healthy:
                losses = cross_entropy(logits, targets, reduction="sum")
                # DDP divides by the ranks
                loss = losses * dist.get_world_size() / total
            else:
                loss = cross_entropy(logits, targets)
            optimizer.zero_grad()
            loss.backward()
            gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
            norms.append(torch.cat(gradients).norm().item())
            optimizer.step()
    return norms[0]
