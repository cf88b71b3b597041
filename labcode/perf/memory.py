"""How many bytes of activations a rank keeps for backward, from the shapes of model and grid alone.

Backward needs what forward computed: the input of each matrix product, of each norm, of GELU, and
what attention keeps. Of one layer, with the paper's letters (s tokens, b samples, h hidden
features, a heads, t ranks of tp, 16-bit numbers, dropout masks of one byte), that is

    one rank                  s b h (34 + 5 a s / h)                  paper_layer_bytes, eq. 1
    tensor parallel           s b h (10 + 24 / t + 5 a s / (h t))     eq. 2: norms, their outputs
                                                                      and dropout stay whole
    + sequence parallel       s b h / t (34 + 5 a s / h)              eq. 4: nothing stays whole

`layer_activations` names each term, for any width of the numbers, with a fused attention (which
keeps no s x s scores) or without, with or without dropout, with fewer key/value heads, and with a
sequence cut over cp. Each memory that is kept alive counts once. Weights, gradients, and what lives
only for a moment inside an operation do not count: `perf.training_memory` has them too, and the
peak of a step.

Shapes: B samples, S tokens, H hidden features, N query heads, K key/value heads, D features of a
head, F features inside the MLP; of a weather state C variables in patches of P x P, and I values in
all that go in.

Source: Korthikanti et al. 2022 (arXiv:2205.05198), section 4; fused attention: Dao et al. 2022
    (arXiv:2205.14135).
Held by: tests/unit/test_perf_memory.py; against measured bytes by
    tests/ranks/test_activation_bytes.py and benchmarks/activation_bytes.py, within 2 %
"""

from labcode.config import GPTConfig, ViTConfig, require
from labcode.perf.transformer import Transformer
from labcode.topology import GridShape

ONE_RANK = GridShape()
STATISTIC_BYTES = 4  # what norms, attention and loss keep is float32, or wider with wider numbers
INDEX_BYTES = 8  # tokens and targets are int64
INSIDE_THE_CORE = {"log-sum-exp", "scores"}  # of attention: what nothing outside it reads


def layer_activations(
    model: GPTConfig | ViTConfig | Transformer,
    shape: GridShape = ONE_RANK,
    *,
    batch: int,
    sequence_parallel: bool = False,
    value_bytes: int = 2,
    residual_bytes: int | None = None,
    mask_bytes: int = 1,
    fused_attention: bool = True,
    activation_checkpointing: str = "none",
) -> dict[str, float]:
    """Bytes that one layer keeps on one rank until its backward, by kind of tensor.

        norm inputs          2 B S H                two norms
        norm statistics      4 B S                  mean and deviation of each token, 4 bytes each
        linear inputs        2 B S H                the norms' outputs: what qkv and the MLP read
        q, k, v              B S (N + 2K) D   / tp
        rotated q, k         B S (N + K) D    / tp  rotary positions only: turned copies
        log-sum-exp          B S N            / tp  fused attention only, 4 bytes each
        scores               B N S^2          / tp  not fused: the softmax; with dropout its mask
                                                    and the product too
        attention output     B S N D          / tp  what proj reads; the fused kernel keeps it too
        GELU input, output   B S F each       / tp
        gate, gated          B S F each       / tp  gated MLPs only: the other factor, the product
        routed tokens        2 k B S H              experts only: what goes into and comes out of
                                                    the k of E experts that a token uses
        routing              B S (E + 2 k + 2)      experts only, 4 bytes each: scores, weights and
                             B S 5 k                their sums; 8 bytes each: where a row goes
        dropout masks        2 B S H                with dropout only

    "4 bytes" are more where the numbers themselves have more. S is S/cp here. Under sequence
    parallelism the first three and the last are cut over tp as well. With cp the formula is that of
    the ring, which keeps the rank's own keys and values; a layer that gathers them may keep more.
    The norms are those of a GPU. On a CPU an RMS norm is no operation of its own in PyTorch 2.13:
    it keeps x / rms besides, B S H numbers more for each norm, of 4 bytes at least.

    F is that of all MLPs that a token uses: k experts and the shared one. tp cuts the features
    inside an expert, so that each of its ranks has all rows; sequence parallelism gathers them
    before. ep changes nothing here as long as the router spreads the rows evenly: a rank gets as
    many as it sends. Of an uneven one the rank with the fullest experts keeps more, in proportion.

    Held by: test_perf_memory.py::test_an_rms_norm_on_a_cpu_keeps_what_it_normalised

    Args:
        model: Shape of the model; a sequence has `model.sequence_length` tokens.
        shape: The grid; only tp and cp matter to one layer.
        batch: Samples that this rank works on at once.
        sequence_parallel: Whether what tp leaves whole is cut along the sequence.
        value_bytes: Bytes of one activation that a matrix product reads or writes.
        residual_bytes: Bytes of one number between the layers, which the norms read; None: as
            `value_bytes`. Autocast keeps 4.
        mask_bytes: Bytes of one number of a dropout mask: 1 on a GPU; on a CPU torch keeps as much
            as for the number that it drops.
        fused_attention: Whether the scores are never stored (FlashAttention, and what PyTorch calls
            efficient attention).
        activation_checkpointing: "selective": log-sum-exp and scores are computed again. "full":
            all is, from the layer's input. "operators": all but the output of attention and of
            every second product, as in torchtitan.

    Returns:
        {kind: bytes}; kinds that do not occur are left out.

    Raises:
        ValueError: A size that is not a multiple of what it is divided by.

    Source: Korthikanti et al. 2022 (arXiv:2205.05198), section 4.1, eqs. 1, 2 and 4; section 5 for
        activation checkpointing.
    """
    _check_divisible(model, shape, sequence_parallel)
    if residual_bytes is None:
        residual_bytes = value_bytes
    tokens = batch * model.sequence_length / shape.cp
    whole_tokens = _tokens_where_features_are_whole(model, shape, batch, sequence_parallel)
    hidden = model.hidden_size
    statistic_bytes = max(STATISTIC_BYTES, residual_bytes)
    terms = {
        "norm inputs": 2 * whole_tokens * hidden * residual_bytes,
        "norm statistics": 4 * whole_tokens * statistic_bytes,
        "linear inputs": 2 * whole_tokens * hidden * value_bytes,
    }
    terms |= _attention(model, tokens / shape.tp, value_bytes, mask_bytes, fused_attention)
    terms["GELU input"] = tokens * model.active_ffn * value_bytes / shape.tp
    terms["GELU output"] = terms["GELU input"]
    if not isinstance(model, ViTConfig) and model.gated:
        terms["gate"] = terms["GELU input"]
        terms["gated"] = terms["GELU input"]
    experts, top_k = _experts(model)
    if experts:
        terms["routed tokens"] = 2 * top_k * tokens * hidden * value_bytes
        # of its own tokens the router keeps scores, the chosen ones and their sums
        scores = (experts + top_k + 2) * statistic_bytes + top_k * INDEX_BYTES
        # of all rows weights, and four permutations: by expert, by rank of ep, and back
        rows = top_k * (statistic_bytes + 4 * INDEX_BYTES)
        terms["routing"] = whole_tokens * scores + tokens * rows
    if model.dropout:
        terms["dropout masks"] = 2 * whole_tokens * hidden * mask_bytes
    if activation_checkpointing == "full":
        return {"layer input": whole_tokens * hidden * residual_bytes}
    if activation_checkpointing == "operators":
        products = terms["q, k, v"] + terms["GELU input"] + terms.get("gate", 0.0)
        products += (1 + max(1, top_k)) * whole_tokens * hidden * value_bytes
        return {
            "layer input": whole_tokens * hidden * residual_bytes,
            "attention output": terms["attention output"],
            "every second product": products / 2,
        }
    if activation_checkpointing == "selective":
        for kind in INSIDE_THE_CORE & terms.keys():
            del terms[kind]
    return terms


