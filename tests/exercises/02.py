"""Answers to the exercises of lesson 02, one device: baseline, data, profile."""

import contextlib
import math
import queue
import sys
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from answers import Answers

from labcode.teach.exercises import l02
from labcode.teach.labs import l02_by_hand
from labcode.train.ranges import StepRanges

# ---- 2.1 a profiler from timers


class WithAStack:
    def __init__(self, clock=time.perf_counter):
        self.clock = clock
        self.seconds = {"rest": 0.0}
        self.stack = ["rest"]
        self.last = clock()

    def tick(self):
        now = self.clock()
        self.seconds[self.stack[-1]] += now - self.last
        self.last = now

    @contextlib.contextmanager
    def part(self, name):
        self.tick()
        self.seconds.setdefault(name, 0.0)
        self.stack.append(name)
        try:
            yield
        finally:
            self.tick()
            self.stack.pop()

    def shares(self):
        self.tick()
        total = sum(self.seconds.values())
        return {name: seconds / total for name, seconds in self.seconds.items()}


class WithInnerTime:
    """Each part takes its own time off the one around it."""

    def __init__(self, clock=time.perf_counter):
        self.clock = clock
        self.begun = clock()
        self.own = defaultdict(float)
        self.inner = []

    @contextlib.contextmanager
    def part(self, name):
        start = self.clock()
        self.inner.append(0.0)
        try:
            yield
        finally:
            spent = self.clock() - start
            self.own[name] += spent - self.inner.pop()
            if self.inner:
                self.inner[-1] += spent

    def shares(self):
        total = self.clock() - self.begun
        shares = {name: seconds / total for name, seconds in self.own.items()}
        shares["rest"] = 1 - sum(shares.values())
        return shares


class WithEvents:
    """Notes what happened when, and thinks about it afterwards."""

    def __init__(self, clock=time.perf_counter):
        self.clock = clock
        self.events = [(clock(), "begin", "rest")]

    @contextlib.contextmanager
    def part(self, name):
        self.events.append((self.clock(), "begin", name))
        try:
            yield
        finally:
            self.events.append((self.clock(), "end", name))

    def shares(self):
        events = [*self.events, (self.clock(), "end", "rest")]
        seconds = {}
        running = []
        before = events[0][0]
        for when, what, name in events:
            if running:
                seconds[running[-1]] = seconds.get(running[-1], 0) + when - before
            before = when
            running.append(name) if what == "begin" else running.pop()
        total = events[-1][0] - events[0][0]
        return {name: spent / total for name, spent in seconds.items()}


class CountsTwice(WithAStack):
    def __init__(self, clock=time.perf_counter):
        self.clock = clock
        self.seconds = defaultdict(float)
        self.begun = clock()

    @contextlib.contextmanager
    def part(self, name):
        start = self.clock()
        try:
            yield
        finally:
            self.seconds[name] += self.clock() - start

    def shares(self):
        total = self.clock() - self.begun
        shares = {name: seconds / total for name, seconds in self.seconds.items()}
        shares["rest"] = 1 - sum(shares.values())
        return shares


class NoFinally(WithAStack):
    @contextlib.contextmanager
    def part(self, name):
        self.tick()
        self.seconds.setdefault(name, 0.0)
        self.stack.append(name)
        yield
        self.tick()
        self.stack.pop()


class Swallows(WithAStack):
    @contextlib.contextmanager
    def part(self, name):
        self.tick()
        self.seconds.setdefault(name, 0.0)
        self.stack.append(name)
        with contextlib.suppress(Exception):
            yield
        self.tick()
        self.stack.pop()


class Overwrites(WithAStack):
    def tick(self):
        now = self.clock()
        self.seconds[self.stack[-1]] = now - self.last
        self.last = now


class NoRest(WithAStack):
    def shares(self):
        self.tick()
        parts = {name: spent for name, spent in self.seconds.items() if name != "rest"}
        total = sum(parts.values())
        return {name: seconds / total for name, seconds in parts.items()}


class Seconds(WithAStack):
    def shares(self):
        self.tick()
        return self.seconds


