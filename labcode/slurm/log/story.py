"""What happened in a job, from what it printed: what failed first, and what only followed.

    story = read({"train.err": text})
    story.first           # rank 3 on n2: out of GPU memory
    story.followed        # another rank is gone: ranks 0-2; ended because of the others: ...

Many ranks fail at once when one does, and the first line is not always of the first. A cause comes
before its consequences (`kinds.Order`), whatever the order of the lines; of two causes the one with
the earlier time, or line. An error after which the same rank continues with its steps was handled.

Held by: tests/unit/test_job_log.py, tests/unit/test_slurm_client.py
"""

import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from labcode.runtime.units import ranks_text
from labcode.runtime.waits import Call, Standing, describe
from labcode.slurm.log.ends import Ends
from labcode.slurm.log.kinds import (
    ABORTED,
    BUS_ERROR,
    BY_NAME,
    CRASHED,
    ENDED_WITH,
    EXCEPTION,
    KILLED,
    NCCL_FAILED,
    NOT_FINITE,
    NOT_MET,
    PEER_GONE,
    SAME_RANK,
    STEP_CANCELLED,
    TIME_OUT,
    Kind,
    Order,
    kind_of,
)
from labcode.slurm.log.lines import LogLine, is_elastic, read_lines

LONGEST = 240  # characters of a line that are shown
GOES_ON = 3  # lines as before, from the same rank: then an error has ended nothing
SET_OUT = 20  # lines that look alike, where there were no steps before
REASON_WITHIN = 6  # lines: NCCL's reason stands below PyTorch's error
LAST_LINES = 5
MOST_MISSING = 4
SAYS_NOTHING = ("says nothing of it", "say nothing of it", "")

_TRACEBACK = "Traceback (most recent call last)"
_ORIGINAL = "Original Traceback"  # of a DataLoader's worker, below the error that tells of it
_CHAINED = re.compile(r"^(During handling of the above|The above exception was the direct cause)")
_FRAME = re.compile(r'^\s+File "(?P<path>[^"]+)", line (?P<line>\d+), in (?P<name>\S+)')
_NO_STEP = re.compile(r"^(?:\s|frame #|.* NCCL INFO )")
_LIBRARY = re.compile(r"site-packages|dist-packages|/lib/python3|^<|/torch/|importlib|runpy")
_ENDS_LIKE = r"(?:Error|Exception|Interrupt|Exit|Empty|Full|Abort|Failure|Diverged|Timeout|Warning)"
_RAISED = re.compile(rf"^(?P<name>[A-Za-z_][\w.]*{_ENDS_LIKE}\w*)(?::\s+(?P<text>.*)|:?\s*)$")
_WARNING = re.compile(r"^\S*Warning\b")
_REQUEUED = "requeued"
_BY_SIGNAL = (KILLED, CRASHED, BUS_ERROR)
_WATCHDOG = re.compile(
    r"\[(?:PG [^\]]*)?Rank (?P<rank>\d+)\] Watchdog caught collective operation timeout: "
    r"WorkNCCL\(SeqNum=(?P<number>\d+), OpType=(?P<operation>\w+)"
    r"(?:, NumelIn=(?P<size>\d+))?.*?ran for (?P<ran_ms>\d+) milliseconds"
)
_ENQUEUED = re.compile(r"Rank (?P<rank>\d+)\].*[Ll]ast enqueued (?:NCCL )?work: (?P<number>\d+)")
_BARRIER = re.compile(r"Ranks? (?P<ranks>[\d, ]+) failed to pass monitoredBarrier")
_MISSING = re.compile(r"rank (\d+) (?:has not come|does not answer)")
_PEER = re.compile(r"(?:peer|from|to|by)(?: remote peer| peer)? \[?([\w.-]+(?::[\w:]*)?)\]?[:<]\d+")
_MEMBER = re.compile(r"GLOBAL_RANK: (\d+), MEMBER: \d+/(\d+)")  # as Lightning says it
_ALL_THERE = "All distributed processes registered"
_HOST = re.compile(
    r"\bON (\S+)(?: \(\+\d+\))? CANCELLED|(?:Node failure on|failed on node|IP address:) ([\w.-]+)"
)
_FOLDER = re.compile(r"^/\S*/(?=[\w.-]+: )")  # "/opt/env/bin/python: No module named x"
_OWN_RANK = re.compile(r"^(?:error: )?(?:.*?\b)?rank (\d+)\b")
# "AssertionError: Rank 3: found NaN", of Megatron; the reader of PyTorch's flight recorder
_SPEAKER = re.compile(r"^\w+: Rank (?P<rank>\d+): |Culprit rank (?P<culprit>\d+);")


