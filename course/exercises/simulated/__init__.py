"""The ranks of a job as threads of one process, of which exactly one runs at a time.

    outcome = simulate(4, work, x)     # work(rank, x), with torch.distributed as on four real ranks
    outcome.raise_first()              # what went wrong, in words
    outcome.results, outcome.events    # what each rank returned; who called what, who waited, when

A rank keeps the baton until it waits for what cannot be there yet; then the next rank takes it that
can go on. So every run is the same, however busy the machine is, and nothing needs a clock: when
nobody can go on, it is a deadlock, known at once. A request that nobody waits for delivers nothing,
and a loop without an end is known by the number of its steps.

    events        what a run leaves behind: calls, results, errors, and where ranks are stuck
    baton         which rank runs, and what each of them has for itself
    group         a `ProcessGroup` that gives the baton on, and writes down who called what
    collectives   what each collective sends, adds and receives, with gloo's own rules
    tables        torch.distributed's tables of groups, one set for each rank

What it does not do: calls that block in C (`time.sleep`, `queue.get`, locks) keep the baton. In a
learner's own thread calls are written down and send nothing. The ranks share what threads share:
numpy's generator, `os.environ` (but for what torchrun sets), the globals of imported modules. All
collectives synchronise, as MPI allows; with gloo the root of a broadcast may run ahead. No dispatch
mode, such as `counted()`, sees the calls; the events have them.
"""

import contextlib
import functools
import gc
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch

from course.exercises.simulated import tables
from course.exercises.simulated.baton import (
    MAX_STEPS,
    Run,
    current,
    here,
    launched_by_torchrun,
    own_state,
)
from course.exercises.simulated.events import (
    DeadEnd,
    Endless,
    Event,
    Mismatch,
    Outcome,
    Stuck,
)

__all__ = [
    "DeadEnd",
    "Endless",
    "Event",
    "Mismatch",
    "Outcome",
    "Stuck",
    "current",
    "here",
    "join",
    "simulate",
]

NOBODY: Mapping[Callable[..., Any], str] = MappingProxyType({})
INTERRUPTED_S = 1.0  # how long a rank that sleeps in C is waited for after Ctrl-C


def simulate(
    size: int,
    fn: Callable[..., Any],
    *args: Any,
    ours: Mapping[Callable[..., Any], str] = NOBODY,
    max_steps: int = MAX_STEPS,
    joined: bool = True,
) -> Outcome:
    """Run `fn(rank, *args)` on `size` ranks, one at a time; each has its own copy of everything.

    Args:
        size: Number of ranks.
        fn: What each of them calls.
        args: Arguments after the rank.
        ours: {function that solves the exercise already: what whoever calls it is told}.
        max_steps: How many bytecodes of the learner's code one rank may execute.
        joined: Whether there is a group of all ranks from the start; else they are as torchrun
            starts them, and `join()` makes it.

    Held by: test_simulated_is_gloo.py::test_it_is_what_gloo_does
    """
    run = Run(size, max_steps, ours)
    plain = own_state()._replace(
        generator=torch.Generator().get_state(),
        python_generator=random.Random(0).getstate(),
        dtype=torch.float32,
    )
    with tables.installed(), _objects_of_before_put_aside():
        threads = []
        for rank, call in zip(run.ranks, tables.copies(size, fn, args)):
            first = functools.partial(tables.join_world, rank)
            fresh = plain
            if not joined:
                first = _nothing
                fresh = plain._replace(launched=launched_by_torchrun(rank.number, size))
            thread = threading.Thread(target=run.act, args=(rank, first, call, fresh), daemon=True)
            thread.start()
            threads.append(thread)
        run.ranks[0].turn.release()
        try:
            for thread in threads:
                thread.join()
        except KeyboardInterrupt:
            run.interrupt()
            for thread in threads:
                thread.join(INTERRUPTED_S)
            raise
    return run.outcome()


def join() -> None:
    """Give the simulated rank that runs the group of all, as `init_process_group` does."""
    rank = current()
    assert rank is not None
    tables.join_world(rank)


def _nothing() -> None:
    """What a rank does first that is alone."""


@contextlib.contextmanager
def _objects_of_before_put_aside() -> Iterator[None]:
    """Python's `gc.collect()` looks through what the run has made, which takes 1 ms and not 200.

    A check that asks what is kept in memory calls it on each rank.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
