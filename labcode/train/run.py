"""From a config to a finished run: connect, set up, train, and one line for whatever goes wrong."""

import contextlib
import socket
import time
import traceback
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from labcode import combinations, processes
from labcode.comm import bootstrap
from labcode.comm.agreement import (
    leave_word,
    on_every_rank,
    on_first_rank,
    word_left,
)
from labcode.comm.bootstrap import Place, World
from labcode.comm.grid import Grid
from labcode.config import Config, GPTConfig, ViTConfig
from labcode.data.tokenizer import AnyTokenizer
from labcode.doctor.answers import Answers
from labcode.doctor.hang import HangWatch
from labcode.files import LOCK_NAME
from labcode.precision import debug_config
from labcode.topology import GridShape
from labcode.train import attempts, failure
from labcode.train.build import Training, build, build_meta
from labcode.train.capacity import check_memory, shared_memory
from labcode.train.checkpoint.hub_files import open_start
from labcode.train.checkpoint.store import Checkpoints
from labcode.train.ctrl_c import CtrlC, caused_by_ctrl_c
from labcode.train.failure import RefusedError
from labcode.train.loop import fit
from labcode.train.observer import Observer
from labcode.train.observers import observers_of, open_log
from labcode.train.precision import check_device
from labcode.train.run_folder import RunFolder
from labcode.train.signals import StopSignals
from labcode.train.tasks import Task, make_task
from labcode.units import plural

RESUME = "with the same command, --checkpoint.resume and the same --train.out"
CTRL_C = "Ctrl-C"  # the last word of a rank that it has ended
SAME_MOMENT_S = 0.5
SHARED_WAIT_S = 5.0  # after which every node sees what one has written to a shared disk


@record
def run(
    config: Config,
    ctrl_c: CtrlC | None = None,
    started_by: int | None = None,
    signals: StopSignals | None = None,
) -> int:
    """Train as `config` says, as one rank of whatever job this process was started in.

    Args:
        config: The run.
        ctrl_c: What remembers Ctrl-C; None: Ctrl-C is as Python has it.
        started_by: Number of the process that started this one; None: of its parent now.
        signals: What has been heard until now; None: nothing.

    Returns:
        The exit code. User errors and interruptions are one line; a bug keeps its traceback.
    """
    ctrl_c = ctrl_c or CtrlC()
    signals = signals or StopSignals()
    place = Place()
    ready = None
    watch = None
    folder = RunFolder(config)
    opened = contextlib.ExitStack()
    try:
        place = bootstrap.read_environment()
        if place.has_agent:
            # a killed torchrun must leave no rank behind
            processes.end_with_parents(at_once=True, parent=started_by)
        shape = _grid_shape(config, place)
        parallel = config.parallel
        world = bootstrap.start(
            place,
            share_gpus=parallel.share_gpus,
            timeout_s=parallel.collective_timeout_s,
        )
        watch = HangWatch(parallel.collective_timeout_s)
        watch.start()
        config = attempts.resumed_config(config, place)
        folder = RunFolder(config)
        ready = set_up(config, world, shape, folder, signals, watch, opened)
        with Answers(ready.out, lambda: ready.training.steps_done):
            _train(ready, folder)
    except (Exception, KeyboardInterrupt) as error:
        _leave(ready, folder, ctrl_c, opened)
        code = _code_after(error, place, ready, ctrl_c, watch)
        if code is None:
            raise
        return code
    else:
        _leave(ready, folder, ctrl_c, opened)
        return 0
    finally:
        if watch:
            watch.stop()
        bootstrap.stop()
        signals.ignore()


def _grid_shape(config: Config, place: Place) -> GridShape:
    """The grid for this number of ranks; every rank finds the same errors in it."""
    try:
        return combinations.check(config, place.world_size)
    except ValueError as error:
        raise RefusedError(str(error)) from None


class Ready(NamedTuple):
    """A run before its first step.

    Args:
        training: What it trains with.
        observers: Who looks on.
        out: The folder of the run.
    """

    training: Training
    observers: list[Observer]
    out: Path

    @property
    def has_begun(self) -> bool:
        """Whether this process has done an optimizer step."""
        return self.training.has_begun


