"""Checks of lesson 22: short sums, scales for tiles, and four bits."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from course.answer import Exercise, Hint, due
from course.exercises.expect import diagnose, distance, refuse, tensor
from course.exercises.in_notebook import without
from course.labs import l22_four_bits as lab
from labcode.precision import formats

ROUNDED = 1e-12  # float64, added in another order
IN_FLOAT32 = 1e-6
CHANGED = "the tensor that was given has changed: work on a new one"


# ---- 22.1


def _terms() -> dict[str, tuple[Tensor, int]]:
    generator = torch.Generator().manual_seed(22)
    ordinary = torch.randn(4, 33, generator=generator, dtype=torch.float64)
    beside_a_large_one = ordinary.clone()
    beside_a_large_one[:, 5] = -3000.0
    rows = ordinary * torch.tensor([1.0, 100.0, 1e-4, 7.0], dtype=torch.float64)[:, None]
    return {
        "ordinary numbers": (ordinary, 13),
        "numbers beside a large negative one": (beside_a_large_one, 13),
        "rows of different sizes": (rows, 13),
        "3 bits": (ordinary, 3),
        "a largest number that is a power of two": (torch.tensor([8.0, 0.7, -0.3]).double(), 4),
        "three dims": (ordinary.view(2, 2, 33), 10),
        "zeros": (torch.zeros(2, 5, dtype=torch.float64), 13),
        "30 bits": (ordinary, 30),
        "tiny numbers": (ordinary * 1e-20, 13),
    }


def add_aligned(answer: Callable[..., Any]) -> None:
    """The learner's `add_aligned(terms, fraction_bits)`."""
    for name, (terms, bits) in _terms().items():
        case = f"{name}: "
        given = terms.clone()
        with without(lab.add_aligned):
            found = due(answer(given, bits))
        refuse({CHANGED: not torch.equal(given, terms)}, case)
        tensor(found, terms.shape[:-1], what=f"{case}it returned")
        largest = terms.abs().amax(-1, keepdim=True)
        mistakes = {
            "each term was cut off at its own end: all of them lose what lies below the end of "
            "the largest": _cut(terms, bits, terms.abs()),
            "which row does the largest number belong to? Each sum has its own": _cut(
                terms, bits, terms.abs().max()
            ),
            "a negative number can be the largest by its size": _cut(
                terms, bits, terms.amax(-1, keepdim=True)
            ),
            "the bits that do not fit are cut off, not rounded": _cut(
                terms, bits, largest, torch.round
            ),
            "a negative term must be cut off towards zero as well": _cut(
                terms, bits, largest, torch.floor
            ),
            "one bit too few is kept: frexp's f is below 1": _cut(terms, bits - 1, largest),
            "one bit too many is kept: the leading 1 is no bit of the fraction": _cut(
                terms, bits + 1, largest
            ),
            "nothing was cut off": terms.sum(-1),
            "the sum of no term but zeros is 0, and it is not a number here": bool(
                found.isnan().any()
            ),
        }
        truth = lab.add_aligned(terms, bits)
        one = found.flatten()[0].item()
        wanted = truth.flatten()[0].item()
        otherwise = (
            f"the first sum is {one:.10g}, expected is {wanted:.10g}. Each term loses what lies "
            "below 2^(e - fraction_bits), before anything is added, and all of it in float64"
        )
        diagnose(case, found, truth, mistakes, otherwise, tolerance=ROUNDED)


OFF = "the result is {off:.1%} away from the right one"


def _cut(
    terms: Tensor, bits: int, largest: Tensor, how: Callable[[Tensor], Tensor] = torch.trunc
) -> Tensor:
    """The sum of terms that are cut off below the end of some number, in some way."""
    _, exponent = torch.frexp(largest)
    unit = torch.ldexp(torch.ones_like(largest), exponent - 1 - bits)
    return (how(terms / unit) * unit).sum(-1)


# ---- 22.2


