"""`Spec`: what a cluster looks like to SLURM and to its users."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

NETWORK = "10.77.0"
MAX_NODES = 64
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
_LIMITS = {
    "nodes": (1, MAX_NODES),
    "cpus": (1, 4096),
    "memory_mb": (1, 10**8),
    "gpus": (0, 64),
}


@dataclass(frozen=True)
class Spec:
    """The cluster to emulate; all of its nodes are the same.

    Args:
        nodes: Number of nodes: n1, n2, ...
        cpus: CPUs of a node, as SLURM counts them; may exceed the machine's.
        memory_mb: Memory of a node in MiB, as SLURM counts it.
        gpus: Fake GPUs of a node.
        gpu_type: What `--gres=gpu:TYPE:N` asks for.
        partitions: Options of each partition as in slurm.conf; the first partition is the default.
            Of the options that limit who may submit, AllowAccounts and AllowQos are enforced.
        features: What `--constraint` may ask for.
        accounts: Accounts that `--account` may name; None leaves it unchecked.
        qos: What `--qos` may name; None leaves it unchecked.
        settings: More lines of slurm.conf, such as {"Licenses": "scratch:10"}.
        cgroup: Lines of cgroup.conf, for a cluster with ProctrackType=proctrack/cgroup; none means
            that SLURM does without cgroups. All such clusters of a machine share its cgroups, so
            have one at a time.

    Raises:
        ValueError: A count or a name is impossible.
    """

    nodes: int = 2
    cpus: int = 4
    memory_mb: int = 16_000
    gpus: int = 2
    gpu_type: str | None = None
    partitions: Mapping[str, Mapping[str, object]] = field(default_factory=lambda: {"debug": {}})
    features: tuple[str, ...] = ()
    accounts: tuple[str, ...] | None = None
    qos: tuple[str, ...] | None = None
    settings: Mapping[str, object] = field(default_factory=dict)
    cgroup: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._check_counts()
        self._check_names()
        self._check_settings()

    def _check_counts(self) -> None:
        for name, (low, high) in _LIMITS.items():
            value = getattr(self, name)
            if not isinstance(value, int) or not low <= value <= high:
                raise ValueError(f"{name}={value!r}: give a whole number from {low} to {high}")

    def _check_names(self) -> None:
        words = [*self.partitions, *self.features, *(self.accounts or ()), *(self.qos or ())]
        if self.gpu_type is not None:
            words.append(self.gpu_type)
        for word in words:
            if not _WORD.fullmatch(str(word)):
                raise ValueError(f"{word!r} is no name for SLURM: use letters, digits and _ . + -")
        if not self.partitions:
            raise ValueError(
                "partitions is empty: a cluster needs one at least, such as {'debug': {}}"
            )

    def _check_settings(self) -> None:
        # One line each: a value with a line break could smuggle in any other setting.
        for options in (self.settings, self.cgroup, *self.partitions.values()):
            for name, value in options.items():
                if not _WORD.fullmatch(str(name)) or "\n" in str(value):
                    raise ValueError(
                        f"{name!r}={value!r} is no setting of SLURM: one name, one line"
                    )

    @classmethod
    def of(cls, **given: Any) -> "Spec":
        """A spec from what was given: None means the default, and a list may stand for a tuple."""
        fields = {}
        for name, value in given.items():
            if isinstance(value, list):
                fields[name] = tuple(value)
            elif value is not None:
                fields[name] = value
        return cls(**fields)

    @classmethod
    def read(cls, path: Path) -> "Spec":
        """The spec whose `text()` is in a file."""
        return cls.of(**json.loads(path.read_text()))

    def text(self) -> str:
        """The spec as JSON, the same for equal specs."""
        return json.dumps(asdict(self), indent=1)

    def names(self) -> list[str]:
        """The hostnames of the nodes."""
        return [name for name, _ in self._nodes()]

    def addresses(self) -> dict[str, str]:
        """IP address of each host, the head first."""
        return {"head": f"{NETWORK}.1", **dict(self._nodes())}

    def _nodes(self) -> Iterator[tuple[str, str]]:
        for number in range(1, self.nodes + 1):
            yield f"n{number}", f"{NETWORK}.{10 + number}"
