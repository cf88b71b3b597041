"""Where a rank stands while nothing moves: the collective it waits in, and its place in the code.

Torch keeps a flight recorder, a ring of the last collectives of each process group, for gloo and
NCCL alike; `bootstrap` switches it on. A rank that waits has an entry there which is not retired.
A rank that has not come has none: for it the stack of its main thread says what it does instead.
Gloo records no single sends and receives, so that the stack speaks for those too.

    rank 0 waits in all_reduce #812 of [1024] of ranks 0-3     from the flight recorder
    rank 3 is in read (labcode/data/weather.py, line 88)       from its stack

Source: the format of the flight recorder, docs.pytorch.org/tutorials/unstable/
    flight_recorder_tutorial.html; torch/csrc/distributed/c10d/FlightRecorder.hpp, version 2.10 of
    the format.
Held by: tests/unit/test_hang.py
"""

import itertools
import json
import sys
import sysconfig
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from labcode.runtime.waits import Call, Standing

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = (Path(torch.__file__).parent, Path(sysconfig.get_paths()["stdlib"]))
RECENT = 10  # a rank whose partner has called something else may have gone on a few calls
DEFAULT_GROUP = "default_pg"  # how torch describes the group of all ranks


def own_standing(step: int) -> Standing:
    """Where this rank stands now; any thread may ask.

    Args:
        step: Optimizer steps done.
    """
    entries = recorded()
    groups = _ranks_of_groups()
    recent: dict[tuple[int, ...], deque[Call]] = {}
    waits_in = None
    for entry in entries:
        call = call_of(entry, groups)
        if call is None:
            continue
        recent.setdefault(call.ranks, deque(maxlen=RECENT)).append(call)
        if waits_in is None and not entry["retired"]:
            waits_in = call
    calls = tuple(itertools.chain.from_iterable(recent.values()))
    return Standing(dist.get_rank(), step, place_of_main_thread(), waits_in, calls)


def recorded() -> list[dict[str, Any]]:
    """The entries of torch's flight recorder, oldest first; none where this torch has no such."""
    c10d = torch._C._distributed_c10d  # pyright: ignore[reportAttributeAccessIssue]
    entries: list[dict[str, Any]] = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(c10d, name, None)
        if dump is not None:
            entries += json.loads(dump()).get("entries", [])
    entries.sort(key=_created_ns)
    return entries


def call_of(entry: Mapping[str, Any], groups: Mapping[str, tuple[int, ...]]) -> Call | None:
    """One entry of the flight recorder as a call; None of a group that no longer exists.

    Args:
        entry: Entry of the flight recorder, as torch writes it.
        groups: {name of a group: its global ranks}.
    """
    name, description = entry["process_group"]
    ranks = groups.get(DEFAULT_GROUP if description == DEFAULT_GROUP else name)
    if ranks is None or entry["is_p2p"]:
        return None
    return Call(
        operation=entry["profiling_name"].rpartition(":")[2],
        number=entry["collective_seq_id"],
        sizes=tuple(tuple(size) for size in entry["input_sizes"]),
        ranks=ranks,
        created_s=entry["time_created_ns"] / 1e9,
    )


def place_of_main_thread() -> str:
    """The innermost function of the main thread that belongs to neither torch nor Python."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return place_of(frame)


def place_of(frame: FrameType | None) -> str:
    """The innermost function from a frame outwards that belongs to neither torch nor Python.

    Returns:
        "read (labcode/data/weather.py, line 88)"; "" without one.
    """
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_absolute() and not any(path.is_relative_to(folder) for folder in LIBRARIES):
            return f"{frame.f_code.co_name} ({_shown(path)}, line {frame.f_lineno})"
        frame = frame.f_back
    return ""


def position_of_main_thread() -> tuple[Any, ...]:
    """What changes as soon as the main thread continues: each function that it is in, and where."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    position = []
    while frame is not None:
        position.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(position)


def _shown(path: Path) -> str:
    """A file by a name that says where it belongs, without the folder of anybody's machine."""
    if path.is_relative_to(ROOT):
        return str(path.relative_to(ROOT))
    return path.name


def _ranks_of_groups() -> dict[str, tuple[int, ...]]:
    """{name of each process group of this rank: its global ranks}."""
    world = dist.distributed_c10d._world
    groups = {DEFAULT_GROUP: tuple(range(dist.get_world_size()))}
    for group, name in list(world.pg_names.items()):
        groups[name] = tuple(dist.get_process_group_ranks(group))
    return groups


def _created_ns(entry: Mapping[str, Any]) -> int:
    return entry["time_created_ns"]
