"""What a rule about batch scripts is: a number, one line to say, the reason, a wrong example, a right one, the search."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from labcode.slurm.lint.parse import Script


@dataclass(frozen=True)
class Facts:
    """What is known besides the script, from the site and the job; what is not known is None or empty.

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


Finder = Callable[[Script, Facts], Iterator[tuple[int, str]]]


@dataclass(frozen=True)
class Rule:
    """One rule.

    Args:
        number: "S01" and so on; a number is never used again.
        message: The fault, in one line.
        why: What happens to the job.
        wrong, right: Scripts on which the rule fires, and does not.
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


def collector() -> tuple[list[Rule], Callable]:
    """An empty list of rules, and the decorator that adds a rule to it: `@rule("S01", "message", "why", wrong, right)`."""
    rules: list[Rule] = []

    def rule(number, message, why, wrong, right, **more):
        def add(find):
            rules.append(Rule(number, message, why, wrong, right, find, **more))
            return find

        return add

    return rules, rule
