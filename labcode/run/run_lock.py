"""One run in a folder: a lock that the kernel releases when its holder dies, however it dies."""

import fcntl
import os
import socket
import time
from pathlib import Path
from typing import TextIO

from labcode.runtime import bootstrap
from labcode.runtime.files import LOCK_NAME

WAIT_S = 10.0  # the attempt of a job before this one may still be about to end
LOOK_S = 0.2


class RunLock:
    """Holds a folder for this process, from `take` to `release`.

    Attributes:
        text: Who holds it, as written into the file; not the same for any two holders.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK_NAME
        self.text = ""
        self._file: TextIO | None = None

    def take(self, wait_s: float | None = None) -> None:
        """Wait until nobody else holds the folder.

        Args:
            wait_s: Seconds to wait for it; None: `WAIT_S`.

        Raises:
            ValueError: Somebody else holds it.
            OSError: Nothing can be written there.
        """
        deadline = time.monotonic() + (WAIT_S if wait_s is None else wait_s)
        while not self._try_to_take():
            if time.monotonic() > deadline:
                holder = self.path.read_text(errors="replace").strip() or "another process"
                raise ValueError(
                    f"{self.path.parent} is in use by {holder}: "
                    "wait until it has ended, or choose another train.out"
                )
            time.sleep(LOOK_S)
        self._sign()

    def _try_to_take(self) -> bool:
        file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 (open while it is held)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return False
        except OSError:
            pass  # some network disks know no locks: then go on without
        # the holder before this one may have removed the file after it was opened here
        if not self._is_at_path(file):
            file.close()
            return False
        self._file = file
        return True

    def _is_at_path(self, file: TextIO) -> bool:
        try:
            return os.path.samestat(os.fstat(file.fileno()), self.path.stat())
        except FileNotFoundError:
            return False

    def _sign(self) -> None:
        assert self._file is not None
        job = bootstrap.job_id()
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        self.text = f"process {os.getpid()} on {socket.gethostname()}"
        if job:
            self.text += f", job {job}"
        self.text += f", since {since}"
        self._file.truncate(0)
        self._file.write(self.text)
        self._file.flush()
        os.fsync(self._file.fileno())  # other nodes read it

    def moved(self, folder: Path) -> None:
        """Note that the folder has another name now; it is held as before."""
        self.path = folder / LOCK_NAME

    def release(self) -> None:
        """Remove the file and let others in; nothing happens if this process holds nothing."""
        if self._file is None:
            return
        if self._is_at_path(self._file):
            self.path.unlink()
        self._file.close()
        self._file = None
