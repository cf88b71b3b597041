"""The command line of jobs: what to do, a recipe, where and how large, and fields of the recipe as for `labcode.train`."""

import contextlib
import difflib
import io
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from labcode.command import UsageError, in_frame
from labcode.files import write_atomically
from labcode.recipes import RECIPES
from labcode.slurm.lint.linter import lint
from labcode.slurm.lint.rules import RULES
from labcode.slurm.run import local
from labcode.slurm.run.client import Client, SlurmError
from labcode.slurm.run.handle import JobFailed, SlurmHandle
from labcode.slurm.run.submit import submit
from labcode.slurm.script.job import Job
from labcode.slurm.script.render import render
from labcode.slurm.script.site import Site, load

PROGRAM = "python -m labcode.slurm"
_USAGE = """usage: python -m labcode.slurm COMMAND ... [--site NAME]

  render RECIPE      print the batch script, or write it: --output train.sbatch
  lint   RECIPE      say what is wrong with a job's script; `lint SCRIPT.sbatch` reads any script, `lint --rules` lists all
  submit RECIPE      start the job, show its log, end with its state and the reason; Ctrl-C cancels it
  status [NUMBER]    one job, or the queue and the nodes
  cancel NUMBER      end a job

Of the job: --nodes N --ranks-per-node R --minutes M --name X, and more: python -m labcode.slurm submit --help
Of the recipe: --train.steps 20 --parallel.tp 2, as for python -m labcode.train"""


@dataclass(frozen=True)
class Options:
    """What the words after the recipe can say; whatever has a dot in its name is a field of the recipe."""

    site: str = "local"  # name of a profile in slurm/sites, or a path to one
    account: str | None = None  # in place of the profile's
    partition: str | None = None  # in place of the profile's
    qos: str | None = None  # in place of the profile's
    nodes: int = 1
    ranks_per_node: int | None = (
        None  # None: one for each GPU of the site's nodes; 2 where the profile has none
    )
    minutes: int = 10  # time limit
    name: str | None = None  # in the queue, of the log and of the run's folder; None: the recipe's
    module: str = "labcode.train"  # what each rank runs
    requeue: bool = True  # checkpoint before the time limit, then go on in a second life
    array: str | None = None  # such as 0-3
    dependency: str | None = None  # such as afterok:123
    nccl_debug: str | None = None  # INFO: the log shows who talks to whom over what
    signal_s: int | None = (
        None  # seconds before the time limit at which the checkpoint is asked for
    )
    output: Path | None = None  # render: write the script there
    rules: bool = False  # lint: list all rules
    keep: bool = False  # submit: an interrupt leaves the job running
    wait: bool = True  # submit: follow the job to its end
    here: bool = False  # submit: on this machine, although there is a cluster
    cluster: str | None = None  # which of the clusters of slurm/cluster on this machine

    def load_site(self) -> Site:
        """The profile, with what the command line says in place of its own."""
        changes = {name: getattr(self, name) for name in ("account", "partition", "qos")}
        return load(
            self.site, **{name: value for name, value in changes.items() if value is not None}
        )

    def job(self, recipe: str, overrides: Sequence[str]) -> Job:
        """The job for a recipe."""
        own = {field.name for field in fields(Job)}
        values = {
            field.name: getattr(self, field.name) for field in fields(self) if field.name in own
        }
        if self.ranks_per_node is None:
            values["ranks_per_node"] = self.load_site().gpus.per_node or 2
        given = {name: value for name, value in values.items() if value is not None}
        return Job(recipe, tuple(overrides), **given)


def main(args: Sequence[str]) -> int:
    """Run the program; returns 0, 1 for a failed job or script, 2 for what the user can mend, 130 after Ctrl-C."""
    if not args or args[0] in ("-h", "--help"):
        print(_USAGE)
        return 0
    try:
        command = COMMANDS.get(args[0])
        if command is None:
            raise UsageError(
                f"unknown command {args[0]!r}: {_close(args[0], COMMANDS)}there are {', '.join(COMMANDS)}"
            )
        target, options, overrides = parse(args[1:], args[0])
        return command(target, options, overrides)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        return 130
    except (ValueError, SlurmError, TimeoutError, OSError) as error:
        text = (
            f"{error.filename}: {error.strerror.lower()}"
            if isinstance(error, OSError) and error.filename
            else str(error)
        )
        print(f"error: {text}", file=sys.stderr, flush=True)
        return 2


