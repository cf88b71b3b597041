"""Patient: one rank that the other waits for."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from course.labs.l07_patients.common import small_model, text_samples, unwatched

COMPLAINT = (
    "A step takes equally long on both ranks, and one of them computes for less than half of it."
)
FINDING = "slow rank"


def trained(healthy: bool, watch: Callable[..., Any]) -> tuple[float, float]:
    """Seconds of a step, and of a forward pass in it, on this rank."""
    torch.manual_seed(0)
    data = text_samples(512)

    class Node(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = small_model()
            self.extra_s = 0.05 if dist.get_rank() == 1 and not healthy else 0.0
            self.forward_s = 0.0

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            began = time.perf_counter()
            time.sleep(0.03 + self.extra_s)
            outputs = self.layers(inputs)
            self.forward_s += time.perf_counter() - began
            return outputs

    node = Node()
    model = DDP(node)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    num_steps = 0
    with watch(model, optimizer, loader=loader):
        began = time.perf_counter()
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for inputs, targets in loader:
                loss = cross_entropy(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                num_steps += 1
        step_s = (time.perf_counter() - began) / num_steps
    return step_s, node.forward_s / num_steps


def run(healthy: bool = False, watch: Callable[..., Any] = unwatched) -> float:
    """Share of a step in which this rank computes."""
    step_s, forward_s = trained(healthy, watch)
    return round(forward_s / step_s, 2)
