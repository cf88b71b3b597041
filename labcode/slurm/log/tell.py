"""The story of a job in sentences, for a person.

    rank 3 on n2 failed first: out of GPU memory (train.err, line 812)
        torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB ...
        raised in forward (model.py, line 88)
    It means: the GPU has no memory left for what this rank was about to allocate.
    What to do: smaller micro-batch ...
    Only consequences:
        another rank is gone: ranks 0-2 (train.err, line 820)

Held by: tests/unit/test_job_log.py
"""

from collections.abc import Iterable

from labcode.runtime.units import ranks_text
from labcode.slurm.log.kinds import IMPORT, NCCL_WARNING, TIME_OUT, Order
from labcode.slurm.log.story import LONGEST, Event, Story

MOST_CONSEQUENCES = 8
ALL_WAIT = ";"  # between who waits here and who waits there
EVERYBODY = (
    "all that these files tell of wait in the same one: the network stands still, or the rank that "
    "did not come has no file here"
)
IN = "    "


def tell(story: Story) -> list[str]:
    """The lines to print.

    Args:
        story: The story that was read from the log.
    """
    first = story.first
    if first is None:
        return _nothing_known(story)
    lines = [_headline(first), f"{IN}{first.what}"]
    if first.place:
        lines.append(f"{IN}raised in {first.place}")
    if first.kind.name != TIME_OUT:
        lines += _alike(story)
    elif first.rank is None and ALL_WAIT not in first.what:
        lines.append(f"{IN}{EVERYBODY}")
    if first.kind.order == Order.FOLLOWED:
        lines.append(_only_consequences(story))
    lines.append(f"It means: {first.kind.means}.")
    if first.kind.do:
        lines.append(f"What to do: {first.kind.do}.")
    if story.not_finite is not None and story.not_finite.line != first.line:
        place = story.not_finite.line.place
        lines.append(f"Before that the loss was no longer finite: {place}.")
    if story.handled and first.kind.order != Order.CAUSE:
        lines += ["Said before, and steps went on:", *_consequences(story.handled)]
    if story.followed:
        lines += ["Only consequences:", *_consequences(story.followed)]
    return lines


def _headline(first: Event) -> str:
    where = f"({first.line.place})"
    who = _who([first])
    if first.kind.order == Order.OUTSIDE:
        host = f" on {first.host}" if first.host else ""
        return f"The job was ended from outside{host}: {first.kind.name} {where}"
    if first.kind.order == Order.FOLLOWED:
        return f"{who or 'A rank'} says only: {first.kind.name} {where}"
    if first.kind.name == TIME_OUT:
        missing = f"{ranks_text([first.rank])} did not come" if first.rank is not None else ""
        return f"{missing or 'Nothing failed by itself'}: {first.kind.name} {where}"
    if first.rank is None:
        return f"Failed first{' ' + who if who else ''}: {first.kind.name} {where}"
    return f"{who} failed first: {first.kind.name} {where}"


def _alike(story: Story) -> list[str]:
    """Who else says the same; an import that fails on one node alone is that node's."""
    assert story.first is not None
    if not story.alike:
        hosts = {event.host for event in story.followed if event.host}
        on_one = story.first.host and hosts - {story.first.host}
        if story.first.kind.name == IMPORT and on_one:
            return [f"{IN}on {story.first.host} alone: the others do not say so"]
        return []
    ranks = sorted({event.rank for event in story.alike if event.rank is not None})
    hosts = sorted({event.host for event in (story.first, *story.alike) if event.host})
    text = f"the same of {ranks_text(ranks)}" if ranks else "others say the same"
    if len(hosts) == 1 and story.first.kind.name == IMPORT:
        text += f"; all on {hosts[0]}"
    return [f"{IN}{text}"]


def _only_consequences(story: Story) -> str:
    """What to say where no cause is in these files."""
    text = "No cause is in these files, only consequences"
    if story.peers:
        text += f"; the connection that was lost led to {', '.join(story.peers[:3])}: look there"
    return f"{text}."


def _consequences(events: Iterable[Event]) -> list[str]:
    """One line for each kind, with its ranks."""
    of_kind: dict[str, list[Event]] = {}
    for event in events:
        of_kind.setdefault(event.kind.name, []).append(event)
    lines = []
    for name, alike in of_kind.items():
        who = _who(alike)
        text = f"{IN}{name}: {who}" if who else f"{IN}{name}"
        if alike[0].kind.order == Order.CAUSE or name == NCCL_WARNING:
            text += f": {alike[0].what[: LONGEST // 2]}"
        lines.append(f"{text} ({alike[0].line.place})")
    if len(lines) > MOST_CONSEQUENCES:
        left = len(lines) - MOST_CONSEQUENCES
        lines[MOST_CONSEQUENCES:] = [f"{IN}and {left} more kinds"]
    return lines


def _who(events: Iterable[Event]) -> str:
    """ "rank 3 on n2"; "" if nobody is named."""
    known = list(events)
    ranks = sorted({event.rank for event in known if event.rank is not None})
    hosts = sorted({event.host for event in known if event.host})
    text = ranks_text(ranks) if ranks else ""
    if hosts and len(hosts) <= 2:
        text += f" on {' and '.join(hosts)}"
    return text.strip()


def _nothing_known(story: Story) -> list[str]:
    if not story.last_lines:
        return ["Nothing stands in these files."]
    lines = ["There is no failure here that I know. The last lines are:"]
    lines += [f"{IN}{line.text[:LONGEST]}" for line in story.last_lines]
    return lines
