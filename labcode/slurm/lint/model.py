"""What SLURM makes of a batch script: its components, its steps, and the way of its signal.

The rules are sentences about this model. Each fact here was tried on SLURM 22.05 and stands in
tests/slurm/test_lint_on_slurm.py; where a fact is younger or older than that, it says so.
"""

import math
import re
from dataclasses import dataclass, fields
from functools import cached_property

from labcode.slurm.lint.launches import TORCHRUN, Launch, launches, starts_ranks
from labcode.slurm.lint.parse import Command, Directive, Script

# one entry of --gpus-per-node or --gres: 4, a100:4, gpu:a100:4(S:0-1), and gpu, which is one
_OTHER = r"(?:nvme|shard|mps|tmp|lscratch|ssd|craynetwork|bandwidth)\b"
_GPUS = re.compile(
    rf"(?:gres/)?(?!{_OTHER})(?:gpu(?::|$))?(?:[A-Za-z][\w.-]*(?::|$))?(\d*)(?:\(.*\))?"
)
_COUNTS_NODES = r"SLURM_(?:NNODES|JOB_NUM_NODES)"
_COUNTS_TASKS = r"SLURM_(?:NTASKS|NPROCS)"


@dataclass(frozen=True)
class Component:
    """One allocation: the whole job, or what stands between two `hetjob` lines.

    Args:
        directives: Its options, in order; the last one of a name counts.
        asks: What the script asks SLURM for at run time, `SLURM_NNODES`: then the command line of
            sbatch may say it, and a count without a directive is unknown.
    """

    directives: tuple[Directive, ...]
    asks: str

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

    def line_of(self, name: str) -> int:
        """The line of that directive, else the first of the script."""
        found = self.option(name)
        return found.line if found else 1

    @property
    def nodes(self) -> int | None:
        """How many it has; None if the command line of sbatch is to say it."""
        if self.option("nodes") is not None:
            return self.number("nodes")
        tasks = self.number("ntasks")
        on_each = self.number("ntasks-per-node")
        if tasks and on_each:
            return math.ceil(tasks / on_each)
        return None if re.search(_COUNTS_NODES + "|" + _COUNTS_TASKS, self.asks) else 1

    @property
    def sizes_tasks(self) -> bool:
        """Whether it says how many tasks there are: then `SLURM_NTASKS` is set in the script."""
        names = ("ntasks", "ntasks-per-node", "ntasks-per-gpu")
        return any(self.option(name) for name in names)

    @property
    def tasks(self) -> int | None:
        """`SLURM_NTASKS`, which each step takes over; None where nothing says it."""
        told = self.number("ntasks")
        if told:
            return told
        on_each = self.tasks_per_node
        return on_each * self.nodes if self.sizes_tasks and on_each and self.nodes else None

    @property
    def tasks_per_node(self) -> int | None:
        """Tasks of a node, one where nothing is said; None if nobody knows."""
        on_each = self.number("ntasks-per-node")
        if on_each:
            return on_each
        tasks = self.number("ntasks")
        if tasks and self.nodes:
            return math.ceil(tasks / self.nodes)
        per_gpu = self.number("ntasks-per-gpu")
        if per_gpu:
            return per_gpu * self.gpus_per_node if self.gpus_per_node else None
        return None if self.sizes_tasks or re.search(_COUNTS_TASKS, self.asks) else 1

    @property
    def gpus_per_node(self) -> int | None:
        """GPUs asked for on a node, in whichever of the four ways; None if nothing is said."""
        for name in ("gpus-per-node", "gres"):
            counted = gpus(self.value(name))
            if counted is not None:
                return counted
        per_task = gpus(self.value("gpus-per-task"))
        tasks = self.number("ntasks-per-node") or self.number("ntasks")
        if per_task is not None and tasks:
            on_each = self.number("ntasks-per-node") or math.ceil(tasks / (self.nodes or 1))
            return per_task * on_each
        in_all = gpus(self.value("gpus"))
        return in_all // (self.nodes or 1) if in_all is not None else None


