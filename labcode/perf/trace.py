"""From a recorded profile to a time line: what a rank computed, and when its messages travelled."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from labcode.perf.breakdown import COLLECTIVE
from labcode.perf.chrome_trace import Event, read

Row = tuple[str, str, float, float]  # lane, label, start, stop; the times in ms

COMPUTING = {  # what an operation of torch is called in a figure
    "aten::mm": "matrix product",
    "aten::addmm": "matrix product",
    "aten::bmm": "matrix product",
    "aten::scaled_dot_product_attention": "attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": "attention",
    "aten::gelu": "elementwise",
    "aten::gelu_backward": "elementwise",
    "aten::layer_norm": "elementwise",
    "aten::native_layer_norm_backward": "elementwise",
    "aten::add": "elementwise",
    "aten::add_": "elementwise",
}


def record(step: Callable[[], object], repeats: int, lane: str) -> list[list[Row]]:
    """Profile `step` on this rank, `repeats` times; the ranks begin each time together.

    Communicates: what `step` does, and a barrier before each. One more is made, since the first one
    warms up.

    Returns:
        The rows of each time.
    """
    found = []
    for _ in range(repeats + 1):
        dist.barrier()
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            step()
        found.append(rows(recorded, lane))
    return found[1:]


def rows(recorded: Any, lane: str) -> list[Row]:
    """(lane, label, start, stop) in ms since the first of them, for `plot.timeline`.

    Computing is in the lane `lane`, collectives in `lane + ", sending"`; a collective lasts until
    the last rank has come and all bytes are there. An operation inside another one of the table is
    left out.

    Args:
        recorded: A profile that has ended and was not exported, or a trace: what
            `chrome_trace.read` takes.
        lane: Such as "rank 0".
    """
    shown: list[tuple[str, str, Event]] = []
    busy_until_us: dict[Any, float] = {}  # of each thread, the end of an operation of the table
    for event in read(recorded).of("cpu_op", "user_annotation"):
        if COLLECTIVE.match(event.name):
            label = event.name.partition(":")[2].replace("_", "-")
            shown.append((f"{lane}, sending", label, event))
        elif event.name in COMPUTING and event.start_us >= busy_until_us.get(event.thread, 0.0):
            busy_until_us[event.thread] = event.stop_us
            shown.append((lane, COMPUTING[event.name], event))
    if not shown:
        return []
    first_us = shown[0][2].start_us
    in_ms = []
    for where, label, event in shown:
        start_ms = (event.start_us - first_us) / 1e3
        in_ms.append((where, label, start_ms, (event.stop_us - first_us) / 1e3))
    return in_ms


def share(rows_of_rank: list[Row], label: str) -> float:
    """The part of the time from the first start to the last stop that `label` takes."""
    first = min(start for _, _, start, _ in rows_of_rank)
    last = max(stop for _, _, _, stop in rows_of_rank)
    taken = sum(stop - start for _, name, start, stop in rows_of_rank if name == label)
    return taken / (last - first)
