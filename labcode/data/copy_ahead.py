"""Batches are copied to a GPU while it computes on those before."""

import queue
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

Batch = tuple[torch.Tensor, torch.Tensor]  # inputs, targets

AHEAD = 1  # batches that are on the device before they are asked for
LOOK_S = 0.1  # between two looks whether the thread is still wanted
LEAVE_S = 30.0  # after which a source is closed although it still reads


class CopyAhead:
    """A thread takes batches from a source and copies them on a stream of its own.

    A copy from page-locked memory runs beside the computation; from other memory CUDA first copies
    into a page-locked buffer, which the thread waits for, and the loop does not. The stream of the
    loop waits for the copy (an event), not the loop itself; and memory that was allocated on one
    stream and is used on another is recorded there, so that it is not given away too early.

    Args:
        source: Whose batches are copied (`loader.Source`).
        device: Where they go. On a CPU there is no stream, and nothing is copied: for tests.

    Source: docs.pytorch.org/docs/stable/notes/cuda.html, "CUDA streams" and "Use pinned memory
        buffers"; `data_prefetcher` of NVIDIA's apex, examples/imagenet/main_amp.py.

    Held by: tests/unit/test_loader.py, tests/gpu/test_loader_on_gpu.py
    """

    def __init__(self, source: Any, device: torch.device) -> None:
        self.source = source
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._ready: queue.Queue[Any] = queue.Queue(AHEAD)

    def begin(self, step: int) -> None:
        """Begin with the batch of a step; what was copied before is dropped.

        A read that is under way is waited for, however long it takes: no two threads use a source.
        """
        self._end_thread(within_s=None)
        self.source.begin(step)
        self._stop = threading.Event()
        self._ready = queue.Queue(AHEAD)
        arguments = (self._ready, self._stop)
        self._thread = threading.Thread(target=self._run, args=arguments, daemon=True)
        self._thread.start()

    def next(self) -> list[Batch]:
        """The next batch; work that is launched from now on waits for its copy."""
        found = self._ready.get()
        if isinstance(found, BaseException):
            raise found
        batches, copied = found
        if copied is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(copied)
            for batch in batches:
                for tensor in batch:
                    tensor.record_stream(current)
        return batches

    def close(self) -> None:
        """End the thread and the source."""
        self._end_thread(within_s=LEAVE_S)
        self.source.close()

    def _end_thread(self, within_s: float | None) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(within_s)
        self._thread = None

    def _run(self, ready: queue.Queue, stop: threading.Event) -> None:
        try:
            while not stop.is_set():
                _put(ready, stop, self._copied(self.source.next()))
        except BaseException as error:  # raised again where the batch is asked for
            _put(ready, stop, error)

    def _copied(self, batches: list[Batch]) -> tuple[list[Batch], Any]:
        on_device = []
        with self._on_stream():
            for inputs, targets in batches:
                on_device.append((self._copy(inputs), self._copy(targets)))
            copied = self.stream.record_event() if self.stream else None
        return on_device, copied

    def _on_stream(self) -> AbstractContextManager:
        return torch.cuda.stream(self.stream) if self.stream else nullcontext()

    def _copy(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.device, non_blocking=True)


def _put(ready: queue.Queue, stop: threading.Event, what: Any) -> None:
    """Wait for a place in the queue, unless nobody wants it any more."""
    while not stop.is_set():
        try:
            return ready.put(what, timeout=LOOK_S)
        except queue.Full:
            continue
    return None
