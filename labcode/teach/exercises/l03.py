"""Checks of lesson 03, one device, fast. The text of each assertion is a hint."""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from labcode.models import gpt
from labcode.teach.check import Exercise, due
from labcode.teach.exercises.on_ranks import without
from labcode.teach.labs import l03_by_hand, l03_race
from labcode.teach.labs.l03_by_hand import Batch, Scaler
from labcode.teach.labs.l03_race import Settings
from labcode.teach.labs.l03_step import CHARACTERS, new_model, operations

EXERCISES = {
    "3.1": Exercise(
        "it is the same from one power of two to the next, and then it doubles",
        hints=(
            "between 2**e and 2**(e + 1) lie 2**fraction_bits numbers, evenly",
            "which e is it for x = 0.3? `math.log2(0.3)` is -1.7, and 0.3 lies above 2**-2",
        ),
    ),
    "3.2": Exercise(
        "it finds the largest scale that works, and comes down when that becomes too large",
        hints=(
            "a gradient that has overflowed is inf; a difference of two of them is NaN. One "
            "method of a tensor knows both",
            "`good_steps` counts good steps in a row: what are the two moments at which it "
            "begins again?",
        ),
    ),
    "3.3": Exercise(
        "scale, unscale, look, clip, step: the same weights as in float32, to three digits",
        hints=(
            "the loss of a micro-batch counts 1/m, as in gradient accumulation in any dtype",
            "`max_norm` is meant for the true gradients: what are they at that moment?",
            "what must not happen if a gradient is not finite, and what must happen all the same?",
        ),
    ),
    "3.4": Exercise(
        "the weights of torch.optim.AdamW, with as many calls for 100 tensors as for one",
        hints=(
            "write it for one tensor first, in place: `mul_`, `lerp_`, `addcmul_`, `addcdiv_`; "
            "then put `torch._foreach_` before each name",
            "`torch._foreach_sqrt` without the last underscore gives a new list: which of the "
            "tensors must stay as they are?",
        ),
    ),
    "3.5": Exercise(
        "at the target in less than a third of the time, and you knew how much it would be",
        hints=(
            "a time is steps times seconds for a step. Which field changes which of the two?",
            "`l03_race.steps_to_target(settings)` and `l03_race.step_seconds(one, other)` tell "
            "you both",
        ),
    ),
}

# ---- 3.1

FORMATS = {"bfloat16": (torch.bfloat16, 7), "float16": (torch.float16, 10)}
WIDE_FRACTION_BITS = 23
PLACES = (1.0, 1.5, 1.9921875, 2.0, 3.0, 0.75, 0.3125, 100.0, -6.0, 0.001953125)


def _next_up(x: float, dtype: torch.dtype) -> float:
    """The size of the next larger number of a 16-bit format, away from zero."""
    number = torch.tensor(x, dtype=dtype)
    return (number.view(torch.int16) + 1).view(dtype).double().abs().item()


def spacing(spacing: Callable[[float, int], float]) -> None:
    """The learner's `spacing(x, fraction_bits)`."""
    for name, (dtype, bits) in FORMATS.items():
        for x in PLACES:
            with without(l03_by_hand.spacing):
                found = due(spacing(x, bits))
            expected = _next_up(x, dtype) - abs(x)
            _judge_spacing(x, bits, name, float(found), expected)
    with without(l03_by_hand.spacing):
        found = due(spacing(1e-6, WIDE_FRACTION_BITS))
    _judge_spacing(1e-6, WIDE_FRACTION_BITS, "float32", float(found), 2.0**-43)


