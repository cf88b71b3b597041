"""What all checks share: guards, and tables that find the hint for what an answer did.

A check runs the answer, knows the truth, and lists mistakes: {hint: what shows it}. What shows a
mistake is a condition, a tensor that the mistake gives, or `times(x)`: a multiple of x, whose
factor the hint may name as {times}.

    outcome = run(_work, answer, ours=OURS)
    diagnose("on rank 1: ", found, truth, {"{times:.3g} times the mean: ...": times(truth)})
    return confirm(ranks, outcome, _work, answer)
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from course.answer import RETURNED_NONE, Hint, due, is_stub, reason
from course.exercises.in_notebook import OURS
from course.exercises.simulated import Endless, Event, Mismatch, Outcome, Stuck, simulate
from course.pool.ranks import RankError, Ranks
from labcode.comm.grid import group_of
from labcode.runtime.units import plural, ranks_text, type_in_words
from labcode.runtime.waits import EVERY_RANK, broken_rule

TOLERANCE = 1e-9
REAL_ROUNDING = 1e-5  # float32, added in another order
# All ranks; more than a text names, so that nobody can list what each of them does; and three in
# which a rank of the group is not the rank of the world.
GROUPS = ((0, 1, 2, 3), (0, 1, 2, 3, 4, 5), (1, 2, 3))
STILL_THE_WORLD = (
    "What in your code still speaks of all of them: a call without the group, a rank of the world, "
    "a fixed number?"
)
Value = torch.Tensor | float
Table = Mapping[str, Any]  # {hint: what shows the mistake}


@dataclasses.dataclass(frozen=True)
class times:
    """Shown by a multiple of a tensor or number."""

    of: Any


# ---- tables


def refuse(
    table: Table, case: str = "", found: Value | None = None, tolerance: float = TOLERANCE
) -> None:
    """Raise the first hint of a table whose mistake shows.

    Args:
        table: {hint: sign}. A float, or a tensor of numbers, is what the mistake gives; `times(x)`
            is any multiple of it; everything else is a condition.
        case: What the hint begins with, such as "on rank 1: ".
        found: What the answer gave, for signs that are values.
        tolerance: Relative distance that is rounding.
    """
    for hint, sign in table.items():
        if isinstance(sign, times):
            assert found is not None
            factor = multiple(found, sign.of, tolerance)
            if factor is not None:
                raise Hint(case + hint.format(times=factor))
        elif isinstance(sign, float) or (
            isinstance(sign, torch.Tensor) and sign.dtype != torch.bool
        ):
            assert found is not None
            if distance(found, sign) < tolerance:
                raise Hint(case + hint)
        elif sign:
            raise Hint(case + hint)


def diagnose(
    case: str,
    found: Value,
    truth: Value,
    table: Table,
    otherwise: str = "the result is {off:.0%} away from the right one",
    tolerance: float = TOLERANCE,
) -> None:
    """Nothing if a result is right; else the hint of the mistake that gave it, or `otherwise`.

    Args:
        case: What the hint begins with.
        found: What the answer gave.
        truth: What is right, of the same shape.
        table: As for `refuse`.
        otherwise: Hint for any other result; {off} is its relative distance.
        tolerance: Relative distance that is rounding.
    """
    off = distance(found, truth)
    if off < tolerance:
        return
    refuse(table, case, found, tolerance)
    if isinstance(found, torch.Tensor) and isinstance(truth, torch.Tensor):
        is_exact = truth.dtype == torch.float64 and tolerance <= TOLERANCE
        if is_exact and off < REAL_ROUNDING:
            raise Hint(f"{case}right to {off:.0e} only: where do the numbers cease to be float64?")
        if found.numel() > 1 and not found.any():
            otherwise += " (it is zero everywhere)"
    raise Hint(case + otherwise.format(off=off))


def check_causes(
    given: Any,
    truth: Mapping[str, str],
    causes: Collection[str],
    signs: Mapping[str, Mapping[str, str]],
    ruled_out: Mapping[str, str],
) -> None:
    """Check the diagnoses of a clinic.

    Args:
        given: The learner's {patient: cause}.
        truth: {patient: its cause}.
        causes: All that the lesson's table has.
        signs: {patient: {cause: what speaks against it}}.
        ruled_out: {cause: what speaks against it for every patient}.

    Raises:
        Hint: A patient has no diagnosis, one that does not exist, or a wrong one.
    """
    given = due(given)
    if not isinstance(given, Mapping):
        raise Hint('give a dict: {"A": "a name from the table", "B": ...}')
    named = {str(who).strip().upper(): cause for who, cause in given.items()}
    for who, cause in truth.items():
        if named.get(who) in (None, ...):
            raise Hint(f"{who} has no diagnosis yet")
        found = str(named[who]).strip().lower()
        if found not in causes:
            raise Hint(f"{who}: there is no {named[who]!r} in the table: {', '.join(causes)}")
        if found != cause:
            raise Hint(f"{who}: {signs[who].get(found) or ruled_out[found]}")


def distance(found: Value, truth: Value) -> float:
    """Relative distance of two values in the 2-norm; infinite for inf, nan, and other shapes."""
    one = _double(found)
    other = _double(truth)
    if one.shape != other.shape:
        return math.inf
    off = float((one - other).norm() / other.norm().clamp(min=1e-300))
    return off if math.isfinite(off) else math.inf


def _double(value: Value) -> torch.Tensor:
    """In float64, as a number of Python is."""
    return torch.as_tensor(value, dtype=torch.float64).detach()


def multiple(found: Value, of: Value, tolerance: float = TOLERANCE) -> float | None:
    """Which multiple of `of` this is; None if it is none, or zero."""
    one = _double(found)
    other = _double(of)
    if one.shape != other.shape:
        return None
    square = float((other * other).sum())
    factor = float((one * other).sum()) / square if square else 0.0
    is_one = factor and distance(one, factor * other) < tolerance
    return factor if is_one else None


# ---- guards


def tensor(value: Any, shape: Sequence[int] | None = None, what: str = "it returned") -> None:
    """See that a value is a tensor, of this shape if one is given."""
    if value is None:
        raise Hint(RETURNED_NONE)
    if not isinstance(value, torch.Tensor):
        raise Hint(f"{what} {type_in_words(value)}, expected is one tensor")
    if shape is not None and tuple(value.shape) != tuple(shape):
        raise Hint(f"{what} a tensor of shape {list(value.shape)}, expected is {list(shape)}")


def sequence(value: Any, wanted: str) -> None:
    """See that a value is a list or a tuple, as `wanted` says; a tensor is none."""
    if not isinstance(value, list | tuple):
        raise Hint(f"return {wanted}, not {type_in_words(value)}")


# ---- runs


def own_answers(*functions: Callable[..., Any]) -> dict[Callable[..., Any], str]:
    """{labcode's or PyTorch's solution of an exercise: what its caller is told}, for `run(ours=)`.

    Args:
        functions: Written in Python.
    """
    found = {}
    for one in functions:
        whose = "labcode's own" if one.__module__.startswith(OURS) else "PyTorch's"
        name = f"{one.__module__.rpartition('.')[2]}.{one.__qualname__.removesuffix('.__init__')}"
        found[one] = f"{name} is {whose} answer to this exercise: write yours"
    return found


def settle(outcome: Outcome, case: str = "") -> Outcome:
    """What went wrong on a rank as one line, if anything did.

    Args:
        outcome: Outcome of a simulation.
        case: What the line begins with.

    Returns:
        The outcome, if nothing went wrong.

    Raises:
        Hint: One of the check's own, or what has become of the run.
        NotImplementedError: The exercise is not done yet.
        RuntimeError: "rank 1: KeyError: 'x'", with that error as its cause; with a case a hint.
    """
    rank = min(outcome.errors, default=None)
    where = f"{case}on rank {rank}: "
    try:
        outcome.raise_first()
    except Stuck as stuck:
        everybody = "" if outcome.finished() else "the ranks wait for each other: "
        raise Hint(f"{case}{everybody}{stuck}: {_rule(outcome)}") from None
    except Mismatch as error:
        raise Hint(f"{case}{error}: {EVERY_RANK}, with one size and dtype") from None
    except Endless as error:
        raise Hint(f"{where}{error}: does your loop end?") from None
    except Hint as hint:
        texts = [str(error) for error in outcome.errors.values()]
        of_all = texts == [str(hint)] * len(outcome.results)
        raise Hint(f"{case if of_all else where}{hint}") from None
    except Exception as error:
        if isinstance(error, NotImplementedError) and is_stub(error):
            raise
        named = RuntimeError(f"rank {rank}: {type(error).__name__}: {error}")
        if not case:
            raise named from error
        named.__cause__ = error  # which knows the learner's line
        raise Hint(f"{case}{reason(named)}") from error
    return outcome


def _rule(outcome: Outcome) -> str:
    """What the ranks that wait for each other have broken."""
    events = [place.event for place in outcome.stuck.values()]
    if len(events) < len(outcome.results):
        return EVERY_RANK
    return broken_rule(event.kind for event in events if event is not None)


def run(
    work: Callable[..., Any], *args: Any, size: int = 4, case: str = "", **options: Any
) -> Outcome:
    """What `work(rank, *args)` does on simulated ranks; it may raise hints, which name the rank.

    Args:
        work: Called on each rank.
        args: What else it is given.
        size: Number of ranks.
        case: What a hint begins with.
        options: Options of `simulate`.
    """
    return settle(simulate(size, work, *args, **options), case)


def in_groups(
    work: Callable[..., Any],
    *args: Any,
    judge: Callable[[list[Any], Outcome, Sequence[int]], None] | None = None,
    **options: Any,
) -> Outcome:
    """Run `work(group, *args)` on all simulated ranks, then on more, and then on some of them.

    Args:
        work: Called on the ranks of a group; it may raise hints, which need to name no rank.
        args: What else it is given.
        judge: Given the results of a group in its order, the outcome, and the group's members.
        options: Options of `simulate`.

    Returns:
        The outcome of the last group.
    """
    outcome = None
    for number, members in enumerate(GROUPS):
        size = max(4, len(members))
        outcome = simulate(size, _on_members, members, work, args, **options)
        try:
            settle(outcome)
            if judge is not None:
                judge([outcome.results[rank] for rank in members], outcome, members)
        except Exception as error:
            if number == 0 or is_stub(error):
                raise
            text = _by_number_in_group(reason(error), members)
            stop = "" if text.endswith((".", "?", "!")) else "."
            raise Hint(
                f"with {ranks_text(GROUPS[0])} it is right; in the group of "
                f"{ranks_text(members)}: {text}{stop} {STILL_THE_WORLD}"
            ) from None
    assert outcome is not None
    return outcome


def _by_number_in_group(text: str, members: Sequence[int]) -> str:
    """A hint that names a rank of the world, with its number in the group."""
    for place, rank in enumerate(members):
        start = f"on rank {rank}: "
        if text.startswith(start):
            return f"on the rank with number {place} in the group: {text.removeprefix(start)}"
    return text


def _on_members(rank: int, members: Sequence[int], work: Callable[..., Any], args: tuple) -> Any:
    """What `work` returns on this rank; None outside of the group."""
    group = group_of(members)
    return None if group is None else work(group, *args)


def confirm_in_group(
    ranks: Ranks | None,
    outcome: Outcome,
    work: Callable[..., Any],
    *args: Any,
) -> str:
    """Like `confirm`, after `in_groups`: the last group once more, on real ranks."""
    return confirm(ranks, outcome, _on_members, GROUPS[-1], work, args)


def confirm(
    ranks: Ranks | None,
    outcome: Outcome,
    work: Callable[..., Any],
    *args: Any,
    tolerance: float = REAL_ROUNDING,
) -> str:
    """What passed on simulated ranks, once on real ones: `work(rank, *args)` gives the same there.

    Args:
        ranks: The pool; without one nothing is run.
        outcome: Outcome of the same call on simulated ranks.
        work: The work as it was simulated.
        args: Arguments after the rank.
        tolerance: Relative distance that is rounding: sums are added in another order.

    Returns:
        What to tell the learner, or "".
    """
    if ranks is None:
        return ""
    try:
        results = ranks.run(work, *args)
    except RankError as error:
        text = f"on simulated ranks it is right; on {ranks.n} real ones: {reason(error)}"
        raise Hint(text) from None
    for rank, (real, simulated) in enumerate(zip(results, outcome.results)):
        leaves = tree_leaves(real)
        others = tree_leaves(simulated)
        is_same = all(_are_alike(one, other, tolerance) for one, other in zip(leaves, others))
        if not is_same or len(leaves) != len(others):
            raise Hint(
                f"on simulated ranks it is right; on {ranks.n} real ones rank {rank} has another "
                "result: does it depend on time, or on what another process holds?"
            )
    return f"and the same on {ranks.n} real ranks"


def _are_alike(real: Any, simulated: Any, tolerance: float) -> bool:
    """Whether two tensors or numbers are equal up to rounding; nothing else is compared."""
    if not isinstance(real, (torch.Tensor, int, float)):
        return True
    one = torch.as_tensor(real)
    other = torch.as_tensor(simulated)
    if one.shape != other.shape:
        return False
    is_tiny = float((one.double() - other.double()).abs().sum()) < TOLERANCE  # around zero
    return is_tiny or distance(one, other) < tolerance


# ---- calls


def careless(calls: Sequence[Event]) -> dict[str, bool]:
    """The mistakes that any asynchronous code can make, as rows of a table."""
    started = [one for one in calls if one.asynchronous]
    forgotten = [one for one in started if not one.arrived]
    touched = [one for one in started if one.arrived and one.touched]
    # what should have arrived is read too early, and so it is named first
    results = [one for one in forgotten if one.kind != "send"]
    kind = next((one.kind for one in results + forgotten + touched), "")
    alike = [one.arrived for one in started if one.kind == kind]
    name = {"send": "isend", "recv": "irecv"}.get(kind, kind.replace("_", "-"))
    done = "the tensor has left" if kind == "send" else "the result is there"
    return {
        "a collective was called in a thread of its own: ranks match collectives by their order, "
        "and threads of two ranks run in different orders. async_op=True needs no thread": any(
            one.in_thread for one in calls
        ),
        f"{plural(len(alike), name)} started and {sum(alike)} waited for: without wait() nobody "
        f"knows that {done}": bool(forgotten),
        f"a tensor was changed while its {name} was under way: what has to come after wait()?": (
            bool(touched)
        ),
        **waited_twice(calls),
    }


def waited_twice(calls: Sequence[Event]) -> dict[str, bool]:
    """A row of a table: two waits for one message, which gloo answers by waiting for another."""
    kinds = [one.kind for one in calls if one.kind in ("send", "recv") and len(one.waits) > 1]
    return {
        f"the handle of a {', '.join(kinds[:1])} was waited for twice: its message ends once, and "
        "the second wait() does not return": bool(kinds),
    }


def several(calls: Sequence[Event], count: int) -> dict[str, bool]:
    """A row of a table: more than one collective for what one could carry.

    Args:
        calls: Calls of one rank.
        count: How many tensors it was given.
    """
    sends_objects = any(one.dtype == "uint8" for one in calls)
    size_first = " (a function that sends Python objects sends their size first)"
    return {
        f"{len(calls)} collectives for {plural(count, 'tensor')}"
        f"{size_first if sends_objects else ''}: put all of them into one": len(calls) > 1
    }


# ---- inputs


def draw(group: dist.ProcessGroup, seed: int, *shape: int) -> torch.Tensor:
    """Random numbers in float64: the same on all ranks of a group, others in another group."""
    first = min(dist.get_process_group_ranks(group))
    generator = torch.Generator().manual_seed(100 * seed + first)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def with_gaps(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers as every second one of a larger tensor, which is not contiguous.

    What a layer is given may be a slice or a transpose, and a gradient may be the expansion of one
    number, as that of a sum is.
    """
    return torch.stack((tensor, torch.zeros_like(tensor)), -1)[..., 0]
