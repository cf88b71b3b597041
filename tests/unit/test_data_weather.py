"""Weather: the sample, files in zarr and HDF5, the split in time, normalisation.

Also turned maps, the sun and damaged files.
"""

import os
import shutil
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labcode.config import WeatherData
from labcode.data import weather, weather_files

xarray = pytest.importorskip("xarray", reason="pip install labcode[weather]")
pytest.importorskip("zarr", reason="pip install labcode[weather]")

NAMES = ("t2m", "u10")
T, Y, X = 12, 6, 10


def denormalised(stats, states):
    """Back to K, m/s and Pa."""
    return states * stats.std.to(states) + stats.mean.to(states)


def fields(num_times=T):
    return (
        np.random.default_rng(7)
        .normal(280.0, 20.0, (len(NAMES), num_times, Y, X))
        .astype(np.float32)
    )


def dataset(values=None, axes=("time", "latitude", "longitude")):
    """Two variables on a small grid, every six hours."""
    values = fields() if values is None else values
    times = np.datetime64("2020-02-28", "ns") + np.arange(values.shape[1]) * np.timedelta64(6, "h")
    coordinates = dict(zip(axes, (times, np.linspace(75.0, -75.0, Y), np.arange(X) * 36.0)))
    return xarray.Dataset({name: (axes, value) for name, value in zip(NAMES, values)}, coordinates)


def write_zarr(folder, source=None, time_chunk=1):
    source = dataset() if source is None else source
    chunks = {
        name: {"chunks": (time_chunk, Y, X)} for name in source.data_vars if source[name].ndim == 3
    }
    source.to_zarr(folder / "era5.zarr", encoding=chunks, consolidated=False)
    return folder / "era5.zarr"


def write_netcdf(folder, source=None):
    pytest.importorskip("h5py", reason="pip install labcode[weather]")
    (dataset() if source is None else source).to_netcdf(folder / "era5.nc", engine="h5netcdf")
    return folder / "era5.nc"


def write_plain_hdf5(folder):
    h5py = pytest.importorskip("h5py", reason="pip install labcode[weather]")
    with h5py.File(folder / "era5.h5", "w") as file:
        for name, values in zip(NAMES, fields()):
            file[name] = values
        file["time"], file["lat"], file["lon"] = (
            np.arange(T) * 6,
            np.linspace(75.0, -75.0, Y),
            np.arange(X) * 36.0,
        )
    return folder / "era5.h5"


def load(path, **options):
    return weather.load(WeatherData(path=str(path), **{"variables": NAMES} | options))


def complaint(path, **options):
    """The one line about a file that cannot be used."""
    with pytest.raises(ValueError) as caught:
        load(path, **options)
    message = str(caught.value)
    assert "\n" not in message and str(path) in message
    return message


# ---- the sample that ships


@pytest.fixture(scope="module")
def sample():
    return weather.load(WeatherData())


def test_the_sample_is_a_week_of_the_whole_globe(sample):
    train, val = sample.train, sample.val
    assert train.variables == ("t2m", "u10", "v10", "msl") and train.forcings == ()
    np.testing.assert_array_equal(train.lat, np.arange(89.5, -89, -2))
    np.testing.assert_array_equal(train.lon, np.arange(0.5, 360, 2))
    assert train.times[0] == np.datetime64("2026-03-25T00") and val.times[-1] == np.datetime64(
        "2026-03-31T23"
    )
    hours = np.diff(np.concatenate([train.times, val.times])) / np.timedelta64(1, "h")
    assert len(hours) == 23 and set(hours) == {7, 8}
    assert (len(train), len(val)) == (17, 5)
    states = denormalised(sample.stats, val[list(range(5))][0])
    assert states.shape == (5, 4, 90, 180) and states.dtype == torch.float32
    temperature = states[:, 0].mean((0, 2))  # along each latitude
    pressure = states[:, 3].mean((0, 2))
    assert 295 < temperature[45] < 305 and temperature[0] < 265 and temperature[-1] < 245
    assert pressure.min() > 98_000 and pressure.max() < 103_500


