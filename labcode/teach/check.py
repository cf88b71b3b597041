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
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

from IPython.core.getipython import get_ipython

from labcode import course, suggest
from labcode.pool.answers import RankError
from labcode.pool.limits import limited
from labcode.pool.ranks import Ranks
from labcode.teach import progress, show, tracebacks
from labcode.teach.compare import compare

__all__ = [
    "Exercise",
    "Hint",
    "check",
    "compare",
    "due",
    "hint",
    "is_stub",
    "reason",
    "show_source",
    "yours",
]

NOT_DONE = "not done yet"
RETURNED_NONE = "it returned None: is there a `return`?"
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
MAX_HINT_CHARACTERS = 520
ADVICE_CHARACTERS = 180  # of these the end: there stands what to do
LIMIT_S = 60.0  # of each call on ranks in a check, so that a loop without an end ends
ON_RANK = re.compile(r"(rank \d+): (\w+):? *(.*)")
MEANINGS = {  # what gloo and the store write, and what it means
    r"[Tt]imed out waiting \d+ms for \w+ operation": "it waited for a message that nobody sent",
    r"element 0 of tensors does not require grad": (
        "backward was started from a tensor that has no graph: was it detached, or computed "
        "without autograd?"
    ),
    r"of type torch\.Tensor but got <class '(int|float|bool)'>": (
        r"torch.distributed wants a tensor and was given an object of type \1: torch.tensor(...) "
        "makes one"
    ),
    r"Invalid function argument\. Expected parameter `\w+` of type torch\.Tensor": (
        "torch.distributed was given what is no tensor: if it is the .grad of an x, was "
        "requires_grad_ called on this very x, and does another rank wait for it?"
    ),
    r"'NoneType' object has no attribute 'contiguous'": (
        "None is what was to be sent: if it is the .grad of an x, was requires_grad_ called on "
        "this very x, and does another rank wait for it?"
    ),
    r"wait timeout": "it waited for something that no rank put into the store",
    r"Connection (closed by peer|reset by peer)": "another rank ended while this one waited for it",
    r"returned an incorrect number of gradients \(expected (\d+), got (\d+)\)": (
        r"backward gives \2 where \1 are expected, one for each argument of forward but `ctx`: "
        "is there a `return`, and a None for what has no gradient?"
    ),
    r"'NoneType' object has no attribute 'wait'": (
        "there is nothing to wait for: a collective returns its request only with async_op=True"
    ),
    r"shape '(\[[\d, ]*\])' is invalid for input of size (\d+)": (
        r"a tensor of \2 numbers was to have the shape \1: how many numbers belong to it?"
    ),
    r"Global rank \d+ is not part of group|should not be the same as the rank of the current": (
        "a message between a rank and itself, or one outside of the group: dst and src are ranks "
        "of the world, group_dst and group_src count within the group"
    ),
    r"invalid input tensor list size, must be world size": (
        "the list has not one tensor for each rank of the group: along which dim was it cut, and "
        "into how many parts?"
    ),
}


class Hint(Exception):
    """What is wrong with an answer, and where to look: the text that the learner reads."""


class _WrongCall(Exception):
    """`check` itself was called in another way than its cell calls it; that is no wrong answer."""


@dataclass(frozen=True)
class Exercise:
    """What is said about an exercise; in `labcode.teach.exercises.lNN.EXERCISES`, by its number.

    Args:
        praise: What a right answer is told, for instance what the number means.
        hints: Each says a little more than the one before; none of them the answer.
        check: What judges an answer: it is given what the check cell gives after the number, raises
            `Hint` where that is wrong, and may return what else there is to say of a right one.
    """

    praise: str = ""
    hints: tuple[str, ...] = ()
    check: Callable[..., Any] | None = None


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
        exercise: Its number, "1.2".
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


_calls_in = functools.cache(course.check_calls)  # a notebook with its outputs is large


def _calls_of(lesson: str, folder: Path) -> dict[str, str]:
    """The calls in the check cells of a lesson, by exercise.

    Those of the solutions are looked at first: in the student's notebook somebody may have changed
    the call.

    Args:
        lesson: "4".
        folder: In which the notebook runs.
    """
    for place in (folder, course.BESIDE_THE_LIBRARY):
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
        exercise: Its number, "1.2".
        otherwise: What is used where the exercise has not been checked as right in this kernel.
    """
    if exercise in _right:
        text = f"exercise {exercise}: yours is used"
        show.say(text, f"<div>{show.sentence(text)}</div>")
        return _right[exercise][0]
    text = f"exercise {exercise} is not done in this notebook: labcode's own is used"
    show.say(text, f"<div>{show.sentence(text)}</div>")
    return otherwise


def due(*values: Any) -> Any:
    """Values that the learner had to fill in.

    Returns:
        The value, or a tuple of several.

    Raises:
        NotImplementedError: One is `...`; `check` then says "not done yet".
        Hint: One is None, which is what a function without `return` gives.
    """
    if any(value is ... for value in values):
        raise NotImplementedError("exercise")
    if any(value is None for value in values):
        raise Hint(RETURNED_NONE)
    if len(values) == 1:
        return values[0]
    return values


def _exercises(exercise: str) -> dict[str, Exercise]:
    """What the module of an exercise's lesson says about its exercises, by number."""
    lesson = exercise.partition(".")[0]
    try:
        module = importlib.import_module(f"labcode.teach.exercises.l{lesson:>02}")
    except ModuleNotFoundError:
        return {}
    return getattr(module, "EXERCISES", {})


