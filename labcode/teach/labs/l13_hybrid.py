"""The jobs of lesson 13: tensor 2 x pipeline 2 on a small SLURM cluster, with and without a limit on memory.

    submit = Submit(l12_cluster.open_lab("lesson13", nodes=2))
    done = submit(job({"nodes": 2, "ranks_per_node": 2, "parallel.tp": 2, "parallel.pp": 2}))
    done.outcome, done.log                   # on the cluster, or on this machine where it has no SLURM

Held by: tests/ranks/test_lesson_13_checks.py
"""

import contextlib
import dataclasses
import re
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from labcode import recipes
from labcode.comm.bootstrap import Place, World
from labcode.comm.grid import Grid
from labcode.config import GPTConfig
from labcode.slurm.run.outcome import Outcome
from labcode.slurm.run.submit import submit
from labcode.slurm.script.job import Job
from labcode.slurm.script.render import render
from labcode.slurm.script.site import Gpus, Site, load
from labcode.teach.labs import emulate
from labcode.topology import GridShape
from labcode.train.loop import Trainer
from labcode.train.measure import peak_memory_bytes
from labcode.train.tasks import make_task

RECIPE = recipes.get("gpt_tiny")
SIZE = ("nodes", "ranks_per_node")
FIELDS = ("parallel.tp", "parallel.pp", "train.micro_batch", "train.global_batch")
SHORT = {
    "train.steps": 12,
    "train.log_every": 3,
    "train.eval_every": 0,
    "train.eval_batches": 1,
    "train.sample_tokens": 0,
}
ENV = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # the GPUs of the nodes are emulated


def site(limit_bytes: int | None = None) -> Site:
    """The cluster on this machine: one task for each rank, no GPUs asked for, `limit_bytes` of memory for each rank."""
    setup = (f"ulimit -d {limit_bytes // 1024}",) if limit_bytes else ()
    return dataclasses.replace(
        load("local"), logs="runs", launcher="srun", gpus=Gpus(), setup=setup
    )


def job(form, name: str = "hybrid") -> Job:
    """A short training of gpt_tiny; `form` has nodes, ranks_per_node and fields of the config."""
    fields = {field: value for field, value in form.items() if field not in SIZE}
    overrides = [
        word
        for field, value in (fields | SHORT | fields).items()
        for word in (f"--{field}", str(value))
    ]
    size = {field: form[field] for field in SIZE}
    return Job("gpt_tiny", tuple(overrides), **size, minutes=5, name=name, requeue=False, env=ENV)


def blank_script() -> str:
    """The script of exercise 13.4 with its blanks; comments and empty lines are left out."""
    text = render(job(dict.fromkeys(SIZE + FIELDS, 2) | {"train.global_batch": 16}), site())
    text = re.sub(
        rf"(--nodes=|--ntasks-per-node=|--(?:{'|'.join(map(re.escape, FIELDS))}) )\d+",
        r"\1____",
        text,
    )
    lines = (re.sub(r" --train\.steps .*| +# .*", "", line) for line in text.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("# "))


@dataclasses.dataclass(frozen=True)
class Submitted:
    """A job that has ended.

    Args:
        outcome: How.
        log: What it printed.
        out: Folder of its run, beside the log of that name.
        on_slurm: Whether on the cluster; else on this machine.
        limited: Whether the limit for each rank held.
    """

    outcome: Outcome
    log: str
    out: Path
    on_slurm: bool
    limited: bool = False


class Submit:
    """Submits to the cluster of a `l12_cluster.Lab`, or runs here where it has none; the same job only once."""

    def __init__(self, lab):
        self.lab, self._known = lab, {}

    def __call__(self, job: Job, limit_bytes: int | None = None) -> Submitted:
        key = render(job, site(limit_bytes))
        if key not in self._known:
            self._known[key] = self._run(job, limit_bytes)
        return self._known[key]

    def _run(self, job, limit_bytes):
        client = self.lab.client
        handle = submit(job, site(limit_bytes), client=client, here=client is None, echo=False)
        limited = bool(limit_bytes) and (client is not None or _limit(handle.process, limit_bytes))
        where = "SLURM, on n1 and n2" if client else handle.where
        lost = ", without the limit, which needs Linux" if limit_bytes and not limited else ""
        outcome = handle.wait(echo=False, check=False, timeout_s=300)
        print(f"job {handle.number}, {job.name}: {where}{lost}")
        return Submitted(
            outcome,
            handle.log(),
            Path("runs") / f"{job.name}-{handle.number}",
            client is not None,
            limited,
        )


def _limit(process, limit_bytes) -> bool:
    """What `ulimit -d` does, for a process and all that it starts from now on."""
    try:
        psutil.Process(process.pid).rlimit(psutil.RLIMIT_DATA, (limit_bytes, limit_bytes))
    except (AttributeError, psutil.Error):
        return False
    return True


def plain(rank: int, changes) -> list[dict[str, float]]:
    """The same short training on a pool of ranks; returns its rows of metrics."""
    size = dist.get_world_size()
    config = recipes.with_changes(RECIPE, SHORT | changes)
    world = World(Place(rank, size, rank, size), torch.device("cpu"), "gloo")
    return Trainer(
        config, world, Grid.create(config.check(size)), make_task(config), out=None
    ).fit()


# ---- memory

# Of each rank: less than the three tensors of 537 MB that micro-batch 32 has at once on the last stage, and enough for
# micro-batch 2 (0.12 GB) with what torch takes before it begins (0.4 GB).
LIMIT_BYTES = 1_500_000_000


def one_step(
    rank: int, model: GPTConfig, shape: GridShape, global_batch: int, micro_batch: int
) -> tuple[float, int]:
    """(loss, bytes by which the resident memory of this process grew at most) of one forward and backward.

    Where no peak can be forgotten (not Linux), one that was higher before counts too.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text(
            "5"
        )  # forget the peak so far: man proc_pid_clear_refs
    before = psutil.Process().memory_info().rss
    loss = emulate.timed_steps(rank, model, shape, global_batch, micro_batch, repeats=0).loss
    return loss, peak_memory_bytes(torch.device("cpu")) - before


def last_words(log: str) -> list[str]:
    """The last line of each rank's traceback, without places in sources, and what srun says of its tasks."""
    found = {}
    for rank, text in re.findall(r"^\[rank(\d+)\]: (?:\w+\.)*(\w*Error: .+)", log, re.MULTILINE):
        text = re.sub(r"\[(?:enforce fail at )?/?\S+:\d+\] (?:err == 0\. )?", "", text).split(
            ". This is typically"
        )[0]
        found[int(rank)] = f"rank {rank}: {text.split('. Error code')[0]}"
    return [found[rank] for rank in sorted(found)] + re.findall(
        r"^srun: error: .+", log, re.MULTILINE
    )
