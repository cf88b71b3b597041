"""Simulated ranks: what goes wrong is known as structure, and the same at every run."""

import gc
import random
import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.multiprocessing.reductions import StorageWeakRef

from course.answer import Hint
from course.exercises import expect
from course.exercises.memory import KeptForBackward
from course.exercises.simulated import Endless, Mismatch, Stuck, here, simulate

# ---- what goes wrong


def alone(rank):
    if rank == 0:
        dist.all_reduce(torch.ones(2))


def crossed(rank):
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    if rank < 2:
        for group in groups if rank else reversed(groups):
            dist.all_reduce(torch.ones(1), group=group)


def both_receive_first(rank):
    x = torch.ones(1)
    if rank < 2:
        dist.recv(x, 1 - rank)
        dist.send(x, 1 - rank)


def both_send_first(rank):
    x = torch.ones(1)
    if rank < 2:
        dist.send(x, 1 - rank)
        dist.recv(x, 1 - rank)


def a_future_of_nobody(rank):
    torch.futures.Future().wait()


def waits_again_in_finally(rank):
    try:
        dist.recv(torch.ones(1), (rank + 1) % 4)
    finally:
        dist.barrier()


STUCK = {
    alone: "rank 0 waits in all_reduce of float32 [2] (alone, line 23), ranks 1-3 have finished",
    crossed: "rank 1 waits in all_reduce of float32 [1] for rank 0",
    both_receive_first: "rank 0 waits in recv of float32 [1] from rank 1",
    both_send_first: "rank 1 waits in send of float32 [1] to rank 0",
    a_future_of_nobody: "ranks 0-3 wait in a Future that nothing completes",
    waits_again_in_finally: "rank 3 waits in recv of float32 [1] from rank 0",
}


@pytest.mark.parametrize("work", STUCK)
def test_a_deadlock_is_known_without_a_clock(work):
    outcome = simulate(4, work)
    with pytest.raises(Stuck) as caught:
        outcome.raise_first()
    assert STUCK[work] in str(caught.value)


def other_kinds(rank):
    if rank == 2:
        dist.broadcast(torch.ones(2), 0)
    else:
        dist.all_reduce(torch.ones(2))


