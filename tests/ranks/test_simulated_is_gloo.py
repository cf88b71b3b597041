"""Simulated ranks give what real ranks with gloo give, for every call that lessons make.

Each case is the body of a function of `rank`, with p ranks; it runs on both, and the results are
equal to the last bit, or both refuse.
"""

import functools
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from course.exercises import small_gpt
from course.exercises.simulated import simulate
from course.pool.ranks import RankError

COLLECTIVES = {
    "all_reduce": "x = torch.full((3,), rank + 1.0); dist.all_reduce(x); return x",
    "all_reduce maximum": (
        "x = torch.ones(3) * rank; dist.all_reduce(x, op=dist.ReduceOp.MAX); return x"
    ),
    "all_reduce mean": (
        "x = torch.ones(3) * rank; dist.all_reduce(x, op=dist.ReduceOp.AVG); return x"
    ),
    "all_reduce of integers": (
        "x = torch.ones(2, dtype=torch.long) + rank; dist.all_reduce(x); return x"
    ),
    "all_reduce of bfloat16": (
        "x = torch.ones(2).bfloat16() + rank; dist.all_reduce(x); return x.float()"
    ),
    "all_reduce of truth values": (
        "x = torch.tensor([True, rank > 0]); dist.all_reduce(x, op=dist.ReduceOp.MIN); return x"
    ),
    "all_reduce of one number": "x = torch.tensor(1.0 + rank); dist.all_reduce(x); return x",
    "all_reduce, waited for": (
        "x = torch.ones(2) * rank; work = dist.all_reduce(x, async_op=True); work.wait(); return x"
    ),
    "all_reduce in pairs": (
        "pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]\n"
        "x = torch.ones(2) * rank; dist.all_reduce(x, group=pairs[rank % 2]); return x"
    ),
    "a Future": (
        "work = dist.all_reduce(torch.ones(2) * rank, async_op=True)\n"
        "return work.get_future().then(lambda done: done.value()[0] / p).wait()"
    ),
    "broadcast": "x = torch.arange(2) + 10 * rank; dist.broadcast(x, src=2); return x",
    "broadcast by number in the group": (
        "x = torch.ones(1) * rank; dist.broadcast(x, group_src=3); return x"
    ),
    "reduce": (
        "x = torch.tensor([1.0 * rank]); dist.reduce(x, dst=1); return x if rank == 1 else None"
    ),
    "all_gather": (
        "parts = [torch.zeros(2) for _ in range(p)]\n"
        "dist.all_gather(parts, torch.arange(2.0) + 10 * rank); return torch.cat(parts)"
    ),
    "all_gather_single": (
        "y = torch.zeros(2 * p); dist.all_gather_single(y, torch.full((2,), 1.0 * rank)); return y"
    ),
    "all_gather_single of rows": (
        "y = torch.zeros(p, 2); dist.all_gather_single(y, torch.ones(1, 2) * rank); return y"
    ),
    "reduce_scatter": (
        "y = torch.zeros(1)\n"
        "dist.reduce_scatter(y, [torch.tensor([1.0 * rank + i]) for i in range(p)]); return y"
    ),
    "reduce_scatter, uneven": (
        "sizes = [3, 2, 2, 0]; y = torch.zeros(sizes[rank])\n"
        "dist.reduce_scatter(y, [torch.arange(1.0 * size) + rank for size in sizes]); return y"
    ),
    "reduce_scatter_single": (
        "y = torch.zeros(2)\n"
        "dist.reduce_scatter_single(y, torch.arange(2.0 * p) * (rank + 1)); return y"
    ),
    "reduce_scatter_single, mean": (
        "y = torch.zeros(2)\n"
        "dist.reduce_scatter_single(y, torch.arange(2.0 * p), op=dist.ReduceOp.AVG); return y"
    ),
    "all_to_all": (
        "y = [torch.zeros(1) for _ in range(p)]\n"
        "dist.all_to_all(y, [torch.tensor([10.0 * rank + i]) for i in range(p)])\n"
        "return torch.cat(y)"
    ),
    "all_to_all_single": (
        "y = torch.zeros(p); dist.all_to_all_single(y, torch.arange(1.0 * p) + 10 * rank); return y"
    ),
    "all_to_all_single, uneven": (
        "sizes = [[1, 2, 0, 1], [2, 0, 1, 1], [0, 1, 2, 1], [1, 1, 1, 1]]\n"
        "come = [sizes[other][rank] for other in range(p)]\n"
        "y = torch.zeros(sum(come))\n"
        "dist.all_to_all_single(y, torch.arange(4.0) + 10 * rank, come, sizes[rank]); return y"
    ),
    "gather": (
        "parts = [torch.zeros(1) for _ in range(p)] if rank == 3 else None\n"
        "dist.gather(torch.tensor([1.0 * rank]), parts, dst=3); return parts"
    ),
    "scatter": (
        "y = torch.zeros(2)\n"
        "dist.scatter(y, [torch.ones(2) * i for i in range(p)] if rank == 1 else None, src=1)\n"
        "return y"
    ),
    "objects": (
        "found = [None] * p; dist.all_gather_object(found, {'rank': rank})\n"
        "told = [rank]; dist.broadcast_object_list(told, src=2); return found, told"
    ),
    "a message": (
        "x = torch.zeros(2)\n"
        "if rank == 0: dist.send(torch.ones(2), 1)\n"
        "if rank == 1: dist.recv(x, 0)\n"
        "return x"
    ),
    "a message from anybody": (
        "x = torch.zeros(1)\n"
        "if rank == 2: dist.send(torch.ones(1), 3)\n"
        "return (dist.recv(x), x) if rank == 3 else None"
    ),
    "a ring": (
        "x = torch.zeros(2)\n"
        "send = dist.isend(torch.full((2,), 1.0 * rank), (rank + 1) % p)\n"
        "dist.recv(x, (rank - 1) % p); send.wait(); return x"
    ),
    "a batch of messages": (
        "x = torch.zeros(2)\n"
        "calls = [dist.P2POp(dist.isend, torch.full((2,), 1.0 * rank), (rank + 1) % p),\n"
        "         dist.P2POp(dist.irecv, x, (rank - 1) % p)]\n"
        "for work in dist.batch_isend_irecv(calls): work.wait()\n"
        "return x"
    ),
    "tags": (
        "x, y = torch.zeros(1), torch.zeros(1)\n"
        "if rank == 0:\n"
        "    works = [dist.isend(torch.tensor([1.0 * tag]), 1, tag=tag) for tag in (1, 2)]\n"
        "    for work in works: work.wait()\n"
        "if rank == 1: dist.recv(y, 0, tag=2); dist.recv(x, 0, tag=1)\n"
        "return x, y"
    ),
    "a graph": (
        "x = torch.ones(2, requires_grad=True)\n"
        "y = (x * rank).detach(); dist.all_reduce(y); (x * y).sum().backward(); return x.grad"
    ),
    "seeds": "torch.manual_seed(rank); dist.barrier(); return torch.rand(2)",
}
REFUSED = {
    "a list that is too short": (
        "parts = [torch.zeros(2) for _ in range(p - 1)]; dist.all_gather(parts, torch.ones(2))"
    ),
    "room that is too small": "dist.all_gather_single(torch.zeros(p), torch.ones(2))",
    "parts that do not fit": "dist.reduce_scatter_single(torch.zeros(3), torch.arange(2.0 * p))",
    "a part of another shape": (
        "sizes = [3, 2, 2, 1]; y = torch.zeros(3)\n"
        "dist.reduce_scatter(y, [torch.arange(1.0 * size) for size in sizes])"
    ),
    "a strided message": (
        "x = torch.arange(4.0)[::2]\nif rank == 0: dist.send(x, 1)\nif rank == 1: dist.recv(x, 0)"
    ),
    "a message to oneself": "dist.send(torch.ones(1), rank)",
    "no tensor": "dist.all_reduce(3.0)",
    "8-bit floats": "dist.broadcast(torch.ones(2).to(torch.float8_e4m3fn), 0)",
    "integers of 16 bits": "dist.all_reduce(torch.ones(2, dtype=torch.int16))",
    "a second world": "dist.init_process_group('gloo')",
}


