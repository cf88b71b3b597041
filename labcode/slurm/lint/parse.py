"""A batch script as sbatch and bash read it: directives and commands, with their lines."""

import math
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from labcode.slurm.lint.launches import TORCHRUN, Launch, launches

# the options of sbatch 22.05 to 25.05 (slurm.schedmd.com/sbatch.html), and those that pyxis,
# shifter and uenv add to it
_LETTERS = """
A=account a=array B=extra-node-info b=begin C=constraint c=cpus-per-task D=chdir d=dependency
e=error F=nodefile G=gpus H=hold i=input J=job-name k=no-kill L=licenses M=clusters m=distribution
N=nodes n=ntasks O=overcommit o=output p=partition Q=quiet q=qos S=core-spec s=oversubscribe t=time
v=verbose W=wait w=nodelist x=exclude
"""
_WITH_VALUE = """
account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters comment
consolidate-segments constraint container container-env container-id container-image
container-mounts container-name container-save container-workdir core-spec cores-per-socket
cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency distribution error exclude
environment export export-file extra extra-node-info gid gpu-bind gpu-freq gpus gpus-per-node
gpus-per-socket gpus-per-task gres gres-flags hint image input job-name kill-on-invalid-dep
licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus module network
nice nodefile nodelist nodes ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node
ntasks-per-socket oom-kill-step open-mode output partition power prefer priority profile propagate
qos reservation segment signal sockets-per-node switches thread-spec threads-per-core time time-min
tmp tres-bind tres-per-task uenv uid view volume wait-all-nodes wckey wrap
"""
_ALONE = """
container-mount-home container-writable contiguous exclusive get-user-env help hold ignore-pbs
no-bell no-container-mount-home no-container-remap-root no-kill no-requeue overcommit
oversubscribe parsable quiet reboot requeue spread-job stepmgr test-only usage use-min-nodes
verbose version wait
"""
SHORT: dict[str, str] = dict(re.findall(r"(\w)=(\S+)", _LETTERS))
WITH_VALUE = frozenset(_WITH_VALUE.split())
# one entry of --gpus-per-node or --gres: 4, a100:4, gpu:a100:4(S:0-1)
_GPUS = re.compile(r"(?:gres/)?(?:gpu:)?(?:[A-Za-z][\w.-]*:)?(\d+)(?:\(.*\))?")
OPTIONS = WITH_VALUE | frozenset(_ALONE.split())
# options of srun that people write for sbatch, which refuses them
_SRUN_ONLY = """
accel-bind cpu-bind cpus-per-node epilog exact immediate label mpi multi-prog ntasks-per-tres
overlap prolog pty resv-ports task-epilog task-prolog unbuffered workdir
"""
SRUN_ONLY = frozenset(_SRUN_ONLY.split())
# a value that another program fills in, or a person: {{ time }}, {nodes}, <account>, XX:XX
_PLACEHOLDER = re.compile(
    r"\{\{|\{%|\{\w*\}|<[^<>]*>|\bX{2,}\b|__\w+__|@\w+@|\byour\w*[_-]", re.IGNORECASE
)


@dataclass(frozen=True)
class Directive:
    """One option of a `#SBATCH` line: `-N 2` and `--nodes=2` are both ("nodes", "2")."""

    line: int
    name: str
    value: str

    @property
    def is_template(self) -> bool:
        """Whether the value is still to be filled in: `{{ time }}`, `<account>`."""
        return _PLACEHOLDER.search(self.value) is not None


@dataclass(frozen=True)
class Command:
    """One logical line of the script, continued lines joined, without its comment.

    Args:
        line: Number of its first line.
        text: With a blank where a line was joined to the next.
        source: With the line breaks that bash sees, those in quotes and arrays.
    """

    line: int
    text: str
    source: str = ""

    def match(self, pattern: str) -> re.Match[str] | None:
        """The first place at which the regular expression is found in the command."""
        return re.search(pattern, self.text)

    def has(self, pattern: str) -> bool:
        """Whether the regular expression is found in the command."""
        return self.match(pattern) is not None


