"""Opens gridded weather: the packed sample of the course, zarr, and HDF5 or netCDF.

All but the sample need xarray.

Shapes: T times, C variables, Y latitudes, X longitudes.
"""

import contextlib
import importlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from labcode.data import calendars
from labcode.data.paths import check_is_file, user_path
from labcode.runtime.fields import shown
from labcode.runtime.file_kinds import Kind, kind_of

Numbers: TypeAlias = Sequence[int] | np.ndarray  # of times

SAMPLE = Path(__file__).parents[1] / "assets" / "era5_2deg.npz"
# names that each axis may have in a file, in small letters or not
AXES = (
    ("time", "valid_time"),
    ("latitude", "lat"),
    ("longitude", "lon"),
)
OTHER_GRID = "another grid is brought to one by cdo remapbil,r360x180 IN OUT.nc"
# {axis: what to do with a variable that has it not}
WITHOUT = {
    "time": "rename the axis, or leave out what is the same at all times",
    "latitude": OTHER_GRID,
    "longitude": OTHER_GRID,
}
# {engine of xarray: packages that it needs}
PACKAGES = {
    "zarr": ("xarray", "zarr"),
    "h5netcdf": ("xarray", "h5netcdf", "h5py"),
    "scipy": ("xarray", "scipy"),
}
IN_EXTRA = ("xarray", "zarr", "h5netcdf", "h5py")  # of labcode[weather]
# {what a file is: which engine reads it}
ENGINES = {"zarr": "zarr", "hdf5": "h5netcdf", "netcdf3": "scipy"}
EXPECTED = "weather on a grid: give a zarr folder, or an HDF5 or netCDF file"
# {what a file is: what to do with it}
REMEDIES = {
    "netcdf5": "convert it, nccopy -k nc4 IN OUT.nc",
    "hdf4": "convert it, h4toh5 IN OUT.h5",
    "grib": "convert it, cdo -f nc4 copy IN OUT.nc",
    "gzip": "unpack it, gunzip IN.nc.gz",
    "zip": "unpack it; the Climate Data Store sends several files as one, under any name",
    "folder": "name one of its files; several are joined by cdo mergetime IN*.nc OUT.nc",
}
NUMBERS = "fiu"  # kinds of numpy's dtypes: real numbers
TIMES = "MmfiuO"  # dates and numbers; dates of other calendars are objects
# a file that unpacks to no more is read once, a larger one again for every batch
IN_MEMORY_BYTES = 2**28


class Box(NamedTuple):
    """A part of the grid; its columns go on at the first one where a row ends.

    Args:
        top: First row, a latitude.
        left: First column, a longitude.
        height: Rows.
        width: Columns, at most all.
    """

    top: int
    left: int
    height: int
    width: int

    @property
    def rows(self) -> slice:
        """Its latitudes."""
        return slice(self.top, self.top + self.height)

    def columns(self, num_columns: int) -> list[slice]:
        """Its longitudes, of so many: in one piece, or in two."""
        stop = self.left + self.width
        if stop <= num_columns:
            return [slice(self.left, stop)]
        return [slice(self.left, num_columns), slice(0, stop - num_columns)]


@dataclass(frozen=True)
class WeatherFile:
    """Fields on a grid that can be read time by time.

    Args:
        name: Name for messages.
        variables: C names.
        lat: [Y] degrees north
        lon: [X] degrees east
        times: [T], as a rule numpy datetimes.
        read: `read(numbers)` gives the states at those times, [len(numbers), C, Y, X] float32 in
            the file's units; `read(numbers, box)` only a part of the grid, for which no chunk is
            read that lies outside.
    """

    name: str
    variables: tuple[str, ...]
    lat: np.ndarray
    lon: np.ndarray
    times: np.ndarray
    read: Callable[..., np.ndarray]

    @property
    def state_bytes(self) -> int:
        """Size of the state at one time, unpacked."""
        return 4 * len(self.variables) * len(self.lat) * len(self.lon)

    @property
    def in_memory(self) -> bool:
        """Whether all states together are small enough to be read once and kept."""
        return self.state_bytes * len(self.times) <= IN_MEMORY_BYTES


