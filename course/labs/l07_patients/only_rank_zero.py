"""Patient: logging that hangs."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from course.labs.l07_patients.common import small_model, text_samples, unwatched

COMPLAINT = "The training stands still as soon as rank 0 logs the mean loss."
FINDING = "skipped call"


def run(healthy: bool = False, watch: Callable[..., Any] = unwatched) -> float:
    """The mean loss that was logged last."""
    torch.manual_seed(0)
    data = text_samples(512)
    model = DDP(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    mean = torch.zeros(())
    with watch(model, optimizer, loader=loader):
        for inputs, targets in loader:
            loss = cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if healthy or dist.get_rank() == 0:
                mean = loss.detach().clone()
                dist.all_reduce(mean)
    return float(mean) / dist.get_world_size()