def short_product(answer: Callable[..., Any]) -> None:
    """The learner's `short_product(a, b, piece)`."""
    for length, piece in ((32, None), (256, None), (256, 128), (416, 128), (512, 64), (96, 128)):
        a, b = lab.numbers("positive", length, rows=5)
        a = a[:3]  # [3, K] and [5, K]
        case = f"K = {length}, piece = {piece}: "
        with without(lab.short_product):
            found = due(answer(a.clone(), b.clone(), piece))
        tensor(found, (3, 5), what=f"{case}it returned")
        is_wide = found.dtype == torch.float64
        refuse({f"the result is {found.dtype}, expected is float64": not is_wide}, case)
        exact = a.double() @ b.double().T
        whole = lab.short_product(a, b)
        each = lab.short_product(a, b, lab.HOPPER_TERMS)
        truth = lab.short_product(a, b, piece)
        rest = length % (piece or length) or piece or length  # products of the last piece
        last = lab.short_product(a[:, -rest:], b[:, -rest:])
        mistakes = {
            "nothing is lost: is the running sum one of the terms that are cut off?": exact,
            "the running sum is never moved to the sum of many bits": whole,
            "the running sum is added outside of add_aligned, so that it keeps all its bits": each,
            "it is 0: is the sum that you return the one that still has something in it?": (
                not bool(found.any())
            ),
            "only the last piece is there": last,
            "the piece that has not ended when the loop ends is missing": truth - last,
            "is the running sum 0 after it was moved? It counts more than once": bool(
                (found > 1.2 * exact).all()
            ),
        }
        otherwise = (
            f"the first sum is {found[0, 0].item():.10g}, expected is {truth[0, 0].item():.10g}: "
            "after which products does the running sum move?"
        )
        diagnose(case, found, truth, mistakes, otherwise, tolerance=ROUNDED)


# ---- 22.3


def _to_tile() -> dict[str, tuple[Tensor, int, int]]:
    x = lab.with_massive_numbers(1000.0)[:8, 96:108].contiguous()
    negative = x.clone()
    negative[0, 0] = -50.0
    return {
        "tiles of 1 x 4": (x, 1, 4),
        "tiles of 4 x 4": (negative, 4, 4),
        "tiles of 2 x 6": (negative, 2, 6),
        "one tile": (x, 8, 12),
        "a tile of zeros": (torch.cat([torch.zeros(2, 12), x[:2]]), 2, 4),
        "a matrix in bfloat16": (x.bfloat16(), 4, 3),
    }