def test_persistence_on_the_held_out_times_of_the_sample(sample):
    """The numbers that a model has to beat, as the course states them."""
    state, target = sample.val[list(range(5))]
    rmse = (state - target).square().mean((0, 2, 3)).sqrt()
    torch.testing.assert_close(rmse, torch.tensor([0.131, 0.438, 0.573, 0.233]), atol=6e-4, rtol=0)


def test_the_sample_in_another_order_and_number_of_variables(sample):
    turned = weather.load(WeatherData(variables=("msl", "t2m")))
    assert torch.equal(turned.train[0][0], sample.train[0][0][[3, 0]])
    with pytest.raises(
        ValueError, match="the ERA5 sample has no variable z500: there are msl, t2m, u10, v10"
    ):
        weather.load(WeatherData(variables=("t2m", "z500")))


# ---- files


@pytest.mark.parametrize("write", [write_zarr, write_netcdf, write_plain_hdf5])
@pytest.mark.parametrize("in_memory", [True, False])
def test_every_kind_of_file_gives_the_same_states(tmp_path, monkeypatch, write, in_memory):
    if not in_memory:
        monkeypatch.setattr(weather_files, "IN_MEMORY_BYTES", 0)
    splits = load(write(tmp_path))
    np.testing.assert_allclose(splits.train.lat, np.linspace(75.0, -75.0, Y))
    np.testing.assert_allclose(splits.train.lon, np.arange(X) * 36.0)
    values = torch.from_numpy(fields()).transpose(0, 1)  # [T, C, Y, X]
    state, target = splits.train[[4, 0, 4]]
    torch.testing.assert_close(denormalised(splits.stats, state), values[[4, 0, 4]])
    torch.testing.assert_close(denormalised(splits.stats, target), values[[5, 1, 5]])


@pytest.mark.parametrize("axes", [("time", "lat", "lon"), ("valid_time", "latitude", "longitude")])
def test_other_names_and_orders_of_the_axes(tmp_path, axes):
    path = tmp_path / "turned.zarr"
    dataset(axes=axes).transpose(axes[2], axes[0], axes[1]).to_zarr(path, consolidated=False)
    for one, other in zip(load(path).train[[0, 3]], load(write_zarr(tmp_path)).train[[0, 3]]):
        assert torch.equal(one, other)


def test_a_large_file_is_read_batch_by_batch_and_each_time_once(tmp_path, monkeypatch):
    monkeypatch.setattr(weather_files, "IN_MEMORY_BYTES", 0)
    splits, read, values_at = load(write_zarr(tmp_path)), [], weather_files._values
    monkeypatch.setattr(
        weather_files,
        "_values",
        lambda path, field, at: read.append(list(at)) or values_at(path, field, at),
    )
    splits.train[[2, 0, 3]]
    assert read == [[0, 1, 2, 3, 4]] * len(NAMES)


@pytest.mark.parametrize("in_memory", [True, False])
def test_the_fingerprint_is_that_of_the_weather_and_not_of_its_packing(
    tmp_path, monkeypatch, in_memory
):
    if not in_memory:
        monkeypatch.setattr(weather_files, "IN_MEMORY_BYTES", 0)
    path = write_zarr(tmp_path)
    first = load(path).sha256
    assert len(first) == 64 and load(path).sha256 == first
    (tmp_path / "chunked").mkdir()
    assert load(write_zarr(tmp_path / "chunked", time_chunk=5)).sha256 == first
    assert load(path, variables=NAMES[:1]).sha256 != first
    later = dataset().assign_coords(time=dataset().time + np.timedelta64(1, "h"))
    changed = dataset()
    changed["u10"][-1, 2, 3] += 1
    turned = dataset().isel(latitude=slice(None, None, -1))
    for number, other in enumerate((later, changed, turned)):
        (tmp_path / str(number)).mkdir()
        assert load(write_zarr(tmp_path / str(number), other)).sha256 != first


