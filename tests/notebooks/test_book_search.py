"""The search of the book, run in a browser on its index alone: what stands first."""

import functools
import json
import re
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools import book, book_search  # noqa: E402  (tools/ is not installed)

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next((path for path in map(shutil.which, BROWSERS) if path), None)
FOUND = """query => Object.fromEntries(
    Object.entries(findSections(Search._index, query)).map(([kind, entries]) => [
        kind,
        entries.map(
            ([, title, href, text]) => [title, href, excerptOf(Search._index, text, query)])]))"""
SPHINX = "const Search = { setIndex(index) { this._index = index; } };"

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no browser is installed")


@pytest.fixture(scope="module")
def search_in():
    """search_in(entries)(query): {kind: [(title, href, excerpt)]} as the page lists them."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu"]
        browser = playwright.chromium.launch(executable_path=BROWSER, args=flags)

        def searched(entries):
            page = browser.new_page()
            page.add_script_tag(content=f"{SPHINX}\n{book_search.script(ROOT, entries)}")
            return functools.partial(page.evaluate, FOUND)

        yield searched
        browser.close()


@pytest.fixture(scope="module")
def search(search_in):
    """The search of the whole book."""
    return search_in(book.sections(book.course()))


@pytest.mark.parametrize(
    ("query", "sections"),
    [
        ("all-reduce", ("00 § 2.", "01 § 4.")),
        ("bubble", ("12 § 2.",)),
        ("Bubble", ("12 § 2.",)),
        ("FSDP", ("13", "13b", "13b § 7.")),
        ("gradient accumulation", ("04 § 4.",)),
        ("checkpoint", ("14 § 3.", "17 § 2.")),
        ("no_sync", ("05 § 5.",)),
        ("ring attention", ("11", "11 § 3.")),
        ("MFU", ("03 § 2.",)),
        ("loss scaling", ("18 § 2.",)),
        ("srun", ("14 § 1.", "14 § 2.")),
        ("ZeRO", ("13", "13 § 1.")),
        ("out of memory", ("16",)),
        ("rendezvous", ("01 § 1.",)),
        ("roofline", ("03 § 1.",)),
        ("delayed scaling", ("18 § 6.",)),
    ],
)
def test_the_sections_that_explain_it_stand_first(search, query, sections):
    found = search(query)
    assert list(found) == list(book_search.KINDS)
    first = [short(title) for title, _, _ in found["Lessons"][:3]]
    assert set(sections) <= set(first)
    if len(sections) == 1:
        assert first[0] == sections[0]
    _, _, excerpt = found["Lessons"][0]
    assert any(word in excerpt.lower() for word in re.split(r"[ _-]", query.lower())), excerpt
    assert len(excerpt) < 260


def short(title):
    """ "12 Pipeline parallel › 2. Micro-batches: GPipe (core, 19 min)" as "12 § 2."."""
    page, _, heading = title.partition(" › ")
    number = page.partition(" ")[0]
    return f"{number} § {heading.partition(' ')[0]}" if heading else number


@pytest.mark.parametrize(
    ("query", "term"),
    [
        ("all-reduce", "all-reduce"),
        ("allreduce", "all-reduce"),
        ("all reduce", "all-reduce"),
        ("ALL_REDUCE", "all-reduce"),
        ("buckets", "bucket"),
        ("FSDP2", "FSDP"),
        ("model FLOPs utilization", "MFU"),
        ("gradient clipping", "clipping"),
        ("ZeRO", "ZeRO"),
        ("srun", "srun"),
    ],
)
def test_the_term_of_the_glossary_that_is_asked_for_stands_first(search, query, term):
    title, href, excerpt = search(query)["Glossary"][0]
    assert title == term and href.startswith("glossary.html#term-") and excerpt


def test_another_writing_finds_the_same_sections(search):
    assert search("allreduce")["Lessons"][0][:2] == search("all-reduce")["Lessons"][0][:2]
    assert search("tensor-parallel")["Lessons"][0][0] == "09 Tensor parallel"


def test_a_heading_goes_before_mentions_and_a_core_section_before_an_optional_one(search_in):
    """Held on an index of our own, in which nothing else differs."""
    heading, mentions, optional = (
        "1 x › 1. A ruler",
        "1 x › 2. Others",
        "1 x › 3. More (optional, 1 min)",
    )
    entries = [
        book_search.Entry(1, optional, "c", "ruler " * 5),
        book_search.Entry(1, mentions, "b", "ruler " * 5),
        book_search.Entry(1, heading, "a", "something else"),
        book_search.Entry(0, "ruler", "g", "It measures.", ("ruler", "yardstick")),
        book_search.Entry(0, "rail", "h", "As straight as a ruler."),
    ]
    found = search_in(entries)
    titles = [title for title, _, _ in found("ruler")["Lessons"]]
    assert titles == [heading, mentions, optional]
    assert [title for title, _, _ in found("rulers")["Glossary"]] == ["ruler"]
    assert [title for title, _, _ in found("yardstick")["Lessons"]] == titles
    assert found("no-such-word")["Lessons"] == []


def test_results_are_sections_and_answers_are_not_among_them(search):
    titles = [title for title, _, _ in search("bubble")["Lessons"]]
    assert titles[0].startswith("12 Pipeline parallel › 2. Micro-batches")
    assert not [title for title in titles if "Recap" in title or "Questions" in title]
    assert search("bubble")["Glossary"][0][0] == "bubble"
    assert set(map(len, search("no-such-word-anywhere").values())) == {0}


def test_a_name_of_the_library_leads_to_where_it_is_described(search):
    title, href, _ = search("ShardedOptimizer")["Library"][0]
    assert title == "labcode.parallel.zero.optimizer.ShardedOptimizer"
    assert href == f"api/labcode.parallel.zero.html#{title}"


def test_excerpts_keep_formulas(search):
    excerpt = next(text for _, _, text in search("bubble")["Lessons"] if "(m + p − 1)" in text)
    assert "(t_F + t_B)" in excerpt


def test_markdown_becomes_the_words_that_are_read():
    text = (
        "## A `b`\n\n**c** [d](e.md) ![f](g.png)\n\n```\nh\n```\n"
        "| i | j |\n|---|---:|\n<b>k</b> $x$ is $\\frac{1}{2}$ and `$l`"
    )
    assert book_search.plain(text) == "A b c d i j k x is 1/2 and $l"


def test_what_is_folded_is_not_in_the_index():
    script = book_search.script(ROOT, [book_search.Entry(0, "t", "h", "x", ("y",))])
    index = json.loads(script.rpartition("Search.setIndex(")[2].removesuffix(");\n"))
    assert index == {"kinds": list(book_search.KINDS), "entries": [[0, "t", "h", "x", ["y"], []]]}
    for entry in book.sections(book.course()):
        assert "<summary>" not in entry.text
