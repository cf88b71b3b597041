"""The process groups of a grid against the arithmetic of GridShape and PyTorch's device mesh."""

import itertools

import pytest

from course.pool.answers import RankError
from labcode.topology import AXES, GridShape

SHAPES_OF_4 = [
    sizes
    for sizes in itertools.product((1, 2, 4), repeat=4)
    if sizes[0] * sizes[1] * sizes[2] * sizes[3] == 4
]
ORDERS = ("tp-cp-dp-pp", "dp-tp-pp-cp", "pp-dp-cp-tp")
COMBINATIONS = [axes for count in range(5) for axes in itertools.combinations(AXES, count)]


def members(shapes):
    """For each shape and combination of axes: the ranks of this rank's group, and their sum."""
    import torch
    import torch.distributed as dist

    from labcode.comm.grid import Grid

    seen = []
    for shape in shapes:
        grid = Grid.create(shape)
        for axes in COMBINATIONS:
            group = grid.group(*axes)
            total = torch.tensor(float(grid.rank))
            dist.all_reduce(total, group=group)
            seen.append((dist.get_process_group_ranks(group), total.item()))
    return seen


@pytest.mark.parametrize("order", ORDERS)
def test_every_group_holds_the_ranks_that_the_shape_says(ranks4, order):
    shapes = [GridShape(*sizes, order=order) for sizes in SHAPES_OF_4]
    wanted = list(itertools.product(shapes, COMBINATIONS))
    for rank, seen in enumerate(ranks4.run(members, shapes)):
        for (shape, axes), (group_ranks, total) in zip(wanted, seen, strict=True):
            expected = next(group for group in shape.groups(*axes) if rank in group)
            assert (group_ranks, total) == (expected, sum(expected)), (shape, axes)


def test_one_and_two_ranks_have_real_groups_too(ranks1, ranks2):
    for pool, shape in ((ranks1, GridShape()), (ranks2, GridShape(tp=2))):
        for rank, seen in enumerate(pool.run(members, [shape])):
            expected = [next(g for g in shape.groups(*axes) if rank in g) for axes in COMBINATIONS]
            assert [group for group, _ in seen] == expected


