"""Batches that workers read arrive on a GPU as they were read, copied beside the computation."""

import pytest
import torch

from course.labs import l02_by_hand
from labcode.config import LoaderConfig, WeatherData
from labcode.data import weather
from labcode.data.loader import Loader
from labcode.data.sampler import Batches

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
@pytest.mark.parametrize("workers", [0, 2])
def test_copies_on_a_stream_of_their_own_are_whole_when_they_are_used(workers, pinned):
    dataset = weather.load(WeatherData(crop=(30, 60), sun=True)).train
    order = Batches(len(dataset), 8)
    config = LoaderConfig(workers=workers, pin_memory=pinned)
    weights = torch.randn(4096, 4096, device="cuda")
    with Loader(dataset, order, 2) as here, Loader(dataset, order, 2, config, "cuda") as there:
        for step in (*range(12), 3, 4, 0):
            found = there.take(step)
            sums = [(inputs.double().sum(), targets.double().sum()) for inputs, targets in found]
            for _ in range(10):  # the device is busy while the next batch is copied
                weights = (weights @ weights).clamp(-1, 1)
            for one, other, total in zip(here.take(step), found, sums, strict=True):
                for tensor, same, value in zip(one, other, total, strict=True):
                    assert same.device.type == "cuda"
                    torch.testing.assert_close(same.cpu(), tensor, rtol=0, atol=0)
                    torch.testing.assert_close(value.cpu(), tensor.double().sum())


@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
def test_the_copies_that_lesson_02_writes_are_whole_when_they_are_used(pinned):
    batches = []
    for number in range(12):
        states = torch.randn(8, 4, 60, 60, generator=torch.Generator().manual_seed(number))
        batches.append((states.pin_memory() if pinned else states, torch.tensor(number)))
    weights = torch.randn(4096, 4096, device="cuda")
    number = 0
    for states, targets in l02_by_hand.CopiedAhead(batches, "cuda"):
        for _ in range(10):  # the device is busy while the next batch is copied
            weights = (weights @ weights).clamp(-1, 1)
        total = states.double().sum()
        torch.testing.assert_close(states.cpu(), batches[number][0], rtol=0, atol=0)
        torch.testing.assert_close(total.cpu(), batches[number][0].double().sum())
        assert targets.item() == number
        del states, targets  # their memory may be used for the next copy now
        number += 1
    assert number == len(batches)


def test_a_copy_of_lesson_02_runs_while_the_device_computes():
    """It ends before the kernels that were queued ahead of it."""
    batches = [(torch.zeros(1 << 20).pin_memory(),) for _ in range(3)]
    weights = torch.randn(8192, 8192, device="cuda")
    ahead = l02_by_hand.CopiedAhead(batches, "cuda")
    for _ in ahead:
        for _ in range(20):
            weights = (weights @ weights).clamp(-1, 1)
        assert ahead.stream is not None
        ahead.stream.synchronize()  # the copy of the next batch is done,
        assert not torch.cuda.current_stream().query()  # and the kernels are not
        torch.cuda.synchronize()
