"""The command line of jobs: a command, a recipe, where and how large, and fields of the recipe.

Options of the job have no dot in their names, fields of the recipe have one. Both are read by
`labcode.runtime.command`, as for `python -m labcode.train`.
"""

import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from labcode.recipes import RECIPES
from labcode.runtime.arguments import UsageError, check_no_command
from labcode.runtime.command import HELP, field_table, read_changes
from labcode.runtime.files import print_out, write_atomically
from labcode.runtime.suggest import unknown
from labcode.runtime.units import plural
from labcode.slurm.lint.linter import lint, shellcheck
from labcode.slurm.lint.rules import RULES
from labcode.slurm.run import local
from labcode.slurm.run.client import Client, SlurmError
from labcode.slurm.run.handle import Handle, JobFailed, SlurmHandle
from labcode.slurm.run.submit import submit
from labcode.slurm.script.job import TRAIN, Job
from labcode.slurm.script.render import render
from labcode.slurm.script.site import Site, load

PROGRAM = "python -m labcode.slurm"
_USAGE = """\
usage: python -m labcode.slurm COMMAND ... [--site NAME]

  render RECIPE      print the batch script, or write it: --output train.sbatch
  lint   RECIPE      say what is wrong with a job's script
  lint   FILE        the same for any batch script, with --site for that cluster's limits;
                     `lint --rules` lists the rules
  submit RECIPE      start the job, show its log and how it ended; Ctrl-C cancels it
  status [NUMBER]    one job, or the queue and the nodes
  cancel NUMBER      end a job

Of the job: --nodes 2 --ranks-per-node 4 --minutes 30, and more: submit --help
Of the recipe: --train.steps 20 --parallel.tp 2, as for python -m labcode.train"""


@dataclass(frozen=True)
class Options:
    """What the words after the recipe can say, besides fields of the recipe."""

    site: str | None = (
        None  # name of a profile, or a path to one; without it local, for a FILE none
    )
    account: str | None = None  # in place of the profile's
    partition: str | None = None  # in place of the profile's
    qos: str | None = None  # in place of the profile's
    nodes: int = 1
    ranks_per_node: int | None = None  # None: one for each GPU of a node; 2 where it has none
    minutes: int = 10  # time limit
    name: str = ""  # in the queue, of the log and of the run's folder; without it the recipe's
    module: str = TRAIN  # what each rank runs
    requeue: bool = True  # checkpoint before the time limit, then resume in a second attempt
    array: str | None = None  # such as 0-3
    dependency: str | None = None  # such as afterok:123
    nccl_debug: str | None = None  # INFO: the log shows who talks to whom over what
    signal_s: int | None = None  # checkpoint this many seconds before the time limit
    max_attempts: int | None = None  # how often it may run if it is requeued; without it the site's
    max_restarts: int = 0  # how often torchrun may start the ranks again after one has died
    output: str | None = None  # render: write the script there
    rules: bool = False  # lint: list all rules
    keep: bool = False  # submit: an interrupt leaves the job running
    wait: bool = True  # submit: follow the job to its end
    force: bool = False  # submit: although it is predicted to run out of memory
    here: bool = False  # submit: on this machine, although there is a cluster
    cluster: str | None = None  # which of the clusters of slurm/cluster on this machine

    def load_site(self) -> Site:
        """The profile, with what the command line says in place of its own."""
        return load(self.site or "local", **self._given(("account", "partition", "qos")))

    def job(self, recipe: str, overrides: Sequence[str]) -> Job:
        """The job for a recipe."""
        given = self._given(field.name for field in fields(Job))
        if self.ranks_per_node is None:
            given["ranks_per_node"] = self.load_site().gpus.per_node or 2
        return Job(recipe, tuple(overrides), **given)

    def _given(self, names: Iterable[str]) -> dict:
        """The options of these names that have a value."""
        values = {name: getattr(self, name, None) for name in names}
        return {name: value for name, value in values.items() if value is not None}


def main(args: Sequence[str]) -> int:
    """Run the program.

    Returns:
        0; 1 for a failed job or script, 2 for a user error, 130 after Ctrl-C.
    """
    if not args or args[0] in HELP:
        print_out(_USAGE)
        return 0
    try:
        if args[0] not in COMMANDS:
            _refuse_command(args)
        target, options, overrides = parse(args[1:], args[0])
        return COMMANDS[args[0]](target, options, overrides)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        return 130
    except (ValueError, SlurmError, TimeoutError, OSError) as error:
        text = str(error)
        if isinstance(error, OSError) and error.filename and error.strerror:
            text = f"{error.filename}: {error.strerror.lower()}"
        print(f"error: {text}", file=sys.stderr, flush=True)
        return 2


