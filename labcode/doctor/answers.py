"""A rank answers where it stands when somebody asks from outside: a thread, and a file.

    RUN/hang/ask           the question: a word that nobody has used
    RUN/hang/rank-3.json   the answer of rank 3 to it

Each rank looks for the question once a second, less often in a large job. It needs no signal, which
would interrupt what the main thread does, no connection to another rank, which may be the one that
is stuck, and no store. So the ranks that can answer do so whatever the others do, and a run that is
only slow continues as if nobody had asked. Nothing is written before somebody asks:
`python -m labcode.doctor hang` does (`labcode.doctor.ask`).

    with Answers(folder, step):    # `labcode.train` does this
        ...

Held by: tests/ranks/test_ask.py
"""

import contextlib
import json
import os
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

from labcode.doctor.standing import Standing, own_standing, stack_of

FOLDER = "hang"  # within that of the run
QUESTION = "ask"
LOOK_S = 1.0
LOOKS_PER_S = 100  # of all ranks together: a shared file system answers each of them


@dataclass(frozen=True)
class Thread:
    """What one thread runs.

    Args:
        name: Name of the thread.
        frames: "read (labcode/data/weather.py, line 88)", innermost call first.
    """

    name: str
    frames: tuple[str, ...]


@dataclass(frozen=True)
class Answer:
    """What one rank says of itself.

    Args:
        question: To which this is the answer.
        world_size: Number of ranks of its job.
        host: Host that it runs on.
        pid: Process id of the rank there.
        standing: The collective that it waits in, and its place in the code.
        threads: What each thread runs; the main thread comes first.
    """

    question: str
    world_size: int
    host: str
    pid: int
    standing: Standing
    threads: tuple[Thread, ...]

    def to_json(self) -> str:
        """The answers as JSON text, for the file."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Answer":
        """From what `to_json` gave."""
        tree = json.loads(text)
        tree["standing"] = Standing.from_json(json.dumps(tree["standing"]))
        threads = [Thread(each["name"], tuple(each["frames"])) for each in tree["threads"]]
        tree["threads"] = tuple(threads)
        return cls(**tree)


class Answers:
    """Within it this rank answers; the process groups exist already.

    Communicates: nothing. Each rank opens one file a second, which is not there.

    Args:
        folder: Folder of the run. A rank that does not see it cannot be asked.
        step: How many optimizer steps are done.

    Held by: tests/ranks/test_ask.py
    """

    def __init__(self, folder: Path, step: Callable[[], int]) -> None:
        self._folder = Path(os.path.abspath(folder)) / FOLDER
        self._step = step
        self._answered = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="doctor hang", daemon=True)

    def __enter__(self) -> "Answers":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=1.0)

    def _listen(self) -> None:
        look_s = max(LOOK_S, dist.get_world_size() / LOOKS_PER_S)
        while not self._stop.wait(look_s):
            # the one who asked may remove all of it at any moment
            with contextlib.suppress(OSError, UnicodeDecodeError):
                self._look()

    def _look(self) -> None:
        """Answer if there is a question that this rank has not answered."""
        question = (self._folder / QUESTION).read_text(encoding="utf-8")
        if question == self._answered:
            return
        self._answered = question
        answer = Answer(
            question=question,
            world_size=dist.get_world_size(),
            host=socket.gethostname(),
            pid=os.getpid(),
            standing=own_standing(self._step()),
            threads=tuple(own_threads()),
        )
        path = self._folder / f"rank-{answer.standing.rank}.json"
        # whole or not at all; that it survives a loss of power matters to nobody
        unfinished = path.with_suffix(".partial")
        unfinished.write_text(answer.to_json(), encoding="utf-8")
        os.replace(unfinished, path)


def own_threads() -> list[Thread]:
    """What each thread of this process runs but the one that asks; the main thread comes first."""
    known = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    found = []
    for ident, frame in sys._current_frames().items():
        if ident == threading.get_ident():
            continue
        thread = Thread(known.get(ident, f"thread {ident}"), tuple(stack_of(frame)))
        if ident == main:
            found.insert(0, thread)
        else:
            found.append(thread)
    return found
