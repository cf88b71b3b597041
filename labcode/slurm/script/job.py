"""What to run: a recipe, on how many nodes and ranks, for how long. Where it runs is the `Site`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from labcode.config import Config
from labcode.recipes import RECIPES
from labcode.runtime import combinations
from labcode.runtime.command import parse
from labcode.slurm.script.site import VARIABLE
from labcode.topology import GridShape

TRAIN = "labcode.train"
SIGNAL_S = 120  # seconds before the time limit at which a checkpoint is asked for
MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
_NUMBERS = r"\d+(-\d+(:\d+)?)?"  # 3, 0-7 or 0-7:2
ARRAY = re.compile(rf"{_NUMBERS}(,{_NUMBERS})*(%\d+)?", re.ASCII)


@dataclass(frozen=True)
class Job:
    """One batch job.

    Args:
        recipe: Name of a recipe; for another `module` its first argument, and "" is none.
        overrides: The rest of the command line, such as ("--parallel.tp", "2").
        nodes: Number of nodes.
        ranks_per_node: Ranks on each of them, one per GPU where there are GPUs.
        minutes: Time limit.
        name: Name in the queue, of the log and of the run's folder; "" is the recipe's.
        module: What each rank runs, as after `python -m`. Only `labcode.train` writes checkpoints
            and can be requeued.
        requeue: Shortly before the time limit write a checkpoint and go back into the queue; after
            a failed node as well. The next attempt resumes from the newest checkpoint.
        array: Array as sbatch takes it, such as "0-3"; one job for each number, which the job finds
            in SLURM_ARRAY_TASK_ID.
        dependency: Dependency as sbatch takes it, such as "afterok:123".
        env: Environment variables for the ranks.
        nccl_debug: What NCCL writes to the log: "INFO" shows who talks to whom over what.
        signal_s: Seconds before the time limit at which the checkpoint is asked for; 0: 120, or
            half of a short job.
        max_attempts: How often the job may run, if it goes back into the queue each time; None is
            the site's.
        max_restarts: How often torchrun may start the ranks again after one has died, within the
            job and on the same nodes; only where the site's launcher is torchrun.

    Raises:
        ValueError: A value that no job can have.
    """

    recipe: str
    overrides: tuple[str, ...] = ()
    nodes: int = 1
    ranks_per_node: int = 2
    minutes: int = 10
    name: str = ""
    module: str = TRAIN
    requeue: bool = True
    array: str | None = None
    dependency: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    nccl_debug: str | None = None
    signal_s: int = 0
    max_attempts: int | None = None
    max_restarts: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.overrides, str):
            example = "give a sequence, such as ('--parallel.tp', '2')"
            raise ValueError(f"overrides={self.overrides!r} is one string: {example}")
        self._complete()
        self._check_numbers()
        self._check_texts()

    def _complete(self) -> None:
        """Fills in what depends on other fields; the way to do so in a frozen dataclass."""
        changes: dict[str, object] = {
            "overrides": tuple(str(word) for word in self.overrides),
            "name": self.name or self.recipe or self.module.rpartition(".")[2],
            "signal_s": self.signal_s or min(SIGNAL_S, self.minutes * 30),
        }
        changes["env"] = {name: str(value) for name, value in self.env.items()}
        for name, value in changes.items():
            object.__setattr__(self, name, value)

    def _check_numbers(self) -> None:
        for name in ("nodes", "ranks_per_node", "minutes", "signal_s"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: give at least 1")
        if self.max_attempts is not None and self.max_attempts < 1:
            raise ValueError(f"max_attempts={self.max_attempts}: give at least 1")
        if self.max_restarts < 0:
            raise ValueError(f"max_restarts={self.max_restarts}: give 0 for none, or more")
        limit_s = 60 * self.minutes
        if self.signal_s >= limit_s:
            found = f"signal_s={self.signal_s} is no less than the time limit of {limit_s} s"
            raise ValueError(f"{found}: give less")

    def _check_texts(self) -> None:
        if not MODULE.fullmatch(self.module):
            raise ValueError(f"module={self.module!r}: give a dotted name, as after python -m")
        # "." and ".." would name hidden logs and hidden folders, which nobody finds
        if "/" in self.name or self.name.strip() in ("", ".", ".."):
            rule = "give one without /, and not an empty one, . or .."
            raise ValueError(f"name={self.name!r} names a folder and a log file: {rule}")
        for what in ("name", "array", "dependency"):
            text = getattr(self, what)
            if text is not None and not text.isprintable():
                rule = "leave out line breaks and control characters"
                raise ValueError(f"{what}={text!r} goes on one line of the script: {rule}")
        if self.array is not None and not ARRAY.fullmatch(self.array):
            examples = "0-3 or 1,5,9 or 0-15%4 (4 at a time)"
            raise ValueError(f"array={self.array!r}: give numbers, such as {examples}")
        for name in self.env:
            if not VARIABLE.fullmatch(name):
                rule = "letters, digits and _, no digit first"
                raise ValueError(f"env: {name!r} is no name of a variable: {rule}")
        if any("\0" in text for text in (*self.typed, *self.env.values())):
            raise ValueError("a NUL character cannot be passed on a command line: leave it out")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.ranks_per_node

    @property
    def trains(self) -> bool:
        """Whether it runs the training program, which knows `--train.out` and `--checkpoint`."""
        return self.module == TRAIN

    @property
    def resumes(self) -> bool:
        """Whether a second attempt resumes where the first one was stopped."""
        return self.trains and self.requeue

    @property
    def own_folder(self) -> bool:
        """Whether each job of it gets a folder of its own, because no override names one."""
        return self.trains and self.config().train.out is None

    def folder(self, out: str) -> str:
        """The folder of a training: the one that an override names, else `out`."""
        return self.config().train.out or out

    @property
    def log(self) -> str:
        """The log's file name as sbatch fills it in: name and number, also in an array."""
        return "%x-%j.log"

    @property
    def typed(self) -> list[str]:
        """What the user has typed after the module: the recipe, if there is one, and overrides."""
        return [self.recipe, *self.overrides] if self.recipe else list(self.overrides)

    def added(self, out: str) -> list[str]:
        """What the training program is told besides, unless it was typed: `out`, and to resume."""
        words = []
        if self.own_folder:
            words += ["--train.out", out]
        if self.resumes and not self.config().checkpoint.resume:
            words += ["--checkpoint.resume"]
        return words

    def arguments(self, out: str) -> list[str]:
        """The command line after `python -m MODULE`.

        Args:
            out: Folder of the run; left out if an override names one.

        Raises:
            ValueError: Unknown recipe, field or value.
        """
        return [*self.typed, *self.added(out)]

    def config(self) -> Config:
        """The config that every rank gets.

        Raises:
            ValueError: Unknown recipe, field or value.
        """
        return _config([self.recipe, *self.overrides])

    def check(self) -> GridShape | None:
        """The grid of the job, once all that can be known before it is submitted fits together.

        Returns:
            None for another module than the training program.

        Raises:
            ValueError: Unknown recipe, field or value, or a grid that the ranks or the model do not
                allow.
        """
        if not self.trains:
            return None
        config = _config(self.arguments("runs/any"))
        if self.array is not None and not self.own_folder:
            rule = "leave out train.out, each gets its own"
            raise ValueError(f"all jobs of the array would write into one folder: {rule}")
        return combinations.check(config, self.world_size)


def _config(arguments: Sequence[str]) -> Config:
    """The config for the arguments of the training program."""
    if not arguments[0] or {"-h", "--help"} & set(arguments):
        typed = " ".join(arguments)
        rule = f"give a recipe, one of {', '.join(RECIPES)}, and no --help"
        raise ValueError(f"{typed!r} trains nothing: {rule}")
    return parse(arguments)
