"""The most bytes that one rank needs within a training step, and what they consist of.

A step is followed from moment to moment. Weights and the optimizer's state are always there;
activations grow through forward and go away through backward, while gradients take their place:

    loss backward        all activations, and what the loss needs besides
    head backward        the loss is done: the gradient of the logits, that of the head
    last layer backward  all layers' activations still, the buffers of this layer's MLP
    first layer backward one layer's activations, nearly all gradients
    gradients complete   all gradients; a tied embedding is about to get its second one
    optimizer            all gradients, no activations

Between the last and the first layer activations shrink and gradients grow by the same amount with
each layer, so that the highest of these moments is the peak of the step: the loss for a large
vocabulary, the last layer for many tokens, the end for few tokens and many weights.

Shapes: B samples of a micro-batch, S tokens, H hidden features, F features inside the MLP, V
vocabulary; of a weather state C variables on Y latitudes and X longitudes.

Source: the terms of activations are those of `perf.memory`; which buffers backward needs was read
    from PyTorch's formulas (derivatives.yaml) and from the memory events of its profiler.
Held by: tests/unit/test_training_memory_parts.py; against measured peaks of one rank by
    tests/ranks/test_training_memory.py, within 2 %
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from labcode.config import GPTConfig, ViTConfig
from labcode.perf.memory import INDEX_BYTES, ONE_RANK, layer_activations, model_activations
from labcode.perf.transformer import Transformer
from labcode.topology import GridShape

# dtype of a run: (bytes of what a matrix product reads, bytes of weights and between the layers)
WIDTHS = {
    "float32": (4, 4),
    "tf32": (4, 4),
    "float64": (8, 8),
    "bfloat16": (2, 4),  # under autocast: weights, gradients and residuals stay float32
    "float16": (2, 4),
    "fp8": (2, 4),  # as bfloat16, although linear layers keep their operands in one byte
}


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes of one rank at one moment of a step.

    Args:
        moment: Which.
        parameters: Weights.
        gradients: Bytes of the weights' gradients, as far as backward has come; all of them from
            the second micro-batch on.
        optimizer: What AdamW keeps: two moments of each weight.
        activations: What forward has kept for backward, the loss left out. Under autocast the
            narrow copies of the weights are among them in a plain model.
        logits: What the loss holds: the softmax over the vocabulary and, in its backward, two
            buffers more of that size; of a ViT the error and four buffers of a state's size.
        data: Inputs and targets of all micro-batches of the step.
        buckets: What gradients are copied into to be averaged. Those of our DataParallel hold the
            gradients themselves, which are counted here and not as gradients.
        temporary: What lives for a few operations: the gradients of activations in the layer whose
            backward runs (the residual stream's and the one inside the MLP), that of a weight
            before it is added to what earlier micro-batches left or cast to the weight's dtype.
    """

    moment: str
    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    data: float
    buckets: float
    temporary: float

    @property
    def parts(self) -> dict[str, float]:
        """{part: bytes}, those above that are bytes."""
        return {
            "parameters": self.parameters,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "activations": self.activations,
            "logits": self.logits,
            "data": self.data,
            "buckets": self.buckets,
            "temporary": self.temporary,
        }

    @property
    def total(self) -> float:
        """All parts together."""
        return sum(self.parts.values())


def training_memory(
    model: GPTConfig | ViTConfig, shape: GridShape = ONE_RANK, **options: Any
) -> TrainingMemory:
    """The moment of a step at which a rank holds the most; its `total` is the peak.

    Options, Raises: As those of `training_moments`.
    """
    return max(training_moments(model, shape, **options), key=lambda moment: moment.total)


