"""The search of the book, run in a browser on its index alone: what stands first."""

import json
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools import book, book_search  # noqa: E402  (tools/ is not installed)

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next((path for path in map(shutil.which, BROWSERS) if path), None)
SPHINX = "const Search = { setIndex(index) { this._index = index; } };"

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no browser is installed")


@pytest.fixture(scope="module")
def search():
    """search(query): {kind: [(title, href, excerpt)]} as the page lists them."""
    from playwright.sync_api import sync_playwright

    script = book_search.script(ROOT, book.sections(book.course()))
    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu"]
        browser = playwright.chromium.launch(executable_path=BROWSER, args=flags)
        page = browser.new_page()
        page.add_script_tag(content=f"{SPHINX}\n{script}")

        def found(query):
            answer = page.evaluate(
                """query => Object.entries(findSections(Search._index, query)).map(
                    ([kind, entries]) => [kind, entries.map(
                        ([, title, href, text]) => [title, href, excerptOf(text, query)])])""",
                query,
            )
            return dict(answer)

        yield found
        browser.close()


@pytest.mark.parametrize(
    ("query", "lesson"),
    [
        ("bubble", "12"),
        ("Bubble", "12"),
        ("out of memory", "16"),
        ("ring attention", "11"),
        ("gradient accumulation", "04"),
        ("rendezvous", "01"),
        ("roofline", "03"),
        ("delayed scaling", "18"),
    ],
)
def test_the_lesson_that_explains_it_stands_first(search, query, lesson):
    found = search(query)
    assert list(found) == ["Lessons", "Guide", "Library"]
    title, _, excerpt = found["Lessons"][0]
    assert title.startswith(f"{lesson} "), found["Lessons"][:3]
    assert any(word in excerpt.lower() for word in query.lower().split()) and len(excerpt) < 260


def test_results_are_sections_and_answers_are_not_among_them(search):
    titles = [title for title, _, _ in search("bubble")["Lessons"]]
    assert titles[0].startswith("12 Pipeline parallel › 2. Micro-batches")
    assert not [title for title in titles if "Recap" in title or "Questions" in title]
    assert search("bubble")["Guide"][0][0] == "Glossary › bubble"
    assert search("no-such-word-anywhere") == {"Lessons": [], "Guide": [], "Library": []}
    assert search("ring_all_reduce")["Library"][0][1].startswith("api/labcode.")


def test_markdown_becomes_the_words_that_are_read():
    text = (
        "## A `b`\n\n**c** [d](e.md) ![f](g.png)\n\n```\nh\n```\n"
        "| i | j |\n|---|---:|\n<b>k</b> $x$ is $\\frac{1}{2}$ and"
    )
    assert book_search.plain(text) == "A b c d i j k x is … and"


def test_what_is_folded_is_not_in_the_index():
    script = book_search.script(ROOT, [book_search.Entry(0, "t", "h", "x", ("y",))])
    index = json.loads(script.rpartition("Search.setIndex(")[2].removesuffix(");\n"))
    assert index == {"kinds": list(book_search.KINDS), "entries": [[0, "t", "h", "x", ["y"]]]}
    for entry in book.sections(book.course()):
        assert "<summary>" not in entry.text
