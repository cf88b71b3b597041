"""Batches that workers read arrive on a GPU as they were read, copied beside the computation."""

import pytest
import torch

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
