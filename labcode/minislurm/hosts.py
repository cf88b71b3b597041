"""The hosts of a cluster: each has its own network, hostname, processes, mounts and /dev/shm.

A host is one `unshare` whose child, process 1 of the host, is tini. When process 1 dies, the kernel
ends everything on the host and takes its mounts and interfaces away: a power cut.

Without root, all hosts live in one user namespace, in which the user is root for networks and
mounts. Daemons and jobs run in another user namespace inside it, as the user again: slurmctld
refuses to run as root of a user namespace.
"""

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from labcode.minislurm.commands import alive, children, wait
from labcode.minislurm.needs import CLEAN, namespaces, rootless

_TRIES = 1000  # for a second: the process at work may be kept waiting, or has emptied it
_POLL_S = 0.001
_RECORD_PID = 'echo $$ >"$0"; exec "$@"'


class Host:
    """One host of a cluster: on or off.

    Args:
        folder: The cluster's folder; the host's files are in `folder/name`.
        name: "head", "n1", "n2", ...
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.cluster = folder
        self.name = name
        self.folder = folder / name
        self.log = self.folder / "log"

    @property
    def pid(self) -> int | None:
        """Process 1 of the host, as this machine numbers it; None while the host is off."""
        with contextlib.suppress(OSError, ValueError):
            pid, network = (self.folder / "pid").read_text().split()
            # The number may have been given to another process since.
            if _network_of(int(pid)) == network:
                return int(pid)
        return None

    def start(self, hosts: str, inside: int | None = None) -> None:
        """Power on, with files as new; returns before the host is ready.

        Args:
            hosts: Text of its /etc/hosts.
            inside: Without root: process 1 of the head, whose user namespace the host joins; None
                for the head itself.
        """
        self.folder.mkdir(mode=0o700, exist_ok=True)
        self._remove("pid", "ready")
        (self.folder / "hosts").write_text(hosts)
        command = namespaces()
        if rootless() and inside is None:
            command += ["--user", "--map-root-user"]
        elif rootless():
            command = ["nsenter", "-t", str(inside), "--user", "--preserve-credentials", *command]
        command += ["tini", "-g", "--", "/bin/sh", str(self.cluster / "init"), self.name]
        # The pid is on record before anything else happens: `down` must find this host even if
        # `up` is killed right here.
        outer = str(self.folder / "outer")
        with open(self.log, "ab") as log:
            subprocess.run(
                ["setsid", "--fork", "/bin/sh", "-c", _RECORD_PID, outer, *command],
                env=CLEAN,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def wait_ready(self) -> None:
        """Return when the host's own files are in place, with its pid on record.

        Raises:
            RuntimeError: It did not start; the message quotes its log.
        """
        outer = self.folder / "outer"

        def has_outer() -> bool:
            # A file without its line break is one that is still being written.
            return outer.exists() and outer.read_text().endswith("\n")

        wait(has_outer, 20, self._why_not_ready)
        wait((self.folder / "ready").exists, 30, self._why_not_ready)
        first = children(int(outer.read_text()))
        if not first:
            raise RuntimeError(self._why_not_ready())
        pid = first[0].pid
        (self.folder / "pid").write_text(f"{pid} {_network_of(pid)}\n")

    def _why_not_ready(self) -> str:
        said = self.log.read_text(errors="replace").strip() if self.log.exists() else ""
        reason = said.splitlines()[-1] if said else "no reason given"
        return f"host {self.name} did not start: {reason} (see {self.log})"

    def stop(self) -> None:
        """Cut the power: everything on the host ends. Fine for a host that is off."""
        pids = self._pids()
        while pids:  # one that was being started meanwhile is found when we look again
            self._kill(pids)
            pids = self._pids()
        self._remove("pid", "outer", "ready")

    def _pids(self) -> list[int]:
        """Its `unshare`, process 1 and what comes between them."""
        pids = [pid for pid, name in outers(self.cluster).items() if name == self.name]
        if self.pid:
            pids.append(self.pid)
        return [pid for pid in pids if alive(pid)]

    def _kill(self, pids: Sequence[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

        def all_ended() -> bool:
            return not any(alive(pid) for pid in pids)

        def why_not() -> str:
            return f"host {self.name} does not end: its processes are {pids}"

        wait(all_ended, 30, why_not)

    def _remove(self, *files: str) -> None:
        for file in files:
            (self.folder / file).unlink(missing_ok=True)

    def command(self, argv: Sequence[object], root: bool = False) -> list[str]:
        """The command line that runs `argv` on this host, from any process of this user."""
        option = ["--root"] if root else []
        return ["/bin/sh", str(self.cluster / "on"), *option, self.name, *map(str, argv)]

    def call(self, argv: Sequence[object], timeout_s: float = 60.0) -> None:
        """Run a short command there in a clean environment, with its output in the host's log.

        Raises:
            RuntimeError: It failed; the line of its output that tells why is in the message.
        """
        # Into a file, not a pipe: a daemon that goes to the background would keep a pipe open.
        with open(self.log, "ab") as log:
            start = log.tell()
            done = subprocess.run(
                self.command(argv),
                env=CLEAN,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                timeout=timeout_s,
            )
        if done.returncode:
            said = self.log.read_bytes()[start:].decode(errors="replace").strip()
            reason = telling_line(said) or f"exit code {done.returncode}"
            raise RuntimeError(f"{argv[0]} on {self.name}: {reason}")


def telling_line(said: str) -> str:
    """The line of a daemon's output that tells why it ended; "" if there is none."""
    lines = said.strip().splitlines()
    errors = [line for line in lines if "error" in line or "fatal" in line] or lines
    if len(errors) > 1 and "Unable to process configuration" in errors[-1]:
        return errors[-2]  # which says what is wrong with it
    return errors[-1] if errors else ""


def _network_of(pid: int) -> str:
    """The network namespace of a process: "net:[4026531840]"."""
    return os.readlink(f"/proc/{pid}/ns/net")


def outers(folder: Path) -> dict[int, str]:
    """`{pid of an unshare process of a cluster: name of its host}`.

    They are known by their command line, `... init NAME`, and so are found even if no file names
    them any more.
    """
    found = {}
    init = os.fsencode(folder / "init")
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if process.stat().st_uid != os.geteuid():
                continue
            words = _command_line(process)
            if init in words[-2:-1]:
                found[int(process.name)] = words[-1].decode(errors="replace")
    return found


def _command_line(process: Path) -> list[bytes]:
    """The words of a process in /proc.

    While it becomes another program it has none for a moment, and a host would be overlooked; so it
    is asked again. Threads of the kernel, which never have any, have no program either.

    Raises:
        OSError: It has ended, or has no program.
    """
    for _ in range(_TRIES):
        words = (process / "cmdline").read_bytes().split(b"\0")[:-1]
        if words:
            return words
        os.readlink(process / "exe")
        time.sleep(_POLL_S)
    return []


def hosts_of(folder: Path) -> list[str]:
    """The hosts of a cluster, half-started ones as well.

    The head comes last: without root it holds the user namespace of the nodes.
    """
    names = {path.name for path in folder.glob("*") if re.fullmatch(r"head|n\d+", path.name)}
    names |= set(outers(folder).values())
    return sorted(names, reverse=True)
