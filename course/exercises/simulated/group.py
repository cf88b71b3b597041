"""A `ProcessGroup` that gives the baton on, and writes down who called what."""

import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from course.exercises.simulated import collectives
from course.exercises.simulated.baton import Ended, Rank, where
from course.exercises.simulated.collectives import Method, Tensors
from course.exercises.simulated.events import Endless, Event, Mismatch

MAX_CALLS = 1000  # of one rank; far above what any exercise needs
POLL_STEPS = 1000  # what asking a request counts, so that whoever asks on and on comes to an end


class Sent(NamedTuple):
    """What the other ranks need of a call. They keep it and not the request, which has tensors.

    Args:
        event: What has been written down of it.
        same: What has to be the same on all ranks.
        sends: Copies of what is sent.
    """

    event: Event
    same: Any
    sends: list[Tensor]


class Request(dist.Work):
    """A collective or a message that one rank has started.

    Args:
        group: Group of the call.
        event: What has been written down of it.
        same: What has to be the same on all ranks.
        tensors: What is sent is what they hold now.
    """

    def __init__(self, group: "Group", event: Event, same: Any, tensors: Tensors) -> None:
        super().__init__()
        self.group = group
        self.event = event
        self.sent = Sent(event, same, [])
        self.receives = list(tensors.receives)
        self.reads = [_place(one) for one in tensors.sends]
        self.writes = [_place(one) for one in tensors.receives]
        self.before: list[tuple[Tensor, Tensor, int]] = []  # tensor, copy, how often written to
        with torch._C._DisableTorchDispatch():  # a check may look at what the learner's code makes
            for one in tensors.sends:
                self.sent.sends.append(one.detach().clone())
            if event.asynchronous:
                for one in (*tensors.sends, *tensors.receives):
                    self.before.append((one, one.detach().clone(), one._version))
        self.meeting: dict[int, Sent] = {}  # the calls of all ranks that belong together
        self.partner: Sent | None = None  # the other end of a message
        self.future: Any = None

    @property
    def is_message(self) -> bool:
        """Whether it is a send or a receive."""
        return self.event.kind in ("send", "recv")

    def is_ready(self) -> bool:
        """Whether everybody has come whom it needs."""
        if self.is_message:
            return self.partner is not None
        return len(self.meeting) == self.group.size()

    def missing(self) -> tuple[int | None, ...]:
        """Who has not come yet, as ranks of the world."""
        if self.is_message:
            return (self.event.peer,)
        return tuple(rank for rank in self.group.ranks if rank not in self.meeting)

    # ---- what torch calls of a Work

    def wait(self, timeout: Any = None) -> bool:
        """Give the baton on until all have come; then the result is in the tensors."""
        rank = self.group.own()
        self.event.waits.append((rank.run.tick(), rank.in_block))
        rank.wait_until(self.is_ready, self)
        self._deliver()
        return True

    def synchronize(self) -> None:
        """Wait, which on a CPU is all there is to synchronize."""
        self.wait()

    def is_completed(self) -> bool:
        """Let the others run as far as they can; whoever asks until it is true has waited."""
        rank = self.group.own()
        if not self.is_ready():
            rank.let_others_go_on()
        if self.is_ready():
            self._deliver()
        else:
            rank.steps += POLL_STEPS
        return self.event.arrived

    def result(self) -> list[Tensor]:
        """The tensors into which it receives."""
        return self.receives

    def _source_rank(self) -> int:
        assert self.partner is not None
        return self.group.ranks.index(self.partner.event.rank)

    def get_future(self) -> Any:
        """A Future that is complete once the result has arrived."""
        if self.future is None:
            self.future = torch.futures.Future()
            rank = self.group.own()
            if self.group.waits_in_cpp:
                rank.wait_until(self.is_ready, self)
                self._deliver()
            elif self.event.arrived:
                self.future.set_result(self.receives)
        return self.future

    # ---- the result

    def _deliver(self) -> None:
        if self.event.arrived:
            return
        self.event.arrived = True
        self.group.own().under_way.remove(self)
        collectives.check_dense([self.receives, self.before])  # meanwhile memory may have gone
        with torch._C._DisableTorchDispatch():
            self.event.touched = any(_changed(*one) for one in self.before)
            for own, came in zip(self.receives, self._received(), strict=True):
                if own.numel() != came.numel():
                    raise Mismatch(f"{self.event}: {came.numel()} numbers came, for {own.numel()}")
                own.data.copy_(came.view_as(own))  # .data: autograd does not notice, as with gloo
        self.before.clear()
        if self.future is not None:
            self.future.set_result(self.receives)

    def _received(self) -> list[Tensor]:
        if self.partner is not None:
            return self.partner.sends if self.event.kind == "recv" else []
        ranks = self.group.ranks
        event = self.event
        root = None if event.root is None else ranks.index(event.root)
        sent = [self.meeting[rank].sends for rank in ranks]
        return collectives.received(event.kind, event.op, root, self.group.rank(), sent)


