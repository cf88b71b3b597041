"""Checks of lesson 02, baseline, data and profile."""

import ast
import contextlib
import inspect
import itertools
import math
import queue
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from course.answer import Exercise, Hint, due
from course.exercises.expect import plural, refuse
from course.exercises.in_notebook import bounded, without
from course.labs import l02_by_hand, l02_weather
from course.labs.l02_job import Job
from labcode.measure.ranges import StepRanges
from labcode.models import vit
from labcode.runtime.units import type_in_words

# ---- 2.1


class _Clock:
    """A clock that advances when it is told to."""

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
    if not raised:
        raise Hint("it swallows the error: whoever reads the data has to get it")
    clock.go(4)
    with timer.part("forward"):
        clock.go(1)


def _no_part(timer: Timer, clock: _Clock) -> None:
    clock.go(3)


TIMED: dict[str, tuple[Callable[[Timer, _Clock], None], dict[str, float]]] = {
    "two parts": (_in_a_row, {"data": 3, "forward": 1, "rest": 0}),
    "time between the parts": (_with_a_rest, {"data": 3, "forward": 2, "rest": 5}),
    "three steps": (_again, {"data": 3, "forward": 6, "rest": 3}),
    "parts in parts": (_nested, {"backward": 5, "communication": 4, "copy": 1, "rest": 0}),
    "a part inside itself": (_nested_in_itself, {"data": 8, "rest": 2}),
    "an error in a part": (_raising, {"data": 2, "unpack": 3, "rest": 4, "forward": 1}),
    "no part at all": (_no_part, {"rest": 3}),
}
WHY_MISSING = {
    "an error in a part": "does what stands after `yield` also happen when the block raises?"
}


def step_timer(timer_class: Callable[..., Any]) -> None:
    """The learner's `StepTimer(clock)`, on a clock that the check moves."""
    _refuse_finished(timer_class, l02_by_hand.StepTimer, StepRanges)
    _check_part_is_context(due(timer_class(_Clock())))
    for case, (story, expected) in TIMED.items():
        clock = _Clock()
        with without(l02_by_hand.StepTimer.charge, StepRanges._note):
            timer = timer_class(clock)
            story(timer, clock)
            found = due(timer.shares())
        if not clock.calls:
            raise Hint(f"{case}: `self.clock` is never called: where does the time come from?")
        if not isinstance(found, dict):
            raise Hint(f"{case}: shares() gave {found!r}: give a dictionary")
        _check_shares(case, found, expected)
        again = timer.shares()
        _check_shares(f"{case}, shares() asked for a second time", again, expected)


def _refuse_finished(written: Any, *finished: type) -> None:
    """Labcode's own class, or one derived from it, is no answer."""
    for own in finished:
        if isinstance(written, type) and issubclass(written, own):
            module = own.__module__.rpartition(".")[2]
            raise Hint(
                f"{module}.{own.__name__} is labcode's own answer to this exercise: write yours"
            )


def _check_part_is_context(timer: Timer) -> None:
    """That `part` gives a context: it has its `yield` and its decorator."""
    own = inspect.unwrap(type(timer).part)
    try:
        part = timer.part("data")
    except Exception as error:
        # a body without `yield` runs here, and not in the `with`
        if isinstance(error, NotImplementedError) or inspect.isgeneratorfunction(own):
            raise
        part = None
    if part is None or getattr(part, "gen", part) is None:
        _refuse_dots(own)
        raise Hint(
            "`part` has no `yield`: what stands before it happens when the `with` block begins, "
            "what stands after it when the block ends"
        )
    if not hasattr(part, "__enter__"):
        raise Hint(
            f"`part` gave {type_in_words(part)}, which `with` cannot use: does "
            "`@contextlib.contextmanager` still stand above it?"
        )


