"""Lesson 21: two briefs, finished versions of the exercises, the script and the miniature.

What is predicted here is predicted for the course's own training program: weights, gradients and
the optimizer's two moments in float32, products in bfloat16. So the learner's number, the header of
the script and what `submit` refuses are the same. `CONVENTIONS` has what other programs keep.

Held by: tests/unit/test_l21_labs.py
"""

import dataclasses
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from course.labs import l20_plan
from course.labs.l20_plan import Found, Layout, Shape
from course.progress import status
from labcode import recipes
from labcode.perf.cluster import Cluster, load_cluster
from labcode.perf.estimate import Estimate, estimate
from labcode.perf.of_config import model_of, settings_of
from labcode.perf.settings import Settings
from labcode.runtime import launch
from labcode.runtime.command import read_changes
from labcode.runtime.units import GIB
from labcode.slurm.script.job import Job
from labcode.slurm.script.site import Gpus, Site, load
from labcode.topology import GridShape

ROOM = 0.9  # of a GPU's memory: what a plan may need; the rest is margin
KINDS = ("tp", "pp", "zero", "micro_batch", "checkpointing")  # dp is what the others leave
DAY_S = 24 * 3600

GPT_70B = Shape(80, 8192, 64, 8, 44032, 51200, 4096)
GPT_1B = Shape(24, 2048, 16, 16, 8192, 51200, 2048)


# Bytes of a parameter: weight + gradient + optimizer. What is sent has the width of what is kept,
# but gradients of 2 bytes stay so.
CONVENTIONS: dict[str, dict[str, float | bool]] = {
    "4+4+8": {  # labcode: the optimizer keeps two moments, and the weight is its own master
        "weight_bytes": 4,
        "gradient_bytes": 4,
        "optimizer_bytes": 8,
        "gathered_bytes": 4,
        "reduced_bytes": 4,
        "autocast": True,
    },
    "2+2+12": {  # Rajbhandari et al. 2020 (arXiv:1910.02054), section 3.1
        "weight_bytes": 2,
        "gradient_bytes": 2,
        "optimizer_bytes": 12,
        "gathered_bytes": 2,
        "reduced_bytes": 2,
    },
    "2+4+12": {  # Megatron-LM in bfloat16: gradients are added up in float32
        "weight_bytes": 2,
        "gradient_bytes": 4,
        "optimizer_bytes": 12,
        "gathered_bytes": 2,
        "reduced_bytes": 4,
    },
    "FSDP2": {  # `fully_shard` with param_dtype=bfloat16 and reduce_dtype=float32
        "weight_bytes": 4,
        "gradient_bytes": 4,
        "optimizer_bytes": 8,
        "gathered_bytes": 2,
        "reduced_bytes": 4,
    },
}


@dataclass(frozen=True)
class Brief:
    """What somebody wants to have trained.

    Args:
        shape: Shape of the model.
        cluster: Cluster, as labcode.perf knows it.
        gpus: How many of it.
        global_batch: Samples of a step.
        budget_tokens: Tokens of the whole training.
        most_days: Days until it has to be done.
        convention: Name in `CONVENTIONS`: which bytes a rank keeps of a parameter.
    """

    shape: Shape
    cluster: Cluster
    gpus: int
    global_batch: int
    budget_tokens: float
    most_days: float
    convention: str = "4+4+8"

    @property
    def room_bytes(self) -> float:
        """What the fullest rank may need."""
        return ROOM * self.cluster.gpu.memory_bytes

    @property
    def peak_flops_per_s(self) -> float:
        """Peak of one GPU, by its datasheet."""
        return self.cluster.gpu.peak("bfloat16")


H100 = Brief(GPT_70B, load_cluster("dgx-h100"), 1024, 1024, 1.4e12, 24)
TASK = Brief(GPT_70B, load_cluster("jean-zay-a100"), 1024, 1024, 600e9, 25)

# ---- what labcode.perf says


def settings(layout: Layout, global_batch: int, convention: str = "4+4+8") -> Settings:
    """A layout as a training program with these bytes trains it; labcode's own has 4+4+8.

    In a pipeline FSDP2 shards the float32 weight and the moments, as ZeRO-1 does, and keeps whole
    what it has gathered (2 bytes) and the gradients that it adds up (4): that is 2+4+12.
    """
    if convention == "FSDP2" and layout.zero < 3:
        convention = "2+4+12"
    common = Settings(
        global_batch=global_batch,
        micro_batch=layout.micro_batch,
        activation_checkpointing=layout.checkpointing,
        sequence_parallel=layout.tp > 1,
        zero_stage=layout.zero,
    )
    return dataclasses.replace(common, **CONVENTIONS[convention])