def other_sizes(rank):
    dist.all_reduce(torch.ones(2 + rank // 3))


def other_dtypes(rank):
    dist.all_reduce(torch.ones(2, dtype=torch.float64 if rank == 1 else torch.float32))


def other_roots(rank):
    dist.broadcast(torch.ones(2), src=rank % 2)


def other_operations(rank):
    dist.all_reduce(torch.ones(2), op=dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)


def other_message(rank):
    if rank == 0:
        dist.send(torch.ones(3), 1)
    if rank == 1:
        dist.recv(torch.ones(4), 0)


def other_groups(rank):
    dist.new_group([0, 1] if rank < 2 else [2, 3])


MISMATCHES = {
    other_kinds: "rank 0 calls all_reduce of float32 [2] (other_kinds, line",
    other_sizes: "rank 3 calls all_reduce of float32 [3]",
    other_dtypes: "rank 1 calls all_reduce of float64 [2]",
    other_roots: "rank 1 calls broadcast of float32 [2] with root 1",
    other_operations: "rank 1 calls all_reduce of float32 [2] with MAX",
    other_message: "rank 1 calls recv of float32 [4] from rank 0",
    other_groups: "rank 2 makes a group of [2, 3] where another rank has made one of [0, 1]",
}


@pytest.mark.parametrize("work", MISMATCHES)
def test_calls_that_do_not_match_are_told_apart(work):
    outcome = simulate(4, work)
    with pytest.raises(Mismatch) as caught:
        outcome.raise_first()
    assert MISMATCHES[work] in str(caught.value)


def makes_two_groups(rank):
    dist.new_group([0, 1])
    dist.new_group([1, 2, 3], use_local_synchronization=True)


def test_it_is_known_which_groups_each_rank_has_made_with_whom():
    outcome = simulate(4, makes_two_groups)
    made = [[one.group for one in of_rank] for of_rank in outcome.made]
    assert made == [[(0, 1)]] + [[(0, 1), (1, 2, 3)]] * 3
    by_all, by_members = outcome.made[3]
    assert by_all.group_name.isdigit()
    assert not by_members.group_name.isdigit()
    assert not outcome.events


def counts_for_ever(rank):
    if rank == 1:
        while True: pass  # fmt: skip  # noqa: E701


def asks_for_ever(rank):
    if rank == 0:
        work = dist.irecv(torch.ones(1), 1)
        while not work.is_completed():
            pass


def sends_for_ever(rank):
    while True:
        dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize("work", [counts_for_ever, asks_for_ever, sends_for_ever])
def test_a_loop_without_an_end_is_counted_and_not_timed(work):
    outcome = simulate(2, work)
    with pytest.raises(Endless, match=r"did not come to an end|goes on"):
        outcome.raise_first()


def fails_on_two(rank):
    dist.all_reduce(torch.ones(1))
    if rank in (1, 3):
        raise KeyError(rank)
    dist.barrier()


def test_the_error_of_the_lowest_rank_is_the_one_that_is_told():
    outcome = simulate(4, fails_on_two)
    assert sorted(outcome.errors) == [1, 3]
    assert sorted(outcome.stuck) == [0, 2]
    with pytest.raises(KeyError, match="1"):
        outcome.raise_first()
    with pytest.raises(RuntimeError, match="rank 1: KeyError: 1"):
        expect.settle(outcome)


# ---- what is seen


def forgets_to_wait(rank):
    x = torch.ones(1)
    dist.all_reduce(x, async_op=True)
    return x.item()


def test_a_request_that_nobody_waits_for_delivers_nothing():
    outcome = simulate(4, forgets_to_wait)
    assert outcome.results == [1, 1, 1, 1]
    assert not any(event.arrived for event in outcome.of(0, "all_reduce"))
    hints = [hint for hint, shows in expect.careless(outcome.of(0)).items() if shows]
    assert len(hints) == 1 and "1 all-reduce started and 0 waited for" in hints[0]


def touches(rank):
    whole = torch.ones(8)
    for change in (None, "divide", "the other half", "data"):
        part = whole[:4]
        work = dist.all_reduce(part, async_op=True)
        if change == "divide":
            part /= 4
        if change == "the other half":
            whole[4:].zero_()
        if change == "data":
            part.data.mul_(2)
        work.wait()


def test_a_tensor_that_is_changed_under_way_is_noticed_and_its_neighbour_is_not():
    events = simulate(4, touches).of(2, "all_reduce")
    assert [event.touched for event in events] == [False, True, False, True]


def with_blocks(rank):
    for number in range(2):
        here().note("step", number)
        with here().block("backward"):
            work = dist.all_reduce(torch.ones(4), async_op=True)
        dist.send(torch.ones(2), 1) if rank == 0 else dist.recv(torch.ones(2), 0)
        work.wait()


def test_events_say_what_was_called_when_and_where():
    outcome = simulate(2, with_blocks)
    first, second = outcome.parts(0, "step")
    assert [event.kind for event in first] == ["all_reduce", "send"]
    assert [str(event) for event in second] == [
        "all_reduce of float32 [4]",
        "send of float32 [2] to rank 1",
    ]
    reduce, send = first
    assert reduce.block == "backward" and reduce.asynchronous and reduce.num_bytes == 16
    assert reduce.waits[0][1] == "" and reduce.where.startswith("with_blocks, line ")
    assert send.peer == 1 and not send.asynchronous


# ---- the process is as it was


def draws(rank):
    first = torch.rand(1).item(), random.random()
    dist.barrier()
    torch.manual_seed(rank)
    dist.barrier()
    return first, torch.rand(1).item()


def state():
    """What a simulation puts aside."""
    return (
        distributed_c10d._world,
        distributed_c10d._new_process_group_helper,
        torch._C.Future.wait,
        torch.get_rng_state().tolist(),
        random.getstate(),
        threading.active_count(),
    )


def test_ranks_have_their_own_random_numbers_and_the_process_keeps_its_own():
    before = state()
    outcome = simulate(4, draws)
    assert len({first for first, _ in outcome.results}) == 1
    assert len({second for _, second in outcome.results}) == 4
    assert state() == before


@pytest.fixture
def gloo_world():
    """A real world of one rank in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sums(rank):
    x = torch.ones(2) * rank
    dist.all_reduce(x, group=dist.new_group([1, 2]) if rank in (1, 2) else None)
    return x.tolist()


@pytest.mark.usefixtures("gloo_world")
def test_a_real_world_in_the_same_process_stays_untouched():
    group = dist.new_group([0])
    before = state()
    seen = set()
    stop = threading.Event()

    def use_the_real_world():
        while not stop.is_set():
            x = torch.ones(2)
            dist.all_reduce(x, group=group)
            seen.add((dist.get_world_size(), x.sum().item()))

    beside = threading.Thread(target=use_the_real_world)
    beside.start()
    while not seen:
        pass
    for _ in range(5):
        simulate(4, draws).raise_first()
    stop.set()
    beside.join()
    assert seen == {(1, 2.0)}
    assert state()[:3] == before[:3]
    assert dist.get_world_size() == 1


class Keeper:
    """A class of a notebook, into which ranks write."""

    value = 0


Keeper.__module__ = "__main__"


def writes_into_its_class(rank, keeper):
    keeper.value += rank
    dist.barrier()
    return keeper.value


def test_each_rank_has_its_own_copy_of_a_learners_class():
    assert simulate(4, writes_into_its_class, Keeper).results == [0, 1, 2, 3]
    assert Keeper.value == 0


def test_nothing_is_left_behind():
    simulate(4, draws)
    gc.collect()
    threads = threading.active_count()
    for _ in range(20):
        simulate(4, alone)
    gc.collect()
    assert threading.active_count() == threads
    assert torch._C._distributed_c10d._get_work_registry_size() == 0


def gathers(rank, how):
    """Whether what has come is let go of, once the result is copied out."""
    parts = [torch.empty(8) for _ in range(4)]
    pieces = [StorageWeakRef(part.untyped_storage()) for part in parts]
    work = dist.all_gather(parts, torch.full((8,), 1.0 * rank), async_op=True)
    work.wait() if how == "wait" else work.get_future().wait()
    del parts, work
    gc.collect()
    return all(piece.expired() for piece in pieces)


@pytest.mark.parametrize("how", ["wait", "get_future"])
def test_a_group_keeps_no_tensor_of_a_call_that_is_done(how):
    assert simulate(4, gathers, how).results == [True] * 4


def sends_what_has_no_memory(rank, when):
    x = torch.ones(4)
    if when == "before":
        x.untyped_storage().resize_(0)
    work = dist.all_reduce(x, async_op=True)
    if when == "meanwhile":
        x.untyped_storage().resize_(0)
    work.wait()


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_memory_that_is_gone_is_an_error_and_no_crash(when):
    errors = simulate(4, sends_what_has_no_memory, when).errors
    assert "a tensor has no memory" in str(errors[0])


def burn(stop):
    while not stop.is_set():
        sum(range(2000))


def told(outcome):
    return [
        (event.kind, event.rank, event.at, event.block, event.waits, event.arrived)
        for event in outcome.events
    ]


def test_a_run_is_the_same_beside_threads_that_compute():
    quiet = told(simulate(4, with_blocks_on_four))
    stop = threading.Event()
    beside = threading.Thread(target=burn, args=(stop,))
    beside.start()
    try:
        assert told(simulate(4, with_blocks_on_four)) == quiet
    finally:
        stop.set()
        beside.join()


def with_blocks_on_four(rank):
    works = []
    for size in (1, 2, 3):
        works.append(dist.all_reduce(torch.ones(size), async_op=True))
    dist.barrier()
    for work in reversed(works):
        work.wait()


# ---- tables of mistakes


def test_a_table_finds_the_mistake_that_gave_a_value():
    truth = torch.tensor([1.0, 2.0])
    table = {
        "it is the other one": torch.tensor([2.0, 1.0]),
        "{times:.3g} times as long": expect.times(truth),
        "it is negative": bool(-1 < 0),
    }
    expect.diagnose("", truth + 1e-12, truth, table)
    cases = {
        "here: it is the other one": torch.tensor([2.0, 1.0]),
        "here: 4 times as long": 4 * truth,
        "here: it is negative": torch.tensor([3.0, -7.0]),
    }
    for hint, found in cases.items():
        with pytest.raises(Hint) as caught:
            expect.diagnose("here: ", found, truth, table)
        assert str(caught.value) == hint


@pytest.mark.parametrize("wrong", [torch.tensor([1.0, float("nan")]), torch.ones(3)])
def test_what_is_no_number_or_has_another_shape_is_far_away(wrong):
    with pytest.raises(Hint, match="away"):
        expect.diagnose("", wrong, torch.ones(2), {})


def in_group(group):
    x = torch.ones(1)
    dist.all_reduce(x)  # and not in the group
    return x


def all_of_the_group(results, outcome, members):
    for place, found in enumerate(results):
        if found.item() != len(members):
            raise Hint(f"on rank {members[place]}: {found.item():g}")


def counts_to_four(group):
    x = torch.ones(1)
    if group.rank() < 4:
        x *= group.size()
    return x


def test_a_fault_that_only_more_ranks_show_is_found():
    with pytest.raises(Hint) as caught:
        expect.in_groups(counts_to_four, judge=all_of_the_group)
    assert "in the group of ranks 0-5: on the rank with number 4" in str(caught.value)


def test_what_is_wrong_with_any_tensor_is_told_where_the_table_has_nothing():
    truth = torch.arange(1.0, 9.0, dtype=torch.float64)
    cases = {
        "x is off (it is zero everywhere)": torch.zeros_like(truth),
        "x is right to 2e-08 only: where do the numbers cease to be float64?": truth + 1e-7,
    }
    for hint, found in cases.items():
        with pytest.raises(Hint) as caught:
            expect.diagnose("x is ", found, truth, {}, "off")
        assert str(caught.value) == hint


def test_a_list_is_neither_a_tensor_nor_an_array():
    expect.sequence((1, 2), "a list")
    with pytest.raises(Hint, match="return a list of two, not a Tensor"):
        expect.sequence(torch.ones(2), "a list of two")


@pytest.mark.parametrize("layout", [torch.t, expect.with_gaps])
def test_a_collective_of_a_tensor_that_is_not_contiguous_is_refused_as_by_nccl(layout):
    x = torch.arange(6.0).view(2, 3)
    assert torch.equal(expect.with_gaps(x), x)
    outcome = simulate(2, sends_as, layout, x)
    assert "contiguous" in str(outcome.errors[0])
    assert not simulate(2, sends_as, torch.clone, x).errors


def sends_as(rank, layout, x):
    x = layout(x)
    dist.all_gather([torch.empty_like(x) for _ in range(2)], x)


@pytest.mark.parametrize("retains", [False, True])
def test_what_graphs_keep_for_a_backward_is_known(retains):
    weight = torch.ones(5, requires_grad=True)
    with KeptForBackward() as kept:
        loss = weight.square().sum()
        assert kept.num_bytes() == 20
        loss.backward(retain_graph=retains)
        assert kept.num_bytes() == (20 if retains else 0)
        del loss
        assert kept.num_bytes() == 0


def test_a_fault_that_only_a_part_of_the_ranks_shows_is_told_as_one():
    with pytest.raises(Hint) as caught:
        expect.in_groups(in_group, judge=all_of_the_group)
    text = str(caught.value)
    assert text.startswith("with ranks 0-3 it is right; in the group of ranks 1-3")
    assert expect.STILL_THE_WORLD in text
