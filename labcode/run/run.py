"""From a config to a finished run: connect, set up, train, and one line for whatever goes wrong."""

import contextlib
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from labcode.comm.grid import Grid
from labcode.config import Config, GPTConfig, ViTConfig
from labcode.data.tokenizer import AnyTokenizer
from labcode.debug import debug_config
from labcode.doctor.hang import HangWatch
from labcode.measure.metrics import Log
from labcode.run import attempts, failure
from labcode.run.capacity import check_memory, shared_memory
from labcode.run.failure import RefusedError
from labcode.run.run_folder import RunFolder
from labcode.runtime import bootstrap, combinations, errors, processes
from labcode.runtime.agreement import (
    agreed,
    leave_word,
    on_every_rank,
    on_first_rank,
    wait_for_all,
    word_left,
)
from labcode.runtime.bootstrap import Place, World
from labcode.runtime.combinations import Resolved
from labcode.runtime.ctrl_c import CtrlC, caused_by_ctrl_c
from labcode.runtime.files import LOCK_NAME
from labcode.runtime.units import plural
from labcode.topology import GridShape
from labcode.train.build import Training, build, build_meta
from labcode.train.checkpoint.hub_files import open_start
from labcode.train.checkpoint.store import Checkpoints
from labcode.train.loop import fit
from labcode.train.observer import Observer
from labcode.train.observers import observers_of, open_log
from labcode.train.precision import check_device
from labcode.train.signals import StopSignals
from labcode.train.tasks import Task, make_task

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
    folder = None
    opened = contextlib.ExitStack()
    try:
        place = bootstrap.read_environment()
        if place.has_agent:
            # a killed torchrun must leave no rank behind
            processes.end_with_parents(at_once=True, parent=started_by)
        # before the ranks meet: each finds the same errors in it by itself
        resolved = _resolve(config, place)
        parallel = config.parallel
        world = bootstrap.start(
            place,
            share_gpus=parallel.share_gpus,
            timeout_s=parallel.collective_timeout_s,
        )
        watch = HangWatch(parallel.collective_timeout_s)
        watch.start()
        # only now, because rank 0 asks for all; the grid is the same in every attempt
        resolved = replace(resolved, config=attempts.resumed_config(config, place))
        folder = RunFolder(resolved.config)
        ready = set_up(resolved, world, folder, signals, watch, opened)
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


def _resolve(config: Config, place: Place) -> Resolved:
    """The run on this number of ranks.

    Args:
        config: The run.
        place: Where this process stands: its rank and host.

    Raises:
        RefusedError: It cannot be, as every rank finds.
    """
    try:
        return combinations.resolve(config, place.world_size)
    except ValueError as error:
        raise RefusedError(str(error)) from None


class Ready(NamedTuple):
    """A run before its first step.

    Args:
        training: What it trains with.
        observers: The observers of the run.
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
    resolved: Resolved,
    world: World,
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
        resolved: The run.
        world: This process.
        folder: Folder of the run.
        signals: What asks a run to stop.
        watch: Speaks when nothing moves.
        opened: Closes what is opened here.

    Raises:
        ValueError, OSError, MemoryError: Raised on the rank that found something.
        PeerError: Raised on the other ranks.
    """
    config = resolved.config
    # Without checkpoints a signal ends the process, as it ends any other.
    if config.checkpoint.on:
        signals.listen()
    # before the data is prepared, which may take minutes
    agreed(
        partial(check_device, config.train, world.device),
        partial(_check_features, config),
        partial(_check_start, config, config.model),
    )
    task = _make_task_once_per_node(config, world)
    model = task.model_config
    # With the sizes that come from the data, and before any group of the grid is made: of thousands
    # of ranks that alone takes long.
    agreed(
        partial(config.parallel.check, model, resolved.shape),
        partial(build_meta, config, task),  # that `train.freeze` names some of its weights
        partial(_check_start, config, model, task.tokenizer),
        partial(_check_memory, resolved, world, task),
    )
    grid = Grid.create(resolved.shape)
    out = _folder_that_all_see(config, folder, folder.look)
    print_on_first_rank(world, who_and_where(resolved, world))
    if isinstance(model, GPTConfig) and model.num_experts:
        print_on_first_rank(world, of_experts(model, resolved.shape))
    start = None
    if config.checkpoint.resume:
        start = Checkpoints(config, grid, out, task.data_sha256).newest()
        if start:
            print_on_first_rank(world, f"resuming from {start}")
    listening = signals if config.checkpoint.on else None
    training = build(resolved, world, grid, task, start)
    opened.callback(training.close)
    # only now: a run that cannot begin leaves all as it was
    out = _folder_that_all_see(config, folder, partial(_claim, folder, world.place))
    # not before all see the folder: the log is a file in it, and of a run that resumes it is cut
    _, observers = on_every_rank(_open_observers, training, opened, out, listening, watch)
    return Ready(training, observers, out)


