"""How long a training step should take on a cluster, from the shapes of model and grid alone.

The plainest model there is: m micro-batches go through pp equal stages; each stage computes, takes
part in all-reduces and sends; nothing overlaps. Nothing is run here: `teach.labs.emulate` runs such
a step and measures it.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from labcode.config import GPTConfig
from labcode.perf import alpha_beta
from labcode.perf.alpha_beta import Link
from labcode.perf.flops import training_flops_per_sample
from labcode.perf.pipeline import Bar, StageTimes, Timeline, simulate
from labcode.schedules import schedule
from labcode.topology import GridShape

VALUE_BYTES = 4  # float32


@dataclass(frozen=True)
class ClusterModel:
    """Nodes full of devices; ranks fill them in order.

    Args:
        flops_per_s: Of one device, in matrix products; everything else takes no time.
        inside: A link inside a node.
        between: A link between two nodes.
        ranks_per_node: Devices of a node.
    """

    flops_per_s: float
    inside: Link
    between: Link
    ranks_per_node: int = 2

    def link(self, members: Sequence[int]) -> Link:
        """The slowest link that a message within these global ranks has to cross."""
        nodes = {rank // self.ranks_per_node for rank in members}
        return self.inside if len(nodes) == 1 else self.between


def iteration_parts(
    model: GPTConfig, shape: GridShape, global_batch: int, micro_batch: int, cluster: ClusterModel
) -> dict[str, float]:
    """The seconds of a step by the plain model, as {"compute", "tp", "pp", "bubble", "dp"}.

        a micro-batch on one stage   c = flops / (tp pp rate)
                                     t = (4 L + 2)/pp all-reduces of act over tp
                                     s = one message of act to the next stage, or back   (pp > 1)
        step                         (m + pp - 1) (c + t + s) + one all-reduce of the gradients
                                                                over dp
        act                          micro-batch * tokens * hidden * 4 bytes

    The bubble is the share of pp - 1 in it. Embedding and head make the 2, one on the first and one
    on the last stage, so it is exact for pp up to 2. The loss and its small messages are left out.

    Args:
        model: Untied embeddings; tied ones would be one more message.
        shape: Grid of dp, pp and tp.
        global_batch: Samples of a step over all ranks.
        micro_batch: Samples that go through the pipeline at once.
        cluster: Its speeds; ranks fill its nodes in order.
    """
    num_microbatches = global_batch // (micro_batch * shape.dp)
    act = micro_batch * model.context_length * model.hidden_size * VALUE_BYTES
    model_ranks = shape.tp * shape.pp

    flops = training_flops_per_sample(model) * micro_batch
    compute_s = flops / model_ranks / cluster.flops_per_s

    tp_link = _slowest(cluster, shape.groups("tp"))
    all_reduces = (4 * model.num_layers + 2) / shape.pp
    tp_s = all_reduces * alpha_beta.time_s("all_reduce", shape.tp, act, tp_link)

    pp_s = 0.0
    if shape.pp > 1:
        pp_s = alpha_beta.time_s("send", 2, act, _slowest(cluster, shape.groups("pp")))

    dp_link = _slowest(cluster, shape.groups("dp"))
    gradient_bytes = model.num_parameters / model_ranks * VALUE_BYTES
    dp_s = alpha_beta.time_s("all_reduce", shape.dp, gradient_bytes, dp_link)

    return {
        "compute": num_microbatches * compute_s,
        "tp": num_microbatches * tp_s,
        "pp": num_microbatches * pp_s,
        "bubble": (shape.pp - 1) * (compute_s + tp_s + pp_s),
        "dp": dp_s,
    }


def time_line(
    model: GPTConfig, shape: GridShape, global_batch: int, micro_batch: int, cluster: ClusterModel
) -> Timeline:
    """The time line of a step with 1F1B by the same plain model, with one row of bars per stage.

    A sender is kept from its work while its message is under way, as in the emulated cluster; a bar
    ends when the message begins.

    Args:
        All as in `iteration_parts`.
    """
    num_microbatches = global_batch // (micro_batch * shape.dp)
    parts = iteration_parts(model, shape, global_batch, micro_batch, cluster)
    # of what a stage does for one micro-batch, a third is the forward and two thirds the backward
    third_s = (parts["compute"] + parts["tp"]) / num_microbatches / 3
    message_s = parts["pp"] / num_microbatches
    last = shape.pp - 1

    def send_s(kind: str, stage: int) -> float:
        """Seconds of the message after an F or a B: the first and the last stage have an end."""
        end = last if kind == "F" else 0
        return 0.0 if stage == end else message_s

    # The simulator knows no busy senders, so the messages count as work first and are then cut off.
    times = []
    for stage in range(shape.pp):
        forward_s = third_s + send_s("F", stage)
        weight_s = third_s + send_s("B", stage)
        times.append(StageTimes(forward_s, third_s, weight_s))
    bars: list[Bar] = []
    for bar in simulate(schedule("1f1b", shape.pp, num_microbatches), times).rows:
        stop_s = bar.stop_s - send_s(bar.action.kind, bar.action.stage)
        bars.append(bar._replace(stop_s=stop_s))
    return Timeline(tuple(bars))


def _slowest(cluster: ClusterModel, groups: Sequence[Sequence[int]]) -> Link:
    """Of all links between neighbours on the rings of these groups."""
    links = []
    for group in groups:
        for pair in itertools.pairwise([*group, group[0]]):
            links.append(cluster.link(pair))
    return max(links, key=_slowness)


def _slowness(link: Link) -> float:
    return link.alpha_s + 1 / link.beta_bytes_per_s
