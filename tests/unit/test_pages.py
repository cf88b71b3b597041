"""The instructor's pages say what lessons and checks say; every schedule can be taught."""

import re
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from course import catalog
from tools import course_map, pages

LESSONS = course_map.lessons()
IN_PASSING = {"10"}  # of which a schedule without it explains one number at the board


def test_no_page_is_stale():
    assert pages.stale(pages.pages()) == [], "run `make pages`"


@pytest.mark.parametrize("schedule", pages.SCHEDULES, ids=lambda schedule: schedule.title)
def test_a_schedule_fits_its_time_and_teaches_what_a_lesson_needs_before_it(schedule):
    known = {lesson.number: lesson for lesson in LESSONS}
    sections = {lesson.number: lesson.sections for lesson in LESSONS}
    taught = set()
    for unit in schedule.units:
        stops = catalog.stops(unit, sections)
        assert sum(stop.minutes for stop in stops) <= schedule.minutes
        for stop in stops:
            assert set(stop.sections) <= {section.number for section in sections[stop.number]}
            assert set(known[stop.number].needs) - IN_PASSING <= taught, stop.number
            taught.add(stop.number)


def test_a_changed_lesson_makes_the_schedules_stale():
    page = (pages.ROOT / pages.PAGE).read_text()
    longer = [lesson._replace(sections=lesson.sections[1:]) for lesson in LESSONS]
    assert pages.with_schedules(page, LESSONS) == page
    assert pages.with_schedules(page, longer) != page
    with pytest.raises(ValueError, match=r"^the page has no lines <!-- sched"):
        pages.with_schedules("# For instructors", LESSONS)


def test_wrong_answers_are_listed_below_their_exercise():
    kept = SimpleNamespace(wrong={"a | b": (None, "the mean\n of *x*"), "c": (None, "hint")})
    lesson = next(lesson for lesson in LESSONS if lesson.number == "04")
    text = pages.wrong_answers({"4.1": kept, "14.1": kept}, [lesson])
    assert "### 4.1 Average the gradients\n\n2 wrong answers are kept." in text
    assert "\n| a \\| b | ... the mean of \\*x\\* ... |\n| c | ... hint ... |\n" in text
    assert "14.1" not in text


def test_questions_are_taken_from_the_notes_of_a_section():
    text = (
        "# %% [markdown]\n# ## 2. Sums\n#\n# Ask: not this?\n\n"
        '# %% [markdown] tags=["solution-only"]\n'
        "# *For the instructor.* 8 minutes. Ask: why f(x)\n# twice? (For g (and h).) Then go on.\n"
        "# Ask: how?\n# Ask the room: who? (Me.)\n"
    )
    assert pages.asked_in(text) == [
        ("2. Sums", ["Why f(x) twice? (For g (and h).)", "How?", "Who? (Me.)"])
    ]


def test_the_page_names_commands_that_exist():
    makefile = (pages.ROOT / "Makefile").read_text()
    page = (pages.ROOT / pages.PAGE).read_text()
    for target in re.findall(r"`make (\w+)`", page):
        assert f"\n{target}: " in makefile
    for module in re.findall(r"`python -m (tools\.\w+)", page):
        assert (pages.ROOT / f"{module.replace('.', '/')}.py").exists()


def test_the_table_of_lessons_has_every_lesson_and_its_minutes():
    page = f"# Course\n{pages.TABLE_BEGINS}\nold\n{pages.TABLE_ENDS}\nafter\n"
    written = pages.with_table(page, LESSONS)
    for lesson in LESSONS:
        row = f"| [{lesson.number} {lesson.title}]({lesson.notebook}) | {lesson.minutes} | "
        assert written.count(row) == 1
    assert "\nold\n" not in written and written.endswith("\nafter\n")


def test_the_citation_has_the_version_of_the_package():
    citation = yaml.safe_load((pages.ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((pages.ROOT / "pyproject.toml").read_text())["project"]
    assert citation["version"] == project["version"]
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert f"## {project['version']}" in (pages.ROOT / "CHANGELOG.md").read_text()


def test_what_the_readme_shows_is_small_enough_for_a_page():
    assert (pages.ROOT / "images" / "lesson.gif").stat().st_size < 1.5e6
