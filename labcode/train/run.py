"""From a config to a finished run: connect, set up, train, and one line for whatever goes wrong."""

import contextlib
import socket

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from labcode import processes
from labcode.comm import bootstrap
from labcode.comm.agreement import PeerError, SharedError, on_every_rank, on_first_rank
from labcode.comm.bootstrap import Place, World
from labcode.comm.grid import Grid
from labcode.config import Config
from labcode.topology import GridShape
from labcode.train.checkpoint import Checkpoints
from labcode.train.loop import Trainer
from labcode.train.report import INTERRUPTED, RefusedError, fail, say, text_of
from labcode.train.run_folder import make_folder, write_config
from labcode.train.tasks import Task, make_task

RESUME = "resume from it with the same command, --checkpoint.resume and the same --train.out"


@record
def run(config: Config) -> int:
    """Train as `config` says, as one rank of whatever job this process was started in.

    Returns:
        The exit code. User errors and interruptions are one line; a bug keeps its traceback.
    """
    place = Place()
    try:
        place = bootstrap.read_environment()
        if place.has_agent:
            processes.end_with_parents(at_once=True)  # a killed torchrun must leave no rank behind
        shape = _grid_shape(config, place)
        world = bootstrap.start(place, share_gpus=config.parallel.share_gpus)
        trainer = _set_up_or_refuse(config, world, shape)
    except KeyboardInterrupt:
        bootstrap.stop()
        say(place, "interrupted before the first step: nothing was written")
        return INTERRUPTED
    except (ValueError, OSError, SharedError) as error:
        code = fail(place, error)
        bootstrap.stop()
        return code
    try:
        return _train(trainer)
    finally:
        # closing may fail for the reason just reported, such as a full disk
        with contextlib.suppress(OSError):
            trainer.close()
        bootstrap.stop()


def _grid_shape(config: Config, place: Place) -> GridShape:
    """The grid for this number of ranks; every rank finds the same errors in it."""
    try:
        return config.check(place.world_size)
    except ValueError as error:
        raise RefusedError(str(error)) from None


def _set_up_or_refuse(config: Config, world: World, shape: GridShape) -> Trainer:
    """`set_up`; its errors are known to every rank: rank 0 has its own or that of another rank."""
    try:
        return set_up(config, world, shape)
    except (ValueError, OSError, PeerError) as error:
        raise RefusedError(text_of(error)) from None


def _train(trainer: Trainer) -> int:
    place = trainer.world.place
    try:
        trainer.fit()
    except KeyboardInterrupt:
        done = trainer.steps_done
        say(place, f"interrupted after step {done}: its metrics are in {trainer.out}")
        return INTERRUPTED
    except (SharedError, OSError) as error:
        return fail(place, error, trainer.steps_done)
    if trainer.stopped_by:
        say(
            place,
            f"stopped by {trainer.stopped_by} after step {trainer.steps_done}, "
            f"with a checkpoint: {RESUME}",
        )
    return 0


def set_up(config: Config, world: World, shape: GridShape) -> Trainer:
    """Data, process groups, model and output folder.

    Every error that can be found before the first step is found here. It ends the set-up on all
    ranks: the rank that found it raises it, the others raise `PeerError`.

    Raises:
        ValueError, OSError: On the rank that found something.
        PeerError: On the others.
    """
    task = _make_task_once_per_node(config, world)
    # once more, with the sizes that come from the data, before any group of the grid is made
    on_every_rank(lambda: config.parallel.check(task.model_config, shape))
    grid = Grid.create(shape)
    out = on_first_rank(lambda: make_folder(config))
    print_on_first_rank(world, who_and_where(config, world, shape))
    start = None
    if config.checkpoint.resume:
        start = Checkpoints(config, grid, out, task.data_sha256).newest()
        if start:
            print_on_first_rank(world, f"resuming from {start}")
    # only now: a run that may not be resumed has left the folder as it was
    on_first_rank(lambda: write_config(config, out))
    return on_every_rank(lambda: Trainer(config, world, grid, task, out, start))


def _make_task_once_per_node(config: Config, world: World) -> Task:
    """The task, on every rank; the first rank of each node prepares its files for the others."""

    def make_on_first_of_node() -> Task | None:
        return make_task(config) if world.local_rank == 0 else None

    task = on_every_rank(make_on_first_of_node)
    return on_every_rank(lambda: task or make_task(config))


def print_on_first_rank(world: World, line: str) -> None:
    """Print a line of the log, once for the whole job."""
    if world.rank == 0:
        print(line, flush=True)


def who_and_where(config: Config, world: World, shape: GridShape) -> str:
    """The first line of a log: the ranks of each node, the grid, and how a global batch is divided.

    All ranks call it.

    Communicates: one all-gather of host names.
    """
    hosts: list[str] = [""] * world.world_size
    dist.all_gather_object(hosts, socket.gethostname())
    ranks = "1 rank" if world.world_size == 1 else f"{world.world_size} ranks"
    axes = " x ".join(f"{axis} {shape.size(axis)}" for axis in ("dp", "pp", "cp", "tp"))
    accumulation = config.train.accumulation(shape.dp)
    micro_batch = config.train.global_batch // (shape.dp * accumulation)
    return (
        f"{ranks} on {_nodes(hosts)}, {world.backend} on {world.device.type}; grid {axes}; "
        f"{config.train.global_batch} samples a step = "
        f"dp {shape.dp} x {accumulation} micro-batches of {micro_batch}"
    )


def _nodes(hosts: list[str]) -> str:
    """ "1 node", or "2 nodes (n1: 0, 1; n2: 2, 3)" with the ranks of each.

    Args:
        hosts: The node of each rank.
    """
    ranks_of: dict[str, list[str]] = {}
    for rank, host in enumerate(hosts):
        ranks_of.setdefault(host, []).append(str(rank))
    if len(ranks_of) == 1:
        return "1 node"
    nodes = [f"{host}: {', '.join(ranks)}" for host, ranks in ranks_of.items()]
    return f"{len(nodes)} nodes ({'; '.join(nodes)})"