def meshes(sizes, order):
    """Our mesh and PyTorch's of the same sizes, as lists of ranks, with the groups of each dim."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from labcode.comm.grid import Grid

    shape = GridShape(*sizes, order=order)
    names = shape.axes[::-1]
    ours = Grid.create(shape).mesh
    theirs = init_device_mesh("cpu", [shape.size(axis) for axis in names], mesh_dim_names=names)
    return [
        (mesh.mesh.tolist(), [dist.get_process_group_ranks(mesh.get_group(name)) for name in names])
        for mesh in (ours, theirs)
    ]


@pytest.mark.parametrize("order", ORDERS)
def test_the_mesh_agrees_with_init_device_mesh(ranks4, order):
    for ours, theirs in ranks4.run(meshes, (2, 1, 1, 2), order):
        assert ours == theirs


def split(sizes, order, axis, num_parts):
    import torch.distributed as dist

    from labcode.comm.grid import Grid

    grid = Grid.create(GridShape(*sizes, order=order))
    inside, across = grid.split(axis, num_parts)
    again = grid.split(axis, num_parts)
    assert again == (inside, across)  # made once
    return dist.get_process_group_ranks(inside), dist.get_process_group_ranks(across)


@pytest.mark.parametrize(
    ("sizes", "num_parts", "expected"),
    [
        ((4, 1, 1, 1), 2, [([0, 1], [0, 2]), ([0, 1], [1, 3]), ([2, 3], [0, 2]), ([2, 3], [1, 3])]),
        ((4, 1, 1, 1), 1, [([0, 1, 2, 3], [rank]) for rank in range(4)]),
        ((4, 1, 1, 1), 4, [([rank], [0, 1, 2, 3]) for rank in range(4)]),
        ((2, 1, 1, 2), 2, [([0], [0, 2]), ([1], [1, 3]), ([2], [0, 2]), ([3], [1, 3])]),
    ],
)
def test_an_axis_is_split_into_parts_of_neighbours(ranks4, sizes, num_parts, expected):
    assert ranks4.run(split, sizes, "tp-cp-dp-pp", "dp", num_parts) == expected


def test_an_axis_that_cannot_be_split_is_refused(ranks4):
    with pytest.raises(RankError, match="dp=4 cannot be cut into 3 equal parts: choose a divisor"):
        ranks4.run(split, (4, 1, 1, 1), "tp-cp-dp-pp", "dp", 3)


def coordinates(shape):
    from labcode.comm.grid import Grid

    grid = Grid.create(shape)
    return {axis: grid.coord(axis) for axis in AXES}, {axis: grid.size(axis) for axis in AXES}


def test_coordinates_and_sizes_are_those_of_the_shape(ranks4):
    shape = GridShape(dp=2, tp=2)
    for rank, (coords, sizes) in enumerate(ranks4.run(coordinates, shape)):
        assert coords == shape.coords(rank)
        assert sizes == {"dp": 2, "pp": 1, "cp": 1, "tp": 2}


def grid_error(shape, axis=None):
    from labcode.comm.grid import Grid

    try:
        Grid.create(shape).group(axis)
    except ValueError as error:
        return str(error)
    return None


def test_an_impossible_grid_and_an_unknown_axis_are_refused(ranks2):
    assert set(ranks2.run(grid_error, GridShape(dp=3))) == {
        "dp*pp*cp*tp = 3*1*1*1 = 3 but WORLD_SIZE is 2: change an axis or launch 3 ranks"
    }
    assert "there is no axis 'mp'" in ranks2.run(grid_error, GridShape(dp=2), "mp")[0]


def sum_over_dp(shape):
    """One collective in a grid that a reference cycle keeps alive, as a model with hooks does."""
    import torch
    import torch.distributed as dist

    from labcode.comm.grid import Grid

    grid = Grid.create(shape)
    circle = [grid]
    circle.append(circle)
    total = torch.tensor(float(grid.rank))
    dist.all_reduce(total, group=grid.group("dp"))
    return total.item()


def num_threads():
    import psutil

    return psutil.Process().num_threads()


def test_groups_are_made_once_and_threads_do_not_pile_up(ranks4):
    shape = GridShape(dp=2, tp=2)
    assert ranks4.run(sum_over_dp, shape) == [2.0, 4.0, 2.0, 4.0]
    before = ranks4.run(num_threads)
    for _ in range(20):
        assert ranks4.run(sum_over_dp, shape) == [2.0, 4.0, 2.0, 4.0]
    assert ranks4.run(num_threads) == before


def shared_groups():
    """Whether grids share a group exactly where purpose and ranks are the same."""
    from labcode.comm.grid import Grid

    data = Grid.create(GridShape(dp=4))
    pipeline = Grid.create(GridShape(pp=4))
    again = Grid.create(GridShape(pp=4))
    square = Grid.create(GridShape(dp=2, tp=2))
    other_square = Grid.create(GridShape(pp=2, cp=2, order="cp-pp-dp-tp"))
    return {
        "all ranks along dp and tp": data.group("dp") is square.group("dp", "tp"),
        "a pipeline of four is apart": data.group("dp") is pipeline.group("pp"),
        "the same pipeline": pipeline.group("pp") is again.group("pp"),
        "its ends": pipeline.rank in (1, 2) or pipeline.ends() is again.ends(),
        "pairs of neighbours": square.group("tp") is other_square.group("cp"),
        "this rank alone": square.group() is data.group("tp"),
    }


def test_grids_share_the_groups_of_the_same_ranks(ranks4):
    for seen in ranks4.run(shared_groups):
        assert not seen.pop("a pipeline of four is apart")
        assert all(seen.values()), seen


def time_out_of(shape):
    import torch

    from labcode.comm.grid import Grid

    options = Grid.create(shape).group("tp")._get_backend(torch.device("cpu")).options
    return options._timeout.total_seconds()


def test_groups_wait_as_long_as_the_job_was_told_to(ranks2, ranks4):
    assert ranks4.run(time_out_of, GridShape(dp=2, tp=2)) == [ranks4.timeout_s] * 4
    assert ranks2.run(time_out_of, GridShape(dp=2)) == [ranks2.timeout_s] * 2
