"""Lesson 20: a step of training by hand, finished versions of its exercises, and what is measured.

The model of cost is smaller than `labcode.perf.estimate`: matrix products, three kinds of
communication, the bubble. It leaves out what its lesson names: elementwise operations, launches,
the optimizer, context parallelism, interleaved stages.

Held by: tests/unit/test_l20_labs.py
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from course.labs.l03_step import NERSC_VIT
from labcode.comm.timing import call_times
from labcode.config import GPTConfig
from labcode.measure.device_speed import matmul_flops_per_s, median_s
from labcode.models import gpt
from labcode.perf import accuracy, alpha_beta
from labcode.perf.alpha_beta import Link
from labcode.perf.cluster import Cluster as ClusterData
from labcode.perf.cluster import load_cluster
from labcode.perf.estimate import BUSY_WITH_COLLECTIVES, estimate
from labcode.perf.layer_time import SUSTAINED
from labcode.perf.layout_memory import layout_memory
from labcode.perf.published import PublishedRun, published_runs, rows
from labcode.perf.saved_bytes import saved_bytes
from labcode.perf.settings import Settings
from labcode.perf.transformer import Transformer
from labcode.perf.two_level import group_link, places
from labcode.runtime.units import GIB
from labcode.topology import GridShape

CPU = torch.device("cpu")
STATE_BYTES = {"weights": 2, "gradients": 2, "optimizer": 12}  # of each weight
BACKWARD = 2 / 3  # its share of a micro-batch's products
RESERVED_BYTES = 4 * GIB  # context, NCCL, what the allocator cannot use
ACTIVATION = 2  # bytes of a number that is kept or sent
NO_LIMIT = 0.97  # a step of which more than this share is arithmetic is limited by nothing else


# ---- what is planned


@dataclass(frozen=True)
class Shape:
    """A GPT: sizes in features unless they are a count.

    Args:
        layers, heads, kv_heads: How many.
        hidden: Features of a token.
        ffn: Features inside the MLP.
        vocab: Different tokens.
        tokens: Number of tokens in a sample.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    tokens: int


class Layout(NamedTuple):
    """How a model is spread over ranks; tp groups are neighbours, then come those of dp, then pp.

    Args:
        dp, pp, tp: Ranks along each axis.
        zero: Stage of ZeRO.
        micro_batch: Samples at once.
        checkpointing: "none" or "full".
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1
    zero: int = 0
    micro_batch: int = 1
    checkpointing: str = "none"


@dataclass(frozen=True)
class Cluster:
    """Nodes full of GPUs.

    Args:
        name: What it is called.
        flops_per_s: FLOP/s that products reach on one GPU within a training.
        memory_bytes: Memory of a GPU in bytes.
        gpus_per_node: How many.
        inside, between: The link of a GPU within a node, and its share of the node's adapters.
    """

    name: str
    flops_per_s: float
    memory_bytes: float
    gpus_per_node: int
    inside: Link
    between: Link


class Found(NamedTuple):
    """A layout that fits.

    Args:
        step_s: Predicted seconds of a step.
        memory_bytes: Bytes on the fullest rank, without what is reserved.
        layout: Which.
    """

    step_s: float
    memory_bytes: float
    layout: Layout


GPT3 = Shape(96, 12288, 96, 96, 49152, 51200, 2048)
GPT_7B = Shape(36, 4096, 32, 32, 16384, 51200, 2048)
GPT_13B = Shape(40, 5120, 40, 40, 20480, 51200, 2048)
GPT_39B = Shape(48, 8192, 64, 64, 32768, 51200, 2048)
SMALL = Shape(layers=2, hidden=64, heads=4, kv_heads=2, ffn=160, vocab=96, tokens=32)


@cache
def cluster(name: str) -> Cluster:
    """A cluster of labcode's data as this lesson sees it."""
    found = load_cluster(name)
    return Cluster(
        name=name,
        flops_per_s=SUSTAINED * found.gpu.matmul_flops_per_s("bfloat16"),
        memory_bytes=found.gpu.memory_bytes,
        gpus_per_node=found.gpus_per_node,
        inside=found.inside,
        between=found.between,
    )


def transformer(shape: Shape) -> Transformer:
    """The shape as labcode.perf knows it."""
    return Transformer(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_heads=shape.heads,
        sequence_length=shape.tokens,
        outputs=shape.vocab,
        kv_heads=shape.kv_heads,
        ffn_size=shape.ffn,
    )


