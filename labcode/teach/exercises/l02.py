"""Checks of lesson 02, baseline, data and profile. The text of each assertion is a hint."""

import contextlib
import math
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from labcode.teach.check import Exercise, due
from labcode.teach.exercises.in_notebook import bounded
from labcode.teach.exercises.on_ranks import without
from labcode.teach.labs import l02_by_hand, l02_weather
from labcode.teach.labs.l02_job import Job
from labcode.train.ranges import StepRanges

EXERCISES = {
    "2.1": Exercise(
        praise="every moment is charged once, to the innermost part, and none is lost",
        hints=(
            "When a part begins or ends, the time since the last such moment belongs to what was "
            "running until now. What was that?",
            "Parts that are open form a stack: a list with `append` and `pop`. What lies at its "
            "bottom, when no part is open?",
            "The code after `yield` is skipped if the block raises, unless it stands in a "
            "`finally`.",
        ),
    ),
    "2.2": Exercise(
        praise="whole chunks, whatever part of them is wanted",
        hints=(
            "Position x lies in chunk x // length. Which is the last position of the box?",
            "Along each axis there are some chunks. How many are there altogether?",
        ),
    ),
    "2.3": Exercise(
        praise="it reads ahead but not too far, keeps the order, tells errors, and ends its thread",
        hints=(
            "What stands in the queue has to say what it is: a batch, the end, or an error.",
            "`ready.put(item)` waits while the queue is full. Who takes anything out of it, after "
            "the loop has stopped early?",
            "A generator that is left early runs its `finally`. What has to happen there, and how "
            "does the thread learn of it?",
        ),
    ),
    "2.4": Exercise(
        praise="the same training, without the work that nobody needed",
        hints=(
            "Which rows of the table have the largest times, and how often were they called?",
            "For each of them: does its result change from step to step? Is all of it used? Is it "
            "used in each step?",
        ),
    ),
}

# ---- 2.1


class _Clock:
    """A clock that goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0
        self.calls = 0

    def __call__(self) -> float:
        self.calls += 1
        return self.now

    def go(self, seconds: float) -> None:
        self.now += seconds


Timer = Any  # the learner's


def _in_a_row(timer: Timer, clock: _Clock) -> None:
    with timer.part("data"):
        clock.go(3)
    with timer.part("forward"):
        clock.go(1)


def _with_a_rest(timer: Timer, clock: _Clock) -> None:
    clock.go(2)
    with timer.part("data"):
        clock.go(3)
    clock.go(1)
    with timer.part("forward"):
        clock.go(2)
    clock.go(2)


def _again(timer: Timer, clock: _Clock) -> None:
    for _ in range(3):
        with timer.part("data"):
            clock.go(1)
        with timer.part("forward"):
            clock.go(2)
        clock.go(1)


def _nested(timer: Timer, clock: _Clock) -> None:
    with timer.part("backward"):
        clock.go(2)
        with timer.part("communication"):
            clock.go(4)
            with timer.part("copy"):
                clock.go(1)
        clock.go(3)


def _nested_in_itself(timer: Timer, clock: _Clock) -> None:
    with timer.part("data"):
        clock.go(2)
        with timer.part("data"):
            clock.go(5)
        clock.go(1)
    clock.go(2)


class _Unreadable(Exception):
    pass


def _raising(timer: Timer, clock: _Clock) -> None:
    raised = False
    try:
        with timer.part("data"):
            clock.go(2)
            with timer.part("unpack"):
                clock.go(3)
                raise _Unreadable
    except _Unreadable:
        raised = True
    assert raised, "it swallows the error: whoever reads the data has to get it"
    clock.go(4)
    with timer.part("forward"):
        clock.go(1)


TIMED: dict[str, tuple[Callable[[Timer, _Clock], None], dict[str, float]]] = {
    "two parts": (_in_a_row, {"data": 3, "forward": 1, "rest": 0}),
    "time between the parts": (_with_a_rest, {"data": 3, "forward": 2, "rest": 5}),
    "three steps": (_again, {"data": 3, "forward": 6, "rest": 3}),
    "parts in parts": (_nested, {"backward": 5, "communication": 4, "copy": 1, "rest": 0}),
    "a part inside itself": (_nested_in_itself, {"data": 8, "rest": 2}),
    "an error in a part": (_raising, {"data": 2, "unpack": 3, "rest": 4, "forward": 1}),
}


def step_timer(timer_class: Callable[..., Any]) -> None:
    """The learner's `StepTimer(clock)`, on a clock that the check moves."""
    for case, (story, expected) in TIMED.items():
        clock = _Clock()
        with without(l02_by_hand.StepTimer.charge, StepRanges._note):
            timer = timer_class(clock)
            story(timer, clock)
            found = due(timer.shares())
        assert clock.calls, f"{case}: `self.clock` is never called: where does the time come from?"
        assert isinstance(found, dict), f"{case}: shares() gave {found!r}: give a dictionary"
        _check_shares(case, found, expected)
        again = timer.shares()
        _check_shares(f"{case}, shares() asked for a second time", again, expected)