def open_weather(path: str | None, variables: Sequence[str]) -> WeatherFile:
    """The user's file, or the sample where `path` is None.

    Small files are read at once, and so checked to the last value.

    Raises:
        ValueError: One line on what is wrong: a package missing, no such file, damaged, no such
            variable, not a grid, values that are no numbers or missing, times or coordinates out of
            order, twice, or no place on Earth.
    """
    if path is None:
        file = _open_sample(tuple(variables))
    else:
        file = _open_file(user_path(path, "data.path"), tuple(variables))
    for axis, values in (("time", file.times), ("latitude", file.lat), ("longitude", file.lon)):
        if not len(values):
            raise ValueError(f"{file.name} has no {axis}: that axis is empty, give another file")
    _check_times(file)
    _check_degrees(file.name, "latitude", file.lat, 90)
    _check_direction(file.name, "latitude", file.lat)
    _check_degrees(file.name, "longitude", file.lon, 360)
    _check_longitudes(file.name, file.lon)
    file = replace(file, read=partial(_read_checked, file))
    if file.in_memory:
        states = file.read(range(len(file.times)))
        file = replace(file, read=_Held(states))
    return file


class _Held:
    """States in memory.

    Sent to another process they are moved to memory that both share, once: so workers have no
    copies of their own.

    Args:
        states: [T, C, Y, X]
    """

    def __init__(self, states: np.ndarray) -> None:
        self.states = states
        self._shared: torch.Tensor | None = None

    def __call__(self, numbers: Numbers, box: Box | None = None) -> np.ndarray:
        if box is None:
            return self.states[np.asarray(numbers)]
        # the part first: it is a view, and only what is in it is copied
        pieces = []
        for columns in box.columns(self.states.shape[-1]):
            pieces.append(self.states[:, :, box.rows, columns][np.asarray(numbers)])
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=-1)

    def __getstate__(self) -> torch.Tensor:
        if self._shared is None:
            self._shared = torch.from_numpy(self.states).share_memory_()
            self.states = self._shared.numpy()
        return self._shared

    def __setstate__(self, shared: torch.Tensor) -> None:
        self._shared = shared
        self.states = shared.numpy()


def _check_times(file: WeatherFile) -> None:
    try:
        later = file.times[1:] > file.times[:-1]
    except TypeError:
        raise ValueError(
            f"{file.name}: times such as {shown(file.times[0])} cannot be put in order: "
            "write them as dates or as numbers"
        ) from None
    if not np.all(later):
        where = int(np.argmin(later))
        raise ValueError(
            f"{file.name}: time {where + 1} ({file.times[where + 1]}) is not after time {where} "
            f"({file.times[where]}): sort the file by time and drop what comes twice"
        )


def _check_degrees(name: str, axis: str, values: np.ndarray, most: float) -> None:
    """Every value of a coordinate is a number of degrees from -`most` to `most`."""
    for number, value in enumerate(values.tolist()):
        if not np.isfinite(value):
            raise ValueError(
                f"{name}: {axis} {number} is {value}, as it is where a chunk is missing: "
                "copy the file again, or write that coordinate anew"
            )
        if abs(value) > most:
            raise ValueError(
                f"{name}: {axis} {number} is {value:g}, beyond {most:g} degrees: "
                "write that coordinate in degrees"
            )


def _check_direction(name: str, axis: str, values: np.ndarray) -> None:
    """A coordinate rises everywhere or falls everywhere, and no value comes twice."""
    steps = np.sign(np.diff(values))
    if len(steps) and not (steps[0] and np.all(steps == steps[0])):
        usual = np.sign(steps.sum())
        where = int(np.argmax(steps != usual)) if usual else int(np.argmin(np.abs(steps)))
        raise ValueError(
            f"{name}: {axis} {where + 1} ({values[where + 1]:g}) after {axis} {where} "
            f"({values[where]:g}) breaks the order: "
            f"sort the file by {axis} and drop what comes twice"
        )


