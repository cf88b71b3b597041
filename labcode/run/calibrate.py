"""This machine as a cluster file for `labcode.perf`: measured, not read from a datasheet.

    python -m labcode.perf calibrate --ranks 2 --out this_machine.toml

All ranks measure at the same time, because in a training they share cores, memory and links. The
rate of a device is the mean over the ranks. What the planner names is measured as it is counted
there: products, attention, what is elementwise, launches, and what the program does once a step.
"""

import functools
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from labcode import recipes
from labcode.comm import collectives
from labcode.comm.grid import Grid
from labcode.config import Config
from labcode.measure.device_speed import matmul_flops_per_s, median_s, run_s, stream_bytes_per_s
from labcode.perf import alpha_beta
from labcode.perf.alpha_beta import Link
from labcode.perf.cluster import Gpu
from labcode.perf.layer_time import HEAD_LAUNCHES, LAYER_LAUNCHES, Cut, layer_work
from labcode.perf.transformer import Transformer
from labcode.run.capacity import shared_memory
from labcode.runtime import bootstrap
from labcode.runtime.bootstrap import World
from labcode.runtime.combinations import Resolved
from labcode.runtime.files import write_atomically
from labcode.runtime.hardware import cpu_name
from labcode.runtime.units import GIB
from labcode.topology import GridShape
from labcode.train.build import build
from labcode.train.step import TrainStep
from labcode.train.tasks import make_task

SIZES = (2**12, 2**16, 2**20, 2**23)  # bytes of the whole tensor
REPEATS = 20
BETWEEN = 512  # rows and columns of the product before each call
HEADS = (1, 4, 256, 32)  # samples, heads, tokens, features of a head
# Models of which a layer more is timed: of next to nothing, so that it takes what its launches
# take, and of a size that keeps the device busy.
NOTHING = {"num_heads": 1, "hidden_size": 8, "context_length": 8}
BUSY = {
    "cpu": {"num_heads": 4, "hidden_size": 128, "context_length": 256},
    "cuda": {"num_heads": 16, "hidden_size": 2048, "context_length": 2048},
}
SAMPLES = 4  # of a rank
FEW_LAYERS = 1
MORE_LAYERS = 4
NEVER = 10**6  # steps until copies that train alone are averaged
Call = Callable[[torch.Tensor], object]


@dataclass(frozen=True)
class Measured:
    """What this machine can do while that many ranks are at work.

    Args:
        gpu: The device of one rank; its peaks are what large operations reach.
        launch_s: Seconds of one operation of a layer, on next to nothing.
        host_computes: Whether the processor that launches operations also computes them.
        once_s: Seconds of all that a step does beside its layers, on next to nothing.
        links: {collective: link}; without a peer there are none.
    """

    gpu: Gpu
    launch_s: float
    host_computes: bool
    once_s: float
    links: Mapping[str, Link]


def measure(world: World, grid: Grid, memory_bytes: float) -> Measured:
    """Measure; every rank calls it and gets the same numbers.

    Communicates: the collectives that are timed, those of a training, and each rank's numbers.

    Args:
        world: This process.
        grid: All ranks on its axis dp.
        memory_bytes: Memory of this rank in bytes; the smallest counts.

    Held by: tests/ranks/test_calibrate.py
    """
    group = grid.group("dp")
    device = world.device
    dist.barrier(group)
    # of one FLOP or one byte, so that a mean over ranks is one of times
    seconds = [
        1 / matmul_flops_per_s(device, torch.float32),
        1 / stream_bytes_per_s(device),
        1 / _attention_flops_per_s(device, causal=False),
        1 / _attention_flops_per_s(device, causal=True),
        _layer_s(world, grid, NOTHING),
        _layer_s(world, grid, BUSY[device.type]),
        _step_s(world, grid, NOTHING, {"model.num_layers": FEW_LAYERS}),
    ]
    links = {}
    if world.world_size > 1:
        for name, call in _calls(group).items():
            links[name] = _link(name, call, group, device)
    total = torch.tensor(seconds, dtype=torch.float64).to(device)
    dist.all_reduce(total, group=group)
    memory = torch.tensor(memory_bytes, dtype=torch.float64).to(device)
    dist.all_reduce(memory, dist.ReduceOp.MIN, group)
    product_s, stream_s, full_s, causal_s, nothing_s, layer_s, step_s = (
        total / world.world_size
    ).tolist()
    gpu = Gpu(
        name="this_device",
        peak_flops_per_s={"float32": 1 / product_s},
        memory_bytes=memory.item(),
        memory_bytes_per_s=1 / stream_s,
        matmul_share={"float32": 1.0},
        memory_share=1.0,
        attention_share={"flash2": product_s / full_s, "flash2_causal": product_s / causal_s},
        multiprocessors=None,
        source=f"measured by {world.world_size} ranks",
    )
    # backward launches two operations for each of forward
    launch_s = max(0.0, nothing_s) / (3 * LAYER_LAUNCHES)
    host_s = 3 * (FEW_LAYERS * LAYER_LAUNCHES + HEAD_LAUNCHES) * launch_s
    host_computes = device.type == "cpu"
    share = _memory_share(gpu, BUSY[device.type], layer_s, launch_s if host_computes else 0.0)
    return Measured(
        gpu=replace(gpu, memory_share=share),
        launch_s=launch_s,
        host_computes=host_computes,
        once_s=max(0.0, step_s - host_s),
        links=links,
    )


