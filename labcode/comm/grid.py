"""The process groups of a grid of ranks (a device mesh).

`GridShape` says which ranks belong together, `Grid` connects them.
"""

import bisect
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from labcode.runtime import bootstrap
from labcode.topology import AXES, EXPERT_AXES, GridShape

# What a group is for, kept in its `group_desc`. A grid reuses a group only if purpose and ranks are
# the same. Pipelines of more than two ranks have a purpose of their own, because they come with a
# second group, of their two ends. A rank that finds the first group knows that the second was made
# as well, even a rank in the middle, which is not in it.
AXIS = "grid: ranks along some axes"
PIPELINE = "grid: ranks of one pipeline"
ENDS = "grid: first and last rank of one pipeline"
PART = "grid: neighbours along a part of an axis"
ACROSS = "grid: ranks at the same place in each part of an axis"
BACKGROUND = "grid: all ranks, for a thread beside training"
PURPOSES = (AXIS, PIPELINE, ENDS, PART, ACROSS, BACKGROUND)


class Fleet(NamedTuple):
    """Which ranks of the job a grid connects: consecutive ones, by default all.

    Args:
        first: The first of them, a global rank.
        among: The shapes of all fleets, as text: the groups of a fleet are found again only among
            the same fleets, so that all ranks of the job decide alike; "" for the whole job.
        is_made: Whether the groups of all these fleets were made by an earlier call.
    """

    first: int = 0
    among: str = ""
    is_made: bool = False

    def groups(self, shape: GridShape, *axes: str) -> list[list[int]]:
        """All groups of the fleet along some axes, as global ranks."""
        found = []
        for group in shape.groups(*axes):
            found.append([self.first + rank for rank in group])
        return found

    def purpose(self, purpose: str) -> str:
        """What a group of this fleet is for."""
        return f"{purpose}{self.among}"


WHOLE_JOB = Fleet()


