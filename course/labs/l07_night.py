"""The patient of the night shift: one script with several faults, for the end of lesson 07."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from course.labs.l07_patients.common import small_model, text_samples, unwatched

MICRO_BATCHES = 4
EPOCHS = (0, 1, 2)
FINDINGS = (
    "set_epoch forgotten",
    "no_sync missing",
    "1/m missing",
    "search unneeded",
    "saved by all",
)


def run(
    healthy: bool = False,
    watch: Callable[..., Any] = unwatched,
    epochs: Sequence[int] = EPOCHS,
) -> float:
    """Norm of the gradient of the last step.

    Args:
        healthy: Whether to train without the faults.
        watch: Observer of the loop.
        epochs: What the healthy one tells its sampler: three different numbers.
    """
    torch.manual_seed(0)
    data = text_samples(512)
    model = DDP(small_model(), find_unused_parameters=not healthy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    with watch(model, optimizer, loader=loader):
        for epoch in epochs:
            if healthy:
                sampler.set_epoch(epoch)
            for number, (inputs, targets) in enumerate(loader, 1):
                is_last = number % MICRO_BATCHES == 0
                if healthy:
                    model.require_backward_grad_sync = is_last
                loss = cross_entropy(model(inputs), targets)
                if healthy:
                    loss = loss / MICRO_BATCHES
                loss.backward()
                if is_last:
                    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
                    norm = torch.cat(gradients).norm().item()
                    optimizer.step()
                    optimizer.zero_grad()
            if dist.get_rank() == 0 or not healthy:
                torch.save(model.module.state_dict(), Path("runs") / "night.pt")
    return norm
