"""Lesson 15: an emulated cluster that costs no core.

Real ranks, real messages and real gradients of a GPT, with emulated speeds. Four ranks on two cores
have neither four devices nor two nodes. Here every matrix product counts as under way for as long
as a device of given FLOP/s would need, and every message for as long as the link between its ranks
would, inside a node or between two. Whoever has to wait for that sleeps, and a sleeping rank needs
no core. So times can be predicted, and they come out the same on a laptop and on a busy server, as
long as its cores are faster than the emulated devices.

Nothing overlaps here: a rank that sends does not compute. It is the plainest model of a cluster,
and the slowest. Only the all-reduces of one group may travel in the background, as DDP's do.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.flop_counter import flop_registry

from course.labs.clock import EmulatedResource
from labcode.comm.counting import Collective, CollectiveSpy, wait_for
from labcode.comm.grid import Grid
from labcode.config import GPTConfig, ParallelConfig
from labcode.models.gpt import GPT
from labcode.models.parallelize import parallelize
from labcode.perf.alpha_beta import COLLECTIVES, Link, time_s
from labcode.perf.step import ClusterModel
from labcode.perf.traffic import Traffic, ring
from labcode.schedules import Action
from labcode.topology import GridShape

# A device may be this much ahead before its rank sleeps: shorter sleeps cost more than they last.
LATE_S = 2e-3
SMALL_BUCKET_MB = 0.06  # so that the small models of the labs have several

NO_LINK = Link(0.0, float("inf"))
AS_IT_IS = ClusterModel(float("inf"), inside=NO_LINK, between=NO_LINK)


class SentMessage(NamedTuple):
    """One that this rank sent.

    Args:
        kind: One of `alpha_beta.COLLECTIVES`.
        members: Global ranks: of the group, in order, or the sender and the receiver.
        num_bytes: Bytes of the whole tensor.
        seconds: What the emulated link takes.
    """

    kind: str
    members: tuple[int, ...]
    num_bytes: int
    seconds: float


@contextlib.contextmanager
def emulated(
    cluster: ClusterModel, in_background: Sequence[int] = ()
) -> Iterator[list[SentMessage]]:
    """Give matrix products, collectives and sends of this process the times of a cluster.

    A collective is waited for, and then takes its time on every rank. A send takes its time before
    the message leaves, so a receiver gets it as late as over the link, and the sender is kept from
    its work meanwhile. Groups of one send nothing.

    Held by: tests/ranks/test_hybrid_lab.py

    Args:
        cluster: Cluster whose times are emulated.
        in_background: Global ranks of a group whose all-reduces travel one after the other while
            the device computes; they are waited for at the end of the block.

    Returns:
        What this process sends inside the block.
    """
    emulator = _Emulator(cluster, tuple(in_background))
    with emulator:
        yield emulator.sent
        emulator.device.wait()
        emulator.wire.wait()


class _Emulator(CollectiveSpy):
    """Lets operations run as always, and gives their time to an emulated device.

    Attributes:
        device: What this rank computes on.
        wire: What carries the all-reduces in the background.
        sent: The messages so far.
    """

    def __init__(self, cluster: ClusterModel, in_background: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.cluster = cluster
        self.in_background = in_background
        self.device = EmulatedResource()
        self.wire = EmulatedResource()
        self.sent: list[SentMessage] = []

    def on_collective(self, call: Collective, start: Callable[[], Any]) -> Any:
        """Collectives and sends take their time."""
        if call.name == "send":
            self._send(call)
        elif call.name in COLLECTIVES:
            return self._collective(call, start)
        return start()

    def on_operation(
        self, operation: torch._ops.OpOverload, args: tuple, kwargs: Mapping[str, Any]
    ) -> Any:
        """The operation runs, and its matrix product is given to the device."""
        begin_s = time.perf_counter()
        result = operation(*args, **kwargs)
        flops = _flops(operation, args, kwargs, result)
        if flops:
            self.device.take(flops / self.cluster.flops_per_s, asked_at_s=begin_s)
            if self.device.free_at_s - time.perf_counter() > LATE_S:
                self.device.wait()
        return result

    def _collective(self, call: Collective, start: Callable[[], Any]) -> Any:
        if call.ranks == self.in_background:
            # begins when the device has made what is sent, and this rank goes on
            ready_s = max(self.device.free_at_s, time.perf_counter())
            self.wire.take(self._seconds(call), asked_at_s=ready_s)
            return start()
        alone = len(call.ranks) == 1
        if not alone:
            self.device.wait()  # the device has not got there yet
        result = start()
        wait_for(result)
        if not alone:
            self._send(call)
        return result

    def _send(self, call: Collective) -> None:
        """Sleep for as long as the link takes, once the device has made what is sent."""
        self.device.wait()
        time.sleep(self._seconds(call))

    def _seconds(self, call: Collective) -> float:
        """What the link takes, which is noted."""
        link = self.cluster.link(call.ranks)
        seconds = time_s(call.name, len(call.ranks), call.num_bytes, link)
        self.sent.append(SentMessage(call.name, call.ranks, call.num_bytes, seconds))
        return seconds


def _flops(
    operation: torch._ops.OpOverload, args: tuple, kwargs: Mapping[str, Any], result: Any
) -> float:
    """FLOPs of an operation as `perf.flops` counts them.

    Matrix products, and attention over the full square, twice as much in backward.
    """
    packet = operation.overloadpacket
    name = str(packet)
    if "scaled_dot_product" in name:
        # [B, heads, S, head size]: the query, and in backward its gradient
        query = args[0]
        products = 8 if name.endswith("backward") else 4
        return products * query.numel() * query.shape[-2]
    count = flop_registry.get(packet)
    if count is None:
        return 0
    return count(*args, **kwargs, out_val=result)


# ---- a step of training


@dataclass(frozen=True)
class Stepped:
    """What some steps of training did on one rank.

    Args:
        begins, ends: When each step began and ended, in seconds of a clock that all ranks of a
            machine share.
        rows: For each step (action, start, stop) of a pipeline; empty without one. An action starts
            when its input is there. It stops when its computing is done and its own messages, those
            of tensor parallelism, have left.
        sent: The messages of the last step.
        loss: Loss of the last step.
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
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b",
    overlap: bool = False,
) -> Stepped:
    """One step without the clock and then `repeats` steps on it.

    A step is forward, backward and the average of the gradients, without an optimizer.

    Args:
        rank: Rank of this process.
        model: Shape of the model, with a vocabulary size; the tokens are drawn.
        shape: The grid.
        global_batch, micro_batch: Samples of a step, and of one forward of one dp rank.
        cluster: What to emulate.
        repeats: Steps on the clock.
        schedule: Schedule of the pipeline.
        overlap: Whether gradients travel in buckets while backward still computes.

    Raises:
        ValueError: A batch that cannot be cut so, or a model that does not fit the grid.
    """
    count, rest = divmod(global_batch, micro_batch * shape.dp)
    if rest or not count:
        raise ValueError(
            f"global_batch={global_batch} is no multiple of "
            f"micro_batch*dp = {micro_batch}*{shape.dp}: change one"
        )
    assert model.vocab_size is not None
    grid = Grid.create(shape)
    torch.manual_seed(0)
    bucket_mb = SMALL_BUCKET_MB if overlap else 25.0
    config = ParallelConfig(
        data_parallel="labcode", pipeline_schedule=schedule, bucket_mb=bucket_mb
    )
    copies = dist.get_process_group_ranks(grid.group("dp")) if overlap else ()
    device = grid.mesh.device_type
    share = parallelize(GPT(model).to(device), grid, config)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(
        model.vocab_size, (global_batch, model.context_length + 1), generator=generator
    ).to(device)
    own = tokens.chunk(shape.dp)[grid.coord("dp")].split(micro_batch)
    batches = [(part[:, :-1], part[:, 1:]) for part in own]
    begins = []
    ends = []
    rows = []
    loss = 0.0
    for step in range(repeats + 1):
        share.zero_grad()
        recorded: list[tuple[Action, float, float]] = []
        share.on_action = _recorder(recorded)
        dist.barrier()
        begin = time.perf_counter()
        with emulated(cluster if step else AS_IT_IS, copies) as sent:
            total = share.forward_backward(batches)
        if step:
            begins.append(begin)
            ends.append(time.perf_counter())
            rows.append(recorded)
        dist.all_reduce(total, group=grid.group("dp"))
        loss = total.item() / shape.dp
    num_parameters = sum(param.numel() for param in share.parameters())
    return Stepped(begins, ends, rows, sent, loss, num_parameters)


