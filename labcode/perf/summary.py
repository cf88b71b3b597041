"""All that a recorded run tells, as a text. No torch.

print(summary("runs/gpt_tiny-001"))
"""

from typing import Any

from labcode.perf.advice import advice
from labcode.perf.breakdown import REASONS, StepTimes, breakdown, mean
from labcode.perf.chrome_trace import Trace, read
from labcode.perf.operations import launches, top_operations

SHOWN = {
    "computing": "computing",
    "communication": "exposed communication",
    "data": "data wait",
    "other": "idle, other",
}


def summary(source: Any, rank: int | None = None, rows: int = 10) -> str:
    """Breakdown by step, overlap, operations, streams of a GPU, and what to do.

    Args:
        source: What `chrome_trace.read` takes.
        rank: Rank whose trace of a run is read.
        rows: Rows of the table of operations.

    Raises:
        ValueError: There is no such trace, or nothing in it.
    """
    trace = read(source, rank)
    times = breakdown(trace)
    lines = [_title(trace, times), "", *_table(times), "", *_whole(mean(times))]
    lines += ["", *_operations(trace, rows), *_streams(trace), ""]
    lines += [f"-> {line}" for line in advice(trace, rank)]
    return "\n".join(lines)


def _title(trace: Trace, times: list[StepTimes]) -> str:
    steps = ", ".join(str(one.step) for one in times)
    device = "GPU" if trace.has_gpu else "CPU"
    return f"rank {trace.rank}, {device}, steps {steps}; shares of the step"


def _table(times: list[StepTimes]) -> list[str]:
    names = [SHOWN[reason] for reason in REASONS]
    lines = [f"{'step':>6} {'ms':>9}  " + "  ".join(names)]
    for one in times:
        shares = [f"{one.share(reason):{len(SHOWN[reason])}.1%}" for reason in REASONS]
        lines.append(f"{one.step:>6} {one.total_ms:>9.2f}  " + "  ".join(shares))
    return lines


def _whole(times: StepTimes) -> list[str]:
    parts = [f"{part} {part_ms:.2f}" for part, part_ms in times.parts_ms.items()]
    lines = []
    if parts:
        lines.append(f"parts on the host, ms a step: {', '.join(parts)}")
    if times.overlap is not None:
        lines.append(
            f"collectives {times.collectives_ms:.2f} ms a step, {times.overlap:.0%} of it hidden "
            "behind computing"
        )
    return lines


def _operations(trace: Trace, rows: int) -> list[str]:
    what = "kernel" if trace.has_gpu else "operation"
    lines = [f"{'self ms':>9} {'calls':>7} {'share':>6}  {what}, all steps"]
    for operation in top_operations(trace, rows):
        numbers = f"{operation.self_ms:>9.2f} {operation.calls:>7} {operation.share:>6.1%}"
        lines.append(f"{numbers}  {operation.name[:80]}")
    return lines


def _streams(trace: Trace) -> list[str]:
    kept = launches(trace)
    if kept is None:
        return []
    lines = ["", f"GPU idle {kept.idle:.0%}; {kept.kernels} kernels of {kept.kernel_us:.1f} us"]
    if kept.at_once is not None:
        lines[-1] += f", {kept.at_once:.0%} of them began as soon as they were launched"
    for stream, (count, busy_ms, share) in kept.by_stream.items():
        lines.append(f"stream {stream}: {count} kernels and copies, {busy_ms:.2f} ms, {share:.0%}")
    return lines
