"""Patient: BatchNorm, and buffers that stay at home."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from course.labs.l07_patients.common import small_model, text_samples, unwatched

COMPLAINT = "The same weights on both ranks, and each rank evaluates to another loss."
FINDING = "BatchNorm diverges"


def run(healthy: bool = False, watch: Callable[..., Any] = unwatched) -> float:
    """Loss of the same 128 samples after training, evaluated on this rank."""
    torch.manual_seed(0)
    data = text_samples(512)
    layers = small_model()
    layers.insert(3, torch.nn.BatchNorm1d(64))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 gives the option another name
        model = DDP(layers, broadcast_buffers=healthy)
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
    model.eval()
    inputs, targets = data[:128]
    with torch.no_grad():
        return float(cross_entropy(model(inputs), targets))
