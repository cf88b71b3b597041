"""The drawings of activation checkpointing and of fragments show what the formula says."""

import pytest

from course.figures import checkpointing, plot

ALT = "A sentence of some words"


@pytest.mark.parametrize("layers", [1, 3, 6])
def test_the_most_is_that_of_the_formulas(layers):
    whole = checkpointing.slots(layers, 16, checkpointed=False)
    again = checkpointing.slots(layers, 16, checkpointed=True)
    assert max(slot.inputs + slot.inside for slot in whole) == 16 * layers
    assert max(slot.inputs + slot.inside for slot in again) == layers + 15
    assert sum(slot.length for slot in whole) == 3 * layers
    assert sum(slot.length for slot in again) == 4 * layers


def test_each_layer_runs_forward_again_right_before_its_backward():
    names = [slot.name for slot in checkpointing.slots(3, 16, checkpointed=True)]
    assert names == ["F1", "F2", "F3", "F3", "B3", "F2", "B2", "F1", "B1"]
    picture = plot.activation_checkpointing(3, alt=ALT)
    drawn = [text.get_text() for text in picture.axes[1].texts]
    assert [text for text in drawn if not text.isdigit()] == names
    assert "18" in drawn


def test_more_layers_than_can_be_read_are_refused():
    with pytest.raises(ValueError, match="7 layers: at most 6"):
        plot.activation_checkpointing(7, alt=ALT)


def test_free_blocks_are_added_up_and_none_holds_the_request():
    segments = [[(1.5, True), (2.0, False)], [(1.0, False), (0.5, True)]]
    above, below = plot.fragments(segments, 2.5, alt=ALT).axes
    assert above.get_title(loc="left") == "3 GiB free, the largest free block has 2"
    assert "request of 2.5 GiB: fits nowhere" in [text.get_text() for text in above.texts]
    assert [text.get_text() for text in below.texts] == ["1.5", "0.5", "2.5", "0.5 free"]
