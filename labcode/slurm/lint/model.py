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
_OTHER = r"(?:nvme|shard|mps|tmp|lscratch|ssd|craynetwork|bandwidth|cpu|mem)\b"
_GPUS = re.compile(
    rf"(?:gres/)?(?!{_OTHER})(?:gpu(?::|$))?(?:[A-Za-z][\w.-]*(?::|$))?(\d*)(?:\(.*\))?"
)
_COUNTS_NODES = r"SLURM_(?:NNODES|JOB_NUM_NODES)"
_COUNTS_TASKS = r"SLURM_(?:NTASKS|NPROCS)"


@dataclass(frozen=True)
class Component:
    """One allocation: the whole job, or what stands between two `hetjob` lines.

    Args:
        directives: Options of the component, in order; the last one of a name counts.
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

    def line_of(self, *names: str) -> int:
        """The line of the first of these directives that is there, else the first line."""
        found = [option.line for option in map(self.option, names) if option]
        return found[0] if found else 1

    @property
    def nodes(self) -> int | None:
        """How many it has; None if the command line of sbatch is to say it."""
        tasks = self.number("ntasks")
        nodes = self.number("nodes")
        if self.option("nodes") is not None:  # sbatch leaves out those that would have no task
            return min(nodes, tasks) if nodes and tasks else nodes
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
        tasks = self.number("ntasks")
        if tasks and self.nodes:  # this comes first: beside it --ntasks-per-node is a maximum
            return math.ceil(tasks / self.nodes)
        on_each = self.number("ntasks-per-node")
        if on_each:
            return on_each
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
        per_task = gpus(self.value("gpus-per-task") or self.value("tres-per-task"))
        counted = self.option("ntasks") or self.option("ntasks-per-node")
        if per_task is not None and counted and self.tasks_per_node:
            return per_task * self.tasks_per_node
        in_all = gpus(self.value("gpus"))
        return in_all // (self.nodes or 1) if in_all is not None else None


def gpus(value: str | None) -> int | None:
    """How many GPUs `4`, `a100:4` or `gpu:a100:4,nvme:1` are; None for none that is counted."""
    for entry in (value or "").replace("=", ":").split(","):
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
    def fills_nodes(self) -> bool:
        """Whether srun starts as many tasks as there is room for: it knows only the cores of each.

        On nodes that are shared the job has the cores of one task, and one is started.
        """
        cores = "cpus-per-task" in self.options or "SRUN_CPUS_PER_TASK" in self.component.asks
        whole = self.component.option("exclusive") is not None
        return self.by == "srun" and cores and whole and not self.says_tasks

    @property
    def tasks(self) -> int | None:
        """How many tasks it has; None if nobody knows.

        `SLURM_NTASKS` of the job comes before the step's own --ntasks-per-node, which is then
        passed over with a warning; newer versions take it beside the step's own --nodes.
        """
        if self.by == "":
            return 1
        told = self.options.get("ntasks")
        if told is not None:
            return self._counted(told)
        on_each = self.options.get("ntasks-per-node", "")
        if self.fills_nodes or (on_each and self.component.sizes_tasks and "nodes" in self.options):
            return None
        if self.component.sizes_tasks:
            return self.component.tasks
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

    def _option(self, *names: str) -> str:
        """The value of the first of these that step or job says; "" where none is said."""
        said = [self.options.get(name) or self.component.value(name) for name in names]
        return next((value for value in said if value), "")

    @property
    def _gpus_per_task(self) -> int | None:
        return gpus(self._option("gpus-per-task", "tres-per-task"))

    @property
    def sees_its_own_gpus(self) -> bool:
        """Whether each task sees GPUs of its own alone, counted from 0.

        That is so with --gpus-per-task (since SLURM 21.08), --tres-per-task, --ntasks-per-gpu and
        --gpu-bind; and not with --gpus-per-node or --gres, where each task sees all of the node.
        """
        bind = self._option("gpu-bind", "tres-bind")
        if self.unknown or re.search(r"\bnone\b", bind):
            return False
        parts = ("single", "per_task", "map_gpu", "mask_gpu", "closest")
        bound = re.search("|".join(parts), bind) is not None
        return bound or bool(self._gpus_per_task or self._option("ntasks-per-gpu"))

    @property
    def gpus_of_task(self) -> int | None:
        """How many GPUs each of its tasks sees; None if nobody knows."""
        if not self.sees_its_own_gpus:
            on_node = gpus(self.options.get("gpus-per-node")) or gpus(self.options.get("gres"))
            return on_node or self.component.gpus_per_node
        if self._gpus_per_task is not None:
            return self._gpus_per_task
        bind = self._option("gpu-bind", "tres-bind")
        bound = re.search(r"(?:single|per_task):(\d+)", bind)
        if bound:
            return max(1, int(bound[1])) if "per_task" in bound[0] else 1
        return 1 if self._option("ntasks-per-gpu") or "map_gpu" in bind else None

    @property
    def takes_whole(self) -> str:
        """What of its nodes it takes whole, so that no other step runs beside it; "" for nothing.

        Without --exact, which -c and --exclusive imply, that are the cores; unless it says its own
        share, also the memory that the job has on a node, and the GPUs.
        """
        said = set(self.options)
        if self.unknown or said & {"overlap", "nodelist", "relative"}:
            return ""
        if not said & {"exact", "cpus-per-task", "exclusive"}:
            return "cores"
        if self.component.option("mem") and not any(name.startswith("mem") for name in said):
            return "memory"
        on_node = any(self.component.option(name) for name in ("gpus-per-node", "gres", "gpus"))
        own = any(name.startswith(("gpu", "gres", "tres")) for name in said)
        return "GPUs" if on_node and self.component.gpus_per_node and not own else ""


@dataclass(frozen=True)
class Signal:
    """What `#SBATCH --signal=B:USR1@60` asks for.

    Args:
        line: Number of the line of its directive.
        text: Value of the option.
        name: "USR1", or a number.
        to_script: Whether the batch script gets it, with `B:`; else the tasks of the steps do.
        lead_s: Seconds before the time limit; None: SLURM's 60.
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

    @property
    def first(self) -> Component:
        """The first component, for most jobs the only one: this script runs on its first node."""
        return self.components[0]

    @property
    def multi_node(self) -> bool:
        """Whether the script asks for more than one node."""
        return (self.first.nodes or 1) > 1 or len(self.components) > 1

    @property
    def minutes(self) -> float | None:
        """The time limit."""
        return minutes(self.first.value("time"))

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
        if self.ranks_per_node and self.first.nodes:
            return self.first.nodes * self.ranks_per_node
        return None

    def in_loop(self, step: Step) -> bool:
        """Whether a loop starts the step several times without waiting for each."""
        begun = [one.line for one in self.found(r"^(for|while|until)\b") if one.line <= step.line]
        ended = [one.line for one in self.found(r"^done\b") if one.line < step.line]
        later = [one for one in self.found(r"(^|[\s;&])(wait|done)\b") if one.line >= step.line]
        if not begun or not later or begun[-1] < max(ended, default=0):
            return False
        return not later[0].has(r"\bwait\b.*\bdone\b|^(?!.*\bdone\b).*\bwait\b")

    # -------------------------------------------------------------------- the signal

    @cached_property
    def signal(self) -> Signal | None:
        """The signal before the time limit; None without one, or with one to be filled in."""
        asked = self.first.option("signal")
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
