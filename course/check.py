"""What the cells of a lesson call: exercises that check themselves, hints, predictions, sources.

check("1.2", my_ring, ranks)                 right, wrong (with what is wrong), or not done yet
yours("1.2", ring.all_reduce)                what the learner wrote, if it was right; else labcode's
hint("1.2")                                  the next hint for this exercise
compare("bytes per rank", guess, measured)   both, and whether the prediction is right or close
show_source(ring_all_reduce)                 the source of a function or a class; folded below an
                                             exercise that is not done

`check`, `hint` and `compare` do not raise, so that Run All reaches the end of a notebook whatever a
learner has written.
"""

import ast
import contextlib
import functools
import importlib
import inspect
import re
import textwrap
from collections import Counter
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

from IPython.core.getipython import get_ipython

from course import catalog, progress, show, tracebacks
from course.answer import Exercise, is_stub, reason
from course.compare import compare
from course.pool.limits import limited
from course.pool.ranks import Ranks
from labcode.runtime import suggest

__all__ = [
    "check",
    "compare",
    "hint",
    "show_source",
    "yours",
]

NOT_DONE = "not done yet"
NOT_CALLABLE = re.compile(r"'(\w+)' object is not callable")
# Of torch.distributed; with async_op=True they return a request, and else None.
WRITE_INTO_WHAT_THEY_GET = {
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
}
LIMIT_S = 60.0  # of each call on ranks in a check, so that a loop without an end ends


class _WrongCall(Exception):
    """`check` itself was called in another way than its cell calls it; that is no wrong answer."""


class _Verdict(NamedTuple):
    """What is shown: "[v] 1.2 right: praise"."""

    mark: str  # of the plain text
    badge: show.Badge
    word: str
    text: str = ""


# ---- check

_unsolved: list[str] = []  # the exercise that was checked last in this kernel, while it is open
_right: dict[
    str, tuple[Any, ...]
] = {}  # what was right when it was checked last in this kernel, by exercise


def check(exercise: str = "", *answers: Any) -> None:
    """Judge an answer, and say in one line: right, wrong and what is wrong, or not done yet.

    A stub counts as not done: a function that raises NotImplementedError (here or on a rank), or a
    name that is still `...`. Where the source shows it already, nothing is run. A pass is praised
    with the words of the exercise, and noted for `python -m labcode`.

    Args:
        exercise: Number of the exercise, "1.2".
        answers: What the exercise asks for, and what its check needs besides, such as ranks.
    """
    try:
        _refuse_wrong_call(exercise, answers)
        verdict = _verdict(_exercises(exercise)[exercise], answers)
    except _WrongCall as problem:
        show.say(str(problem), f"<div>{show.sentence(str(problem))}</div>")
        return
    _unsolved.clear()
    if verdict.badge is show.RIGHT:
        _right[exercise] = answers
    else:
        _right.pop(exercise, None)
        _unsolved.append(exercise)
    plain = f"{verdict.mark} {exercise} {verdict.word}"
    rich = f"{verdict.badge.html(verdict.word)} <b>{exercise}</b>"
    if verdict.text:
        plain = f"{plain}: {verdict.text}"
        rich = f"{rich} {show.sentence(verdict.text)}"
    show.say(plain, f"<div>{rich}</div>")
    if verdict.badge is show.RIGHT:
        progress.record(exercise)


def _refuse_wrong_call(exercise: object, answers: tuple[Any, ...]) -> None:
    """See that `check` is called as the cell of the exercise calls it.

    Args:
        exercise: What was given as its number.
        answers: What was given besides.

    Raises:
        _WrongCall: It is not; the text says how the cell calls it.
    """
    if not isinstance(exercise, str) or not exercise:
        raise _WrongCall(
            'the number of the exercise comes first, in quotes, as in `check("0.1", share)`'
        )
    known = _exercises(exercise)
    about = known.get(exercise, Exercise())
    if about.check is None:
        raise _WrongCall(suggest.unknown("exercise", exercise, known))
    signature = inspect.signature(about.check)
    call = _calls_of(exercise.partition(".")[0], Path.cwd()).get(exercise, "")
    call = call or _call_by_signature(exercise, signature)
    try:
        signature.bind(*answers)
    except TypeError:
        count = "no value" if not answers else f"{len(answers)} values"
        count = "1 value" if len(answers) == 1 else count
        raise _WrongCall(
            f"`check` was given {count} besides the number {exercise}; its cell has `{call}`"
        ) from None
    names = _names_in(call)
    for name, answer in zip(names, answers):
        # a cell that has its pool under another name says so in its call
        if isinstance(answer, Ranks) and name != "ranks" and "ranks" in names:
            raise _WrongCall(f"the function comes first, and then the ranks; its cell has `{call}`")
    _refuse_another_function(exercise, answers, call)


