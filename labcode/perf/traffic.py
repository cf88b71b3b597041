"""Which bytes of a training step cross the boundary between nodes, for a grid and the order of its axes.

Traffic is `{(from rank, to rank): bytes}`. Ranks fill the nodes in order, as launchers place them, so the node of a rank is
`rank // ranks_per_node`.
"""

import itertools
from collections import Counter

from labcode.config import GPTConfig
from labcode.perf.alpha_beta import bytes_sent
from labcode.topology import GridShape

Traffic = dict[tuple[int, int], float]


def ring(collective: str, group: list[int], message_bytes: float) -> Traffic:
    """What each rank of a ring sends to its right neighbour; one rank alone sends nothing.

        bytes_sent(collective, p, message_bytes) on each of p links        (see perf.comm)

    Args:
        collective: all_reduce, all_gather or reduce_scatter.
        group: Global ranks in the order of the ring.
        message_bytes: The whole tensor.
    """
    if len(group) == 1:
        return {}
    return dict.fromkeys(
        zip(group, group[1:] + group[:1]), bytes_sent(collective, len(group), message_bytes)
    )


def across_nodes(traffic: Traffic, ranks_per_node: int) -> float:
    """Bytes of `traffic` whose sender and receiver sit on different nodes.

    Raises:
        ValueError: A node without ranks.
    """
    if ranks_per_node < 1:
        raise ValueError(f"ranks_per_node={ranks_per_node}: a node holds at least 1 rank")
    return sum(
        size for (a, b), size in traffic.items() if a // ranks_per_node != b // ranks_per_node
    )


def step_traffic(
    model: GPTConfig,
    shape: GridShape,
    *,
    global_batch: int,
    value_bytes: int = 2,
    gradient_bytes: int = 4,
) -> dict[str, Traffic]:
    """The traffic of one optimizer step along each axis, all micro-batches together.

        act = samples/dp * tokens/cp * hidden * value_bytes      activations of one replica's samples on one rank
        tp   4 all-reduces of act for each layer of the stage: 2 forward, 2 backward
        cp   per layer one all-gather of K and V forward, one reduce-scatter of their gradients backward
        pp   act to the next stage forward, as much to the one before backward
        dp   one all-reduce of the stage's gradients over the ranks of (dp, cp)

    Left out: token embedding, loss and norm of the gradient, small beside these. Every rank of tp sends the whole act to the
    next stage. Weights count as if tp and pp cut them evenly.

    Args:
        model: Its shape, with a vocabulary size.
        shape: The grid.
        global_batch: Samples of `context_length` tokens per optimizer step.
        value_bytes: Of one activation.
        gradient_bytes: Of one gradient when it is summed.

    Returns:
        `{"tp": traffic, "cp": ..., "pp": ..., "dp": ...}`.
    Raises:
        ValueError: An axis that does not divide what it cuts.
    Source: Narayanan et al. 2021 (arXiv:2104.04473), section 3, for tp, pp and dp; Llama Team 2024 (arXiv:2407.21783),
        section 3.3.2, for cp by all-gather.
    Held by: tests/unit/test_perf_placement.py, and by the bytes counted in lesson 07.
    """
    tokens, heads, kv_heads = model.context_length, model.num_heads, model.kv_heads
    cuts = {
        "dp": {"global_batch": global_batch},
        "pp": {"num_layers": model.num_layers},
        "cp": {"context_length": tokens},
    }
    for axis, cut in (cuts | {"tp": {"num_heads": heads, "num_kv_heads": kv_heads}}).items():
        for name, size in cut.items():
            if size % shape.size(axis):
                raise ValueError(
                    f"{name}={size} is not divisible by {axis}={shape.size(axis)}: change one of them"
                )
    samples, layers = global_batch // shape.dp, model.num_layers // shape.pp
    act = samples * tokens // shape.cp * model.hidden_size * value_bytes
    keys_and_values = 2 * samples * tokens * kv_heads // shape.tp * model.head_size * value_bytes
    gradients = model.num_parameters / (shape.tp * shape.pp) * gradient_bytes
    boundaries = [pair for group in shape.groups("pp") for pair in itertools.pairwise(group)]
    return {
        "tp": _sum(ring("all_reduce", group, 4 * layers * act) for group in shape.groups("tp")),
        "cp": _sum(
            ring("all_gather", group, 2 * layers * keys_and_values) for group in shape.groups("cp")
        ),
        "pp": {link: act for a, b in boundaries for link in ((a, b), (b, a))},
        "dp": _sum(ring("all_reduce", group, gradients) for group in shape.groups("dp", "cp")),
    }


def _sum(parts) -> Traffic:
    total = Counter()
    for part in parts:
        total.update(part)
    return dict(total)
