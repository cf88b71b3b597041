"""One cluster as data: what its SLURM wants to be asked, and how a program is started there.

    slurm/sites/NAME.yaml      those that ship with the course; `load` takes the path of your own as well

A profile names only what differs from the defaults below. In `scratch`, `container`, `env` and `setup` a `$NAME` is a
variable of the cluster, which the job looks up when it runs; everything else is taken literally.
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from labcode.slurm.script import site_yaml as profile

SITES = Path(__file__).resolve().parents[1] / "sites"
SUFFIX = re.compile(r"[A-Za-z0-9.-]*")
MANAGED = (  # options that the other fields give
    *(
        "account",
        "partition",
        "qos",
        "reservation",
        "constraint",
        "mem",
        "exclusive",
        "mail-user",
        "mail-type",
    ),
    *(
        "nodes",
        "ntasks",
        "ntasks-per-node",
        "cpus-per-task",
        "gpus-per-node",
        "gres",
        "gpus-per-task",
        "time",
    ),
    *(
        "job-name",
        "output",
        "error",
        "open-mode",
        "signal",
        "requeue",
        "no-requeue",
        "array",
        "dependency",
    ),
)


@dataclass(frozen=True)
class Gpus:
    """The GPUs of a node, and how a job asks for them."""

    per_node: int = 0  # 0: a cluster of CPUs
    request: Literal["gpus-per-node", "gres", "gpus-per-task"] = "gpus-per-node"
    type: str | None = None  # named in the request, such as a100: --gpus-per-node=a100:4
    vendor: Literal["nvidia", "amd"] = (
        "nvidia"  # for amd a container brings ROCm along, or has --rocm in its options
    )

    def __post_init__(self):
        at_least(self, "per_node", 0)


@dataclass(frozen=True)
class Cpus:
    """The CPUs of a node as SLURM counts them, hardware threads where it counts those."""

    per_node: int | None = None
    per_rank: int | None = None  # None: an even share of the node for each GPU
    bind: Literal["cores", "threads", "sockets", "ldoms", "none"] | None = None  # srun --cpu-bind

    def __post_init__(self):
        at_least(self, "per_node", 1)
        at_least(self, "per_rank", 1)


@dataclass(frozen=True)
class Container:
    """What the ranks run in. The working folder and scratch are bound by themselves."""

    kind: Literal["none", "apptainer", "singularity", "pyxis", "shifter"] = "none"
    image: str | None = None
    binds: tuple[str, ...] = ()  # FOLDER or OUTSIDE:INSIDE
    options: tuple[str, ...] = ()  # more options of the program that starts the container

    def __post_init__(self):
        if (self.kind == "none") != (self.image is None):
            raise profile.Wrong(
                "image" if self.image else "kind",
                "an image needs a kind of container, and a kind an image",
            )
        printable(self, "image", "binds", "options")
        if any("," in bind for bind in self.binds):
            raise profile.Wrong("binds", "a comma parts one bind from the next: give a list")


@dataclass(frozen=True)
class Mail:
    """Who is told what by e-mail."""

    user: str
    events: tuple[
        Literal["BEGIN", "END", "FAIL", "REQUEUE", "TIME_LIMIT", "TIME_LIMIT_80", "ALL"], ...
    ] = ("END", "FAIL")

    def __post_init__(self):
        printable(self, "user")


@dataclass(frozen=True)
class Setting:
    """An environment variable, and why it is set: the script says so beside it."""

    value: str
    reason: str

    def __post_init__(self):
        printable(self, "value", "reason")


@dataclass(frozen=True)
class Site:
    """A cluster. All fields have defaults: an empty profile is a cluster of CPUs that wants to know nothing."""

    name: str = ""  # that of its file
    about: str = ""  # one line on what it is
    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    reservation: str | None = None
    constraint: str | None = None
    memory: str | None = None  # per node, as sbatch --mem takes it
    exclusive: bool = False  # ask for whole nodes
    gpus: Gpus = field(default_factory=Gpus)
    cpus: Cpus = field(default_factory=Cpus)
    max_minutes: int | None = None  # longest wall time of the partition and qos
    max_nodes: int | None = None  # most nodes of one job there
    launcher: Literal["torchrun", "srun"] = (
        "torchrun"  # srun starts one torchrun per node, or one task per rank
    )
    host_suffix: str = ""  # what the site adds to a node's name for its address on the fast network
    container: Container = field(default_factory=Container)
    modules: tuple[str, ...] = ()  # module load ...
    env: Mapping[str, Setting] = field(default_factory=dict)
    setup: tuple[
        str, ...
    ] = ()  # shell lines that run before the ranks, such as: source .venv/bin/activate
    python: str = "python"
    scratch: str = "runs"  # every run gets a folder of its own in it; all nodes must see it
    logs: str = "."  # folder of the logs; it must exist when the job is submitted
    mail: Mail | None = None
    directives: tuple[str, ...] = ()  # more options for sbatch, such as --licenses=scratch

    def __post_init__(self):
        printable(
            self,
            "account",
            "partition",
            "qos",
            "reservation",
            "constraint",
            "memory",
            "about",
            "modules",
            "env",
        )
        printable(self, "setup", "python", "scratch", "logs", "directives")
        at_least(self, "max_minutes", 1)
        at_least(self, "max_nodes", 1)
        for name in ("python", "scratch", "logs"):
            if not getattr(self, name):
                raise profile.Wrong(name, "is empty: name one, or leave the line out")
            if getattr(self, name).startswith("~"):
                raise profile.Wrong(
                    name, f"{getattr(self, name)!r}: quoted, a ~ is a plain character: write $HOME"
                )
        if "$" in self.logs:
            raise profile.Wrong(
                "logs",
                f"{self.logs!r}: sbatch opens the log before any variable is known: give a plain path",
            )
        if not SUFFIX.fullmatch(self.host_suffix):
            raise profile.Wrong(
                "host_suffix",
                f"{self.host_suffix!r} is no part of a host's name: letters, digits, - and .",
            )
        for option in self.directives:
            name = option.partition("=")[0].removeprefix("--")
            if not option.startswith("--") or " " in name or name in MANAGED:
                hint = (
                    f"the field for {name} says that" if name in MANAGED else "give --option=value"
                )
                raise profile.Wrong("directives", f"{option!r}: {hint}")

    @property
    def cpus_per_rank(self) -> int:
        """CPUs for each rank: as given, else the share of a GPU in its node, else 1."""
        share = (self.cpus.per_node or 1) // max(1, self.gpus.per_node) if self.gpus.per_node else 1
        return self.cpus.per_rank or max(1, share)


def names() -> list[str]:
    """The profiles that ship with the course."""
    return sorted(path.stem for path in SITES.glob("*.yaml"))


def load(name_or_path: str | Path, **changes) -> Site:
    """The profile of that name, or in that file.

    Args:
        name_or_path: "perlmutter", or a path that ends in .yaml or .yml.
        changes: Fields to set in place of those in the file, such as account="m1234_g".

    Raises:
        ValueError: There is no such profile, or it is wrong: "my.yaml, line 7: ...".
    """
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml"):
        path = SITES / f"{name_or_path}.yaml"
        if str(name_or_path) not in names():
            close = difflib.get_close_matches(str(name_or_path), names(), n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise ValueError(
                f"unknown site {str(name_or_path)!r}: {hint}there are {', '.join(names())}, or give a .yaml file"
            )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path}: cannot be read as a profile: {getattr(error, 'strerror', None) or error}"
        ) from None
    return profile.read(text, Site, path.name, {"name": path.stem, **changes})


def at_least(part, name, least):
    """Raises `Wrong` for a number that is too small."""
    value = getattr(part, name)
    if value is not None and value < least:
        raise profile.Wrong(name, f"{value}: give at least {least}")


def printable(part, *names):
    """Raises `Wrong` for text that does not fit on one line of a script."""
    for name in names:
        value = getattr(part, name)
        for text in [value] if isinstance(value, str) else value or ():
            if not text.isprintable():
                raise profile.Wrong(
                    name, f"{text!r} goes on one line: leave out line breaks and control characters"
                )
            if name == "env" and not profile.VARIABLE.fullmatch(text):
                raise profile.Wrong(
                    name,
                    f"{text!r} is no name of a variable: letters, digits and _, no digit first",
                )
