"""Who waits for whom, in one line: from where each rank stands in its collectives. No torch.

    rank 3 has not come to all_reduce #812 of [1024]: it is in read (labcode/data/weather.py, line
    88); ranks 0-2 wait in all_reduce #812 of [1024] among ranks 0-3

`labcode.doctor` tells it of a job that runs, `labcode.slurm.log` of one that PyTorch's watchdog has
ended: one sentence for both. The ranks behind a notebook and the simulated ones of an exercise,
which know every call and not the collectives alone, have the rule from here.

Held by: tests/unit/test_hang.py, tests/unit/test_job_log.py
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from labcode.runtime.units import ranks_text

NO_ANSWER = ("does not answer", "do not answer", " (stopped, killed, or busy in C code for long)")


EVERY_RANK = "every rank that a call needs has to make it"


def broken_rule(operations: Iterable[str]) -> str:
    """The rule that ranks break which wait for each other.

    Args:
        operations: In what the ranks wait, if all of the world wait.
    """
    waiting = set(operations)
    if waiting == {"send"}:
        return "all of them wait in send, and none receives"
    if waiting == {"recv"}:
        return "all of them wait in recv, and none sends"
    return EVERY_RANK


@dataclass(frozen=True)
class Call:
    """One collective on one rank.

    Args:
        operation: Name in torch, such as "all_reduce".
        number: Number among the collectives of its group, counted from 1: ranks meet in equal
            numbers.
        sizes: Shape of each tensor that goes in.
        ranks: Global ranks of its group.
        created_s: Time of the call, in seconds since 1970.
    """

    operation: str
    number: int
    sizes: tuple[tuple[int, ...], ...]
    ranks: tuple[int, ...]
    created_s: float

    def __str__(self) -> str:
        shapes = [str(list(size)) if size else "one number" for size in self.sizes]
        what = f"{self.operation} #{self.number}"
        return f"{what} of {', '.join(shapes)}" if shapes else what


@dataclass(frozen=True)
class Standing:
    """Where one rank stands.

    Args:
        rank: Global rank.
        step: Optimizer steps that it has done.
        place: What its main thread runs: "read (labcode/data/weather.py, line 88)".
        waits_in: The oldest collective that it has called and that is not done; None: it waits in
            none that torch records.
        recent: The rank's last calls in each group that it has used, oldest first.
    """

    rank: int
    step: int
    place: str
    waits_in: Call | None = None
    recent: tuple[Call, ...] = field(default=())

    def has_called(self, call: Call) -> bool:
        """Whether it has come to a collective of another rank, to do the same there or not."""
        numbers = [own.number for own in self.recent if own.ranks == call.ranks]
        return bool(numbers) and max(numbers) >= call.number

    def own_call(self, call: Call) -> Call | None:
        """What it did where another rank made this call; None: nothing yet, or it is long ago."""
        for own in self.recent:
            if (own.ranks, own.number) == (call.ranks, call.number):
                return own
        return None

    def to_json(self) -> str:
        """The standing as JSON text, for the store through which the ranks tell each other."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Standing":
        """From what `to_json` gave."""
        tree = json.loads(text)
        waits_in = tree["waits_in"]
        return cls(
            rank=tree["rank"],
            step=tree["step"],
            place=tree["place"],
            waits_in=None if waits_in is None else _call_from(waits_in),
            recent=tuple(_call_from(entry) for entry in tree["recent"]),
        )


def _call_from(tree: Mapping[str, Any]) -> Call:
    return Call(
        operation=tree["operation"],
        number=tree["number"],
        sizes=tuple(tuple(size) for size in tree["sizes"]),
        ranks=tuple(tree["ranks"]),
        created_s=tree["created_s"],
    )


def describe(
    standings: Sequence[Standing], world_size: int, silence: tuple[str, str, str] = NO_ANSWER
) -> str:
    """Who waits for whom, in one line: first those for whom the others wait.

    Args:
        standings: Standings of the ranks that have answered.
        world_size: Number of ranks.
        silence: What the others do, of one rank and of several, and why.
    """
    by_rank = {standing.rank: standing for standing in standings}
    parts = []
    silent = [rank for rank in range(world_size) if rank not in by_rank]
    if silent:
        one, several, why = silence
        parts.append(f"{ranks_text(silent)} {one if len(silent) == 1 else several}{why}")
    parts += _disagreements(by_rank)
    parts += _missing(by_rank)
    parts += _waiting(by_rank)
    return "; ".join(parts)


def _disagreements(by_rank: Mapping[int, Standing]) -> list[str]:
    """Collectives of one number in which ranks do different things.

    Some of them may have gone on: gloo lets ranks pass that have got as many bytes as they wanted.
    """
    found = []
    for standing in by_rank.values():
        call = standing.waits_in
        if call is None:
            continue
        calls: dict[str, list[int]] = {}
        for rank in call.ranks:
            other = by_rank[rank].own_call(call) if rank in by_rank else None
            if other is not None:
                calls.setdefault(str(other), []).append(rank)
        if len(calls) > 1:
            texts = [f"{ranks_text(ranks)} called {text}" for text, ranks in calls.items()]
            found.append(f"the ranks disagree: {', '.join(texts)}")
    return list(dict.fromkeys(found))  # each of the ranks that wait finds the same


def _missing(by_rank: Mapping[int, Standing]) -> list[str]:
    """Ranks that have not come to a collective in which others wait, and wait in none themselves.

    A rank that waits elsewhere is no cause: somebody else lets it wait.
    """
    found = []
    for rank in sorted(by_rank):
        standing = by_rank[rank]
        if standing.waits_in is not None:
            continue
        missed = _missed_by(standing, by_rank)
        if missed is not None:
            where = f": it is in {standing.place}" if standing.place else ""
            found.append(f"rank {rank} has not come to {missed}{where}")
    if not found and by_rank and all(s.waits_in is None for s in by_rank.values()):
        # torch records no collective under way, such as the sends of a pipeline over gloo
        found = [f"rank {rank} is in {by_rank[rank].place}" for rank in sorted(by_rank)]
    return found


def _missed_by(standing: Standing, by_rank: Mapping[int, Standing]) -> Call | None:
    """A collective in which another rank waits, and which this one has not called yet."""
    for other in by_rank.values():
        call = other.waits_in
        if call is None or standing.rank not in call.ranks:
            continue
        if not standing.has_called(call):
            return call
    return None


def _waiting(by_rank: Mapping[int, Standing]) -> list[str]:
    """Who waits in which collective; ranks in the same one together."""
    waiting: dict[str, list[int]] = {}
    for rank in sorted(by_rank):
        call = by_rank[rank].waits_in
        if call is not None:
            waiting.setdefault(f"{call} among {ranks_text(call.ranks)}", []).append(rank)
    texts = []
    for call_text, ranks in waiting.items():
        verb = "waits" if len(ranks) == 1 else "wait"
        texts.append(f"{ranks_text(ranks)} {verb} in {call_text}")
    return texts