@dataclass(frozen=True)
class Event:
    """A line that tells of a failure.

    Args:
        kind: What happened.
        line: Line that says it.
        what: What it says, for a person.
        rank: Rank that it happened to; None if no line says so.
        host: Machine of that rank.
        place: "step (train.py, line 88)", of an exception.
        is_first: The launcher saw this process end first.
        ranks: All that the line speaks of, if it is of several.
    """

    kind: Kind
    line: LogLine
    what: str
    rank: int | None = None
    host: str | None = None
    place: str = ""
    is_first: bool = False
    ranks: tuple[int, ...] = ()


@dataclass
class Story:
    """What happened.

    Args:
        first: What failed first; None if nothing is known here.
        alike: The same of other ranks.
        followed: What followed from it, in the order of the log.
        handled: Errors after which the same rank, or another that writes to the same file, went on.
        not_finite: The first line with a loss that is not finite, if that was not the end.
        ranks: All that the log names.
        peers: Ranks to which connections were lost.
        last_lines: The last lines of the log.
    """

    first: Event | None = None
    alike: list[Event] = field(default_factory=list)
    followed: list[Event] = field(default_factory=list)
    handled: list[Event] = field(default_factory=list)
    not_finite: Event | None = None
    ranks: tuple[int, ...] = ()
    peers: tuple[str, ...] = ()
    last_lines: list[LogLine] = field(default_factory=list)


def read(files: Mapping[str, str]) -> Story:
    """What happened in a job.

    Args:
        files: {name of a file: what the job wrote there}; files of several ranks or nodes, too.
    """
    lines = read_lines(files)
    events = _Reader(lines).events()
    events = _of_last_attempt(_with_hosts(events))
    story = Story(last_lines=lines[-LAST_LINES:])
    named = itertools.chain(lines, events)
    story.ranks = tuple(sorted({one.rank for one in named if one.rank is not None}))
    fatal = _without_handled(events, lines)
    kept = {id(event) for event in fatal}
    dropped = [event for event in events if id(event) not in kept]
    story.handled = [event for event in dropped if event.kind.order == Order.CAUSE]
    story.not_finite = next((e for e in events if e.kind.name == NOT_FINITE), None)
    first = _first(fatal)
    if first is None:
        return story
    if first.kind.name == TIME_OUT:
        first = _with_who_waited(first, lines, story.ranks, fatal)
    if first.kind.name == STEP_CANCELLED:
        first = replace(first, what=first.what + _not_terminated(fatal))
    same = [event for event in fatal if event.kind == first.kind]
    story.first = _as_launched(_completed(first, same), fatal)
    story.peers = tuple(dict.fromkeys(peer for peer in map(_lost_peer, fatal) if peer))
    for event in same:
        if event.rank not in (None, story.first.rank):
            story.alike.append(event)
    for event in fatal:
        is_its_end = event.kind.order == Order.ENDED and event.rank in (None, story.first.rank)
        if event.kind != first.kind and not is_its_end:
            story.followed.append(event)
    return story


def _completed(first: Event, same: Sequence[Event]) -> Event:
    """With the rank and host that other lines of the same failure name, if it names none."""
    ranks = {event.rank for event in same if event.rank is not None}
    rank = first.rank
    if rank is None and len(ranks) == 1 and first.kind.name != TIME_OUT:
        rank = next(iter(ranks))
        if "slurmstepd" in first.what:  # which knows the step, and srun the task
            return next(event for event in same if event.rank == rank)
    hosts = {event.host for event in same if event.host and event.rank == rank}
    host = first.host
    if host is None and len(hosts) == 1:
        host = next(iter(hosts))
    return replace(first, rank=rank, host=host)


def _as_launched(first: Event, events: Sequence[Event]) -> Event:
    """With the rank that the launcher saw end first, if the failure itself names none."""
    ended = [event for event in events if event.is_first and event.rank is not None]
    if first.rank is not None or first.kind.order != Order.CAUSE or not ended:
        return first
    earliest = min(ended, key=_time_of)
    if first.host not in (None, earliest.host):
        return first
    return replace(first, rank=earliest.rank, host=earliest.host)


def _time_of(event: Event) -> float:
    return event.line.time_s or 0.0


def _not_terminated(events: Iterable[Event]) -> str:
    """The task that srun did not have to terminate, because it had ended before."""
    ended: set[int] = set()
    for event in events:
        ended.update(event.ranks)
    missing = sorted(set(range(max(ended, default=0))) - ended)
    if not missing or len(missing) > MOST_MISSING:
        return ""
    return f"; of {ranks_text(missing)} srun says nothing: it was over before"