def _check_features(config: Config) -> None:
    """Read the YAML of debug features, before data and model are made.

    Raises:
        ValueError, OSError: It cannot be read, or asks for what there is not.
    """
    own = config.debug.feature_dir
    if config.debug.config:
        debug_config.read(Path(config.debug.config), Path(own) if own else None)


def _check_start(
    config: Config, model: GPTConfig | ViTConfig, tokenizer: AnyTokenizer | None = None
) -> None:
    """What the weights to start from say of themselves; one that resumes may not need them.

    Args:
        config: The run.
        model: Config of the model, with or without the sizes that come from the data.
        tokenizer: Tokenizer of the text, once that is known; None before.

    Raises:
        ValueError: They are of another model.
    """
    resumes_whole = config.checkpoint.resume and not config.lora.rank
    if config.train.start_from and not resumes_whole:
        open_start(config, model, tokenizer)


def _check_memory(resolved: Resolved, world: World, task: Task) -> None:
    """That the memory of this node, or of its GPUs, can hold what its ranks need at least.

    Args:
        resolved: The run.
        world: This process.
        task: The model, with every size, and the data.

    Raises:
        ValueError: It cannot.
    """
    ranks, memory_bytes = shared_memory(world, resolved.config.parallel.share_gpus)
    check_memory(task.model_config, resolved, ranks, memory_bytes, num_samples=len(task.train))


def _claim(folder: RunFolder, place: Place) -> Path:
    """On rank 0: take the folder, and let the attempts to come know it.

    It is noted at once. A rank that is killed in between would leave a folder in which the next
    attempt sees another run.

    Args:
        folder: Folder of the run.
        place: Where this process stands: its rank and host.
    """
    out = folder.claim()
    attempts.note_folder(out, place)
    return out


def _open_observers(
    training: Training,
    opened: contextlib.ExitStack,
    out: Path | None,
    signals: StopSignals | None = None,
    watch: HangWatch | None = None,
) -> tuple[Log, list[Observer]]:
    """The log of a run and its other observers.

    Args:
        training: The training as `build` makes it.
        opened: Closes them; what is open when the next one fails is closed too.
        out: The folder of the run; None writes nothing.
        signals: What asks the run to stop; None: it listens while it trains.
        watch: Speaks when nothing moves; None: there is none.
    """
    log = open_log(training, out)
    opened.callback(log.close)
    observers = observers_of(training, log, out, signals, watch)
    for observer in observers:
        opened.callback(observer.close)
    return log, observers


def _train(ready: Ready, folder: RunFolder) -> None:
    """Train to the end, or to a signal.

    Args:
        ready: The run before its first step.
        folder: Folder of the run; from here on what is written there stays.
    """
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
        on_first_rank(folder.note_stop, line)
        failure.say(world.place, line)


def train(training: Training, out: Path | None = None) -> list[dict[str, float]]:
    """Train to the end, with all observers of a run, and close it; for labs and tests.

    Args:
        training: The training as `build` makes it.
        out: An existing folder; None writes nothing.

    Returns:
        The rows of metrics.
    """
    with contextlib.ExitStack() as opened:
        opened.callback(training.close)
        log, observers = _open_observers(training, opened, out)
        fit(training, observers)
    return log.history


def _leave(
    ready: Ready | None, folder: RunFolder | None, ctrl_c: CtrlC, opened: contextlib.ExitStack
) -> None:
    """Close the files, and put everything back if the run has not begun.

    Args:
        ready: The run, if it was set up.
        folder: Folder of the run; None: it failed before that was known.
        ctrl_c: A second Ctrl-C must not break off what is put back.
        opened: What is to be closed.
    """
    ctrl_c.stop_raising()
    # closing may fail for the reason that ended the run, such as a full disk
    with contextlib.suppress(OSError):
        opened.close()
    if folder is None:
        return
    if ready is not None and ready.has_begun:
        folder.keep()
    try:
        folder.close()
    except (OSError, ValueError) as error:
        print(f"{folder.path} could not be put back: {errors.text_of(error)}", flush=True)