def set_up(
    config: Config,
    world: World,
    shape: GridShape,
    folder: RunFolder,
    signals: StopSignals,
    watch: HangWatch,
    opened: contextlib.ExitStack,
) -> Ready:
    """Data, process groups, model and output folder.

    Every error that can be found before the first step is found here, and nothing is written
    before that. What may fail on one rank alone is agreed on by all; what communicates is not
    wrapped in such an agreement, in which the others would not take part.

    Args:
        config: The run.
        world: This process.
        shape: The grid.
        folder: Of the run.
        signals: What asks a run to stop.
        watch: Speaks when nothing moves.
        opened: Closes what is opened here.

    Raises:
        ValueError, OSError, MemoryError: On the rank that found something.
        PeerError: On the others.
    """
    # Without checkpoints a signal ends the process, as it ends any other.
    if config.checkpoint.on:
        signals.listen()
    on_every_rank(lambda: check_device(config.train, world.device))
    on_every_rank(lambda: _check_features(config))
    on_every_rank(lambda: _check_start(config, config.model))
    task = _make_task_once_per_node(config, world)
    # before any group of the grid is made
    on_every_rank(lambda: _check_sizes(config, world, shape, task))
    grid = Grid.create(shape)
    out = on_first_rank(folder.look)
    _check_that_all_see(config, folder, out)
    print_on_first_rank(world, who_and_where(config, world, shape))
    if isinstance(task.model_config, GPTConfig) and task.model_config.num_experts:
        print_on_first_rank(world, of_experts(task.model_config, shape))
    start = None
    if config.checkpoint.resume:
        start = Checkpoints(config, grid, out, task.data_sha256).newest()
        if start:
            print_on_first_rank(world, f"resuming from {start}")
    listening = signals if config.checkpoint.on else None
    training = build(config, world, grid, task, start)
    opened.callback(training.close)
    # only now: a run that cannot begin leaves all as it was
    out = on_first_rank(folder.claim)
    attempts.note_folder(out, world.place)
    _check_that_all_see(config, folder, out)
    log = on_every_rank(lambda: open_log(training, out))
    opened.callback(log.close)
    observers = on_every_rank(lambda: observers_of(training, log, out, listening, watch))
    for observer in observers:
        opened.callback(observer.close)
    return Ready(training, observers, out)


def _check_features(config: Config) -> None:
    """Read the YAML of debug features, before data and model are made."""
    own = config.debug.feature_dir
    if config.debug.config:
        debug_config.read(Path(config.debug.config), Path(own) if own else None)


def _check_start(
    config: Config, model: GPTConfig | ViTConfig, tokenizer: AnyTokenizer | None = None
) -> None:
    """What the weights to start from say of themselves; one that resumes may not need them."""
    if config.train.start_from and not config.checkpoint.resume:
        open_start(config, model, tokenizer)


def _check_sizes(config: Config, world: World, shape: GridShape, task: Task) -> None:
    """What can be checked only with the sizes that come from the data.

    Raises:
        ValueError: The grid does not fit the model, or no memory holds it.
    """
    config.parallel.check(task.model_config, shape)
    build_meta(config, task)
    _check_start(config, task.model_config, task.tokenizer)
    ranks, memory_bytes = shared_memory(world, config.parallel.share_gpus)
    check_memory(task.model_config, config, shape, ranks, memory_bytes, num_samples=len(task.train))


def _train(ready: Ready, folder: RunFolder) -> None:
    """Train to the end, or to a signal."""
    training = ready.training
    world = training.world
    if training.is_done:
        line = (
            f"{training.steps_done} steps are done, train.steps is {training.config.train.steps}: "
            "only the result is written"
        )
        print_on_first_rank(world, line)
    stopped_by = fit(training, ready.observers)
    folder.keep()
    if stopped_by:
        line = f"stopped by {stopped_by} {_where_it_resumes(training)} {RESUME}"
        on_first_rank(lambda: folder.note_stop(line))
        failure.say(world.place, line)


def train(training: Training, out: Path | None = None) -> list[dict[str, float]]:
    """Train to the end, with all that looks on at a run, and close it; for labs and tests.

    Args:
        training: As `build` makes it.
        out: An existing folder; None writes nothing.

    Returns:
        The rows of metrics.
    """
    with contextlib.ExitStack() as opened:
        opened.callback(training.close)
        log = open_log(training, out)
        opened.callback(log.close)
        observers = observers_of(training, log, out)
        for observer in observers:
            opened.callback(observer.close)
        fit(training, observers)
    return log.history


def _leave(
    ready: Ready | None, folder: RunFolder, ctrl_c: CtrlC, opened: contextlib.ExitStack
) -> None:
    """Close the files, and put everything back if the run has not begun."""
    ctrl_c.stop_raising()
    # closing may fail for the reason that ended the run, such as a full disk
    with contextlib.suppress(OSError):
        opened.close()
    if ready is not None and ready.has_begun:
        folder.keep()
    try:
        folder.close()
    except (OSError, ValueError) as error:
        print(f"{folder.path} could not be put back: {failure.text_of(error)}", flush=True)


