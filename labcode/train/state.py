"""The state of a run as named tensors: what a checkpoint has to hold so that nothing is lost."""

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from labcode.data.sampler import Batches
from labcode.parallel.dropout import IsolatedRng
from labcode.parallel.model import ParallelModel

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
        self.params = dict(model.module.named_parameters())
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

    def load(self, folder: Path) -> None:
        """Put back what `tensors` gave when the checkpoint was written.

        The weights are filled in place.

        Communicates: what `dcp.load` does, a gather and a scatter of plans; each rank reads its own
            tensors.

        Raises:
            OSError: It could not be read.
        """
        mine = self._read(folder)
        with torch.no_grad():
            for name, param in self.params.items():
                param.copy_(mine[self._weight_key(name)])
        self._load_optimizer(mine)
        self._load_random(mine)
        self.batches.load_state_dict({"step": int(mine["step"])})

    def _read(self, folder: Path) -> Tensors:
        """This rank's tensors of a checkpoint."""
        reader = dcp.FileSystemReader(folder)
        mine = {}
        for key, entry in reader.read_metadata().state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata) and self._is_mine(key):
                mine[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
        try:
            with torch.no_grad():
                dcp.load(mine, storage_reader=reader)
        except CheckpointException as error:
            raise OSError(f"checkpoint {folder} could not be read: {first_cause(error)}") from None
        return mine

    def _is_mine(self, key: str) -> bool:
        if key == "step" or key.startswith(self.own):
            return True
        place, kind, rest = key.split("/", 2)
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


def _below(tensors: Mapping[str, torch.Tensor], prefix: str) -> Tensors:
    """The tensors whose names begin with a prefix, without it."""
    found = {}
    for key, tensor in tensors.items():
        if key.startswith(prefix):
            found[key.removeprefix(prefix)] = tensor
    return found
