"""Checks of lesson 18: float16, its loss scale and a step in it."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from course.answer import Exercise, Hint, due
from course.exercises.expect import diagnose, distance, refuse, times
from course.labs.l03_step import CHARACTERS, new_model
from labcode.models import gpt

# ---- 18.2

NOT_FINITE = {
    "inf in the first gradient": ([math.inf, 1.0], [1.0]),
    "-inf in the first gradient": ([-math.inf, 1.0], [1.0]),
    "NaN in the first gradient": ([1.0, math.nan], [1.0]),
    "inf in the last gradient": ([1.0, 1.0], [math.inf]),
    "inf and -inf in one gradient": ([math.inf, -math.inf], [1.0]),
}


def _params(*grads: Sequence[float] | None) -> list[nn.Parameter]:
    """Parameters with these gradients; None has none."""
    params = []
    for grad in grads:
        param = nn.Parameter(torch.ones(2 if grad is None else len(grad)))
        if grad is not None:
            param.grad = torch.tensor(grad)
        params.append(param)
    return params


def scaler(answer: Callable[..., Any]) -> None:
    """The learner's `Scaler`."""
    _check_scaled(answer)
    _check_unscaled(answer)
    _check_finds_non_finite(answer)
    _check_update(answer)
    _in_turn(answer)


def _check_scaled(answer: Callable[..., Any]) -> None:
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    of_loss = torch.tensor([3.0, 5.0])
    truth = 8 * of_loss
    loss = (weight * of_loss).sum()
    answer(scale=8.0).backward(loss)
    if weight.grad is None:
        raise Hint("after backward(loss) there is no gradient: who computes it?")
    mistakes = {"those of the loss: that was to be multiplied by the scale before": of_loss}
    otherwise = f"{weight.grad.tolist()}, and 8 times those of the loss are {truth.tolist()}"
    case = "after backward(loss) with a scale of 8 the gradients are "
    diagnose(case, weight.grad, truth, mistakes, otherwise)
    changed = "backward changed the loss itself, which is logged: it is 13"
    refuse({changed: loss.item() != 13})


def _check_unscaled(answer: Callable[..., Any]) -> None:
    own = answer(scale=8.0)
    params = _params([8.0, -16.0], None, [4.0])
    finite = own.unscale(iter(params))
    refuse({"a parameter without a gradient has got one": params[1].grad is not None})
    for number, truth in {0: torch.tensor([1.0, -2.0]), 2: torch.tensor([0.5])}.items():
        found = params[number].grad
        if found is None:
            raise Hint(f"the gradient of parameter {number} is gone")
        mistakes = {
            "is still multiplied by the scale: is the result written into `.grad`?": 8 * truth,
            "is multiplied by the scale once more: divide by the scale, do not multiply": (
                64 * truth
            ),
        }
        otherwise = f"is {found.tolist()}, expected is {truth.tolist()}"
        diagnose(f"the gradient of parameter {number} ", found, truth, mistakes, otherwise)
    mistakes = {
        "unscale says False, and all gradients were finite": not due(finite),
        f"unscale changed the scale to {own.scale:g}: that is what update is for": own.scale != 8,
    }
    refuse(mistakes)


def _check_finds_non_finite(answer: Callable[..., Any]) -> None:
    for what, grads in NOT_FINITE.items():
        finite = bool(due(answer(scale=8.0).unscale(iter(_params(*grads)))))
        in_a_list = bool(due(answer(scale=8.0).unscale(_params(*grads))))
        hint = f"unscale says True with {what}"
        twice = "; with a list it says False. A generator gives its items once: one loop for both"
        refuse({hint + twice: finite and not in_a_list, hint: finite})
    healthy = answer(scale=8.0).unscale(iter(_params([0.0, 0.0], [1e30])))
    hint = "unscale says False for gradients of 0 and 1e29: both are finite in float32"
    refuse({hint: not healthy})


