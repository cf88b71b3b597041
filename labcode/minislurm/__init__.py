"""A real multi-node SLURM on this machine: slurmctld, slurmd and munge, each node a host of its own in Linux namespaces.

    with Cluster.up(nodes=2) as cluster:
        print(cluster.exec(["srun", "-N2", "hostname"]).stdout)

`slurm/cluster up`, `exec`, `down` are the same on the command line. Nothing is simulated but the hardware: GPUs are files,
CPUs and memory are what slurm.conf says they are.
"""

from labcode.minislurm.cluster import Cluster, running
from labcode.minislurm.conf import Spec
from labcode.minislurm.needs import Unavailable

__all__ = ["Cluster", "Spec", "Unavailable", "running"]
