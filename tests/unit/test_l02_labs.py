"""What lesson 02 is built on: the weather files, the store that counts, the slow training."""

import contextlib

import pytest
import torch

from course.exercises import l02
from course.labs import l02_by_hand, l02_job, l02_weather


@pytest.fixture(scope="module")
def tiles(tmp_path_factory):
    return l02_weather.make(tmp_path_factory.mktemp("l02") / "tiles.zarr", (2, 90, 180), 8)


@pytest.mark.parametrize("box", [(3, 5, 100, 160), (2, 4, 0, 60), (0, 1, 89, 91), (0, 8, 0, 180)])
def test_zarr_reads_the_bytes_that_are_predicted(tiles, box):
    first, stop, top, bottom = box
    arrays, store = l02_weather.open_counted(tiles)
    arrays[0][first:stop, top:bottom, 30:90]
    chunks = arrays[0].chunks
    expected = l02.chunks_touched([(first, stop), (top, bottom), (30, 90)], chunks)
    assert len(store.chunks) == expected


def test_a_sample_is_a_function_of_its_number(tiles):
    states, targets = l02_weather.Crops(tiles)[[3, 4]]
    again, _ = l02_weather.Crops(tiles)[[3, 4]]
    assert states.shape == targets.shape == (2, 4, 60, 60)
    assert torch.equal(states, again)
    assert not torch.equal(states[0], states[1])


def test_a_job_counts_what_it_does(tiles):
    job = l02_job.Job(tiles)
    l02.slow_training(job, 3)
    assert job.counts["statistics"] == job.counts["validate"] == job.counts["train_on"] == 3
    assert job.counts["read_map"] == 6
    assert job.counts["chunks"] == 4 * 4 * (3 * (4 + 2) + 3 * 6)


def test_two_jobs_train_alike(tiles):
    one, other = l02_job.Job(tiles), l02_job.Job(tiles)
    assert l02.slow_training(one, 5) == l02.slow_training(other, 5)
    assert torch.equal(one.weights(), other.weights())


def test_a_damaged_sample_says_which_it_is():
    with pytest.raises(ValueError, match="sample 11"):
        l02_weather.Damaged()[11]


@pytest.mark.parametrize("number", [3, 1, 0])
def test_batches_on_a_cpu_come_as_they_are(number):
    batches = [(torch.full((2,), float(n)), torch.tensor(n)) for n in range(number)]
    ahead = l02_by_hand.CopiedAhead(batches, "cpu")
    for _ in range(2):
        found = list(ahead)
        assert len(found) == number
        for (states, targets), (same, other) in zip(batches, found, strict=True):
            assert torch.equal(states, same)
            assert torch.equal(targets, other)


def test_the_next_batch_is_read_before_the_present_one_is_used():
    read = []

    def source():
        for number in range(3):
            read.append(number)
            yield (torch.tensor(number),)

    seen = [list(read) for _ in l02_by_hand.CopiedAhead(source(), "cpu")]
    assert seen == [[0, 1], [0, 1, 2], [0, 1, 2]]


class DottedTimer:
    def __init__(self, clock):
        self.clock = clock

    @contextlib.contextmanager
    def part(self, name): ...


class DottedPrefetcher:
    def __init__(self, source, ahead):
        self.source = source

    def __iter__(self):
        ready = []
        ...  # noqa: PIE790
        ready.clear()


@pytest.mark.parametrize(
    ("checked", "answer"), [(l02.step_timer, DottedTimer), (l02.prefetcher, DottedPrefetcher)]
)
def test_dots_in_the_place_of_a_yield_are_not_done_yet(checked, answer):
    with pytest.raises(NotImplementedError):
        checked(answer)
