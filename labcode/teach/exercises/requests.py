"""Which calls a learner's code makes on a rank, and for which of their requests nobody waits.

    with Requests() as requests:
        result = answer(x, group)
    requests.check_waited()      # AssertionError: "`irecv` returned a request, and nobody ..."

A request (a `Work`) that is dropped takes its message with it: gloo then ends it half-way, or waits
for ever. So the requests that nobody has waited for are kept until the check has spoken, and cannot
stop the other ranks. One that has been waited for is let go, as it holds on to its tensors.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch._prims_common import is_non_overlapping_and_dense_or_false

from labcode.comm.counting import BARRIER, Collective, CollectiveSpy

SETTLE = timedelta(seconds=3)  # for what was started and never waited for
# Whoever calls one of these of a request looks after it.
LOOKING_AFTER = ("wait", "synchronize", "is_completed", "is_success", "get_future")
SPELLED = {"send": "`isend`", "recv": "`irecv`"}


class _Request(NamedTuple):
    """A call that nobody has waited for yet.

    Args:
        name: Of the call.
        work: What it returned.
        places: The addresses of a message's tensors; none for a collective.
    """

    name: str
    work: dist.Work
    places: list[range]


class Requests(CollectiveSpy):
    """The calls of this rank while it is active, and their requests.

    Attributes:
        names: Of all messages and collectives, in order; no barriers.
        sent_dtypes: Of the tensors that were sent as messages.
        mixed: Whether a message was received into memory that was being sent.
        gaps: Names of the calls that were given a tensor with gaps in its memory, which NCCL
            refuses and gloo copies.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.sent_dtypes: set[torch.dtype] = set()
        self.mixed = False
        self.gaps: list[str] = []
        self._places: list[range] = []  # of the message that starts now
        self._has_gaps = False  # of the call that starts now
        self._started: dict[int, _Request] = {}  # by the number of the request
        self._looked_after: set[int] = set()
        self._originals: dict[str, Any] = {}

    def on_collective(self, call: Collective, start: Callable[[], Any]) -> Any:
        if call.name != BARRIER:
            self.names.append(call.name)
            if self._has_gaps:
                self.gaps.append(call.name)
        result = start()
        work = _request_in(result)
        if work is not None:
            request = _Request(call.name, work, self._places)
            self.mixed = self.mixed or any(_mix(request, o) for o in self._started.values())
            self._started[id(work)] = request
        return result

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Iterable[type],
        args: tuple = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self._places = []
        name = func._schema.name
        if name.startswith("c10d::"):
            self._has_gaps = any(not is_non_overlapping_and_dense_or_false(x) for x in _all(args))
        if name.startswith(("c10d::send", "c10d::recv")):
            for tensor in args[0]:
                start = tensor.data_ptr()
                self._places.append(range(start, start + tensor.nbytes))
                if name.startswith("c10d::send"):
                    self.sent_dtypes.add(tensor.dtype)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def __enter__(self) -> Self:
        for name in LOOKING_AFTER:
            original = getattr(dist.Work, name, None)
            if original is not None:
                self._originals[name] = original
                setattr(dist.Work, name, self._noting(original))
        super().__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)
        for name, original in self._originals.items():
            setattr(dist.Work, name, original)

    def _noting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def method(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
            self._looked_after.add(id(work))
            result = original(work, *args, **kwargs)
            if original.__name__ == "wait":  # done: another request may get this number
                self._started.pop(id(work), None)
                self._looked_after.discard(id(work))
            return result

        return method

    def check_waited(self) -> None:
        """See that somebody has waited for each request; wait for the others here.

        Raises:
            AssertionError: Nobody has. The text says what kind of call it was.
            RuntimeError: Nobody has, and what it began does not end.
        """
        forgotten = []
        for number, request in self._started.items():
            if number not in self._looked_after:
                forgotten.append(request.name)
                request.work.wait(SETTLE)
        assert not forgotten, _of_forgotten(forgotten)


def _all(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among the arguments of a call, which may stand in lists of lists."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _all(value)


def _mix(request: _Request, other: _Request) -> bool:
    """Whether one of the two is received into memory from which the other one is sent."""
    if {request.name, other.name} != {"send", "recv"}:
        return False
    for place in request.places:
        for other_place in other.places:
            if place.start < other_place.stop and other_place.start < place.stop:
                return True
    return False


def _of_forgotten(names: list[str]) -> str:
    """What to say of requests; of those that receive first, as their tensors are read too early."""
    name = "recv" if "recv" in names else names[0]
    call = SPELLED.get(name, f"`{name}` with `async_op=True`")
    return f"{call} returned a request, and nobody waited for it"


def _request_in(result: Any) -> dist.Work | None:
    """The request among what an operation of c10d returns: boxed, alone or after the tensors."""
    if isinstance(result, (tuple, list)):
        result = result[-1] if result else None
    if isinstance(result, torch.ScriptObject):
        return dist.Work.unbox(result)
    return None
