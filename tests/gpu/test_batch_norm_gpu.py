"""On a GPU `convert` gives PyTorch's SyncBatchNorm; its numbers and ours are one process's."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from labcode.parallel.batch_norm import WholeBatchNorm, convert

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def three(rank):
    """(Outputs, input gradients) of this rank's samples: one process, PyTorch's module, ours."""
    torch.manual_seed(0)
    everything = torch.randn(6, 3, 4, 2, device="cuda") + 10
    mine = slice(0, 4) if rank == 0 else slice(4, 6)
    group = dist.group.WORLD
    theirs = convert(nn.BatchNorm2d(3).cuda(), group)
    assert isinstance(theirs, nn.SyncBatchNorm)
    found = []
    for module in (nn.BatchNorm2d(3).cuda(), theirs, WholeBatchNorm(group, 3).cuda()):
        alone = type(module) is nn.BatchNorm2d
        x = everything if alone else everything[mine]
        x = x.detach().clone().requires_grad_()
        output = module(x)
        (output**3).sum().backward()
        kept = mine if alone else slice(None)
        found.append((output[kept].detach().cpu(), x.grad[kept].cpu()))
    return found


def test_the_statistics_are_those_of_all_ranks_samples(pair):
    for whole, theirs, ours in pair.run(three):
        for expected, one, other in zip(whole, theirs, ours):
            torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(other, expected, rtol=1e-4, atol=1e-4)