# ---- which was first


def _first(events: Sequence[Event]) -> Event | None:
    """The event from which the others follow."""
    if not events:
        return None
    killed_first = [e for e in events if e.is_first and e.kind.name in _BY_SIGNAL]
    has_one_file = len({event.line.file for event in events}) == 1
    enders = [e for e in events if e.kind.order in (Order.OUTSIDE, Order.WAITED)]
    ranked = []
    for event in events:
        order = _order(event, enders)
        by_other = event.rank is not None and event.rank not in [e.rank for e in killed_first]
        if killed_first and by_other and event.kind.name == EXCEPTION:
            order = Order.FOLLOWED  # of a rank that has outlived the one that was killed
        key = (order, event.kind.name == STEP_CANCELLED, *_moment(event, has_one_file))
        ranked.append((key, event))
    best = min(ranked, key=_key)[1]
    for event in events:
        if event.kind.name in best.kind.because:
            rank = best.rank if event.rank is None else event.rank
            return replace(event, rank=rank, host=event.host or best.host)
    return best


def _key(entry: tuple[tuple, Event]) -> tuple:
    return entry[0]


def _order(event: Event, enders: Sequence[Event]) -> Order:
    """The order of its kind, but after an end from outside nothing is a cause.

    Nor is it a cause that a process was killed after a time-out: the launcher did that.
    """
    order = event.kind.order
    if order != Order.CAUSE:
        return order
    is_kill = event.kind.name in _BY_SIGNAL and not event.is_first
    for other in enders:
        ends_all = other.kind.order == Order.OUTSIDE
        ends_it = is_kill and other.kind.order == Order.WAITED
        if (ends_all or ends_it) and _is_before(other, event):
            return Order.FOLLOWED
    return order


def _moment(event: Event, has_one_file: bool) -> tuple[float, int]:
    """What tells earlier from later: the line of one file; the time, if there are several."""
    time_s = 0.0 if has_one_file else event.line.time_s
    return (float("inf") if time_s is None else time_s, event.line.number)


def _is_before(one: Event, other: Event) -> bool:
    if one.line.file == other.line.file:
        return one.line.number < other.line.number
    if one.line.time_s is None or other.line.time_s is None:
        return False
    return one.line.time_s < other.line.time_s


Source = tuple[str, int | None]


def _without_handled(events: Sequence[Event], lines: Sequence[LogLine]) -> list[Event]:
    """The events after which their rank did not go on with its steps: the others ended nothing."""
    steps = _Steps(lines, {event.line.source for event in events})
    found = []
    stopped = set()  # sources in which an event has ended the rank: the later ones follow
    for event in events:
        source = event.line.source
        if event.kind.order == Order.OUTSIDE or source in stopped:
            found.append(event)
        elif not steps.go_on_after(event.line):
            stopped.add(source)
            found.append(event)
    return found


class _Steps:
    """The lines of each rank that may be steps of its training.

    Args:
        lines: Lines of the log.
        sources: Sources whose lines are asked for.
    """

    def __init__(self, lines: Sequence[LogLine], sources: Collection[Source]) -> None:
        self._shapes: dict[Source, list[tuple[int, str]]] = {source: [] for source in sources}
        self._seen_twice: dict[tuple[Source, str], int] = {}
        seen: set[tuple[Source, str]] = set()
        for line in lines:
            if line.source not in self._shapes or _NO_STEP.match(line.text):
                continue
            shape = _shape(line.text)
            if len(shape) <= 2 or kind_of(line.text) is not None:
                continue
            self._shapes[line.source].append((line.number, shape))
            key = (line.source, shape)
            if key in seen:
                self._seen_twice.setdefault(key, line.number)
            seen.add(key)

    def go_on_after(self, line: LogLine) -> bool:
        """Whether a few lines look as two before did, or many look alike where there were none."""
        num_known = 0
        num_of: Counter[str] = Counter()
        for number, shape in self._shapes[line.source]:
            if number <= line.number:
                continue
            known = self._seen_twice.get((line.source, shape))
            num_known += known is not None and known < line.number
            num_of[shape] += 1
            if num_known == GOES_ON or num_of[shape] == SET_OUT:
                return True
        return False


def _shape(text: str) -> str:
    """A line without its numbers: those of two steps look alike."""
    return re.sub(r"[^A-Za-z]+", " ", text).strip()[:80]


