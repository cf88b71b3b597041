"""What a grid of H100 nodes costs in one step: memory, seconds on the links, idle stages.

The formulas are those of lesson 08 and of the work that it names; the rates are those of the
`dgx-h100` in perf/hardware_data. Nothing overlaps here: all seconds of communication count.
"""

import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Literal, NamedTuple

from labcode.config import GPTConfig
from labcode.perf.alpha_beta import Link
from labcode.perf.cluster import Cluster, load_cluster
from labcode.perf.flops import training_flops_per_sample
from labcode.perf.traffic import across_nodes, step_traffic
from labcode.perf.two_level import Placement, collective_s, places, send_s
from labcode.runtime.units import si
from labcode.topology import GridShape

VALUE_BYTES = 2  # of an activation, a weight, and a gradient that is sent
WEIGHT_AND_GRADIENT_BYTES = 4  # of a parameter, 2 each
OPTIMIZER_BYTES = 12  # of a parameter: AdamW and a weight in float32
ORDERS = ("tp-cp-dp-pp", "tp-cp-pp-dp", "cp-dp-tp-pp")  # what `cheapest` tries


def h100_nodes() -> Cluster:
    """The cluster `dgx-h100` as if a message without bytes cost nothing."""
    measured = load_cluster("dgx-h100")
    return replace(
        measured,
        inside=Link(0.0, measured.inside.beta_bytes_per_s),
        between=Link(0.0, measured.between.beta_bytes_per_s),
    )


def crossing_bytes(model: GPTConfig, shape: GridShape, ranks_per_node: int, batch: int) -> float:
    """Bytes that cross between nodes in one step with sequence parallelism, all axes together."""
    traffic = step_traffic(model, shape, global_batch=batch, sequence_parallel=True)
    return sum(across_nodes(sent, ranks_per_node) for sent in traffic.values())


class Costs(NamedTuple):
    """What one step on one GPU costs.

    Args:
        memory_bytes: Weights, gradients and optimizer.
        link_s: {axis: seconds of its messages}.
        leaves_node: {axis: whether some of its groups lie on several nodes}.
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


def costs(
    model: GPTConfig,
    shape: GridShape,
    batch: int,
    sharded: Literal["nothing", "optimizer", "everything"] = "optimizer",
) -> Costs:
    """What a grid costs, with sequence parallelism.

        memory   (4 + 12/(dp cp)) bytes * parameters / (tp pp)     optimizer sharded
                 16/(dp cp) bytes * parameters / tp                everything sharded
        tp       4 layers/pp all-reduces of act
        pp       act/tp to the next stage, and back
        cp       the ring of keys and values, see `perf.traffic`
        dp       a reduce-scatter of the gradients and an all-gather of the weights over dp and cp;
                 with everything sharded one more all-gather
        idle     (pp - 1)/m * computing,    m = batch/dp micro-batches of one sequence

    Each collective has the rate of the rule of two levels.

    Args:
        model: What is trained.
        shape: The grid; its ranks fill nodes of 8.
        batch: Sequences of a step.
        sharded: What the ranks of dp and cp share out.

    Raises:
        ValueError: The grid does not divide the model or the batch, or everything is to be sharded
            in a pipeline, where weights would have to travel in each micro-batch.

    Source: Rajbhandari et al. 2020 (arXiv:1910.02054), sections 3.1 and 5; Narayanan et al. 2021
        (arXiv:2104.04473), sections 2.2 and 3; `perf.two_level`.
    Held by: tests/unit/test_grid_costs.py
    """
    if sharded == "everything" and shape.pp > 1:
        raise ValueError(
            f"pp={shape.pp} and everything sharded: the weights would travel in each micro-batch; "
            'take pp=1, or sharded="optimizer"'
        )
    cluster = h100_nodes()
    traffic = step_traffic(model, shape, global_batch=batch, sequence_parallel=True)
    place = places(shape, cluster.gpus_per_node)
    samples = batch // shape.dp
    act = samples * model.context_length // shape.cp * model.hidden_size * VALUE_BYTES
    parameters = model.num_parameters / (shape.tp * shape.pp)
    all_reduces = 4 * model.num_layers // shape.pp
    gathers = 2 if sharded == "everything" else 1
    dp_s = collective_s(cluster, "reduce_scatter", place.data, VALUE_BYTES * parameters)
    dp_s += gathers * collective_s(cluster, "all_gather", place.data, VALUE_BYTES * parameters)
    link_s = {
        "tp": all_reduces * collective_s(cluster, "all_reduce", place.tp, act),
        "cp": _ring_s(cluster, place.cp, max(traffic["cp"].values(), default=0.0)),
        "pp": 2 * send_s(cluster, place.pp, act / shape.tp),
        "dp": dp_s,
    }
    compute_s = training_flops_per_sample(model) * batch / shape.world_size
    compute_s /= cluster.gpu.layer_flops_per_s("bfloat16")
    return Costs(
        memory_bytes=parameters * _state_bytes(sharded, shape.dp * shape.cp),
        link_s=link_s,
        leaves_node={
            "tp": place.tp.nodes > 1,
            "cp": place.cp.nodes > 1,
            "pp": place.pp.nodes > 1,
            "dp": place.data.nodes > 1,
        },
        idle_s=(shape.pp - 1) / samples * compute_s,
        compute_s=compute_s,
    )


def _ring_s(cluster: Cluster, place: Placement, num_bytes: float) -> float:
    """Seconds in which a rank passes on what travels round its ring, to one neighbour."""
    if num_bytes == 0:
        return 0.0
    link = cluster.inside if place.nodes == 1 else cluster.between
    return num_bytes / link.beta_bytes_per_s


def _state_bytes(sharded: str, ranks: int) -> float:
    """Bytes of a parameter: 2 + 2 + 12, of which the ranks share out a part."""
    if sharded == "everything":
        return (WEIGHT_AND_GRADIENT_BYTES + OPTIMIZER_BYTES) / ranks
    if sharded == "optimizer":
        return WEIGHT_AND_GRADIENT_BYTES + OPTIMIZER_BYTES / ranks
    return WEIGHT_AND_GRADIENT_BYTES + OPTIMIZER_BYTES


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
        room_bytes: Bytes for weights, gradients and optimizer of one GPU.
        max_pp: The most stages.
    """
    best = None
    for shape in _grids(num_gpus, batch, tp, max_pp):
        found = costs(model, shape, batch)
        if found.memory_bytes > room_bytes:
            continue
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
