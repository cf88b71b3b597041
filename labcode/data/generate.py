"""A weather file of any size, made of the sample that ships: something to read, not to learn from.

    python -m labcode.data.generate OUT.zarr --gb 2
    python -m labcode.data.generate OUT.zarr --gb 0.5 --degrees 1 --chunks 24 180 360

The maps of the sample are interpolated in space, to a finer grid, and in time, to and fro; to each
a smooth random field is added, a function of seed and time, so that no two are equal. How the file
is cut into chunks decides how fast it is read: a chunk is read whole, and from the disk, whatever
part of it is wanted. A batch takes two times in a row, and with `data.crop` a part of the map. So
a chunk of one time and a part of the map is right, one of many times is wrong; with `--chunks 24
...` a sample reads 12 to 24 times what it needs.
"""

import math
import shutil
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from labcode.runtime.arguments import Parser
from labcode.runtime.fields import shown
from labcode.runtime.units import si

VARIABLES = ("t2m", "u10", "v10", "msl")
FIRST_TIME = "2000-01-01"
HOURS = 6  # between two times
TIMES_PER_MAP = 4  # of the file, between two maps of the sample
NOISE = 0.1  # of the deviation of a variable in space
NOISE_GRID = (30, 60)  # random numbers of a map, between which is interpolated
LEAST_TIMES = 4
FINEST_DEGREES = 0.05
CHUNK = (1, 90, 180)  # times, latitudes and longitudes, if nothing else is asked for
BLOCK_BYTES = 2 * 10**9  # of the times of one chunk, which are in memory together
SPARE = 1.05  # free space on the disk, beside the size of the data


