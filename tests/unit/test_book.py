"""The pages of the book before Sphinx reads them: what is folded, linked, escaped, left out."""

import ast
import re
import sys
from pathlib import Path

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from course import catalog  # noqa: E402
from tools import (  # noqa: E402  (tools/ is not installed)
    book,
    book_api,
    book_formula,
    book_lesson,
    book_terms,
    book_text,
    book_ways,
    course_map,
    decorate,
)

LESSONS = course_map.lessons()
BY_NUMBER = {lesson.number: lesson for lesson in LESSONS}
GLOSSARY = """
**all-reduce** (all-reduced): A sum that
every rank gets.

**ring all-reduce**: In a ring.

**ZeRO**: It divides.
"""


def uses():
    return book_terms.FirstUses(book_terms.terms(GLOSSARY))


# ---- glossary


def test_the_first_use_of_a_term_is_linked_and_no_other():
    page = uses()
    text = page.link("All-reduces cost. A ring all-reduce is an all-reduce, and\n\nall-reduced.")
    assert text == (
        "{term}`All-reduces <all-reduce>` cost. A {term}`ring all-reduce <ring all-reduce>` is an "
        "all-reduce, and\n\nall-reduced."
    )
    assert page.met == ["all-reduce", "ring all-reduce"]


@pytest.mark.parametrize(
    "text",
    [
        "`all-reduce`",
        "$all-reduce$ and $$all-reduce$$",
        "[all-reduce](01.ipynb)",
        "## An all-reduce",
        "```\nall-reduce\n```",
        '<p class="x">\nall-reduce</p>',
        "small-reduce, all-reducer, zero",
    ],
)
def test_what_is_no_prose_gets_no_link(text):
    assert uses().link(text) == text


def test_the_function_of_pytorch_is_a_use_of_its_term():
    page = uses()
    text = page.link("Call `dist.all_reduce`. `all_reduce` is an all-reduce; `all_gather` is none.")
    assert text.startswith("Call `dist.all_reduce`. `all_reduce` is an {term}`all-reduce <")
    page = uses()
    assert page.link("The first is `all_reduce`, in `all_reduce(x)` and `ring_all_reduce`.") == (
        'The first is <a href="glossary.html#term-all-reduce"><code>all_reduce</code></a>, '
        "in `all_reduce(x)` and `ring_all_reduce`."
    )
    assert page.met == ["all-reduce"]


def test_a_function_that_is_named_by_another_form_leads_to_its_term():
    glossary = "**data parallelism** (data parallel, data-parallel): Copies of a model."
    page = book_terms.FirstUses(book_terms.terms(glossary))
    assert page.link("Call `data_parallel`.") == (
        'Call <a href="glossary.html#term-data-parallelism"><code>data_parallel</code></a>.'
    )


def test_all_reduce_is_first_used_where_it_is_explained():
    known = book_terms.terms((ROOT / "book" / "glossary.md").read_text())
    page = book_terms.FirstUses(known)
    text = (ROOT / "solutions" / f"{BY_NUMBER['00'].stem}.py").read_text()
    page.link("\n".join(line.removeprefix("# ") for line in text.splitlines()))
    assert "all-reduce" in page.met


def test_longer_words_that_mean_something_else_are_not_linked():
    glossary = GLOSSARY + "\n**message** <!-- not: error message -->: Bytes.\n"
    glossary += "\n**profiler** (profile) <!-- not: site profile, profile of a site -->: A tool.\n"
    known = book_terms.terms(glossary)
    assert known[1].forms == ("message",) and known[2].forms == ("profiler", "profile")
    page = book_terms.FirstUses(known)
    text = "Error messages, a site\nprofile and the profile of a site. "
    assert page.link(text + "Messages and profiles.") == (
        text + "{term}`Messages <message>` and {term}`profiles <profiler>`."
    )


