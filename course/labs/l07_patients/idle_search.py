"""Patient: a flag that was copied from a forum."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from course.labs.l07_patients.common import small_model, text_samples, unwatched

COMPLAINT = "PyTorch warns of an extra traversal of the autograd graph, and each step takes longer."
FINDING = "search unneeded"


def run(healthy: bool = False, watch: Callable[..., Any] = unwatched) -> int:
    """Parameters for which DDP searches at each step."""
    torch.manual_seed(0)
    data = text_samples(512)
    model = DDP(small_model(), find_unused_parameters=not healthy)
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
    return len(list(model.parameters())) if model.find_unused_parameters else 0
