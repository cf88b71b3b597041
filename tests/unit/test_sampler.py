"""Which samples each rank takes: partition, coverage, resumption.

Batches are the same for every number of ranks.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labcode.data.sampler import Batches, validation_batches


@st.composite
def plans(draw):
    """(num_samples, global_batch, dp_size, seed) with at least one batch in the data."""
    dp_size = draw(st.integers(1, 8))
    global_batch = dp_size * draw(st.integers(1, 5))
    return (
        global_batch + draw(st.integers(0, 60)),
        global_batch,
        dp_size,
        draw(st.integers(0, 2**40)),
    )


def slices(num_samples, global_batch, dp_size, seed, step, **options):
    """What every rank takes at one step, in the order of the ranks."""
    ranks = [
        Batches(num_samples, global_batch, dp_size, coord, seed, step=step, **options)
        for coord in range(dp_size)
    ]
    return [batches.next_indices() for batches in ranks]


@given(plans(), st.integers(0, 10**6))
def test_the_slices_of_all_ranks_are_the_global_batch_of_one(plan, step):
    num_samples, global_batch, dp_size, seed = plan
    parts = slices(*plan, step)
    assert {len(part) for part in parts} == {global_batch // dp_size}
    assert all(part.dtype == np.int64 for part in parts)
    (whole,) = slices(num_samples, global_batch, 1, seed, step)
    np.testing.assert_array_equal(np.concatenate(parts), whole)


@given(plans(), st.integers(0, 3))
def test_an_epoch_takes_no_sample_twice_and_leaves_less_than_a_batch(plan, epoch):
    num_samples, global_batch, dp_size, seed = plan
    ranks = [Batches(num_samples, global_batch, dp_size, coord, seed) for coord in range(dp_size)]
    steps = ranks[0].steps_per_epoch
    seen = np.concatenate(
        [r.indices(step) for step in range(epoch * steps, (epoch + 1) * steps) for r in ranks]
    )
    assert len(seen) == len(set(seen)) == num_samples - num_samples % global_batch
    assert 0 <= seen.min() <= seen.max() < num_samples


@given(plans(), st.integers(0, 30), st.integers(1, 30))
def test_a_resumed_run_goes_on_as_if_never_stopped(plan, stopped_at, more):
    through = Batches(*plan[:3], dp_coord=plan[2] - 1, seed=plan[3])
    for _ in range(stopped_at):
        next(through)
    saved = through.state_dict()
    assert saved == {"step": stopped_at}
    resumed = Batches(*plan[:3], dp_coord=plan[2] - 1, seed=plan[3])
    resumed.load_state_dict(saved)
    for _ in range(more):
        np.testing.assert_array_equal(next(resumed), next(through))
    assert resumed.step == through.step and resumed.epoch == through.epoch


@given(st.integers(0, 2**40), st.integers(20, 60))
def test_epochs_and_seeds_shuffle_differently_and_the_order_without_shuffling_is_the_order(
    seed, num_samples
):
    batches = Batches(num_samples, num_samples, seed=seed)
    first, second = batches.next_indices(), batches.next_indices()
    assert batches.epoch == 2
    assert sorted(first) == sorted(second) == list(range(num_samples))
    assert (first != second).any() and (
        first != Batches(num_samples, num_samples, seed=seed + 1).next_indices()
    ).any()
    straight = Batches(num_samples, 10, seed=seed, shuffle=False)
    np.testing.assert_array_equal(straight.next_indices(), np.arange(10))
    np.testing.assert_array_equal(straight.next_indices(), np.arange(10, 20))


def test_the_order_is_fixed_by_seed_and_epoch_for_good():
    """A saved position means the same samples in another process and on another machine."""
    assert Batches(10, 5, seed=3).next_indices().tolist() == [9, 6, 0, 2, 1]
    assert Batches(10, 5, seed=3).indices(10**12).tolist() == [5, 2, 3, 1, 9]


def test_what_a_rank_changes_in_its_batch_does_not_reach_later_batches():
    batches = Batches(8, 4, seed=1)
    batches.indices(0)[:] = -1
    assert batches.indices(0).min() >= 0


@given(
    st.integers(1, 50),
    st.integers(1, 12),
    st.integers(1, 8),
    st.one_of(st.none(), st.integers(1, 6)),
)
def test_validation_takes_the_first_samples_once_for_every_number_of_ranks(
    num_samples, global_batch, dp_size, max_batches
):
    ranks = [
        validation_batches(num_samples, global_batch, dp_size, coord, max_batches)
        for coord in range(dp_size)
    ]
    assert len({len(batches) for batches in ranks}) == 1  # all ranks communicate equally often
    in_order = [index for batch in zip(*ranks) for part in batch for index in part]
    wanted = num_samples if max_batches is None else min(num_samples, max_batches * global_batch)
    assert in_order == list(range(wanted))
    for parts in zip(*ranks):
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((7, 8), "7 samples do not fill one global batch of 8"),
        ((100, 6, 4), "global_batch=6 cannot be cut into dp_size=4 equal parts"),
        ((100, 0), "global_batch=0"),
        ((100, 8, 2, 2), "dp_coord=2 with dp_size=2"),
        ((100, 8, 2, -1), "dp_coord=-1 with dp_size=2"),
        ((100, 8, 2, 0, 0, True, -3), "step=-3"),
    ],
)
def test_what_cannot_be_is_one_clear_line(arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        Batches(*arguments)
    assert "\n" not in str(error.value)


def test_validation_of_nothing_is_one_clear_line():
    with pytest.raises(ValueError, match="0 samples in batches of 4: validation needs at least 1"):
        validation_batches(0, 4)
