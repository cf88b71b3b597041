"""The hosts of a cluster: each its own network, hostname, process table, mounts and /dev/shm, in Linux namespaces.

A host is one `unshare` whose child, pid 1 of the host, is tini. When pid 1 dies the kernel ends everything on the host and
takes its mounts and interfaces away: a power cut. As an ordinary user all hosts live in one user namespace, where the user
is root for networks and mounts; daemons and jobs run one user namespace further in, as the user again.
"""

import contextlib
import os
import pwd
import re
import shlex
import signal
import subprocess
from pathlib import Path

from labcode.minislurm.needs import CLEAN, PATH, namespaces, rootless
from labcode.minislurm.processes import alive, parents, wait

_INIT = """\
#!/bin/sh
# The first program on a host: its name, its own files, then it waits to be used.
set -eu
here={here}
host=$1
hostname "$host"
mount --bind "$here/$host/hosts" /etc/hosts
mount --bind "$here/etc/nsswitch.conf" /etc/nsswitch.conf
if [ -e "$here/etc/passwd" ]; then mount --bind "$here/etc/passwd" /etc/passwd; fi
if [ -d /etc/slurm ]; then mount --bind "$here/etc" /etc/slurm; fi
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
groups="$here/$host/cgroup"
mkdir -p "$groups"
mount --rbind /sys/fs/cgroup "$groups" # slurmd looks there, although nothing is limited by it
if mount -t sysfs sysfs /sys 2>/dev/null; then # so that /sys/class/net shows this host's interfaces
    mount --rbind "$groups" /sys/fs/cgroup
fi
for gpu in "$here"/gpu/*; do
    if [ -e "$gpu" ]; then mount --bind /dev/null "$gpu"; fi # for a plain file SLURM sets no CUDA_VISIBLE_DEVICES
done
: >"$here/$host/ready"
exec sleep infinity
"""

_ON = """\
#!/bin/sh
# on HOST COMMAND...: run a command on a host of this cluster, in the folder and with the environment of the caller.
# It ends when this process ends. `--root` in front: as the owner of the host's network and mounts.
inner={inner}
if [ "$1" = --root ]; then inner=""; shift; fi
host=$1
shift
pid="" network=""
[ -e {here}/"$host"/pid ] && read -r pid network <{here}/"$host"/pid
if [ -z "$pid" ] || [ "$(readlink "/proc/$pid/ns/net")" != "$network" ]; then
    echo "$host is powered off, or there is no such host in this cluster" >&2
    exit 69
fi
export PATH="${{PATH:+$PATH:}}"{path} SLURM_CONF={here}/etc/slurm.conf
# shellcheck disable=SC2086 # words on purpose
exec nsenter -t "$pid" {user} --net --uts --mount --ipc --pid \\
    env --chdir="$PWD" $inner tini -g -s -p SIGTERM -- "$@"
"""


