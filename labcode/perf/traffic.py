"""Which bytes of a training step cross between nodes, for a grid and the order of its axes.

Traffic is `{(from rank, to rank): bytes}`. Ranks fill the nodes in order, as launchers place them,
so the node of a rank is `rank // ranks_per_node`.
"""

import itertools
from collections import Counter
from collections.abc import Iterable

from labcode.config import GPTConfig
from labcode.perf.alpha_beta import bytes_sent
from labcode.perf.transformer import Transformer
from labcode.topology import GridShape

Traffic = dict[tuple[int, int], float]


def ring(collective: str, group: list[int], message_bytes: float) -> Traffic:
    """What each rank of a ring sends to its right neighbour; one rank alone sends nothing.

        bytes_sent(collective, p, message_bytes) on each of p links      (see perf.alpha_beta)

    Args:
        collective: all_reduce, all_gather or reduce_scatter.
        group: Global ranks in the order of the ring.
        message_bytes: The whole tensor.
    """
    if len(group) == 1:
        return {}
    sent = bytes_sent(collective, len(group), message_bytes)
    right_neighbours = group[1:] + group[:1]
    return dict.fromkeys(zip(group, right_neighbours, strict=True), sent)


def across_nodes(traffic: Traffic, ranks_per_node: int) -> float:
    """Bytes of `traffic` whose sender and receiver sit on different nodes.

    Raises:
        ValueError: A node without ranks.
    """
    if ranks_per_node < 1:
        raise ValueError(f"ranks_per_node={ranks_per_node}: a node holds at least 1 rank")
    crossing = 0
    for (sender, receiver), num_bytes in traffic.items():
        if sender // ranks_per_node != receiver // ranks_per_node:
            crossing += num_bytes
    return crossing


def step_traffic(
    model: GPTConfig,
    shape: GridShape,
    *,
    global_batch: int,
    context_attention: str = "ring",
    value_bytes: int = 2,
    gradient_bytes: int = 4,
    sequence_parallel: bool = False,
) -> dict[str, Traffic]:
    """The traffic of one optimizer step along each axis, all micro-batches together.

        act = samples/dp * tokens/cp * hidden * value_bytes      one replica's samples, on one rank
        tp   4 all-reduces of act for each layer of the stage: 2 forward, 2 backward; 6 where an MLP
             stands beside experts
        cp   for each layer of the stage the K and V of the whole sequence: see below
        pp   act to the next stage forward, as much to the one before backward
        dp   one all-reduce of the stage's gradients over the ranks of (dp, cp)
        ep   of a mixture of experts: 4 all-to-alls of k act for each layer of the stage, 2 forward
             and 2 backward, where a rank sends as much to each; the gradients of experts go over
             the ranks of (edp, cp) instead

    K and V of all tokens have `kv = 2 samples/dp * tokens * (kv_heads/tp) * head_size` numbers. On
    cp a rank sends of them, for each layer,

        all_gather   (p-1)/p kv value_bytes         forward: an all-gather
                     (p-1)/p kv value_bytes         backward: a reduce-scatter of dK and dV
        ring         (p-1)/p kv value_bytes         forward: each part travels on p-1 times
                     (p-1)/p kv value_bytes         backward: K and V travel once more
                     (p-1)/p kv wide_bytes          backward: behind them the sums of dK and dV

    The sums are kept in the wide dtype, `wide_bytes = max(4, value_bytes)`. So with 16-bit numbers
    the ring sends twice the bytes of the all-gather in all, and three times as many in backward.
    It has its merits all the same: it holds two parts of K and V where the all-gather holds all of
    them, and the parts travel while a block is computed.

    Without sequence parallelism every rank of tp holds the whole act between layers, so each of
    them sends all of it to its counterpart in the next stage. With it a rank holds 1/tp of the
    tokens there and sends those alone. Each all-reduce of tp is then a reduce-scatter and an
    all-gather, which send as many bytes.

    Left out: token embedding, loss and norm of the gradient, and how many rows an expert gets,
    which are small beside these. Weights count as if tp and pp cut them evenly, and the router as
    if it gave each expert as many rows.

    Args:
        model: Shape of the model, with a vocabulary size.
        shape: The grid.
        global_batch: Samples of `context_length` tokens per optimizer step.
        context_attention: How attention works over cp, "ring" or "all_gather".
        value_bytes: Bytes of one activation.
        gradient_bytes: Bytes of one gradient when it is summed.
        sequence_parallel: Whether the ranks of tp share out the tokens between layers.

    Returns:
        `{"tp": traffic, "cp": ..., "pp": ..., "dp": ...}`, and of a mixture "ep".

    Raises:
        ValueError: An axis that does not divide what it cuts, or an unknown `context_attention`.

    Source: Narayanan et al. 2021 (arXiv:2104.04473), section 3, for tp, pp and dp; Korthikanti et
        al. 2022 (arXiv:2205.05198), section 4.2.2, for `sequence_parallel`; Llama Team 2024
        (arXiv:2407.21783), section 3.3.2, for cp by all-gather; Liu et al. 2023 (arXiv:2310.01889)
        for the ring.
    Held by: tests/unit/test_traffic.py; cp against measured bytes by
        tests/ranks/test_context_traffic.py; lesson 08 counts tp and dp in a real step.
    """
    _check_divisible(model, shape, global_batch)
    samples = global_batch // shape.dp
    layers = model.num_layers // shape.pp
    act = samples * model.context_length // shape.cp * model.hidden_size * value_bytes
    kv_numbers = 2 * samples * model.context_length * model.kv_heads // shape.tp * model.head_size
    kv_bytes = layers * _kv_bytes(context_attention, kv_numbers, value_bytes)
    per_weight = gradient_bytes / (shape.tp * shape.pp)
    sums = 2 * Transformer.of(model).sums_over_tp
    sent_on = act / shape.tp if sequence_parallel else act
    traffic = {
        "tp": _over_rings("all_reduce", shape.groups("tp"), sums * layers * act),
        "cp": _over_rings("all_gather", shape.groups("cp"), kv_bytes),
        "pp": _between_stages(shape, sent_on),
        "dp": _gradients(model, shape, per_weight),
    }
    if model.num_experts:
        rows = model.experts_per_token * act
        traffic["ep"] = _all_to_all(shape.groups("ep"), 4 * layers * rows)
    return traffic


