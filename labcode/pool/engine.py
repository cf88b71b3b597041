"""What runs inside an engine of a ranks pool: `python -m labcode.pool.engine ROLE FOLDER [RANK N]`.

The parent holds the other end of this process's stdin. While it lives it may write a line there: the number of the group to
break off. When it dies, even by SIGKILL, the pipe closes and the engine ends itself.
"""

import contextlib
import gc
import inspect
import io
import json
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from datetime import timedelta

from labcode.pool import wire as _wire


class _State:
    """What this engine is doing; one per process, never shipped."""

    group = 0  # number of the process group in use; a break-off order for an older one is stale
    busy = False  # in a call or a cell: only then may an interrupt be raised
    lock = threading.Lock()  # for these two
    ports: frozenset = (
        frozenset()
    )  # the controller's ports: connections to keep when the others are cut
    rank = 0
    leftover = ()  # process groups made inside the last call


# ------------------------------------------------------------------------------------------------ called by the notebook


STORE_TIMEOUT = timedelta(seconds=60)  # to meet; a collective's own time-out may be shorter


def open_store(group):
    """On rank 0: the meeting point of process group number `group`; returns its port. Over TCP: `_cut` frees who waits."""
    import torch.distributed as dist

    _enter_group(group)
    _State.store = dist.TCPStore(
        "127.0.0.1", 0, None, is_master=True, wait_for_workers=False, timeout=STORE_TIMEOUT
    )
    return _State.store.port


def _enter_group(group):
    """Before its first connection: from here on orders to break off an older group are stale."""
    with _State.lock:
        _State.group = group


def join(group, n, port, timeout_s):
    """Leave the old process group and enter number `group`; returns this engine's rank."""
    import torch
    import torch.distributed as dist
    from IPython import get_ipython

    from labcode.comm import bootstrap

    _enter_group(group)
    _State.leftover = ()
    gc.collect()  # models and tensors of a failed call
    bootstrap.stop()
    rank = _State.rank
    store = (
        _State.store if rank == 0 else dist.TCPStore("127.0.0.1", port, None, timeout=STORE_TIMEOUT)
    )
    place = bootstrap.Place(rank, n, local_rank=rank, local_world_size=n, launcher="pool")
    world = bootstrap.start(place, share_gpus=True, timeout_s=timeout_s, store=store)
    shell = get_ipython()
    shell.user_ns.update(rank=rank, world_size=n, device=world.device, torch=torch, dist=dist)
    if _after_cell not in shell.events.callbacks["post_run_cell"]:
        shell.events.register("pre_run_cell", _enter)
        shell.events.register("post_run_cell", _after_cell)
        # the notebook shows one error; IPython's own rendering of torch's frames takes a second, while the other ranks wait
        shell.showtraceback = shell.showsyntaxerror = lambda *_, **__: None
    return rank


def _enter(_info=None):
    with _State.lock:
        _State.busy = True


def _leave():
    """From here on no interrupt comes, so that the reply is not lost."""
    while _State.busy:
        with contextlib.suppress(KeyboardInterrupt), _State.lock:
            _State.busy = False
    with contextlib.suppress(KeyboardInterrupt):
        signal.signal(
            signal.SIGINT, signal.SIG_IGN
        )  # ipykernel puts its own handler back; raises what is pending


def call(payload, path, pass_rank):
    """Run one function; returns its result as bytes, what it printed, and the failure if there was one. Never raises."""
    out, err = io.StringIO(), io.StringIO()
    answer = {}
    _enter()
    try:
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                answer["result"] = _call(payload, path, pass_rank)
        finally:
            _leave()
    except BaseException as error:
        answer["failure"] = _fail(error)
    return {**answer, "out": out.getvalue(), "err": err.getvalue()}


def _call(payload, path, pass_rank):
    import torch.distributed as dist
    from IPython import get_ipython

    for (
        group
    ) in _State.leftover:  # all ranks are done with them by now; each would keep its sockets open
        dist.destroy_process_group(group)
    _State.leftover = group = ()
    before = set(dist.distributed_c10d._world.pg_map)
    sys.path.extend(entry for entry in path if entry not in sys.path)
    try:
        fn, args, kwargs = _wire.loads(payload)
        names = getattr(inspect.unwrap(fn), "__globals__", {})
        if (
            names.get("__name__") == "__main__"
        ):  # from a notebook: names defined by %%px are there too, as in the cell below
            for name, value in get_ipython().user_ns.items():
                names.setdefault(name, value)
        value = fn(_State.rank, *args, **kwargs) if pass_rank else fn(*args, **kwargs)
    finally:
        _State.leftover = [
            group for group in dist.distributed_c10d._world.pg_map if group not in before
        ]
    try:
        return _wire.dumps(value)
    except Exception as error:
        raise TypeError(
            f"the result, a {type(value).__name__}, cannot be sent back: {error}: return numbers or tensors"
        ) from None


# ------------------------------------------------------------------------------------------------------------- failures


