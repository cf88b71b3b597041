"""A rank that is really slowed is named, and nobody is where all are alike."""

import os
import signal
import time
from functools import partial

import pytest
from faults import forks
from faults.cases import WEATHER
from faults.waiting import comes

pytestmark = pytest.mark.release

ARGS = (*WEATHER, "--train.global_batch=4", "--train.log_every=2", "--train.out=run")


def read_slowly(rank, seconds):
    """A patch: that rank takes longer for its samples."""
    from labcode.data import loader

    original = loader.read

    def slow(data, part):
        if os.environ["RANK"] == str(rank):
            time.sleep(seconds)
        return original(data, part)

    loader.read = slow


def named(done):
    """The lines that name a slow rank, of all ranks."""
    lines = "\n".join(done.out).splitlines()
    return [line for line in lines if "than the median of the ranks" in line]


@pytest.mark.parametrize(
    "layout",
    [
        (),
        ("--parallel.zero_stage=2",),
        ("--parallel.zero_stage=3",),
        ("--parallel.data_parallel=labcode",),
    ],
    ids=" ".join,
)
def test_a_rank_that_waits_for_its_data_is_named_once(tmp_path, layout):
    # of a machine whose other work may slow the rest as well
    args = [*ARGS, *layout, "--train.steps=10", "--train.slow_factor=1.5"]
    done = forks.train(args, cwd=tmp_path, ranks=2, patch=partial(read_slowly, 1, 0.6))
    assert done.codes == [0, 0], done.err
    (line,) = named(done)
    assert line.startswith("rank 1 on ") and "times slower" in line


def test_with_a_factor_of_0_nobody_is_named(tmp_path):
    args = [*ARGS, "--train.steps=8", "--train.slow_factor=0"]
    done = forks.train(args, cwd=tmp_path, ranks=2, patch=partial(read_slowly, 1, 0.2))
    assert done.codes == [0, 0], done.err
    assert named(done) == []


def compute_slowly():
    """A patch: every forward of a layer takes a while, so that a stop has something to hit."""
    from labcode.models.vit import ViT

    original = ViT.forward

    def slow(self, *args, **options):
        for _ in range(10):
            time.sleep(0.005)
        return original(self, *args, **options)

    ViT.forward = slow


def test_a_rank_that_is_starved_by_stops_is_named(tmp_path):
    args = [*ARGS, "--train.steps=100000", "--train.slow_factor=1.5"]
    with forks.start(args, cwd=tmp_path, ranks=2, patch=compute_slowly, timeout_s=250) as running:
        assert comes(lambda: "step 2/" in running.text(), 60)

        def starved():
            # nine tenths of the time
            running.signal(1, signal.SIGSTOP)
            time.sleep(0.09)
            running.signal(1, signal.SIGCONT)
            time.sleep(0.01)
            return "rank 1 on " in running.text()

        assert comes(starved, 60), running.text()
    assert "rank 0 on " not in running.text()
