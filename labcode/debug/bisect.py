"""The first tensor in which two runs depart: `python -m labcode.debug.bisect RUN_A RUN_B`.

Both runs are recorded (`--debug.record_steps 1`), on whatever grid, in whatever precision, by
whatever commit. Tensors are compared in the order in which a step makes them: weights, forward,
backward, gradients of the weights. Of each part that a rank holds

    error = |b - a|_2 / (|a|_2 * sqrt(part of the tensor that the rank holds))

with `a` the whole tensor of RUN_A, put together from its ranks. So a rank that is wrong alone is
named alone.

Whether an error is rounding is judged by the coarser precision of the two. A product rounds its
operands, each value by at most its unit roundoff u, and sums K products in the precision of the
accumulator, in blocks: an error of log2(K) roundings u_acc, of which half have each sign. Errors of
different products are independent, so that they grow with the square root of their number. Of
tensors that have n linear layers behind them, forward and backward,

    bound(n) = SAFETY * max(u, sqrt(log2 K) * u_acc) * sqrt(1 + n)

and SAFETY * u_acc of the weights before the step, which no product has rounded. SAFETY = 3 stands
for what is not in this count: norms, softmax, sums that cancel. Measured at the first step of
gpt_tiny and vit_tiny, the largest error is 0.1 to 0.3 of its bound, between layouts and between
precisions (`report` names it). A bound is good for the first step only: after it an optimizer
such as Adam turns the rounding of small gradients into updates of full size.

Source: Higham 1993, SIAM J. Sci. Comput. 14(4), for log2(K) of sums in pairs; Higham and Mary 2019,
    SIAM J. Sci. Comput. 41(5), theorem 3.1, for square roots of numbers of roundings.
Held by: tests/ranks/test_bisect.py
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from labcode.debug.not_finite import BEFORE
from labcode.debug.record import FOLDER
from labcode.runtime.arguments import Parser
from labcode.runtime.suggest import run_near
from labcode.runtime.units import ranks_text

SAFETY = 3.0
# u: half the distance between 1 and the next number
# tf32 keeps 10 bits after the point, as float16 does: the same u over the range of float32. fp8 is
# E4M3; E5M2, which gradients may have, rounds twice as coarsely, and SAFETY covers that.
UNIT_ROUNDOFF = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "tf32": 2.0**-11,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
    "fp8": 2.0**-4,
}
SHOWN_ROWS = 12  # around the first that departs


@dataclass(frozen=True)
class RankPart:
    """What one rank holds of a tensor.

    Args:
        rank: Global rank.
        places: Indices in the whole tensor, for each dim.
        values: The part itself.
    """

    rank: int
    places: list[torch.Tensor]
    values: torch.Tensor


@dataclass
class Entry:
    """One tensor of a step, in parts.

    Args:
        order: (part of the step, stage, number), the smallest of all ranks.
        shape: The shape of the whole.
        pieces: The parts of all ranks and micro-batches.
    """

    order: tuple[int, ...]
    shape: list[int]
    pieces: list[RankPart]

    def whole(self) -> torch.Tensor:
        """The tensor of one process, float64; NaN where no rank has written."""
        # NaN and not 0: a part that no rank has written then departs, instead of being compared
        # with zeros that nobody computed.
        whole = torch.full(self.shape, math.nan, dtype=torch.float64)
        for piece in self.pieces:
            whole[_grid_of(piece.places)] = piece.values.double()
        return whole


@dataclass(frozen=True)
class Row:
    """How far one tensor of the second run is from that of the first.

    Args:
        name: The name of the module or the weight.
        kind: "output", "gradient of the input" and so on.
        error: The largest relative error of a rank's part.
        bound: What rounding explains.
        ranks: Ranks of the second run whose part departs by more.
    """

    name: str
    kind: str
    error: float
    bound: float
    ranks: tuple[int, ...]

    @property
    def departs(self) -> bool:
        """Whether rounding does not explain the error."""
        # not `error > bound`, which is False for NaN
        return not self.error <= self.bound


Run = dict[tuple[str, str], Entry]
NOTHING = Entry((), [], [])


def compare(run_a: Path, run_b: Path) -> list[Row]:
    """All tensors that both runs have recorded, in the order of the first one.

    Args:
        run_a, run_b: Folders of two runs, or of their records.

    Raises:
        ValueError: There is nothing to compare, in one line.
    """
    for run in (run_a, run_b):
        if not run.is_dir():
            raise ValueError(f"{run} does not exist: {run_near(run)}")
    records = [_record_of(run_a), _record_of(run_b)]
    steps = [_steps_in(record) for record in records]
    both = sorted(set(steps[0]) & set(steps[1]))
    if not both:
        raise ValueError(
            f"{run_a} has recorded the steps {_listed(steps[0])}, {run_b} {_listed(steps[1])}: "
            "record the same one in both, --debug.record_steps 1"
        )
    # the first one, since the bounds hold for the first step after equal weights alone
    step = both[0]
    first, precision_a = _load(records[0] / f"step-{step:06d}")
    second, precision_b = _load(records[1] / f"step-{step:06d}")
    rounding = max(_rounding(precision_a, first), _rounding(precision_b, second))
    stored = max(_accumulator(precision_a), _accumulator(precision_b))
    rows = []
    num_products = 0
    for key in sorted(first, key=lambda key: first[key].order):
        if key not in second:
            continue
        name, kind = key
        # By its weight of two dims, so that an embedding counts as a product that it does not do:
        # its bound is looser by one rounding, and no list of layers has to be kept here.
        is_linear = len(first.get((f"{name}.weight", "weight"), NOTHING).shape) == 2
        # Counted on through the backward: a gradient has all products of the forward behind it.
        if is_linear and kind in ("output", "gradient of the output"):
            num_products += 1
        bound = SAFETY * rounding * math.sqrt(1 + num_products)
        # weights before the step were rounded when they were stored, and not since
        if first[key].order[0] == BEFORE:
            bound = SAFETY * stored
        rows.append(_row(key, first[key], second[key], bound))
    if not rows:
        raise ValueError(f"{run_a} and {run_b} share no tensor: they are different models")
    return rows


def first_departure(rows: Sequence[Row]) -> Row | None:
    """The first tensor that departs by more than rounding; None if none does."""
    for row in rows:
        if row.departs:
            return row
    return None


def report(rows: Sequence[Row], everything: bool = False) -> str:
    """A table around the first departure, or of all tensors, and one line on it."""
    departure = first_departure(rows)
    shown = list(rows)
    if not everything:
        place = rows.index(departure) if departure else 0
        start = max(0, place - SHOWN_ROWS // 2)
        shown = shown[start : start + SHOWN_ROWS]
    lines = [f"{'tensor':52}{'error':>10}{'bound':>10}  departs on ranks"]
    for row in shown:
        ranks = ", ".join(map(str, row.ranks))
        lines.append(
            f"{row.kind + ' of ' + row.name:52}{row.error:10.1e}{row.bound:10.1e}  {ranks}"
        )
    if len(shown) < len(rows):
        lines.append(f"({len(shown)} of {len(rows)} tensors; --all shows the others)")
    if departure is None:
        worst = max(rows, key=lambda row: row.error / row.bound)
        lines.append(
            f"no tensor departs by more than its bound; the nearest is {worst.kind} of "
            f"{worst.name}, {worst.error:.1e} of {worst.bound:.1e}"
        )
    else:
        lines.append(
            f"the first tensor that departs: {departure.kind} of {departure.name}, on "
            f"{ranks_text(departure.ranks)} of the second run, error {departure.error:.1e}, its "
            f"bound is {departure.bound:.1e}"
        )
    return "\n".join(lines)


def main(args: Sequence[str]) -> int:
    """Run the program; returns 0 if no tensor departs, 1 if one does, 2 after a user error."""
    parser = Parser(
        prog="python -m labcode.debug.bisect",
        description="The first tensor by which two runs depart from each other.",
    )
    parser.add_argument("run_a", type=Path, help="folder of a run with --debug.record_steps")
    parser.add_argument("run_b", type=Path, help="folder of another run of the same recipe")
    parser.add_argument("--all", action="store_true", help="show all tensors")
    try:
        given = parser.parse_args(args)
        rows = compare(given.run_a, given.run_b)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(report(rows, given.all))
    return 1 if first_departure(rows) else 0


# ---- reading


def _record_of(run: Path) -> Path:
    record = run / FOLDER
    return record if record.is_dir() else run


def _steps_in(record: Path) -> list[int]:
    return sorted(int(folder.name.removeprefix("step-")) for folder in record.glob("step-*"))


def _listed(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps)) or "(none)"


def _load(folder: Path) -> tuple[Run, str]:
    """The tensors that all ranks wrote of one step, and the precision of the run."""
    run: Run = {}
    precision = ""
    for path in sorted(folder.glob("rank-*.pt")):
        # a record may come from someone else: nothing in it is run
        read = torch.load(path, weights_only=True)
        precision = read["about"]["precision"]
        for written in read["entries"]:
            _add(run, written, read["about"]["rank"])
    if not run:
        raise ValueError(f"{folder} holds no record: give a run with --debug.record_steps")
    return run, precision


def _add(run: Run, written: dict[str, Any], rank: int) -> None:
    key = (written["name"], written["kind"])
    order = tuple(written["order"])
    if key not in run:
        run[key] = Entry(order, written["shape"], [])
    entry = run[key]
    # Ranks count what they have seen each by itself, and those of later micro-batches come later.
    entry.order = min(entry.order, order)
    entry.pieces.append(RankPart(rank, written["places"], written["values"]))


# ---- comparing


def _row(key: tuple[str, str], a: Entry, b: Entry, bound: float) -> Row:
    name, kind = key
    if a.shape != b.shape:
        raise ValueError(f"{kind} of {name} is {a.shape} in one run and {b.shape} in the other")
    whole = a.whole()
    # The error is measured against the size of the whole tensor. A part alone may be all but zero,
    # and its rounding would look large.
    scale = whole.norm().item() / math.sqrt(max(1, whole.numel()))
    worst = 0.0
    ranks = set()
    for piece in b.pieces:
        error = _error(piece, whole[_grid_of(piece.places)], scale)
        if not error <= bound:
            ranks.add(piece.rank)
        worst = error if not error <= worst else worst
    return Row(name, kind, worst, bound, tuple(sorted(ranks)))


def _error(piece: RankPart, wanted: torch.Tensor, scale: float) -> float:
    """|b - a| of a part over the size of such a part; infinite where one of them is not finite."""
    difference = (piece.values.double() - wanted).norm().item()
    if difference == 0:
        return 0.0
    size = scale * math.sqrt(wanted.numel())
    if not math.isfinite(difference) or not math.isfinite(size) or size == 0:
        return math.inf
    return difference / size


def _grid_of(places: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Indices that pick every combination of the places, as `numpy.ix_` does."""
    return torch.meshgrid(*places, indexing="ij")


def _rounding(precision: str, run: Run) -> float:
    """The expected rounding: max(u, sqrt(log2 K) * u_acc), K the longest sum of a product."""
    # An estimate from above: the last dim of the logits is the vocabulary, over which no product
    # sums. It enters as the root of a logarithm, so that 64 or 50,000 makes a factor of 1.6.
    longest = max(entry.shape[-1] for entry in run.values())
    by_sums = math.sqrt(math.log2(max(2, longest))) * _accumulator(precision)
    return max(UNIT_ROUNDOFF[precision], by_sums)


def _accumulator(precision: str) -> float:
    """The u of sums of products, and of the weights: float32 where operands have fewer bits."""
    return min(UNIT_ROUNDOFF[precision], UNIT_ROUNDOFF["float32"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
