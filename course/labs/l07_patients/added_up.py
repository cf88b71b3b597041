"""Patient: micro-batches, and steps that are too long."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from course.labs.l07_patients.common import small_model, text_samples, unwatched

COMPLAINT = "With four micro-batches a step it trains as if the learning rate were too high."
FINDING = "1/m missing"


def run(healthy: bool = False, watch: Callable[..., Any] = unwatched) -> float:
    """Norm of the gradient of the first step."""
    torch.manual_seed(0)
    data = text_samples(512)
    model = DDP(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    norms = []
    batches = list(loader)
    with watch(model, optimizer, loader=loader):
        for first in range(0, len(batches), 4):
            optimizer.zero_grad()
            for number in range(first, first + 4):
                inputs, targets = batches[number]
                model.require_backward_grad_sync = number == first + 3
                loss = cross_entropy(model(inputs), targets)
                if healthy:
                    loss = loss / 4
                loss.backward()
            grads = [param.grad.flatten() for param in model.parameters() if param.grad is not None]
            norms.append(float(torch.cat(grads).norm()))
            optimizer.step()
    return norms[0]
