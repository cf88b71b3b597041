"""What a cluster needs of this machine, checked before anything starts."""

import os
import shutil
import subprocess

# An ordinary user's PATH may lack the sbin folders.
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CLEAN = {"PATH": PATH, "LC_ALL": "C.UTF-8"}  # the environment of everything that outlives the call
# Each command that is used, and the Debian package that has it.
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


class Unavailable(RuntimeError):
    """This machine cannot hold a cluster; the message says what is missing and how to get it."""


def rootless() -> bool:
    """Whether the hosts live in a user namespace, because the user is not root."""
    return os.geteuid() != 0


def namespaces() -> list[str]:
    """The `unshare` command that makes one host's namespaces, except the user namespace."""
    kinds = ["--net", "--uts", "--mount", "--ipc", "--pid"]
    return ["unshare", *kinds, "--fork", "--kill-child", "--mount-proc"]


def check() -> None:
    """Return if a cluster can be started here.

    Raises:
        Unavailable: Packages are missing, or the kernel refuses namespaces.
    """
    _check_packages()
    _check_namespaces()


def _check_packages() -> None:
    missing = set()
    for command, package in PACKAGES.items():
        if not shutil.which(command, path=PATH):
            missing.add(package)
    if missing:
        raise Unavailable(
            f"the SLURM cluster needs {len(missing)} Debian packages that are not installed here: "
            "as root, run apt-get install -y --no-install-recommends " + " ".join(sorted(missing))
        )


def _check_namespaces() -> None:
    user = ["--user", "--map-root-user"] if rootless() else []
    done = subprocess.run(
        [*namespaces(), *user, "true"],
        env=CLEAN,
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode == 0:
        return
    if rootless():
        advice = (
            "an ordinary user needs unprivileged user namespaces (Ubuntu 24.04: sysctl "
            "kernel.apparmor_restrict_unprivileged_userns=0); or run it as root"
        )
    else:
        advice = "in a container, it needs the capability SYS_ADMIN and an unmasked /proc"
    said = done.stderr.strip() or f"exit code {done.returncode}"
    reason = said.splitlines()[-1]
    raise Unavailable(f"this machine refuses Linux namespaces ({reason}): {advice}")