def parse(args: Sequence[str], command: str = "submit") -> tuple[str | None, Options, list[str]]:
    """(recipe, script or number; options; fields of the recipe) for the words after the command.

    Raises:
        UsageError: An unknown option or a wrong value.
        SystemExit: With code 0, after `--help` has been printed.
    """
    if any(word in HELP for word in args):
        print_out(_options_help(command))
        raise SystemExit(0)
    target = None
    words = list(args)
    if words and not words[0].startswith("-"):
        target = words.pop(0)
    for word in words:
        if word in SHORT_OF_SBATCH:
            meant = SHORT_OF_SBATCH[word]
            raise UsageError(f"{word} is an option of sbatch: here it is {meant}")
    if words and not words[0].startswith("--"):
        way_out = f"one recipe comes first, then options: {PROGRAM} {command} RECIPE --nodes 2"
        if command == "lint" and target is not None and Path(target).is_file():
            way_out = f"one script at a time, then options: {PROGRAM} lint {target}"
        raise UsageError(f"what is {words[0]!r}? {way_out}")
    own: list[str] = []
    overrides: list[str] = []
    into = own
    for word in words:
        if word.startswith("--"):
            name = word.partition("=")[0]
            into = overrides if "." in name else own
            if into is own:
                _check_name(name)
        into.append(word)
    changes = read_changes(Options(), own)
    return target, Options(**changes), overrides  # pyright: ignore[reportArgumentType]


COMMANDS_OF_SLURM = {
    "sbatch": "submit",
    "srun": "submit",
    "run": "submit",
    "squeue": "status",
    "sinfo": "status",
    "queue": "status",
    "scancel": "cancel",
    "check": "lint",
}


def _refuse_command(args: Sequence[str]) -> None:
    """Raises UsageError for a first word that is no command, with the one that is meant."""
    first = args[0]
    check_no_command(first, COMMANDS, PROGRAM)
    if first in RECIPES:
        raise UsageError(f"a command comes before {first}: {PROGRAM} submit {' '.join(args)}")
    raise UsageError(unknown("command", first, COMMANDS, instead=COMMANDS_OF_SLURM.get(first)))


WORDS_OF_SBATCH = {
    "--time": "--minutes",
    "--gpus": "--ranks-per-node",
    "--gpus-per-node": "--ranks-per-node",
    "--ntasks-per-node": "--ranks-per-node",
    "--job-name": "--name",
}
SHORT_OF_SBATCH = {
    "-A": "--account",
    "-J": "--name",
    "-N": "--nodes",
    "-a": "--array",
    "-d": "--dependency",
    "-p": "--partition",
    "-q": "--qos",
    "-t": "--minutes",
}


def _check_name(name: str) -> None:
    """Raises UsageError for an option that does not exist."""
    known = [_dashed(field.name) for field in fields(Options)]
    flags = [_dashed(f"no_{field.name}") for field in fields(Options) if field.type is bool]
    if name.replace("_", "-") not in (*known, *flags):
        here = WORDS_OF_SBATCH.get(name)
        all_in = f"{PROGRAM} submit --help"
        raise UsageError(unknown("option", name, known, quoted=False, instead=here, all_in=all_in))


def _dashed(name: str) -> str:
    return "--" + name.replace("_", "-")


def _options_help(command: str) -> str:
    lines = [f"usage: {PROGRAM} {command} RECIPE [--option value ...] [--section.field value ...]"]
    lines += ["", "A flag is switched on by its name alone and off by --no-flag.", ""]
    table = "\n".join(field_table(Options()))
    lines.append(re.sub(r"--\w+", lambda option: _dashed(option[0].removeprefix("--")), table))
    lines += ["", "Fields of a recipe: python -m labcode.train RECIPE --help"]
    return "\n".join(lines)


def _recipe(target: str | None) -> str:
    if target is None:
        raise UsageError(f"name a recipe: {', '.join(RECIPES)}")
    if target not in RECIPES and os.path.isfile(target):
        raise UsageError(
            f"{target} is a script, and this takes a recipe: `sbatch {target}` submits it, "
            f"`{PROGRAM} lint {target}` reads it"
        )
    return target


# ------------------------------------------------------------------------------------ the commands


def _render(target: str | None, options: Options, overrides: Sequence[str]) -> int:
    text = render(options.job(_recipe(target), overrides), options.load_site())
    if options.output is None:
        print(text, end="")
    else:
        write_atomically(Path(options.output), text.encode())
        print(f"wrote {options.output}")
    return 0