def _memory_share(gpu: Gpu, sizes: dict[str, int], layer_s: float, launch_s: float) -> float:
    """The share of the memory's bandwidth that the rest of a layer reaches: what is neither product
    nor attention.

    Args:
        gpu: Everything else of it.
        sizes: Sizes of the model.
        layer_s: Measured of a layer.
        launch_s: Seconds of one operation, where nothing hides them.
    """
    model = Transformer.of(_config(sizes, {"model.vocab_size": 1}).model)
    forward, backward = layer_work(model, gpu, Cut(SAMPLES, dtype="float32"))
    work = forward.plus(backward)
    rest_s = layer_s - work.product - work.attention - work.launches * launch_s
    # noise makes it no faster than the memory is
    return min(1.0, work.elementwise / rest_s) if rest_s > 0 else 1.0


def _attention_flops_per_s(device: torch.device, causal: bool) -> float:
    """FLOP/s of attention: 2 products forward and 5 backward, of half the square if causal."""
    samples, heads, tokens, features = HEADS
    q = torch.randn(HEADS, device=device, requires_grad=True)
    upstream = torch.ones_like(q)

    def both_ways() -> None:
        out = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=causal)
        out.backward(upstream)

    products = 2 + 5
    flops = products * 2 * samples * heads * tokens**2 * features
    if causal:
        flops /= 2
    return flops / median_s(device, both_ways, REPEATS)


def _layer_s(world: World, grid: Grid, sizes: dict[str, int]) -> float:
    """Seconds of a layer, forward and backward, without the sum of its gradients over the ranks."""
    alone = {"local.steps": NEVER}
    few_s = _step_s(world, grid, sizes, {"model.num_layers": FEW_LAYERS} | alone)
    more_s = _step_s(world, grid, sizes, {"model.num_layers": MORE_LAYERS} | alone)
    return (more_s - few_s) / (MORE_LAYERS - FEW_LAYERS)


def _step_s(
    world: World, grid: Grid, sizes: dict[str, int], changes: Mapping[str, object]
) -> float:
    """Mean seconds of a training step."""
    batch = {"train.global_batch": SAMPLES * world.world_size}
    config = _config(sizes, {**changes, **batch})
    training = build(Resolved(config, grid.shape), world, grid, make_task(config))
    step = TrainStep(training)
    step()
    total_s = sum(run_s(world.device, step) for _ in range(REPEATS))
    training.close()
    return total_s / REPEATS


def _config(sizes: dict[str, int], changes: Mapping[str, object]) -> Config:
    """A training of a GPT of these sizes in float32."""
    asked: dict[str, object] = {"train.dtype": "float32"}
    for name, size in sizes.items():
        asked[f"model.{name}"] = size
    return recipes.with_changes(recipes.get("gpt_tiny"), {**asked, **changes})


def _calls(group: dist.ProcessGroup) -> dict[str, Call]:
    """{collective: a call of it}; x is what one rank gives."""
    rank = dist.get_rank(group)

    def all_reduce(x: torch.Tensor) -> None:
        dist.all_reduce(x, group=group)

    def all_gather(x: torch.Tensor) -> None:
        collectives.all_gather(x, group, 0)

    def reduce_scatter(x: torch.Tensor) -> None:
        collectives.reduce_scatter(x, group, 0)

    def send(x: torch.Tensor) -> None:
        if rank == 0:
            dist.send(x, group=group, group_dst=1)
        if rank == 1:
            dist.recv(x, group=group, group_src=0)

    return {
        "all_reduce": all_reduce,
        "all_gather": all_gather,
        "reduce_scatter": reduce_scatter,
        "send": send,
    }