def _judge_spacing(x: float, bits: int, name: str, found: float, expected: float) -> None:
    case = f"spacing({x:g}, {bits}) is {found:.6g}: "
    if found == expected:
        return
    assert found > 0, case + "a distance is positive"
    assert not math.isclose(found, abs(x) * 2.0**-bits), (
        case + "the spacing does not grow with each x. It is the same for all x from one power of "
        "two to the next"
    )
    assert found != 2.0**-bits or abs(x) < 2, (
        case + f"that is the spacing from 1 to 2; {abs(x):g} lies above"
    )
    assert found != 2.0**-bits, case + f"that is the spacing from 1 to 2; {abs(x):g} lies below"
    ratio = found / expected
    assert ratio != 0.5, case + f"{x:g} + {found:.6g} is not a {name}: twice as much is right"
    assert ratio != 2, case + (
        f"there is a {name} between {abs(x):g} and {abs(x) + found:g}: is your power of two the "
        "one below |x|?"
    )
    raise AssertionError(
        case + f"the next {name} after {abs(x):g} is {abs(x) + expected:.9g}, which is "
        f"{expected:.6g} away"
    )


# ---- 3.2


def _params(*grads: Sequence[float] | None) -> list[nn.Parameter]:
    """Parameters with these gradients; None has none."""
    params = []
    for grad in grads:
        param = nn.Parameter(torch.ones(2 if grad is None else len(grad)))
        if grad is not None:
            param.grad = torch.tensor(grad)
        params.append(param)
    return params


def scaler(scaler_cls: Callable[..., Any]) -> None:
    """The learner's `Scaler`."""
    with without(Scaler.backward, Scaler.unscale, Scaler.update):
        _scales(scaler_cls)
        _unscales(scaler_cls)
        _finds_what_is_not_finite(scaler_cls)
        _updates(scaler_cls)


def _scales(scaler_cls: Callable[..., Any]) -> None:
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    own = scaler_cls(scale=8.0)
    loss = (weight * torch.tensor([3.0, 5.0])).sum()
    own.backward(loss)
    assert weight.grad is not None, "after backward(loss) there is no gradient: who computes it?"
    expected = torch.tensor([24.0, 40.0])
    assert not torch.equal(weight.grad, expected / 8), (
        "after backward(loss) with a scale of 8 the gradients are those of the loss: that was to "
        "be multiplied by the scale before"
    )
    assert torch.equal(weight.grad, expected), (
        f"after backward(loss) with a scale of 8 the gradients are {weight.grad.tolist()}, and 8 "
        f"times those of the loss are {expected.tolist()}"
    )
    assert loss.item() == 13, "backward changed the loss itself, which is logged: it is 13"


def _unscales(scaler_cls: Callable[..., Any]) -> None:
    own = scaler_cls(scale=8.0)
    params = _params([8.0, -16.0], None, [4.0])
    finite = own.unscale(iter(params))
    _judge_unscaled(params, [[1.0, -2.0], None, [0.5]])
    assert due(finite) is not ..., "unscale"
    assert bool(finite), "unscale says False, and all gradients were finite"
    assert own.scale == 8, f"unscale changed the scale to {own.scale:g}: that is what update is for"


def _judge_unscaled(params: list[nn.Parameter], expected: Sequence[Sequence[float] | None]) -> None:
    for number, (param, wanted) in enumerate(zip(params, expected)):
        if wanted is None:
            assert param.grad is None, "a parameter without a gradient has got one"
            continue
        assert param.grad is not None, f"the gradient of parameter {number} is gone"
        found = param.grad.tolist()
        scaled = [8 * value for value in wanted]
        assert found != scaled, (
            f"the gradient of parameter {number} is still multiplied by the scale: is the result "
            "written into `.grad`?"
        )
        assert found != [64 * value for value in wanted], "divide by the scale, do not multiply"
        assert found == list(wanted), (
            f"the gradient of parameter {number} is {found} where {list(wanted)} was due"
        )


def _finds_what_is_not_finite(scaler_cls: Callable[..., Any]) -> None:
    inf = math.inf
    cases = {
        "inf in the first gradient": ([inf, 1.0], [1.0]),
        "-inf in the first gradient": ([-inf, 1.0], [1.0]),
        "NaN in the first gradient": ([1.0, math.nan], [1.0]),
        "inf in the last gradient": ([1.0, 1.0], [inf]),
        "inf and -inf in one gradient": ([inf, -inf], [1.0]),
    }
    for what, grads in cases.items():
        params = _params(*grads)
        finite = due(scaler_cls(scale=8.0).unscale(iter(params)))
        assert not bool(finite), f"unscale says True with {what}"
    healthy = _params([0.0, 0.0], [1e30])
    assert bool(scaler_cls(scale=8.0).unscale(iter(healthy))), (
        "unscale says False for gradients of 0 and 1e29: both are finite in float32"
    )