def _refuse_another_function(exercise: str, answers: tuple[Any, ...], call: str) -> None:
    """See that no function stands where the cell has another one of the lesson.

    A function may have any name that is not one of these.
    """
    names = _names_in(call)
    for name, answer in zip(names, answers):
        own = answer.__name__ if isinstance(answer, (FunctionType, type)) else name
        is_the_named_one = getattr(answer, "__globals__", {}).get(name) is answer
        if own == name or is_the_named_one:
            continue
        if own in names:
            raise _WrongCall(f"`{own}` stands in another place; the cell has `{call}`")
        calls = _calls_of(exercise.partition(".")[0], Path.cwd())
        for other, its_call in calls.items():
            if other != exercise and own in _names_in(its_call):
                raise _WrongCall(
                    f"`{own}` belongs to exercise {other}; the cell of {exercise} has `{call}`"
                )


_calls_in = functools.cache(catalog.check_calls)  # a notebook with its outputs is large


def _calls_of(lesson: str, folder: Path) -> dict[str, str]:
    """The calls in the check cells of a lesson, by exercise.

    Those of the solutions are looked at first: in the student's notebook somebody may have changed
    the call.

    Args:
        lesson: "4".
        folder: Folder in which the notebook runs.
    """
    for place in (folder, catalog.BESIDE_THE_LIBRARY):
        for notebooks in (place.parent / "solutions", place):
            calls = _calls_in(lesson, notebooks)
            if calls:
                return calls
    return {}


def _call_by_signature(exercise: str, signature: inspect.Signature) -> str:
    required = []
    for name, parameter in signature.parameters.items():
        if parameter.default is parameter.empty:
            required.append(name)
    return f'check("{exercise}", {", ".join(required)})'


def _names_in(call: str) -> list[str]:
    """The names that a call of `check` gives after the number; "" for what is no name."""
    names = []
    for node in ast.walk(ast.parse(call)):
        if isinstance(node, ast.Call):
            for argument in node.args[1:]:
                names.append(argument.id if isinstance(argument, ast.Name) else "")
            break
    return names


def _verdict(about: Exercise, answers: tuple[Any, ...]) -> _Verdict:
    not_done = _Verdict("[ ]", show.OPEN, NOT_DONE)  # a check may note what is right so far
    if any(answer is ... or _is_untouched(answer) for answer in answers):
        return not_done
    assert about.check is not None
    try:
        with limited(LIMIT_S):
            more = about.check(*answers)
    except (Exception, SystemExit) as error:  # but not KeyboardInterrupt
        if is_stub(error):
            return not_done._replace(text="; ".join(getattr(error, "__notes__", ())))
        _refuse_result(error, answers)
        text = reason(error)
        if "None" in f"{text} {error}" and "async_op" not in text:
            text = _with_collective(text, answers)
        return _Verdict("[x]", show.WRONG, "wrong", text)
    return _Verdict("[v]", show.RIGHT, "right", "; ".join(filter(None, (about.praise, more))))


def _refuse_result(error: BaseException, answers: tuple[Any, ...]) -> None:
    """See that what could not be called is not what was given to `check`."""
    found = NOT_CALLABLE.search(str(error))
    for answer in answers:
        kind = type(answer).__name__
        if found and kind == found[1] and not callable(answer):
            given = "None" if answer is None else f"an object of type {kind}"
            raise _WrongCall(
                f"`check` was given {given} and no function: give the function itself, without ()"
            ) from None


def _with_collective(text: str, answers: tuple[Any, ...]) -> str:
    """A text about a None, with the collective from which an answer has it, if there is one."""
    for answer in answers:
        for name in _values_used(answer):
            stop = "" if text.endswith((".", "?", "!")) else "."
            return (
                f"{text}{stop} `{name}` itself returns nothing, as the result is put into what it "
                "is given"
            )
    return text


def _values_used(answer: Any) -> list[str]:
    """The collectives whose return value, which is None, a function or a class goes on with."""
    found = []
    with contextlib.suppress(OSError, TypeError, SyntaxError):  # no source, or a lambda's
        tree = ast.parse(textwrap.dedent(inspect.getsource(answer)))
        statements = [node for node in ast.walk(tree) if isinstance(node, ast.Expr)]
        thrown_away = [statement.value for statement in statements]
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or node in thrown_away:
                continue
            module, _, name = ast.unparse(node.func).rpartition(".")
            is_async = any(keyword.arg == "async_op" for keyword in node.keywords)
            is_of_torch = module in ("dist", "torch.distributed")
            if is_of_torch and name in WRITE_INTO_WHAT_THEY_GET and not is_async:
                found.append(name)
    return found


