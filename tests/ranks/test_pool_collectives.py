"""What the ranks of a pool have called: what is compared, and what a hang says."""

import contextlib
import os
import threading
import time

import pytest
import torch
import torch.distributed as dist

from course.pool.answers import HangError, RankError
from course.pool.ranks import Ranks
from labcode.comm.counting import counted, totals


@pytest.fixture(scope="module")
def patient():
    """A pool whose own time-out is far off: whatever ends a hang, it is not that."""
    with Ranks(2, timeout_s=3000) as pool:
        yield pool


def works(pool):
    def all_reduced(rank):
        x = torch.tensor([rank])
        dist.all_reduce(x)
        return x.item()

    return pool.run(all_reduced) == [sum(range(pool.n))] * pool.n


# ---- calls that do not belong together


def other_size(rank):
    dist.all_reduce(torch.ones(3 + rank))


def other_dtype(rank):
    dist.all_reduce(torch.ones(3, dtype=torch.float64 if rank else torch.float32))


def other_name(rank):
    if rank == 0:
        dist.broadcast(torch.ones(3), 0)
    else:
        dist.all_reduce(torch.ones(3))


def other_root(rank):
    dist.broadcast(torch.ones(3), src=rank)


def other_part(rank):
    dist.all_gather_into_tensor(torch.empty(2 * (2 + rank)), torch.ones(2 + rank))


def in_a_new_group(rank):
    dist.all_reduce(torch.ones(2 + rank), group=dist.new_group([0, 1]))


def one_call_later(rank):
    x = torch.ones(2)
    if rank == 1:
        dist.all_reduce(x)
    dist.barrier()


MISMATCHES = [
    (other_size, "rank 0 called all_reduce of float32 [3], rank 1 of float32 [4]"),
    (other_dtype, "rank 0 called all_reduce of float32 [3], rank 1 of float64 [3]"),
    (
        other_name,
        "rank 0 called broadcast of float32 [3] from rank 0, "
        "rank 1 called all_reduce of float32 [3]",
    ),
    (
        other_root,
        "rank 0 called broadcast of float32 [3] from rank 0, rank 1 of float32 [3] from rank 1",
    ),
    (other_part, "rank 0 called all_gather of float32 [2], rank 1 of float32 [3]"),
    (in_a_new_group, "rank 0 called all_reduce of float32 [2], rank 1 of float32 [3]"),
    (one_call_later, "rank 0 called barrier, rank 1 called all_reduce of float32 [2]"),
]


@pytest.mark.parametrize(("call", "text"), MISMATCHES)
def test_calls_that_do_not_belong_together_are_named_with_both_ranks(patient, call, text):
    with pytest.raises(RankError) as caught:
        patient.run(call)
    assert str(caught.value).startswith(f"{text}: ")
    assert "\n" not in str(caught.value)
    assert call.__name__ in "".join(caught.value.__notes__)
    assert works(patient)


def test_of_four_ranks_the_one_that_differs_is_set_against_the_others(ranks4):
    def all_but_two(rank):
        if rank == 2:
            time.sleep(0.5)
        dist.all_reduce(torch.ones(4 if rank == 2 else 3))

    with pytest.raises(RankError, match=r"ranks 0, 1 and 3 .*float32 \[3\], rank 2 of .*\[4\]"):
        ranks4.run(all_but_two)
    assert works(ranks4)


def test_one_size_in_another_shape_is_no_mismatch(ranks2):
    def transposed(rank):
        weight = torch.ones(2, 3).T.contiguous() if rank else torch.ones(2, 3)
        dist.all_reduce(weight)
        return weight.sum().item()

    assert ranks2.run(transposed) == [12.0, 12.0]


def test_a_call_that_torch_refuses_on_one_rank_does_not_count(ranks2):
    def refused(rank):
        if rank == 0:
            with contextlib.suppress(RuntimeError):
                dist.group.WORLD.allreduce([])
        x = torch.ones(3)
        dist.broadcast(x, 0)
        dist.all_reduce(x)
        return x[0].item()

    assert ranks2.run(refused) == [2.0, 2.0]


def everything(rank, n):
    """Each function of torch.distributed that moves tensors, with different roles where it has."""
    x = torch.ones(4 * n)
    parts = list(torch.ones(n, 4))
    dist.all_reduce(x)
    dist.broadcast(x, 1)
    dist.reduce(x, 1)
    dist.all_gather([torch.ones(4) for _ in range(n)], torch.ones(4))
    dist.all_gather_into_tensor(x, torch.ones(4))
    dist.gather(torch.ones(4), parts if rank == 1 else None, dst=1)
    dist.scatter(torch.ones(4), parts if rank == 1 else None, src=1)
    dist.reduce_scatter(torch.ones(4), parts)
    dist.reduce_scatter_tensor(torch.ones(4), x)
    dist.all_to_all_single(torch.empty(4 * n), x)
    sizes = [1 + other for other in range(n)]  # rank 1 gets more than rank 0
    mine = [1 + rank] * n
    dist.all_to_all_single(torch.empty(sum(mine)), torch.ones(sum(sizes)), mine, sizes)
    dist.barrier()
    dist.monitored_barrier()
    objects = [None] * n
    dist.all_gather_object(objects, "x" * rank)
    dist.broadcast_object_list(objects, 0)
    left = (rank - 1) % n
    right = (rank + 1) % n
    works = [dist.isend(x, right), dist.irecv(torch.empty_like(x), left)]
    for work in works:
        work.wait()
    ends = [dist.P2POp(dist.isend, x, left), dist.P2POp(dist.irecv, x.clone(), right)]
    for work in dist.batch_isend_irecv(ends):
        work.wait()
    if rank == 0:
        dist.recv(torch.empty(3))
    elif rank == 1:
        dist.send(torch.ones(3), 0)
    group = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(torch.ones(rank + 5 - rank), group=group, async_op=True).wait()
    return objects


