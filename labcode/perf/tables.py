"""Estimates and plans as text, for the command line and for lessons.

Held by: tests/unit/test_perf_cli.py
"""

from collections.abc import Mapping, Sequence

from labcode.perf.estimate import Estimate
from labcode.perf.plan import Layout, Plan, Refusal
from labcode.runtime.units import GIB, plural, seconds
from labcode.topology import GridShape

BAR = 24  # characters of the longest bar


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows as aligned columns: the first to the left, all others to the right.

    Args:
        rows: Texts of each row, equally many; the first row is the head.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        for text, width in zip(row[1:], widths[1:], strict=True):
            cells.append(text.rjust(width))
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def parts_table(parts: Mapping[str, float], unit: str) -> str:
    """A bar for each part, the largest first; those that are nothing are left out.

    Args:
        parts: {part: seconds, or bytes}.
        unit: "s" or "GiB".
    """
    total = sum(parts.values())
    rows = []
    for name, value in sorted(parts.items(), key=_value, reverse=True):
        if value <= 0:
            continue
        bar = "#" * max(1, round(BAR * value / total))
        rows.append([name, _amount(value, unit), f"{100 * value / total:.1f} %", bar.ljust(BAR)])
    rows.append(["all", _amount(total, unit), "100 %", " " * BAR])
    return columns([["part", "time" if unit == "s" else "memory", "share", " " * BAR], *rows])


def _value(item: tuple[str, float]) -> float:
    return item[1]


def _amount(value: float, unit: str) -> str:
    return seconds(value) if unit == "s" else f"{value / GIB:.1f} GiB"


def estimate_text(found: Estimate, shape: GridShape) -> str:
    """One estimate with all its parts."""
    least, most = found.interval_s
    verdict = "fits into" if found.fits else "does not fit into"
    return "\n".join(
        (
            f"{shape}: {plural(shape.world_size, 'rank')}",
            f"step {seconds(found.step_s)} ({seconds(least)} to {seconds(most)} in 8 of 10 cases), "
            f"MFU {100 * found.mfu:.0f} %",
            "",
            parts_table(found.parts, "s"),
            "",
            f"memory {found.memory_bytes / GIB:.1f} GiB {verdict} "
            f"{found.memory_limit_bytes / GIB:.1f} GiB",
            "",
            parts_table(found.memory_parts, "GiB"),
        )
    )


HEAD = (
    "dp x pp x cp x tp",
    "order",
    "micro-batch",
    "stages",
    "ZeRO",
    "checkpointing",
    "memory",
    "step",
)


def layout_row(layout: Layout) -> list[str]:
    """One line of a table with `HEAD`."""
    shape = layout.shape
    settings = layout.settings
    experts = f", ep {shape.ep}" if shape.ep > 1 else ""
    return [
        f"{shape.dp} x {shape.pp} x {shape.cp} x {shape.tp}" + experts,
        shape.order,
        str(settings.micro_batch),
        str(settings.stages_per_rank),
        str(settings.zero_stage),
        settings.activation_checkpointing,
        f"{layout.memory_bytes / GIB:.0f} GiB",
        seconds(layout.step_s),
    ]


def best_of_each_grid(found: Plan) -> list[Layout]:
    """The fastest layout of each grid (dp, pp, cp, tp, ep), the fastest grid first."""
    seen = set()
    best = []
    for layout in found.ranked:
        shape = layout.shape
        grid = (shape.dp, shape.pp, shape.cp, shape.tp, shape.ep)
        if grid not in seen:
            seen.add(grid)
            best.append(layout)
    return best


def plan_text(found: Plan, *, top: int = 10, every: bool = False) -> str:
    """A plan as a table.

    Args:
        found: The plan.
        top: How many lines.
        every: Whether layouts that share a grid have a line each; otherwise its fastest.
    """
    layouts = list(found.ranked) if every else best_of_each_grid(found)
    counts = f"{plural(len(found.ranked), 'layout')} that fit, {len(found.refused)} that do not"
    lines = [counts]
    if len(layouts) < len(found.ranked):
        grids = plural(len(layouts), "grid")
        lines = [f"{counts}; on {grids}, of each the fastest layout (all of them: --every)"]
    if layouts:
        rows = [layout_row(layout) for layout in layouts[:top]]
        lines.append("")
        lines.append(columns([list(HEAD), *rows]))
        least, most = layouts[0].interval_s
        lines.append("")
        lines.append(
            f"the first takes {seconds(least)} to {seconds(most)} in 8 of 10 cases; the order of "
            "layouts is surer than their times"
        )
    if found.refused:
        nearest = min(found.refused, key=_needed)
        shape = nearest.shape
        lines.append("")
        lines.append(
            f"refused, for example: {shape} with micro-batch {nearest.settings.micro_batch}, "
            f"ZeRO-{nearest.settings.zero_stage}, "
            f"checkpointing {nearest.settings.activation_checkpointing}: {nearest.reason}"
        )
        if not found.ranked:
            lines.append("try more GPUs (--gpus), or a leaner --state such as bf16")
    return "\n".join(lines)


def _needed(refusal: Refusal) -> float:
    return refusal.needed_bytes
