"""GridShape is arithmetic; checked against an independent reading of Megatron's rule."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labcode.topology import AXES, GridShape

ORDERS = ["-".join(order) for order in itertools.permutations(AXES)]
sizes = st.integers(1, 4)
shapes = st.builds(GridShape, dp=sizes, pp=sizes, cp=sizes, tp=sizes, order=st.sampled_from(ORDERS))
some_axes = st.sets(st.sampled_from(AXES)).map(sorted)


def megatron_groups(sizes, order, wanted):
    """Rank generation as Megatron's RankGenerator defines it, with an array of ranks.

    The ranks 0..N-1 are laid out with the first axis of `order` fastest; a group varies over the
    wanted axes.
    """
    names = order.split("-")
    ranks = np.arange(math.prod(sizes.values())).reshape([sizes[name] for name in reversed(names)])
    slow_first = list(reversed(names))
    fixed = [at for at, name in enumerate(slow_first) if name not in wanted]
    moving = [at for at, name in enumerate(slow_first) if name in wanted]
    group_size = math.prod(sizes[name] for name in wanted)
    return ranks.transpose(fixed + moving).reshape(-1, group_size).tolist()


@given(shapes, some_axes)
def test_groups_equal_megatron_rank_generation_for_every_shape_and_order(shape, axes):
    expected = megatron_groups({axis: shape.size(axis) for axis in AXES}, shape.order, axes)
    assert shape.groups(*axes) == expected


@given(shapes, st.integers(1, 4), st.sets(st.sampled_from(("ep", "edp", "pp", "cp", "tp"))))
def test_groups_of_experts_are_those_of_a_grid_in_which_dp_is_two_axes(shape, ep, axes):
    """ep is the faster of the two: neighbours of dp keep different experts."""
    cut = GridShape(shape.dp * ep, shape.pp, shape.cp, shape.tp, shape.order, ep=ep)
    fine = {axis: cut.size(axis) for axis in ("pp", "cp", "tp", "ep", "edp")}
    assert fine["ep"] * fine["edp"] == cut.dp
    expected = megatron_groups(fine, shape.order.replace("dp", "ep-edp"), axes)
    assert sorted(cut.groups(*axes)) == sorted(expected)
    if axes.issuperset(("ep", "edp")):
        others = axes - {"ep", "edp"}
        assert sorted(cut.groups(*axes)) == sorted(cut.groups("dp", *others))


def test_groups_equal_those_of_the_example_in_megatron_parallel_state():
    # 16 GPUs, tp=2, pp=4 and so dp=2, as in the docstring of initialize_model_parallel
    shape = GridShape(dp=2, pp=4, tp=2)
    assert shape.groups("dp") == [
        [0, 2],
        [1, 3],
        [4, 6],
        [5, 7],
        [8, 10],
        [9, 11],
        [12, 14],
        [13, 15],
    ]
    assert shape.groups("tp") == [
        [0, 1],
        [2, 3],
        [4, 5],
        [6, 7],
        [8, 9],
        [10, 11],
        [12, 13],
        [14, 15],
    ]
    assert shape.groups("pp") == [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]


@given(shapes, some_axes)
def test_groups_are_a_partition(shape, axes):
    groups = shape.groups(*axes)
    assert sorted(itertools.chain.from_iterable(groups)) == list(range(shape.world_size))
    assert {len(group) for group in groups} == {shape.size(*axes)}


@given(shapes, some_axes)
def test_members_of_a_group_agree_in_every_other_axis(shape, axes):
    for group in shape.groups(*axes):
        outside = {
            tuple(shape.coords(rank)[axis] for axis in AXES if axis not in axes) for rank in group
        }
        assert len(outside) == 1


@given(shapes)
def test_coords_and_rank_are_inverse(shape):
    for rank in range(shape.world_size):
        assert shape.rank(**shape.coords(rank)) == rank


@given(shapes)
def test_the_first_axis_of_the_order_varies_fastest(shape):
    stride = 1
    for axis in shape.axes:
        if shape.size(axis) > 1:
            assert shape.rank(**{axis: 1}) == stride
        stride *= shape.size(axis)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GridShape(tp=0), "tp=0"),
        (lambda: GridShape(order="tp-dp"), "order='tp-dp'"),
        (lambda: GridShape(dp=2).rank(dp=2), "0 to 1"),
        (lambda: GridShape(dp=2).coords(2), "rank 2 is outside"),
        (lambda: GridShape().groups("mp"), "there is no axis 'mp'"),
        (lambda: GridShape().groups("ep", "mp"), "there is no axis 'mp'"),
        (lambda: GridShape(dp=4).rank(ep=1), "there is no axis 'ep'"),
        (lambda: GridShape(ep=0), "ep=0"),
        (lambda: GridShape(dp=6, ep=4), "dp=6 is not divisible by ep=4"),
    ],
)
def test_what_does_not_exist_is_refused_in_one_line(make, message):
    with pytest.raises(ValueError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)
