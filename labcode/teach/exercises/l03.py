"""Checks of lesson 03, one device, fast. The text of each assertion is a hint."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.adam import adam as adam_of_torch
from torch.optim.adamw import adamw as adamw_of_torch
from torch.overrides import TorchFunctionMode

from labcode.teach.check import Exercise, due
from labcode.teach.exercises.in_notebook import bounded, without
from labcode.teach.labs import l03_by_hand, l03_race
from labcode.teach.labs.l03_by_hand import Batch, Scaler
from labcode.teach.labs.l03_race import Settings
from labcode.teach.labs.l03_step import CHARACTERS, new_model, operations

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
            hint = f"does the loop also end for x = {x:g}?"
            with without(l03_by_hand.spacing):
                found = due(bounded(hint, spacing, x, bits))
            expected = _next_up(x, dtype) - abs(x)
            _judge_spacing(x, bits, name, float(found), expected)
    hint = "does the loop also end for x = 1e-06?"
    with without(l03_by_hand.spacing):
        found = due(bounded(hint, spacing, 1e-6, WIDE_FRACTION_BITS))
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
        _in_turn(scaler_cls)


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


def _in_turn(scaler_cls: Callable[..., Any]) -> None:
    """As a training calls them: unscale, then update with what it said."""
    own = scaler_cls(scale=2.0, growth_interval=3)
    overflows = (True, True, False, False, False, True, False, False, False)
    expected = (1.0, 0.5, 0.5, 0.5, 1.0, 0.5, 0.5, 0.5, 1.0)
    for step, (overflow, due_scale) in enumerate(zip(overflows, expected, strict=True), 1):
        before = own.scale
        finite = own.unscale(_params([math.inf if overflow else 1.0]))
        assert own.scale == before, (
            f"unscale changed the scale from {before:g} to {own.scale:g} in step {step}: that is "
            "what update is for"
        )
        own.update(bool(finite))
        found = float(due(own.scale))
        assert found == due_scale, (
            f"unscale and update in turn, with scale=2 and growth_interval=3: after step {step} "
            f"the scale is {found:g}, and {due_scale:g} was due. Does unscale change what update "
            "counts, or is a scale below 1 rounded?"
        )


# ---- 3.3

MAX_NORM = 0.5  # of a gradient whose norm is about 1
NO_LIMIT = 1e6  # a norm at which nothing is clipped
NUM_STEPS = 3
NUM_MICRO_BATCHES = 3
SCALE = 2.0**10
OVERFLOWS_AT = 1  # counted from 0
MOMENTUM = 0.5
SMALL = {"num_layers": 1, "hidden_size": 32, "num_heads": 2}
TOLERANCE = 0.02  # of how far the weights go: float16 keeps three digits
SAME_WAY = 0.999  # cosine of the angle between two gradients that differ by a factor alone
LOSSES = ("cross_entropy", "nll_loss", "log_softmax", "logsumexp")

Step = Callable[..., Any]


class _Watched(Scaler):
    """A scaler that remembers what was done with it, and when.

    Args:
        model: Whose gradients it scales.
        overflows_at: Number of the step in which a gradient is to overflow; None: of none.
    """

    def __init__(self, model: nn.Module, overflows_at: int | None = None) -> None:
        super().__init__(SCALE)
        self.model = model
        self.overflows_at = overflows_at
        self.events: list[str] = []
        self.flags: list[Any] = []  # that update was given
        self.within_autocast = False
        self.begins_with_gradients = False

    def backward(self, loss: torch.Tensor) -> None:
        """As Scaler, and an overflow where one is asked for."""
        is_first = not self.events or self.events[-1] != "backward"
        if is_first and bool(_gradient(self.model).any()):
            self.begins_with_gradients = True
        if torch.is_autocast_enabled("cpu"):
            self.within_autocast = True
        self.events.append("backward")
        super().backward(loss * math.inf if len(self.flags) == self.overflows_at else loss)

    def unscale(self, params: Any) -> bool:
        """As Scaler."""
        self.events.append("unscale")
        return super().unscale(params)

    def update(self, finite: bool) -> None:
        """As Scaler."""
        self.events.append("update")
        self.flags.append(finite)
        super().update(finite)


class _LossWatch(TorchFunctionMode):
    """Sees whether a loss is computed outside of autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.outside = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") in LOSSES and not torch.is_autocast_enabled("cpu"):
            self.outside = True
        return func(*args, **(kwargs or {}))


