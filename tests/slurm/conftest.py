"""A real SLURM for the tests of a session, on this machine; skipped where it cannot be had."""

import contextlib
import os

import pytest

from labcode.minislurm import Cluster, Unavailable, needs
from labcode.minislurm.place import base
from labcode.minislurm.processes import alive


@pytest.fixture(scope="session")
def slurm():
    """`slurm(what)`: a cluster name that no other session uses; clusters that a killed session has left are removed."""
    try:
        needs.check()
    except Unavailable as error:
        pytest.skip(str(error))
    for folder in base().glob("test-*-*"):
        with contextlib.suppress(ValueError):
            if not alive(int(folder.name.split("-")[1])):
                Cluster(folder.name).down()
    return lambda what: f"test-{os.getpid()}-{what}"


@pytest.fixture(scope="session")
def cluster2(slurm):
    """A cluster of two nodes, each 4 CPUs and 2 emulated GPUs; whoever breaks a node repairs it."""
    with Cluster.up(nodes=2, name=slurm("two")) as cluster:
        yield cluster
