"""What activation checkpointing does over the time of a step: what runs, and what is kept.

Lesson 16 uses it; `plot.activation_checkpointing` is the way in.
"""

from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from course.figures.style import (
    INK,
    PALETTE,
    Picture,
    canvas,
    figure,
    ink_on,
    put_headline,
    put_text,
    swatch,
)

FORWARD = PALETTE[0]
AGAIN = PALETTE[1]
BACKWARD = PALETTE[4]
INPUTS = "#444444"
INSIDE = "#C9C9C9"
MOST_LAYERS = 6  # narrower boxes cannot be read
LAYER_NUMBERS = 16  # what a layer keeps, its input included, for each token and feature


class Slot(NamedTuple):
    """One layer's forward or backward.

    Args:
        name: What the box says: F for forward, B for backward, and the layer.
        kind: "forward", "again" or "backward".
        length: Length in units of one forward.
        inputs: Layer inputs that are kept while it ends, in numbers for each token and feature.
        inside: What is kept of the insides of layers then, in the same unit.
    """

    name: str
    kind: str
    length: int
    inputs: int
    inside: int


def slots(num_layers: int, layer_numbers: int, checkpointed: bool) -> list[Slot]:
    """The step as a row of slots.

    Args:
        num_layers: L.
        layer_numbers: What a layer keeps, its input included.
        checkpointed: Whether each layer's inside is computed again.
    """
    rest = layer_numbers - 1
    row = []
    for layer in range(1, num_layers + 1):
        row.append(Slot(f"F{layer}", "forward", 1, layer, 0 if checkpointed else layer * rest))
    for layer in range(num_layers, 0, -1):
        if checkpointed:
            row.append(Slot(f"F{layer}", "again", 1, layer, rest))
        inside = rest if checkpointed else layer * rest
        row.append(Slot(f"B{layer}", "backward", 2, layer, inside))
    return row


@figure
def activation_checkpointing(num_layers: int = 3, *, alt: str, title: str = "") -> Picture:
    """Forward and backward of some layers, everything kept and with checkpointing.

    Args:
        num_layers: Number of layers of the model.
        alt: What the figure shows.
        title: Above the figure.

    Raises:
        ValueError: More layers than can be drawn.
    """
    if num_layers > MOST_LAYERS:
        raise ValueError(f"{num_layers} layers: at most {MOST_LAYERS} can be read in a row")
    picture = canvas(6.6, 4.3, alt=alt, rows=2)
    plans = {
        "everything is kept": slots(num_layers, LAYER_NUMBERS, checkpointed=False),
        "only the inputs are kept, the rest is computed again": slots(
            num_layers, LAYER_NUMBERS, checkpointed=True
        ),
    }
    top = num_layers * LAYER_NUMBERS
    for axes, (name, plan) in zip(picture.axes, plans.items()):
        _draw(axes, plan, top)
        axes.set_title(name, loc="left", fontsize=10)
        axes.set_xlim(0, 4 * num_layers)
    picture.axes[-1].set_xlabel("time, in forwards of one layer")
    signs = [swatch(INSIDE), swatch(INPUTS)]
    picture.axes[0].legend(signs, ["inside of layers", "layer inputs"], loc="upper right")
    put_headline(picture, title)
    return picture


def _draw(axes: Axes, plan: list[Slot], top: int) -> None:
    """The boxes of what runs above, and below them what is kept at the end of each."""
    colours = {"forward": FORWARD, "again": AGAIN, "backward": BACKWARD}
    at = 0
    most = max(plan, key=_kept)
    for slot in plan:
        colour = colours[slot.kind]
        box = Rectangle((at, 1.22 * top), slot.length, 0.28 * top, facecolor=colour, edgecolor="w")
        axes.add_patch(box)
        middle = at + slot.length / 2
        put_text(axes, middle, 1.36 * top, slot.name, 9, color=ink_on(colour))
        axes.bar(middle, slot.inputs, slot.length, color=INPUTS, lw=0)
        axes.bar(middle, slot.inside, slot.length, bottom=slot.inputs, color=INSIDE, lw=0)
        if slot is most:
            put_text(axes, middle, _kept(slot) + 0.08 * top, f"{_kept(slot)}", 9, color=INK)
        at += slot.length
    axes.set_ylim(0, 1.55 * top)
    axes.set_yticks([0, top // 2, top])
    axes.set_ylabel("numbers kept")


def _kept(slot: Slot) -> int:
    return slot.inputs + slot.inside
