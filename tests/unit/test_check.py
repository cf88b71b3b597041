"""check, hint, compare, show_source: one line each, the same text at each run, no exception."""

import functools
import linecache
import sys
import types
from collections import Counter
from pathlib import Path

import pytest
import torch

from course import catalog, show
from course.answer import Exercise, Hint, due
from course.check import check, compare, hint, show_source, yours
from course.exercises import expect
from course.pool.answers import RankError
from course.pool.ranks import Ranks


def call(answer):
    """The check of an exercise: the answer raises what is wrong with it."""
    return answer()


@pytest.fixture(autouse=True)
def lesson_99(monkeypatch):
    """The words of a lesson that does not exist."""
    module = types.ModuleType("course.exercises.l99")
    module.EXERCISES = {
        "99.1": Exercise(check=call),
        "99.2": Exercise(
            "that is 94 %", hints=("count `both` directions", "and the way back"), check=call
        ),
        "99.3": Exercise(hints=("only this",)),
    }
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("course.check._right", {})


@pytest.fixture
def notebook(monkeypatch):
    """A notebook as in a kernel: what is shown, as (text/html, text/plain)."""
    shown = []

    def take(data, raw):
        shown.append((data["text/html"], data["text/plain"]))

    monkeypatch.setattr(show, "in_notebook", lambda: True)
    monkeypatch.setattr(show, "display", take)
    return shown


def stub(*_):
    raise NotImplementedError("exercise: your code here")


def said(capsys, test, exercise="99.1"):
    check(exercise, test)
    return capsys.readouterr().out


def fail(text):
    raise AssertionError(text)


def raised(error):
    raise error


# ---- check


def test_passes(capsys):
    assert said(capsys, lambda: None) == "[v] 99.1 right\n"
    assert said(capsys, lambda: None, "99.2") == "[v] 99.2 right: that is 94 %\n"
    assert said(capsys, lambda: "and on 4 ranks", "99.2") == (
        "[v] 99.2 right: that is 94 %; and on 4 ranks\n"
    )


def test_yours_is_what_was_right_when_it_was_checked_last(capsys):
    def mine():
        return None

    def wrong():
        fail("no")

    assert yours("99.1", "ours") == "ours"
    assert "not done in this notebook" in capsys.readouterr().out
    said(capsys, mine)
    assert yours("99.1", "ours") is mine
    assert capsys.readouterr().out == "exercise 99.1: yours is used\n"
    said(capsys, wrong)
    assert yours("99.1", "ours") == "ours"


@pytest.mark.parametrize("exercise", ["99.7", "77.7"])  # without a check, and without a module
def test_an_exercise_that_there_is_not(capsys, exercise):
    assert said(capsys, lambda: None, exercise).startswith(f"unknown exercise '{exercise}'")


def test_the_assertion_is_the_hint(capsys):
    assert said(capsys, lambda: fail("got 3, expected 4: count both directions\nlong diff")) == (
        "[x] 99.1 wrong: got 3, expected 4: count both directions\n"
    )


def test_an_assertion_without_text_shows_what_does_not_hold(capsys, tmp_path):
    # pytest rewrites the assertions of this module, but not of that one
    file = tmp_path / "exercise.py"
    file.write_text("def test():\n    total = 3\n    assert total == 4\n")
    names = {}
    exec(compile(file.read_text(), str(file), "exec"), names)
    assert said(capsys, names["test"]) == "[x] 99.1 wrong: this does not hold: total == 4\n"


def test_verdicts_have_colour_symbol_and_word(notebook):
    check("99.2", lambda: None)
    check("99.2", lambda: fail("look at `x < 3` again"))
    check("99.2", stub)
    badges = [rich.partition("</span>")[0] for rich, _ in notebook]
    assert [badge.rpartition(">")[2] for badge in badges] == [
        "✓ right",
        "✗ wrong",
        "○ not done yet",
    ]
    assert len({badge.partition(";")[0] for badge in badges}) == 3  # three colours
    assert "look at <code>x &lt; 3</code> again" in notebook[1][0]
    assert [plain for _, plain in notebook] == [
        "[v] 99.2 right: that is 94 %",
        "[x] 99.2 wrong: look at `x < 3` again",
        "[ ] 99.2 not done yet",
    ]


