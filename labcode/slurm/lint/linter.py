"""Faults in a batch script, found before the queue is waited through: `lint(text)` -> problems with line, reason and rule.

for problem in lint(Path("train.sbatch").read_text(), site=load("perlmutter")):
    print(problem)
"""

from dataclasses import dataclass, replace

from labcode.slurm.lint.parse import Script
from labcode.slurm.lint.rule import Facts
from labcode.slurm.lint.rules import RULES

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

    def __str__(self):
        return f"line {self.line}: {self.severity} {self.rule}: {self.message}\n    why: {self.why}"


def lint(text: str, site=None, job=None) -> list[Problem]:
    """All faults of a batch script, in the order of its lines.

    Args:
        text: The script.
        site: A `Site`, for its limits, partitions and network; None: only what holds everywhere.
        job: The `Job` that the script was made for; None: unknown.
    """
    script, facts = Script(text), facts_of(site, job)
    problems = []
    for rule in RULES:
        for line, found in rule.find(script, facts):
            severity = "warning" if rule.warning else "error"
            problems.append(
                Problem(rule.number, line, f"{rule.message} ({found})", rule.why, severity)
            )
    return sorted(problems, key=lambda problem: (problem.line, problem.rule))


def facts_of(site, job) -> Facts:
    """What a site and a job say that a script can be compared with."""
    facts = Facts(
        world_size=job.world_size if job else None, environment=tuple(job.env) if job else ()
    )
    if site is None:
        return facts
    interfaces = [site.env[name].value for name in _INTERFACES if name in site.env]
    return replace(
        facts,
        max_minutes=site.max_minutes,
        max_nodes=site.max_nodes,
        gpus_per_node=site.gpus.per_node or None,
        partitions=tuple(site.partition.split(",")) if site.partition else (),
        interfaces=tuple(
            {
                name: None
                for value in interfaces
                if "$" not in value
                for name in value.lstrip("=").split(",")
            }
        ),
        environment=(*facts.environment, *site.env),
    )
