"""What runs inside an engine of a ranks pool.

    python -m labcode.pool.engine ROLE FOLDER OWNER [RANK]

OWNER is the number of the process that has the pool. It holds the other end of this process's
stdin, and may write a line there: the number of the process group to break off. When it dies, even
by SIGKILL and however early, the engine ends itself.
"""

import contextlib
import gc
import inspect
import io
import os
import signal
import sys
import threading
import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import IO, Any

from labcode import processes
from labcode.pool import family, wire
from labcode.pool.stopping import EngineState, as_cell_failure, text_of

STORE_TIMEOUT = timedelta(seconds=60)  # to meet; a collective's own time-out may be shorter


class _State(EngineState):
    """What this engine is doing, and what it keeps between two calls.

    Attributes:
        store: On rank 0, the meeting point of the process group in use.
        leftover: Process groups that the last call made and that nobody needs after it.
        recorder: The module that records the calls of torch.distributed, once torch is there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.store: Any = None
        self.leftover: list[Any] = []
        self.recorder: Any = None

    def begin(self) -> None:
        """A call or a cell begins: its collectives are counted from here on."""
        if self.recorder is not None:
            self.recorder.begin()
        super().begin()

    def finish(self) -> None:
        """It ends: the pool is told what state it leaves the process group in."""
        super().finish()
        if self.recorder is not None:
            self.recorder.finish()

    def before_cut(self) -> None:
        """Let the other ranks come out of the groups that they are making with this one."""
        if self.recorder is not None:
            self.recorder.let_connect()


_state = _State()


# ---- called by the notebook: connect


def open_store(group: int) -> int:
    """On rank 0: the meeting point of process group number `group`; returns its port.

    It is reached over TCP, so that cutting the connections frees whoever waits there.
    """
    import torch.distributed as dist

    _state.enter_group(group)
    _state.store = dist.TCPStore(
        "127.0.0.1", 0, None, is_master=True, wait_for_workers=False, timeout=STORE_TIMEOUT
    )
    return _state.store.port


def join(group: int, n: int, port: int, timeout_s: float) -> int:
    """Leave the old process group and enter number `group`; returns this engine's rank."""
    import torch
    import torch.distributed as dist
    from IPython.core.getipython import get_ipython

    from labcode.comm import bootstrap
    from labcode.pool import recorder

    _state.enter_group(group)
    _state.leftover = []
    gc.collect()  # models and tensors of a failed call
    bootstrap.stop()
    rank = _state.rank
    recorder.start(_state.folder, rank, n)
    _state.recorder = recorder
    store = _state.store
    if rank != 0:
        store = dist.TCPStore("127.0.0.1", port, None, timeout=STORE_TIMEOUT)
    place = bootstrap.Place(rank, n, local_rank=rank, local_world_size=n, launcher="pool")
    world = bootstrap.start(place, share_gpus=True, timeout_s=timeout_s, store=store)
    recorder.finish()
    shell = get_ipython()
    assert shell is not None
    shell.user_ns.update(rank=rank, world_size=n, device=world.device, torch=torch, dist=dist)
    _prepare_cells(shell)
    return rank


def _prepare_cells(shell: Any) -> None:
    """Let %%px cells fail as calls do; does nothing the second time."""
    if _after_cell in shell.events.callbacks["post_run_cell"]:
        return
    shell.events.register("pre_run_cell", _before_cell)
    shell.events.register("post_run_cell", _after_cell)
    # `exit` in a cell would end the engine after its answer.
    shell.ask_exit = sys.exit
    warnings.filterwarnings("ignore", message="To exit: use")  # IPython's, on sys.exit
    # So would SIGTERM: ipyparallel ends the loop in which calls arrive, not the call.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # The notebook shows one error. IPython's own rendering of torch's frames takes a second, while
    # the other ranks wait.
    shell.showtraceback = _show_nothing
    shell.showsyntaxerror = _show_nothing


def _show_nothing(*_: Any, **__: Any) -> None:
    pass


def _before_cell(_info: Any) -> None:
    _state.begin()


def _after_cell(result: Any) -> None:
    """After a %%px cell: a rank that failed frees the ones that wait for it."""
    _state.finish()
    error = result.error_before_exec or result.error_in_exec
    if error:
        result.error_before_exec = None
        result.error_in_exec = as_cell_failure(_state.fail(error))


# ---- called by the notebook: run a function


