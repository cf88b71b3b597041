"""Statistics of a tensor that is cut into parts: a few sums of each part, and how they combine.

    n, mean, M2 = sum (x - mean)^2, min, max, sum |x|, sum x^2, largest |x|, smallest |x| > 0

Two parts a and b, with d = mean_b - mean_a and n = n_a + n_b:

    mean = mean_a + d * n_b / n        M2 = M2_a + M2_b + d^2 * n_a * n_b / n

and the others are sums, minima and maxima. So the statistics of all parts are those of the whole
tensor, and nine numbers travel in place of the tensor. A mean of standard deviations is none: parts
whose means differ would seem to spread less than the whole does.

Source: Chan, Golub and LeVeque 1979 (Stanford STAN-CS-79-773), eq. 2.1; the names of the
    statistics are those of Transformer Engine's LogTensorStats.
Held by: tests/unit/test_moments.py
"""

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import astuple, dataclass
from operator import attrgetter

import torch


@dataclass(frozen=True)
class Moments:
    """The sums of a tensor or of a part of it.

    Args:
        count: Number of values.
        mean: The mean of the values.
        squares: Sum of (x - mean)^2.
        least, most: Smallest and largest value.
        l1: Sum of |x|.
        l2_squared: Sum of x^2.
        amax: Largest |x|.
        amin: Smallest |x| that is not 0; infinite if all are.
    """

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0
    least: float = math.inf
    most: float = -math.inf
    l1: float = 0.0
    l2_squared: float = 0.0
    amax: float = 0.0
    amin: float = math.inf

    def __add__(self, other: "Moments") -> "Moments":
        count = self.count + other.count
        if count == 0:
            return self
        # An empty part has to leave the other as it is to the last bit, and the formula does not: m
        # * n / n may round, and an infinite mean times 0 is NaN.
        distance = other.mean - self.mean
        if self.count == 0:
            distance = 0.0
            mean = other.mean
        elif other.count == 0:
            distance = 0.0
            mean = self.mean
        else:
            mean = self.mean + distance * other.count / count
        between = distance * distance * self.count * other.count / count
        return Moments(
            count,
            mean,
            self.squares + other.squares + between,
            min(self.least, other.least),
            max(self.most, other.most),
            self.l1 + other.l1,
            self.l2_squared + other.l2_squared,
            max(self.amax, other.amax),
            min(self.amin, other.amin),
        )

    def numbers(self) -> list[float]:
        """All sums, to be sent; `Moments(*numbers)` is the same again."""
        return list(astuple(self))

    def statistic(self, name: str) -> float:
        """A statistic by its name in STATISTICS.

        `std` divides by n - 1; `dynamic_range` is log2 of the largest over the smallest |x|.
        """
        return STATISTICS[name](self)


def measure(x: torch.Tensor, names: Collection[str] = ()) -> Moments:
    """The sums of a tensor, in float64 if it is float64 and in float32 otherwise.

    Args:
        x: A tensor of any shape.
        names: The statistics that are wanted: what none of them needs stays as in `Moments()`.
            Empty: all.
    """
    if x.numel() == 0:
        return Moments()
    x = x.detach()
    if x.dtype != torch.float64:
        x = x.float()
    sums: dict[str, torch.Tensor] = {}
    if not names or {"mean", "std"} & set(names):
        # twenty times as fast on a CPU as torch.var_mean, and as exact
        sums["mean"] = x.mean()
        sums["squares"] = (x - sums["mean"]).square_().sum()
    if not names or {"min", "max", "cur_amax", "dynamic_range"} & set(names):
        sums["least"], sums["most"] = torch.aminmax(x)
    if not names or "l1_norm" in names:
        sums["l1"] = x.abs().sum()
    if not names or "l2_norm" in names:
        # of 16 million float32 numbers torch.linalg.vector_norm is off by up to a percent on a CPU
        sums["l2_squared"] = x.square().sum()
    if not names or "dynamic_range" in names:
        size = x.abs()
        sums["amin"] = torch.where(size > 0, size, math.inf).min()
    numbers = torch.stack(list(sums.values())).double().tolist()  # a GPU waits once
    found = dict(zip(sums, numbers))
    if "least" in found:
        found["amax"] = max(abs(found["least"]), abs(found["most"]))
    return Moments(count=float(x.numel()), **found)


def combined(parts: Iterable[Moments]) -> Moments:
    """The moments of all parts together."""
    total = Moments()
    for part in parts:
        total = total + part
    return total


def _std(found: Moments) -> float:
    return math.sqrt(found.squares / (found.count - 1)) if found.count > 1 else math.nan


def _dynamic_range(found: Moments) -> float:
    if not 0 < found.amax < math.inf:
        return 0.0
    # not the log of the ratio, which may overflow in float64
    return math.log2(found.amax) - math.log2(found.amin)


def _l2(found: Moments) -> float:
    return math.sqrt(found.l2_squared)


STATISTICS: dict[str, Callable[[Moments], float]] = {
    "min": attrgetter("least"),
    "max": attrgetter("most"),
    "mean": attrgetter("mean"),
    "std": _std,
    "l1_norm": attrgetter("l1"),
    "l2_norm": _l2,
    "cur_amax": attrgetter("amax"),
    "dynamic_range": _dynamic_range,
}
