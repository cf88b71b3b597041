"""What a batch script starts: by srun, by another launcher, or on the first node alone."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from labcode.slurm.lint.options import SRUN
from labcode.slurm.lint.shell import LATER, Shell, Simple

_OPTIONS_BY_NAME = re.compile(r"(?i)args|arg$|opts|options|flags|srun|resume|params|extra")

# commands that start the rest of their words
_IN_FRONT = {"exec", "nohup", "nice", "time", "command", "env", "stdbuf", "numactl", "taskset"}
_IN_FRONT |= {"singularity", "apptainer", "shifter", "enroot", "podman-hpc", "nsys", "ncu", "uv"}
_IN_FRONT |= {"conda", "mamba", "micromamba", "poetry", "pixi", "pipenv", "timeout", "clear"}
_OTHER_LAUNCHERS = {"mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prun", "ibrun", "aprun"}
_OTHER_LAUNCHERS |= {"horovodrun", "jsrun", "charmrun", "ssh", "pdsh", "clush", "parallel-ssh"}
_OTHER_LAUNCHERS |= {"pssh", "parallel", "prrte", "dsh", "ray", "submitit", "blaunch"}
_QUIET = {"echo", "printf", "[", "[[", "test", "which", "type", "grep", "cat", "sbatch", "man"}

TORCHRUN = r"(?:^|[\s/;])(?:torchrun|torch\.distributed\.(?:run|launch))(?=\s|$)"
ACCELERATE = r"(?:^|[\s/;])(?:accelerate\s+launch|accelerate-launch|accelerate\.commands\.launch)\b"
DEEPSPEED = r"(?:^|[\s/;])(?:deepspeed|deepspeed\.launcher\.(?:runner|launch))(?=\s)"
_PYTHON = r"(?:^|[\s/;])python[\d.]*\s+(?:-[uOBIsE]+\s+)*(?:-m\s+[\w.]+|[^\s-]\S*\.py\b|\$\S+)"
_OTHER_PROGRAMS = (
    r"(?:^|[\s/;])(?:composer|lightning|litgpt|fairseq-train|fairseq-hydra-train|vllm\s+serve)\s"
    r"|^\S+\s+(?:train|pretrain|finetune|fit)(?=\s|$)"
)
_SCRIPT = r"^(?:(?:/\S*/)?(?:bash|sh)\s+(?:-\w+\s+)*)?[^\s;]+\.(?:sh|bash|slurm)(?![^\s;])"
_RANKS = "|".join((TORCHRUN, ACCELERATE, DEEPSPEED, _PYTHON, _OTHER_PROGRAMS, _SCRIPT))
# python programs that prepare or look, and are no training
_OTHER_MODULES = r"-m\s+(?:pip|venv|ensurepip|zipfile|http|json|wandb|torch\.utils\.collect_env)\b"
_OTHER_FILES = (
    "download",
    "convert",
    "install",
    "setup",
    "prepare",
    "preprocess",
    "tokeni",  # tokenize and tokenise
    "build",
    "clean",
    "merge",
    "plot",
    "stage",
    "copy",
    "env",
    "activate",
    "monitor",
)
_AROUND = rf"{_OTHER_MODULES}|(?:{'|'.join(_OTHER_FILES)})\w*\.(?:py|sh|bash)\b"


@dataclass(frozen=True)
class Launch:
    """One command of the script that starts something.

    Args:
        line: Number of its line in the script.
        text: The whole command as it is written.
        order: Place among the simple commands of the script.
        by: "srun", another launcher such as "mpirun", or "" for the batch script itself.
        options: Options of srun, in their long form: {"ntasks": "2"}.
        unknown: Whether srun has options in a variable that nobody knows.
        program: What is started, variables filled in, with what a `bash -c` in it starts.
        end: What follows the command: "&", "|" and so on.
    """

    line: int
    text: str
    order: int
    by: str
    options: dict[str, str]
    unknown: bool
    program: str
    end: str

    def has(self, pattern: str) -> bool:
        """Whether the regular expression is found in what is started."""
        return re.search(pattern, self.program) is not None

    @cached_property
    def is_agent(self) -> bool:
        """Whether it starts a launcher that starts the ranks of a node: torchrun or a relative."""
        return self.has("|".join((TORCHRUN, ACCELERATE, DEEPSPEED)))

    @cached_property
    def trains(self) -> bool:
        """Whether it starts ranks, and does not copy files or ask for the host's name."""
        return any(starts_ranks(part) for part in self.program.split("; "))

    def said(self, name: str) -> str | None:
        """The value of an option of torchrun or its relatives, `--nnodes=2`; None without it.

        Args:
            name: "nnodes", or "nproc_per_node", written with `-` as well.
        """
        pattern = name.replace("_", "[-_]")
        found = re.findall(rf"(?<!\S)--{pattern}(?:=|\s+)(\S+)", self.program)
        return found[-1] if found else None

    @property
    def has_unknown_words(self) -> bool:
        """Whether some of its words stand in a variable that nobody knows, as in `$TORCH_ARGS`."""
        names = re.findall(rf"(?<!\S)[${LATER}]\{{?(\w+)(?:\[[@*]\])?\}}?(?!\S)", self.program)
        if any(_OPTIONS_BY_NAME.search(name) for name in names):
            return True
        # the words of the script's own command line, in front of the program
        return re.search(rf"(?<!\S)[${LATER}][@*](?!\S).*\.py", self.program) is not None


