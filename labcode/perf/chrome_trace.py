"""A recorded run as the profiler of PyTorch writes it: Chrome's trace format, in JSON. No torch.

Each event has a category: `cpu_op` is an operation of torch, `user_annotation` a named range,
`cuda_runtime` and `cuda_driver` calls of CUDA on the host; `kernel`, `gpu_memcpy` and `gpu_memset`
ran on a GPU, `gpu_user_annotation` is from the first to the last kernel that a named range has
launched. A call on the host and what it starts on the device have one `correlation` number; the
device's events know their `stream`.

Source: libkineto/src/output_json.cpp of github.com/pytorch/kineto, and traces of torch 2.13.
Held by: tests/unit/test_chrome_trace.py
"""

import gzip
import json
import re
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from labcode.runtime.suggest import run_near

SUFFIXES = (".pt.trace.json", ".pt.trace.json.gz")  # as TensorBoard's profiler tab looks for them
FOLDER = "profile"  # of a run
PARTS = ("data", "forward", "backward", "communication", "optimizer")  # ranges of a step
GRAPH = "graph"  # forward and backward of a step, in one CUDA graph
STEP = re.compile(r"ProfilerStep#(\d+)")
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")


class Event(NamedTuple):
    """What ran from when to when.

    Args:
        name, category: Name and category, as above.
        start_us, stop_us: Microseconds of the profiler's clock.
        thread: (process, thread), or (device, stream) of what ran on a GPU.
        args: What else is known of it.
    """

    name: str
    category: str
    start_us: float
    stop_us: float
    thread: tuple[Any, Any]
    args: dict[str, Any]

    @property
    def duration_us(self) -> float:
        """From its start to its end."""
        return self.stop_us - self.start_us


class Trace:
    """All that one rank has recorded.

    Args:
        content: The JSON of the trace.
        path: File that it was read from; None: none.

    Attributes:
        events: What has a duration, by its start; what lasts longer comes before what it contains.
        instants: What has none, such as "[memory]", in order.
        content: All else of the JSON.

    Raises:
        ValueError: It is no trace.
    """

    def __init__(self, content: Any, path: Path | None = None) -> None:
        if not isinstance(content, dict) or not isinstance(content.get("traceEvents"), list):
            raise ValueError(f"{path or 'this'} is no trace of a profiler: it has no traceEvents")
        self.path = path
        self.content = {name: value for name, value in content.items() if name != "traceEvents"}
        self.events: list[Event] = []
        self.instants: list[Event] = []
        for entry in content["traceEvents"]:
            if entry.get("ph") == "X":
                self.events.append(_event(entry))
            elif entry.get("ph") == "i":
                self.instants.append(_event(entry))
        self.events.sort(key=_in_order)
        self.instants.sort(key=_in_order)

    @property
    def rank(self) -> int:
        """Rank of the process that was recorded; 0 where it was alone."""
        return self.content.get("distributedInfo", {}).get("rank", 0)

    @property
    def has_gpu(self) -> bool:
        """Whether a GPU was recorded."""
        return any(event.category in ON_GPU for event in self.events)

    def of(self, *categories: str) -> Iterator[Event]:
        """The events of some categories, in order."""
        for event in self.events:
            if event.category in categories:
                yield event

    def parts(self, step: Event) -> Iterator[Event]:
        """The named parts of a step, as its host has marked them, in order."""
        for event in self.of("user_annotation"):
            is_part = event.name in (*PARTS, GRAPH) and event.thread == step.thread
            if is_part and step.start_us <= event.start_us < step.stop_us:
                yield event

    def steps(self) -> dict[int, Event]:
        """{number: the range of the step on the host}; without any, all that was recorded is one.

        Raises:
            ValueError: Nothing was recorded.
        """
        found = {}
        for event in self.of("user_annotation"):
            matched = STEP.fullmatch(event.name)
            if matched:
                found[int(matched[1])] = event
        if found:
            return found
        recorded = [event for event in self.events if event.category != "Trace"]
        if not recorded:
            raise ValueError(f"{self.path or 'this trace'} has no events: nothing was recorded")
        first = recorded[0]
        on_host = [event for event in recorded if event.category == "cpu_op"] or recorded
        stop_us = max(event.stop_us for event in recorded)
        thread = on_host[0].thread
        return {0: Event("all", "user_annotation", first.start_us, stop_us, thread, {})}


def read(source: Any, rank: int | None = None) -> Trace:
    """A trace.

    Args:
        source: A file, the folder of a run, or a `torch.profiler.profile` that has ended and was
            not exported before.
        rank: Rank whose trace of a run is read; None: the first there is.

    Raises:
        ValueError: There is no such file, it is no trace, or the profile was exported already.
    """
    if isinstance(source, Trace):
        return source
    if hasattr(source, "export_chrome_trace"):
        return _read_profile(source)
    path = Path(source)
    if path.is_dir():
        path = _file_of_run(path, rank)
    if not path.is_file():
        raise ValueError(
            f"{path} does not exist: give a trace, or the folder of a run; {run_near(path)}"
        )
    try:
        text = path.read_bytes()
        if path.suffix == ".gz":
            text = gzip.decompress(text)
        content = json.loads(text)
    except (ValueError, OSError, EOFError, zlib.error, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as a trace: {error}") from None
    return Trace(content, path)


def files_of_run(run: Path) -> list[Path]:
    """The traces of a run, in the order of the ranks."""
    folder = run / FOLDER if (run / FOLDER).is_dir() else run
    found = [path for path in folder.iterdir() if path.name.endswith(SUFFIXES)]
    return sorted(found, key=_rank_in_name)


def _file_of_run(run: Path, rank: int | None) -> Path:
    found = files_of_run(run)
    if not found:
        raise ValueError(
            f"{run} has no profile: train with --profile.steps 10:13, then its folder has one"
        )
    for path in found:
        if rank is None or _rank_in_name(path)[0] == rank:
            return path
    known = ", ".join(str(_rank_in_name(path)[0]) for path in found)
    raise ValueError(f"{run} has no profile of rank {rank}: there are those of {known}")


def _rank_in_name(path: Path) -> tuple[int, str]:
    """(rank, name) of a file such as HOST_3.pt.trace.json.gz, in which a time may stand too."""
    matched = re.search(r"_(\d+)(\.\d+)?\.pt\.trace", path.name)
    return (int(matched[1]) if matched else 0, path.name)


def _read_profile(profile: Any) -> Trace:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        try:
            profile.export_chrome_trace(str(path))
        except RuntimeError as error:
            raise ValueError(
                f"the profile cannot be exported ({error}): PyTorch does that once, so read the "
                "file that it was exported to"
            ) from None
        return Trace(json.loads(path.read_bytes()))


def _event(entry: dict[str, Any]) -> Event:
    start_us = float(entry["ts"])
    stop_us = start_us + float(entry.get("dur", 0))
    thread = (entry.get("pid"), entry.get("tid"))
    category = entry.get("cat") or ""
    return Event(entry["name"], category, start_us, stop_us, thread, entry.get("args") or {})


def _in_order(event: Event) -> tuple[float, float]:
    return (event.start_us, -event.stop_us)
