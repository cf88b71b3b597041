"""Every collective that a process starts is seen with its kind, bytes and group size."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from labcode.comm.counting import Call, counted, totals

WHOLE = 4 * 6 * 8  # bytes of [4, 6] float64


def plain(rank):
    """Each operation of torch.distributed once, on a whole of [4, 6] float64; the flat ones under
    both of their names.
    """
    p = dist.get_world_size()
    whole, part = torch.ones(4, 6).double(), torch.ones(4 // p, 6).double()
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    with counted() as calls:
        dist.all_reduce(whole)
        dist.all_reduce(whole, op=dist.ReduceOp.MAX, async_op=True).wait()
        gather(whole.clone(), part)
        dist.all_gather_into_tensor(whole.clone(), part)
        dist.all_gather([part.clone() for _ in range(p)], part)
        scatter(part, whole)
        dist.reduce_scatter_tensor(part, whole)
        dist.all_to_all_single(whole.clone(), whole)
        dist.broadcast(whole, src=0)
        dist.reduce(whole, dst=0)
        dist.gather(part, [part.clone() for _ in range(p)] if rank == 0 else None, dst=0)
        dist.scatter(part, list(whole.chunk(p)) if rank == 0 else None, src=0)
        there, back = (rank + 1) % p, (rank - 1) % p
        ops = [dist.P2POp(dist.isend, part, there), dist.P2POp(dist.irecv, part.clone(), back)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        dist.barrier()
        whole @ whole.T  # other operations do not count
    return calls


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_every_operation_of_torch_distributed(ranks2):
    kinds = ["all_reduce"] * 2 + ["all_gather"] * 3 + ["reduce_scatter"] * 2
    kinds += ["all_to_all", "broadcast", "reduce", "gather", "scatter"]
    expected = [Call(kind, WHOLE, 2) for kind in kinds] + [
        Call("send", WHOLE // 2, 2),
        Call("recv", WHOLE // 2, 2),
    ]
    assert ranks2.run(plain) == [expected, expected]


def test_nothing_is_counted_outside(ranks2):
    def outside():
        with counted() as calls:
            pass
        dist.all_reduce(torch.ones(3))
        return calls

    assert ranks2.run(outside) == [[], []]


def test_groups_and_backward(ranks4):
    def pairs(rank):
        from labcode.comm.collectives import copy_to, reduce_from
        from labcode.comm.grid import Grid
        from labcode.topology import GridShape

        group = Grid.create(GridShape(dp=2, tp=2)).group("tp")
        x = torch.ones(5, requires_grad=True)
        with counted() as forward:
            y = reduce_from(copy_to(x, group).square(), group).sum()
        with counted() as backward:
            y.backward()
        return forward, backward

    assert ranks4.run(pairs) == [([Call("all_reduce", 20, 2)], [Call("all_reduce", 20, 2)])] * 4


def test_ddp_and_dtensor(ranks2):
    def others():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        x = torch.ones(3, 4)
        ddp = DistributedDataParallel(torch.nn.Linear(4, 4))
        with counted() as by_ddp:
            ddp(x).sum().backward()
        mlp = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))
        mesh = init_device_mesh("cpu", (2,))
        parallelize_module(mlp, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        with counted() as forward:
            y = mlp(x.requires_grad_()).sum()
        with counted() as backward:
            y.backward()
        return by_ddp, forward, backward

    by_ddp, forward, backward = ranks2.run(others)[0]
    assert totals(by_ddp) == {"all_reduce": (1, (4 * 4 + 4) * 4)}
    assert totals(forward) == totals(backward) == {"all_reduce": (1, 3 * 4 * 4)}


def test_the_spy_names_the_group_and_the_global_ranks_of_each_call(ranks4):
    def spied(rank):
        from labcode.comm.counting import CollectiveSpy
        from labcode.comm.grid import Grid
        from labcode.topology import GridShape

        class Listing(CollectiveSpy):
            def __init__(self):
                super().__init__()
                self.seen = []

            def on_collective(self, call, start):
                self.seen.append((call.name, call.num_bytes, call.ranks, call.group is group))
                return start()

        group = Grid.create(GridShape(dp=2, tp=2)).group("dp")  # ranks 0 and 2, ranks 1 and 3
        me = dist.get_rank(group)
        x = torch.ones(2)
        with Listing() as spy:
            dist.all_reduce(x, group=group)
            if me == 0:
                dist.send(x, group=group, group_dst=1)
                dist.recv(x, group=group, group_src=1)
            else:
                dist.recv(x, group=group)  # from any rank
                dist.send(x, group=group, group_dst=0)
            dist.barrier(group=group)
        return spy.seen

    seen = ranks4.run(spied)
    for first in (0, 1):
        second = first + 2
        assert seen[first] == [
            ("all_reduce", 8, (first, second), True),
            ("send", 8, (first, second), True),
            ("recv", 8, (second, first), True),
            ("barrier", 0, (first, second), True),
        ]
        assert seen[second][1:3] == [
            ("recv", 8, (-1, second), True),
            ("send", 8, (second, first), True),
        ]


def test_the_spy_may_act_before_and_after_a_collective(ranks2):
    def delayed(rank):
        from labcode.comm.counting import CollectiveSpy, wait_for

        class Watching(CollectiveSpy):
            def __init__(self):
                super().__init__()
                self.before, self.after, self.others = [], [], []

            def on_collective(self, call, start):
                self.before.append(x.tolist())
                result = start()
                wait_for(result)
                self.after.append(x.tolist())
                return result

            def on_operation(self, operation, args, kwargs):
                self.others.append(operation._schema.name)
                return operation(*args, **kwargs)

        x = torch.tensor([1.0 + rank])
        with Watching() as spy:
            work = dist.all_reduce(x, async_op=True)
            work.wait()
            x.mul_(2)
        return spy.before, spy.after, spy.others, x.item()

    for rank, (before, after, others, result) in enumerate(ranks2.run(delayed)):
        assert before == [[1.0 + rank]]
        assert after == [[3.0]]
        assert others[-1] == "aten::mul_"
        assert result == 6.0


def test_totals():
    calls = [Call("all_reduce", 8, 2), Call("all_gather", 4, 2), Call("all_reduce", 2, 4)]
    assert totals(calls) == {"all_reduce": (2, 10), "all_gather": (1, 4)}
    assert totals([]) == {}
