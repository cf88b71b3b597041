"""Time of a training step of our GPT against GPT-2 of `transformers`, with every option off and on.

    python benchmarks/step.py [--rounds 15] [--threads 1] [--model gpt_tiny] [--compile]
        [--device cuda]

A step is forward, backward and AdamW, through the same `parallelize` and `make_optimizer` as in a
run. In each row both sides have the same option, as far as the other one has it:

    off                      float32, AdamW as a loop over the weights
    + fused                  one kernel for AdamW; so in all rows below
    + bf16                   autocast; on a GPU also tf32 and float16
    + full, + selective      activation checkpointing, in bf16; theirs has the full kind alone
    + compile                each layer by torch.compile, in bf16; its first step is timed as well.
                             Always on a GPU, on a CPU with --compile: it takes a minute there
    + CUDA graph             on a GPU, ours alone

All take turns in one process, in changing order. "ours / theirs" and "gain", which is ours without
any option / ours, are medians over the rounds of the ratio within a round.
"""

import dataclasses
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from gpt_against_transformers import gpt2, setups
from side_by_side import machine, options, outer_quartiles, taking_turns, write

from labcode.comm.grid import Grid
from labcode.config import GPTConfig, OptimConfig, ParallelConfig
from labcode.models.gpt import GPT, loss
from labcode.models.parallelize import parallelize
from labcode.parallel.model import Batch
from labcode.runtime import bootstrap
from labcode.topology import GridShape
from labcode.train.cuda_graph import GraphedStep
from labcode.train.optim import IMPLEMENTATIONS, make_optimizer
from labcode.train.precision import Precision, pick_precision, set_matmul_precision

RESULTS = Path(__file__).parent / "results"


@dataclasses.dataclass(frozen=True)
class Variant:
    """What is switched on.

    Args:
        theirs: Whether transformers has the same.
    """

    name: str
    dtype: str = "bfloat16"
    implementation: str = "fused"
    checkpointing: str = "none"
    compiled: str = "none"
    cuda_graph: bool = False
    theirs: bool = True


OFF = Variant("off", dtype="float32", implementation="for_loop")
EVERYWHERE = (
    OFF,
    Variant("+ fused", dtype="float32"),
    Variant("+ bf16"),
    Variant("+ bf16, full", checkpointing="full"),
    Variant("+ bf16, selective", checkpointing="selective", theirs=False),
)
COMPILED = Variant("+ bf16, compile", compiled="block")
ON_A_GPU = (
    Variant("+ tf32", dtype="tf32"),
    Variant("+ float16", dtype="float16"),
    Variant("+ bf16, CUDA graph", cuda_graph=True, theirs=False),
)


class Contestant:
    """A model, its optimizer and how it computes one step; `first_s` is what the first one took."""

    def __init__(self, variant: Variant, device: torch.device) -> None:
        self.variant = variant
        self.device = device
        self.precision: Precision = pick_precision(variant.dtype, device)
        self.first_s = 0.0

    def step(self, batch: Batch) -> None:
        """One training step."""
        raise NotImplementedError

    def seconds(self, batch: Batch, steps: int = 1) -> float:
        """Mean time of a step."""
        set_matmul_precision(self.precision, self.device)
        started = self._now()
        for _ in range(steps):
            self.step(batch)
        return (self._now() - started) / steps

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


