"""One call to a pool at a time, in which Ctrl-C is raised only where nothing is half done."""

import signal
import threading
from types import FrameType, TracebackType


class Turn:
    """`with turn:` around everything that talks to the ranks; it can be nested.

    Python raises `KeyboardInterrupt` between any two bytecodes, so also right after the lock of a
    reply was taken and before the `with` that gives it back. The thread that receives the answers
    then waits for that lock for ever, and the one that was interrupted waits for that thread: the
    pool hung in about 1 of 200 interrupts. Within a turn Ctrl-C is therefore noted and raised
    where `raise_interrupt` is called, or at the end of the turn.

    In any thread but the main one, and where a program has a handler of its own, it is a lock only.

    Held by: tests/unit/test_pool_turn.py
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0  # of the turns within turns of the main thread
        self._interrupted = False
        self._holds = False  # whether Ctrl-C is noted instead of raised

    def __enter__(self) -> "Turn":
        self._lock.acquire()
        if threading.current_thread() is threading.main_thread():
            self._depth += 1
            if self._depth == 1 and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                self._interrupted = False
                self._holds = True
                signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        try:
            if threading.current_thread() is threading.main_thread():
                self._depth -= 1
                if self._depth == 0 and self._holds:
                    self._holds = False
                    signal.signal(signal.SIGINT, signal.default_int_handler)
        finally:
            self._lock.release()
        if kind is None and self._depth == 0:
            self.raise_interrupt()

    def raise_interrupt(self) -> None:
        """Raise the interrupt that came within this turn, if one did."""
        if self._interrupted and threading.current_thread() is threading.main_thread():
            self._interrupted = False
            raise KeyboardInterrupt

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self._interrupted = True
