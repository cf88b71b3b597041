"""A contract finds what an answer does otherwise than the solution, and says so in words."""

import pytest

from course.answer import Hint
from course.exercises import solution
from course.exercises.contract import Case, Contract, Mistake, alike, differs, not_things
from course.exercises.solution import Solution

SOURCE = '''# %% [markdown]
# # A lesson

# %%
import math

UNUSED = 1

# %%
FACTOR = 2


def twice(number):
    return FACTOR * number


# %%
import nowhere

# %% tags=["exercise"]
def area_and_edge(number):
    """Of a circle."""
    ### BEGIN SOLUTION
    if number < 0:
        raise ValueError("it is negative")
    return math.pi * number**2, twice(math.pi) * number
    ### END SOLUTION
'''


@pytest.fixture(autouse=True)
def lesson(tmp_path, monkeypatch):
    """A course of one lesson."""
    (tmp_path / "solutions").mkdir()
    (tmp_path / "solutions" / "77_circles.py").write_text(SOURCE)
    monkeypatch.setattr(solution, "ROOT", tmp_path)
    monkeypatch.setattr(solution, "PACKED", tmp_path / "solutions.packed")
    yield tmp_path
    for cached in (solution.cells_of, solution.cell_that_defines, solution._definitions):
        cached.cache_clear()


def circle(**options):
    given = {
        "cases": {"one: ": (1.0,), "three: ": (3.0,), "minus one: ": (-1.0,)},
        "shape": [Mistake("{found}: two numbers", when=not_things(2))],
        "mistakes": [
            Mistake("the edge is {found[1]:.1f}", "twice(math.pi) => math.pi", when=differs(1)),
            Mistake("radius {number}: pi twice", "math.pi * => math.pi**2 *"),
        ],
        "otherwise": "it gives {found[0]:.1f}, expected is {truth[0]:.1f}",
        "refuses": "no circle has it",
    }
    return Contract(Solution("77", "area_and_edge"), **(given | options))


def said(answer, **options):
    with pytest.raises(Hint) as caught:
        circle(**options)(answer)
    return str(caught.value)


def changed(*changes):
    return Solution("77", "area_and_edge").changed(*changes)


def test_the_solution_passes_and_so_does_what_gives_the_same():
    circle()(changed())

    def other(radius):
        if radius < 0:
            raise ValueError("less than nothing")
        return [3.141592653589793 * radius * radius, 6.283185307179586 * radius]

    circle()(other)


@pytest.mark.parametrize(
    ("change", "hint"),
    {
        "twice(math.pi) => math.pi": "one: the edge is 3.1",
        "math.pi * => math.pi**2 *": "one: radius 1.0: pi twice",
        "number**2, => number**3,": "three: it gives 84.8, expected is 28.3",
        "**2, twice(math.pi) * number => **2": "one: 3.141592653589793: two numbers",
        "if number < 0 => if False": "minus one: your function gives (3.141592653589793, "
        "-6.283185307179586); no circle has it, so it should raise a ValueError",
        "raise ValueError => raise KeyError": "minus one: your function raises KeyError: raise a "
        "ValueError",
        '"it is negative" => ': "minus one: the ValueError has no text: say in it "
        "what does not fit",
        "return math.pi => math.pi": "it returned None: is there a `return`?",
    }.items(),
)
def test_a_mistake_is_told_its_hint(change, hint):
    assert said(changed(change)) == hint


def test_an_example_that_is_no_change_of_the_solution_is_refused():
    with pytest.raises(AssertionError, match="nothing of 'tau => pi'"):
        changed("tau => pi")


def test_without_a_text_for_other_results_the_signs_alone_decide():
    cubed = changed("number**2, => number**3,")
    assert said(cubed)
    assert circle(otherwise="", mistakes=[])(cubed) is None


def test_a_case_has_a_hint_of_its_own_and_its_examples_come_first():
    cases = {
        "one: ": Case((1.0,), "of one"),
        "three: ": Case((3.0,), "of three: {found[0]:.1f}", "number**2, => number**2 + 1,"),
    }
    everywhere = [Mistake("one too many", "number**2, => number**2 + 1,")]
    assert (
        said(changed("pi * number**2, => pi * number**3,"), cases=cases) == "three: of three: 84.8"
    )
    assert said(changed("number**2, => number**2 + 1,"), cases=cases, mistakes=everywhere) == (
        "one: one too many"
    )
    only_three = {"three: ": cases["three: "]}
    assert said(changed("number**2, => number**2 + 1,"), cases=only_three, mistakes=everywhere) == (
        "three: of three: 29.3"
    )
    assert len(circle(cases=cases).rows) == 5


def test_a_solution_that_fails_is_no_answer_of_the_learner():
    with pytest.raises(ValueError, match="it is negative"):
        circle(refuses="")(changed())


def test_an_answer_may_not_call_what_is_ready():
    def ready(number):
        return changed()(number)

    assert "test_contract." in said(lambda number: ready(number), ready=(ready,))


def test_an_error_of_the_answer_itself_is_not_swallowed():
    with pytest.raises(ZeroDivisionError):
        circle()(lambda number: 1 / 0)
    with pytest.raises(NotImplementedError):
        circle(cases={"minus one: ": (-1.0,)})(
            changed(
                "raise ValueError => raise NotImplementedError", '"it is negative" => "exercise"'
            )
        )


def test_a_solution_is_found_where_only_the_packed_one_is(lesson):
    solution.PACKED.write_bytes(solution.packed(lesson))
    (lesson / "solutions" / "77_circles.py").unlink()
    assert circle()(changed()) is None
    assert "three: it gives 84.8" in said(changed("number**2, => number**3,"))


def test_without_any_solution_the_check_says_what_it_needs(lesson):
    (lesson / "solutions" / "77_circles.py").unlink()
    with pytest.raises(FileNotFoundError, match="the checks of lesson 77 run its solution"):
        circle()(abs)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (1, 1.0 + 1e-12, True),
        (1.0, 1.1, False),
        ([1, 2], (1, 2), True),
        ([1], (1, 2), False),
        ({"a": 1.0}, {"a": 1.0}, True),
        ({"a": 1.0}, {"b": 1.0}, False),
        (None, 1.0, False),
        ("dp", "tp", False),
        (ValueError("one"), ValueError("other"), True),
        (1.0, ValueError("other"), False),
    ],
)
def test_results_are_alike_up_to_rounding(one, other, same):
    assert alike(one, other) is same
