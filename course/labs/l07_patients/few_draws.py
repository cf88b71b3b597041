"""Patient: augmentation in the workers of a loader."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from course.labs.l07_patients.common import CONTEXT, small_model, text_samples, unwatched

COMPLAINT = (
    "Each sample is augmented at random, yet each random number of an epoch occurs four times: "
    "only a quarter of them are different."
)
FINDING = "same random numbers"


class WithTypos(Dataset):
    """Text in which one character of each window is replaced at random."""

    def __init__(self, num_samples: int) -> None:
        self.samples = text_samples(num_samples)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor, float]:
        inputs, target = self.samples[number]
        draw = np.random.random()
        inputs = inputs.clone()
        inputs[int(draw * CONTEXT)] = 32  # a space
        return inputs, target, draw


def alike(worker: int) -> None:
    """So that a run can be repeated."""
    np.random.seed(0)


def run(healthy: bool = False, watch: Callable[..., Any] = unwatched) -> float:
    """Share of the random numbers of an epoch, over all ranks, that are different."""
    torch.manual_seed(0)
    data = WithTypos(512)
    model = DDP(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = DistributedSampler(data)
    loader = DataLoader(
        data,
        batch_size=32,
        sampler=sampler,
        num_workers=2,
        worker_init_fn=None if healthy else alike,
        generator=torch.Generator().manual_seed(dist.get_rank()) if healthy else None,
    )
    drawn = []
    with watch(model, optimizer, loader=loader):
        for inputs, targets, draws in loader:
            loss = cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            drawn.append(draws)
    own = torch.cat(drawn)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    together = torch.cat(every)
    return len(together.unique()) / len(together)
