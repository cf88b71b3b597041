"""Patient: fine-tuning with a new last layer."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from course.labs.l07_patients.common import (
    NUM_CHARACTERS,
    apart,
    small_model,
    text_samples,
    unwatched,
)

COMPLAINT = (
    "Fine-tuning with a new head fails in its second step. The error advises "
    "find_unused_parameters=True."
)
FINDING = "changed after wrapping"


def run(healthy: bool = False, watch: Callable[..., Any] = unwatched) -> float:
    """Largest difference of a weight between ranks, after training."""
    torch.manual_seed(0)
    data = text_samples(512)
    body = small_model()
    head = torch.nn.Linear(64, NUM_CHARACTERS)
    if healthy:
        body[4] = head
    model = DDP(body)
    if not healthy:
        model.module[4] = head
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    with watch(model, optimizer, loader=loader):
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for inputs, targets in loader:
                loss = cross_entropy(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return apart(model)
