"""Patient: a branch that some steps do not take."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from course.labs.l07_patients.common import small_model, text_samples, unwatched

COMPLAINT = "The second step fails: Expected to have finished reduction in the prior iteration."
FINDING = "unused parameters"


def run(healthy: bool = False, watch: Callable[..., Any] = unwatched) -> float:
    """The last loss."""
    torch.manual_seed(0)
    data = text_samples(512)

    class TwoWays(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = small_model()
            self.other = small_model()
            self.step = 0

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.step += 1
            return self.one(inputs) if self.step % 2 else self.other(inputs)

    model = DDP(TwoWays(), find_unused_parameters=healthy)
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
    return loss.item()