def _check_longitudes(name: str, lon: np.ndarray) -> None:
    """Check longitudes, which may begin anywhere on the circle: 180, ..., 359, 0, ..., 179."""
    rising = np.roll(lon, -np.argmin(lon))
    falling = np.roll(lon, -np.argmax(lon))
    if not (np.all(np.diff(rising) > 0) or np.all(np.diff(falling) < 0)):
        _check_direction(name, "longitude", lon)
    if lon.max() - lon.min() >= 360:
        raise ValueError(
            f"{name}: longitudes {lon.min():g} and {lon.max():g} are the same place or beyond it: "
            "let them go once around the Earth"
        )


def _check_variables(name: str, wanted: Sequence[str], present: Sequence[str]) -> None:
    missing = [variable for variable in wanted if variable not in present]
    if missing:
        raise ValueError(
            f"{name} has no variable {', '.join(missing)}: "
            f"there are {', '.join(sorted(present)) or 'none'}; change data.variables"
        )


def _read_checked(file: WeatherFile, numbers: Numbers, box: Box | None = None) -> np.ndarray:
    """`file.read`, where a value that is missing or infinite is an error."""
    states = file.read(numbers, box)
    bad = np.argwhere(~np.isfinite(states))
    if len(bad):
        t, c, y, x = bad[0]
        where = f"at time {file.times[numbers[t]]}, {_place(file, box, y, x)}"
        raise ValueError(
            f"{file.name}: {file.variables[c]} is {states[t, c, y, x]} {where}: "
            "fill the gaps or leave the variable out"
        )
    return states


def _place(file: WeatherFile, box: Box | None, y: int, x: int) -> str:
    """Latitude and longitude of a point of the grid, or of a part of it."""
    if box is not None:
        y = box.top + y
        x = (box.left + x) % len(file.lon)
    return f"latitude {file.lat[y]:g}, longitude {file.lon[x]:g}"


# ---- the sample


def _open_sample(variables: tuple[str, ...]) -> WeatherFile:
    """The ERA5 sample: uint16 between the least and the largest value of each variable."""
    with np.load(SAMPLE) as packed:
        present = [name for name in packed.files if packed[name].ndim == 3]
        _check_variables("the ERA5 sample", variables, present)
        fields = []
        for name in variables:
            low, high = packed[f"{name}_range"].astype(np.float64)
            field = low + packed[name] * ((high - low) / 65535)
            fields.append(field.astype(np.float32))
    states = np.stack(fields, axis=1)  # [T, C, Y, X]
    # 0, 7, 14, 21, 29, ...: whoever packed it took 24 of 168 hourly fields
    hours = np.arange(24) * 167 // 23
    return WeatherFile(
        name="the ERA5 sample",
        variables=variables,
        # each value is the mean of 2 x 2 points of the 1 degree grid
        lat=89.5 - 2.0 * np.arange(90),
        lon=0.5 + 2.0 * np.arange(180),
        times=np.datetime64("2026-03-25T00", "s") + hours.astype("timedelta64[h]"),
        read=_Held(states),
    )


# ---- zarr and HDF5


def _open_file(path: Path, variables: tuple[str, ...]) -> WeatherFile:
    """A zarr folder or an HDF5 file through xarray, which reads only the coordinates here."""
    engine = _engine(path)
    dataset = _open_dataset(path, engine)
    present = {str(name) for name, field in dataset.data_vars.items() if field.ndim >= 3}
    # of what is there with fewer axes those are named
    present |= {name for name in variables if name in dataset.data_vars}
    _check_variables(str(path), variables, sorted(present))
    fields = [_time_lat_lon(path, dataset[name]) for name in variables]
    for field in fields:
        _check_kind(f"{path}: {field.name}", field.dtype, NUMBERS)
    times, lat, lon = [_coordinate(path, dataset, names) for names in AXES]
    _check_kind(f"{path}: time", times.dtype, TIMES)
    _check_kind(f"{path}: latitude", lat.dtype, NUMBERS)
    _check_kind(f"{path}: longitude", lon.dtype, NUMBERS)
    shape = (len(times), len(lat), len(lon))
    for field in fields:
        if field.shape != shape:
            raise ValueError(
                f"{path}: {field.name} is {list(field.shape)} but time, latitude and longitude are "
                f"{list(shape)} long: every variable must be on that one grid"
            )
    if engine == "zarr":
        _check_chunks(path, variables)
    return WeatherFile(
        name=str(path),
        variables=variables,
        lat=lat.astype(np.float64),  # a copy: xarray's may be read-only, of which torch warns
        lon=lon.astype(np.float64),
        times=times,
        read=partial(_read_fields, path, fields),
    )


