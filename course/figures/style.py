"""What all figures share: size, font, colours, and `Picture`, a figure with its alternative text.

A figure function is decorated with `@figure`, which switches the style on while it draws, and
begins with `canvas`:

    @figure
    def one_line(values: Sequence[float], *, alt: str) -> Picture:
        picture = canvas(6.2, 3.2, alt=alt)
        picture.axes[0].plot(values)
        return picture
"""

import base64
import functools
import html
import io
import struct
from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from PIL import Image

from course.figures.caption import with_caption

# The colours of Okabe and Ito, which colour-blind readers can tell apart. In this order neighbours
# also differ in lightness, so that they stay different in a black-and-white print.
PALETTE = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#F0E442",
    "#999999",
)
MEMORY_COLOURS = {  # what memory is for, in every figure the same
    "parameters": PALETTE[0],
    "optimizer": PALETTE[5],
    "gradients": PALETTE[2],
    "activations": PALETTE[1],
    "logits": PALETTE[3],
    "temporary": "#BBBBBB",
}
INK = "#222222"  # text and emphasized lines
PALE = "#F2F2F2"  # backgrounds
RULE = "#888888"  # thin lines
MARKERS = "osD^vPX*"
STYLES = ("-", "--", "-.", ":")

DPI = 192  # of the PNG; a browser shows it at 96, so it is sharp on screens of twice as many dots
NUM_COLOURS = 96  # of the PNG's palette
# Round a figure: white, with a margin, as letters at its very edge are hard to read on a dark page.
CARD = "background-color: #ffffff; padding: 8px; border-radius: 6px"

STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same letters on every machine
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": RULE,
    "axes.labelcolor": INK,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.facecolor": "white",  # a line behind the legend must not run through its words
    "legend.edgecolor": "none",
    "legend.framealpha": 0.9,
    "legend.fontsize": 9,
}

Point = tuple[float, float]


