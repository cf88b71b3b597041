"""What cannot be combined in a run: for each feature, what it refuses and what to do instead.

`resolve` is what a run asks before any work begins; what it returns is handed on to all that comes
after. Each function below `problems` yields lines, the first of which is the error; none where the
feature is not asked for.

They stand here and not beside their features: the command line and `slurm.Job` ask them without
torch, which every feature imports, and a table on the ground may not name the rooms above it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from labcode.config import Config, GPTConfig
from labcode.runtime.fields import shown
from labcode.schedules import schedule
from labcode.topology import GridShape

FP8_BLOCK = 32  # numbers that share a scale in MXFP8


@dataclass(frozen=True)
class Resolved:
    """A run on a certain number of ranks: what was asked for, and what follows from it.

    Args:
        config: What was asked for.
        shape: The grid of these ranks.
    """

    config: Config
    shape: GridShape

    @property
    def accumulation(self) -> int:
        """Micro-batches that one rank adds up before each optimizer step."""
        return self.config.train.accumulation(self.shape.dp)

    @property
    def micro_batch(self) -> int:
        """Samples of a micro-batch on one rank of dp."""
        return self.config.train.global_batch // (self.shape.dp * self.accumulation)


def check(config: Config, world_size: int) -> GridShape:
    """The grid for `world_size` ranks, for who begins no run: as `resolve`, with its errors."""
    return resolve(config, world_size).shape


def resolve(config: Config, world_size: int) -> Resolved:
    """A run on `world_size` ranks, after every check that can be made before work begins.

    Args:
        config: The run.
        world_size: Number of ranks.

    Raises:
        ValueError: One line on what does not fit and what to change.
    """
    parallel = config.parallel
    # first what no number of ranks mends: the other way round one is told to launch 3 ranks
    parallel.check_model(config.model, parallel.replica)
    shape = parallel.shape(world_size)
    parallel.check(config.model, shape)
    for rank in config.profile.ranks if config.profile.steps else ():
        if rank >= world_size:
            raise ValueError(
                f"profile.ranks has {rank}, and the ranks of this job are 0 to "
                f"{world_size - 1}: choose among them"
            )
    for problem in problems(config, shape):
        raise ValueError(problem)
    resolved = Resolved(config, shape)
    num_microbatches = resolved.accumulation
    parallel.check_stages(shape.pp, num_microbatches)
    num_stages = shape.pp * parallel.stages_per_rank
    # made and dropped: its errors are the check
    schedule(parallel.pipeline_schedule, num_stages, num_microbatches, shape.pp)
    return resolved


def problems(config: Config, shape: GridShape) -> Iterator[str]:
    """All that does not go together, one line each.

    Args:
        config: The run.
        shape: Grid of the ranks.
    """
    for feature in (
        compilation,
        cuda_graphs,
        layerwise_optimizer,
        noise_scale,
        local_steps,
        experts,
        probe,
        features_on_layers,
        fp8,
        adapters,
        checkpoints,
    ):
        yield from feature(config, shape)


def compilation(config: Config, shape: GridShape) -> Iterator[str]:
    """train.compile"""
    parallel = config.parallel
    asked = f"train.compile={config.train.compile}"
    whole = config.train.compile == "model"
    repeats = parallel.activation_checkpointing
    if config.train.compile == "none":
        return
    if shape.size("pp", "cp", "tp") > 1:
        yield (
            f"{asked} with pp {shape.pp}, cp {shape.cp}, tp {shape.tp}: the collectives inside a "
            "model cut what is compiled into pieces, use dp alone"
        )
    if repeats == "selective":
        yield (
            f"{asked} with parallel.activation_checkpointing=selective: what is compiled has no "
            "module of its own for the core of attention, use full or none"
        )
    if whole and repeats == "full":
        yield (
            f"{asked} with parallel.activation_checkpointing=full, which repeats one layer at a "
            "time: use --train.compile block"
        )
    if whole and parallel.zero_stage == 3 and parallel.data_parallel == "labcode":
        yield (
            f"{asked} with parallel.zero_stage=3 by labcode, which gathers one layer at a time: "
            "use --train.compile block"
        )


def cuda_graphs(config: Config, shape: GridShape) -> Iterator[str]:
    """train.cuda_graphs"""
    repeats = config.parallel.activation_checkpointing
    if not config.train.cuda_graphs:
        return
    if shape.world_size > 1:
        yield (
            f"train.cuda_graphs with {shape.world_size} ranks: the graph is that of one rank, "
            "start one"
        )
    if config.train.compile != "none":
        yield (f"train.cuda_graphs with train.compile={config.train.compile}: choose one of them")
    if repeats != "none":
        yield (
            f"train.cuda_graphs with parallel.activation_checkpointing={repeats}, which saves and "
            "restores the state of random numbers: choose one of them"
        )
    if config.model.dropout > 0:
        yield (
            f"train.cuda_graphs with model.dropout={config.model.dropout:g}, whose random numbers "
            "change streams inside the graph: set it to 0"
        )
    if config.parallel.zero_stage > 0:
        yield (
            f"train.cuda_graphs with parallel.zero_stage={config.parallel.zero_stage}: there is "
            "nothing to divide on one rank, set it to 0"
        )


def layerwise_optimizer(config: Config, shape: GridShape) -> Iterator[str]:
    """An optimizer that asks for the norms of weights needs whole weights."""
    if config.optim.name == "adamw":
        return
    named = f"optim.name={config.optim.name} with"
    reason = "the norm of a whole weight decides how far it moves"
    if shape.tp > 1:
        yield f"{named} tp {shape.tp}, which cuts weights: {reason}, use dp, pp or cp"
    if config.parallel.zero_stage > 0:
        yield (
            f"{named} parallel.zero_stage={config.parallel.zero_stage}, which cuts weights: "
            f"{reason}, set it to 0"
        )


def noise_scale(config: Config, shape: GridShape) -> Iterator[str]:
    """train.noise_scale looks at gradients of single micro-batches, of which there are several."""
    if not config.train.noise_scale:
        return
    if shape.size("pp", "cp", "tp") > 1:
        yield (
            f"train.noise_scale with pp {shape.pp}, cp {shape.cp}, tp {shape.tp}: no rank sees the "
            "whole gradient of a micro-batch, use dp alone"
        )
    if config.parallel.zero_stage > 0:
        yield (
            f"train.noise_scale with parallel.zero_stage={config.parallel.zero_stage}: gradients "
            "are divided before they are whole, set it to 0"
        )
    if config.train.cuda_graphs:
        yield (
            "train.noise_scale with train.cuda_graphs: a recorded step hides the gradients of its "
            "micro-batches, choose one of them"
        )
    if shape.dp * config.train.accumulation(shape.dp) == 1:
        yield (
            "train.noise_scale compares the gradients of micro-batches with their mean, and this "
            "run has one micro-batch a step: give a smaller train.micro_batch, or more dp"
        )


def local_steps(config: Config, shape: GridShape) -> Iterator[str]:
    """local.steps"""
    train = config.train
    parallel = config.parallel
    asked = f"local.steps={config.local.steps}"
    if not config.local.steps:
        return
    if shape.size("pp", "cp") > 1:
        yield (
            f"{asked} with pp {shape.pp}, cp {shape.cp}: a copy of the model is one rank, or those "
            "of tp, use dp and tp alone"
        )
    if parallel.zero_stage > 0:
        yield (
            f"{asked} with parallel.zero_stage={parallel.zero_stage}: copies that train alone have "
            "nothing to divide, set it to 0"
        )
    if config.checkpoint.on:
        yield (
            f"{asked} with checkpoints: between two averages every copy has an optimizer state of "
            "its own, and a checkpoint holds one, use no checkpoints"
        )
    if train.on_bad_step != "stop" or train.spike_factor > 0:
        yield (
            f"{asked} with train.on_bad_step={train.on_bad_step} and "
            f"train.spike_factor={train.spike_factor:g}: a step is that of one copy, and the "
            "others do not hear of it, use stop and 0"
        )
    if train.dtype == "float16":
        yield (
            f"{asked} with train.dtype=float16: each copy would scale its loss by itself, use "
            "bfloat16 or float32"
        )
    if train.reduce_dtype != "float32":
        yield (
            f"{asked} with train.reduce_dtype={train.reduce_dtype}: no gradients travel, use "
            "float32"
        )
    if parallel.data_parallel != "ddp":
        yield (
            f"{asked} with parallel.data_parallel={parallel.data_parallel}: no gradients travel, "
            "neither by PyTorch nor by labcode, leave it at ddp"
        )
    if config.optim.lr_rule != "none":
        yield (
            f"{asked} with optim.lr_rule={config.optim.lr_rule}: the rule is for steps on the "
            "whole batch, and a copy steps on its share, give optim.lr for that and use none"
        )
    if train.noise_scale:
        yield (
            f"{asked} with train.noise_scale, which needs the gradient of the whole batch: choose "
            "one of them"
        )
    if train.eval_every % config.local.steps:
        yield (
            f"{asked} with train.eval_every={train.eval_every}: between two averages there is no "
            "common model to evaluate, give a multiple of local.steps"
        )


def experts(config: Config, shape: GridShape) -> Iterator[str]:
    """model.num_experts, and parallel.ep, which divides them"""
    train = config.train
    model = config.model
    num_experts = model.num_experts if isinstance(model, GPTConfig) else 0
    asked = f"model.num_experts={num_experts}"
    if not num_experts:
        return
    if train.compile != "none" or train.cuda_graphs:
        yield (
            f"{asked} with train.compile={train.compile} and train.cuda_graphs="
            f"{train.cuda_graphs}: how many rows an expert gets is known only when the router has "
            "chosen, leave both off"
        )
    if config.optim.name != "adamw":
        yield (
            f"{asked} with optim.name={config.optim.name}: the experts of a layer are one tensor, "
            "and would get one norm together, use adamw"
        )
    divided = f"parallel.ep={shape.ep}"
    if shape.ep == 1:
        return
    if config.local.steps:
        yield f"{divided} with local.steps={config.local.steps}: no rank has a whole copy, use ep 1"
    if train.noise_scale:
        yield (
            f"{divided} with train.noise_scale: the gradient of an expert comes from the "
            "micro-batches of several ranks, use ep 1"
        )


def probe(config: Config, _shape: GridShape) -> Iterator[str]:
    """debug.probe runs a step twice."""
    train = config.train
    if not config.debug.probe:
        return
    if train.compile != "none" or train.cuda_graphs:
        yield (
            f"debug.probe with train.compile={train.compile} and "
            f"train.cuda_graphs={train.cuda_graphs}: nobody sees the tensors inside of what is "
            "compiled or recorded, use none and false"
        )
    if train.noise_scale:
        yield "debug.probe with train.noise_scale: a step that runs twice counts twice there"
    if config.local.steps > 0:
        yield (
            f"debug.probe with local.steps={config.local.steps}: the ranks do not see the same bad "
            "step, use 0"
        )


def features_on_layers(config: Config, _shape: GridShape) -> Iterator[str]:
    """What looks at a layer needs it to run once, and to be seen."""
    train = config.train
    repeated = config.parallel.activation_checkpointing
    if config.debug.record_steps:
        looks = f"debug.record_steps={config.debug.record_steps}"
    elif config.debug.config:
        looks = f"debug.config={shown(config.debug.config)}"
    else:
        return
    if train.compile != "none" or train.cuda_graphs or repeated != "none":
        yield (
            f"{looks} with train.compile={train.compile}, train.cuda_graphs={train.cuda_graphs} "
            f"and parallel.activation_checkpointing={repeated}: each layer has to run once, and to "
            "be seen, use none of them"
        )


def fp8(config: Config, shape: GridShape) -> Iterator[str]:
    """train.dtype=fp8"""
    asked = "train.dtype=fp8"
    settings = config.fp8
    if config.train.dtype != "fp8":
        return
    if config.train.compile != "none":
        yield (
            f"{asked} with train.compile={config.train.compile}: the scales change outside of what "
            "is compiled, use --train.compile none"
        )
    if config.train.cuda_graphs:
        yield (
            f"{asked} with train.cuda_graphs: the histories of scales take new memory at each "
            "step, choose one of them"
        )
    shared = settings.share == "all" or shape.size("dp", "cp", "tp") == 1
    if config.checkpoint.on and settings.recipe == "delayed" and not shared:
        yield (
            f"{asked} with fp8.share={settings.share} and checkpoints: each rank has histories of "
            "its own and a checkpoint holds one, use --fp8.share all or no checkpoints"
        )
    if settings.recipe == "block":
        yield from _cut_blocks(config, shape)


def _cut_blocks(config: Config, shape: GridShape) -> Iterator[str]:
    """Each side of a matrix product is cut into whole blocks."""
    sizes = {
        "model.hidden_size": config.model.hidden_size,
        "model.hidden_size / tp": config.model.hidden_size / shape.tp,
        "model.ffn_size / tp": config.model.ffn / shape.tp,
    }
    for name, size in sizes.items():
        if size % FP8_BLOCK:
            yield (
                f"fp8.recipe=block with {name} = {size:g}: a block has {FP8_BLOCK} numbers, make "
                "it a multiple of that or use --fp8.recipe current"
            )


def adapters(config: Config, _shape: GridShape) -> Iterator[str]:
    """lora.rank"""
    model = config.model
    rank = config.lora.rank
    if not rank:
        return
    if isinstance(model, GPTConfig) and model.num_experts:
        yield (
            f"lora.rank={rank} with model.num_experts={model.num_experts}: the experts of a layer "
            "are one tensor and no linear layer beside which an adapter could stand, use 0 experts"
        )
    if not isinstance(model, GPTConfig):
        yield (
            f"lora.rank={rank} with a ViT: adapters change a trained model, and train.start_from "
            "reads none of a ViT; its new head is zero and would stay so, use a recipe of a GPT"
        )
    smallest = min(model.hidden_size, model.ffn)
    if rank > smallest:
        yield (
            f"lora.rank={rank}: the smallest layer beside which an adapter stands has {smallest} "
            f"features, and its weight no more ranks than that: give at most {smallest}"
        )


def checkpoints(config: Config, _shape: GridShape) -> Iterator[str]:
    """Checkpoints of what PyTorch divides in its own way."""
    parallel = config.parallel
    if config.checkpoint.on and parallel.zero_stage == 1 and parallel.data_parallel == "ddp":
        yield (
            "parallel.zero_stage=1 with parallel.data_parallel=ddp is PyTorch's "
            "ZeroRedundancyOptimizer, whose state must be gathered on one rank to be saved: use "
            "--parallel.data_parallel labcode, or no checkpoints"
        )
