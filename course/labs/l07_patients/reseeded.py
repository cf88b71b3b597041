"""Patient: each rank has weights of its own.

Ranks that are seeded differently are harmless: DDP gives all of them the weights of rank 0 when it
wraps, and the healthy twin is seeded differently too. The bug is a change after that.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from course.labs.l07_patients.common import apart, small_model, text_samples, unwatched

COMPLAINT = "Validation differs from rank to rank, though all ranks send their gradients."
FINDING = "different weights"


def run(healthy: bool = False, watch: Callable[..., Any] = unwatched) -> float:
    """Largest difference of a weight between ranks, after training."""
    torch.manual_seed(dist.get_rank())
    data = text_samples(512)
    layers = small_model()
    if healthy:
        torch.nn.init.xavier_normal_(layers.get_parameter("2.weight"))
    model = DDP(layers)
    if not healthy:
        torch.nn.init.xavier_normal_(model.module[2].weight)  # after wrapping
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