@pytest.mark.parametrize("badge", [show.RIGHT, show.WRONG, show.OPEN])
def test_white_can_be_read_on_every_badge(badge):
    def linear(channel):
        value = channel / 255
        return value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4

    red, green, blue = map(linear, bytes.fromhex(badge.colour[1:]))
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    assert 1.05 / (luminance + 0.05) >= 4.5


def chained():
    try:
        stub()
    except NotImplementedError as error:
        raise RuntimeError("the ring failed") from error


RANK_STUB = "rank 0: NotImplementedError: exercise: your code here"
NOT_DONE = {
    "a stub": lambda: stub(),
    "a stub inside another error": chained,
    "a stub on a rank": lambda: raised(RuntimeError(RANK_STUB)),
    "a stub of the learner's own": lambda: raised(NotImplementedError),
    "a name still unset": ...,
    "an unset value in arithmetic": lambda: 1 + ...,
    "a value that is due": lambda: due(...),
}


@pytest.mark.parametrize("case", NOT_DONE)
def test_not_done_yet(capsys, case):
    assert said(capsys, NOT_DONE[case]) == "[ ] 99.1 not done yet\n"


def half_done():
    error = NotImplementedError("exercise: your code here")
    error.add_note("`gather` is right")
    raise error


def test_not_done_yet_may_say_what_is_right(capsys):
    assert said(capsys, half_done) == "[ ] 99.1 not done yet: `gather` is right\n"


def half_written(x):
    if x > 0:
        return x
    raise NotImplementedError("exercise: your code here")


def untouched_in_a_loop(x):
    """What is to be written stands in a loop."""
    room = x * 2
    for _ in range(room):
        raise NotImplementedError("exercise: your code here")


@pytest.mark.parametrize("function", [stub, untouched_in_a_loop])
def test_an_untouched_function_is_seen_without_a_test(capsys, function):
    assert said(capsys, function) == "[ ] 99.1 not done yet\n"


def test_a_function_that_may_return_is_tested(capsys):
    assert said(capsys, lambda: half_written(1) and None) == "[v] 99.1 right\n"


RETURNED_NONE = "it returned None: is there a `return`?"
FORGOTTEN = {
    "where a value is due": (lambda: due(None), RETURNED_NONE),
    "among several values": (lambda: due(1, None), RETURNED_NONE),
    "on a rank": (
        lambda: raised(RuntimeError(f"rank 1: AssertionError: {RETURNED_NONE}")),
        f"on rank 1: {RETURNED_NONE}",
    ),
    "and then used": (
        lambda: None + 1,
        "TypeError: unsupported operand type(s) for +: 'NoneType' and 'int'; "
        f"if that is your function's result, {RETURNED_NONE}",
    ),
}


@pytest.mark.parametrize("case", FORGOTTEN)
def test_none_is_a_forgotten_return(capsys, case):
    """Once it counted as not done: whoever forgot `return` looked for the fault elsewhere."""
    test, hint_text = FORGOTTEN[case]
    assert said(capsys, test) == f"[x] 99.1 wrong: {hint_text}\n"


def test_what_pytorch_has_not_implemented_is_no_stub(capsys):
    def strange():
        raise NotImplementedError("Could not run 'aten::foo' with arguments from the backend")

    assert "[x] 99.1 wrong: NotImplementedError: Could not run" in said(capsys, strange)


def test_due_returns_what_was_filled_in():
    assert due(3) == 3
    assert due(0, "b") == (0, "b")
    with pytest.raises(NotImplementedError):
        due(1, ...)
    with pytest.raises(Hint, match="it returned None"):
        due(None)


