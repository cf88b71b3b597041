"""Checks of lesson 18, low precision. The text of each assertion is a hint."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from labcode.pool.ranks import Ranks
from labcode.precision import formats, fp8
from labcode.teach.check import Exercise, Hint, due
from labcode.teach.exercises.expect import (
    careless,
    confirm_in_group,
    diagnose,
    in_groups,
    own_answers,
    plural,
    refuse,
    tensor,
)
from labcode.teach.exercises.in_notebook import without
from labcode.teach.exercises.simulated import Outcome
from labcode.teach.labs import l18_gpt

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
NAMES = {E4M3: "e4m3", E5M2: "e5m2"}

# ---- 18.1


def spacing(answer: Callable[..., Any]) -> None:
    """The learner's `spacing(x, fraction_bits, smallest_exponent)`."""
    formats = {"e4m3": (3, -6), "e5m2": (2, -14), "float16": (10, -14), "bfloat16": (7, -126)}
    for name, (bits, smallest) in formats.items():
        for x in _sizes(smallest):
            found = due(answer(x, bits, smallest))
            assert isinstance(found, int | float), f"return one number, not {found!r}"
            exponent = smallest
            if x != 0:
                exponent = max(smallest, math.frexp(x)[1] - 1)
            expected = 2.0 ** (exponent - bits)
            if found != expected:
                raise AssertionError(_about_spacing(name, x, bits, smallest, found, expected))


def _sizes(smallest: int) -> list[float]:
    below = math.nextafter(256.0, 0.0)  # whose logarithm is rounded to 8
    ordinary = [1.0, 1.5, 1.999, 2.0, 3.0, 20.0, 100.0, 0.3, -5.0, -0.75, below]
    low = 2.0**smallest
    return [*ordinary, low, 1.5 * low, 0.75 * low, low / 4, -low / 8, 0.0]


def _about_spacing(
    name: str, x: float, bits: int, smallest: int, found: float, expected: float
) -> str:
    case = f"{name}, x = {x:g}: it returned {found:g}, and {expected:g} is due. "
    if x == 0:
        return case + "frexp gives n = 0 for zero, but zero is smaller than every power of two"
    if abs(x) < 2.0**smallest:
        return case + (f"x is below 2^{smallest}: there the numbers do not get closer any more")
    if 255.9999 < x < 256:
        return case + "x is just below 256, and its logarithm is rounded to 8: frexp rounds nothing"
    if found == 2 * expected:
        return case + "with f below 1, is 2^n the power of two above |x| or the one below?"
    if x < 0:
        return case + "the sign of x must not count"
    return (
        case + f"which power of two is at or below {abs(x):g}, and how many steps lead to the next?"
    )


# ---- 18.2


def _dense(dtype: torch.dtype = E4M3) -> dict[str, Tensor]:
    """Numbers that show each way to round wrongly, by what they are."""
    patterns = torch.arange(256, dtype=torch.uint8).view(dtype).float()
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
    }


def cast(answer: Callable[..., Any]) -> None:
    """The learner's `to_e4m3(x)`."""
    first = due(answer(torch.tensor([21.0, 1.0])))
    assert isinstance(first, Tensor), f"return a tensor, not a {type(first).__name__}"
    assert first.dtype == torch.float32, (
        f"the result is {first.dtype}: numbers of e4m3 are due, but held in float32"
    )
    for name, x in _dense().items():
        given = x.clone()
        with without(formats.cast):
            found = answer(given)
        assert torch.equal(given, x), "the tensor that was given has changed: work on a new one"
        assert isinstance(found, Tensor), f"{name}: return a tensor"
        assert found.shape == x.shape, f"{name}: {list(x.shape)} became {list(found.shape)}"
        expected = x.to(E4M3).float()
        _of_cast(name, x, found, expected)
    _of_shapes(answer)
    nans = answer(torch.tensor([math.nan, 1.0]))
    assert nans[0].isnan() and nans[1] == 1.0, "nan must stay nan, and the number beside it 1"
    with _no_casts() as seen:
        answer(torch.tensor([21.0]))
    assert not seen, f"your code casts to {seen[0]}: use arithmetic alone here"