def _code_after(
    error: BaseException,
    place: Place,
    ready: Ready | None,
    ctrl_c: CtrlC,
    watch: HangWatch | None,
) -> int | None:
    """Report what has ended the run.

    Args:
        error: What was raised.
        place: Where this process stands: its rank and host.
        ready: The run, if it was set up.
        ctrl_c: Whether it was heard.
        watch: Knows who waited for whom; None: the ranks had not met.

    Returns:
        The exit code of this rank; None for a bug, whose traceback is wanted.
    """
    is_lost_peer = failure.knows_only_lost_peer(error)
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

    Args:
        place: Where this process stands: its rank and host.
        ctrl_c: Whether it was heard here.
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


def _folder_that_all_see(config: Config, folder: RunFolder, choose: Callable[[], Path]) -> Path:
    """What rank 0 chooses, once every rank has looked whether it sees the same folder.

    They look only where all ranks write into it: without checkpoints rank 0 is the only one.

    Args:
        config: The run.
        folder: Folder of the run.
        choose: The folder's `look` or its `claim`, on rank 0.

    Raises:
        ValueError, OSError: Raised on rank 0 by `choose`, or on one that sees no folder.
        PeerError: Raised on the other ranks.
    """

    def chosen() -> tuple[Path, str, str]:
        return choose(), folder.mark, socket.gethostname()

    out, mark, host = on_first_rank(chosen)
    if config.checkpoint.on and mark:
        on_every_rank(_check_that_this_rank_sees, out, mark, host)
    return out


def _check_that_this_rank_sees(out: Path, mark: str, host: str) -> None:
    """Look for a mark in a folder.

    Args:
        out: The folder.
        mark: What rank 0 has written there.
        host: Host that rank 0 runs on.

    Raises:
        ValueError: It is not there.
    """
    path = out / LOCK_NAME
    # NFS shows a file of another node late
    deadline = time.monotonic() + SHARED_WAIT_S
    while not (path.is_file() and path.read_text(errors="replace") == mark):
        if time.monotonic() > deadline:
            raise ValueError(
                f"{out} as this rank sees it on {socket.gethostname()} is not the folder of rank 0 "
                f"on {host}: choose a train.out that all nodes share"
            )
        time.sleep(0.1)


def _make_task_once_per_node(config: Config, world: World) -> Task:
    """The task, on every rank; the first rank of each node prepares its files for the others.

    Args:
        config: The run.
        world: This process.

    Raises:
        ValueError, OSError: The data cannot be read or does not fit, on the rank that found it.
        PeerError: Raised on the other ranks.
    """
    # Two agreements on all ranks: one when the files are there, one when all have read them. Ranks
    # that prepare the same files at once would each do the work of minutes.
    if world.local_rank == 0:
        task = on_every_rank(make_task, config)
        wait_for_all()
        return task
    wait_for_all()
    return on_every_rank(make_task, config)


def print_on_first_rank(world: World, line: str) -> None:
    """Print a line of the log, once for the whole job.

    Args:
        world: This process.
        line: What is printed.
    """
    if world.rank == 0:
        print(line, flush=True)


def who_and_where(resolved: Resolved, world: World) -> str:
    """The first line of a log: the ranks of each node, the grid, and how a global batch is divided.

    All ranks call it.

    Communicates: one all-gather of host names.

    Args:
        resolved: The run.
        world: This process.
    """
    shape = resolved.shape
    hosts: list[str] = [""] * world.world_size
    dist.all_gather_object(hosts, socket.gethostname())
    ranks = plural(world.world_size, "rank")
    axes = " x ".join(f"{axis} {shape.size(axis)}" for axis in ("dp", "pp", "cp", "tp"))
    if shape.ep > 1:
        axes += f", experts over ep {shape.ep} of dp"
    return (
        f"{ranks} on {_nodes(hosts)}, {world.backend} on {world.device.type}; grid {axes}; "
        f"{resolved.config.train.global_batch} samples a step = "
        f"dp {shape.dp} x {resolved.accumulation} micro-batches of {resolved.micro_batch}"
    )


def of_experts(model: GPTConfig, shape: GridShape) -> str:
    """The second line of a log of a mixture of experts: what of it a token uses.

    Args:
        model: With a vocabulary, without which its weights cannot be counted.
        shape: The grid, of which ep divides the experts.
    """
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
