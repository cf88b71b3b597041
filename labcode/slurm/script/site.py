"""One cluster as data: what its SLURM wants to be asked, and how a program is started there.

    labcode/slurm/sites/NAME.yaml      those that ship with the course; `load` takes the path of
    your own as well

A profile names only what differs from the defaults below. In `scratch`, `container`, `env` and
`setup` a `$NAME` is a variable of the cluster, which the job looks up when it runs; everything else
is taken literally.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict

from labcode.runtime.suggest import unknown
from labcode.slurm.script.site_yaml import FieldError, read

SITES = Path(__file__).resolve().parents[1] / "sites"  # package data
VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
SUFFIX = re.compile(r"[A-Za-z0-9.-]*")
# options of sbatch that other fields of the profile or of the job give
_MANAGED = """
account array constraint cpus-per-task dependency error exclusive gpus-per-node gpus-per-task
gres job-name mail-type mail-user mem no-requeue nodes ntasks ntasks-per-node open-mode output
partition qos requeue reservation signal time
"""
MANAGED = frozenset(_MANAGED.split())

Event = Literal["BEGIN", "END", "FAIL", "REQUEUE", "TIME_LIMIT", "TIME_LIMIT_80", "ALL"]


_MASK = re.compile(r"0x[0-9a-fA-F]{1,64}")


@dataclass(frozen=True)
class Gpus:
    """The GPUs of a node, and how a job asks for them.

    Args:
        per_node: How many; 0 is a cluster of CPUs.
        request: The option of sbatch that asks for them.
        type: Named in the request, such as a100 in --gpus-per-node=a100:4.
        vendor: For amd a container brings ROCm along, or has --rocm in its options.
    """

    per_node: int = 0
    request: Literal["gpus-per-node", "gres", "gpus-per-task"] = "gpus-per-node"
    type: str | None = None
    vendor: Literal["nvidia", "amd"] = "nvidia"

    def __post_init__(self) -> None:
        check_at_least(self, "per_node", 0)
        check_one_line(self, "type")


@dataclass(frozen=True)
class Cpus:
    """The CPUs of a node as SLURM counts them: hardware threads where it counts those.

    Args:
        per_node: How many.
        per_rank: How many each rank gets; None: an even share of the node for each GPU.
        bind: The option --cpu-bind of srun.
        masks: In place of `bind`, where each rank is a task of srun: the cores of each local rank
            as a hexadecimal mask, on nodes whose cores nearest to GPU 0 are not the first ones.
    """

    per_node: int | None = None
    per_rank: int | None = None
    bind: Literal["cores", "threads", "sockets", "ldoms", "none"] | None = None
    masks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_at_least(self, "per_node", 1)
        check_at_least(self, "per_rank", 1)
        for mask in self.masks:
            if not _MASK.fullmatch(mask):
                raise FieldError("masks", f"{mask!r} is no mask of cores: write it as '0xfe00'")
        if self.masks and self.bind:
            raise FieldError("masks", "goes in place of bind: leave one of them out")


@dataclass(frozen=True)
class Container:
    """What the ranks run in. The working folder and scratch are bound without being named.

    Args:
        kind: The program that starts it.
        image: Image as that program takes it.
        binds: Further folders, FOLDER or OUTSIDE:INSIDE.
        options: More options of the program.
    """

    kind: Literal["none", "apptainer", "singularity", "pyxis", "shifter"] = "none"
    image: str | None = None
    binds: tuple[str, ...] = ()
    options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.kind == "none") != (self.image is None):
            name = "image" if self.image else "kind"
            raise FieldError(name, "an image needs a kind of container, and a kind an image")
        check_one_line(self, "image", "binds", "options")
        if any("," in bind for bind in self.binds):
            raise FieldError("binds", "a comma parts one bind from the next: give a list")


@dataclass(frozen=True)
class Mail:
    """Who is told what by e-mail."""

    user: str
    events: tuple[Event, ...] = ("END", "FAIL")

    def __post_init__(self) -> None:
        check_one_line(self, "user")


@dataclass(frozen=True)
class Setting:
    """An environment variable, and why it is set: the script says so beside it."""

    value: str
    reason: str

    def __post_init__(self) -> None:
        check_one_line(self, "value", "reason")


@dataclass(frozen=True)
class Site:
    """A cluster. An empty profile is a cluster of CPUs of which nothing else is known.

    Args:
        name: Name of the profile; by default that of its file.
        about: One line on what it is.
        account, partition, qos, reservation, constraint: The options of sbatch.
        memory: Per node, as sbatch --mem takes it.
        exclusive: Ask for whole nodes.
        gpus, cpus: Number of GPUs and CPUs of a node.
        max_minutes: Longest wall time of the partition and qos.
        max_nodes: Most nodes of one job there.
        max_attempts: How often a job may run that puts itself back into the queue, unless the job
            says otherwise: a fault that stops each attempt early would requeue it forever.
        launcher: srun starts one torchrun per node, or one task per rank.
        host_suffix: What the site adds to a node's name for its address on the fast network.
        container: What the ranks run in.
        modules: Names for `module load`.
        env: Environment variables of all jobs.
        setup: Shell lines that run before the ranks, such as: source .venv/bin/activate
        python: The interpreter.
        scratch: Every run gets a folder of its own in it; all nodes must see it.
        logs: Folder of the logs; it must exist when the job is submitted.
        mail: Who is told of a job's progress.
        directives: More options of sbatch, such as --licenses=scratch.
        notes: What somebody should know who submits here; the script and `submit` say it.
        planner: The cluster of `labcode.perf` that this is, or a .toml file: scripts then begin
            with a prediction of time and memory.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")  # of all sections too

    name: str = ""
    about: str = ""
    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    reservation: str | None = None
    constraint: str | None = None
    memory: str | None = None
    exclusive: bool = False
    gpus: Gpus = field(default_factory=Gpus)
    cpus: Cpus = field(default_factory=Cpus)
    max_minutes: int | None = None
    max_nodes: int | None = None
    max_attempts: int = 20
    launcher: Literal["torchrun", "srun"] = "torchrun"
    host_suffix: str = ""
    container: Container = field(default_factory=Container)
    modules: tuple[str, ...] = ()
    env: Mapping[str, Setting] = field(default_factory=dict)
    setup: tuple[str, ...] = ()
    python: str = "python"
    scratch: str = "runs"
    logs: str = "."
    mail: Mail | None = None
    directives: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    planner: str | None = None

    def __post_init__(self) -> None:
        check_at_least(self, "max_minutes", 1)
        check_at_least(self, "max_nodes", 1)
        check_at_least(self, "max_attempts", 1)
        check_one_line(self, "account", "partition", "qos", "reservation", "constraint", "memory")
        check_one_line(self, "about", "modules", "env", "setup", "python", "scratch", "logs")
        check_one_line(self, "directives", "notes", "planner")
        self._check_paths()
        self._check_names()
        self._check_directives()

    def _check_paths(self) -> None:
        for name in ("python", "scratch", "logs"):
            path = getattr(self, name)
            if not path:
                raise FieldError(name, "is empty: name one, or leave the line out")
            if path.startswith("~"):
                message = f"{path!r}: quoted, a ~ is a plain character: write $HOME"
                raise FieldError(name, message)
        if "$" in self.logs:
            message = "sbatch opens the log before any variable is known: give a plain path"
            raise FieldError("logs", f"{self.logs!r}: {message}")

    def _check_names(self) -> None:
        for name in self.env:
            if not VARIABLE.fullmatch(name):
                message = "is no name of a variable: letters, digits and _, no digit first"
                raise FieldError("env", f"{name!r} {message}")
        if not SUFFIX.fullmatch(self.host_suffix):
            message = "is no part of a host's name: letters, digits, - and ."
            raise FieldError("host_suffix", f"{self.host_suffix!r} {message}")

    def _check_directives(self) -> None:
        for option in self.directives:
            name = option.partition("=")[0].removeprefix("--")
            if name in MANAGED:
                raise FieldError("directives", f"{option!r}: the field for {name} says that")
            if not option.startswith("--") or " " in name:
                raise FieldError("directives", f"{option!r}: give --option=value")

    @property
    def cpus_per_rank(self) -> int:
        """CPUs for each rank: as given, else the share of a GPU in its node, else 1."""
        if self.cpus.per_rank:
            return self.cpus.per_rank
        if not self.cpus.per_node or not self.gpus.per_node:
            return 1
        return max(1, self.cpus.per_node // self.gpus.per_node)


def names() -> list[str]:
    """The profiles that ship with the course."""
    return sorted(path.stem for path in SITES.glob("*.yaml"))


def load(name_or_path: str | Path, **changes: Any) -> Site:
    """The profile of that name, or in that file.

    Args:
        name_or_path: "perlmutter", or a path that ends in .yaml or .yml.
        changes: Fields to set in place of those in the file, such as account="m1234_g".

    Raises:
        ValueError: There is no such profile, or it is wrong: "my.yaml, line 7: ...".
    """
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml"):
        if str(name_or_path) not in names():
            message = unknown("site", str(name_or_path), names())
            raise ValueError(f"{message}, or give a .yaml file")
        path = SITES / f"{name_or_path}.yaml"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{path}: cannot be read as a profile: {reason}") from None
    return read(text, Site, path.name, {"name": path.stem, **changes})


def check_at_least(part: object, name: str, least: int) -> None:
    """Raises `FieldError` for a number that is too small."""
    value = getattr(part, name)
    if value is not None and value < least:
        raise FieldError(name, f"{value}: give at least {least}")


def check_one_line(part: object, *names: str) -> None:
    """Raises `FieldError` for text that does not fit on one line of a script."""
    for name in names:
        value = getattr(part, name)
        texts: Iterable[str] = [value] if isinstance(value, str) else value or ()
        for text in texts:
            if not text.isprintable():
                message = "goes on one line: leave out line breaks and control characters"
                raise FieldError(name, f"{text!r} {message}")