def _of_shapes(answer: Callable[..., Any]) -> None:
    for shape in ((2, 3, 4), (), (0,)):
        x = torch.full(shape, 21.0)
        found = answer(x)
        assert found.shape == x.shape, (
            f"a tensor of shape {list(shape)} became one of {list(found.shape)}"
        )


def _of_cast(name: str, x: Tensor, found: Tensor, expected: Tensor) -> None:
    wrong = (found != expected) | (found.isnan() & ~expected.isnan())
    if not wrong.any():
        signs = torch.signbit(found) == torch.signbit(expected)
        assert signs.all(), f"{name}: the sign of zero is lost: -0.0 is a number of its own"
        return
    place = int(wrong.nonzero()[0])
    size = abs(x[place].item())
    text = (
        f"{name}: {x[place].item():.9g} became {found[place].item():.9g}, and "
        f"{expected[place].item():.9g} is due. "
    )
    if math.isinf(size) or size > 448:
        hint = "What is too large must become the largest number"
    elif size < 2**-6 and (found[place] == x[place] or "between" not in name):
        hint = "Which spacing do numbers below 2^-6 have?"
    elif name.startswith("numbers exactly between"):
        hint = "Of two that are equally near, the even one is due"
        if (found.abs() <= x.abs()).all():
            hint += ". Or is it cut off instead of rounded?"
    else:
        hint = "Which spacing has your code at this number? Exercise 18.1 had a formula"
    raise AssertionError(text + hint)


class _no_casts(torch.overrides.TorchFunctionMode):
    """Notes 8-bit dtypes that a function is called with."""

    def __enter__(self) -> list[torch.dtype]:  # type: ignore[override]
        super().__enter__()
        self.seen: list[torch.dtype] = []
        return self.seen

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.dtype) and value in NAMES:
                self.seen.append(value)
        return func(*args, **kwargs)


# ---- 18.3


def _tensors() -> dict[str, Tensor]:
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
        for name, x in _tensors().items():
            given = x.clone()
            with without(l18_gpt.quantize, fp8.quantize, formats.scale_for):
                result = due(answer(given, dtype))
            assert isinstance(result, tuple | list) and len(result) == 2, (
                f"return two things, the 8-bit tensor and the scale, not {type(result).__name__}"
            )
            q, scale = due(*result)
            assert torch.equal(given, x), "`x` has changed: work on a new tensor"
            _of_quantized(f"{name}, {NAMES[dtype]}: ", x, dtype, q, scale)