class OwnClock(WithAStack):
    def __init__(self, clock=time.perf_counter):
        super().__init__(time.perf_counter)


class NoReturn(WithAStack):
    def shares(self):
        super().shares()


class Percent(WithAStack):
    def shares(self):
        return {name: 100 * share for name, share in super().shares().items()}


class RestOfParts(WithInnerTime):
    """Leaves the rest out when there was no part."""

    def shares(self):
        shares = super().shares()
        return shares if self.own else {}


class NoYield(WithAStack):
    @contextlib.contextmanager
    def part(self, name):
        self.tick()
        self.stack.append(name)
        try:
            pass
        finally:
            self.tick()
            self.stack.pop()


class NoDecorator(WithAStack):
    def part(self, name):
        self.tick()
        self.stack.append(name)
        try:
            yield
        finally:
            self.tick()
            self.stack.pop()


class Ranges(StepRanges):
    def shares(self):
        return {}


TIMER = Answers(
    solves="StepTimer",
    takes_ranks=False,
    real=True,
    right={"stack": WithAStack, "inner time": WithInnerTime, "events": WithEvents},
    wrong={
        "counts nested parts twice": (CountsTwice, "parts in parts"),
        "no finally": (NoFinally, "an error in a part"),
        "swallows the error": (Swallows, "swallows the error"),
        "overwrites": (Overwrites, "of"),
        "no rest": (NoRest, "time that no part has"),
        "seconds": (Seconds, "its seconds"),
        "another clock": (OwnClock, "`self.clock` is never called"),
        "no return": (NoReturn, "it returned None"),
        "percent": (Percent, "yours says"),
        "no rest without a part": (RestOfParts, "no part at all: there is no 'rest'"),
        "no yield": (NoYield, "`part` has no `yield`"),
        "no decorator": (NoDecorator, "contextlib.contextmanager"),
        "labcode's own": (l02_by_hand.StepTimer, "l02_by_hand.StepTimer is labcode's own answer"),
        "labcode's ranges": (Ranges, "ranges.StepRanges is labcode's own answer"),
    },
)

# ---- 2.2 bytes of a box


def with_floor(box, chunks, itemsize=4):
    number = 1
    for (start, stop), length in zip(box, chunks):
        number *= (stop - 1) // length - start // length + 1
    return number * math.prod(chunks) * itemsize