# ---- split and normalisation


@given(st.integers(4, 60), st.floats(0.001, 0.999))
def test_no_time_of_validation_is_seen_in_training(num_times, val_fraction):
    values = np.zeros((1, num_times, 1, 1), np.float32)
    values[0, :, 0, 0] = np.arange(num_times)  # the field is its time
    file = weather_files.WeatherFile(
        "x", ("t",), np.zeros(1), np.zeros(1), np.arange(num_times), lambda n: values[0, n][:, None]
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weather, "open_weather", lambda *_: file)
        splits = weather.load(WeatherData(val_fraction=val_fraction))
    train, val = (
        {
            round(x.item())
            for pair in part[range(len(part))]
            for x in denormalised(splits.stats, pair).flatten()
        }
        for part in (splits.train, splits.val)
    )
    assert sorted(train | val) == list(range(num_times)) and max(train) < min(val)
    assert len(train) >= 2 and len(splits.val) == len(val) - 1
    assert len(splits.val) == max(1, min(round(val_fraction * (num_times - 1)), num_times - 3))


def test_mean_and_deviation_come_from_training_times_alone(tmp_path):
    changed = fields()
    splits = load(write_zarr(tmp_path))
    first_val = T - 1 - len(splits.val)
    changed[:, first_val:] *= 3
    (tmp_path / "changed").mkdir()
    other = load(write_zarr(tmp_path / "changed", dataset(changed)))
    assert torch.equal(splits.stats.mean, other.stats.mean) and torch.equal(
        splits.stats.std, other.stats.std
    )
    kept = fields()[:, :first_val].astype(np.float64)
    np.testing.assert_allclose(splits.stats.mean.flatten(), kept.mean((1, 2, 3)), rtol=1e-6)
    np.testing.assert_allclose(splits.stats.std.flatten(), kept.std((1, 2, 3)), rtol=1e-6)


def test_statistics_in_small_portions_are_the_same(monkeypatch):
    whole = weather.load(WeatherData()).stats
    monkeypatch.setattr(weather, "STATISTICS_BYTES", 1)
    portions = weather.load(WeatherData()).stats
    torch.testing.assert_close(portions.mean, whole.mean)
    torch.testing.assert_close(portions.std, whole.std)


def test_normalising_and_back(sample):
    states = torch.randn(3, 4, 90, 180, dtype=torch.float64)
    torch.testing.assert_close(sample.stats.normalise(denormalised(sample.stats, states)), states)


def test_a_target_is_the_next_state_and_a_number_alone_gives_one_pair(sample):
    state, target = sample.train[range(17)]
    assert torch.equal(target[:-1], state[1:])
    for one, many in zip(sample.train[3], (state, target)):
        assert torch.equal(one, many[3])
    with pytest.raises(IndexError, match="there is no sample 17: they count from 0 to 16"):
        sample.train[[0, 17]]


# ---- turned maps and the sun


def test_rolling_gives_each_transition_once_for_each_longitude(sample):
    rolled = weather.load(WeatherData(roll=True))
    assert len(rolled.train) == 17 * 180 and len(rolled.val) == 5
    plain, numbers = sample.train[[2, 16, 2]], [2, 17 * 3 + 16, 17 * 179 + 2]
    for turned, straight in zip(rolled.train[numbers], plain):
        for one, whole, turn in zip(turned, straight, (0, 3, 179)):
            assert torch.equal(one, whole.roll(turn, -1))


def test_the_sun_is_overhead_at_noon_on_the_equator_and_gone_at_midnight():
    lat, lon = np.array([90.0, 0.0, -90.0]), np.array([0.0, 90.0, 180.0])
    height = weather.sun_height(
        np.array(["2026-03-20T12", "2026-03-20T06", "2026-06-21T12"], "datetime64[s]"), lat, lon
    )
    assert height.shape == (3, 3, 3) and height.dtype == np.float32
    # the equinox
    np.testing.assert_allclose(height[0], [[0, 0, 0], [1, 0, -1], [0, 0, 0]], atol=0.02)
    # noon is six hours earlier 90 degrees further east
    np.testing.assert_allclose(height[1, 1], [0, 1, 0], atol=0.02)
    # the solstice
    np.testing.assert_allclose(
        height[2, :, 0], np.sin(np.deg2rad([23.44, 66.56, -23.44])), atol=0.01
    )


