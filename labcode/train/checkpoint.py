"""Checkpoints: everything a run needs to go on as if it had never stopped, written whole or not at all.

    OUT/checkpoints/step-00000120/     __0_0.distcp ... .metadata      tensors, by torch.distributed.checkpoint (DCP)
                                       run.json                        step, config, grid, and the size of every file

Every rank writes its own part, under a name that says which share of the model it is: ranks of dp and cp hold the same
share, and DCP writes it once. The folder is called `....partial` until the last rank is done. Going on needs the same
grid. The folder must be one that all ranks see.
"""

import dataclasses
import json
import os
import re
import shutil
import signal
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from labcode.comm.agreement import PeerError, on_first_rank
from labcode.comm.grid import Grid
from labcode.config import Config
from labcode.data.sampler import Batches
from labcode.files import write_atomically
from labcode.parallel.dropout import DrawApart, Stream
from labcode.parallel.model import ParallelModel
from labcode.recipes import field_paths

ABOUT = "run.json"
SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
# What may differ between the run that wrote a checkpoint and the one that goes on from it; all else must be the same.
MAY_CHANGE = (
    "name",
    "checkpoint.",
    "optim.",
    "data.cache_dir",
    "parallel.dp",
    "train.steps",
    "train.out",
    "train.overwrite",
)
MAY_CHANGE += (
    "parallel.data_parallel",
    "parallel.bucket_mb",
    "train.eval_",
    "train.log_every",
    "train.sample_tokens",
    "parallel.share_gpus",
)


class RunState:
    """What a run is made of, as named tensors: weights, optimizer, position in the data, random numbers.

    Args:
        model: This rank's share.
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
    ):
        self.params = dict(model.module.named_parameters())
        self.optimizer, self.batches = optimizer, batches
        self.share = "pp{pp}-tp{tp}/".format(
            **{axis: model.grid.coord(axis) for axis in ("pp", "tp")}
        )
        self.own = f"rank{dist.get_rank()}/"
        streams = {
            id(m.stream): m.stream for m in model.modules() if isinstance(m, DrawApart)
        }.values()
        self.streams = dict(enumerate(streams, 1)) | {0: Stream(0, torch.device("cpu"))}
        self.device = device

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything, by name; the tensors are those of the run and not copies."""
        found = {f"{self.share}model/{name}": param.detach() for name, param in self.params.items()}
        for name, param in self.params.items():
            for key, value in self.optimizer.state.get(param, {}).items():
                found[f"{self.share}optim/{name}/{key}"] = value
        found |= {f"{self.own}random/{name}": state for name, state in self._random().items()}
        return found | {"step": torch.tensor(self.batches.state_dict()["step"])}

    def load(self, folder: Path) -> None:
        """Put back what `tensors` gave when the checkpoint was written; the weights are filled in place.

        Communicates: what `dcp.load` does, a gather and a scatter of plans; each rank reads its own tensors.

        Raises:
            OSError: It could not be read.
        """
        reader = dcp.FileSystemReader(folder)
        mine = {
            key: torch.empty(entry.size, dtype=entry.properties.dtype)
            for key, entry in reader.read_metadata().state_dict_metadata.items()
            if key == "step" or key.startswith((self.share, self.own))
        }
        with torch.no_grad():
            try:
                dcp.load(mine, storage_reader=reader)
            except CheckpointException as error:
                raise OSError(f"checkpoint {folder} could not be read: {_cause(error)}") from None
            for name, param in self.params.items():
                param.copy_(mine[f"{self.share}model/{name}"])
        self._load_optimizer(mine)
        self._load_random(
            {
                key.removeprefix(f"{self.own}random/"): x
                for key, x in mine.items()
                if key.startswith(self.own)
            }
        )
        self.batches.load_state_dict({"step": int(mine["step"])})

    def _load_optimizer(self, mine):
        state = self.optimizer.state_dict()
        names = {param: name for name, param in self.params.items()}
        order = [names[param] for group in self.optimizer.param_groups for param in group["params"]]
        for index, name in enumerate(order):
            prefix = f"{self.share}optim/{name}/"
            state["state"][index] = {
                key.removeprefix(prefix): x for key, x in mine.items() if key.startswith(prefix)
            }
        self.optimizer.load_state_dict(
            state
        )  # brings each tensor to the device and the dtype that its weight asks for

    def _random(self):
        found = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            found["cuda"] = torch.cuda.get_rng_state(self.device)
        return found | {
            f"stream{number}": stream.state for number, stream in self.streams.items() if number
        }

    def _load_random(self, found):
        torch.set_rng_state(found["cpu"])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(found["cuda"], self.device)
        for number, stream in self.streams.items():
            if number:
                stream.state = found[f"stream{number}"]