class Plan(NamedTuple):
    """What is to be written.

    Args:
        num_times: How many.
        lat, lon: Degrees.
        chunks: Sizes of a variable's chunks: times, latitudes, longitudes.
        seed: Seed of the random fields.
        compress: Whether chunks are compressed.
    """

    num_times: int
    lat: np.ndarray
    lon: np.ndarray
    chunks: tuple[int, int, int]
    seed: int
    compress: bool

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of a variable."""
        return (self.num_times, len(self.lat), len(self.lon))

    @property
    def num_bytes(self) -> int:
        """Bytes of all variables, without compression."""
        return 4 * len(VARIABLES) * math.prod(self.shape)


def generate(
    path: str | Path,
    gb: float,
    degrees: float = 0.5,
    chunks: Sequence[int] | None = None,
    seed: int = 0,
    compress: bool = False,
    progress: bool = True,
) -> Plan:
    """Write a weather file. It is there when it is complete, and not before.

    Args:
        path: Ends in .zarr; does not exist.
        gb: Its size, in 1e9 bytes. What is larger than `weather_files.IN_MEMORY_BYTES` is read
            again for every batch.
        degrees: Degrees between two grid points.
        chunks: Times, latitudes and longitudes of a chunk; None: `CHUNK`, or the map if it is
            smaller.
        seed: The same seed gives the same values.
        compress: Write compressed chunks (zstd), which take time to unpack.
        progress: Show a bar.

    Returns:
        What was written.

    Raises:
        ValueError: The path exists, has another suffix, or does not fit on the disk; a size or a
            chunk that is impossible; a package that is not installed.
        OSError: It cannot be written.

    Held by: tests/unit/test_generate.py
    """
    path = Path(path).expanduser()
    _check_zarr(path)
    plan = _plan(gb, degrees, chunks, seed, compress)
    _check_place(path, plan)
    with _unfinished(path) as partial:
        _write(partial, plan, _blocks(plan, path.name if progress else None))
        partial.rename(path)
    return plan


def _plan(
    gb: float, degrees: float, chunks: Sequence[int] | None, seed: int, compress: bool
) -> Plan:
    if not FINEST_DEGREES <= degrees <= 10 or abs(180 / degrees - round(180 / degrees)) > 1e-6:
        raise ValueError(
            f"degrees={degrees:g}: give a part of 180 from {FINEST_DEGREES} to 10, such as 0.5"
        )
    num_lat = round(180 / degrees)
    lat = 90 - degrees * (np.arange(num_lat) + 0.5)
    lon = degrees * (np.arange(2 * num_lat) + 0.5)
    state_bytes = 4 * len(VARIABLES) * len(lat) * len(lon)
    if not 0 < gb < 1e6:
        raise ValueError(f"gb={gb:g}: give the size of the file in GB, such as 0.5")
    num_times = round(gb * 1e9 / state_bytes)
    if num_times < LEAST_TIMES:
        raise ValueError(
            f"gb={gb:g} holds {num_times} times at {degrees:g} degrees, "
            f"{si(state_bytes, 'B')} each: give at least {LEAST_TIMES * state_bytes / 1e9:.2g}"
        )
    most = (num_times, len(lat), len(lon))
    wanted = CHUNK if chunks is None else tuple(chunks)
    if len(wanted) != 3 or min(wanted) < 1:
        raise ValueError(f"chunks={shown(list(wanted))}: give times, latitudes and longitudes")
    cut = [min(size, whole) for size, whole in zip(wanted, most)]
    if cut[0] * state_bytes > BLOCK_BYTES:
        raise ValueError(
            f"chunks of {cut[0]} times need {si(cut[0] * state_bytes, 'B')} of memory to write: "
            f"give at most {BLOCK_BYTES // state_bytes} times"
        )
    return Plan(num_times, lat, lon, (cut[0], cut[1], cut[2]), seed, compress)


def _check_place(path: Path, plan: Plan) -> None:
    if path.exists() or path.is_symlink():
        raise ValueError(f"{path} exists already: remove it, or give another name")
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent} for {path.name}: make it first")
    free = shutil.disk_usage(path.parent).free
    if free < SPARE * plan.num_bytes:
        raise ValueError(
            f"{path.name} needs {si(plan.num_bytes, 'B')} and the disk at {path.parent} has "
            f"{si(free, 'B')} free: give a smaller gb or another place"
        )


@contextmanager
def _unfinished(path: Path) -> Iterator[Path]:
    """A name beside `path`; what stands there is removed, unless it was renamed."""
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


# ---- the values


def _blocks(plan: Plan, title: str | None) -> Iterator[tuple[int, np.ndarray]]:
    """(First time, states [t, C, Y, X]) of as many times as a chunk has, one after another."""
    # imports torch: a typing mistake need not wait for it
    from labcode.data.weather_files import open_weather

    sample = open_weather(None, VARIABLES)
    maps = sample.read(range(len(sample.times)))  # [T, C, y, x]
    to_lat = _between(len(sample.lat), len(plan.lat), circular=False)
    to_lon = _between(len(sample.lon), len(plan.lon), circular=True)
    noise_lat = _between(NOISE_GRID[0], len(plan.lat), circular=False)
    noise_lon = _between(NOISE_GRID[1], len(plan.lon), circular=True)
    deviation = NOISE * maps.std(axis=(0, 2, 3))[:, None, None]
    with tqdm(total=plan.num_times, unit="time", desc=title, disable=title is None) as bar:
        for first in range(0, plan.num_times, plan.chunks[0]):
            states = []
            for number in range(first, min(first + plan.chunks[0], plan.num_times)):
                generator = np.random.Generator(np.random.PCG64([plan.seed, number]))
                shape = (len(VARIABLES), *NOISE_GRID)
                noise = deviation * generator.standard_normal(shape, dtype=np.float32)
                state = to_lat @ _at(maps, number) @ to_lon.T
                states.append(state + noise_lat @ noise @ noise_lon.T)
            yield first, np.stack(states).astype(np.float32)
            bar.update(len(states))


def _at(maps: np.ndarray, number: int) -> np.ndarray:
    """The sample at a time of the file: forward through its maps, back, and so on."""
    last = len(maps) - 1
    place = (number / TIMES_PER_MAP) % (2 * last)
    place = min(place, 2 * last - place)
    before = min(int(place), last - 1)
    part = np.float32(place - before)
    return (1 - part) * maps[before] + part * maps[before + 1]


def _between(size: int, wanted: int, circular: bool) -> np.ndarray:
    """Linear interpolation from the centres of `size` cells to those of `wanted`: a matrix.

    Args:
        size, wanted: Cells of the same length in all.
        circular: The last cell is the neighbour of the first; else ends keep their value.

    Returns:
        [wanted, size] float32, each row with the sum 1.
    """
    places = (np.arange(wanted) + 0.5) * size / wanted - 0.5
    if not circular:
        places = places.clip(0, size - 1)
    before = np.floor(places).astype(int)
    part = places - before
    after = before + 1
    if circular:
        before %= size
        after %= size
    else:
        after = after.clip(0, size - 1)
    matrix = np.zeros((wanted, size), np.float32)
    rows = np.arange(wanted)
    np.add.at(matrix, (rows, before), 1 - part)
    np.add.at(matrix, (rows, after), part)
    return matrix


# ---- the files

Blocks = Iterator[tuple[int, np.ndarray]]
AXES = ("time", "latitude", "longitude")
TIME_UNITS = {"units": f"hours since {FIRST_TIME}", "calendar": "proleptic_gregorian"}


def _check_zarr(path: Path) -> None:
    """Raises ValueError if the path does not end in .zarr, or zarr is not installed."""
    if path.suffix != ".zarr":
        raise ValueError(f"{path} does not end in .zarr: name it so")
    try:
        import zarr  # noqa: F401
    except ImportError:
        raise ValueError(
            f"writing {path} needs the package zarr: pip install labcode[weather]"
        ) from None


def _coordinates(plan: Plan) -> dict[str, np.ndarray]:
    hours = HOURS * np.arange(plan.num_times, dtype=np.int64)
    return dict(zip(AXES, (hours, plan.lat, plan.lon)))


def _write(path: Path, plan: Plan, blocks: Blocks) -> None:
    import zarr

    group: Any = zarr.open_group(path, mode="w")
    for name, values in _coordinates(plan).items():
        array = group.create_array(
            name, shape=values.shape, dtype=values.dtype, dimension_names=[name]
        )
        array[:] = values
    group["time"].attrs.update(TIME_UNITS)
    # without a compressor the file is as large as was asked for
    options = {} if plan.compress else {"compressors": None}
    arrays = []
    for name in VARIABLES:
        array = group.create_array(
            name,
            shape=plan.shape,
            chunks=plan.chunks,
            dtype="float32",
            dimension_names=AXES,
            **options,
        )
        arrays.append(array)
    for first, states in blocks:
        for number, array in enumerate(arrays):
            array[first : first + len(states)] = states[:, number]


# ---- the command


def main(arguments: Sequence[str]) -> int:
    """`python -m labcode.data.generate`; returns its exit code."""
    first_line = (__doc__ or "").splitlines()[0]
    parser = Parser(prog="python -m labcode.data.generate", description=first_line)
    parser.add_argument("path", help="ends in .zarr")
    parser.add_argument("--gb", type=float, required=True, help="size in 1e9 bytes")
    parser.add_argument("--degrees", type=float, default=0.5, help="of the grid (0.5)")
    parser.add_argument(
        "--chunks",
        type=int,
        nargs=3,
        metavar=("T", "LAT", "LON"),
        help=f"times, latitudes and longitudes of a chunk ({' '.join(map(str, CHUNK))})",
    )
    parser.add_argument("--seed", type=int, default=0)
    try:
        asked = parser.parse_args(arguments)
        plan = generate(asked.path, asked.gb, asked.degrees, asked.chunks, asked.seed)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        return 130
    shape = " x ".join(map(str, plan.shape))
    chunk = " x ".join(map(str, plan.chunks))
    print(f"{asked.path}: {len(VARIABLES)} variables of {shape} in chunks of {chunk}, ", end="")
    print(
        f"{si(plan.num_bytes, 'B')}; read parts of its maps with --data.path {asked.path} "
        "--data.crop 30 60"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
