"""Every knob of a training run, as frozen dataclasses; no torch. A recipe (`recipes.py`) fills them all in.

Whoever builds one gets it checked at once: an impossible value is a `ValueError` of one line that says what to change.
"""

from dataclasses import dataclass, field
from typing import Literal

from labcode.layout import check_layout
from labcode.model_config import GPTConfig, ViTConfig, positive, require
from labcode.schedules import schedule
from labcode.topology import GridShape

__all__ = [
    "CheckpointConfig",
    "Config",
    "GPTConfig",
    "GridConfig",
    "OptimConfig",
    "PipelineConfig",
    "TextData",
    "TrainConfig",
    "ViTConfig",
    "WeatherData",
    "require",
]


@dataclass(frozen=True)
class TextData:
    """Text to learn. `path` None is the Shakespeare that ships with the course."""

    path: str | None = None  # a UTF-8 text file of yours (.txt or .txt.gz)
    tokenizer: Literal["char", "bpe"] = "char"
    bpe_vocab_size: int = 8192  # only for tokenizer="bpe"
    val_fraction: float = 0.1  # the last part of the text, never trained on
    cache_dir: str | None = None  # where token files are kept; None: ~/.cache/labcode

    def __post_init__(self):
        if not 0 < self.val_fraction < 1:
            raise ValueError(f"val_fraction={self.val_fraction}: give a fraction between 0 and 1")
        if self.bpe_vocab_size < 257:
            raise ValueError(
                f"bpe_vocab_size={self.bpe_vocab_size}: a byte-level BPE needs at least 257 (256 bytes and a separator)"
            )


@dataclass(frozen=True)
class WeatherData:
    """Weather to predict. `path` None is the 2 degree ERA5 sample that ships with the course."""

    path: str | None = None  # your ERA5: a zarr folder, or HDF5/netCDF (.h5, .hdf5, .nc)
    variables: tuple[str, ...] = ("t2m", "u10", "v10", "msl")
    val_fraction: float = 0.2  # the last part of the times, never trained on
    roll: bool = (
        False  # train on each state turned by every longitude too: where there are only few times
    )
    sun: bool = False  # two more inputs: the height of the sun now and at the next time

    def __post_init__(self):
        if not 0 < self.val_fraction < 1:
            raise ValueError(f"val_fraction={self.val_fraction}: give a fraction between 0 and 1")
        if not self.variables:
            raise ValueError("variables is empty: name at least one, for example t2m")


