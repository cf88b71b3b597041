"""Parts of a map: where they lie, what they weigh, what of a file they read."""

import numpy as np
import pytest
import torch

from labcode.config import WeatherData
from labcode.data import weather, weather_files
from labcode.models.vit import latitude_weights, loss

CROP = (30, 60)


def load(seed=0, **options):
    return weather.load(WeatherData(**options), seed)


@pytest.fixture(scope="module")
def whole():
    return load(sun=True)


def place(dataset, number):
    return dataset._draw(number)


def test_a_part_is_a_part_of_the_map_with_the_sun_and_the_weights_of_its_rows(whole):
    cropped = load(crop=CROP, sun=True).train
    assert cropped.sample_shape == CROP
    weights = latitude_weights(whole.train.lat)
    seen_edge = False
    for number in range(17):
        box, transition = place(cropped, number)
        state, target = cropped[number]
        assert state.shape == (6, *CROP)
        assert target.shape == (5, *CROP)
        columns = (box.left + torch.arange(60)) % 180
        seen_edge |= box.left > 120
        for found, map_ in zip((state, target[:4]), whole.train[transition]):
            torch.testing.assert_close(found, map_[:, box.rows][..., columns], rtol=0, atol=1e-6)
        torch.testing.assert_close(target[4], weights[box.rows, None].expand(CROP))
    assert seen_edge


def test_what_is_drawn_depends_on_seed_epoch_and_sample_alone():
    options = {"crop": CROP}
    dataset = load(**options).train
    drawn = [place(dataset, number) for number in range(17)]
    assert [place(load(**options).train, number) for number in reversed(range(17))] == drawn[::-1]
    assert len({box for box, _ in drawn}) > 10
    later = dataset.in_epoch(1)
    assert [place(later, number) for number in range(17)] != drawn
    assert [place(later.in_epoch(0), number) for number in range(17)] == drawn
    other = load(seed=1, **options).train
    assert [place(other, number) for number in range(17)] != drawn
    batch = dataset[[3, 5]]
    for one, other in zip(batch, zip(dataset[3], dataset[5])):
        assert torch.equal(one, torch.stack(other))


def test_roll_and_crop_together_read_the_turned_map():
    rolled = load(roll=True).train
    both = load(roll=True, crop=CROP).train
    assert len(both) == len(rolled) == 17 * 180
    for number in (5, 17 * 100 + 3):
        box, _ = place(both, number)
        turn = number // 17
        columns = (box.left + turn + torch.arange(60)) % 180  # of the turned map
        expected = rolled[number][0][:, box.rows][..., columns]
        torch.testing.assert_close(both[number][0], expected, rtol=0, atol=1e-6)


def test_validation_goes_through_fixed_parts_that_cover_the_map_evenly(whole):
    val = load(crop=(40, 50), sun=True).val
    assert len(val) == 5 * 2 * 3
    assert {place(val, number)[0][:2] for number in range(6)} == {
        (top, left) for top in (0, 50) for left in (0, 65, 130)
    }
    state, target = val[6]  # the first part of the second transition
    assert torch.equal(state[:4], whole.val[1][0][:4, :40, :50])
    assert torch.equal(val.in_epoch(7)[6][1], target)


def test_the_loss_of_all_parts_is_that_of_the_map(whole):
    val = load(crop=CROP).val
    state, target = val[range(9)]  # nine parts are a whole map
    found = loss(state, target)
    map_state, map_target = whole.val[[0]]
    expected = loss(map_state[:, :4], map_target, latitude_weights(whole.val.lat))
    torch.testing.assert_close(found, expected)


def test_a_part_must_fit_into_the_map_and_is_two_numbers():
    with pytest.raises(ValueError, match=r"crop=91 60 but the ERA5 sample has 90 latitudes x 1"):
        load(crop=(91, 60))
    with pytest.raises(ValueError, match="give two numbers"):
        WeatherData(crop=(5,))
    with pytest.raises(ValueError, match=r"data.crop=0: give a number above 0"):
        WeatherData(crop=(0, 5))


