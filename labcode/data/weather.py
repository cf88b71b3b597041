"""Weather as pairs of a state and the next one: the ERA5 sample of the course, or a zarr or HDF5
file of yours.

Shapes: B samples, T times, C variables, F forcings (known inputs that are not predicted), Y
latitudes, X longitudes.
"""

import copy
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from labcode.config import WeatherData
from labcode.data.weather_files import Box, WeatherFile, open_weather

# of more training times than these, as many are read for mean and deviation, evenly spread
STATISTICS_TIMES = 512
STATISTICS_BYTES = 2**27  # read at once for that
# between them, squares are neither zero nor infinite
FLOAT32_LEAST = 1e-18
FLOAT32_MOST = 1e18
FINGERPRINT_TIMES = 8  # of a file that is not held in memory


@dataclass(frozen=True)
class Statistics:
    """Mean and standard deviation of each variable, over all grid points of the training times.

    Args:
        mean: [C, 1, 1] float32, in the units of the variables.
        std: The same.
    """

    mean: torch.Tensor
    std: torch.Tensor

    def normalise(self, states: torch.Tensor) -> torch.Tensor:
        """`(x - mean) / std`, for [..., C, Y, X] in the units of the variables."""
        return (states - self.mean.to(states)) / self.std.to(states)


class Sample(NamedTuple):
    """One sample as it lies in the file, in its units.

    Args:
        states: Now and at the next time, [2, C, Y, X].
        sun: Height of the sun at both times, [2, Y, X]; None without.
        weights: Weights of the latitudes, [Y].
    """

    states: np.ndarray
    sun: np.ndarray | None
    weights: np.ndarray


