"""Which operations the time of recorded steps went to, and what a GPU waited for. No torch.

Held by: tests/unit/test_operations.py
"""

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from labcode.perf import intervals
from labcode.perf.breakdown import NCCL_KERNEL
from labcode.perf.chrome_trace import LAUNCHES, ON_GPU, Event, Trace, read

# operations that read and write each element once and compute little with it
ELEMENTWISE = re.compile(
    r"aten::_?(add|sub|rsub|mul|div|neg|pow|sqrt|exp|log|tanh|sigmoid|relu|gelu|silu|copy|fill|zero"
    r"|threshold|where|masked_fill|dropout|native_dropout|bernoulli|lerp|addcmul|addcdiv|clamp|cat"
    r"|native_layer_norm|native_layer_norm_backward|softmax|softmax_backward_data|log_softmax"
    r"|gelu_backward|tanh_backward|mean|sum)_?"
)
ELEMENTWISE_KERNEL = re.compile(r"elementwise|layer_norm|reduce_kernel|softmax|dropout", re.I)
SOON_US = 15.0  # a kernel that begins so soon after its launch has found the GPU idle
# calls of CUDA in which the host waits for the device
WAITS = re.compile(r"cuda(Device|Stream|Event)Synchronize|cudaMemcpy$|cuStreamSynchronize")


class Operation(NamedTuple):
    """All calls of one operation, or of one kernel.

    Args:
        name: Name as the trace has it.
        self_ms: Time in it, without the operations that it calls.
        calls: How many.
        share: Share of the time of all recorded steps.
    """

    name: str
    self_ms: float
    calls: int
    share: float


class Launches(NamedTuple):
    """How a GPU was kept busy over the recorded steps.

    Args:
        kernels: How many ran.
        kernel_us: Their mean length.
        idle: The fraction of the time in which nothing ran on the GPU.
        at_once: The fraction of kernels that began as soon as they were launched: the GPU had
            nothing left to do. None: the trace does not tell.
        host_waits: The fraction of the idle time in which the host waited for the device.
        by_stream: {stream: (kernels, ms, share of the time)}.
    """

    kernels: int
    kernel_us: float
    idle: float
    at_once: float | None
    host_waits: float
    by_stream: dict[int, tuple[int, float, float]]


def top_operations(source: Any, rows: int = 10) -> list[Operation]:
    """The operations with most time of their own, in the recorded steps: kernels, where a GPU was.

    Args:
        source: What `chrome_trace.read` takes.
        rows: How many.
    """
    trace = read(source)
    found: dict[str, tuple[float, int]] = {}
    for event, self_us in own_times(trace):
        before_us, calls = found.get(event.name, (0.0, 0))
        found[event.name] = (before_us + self_us, calls + 1)
    total_ms = total_us(trace) / 1e3
    operations = []
    for name, (self_us, calls) in found.items():
        operations.append(Operation(name, self_us / 1e3, calls, self_us / 1e3 / total_ms))
    operations.sort(key=_self_ms, reverse=True)
    return operations[:rows]


def elementwise_share(trace: Trace) -> float:
    """The fraction of the time in operations that compute little for each element they touch.

    Those of the optimizer are left out.
    """
    update = _spans(event for event in trace.of(*_named_by(trace)) if event.name == "optimizer")
    pattern = ELEMENTWISE_KERNEL.search if trace.has_gpu else ELEMENTWISE.fullmatch
    spent_us = 0.0
    for event, self_us in own_times(trace):
        in_update = intervals.intersection([(event.start_us, event.stop_us)], update)
        if pattern(event.name) and not in_update:
            spent_us += self_us
    return spent_us / total_us(trace)


def launches(source: Any) -> Launches | None:
    """How a GPU was kept busy; None without one.

    Args:
        source: What `chrome_trace.read` takes.
    """
    trace = read(source)
    if not trace.has_gpu:
        return None
    steps = _spans(trace.steps().values())
    on_gpu = _within(trace.of(*ON_GPU), steps)
    kernels = [event for event in on_gpu if event.category == "kernel"]
    busy = intervals.intersection(_spans(on_gpu), steps)
    idle = intervals.difference(steps, busy)
    calls = list(trace.of(*LAUNCHES))
    waits = _spans(event for event in calls if WAITS.match(event.name))
    waited_us = intervals.total(intervals.intersection(idle, waits))
    all_us = intervals.total(steps)
    idle_us = intervals.total(idle)
    return Launches(
        len(kernels),
        sum(event.duration_us for event in kernels) / max(1, len(kernels)),
        idle_us / all_us,
        _at_once(kernels, calls),
        waited_us / idle_us if idle_us else 0.0,
        _by_stream(on_gpu, all_us),
    )


def own_times(trace: Trace) -> list[tuple[Event, float]]:
    """(operation, us without those that it calls), in the recorded steps; kernels on a GPU."""
    steps = _spans(trace.steps().values())
    if trace.has_gpu:
        return [(event, event.duration_us) for event in _within(trace.of(*ON_GPU), steps)]
    events = _within(trace.of("cpu_op"), steps)
    own = [event.duration_us for event in events]
    running: dict[Any, list[int]] = {}
    for place, event in enumerate(events):
        stack = running.setdefault(event.thread, [])
        while stack and events[stack[-1]].stop_us <= event.start_us:
            stack.pop()
        if stack:
            own[stack[-1]] -= event.duration_us
        stack.append(place)
    return list(zip(events, own))


def total_us(trace: Trace) -> float:
    """The time of all recorded steps."""
    return sum(step.duration_us for step in trace.steps().values())


def _at_once(kernels: list[Event], calls: list[Event]) -> float | None:
    ends = {}
    for call in calls:
        correlation = call.args.get("correlation")
        if correlation is not None:
            ends[correlation] = call.stop_us
    told = 0
    soon = 0
    for kernel in kernels:
        launched_us = ends.get(kernel.args.get("correlation"))
        # NCCL's wait for other ranks, on a stream of their own
        if launched_us is None or NCCL_KERNEL.match(kernel.name):
            continue
        told += 1
        if kernel.start_us - launched_us < SOON_US:
            soon += 1
    return soon / told if told else None


def _by_stream(on_gpu: list[Event], all_us: float) -> dict[int, tuple[int, float, float]]:
    events_of: dict[int, list[Event]] = {}
    for event in on_gpu:
        events_of.setdefault(event.args.get("stream", event.thread[1]), []).append(event)
    found = {}
    for stream, events in sorted(events_of.items()):
        busy_us = intervals.total(_spans(events))
        found[stream] = (len(events), busy_us / 1e3, busy_us / all_us)
    return found


def _named_by(trace: Trace) -> tuple[str, ...]:
    """The category of the ranges that say what a kernel, or an operation, is for."""
    return ("gpu_user_annotation",) if trace.has_gpu else ("user_annotation",)


def _within(events: Iterable[Event], steps: intervals.Spans) -> list[Event]:
    """The events that begin within one of the steps."""
    found = []
    for event in events:
        if any(start <= event.start_us < stop for start, stop in steps):
            found.append(event)
    return found


def _spans(events: Iterable[Event]) -> intervals.Spans:
    return intervals.union([(event.start_us, event.stop_us) for event in events])


def _self_ms(operation: Operation) -> float:
    return operation.self_ms
