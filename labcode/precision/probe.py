"""Where the first NaN or infinity of a training step comes from: module, tensor, micro-batch, rank.

A loss of NaN says nothing about its reason: one value that is not finite spreads to all of them
within the step, and over all ranks with the next collective. `Probe` looks at every tensor on its
way, in the order in which they are made:

    weights -> forward of each module -> loss -> backward of each module -> averaged gradients
            -> weights after the optimizer's step

and names the first one that is not finite, with what went into it. In a linear layer it looks at
each of the three matrix products by itself, before ranks of tp add their parts: after that sum they
all have the NaN, and none of them is the first.

There is no common clock. What came first is decided by what depends on what: the micro-batch,
forward before backward, the stage of the pipeline, and how many tensors the rank had seen before.
Ranks of dp, cp and tp do the same things in the same order, so these counts can be compared.
Held by: tests/ranks/test_probe.py
"""

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from labcode.parallel.linear import MatrixProduct
from labcode.parallel.model import ParallelModel
from labcode.schedules.actions import Action

# the parts of a step, in their order
WEIGHTS = 0
MICROBATCHES = 1
GRADIENTS = 2
OPTIMIZER = 3
FORWARD = 0
BACKWARD = 1
DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True)
class Amount:
    """How large a tensor is, and how much of it is lost.

    Args:
        what: What it is called in a sentence.
        amax: Largest absolute value among those that are finite; 0 if there is none.
        num_bad: How many values are not finite.
        num_values: How many it has.
    """

    what: str
    amax: float
    num_bad: int
    num_values: int

    @property
    def share(self) -> float:
        """The share of values that are not finite, 0 to 1."""
        return self.num_bad / max(1, self.num_values)

    def __str__(self) -> str:
        return f"{self.what}: amax {self.amax:.3g}, {100 * self.share:.3g} % not finite"


@dataclass(frozen=True)
class Finding:
    """The first tensor of one rank that is not finite.

    Args:
        order: Compares findings of all ranks: a smaller one came first.
        rank: Global rank.
        module: Its dotted name in the whole model; "" is the model itself.
        tensor: Which of its tensors, such as "output" or "gradient of the weight".
        microbatch: Its number on this rank, from 0; None outside of micro-batches.
        direction: "forward", "backward", or "" outside of them.
        found: The tensor itself.
        went_in: What it was made of.
    """

    order: tuple[int, ...]
    rank: int
    module: str
    tensor: str
    microbatch: int | None
    direction: str
    found: Amount
    went_in: tuple[Amount, ...] = ()

    @property
    def line(self) -> str:
        """All of it in one line."""
        place = f"{self.tensor} of {self.module or 'the model'}"
        when = f"rank {self.rank}"
        if self.microbatch is not None:
            when += f", micro-batch {self.microbatch}, {self.direction}"
        count = f"{self.found.num_bad} of {self.found.num_values} values"
        source = "; ".join(str(amount) for amount in self.went_in)
        source = f"; into it went {source}" if source else ""
        return f"the first tensor that is not finite: {place} ({when}), {count}{source}"