def _of_last_attempt(events: list[Event]) -> list[Event]:
    """Without what stands before a requeue, if another attempt has failed after it.

    The processes that the requeue itself ended speak after it, too.
    """
    last: dict[str, int] = {}
    for event in events:
        if event.kind.name == _REQUEUED:
            last[event.line.file] = event.line.number
    later = [event for event in events if event.line.number > last.get(event.line.file, 0)]
    begun = any(event.kind.order < Order.ENDED for event in later)
    return later if begun else events


def _with_hosts(events: list[Event]) -> list[Event]:
    """Each rank's host is told to all of its events; so is one that names the file."""
    host_of = {}
    for event in events:
        if event.rank is not None and event.host:
            host_of.setdefault(event.rank, event.host)
    hosts = {event.host for event in events if event.host}
    found = []
    for event in events:
        words = set(re.split(r"[/._-]", event.line.file))
        named = [host for host in hosts if host in words]
        of_file = named[0] if len(named) == 1 else None
        found.append(replace(event, host=event.host or host_of.get(event.rank) or of_file))
    return found


# ---- from lines to events


@dataclass
class _Trace:
    """A traceback that is being read."""

    place: str = ""
    library_place: str = ""


class _Reader:
    """Takes the lines of all files, one after the other."""

    def __init__(self, lines: Sequence[LogLine]) -> None:
        self._lines = lines
        self._events: list[Event] = []
        self._last: dict[Source, Event] = {}
        self._traces: dict[Source, _Trace] = {}
        self._chained: dict[Source, Event] = {}
        self._wrappers: dict[Source, Event] = {}
        self._ends: dict[str, Ends] = {}
        self._is_elastic = any(is_elastic(line.text) for line in lines)

    def events(self) -> list[Event]:
        """All that lines tell of failures."""
        for line in self._lines:
            self._take(line)
        self._events += _roll_call(self._lines)
        return self._events

    def _take(self, line: LogLine) -> None:
        ends = self._ends.setdefault(line.file, Ends(self._is_elastic))
        told = list(ends.read(line.text))
        for end in told:
            known = replace(line, host=end.host or line.host)
            rank = end.rank
            if rank is None and line.rank is not None and not self._is_elastic:
                rank = line.rank
            event = Event(end.kind, known, end.what, rank, end.host, "", end.is_first, end.ranks)
            self._keep(event)
        if told or self._is_of_traceback(line):
            return
        if _RAISED.match(line.text) and not _WARNING.match(line.text):
            self._add(self._event(line, BY_NAME[EXCEPTION]))
            return
        kind = kind_of(line.text)
        if kind is not None:
            self._add(self._event(line, kind))

    def _is_of_traceback(self, line: LogLine) -> bool:
        """Whether the line belongs to a traceback; its last one becomes an event."""
        source = line.source
        if _TRACEBACK in line.text:
            self._traces[source] = _Trace()
            if line.text.startswith(_ORIGINAL) and source in self._last:
                self._wrappers[source] = self._last[source]
            return True
        if _CHAINED.match(line.text):
            if source in self._last:
                self._chained[source] = self._last[source]
            return True
        trace = self._traces.get(source)
        if trace is None:
            return False
        frame = _FRAME.match(line.text)
        if frame:
            place = f"{frame['name']} ({frame['path'].rpartition('/')[2]}, line {frame['line']})"
            if _LIBRARY.search(frame["path"]):
                trace.library_place = place
            else:
                trace.place = place
            return True
        if line.text[:1].isspace():
            return True
        if not _RAISED.match(line.text):
            return False
        del self._traces[source]
        event = self._event(line, BY_NAME[EXCEPTION])
        event = replace(event, place=trace.place or trace.library_place)
        wrapper = self._wrappers.pop(source, None)
        if wrapper in self._events:
            self._events.remove(wrapper)
        before = self._chained.pop(source, None)
        says_more = event.kind.name != EXCEPTION and before and before.kind.name == EXCEPTION
        if before is None or says_more:
            self._add(event)
        if before is not None and says_more:
            self._events.remove(before)
        return True

    def _event(self, line: LogLine, fallback: Kind) -> Event:
        kind = kind_of(line.text) or fallback
        rank = line.rank
        what = _FOLDER.sub("", line.text.strip())
        speaker = _SPEAKER.search(what)
        if rank is None and speaker:
            rank = int(speaker["rank"] or speaker["culprit"])
        if what.startswith("error: "):
            what = what.removeprefix("error: ")
            named = _OWN_RANK.match(what)
            rank = int(named[1]) if named else rank
        timed_out = what.find("a collective has timed out: ")
        if kind.name == TIME_OUT:
            what = what[max(0, timed_out) :].removeprefix("hang: ")
            missing = _MISSING.search(what)
            rank = int(missing[1]) if missing else rank
        host = _HOST.search(line.text)
        return Event(
            kind, line, what[:LONGEST], rank, host[host.lastindex or 0] if host else line.host
        )

    def _add(self, event: Event) -> None:
        """Keep what a process says; it may be the reason of the line before."""
        last = self._events[-1] if self._events else None
        if last is not None and last.kind.name == NCCL_FAILED and event.kind.name != ENDED_WITH:
            is_near = event.line.number - last.line.number <= REASON_WITHIN
            if is_near and last.line.source == event.line.source:
                self._events.pop()
                event = replace(event, place=event.place or last.place)
        self._keep(event)

    def _keep(self, event: Event) -> None:
        self._events.append(event)
        self._last[event.line.source] = event


