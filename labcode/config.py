"""Every setting of a training run, as frozen dataclasses. No torch.

A recipe (`recipes.py`) fills them all in. Each of them is validated on construction: an impossible
value is a `ValueError` of one line that says what to change, with the field's name as it is written
on the command line.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from labcode.runtime.fields import (
    COUNT,
    COUNT_OR_ZERO,
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    PROBABILITY,
    SEED,
    SIZE,
    Range,
    check_fields,
    shown,
)
from labcode.topology import GridShape

# ---- models


def require(config: "GPTConfig | ViTConfig", *names: str) -> None:
    """Check that fields which a recipe may leave to the data have a value by now.

    Raises:
        ValueError: A field is None.
    """
    for name in names:
        if getattr(config, name) is None:
            raise ValueError(f"{name}=None: set model.{name} to a number, or take it from the data")


# the deepest transformers have a thousand (Wang et al. 2022, arXiv:2203.00555), and each of them is
# a dozen Python objects that take time to make
LAYERS = Range(1, 1000, "give a number above 0")
ROTARY_BASE = Range(1, 10**12, "give a number above 1", above=True)
NORM_EPSILON = Range(0, 1, "give a number above 0", above=True)
TRANSFORMER_RANGES = {
    "num_layers": LAYERS,
    "num_heads": SIZE,
    "hidden_size": SIZE,
    "ffn_size": SIZE,
    "dropout": PROBABILITY,
}


class _Transformer:
    """What the configs of both models derive in the same way."""

    num_layers: int
    num_heads: int
    hidden_size: int
    ffn_size: int | None
    dropout: float

    @property
    def head_size(self) -> int:
        """Features of one head."""
        return self.hidden_size // self.num_heads

    @property
    def ffn(self) -> int:
        """Features inside the MLP."""
        return self.ffn_size or 4 * self.hidden_size

    @property
    def active_ffn(self) -> int:
        """Features inside all MLPs of a layer that a token uses."""
        return self.ffn

    def _layer_parameters(self, kv_heads: int, gated: bool = False, bias: bool = True) -> int:
        """Parameters of all layers and of the final norm, if each layer has an MLP."""
        hidden = self.hidden_size
        inputs = hidden + bias  # of one output of a linear layer
        qkv = inputs * (self.num_heads + 2 * kv_heads) * self.head_size
        projection = inputs * hidden
        mlp = self._mlp_parameters(self.ffn, gated, bias)
        norm = hidden + bias * hidden
        return self.num_layers * (qkv + projection + mlp + 2 * norm) + norm

    def _mlp_parameters(self, ffn: int, gated: bool, bias: bool) -> int:
        """Parameters of an MLP with that many features inside."""
        up = (self.hidden_size + bias) * ffn * (2 if gated else 1)
        down = (ffn + bias) * self.hidden_size
        return up + down

    def _check_transformer(self) -> None:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"model.hidden_size={self.hidden_size} is not a multiple of "
                f"num_heads={self.num_heads}: every head needs the same number of features, change "
                "model.hidden_size or model.num_heads"
            )


@dataclass(frozen=True)
class GPTConfig(_Transformer):
    """Shape of a GPT. Sizes are in features, `context_length` in tokens.

    Source: Radford et al. 2019 (GPT-2) for the architecture; Su et al. 2021 (arXiv:2104.09864) for
        rotary positions; Ainslie et al. 2023 (arXiv:2305.13245) for fewer key/value heads than
        query heads; Touvron et al. 2023 (arXiv:2302.13971), section 2.2, for Llama, which is
        `positions="rotary", norm="rms", mlp="swiglu", bias=False`.
    """

    vocab_size: int | None = None  # None: as many as the tokenizer of the data has
    context_length: int = 128
    num_layers: int = 4
    num_heads: int = 4
    hidden_size: int = 128
    num_kv_heads: int | None = None  # None: as many as query heads
    ffn_size: int | None = None  # None: 4 * hidden_size
    positions: Literal["learned", "rotary"] = "learned"
    rotary_base: float = 10000.0  # only for positions=rotary; Llama 3 has 500000
    norm: Literal["layer", "rms"] = "layer"
    norm_epsilon: float = 1e-5
    # gelu has the tanh form, as GPT-2 has; swiglu has a third matrix and F features of gate and up
    mlp: Literal["gelu", "gelu_erf", "swiglu"] = "gelu"
    bias: bool = True  # in linear layers and norms
    tie_embeddings: bool = True
    dropout: float = 0.0
    num_experts: int = 0  # MLPs of each layer, of which a token uses some; 0: one MLP for all
    experts_per_token: int = 2
    expert_ffn_size: int | None = None  # features inside one expert; None: as ffn_size
    shared_ffn_size: int = 0  # of an MLP beside the experts, for all tokens; 0: there is none
    # rows of a sequence that an expert takes, as a multiple of its even share; 0: all that come
    expert_capacity: float = 0.0
    # how scores become weights (models.moe.Router)
    router: Literal["softmax", "softmax_of_chosen", "sigmoid"] = "softmax_of_chosen"
    router_balance: float = 0.01  # weight of the balance loss of each sequence
    router_z_loss: float = 0.0  # weight of the loss that keeps the router's logits small
    router_bias_rate: float = 0.0  # how far each step moves the bias of a router to even its load

    def __post_init__(self) -> None:
        sizes = {"vocab_size": SIZE, "context_length": SIZE, "num_kv_heads": SIZE}
        sizes |= {"num_experts": COUNT_OR_ZERO, "experts_per_token": COUNT}
        sizes |= {"expert_ffn_size": SIZE, "shared_ffn_size": COUNT_OR_ZERO}
        sizes |= {"expert_capacity": NOT_NEGATIVE}
        sizes |= dict.fromkeys(
            ("router_balance", "router_z_loss", "router_bias_rate"), NOT_NEGATIVE
        )
        sizes |= {"rotary_base": ROTARY_BASE, "norm_epsilon": NORM_EPSILON}
        check_fields(self, "model", TRANSFORMER_RANGES | sizes)
        self._check_transformer()
        if self.norm == "rms" and self.bias:
            raise ValueError(
                "model.norm=rms has no bias, and linear layers with one beside it are no known "
                "model: give --model.bias False"
            )
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"model.num_heads={self.num_heads} is not a multiple of "
                f"num_kv_heads={self.kv_heads}: change model.num_heads or model.num_kv_heads"
            )
        if self.positions == "rotary" and self.head_size % 2:
            raise ValueError(
                f"model.positions=rotary turns pairs of features, and head size {self.head_size} "
                f"is odd (model.hidden_size={self.hidden_size} over "
                f"model.num_heads={self.num_heads}): change one of them"
            )
        if self.num_experts:
            self._check_experts()

    def _check_experts(self) -> None:
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"model.experts_per_token={self.experts_per_token} with "
                f"model.num_experts={self.num_experts}: a token uses each expert once at most"
            )
        if 0 < self.expert_capacity < 1:
            raise ValueError(
                f"model.expert_capacity={self.expert_capacity:g}: below 1 rows are dropped even if "
                "all experts get the same number, give at least 1, or 0 for no capacity"
            )
        if self.bias:
            raise ValueError(
                "model.num_experts with model.bias=True: experts have no biases here, as in all "
                "published mixtures, give --model.bias False"
            )
        if self.dropout:
            raise ValueError(
                f"model.num_experts with model.dropout={self.dropout:g}: experts have no dropout "
                "here, set it to 0"
            )

    @property
    def kv_heads(self) -> int:
        """Key/value heads."""
        return self.num_kv_heads or self.num_heads

    @property
    def gated(self) -> bool:
        """Whether the MLP has a third matrix, the gate."""
        return self.mlp == "swiglu"

    @property
    def sequence_length(self) -> int:
        """Tokens that one sample sends through the layers."""
        return self.context_length

    @property
    def num_parameters(self) -> int:
        """Weights and biases of the whole model, exactly; a tied embedding counts once."""
        require(self, "vocab_size")
        assert self.vocab_size is not None  # for the type checker
        embeddings = self.vocab_size if self.tie_embeddings else 2 * self.vocab_size
        positions = self.context_length if self.positions == "learned" else 0
        layers = self._layer_parameters(self.kv_heads, self.gated, self.bias)
        if self.num_experts:
            mlp = self._mlp_parameters(self.ffn, self.gated, self.bias)
            layers += self.num_layers * (self._mixture_parameters - mlp)
        return (embeddings + positions) * self.hidden_size + layers

    @property
    def expert_ffn(self) -> int:
        """Features inside one expert."""
        return self.expert_ffn_size or self.ffn

    @property
    def active_ffn(self) -> int:
        """Features inside all MLPs of a layer that a token uses: k experts and the shared one."""
        if not self.num_experts:
            return self.ffn
        return self.experts_per_token * self.expert_ffn + self.shared_ffn_size

    @property
    def num_expert_parameters(self) -> int:
        """Those of `num_parameters` that are in experts, without routers and shared MLPs."""
        return self.num_layers * self.num_experts * self._expert_parameters

    @property
    def num_active_parameters(self) -> int:
        """Those of `num_parameters` that one token uses."""
        idle = max(0, self.num_experts - self.experts_per_token)
        return self.num_parameters - self.num_layers * idle * self._expert_parameters

    @property
    def _router_row(self) -> int:
        """Parameters of a router for one expert: its row, and its bias if there is one."""
        num_biases = 1 if self.router_bias_rate > 0 else 0
        return self.hidden_size + num_biases

    @property
    def _expert_parameters(self) -> int:
        return self._mlp_parameters(self.expert_ffn, self.gated, bias=False)

    @property
    def _mixture_parameters(self) -> int:
        """Parameters in place of those of an MLP: router, experts, and the MLP beside them."""
        shared = self._mlp_parameters(self.shared_ffn_size, self.gated, bias=False)
        return self.num_experts * (self._expert_parameters + self._router_row) + shared


@dataclass(frozen=True)
class ViTConfig(_Transformer):
    """Shape of a vision transformer that maps a weather state to the next one.

    A state is `[C, Y, X]`: C variables on Y latitudes and X longitudes; it is cut into patches of
    `patch_size` squared. Forcings, such as the height of the sun, are F more input fields that are
    not predicted.

    Source: Dosovitskiy et al. 2020 (arXiv:2010.11929), with a pixel-space head in place of the
        class token.
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

    def __post_init__(self) -> None:
        sizes = {"num_variables": SIZE, "lat": SIZE, "lon": SIZE, "patch_size": SIZE}
        sizes["num_forcings"] = Range(0, SIZE.most, "must not be negative")
        check_fields(self, "model", TRANSFORMER_RANGES | sizes)
        self._check_transformer()
        for name in ("lat", "lon"):
            size = getattr(self, name)
            if size is not None and size % self.patch_size:
                raise ValueError(
                    f"model.{name}={size} is not a multiple of patch_size={self.patch_size}: "
                    "choose a model.patch_size that divides it"
                )

    @property
    def patch_outputs(self) -> int:
        """Predicted values of a patch, `C * P^2`."""
        require(self, "num_variables")
        assert self.num_variables is not None
        return self.num_variables * self.patch_size**2

    @property
    def patch_inputs(self) -> int:
        """Input values of a patch, `(C + F) * P^2`."""
        return self.patch_outputs + (self.num_forcings or 0) * self.patch_size**2

    @property
    def sequence_length(self) -> int:
        """Patches that one sample sends through the layers."""
        require(self, "lat", "lon")
        assert self.lat is not None and self.lon is not None
        return (self.lat // self.patch_size) * (self.lon // self.patch_size)

    @property
    def num_parameters(self) -> int:
        """Weights and biases of the whole model, exactly."""
        require(self, "num_variables", "lat", "lon")
        hidden = self.hidden_size
        embedding = (self.patch_inputs + 1) * hidden
        head = (hidden + 1) * self.patch_outputs
        positions = self.sequence_length * hidden
        return embedding + head + positions + self._layer_parameters(self.num_heads)


ModelConfig = GPTConfig | ViTConfig

# ---- data


@dataclass(frozen=True)
class TextData:
    """Text to learn. With `path` None it is the Shakespeare that ships with the course."""

    path: str | None = None  # your UTF-8 text (.txt or .txt.gz), or tokens (.bin, .npy)
    tokenizer: str = "char"  # char, bpe, or the tokenizer.json of a model of the hub
    bpe_vocab_size: int = 8192  # only for tokenizer="bpe"
    val_fraction: float = 0.1  # the last part of the text, never trained on
    cache_dir: str | None = None  # where token files are kept; None: ~/.cache/labcode

    def __post_init__(self) -> None:
        sizes = Range(257, 10**6, "a byte-level BPE needs at least 257 (256 bytes and a separator)")
        check_fields(self, "data", {"val_fraction": FRACTION, "bpe_vocab_size": sizes})
        if self.tokenizer not in ("char", "bpe") and not self.tokenizer.endswith(".json"):
            raise ValueError(
                f"data.tokenizer={shown(self.tokenizer)}: give one of char, bpe, or the path of a "
                "tokenizer.json"
            )


@dataclass(frozen=True)
class WeatherData:
    """Weather to predict. With `path` None it is the 2 degree ERA5 sample of the course."""

    path: str | None = None  # your ERA5: a zarr folder, or HDF5/netCDF (.h5, .hdf5, .nc)
    variables: tuple[str, ...] = ("t2m", "u10", "v10", "msl")
    val_fraction: float = 0.2  # the last part of the times, never trained on
    roll: bool = (
        False  # also train on each state rotated by every longitude: more data from few times
    )
    sun: bool = False  # two more inputs: the height of the sun now and at the next time
    crop: tuple[int, ...] | None = None  # train on parts of the map, latitudes x longitudes

    def __post_init__(self) -> None:
        check_fields(self, "data", {"val_fraction": FRACTION, "crop": SIZE})
        if self.crop is not None and len(self.crop) != 2:
            raise ValueError(
                f"data.crop={shown(self.crop)}: give two numbers, latitudes and longitudes of a "
                "part of the map, such as 30 60"
            )
        if not self.variables:
            raise ValueError("data.variables is empty: name at least one, for example t2m")
        for name in self.variables:
            if self.variables.count(name) > 1:
                raise ValueError(f"data.variables has {shown(name)} more than once: name it once")


# ---- the run


# in bytes it must be an int64
BUCKET_MB = Range(0, 10**6, "give a number above 0", above=True)
TIMEOUT_S = Range(1, 86_400, "give the seconds, at least 1 and at most a day")


@dataclass(frozen=True)
class ParallelConfig:
    """How a model and its data are spread over the ranks of a job.

    Sizes and `order` make the grid (device mesh); the other fields say what happens along its axes.

    Source: the section of the same purpose in torchtitan, `ParallelismConfig`.
    """

    dp: int | None = None  # ranks of data parallelism; None: all that the other axes leave
    ep: int = 1  # of them neighbours over which the experts of a layer are divided
    pp: int = 1  # ranks of pipeline parallelism
    cp: int = 1  # ranks of context parallelism
    tp: int = 1  # ranks of tensor parallelism
    order: str = "tp-cp-dp-pp"  # the axes, fastest-varying first: neighbouring ranks differ in tp
    data_parallel: Literal["ddp", "labcode"] = "ddp"  # PyTorch's, or the hand-written one
    # what is divided over dp: 1 the optimizer's state, 2 gradients too, 3 weights too
    zero_stage: int = 0
    zero_replicas: int = 1  # hybrid sharding: dp is this many copies, each divided over dp/copies
    bucket_mb: float = 25.0  # gradients travel in buckets of this size, in MB
    sequence_parallel: bool = (
        False  # over tp: norms, dropout and residuals on a part of the sequence
    )
    context_attention: Literal["ring", "all_gather"] = "ring"  # over cp: how keys and values travel
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b"
    stages_per_rank: int = 1  # more than 1 only with pipeline_schedule="interleaved"
    layers_per_stage: tuple[int, ...] | None = None  # None: as evenly as possible
    # what backward computes again. selective: the core of attention; full: each layer
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    share_gpus: bool = False  # several ranks on one GPU, over gloo
    collective_timeout_s: float = 600.0  # so long a collective waits for a rank that does not come

    def __post_init__(self) -> None:
        ranks = dict.fromkeys(("dp", "ep", "pp", "cp", "tp", "zero_replicas"), SIZE)
        others = {"stages_per_rank": LAYERS, "layers_per_stage": LAYERS, "bucket_mb": BUCKET_MB}
        others["collective_timeout_s"] = TIMEOUT_S
        others["zero_stage"] = Range(0, 3, "give 0 for none, or 1, 2 or 3")
        check_fields(self, "parallel", ranks | others)
        if self.layers_per_stage == ():
            raise ValueError(
                "parallel.layers_per_stage is empty: give a number for each stage, or None"
            )
        try:
            GridShape(order=self.order)
        except ValueError as error:
            raise ValueError(f"parallel.{error}") from None

    @property
    def divides_weights(self) -> bool:
        """Whether a rank's modules hold their weights whole only while they use them.

        Each forward then waits for the other ranks of dp. PyTorch's FSDP2, which is used from stage
        2 on, divides weights at stage 2 too: it gathers them once a step.

        Held by: tests/ranks/test_parallelize.py::
            test_a_config_says_whether_weights_are_divided_and_gathered_in_forward
        """
        return self.zero_stage >= (2 if self.data_parallel == "ddp" else 3)

    def shape(self, world_size: int) -> GridShape:
        """The grid for a job of `world_size` ranks.

        Raises:
            ValueError: The sizes do not multiply to the number of ranks.
        """
        dp = self.dp
        if dp is None:
            dp = max(1, world_size // self.replica.world_size)
        shape = replace(self.replica, dp=dp).check(world_size)
        try:
            return replace(shape, ep=self.ep)
        except ValueError as error:
            raise ValueError(f"parallel.{error}") from None

    @property
    def replica(self) -> GridShape:
        """The grid of one replica of the model, which is the same for any number of ranks."""
        return GridShape(pp=self.pp, cp=self.cp, tp=self.tp, order=self.order)

    def stage_layers(self, num_layers: int, pp: int) -> tuple[range, ...]:
        """The layers of each pipeline stage.

        Raises:
            ValueError: The layers cannot be divided into these stages.
        """
        num_stages = pp * self.stages_per_rank
        if num_stages > num_layers:
            raise ValueError(
                f"parallel.pp*stages_per_rank = {pp}*{self.stages_per_rank} stages, "
                f"but model.num_layers={num_layers}: each stage needs a layer, so "
                "lower parallel.pp or raise model.num_layers"
            )
        sizes = self.layers_per_stage or _even_sizes(num_layers, num_stages)
        if len(sizes) != num_stages or sum(sizes) != num_layers or min(sizes) < 1:
            raise ValueError(
                f"parallel.layers_per_stage={sizes} does not divide {num_layers} layers into "
                f"{num_stages} stages: give parallel.pp*stages_per_rank = "
                f"{pp}*{self.stages_per_rank} numbers, each at least 1, "
                "that add up to model.num_layers"
            )
        stages = []
        first = 0
        for size in sizes:
            stages.append(range(first, first + size))
            first += size
        return tuple(stages)

    def check_stages(self, pp: int, num_microbatches: int) -> None:
        """Check that a schedule can have these stages and micro-batches.

        Raises:
            ValueError: By the names of the fields; `schedules.schedule` knows only the numbers.
        """
        if self.pipeline_schedule != "interleaved":
            if self.stages_per_rank > 1:
                raise ValueError(
                    f"parallel.stages_per_rank={self.stages_per_rank} with "
                    f"parallel.pipeline_schedule={self.pipeline_schedule}, which has one stage per "
                    "rank: use --parallel.pipeline_schedule interleaved"
                )
        elif num_microbatches % pp:
            raise ValueError(
                f"parallel.pipeline_schedule=interleaved with {num_microbatches} micro-batches, "
                f"which are no multiple of parallel.pp={pp}: change train.micro_batch or "
                "train.global_batch"
            )

    def check(self, model: ModelConfig, shape: GridShape) -> None:
        """Check that a model fits a grid: every rank gets its part of weights and sequence.

        Sizes that are None, to be taken from the data, are skipped; call it again when they are
        known.

        Args:
            model: The whole model.
            shape: The grid; its sizes count, not those of this config.

        Raises:
            ValueError: One line on what does not fit and what to change.
        """
        self.check_model(model, shape)
        self._check_experts(model, shape)
        self._check_zero(model, shape)

    def check_model(self, model: ModelConfig, shape: GridShape) -> None:
        """Like `check`, except for what depends on dp: `shape` may be `replica`."""
        self.stage_layers(model.num_layers, shape.pp)
        _check_tensor_parallel(model, shape.tp)
        if shape.cp > 1 and model.dropout and self.context_attention == "ring":
            raise ValueError(
                f"model.dropout={model.dropout:g} with parallel.cp={shape.cp}: ring attention has "
                "no dropout, set it to 0 or use --parallel.context_attention all_gather"
            )
        _check_sequence(model, shape, self.sequence_parallel)

    def _check_experts(self, model: ModelConfig, shape: GridShape) -> None:
        """Check what experts can be combined with."""
        num_experts = model.num_experts if isinstance(model, GPTConfig) else 0
        if self.ep > 1 and not num_experts:
            raise ValueError(
                f"parallel.ep={self.ep} divides experts, and this model has none: set it to 1, or "
                "give --model.num_experts"
            )
        if num_experts % self.ep:
            raise ValueError(
                f"model.num_experts={num_experts} is not divisible by parallel.ep={self.ep}: "
                "change one of them"
            )
        if isinstance(model, GPTConfig) and num_experts:
            _check_divisible(
                "model.expert_ffn_size",
                model.expert_ffn,
                shape.tp,
                f"parallel.tp={shape.tp}",
                "tp cuts each expert into equal parts, change one of them",
            )
        if self.ep > 1 and self.zero_replicas > 1:
            raise ValueError(
                f"parallel.zero_replicas={self.zero_replicas} with parallel.ep={self.ep}: dp is "
                "cut for experts already, set one of them to 1"
            )
        if self.ep > 1 and self.zero_stage == 1 and self.data_parallel == "ddp":
            raise ValueError(
                f"parallel.zero_stage=1 with parallel.ep={self.ep} and parallel.data_parallel=ddp: "
                "PyTorch's ZeroRedundancyOptimizer takes all weights of dp for copies, use "
                "--parallel.data_parallel labcode"
            )
        if num_experts and shape.cp > 1 and isinstance(model, GPTConfig) and model.expert_capacity:
            raise ValueError(
                f"model.expert_capacity={model.expert_capacity:g} with parallel.cp={shape.cp}: "
                "which rows of a sequence come first is known only where all of it is, set it to 0"
            )

    def _check_zero(self, model: ModelConfig, shape: GridShape) -> None:
        """Check what ZeRO can be combined with."""
        stage = f"parallel.zero_stage={self.zero_stage}"
        if self.zero_replicas > 1 and not self.zero_stage:
            raise ValueError(
                f"parallel.zero_replicas={self.zero_replicas} with {stage}: nothing is divided "
                "there, choose a stage of 1 to 3"
            )
        if shape.dp % self.zero_replicas:
            raise ValueError(
                f"parallel.dp={shape.dp} is not divisible by "
                f"parallel.zero_replicas={self.zero_replicas}: change one of them"
            )
        if not self.zero_stage:
            return
        if isinstance(model, GPTConfig) and model.kv_heads < shape.tp:
            raise ValueError(
                f"{stage} with parallel.tp={shape.tp} and model.num_kv_heads={model.kv_heads}: "
                "weights of which ranks of tp hold copies cannot be divided as well, use "
                "parallel.zero_stage=0 or a smaller parallel.tp"
            )
        if self.zero_stage > 1 and shape.pp > 1 and self.pipeline_schedule == "zero_bubble":
            raise ValueError(
                f"{stage} with parallel.pipeline_schedule=zero_bubble, which puts off the "
                "gradients of weights that would be gone by then: use parallel.zero_stage=1 or "
                "another schedule"
            )
        if self.data_parallel == "ddp":
            self._check_zero_of_torch(shape, stage)

    def _check_zero_of_torch(self, shape: GridShape, stage: str) -> None:
        ours = "use --parallel.data_parallel labcode"
        if shape.pp > 1:
            raise ValueError(
                f"{stage} with parallel.pp={shape.pp} and parallel.data_parallel=ddp: {ours}"
            )
        if self.zero_replicas > 1 and (shape.cp > 1 or self.zero_stage == 1):
            raise ValueError(
                f"parallel.zero_replicas={self.zero_replicas} with parallel.data_parallel=ddp "
                f"works for zero_stage 2 and 3 without cp: {ours}"
            )


def _even_sizes(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Sizes that differ by at most one; the first stages get one layer more."""
    even, longer = divmod(num_layers, num_stages)
    sizes = [even + 1] * longer + [even] * (num_stages - longer)
    return tuple(sizes)


def _check_tensor_parallel(model: ModelConfig, tp: int) -> None:
    """Every rank gets the same number of heads; all else may be cut into unequal parts."""
    heads = model.num_heads
    sizes = [str(size) for size in range(1, heads + 1) if heads % size == 0]
    remedy = f"parallel.tp can be {', '.join(sizes)}"
    _check_divisible("model.num_heads", heads, tp, f"parallel.tp={tp}", remedy)
    parts = {"model.ffn_size": model.ffn}
    if isinstance(model, GPTConfig):
        _check_kv_heads(model.kv_heads, tp)
        if model.vocab_size is not None:
            parts["model.vocab_size"] = model.vocab_size
    for name, size in parts.items():
        if size < tp:
            raise ValueError(
                f"{name}={size} is smaller than parallel.tp={tp}: some rank has no row"
            )


def _check_kv_heads(kv_heads: int, tp: int) -> None:
    """Key/value heads are divided over tp, or each of them is held by the same number of ranks."""
    if kv_heads % tp and tp % kv_heads:
        raise ValueError(
            f"model.num_kv_heads={kv_heads} is neither a multiple nor a divisor of "
            f"parallel.tp={tp}: change one of them"
        )


def _check_sequence(model: ModelConfig, shape: GridShape, sequence_parallel: bool) -> None:
    """The sequence is divided over cp, and under sequence parallelism over tp as well."""
    if isinstance(model, GPTConfig):
        name = "model.context_length"
        length = model.context_length
        chunks = 2 * shape.cp  # under a causal mask each rank takes two chunks: equal work for all
        if shape.cp > 1 and length < chunks:
            raise ValueError(
                f"{name}={length} is smaller than 2*parallel.cp = 2*{shape.cp}: "
                "some rank has no token"
            )
    elif model.lat is None or model.lon is None:
        return
    else:
        name = "the number of patches"
        length = model.sequence_length
        what = f"parallel.cp={shape.cp}"
        _check_divisible(name, length, shape.cp, what, "every rank of cp takes an equal part")
    if sequence_parallel:
        what = f"cp*tp = {shape.cp}*{shape.tp}"
        remedy = "change one of them or turn parallel.sequence_parallel off"
        _check_divisible(name, length, shape.cp * shape.tp, what, remedy)


def _check_divisible(name: str, size: int, parts: int, what: str, remedy: str) -> None:
    if size % parts:
        raise ValueError(f"{name}={size} is not divisible by {what}: {remedy}")


# a step takes lr*weight_decay of each weight: with more, weights of a usual rate change their sign
WEIGHT_DECAY = Range(0, 1000, "must not be negative")


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer and its learning-rate schedule: linear warm-up, then half a cosine to `min_lr`.

    LAMB and LARS scale the update of each matrix to the size of that matrix; they come with
    labcode[optimizers]. For LARS `beta1` is the momentum.

    Source: You et al. 2019 (arXiv:1904.00962), LAMB; You et al. 2017 (arXiv:1708.03888), LARS.
    """

    name: Literal["adamw", "lamb", "lars"] = "adamw"
    lr: float = 1e-3
    min_lr: float = 1e-4
    # `lr` and `min_lr` are those of `reference_batch`; by (train.global_batch / reference_batch),
    # or by its square root, they grow with the batch
    lr_rule: Literal["none", "linear", "square_root"] = "none"
    reference_batch: int | None = None  # samples per optimizer step
    warmup_steps: int = 20
    weight_decay: float = 0.1  # on matrices; biases and norms are left alone
    beta1: float = 0.9
    beta2: float = 0.95
    clip_norm: float = 1.0  # largest allowed norm of the whole gradient; 0 turns clipping off
    # one kernel for all weights; one for each operation on all weights; one for each of both
    implementation: Literal["fused", "foreach", "for_loop"] = "fused"

    def __post_init__(self) -> None:
        ranges = {
            "lr": POSITIVE,
            "min_lr": NOT_NEGATIVE,
            "reference_batch": SIZE,
            "warmup_steps": COUNT_OR_ZERO,
            "weight_decay": WEIGHT_DECAY,
            "beta1": PROBABILITY,
            "beta2": PROBABILITY,
            "clip_norm": NOT_NEGATIVE,
        }
        check_fields(self, "optim", ranges)
        if self.min_lr > self.lr:
            raise ValueError(
                f"optim.min_lr={self.min_lr} is larger than optim.lr={self.lr}: change one of them"
            )
        if self.lr_rule != "none" and self.reference_batch is None:
            raise ValueError(
                f"optim.lr_rule={self.lr_rule} scales optim.lr from the batch for which it is "
                "right: name that one with optim.reference_batch"
            )
        if self.lr_rule == "none" and self.reference_batch is not None:
            raise ValueError(
                f"optim.reference_batch={self.reference_batch} changes nothing with "
                "optim.lr_rule=none: choose linear or square_root, or leave it out"
            )

    def for_batch(self, global_batch: int) -> "OptimConfig":
        """A copy with the learning rates for a batch, and without a rule.

            linear        lr * B / B_ref            (SGD, while the batch is far below critical)
            square_root   lr * sqrt(B / B_ref)      (Adam: its update does not grow with the batch)

        Args:
            global_batch: Samples per optimizer step, B.

        Source: Goyal et al. 2017 (arXiv:1706.02677), section 2.1; Malladi et al. 2022
            (arXiv:2205.10287), for the square root with Adam.
        Held by: tests/unit/test_optim.py::test_the_rate_follows_the_batch_by_its_rule
        """
        if self.reference_batch is None:
            return self
        ratio = global_batch / self.reference_batch
        factor = ratio if self.lr_rule == "linear" else math.sqrt(ratio)
        return replace(
            self,
            lr=self.lr * factor,
            min_lr=self.min_lr * factor,
            lr_rule="none",
            reference_batch=None,
        )


FACTOR = Range(0, 10**6, "give more than 1, or 0 for none")
PERIOD_S = Range(0, 86_400, "give the seconds, or 0 for none")
SHORTEST_PERIOD_S = 0.01
# a schedule lists every one of them
MOST_MICRO_BATCHES = 100_000


@dataclass(frozen=True)
class TrainConfig:
    """The loop. Batches are counted in samples: sequences of text, or weather states."""

    steps: int = 300
    global_batch: int = 32  # samples per optimizer step over all ranks, whatever their number
    micro_batch: int | None = None  # samples per rank and forward; None: no gradient accumulation
    seed: int = 0
    # of matrix products; auto: bfloat16 on a GPU, float32 on a CPU
    dtype: Literal["auto", "float32", "tf32", "bfloat16", "float16", "float64", "fp8"] = "auto"
    # in which gradients are summed over dp; float32: as they are
    reduce_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    # by torch.compile: each layer, or the whole; tens of seconds at the first step
    compile: Literal["none", "block", "model"] = "none"
    cuda_graphs: bool = False  # on a GPU: forward and backward as one recorded list of kernels
    eval_every: int = 100  # steps between validations; 0: only at the end
    eval_batches: int = 8
    log_every: int = 10
    # of a gradient that is not finite, or a spike: stop the run; skip the update; or go back to the
    # newest checkpoint and leave out all batches since
    on_bad_step: Literal["stop", "skip", "rollback"] = "stop"
    spike_factor: float = 0.0  # a gradient norm this many times its median is bad; 0: none is
    bad_in_a_row: int = 5  # more bad steps in a row end the run
    bad_in_all: int = 100  # more bad steps in the whole run end it
    # a rank that takes this many times longer than those with the same work is named; 0: none is
    slow_factor: float = 2.0
    # measure how large a batch is worth its samples: metric noise_scale, from the gradients of
    # single micro-batches, of which a step must have two at least
    noise_scale: bool = False
    sample_device_s: float = 1.0  # seconds between looks at how busy the device is; 0: none
    sample_tokens: int = 300  # length of the text sample at the end; 0: none
    out: str | None = None  # folder for metrics and weights; None: the next free runs/NAME-NNN
    overwrite: bool = False  # rename an existing `out` to `out`.old-1, or the next free number
    # folder or file with weights of a GPT-2, StarCoder2 or Llama, or nanoGPT's ckpt.pt
    start_from: str | None = None
    # weights and modules that do not train: embed blocks.0, or blocks.*.mlp; None: all train
    freeze: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        ranges = {
            "steps": COUNT,
            "global_batch": SIZE,
            "micro_batch": SIZE,
            "seed": SEED,
            "eval_every": COUNT_OR_ZERO,
            "eval_batches": COUNT,
            "log_every": COUNT,
            "spike_factor": FACTOR,
            "bad_in_a_row": COUNT,
            "bad_in_all": COUNT,
            "slow_factor": FACTOR,
            "sample_device_s": PERIOD_S,
            "sample_tokens": COUNT_OR_ZERO,
        }
        check_fields(self, "train", ranges)
        for name in ("spike_factor", "slow_factor"):
            factor = getattr(self, name)
            if 0 < factor <= 1:
                raise ValueError(
                    f"train.{name}={factor} would find fault with the usual: give more than 1, or "
                    "0 for none"
                )
        if 0 < self.sample_device_s < SHORTEST_PERIOD_S:
            raise ValueError(
                f"train.sample_device_s={self.sample_device_s} would disturb what it measures: "
                f"give at least {SHORTEST_PERIOD_S}, or 0 for none"
            )

    def accumulation(self, dp_size: int) -> int:
        """Micro-batches that one rank adds up before each optimizer step.

        Raises:
            ValueError: global_batch cannot be cut into whole micro-batches over `dp_size` ranks, or
                only into far too many.
        """
        micro_batch = self.micro_batch or max(1, self.global_batch // dp_size)
        count, rest = divmod(self.global_batch, micro_batch * dp_size)
        if self.global_batch % dp_size:
            larger = (self.global_batch // dp_size + 1) * dp_size
            raise ValueError(
                f"global_batch={self.global_batch} is not a multiple of dp={dp_size}: each rank of "
                f"dp takes as many samples, so set train.global_batch to {larger}, for example"
            )
        if rest or count == 0:
            raise ValueError(
                f"global_batch={self.global_batch} is not a multiple of micro_batch*dp = "
                f"{micro_batch}*{dp_size} = {micro_batch * dp_size}: "
                "change train.global_batch or train.micro_batch"
            )
        if count > MOST_MICRO_BATCHES:
            raise ValueError(
                f"train.global_batch={self.global_batch} over {dp_size} ranks of dp is {count} "
                f"micro-batches of {micro_batch} a step, and {MOST_MICRO_BATCHES} are the most: "
                "give a larger train.micro_batch"
            )
        return count


@dataclass(frozen=True)
class CheckpointConfig:
    """What is kept of a run in OUT/checkpoints.

    With `every` or `resume`, SIGUSR1 and SIGTERM stop the run after a last checkpoint, and leave
    the file `stopped` in train.out, which the job script looks for.
    """

    every: int = 0  # optimizer steps between checkpoints; 0: only at the end, and at a signal
    keep: int = 2  # how many of the newest are kept
    resume: bool = False  # resume from the newest checkpoint in train.out; start if there is none
    in_background: bool = False  # training continues while the files are written, from a copy

    def __post_init__(self) -> None:
        steps = Range(0, COUNT.most, "give the steps between checkpoints, or 0 for none")
        check_fields(self, "checkpoint", {"every": steps, "keep": COUNT})

    @property
    def on(self) -> bool:
        """Whether the run writes checkpoints at all."""
        return self.every > 0 or self.resume


@dataclass(frozen=True)
class LocalConfig:
    """Copies of the model that train alone for some steps, for slow links between them.

    The defaults are DiLoCo's; outer_lr 1 and outer_momentum 0 average the copies (local SGD).

    Source: Douillard et al. 2023 (arXiv:2311.08105), section 3.
    """

    steps: int = 0  # optimizer steps between two averages over dp; 0: gradients, at every step
    outer_lr: float = 0.7  # of the step that all copies take together
    outer_momentum: float = 0.9  # Nesterov's

    def __post_init__(self) -> None:
        rate = Range(0, 100, "give a number above 0, for example 0.7", above=True)
        momentum = Range(0, 0.999, "give a number from 0 to 0.999")
        fields = {"steps": COUNT_OR_ZERO, "outer_lr": rate, "outer_momentum": momentum}
        check_fields(self, "local", fields)


@dataclass(frozen=True)
class LoaderConfig:
    """How batches come to the loop; none of it changes which samples they hold.

    With DALI `workers` are threads of its pipeline, and `prefetch` counts the batches of all of
    them.
    """

    workers: int = 0  # processes that read ahead; 0: the training process reads, between steps
    prefetch: int = 2  # steps that each worker reads ahead
    pin_memory: bool = False  # on a GPU: read into page-locked memory, from which copies overlap
    backend: Literal["torch", "dali"] = "torch"  # dali: NVIDIA's, for weather, labcode[dali]

    def __post_init__(self) -> None:
        workers = Range(0, 1024, "give the number of processes, or 0 for none")
        prefetch = Range(1, 1000, "give a number above 0")
        check_fields(self, "loader", {"workers": workers, "prefetch": prefetch})


@dataclass(frozen=True)
class ProfileConfig:
    """Steps that are recorded in OUT/profile, for TensorBoard's profiler tab and Perfetto.

    `python -m labcode.measure.profile OUT` says where their time went.
    """

    steps: str | None = None  # "10:13": steps 10, 11 and 12, as a slice of Python; "10": that one
    ranks: tuple[int, ...] = (0,)  # those that record
    warmup: int = 1  # steps before them that the profiler sees and forgets
    memory: bool = False  # every allocation, too, and what it is for
    # on GPUs: ranges for Nsight Systems in place of the profiler of PyTorch
    nvtx: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "profile", {"ranks": COUNT_OR_ZERO, "warmup": COUNT_OR_ZERO})
        for name in ("memory", "nvtx"):
            if getattr(self, name) and self.steps is None:
                raise ValueError(
                    f"profile.{name} is for recorded steps, and there are none: name them, "
                    "--profile.steps 10:13"
                )
        if self.memory and self.nvtx:
            raise ValueError(
                "profile.nvtx leaves the recording to Nsight Systems, which sees no tensors: leave "
                "out profile.memory"
            )
        self.recorded  # noqa: B018  (a look at the steps, which may be wrong)

    @property
    def recorded(self) -> range:
        """The steps that are recorded; the first step of a run is 1.

        Raises:
            ValueError: They are not written as steps are.
        """
        if self.steps is None:
            return range(0)
        first, colon, end = self.steps.partition(":")
        if not first.isdecimal() or (colon and not end.isdecimal()):
            raise ValueError(
                f"profile.steps={shown(self.steps)}: give the first step and the one after the "
                "last, such as 10:13 for steps 10, 11 and 12"
            )
        steps = range(int(first), int(end) if colon else int(first) + 1)
        if not steps or steps[0] < 1:
            raise ValueError(
                f"profile.steps={shown(self.steps)} holds no step: the first step of a run is 1, "
                "and the end comes after the beginning"
            )
        return steps


@dataclass(frozen=True)
class DebugConfig:
    """Tools that look at every tensor of a step; each costs time while it looks."""

    # a step whose loss or gradient is not finite runs once more, and the first tensor that is not
    # finite is named; each step costs one all-reduce of one number
    probe: bool = False
    # this many first steps are written to OUT/record, for `python -m labcode.debug.bisect`
    record_steps: int = 0
    # a YAML of debug features, as for Transformer Engine: statistics of tensors, fake quantization
    config: str | None = None  # it needs labcode[debug]
    log_dir: str | None = None  # where they are written; None: OUT/debug
    # whose statistics are put together: the ranks along these axes; None: each rank has its own
    reduce_over: tuple[str, ...] | None = None
    reduce_weights: bool = True  # put those of weights together over tp
    feature_dir: str | None = None  # a folder with features of yours
    tensorboard: bool = False  # in log_dir/tensorboard, too, by one rank of each pipeline stage

    def __post_init__(self) -> None:
        check_fields(self, "debug", {"record_steps": COUNT_OR_ZERO})
        for axis in self.reduce_over or ():
            if axis not in ("dp", "cp", "tp"):
                raise ValueError(
                    f"debug.reduce_over has {shown(axis)}: name some of dp, cp and tp; ranks of pp "
                    "have different layers"
                )
        others = ("log_dir", "reduce_over", "feature_dir", "tensorboard")
        for name in others:
            if self.config is None and getattr(self, name):
                raise ValueError(
                    f"debug.{name} is for debug.config, and there is none: name a YAML of features"
                )
        if self.config is not None and self.probe:
            raise ValueError(
                "debug.probe runs a step twice, and debug.config would count it twice: choose one "
                "of them"
            )


@dataclass(frozen=True)
class Fp8Config:
    """Where the scales of 8-bit numbers come from, for `train.dtype=fp8` (`precision.fp8`)."""

    recipe: Literal["delayed", "current", "block"] = "delayed"
    history_length: int = 16  # delayed: steps whose amaxes are remembered
    margin: int = 0  # delayed and current: powers of two that are left free for growth
    amax: Literal["max", "most_recent"] = "max"  # delayed: which amax of the history counts
    # the ranks that use the same scales: all that have parts or copies of a layer, those of tp, or
    # each rank by itself
    share: Literal["all", "tp", "none"] = "all"
    skip: tuple[str, ...] = ("head",)  # linear layers whose names end so stay in bfloat16

    def __post_init__(self) -> None:
        margin = Range(0, 32, "give the number of powers of two to leave free")
        check_fields(self, "fp8", {"history_length": COUNT, "margin": margin})


@dataclass(frozen=True)
class LoraConfig:
    """Thin matrices beside the linear layers, which train in place of the model (`models.lora`).

    Checkpoints hold them alone: the frozen model is made again from `train.start_from`, or from
    `train.seed`.

    Where products are computed in 16 bits, the frozen weights of these layers are kept in 16 bits
    too: each product would round them anyway, so that no number changes.

    Source: Hu et al. 2021 (arXiv:2106.09685), section 4.1.
    """

    rank: int = 0  # rows of A and columns of B; 0: no adapters, the model itself trains
    alpha: float = 16.0  # the adapter counts alpha / rank times
    # the linear layers of each block that get one: of attention, and of the MLP
    targets: tuple[Literal["qkv", "proj", "up", "down"], ...] = ("qkv", "proj", "up", "down")

    def __post_init__(self) -> None:
        check_fields(self, "lora", {"rank": COUNT_OR_ZERO, "alpha": POSITIVE})
        if not self.targets:
            raise ValueError("lora.targets is empty: name layers, such as qkv proj")


MOST_NAME_CHARACTERS = 100


@dataclass(frozen=True)
class Config:
    """One training run, complete. A GPT reads text, a ViT weather."""

    name: str
    model: GPTConfig | ViTConfig
    data: TextData | WeatherData
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    local: LocalConfig = field(default_factory=LocalConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
    fp8: Fp8Config = field(default_factory=Fp8Config)
    lora: LoraConfig = field(default_factory=LoraConfig)

    def __post_init__(self) -> None:
        check_fields(self, "", {})
        if "/" in self.name or len(self.name) > MOST_NAME_CHARACTERS:
            raise ValueError(
                f"name={shown(self.name)}: it becomes part of the name of a folder, give one of at "
                f"most {MOST_NAME_CHARACTERS} characters without a slash"
            )
        if self.loader.backend == "dali" and isinstance(self.data, TextData):
            raise ValueError(
                "loader.backend=dali reads weather, and this recipe reads text: "
                "use --loader.backend torch"
            )
        if self.checkpoint.resume and self.train.out is None:
            raise ValueError(
                "checkpoint.resume needs the folder of the run: name it with train.out"
            )
        if self.train.on_bad_step == "rollback" and self.checkpoint.every == 0:
            raise ValueError(
                "train.on_bad_step=rollback goes back to a checkpoint, and checkpoint.every=0 "
                "writes none: give the steps between them"
            )
        if self.profile.recorded and self.profile.recorded[0] > self.train.steps:
            raise ValueError(
                f"profile.steps={self.profile.steps} begins after the last step, "
                f"train.steps={self.train.steps}: change one of them"
            )
        if self.checkpoint.resume and self.train.overwrite:
            raise ValueError(
                "checkpoint.resume continues the run in train.out, and train.overwrite gives it "
                "another name: choose one of them"
            )
