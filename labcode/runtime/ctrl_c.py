"""Ctrl-C ends a run in order: once, however often it is pressed."""

import os
import signal
import time

INTERRUPTED = 130  # what a shell reports for a program ended by Ctrl-C
PATIENCE_S = 3.0  # a second Ctrl-C after this time ends the process at once


class CtrlC:
    """The first SIGINT raises KeyboardInterrupt, those that follow do not.

    A second Ctrl-C in the same moment would break off the closing of files, and print a traceback
    of it. One that comes later ends the process: something hangs.

    Attributes:
        heard: Whether there was one.
    """

    def __init__(self) -> None:
        self.heard = False
        self._heard_s = 0.0
        self._may_raise = True

    def listen(self) -> None:
        """Install the handler of SIGINT, unless it is ignored, as in a background job."""
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._hear)

    def stop_raising(self) -> None:
        """Only remember a Ctrl-C from now on: the run is about to end anyway."""
        self._may_raise = False

    def _hear(self, _number: int, _frame: object) -> None:
        now = time.monotonic()
        if not self.heard:
            self.heard = True
            self._heard_s = now
            if self._may_raise:
                raise KeyboardInterrupt
        elif now - self._heard_s > PATIENCE_S:
            os._exit(INTERRUPTED)


def caused_by_ctrl_c(error: BaseException) -> bool:
    """Whether Ctrl-C is the cause of an error, such as that of a library which was interrupted."""
    link: BaseException | None = error
    while link is not None:
        # an error of a callback in C++ has the name of its cause in its text only
        if isinstance(link, KeyboardInterrupt) or "KeyboardInterrupt" in str(link):
            return True
        link = link.__cause__ or link.__context__
    return False