def _check_update(answer: Callable[..., Any]) -> None:
    """With a growth interval of 3: what each step says, and the scale after it."""
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
    own = answer(scale=8.0, growth_interval=3)
    for finite, truth, when in story:
        own.update(finite)
        found = float(due(own.scale))
        hint = (
            f"with scale=8 and growth_interval=3 the scale is {found:g} {when}; expected is "
            f"{truth:g}"
        )
        refuse({hint: found != truth})


def _in_turn(answer: Callable[..., Any]) -> None:
    """Call both as a training does: unscale, then update with what it said."""
    own = answer(scale=2.0, growth_interval=3)
    overflows = (True, True, False, False, False, True, False, False, False)
    truths = (1.0, 0.5, 0.5, 0.5, 1.0, 0.5, 0.5, 0.5, 1.0)
    for step, (overflow, truth) in enumerate(zip(overflows, truths, strict=True), 1):
        before = own.scale
        finite = own.unscale(_params([math.inf if overflow else 1.0]))
        hint = (
            f"unscale changed the scale from {before:g} to {own.scale:g} in step {step}: that is "
            "what update is for"
        )
        refuse({hint: own.scale != before})
        own.update(bool(finite))
        found = float(due(own.scale))
        hint = (
            f"unscale and update in turn, with scale=2 and growth_interval=3: after step {step} "
            f"the scale is {found:g}, expected is {truth:g}. Does unscale change what update "
            "counts, or is a scale below 1 rounded?"
        )
        refuse({hint: found != truth})


# ---- 18.3

MAX_NORM = 0.5  # of a gradient whose norm is about 1
NO_LIMIT = 1e6  # a norm at which nothing is clipped
NUM_STEPS = 3
NUM_MICRO_BATCHES = 3
SCALE = 2.0**10
OVERFLOWS_AT = 1  # counted from 0
SMALL = {"num_layers": 1, "hidden_size": 32, "num_heads": 2}
DIGITS = 0.02  # relative distance that is rounding: float16 keeps three digits
LOSSES = ("cross_entropy", "nll_loss", "log_softmax", "logsumexp")

Batch = tuple[Tensor, Tensor]
Step = Callable[..., Any]


