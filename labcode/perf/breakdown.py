"""Where the time of recorded steps went: computing, communication, data, or nothing. No torch.

Each moment of a step has one of four reasons, the first that holds:

    data          the host is in the range "data" (on a GPU: and no kernel runs)
    computing     an operation runs, or a kernel
    communication a collective is under way, and nothing is computed: it is exposed
    other         Python between two operations, launches, a wait for a slower rank before it sends

On a CPU operations are told by their names. A collective is known by its own events (`gloo:...`,
`c10d::...`) wherever it is called, so that the messages of tensor and context parallelism inside
forward and backward, and those of PyTorch's DDP, count as communication; the range of that name
adds what only waits. On a GPU it is a kernel of NCCL, and the other kernels compute.

Held by: tests/unit/test_breakdown.py, tests/ranks/test_profiled_runs.py
"""

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from labcode.perf import intervals
from labcode.perf.chrome_trace import ON_GPU, Event, Trace, read
from labcode.perf.intervals import Spans

REASONS = ("computing", "communication", "data", "other")
# operations of torch and its libraries, and none of those that call others and may wait in between
COMPUTES = re.compile(r"(?!autograd::|c10d|_c10d|torch::|torch\.distributed)\w+::|Torch-Compiled")
COLLECTIVE = re.compile(r"(gloo|nccl|mpi|ucc):")  # from its start until all bytes are there
CALLS_COLLECTIVE = re.compile(r"_?c10d(_functional)?::")
NCCL_KERNEL = re.compile(r"(void )?nccl", re.IGNORECASE)
LOADER = re.compile(r"enumerate\(DataLoader\)#.*__next__")  # as PyTorch's DataLoader marks itself


class StepTimes(NamedTuple):
    """One step, in ms.

    Args:
        step: Number of the step.
        total_ms: The sum of the next four.
        computing_ms, communication_ms, data_ms, other_ms: Parts of the step, as above;
            communication is what is exposed.
        collectives_ms: Time in which a collective was under way, whether exposed or not.
        hidden_ms: The part of it in which something was computed as well.
        parts_ms: {named part: time in it} on the host; those of forward contain what is in them.
    """

    step: int
    total_ms: float
    computing_ms: float
    communication_ms: float
    data_ms: float
    other_ms: float
    collectives_ms: float
    hidden_ms: float
    parts_ms: dict[str, float]

    def share(self, reason: str) -> float:
        """The part of the step that one of `REASONS` takes."""
        return getattr(self, f"{reason}_ms") / self.total_ms

    @property
    def overlap(self) -> float | None:
        """The fraction of communication that is hidden behind computing; None without any."""
        return self.hidden_ms / self.collectives_ms if self.collectives_ms else None


class Spent(NamedTuple):
    """When what ran, in the whole recording, as spans in us."""

    computing: Spans
    collectives: Spans
    communication: Spans
    data: Spans


def breakdown(source: Any) -> list[StepTimes]:
    """The times of each recorded step.

    Args:
        source: What `chrome_trace.read` takes, or a trace that it has read.
    """
    trace = read(source)
    spent = spent_on_gpu(trace) if trace.has_gpu else spent_on_cpu(trace)
    return [_times(number, step, spent, trace) for number, step in sorted(trace.steps().items())]


def mean(times: list[StepTimes]) -> StepTimes:
    """The mean of some steps, as one; its number is that of the last."""
    count = len(times)
    parts: dict[str, float] = {}
    for one in times:
        for part, part_ms in one.parts_ms.items():
            parts[part] = parts.get(part, 0.0) + part_ms / count
    means = {}
    for name in StepTimes._fields:
        if name.endswith("_ms") and name != "parts_ms":
            means[name] = sum(getattr(one, name) for one in times) / count
    return StepTimes(step=times[-1].step, parts_ms=parts, **means)


def spent_on_cpu(trace: Trace) -> Spent:
    """What a process without a GPU did."""
    computing = _spans(event for event in trace.of("cpu_op") if COMPUTES.match(event.name))
    collectives = []
    communication = []
    for event in trace.events:
        if COLLECTIVE.match(event.name):
            collectives.append(event)
        elif CALLS_COLLECTIVE.match(event.name) or event.name == "communication":
            communication.append(event)
    return Spent(
        computing, _spans(collectives), _spans([*collectives, *communication]), _data(trace)
    )


def spent_on_gpu(trace: Trace) -> Spent:
    """What a GPU did; a copy of samples to the device, with nothing beside it, is data."""
    computing = []
    collectives = []
    copies = []
    for event in trace.of(*ON_GPU):
        if NCCL_KERNEL.match(event.name):
            collectives.append(event)
        elif event.name.startswith("Memcpy HtoD"):
            copies.append(event)
        else:
            computing.append(event)
    busy = _spans([*computing, *collectives])
    data = intervals.union([*_data(trace), *_spans(copies)])
    communication = _spans(collectives)
    return Spent(_spans(computing), communication, communication, intervals.difference(data, busy))


def _data(trace: Trace) -> Spans:
    """When the host was reading."""
    found = []
    for event in trace.of("user_annotation"):
        if event.name == "data" or LOADER.fullmatch(event.name):
            found.append(event)
    return _spans(found)


def _spans(events: Iterable[Event]) -> Spans:
    return intervals.union([(event.start_us, event.stop_us) for event in events])


def _times(number: int, step: Event, spent: Spent, trace: Trace) -> StepTimes:
    within = [(step.start_us, step.stop_us)]
    data = intervals.intersection(spent.data, within)
    computing = intervals.difference(intervals.intersection(spent.computing, within), data)
    communication = intervals.intersection(spent.communication, within)
    exposed = intervals.difference(intervals.difference(communication, data), computing)
    collectives = intervals.intersection(spent.collectives, within)
    hidden = intervals.intersection(collectives, computing)
    spans = [[(step.start_us, step.stop_us)], computing, exposed, data]
    total, computing_ms, exposed_ms, data_ms = [intervals.total(one) / 1e3 for one in spans]
    return StepTimes(
        number,
        total,
        computing_ms,
        exposed_ms,
        data_ms,
        total - computing_ms - exposed_ms - data_ms,
        intervals.total(collectives) / 1e3,
        intervals.total(hidden) / 1e3,
        _parts(step, trace),
    )


def _parts(step: Event, trace: Trace) -> dict[str, float]:
    """{named part: ms} of a step, from its host; a part inside another one is taken out of it."""
    found: dict[str, float] = {}
    running: list[Event] = []
    for event in trace.parts(step):
        while running and running[-1].stop_us <= event.start_us:
            running.pop()
        found[event.name] = found.get(event.name, 0.0) + event.duration_us / 1e3
        if running:
            found[running[-1].name] -= event.duration_us / 1e3
        running.append(event)
    return found