class Checkpoints:
    """The checkpoints of one run, in `OUT/checkpoints`.

    Args:
        config: The run.
        grid: Its process groups.
        out: Folder of the run, the same for all ranks.
    """

    def __init__(self, config: Config, grid: Grid, out: Path):
        self.config, self.grid, self.folder = config, grid, out / "checkpoints"

    def save(self, state: RunState) -> Path:
        """Write a checkpoint under a temporary name, rename it when every rank is done, and remove the oldest.

        Communicates: what `dcp.save` does, plans gathered on rank 0 and scattered; two broadcasts of a short text.

        Raises:
            OSError: It could not be written, on every rank; nothing of it is left, the older ones are.
        Held by: tests/ranks/test_checkpoint.py::test_a_checkpoint_that_cannot_be_written_leaves_the_older_one
        """
        folder = self.folder / f"step-{state.batches.step:08d}"
        partial = folder.with_suffix(".partial")
        on_first_rank(self._remove_partial)  # of an earlier life that was killed while it wrote
        try:
            dcp.save(state.tensors(), storage_writer=dcp.FileSystemWriter(partial))
            on_first_rank(lambda: self._complete(partial, folder, state.batches.step))
        except (CheckpointException, OSError, PeerError) as error:
            on_first_rank(self._remove_partial)
            kept = max(self._all(), default=None)
            kept = f"; the last complete one is {kept}" if kept else ""
            raise OSError(
                f"checkpoint {folder} could not be written: {_cause(error)}{kept}"
            ) from None
        return folder

    def _complete(self, partial, folder, step):
        files = {file.name: file.stat().st_size for file in sorted(partial.iterdir())}
        about = {
            "step": step,
            "config": _plain(self.config),
            "grid": _plain(self.grid.shape),
            "files": files,
        }
        write_atomically(partial / ABOUT, json.dumps(about, indent=2).encode())
        shutil.rmtree(folder, ignore_errors=True)  # damaged, or this run would have gone on from it
        os.replace(partial, folder)
        later = [
            other for other in self._all() if other > folder
        ]  # damaged, or of a life that this run went back behind
        for old in [*later, *sorted(set(self._all()) - set(later))[: -self.config.checkpoint.keep]]:
            shutil.rmtree(old, ignore_errors=True)

    def _remove_partial(self):
        for partial in self.folder.glob("*.partial"):
            shutil.rmtree(partial, ignore_errors=True)

    def newest(self) -> Path | None:
        """The newest checkpoint that is whole, the same on all ranks; None if there is none.

        Raises:
            ValueError: It was written by another model, on other data or on another grid.
        """
        return on_first_rank(self._newest)

    def _newest(self):
        for folder in sorted(self._all(), reverse=True):
            about, problem = _read(folder)
            if problem:
                print(
                    f"checkpoint {folder} is damaged: {problem}: looking for an older one",
                    flush=True,
                )
                continue
            self._check(about, folder)
            return folder
        return None

    def _check(self, about, folder):
        if about["grid"] != _plain(self.grid.shape):
            raise ValueError(
                f"{folder} was written on the grid {_grid(about['grid'])}, this run is on {_grid(_plain(self.grid.shape))}: "
                f"start it as it was, or begin again in another train.out"
            )
        then, now = _flat(about["config"]), _plain(field_paths(self.config))
        for name in sorted(now.keys() | then.keys()):
            if then.get(name) != now.get(name) and not name.startswith(MAY_CHANGE):
                raise ValueError(
                    f"{folder} was written with {name}={then.get(name)}, this run has {now.get(name)}: "
                    f"go on with the same, or begin again in another train.out"
                )

    def _all(self):
        return [path for path in self.folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name)]


class StopSignals:
    """Within it SIGUSR1 and SIGTERM are remembered instead of ending the process: SLURM's and torchrun's way to say "soon".

    A signal may reach one rank only, and never all of them in the same step.
    """

    def __init__(self):
        self._heard, self._before = 0, {}

    def __enter__(self):
        self._before = {number: signal.signal(number, self._hear) for number in SIGNALS}
        return self

    def __exit__(self, *_):
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, number, _frame):
        self._heard = number

    def agreed(self) -> str | None:
        """The name of a signal that any rank has heard, the same on all.

        Communicates: an all-reduce of one number, on the CPU.
        """
        heard = torch.tensor(self._heard)
        dist.all_reduce(heard, dist.ReduceOp.MAX)
        return signal.Signals(heard.item()).name if heard.item() else None


def _cause(error):
    if not isinstance(error, CheckpointException):
        return str(error)
    rank, (cause, _) = min(error.failures.items())
    return f"rank {rank}: {cause}"


def _read(folder):
    """(what `run.json` says, None), or (None, what is wrong with the files)."""
    try:
        about = json.loads((folder / ABOUT).read_text())
        for name, size in about["files"].items():
            if (found := (folder / name).stat().st_size) != size:
                return None, f"{name} has {found} bytes of {size}"
    except (OSError, ValueError, KeyError) as error:
        return None, f"{type(error).__name__}: {error}"
    return about, None


def _plain(value):
    """As JSON gives it back: tuples become lists."""
    return json.loads(
        json.dumps(dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value)
    )


def _flat(tree, prefix=""):
    flat = {}
    for name, value in tree.items():
        flat |= (
            _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
        )
    return flat


def _grid(shape):
    return ", ".join(f"{axis}={size}" for axis, size in shape.items())
