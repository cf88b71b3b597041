"""What one rank of a GPT on any grid has, keeps and sends: exact, for a dry run to be held to.

With l layers on its stage, m micro-batches, t ranks of tp, and act = B S H numbers,

    tp, plain              m (4 l + first + last)       all-reduces of act
    tp, sequence parallel  m (4 l + first + last)       reduce-scatters of act
                           m (6 l + first + 2 last)     all-gathers of act: two more a layer in
                                                        backward, because only a part was kept
                           1 all-reduce of the gradients of what tp leaves whole
    loss                   2 m all-reduces: one number a token, the largest, and two, the sums
    pp                     m messages each way to each neighbour, of act (or act/t)
                           1 all-reduce of the loss; 1 of the tied embedding's gradient

where first and last are 1 on the stage that is it. Numbers have 4 bytes, the loss 8. Gradients over
dp are not in it.

Held by: tests/ranks/test_dry_run.py, against the calls of the real code
"""

from collections import Counter

from labcode.config import GPTConfig, require
from labcode.perf.memory import INDEX_BYTES, layer_activations, model_activations
from labcode.perf.pipeline import peak_microbatches
from labcode.perf.training_memory import weight_counts
from labcode.topology import GridShape

NUMBER_BYTES = 4
LOSS_BYTES = 8

Calls = Counter[tuple[str, int, int]]  # {(kind, bytes of the whole tensor, ranks): how often}


def rank_parameters(model: GPTConfig, shape: GridShape, stage: int) -> int:
    """Weights of each rank of a stage.

    Args:
        model: Shape of the model, with a vocabulary.
        shape: The grid; pp divides the layers.
        stage: Coordinate of the rank along pp.

    Raises:
        ValueError: Layers that pp does not divide.
    """
    layers = _layers(model, shape)
    counts = weight_counts(model, shape)
    found = layers * counts.layer
    first, last = _ends(shape, stage)
    if first:
        found += counts.head
        if model.positions == "learned":
            found += model.context_length * model.hidden_size
    if last:
        found += _norm_weights(model)
        if shape.pp > 1 or not model.tie_embeddings:
            found += counts.head
    return round(found)


def rank_calls(
    model: GPTConfig,
    shape: GridShape,
    stage: int,
    *,
    micro_batch: int,
    num_micro_batches: int,
    sequence_parallel: bool,
) -> Calls:
    """Collectives and messages of a forward and backward of all micro-batches on one rank.

    Args:
        model, shape, stage: As in `rank_parameters`; cp is 1.
        micro_batch: Samples at once.
        num_micro_batches: How many of them.
        sequence_parallel: As in Settings.

    Raises:
        ValueError: Layers that pp does not divide, or cp, or a mixture of experts.
    """
    _refuse_experts(model)
    layers = _layers(model, shape)
    first, last = _ends(shape, stage)
    tokens = micro_batch * model.context_length
    act = tokens * model.hidden_size * NUMBER_BYTES
    calls: Calls = Counter()
    if shape.tp > 1:
        number = num_micro_batches * (4 * layers + first + last)
        if sequence_parallel:
            calls["reduce_scatter", act, shape.tp] = number
            gathers = num_micro_batches * (6 * layers + first + 2 * last)
            calls["all_gather", act, shape.tp] = gathers
            whole = _left_whole(model, layers, first, last)
            calls["all_reduce", whole * NUMBER_BYTES, shape.tp] += 1
        else:
            calls["all_reduce", act, shape.tp] = number
        if last:
            for numbers in (1, 2):
                calls["all_reduce", numbers * tokens * NUMBER_BYTES, shape.tp] += num_micro_batches
    if shape.pp > 1:
        message = act // shape.tp if sequence_parallel else act
        neighbours = 2 - first - last
        for kind in ("send", "recv"):
            calls[kind, message, shape.pp] = num_micro_batches * neighbours
        calls["all_reduce", LOSS_BYTES, shape.pp] += 1
        if model.tie_embeddings and first + last:
            head = round(weight_counts(model, shape).head) * NUMBER_BYTES
            calls["all_reduce", head, 2] += 1
    return calls


def rank_activation_bytes(
    model: GPTConfig,
    shape: GridShape,
    stage: int,
    *,
    micro_batch: int,
    num_micro_batches: int,
    sequence_parallel: bool,
) -> float:
    """The most bytes that a rank keeps for backward under 1F1B.

    Args:
        As in `rank_calls`.
    """
    _refuse_experts(model)
    options = {
        "batch": micro_batch,
        "sequence_parallel": sequence_parallel,
        "value_bytes": NUMBER_BYTES,
    }
    layer = sum(layer_activations(model, shape, **options).values())
    kept = _layers(model, shape) * layer
    first, last = _ends(shape, stage)
    ends = model_activations(model, shape, **options)
    if last:
        kept += ends["final norm"] + ends["head input"] + ends["loss"]
    if first and not last:
        # which tokens were looked up, and which of them are another rank's
        kept += micro_batch * model.context_length * (INDEX_BYTES + 1)
    kept *= peak_microbatches("1f1b", shape.pp, num_micro_batches, rank=stage)
    if model.positions == "rotary":
        # sine and cosine, once for all layers and micro-batches
        kept += 2 * model.context_length * model.head_size * NUMBER_BYTES
    return kept


def _layers(model: GPTConfig, shape: GridShape) -> int:
    require(model, "vocab_size")
    if model.num_layers % shape.pp or shape.cp > 1:
        raise ValueError(
            f"num_layers={model.num_layers} on {shape}: exact only where pp divides the layers, "
            "and without cp"
        )
    return model.num_layers // shape.pp


def _refuse_experts(model: GPTConfig) -> None:
    if model.num_experts:
        raise ValueError(
            f"model.num_experts={model.num_experts}: what experts get and send depends on the "
            "router, so it is not exact; ask perf.estimate"
        )


def _ends(shape: GridShape, stage: int) -> tuple[int, int]:
    """(1 on the first stage, 1 on the last)."""
    return int(stage == 0), int(stage == shape.pp - 1)


def _norm_weights(model: GPTConfig) -> int:
    return (1 + model.bias) * model.hidden_size


def _left_whole(model: GPTConfig, layers: int, first: int, last: int) -> int:
    """Weights that every rank of tp has whole: norms, two biases, positions."""
    hidden = model.hidden_size
    norm = _norm_weights(model)
    biases = 2 * hidden if model.bias else 0
    whole = layers * (2 * norm + biases) + last * norm
    if first and model.positions == "learned":
        whole += model.context_length * hidden
    return whole