def test_what_another_word_means_in_a_lesson_is_not_linked():
    known = book_terms.terms((ROOT / "book" / "glossary.md").read_text())
    for text in (
        "without any error message",
        "starts in four stages",
        "at each stage of ZeRO",
        "AdamW's eps",
        "it hangs a hook on each",
    ):
        page = book_terms.FirstUses(known)
        linked = page.link(text)
        assert not {"message", "stage", "expert parallelism", "hang"}.intersection(page.met), linked


def test_a_term_may_go_over_the_end_of_a_line():
    assert uses().link("one ring\nall-reduce") == ("one {term}`ring all-reduce <ring all-reduce>`")


def test_a_form_of_two_terms_is_told():
    with pytest.raises(ValueError, match=r"^'all-reduce' is a form of 'all-reduce' and of 'x'"):
        book_terms.terms(GLOSSARY + "\n**x** (all-reduce): Twice.\n")


def test_the_glossary_says_where_a_term_is_first_used():
    page = book_terms.page(book_terms.terms(GLOSSARY), {"ZeRO": "[lesson 13](13.ipynb)"})
    assert "\nall-reduce\n  A sum that every rank gets.\n" in page
    assert "\nZeRO\n  It divides. First used in [lesson 13](13.ipynb).\n" in page


def test_each_term_of_the_glossary_is_used_by_a_lesson():
    known = book_terms.terms((ROOT / "book" / "glossary.md").read_text())
    met = set()
    for lesson in LESSONS:
        page = book_terms.FirstUses(known)
        text = (ROOT / "solutions" / f"{lesson.stem}.py").read_text()
        page.link("\n".join(line.removeprefix("# ") for line in text.splitlines()))
        met |= set(page.met)
    assert len(known) > 100
    assert [term.name for term in known if term.name not in met] == []


# ---- a lesson


THERE = f"[lesson 01, section 2]({BY_NUMBER['01'].stem}.ipynb#cell-id=section-2)"


def lesson_page():
    """A page made of one cell of each kind."""
    picture = {"image/png": "iVBORw0KGgo=", "text/html": '<img src="data:image/png;base64,iVB">'}
    about = {"image/png": {"alt": 'a "b" < c', "width": 30, "height": 20}}
    shown = (
        "<div><small><code>labcode/x.py</code></small></div><div><pre>a &lt; <b>b</b></pre></div>"
    )
    navigation = f"[← 03 x](03.ipynb) &nbsp;|&nbsp; {decorate.MAP}"
    solved = [
        new_markdown_cell(f"{navigation}\n\n# 04 · Title\n\nAn all-reduce.", id="a"),
        new_markdown_cell("*For the instructor.*", id="b", metadata={"tags": ["solution-only"]}),
        new_markdown_cell(
            "### Exercise 4.1 · Do it\n\n[A page](../book/guide/ddp.md) ![A map](../images/m.svg)",
            id="c",
        ),
        new_code_cell("return 1", id="d", metadata={"tags": ["exercise"]}),
        new_markdown_cell(decorate.boxed("**Predict** it"), id="e"),
        new_code_cell("guess = 7", id="f", metadata={"tags": ["predict"]}),
        new_code_cell('compare("x", guess, 7)', id="j"),
        new_code_cell("plot.x()", id="g", metadata={"tags": ["figure"]}),
        new_code_cell("show_source(x)", id="h"),
        new_markdown_cell(f"## Sources\n\n- On ZeRO {THERE}\n\n{navigation}", id="i"),
    ]
    solved[7].outputs = [new_output("execute_result", picture, metadata=about)]
    solved[8].outputs = [new_output("display_data", {"text/html": shown})]
    student = [cell.copy() for cell in solved if cell.id != "b"]
    student[2].source = "raise NotImplementedError"
    student[4].source = "guess = ..."
    lesson = BY_NUMBER["04"]
    return book_lesson.page(
        lesson,
        new_notebook(cells=solved),
        new_notebook(cells=student),
        {"4.1": ["try `x_1` * 2"]},
        uses(),
        str,
        LESSONS,
    )


