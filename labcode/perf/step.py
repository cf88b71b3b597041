"""What a step on a emulated cluster should take, from the shape of the model and the grid alone: nothing is run here.

The plainest model there is: m micro-batches go through pp stages, each stage computes, takes part in all-reduces and sends;
nothing overlaps, all stages are alike. What runs is in `teach.labs.emulate`.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from labcode.config import GPTConfig
from labcode.perf import alpha_beta as comm
from labcode.perf.alpha_beta import Link
from labcode.perf.flops import training_flops_per_sample
from labcode.perf.pipeline import StageTimes, Timeline, simulate
from labcode.schedules import schedule
from labcode.topology import GridShape

VALUE_BYTES = 4  # float32


@dataclass(frozen=True)
class ClusterModel:
    """Nodes full of devices; ranks fill them in order.

    Args:
        flops_per_s: Of one device, in matrix products; all else counts nothing.
        inside, between: A link inside a node, and one between two nodes.
        ranks_per_node: Devices of a node.
    """

    flops_per_s: float
    inside: Link
    between: Link
    ranks_per_node: int = 2

    def link(self, members: Sequence[int]) -> Link:
        """The slowest that a message within these global ranks has to cross."""
        return (
            self.inside
            if len({rank // self.ranks_per_node for rank in members}) == 1
            else self.between
        )


def iteration_parts(
    model: GPTConfig, shape: GridShape, global_batch: int, micro_batch: int, cluster: ClusterModel
) -> dict[str, float]:
    """What a step of `emulate.timed_steps` takes by the plain model, in seconds, as {"compute", "tp", "pp", "bubble", "dp"}.

        a micro-batch on one stage   c = flops / (tp pp rate)
                                     t = (4 L + 2)/pp all-reduces of act over tp
                                     s = one message of act to the next stage, or back        (pp > 1)
        step                         (m + pp - 1) (c + t + s)  +  one all-reduce of the gradients over dp
        act                          micro-batch * tokens * hidden * 4 bytes

    The bubble is the share of pp - 1 in it. Embedding and head make the 2, one on the first and one on the last stage, so it
    is exact for pp up to 2. The loss and its small messages are left out; nothing overlaps.

    Args:
        model: Untied embeddings, which would be one more message.
        shape: Grid of dp, pp and tp.
        global_batch, micro_batch: As in `emulate.timed_steps`.
        cluster: Its speeds; ranks fill its nodes in order.
    """
    m = global_batch // (micro_batch * shape.dp)
    act = micro_batch * model.context_length * model.hidden_size * VALUE_BYTES
    links = {axis: _slowest(cluster, shape.groups(axis)) for axis in ("tp", "pp", "dp")}
    compute_s = (
        training_flops_per_sample(model) * micro_batch / (shape.tp * shape.pp) / cluster.flops_per_s
    )
    reduce_s = comm.time_s("all_reduce", shape.tp, act, links["tp"])
    tp_s = (4 * model.num_layers + 2) / shape.pp * reduce_s
    pp_s = comm.time_s("send", 2, act, links["pp"]) if shape.pp > 1 else 0.0
    gradient_bytes = model.num_parameters / (shape.tp * shape.pp) * VALUE_BYTES
    dp_s = comm.time_s("all_reduce", shape.dp, gradient_bytes, links["dp"])
    bubble_s = (shape.pp - 1) * (compute_s + tp_s + pp_s)
    return {
        "compute": m * compute_s,
        "tp": m * tp_s,
        "pp": m * pp_s,
        "bubble": bubble_s,
        "dp": dp_s,
    }


def time_line(
    model: GPTConfig, shape: GridShape, global_batch: int, micro_batch: int, cluster: ClusterModel
) -> Timeline:
    """The time line of a step of `emulate.timed_steps` with 1F1B by the same plain model, one row for each stage of the pipeline.

    As there, a sender is kept from its work while its message is on the way, and a bar ends when it begins to send.
    """
    m = global_batch // (micro_batch * shape.dp)
    parts, last = iteration_parts(model, shape, global_batch, micro_batch, cluster), shape.pp - 1
    third_s, send_s = (parts["compute"] + parts["tp"]) / m / 3, parts["pp"] / m
    sends = {"F": lambda stage: send_s * (stage < last), "B": lambda stage: send_s * (stage > 0)}
    times = [
        StageTimes(third_s + sends["F"](s), third_s, third_s + sends["B"](s))
        for s in range(shape.pp)
    ]
    rows = simulate(schedule("1f1b", shape.pp, m), times).rows
    return Timeline(
        tuple(
            row._replace(stop_s=row.stop_s - sends[row.action.kind](row.action.stage))
            for row in rows
        )
    )


def _slowest(cluster, groups):
    """Of all links between neighbours of a ring."""
    pairs = [pair for group in groups for pair in itertools.pairwise([*group, group[0]])]
    return max(
        (cluster.link(pair) for pair in pairs),
        key=lambda link: link.alpha_s + 1 / link.beta_bytes_per_s,
    )
