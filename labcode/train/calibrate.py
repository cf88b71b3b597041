"""This machine as a cluster file for `labcode.perf`: measured, not read from a datasheet.

    python -m labcode.perf calibrate --ranks 2 --out this_machine.toml

All ranks measure at the same time, because in a training they share cores, memory and links. The
rate of a device is that of the slowest rank.
"""

import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from labcode.comm import bootstrap, collectives
from labcode.comm.grid import Grid
from labcode.comm.timing import call_times
from labcode.files import write_atomically
from labcode.hardware import cpu_name
from labcode.perf import alpha_beta
from labcode.perf.alpha_beta import Link
from labcode.topology import GridShape
from labcode.train.capacity import shared_memory
from labcode.train.device_speed import device_speed, median_s
from labcode.units import GIB

SIZES = (2**12, 2**16, 2**20, 2**23)  # bytes of the whole tensor
REPEATS = 10
HEADS = (1, 4, 256, 32)  # samples, heads, tokens, features of a head
Call = Callable[[torch.Tensor], object]


@dataclass(frozen=True)
class Measured:
    """What this machine can do, with so many ranks at work.

    Args:
        flops_per_s: Of a large float32 product on one rank.
        bytes_per_s: Read and written by an addition on one rank.
        launch_s: Of an operation on next to nothing.
        attention_flops_per_s: Of the fused causal attention, forward and backward.
        memory_bytes: Of one rank.
        links: {collective: link}; without a peer there are none.
    """

    flops_per_s: float
    bytes_per_s: float
    launch_s: float
    attention_flops_per_s: float
    memory_bytes: float
    links: Mapping[str, Link]


def measure(group: dist.ProcessGroup, device: torch.device, memory_bytes: float) -> Measured:
    """Measure; every rank of the group calls it and gets the same numbers.

    Communicates: the collectives that are timed, and the slowest rank's numbers.

    Args:
        group: Of all ranks.
        device: Of this rank.
        memory_bytes: Of this rank.

    Held by: tests/ranks/test_calibrate.py
    """
    dist.barrier(group)
    speed = device_speed(device, torch.float32)
    attention = _attention_flops_per_s(device)
    links = {}
    if dist.get_world_size(group) > 1:
        for name, call in _calls(group).items():
            links[name] = _link(name, call, group, device)
    slowest = torch.tensor(
        [-speed.flops_per_s, -speed.bytes_per_s, speed.launch_s, -attention, -memory_bytes],
        dtype=torch.float64,
    )
    slowest = slowest.to(device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group)
    flops_per_s, bytes_per_s, launch_s, attention, memory = slowest.tolist()
    return Measured(-flops_per_s, -bytes_per_s, launch_s, -attention, -memory, links)


def _attention_flops_per_s(device: torch.device) -> float:
    """FLOP/s of attention: 2 products forward and 5 backward, half of the square."""
    samples, heads, tokens, features = HEADS
    generator = torch.Generator(device).manual_seed(0)
    q = torch.randn(HEADS, device=device, generator=generator, requires_grad=True)

    def both_ways() -> None:
        out = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        out.sum().backward()

    products = 2 + 5
    flops = products * 2 * samples * heads * tokens**2 * features / 2
    return flops / median_s(device, both_ways)


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
    """alpha and beta of a collective, from the median of the slowest rank's times."""
    ranks = dist.get_world_size(group)
    times = []
    sizes = []
    for size in SIZES:
        size -= size % (4 * ranks)  # float32, cut evenly
        own = size // ranks if name == "all_gather" else size
        found = torch.tensor(call_times(call, own, REPEATS, device), device=device)
        dist.all_reduce(found, dist.ReduceOp.MAX, group)
        sizes.append(size)
        times.append(found.median().item())
    return alpha_beta.fit(name, ranks, sizes, times)


def cluster_file(measured: Measured, ranks: int, device_name: str) -> str:
    """The numbers as a cluster file.

    Peaks are what was measured, so the shares of them are 1. A single rank has no links: those in
    the file are as fast as its memory, and nothing that needs them can be planned.

    Args:
        measured: The numbers.
        ranks: How many measured at the same time.
        device_name: What the machine is called.
    """
    fallback = Link(measured.launch_s, measured.bytes_per_s)
    link = measured.links.get("all_reduce", fallback)
    share = measured.attention_flops_per_s / measured.flops_per_s
    lines = [
        f"# {device_name}, measured by {ranks} ranks at the same time.",
        "[this_machine]",
        'gpu = "this_device"',
        f"gpus_per_node = {ranks}",
        f"inside_GB_per_s = {_beta(link)}",
        f"inside_latency_us = {link.alpha_s * 1e6:.4g}",
        f"between_GB_per_s = {_beta(link)}",
        f"between_latency_us = {link.alpha_s * 1e6:.4g}",
        f"launch_us = {measured.launch_s * 1e6:.4g}",
        f'source = "measured by {ranks} ranks"',
    ]
    for name, each in measured.links.items():
        lines.append("")
        lines.append(f"[this_machine.collectives.{name}]")
        lines.append(f"GB_per_s = {_beta(each)}")
        lines.append(f"latency_us = {each.alpha_s * 1e6:.4g}")
    lines += [
        "",
        "[gpu.this_device]",
        f"peak_tflops = {{ float32 = {measured.flops_per_s / 1e12:.4g} }}",
        "matmul_share = { float32 = 1.0 }",
        f"memory_TB_per_s = {measured.bytes_per_s / 1e12:.4g}",
        "memory_share = 1.0",
        f"memory_GiB = {measured.memory_bytes / GIB:.4g}",
        f"attention_share = {{ flash2 = {share:.4g} }}",
        f'source = "measured by {ranks} ranks"',
    ]
    return "\n".join(lines) + "\n"


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
    measured = measure(grid.group("dp"), world.device, memory_bytes / sharing)
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
