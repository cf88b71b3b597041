"""`make images`: the pictures of README, book and slides, each as SVG and PNG.

A key figure is the figure of a lesson: the call in the lesson's source is drawn again, so that
arguments and alternative text have one place. The map of the course and the rooms of the library
are drawn by `tools.maps`, the pipeline here. images/README.md shows all of them;
images/index.json says what was drawn: a picture is stale if other lines, boxes or words would be
drawn now. What fonts and versions of matplotlib change does not count. `--check` also says when
the film of a lesson (`tools.film`) shows cells that the lesson no longer has.

python -m tools.images           draw what is stale or missing; --force: all
python -m tools.images --check   exit with 1 if any is stale

Held by: tests/unit/test_images.py
"""

import argparse
import ast
import hashlib
import html
import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axis import Axis
from matplotlib.collections import Collection
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.spines import Spine
from matplotlib.text import Text

from course.figures import plot
from course.figures.style import STYLE, Picture
from course.labs import l20_plan
from labcode.perf.pipeline import StageTimes, simulate
from labcode.runtime.files import write_atomically
from labcode.schedules import schedule
from labcode.topology import GridShape
from tools import course_map, film, maps

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "images"
INDEX = "index.json"
PAGE = "README.md"
BY_HAND = ("lesson.gif",)  # tools/film.py


class Key(NamedTuple):
    """A figure of a lesson.

    Args:
        lesson: Number of the lesson.
        function: The function of `plot` that draws it.
        needs: Names that the cell of the figure uses, beside `plot`.
        which: Which of the cells that call the function, counted from 0.
    """

    lesson: str
    function: str
    needs: dict[str, Any]
    which: int = 0


GRID = {"GridShape": GridShape}
MAP = {"lab": l20_plan, "a100": l20_plan.cluster("jean-zay-a100"), "GIB": 2**30}
KEYS = {
    "collectives": Key("01", "collectives", {}, which=1),
    "ring_all_reduce": Key("01", "ring", {}),
    "data_parallel": Key("04", "data_parallel", {}),
    "grid": Key("08", "grid", GRID),
    "tensor_parallel": Key("09", "tensor_parallel_mlp", {}),
    "ring_attention": Key("11", "ring_attention", {}),
    "pipeline_stages": Key("12", "stages", {}),
    "zero_memory": Key("13", "zero", {}),
    "activation_checkpointing": Key("16", "activation_checkpointing", {}),
    "layout_map": Key("20", "layout_map", MAP),
}


def pictures() -> dict[str, Callable[[], Picture]]:
    """{name of the files: what draws the picture}, in the order of the page."""
    found: dict[str, Callable[[], Picture]] = {
        "course_map": lambda: maps.course(course_map.lessons(ROOT)),
        "library": maps.library,
        "pipeline_schedules": pipeline_schedules,
    }
    for name, key in KEYS.items():
        found[name] = lambda key=key: of_lesson(key)
    return found


def pipeline_schedules() -> Picture:
    """Three schedules of the same work, simulated: four ranks, eight micro-batches."""
    one_ms = StageTimes(1e-3, 1e-3, 1e-3)
    lines = {}
    for name, order in {"GPipe": "gpipe", "1F1B": "1f1b", "zero bubble": "zero_bubble"}.items():
        lines[name] = simulate(schedule(order, 4, 8, 4), one_ms)
    return plot.pipeline(
        lines,
        title="The same eight micro-batches on four ranks, in three orders",
        alt="Time lines of four ranks: GPipe and 1F1B leave the same idle triangles at begin and "
        "end, 1F1B begins backwards earlier, and zero bubble fills most of the gaps with W",
    )


def of_lesson(key: Key) -> Picture:
    """The figure of a lesson, drawn by the lesson's own cell.

    Raises:
        ValueError: The lesson has no such figure any more.
    """
    path = next((ROOT / "solutions").glob(f"{key.lesson}_*.py"))
    cells = []
    for cell in re.split(r"(?m)^# %%.*\n", path.read_text(encoding="utf-8")):
        if f"plot.{key.function}(" in cell and not cell.startswith("# "):
            cells.append(cell)
    if key.which >= len(cells):
        raise ValueError(
            f"{path.name} has {len(cells)} cells with plot.{key.function}(...), and number "
            f"{key.which} is asked for: change KEYS in tools/images.py"
        )
    return _last_value(cells[key.which], {"plot": plot, **key.needs})


def _last_value(cell: str, names: dict[str, Any]) -> Picture:
    """What a notebook would show below a cell: the value of its last expression."""
    tree = ast.parse(cell)
    for statement in tree.body[:-1]:
        is_printing = isinstance(statement, ast.Expr)
        if not is_printing:
            exec(compile(ast.Module([statement], []), "<cell>", "exec"), names)
    last = tree.body[-1]
    if not isinstance(last, ast.Expr):
        raise ValueError(f"the cell does not end with its figure: {ast.unparse(last)[:60]}")
    return eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)


# ---- what is drawn, as text


def fingerprint(picture: Picture) -> str:
    """A hash of the words, lines and boxes of a picture, and of its alternative text.

    Positions are those of the data, to four digits: how large a letter is does not matter.
    """
    content = [picture.alt, *_contents(picture.figure)]
    return hashlib.sha256("\n".join(content).encode()).hexdigest()[:16]


def _contents(artist: Artist) -> Iterator[str]:
    yield _described(artist)
    for child in artist.get_children():
        if not isinstance(child, (Axis, Spine)):
            yield from _contents(child)