def test_the_sun_is_two_more_inputs_that_turn_with_the_map(sample):
    sunny = weather.load(WeatherData(sun=True, roll=True))
    assert sunny.train.forcings == sunny.val.forcings == ("sun_now", "sun_next")
    (state, target), (plain, plain_target) = sunny.train[[1, 2]], sample.train[[1, 2]]
    assert (
        state.shape == (2, 6, 90, 180)
        and torch.equal(state[:, :4], plain)
        and torch.equal(target, plain_target)
    )
    assert torch.equal(state[0, 5], state[1, 4])  # the next sun of one is the sun of the next
    assert torch.equal(sunny.train[1 + 17 * 40][0], state[0].roll(40, -1))
    assert sunny.val[0][0].shape == (6, 90, 180)


def test_no_sun_without_dates(tmp_path):
    assert "times such as 0 are no dates" in complaint(write_plain_hdf5(tmp_path), sun=True)


# ---- bad input


def _no_metadata(path):
    (path / "zarr.json").unlink()


def _half_the_metadata(path):
    file = path / "t2m" / "zarr.json"
    file.write_text(file.read_text()[:100])


def _half_a_chunk(path):
    chunk = path / "t2m" / "c" / "3" / "0" / "0"
    chunk.write_bytes(chunk.read_bytes()[:20])


def _a_chunk_gone(path):
    (path / "u10" / "c" / "11" / "0" / "0").unlink()


def _times_gone(path):
    shutil.rmtree(path / "time" / "c")


def _all_gone(path):
    shutil.rmtree(path)


@pytest.mark.parametrize(
    "damage, reason",
    [
        (_no_metadata, "cannot be opened as zarr"),
        (_half_the_metadata, "cannot be opened as zarr"),
        (_half_a_chunk, "t2m cannot be read at times 0 to 11"),
        (_a_chunk_gone, "1 of 12 chunks of u10 are missing"),
        (_times_gone, "time 1 (2020-02-28"),
        (_all_gone, "there is no weather file"),
    ],
)
def test_a_damaged_zarr_is_one_clear_line(tmp_path, damage, reason):
    path = write_zarr(tmp_path)
    damage(path)
    assert reason in complaint(path)


def test_a_damaged_hdf5_file_is_one_clear_line(tmp_path):
    path = write_netcdf(tmp_path)
    path.write_bytes(path.read_bytes()[:2000])
    assert "cannot be opened as HDF5" in complaint(path)
    path.write_text("not HDF5 at all")
    assert "is a text, not weather on a grid: give a zarr folder" in complaint(path)


def test_a_chunk_that_breaks_during_training_is_one_clear_line(tmp_path, monkeypatch):
    monkeypatch.setattr(weather_files, "IN_MEMORY_BYTES", 0)
    path = write_zarr(tmp_path)
    splits = load(path)
    _half_a_chunk(path)
    with pytest.raises(ValueError, match="t2m cannot be read at times 2 to 3") as error:
        splits.train[[2]]
    assert "\n" not in str(error.value)


def test_a_missing_variable_is_named_and_those_that_exist_are_listed(tmp_path):
    path = write_zarr(tmp_path)
    assert "has no variable z, q: there are t2m, u10" in complaint(
        path, variables=("z", "t2m", "q")
    )


def test_a_missing_value_is_found_where_it_is(tmp_path):
    values = fields()
    values[1, 5, 2, 3] = np.nan
    message = complaint(write_zarr(tmp_path, dataset(values)))
    assert "u10 is nan at time 2020-02-29T06" in message and "latitude 15, longitude 108" in message


