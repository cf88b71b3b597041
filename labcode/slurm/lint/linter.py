"""Faults in a batch script, found before the job waits in the queue.

for problem in lint(Path("train.sbatch").read_text(), site=load("perlmutter")):
    print(problem)
"""

from dataclasses import dataclass, replace

from labcode.slurm.lint.parse import Script
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
        line: Where, counted from 1.
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


def lint(text: str, site: Site | None = None, job: Job | None = None) -> list[Problem]:
    """All faults of a batch script, in the order of its lines.

    Args:
        text: The script.
        site: For its limits, partitions and network; None: only what holds everywhere.
        job: That the script was made for; None: unknown.
    """
    script = Script(text)
    facts = facts_of(site, job)
    problems = []
    for rule in RULES:
        severity = "warning" if rule.warning else "error"
        for line, found in rule.find(script, facts):
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
        partitions=tuple(site.partition.split(",")) if site.partition else (),
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
