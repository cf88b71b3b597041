"""The state of a run as named tensors: what a checkpoint has to hold so that nothing is lost.

A weight that is spread over the ranks is one tensor of the checkpoint. Each rank writes the boxes
that it has (`parallel.boxes`), and reads those that it needs, from whatever ranks wrote them. So
the same checkpoint can be read on any grid and at any stage of ZeRO.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from labcode.data.sampler import Batches
from labcode.parallel.boxes import boxes_of
from labcode.parallel.dropout import IsolatedRng
from labcode.parallel.model import ParallelModel
from labcode.precision.fp8 import DelayedScaling, Fp8, Fp8Product
from labcode.train.checkpoint.tensors import DamagedError, Index, Part, Sizes, read_into, whole
from labcode.train.guard import Guard
from labcode.train.loss_scale import LossScaler
from labcode.train.noise_scale import NoiseScale

T = TypeVar("T")
Tensors = dict[str, torch.Tensor]

GUARD = "guard"  # keys of a checkpoint
SCALER = "loss_scale"
NOISE = "noise_scale"


class RunState:
    """Weights, optimizer, position in the data and random numbers of a run, by name.

        model/NAME                a weight; of a run with adapters only those that train
        optim/NAME/KEY            what the optimizer keeps for it
        rankR/random/GENERATOR    where a generator of random numbers is
        step                      the position in the data
        guard                     what judges gradients remembers, if it does
        loss_scale                the same of what scales the loss, in float16
        noise_scale               the same of what measures the noise of gradients
        fp8/LAYER                 the histories of a layer's amaxes, with delayed scaling

    Args:
        model: This rank's part of the model.
        optimizer: The optimizer of that model.
        batches: The position in the data, which is also the number of steps done.
        device: The device whose random generator the run draws from, beside that of the CPU.
        guard: What judges its gradients; None: nothing does.
        scaler: What scales its loss; None: nothing does.
        noise: What measures the noise of its gradients; None: nothing does.
        fp8: What computes its linear layers in FP8; None: nothing does.
        trained_alone: Frozen weights are left out: this run and one that resumes from it make them
            from the same start.
    """

    def __init__(
        self,
        model: ParallelModel,
        optimizer: torch.optim.Optimizer,
        batches: Batches,
        device: torch.device,
        guard: Guard | None = None,
        scaler: LossScaler | None = None,
        noise: NoiseScale | None = None,
        fp8: Fp8 | None = None,
        *,
        trained_alone: bool = False,
    ) -> None:
        self.model = model
        self.params = dict(model.weights)
        if trained_alone:
            for name, param in model.weights.items():
                if not param.requires_grad:
                    del self.params[name]
        # tied weights of two pipeline stages are one: a run without stages has no second one
        tied = model.plan.tied
        self.stored_as = {name: tied[0] if name in tied else name for name in self.params}
        self.boxes = {name: boxes_of(model.shardings[name], model.grid) for name in self.params}
        self.optimizer = optimizer
        self.batches = batches
        self.device = device
        self.remembering: dict[str, Guard | LossScaler | NoiseScale | Fp8Product] = {}
        if guard is not None and guard.remembers:
            self.remembering[GUARD] = guard
        if scaler is not None:
            self.remembering[SCALER] = scaler
        if noise is not None:
            self.remembering[NOISE] = noise
        if fp8 is not None and isinstance(fp8.recipe, DelayedScaling):
            for name, product in fp8.products.items():
                self.remembering[f"fp8/{name}"] = product
        self.own = f"rank{dist.get_rank()}/random/"
        # the modules of a model share one stream of random numbers
        streams = [module.stream for module in model.modules() if isinstance(module, IsolatedRng)]
        self.stream = streams[0] if streams else None

    def tensors(self) -> dict[str, Part]:
        """Everything, by name; the tensors are those of the run and not copies."""
        found = {"step": whole(torch.tensor(self.batches.state_dict()["step"]))}
        for name, param in self.params.items():
            found[_weight_key(self.stored_as[name])] = self._part(name, param.detach())
            for key, value in self.optimizer.state.get(param, {}).items():
                place = _optimizer_prefix(self.stored_as[name]) + key
                found[place] = self._part_or_number(name, value)
        for name, state in self._random().items():
            found[self.own + name] = whole(state)
        for key, remembering in self.remembering.items():
            found[key] = whole(remembering.state)
        return found

    def copies(self, memory: Tensors) -> dict[str, Part]:
        """Like `tensors`, but copied to the CPU, so that training may change its own.

        Args:
            memory: What an earlier call has filled, to be filled again: new memory takes twice as
                long, since the system hands it out page by page. It gets what it lacks.
        """
        copies = {}
        with torch.no_grad():
            for name, part in self.tensors().items():
                own = part.own
                if name not in memory or memory[name].shape != own.shape:
                    pinned = own.device.type == "cuda"  # from there it is copied much faster
                    memory[name] = torch.empty(own.shape, dtype=own.dtype, pin_memory=pinned)
                copies[name] = part._replace(own=memory[name].copy_(own))
        return copies

    def read(self, folder: Path, index: Index, *, same_grid: bool = True) -> Tensors:
        """This rank's tensors of a checkpoint, all that `fill` needs; the run is left as it is.

        Nothing is communicated: each rank reads its own.

        Args:
            folder: The checkpoint.
            index: Where its tensors lie.
            same_grid: It was written on the grid of this run. If not, the random numbers of its
                ranks belong to no rank here, and are left out.

        Raises:
            DamagedError: A tensor is missing, has another shape or dtype, or cannot be read.
            OSError: A file cannot be read for a reason that says nothing about the checkpoint.
        """
        self._check(index, same_grid)
        wanted = {"step": self._place_for("step", index)}
        for name in self.params:
            key = _weight_key(self.stored_as[name])
            wanted[key] = self._place_for(key, index, name)
            prefix = _optimizer_prefix(self.stored_as[name])
            for rest in _below(index, prefix):
                wanted[prefix + rest] = self._place_for(prefix + rest, index, name)
        if same_grid:
            for key in self._random():
                wanted[self.own + key] = self._place_for(self.own + key, index)
        # a run that begins to judge its gradients resumes from one that did not
        for key in self.remembering.keys() & index.keys():
            wanted[key] = self._place_for(key, index)
        mine = {}
        with torch.no_grad():
            for key, part in wanted.items():
                read_into(folder, index, key, part)
                mine[key] = part.own
        self._check_generators(mine)
        return mine

    def _place_for(self, key: str, index: Index, name: str = "") -> Part:
        """Where a tensor is read into.

        Args:
            key: The key of the tensor.
            index: The index of the checkpoint.
            name: The weight that has the same shape; "", or another shape: all of it is read.
        """
        stored = index[key]
        if name and stored.size == tuple(self.model.shardings[name].shape):
            # memory of its own, on the CPU: the run stays as it is until all ranks have read all
            return self._part(name, torch.empty(self.params[name].shape, dtype=stored.dtype))
        return whole(torch.empty(stored.size, dtype=stored.dtype))

    def fill(self, mine: Mapping[str, torch.Tensor]) -> None:
        """Put back what `tensors` gave when the checkpoint was written; weights in place.

        Args:
            mine: What `read` returned, which has checked it: nothing fails half-way from here on.
        """
        with torch.no_grad():
            for name, param in self.params.items():
                param.copy_(mine[_weight_key(self.stored_as[name])])
        self._load_optimizer(mine)
        self._load_random(mine)
        for key in self.remembering.keys() & mine.keys():
            self.remembering[key].state = mine[key]
        self.batches.load_state_dict({"step": int(mine["step"])})

    def _part(self, name: str, own: torch.Tensor) -> Part:
        return Part(own, tuple(self.model.shardings[name].shape), self.boxes[name])

    def _part_or_number(self, name: str, value: torch.Tensor) -> Part:
        """What an optimizer keeps has the shape of its weight, or is one number."""
        return self._part(name, value) if value.shape == self.params[name].shape else whole(value)

    def _check(self, stored: Index, same_grid: bool) -> None:
        """Compare names, shapes and dtypes with what this run needs.

        Raises:
            DamagedError: The first that is missing or does not fit.
        """
        for key, (size, dtype) in self._needed(stored, same_grid).items():
            if key not in stored:
                raise DamagedError(f"it has no {key}")
            found = stored[key]
            if found.size != size or found.dtype != dtype:
                raise DamagedError(
                    f"{key} is {_described(found.size, found.dtype)}, "
                    f"and this run needs {_described(size, dtype)}"
                )
        keys = self._optimizer_keys(stored)
        for name in self.params:
            prefix = _optimizer_prefix(self.stored_as[name])
            size = tuple(self.model.shardings[name].shape)
            # a weight that had no gradient so far has no state at all
            for key in keys if _below(stored, prefix) else ():
                if prefix + key not in stored:
                    raise DamagedError(f"it has no {prefix}{key}")
                found = stored[prefix + key]
                if len(found.size) and found.size != size:
                    raise DamagedError(
                        f"{prefix}{key} is {_described(found.size, found.dtype)}, "
                        f"and this run needs {_described(size, found.dtype)}"
                    )

    def _check_generators(self, mine: Mapping[str, torch.Tensor]) -> None:
        """Not every string of bytes is the state of a generator; `fill` must not find that out."""
        for name, state in _below(mine, self.own).items():
            device = self.device if name == "cuda" else "cpu"
            try:
                torch.Generator(device).set_state(state)
            except RuntimeError as error:
                raise DamagedError(f"{self.own}{name} is not a state: {error}") from None

    def _optimizer_keys(self, stored: Mapping[str, Any]) -> list[str]:
        """What the optimizer keeps for a weight, such as "exp_avg"."""
        keys = set()
        for name in self.params:
            keys.update(_below(stored, _optimizer_prefix(self.stored_as[name])))
        return sorted(keys)

    def _needed(
        self, stored: Mapping[str, Any], same_grid: bool
    ) -> dict[str, tuple[Sizes, torch.dtype]]:
        """What every checkpoint of this run has, whatever its optimizer keeps."""
        needed: dict[str, tuple[Sizes, torch.dtype]] = {"step": ((), torch.int64)}
        for name, param in self.params.items():
            size = tuple(self.model.shardings[name].shape)
            needed[_weight_key(self.stored_as[name])] = (size, param.dtype)
        for key in self.remembering.keys() & stored.keys():
            state = self.remembering[key].state
            needed[key] = (tuple(state.shape), state.dtype)
        for name, state in self._random().items() if same_grid else ():
            needed[self.own + name] = (tuple(state.shape), state.dtype)
        return needed

    def _load_optimizer(self, mine: Mapping[str, torch.Tensor]) -> None:
        state = self.optimizer.state_dict()
        names = {param: name for name, param in self.params.items()}
        index = 0  # the optimizer counts the parameters of all groups
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                prefix = _optimizer_prefix(self.stored_as[names[param]])
                # empty for a weight that had no gradient so far, as AdamW has it before its first
                # step
                state["state"][index] = _below(mine, prefix)
                index += 1
        # Not filled in place: a fresh optimizer has no state yet, and what it will keep is its own
        # affair. load_state_dict leaves `step` float32, whatever the weight is, and brings each
        # tensor to the device and the dtype that its weight asks for
        self.optimizer.load_state_dict(state)

    def _random(self) -> Tensors:
        found = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            found["cuda"] = torch.cuda.get_rng_state(self.device)
        if self.stream is not None:
            found["stream"] = self.stream.state
        return found

    def _load_random(self, mine: Mapping[str, torch.Tensor]) -> None:
        found = _below(mine, self.own)
        if not found:
            return  # of another grid: the generators stay as this run has seeded them
        torch.set_rng_state(found["cpu"])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(found["cuda"], self.device)
        if self.stream is not None:
            self.stream.state = found["stream"]


def _weight_key(name: str) -> str:
    return f"model/{name}"


def _optimizer_prefix(name: str) -> str:
    return f"optim/{name}/"


def _described(size: Sizes, dtype: torch.dtype) -> str:
    return f"{list(size)} {str(dtype).removeprefix('torch.')}"


def _below(tensors: Mapping[str, T], prefix: str) -> dict[str, T]:
    """The tensors whose names begin with a prefix, without it."""
    found = {}
    for key, tensor in tensors.items():
        if key.startswith(prefix):
            found[key.removeprefix(prefix)] = tensor
    return found