def _refuse_dots(function: Callable[..., Any]) -> None:
    """A function with `...` for a line is not done yet.

    Raises:
        NotImplementedError: There is such a line; `check` then says "not done yet".
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):  # no source
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and ast.unparse(node) == "...":
            raise NotImplementedError("exercise")


def _check_shares(case: str, found: dict[str, Any], expected: dict[str, float]) -> None:
    total = sum(expected.values())
    missing = [part for part, seconds in expected.items() if seconds and part not in found]
    if missing:
        why = WHY_MISSING.get(case, '"rest" is the time that no part has, and each has its name')
        raise Hint(f"{case}: there is no {missing[0]!r} in {found}: {why}")
    for part, seconds in expected.items():
        share = found.get(part, 0.0)
        if not isinstance(share, int | float):
            raise Hint(f"{case}: the share of {part!r} is {share!r}")
        if math.isclose(share, seconds / total, abs_tol=1e-9):
            continue
        if math.isclose(share, seconds):
            raise Hint(
                f"{case}: {part!r} has {share:g}, its seconds: a share is a fraction of all the "
                "time"
            )
        raise Hint(
            f"{case}: of {total:g} s, {part!r} had {seconds:g} s, which is {seconds / total:.1%}, "
            f"and yours says {share:.1%}; all of yours: {_percents(found)}"
        )
    unknown = sorted(set(found) - set(expected))
    if unknown:
        raise Hint(f"{case}: there was no part {unknown[0]!r}")


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
    ([(1, 4), (150, 180), (30, 90)], (2, 100, 200), "the last chunk reaches over the edge"),
    ([(5, 25)], (10,), "one axis"),
)


def bytes_read(function: Callable[..., Any]) -> None:
    """The learner's `bytes_read(box, chunks, itemsize)`."""
    for box, chunks, name in BOXES:
        for itemsize in (4, 2):
            given = list(box)
            found = due(bounded("does the loop end?", function, given, chunks, itemsize))
            case = f"{name} (box {box}, chunks {chunks}, {itemsize} bytes a number): "
            _check_bytes(case, _number(found), box, chunks, itemsize)
            if given != box:
                raise Hint(
                    f"{case}afterwards `box` is {given}: it belongs to whoever calls, so leave it "
                    "as it was"
                )


def _number(found: Any) -> Any:
    """A number of NumPy or PyTorch as one of Python."""
    if isinstance(found, np.generic | np.ndarray | torch.Tensor) and math.prod(found.shape) == 1:
        return found.item()
    return found


