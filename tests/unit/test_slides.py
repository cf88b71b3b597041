"""The slides: five to ten a lesson, from what the lesson says, without the network."""

import re
import shutil
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools import course_map, slides  # noqa: E402  (tools/ is not installed)

LESSONS = course_map.lessons()
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next((path for path in map(shutil.which, BROWSERS) if path), None)


def kinds(notebook):
    return [cell.metadata["slideshow"]["slide_type"] for cell in notebook.cells]


def test_each_lesson_has_five_to_ten_slides_and_ends_with_its_recap():
    for lesson in LESSONS:
        notebook = slides.slides(lesson, nbformat.read(ROOT / lesson.solution, as_version=4))
        shown = [cell for cell in notebook.cells if cell.metadata.slideshow.slide_type == "slide"]
        assert 5 <= len(shown) <= slides.MOST, lesson.stem
        assert shown[-1].source.startswith("## Recap\n\n|"), lesson.stem
        assert f"{lesson.minutes} minutes" in shown[0].source
        assert "notes" in kinds(notebook), lesson.stem


def test_a_section_gives_its_takeaways_its_last_figure_and_its_notes():
    pictures = []
    for name in ("old", "new"):
        png = {"image/png": name}
        about = {"image/png": {"alt": f"the {name} picture"}}
        pictures.append(new_output("display_data", data=png, metadata=about))
    note = new_markdown_cell("*For the instructor.* Wait.", metadata={"tags": ["solution-only"]})
    cells = [
        new_markdown_cell("# 04 · Title\n\n## Goals\n\n- know $x^2$\n\n**Time**: 80 minutes."),
        new_markdown_cell("## 1. First\n\ntext\n\n**Takeaway: the mean\nis exact.** And so on."),
        new_code_cell("plot.x()", outputs=pictures),
        note,
        new_markdown_cell("## 2. Nothing to take away"),
        new_markdown_cell("## Questions\n\n1. Why?\n\n## Recap\n\n| a | b |\n|---|---|"),
    ]
    lesson = next(lesson for lesson in LESSONS if lesson.number == "04")
    notebook = slides.slides(lesson, new_notebook(cells=cells))
    assert kinds(notebook) == ["slide", "slide", "notes", "slide"]
    title, first, notes, recap = [cell.source for cell in notebook.cells]
    assert "- know <math" in title and "**Time**" not in title
    assert "The mean\nis exact." in first and "And so on" not in first
    assert 'alt="the new picture"' in first and "old" not in first
    assert notes == note.source
    assert recap == "## Recap\n\n| a | b |\n|---|---|"


def test_code_with_a_dollar_is_no_formula():
    assert slides.with_mathml("`$HOME` and `$PATH`") == "`$HOME` and `$PATH`"


def test_a_page_asks_for_nothing_that_is_not_beside_it(tmp_path):
    lesson = next(lesson for lesson in LESSONS if lesson.number == "09")
    slides.write([lesson], tmp_path)
    text = (tmp_path / f"{lesson.stem}.html").read_text()
    wanted = re.findall(r"<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=\"([^\"]+)", text)
    files = [name for name in wanted if not name.startswith("data:")]
    assert "reveal/dist/reveal.js" in files
    for name in files:
        assert (tmp_path / name).is_file(), name
    assert not re.search(r"\bimport\b[^;]*\bhttps?:|url\(\s*['\"]?https?:", text)
    assert f'href="{lesson.stem}.html"' in (tmp_path / "index.html").read_text()


def test_an_unknown_lesson_is_told(tmp_path, capsys):
    assert slides.main(["77"], tmp_path) == 2
    assert capsys.readouterr().err.startswith("there is no lesson 77: there are 00, 01,")


@pytest.mark.release
@pytest.mark.skipif(BROWSER is None, reason="no browser is installed")
def test_a_browser_shows_every_slide_whole(tmp_path):
    """No error in the console, and nothing that hangs over the edge of a slide."""
    from playwright.sync_api import sync_playwright

    slides.write(LESSONS, tmp_path)
    problems = []
    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu"]
        browser = playwright.chromium.launch(executable_path=BROWSER, args=flags)
        page = browser.new_page(viewport={"width": 1100, "height": 720})
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        for lesson in LESSONS:
            page.goto((tmp_path / f"{lesson.stem}.html").as_uri())
            page.wait_for_function("window.Reveal && Reveal.isReady()")
            for number in range(page.evaluate("Reveal.getTotalSlides()")):
                page.evaluate(f"Reveal.slide({number})")
                height = page.evaluate("Reveal.getCurrentSlide().scrollHeight")
                if height > 720:
                    problems.append(f"{lesson.stem}, slide {number + 1}: {height} of 720 pixels")
        browser.close()
    assert problems == []
