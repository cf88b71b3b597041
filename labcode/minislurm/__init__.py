"""A real multi-node SLURM on this machine; see README.md beside this file.

    with Cluster.up(nodes=2) as cluster:
        print(cluster.exec(["srun", "-N2", "hostname"]).stdout)

`slurm/cluster up`, `exec`, `down` do the same on the command line. slurmctld, slurmd and munge are
real, and each node is a host of its own in Linux namespaces. Only the hardware is emulated: GPUs
are files, and CPUs and memory are what slurm.conf says they are.

    spec        what a cluster looks like: nodes, CPUs, memory, GPUs, partitions
    conf        the text of slurm.conf, gres.conf, job_submit.lua and /etc/hosts
    needs       the packages and kernel features that must be there
    place       the folder of a user's clusters, and a lock for each
    commands    run a command to its end, wait for a condition
    scripts     the first program on a host, and the way to run a command there
    hosts       a host: start, stop, run a command
    network     bridge, cables, slow links, closed ports
    cluster     all of it together
    cli         the command line
"""

from labcode.minislurm.cluster import Cluster, names_up, running
from labcode.minislurm.needs import Unavailable
from labcode.minislurm.spec import Spec

__all__ = ["Cluster", "Spec", "Unavailable", "names_up", "running"]