@pytest.mark.parametrize(
    "change, reason",
    [
        (
            lambda d: d.isel(time=slice(3)),
            "has 3 times: training and validation each need a state and the next one",
        ),
        (
            lambda d: d.isel(time=[0, 2, 1, 3, 4]),
            "time 2 (2020-02-28T06:00:00.000000000) is not after time 1",
        ),
        (lambda d: d.isel(time=[0, 1, 1, 2, 3]), "is not after time 1"),
        (lambda d: d.assign(u10=d.u10 * 0 + 5), "u10 is 5 everywhere in the training times"),
        (
            lambda d: d.assign(u10=d.u10.expand_dims(level=2, axis=1)),
            "u10 has the axes time, level, latitude, longitude",
        ),
        (
            lambda d: d.assign(u10=d.u10.isel(time=0, drop=True)),
            "none of them is called time or valid_time: a variable here is time x latitude x long",
        ),
        (lambda d: d.drop_vars("latitude"), "has no coordinate latitude or lat"),
        (lambda d: d.rename(time="when"), "t2m has the axes when, latitude, longitude"),
    ],
)
def test_a_file_of_another_form_is_one_clear_line(tmp_path, change, reason):
    assert reason in complaint(write_zarr(tmp_path, change(dataset())))


def _coordinates(**values):
    """Another latitude or longitude, of as many points."""
    return lambda d: d.assign_coords({name: list(v) for name, v in values.items()})


def _times(values):
    return lambda d: d.assign_coords(time=values)


def _u10(dtype):
    return lambda d: d.assign(u10=d.u10.astype(dtype))


