"""The state of a run as named tensors: what a checkpoint has to hold so that nothing is lost."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from labcode.data.sampler import Batches
from labcode.parallel.dropout import IsolatedRng
from labcode.parallel.model import ParallelModel
from labcode.train.checkpoint_files import DamagedError
from labcode.train.tensor_index import Reader

Tensors = dict[str, torch.Tensor]


class RunState:
    """Weights, optimizer, position in the data and random numbers of a run, by name.

        PLACE/model/NAME              a weight, or this rank's shard of it
        PLACE/optim/NAME/KEY          what the optimizer keeps for it
        rankR/random/GENERATOR        where a generator of random numbers is
        step                          the position in the data

    PLACE names the coordinate of every axis that cuts the tensor (`ParamSharding.key`).

    Args:
        model: This rank's part of the model.
        optimizer: Of that model.
        batches: The position in the data, which is also the number of steps done.
        device: Whose random generator the run draws from, beside that of the CPU.
    """

    def __init__(
        self,
        model: ParallelModel,
        optimizer: torch.optim.Optimizer,
        batches: Batches,
        device: torch.device,
    ) -> None:
        self.model = model
        self.params = model.weights
        self.optimizer = optimizer
        self.batches = batches
        self.device = device
        self.places = {name: sharding.key(model.grid) for name, sharding in model.shardings.items()}
        self.own = f"rank{dist.get_rank()}/random/"
        # the modules of a model share one stream of random numbers
        streams = [module.stream for module in model.modules() if isinstance(module, IsolatedRng)]
        self.stream = streams[0] if streams else None

    def tensors(self) -> Tensors:
        """Everything, by name; the tensors are those of the run and not copies."""
        found = {"step": torch.tensor(self.batches.state_dict()["step"])}
        for name, param in self.params.items():
            found[self._weight_key(name)] = param.detach()
            for key, value in self.optimizer.state.get(param, {}).items():
                found[self._optimizer_prefix(name) + key] = value
        for name, state in self._random().items():
            found[self.own + name] = state
        return found

    def read(self, folder: Path, index: Metadata) -> Tensors:
        """This rank's tensors of a checkpoint, all that `fill` needs; the run is left as it is.

        Nothing is communicated: each rank reads its own.

        Args:
            folder: The checkpoint.
            index: Where its tensors lie.

        Raises:
            DamagedError: A tensor is missing, has another shape or dtype, or cannot be read.
            OSError: A file cannot be read for a reason that says nothing about the checkpoint.
        """
        stored = {}
        for key, entry in index.state_dict_metadata.items():
            if self._is_mine(key):
                entry = cast(TensorStorageMetadata, entry)  # the index holds no others
                dtype = entry.properties.dtype
                stored[key] = torch.empty(entry.size, dtype=dtype, device="meta")
        self._check(stored)
        mine = {key: torch.empty_like(tensor, device="cpu") for key, tensor in stored.items()}
        with warnings.catch_warnings(), torch.no_grad():
            # "assuming the intent is to load in a single process"
            warnings.simplefilter("ignore", UserWarning)
            try:
                dcp.load(mine, storage_reader=Reader(folder, index), no_dist=True)
            except CheckpointException as error:
                raise _why_not_read(error) from None
        self._check_generators(mine)
        return mine

    def fill(self, mine: Mapping[str, torch.Tensor]) -> None:
        """Put back what `tensors` gave when the checkpoint was written; weights in place.

        Args:
            mine: As from `read`, which has checked it: from here on nothing fails half-way.
        """
        with torch.no_grad():
            for name, param in self.params.items():
                param.copy_(mine[self._weight_key(name)])
        self._load_optimizer(mine)
        self._load_random(mine)
        self.batches.load_state_dict({"step": int(mine["step"])})

    def _check(self, mine: Mapping[str, torch.Tensor]) -> None:
        """Compare names, shapes and dtypes with what this run needs.

        Args:
            mine: This rank's tensors, with or without values.

        Raises:
            DamagedError: The first that is missing or does not fit.
        """
        for key, own in self._needed().items():
            if key not in mine:
                raise DamagedError(f"it has no {key}")
            found = mine[key]
            if found.shape != own.shape or found.dtype != own.dtype:
                raise DamagedError(
                    f"{key} is {_described(found)}, and this run needs {_described(own)}"
                )
        keys = self._optimizer_keys(mine)
        for name, param in self.params.items():
            prefix = self._optimizer_prefix(name)
            # a weight that had no gradient so far has no state at all
            for key in keys if _below(mine, prefix) else ():
                if prefix + key not in mine:
                    raise DamagedError(f"it has no {prefix}{key}")
                found = mine[prefix + key]
                if found.dim() and found.shape != param.shape:
                    raise DamagedError(
                        f"{prefix}{key} is {_described(found)}, "
                        f"and this run needs {_described(param)}"
                    )

    def _check_generators(self, mine: Mapping[str, torch.Tensor]) -> None:
        """Not every string of bytes is the state of a generator; `fill` must not find that out."""
        for name, state in _below(mine, self.own).items():
            device = self.device if name == "cuda" else "cpu"
            try:
                torch.Generator(device).set_state(state)
            except RuntimeError as error:
                raise DamagedError(f"{self.own}{name} is not a state: {error}") from None

    def _optimizer_keys(self, mine: Mapping[str, torch.Tensor]) -> list[str]:
        """What the optimizer keeps for a weight, such as "exp_avg"."""
        keys = set()
        for name in self.params:
            keys.update(_below(mine, self._optimizer_prefix(name)))
        return sorted(keys)

    def _needed(self) -> Tensors:
        """What every checkpoint of this run has, whatever its optimizer keeps."""
        needed = {"step": torch.tensor(0)}
        for name, param in self.params.items():
            needed[self._weight_key(name)] = param.detach()
        for name, state in self._random().items():
            needed[self.own + name] = state
        return needed

    def _is_mine(self, key: str) -> bool:
        if key == "step" or key.startswith(self.own):
            return True
        place, _, rest = key.partition("/")
        kind, _, rest = rest.partition("/")
        name = rest if kind == "model" else rest.rpartition("/")[0]
        return self.places.get(name) == place

    def _weight_key(self, name: str) -> str:
        return f"{self.places[name]}/model/{name}"

    def _optimizer_prefix(self, name: str) -> str:
        return f"{self.places[name]}/optim/{name}/"

    def _load_optimizer(self, mine: Mapping[str, torch.Tensor]) -> None:
        state = self.optimizer.state_dict()
        names = {param: name for name, param in self.params.items()}
        index = 0  # the optimizer counts the parameters of all groups
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                prefix = self._optimizer_prefix(names[param])
                state["state"][index] = _below(mine, prefix)
                index += 1
        # brings each tensor to the device and the dtype that its weight asks for
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
        torch.set_rng_state(found["cpu"])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(found["cuda"], self.device)
        if self.stream is not None:
            self.stream.state = found["stream"]


def first_cause(error: BaseException) -> str:
    """What went wrong on the first rank that failed, in one line."""
    if not isinstance(error, CheckpointException):
        return str(error)
    rank, (cause, _) = min(error.failures.items())
    return f"rank {rank}: {cause}"


def _why_not_read(error: CheckpointException) -> Exception:
    """Damage, or the error of the system that kept torch from reading."""
    cause, _ = next(iter(error.failures.values()))
    if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError):
        return cause
    # the first of the several lines in which torch explains itself
    text = str(cause).strip().partition("\n")[0]
    return DamagedError(f"its tensors cannot be read ({type(cause).__name__}: {text})")


def _described(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _below(tensors: Mapping[str, torch.Tensor], prefix: str) -> Tensors:
    """The tensors whose names begin with a prefix, without it."""
    found = {}
    for key, tensor in tensors.items():
        if key.startswith(prefix):
            found[key.removeprefix(prefix)] = tensor
    return found