class CellFailed(Exception):
    """Carries a failure, as JSON, in the reply to a %%px cell."""


def _after_cell(result):
    """After a %%px cell: a rank that failed frees the ones that wait for it."""
    _leave()
    if error := result.error_before_exec or result.error_in_exec:
        result.error_before_exec, result.error_in_exec = None, CellFailed(json.dumps(_fail(error)))


def _fail(error):
    """Free the ranks that wait for this one; returns the exception as plain data.

    The time in it tells the first failure from those that it causes on other ranks.
    """
    failed_at = time.monotonic()
    try:
        message = str(error)
    except Exception as broken:
        message = f"<no message: {broken!r}>"
    if "Timed out" in message:
        time.sleep(0.5)  # those who wait for the same rank time out as well: let them say so
    _cut()
    frames = [
        (frame.filename, frame.lineno, frame.name, frame.line)
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != __file__ and "/IPython/" not in frame.filename
    ]
    return {
        "time": failed_at,
        "rank": _State.rank,
        "error": type(error).__name__,
        "message": message,
        "frames": frames,
    }


def _cut():
    """Close the connections between this rank and the others, so that every wait on them ends with an error at once.

    destroy_process_group does not do it: gloo's connections live on while anything (a traceback, a model) refers to a group.
    """
    import psutil

    for link in psutil.Process().net_connections("tcp"):
        local = (
            link.raddr and link.raddr.ip == link.laddr.ip and link.status == psutil.CONN_ESTABLISHED
        )
        if local and link.raddr.port not in _State.ports:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(link.fd)) as twin:
                if (
                    twin.getpeername()[1] == link.raddr.port
                ):  # the number may belong to another file by now
                    twin.shutdown(socket.SHUT_RDWR)
    if "torch" in sys.modules:
        from torch.distributed import distributed_c10d

        for group in list(distributed_c10d._world.pg_map):
            with contextlib.suppress(Exception):
                group.abort()  # frees a rank that waits in NCCL; gloo ignores it


def _watch(orders, parent, folder):
    """Obey the parent's orders and end with it."""
    while True:
        ready, _, _ = select.select([orders], [], [], 1.0)
        text = os.read(orders, 256) if ready else b""
        if (ready and not text) or os.getppid() != parent:
            shutil.rmtree(folder, ignore_errors=True)
            os.killpg(
                0, signal.SIGKILL
            )  # this process leads a group of its own: data loader workers go with it
        if text:
            _break_off(int(text.split()[-1]))


def _break_off(group):
    """End what this rank does in process group number `group`.

    The interrupt comes before the cut: gloo sometimes hangs when a connection closes at the very moment of a send.
    """
    with _State.lock:
        if _State.busy and group == _State.group:
            signal.pthread_kill(
                threading.main_thread().ident, signal.SIGINT
            )  # for a rank that computes or sleeps
    time.sleep(0.3)
    with _State.lock:
        if group == _State.group:
            _cut()  # for a rank that waits for another


# ---------------------------------------------------------------------------------------------------------------- start


def main(role, folder, rank="0", n="1"):
    """Run the controller, or the engine of one rank, until the parent ends."""
    orders = os.dup(0)
    os.dup2(
        os.open(os.devnull, os.O_RDONLY), 0
    )  # user code that reads stdin must not eat the orders
    threading.Thread(target=_watch, args=(orders, os.getppid(), folder), daemon=True).start()
    arguments = [f"--profile-dir={folder}", "--log-level=ERROR"]
    if role == "controller":
        from ipyparallel.controller.app import IPController

        # threads in place of six processes; no task scheduler; engines count as present from their second heartbeat on
        options = [
            "--IPController.use_threads=True",
            "--TaskScheduler.scheme_name=none",
            "--HeartMonitor.period=300",
        ]
        # the pool itself sees at once when an engine dies: a busy machine must not make one look dead
        IPController.launch_instance(
            [*arguments, *options, "--HeartMonitor.max_heartmonitor_misses=1000000"]
        )
        return
    _State.rank = int(rank)
    import torch  # noqa: F401 - before the engine registers, so that the first call does not pay for it
    from ipyparallel.engine.app import IPEngine

    class Engine(IPEngine):
        def load_connection_file(self):
            super().load_connection_file()
            values = [
                port
                for value in self.connection_info.values()
                for port in (value if isinstance(value, list) else [value])
            ]
            _State.ports = frozenset(port for port in values if isinstance(port, int))

    # no nanny process per engine: the pool watches its processes itself
    options = [
        f"--IPEngine.id={rank}",
        "--IPEngine.enable_nanny=False",
        "--IPEngine.wait_for_url_file=60",
    ]
    Engine.launch_instance(
        [*arguments, *options, "--IPEngine.timeout=20", "--IPEngine.max_heartbeat_misses=0"]
    )


if __name__ == "__main__":
    # the module that the notebook's calls find, not this copy of it
    from labcode.pool import engine

    engine.main(*sys.argv[1:])