def test_a_lesson_shows_what_learners_get_and_folds_what_gives_answers_away():
    page = lesson_page()
    cells = page.notebook.cells
    kinds = [(cell.source.split("\n")[0], cell.metadata.get("tags", [])) for cell in cells]
    assert kinds == [
        ("# 04 · Title", []),
        ("### Exercise 4.1 · Do it", []),
        ('<details class="hint"><summary>Hint 1 of 1 for 4.1</summary>', []),
        ("raise NotImplementedError", []),
        ("return 1", ["hide-input"]),
        ('<div class="predict">', []),
        ("guess = 7", ["hide-input"]),
        ('compare("x", guess, 7)', ["hide-output"]),
        ("plot.x()", ["hide-input"]),
        ("show_source(x)", []),
        (
            "<details><summary>labcode's own version: <code>labcode/x.py</code></summary>",
            [],
        ),
        ("## Sources", []),
    ]
    text = "\n".join(cell.source for cell in cells)
    assert "For the instructor" not in text and "Map of the course" not in text
    assert "An {term}`all-reduce <all-reduce>`." in text and "On ZeRO" in text
    assert f'<a href="{BY_NUMBER["04"].notebook}" download>' in cells[0].source
    assert cells[1].source.endswith("[A page](ddp.md) ![A map](images/m.svg)")
    assert "try `x_1` \\* 2" in cells[2].source
    assert "````python\na < b\n````" in cells[10].source
    assert cells[9].outputs == []
    there = f'<a href="{BY_NUMBER["01"].stem}.html#from-one-message-to-eight-collectives-'
    assert there in cells[-1].source and '-min">lesson 01, section 2</a>' in cells[-1].source


def test_a_figure_becomes_a_file_with_its_alternative_text():
    page = lesson_page()
    assert page.figures == {"04-1.png": b"\x89PNG\r\n\x1a\n"}
    (output,) = page.notebook.cells[8].outputs
    assert output.data == {
        "text/html": '<img class="figure" alt="a &quot;b&quot; &lt; c" width="30" height="20" '
        'loading="lazy" src="figures/04-1.png">'
    }


def test_hints_are_those_of_the_checks():
    known = book_lesson.hints(BY_NUMBER["10"], ROOT)
    assert len(known["10.1"]) == 3 and known["10.1"][0].startswith("Go through the block")
    for lesson in LESSONS:
        assert book_lesson.hints(lesson, ROOT), lesson.stem


# ---- the library


DOCSTRING = """Sum *all* of it.

Before:

    y = x_1 * 2

After [B, S].
Held by: tests/x.py::test

Args:
    x: First
        line of `x`.
    *rest: Others.

Raises:
    ValueError: Not <this>.

Returns:
    The {sum}.
"""


def test_a_docstring_becomes_markdown_that_shows_the_same():
    text = "\n".join(line for line in book_api.described(DOCSTRING) if line)
    assert text == (
        "Sum \\*all\\* of it.\nBefore:\n```text\ny = x_1 * 2\n```\nAfter \\[B, S\\].\n"
        "**Held by:** tests/x.py::test\n:param x: First line of `x`.\n:param *rest: Others.\n"
        ":raises ValueError: Not \\<this\\>.\n:returns: The \\{sum\\}."
    )


