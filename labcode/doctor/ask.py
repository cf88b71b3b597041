"""`python -m labcode.doctor hang [RUN | PID | JOB]`: who is where in a job that stands still.

    runs/gpt_tiny-003: 4 ranks were asked twice, 5 s apart
    stuck: nothing has moved: rank 3 has not come to all_reduce #812 of [1024]: it is in read
    (weather.py, line 88); ranks 0-2 wait in all_reduce #812 of [1024] among ranks 0-3

    rank 3, process 4711 on n2, 41 steps done
        read (weather.py, line 88)
        ...

It asks twice, because one look cannot tell a rank that is stuck from one that is slow. A rank that
cannot answer is named, with what its process does if that is on this machine, and with the stack
that py-spy sees if it is installed. The exit code is 1 if the job is stuck, 2 if no run was found.

Held by: tests/ranks/test_ask.py, tests/slurm/test_hang_of_a_job.py
"""

import contextlib
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import psutil

from labcode.doctor import hang_options
from labcode.doctor.answers import FOLDER, QUESTION, Answer, Thread
from labcode.doctor.find_run import processes_of
from labcode.runtime import processes
from labcode.runtime.files import is_held, write_atomically
from labcode.runtime.units import plural, ranks_text
from labcode.runtime.waits import describe

PY_SPY_S = 20.0
MOVES_ON = "moves on"
WORKS = "works"
STANDS = "stands"

Answered = Mapping[int, Answer]  # by rank


