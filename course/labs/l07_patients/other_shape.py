"""Patient: scores of a last batch."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from course.labs.l07_patients.common import small_model, text_samples, unwatched

COMPLAINT = "Adding up the scores of all ranks fails or hangs, with a message about sizes."
FINDING = "calls do not match"


def run(healthy: bool = False, watch: Callable[..., Any] = unwatched) -> int:
    """Numbers in the sum over ranks."""
    torch.manual_seed(0)
    data = text_samples(512)
    model = DDP(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer):
        scores = model(data[:32][0]).detach().mean(1)
        if dist.get_rank() == 1 and not healthy:
            scores = scores[:20]
        dist.all_reduce(scores)
    return len(scores)
