"""A real SLURM for the tests of a session, on this machine; skipped where it cannot be had."""

import contextlib
import os
from collections.abc import Callable, Iterator

import pytest

from labcode.minislurm import Cluster, Unavailable, needs
from labcode.minislurm.commands import alive
from labcode.minislurm.place import base


@pytest.fixture(scope="session")
def slurm() -> Callable[[str], str]:
    """`slurm(what)`: a cluster name that no other session uses.

    Clusters that a killed session has left behind are removed first.
    """
    try:
        needs.check()
    except Unavailable as error:
        pytest.skip(str(error))
    for folder in base().glob("test-*-*"):
        with contextlib.suppress(ValueError):
            owner = int(folder.name.split("-")[1])
            if not alive(owner):
                Cluster(folder.name).down()
    return lambda what: f"test-{os.getpid()}-{what}"


@pytest.fixture(scope="session")
def cluster2(slurm: Callable[[str], str]) -> Iterator[Cluster]:
    """The cluster that tests share: two nodes, each with 4 CPUs and 2 fake GPUs.

    A test leaves no job on it. A test that breaks something takes `breakable2` instead.
    """
    with Cluster.up(nodes=2, name=slurm("two")) as cluster:
        yield cluster


@pytest.fixture
def breakable2(cluster2: Cluster) -> Iterator[Cluster]:
    """`cluster2`, for a test that breaks it: whole again afterwards, however the test ends."""
    yield cluster2
    for node in cluster2.spec.names():
        cluster2.boot(node)
        cluster2.netup(node)
        cluster2.slow(node, "off")
        rules = cluster2.node(node, ["ip", "rule", "list"]).stdout
        for port in _closed_ports(rules):
            cluster2.unblock(node, port)


def _closed_ports(rules: str) -> list[str]:
    """The ports in lines such as `1: from all ipproto tcp sport 6818 blackhole`."""
    ports = []
    for line in rules.splitlines():
        words = line.split()
        if "blackhole" in words:
            ports.append(words[words.index("sport") + 1])
    return ports
