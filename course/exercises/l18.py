"""Checks of lesson 18, low precision."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from course.answer import Exercise, Hint, due
from course.exercises import l18_float16
from course.exercises.expect import (
    careless,
    confirm_in_group,
    diagnose,
    distance,
    in_groups,
    own_answers,
    plural,
    refuse,
    sequence,
    several,
    tensor,
    times,
)
from course.exercises.in_notebook import bounded, without
from course.exercises.simulated import Outcome
from course.labs import l18_gpt
from course.pool.ranks import Ranks
from labcode.precision import formats, fp8

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
NAMES = {E4M3: "e4m3", E5M2: "e5m2"}


class _EightBits(TorchDispatchMode):
    """Notes the calls that name an 8-bit float, (operation, dtype); those of backward too."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, torch.dtype]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.dtype) and value in NAMES:
                self.calls.append((func.overloadpacket.__name__, value))
        return func(*args, **kwargs)


def _check_zeros(case: str, whole: Tensor, scale: float) -> None:
    """Zeros alone have the scale 1."""
    mistakes = {
        f"the scale is {scale:g}, expected is 1": scale != 1,
        "zeros must stay zeros": bool(whole.any()),
    }
    refuse(mistakes, case)


# ---- 18.1

# {name: (bits of the fraction, smallest exponent)}
FORMATS = {"e4m3": (3, -6), "e5m2": (2, -14), "float16": (10, -14), "bfloat16": (7, -126)}


def spacing(answer: Callable[..., Any]) -> None:
    """The learner's `spacing(x, fraction_bits, smallest_exponent)`."""
    for name, (bits, smallest) in FORMATS.items():
        for x in _sizes(smallest):
            shown = f"{x:g}" if float(f"{x:g}") == x else repr(x)
            case = f"{name}, x = {shown}: "
            loop = f"does the loop also end for x = {x:g}?"
            found = due(bounded(loop, answer, x, bits, smallest))
            if not isinstance(found, int | float):
                raise Hint(f"{case}return one number, not {found!r}")
            exponent = math.frexp(x)[1] - 1 if x != 0 else smallest
            truth = 2.0 ** (max(exponent, smallest) - bits)
            mistakes = {
                "frexp gives n = 0 for zero, but zero is smaller than every power of two": x == 0,
                f"x is below 2^{smallest}: there the numbers do not get closer any more": (
                    abs(x) < 2.0**smallest
                ),
                "x is just below 256, and its logarithm is rounded to 8: frexp rounds nothing": (
                    255.9999 < x < 256
                ),
                "with f below 1, is 2^n the power of two above |x| or the one below?": 2 * truth,
                "the sign of x must not count": x < 0,
            }
            otherwise = (
                f"which power of two is at or below {abs(x):g}, and how many steps lead to the "
                "next?"
            )
            case += f"it returned {found:g}, expected is {truth:g}: "
            diagnose(case, found, truth, mistakes, otherwise)


def _sizes(smallest: int) -> list[float]:
    below = math.nextafter(256.0, 0.0)  # whose logarithm is rounded to 8
    ordinary = [1.0, 1.5, 1.999, 2.0, 3.0, 20.0, 100.0, 0.3, -5.0, -0.75, below]
    low = 2.0**smallest
    return [*ordinary, low, 1.5 * low, 0.75 * low, low / 4, -low / 8, 0.0]


# ---- 18.4


def _to_cast() -> dict[str, Tensor]:
    """Numbers that show each way to round wrongly, by what they are."""
    patterns = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    values = patterns[patterns.isfinite()].unique()
    middles = (values[1:] + values[:-1]) / 2
    infinity = torch.tensor(math.inf)
    generator = torch.Generator().manual_seed(3)
    exponents = torch.randint(-14, 12, (120_000,), generator=generator)
    ordinary = torch.ldexp(torch.randn(120_000, generator=generator), exponents)
    tiny = torch.ldexp(torch.randn(5_000, generator=generator), torch.tensor(-30))
    return {
        "numbers of e4m3": values[values != 0],
        "numbers exactly between two numbers of e4m3": middles,
        "numbers a little above the middle of two": torch.nextafter(middles, infinity),
        "numbers a little below the middle of two": torch.nextafter(middles, -infinity),
        "numbers next to those of e4m3": torch.cat(
            [torch.nextafter(values, infinity), torch.nextafter(values, -infinity)]
        ),
        "numbers below the smallest of e4m3": tiny,
        "numbers of many sizes": ordinary,
        "huge numbers": torch.tensor([449.0, 464.0, 480.0, 1000.0, 1e30, 3e38, -500.0, -1e38]),
        "zeros": torch.tensor([0.0, -0.0]),
        "infinities": torch.tensor([math.inf, -math.inf]),
        "nan beside 1": torch.tensor([math.nan, 1.0]),
        "a tensor of three dims": torch.full((2, 3, 4), 21.0),
        "a tensor without dims": torch.tensor(21.0),
        "an empty tensor": torch.zeros(0),
    }


