"""What a rule about batch scripts is: number, message, reason, a wrong example and a right one."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from labcode.slurm.lint.parse import Script


@dataclass(frozen=True)
class Facts:
    """What the site and the job say; what is not known is None or empty.

    Args:
        max_minutes: Longest time limit of the site.
        max_nodes: Most nodes of a job there.
        gpus_per_node: How many a node has.
        partitions: Those of the profile.
        interfaces: The network interfaces between the nodes.
        environment: Variables that the site sets, for reasons of its own.
        world_size: Ranks of the job that the script was made for.
    """

    max_minutes: float | None = None
    max_nodes: int | None = None
    gpus_per_node: int | None = None
    partitions: tuple[str, ...] = ()
    interfaces: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    world_size: int | None = None


Found = Iterator[tuple[int, str]]  # (line, what was found there) for each fault
Finder = Callable[[Script, Facts], Found]


@dataclass(frozen=True)
class Rule:
    """One rule.

    Args:
        number: "S01" and so on; a number is never used again.
        message: The fault, in one line.
        why: What happens to the job.
        wrong: A script on which the rule fires.
        right: One on which it does not.
        find: Yields (line, what was found there) for each fault.
        warning: The job can work nevertheless: said, not refused.
        facts: With which the examples are read.
    """

    number: str
    message: str
    why: str
    wrong: str
    right: str
    find: Finder = field(repr=False)
    warning: bool = False
    facts: Facts = Facts()


def collector() -> tuple[list[Rule], Callable[..., Callable[[Finder], Finder]]]:
    """An empty list of rules, and the decorator that adds to it.

    `@rule("S01", "message", "why", wrong, right)` stands above the function that finds the fault.
    """
    rules: list[Rule] = []

    def rule(
        number: str, message: str, why: str, wrong: str, right: str, **more: Any
    ) -> Callable[[Finder], Finder]:
        def add(find: Finder) -> Finder:
            rules.append(Rule(number, message, why, wrong, right, find, **more))
            return find

        return add

    return rules, rule


def commands_with(pattern: str) -> Finder:
    """Finds each command that holds the regular expression, and shows what it matched."""

    def find(script: Script, facts: Facts) -> Found:
        for command in script.commands:
            match = command.match(pattern)
            if match:
                yield command.line, match[0].strip()

    return find
