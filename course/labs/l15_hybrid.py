"""Lesson 15: the jobs, tensor 2 x pipeline 2 on a small SLURM cluster.

They run with and without a limit on memory, on the cluster of a lab or on this machine.

    submit = Submit(l14_cluster.open_lab("lesson15", nodes=2))
    done = submit(job({"nodes": 2, "ranks_per_node": 2, "parallel.tp": 2, "parallel.pp": 2}))
    done.outcome, done.log

Held by: tests/ranks/test_hybrid_lab.py
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from course.labs.l14_cluster import Lab
from labcode import recipes
from labcode.comm.grid import Grid
from labcode.run.run import train
from labcode.runtime import combinations
from labcode.runtime.bootstrap import Place, World
from labcode.slurm.run.local import LocalHandle
from labcode.slurm.run.outcome import Outcome
from labcode.slurm.run.submit import submit
from labcode.slurm.script.job import Job
from labcode.slurm.script.render import render
from labcode.slurm.script.site import Gpus, Site, load
from labcode.train.build import build
from labcode.train.tasks import make_task

RECIPE = recipes.get("gpt_tiny")
SIZE: tuple[str, ...] = ("nodes", "ranks_per_node")
FIELDS: tuple[str, ...] = ("parallel.tp", "parallel.pp", "train.micro_batch", "train.global_batch")
SHORT = {
    "train.steps": 12,
    "train.log_every": 3,
    "train.eval_every": 0,
    "train.eval_batches": 1,
    "train.sample_tokens": 0,
}
RECORDED = {"profile.steps": "4:7"}  # of the hybrid, by PyTorch's profiler
QUIET = {"KINETO_LOG_LEVEL": "6"}  # the profiler's own log lines are left out
ENV = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # the GPUs of the nodes are emulated


# ---- jobs


def site(limit_bytes: int | None = None) -> Site:
    """The cluster on this machine: one task for each rank, and no GPUs asked for.

    Args:
        limit_bytes: Bytes of memory for each rank; None: no limit.
    """
    setup = ()
    if limit_bytes is not None:
        setup = (f"ulimit -d {limit_bytes // 1024}",)
    return dataclasses.replace(
        load("local"), logs="runs", launcher="srun", gpus=Gpus(), setup=setup
    )


def job(form: Mapping[str, Any], name: str = "hybrid") -> Job:
    """A short training of gpt_tiny.

    Args:
        form: nodes, ranks_per_node and fields of the config.
        name: Name of the job.
    """
    fields = {field: value for field, value in form.items() if field not in SIZE}
    overrides = []
    for field, value in (fields | SHORT | fields).items():  # the form's first, and they win
        overrides += [f"--{field}", str(value)]
    return Job(
        "gpt_tiny",
        tuple(overrides),
        nodes=form["nodes"],
        ranks_per_node=form["ranks_per_node"],
        minutes=5,
        name=name,
        requeue=False,
        env=ENV | QUIET if "profile.steps" in form else ENV,
    )


def blank_script() -> str:
    """The script of exercise 15.4 with blanks, without comments and empty lines."""
    form = dict.fromkeys(SIZE + FIELDS, 2)
    form["train.global_batch"] = 16
    text = render(job(form), site())
    fields = "|".join(re.escape(field) for field in FIELDS)
    text = re.sub(rf"(--nodes=|--ntasks-per-node=|--(?:{fields}) )\d+", r"\1____", text)
    kept = []
    for line in text.splitlines():
        line = re.sub(r" --train\.steps .*?(?= --train\.out|$)| +# .*", "", line)
        if line and not line.startswith("# "):
            kept.append(line)
    return "\n".join(kept)


# ---- runs


@dataclasses.dataclass(frozen=True)
class Submitted:
    """A job that has ended.

    Args:
        outcome: How.
        log: What it printed.
        out: Folder of its run, beside the log of that name.
        on_slurm: Whether it ran on the cluster; else on this machine.
        limited: Whether the limit for each rank was in force.
    """

    outcome: Outcome
    log: str
    out: Path
    on_slurm: bool
    limited: bool = False


class Submit:
    """Runs jobs on the cluster of a lab, or here where it has none; the same job only once.

    Args:
        lab: Lab from `l14_cluster.open_lab`.
    """

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self._known: dict[str, Submitted] = {}

    def __call__(self, job: Job, limit_bytes: int | None = None) -> Submitted:
        """Submit a job and wait until it has ended.

        Args:
            job: Job from `job`.
            limit_bytes: Bytes of memory for each rank; None: no limit.
        """
        key = render(job, site(limit_bytes))
        if key not in self._known:
            self._known[key] = self._run(job, limit_bytes)
        return self._known[key]

    def _run(self, job: Job, limit_bytes: int | None) -> Submitted:
        client = self.lab.client
        here = client is None
        handle = submit(job, site(limit_bytes), client=client, here=here, echo=False)
        limited = limit_bytes is not None
        if limit_bytes is not None and isinstance(handle, LocalHandle):
            limited = _limit(handle, limit_bytes)  # on the cluster the script does so
        where = handle.where if here else "SLURM, on n1 and n2"
        if limit_bytes is not None and not limited:
            where += ", without the limit, which needs Linux"
        outcome = handle.wait(echo=False, check=False, timeout_s=300)
        print(f"job {handle.number}, {job.name}: {where}")
        out = Path("runs") / f"{job.name}-{handle.number}"
        return Submitted(outcome, handle.log(), out, not here, limited)


def _limit(handle: LocalHandle, limit_bytes: int) -> bool:
    """What `ulimit -d` does, for a job on this machine and all that it starts from now on.

    Returns:
        Whether the system can do that.
    """
    if handle.process is None:
        return False
    try:
        psutil.Process(handle.process.pid).rlimit(psutil.RLIMIT_DATA, (limit_bytes, limit_bytes))
    except (AttributeError, psutil.Error):
        return False
    return True


def plain(rank: int, changes: Mapping[str, Any]) -> list[dict[str, float]]:
    """Run the same short training on a pool of ranks.

    Args:
        rank: Rank of this process.
        changes: Fields of the config.

    Returns:
        Its rows of metrics.
    """
    size = dist.get_world_size()
    config = recipes.with_changes(RECIPE, {**SHORT, **changes})
    world = World(Place(rank, size, rank, size), torch.device("cpu"), "gloo")
    resolved = combinations.resolve(config, size)
    return train(build(resolved, world, Grid.create(resolved.shape), make_task(config)))


# ---- memory

# Memory of each rank: less than the three tensors of 537 MB that micro-batch 32 has at once on the
# last stage, and enough for micro-batch 2 (0.12 GB) with what torch takes before it begins (0.4
# GB).
LIMIT_BYTES = 1_500_000_000


_ERROR = re.compile(r"^error: rank (\d+): (?:after step \d+: )?(.+)", re.MULTILINE)
_PLACE = re.compile(r"\[(?:enforce fail at )?/?\S+:\d+\] (?:err == 0\. )?")


def last_words(log: str) -> list[str]:
    """How a job died.

    Args:
        log: What it printed.

    Returns:
        The error of each rank that had one, without places in sources, and what srun says of its
        tasks.
    """
    found = {}
    for rank, text in _ERROR.findall(log):
        message = _PLACE.sub("", text).partition(". This is typically")[0]
        found[int(rank)] = f"rank {rank}: {message.partition('. Error code')[0]}"
    of_ranks = [found[rank] for rank in sorted(found)]
    return of_ranks + re.findall(r"^srun: error: .+", log, re.MULTILINE)