@dataclass(frozen=True)
class GridConfig:
    """How many ranks along each axis. `dp` None takes all ranks that the other axes leave."""

    dp: int | None = None
    pp: int = 1
    cp: int = 1
    tp: int = 1
    order: str = "tp-cp-dp-pp"

    def shape(self, world_size: int) -> GridShape:
        """The grid for a job of `world_size` ranks.

        Raises:
            ValueError: The sizes do not multiply to the number of ranks.
        """
        others = GridShape(pp=self.pp, cp=self.cp, tp=self.tp, order=self.order)
        dp = max(1, world_size // others.world_size) if self.dp is None else self.dp
        return GridShape(dp, self.pp, self.cp, self.tp, self.order).check(world_size)


@dataclass(frozen=True)
class PipelineConfig:
    """How the layers are dealt out over `grid.pp`, and in which order the stages run."""

    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b"
    stages_per_rank: int = 1  # more than 1 only with schedule="interleaved"
    layers: tuple[int, ...] | None = (
        None  # how many layers each stage has; None: as even as they go
    )
    recompute: bool = (
        False  # keep only the input of each layer, and run its forward again in backward
    )

    def __post_init__(self):
        positive(self, "stages_per_rank")

    def ranges(self, num_layers: int, pp: int) -> tuple[range, ...]:
        """The layers of each stage.

        Raises:
            ValueError: The layers cannot be dealt out so.
        """
        stages = pp * self.stages_per_rank
        if stages > num_layers:
            raise ValueError(
                f"grid.pp*stages_per_rank = {pp}*{self.stages_per_rank} stages, but model.num_layers={num_layers}: "
                "each stage needs a layer"
            )
        even, longer = divmod(num_layers, stages)
        sizes = self.layers or tuple(even + (stage < longer) for stage in range(stages))
        if len(sizes) != stages or sum(sizes) != num_layers or min(sizes) < 1:
            raise ValueError(
                f"pipeline.layers={sizes} are not {stages} stages of {num_layers} layers: give grid.pp*stages_per_rank = "
                f"{pp}*{self.stages_per_rank} numbers, each at least 1, that add up to model.num_layers"
            )
        return tuple(range(sum(sizes[:stage]), sum(sizes[: stage + 1])) for stage in range(stages))


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and its learning-rate schedule: linear warm-up, then half a cosine down to `min_lr`."""

    lr: float = 1e-3
    min_lr: float = 1e-4
    warmup_steps: int = 20
    weight_decay: float = 0.1  # on matrices; biases and norms are left alone
    beta1: float = 0.9
    beta2: float = 0.95
    clip_norm: float = 1.0  # largest allowed norm of the whole gradient; 0 turns clipping off

    def __post_init__(self):
        positive(self, "lr")
        if not 0 <= self.min_lr <= self.lr:
            raise ValueError(f"min_lr={self.min_lr} must lie between 0 and lr={self.lr}")
        if min(self.warmup_steps, self.weight_decay, self.clip_norm) < 0:
            raise ValueError("warmup_steps, weight_decay and clip_norm must not be negative")


@dataclass(frozen=True)
class TrainConfig:
    """The loop. Batches are counted in samples: sequences of text, or weather states."""

    steps: int = 300
    global_batch: int = (
        32  # samples per optimizer step over all ranks: the same run for every number of ranks
    )
    micro_batch: int | None = None  # samples per rank and forward; None: no gradient accumulation
    seed: int = 0
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = (
        "auto"  # auto: bfloat16 on a GPU, float32 on a CPU
    )
    data_parallel: Literal["ddp", "labcode"] = (
        "ddp"  # PyTorch's DistributedDataParallel, or the one of lesson 04
    )
    bucket_mb: float = 25.0  # gradients travel in buckets of this size
    sequence_parallel: bool = (
        False  # over tp: norms, dropout and residuals on a part of the sequence each
    )
    context: Literal["ring", "gather"] = (
        "ring"  # over cp: keys and values go round, or are gathered by every rank
    )
    share_gpus: bool = False  # several ranks on one GPU, over gloo
    eval_every: int = 100  # steps between validations; 0: only at the end
    eval_batches: int = 8
    log_every: int = 10
    sample_tokens: int = 300  # length of the text sample at the end; 0: none
    out: str | None = (
        None  # folder for metrics, TensorBoard and weights; None: the next free runs/NAME-NNN
    )
    overwrite: bool = False  # replace an existing `out`

    def __post_init__(self):
        positive(
            self, "steps", "global_batch", "micro_batch", "bucket_mb", "eval_batches", "log_every"
        )
        if min(self.eval_every, self.sample_tokens) < 0:
            raise ValueError("eval_every and sample_tokens must not be negative")

    def accumulation(self, dp_size: int) -> int:
        """Micro-batches that one rank adds up before each optimizer step.

        Raises:
            ValueError: global_batch cannot be cut into whole micro-batches over `dp_size` ranks.
        """
        micro_batch = self.micro_batch or max(1, self.global_batch // dp_size)
        steps, rest = divmod(self.global_batch, micro_batch * dp_size)
        if rest or not steps:
            raise ValueError(
                f"global_batch={self.global_batch} is not a multiple of micro_batch*dp = {micro_batch}*{dp_size} = "
                f"{micro_batch * dp_size}: change train.global_batch or train.micro_batch"
            )
        return steps


@dataclass(frozen=True)
class CheckpointConfig:
    """What is kept of a run in OUT/checkpoints. With `every` or `resume`, SIGUSR1 and SIGTERM stop it with nothing lost."""

    every: int = 0  # optimizer steps between checkpoints; 0: only at the end, and when a signal stops the run
    keep: int = 2  # how many of the newest are kept
    resume: bool = False  # go on from the newest checkpoint in train.out; begin if there is none

    def __post_init__(self):
        positive(self, "keep")
        if self.every < 0:
            raise ValueError(
                f"every={self.every}: give the steps between checkpoints, or 0 for none"
            )

    @property
    def on(self) -> bool:
        """Whether the run writes checkpoints at all."""
        return bool(self.every or self.resume)


@dataclass(frozen=True)
class Config:
    """One training run, complete. `data` decides what the model reads: text for a GPT, weather for a ViT."""

    name: str
    model: GPTConfig | ViTConfig
    data: TextData | WeatherData
    grid: GridConfig = field(default_factory=GridConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    def __post_init__(self):
        if self.checkpoint.resume and self.train.out is None:
            raise ValueError(
                "checkpoint.resume needs the folder of the run: name it with train.out"
            )
        if self.checkpoint.resume and self.train.overwrite:
            raise ValueError(
                "checkpoint.resume goes on in train.out and train.overwrite removes it: choose one of them"
            )

    def check(self, world_size: int) -> GridShape:
        """The grid for `world_size` ranks, once everything that can be known before any work begins fits together.

        Raises:
            ValueError: One line on what does not fit and what to change.
        """
        shape = self.grid.shape(world_size)
        check_layout(
            self.model,
            shape,
            self.train.sequence_parallel,
            self.train.context,
            self.pipeline.recompute,
        )
        stages = len(self.pipeline.ranges(self.model.num_layers, shape.pp))
        schedule(self.pipeline.schedule, stages, self.train.accumulation(shape.dp), shape.pp)
        return shape
