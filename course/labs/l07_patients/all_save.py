"""Patient: a checkpoint that is sometimes damaged."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from course.labs.l07_patients.common import small_model, text_samples, unwatched

COMPLAINT = "Now and then a checkpoint cannot be read, though nothing has crashed."
FINDING = "saved by all"


def run(healthy: bool = False, watch: Callable[..., Any] = unwatched) -> int:
    """How many ranks wrote the file."""
    torch.manual_seed(0)
    data = text_samples(512)
    model = DDP(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    written = 0
    with watch(model, optimizer, loader=loader):
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for inputs, targets in loader:
                loss = cross_entropy(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        if dist.get_rank() == 0 or not healthy:
            written += 1
            torch.save(model.state_dict(), Path("runs") / "patient.pt")
    writers = torch.tensor(written)
    dist.all_reduce(writers)
    return int(writers)
