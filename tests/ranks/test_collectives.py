"""Each autograd pair on 1, 2 and 4 ranks in float64, held to formulas over all ranks' inputs."""

import pytest
import torch

from labcode.comm import collectives

ROWS, COLUMNS = 8, 12  # divisible by 1, 2 and 4 along both dims
TOLERANCE = {"rtol": 0, "atol": 1e-12}


def split(x, p, r, dim):
    return x.chunk(p, dim)[r]


# name: (extra arguments, forward(inputs, r), backward(output gradients, r)); both functions take
# the tensors of all ranks
OPERATIONS = {
    "copy_to": ((), lambda x, r: x[r], lambda g, r: sum(g)),
    "reduce_from": ((), lambda x, r: sum(x), lambda g, r: g[r]),
    "gather_from": ((1,), lambda x, r: torch.cat(x, 1), lambda g, r: split(g[r], len(g), r, 1)),
    "split_to": ((1,), lambda x, r: split(x[r], len(x), r, 1), lambda g, r: torch.cat(g, 1)),
    "all_gather": (
        (0,),
        lambda x, r: torch.cat(x, 0),
        lambda g, r: sum(split(y, len(g), r, 0) for y in g),
    ),
    "reduce_scatter": (
        (0,),
        lambda x, r: sum(split(y, len(x), r, 0) for y in x),
        lambda g, r: torch.cat(g, 0),
    ),
    "all_to_all": (
        (0, 1),
        lambda x, r: torch.cat([split(y, len(x), r, 0) for y in x], 1),
        lambda g, r: torch.cat([split(y, len(g), r, 1) for y in g], 0),
    ),
}


def forward_and_backward(rank, name, extra, contiguous):
    """(input, output, output gradient, input gradient, whether what was given is unchanged).

    What was given is the input and the output gradient.
    """
    import torch
    import torch.distributed as dist

    from labcode.comm import collectives

    generator = torch.Generator().manual_seed(rank)
    shape = (ROWS, COLUMNS) if contiguous else (COLUMNS, ROWS)
    x = torch.randn(shape, dtype=torch.float64, generator=generator)
    x = x if contiguous else x.t()
    kept = x.clone()
    leaf = x.detach().requires_grad_()
    out = getattr(collectives, name)(leaf, dist.group.WORLD, *extra)
    grad = torch.randn(out.shape, dtype=torch.float64, generator=generator)
    kept_grad = grad.clone()
    out.backward(grad)
    return (
        kept,
        out.detach(),
        grad,
        leaf.grad,
        torch.equal(x, kept) and torch.equal(grad, kept_grad),
    )


@pytest.fixture(params=[1, 2, 4])
def pool(request):
    return request.getfixturevalue(f"ranks{request.param}")


@pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "transposed"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_forward_and_backward_equal_the_single_process_result(pool, name, contiguous):
    extra, forward, backward = OPERATIONS[name]
    inputs, outputs, grads, input_grads, untouched = zip(
        *pool.run(forward_and_backward, name, extra, contiguous)
    )
    for r in range(len(inputs)):
        torch.testing.assert_close(outputs[r], forward(inputs, r), **TOLERANCE)
        torch.testing.assert_close(input_grads[r], backward(grads, r), **TOLERANCE)
    assert all(untouched)


def mlp(rank):
    """A sharded two-layer MLP three ways.

    Each comes with its loss, its input gradient and the gradient of its weight shards.
    """
    import torch
    import torch.distributed as dist

    from labcode.comm.collectives import (
        all_gather,
        copy_to,
        gather_from,
        reduce_from,
        reduce_scatter,
        split_to,
    )

    world, p = dist.group.WORLD, dist.get_world_size()
    torch.manual_seed(0)
    x, up, down = (torch.randn(*s, dtype=torch.float64) for s in ((8, 4), (4, 16), (16, 4)))
    part = slice(rank * 16 // p, (rank + 1) * 16 // p)

    def tensor_parallel(x, a, b):
        return reduce_from(torch.tanh(copy_to(x, world) @ a) @ b, world)

    def sequence_parallel(x, a, b):  # the input's rows are sharded around the two layers
        y = reduce_scatter(
            torch.tanh(all_gather(split_to(x, world, 0), world, 0) @ a) @ b, world, 0
        )
        return gather_from(y, world, 0)

    results = []
    for sharded in (tensor_parallel, sequence_parallel):
        leaves = [t.clone().requires_grad_() for t in (x, up[:, part], down[part])]
        loss = sharded(*leaves).pow(2).sum()
        loss.backward()
        results.append((loss.item(), *(leaf.grad for leaf in leaves)))
    whole = [t.clone().requires_grad_() for t in (x, up, down)]
    loss = (torch.tanh(whole[0] @ whole[1]) @ whole[2]).pow(2).sum()
    loss.backward()
    expected = (loss.item(), whole[0].grad, whole[1].grad[:, part], whole[2].grad[part])
    return results, expected


def test_a_sharded_mlp_has_the_loss_and_gradients_of_the_whole_one(pool):
    for results, expected in pool.run(mlp):
        for result in results:
            torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


def refused(dim):
    import torch
    import torch.distributed as dist

    from labcode.comm import collectives

    try:
        collectives.split_to(torch.zeros(4, 3), dist.group.WORLD, dim)
    except ValueError as error:
        return str(error)
    return None


def test_a_dim_that_the_group_does_not_divide_is_refused(ranks2):
    assert (
        "dim 1 of shape [4, 3] is not divisible by the group's 2 ranks" in ranks2.run(refused, 1)[0]
    )
    assert ranks2.run(refused, 0) == [None, None]


def test_every_public_collective_is_tested_here():
    public = {
        name
        for name, value in vars(collectives).items()
        if getattr(value, "__module__", "") == collectives.__name__
    }
    # all_gather and reduce_scatter are made of them
    halves = {"start_all_gather", "start_reduce_scatter"}
    assert {name for name in public if not name.startswith("_")} == set(OPERATIONS) | halves
