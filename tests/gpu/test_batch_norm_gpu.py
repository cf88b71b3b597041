"""On a GPU `convert` gives PyTorch's SyncBatchNorm, and ours gives the same numbers."""

import pytest
import torch
from torch import nn

from labcode.comm.grid import Grid
from labcode.parallel.batch_norm import WholeBatchNorm, convert
from labcode.topology import GridShape

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def both(rank):
    """Outputs and input gradients of PyTorch's and of ours, on the same samples."""
    group = Grid.create(GridShape(dp=1)).group("dp")
    torch.manual_seed(0)
    plain = nn.BatchNorm2d(3).cuda()
    ours = WholeBatchNorm(group, 3).cuda()
    theirs = convert(plain, group)
    found = []
    for module in (theirs, ours):
        x = torch.arange(96.0, device="cuda").view(4, 3, 4, 2).requires_grad_()
        output = module(x)
        (output**3).sum().backward()
        found.append((output.detach().cpu(), x.grad.cpu()))
    return type(theirs).__name__, found


def test_pytorchs_own_is_used_and_gives_the_same_numbers(ranks1):
    ((name, (theirs, ours)),) = ranks1.run(both)
    assert name == "SyncBatchNorm"
    for expected, found in zip(theirs, ours):
        torch.testing.assert_close(found, expected)
