"""Two pictures: the map of the course, and the rooms of the library. Their data are elsewhere.

The lessons and what they need come from `tools.course_map`, the floors from `tools.rooms`, what a
room holds from the map at the top of `labcode/__init__.py`.
"""

import pathlib
import re
import textwrap
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from matplotlib.path import Path

from course.figures.style import (
    INK,
    PALE,
    PALETTE,
    Picture,
    canvas,
    colour_of,
    figure,
    put_text,
)
from tools import course_map, rooms

ROOT = pathlib.Path(__file__).resolve().parents[1]
LESSON_WIDTH = 1.8
LESSON_HEIGHT = 1.0
COLUMN = 2.25  # from one lesson to the next; arrows run between columns and between rows
ROW = 1.3
MAP_IN = 0.56  # inches for a unit of these
BAND_GAP = 0.3  # between the parts
ROOM_HEIGHT = 0.84
FLOOR_HEIGHT = 1.0
TOWER_WIDTH = 12.0


@figure
def course(lessons: list[course_map.Lesson]) -> Picture:
    """The lessons in columns: each stands to the right of all that it needs."""
    places = places_of(lessons)
    right = max(x for x, _ in places.values()) + LESSON_WIDTH
    bottom = min(y for _, y in places.values())
    total_h = sum(lesson.minutes for lesson in lessons) / 60
    alt = (
        f"{len(lessons)} lessons in a row for each part; an arrow leads from a lesson to each "
        f"one that needs it; together they take {total_h:.0f} hours"
    )
    picture = canvas(right * MAP_IN + 0.3, (LESSON_HEIGHT - bottom) * MAP_IN + 0.6, alt=alt)
    axes = picture.axes[0]
    axes.set_axis_off()
    axes.set_xlim(-0.2, right + 0.1)
    axes.set_ylim(bottom - 0.45, LESSON_HEIGHT + 0.5)
    parts = list(course_map.PARTS.values())
    direct = course_map.direct_needs(lessons)
    routes = routes_of(direct, places)
    for route in routes:
        colour = PALETTE[parts.index(course_map.part_of(route.source))]
        path = Path(bends_of(route, routes, places))
        arrow = FancyArrowPatch(path=path, color=colour, lw=1.3, arrowstyle="-|>", mutation_scale=9)
        axes.add_patch(arrow)
    for lesson in lessons:
        colour = PALETTE[parts.index(lesson.part)]
        needs = " ".join(direct[lesson.number])
        _draw_lesson(axes, places[lesson.number], lesson, needs, colour)
    for part in parts:
        rows = [places[lesson.number][1] for lesson in lessons if lesson.part == part]
        if rows:
            put_text(
                axes, -0.1, max(rows) + LESSON_HEIGHT + 0.13, part, 9, ha="left", weight="bold"
            )
    legend = (
        "An arrow leads to a lesson that needs the one it comes from; needs of needs are left out."
    )
    put_text(axes, right, bottom - 0.3, legend, 8, ha="right", color=INK)
    return picture


def places_of(lessons: list[course_map.Lesson]) -> dict[str, tuple[float, float]]:
    """The lower left corner of each lesson: its depth to the right, its part downwards."""
    depth = course_map.depths(lessons)
    places = {}
    top = 0.0
    for part in course_map.PARTS.values():
        members = [lesson.number for lesson in lessons if lesson.part == part]
        taken: dict[int, int] = {}
        for number in members:
            row = taken.get(depth[number], 0)
            taken[depth[number]] = row + 1
            places[number] = (depth[number] * COLUMN, top - row * ROW)
        top -= max(taken.values(), default=0) * ROW + BAND_GAP
    return places


def _draw_lesson(
    axes: Axes,
    corner: tuple[float, float],
    lesson: course_map.Lesson,
    needs: str,
    colour: str,
) -> None:
    x, y = corner
    style = "round,pad=0,rounding_size=0.08"
    box = FancyBboxPatch(corner, LESSON_WIDTH, LESSON_HEIGHT, boxstyle=style, fc="white", ec=colour)
    box.set_linewidth(1.8)
    axes.add_patch(box)
    title = lesson.title.partition(":")[0]
    wrapped = textwrap.fill(f"{lesson.number} {title}", 17, break_on_hyphens=False)
    put_text(axes, x + LESSON_WIDTH / 2, y + LESSON_HEIGHT * 0.6, wrapped, 7.1, linespacing=1.02)
    below = f"{lesson.minutes} min"
    if needs:
        below += f", after {needs}"
    put_text(axes, x + LESSON_WIDTH / 2, y + 0.1, below, 5.4, color="#444444")


class Route(NamedTuple):
    """Where the arrow from one lesson to another runs: never over a lesson.

    Args:
        source: The lesson that is needed.
        target: The lesson that needs it.
        first: The gap between columns that the arrow enters, by the column left of it.
        last: The gap between columns from which it reaches the target.
        row: Above which row it goes from one gap to the other: the y of the target.
    """

    source: str
    target: str
    first: int
    last: int
    row: float


