"""What a grid of H100 nodes costs in one step: bytes between nodes, memory, seconds, idle stages.

Three formulas, which lesson 08 takes from the published work that it names. Nothing overlaps here:
all seconds of communication count.
"""

import itertools
from collections.abc import Iterable
from typing import NamedTuple

from labcode.config import GPTConfig
from labcode.perf.flops import training_flops_per_sample
from labcode.perf.traffic import across_nodes, step_traffic
from labcode.topology import GridShape
from labcode.units import si

RANKS_PER_NODE = 8
NVLINK = 450e9  # bytes per second and GPU, each way; NVIDIA H100 datasheet
INFINIBAND = 50e9  # 400 Gb/s for each GPU; NVIDIA DGX H100 datasheet
FLOPS_PER_S = 0.4 * 989e12  # 40 % of an H100's peak in bfloat16
STATE_BYTES = 16  # of a parameter: weights, gradients, AdamW (Rajbhandari et al. 2020)
ORDERS = ("tp-cp-dp-pp", "tp-cp-pp-dp", "cp-dp-tp-pp")  # what `cheapest` tries


def crossing_bytes(model: GPTConfig, shape: GridShape, ranks_per_node: int, batch: int) -> float:
    """Bytes that cross between nodes in one step, all axes together."""
    total = 0.0
    for sent in step_traffic(model, shape, global_batch=batch).values():
        total += across_nodes(sent, ranks_per_node)
    return total


class Costs(NamedTuple):
    """Of one step on one GPU.

    Args:
        memory_bytes: Weights, gradients and optimizer.
        link_s: {axis: seconds in which its slowest link is busy}.
        leaves_node: {axis: whether some of its links lead to another node}.
        idle_s: Seconds in which a stage of the pipeline has nothing to do.
        compute_s: Seconds of computing.
    """

    memory_bytes: float
    link_s: dict[str, float]
    leaves_node: dict[str, bool]
    idle_s: float
    compute_s: float

    @property
    def lost_s(self) -> float:
        """Seconds on the links and idle."""
        return sum(self.link_s.values()) + self.idle_s


def costs(model: GPTConfig, shape: GridShape, batch: int) -> Costs:
    """What a grid costs.

        memory   16 bytes * parameters / (tp pp)
        link     for each axis: the bytes on a link / its speed; the slowest link decides
        idle     (pp - 1)/m * computing,    m = batch/dp micro-batches of one sequence

    Raises:
        ValueError: The grid does not divide the model or the batch.

    Source: Rajbhandari et al. 2020 (arXiv:1910.02054), section 3.1; Narayanan et al. 2021
        (arXiv:2104.04473), sections 2.2 and 3.
    Held by: tests/unit/test_grid_costs.py
    """
    link_s = {}
    leaves_node = {}
    for axis, sent in step_traffic(model, shape, global_batch=batch).items():
        link_s[axis] = 0.0
        leaves_node[axis] = False
        for (sender, receiver), num_bytes in sent.items():
            is_inside = sender // RANKS_PER_NODE == receiver // RANKS_PER_NODE
            bytes_per_s = NVLINK if is_inside else INFINIBAND
            link_s[axis] = max(link_s[axis], num_bytes / bytes_per_s)
            leaves_node[axis] = leaves_node[axis] or not is_inside
    compute_s = training_flops_per_sample(model) * batch / shape.world_size / FLOPS_PER_S
    micro_batches = batch // shape.dp
    return Costs(
        memory_bytes=STATE_BYTES * model.num_parameters / (shape.tp * shape.pp),
        link_s=link_s,
        leaves_node=leaves_node,
        idle_s=(shape.pp - 1) / micro_batches * compute_s,
        compute_s=compute_s,
    )


def table(found: Costs) -> str:
    """The costs of a grid, one line for each."""
    lines = [f"memory of each GPU  {si(found.memory_bytes, 'B'):>8}"]
    for axis, seconds in found.link_s.items():
        if seconds == 0:
            continue
        place = "leaves the node" if found.leaves_node[axis] else "stays inside the node"
        lines.append(f"links of {axis}         {seconds:6.3f} s   {place}")
    lines.append(f"idle stages         {found.idle_s:6.3f} s")
    lines.append(
        f"lost together       {found.lost_s:6.3f} s   beside {found.compute_s:.2f} s of computing"
    )
    return "\n".join(lines)


def cheapest(
    model: GPTConfig, num_gpus: int, batch: int, tp: int, room_bytes: float, max_pp: int = 8
) -> tuple[GridShape, Costs]:
    """The grid that loses least time among those with a given tp that fit; cp is 1.

    Args:
        model: What is trained.
        num_gpus: A power of two.
        batch: Sequences of a step.
        tp: Size of the axis tp.
        room_bytes: For weights, gradients and optimizer of one GPU.
        max_pp: The most stages.
    """
    best = None
    for shape in _grids(num_gpus, batch, tp, max_pp):
        if STATE_BYTES * model.num_parameters / (shape.tp * shape.pp) > room_bytes:
            continue
        found = costs(model, shape, batch)
        if best is None or found.lost_s < best[1].lost_s:
            best = (shape, found)
    assert best is not None, f"no grid of {num_gpus} GPUs with tp={tp} has room for the model"
    return best


def _grids(num_gpus: int, batch: int, tp: int, max_pp: int) -> Iterable[GridShape]:
    """Grids of powers of two that divide the batch."""
    for pp, order in itertools.product((1, 2, 4, 8), ORDERS):
        dp, rest = divmod(num_gpus, tp * pp)
        if rest == 0 and dp >= 1 and batch % dp == 0 and pp <= max_pp:
            yield GridShape(dp=dp, pp=pp, tp=tp, order=order)