def _updates(scaler_cls: Callable[..., Any]) -> None:
    """With a growth interval of 3: what each step says, and the scale that is due after it."""
    story = [
        (True, 8.0, "after one good step"),
        (True, 8.0, "after two good steps"),
        (True, 16.0, "after three good steps in a row, the growth interval"),
        (True, 16.0, "one good step after it had grown: it counts from the start again"),
        (True, 16.0, "two good steps after it had grown"),
        (False, 8.0, "after an overflow"),
        (True, 8.0, "one good step after an overflow: that had to begin the row anew"),
        (True, 8.0, "two good steps after an overflow"),
        (True, 16.0, "three good steps after an overflow"),
        (False, 8.0, "after an overflow"),
        (False, 4.0, "after two overflows, one behind the other"),
    ]
    own = scaler_cls(scale=8.0, growth_interval=3)
    for finite, expected, when in story:
        own.update(finite)
        found = float(due(own.scale))
        assert found == expected, (
            f"with scale=8 and growth_interval=3 the scale is {found:g} {when}; {expected:g} was "
            "due"
        )


# ---- 3.3

MAX_NORM = 0.5  # of a gradient whose norm is about 2
NO_LIMIT = 1e6  # a norm at which nothing is clipped
NUM_STEPS = 3
SMALL = {"num_layers": 1, "hidden_size": 32, "num_heads": 2}
TOLERANCE = 0.02  # of how far the weights go: float16 keeps three digits

Step = Callable[..., Any]


class _Watched(Scaler):
    """A scaler that remembers what was done with it, and when.

    Args:
        scale: To begin with.
        overflows_at: Number of the step in which a gradient is to overflow; None: of none.
    """

    def __init__(self, scale: float, overflows_at: int | None = None) -> None:
        super().__init__(scale)
        self.overflows_at = overflows_at
        self.events: list[str] = []
        self.updates = 0

    def backward(self, loss: torch.Tensor) -> None:
        """As Scaler, and an overflow where one is asked for."""
        self.events.append("backward")
        super().backward(loss * math.inf if self.updates == self.overflows_at else loss)

    def unscale(self, params: Any) -> bool:
        """As Scaler."""
        self.events.append("unscale")
        return super().unscale(params)

    def update(self, finite: bool) -> None:
        """As Scaler."""
        self.events.append("update" if finite else "backoff")
        self.updates += 1
        super().update(finite)


