"""A doctor that watches a plain PyTorch training loop while it runs.

    with doctor.watch(model, optimizer, loader=loader) as watched:
        for inputs, targets in loader:
            ...
    watched.findings        the same on all ranks; rank 0 has printed them

Every rank notes plain numbers (`facts`): what reaches the gradient of each step (`watch_gradient`),
which samples are drawn (`watch_samples`), where its time goes (`watch_clock`). When the block ends
they travel over the store, and each rank judges all of them (`judge`). What would hang is stopped
while it runs (`watch_calls`). Outside the block nothing is patched.

Held by: tests/ranks/test_doctor_watch.py::test_the_doctor_names_exactly_the_bug
"""

import functools
import itertools
import json
import socket
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, DistributedSampler

from labcode.doctor.facts import Facts, Finding, FindingError
from labcode.doctor.judge import judge
from labcode.doctor.watch_calls import BACKWARD, EVALUATION, FORWARD, WATCHED, CallCheck, Story
from labcode.doctor.watch_clock import PhaseClock, TimedBatches
from labcode.doctor.watch_draws import draws_of
from labcode.doctor.watch_errors import meaning_of
from labcode.doctor.watch_gradient import Gradient, foreign_and_forgotten
from labcode.doctor.watch_loss import Weight, calling_place, key_of, watch_loss
from labcode.doctor.watch_samples import Pass, Passes
from labcode.runtime.bootstrap import describe
from labcode.runtime.units import type_in_words

NOTED_STEPS = 200  # so that a long run needs no more memory
HASHED_PASSES = 32  # forward passes whose inputs are compared: on a GPU each is waited for
HASHED_VALUES = 4096  # of an input, spread over it
EVERY_STATISTICS = 16  # steps: BatchNorm that has diverged stays so
# a rank holds a part of the weights, or goes its own way for some steps
NO_REPLICAS = {"FullyShardedModule", "FullyShardedDataParallel", "PostLocalSGDOptimizer"}
NAMED = 3  # parameters that are named
FIRST_STATISTICS = 4  # steps of a short run that are all looked at
ERROR = 200  # characters of an error that are told to the others
AFTER_ERROR_S = 10.0  # how long the others' facts are waited for after an error
DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_numbers = itertools.count()  # of the blocks of this process; ranks enter the same blocks


