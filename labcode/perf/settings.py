"""How a model is trained: what `estimate` and `plan` have to know besides shapes and cluster."""

from dataclasses import dataclass
from typing import Any

from labcode.perf.layer_time import ATTENTION_KERNELS, WIDTHS, Cut
from labcode.perf.transformer import Transformer
from labcode.topology import GridShape

# Bytes of a weight under AdamW.
#   mixed      16-bit weights and gradients; float32 copy and moments: Rajbhandari et al. 2019
#              (arXiv:1910.02054), section 3.1, and DeepSpeed
#   fsdp       all in float32, gathered in 16 bits: the mixed precision of FSDP and of autocast
#   megatron   as mixed, with gradients in float32: Megatron-LM; what Settings has by itself
#   float32    nothing is narrower: training in float32 or tf32
#   bf16       nothing is wider than 16 bits
STATES: dict[str, dict[str, Any]] = {
    "mixed": {
        "weight_bytes": 2,
        "gradient_bytes": 2,
        "optimizer_bytes": 12,
        "gathered_bytes": 2,
        "reduced_bytes": 2,
    },
    "fsdp": {
        "weight_bytes": 4,
        "gradient_bytes": 4,
        "optimizer_bytes": 8,
        "gathered_bytes": 2,
        "reduced_bytes": 4,
    },
    "megatron": {
        "weight_bytes": 2,
        "gradient_bytes": 4,
        "optimizer_bytes": 12,
        "gathered_bytes": 2,
        "reduced_bytes": 4,
    },
    "float32": {
        "weight_bytes": 4,
        "gradient_bytes": 4,
        "optimizer_bytes": 8,
        "gathered_bytes": 4,
        "reduced_bytes": 4,
    },
    "bf16": {
        "weight_bytes": 2,
        "gradient_bytes": 2,
        "optimizer_bytes": 4,
        "gathered_bytes": 2,
        "reduced_bytes": 2,
    },
}
CHECKPOINTING = ("none", "selective", "operators", "full")


@dataclass(frozen=True)
class Settings:
    """Choices of a training, as far as they cost time or memory.

    Args:
        global_batch: Samples of an optimizer step over all ranks.
        micro_batch: Samples that go through the model at once.
        dtype: Dtype of the matrix products.
        attention: "unfused", "flash", "flash2" or "flash3".
        activation_checkpointing: "none"; "selective", the core of attention; "operators", all but
            attention and every second product; "full", each layer from its input.
        sequence_parallel: Whether tp cuts norms and residuals along the sequence.
        stages_per_rank: More than one interleaves 1F1B.
        zero_stage: 0 to 3; 3 is FSDP.
        weight_bytes: Bytes of a weight as a rank keeps it.
        gradient_bytes: Bytes of a gradient as a rank keeps it.
        optimizer_bytes: Bytes of optimizer state for each weight, master weights included.
        gathered_bytes: Bytes of a weight that is gathered.
        reduced_bytes: Bytes of a gradient that is summed over ranks.
        adapter_rank: Rank of low-rank adapters, which train in place of the model
            (`perf.adapters`); a frozen weight then costs its `weight_bytes` alone. 0: the model
            itself trains.
        four_bit: Whether the frozen products are kept in 4 bits (QLoRA).
        autocast: Whether what runs from layer to layer is as wide as the weights, and only products
            are narrow; PyTorch's autocast does that.
        overlap_data_parallel: Whether gradients travel during the last backward.
        scatter_gather: Whether the ranks of tp share what goes to the next stage.
        context_attention: Attention over cp, "ring" or "all_gather".
        compiled: Whether a compiler fuses what is elementwise.
        reserved_bytes: What a process needs beside its tensors: CUDA context, NCCL's buffers, what
            the allocator cannot use. In-sample: of 3, 4 and 5 GiB the one with which most published
            runs that ran out of memory are found and at most 5 % of the others are refused.
    """

    global_batch: int
    micro_batch: int = 1
    dtype: str = "bfloat16"
    attention: str = "flash2"
    activation_checkpointing: str = "none"
    sequence_parallel: bool = False
    stages_per_rank: int = 1
    zero_stage: int = 0
    weight_bytes: float = 2
    gradient_bytes: float = 4
    optimizer_bytes: float = 12
    gathered_bytes: float = 2
    reduced_bytes: float = 4
    adapter_rank: int = 0
    four_bit: bool = False
    autocast: bool = False
    overlap_data_parallel: bool = True
    scatter_gather: bool = False
    context_attention: str = "ring"
    compiled: bool = False
    reserved_bytes: float = 4 * 2**30

    def num_micro_batches(self, shape: GridShape) -> int:
        """Micro-batches of a step on each replica."""
        return self.global_batch // (self.micro_batch * shape.dp)

    def cut(self, shape: GridShape) -> Cut:
        """What a rank has of a layer."""
        return Cut(
            self.micro_batch,
            shape.tp,
            shape.cp,
            self.sequence_parallel,
            self.dtype,
            self.attention,
            self.compiled,
            shape.ep,
        )


def check(model: Transformer, shape: GridShape, settings: Settings) -> None:
    """Refuse a layout that cannot run.

    Raises:
        ValueError: One line that says what does not fit.
    """
    per_step = settings.micro_batch * shape.dp
    cuts = (
        ("global_batch", settings.global_batch, "micro_batch * dp", per_step),
        ("num_heads", model.num_heads, "tp", shape.tp),
        ("ffn_size", model.ffn, "tp", shape.tp),
        ("sequence_length", model.sequence_length, "cp", shape.cp),
    )
    for name, size, what, parts in cuts:
        if size % parts:
            raise ValueError(f"{name}={size} is not divisible by {what}={parts}: change one")
    model.check_ep(shape.ep)
    if shape.pp > model.num_layers:
        raise ValueError(f"pp={shape.pp} for num_layers={model.num_layers}: use fewer stages")
    choices = (
        ("dtype", settings.dtype, WIDTHS),
        ("attention", settings.attention, ATTENTION_KERNELS),
        ("activation_checkpointing", settings.activation_checkpointing, CHECKPOINTING),
        ("context_attention", settings.context_attention, ("ring", "all_gather")),
        ("zero_stage", settings.zero_stage, range(4)),
    )
    for name, value, known in choices:
        if value not in known:
            shown = ", ".join(map(str, known))
            raise ValueError(f"{name}={value!r}: choose one of {shown}")
    chunks = settings.stages_per_rank
    if chunks < 1 or (chunks > 1 and shape.pp == 1):
        raise ValueError(f"stages_per_rank={chunks} with pp={shape.pp}: interleave a pipeline")
    if chunks > 1 and settings.num_micro_batches(shape) % shape.pp:
        raise ValueError(
            f"interleaving needs the {settings.num_micro_batches(shape)} micro-batches to be a "
            f"multiple of pp={shape.pp}: change global_batch or micro_batch"
        )