def cast(answer: Callable[..., Any]) -> None:
    """The learner's `to_e4m3(x)`."""
    for name, x in _to_cast().items():
        case = f"{name}: "
        given = x.clone()
        with _EightBits() as seen, without(formats.cast):
            found = due(answer(given))
        tensor(found, x.shape, what=f"{case}it returned")
        is_same = torch.allclose(given, x, rtol=0, atol=0, equal_nan=True)
        mistakes = {
            "the tensor that was given has changed: work on a new one": not is_same,
            f"the result is {found.dtype}, expected are numbers of e4m3, but held in float32": (
                found.dtype != torch.float32
            ),
        }
        refuse(mistakes, case)
        _check_cast(name, x.flatten(), found.flatten())
        names = ", ".join(str(dtype) for _, dtype in seen.calls[:1])
        refuse({f"your code uses {names}: use arithmetic alone here": bool(seen.calls)})


def _check_cast(name: str, x: Tensor, found: Tensor) -> None:
    """Equal to PyTorch's cast in every bit; clamped, because it saturates from 2.13 on only."""
    truth = x.clamp(-LARGEST, LARGEST).to(E4M3).float()
    both_nan = found.isnan() & truth.isnan()
    wrong = (found != truth) & ~both_nan
    if not wrong.any():
        lost = (torch.signbit(found) != torch.signbit(truth)) & ~both_nan
        text = f"{name}: the sign of zero is lost: -0.0 is a number of its own"
        refuse({text: bool(lost.any())})
        return
    first = int(wrong.nonzero()[0])
    given, became, expected = (values[first].item() for values in (x, found, truth))
    size = abs(given)
    is_tie = name.startswith("numbers exactly between")
    even = "Of two that are equally near, the even one is expected"
    mistakes = {
        "nan must stay nan, and the number beside it 1": name == "nan beside 1",
        "inf / inf is nan: which spacing has an infinity in your code?": (
            math.isinf(given) and math.isnan(became)
        ),
        "What is too large must become the largest number": size > 448,
        "Which spacing do numbers below 2^-6 have?": (
            size < 2**-6 and (became == given or not is_tie)
        ),
        f"{given:g} is no number of e4m3: which spacing has your code there?": (
            is_tie and became == given
        ),
        f"{even}. Or is it cut off instead of rounded?": (
            is_tie and bool((found.abs() <= x.abs()).all())
        ),
        even: is_tie,
        "Which spacing has your code at this number? Exercise 18.1 had a formula": True,
    }
    refuse(mistakes, f"{name}: {given:.9g} became {became:.9g}, expected is {expected:.9g}. ")


# ---- 18.5


def _to_quantize() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    ordinary = torch.randn(8, 16, generator=generator)
    largest_is_negative = ordinary.clone()
    largest_is_negative[2, 3] = -50.0
    return {
        "a tensor of ordinary numbers": ordinary,
        "a tensor whose largest number is negative": largest_is_negative,
        "tiny numbers": ordinary * 1e-7,
        "huge numbers": ordinary * 1e7,
        "a tensor in bfloat16": ordinary.bfloat16(),
        "a tensor in float16": ordinary.half(),
        "a tensor of three dims": ordinary.view(2, 4, 16) * 3,
        "zeros": torch.zeros(3, 4),
        "a zero among other numbers": torch.tensor([0.0, 2.0, -1.0]),
        "numbers whose sum is 0": torch.tensor([3.0, -3.0, 1.0, -1.0]),
    }


def quantize(answer: Callable[..., Any]) -> None:
    """The learner's `quantize(x, dtype)`."""
    for dtype in (E4M3, E5M2):
        for name, x in _to_quantize().items():
            case = f"{name}, {NAMES[dtype]}: "
            given = x.clone()
            with without(l18_gpt.quantize, fp8.quantize, formats.scale_for):
                result = due(answer(given, dtype))
            if not isinstance(result, tuple | list) or len(result) != 2:
                raise Hint(
                    "return two things, the 8-bit tensor and the scale, not "
                    f"{type(result).__name__}"
                )
            q, scale = due(*result)
            refuse({"`x` has changed: work on a new tensor": not torch.equal(given, x)}, case)
            tensor(q, x.shape, what=f"{case}the first result is")
            tensor(scale, what=f"{case}the scale is")
            mistakes = {
                f"the first result is {q.dtype}, expected is {dtype}": q.dtype != dtype,
                f"the scale has the shape {list(scale.shape)}, expected is one number for the "
                "whole tensor": scale.shape != (),
                f"the scale is {scale.dtype}, expected is float32": scale.dtype != torch.float32,
            }
            refuse(mistakes, case)
            if x.any():
                _check_end_of_range(case, x, dtype, scale.item())
                _check_scaled(case, x, q, scale.item())
            else:
                _check_zeros(case, q.float(), scale.item())