class WeatherDataset:
    """Transitions from one time of a file to the next, normalised.

    With `roll` each transition occurs once for each of the X longitudes that the map can begin at:
    sample i is transition `i % n`, turned east by `i // n` grid points, n the number of
    transitions. A few days of weather become thousands of samples, and no rank draws a random
    number: which turn is seen when is the sampler's order, the same for every dp.

    With `crop` a sample is a part of the map. Where it lies is drawn anew in each epoch, evenly
    over all rows that leave room for it, and over all longitudes: where the map goes round the
    Earth a part may cross its edge. Of a file that is not held in memory only the chunks are read
    in which the part lies. A model that sees parts does not know where they are, except from the
    sun.

    What is drawn is a function of (seed, epoch, sample) alone: the same for every rank that needs
    the sample, whoever reads it and when. Validation draws nothing: with `fixed` each transition
    is cut into as many parts of that size as fit into the map, evenly spread, and sample i is part
    `i % p` of transition `i // p`. The whole map cannot be validated on, since the model has
    learned positions within a part.

    A part counts by its area: with `crop` targets bring the weights of their rows
    along as one more field, cos(lat) over its mean on the *whole* map. The mean over parts then
    weights places as the mean over the map does, except that rows near its upper and lower edge
    lie in fewer parts.

    Args:
        file: File that states come from.
        statistics: How they are normalised.
        times: First time of this part, and the one after its last.
        roll: Turn the map, as above. It moves the continents too: right where times are few, a loss
            where there are many.
        sun: Append two forcings to each state, `sun_height` now and at the next time, for which no
            weather is needed.
        crop: Latitudes and longitudes of a part; None: the whole map.
        seed: Seed of the random draws.
        fixed: Draw nothing, as above.

    Held by: tests/unit/test_data_crops.py
    """

    def __init__(
        self,
        file: WeatherFile,
        statistics: Statistics,
        times: range,
        roll: bool = False,
        sun: bool = False,
        crop: Sequence[int] | None = None,
        seed: int = 0,
        fixed: bool = False,
    ) -> None:
        self.variables = file.variables
        self.lat = file.lat
        self.lon = file.lon
        self.forcings = ("sun_now", "sun_next") if sun else ()
        self.times = file.times[times.start : times.stop]
        self.num_transitions = len(times) - 1
        self.sample_shape = tuple(crop) if crop else (len(file.lat), len(file.lon))
        self.brings_weights = crop is not None
        self.statistics = statistics
        self._file = file
        self._start = times.start
        self._turns = len(file.lon) if roll else 1
        self._seed = seed
        self._epoch = 0
        self._weights = _row_weights(file.lat)
        self._parts = _even_parts(file, self.sample_shape) if fixed else None

    def in_epoch(self, epoch: int) -> "WeatherDataset":
        """The same samples, with what is drawn in that epoch."""
        if not self.brings_weights or epoch == self._epoch:
            return self
        other = copy.copy(self)
        other._epoch = epoch
        return other

    def __len__(self) -> int:
        """Number of transitions, times X with `roll`, or times the fixed parts of a map."""
        parts = 1 if self._parts is None else len(self._parts)
        return self.num_transitions * self._turns * parts

    def __getitem__(
        self, indices: int | Sequence[int] | np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """States and what follows them.

        Args:
            indices: B sample numbers, or a single one.

        Returns:
            [B, C+F, Y, X] and [B, C, Y, X], float32; without B for a single number. With `crop`
            targets have one field more, the weights of their rows.

        Raises:
            IndexError: A number beyond the last sample.
            ValueError: A damaged file, or a value that is missing.
        """
        indices = np.asarray(indices, dtype=np.int64)
        outside = indices[(indices < 0) | (indices >= len(self))]
        if outside.size:
            raise IndexError(
                f"there is no sample {outside[0]}: they count from 0 to {len(self) - 1}"
            )
        numbers = np.atleast_1d(indices)
        state, target = self._drawn(numbers) if self.brings_weights else self._maps(numbers)
        if indices.ndim == 0:
            return state[0], target[0]
        return state, target

    def _maps(self, numbers: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Whole maps, [B, C+F, Y, X] and [B, C, Y, X]; each time is read once."""
        turns, transitions = np.divmod(numbers, self.num_transitions)
        now = self._start + transitions
        state, target = self._normalised(now)
        if self.forcings:
            state = torch.cat([state, self._sun(now), self._sun(now + 1)], dim=1)
        if turns.any():
            state = _turned(state, turns)
            target = _turned(target, turns)
        return state, target

    def _normalised(self, now: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """The states at some times and at the next ones, each [B, C, Y, X]."""
        # transitions that follow each other share a time: each time is read once
        times, where = np.unique(np.stack([now, now + 1]), return_inverse=True)
        states = self.statistics.normalise(torch.from_numpy(self._file.read(times)))
        of_now, of_next = torch.from_numpy(where.reshape(2, -1))
        return states[of_now], states[of_next]

    def _sun(self, times: np.ndarray) -> torch.Tensor:
        """The height of the sun, [B, 1, Y, X]."""
        heights = sun_height(self._file.times[times], self.lat, self.lon)
        return torch.from_numpy(heights)[:, None]

    # ---- parts of the map

    def sample(self, number: int) -> Sample:
        """One sample as it lies in the file, with what is drawn for it.

        Raises:
            ValueError: A damaged file, or a value that is missing.
        """
        box, transition = self._draw(number)
        times = np.array([self._start + transition, self._start + transition + 1])
        states = self._file.read(times, box)
        sun = None
        if self.forcings:
            columns = (box.left + np.arange(box.width)) % len(self.lon)
            sun = sun_height(self._file.times[times], self.lat[box.rows], self.lon[columns])
        return Sample(states, sun, self._weights[box.rows])

    def _draw(self, number: int) -> tuple[Box, int]:
        """(Where a sample lies, which transition it is of)."""
        height, width = self.sample_shape
        if self._parts is not None:
            transition, part = divmod(number, len(self._parts))
            return self._parts[part], transition
        turn, transition = divmod(number, self.num_transitions)
        generator = np.random.Generator(np.random.PCG64([self._seed, self._epoch, number]))
        top = int(generator.integers(0, len(self.lat) - height + 1))
        left = int(generator.integers(0, _places(self.lon, width)))
        # column x of a map that is turned east is column x - turn of the file
        left = (left - turn) % len(self.lon)
        return Box(top, left, height, width), transition

    def _drawn(self, numbers: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Parts of maps, [B, C+F, Y, X] and [B, C+1, Y, X]."""
        pairs = [self._pair(int(number)) for number in numbers]
        states, targets = zip(*pairs)
        return torch.stack(states), torch.stack(targets)

    def _pair(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A state and its target, [C+F, Y, X] and [C+1, Y, X]."""
        found = self.sample(number)
        states = torch.from_numpy(found.states)  # [2, C, Y, X]
        weights = torch.from_numpy(found.weights)
        sun = None if found.sun is None else torch.from_numpy(found.sun)
        states = self.statistics.normalise(states)
        state = states[0] if sun is None else torch.cat([states[0], sun])
        field = weights[None, :, None].expand(1, *self.sample_shape)
        return state, torch.cat([states[1], field])


def _row_weights(lat: np.ndarray) -> np.ndarray:
    """What `models.vit.latitude_weights` gives for the whole map, which data/ cannot import."""
    weights = np.cos(np.deg2rad(lat))
    return (weights / weights.mean()).astype(np.float32)


def _goes_round(lon: np.ndarray) -> bool:
    """Whether longitudes are evenly spread over the whole circle: the last meets the first."""
    steps = np.diff(np.append(lon, lon[0])) % 360
    around = np.minimum(steps, 360 - steps)
    return len(lon) > 1 and bool(np.allclose(around, 360 / len(lon), rtol=0.01))


def _places(lon: np.ndarray, width: int) -> int:
    """How many columns a part of this width can begin at."""
    return len(lon) if _goes_round(lon) else len(lon) - width + 1


def _even_parts(file: WeatherFile, shape: Sequence[int]) -> list[Box]:
    """As many parts as fit into the map without overlap, evenly spread."""
    height, width = shape
    tops = _even_starts(len(file.lat), height)
    lefts = _even_starts(len(file.lon), width)
    parts = []
    for top in tops:
        for left in lefts:
            parts.append(Box(top, left, height, width))
    return parts


def _even_starts(length: int, size: int) -> list[int]:
    """Where parts of a size begin that share a length: the first at 0, the last at its end."""
    count = length // size
    if count == 1:
        return [(length - size) // 2]
    return [round(number * (length - size) / (count - 1)) for number in range(count)]


def _turned(maps: torch.Tensor, turns: np.ndarray) -> torch.Tensor:
    """Each of B maps turned east by its number of grid points."""
    turned = [one.roll(int(turn), dims=-1) for one, turn in zip(maps, turns)]
    return torch.stack(turned)


def sun_height(times: np.ndarray, lat: np.ndarray, lon: np.ndarray) -> np.ndarray:
    """How high the sun stands: the cosine of its angle from the zenith, 1 overhead, below 0 at
    night.

        cos z = sin(lat) sin(d) + cos(lat) cos(d) cos(h)
        d = 23.45 deg * sin(2 pi (284 + day of year) / 365),    h = 2 pi (UTC hour / 24 - 1/2) + lon

    Args:
        times: [T] numpy datetimes, UTC.
        lat: [Y] degrees north
        lon: [X] degrees east

    Returns:
        [T, Y, X] float32

    Source: Duffie and Beckman, Solar Engineering of Thermal Processes, eq. 1.6.1a (Cooper 1969) and
    1.6.5, with the clock
        for solar time: about 4 degrees off at worst.
    """
    days = (times - times.astype("datetime64[Y]")) / np.timedelta64(1, "D")  # since the new year
    angle_of_year = 2 * np.pi * (285 + np.floor(days)) / 365
    declination = np.deg2rad(23.45) * np.sin(angle_of_year)[:, None, None]  # [T, 1, 1]
    hour = 2 * np.pi * (days % 1 - 0.5)
    hour_angle = hour[:, None, None] + np.deg2rad(lon)  # [T, 1, X]
    latitude = np.deg2rad(lat)[:, None]  # [Y, 1]
    sines = np.sin(latitude) * np.sin(declination)
    cosines = np.cos(latitude) * np.cos(declination) * np.cos(hour_angle)
    return (sines + cosines).astype(np.float32)


@dataclass(frozen=True)
class WeatherSplits:
    """Training and validation transitions of one file, and how both are normalised.

    Args:
        train, val: The transitions.
        stats: Mean and deviation of the training times.
        sha256: SHA-256 of what was read (`fingerprint`): a run that resumes must find the same.
    """

    train: WeatherDataset
    val: WeatherDataset
    stats: Statistics
    sha256: str


def load(config: WeatherData, seed: int = 0) -> WeatherSplits:
    """The weather of a config, the last `val_fraction` of its transitions kept for validation.

    The split is in time and strict: no time of validation is input or target of training, which
    costs the one transition between the two parts. Mean and deviation come from training times
    alone. Small files are held in memory, of large ones each batch reads what it needs.

    Args:
        config: What to read.
        seed: Seed of the random draws for each sample (`data.crop`).

    Raises:
        ValueError: One line on what is wrong: fewer than 4 times, a variable that never changes, or
            what `weather_files.open_weather` finds.
    """
    file = open_weather(config.path, config.variables)
    num_times = len(file.times)
    if num_times < 4:
        raise ValueError(
            f"{file.name} has {num_times} times: training and validation each need a state and "
            "the next one, give at least 4"
        )
    num_val = max(1, min(round(config.val_fraction * (num_times - 1)), num_times - 3))
    first_val = num_times - 1 - num_val
    stats = _statistics(file, first_val)
    if config.sun and not np.issubdtype(file.times.dtype, np.datetime64):
        raise ValueError(
            f"{file.name}: times such as {file.times[0]} are no dates, "
            "and without them data.sun cannot be True"
        )
    if config.crop is not None:
        _check_crop(file, config.crop)
    common = {"sun": config.sun, "crop": config.crop, "seed": seed}
    train = WeatherDataset(file, stats, range(first_val), config.roll, **common)
    val = WeatherDataset(file, stats, range(first_val, num_times), fixed=True, **common)
    return WeatherSplits(train, val, stats, fingerprint(file))


def _check_crop(file: WeatherFile, crop: Sequence[int]) -> None:
    whole = (len(file.lat), len(file.lon))
    if crop[0] > whole[0] or crop[1] > whole[1]:
        raise ValueError(
            f"data.crop={crop[0]} {crop[1]} but {file.name} has {whole[0]} latitudes x {whole[1]} "
            "longitudes: give a part of them"
        )


def fingerprint(file: WeatherFile) -> str:
    """A sha256 that tells one weather from another: names, coordinates, times and states.

    All states of a file that is held in memory, `FINGERPRINT_TIMES` evenly spread ones of a larger
    file. Of the values themselves and not of their mean, whose last digits depend on the processor.
    """
    digest = hashlib.sha256()
    digest.update(repr(file.variables).encode())
    for coordinate in (file.times, file.lat, file.lon):
        values = np.ascontiguousarray(coordinate)
        digest.update(f"{values.dtype.str}{values.shape}".encode())
        digest.update(values.tobytes())
    num_times = len(file.times)
    num_read = num_times if file.in_memory else min(num_times, FINGERPRINT_TIMES)
    for number in _evenly_spread(num_times, num_read):
        digest.update(np.ascontiguousarray(file.read([number]), dtype="<f4").tobytes())
    return digest.hexdigest()


def _evenly_spread(num_times: int, num_read: int) -> np.ndarray:
    """`num_read` of the numbers below `num_times`, the first and the last among them."""
    return np.unique(np.linspace(0, num_times - 1, num_read).round().astype(np.int64))


def _statistics(file: WeatherFile, num_times: int) -> Statistics:
    """Over the first `num_times` times, a few at once.

    mean = mean_t(m_t),   var = mean_t(v_t) + var_t(m_t)
    """
    times = _evenly_spread(num_times, min(num_times, STATISTICS_TIMES))
    at_once = max(1, STATISTICS_BYTES // file.state_bytes)
    means_at = []
    variances_at = []
    for start in range(0, len(times), at_once):
        states = file.read(times[start : start + at_once])
        means_at.append(states.mean(axis=(2, 3), dtype=np.float64))
        variances_at.append(states.var(axis=(2, 3), dtype=np.float64))
    means = np.concatenate(means_at)  # [T, C]
    variances = np.concatenate(variances_at)
    mean = means.mean(axis=0)
    std = np.sqrt(variances.mean(axis=0) + means.var(axis=0))
    for name, deviation, size in zip(file.variables, std, np.abs(mean)):
        if deviation <= 1e-7 * size:  # float32 resolves no less
            raise ValueError(
                f"{file.name}: {name} is {size:g} everywhere in the training times: "
                "leave it out of data.variables"
            )
        if not FLOAT32_LEAST < deviation < FLOAT32_MOST or size > FLOAT32_MOST:
            raise ValueError(
                f"{file.name}: {name} is {size:g} with a deviation of {deviation:g}, which float32 "
                "cannot compute with: write it in another unit"
            )
    return Statistics(_per_variable(mean), _per_variable(std))


def _per_variable(values: np.ndarray) -> torch.Tensor:
    """[C] as float32 that broadcasts over maps: [C, 1, 1]."""
    return torch.from_numpy(values.astype(np.float32))[:, None, None]