def gpus(value: str | None) -> int | None:
    """How many GPUs `4`, `a100:4` or `gpu:a100:4,nvme:1` are; None for none that is counted."""
    for entry in (value or "").split(","):
        counted = _GPUS.fullmatch(entry.strip())
        if counted and (counted[1] or entry.startswith("gpu")):
            return int(counted[1] or 1)
    return None


@dataclass(frozen=True)
class Step(Launch):
    """A launch in its place: on which nodes, with how many tasks, and what each of them sees.

    Without srun it runs once, in the batch script on the first node.
    """

    component: Component

    @property
    def nodes(self) -> int | None:
        """On how many nodes it starts something; None if nobody knows."""
        if self.by == "":
            return 1
        told = self.options.get("nodes")
        nodes = int(told) if told and told.isdigit() else self.component.nodes
        tasks = self.options.get("ntasks", "")
        return min(int(tasks), nodes) if tasks.isdigit() and nodes else nodes

    @property
    def short(self) -> str:
        """The command from its srun on, for a message: much may stand before it on its line."""
        srun = re.search(r"\bsrun\s", self.text)
        return self.text[srun.start() if srun else 0 :][:60]

    @property
    def shell_stays(self) -> bool:
        """Whether a `bash -c` in it lives on beside the program: a command follows there."""
        return self.trains and not starts_ranks(self.program.split("; ")[-1])

    @property
    def says_tasks(self) -> bool:
        """Whether step or job says how many tasks, so that somebody has chosen the number."""
        return bool({"ntasks", "ntasks-per-node"} & set(self.options)) or (
            self.component.sizes_tasks
        )

    @property
    def tasks(self) -> int | None:
        """How many tasks it has; None if nobody knows.

        `SLURM_NTASKS` of the job comes before the step's own --ntasks-per-node, which is then
        passed over with a warning.
        """
        if self.by == "":
            return 1
        told = self.options.get("ntasks")
        if told is not None:
            return self._counted(told)
        if self.component.sizes_tasks:
            return self.component.tasks
        on_each = self.options.get("ntasks-per-node", "")
        each = int(on_each) if on_each.isdigit() else self.component.tasks_per_node
        return self.nodes * each if self.nodes and each else None

    def _counted(self, told: str) -> int | None:
        if told.isdigit():
            return int(told)
        if re.search(_COUNTS_NODES, told):
            return self.nodes
        return self.component.tasks if re.search(_COUNTS_TASKS, told) else None

    @property
    def tasks_per_node(self) -> int | None:
        """How many tasks it has on each node; None if nobody knows."""
        told = self.options.get("ntasks", "")
        if re.search(_COUNTS_NODES, told):
            return 1
        if self.tasks and self.nodes:
            return math.ceil(self.tasks / self.nodes)
        on_each = self.component.number("ntasks-per-node")  # however many nodes there will be
        return None if told else on_each

    @property
    def ranks_per_node(self) -> int | None:
        """Processes that train on a node: torchrun's, else its tasks; None if nobody knows."""
        if not self.has(TORCHRUN):
            return None if self.is_agent or self.by == "" else self.tasks_per_node
        told = self.said("nproc_per_node")
        if told is None:
            return None if self.has_unknown_words else 1
        if told == "1":  # an agent for each rank
            return self.tasks_per_node
        return int(told) if told.isdigit() else None

    def _option(self, name: str) -> str:
        return self.options.get(name) or self.component.value(name) or ""

    @property
    def sees_its_own_gpus(self) -> bool:
        """Whether each task sees GPUs of its own alone, counted from 0.

        That is so with --gpus-per-task (since SLURM 21.08), --ntasks-per-gpu and --gpu-bind; and
        not with --gpus-per-node or --gres, where each task sees all of the node.
        """
        bind = self._option("gpu-bind")
        if self.unknown or bind.startswith("none"):
            return False
        parts = ("single", "per_task", "map_gpu", "mask_gpu", "closest")
        bound = re.search("|".join(parts), bind) is not None
        return bound or bool(self._option("gpus-per-task") or self._option("ntasks-per-gpu"))

    @property
    def gpus_of_task(self) -> int | None:
        """How many GPUs each of its tasks sees; None if nobody knows."""
        if not self.sees_its_own_gpus:
            on_node = gpus(self.options.get("gpus-per-node")) or gpus(self.options.get("gres"))
            return on_node or self.component.gpus_per_node
        per_task = gpus(self._option("gpus-per-task"))
        if per_task is not None:
            return per_task
        bound = re.match(r"(?:verbose,)?(?:single|per_task):(\d+)", self._option("gpu-bind"))
        if bound:
            return max(1, int(bound[1])) if "per_task" in bound[0] else 1
        return (
            1 if self._option("ntasks-per-gpu") or "map_gpu" in self._option("gpu-bind") else None
        )

    @property
    def shares_nodes(self) -> bool:
        """Whether it says what it takes of its nodes, so that another step may run beside it."""
        said = {"overlap", "exact", "cpus-per-task", "mem", "mem-per-cpu", "nodelist", "relative"}
        return self.unknown or bool(said & set(self.options))


