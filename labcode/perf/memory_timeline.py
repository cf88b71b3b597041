"""Memory over one recorded step, by what it is for: forward rises, backward falls. No torch.

The trace of a run with `--profile.memory` has each allocation, and marks that say what it is for
(`measure.memory_marks`). Bytes without a mark are temporary: what an operation needs while it runs,
gradients of activations, messages.

What was allocated before the recording has no events. Of it weights, gradients and optimizer state
are known; other memory, such as the buckets of PyTorch's DDP, is not counted.

Held by: tests/unit/test_memory_timeline.py
"""

import re
from typing import Any, NamedTuple

from labcode.perf.chrome_trace import Event, Trace, read

CATEGORIES = ("parameters", "optimizer", "gradients", "activations", "temporary")

BEFORE = "before "
MARK = re.compile(rf"({BEFORE})?memory: (\w+) (\d+)(?: (\d+))?")


def mark_name(category: str, address: int) -> str:
    """The name of a mark: what lies at an address, at the time of the mark, is for `category`."""
    return f"memory: {category} {address}"


class MemoryTimeline(NamedTuple):
    """Bytes of each category after each allocation and release of one step.

    Args:
        step: Number of the step.
        time_ms: Milliseconds since the step began, ascending; the first is 0.
        used_bytes: {category: bytes from that time on}, each as long as `time_ms`.
        parts: (name, start, stop) in ms of the named parts of the step, in order.
    """

    step: int
    time_ms: list[float]
    used_bytes: dict[str, list[int]]
    parts: list[tuple[str, float, float]]

    def peak(self) -> tuple[float, dict[str, int]]:
        """(time in ms, bytes of each category) when their sum is largest."""
        sums = [sum(values) for values in zip(*self.used_bytes.values())]
        place = sums.index(max(sums))
        return self.time_ms[place], {name: used[place] for name, used in self.used_bytes.items()}

    def most(self, category: str) -> int:
        """The most bytes of one category."""
        return max(self.used_bytes[category])


class _Block:
    """One allocation: its address, size, and from which event to which it lives."""

    def __init__(self, num_bytes: int, category: str, start_us: float) -> None:
        self.num_bytes = num_bytes
        self.category = category
        self.start_us = start_us
        self.stop_us = float("inf")


def memory_timeline(source: Any, step: int | None = None) -> MemoryTimeline:
    """The memory of a recorded step.

    Args:
        source: What `chrome_trace.read` takes.
        step: Its number; None: the last one that was recorded.

    Raises:
        ValueError: The trace has no allocations, or not that step.
    """
    trace = read(source)
    steps = trace.steps()
    number = max(steps) if step is None else step
    if number not in steps:
        known = ", ".join(map(str, steps))
        raise ValueError(f"step {step} was not recorded: there are {known}")
    blocks = _blocks(trace)
    return _timeline(number, steps[number], blocks, trace)


def _blocks(trace: Trace) -> list[_Block]:
    """All allocations, in order, with their categories."""
    changes = [event for event in trace.instants if event.name == "[memory]"]
    if not changes:
        raise ValueError("the trace has no allocations: record it with --profile.memory")
    # The GPU where memory of one was recorded: PyTorch counts 0 for the CPU and 1 for CUDA.
    device = max(event.args.get("Device Type", 0) for event in changes)
    changes = [event for event in changes if event.args.get("Device Type") == device]
    marks = [event for event in trace.events if MARK.fullmatch(event.name)]
    blocks: list[_Block] = []
    living: dict[int, _Block] = {}
    for event in sorted([*changes, *marks], key=_start):
        if event.name == "[memory]":
            _replay(event, living, blocks)
        else:
            _apply(event, living, blocks)
    return blocks


def _replay(event: Event, living: dict[int, _Block], blocks: list[_Block]) -> None:
    """One allocation or release."""
    address = event.args["Addr"]
    num_bytes = event.args["Bytes"]
    if num_bytes > 0:
        living[address] = _Block(num_bytes, "temporary", event.start_us)
        blocks.append(living[address])
    elif address in living:
        living.pop(address).stop_us = event.start_us


def _apply(event: Event, living: dict[int, _Block], blocks: list[_Block]) -> None:
    """One mark."""
    matched = MARK.fullmatch(event.name)
    assert matched is not None
    before, category, digits, size = matched.groups()
    address = int(digits)
    if address in living:
        living[address].category = category
    elif before:
        # older than the recording: there since ever
        living[address] = _Block(int(size), category, float("-inf"))
        blocks.append(living[address])


def _timeline(number: int, step: Event, blocks: list[_Block], trace: Trace) -> MemoryTimeline:
    used: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
    changes = []
    for block in blocks:
        if block.start_us <= step.start_us < block.stop_us:
            used[block.category] += block.num_bytes
        elif step.start_us < block.start_us <= step.stop_us:
            changes.append((block.start_us, block.category, block.num_bytes))
        if step.start_us < block.stop_us <= step.stop_us:
            changes.append((block.stop_us, block.category, -block.num_bytes))
    time_ms = [0.0]
    used_bytes = {category: [num_bytes] for category, num_bytes in used.items()}
    for at_us, category, num_bytes in sorted(changes):
        used[category] += num_bytes
        time_ms.append((at_us - step.start_us) / 1e3)
        for name, values in used_bytes.items():
            values.append(used[name])
    return MemoryTimeline(number, time_ms, used_bytes, _parts(trace, step))


def _parts(trace: Trace, step: Event) -> list[tuple[str, float, float]]:
    """The named parts of a step, in ms since it began."""
    found = []
    for event in trace.parts(step):
        start_ms = (event.start_us - step.start_us) / 1e3
        found.append((event.name, start_ms, (event.stop_us - step.start_us) / 1e3))
    return found


def _start(event: Event) -> float:
    return event.start_us