class Watch:
    """Watches the loop between `__enter__` and `__exit__`.

    Communicates: at the end, over the store, one note of a few kB from each rank; and one short
        note for each collective that the script calls by itself, each backward pass that sends
        gradients and each forward pass that sends buffers.

    Args:
        model: The model as the loop calls it: DDP, labcode's DataParallel, or a bare module;
            compiled or not.
        optimizer: Ends a step; or several, each of which has steps of its own. The time of a step
            is that between two steps of the first.
        loader: The time of its batches is taken; of a DataLoader its DistributedSampler and the
            random numbers of its augmentation are looked at. None: any DataLoader's time is taken.
        group: The ranks that train together; None: those among which the model averages gradients,
            all for a bare module.
        limit_s: How long a rank may be late at a collective before it counts as missing: longer
            than what one rank does alone, such as a checkpoint. A rank that has left the block is
            not waited for.
        quiet: Print nothing.

    Attributes:
        findings: What was found, once the block has ended.
        facts: What this rank noted.

    Raises:
        ValueError: The block stands inside `model.join()`: it has to stand around it; or no
            optimizer was given.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        loader: Any = None,
        group: dist.ProcessGroup | None = None,
        limit_s: float = 300.0,
        quiet: bool = False,
    ) -> None:
        self.model = model
        self.wrapper = getattr(model, "_orig_mod", model)  # of torch.compile
        inner = getattr(self.wrapper, "module", self.wrapper)
        assert isinstance(inner, nn.Module)
        self.inner: nn.Module = inner
        given = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
        self._kinds = {type(one).__name__ for one in (self.wrapper, *given)}
        optimizers = [_with_hooks(one) for one in given]
        self.optimizer = optimizers[0]
        self.gradients = [Gradient(one, self._trained()) for one in optimizers]
        self.loader = loader
        self.sampler = getattr(loader, "sampler", None)
        self.limit_s = limit_s
        self.quiet = quiet
        self.findings: list[Finding] = []
        self.group = group or self._group_of_wrapper()
        self.facts = Facts(0)
        if dist.is_initialized():
            self.facts = Facts(dist.get_rank(self.group), dist.get_world_size(self.group))
        self._undo: list[Callable[[], object]] = []
        self._checks: CallCheck | None = None
        self._prefix = ""
        self._error = ""
        weight = next(self.inner.parameters())
        self.facts.device = describe(weight.device)
        self._clock = PhaseClock(weight.device, self._waited_s, NOTED_STEPS)
        self._draws = draws_of(loader)
        dropouts = [m for m in self.inner.modules() if isinstance(m, DROPOUT)]
        self.facts.drops_out = any(module.p > 0 for module in dropouts)
        self._batch_norms = [m for m in self.inner.modules() if isinstance(m, BATCH_NORM)]
        self._statistics: list[torch.Tensor] = []
        self._passes = Passes()
        # of an optimizer step
        self._num_steps = 0
        self._step_depth = 0
        self._is_first_forward = True
        # of forward passes that train
        self._num_forwards = 0
        self._is_through_wrapper = False
        self._bypasses = False
        self._batch = 0
        self._source: list[int] = []
        self._outputs: list[torch.Tensor] = []  # until backward begins
        self._is_inside = False  # a forward pass, or it has ended in an error
        self._is_pending = False  # its backward pass
        self._num_skipped = 0
        self._last_skipped = ""
        # since the last forward pass
        self._syncs = False
        self._num_backwards = 0
        self._reached: set[nn.Parameter] = set()
        # of a backward pass
        self._reached_now: set[nn.Parameter] = set()
        self._newest: nn.Parameter | None = None
        self._usual_last: nn.Parameter | None = None
        self._number_of: dict[nn.Parameter, int] = {}
        self._has_sent = False

    # ---- the block

    def __enter__(self) -> "Watch":
        if self._joins():
            raise ValueError("doctor.watch inside model.join(): enter the watch first, then join")
        if isinstance(self.wrapper, DistributedDataParallel) and not self.wrapper.static_graph:
            self.facts.finds_unused = bool(self.wrapper.find_unused_parameters)
        self.facts.gradient_bytes = sum(p.numel() * p.element_size() for p in self._trained())
        number = next(_numbers)
        if dist.is_initialized() and dist.get_world_size(self.group) > 1:
            first, *_ = dist.get_process_group_ranks(self.group)
            self._prefix = f"doctor/{number}/{first}"
            store = dist.distributed_c10d._get_default_store()
            self._checks = CallCheck(
                store,
                self._prefix,
                self.facts,
                self.group,
                self.limit_s,
                self._tell,
                self._passes.collective,
            )
            for name in WATCHED:
                self._patch(dist, name, self._checks.wrapped(name))
        self._patch(torch.Tensor, "backward", self._backward())
        self._patch(torch, "save", self._save())
        self._patch(DistributedSampler, "__iter__", self._iterate())
        self._patch_loader()
        self._patch_clip()
        # a compiled module is called as a whole: what is inside would be traced with its hooks
        is_compiled = self.wrapper is not self.model
        called = self.model if is_compiled else self.inner
        before_model = _Hook(self.model, self._before_model)
        before_inner = _Hook(called, self._before_inner)
        after_inner = _Hook(called, self._after_inner)
        hooks = [
            self.model.register_forward_pre_hook(before_model),
            called.register_forward_pre_hook(before_inner, with_kwargs=True),
            called.register_forward_hook(after_inner),
            self.optimizer.register_step_pre_hook(self._before_step),
            self.optimizer.register_step_post_hook(self._after_step),
        ]
        for gradient in self.gradients:
            hooks.extend(gradient.hooks())
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
            if error is not None and not isinstance(error, FindingError):
                self._error = _told(error)
            self._note_skipped()
            self._checks.leave()
        if isinstance(error, KeyboardInterrupt):
            return
        self._close_window()
        self._note_all(error)
        patience_s = 2 * self.limit_s if error is None else min(self.limit_s, AFTER_ERROR_S)
        facts = self._all_facts(patience_s)
        self.findings = judge(facts)
        # rank 0, or who knows it where rank 0 stands still or is gone
        if not self.quiet and self.facts.rank == min(fact.rank for fact in facts):
            for finding in self.findings:
                hint = "hint: " if finding.is_hint else ""
                # in one piece: other ranks write their errors at the same time
                sys.stderr.write(f"doctor: {hint}{finding}\n")
            sys.stderr.flush()

    def _note_all(self, error: BaseException | None) -> None:
        """What is known when the loop is over."""
        self.facts.failed = error is not None
        self.facts.reducer = meaning_of(error)
        self.facts.end = self._sum_of_weights()
        self.facts.seconds = self._clock.seconds()
        self.facts.statistics = [float(total) for total in self._statistics]
        self.facts.steps = [gradient.plain() for gradient in self.gradients]
        self.facts.taken = self.gradients[0].num_steps
        for step in self.facts.steps[0]:
            sends = Counter(one["key"] for one in step["passes"] if one["sends"])
            self.facts.syncs.append(max(sends.values(), default=0))
        self.facts.evaluated = self._passes.plain()
        found = foreign_and_forgotten(self.gradients, self._trained())
        self.facts.foreign, self.facts.forgotten = found
        if self._draws is not None:
            self.facts.draws = self._draws.plain()
        self._look_at_wrapping()

    def _tell(self) -> Story:
        """How far this rank is."""
        story = Story(self._num_skipped, self._last_skipped, len(self._passes), error=self._error)
        latest = self._passes.latest
        if latest is not None:
            story.batches = latest.batches
            story.ended = latest.ended
        return story

    def _patch(self, owner: Any, name: str, new: Any) -> None:
        self._undo.append(functools.partial(setattr, owner, name, getattr(owner, name)))
        setattr(owner, name, new)

    def _patch_loader(self) -> None:
        """Take the time of each batch, and look at what is drawn for it."""
        kinds = [DataLoader] if self.loader is None else [type(self.loader), DataLoader]
        patched: list[type] = []
        for kind in kinds:
            maker = next((base for base in kind.__mro__ if "__iter__" in vars(base)), None)
            # a list needs no time
            if maker is None or maker in patched or maker.__module__ == "builtins":
                continue
            self._patch(maker, "__iter__", self._read(maker, is_first=not patched))
            patched.append(maker)
        if self._draws is not None:
            self._patch(self.loader, "collate_fn", self._draws.collate)
            self._patch(self.loader, "worker_init_fn", self._draws.begin_worker)

    def _patch_clip(self) -> None:
        """Clipping by the norm, whichever name a script knows it by."""
        original = getattr(clip_grad, "_clip_grads_with_norm_", None)
        if original is None:
            return

        @functools.wraps(original)
        def clipping(parameters: Any, max_norm: Any, *args: Any, **kwargs: Any) -> None:
            params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            clip = functools.partial(original, params, max_norm, *args, **kwargs)
            for gradient in self.gradients:
                clip = functools.partial(gradient.clipped, clip, params, max_norm)
            clip()

        self._patch(clip_grad, "_clip_grads_with_norm_", clipping)

    def _all_facts(self, patience_s: float) -> list[Facts]:
        """Facts of the ranks that come in time: one may have died."""
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

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        named = self.inner.named_parameters()
        return [(name, param) for name, param in named if param.requires_grad]

    def _trained(self) -> list[nn.Parameter]:
        return [param for _, param in self._named()]

    def _group_of_wrapper(self) -> dist.ProcessGroup | None:
        if isinstance(self.wrapper, DistributedDataParallel):
            return self.wrapper.process_group
        group = getattr(self.wrapper, "group", None)
        return group if isinstance(group, dist.ProcessGroup) else None

    def _are_replicas(self) -> bool:
        """Whether the weights of all ranks are to be the same.

        They are not where each rank holds a shard, nor where weights are averaged now and then.
        """
        if self._kinds & NO_REPLICAS or getattr(self.wrapper, "trains_alone", False):
            return False
        return not any(isinstance(param, DTensor) for param in self.inner.parameters())

    def _waited_s(self) -> float:
        return self._checks.waited_s if self._checks else 0.0

    def _sends(self) -> bool:
        """Whether the backward of this forward pass will send gradients."""
        if isinstance(self.wrapper, DistributedDataParallel):
            return self.wrapper.require_backward_grad_sync
        return getattr(self.wrapper, "_syncing", False)

    def _forward_waits(self) -> bool:
        """Whether DDP waits for all ranks before this forward pass.

        It does to send buffers such as those of BatchNorm, with gradients or without; and once, in
        the second step, to agree on the order of the buckets.
        """
        ddp = self.wrapper
        if not isinstance(ddp, DistributedDataParallel):
            return False
        sends_buffers = getattr(ddp, "_check_sync_bufs_pre_fwd", None)
        if sends_buffers is not None and sends_buffers():
            return True
        reorders = self._has_sent and not getattr(ddp, "_has_rebuilt_buckets", True)
        searches = ddp.find_unused_parameters and not ddp.static_graph
        return torch.is_grad_enabled() and reorders and not searches

    def _joins(self) -> bool:
        """Whether ranks may end early: DDP's `join()` itself calls for those that have."""
        ddp = self.wrapper
        return isinstance(ddp, DistributedDataParallel) and ddp._join_config.enable

    def _before_model(self, *_: Any) -> None:
        self._is_through_wrapper = True
        if torch.is_grad_enabled():
            self._close_window()
            self._syncs = self._sends()
            self._num_backwards = 0
            self._note_skipped()
        if self._checks and self._forward_waits() and not self._joins():
            is_training = self.inner.training and torch.is_grad_enabled()
            self._checks.meet(FORWARD if is_training else EVALUATION)

    def _note_skipped(self) -> None:
        """The forward pass before had no backward pass."""
        if not (self._is_pending or self._is_inside):
            return
        self._num_skipped += 1
        bad = any(not bool(output.isfinite().all()) for output in self._outputs)
        reason = ", whose output is not finite," if bad else ""
        if self._is_inside:
            reason = ", which ended in an error,"
        self._is_pending = False
        self._is_inside = False
        self._last_skipped = f"its forward pass {self._num_forwards}{reason}"
        self._outputs.clear()

    def _before_inner(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        is_through_wrapper = self._is_through_wrapper
        self._is_through_wrapper = False
        leaves = tree_leaves((args, kwargs))  # a batch may be a dict, or a tuple
        inputs = [value for value in leaves if isinstance(value, torch.Tensor)]
        batch = len(inputs[0]) if inputs and inputs[0].ndim else 0
        trains = self.inner.training and torch.is_grad_enabled()
        self._passes.forward(trains, batch)
        if not trains:
            return
        self._is_inside = self._syncs
        self._batch = batch
        latest = self._passes.latest
        place = [len(self._passes), latest.batches] if latest is not None else []
        # parts of one batch share its memory
        memory = inputs[0].untyped_storage().data_ptr() if inputs and place else 0
        self._source = [*place, memory]
        self._num_forwards += 1
        self._bypasses = not is_through_wrapper
        if self.facts.start is None:
            self.facts.start = self._sum_of_weights()
        sampler = self._passes.new_epoch(self.sampler)
        if sampler is not None:
            self.facts.epochs.append(sampler[1])
            self.facts.seeds.append(sampler[0])
        self._note_statistics()
        if inputs and self._clock.is_on:
            self._note_inputs(inputs)
        self._clock.begin()

    def _after_inner(self, _: nn.Module, __: Any, output: Any) -> None:
        if not (self.inner.training and torch.is_grad_enabled()):
            return
        self._clock.lap()
        self._clock.end("forward")
        self._is_inside = False
        self._is_pending = self._syncs
        outputs = output if isinstance(output, (list, tuple)) else [output]
        self._outputs = []
        for one in outputs:
            if isinstance(one, torch.Tensor) and one.is_floating_point():
                self._outputs.append(one.detach())

    def _note_statistics(self) -> None:
        """BatchNorm's, where all ranks have been given those of one: at the first forward pass of a
        step, unless the one before sent nothing.
        """
        if not self._is_first_forward:
            return
        self._is_first_forward = False
        number = self._num_steps
        is_due = number < FIRST_STATISTICS or number % EVERY_STATISTICS == 0
        are_given = getattr(self.wrapper, "require_forward_param_sync", True)
        if is_due and are_given and self._batch_norms:
            total = self._sum_of_statistics()
            if total is not None:
                self._statistics.append(total)

    def _note_inputs(self, inputs: list[torch.Tensor]) -> None:
        here = next(self.inner.parameters()).device
        # some are meant to stay on the CPU, such as the lengths of packed sequences
        if all(value.device != here for value in inputs):
            self.facts.foreign_inputs += 1
        elif len(self.facts.inputs) < HASHED_PASSES:
            self.facts.inputs.append(_checksum(inputs))

    def _backward(self) -> Callable[..., None]:
        original = torch.Tensor.backward

        @functools.wraps(original)
        def backward(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            is_on = self._clock.is_on
            weight = watch_loss(loss, self._batch) if is_on else Weight()
            place = calling_place() if is_on else ""
            self._outputs = []
            if self._checks and self._syncs and self._num_backwards == 0 and not self._joins():
                self._checks.meet(BACKWARD)
            self._reached_now.clear()
            for gradient in self.gradients:
                gradient.begin_backward()
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
        numbers = [self._number_of[param] for param in self._reached_now]
        weight.key = key_of(place, self._num_backwards, numbers)
        for gradient in self.gradients:
            note = gradient.end_backward(self._reached_now)
            if note is not None:
                note.weight = weight
                note.forward = self._num_forwards
                note.source = self._source
                note.sends = self._num_backwards == 0 and self._syncs
                note.bypasses = self._bypasses
        self._has_sent = self._has_sent or self._syncs
        self._num_backwards += 1
        self._is_pending = False

    def _close_window(self) -> None:
        """All backward passes of a forward pass are over: which weights took no part?"""
        if self._syncs and self._reached:
            missing = []
            for name, param in self._named():
                if param in self._number_of and param not in self._reached:
                    missing.append(name)
            if len(missing) > self.facts.unused:
                self.facts.unused = len(missing)
                self.facts.unused_names = missing[:NAMED]
        self._reached.clear()

    def _read(self, owner: type, is_first: bool) -> Callable[..., Any]:
        original = vars(owner)["__iter__"]

        @functools.wraps(original)
        def iterate(loader: Any) -> Any:
            is_own = self.loader is None or loader is self.loader
            if loader is self.loader and not is_first:  # it calls that of its base class
                return original(loader)
            clock = self._clock if is_own else PhaseClock.stopped()
            before = self._begin_batch if is_own else _nothing
            one = self._passes.begin(loader)
            return TimedBatches(
                functools.partial(original, loader),
                clock,
                before,
                functools.partial(self._passes.came, one),
                functools.partial(_end, one),
            )

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
            drawn = list(original(sampler))
            self._passes.draws(sampler, len(drawn))
            return iter(drawn)

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
        self._clock.end_step()
        self._num_steps += 1
        self._is_first_forward = True

    def _look_at_wrapping(self) -> None:
        if not isinstance(self.wrapper, DistributedDataParallel):
            return
        known = {id(param) for param in self.wrapper._module_parameters}
        trained = self._trained()
        self.facts.unknown = sum(id(param) not in known for param in trained)
        # DDP averages what needed a gradient when it was wrapped
        num_averaged = self.wrapper._get_ddp_logging_data()["num_parameter_tensors"]
        self.facts.unfrozen = max(0, len(trained) - int(num_averaged))
        self.facts.moved = sum(param.device != self.wrapper.device for param in trained)

    def _sum_of_weights(self) -> float | None:
        """Sum of absolute values, which differs as soon as one weight does."""
        total = 0.0
        if not self._are_replicas():
            return None
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
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    loader: Any = None,
    group: dist.ProcessGroup | None = None,
    limit_s: float = 300.0,
    quiet: bool = False,
) -> Watch:
    """Watch a training loop while it runs: `with doctor.watch(model, optimizer) as watched:`.

    Args:
        model, optimizer, loader, group, limit_s, quiet: As those of `Watch`.
    """
    return Watch(model, optimizer, loader, group, limit_s, quiet)


class _Hook:
    """A hook of a module that copies of the module do not have: an average of the weights that is
    made inside the block, or a file of the whole module.

    torch.compile leaves it alone, where the module was compiled in place.
    """

    def __init__(self, module: nn.Module, hook: Callable[..., None]) -> None:
        is_compiled = getattr(module, "_compiled_call_impl", None) is not None
        self._hook = torch.compiler.disable(hook) if is_compiled else hook

    def __call__(self, *args: Any) -> None:
        self._hook(*args)

    def __reduce__(self) -> Any:
        # for copy and pickle. In its place there has to be something that takes any arguments,
        # returns None, and can be read where there is no labcode: this does nothing
        return functools.partial, (sys.audit, "doctor")


def _with_hooks(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside a wrapper, as Accelerate and PostLocalSGDOptimizer have one.

    Raises:
        ValueError: There is no run.
    """
    inner = optimizer
    while inner is not None and not hasattr(inner, "_optimizer_step_pre_hooks"):
        inner = getattr(inner, "optimizer", None) or getattr(inner, "optim", None)
    if inner is None:
        raise ValueError(
            f"doctor.watch was given {type_in_words(optimizer)} for the optimizer: give it the "
            "torch.optim.Optimizer whose step() the loop calls, or a list of them"
        )
    return inner


def _told(error: BaseException) -> str:
    """An error on one line; of one from a loader's worker its last line, which says what it was."""
    text = str(error).strip()
    if "Traceback" in text:
        return text.splitlines()[-1][:ERROR]
    return f"{type(error).__name__}: {' '.join(text.split())}"[:ERROR]


def _end(one: Pass) -> None:
    one.ended = True


def _nothing(_: int) -> None:
    pass


def _checksum(values: list[torch.Tensor]) -> int:
    """Checksum of numbers spread over all inputs."""
    total = 0
    for value in values:
        flat = value.detach().flatten()
        spread = flat[:: max(1, len(flat) // HASHED_VALUES)].contiguous().cpu()
        total = zlib.crc32(spread.view(torch.uint8).numpy().tobytes(), total)
    return total