def _of_quantized(case: str, x: Tensor, dtype: torch.dtype, q: Any, scale: Any) -> None:
    assert isinstance(q, Tensor) and isinstance(scale, Tensor), (
        f"{case}both must be tensors, these are {type(q).__name__} and {type(scale).__name__}"
    )
    assert q.dtype == dtype, f"{case}the first result is {q.dtype}, and {dtype} is due"
    assert q.shape == x.shape, f"{case}the shape {list(x.shape)} became {list(q.shape)}"
    assert scale.shape == (), (
        f"{case}the scale has the shape {list(scale.shape)}: one number for the whole tensor is due"
    )
    assert scale.dtype == torch.float32, f"{case}the scale is {scale.dtype}, not float32"
    assert scale.isfinite(), f"{case}the scale is {scale.item()}"
    largest = torch.finfo(dtype).max
    amax = x.abs().max().item()
    if amax == 0:
        assert scale.item() == 1, f"{case}the scale is {scale.item():g}, and 1 is due"
        assert (q.float() == 0).all(), f"{case}zeros must stay zeros"
        return
    expected = largest / amax
    found = scale.item()
    wrong = [
        (1 / expected, "this is the factor for the way back: which one makes amax the largest?"),
        (largest / x.max().item(), "a negative number can be the largest by its size"),
        (1 / amax, "then the largest number becomes 1, and not the largest of the format"),
        (
            torch.finfo(E4M3 if dtype == E5M2 else E5M2).max / amax,
            "this is the largest number of the other format: `dtype` says which one is due",
        ),
    ]
    if not math.isclose(found, expected, rel_tol=1e-3):
        for value, hint in wrong:
            assert not math.isclose(found, value, rel_tol=1e-3), f"{case}scale {found:g}: {hint}"
    assert math.isclose(found, expected, rel_tol=1e-3), (
        f"{case}the scale is {found:g}, and {expected:g} is due: {largest:g} / amax"
    )
    assert math.isclose(found, expected, rel_tol=1e-5), (
        f"{case}the scale is {found:.8g}, and {expected:.8g} is due: was it computed in a narrow "
        "dtype?"
    )
    should = (x.float() * found).clamp(-largest, largest).to(dtype)
    same = q.float() == should.float()
    if not same.all():
        place = tuple(int(i) for i in (~same).nonzero()[0])
        raise AssertionError(
            f"{case}at {list(place)} it is {q.float()[place].item():g} and "
            f"{should.float()[place].item():g} is due: is x multiplied by the scale, in float32?"
        )


# ---- 18.4