def test_errors_become_one_line(capsys):
    assert said(capsys, lambda: {}["x"]) == "[x] 99.1 wrong: KeyError: 'x'\n"
    assert said(capsys, lambda: int("a\nb")).count("\n") == 1
    assert said(capsys, lambda: exec("raise SystemExit(1)")) == "[x] 99.1 wrong: SystemExit: 1\n"
    rank_error = RuntimeError("rank 2: AssertionError: the sum is 3, expected 6")
    assert (
        said(capsys, lambda: raised(rank_error))
        == "[x] 99.1 wrong: on rank 2: the sum is 3, expected 6\n"
    )


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/"
RANK_ERRORS = {
    "an index": (
        RankError("rank 2: IndexError: list index out of range", 2),
        "on rank 2: IndexError: list index out of range",
    ),
    "without words": (RankError("rank 2: ValueError: ", 2), "on rank 2: ValueError"),
    "a time-out": (
        RankError(
            f"rank 0: RuntimeError: {GLOO}unbound_buffer.cc:78] Timed out waiting 5000ms for recv "
            "operation to complete: rank 0 waits in recv of float32 [3] from rank 1"
        ),
        "on rank 0: it waited for a message that nobody sent: "
        "rank 0 waits in recv of float32 [3] from rank 1",
    ),
    "a broken connection": (
        RankError(f"rank 0: RuntimeError: {GLOO}pair.cc:534] Connection closed by peer [::1]:4"),
        "on rank 0: another rank ended while this one waited for it",
    ),
    "a backward without return": (
        RankError(
            "rank 0: RuntimeError: function GatherBackward returned an incorrect number of "
            "gradients (expected 2, got 1)"
        ),
        "on rank 0: backward gives 1 where 2 are expected, one for each argument of forward but "
        "`ctx`: is there a `return`, and a None for what has no gradient?",
    ),
    "a tensor without a graph": (
        RankError(
            "rank 3: RuntimeError: element 0 of tensors does not require grad and does not have a "
            "grad_fn"
        ),
        "on rank 3: backward was started from a tensor that has no graph: was it detached, or "
        "computed without autograd?",
    ),
    "None is sent": (
        RankError(
            "rank 0: TypeError: Invalid function argument. Expected parameter `tensor` of type "
            "torch.Tensor\n             but got <class 'NoneType'> instead."
        ),
        "on rank 0: torch.distributed was given what is no tensor: if it is the .grad of an x, was "
        "requires_grad_ called on this very x, and does another rank wait for it?",
    ),
    "two sizes": (
        RankError("rank 0 called all_reduce of float32 [1], rank 1 of float32 [2]: all ranks ..."),
        "rank 0 called all_reduce of float32 [1], rank 1 of float32 [2]: all ranks ...",
    ),
}


@pytest.mark.parametrize("case", RANK_ERRORS)
def test_errors_of_ranks_are_plain_lines(capsys, case):
    error, text = RANK_ERRORS[case]
    assert said(capsys, lambda: raised(error)) == f"[x] 99.1 wrong: {text}\n"


def test_the_line_of_a_rank_is_named(capsys, monkeypatch):
    file = "/tmp/ipykernel_12/35.py"
    lines = ["def half(chunks):\n", "    return chunks[4]\n"]
    monkeypatch.setitem(linecache.cache, file, (60, None, lines, file))
    error = RankError("rank 2: IndexError: list index out of range", 2)
    error.add_note(f'Traceback of rank 2:\n  File "{file}", line 2, in half')
    assert said(capsys, lambda: raised(error)) == (
        "[x] 99.1 wrong: on rank 2: IndexError: list index out of range "
        "(line 2 of your cell, in half: `return chunks[4]`)\n"
    )


def test_an_assertion_of_the_learners_without_text_has_its_line(capsys, monkeypatch):
    file = "/tmp/ipykernel_12/37.py"
    monkeypatch.setitem(linecache.cache, file, (60, None, ["assert m >= p\n"], file))
    error = RankError("rank 0: AssertionError: ", 0)
    error.add_note(f'Traceback of rank 0:\n  File "{file}", line 1, in order')
    assert said(capsys, lambda: raised(error)) == (
        "[x] 99.1 wrong: on rank 0: an assertion of yours does not hold "
        "(line 1 of your cell, in order: `assert m >= p`)\n"
    )


CELL = """\
def answer(rank):
    assert rank < 0, "still too long"
    return rank.size
"""
ON_SIMULATED = {
    CELL: 'an assertion of yours does not hold, "still too long" (line 2 of your cell, in answer: '
    '`assert rank < 0, "still too long"`)',
    CELL.replace(
        "assert", "not"
    ): "AttributeError: 'int' object has no attribute 'size' (line 3 of "
    "your cell, in answer: `return rank.size`)",
}


CALLS = """\
def answer(rank):
    return call("not so")
"""