def _check_end_of_range(case: str, x: Tensor, dtype: torch.dtype, found: float) -> None:
    """The scale makes the largest number that of the format."""
    largest = torch.finfo(dtype).max
    largest_of_other = torch.finfo(E4M3 if dtype == E5M2 else E5M2).max
    amax = x.abs().max().item()
    truth = largest / amax
    mistakes = {
        "this is the factor for the way back: which one makes amax the largest?": 1 / truth,
        "a negative number can be the largest by its size": largest / x.max().item(),
        "then the largest number becomes 1, and not the largest of the format": 1 / amax,
        "this is the largest number of the other format: `dtype` says which one to take": (
            largest_of_other / amax
        ),
        "was it computed in a narrow dtype?": distance(found, truth) < 1e-2,
    }
    case += f"the scale is {found:.8g}, expected is {truth:.8g}: "
    diagnose(case, found, truth, mistakes, f"{largest:g} / amax", tolerance=1e-5)


def _check_scaled(case: str, x: Tensor, q: Tensor, scale: float) -> None:
    largest = torch.finfo(q.dtype).max
    truth = (x.float() * scale).clamp(-largest, largest).to(q.dtype).float()
    wrong = (q.float() != truth).nonzero()
    if len(wrong):
        first = tuple(wrong[0].tolist())
        raise Hint(
            f"{case}at {list(first)} it is {q.float()[first].item():g}, expected is "
            f"{truth[first].item():g}: is x multiplied by the scale, in float32?"
        )


# ---- 18.6

