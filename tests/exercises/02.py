"""Answers to the exercises of lesson 02, one device: baseline, data, profile."""

import contextlib
import math
import queue
import threading
import time
from collections import defaultdict

from answers import Answers

from labcode.teach.exercises import l02
from labcode.teach.labs import l02_by_hand

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


TIMER = Answers(
    check=lambda answer, ranks: l02.step_timer(answer),
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
        "labcode's own": (l02_by_hand.StepTimer, "labcode's own answer"),
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


BYTES = Answers(
    check=lambda answer, ranks: l02.bytes_read(answer),
    right={"floor": with_floor, "ceil": with_ceil, "sets": with_sets},
    wrong={
        "stop is in the box": (one_too_many, "`stop` itself is not in the box"),
        "forgets where it begins": (rounds_up, "in which chunk is the first position"),
        "the box alone": (only_the_box, "a chunk is read as a whole"),
        "numbers": (lambda b, c, i=4: with_floor(b, c, 1), "how long is each"),
        "chunks": (
            lambda b, c, i=4: with_floor(b, c, i) // math.prod(c) // i,
            "how many bytes has each",
        ),
        "no return": (lambda b, c, i=4: None, "it returned None"),
        "always 4 bytes": (lambda b, c, i=4: with_floor(b, c, 4), "2 bytes a number"),
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


PREFETCHER = Answers(
    check=lambda answer, ranks: l02.prefetcher(answer),
    right={"drain": WithDrain, "timeout": WithTimeout, "semaphore": WithSemaphore},
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
        "labcode's own": (l02_by_hand.Prefetcher, "labcode's own answer"),
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


FASTER = Answers(
    check=lambda answer, ranks: l02.faster(answer),
    right={"straight": straight, "generator": with_prefetching, "lists": as_lists},
    wrong={
        "removes the guard": (unguarded, "guards the run"),
        "always the same crop": (one_place, "which crop, and normalised by what"),
        "reads maps still": (maps_still, "how much of the map"),
        "validates in each step": (validates_always, "who looks at the others"),
        "validates before the step": (validates_before, "of the same moment"),
        "one row": (validates_at_the_end, "every fifth step"),
        "statistics of the crop": (own_statistics, "normalised by what"),
        "statistics in each step": (statistics_still, "does its result change"),
        "fewer steps": (lambda job, n: straight(job, n // 2), "it trained 5 steps"),
        "no return": (lambda job, n: None, "it returned None"),
        "the slow one": (l02.slow_training, "does its result change"),
    },
)

ANSWERS = {"2.1": TIMER, "2.2": BYTES, "2.3": PREFETCHER, "2.4": FASTER}