def test_what_a_called_function_asserts_is_no_assertion_of_the_learners(capsys, monkeypatch):
    file = "/tmp/ipykernel_12/39.py"
    monkeypatch.setitem(linecache.cache, file, (60, None, CALLS.splitlines(True), file))
    names = {"__name__": "__main__", "call": fail}
    exec(compile(CALLS, file, "exec"), names)
    text = said(capsys, lambda: expect.run(names["answer"]))
    assert text == "[x] 99.1 wrong: on rank 0: not so\n"
    ours = expect.own_answers(due)
    names["call"] = due
    text = said(capsys, lambda: expect.run(names["answer"], ours=ours))
    assert text == (
        "[x] 99.1 wrong: answer.due is labcode's own answer to this exercise: write yours\n"
    )


@pytest.mark.parametrize("cell", ON_SIMULATED)
def test_an_error_on_a_simulated_rank_has_the_learners_line(capsys, monkeypatch, cell):
    file = "/tmp/ipykernel_12/38.py"
    monkeypatch.setitem(linecache.cache, file, (len(cell), None, cell.splitlines(True), file))
    names = {"__name__": "__main__"}
    exec(compile(cell, file, "exec"), names)
    text = said(capsys, lambda: expect.run(names["answer"]))
    assert text == f"[x] 99.1 wrong: on rank 0: {ON_SIMULATED[cell]}\n"


def test_a_long_line_of_the_learners_is_not_quoted_whole(capsys, monkeypatch):
    file = "/tmp/ipykernel_12/36.py"
    lines = ["def half(chunks):\n", f"    return chunks[{' + '.join('1' * 40)}]\n"]
    monkeypatch.setitem(linecache.cache, file, (60, None, lines, file))
    error = RankError("rank 2: IndexError: list index out of range", 2)
    error.add_note(f'Traceback of rank 2:\n  File "{file}", line 2, in half')
    assert said(capsys, lambda: raised(error)).endswith(
        "(line 2 of your cell, in half: `return chunks[1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + ...`)\n"
    )


def test_a_long_text_keeps_its_end(capsys):
    """There stands what to do."""
    advice = "does each loop come to its end?"
    text = said(capsys, lambda: fail(f"on rank 0: {'one word more ' * 100}{advice}"))
    assert text.startswith("[x] 99.1 wrong: on rank 0: one word more")
    assert " ... " in text
    assert text.endswith(f"{'one word more ' * 10}{advice}\n")
    assert len(text) < 560


def test_the_output_has_no_addresses(capsys):
    assert "0x" not in said(capsys, lambda: fail(f"got {object()}"))


def test_the_learners_own_line_is_named(capsys):
    code = compile("def ring(x):\n    y = 1\n    return y / x\n", "/tmp/ipykernel_12/34.py", "exec")
    names = {}
    exec(code, names)
    assert said(capsys, lambda: names["ring"](0)) == (
        "[x] 99.1 wrong: ZeroDivisionError: division by zero (line 3 of your cell, in ring)\n"
    )


def test_an_interrupt_is_not_swallowed():
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check("99.1", interrupted)


def test_a_call_without_what_is_judged_shows_the_call_of_the_check_cell(capsys, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2] / "notebooks")
    check("0.1")
    check("0.1", stub, 2, 3)
    check("7.3", None, stub)
    check()
    check(stub)
    check("99.1")  # no notebook has it
    assert capsys.readouterr().out.splitlines() == [
        '`check` was given no value besides the number 0.1; its cell has `check("0.1", share)`',
        '`check` was given 3 values besides the number 0.1; its cell has `check("0.1", share)`',
        "`check` was given 2 values besides the number 7.3; its cell has "
        '`check("7.3", pair, patient_1, patient_2)`',
        'the number of the exercise comes first, in quotes, as in `check("0.1", share)`',
        'the number of the exercise comes first, in quotes, as in `check("0.1", share)`',
        '`check` was given no value besides the number 99.1; its cell has `check("99.1", answer)`',
    ]


MISCALLED = {
    "ranks first": (
        "4.1",
        ("ranks", "average_gradients"),
        "the function comes first, and then the ranks; its cell has "
        '`check("4.1", average_gradients, ranks)`',
    ),
    "the function of another exercise": (
        "4.2",
        ("average_gradients", "ranks"),
        "`average_gradients` belongs to exercise 4.1; the cell of 4.2 has "
        '`check("4.2", average_uneven, ranks)`',
    ),
    "two functions in the wrong order": (
        "7.3",
        (None, "patient_2", "patient_1"),
        "`patient_2` stands in another place; the cell has "
        '`check("7.3", pair, patient_1, patient_2)`',
    ),
    "what a call has returned": (
        "4.1",
        (None,),
        "`check` was given None and no function: give the function itself, without ()",
    ),
}


