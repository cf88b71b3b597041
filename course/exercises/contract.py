"""A check as a table: cases, what an answer promises in them, and the mistakes that people make.

    SHARE = Contract(
        Solution("15", "share_s"),
        cases={"dp 2: ": (MODEL, GridShape(dp=2)), "dp 4: ": (MODEL, GridShape(dp=4))},
        shape=(Mistake("give one number", "return dp_s => return [dp_s]", when=no_number),),
        mistakes=(
            Mistake("each gradient has 4 bytes, not 2", "4 * model => 2 * model"),
            Mistake("{found} s is less than nothing", when=is_negative),
        ),
        otherwise="your function gives {found:.3f} s, and it takes {truth:.3f} s",
    )
    EXERCISES = {"15.2": Exercise(check=SHARE, mistakes=SHARE.rows)}

In each case the answer runs beside the lesson's solution. A mistake has its hint, examples, which
are changes of the solution's text, and a sign, a condition of what was seen. Without a sign of its
own it shows when the answer gives what an example of it gives. The tests run all examples: each is
told the hint beside which it stands.

Held by: tests/exercises/test_answers.py, tests/unit/test_contract.py
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch

from course.answer import Hint, due, is_stub
from course.exercises.expect import TOLERANCE, distance
from course.exercises.in_notebook import LOOP, bounded, without
from course.exercises.solution import Example, Solution


class Seen(SimpleNamespace):
    """What is known of an answer, for signs and for the braces of hints.

    In a case of a contract these are `case`, the text that a hint begins with, the arguments by
    their names, `found`, what the answer gave, `truth`, what the solution gave, and `is_right`.
    """

    case: str = ""
    found: Any
    truth: Any


Sign = Callable[[Any], Any]  # of what was seen


def elsewhere(_: Seen) -> bool:
    """The sign of a mistake whose hint, here a part of it, comes from other code."""
    return False


class Mistake:
    """A mistake that people make.

    Args:
        hint: What they are told; its braces are fields of what was seen.
        like: Examples of it, each a change of the solution's text, or several changes.
        when: Sign of the mistake; None: the answer gives what an example gives.
    """

    def __init__(self, hint: str, *like: Example, when: Sign | None = None) -> None:
        self.hint = hint
        self.like = like
        self.when = when

    def told(self, see: Seen) -> Hint:
        """Its hint, about what was seen."""
        return Hint(see.case + self.hint.format(**vars(see)))


class Case(Mistake):
    """Arguments, and what is told of any other result than the solution's.

    Its examples come before those of the mistakes of all cases: who forgets that there are three
    samples gives as much as who counts a third of the work.
    """

    def __init__(self, args: Sequence[Any], hint: str, *like: Example) -> None:
        super().__init__(hint, *like)
        self.args = args


def tell(mistakes: Iterable[Mistake], see: Seen) -> None:
    """Raise the hint of the first mistake whose sign shows."""
    for mistake in mistakes:
        if mistake.when is not None and mistake.when(see):
            raise mistake.told(see)


# ---- signs that many checks share


def no_number(see: Seen) -> bool:
    """It is not one finite number."""
    return not is_number(see.found)


ONE_NUMBER = Mistake("return one finite number, not {found!r:.40}", when=no_number)


def is_number(value: Any) -> bool:
    """Whether a value is a finite number of Python."""
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and math.isfinite(value)


def not_things(count: int) -> Sign:
    """The sign that it is no tuple or list of that many things."""

    def sign(see: Seen) -> bool:
        return not isinstance(see.found, tuple | list) or len(see.found) != count

    return sign


def differs(place: int) -> Sign:
    """The sign that what it gives at this place is not what the solution gives there."""

    def sign(see: Seen) -> bool:
        return not alike(see.found[place], see.truth[place])

    return sign


def alike(found: Any, truth: Any, tolerance: float = TOLERANCE) -> bool:
    """Whether two results are the same, numbers and tensors up to rounding."""
    if isinstance(truth, Exception):
        return isinstance(found, type(truth))
    if isinstance(truth, torch.Tensor):
        return isinstance(found, torch.Tensor) and distance(found, truth) < tolerance
    if isinstance(truth, int | float) and not isinstance(truth, bool):
        is_number = isinstance(found, int | float | torch.Tensor)
        return is_number and bool(found == truth or abs(found - truth) < tolerance * abs(truth))
    if isinstance(truth, Mapping):
        has_keys = isinstance(found, Mapping) and found.keys() == truth.keys()
        return has_keys and all(alike(found[key], truth[key], tolerance) for key in truth)
    if isinstance(truth, tuple | list):
        is_list = isinstance(found, tuple | list) and len(found) == len(truth)
        return is_list and all(map(alike, found, truth, [tolerance] * len(truth)))
    return bool(found == truth)


# ---- the contract


@dataclass(frozen=True)
class Contract:
    """What an answer promises: in every case it does what the solution does.

    Args:
        solution: Solution of the exercise, a function.
        cases: {what a hint begins with: arguments, or a `Case`}.
        mistakes: Those with a sign are looked for first and in every case, the others where the
            result is not that of the solution.
        otherwise: What is told of any other result; "": another one may be right too, and the signs
            of mistakes decide.
        shape: Mistakes in the form of a result, which are looked for first.
        look: Adds fields to what is seen of a result that has the right form.
        refuses: Why the solution raises an error in some cases; "": it is to raise none.
        ready: Finished solutions, which the answer may not call.
        loops: Whether it might never end.
        tolerance: Relative distance that is rounding.
    """

    solution: Solution
    cases: Mapping[str, Sequence[Any] | Case]
    mistakes: Sequence[Mistake] = ()
    otherwise: str = "it gives {found}, expected is {truth}"
    shape: Sequence[Mistake] = ()
    look: Callable[[Any], None] | None = None
    refuses: str = ""
    ready: Sequence[Callable[..., Any]] = ()
    loops: bool = False
    tolerance: float = TOLERANCE

    @property
    def rows(self) -> tuple[Mistake, ...]:
        """All mistakes, for `Exercise`."""
        cases = [case for case in self.cases.values() if isinstance(case, Case)]
        return (*self.shape, *self.mistakes, *cases)

    def __call__(self, answer: Callable[..., Any]) -> None:
        """Judge an answer.

        Raises:
            Hint: Hint of the first case in which the answer does not do what the solution does.
        """
        self.judge(answer)

    def judge(self, answer: Callable[..., Any]) -> list[Seen]:
        """Judge the answer as a call does, and return what was seen in each case."""
        names = list(signature(self._own).parameters)
        seen = []
        for name, case in self.cases.items():
            args = _args(case)
            see = Seen(case=name, truth=self._truth[name], **dict(zip(names, args)))
            seen.append(see)
            if isinstance(see.truth, Exception):
                if not self.refuses:
                    raise see.truth
                self._check_refused(answer, args, see)
                continue
            see.found = self._ask(answer, args)
            see.is_first = len(seen) == 1
            if see.is_first:  # later None may be an answer, and no forgotten return
                due(see.found)
            of_case = case if isinstance(case, Case) else Mistake(self.otherwise)
            self._check_result(args, see, of_case)
        return seen

    @functools.cached_property
    def _own(self) -> Callable[..., Any]:
        return self.solution.changed()

    @functools.cached_property
    def _truth(self) -> Mapping[str, Any]:
        """What the solution gives, by case; whoever checks a second time need not wait for it."""
        return {name: _outcome(self._own, _args(case)) for name, case in self.cases.items()}

    def _ask(self, answer: Callable[..., Any], args: Sequence[Any]) -> Any:
        with without(*self.ready) if self.ready else nullcontext():
            return bounded(LOOP, answer, *args) if self.loops else answer(*args)

    def _check_refused(self, answer: Callable[..., Any], args: Sequence[Any], see: Seen) -> None:
        """What the solution refuses, the answer refuses with the same error and a text."""
        error = type(see.truth).__name__
        try:
            see.found = answer(*args)
        except Exception as found:
            if is_stub(found):
                raise
            see.found = found
            if not isinstance(found, type(see.truth)):
                name = type(found).__name__
                raise Hint(f"{see.case}your function raises {name}: raise a {error}") from None
            if not str(found).strip():
                text = f"the {error} has no text: say in it what does not fit"
                raise Hint(see.case + text) from None
            return
        raise Hint(
            f"{see.case}your function gives {see.found}; {self.refuses}, so it should raise a "
            f"{error}"
        )

    def _check_result(self, args: Sequence[Any], see: Seen, of_case: Mistake) -> None:
        """What the answer gives is what the solution gives."""
        tell(self.shape, see)
        due(see.found)
        if self.look is not None:
            self.look(see)
        see.is_right = not of_case.hint or alike(see.found, see.truth, self.tolerance)
        tell(self.mistakes, see)
        if see.is_right:
            return
        for mistake in (of_case, *self.mistakes):
            if mistake.when is None and self._is_like(mistake, args, see.found):
                raise mistake.told(see)
        raise of_case.told(see)

    def _is_like(self, mistake: Mistake, args: Sequence[Any], found: Any) -> bool:
        """Whether an example of a mistake gives what the answer gave."""
        for example in mistake.like:
            wrong = _outcome(self.solution.changed(*as_changes(example)), args)
            if alike(found, wrong, self.tolerance):
                return True
        return False


def _args(case: Sequence[Any] | Case) -> Sequence[Any]:
    return case.args if isinstance(case, Case) else case


def as_changes(example: Example) -> tuple[str, ...]:
    """The changes that make an example."""
    return (example,) if isinstance(example, str) else example


def _outcome(function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """What a function returns, or the error that it raises."""
    try:
        return function(*args)
    except Exception as error:
        return error