def _roll_call(lines: Iterable[LogLine]) -> list[Event]:
    """Ranks that Lightning or NeMo waits for, and those that were started twice in their place.

    Rank 0 says when all are there; a file without it cannot tell who is missing.
    """
    said: dict[int, list[LogLine]] = {}
    world_size = 0
    for line in lines:
        found = _MEMBER.search(line.text)
        if found:
            said.setdefault(int(found[1]), []).append(line)
            world_size = int(found[2])
        elif _ALL_THERE in line.text:
            return []
    missing = sorted(set(range(world_size)) - set(said))
    twice = [rank for rank, of_rank in said.items() if len(of_rank) > 1]
    if twice and missing:
        what = f"of {world_size} ranks {len(said)} were started, and {ranks_text(twice)} twice"
        return [Event(BY_NAME[SAME_RANK], said[twice[0]][1], f"{what} or more")]
    if missing and 0 in said:
        what = f"{len(said)} of {world_size} ranks came; {ranks_text(missing)} did not"
        last = max(said, key=lambda rank: said[rank][-1].number)
        return [Event(BY_NAME[NOT_MET], said[last][-1], what)]
    return []


# ---- who waited for whom


def _with_who_waited(
    event: Event, lines: Sequence[LogLine], ranks: Sequence[int], events: Sequence[Event]
) -> Event:
    """An event of a time-out that says who did not come, as far as the ranks tell."""
    if _MISSING.search(event.what):
        return event
    barrier = _BARRIER.search(event.what)
    if barrier:
        missing = [int(rank) for rank in re.findall(r"\d+", barrier["ranks"])]
        return replace(event, rank=missing[0], host=None)
    standings = _standings(lines, ranks)
    if not standings:
        # one that was aborted has waited, too: its own watchdog does that
        spoke = {one.rank for one in events if one.kind.name in (TIME_OUT, PEER_GONE, ABORTED)}
        silent = [rank for rank in ranks if rank not in spoke]
        if len(silent) != 1:
            return replace(event, rank=None, host=None)
        what = f"{event.what}; rank {silent[0]} {SAYS_NOTHING[0]}"
        return replace(event, what=what, rank=silent[0], host=None)
    world_size = max(max(ranks, default=0), *(standing.rank for standing in standings)) + 1
    text = describe(standings, world_size, SAYS_NOTHING)
    blamed = re.match(r"rank (\d+) (?:has not|says nothing)", text)
    rank = int(blamed[1]) if blamed else None
    return replace(event, what=text, rank=rank, host=None)


def _standings(lines: Iterable[LogLine], ranks: Sequence[int]) -> list[Standing]:
    """Where each rank stood that a watchdog speaks of: the first collective that it waited in."""
    waits: dict[int, Call] = {}
    enqueued: dict[int, int] = {}
    for line in lines:
        found = _WATCHDOG.search(line.text)
        if found:
            rank = int(found["rank"]) if line.rank is None else line.rank
            sizes = ((int(found["size"]),),) if found["size"] else ()
            call = Call(found["operation"], int(found["number"]), sizes, tuple(ranks), 0.0)
            known = waits.get(rank)
            if known is None or call.number < known.number:
                waits[rank] = call
        last = _ENQUEUED.search(line.text)
        if last:
            rank = int(last["rank"]) if line.rank is None else line.rank
            enqueued[rank] = int(last["number"])
    furthest = max((call.number for call in waits.values()), default=0)
    standings = [Standing(rank, 0, "", call, (call,)) for rank, call in waits.items()]
    for rank, number in enqueued.items():
        if rank not in waits and number < furthest:
            call = Call("", number, (), tuple(ranks), 0.0)
            standings.append(Standing(rank, 0, "", None, (call,)))
    return standings


def _lost_peer(event: Event) -> str:
    """The peer that a line names that only lost its connection; "" if it names none."""
    found = _PEER.search(event.line.text)
    return found[1] if found else ""