def user_name() -> str:
    """The user that daemons and jobs run as; one without a name gets one."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return "learner"


def write_scripts(folder: Path) -> None:
    """Write what hosts need to start and to be entered: `init`, `on`, and the files bound over those in /etc."""
    inner = (
        f"unshare --user --map-user={os.geteuid()} --map-group={os.getegid()}" if rootless() else ""
    )
    user = "--user --preserve-credentials" if rootless() else ""
    words = {
        "here": shlex.quote(str(folder)),
        "inner": shlex.quote(inner),
        "user": user,
        "path": PATH,
    }
    (folder / "init").write_text(_INIT.format(**words))
    (folder / "on").write_text(_ON.format(**words))
    (folder / "on").chmod(0o700)
    lookups = ["passwd: files", "group: files", "hosts: files"]
    with contextlib.suppress(OSError):
        lines = Path("/etc/nsswitch.conf").read_text().splitlines()
        lookups = [line for line in lines if line.partition(":")[0].strip() != "hosts"] + [
            "hosts: files"
        ]
    (folder / "etc/nsswitch.conf").write_text("\n".join(lookups) + "\n")
    try:
        pwd.getpwuid(os.geteuid())
    except KeyError:  # a container started with any uid; SLURM wants a name
        entry = f"{user_name()}:x:{os.geteuid()}:{os.getegid()}::{Path.cwd()}:/bin/sh\n"
        (folder / "etc/passwd").write_text(Path("/etc/passwd").read_text() + entry)


class Host:
    """One host of a cluster: on or off.

    Args:
        folder: The cluster's folder; the host's files are in `folder/name`.
        name: "head", "n1", "n2", ...
    """

    def __init__(self, folder: Path, name: str):
        self.cluster, self.name, self.folder = folder, name, folder / name

    @property
    def pid(self) -> int | None:
        """Process id of the host's pid 1, as seen from outside; None while the host is off."""
        with contextlib.suppress(OSError, ValueError):
            pid, network = (self.folder / "pid").read_text().split()
            if (
                os.readlink(f"/proc/{pid}/ns/net") == network
            ):  # not a later process of the same number
                return int(pid)
        return None

    def start(self, hosts: str, inside: int | None = None) -> None:
        """Power on, with files as new; returns before the host is ready.

        Args:
            hosts: Text of its /etc/hosts.
            inside: Without root: pid 1 of the head, whose user namespace the host joins; None for the head itself.
        """
        self.folder.mkdir(mode=0o700, exist_ok=True)
        for old in ("pid", "ready"):
            (self.folder / old).unlink(missing_ok=True)
        (self.folder / "hosts").write_text(hosts)
        command = namespaces()
        if rootless() and inside is None:
            command += ["--user", "--map-root-user"]
        elif rootless():
            command = ["nsenter", "-t", str(inside), "--user", "--preserve-credentials", *command]
        first = [*command, "tini", "-g", "--", "/bin/sh", str(self.cluster / "init"), self.name]
        # The pid is on record before anything else: `down` finds a host that was started a moment before a kill.
        keep = ["/bin/sh", "-c", 'echo $$ >"$0"; exec "$@"', str(self.folder / "outer"), *first]
        with open(self.folder / "log", "ab") as log:
            subprocess.Popen(
                ["setsid", "--fork", *keep],
                env=CLEAN,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            ).wait()

    def wait_ready(self) -> None:
        """Return when the host's own files are in place, with its pid on record."""
        outer = self.folder / "outer"
        log = self.folder / "log"

        def why():
            said = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
            return f"host {self.name} did not start: {said[-1] if said else 'no reason given'} (see {log})"

        wait(lambda: outer.exists() and outer.read_text().endswith("\n"), 20, why)
        pid = int(outer.read_text())
        wait((self.folder / "ready").exists, 30, why)
        child = next((child for child, parent in parents().items() if parent == pid), None)
        if child is None:
            raise RuntimeError(why())
        (self.folder / "pid").write_text(f"{child} {os.readlink(f'/proc/{child}/ns/net')}\n")

    def stop(self) -> None:
        """Cut the power: pid 1 is killed, and everything on the host with it. Fine for a host that is off."""
        pids = [self.pid, *(pid for pid, name in outers(self.cluster).items() if name == self.name)]
        pids = [pid for pid in pids if pid]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait(
            lambda: not any(map(alive, pids)),
            30,
            lambda: f"host {self.name} does not end: its processes are {pids}",
        )
        for old in ("pid", "outer", "ready"):
            (self.folder / old).unlink(missing_ok=True)

    def command(self, argv, root: bool = False) -> list[str]:
        """The command line that runs `argv` on this host, from any process of this user."""
        return [
            "/bin/sh",
            str(self.cluster / "on"),
            *(["--root"] if root else []),
            self.name,
            *map(str, argv),
        ]

    def call(self, argv, root: bool = False, timeout_s: float = 60.0) -> str:
        """Run a short command there in a clean environment, output into the host's log if it fails.

        Raises:
            RuntimeError: It failed; its last line is in the message.
        """
        with open(self.folder / "log", "ab") as log:
            start = log.tell()
            done = subprocess.run(
                self.command(argv, root),
                env=CLEAN,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                timeout=timeout_s,
            )
        if done.returncode:
            said = (
                (self.folder / "log")
                .read_bytes()[start:]
                .decode(errors="replace")
                .strip()
                .splitlines()
            )
            raise RuntimeError(
                f"{argv[0]} on {self.name}: {said[-1] if said else f'exit code {done.returncode}'}"
            )


def outers(folder: Path) -> dict[int, str]:
    """The `unshare` processes of a cluster and whose host each is, by their command line: also those no file knows of."""
    found, init = {}, os.fsencode(folder / "init")
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = file.read_bytes().split(b"\0")[:-1]
            if init in words[-2:-1] and file.stat().st_uid == os.geteuid():
                found[int(file.parent.name)] = words[-1].decode(errors="replace")
    return found


def hosts_of(folder: Path) -> list[str]:
    """The hosts of a cluster, half-started ones as well; the head last: without root it holds the nodes' user namespace."""
    names = {path.name for path in folder.glob("*") if re.fullmatch(r"head|n\d+", path.name)}
    return sorted(names | set(outers(folder).values()), reverse=True)
