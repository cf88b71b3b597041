"""DALI gives the samples that we give; without it there is one line."""

import importlib.util
import sys

import pytest
import torch

from labcode.config import Config, GPTConfig, LoaderConfig, TextData, WeatherData
from labcode.data import weather
from labcode.data.errors import DataError
from labcode.data.loader import Loader
from labcode.data.sampler import Batches

DALI = LoaderConfig(backend="dali", workers=2)


def has_dali():
    try:
        return importlib.util.find_spec("nvidia.dali") is not None
    except ModuleNotFoundError:
        return False


needs_dali = pytest.mark.skipif(not has_dali(), reason="pip install labcode[dali]")


def test_without_the_package_there_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    dataset = weather.load(WeatherData()).train
    with pytest.raises(ValueError, match=r"pip install labcode\[dali\], or use") as caught:
        Loader(dataset, Batches(len(dataset), 4), 1, DALI)
    assert "\n" not in str(caught.value)


def test_text_is_refused():
    with pytest.raises(ValueError, match="reads weather, and this recipe reads text"):
        Config("x", GPTConfig(), TextData(), loader=DALI)


@needs_dali
@pytest.mark.parametrize(
    "options",
    [{}, {"roll": True, "sun": True}, {"crop": (30, 60), "sun": True}],
    ids=str,
)
def test_the_samples_are_ours_at_any_step(options):
    dataset = weather.load(WeatherData(**options)).train
    order = Batches(len(dataset), 4)
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    for device in devices:
        with (
            Loader(dataset, order, 2, device=device) as ours,
            Loader(dataset, order, 2, DALI, device) as theirs,
        ):
            for step in (*range(7), 3, 4, 11, 0):
                for one, other in zip(ours.take(step), theirs.take(step), strict=True):
                    for tensor, same in zip(one, other, strict=True):
                        assert same.device.type == device
                        torch.testing.assert_close(tensor, same, rtol=0, atol=0)


@needs_dali
def test_a_sample_that_cannot_be_read_is_one_line_at_its_step(monkeypatch):
    dataset = weather.load(WeatherData()).train
    order = Batches(len(dataset), 4, shuffle=False)
    sample = type(dataset).sample

    def broken(self, number):
        if number == 9:
            raise ValueError("sample 9 cannot be read")
        return sample(self, number)

    monkeypatch.setattr(type(dataset), "sample", broken)
    with Loader(dataset, order, 1, DALI) as loader:
        loader.take(0)
        loader.take(1)
        with pytest.raises(DataError, match=r"^sample 9 cannot be read$"):
            loader.take(2)