def _code_after(
    error: BaseException,
    place: Place,
    ready: Ready | None,
    ctrl_c: CtrlC,
    watch: HangWatch | None,
) -> int | None:
    """Report what has ended the run.

    Returns:
        The exit code of this rank; None for a bug, whose traceback is wanted.
    """
    is_lost_peer = failure.is_lost_peer(error)
    was_broken_off = caused_by_ctrl_c(error)
    if was_broken_off or ctrl_c.heard:
        if not was_broken_off and not is_lost_peer:
            traceback.print_exception(error)  # it may be a bug that has nothing to do with Ctrl-C
        if _store_answers(place):
            leave_word(CTRL_C)
        return failure.interrupted(place, _how_far(ready))
    if is_lost_peer and _others_were_interrupted(place, ctrl_c):
        return failure.interrupted(place, _how_far(ready))
    if not isinstance(error, Exception) or not failure.is_expected(error, ready is not None):
        return None
    steps_done = None if ready is None else ready.training.steps_done
    return failure.fail(place, error, steps_done, watch.report if watch else "")


def _others_were_interrupted(place: Place, ctrl_c: CtrlC) -> bool:
    """Whether a rank is gone because of Ctrl-C.

    A terminal sends it to all, but this rank may see the closed connection before its own signal;
    or another one alone has got it, and has left word.
    """
    # else the store may be gone with the rank that hosts it
    if (place.has_agent or place.hosts_store) and word_left() == CTRL_C:
        return True
    deadline = time.monotonic() + SAME_MOMENT_S
    while not ctrl_c.heard and time.monotonic() < deadline:
        time.sleep(0.02)
    return ctrl_c.heard


def _store_answers(place: Place) -> bool:
    """Whether somebody listens where the ranks have met."""
    if place.address is None:
        return False
    try:
        socket.create_connection(place.address, timeout=1.0).close()
    except OSError:
        return False
    return True


def _how_far(ready: Ready | None) -> str:
    """When a run was broken off, and what there is of it."""
    if ready is None or not ready.has_begun:
        return "before the first step: nothing was written"
    return f"after step {ready.training.steps_done}: its metrics are in {ready.out}"


def _where_it_resumes(training: Training) -> str:
    """When a run was stopped; one that has not done a step has nothing to save."""
    if training.has_begun:
        return f"after step {training.steps_done}, with a checkpoint: resume from it"
    return f"before step {training.steps_done + 1}: resume"


def _check_that_all_see(config: Config, folder: RunFolder, out: Path) -> None:
    """Look on every rank whether the folder is the one that rank 0 sees.

    Only where all ranks write into it: without checkpoints rank 0 is the only one.

    Raises:
        ValueError: On a rank that does not see it.
        PeerError: On the others.
    """
    if not config.checkpoint.on:
        return
    host, mark = on_first_rank(lambda: (socket.gethostname(), folder.mark))
    if mark:
        on_every_rank(lambda: _check_that_this_rank_sees(out, mark, host))


def _check_that_this_rank_sees(out: Path, mark: str, host: str) -> None:
    """Look for a mark in a folder.

    Args:
        out: The folder.
        mark: What rank 0 has written there.
        host: Where rank 0 runs.
    """
    path = out / LOCK_NAME
    deadline = time.monotonic() + SHARED_WAIT_S
    while not (path.is_file() and path.read_text(errors="replace") == mark):
        if time.monotonic() > deadline:
            raise ValueError(
                f"{out} as this rank sees it on {socket.gethostname()} is not the folder of rank 0 "
                f"on {host}: choose a train.out that all nodes share"
            )
        time.sleep(0.1)


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
    ranks = plural(world.world_size, "rank")
    axes = " x ".join(f"{axis} {shape.size(axis)}" for axis in ("dp", "pp", "cp", "tp"))
    if shape.ep > 1:
        axes += f", experts over ep {shape.ep} of dp"
    accumulation = config.train.accumulation(shape.dp)
    micro_batch = config.train.global_batch // (shape.dp * accumulation)
    return (
        f"{ranks} on {_nodes(hosts)}, {world.backend} on {world.device.type}; grid {axes}; "
        f"{config.train.global_batch} samples a step = "
        f"dp {shape.dp} x {accumulation} micro-batches of {micro_batch}"
    )


def of_experts(model: GPTConfig, shape: GridShape) -> str:
    """The second line of a log of a mixture of experts: what of it a token uses."""
    active = f"{model.num_active_parameters:,} of them for each token"
    return (
        f"{model.num_parameters:,} weights, {active}: {model.experts_per_token} of "
        f"{model.num_experts} experts in each layer, of which a rank keeps "
        f"{model.num_experts // shape.ep}"
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
