"""What a table says of a weight is what its sharding says."""

import pytest

from labcode.parallel.sharding import ParamSharding, Shard, gradient_axes, placement
from labcode.topology import GridShape

EXPERTS = {"ep": Shard(0), "tp": Shard(2)}
ROUTER = ParamSharding((8, 64), partial_over=("cp", "tp"))
DOWN = ParamSharding((8, 64, 96), EXPERTS, partial_over=("cp",))
ROWS_TOO = ParamSharding((8, 64, 96), EXPERTS | {"edp": Shard(0)}, partial_over=("cp",))


@pytest.mark.parametrize(
    ("sharding", "shape", "words", "axes"),
    [
        (ROUTER, GridShape(dp=4, ep=4), "replicated", ("dp",)),
        (ROUTER, GridShape(dp=2, tp=2, ep=2), "replicated", ("dp", "tp")),
        (DOWN, GridShape(dp=4), "replicated", ("dp",)),
        (DOWN, GridShape(dp=4, ep=4), "Shard(0) over ep", ()),
        (DOWN, GridShape(dp=4, cp=2, ep=2), "Shard(0) over ep", ("edp", "cp")),
        (DOWN, GridShape(dp=2, tp=2, ep=2), "Shard(0) over ep, Shard(2) over tp", ()),
        (ROWS_TOO, GridShape(dp=4, ep=2), "Shard(0) over ep, Shard(0) over edp", ("edp",)),
    ],
    ids=str,
)
def test_where_a_weight_lives_and_over_which_axes_its_gradient_is_summed(
    sharding, shape, words, axes
):
    assert placement(sharding, shape) == words
    assert gradient_axes(sharding, shape) == axes
