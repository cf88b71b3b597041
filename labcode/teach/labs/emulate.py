"""A cluster that costs no core: real ranks, real messages and real gradients of a GPT, with emulated speeds.

Four ranks on two cores have neither four devices nor two nodes. Here every matrix product counts as under way for as long
as a device of given FLOP/s would need, every message for as long as the link between its ranks would, inside a node or
between two. Whoever has to wait for that sleeps, and a sleeping rank needs no core. So times can be predicted, and they
come out the same on a laptop and on a busy server, as long as its cores are faster than the emulated devices.

Nothing overlaps here: a rank that sends does not compute. It is the plainest model of a cluster, and the slowest.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from labcode.comm.grid import Grid
from labcode.config import GPTConfig, ParallelConfig
from labcode.models.gpt import GPT
from labcode.models.parallelize import parallelize
from labcode.perf import alpha_beta
from labcode.perf.alpha_beta import Link
from labcode.perf.step import ClusterModel
from labcode.perf.traffic import Traffic, ring
from labcode.schedules import Action
from labcode.topology import GridShape

LATE_S = 2e-3  # a device may be this much ahead before its rank sleeps: shorter sleeps cost more than they last


AS_IT_IS = ClusterModel(float("inf"), Link(0.0, float("inf")), Link(0.0, float("inf")))


class SentMessage(NamedTuple):
    """One that this rank sent.

    Args:
        kind: all_reduce or send.
        members: Global ranks: of the group, in order, or the sender and the receiver.
        num_bytes: Of the whole tensor.
        seconds: What the emulated link takes.
    """

    kind: str
    members: tuple[int, ...]
    num_bytes: int
    seconds: float


@contextlib.contextmanager
def emulated(cluster: ClusterModel) -> Iterator[list[SentMessage]]:
    """Matrix products, all-reduces and sends of this process take the time of `cluster` inside the block.

    An all-reduce is waited for and then takes its time on every rank; a send takes its time before the message leaves. So
    a receiver gets it as late as over the link, and the sender is kept from its work meanwhile. Groups of one send nothing.

    Held by: tests/ranks/test_lesson_13_checks.py
    """
    mode = _Emulator(cluster)
    with mode:
        yield mode.sent
        mode.catch_up()


class _Emulator(TorchDispatchMode):
    """Sees every operation before it runs, in forward and in backward."""

    def __init__(self, cluster):
        super().__init__()
        self.cluster, self.sent, self.free_at = cluster, [], 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        begin, kwargs = time.perf_counter(), kwargs or {}
        name = func._schema.name
        if name == "c10d::allreduce_":
            return self._all_reduce(func, args, kwargs)
        if name == "c10d::send":
            group = _group(args)
            self._take(
                "send", (dist.get_rank(), dist.get_global_rank(group, args[2])), _bytes(args[0])
            )
        result = func(*args, **kwargs)
        if flops := _flops(func, args, kwargs, result):
            self.free_at = max(self.free_at, begin) + flops / self.cluster.flops_per_s
            if self.free_at - time.perf_counter() > LATE_S:
                self.catch_up()
        return result

    def _all_reduce(self, func, args, kwargs):
        members = tuple(dist.get_process_group_ranks(_group(args)))
        if len(members) > 1:
            self.catch_up()  # the device has not got there yet
        result = func(*args, **kwargs)
        dist.Work.unbox(result[1]).wait()
        if len(members) > 1:
            self._take("all_reduce", members, _bytes(args[0]))
        return result

    def _take(self, kind, members, num_bytes):
        self.catch_up()
        seconds = alpha_beta.time_s(kind, len(members), num_bytes, self.cluster.link(members))
        self.sent.append(SentMessage(kind, members, num_bytes, seconds))
        time.sleep(seconds)

    def catch_up(self):
        """Sleep until the device has done what it was given."""
        time.sleep(max(0.0, self.free_at - time.perf_counter()))


def _group(args):
    boxed = (
        arg
        for arg in args
        if isinstance(arg, torch.ScriptObject) and arg._type().name() == "ProcessGroup"
    )
    return dist.ProcessGroup.unbox(next(boxed))


def _bytes(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _flops(func, args, kwargs, result):
    """As `perf.flops` counts them: matrix products, and attention over the full square, twice as much in backward."""
    name = func._schema.name
    if (
        "scaled_dot_product" in name
    ):  # [B, heads, S, head size]: its first argument, and in backward its gradient too
        return (8 if name.endswith("backward") else 4) * args[0].numel() * args[0].shape[-2]
    count = flop_registry.get(func._overloadpacket)
    return count(*args, **kwargs, out_val=result) if count else 0


# ---- a step of training


@dataclass(frozen=True)
class Stepped:
    """What some steps of training did on one rank.

    Args:
        begins, ends: When each step began and ended, seconds of a clock that all ranks of a machine share.
        rows: For each step (action, start, stop) of a pipeline; empty without one. An action starts when its input is there
            and stops when its own messages have left, those of tensor parallelism, or its computing is done.
        sent: The messages of the last step.
        loss: Of the last step.
        num_parameters: Weights and biases on this rank.
    """

    begins: list[float]
    ends: list[float]
    rows: list[list[tuple[Action, float, float]]]
    sent: list[SentMessage]
    loss: float
    num_parameters: int


def timed_steps(
    rank: int,
    model: GPTConfig,
    shape: GridShape,
    global_batch: int,
    micro_batch: int,
    cluster: ClusterModel = AS_IT_IS,
    repeats: int = 3,
    schedule: str = "1f1b",
) -> Stepped:
    """One step without the clock and `repeats` steps on it: forward, backward, gradients averaged; no optimizer.

    Args:
        rank: Of this process.
        model: With a vocabulary size; the tokens are drawn.
        shape: The grid.
        global_batch, micro_batch: Samples of a step, and of one forward of one dp rank.
        cluster: What to emulate.
        repeats: Steps on the clock.
        schedule: Of the pipeline.

    Raises:
        ValueError: A batch that cannot be cut so, or a model that does not fit the grid.
    """
    count, rest = divmod(global_batch, micro_batch * shape.dp)
    if rest or not count:
        raise ValueError(
            f"global_batch={global_batch} is no multiple of micro_batch*dp = {micro_batch}*{shape.dp}: change one"
        )
    grid = Grid.create(shape)
    torch.manual_seed(0)
    config = ParallelConfig(data_parallel="labcode", pipeline_schedule=schedule)
    device = grid.mesh.device_type
    share = parallelize(GPT(model).to(device), grid, config)
    share.recording = True
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(
        model.vocab_size, (global_batch, model.context_length + 1), generator=generator
    ).to(device)
    own = tokens.chunk(shape.dp)[grid.coord("dp")].split(micro_batch)
    batches = [(part[:, :-1], part[:, 1:]) for part in own]
    begins, ends, rows, loss = [], [], [], 0.0
    for step in range(repeats + 1):
        share.zero_grad()
        share.recorded = []
        dist.barrier()
        begin = time.perf_counter()
        with emulated(cluster if step else AS_IT_IS) as sent:
            total = share.forward_backward(batches, share.loss)
        if step:
            begins.append(begin)
            ends.append(time.perf_counter())
            rows.append(share.recorded)
        dist.all_reduce(total, group=grid.group("dp"))
        loss = total.item() / shape.dp
    return Stepped(
        begins, ends, rows, sent, loss, sum(param.numel() for param in share.parameters())
    )


def step_s(stepped: Sequence[Stepped]) -> float:
    """Seconds of the step of median length, from when the first rank begins to when the last one ends."""
    steps = [
        max(one.ends[step] for one in stepped) - min(one.begins[step] for one in stepped)
        for step in range(len(stepped[0].ends))
    ]
    return sorted(steps)[len(steps) // 2]


def traffic(stepped: Sequence[Stepped], at_least: int = 0) -> Traffic:
    """{(from rank, to rank): bytes} of one step, all-reduces as rings; without messages below `at_least` bytes."""
    total = Counter()
    for rank, one in enumerate(stepped):
        for kind, members, num_bytes, _ in one.sent:
            if num_bytes >= at_least:
                links = (
                    {members: num_bytes} if kind == "send" else ring(kind, list(members), num_bytes)
                )
                total.update({link: size for link, size in links.items() if link[0] == rank})
    return dict(total)
