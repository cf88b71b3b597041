"""The pictures in images/ are what would be drawn now; the map of the course is its lessons'."""

import itertools
import sys
from pathlib import Path
from typing import Any, cast

import pytest
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from course.figures.style import canvas, figure
from tools import course_map, film, images, maps

ALT = "A line that rises from left to right"


@figure
def small(height=1.0, alt=ALT):
    picture = canvas(2, 1, alt=alt)
    picture.axes[0].plot([0, height])
    picture.axes[0].bar([1], [height])
    picture.axes[0].text(0, 0, "begin")
    return picture


def test_no_picture_is_stale_and_none_is_left_over():
    drawn = {name: make() for name, make in images.pictures().items()}
    assert images.stale(images.IMAGES, drawn) == [], "run `make images`"
    assert images.left_over(images.IMAGES, list(drawn)) == []
    alts = {name: picture.alt for name, picture in drawn.items()}
    assert (images.IMAGES / images.PAGE).read_text() == images.page(alts)


def test_what_makes_a_picture_stale(tmp_path):
    images.draw(tmp_path, {"small": small()}, ["small"])
    assert images.stale(tmp_path, {"small": small()}) == []
    assert images.stale(tmp_path, {"small": small(height=1.01)}) == ["small"]
    assert images.stale(tmp_path, {"small": small(alt="Other words about the line")}) == ["small"]
    other_word = small()
    other_word.axes[0].texts[0].set_text("start")
    assert images.stale(tmp_path, {"small": other_word}) == ["small"]
    changed = tmp_path / "small.svg"
    content = changed.read_bytes()
    changed.write_bytes(content + b"<!-- by hand -->")
    assert images.stale(tmp_path, {"small": small()}) == ["small"]
    changed.write_bytes(content)
    (tmp_path / "small.png").rename(tmp_path / "old.png")
    assert images.stale(tmp_path, {"small": small()}) == ["small"]
    assert images.left_over(tmp_path, ["small"]) == ["old.png"]


def test_the_film_shows_the_lesson_as_it_is():
    is_stale = film.is_stale(film.GIF, film.student_notebook())
    assert not is_stale, "run `python -m tools.film`"


def test_a_film_is_stale_when_a_cell_that_it_shows_has_changed(tmp_path):
    notebook = film.student_notebook()
    taken = film.Film(cast("Any", None))  # no browser
    taken.frames = [Image.new("P", (4, 4), colour) for colour in (1, 2)]
    taken.times_ms = [100, 100]
    path = tmp_path / "lesson.gif"
    assert film.is_stale(path, notebook)
    taken.save(path, film.hash_of_shown(notebook))
    assert not film.is_stale(path, notebook)
    notebook.cells[-1].source += "\nNot in the film."
    assert not film.is_stale(path, notebook)
    notebook.cells[0].source += "\nMore minutes."
    assert film.is_stale(path, notebook)
    for cell in notebook.cells:
        cell.source = cell.source.replace(film.QUESTION, "distance = ...")
    with pytest.raises(ValueError, match=r"has no cell with 'distance_left = ...': change tools"):
        film.is_stale(path, notebook)


def test_an_svg_has_no_date_is_the_same_again_and_says_what_it_shows():
    content = images.svg(small())
    assert content == images.svg(small())
    assert b"<dc:date>" not in content
    assert f"<title>{ALT}</title>".encode() in content


def test_a_figure_that_a_lesson_no_longer_has_is_told():
    with pytest.raises(ValueError, match=r"04_data.*has 0 cells with plot\.ring\(.*change KEYS"):
        images.of_lesson(images.Key("04", "ring", {}))


def test_what_a_lesson_needs_is_read_from_its_own_words():
    text = (
        "# # 09 · Title\n#\n# **Time**: 85 minutes. **Needs**: lessons 01 (section 2) and 04\n"
        "# (sections 1 to 3). For section 1 also lesson 08 (section 2); for section 2\n"
        "# also lesson 05 (section 1). Lesson 06 helps.\n#\n"
        "# ## 1. A (core, 45 min)\n#\n# ## 2. B (optional, 5 min)\n"
    )
    lesson = course_map.lesson_of("09_title", text)
    assert lesson.needs == ("01", "04", "08")
    assert (lesson.title, lesson.minutes, lesson.part) == ("Title", 85, "III Model parallel")
    with pytest.raises(ValueError, match=r"^09_title: write what it needs"):
        course_map.lesson_of("09_title", text.replace("Needs", "Wants"))
    with pytest.raises(ValueError, match=r"^09_title: write how long it takes"):
        course_map.lesson_of("09_title", text.replace("minutes", "pages"))


def test_every_lesson_needs_earlier_ones_and_the_first_none():
    lessons = course_map.lessons()
    assert [lesson.number for lesson in lessons if not lesson.needs] == ["00"]
    for lesson in lessons:
        assert all(number < lesson.number for number in lesson.needs), lesson.stem
    depth = course_map.depths(lessons)
    for lesson in lessons:
        assert all(depth[number] < depth[lesson.number] for number in lesson.needs)


def test_a_need_that_another_need_implies_draws_no_arrow(tmp_path):
    (tmp_path / "solutions").mkdir()
    needs_of = {
        "00": "nothing",
        "01": "lesson 00 (section 1)",
        "02": "lessons 00 (section 1) and 01 (section 2)",
    }
    for number, needs in needs_of.items():
        text = f"# # {number} · Title\n#\n# **Time**: 5 minutes. **Needs**: {needs}.\n"
        (tmp_path / "solutions" / f"{number}_title.py").write_text(text)
    lessons = course_map.lessons(tmp_path)
    assert course_map.direct_needs(lessons) == {"00": (), "01": ("00",), "02": ("01",)}
    words = [text.get_text() for text in maps.course(lessons).axes[0].texts]
    assert "5 min, after 01" in words


def test_no_arrow_of_the_map_runs_over_a_lesson():
    lessons = course_map.lessons()
    places = maps.places_of(lessons)
    routes = maps.routes_of(course_map.direct_needs(lessons), places)
    assert len(routes) > len(lessons) > 20
    for route in routes:
        bends = maps.bends_of(route, routes, places)
        for (x0, y0), (x1, y1) in itertools.pairwise(bends):
            assert x0 == x1 or y0 == y1
            for number, (left, bottom) in places.items():
                is_beside = max(x0, x1) <= left or min(x0, x1) >= left + maps.LESSON_WIDTH
                is_above = min(y0, y1) >= bottom + maps.LESSON_HEIGHT
                is_below = max(y0, y1) <= bottom
                assert is_beside or is_above or is_below, (route, number)


def test_the_command_names_what_is_stale(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(images, "pictures", lambda: {"small": small})
    monkeypatch.setattr(film, "is_stale", lambda path, notebook: False)
    assert images.main(["--check"], tmp_path) == 1
    assert capsys.readouterr().out == "images/small is stale: run `make images`\n"
    assert images.main([], tmp_path) == 0
    assert images.main(["--check"], tmp_path) == 0