@pytest.mark.parametrize("case", MISCALLED)
def test_a_wrong_call_of_check_is_no_wrong_answer(capsys, monkeypatch, case):
    monkeypatch.setattr("course.check._unsolved", ["99.2"])
    exercise, values, said = MISCALLED[case]
    answers = []
    for value in values:
        answer = value
        if value == "ranks":
            answer = object.__new__(Ranks)  # only its type is looked at
        elif value is not None:
            answer = types.FunctionType(stub.__code__, {}, value)
        answers.append(answer)
    check(exercise, *answers)
    assert capsys.readouterr().out == f"{said}\n"
    assert sys.modules[check.__module__]._unsolved == ["99.2"]


def test_a_function_may_have_another_name_in_the_notebook(capsys):
    """`average_uneven = average_gradients` is no slip."""
    names = {}
    function = types.FunctionType(stub.__code__, names, "average_gradients")
    names["average_uneven"] = function
    check("4.2", function)
    assert capsys.readouterr().out == "[ ] 4.2 not done yet\n"


def test_every_exercise_refuses_a_call_with_too_few_or_too_many_values(capsys):
    folder = Path(__file__).parents[2] / "notebooks"
    names = [name for lesson in catalog.lessons(folder) for name in lesson.exercises]
    for name in names:
        call = catalog.check_calls(name.partition(".")[0], folder)[name]
        for answers in ((), (stub,) * 9):
            check(name, *answers)
            (line,) = capsys.readouterr().out.splitlines()
            assert line.endswith(f"its cell has `{call}`"), line


# ---- hint


def test_hints_come_one_by_one(capsys, notebook, monkeypatch):
    for _ in range(4):
        hint("99.2")
    hint("99.2", 1)
    first = "hint 1 of 2 for 99.2: count `both` directions"
    end = (
        'no further hint for 99.2: that was the last of 2; `hint("99.2", 1)` shows the first again'
    )
    assert [plain for _, plain in notebook] == [
        first,
        "hint 2 of 2 for 99.2: and the way back",
        end,
        end,
        first,
    ]
    assert "<code>both</code>" in notebook[0][0]
    monkeypatch.setattr(show, "in_notebook", lambda: False)
    hint("99.2", 1)
    assert capsys.readouterr().out == f"{first}\n"


def test_after_the_last_hint_stands_where_the_solution_is(capsys, monkeypatch):
    folder = Path(__file__).parents[2] / "notebooks"
    monkeypatch.chdir(folder)
    hint("1.1", 99)
    said = capsys.readouterr().out
    assert "no further hint for 1.1" in said
    assert said.endswith("in solutions/01_processes_and_collectives.ipynb, section 4\n")


def test_in_a_notebook_the_place_of_the_solution_is_a_link(notebook, monkeypatch):
    folder = Path(__file__).parents[2] / "notebooks"
    monkeypatch.chdir(folder)
    hint("1.1", 99)
    ((rich, plain),) = notebook
    found = catalog.solution_of("1.1", folder)
    assert plain.endswith(f"and the solution is in {found.place}")
    assert rich.endswith(f'<a href="{found.address}">{found.place}</a></div>')


def test_a_hint_that_does_not_exist(capsys):
    hint("99.1")
    hint("99.4")
    hint("77.7")
    none, unknown, no_lesson = capsys.readouterr().out.splitlines()
    assert none == "there are no hints for exercise 99.1: what `check` says is all there is"
    assert unknown == "unknown exercise '99.4': there are 99.2, 99.3"
    assert no_lesson == "unknown exercise '77.7': there are none"


def test_the_number_of_an_exercise_may_be_a_number(capsys):
    hint(99.1)
    assert capsys.readouterr().out.startswith("there are no hints for exercise 99.1")


def test_without_a_number_the_hint_is_for_what_was_checked_last(capsys, monkeypatch):
    monkeypatch.setattr(sys.modules[hint.__module__], "_shown", Counter())
    check("99.2", lambda: fail("no"))
    hint()
    assert capsys.readouterr().out.splitlines()[-1].startswith("hint 1 of 2 for 99.2: ")
    check("99.2", lambda: None)
    hint()
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == 'a hint for which exercise? Give its number, as in hint("1.2")'


# ---- compare

