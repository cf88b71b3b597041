"""ZeRO-3: each rank keeps its rows of every weight, and borrows the others for a moment.

The modules of a model are divided into units, one for each layer and one for the rest. Around each
unit the ranks of a group do, with p ranks and N weights in all:

    forward    all-gather the unit's weights, compute, free them            (p-1)/p  N
    backward   all-gather them again, compute, free them                    (p-1)/p  N
               reduce-scatter the gradients, keep one's own rows            (p-1)/p  N

so that 3/2 of what DDP sends is sent, and a rank never holds more than its rows and two units.
While a unit computes, the weights of the next one already travel (prefetch).

So each weight exists as two parameters. `parameters()` gives this rank's rows, on which the
optimizer works. `layer.weight`, which forward reads, is the whole one that autograd knows, but most
of the time the memory of its values is given back, `untyped_storage().resize_(0)`. What autograd
has saved of a weight in forward, such as its transpose, points to the same storage, and is right
again as soon as the weight is gathered for backward. A whole weight that is read at another time
gives NaN.

The life of one layer in a step:

    before its forward     gather; start to gather the next layer
    after its forward      reshard: the storage is empty, the graph still points to it
    its output's gradient  gather again; start to gather the layer before
    its last gradient      reduce-scatter starts; reshard
    end of backward        wait for the sum, add it to the gradient of the rows

Source: Rajbhandari et al. 2019 (arXiv:1910.02054), sections 5.3 and 7.2.2; Zhao et al. 2023
    (PyTorch FSDP, arXiv:2304.11277), sections 3 and 4, for units, prefetch and storage.
Held by: tests/ranks/test_zero.py, tests/ranks/test_parallel_parity.py
"""

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from labcode.comm.collectives import start_all_gather, start_reduce_scatter
from labcode.parallel.buckets import Synchronized, make_copies_equal, on_gradient
from labcode.parallel.zero.cut import Cut, piece_of
from labcode.parallel.zero.gradients import shards_by_name

Materialize = Callable[[str], torch.Tensor]


