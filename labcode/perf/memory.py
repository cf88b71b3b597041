"""How many bytes of activations a rank keeps for backward, from the shape of the model and of the grid alone.

Backward needs what forward computed: the input of each matrix product, of each norm, of GELU, and what attention keeps.
Of one layer, with the paper's letters (s tokens, b samples, h hidden features, a heads, t ranks of tp, 16-bit numbers,
dropout masks of one byte), that is

    one rank                  s b h (34 + 5 a s / h)                    paper_layer_bytes, eq. 1
    tensor parallel           s b h (10 + 24 / t + 5 a s / (h t))       eq. 2: norms, their outputs and dropout stay whole
    + sequence parallel       s b h / t (34 + 5 a s / h)                eq. 4: nothing stays whole

`layer_activations` names each term, for any width of the numbers, with a fused attention (which keeps no s x s scores) or
without, with or without dropout, fewer key/value heads, and a sequence cut over cp. Counted are the memories that are kept
alive, each once; weights, gradients, and what lives only for a moment inside an operation are not.

Shapes: B samples, S tokens, H hidden features, N query heads, K key/value heads, D features of a head, F features inside the
MLP; of a weather state C variables in patches of P x P, and I values in all that go in.
Source: Korthikanti et al. 2022 (arXiv:2205.05198), section 4; fused attention: Dao et al. 2022 (arXiv:2205.14135).
Held by: tests/unit/test_perf_memory.py; against measured bytes by tests/ranks/test_activation_bytes.py and
    benchmarks/activation_bytes.py, within 2 %
"""

from labcode.config import GPTConfig, ParallelConfig, ViTConfig
from labcode.topology import GridShape

ONE_RANK = GridShape()
# Terms that plain tensor parallelism leaves whole on every rank of tp; sequence parallelism cuts them along the sequence.
WHOLE_UNDER_TP = ("norm inputs", "norm statistics", "linear inputs", "dropout masks")


def layer_activations(
    model: GPTConfig | ViTConfig,
    shape: GridShape = ONE_RANK,
    *,
    batch: int,
    sequence_parallel: bool = False,
    value_bytes: int = 2,
    residual_bytes: int | None = None,
    mask_bytes: int = 1,
    fused_attention: bool = True,
) -> dict[str, float]:
    """Bytes that one layer keeps on one rank until its backward, by kind of tensor.

        norm inputs          2 B S H                two norms
        norm statistics      4 B S                  mean and deviation of each token, 4 bytes or more each
        linear inputs        2 B S H                what qkv and the MLP's first product read: the norms' outputs
        q, k, v              B S (N + 2K) D   / tp
        rotated q, k         B S (N + K) D    / tp  rotary positions only: turned copies beside the memory of q, k, v
        log-sum-exp          B S N            / tp  fused attention only, 4 bytes or more each
        scores               B N S^2          / tp  not fused: the softmax; with dropout its mask and the product too
        attention output     B S N D          / tp  what proj reads; the fused kernel keeps the same memory
        GELU input, output   B S F each       / tp
        dropout masks        2 B S H                with dropout only

    S is S/cp here, and the first three and the last are cut over tp as well under sequence parallelism. With cp the formula
    is that of the ring, which keeps the rank's own keys and values; a layer that gathers them may keep more.

    Args:
        model: Its shape. The sequence is `model.sequence_length` long.
        shape: The grid; only tp and cp matter to one layer.
        batch: Samples that this rank works on at once.
        sequence_parallel: Whether what tp leaves whole is cut along the sequence.
        value_bytes: Of one activation that a matrix product reads or writes.
        residual_bytes: Of one number between the layers, which the norms read; None: as `value_bytes`. Autocast keeps 4.
        mask_bytes: Of one number of a dropout mask: 1 on a GPU; on a CPU torch keeps as much as for the number it drops.
        fused_attention: Whether the scores are never stored (FlashAttention and what PyTorch calls efficient attention).

    Returns:
        {kind: bytes}; kinds that do not occur are left out.
    Raises:
        ValueError: An axis that does not divide what it cuts.
    Source: Korthikanti et al. 2022 (arXiv:2205.05198), section 4.1, eqs. 1, 2 and 4.
    """
    # all_gather: whether a ring could have dropout is none of this formula's business
    layout = ParallelConfig(sequence_parallel=sequence_parallel, context_attention="all_gather")
    layout.check(model, shape)
    residual_bytes = residual_bytes or value_bytes
    tokens = batch * model.sequence_length / shape.cp  # of this rank of cp
    whole = (
        tokens / shape.tp if sequence_parallel else tokens
    )  # of those, where tp does not cut the features
    hidden = model.hidden_size
    terms = {
        "norm inputs": 2 * whole * hidden * residual_bytes,
        "norm statistics": 4 * whole * max(4, residual_bytes),
        "linear inputs": 2 * whole * hidden * value_bytes,
    }
    terms |= _attention(model, tokens / shape.tp, value_bytes, mask_bytes, fused_attention)
    terms["GELU input"] = terms["GELU output"] = tokens * model.ffn * value_bytes / shape.tp
    if model.dropout:
        terms["dropout masks"] = 2 * whole * hidden * mask_bytes
    return terms


