"""What a learner's code gives to `dist.all_reduce`, when it does, and whether it waits for the sum.

    watch = Watch()
    with watch.active():
        with watch.running():          # backward, or a hook: who waits in it holds it up
            loss.backward()
        finish_gradient_sync()
    watch.taken()                      # the all-reduces, and which of them were waited for

What is wrong has to look wrong at each run. So the tensor of an asynchronous all-reduce keeps its
own numbers until somebody waits for it, and gets the sum then: code that does not wait, or touches
the tensor before, never has the right result by luck.
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

LATE_S = 0.1  # a Future's value comes so long after backward: who does not wait sees none of them
HELD_UP_S = 5.0  # how long a Future waits for the end of what runs, before it counts as held up


@dataclass
class Sent:
    """One all-reduce.

    Args:
        numel: How many numbers.
        is_async: It was started with `async_op=True`.
        in_backward: What runs was still running.
        ready: The parameters that had their gradient by then, in order.
        arrived: Somebody waited for it, and the tensor holds the sum.
        touched: The tensor was changed between the start and then.
        in_thread: It was called in a thread of the learner's own; nothing was sent then, because
            the ranks would not meet in the same order.
    """

    numel: int
    is_async: bool
    in_backward: bool
    ready: tuple[int, ...]
    arrived: bool = False
    touched: bool = False
    in_thread: bool = False


class Watch:
    """What a rank sends and waits for while it is active.

    Attributes:
        sent: The all-reduces.
        waits: For each wait, whether it was within `running()`.
        ready: Numbers of the parameters whose gradient is final, in order; the check keeps it.
    """

    def __init__(self) -> None:
        self.sent: list[Sent] = []
        self.waits: list[bool] = []
        self.ready: list[int] = []
        self._idle = threading.Event()
        self._idle.set()
        self._held_up = False
        self._handles: list[_Handle] = []

    @property
    def is_running(self) -> bool:
        """Backward, or a hook, is at work."""
        return not self._idle.is_set()

    def wait_until_idle(self) -> bool:
        """Whether what runs has come to its end; after one that did not, nobody is waited for."""
        if not self._held_up:
            self._held_up = not self._idle.wait(HELD_UP_S)
        return not self._held_up

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Around backward, or a hook."""
        self._idle.clear()
        try:
            yield
        finally:
            self._idle.set()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Within it `dist.all_reduce` takes notes; at its end nothing is under way any more."""
        real = dist.all_reduce
        own_thread = threading.get_ident()

        def noted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            is_async = bool(kwargs.get("async_op", len(args) > 2 and args[2]))
            sent = Sent(tensor.numel(), is_async, self.is_running, tuple(self.ready))
            self.sent.append(sent)
            if threading.get_ident() != own_thread:
                sent.in_thread = True
                return _Handle(None, tensor, tensor, sent, self)
            message = tensor.detach().clone() if is_async else tensor
            work = real(message, *args, **kwargs)
            handle = _Handle(work, tensor, message, sent, self)
            self._handles.append(handle)
            return handle

        with mock.patch.object(dist, "all_reduce", noted):
            yield
        self._settle()  # not after an error: the other ranks may never make these calls

    def taken(self) -> list[Sent]:
        """The all-reduces so far, as they are now; what comes later does not change them."""
        return [replace(one) for one in self.sent]

    def begin_step(self) -> None:
        """Forget the step before."""
        self.sent.clear()
        self.waits.clear()
        self.ready.clear()

    def _settle(self) -> None:
        for handle in self._handles:
            handle.settle()
        self._handles.clear()


class _Handle:
    """The handle of an all-reduce that notes when it is waited for.

    There is one also without `async_op=True`, so that a learner's code gets as far as the hint.
    """

    def __init__(
        self,
        work: dist.Work | None,
        tensor: torch.Tensor,
        message: torch.Tensor,
        sent: Sent,
        watch: Watch,
    ) -> None:
        self._work = work
        self._tensor = tensor
        self._message = message
        self._before = tensor.detach().clone() if work is not None else tensor
        self._sent = sent
        self._watch = watch
        self._lock = threading.Lock()
        self._future: torch.futures.Future | None = None
        self._thread: threading.Thread | None = None

    def wait(self, *args: Any) -> Any:
        """As `Work.wait`."""
        self._watch.waits.append(self._watch.is_running)
        if self._work is None:
            return True
        result = self._work.wait(*args)
        self._arrive()
        return result

    def is_completed(self) -> bool:
        """As `Work.is_completed`; who asks until it is true has waited."""
        if self._work is None:
            return True
        done = self._work.is_completed()
        if done:
            self._arrive()
        return done

    def get_future(self) -> torch.futures.Future:
        """As `Work.get_future`. Its value comes when backward has ended."""
        if self._future is not None:
            return self._future
        future = torch.futures.Future()
        self._future = future
        if self._work is None:
            future.set_result([self._tensor])
        else:
            self._thread = threading.Thread(target=self._keep, args=(future,), daemon=True)
            self._thread.start()
        return future

    def settle(self) -> None:
        """Return when nothing is under way any more."""
        if self._thread is not None:
            self._thread.join()
        if self._work is not None:
            self._work.wait()

    def _keep(self, future: torch.futures.Future) -> None:
        assert self._work is not None
        try:
            if not self._watch.wait_until_idle():
                self._watch.waits.append(True)  # somebody in backward waits for this Future
            time.sleep(LATE_S)
            self._work.wait()
            self._arrive()
        except RuntimeError as error:  # another rank has failed
            future.set_exception(error)
            return
        future.set_result([self._tensor])

    def _arrive(self) -> None:
        with self._lock:
            if self._sent.arrived:
                return
            self._sent.touched = not torch.equal(self._tensor, self._before)
            self._tensor.copy_(self._message)
            self._sent.arrived = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)