def training_moments(
    model: GPTConfig | ViTConfig,
    shape: GridShape = ONE_RANK,
    *,
    micro_batch: int,
    num_micro_batches: int = 1,
    dtype: str = "float32",
    data_parallel: str = "ddp",
    sequence_parallel: bool = False,
    activation_checkpointing: str = "none",
    mask_bytes: int = 1,
    fused_attention: bool = True,
) -> list[TrainingMemory]:
    """What a rank holds at each moment of the backward of its last micro-batch, in their order.

    Of a step after the first, in which the optimizer has its state. What is measured on one rank
    holds what is said of one rank; with tp and cp the parts of a rank are those of the rooms below,
    and the peak of the whole is a prediction. What ZeRO divides, `layout_memory` counts.

    Args:
        model: Shape of the model, with every size filled in.
        shape: The grid.
        micro_batch: Samples that a rank works on at once.
        num_micro_batches: How many of them add up their gradients.
        dtype: Dtype of the matrix products; weights, gradients and optimizer are float32, or
            float64.
        data_parallel: "ddp", which copies gradients into its buckets, or "labcode", whose
            gradients lie in them. Both keep the buckets from step to step. "none" has no buckets:
            a plain model on one rank, whose gradients nobody averages.
        sequence_parallel: As in `layer_activations`; so are `mask_bytes` and `fused_attention`.
        activation_checkpointing: "none"; "selective": what only the core of attention reads is not
            kept; "full": of each layer only the input is kept.

    Raises:
        ValueError: A dtype or an option that is not known, a pipeline, whose stages hold several
            micro-batches at once, selective checkpointing of an attention that stores its scores,
            a mixture of experts, or sizes that the grid does not divide.
    """
    _check_options(shape, dtype, data_parallel, activation_checkpointing)
    if isinstance(model, GPTConfig) and model.num_experts:
        raise ValueError(
            f"model.num_experts={model.num_experts}: the buffers of experts within a step are not "
            "predicted here; ask perf.layout_memory, which counts what a rank keeps"
        )
    if activation_checkpointing == "selective" and not fused_attention:
        raise ValueError(
            "activation_checkpointing='selective' without a fused attention: the scores come back "
            "for a moment whose peak is not predicted here; ask for fused_attention=True"
        )
    value_bytes, wide_bytes = WIDTHS[dtype]
    options = {
        "batch": micro_batch,
        "sequence_parallel": sequence_parallel,
        "value_bytes": value_bytes,
        "residual_bytes": wide_bytes,
        "mask_bytes": mask_bytes,
        "fused_attention": fused_attention,
    }
    kept = layer_activations(
        model, shape, activation_checkpointing=activation_checkpointing, **options
    )
    sizes = _Sizes(
        model=model,
        shape=shape,
        layer=sum(layer_activations(model, shape, **options).values()),
        kept_of_a_layer=sum(kept.values()),
        whole=model_activations(model, shape, **options),
        micro_batch=micro_batch,
        value_bytes=value_bytes,
        wide_bytes=wide_bytes,
        sequence_parallel=sequence_parallel,
        full_checkpointing=activation_checkpointing == "full",
    )
    return _moments(sizes, num_micro_batches, data_parallel)


def _check_options(shape: GridShape, dtype: str, data_parallel: str, checkpointing: str) -> None:
    choices = {
        "dtype": (dtype, tuple(WIDTHS)),
        "data_parallel": (data_parallel, ("ddp", "labcode", "none")),
        "activation_checkpointing": (checkpointing, ("none", "selective", "full")),
    }
    for name, (value, known) in choices.items():
        if value not in known:
            raise ValueError(f"{name}={value!r}: choose {' or '.join(known)}")
    if shape.pp > 1:
        raise ValueError(
            f"pp={shape.pp}: a stage holds several micro-batches at once, which is not predicted "
            "here; ask for one stage as a model of its own"
        )


class WeightCounts(NamedTuple):
    """Weights of one rank, in numbers.

    Args:
        layer: Number of weights in one layer.
        down: Weights of the second product of an MLP, the one whose gradient is made first in a
            layer; of experts those of all together.
        head: Weights of the output head, shared with the embedding where the two are tied.
        ends: Weights of all that is in no layer, the head included.
        narrowed: Weights that autocast copies into the narrow dtype.
    """

    layer: float
    down: float
    head: float
    ends: float
    narrowed: float