def _changed(tensor: Tensor, before: Tensor, version: int) -> bool:
    """Whether a tensor was written to.

    torch counts writes, but one count stands for all views of a memory, and `.data` does not raise
    it. So the values are compared, and the count serves where a tensor has its memory alone.
    """
    same = (tensor == before) | ((tensor != tensor) & (before != before))
    has_it_alone = tensor.untyped_storage().nbytes() == tensor.nbytes
    return not bool(same.all()) or (has_it_alone and tensor._version != version)


def _place(tensor: Tensor) -> range:
    """The addresses of a tensor, which has no gaps."""
    start = tensor.data_ptr()
    return range(start, start + tensor.nbytes)


class Group(dist.ProcessGroup):
    """What torch.distributed takes for a process group; its collectives stand below the class.

    Args:
        rank: Whose.
        ranks: Members, as ranks of the world.
        name: torch's name for it.
        desc: torch's description.
    """

    def __init__(self, rank: Rank, ranks: tuple[int, ...], name: str, desc: str) -> None:
        super().__init__(ranks.index(rank.number), len(ranks))  # pyright: ignore[reportCallIssue]
        self.ranks = ranks
        self.waits_in_cpp = False  # DDP's reducer does, and there the baton cannot be given on
        self._names = (name, desc)
        self._num_calls = 0
        self._rank = rank

    # ---- what torch asks of a group

    @property
    def group_name(self) -> str:
        """torch's name for it."""
        return self._names[0]

    @property
    def group_desc(self) -> str:
        """torch's description of it."""
        return self._names[1]

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def getBackendName(self) -> str:
        """Not gloo: DDP's logger would ask gloo for what is not there."""
        return "simulated"

    def _get_backend(self, device: Any) -> Any:
        return SimpleNamespace(
            name=self.getBackendName,
            supports_coalescing=False,
            supports_splitting=False,
            options=SimpleNamespace(_timeout=timedelta(minutes=30)),
        )

    def shutdown(self) -> None:
        """Nothing is open."""

    # ---- calls

    def own(self) -> Rank:
        """The rank whose group this is."""
        if threading.get_ident() != self._rank.ident:
            raise SystemExit  # ends a thread of the learner's without a word
        return self._rank

    def _noted(self, kind: str, tensor: Tensor, **more: Any) -> Event:
        """A call, written down."""
        rank = self._rank
        event = Event(
            kind,
            rank.number,
            rank.run.tick(),
            rank.in_block,
            where(),
            self.ranks,
            self.group_name,
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            in_thread=threading.get_ident() != rank.ident,
            requires_grad=tensor.requires_grad,
            **more,
        )
        rank.run.events.append(event)
        rank.num_calls += 1
        if rank.num_calls > MAX_CALLS:
            raise Endless(f"it has made {MAX_CALLS} calls and goes on")
        self.own()
        if rank.run.is_over:
            raise Ended
        return event

    def collective(self, kind: str, tensors: Tensors, opts: Any) -> Request:
        """Start a collective, and meet the calls of the other ranks."""
        sent_bytes = sum(one.nbytes for one in tensors.sends)
        received_bytes = sum(one.nbytes for one in tensors.receives)
        adds = kind in ("all_reduce", "reduce", "reduce_scatter")
        event = self._noted(
            kind,
            tensors.own,
            root=self.ranks[opts.rootRank] if kind in collectives.WITH_ROOT else None,
            op=_name_of(opts.reduceOp) if adds else "",
            num_bytes=max(sent_bytes, received_bytes),
            asynchronous=getattr(opts, "asyncOp", False),
        )
        numels = [one.numel() for one in tensors.sends]
        must_agree = numels if kind in collectives.EQUAL_PARTS else []
        same = (kind, event.op, event.root, event.dtype, must_agree)
        request = Request(self, event, same, tensors)
        self._rank.start(request)
        key = (self.group_name, self.ranks, self._num_calls)
        self._num_calls += 1
        request.meeting = self._rank.run.meetings.setdefault(key, {})
        for other in request.meeting.values():
            if other.same != same:
                raise Mismatch(_two(other.event, event))
        request.meeting[event.rank] = request.sent
        return request

    def message(self, kind: str, tensor: Tensor, other: int | None, tag: int) -> Request:
        """Start a message: a send is done when its receiver has come, as with gloo."""
        if other is not None and not 0 <= other < self.size():
            raise ValueError(f"there is no rank {other} in a group of {self.size()}")
        if other == self.rank():
            raise ValueError("gloo has no connection from a rank to itself")
        if not tensor.is_contiguous():
            raise ValueError("a message has to be contiguous")
        collectives.check_dense([tensor])
        event = self._noted(
            kind,
            tensor,
            peer=None if other is None else self.ranks[other],
            num_bytes=tensor.nbytes,
            asynchronous=not _is_called_by("send", "recv"),
        )
        sends, receives = ([tensor], []) if kind == "send" else ([], [tensor])
        same = (self.group_name, self.ranks, tag)
        request = Request(self, event, same, Tensors(tensor, sends, receives))
        self._rank.start(request)
        if kind == "recv":
            received = self._rank.received
            for gone in [memory for memory in received if memory.expired()]:
                del received[gone]
            storage = tensor.untyped_storage()
            received[StorageWeakRef(storage)] = storage.nbytes()
        waiting = self._rank.run.open_messages
        for partner in waiting:
            if _belong_together(request, partner):
                waiting.remove(partner)
                request.partner = partner.sent
                partner.partner = request.sent
                return request
        waiting.append(request)
        return request

    def send(self, tensors: list, to: int, tag: int = 0) -> Request:
        """A message to a rank of the group."""
        return self.message("send", tensors[0], to, tag)

    def recv(self, tensors: list, source: int, tag: int = 0) -> Request:
        """A message from a rank of the group."""
        return self.message("recv", tensors[0], source, tag)

    def recv_anysource(self, tensors: list, tag: int = 0) -> Request:
        """A message from whoever sends one."""
        return self.message("recv", tensors[0], None, tag)

    def monitored_barrier(self, *_: Any, **__: Any) -> None:
        """A barrier; who is missing is known in any case."""
        method = collectives.METHODS["barrier"]
        self.collective(method.kind, method.tensors(self.size()), None).wait()