# ---- hint

_shown: Counter[str] = Counter()  # hints that were shown in this kernel, by exercise


def hint(exercise: str | float | None = None, number: int | None = None) -> None:
    """Show the next hint for an exercise; after the last one say that there is no further one.

    Args:
        exercise: Its number, "1.2"; None: the one that was checked last, if it is open.
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
    solution = course.solution_of(exercise, Path.cwd())  # a kernel runs beside its notebook
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


def is_stub(error: BaseException) -> bool:
    """Whether an error, or one that caused it, comes from code that is still to be written.

    That is NotImplementedError of a stub, also as the text of a rank's error, or `...` used as a
    value. PyTorch raises NotImplementedError too, for what it cannot do; that is no stub.
    """
    cause: BaseException | None = error
    while cause is not None:
        text = str(cause)
        if isinstance(cause, NotImplementedError) and (not text or text.startswith("exercise")):
            return True
        if "NotImplementedError: exercise" in text:
            return True
        if isinstance(cause, (TypeError, AttributeError)) and "ellipsis" in text.lower():
            return True
        cause = cause.__cause__ or cause.__context__
    return False


# ---- what is wrong


def reason(error: BaseException) -> str:
    """One line, the same at each run: the assertion's text, or the error and the learner's line."""
    # torch breaks this one in two
    text = _first_line(re.sub(r"\n +but got <", " but got <", str(error)))
    text = re.sub(r"\bat 0x[0-9a-f]+", "", text)  # addresses differ from run to run
    if isinstance(error, Hint):
        return _cut(text)
    if isinstance(error, AssertionError):
        return _cut(text) or f"this does not hold: {_failed_condition(error)}"
    place = tracebacks.place_in_cells(error)
    is_their_own = False
    if not place and error.__cause__ is not None:  # of an error on a simulated rank
        place = tracebacks.place_in_cells(error.__cause__)
        is_their_own = tracebacks.raised_in_a_cell(error.__cause__)
    on_rank = ON_RANK.match(text)
    if on_rank:
        rank, name, message = on_rank.groups()
        if name == "AssertionError" and place and (is_their_own or not message):
            said = f', "{message}"' if message else ""
            return f"on {rank}: an assertion of yours does not hold{said}{place}"
        if name in ("AssertionError", Hint.__name__):
            return _cut(f"on {rank}: {message or 'a check failed'}")
        return f"on {rank}: {_cut(_in_words(name, message))}{place}"
    if isinstance(error, RankError):  # the pool speaks in words of its own
        return f"{_cut(text)}{place}"
    if "NoneType" in text and not place:
        # what the learner's function gave back could not be used
        text = f"{text}; if that is your function's result, {RETURNED_NONE}"
    return f"{_cut(_in_words(type(error).__name__, text))}{place}"


def _in_words(name: str, message: str) -> str:
    """An error of a library with what it means: gloo names its own source files, not the fault."""
    for sign, meaning in MEANINGS.items():
        found = re.search(sign, message)
        if found is None:
            continue
        meaning = found.expand(meaning)
        # the pool adds what each rank did, where it knows: "...: rank 0 waits in recv, ..."
        _, _, done = message[found.end() :].partition(": ")
        return f"{meaning}: {done}" if done else meaning
    return f"{name}: {message}" if message else name


def _cut(text: str) -> str:
    """A long text without its middle."""
    if len(text) <= MAX_HINT_CHARACTERS:
        return text
    gap = " ... "
    start = text[: MAX_HINT_CHARACTERS - ADVICE_CHARACTERS - len(gap)]
    end = text[-ADVICE_CHARACTERS:]
    return f"{start.rstrip()}{gap}{end.partition(' ')[2].lstrip()}"


def _first_line(text: str) -> str:
    """The first line that is not blank."""
    for line in text.splitlines():
        if line.strip():
            return line.strip()
    return ""


def _failed_condition(error: BaseException) -> str:
    """What an assertion without a text asserts."""
    line = traceback.extract_tb(error.__traceback__)[-1].line
    if not line:
        return "a check without a hint"
    return line.removeprefix("assert ")


def _offer_hint() -> None:
    """Put `hint` into a notebook: learners call it, and no cell of a lesson does."""
    if show.in_notebook():
        shell: Any = get_ipython()
        shell.user_ns.setdefault("hint", hint)


# In the kernel of a notebook, from the import on; elsewhere these do nothing.
tracebacks.shorten()
progress.watch()
_offer_hint()
