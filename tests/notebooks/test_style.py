"""What every lesson has: figures with words, fixed parts, predictions, checks, nothing personal.

There are no budgets of cells, lines or words: people keep to them by packing.
"""

import base64
import html
import re
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.notebook_run import text_of  # noqa: E402  (tools/ is not installed)

SOURCES = sorted((ROOT / "solutions").glob("[0-9][0-9]*_*.py"))

FIGURE_BYTES = 120_000  # for screens of two dots a pixel; lesson 00 has a box for each exercise
IMAGE = re.compile(
    r'<img alt="([^"]*)" width="\d+" style="[^"]*" src="data:image/png;base64,([^"]+)"'
)


@pytest.fixture(scope="module", params=SOURCES, ids=lambda path: path.stem)
def lesson(request):
    return nbformat.read(request.param.with_suffix(".ipynb"), as_version=4)


def cells_of(lesson, kind, tag=None):
    return [
        c
        for c in lesson.cells
        if c.cell_type == kind and (tag is None or tag in c.metadata.get("tags", []))
    ]


def prose_of(lesson):
    return "\n\n".join(cell.source for cell in cells_of(lesson, "markdown"))


def start(cell):
    return cell.source.strip().splitlines()[0][:60] if cell.source.strip() else "(empty)"


def test_figures(lesson):
    found = []
    for cell in cells_of(lesson, "code"):
        for output in cell.outputs:
            data = output.get("data", {})
            images = IMAGE.findall(data.get("text/html", ""))
            found += images
            # Beside the HTML lies the plain PNG, for what strips HTML. JupyterLab shows a PNG
            # without alternative text, so there is none without the HTML that has it.
            assert not {"image/jpeg", "image/svg+xml"} & set(data), start(cell)
            if "image/png" in data:
                about = output.metadata["image/png"]
                assert [(about["alt"], data["image/png"])] == [
                    (html.unescape(alt), png) for alt, png in images
                ], f"a figure without alt text: {start(cell)}"
            else:
                assert images == [], f"a figure without a plain PNG: {start(cell)}"
    assert found
    assert [alt for alt, _ in found if len(alt.split()) < 4] == []
    assert len({alt for alt, _ in found}) == len(found)
    assert [alt for alt, png in found if len(base64.b64decode(png)) > FIGURE_BYTES] == []


def test_fixed_parts(lesson):
    number = lesson.metadata.lesson.source.partition("_")[0]
    assert re.search(rf"(?m)^# (Lesson )?{number}\b", lesson.cells[0].source)
    for line in (lesson.cells[0].source.splitlines()[0], prose_of(lesson).splitlines()[-1]):
        assert "[Map of the course](../COURSE.md)" in line
        assert f"(../notebooks/{lesson.metadata.lesson.source[:-3]}.ipynb)" in line
    first_code = cells_of(lesson, "code")[0].source
    assert first_code.startswith("import labcode  # not found?"), "another kernel says what to do"
    prose = prose_of(lesson)
    sections = dict(re.findall(r"(?ms)^## +([^\n]+)\n(.*?)(?=^## |\Z)", prose))
    assert {"Goals", "Recap", "Sources"} <= set(sections)
    assert re.search(r"(?m)^\|.*\|\n\|[ :|-]+\|\n\|.*\|", sections["Recap"]), (
        "the recap holds a table"
    )
    assert re.search(r"(?m)^[-*\d]", sections["Sources"]), "the sources are a list"
    assert "](https://" in sections["Sources"]
    assert not re.search(r"(?<!\[)arXiv:\d", prose), "a paper that cannot be clicked"
    assert len(re.findall(r"\*\*Takeaway", prose)) >= 3
    assert re.search(r"\bminutes\b|\bmin\b", prose_of(lesson)[:2500]), (
        "the beginning says how long the lesson takes"
    )
    assert "GPU" in prose and "SLURM" in prose, "the lesson says how it goes to GPUs and to SLURM"


def test_predictions_and_exercises(lesson):
    assert cells_of(lesson, "code", "predict")
    assert any("compare(" in cell.source for cell in cells_of(lesson, "code"))
    exercises, checks = cells_of(lesson, "code", "exercise"), cells_of(lesson, "code", "check")
    assert len(exercises) >= 2 and len(checks) >= 2
    order = [
        tag
        for cell in lesson.cells
        if cell.cell_type == "code"
        for tag in cell.metadata.get("tags", [])
    ]
    order = [tag for tag in order if tag in ("exercise", "check")]
    assert order[-1] == "check" and not any(
        pair == ("check", "check") for pair in zip([None, *order], order)
    )


def test_every_check_passes_in_the_solution(lesson):
    for cell in cells_of(lesson, "code"):
        calls = len(re.findall(r"\bcheck\(\s*[\"']", cell.source))
        text = text_of(cell.outputs)
        assert text.count("[v] ") == calls and "[x] " not in text and "[ ] " not in text, start(
            cell
        )
        assert bool(calls) == ("check" in cell.metadata.get("tags", [])), (
            f"tag check and call check() go together: {start(cell)}"
        )


def test_no_shell_and_no_installs(lesson):
    """The failure of a shell line passes every notebook test, so there is none."""
    banned = re.compile(
        r"(?m)^\s*(!|%%?(bash|sh|system|sx|pip|conda|cd)\b)"
        r"|os\.system|subprocess|torchrun +-|shell=True"
    )
    assert [start(cell) for cell in cells_of(lesson, "code") if banned.search(cell.source)] == []


def test_nothing_personal_is_stored(lesson):
    text = "".join(str(cell.get("outputs", "")) for cell in lesson.cells)
    assert [part for part in (str(ROOT), sys.prefix, str(Path.home()) + "/") if part in text] == []
