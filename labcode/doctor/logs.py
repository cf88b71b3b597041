"""`python -m labcode.doctor job FILE...` and `nccl FILE...`: what logs say, for a person.

    python -m labcode.doctor job slurm-17.out runs/ranks/*.err
    python -m labcode.doctor nccl nccl.*.log
    kubectl logs trainer-0 | python -m labcode.doctor job -

`job` tells what failed first in any job, and what only followed; `nccl` which hosts and links a job
has, from what NCCL prints with NCCL_DEBUG=INFO, and then the same. The exit code is 1 if something
failed, 2 for a file that cannot be read, else 0.

Held by: tests/unit/test_job_log.py
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from labcode.doctor import nccl_log, nccl_story
from labcode.runtime.arguments import Parser
from labcode.runtime.files import print_out
from labcode.runtime.suggest import did_you_mean, meant
from labcode.slurm.log import story, tell

HELP = {
    "job": "what failed first in a job, and what only followed, from what it printed",
    "nccl": "hosts, links, transports and what failed, from NCCL's log (NCCL_DEBUG=INFO)",
}
BINARY_LOOK = 1 << 16


def main(command: str, arguments: Sequence[str]) -> int:
    """The command line behind `job` or `nccl`; returns the exit code.

    Args:
        command: Which of them.
        arguments: Arguments behind that word.
    """
    parser = Parser(prog=f"python -m labcode.doctor {command}", description=HELP[command])
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="log of any rank of one job; - reads a pipe"
    )
    try:
        options = parser.parse_args(arguments)
        files = read_files(options.files)
        told = _nccl(files) if command == "nccl" else []
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    found = story.read(files)
    if command == "job" or found.first is not None:
        told += tell.tell(found)
    print_out("\n".join(told))
    return 1 if found.first is not None else 0


def read_files(names: Sequence[str]) -> dict[str, str]:
    """{name: text} of files; the name "-" stands for what is piped in.

    Raises:
        ValueError: One is not there, is a folder, or no text; the message says which.
    """
    found = {}
    for name in names:
        if name == "-":
            found["standard input"] = _piped()
            continue
        path = Path(name)
        if path.is_dir():
            raise ValueError(f"{name} is a folder: give the files in it, such as {name}/*.err")
        try:
            content = path.read_bytes()
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            beside = [entry.name for entry in path.parent.glob("*") if entry.is_file()]
            near = [str(path.with_name(name)) for name in meant(path.name, beside)]
            raise ValueError(
                f"{name}: {reason}: {did_you_mean(near)}give the files that the job wrote"
            ) from None
        if b"\0" in content[:BINARY_LOOK]:
            raise ValueError(f"{name} is no text: give what the job printed, its stdout or stderr")
        found[name] = content.decode("utf-8", errors="replace")
    return found


def _piped() -> str:
    if sys.stdin.isatty():
        raise ValueError("- reads what is piped in, and nothing is: give the log's file")
    return sys.stdin.buffer.read().decode("utf-8", errors="replace")


def _nccl(files: dict[str, str]) -> list[str]:
    log = nccl_log.parse("\n".join(files.values()))
    if not log.communicators and not log.warnings and log.version is None:
        raise ValueError(
            f"no line of NCCL in {', '.join(files)}: run the job with NCCL_DEBUG=INFO, on GPUs "
            "(gloo writes no such log)"
        )
    return nccl_story.tell(log)
