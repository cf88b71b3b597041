"""Lesson 16: a training in a process of its own, which gets only so much memory.

    python -m course.labs.l16_limited '{"room_bytes": ..., "micro_batch": 8, ...}'

The process imports everything and trains a tiny model first, so that what libraries set up is
there. Then it may allocate `room_bytes` more (`RLIMIT_DATA`: memory that a process writes, not
files that it maps), and trains the model of `settings`. What it prints is a log, as a training
writes it.

In float32 a training needs what `perf.training_memory` says and 10 to 11 MiB more; with autocast
some 28 MiB more, because the products have their weights in an order of their own.
"""

import html
import itertools
import json
import math
import re
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from labcode.config import GPTConfig

LIMIT_S = 120.0
STATUS = Path("/proc/self/status")  # macOS has none, and no limit for what a process writes
SPARE_BYTES = 12 * 2**20  # on top, for what libraries take in float32
DONE = re.compile(r"step (\d+): loss ([\d.]+), (\d+) ms")
ENVIRONMENT = {  # each block of 64 kB or more goes back to the system when it is freed
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_ARENA_MAX": "1",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Settings:
    """How the global batch of a step is trained.

    Args:
        micro_batch: Samples at once.
        num_micro_batches: How many of them make a step.
        activation_checkpointing: "none", or "full", which keeps the input of each layer.
        dtype: "float32", or "bfloat16" for the products (autocast).
    """

    micro_batch: int
    num_micro_batches: int = 1
    activation_checkpointing: str = "none"
    dtype: str = "float32"


@dataclass(frozen=True)
class Outcome:
    """How a training under a limit has ended.

    Args:
        log: What it printed, errors included.
        exit_status: 0 where it reached its end.
        step_ms: Milliseconds of the last step; NaN without one.
    """

    log: str
    exit_status: int
    step_ms: float

    @property
    def fits(self) -> bool:
        """Whether it reached its end."""
        return self.exit_status == 0


def train_within(
    model: GPTConfig, settings: Settings, room_bytes: float, num_steps: int = 2
) -> Outcome:
    """Train a few steps in a process that may allocate `room_bytes` for them, and a little more.

    Raises:
        TimeoutError: It took longer than two minutes.
    """
    asked = {
        "model": asdict(model),
        "settings": asdict(settings),
        "room_bytes": int(room_bytes),
        "num_steps": num_steps,
    }
    variables = [f"{name}={value}" for name, value in ENVIRONMENT.items()]
    module = "course.labs.l16_limited"
    command = ["env", *variables, sys.executable, "-m", module, json.dumps(asked)]
    try:
        ended = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        message = f"the training took longer than {LIMIT_S:.0f} s: try it with fewer samples"
        raise TimeoutError(message) from error
    steps = DONE.findall(ended.stdout)
    step_ms = float(steps[-1][2]) if steps else math.nan
    return Outcome(ended.stdout, ended.returncode, step_ms)


def show_log(outcome: Outcome) -> None:
    """What a training printed; of a traceback the error stands there, and the calls are folded."""
    # the process with a limit has no use for what notebooks need
    from course import show

    before, mark, rest = outcome.log.strip().partition("Traceback (most recent call last):\n")
    before = before.strip()
    if not mark:
        print(before)
        return
    lines = rest.splitlines()
    calls = list(itertools.takewhile(lambda line: line.startswith(" "), lines))
    error = "\n".join(lines[len(calls) :])
    summary = f"{mark.strip()} {len(calls)} lines"
    folded = show.folded(html.escape(summary), _pre("\n".join(calls)))
    plain = f"{before}\n{summary}, not shown here\n{error}"
    show.say(plain, _pre(before) + folded + _pre(error))


def _pre(text: str) -> str:
    return f'<pre style="white-space: pre-wrap">{html.escape(text, quote=False)}</pre>'


# ---- in the process with a limit


def main() -> None:
    """Train as the command line says, with the limit."""
    asked = json.loads(sys.argv[1])
    settings = Settings(**asked["settings"])
    tiny = GPTConfig(vocab_size=16, context_length=8, num_layers=1, num_heads=1, hidden_size=8)
    _train(tiny, settings, num_steps=1, talks=False)
    room = asked["room_bytes"] + SPARE_BYTES
    memory = f"{asked['room_bytes'] / 2**20:.0f} MiB for tensors"
    if STATUS.exists():
        limit = _data_bytes() + int(room)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    else:
        memory += ", which this system cannot enforce: Linux can"
    model = GPTConfig(**asked["model"])
    print(f"model: {model.num_parameters:,} parameters, {model.num_layers} layers", flush=True)
    print(f"memory: {memory}", flush=True)
    print(f"settings: {settings}", flush=True)
    _train(model, settings, asked["num_steps"], talks=True)


def _train(config: GPTConfig, settings: Settings, num_steps: int, talks: bool) -> None:
    import torch

    from labcode.models import gpt, layers

    torch.manual_seed(0)
    model = layers.initialize(gpt.GPT(config), seed=0)
    if settings.activation_checkpointing == "full":
        for block in model.blocks:
            _keep_input_only(block)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False, fused=True)
    narrow = settings.dtype == "bfloat16"
    for step in range(num_steps):
        started = time.perf_counter()
        total = 0.0
        for _ in range(settings.num_micro_batches):
            shape = (settings.micro_batch, config.context_length + 1)
            tokens = torch.randint(config.vocab_size or 1, shape)
            with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
                logits = model(tokens[:, :-1])
            loss = gpt.loss(logits, tokens[:, 1:]) / settings.num_micro_batches
            del logits
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step_ms = (time.perf_counter() - started) * 1e3
        if talks:
            print(f"step {step}: loss {total:.3f}, {step_ms:.0f} ms", flush=True)


def _keep_input_only(block: Any) -> None:
    """Put activation checkpointing around a layer."""
    from torch.utils.checkpoint import checkpoint

    inner = block.forward

    def forward(*args: Any) -> Any:
        return checkpoint(inner, *args, use_reentrant=False)

    block.forward = forward


def _data_bytes() -> int:
    """What this process can write to now, which RLIMIT_DATA limits."""
    for line in STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith("VmData"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{STATUS} has no VmData")


if __name__ == "__main__":
    main()