def test_what_is_right_stays_as_it_is(ranks4):
    assert ranks4.run(everything, 4) == [["", "x", "xx", "xxx"]] * 4


def test_the_spy_sees_the_same_calls_as_without_the_recorder(ranks2):
    def spied(rank):
        x = torch.ones(3)
        with counted() as calls:
            dist.all_reduce(x)
            dist.broadcast(x, 0)
            dist.all_gather([torch.ones(3), torch.ones(3)], x)
        return totals(calls)

    expected = {"all_reduce": (1, 12), "broadcast": (1, 12), "all_gather": (1, 24)}
    assert ranks2.run(spied) == [expected] * 2


# ---- hangs


def absent(rank):
    if rank == 0:
        dist.all_reduce(torch.ones(1))


def crossed(rank):
    dist.recv(torch.ones(2), src=1 - rank)


def one_more(rank):
    dist.barrier()
    if rank == 0:
        dist.barrier()


def no_group(rank):
    if rank == 1:
        dist.new_group([0, 1])


HANGS = [
    (absent, "rank 0 waits in all_reduce of float32 [1], rank 1 has finished without a call"),
    (
        crossed,
        "rank 0 waits in recv of float32 [2] from rank 1, "
        "rank 1 waits in recv of float32 [2] from rank 0",
    ),
    (one_more, "rank 0 waits in barrier, rank 1 has finished"),
    (no_group, "rank 0 has finished without a call, rank 1 waits in new_group"),
]


@pytest.mark.parametrize(("call", "text"), HANGS)
def test_a_hang_is_explained_long_before_the_time_out(patient, monkeypatch, call, text):
    monkeypatch.setattr("course.pool.ranks.HANG_S", 1.0)
    with pytest.raises(HangError) as caught:
        patient.run(call)
    assert str(caught.value).startswith(f"{text}: ")
    assert call.__name__ in "".join(caught.value.__notes__)
    assert works(patient)


def test_members_of_a_smaller_group_are_named(ranks4, monkeypatch):
    def in_pairs(rank):
        low, high = dist.new_group([0, 1]), dist.new_group([2, 3])
        if rank != 3:
            dist.barrier(low if rank < 2 else high)

    monkeypatch.setattr("course.pool.ranks.HANG_S", 1.0)
    with pytest.raises(HangError, match=r"rank 2 waits in barrier with ranks 2 and 3"):
        ranks4.run(in_pairs)
    assert works(ranks4)


def test_a_rank_that_computes_is_waited_for(ranks2, monkeypatch):
    def late(rank):
        if rank == 1:
            time.sleep(3)
        dist.barrier()
        return rank

    monkeypatch.setattr("course.pool.ranks.HANG_S", 0.5)
    assert ranks2.run(late) == [0, 1]


def test_a_time_out_of_gloo_is_explained_too(patient):
    def gives_up(rank):
        from datetime import timedelta

        group = dist.new_group(timeout=timedelta(seconds=1))
        if rank == 0:
            dist.all_reduce(torch.ones(1), group=group)

    with pytest.raises(RankError) as caught:
        patient.run(gives_up)
    text = str(caught.value)
    assert text.startswith("rank 0: RuntimeError: ") and "Timed out waiting 1000ms" in text
    assert text.endswith("rank 0 waits in all_reduce of float32 [1], rank 1 has finished")
    assert works(patient)


def test_what_a_rank_called_last_is_said_of_its_death(patient):
    def aborts(rank):
        dist.broadcast(torch.ones(3), 0)
        os.abort()

    with pytest.raises(
        RankError, match=r"the last that it called is broadcast of float32 \[3\] from"
    ):
        patient.run(aborts)
    assert works(patient)


# ---- what a call leaves


def destroys(rank):
    if rank == 1:
        dist.destroy_process_group()


def leaves_a_thread(rank):
    if rank == 0:
        threading.Thread(target=dist.barrier, daemon=True).start()
        time.sleep(0.3)


def leaves_a_call(rank):
    if rank == 0:
        dist.all_reduce(torch.ones(3), async_op=True)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (destroys, "rank 1 has destroyed its process group"),
        (leaves_a_thread, "rank 0 has left a thread in barrier"),
        (leaves_a_call, "not all ranks have made the same number of collectives: rank 0 1, rank 1"),
    ],
)
def test_a_call_that_leaves_the_group_unusable_is_followed_by_a_new_one(patient, call, text):
    patient.restart()  # so that counts begin at 0
    patient.run(call)
    with pytest.warns(UserWarning, match=f"^{text}.*: all ranks are started anew"):
        assert works(patient)


def test_a_fork_of_a_rank_is_no_rank(ranks2):
    def forks(rank):
        dist.barrier()
        child = os.fork()
        if child == 0:
            dist.ProcessGroup.allreduce  # noqa: B018 - the recorder must be off here
            from course.pool import recorder

            os._exit(len(recorder._recorders))
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status)

    assert ranks2.run(forks) == [0, 0]
    assert works(ranks2)
