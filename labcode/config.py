"""Every knob of a training run, as frozen dataclasses; no torch. A recipe (`recipes.py`) fills them all in.

Whoever builds one gets it checked at once: an impossible value is a `ValueError` of one line that says what to change.
"""

from dataclasses import dataclass, field
from typing import Literal

from labcode.topology import GridShape


def _positive(config, *names):
    """Each named field is a number above zero, or None where the field allows it."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value <= 0:
            raise ValueError(f"{name}={value}: give a number above 0")


class _Transformer:
    """What the two model configs compute alike."""

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def ffn(self) -> int:
        return self.ffn_size or 4 * self.hidden_size

    def _layer_parameters(self, kv_heads):
        """Of all layers and the final norm, biases included."""
        hidden, ffn = self.hidden_size, self.ffn
        attention = (hidden + 1) * (self.num_heads + 2 * kv_heads) * self.head_size + (hidden + 1) * hidden
        return self.num_layers * (attention + (hidden + 1) * ffn + (ffn + 1) * hidden + 4 * hidden) + 2 * hidden


@dataclass(frozen=True)
class GPTConfig(_Transformer):
    """Shape of a GPT. Sizes are in features, `context_length` in tokens.

    Source: Radford et al. 2019 (GPT-2) for the architecture; Su et al. 2021 (arXiv:2104.09864) for rotary positions;
        Ainslie et al. 2023 (arXiv:2305.13245) for fewer key/value heads than query heads.
    """

    vocab_size: int | None = None  # None: as many as the tokenizer of the data has
    context_length: int = 128
    num_layers: int = 4
    num_heads: int = 4
    hidden_size: int = 128
    num_kv_heads: int | None = None  # None: as many as query heads
    ffn_size: int | None = None  # None: 4 * hidden_size
    positions: Literal["learned", "rotary"] = "learned"
    tie_embeddings: bool = True
    dropout: float = 0.0

    def __post_init__(self):
        _check_transformer(self)
        _positive(self, "vocab_size", "context_length", "num_kv_heads")
        if self.num_heads % self.kv_heads:
            raise ValueError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.kv_heads}")
        if self.positions == "rotary" and self.head_size % 2:
            raise ValueError(f"rotary positions turn pairs of features: head size {self.head_size} is odd")

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def sequence_length(self) -> int:
        """Tokens that one sample sends through the layers."""
        return self.context_length

    @property
    def num_parameters(self) -> int:
        """Weights and biases of the whole model, exactly; a tied embedding counts once."""
        require(self, "vocab_size")
        embeddings = self.vocab_size * (1 if self.tie_embeddings else 2)
        positions = self.context_length if self.positions == "learned" else 0
        return (embeddings + positions) * self.hidden_size + self._layer_parameters(self.kv_heads)


@dataclass(frozen=True)
class ViTConfig(_Transformer):
    """Shape of a vision transformer that maps a weather state to the next one.

    A state is `[C, Y, X]`: C variables on Y latitudes and X longitudes; it is cut into patches of `patch_size` squared.
    Forcings, such as the height of the sun, are F more fields that go in and are not predicted.
    Source: Dosovitskiy et al. 2020 (arXiv:2010.11929), with a pixel-space head in place of the class token.
    """

    num_variables: int | None = None  # None: as the data has them; so are forcings, lat and lon
    num_forcings: int | None = None
    lat: int | None = None
    lon: int | None = None
    patch_size: int = 5
    num_layers: int = 4
    num_heads: int = 4
    hidden_size: int = 128
    ffn_size: int | None = None
    dropout: float = 0.0

    def __post_init__(self):
        _check_transformer(self)
        _positive(self, "num_variables", "lat", "lon", "patch_size")
        for name in ("lat", "lon"):
            size = getattr(self, name)
            if size is not None and size % self.patch_size:
                raise ValueError(
                    f"{name}={size} is not a multiple of patch_size={self.patch_size}: choose a patch that divides it"
                )

    @property
    def patch_outputs(self) -> int:
        """Values of a patch that are predicted, `C * P^2`."""
        return self.num_variables * self.patch_size**2

    @property
    def patch_inputs(self) -> int:
        """Values of a patch that go in, `(C + F) * P^2`."""
        return self.patch_outputs + (self.num_forcings or 0) * self.patch_size**2

    @property
    def sequence_length(self) -> int:
        """Patches that one sample sends through the layers."""
        return (self.lat // self.patch_size) * (self.lon // self.patch_size)

    @property
    def num_parameters(self) -> int:
        """Weights and biases of the whole model, exactly."""
        require(self, "num_variables", "lat", "lon")
        hidden = self.hidden_size
        embed_and_head = (self.patch_inputs + 1) * hidden + (hidden + 1) * self.patch_outputs
        return embed_and_head + self.sequence_length * hidden + self._layer_parameters(self.num_heads)


def require(config, *names):
    """Each named field has a value; what may stay None in a recipe must be known before a model is built or counted."""
    for name in names:
        if getattr(config, name) is None:
            raise ValueError(f"{name}=None: set model.{name} to a number, or take it from the data")


def _check_transformer(config):
    _positive(config, "num_layers", "num_heads", "hidden_size", "ffn_size")
    if config.hidden_size % config.num_heads:
        raise ValueError(
            f"hidden_size={config.hidden_size} is not a multiple of num_heads={config.num_heads}: the heads share it equally"
        )
    if not 0 <= config.dropout < 1:
        raise ValueError(f"dropout={config.dropout}: give a probability from 0 to below 1")


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
    roll: bool = False  # train on each state turned by every longitude too: where there are only few times
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
        dp = self.dp or max(1, world_size // others.world_size)
        return GridShape(dp, self.pp, self.cp, self.tp, self.order).check(world_size)


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
        _positive(self, "lr")
        if not 0 <= self.min_lr <= self.lr:
            raise ValueError(f"min_lr={self.min_lr} must lie between 0 and lr={self.lr}")
        if min(self.warmup_steps, self.weight_decay, self.clip_norm) < 0:
            raise ValueError("warmup_steps, weight_decay and clip_norm must not be negative")


@dataclass(frozen=True)
class TrainConfig:
    """The loop. Batches are counted in samples: sequences of text, or weather states."""

    steps: int = 300
    global_batch: int = 32  # samples per optimizer step over all ranks: the same run for every number of ranks
    micro_batch: int | None = None  # samples per rank and forward; None: no gradient accumulation
    seed: int = 0
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"  # auto: bfloat16 on a GPU, float32 on a CPU
    data_parallel: Literal["ddp", "labcode"] = "ddp"  # PyTorch's DistributedDataParallel, or the one of lesson 04
    bucket_mb: float = 25.0  # gradients travel in buckets of this size
    share_gpus: bool = False  # several ranks on one GPU, over gloo
    eval_every: int = 100  # steps between validations; 0: only at the end
    eval_batches: int = 8
    log_every: int = 10
    sample_tokens: int = 300  # length of the text sample at the end; 0: none
    out: str | None = None  # folder for metrics, TensorBoard and weights; None: the next free runs/NAME-NNN
    overwrite: bool = False  # replace an existing `out`

    def __post_init__(self):
        _positive(self, "steps", "global_batch", "micro_batch", "bucket_mb", "eval_batches", "log_every")
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
class Config:
    """One training run, complete. `data` decides what the model reads: text for a GPT, weather for a ViT."""

    name: str
    model: GPTConfig | ViTConfig
    data: TextData | WeatherData
    grid: GridConfig = field(default_factory=GridConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def check(self, world_size: int) -> GridShape:
        """The grid for `world_size` ranks, once everything that can be known before any work begins fits together.

        Raises:
            ValueError: One line on what does not fit and what to change.
        """
        shape = self.grid.shape(world_size)
        if self.model.num_heads % shape.tp:
            raise ValueError(
                f"num_heads={self.model.num_heads} is not divisible by tp={shape.tp}: change model.num_heads or grid.tp"
            )
        for axis in ("pp", "cp", "tp"):
            if shape.size(axis) > 1:
                raise ValueError(f"grid.{axis}={shape.size(axis)}: this version trains over dp alone, set grid.{axis} to 1")
        self.train.accumulation(shape.dp)
        return shape
