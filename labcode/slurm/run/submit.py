"""`submit(job, site)`: to SLURM where there is one, else to this machine, with the same answer.

from labcode.slurm.script.job import Job
from labcode.slurm.run.submit import submit

handle = submit(Job("gpt_tiny", ("--train.steps", "20"), nodes=2), "local")
handle.where                            # "SLURM cluster ..." or "this machine, no SLURM: ..."
handle.wait()                           # shows the log; raises JobFailed with the reason
"""

import contextlib
import dataclasses
import signal
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

from labcode.runtime.files import write_atomically
from labcode.slurm.lint.linter import lint
from labcode.slurm.run.client import Client
from labcode.slurm.run.handle import Handle, SlurmHandle
from labcode.slurm.run.local import start
from labcode.slurm.script.job import Job
from labcode.slurm.script.predict import refuse_out_of_memory
from labcode.slurm.script.render import render
from labcode.slurm.script.site import Site, load

SLACK_S = 600.0  # how much longer than its time limit a job may seem to run before `wait` gives up
HINT = "slurm/cluster up 2 starts one"


def submit(
    job: Job,
    site: Site | str = "local",
    *,
    keep: bool = False,
    echo: bool = True,
    client: Client | None = None,
    here: bool = False,
    force: bool = False,
) -> Handle:
    """Start a job and return at once; `.wait()` follows it to its end.

    The script and the log lie in the site's folder of logs, under the current folder.

    Args:
        job: What to run.
        site: Site to submit to, or the name of its profile.
        keep: Leave the job running when the wait for it is interrupted.
        echo: Say where the job went.
        client: The cluster; None looks for one, and runs the job on this machine if there is none.
        here: Run on this machine although there is a cluster.
        force: Submit a job although it is predicted to run out of memory.

    Raises:
        ValueError: The job is impossible, does not fit the site, or its script breaks a rule; or
            the site is "local" on a login node, where nobody should train by mistake.
        SlurmError: SLURM refused it; nothing is left in the queue.
    """
    site = load(site) if isinstance(site, str) else site
    if site.name == "local" and site.python == "python":  # its nodes share this machine's files
        site = dataclasses.replace(site, python=sys.executable)
    text = checked(job, site)
    if not force:
        refuse_out_of_memory(job, site)
    if here:
        client = None
    elif client is None:
        client = Client.find(site.name)
        if client is None:
            _refuse_login_node()
    folder = Path(site.logs)
    folder.mkdir(parents=True, exist_ok=True)
    if client is not None:
        handle: Handle = _to_slurm(client, text, folder, job, keep)
    else:
        handle = start(job, site, folder, keep)
    if echo:
        could_have = client is None and not here and site.name == "local"
        hint = f" ({HINT})" if could_have else ""
        print(f"job {handle.number} on {handle.where}{hint}; log: {handle.path}", flush=True)
        for note in site.notes:
            print(f"note: {note}", flush=True)
    return handle


def _refuse_login_node() -> None:
    """Raises ValueError on a login node: there the site "local" would train on it."""
    own = Client.own()
    if own is not None:
        way_out = "name its profile with --site; to run here all the same: --here"
        raise ValueError(f"this machine belongs to {own.where}: {way_out}")


def checked(job: Job, site: Site) -> str:
    """The script for a job, without faults.

    Raises:
        ValueError: The job is impossible, or a rule refuses the script.
    """
    text = render(job, site)
    errors = [problem for problem in lint(text, site, job) if problem.severity == "error"]
    if errors:
        first = errors[0]
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        found = f"line {first.line}: {first.rule}: {first.message}{more}"
        raise ValueError(f"the script is not submitted: {found}")
    return text


def _to_slurm(client: Client, text: str, folder: Path, job: Job, keep: bool) -> SlurmHandle:
    script = folder.absolute() / f"{job.name}-{uuid.uuid4().hex[:8]}.sbatch"
    write_atomically(script, text.encode())
    handle = None
    try:
        with _no_interrupt():  # between sbatch's yes and the job's number nobody could cancel it
            number = client.submit(script)
            handle = SlurmHandle(client, number, keep, job.minutes * 60 + SLACK_S)
    except BaseException:
        script.unlink(missing_ok=True)
        if handle and not keep:
            handle.cancel()
        raise
    handle.script = script.rename(script.with_name(f"{job.name}-{number}.sbatch"))
    return handle


@contextlib.contextmanager
def _no_interrupt() -> Iterator[None]:
    """Ctrl-C waits until the block is left."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: caught.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if caught.is_set():
        raise KeyboardInterrupt
