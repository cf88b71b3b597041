"""A doctor that looks on while a plain PyTorch training loop runs.

    with doctor.watch(model, optimizer, loader=loader) as watched:
        for inputs, targets in loader:
            ...
    watched.findings        the same on all ranks; rank 0 has printed them

Every rank notes plain numbers (`facts`). When the block ends they travel over the store, and each
rank judges all of them (`judge`). What would hang is stopped while it runs (`watch_calls`). Outside
the block nothing is patched.

Held by: tests/ranks/test_doctor_watch.py::test_the_doctor_names_exactly_the_bug
"""

import functools
import itertools
import json
import socket
import sys
import zlib
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from labcode.comm.bootstrap import describe
from labcode.doctor.facts import Facts, Finding
from labcode.doctor.judge import judge
from labcode.doctor.watch_calls import FORWARD, WATCHED, CallCheck
from labcode.doctor.watch_clock import PhaseClock, TimedBatches
from labcode.doctor.watch_draws import draws_of
from labcode.doctor.watch_loss import Weight, calling_place, key_of, watch_loss

NOTED_STEPS = 200  # so that a long run needs no more memory
HASHED_PASSES = 32  # forward passes whose inputs are compared: on a GPU each is waited for
HASHED_VALUES = 4096  # of an input, spread over it
EVERY_STATISTICS = 16  # steps: BatchNorm that has diverged stays so
FIRST_STATISTICS = 4  # steps of a short run that are all looked at
AFTER_ERROR_S = 10.0  # how long the others' facts are waited for after an error
BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_numbers = itertools.count()  # of the blocks of this process; ranks enter the same blocks