# {name: (length, largest, margin, the amax of each step)}
HISTORIES: dict[str, tuple[int, float, int, list[float]]] = {
    "one amax after the other": (3, 448.0, 0, [2.0, 1.0, 4.0, 1.0, 1.0, 1.0, 0.5, 1.0]),
    "a jump": (4, 448.0, 0, [1.0, 1.0, 8.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
    "e5m2 and a margin of 2": (3, 57344.0, 2, [0.5, 3.0, 0.25, 0.25, 0.25, 0.25, 1.0]),
    "a history of one step": (1, 448.0, 0, [2.0, 4.0, 1.0, 1.0]),
    "zeros first": (2, 448.0, 0, [0.0, 0.0, 2.0, 0.0, 0.0, 0.0, 1.0]),
    "an amax that is inf": (2, 448.0, 0, [2.0, math.inf, math.inf, 4.0, 1.0, 1.0, 1.0]),
    "an amax that is nan": (2, 448.0, 0, [2.0, math.nan, math.nan, 4.0, 1.0, 1.0, 1.0]),
    "bad steps after a large amax": (2, 448.0, 0, [8.0, 1.0, math.inf, math.nan, 1.0, 1.0]),
    "a margin of 3": (2, 448.0, 3, [1.0, 0.5, 0.25, 1.0]),
    "tiny amaxes": (2, 448.0, 0, [1e-5, 1e-12, 1e-12, 1.0]),
}
LOOP = "does your loop end?"


def delayed(answer: Callable[..., Any]) -> None:
    """The learner's class `DelayedScaling(length, largest, margin)`."""
    one = due(answer(3, 448.0))
    other = answer(3, 448.0)
    _check_scale_of("before the first record: ", other, [], 3, 448.0, margin=0)
    bounded(LOOP, one.record, 7.0)
    shared = "two objects share one history: every tensor needs its own, made in __init__"
    refuse({shared: other.scale() != 1})
    for name, (length, largest, margin, amaxes) in HISTORIES.items():
        own = answer(length, largest, margin)
        for step, amax in enumerate(amaxes):
            case = f"{name}, step {step}, amaxes so far {amaxes[:step]}, length {length}: "
            _check_scale_of(case, own, amaxes[:step], length, largest / 2**margin, margin)
            bounded(LOOP, own.record, amax)


def _check_scale_of(
    case: str, own: Any, amaxes: Sequence[float], length: int, largest: float, margin: int
) -> None:
    """Its scale is that of a history.

    Args:
        case: What a hint begins with.
        own: The learner's object.
        amaxes: What was recorded, oldest first.
        length: Length of the history.
        largest: Where the largest amax of the history is to land, the margin below the end.
        margin: Margin in powers of two.
    """
    try:
        found = due(own.scale())
    except ZeroDivisionError:
        raise Hint(f"{case}a division by 0: what is the scale then?") from None
    if not isinstance(found, int | float):
        raise Hint(f"{case}scale() returned {found!r}, not a number")
    asked_twice = f"scale() asked twice gives {found:g} and then another number: it only looks"
    refuse({asked_twice: not math.isnan(found) and own.scale() != found}, case)
    newest_first = [amax for amax in reversed(amaxes) if math.isfinite(amax)]
    truth = _scale_for(newest_first[:length], largest)
    mistakes = {
        "One bad step must not be remembered": math.isnan(found) or found == 0,
        "A bad step is not recorded: it takes no place in the history": (
            len(newest_first) < len(amaxes)
        ),
        "Without a history, or with zeros alone, the scale is 1": not any(newest_first[:length]),
        f"Amaxes older than {length} steps no longer count": _scale_for(newest_first, largest),
        f"The history is one step too short: {length} steps count": (
            _scale_for(newest_first[: length - 1], largest)
        ),
        "The largest of the history counts, not the newest": (
            _scale_for(newest_first[:1], largest)
        ),
        "A margin is to leave room: does it make the scale smaller?": truth * 4.0**margin,
        "Where is the margin?": truth * 2.0**margin,
        "This is the factor for the way back": 1 / truth,
        f"A margin of {margin} leaves room for {2**margin} times as much": margin > 0,
    }
    case += f"scale() is {found:g}, expected is {truth:g}. "
    otherwise = "Compare with the formula of section 6"
    diagnose(case, found, truth, mistakes, otherwise, tolerance=1e-6)


def _scale_for(history: Sequence[float], largest: float) -> float:
    return largest / max(history) if any(history) else 1.0


# ---- 18.7

SCALES = "it is {times:.3g} times as large as it should be: which scales are left in it?"
ONCE = 1e-5  # float32, added in another order, and rounded to the result's dtype once


def _dequantized(x: Tensor, dtype: torch.dtype) -> Tensor:
    q, scale = l18_gpt.quantize(x, dtype)
    return q.float() / scale


def linear(answer: Any) -> None:
    """The learner's `Fp8Linear`, an autograd.Function applied as `apply(x, weight)`."""
    due(answer)
    cases = {
        "": ((6, 8), torch.float32),
        "with x of three dims, ": ((2, 3, 8), torch.float32),
        "with x of four dims in bfloat16, ": ((2, 2, 3, 8), torch.bfloat16),
    }
    for case, (shape, dtype) in cases.items():
        generator = torch.Generator().manual_seed(11)
        x = torch.randn(shape, generator=generator).to(dtype).requires_grad_()
        weight = (0.3 * torch.randn(5, 8, generator=generator)).requires_grad_()
        dy = (1e-4 * torch.randn(*shape[:-1], 5, generator=generator)).to(dtype)
        kept: list[Tensor] = []
        output = due(_applied(answer, x, weight, kept))
        tensor(output, dy.shape, what=f"{case}y is")
        _check_product(case, x, weight, output)
        with _EightBits() as seen:
            _run_backward(case, output, dy)
        _check_gradients(case, x, weight, dy)
        num_casts = seen.calls.count(("_to_copy", E5M2))
        text = f"dy is cast to e5m2 {num_casts} times, and once is enough for both products"
        refuse({text: num_casts > 1}, case)
        _check_eight_bits_kept(case, kept, output, x.numel() + weight.numel())
    _inside_a_network(answer)


def _applied(answer: Any, x: Tensor, weight: Tensor, kept: list[Tensor]) -> Any:
    def note(saved: Tensor) -> Tensor:
        kept.append(saved)
        return saved

    finished = (l18_gpt._Fp8Linear.forward, fp8.Fp8Product.__call__)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved), without(*finished):
        return answer.apply(x, weight)


def _check_product(case: str, x: Tensor, weight: Tensor, output: Tensor) -> None:
    """The product of two operands in e4m3, summed in float32."""
    mistakes = {
        f"y is {output.dtype}, expected is {x.dtype}, as x is": output.dtype != x.dtype,
        "the output has no graph": not output.requires_grad,
    }
    refuse(mistakes, case)
    full_x = x.detach().float()
    full_w = weight.detach()
    x8 = _dequantized(x, E4M3)
    w8 = _dequantized(weight, E4M3)
    both_wide = _dequantized(x, E5M2) @ _dequantized(weight, E5M2).T
    truth = (x8 @ w8.T).to(x.dtype)
    off = distance(output, truth)
    mistakes = {
        "these are the numbers of a product in full precision: are both operands quantised?": (
            full_x @ full_w.T
        ),
        "is x quantised?": full_x @ w8.T,
        "is the weight quantised?": x8 @ full_w.T,
        "forward takes e4m3 for both operands": both_wide,
        SCALES: times(truth),
        f"it is rounded more than once: what is computed in {x.dtype}, and not in float32?": (
            x.dtype != torch.float32 and off < 1e-2
        ),
    }
    otherwise = "it is not the product of the two quantised operands"
    diagnose(f"{case}y is not right: ", output, truth, mistakes, otherwise, tolerance=ONCE)


def _run_backward(case: str, output: Tensor, dy: Tensor) -> None:
    try:
        output.backward(dy)
    except RuntimeError as error:
        place, is_shape, _ = str(error).partition("expected shape")
        text = (
            f"a gradient has another shape than what it belongs to ({place.strip()[:90]}): dx has "
            "the shape of x, dW that of weight"
        )
        refuse({text: is_shape}, case)
        raise


def _check_gradients(case: str, x: Tensor, weight: Tensor, dy: Tensor) -> None:
    """Both products of backward have operands of 8 bits."""
    if x.grad is None or weight.grad is None:
        raise Hint(f"{case}{'x' if x.grad is None else 'the weight'} got no gradient")
    full_x = x.detach().float().flatten(0, -2)
    full_w = weight.detach()
    full_dy = dy.float().flatten(0, -2)
    x8 = _dequantized(full_x, E4M3)
    w8 = _dequantized(full_w, E4M3)
    dy8 = _dequantized(full_dy, E5M2)
    finer_dy = _dequantized(full_dy, E4M3)
    otherwise = "see its formula in the table of section 7"

    truth = (dy8 @ w8).to(x.dtype)
    mistakes = {
        "dy is not quantised": full_dy @ w8,
        "the weight is not quantised": dy8 @ full_w,
        "neither operand is quantised": full_dy @ full_w,
        "dy is in e4m3, expected is e5m2": finer_dy @ w8,
        SCALES: times(truth),
    }
    found = x.grad.flatten(0, -2)
    diagnose(f"{case}dx is not right: ", found, truth, mistakes, otherwise, tolerance=ONCE)

    truth = dy8.T @ x8
    mistakes = {
        "dy is not quantised": full_dy.T @ x8,
        "x is not quantised": dy8.T @ full_x,
        "neither operand is quantised": full_dy.T @ full_x,
        "dy is in e4m3, expected is e5m2": finer_dy.T @ x8,
        SCALES: times(truth),
    }
    diagnose(f"{case}dW is not right: ", weight.grad, truth, mistakes, otherwise, tolerance=ONCE)


def _check_eight_bits_kept(case: str, kept: Sequence[Tensor], output: Tensor, enough: int) -> None:
    """What is kept for backward are `enough` numbers of 8 bits, and scales."""
    everything = [*kept, *_attributes(output.grad_fn)]
    for one in everything:
        if one.numel() > 4 and one.element_size() > 1:
            raise Hint(
                f"{case}a {one.dtype} tensor of shape {list(one.shape)} is kept for backward: the "
                "8-bit tensors are all that it needs"
            )
    numbers = sum(one.numel() for one in kept if one.element_size() == 1)
    mistakes = {
        f"{numbers} 8-bit numbers are kept, and x and the weight have {enough}": numbers > enough,
        f"{numbers} 8-bit numbers are kept by ctx.save_for_backward, and the two products of "
        f"backward need those of x and of the weight: {enough}. Are tensors kept as attributes of "
        "ctx?": numbers < enough,
    }
    refuse(mistakes, case)


def _attributes(ctx: Any) -> list[Tensor]:
    """The tensors that were kept as attributes of ctx, the function's node in the graph."""
    return [one for one in tree_leaves(vars(ctx)) if isinstance(one, Tensor)]


def _inside_a_network(answer: Any) -> None:
    """Where x and the weight are no leaves, and where x needs no gradient."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(4, 8, generator=generator)
    weight = torch.randn(5, 8, generator=generator, requires_grad=True)
    answer.apply(x, weight * 1.0).square().sum().backward()
    if weight.grad is None or not weight.grad.any():
        raise Hint("with x that needs no gradient, the weight got none either")


# ---- 18.8

COUNTS = (5, 1, 3)  # tensors in the list
ORDER = 1e-6  # float32, added in another order


def reduce_amaxes(answer: Callable[..., Any], ranks: Ranks | None = None) -> str:
    """The learner's `reduce_amaxes(amaxes, group)`."""
    ours = own_answers(fp8.reduced_amaxes)
    for count in COUNTS:
        judge = partial(_check_reduced, count=count)
        outcome = in_groups(_reduce, answer, count, judge=judge, ours=ours)
    return confirm_in_group(ranks, outcome, _reduce, answer, count)


def _reduce(group: dist.ProcessGroup, answer: Callable[..., Any], count: int) -> Tensor:
    """The amaxes that come back of a list, as one tensor."""
    own = _amaxes(group.size(), count)[group.rank()]
    given = [amax.clone() for amax in own]
    found = due(answer(given, group))
    mistakes = {
        "the tensors that were given have changed: they are the amaxes of this rank": (
            not torch.equal(torch.stack(given), own)
        ),
    }
    refuse(mistakes)
    return _in_one_tensor(found, count)


def _amaxes(num_ranks: int, count: int) -> Tensor:
    """A row for each rank, with one amax of each tensor; the largest one lies on any rank."""
    generator = torch.Generator().manual_seed(count)
    return torch.rand(num_ranks, count, generator=generator) * 10


def _in_one_tensor(found: Any, count: int) -> Tensor:
    sequence(found, f"a list of {plural(count, 'tensor')}")
    if len(found) != count:
        raise Hint(f"{plural(len(found), 'amax')} came back for {plural(count, 'tensor')}")
    return torch.stack([torch.as_tensor(value).float().reshape(()) for value in found])


def _check_reduced(
    results: list[Tensor], outcome: Outcome, members: Sequence[int], count: int
) -> None:
    """The largest of the group for each tensor, by one collective."""
    of_ranks = _amaxes(len(members), count)
    otherwise = "these are not the largest amaxes over the group, in the order of the list"
    for place, rank in enumerate(members):
        case = f"on rank {rank}: "
        calls = outcome.of(rank)
        refuse(careless(calls), case)
        mistakes = {
            "these are the sums over the ranks, expected is the largest": of_ranks.sum(0),
            "these are the means over the ranks, expected is the largest": of_ranks.mean(0),
            "these are the amaxes of this rank alone: nothing of the others has come in": (
                of_ranks[place]
            ),
            "this is one number for all tensors: each tensor keeps an amax of its own": (
                of_ranks.max().expand(count)
            ),
        }
        diagnose(case, results[place], of_ranks.amax(0), mistakes, otherwise, tolerance=ORDER)
        refuse({"no collective was called": not calls, **several(calls, count)}, case)


# ---- 18.9


class _Weight(NamedTuple):
    """A weight; each rank has some of its rows.

    Args:
        rows: Number of rows of each rank.
        columns: Number of columns, the same on all.
        size: Rough size of its numbers.
        dtype: Dtype of the shards.
    """

    rows: int
    columns: int
    size: float
    dtype: torch.dtype


class _Gathered(NamedTuple):
    """What one rank returned.

    Args:
        whole: The whole weight in e4m3, as float32.
        scale: Scale of the numbers.
    """

    whole: Tensor
    scale: float


WEIGHTS = (
    _Weight(8, 6, 1.0, torch.float32),
    _Weight(1, 5, 1.0, torch.float32),
    _Weight(2, 3, 0.0, torch.float32),
    _Weight(3, 7, 1e-8, torch.float32),
    _Weight(5, 8, 1.0, torch.bfloat16),
)
LARGEST = 448.0  # of e4m3
SPARE_BYTES = 64  # amaxes may travel in another way
MOST_OTHERS = 0.03  # of numbers may lie at a tie, and fall to its other side


def gather_fp8(answer: Callable[..., Any], ranks: Ranks | None = None) -> str:
    """The learner's `gather_fp8(shard, group)`."""
    for weight in WEIGHTS:
        judge = partial(_check_gathered, weight=weight)
        outcome = in_groups(_gather, answer, weight, judge=judge)
    return confirm_in_group(ranks, outcome, _gather, answer, weight)


def _gather(group: dist.ProcessGroup, answer: Callable[..., Any], weight: _Weight) -> _Gathered:
    shards = _shards(group.size(), weight)
    own = shards[group.rank()]
    given = own.clone()
    found = due(answer(given, group))
    refuse({"the shard that was given has changed": not torch.equal(given, own)})
    return _gathered(found, torch.cat(shards).shape)


def _shards(num_ranks: int, weight: _Weight) -> list[Tensor]:
    """Rows of each rank; each rank's are several times as large as those of the one before."""
    generator = torch.Generator().manual_seed(weight.rows)
    shards = []
    for rank in range(num_ranks):
        size = weight.size * 4.0 ** ((rank + 1) % num_ranks)
        ordinary = torch.randn(weight.rows, weight.columns, generator=generator)
        shards.append((size * ordinary).to(weight.dtype))
    if weight.rows == 1:
        shards[0].zero_()  # a rank whose rows are zeros has the scale of the others
    return shards


def _gathered(found: Any, shape: torch.Size) -> _Gathered:
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise Hint("return two things, the whole 8-bit tensor and its scale")
    whole, scale = due(*found)
    tensor(whole, shape, what="the first result is")
    found_scale = torch.as_tensor(scale)
    mistakes = {
        f"the whole tensor is {whole.dtype}, expected is {E4M3}": whole.dtype != E4M3,
        "expected is one scale, for the whole tensor": found_scale.numel() != 1,
    }
    refuse(mistakes)
    return _Gathered(whole.float(), found_scale.item())


def _check_gathered(
    results: list[_Gathered], outcome: Outcome, members: Sequence[int], weight: _Weight
) -> None:
    """On each rank what one process gets, by about one byte for each number."""
    shards = _shards(len(members), weight)
    enough = torch.cat(shards).numel() + 4  # the amax in float32
    for place, rank in enumerate(members):
        case = f"on rank {rank}: "
        calls = outcome.of(rank)
        refuse(careless(calls), case)
        found = results[place]
        if weight.size == 0:
            _check_zeros(f"{case}the whole weight is zeros: ", found.whole, found.scale)
        else:
            _check_the_scale(case, found, shards, place)
            _check_cast_once(case, found, shards)
        moved = sum(call.num_bytes for call in calls)
        too_many = (
            f"{moved} bytes travel and {enough} are enough: in which dtype is the shard when it "
            "is sent?"
        )
        refuse({too_many: moved > 1.25 * enough + SPARE_BYTES}, case)


def _scale_of(x: Tensor) -> float:
    return LARGEST / max(x.abs().max().item(), 1e-30)


def _of_dtype(shards: Sequence[Tensor]) -> str:
    dtype = shards[0].dtype
    return "" if dtype == torch.float32 else f"with shards in {dtype}, "


def _check_the_scale(case: str, found: _Gathered, shards: Sequence[Tensor], place: int) -> None:
    scale = _scale_of(torch.cat(list(shards)))
    mistakes = {
        f"the scale {found.scale:g} is that of this rank's shard: the largest number may lie on "
        "another rank": _scale_of(shards[place]),
        "the scale is upside down: it multiplies before the cast": 1 / scale,
        "that is the scale of the sum of all amaxes: by which operation do they become one?": (
            LARGEST / sum(max(part.abs().max().item(), 1e-30) for part in shards)
        ),
    }
    otherwise = (
        f"{_of_dtype(shards)}the scale is {found.scale:.6g}, expected is {scale:.6g}: 448 / amax "
        "of the whole tensor, in float32"
    )
    diagnose(case, found.scale, scale, mistakes, otherwise, tolerance=1e-4)


def _check_cast_once(case: str, found: _Gathered, shards: Sequence[Tensor]) -> None:
    exact = torch.cat(list(shards)).float()
    once = (exact * _scale_of(exact)).clamp(-LARGEST, LARGEST).to(E4M3).float()
    off = (found.whole / found.scale - exact).abs() / exact.abs().max()
    wrong_rows = []
    for number, part in enumerate(off.chunk(len(shards))):
        if not part.max() < 0.04:  # nan is wrong, too
            wrong_rows.append(number)
    lost = (found.whole - once).abs() > 0.15 * once.abs() + 2**-8
    others = (found.whole != once).float().mean().item()
    as_numbers = once.to(E4M3).to(torch.uint8)
    converted = [as_numbers.to(E4M3).float(), as_numbers.view(E4M3).float()]
    mistakes = {
        "`.to(torch.uint8)` converts the numbers: which call keeps their bytes?": (
            others > MOST_OTHERS and any(_mostly(found.whole, other) for other in converted)
        ),
        f"the rows of the rank with number {min(wrong_rows, default=None)} are wrong after "
        "dequantising: with which scale were they cast there, and do the parts stand in the order "
        "of the ranks?": bool(wrong_rows),
        "small numbers are lost: were the shards cast before they were scaled?": bool(lost.any()),
        f"{_of_dtype(shards)}{others:.0%} of the numbers are others than those of one process that "
        "casts the whole weight: are they rounded more than once?": others > MOST_OTHERS,
    }
    refuse(mistakes, case)


def _mostly(found: Tensor, other: Tensor) -> bool:
    """Whether nine of ten numbers are the same; nan is nan."""
    same = (found == other) | (found.isnan() & other.isnan())
    return same.float().mean().item() > 0.9


# ---- 18.10

BOUNDS = (0.5, 0.25, 0.05, 0.03, 0.005, 0.0)


def choose(answer: Callable[..., Any]) -> None:
    """The learner's `choose(x, options, most_error)`."""
    for name, x in _to_choose_for().items():
        for most_error in BOUNDS:
            case = f"{name}, at most {most_error:g}: "
            _check_chosen(case, _chosen(answer, x, l18_gpt.OPTIONS, most_error), x, most_error)
    x = l18_gpt.cases()["ordinary numbers"]
    renamed = {f"format {name}": option for name, option in reversed(l18_gpt.OPTIONS.items())}
    found = _chosen(answer, x, renamed, 0.03)
    if str(found) not in renamed:
        raise Hint(
            f"with options of other names it returned {found!r}: it must be a name in `options`"
        )
    _check_chosen(
        "with the options in another order: ", found.removeprefix("format "), x, most_error=0.03
    )


def _chosen(
    answer: Callable[..., Any], x: Tensor, options: Mapping[str, l18_gpt.Option], most_error: float
) -> Any:
    with without(l18_gpt.cheapest):
        found = answer(x.clone(), dict(options), most_error)
    if found is ...:
        raise NotImplementedError("exercise")
    return found


def _to_choose_for() -> dict[str, Tensor]:
    cases = l18_gpt.cases()
    ruined = cases["ordinary numbers"].clone()
    ruined[3, 5] = math.nan
    every_third = torch.arange(512) % 3 == 0
    some_zeros = cases["ordinary numbers"] * every_third
    # a block has a single number here: who leaves the zeros out makes other blocks
    first_of_block = torch.arange(512) % 16 == 0
    alone = cases["40 powers of two"].T.reshape(64, 512) * first_of_block
    whole = {
        **cases,
        "two of three are zeros": some_zeros,
        "one of sixteen is no zero": alone,
        "a nan among them": ruined,
    }
    return {name: x[:16] for name, x in whole.items()}


def _check_chosen(case: str, found: Any, x: Tensor, most_error: float) -> None:
    """The cheapest that is good enough; None if there is none."""
    options = l18_gpt.OPTIONS
    best = l18_gpt.cheapest(x, most_error)
    case += f"it returned {found!r}, "
    if best is None:
        refuse({"and no format is good enough": found is not None}, case)
        return
    mistakes = {
        f"and {best} is good enough": found is None,
        f"expected is one of {', '.join(options)}": str(found) not in options,
    }
    refuse(mistakes, case)
    error = l18_gpt.relative_error(x, options[found].cast(x))
    bits = options[found].bits
    enough = options[best].bits
    mistakes = {
        f"whose error is {error:.3g}": not error <= most_error,  # as that of nan
        f"with {bits:g} bits, and {enough:g} are enough": bits > enough,
        f"whose error is {error:.3g} by the mean of |x̂ - x| / |x|; {best} has as many bits and "
        f"{l18_gpt.relative_error(x, options[best].cast(x)):.3g}": found != best,
    }
    refuse(mistakes, case)


EXERCISES = {
    **l18_float16.EXERCISES,
    "18.1": Exercise(
        check=spacing,
        praise="right for every size, the subnormal numbers and zero as well",
        hints=(
            "2^e is the power of two at or below |x|. frexp's f is below 1: how much larger than e "
            "is its n?",
            "Below 2^(smallest exponent) the spacing stays what it is there. Which function of "
            "Python takes the larger of two numbers?",
        ),
    ),
    "18.4": Exercise(
        check=cast,
        praise="equal to PyTorch's cast in every bit of 130,000 numbers",
        hints=(
            "Exercise 18.1 has the spacing of one number. torch.frexp gives the n of all of them, "
            "and `.clamp(min=...)` takes the larger of two.",
            "Divide by the spacing, torch.round, multiply by it. Both are powers of two, so these "
            "steps themselves round nothing.",
            "torch.round takes the even one of two that are equally near. What does the end of the "
            "range need?",
        ),
    ),
    "18.5": Exercise(
        check=quantize,
        praise="the largest number lands at the end of the range, of either format",
        hints=(
            "`amax` is the largest absolute value. What is its scale, in the words of section 5?",
            "torch.where(condition, a, b) chooses between two tensors without an `if`.",
            "Is the scale computed in float32, also for a tensor in bfloat16?",
        ),
    ),
    "18.6": Exercise(
        check=delayed,
        praise="the past decides, for as many steps as are remembered, and a bad step leaves none",
        hints=(
            "A list is enough for the history. `max(list, default=0.0)` works for an empty one.",
            "`list[-length:]` are its last entries.",
            "math.isfinite(amax) is False for inf and nan.",
        ),
    ),
    "18.7": Exercise(
        check=linear,
        praise="three products of 8-bit operands, and 8-bit tensors are all that is kept",
        hints=(
            "Begin with x of two dims: quantise x and weight, dequantise, multiply. Then let "
            "`x.reshape(-1, x.shape[-1])` make two dims of any number.",
            "The table of section 7 has the three formulas. Which of the three operands does "
            "backward not have yet?",
            "backward returns one gradient for each argument of forward beside ctx, with the shape "
            "and dtype of that argument.",
        ),
    ),
    "18.8": Exercise(
        check=reduce_amaxes,
        praise="the largest of the group for each tensor, in a single collective",
        hints=(
            "An all-reduce takes one tensor. torch.stack makes one of many; what does its result "
            "need afterwards?",
            "dist.all_reduce has an argument `op`. Which operation keeps the larger of two?",
        ),
    ),
    "18.9": Exercise(
        check=gather_fp8,
        praise="one byte for each weight, and one scale that all ranks share",
        hints=(
            "The scale must be known before the cast, and it is that of the whole tensor.",
            "`q.view(torch.uint8)` are the same bytes under another dtype; "
            "`.view(torch.float8_e4m3fn)` is the way back.",
            "Which list of empty tensors does dist.all_gather fill, and how long is it?",
        ),
    ),
    "18.10": Exercise(
        check=choose,
        praise="the cheapest that is good enough, for every kind of tensor",
        hints=(
            "Go through all options, and keep the best so far: fewest bits, then the least error.",
            "`x[x != 0]` are the numbers that are not zero. Of none of them the mean is nan: what "
            "should the error be then?",
            "A comparison with nan is False. What does your loop do with one?",
        ),
    ),
}
