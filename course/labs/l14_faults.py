"""Lesson 14: three faults of a cluster, made and undone.

Each is a context manager of the lab's cluster; `FAULTS` names them.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from labcode.minislurm import Cluster
from labcode.runtime.files import write_atomically

CLOSED_PORTS = "20000-29999"


@contextlib.contextmanager
def own_name_is_local(cluster: Cluster) -> Iterator[None]:
    """Each node finds its own name at 127.0.1.1, as Debian's installer writes it to /etc/hosts."""
    files = {node: cluster.folder / node / "hosts" for node in cluster.spec.names()}
    before = {node: file.read_text() for node, file in files.items()}
    for node, file in files.items():
        # Written in place: the file is bound over the node's /etc/hosts, and a new one would not be
        file.write_text(f"127.0.1.1 {node}\n{before[node]}")
    try:
        yield
    finally:
        for node, file in files.items():
            file.write_text(before[node])


@contextlib.contextmanager
def closed_ports(cluster: Cluster) -> Iterator[None]:
    """n1 answers on no port from 20000 to 29999."""
    cluster.block("n1", CLOSED_PORTS)
    try:
        yield
    finally:
        cluster.unblock("n1", CLOSED_PORTS)


@contextlib.contextmanager
def other_code(cluster: Cluster) -> Iterator[None]:
    """n2 has another runs/hello.py, of 96 numbers."""
    program = Path("runs/hello.py").resolve()
    other = Path("runs/hello-old.py").resolve()
    text = program.read_text().replace("HIDDEN = 64", "HIDDEN = 96")
    write_atomically(other, text.encode())
    mount = ["mount", "--bind", str(other), str(program)]
    cluster.exec(mount, node="n2", root=True)
    try:
        yield
    finally:
        cluster.exec(["umount", str(program)], node="n2", root=True)


FAULTS: dict[str, Callable[[Cluster], AbstractContextManager[None]]] = {
    "name": own_name_is_local,
    "port": closed_ports,
    "code": other_code,
}