def test_what_is_public_is_described_with_its_signature(tmp_path):
    (tmp_path / "labcode").mkdir()
    code = (
        "class A:\n    def __init__(self, x: int = 1) -> None: ...\n    @staticmethod\n"
        "    def f(y): ...\n    @property\n    def p(self) -> int: ...\n    def _g(self): ...\n"
        "def run(a, *, b: str = 'x') -> A: ...\ndef _hidden(): ...\n"
    )
    (tmp_path / "labcode" / "__init__.py").write_text('"""All of it."""\n')
    (tmp_path / "labcode" / "m.py").write_text(code)
    known = book_api.modules(tmp_path)
    assert book_api.names(known) == {
        "labcode",
        "labcode.m",
        "labcode.m.A",
        "labcode.m.A.f",
        "labcode.m.A.p",
        "labcode.m.run",
    }
    page = book_api.pages(known)["labcode.md"]
    for line in (
        ":::::{py:class} A(x: int=1)",
        "::::{py:method} f(y)\n:staticmethod:",
        "::::{py:property} p\n:type: int",
        "::::{py:function} run(a, *, b: str='x') -> A",
    ):
        assert line in page
    assert "_hidden" not in page and "_g" not in page
    assert "| [`labcode`](labcode.md) | All of it. |" in book_api.pages(known)["index.md"]
    (tmp_path / "labcode" / "__init__.py").write_text("")
    without = book_api.pages(book_api.modules(tmp_path))["index.md"]
    assert "| [`labcode`](labcode.md) | `m` |" in without


def test_code_that_names_the_library_is_linked():
    names = {"labcode.comm.ring", "labcode.comm.ring.send", "labcode.perf.fit", "labcode.train.fit"}
    link = book.code_links(names)
    assert link("`comm.ring.send`") == "{py:obj}`comm.ring.send <labcode.comm.ring.send>`"
    assert link("`ring.send`") == "{py:obj}`ring.send <labcode.comm.ring.send>`"
    assert link("`send`") == "`send`" and link("`os.path`") == "`os.path`"
    assert book.code_links(names, bare=True)("`send`") == "{py:obj}`send <labcode.comm.ring.send>`"
    assert book.code_links(names, bare=True)("`fit`") == "`fit`"  # there are two


def test_links_hold_in_the_book_or_are_none():
    tree = ast.parse("")
    module = book_api.Module("labcode.runtime.units", "labcode", "labcode/runtime/units.py", tree)
    course = book.Course(ROOT, LESSONS, [], [module])
    lesson = BY_NUMBER["04"]

    def shown(text):
        return book.relinked(text, "docs", course)

    assert shown(f"[a](../{lesson.solution})") == f"[a]({lesson.stem}.ipynb)"
    assert shown("[a](../COURSE.md)") == "[a](index.md)"
    source = '<a href="source/labcode.runtime.units.html">a</a>'
    assert shown("[a](../labcode/runtime/units.py)") == source
    assert shown("[a](../INSTRUCTORS.md)") == "a (`INSTRUCTORS.md`)"
    assert shown("![a](../images/x.svg)") == "![a](images/x.svg)"
    assert shown("[a](https://x.org)") == "[a](https://x.org)"


# ---- sections and ways


def test_the_sections_that_a_text_names_are_linked():
    first, third = BY_NUMBER["05"].sections[0], BY_NUMBER["05"].sections[2]
    one = f'<a href="{book_ways.address(BY_NUMBER["05"], first)}">'
    three = f'<a href="{book_ways.address(BY_NUMBER["05"], third)}">'
    assert book_ways.linked("05 §1, 3, 16 §2 (`05 §1`)", LESSONS).startswith(
        f"05&nbsp;{one}§1</a>, {three}3</a>, 16&nbsp;<a href="
    )
    assert book_ways.linked("05 §1 to 3.", LESSONS) == f"05&nbsp;{one}§1</a> to {three}3</a>."
    assert book_ways.linked("05 §1, number 3", LESSONS) == f"05&nbsp;{one}§1</a>, number 3"
    assert book_ways.linked("`05 §1`", LESSONS) == "`05 §1`"
    with pytest.raises(ValueError, match=r"^'05 §1, 77': lesson 05 has no section 77$"):
        book_ways.linked("05 §1, 77", LESSONS)