def _check_kind(what: str, dtype: np.dtype, kinds: str) -> None:
    if dtype.kind not in kinds:
        raise ValueError(
            f"{what} holds values of the type {dtype}, which are no numbers to learn from: "
            "convert them, or leave the variable out"
        )


def _engine(path: Path) -> str:
    """Which of xarray's engines reads a path; all packages that it needs are installed."""
    check_is_file(path, "weather file")
    try:
        exists = path.exists()
    except OSError as error:  # such as a name that is too long
        raise ValueError(f"weather file {path} cannot be read: {error.strerror}") from None
    if not exists:
        where = "give the path of a zarr folder or of an HDF5 or netCDF file"
        if ":/" in str(path):
            where = "what lies elsewhere is copied first, for example with gcloud storage or wget"
        raise ValueError(f"there is no weather file {path}: {where}")
    try:
        kind = kind_of(path)
    except OSError as error:
        raise ValueError(f"weather file {path} cannot be read: {error.strerror}") from None
    if kind.name not in ENGINES:
        raise ValueError(_refusal(path, kind))
    engine = ENGINES[kind.name]
    for package in PACKAGES[engine]:
        try:
            importlib.import_module(package)
        except ImportError as error:
            what = "labcode[weather]" if package in IN_EXTRA else package
            raise ValueError(
                f"reading {path} needs the package {package}: pip install {what}"
            ) from error
    return engine


def _refusal(path: Path, kind: Kind) -> str:
    """One line about a file that is no weather that can be read."""
    if kind.name == "unknown" and path.suffix in (".h5", ".hdf5", ".nc", ".nc4"):
        return (
            f"{path} is no HDF5 or netCDF file, whatever its name says: it is damaged, or only a "
            "part of it; copy or download it again"
        )
    return kind.is_not(path, EXPECTED, REMEDIES)


def _open_dataset(path: Path, engine: str) -> Any:
    import xarray

    options: dict[str, Any] = {"engine": engine, "chunks": None, "cache": False}
    if engine == "h5netcdf":
        options["phony_dims"] = "access"  # plain HDF5 has no names for its axes
    kind = {"zarr": "zarr", "h5netcdf": "HDF5", "scipy": "netCDF-3"}[engine]
    with warnings.catch_warnings(), _one_line(f"{path} cannot be opened as {kind}"):
        warnings.simplefilter("ignore")  # about missing consolidated metadata, which costs a moment
        dataset = xarray.open_dataset(path, decode_times=False, **options)
        name = _first_in(list(dataset.variables), AXES[0])
        if name is None:
            return dataset
        units = str(dataset[name].attrs.get("units", ""))
        calendar = str(dataset[name].attrs.get("calendar", ""))
        is_other = calendars.needs_decoding(units, calendar)
        if not is_other and not _has_no_fixed_unit(units):
            return xarray.open_dataset(path, **options)
    with _named(f"{path}: {name}"):
        times = calendars.decode(dataset[name].values, units, calendar)
    return dataset.assign_coords({name: (dataset[name].dims, times)})


