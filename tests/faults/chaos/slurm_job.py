"""A training on the nodes of a local SLURM cluster that is disturbed: there is a network to cut."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from labcode.minislurm.cluster import Cluster
from labcode.runtime import processes

from .. import waiting
from .job import RANK_WORDS, Job, age

FIRST_PORT = 20_000  # below it some are taken, above 32,768 Linux gives them away
NUM_PORTS = 10_000
NAME = "labcode-chaos"  # of the jobs in the queue
CANCEL_S = 60.0


class SlurmJob(Job):
    """A training that srun starts on all nodes of a cluster, the same number of ranks on each.

    If a rank fails srun ends the others, and it is for the user to give the command again.

    Args:
        args: Arguments of `python -m labcode.train`, without the folder.
        run: Folder of the run.
        work: Existing folder for the logs.
        nproc: Number of ranks, a multiple of the number of nodes.
        cluster: One that is up.
        limit_s: Time after which a job that should do something is stuck.
    """

    def __init__(
        self,
        args: Sequence[str],
        run: Path,
        work: Path,
        nproc: int,
        cluster: Cluster,
        limit_s: float,
    ) -> None:
        super().__init__(args, run, work, nproc, None, limit_s)
        self.cluster = cluster
        self.nodes = cluster.spec.names()
        self._out = f"--train.out={run}"
        self._rank = [sys.executable, *RANK_WORDS, *args, self._out]

    def _srun(self, port: int) -> list[str]:
        """The command line of an attempt whose ranks meet at this port of the first node."""
        variables = f"MASTER_ADDR={self.nodes[0]},MASTER_PORT={port},OMP_NUM_THREADS=1"
        return [
            "srun",
            f"--job-name={NAME}",
            f"--nodes={len(self.nodes)}",
            f"--ntasks={self.nproc}",
            f"--ntasks-per-node={self.nproc // len(self.nodes)}",
            "--kill-on-bad-exit=1",
            f"--export=ALL,{variables}",
        ]

    def start(self) -> None:
        """Give the command, on the head node."""
        port = FIRST_PORT + (os.getpid() + 100 * self.starts) % NUM_PORTS
        self.starts += 1
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                [*self.cluster.exec_prefix, *self._srun(port), *self._rank],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def ranks(self) -> list[psutil.Process]:
        """The ranks that live, on all nodes, in the order in which they were started.

        Their parents are daemons of SLURM, so that they are known by their command line.
        """
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                words = process.cmdline()
                is_rank = words[1:4] == RANK_WORDS and self._out in words
                if is_rank and processes.alive(process):
                    found.append(process)
        return sorted(found, key=age)

    def wait_until_gone(self, ranks: Sequence[psutil.Process]) -> None:
        """Return when these ranks have ended, and the srun that does not start others."""
        super().wait_until_gone(ranks)
        self.wait(lambda: not self.runs)

    def cut(self, node: int) -> None:
        """Pull the network cable of a node, until no rank is left; return when srun has ended."""
        name = self.nodes[node % len(self.nodes)]
        ranks = self.ranks()
        self.cluster.netdown(name)
        try:
            super().wait_until_gone(ranks)
        finally:
            self.cluster.netup(name)
        waiting.comes(lambda: not self.runs, CANCEL_S)
        self.end()

    def end(self) -> None:
        """End everything, also what a srun that was killed would leave in the queue."""
        super().end()
        self.cluster.exec(["scancel", f"--name={NAME}"], check=False)
        for rank in self.ranks():
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.kill()
        self.cluster.exec(["scancel", "--signal=KILL", f"--name={NAME}"], check=False)