def delayed(answer: Callable[..., Any]) -> None:
    """The learner's class `DelayedScaling(length, largest, margin)`."""
    due(answer)
    fresh = answer(4, 448.0)
    first = due(fresh.scale())
    assert isinstance(first, int | float), f"scale() must return one number, not {first!r}"
    assert first == 1, f"before the first record the scale is {first:g}, and 1 is due"
    _follow(answer, "one amax after the other", 3, 448.0, 0, [2.0, 1.0, 4.0, 1.0, 1.0, 1.0, 0.5])
    _follow(answer, "a jump", 4, 448.0, 0, [1.0, 1.0, 8.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    _follow(answer, "e5m2 and a margin of 2", 3, 57344.0, 2, [0.5, 3.0, 0.25, 0.25, 0.25, 0.25])
    _follow(answer, "a history of one step", 1, 448.0, 0, [2.0, 4.0, 1.0])
    _follow(answer, "zeros first", 2, 448.0, 0, [0.0, 0.0, 2.0, 0.0, 0.0, 0.0])
    _follow(answer, "an amax that is inf", 2, 448.0, 0, [2.0, math.inf, math.inf, 4.0, 1.0, 1.0])
    _follow(answer, "an amax that is nan", 2, 448.0, 0, [2.0, math.nan, math.nan, 4.0, 1.0, 1.0])
    _follow(
        answer, "bad steps after a large amax", 2, 448.0, 0, [8.0, 1.0, math.inf, math.nan, 1.0]
    )
    _follow(answer, "a margin of 3", 2, 448.0, 3, [1.0, 0.5, 0.25])
    _follow(answer, "tiny amaxes", 2, 448.0, 0, [1e-5, 1e-12, 1e-12])
    one = answer(3, 448.0)
    other = answer(3, 448.0)
    one.record(7.0)
    assert other.scale() == 1, (
        "two objects share one history: every tensor needs its own, made in __init__"
    )


def _follow(
    answer: Callable[..., Any],
    case: str,
    length: int,
    largest: float,
    margin: int,
    amaxes: list[float],
) -> None:
    own = answer(length, largest, margin)
    history: list[float] = []
    for step, amax in enumerate(amaxes):
        _of_scale(case, own, history, length, largest, margin, step)
        own.record(amax)
        if math.isfinite(amax):
            history.append(amax)
    _of_scale(case, own, history, length, largest, margin, len(amaxes))


def _of_scale(
    case: str,
    own: Any,
    history: list[float],
    length: int,
    largest: float,
    margin: int,
    step: int,
) -> None:
    try:
        found = due(own.scale())
    except ZeroDivisionError:
        raise AssertionError(f"{case}: a division by 0: which scale is due then?") from None
    assert isinstance(found, int | float), f"{case}: scale() returned {found!r}, not a number"
    assert own.scale() == found, (
        f"{case}: scale() asked twice gives {found:g} and then another number: it only looks"
    )
    last = max(history[-length:], default=0.0)
    expected = largest / (2**margin * last) if last else 1.0
    if math.isclose(found, expected, rel_tol=1e-6):
        return
    text = (
        f"{case}, step {step}, amaxes so far {history}, length {length}: scale() is {found:g}, and "
        f"{expected:g} is due. "
    )
    assert not math.isnan(found) and found != 0, text + "One bad step must not be remembered"
    longer = max(history, default=0.0)
    if longer and math.isclose(found, largest / (2**margin * longer), rel_tol=1e-6):
        raise AssertionError(text + f"Amaxes older than {length} steps no longer count")
    shorter = max(history[-length + 1 :] if length > 1 else [], default=0.0)
    if shorter and math.isclose(found, largest / (2**margin * shorter), rel_tol=1e-6):
        raise AssertionError(text + f"The history is one step too short: {length} steps count")
    if history and math.isclose(found, largest / (2**margin * history[-1]), rel_tol=1e-6):
        raise AssertionError(text + "The largest of the history counts, not the newest")
    if margin and last and math.isclose(found, largest * 2**margin / last, rel_tol=1e-6):
        raise AssertionError(text + "A margin is to leave room: does it make the scale smaller?")
    if margin and last and math.isclose(found, largest / last, rel_tol=1e-6):
        raise AssertionError(text + "Where is the margin?")
    if last and math.isclose(found, 1 / expected, rel_tol=1e-6):
        raise AssertionError(text + "This is the factor for the way back")
    raise AssertionError(text + "Compare with the formula of section 4")


# ---- 18.5


def _dequantized(x: Tensor, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max
    amax = x.detach().abs().max().float()
    scale = largest / amax if amax > 0 else torch.ones(())
    return (x.detach().float() * scale).clamp(-largest, largest).to(dtype).float() / scale


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
        assert isinstance(output, Tensor), f"forward returned a {type(output).__name__}"
        _of_forward(case, x, weight, output)
        assert output.requires_grad, f"{case}the output has no graph"
        with _CastsTo(E5M2) as casts:
            try:
                output.backward(dy)
            except RuntimeError as error:
                _explain_backward(case, error)
                raise
        _of_backward(case, x, weight, dy)
        assert casts.times <= 1, (
            f"{case}dy is cast to e5m2 {casts.times} times, and once is enough for both products"
        )
        _of_kept(case, kept, output, x, weight)
    _inside_a_network(answer)


class _CastsTo(TorchDispatchMode):
    """Counts the casts to a dtype; a mode for functions would not see those in backward."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.times = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("dtype") == self.dtype:
            self.times += 1
        return func(*args, **kwargs)


def _applied(answer: Any, x: Tensor, weight: Tensor, kept: list[Tensor]) -> Any:
    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    finished = (l18_gpt._Fp8Linear.forward, fp8.Fp8Product.__call__)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), without(*finished):
        return answer.apply(x, weight)


def _explain_backward(case: str, error: RuntimeError) -> None:
    text = str(error)
    if "invalid gradient" in text or "shape" in text:
        place = text.partition("expected shape")[0].strip()
        raise AssertionError(
            f"{case}a gradient has another shape than what it belongs to ({place[:90]}): dx has "
            "the shape of x, dW that of weight"
        ) from None


def _of_forward(case: str, x: Tensor, weight: Tensor, output: Tensor) -> None:
    shape = [*x.shape[:-1], weight.shape[0]]
    assert list(output.shape) == shape, (
        f"{case}y has the shape {list(output.shape)}, and {shape} is due"
    )
    assert output.dtype == x.dtype, f"{case}y is {output.dtype}, and x is {x.dtype}"
    x8 = _dequantized(x, E4M3)
    w8 = _dequantized(weight, E4M3)
    expected = x8 @ w8.T
    if _near(output, expected, x.dtype):
        return
    exact = x.detach().float() @ weight.detach().T
    wrong = {
        "these are the numbers of a product in full precision: are both operands quantised?": exact,
        "is x quantised?": x.detach().float() @ w8.T,
        "is the weight quantised?": x8 @ weight.detach().T,
        "forward takes e4m3 for both operands": _dequantized(x, E5M2)
        @ _dequantized(weight, E5M2).T,
    }
    for hint, value in wrong.items():
        assert not _near(output, value, x.dtype), f"{case}y is not right: {hint}"
    ratio = (output.detach().float().norm() / expected.norm()).item()
    assert 0.5 < ratio < 2, (
        f"{case}y is {ratio:.3g} times as large as it should be: which scales does the product "
        "carry, and are they divided out?"
    )
    distance = (output.detach().float() - expected).abs().max() / expected.abs().max()
    assert x.dtype == torch.float32 or distance > 1e-2, (
        f"{case}y is rounded more than once: what is computed in {x.dtype}, and not in float32?"
    )
    raise AssertionError(f"{case}y is not the product of the two quantised operands")


def _of_backward(case: str, x: Tensor, weight: Tensor, dy: Tensor) -> None:
    assert x.grad is not None, f"{case}x got no gradient"
    assert weight.grad is not None, f"{case}the weight got no gradient"
    x8 = _dequantized(x, E4M3)
    w8 = _dequantized(weight, E4M3)
    dy8 = _dequantized(dy, E5M2)
    expected = {
        "dx": (x.grad, dy8 @ w8, x.dtype),
        "dW": (weight.grad, dy8.flatten(0, -2).T @ x8.flatten(0, -2), torch.float32),
    }
    full = dy.float()
    finer = _dequantized(dy, E4M3)
    others = {
        "dx": {
            "dy is not quantised": full @ w8,
            "the weight is not quantised": dy8 @ weight.detach(),
            "neither operand is quantised": full @ weight.detach(),
            "dy is in e4m3, and e5m2 is due": finer @ w8,
        },
        "dW": {
            "dy is not quantised": full.flatten(0, -2).T @ x8.flatten(0, -2),
            "x is not quantised": dy8.flatten(0, -2).T @ x.detach().float().flatten(0, -2),
            "neither operand is quantised": full.flatten(0, -2).T
            @ x.detach().float().flatten(0, -2),
            "dy is in e4m3, and e5m2 is due": finer.flatten(0, -2).T @ x8.flatten(0, -2),
        },
    }
    for name, (found, due_value, dtype) in expected.items():
        if _near(found, due_value, dtype):
            continue
        for hint, value in others[name].items():
            assert not _near(found, value, dtype), f"{case}{name} is not right: {hint}"
        ratio = (found.float().norm() / due_value.norm()).item()
        assert 0.5 < ratio < 2, (
            f"{case}{name} is {ratio:.3g} times as large as it should be: which scales are left in "
            "it?"
        )
        raise AssertionError(
            f"{case}{name} is not right: see its formula in the table of section 5"
        )


def _of_kept(case: str, kept: list[Tensor], output: Tensor, x: Tensor, weight: Tensor) -> None:
    everything = [*kept, *_attributes(output.grad_fn)]
    wide = [tensor for tensor in everything if tensor.numel() > 4 and tensor.element_size() > 1]
    assert not wide, (
        f"{case}a {wide[0].dtype} tensor of shape {list(wide[0].shape)} is kept for backward: the "
        "8-bit tensors are all that it needs"
    )
    numbers = sum(tensor.numel() for tensor in kept if tensor.element_size() == 1)
    assert numbers <= x.numel() + weight.numel(), (
        f"{case}{numbers} 8-bit numbers are kept, and x and the weight have "
        f"{x.numel() + weight.numel()}"
    )
    assert numbers == x.numel() + weight.numel(), (
        f"{case}{numbers} 8-bit numbers are kept by ctx.save_for_backward, and the two products of "
        f"backward need those of x and of the weight: {x.numel() + weight.numel()}. Are tensors "
        "kept as attributes of ctx?"
    )


def _attributes(ctx: Any) -> list[Tensor]:
    """The tensors that were kept as attributes of ctx, the function's node in the graph."""
    found = []
    for value in vars(ctx).values() if hasattr(ctx, "__dict__") else ():
        values = value if isinstance(value, tuple | list) else [value]
        found.extend(each for each in values if isinstance(each, Tensor))
    return found


def _inside_a_network(answer: Any) -> None:
    """Where x and the weight are no leaves, and where x needs no gradient."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(4, 8, generator=generator)
    weight = torch.randn(5, 8, generator=generator, requires_grad=True)
    answer.apply(x, weight * 1.0).square().sum().backward()
    assert weight.grad is not None and weight.grad.abs().max() > 0, (
        "with x that needs no gradient, the weight got none either"
    )


# ---- 18.6

COUNTS = (5, 1, 3)  # tensors in the list
ORDER = 1e-6  # float32, added in another order


def reduce_amaxes(answer: Callable[..., Any], ranks: Ranks | None = None) -> str:
    """The learner's `reduce_amaxes(amaxes, group)`."""
    ours = own_answers(fp8.reduced_amaxes)
    for count in COUNTS:
        judge = partial(_is_reduced, count=count)
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
    if not isinstance(found, list | tuple | Tensor):
        raise Hint(f"return a list of {plural(count, 'tensor')}, not {type(found).__name__}")
    if isinstance(found, Tensor) and found.ndim != 1:
        raise Hint(
            f"the result has the shape {list(found.shape)}, expected is one amax for each of "
            f"{plural(count, 'tensor')}"
        )
    if len(found) != count:
        raise Hint(f"{plural(len(found), 'amax')} came back for {plural(count, 'tensor')}")
    return torch.stack([torch.as_tensor(value).float().reshape(()) for value in found])


def _is_reduced(
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
        several = (
            f"{len(calls)} collectives for {plural(count, 'tensor')}: put all of them into one"
        )
        refuse({"no collective was called": not calls, several: len(calls) > 1}, case)


# ---- 18.7


class _Weight(NamedTuple):
    """A weight of which each rank has some rows.

    Args:
        rows: Of each rank.
        columns: Of all.
        size: Of its numbers, about.
        dtype: Of the shards.
    """

    rows: int
    columns: int
    size: float
    dtype: torch.dtype


class _Gathered(NamedTuple):
    """What one rank returned.

    Args:
        whole: The whole weight in e4m3, as float32.
        scale: Its scale.
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
        judge = partial(_is_gathered, weight=weight)
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


def _is_gathered(
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
            _is_all_zeros(case, found)
        else:
            _has_the_scale(case, found, shards, place)
            _is_cast_once(case, found, shards)
        moved = sum(call.num_bytes for call in calls)
        too_many = (
            f"{moved} bytes travel and {enough} are enough: in which dtype is the shard when it "
            "is sent?"
        )
        refuse({too_many: moved > 1.25 * enough + SPARE_BYTES}, case)


def _is_all_zeros(case: str, found: _Gathered) -> None:
    mistakes = {
        f"the whole weight is zeros: the scale is {found.scale:g}, expected is 1": (
            found.scale != 1
        ),
        "the whole weight is zeros, and zeros must stay zeros": bool(found.whole.any()),
    }
    refuse(mistakes, case)


def _scale_of(x: Tensor) -> float:
    return LARGEST / max(x.abs().max().item(), 1e-30)


def _of_dtype(shards: Sequence[Tensor]) -> str:
    dtype = shards[0].dtype
    return "" if dtype == torch.float32 else f"with shards in {dtype}, "


def _has_the_scale(case: str, found: _Gathered, shards: Sequence[Tensor], place: int) -> None:
    scale = _scale_of(torch.cat(list(shards)))
    mistakes = {
        f"the scale {found.scale:g} is that of this rank's shard: the largest number may lie on "
        "another rank": _scale_of(shards[place]),
        "the scale is upside down: it multiplies before the cast": 1 / scale,
    }
    otherwise = (
        f"{_of_dtype(shards)}the scale is {found.scale:.6g}, expected is {scale:.6g}: 448 / amax "
        "of the whole tensor, in float32"
    )
    diagnose(case, found.scale, scale, mistakes, otherwise, tolerance=1e-4)


def _is_cast_once(case: str, found: _Gathered, shards: Sequence[Tensor]) -> None:
    exact = torch.cat(list(shards)).float()
    once = (exact * _scale_of(exact)).clamp(-LARGEST, LARGEST).to(E4M3).float()
    off = (found.whole / found.scale - exact).abs() / exact.abs().max()
    wrong_rows = []
    for number, part in enumerate(off.chunk(len(shards))):
        if not part.max() < 0.04:  # nan is wrong, too
            wrong_rows.append(number)
    lost = (found.whole - once).abs() > 0.15 * once.abs() + 2**-8
    others = (found.whole != once).float().mean().item()
    mistakes = {
        f"the rows of the rank with number {min(wrong_rows, default=None)} are wrong after "
        "dequantising: with which scale were they cast there, and do the parts stand in the order "
        "of the ranks?": bool(wrong_rows),
        "small numbers are lost: were the shards cast before they were scaled?": bool(lost.any()),
        f"{_of_dtype(shards)}{others:.0%} of the numbers are others than those of one process that "
        "casts the whole weight: are they rounded more than once?": others > MOST_OTHERS,
    }
    refuse(mistakes, case)


# ---- 18.8


def choose(answer: Callable[..., Any]) -> None:
    """The learner's `choose(x, options, most_error)`."""
    for name, x in _to_choose_for().items():
        for most_error in (0.5, 0.25, 0.05, 0.03, 0.005, 1e-7, 0.0):
            expected = l18_gpt.cheapest(x, most_error)
            with without(l18_gpt.cheapest):
                found = answer(x.clone(), dict(l18_gpt.OPTIONS), most_error)
            if found is ...:
                raise NotImplementedError("exercise")
            _of_choice(name, x, most_error, expected, found)
    options = {f"format {name}": option for name, option in l18_gpt.OPTIONS.items()}
    given = dict(options)
    x = l18_gpt.cases()["ordinary numbers"]
    found = answer(x.clone(), given, 0.03)
    assert found in options, (
        f"with options of other names it returned {found!r}: it must be a name in `options`"
    )
    assert given == options, "`options` has changed: it belongs to the caller"
    backwards = dict(reversed(l18_gpt.OPTIONS.items()))
    assert answer(x, backwards, 0.03) == l18_gpt.cheapest(x, 0.03), (
        "with the options in another order another one is chosen: of two with the same bits the "
        "one with the smaller error is due"
    )


def _to_choose_for() -> dict[str, Tensor]:
    cases = l18_gpt.cases()
    ruined = cases["ordinary numbers"].clone()
    ruined[3, 5] = math.nan
    some_zeros = cases["ordinary numbers"] * (torch.arange(512) % 3 == 0)
    # a block has a single number here: who leaves the zeros out makes other blocks
    alone = cases["40 powers of two"].T.reshape(64, 512) * (torch.arange(512) % 16 == 0)
    return {
        **cases,
        "two of three are zeros": some_zeros,
        "one of sixteen is no zero": alone,
        "a nan among them": ruined,
    }


def _of_choice(name: str, x: Tensor, most_error: float, expected: str | None, found: Any) -> None:
    case = f"{name}, at most {most_error:g}: "
    if found == expected:
        return
    if expected is None:
        raise AssertionError(f"{case}it returned {found!r}, and no format is good enough")
    assert found is not None, f"{case}it returned None, and {expected} is good enough"
    assert found in l18_gpt.OPTIONS, (
        f"{case}it returned {found!r}: return one of {', '.join(l18_gpt.OPTIONS)}"
    )
    option = l18_gpt.OPTIONS[found]
    error = l18_gpt.relative_error(x, option.cast(x))
    assert error <= most_error, f"{case}it returned {found}, whose error is {error:.3g}"
    best = l18_gpt.OPTIONS[expected]
    assert option.bits <= best.bits, (
        f"{case}it returned {found} with {option.bits:g} bits, and {best.bits:g} are enough"
    )
    raise AssertionError(
        f"{case}it returned {found}, and another format with as many bits has a smaller error"
    )


def _near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Equal up to the order of sums, and to a single rounding of the result to its dtype."""
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    distance = (found.detach().float() - expected.detach().float()).abs().max().item()
    if distance > tolerance * expected.abs().max().item():
        return False
    # a sum in another order falls to the other side of a tie now and then, two roundings often do
    others = found.detach().to(dtype) != expected.detach().to(dtype)
    return dtype == torch.float32 or others.float().mean().item() <= 0.05


EXERCISES = {
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
    "18.2": Exercise(
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
    "18.3": Exercise(
        check=quantize,
        praise="the largest number lands at the end of the range, of either format",
        hints=(
            "`amax` is the largest absolute value. What is its scale, in words of section 3?",
            "torch.where(condition, a, b) chooses between two tensors without an `if`.",
            "Is the scale computed in float32, also for a tensor in bfloat16?",
        ),
    ),
    "18.4": Exercise(
        check=delayed,
        praise="the past decides, for as many steps as are remembered, and a bad step leaves none",
        hints=(
            "A list is enough for the history. `max(list, default=0.0)` works for an empty one.",
            "`list[-length:]` are its last entries.",
            "math.isfinite(amax) is False for inf and nan.",
        ),
    ),
    "18.5": Exercise(
        check=linear,
        praise="three products of 8-bit operands, and 8-bit tensors are all that is kept",
        hints=(
            "Begin with x of two dims: quantise x and weight, dequantise, multiply. Then let "
            "`x.reshape(-1, x.shape[-1])` make two dims of any number.",
            "The table of section 5 has the three formulas. Which of the three operands does "
            "backward not have yet?",
            "backward returns one gradient for each argument of forward beside ctx, with the shape "
            "and dtype of that argument.",
        ),
    ),
    "18.6": Exercise(
        check=reduce_amaxes,
        praise="the largest of the group for each tensor, in a single all-reduce",
        hints=(
            "An all-reduce takes one tensor. torch.stack makes one of many; what does its result "
            "need afterwards?",
            "dist.all_reduce has an argument `op`. Which operation keeps the larger of two?",
        ),
    ),
    "18.7": Exercise(
        check=gather_fp8,
        praise="one byte for each weight, and one scale that all ranks share",
        hints=(
            "The scale must be known before the cast, and it is that of the whole tensor.",
            "`q.view(torch.uint8)` are the same bytes under another dtype; "
            "`.view(torch.float8_e4m3fn)` is the way back.",
            "Which list of empty tensors does dist.all_gather fill, and how long is it?",
        ),
    ),
    "18.8": Exercise(
        check=choose,
        praise="the cheapest that is good enough, for every kind of tensor",
        hints=(
            "Go through all options, and keep the best so far: fewest bits, then the least error.",
            "`x[x != 0]` are the numbers that are not zero. Of none of them the mean is nan: what "
            "is due then?",
            "A comparison with nan is False. What does your loop do with one?",
        ),
    ),
}