def _has_no_fixed_unit(units: str) -> bool:
    """Whether times are in months or years, which differ in length, or are "day as %Y%m%d"."""
    return " as %" in units or units.strip().lower().startswith(("month", "year", "common_year"))


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
    """A ValueError with the place in front of it."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None


def _time_lat_lon(path: Path, field: Any) -> Any:
    """A variable with its axes in this order."""
    if all(str(dim).startswith("phony_dim") for dim in field.dims):
        # unnamed: taken to be in order, and compared with the lengths of the coordinates
        dims = list(field.dims)
    else:
        dims = [_first_in(field.dims, names) for names in AXES]
    axes = f"{path}: {field.name} has the axes {', '.join(map(str, field.dims))}"
    for dim, names in zip(dims, AXES):
        if dim is None:
            raise ValueError(
                f"{axes}, and none of them is called {' or '.join(names)}: a variable here is time "
                f"x latitude x longitude; {WITHOUT[names[0]]}"
            )
    others = [dim for dim in field.dims if dim not in dims]
    field = field.isel({dim: 0 for dim in others if field.sizes[dim] == 1}, drop=True)
    if len(field.dims) != len(AXES):
        raise ValueError(
            f"{axes}; a variable here is time x latitude x longitude: choose one along "
            f"{' and '.join(map(str, others))} first"
        )
    with _one_line(f"{path}: {field.name} cannot be read"):
        return field.transpose(*dims)


def _first_in(dims: Sequence[Any], names: Sequence[str]) -> str | None:
    for name in names:
        for dim in dims:
            if str(dim).lower() == name:
                return str(dim)
    return None


def _coordinate(path: Path, dataset: Any, names: Sequence[str]) -> np.ndarray:
    """The values along an axis, under any of its names."""
    rows = [name for name, values in dataset.variables.items() if values.ndim == 1]
    name = _first_in(rows, names)
    if name is not None:
        with _one_line(f"{path}: {name} cannot be read"):
            return dataset[name].values
    raise ValueError(
        f"{path} has no coordinate {' or '.join(names)}: add one, its values along that axis"
    )


def _check_chunks(path: Path, variables: Sequence[str]) -> None:
    """Count missing chunks: zarr reads one whose file is gone as the fill value, without a word."""
    import zarr

    counts = {}
    with _one_line(f"{path} cannot be opened as zarr"):
        group: Any = zarr.open_group(path, mode="r")
        for name in variables:
            total = group[name].nchunks
            counts[name] = (total - group[name].nchunks_initialized, total)
    for name, (missing, total) in counts.items():
        if missing:
            raise ValueError(
                f"{path}: {missing} of {total} chunks of {name} are missing: copy it again, or "
                "write it with write_empty_chunks=True where they are meant to be empty"
            )


def _read_fields(
    path: Path, fields: Sequence[Any], numbers: Numbers, box: Box | None = None
) -> np.ndarray:
    """All variables at some times, [len(numbers), C, Y, X]; of a part of the grid with `box`."""
    numbers = np.asarray(numbers)
    if box is None:
        return np.stack([_values(path, field, numbers) for field in fields], axis=1)
    read = []
    for field in fields:
        pieces = []
        for columns in box.columns(field.shape[-1]):
            # nothing is read here: xarray notes what is wanted
            part = field[:, box.rows, columns]
            pieces.append(_values(path, part, numbers))
        read.append(np.concatenate(pieces, axis=-1))
    return np.stack(read, axis=1)


def _values(path: Path, field: Any, numbers: np.ndarray) -> np.ndarray:
    first, last = numbers.min(), numbers.max()
    # a number too large for float32 becomes infinite, which is told as such
    with (
        _one_line(f"{path}: {field.name} cannot be read at times {first} to {last}"),
        np.errstate(over="ignore"),
    ):
        return field[numbers].values.astype(np.float32)


@contextlib.contextmanager
def _one_line(what: str) -> Iterator[None]:
    """The many kinds of error that xarray, zarr and HDF5 raise for damaged files, as one."""
    try:
        yield
    except Exception as error:
        lines = str(error).splitlines()
        reason = lines[0] if lines else ""
        raise ValueError(
            f"{what}: {type(error).__name__}: {reason}; if it is damaged, copy it again"
        ) from error