def _gradients(model: GPTConfig, shape: GridShape, per_weight: float) -> Traffic:
    """Sum gradients over dp; those of experts that ep divides, over the ranks that copy them."""
    experts = model.num_expert_parameters if shape.ep > 1 else 0
    others = (model.num_parameters - experts) * per_weight
    total = Counter(_over_rings("all_reduce", shape.groups("dp", "cp"), others))
    if experts:
        own = experts / shape.ep * per_weight
        total.update(_over_rings("all_reduce", shape.groups("edp", "cp"), own))
    return dict(total)


def _all_to_all(groups: Iterable[list[int]], message_bytes: float) -> Traffic:
    """Each rank has `num_bytes`, and sends each of the others its part of them."""
    traffic: Traffic = {}
    for group in groups:
        for sender, receiver in itertools.permutations(group, 2):
            traffic[sender, receiver] = message_bytes / len(group)
    return traffic


def _check_divisible(model: GPTConfig, shape: GridShape, global_batch: int) -> None:
    cuts = (
        ("dp", "global_batch", global_batch),
        ("pp", "num_layers", model.num_layers),
        ("cp", "context_length", model.context_length),
        ("tp", "num_heads", model.num_heads),
        ("tp", "num_kv_heads", model.kv_heads),
        ("ep", "num_experts", model.num_experts),
    )
    for axis, name, size in cuts:
        if size % shape.size(axis):
            raise ValueError(
                f"{name}={size} is not divisible by {axis}={shape.size(axis)}: change one of them"
            )


def _kv_bytes(context_attention: str, kv_numbers: int, value_bytes: int) -> int:
    """The bytes that go once round the ring of cp for one layer, forward and backward."""
    wide_bytes = max(4, value_bytes)
    bytes_per_number = {
        "all_gather": value_bytes + value_bytes,
        "ring": value_bytes + value_bytes + wide_bytes,
    }
    if context_attention not in bytes_per_number:
        raise ValueError(f"context_attention={context_attention!r}: choose ring or all_gather")
    return kv_numbers * bytes_per_number[context_attention]


def _between_stages(shape: GridShape, act: float) -> Traffic:
    traffic: Traffic = {}
    for pipeline in shape.groups("pp"):
        for stage, following in itertools.pairwise(pipeline):
            traffic[stage, following] = act  # activations forward
            traffic[following, stage] = act  # gradients backward
    return traffic


def _over_rings(collective: str, groups: Iterable[list[int]], message_bytes: float) -> Traffic:
    """Run the same collective in each of the groups."""
    total: Counter[tuple[int, int]] = Counter()
    for group in groups:
        total.update(ring(collective, group, message_bytes))
    return dict(total)
