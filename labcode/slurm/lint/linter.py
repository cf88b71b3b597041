"""Faults in a batch script, found before the job waits in the queue.

for problem in lint(Path("train.sbatch").read_text(), site=load("perlmutter")):
    print(problem)
"""

import json
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from labcode.slurm.lint.model import BatchJob
from labcode.slurm.lint.rule import Facts
from labcode.slurm.lint.rules import RULES
from labcode.slurm.script.job import Job
from labcode.slurm.script.site import Site

_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True)
class Problem:
    """One fault of a script.

    Args:
        rule: Number of the rule, "S21".
        line: Number of the line, counted from 1.
        message: What is wrong and what was found, in one line.
        why: What happens to the job.
        severity: "error" (submit refuses the script) or "warning".
    """

    rule: str
    line: int
    message: str
    why: str
    severity: str = "error"

    def __str__(self) -> str:
        return f"line {self.line}: {self.severity} {self.rule}: {self.message}\n    why: {self.why}"


def lint(
    text: str, site: Site | None = None, job: Job | None = None, folder: Path | None = None
) -> list[Problem]:
    """All faults of a batch script, in the order of its lines.

    Args:
        text: The script.
        site: Site with its limits, partitions and network; None: only what holds everywhere.
        job: Job that the script was made for; None: unknown.
        folder: Folder of the programs that it starts; None: unknown.
    """
    batch_job = BatchJob(text)
    facts = replace(facts_of(site, job), folder=folder)
    problems = []
    for rule in RULES:
        severity = "warning" if rule.warning else "error"
        for line, found in rule.find(batch_job, facts):
            message = f"{rule.message} ({found})"
            problems.append(Problem(rule.number, line, message, rule.why, severity))
    return sorted(problems, key=lambda problem: (problem.line, problem.rule))


def facts_of(site: Site | None, job: Job | None) -> Facts:
    """What a site and a job say that a script can be compared with."""
    facts = Facts()
    if job is not None:
        facts = replace(facts, world_size=job.world_size, environment=tuple(job.env))
    if site is None:
        return facts
    return replace(
        facts,
        max_minutes=site.max_minutes,
        max_nodes=site.max_nodes,
        gpus_per_node=site.gpus.per_node or None,
        interfaces=_interfaces(site),
        environment=(*facts.environment, *site.env),
    )


def _interfaces(site: Site) -> tuple[str, ...]:
    """The network interfaces that the profile names, each once; a variable is none."""
    names: list[str] = []
    for variable in _INTERFACES:
        value = site.env[variable].value if variable in site.env else ""
        if value and "$" not in value:
            names += value.lstrip("=").split(",")
    return tuple(dict.fromkeys(names))


def shellcheck(path: str) -> list[Problem]:
    """What ShellCheck calls an error in a script, where it is installed: bash could not read it.

    Source: shellcheck.net; its numbers are explained at shellcheck.net/wiki/SC1009.
    """
    program = shutil.which("shellcheck")
    if program is None:
        return []
    # SC1071 and SC2148 are of the first line, which S03 is about
    leave_out = "--exclude=SC1071,SC2148"
    command = (program, "--severity=error", "--format=json", leave_out, "--", path)
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    problems = []
    for found in json.loads(said or "[]"):
        number = f"SC{found['code']}"
        why = f"the shell reads it otherwise than it looks: www.shellcheck.net/wiki/{number}"
        problems.append(Problem(number, found["line"], found["message"], why))
    return problems