def quantize_tiles(answer: Callable[..., Any]) -> None:
    """The learner's `quantize_tiles(x, rows, columns)`."""
    for name, (x, rows, columns) in _to_tile().items():
        case = f"{name}: "
        given = x.clone()
        with without(lab.quantize_tiles, formats.scale_for):
            result = due(answer(given, rows, columns))
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise Hint(f"return two things, not {type(result).__name__}")
        q, scale = due(*result)
        refuse({CHANGED: not torch.equal(given, x)}, case)
        tensor(q, x.shape, what=f"{case}the first result is")
        shape = (x.shape[0] // rows, x.shape[1] // columns)
        tensor(scale, shape, what=f"{case}the scales are")
        is_8_bits = q.dtype == torch.float8_e4m3fn
        mistakes = {
            f"the first result is {q.dtype}, expected is torch.float8_e4m3fn": not is_8_bits,
            f"the scales are {scale.dtype}, expected is float32": scale.dtype != torch.float32,
        }
        refuse(mistakes, case)
        wanted_q, wanted = lab.quantize_tiles(x, rows, columns)
        of_zeros = wanted[x.unfold(0, rows, rows).unfold(1, columns, columns).amax((2, 3)) == 0]
        mistakes = {
            "a tile of zeros has the scale 1": len(of_zeros) > 0
            and not bool((scale == wanted).all()),
            "all tiles have the same scale: each has an amax of its own": bool(
                (scale == scale.flatten()[0]).all()
            ),
            "these are the factors for the way back": 1 / wanted,
            "then the largest number of a tile becomes 1, and not 448": wanted / 448,
            "a negative number can be the largest by its size": _scales(x, rows, columns),
        }
        where = (
            "the scales are wrong: which numbers does your amax of a tile see, and is all of it "
            "computed in float32?"
        )
        diagnose(case, scale, wanted, mistakes, where, tolerance=IN_FLOAT32)
        off = (q.float() != wanted_q.float()).nonzero()
        if len(off):
            row, column = off[0].tolist()
            raise Hint(
                f"{case}at [{row}, {column}] it is {q.float()[row, column]:g}, expected is "
                f"{wanted_q.float()[row, column]:g}: is each number multiplied by the scale of its "
                "own tile, in float32?"
            )


def _scales(x: Tensor, rows: int, columns: int) -> Tensor:
    """Those of tiles whose largest number is taken with its sign."""
    tiles = x.float().unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    amax = tiles.amax((1, 3))
    return torch.where(amax > 0, 448 / amax, 1.0)


# ---- 22.4

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
EVEN = (torch.arange(4096) + 0.5) / 4096  # a draw that covers 0 to 1 evenly


def stochastic_rounding(answer: Callable[..., Any]) -> None:
    """The learner's `to_e2m1(x, chance)`."""
    for value in (0.1, 0.3, 0.6, 1.2, 1.75, 2.2, 2.9, 3.6, 4.4, 5.7, -0.1, -1.3, -2.5, -5.0):
        found = _cast_many(answer, value)
        case = f"x = {value:g}: "
        below = E2M1[abs(value) >= E2M1].max().item()
        above = E2M1[abs(value) < E2M1].min().item()
        sizes = sorted({round(size, 6) for size in found.abs().tolist()})
        mean = found.mean().item()
        mistakes = {
            f"it became {sizes[0]:g} whatever the chance was: is each chance used at its place, "
            "and which two numbers are possible?": len(sizes) == 1,
            f"it became {', '.join(f'{size:g}' for size in sizes[:4])}: the neighbours of "
            f"{abs(value):g} in e2m1 are {below:g} and {above:g}": sizes != [below, above],
            f"it became a number of the other sign: the mean is {mean:.3f}": bool(
                (found * value < 0).any()
            ),
            f"the mean of many casts is {mean:.3f}: is the nearer one the more probable one?": (
                abs(mean - value) > 0.05
            ),
            f"the mean of many casts is {mean:.4f}: the chances that were given are spread evenly, "
            "and no others are drawn": abs(mean - value) > 1e-3,
        }
        refuse(mistakes, case)
    for value in (0.0, 0.5, 1.5, 3.0, 6.0, -4.0):
        text = f"{value:g} is a number of e2m1, and stays what it is whatever the chance is"
        refuse({text: bool((_cast_many(answer, value) != value).any())})
    for value, end in ((7.0, 6.0), (-100.0, -6.0), (6.4, 6.0)):
        found = _cast_many(answer, value)
        text = f"x = {value:g} became {found.abs().max():g} in size: it saturates at {end:g}"
        refuse({text: bool((found != end).any())})
    _check_own_chances(answer)


def _check_own_chances(answer: Callable[..., Any]) -> None:
    """Low and high chances side by side, in several dims: equal numbers become both neighbours."""
    x = torch.full((2, 3, 4), 2.25)
    x[0, 0, 0] = -7.0
    chance = (torch.arange(24) % 2).float().view(2, 3, 4).clamp(0.01, 0.99)
    given = x.clone()
    case = "2.25 at 23 places, shape [2, 3, 4]: "
    found = due(answer(given, chance))
    refuse({CHANGED: not torch.equal(given, x)}, case)
    tensor(found, x.shape, what=f"{case}it returned")
    again = answer(x.clone(), chance)
    found_even = {round(value, 6) for value in found.flatten()[2::2].tolist()}
    found_odd = {round(value, 6) for value in found.flatten()[1::2].tolist()}
    mistakes = {
        f"the result is {found.dtype}, expected is float32": found.dtype != torch.float32,
        "the same `chance` gives another result: draw no number yourself": not torch.equal(
            found, again
        ),
        "each number has its own chance, the one at its place": (
            len(found_even) != 1 or len(found_odd) != 1 or found_even == found_odd
        ),
    }
    refuse(mistakes, case)


def _cast_many(answer: Callable[..., Any], value: float) -> Tensor:
    x = torch.full((4096,), value)
    chance = EVEN[torch.randperm(4096, generator=torch.Generator().manual_seed(2))]
    with without(formats.cast):
        found = due(answer(x, chance))
    tensor(found, (4096,), what=f"x = {value:g} 4096 times: it returned")
    return found


# ---- 22.5


def hadamard(answer: Callable[..., Any]) -> None:
    """The learner's `hadamard(x, signs)`."""
    generator = torch.Generator().manual_seed(16)
    ones = torch.ones(16)
    cases = {
        "16 numbers, all signs 1": (torch.randn(1, 16, generator=generator), ones),
        "16 numbers": (torch.randn(1, 16, generator=generator), lab.SIGNS),
        "5 rows of 48 numbers": (torch.randn(5, 48, generator=generator), lab.SIGNS),
        "three dims": (torch.randn(2, 3, 32, generator=generator), lab.SIGNS),
    }
    for name, (x, signs) in cases.items():
        case = f"{name}: "
        given = x.clone()
        with without(lab.hadamard):
            found = due(answer(given, signs.clone()))
        refuse({CHANGED: not torch.equal(given, x)}, case)
        tensor(found, x.shape, what=f"{case}it returned")
        truth = lab.hadamard(x, signs)
        repeated = signs.repeat(x.shape[-1] // 16)
        length = x.norm().item()
        mistakes = {
            "it is 4 times too long: a rotation leaves the length of 16 numbers as it is": 4
            * truth,
            "it is 4 times too short: H has the length 4 in each row": truth / 4,
            "the signs are not used": lab.hadamard(x, ones),
            "the signs belong before the rotation, not after it": lab.hadamard(x, ones) * repeated,
            "each sign counts twice": lab.hadamard(x, ones) if bool((signs == 1).all()) else False,
            f"the length of the whole was {length:.4g} and is {float(found.norm()):.4g}: H / 4 "
            "rotates, and does not stretch": distance(found.norm(), x.norm()) > 1e-4,
        }
        otherwise = (
            "the length is right, and the numbers are not: is it x H for each 16 neighbours, with "
            "H made of [[H, H], [H, -H]]?"
        )
        diagnose(case, found, truth, mistakes, otherwise, tolerance=1e-5)


# ---- 22.6


class _Recorder:
    """`to_nvfp4` to nearest, and what it was asked for."""

    def __init__(self, operands: dict[str, Tensor]) -> None:
        self.operands = operands
        self.stochastic: list[str] = []
        self.square: list[str] = []

    def __call__(self, x: Tensor, *, square: bool = False, stochastic: bool = False) -> Tensor:
        names = [name for name, one in self.operands.items() if one.shape in (x.shape, x.T.shape)]
        self.stochastic += names if stochastic else []
        self.square += names if square else []
        return lab.to_nvfp4(x, square=square)


def products(answer: Callable[..., Any]) -> None:
    """The learner's `products(x, w, dy, quantize, rotate)`."""
    generator = torch.Generator().manual_seed(3)
    operands = {
        "x": torch.randn(64, 48, generator=generator),
        "w": torch.randn(32, 48, generator=generator),
        "dy": 1e-3 * torch.randn(64, 32, generator=generator),
    }
    operands["x"][5, 7] = 40.0
    seen = _Recorder(operands)
    result = due(answer(*operands.values(), seen, lab.rotated))
    if not isinstance(result, tuple | list) or len(result) != 3:
        raise Hint(f"return y, dx and dw, not {type(result).__name__}")
    y, dx, dw = due(*result)
    x, w, dy = operands.values()
    q = _Recorder(operands)
    squares = q(w, square=True)
    truths = lab.products(x, w, dy, q, lab.rotated)
    for name, one, truth in zip(("y", "dx", "dw"), (y, dx, dw), truths, strict=True):
        tensor(one, truth.shape, what=f"{name} is")
    exact = {"y": x @ w.T, "dx": dy @ w, "dw": dy.T @ x}
    in_rows = {
        "y": q(x) @ q(w).T,
        "dx": q(dy) @ q(w.T.contiguous()).T,
        "dw": q(dy.T.contiguous()) @ q(x.T.contiguous()).T,
    }
    along = "the blocks of an operand lie along the sum of its product"
    tables = {
        "y": {
            "x is not quantised": x @ squares.T,
            "w is not quantised": q(x) @ w.T,
            "w has blocks along its rows: a weight has one scale for a square": in_rows["y"],
            "x has squares: only the weight has them": q(x, square=True) @ squares.T,
            "x and w are rotated: forward has no rotation, or the weight would have two values": (
                q(lab.rotated(x)) @ q(lab.rotated(w), square=True).T
            ),
            "the product was quantised, not its operands": q(exact["y"]),
        },
        "dx": {
            "dy is not quantised": dy @ squares,
            "w is not quantised": q(dy) @ w,
            "dy has squares: only the weight has them": q(dy, square=True) @ squares,
            "dy is rotated, and w is not: the rotation must cancel in the product": (
                q(lab.rotated(dy)) @ squares
            ),
            "w has blocks along one side: quantise it once, by squares, for both products": (
                in_rows["dx"]
            ),
            f"{along}; is it w itself that is quantised?": q(dy) @ q(w),
        },
        "dw": {
            "neither operand is rotated before its cast": in_rows["dw"],
            "only dy is rotated: the rotations must cancel in the product": (
                q(lab.rotated(dy.T)) @ in_columns(q, x)
            ),
            "only x is rotated: the rotations must cancel in the product": (
                q(dy.T.contiguous()) @ q(lab.rotated(x.T)).T
            ),
            f"{along}. This sum runs over the tokens": q(dy).T @ q(x),
            "rotated along the features and cast along the tokens: transpose first, then rotate": (
                q(lab.rotated(dy).T.contiguous()) @ q(lab.rotated(x).T.contiguous()).T
            ),
            "dy is not rotated along the tokens: transpose first, then rotate": (
                q(lab.rotated(dy).T.contiguous()) @ q(lab.rotated(x.T)).T
            ),
            "rotated along the features: the rotations cancel only along the sum": (
                q(lab.rotated(dy)).T @ q(lab.rotated(x))
            ),
        },
    }
    for name, one, truth in zip(("y", "dx", "dw"), (y, dx, dw), truths, strict=True):
        nothing = {"none of its operands has four bits": exact[name]}
        diagnose(f"{name}: ", one, truth, {**nothing, **tables[name]}, OFF, tolerance=1e-5)
    gradients = seen.stochastic.count("dy")
    mistakes = {
        "the gradient is rounded to nearest in both of its products": gradients == 0,
        "the gradient is rounded by chance in one of its two products": gradients == 1,
        "only gradients are rounded by chance, not x or w: it costs accuracy where a cast is used "
        "once": len(seen.stochastic) > gradients,
        "w is quantised more than once": seen.square.count("w") > 1,
    }
    refuse(mistakes)


def in_columns(q: Callable[..., Tensor], x: Tensor) -> Tensor:
    """x with its blocks along the tokens."""
    return q(x.T.contiguous()).T


EXERCISES = {
    "22.1": Exercise(
        check=add_aligned,
        praise="every term loses what lies below the end of the largest one",
        hints=(
            "The unit is the spacing of the largest term, as in exercise 18.1: 2^(e - bits).",
            "torch.frexp gives n with |x| = f · 2^n and f below 1. What is e then?",
            "How many whole units are in a term? torch.trunc cuts off towards zero.",
        ),
    ),
    "22.2": Exercise(
        check=short_product,
        praise="a short sum for each piece, and a long one for all of them",
        hints=(
            "Two sums: the running one, which is a term of every instruction, and the total, which "
            "has many bits.",
            "torch.cat([running[..., None], products], -1) are the 33 terms.",
            "When is `end` a multiple of piece? And what is left when the loop has ended?",
        ),
    ),
    "22.3": Exercise(
        check=quantize_tiles,
        praise="a scale for each tile, and each number under its own",
        hints=(
            "`x.view(R // rows, rows, C // columns, columns)` has one dim for each question: which "
            "tile, and where in it. (`unflatten` does it as well.)",
            "amax((1, 3), keepdim=True) leaves one number for each tile, in a shape that still "
            "multiplies with the four dims.",
            "torch.where(amax > 0, ..., 1) is for tiles of zeros.",
        ),
    ),
    "22.4": Exercise(
        check=stochastic_rounding,
        praise="a neighbour each time, and x on average",
        hints=(
            "As in exercise 18.4: which spacing has e2m1 at x? Below 2 it is 0.5, then 1, then 2.",
            "x / spacing lies between two whole numbers. Which part of the way has it gone?",
            "torch.floor(steps + chance) is one of the two. When is it the upper one?",
        ),
    ),
    "22.5": Exercise(
        check=hadamard,
        praise="each 16 numbers are rotated, and as long as before",
        hints=(
            "Begin with H = [[1]] and double it four times; torch.cat or torch.kron puts four "
            "blocks together.",
            "`x.unflatten(-1, (-1, 16))` are the 16 neighbours, and `.flatten(-2)` is the way "
            "back.",
            "How long is a row of H, and how long must it be?",
        ),
    ),
    "22.6": Exercise(
        check=products,
        praise="squares for the weight, chance for the gradient, and a rotation that cancels",
        hints=(
            "quantize has its blocks along the rows of what it is given. Along which dim does each "
            "of the three sums run?",
            "dw sums over the tokens: quantise dy.T and x.T, rotated before.",
            "The squares of w are the same numbers for w and for its transpose.",
        ),
    ),
}