class _LossWatch(TorchFunctionMode):
    """Notes in `seen` whether a loss is computed outside of autocast."""

    def __init__(self, seen: set[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") in LOSSES and not torch.is_autocast_enabled("cpu"):
            self.seen.add("loss outside of autocast")
        return func(*args, **(kwargs or {}))


class _Training:
    """Steps of a training, and what was seen of them. It is also the scaler that they are given.

    Args:
        step: Does one of them.
        max_norm: Largest norm of the gradients.
        overflows_at: Number of the step in which the gradients overflow; None: in none.

    Attributes:
        events: Which methods of the scaler were called.
        flags: What `update` was given.
        seen: What has happened at least once.
        dtypes: Dtypes of the logits.
        gradients: Gradients that reached the optimizer, a row for each of its steps.
        left: The gradients after each call of `step`.
        moved: How far the weights went in all.
    """

    def __init__(self, step: Step, max_norm: float, overflows_at: int | None = None) -> None:
        self.scale = SCALE
        self.overflows_at = overflows_at
        self.events: list[str] = []
        self.flags: list[Any] = []
        self.seen: set[str] = set()
        self.dtypes: set[torch.dtype] = set()
        self.gradients: list[Tensor] = []
        self.left: list[Tensor] = []
        self.model = new_model(**SMALL)
        self.model.register_forward_hook(self._note_dtype)
        optimizer = _sgd(self.model)
        optimizer.register_step_pre_hook(self._note_gradient)
        before = _weights(self.model)
        for number in range(NUM_STEPS):
            micro_batches = _batches(number)
            with _LossWatch(self.seen):
                step(self.model, optimizer, self, micro_batches, max_norm)
            self.left.append(_gradient(self.model))
            if tree_map(Tensor.tolist, micro_batches) != tree_map(Tensor.tolist, _batches(number)):
                self.seen.add("other data")
        self.moved = _weights(self.model) - before

    def backward(self, loss: Tensor) -> None:
        """Backward of a scaler; its gradients are not finite in the step that overflows."""
        is_first = self.events[-1:] != ["backward"]
        if is_first and bool(_gradient(self.model).any()):
            self.seen.add("gradients of the step before")
        if torch.is_autocast_enabled("cpu"):
            self.seen.add("backward inside of autocast")
        self.events.append("backward")
        overflows = len(self.flags) == self.overflows_at
        (loss * (math.inf if overflows else self.scale)).backward()

    def unscale(self, params: Iterable[nn.Parameter]) -> bool:
        """The scaler's unscale."""
        self.events.append("unscale")
        grads = [param.grad for param in params if param.grad is not None]
        torch._foreach_div_(grads, self.scale)
        return all(bool(grad.isfinite().all()) for grad in grads)

    def update(self, finite: Any) -> None:
        """The scaler's update; in so few steps the scale does not grow."""
        self.events.append("update")
        self.flags.append(finite)
        if not finite:
            self.scale /= 2

    def _note_dtype(self, module: nn.Module, args: Any, logits: Tensor) -> None:
        self.dtypes.add(logits.dtype)

    def _note_gradient(self, *_: Any) -> None:
        self.gradients.append(_gradient(self.model))


def _batches(step: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(step)
    found = []
    for _ in range(NUM_MICRO_BATCHES):
        windows = torch.randint(CHARACTERS, (2, 17), generator=generator)
        found.append((windows[:, :-1], windows[:, 1:]))
    return found


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)


def _weights(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def _gradient(model: nn.Module) -> Tensor:
    """All gradients in one row; zeros where there is none."""
    rows = []
    for param in model.parameters():
        grad = torch.zeros_like(param) if param.grad is None else param.grad
        rows.append(grad.detach().flatten())
    return torch.cat(rows)


def _plain_backward(model: nn.Module, micro_batches: Sequence[Batch]) -> Tensor:
    """The gradient of the mean loss, in float32."""
    losses = [gpt.loss(model(tokens), targets) for tokens, targets in micro_batches]
    model.zero_grad()
    torch.stack(losses).mean().backward()
    return _gradient(model)


def _first_gradient(*micro_batches: Batch) -> Tensor:
    """The gradient of their mean loss in the first step; it is not clipped."""
    return _plain_backward(new_model(**SMALL), micro_batches)


def _plain_training(max_norm: float, steps: Iterable[int] = range(NUM_STEPS)) -> Tensor:
    """How far the weights go in all, in float32."""
    model = new_model(**SMALL)
    optimizer = _sgd(model)
    before = _weights(model)
    for step in steps:
        _plain_backward(model, _batches(step))
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return _weights(model) - before


def train_step(answer: Step) -> None:
    """The learner's `train_step(model, optimizer, scaler, micro_batches, max_norm)`."""
    free = _Training(answer, NO_LIMIT)
    _check_scaler_used(free)
    _check_autocast(free)
    _check_gradient(free.gradients[0])
    clipped = _Training(answer, MAX_NORM)
    _check_clipped(clipped)
    for run, max_norm in ((free, NO_LIMIT), (clipped, MAX_NORM)):
        otherwise = (
            f"the first gradient is right, but after {NUM_STEPS} steps with max_norm={max_norm:g} "
            "the weights have gone elsewhere: what has one step left for the next, and does "
            "something else than the optimizer move them?"
        )
        diagnose("", run.moved, _plain_training(max_norm), {}, otherwise, DIGITS)
    _check_step_skipped(_Training(answer, MAX_NORM, OVERFLOWS_AT))


def _check_scaler_used(run: _Training) -> None:
    count = NUM_MICRO_BATCHES
    backwards, unscales, updates = map(run.events.count, ("backward", "unscale", "update"))
    mistakes = {
        "the scaler was not used": not run.events,
        "`scaler.backward` was not called: `loss.backward()` leaves the loss as it is": (
            not backwards
        ),
        "the gradients were never unscaled": not unscales,
        "`scaler.update` was not called: the scale would stay as it is": not updates,
        "the optimizer made no step": not run.gradients,
    }
    refuse(mistakes)
    is_one = backwards == NUM_STEPS
    is_right = distance(run.gradients[0], _first_gradient(*_batches(0))) < DIGITS
    order = [*["backward"] * count, "unscale", "update"]
    mistakes = {
        f"one backward for {count} micro-batches, and its gradient is not that of their mean loss: "
        "which losses are in it?": is_one and not is_right,
        f"one backward for {count} micro-batches: the gradient is the right one, but until then "
        f"the activations of all {count} lie in memory. Micro-batches are there to save it: how "
        "many backwards does that take?": is_one,
        f"{backwards} backwards for {NUM_STEPS} steps of {count} micro-batches": (
            backwards != count * NUM_STEPS
        ),
        f"unscale was called {unscales} times in {NUM_STEPS} steps: once for each, or gradients "
        "are divided twice": unscales != NUM_STEPS,
        f"update was called {updates} times in {NUM_STEPS} steps, where all gradients were "
        "finite": updates != NUM_STEPS,
        f"in this order: {', '.join(order)}; yours: {', '.join(run.events[: len(order)])}": (
            run.events != order * NUM_STEPS
        ),
        **_wrong_flags(run, [True] * NUM_STEPS),
        f"{NUM_STEPS} calls made {len(run.gradients)} steps of the optimizer: one for each, after "
        "all micro-batches": len(run.gradients) != NUM_STEPS,
    }
    refuse(mistakes)


def _wrong_flags(run: _Training, truths: Sequence[bool]) -> dict[str, bool]:
    """Rows of a table: in which step `update` was not told whether all gradients were finite."""
    mistakes = {}
    for number, (flag, truth) in enumerate(zip(run.flags, truths), 1):
        were = "all gradients were finite" if truth else "a gradient was not finite"
        hint = (
            f"`scaler.update` got {flag!r} in step {number}, where {were}: does update get what "
            "unscale found?"
        )
        mistakes[hint] = bool(flag) != truth
    return mistakes


def _check_autocast(run: _Training) -> None:
    names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in run.dtypes))
    mistakes = {
        "the model was not called": not run.dtypes,
        f"the model gave {names}, not float16: what does torch.autocast need to know, and does the "
        "model run inside of it?": run.dtypes != {torch.float16},
        "`scaler.backward` runs inside of the autocast block: backward takes the dtypes of forward "
        "by itself. Where does the block end?": "backward inside of autocast" in run.seen,
        "the loss is computed outside of the autocast block, in whatever dtype the logits have: "
        "where does the block end?": "loss outside of autocast" in run.seen,
        "the micro-batches are others after a call: they are the caller's, and stay as they are": (
            "other data" in run.seen
        ),
        "the gradients of the step before are still there at the first backward of a step: where "
        "do the gradients of a step go?": "gradients of the step before" in run.seen,
    }
    refuse(mistakes)


def _check_gradient(found: Tensor) -> None:
    """What reaches the optimizer in the first step, where nothing is clipped."""
    micro_batches = _batches(0)
    truth = _first_gradient(*micro_batches)
    swapped = [(targets, tokens) for tokens, targets in micro_batches]
    only = (
        "of the micro-batches only the {} one is in the gradient that reaches the optimizer: when "
        "are gradients set to zero?"
    )
    mistakes = {
        "the losses of the micro-batches are added; expected is their mean": (
            NUM_MICRO_BATCHES * truth
        ),
        "a gradient whose norm is below max_norm has been made longer: only what is above is "
        "clipped": NO_LIMIT / truth.norm() * truth,
        "the gradient that reaches the optimizer is {times:.3g} times that of the mean loss, with "
        f"max_norm={NO_LIMIT:g}, which clips nothing: by what is each loss divided, and to which "
        "norm is clipped?": times(truth),
        only.format("first"): times(_first_gradient(micro_batches[0])),
        only.format("last"): times(_first_gradient(micro_batches[-1])),
        "the model is asked for the tokens that come before: which of the two in a micro-batch "
        "does it get?": times(_first_gradient(*swapped)),
    }
    otherwise = (
        "the gradient that reaches the optimizer in the first step is {off:.0%} away from that of "
        "the mean loss: which losses are in it, and what has been done to it since?"
    )
    diagnose("", found, truth, mistakes, otherwise, DIGITS)


def _check_clipped(run: _Training) -> None:
    """What reaches the optimizer in the first step, where it is longer than `MAX_NORM`."""
    found = run.gradients[0]
    free = _first_gradient(*_batches(0))
    norm = found.norm().item()
    is_free = distance(found, free) < DIGITS
    left_clipped = distance(run.left[0].norm(), MAX_NORM) < DIGITS
    mistakes = {
        "the gradients are clipped after `optimizer.step()`: the weights have moved by then": (
            is_free and left_clipped
        ),
        f"the gradients are not clipped: their norm is {norm:.3g}, and max_norm is {MAX_NORM:g}": (
            is_free
        ),
        f"the gradients are clipped before they are unscaled: a norm that is {SCALE:g} times as "
        f"large is cut to max_norm, and then divided by {SCALE:g}": (
            norm < 1.01 * MAX_NORM / SCALE
        ),
        f"the norm of all gradients together is {norm:.3g} at the optimizer, and max_norm is "
        f"{MAX_NORM:g}: what is clipped, and to what?": distance(norm, MAX_NORM) > DIGITS,
    }
    otherwise = (
        "clipping has turned the gradient, where it should only make it shorter: all gradients are "
        "multiplied by the same number"
    )
    diagnose("", found, MAX_NORM / free.norm() * free, mistakes, otherwise, DIGITS)


def _check_step_skipped(run: _Training) -> None:
    finite = [True] * NUM_STEPS
    finite[OVERFLOWS_AT] = False
    others = [step for step in range(NUM_STEPS) if finite[step]]
    case = "in the second of three steps a gradient overflows: "
    mistakes = {
        "`scaler.update` was not called after it, so the scale stays too large for ever": (
            len(run.flags) != NUM_STEPS
        ),
        "the weights are inf or NaN afterwards, and nothing heals them": (
            not run.moved.isfinite().all()
        ),
        "its gradients are still there at the first backward of the third: where do the gradients "
        "of a step go that is left out?": "gradients of the step before" in run.seen,
        **_wrong_flags(run, finite),
        f"the scale is {run.scale:g} afterwards, expected is half of {SCALE:g}: who changes it "
        "beside update?": run.scale != SCALE / 2,
        f"the optimizer made {len(run.gradients)} steps, expected are {len(others)}": (
            len(run.gradients) != len(others)
        ),
    }
    refuse(mistakes, case)
    otherwise = (
        "afterwards the weights are not those of a training without it: has it changed the weights "
        "themselves, or the state of the optimizer, its momenta?"
    )
    diagnose(case, run.moved, _plain_training(MAX_NORM, others), {}, otherwise, DIGITS)


EXERCISES = {
    "18.2": Exercise(
        check=scaler,
        praise="it finds the largest scale that works, and comes down when that becomes too large",
        hints=(
            "a gradient that has overflowed is inf; a difference of two of them is NaN. One "
            "method of a tensor knows both",
            "`good_steps` counts good steps in a row: what are the two moments at which it "
            "begins again?",
        ),
    ),
    "18.3": Exercise(
        check=train_step,
        praise="scale, unscale, look, clip, step: the same weights as in float32, to three digits",
        hints=(
            "the loss of a micro-batch counts 1/m, as in gradient accumulation in any dtype",
            "`max_norm` is meant for the true gradients: what are they at that moment?",
            "what must not happen if a gradient is not finite, and what must happen all the same?",
        ),
    ),
}