class Ours(Contestant):
    """Through `parallelize`, on one rank."""

    def __init__(self, config: GPTConfig, variant: Variant, device: torch.device) -> None:
        super().__init__(variant, device)
        with torch.device("meta"):
            whole = GPT(config)
        self.model = parallelize(
            whole,
            Grid.create(GridShape()),
            ParallelConfig(activation_checkpointing=variant.checkpointing),
            seed=0,
            device=device,
            dtype=self.precision.wide,
            autocast_dtype=self.precision.autocast,
            compiled=variant.compiled,
        )
        self.graphed = GraphedStep(self.model) if variant.cuda_graph else None
        chosen = OptimConfig(implementation=variant.implementation)
        self.optimizer = make_optimizer(self.model.weights.values(), chosen)

    def step(self, batch: Batch) -> None:
        if self.graphed is None:
            self.model.forward_backward([batch])
        else:
            self.graphed.forward_backward([batch], 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class Theirs(Contestant):
    """GPT-2 of transformers, with a fused GELU, which is its best."""

    def __init__(self, config: GPTConfig, variant: Variant, device: torch.device) -> None:
        super().__init__(variant, device)
        self.model = gpt2(config, "gelu_pytorch_tanh").to(device).train()
        if variant.checkpointing == "full":
            self.model.gradient_checkpointing_enable({"use_reentrant": False})  # until v6
        if variant.compiled != "none":
            for block in self.model.transformer.h:
                block.compile()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), weight_decay=0.1, **IMPLEMENTATIONS[variant.implementation]
        )

    def step(self, batch: Batch) -> None:
        tokens, targets = batch
        narrow = self.precision.autocast
        with torch.autocast(self.device.type, narrow, enabled=narrow is not None):
            value = loss(self.model(tokens, use_cache=False).logits, targets)
        value.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def variants(device: torch.device, compiles: bool) -> tuple[Variant, ...]:
    """What is run on a device."""
    found = EVERYWHERE
    if device.type == "cuda":
        found += ON_A_GPU
    return (*found, COMPILED) if compiles or device.type == "cuda" else found


def table(
    chosen: tuple[Variant, ...],
    field: dict[tuple[str, str], Contestant],
    times: dict[tuple[str, str], list[float]],
) -> list[dict[str, Any]]:
    """A row for each variant."""
    rows = []
    plain = times[OFF.name, "ours"]
    for variant in chosen:
        ours = times[variant.name, "ours"]
        gains = [off / own for off, own in zip(plain, ours, strict=True)]
        row: dict[str, Any] = {
            "variant": variant.name,
            "ours_ms": round(statistics.median(ours) * 1e3, 2),
            "first_step_s": round(field[variant.name, "ours"].first_s, 2),
            "gain": round(statistics.median(gains), 3),
            "gain_quartiles": outer_quartiles(gains),
        }
        if variant.theirs:
            theirs = times[variant.name, "theirs"]
            ratios = [own / other for own, other in zip(ours, theirs, strict=True)]
            row["theirs_ms"] = round(statistics.median(theirs) * 1e3, 2)
            row["ratio"] = round(statistics.median(ratios), 3)
            row["ratio_quartiles"] = outer_quartiles(ratios)
        rows.append(row)
    return rows


def main() -> None:
    parser = options(__doc__, rounds=15, threads=0)
    parser.add_argument("--model", choices=setups(), default="gpt_tiny")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=bootstrap.device_type())
    parser.add_argument("--compile", action="store_true")
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    transformers.logging.set_verbosity_error()
    world = bootstrap.start(bootstrap.Place())
    device = world.device if given.device == "cuda" else torch.device("cpu")
    config, batch_size = setups()[given.model]
    assert config.vocab_size is not None
    tokens = torch.randint(config.vocab_size, (batch_size, config.context_length + 1)).to(device)
    batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    chosen = variants(device, given.compile)
    field: dict[tuple[str, str], Contestant] = {}
    for variant in chosen:
        field[variant.name, "ours"] = Ours(config, variant, device)
        if variant.theirs:
            field[variant.name, "theirs"] = Theirs(config, variant, device)
    for contestant in field.values():
        contestant.first_s = contestant.seconds(batch)
        contestant.seconds(batch, 2)
    times = taking_turns(field, given.rounds, lambda one: one.seconds(batch, 2))
    rows = table(chosen, field, times)
    print("| options | ours ms | theirs ms | ours / theirs | quartiles | gain | first step s |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for row in rows:
        cells = [row["variant"], row["ours_ms"], row.get("theirs_ms", ""), row.get("ratio", "")]
        low, high = row.get("ratio_quartiles", ("", ""))
        cells += [f"{low} to {high}" if high else "", row["gain"], row["first_step_s"]]
        print("| " + " | ".join(map(str, cells)) + " |")
    about = machine() | {"device": given.device, "threads": torch.get_num_threads()}
    about["transformers"] = transformers.__version__
    write(RESULTS / f"step_{given.device}.json", about | {"options": vars(given), "rows": rows})
    bootstrap.stop()


if __name__ == "__main__":
    main()