def chunks_touched(box: Sequence[tuple[int, int]], chunks: Sequence[int]) -> int:
    """The number of chunks that hold a position of the box: those along each axis, listed.

    Held by: tests/unit/test_l02_labs.py::test_zarr_reads_the_bytes_that_are_predicted
    """
    number = 1
    for (start, stop), length in zip(box, chunks, strict=True):
        number *= len({position // length for position in range(start, stop)})
    return number


def _check_bytes(case: str, found: Any, box: Any, chunks: Any, itemsize: int) -> None:
    if not isinstance(found, int | float) or isinstance(found, bool):
        raise Hint(f"{case}{found!r} is no number of bytes")
    chunk_bytes = math.prod(chunks) * itemsize
    expected = chunks_touched(box, chunks) * chunk_bytes
    if found == expected:
        return
    axes = [(start, stop, length) for (start, stop), length in zip(box, chunks, strict=True)]
    wanted = math.prod(stop - start for start, stop, _ in axes)
    with_stop = math.prod(stop // length - start // length + 1 for start, stop, length in axes)
    from_zero = math.prod(math.ceil(stop / length) for _, stop, length in axes)
    refuse(
        {
            "these are the bytes that are wanted: a chunk is read as a whole, whatever part of it "
            "is wanted": found == wanted * itemsize,
            "you have counted numbers: how long is each?": found * itemsize == expected,
            "you have counted chunks: how many bytes has each?": found * chunk_bytes == expected,
            "yours is right for numbers of 4 bytes: where does `itemsize` come in?": (
                found * itemsize == expected * 4
            ),
            f"{found:,} bytes are not a whole number of chunks, and each has {chunk_bytes:,}": (
                found % chunk_bytes != 0
            ),
        },
        case,
    )
    yours = plural(int(found // chunk_bytes), "chunk")
    refuse(
        {
            "`stop` itself is not in the box": found == with_stop * chunk_bytes,
            "chunks that lie before the box are not read": found == from_zero * chunk_bytes,
            "along each axis, in which chunk is the first position of the box, in which the last, "
            "and how many chunks are there from the one to the other?": True,
        },
        f"{case}yours says {yours}, and it touches {expected // chunk_bytes}: ",
    )


# ---- 2.3

PATIENCE_S = 10.0  # how long a loop may take that has nothing to wait for
SOON_S = 3.0  # within which a thread has begun, or ended
PAUSE_S = 1.0  # of a slow loop, and of a slow source: longer than the timeout of a `put` or `get`
LOOK_S = 0.02  # from one look at a reader to the next
AT_REST_S = 1.0  # a source of which so long nothing was read is at rest, however its reader waits
JOINED_S = 0.05  # within which a thread has ended whose end was waited for
WAITS = ("wait", "_worker")  # of threading.Condition, and of a thread pool
STUCK = (
    "does everything that ends the reading, its end, an error of any kind, or a loop that stops "
    "early, reach the one who waits?"
)


class _Source:
    """Yields items, and notes how far it was read and by whom.

    Args:
        items: What it yields.
        error: Raised after them, if any.
        slow_at: The place of an item that takes `PAUSE_S` to read, if any.
    """

    def __init__(
        self, items: list[Any], error: Exception | None = None, slow_at: int | None = None
    ) -> None:
        self.items = items
        self.error = error
        self.slow_at = slow_at
        self.moved = threading.Condition()
        self.num_read = 0
        self.readers: set[threading.Thread] = set()

    def __iter__(self) -> Iterator[Any]:
        for place, item in enumerate(self.items):
            with self.moved:
                self.num_read += 1
                self.readers.add(threading.current_thread())
                self.moved.notify_all()
            if place == self.slow_at:
                time.sleep(PAUSE_S)
            yield item
        if self.error:
            raise self.error

    def reaches(self, number: int, within_s: float) -> bool:
        """Whether that many items are read within some seconds."""
        with self.moved:
            return self.moved.wait_for(lambda: self.num_read >= number, within_s)

    def rests(self) -> None:
        """Wait until it is read no further: its reader waits for something, or has ended."""
        moves = True
        while moves:
            before = self.num_read
            look_s = LOOK_S if _are_waiting(self.readers) else AT_REST_S
            moves = self.reaches(before + 1, look_s)


def _are_waiting(threads: Collection[threading.Thread]) -> bool:
    """Whether each of these threads has ended, or waits in a lock, a queue or a pool."""
    frames = sys._current_frames()
    for thread in threads:
        frame = frames.get(thread.ident or 0)
        if thread.is_alive() and frame is not None and frame.f_code.co_name not in WAITS:
            return False
    return True


def _loop(prefetcher_class: Callable[..., Any], source: _Source, ahead: int) -> Iterator[Any]:
    """The iterator of the learner's loader, as a `for` gets it."""
    loader = due(prefetcher_class(source, ahead))
    try:
        return iter(loader)
    except TypeError as error:
        if "non-iterator" not in str(error):
            raise
        given = str(error).rpartition("type ")[2]
    _refuse_dots(type(loader).__iter__)
    raise Hint(
        f"`__iter__` returned something of type {given}, and `for` needs one batch after the "
        "other: it has no `yield`, which gives the loop a batch and goes on afterwards"
    )


def _ends(case: str, story: Callable[[], Any], stuck: str = STUCK) -> Any:
    """What a function returns that must come to an end; it runs in a thread of its own."""
    told: list[Any] = []

    def run() -> None:
        try:
            # who calls is noted for each thread by itself
            with without(l02_by_hand.Prefetcher.__iter__):
                found = story()
            told.append((found, None))
        except BaseException as error:
            told.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    if not told:
        raise Hint(f"{case}the loop was still waiting after {PATIENCE_S:.0f} s: {stuck}")
    found, error = told[0]
    if isinstance(error, queue.Full):
        raise Hint(
            f"{case}the loop got queue.Full: that a queue has no room for a while is no error, so "
            "who tries again?"
        )
    if isinstance(error, queue.Empty):
        raise Hint(
            f"{case}the loop got queue.Empty: that a batch takes its time is no error, so who "
            "waits?"
        )
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
    if left:
        raise Hint(
            f"{case}the thread {left[0].name} is still alive after {SOON_S:.0f} s: who tells it "
            "that nobody wants another batch, and does it wait for room in the queue for ever?"
        )


@contextlib.contextmanager
def _silent_threads() -> Iterator[None]:
    """A thread that dies of an error prints nothing."""
    hook = threading.excepthook
    threading.excepthook = lambda _: None
    try:
        yield
    finally:
        threading.excepthook = hook


def prefetcher(prefetcher_class: Callable[..., Any]) -> None:
    """The learner's `Prefetcher(source, ahead)`: order, bound, errors, its end."""
    _refuse_finished(prefetcher_class, l02_by_hand.Prefetcher)
    with _silent_threads():
        _check_order(prefetcher_class)
        _check_any_object(prefetcher_class)
        _check_anew(prefetcher_class)
        _check_errors(prefetcher_class)
        _check_ahead(prefetcher_class)
        _check_bound(prefetcher_class)
        _check_stops(prefetcher_class)
        _check_slow_loop(prefetcher_class)
        _check_slow_source(prefetcher_class)
        _check_joins(prefetcher_class)


def _check_order(prefetcher_class: Callable[..., Any]) -> None:
    for number in (7, 1, 0):
        case = f"a source of {number}: "
        source = _Source(list(range(100, 100 + number)))

        def story(source: _Source = source) -> list[Any]:
            return list(_loop(prefetcher_class, source, 2))

        with _no_thread_left(case):
            found = _ends(case, story)
        if found and isinstance(found[0], tuple):
            raise Hint(f"{case}the loop gets {found[0]!r}, and the batch is 100")
        missing = [item for item in source.items if item not in found]
        if missing:
            raise Hint(
                f"{case}of the batches {source.items} the loop got {found}: {missing[0]} is missing"
            )
        if found != source.items:
            raise Hint(f"{case}{source.items} arrived as {found}")


def _check_any_object(prefetcher_class: Callable[..., Any]) -> None:
    odd = ValueError("an error that is a batch")
    items = [0, None, [], "end", False, ("end", None), odd]
    case = f"the batches {items}: "
    found: list[Any] = []

    def story() -> Exception | None:
        try:
            found.extend(_loop(prefetcher_class, _Source(items), 2))
        except ValueError as error:
            return error
        return None

    raised = _ends(case, story)
    if raised is odd:
        raise Hint(
            f"{case}the last one was raised: a batch may be anything, so what tells it from an "
            "error?"
        )
    if raised is not None:
        raise raised
    if found != items:
        raise Hint(
            f"{case}arrived as {found}: a batch may be anything, so what tells it from the end?"
        )


def _check_anew(prefetcher_class: Callable[..., Any]) -> None:
    case = "two loops over one loader, the first left early: "
    source = _Source(list(range(5)))
    stuck = "what was left behind by the first loop, and which queue does the second one use?"

    def story() -> list[Any]:
        loader = prefetcher_class(source, 2)
        first = iter(loader)
        next(first)
        _close(first)
        return list(loader)

    found = _ends(case, story, stuck)
    if found != source.items:
        raise Hint(f"{case}{source.items} arrived in the second one as {found}: {stuck}")


def _close(loop: Iterator[Any]) -> None:
    """What becomes of the iterator of a `for` that is left: CPython deletes it, which closes it."""
    close = getattr(loop, "close", None)
    if close:
        close()


class _Damaged(Exception):
    pass


def _check_errors(prefetcher_class: Callable[..., Any]) -> None:
    for error in (ValueError("sample 3 is damaged"), KeyError("pressure"), _Damaged()):
        _check_error(prefetcher_class, error)


def _check_error(prefetcher_class: Callable[..., Any], error: Exception) -> None:
    case = f"a source that raises {type(error).__name__} after two batches: "
    source = _Source([1, 2], error)
    found: list[Any] = []

    def story() -> Exception | None:
        try:
            found.extend(_loop(prefetcher_class, source, 4))
        except Exception as raised:
            if _is_mine(raised):
                raise
            return raised
        return None

    with _no_thread_left(case):
        raised = _ends(case, story)
    if raised is None:
        raise Hint(
            f"{case}the loop ended as if all had been read: how does an error of the thread get to "
            "the loop?"
        )
    if raised is not error:
        raise Hint(
            f"{case}the loop got {raised!r}, and the source raised {error!r}: the loop is to get "
            "this very error"
        )
    if found != [1, 2]:
        raise Hint(f"{case}before the error {found} arrived, and [1, 2] were read")


def _is_mine(error: Exception) -> bool:
    """Whether an error is what a check says, and nothing that came out of a loader."""
    return isinstance(error, Hint | NotImplementedError)


def _check_ahead(prefetcher_class: Callable[..., Any]) -> None:
    source = _Source(list(range(20)))
    case = "while the loop computes with batch 0: "

    def story() -> tuple[bool, threading.Thread]:
        loop = _loop(prefetcher_class, source, 3)
        next(loop)
        read_on = source.reaches(3, SOON_S)
        for _ in loop:
            pass
        return read_on, threading.current_thread()

    read_on, own = _ends(case, story)
    if own in source.readers:
        raise Hint(
            f"{case}the source is read by the loop's own thread, which cannot compute meanwhile: "
            "where does the `for` over the source run?"
        )
    if not read_on:
        raise Hint(f"{case}batch 1 and 2 were not read within {SOON_S:.0f} s: who reads ahead?")


def _check_bound(prefetcher_class: Callable[..., Any]) -> None:
    for ahead in (1, 3):
        source = _Source(list(range(40)))
        case = f"ahead={ahead}, while the loop computes with batch 0: "

        def story(source: _Source = source, ahead: int = ahead) -> int:
            loop = _loop(prefetcher_class, source, ahead)
            next(loop)
            source.rests()
            num_read = source.num_read
            for _ in loop:
                pass
            return num_read

        num_read = _ends(case, story)
        if not 1 + ahead <= num_read <= 2 + ahead:
            raise Hint(
                f"{case}{num_read} batches were read, and it should be at least {1 + ahead} and at "
                f"most {2 + ahead}: one that the loop has, {ahead} in the queue, one in the "
                "thread's hand. What limits the queue?"
            )


def _waiting_with(ahead: int, taken: int) -> dict[str, _Source]:
    """Sources of which the thread holds something for which a full queue has no room, by its name.

    Args:
        ahead: Batches that the queue holds.
        taken: Batches that the loop has taken.
    """
    just_enough = list(range(taken + ahead))
    return {
        "a batch": _Source(list(range(1000))),
        "the end": _Source(just_enough),
        "an error": _Source(just_enough, _Damaged()),
    }


def _check_stops(prefetcher_class: Callable[..., Any]) -> None:
    for held, source in _waiting_with(ahead=2, taken=2).items():
        case = f"a loop that stops while the thread waits for room for {held}: "

        def story(source: _Source = source) -> None:
            loop = _loop(prefetcher_class, source, 2)
            next(loop)
            next(loop)
            source.rests()
            _close(loop)

        with _no_thread_left(case):
            _ends(
                case,
                story,
                "the queue is full and nobody takes anything out of it any more: how does a thread "
                "that waits in `put` learn of it?",
            )
        if not source.num_read < 100:
            raise Hint(f"{case}the thread read on, to batch {source.num_read}: what makes it stop?")


def _check_slow_loop(prefetcher_class: Callable[..., Any]) -> None:
    for held, source in _waiting_with(ahead=2, taken=1).items():
        source.items = source.items[:20]
        case = f"a loop that takes {PAUSE_S:g} s for batch 0, with {held} waiting for room: "

        def story(source: _Source = source) -> tuple[list[Any], bool]:
            loop = _loop(prefetcher_class, source, 2)
            found = [next(loop)]
            source.rests()
            time.sleep(PAUSE_S)
            try:
                found.extend(loop)
            except _Damaged:
                return found, True
            return found, False

        found, failed = _ends(case, story, "what became of what had to wait for room?")
        missing = [item for item in source.items if item not in found]
        if missing:
            raise Hint(
                f"{case}batch {missing[0]} did not arrive: what became of what had to wait for "
                "room?"
            )
        if failed != (source.error is not None):
            raise Hint(f"{case}the loop did not get it: what became of what had to wait for room?")


def _check_slow_source(prefetcher_class: Callable[..., Any]) -> None:
    case = f"a source that takes {PAUSE_S:g} s for batch 1: "
    source = _Source(list(range(4)), slow_at=1)
    found = _ends(case, lambda: list(_loop(prefetcher_class, source, 2)))
    if found != source.items:
        raise Hint(f"{case}{source.items} arrived as {found}: who waits for it?")


def _check_joins(prefetcher_class: Callable[..., Any]) -> None:
    case = "a loop that stops while the thread reads: "
    source = _Source(list(range(1000)), slow_at=2)

    def story() -> bool:
        loop = _loop(prefetcher_class, source, 2)
        next(loop)
        next(loop)
        source.reaches(3, SOON_S)
        _close(loop)
        for reader in source.readers:
            reader.join(JOINED_S)
        return any(reader.is_alive() for reader in source.readers)

    with _no_thread_left(case):
        left = _ends(case, story)
    if left:
        raise Hint(
            f"{case}the loop is over, and the thread still runs for a moment: who waits for its "
            "end?"
        )


# ---- 2.4

Span = tuple[str, float, float]  # name, start, stop of an event

TRACES: dict[str, tuple[list[Span], float]] = {
    "two operations, one after the other": (
        [("data", 0, 3), ("forward", 4, 6), ("backward", 7, 11)],
        12,
    ),
    "two operations that overlap": (
        [("data", 0, 2), ("backward", 2, 8), ("all-reduce", 5, 11)],
        12,
    ),
    "a short operation inside a long one": (
        [("data", 0, 1), ("backward", 1, 9), ("mm", 2, 4), ("add", 6, 7)],
        10,
    ),
    "data that is waited for while the device is busy": (
        [("forward", 0, 6), ("data", 4, 9), ("backward", 9, 12)],
        13,
    ),
    "events in any order": (
        [("backward", 9, 13), ("copy", 3, 5), ("data", 0, 4), ("forward", 5, 8)],
        14,
    ),
    "two waits that overlap": (
        [("data", 0, 4), ("data", 2, 5), ("forward", 5, 7), ("data", 8, 10)],
        10,
    ),
    "operations of equal times": (
        [("data", 0, 2), ("mm", 3, 6), ("mm", 3, 6), ("add", 6, 8)],
        9,
    ),
    "no operation": ([("data", 1, 4)], 5),
    "no event": ([], 5),
}


def where_time_went(function: Callable[..., Any]) -> None:
    """The learner's `where_time_went(events, step)`."""
    for name, (events, step) in TRACES.items():
        given = list(events)
        case = f"{name}, {events} in a step of {step}: "
        try:
            with without(l02_by_hand.where_time_went, l02_by_hand.covered):
                found = due(bounded("does the loop end?", function, given, step))
        except (IndexError, ValueError) as error:
            raise Hint(f"{case}{type(error).__name__}: {error}") from error
        if given != events:
            raise Hint(f"{case}afterwards `events` is {given}: leave it as it was")
        _check_times(case, found, events, step)


def moments(events: Sequence[Span], step: float) -> dict[str, float]:
    """The step cut at every start and stop, and each piece given to what holds in its middle."""
    times = {0.0, float(step)}
    for _, start, stop in events:
        times |= {float(start), float(stop)}
    cuts = sorted(times)
    spent = {"busy": 0.0, "data": 0.0, "idle": 0.0}
    for start, stop in itertools.pairwise(cuts):
        middle = (start + stop) / 2
        running = {name for name, begin, end in events if begin < middle < end}
        if running - {"data"}:
            reason = "busy"
        elif running:
            reason = "data"
        else:
            reason = "idle"
        spent[reason] += stop - start
    return spent


def _check_times(case: str, found: Any, events: Sequence[Span], step: float) -> None:
    expected = moments(events, step)
    if not isinstance(found, dict):
        raise Hint(f"{case}it returned {found!r}: return a dictionary")
    if set(found) != set(expected):
        raise Hint(f'{case}it has the keys {list(found)}, asked for are "busy", "data" and "idle"')
    found = {name: _number(spent) for name, spent in found.items()}
    for name, spent in found.items():
        if not isinstance(spent, int | float):
            raise Hint(f"{case}{name!r} is {spent!r}, and a number is wanted")
    if all(math.isclose(found[name], expected[name], abs_tol=1e-9) for name in expected):
        return
    busy = found["busy"]
    data = found["data"]
    added = sum(stop - start for name, start, stop in events if name != "data")
    is_busy = f"the device was busy for {expected['busy']:g} and yours says {busy:g}"
    waited = [(name, start, stop) for name, start, stop in events if name == "data"]
    all_data = moments(waited, step)["data"]
    refuse(
        {
            'the device is not busy while nothing but "data" runs, which is a wait of the loop': (
                busy == expected["busy"] + expected["data"] and data == expected["data"]
            ),
            f"the durations of its operations add up to {added:g}, but moments in which two of "
            f"them run count once, which makes {expected['busy']:g}": (
                busy == added and busy != expected["busy"]
            ),
            f"{is_busy}: is an operation left out, perhaps the last one, or one that is longer "
            "than the next one in the list?": busy < expected["busy"],
            f"{is_busy}: is a gap between two operations counted, or one twice that lies inside "
            "another?": busy > expected["busy"],
            f"the loop waits for {all_data:g}, but in {all_data - expected['data']:g} of these the "
            "device is busy, and then the wait costs nothing": (
                data == all_data and data != expected["data"]
            ),
            f"the step waits for data for {expected['data']:g} and yours says {data:g}: moments "
            "in which the loop waits and nothing runs on the device": data != expected["data"],
            f"the three add up to {sum(found.values()):g}, and the step has {step:g}": True,
        },
        case,
    )


# ---- 2.5

PARTS = ("data", "forward", "backward", "optimizer")
LINES = {
    "data": "next(batches)",
    "forward": "model(states)",
    "backward": "loss.backward()",
    "optimizer": "optimizer.step()",
}
NUM_MARKED = 2  # steps: in the second one, gradients that nobody has set to zero show


class _Marks:
    """Parts as a profiler would see them, and which were open while something was done."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.begun: list[str] = []
        self.done: list[tuple[str, list[str]]] = []  # what, and the parts that were open

    def push(self, name: str) -> None:
        self.begun.append(name)
        self.open.append(name)

    def pop(self) -> None:
        if not self.open:
            raise Hint(f"pop() is called when no part is open, after {self.begun}: one too many")
        self.open.pop()

    def note(self, what: str) -> None:
        self.done.append((what, list(self.open)))


class _Scale(torch.nn.Module):
    """One weight, whose forward and backward are noted."""

    def __init__(self, marks: _Marks | None = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(0.5))
        self.marks = marks
        if marks is not None:
            self.weight.register_post_accumulate_grad_hook(lambda _: marks.note("backward"))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        if self.marks is not None:
            self.marks.note("forward")
        return states * self.weight


class _Noted(torch.optim.SGD):
    """An optimizer whose steps are noted."""

    marks: _Marks

    def step(self, closure: Any = None) -> Any:
        self.marks.note("optimizer")
        return super().step(closure)


def _noted_batches(marks: _Marks) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for number in itertools.count(1):
        marks.note("data")
        states = torch.full((1, 1, 2, 2), float(number))
        yield states, 3 * states


def marked_step(function: Callable[..., Any]) -> None:
    """The learner's `marked_step(batches, model, optimizer, push, pop)`."""
    marks = _Marks()
    model = _Scale(marks)
    optimizer = _Noted(model.parameters(), lr=0.01)
    optimizer.marks = marks
    batches = _noted_batches(marks)
    weight, losses = _trained_without_marks()
    for number in range(NUM_MARKED):
        marks.done.clear()
        marks.begun.clear()
        with without(l02_by_hand.marked_step):
            loss = due(function(batches, model, optimizer, marks.push, marks.pop))
        _check_marks(marks)
        found = loss.item() if isinstance(loss, torch.Tensor) else loss
        if not isinstance(found, float) or not math.isclose(found, losses[number], rel_tol=1e-5):
            raise Hint(
                f"step {number}: it returned {found!r}, and without the parts the loss is "
                f"{losses[number]:g}: is it the same step?"
            )
    if not math.isclose(model.weight.item(), weight, rel_tol=1e-5):
        raise Hint(
            f"after {NUM_MARKED} steps the weight is {model.weight.item():.4f}, and without the "
            f"parts {weight:.4f}: does the second step begin with gradients of zero?"
        )


def _trained_without_marks() -> tuple[float, list[float]]:
    """(The weight after the steps, the losses)."""
    model = _Scale()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = _noted_batches(_Marks())
    losses = []
    for _ in range(NUM_MARKED):
        states, targets = next(batches)
        loss = vit.loss(model(states), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model.weight.item(), losses


def _check_marks(marks: _Marks) -> None:
    for what, parts in marks.done:
        line = f"while {LINES[what]} runs, "
        if not parts:
            raise Hint(f"{line}no part is open: it belongs to {what!r}")
        if len(parts) > 1:
            raise Hint(
                f"{line}the parts {' and '.join(map(repr, parts))} are open, one inside the "
                "other: what ends the first of them?"
            )
        if parts != [what]:
            raise Hint(f"{line}the part {parts[0]!r} is open: it belongs to {what!r}")
    refuse(
        {
            f"after the step {marks.open} is still open: what ends it?": bool(marks.open),
            f"in one step these parts are begun: {marks.begun}. Each of {list(PARTS)} is wanted "
            "once": sorted(marks.begun) != sorted(PARTS),
        }
    )
    done = [what for what, _ in marks.done]
    if done != list(PARTS):
        raise Hint(f"in one step this is done: {done}. The step without parts does {list(PARTS)}")


# ---- 2.6

STEPS = (12, 7)  # numbers of steps that are tried: several rows, and steps after the last of them
VALIDATE_EVERY = 5
BREAKS = ((5, 1, math.nan), (3, 2, math.inf))  # (steps, the step that spoils the weights, by what)


class _Watched(Job):
    """A job that keeps what it has told, and can spoil its weights.

    Args:
        path: The weather file.
        spoiled_at: The step after which a weight is no number any more, if any.
        by: What it is then.
    """

    def __init__(self, path: Path, spoiled_at: int | None = None, by: float = math.nan) -> None:
        super().__init__(path)
        self.spoiled_at = spoiled_at
        self.by = by
        self.losses: list[float] = []
        self.validations: list[float] = []
        self.weights_after: list[torch.Tensor] = []

    def train_on(self, state: torch.Tensor, target: torch.Tensor) -> float:
        loss = super().train_on(state, target)
        if len(self.losses) == self.spoiled_at:
            weight = next(self._model.parameters())
            weight.data.view(-1)[0] = self.by
        self.losses.append(loss)
        self.weights_after.append(self.weights().clone())
        return loss

    def validate(self, mean: torch.Tensor, std: torch.Tensor) -> float:
        loss = super().validate(mean, std)
        self.validations.append(loss)
        return loss


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
        path = l02_weather.make(Path(folder) / "job.zarr", (2, 90, 180), num_times=max(STEPS) + 4)
        slow = _Watched(path)
        rows = slow_training(slow, max(STEPS))
        for num_steps in STEPS:
            job = _Watched(path)
            found = _log_of(training, job, num_steps)
            expected = [row for row in rows if row[0] < num_steps]
            _check_same(expected, found, slow.weights_after[num_steps - 1], job, num_steps)
            _check_work(job, num_steps)
        for num_steps, spoiled_at, by in BREAKS:
            _check_guard(training, _Watched(path, spoiled_at, by), num_steps)


def _log_of(training: Callable[..., Any], job: _Watched, num_steps: int) -> Any:
    """What a training returns that has no reason to stop early."""
    try:
        return due(training(job, num_steps))
    except Exception as error:
        if bool(job.weights().isfinite().all()):
            raise
        raise Hint(
            f"{num_steps} steps: after step {len(job.losses) - 1} the weights are not finite, so "
            f"the run was stopped ({type(error).__name__}); those of the slow training are: is "
            "each crop normalised?"
        ) from None


def _check_same(
    expected: list[Any], found: Any, weights: torch.Tensor, job: _Watched, num_steps: int
) -> None:
    if not isinstance(found, list):
        raise Hint(f"it returned {found!r}: return the log, as the slow one does")
    steps = job.counts["train_on"]
    if steps != num_steps:
        raise Hint(f"it trained {steps} steps, and {num_steps} were asked for")
    off = (job.weights() - weights).abs().max().item()
    if not off < 1e-5:
        raise Hint(
            f"the weights differ from those of the slow training by {off:.1g}: each step has to "
            "see the same numbers, so which crop, and normalised by what?"
        )
    if len(found) != len(expected):
        raise Hint(
            f"{num_steps} steps: the log has {len(found)} rows and that of the slow one "
            f"{len(expected)}: every fifth step"
        )
    for row, right in zip(found, expected):
        same = len(row) == 3 and torch.allclose(
            torch.tensor(row), torch.tensor(right), rtol=1e-3, atol=1e-5
        )
        if not same:
            raise Hint(
                f"a row of the log is {row} and was {right}: (step, loss, validation), of the same "
                "moment"
            )
        _, loss, validation = row
        told = job.losses[right[0]], min(job.validations, key=lambda one: abs(one - validation))
        if (loss, validation) != told:
            raise Hint(
                f"a row of the log is {row}, and the job said {told}: the log keeps what it says, "
                "unchanged"
            )


def _check_work(job: _Watched, num_steps: int) -> None:
    calls = job.counts
    rows = num_steps // VALIDATE_EVERY
    refuse(
        {
            f"statistics() was called {calls['statistics']} times: does its result change?": (
                calls["statistics"] > 1
            ),
            f"validate() was called {calls['validate']} times for {rows} rows of the log: who "
            "looks at the others?": calls["validate"] > rows,
            f"read_map() was called {calls['read_map']} times: how much of the map does a step "
            "use?": calls["read_map"] > 0,
            f"read_crop() was called {calls['read_crop']} times for {num_steps} pairs": (
                calls["read_crop"] > 2 * num_steps
            ),
        }
    )


def _check_guard(training: Callable[..., Any], job: _Watched, num_steps: int) -> None:
    """A run whose weights are spoiled has to raise an error at once."""
    case = f"{num_steps} steps, and in step {job.spoiled_at} a weight becomes {job.by}: "
    raised = False
    found = None
    try:
        found = training(job, num_steps)
    except Exception:
        raised = True
    if not raised:
        raise Hint(
            f"{case}it returned {found} without an error, where the slow one raises one. What "
            "guards the run costs next to nothing: look at the profile before you remove something"
        )
    trained = len(job.losses)
    if not (job.spoiled_at is not None and trained == job.spoiled_at + 1):
        raise Hint(
            f"{case}it trained on, to step {trained - 1}: what guards the run looks at every step"
        )


EXERCISES = {
    "2.1": Exercise(
        check=step_timer,
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
        check=bytes_read,
        praise="whole chunks, whatever part of them is wanted",
        hints=(
            "Position x lies in chunk x // length. Which is the last position of the box?",
            "Along each axis there are some chunks. How many are there altogether?",
        ),
    ),
    "2.3": Exercise(
        check=prefetcher,
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
        check=where_time_went,
        praise="each moment counts once, and a wait counts where the device has nothing to do",
        hints=(
            "Sort the spans by their start, and remember until when time is counted already. What "
            "does the next span add, if it begins before that moment, and if it ends before it?",
            "How long does anything at all run, and how long does the device? What is the "
            "difference of the two?",
        ),
    ),
    "2.5": Exercise(
        check=marked_step,
        praise="four parts, one after the other: any profiler with push and pop can show them",
        hints=(
            "Which lines of the step belong to which part? Put `push(name)` before them and "
            "`pop()` after them.",
            "`pop()` ends the part that was begun last. How many parts are open when the next one "
            "begins?",
        ),
    ),
    "2.6": Exercise(
        check=faster,
        praise="the same training run, without the work that nobody needed",
        hints=(
            "Which rows of the table have the largest times, and how often were they called?",
            "For each of them: does its result change from step to step? Is all of it used? Is it "
            "used in each step?",
        ),
    ),
}
