"""Opens gridded weather: the packed sample of the course, zarr, and HDF5 or netCDF-4. Only the last two need xarray.

Shapes: T times, C variables, Y latitudes, X longitudes.
"""

import contextlib
import importlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

SAMPLE = Path(__file__).parents[1] / "assets" / "era5_2deg.npz"
AXES = (
    ("time", "valid_time"),
    ("latitude", "lat"),
    ("longitude", "lon"),
)  # names that each axis may have in a file
HDF5_SUFFIXES = (".h5", ".hdf5", ".nc", ".nc4")
IN_MEMORY_BYTES = (
    2**28
)  # a file that unpacks to no more is read once, a larger one anew for every batch


@dataclass(frozen=True)
class WeatherFile:
    """Fields on a grid that can be read time by time.

    Args:
        name: For messages.
        variables: C names.
        lat: [Y] degrees north
        lon: [X] degrees east
        times: [T], as a rule numpy datetimes.
        read: `read(numbers)` gives the states at those times, [len(numbers), C, Y, X] float32 in the file's units.
    """

    name: str
    variables: tuple[str, ...]
    lat: np.ndarray
    lon: np.ndarray
    times: np.ndarray
    read: Callable[[Sequence[int]], np.ndarray]

    @property
    def state_bytes(self) -> int:
        """Size of the state at one time, unpacked."""
        return 4 * len(self.variables) * len(self.lat) * len(self.lon)


def open_weather(path: str | None, variables: Sequence[str]) -> WeatherFile:
    """Your file, or the sample where `path` is None; small ones are read at once, and so checked to the last value.

    Raises:
        ValueError: One line on what is wrong: a package missing, no such file, damaged, no such variable, not a grid,
            times out of order, values missing.
    """
    file = (
        _open_file(Path(path).expanduser(), tuple(variables))
        if path
        else _open_sample(tuple(variables))
    )
    later = file.times[1:] > file.times[:-1]
    if not np.all(later):
        where = int(np.argmin(later))
        raise ValueError(
            f"{file.name}: time {where + 1} ({file.times[where + 1]}) is not after time {where} ({file.times[where]}): "
            "sort the file by time and drop what comes twice"
        )
    file = replace(file, read=_checked(file))
    if file.state_bytes * len(file.times) <= IN_MEMORY_BYTES:
        states = file.read(range(len(file.times)))
        file = replace(file, read=lambda numbers: states[np.asarray(numbers)])
    return file


def _open_sample(variables) -> WeatherFile:
    """The ERA5 sample: uint16 between the least and the largest value of each variable."""
    with np.load(SAMPLE) as packed:
        _check_variables(
            "the ERA5 sample", variables, [name for name in packed.files if packed[name].ndim == 3]
        )
        fields = []
        for name in variables:
            low, high = packed[f"{name}_range"].astype(np.float64)
            fields.append((low + packed[name] * ((high - low) / 65535)).astype(np.float32))
    states = np.stack(fields, axis=1)  # [T, C, Y, X]
    hours = (
        np.arange(24) * 167 // 23
    )  # 0, 7, 14, 21, 29, ...: the packer took 24 of 168 hourly fields
    return WeatherFile(
        name="the ERA5 sample",
        variables=variables,
        lat=89.5
        - 2.0 * np.arange(90),  # each value is the mean of 2 x 2 points of the 1 degree grid
        lon=0.5 + 2.0 * np.arange(180),
        times=np.datetime64("2026-03-25T00", "s") + hours.astype("timedelta64[h]"),
        read=lambda numbers: states[np.asarray(numbers)],
    )


def _open_file(path, variables) -> WeatherFile:
    """A zarr folder or an HDF5 file through xarray, which reads nothing but the coordinates here."""
    engine = _engine(path)
    dataset = _open_dataset(path, engine)
    _check_variables(
        str(path),
        variables,
        [str(name) for name, field in dataset.data_vars.items() if field.ndim >= 3],
    )
    fields = [_time_lat_lon(path, dataset[name]) for name in variables]
    times, lat, lon = (_coordinate(path, dataset, names) for names in AXES)
    for field in fields:
        if field.shape != (len(times), len(lat), len(lon)):
            raise ValueError(
                f"{path}: {field.name} is {list(field.shape)} but time, latitude and longitude are "
                f"{[len(times), len(lat), len(lon)]} long: every variable must be on that one grid"
            )
    if engine == "zarr":
        _check_chunks(path, variables)
    return WeatherFile(
        name=str(path),
        variables=variables,
        lat=lat,
        lon=lon,
        times=times,
        read=lambda numbers: np.stack(
            [_values(path, field, np.asarray(numbers)) for field in fields], axis=1
        ),
    )