def _check_divisible(
    model: GPTConfig | ViTConfig | Transformer, shape: GridShape, sequence_parallel: bool
) -> None:
    """The formula divides evenly, so it refuses sizes of which some rank would get more.

    It does not ask whether the layers themselves could run so: some can with uneven parts.
    """
    sequence = "the number of patches" if isinstance(model, ViTConfig) else "model.context_length"
    tp = f"parallel.tp={shape.tp}"
    cuts = [
        ("model.num_heads", model.num_heads, shape.tp, tp),
        ("model.num_kv_heads", _kv_heads(model), shape.tp, tp),
        ("model.ffn_size", _ffn_of_an_mlp(model), shape.tp, tp),
        (sequence, model.sequence_length, shape.cp, f"parallel.cp={shape.cp}"),
    ]
    if sequence_parallel:
        what = f"cp*tp = {shape.cp}*{shape.tp}"
        cuts.append((sequence, model.sequence_length, shape.cp * shape.tp, what))
    for name, size, parts, what in cuts:
        if size % parts:
            raise ValueError(f"{name}={size} is not divisible by {what}: change one of them")


def _tokens_where_features_are_whole(
    model: GPTConfig | ViTConfig | Transformer,
    shape: GridShape,
    batch: int,
    sequence_parallel: bool,
) -> float:
    """The tokens of a rank in norms, residuals and dropout, of which tp cuts no features."""
    tokens = batch * model.sequence_length / shape.cp
    if sequence_parallel:
        return tokens / shape.tp
    return tokens


def _kv_heads(model: GPTConfig | ViTConfig | Transformer) -> int:
    if isinstance(model, Transformer):
        return model.kv
    if isinstance(model, GPTConfig):
        return model.kv_heads
    return model.num_heads


def _experts(model: GPTConfig | ViTConfig | Transformer) -> tuple[int, int]:
    """(Experts of a layer, how many of them a token uses); none: 0, 0."""
    if isinstance(model, Transformer):
        return (model.experts, model.active_experts) if model.experts else (0, 0)
    if isinstance(model, GPTConfig) and model.num_experts:
        return model.num_experts, model.experts_per_token
    return 0, 0