def _attention(model, tokens, value_bytes, mask_bytes, fused):
    """What is cut by heads; `tokens` are those of this rank of cp, divided by tp."""
    heads, head = model.num_heads, model.head_size
    kv_heads = getattr(model, "kv_heads", heads)
    terms = {"q, k, v": tokens * (heads + 2 * kv_heads) * head * value_bytes}
    if getattr(model, "positions", None) == "rotary":
        terms["rotated q, k"] = tokens * (heads + kv_heads) * head * value_bytes
    if fused:
        terms["log-sum-exp"] = tokens * heads * max(4, value_bytes)
    else:
        score_bytes = 2 * value_bytes + mask_bytes if model.dropout else value_bytes
        terms["scores"] = tokens * heads * model.sequence_length * score_bytes
    return terms | {"attention output": tokens * heads * head * value_bytes}


def model_activations(
    model: GPTConfig | ViTConfig,
    shape: GridShape = ONE_RANK,
    *,
    batch: int,
    sequence_parallel: bool = False,
    value_bytes: int = 2,
    residual_bytes: int | None = None,
    mask_bytes: int = 1,
    fused_attention: bool = True,
) -> dict[str, float]:
    """Bytes of the whole model and its loss on one rank, by kind of tensor: all layers, and what comes before and after.

        first dropout     B S H                               with dropout only
        final norm        B S H, and its statistics           whole under tp, cut under sequence parallelism
        head input        B S H                               the same
        loss              B S V / tp, 4 bytes or more each    GPT: the softmax; the targets and tokens, 8 bytes each, too
                          B S C P^2                           ViT: the error that is squared
        patches           B S I                               ViT: what its first product reads

    A pipeline is not in it: a stage holds num_layers/pp layers of as many micro-batches as are under way.

    Args:
        All as in `layer_activations`; a GPT needs its vocabulary, a ViT its data's sizes.

    Returns:
        {kind: bytes}, those of the layers added up over all layers.
    Raises:
        ValueError: An axis that does not divide what it cuts.
    Source: Korthikanti et al. 2022 (arXiv:2205.05198), section 4.3.
    """
    layer = layer_activations(
        model,
        shape,
        batch=batch,
        sequence_parallel=sequence_parallel,
        value_bytes=value_bytes,
        residual_bytes=residual_bytes,
        mask_bytes=mask_bytes,
        fused_attention=fused_attention,
    )
    residual_bytes = residual_bytes or value_bytes
    whole = batch * model.sequence_length / shape.cp / (shape.tp if sequence_parallel else 1)
    terms = {kind: model.num_layers * size for kind, size in layer.items()}
    if model.dropout:
        terms["first dropout"] = whole * model.hidden_size * mask_bytes
    terms["final norm"] = whole * (model.hidden_size * residual_bytes + 2 * max(4, residual_bytes))
    return terms | _ends(model, batch, shape, whole, value_bytes)


def _ends(model, batch, shape, whole, value_bytes):
    """Head and loss, and the patches of a ViT; its loss is that of the whole state on every rank."""
    head = {"head input": whole * model.hidden_size * value_bytes}
    if isinstance(model, ViTConfig):
        error = batch * model.sequence_length * model.patch_outputs * max(4, value_bytes)
        return head | {"loss": error, "patches": whole * model.patch_inputs * value_bytes}
    logits = model.vocab_size / shape.tp * max(4, value_bytes)
    return head | {"loss": batch * model.sequence_length / shape.cp * (logits + 2 * 8)}


def paper_layer_bytes(
    model: GPTConfig | ViTConfig,
    *,
    batch: int,
    tp: int = 1,
    sequence_parallel: bool = False,
    fused_attention: bool = False,
) -> float:
    """The closed form of the paper for one layer: 2 bytes a number, dropout everywhere, as many kv heads as heads, F = 4 H.

        s b h (34 + 5 a s / h)    s b h (10 + 24/t + 5 a s / (h t))    s b h / t (34 + 5 a s / h)

    Args:
        model: Its sequence length, hidden size and heads are read, nothing else.
        batch: Samples on this rank.
        tp: Ranks that share each layer.
        sequence_parallel: Eq. 4 in place of eq. 2.
        fused_attention: Without the term of the scores, as with the selective recomputation of the paper's section 5.

    Source: Korthikanti et al. 2022 (arXiv:2205.05198), eqs. 1, 2 and 4.
    """
    tokens_hidden = model.sequence_length * batch * model.hidden_size
    scores = (
        0 if fused_attention else 5 * model.num_heads * model.sequence_length / model.hidden_size
    )
    whole, cut = (0, 34) if sequence_parallel else (10, 24)
    return tokens_hidden * (whole + (cut + scores) / tp)