def weight_counts(model: GPTConfig | ViTConfig, shape: GridShape = ONE_RANK) -> WeightCounts:
    """How many weights a rank has of what, as tp cuts them: matrices, but no norms.

    Of a mixture of experts a rank has 1/ep of the experts, whose features tp cuts, and the whole
    router.

    Held by: tests/unit/test_training_memory_parts.py
    """
    sizes = Transformer.of(model)
    hidden = sizes.hidden_size
    tp = shape.tp
    bias = sizes.biases
    norm = hidden + bias * hidden
    narrow_layer = (hidden + bias) * sizes.qkv / tp
    narrow_layer += hidden * sizes.heads_size / tp + bias * hidden
    router = 0
    if sizes.experts:
        experts = sizes.expert_weights / (shape.ep * tp)
        narrow_layer += experts + sizes.mlp_matrices * hidden * sizes.shared_size / tp
        router = sizes.experts * (hidden + sizes.router_biases)
        down = experts / sizes.mlp_matrices
    else:
        down = hidden * sizes.ffn / tp + bias * hidden
        narrow_layer += (hidden + bias) * sizes.ffn * (sizes.mlp_matrices - 1) / tp + down
    layer = narrow_layer + router + 2 * norm
    if sizes.inputs:  # a vision transformer, whose ends tp does not cut
        head = sizes.head_weights + sizes.outputs
        ends = sizes.end_parameters
        narrow_ends = (sizes.inputs + 1) * hidden + head
    else:
        head = narrow_ends = sizes.head_weights / tp
        copies = 1 if sizes.tied else 2
        ends = sizes.end_parameters - copies * (sizes.head_weights - head)
    narrowed = sizes.num_layers * narrow_layer + narrow_ends
    return WeightCounts(layer, down, head, ends, narrowed)


@dataclass(frozen=True)
class _Sizes:
    """What the moments are made of.

    Args:
        layer: Bytes of activations that a layer needs in its backward.
        kept_of_a_layer: Bytes of them that forward has kept; the others are computed again.
        whole: {kind: bytes} of the whole model, without checkpointing.
    """

    model: GPTConfig | ViTConfig
    shape: GridShape
    layer: float
    kept_of_a_layer: float
    whole: dict[str, float]
    micro_batch: int
    value_bytes: int
    wide_bytes: int
    sequence_parallel: bool
    full_checkpointing: bool

    @property
    def weights(self) -> WeightCounts:
        return weight_counts(self.model, self.shape)

    @property
    def num_weights(self) -> float:
        return self.model.num_layers * self.weights.layer + self.weights.ends

    @property
    def tokens(self) -> float:
        """Number of tokens on this rank."""
        return self.micro_batch * self.model.sequence_length / self.shape.cp

    @property
    def whole_tokens(self) -> float:
        """Where tp cuts no features: in norms and between the layers."""
        return self.tokens / self.shape.tp if self.sequence_parallel else self.tokens

    @property
    def residual(self) -> float:
        """What goes from layer to layer."""
        return self.whole_tokens * self.model.hidden_size * self.wide_bytes

    @property
    def mlp_gradient(self) -> float:
        """The gradient inside the MLP, and of the narrow copy of what comes into it from above."""
        gated = isinstance(self.model, GPTConfig) and self.model.gated
        inside = self.tokens * self.model.ffn / self.shape.tp * self.value_bytes
        if gated:  # of the gate and of what it lets through
            inside *= 2
        if self.value_bytes == self.wide_bytes:
            return inside
        return inside + self.whole_tokens * self.model.hidden_size * self.value_bytes

    @property
    def computed_again(self) -> float:
        """What the layer has beyond what was kept of it when the backward of its MLP runs.

        The core of attention is computed again later, when nothing is left of the MLP.
        """
        return self.layer - self.kept_of_a_layer if self.full_checkpointing else 0.0

    @property
    def in_the_mlp(self) -> float:
        """What the layer whose backward runs holds in its MLP's backward."""
        return self.kept_of_a_layer + self.computed_again

    @property
    def output(self) -> float:
        """One buffer as large as the logits, or as the predicted state."""
        width = max(4, self.wide_bytes)
        if isinstance(self.model, ViTConfig):
            return self.micro_batch * self.model.sequence_length * self.model.patch_outputs * width
        assert self.model.vocab_size is not None
        return self.tokens * self.model.vocab_size / self.shape.tp * width

    @property
    def narrow_copies(self) -> float:
        """What autocast makes of the weights, for as long as backward needs it."""
        narrow = self.value_bytes < self.wide_bytes
        return self.weights.narrowed * self.value_bytes if narrow else 0.0

    @property
    def data(self) -> float:
        """Inputs and targets of one micro-batch."""
        if isinstance(self.model, GPTConfig):
            return self.micro_batch * 2 * self.model.context_length * INDEX_BYTES
        fields = 2 * (self.model.num_variables or 0) + (self.model.num_forcings or 0)
        points = (self.model.lat or 0) * (self.model.lon or 0)
        return self.micro_batch * fields * points * self.wide_bytes


