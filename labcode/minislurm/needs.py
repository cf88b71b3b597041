"""What the cluster needs of this machine, checked before anything starts: Debian packages and Linux namespaces."""

import os
import shutil
import subprocess

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # an ordinary user's PATH may lack the sbin folders
PACKAGES = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "munged": "munge",
    "tini": "tini",
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "hostname": "hostname",
}
CLEAN = {"PATH": PATH, "LC_ALL": "C.UTF-8"}  # the environment of everything that outlives the call


class Unavailable(RuntimeError):
    """This machine cannot hold a cluster; the message says what is missing and how to get it."""


def rootless() -> bool:
    """Whether the hosts live in a user namespace, because the user is not root."""
    return os.geteuid() != 0


def namespaces() -> list[str]:
    """The `unshare` command that makes one host's namespaces, except the user namespace."""
    return [
        "unshare",
        "--net",
        "--uts",
        "--mount",
        "--ipc",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
    ]


def check() -> None:
    """Return if a cluster can be started here.

    Raises:
        Unavailable: Packages are missing, or the kernel refuses namespaces.
    """
    missing = sorted(
        {package for command, package in PACKAGES.items() if not shutil.which(command, path=PATH)}
    )
    if missing:
        raise Unavailable(
            f"the SLURM cluster needs {len(missing)} Debian packages that are not installed here: as root, run "
            f"apt-get install -y --no-install-recommends {' '.join(missing)}"
        )
    user = ["--user", "--map-root-user"] if rootless() else []
    trial = [*namespaces(), *user, "true"]
    done = subprocess.run(
        trial, env=CLEAN, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        advice = (
            "an ordinary user needs unprivileged user namespaces (Ubuntu 24.04: sysctl "
            "kernel.apparmor_restrict_unprivileged_userns=0); or run it as root"
            if rootless()
            else "in a container, it needs the capability SYS_ADMIN and an unmasked /proc"
        )
        found = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise Unavailable(f"this machine refuses Linux namespaces ({found}): {advice}")
