"""The emulated link of lesson 13: no step is shorter than its messages and its computing allow."""

import itertools

import pytest

from course.labs.l13_units import Speeds, play

SPEEDS = Speeds(forward_s=0.004, backward_s=0.008, message_s=0.003)
LAYERS = 3


@pytest.mark.parametrize(
    ("options", "most_whole", "shortest_s"),
    [
        ({"prefetch": False}, 1, 3 * 0.007 + 0.011 + 2 * 0.014 + 0.003),
        ({}, 2, 0.003 + 3 * 0.004 + 0.003 + 3 * 0.008 + 0.003),
        ({"reshard": False}, 3, 0.003 + 3 * 0.004 + 3 * 0.008 + 0.003),
        ({"layers_per_unit": 3}, 3, 0.009 + 3 * 0.004 + 0.009 + 3 * 0.008 + 0.009),
    ],
    ids=str,
)
def test_what_is_whole_and_what_a_step_takes_at_least(ranks2, options, most_whole, shortest_s):
    played = play(ranks2, LAYERS, SPEEDS, **options)
    assert played.most_whole == most_whole
    assert played.step_s >= shortest_s * 0.999


def test_a_layer_computes_when_its_weights_are_there_and_the_link_carries_one_message(ranks2):
    spans = play(ranks2, LAYERS, SPEEDS).spans
    computed = [label for lane, label, _, _ in spans if lane == "device"]
    assert computed == ["F1", "F2", "F3", "B3", "B2", "B1"]
    on_link = [(label, start, stop) for lane, label, start, stop in spans if lane == "link"]
    labels = [label for label, _, _ in on_link]
    assert [label for label in labels if label[0] == "G"] == ["G1", "G2", "G3", "G3", "G2", "G1"]
    assert [label for label in labels if label[0] == "R"] == ["R3", "R2", "R1"]
    for (_, _, stop), (_, start, _) in itertools.pairwise(on_link):
        assert start >= stop - 1e-9
    first_gather = on_link[0]
    first_forward = next(start for _, label, start, _ in spans if label == "F1")
    assert first_forward >= first_gather[2]