def _batches(step: int, count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(step)
    found = []
    for _ in range(count):
        windows = torch.randint(CHARACTERS, (2, 17), generator=generator)
        found.append((windows[:, :-1], windows[:, 1:]))
    return found


class _Run(NamedTuple):
    """What steps have done.

    Args:
        moved: How far all weights went, in one row.
        scaler: As it is afterwards.
        dtypes: Of the outputs of a linear layer.
        steps: Of the optimizer.
    """

    moved: torch.Tensor
    scaler: _Watched
    dtypes: set[torch.dtype]
    steps: int


def _run(
    train_step: Step,
    max_norm: float = MAX_NORM,
    count: int = 3,
    overflows_at: int | None = None,
    scale: float = 2.0**10,
) -> _Run:
    model = new_model(**SMALL)
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    dtypes: set[torch.dtype] = set()
    for module in model.modules():
        if isinstance(module, nn.Linear) and module is not model.head:
            module.register_forward_hook(lambda _, __, output: dtypes.add(output.dtype))
    steps = 0

    def count_step(*_: Any) -> None:
        nonlocal steps
        steps += 1

    optimizer.register_step_post_hook(count_step)
    watched = _Watched(scale, overflows_at)
    for step in range(NUM_STEPS):
        train_step(model, optimizer, watched, _batches(step, count), max_norm)
    after = nn.utils.parameters_to_vector(model.parameters()).detach()
    return _Run(after - before, watched, dtypes, steps)


def train_step(train_step: Step) -> None:
    """The learner's `train_step(model, optimizer, scaler, micro_batches, max_norm)`."""
    with without(l03_by_hand.train_step):
        own = _run(train_step, NO_LIMIT)
        clipped = _run(train_step)
    _judge_events(own.scaler.events, 3)
    assert own.steps, "the optimizer made no step"
    assert own.steps == NUM_STEPS, (
        f"{NUM_STEPS} calls made {own.steps} steps of the optimizer: one for each, after all "
        "micro-batches"
    )
    assert own.dtypes, "the model was not called"
    assert own.dtypes == {torch.float16}, (
        f"a linear layer gave {_names(own.dtypes)}, not float16: what does torch.autocast need to "
        "know, and does the model run inside of it?"
    )
    _judge_moved(own.moved, NO_LIMIT)
    _judge_moved(clipped.moved, MAX_NORM)
    with without(l03_by_hand.train_step):
        overflowed = _run(train_step, overflows_at=1)
    _judge_overflow(overflowed)


def _names(dtypes: set[torch.dtype]) -> str:
    return " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


def _judge_events(events: list[str], count: int) -> None:
    assert events, "the scaler was not used"
    per_step = len(events) / NUM_STEPS
    first = events[: int(per_step)]
    assert "backward" in first, (
        "`scaler.backward` was not called: `loss.backward()` leaves the loss as it is"
    )
    assert "unscale" in events, "the gradients were never unscaled"
    assert "update" in events, "`scaler.update` was not called: the scale would stay as it is"
    wanted = [*["backward"] * count, "unscale", "update"]
    assert events.count("backward") == count * NUM_STEPS, (
        f"{events.count('backward')} backwards for {NUM_STEPS} steps of {count} micro-batches"
    )
    assert events.count("unscale") == NUM_STEPS, (
        f"unscale was called {events.count('unscale')} times in {NUM_STEPS} steps: once for each, "
        "or gradients are divided twice"
    )
    assert events.count("update") == NUM_STEPS, (
        f"update was called {events.count('update')} times in {NUM_STEPS} steps, where all "
        "gradients were finite"
    )
    assert events == wanted * NUM_STEPS, f"in this order: {', '.join(wanted)}; yours: {first}"


def _wrong_steps() -> dict[str, Step]:
    """Steps as people write them, by what is wrong with them."""
    return {
        "the gradients are clipped before they are unscaled: a norm that is 1024 times as large "
        "is cut to max_norm, and then divided by 1024": _variant("clip first"),
        "the gradients are not clipped, or to another norm than max_norm": _variant("no clip"),
        "the losses of the micro-batches are added; their mean was due": _variant("sum"),
    }


def _variant(what: str) -> Step:
    def step(
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: Scaler,
        micro_batches: Sequence[Batch],
        max_norm: float,
    ) -> None:
        optimizer.zero_grad()
        for tokens, targets in micro_batches:
            with torch.autocast("cpu", dtype=torch.float16):
                loss = gpt.loss(model(tokens), targets)
            scaler.backward(loss if what == "sum" else loss / len(micro_batches))
        if what == "clip first":
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        finite = scaler.unscale(model.parameters())
        if what not in ("clip first", "no clip"):
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        scaler.update(finite)

    return step


def _judge_moved(moved: torch.Tensor, max_norm: float) -> None:
    expected = _run(l03_by_hand.train_step, max_norm).moved
    if _is_close(moved, expected):
        return
    for what, variant in _wrong_steps().items():
        assert not _is_close(moved, _run(variant, max_norm).moved), what
    ratio = (moved.norm() / expected.norm()).item()
    raise AssertionError(
        f"with max_norm={max_norm:g}, after {NUM_STEPS} steps, the weights have gone {ratio:.3g} "
        "times as far as they should: zero the gradients, backward with 1/m of each loss, unscale, "
        "clip, step"
    )


def _is_close(moved: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((moved - expected).norm() <= TOLERANCE * expected.norm())


def _judge_overflow(run: _Run) -> None:
    case = "in the second of three steps a gradient overflows: "
    assert run.scaler.updates == NUM_STEPS, (
        case + "`scaler.update` was not called after it, so the scale stays too large for ever"
    )
    assert bool(run.moved.isfinite().all()), (
        case + "the weights are inf or NaN afterwards, and nothing heals them"
    )
    assert run.scaler.scale != 2.0**8, (
        case + "it is found in the third step as well: where do the gradients of a step go?"
    )
    assert run.scaler.scale == 2.0**9, case + (
        f"the scale is {run.scaler.scale:g} afterwards, and half of {2**10} was due: does update "
        "get what unscale found?"
    )
    assert run.steps == NUM_STEPS - 1, case + (
        f"the optimizer made {run.steps} steps, and {NUM_STEPS - 1} were due"
    )


# ---- 3.4

SHAPES = ((3, 4), (5,), (2, 2, 2), (1,))
LR = 0.02
BETA1 = 0.8
BETA2 = 0.9
EPS = 1e-3
DECAY = 0.3


class _State(NamedTuple):
    """Four lists of tensors, all of the same shapes."""

    weights: list[torch.Tensor]
    grads: list[torch.Tensor]
    means: list[torch.Tensor]
    squares: list[torch.Tensor]


def _new_state(repeats: int = 1) -> _State:
    generator = torch.Generator().manual_seed(0)
    lists: list[list[torch.Tensor]] = [[], [], [], []]
    for shape in SHAPES * repeats:
        random = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
        zeros = torch.zeros(shape, dtype=torch.float64)
        for place, tensor in zip(lists, (*random.unbind(), zeros, zeros.clone())):
            place.append(tensor.clone())
    return _State(*lists)


def adamw(adamw: Callable[..., Any]) -> None:
    """The learner's `adamw(weights, grads, means, squares, step, ...)`."""
    state = _new_state()
    with without(l03_by_hand.adamw):
        for step in (1, 2, 3):
            _one_step(adamw, state, step)
            _judge_adamw(state, step)
    few, many = (_calls(adamw, repeats) for repeats in (1, 5))
    assert few == many, (
        f"{len(SHAPES)} tensors take {few} operations, and {5 * len(SHAPES)} take {many}: each "
        "`torch._foreach_` operation takes a whole list, without a loop"
    )


def _one_step(adamw: Callable[..., Any], state: _State, step: int) -> None:
    grads = [grad.clone() for grad in state.grads]
    result = adamw(*state, step, lr=LR, beta1=BETA1, beta2=BETA2, eps=EPS, decay=DECAY)
    assert result is not ..., "not done"
    for grad, before in zip(state.grads, grads):
        assert torch.equal(grad, before), (
            "the gradients have changed: an operation with an underscore at the end of its name "
            "writes into its first argument"
        )


def _calls(adamw: Callable[..., Any], repeats: int) -> int:
    state = _new_state(repeats)
    counted = operations(lambda: _one_step(adamw, state, 1))
    counted.pop("clone", None)
    counted.pop("equal", None)
    return sum(counted.values())


def _expected(step: int, **changes: Any) -> _State:
    """What is due after some steps of torch's AdamW, or of another rule."""
    state = _new_state()
    for number in range(1, step + 1):
        _plain_adamw(state, number, **changes)
    return state


def _plain_adamw(state: _State, step: int, what: str = "") -> None:
    """One tensor after another, with one mistake that people make, or none."""
    for weight, grad, mean, square in zip(*state):
        used = grad
        if what == "decay in the gradient":
            used = grad + DECAY * weight
        elif what not in ("no decay", "decay last"):
            weight *= 1 - LR * (DECAY if what != "decay without lr" else DECAY / LR)
        mean.lerp_(used, 1 - BETA1)
        square.mul_(BETA2).addcmul_(used, used, value=1 - BETA2)
        correction1 = 1.0 if what == "no correction" else 1 - BETA1**step
        correction2 = 1.0 if what == "no correction" else 1 - BETA2**step
        if what == "eps inside":
            root = (square / correction2 + EPS).sqrt()
        elif what == "eps uncorrected":
            root = (square.sqrt() + EPS) / math.sqrt(correction2)
        elif what == "no root of the correction":
            root = square.sqrt() / correction2 + EPS
        else:
            root = (square / correction2).sqrt() + EPS
        sign = -1 if what != "uphill" else 1
        weight.addcdiv_(mean, root, value=sign * LR / correction1)
        if what == "decay last":
            weight *= 1 - LR * DECAY


MISTAKES = {
    "decay in the gradient": "the decay went into the gradient, as in Adam with L2: AdamW shrinks "
    "the weight itself, by the factor 1 - lr * decay",
    "no decay": "the weights do not shrink: where is the decay?",
    "decay last": "the decay comes before the update, not after it",
    "decay without lr": "the decay is multiplied by the learning rate: 1 - lr * decay",
    "no correction": "both averages begin at 0: where are they divided by 1 - beta**step?",
    "eps inside": "eps is added to the root, not under it",
    "eps uncorrected": "eps is added to the root after that was corrected, not before",
    "no root of the correction": "under the root stands the corrected average: outside of it the "
    "correction is sqrt(1 - beta2**step)",
    "uphill": "the weights go uphill: look at the sign of the update",
}


def _judge_adamw(state: _State, step: int) -> None:
    wanted = _expected(step)
    case = f"after step {step}: "
    for name, found, due_ in zip(("means", "squares"), state[2:], wanted[2:]):
        if _differ(found, due_):
            for what in ("decay in the gradient",):
                mistaken = _expected(step, what=what)
                assert _differ(state.weights, mistaken.weights), case + MISTAKES[what]
            before = _expected(step - 1)._asdict()[name]
            assert _differ(found, before), case + (
                f"`{name}` are as before: they have to change in place"
            )
            raise AssertionError(
                case + f"the first of `{name}` begins with {_first(found)}, and {_first(due_)} was "
                "due"
            )
    if not _differ(state.weights, wanted.weights):
        return
    assert _differ(state.weights, _new_state().weights), (
        case + "the weights are as before: they have to change in place"
    )
    for what, text in MISTAKES.items():
        mistaken = _expected(step, what=what)
        assert _differ(state.weights, mistaken.weights), case + text
    raise AssertionError(
        case + f"the first weight is {_first(state.weights)}, and {_first(wanted.weights)} was due"
    )


def _first(tensors: Sequence[torch.Tensor]) -> str:
    return f"{tensors[0].flatten()[0].item():.6g}"


def _differ(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool:
    for one, other in zip(found, wanted):
        if one.shape != other.shape or not torch.allclose(one, other, rtol=1e-9, atol=1e-12):
            return True
    return False


# ---- 3.5

LEAST_SPEEDUP = 3.0
WITHIN = 2.0


def race(
    settings: Settings,
    predicted_speedup: float,
    measure: Callable[[Settings], float] = l03_race.speedup,
) -> None:
    """The learner's settings and how many times as fast as the baseline they will be.

    Args:
        settings: Of the learner.
        predicted_speedup: As the learner expects it.
        measure: How fast settings are; the tests give one that needs no clock.
    """
    settings, predicted_speedup = due(settings, predicted_speedup)
    assert isinstance(settings, Settings), (
        f"settings is {settings!r}: give l03_race.Settings(batch=..., dtype=..., ...)"
    )
    is_number = isinstance(predicted_speedup, int | float)
    assert is_number and predicted_speedup > 0, "predicted_speedup is a number such as 1.5"
    changed = copy.copy(settings) != l03_race.BASELINE
    assert changed, "these are the settings of the baseline: change some"
    found = measure(settings)
    assert found, (
        f"the loss is still above {l03_race.TARGET} after {l03_race.MOST_STEPS} steps: these steps "
        "are quick, but there are too many of them"
    )
    assert found >= LEAST_SPEEDUP, (
        f"{found:.2f} times as fast as the baseline, and {LEAST_SPEEDUP} are asked for: which "
        "field have you not tried yet?"
    )
    factor = max(found / predicted_speedup, predicted_speedup / found)
    assert factor <= WITHIN, (
        f"{found:.2f} times as fast as the baseline, fast enough; you expected "
        f"{predicted_speedup:.3g}, which is off by more than a factor of {WITHIN:g}"
    )
