"""Weather files, zarr and HDF5: coordinates, times, gaps, shapes, damage; also read lazily."""

import json
import os
import random
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from labcode.train.chaos.damage import cut, fill, flip, folder_instead, loop, noise, write

from .. import fixtures
from ..cases import EITHER, REFUSED, TRAINS, WEATHER, Case
from ..injection import set_to

VARIABLES = ("t2m", "u10")
TIMES, LAT, LON = 12, 6, 12
ARGS = ("--data.variables", *VARIABLES, "--model.patch_size=3", "--train.out=out")
LAZY = partial(set_to, "labcode.data.weather_files", "IN_MEMORY_BYTES", 0)

Change = Callable[[Any], Any]


def _dataset() -> Any:
    """Two variables on a small grid."""
    import xarray

    rng = np.random.default_rng(0)
    coords = {
        "time": np.datetime64("2026-01-01T00", "ns") + np.arange(TIMES) * np.timedelta64(1, "h"),
        "latitude": np.linspace(75.0, -75.0, LAT),
        "longitude": np.arange(LON) * 30.0,
    }
    fields = {}
    for name in VARIABLES:
        values = rng.normal(10, 3, (TIMES, LAT, LON)).astype(np.float32)
        fields[name] = (("time", "latitude", "longitude"), values)
    return xarray.Dataset(fields, coords)


# ---- changes of the dataset


def _value(value: float, time: int, dataset: Any) -> Any:
    dataset.t2m.values[time, 2, 3] = value
    return dataset


def _everywhere(value: float, dataset: Any) -> Any:
    dataset.t2m.values[:] = value
    return dataset


def _axis(name: str, values: Any, dataset: Any) -> Any:
    return dataset.assign_coords({name: values})


def _first(name: str, value: Any, dataset: Any) -> Any:
    values = dataset[name].values.copy()
    values[1] = value
    return _axis(name, values, dataset)


def _times(count: int, dataset: Any) -> Any:
    return dataset.isel(time=slice(0, count))


def _cast(dtype: str, dataset: Any) -> Any:
    return dataset.assign(t2m=dataset.t2m.astype(dtype))


def _mirrored(dataset: Any) -> Any:
    return dataset.isel(latitude=slice(None, None, -1))


def _transposed(dataset: Any) -> Any:
    return dataset.transpose("longitude", "time", "latitude")


def _levels(dataset: Any) -> Any:
    return dataset.expand_dims(level=[500, 850])


def _without(name: str, dataset: Any) -> Any:
    return dataset.drop_vars(name)


def _renamed(names: dict[str, str], dataset: Any) -> Any:
    return dataset.rename(names)


def _shorter_variable(dataset: Any) -> Any:
    field = dataset.u10.isel(latitude=slice(0, 3)).rename(latitude="lat2")
    return dataset.assign(u10=field.drop_vars("lat2", errors="ignore"))


def _shuffled(name: str, dataset: Any) -> Any:
    order = np.random.default_rng(1).permutation(dataset.sizes[name])
    return dataset.isel({name: order})


def _empty(name: str, dataset: Any) -> Any:
    return dataset.isel({name: slice(0, 0)})


def _same(dataset: Any) -> Any:
    return dataset


