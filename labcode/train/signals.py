"""Signals that ask a run to stop: remembered, agreed on by all ranks, answered by a checkpoint."""

import signal
import threading
from typing import Any

SIGNALS = (signal.SIGUSR1, signal.SIGTERM)


class StopSignals:
    """Within it SIGUSR1 and SIGTERM are remembered instead of ending the process.

    They are how SLURM and torchrun announce the end. A signal may reach one rank only, and never
    all of them in the same step.
    """

    def __init__(self) -> None:
        self._heard = 0
        self._before: dict[int, Any] = {}

    def listen(self) -> None:
        """Begin to remember signals, until the process ends.

        A process that has done its work must not die of a signal that a job script repeats.
        """
        for number in SIGNALS:
            self._listen_to(number)

    def listen_where_ignored(self) -> None:
        """Begin to remember the signals that this process was started to ignore.

        Called before torch is imported. `labcode/slurm/script/hand_down.sh` starts ranks that way:
        a request that comes while they start must neither kill them nor be forgotten. Without it a
        signal ends a process that is still starting, at once.
        """
        for number in SIGNALS:
            if signal.getsignal(number) is signal.SIG_IGN:
                self._listen_to(number)

    def _listen_to(self, number: int) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        # Python lets only the main thread set a handler.
        if is_main and number not in self._before:
            self._before[number] = signal.signal(number, self._hear)

    def ignore(self) -> None:
        """Ignore the signals, because the process ends by itself now.

        While Python ends, it restores the default of each signal that it has handled, which is to
        kill; a signal that is ignored stays ignored.

        Held by: tests/ranks/test_checkpoint.py::test_a_signal_does_not_kill_a_rank_that_is_ending
        """
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)

    def __enter__(self) -> "StopSignals":
        self.listen()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Restore the handlers that were there before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, _frame: object) -> None:
        self._heard = number

    def agreed(self) -> str | None:
        """The name of a signal that any rank has heard, the same on all.

        Communicates: an all-reduce of one number, on the CPU.
        """
        import torch  # here: a rank listens before it spends seconds on importing torch
        import torch.distributed as dist

        heard = torch.tensor(self._heard)
        dist.all_reduce(heard, dist.ReduceOp.MAX)
        if heard.item() == 0:
            return None
        return signal.Signals(int(heard.item())).name
