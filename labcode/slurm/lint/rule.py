"""What a rule about batch scripts is: number, message, reason, and how it is found."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from labcode.slurm.lint.model import BatchJob


@dataclass(frozen=True)
class Facts:
    """What the site and the job say; what is not known is None or empty.

    Args:
        max_minutes: Longest time limit of the site.
        max_nodes: Most nodes of a job there.
        gpus_per_node: How many a node has.
        interfaces: The network interfaces between the nodes.
        environment: Variables that the site or the job sets, for reasons of its own.
        world_size: Ranks of the job that the script was made for.
        folder: Folder of the programs that it starts.
    """

    max_minutes: float | None = None
    max_nodes: int | None = None
    gpus_per_node: int | None = None
    interfaces: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    world_size: int | None = None
    folder: Path | None = None


Found = Iterator[tuple[int, str]]  # (line, what was found there) for each fault
Finder = Callable[[BatchJob, Facts], Found]


@dataclass(frozen=True)
class Rule:
    """One rule.

    Args:
        number: "S01" and so on; a number is never used again.
        message: The fault, in one line.
        why: What happens to the job.
        find: Yields (line, what was found there) for each fault.
        warning: The job can work nevertheless: said, not refused.
    """

    number: str
    message: str
    why: str
    find: Finder = field(repr=False)
    warning: bool = False


def collector() -> tuple[list[Rule], Callable[..., Callable[[Finder], Finder]]]:
    """An empty list of rules, and the decorator that adds to it.

    `@rule("S01", "message", "why")` stands above the function that finds the fault.
    """
    rules: list[Rule] = []

    def rule(
        number: str, message: str, why: str, *, warning: bool = False
    ) -> Callable[[Finder], Finder]:
        def add(find: Finder) -> Finder:
            rules.append(Rule(number, message, why, find, warning))
            return find

        return add

    return rules, rule
