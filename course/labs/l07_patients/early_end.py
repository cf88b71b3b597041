"""Patient: ranks with unequal numbers of batches."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

from course.labs.l07_patients.common import small_model, text_samples, unwatched

COMPLAINT = "The training stands still near the end of the first epoch."
FINDING = "skipped call"


def run(healthy: bool = False, watch: Callable[..., Any] = unwatched) -> int:
    """Batches that this rank read in an epoch of 512 samples, 32 in a batch."""
    torch.manual_seed(0)
    data = text_samples(512)
    model = DDP(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    end = len(data) if healthy else len(data) - 128 * dist.get_rank()
    sampler = range(dist.get_rank(), end, 2)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    num_batches = 0
    with watch(model, optimizer, loader=loader):
        for inputs, targets in loader:
            loss = cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            num_batches += 1
    return num_batches
