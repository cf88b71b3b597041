"""From a recorded profile to the rows of a time line: what a rank computed, and when its messages were under way."""

from collections.abc import Callable

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

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


def record(
    step: Callable[[], object], repeats: int, lane: str
) -> list[list[tuple[str, str, float, float]]]:
    """Profile `step` on this rank, `repeats` times; the rows of each. The ranks begin each time together.

    Communicates: what `step` does, and a barrier before each. One more is made, since the first one warms up.
    """
    found = []
    for _ in range(repeats + 1):
        dist.barrier()
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            step()
        found.append(rows(recorded, lane))
    return found[1:]


def rows(recorded: profile, lane: str) -> list[tuple[str, str, float, float]]:
    """(lane, label, start, stop) in ms since the first of them, for `plot.timeline`.

    Computing is in the lane `lane`, collectives in `lane + ", sending"`; a collective lasts until the last rank has come
    and all bytes are there. An operation inside another one of the table is left out.

    Args:
        recorded: A profile that has ended.
        lane: Such as "rank 0".
    """
    found = []
    for event in recorded.events():
        label = COMPUTING.get(event.name)
        if label and not _inside(event):
            found.append((lane, label, event.time_range))
        elif event.name.startswith(BACKENDS):
            label = event.name.partition(":")[2].replace("_", "-")
            found.append((f"{lane}, sending", label, event.time_range))
    found.sort(key=lambda row: row[2].start)
    first = found[0][2].start if found else 0
    return [
        (lane, label, (times.start - first) / 1e3, (times.end - first) / 1e3)
        for lane, label, times in found
    ]


def share(rows_of_rank: list[tuple[str, str, float, float]], label: str) -> float:
    """The part of the time from the first start to the last stop that `label` takes."""
    span = max(row[3] for row in rows_of_rank) - min(row[2] for row in rows_of_rank)
    return sum(stop - start for _, name, start, stop in rows_of_rank if name == label) / span


def _inside(event):
    parent = event.cpu_parent
    while parent is not None:
        if parent.name in COMPUTING:
            return True
        parent = parent.cpu_parent
    return False