def _check_shares(case: str, found: dict[str, Any], expected: dict[str, float]) -> None:
    total = sum(expected.values())
    missing = [part for part, seconds in expected.items() if seconds and part not in found]
    assert not missing, (
        f'{case}: there is no {missing[0]!r} in {found}: "rest" is the time that no part has, and '
        "each part has its name"
    )
    for part, seconds in expected.items():
        share = found.get(part, 0.0)
        assert isinstance(share, int | float), f"{case}: the share of {part!r} is {share!r}"
        assert share < 1.0001 or total < 2 or not math.isclose(share, seconds, rel_tol=1e-9), (
            f"{case}: {part!r} has {share:g}, its seconds: a share is a fraction of all the time"
        )
        assert math.isclose(share, seconds / total, abs_tol=1e-9), (
            f"{case}: of {total:g} s, {part!r} had {seconds:g} s, which is {seconds / total:.1%}, "
            f"and yours says {share:.1%}; all of yours: {_percents(found)}"
        )
    unknown = sorted(set(found) - set(expected))
    assert not unknown, f"{case}: there was no part {unknown[0]!r}"


def _percents(shares: dict[str, Any]) -> str:
    return ", ".join(f"{part} {share:.1%}" for part, share in shares.items())


# ---- 2.2

BOXES = (
    ([(0, 8), (0, 180), (0, 360)], (8, 180, 360), "the box is one chunk"),
    ([(3, 5), (100, 160), (30, 90)], (8, 180, 360), "the box lies inside one chunk"),
    ([(3, 5), (100, 160), (30, 90)], (2, 90, 180), "the box lies in several chunks"),
    ([(2, 4), (90, 180), (180, 360)], (2, 90, 180), "the box ends where a chunk ends"),
    ([(0, 1), (59, 61), (0, 1)], (1, 60, 60), "two rows, in two chunks"),
    ([(7, 9), (0, 60), (100, 260)], (4, 50, 64), "three axes, none of them even"),
    ([(5, 25)], (10,), "one axis"),
)


def bytes_read(function: Callable[..., Any]) -> None:
    """The learner's `bytes_read(box, chunks, itemsize)`."""
    for box, chunks, name in BOXES:
        for itemsize in (4, 2):
            with without(l02_by_hand.bytes_read), bounded("does the loop end?"):
                found = due(function(box, chunks, itemsize))
            expected = l02_by_hand.bytes_read(box, chunks, itemsize)
            case = f"{name} (box {box}, chunks {chunks}, {itemsize} bytes a number): "
            _check_bytes(case, found, expected, box, chunks, itemsize)


def _check_bytes(
    case: str, found: Any, expected: int, box: Any, chunks: Any, itemsize: int
) -> None:
    assert isinstance(found, int | float) and not isinstance(found, bool), (
        case + f"{found!r} is no number of bytes"
    )
    if found == expected:
        return
    wanted = math.prod(stop - start for start, stop in box) * itemsize
    assert found != wanted, (
        case + "these are the bytes that are wanted: a chunk is read as a whole, whatever part of "
        "it is wanted"
    )
    assert found * itemsize != expected, case + "you have counted numbers: how long is each?"
    assert found * math.prod(chunks) * itemsize != expected, (
        case + "you have counted chunks: how many bytes has each?"
    )
    chunk_bytes = math.prod(chunks) * itemsize
    assert found <= expected, (
        case + f"{found / chunk_bytes:g} chunks, and it touches {expected // chunk_bytes}: `stop` "
        "itself is not in the box"
    )
    raise AssertionError(
        case + f"{found / chunk_bytes:g} chunks, and it touches {expected // chunk_bytes}: in "
        "which chunk is the first position along an axis, in which the last, and how many are "
        "that along all axes?"
    )


# ---- 2.3

PATIENCE_S = 10.0  # how long a loop may take that has nothing to wait for
SOON_S = 3.0  # within which a thread has begun, or ended