# ---- files that are not held in memory

T, Y, X = 8, 12, 20


def write(folder, kind, lon_step=18.0):
    xarray = pytest.importorskip("xarray", reason="pip install labcode[weather]")
    pytest.importorskip("zarr", reason="pip install labcode[weather]")
    values = np.random.default_rng(1).normal(280, 20, (T, Y, X)).astype(np.float32)
    axes = ("time", "latitude", "longitude")
    times = np.datetime64("2020-02-28", "ns") + np.arange(T) * np.timedelta64(6, "h")
    where = (times, np.linspace(75, -75, Y), np.arange(X) * lon_step)
    dataset = xarray.Dataset({"t2m": (axes, values)}, dict(zip(axes, where)))
    path = folder / f"era5.{kind}"
    if kind == "zarr":
        dataset.to_zarr(path, encoding={"t2m": {"chunks": (1, 4, 5)}}, consolidated=False)
    else:
        pytest.importorskip("h5py", reason="pip install labcode[weather]")
        encoding = {"t2m": {"chunksizes": (1, 4, 5)}}
        dataset.to_netcdf(path, engine="h5netcdf", encoding=encoding)
    return path


@pytest.mark.parametrize("kind", ["zarr", "nc"])
def test_parts_of_a_large_file_are_those_of_one_in_memory(tmp_path, monkeypatch, kind):
    path = write(tmp_path, kind)
    options = {"path": str(path), "variables": ("t2m",), "crop": (4, 7)}
    held = load(**options).train
    monkeypatch.setattr(weather_files, "IN_MEMORY_BYTES", 0)
    read = load(**options).train
    for number in range(len(held)):
        for one, other in zip(held[number], read[number]):
            assert torch.equal(one, other)
    assert any(place(held, number)[0].left > 13 for number in range(len(held)))


def test_only_the_chunks_of_a_part_are_read(tmp_path, monkeypatch):
    path = write(tmp_path, "zarr")
    monkeypatch.setattr(weather_files, "IN_MEMORY_BYTES", 0)
    options = {"path": str(path), "variables": ("t2m",), "crop": (4, 5)}
    dataset = load(**options).train
    monkeypatch.setattr(dataset, "_draw", lambda number: (weather_files.Box(4, 5, 4, 5), 2))
    before = dataset[0]
    for chunk in (path / "t2m" / "c").glob("*/*/*"):
        time, row, column = chunk.parts[-3:]
        if (row, column) != ("1", "1") or time not in ("2", "3"):
            chunk.write_bytes(b"not a chunk")
    assert torch.equal(dataset[0][0], before[0])
    monkeypatch.setattr(dataset, "_draw", lambda number: (weather_files.Box(4, 6, 4, 5), 2))
    with pytest.raises(ValueError, match="t2m cannot be read at times 2 to 3"):
        dataset[0]


def test_a_region_has_no_edge_to_cross(tmp_path):
    path = write(tmp_path, "zarr", lon_step=2.0)
    dataset = load(path=str(path), variables=("t2m",), crop=(4, 18)).train
    lefts = {place(dataset.in_epoch(epoch), 0)[0].left for epoch in range(60)}
    assert lefts == {0, 1, 2}


def test_a_missing_value_in_a_part_is_found_where_it_is(tmp_path):
    path = write(tmp_path, "zarr")
    file = weather_files.open_weather(str(path), ("t2m",))
    box = weather_files.Box(2, 18, 4, 5)
    states = file.read([0, 1], box)
    assert states.shape == (2, 1, 4, 5)
    states[1, 0, 3, 4] = np.nan
    broken = weather_files.replace(file, read=lambda numbers, box: states)
    with pytest.raises(ValueError, match=r"t2m is nan at time 2020-02-28T06.*longitude 36:"):
        weather_files._read_checked(broken, [0, 1], box)