RIGHT = {
    "a count": (4, 4, {"within": 1}, "predicted 4 measured 4 right"),
    "a wrong count": (4, 5, {"within": 1}, "predicted 4 measured 5 wrong, it is 5"),
    "rounding": (0.1 + 0.2, 0.3, {"within": 1}, "predicted 0.3 measured 0.3 right"),
    "nearly": (
        0.33333,
        1 / 3,
        {"within": 1},
        "predicted 0.3333 measured 0.3333 wrong, it is 0.333333333333",
    ),
    "a byte too many": (
        25_165_824,
        25_165_825,
        {"within": 1, "unit": "B"},
        "predicted 25.2 MB measured 25.2 MB wrong, it is 25,165,825 B",
    ),
    "a word": ("inf", "nan", {}, 'predicted inf measured nan wrong, it is "nan"'),
    "a word in another case": ("Same", "the same", {}, "predicted Same measured the same right"),
    "a word for a number": ("ten", 10, {}, "predicted ten give a number, not text"),
    "text for a truth value": ("False", False, {}, "predicted False give True or False, not text"),
    "a number for a truth value": (1, True, {}, "predicted 1 give True or False, not a number"),
    "a fraction as text": (
        "7/3",
        7 / 3,
        {"within": 1.001},
        "predicted 7/3 give a number, not text",
    ),
    "none of the options": (
        "perhaps",
        "yes",
        {"options": ("yes", "no")},
        "predicted perhaps choose one of: yes, no",
    ),
    "one of the options": ("NO", "no", {"options": ("yes", "no")}, "right"),
    "a list of a number": ([1], 40.5, {}, "predicted [1] give a number, not a list"),
    "text for a list": (
        "24, 26",
        [24, 26],
        {"within": 1},
        "predicted 24, 26 give a list, not text",
    ),
    "a number for a list": (24, [24, 26], {}, "predicted 24 give a list, not one number"),
    "a word for a word": ("max", "max", {}, "predicted max measured max right"),
    "a word with capitals and blanks": (
        "Dp4",
        "dp 4",
        {},
        "predicted Dp4 measured dp 4 right",
    ),
    "a truth": (True, True, {"within": 2}, "predicted True measured True right"),
    "a truth for a number": (
        True,
        1,
        {"within": 1},
        "predicted True give a number, not True or False",
    ),
    "a list for a tuple": ([0, 2], (0, 2), {}, "predicted [0, 2] measured (0, 2) right"),
    "a shape": ((4, 2), torch.zeros(4, 3).shape, {}, "wrong, it is torch.Size([4, 3])"),
    "a tensor": (0.5, torch.tensor(0.5), {"within": 1}, "predicted 0.5 measured 0.5 right"),
    "many numbers": ([1, 2], torch.tensor([1, 2]), {}, "predicted [1, 2] measured [1, 2] right"),
    "close": (
        0.020,
        0.026,
        {"within": 1.5, "unit": "s"},
        "predicted 20 ms measured 26 ms within a factor of 1.5",
    ),
    "too long": (
        0.020,
        0.042,
        {"unit": "s"},
        "predicted 20 ms measured 42 ms NOT within a factor of 1.25: 2.1 × the prediction",
    ),
    "too few": (
        3_000_000,
        6_000_000,
        {"unit": "B"},
        "predicted 3 MB measured 6 MB NOT within a factor of 1.25: 2 × the prediction",
    ),
    "half": (2, 1, {}, "NOT within a factor of 1.25: 0.5 × the prediction"),
    "the other sign": (-1.0, 1.0, {"within": 2}, "NOT within a factor of 2: it is 1"),
    "from nothing": (0, 1, {}, "NOT within a factor of 1.25: it is 1"),
    "nothing at all": (0, 0, {}, "predicted 0 measured 0 within a factor of 1.25"),
    "huge": (10**400, 5, {"unit": "B"}, "NOT within a factor of 1.25: it is 5 B"),
    "no number": (float("nan"), 5, {}, "NOT within a factor of 1.25: it is 5"),
}


@pytest.mark.parametrize("case", RIGHT)
def test_compare_speaks_plainly(capsys, case):
    predicted, measured, options, expected = RIGHT[case]
    compare("it", predicted, measured, **options)
    line = " ".join(capsys.readouterr().out.split())
    assert line.endswith(expected)
    assert line.startswith("it predicted ")