def _moments(sizes: _Sizes, num_micro_batches: int, data_parallel: str) -> list[TrainingMemory]:
    """The moments, from the sizes."""
    counts = sizes.weights
    wide = sizes.wide_bytes
    layers = sizes.model.num_layers
    accumulates = num_micro_batches > 1
    all_weights = all_gradients = sizes.num_weights * wide
    last_layer_gradients = (counts.head + counts.down) * wide
    first_layer_gradients = (sizes.num_weights - counts.layer + counts.down) * wide
    tied = isinstance(sizes.model, GPTConfig) and sizes.model.tie_embeddings
    lie_in_buckets = data_parallel == "labcode"
    cast = 0.0 if sizes.value_bytes == wide else sizes.value_bytes

    ends = ("final norm", "head input", "loss")
    before = sum(sizes.whole.get(kind, 0.0) for kind in ("first dropout", "patches"))
    after = sum(sizes.whole.get(kind, 0.0) for kind in ends[:2])
    # tokens and targets are counted as data
    loss = sizes.output
    layers_kept = layers * sizes.kept_of_a_layer
    # the sharded layers make theirs anew in backward (parallel.linear)
    narrow = sizes.narrow_copies if data_parallel == "none" else 0.0
    narrow_layer = narrow * counts.layer / max(1.0, counts.narrowed)
    loss_buffers = 4 if isinstance(sizes.model, ViTConfig) else 2

    def moment(
        name: str,
        *,
        gradients: float,
        activations: float = 0.0,
        logits: float = 0.0,
        temporary: float = 0.0,
        new_weight: float = 0.0,
    ) -> TrainingMemory:
        """What is the same at all moments is filled in.

        Args:
            gradients: Bytes of gradients that are there in the first micro-batch.
            new_weight: Weights whose gradient has just been made.
        """
        if accumulates:
            gradients = all_gradients
        if lie_in_buckets:
            gradients = 0.0
        if accumulates or lie_in_buckets:
            temporary += new_weight * wide
        temporary += new_weight * cast
        return TrainingMemory(
            moment=name,
            parameters=all_weights,
            gradients=gradients,
            optimizer=2 * all_weights,
            activations=activations,
            logits=logits,
            data=num_micro_batches * sizes.data,
            buckets=0.0 if data_parallel == "none" else all_weights,
            temporary=temporary,
        )

    return [
        moment(
            "loss backward",
            gradients=0.0,
            activations=before + layers_kept + after + narrow,
            logits=(1 + loss_buffers) * loss,
        ),
        moment(
            "head backward",
            gradients=counts.head * wide,
            activations=before + layers_kept + after + narrow,
            logits=loss * sizes.value_bytes / max(4, wide),
            temporary=sizes.residual,
            new_weight=counts.head,
        ),
        moment(
            "last layer backward",
            gradients=last_layer_gradients,
            activations=before + layers_kept + sizes.computed_again + narrow,
            temporary=sizes.residual + sizes.mlp_gradient,
            new_weight=counts.down,
        ),
        moment(
            "first layer backward",
            gradients=first_layer_gradients,
            activations=before + sizes.in_the_mlp + narrow_layer,
            temporary=sizes.residual + sizes.mlp_gradient,
            new_weight=counts.down,
        ),
        moment(
            "gradients complete",
            gradients=all_gradients,
            activations=before,
            temporary=sizes.residual + (counts.head * wide if tied else 0.0),
        ),
        moment("optimizer", gradients=all_gradients),
    ]
