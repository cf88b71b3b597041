"""From a recorded profile to a time line: what a rank computed, and when its messages travelled."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

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
BACKENDS = ("gloo:", "nccl:")  # how they name the time from the start of a collective to its end


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


def rows(recorded: profile, lane: str) -> list[Row]:
    """(lane, label, start, stop) in ms since the first of them, for `plot.timeline`.

    Computing is in the lane `lane`, collectives in `lane + ", sending"`; a collective lasts until
    the last rank has come and all bytes are there. An operation inside another one of the table is
    left out.

    Args:
        recorded: A profile that has ended.
        lane: Such as "rank 0".
    """
    found = []
    for event in recorded.events() or ():
        label = COMPUTING.get(event.name)
        if label is not None and not _is_inside_another(event):
            found.append((lane, label, event.time_range))
        elif event.name.startswith(BACKENDS):
            label = event.name.partition(":")[2].replace("_", "-")
            found.append((f"{lane}, sending", label, event.time_range))
    if not found:
        return []
    found.sort(key=_start_us)
    first_us = _start_us(found[0])
    in_ms = []
    for where, label, times in found:
        in_ms.append((where, label, (times.start - first_us) / 1e3, (times.end - first_us) / 1e3))
    return in_ms


def share(rows_of_rank: list[Row], label: str) -> float:
    """The part of the time from the first start to the last stop that `label` takes."""
    first = min(start for _, _, start, _ in rows_of_rank)
    last = max(stop for _, _, _, stop in rows_of_rank)
    taken = sum(stop - start for _, name, start, stop in rows_of_rank if name == label)
    return taken / (last - first)


def _start_us(found: tuple[str, str, Any]) -> float:
    """The profiler counts in microseconds."""
    return found[2].start


def _is_inside_another(event: Any) -> bool:
    """Whether an operation was called by another one of the table."""
    parent = event.cpu_parent
    while parent is not None:
        if parent.name in COMPUTING:
            return True
        parent = parent.cpu_parent
    return False