def grid(layout: Layout) -> GridShape:
    """The grid as labcode.perf knows it."""
    return GridShape(dp=layout.dp, pp=layout.pp, tp=layout.tp)


def settings(layout: Layout, global_batch: int, attention: str = "flash2") -> Settings:
    """The other choices as labcode.perf knows them."""
    return Settings(
        global_batch=global_batch,
        micro_batch=layout.micro_batch,
        attention=attention,
        activation_checkpointing=layout.checkpointing,
        sequence_parallel=layout.tp > 1,
        zero_stage=layout.zero,
        gradient_bytes=STATE_BYTES["gradients"],
        reduced_bytes=2,
    )


# ---- finished versions of the exercises


def parameters(shape: Shape) -> int:
    """All weights of a GPT with tied embeddings, learned positions, and biases."""
    hidden = shape.hidden
    head_size = hidden // shape.heads
    qkv = hidden + 2 * shape.kv_heads * head_size
    attention = hidden * qkv + qkv + hidden * hidden + hidden
    mlp = 2 * hidden * shape.ffn + shape.ffn + hidden
    norms = 4 * hidden
    ends = (shape.vocab + shape.tokens) * hidden + 2 * hidden
    return shape.layers * (attention + mlp + norms) + ends


def products(shape: Shape) -> int:
    """Weights of one layer that are factors in a matrix product."""
    hidden = shape.hidden
    head_size = hidden // shape.heads
    qkv = hidden + 2 * shape.kv_heads * head_size
    return hidden * qkv + hidden * hidden + 2 * hidden * shape.ffn


def flops(
    shape: Shape, samples: float, *, causal: bool = False, checkpointing: str = "none"
) -> float:
    """FLOPs of forward and backward for that many samples."""
    tokens = samples * shape.tokens
    attention = 4 * tokens * shape.tokens * shape.hidden
    if causal:
        attention /= 2
    layers = shape.layers * (2 * tokens * products(shape) + attention)
    head = 2 * tokens * shape.vocab * shape.hidden
    forwards = 4 if checkpointing == "full" else 3
    return forwards * layers + 3 * head


def state_bytes(weights: float, zero: int, ranks: int) -> float:
    """Bytes of weights, gradients and optimizer on one rank."""
    parts: dict[str, float] = dict(STATE_BYTES)
    for stage, name in enumerate(("optimizer", "gradients", "weights"), 1):
        if zero >= stage:
            parts[name] /= ranks
    return weights * sum(parts.values())


def memory_parts(shape: Shape, layout: Layout, global_batch: int) -> dict[str, float]:
    """{part: bytes} of the fullest rank."""
    fullest: dict[str, float] = {}
    for is_last in (False, True):
        parts = _stage_memory(shape, layout, global_batch, is_last)
        if sum(parts.values()) > sum(fullest.values()):
            fullest = parts
    return fullest


def _stage_memory(
    shape: Shape, layout: Layout, global_batch: int, is_last: bool
) -> dict[str, float]:
    dp, pp, tp, zero, micro_batch, checkpointing = layout
    layers = shape.layers // pp
    weights = (layers * products(shape) + shape.vocab * shape.hidden) / tp
    tokens = micro_batch * shape.tokens
    kept_without = 32 * tokens * shape.hidden / tp
    kept = 2 * tokens * shape.hidden / tp if checkpointing == "full" else kept_without
    micro_batches = global_batch // (dp * micro_batch)
    under_way = 1 if is_last else min(pp, micro_batches)
    logits = 10 * tokens * shape.vocab / tp if is_last or pp == 1 else 0.0
    return {
        "states": state_bytes(weights, zero, dp),
        "activations": layers * under_way * kept,
        "passing": max(logits, kept_without - kept),
    }


def memory(shape: Shape, layout: Layout, global_batch: int) -> float:
    """Bytes of the fullest rank."""
    return sum(memory_parts(shape, layout, global_batch).values())