class _Source:
    """Yields items, and notes how far it was read and by whom.

    Args:
        items: What it yields.
        error: Raised after them, if any.
    """

    def __init__(self, items: list[Any], error: Exception | None = None) -> None:
        self.items = items
        self.error = error
        self.moved = threading.Condition()
        self.num_read = 0
        self.threads: set[int] = set()

    def __iter__(self) -> Iterator[Any]:
        for item in self.items:
            with self.moved:
                self.num_read += 1
                self.threads.add(threading.get_ident())
                self.moved.notify_all()
            yield item
        if self.error:
            raise self.error

    def reaches(self, number: int, within_s: float) -> bool:
        """Whether so many items are read within some seconds."""
        with self.moved:
            return self.moved.wait_for(lambda: self.num_read >= number, within_s)


def _ends(case: str, story: Callable[[], Any]) -> Any:
    """What a function returns that must come to an end; it runs in a thread of its own."""
    told: list[Any] = []

    def run() -> None:
        try:
            # who calls is noted for each thread by itself
            with without(l02_by_hand.Prefetcher.__iter__, l02_by_hand._put):
                found = story()
            told.append((found, None))
        except BaseException as error:
            told.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert told, (
        case + f"the loop was still waiting after {PATIENCE_S:.0f} s: does everything that ends "
        "the reading, its end, an error, or a loop that stops early, reach the one who waits?"
    )
    found, error = told[0]
    if error is not None:
        raise error
    return found


@contextlib.contextmanager
def _no_thread_left(case: str) -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = [thread for thread in threading.enumerate() if thread not in before]
    for thread in left:
        thread.join(SOON_S)
    left = [thread for thread in left if thread.is_alive()]
    assert not left, (
        case + f"the thread {left[0].name} is still alive after {SOON_S:.0f} s: who tells it that "
        "nobody wants another batch, and does it wait for room in the queue for ever?"
    )


def prefetcher(prefetcher_class: Callable[..., Any]) -> None:
    """The learner's `Prefetcher(source, ahead)`: order, bound, errors, its end."""
    _check_order(prefetcher_class)
    _check_falsy(prefetcher_class)
    _check_error(prefetcher_class)
    _check_ahead(prefetcher_class)
    _check_bound(prefetcher_class)
    _check_stops(prefetcher_class)


def _check_order(prefetcher_class: Callable[..., Any]) -> None:
    for number in (7, 1, 0):
        case = f"a source of {number}: "
        source = _Source(list(range(100, 100 + number)))

        def story(source: _Source = source) -> list[Any]:
            return list(due(prefetcher_class(source, 2)))

        with _no_thread_left(case):
            found = _ends(case, story)
        if found and isinstance(found[0], tuple):
            raise AssertionError(case + f"the loop gets {found[0]!r}, and the batch is 100")
        missing = [item for item in source.items if item not in found]
        assert not missing, case + f"{len(missing)} did not arrive, the first is {missing[0]}"
        assert found == source.items, case + f"{source.items} arrived as {found}"


def _check_falsy(prefetcher_class: Callable[..., Any]) -> None:
    items = [0, None, [], "end", False]
    case = f"the batches {items}: "
    found = _ends(case, lambda: list(prefetcher_class(_Source(items), 2)))
    assert found == items, (
        case + f"arrived as {found}: a batch may be anything, so what tells it from the end?"
    )


def _check_error(prefetcher_class: Callable[..., Any]) -> None:
    case = "a source that raises after two batches: "
    source = _Source([1, 2], ValueError("sample 3 is damaged"))
    found: list[Any] = []

    def story() -> str:
        try:
            found.extend(prefetcher_class(source, 4))
        except ValueError as error:
            return str(error)
        return ""

    hook = threading.excepthook
    threading.excepthook = _silent
    try:
        with _no_thread_left(case):
            said = _ends(case, story)
    finally:
        threading.excepthook = hook
    assert said, (
        case + "the loop ended as if all had been read: how does an error of the thread get to the "
        "loop?"
    )
    assert said == "sample 3 is damaged", case + f"the loop got another error, {said!r}"
    assert found == [1, 2], case + f"before the error {found} arrived, and [1, 2] were read"


def _silent(_: Any) -> None:
    """A thread that dies of an error prints nothing."""


def _check_ahead(prefetcher_class: Callable[..., Any]) -> None:
    source = _Source(list(range(20)))
    case = "while the loop computes with batch 0: "

    def story() -> tuple[bool, int]:
        loop = iter(prefetcher_class(source, 3))
        next(loop)
        read_on = source.reaches(3, SOON_S)
        for _ in loop:
            pass
        return read_on, threading.get_ident()

    read_on, own = _ends(case, story)
    assert own not in source.threads, (
        case + "the source is read by the loop's own thread, which cannot compute meanwhile: where "
        "does the `for` over the source run?"
    )
    assert read_on, case + f"batch 1 and 2 were not read within {SOON_S:.0f} s: who reads ahead?"


