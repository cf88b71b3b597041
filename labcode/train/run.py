"""From a config to a finished run: set-up, training, and one line for whatever goes wrong."""

import contextlib
import dataclasses
import json
import shutil
import socket
import sys
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from labcode import processes
from labcode.comm import bootstrap
from labcode.comm.agreement import PeerError, on_every_rank, on_first_rank
from labcode.comm.grid import Grid
from labcode.config import Config
from labcode.files import write_atomically
from labcode.topology import GridShape
from labcode.train.checkpoint import Checkpoints
from labcode.train.loop import Diverged, Trainer
from labcode.train.tasks import make_task

RESUME = "the same command goes on from it with --checkpoint.resume and the same --train.out"
FAILED, INTERRUPTED = 2, 130  # 130 is what a shell reports for a program ended by Ctrl-C


@record
def run(config: Config) -> int:
    """Train as `config` says, as one rank of whatever job this process was started in; returns the exit code."""
    rank = 0
    try:
        place = bootstrap.read_environment()
        rank = place.rank
        if place.has_agent:
            processes.end_with_parents()  # a killed torchrun must not leave ranks that train on
        shape = config.check(place.world_size)
        world = bootstrap.start(place, share_gpus=config.parallel.share_gpus)
        trainer = set_up(config, world, shape)
    except KeyboardInterrupt:
        return _say(rank, "interrupted before the first step: nothing was written", INTERRUPTED)
    except (
        ValueError,
        OSError,
        PeerError,
    ) as error:  # of set-up: what the user can mend; a bug keeps its traceback
        bootstrap.stop()
        return _say(rank, f"error: {_text(error)}", FAILED)
    try:
        trainer.fit()
    except KeyboardInterrupt:
        return _say(
            rank,
            f"interrupted after step {trainer.steps_done}: its metrics are in {trainer.out}",
            INTERRUPTED,
        )
    except (Diverged, OSError, PeerError) as error:
        return _say(rank, f"error: after step {trainer.steps_done}: {_text(error)}", FAILED)
    else:
        if trainer.stopped_by:
            _say(
                rank,
                f"stopped by {trainer.stopped_by} after step {trainer.steps_done}, with a checkpoint: {RESUME}",
                0,
            )
    finally:
        with contextlib.suppress(
            OSError
        ):  # after an error that has been told, or a second time: it says nothing new
            trainer.close()
        bootstrap.stop()
    return 0


def set_up(config: Config, world: bootstrap.World, shape: GridShape) -> Trainer:
    """Data, process groups, model and output folder, with every error that can be found before the first step.

    Raises:
        ValueError, OSError: On the rank that found it. PeerError: on the others.
    """
    # one rank of a node prepares the token file, the others find it made
    task = on_every_rank(lambda: make_task(config) if world.local_rank == 0 else None)
    task = on_every_rank(lambda: task or make_task(config))
    # once more, with the sizes that come from the data, before any group of the grid is made
    on_every_rank(lambda: config.parallel.check(task.model_config, shape))
    grid = Grid.create(shape)
    out = on_first_rank(lambda: make_folder(config))
    who = who_and_where(config, world, shape)
    if world.rank == 0:
        print(who, flush=True)
    start = Checkpoints(config, grid, out).newest() if config.checkpoint.resume else None
    if start and world.rank == 0:
        print(f"going on from {start}", flush=True)
    on_first_rank(
        lambda: write_config(config, out)
    )  # a run that may not go on has left the folder as it was
    return on_every_rank(lambda: Trainer(config, world, grid, task, out, start))


def who_and_where(config: Config, world: bootstrap.World, shape: GridShape) -> str:
    """The first line of a log: the ranks of each node, the grid, and how a global batch is cut. All ranks call it.

    Communicates: one all-gather of host names.
    """
    hosts = [None] * world.world_size
    dist.all_gather_object(hosts, socket.gethostname())
    nodes = [
        f"{host}: " + ", ".join(str(rank) for rank, other in enumerate(hosts) if other == host)
        for host in dict.fromkeys(hosts)
    ]
    nodes = "1 node" if len(nodes) == 1 else f"{len(nodes)} nodes ({'; '.join(nodes)})"
    axes = " x ".join(f"{axis} {getattr(shape, axis)}" for axis in ("dp", "pp", "cp", "tp"))
    count = config.train.accumulation(shape.dp)
    micro = config.train.global_batch // (shape.dp * count)
    return (
        f"{world.world_size} rank{'s' * (world.world_size > 1)} on {nodes}, {world.backend} on {world.device.type}; "
        f"grid {axes}; "
        f"{config.train.global_batch} samples a step = dp {shape.dp} x {count} micro-batches of {micro}"
    )


def make_folder(config: Config) -> Path:
    """The output folder, new and with `config.json` in it.

    Raises:
        ValueError: `train.out` exists and neither `train.overwrite` nor `checkpoint.resume` is set.
        OSError: It cannot be made.
    """
    if config.train.out is None:
        folders = (Path("runs") / f"{config.name}-{number:03d}" for number in range(1, 1000))
        out = next(folder for folder in folders if not folder.exists())
    else:
        out = Path(config.train.out)
        if out.exists() and not (config.train.overwrite or config.checkpoint.resume):
            raise ValueError(
                f"{out} exists already: choose another train.out, or replace it with --train.overwrite"
            )
        if out.exists() and not (out / "config.json").is_file():
            raise ValueError(
                f"{out} is not the folder of a run: nothing was removed, choose another train.out"
            )
        if not config.checkpoint.resume:
            shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=config.checkpoint.resume)
    if not (out / "config.json").exists():
        write_config(config, out)
    return out


def write_config(config: Config, out: Path) -> None:
    """`config.json`, by which a folder is known as that of a run."""
    write_atomically(out / "config.json", json.dumps(dataclasses.asdict(config), indent=2).encode())


def _text(error) -> str:
    if isinstance(error, OSError) and error.strerror:
        return (
            f"{error.filename}: {error.strerror.lower()}"
            if error.filename
            else error.strerror.lower()
        )
    return str(error)


def _say(rank, message, code) -> int:
    """One message for the job, from rank 0; every rank returns the code."""
    if rank == 0:
        print(message, file=sys.stderr, flush=True)
    return code
