"""What became of a case: one answer, and what must never happen besides.

Answers, of which a case has one:

    trained       it trained or went on to its end, or stopped with a checkpoint
    one line      exactly one `error:` line over all ranks that names what is wrong, no traceback,
                  the same exit code on all ranks: 2, or 130 after Ctrl-C
    unclear       one line, but it does not name the field or file, or the exit codes differ, or
                  something was refused that is allowed
    more lines    more than one line
    traceback     a traceback
    silent        it failed without a word, or trained on what it should have refused
    hung          it did not end within four minutes

Besides these:

    lost          a file that nobody asked to replace is gone or changed, or a checkpoint without a
                  later one in its place
    wrong         it went on from damage: the result is not bit for bit that of the whole run
    left behind   a folder after a refused command, an unfinished file, a process
"""

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

from .cases import REFUSED, TRAINS, Case, Room, contents, stands
from .forks import Done

ANSWERS = ("trained", "one line", "unclear", "more lines", "traceback", "silent", "hung")
FLAGS = ("lost", "wrong", "left behind")
COLUMNS = (*ANSWERS, *FLAGS)
CODES = (2, 130)
# lines that a run writes to stderr when all is well, or while it waits
ANSWERING = ("error: ", "interrupted")
TOLD = (*ANSWERING, "stopped by", "waiting for ")
NOISE_LINES = 2  # of libraries, beside the line
LOCK = "run.lock"
UNFINISHED = (".partial", ".tmp")
KEPT_STDERR = 3000


@dataclass
class Result:
    """The record of a case, a line of the results' file."""

    category: str
    number: int
    what: str
    commands: list[str]
    answer: str
    flags: dict[str, list[str]] = field(default_factory=dict)
    codes: list[int] = field(default_factory=list)
    stderr: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        """Whether this is how it should be."""
        return self.answer in ANSWERS[:2] and not any(flag in self.flags for flag in FLAGS)

    def as_json(self) -> dict:
        return asdict(self)


def judge(category: str, number: int, room: Room, before: dict[str, str]) -> Result:
    """The result of a case that has been played.

    Args:
        category: Its name.
        number: Number of the case in its category.
        room: Where it was played.
        before: `contents` of its folder before.
    """
    case = room.case
    done = room.answer
    assert done is not None, f"{category} {number} played nothing"
    answer, reason = answer_of(done, case)
    after = contents(room.folder)
    # where there is a step in the line, training had begun, and then its files stay
    room.began = room.began or answer == "trained" or "after step" in "\n".join(done.err)
    if not any(kind == "lost" for kind, _ in room.flags):
        _look_for_losses(room, before, after)
    _look_for_leftovers(room, before, after, done)
    flags: dict[str, list[str]] = {}
    for kind, why in room.flags:
        if kind == "unclear":
            if answer in ANSWERS[:2]:
                answer = "unclear"
                reason = why
        else:
            flags.setdefault(kind, []).append(why)
    if reason:
        flags.setdefault("why", []).append(reason)
    return Result(
        category=category,
        number=number,
        what=case.what,
        commands=room.commands,
        answer=answer,
        flags=flags,
        codes=done.codes,
        stderr=[text[-KEPT_STDERR:] for text in done.err],
        seconds=round(done.seconds, 2),
    )


def answer_of(done: Done, case: Case) -> tuple[str, str]:
    """(the answer, why it is that one)."""
    if done.hung:
        return "hung", f"after {done.seconds:.0f} s"
    if done.tracebacks:
        return "traceback", ""
    if set(done.codes) == {0}:
        if case.answer == REFUSED:
            return "silent", "accepted without a word"
        return "trained", ""
    lines = answers_in(done)
    if not lines:
        return "silent", f"codes {done.codes} without a line"
    written = "\n".join(done.err).splitlines()
    others = sum(bool(line.strip()) and not line.startswith(TOLD) for line in written)
    if len(lines) > 1 or others > NOISE_LINES:
        return "more lines", f"{len(lines)} lines that answer, {others} others"
    if len(set(done.codes)) > 1 or done.codes[0] not in CODES:
        return "unclear", f"exit codes {done.codes}"
    if case.answer == TRAINS:
        return "unclear", "refused what is allowed"
    told = "\n".join(line for line in written if line.startswith(ANSWERING)).lower()
    if case.names and not any(name.lower() in told for name in case.names):
        return "unclear", f"names none of {', '.join(case.names)}"
    return "one line", ""


def answers_in(done: Done) -> list[str]:
    """The lines that say why a run did not end as it was meant to."""
    lines = "\n".join(done.err).splitlines()
    return [line for line in lines if line.startswith(ANSWERING)]


def _look_for_losses(room: Room, before: dict[str, str], after: dict[str, str]) -> None:
    """Files that are gone or changed, though nobody asked for it."""
    lost = []
    for path, digest in before.items():
        if path.endswith(LOCK):
            continue  # says who works in the folder, and nothing else
        may_change = room.began and _below(path, room.case.replaced)
        if not may_change and not stands(path, digest, after):
            lost.append(path)
    if lost:
        room.flag("lost", f"gone or changed: {', '.join(lost[:5])} ({len(lost)} in all)")
    _look_for_lost_checkpoints(room, before, after)


def _look_for_lost_checkpoints(room: Room, before: dict[str, str], after: dict[str, str]) -> None:
    """The newest checkpoint of a folder must be there, or a later one."""
    if "--train.overwrite" in room.case.args:
        return
    now = _newest_steps(after)
    for folder, step in _newest_steps(before).items():
        # one that could not be resumed from makes room under another name
        aside = f"{folder}/step-{step:08d}.unused"
        is_kept = any(path.startswith(aside) for path in after)
        if now.get(folder, -1) < step and not is_kept:
            room.flag("lost", f"step {step} of {folder} is gone and nothing later stands")


def _newest_steps(paths: Iterable[str]) -> dict[str, int]:
    """The step of the newest checkpoint in each folder of checkpoints."""
    newest: dict[str, int] = {}
    for path in paths:
        match = re.fullmatch(r"(.*checkpoints)/step-(\d+)", path)
        if match:
            newest[match[1]] = max(int(match[2]), newest.get(match[1], -1))
    return newest


def _look_for_leftovers(
    room: Room, before: dict[str, str], after: dict[str, str], done: Done
) -> None:
    new = [path for path in after if path not in before]
    # of a run that was overwritten all is kept, as it was when it was killed
    unfinished = [path for path in new if path.endswith(UNFINISHED) and ".old-" not in path]
    if unfinished:
        room.flag("left behind", f"unfinished: {', '.join(unfinished[:3])}")
    if room.case.act is None and not room.began:
        extra = [path for path in new if not _below(path, ("cache", *room.case.replaced))]
        if extra:
            room.flag("left behind", f"after a refusal: {', '.join(extra[:3])}")
    temporary = sorted(path.name for path in room.tmp.iterdir())
    if temporary:
        room.flag("left behind", f"temporary files: {', '.join(temporary[:3])}")
    if done.left:
        room.flag("left behind", f"processes: {'; '.join(done.left[:3])}")


def _below(path: str, prefixes: tuple[str, ...] | list[str]) -> bool:
    return any(path == prefix or path.startswith(f"{prefix}/") for prefix in prefixes)
