"""A drawing of an array in chunks, and of what a crop of it touches.

Lesson 02 uses it; `plot.chunks` is the way in.
"""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from course.figures.style import INK, PALETTE, Picture, canvas, figure, put_headline, swatch

TOUCHED = PALETTE[4]
CROP = PALETTE[1]
WHITE = "#FFFFFF"
SHADED = "///"
MAP = (180, 360)  # rows and columns


@figure
def chunks(
    cases: Mapping[str, tuple[int, int]],
    crop: Sequence[tuple[int, int]],
    *,
    alt: str,
    title: str = "",
) -> Picture:
    """A map in chunks, once for each way to cut it; the chunks that a crop touches are shaded.

    Args:
        cases: `{"label": (rows, columns) of a chunk}`.
        crop: (first, end) of its rows, and of its columns; the end is no longer in it.
        alt: What the figure shows.
        title: Above the figure.
    """
    picture = canvas(3.5 * len(cases), 2.75, alt=alt, columns=len(cases))
    for axes, (label, chunk) in zip(picture.axes, cases.items()):
        touched = _draw(axes, chunk, crop)
        axes.set_title(f"{label}: {touched} read", loc="left", fontsize=10)
        axes.set_xlabel("longitude")
    picture.axes[0].set_ylabel("latitude")
    signs = [swatch(CROP, edge=1), Rectangle((0, 0), 1, 1, fc=TOUCHED, ec=INK, hatch=SHADED)]
    names = ["the crop", "chunks that are read"]
    picture.figure.legend(signs, names, loc="outside lower center", ncols=2)
    put_headline(picture, title)
    return picture


def _draw(axes: Axes, chunk: tuple[int, int], crop: Sequence[tuple[int, int]]) -> int:
    """The map, its chunks and the crop; returned is how many chunks it touches."""
    num_rows, num_columns = MAP
    height, width = chunk
    (top, bottom), (left, right) = crop
    touched = 0
    for row in range(0, num_rows, height):
        for column in range(0, num_columns, width):
            meets_rows = row < bottom and top < row + height
            is_read = meets_rows and column < right and left < column + width
            touched += is_read
            box = Rectangle((column, row), width, height, edgecolor=INK, facecolor=WHITE)
            if is_read:
                box.set(facecolor=TOUCHED, hatch=SHADED)
            axes.add_patch(box)
    wanted = Rectangle((left, top), right - left, bottom - top, facecolor=CROP, edgecolor=INK)
    axes.add_patch(wanted)
    axes.set_xlim(0, num_columns)
    axes.set_ylim(num_rows, 0)  # the first row on top
    axes.set_xticks(range(0, num_columns + 1, width))
    axes.set_yticks(range(0, num_rows + 1, height))
    axes.set_aspect("equal")
    axes.grid(False)
    return touched