def _gradient(model: nn.Module) -> torch.Tensor:
    """All gradients in one row; zeros where there is none."""
    rows = []
    for param in model.parameters():
        grad = torch.zeros_like(param) if param.grad is None else param.grad
        rows.append(grad.detach().flatten())
    return torch.cat(rows)


def _batches(step: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(step)
    found = []
    for _ in range(NUM_MICRO_BATCHES):
        windows = torch.randint(CHARACTERS, (2, 17), generator=generator)
        found.append((windows[:, :-1], windows[:, 1:]))
    return found


def _is_same_data(found: Sequence[Batch], given: Sequence[Batch]) -> bool:
    if len(found) != len(given):
        return False
    for one, other in zip(found, given):
        if not torch.equal(one[0], other[0]) or not torch.equal(one[1], other[1]):
            return False
    return True


class _Run:
    """Some steps of a training, and what they have done.

    Args:
        train_step: Does one of them.
        max_norm: Of the gradients.
        overflows_at: Number of the step in which a gradient is to overflow; None: of none.

    Attributes:
        scaler: As it is afterwards.
        dtypes: Of the outputs of linear layers.
        gradients: That reached the optimizer, a row for each of its steps.
        moves: How far all weights went, a row for each call.
        clipped_late: Whether gradients became shorter after the optimizer had used them.
        changed_data: Whether the micro-batches are others after a call.
        changed_state: Whether the optimizer's momenta are others after the step that overflows.
        loss_outside: Whether a loss was computed outside of autocast.
    """

    def __init__(
        self, train_step: Step, max_norm: float = MAX_NORM, overflows_at: int | None = None
    ) -> None:
        self.model = new_model(**SMALL)
        momentum = 0.0 if overflows_at is None else MOMENTUM
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=momentum)
        self.optimizer.register_step_pre_hook(self._note_gradient)
        self.scaler = _Watched(self.model, overflows_at)
        self.dtypes: set[torch.dtype] = set()
        self.gradients: list[torch.Tensor] = []
        self.moves: list[torch.Tensor] = []
        self.clipped_late = False
        self.changed_data = False
        self.changed_state = False
        for module in self.model.modules():
            if isinstance(module, nn.Linear) and module is not self.model.head:
                module.register_forward_hook(self._note_dtype)
        with _LossWatch() as losses:
            for step in range(NUM_STEPS):
                self._one_step(train_step, step, max_norm)
        self.loss_outside = losses.outside

    @property
    def moved(self) -> torch.Tensor:
        """How far all weights went, in one row."""
        return torch.stack(self.moves).sum(dim=0)

    def _one_step(self, train_step: Step, step: int, max_norm: float) -> None:
        micro_batches = _batches(step)
        weights = self._weights()
        momenta = self._momenta()
        num_gradients = len(self.gradients)
        train_step(self.model, self.optimizer, self.scaler, micro_batches, max_norm)
        self.moves.append(self._weights() - weights)
        if not _is_same_data(micro_batches, _batches(step)):
            self.changed_data = True
        if step == self.scaler.overflows_at and not torch.equal(momenta, self._momenta()):
            self.changed_state = True
        if len(self.gradients) > num_gradients:
            left = _gradient(self.model).norm()
            if 0 < left < 0.99 * self.gradients[-1].norm():
                self.clipped_late = True

    def _weights(self) -> torch.Tensor:
        return nn.utils.parameters_to_vector(self.model.parameters()).detach().clone()

    def _momenta(self) -> torch.Tensor:
        """All momenta in one row; empty where the optimizer has none."""
        rows = [torch.zeros(0)]
        for param in self.model.parameters():
            buffer = self.optimizer.state.get(param, {}).get("momentum_buffer")
            if buffer is not None:
                rows.append(buffer.flatten())
        return torch.cat(rows)

    def _note_gradient(self, *_: Any) -> None:
        self.gradients.append(_gradient(self.model))

    def _note_dtype(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.dtypes.add(output.dtype)


def train_step(train_step: Step) -> None:
    """The learner's `train_step(model, optimizer, scaler, micro_batches, max_norm)`."""
    with without(l03_by_hand.train_step):
        free = _Run(train_step, NO_LIMIT)
        clipped = _Run(train_step)
    _judge_events(free)
    _judge_autocast(free)
    assert not free.changed_data, (
        "the micro-batches are others after a call: they are the caller's, and stay as they are"
    )
    assert not free.scaler.begins_with_gradients, (
        "the gradients of the step before are still there at the first backward of a step: where "
        "do the gradients of a step go?"
    )
    _judge_gradient(free.gradients[0])
    _judge_clipped(clipped)
    _judge_later(free, NO_LIMIT)
    _judge_later(clipped, MAX_NORM)
    with without(l03_by_hand.train_step):
        overflowed = _Run(train_step, overflows_at=OVERFLOWS_AT)
    _judge_overflow(overflowed)


def _judge_events(run: _Run) -> None:
    events = run.scaler.events
    count = NUM_MICRO_BATCHES
    assert events, "the scaler was not used"
    per_step = len(events) / NUM_STEPS
    first = events[: int(per_step)]
    assert "backward" in first, (
        "`scaler.backward` was not called: `loss.backward()` leaves the loss as it is"
    )
    assert "unscale" in events, "the gradients were never unscaled"
    assert "update" in events, "`scaler.update` was not called: the scale would stay as it is"
    if events.count("backward") == NUM_STEPS:
        assert run.gradients, "the optimizer made no step"
        assert _is_close(run.gradients[0], _due_gradient(_batches(0))), (
            f"one backward for {count} micro-batches, and its gradient is not that of their mean "
            "loss: which losses are in it?"
        )
        raise AssertionError(
            f"one backward for {count} micro-batches: the gradient is the right one, but until "
            f"then the activations of all {count} lie in memory. Micro-batches are there to save "
            "it: how many backwards does that take?"
        )
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
    wanted = [*["backward"] * count, "unscale", "update"]
    assert events == wanted * NUM_STEPS, f"in this order: {', '.join(wanted)}; yours: {first}"
    for number, flag in enumerate(run.scaler.flags, 1):
        assert bool(flag), (
            f"`scaler.update` got {flag!r} in step {number}, where all gradients were finite: does "
            "update get what unscale found?"
        )
    steps = len(run.gradients)
    assert steps, "the optimizer made no step"
    assert steps == NUM_STEPS, (
        f"{NUM_STEPS} calls made {steps} steps of the optimizer: one for each, after all "
        "micro-batches"
    )


def _judge_autocast(run: _Run) -> None:
    assert run.dtypes, "the model was not called"
    assert run.dtypes == {torch.float16}, (
        f"a linear layer gave {_names(run.dtypes)}, not float16: what does torch.autocast need to "
        "know, and does the model run inside of it?"
    )
    assert not run.scaler.within_autocast, (
        "`scaler.backward` runs inside of the autocast block: backward takes the dtypes of forward "
        "by itself. Where does the block end?"
    )
    assert not run.loss_outside, (
        "the loss is computed outside of the autocast block, in whatever dtype the logits have: "
        "where does the block end?"
    )


def _names(dtypes: set[torch.dtype]) -> str:
    return " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


def _due_gradient(micro_batches: list[Batch]) -> torch.Tensor:
    """Of the mean loss of these micro-batches, in the first step; it is not clipped."""
    model = new_model(**SMALL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    l03_by_hand.train_step(model, optimizer, Scaler(SCALE), micro_batches, NO_LIMIT)
    return _gradient(model)


def _judge_gradient(found: torch.Tensor) -> None:
    """What reaches the optimizer in the first step, where nothing is clipped."""
    micro_batches = _batches(0)
    wanted = _due_gradient(micro_batches)
    if _is_close(found, wanted):
        return
    ratio = (found.norm() / wanted.norm()).item()
    if _is_same_way(found, wanted):
        assert not math.isclose(ratio, NUM_MICRO_BATCHES, rel_tol=TOLERANCE), (
            "the losses of the micro-batches are added; their mean was due"
        )
        assert not math.isclose(found.norm().item(), NO_LIMIT, rel_tol=TOLERANCE), (
            "a gradient whose norm is below max_norm has been made longer: only what is above is "
            "clipped"
        )
        raise AssertionError(
            f"the gradient that reaches the optimizer is {ratio:.3g} times that of the mean loss, "
            f"with max_norm={NO_LIMIT:g}, which clips nothing: by what is each loss divided, and "
            "to which norm is clipped?"
        )
    for place, name in ((0, "first"), (-1, "last")):
        assert not _is_same_way(found, _due_gradient([micro_batches[place]])), (
            f"of the micro-batches only the {name} one is in the gradient that reaches the "
            "optimizer: when are gradients set to zero?"
        )
    swapped = [(targets, tokens) for tokens, targets in micro_batches]
    assert not _is_same_way(found, _due_gradient(swapped)), (
        "the model is asked for the tokens that come before: which of the two in a micro-batch "
        "does it get?"
    )
    raise AssertionError(
        f"the gradient that reaches the optimizer in the first step is {ratio:.3g} times as long "
        "as that of the mean loss, and points elsewhere: which losses are in it, and what has been "
        "done to it since?"
    )


def _judge_clipped(run: _Run) -> None:
    """What reaches the optimizer in the first step, where it is longer than `MAX_NORM`."""
    found = run.gradients[0]
    free = _due_gradient(_batches(0))
    assert not run.clipped_late, (
        "the gradients are clipped after `optimizer.step()`: the weights have moved by then"
    )
    assert not _is_close(found, free), (
        f"the gradients are not clipped: their norm is {free.norm():.3g}, and max_norm is "
        f"{MAX_NORM:g}"
    )
    norm = found.norm().item()
    assert norm > 1.01 * MAX_NORM / SCALE, (
        f"the gradients are clipped before they are unscaled: a norm that is {SCALE:g} times as "
        f"large is cut to max_norm, and then divided by {SCALE:g}"
    )
    assert math.isclose(norm, MAX_NORM, rel_tol=TOLERANCE), (
        f"the norm of all gradients together is {norm:.3g} at the optimizer, and max_norm is "
        f"{MAX_NORM:g}: what is clipped, and to what?"
    )
    assert _is_same_way(found, free), (
        "clipping has turned the gradient, where it should only make it shorter: all gradients "
        "are multiplied by the same number"
    )


def _judge_later(run: _Run, max_norm: float) -> None:
    """The weights after the last step, where the first one is right."""
    wanted = _Run(l03_by_hand.train_step, max_norm).moved
    ratio = (run.moved.norm() / wanted.norm()).item()
    assert _is_close(run.moved, wanted), (
        f"the first gradient is right, but after {NUM_STEPS} steps with max_norm={max_norm:g} the "
        f"weights have gone {ratio:.3g} times as far as they should: what has one step left for "
        "the next, and does something else than the optimizer move them?"
    )


def _is_close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool((found - wanted).norm() <= TOLERANCE * wanted.norm())


def _is_same_way(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool(torch.cosine_similarity(found, wanted, dim=0) > SAME_WAY)


def _judge_overflow(run: _Run) -> None:
    case = "in the second of three steps a gradient overflows: "
    flags = run.scaler.flags
    assert len(flags) == NUM_STEPS, (
        case + "`scaler.update` was not called after it, so the scale stays too large for ever"
    )
    assert bool(run.moved.isfinite().all()), (
        case + "the weights are inf or NaN afterwards, and nothing heals them"
    )
    assert not run.scaler.begins_with_gradients, case + (
        "its gradients are still there at the first backward of the third: where do the gradients "
        "of a step go that is left out?"
    )
    for number, flag in enumerate(flags):
        assert bool(flag) == (number != OVERFLOWS_AT), case + (
            f"`scaler.update` got {flag!r} in step {number + 1}: does update get what unscale "
            "found?"
        )
    assert run.scaler.scale == SCALE / 2, case + (
        f"the scale is {run.scaler.scale:g} afterwards, and half of {SCALE:g} was due: who changes "
        "it beside update?"
    )
    assert len(run.gradients) == NUM_STEPS - 1, case + (
        f"the optimizer made {len(run.gradients)} steps, and {NUM_STEPS - 1} were due"
    )
    assert not run.moves[OVERFLOWS_AT].any(), (
        case + "the weights have changed in it, and they were to stay as they are"
    )
    assert not run.changed_state, case + (
        "the state of the optimizer, its momenta, has changed in it: a step that is left out "
        "leaves nothing behind"
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
    with without(l03_by_hand.adamw, adam_of_torch, adamw_of_torch):
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
    assert not any("fused" in name for name in counted), (
        "a fused operation is PyTorch's whole step: write it with `torch._foreach_` operations"
    )
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
        correction1 = 1 - BETA1**step
        correction2 = 1 - BETA2**step
        if what in ("no correction", "no first correction"):
            correction1 = 1.0
        if what in ("no correction", "no second correction"):
            correction2 = 1.0
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
    "no first correction": "`means` begins at 0: where is it divided by 1 - beta1**step?",
    "no second correction": "`squares` begins at 0: where is it divided by 1 - beta2**step?",
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
    if step == 1:
        _judge_eps(state)
    raise AssertionError(
        case + f"the first weight is {_first(state.weights)}, and {_first(wanted.weights)} was due"
    )


def _judge_eps(state: _State) -> None:
    """After the first step the weights say which eps they were made with."""
    found = []
    for weight, before, mean, square in zip(
        state.weights, _new_state().weights, state.means, state.squares
    ):
        update = before * (1 - LR * DECAY) - weight
        denominator = LR / (1 - BETA1) * mean / update
        found.append((denominator - (square / (1 - BETA2)).sqrt()).flatten())
    used = torch.cat(found)
    is_one_number = bool((used - used.mean()).abs().max() < EPS / 1000)
    eps = max(0.0, round(used.mean().item(), 9))
    assert not is_one_number, (
        f"after step 1: all is right but eps: it was called with eps={EPS:g}, and the weights are "
        f"those of eps={eps:g}. Where is it added?"
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
LEAST_PART = 0.5  # of what can be saved with the same batch
WITHIN = 2.0


def race(
    settings: Settings,
    predicted_speedup: float | torch.Tensor,
    measure: Callable[[Settings], l03_race.Race] = l03_race.race,
) -> None:
    """The learner's settings and how many times as fast as the baseline they will be.

    Args:
        settings: Of the learner.
        predicted_speedup: As the learner expects it.
        measure: Compares settings with the baseline; the tests give one that needs no clock.
    """
    if settings is not ... and not isinstance(settings, Settings):
        raise AssertionError(
            f"settings is {settings!r}: give l03_race.Settings(batch=..., dtype=..., ...)"
        )
    assert predicted_speedup is not None, "predicted_speedup is None: give a number such as 1.5"
    settings, predicted_speedup = due(settings, predicted_speedup)
    assert not settings.fault, settings.fault
    expected: Any = predicted_speedup
    if isinstance(expected, torch.Tensor):
        expected = expected.tolist()
    is_number = isinstance(expected, int | float)
    assert is_number and expected > 0, "predicted_speedup is a number such as 1.5"
    assert settings != l03_race.BASELINE, "these are the settings of the baseline: change some"
    only_batch = replace(l03_race.BASELINE, batch=settings.batch)
    assert settings != only_batch, (
        f"beside the batch of {settings.batch} these are the settings of the baseline: what makes "
        "a step quicker that has the same windows?"
    )
    found = measure(settings)
    assert found.steps is not None, (
        f"the loss is still above {l03_race.TARGET} after {l03_race.MOST_STEPS} steps: these steps "
        "are quick, but there are too many of them"
    )
    assert found.saved >= LEAST_PART * found.can_be_saved, (
        f"with a batch of {settings.batch}, {_seconds_saved(found.saved)} by the other three "
        f"fields, and {found.can_be_saved:.0%} can be saved on this processor: which of the "
        "three have you measured?"
    )
    assert found.speedup >= LEAST_SPEEDUP, (
        f"{found.speedup:.2f} times as fast as the baseline, and {LEAST_SPEEDUP} are asked for: it "
        f"takes {found.steps} steps where the baseline takes {found.baseline_steps}, each "
        f"{found.step_s / found.baseline_step_s:.2f} times as long. Which of the two is in the way?"
    )
    factor = max(found.speedup / expected, expected / found.speedup)
    assert factor <= WITHIN, (
        f"{found.speedup:.2f} times as fast as the baseline, fast enough; you expected "
        f"{expected:.3g}, which is off by more than a factor of {WITHIN:g}"
    )


def _seconds_saved(part: float) -> str:
    if part < 0:
        return f"your step takes {-part:.0%} longer than that of the baseline"
    return f"your step saves {part:.0%} of the baseline's time"


EXERCISES = {
    "3.1": Exercise(
        check=spacing,
        praise="it is the same from one power of two to the next, and then it doubles",
        hints=(
            "between 2**e and 2**(e + 1) lie 2**fraction_bits numbers, evenly",
            "which e is it for x = 0.3? `math.log2(0.3)` is -1.7, and 0.3 lies above 2**-2",
        ),
    ),
    "3.2": Exercise(
        check=scaler,
        praise="it finds the largest scale that works, and comes down when that becomes too large",
        hints=(
            "a gradient that has overflowed is inf; a difference of two of them is NaN. One "
            "method of a tensor knows both",
            "`good_steps` counts good steps in a row: what are the two moments at which it "
            "begins again?",
        ),
    ),
    "3.3": Exercise(
        check=train_step,
        praise="scale, unscale, look, clip, step: the same weights as in float32, to three digits",
        hints=(
            "the loss of a micro-batch counts 1/m, as in gradient accumulation in any dtype",
            "`max_norm` is meant for the true gradients: what are they at that moment?",
            "what must not happen if a gradient is not finite, and what must happen all the same?",
        ),
    ),
    "3.4": Exercise(
        check=adamw,
        praise="the weights of torch.optim.AdamW, with as many calls for 100 tensors as for one",
        hints=(
            "write it for one tensor first, in place: `mul_`, `lerp_`, `addcmul_`, `addcdiv_`; "
            "then put `torch._foreach_` before each name",
            "`torch._foreach_sqrt` without the last underscore gives a new list: which of the "
            "tensors must stay as they are?",
        ),
    ),
    "3.5": Exercise(
        check=race,
        praise="at the target in less than a third of the time, not by the batch alone, and you "
        "knew how much it would be",
        hints=(
            "a time is steps times seconds for a step. Which field changes which of the two?",
            "`l03_race.steps_to_target(settings)` and `l03_race.step_seconds(one, other)` tell "
            "you both",
        ),
    ),
}