def _described(artist: Artist) -> str:
    kind = type(artist).__name__
    if isinstance(artist, Text):
        return f"{kind} {artist.get_text()!r} {artist.get_color()}"
    if isinstance(artist, Line2D):
        return f"{kind} {_digits(artist.get_xydata())} {artist.get_color()}"
    if isinstance(artist, AxesImage):
        return f"{kind} {_digits(artist.get_array())}"
    if isinstance(artist, Collection):
        return f"{kind} {_digits(artist.get_offsets())} {_digits(artist.get_facecolor())}"
    if isinstance(artist, Patch):
        colours = f"{_digits(artist.get_facecolor())} {_digits(artist.get_edgecolor())}"
        box = [getattr(artist, f"get_{name}")() for name in _sizes(artist)]
        return f"{kind} {_digits(box)} {colours}"
    return kind


def _sizes(patch: Patch) -> list[str]:
    """The measures that a patch has in the units of its data, if it has any."""
    return [name for name in ("x", "y", "width", "height") if hasattr(patch, f"get_{name}")]


def _digits(numbers: Any) -> str:
    flat = np.ma.filled(np.ma.asarray(numbers, dtype=float), np.nan).ravel()
    return " ".join(f"{number:.4g}" for number in flat)


# ---- files


def svg(picture: Picture) -> bytes:
    """The picture as SVG, the same bytes at each call: no date, ids from a fixed seed.

    Letters are outlines, so that it looks alike where DejaVu is not installed; the alternative text
    is its title.
    """
    picture.png()  # settles the layout
    drawn = io.BytesIO()
    with mpl.rc_context({**STYLE, "svg.hashsalt": "labcode", "svg.fonttype": "path"}):
        picture.figure.savefig(drawn, format="svg", bbox_inches="tight", metadata={"Date": None})
    text = drawn.getvalue().decode()
    title = f"<title>{html.escape(picture.alt)}</title>"
    text = re.sub(r"(<svg [^>]*)>", rf'\1 role="img">\n {title}', text, count=1)
    return text.encode()


def page(alts: dict[str, str]) -> str:
    """images/README.md: every picture below its name."""
    lines = ["# Pictures of the course", ""]
    lines += [
        "Drawn by `make images` (`tools/images.py`), each as SVG and PNG; CI finds stale ones."
    ]
    for name, alt in alts.items():
        lines += ["", f"## {name}", "", f"![{alt}]({name}.svg)"]
    return "\n".join(lines) + "\n"


def index(folder: Path) -> dict[str, dict[str, str]]:
    """What was drawn: {name: {"alt", "drawn", "svg"}}; {} if nothing was."""
    path = folder / INDEX
    if not path.exists():
        return {}
    return json.loads(path.read_text(encoding="utf-8"))


def stale(folder: Path, drawn: dict[str, Picture]) -> list[str]:
    """The pictures that are missing, were changed by hand, or would be drawn otherwise now."""
    known = index(folder)
    found = []
    for name, picture in drawn.items():
        entry = known.get(name, {})
        file = folder / f"{name}.svg"
        is_whole = file.exists() and _sha256(file.read_bytes()) == entry.get("svg")
        is_same = entry.get("drawn") == fingerprint(picture)
        if not (is_whole and is_same and (folder / f"{name}.png").exists()):
            found.append(name)
    return found


def left_over(folder: Path, names: list[str]) -> list[str]:
    """Files of pictures that nothing draws any more."""
    kept = {PAGE, INDEX, *BY_HAND}
    for name in names:
        kept |= {f"{name}.svg", f"{name}.png"}
    return sorted(path.name for path in folder.iterdir() if path.name not in kept)


def draw(folder: Path, drawn: dict[str, Picture], wanted: list[str]) -> None:
    """Write the wanted pictures, the index and the page."""
    known = index(folder)
    entries = {}
    for name, picture in drawn.items():
        if name in wanted:
            mark = fingerprint(picture)
            content = svg(picture)
            write_atomically(folder / f"{name}.svg", content)
            write_atomically(folder / f"{name}.png", picture.png())
            entries[name] = {"alt": picture.alt, "drawn": mark, "svg": _sha256(content)}
        else:
            entries[name] = known[name]
    text = json.dumps(entries, indent=1, ensure_ascii=False) + "\n"
    write_atomically(folder / INDEX, text.encode())
    alts = {name: entry["alt"] for name, entry in entries.items()}
    write_atomically(folder / PAGE, page(alts).encode())


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def main(arguments: list[str], folder: Path = IMAGES) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.images", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--check", action="store_true", help="draw nothing, say what is stale")
    parser.add_argument("--force", action="store_true", help="draw all")
    options = parser.parse_args(arguments)
    drawn = {name: make() for name, make in pictures().items()}
    wanted = list(drawn) if options.force else stale(folder, drawn)
    extra = left_over(folder, list(drawn))
    if options.check:
        for name in wanted:
            print(f"images/{name} is stale: run `make images`")
        for name in extra:
            print(f"images/{name} is drawn by nothing: remove it, or add it to tools/images.py")
        film_is_stale = film.is_stale(folder / film.GIF.name, film.student_notebook())
        if film_is_stale:
            print(f"images/{film.GIF.name} shows other cells: run `python -m tools.film`")
        return 1 if wanted or extra or film_is_stale else 0
    draw(folder, drawn, wanted)
    print(f"drawn: {', '.join(wanted) or 'nothing was stale'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