def _ffn_of_an_mlp(model: GPTConfig | ViTConfig | Transformer) -> int:
    if isinstance(model, GPTConfig) and model.num_experts:
        return model.expert_ffn
    return model.ffn


def _is_rotary(model: GPTConfig | ViTConfig | Transformer) -> bool:
    if isinstance(model, Transformer):
        return not model.learned_positions
    return isinstance(model, GPTConfig) and model.positions == "rotary"


def _attention(
    model: GPTConfig | ViTConfig | Transformer,
    tokens: float,
    value_bytes: int,
    mask_bytes: int,
    fused: bool,
) -> dict[str, float]:
    """What is cut by heads.

    Args:
        tokens: Tokens of this rank of cp, divided by tp: cutting the heads has the same effect.
    """
    heads = model.num_heads
    kv_heads = _kv_heads(model)
    terms = {"q, k, v": tokens * (heads + 2 * kv_heads) * model.head_size * value_bytes}
    if _is_rotary(model):
        # besides, the memory of q, k and v stays alive: v looks into it
        terms["rotated q, k"] = tokens * (heads + kv_heads) * model.head_size * value_bytes
    if fused:
        terms["log-sum-exp"] = tokens * heads * max(STATISTIC_BYTES, value_bytes)
    else:
        score_bytes = value_bytes
        if model.dropout:
            score_bytes += mask_bytes + value_bytes  # the mask, and the scores that it leaves
        terms["scores"] = tokens * heads * model.sequence_length * score_bytes
    terms["attention output"] = tokens * heads * model.head_size * value_bytes
    return terms


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
    activation_checkpointing: str = "none",
) -> dict[str, float]:
    """Bytes of the whole model and its loss on one rank, by kind of tensor.

    All layers, and what comes before and after them:

        first dropout     B S H                               with dropout only
        final norm        B S H, and its statistics           whole under tp, cut under sequence
                                                              parallelism
        head input        B S H                               the same
        loss              B S V / tp, 4 bytes or more each    GPT: the softmax; the targets and
                                                              tokens, 8 bytes each, too
                          B S C P^2                           ViT: the error that is squared
        patches           B S I                               ViT: what its first product reads

    A pipeline is not in it: a stage holds num_layers/pp layers of as many micro-batches as are
    under way.

    Args:
        All as in `layer_activations`; a GPT needs its vocabulary, a ViT its data's sizes.

    Returns:
        {kind: bytes}, those of the layers added up over all layers.

    Raises:
        ValueError: A size that is not a multiple of what it is divided by.

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
        activation_checkpointing=activation_checkpointing,
    )
    if residual_bytes is None:
        residual_bytes = value_bytes
    whole_tokens = _tokens_where_features_are_whole(model, shape, batch, sequence_parallel)
    terms = {kind: model.num_layers * size for kind, size in layer.items()}
    if model.dropout:
        terms["first dropout"] = whole_tokens * model.hidden_size * mask_bytes
    statistics = 2 * max(STATISTIC_BYTES, residual_bytes)
    terms["final norm"] = whole_tokens * (model.hidden_size * residual_bytes + statistics)
    terms["head input"] = whole_tokens * model.hidden_size * value_bytes
    loss_bytes = max(STATISTIC_BYTES, value_bytes)
    if isinstance(model, ViTConfig):
        # the loss is that of the whole state on every rank
        all_tokens = batch * model.sequence_length
        terms["loss"] = all_tokens * model.patch_outputs * loss_bytes
        terms["patches"] = whole_tokens * model.patch_inputs * value_bytes
    else:
        require(model, "vocab_size")
        assert model.vocab_size is not None
        tokens = batch * model.sequence_length / shape.cp
        terms["loss"] = tokens * (model.vocab_size / shape.tp * loss_bytes + 2 * INDEX_BYTES)
    return terms


def paper_layer_bytes(
    model: GPTConfig | ViTConfig,
    *,
    batch: int,
    tp: int = 1,
    sequence_parallel: bool = False,
    fused_attention: bool = False,
) -> float:
    """The closed form of the paper for one layer.

        one rank      s b h (34 + 5 a s / h)
        tp            s b h (10 + 24/t + 5 a s / (h t))
        + sequence    s b h / t (34 + 5 a s / h)

    It takes 2 bytes a number, dropout everywhere, as many kv heads as heads, and F = 4 H.

    Args:
        model: Shape of the model; only its sequence length, hidden size and heads are read.
        batch: Samples on this rank.
        tp: Ranks that share each layer.
        sequence_parallel: Eq. 4 in place of eq. 2.
        fused_attention: Without the term of the scores, as with the selective activation
            checkpointing of the paper's section 5.

    Source: Korthikanti et al. 2022 (arXiv:2205.05198), eqs. 1, 2 and 4.
    """
    tokens_hidden = model.sequence_length * batch * model.hidden_size
    scores = 0.0
    if not fused_attention:
        scores = 5 * model.num_heads * model.sequence_length / model.hidden_size
    whole = 0 if sequence_parallel else 10
    cut = 34 - whole
    return tokens_hidden * (whole + (cut + scores) / tp)