def predicted(layout: Layout, brief: Brief) -> Estimate:
    """Time and memory of a layout, by `labcode.perf.estimate`.

    Raises:
        ValueError: A layout that cannot run.
    """
    how = settings(layout, brief.global_batch, brief.convention)
    model = l20_plan.transformer(brief.shape)
    return estimate(model, l20_plan.grid(layout), brief.cluster, how)


def travel_s(layout: Layout, brief: Brief) -> float:
    """Seconds in which gradients and new weights travel over dp, hidden or not."""
    how = settings(layout, brief.global_batch, brief.convention)
    how = dataclasses.replace(how, overlap_data_parallel=False)
    model = l20_plan.transformer(brief.shape)
    return estimate(model, l20_plan.grid(layout), brief.cluster, how).parts["dp"]


def candidates(brief: Brief) -> list[Found]:
    """(seconds, bytes, layout) of every legal layout, whether it fits or not; the fastest first."""
    where = brief.cluster
    nodes = l20_plan.Cluster(where.name, 0, 0, where.gpus_per_node, where.inside, where.between)
    found = []
    for layout in l20_plan.legal(brief.shape, nodes, brief.gpus, brief.global_batch):
        if where.gpus_per_node % layout.tp:
            continue
        about = predicted(layout, brief)
        found.append(Found(about.step_s, about.memory_bytes, layout))
    return sorted(found)


def fitting(brief: Brief) -> list[Found]:
    """Those of the candidates that leave the margin; the fastest first."""
    return [found for found in candidates(brief) if found.memory_bytes <= brief.room_bytes]


# ---- finished versions of the exercises


def days_and_mfu(brief: Brief, step_s: float) -> tuple[float, float]:
    """Days of the whole training, and the share of the datasheet's peak that the model uses."""
    steps = brief.budget_tokens / (brief.global_batch * brief.shape.tokens)
    work = l20_plan.flops(brief.shape, brief.global_batch)
    return steps * step_s / DAY_S, work / (step_s * brief.gpus * brief.peak_flops_per_s)


def broken_rules(layout: Layout, brief: Brief) -> list[str]:
    """The names of the rules that a layout breaks; memory only where nothing else is wrong."""
    shape = brief.shape
    rules = {
        "gpus": layout.dp * layout.pp * layout.tp == brief.gpus,
        "node": brief.cluster.gpus_per_node % layout.tp == 0,
        "heads": shape.kv_heads % layout.tp == 0,
        "ffn": shape.ffn % layout.tp == 0,
        "layers": shape.layers % layout.pp == 0,
        "batch": brief.global_batch % (layout.dp * layout.micro_batch) == 0,
    }
    broken = [name for name, holds in rules.items() if not holds]
    if not broken and predicted(layout, brief).memory_bytes > brief.room_bytes:
        broken.append("memory")
    return broken


def changed(one: Layout, other: Layout) -> list[str]:
    """In which choices two layouts differ, dp aside."""
    return [kind for kind in KINDS if getattr(one, kind) != getattr(other, kind)]


def rivals(chosen: Layout, found: Iterable[Found]) -> dict[str, Found]:
    """{kind: the fastest layout that differs from the chosen one in this choice alone}."""
    best: dict[str, Found] = {}
    for candidate in sorted(found):
        kinds = changed(chosen, candidate.layout)
        if len(kinds) == 1:
            best.setdefault(kinds[0], candidate)
    return best


def verdict(chosen: Estimate, rival: Estimate, room_bytes: float) -> tuple[float, str, str]:
    """(by how much the rival loses, "GiB" or "s", the part that makes it lose)."""
    if rival.memory_bytes > room_bytes:
        return (
            (rival.memory_bytes - room_bytes) / GIB,
            "GiB",
            _most_grown(chosen.memory_parts, rival.memory_parts),
        )
    return rival.step_s - chosen.step_s, "s", _most_grown(chosen.parts, rival.parts)


