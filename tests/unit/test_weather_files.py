"""Weather of each provider and each calendar: read, or named for what it is."""

import gzip
import re
import sys
import zipfile

import numpy as np
import pytest

from labcode.config import WeatherData
from labcode.data import weather, weather_files

xarray = pytest.importorskip("xarray", reason="pip install labcode[weather]")
pytest.importorskip("h5netcdf", reason="pip install labcode[weather]")

T, Y, X = 24, 6, 12


def dataset(units="days since 1850-01-01", calendar="noleap", values=None, names=("lat", "lon")):
    """Months of a climate model, times as numbers with their attributes."""
    values = 15.0 + 30.4 * np.arange(T) if values is None else values
    field = 280 + np.random.default_rng(0).standard_normal((T, Y, X)).astype("f4")
    attributes = {"units": units, "calendar": calendar, "bounds": "time_bnds"}
    bounds = np.stack([values, values + 1], axis=1)
    lat, lon = names
    return xarray.Dataset(
        {
            "tas": (("time", lat, lon), field),
            "time_bnds": (("time", "bnds"), bounds, {"units": units, "calendar": calendar}),
        },
        coords={
            "time": ("time", values, attributes),
            lat: np.linspace(-75, 75, Y),
            lon: np.arange(X) * 30.0,
        },
    )


def load(path, **options):
    return weather.load(WeatherData(path=str(path), variables=("tas",), **options))


def complaint(path, **options):
    with pytest.raises(ValueError) as caught:
        load(path, **options)
    line = str(caught.value)
    assert "\n" not in line and str(path) in line
    return line


def netcdf(folder, name="tas.nc", **options):
    dataset(**options).to_netcdf(folder / name, engine="h5netcdf")
    return folder / name


@pytest.mark.parametrize(
    ("units", "calendar", "first"),
    [
        ("days since 1850-01-01", "noleap", "1850-01-16"),
        ("days since 1850-01-01 00:00:00", "365_day", "1850-01-16"),
        ("days since 1850-01-01", "360_day", "1850-01-16"),
        ("days since 1850-01-01", "julian", "1850-01-28"),
        ("hours since 1-1-1 00:00:0.0", "standard", "0000-12-30"),
        ("days since 1850-01-01", "proleptic_gregorian", "1850-01-16"),
        ("days since 1900-01-01", "gregorian", "1900-01-16"),
        ("days since 0000-01-01", "proleptic_gregorian", "0000-01-16"),
        ("months since 1850-01-01", "360_day", "1851-04-02"),
    ],
)
@pytest.mark.parametrize("kind", ["netcdf", "zarr"])
def test_each_calendar_trains_with_and_without_the_sun(tmp_path, units, calendar, first, kind):
    if kind == "netcdf":
        path = netcdf(tmp_path, units=units, calendar=calendar)
    else:
        pytest.importorskip("zarr", reason="pip install labcode[weather]")
        path = tmp_path / "tas.zarr"
        dataset(units, calendar).to_zarr(path, consolidated=False)
    splits = load(path, sun=True)
    assert splits.train.times[0].astype("datetime64[D]") == np.datetime64(first)
    state, _ = splits.train[0]
    assert state.shape == (3, Y, X)
    # a run that resumes finds the same data
    assert load(path).sha256 == load(path).sha256


def test_the_sun_stands_high_in_summer_in_every_calendar(tmp_path):
    for calendar in ("noleap", "360_day", "julian", "standard"):
        year = {"noleap": 365, "360_day": 360}.get(calendar, 365.25)
        days = year * (150 + np.arange(T) / 12)
        path = netcdf(tmp_path, f"{calendar}.nc", calendar=calendar, values=days)
        file = load(path, sun=True).train
        heights = weather.sun_height(file.times, file.lat, file.lon)
        north = heights[:, -1].max(axis=1)  # of a month, at 75 degrees north
        assert 4 <= int(np.argmax(north[:12])) <= 7, calendar


def test_a_file_is_read_by_any_name(tmp_path):
    expected = dataset().tas.values
    for name in ("tas", "tas.nc4", "tas.he5", "tas.netcdf", "tas.cdf"):
        file = weather_files.open_weather(str(netcdf(tmp_path, name)), ("tas",))
        assert np.array_equal(file.read(range(T))[:, 0], expected), name


def test_axes_are_known_by_their_names_in_any_order(tmp_path):
    """Axes as in ERA5 (from the pole, levels and members of one), WeatherBench 2, and others."""
    plain = dataset("hours since 1900-01-01", "gregorian").drop_vars("time_bnds")
    field = plain.tas.values
    forms = {
        "from the north": plain.isel(lat=slice(None, None, -1)),
        "longitude before latitude": plain.transpose("time", "lon", "lat"),
        "one level": plain.expand_dims({"pressure_level": [500]}, axis=1),
        "one member": plain.expand_dims({"number": [0]}),
        "valid_time": plain.rename(time="valid_time"),
        "capitals": plain.rename(time="Time", lat="Latitude", lon="Longitude"),
    }
    for name, form in forms.items():
        path = tmp_path / f"{name}.nc"
        form.to_netcdf(path, engine="h5netcdf")
        file = weather_files.open_weather(str(path), ("tas",))
        found = file.read(range(T))[:, 0]
        assert np.array_equal(found[:, ::-1] if name == "from the north" else found, field), name
        assert file.times[0].astype("datetime64[h]") == np.datetime64("1900-01-01T15"), name


