"""Which rank is slow: the time of its own work, beside that of the ranks that do the same.

All ranks wait for the slowest one, so that the time of a step is the same for all of them. What
differs is the time until a rank has its first gradient: it reads its samples and goes forward, and
nothing in that waits for another rank of dp. Each rank notes this time, and at each line of the
log it is compared within its dp group, whose ranks have the same work.

What it cannot see: with dp = 1 nobody has the same work. Ranks of one replica (tp, cp, pp) wait for
each other while they compute, so that a slow one makes all of its replica late, and all are named.
Where ZeRO divides the weights themselves (stage 3, and stage 2 of PyTorch's FSDP2) the forward
waits for the others: only the reading of samples is compared.
"""

import socket
import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from labcode.comm.grid import Grid

IN_A_ROW = 3  # intervals of the log in which a rank must be slow before it is named
LEAST_S = 0.05  # a step: less than that between two ranks is not worth a line

Moment = float | torch.cuda.Event


class WorkClock:
    """The time from the beginning of a step to its first gradient, in the last micro-batch.

    On a GPU two events of CUDA measure it, and the device is not waited for.

    Args:
        device: What the rank computes on.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._hooks: dict[int, torch.utils.hooks.RemovableHandle] = {}
        self._begun: Moment | None = None
        self._arrived: Moment | None = None
        self._restart()

    def _restart(self) -> None:
        self._steps = 0
        self._total_s = 0.0

    def watch(self, module: nn.Module) -> None:
        """Note when the first of these weights has its gradient.

        Only the one that was the first in the first step is watched from then on.
        """
        for number, param in enumerate(module.parameters()):
            if param.requires_grad:

                def note(_param: torch.Tensor, number: int = number) -> None:
                    self._note(number)

                self._hooks[number] = param.register_post_accumulate_grad_hook(note)

    def _note(self, number: int) -> None:
        if len(self._hooks) > 1:
            for other, hook in self._hooks.items():
                if other != number:
                    hook.remove()
            self._hooks = {number: self._hooks[number]}
        self._arrived = self._now()

    def _now(self) -> Moment:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin(self) -> None:
        """A step begins."""
        self._begun = self._now()
        self._arrived = None

    def has_read(self) -> None:
        """Its samples are there."""
        self._arrived = self._now()

    def end(self) -> None:
        """The step is done, and the device has come so far."""
        seconds = _between(self._begun, self._arrived)
        if seconds is not None:
            self._steps += 1
            self._total_s += seconds

    def take(self) -> float:
        """Mean seconds a step since this was last asked; 0 without a step."""
        mean_s = self._total_s / self._steps if self._steps else 0.0
        self._restart()
        return mean_s


def _between(begun: Moment | None, arrived: Moment | None) -> float | None:
    """Seconds between two moments of one clock; None where they are not known (yet)."""
    if isinstance(begun, float) and isinstance(arrived, float):
        return arrived - begun
    if not isinstance(begun, torch.cuda.Event) or not isinstance(arrived, torch.cuda.Event):
        return None
    if not arrived.query():
        return None
    return begun.elapsed_time(arrived) / 1000


class SlowRanks:
    """Names a rank that has been slow for some intervals of the log, once.

    Args:
        groups: The ranks of each dp group: those with the same work.
        hosts: The node of each rank.
        factor: A rank is slow if it takes more than so many times the median of the others.
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
        device: What the rank computes on.
        factor: As for `SlowRanks`.
        module: Whose forward waits for no other rank of dp; None: only reading is compared.

    Held by: tests/ranks/test_slow_rank.py
    """

    def __init__(
        self, grid: Grid, device: torch.device, factor: float, module: nn.Module | None
    ) -> None:
        self.clock = WorkClock(device)
        self._work = "reading samples"
        if module is not None:
            self.clock.watch(module)
            self._work = "reading and forward"
        self._groups = grid.shape.groups("dp")
        self._factor = factor
        self._slow: SlowRanks | None = None

    def look(self) -> list[str]:
        """Compare the ranks; the lines to be said, the same on all of them.

        Communicates: an all-gather of one number, on the CPU; the first time of host names, too.
        """
        size = dist.get_world_size()
        if self._slow is None:
            hosts: list[str] = [""] * size
            dist.all_gather_object(hosts, socket.gethostname())
            self._slow = SlowRanks(self._groups, hosts, self._factor, self._work)
        own = torch.tensor([self.clock.take()], dtype=torch.float64)
        gathered = [torch.empty_like(own) for _ in range(size)]
        dist.all_gather(gathered, own)
        return self._slow.look([value.item() for value in gathered])
