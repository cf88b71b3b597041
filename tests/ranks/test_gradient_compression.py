"""What the communication hooks of PyTorch's DDP send, in bytes, and what becomes of gradients."""

import pytest
import torch
from torch import nn

from labcode.parallel.torch_data import TorchDataParallel

ROWS, COLUMNS = 40, 30
NUM_STEPS = 3
MATRICES = 2 * ROWS * COLUMNS  # of Linear(COLUMNS, ROWS) and Linear(ROWS, COLUMNS)
VECTORS = ROWS + COLUMNS


class AllReduces:
    """Lists the bytes of all-reduces that Python starts, in whichever thread."""

    def __init__(self):
        self.num_bytes = []

    def __enter__(self):
        import torch.distributed as dist

        self.original = dist.all_reduce

        def all_reduce(tensor, *args, **options):
            self.num_bytes.append(tensor.nbytes)
            return self.original(tensor, *args, **options)

        dist.all_reduce = all_reduce
        return self

    def __exit__(self, *error):
        import torch.distributed as dist

        dist.all_reduce = self.original


def steps(rank, options):
    """(bytes of the all-reduces of each step, relative error of each gradient, they are equal)."""
    import torch.distributed as dist

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(COLUMNS, ROWS), nn.Tanh(), nn.Linear(ROWS, COLUMNS))
    model = TorchDataParallel(module, dist.group.WORLD, **options)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, COLUMNS, generator=generator)
    moved = []
    errors = []
    are_equal = []
    for _ in range(NUM_STEPS):
        module.zero_grad()
        module(x).square().mean().backward()  # of the whole batch
        exact = torch.cat([param.grad.flatten() for param in module.parameters()])
        module.zero_grad()
        with AllReduces() as spy:
            model(x.chunk(2)[rank]).square().mean().backward()
            model.finish_gradient_sync()
        found = torch.cat([param.grad.flatten() for param in module.parameters()])
        both = [torch.empty_like(found), torch.empty_like(found)]
        dist.all_gather(both, found)
        are_equal.append(torch.equal(*both))
        moved.append(spy.num_bytes)
        errors.append(((found - exact).norm() / exact.norm()).item())
    return moved, errors, are_equal


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_sixteen_bits_half_the_bytes_travel(ranks2, dtype):
    for moved, errors, are_equal in ranks2.run(steps, {"reduce_dtype": dtype}):
        assert moved == [[2 * (MATRICES + VECTORS)]] * NUM_STEPS
        assert all(are_equal)
        assert 0 < max(errors) < 2 * torch.finfo(dtype).eps
