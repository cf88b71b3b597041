"""Patient: a shuffling sampler, and every epoch alike."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from course.labs.l07_patients.common import small_model, text_samples, unwatched

COMPLAINT = "The sampler shuffles, yet the loss has the same bumps in every epoch."
FINDING = "set_epoch forgotten"


EPOCHS = (0, 1, 2)


def trained(
    healthy: bool,
    watch: Callable[..., Any],
    batch_size: int = 32,
    epochs: Sequence[int] = EPOCHS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Targets in the order in which they came, [3, N], and the loss of each step, [3, S].

    Args:
        healthy: Tell the sampler the epoch.
        watch: Observer of the loop.
        batch_size: Samples of a rank in a step.
        epochs: What the sampler is told: three different numbers.
    """
    torch.manual_seed(0)
    data = text_samples(512)
    model = DDP(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=batch_size, sampler=sampler)
    orders = []
    losses = []
    with watch(model, optimizer, loader=loader):
        for epoch in epochs:
            if healthy:
                sampler.set_epoch(epoch)
            seen = []
            for inputs, targets in loader:
                loss = cross_entropy(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                seen.append(targets)
                losses.append(loss.detach())
            orders.append(torch.cat(seen))
    return torch.stack(orders), torch.stack(losses).view(3, -1)


def bumps(losses: torch.Tensor) -> torch.Tensor:
    """What is left of the losses of an epoch, [S], without the straight line through them."""
    steps = torch.arange(len(losses)) - (len(losses) - 1) / 2
    slope = (losses * steps).sum() / steps.square().sum()
    return losses - losses.mean() - slope * steps


def run(
    healthy: bool = False,
    watch: Callable[..., Any] = unwatched,
    epochs: Sequence[int] = EPOCHS,
) -> float:
    """Share of the samples of epoch 1 that stand where they stood in epoch 0."""
    orders, _ = trained(healthy, watch, epochs=epochs)
    return float((orders[0] == orders[1]).float().mean())


def symptom(healthy: bool = False) -> float:
    """Correlation of the bumps in the loss of the last two epochs, on this rank."""
    _, losses = trained(healthy, unwatched, batch_size=8)  # more steps, more bumps
    both = torch.stack([bumps(losses[1]), bumps(losses[2])])
    return float(torch.corrcoef(both)[0, 1])
