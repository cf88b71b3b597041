"""The ring by hand: the sum of `dist.all_reduce`, and exactly the bytes of the formula."""

import pytest

from labcode.perf import alpha_beta

SIZES = (0, 1, 3, 8, 1024, 1021)


def rings(rank, dtype):
    """For each size (equality, bytes that the ring sent, bytes that the star sent).

    Equality: star and ring give what dist.all_reduce gives.
    """
    import torch
    import torch.distributed as dist

    from labcode.comm import ring

    results = []
    for size in SIZES:
        x = torch.randint(-50, 50, (size,), generator=torch.Generator().manual_seed(rank)).to(
            getattr(torch, dtype)
        )
        expected, star = x.clone(), x.clone()
        dist.all_reduce(expected)
        star_sent = ring.star_all_reduce(star, dist.group.WORLD)
        sent = ring.all_reduce(x, dist.group.WORLD)
        results.append((torch.equal(x, expected) and torch.equal(star, expected), sent, star_sent))
    return results


@pytest.mark.parametrize("dtype", ["float64", "float32", "int64"])
@pytest.mark.parametrize("pool", ["ranks1", "ranks2", "ranks4"])
def test_ring_and_star_sum_as_all_reduce_does(pool, dtype, request):
    for results in request.getfixturevalue(pool).run(rings, dtype):
        assert [equal for equal, *_ in results] == [True] * len(SIZES)


@pytest.mark.parametrize("pool", ["ranks1", "ranks2", "ranks4"])
def test_a_ring_sends_the_bytes_of_the_formula(pool, request):
    ranks = request.getfixturevalue(pool)
    results = ranks.run(rings, "float32")
    sent = [[count for _, count, _ in sizes] for sizes in results]
    for i, size in enumerate(SIZES):
        total = sum(counts[i] for counts in sent)
        assert total == pytest.approx(
            len(ranks) * alpha_beta.bytes_sent("all_reduce", len(ranks), 4 * size)
        )
        if size % len(ranks) == 0:  # even chunks: the same on every rank
            assert {counts[i] for counts in sent} == {
                alpha_beta.bytes_sent("all_reduce", len(ranks), 4 * size)
            }
        star = [sizes[i][2] for sizes in results]
        assert star == [(len(ranks) - 1) * 4 * size] + [4 * size] * (len(ranks) - 1)
        assert sum(star) == total  # the ring saves nothing in all; it shares the work


def phases(rank):
    """What each phase leaves behind, and a matrix in place."""
    import torch
    import torch.distributed as dist

    from labcode.comm import ring

    chunks = [torch.full((2,), float(10**c) * (rank + 1)) for c in range(4)]
    ring.reduce_scatter_phase(chunks, dist.group.WORLD)
    finished = chunks[(rank + 1) % 4].tolist()
    ring.all_gather_phase(chunks, dist.group.WORLD)
    matrix = torch.ones(3, 5)
    ring.all_reduce(matrix, dist.group.WORLD)
    try:
        ring.all_reduce(torch.ones(3, 5).t(), dist.group.WORLD)
    except ValueError as error:
        message = str(error)
    return finished, [chunk.tolist() for chunk in chunks], matrix.tolist(), message


def test_after_the_first_phase_each_rank_has_one_finished_chunk(ranks4):
    for rank, (finished, chunks, matrix, message) in enumerate(ranks4.run(phases)):
        assert finished == [10.0 * 10 ** ((rank + 1) % 4)] * 2
        assert chunks == [[10.0 * 10**c] * 2 for c in range(4)]
        assert matrix == [[4.0] * 5] * 3
        assert "shape [5, 3]" in message and "call .contiguous()" in message


def in_a_pair(rank):
    """A ring over two ranks of four, whose numbers in the group are not their global ones."""
    import torch

    from labcode.comm import ring
    from labcode.comm.grid import Grid
    from labcode.topology import GridShape

    x = torch.full((7,), float(rank))
    ring.all_reduce(x, Grid.create(GridShape(dp=2, tp=2)).group("dp"))
    return x.tolist()


def test_a_ring_in_a_group(ranks4):
    assert ranks4.run(in_a_pair) == [[float(total)] * 7 for total in (2, 4, 2, 4)]


def timed(rank):
    """(number of times, the smallest, sizes that the call saw); rank 1 is slow."""
    import time

    import torch.distributed as dist

    from labcode.comm.timing import call_times

    seen = []

    def call(x):
        seen.append(x.nbytes)
        if rank == 1:
            time.sleep(0.05)
        dist.all_reduce(x)

    times = call_times(call, 400, repeats=3)
    return len(times), min(times), seen


def test_times_of_a_call(ranks2):
    results = ranks2.run(timed)
    # the first call warms up
    assert [(count, seen) for count, _, seen in results] == [(3, [400] * 4)] * 2
    assert results[0][1] > 0 and results[1][1] > 0.05  # the slower rank decides


def loopback(rank):
    """Bytes that loopback and ring report for one all-reduce over all ranks."""
    import torch
    import torch.distributed as dist

    from labcode.comm import ring

    x = torch.ones(2**22)
    ring.all_reduce(x, dist.group.WORLD)
    dist.barrier()
    before = ring.loopback_bytes()
    dist.barrier()
    sent = ring.all_reduce(x, dist.group.WORLD)
    dist.barrier()
    return ring.loopback_bytes() - before, sent


def test_the_loopback_device_carries_what_the_ring_sends(ranks2):
    (counted, sent), (_, other) = ranks2.run(loopback)
    assert counted >= 0.99 * (sent + other)  # other programs may add to it