def with_ceil(box, chunks, itemsize=4):
    counts = [math.ceil(stop / n) - start // n for (start, stop), n in zip(box, chunks)]
    return math.prod(counts) * math.prod(chunks) * itemsize


def with_sets(box, chunks, itemsize=4):
    total = itemsize
    for (start, stop), length in zip(box, chunks):
        touched = {position // length for position in range(start, stop)}
        total *= len(touched) * length
    return total


def one_too_many(box, chunks, itemsize=4):
    number = 1
    for (start, stop), length in zip(box, chunks):
        number *= stop // length - start // length + 1
    return number * math.prod(chunks) * itemsize


def rounds_up(box, chunks, itemsize=4):
    counts = [math.ceil((stop - start) / n) for (start, stop), n in zip(box, chunks)]
    return math.prod(counts) * math.prod(chunks) * itemsize


def only_the_box(box, chunks, itemsize=4):
    return math.prod(stop - start for start, stop in box) * itemsize


def with_numpy(box, chunks, itemsize=4):
    start, stop = np.array(box).T
    lengths = np.array(chunks)
    return np.prod((-(-stop // lengths) - start // lengths) * lengths) * itemsize


def with_torch(box, chunks, itemsize=4):
    box, lengths = torch.tensor(box), torch.tensor(chunks)
    first = box[:, 0] // lengths
    last = (box[:, 1] - 1) // lengths
    return torch.prod(last - first + 1) * torch.prod(lengths) * itemsize


def with_fractions(box, chunks, itemsize=4):
    number = 1.0
    for axis, length in enumerate(chunks):
        start, stop = box[axis]
        number *= math.ceil(stop / length) - math.floor(start / length)
    return number * math.prod(chunks) * itemsize


def from_zero(box, chunks, itemsize=4):
    counts = [math.ceil(stop / n) for (_, stop), n in zip(box, chunks)]
    return math.prod(counts) * math.prod(chunks) * itemsize


def clipped_at_the_map(box, chunks, itemsize=4):
    total = itemsize
    for (start, stop), length, end in zip(box, chunks, (40, 180, 360)):
        total *= min(((stop - 1) // length + 1) * length, end) - start // length * length
    return total


def empties_the_box(box, chunks, itemsize=4):
    total = itemsize
    lengths = list(chunks)
    while box:
        start, stop = box.pop()
        length = lengths.pop()
        total *= ((stop - 1) // length - start // length + 1) * length
    return total


def changes_the_box(box, chunks, itemsize=4):
    for axis, (start, stop) in enumerate(box):
        box[axis] = (start, stop - 1)
    counts = [last // n - start // n + 1 for (start, last), n in zip(box, chunks)]
    return math.prod(counts) * math.prod(chunks) * itemsize


BYTES = Answers(
    solves="bytes_read",
    takes_ranks=False,
    real=True,
    right={
        "floor": with_floor,
        "ceil": with_ceil,
        "sets": with_sets,
        "numpy": with_numpy,
        "torch": with_torch,
        "fractions": with_fractions,
    },
    wrong={
        "stop is in the box": (one_too_many, "`stop` itself is not in the box"),
        "forgets where it begins": (rounds_up, "in which chunk is the first position"),
        "from the first chunk": (from_zero, "chunks that lie before the box"),
        "clipped": (clipped_at_the_map, "not a whole number of chunks"),
        "empties the box": (empties_the_box, "afterwards `box` is []"),
        "changes the box": (changes_the_box, "afterwards `box` is"),
        "always the same": (lambda b, c, i=4: 16 * 180 * 360 * i, "first position"),
        "kB": (lambda b, c, i=4: with_floor(b, c, i) / 1000, "not a whole number of chunks"),
        "the box alone": (only_the_box, "a chunk is read as a whole"),
        "numbers": (lambda b, c, i=4: with_floor(b, c, 1), "how long is each"),
        "chunks": (
            lambda b, c, i=4: with_floor(b, c, i) // math.prod(c) // i,
            "how many bytes has each",
        ),
        "no return": (lambda b, c, i=4: None, "it returned None"),
        "always 4 bytes": (lambda b, c, i=4: with_floor(b, c, 4), "where does `itemsize`"),
        "one chunk": (lambda b, c, i=4: math.prod(c) * i, "in which chunk is the first"),
        "labcode's own": (l02_by_hand.bytes_read, "labcode's own answer"),
    },
)

# ---- 2.3 a loader that reads ahead


class Base:
    def __init__(self, source, ahead):
        self.source = source
        self.ahead = ahead


class WithDrain(Base):
    """The loop empties the queue until the thread has ended."""

    def __iter__(self):
        ready = queue.Queue(self.ahead)
        stopped = threading.Event()

        def read():
            try:
                for batch in self.source:
                    if stopped.is_set():
                        return
                    ready.put((batch, None, False))
                ready.put((None, None, True))
            except Exception as error:
                ready.put((None, error, True))

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        try:
            while True:
                batch, error, over = ready.get()
                if error:
                    raise error
                if over:
                    break
                yield batch
        finally:
            stopped.set()
            while thread.is_alive():
                with contextlib.suppress(queue.Empty):
                    ready.get(timeout=0.01)


END = object()


class WithTimeout(Base):
    """A mark of its own for the end, and the error kept beside the queue."""

    def __iter__(self):
        ready = queue.Queue(maxsize=self.ahead)
        stopped = threading.Event()
        errors = []

        def put(item):
            while not stopped.is_set():
                try:
                    ready.put(item, timeout=0.02)
                except queue.Full:
                    continue
                return

        def read():
            try:
                for batch in self.source:
                    put(batch)
                    if stopped.is_set():
                        break
            except Exception as error:
                errors.append(error)
            put(END)

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        try:
            while (batch := ready.get()) is not END:
                yield batch
            if errors:
                raise errors[0]
        finally:
            stopped.set()
            thread.join()


class WithSemaphore(Base):
    """Room is counted, and the queue itself has no bound."""

    def __iter__(self):
        room = threading.Semaphore(self.ahead)
        ready = queue.SimpleQueue()
        stopped = threading.Event()
        thread = threading.Thread(target=self.read, args=(room, ready, stopped), daemon=True)
        thread.start()
        try:
            while True:
                kind, content = ready.get()
                if kind == "end":
                    return
                if kind == "error":
                    raise content
                room.release()
                yield content
        finally:
            stopped.set()
            room.release()
            thread.join()

    def read(self, room, ready, stopped):
        try:
            for batch in self.source:
                room.acquire()
                if stopped.is_set():
                    return
                ready.put(("batch", batch))
            ready.put(("end", None))
        except Exception as error:
            ready.put(("error", error))


class NotAhead(Base):
    def __iter__(self):
        yield from self.source


class NoneIsTheEnd(Base):
    def __iter__(self):
        ready = queue.Queue(self.ahead)

        def read():
            for batch in self.source:
                ready.put(batch)
            ready.put(None)

        threading.Thread(target=read, daemon=True).start()
        while (batch := ready.get()) is not None:
            yield batch


class LosesErrors(Base):
    def __iter__(self):
        ready = queue.Queue(self.ahead)

        def read():
            with contextlib.suppress(Exception):
                for batch in self.source:
                    ready.put(batch)
            ready.put(END)

        threading.Thread(target=read, daemon=True).start()
        while (batch := ready.get()) is not END:
            yield batch


class DiesOfErrors(Base):
    def __iter__(self):
        ready = queue.Queue(self.ahead)

        def read():
            for batch in self.source:
                ready.put(batch)
            ready.put(END)

        threading.Thread(target=read, daemon=True).start()
        while (batch := ready.get()) is not END:
            yield batch


class ErrorFirst(WithSemaphore):
    """Looks at the error before the batches that came before it."""

    def __iter__(self):
        ready = queue.Queue()
        errors = []

        def read():
            try:
                for batch in self.source:
                    ready.put(batch)
            except Exception as error:
                errors.append(error)
            ready.put(END)

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        thread.join(0.2)
        while not errors and (batch := ready.get()) is not END:
            yield batch
        if errors:
            raise errors[0]


class NoBound(WithTimeout):
    def __init__(self, source, ahead):
        super().__init__(source, 0)


class LeavesThread(Base):
    def __iter__(self):
        ready = queue.Queue(self.ahead)

        def read():
            try:
                for batch in self.source:
                    ready.put(("batch", batch))
                ready.put(("end", None))
            except Exception as error:
                ready.put(("error", error))

        threading.Thread(target=read, daemon=True).start()
        while True:
            kind, content = ready.get()
            if kind == "end":
                return
            if kind == "error":
                raise content
            yield content


class ReadsAll(Base):
    """Everything first, in the loop's own thread."""

    def __iter__(self):
        yield from list(self.source)


class Newest(Base):
    """A stack in the place of a queue."""

    def __iter__(self):
        ready = queue.LifoQueue()
        thread = threading.Thread(target=lambda: [ready.put(batch) for batch in self.source])
        thread.start()
        thread.join()
        while not ready.empty():
            yield ready.get()


class GivesPairs(Base):
    def __iter__(self):
        for batch in WithTimeout(self.source, self.ahead):
            yield ("batch", batch)


class JoinsFirst(LeavesThread):
    """Waits for a thread that waits for room."""

    def __iter__(self):
        ready = queue.Queue(self.ahead)
        thread = threading.Thread(
            target=lambda: [ready.put(batch) for batch in self.source], daemon=True
        )
        thread.start()
        thread.join()
        while not ready.empty():
            yield ready.get()


class WithCondition(Base):
    """Without a queue: the thread waits for room before it takes a batch over."""

    def __iter__(self):
        waiting = []
        changed = threading.Condition()
        state = {"over": False, "error": None, "left": False}

        def read():
            try:
                for batch in self.source:
                    with changed:
                        changed.wait_for(lambda: len(waiting) < self.ahead or state["left"])
                        if state["left"]:
                            return
                        waiting.append(batch)
                        changed.notify_all()
            except Exception as error:
                state["error"] = error
            with changed:
                state["over"] = True
                changed.notify_all()

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        try:
            while True:
                with changed:
                    changed.wait_for(lambda: waiting or state["over"])
                    if not waiting:
                        break
                    batch = waiting.pop(0)
                    changed.notify_all()
                yield batch
            if state["error"] is not None:
                raise state["error"]
        finally:
            with changed:
                state["left"] = True
                changed.notify_all()
            thread.join()


class WithPool(Base):
    """`ahead` reads that were asked for, each of a thread pool."""

    def __iter__(self):
        source = iter(self.source)
        with ThreadPoolExecutor(1) as pool:
            reads = [pool.submit(next, source) for _ in range(self.ahead)]
            while True:
                try:
                    batch = reads.pop(0).result()
                except StopIteration:
                    return
                reads.append(pool.submit(next, source))
                yield batch


class Whole(Base):
    """A right loader in parts, of which wrong ones change one."""

    def __iter__(self):
        ready = self.queue()
        stopped = threading.Event()
        thread = threading.Thread(target=self.read, args=(ready, stopped), daemon=True)
        thread.start()
        try:
            while True:
                kind, content = self.get(ready)
                if kind == "end":
                    return
                if kind == "error":
                    self.fail(content)
                yield content
        finally:
            stopped.set()
            self.wait(thread)

    def queue(self):
        return queue.Queue(self.ahead)

    def get(self, ready):
        return ready.get()

    def fail(self, error):
        raise error

    def wait(self, thread):
        thread.join()

    def read(self, ready, stopped):
        try:
            for batch in self.source:
                self.put(ready, ("batch", batch), stopped)
                if stopped.is_set():
                    return
        except Exception as error:
            self.put_error(ready, ("error", error), stopped)
        else:
            self.put_end(ready, ("end", None), stopped)

    def put(self, ready, item, stopped):
        while not stopped.is_set():
            with contextlib.suppress(queue.Full):
                ready.put(item, timeout=0.05)
                return

    def put_error(self, ready, item, stopped):
        self.put(ready, item, stopped)

    def put_end(self, ready, item, stopped):
        self.put(ready, item, stopped)


class PutsForEver(Whole):
    """The plainest try: `put` without a timeout, and a join."""

    def put(self, ready, item, stopped):
        if not stopped.is_set():
            ready.put(item)


class PutsForEverInALoop(Whole):
    def put(self, ready, item, stopped):
        while not stopped.is_set():
            try:
                ready.put(item)
                return
            except queue.Full:
                continue


class PutsForEverUnjoined(PutsForEver):
    def wait(self, thread):
        pass


class PutsTheEndForEver(Whole):
    def put_end(self, ready, item, stopped):
        ready.put(item)


class PutsTheErrorForEver(Whole):
    def put_error(self, ready, item, stopped):
        ready.put(item)


class DropsTheError(Whole):
    """No room for the error: nobody hears of it."""

    def put_error(self, ready, item, stopped):
        with contextlib.suppress(queue.Full):
            ready.put_nowait(item)


class PutsOnce(Whole):
    def put(self, ready, item, stopped):
        ready.put(item, timeout=0.5)


class GetsInTime(Whole):
    def get(self, ready):
        return ready.get(timeout=0.05)


class OneQueue(Whole):
    """One queue and one event for all loops."""

    def __init__(self, source, ahead):
        super().__init__(source, ahead)
        self.ready = queue.Queue(ahead)
        self.stopped = threading.Event()

    def queue(self):
        return self.ready

    def read(self, ready, stopped):
        super().read(ready, self.stopped)

    def wait(self, thread):
        self.stopped.set()
        thread.join()


class OneKindOfError(Whole):
    def read(self, ready, stopped):
        try:
            for batch in self.source:
                self.put(ready, ("batch", batch), stopped)
                if stopped.is_set():
                    return
        except ValueError as error:
            self.put(ready, ("error", error), stopped)
        else:
            self.put(ready, ("end", None), stopped)


class ErrorsByType(Whole):
    """What is an Exception is raised, also if it was a batch."""

    def get(self, ready):
        kind, content = super().get(ready)
        return ("error" if isinstance(content, Exception) else kind), content


class DoesNotWait(Whole):
    def wait(self, thread):
        pass


class HardlyWaits(Whole):
    def wait(self, thread):
        thread.join(timeout=0.001)


class AnotherError(Whole):
    def fail(self, error):
        raise RuntimeError(str(error))


class DropsTheLast(Whole):
    def read(self, ready, stopped):
        held = []
        for batch in self.source:
            if held:
                self.put(ready, ("batch", held.pop()), stopped)
            held.append(batch)
        self.put(ready, ("end", None), stopped)


class ReturnsABatch(Base):
    def __iter__(self):
        for batch in self.source:
            return batch
        return None


PREFETCHER = Answers(
    solves="Prefetcher",
    takes_ranks=False,
    real=True,
    right={
        "drain": WithDrain,
        "timeout": WithTimeout,
        "semaphore": WithSemaphore,
        "condition": WithCondition,
        "pool": WithPool,
        "in parts": Whole,
    },
    wrong={
        "does not read ahead": (NotAhead, "read by the loop's own thread"),
        "None is the end": (NoneIsTheEnd, "what tells it from the end"),
        "loses errors": (LosesErrors, "as if all had been read"),
        "the thread dies of the error": (DiesOfErrors, "still waiting after"),
        "leaves a thread": (LeavesThread, "still alive"),
        "no bound": (NoBound, "What limits the queue"),
        "error before the batches": (ErrorFirst, "before the error"),
        "reads all first": (ReadsAll, "before the error"),
        "the newest first": (Newest, "arrived as"),
        "gives pairs": (GivesPairs, "the batch is 100"),
        "joins first": (JoinsFirst, "still waiting after"),
        "puts for ever": (PutsForEver, "nobody takes anything out of it any more"),
        "puts for ever in a loop": (PutsForEverInALoop, "nobody takes anything out of it any more"),
        "puts for ever, no join": (PutsForEverUnjoined, "wait for room in the queue for ever"),
        "puts the end for ever": (PutsTheEndForEver, "waits for room for the end"),
        "puts the error for ever": (PutsTheErrorForEver, "waits for room for an error"),
        "drops the error": (DropsTheError, "with an error waiting for room"),
        "puts once": (PutsOnce, "takes 1 s for batch 0, with a batch waiting for room"),
        "gets in time": (GetsInTime, "the loop got queue.Empty"),
        "one queue for all loops": (OneQueue, "left behind by the first loop"),
        "one kind of error": (OneKindOfError, "raises KeyError"),
        "errors by type": (ErrorsByType, "what tells it from an error"),
        "does not wait": (DoesNotWait, "who waits for its end"),
        "hardly waits": (HardlyWaits, "who waits for its end"),
        "another error": (AnotherError, "this very error"),
        "drops the last": (DropsTheLast, "106 is missing"),
        "returns a batch": (ReturnsABatch, "it has no `yield`"),
        "labcode's own": (l02_by_hand.Prefetcher, "l02_by_hand.Prefetcher is labcode's own"),
    },
)

# ---- 2.4 the same training, faster


def straight(job, num_steps):
    mean, std = job.statistics()
    log = []
    for step in range(num_steps):
        place = job.place(step)
        state = (job.read_crop(step, place) - mean) / std
        target = (job.read_crop(step + 1, place) - mean) / std
        loss = job.train_on(state, target)
        assert job.weights_are_finite()
        if step % 5 == 4:
            log.append((step, loss, job.validate(mean, std)))
    return log


def with_prefetching(job, num_steps):
    mean, std = job.statistics()

    def pairs():
        for step in range(num_steps):
            place = job.place(step)
            crops = [job.read_crop(time, place) for time in (step, step + 1)]
            yield [(crop - mean) / std for crop in crops]

    log = []
    for step, (state, target) in enumerate(pairs()):
        loss = job.train_on(state, target)
        if not job.weights_are_finite():
            raise FloatingPointError(step)
        if (step + 1) % 5 == 0:
            log.append((step, loss, job.validate(mean, std)))
    return log


def as_lists(job, num_steps):
    statistics = job.statistics()

    def normalised(time, place):
        return (job.read_crop(time, place) - statistics[0]) / statistics[1]

    log = []
    for step in range(num_steps):
        place = job.place(step)
        loss = job.train_on(normalised(step, place), normalised(step + 1, place))
        assert job.weights_are_finite()
        if step in range(4, num_steps, 5):
            log.append([step, loss, job.validate(*statistics)])
    return log


def unguarded(job, num_steps):
    mean, std = job.statistics()
    log = []
    for step in range(num_steps):
        place = job.place(step)
        state = (job.read_crop(step, place) - mean) / std
        target = (job.read_crop(step + 1, place) - mean) / std
        loss = job.train_on(state, target)
        if step % 5 == 4:
            log.append((step, loss, job.validate(mean, std)))
    return log


def one_place(job, num_steps):
    mean, std = job.statistics()
    place = job.place(0)
    log = []
    for step in range(num_steps):
        state = (job.read_crop(step, place) - mean) / std
        target = (job.read_crop(step + 1, place) - mean) / std
        loss = job.train_on(state, target)
        assert job.weights_are_finite()
        if step % 5 == 4:
            log.append((step, loss, job.validate(mean, std)))
    return log


def maps_still(job, num_steps):
    mean, std = job.statistics()
    log = []
    for step in range(num_steps):
        top, left = job.place(step)
        state = ((job.read_map(step) - mean) / std)[:, top : top + 60, left : left + 60]
        target = ((job.read_map(step + 1) - mean) / std)[:, top : top + 60, left : left + 60]
        loss = job.train_on(state, target)
        assert job.weights_are_finite()
        if step % 5 == 4:
            log.append((step, loss, job.validate(mean, std)))
    return log


def validates_always(job, num_steps):
    mean, std = job.statistics()
    log = []
    for step in range(num_steps):
        place = job.place(step)
        state = (job.read_crop(step, place) - mean) / std
        target = (job.read_crop(step + 1, place) - mean) / std
        loss = job.train_on(state, target)
        assert job.weights_are_finite()
        validation = job.validate(mean, std)
        if step % 5 == 4:
            log.append((step, loss, validation))
    return log


def validates_before(job, num_steps):
    mean, std = job.statistics()
    log = []
    for step in range(num_steps):
        place = job.place(step)
        state = (job.read_crop(step, place) - mean) / std
        target = (job.read_crop(step + 1, place) - mean) / std
        validation = job.validate(mean, std) if step % 5 == 4 else None
        loss = job.train_on(state, target)
        assert job.weights_are_finite()
        if step % 5 == 4:
            log.append((step, loss, validation))
    return log


def validates_at_the_end(job, num_steps):
    return straight(job, num_steps)[-1:]


def own_statistics(job, num_steps):
    log = []
    for step in range(num_steps):
        place = job.place(step)
        state = job.read_crop(step, place)
        mean = state.mean(dim=(1, 2), keepdim=True)
        std = state.std(dim=(1, 2), keepdim=True)
        target = (job.read_crop(step + 1, place) - mean) / std
        loss = job.train_on((state - mean) / std, target)
        assert job.weights_are_finite()
        if step % 5 == 4:
            log.append((step, loss, job.validate(mean, std)))
    return log


def statistics_still(job, num_steps):
    log = []
    for step in range(num_steps):
        mean, std = job.statistics()
        place = job.place(step)
        state = (job.read_crop(step, place) - mean) / std
        target = (job.read_crop(step + 1, place) - mean) / std
        loss = job.train_on(state, target)
        assert job.weights_are_finite()
        if step % 5 == 4:
            log.append((step, loss, job.validate(mean, std)))
    return log


def own_guard(job, num_steps):
    mean, std = job.statistics()
    log = []
    for step in range(num_steps):
        place = job.place(step)
        state = (job.read_crop(step, place) - mean) / std
        target = (job.read_crop(step + 1, place) - mean) / std
        loss = job.train_on(state, target)
        assert bool(job.weights().isfinite().all())
        if step % 5 == 4:
            log.append((step, loss, job.validate(mean, std)))
    return log


def with_products(job, num_steps):
    """Products in place of quotients: not the same bits."""
    mean, std = job.statistics()
    scale = 1 / std
    log = []
    for step in range(num_steps):
        place = job.place(step)
        state = (job.read_crop(step, place) - mean) * scale
        target = (job.read_crop(step + 1, place) - mean) * scale
        loss = job.train_on(state, target)
        assert job.weights_are_finite()
        if step % 5 == 4:
            log.append((step, loss, job.validate(mean, std)))
    return log


def guarded(guard, before=False, wrap=lambda row: row):
    """An answer that calls `guard(job, step)`, and leaves the loop when that returns True.

    Args:
        guard: What guards the run.
        before: Ahead of the step in place of after it.
        wrap: What is done to a row of the log.
    """

    def training(job, num_steps):
        mean, std = job.statistics()
        log = []
        for step in range(num_steps):
            if before and guard(job, step):
                break
            place = job.place(step)
            state = (job.read_crop(step, place) - mean) / std
            target = (job.read_crop(step + 1, place) - mean) / std
            loss = job.train_on(state, target)
            if not before and guard(job, step):
                break
            if step % 5 == 4:
                log.append(wrap((step, loss, job.validate(mean, std))))
        return log

    return training


def asks(job, step):
    job.weights_are_finite()


def prints(job, step):
    if not job.weights_are_finite():
        print("not finite", file=sys.stderr)


def swallows(job, step):
    with contextlib.suppress(AssertionError):
        assert job.weights_are_finite()


def is_not_none(job, step):
    assert job.weights_are_finite() is not None


def leaves(job, step):
    return not job.weights_are_finite()


def asserts(job, step):
    assert job.weights_are_finite()


def asserts_each_fifth(job, step):
    assert step % 5 != 4 or job.weights_are_finite()


def rounded(row):
    step, loss, validation = row
    return step, round(loss, 3), round(validation, 3)


def in_blocks(job, num_steps):
    return straight(job, num_steps // 5 * 5)


def not_normalised(job, num_steps):
    mean, std = job.statistics()
    for step in range(num_steps):
        place = job.place(step)
        target = (job.read_crop(step + 1, place) - mean) / std
        job.train_on(job.read_crop(step, place), target)
        assert job.weights_are_finite()


FASTER = Answers(
    solves="faster_training",
    takes_ranks=False,
    real=True,
    right={
        "straight": straight,
        "generator": with_prefetching,
        "lists": as_lists,
        "a guard of its own": own_guard,
        "products": with_products,
    },
    wrong={
        "removes the guard": (unguarded, "guards the run"),
        "always the same crop": (one_place, "which crop, and normalised by what"),
        "reads maps still": (maps_still, "how much of the map"),
        "validates in each step": (validates_always, "who looks at the others"),
        "validates before the step": (validates_before, "of the same moment"),
        "one row": (validates_at_the_end, "every fifth step"),
        "statistics of the crop": (own_statistics, "normalised by what"),
        "statistics in each step": (statistics_still, "does its result change"),
        "fewer steps": (lambda job, n: straight(job, n // 2), "it trained 6 steps"),
        "ten steps": (lambda job, n: straight(job, 10), "it trained 10 steps, and 12"),
        "blocks of five": (in_blocks, "it trained 10 steps, and 12"),
        "asks and goes on": (guarded(asks), "without an error"),
        "prints": (guarded(prints), "without an error"),
        "swallows": (guarded(swallows), "without an error"),
        "compares with None": (guarded(is_not_none), "without an error"),
        "leaves the loop": (guarded(leaves), "without an error"),
        "guards the step before": (guarded(asserts, before=True), "without an error"),
        "guards each fifth step": (guarded(asserts_each_fifth), "it trained on, to step 4"),
        "rounds": (guarded(asserts, wrap=rounded), "the log keeps what it says"),
        "not normalised": (not_normalised, "is each crop normalised"),
        "no return": (lambda job, n: None, "it returned None"),
        "the slow one": (l02.slow_training, "does its result change"),
    },
)

ANSWERS = {"2.1": TIMER, "2.2": BYTES, "2.3": PREFETCHER, "2.4": FASTER}
