"""Answers to the exercises of lesson 02, one device: baseline, data, profile."""

import contextlib
import math
import queue
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from answers import Answers, changed

from course.exercises import l02
from course.labs import l02_by_hand
from labcode.measure.ranges import StepRanges
from labcode.models import vit

# ---- 2.1 a profiler from timers


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


class CountsTwice(WithInnerTime):
    @contextlib.contextmanager
    def part(self, name):
        start = self.clock()
        try:
            yield
        finally:
            self.own[name] += self.clock() - start


class RestOfParts(WithInnerTime):
    """Leaves the rest out when there was no part."""

    def shares(self):
        shares = super().shares()
        return shares if self.own else {}


class Ranges(StepRanges):
    def shares(self):
        return {}


ENDS = "        finally:\n            self.charge()\n            self.running.pop()\n"
SHARE = "seconds / total for"

TIMER = Answers(
    solves="StepTimer",
    takes_ranks=False,
    right={"inner time": WithInnerTime, "events": WithEvents},
    wrong={
        "counts nested parts twice": (CountsTwice, "parts in parts"),
        "no finally": (
            changed(
                "        try:\n            yield => \n        yield",
                f"{ENDS} => \n        self.charge()\n        self.running.pop()\n",
            ),
            "an error in a part",
        ),
        "swallows the error": (
            changed("finally: => except Exception:\n            pass\n        finally:"),
            "swallows the error",
        ),
        "overwrites": (changed("self.seconds.get(name, 0) + => "), "and yours says"),
        "no rest": (
            changed("total = => self.seconds.pop('rest')\n        total ="),
            "time that no part has",
        ),
        "seconds": (changed(f"{SHARE} => seconds for"), "its seconds"),
        "another clock": (
            changed("self.clock = clock => self.clock = clock = time.perf_counter"),
            "`self.clock` is never called",
        ),
        "percent": (changed(f"{SHARE} => 100 * {SHARE}"), "yours says"),
        "no rest without a part": (RestOfParts, "no part at all: there is no 'rest'"),
        "no yield": (changed("            yield => \n            pass"), "`part` has no `yield`"),
        "no decorator": (
            changed("    @contextlib.contextmanager => \n"),
            "contextlib.contextmanager",
        ),
        "labcode's own": (l02_by_hand.StepTimer, "l02_by_hand.StepTimer is labcode's own answer"),
        "labcode's ranges": (Ranges, "ranges.StepRanges is labcode's own answer"),
    },
)

# ---- 2.2 bytes of a box