def _most_grown(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    more = growth(before, after)
    return max(more, key=more.__getitem__)


def growth(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """{part: by how much it is larger afterwards}."""
    more = {}
    for name in after:
        more[name] = after[name] - before[name]
    return more


CLUSTER_TEXT = """
[faculty]
gpu = "a100-40gb"
gpus_per_node = 4
inside_GB_per_s = 200
inside_latency_us = 6
between_GB_per_s = 6.25
between_latency_us = 8
source = "nccl-tests; four GPUs share two adapters of 100 Gb/s"
"""


def own_cluster(text: str = CLUSTER_TEXT, name: str = "my.toml") -> Cluster:
    """A cluster from the text of its file, which is written to `runs/`."""
    path = Path("runs") / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return load_cluster(str(path))


def with_network(cluster: Cluster, factor: float) -> Cluster:
    """The same nodes, with a network that is `factor` times as fast."""
    rate = cluster.between.beta_bytes_per_s * factor
    between = dataclasses.replace(cluster.between, beta_bytes_per_s=rate)
    return dataclasses.replace(cluster, between=between)


# ---- the job

SIZES = {
    "num_layers": "layers",
    "hidden_size": "hidden",
    "num_heads": "heads",
    "num_kv_heads": "kv_heads",
    "ffn_size": "ffn",
    "vocab_size": "vocab",
    "context_length": "tokens",
}


def site(cluster: str = "dgx-h100", gpus_per_node: int = 8) -> Site:
    """The profile of a SLURM cluster of which only the GPUs are known, and the planner's name."""
    return dataclasses.replace(
        load("generic"),
        name="big",
        about="eight H100 in a node",
        gpus=Gpus(per_node=gpus_per_node),
        planner=cluster,
    )


def job(layout: Layout, brief: Brief) -> Job:
    """The training of a brief in a layout, a day at a time."""
    shape = brief.shape
    fields: dict[str, object] = {}
    for field, size in SIZES.items():
        fields[f"model.{field}"] = getattr(shape, size)
    fields["model.positions"] = "learned"
    fields["train.global_batch"] = brief.global_batch
    fields["train.micro_batch"] = layout.micro_batch
    fields["parallel.dp"] = layout.dp
    fields["parallel.pp"] = layout.pp
    fields["parallel.tp"] = layout.tp
    if layout.zero:
        fields["parallel.data_parallel"] = "labcode"
        fields["parallel.zero_stage"] = layout.zero
    fields["parallel.activation_checkpointing"] = layout.checkpointing
    words = []
    for name, value in fields.items():
        words += [f"--{name}", str(value)]
    if layout.tp > 1:
        words.append("--parallel.sequence_parallel")
    per_node = brief.cluster.gpus_per_node
    return Job(
        "gpt_10m",
        tuple(words),
        nodes=brief.gpus // per_node,
        ranks_per_node=per_node,
        minutes=24 * 60,
        name="gpt-70b",
    )


# ---- the miniature

ENV = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
SHORT = "--train.steps 16 --train.log_every 2 --train.eval_every 0 --train.sample_tokens 0"


@dataclass(frozen=True)
class Trained:
    """A short training on this machine.

    Args:
        step_s: Median seconds of a step, without the first ones.
        losses: Losses of the steps that were logged.
    """

    step_s: float
    losses: list[float]


def measure_here(ranks: int = 8) -> Cluster:
    """This machine as a cluster, with so many ranks at work: `labcode.perf calibrate`."""
    path = Path("runs") / "here.toml"
    path.parent.mkdir(exist_ok=True)
    print(f"python -m labcode.perf calibrate --ranks {ranks}")
    status(f"measuring this machine with {ranks} ranks")
    launch.run("labcode.run.calibrate", path, nproc=ranks, echo=False, env_extra=ENV)
    status()
    return load_cluster(str(path))


def train_here(name: str, changes: str, ranks: int = 8) -> Trained:
    """Train gpt_tiny for some steps.

    Args:
        name: Name of its folder.
        changes: Changes as on the command line.
        ranks: How many.
    """
    out = Path("runs") / name
    words = [*changes.split(), *SHORT.split(), "--train.out", out]
    print(f"torchrun --nproc-per-node {ranks} -m labcode.train gpt_tiny {changes}")
    status(f"training on {ranks} ranks")
    launch.run("labcode.train", "gpt_tiny", *words, nproc=ranks, echo=False, env_extra=ENV)
    status()
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "step_s" in row]
    step_s = statistics.median(row["step_s"] for row in steps[1:])
    return Trained(step_s, [row["loss"] for row in steps])


def predicted_here(changes: str, cluster: Cluster, ranks: int = 8) -> Estimate:
    """The same training, predicted for this machine."""
    base = recipes.get("gpt_tiny")
    config = recipes.with_changes(base, read_changes(base, changes.split()))
    shape = config.parallel.shape(ranks)
    return estimate(model_of(config), shape, cluster, settings_of(config, shape, cluster.gpu))


def miniature(layout: Layout) -> GridShape:
    """Each axis that the layout uses, with two ranks."""
    return GridShape(dp=min(layout.dp, 2), pp=min(layout.pp, 2), tp=min(layout.tp, 2))


def largest_gap(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest difference between two curves, as a share."""
    return max(abs(a / b - 1) for a, b in zip(one, other, strict=True))