class Watch:
    """Looks on between `__enter__` and `__exit__`.

    Communicates: at the end, over the store, one note of a few kB from each rank; and one short
        note for each collective that the script calls by itself and each synchronised forward
        pass.

    Args:
        model: As the loop calls it: DDP, labcode's DataParallel, or a bare module.
        optimizer: Ends a step.
        loader: The time of its batches is taken; of a DataLoader its DistributedSampler and the
            random numbers of its augmentation are looked at. None: any DataLoader's time is taken.
        group: The ranks that train together; None: all.
        limit_s: How long a rank may be late at a collective before it counts as missing: longer
            than what one rank does alone, such as a checkpoint. A rank that has left the block is
            not waited for.
        quiet: Print nothing.

    Attributes:
        findings: What was found, once the block has ended.
        facts: What this rank noted.

    Raises:
        ValueError: The block stands inside `model.join()`: it has to stand around it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: Any = None,
        group: dist.ProcessGroup | None = None,
        limit_s: float = 300.0,
        quiet: bool = False,
    ) -> None:
        self.model = model
        inner = getattr(model, "module", model)
        assert isinstance(inner, nn.Module)
        self.inner: nn.Module = inner
        self.optimizer = optimizer
        self.loader = loader
        self.sampler = getattr(loader, "sampler", None)
        self.group = group
        self.limit_s = limit_s
        self.quiet = quiet
        self.findings: list[Finding] = []
        self.facts = Facts(dist.get_rank(group) if dist.is_initialized() else 0)
        self._undo: list[Callable[[], object]] = []
        self._checks: CallCheck | None = None
        self._prefix = ""
        weight = next(self.inner.parameters())
        self.facts.device = describe(weight.device)
        self._clock = PhaseClock(weight.device, self._waited_s, NOTED_STEPS)
        self._draws = draws_of(loader)
        self._batch_norms = [m for m in self.inner.modules() if isinstance(m, BATCH_NORM)]
        self._statistics: list[torch.Tensor] = []
        # of a pass through the loader
        self._epoch: int | None = None
        self._num_forwards = 0
        # of an optimizer step
        self._num_steps = 0
        self._step_depth = 0
        self._num_syncs = 0
        self._losses: list[Weight] = []
        self._weights: list[list[Weight]] = []
        self._is_first_forward = True
        # since the last forward pass
        self._syncs = False
        self._num_backwards = 0
        self._reached: set[nn.Parameter] = set()
        # of a backward pass
        self._reached_now: set[nn.Parameter] = set()
        self._newest: nn.Parameter | None = None
        self._usual_last: nn.Parameter | None = None
        self._number_of: dict[nn.Parameter, int] = {}

    # ---- the block

    def __enter__(self) -> "Watch":
        if self._joins():
            raise ValueError("doctor.watch inside model.join(): enter the watch first, then join")
        if isinstance(self.model, DistributedDataParallel) and not self.model.static_graph:
            self.facts.finds_unused = bool(self.model.find_unused_parameters)
        self.facts.gradient_bytes = sum(p.numel() * p.element_size() for p in self._trained())
        self._prefix = f"doctor/{next(_numbers)}"
        if dist.is_initialized() and dist.get_world_size(self.group) > 1:
            store = dist.distributed_c10d._get_default_store()
            self._checks = CallCheck(store, self._prefix, self.facts, self.group, self.limit_s)
            for name in WATCHED:
                self._patch(dist, name, self._checks.wrapped(name))
        self._patch(torch.Tensor, "backward", self._backward())
        self._patch(torch, "save", self._save())
        self._patch(DistributedSampler, "__iter__", self._iterate())
        self._patch_loader()
        hooks = [
            self.model.register_forward_pre_hook(self._before_model),
            self.inner.register_forward_pre_hook(self._before_inner, with_kwargs=True),
            self.inner.register_forward_hook(self._after_inner),
            self.optimizer.register_step_pre_hook(self._before_step),
            self.optimizer.register_step_post_hook(self._after_step),
        ]
        for param in self._trained():
            hooks.append(param.register_post_accumulate_grad_hook(self._gradient))
            self._number_of[param] = len(self._number_of)
        self._undo.extend(hook.remove for hook in hooks)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        if self._checks is not None:
            self._checks.leave()
        if isinstance(error, KeyboardInterrupt):
            return
        self._close_window()
        self.facts.failed = error is not None
        self.facts.end = self._sum_of_weights()
        self.facts.seconds = self._clock.seconds()
        self.facts.statistics = [float(total) for total in self._statistics]
        for step in self._weights:
            weights = [weight.plain() for weight in step]
            self.facts.weights.append([weight for weight in weights if weight is not None])
        if self._draws is not None:
            self.facts.draws = self._draws.plain()
        self._look_at_wrapping()
        patience_s = 2 * self.limit_s if error is None else min(self.limit_s, AFTER_ERROR_S)
        self.findings = judge(self._all_facts(patience_s))
        if not self.quiet and self.facts.rank == 0:
            for finding in self.findings:
                print(f"doctor: {finding}", file=sys.stderr, flush=True)

    def _patch(self, owner: Any, name: str, new: Any) -> None:
        self._undo.append(functools.partial(setattr, owner, name, getattr(owner, name)))
        setattr(owner, name, new)

    def _patch_loader(self) -> None:
        """Take the time of each batch, and look at what is drawn for it."""
        kind = DataLoader if self.loader is None else type(self.loader)
        makers = [base for base in kind.__mro__ if "__iter__" in vars(base)]
        if makers and makers[0].__module__ != "builtins":  # a list needs no time
            self._patch(makers[0], "__iter__", self._read(makers[0]))
        if self._draws is not None:
            self._patch(self.loader, "collate_fn", self._draws.collate)
            self._patch(self.loader, "worker_init_fn", self._draws.begin_worker)

    def _all_facts(self, patience_s: float) -> list[Facts]:
        """Of the ranks that come in time: one may have died."""
        if self._checks is None:
            return [self.facts]
        store = self._checks.store
        store.set(self._checks.left_key(self.facts.rank), json.dumps(self.facts.plain()))
        keys = [self._checks.left_key(rank) for rank in self._checks.ranks]
        try:
            store.wait(keys, timedelta(seconds=patience_s))
        except RuntimeError:
            keys = [key for key in keys if store.check([key])]
        return [Facts(**json.loads(text)) for text in store.multi_get(keys)]

    # ---- what is noted

    def _trained(self) -> list[nn.Parameter]:
        return [param for param in self.inner.parameters() if param.requires_grad]

    def _waited_s(self) -> float:
        return self._checks.waited_s if self._checks else 0.0

    def _sends(self) -> bool:
        """Whether the backward of this forward pass will send gradients."""
        if isinstance(self.model, DistributedDataParallel):
            return self.model.require_backward_grad_sync
        return getattr(self.model, "_syncing", False)

    def _joins(self) -> bool:
        """Whether ranks may end early: DDP's `join()` itself calls for those that have."""
        return isinstance(self.model, DistributedDataParallel) and self.model._join_config.enable

    def _before_model(self, _: nn.Module, __: Any) -> None:
        if not torch.is_grad_enabled():
            return
        self._close_window()
        self._syncs = self._sends()
        self._num_backwards = 0
        if self._checks and self._syncs and not self._joins():
            self._checks.meet(FORWARD)

    def _before_inner(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if not (self.inner.training and torch.is_grad_enabled()):
            return
        if self.facts.start is None:
            self.facts.start = self._sum_of_weights()
        self._note_epoch()
        self._note_statistics()
        inputs = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        if inputs and self._clock.is_on:
            self._note_inputs(inputs)
        self._clock.begin()

    def _after_inner(self, _: nn.Module, __: Any, ___: Any) -> None:
        if self.inner.training and torch.is_grad_enabled():
            self._clock.lap()
            self._clock.end("forward")

    def _note_epoch(self) -> None:
        """A pass through the sampler counts from its second step on: the first may be a trial."""
        self._num_forwards += 1
        if self._num_forwards == 2 and self._epoch is not None:
            self.facts.epochs.append(self._epoch)

    def _note_statistics(self) -> None:
        """BatchNorm's, where all ranks have been given those of one: at the first forward pass of a
        step, unless the one before sent nothing.
        """
        if not self._is_first_forward:
            return
        self._is_first_forward = False
        number = self._num_steps
        is_due = number < FIRST_STATISTICS or number % EVERY_STATISTICS == 0
        are_given = getattr(self.model, "require_forward_param_sync", True)
        if is_due and are_given and self._batch_norms:
            total = self._sum_of_statistics()
            if total is not None:
                self._statistics.append(total)

    def _note_inputs(self, inputs: list[torch.Tensor]) -> None:
        here = next(self.inner.parameters()).device
        if inputs[0].device != here:
            self.facts.foreign_inputs += 1
        elif len(self.facts.inputs) < HASHED_PASSES:
            self.facts.inputs.append(_checksum(inputs))

    def _backward(self) -> Callable[..., None]:
        original = torch.Tensor.backward

        @functools.wraps(original)
        def backward(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            self._reached_now.clear()
            is_on = self._clock.is_on
            weight = watch_loss(loss) if is_on else Weight()
            place = calling_place() if is_on else ""
            self._clock.begin()
            original(loss, *args, **kwargs)
            if self._reached_now:  # else it was another model's
                self._clock.end("backward")
                self._after_backward(weight, place)

        return backward

    def _gradient(self, param: nn.Parameter) -> None:
        """A weight has got its gradient."""
        self._reached_now.add(param)
        self._newest = param
        # an event of CUDA costs more than a look at the clock: only for the usual last one
        if param is self._usual_last or not self._clock.on_gpu:
            self._clock.lap()

    def _after_backward(self, weight: Weight, place: str) -> None:
        self._usual_last = self._newest
        self._reached |= self._reached_now
        if self._num_backwards == 0 and self._syncs:
            self._num_syncs += 1
        if self._clock.is_on:
            numbers = [self._number_of[param] for param in self._reached_now]
            weight.key = key_of(place, self._num_backwards, numbers)
            self._losses.append(weight)
        self._num_backwards += 1

    def _close_window(self) -> None:
        """All backward passes of a forward pass are over: which weights took no part?"""
        if self._syncs and self._reached:
            missing = sum(param not in self._reached for param in self._trained())
            self.facts.unused = max(self.facts.unused, missing)
        self._reached.clear()

    def _read(self, owner: type) -> Callable[..., Any]:
        original = vars(owner)["__iter__"]

        @functools.wraps(original)
        def iterate(loader: Any) -> Any:
            if self.loader is not None and loader is not self.loader:
                return original(loader)
            return TimedBatches(functools.partial(original, loader), self._clock, self._begin_batch)

        return iterate

    def _begin_batch(self, number: int) -> None:
        if self._draws is not None:
            self._draws.begin_batch(number)

    def _save(self) -> Callable[..., None]:
        original = torch.save

        @functools.wraps(original)
        def save(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
            if isinstance(f, (str, Path)):
                self.facts.saved.append(f"{socket.gethostname()} {Path(f).absolute()}")
            original(obj, f, *args, **kwargs)

        return save

    def _iterate(self) -> Callable[..., Any]:
        original = DistributedSampler.__iter__

        @functools.wraps(original)
        def iterate(sampler: DistributedSampler) -> Any:
            if sampler is self.sampler and sampler.shuffle:
                self._epoch = sampler.epoch
                self._num_forwards = 0
            return original(sampler)

        return iterate

    def _before_step(self, *_: Any) -> None:
        self._step_depth += 1
        if self._step_depth == 1:
            self._clock.begin()

    def _after_step(self, *_: Any) -> None:
        self._step_depth -= 1
        if self._step_depth:  # an optimizer that calls the step of its base class
            return
        self._clock.lap()
        self._clock.end("optimizer")
        self._close_window()
        if self._clock.is_on:
            self._weights.append(list(self._losses))
            self.facts.syncs.append(self._num_syncs)
        self._clock.end_step()
        self._losses.clear()
        self._num_syncs = 0
        self._num_steps += 1
        self._is_first_forward = True

    def _look_at_wrapping(self) -> None:
        if not isinstance(self.model, DistributedDataParallel):
            return
        known = {id(param) for param in self.model._module_parameters}
        trained = self._trained()
        self.facts.unknown = sum(id(param) not in known for param in trained)
        self.facts.moved = sum(param.device != self.model.device for param in trained)

    def _sum_of_weights(self) -> float | None:
        """Sum of absolute values, which differs as soon as one weight does."""
        total = 0.0
        for param in self.inner.parameters():
            if param.is_meta:
                return None
            total += float(param.detach().double().abs().sum())
        return total

    def _sum_of_statistics(self) -> torch.Tensor | None:
        """Read when the block is over: on a GPU it is not there yet."""
        totals = []
        for module in self._batch_norms:
            if module.running_mean is not None and module.running_var is not None:
                totals.append(module.running_mean.abs().sum() + module.running_var.sum())
        return torch.stack(totals).double().sum() if totals else None


def watch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Any = None,
    group: dist.ProcessGroup | None = None,
    limit_s: float = 300.0,
    quiet: bool = False,
) -> Watch:
    """Look on while a training loop runs: `with doctor.watch(model, optimizer) as watched:`.

    Args:
        model, optimizer, loader, group, limit_s, quiet: As those of `Watch`.
    """
    return Watch(model, optimizer, loader, group, limit_s, quiet)


def _checksum(values: list[torch.Tensor]) -> int:
    """Of numbers spread over all inputs."""
    total = 0
    for value in values:
        flat = value.detach().flatten()
        spread = flat[:: max(1, len(flat) // HASHED_VALUES)].contiguous().cpu()
        total = zlib.crc32(spread.view(torch.uint8).numpy().tobytes(), total)
    return total