NAN = float("nan")
INF = float("inf")
# what is changed: the change, the answer, words of the line
DATASETS: dict[str, tuple[Change, str, list[str]]] = {
    "nothing": (_same, TRAINS, []),
    "south first": (_mirrored, TRAINS, []),
    "axes in another order": (_transposed, TRAINS, []),
    "axes named lat and lon": (
        partial(_renamed, {"latitude": "lat", "longitude": "lon"}),
        TRAINS,
        [],
    ),
    "integers": (partial(_cast, "int32"), TRAINS, []),
    "float64": (partial(_cast, "float64"), TRAINS, []),
    "complex numbers": (partial(_cast, "complex64"), REFUSED, ["t2m"]),
    "texts": (partial(_cast, "str"), REFUSED, ["t2m"]),
    "truth values": (partial(_cast, "bool"), EITHER, ["t2m"]),
    "a NaN in the first time": (partial(_value, NAN, 0), REFUSED, ["t2m"]),
    "a NaN in the last time": (partial(_value, NAN, -1), REFUSED, ["t2m"]),
    "an infinity": (partial(_value, INF, 5), REFUSED, ["t2m"]),
    "minus infinity": (partial(_value, -INF, 5), REFUSED, ["t2m"]),
    "1e38": (partial(_value, 1e38, 5), EITHER, ["t2m", "lr", "finite", "nan", "inf"]),
    "NaN everywhere": (partial(_everywhere, NAN), REFUSED, ["t2m"]),
    "zero everywhere": (partial(_everywhere, 0.0), REFUSED, ["t2m"]),
    "latitude NaN": (partial(_first, "latitude", NAN), REFUSED, ["latitude"]),
    "longitude NaN": (partial(_first, "longitude", NAN), REFUSED, ["longitude"]),
    "latitude infinite": (partial(_first, "latitude", INF), REFUSED, ["latitude"]),
    "latitude 100": (partial(_first, "latitude", 100.0), REFUSED, ["latitude"]),
    "longitude 1e6": (partial(_first, "longitude", 1e6), REFUSED, ["longitude"]),
    "a latitude twice": (partial(_first, "latitude", 75.0), REFUSED, ["latitude"]),
    "a longitude twice": (partial(_first, "longitude", 0.0), REFUSED, ["longitude"]),
    "latitudes in disorder": (partial(_shuffled, "latitude"), REFUSED, ["latitude"]),
    "longitudes in disorder": (partial(_shuffled, "longitude"), REFUSED, ["longitude"]),
    "all latitudes 90": (partial(_axis, "latitude", np.full(LAT, 90.0)), REFUSED, ["latitude"]),
    "all longitudes 0": (partial(_axis, "longitude", np.zeros(LON)), REFUSED, ["longitude"]),
    "latitudes as texts": (partial(_axis, "latitude", list("abcdef")), REFUSED, ["latitude"]),
    "no latitude": (partial(_without, "latitude"), REFUSED, ["latitude"]),
    "no longitude": (partial(_without, "longitude"), REFUSED, ["longitude"]),
    "no time": (partial(_without, "time"), REFUSED, ["time"]),
    "times in disorder": (partial(_shuffled, "time"), REFUSED, ["time"]),
    "a time that is none": (partial(_first, "time", np.datetime64("NaT")), REFUSED, ["time"]),
    "times as numbers": (partial(_axis, "time", np.arange(TIMES)), EITHER, ["time"]),
    "times as texts": (
        partial(_axis, "time", [f"t{n:02}" for n in range(TIMES)]),
        EITHER,
        ["time"],
    ),
    "no times": (partial(_times, 0), REFUSED, ["time"]),
    "one time": (partial(_times, 1), REFUSED, ["time"]),
    "three times": (partial(_times, 3), REFUSED, ["time"]),
    "no latitudes": (partial(_empty, "latitude"), REFUSED, ["latitude", "lat"]),
    "one variable missing": (partial(_without, "u10"), REFUSED, ["u10"]),
    "another axis": (_levels, REFUSED, ["level"]),
    "a variable on another grid": (_shorter_variable, REFUSED, ["u10"]),
}
# asked for with other words: the words, the answer, words of the line
WORDS: dict[str, tuple[list[str], str, list[str]]] = {
    "a variable twice": (["--data.variables", "t2m", "t2m"], REFUSED, ["t2m", "variables"]),
    "a variable that is an axis": (["--data.variables", "latitude"], REFUSED, ["latitude"]),
    "the sun": (["--data.sun"], TRAINS, []),
    "turned": (["--data.roll"], TRAINS, []),
    "a patch that does not fit": (["--model.patch_size=5"], REFUSED, ["patch_size"]),
    "a batch larger than the data": (["--train.global_batch=1000000"], REFUSED, ["global_batch"]),
}


def cases(rng: random.Random) -> list[Case]:
    made = []
    for what, (change, answer, names) in DATASETS.items():
        lazily = rng.random() < 0.25 or "NaN in" in what or "infinity" in what
        made.append(_case(what, "x.zarr", change, answer, names))
        if lazily:
            lazy = _case(f"{what}, read lazily", "x.zarr", change, answer, names, lazy=True)
            made.append(lazy)
        if rng.random() < 0.3:
            made.append(_case(f"{what}, HDF5", "x.nc", change, answer, names))
    for what, (words, answer, names) in WORDS.items():
        made.append(_case(what, "x.zarr", _same, answer, names, words))
    for what, change in FOLDERS.items():
        made.append(_damaged(f"zarr: {what}", "x.zarr", change))
    for what, change in FILES.items():
        made.append(_damaged(f"HDF5: {what}", "x.nc", change))
    for _ in range(6):
        place = rng.random()
        made.append(
            _damaged(f"HDF5: bit {100 * place:.1f} %", "x.nc", partial(flip, place), EITHER)
        )
    for what, (path, prepare, names) in PATHS.items():
        words = [*ARGS, f"--data.path={path}"]
        made.append(Case(what, words, names, prepare=prepare, base=WEATHER))
    return made


def _case(
    what: str,
    name: str,
    change: Change,
    answer: str,
    names: list[str],
    words: list[str] | None = None,
    lazy: bool = False,
) -> Case:
    return Case(
        what,
        [*ARGS, f"--data.path={name}", *(words or [])],
        names,
        answer,
        prepare=partial(_write, name, change),
        patch=LAZY if lazy else None,
        base=WEATHER,
    )