def test_axes_that_are_none_of_a_grid_are_named(tmp_path):
    plain = dataset().drop_vars("time_bnds")
    levels = xarray.concat([plain, plain], "level").transpose("time", "level", "lat", "lon")
    cells = plain.stack(cell=("lat", "lon")).reset_index("cell", drop=True)
    forms = [
        (levels, "has the axes time, level, lat, lon; .* choose one along level first"),
        (plain.rename(lat="y", lon="x"), "time, y, x, and none of them is called latitude or lat"),
        (cells, "has the axes time, cell, and none of them is called latitude or lat"),
    ]
    for number, (form, words) in enumerate(forms):
        path = tmp_path / f"{number}.nc"
        form.to_netcdf(path, engine="h5netcdf")
        assert re.search(words, complaint(path))


def as_zip(folder):
    inner = netcdf(folder, "data_stream-moda.nc")
    with zipfile.ZipFile(folder / "era5.nc", "w") as file:
        file.write(inner, inner.name)
    return folder / "era5.nc"


def as_grib(folder):
    (folder / "era5.nc").write_bytes(b"GRIB\x00\x02\x9c\x01" + bytes(100))
    return folder / "era5.nc"


def as_page(folder):
    (folder / "era5.nc").write_text("<!DOCTYPE html><html><head><title>Login</title></head>")
    return folder / "era5.nc"


def as_pointer(folder):
    (folder / "era5.nc").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\n")
    return folder / "era5.nc"


def as_folder(folder):
    (folder / "months").mkdir()
    netcdf(folder / "months", "2020-01.nc")
    return folder / "months"


def as_cdf5(folder):
    (folder / "a.nc").write_bytes(b"CDF\x05" + bytes(100))
    return folder / "a.nc"


def as_hdf4(folder):
    (folder / "a.hdf").write_bytes(b"\x0e\x03\x13\x01" + bytes(100))
    return folder / "a.hdf"


def as_table(folder):
    (folder / "a.csv").write_text("time,lat,lon,t2m\n2020-01-01,0,0,280\n")
    return folder / "a.csv"


def as_array(folder):
    np.save(folder / "a.npy", np.ones((4, 5, 6)))
    return folder / "a.npy"


def as_packed(folder):
    (folder / "a.nc.gz").write_bytes(gzip.compress(b"CDF\x01" + bytes(100)))
    return folder / "a.nc.gz"


def as_empty(folder):
    (folder / "a.nc").write_bytes(b"")
    return folder / "a.nc"


def as_image(folder):
    (folder / "a.tif").write_bytes(b"II*\x00\x08\x00\x00\x00")
    return folder / "a.tif"


def as_damaged(folder):
    (folder / "a.nc").write_bytes(np.random.default_rng(0).bytes(3000))
    return folder / "a.nc"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (as_zip, "is a zip archive, not weather on a grid"),
        (as_grib, "is a GRIB file, not weather"),
        (as_page, "is a page of HTML, not weather"),
        (as_pointer, "run `git lfs pull`"),
        (as_folder, "is a folder, not weather"),
        (as_cdf5, "nccopy -k nc4"),
        (as_hdf4, "h4toh5"),
        (as_table, "is a text, not weather"),
        (as_array, "is a numpy array (.npy), not weather"),
        (as_packed, "is a gzip file, not weather on a grid: give a zarr folder, or an HDF5"),
        (as_empty, "is an empty file, not weather"),
        (as_image, "is a TIFF image, not weather"),
        (as_damaged, "is no HDF5 or netCDF file, whatever its name says: it is damaged"),
    ],
)
def test_what_is_no_weather_is_named(tmp_path, make, words):
    assert words in complaint(make(tmp_path))


@pytest.mark.parametrize(
    ("units", "calendar", "words"),
    [
        ("months since 1955-01-01", "standard", "time: times in months, which are not all of one"),
        ("day as %Y%m%d.%f", "standard", "time: times in 'day as %Y%m%d.%f' have no beginning"),
        ("days since 1850-01-01", "all_leap", "time: the calendar all_leap of its times is none"),
    ],
)
def test_times_that_cannot_be_read_are_named(tmp_path, units, calendar, words):
    line = complaint(netcdf(tmp_path, units=units, calendar=calendar))
    assert words in line
    assert "damaged" not in line


def test_a_package_that_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    (tmp_path / "classic.nc").write_bytes(b"CDF\x01" + bytes(100))
    assert "needs the package scipy: pip install scipy" in complaint(tmp_path / "classic.nc")
    monkeypatch.setitem(sys.modules, "h5netcdf", None)
    path = tmp_path / "a.nc"
    path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))
    assert "needs the package h5netcdf: pip install labcode[weather]" in complaint(path)


def test_an_address_is_no_file():
    with pytest.raises(ValueError, match="what lies elsewhere is copied first"):
        load("gs://weatherbench2/datasets/era5/1959.zarr")