def call(payload: bytes, path: Sequence[str], pass_rank: bool) -> dict[str, Any]:
    """Run one function. Never raises.

    Args:
        payload: The function and its arguments, packed by `wire.pack_call`.
        path: Where the caller finds modules.
        pass_rank: Put this engine's rank before the arguments.

    Returns:
        "result" as bytes or "failure", "out" and "err" (what it printed), and "groups": how many
        process groups it leaves behind for `drop_groups`.
    """
    out = io.StringIO()
    err = io.StringIO()
    answer: dict[str, Any] = {}
    engine = os.getpid()
    _state.begin()
    try:
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                answer["result"] = _call(payload, path, pass_rank)
        finally:
            if os.getpid() != engine:
                # A fork made by the user's code comes out of it as well. It must not answer: there
                # is one engine, and one answer.
                os._exit(0)
            _state.finish()
    except BaseException as error:
        answer["failure"] = _state.fail(error)
    answer["out"] = out.getvalue()
    answer["err"] = err.getvalue()
    answer["groups"] = len(_state.leftover)
    return answer


def _call(payload: bytes, path: Sequence[str], pass_rank: bool) -> bytes:
    from labcode.comm.grid import made_by_grid

    before = set(_groups())
    sys.path.extend(entry for entry in path if entry not in sys.path)
    try:
        fn, args, kwargs = wire.loads(payload)
        _add_names_of_cells(fn)
        if pass_rank:
            args = (_state.rank, *args)
        value = fn(*args, **kwargs)
    finally:
        for group in _groups():
            # Those of a grid serve the grids of the next calls: with the same ranks they are made
            # once per pool.
            if group not in before and not made_by_grid(group):
                _state.leftover.append(group)
    try:
        return wire.dumps(value)
    except Exception as error:
        raise TypeError(
            f"the result, a {type(value).__name__}, cannot be sent back: {text_of(error)}: "
            "return numbers or tensors"
        ) from None


def _groups() -> list[Any]:
    """All process groups that this engine is in."""
    from torch.distributed import distributed_c10d

    return list(distributed_c10d._world.pg_map)


def _add_names_of_cells(fn: Any) -> None:
    """A function from a notebook sees the names that %%px cells defined, as a cell does."""
    from IPython.core.getipython import get_ipython

    names = getattr(inspect.unwrap(fn), "__globals__", {})
    if names.get("__name__") != "__main__":
        return
    shell = get_ipython()
    assert shell is not None
    for name, value in shell.user_ns.items():
        names.setdefault(name, value)


def drop_groups() -> None:
    """Destroy the process groups that the last call made; called once all ranks are done with them.

    Gloo keeps sockets and threads of a group until nothing refers to it, and the model that does
    may be in a circle.
    """
    import torch.distributed as dist

    for group in _state.leftover:
        with contextlib.suppress(ValueError):  # destroyed already, by a cell
            dist.destroy_process_group(group)
    group = None
    _state.leftover = []
    gc.collect()


# ---- start


def main(role: str, folder: str, owner: str, rank: str = "0") -> None:
    """Run the controller, or the engine of one rank, until the owner of the pool ends."""
    _state.folder = folder
    processes.end_with_parents(before_end=lambda: _leave(folder), parent=int(owner))
    orders = os.fdopen(os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # user code that reads stdin must not eat orders
    threading.Thread(target=_obey, args=(orders,), daemon=True).start()
    arguments = [f"--profile-dir={folder}", "--log-level=ERROR"]
    if role == "controller":
        _run_controller(arguments)
    else:
        _run_engine(arguments, int(rank))


def _leave(folder: str) -> None:
    """Before this process ends with its parent.

    It takes along the others of its pool: one that is stopped, by SIGSTOP or a debugger, does not
    see that the parent has gone.
    """
    members = family.read(folder)
    processes.remove_from_outside(folder)
    family.kill_others(members)


def _obey(orders: IO[str]) -> None:
    for line in orders:
        _state.break_off(int(line))


def _run_controller(arguments: list[str]) -> None:
    from ipyparallel.controller.app import IPController

    IPController.launch_instance(
        [
            *arguments,
            "--IPController.use_threads=True",  # in place of six processes
            "--TaskScheduler.scheme_name=none",
            # Engines count as present from their second heartbeat on.
            "--HeartMonitor.period=300",
            # The pool sees at once when an engine dies: a busy machine must not make one look dead.
            "--HeartMonitor.max_heartmonitor_misses=1000000",
        ]
    )


def _run_engine(arguments: list[str], rank: int) -> None:
    import torch  # noqa: F401 - before the engine registers, so that the first call does not wait for it
    from ipyparallel.engine.app import IPEngine

    _state.rank = rank
    IPEngine.launch_instance(
        [
            *arguments,
            f"--IPEngine.id={rank}",
            "--IPEngine.enable_nanny=False",  # no process that watches the engine: the pool does
            "--IPEngine.wait_for_url_file=60",
            "--IPEngine.timeout=20",
            "--IPEngine.max_heartbeat_misses=0",
        ]
    )


if __name__ == "__main__":
    # The module that the notebook's calls find, not this copy of it.
    from labcode.pool import engine

    engine.main(*sys.argv[1:])