class FullyShardedModule(Synchronized):
    """A module whose weights, gradients and optimizer state are divided over a group.

    Call it like the module. After the last backward of a step call `finish_gradient_sync()`, then
    let an optimizer step that was made of `parameters()`: this rank's rows, under the names that
    the module gives the weights, as in the state dict. The norm of all gradients is the root of the
    sum over the ranks of their squares: `clip_grad_norm_` would take that of these rows. Every rank
    runs the same units in the same order.

    Communicates: forward one all-gather per unit; backward one all-gather and one reduce-scatter
        per unit; the unit of the rest is gathered once per step. At construction a broadcast of
        every weight, unless `materialize` gives them.
    Held by: tests/ranks/test_zero.py::test_a_fully_sharded_module_trains_like_a_whole_one,
        tests/ranks/test_zero.py::
        test_an_optimizer_made_of_its_parameters_trains_a_fully_sharded_module

    Args:
        module: The same module on every rank, whose parameters become this rank's rows; on the meta
            device with `materialize`.
        group: The ranks over which everything is divided.
        compute_dtype: The dtype of the gathered weights, and of floating-point inputs; None: that
            of the weights. The shards keep the dtype of the weights.
        reduce_dtype: The dtype in which gradients travel and are summed; None: that of the weights.
        units: The modules that are gathered one at a time; None: every layer in an `nn.ModuleList`.
        num_shares: The number of shares into which the batch is cut: the sum of the gradients is
            divided by it. None: as many as ranks.
        replicas: More groups of ranks that hold the same weights; gradients are summed over them.
        reshard_after_forward: Give the weights back between forward and backward. False keeps them
            until backward is done, which saves an all-gather and is ZeRO-2 in memory.
        prefetch: Start to gather the next unit while one computes.
        materialize: `materialize(name)` is the whole value of a weight of a meta module: no rank
            ever holds more than one whole weight.
        groups: {parameter: its own group}, for parameters of which fewer ranks hold copies, as of
            experts that are divided over neighbours. They make a unit of their own in their layer.

    Attributes:
        shards: {name: this rank's rows of a weight}, frozen ones included; `.grad` is the average.
        accumulates_shards: Each backward outside `no_sync()` adds its average to the shards, so
            that no gradient stays whole between micro-batches.
    """

    accumulates_shards = True
    trains_alone = False

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup,
        compute_dtype: torch.dtype | None = None,
        *,
        reduce_dtype: torch.dtype | None = None,
        units: Iterable[nn.Module] | None = None,
        num_shares: int | None = None,
        replicas: Sequence[dist.ProcessGroup] = (),
        reshard_after_forward: bool = True,
        prefetch: bool = True,
        materialize: Materialize | None = None,
        groups: Mapping[nn.Parameter, dist.ProcessGroup] | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.group = group
        self.compute_dtype = compute_dtype
        self.reshard_after_forward = reshard_after_forward
        self.prefetch = prefetch
        self._in_backward = False
        # By name, because `_leave_meta` exchanges the parameters.
        own_group = {name: (groups or {}).get(param) for name, param in module.named_parameters()}
        if materialize is not None:
            _leave_meta(module)
        names = {param: name for name, param in module.named_parameters()}
        groups = {}
        for param, name in names.items():
            groups[param] = own_group[name] or group
        if materialize is None:
            make_copies_equal(module, group, replicas, groups)
        values = _WeightValues(names, materialize, compute_dtype)
        average = _Average(group, tuple(replicas), num_shares or group.size(), reduce_dtype)
        chosen = _layers(module) if units is None else list(units)
        self._units_of_layer: list[list[Unit]] = []
        shared = _used_outside(module, chosen)
        taken = set(shared)
        for layer in chosen:
            own = [param for param in layer.parameters() if param not in taken]
            taken.update(own)
            self._units_of_layer.append(_units_of(own, values, average, groups))
        # The rest (embedding, last norm, head, and what is shared) stays whole from the first
        # forward of a step to `finish_gradient_sync`: the head is the last module of forward and
        # the first one of backward.
        rest = [param for param in module.parameters() if param not in taken or param in shared]
        self._rest = _units_of(rest, values, average, groups)
        self.units = [*itertools.chain.from_iterable(self._units_of_layer), *self._rest]
        own_rows = {}
        for unit in self.units:
            own_rows |= dict(zip(unit.params, unit.shards))
        self.shards = shards_by_name(module, own_rows)
        _show_rows(module, own_rows)
        self.register_load_state_dict_pre_hook(_prefix_with_module)
        for number, layer in enumerate(chosen):
            self._watch(layer, number)
        self._unit_of: dict[nn.Parameter, Unit] = {}
        for unit in self.units:
            for param in unit.params:
                self._unit_of[param] = unit
                if param.requires_grad:
                    on_gradient(param, self._gradient_ready)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module computes."""
        # -1: no backward runs in this thread. Otherwise activation checkpointing repeats this
        # forward inside a backward, whose gradients must stay.
        if torch._C._current_graph_task_id() == -1:
            self._forget_backward()
        for unit in self._rest:
            unit.gather()
        if self.compute_dtype is not None:
            args, kwargs = pytree.tree_map(self._cast, (args, kwargs))
        output = self.module(*args, **kwargs)
        _before_backward_of(output, _backward_hook(weakref.ref(self)))
        if not torch.is_grad_enabled():
            self._release()
        return output

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's rows of each weight, under the names that the module gives them."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """This rank's rows and the buffers, under the names that the module gives them."""
        return self.module.state_dict(*args, **kwargs)

    def finish_gradient_sync(self) -> None:
        """Wait until each of the `shards` has its average; every rank calls it once per step.

        A weight that took no part counts as a gradient of zero.
        """
        # Units with gradients of `no_sync`, and units that this rank has not used at all. Other
        # ranks may have used them, and wait in the reduce-scatter.
        for unit in self.units:
            if unit.has_whole_gradients() or not unit.was_reduced:
                unit.reduce()
        for unit in self.units:
            unit.finish_reduce()
            unit.was_reduced = False
        self._release()

    def gather_parameters(self) -> None:
        """Nothing is left to do after an optimizer step: weights are gathered as they are used."""

    @torch.no_grad()
    def gather_full_params(self) -> dict[str, torch.Tensor]:
        """{name: the whole weight}, in the dtype of the shards, on every rank.

        Communicates: an all-gather of all weights.
        """
        wholes: dict[nn.Parameter, torch.Tensor] = {}
        for unit in self.units:
            wholes |= dict(zip(unit.shards, unit.wholes()))
        return {name: wholes[shard] for name, shard in self.shards.items()}

    # ---- around a unit

    def _watch(self, layer: nn.Module, number: int) -> None:
        """Gather a unit before its module runs, and give it back after."""
        alive = weakref.ref(self)

        def before(module: nn.Module, args: tuple, kwargs: dict) -> None:
            parallel = _require_alive(alive)
            parallel._gather(number, step=1)
            for tensor in pytree.tree_leaves((args, kwargs)):
                # Of what another module has made, not of a leaf, whose hook autograd calls before
                # it has to (below).
                if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                    tensor.register_hook(after_backward)

        def after(module: nn.Module, args: tuple, output: Any) -> None:
            parallel = _require_alive(alive)
            _before_backward_of(output, before_backward)
            # Under activation checkpointing a forward may run inside backward, which needs the
            # weights next.
            inside_backward = torch._C._current_graph_task_id() != -1
            is_last_use = parallel.reshard_after_forward or not torch.is_grad_enabled()
            if is_last_use and not inside_backward:
                for unit in parallel._units_of_layer[number]:
                    unit.reshard()

        def before_backward(grad: torch.Tensor) -> None:
            parallel = _require_alive(alive)
            parallel._begin_backward()
            parallel._gather(number, step=-1)

        def after_backward(grad: torch.Tensor) -> None:
            # A trained weight is given back with its gradient. A frozen one has none that would
            # tell when it was used for the last time; the input's gradient does. Autograd computes
            # first what forward computed last, so all of this layer is behind us when it comes to
            # what made its input. FSDP2 relies on the same (`_register_post_backward_hook`).
            for unit in _require_alive(alive)._units_of_layer[number]:
                if not unit.is_trained:
                    unit.reshard()

        layer.register_forward_pre_hook(before, with_kwargs=True)
        layer.register_forward_hook(after)

    def _gather(self, number: int, step: int) -> None:
        """Have a unit whole now, and the next one soon."""
        for unit in self._units_of_layer[number]:
            unit.gather()
        # After this layer's own gather, so that it does not wait behind the neighbour's. The price
        # is the memory of a second unit. These collectives match by their order, which is that of
        # the layers: that is why every rank has to run the same units.
        neighbour = number + step
        if self.prefetch and 0 <= neighbour < len(self._units_of_layer):
            for unit in self._units_of_layer[neighbour]:
                unit.start_gather()

    def _gradient_ready(self, param: nn.Parameter) -> None:
        """Note that a weight has its gradient of this backward; send a unit after its last one."""
        unit = self._unit_of[param]
        self._begin_backward()
        unit.ready.add(param)
        if len(unit.ready) < len(unit.params):
            return
        unit.ready.clear()
        if self._syncing:
            unit.reduce()
        if unit not in self._rest:
            unit.reshard()

    def _forget_backward(self) -> None:
        """Drop what a backward that raised has left: it never came to `_end_backward`.

        Held by: tests/ranks/test_zero.py::test_after_a_backward_that_raised_the_next_one_is_whole
        """
        if not self._in_backward:
            return
        self._in_backward = False
        for unit in self.units:
            unit.forget_gradients()

    def _begin_backward(self) -> None:
        if not self._in_backward:
            self._in_backward = True
            # Autograd calls it when this backward is done. FSDP2 uses the same private door; a hook
            # on a weight would not do, since any weight may be the last one, or have no gradient.
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        # Whole already, unless a forward without gradients came in between and gave it back.
        for unit in self._rest:
            unit.gather()

    def _end_backward(self) -> None:
        """Send what was not complete, so that all ranks have sent the same, and wait for it."""
        self._in_backward = False
        for unit in self.units:
            if self._syncing and unit.ready:
                unit.reduce()
            if unit not in self._rest:
                unit.reshard()
        for unit in self.units:
            unit.ready.clear()
            unit.finish_reduce()

    def _release(self) -> None:
        for unit in self.units:
            unit.reshard()

    def _cast(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.to(self.compute_dtype)
        return value


class Unit:
    """Weights that are gathered together, used, and given back.

    Args:
        params: Parameters of the module, at least one: all trained or all frozen, of one dtype.
        values: Gives the value of each, and its dtype while it is whole.
        average: What is done with gradients.

    Attributes:
        params: Parameters of the module; their memory is empty unless they are gathered.
        shards: This rank's rows of each.
        is_trained: Whether they have gradients.
        ready: Parameters whose gradient of this backward is there.
        was_reduced: Gradients were sent since the last `finish_gradient_sync`.
    """

    def __init__(
        self, params: Sequence[nn.Parameter], values: "_WeightValues", average: "_Average"
    ) -> None:
        self.params = list(params)
        self.average = average
        self.group = average.group
        self.cut = Cut([param.shape for param in params], self.group.size())
        self.shards: list[nn.Parameter] = []
        self._wholes: list[torch.Tensor] = []  # the memory of `params`, outside autograd
        # One NaN expanded to the shape of each, which stands in for it while its storage is empty.
        # Reading a tensor of an empty storage is a segmentation fault (torch 2.13 on a CPU). The
        # NaN shows up in the loss instead.
        self._absent: list[torch.Tensor] = []
        for param in self.params:
            value = values.of(param)
            # A clone: a view would keep the whole value alive.
            rows = piece_of(value, self.group.rank(), self.group.size()).clone()
            self.shards.append(nn.Parameter(rows, requires_grad=param.requires_grad))
            dtype = values.compute_dtype or value.dtype
            whole = torch.empty(param.shape, dtype=dtype, device=value.device)
            self._wholes.append(whole)
            self._absent.append(whole.new_full((), torch.nan).expand(param.shape))
        self.is_trained = self.params[0].requires_grad
        self.ready: set[nn.Parameter] = set()
        self.was_reduced = False
        self._is_whole = True
        self._gathering: Callable[[], torch.Tensor] | None = None
        self._reducing: Callable[[], torch.Tensor] | None = None
        self.reshard()

    def start_gather(self) -> None:
        """Begin to gather, unless that was done already."""
        if self._is_whole or self._gathering is not None:
            return
        with torch.no_grad():
            own = self.cut.pack(self.shards, self._wholes[0].dtype)
            self._gathering = start_all_gather(own, self.group, dim=0)

    def gather(self) -> None:
        """Return when the weights are whole."""
        self.start_gather()
        if self._gathering is None:
            return
        message = self._gathering()  # [p L]
        self._gathering = None
        # The same storage object gets memory again, perhaps at another address. Every tensor that
        # refers to it, in the graph of forward too, sees the values that are copied into it.
        for whole in self._wholes:
            whole.untyped_storage().resize_(whole.numel() * whole.element_size())
        # Autograd refuses a saved tensor that was changed in place since. It does not notice this
        # copy: `whole` counts its versions apart from the parameter that forward has saved, though
        # both have one storage. Here that is what is needed, since the values are the same.
        with torch.no_grad():
            self.cut.unpack_all(message, self._wholes)
        for param, whole in zip(self.params, self._wholes):
            param.data = whole
        self._is_whole = True

    def reshard(self) -> None:
        """Give the memory of the whole weights back."""
        if self._gathering is not None:
            # Prefetched, and not used after all: a message under way cannot be called back.
            self._gathering()
            self._gathering = None
        if self._is_whole:
            for param, whole, absent in zip(self.params, self._wholes, self._absent):
                param.data = absent
                whole.untyped_storage().resize_(0)
            self._is_whole = False

    def reduce(self) -> None:
        """Begin to average the gradients; this rank gets its rows of them."""
        self.finish_reduce()
        if not self.is_trained:
            return
        grads = []
        for param, whole in zip(self.params, self._wholes):
            if param.grad is None:
                grads.append(torch.zeros(param.shape, dtype=whole.dtype, device=whole.device))
            else:
                grads.append(param.grad)
        message = self.cut.pack_all(grads, self.shards[0].dtype)  # [p L], in the wide dtype
        # The whole gradients are freed here; until now, they and the message exist at once.
        for param in self.params:
            param.grad = None
        message /= self.average.num_shares  # before the sum, which might overflow in fp16
        message = message.to(self.average.dtype or message.dtype)
        self._reducing = start_reduce_scatter(message, self.group, dim=0)
        self.was_reduced = True

    def finish_reduce(self) -> None:
        """Wait for the averages, and add them to the gradients of the shards."""
        if self._reducing is None:
            return
        segment = self._reducing()
        self._reducing = None
        for group in self.average.replicas:
            dist.all_reduce(segment, group=group)
        segment = segment.to(self.shards[0].dtype)
        for shard, mean in zip(self.shards, self.cut.unpack(segment, self.group.rank())):
            shard.grad = mean.clone() if shard.grad is None else shard.grad + mean

    def forget_gradients(self) -> None:
        """Drop what a backward has left; no message of it stays under way."""
        if self._reducing is not None:
            self._reducing()  # waited for, and its result is dropped
            self._reducing = None
        self.ready.clear()
        for param in self.params:
            param.grad = None

    def has_whole_gradients(self) -> bool:
        """Whether a backward inside `no_sync` has left some."""
        return any(param.grad is not None for param in self.params)

    def wholes(self) -> list[torch.Tensor]:
        """New whole tensors in the dtype of the shards."""
        dtype = self.shards[0].dtype
        message = start_all_gather(self.cut.pack(self.shards, dtype), self.group, dim=0)()
        wholes = [
            torch.empty(param.shape, dtype=dtype, device=message.device) for param in self.params
        ]
        self.cut.unpack_all(message, wholes)
        return wholes


def _units_of(
    params: Iterable[nn.Parameter],
    values: "_WeightValues",
    average: "_Average",
    groups: Mapping[nn.Parameter, dist.ProcessGroup],
) -> list[Unit]:
    """Weights as units: usually one; more if groups or dtypes differ, or some are frozen.

    Frozen weights travel apart from trained ones: a message has one dtype, and a frozen model may
    have a narrower one than its adapters; and no zeros are reduce-scattered for them. It costs a
    second message in each layer that has both. FSDP2 sends one, as bytes.
    """
    alike: dict[tuple, list[nn.Parameter]] = {}
    for param in params:
        kind = (groups[param], param.requires_grad, param.dtype)
        alike.setdefault(kind, []).append(param)
    return [Unit(own, values, average.over(ranks)) for (ranks, _, _), own in alike.items()]


class _WeightValues:
    """The initial values of the weights: those of the module, or made one at a time."""

    def __init__(
        self,
        names: Mapping[nn.Parameter, str],
        materialize: Materialize | None,
        compute_dtype: torch.dtype | None,
    ) -> None:
        self._names = names
        self._materialize = materialize
        self.compute_dtype = compute_dtype

    def of(self, param: nn.Parameter) -> torch.Tensor:
        """The whole value of a weight."""
        if self._materialize is None:
            return param.detach()
        return self._materialize(self._names[param])


class _Average:
    """How gradients are averaged: the ranks of the sum, its divisor, and the dtype on the way."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        replicas: tuple[dist.ProcessGroup, ...],
        num_shares: int,
        dtype: torch.dtype | None,
    ) -> None:
        self.group = group
        self.replicas = replicas
        self.num_shares = num_shares
        self.dtype = dtype

    def over(self, group: dist.ProcessGroup) -> "_Average":
        """The same average over the ranks of another group."""
        return _Average(group, self.replicas, self.num_shares, self.dtype)


def _leave_meta(module: nn.Module) -> None:
    """Exchange the parameters of a meta module for ones without values; tied ones stay tied.

    A parameter's device cannot change under `.data`, which the units set later.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for child in module.modules():
        for name, param in child.named_parameters(recurse=False, remove_duplicate=False):
            if param not in made:
                one = torch.empty((), dtype=param.dtype)
                shape = one.expand(param.shape)  # one number in that shape
                made[param] = nn.Parameter(shape, requires_grad=param.requires_grad)
            setattr(child, name, made[param])


def _layers(module: nn.Module) -> list[nn.Module]:
    """Every layer in an `nn.ModuleList` that has weights."""
    layers = []
    for child in module.modules():
        if isinstance(child, nn.ModuleList):
            layers += [layer for layer in child if list(layer.parameters())]
    return layers


def _used_outside(module: nn.Module, units: Iterable[nn.Module]) -> set[nn.Parameter]:
    """Weights that several units share, or a unit and the rest: they belong to the rest."""
    users: dict[nn.Parameter, int] = {}
    inside: set[nn.Module] = set()
    for unit in units:
        inside.update(unit.modules())
        for param in set(unit.parameters()):
            users[param] = users.get(param, 0) + 1
    # 2, so that a weight outside of all units is in the result even if no unit uses it.
    for child in module.modules():
        if child not in inside:
            for param in child.parameters(recurse=False):
                users[param] = users.get(param, 0) + 2
    return {param for param, count in users.items() if count > 1}


def _show_rows(module: nn.Module, rows: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Let `parameters()` and the state dict of a module give rows, and `layer.weight` the whole.

    Python looks into an object's `__dict__` first; `nn.Module` finds its parameters in
    `__getattr__`, which is called only for names that are not there.
    """
    for child in module.modules():
        own = dict(child.named_parameters(recurse=False, remove_duplicate=False))
        for name, whole in own.items():
            child.register_parameter(name, rows[whole])
            child.__dict__[name] = whole


def _prefix_with_module(
    parallel: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object
) -> None:
    """Before a state dict is loaded: put "module." before its names, which leave it out."""
    for name in list(state_dict):
        if name.startswith(prefix):
            state_dict[f"{prefix}module.{name.removeprefix(prefix)}"] = state_dict.pop(name)


def _before_backward_of(output: Any, hook: Callable[[torch.Tensor], None]) -> None:
    """Call `hook` when the gradient of what a module has returned is there."""
    for tensor in pytree.tree_leaves(output):
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            tensor.register_hook(hook)


def _backward_hook(alive: weakref.ref) -> Callable[[torch.Tensor], None]:
    """The hook of the whole module's output; it keeps nothing alive."""

    def hook(_gradient: torch.Tensor) -> None:
        _require_alive(alive)._begin_backward()

    return hook


def _require_alive(alive: weakref.ref) -> FullyShardedModule:
    parallel = alive()
    assert parallel is not None, "the FullyShardedModule around this module is gone"
    return parallel