def routes_of(
    direct: dict[str, tuple[str, ...]], places: dict[str, tuple[float, float]]
) -> list[Route]:
    """One for each lesson and each lesson that it needs directly."""
    routes = []
    for target, sources in direct.items():
        right = round(places[target][0] / COLUMN)
        for source in sources:
            left = round(places[source][0] / COLUMN)
            routes.append(Route(source, target, left, right - 1, places[target][1]))
    return routes


def _track(source: str, beside: set[str], places: dict[str, tuple[float, float]]) -> float:
    """The share of a gap at which the arrows from one lesson run, so that no two cover each other.

    The lowest lesson comes first: its arrows then cross none that come from above.
    """
    order = sorted(beside, key=lambda number: places[number][1])
    return (order.index(source) + 1) / (len(order) + 1)


def bends_of(
    route: Route, routes: list[Route], places: dict[str, tuple[float, float]]
) -> list[tuple[float, float]]:
    """From the right edge of one lesson to the left edge of another, through gaps alone.

    Held by: tests/unit/test_images.py::test_no_arrow_of_the_map_runs_over_a_lesson
    """

    def between_columns(gap: int) -> float:
        beside = {other.source for other in routes if gap in (other.first, other.last)}
        space = COLUMN - LESSON_WIDTH
        return gap * COLUMN + LESSON_WIDTH + space * _track(route.source, beside, places)

    tip_y = route.row + LESSON_HEIGHT / 2
    tail_y = places[route.source][1] + LESSON_HEIGHT / 2
    is_straight = route.first == route.last and tail_y == tip_y
    if not is_straight:  # lower, so that it is not taken for an arrow into the lesson beside it
        tail_y -= 0.22 * LESSON_HEIGHT
    x = between_columns(route.first)
    bends = [(places[route.source][0] + LESSON_WIDTH, tail_y), (x, tail_y)]
    if route.first != route.last:
        longer = [other for other in routes if other.first != other.last]
        beside = {other.source for other in longer if other.row == route.row}
        space = ROW - LESSON_HEIGHT
        y = route.row + LESSON_HEIGHT + space * _track(route.source, beside, places)
        bends += [(x, y), (between_columns(route.last), y)]
        x = between_columns(route.last)
    return [*bends, (x, tip_y), (places[route.target][0] - 0.02, tip_y)]


@figure
def library() -> Picture:
    """The floors of labcode and the course from the ground up, a box for each room."""
    floors: dict[int, list[str]] = {}
    for room, floor in rooms.FLOORS.items():
        floors.setdefault(floor, []).append(room)
    about = _contents()
    alt = (
        f"{len(rooms.FLOORS)} rooms on {len(floors)} floors, from the ground to the course; each "
        "room imports only its own floor and the ones below; five rooms need no torch"
    )
    height = len(floors) * FLOOR_HEIGHT
    picture = canvas(9.2, height * 0.72, alt=alt)
    axes = picture.axes[0]
    axes.set_axis_off()
    axes.set_xlim(-0.1, TOWER_WIDTH + 0.1)
    axes.set_ylim(-0.45, height)
    for floor, members in floors.items():
        width = TOWER_WIDTH / len(members)
        for place, room in enumerate(members):
            corner = (place * width + 0.06, floor * FLOOR_HEIGHT)
            _draw_room(axes, corner, width - 0.12, room, about.get(room, ""))
    legend = "A room uses its own floor and the ones below.  Dashed: can be used without torch."
    put_text(axes, 0.06, -0.28, legend, 9, ha="left")
    return picture


def _draw_room(
    axes: Axes, corner: tuple[float, float], width: float, room: str, about: str
) -> None:
    is_light = room in rooms.NO_TORCH
    colour = colour_of(rooms.FLOORS[room])
    style = "round,pad=0,rounding_size=0.08"
    box = FancyBboxPatch(corner, width, ROOM_HEIGHT, boxstyle=style, fc=PALE, ec=colour, lw=1.8)
    box.set_linestyle("--" if is_light else "-")
    axes.add_patch(box)
    x, y = corner[0] + width / 2, corner[1]
    name = "the ground" if room == "ground" else f"{room}/"
    put_text(axes, x, y + ROOM_HEIGHT * 0.79, name, 9.5, weight="bold")
    wrapped = textwrap.wrap(about, int(width * 8.2))
    put_text(axes, x, y + ROOM_HEIGHT * 0.33, "\n".join(wrapped[:3]), 7.5, linespacing=1.1)


def _contents() -> dict[str, str]:
    """What each room holds, from the map at the top of the library."""
    text = (ROOT / "labcode" / "__init__.py").read_text(encoding="utf-8")
    found = {
        "ground": "the grid as arithmetic, schedules as data, settings, named runs",
        "course": "checks, figures and labs, and the ranks behind a notebook",
    }
    for room, about in re.findall(r"(?m)^        (\w+)/ +(.+)$", text):
        found[room] = re.split(r"[;(]|, `|: (?=`|\w+/)| -> |\. ", about)[0].strip()
    return found
