"""Which rank is slow: the time of its own work, beside that of the ranks that do the same.

All ranks wait for the slowest one, so that the time of a step is the same for all of them. What
differs is the time in which a rank reads its samples and goes forward: nothing in that waits for
another rank of dp. The clock of the step has it (`ranges`), and at each line of the log it is
compared within its dp group, whose ranks have the same work.

What it cannot see: with dp = 1 nobody has the same work. Ranks of one replica (tp, cp, pp) wait for
each other while they compute, so that a slow one makes all of its replica late, and all are named.
Where ZeRO divides the weights themselves (stage 3, and stage 2 of PyTorch's FSDP2) the forward
waits for the others: only the reading of samples is compared.
"""

import socket
import statistics
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from labcode.comm.grid import Grid

IN_A_ROW = 3  # intervals of the log in which a rank must be slow before it is named
LEAST_S = 0.05  # a step: less than that between two ranks is not worth a line


class SlowRanks:
    """Names a rank that has been slow for some intervals of the log, once.

    Args:
        groups: The ranks of each dp group: those with the same work.
        hosts: The node of each rank.
        factor: A rank is slow if it takes more than this many times the median of the others.
        work: What is compared, in words.

    Held by: tests/unit/test_slow.py
    """

    def __init__(
        self,
        groups: Sequence[Sequence[int]],
        hosts: Sequence[str],
        factor: float,
        work: str = "reading and forward",
    ) -> None:
        self.groups = groups
        self.hosts = hosts
        self.factor = factor
        self.work = work
        self._in_a_row = [0] * len(hosts)

    def look(self, work_s: Sequence[float]) -> list[str]:
        """A line for each rank that has just become known as slow.

        Args:
            work_s: Seconds a step of each rank.
        """
        lines = []
        for group in self.groups:
            for rank in group:
                others = [work_s[other] for other in group if other != rank]
                if not others:
                    continue
                median_s = statistics.median(others)
                excess_s = work_s[rank] - median_s
                is_slow = excess_s > LEAST_S and work_s[rank] > self.factor * median_s
                self._in_a_row[rank] = self._in_a_row[rank] + 1 if is_slow else 0
                if self._in_a_row[rank] == IN_A_ROW:
                    lines.append(self._line(rank, work_s[rank], median_s))
        return lines

    def _line(self, rank: int, own_s: float, median_s: float) -> str:
        times = f"{own_s / median_s:.1f} times slower" if median_s else "slower"
        return (
            f"rank {rank} on {self.hosts[rank]} is {times} than the median of the ranks with the "
            f"same work ({self.work} {own_s:.2f} s a step against {median_s:.2f} s)"
        )


class SlowRankWatch:
    """One rank's part in finding a slow one. Every rank calls the same methods.

    Args:
        grid: The process groups.
        factor: As for `SlowRanks`.
        forward_waits: Whether the forward waits for other ranks of dp: only reading is compared.

    Held by: tests/ranks/test_slow_rank.py
    """

    def __init__(self, grid: Grid, factor: float, forward_waits: bool) -> None:
        self._parts = ["data"] if forward_waits else ["data", "forward"]
        self._work = "reading samples" if forward_waits else "reading and forward"
        self._groups = grid.shape.groups("dp")
        self._factor = factor
        self._slow: SlowRanks | None = None

    def look(self, parts_s: Mapping[str, float]) -> list[str]:
        """Compare the ranks; the lines to be said, the same on all of them.

        Communicates: an all-gather of one number, on the CPU; the first time of host names, too.

        Args:
            parts_s: Seconds a step of its parts on this rank, as `StepRanges.take` has them.
        """
        size = dist.get_world_size()
        if self._slow is None:
            hosts: list[str] = [""] * size
            dist.all_gather_object(hosts, socket.gethostname())
            self._slow = SlowRanks(self._groups, hosts, self._factor, self._work)
        work_s = sum(parts_s.get(part, 0.0) for part in self._parts)
        own = torch.tensor([work_s], dtype=torch.float64)
        gathered = [torch.empty_like(own) for _ in range(size)]
        dist.all_gather(gathered, own)
        return self._slow.look([value.item() for value in gathered])