class Probe:
    """Looks at every tensor of a training step, within a `with` block.

        with Probe(model, optimizer) as probe:
            model.forward_backward(batches)
            optimizer.step()
        finding = probe.first()  # all ranks call it
        if finding:
            print(finding.line)

    Costs one reading of each tensor, and a GPU waits each time: for a step that is repeated to find
    a fault, not for all of them. The step computes what it would compute without the probe, up to
    the rounding of the linear layers' own backward. Modules that torch.compile has compiled show
    nothing of what is inside.

    Communicates: within the block nothing; `first` does an all-gather of a short object.

    Args:
        model: This rank's part.
        optimizer: What steps within the block; None: only gradients are looked at after backward.
    """

    def __init__(
        self, model: ParallelModel, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._rank = dist.get_rank()
        self._pp = model.grid.size("pp")
        self._cleanup = contextlib.ExitStack()
        self._found: list[Finding] = []
        self._seen = 0
        # of the micro-batch that runs; with a pipeline only known after each action
        self._microbatch = -1
        self._stamped = 0
        self._looked_at_gradients = False

    def __enter__(self) -> "Probe":
        self._look_at_params(WEIGHTS, "value before the step")
        # a module whose input needs no gradient, such as an embedding, is told of at each backward
        self._cleanup.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        for name, module in self._model.module.named_modules():
            self._watch(name, module)
        if self._pp > 1:
            self._stamp_by_action()
        else:
            self._count_forwards()
        self._watch_loss()
        if self._optimizer is not None:
            before = self._optimizer.register_step_pre_hook(self._before_optimizer)
            after = self._optimizer.register_step_post_hook(self._after_optimizer)
            self._cleanup.callback(before.remove)
            self._cleanup.callback(after.remove)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._cleanup.close()
        if kind is None and not self._looked_at_gradients:
            self._look_at_gradients()

    def own(self) -> Finding | None:
        """The first finding of this rank; None if all that it saw was finite."""
        return min(self._found, key=_order, default=None)

    def first(self) -> Finding | None:
        """The first finding over all ranks, the same on each of them; None if all was finite.

        Communicates: an all-gather of a short object over all ranks.
        """
        all_found: list[Finding | None] = [None] * dist.get_world_size()
        dist.all_gather_object(all_found, self.own())
        known = [finding for finding in all_found if finding is not None]
        return min(known, key=_order, default=None)

    # ---- what is looked at

    def _watch(self, name: str, module: Any) -> None:
        """Hooks on one module, and a look at its matrix products."""
        hooks = [
            module.register_forward_pre_hook(partial(self._entering, name)),
            module.register_forward_hook(partial(self._leaving, name)),
            module.register_full_backward_pre_hook(partial(self._entering_backward, name)),
            module.register_full_backward_hook(partial(self._leaving_backward, name)),
        ]
        for hook in hooks:
            self._cleanup.callback(hook.remove)
        product = getattr(module, "product", None)
        if isinstance(product, MatrixProduct):
            module.product = self._watched(name, product)
            self._cleanup.callback(partial(setattr, module, "product", product))

    def _watched(self, name: str, product: MatrixProduct) -> MatrixProduct:
        """The three products of a layer, each with a look at what comes out."""

        def forward(
            x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
        ) -> torch.Tensor:
            y = product.forward(x, weight, bias)
            self._look(FORWARD, name, "own product", y, {"input": x, "weight": weight})
            return y

        def grad_input(grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            found = product.grad_input(grad, weight)
            parts = {"gradient of the output": grad, "weight": weight}
            self._look(BACKWARD, name, "own gradient of the input", found, parts)
            return found

        def grad_weight(grad_rows: torch.Tensor, x_rows: torch.Tensor) -> torch.Tensor:
            found = product.grad_weight(grad_rows, x_rows)
            parts = {"gradient of the output": grad_rows, "input": x_rows}
            self._look(BACKWARD, name, "gradient of the weight", found, parts)
            return found

        return replace(product, forward=forward, grad_input=grad_input, grad_weight=grad_weight)

    def _entering(self, name: str, module: nn.Module, args: tuple) -> None:
        for tensor in _floating(args):
            self._look(FORWARD, name, "input", tensor)

    def _leaving(self, name: str, module: nn.Module, args: tuple, output: Any) -> None:
        parts: dict[str, torch.Tensor | None] = {"input": next(_floating(args), None)}
        parts |= dict(module.named_parameters(recurse=False))
        for tensor in _floating(output):
            self._look(FORWARD, name, "output", tensor, parts)

    def _entering_backward(self, name: str, module: nn.Module, grads: Any) -> None:
        for grad in _floating(grads):
            self._look(BACKWARD, name, "gradient of the output", grad)

    def _leaving_backward(self, name: str, module: nn.Module, grads: Any, outer: Any) -> None:
        parts = {"gradient of the output": next(_floating(outer), None)}
        for grad in _floating(grads):
            self._look(BACKWARD, name, "gradient of the input", grad, parts)

    def _watch_loss(self) -> None:
        loss = self._model.loss

        def watched(output: torch.Tensor, targets: torch.Tensor, **options: Any) -> torch.Tensor:
            value = loss(output, targets, **options)
            self._look(FORWARD, "", "loss", value, {"output": output})
            return value

        # a pipeline that has run before keeps the loss that it was made with
        self._model.loss = watched  # type: ignore[assignment]
        self._cleanup.callback(partial(setattr, self._model, "loss", loss))

    def _look_at_params(self, period: int, what: str) -> None:
        for name, param in self._model.weights.items():
            module, _, kind = name.rpartition(".")
            self._look_outside(period, name, module, f"{kind}, its {what},", param.detach())

    def _look_at_gradients(self) -> None:
        self._looked_at_gradients = True
        for name, param in self._model.weights.items():
            if param.grad is not None:
                module, _, kind = name.rpartition(".")
                what = f"gradient of the {kind}, summed over ranks and micro-batches,"
                self._look_outside(GRADIENTS, name, module, what, param.grad)

    def _before_optimizer(self, *_: Any) -> None:
        self._look_at_gradients()

    def _after_optimizer(self, *_: Any) -> None:
        self._look_at_params(OPTIMIZER, "value after the optimizer's step")

    # ---- which micro-batch it is

    def _count_forwards(self) -> None:
        """Without a pipeline: each forward of the model begins a micro-batch."""

        def begin(*_: Any) -> None:
            self._microbatch += 1

        hook = self._model.module.register_forward_pre_hook(begin, prepend=True)
        self._cleanup.callback(hook.remove)

    def _stamp_by_action(self) -> None:
        """With a pipeline: what was found since the last action belongs to the one that ends."""
        outer: Callable[..., None] | None = self._model.on_action

        def stamp(action: Action, started_s: float, stopped_s: float) -> None:
            if outer is not None:
                outer(action, started_s, stopped_s)
            for number in range(self._stamped, len(self._found)):
                self._found[number] = _at(self._found[number], action)
            self._stamped = len(self._found)

        self._model.on_action = stamp
        self._cleanup.callback(partial(setattr, self._model, "on_action", outer))

    # ---- looking

    def _look(
        self,
        direction: int,
        module: str,
        what: str,
        tensor: torch.Tensor,
        parts: Mapping[str, torch.Tensor | None] | None = None,
    ) -> None:
        """Note a tensor of a micro-batch if it is not finite."""
        self._seen += 1
        if _is_finite(tensor):
            return
        order = (MICROBATCHES, max(0, self._microbatch), direction, 0, self._seen, self._rank)
        went_in = []
        for name, part in (parts or {}).items():
            if part is not None and _is_readable(part):
                went_in.append(_amount(name, part))
        self._found.append(
            Finding(
                order,
                self._rank,
                module,
                what,
                max(0, self._microbatch),
                DIRECTIONS[direction],
                _amount(what, tensor),
                tuple(went_in),
            )
        )

    def _look_outside(
        self, period: int, weight: str, module: str, what: str, tensor: torch.Tensor
    ) -> None:
        """Note a tensor of the whole step if it is not finite."""
        self._seen += 1
        if not _is_readable(tensor) or _is_finite(tensor):
            return
        stage = self._model.plan.stages.stage_of(weight)
        order = (period, 0, 0, stage, self._seen, self._rank)
        amount = _amount(what, tensor)
        self._found.append(Finding(order, self._rank, module, what, None, "", amount))
        self._stamped = len(self._found)  # no action of a pipeline made it


def _order(finding: Finding) -> tuple[int, ...]:
    return finding.order


def _at(finding: Finding, action: Action) -> Finding:
    """A finding, with the micro-batch and the stage of the action in which it was made."""
    period, _, direction, _, seen, rank = finding.order
    stage = -action.stage if direction == BACKWARD else action.stage
    order = (period, action.microbatch, direction, stage, seen, rank)
    return replace(finding, order=order, microbatch=action.microbatch)


def _floating(values: Any) -> Iterator[torch.Tensor]:
    """The tensors of floating-point numbers among some values that hold memory."""
    if isinstance(values, torch.Tensor):
        values = (values,)
    if not isinstance(values, Iterable):
        return
    for value in values:
        if isinstance(value, torch.Tensor) and value.is_floating_point() and _is_readable(value):
            yield value


def _is_readable(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds memory: under ZeRO a weight gives its memory back after its layer."""
    own = _local(tensor)
    if own.is_meta:
        return False
    return own.numel() == 0 or own.untyped_storage().nbytes() > 0


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, without its autograd history; any other tensor as it is."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _is_finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(_local(tensor)).all())


def _amount(what: str, tensor: torch.Tensor) -> Amount:
    own = _local(tensor)
    finite = torch.isfinite(own)
    num_bad = own.numel() - int(finite.sum())
    known = own.abs().masked_fill(~finite, 0)
    amax = known.max().item() if own.numel() else 0.0
    return Amount(what, float(amax), num_bad, own.numel())
