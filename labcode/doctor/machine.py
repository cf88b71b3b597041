"""Checks of the machine: SLURM, ports, names, shared memory, the disk that runs are written to.

Each tries the thing itself: it asks, binds, resolves, writes.

Held by: tests/unit/test_doctor_installation.py
"""

import contextlib
import errno
import ipaddress
import os
import shutil
import socket
import tempfile
from pathlib import Path

from labcode.doctor.checked import Checked, right, warning, wrong
from labcode.runtime import units
from labcode.slurm.run.client import Client, SlurmError

# Where the ranks of several nodes meet unless torchrun is told another port. On one node it takes a
# free one: with --standalone, and in PyTorch 2.13 without it (torch/distributed/run.py, `run`).
TORCHRUN_PORT = 29500
ANSWER_S = 5.0
LEAST_SHARED_BYTES = 16 * units.MIB
AMPLE_SHARED_BYTES = units.GIB  # a container of Docker has 64 MiB
LEAST_DISK_BYTES = 256 * units.MIB
AMPLE_DISK_BYTES = 2 * units.GIB
WRITTEN_BYTES = units.MIB


# ---- SLURM


def find_cluster() -> Client | SlurmError | None:
    """The SLURM cluster that this machine belongs to; the error of one that does not answer."""
    try:
        return Client.own()
    except SlurmError as error:
        return error


def check_slurm(cluster: Client | SlurmError | None) -> Checked:
    """SLURM's commands are here and a controller answers; without, jobs run on this machine.

    Args:
        cluster: Cluster as `find_cluster` returns it.
    """
    commands = [name for name in ("sinfo", "sbatch") if shutil.which(name)]
    if not commands:
        return right("slurm", "no sinfo, no sbatch: labcode.slurm submit runs jobs here")
    if len(commands) == 1:
        (missing,) = {"sinfo", "sbatch"} - set(commands)
        cure = "install the package slurm-client, or put its folder into PATH"
        return warning("slurm", f"{commands[0]} is here, {missing} is not", cure)
    if cluster is None:
        return right("slurm", "sinfo and sbatch are here, but no cluster (slurm/cluster up 2)")
    if isinstance(cluster, SlurmError):
        return wrong("slurm", str(cluster), "try again in a moment, then ask who runs the cluster")
    version = cluster.call("sinfo", "--version").strip()
    return right("slurm", f"{version}, {cluster.where}")


# ---- network


def check_ports(host: str = "localhost") -> Checked:
    """A free port of this machine can be bound, and reached from here.

    Args:
        host: Name or address to bind at.
    """
    try:
        with socket.create_server((host, 0)) as server:
            server.settimeout(ANSWER_S)
            port = server.getsockname()[1]
            with socket.create_connection((host, port), timeout=ANSWER_S) as client:
                accepted, _ = server.accept()
                with accepted:
                    accepted.sendall(b"x")
                    client.recv(1)
    except OSError as error:
        cure = "ranks of one machine meet there: look at /etc/hosts, at `ip address`, at firewalls"
        return wrong("ports", f"{host} cannot be reached: {_reason(error)}", cure)
    return right("ports", f"a free port of {host} was bound and reached")


def check_master_port(several_nodes: bool, port: int = TORCHRUN_PORT) -> Checked:
    """The port at which torchrun lets several nodes meet by default is free.

    Args:
        several_nodes: Whether jobs of several nodes run here; one node needs no fixed port.
        port: Number of the port.
    """
    name = "torchrun's port"
    try:
        with socket.create_server(("", port)):
            return right(name, f"{port} is free")
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        found = f"somebody listens at {port}" if taken else f"{port}: {_reason(error)}"
    if several_nodes:
        cure = "give torchrun another: --master-port, or the port of --rdzv-endpoint"
        return warning(name, f"{found}, where the ranks of several nodes meet by default", cure)
    return right(name, f"{found}: no matter on one machine, torchrun --standalone takes a free one")


def check_host_name(name: str, several_nodes: bool) -> Checked:
    """The name that a job would take as MASTER_ADDR leads to this machine, for others too.

    Args:
        name: Name of this host.
        several_nodes: Whether jobs of several nodes run here, to which loopback is no help.
    """
    set_it = "set MASTER_ADDR and GLOO_SOCKET_IFNAME by hand"
    try:
        answers = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        cure = f"add it to /etc/hosts, or {set_it}"
        return warning("host name", f"{name} does not resolve: {_reason(error)}", cure)
    family, _, _, _, address = answers[0]
    host = str(address[0])
    if ipaddress.ip_address(host.partition("%")[0]).is_loopback:
        found = f"MASTER_ADDR={name} is {host}, loopback"
        if several_nodes:
            return warning("host name", f"{found}, which other nodes cannot reach", set_it)
        return right("host name", f"{found}: enough for one machine, not for several")
    try:
        with socket.socket(family) as own:
            own.bind(address)
    except OSError:
        found = f"{name} resolves to {host}, which is no address of this machine"
        return warning("host name", found, f"correct /etc/hosts or DNS, or {set_it}")
    return right("host name", f"MASTER_ADDR={name} is {host}")


# ---- memory and disk


def check_shared_memory(folder: Path = Path("/dev/shm")) -> Checked:
    """There is shared memory for DataLoader workers, NCCL and the ranks' semaphores.

    Args:
        folder: Folder where the system has it.
    """
    name = "shared memory"
    cure = "docker run --shm-size=8g or --ipc=host; else remove what processes have left there"
    if not folder.is_dir():
        return right(name, f"this system has no {folder}")
    usage = shutil.disk_usage(folder)
    size = f"{units.binary_bytes(usage.free)} of {units.binary_bytes(usage.total)} free"
    trouble = _write(folder)
    if trouble or usage.free < LEAST_SHARED_BYTES:
        return wrong(name, f"{folder}: {trouble or size}", cure)
    if usage.free < AMPLE_SHARED_BYTES:
        return warning(name, f"{folder} has only {size}", cure)
    return right(name, f"{folder}, {size}")


def check_output(folder: Path) -> Checked:
    """Runs can be written, and there is room for them.

    Args:
        folder: Folder of the runs; it may not exist yet.
    """
    existing = Path(os.path.abspath(folder))
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    cure = "choose another folder with --train.out, or start in another one"
    if not existing.is_dir():
        return wrong("disk", f"{existing} is a file, and runs would go into {folder}", cure)
    trouble = _write(existing)
    if trouble:
        return wrong("disk", f"{folder} cannot be written: {trouble}", cure)
    free_bytes = shutil.disk_usage(existing).free
    found = f"{units.binary_bytes(free_bytes)} free for {folder}"
    if free_bytes < LEAST_DISK_BYTES:
        return wrong("disk", found, f"make room, or {cure}")
    if free_bytes < AMPLE_DISK_BYTES:
        return warning("disk", found, "checkpoints need some: make room")
    return right("disk", f"{found}, written and read back")


def _write(folder: Path) -> str:
    """Write a file, read it back and remove it; returns what went wrong, "" if nothing did."""
    written = os.urandom(WRITTEN_BYTES)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(written)
            file.flush()
            with contextlib.suppress(OSError):  # not every kind of file system has it
                os.fsync(file.fileno())
            file.seek(0)
            return "" if file.read() == written else "what was written is not what is read"
    except OSError as error:
        return _reason(error)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error)
