"""Small trainings, submitted to a cluster by hand: for tests that look at a job from outside."""

import dataclasses
import re
import sys
import time

from faults import waiting

from labcode.measure import metrics
from labcode.slurm.script import site
from labcode.slurm.script.job import Job
from labcode.slurm.script.render import render

LOCAL = dataclasses.replace(site.load("local"), python=sys.executable)
TINY = {
    "model.num_layers": 2,
    "model.num_heads": 2,
    "model.hidden_size": 16,
    "model.context_length": 32,
    "optim.warmup_steps": 2,
    "train.global_batch": 8,
    "train.micro_batch": 2,
    "train.dtype": "float64",
    "train.eval_batches": 1,
    "train.log_every": 1,
    "train.sample_tokens": 0,
}
LONG = 100_000  # steps that no test waits for
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY")
ASK_S = 1.0  # between two questions to the controller
ASK_AGAIN = 10  # times, where it does not answer


def command_line(changes):
    return tuple(
        f"--{name}" if value is True else f"--{name}={value}" for name, value in changes.items()
    )


def job(name, steps, nodes=2, ranks_per_node=2, minutes=5, changes=None, **others):
    overrides = command_line(TINY | {"train.steps": steps} | (changes or {}))
    return Job("gpt_tiny", overrides, nodes, ranks_per_node, minutes, name=name, **others)


class Submitted:
    """A job on a cluster: its state, its log, its run."""

    def __init__(self, cluster, folder, job, site=LOCAL, *options):
        self.cluster, self.folder, self.job = cluster, folder, job
        script = folder / f"{job.name}.sbatch"
        script.write_text(render(job, site))
        said = cluster.exec(
            ["sbatch", "--parsable", f"--chdir={folder}", *options, str(script)]
        ).stdout
        self.number = int(said)
        self.out = folder / "runs" / f"{job.name}-{self.number}"

    @property
    def info(self):
        """What SLURM says of the job; a controller that is too busy to answer is asked again."""
        question = ["scontrol", "--oneliner", "show", "job", str(self.number)]
        for _ in range(ASK_AGAIN):
            answer = self.cluster.exec(question, check=False)
            if answer.returncode == 0:
                return dict(re.findall(r"(\w+)=(\S*)", answer.stdout))
            time.sleep(ASK_S)
        raise AssertionError(f"scontrol does not answer: {answer.stderr}")

    @property
    def log(self):
        path = self.folder / f"{self.job.name}-{self.number}.log"
        return path.read_text() if path.exists() else ""

    def steps(self):
        return (
            [row["step"] for row in metrics.read(self.out) if "loss" in row]
            if (self.out / metrics.FILE_NAME).exists()
            else []
        )

    def until(self, true, timeout_s=240.0):
        """Wait until `true(job)`; returns how long that took."""
        started = time.monotonic()
        in_time = waiting.comes(lambda: true(self), timeout_s, ASK_S)
        assert in_time, f"{self.info}\n{self.log[-3000:]}"
        return time.monotonic() - started

    def end(self, timeout_s=240.0):
        """Wait until the job has ended, and give its last state."""
        self.until(lambda job: job.info["JobState"] in ENDED, timeout_s)
        return self.info["JobState"]