def bus_bytes_per_s(cluster: Cluster, ranks: int, stride: int) -> float:
    """The rate that the links of one ring would need, by the rule of two levels."""
    per_node = min(ranks, max(1, cluster.gpus_per_node // stride))
    nodes = math.ceil(ranks / per_node)
    if nodes == 1:
        return cluster.inside.beta_bytes_per_s
    between = cluster.between.beta_bytes_per_s * (ranks - 1) / (nodes - 1)
    if per_node == 1:
        return between
    return min(cluster.inside.beta_bytes_per_s, between)


def all_reduce_s(cluster: Cluster, ranks: int, stride: int, num_bytes: float) -> float:
    """Seconds of an all-reduce over ranks that are `stride` apart; 0 for one rank."""
    if ranks == 1:
        return 0.0
    alpha_s = cluster.inside.alpha_s
    if ranks * stride > cluster.gpus_per_node:
        alpha_s = cluster.between.alpha_s
    link = Link(alpha_s, bus_bytes_per_s(cluster, ranks, stride))
    return alpha_beta.time_s("all_reduce", ranks, num_bytes, link)


def send_s(cluster: Cluster, layout: Layout, num_bytes: float) -> float:
    """Seconds of a message to the next stage of a pipeline."""
    link = cluster.inside
    if layout.dp * layout.pp * layout.tp > cluster.gpus_per_node:
        link = cluster.between
    return alpha_beta.time_s("send", 2, num_bytes, link)


def step_parts(
    shape: Shape, layout: Layout, global_batch: int, cluster: Cluster
) -> dict[str, float]:
    """{part: seconds} of a step: product, tp, pp, fsdp, bubble, dp."""
    dp, pp, tp, zero, micro_batch, checkpointing = layout
    micro_batches = global_batch // (dp * micro_batch)
    work = flops(shape, micro_batch, checkpointing=checkpointing)
    product_s = work / (tp * pp) / cluster.flops_per_s
    act = ACTIVATION * micro_batch * shape.tokens * shape.hidden
    times = 6 if checkpointing == "full" else 4
    tp_s = times * shape.layers / pp * all_reduce_s(cluster, tp, 1, act)
    gradients = ACTIVATION * parameters(shape) / (tp * pp)
    dp_s = all_reduce_s(cluster, dp, tp, gradients)
    fsdp_s = 0.0
    if zero == 3:
        # two gathers and a scatter, hidden behind what a micro-batch computes
        hidden_s = min(1.5 * dp_s, product_s + tp_s)
        fsdp_s = 1.5 * dp_s - hidden_s + BUSY_WITH_COLLECTIVES * hidden_s
        dp_s = 0.0
    else:
        # the last backward hides gradients, and not the gather of new weights
        gradients_s = dp_s if zero == 0 else dp_s / 2
        hidden_s = min(gradients_s, BACKWARD * product_s)
        dp_s += BUSY_WITH_COLLECTIVES * hidden_s - hidden_s
    pp_s = 2 * send_s(cluster, layout, act / tp) if pp > 1 else 0.0
    one = product_s + tp_s + fsdp_s + pp_s
    return {
        "product": micro_batches * product_s,
        "tp": micro_batches * tp_s,
        "fsdp": micro_batches * fsdp_s,
        "pp": micro_batches * pp_s,
        "bubble": (pp - 1) * one,
        "dp": dp_s,
    }


def step_s(shape: Shape, layout: Layout, global_batch: int, cluster: Cluster) -> float:
    """Seconds of a step."""
    return sum(step_parts(shape, layout, global_batch, cluster).values())


def divisors(number: int) -> list[int]:
    """All, the smallest first."""
    return [part for part in range(1, number + 1) if number % part == 0]


def legal(shape: Shape, cluster: Cluster, gpus: int, global_batch: int) -> list[Layout]:
    """Every layout that divides what it cuts; whether it fits is not asked."""
    found = []
    for tp in divisors(gpus):
        if tp > cluster.gpus_per_node or shape.kv_heads % tp or shape.ffn % tp:
            continue
        for pp in divisors(gpus // tp):
            dp = gpus // (tp * pp)
            if shape.layers % pp or global_batch % dp:
                continue
            for micro_batch in divisors(global_batch // dp):
                for zero in stages_of_zero(dp, pp):
                    for checkpointing in ("none", "full"):
                        found.append(Layout(dp, pp, tp, zero, micro_batch, checkpointing))
    return found


def stages_of_zero(dp: int, pp: int) -> tuple[int, ...]:
    """Those that this lesson searches."""
    if dp == 1:
        return (0,)
    return (0, 1) if pp > 1 else (0, 1, 3)


def search(shape: Shape, cluster: Cluster, gpus: int, global_batch: int) -> list[Found]:
    """What fits, the fastest first."""
    found = []
    for layout in legal(shape, cluster, gpus, global_batch):
        needed = memory(shape, layout, global_batch)
        if needed + RESERVED_BYTES <= cluster.memory_bytes:
            found.append(Found(step_s(shape, layout, global_batch, cluster), needed, layout))
    return sorted(found)


# ---- what is measured on this machine


def config(shape: Shape) -> GPTConfig:
    """A GPT of labcode's with this shape."""
    return GPTConfig(
        vocab_size=shape.vocab,
        context_length=shape.tokens,
        num_layers=shape.layers,
        num_heads=shape.heads,
        hidden_size=shape.hidden,
        num_kv_heads=shape.kv_heads,
        ffn_size=shape.ffn,
    )


def model(shape: Shape) -> gpt.GPT:
    """A real model."""
    return gpt.GPT(config(shape))


def count_weights(shape: Shape) -> int:
    """Weights of a real model, which takes no memory (`torch.device("meta")`)."""
    with torch.device("meta"):
        return sum(weight.numel() for weight in model(shape).parameters())


def count_flops(shape: Shape, samples: int) -> int:
    """FLOPs of forward and backward, as PyTorch counts them; attention with its whole square."""
    plain = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    tokens = torch.zeros(samples, shape.tokens, dtype=torch.long)
    with plain, FlopCounterMode(display=False) as counter:
        model(shape)(tokens).sum().backward()
    return counter.get_total_flops()


def measured_bytes(shape: Shape, samples: int) -> dict[str, int]:
    """What a real float32 model keeps: states after an AdamW step, activations of its layers."""
    trained = model(shape)
    tokens = torch.zeros(samples, shape.tokens, dtype=torch.long)
    with saved_bytes(trained) as saved:
        loss = gpt.loss(trained(tokens), tokens)
        by_module = saved.by_module()
    loss.backward()
    optimizer = torch.optim.AdamW(trained.parameters())
    optimizer.step()
    states = 0
    for weight in trained.parameters():
        tensors = [weight, weight.grad, *optimizer.state[weight].values()]
        states += sum(tensor.nbytes for tensor in tensors if tensor is not None and tensor.ndim)
    layers = 0
    for name, num_bytes in by_module.items():
        if name.startswith("blocks"):
            layers += num_bytes
    return {"states": states, "activations": layers}


class MachineSpeeds(NamedTuple):
    """What two ranks measure together.

    Args:
        flops_per_s: FLOP/s of a large product on one rank, while the other computes as well.
        link: Latency and bandwidth of an all-reduce.
    """

    flops_per_s: float
    link: Link


def measure_machine(rank: int) -> MachineSpeeds:
    """The rate of a product and the link of an all-reduce; every rank of the world calls it."""
    torch.set_num_threads(1)
    ranks = dist.get_world_size()
    dist.barrier()
    rate = matmul_flops_per_s(CPU, torch.float32)
    sizes = (2**14, 2**18, 2**22)
    times = []
    for size in sizes:
        found = torch.tensor(call_times(dist.all_reduce, size, 7))
        dist.all_reduce(found, dist.ReduceOp.MAX)
        times.append(found.median().item())
    slowest = torch.tensor(-rate, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return MachineSpeeds(-slowest.item(), alpha_beta.fit("all_reduce", ranks, sizes, times))


def measured_step_s(shape: Shape, samples: int, average: bool) -> float:
    """Median seconds of forward, backward and the average of the gradients on this rank.

    Args:
        shape: Shape of the model.
        samples: Number of samples on this rank.
        average: Whether gradients are averaged over all ranks.
    """
    torch.set_num_threads(1)
    trained = model(shape)
    tokens = torch.zeros(samples, shape.tokens, dtype=torch.long)

    def step() -> None:
        trained.zero_grad()
        gpt.loss(trained(tokens), tokens).backward()
        if average:
            gradients = [w.grad.flatten() for w in trained.parameters() if w.grad is not None]
            dist.all_reduce(torch.cat(gradients))

    dist.barrier()
    return median_s(CPU, step, repeats=3)


# ---- published runs


def gpt3_run() -> PublishedRun:
    """GPT-3 175B on 1,024 A100s, from the README of Megatron-LM."""
    (run,) = [run for run in published_runs() if run.source_key == "megatron_readme_175b"]
    return run


class Error(NamedTuple):
    """How far a predictor is off.

    Args:
        runs: How many it was asked for.
        median, p90: Median and 90th percentile of the absolute relative errors of the step time.
        regret: Mean over sweeps: how much longer the layout takes that it would choose.
    """

    runs: int
    median: float
    p90: float
    regret: float


def errors() -> dict[str, Error]:
    """Errors of labcode.perf and of the rule of thumb, over all timed runs that ship."""
    runs = published_runs()
    found = {}
    for name, predictor in {
        "labcode.perf": accuracy.predicted_s,
        "45 % of the peak": accuracy.rule_of_thumb_s,
    }.items():
        regrets = accuracy.regrets(runs, predictor)
        regret = sum(regrets) / len(regrets)
        for how, ratios in {
            "": accuracy.ratios(runs, predictor),
            ", one factor a stack": accuracy.calibrated_ratios(runs, predictor),
        }.items():
            spread = accuracy.spread(ratios)
            found[name + how] = Error(spread.count, spread.median, spread.p90, regret)
    return found


def good_picks() -> tuple[int, int]:
    """(Sweeps in which labcode.perf picks the best layout or loses at most a tenth, all sweeps)."""
    picks = accuracy.picks(published_runs())
    good = [pick for pick in picks if pick.regret <= 0.1]
    return len(good), len(picks)


def worst_picks(most: int = 5) -> list[str]:
    """The sweeps in which labcode.perf has picked worst, one line each.

    Args:
        most: Largest number of lines.
    """
    picks = sorted(accuracy.picks(published_runs()), key=_regret, reverse=True)
    lines = []
    for pick in picks[:most]:
        gpus = pick.chosen.shape.world_size
        billions = pick.chosen.model.num_parameters / 1e9
        run = f"{billions:.0f}B on {gpus} GPUs ({pick.chosen.source_key})"
        layouts = f"{_layout_of(pick.chosen)} in place of {_layout_of(pick.best)}"
        lines.append(f"{pick.regret:4.0%} longer, {run}: {layouts}")
    return lines


def _regret(pick: accuracy.Pick) -> float:
    return pick.regret


def _layout_of(run: PublishedRun) -> str:
    """ "dp 8, tp 4, pp 12, 2 at a time"."""
    shape = run.shape
    zero = f", ZeRO-{run.settings.zero_stage}" if run.settings.zero_stage else ""
    samples = run.settings.micro_batch
    return f"dp {shape.dp}, tp {shape.tp}, pp {shape.pp}{zero}, {samples} at a time"


class Zero3Run(NamedTuple):
    """GPT-3 with ZeRO-3 on 1,536 A100s, as DeepSpeed was in 2021.

    Args:
        measured_s: Measured seconds of a step.
        predicted_s: Prediction of labcode.perf.
        other_s: Measured with tp and a pipeline on as many GPUs.
        other_predicted_s: Prediction of labcode.perf for the other run.
        latency_s: Latency of all rings in a step, if each matrix is gathered by itself, twice.
    """

    measured_s: float
    predicted_s: float
    other_s: float
    other_predicted_s: float
    latency_s: float


def zero3_of_2021() -> Zero3Run:
    """The published run, from table 2 of Narayanan et al. 2021 (arXiv:2104.04473)."""
    runs = {}
    for run in published_runs():
        if run.source_key == "narayanan21_t2" and run.shape.world_size == 1536:
            runs[run.settings.zero_stage] = run
    zero3 = runs[3]
    other = runs[0]
    place = places(zero3.shape, zero3.cluster.gpus_per_node).data
    ring_s = (place.ranks - 1) * group_link(zero3.cluster, place).alpha_s
    matrices = 2 + zero3.model.mlp_matrices
    assert zero3.step_s is not None and other.step_s is not None
    return Zero3Run(
        measured_s=zero3.step_s,
        predicted_s=accuracy.predicted_s(zero3),
        other_s=other.step_s,
        other_predicted_s=accuracy.predicted_s(other),
        latency_s=zero3.model.num_layers * 2 * matrices * ring_s,
    )


class Attempt(NamedTuple):
    """A published run of a small GPT on a V100 with 16 GB.

    Args:
        micro_batch: Samples at once.
        out_of_memory: Whether it did not fit.
        parts: {part: bytes} by labcode.perf.
    """

    micro_batch: int
    out_of_memory: bool
    parts: dict[str, float]


def attempts_on_v100() -> list[Attempt]:
    """NVIDIA's teaching runs of a GPT with 12 layers: one ran, one was out of memory."""
    found = []
    for row in rows():
        if row["source_key"] != "dli_v100":
            continue
        shape = Transformer(
            num_layers=int(row["L"]),
            hidden_size=int(row["h"]),
            num_heads=int(row["a"]),
            sequence_length=int(row["s"]),
            outputs=int(row["V"]),
            dropout=True,
        )
        how = Settings(
            global_batch=int(row["gbs"]),
            micro_batch=int(row["mbs"]),
            dtype="float32",
            attention="unfused",
            weight_bytes=4,
            optimizer_bytes=8,
            reserved_bytes=1 * GIB,
        )
        parts = layout_memory(shape, GridShape(dp=int(row["dp"])), how)
        found.append(Attempt(how.micro_batch, row["oom"] == "1", parts))
    return found


class ViTRun(NamedTuple):
    """A published run of a large ViT for weather on A100s.

    Args:
        tp: GPUs that share a model.
        step_s: Measured.
        predicted_s: Prediction of labcode.perf.
        memory_bytes: Measured, of a GPU, with all that is beside PyTorch.
        parts: {part: bytes} by labcode.perf.
    """

    tp: int
    step_s: float
    predicted_s: float
    memory_bytes: float
    parts: Mapping[str, float]


def vit_runs() -> list[ViTRun]:
    """NERSC's runs of its larger ViT that fitted, without and with tensor parallelism."""
    found = []
    for row in rows():
        if row["source_key"] != "nersc_vit_mp" or row["oom"] == "1":
            continue
        shape = Transformer.of(replace(NERSC_VIT, hidden_size=int(row["h"])))
        how = Settings(
            global_batch=int(row["gbs"]),
            micro_batch=int(row["mbs"]),
            weight_bytes=4,
            optimizer_bytes=8,
            autocast=True,
        )
        layout = GridShape(dp=int(row["dp"]), tp=int(row["tp"]))
        predicted = estimate(shape, layout, load_cluster("perlmutter"), how)
        run = ViTRun(
            tp=layout.tp,
            step_s=how.global_batch / float(row["value"]),
            predicted_s=predicted.step_s,
            memory_bytes=float(row["mem_gb"]) * GIB,
            parts=predicted.memory_parts,
        )
        found.append(run)
    return found


# ---- the search, drawn


class Point(NamedTuple):
    """A point of a scaling curve.

    Args:
        gpus: How many; those on which nothing fits have no point.
        efficiency: The share of the step that is arithmetic that the model needs.
        limit: What costs most of the rest; "products" where there is hardly a rest.
        layout: The one that was chosen.
    """

    gpus: int
    efficiency: float
    limit: str
    layout: Layout


LIMITS = {
    "tp": "tp",
    "pp": "pipeline",
    "bubble": "pipeline",
    "dp": "dp",
    "fsdp": "dp",
    "checkpointing": "memory",
}


def losses(shape: Shape, layout: Layout, global_batch: int, cluster: Cluster) -> dict[str, float]:
    """{limit: seconds} that a step takes beside the products that the model needs.

    "memory" is what activation checkpointing computes again, because memory is short.
    """
    parts = step_parts(shape, layout, global_batch, cluster)
    product_s = parts.pop("product")
    once = flops(shape, 1) / flops(shape, 1, checkpointing=layout.checkpointing)
    parts["checkpointing"] = product_s * (1 - once)
    found = dict.fromkeys(LIMITS.values(), 0.0)
    for name, seconds in parts.items():
        found[LIMITS[name]] += seconds
    return found


def scaling(
    shape: Shape, cluster: Cluster, sizes: Sequence[int], batch_of: Callable[[int], int]
) -> list[Point]:
    """The best layout on each number of GPUs, and what limits it.

    Args:
        shape: Shape of the model.
        cluster: Cluster on which it runs.
        sizes: Numbers of GPUs, the smallest first.
        batch_of: Global batch on that many.
    """
    points = []
    for gpus in sizes:
        batch = batch_of(gpus)
        fitting = search(shape, cluster, gpus, batch)
        if not fitting:
            continue
        best = fitting[0]
        efficiency = flops(shape, batch) / gpus / cluster.flops_per_s / best.step_s
        lost = losses(shape, best.layout, batch, cluster)
        limit = max(lost, key=lost.__getitem__)
        if efficiency > NO_LIMIT:
            limit = "products"
        points.append(Point(gpus, efficiency, limit, best.layout))
    return points


def by_labcode(
    shape: Shape, layout: Layout, global_batch: int, where: ClusterData
) -> tuple[float, float]:
    """(seconds of a step, bytes of the fullest rank) by `labcode.perf.estimate`."""
    found = estimate(transformer(shape), grid(layout), where, settings(layout, global_batch))
    return found.step_s, found.memory_bytes