def test_a_link_to_a_lesson_that_names_its_sections_leads_to_them():
    lesson = BY_NUMBER["04"]
    course = book.Course(ROOT, LESSONS, [], [])
    address = book_ways.address(lesson, lesson.sections[3])
    assert book.relinked(f"[04 §4](../../{lesson.notebook})", book.GUIDE, course) == (
        f'04&nbsp;<a href="{address}">§4</a>'
    )
    assert address == "04_data_parallel_by_hand.html#gradient-accumulation-core-18-min"
    assert book.relinked("[map](../images/a.svg)", "book", course) == (
        '<a href="_images/a.svg">map</a>'
    )


def test_the_page_of_the_ways_has_each_way_with_all_its_sections():
    page = book_ways.page("<!-- table -->\n\n<!-- ways -->", LESSONS)
    known = {lesson.number: lesson.sections for lesson in LESSONS}
    for name, way in catalog.WAYS.items():
        assert f'<a href="ways.html#{name}"><code>{name}</code></a> | {way.goal} |' in page
        _, _, rest = page.partition(f"## {name}\n")
        rest = rest.partition("\n## ")[0]
        for stop in catalog.stops(way.taken, known):
            for section in stop.taken:
                assert f'"{book_ways.address(BY_NUMBER[stop.number], section)}"' in rest
        assert rest.count(".html#") == sum(
            len(stop.taken) for stop in catalog.stops(way.taken, known)
        )


# ---- formulas


@pytest.mark.parametrize(
    ("latex", "text"),
    [
        (r"t = \alpha + \frac{n}{\beta}.", "t = α + n/β."),
        (r"\frac{p-1}{m + p - 1}", "(p − 1)/(m + p − 1)"),
        (r"\frac{2(p-1)}{p}\,n", "2(p − 1)/p n"),
        (r"\frac1p \sum_r \nabla L_r", "1/p ∑_r ∇L_r"),
        (r"T/\sqrt{2CM}", "T/√(2CM)"),
        (r"\frac{T}{2M}", "T/(2M)"),
        (r"e^{-(T+C)/M} - 1", "e^(−(T + C)/M) − 1"),
        (r"\hat x_i^2 \cdot \lVert g \rVert", "x\u0302_i^2 · ‖g‖"),
        (r"\frac{B}{dp}\,S H \cdot \mathrm{gelu}(x)", "B/dp S H · gelu(x)"),
        (r"\underbrace{a+b}_{\text{each}}", "(a + b)_each"),
        (r"\begin{pmatrix} a & b \\ c & d \end{pmatrix}", "(a, b; c, d)"),
    ],
)
def test_a_formula_can_be_read_as_text(latex, text):
    assert book_formula.plain(latex) == text


def test_no_formula_of_a_lesson_is_left_in_latex():
    for lesson in LESSONS:
        text = (ROOT / lesson.solution).with_suffix(".py").read_text(encoding="utf-8")
        prose = re.sub(r"(?m)^# ?", "", text)
        for code, display, inline in book_formula.FORMULA.findall(prose):
            latex = display or (inline if "\\" in inline and "\n\n" not in inline else "")
            if latex and not code:
                shown = book_formula.plain(latex.strip())
                assert shown and not re.search(r"[\\{}&]", shown), (lesson.number, latex)


def test_special_characters_stay_what_they_are():
    assert book_text.escaped("a_b *c* `d*e` [x](y)\n---") == (
        "a\\_b \\*c\\* `d*e` \\[x\\](y)\n\\---"
    )


def test_old_sources_go_and_equal_ones_are_not_written_again(tmp_path):
    book.write_sources({"a/b.md": b"1", "c.md": b"2"}, tmp_path)
    before = (tmp_path / "c.md").stat().st_mtime_ns
    book.write_sources({"c.md": b"2"}, tmp_path)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["c.md"]
    assert (tmp_path / "c.md").stat().st_mtime_ns == before
