"""A run of the course's own training program as the arguments of `estimate`."""

from dataclasses import replace

from labcode.config import Config, GPTConfig, TextData, ViTConfig, WeatherData
from labcode.perf.cluster import Gpu
from labcode.perf.settings import Settings
from labcode.perf.training_memory import WIDTHS
from labcode.perf.transformer import Transformer
from labcode.runtime.combinations import Resolved
from labcode.topology import GridShape

# The data that ships with the course, which a config leaves to be looked up.
# Held by: tests/unit/test_of_config.py::test_the_shipped_data_has_the_sizes_that_are_planned_for
SHIPPED_TOKENS = 83
SHIPPED_GRID = (90, 180)
SUN_FORCINGS = 2


def model_of(config: Config) -> Transformer:
    """The shape of the model, with the sizes that come from data as far as they are known.

    Raises:
        ValueError: Data of your own decides a size that the config leaves open.
    """
    model = config.model
    data = config.data
    if isinstance(model, GPTConfig) and isinstance(data, TextData) and model.vocab_size is None:
        if data.tokenizer == "bpe":
            model = replace(model, vocab_size=data.bpe_vocab_size)
        elif data.path is None and data.tokenizer == "char":
            model = replace(model, vocab_size=SHIPPED_TOKENS)
    if isinstance(model, ViTConfig) and isinstance(data, WeatherData) and data.path is None:
        lat, lon = data.crop or SHIPPED_GRID
        forcings = SUN_FORCINGS if data.sun else 0
        sizes = {"num_variables": len(data.variables), "num_forcings": forcings}
        model = replace(model, lat=lat, lon=lon, **sizes)
    return Transformer.of(model)


def settings_of(config: Config, shape: GridShape, gpu: Gpu) -> Settings:
    """What the run costs beside its shapes: weights, gradients and AdamW's moments are float32.

    Args:
        config: The run.
        shape: Grid of the ranks.
        gpu: For `train.dtype=auto`: bfloat16 where it has that, else float32.

    Raises:
        ValueError: A batch that the grid does not divide.
    """
    parallel = config.parallel
    train = config.train
    dtype = train.dtype
    if dtype == "auto":
        dtype = "bfloat16" if "bfloat16" in gpu.peak_flops_per_s else "float32"
    value_bytes, wide_bytes = WIDTHS[dtype]
    return Settings(
        global_batch=train.global_batch,
        micro_batch=Resolved(config, shape).micro_batch,
        dtype=dtype,
        activation_checkpointing=parallel.activation_checkpointing,
        sequence_parallel=parallel.sequence_parallel,
        stages_per_rank=parallel.stages_per_rank,
        zero_stage=parallel.zero_stage,
        weight_bytes=wide_bytes,
        gradient_bytes=wide_bytes,
        optimizer_bytes=2 * wide_bytes,
        gathered_bytes=wide_bytes,
        reduced_bytes=wide_bytes,
        autocast=value_bytes < wide_bytes,
        context_attention=parallel.context_attention,
        compiled=train.compile != "none",
    )