def main(arguments: Sequence[str]) -> int:
    """The command line behind `hang`; returns the exit code.

    Args:
        arguments: Arguments behind the word `hang`.
    """
    try:
        options, run = hang_options.read(arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        before = ask(run, options.patience)
        after = before
        if before:
            time.sleep(options.apart)
            after = ask(run, options.patience, before)
    except OSError as error:
        print(f"error: {run}: {error.strerror}: ask as its owner", file=sys.stderr)
        return 2
    if not is_held(run):
        print(f"{run} has ended meanwhile")
        return 0
    print("\n".join(report(run, before, after, options.apart, options.threads)))
    return 1 if is_stuck(before, after) else 0


# ---- ask


def ask(run: Path, patience_s: float, ranks: Collection[int] = ()) -> dict[int, Answer]:
    """Put one question to all ranks; returns the answers that came in time, by rank.

    Args:
        run: Folder of the run.
        patience_s: How long the ranks have.
        ranks: Ranks whose answers are waited for; none: all ranks of the job.

    Raises:
        OSError: The question cannot be written.
    """
    folder = run / FOLDER
    question = uuid.uuid4().hex
    deadline = time.monotonic() + patience_s
    answers: dict[int, Answer] = {}
    folder.mkdir(exist_ok=True)
    try:
        write_atomically(folder / QUESTION, question.encode())
        while time.monotonic() < deadline and not _is_complete(answers, ranks):
            time.sleep(0.05)
            answers = _read(folder, question)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return answers


def _is_complete(answers: Answered, ranks: Collection[int]) -> bool:
    if ranks:
        return set(ranks) <= answers.keys()
    return any(len(answers) == answer.world_size for answer in answers.values())


def _read(folder: Path, question: str) -> dict[int, Answer]:
    found = {}
    for path in folder.glob("rank-*.json"):
        with contextlib.suppress(FileNotFoundError):  # its answer to another question, replaced
            answer = Answer.from_json(path.read_text(encoding="utf-8"))
            if answer.question == question:
                found[answer.standing.rank] = answer
    return dict(sorted(found.items()))


# ---- compare


def movement(before: Answer, after: Answer) -> str:
    """What a rank has done between two looks.

    Returns:
        `MOVES_ON` if it has done a step or called a collective, `WORKS` if it is at another place
        in the code, `STANDS` if it is where it was.
    """
    first = before.standing
    second = after.standing
    if (first.step, first.recent, first.waits_in) != (second.step, second.recent, second.waits_in):
        return MOVES_ON
    return STANDS if before.threads[0] == after.threads[0] else WORKS


def _ranks_by_movement(before: Answered, after: Answered) -> dict[str, list[int]]:
    ranks: dict[str, list[int]] = {MOVES_ON: [], WORKS: [], STANDS: []}
    for rank in after:
        if rank in before:
            ranks[movement(before[rank], after[rank])].append(rank)
    return ranks


def is_stuck(before: Answered, after: Answered) -> bool:
    """Whether no rank has done anything between two looks."""
    ranks = _ranks_by_movement(before, after)
    return not ranks[MOVES_ON] and not ranks[WORKS]


def verdict(before: Answered, after: Answered, world_size: int, apart_s: float) -> str:
    """Stuck or slow, and who waits for whom, in one line.

    Args:
        before: What the ranks have said at the first look.
        after: The same at the second.
        world_size: Number of ranks.
        apart_s: Time between the looks.
    """
    standings = [answer.standing for answer in after.values()]
    who = describe(standings, world_size)
    ranks = _ranks_by_movement(before, after)
    if ranks[MOVES_ON]:
        moving = ranks[MOVES_ON]
        steps = max(after[rank].standing.step - before[rank].standing.step for rank in moving)
        done = plural(steps, "step")
        return f"slow or well, not stuck: it moves on, by {done} in {apart_s:g} s; now: {who}"
    if ranks[WORKS]:
        working = ranks_text(ranks[WORKS])
        verb = "is" if len(ranks[WORKS]) == 1 else "are"
        text = f"slow, or in a loop: {working} {verb} at another place in the code than before, but"
        return f"{text} no collective was called in {apart_s:g} s: {who}"
    return f"stuck: nothing has moved in {apart_s:g} s: {who}"


# ---- tell


def report(
    run: Path, before: Answered, after: Answered, apart_s: float, all_threads: bool
) -> list[str]:
    """The lines to print: the verdict, the stacks, and what is known of ranks that are silent.

    Args:
        run: Folder of the run.
        before: What the ranks have said at the first look.
        after: The same at the second.
        apart_s: Time between the looks.
        all_threads: Show the stack of each thread, not of the main thread alone.
    """
    here = socket.gethostname()
    pids = [answer.pid for answer in after.values() if answer.host == here]
    local = processes_of(run, pids)
    if not after:
        lines = [f"{run}: no rank answers; ranks do from their first step on, if they see {run}"]
        lines += silent_lines(local)
        return lines
    world_size = next(iter(after.values())).world_size
    ranks = "1 rank was" if world_size == 1 else f"{world_size} ranks were"
    lines = [
        f"{run}: {ranks} asked twice, {apart_s:g} s apart",
        verdict(before, after, world_size, apart_s),
    ]
    lines += _stacks(after, all_threads)
    silent = [rank for rank in range(world_size) if rank not in after]
    elsewhere = [rank for rank in silent if rank not in local]
    lines += silent_lines({rank: local[rank] for rank in silent if rank in local})
    if elsewhere:
        lines += ["", f"{ranks_text(elsewhere)}: no process on {here}; look at the other nodes"]
    return lines


def _stacks(answers: Answered, all_threads: bool) -> list[str]:
    """The stacks of the ranks; ranks with the same stacks together."""
    alike: dict[tuple[Thread, ...], list[Answer]] = {}
    for answer in answers.values():
        threads = answer.threads if all_threads else answer.threads[:1]
        alike.setdefault(threads, []).append(answer)
    lines = []
    for threads, group in alike.items():
        ranks = ranks_text(answer.standing.rank for answer in group)
        pids = ", ".join(f"{answer.pid} on {answer.host}" for answer in group)
        word = "process" if len(group) == 1 else "processes"
        steps = group[0].standing.step
        lines += ["", f"{ranks}, {word} {pids}, {plural(steps, 'step')} done"]
        for thread in threads:
            if all_threads:
                lines.append(f"  {thread.name}")
            lines += [f"    {frame}" for frame in thread.frames]
    return lines


def silent_lines(silent: Mapping[int, psutil.Process]) -> list[str]:
    """What is known of the processes of ranks that do not answer.

    Args:
        silent: {rank: its process on this machine}.
    """
    lines = []
    for rank, process in silent.items():
        lines += ["", f"rank {rank}, process {process.pid} here, does not answer: {state(process)}"]
        if processes.alive(process):
            lines += [f"    {line}" for line in dump(process.pid)]
    return lines


def state(process: psutil.Process) -> str:
    """What the system says of a process that does not answer, and what to do."""
    try:
        status = process.status()
    except psutil.NoSuchProcess:
        return "it has ended"
    texts = {
        psutil.STATUS_ZOMBIE: "it has ended",
        psutil.STATUS_STOPPED: f"it is stopped (SIGSTOP): kill -CONT {process.pid}",
        psutil.STATUS_TRACING_STOP: "a debugger holds it",
        psutil.STATUS_DISK_SLEEP: "it waits in the kernel, mostly for a disk or a network disk",
    }
    return texts.get(status, "it runs C code that holds Python's lock, or is not training yet")


def dump(pid: int) -> list[str]:
    """The stacks of a process as py-spy sees them from outside, or how to get them.

    Args:
        pid: A process on this machine.
    """
    py_spy = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if py_spy is None:
        return [f"its stack: pip install py-spy, then py-spy dump --pid {pid}"]
    command = [py_spy, "dump", "--pid", str(pid)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=PY_SPY_S
        )
    except subprocess.TimeoutExpired:
        return [f"py-spy did not answer within {PY_SPY_S:g} s"]
    return (done.stdout or done.stderr).rstrip().splitlines()