class Grid:
    """This rank's process group along every combination of axes.

    `Grid.create` makes it; it is passed on explicitly.

    Attributes:
        shape: The `GridShape` behind it.
        rank: This process's rank in the grid: its global rank, or in a fleet the one less the
            first of the fleet.
        fleet: Which ranks of the job it connects.
        mesh: A `DeviceMesh` over the same groups, slowest axis first, for PyTorch's own
            parallelisms.
    """

    def __init__(
        self,
        shape: GridShape,
        rank: int,
        groups: dict[frozenset[str], dist.ProcessGroup],
        ends: dist.ProcessGroup | None,
        mesh: DeviceMesh,
        fleet: Fleet = WHOLE_JOB,
    ) -> None:
        self.shape = shape
        self.fleet = fleet
        self.rank = rank
        self.mesh = mesh
        self._groups = groups
        self._ends = ends

    @classmethod
    def create(cls, shape: GridShape) -> "Grid":
        """Connect the ranks of a grid; every rank of the job calls it, with the same shape.

        Axes of size 1 do not change a group, so combinations that differ by them share one group: a
        job of two axes has 4 groups per rank, not 16. A group of one rank is a real group, and so
        is the group of all ranks.

        Groups of the same ranks are made once per job, however many grids use them, and last as
        long as the job: gloo keeps three threads for each, one of which wakes a hundred times a
        second.

        Communicates: each new group meets once through the store; no tensor is sent.

        Raises:
            ValueError: The grid has another number of ranks than the job.

        Held by: tests/ranks/test_grid.py::test_every_group_holds_the_ranks_that_the_shape_says,
            ::test_groups_are_made_once_and_threads_do_not_pile_up
        """
        shape.check(dist.get_world_size())
        grid = cls._connect(shape, WHOLE_JOB)
        assert grid is not None, "every rank is in the grid of the whole job"
        return grid

    @classmethod
    def fleets(cls, *shapes: GridShape) -> tuple[int, "Grid"]:
        """Cut the job into fleets, each with a grid of its own; every rank of the job calls it.

        The first fleet has the first ranks. `Grid.fleets(GridShape(tp=2, dp=2), GridShape(tp=2))`
        connects ranks 0 to 3, which learn, and 4 and 5, which generate. Between fleets the group of
        all ranks connects them.

        Communicates: each new group meets once through the store; no tensor is sent.

        Returns:
            (number of this rank's fleet, its grid)

        Raises:
            ValueError: The fleets together have another number of ranks than the job.

        Held by: tests/ranks/test_fleets.py::test_every_group_of_a_fleet_has_its_ranks
        """
        sizes = [shape.world_size for shape in shapes]
        if sum(sizes) != dist.get_world_size():
            raise ValueError(
                f"fleets of {' + '.join(map(str, sizes))} = {sum(sizes)} ranks but WORLD_SIZE is "
                f"{dist.get_world_size()}: change a fleet or launch {sum(sizes)} ranks"
            )
        among = f", in fleets of {' and '.join(map(str, shapes))}"
        firsts = [0, *itertools.accumulate(sizes)]
        # A rank knows its own groups alone. All groups of all fleets were made together, so that
        # the group of its whole fleet tells whether the others have theirs.
        own_number = bisect.bisect_right(firsts, dist.get_rank()) - 1
        own_ranks = list(range(firsts[own_number], firsts[own_number + 1]))
        is_made = False
        for purpose in (AXIS, PIPELINE):
            is_made = is_made or _find(own_ranks, purpose + among) is not None
        own = None
        for number, shape in enumerate(shapes):
            grid = cls._connect(shape, Fleet(firsts[number], among, is_made))
            if number == own_number:
                own = grid
        assert own is not None, "every rank is in a fleet"
        return own_number, own

    @classmethod
    def _connect(cls, shape: GridShape, fleet: Fleet) -> "Grid | None":
        """Make the groups of a grid; None on a rank of another fleet, which helps to make them."""
        rank = dist.get_rank() - fleet.first
        pipeline, ends = _pipeline_groups(shape, fleet)
        # {axes of more than one rank: this rank's group along them}
        made = {frozenset(["pp"]): pipeline} if shape.pp > 1 else {}
        groups = {}
        # Every rank goes through the combinations in this order, or two ranks would wait for
        # different groups.
        for axes in _combinations():
            larger = _axes_larger_than_one(shape, axes)
            if larger not in made:
                made[larger] = _own_group(fleet.groups(shape, *larger), fleet)
            groups[frozenset(axes)] = made[larger]
        if not 0 <= rank < shape.world_size:
            return None
        return cls(shape, rank, groups, ends, _mesh(shape, groups, fleet), fleet)

    def group(self, *axes: str) -> dist.ProcessGroup:
        """The group of the ranks that differ from this one along `axes` only.

        `group()` is this rank alone.

        Raises:
            ValueError: An axis that does not exist.
        """
        self.shape.size(*axes)  # names the axes that exist if one does not
        return self._groups[frozenset(axes)]

    def split(self, axis: str, num_parts: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """Cut the groups along an axis into parts of neighbours; every rank of the job calls it.

        With `order="tp-cp-dp-pp"` and tp*cp = 1, 8 ranks of dp in 2 parts are

            inside a part     0 1 2 3 | 4 5 6 7
            across the parts  0 4 | 1 5 | 2 6 | 3 7

        Communicates: each new group meets once through the store; no tensor is sent.

        Args:
            axis: The axis to cut.
            num_parts: The number of parts, a divisor of the size of the axis.

        Returns:
            (the group of this rank's part, the group of the ranks at its place in each part)

        Raises:
            ValueError: The axis cannot be cut into that many equal parts, or the grid is a fleet.

        Held by: tests/ranks/test_grid.py::test_an_axis_is_split_into_parts_of_neighbours
        """
        size = self.size(axis)
        if num_parts < 1 or size % num_parts:
            raise ValueError(
                f"{axis}={size} cannot be cut into {num_parts} equal parts: choose a divisor of it"
            )
        if num_parts == 1:
            return self.group(axis), self.group()
        if num_parts == size:
            return self.group(), self.group(axis)
        self._require_whole_job("split an axis into parts of several ranks")
        # Each rank works out the groups of all ranks, because all ranks take part in making each of
        # them (`_make`), in this one order.
        each = size // num_parts
        parts = []
        across = []
        for ranks in self.shape.groups(axis):
            for first in range(0, size, each):
                parts.append(ranks[first : first + each])
            for place in range(each):
                across.append(ranks[place::each])
        return _part_group(parts, self.rank, PART), _part_group(across, self.rank, ACROSS)

    def ends(self) -> dist.ProcessGroup:
        """The group of the first and the last rank of this rank's pipeline; only they may ask."""
        assert self._ends is not None, (
            f"rank {self.rank} is neither the first nor the last of its pipeline"
        )
        return self._ends

    def background(self) -> dist.ProcessGroup:
        """A group of all ranks for a thread that communicates while training does; over gloo.

        Two threads that use one group would take each other's messages. Every rank of the job asks
        for it at the same time; it is made once.

        Raises:
            ValueError: The grid is a fleet.
        """
        self._require_whole_job("have a group for a thread beside training")
        ranks = list(range(self.shape.world_size))
        found = _find(ranks, BACKGROUND)
        if found is not None:
            return found
        made = dist.new_group(ranks, timeout=_timeout(), backend="gloo", group_desc=BACKGROUND)
        assert isinstance(made, dist.ProcessGroup)
        return made

    def _require_whole_job(self, what: str) -> None:
        # all ranks of the job take part in making a group, and those of other fleets are not here
        if self.fleet != WHOLE_JOB:
            raise ValueError(f"a fleet cannot {what}: only a grid of the whole job can")

    def size(self, *axes: str) -> int:
        """Number of ranks in `group(*axes)`."""
        return self.shape.size(*axes)

    def coord(self, axis: str) -> int:
        """This rank's coordinate along one axis."""
        return self.shape.coord(self.rank, axis)

    def __repr__(self) -> str:
        return f"Grid({self.shape}, rank {self.rank} at {self.shape.coords(self.rank)})"


def group_of(ranks: Sequence[int], *, members_only: bool = False) -> dist.ProcessGroup | None:
    """A group of some ranks that belongs to no grid; every rank of the job calls it.

    Communicates: the new group meets once through the store; no tensor is sent.

    Args:
        ranks: Global ranks.
        members_only: Whether none but these ranks call it.

    Returns:
        The group; None on a rank that is not in it.

    Held by: tests/ranks/test_on_ranks.py::test_results_come_in_the_order_of_each_group
    """
    group = dist.new_group(list(ranks), use_local_synchronization=members_only)
    return group if isinstance(group, dist.ProcessGroup) else None


def made_by_grid(group: dist.ProcessGroup) -> bool:
    """Whether `Grid.create` made a group: it then stays until the job ends, for the next grids."""
    return group.group_desc.startswith(PURPOSES)


def _combinations() -> Iterator[tuple[str, ...]]:
    """All combinations of axes, from none to all; then what experts need of those of dp."""
    for count in range(len(AXES) + 1):
        yield from itertools.combinations(AXES, count)
    yield from (("ep",), ("edp",), ("edp", "cp"), ("ep", "tp"), ("ep", "edp", "tp"))


def _axes_larger_than_one(shape: GridShape, axes: Iterable[str]) -> frozenset[str]:
    """The axes of more than one rank: two combinations with the same ones have the same groups.

    ep and edp together are dp, and so is each of them if the other has size 1.
    """
    larger = {axis for axis in axes if shape.size(axis) > 1}
    if shape.ep == 1 or shape.edp == 1 or larger.issuperset(EXPERT_AXES):
        larger = {"dp" if axis in EXPERT_AXES else axis for axis in larger}
    return frozenset(larger)


def _own_group(all_groups: list[list[int]], fleet: Fleet) -> dist.ProcessGroup | None:
    """This rank's group among some groups along the same axes; made unless an earlier grid has."""
    world = _world()
    if all_groups == [list(range(world.size()))]:
        return world
    # All ranks decide alike: one group along axes of a grid determines all others of the same axes,
    # so where one of them was made before, all were.
    return _found_or_made(all_groups, AXIS, fleet)


def _found_or_made(
    all_groups: list[list[int]], purpose: str, fleet: Fleet
) -> dist.ProcessGroup | None:
    """This rank's group among groups of a fleet; None on a rank that is in none of them."""
    own = _containing(all_groups, dist.get_rank())
    if own is not None:
        found = _find(own, fleet.purpose(purpose))
        if found is not None:
            return found
    elif fleet.is_made:
        return None
    return _make(all_groups, own, fleet.purpose(purpose))


def _part_group(all_groups: list[list[int]], rank: int, purpose: str) -> dist.ProcessGroup:
    """This rank's group among parts of an axis; made unless it was asked for before."""
    own = _containing(all_groups, rank)
    assert own is not None, f"rank {rank} is in none of {all_groups}"
    return _find(own, purpose) or _require_member(_make(all_groups, own, purpose))


def _pipeline_groups(
    shape: GridShape, fleet: Fleet
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """The group of this rank's pipeline, and that of its two ends: None for a rank between them."""
    pipelines = fleet.groups(shape, "pp")
    if shape.pp <= 2:
        # Every rank is an end, so the group of the pipeline is that of its ends.
        group = _own_group(pipelines, fleet)
        return group, group
    # The ends share tied weights: the first stage has the embedding, the last one the head.
    ends_of_all = [[pipeline[0], pipeline[-1]] for pipeline in pipelines]
    own = _containing(pipelines, dist.get_rank())
    found = None if own is None else _find(own, fleet.purpose(PIPELINE))
    if found is not None or (own is None and fleet.is_made):
        own_ends = _containing(ends_of_all, dist.get_rank())
        return found, _find(own_ends, fleet.purpose(ENDS)) if own_ends else None
    pipeline = _found_or_made(pipelines, PIPELINE, fleet)
    ends = _make(ends_of_all, _containing(ends_of_all, dist.get_rank()), fleet.purpose(ENDS))
    return pipeline, ends


def _containing(all_ranks: list[list[int]], rank: int) -> list[int] | None:
    for ranks in all_ranks:
        if rank in ranks:
            return ranks
    return None


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None, "the ranks are not connected: call bootstrap.start() first"
    return world


def _find(ranks: list[int], purpose: str) -> dist.ProcessGroup | None:
    """The group that an earlier grid made of these ranks.

    The cache is torch's own table of groups, which ends with the job's default group: no group of
    ours is in a global.
    """
    for group in dist.distributed_c10d._world.pg_map:
        if group.group_desc == purpose and dist.get_process_group_ranks(group) == ranks:
            return group
    return None


def _make(
    all_groups: list[list[int]], own: list[int] | None, purpose: str
) -> dist.ProcessGroup | None:
    """Make each of some groups that do not overlap; returns this rank's own, None without one."""
    timeout = _timeout()
    if len(all_groups[0]) == 1 and own is None:
        return None
    if len(all_groups[0]) == 1:
        # Nobody to meet: a job of 1000 ranks need not wait 1000 times for all of them.
        alone = dist.new_group(
            own, timeout=timeout, use_local_synchronization=True, group_desc=purpose
        )
        assert isinstance(alone, dist.ProcessGroup)
        return alone
    # All ranks take part in making each group, members or not. Making only one's own is quicker on
    # a large job, but torch then derives its name from the ranks and from how many groups this rank
    # has, which differs between ranks; and a group made again after one was destroyed waits at a
    # dead address.
    own_group = None
    for ranks in all_groups:
        group = dist.new_group(ranks, timeout=timeout, group_desc=purpose)
        if ranks == own:
            assert isinstance(group, dist.ProcessGroup)
            own_group = group
    return own_group


def _require_member(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    assert group is not None, "this rank is in none of the groups"
    return group


def _timeout() -> timedelta:
    """The time-out that the job was started with.

    A new group does not inherit it: torch's default for gloo is half an hour.
    """
    backend = _world()._get_backend(torch.device(bootstrap.device_type()))
    if backend.name() == "fake":  # a dry run has one process, which waits for no other
        return timedelta(seconds=1)
    return backend.options._timeout


def _mesh(
    shape: GridShape, groups: Mapping[frozenset[str], dist.ProcessGroup], fleet: Fleet
) -> DeviceMesh:
    slow_first = shape.axes[::-1]
    sizes = [shape.size(axis) for axis in slow_first]
    ranks = torch.arange(shape.world_size).view(sizes)  # [pp, dp, cp, tp] in the default order
    ranks += fleet.first
    # from_group takes the groups that exist. `init_device_mesh` would make its own: the same ranks
    # connected a second time, and PyTorch's parallelisms would not share a group with ours.
    own = [groups[frozenset([axis])] for axis in slow_first]
    return DeviceMesh.from_group(
        own, bootstrap.device_type(), mesh=ranks, mesh_dim_names=slow_first
    )