def _engine(path):
    """Which of xarray's engines reads a path; all packages that it needs are there."""
    if not path.exists():
        raise ValueError(
            f"there is no weather file {path}: give the path of a zarr folder or of an HDF5 or netCDF file"
        )
    engine = "zarr" if path.is_dir() else "h5netcdf"
    if engine == "h5netcdf" and path.suffix not in HDF5_SUFFIXES:
        raise ValueError(
            f"{path} is neither a zarr folder nor a file that ends in {', '.join(HDF5_SUFFIXES)}: convert it to one"
        )
    for package in ("xarray", "zarr") if engine == "zarr" else ("xarray", "h5netcdf", "h5py"):
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise ValueError(
                f"reading {path} needs the package {package}: pip install labcode[weather]"
            ) from error
    return engine


def _open_dataset(path, engine):
    import xarray

    options = (
        {} if engine == "zarr" else {"phony_dims": "access"}
    )  # plain HDF5 has no names for its axes
    with (
        warnings.catch_warnings(),
        _one_line(f"{path} cannot be opened as {'zarr' if engine == 'zarr' else 'HDF5'}"),
    ):
        warnings.simplefilter("ignore")  # about missing consolidated metadata, which costs a moment
        return xarray.open_dataset(path, engine=engine, chunks=None, cache=False, **options)


def _check_variables(name, wanted, present):
    missing = [variable for variable in wanted if variable not in present]
    if missing:
        raise ValueError(
            f"{name} has no variable {', '.join(missing)}: there are {', '.join(sorted(present)) or 'none'}"
        )


def _time_lat_lon(path, field):
    """A variable with its axes in this order."""
    dims = [next((str(dim) for dim in field.dims if dim in names), None) for names in AXES]
    if all(str(dim).startswith("phony_dim") for dim in field.dims):
        dims = list(
            field.dims
        )  # unnamed: taken to be in order, and held against the lengths of the coordinates
    if None in dims or len(field.dims) != len(AXES):
        raise ValueError(
            f"{path}: {field.name} has the axes {', '.join(map(str, field.dims))}; a variable here is time x latitude x "
            "longitude: take one level of it first"
        )
    return field.transpose(*dims)


def _coordinate(path, dataset, names):
    """The values along an axis, under any of its names."""
    name = next(
        (name for name in names if name in dataset.variables and dataset[name].ndim == 1), None
    )
    if name is None:
        raise ValueError(
            f"{path} has no coordinate {' or '.join(names)}: add one, its values along that axis"
        )
    with _one_line(f"{path}: {name} cannot be read"):
        return dataset[name].values


def _check_chunks(path, variables):
    """A zarr chunk whose file is gone reads as the fill value, often zero, without a word: missing ones are counted."""
    import zarr

    with _one_line(f"{path} cannot be opened as zarr"):
        group = zarr.open_group(path, mode="r")
        counts = {
            name: (group[name].nchunks - group[name].nchunks_initialized, group[name].nchunks)
            for name in variables
        }
    for name, (missing, total) in counts.items():
        if missing:
            raise ValueError(
                f"{path}: {missing} of {total} chunks of {name} are missing: copy it again, or write it with "
                "write_empty_chunks=True where they are meant to be empty"
            )


def _values(path, field, numbers):
    with _one_line(
        f"{path}: {field.name} cannot be read at times {numbers.min()} to {numbers.max()}"
    ):
        return field[numbers].values.astype(np.float32)


def _checked(file):
    """`file.read`, where a value that is missing or infinite is an error."""

    def read(numbers):
        states = file.read(numbers)
        if not np.isfinite(states).all():
            t, c, y, x = np.argwhere(~np.isfinite(states))[0]
            raise ValueError(
                f"{file.name}: {file.variables[c]} is {states[t, c, y, x]} at time {file.times[numbers[t]]}, latitude "
                f"{file.lat[y]:g}, longitude {file.lon[x]:g}: fill the gaps or leave the variable out"
            )
        return states

    return read


@contextlib.contextmanager
def _one_line(what):
    """The many kinds of error that xarray, zarr and HDF5 raise for damaged files, as one."""
    try:
        yield
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        raise ValueError(
            f"{what}: {type(error).__name__}: {reason}; if it is damaged, copy it again"
        ) from error