@pytest.mark.parametrize(
    "change, reason",
    [
        (
            _coordinates(latitude=[75, 45, np.nan, -15, -45, -75]),
            "latitude 2 is nan, as it is where a chunk is missing",
        ),
        (
            _coordinates(latitude=[75, 45, 45, -15, -45, -75]),
            "latitude 2 (45) after latitude 1 (45) breaks the order: sort the file by latitude",
        ),
        (
            _coordinates(latitude=[75, 15, 45, -15, -45, -75]),
            "latitude 2 (45) after latitude 1 (15)",
        ),
        (_coordinates(latitude=[90] * Y), "latitude 1 (90) after latitude 0 (90) breaks the order"),
        (_coordinates(latitude=[95, 45, 15, -15, -45, -75]), "latitude 0 is 95, beyond 90 degrees"),
        (_coordinates(latitude="abcdef"), "latitude holds values of the type"),
        (_coordinates(latitude=np.arange(Y) + 1j), "latitude holds values of the type complex128"),
        (_coordinates(longitude=[np.inf, *range(1, X)]), "longitude 0 is inf"),
        (_coordinates(longitude=[7] * X), "longitude 1 (7) after longitude 0 (7) breaks the order"),
        (
            _coordinates(longitude=[0, 2, 1, *range(3, X)]),
            "longitude 2 (1) after longitude 1 (2) breaks the order: sort the file by longitude",
        ),
        (_coordinates(longitude=np.arange(X) * 1e5), "longitude 1 is 100000, beyond 360 degrees"),
        (
            _coordinates(longitude=np.linspace(0, 360, X)),
            "longitudes 0 and 360 are the same place or beyond it",
        ),
        (_times([f"day {n:02}" for n in range(T)]), "time holds values of the type"),
        (_times(np.array([np.nan, *range(1, T)])), "time 1 (1.0) is not after time 0 (nan)"),
        (lambda d: d.isel(time=slice(0)), "has no time: that axis is empty"),
        (lambda d: d.isel(latitude=slice(0)), "has no latitude: that axis is empty"),
        (_u10(np.complex64), "u10 holds values of the type complex64, which are no numbers"),
        (_u10(str), "u10 holds values of the type"),
        (_u10(bool), "u10 holds values of the type bool"),
        (lambda d: d.assign(u10=d.u10.astype(float) * 1e300), "u10 is inf at time 2020-02-28"),
        (lambda d: d.assign(u10=d.u10.astype(float) * 1e25), "float32 cannot compute with"),
        (lambda d: d.assign(u10=d.u10.astype(float) * 1e-25), "float32 cannot compute with"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # xarray's, about types that zarr version 3 does not list
def test_coordinates_and_values_that_are_none_are_one_clear_line(tmp_path, change, reason):
    assert reason in complaint(write_zarr(tmp_path, change(dataset())))


def test_objects_are_one_clear_line(tmp_path, monkeypatch):
    file = weather_files.WeatherFile(
        str(tmp_path), ("t",), np.zeros(1), np.zeros(1), np.array([object(), "x"]), None
    )
    monkeypatch.setattr(weather_files, "_open_file", lambda *_: file)
    assert "cannot be put in order: write them as dates or as numbers" in complaint(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.isel(latitude=slice(None, None, -1)),
        lambda d: d.isel(longitude=slice(None, None, -1)),
        lambda d: d.roll(longitude=4, roll_coords=True),  # 216, ..., 324, 0, ..., 180
        lambda d: d.isel(longitude=slice(None, None, -1)).roll(longitude=4, roll_coords=True),
        lambda d: d.assign_coords(longitude=d.longitude - 180),
        lambda d: d.assign_coords(longitude=d.longitude / 40 + 5),  # a region
        lambda d: d.isel(latitude=slice(1), longitude=slice(1)),
        lambda d: d.isel(longitude=[0, 3, 9]),
    ],
)
def test_latitudes_and_longitudes_may_fall_and_begin_anywhere(tmp_path, change):
    changed = change(dataset())
    train = load(write_zarr(tmp_path, changed)).train
    assert train.lat.tolist() == changed.latitude.values.tolist()
    assert train.lat.flags.writeable and train.lon.flags.writeable  # torch warns of others
    assert train.lon.tolist() == changed.longitude.values.tolist()


def test_a_latitude_whose_chunk_is_missing_is_told(tmp_path):
    path = write_zarr(tmp_path)
    shutil.rmtree(path / "latitude" / "c")
    message = complaint(path)
    assert "latitude 0 is nan, as it is where a chunk is missing" in message


def test_a_missing_value_of_a_large_file_is_found_when_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(weather_files, "IN_MEMORY_BYTES", 0)
    values = fields()
    values[1, -1, 2, 3] = np.nan  # the last time: no statistics, only a validation target
    monkeypatch.setattr(weather, "fingerprint", lambda file: "")
    val = load(write_zarr(tmp_path, dataset(values))).val
    val[[0]]
    with pytest.raises(ValueError) as caught:
        val[[len(val) - 1]]
    message = str(caught.value)
    assert str(tmp_path / "era5.zarr") in message and "\n" not in message
    assert "u10 is nan at time 2020-03-01T18" in message


def test_what_is_no_file_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "era5.nc"
    os.mkfifo(path)
    assert f"weather file {path} is a named pipe" in complaint(path)


def test_a_name_that_no_disk_takes_is_one_clear_line(tmp_path):
    path = tmp_path / ("x" * 300 + ".nc")
    assert "cannot be read: File name too long" in complaint(path)


def test_the_home_folder_of_nobody_is_one_clear_line():
    with pytest.raises(ValueError, match=r"^data.path=~nobody_here/x.nc: there is no home folder"):
        load("~nobody_here/x.nc")


def test_a_file_of_an_unknown_kind_is_one_clear_line(tmp_path):
    path = tmp_path / "era5.grib"
    path.write_text("GRIB")
    assert "is a GRIB file, not weather on a grid" in complaint(path)


@pytest.mark.parametrize("package", ["xarray", "zarr"])
def test_a_missing_package_is_named_with_the_way_to_get_it(tmp_path, monkeypatch, package):
    path = write_zarr(tmp_path)
    # how Python marks a module that cannot be imported
    monkeypatch.setitem(sys.modules, package, None)
    assert f"needs the package {package}: pip install labcode[weather]" in complaint(path)
