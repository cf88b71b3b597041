"""The ground under every figure: size, letters, colours, and a picture that carries its alternative text."""

import base64
import html
import io

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

# Okabe and Ito's colours, which stay apart for colour-blind readers; the order keeps neighbours far apart in lightness too.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
INK, PALE, RULE = "#222222", "#F2F2F2", "#888888"
MARKERS, STYLES = "osD^vPX*", ("-", "--", "-.", ":")
DPI, COLOURS = 144, 96

STYLE = {
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
    "legend.frameon": False,
    "legend.fontsize": 9,
}


class Picture:
    """A figure with its alternative text; the last expression of a cell shows it, once.

    JupyterLab draws a plain PNG without alternative text, so the output is an HTML image that has one.
    """

    def __init__(self, figure: Figure, alt: str):
        self.figure, self.alt = figure, alt

    @property
    def axes(self):
        """The axes of the figure, for the one thing that a plot function does not offer."""
        return self.figure.axes

    def png(self) -> bytes:
        """The picture as PNG, the same bytes at each call."""
        drawn, packed = io.BytesIO(), io.BytesIO()
        with mpl.rc_context(STYLE):
            self.figure.draw_without_rendering()
            self.figure.set_layout_engine(
                "none"
            )  # each drawing would move the axes a little further
            self.figure.savefig(drawn, format="png", dpi=DPI, bbox_inches="tight")
        drawn.seek(0)
        image = (
            Image.open(drawn).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
        )  # a third of the size
        image.save(packed, format="png", optimize=True)
        return packed.getvalue()

    def save(self, path) -> None:
        """Write the PNG to `path`."""
        with open(path, "wb") as file:
            file.write(self.png())

    def _repr_mimebundle_(self, include=None, exclude=None):
        png = self.png()
        width = (
            int.from_bytes(png[16:20], "big") * 96 // DPI
        )  # CSS pixels; the PNG is finer than the screen
        source = base64.b64encode(png).decode()
        image = f'<img alt="{html.escape(self.alt)}" width="{width}" src="data:image/png;base64,{source}">'
        return {"text/html": image, "text/plain": f"Figure: {self.alt}"}

    def __repr__(self):
        return f"Figure: {self.alt}"


def canvas(width_in: float, height_in: float, columns: int = 1):
    """An empty figure and its list of axes, in the style of the course; not known to pyplot, so nothing shows it twice."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width_in, height_in), layout="constrained")
        FigureCanvasAgg(figure)
        return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def described(alt: str) -> str:
    """The alternative text, checked.

    Raises:
        ValueError: There is none worth the name.
    """
    if not isinstance(alt, str) or len(alt.split()) < 4:
        raise ValueError(
            f"alt={alt!r}: say in one sentence what the figure shows, for those who cannot see it"
        )
    return alt


def ink_on(colour: str) -> str:
    """Black or white, whichever is legible on `colour`.

    Source: WCAG 2.2, relative luminance (0.18 is where both have the same contrast).
    """
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return (
        "#FFFFFF"
        if 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] < 0.18
        else "#000000"
    )


def colour_of(i: int) -> str:
    """The i-th colour: the palette, then the palette half mixed with white, and so on in turn."""
    colour = PALETTE[i % len(PALETTE)]
    if i // len(PALETTE) % 2 == 0:
        return colour
    return "#" + "".join(f"{(int(colour[k : k + 2], 16) + 255) // 2:02X}" for k in (1, 3, 5))


def blank(axes) -> None:
    """Remove ticks, spines and grid: a drawing, not a plot."""
    axes.set_axis_off()
    axes.set_aspect("equal")
