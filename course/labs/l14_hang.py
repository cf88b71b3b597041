"""Lesson 14: what a hanging job leaves behind, stacks and the flight recorder's files.

    save_flight_record(folder, rank)  # on each rank, at the end
    print(stacks(folder))    # where each rank was, from faulthandler's files "stack_0", "stack_1"
    print(calls(folder))     # what each rank called, one beside the other
    print(analysis(folder))  # what PyTorch's own analyser says

Held by: tests/unit/test_slurm_hang.py
"""

import pickle
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PREFIX = "rank_"
COLUMN = 44  # characters
_FRAME = re.compile(r'^\s+File "([^"]+)", line (\d+) in (\S+)')
# frames between the program and the interpreter, and PyTorch's own logging
_DULL = ("<frozen", "launch_rank.py", "c10d_logger.py", "runpy.py")


def save_flight_record(folder: Path, rank: int) -> None:
    """Write down the collectives that PyTorch has recorded for this rank.

    PyTorch 2.13 records the last 2000 of a rank (measured, with gloo), and TORCH_FR_BUFFER_SIZE
    says another number; older versions may record none without it. With NCCL, PyTorch writes such a
    file by itself when the watchdog strikes. What gloo records lacks the name and the ranks of the
    group, which are filled in here.

    Source: docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html
    """
    import torch.distributed as dist
    from torch._C import _distributed_c10d

    recorded = _distributed_c10d._dump_fr_trace()  # pyright: ignore[reportAttributeAccessIssue]
    dump = pickle.loads(recorded)
    everybody = str(list(range(dist.get_world_size())))
    dump["pg_config"] = {"0": {"name": "0", "desc": "default_pg", "ranks": everybody}}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{PREFIX}{rank}").write_bytes(pickle.dumps(dump))


def _records(folder: Path) -> Mapping[int, list[dict[str, Any]]]:
    """{rank: its recorded collectives}."""
    found = {}
    for path in sorted(folder.glob(f"{PREFIX}*")):
        rank = int(path.name.removeprefix(PREFIX))
        # written by our own ranks a moment ago: nothing in it comes from elsewhere
        found[rank] = pickle.loads(path.read_bytes())["entries"]
    return found


def calls(folder: Path) -> str:
    """The recorded collectives of all ranks, one row for each number, one column for each rank."""
    records = _records(folder)
    rows = ["call  " + "".join(f"{f'rank {rank}':{COLUMN}}" for rank in records)]
    longest = max(len(entries) for entries in records.values())
    for number in range(longest):
        cells = [_cell(entries, number) for entries in records.values()]
        rows.append(f"{number + 1:<6}" + "".join(f"{cell:{COLUMN}}" for cell in cells))
    return "\n".join(row.rstrip() for row in rows)


def _cell(entries: list[dict[str, Any]], number: int) -> str:
    if number >= len(entries):
        return "-"
    entry = entries[number]
    operation = entry["profiling_name"].partition(":")[2]
    sizes = ", ".join(map(str, entry["input_sizes"]))
    frames = [frame for frame in entry["frames"] if not _is_dull(frame["filename"])]
    own = [frame for frame in frames if "distributed_c10d" not in frame["filename"]]
    place = f" in {own[0]['name']}, line {own[0]['line']}" if own else ""
    return f"{operation} {sizes}{place}"


def _is_dull(file: str) -> bool:
    return any(name in file for name in _DULL)


def stacks(folder: Path) -> str:
    """Where each rank was, innermost call first, from what faulthandler has written."""
    parts = []
    for path in sorted(folder.glob("stack_*")):
        parts.append(f"rank {path.name.removeprefix('stack_')}")
        frames: list[str] = []
        for line in path.read_text().splitlines():
            if line.startswith(("Thread", "Current thread")):
                frames = []  # of another thread: the main thread comes last
            frame = _FRAME.match(line)
            if frame and not _is_dull(frame[1]):
                frames.append(f"    {frame[3]} ({Path(frame[1]).name}:{frame[2]})")
        parts += frames
    return "\n".join(parts)


def analysis(folder: Path) -> str:
    """What PyTorch's analyser says of the files in a folder, with file names in place of paths."""
    module = "torch.distributed.flight_recorder.fr_trace"
    command = [sys.executable, "-m", module, str(folder), "--prefix", PREFIX]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    lines = []
    for line in (done.stdout + done.stderr).splitlines():
        if "tabulate is not installed" in line or _is_dull(line):
            continue
        lines.append(re.sub(r"/\S*/(\S+:\d+)", r"\1", line).rstrip())
    return "\n".join(lines)