@dataclass(frozen=True)
class Signal:
    """What `#SBATCH --signal=B:USR1@60` asks for.

    Args:
        line: Of the directive.
        text: Its value.
        name: "USR1", or a number.
        to_script: Whether the batch script gets it, with `B:`; else the tasks of the steps do.
        lead_s: So long before the time limit, in seconds; None: SLURM's 60.
    """

    line: int
    text: str
    name: str
    to_script: bool
    lead_s: int | None


class BatchJob(Script):
    """A script and what SLURM makes of it."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        code = "\n".join(command.text for command in self.commands)
        self.components = [Component(tuple(part), code) for part in self.parts]
        found = launches([(c.line, c.text, c.source) for c in self.commands])
        self.launches = [self._placed(launch) for launch in found]

    def _placed(self, launch: Launch) -> Step:
        group = re.match(r"\d+", launch.options.get("het-group", "0"))
        at = int(group[0]) if group else 0
        known = {field.name: getattr(launch, field.name) for field in fields(Launch)}
        return Step(**known, component=self.components[min(at, len(self.components) - 1)])

    # -------------------------------------------------------------------- the first component

    def option(self, name: str) -> Directive | None:
        """The directive of the first component that counts."""
        return self.components[0].option(name)

    def value(self, name: str) -> str | None:
        """Its value; None without such a directive."""
        return self.components[0].value(name)

    def number(self, name: str) -> int | None:
        """Its value as a whole number; None where it is none."""
        return self.components[0].number(name)

    @property
    def nodes(self) -> int | None:
        """Nodes of the first component; None if the command line of sbatch is to say it."""
        return self.components[0].nodes

    @property
    def multi_node(self) -> bool:
        """Whether the script asks for more than one node."""
        return (self.nodes or 1) > 1 or len(self.components) > 1

    @property
    def gpus_per_node(self) -> int | None:
        """GPUs of a node of the first component."""
        return self.components[0].gpus_per_node

    @property
    def minutes(self) -> float | None:
        """The time limit."""
        return minutes(self.value("time"))

    def where(self, *names: str) -> int:
        """The line of the first of these directives that is there, else the first line."""
        for name in names:
            directive = self.option(name)
            if directive:
                return directive.line
        return 1

    def expanded(self, prefix: str) -> list[tuple[str, Command]]:
        """(Name without the prefix, command) of each variable that the batch script fills in.

        Not those with a default, `${NAME:-1}`, not those whose emptiness the script asks for, and
        not those between single quotes, which a shell on the nodes fills in.
        """
        asked = set(re.findall(rf"(?:-[znv]\s+|\[\s+|:)['\"]?\$?\{{?{prefix}(\w+)", self.text))
        asked |= set(re.findall(rf"\$\{{{prefix}(\w+):?[-=+?]", self.text))
        found = []
        for command in self.commands:
            here = re.sub(r"(?<![\w\"])'[^']*'", "", command.text)
            for name in re.findall(rf"(?<!\\)\$\{{?{prefix}(\w+)", here):
                if name not in asked:
                    found.append((name, command))
        return found

    def meeting_places(self, address: str) -> list[tuple[Command, str]]:
        """Where the ranks are to meet, if the address matches; of several exports the last."""
        options = r"--(?:rdzv[-_]endpoint|master[-_]addr|main_process_ip)[= ]"
        where = rf"(?:\bMASTER_ADDR=|{options})['\"]?{address}"
        exports = self.found(r"\bMASTER_ADDR=")
        found = []
        for command in self.commands:
            told = command.match(where)
            corrected = command in exports and command is not exports[-1]
            if told and not corrected and not command.has(r"^(echo|printf)\b"):
                found.append((command, told[1]))
        return found

    @property
    def reads_files(self) -> bool:
        """Whether it runs a file of the user's own in this shell, whose traps are not known."""
        known = r"env|conda|profile|bashrc|setup|module"
        return bool(self.found(rf"^(source|\.)\s+(?!\S*({known}))\S+\.(sh|bash)\b"))

    # -------------------------------------------------------------------- the steps

    @cached_property
    def trainings(self) -> list[Step]:
        """The launches that start ranks."""
        return [launch for launch in self.launches if launch.trains]

    @cached_property
    def sruns(self) -> list[Step]:
        """The commands that start tasks with srun."""
        return [launch for launch in self.launches if launch.by == "srun"]

    @cached_property
    def torchruns(self) -> list[Step]:
        """The commands that start agents of torchrun."""
        return [launch for launch in self.trainings if launch.has(TORCHRUN)]

    @property
    def ranks_per_node(self) -> int | None:
        """Processes that train on one node: torchrun's, else the tasks of srun."""
        if self.torchruns:
            return self.torchruns[0].ranks_per_node
        for training in reversed(self.trainings):
            if training.by == "srun" and not training.is_agent:
                return training.ranks_per_node
        return None

    @property
    def world_size(self) -> int | None:
        """Ranks of the job; None where the script does not say."""
        if self.ranks_per_node and self.nodes:
            return self.nodes * self.ranks_per_node
        return None

    # -------------------------------------------------------------------- the signal

    @cached_property
    def signal(self) -> Signal | None:
        """The signal before the time limit; None without one, or with one to be filled in."""
        asked = self.option("signal")
        told = (
            re.fullmatch(r"(R?)(B?)(?:R)?:?(?:SIG)?(\w+)(?:@(\d+))?", asked.value)
            if asked
            else None
        )
        if asked is None or told is None:
            return None
        lead = int(told[4]) if told[4] else None
        return Signal(asked.line, asked.value, told[3], bool(told[2]), lead)

    def traps(self, name: str) -> list[Command]:
        """The commands that set a trap for that signal and do something in it."""
        of_steps = {step.line for step in self.sruns}
        set_here = rf"\btrap\s+(?:--\s+)?(?!''|\"\"|-\s)\S.*\b(?:SIG)?{name}\b"
        return [command for command in self.found(set_here) if command.line not in of_steps]

    @property
    def hands_on(self) -> bool:
        """Whether the script passes its signal on to the steps: by scancel, or by kill to srun."""
        name = self.signal.name if self.signal else "USR1"
        by_slurm = rf"\bscancel\s.*(?:--signal|-s)[= ]?['\"]?(?:SIG)?{name}"
        by_shell = rf"\bp?kill\s+(?:-s\s*|--signal[= ]|-)(?:SIG)?{name}\b"
        of_steps = {step.line for step in self.sruns}
        sent = [command for command in self.found(by_shell) if command.line not in of_steps]
        return bool(self.found(by_slurm) or sent)

    @property
    def signal_reaches_steps(self) -> bool:
        """Whether the tasks that srun has started get the signal."""
        if self.signal is None or not self.sruns:
            return False
        # srun itself hands a signal on, where it has taken the script's place
        in_place = any(re.match(r"\s*exec\s", step.text) for step in self.sruns)
        return not self.signal.to_script or self.hands_on or in_place


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