class Picture:
    """A figure with its alternative text; as the last expression of a cell it is shown, once.

    JupyterLab shows a plain PNG without alternative text, so the output is an HTML image with one,
    on white also where the page is dark. The plain PNG lies beside it, with the text in its
    metadata, for what strips HTML: GitHub, PDF, tools that take figures out of notebooks.

    Args:
        figure: The drawing.
        alt: What it shows, in one sentence.

    Raises:
        ValueError: `alt` is no description.
    """

    def __init__(self, figure: Figure, alt: str) -> None:
        self.figure = figure
        self.alt = described(alt)

    @property
    def axes(self) -> list[Axes]:
        """The axes of the figure, row by row."""
        return self.figure.axes

    def png(self) -> bytes:
        """The picture as PNG, the same bytes at each call."""
        with mpl.rc_context(STYLE):
            self.figure.draw_without_rendering()
            # Each drawing would move the axes a little further, and the bytes would change.
            self.figure.set_layout_engine("none")
            drawn = io.BytesIO()
            self.figure.savefig(drawn, format="png", dpi=DPI, bbox_inches="tight")
        drawn.seek(0)
        image = Image.open(drawn).convert("RGB")
        # A palette makes the file a third of the size: notebooks hold many pictures.
        image = image.quantize(NUM_COLOURS, dither=Image.Dither.NONE)
        packed = io.BytesIO()
        image.save(packed, format="png", optimize=True)
        return packed.getvalue()

    def save(self, path: str | PathLike[str]) -> None:
        """Write the PNG to `path`."""
        with open(path, "wb") as file:
            file.write(self.png())

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict, dict]:
        png = self.png()
        width, height = (pixels * 96 // DPI for pixels in struct.unpack(">II", png[16:24]))
        source = base64.b64encode(png).decode()
        alt = html.escape(self.alt)
        image = (
            f'<img alt="{alt}" width="{width}" style="{CARD}" src="data:image/png;base64,{source}">'
        )
        data = {"text/html": image, "image/png": source, "text/plain": repr(self)}
        return data, {"image/png": {"width": width, "height": height, "alt": self.alt}}

    def __repr__(self) -> str:
        return f"Figure: {self.alt}"


def figure(draw: Callable[..., Picture]) -> Callable[..., Picture]:
    """Decorate a function that draws: with its style, and its words from `caption="08.orders"`.

    matplotlib reads its settings when a text, a tick or a legend is made, so the style must be on
    for the whole drawing, not only when the figure is created.
    """
    styled = mpl.rc_context(STYLE)(draw)

    @functools.wraps(draw)
    def drawn(*args: Any, caption: str = "", **keywords: Any) -> Picture:
        if caption:
            keywords = with_caption(caption, keywords)
        return styled(*args, **keywords)

    return drawn


def canvas(
    width_in: float,
    height_in: float,
    *,
    alt: str,
    rows: int = 1,
    columns: int = 1,
    width_ratios: Sequence[float] | None = None,
) -> Picture:
    """An empty picture with `rows` x `columns` axes.

    pyplot does not know it: the inline backend would show it a second time.

    Args:
        width_in: Inches.
        height_in: Inches.
        alt: What the picture shows.
        rows: Number of rows of axes.
        columns: Number of columns of axes.
        width_ratios: Relative widths of the columns; None: all the same.
    """
    drawing = Figure(figsize=(width_in, height_in), layout="constrained")
    FigureCanvasAgg(drawing)
    drawing.subplots(rows, columns, squeeze=False, width_ratios=width_ratios)
    return Picture(drawing, alt)


def put_headline(picture: Picture, title: str) -> None:
    """One title over several panels, at the left; "" is none."""
    if title:
        picture.figure.suptitle(title, x=0.01, ha="left", fontsize=11)


def described(alt: str) -> str:
    """The alternative text, checked.

    Raises:
        ValueError: It is missing, or too short to describe anything.
    """
    if not isinstance(alt, str) or len(alt.split()) < 4:
        raise ValueError(
            f"alt={alt!r}: say in one sentence what the figure shows, for those who cannot see it"
        )
    return alt


def ink_on(colour: str) -> str:
    """Black or white, whichever is legible on `colour`.

    Source: WCAG 2.2, relative luminance (at 0.18 black and white have the same contrast).
    """
    red, green, blue = bytes.fromhex(colour[1:])
    luminance = 0.2126 * _linear(red) + 0.7152 * _linear(green) + 0.0722 * _linear(blue)
    return "#FFFFFF" if luminance < 0.18 else "#000000"


def _linear(channel: int) -> float:
    """The light that a channel of an sRGB colour, 0 to 255, stands for: 0 to 1."""
    value = channel / 255
    if value <= 0.04045:
        return value / 12.92
    return ((value + 0.055) / 1.055) ** 2.4


def colour_of(i: int) -> str:
    """The i-th colour: the palette, then the palette mixed with white, then from the start."""
    colour = PALETTE[i % len(PALETTE)]
    rounds = i // len(PALETTE)
    if rounds % 2 == 0:
        return colour
    mixed = [(channel + 255) // 2 for channel in bytes.fromhex(colour[1:])]
    return "#" + bytes(mixed).hex().upper()


def blank(axes: Axes) -> None:
    """Remove ticks, spines and grid: a drawing, not a plot."""
    axes.set_axis_off()
    axes.set_aspect("equal")


def swatch(colour: str, edge: float = 0) -> Rectangle:
    """The sign of a colour in a legend, with an edge of `edge` points in the same colour."""
    return Rectangle((0, 0), 1, 1, color=colour, lw=edge)


def put_text(axes: Axes, x: float, y: float, text: str, size: float, **style: Any) -> Text:
    """Write `text` in `size` points at (x, y), centred there unless `style` says otherwise."""
    style.setdefault("ha", "center")
    style.setdefault("va", "center")
    return axes.text(x, y, text, fontsize=size, **style)
