"""What reaches the gradient of an optimizer, at each step that is really taken.

A backward pass brings a contribution. Contributions add up until the gradient is made empty or zero
and are used by the step that comes before. So a step has those since the last empty gradient:
a backward pass whose gradient is thrown away, as where a GradScaler leaves out a step, has none.

    l_r   what the backward passes of rank r brought, before anybody reduced it
    A_r   what was there at the step, before clipping
    a     A_r = a * sum over ranks of l_r: 1/W where gradients are averaged once over W ranks

A few numbers of the gradient, spread over the weights, say all this without a look at how the loop
is written: a factor 1/W too much, a loss scale that is still there, a gradient that nobody reduced.

Held by: tests/ranks/test_doctor_loops.py
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from labcode.doctor.watch_loss import Weight

READ_PARAMS = 12  # spread over the weights
READ_VALUES = 6  # of each of them
NOTED_STEPS = 200  # so that a long run needs no more memory
KEPT_PASSES = 512  # of a loop whose optimizer never steps
READ_STEPS = 12  # whose numbers travel to the other ranks


class Contribution:
    """One backward pass.

    Args:
        is_first: Whether the gradient was empty or zero before; a tensor is read later.
        reads: Whether its numbers are kept.
    """

    def __init__(self, is_first: bool | torch.Tensor, reads: bool) -> None:
        self.is_first = is_first
        self.reads = reads
        self.weight = Weight()
        self.forward = 0
        self.source: list[int] = []
        self.sends = False
        self.bypasses = False
        self.numbers: dict[int, torch.Tensor] = {}

    def plain(self) -> dict[str, Any]:
        """The step as a dict, as `Facts.steps` has it."""
        return {
            "key": self.weight.key,
            "forward": self.forward,
            "source": self.source,
            "sends": self.sends,
            "bypasses": self.bypasses,
            "loss": self.weight.plain(),
        }


class _Step:
    """What was there when the optimizer stepped."""

    def __init__(self, passes: list[Contribution]) -> None:
        self.passes = passes
        self.arrived: torch.Tensor | None = None
        self.left_out: torch.Tensor | None = None  # a fused optimizer leaves a step out by itself
        self.max_norm = 0.0
        self.after_clip: torch.Tensor | None = None
        self.used: torch.Tensor | None = None


class Gradient:
    """The gradient of the weights of one optimizer.

    Args:
        optimizer: Optimizer of the parameters.
        trained: Weights of the model that need a gradient.

    Attributes:
        num_steps: Steps of the optimizer so far.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, trained: Iterable[nn.Parameter]) -> None:
        self.optimizer = optimizer
        own = {id(param) for param in _held_by(optimizer)}
        self.params = [param for param in trained if id(param) in own]
        plain = [param for param in self.params if _is_plain(param)]
        stride = max(1, -(-len(plain) // READ_PARAMS))
        self._read = plain[::stride]
        self._waiting: list[Contribution] = []
        self._now: Contribution | None = None
        self._steps: list[_Step] = []
        self.num_steps = 0
        self._clip: tuple[float, torch.Tensor, torch.Tensor | None] | None = None
        self._depth = 0
        self._is_in_closure = False

    def hooks(self) -> list[Any]:
        """What is to be removed when the block ends."""
        found = [
            self.optimizer.register_step_pre_hook(self._before_step),
            self.optimizer.register_step_post_hook(self._after_step),
        ]
        for number, param in enumerate(self._read):
            # before it is accumulated, so that nobody can have sent it yet
            found.append(param.register_hook(self._noting(number)))
        return found

    # ---- a backward pass

    def begin_backward(self) -> None:
        """A backward pass begins; it may be that of another model."""
        is_first: bool | torch.Tensor = all(param.grad is None for param in self.params)
        if not is_first and self._read:
            is_first = self._numbers().abs().max() == 0
        self._now = Contribution(is_first, len(self._steps) < READ_STEPS)

    def end_backward(self, reached: set[nn.Parameter]) -> Contribution | None:
        """It is over; None if it was no business of this optimizer.

        Args:
            reached: The weights that got a gradient.
        """
        now = self._now
        self._now = None
        if now is None or reached.isdisjoint(self.params):
            return None
        self._is_in_closure = self._is_in_closure or self._depth > 0
        self._waiting.append(now)
        del self._waiting[:-KEPT_PASSES]
        self._clip = None
        return now

    def _noting(self, number: int) -> Callable[[torch.Tensor], None]:
        def note(gradient: torch.Tensor) -> None:
            if self._now is not None and self._now.reads and _is_plain(gradient):
                self._now.numbers[number] = _some(gradient)

        return note

    # ---- until the step

    def clipped(self, clip: Callable[..., Any], params: Iterable[Any], max_norm: Any) -> None:
        """Clip, and look at the gradient before and after.

        Args:
            clip: Does it.
            params: Parameters whose gradients are clipped.
            max_norm: Norm that they are clipped to.
        """
        own = {id(param) for param in self._read}
        is_own = self._clip is None and any(id(param) in own for param in params)
        before = self._numbers() if is_own else None
        clip()
        if before is not None:
            self._clip = (float(max_norm), before, self._numbers())

    def _before_step(self, *_: Any) -> None:
        self._depth += 1
        if self._depth > 1:  # an optimizer that calls the step of its base class
            return
        step = _Step(self._waiting)
        self._waiting = []
        self.num_steps += 1
        if self.num_steps > NOTED_STEPS:
            return
        self._steps.append(step)
        if len(self._steps) > READ_STEPS or not self._read:
            return
        step.used = self._numbers()
        step.left_out = _lazily(self.optimizer, "found_inf")
        scale = _lazily(self.optimizer, "grad_scale")
        if scale is not None:
            step.used = step.used / scale
        step.arrived = step.used
        if self._clip is not None:
            step.max_norm, step.arrived, step.after_clip = self._clip

    def _after_step(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._clip = None
            if self._is_in_closure:  # it is not known what the step made of its backward passes
                self._waiting = []
                self._steps[-1].arrived = None

    def _numbers(self) -> torch.Tensor:
        """Numbers of the gradient as it is now [READ_PARAMS * READ_VALUES or less]; 0 if empty."""
        found = []
        for param in self._read:
            gradient = param.grad
            if gradient is None or not _is_plain(gradient):
                gradient = torch.zeros_like(param)
            found.append(_some(gradient))
        return torch.cat(found)

    # ---- when the block is over

    def plain(self) -> list[dict[str, Any]]:
        """What `Facts.steps` has of each step that was really taken.

        Returns:
            `passes` that the gradient of the step is made of, those thrown away since the step
            before as `dropped`, `stale` if the gradient of the step before was still there,
            numbers of the gradient as `local` and `arrived`, both None if they are not known,
            `finite`: whether those of this rank's passes were, and `scaled`: by which factor the
            gradient was made smaller after it was clipped to `max_norm`.
        """
        found = []
        carried: list[Contribution] = []
        for number, step in enumerate(self._steps):
            passes = [*carried, *step.passes]
            if step.left_out is not None and float(step.left_out) > 0:
                carried = passes
                continue
            carried = []
            firsts = [place for place, one in enumerate(passes) if bool(one.is_first)]
            begin = firsts[-1] if firsts else 0
            used = passes[begin:]
            local = self._local(used)
            all_plain = [one.plain() for one in passes]
            note: dict[str, Any] = {
                "passes": all_plain[begin:],
                "dropped": all_plain[:begin],
                "stale": number > 0 and bool(used and self._read) and not firsts,
                "local": None,
                "arrived": None,
                "finite": True,
                "max_norm": step.max_norm,
                "scaled": 1.0,
            }
            if local is not None and step.arrived is not None:
                note["finite"] = bool(local.isfinite().all())
                note["local"] = _short(local)
                note["arrived"] = _short(step.arrived)
            if step.after_clip is not None and step.used is not None:
                note["scaled"] = _ratio(step.used, step.after_clip)
            found.append(note)
        return found

    def _local(self, passes: list[Contribution]) -> torch.Tensor | None:
        """The sum of what this rank's backward passes brought."""
        if not self._read or not passes or not all(one.reads for one in passes):
            return None
        total = []
        for number, param in enumerate(self._read):
            values = torch.zeros_like(_some(param), dtype=torch.float64)
            for one in passes:
                if number in one.numbers:
                    values += one.numbers[number].double()
            total.append(values)
        return torch.cat(total)


def foreign_and_forgotten(
    gradients: list[Gradient], trained: list[nn.Parameter]
) -> tuple[bool, int]:
    """(Whether no optimizer holds a weight of the model; weights that one holds an old copy of).

    An old copy is a parameter without any gradient, of the shape of a weight that trains and that
    nobody holds, as after a layer was replaced.
    """
    own = {id(param) for param in trained}
    held: list[nn.Parameter] = []
    for gradient in gradients:
        held.extend(_held_by(gradient.optimizer))
    held_ids = {id(param) for param in held}
    shapes = [param.shape for param in held if id(param) not in own and param.grad is None]
    forgotten = [param for param in trained if id(param) not in held_ids]
    forgotten = [param for param in forgotten if param.shape in shapes]
    return own.isdisjoint(held_ids), len(forgotten)


def _held_by(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    held: list[nn.Parameter] = []
    for group in optimizer.param_groups:
        held.extend(group["params"])
    return held


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its numbers are here: no shard of something, and not sparse."""
    return tensor.layout == torch.strided and not tensor.is_meta and not isinstance(tensor, DTensor)


def _some(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a few values, spread over all."""
    flat = tensor.detach().reshape(-1)
    step = max(1, flat.numel() // READ_VALUES)
    return flat[::step][:READ_VALUES].clone().float()


def _lazily(optimizer: torch.optim.Optimizer, name: str) -> torch.Tensor | None:
    """What a GradScaler has left with a fused optimizer."""
    value = getattr(optimizer, name, None)
    return value.detach().clone() if isinstance(value, torch.Tensor) else None


def _short(values: torch.Tensor) -> list[float]:
    """With as many digits as float32 has: they travel as text."""
    return [float(f"{value:.8g}") for value in values.double().tolist()]


def _ratio(new: torch.Tensor, old: torch.Tensor) -> float:
    """By which factor all values have changed; 1 if they have not changed by one."""
    new, old = new.double(), old.double()
    size = float(old @ old)
    if not size:
        return 1.0
    factor = float(new @ old) / size
    rest = float((new - factor * old).norm())
    return factor if rest <= 0.01 * float(new.norm()) else 1.0
