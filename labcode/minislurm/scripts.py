"""The shell scripts and the files in /etc that the hosts of a cluster share.

`init` is the first program on a host. `on HOST COMMAND...` runs a command there. Both are written
into the cluster's folder, so that they go on working while this package changes or moves.
"""

import contextlib
import os
import pwd
import shlex
from pathlib import Path

from labcode.minislurm.needs import PATH, rootless

_INIT = """\
#!/bin/sh
# The first program on a host: it sets the name, mounts the host's own files, and waits to be used.
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
# SLURM sets no CUDA_VISIBLE_DEVICES for a GPU that is a plain file: make each one a device.
for gpu in "$here"/gpu/*; do
    if [ -e "$gpu" ]; then mount --bind /dev/null "$gpu"; fi
done
: >"$here/$host/ready"
exec sleep infinity
"""

_ON = """\
#!/bin/sh
# on [--root] HOST COMMAND...: run a command on a host of this cluster, in the folder and with the
# environment of the caller, but without that of a job that the caller is in: sbatch and srun would
# take their options from it. It ends when this process ends.
# --root: as the owner of the host's network and mounts.
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
in_a_job='s/^((SLURMD?|SBATCH|SRUN|SALLOC|PMI[2X]?)_[A-Za-z0-9_]*)=.*/\\1/p'
for name in $(env | sed -nE "$in_a_job"); do unset "$name"; done
export PATH="${{PATH:+$PATH:}}"{path} SLURM_CONF={here}/etc/slurm.conf
# shellcheck disable=SC2086 # words on purpose
exec nsenter -t "$pid" {user} --net --uts --mount --ipc --pid \\
    env --chdir="$PWD" $inner tini -g -s -p SIGTERM -- "$@"
"""


def user_name() -> str:
    """The user that daemons and jobs run as; a user id without a name gets one."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return "learner"


def write_scripts(folder: Path) -> None:
    """Write `init`, `on` and the files to bind over those in /etc into a cluster's folder."""
    inner = ""
    user = ""
    if rootless():
        inner = f"unshare --user --map-user={os.geteuid()} --map-group={os.getegid()}"
        user = "--user --preserve-credentials"
    words = {
        "here": shlex.quote(str(folder)),
        "inner": shlex.quote(inner),
        "user": user,
        "path": PATH,
    }
    (folder / "init").write_text(_INIT.format(**words))
    (folder / "on").write_text(_ON.format(**words))
    (folder / "on").chmod(0o700)
    (folder / "etc/nsswitch.conf").write_text(_nsswitch())
    if not _has_name():
        # A container that was started with any user id; SLURM wants a name for it.
        entry = f"{user_name()}:x:{os.geteuid()}:{os.getegid()}::{Path.cwd()}:/bin/sh\n"
        (folder / "etc/passwd").write_text(Path("/etc/passwd").read_text() + entry)


def _has_name() -> bool:
    try:
        pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return True


def _nsswitch() -> str:
    """The machine's own nsswitch.conf, but names of hosts come from /etc/hosts alone."""
    lines = ["passwd: files", "group: files"]
    with contextlib.suppress(OSError):
        lines = Path("/etc/nsswitch.conf").read_text().splitlines()
    kept = [line for line in lines if line.partition(":")[0].strip() != "hosts"]
    return "\n".join([*kept, "hosts: files"]) + "\n"