def parse(args: Sequence[str], command: str = "submit") -> tuple[str | None, Options, list[str]]:
    """(recipe, script or number; options; fields of the recipe) for what was typed after the command.

    Raises:
        UsageError: An unknown option or a wrong value.
        SystemExit: With code 0, after `--help` has been printed.
    """
    import tyro

    target = args[0] if args and not args[0].startswith("-") else None
    rest = list(args[1:] if target is not None else args)
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            options, others = tyro.cli(
                Options, args=rest, prog=f"{PROGRAM} {command}", return_unknown_args=True
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UsageError(in_frame(box.getvalue())) from None
    known = [f"--{field.name.replace('_', '-')}" for field in fields(Options)]
    for word in others:
        if word.startswith("--") and "." not in word.partition("=")[0]:
            close = _close(word.partition("=")[0], known)
            raise UsageError(
                f"unknown option {word}: {close}there are {', '.join(known)}, and fields of the recipe"
            )
    if others and not others[0].startswith("-"):
        raise UsageError(
            f"what is {others[0]!r}? one recipe comes first, then options: {PROGRAM} {command} RECIPE --nodes 2"
        )
    return target, options, others


def _close(word, words):
    close = difflib.get_close_matches(word, list(words), n=1)
    return f"did you mean {close[0]}? " if close else ""


def _recipe(target) -> str:
    if target is None:
        raise UsageError(f"name a recipe: {', '.join(RECIPES)}")
    return target


def _render(target, options, overrides) -> int:
    text = render(options.job(_recipe(target), overrides), options.load_site())
    if options.output is None:
        print(text, end="")
    else:
        write_atomically(options.output, text.encode())
        print(f"wrote {options.output}")
    return 0


def _lint(target, options, overrides) -> int:
    if options.rules:
        for rule in RULES:
            print(
                f"{rule.number} {'warning' if rule.warning else 'error':7} {rule.message}\n    why: {rule.why}"
            )
        return 0
    site, job = options.load_site(), None
    if target is not None and target not in RECIPES:
        try:
            text = Path(target).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            raise UsageError(
                f"{target} is neither a script nor a recipe: there are {', '.join(RECIPES)}"
            ) from None
        if overrides:
            raise UsageError(
                f"{overrides[0]}: a script is read as it is, fields of a recipe go with a recipe"
            )
    else:
        job = options.job(_recipe(target), overrides)
        text = render(job, site)
    problems = lint(text, site, job)
    for problem in problems:
        print(f"{target}, {problem}")
    errors = sum(problem.severity == "error" for problem in problems)
    print(f"{errors} errors, {len(problems) - errors} warnings, {len(RULES)} rules")
    return 1 if errors else 0


def _submit(target, options, overrides) -> int:
    job, site = options.job(_recipe(target), overrides), options.load_site()
    client = None if options.here else Client.find(site.name, options.cluster)
    if options.cluster and client is None and not options.here:
        raise UsageError(
            f"there is no cluster {options.cluster!r}: slurm/cluster up 2 --name {options.cluster} starts it"
        )
    before = signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # as Ctrl-C: the job is not left behind
    try:
        handle = submit(
            job, site, keep=options.keep or not options.wait, client=client, here=options.here
        )
        if not options.wait:
            return 0
        try:
            handle.wait()
        except JobFailed:
            return 1  # its last line has been shown
        except KeyboardInterrupt:
            end = "goes on" if options.keep else "is cancelled"
            print(f"interrupted: job {handle.number} {end}", file=sys.stderr, flush=True)
            return 130
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def _handle(number, options):
    if number.startswith("here"):
        return local.find(number, Path(options.load_site().logs))
    return SlurmHandle(_cluster(options), number)


def _cluster(options) -> Client:
    client = Client.find(options.load_site().name, options.cluster)
    if client is None:
        raise SlurmError("there is no SLURM here: slurm/cluster up 2 starts one on this machine")
    return client


def _status(target, options, overrides) -> int:
    if target is not None:
        info = _handle(target, options).info()
        more = f", {info.restarts} restarts" if info.restarts else ""
        print(
            f"job {info.id} {info.name!r}: {info.state}{f' ({info.reason})' if info.reason else ''}{more}"
        )
        print(
            f"{info.run_time} of {info.time_limit} on {info.nodes or 'no nodes yet'}; log: {info.log}"
        )
        return 0
    client = _cluster(options)
    print(client.where)
    for group in client.nodes():
        about = f"{group.cpus} CPUs, {group.memory_mb} MB, {group.gres}, at most {group.time_limit}"
        print(
            f"  {group.partition:12} {group.count:4} nodes {group.state:10} {group.nodes}: {about}"
        )
    for job in client.queue():
        print(
            f"  {job.id:>8} {job.state:10} {job.run_time:>10} {job.user:10} {job.name} on {job.nodes}: {job.where}"
        )
    return 0


def _cancel(target, options, overrides) -> int:
    if target is None:
        raise UsageError(f"name the number of a job: {PROGRAM} cancel 17")
    handle = _handle(target, options)
    handle.cancel()
    print(f"job {target}: {handle.state}")
    return 0


COMMANDS = {
    "render": _render,
    "lint": _lint,
    "submit": _submit,
    "status": _status,
    "cancel": _cancel,
}
