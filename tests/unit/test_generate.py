"""Generated weather files: their grid and chunks, the same for a seed, whole or not there."""

import shutil

import numpy as np
import pytest

from labcode.config import WeatherData
from labcode.data import generate, weather, weather_files

pytest.importorskip("xarray", reason="pip install labcode[weather]")
zarr = pytest.importorskip("zarr", reason="pip install labcode[weather]")

SMALL = {"gb": 0.002, "degrees": 4.0, "progress": False}  # 31 times of 45 x 90


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("generated") / "a.zarr"
    return path, generate.generate(path, chunks=(3, 20, 30), **SMALL)


def test_it_is_read_like_any_weather_compressed_or_not(small, tmp_path):
    path, plan = small
    assert plan.shape == (31, 45, 90)
    assert plan.num_bytes == pytest.approx(0.002e9, rel=0.02)
    group = zarr.open_group(path, mode="r")
    assert group["t2m"].chunks == (3, 20, 30)
    other = tmp_path / "a.zarr"
    generate.generate(other, compress=True, **SMALL)
    one, two = (
        weather_files.open_weather(str(where), generate.VARIABLES) for where in (path, other)
    )
    assert one.times[1] - one.times[0] == np.timedelta64(6, "h")
    np.testing.assert_array_equal(one.times, two.times)
    np.testing.assert_allclose(one.lat[[0, -1]], [88, -88])
    np.testing.assert_allclose(one.lon[[0, -1]], [2, 358])
    states = one.read(range(31))
    np.testing.assert_array_equal(states, two.read(range(31)))
    assert len(np.unique(states[:, 0, 0, 0])) == 31
    splits = weather.load(WeatherData(path=str(path), sun=True, crop=(20, 30)))
    assert splits.train[0][0].shape == (6, 20, 30)


def test_it_looks_like_the_sample_and_its_values_follow_the_seed(small, tmp_path):
    path, _ = small
    file = weather_files.open_weather(str(path), generate.VARIABLES)
    sample = weather_files.open_weather(None, generate.VARIABLES)
    ours, real = file.read(range(31)), sample.read(range(24))
    np.testing.assert_allclose(ours.mean((0, 2, 3)), real.mean((0, 2, 3)), rtol=0.05, atol=0.3)
    np.testing.assert_allclose(ours.std((0, 2, 3)), real.std((0, 2, 3)), rtol=0.1)
    other = tmp_path / "b.zarr"
    generate.generate(other, seed=1, **SMALL)
    again = weather_files.open_weather(str(other), generate.VARIABLES).read([0])
    assert not np.array_equal(again, ours[:1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"path": "a.txt"}, "does not end in .zarr"),
        ({"path": "no/a.zarr"}, "there is no folder"),
        ({"gb": 0}, "gb=0: give the size"),
        ({"gb": 0.0001}, "holds 2 times at 4 degrees, 64.8 kB each: give at least 0.00026"),
        ({"gb": float("nan")}, "gb=nan"),
        ({"degrees": 0.7}, "degrees=0.7: give a part of 180"),
        ({"chunks": (0, 5, 5)}, "give times, latitudes and longitudes"),
        ({"gb": 900_000.0}, r"needs 900 TB and the disk at .* free: give a smaller gb"),
        ({"gb": 5.0, "chunks": (50_000, 9, 9)}, "chunks of 50000 times need 3.24 GB"),
    ],
)
def test_what_cannot_be_written_is_one_line(tmp_path, change, message):
    options = SMALL | {"path": "a.zarr"} | change
    path = tmp_path / options.pop("path")
    with pytest.raises(ValueError, match=message) as caught:
        generate.generate(path, **options)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten_and_nothing_unfinished_is_left(
    small, tmp_path, monkeypatch, capsys
):
    path, _ = small
    with pytest.raises(ValueError, match="exists already"):
        generate.generate(path, **SMALL)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(zarr.Array, "__setitem__", full)
    with pytest.raises(OSError, match="No space left"):
        generate.generate(tmp_path / "b.zarr", **SMALL)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    command = [
        str(tmp_path / "c.zarr"),
        "--gb",
        "0.001",
        "--degrees",
        "4",
        "--chunks",
        "2",
        "9",
        "9",
    ]
    assert generate.main(command) == 0
    assert "15 x 45 x 90 in chunks of 2 x 9 x 9" in capsys.readouterr().out
    assert generate.main(command) == 2
    assert capsys.readouterr().err.startswith("error: ")
    shutil.rmtree(tmp_path / "c.zarr")
