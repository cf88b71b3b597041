"""The page that maps other frameworks' switches: its lessons, sections and options exist."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from labcode import recipes  # noqa: E402
from labcode.runtime import command  # noqa: E402
from tools import course_map  # noqa: E402  (tools/ is not installed)

PAGE = (ROOT / "book" / "guide" / "your_framework.md").read_text(encoding="utf-8")
LESSONS = {lesson.number: lesson for lesson in course_map.lessons()}
ROWS = [line.strip("|").split(" | ") for line in PAGE.splitlines() if line.startswith("| ")]
ROWS = [row for row in ROWS if not row[2].startswith("sections")]
SECTIONS = re.compile(r"\[(\w+) §([\d, ]+)\]\(([^)]+)\)")
OPTION = re.compile(r"`(--(\w+)\.(\w+)(?: (\w+))?)`")


def test_each_row_names_a_lesson_and_sections_that_it_has():
    for theirs, _, lessons in ROWS:
        found = SECTIONS.findall(lessons)
        assert found, theirs
        for number, sections, link in found:
            lesson = LESSONS[number]
            assert link == f"../../{lesson.notebook}"
            known = {str(section.number) for section in lesson.sections}
            assert set(sections.split(", ")) <= known, (theirs, number, sections)


def test_each_option_of_ours_exists_and_takes_the_value_that_is_shown():
    config = recipes.get("gpt_tiny")
    shown = [option for _, ours, _ in ROWS for option in OPTION.findall(ours)]
    assert len({option[0] for option in shown}) > 25
    for option, section, field, value in shown:
        assert hasattr(getattr(config, section), field), option
        if value:
            command.parse(["gpt_tiny", *option.split()])


@pytest.mark.parametrize(
    "field",
    ["dp", "pp", "cp", "tp", "zero_stage", "sequence_parallel", "activation_checkpointing"],
)
def test_each_kind_of_parallelism_is_found(field):
    assert f"`--parallel.{field}" in PAGE