def _recorder(rows: list[tuple[Action, float, float]]) -> Callable[[Action, float, float], None]:
    """An `on_action` that writes down when each action ran."""

    def record(action: Action, started_s: float, stopped_s: float) -> None:
        rows.append((action, started_s, stopped_s))

    return record


def step_s(stepped: Sequence[Stepped]) -> float:
    """Seconds of the step of median length.

    A step lasts from when the first rank begins to when the last one ends.

    Args:
        stepped: The steps of all ranks.
    """
    steps = []
    for step in range(len(stepped[0].ends)):
        begin_s = min(one.begins[step] for one in stepped)
        end_s = max(one.ends[step] for one in stepped)
        steps.append(end_s - begin_s)
    return sorted(steps)[len(steps) // 2]


def traffic(stepped: Sequence[Stepped], at_least: int = 0) -> Traffic:
    """What each rank sent to each other one in a step, with all-reduces as rings.

    Args:
        stepped: The steps of all ranks.
        at_least: Messages of fewer bytes do not count.

    Returns:
        {(from rank, to rank): bytes}.
    """
    total = Counter()
    for rank, one in enumerate(stepped):
        for message in one.sent:
            if message.num_bytes >= at_least:
                total.update(_from(rank, message))
    return dict(total)


def _from(rank: int, message: SentMessage) -> Traffic:
    """The part of a message that `rank` itself sends; each member of an all-reduce has noted it."""
    if message.kind == "send":
        source, to = message.members
        return {(source, to): message.num_bytes}
    links = ring(message.kind, list(message.members), message.num_bytes)
    return {link: num_bytes for link, num_bytes in links.items() if link[0] == rank}