def _check_bound(prefetcher_class: Callable[..., Any]) -> None:
    for ahead in (1, 3):
        source = _Source(list(range(40)))
        case = f"ahead={ahead}, while the loop computes with batch 0: "

        def story(source: _Source = source, ahead: int = ahead) -> tuple[bool, int]:
            loop = iter(prefetcher_class(source, ahead))
            next(loop)
            too_far = source.reaches(ahead + 3, 0.3)
            enough = source.reaches(1 + ahead, SOON_S)
            num_read = source.num_read
            for _ in loop:
                pass
            return too_far or not enough, num_read

        off, num_read = _ends(case, story)
        assert not off, (
            case + f"{num_read} batches were read, and it should be at least {1 + ahead} and at "
            f"most {2 + ahead}: one that the loop has, {ahead} in the queue, one in the thread's "
            "hand. What limits the queue?"
        )


def _check_stops(prefetcher_class: Callable[..., Any]) -> None:
    case = "a loop that stops after two batches: "
    source = _Source(list(range(1000)))

    def story() -> None:
        loop = iter(prefetcher_class(source, 2))
        next(loop)
        next(loop)
        close = getattr(loop, "close", None)
        if close:
            close()

    with _no_thread_left(case):
        _ends(case, story)
    assert source.num_read < 100, (
        case + f"the thread read on, to batch {source.num_read}: what makes it stop?"
    )


# ---- 2.4

NUM_STEPS = 10
VALIDATE_EVERY = 5


def slow_training(job: Job, num_steps: int) -> list[tuple[int, float, float]]:
    """What the lesson has on screen: (step, loss, validation) of every fifth step."""
    log = []
    for step in range(num_steps):
        mean, std = job.statistics()
        top, left = job.place(step)
        rows = slice(top, top + l02_weather.SIZE)
        columns = slice(left, left + l02_weather.SIZE)
        state = ((job.read_map(step) - mean) / std)[:, rows, columns]
        target = ((job.read_map(step + 1) - mean) / std)[:, rows, columns]
        loss = job.train_on(state, target)
        assert job.weights_are_finite()
        validation = job.validate(mean, std)
        if (step + 1) % VALIDATE_EVERY == 0:
            log.append((step, loss, validation))
    return log


def faster(training: Callable[..., Any]) -> None:
    """The learner's `faster_training(job, num_steps)`: the same results, less work."""
    with tempfile.TemporaryDirectory(prefix="l02-") as folder:
        path = l02_weather.make(Path(folder) / "job.zarr", (2, 90, 180), num_times=NUM_STEPS + 6)
        slow = Job(path)
        expected = slow_training(slow, NUM_STEPS)
        job = Job(path)
        found = due(training(job, NUM_STEPS))
    _check_same(expected, found, slow, job)
    _check_work(job, slow)


def _check_same(expected: list[Any], found: Any, slow: Job, job: Job) -> None:
    assert isinstance(found, list), f"it returned {found!r}: return the log, as the slow one does"
    steps = job.counts["train_on"]
    assert steps == NUM_STEPS, f"it trained {steps} steps, and {NUM_STEPS} were asked for"
    off = (job.weights() - slow.weights()).abs().max().item()
    assert off < 1e-5, (
        f"the weights differ from those of the slow training by {off:.1g}: each step has to see "
        "the same numbers, so which crop, and normalised by what?"
    )
    assert len(found) == len(expected), (
        f"the log has {len(found)} rows and that of the slow one {len(expected)}: every fifth step"
    )
    for row, right in zip(found, expected):
        same = torch.allclose(torch.tensor(row), torch.tensor(right), rtol=1e-3, atol=1e-5)
        assert len(row) == 3 and same, (
            f"a row of the log is {row} and was {right}: (step, loss, validation), of the same "
            "moment"
        )


def _check_work(job: Job, slow: Job) -> None:
    counts = job.counts
    assert counts["weights_are_finite"] >= NUM_STEPS, (
        f"the weights were looked at {counts['weights_are_finite']} times in {NUM_STEPS} steps: "
        "this check guards the run, and it costs next to nothing. Look at the profile before you "
        "remove something"
    )
    assert counts["statistics"] <= 1, (
        f"statistics() was called {counts['statistics']} times: does its result change?"
    )
    assert counts["validate"] <= NUM_STEPS // VALIDATE_EVERY, (
        f"validate() was called {counts['validate']} times for {NUM_STEPS // VALIDATE_EVERY} rows "
        "of the log: who looks at the others?"
    )
    assert not counts["read_map"], (
        f"read_map() was called {counts['read_map']} times: how much of the map does a step use?"
    )
    assert counts["read_crop"] <= 2 * NUM_STEPS, (
        f"read_crop() was called {counts['read_crop']} times for {NUM_STEPS} pairs"
    )