def _two(one: Event, other: Event) -> str:
    """Two calls that do not match."""
    said = []
    for event in (one, other):
        said.append(f"rank {event.rank} calls {event}{event.caller}")
    return ", ".join(said)


def _name_of(op: Any) -> str:
    """Name of a ReduceOp, or of its RedOpType."""
    kind = getattr(op, "op", op)
    return getattr(kind, "name", str(kind))


def _is_called_by(*names: str) -> bool:
    """Whether the message was started by torch's function of one of these names, as by `send`.

    torch's `send` calls its `isend`, which calls the method of the group, which calls `message`.
    """
    return sys._getframe(4).f_code.co_name in names


def _belong_together(request: Request, partner: Request) -> bool:
    """Whether two open messages are the ends of one."""
    if partner.sent.same != request.sent.same or partner.event.kind == request.event.kind:
        return False
    ends = (request, partner) if request.event.kind == "send" else (partner, request)
    sent = ends[0].event
    own = ends[1].event
    if sent.peer != own.rank or own.peer not in (None, sent.rank):
        return False
    if (sent.dtype, sent.numel) != (own.dtype, own.numel):
        raise Mismatch(_two(sent, own))
    return True


def _as_method(method: Method) -> Callable[..., Request]:
    """A collective as the method of a group that torch calls."""

    def collective(self: Group, *args: Any, opts: Any = None) -> Request:
        if len(args) > method.num_arguments:
            *args, opts = args  # type: ignore[assignment]
        if sys._getframe(1).f_code.co_name == "_verify_param_shape_across_processes":
            self.waits_in_cpp = True  # DDP asks this of its group when it is made
        collectives.check_dense(args)
        collectives.check_contiguous(args)
        collectives.check_dtype(args)
        tensors = method.tensors(self.size(), *args)
        if method.kind == "reduce" and opts.rootRank != self.rank():
            tensors = tensors._replace(receives=[])
        return self.collective(method.kind, tensors, opts)

    return collective


for _name, _method in collectives.METHODS.items():
    setattr(Group, _name, _as_method(_method))
for _name, _now in collectives.BEFORE_2_13.items():
    setattr(Group, _name, getattr(Group, _now))
