"""`python -m labcode.doctor`: is this installation right? One plain line for each check.

`job FILE...` and `nccl FILE...` tell what logs say: `labcode.doctor.logs`.

    right    packages        20 of 20 are there, as pyproject.toml asks
    warning  host name       vm does not resolve: Name or service not known: add it to /etc/hosts
    wrong    disk            runs cannot be written: Read-only file system: choose another folder

The exit code is 1 if anything is wrong, 2 for a command that cannot be understood, else 0.

Held by: tests/unit/test_doctor_installation.py
"""

import os
import platform
import socket
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from labcode.doctor import logs, machine, variables
from labcode.doctor.checked import RIGHT, WARNING, WRONG, Checked, wrong
from labcode.runtime import suggest
from labcode.runtime.arguments import Parser, check_no_command
from labcode.runtime.hardware import gpus_of_driver, usable_cores

PROGRAM = "python -m labcode.doctor"
COMMANDS = tuple(logs.HELP)


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code.

    Args:
        arguments: Arguments without the program's name; None: those of this process.
    """
    words = sys.argv[1:] if arguments is None else arguments
    command = words[0] if words and not words[0].startswith("-") else None
    if command in logs.HELP:
        return logs.main(command, words[1:])
    if command is not None:
        print(f"error: {_no_command(command)}", file=sys.stderr)
        return 2
    parser = Parser(
        prog=PROGRAM,
        description=(__doc__ or "").partition("\n")[0],
        epilog="job FILE...: what failed first; nccl FILE...: who talks to whom over what. "
        "Each has --help.",
    )
    parser.add_argument("--out", default="runs", help="where runs are to be written (runs)")
    parser.add_argument(
        "--no-ranks", action="store_true", help="start no processes that talk to each other"
    )
    try:
        if words:
            check_no_command(words[0], COMMANDS, PROGRAM)
        options = parser.parse_args(words)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    levels = Counter()
    for checked in examine(Path(options.out), os.environ, with_ranks=not options.no_ranks):
        print(checked, flush=True)
        levels[checked.level] += 1
    print(f"{levels[RIGHT]} right, {levels[WARNING]} with a warning, {levels[WRONG]} wrong")
    return 1 if levels[WRONG] else 0


def _no_command(word: str) -> str:
    """The one-line message for a first word that is no command."""
    path = Path(word)
    if word == "watch":
        return (
            "watch is for a loop of your own, `with doctor.watch(model, optimizer):`; a run is "
            "shown by tensorboard --logdir runs"
        )
    if word == "hang":
        return (
            "a run in which nothing moves says after a minute who waits for whom; "
            f"{PROGRAM} job FILE reads what any job has printed"
        )
    if os.path.isdir(path):  # pathlib raises where a name is too long
        return f"{word} is a folder: {PROGRAM} job FILE... reads what a job has printed"
    if os.path.isfile(path):
        return f"{word} is a file: {PROGRAM} job {word} says what failed first in it"
    if "/" in word:
        return f"{word} does not exist: {suggest.run_near(path)}"
    message = suggest.unknown("command", word, COMMANDS)
    return f"{message}; without one it checks this installation"


def examine(out: Path, env: Mapping[str, str], with_ranks: bool) -> Iterator[Checked]:
    """All checks of this machine, each finding as soon as it is known.

    Args:
        out: Folder of the runs.
        env: Environment variables.
        with_ranks: Whether two processes are started that talk to each other.
    """
    try:
        yield from _software(with_ranks)
    except ModuleNotFoundError as error:  # of a package that these checks need themselves
        yield wrong("packages", f"{error.name} is not installed", "make setup")
    cluster = machine.find_cluster()
    yield machine.check_slurm(cluster)
    yield machine.check_ports()
    yield machine.check_master_port(several_nodes=cluster is not None)
    yield machine.check_host_name(socket.gethostname(), several_nodes=cluster is not None)
    yield machine.check_shared_memory()
    yield machine.check_output(out)
    interfaces = [name for _, name in socket.if_nameindex()]
    cards = variables.infiniband_cards()
    yield from variables.check_variables(env, interfaces, len(usable_cores()), cards)


def _software(with_ranks: bool) -> Iterator[Checked]:
    from labcode.doctor import software

    wanted = software.wanted()
    yield software.check_python(platform.python_version(), wanted.python)
    yield software.check_packages(wanted.packages)
    yield software.check_extras(wanted.extras)
    torch_found = software.check_torch()
    yield torch_found
    if torch_found.level == WRONG:
        return
    import torch

    yield software.check_devices(
        gpus_of_driver(), torch.cuda.device_count(), torch.version.cuda is not None
    )
    if with_ranks:
        yield software.check_two_ranks()


if __name__ == "__main__":
    sys.exit(main())