def run_body(rank, body):
    """Run a case as the body of a function."""
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    names = {"torch": torch, "dist": dist, "p": dist.get_world_size()}
    exec(f"def case(rank):\n{lines}", names)
    return names["case"](rank)


def same(one, other):
    """Whether two results are equal to the last bit."""
    leaves = torch.utils._pytree.tree_leaves
    pairs = zip(leaves(one), leaves(other), strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b) for a, b in pairs)


@pytest.mark.parametrize("case", COLLECTIVES)
def test_it_is_what_gloo_does(ranks4, case):
    body = COLLECTIVES[case]
    missing = [name for name in re.findall(r"dist\.(\w+)\(", body) if not hasattr(dist, name)]
    if missing:
        pytest.skip(f"this PyTorch has no {missing[0]}")
    simulated = simulate(4, run_body, body)
    simulated.raise_first()
    try:
        real_results = ranks4.run(run_body, body)
    except RankError as error:
        if not torch.__version__.startswith(("2.11", "2.12")):
            raise
        pytest.skip(f"gloo of this PyTorch: {error}")
    for found, real in zip(simulated.results, real_results):
        assert same(found, real), (found, real)


@pytest.mark.parametrize("case", REFUSED)
def test_what_gloo_refuses_is_refused(ranks4, case):
    assert simulate(4, run_body, REFUSED[case]).errors
    with pytest.raises(RankError):
        ranks4.run(run_body, REFUSED[case])


def gradient_with_ddp(rank, compressed):
    module = small_gpt.model()
    model = nn.parallel.DistributedDataParallel(module, bucket_cap_mb=0.01)
    if compressed:
        model.register_comm_hook(dist.group.WORLD, hook)
    small_gpt.backward(model, small_gpt.shares(range(4), [4] * 4)[rank])
    return small_gpt.gradient(module)


def hook(group, bucket):
    """Averages a bucket, as DDP does without a hook."""
    mean = bucket.buffer().div_(group.size())
    work = dist.all_reduce(mean, group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def gradient_with_fsdp2(rank):
    module = small_gpt.model()
    mesh = init_device_mesh("cpu", (4,))
    for layer in module.blocks:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    small_gpt.backward(module, small_gpt.shares(range(4), [4] * 4)[rank])
    return torch.cat([param.grad.full_tensor().flatten() for param in module.parameters()])


@pytest.mark.parametrize(
    "gradient",
    [
        functools.partial(gradient_with_ddp, compressed=False),
        functools.partial(gradient_with_ddp, compressed=True),
        gradient_with_fsdp2,
    ],
    ids=["DDP", "DDP with a hook", "FSDP2"],
)
def test_pytorchs_own_runs_on_simulated_ranks(gradient):
    truth = small_gpt.gradient_of(small_gpt.joined(small_gpt.shares(range(4), [4] * 4)))
    outcome = simulate(4, gradient)
    outcome.raise_first()
    for found in outcome.results:
        assert small_gpt.distance(found, truth) < 1e-12