def _link(name: str, call: Call, group: dist.ProcessGroup, device: torch.device) -> Link:
    """alpha and beta of a collective, from the mean of its times within a training.

    There it follows a product, on numbers that have just been written, and no barrier: its ranks
    come at different times, threads have to be woken up, and now and then a call takes several
    times as long as most. A step is a sum of many calls, so that the mean counts, not the median.
    """
    ranks = dist.get_world_size(group)
    factor = torch.randn(BETWEEN, BETWEEN, device=device)
    times = []
    sizes = []
    for size in SIZES:
        size -= size % (4 * ranks)  # float32, cut evenly
        own = size // ranks if name == "all_gather" else size
        x = torch.zeros(own // 4, device=device)
        call(x.clone())
        waited_s = 0.0
        for _ in range(REPEATS):
            torch.mm(factor, factor)
            waited_s += run_s(device, functools.partial(call, x.clone()))
        total = torch.tensor(waited_s, dtype=torch.float32, device=device)
        dist.all_reduce(total, group=group)
        taking_part = 2 if name == "send" else ranks
        sizes.append(size)
        times.append(total.item() / (REPEATS * taking_part))
    return alpha_beta.fit(name, ranks, sizes, times)


def cluster_file(measured: Measured, ranks: int, device_name: str) -> str:
    """The numbers as a cluster file.

    A single rank has no links: those in the file are as fast as its memory, and nothing that needs
    them can be planned.

    Args:
        measured: The numbers.
        ranks: How many measured at the same time.
        device_name: What the machine is called.
    """
    gpu = measured.gpu
    fallback = Link(measured.launch_s, gpu.memory_bytes_per_s)
    link = measured.links.get("all_reduce", fallback)
    lines = [
        f"# {device_name}, measured by {ranks} ranks at the same time.",
        "[this_machine]",
        f'gpu = "{gpu.name}"',
        f"gpus_per_node = {ranks}",
        f"inside_GB_per_s = {_beta(link)}",
        f"inside_latency_us = {link.alpha_s * 1e6:.4g}",
        f"between_GB_per_s = {_beta(link)}",
        f"between_latency_us = {link.alpha_s * 1e6:.4g}",
        f"launch_us = {measured.launch_s * 1e6:.4g}",
        f"host_computes = {str(measured.host_computes).lower()}",
        f"once_us = {measured.once_s * 1e6:.4g}",
        f'source = "{gpu.source}"',
    ]
    for name, each in measured.links.items():
        lines.append("")
        lines.append(f"[this_machine.collectives.{name}]")
        lines.append(f"GB_per_s = {_beta(each)}")
        lines.append(f"latency_us = {each.alpha_s * 1e6:.4g}")
    lines += [
        "",
        f"[gpu.{gpu.name}]",
        f"peak_tflops = {_table(gpu.peak_flops_per_s, 1e12)}",
        f"matmul_share = {_table(gpu.matmul_share)}",
        f"memory_TB_per_s = {gpu.memory_bytes_per_s / 1e12:.4g}",
        f"memory_share = {gpu.memory_share:.4g}",
        f"memory_GiB = {gpu.memory_bytes / GIB:.4g}",
        f"attention_share = {_table(gpu.attention_share)}",
        f'source = "{gpu.source}"',
    ]
    return "\n".join(lines) + "\n"


def _table(numbers: Mapping[str, float], unit: float = 1.0) -> str:
    """A table of TOML within a line."""
    pairs = [f"{name} = {value / unit:.4g}" for name, value in numbers.items()]
    return "{ " + ", ".join(pairs) + " }"


def _beta(link: Link) -> str:
    """GB/s; TOML knows infinity too."""
    return f"{link.beta_bytes_per_s / 1e9:.4g}"


def main(words: Sequence[str]) -> int:
    """Measure as one rank of a job; the first writes the file.

    Args:
        words: The path of the file.
    """
    place = bootstrap.read_environment()
    world = bootstrap.start(place)
    torch.set_num_threads(1)
    grid = Grid.create(GridShape(dp=world.world_size))
    sharing, memory_bytes = shared_memory(world)
    measured = measure(world, grid, memory_bytes / sharing)
    if world.rank == 0:
        on_gpu = world.device.type == "cuda"
        name = torch.cuda.get_device_name(world.device) if on_gpu else cpu_name()
        text = cluster_file(measured, world.world_size, f"{name}, {platform.system()}")
        write_atomically(Path(words[0]), text.encode())
        print(text)
        print(f"written to {words[0]}")
    bootstrap.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
