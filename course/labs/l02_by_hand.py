"""Solutions that cells of lesson 02 show and use; `make notebooks` writes this."""

from labcode.models import vit
import contextlib
import queue
import threading
import time
import torch


def step_times(train_step, batches):
    """The seconds of each step, with the wait for its batch."""
    seconds = []
    started = time.perf_counter()
    for states, targets in batches:
        train_step(states, targets)
        now = time.perf_counter()
        seconds.append(now - started)
        started = now
    return seconds


class StepTimer:
    """Attributes wall time to named parts of a step."""

    def __init__(self, clock=time.perf_counter):
        self.clock = clock
        self.seconds = {}
        self.running = ["rest"]
        self.last = clock()

    def charge(self):
        now = self.clock()
        name = self.running[-1]
        self.seconds[name] = self.seconds.get(name, 0) + now - self.last
        self.last = now

    @contextlib.contextmanager
    def part(self, name):
        """What runs in the block belongs to `name`."""
        self.charge()
        self.running.append(name)
        try:
            yield
        finally:
            self.charge()
            self.running.pop()

    def shares(self):
        """{name: its fraction of the time since the timer was made}, with "rest"."""
        self.charge()
        total = sum(self.seconds.values())
        return {name: seconds / total for name, seconds in self.seconds.items()}


def timed_steps(timer, batches, model, optimizer):
    """A step for each batch, in four parts of the timer."""
    batches = iter(batches)
    while True:
        with timer.part("data"):
            batch = next(batches, None)
        if batch is None:
            return
        states, targets = batch
        with timer.part("forward"):
            loss = vit.loss(model(states), targets)
        with timer.part("backward"):
            optimizer.zero_grad()
            loss.backward()
        with timer.part("optimizer"):
            optimizer.step()


class Prefetcher:
    """What `source` yields, read ahead by a thread."""

    def __init__(self, source, ahead):
        self.source = source
        self.ahead = ahead

    def __iter__(self):
        ready = queue.Queue(maxsize=self.ahead)
        stopped = threading.Event()
        reader = threading.Thread(target=self.read, args=(ready, stopped), daemon=True)
        reader.start()
        try:
            while True:
                kind, content = ready.get()
                if kind == "end":
                    return
                if kind == "error":
                    raise content
                yield content
        finally:
            stopped.set()
            reader.join()

    def read(self, ready, stopped):
        """In the thread: put what `source` yields into the queue."""
        try:
            for batch in self.source:
                self.put(ready, ("batch", batch), stopped)
                if stopped.is_set():
                    return
            self.put(ready, ("end", None), stopped)
        except Exception as error:
            self.put(ready, ("error", error), stopped)

    def put(self, ready, item, stopped):
        while not stopped.is_set():
            try:
                ready.put(item, timeout=0.05)
                return
            except queue.Full:
                continue


def covered(spans):
    """How long at least one of the spans (start, stop) runs."""
    total = 0
    until = 0
    for start, stop in sorted(spans):
        start = max(start, until)
        if stop > start:
            total += stop - start
            until = stop
    return total


def where_time_went(events, step):
    """{"busy", "data", "idle"}: how much of the step each of them takes."""
    everything = [(start, stop) for name, start, stop in events]
    on_device = [(start, stop) for name, start, stop in events if name != "data"]
    busy = covered(on_device)
    busy_or_data = covered(everything)
    return {"busy": busy, "data": busy_or_data - busy, "idle": step - busy_or_data}


def marked_step(batches, model, optimizer, push, pop):
    """One step of training, in four parts of the profile; returns the loss."""
    push("data")
    states, targets = next(batches)
    pop()
    push("forward")
    loss = vit.loss(model(states), targets)
    pop()
    push("backward")
    loss.backward()
    pop()
    push("optimizer")
    optimizer.step()
    optimizer.zero_grad()
    pop()
    return loss


class CopiedAhead:
    """The batches of `source` on a device; the next one is copied meanwhile."""

    def __init__(self, source, device):
        self.source = source
        self.device = torch.device(device)
        self.stream = None  # a CPU has no streams, and there is nothing to copy
        if self.device.type == "cuda":
            self.stream = torch.cuda.Stream(self.device)

    def __iter__(self):
        batches = iter(self.source)
        coming = self.start_copy(batches)
        while coming is not None:
            batch = coming
            if self.stream is not None:
                kernels = torch.cuda.current_stream(self.device)
                kernels.wait_stream(self.stream)  # for this copy: the next is not begun
                for tensor in batch:
                    tensor.record_stream(kernels)
            coming = self.start_copy(batches)
            yield batch

    def start_copy(self, batches):
        batch = next(batches, None)
        if batch is None:
            return None
        with torch.cuda.stream(self.stream):
            return [tensor.to(self.device, non_blocking=True) for tensor in batch]
