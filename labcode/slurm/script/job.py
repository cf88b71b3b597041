"""What to run: a recipe, on how many nodes and ranks, and for how long. Where it runs is the `Site`'s business."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from labcode.command import parse
from labcode.config import Config
from labcode.recipes import RECIPES
from labcode.topology import GridShape

TRAIN = "labcode.train"
NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)  # of an environment variable
MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)


@dataclass(frozen=True)
class Job:
    """One batch job.

    Args:
        recipe: Name of a recipe; for another `module` its first argument, and "" is none.
        overrides: The rest of the command line, such as ("--parallel.tp", "2").
        nodes: Number of nodes.
        ranks_per_node: Ranks on each of them, one per GPU where there are GPUs.
        minutes: Time limit.
        name: Name in the queue, of the log and of the run's folder; None is the recipe's.
        module: What each rank runs, as after `python -m`. Only `labcode.train` writes checkpoints and can be requeued.
        requeue: Shortly before the time limit write a checkpoint and go back into the queue; go on after a failed node.
        array: As sbatch takes it, such as "0-3"; one job for each number, which the job finds in SLURM_ARRAY_TASK_ID.
        dependency: As sbatch takes it, such as "afterok:123".
        env: Environment variables for the ranks.
        nccl_debug: What NCCL writes to the log: "INFO" shows who talks to whom over what.
        signal_s: Seconds before the time limit at which the checkpoint is asked for; None: 120, and half of a short job.

    Raises:
        ValueError: A value that no job can have.
    """

    recipe: str
    overrides: tuple[str, ...] = ()
    nodes: int = 1
    ranks_per_node: int = 2
    minutes: int = 10
    name: str | None = None
    module: str = TRAIN
    requeue: bool = True
    array: str | None = None
    dependency: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    nccl_debug: str | None = None
    signal_s: int | None = None

    def __post_init__(self):
        if isinstance(self.overrides, str):
            raise ValueError(
                f"overrides={self.overrides!r} is one string: give a sequence, such as ('--parallel.tp', '2')"
            )
        object.__setattr__(self, "overrides", tuple(map(str, self.overrides)))
        object.__setattr__(self, "env", {name: str(value) for name, value in self.env.items()})
        if self.name is None:
            object.__setattr__(self, "name", self.recipe or self.module.rpartition(".")[2])
        if self.signal_s is None:
            object.__setattr__(self, "signal_s", min(120, self.minutes * 30))
        for count in ("nodes", "ranks_per_node", "minutes", "signal_s"):
            if getattr(self, count) < 1:
                raise ValueError(f"{count}={getattr(self, count)}: give at least 1")
        if self.signal_s >= 60 * self.minutes:
            raise ValueError(
                f"signal_s={self.signal_s} is no less than the time limit of {60 * self.minutes} s: give less"
            )
        if not MODULE.fullmatch(self.module):
            raise ValueError(f"module={self.module!r}: give a dotted name, as after python -m")
        self._check_texts()

    def _check_texts(self):
        if "/" in self.name or self.name.strip() in ("", ".", ".."):
            raise ValueError(
                f"name={self.name!r} names a folder and a log file: give one without /, and not an empty one"
            )
        for what, text in {
            "name": self.name,
            "array": self.array,
            "dependency": self.dependency,
        }.items():
            if text is not None and not text.isprintable():
                raise ValueError(
                    f"{what}={text!r} goes on one line of the script: leave out line breaks and control characters"
                )
        if self.array is not None and not re.fullmatch(
            r"\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*(%\d+)?", self.array, re.ASCII
        ):
            raise ValueError(
                f"array={self.array!r}: give numbers, such as 0-3 or 1,5,9 or 0-15%4 (4 at a time)"
            )
        bad = next((name for name in self.env if not NAME.fullmatch(name)), None)
        if bad is not None:
            raise ValueError(
                f"env: {bad!r} is no name of a variable: letters, digits and _, no digit first"
            )
        if any("\0" in text for text in (self.recipe, *self.overrides, *self.env.values())):
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
        """Whether a second life goes on where the first one was stopped."""
        return self.trains and self.requeue

    @property
    def own_folder(self) -> bool:
        """Whether each job of it gets a folder of its own for its run, because no override names one."""
        return self.trains and self.config().train.out is None

    @property
    def log(self) -> str:
        """Name of the log file, as sbatch fills it in: name and job number (also for one job of an array)."""
        return "%x-%j.log"

    def arguments(self, out: str | None = None) -> list[str]:
        """The command line after `python -m MODULE`.

        Args:
            out: Folder of the run; left out if the overrides name one.

        Raises:
            ValueError: Unknown recipe, field or value.
        """
        given = [*([self.recipe] if self.recipe else []), *self.overrides]
        if not self.trains:
            return given
        config = self.config()
        if out is not None and config.train.out is None:
            given += ["--train.out", out]
        if self.resumes and not config.checkpoint.resume:
            given += ["--checkpoint.resume"]
        return given

    def config(self) -> Config:
        """The config that every rank gets.

        Raises:
            ValueError: Unknown recipe, field or value.
        """
        return _config([self.recipe, *self.overrides])

    def check(self) -> GridShape | None:
        """The grid of the job, once all that can be known before it is submitted fits together; None for another module.

        Raises:
            ValueError: Unknown recipe, field or value, or a grid that the ranks or the model do not allow.
        """
        if not self.trains:
            return None
        if self.array is not None and not self.own_folder:
            raise ValueError(
                "all jobs of the array would write into one folder: leave out train.out, each gets its own"
            )
        return _config(self.arguments("runs/any")).check(self.world_size)


def _config(arguments) -> Config:
    if not arguments[0] or {"-h", "--help"} & set(arguments):
        raise ValueError(
            f"{' '.join(arguments)!r} trains nothing: give a recipe, one of {', '.join(RECIPES)}, and no --help"
        )
    return parse(arguments)