def starts_ranks(program: str) -> bool:
    """Whether one simple command starts ranks."""
    if re.search("|".join((TORCHRUN, ACCELERATE, DEEPSPEED)), program):
        return True
    return bool(re.search(_RANKS, program)) and not re.search(_AROUND, program)


def launches(commands: Sequence[tuple[int, str, str]]) -> list[Launch]:
    """What the commands of a script start, in order.

    Args:
        commands: (line, text for messages, source) of each.
    """
    shell = Shell()
    order = 0
    found = []
    for line, text, source in commands:
        for simple in shell.read(source):
            order += 1
            found += _of_simple(simple, shell, line, text, order)
    return found


def _of_simple(simple: Simple, shell: Shell, line: int, text: str, order: int) -> Iterator[Launch]:
    words = list(simple.words)
    if not words or _base(words[0]) in _QUIET:
        return
    if words[0] == "eval":
        for inner in shell.copy().read(" ".join(words[1:])):
            yield from _of_simple(inner, shell, line, text, order)
        return
    start = _launcher(words)
    by = _base(words[start]) if start is not None else ""
    options: dict[str, str] = {}
    unknown = False
    if start is not None:
        words = words[start + 1 :]
    if by == "srun":
        options, unknown, words = _srun(words)
    program = _started(words, shell)
    yield Launch(line, text, order, by, options, unknown, program, simple.end)


def _base(word: str) -> str:
    return word.rpartition("/")[2]


def _launcher(words: Sequence[str]) -> int | None:
    """Where srun or a relative stands, behind words such as `exec`; None without one."""
    for at, word in enumerate(words):
        base = _base(word)
        if base == "srun" or base in _OTHER_LAUNCHERS:
            return at
        passed = base in _IN_FRONT or word.startswith("-") or word.isdigit() or "=" in word
        if not passed:
            return None
    return None


def _srun(words: list[str]) -> tuple[dict[str, str], bool, list[str]]:
    """(Options, whether some are unknown, the rest) of what stands behind `srun`."""
    options: dict[str, str] = {}
    unknown = False
    while words:
        if words[0].startswith("-") and len(words[0]) > 1:
            found, words = SRUN.take(words)
            options |= dict(found)
        elif re.match(r"\$\{?\w*", words[0]) and _are_options(words[0], words[1:]):
            unknown = True
            words = words[1:]
        else:
            break
    return options, unknown, words


def _are_options(word: str, rest: Sequence[str]) -> bool:
    """Whether a variable of unknown value behind srun holds options, and not the program."""
    return bool(_OPTIONS_BY_NAME.search(word)) or bool(rest and rest[0].startswith("-"))


def _started(words: Sequence[str], shell: Shell) -> str:
    """The words as one text; in place of a `bash -c "..."` what it starts."""
    for at, word in enumerate(words[:-1]):
        if _base(word) not in ("bash", "sh", "zsh", "dash"):
            continue
        to_read = at + 1
        while to_read < len(words) - 1 and re.fullmatch(r"-[a-z]*", words[to_read]):
            if "c" in words[to_read]:
                return _inner(words, at, to_read + 1, shell)
            to_read += 1
    return " ".join(words)


def _inner(words: Sequence[str], at: int, text: int, shell: Shell) -> str:
    inner = [" ".join(simple.words) for simple in shell.read_later(words[text]) if simple.words]
    return " ".join((*words[:at], "; ".join(inner), *words[text + 1 :])).strip()
