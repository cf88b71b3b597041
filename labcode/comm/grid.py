"""The process groups of a grid of ranks: `GridShape` says who belongs together, `Grid` connects them."""

import itertools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from labcode.comm import bootstrap
from labcode.topology import AXES, GridShape


class Grid:
    """This rank's process group along every combination of axes. Made by `Grid.create`, passed on explicitly.

    Attributes:
        shape: The `GridShape` behind it.
        rank: This process's global rank.
        mesh: A `DeviceMesh` over the same groups, slowest axis first, for PyTorch's own parallelisms.
    """

    def __init__(
        self,
        shape: GridShape,
        rank: int,
        groups: dict[frozenset[str], dist.ProcessGroup],
        ends,
        mesh: DeviceMesh,
    ):
        self.shape, self.rank, self.mesh = shape, rank, mesh
        self._groups, self._ends = groups, ends

    @classmethod
    def create(cls, shape: GridShape) -> "Grid":
        """Make the groups; every rank of the job calls it, with the same shape.

        Axes of size 1 do not change a group, so combinations that differ by them share one group: a job of two axes has
        4 groups per rank, not 16. A group of one rank is a real group.

        Communicates: each new group meets once through the store; no tensor is sent.
        Raises:
            ValueError: The grid has another number of ranks than the job.
        Held by: tests/ranks/test_grid.py::test_every_group_holds_the_ranks_that_the_shape_says
        """
        shape.check(dist.get_world_size())
        rank = dist.get_rank()
        made: dict[frozenset[str], dist.ProcessGroup] = {}  # by the axes that count
        groups = {}
        for axes in (
            _combinations()
        ):  # the same order on every rank, or two ranks would wait for different groups
            larger = frozenset(axis for axis in axes if shape.size(axis) > 1)
            if larger not in made:
                made[larger] = _own_group(shape.groups(*axes), rank)
            groups[frozenset(axes)] = made[larger]
        ends = groups[frozenset(["pp"])]
        if shape.pp > 2:
            ends = _own_group(
                [[pipeline[0], pipeline[-1]] for pipeline in shape.groups("pp")], rank
            )
        return cls(shape, rank, groups, ends, _mesh(shape, groups))

    def group(self, *axes: str) -> dist.ProcessGroup:
        """The group of the ranks that differ from this one along `axes` only; `group()` is this rank alone.

        Raises:
            ValueError: An axis that does not exist.
        """
        self.shape.size(*axes)  # names the axes that exist if one does not
        return self._groups[frozenset(axes)]

    def ends(self) -> dist.ProcessGroup:
        """The group of the first and the last rank of this rank's pipeline; only they may ask."""
        assert self._ends is not None, (
            f"rank {self.rank} is neither the first nor the last of its pipeline"
        )
        return self._ends

    def size(self, *axes: str) -> int:
        """Number of ranks in `group(*axes)`."""
        return self.shape.size(*axes)

    def coord(self, axis: str) -> int:
        """This rank's coordinate along one axis."""
        self.shape.size(axis)
        return self.shape.coords(self.rank)[axis]

    def __repr__(self):
        return f"Grid({self.shape}, rank {self.rank} at {self.shape.coords(self.rank)})"


def _own_group(all_groups, rank) -> dist.ProcessGroup | None:
    """Make each of some groups that do not overlap and return the one that this rank is in."""
    if (
        len(all_groups[0]) == 1
    ):  # nobody to meet: a job of 1000 ranks need not wait 1000 times for all of them
        return dist.new_group([rank], use_local_synchronization=True)
    # All ranks take part in making each group, members or not. Making only one's own is quicker on a large job, but torch
    # then derives its name from the ranks alone, and a group made again after one was destroyed waits at a dead address.
    made = {tuple(ranks): dist.new_group(ranks) for ranks in all_groups}
    return next((group for ranks, group in made.items() if rank in ranks), None)


def _combinations():
    return itertools.chain.from_iterable(
        itertools.combinations(AXES, count) for count in range(len(AXES) + 1)
    )


def _mesh(shape, groups) -> DeviceMesh:
    slow_first = shape.axes[::-1]
    ranks = torch.arange(shape.world_size).view([shape.size(axis) for axis in slow_first])
    own = [groups[frozenset([axis])] for axis in slow_first]
    return DeviceMesh.from_group(
        own, bootstrap.device_type(), mesh=ranks, mesh_dim_names=slow_first
    )
