"""The ranks of a job as a grid (device mesh) with named axes: pure arithmetic, no torch.

dp   data parallel: the same model, other data          cp   context parallel: parts of the sequence
pp   pipeline parallel: groups of layers                tp   tensor parallel: parts of each layer

Expert parallelism is no fifth axis: its ranks are ranks of dp, which read samples of their own.

ep   neighbours of dp, with different experts           edp  those of dp that keep the same ones
"""

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

AXES = ("dp", "pp", "cp", "tp")
EXPERT_AXES = ("ep", "edp")  # the two into which dp is cut for experts


@dataclass(frozen=True)
class GridShape:
    """Sizes of the four axes and the order in which global ranks run through them.

    With `order = "tp-cp-dp-pp"` tp varies fastest: ranks 0 and 1 differ in tp first, which puts a
    tensor-parallel group on neighbouring GPUs of one node. The rank at the coordinates c is a
    number in mixed radix:

        rank = c[o0] + n[o0] * (c[o1] + n[o1] * (c[o2] + n[o2] * c[o3]))        o = order, n = sizes

    Args:
        dp, pp, cp, tp: Number of ranks along each axis, at least 1.
        order: All four axes, fastest-varying first, joined by "-".
        ep: Number of neighbours of dp over which experts are divided; a divisor of dp.

    Raises:
        ValueError: A size below 1, an order that does not name each axis once, or an ep that does
            not divide dp.

    Source: Megatron-LM, `megatron/core/parallel_state.py` (RankGenerator), for the meaning of
        `order`; Narayanan et al. 2021 (arXiv:2104.04473), section 3, for which axis belongs inside
        a node.
    Held by: tests/unit/test_topology.py
    """

    dp: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1
    order: str = "tp-cp-dp-pp"
    ep: int = 1

    def __post_init__(self) -> None:
        for axis in (*AXES, "ep"):
            size = getattr(self, axis)
            if not isinstance(size, int) or size < 1:
                raise ValueError(
                    f"{axis}={size!r}: the size of an axis is a whole number, at least 1"
                )
        if sorted(self.order.split("-")) != sorted(AXES):
            raise ValueError(
                f"order={self.order!r}: name each of {', '.join(AXES)} once, fastest first, "
                "as 'tp-cp-dp-pp'"
            )
        if self.dp % self.ep:
            raise ValueError(
                f"dp={self.dp} is not divisible by ep={self.ep}: experts are divided over "
                "neighbours of dp, so choose a divisor of it"
            )

    @property
    def edp(self) -> int:
        """How many ranks of dp keep the same experts."""
        return self.dp // self.ep

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes, fastest-varying first."""
        return tuple(self.order.split("-"))

    @property
    def world_size(self) -> int:
        """Number of ranks: the product of all sizes."""
        return self.size(*AXES)

    def size(self, *axes: str) -> int:
        """Number of ranks along the given axes taken together, 1 for none.

        Raises:
            ValueError: An unknown axis.
        """
        _check_axes(axes, (*AXES, *EXPERT_AXES))
        return math.prod(getattr(self, axis) for axis in axes)

    def check(self, world_size: int) -> "GridShape":
        """The shape itself, if a job of `world_size` ranks fills it.

        Raises:
            ValueError: The sizes do not multiply to the number of ranks.
        """
        if self.world_size != world_size:
            raise ValueError(
                f"dp*pp*cp*tp = {self.dp}*{self.pp}*{self.cp}*{self.tp} = {self.world_size} "
                f"but WORLD_SIZE is {world_size}: change an axis or launch "
                f"{self.world_size} ranks"
            )
        return self

    def coords(self, rank: int) -> dict[str, int]:
        """The coordinates of a global rank, `{axis: coordinate}`, fastest axis first.

        Raises:
            ValueError: The rank is not in the grid.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(
                f"rank {rank} is outside a grid of {self.world_size} ranks "
                f"(0 to {self.world_size - 1})"
            )
        # the digits of the number, lowest first: each division takes off the fastest axis left
        coords = {}
        for axis in self.axes:
            rank, coords[axis] = divmod(rank, self.size(axis))
        return coords

    def rank(self, **coords: int) -> int:
        """The global rank at the given coordinates; an axis left out counts as 0.

        Raises:
            ValueError: An unknown axis, or a coordinate outside its axis.
        """
        _check_axes(coords)
        # Horner's rule, from the slowest axis to the fastest, as in the formula of the class
        rank = 0
        for axis in reversed(self.axes):
            coord = coords.get(axis, 0)
            size = self.size(axis)
            if not 0 <= coord < size:
                raise ValueError(
                    f"{axis}={coord} is outside an axis of size {size} (0 to {size - 1})"
                )
            rank = rank * size + coord
        return rank

    def groups(self, *axes: str) -> list[list[int]]:
        """All groups along `axes`: the ranks of a group agree in every other axis.

        `groups("tp")` are the tensor-parallel groups, `groups("dp", "cp")` those that share a
        weight's gradient, and `groups()` is every rank alone. The groups are ordered by their first
        rank; the ranks of a group run through `axes` in the order of the grid, whatever order the
        caller names them in.

        Raises:
            ValueError: An unknown axis.
        """
        _check_axes(axes, (*AXES, *EXPERT_AXES))
        if not set(EXPERT_AXES).isdisjoint(axes):
            return self._groups_of_experts(axes)
        # dp=2, tp=2: groups("tp") is [[0, 1], [2, 3]], and groups("dp") is [[0, 2], [1, 3]]
        inside = [axis for axis in self.axes if axis in axes]
        outside = [axis for axis in self.axes if axis not in axes]
        groups = []
        for fixed in self._coords_over(outside):
            group = [self.rank(**fixed, **moving) for moving in self._coords_over(inside)]
            groups.append(group)
        return groups

    def coord(self, rank: int, axis: str) -> int:
        """The coordinate of a global rank along one axis, which may be ep or edp."""
        # Neighbours of dp have different experts, so ep is the fast digit of the coordinate.
        dp = self.coords(rank)["dp"]
        of_experts = {"ep": dp % self.ep, "edp": dp // self.ep}
        _check_axes([axis], (*AXES, *EXPERT_AXES))
        return of_experts[axis] if axis in of_experts else self.coords(rank)[axis]

    def _groups_of_experts(self, axes: Iterable[str]) -> list[list[int]]:
        """The groups along axes of which some are ep or edp: ranks that agree in all other axes."""
        # dp is not among the axes that are compared, since ep and edp take its place. A pass over
        # all ranks, because ep and edp are digits of dp and no axes of the mixed radix.
        fixed = [axis for axis in ("pp", "cp", "tp", *EXPERT_AXES) if axis not in axes]
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            place = tuple(self.coord(rank, axis) for axis in fixed)
            groups.setdefault(place, []).append(rank)
        return list(groups.values())

    def _coords_over(self, axes: list[str]) -> Iterator[dict[str, int]]:
        """All coordinates over `axes` as `{axis: coordinate}`, the first axis varying fastest."""
        # itertools.product varies its last argument fastest, so it gets the axes in reverse
        slow_first = axes[::-1]
        for coords in itertools.product(*(range(self.size(axis)) for axis in slow_first)):
            yield dict(zip(slow_first, coords, strict=True))

    def __str__(self) -> str:
        sizes = " x ".join(f"{axis}={self.size(axis)}" for axis in AXES)
        experts = f", ep={self.ep} of dp" if self.ep > 1 else ""
        return f"{sizes}{experts} ({self.order})"


def _check_axes(axes: Iterable[str], known: tuple[str, ...] = AXES) -> None:
    for axis in axes:
        if axis not in known:
            raise ValueError(f"there is no axis {axis!r}: the axes are {', '.join(known)}")