def yours(exercise: str, otherwise: Any) -> Any:
    """What the learner wrote for an exercise, for cells that go on with it; says which one it is.

    Args:
        exercise: Number of the exercise, "1.2".
        otherwise: What is used where the exercise has not been checked as right in this kernel.
    """
    if exercise in _right:
        text = f"exercise {exercise}: yours is used"
        show.say(text, f"<div>{show.sentence(text)}</div>")
        return _right[exercise][0]
    text = f"exercise {exercise} is not done in this notebook: labcode's own is used"
    show.say(text, f"<div>{show.sentence(text)}</div>")
    return otherwise


def _exercises(exercise: str) -> dict[str, Exercise]:
    """What the module of an exercise's lesson says about its exercises, by number."""
    lesson = exercise.partition(".")[0]
    try:
        module = importlib.import_module(f"course.exercises.l{lesson:>02}")
    except ModuleNotFoundError:
        return {}
    return getattr(module, "EXERCISES", {})


# ---- hint

_shown: Counter[str] = Counter()  # hints that were shown in this kernel, by exercise


def hint(exercise: str | float | None = None, number: int | None = None) -> None:
    """Show the next hint for an exercise; after the last one say that there is no further one.

    Args:
        exercise: Number of the exercise, "1.2"; None: the one checked last, if it is open.
        number: Which hint to show, from 1; None: the next one.
    """
    if exercise is None and not _unsolved:
        _say_hint('a hint for which exercise? Give its number, as in hint("1.2")')
        return
    exercise = _unsolved[0] if exercise is None else str(exercise)
    known = _exercises(exercise)
    if exercise not in known:
        with_hints = sorted(name for name, about in known.items() if about.hints)
        _say_hint(suggest.unknown("exercise", exercise, known, listed=with_hints or None))
        return
    hints = known[exercise].hints
    if not hints:
        _say_hint(f"there are no hints for exercise {exercise}: what `check` says is all there is")
        return
    wanted = number
    if wanted is None:
        _shown[exercise] += 1
        wanted = _shown[exercise]
    if 1 <= wanted <= len(hints):
        _say_hint(hints[wanted - 1], f"hint {wanted} of {len(hints)} for {exercise}: ")
        return
    count = "the only one" if len(hints) == 1 else f"the last of {len(hints)}"
    text = (
        f'no further hint for {exercise}: that was {count}; `hint("{exercise}", 1)` '
        "shows the first again"
    )
    solution = catalog.solution_of(exercise, Path.cwd())  # a kernel runs beside its notebook
    if solution is None:
        _say_hint(text)
        return
    text = f"{text}, and the solution is in "
    link = show.link(solution.place, solution.address)
    show.say(f"{text}{solution.place}", f"<div>{show.sentence(text)}{link}</div>")


def _say_hint(text: str, head: str = "") -> None:
    show.say(f"{head}{text}", f"<div><b>{head}</b>{show.sentence(text)}</div>")


# ---- the library's own version


def show_source(obj: Any) -> None:
    """Show the source of a function, a method or a class, with its docstring and its colours.

    Below an exercise that is not done it is folded, since it may be the answer.

    Args:
        obj: It may come from labcode, from another library, or from a cell of this notebook.

    Raises:
        TypeError: There is no Python source, as for `len`.
    """
    fold = f"exercise {_unsolved[0]} is not done yet; show it all the same:" if _unsolved else ""
    show.show_source(obj, fold)


# ---- what is not done


def _is_untouched(function: Any) -> bool:
    """Whether it is a function that raises NotImplementedError("exercise...") before anything else.

    That is the raise at its top level, or in a loop there, without a way round it.
    """
    if not isinstance(function, FunctionType):
        return False
    if "NotImplementedError" not in function.__code__.co_names:
        return False
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):  # no source, or a lambda's
        return False
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef):
        return False
    statements = list(definition.body)
    while statements:
        statement = statements.pop(0)
        if isinstance(statement, ast.Raise):
            return "NotImplementedError('exercise" in ast.unparse(statement)
        if isinstance(statement, ast.For):
            statements = list(statement.body)
        elif not isinstance(statement, (ast.Assign, ast.AnnAssign, ast.Expr)):
            return False
    return False


def _offer_hint() -> None:
    """Put `hint` into a notebook: learners call it, and no cell of a lesson does."""
    if show.in_notebook():
        shell: Any = get_ipython()
        shell.user_ns.setdefault("hint", hint)


# In the kernel of a notebook, from the import on; elsewhere these do nothing.
tracebacks.shorten()
progress.watch()
_offer_hint()