def with_ceil(box, chunks, itemsize=4):
    counts = [math.ceil(stop / n) - start // n for (start, stop), n in zip(box, chunks)]
    return math.prod(counts) * math.prod(chunks) * itemsize


def with_sets(box, chunks, itemsize=4):
    total = itemsize
    for (start, stop), length in zip(box, chunks):
        touched = {position // length for position in range(start, stop)}
        total *= len(touched) * length
    return total


def with_numpy(box, chunks, itemsize=4):
    start, stop = np.array(box).T
    lengths = np.array(chunks)
    return np.prod((-(-stop // lengths) - start // lengths) * lengths) * itemsize


def with_torch(box, chunks, itemsize=4):
    box, lengths = torch.tensor(box), torch.tensor(chunks)
    first = box[:, 0] // lengths
    last = (box[:, 1] - 1) // lengths
    return torch.prod(last - first + 1) * torch.prod(lengths) * itemsize


def clipped_at_the_map(box, chunks, itemsize=4):
    total = itemsize
    for (start, stop), length, end in zip(box, chunks, (40, 180, 360)):
        total *= min(((stop - 1) // length + 1) * length, end) - start // length * length
    return total


LAST = "last = (stop - 1) // length"
RESULT = "num_chunks * math.prod(chunks) * itemsize"

BYTES = Answers(
    solves="bytes_read",
    takes_ranks=False,
    right={
        "ceil": with_ceil,
        "sets": with_sets,
        "numpy": with_numpy,
        "torch": with_torch,
        "fractions": changed("num_chunks = 1 => num_chunks = 1.0"),
    },
    wrong={
        "stop is in the box": (
            changed("(stop - 1) // length => stop // length"),
            "`stop` itself is not in the box",
        ),
        "forgets where it begins": (
            changed("last - first + 1 => math.ceil((stop - start) / length)"),
            "in which chunk is the first position",
        ),
        "from the first chunk": (
            changed("last - first + 1 => last + 1"),
            "chunks that lie before the box",
        ),
        "clipped": (clipped_at_the_map, "not a whole number of chunks"),
        "changes the box": (
            changed(f"{LAST} => box[0] = (0, 1)\n        {LAST}"),
            "afterwards `box` is",
        ),
        "always the same": (changed(f"{RESULT} => 16 * 180 * 360 * itemsize"), "first position"),
        "kB": (changed(f"{RESULT} => {RESULT} / 1000"), "not a whole number of chunks"),
        "the box alone": (
            changed(
                "last - first + 1 => stop - start",
                f"{RESULT} => num_chunks * itemsize",
            ),
            "a chunk is read as a whole",
        ),
        "numbers": (changed(f"{RESULT} => num_chunks * math.prod(chunks)"), "how long is each"),
        "chunks": (changed(f"return {RESULT} => return num_chunks"), "how many bytes has each"),
        "no return": (changed(f"return {RESULT} => pass"), "it returned None"),
        "always 4 bytes": (
            changed("math.prod(chunks) * itemsize => math.prod(chunks) * 4"),
            "where does `itemsize`",
        ),
        "one chunk": (
            changed("num_chunks *= last - first + 1 => pass"),
            "in which chunk is the first",
        ),
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


class ReturnsABatch(Base):
    def __iter__(self):
        for batch in self.source:
            return batch
        return None


TIMED = "ready.put(item, timeout=0.05)"
JOIN = "            reader.join()"
GET = "kind, content = ready.get()"
PUT_ERROR = 'self.put(ready, ("error", error), stopped)'
PUT_END = 'self.put(ready, ("end", None), stopped)'

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
    },
    wrong={
        "does not read ahead": (NotAhead, "read by the loop's own thread"),
        "None is the end": (NoneIsTheEnd, "what tells it from the end"),
        "loses errors": (LosesErrors, "as if all had been read"),
        "the thread dies of the error": (changed(f"{PUT_ERROR} => raise"), "still waiting after"),
        "no bound": (changed("maxsize=self.ahead => "), "What limits the queue"),
        "error before the batches": (ErrorFirst, "before the error"),
        "reads all first": (ReadsAll, "before the error"),
        "the newest first": (Newest, "arrived as"),
        "gives pairs": (changed("yield content => yield (kind, content)"), "the batch is 100"),
        "joins first": (
            changed(
                "        try:\n            while => \n        reader.join()\n"
                "        try:\n            while"
            ),
            "still waiting after",
        ),
        "puts for ever": (
            changed(f"{TIMED} => ready.put(item)"),
            "nobody takes anything out of it any more",
        ),
        "puts for ever, no join": (
            changed(f"{TIMED} => ready.put(item)", f"{JOIN} => "),
            "wait for room in the queue for ever",
        ),
        "puts the end for ever": (
            changed(f'{PUT_END} => ready.put(("end", None))'),
            "waits for room for the end",
        ),
        "puts the error for ever": (
            changed(f'{PUT_ERROR} => ready.put(("error", error))'),
            "waits for room for an error",
        ),
        "drops the error": (
            changed(
                f"{PUT_ERROR} => with contextlib.suppress(queue.Full):\n"
                '                ready.put_nowait(("error", error))'
            ),
            "with an error waiting for room",
        ),
        "gets in time": (
            changed(f"{GET} => kind, content = ready.get(timeout=0.05)"),
            "the loop got queue.Empty",
        ),
        "one queue for all loops": (
            changed(
                "stopped = threading.Event() => stopped = self.stopped",
                "ready = queue.Queue(maxsize=self.ahead) => ready = self.ready",
                "self.ahead = ahead => self.ready = queue.Queue(ahead)\n"
                "        self.stopped = threading.Event()",
            ),
            "left behind by the first loop",
        ),
        "one kind of error": (changed("except Exception => except ValueError"), "raises KeyError"),
        "errors by type": (
            changed('kind == "error": => isinstance(content, Exception):'),
            "what tells it from an error",
        ),
        "does not wait": (changed(f"{JOIN} => "), "who waits for its end"),
        "another error": (
            changed("raise content => raise RuntimeError(str(content))"),
            "this very error",
        ),
        "returns a batch": (ReturnsABatch, "it has no `yield`"),
        "labcode's own": (l02_by_hand.Prefetcher, "l02_by_hand.Prefetcher is labcode's own"),
    },
)

# ---- 2.4 where the time went


def in_milliseconds(events, step):
    """Every moment looked at, in quarters of a unit."""
    spent = {"busy": 0.0, "data": 0.0, "idle": 0.0}
    for quarter in range(4 * step):
        names = {name for name, start, stop in events if start <= quarter / 4 < stop}
        if names - {"data"}:
            spent["busy"] += 0.25
        elif names:
            spent["data"] += 0.25
        else:
            spent["idle"] += 0.25
    return spent


def with_counters(events, step):
    """Starts and stops in order, and how many of each kind are running."""
    marks = []
    for name, start, stop in events:
        kind = "data" if name == "data" else "busy"
        marks.append((start, 1, kind))
        marks.append((stop, -1, kind))
    marks.append((step, 0, "busy"))
    spent = {"busy": 0, "data": 0, "idle": 0}
    running = {"busy": 0, "data": 0}
    before = 0
    for now, change, kind in sorted(marks):
        reason = "busy" if running["busy"] else "data" if running["data"] else "idle"
        spent[reason] += now - before
        running[kind] += change
        before = now
    return spent


def with_merged_spans(events, step):
    def total(spans):
        merged = []
        for start, stop in sorted(spans):
            if merged and start <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], stop)
            else:
                merged.append([start, stop])
        return sum(stop - start for start, stop in merged)

    busy = total([event[1:] for event in events if event[0] != "data"])
    known = total([event[1:] for event in events])
    return {"idle": step - known, "data": known - busy, "busy": busy}


def adds_durations(events, step):
    busy = sum(stop - start for name, start, stop in events if name != "data")
    data = sum(stop - start for name, start, stop in events if name == "data")
    return {"busy": busy, "data": data, "idle": step - busy - data}


COVERED = "for start, stop in sorted(spans):"
LATER = "start = max(start, until)"
DATA = '"data": busy_or_data - busy'

WENT = Answers(
    solves="where_time_went",
    takes_ranks=False,
    right={
        "each moment": in_milliseconds,
        "counters": with_counters,
        "merged spans": with_merged_spans,
        "in floats": changed("total = 0 => total = 0.0"),
    },
    wrong={
        "adds durations": (adds_durations, "moments in which two of them run count once"),
        "not sorted": (changed("sorted(spans) => spans"), "is an operation left out"),
        "the last one ends it": (
            changed(
                "        if stop > start:\n => ",
                "            total += stop - start\n => \n        total += stop - start\n",
                "            until = stop => \n        until = stop",
            ),
            "is an operation left out",
        ),
        "data as an operation": (
            changed(' if name != "data"] => ]', f"{DATA} => {DATA} + 0"),
            "yours says",
        ),
        "data counted though busy": (
            changed(f'{DATA} => "data": covered([one[1:] for one in events if one[0] == "data"])'),
            "then the wait costs nothing",
        ),
        "idle with the data": (changed("step - busy_or_data => step - busy"), "the three add up"),
        "shares": (changed('{"busy": busy, => {"busy": busy / step,'), "yours says"),
        "a tuple": (
            changed(
                'return {"busy" => return list({"busy"', "busy_or_data} => busy_or_data}.items())"
            ),
            "return a dictionary",
        ),
        "other names": (changed('{"busy": => {"computing":'), "asked for are"),
        "sorts what it was given": (
            changed("everything = => events.reverse()\n    everything ="),
            "leave it as it was",
        ),
        "no return": (changed('return {"busy" => found = {"busy"'), "it returned None"),
        "labcode's own": (l02_by_hand.where_time_went, "labcode's own"),
    },
)

# ---- 2.5 name the parts


def with_a_context(batches, model, optimizer, push, pop):
    @contextlib.contextmanager
    def part(name):
        push(name)
        try:
            yield
        finally:
            pop()

    with part("data"):
        states, targets = next(batches)
    with part("forward"):
        loss = vit.loss(model(states), targets)
    with part("backward"):
        loss.backward()
    with part("optimizer"):
        optimizer.step()
        optimizer.zero_grad()
    return loss


def zeroed_before_backward(batches, model, optimizer, push, pop):
    push("data")
    batch = next(batches)
    pop()
    push("forward")
    prediction = model(batch[0])
    loss = (prediction - batch[1]).square().mean()
    pop()
    push("backward")
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    pop()
    push("optimizer")
    optimizer.step()
    pop()
    return loss.detach()


def never_ends_a_part(batches, model, optimizer, push, pop):
    push("data")
    states, targets = next(batches)
    push("forward")
    loss = vit.loss(model(states), targets)
    push("backward")
    loss.backward()
    push("optimizer")
    optimizer.step()
    optimizer.zero_grad()
    return loss


def one_around_the_step(batches, model, optimizer, push, pop):
    push("step")
    states, targets = next(batches)
    loss = vit.loss(model(states), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    pop()
    return loss


def without_parts(batches, model, optimizer, push, pop):
    states, targets = next(batches)
    loss = vit.loss(model(states), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


MARKED = Answers(
    solves="marked_step",
    takes_ranks=False,
    right={
        "a context": with_a_context,
        "zeroed before backward": zeroed_before_backward,
        "a number": changed("return loss => return loss.item()"),
        "ends after zero_grad": changed(
            "    optimizer.zero_grad()\n    pop()\n => ",
            "    optimizer.step()\n => \n    optimizer.step()\n"
            "    optimizer.zero_grad()\n    pop()\n",
        ),
    },
    wrong={
        "never ends a part": (never_ends_a_part, "one inside the other: what ends the first"),
        "one around the step": (one_around_the_step, "it belongs to 'data'"),
        "no parts": (without_parts, "no part is open"),
        "the last one stays open": (
            changed("zero_grad()\n    pop() => zero_grad()"),
            "is still open: what ends it",
        ),
        "one pop too many": (changed("return loss => pop()\n    return loss"), "one too many"),
        "backward in forward": (
            changed(
                'pop()\n    push("backward")\n    loss.backward() => '
                'loss.backward()\n    pop()\n    push("backward")',
            ),
            "while loss.backward() runs, the part 'forward' is open",
        ),
        "another name": (changed('push("optimizer") => push("step")'), "belongs to 'optimizer'"),
        "a part twice": (
            changed('push("data") => push("data")\n    pop()\n    push("data")'),
            "is wanted once",
        ),
        "two batches": (
            changed("next(batches)\n => next(batches)\n    states, targets = next(batches)\n"),
            "The step without parts does",
        ),
        "never zeroed": (
            changed("    optimizer.zero_grad()\n => "),
            "gradients of zero",
        ),
        "no return": (changed("    return loss => "), "it returned None"),
        "labcode's own": (l02_by_hand.marked_step, "labcode's own"),
    },
)

# ---- 2.6 the same training run, faster


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


GUARD = "assert job.weights_are_finite()"
LOSS = "        loss = "
FIFTH = "(step + 1) % 5 == 0"
ROW = "(step, loss, job.validate(mean, std))"
CROP = "state = (job.read_crop(step, place) - mean) / std"

FASTER = Answers(
    solves="faster_training",
    takes_ranks=False,
    real=True,
    right={
        "generator": with_prefetching,
        "a guard of its own": changed(f"{GUARD} => assert bool(job.weights().isfinite().all())"),
        "products": changed(
            f"{CROP} => scale = 1 / std\n        {CROP.replace('/ std', '* scale')}"
        ),
    },
    wrong={
        "removes the guard": (changed(f"{GUARD} => pass"), "guards the run"),
        "asks and goes on": (changed("assert job => job"), "without an error"),
        "leaves the loop": (
            changed(f"{GUARD} => if not job.weights_are_finite():\n            break"),
            "without an error",
        ),
        "guards the step before": (
            changed(f"        {GUARD} => ", f"{LOSS} =>         {GUARD}\n{LOSS}"),
            "without an error",
        ),
        "guards each fifth step": (
            changed(f"{GUARD} => assert step % 5 != 4 or job.weights_are_finite()"),
            "it trained on, to step 4",
        ),
        "always the same crop": (
            changed("job.place(step) => job.place(0)"),
            "which crop, and normalised by what",
        ),
        "reads maps still": (
            changed(
                "job.read_crop(step, place) => job.read_map(step)[:, place[0] : place[0] + 60, "
                "place[1] : place[1] + 60]"
            ),
            "how much of the map",
        ),
        "validates in each step": (
            changed(
                f"{GUARD} => {GUARD}\n        validation = job.validate(mean, std)",
                f"{ROW} => (step, loss, validation)",
            ),
            "who looks at the others",
        ),
        "validates before the step": (
            changed(
                f"{LOSS} =>         if {FIFTH}:\n"
                f"            validation = job.validate(mean, std)\n{LOSS}",
                f"{ROW} => (step, loss, validation)",
            ),
            "of the same moment",
        ),
        "one row": (changed("return log => return log[-1:]"), "every fifth step"),
        "statistics of the crop": (own_statistics, "normalised by what"),
        "statistics in each step": (
            changed(f"{CROP} => mean, std = job.statistics()\n        {CROP}"),
            "does its result change",
        ),
        "ten steps": (changed("range(num_steps) => range(10)"), "it trained 10 steps, and 12"),
        "rounds": (
            changed(f"{ROW} => (step, round(loss, 3), job.validate(mean, std))"),
            "the log keeps what it says",
        ),
        "not normalised": (
            changed(f"{CROP} => state = job.read_crop(step, place)"),
            "is each crop normalised",
        ),
        "the slow one": (l02.slow_training, "does its result change"),
    },
)

ANSWERS = {
    "2.1": TIMER,
    "2.2": BYTES,
    "2.3": PREFETCHER,
    "2.4": WENT,
    "2.5": MARKED,
    "2.6": FASTER,
}