class Script:
    """A script taken apart once, for the rules to ask.

    Args:
        text: The whole script.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.lines = text.split("\n")
        self.late: list[int] = []  # lines of directives that sbatch does not read
        self.directives: list[Directive] = []
        self.commands: list[Command] = []
        self._read()

    def _read(self) -> None:
        number = 0  # of lines that are read
        while number < len(self.lines):
            line = self.lines[number].rstrip("\r")
            if line.startswith("#SBATCH"):
                self._read_directive(line, number + 1)
                number += 1
            elif not line.strip() or line.lstrip().startswith("#"):
                number += 1
            else:
                number = self._read_command(number)

    def _read_directive(self, line: str, number: int) -> None:
        if self.commands:
            self.late.append(number)
            return
        for name, value in directive_options(line.removeprefix("#SBATCH")):
            self.directives.append(Directive(number, name, value))

    def _read_command(self, start: int) -> int:
        """Adds the command that begins with that line; returns the number of the next line.

        A command goes on in the next line after a backslash, in a quote that is open, in an array
        that is not closed; a here-document belongs to the command before it.
        """
        text, quote = _without_comment(self.lines[start].rstrip("\r"))
        source = text
        number = start + 1
        while number < len(self.lines) and (quote or text.endswith("\\") or _open_list(text)):
            more, quote = _without_comment(self.lines[number].rstrip("\r"), quote)
            source = f"{source[:-1]} {more}" if source.endswith("\\") else f"{source}\n{more}"
            text = text.removesuffix("\\").rstrip() + " " + more.strip()
            number += 1
        self.commands.append(Command(start + 1, text.strip(), source))
        here = re.search(r"(?<!<)<<-?\s*(['\"]?)(\w+)\1", text)
        if here is None:
            return number
        while number < len(self.lines) and self.lines[number].strip() != here[2]:
            number += 1
        return number + 1

    def option(self, name: str) -> Directive | None:
        """The directive that counts, the last one of that name."""
        for directive in reversed(self.directives):
            if directive.name == name:
                return directive
        return None

    def value(self, name: str) -> str | None:
        """Its value; None without such a directive."""
        found = self.option(name)
        return found.value if found else None

    def number(self, name: str) -> int | None:
        """Its value as a whole number ("2-4" is 2); None where it is none."""
        digits = re.match(r"\d+", self.value(name) or "")
        return int(digits[0]) if digits else None

    def found(self, pattern: str) -> list[Command]:
        """The commands in which the regular expression is found."""
        return [command for command in self.commands if command.has(pattern)]

    @cached_property
    def launches(self) -> list[Launch]:
        """All that the script starts, by srun or otherwise, in order."""
        return launches([(c.line, c.text, c.source) for c in self.commands])

    @cached_property
    def trainings(self) -> list[Launch]:
        """The launches that start ranks."""
        return [launch for launch in self.launches if launch.trains]

    @cached_property
    def sruns(self) -> list[Launch]:
        """The commands that start tasks with srun."""
        return [launch for launch in self.launches if launch.by == "srun"]

    @cached_property
    def torchruns(self) -> list[Launch]:
        """The commands that start agents of torchrun."""
        return [launch for launch in self.trainings if launch.has(TORCHRUN)]

    @property
    def reads_size(self) -> bool:
        """Whether it asks SLURM how large the job is, so that sbatch can be told on its line."""
        return (
            re.search(r"SLURM_(NNODES|JOB_NUM_NODES|NTASKS|NPROCS|STEP_NUM)", self.text) is not None
        )

    @property
    def nodes(self) -> int | None:
        """How many the job has; None if the command line of sbatch is to say it."""
        told = self.option("nodes")
        if told is not None:
            return self.number("nodes")
        tasks = self.number("ntasks")
        on_each = self.number("ntasks-per-node")
        if tasks and on_each:
            return -(-tasks // on_each)
        return None if self.reads_size else 1

    @property
    def multi_node(self) -> bool:
        """Whether the script asks for more than one node."""
        return (self.nodes or 1) > 1

    def nodes_of(self, launch: Launch) -> int | None:
        """On how many nodes a launch starts something; None if nobody knows."""
        if launch.by == "":
            return 1
        told = launch.options.get("nodes")
        if told is not None:
            return int(told) if told.isdigit() else self.nodes
        return self.nodes

    def tasks_of(self, launch: Launch) -> int | None:
        """How many tasks a step of srun has; None if nobody knows."""
        told = launch.options.get("ntasks", "")
        if told.isdigit():
            return int(told)
        if not {"nodes", "ntasks", "ntasks-per-node"} & set(launch.options):
            in_all = self.number("ntasks")
            if in_all:
                return in_all
        nodes = self.nodes_of(launch)
        on_each = self.tasks_per_node_of(launch)
        return nodes * on_each if nodes and on_each else None

    def tasks_per_node_of(self, launch: Launch) -> int | None:
        """How many tasks a step of srun has on each node; None if nobody knows."""
        on_each = launch.options.get("ntasks-per-node", "")
        if on_each.isdigit():
            return int(on_each)
        nodes = self.nodes_of(launch)
        told = launch.options.get("ntasks", "")
        if told.isdigit() and nodes:
            return -(-int(told) // nodes)
        if re.search("NNODES|NUM_NODES", told):
            return 1
        return self._tasks_per_node

    @property
    def _tasks_per_node(self) -> int | None:
        on_each = self.number("ntasks-per-node")
        if on_each:
            return on_each
        tasks = self.number("ntasks")
        if tasks and self.nodes:
            return -(-tasks // self.nodes)
        per_gpu = self.number("ntasks-per-gpu")
        if per_gpu:
            return per_gpu * self.gpus_per_node if self.gpus_per_node else None
        sized = self.option("ntasks") or self.option("ntasks-per-node")
        return None if sized or "SLURM_NTASKS" in self.text or "SLURM_NPROCS" in self.text else 1

    @property
    def gpus_per_node(self) -> int | None:
        """GPUs asked for on a node, in whichever of the four ways; None if the script is silent."""
        for name in ("gpus-per-node", "gres"):
            for entry in (self.value(name) or "").split(","):
                counted = _GPUS.fullmatch(entry.strip())
                if counted and (name != "gres" or "gpu" in entry):
                    return int(counted[1])
        per_task = self._last_number("gpus-per-task")
        tasks = self.number("ntasks-per-node")
        if per_task is not None and tasks:
            return per_task * tasks
        in_all = self._last_number("gpus")
        return in_all // (self.number("nodes") or 1) if in_all is not None else None

    def _last_number(self, name: str) -> int | None:
        """The number at the end of a directive's value: 4 for a100:4."""
        digits = re.search(r"(\d+)$", self.value(name) or "")
        return int(digits[1]) if digits else None

    @property
    def ranks_per_node(self) -> int | None:
        """Processes that train on one node: torchrun's, else the tasks of srun.

        None where it is not a plain number.
        """
        if self.torchruns:
            told = self.torchruns[0].said("nproc_per_node")
            if told is None:
                return None if self.torchruns[0].has_unknown_words else 1
            if told == "1":  # an agent for each rank
                return self.tasks_per_node_of(self.torchruns[0])
            return int(told) if told.isdigit() else None
        for training in reversed(self.trainings):
            if training.by == "srun" and not training.is_agent:
                return self.tasks_per_node_of(training)
        return None

    @property
    def world_size(self) -> int | None:
        """Ranks of the job; None where the script does not say."""
        if self.ranks_per_node and self.nodes:
            return self.nodes * self.ranks_per_node
        return None

    @property
    def minutes(self) -> float | None:
        """The time limit."""
        return minutes(self.value("time"))