def test_compare_is_aligned_and_narrow(capsys):
    compare("relative error of dX", 0.71, 0.7071)
    compare("one step", 0.010, 0.0219, unit="s")
    compare("bytes", 3_000_000, 6_000_000, unit="B")
    lines = capsys.readouterr().out.splitlines()
    columns = {(line.index("predicted"), line.index("measured")) for line in lines}
    assert len(columns) == 1
    assert max(map(len, lines)) <= 127  # what a cell shows beside the file list


def test_compare_in_colour(notebook):
    compare("a < b", 4, 5, within=1)
    compare("a < b", 4, 4)
    wrong, right = (rich for rich, _ in notebook)
    assert "a &lt; b" in wrong and "✗ wrong, it is 5</span>" in wrong
    assert "✓ within a factor of 1.25</span>" in right
    assert notebook[0][1].endswith("wrong, it is 5")


def test_a_measurement_that_is_off_is_amber_and_a_count_is_red(notebook):
    compare("speed", 4, 8, within=1.5)
    compare("bytes", 4, 8, within=1.5, found="counted")
    (measured, _), (counted, _) = notebook
    assert show.OFF.html("NOT within a factor of 1.5: 2 × the prediction") in measured
    assert show.WRONG.html("NOT within a factor of 1.5: 2 × the prediction") in counted


def test_without_a_prediction_what_was_found_is_folded_away(notebook):
    for nothing in (..., None):
        compare("a < b", nothing, 4321, found="counted")
    for rich, plain in notebook:
        summary, folded = rich.split("</summary>")
        assert plain == f"{'a < b':<30} no prediction yet"
        assert "no prediction yet" in summary and "4321" not in summary.replace(",", "")
        assert "counted       4,321" in folded


def test_what_was_found_is_folded_away_where_a_number_was_asked_for(notebook):
    compare("bytes", "7/3", 4321, found="counted")
    ((rich, _),) = notebook
    summary, folded = rich.split("</summary>")
    assert "give a number, not text" in summary and "counted       4,321" in folded


def test_a_factor_below_one_is_a_mistake_of_the_lesson():
    with pytest.raises(ValueError, match=r"within=0.25 is no factor"):
        compare("it", 1, 1, within=0.25)
    with pytest.raises(ValueError, match="it: 'yes' is none of the options no, maybe"):
        compare("it", "no", "yes", options=("no", "maybe"))


def test_compare_says_how_the_value_was_found(capsys):
    compare("ticks", 7, 7, within=1, found="simulated")
    compare("speed", 5e9, 5e9, unit="B/s", found="published")
    said = capsys.readouterr().out
    assert "predicted           7  simulated           7  right" in said
    assert "predicted      5 GB/s  published      5 GB/s  within" in said
    with pytest.raises(ValueError, match=r"^found='seen' is not known: choose measured, counted"):
        compare("ticks", 7, 7, found="seen")


# ---- show_source


def twice(x):
    """Twice x."""
    return 2 * x  # not x * x


class Box:
    def open(self):
        """Open <it>."""
        return self

    @property
    def size(self):
        return 3


def test_show_source(notebook):
    show_source(twice)
    show_source(Box.open)
    show_source(Box.size)
    rich, plain = notebook[0]
    assert plain.splitlines()[1:] == [
        "def twice(x):",
        '    """Twice x."""',
        "    return 2 * x  # not x * x",
    ]
    assert "<pre" in rich and "style=" in rich and "class=" not in rich.replace('class="high', "")
    assert notebook[1][1].splitlines()[1] == "def open(self):"
    assert "&lt;it&gt;" in notebook[1][0]
    assert notebook[2][1].splitlines()[1] == "@property"


def test_below_an_open_exercise_a_source_is_folded(notebook):
    check("99.1", ...)
    show_source(twice)
    check("99.1", lambda: None)
    show_source(twice)
    _, (folded, _), _, (shown, _) = notebook
    assert folded.startswith("<details><summary") and "99.1 is not done yet" in folded
    assert "<details>" not in shown and shown in folded


def test_show_source_names_the_file_from_its_package_on(capsys):
    show_source(due)
    assert capsys.readouterr().out.startswith("# course/answer.py\ndef due(")


@pytest.mark.parametrize("obj", [len, 3, functools.partial(twice, 1)])
def test_what_has_no_source_is_one_line(obj):
    with pytest.raises(TypeError, match=r"there is no Python source; pass a function"):
        show_source(obj)
