"""The words of a figure stand in the library: every caption is complete and used by one lesson."""

import ast
from collections import Counter
from pathlib import Path

import pytest

from course.catalog import number_of
from course.figures import caption, plot

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "solutions").glob("[0-9][0-9]*_*.py"))
WORDS = {"title", "alt", "xlabel", "ylabel", "fmt", "logx", "logy", "from_zero", "beside"}

each_lesson = pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)


def drawn(source):
    """The keyword arguments of each call `plot.name(...)` of a lesson, {name: expression}."""
    found = []
    for node in ast.walk(ast.parse(source.read_text())):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if ast.unparse(node.func.value) == "plot":
            found.append({keyword.arg: keyword.value for keyword in node.keywords})
    return found


def named(source):
    """The captions that a lesson names, once for each time."""
    return [call["caption"].value for call in drawn(source) if "caption" in call]


@each_lesson
def test_no_words_of_a_figure_stand_in_the_lesson(source):
    assert [set(call) & WORDS for call in drawn(source) if set(call) & WORDS] == []


@each_lesson
def test_every_caption_is_used_once_and_exists(source):
    number = number_of(source.name)
    known = {f"{number}.{name}": 1 for name in caption.of_lesson(number)}
    assert Counter(named(source)) == known


@each_lesson
def test_every_field_of_a_caption_is_filled_by_the_cell(source):
    for call in drawn(source):
        if "caption" not in call:
            continue
        number, _, name = call["caption"].value.partition(".")
        texts = [text for text in caption.of_lesson(number)[name].values() if isinstance(text, str)]
        wanted = {field for text in texts for field in caption.FIELD.findall(text)}
        assert wanted <= set(call), name


@each_lesson
def test_every_caption_says_what_the_figure_shows(source):
    captions = caption.of_lesson(number_of(source.name))
    assert [name for name, words in captions.items() if not words.get("alt")] == []


def test_every_file_of_captions_belongs_to_a_lesson():
    files = {path.stem for path in caption.FOLDER.iterdir()}
    assert files <= {number_of(source.name) for source in SOURCES}


def test_a_figure_takes_its_words_from_the_caption_and_the_cell_goes_before():
    picture = plot.bars({"H100": 2.0, "CPU": 1.0}, cpus="3,000", caption="00.peaks")
    assert picture.axes[0].get_title(loc="left") or picture.axes[0].get_title()
    assert picture.alt == caption.of_lesson("00")["peaks"]["alt"]
    words = caption.with_caption("00.peaks", {"cpus": "3,000", "logy": False})
    assert words["title"] == "By its datasheet an H100 is about 3,000 such CPUs"
    assert words["logy"] is False and "cpus" not in words


@pytest.mark.parametrize(
    ("name", "message"),
    {
        "08.order": r"unknown caption '08.order': did you mean 08.orders\? there are 08.digits, ",
        "99.orders": "unknown caption '99.orders': there are none",
        "orders": "unknown caption 'orders': there are none",
    }.items(),
)
def test_an_unknown_caption_is_one_line_that_says_which_exist(name, message):
    with pytest.raises(ValueError, match=message):
        plot.bars({"a": 1.0}, caption=name)


def test_a_field_that_is_not_filled_is_named():
    with pytest.raises(ValueError, match=r"caption 00.peaks says {cpus}: give cpus="):
        plot.bars({"a": 1.0}, caption="00.peaks")