def _lint(target: str | None, options: Options, overrides: Sequence[str]) -> int:
    if options.rules:
        for rule in RULES:
            severity = "warning" if rule.warning else "error"
            print(f"{rule.number} {severity:7} {rule.message}\n    why: {rule.why}")
        return 0
    if target is None:
        raise UsageError(f"name a script, or a recipe: {', '.join(RECIPES)}")
    if target not in RECIPES:
        text = _script(target)
        if overrides:
            rule = "a script is read as it is, fields of a recipe go with a recipe"
            raise UsageError(f"{overrides[0]}: {rule}")
        # a stranger's script is for a cluster of which nothing is known, unless it is named
        site = options.load_site() if options.site else None
        problems = lint(text, site, folder=Path(target).parent)
        problems += shellcheck(target)
    else:
        job = options.job(target, overrides)
        site = options.load_site()
        problems = lint(render(job, site), site, job)
    for problem in problems:
        print(f"{target}, {problem}")
    errors = [problem for problem in problems if problem.severity == "error"]
    found = f"{plural(len(errors), 'error')}, {plural(len(problems) - len(errors), 'warning')}"
    known = f", site {options.site}" if options.site else ""
    print(f"{found}, {len(RULES)} rules{known}")
    return 1 if errors else 0


def _script(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except IsADirectoryError:
        raise UsageError(f"{path} is a folder: name the script in it") from None
    except FileNotFoundError:
        known = ", ".join(RECIPES)
        message = f"{path} is neither a file here nor a recipe: the recipes are {known}"
        raise UsageError(message) from None


def _submit(target: str | None, options: Options, overrides: Sequence[str]) -> int:
    job = options.job(_recipe(target), overrides)
    site = options.load_site()
    client = None if options.here else Client.find(site.name, options.cluster)
    if options.cluster and client is None and not options.here:
        way_out = f"slurm/cluster up 2 --name {options.cluster} starts it"
        raise UsageError(f"there is no cluster {options.cluster!r}: {way_out}")
    # SIGTERM does what Ctrl-C does, so that the job is not left behind
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        keep = options.keep or not options.wait
        handle = submit(job, site, keep=keep, client=client, here=options.here, force=options.force)
        return _wait(handle) if options.wait else 0
    finally:
        signal.signal(signal.SIGTERM, before)


def _wait(handle: Handle) -> int:
    try:
        handle.wait()
    except JobFailed:
        return 1  # its last line has been shown
    except KeyboardInterrupt:
        end = "keeps running" if handle.keep else "is cancelled"
        print(f"interrupted: job {handle.number} {end}", file=sys.stderr, flush=True)
        return 130
    return 0


def _status(target: str | None, options: Options, overrides: Sequence[str]) -> int:
    if target is None:
        _show_cluster(_cluster(options))
    else:
        _show_job(_handle(target, options))
    return 0


def _show_job(handle: Handle) -> None:
    info = handle.info()
    reason = f" ({info.reason})" if info.reason else ""
    restarts = f", {plural(info.restarts, 'restart')}" if info.restarts else ""
    where = info.nodes or "no nodes yet"
    print(f"job {info.id} {info.name!r}: {info.state}{reason}{restarts}")
    print(f"{info.run_time} of {info.time_limit} on {where}; log: {info.log}")


def _show_cluster(client: Client) -> None:
    print(client.where)
    for group in client.nodes():
        nodes = f"{group.partition:12} {group.count:4} nodes {group.state:10} {group.nodes}"
        each = f"{group.cpus} CPUs, {group.memory_mb} MB, {group.gres}"
        print(f"  {nodes}: {each}, at most {group.time_limit}")
    for job in client.queue():
        about = f"{job.id:>8} {job.state:10} {job.run_time:>10} {job.user:10} {job.name}"
        print(f"  {about} on {job.nodes}: {job.where}")


def _cancel(target: str | None, options: Options, overrides: Sequence[str]) -> int:
    if target is None:
        raise UsageError(f"name the number of a job: {PROGRAM} cancel 17")
    handle = _handle(target, options)
    handle.cancel()
    print(f"job {target}: {handle.state}")
    return 0


def _handle(number: str, options: Options) -> Handle:
    """The job of that number; those of this machine begin with "here"."""
    if not number.startswith("here") and not number[:1].isdigit():
        raise UsageError(f"{number!r} is no number of a job: `{PROGRAM} status` lists the jobs")
    if number.startswith("here"):
        return local.find(number, Path(options.load_site().logs))
    return SlurmHandle(_cluster(options), number)


def _cluster(options: Options) -> Client:
    client = Client.find(options.load_site().name, options.cluster)
    if client is None:
        raise SlurmError(_no_cluster(options.cluster))
    return client


def _no_cluster(name: str | None) -> str:
    """That there is no cluster, and which ones there are instead."""
    from labcode.minislurm import names_up

    up = names_up()
    if up:
        wanted = repr(name) if name else "'default'"
        return f"no cluster {wanted} is up here: choose {', '.join(up)} with --cluster"
    return "there is no SLURM here: slurm/cluster up 2 starts one on this machine"


COMMANDS: dict[str, Callable[[str | None, Options, Sequence[str]], int]] = {
    "render": _render,
    "lint": _lint,
    "submit": _submit,
    "status": _status,
    "cancel": _cancel,
}
