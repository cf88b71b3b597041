"""A pool of ranks that stays alive between cells: n processes with torch.distributed up, for notebooks and for tests.

    ranks = Ranks(4)                     # about 10 s, once
    ranks.run(lambda rank: rank ** 2)    # [0, 1, 4, 9], in hundredths of a second

In a notebook `%%px` cells run on the same processes; there `rank`, `world_size`, `device`, `torch` and `dist` are defined.
Both wait for all ranks, print what each printed in rank order, and turn all failures into one `RankError` with the first.
"""

import contextlib
import inspect
import sys
import time
import warnings
import weakref

from IPython import get_ipython

from labcode.pool import engine as _engine
from labcode.pool import wire as _wire
from labcode.pool.answers import RankError, answer_of, any_failed, print_outputs, raise_first
from labcode.pool.processes import Processes

GRACE_S = 1.0  # how long the other ranks may go on after a failure before they are told to stop
PATIENCE_S = 5.0  # how long a rank that was told to stop may take before its process is ended


class Ranks:
    """`n` ranks on this machine; in a notebook a new pool closes the one before it.

    Each has a GPU and NCCL where there are enough; else they share GPUs, or the CPU with one thread each, and use gloo.
    After a failure all ranks enter a new process group: a group that a `%%px` cell made before is of no use any more.

    Args:
        n: Number of ranks.
        timeout_s: How long a collective waits for a rank that does not come.

    Raises:
        ValueError: `n` or `timeout_s` is not positive.
        RuntimeError: The engines did not start.
    """

    _in_notebook = staticmethod(lambda: None)  # weak reference to the pool that `%%px` uses

    def __init__(self, n: int, *, timeout_s: float = 30.0):
        if n < 1 or timeout_s <= 0:
            raise ValueError(
                f"Ranks(n={n}, timeout_s={timeout_s}): a pool needs at least 1 rank and a time-out above 0 s"
            )
        self.n, self.timeout_s = n, timeout_s
        self._processes = self._magics = None
        self.start()

    def start(self) -> None:
        """Start the engines; does nothing while they run."""
        if self._processes:
            return
        shell = get_ipython()
        if shell:
            self._take_over_notebook()
        self._joined = self._stuck = False
        self._group = 0  # number of the process group; 0 is none
        try:
            self._connect()
            self._join()
        except BaseException:
            self.close()
            raise
        if shell:
            from labcode.pool.px import PxMagics

            self._magics = self._magics or PxMagics(shell, self)
            self._magics.view = self._client.direct_view(list(range(self.n)), block=True)
            shell.register_magics(self._magics)

    def _take_over_notebook(self):
        """One pool per notebook: running the cell with `Ranks(4)` again must not leave four idle processes behind."""
        old = Ranks._in_notebook()
        if old is not None and old is not self:
            old.close()
        Ranks._in_notebook = weakref.ref(self)

    def _connect(self, attempts=2):
        """Start processes and reach them; once more if they fail, as a port they chose may be taken before they bind it."""
        self._processes = Processes(self.n)
        self._end = weakref.finalize(self, self._processes.kill)
        try:
            self._client = self._processes.connect()
        except RuntimeError:
            self.close()
            if attempts == 1:
                raise
            self._connect(attempts - 1)
        self._view = self._client.direct_view(list(range(self.n)))

    def close(self) -> None:
        """End the engines; what cells defined on them is gone."""
        if self._processes:
            self._end()
            self._processes = None

    def restart(self) -> None:
        """New engines in place of the old ones."""
        self.close()
        self.start()

    def run(self, fn, *args, **kwargs) -> list:
        """Call `fn(*args, **kwargs)` on every rank, and `fn(rank, *args, **kwargs)` if its first parameter is named `rank`.

        Functions and classes travel as code with the globals that they mention, tensors as CPU tensors without a graph.
        Process groups made inside the call are gone after it.

        Returns:
            The results in rank order.

        Raises:
            RankError: A rank raised, or its process died. The others have been stopped; the pool can be used again.
            TypeError: `fn` or an argument cannot be sent.
        """
        payload = _wire.pack_call(fn, args, kwargs)
        self._ready()
        reply = self._view.apply_async(_engine.call, payload, sys.path, _takes_rank(fn))
        try:
            self._wait(reply)
        finally:
            answers = [answer_of(child) for child in reply._children]
            print_outputs(dict(enumerate(answers)))
            if reply.ready():
                self._client.purge_local_results(reply)
        raise_first(reply)
        return [_wire.loads(answer["result"]) for answer in answers]

    def _ready(self):
        """Before a call: live engines and a fresh process group, or a clear error."""
        if not self._processes:
            raise RuntimeError(
                f"this pool of {self.n} ranks is closed: call restart() on it, or make a new one"
            )
        if not self._stuck:
            self._check_alive()
            if not self._joined:
                try:
                    self._join()
                except RankError:
                    self._check_alive()
                    self._stuck = True
        if self._stuck:
            warnings.warn(
                "the ranks did not stop and are started again: what %%px cells defined is gone",
                stacklevel=3,
            )
            self.restart()

    def _check_alive(self):
        if death := self._processes.death():
            raise RankError(f"{death}: call ranks.restart()")

    def _join(self):
        """Put all ranks into a new process group. The old one is of no use once a collective in it failed."""
        self._stuck = True  # until it worked
        self._group += 1
        port = self._client[0].apply_async(_engine.open_store, self._group)
        self._wait(port)
        raise_first(port)
        joined = self._view.apply_async(
            _engine.join, self._group, self.n, port.get(), self.timeout_s
        )
        self._wait(joined)
        raise_first(joined)
        self._joined, self._stuck = True, False

    def _wait(self, reply):
        """Wait until every rank has answered; after a failure or an interrupt stop those that go on."""
        stop_at = None
        try:
            while not reply.ready():
                self._check_alive()
                reply.wait(0.02)
                if stop_at is None and any_failed(reply):
                    stop_at = time.monotonic() + GRACE_S
                if stop_at is not None and time.monotonic() > stop_at:
                    self._stop(reply)
                    return
        except KeyboardInterrupt:
            self._stop(reply)
            raise
        self._joined = self._joined and not any_failed(reply)

    def _stop(self, reply):
        """End what the ranks do: by breaking their connections and an interrupt, else by ending the processes."""
        self._joined, self._stuck = False, True
        self._processes.break_off(self._group)
        reply.wait(PATIENCE_S)
        if reply.ready():
            self._stuck = False
        else:
            self._processes.kill()

    def __len__(self):
        return self.n

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __repr__(self):
        return f"Ranks({self.n}, {'running' if self._processes and not self._processes.death() else 'not running'})"

    def __reduce__(self):
        raise TypeError("a pool of ranks cannot be used on its own ranks")


def _takes_rank(fn):
    with contextlib.suppress(TypeError, ValueError):
        return next(iter(inspect.signature(fn).parameters), None) == "rank"
    return False