def minutes(text: str | None) -> float | None:
    """A SLURM time limit in minutes; None for what is none.

    The forms are "90", "90:30", "1:30:00", "1-12", "1-12:30:00" and "UNLIMITED".
    """
    if text and text.upper() in ("UNLIMITED", "INFINITE"):
        return math.inf
    parts = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text or "")
    if not parts:
        return None
    days, *rest = parts.groups()
    numbers = [int(part) for part in rest if part is not None]
    if days is None and len(numbers) < 3:  # minutes, or minutes:seconds
        numbers = [0, *numbers]
    total = int(days or 0) * 1440.0
    for number, in_minutes in zip(numbers, (60, 1, 1 / 60)):
        total += number * in_minutes
    return total


def directive_options(text: str) -> Iterator[tuple[str, str]]:
    """(name, value) of each option in the rest of a `#SBATCH` line."""
    try:
        words = shlex.split(text, comments=True)
    except ValueError:  # a quote that is not closed
        words = text.split()
    while words:
        word = words.pop(0)
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = _whole(name)
            if not equals and name in WITH_VALUE and words:
                value = words.pop(0)
            yield name, value
        elif word.startswith("-") and len(word) > 1:
            name = SHORT.get(word[1], word[1])
            value = word[2:]
            if not value and name in WITH_VALUE and words and not words[0].startswith("-"):
                value = words.pop(0)
            yield name, value.removeprefix("=")


def _whole(name: str) -> str:
    """The option that a long name means: sbatch takes any beginning that only one option has."""
    if name == "tasks-per-node":
        return "ntasks-per-node"
    meant = [option for option in OPTIONS if option.startswith(name)]
    return meant[0] if len(meant) == 1 and name not in OPTIONS else name


def _without_comment(line: str, quote: str = "") -> tuple[str, str]:
    """(The line up to a `#` that begins a comment, the quote that is open at its end).

    Args:
        line: One line of the script.
        quote: The quote that is open at its beginning, "" for none.
    """
    for at, letter in enumerate(line):
        escaped = at > 0 and line[at - 1] == "\\"
        if quote:
            if letter == quote and (quote == "'" or not escaped):
                quote = ""
        elif letter in "'\"" and not escaped:
            quote = letter
        elif letter == "#" and (at == 0 or line[at - 1].isspace()):
            return line[:at].rstrip(), ""
    return line.rstrip(), quote


def _open_list(text: str) -> bool:
    """Whether an array goes on in the next line: `command=(` without its `)`."""
    declaring = r"(?:(?:local|declare|export|readonly|typeset)\s+(?:-\w+\s+)*)?"
    begin = re.match(rf"\s*{declaring}\w+\+?=\(", text)
    return bool(begin) and text.count("(") > text.count(")")
