"""Patient: micro-batches, and a network that is always busy."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from course.labs.l07_patients.common import small_model, text_samples, unwatched

COMPLAINT = "Four micro-batches a step were to save communication; as many bytes travel as before."
FINDING = "no_sync missing"


def run(healthy: bool = False, watch: Callable[..., Any] = unwatched) -> float:
    """Messages of gradients in a step."""
    torch.manual_seed(0)
    data = text_samples(512)
    model = DDP(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    messages = []

    def counted(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        messages.append(bucket.index())
        work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        assert work is not None
        return work.get_future().then(lambda done: done.value()[0])

    model.register_comm_hook(None, counted)
    batches = list(loader)
    with watch(model, optimizer, loader=loader):
        for first in range(0, len(batches), 4):
            optimizer.zero_grad()
            for number in range(first, first + 4):
                inputs, targets = batches[number]
                quiet = healthy and number < first + 3
                with model.no_sync() if quiet else contextlib.nullcontext():
                    loss = cross_entropy(model(inputs), targets) / 4
                    loss.backward()
            optimizer.step()
    return len(messages) / 2