@fixtures.once
def _whole(name: str) -> Path:
    folder = fixtures.made(f"weather-{name}")
    _write(name, _same, folder)
    return folder / name


def _write(name: str, change: Change, folder: Path) -> None:
    dataset = change(_dataset())
    # the HDF5 library may not be used by two threads
    with fixtures.one_at_a_time(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # texts as coordinates are not for zarr
        if name.endswith(".zarr"):
            dataset.to_zarr(folder / name, consolidated=False)
        else:
            dataset.to_netcdf(folder / name, engine="h5netcdf")


def _damaged(what: str, name: str, change: Callable[[Path], object], answer: str = REFUSED) -> Case:
    return Case(
        what,
        [*ARGS, f"--data.path={name}"],
        [name],
        answer,
        prepare=partial(_copy, name, change),
        base=WEATHER,
    )


def _copy(name: str, change: Callable[[Path], object], folder: Path) -> None:
    source = _whole(name)
    if source.is_dir():
        shutil.copytree(source, folder / name)
    else:
        shutil.copy(source, folder / name)
    change(folder / name)


def _in(inner: str, damage: Callable[[Path], object], path: Path) -> None:
    damage(path / inner)


def _chunk(damage: Callable[[Path], object], path: Path) -> None:
    chunks = sorted(file for file in (path / "t2m" / "c").rglob("*") if file.is_file())
    damage(chunks[0])


def _described(key: str, value: object, path: Path) -> None:
    file = path / "t2m" / "zarr.json"
    about = json.loads(file.read_text())
    about[key] = value
    file.write_text(json.dumps(about))


FOLDERS: dict[str, Callable[[Path], object]] = {
    "no zarr.json": partial(_in, "zarr.json", Path.unlink),
    "zarr.json empty": partial(_in, "zarr.json", partial(write, b"")),
    "zarr.json is null": partial(_in, "zarr.json", partial(write, b"null")),
    "zarr.json cut": partial(_in, "zarr.json", partial(cut, 0.5)),
    "zarr.json noise": partial(_in, "zarr.json", partial(noise, 1)),
    "t2m/zarr.json empty": partial(_in, "t2m/zarr.json", partial(write, b"")),
    "t2m/zarr.json gone": partial(_in, "t2m/zarr.json", Path.unlink),
    "t2m/zarr.json a folder": partial(_in, "t2m/zarr.json", folder_instead),
    "time/zarr.json gone": partial(_in, "time/zarr.json", Path.unlink),
    "another shape": partial(_described, "shape", [99, 6, 12]),
    "a shape below zero": partial(_described, "shape", [-1, 6, 12]),
    "another type": partial(_described, "data_type", "nonsense"),
    "a chunk gone": partial(_chunk, Path.unlink),
    "a chunk empty": partial(_chunk, partial(write, b"")),
    "a chunk cut": partial(_chunk, partial(cut, 0.5)),
    "a chunk noise": partial(_chunk, partial(noise, 2)),
    "a chunk zeroed": partial(_chunk, partial(fill, b"\0")),
    "a chunk a folder": partial(_chunk, folder_instead),
    "a chunk a link to itself": partial(_chunk, loop),
    "latitude's chunk gone": partial(_in, "latitude/c/0", Path.unlink),
    "time's chunk gone": partial(_in, "time/c/0", Path.unlink),
}
FILES: dict[str, Callable[[Path], object]] = {
    "empty": partial(write, b""),
    "cut in half": partial(cut, 0.5),
    "the head alone": partial(cut, 0.01),
    "zeroed": partial(fill, b"\0"),
    "noise": partial(noise, 3),
    "no HDF5": partial(write, b"time,latitude,longitude\n1,2,3\n"),
    "a link to itself": loop,
    "a folder": folder_instead,
}


def _pipe(folder: Path) -> None:
    os.mkfifo(folder / "x.nc")


def _empty_folder(folder: Path) -> None:
    (folder / "x.zarr").mkdir()


def _csv(folder: Path) -> None:
    (folder / "x.csv").write_text("1,2,3")


PATHS: dict[str, tuple[str, Callable[[Path], object] | None, list[str]]] = {
    "no such file": ("nowhere.nc", None, ["nowhere.nc"]),
    "an empty path": ("", None, ["data.path"]),
    "a pipe": ("x.nc", _pipe, ["x.nc"]),
    "an empty folder": ("x.zarr", _empty_folder, ["x.zarr"]),
    "a table": ("x.csv", _csv, ["x.csv"]),
    "/dev/zero": ("/dev/zero", None, ["/dev/zero"]),
    "nobody's home": ("~nobody-here/x.nc", None, ["~nobody-here"]),
    "a URL": ("https://example.org/x.zarr", None, ["example.org"]),
}
