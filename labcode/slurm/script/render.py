"""A job on a site as a batch script that a person can read: `render(job, site) -> str`.

What decides is here, as tables of options; how it reads is in `templates/`. Nothing reaches the
shell unquoted (`quote.py`): what comes from the job is taken literally, in what comes from the site
a `$NAME` is looked up by the cluster.
"""

import textwrap
from collections.abc import Sequence
from pathlib import Path

import jinja2

from labcode.runtime.units import plural
from labcode.slurm.script.job import Job
from labcode.slurm.script.predict import header
from labcode.slurm.script.quote import expanded, for_sbatch, inside, literal
from labcode.slurm.script.site import Container, Gpus, Site
from labcode.topology import GridShape

COLUMN = 40  # where comments begin
WIDTH = 88  # of comments that fill their line

Row = tuple[str, str | int | bool | None, str]  # option of sbatch, value, comment


def commented(line: str, comment: str) -> str:
    """The line with a comment beside it, if there is one."""
    return f"{line:{COLUMN}} # {comment}" if comment else line


_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    autoescape=False,  # bash, not HTML: each value is quoted here
)
_TEMPLATES.filters["commented"] = commented
_TEMPLATES.filters["literal"] = literal
_TEMPLATES.filters["expanded"] = expanded


def render(job: Job, site: Site) -> str:
    """The batch script.

    Args:
        job: What to run; it is checked first.
        site: Site that the script is for.

    Raises:
        ValueError: The job is impossible, or does not fit the site.
    """
    _check_fits(job, site)  # first: other changes would not help
    shape = job.check()
    # one job of an array may have the number of the whole array, and scancel would take all of it
    this_job = "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" if job.array else "$SLURM_JOB_ID"
    settings = {name: setting for name, setting in site.env.items() if name not in job.env}
    return _TEMPLATES.get_template("job.sh.j2").render(
        job=job,
        site=site,
        title=_title(job, shape),
        predicted=_as_comments(header(job, site), ""),
        notes=_as_comments(site.notes),
        directives=_directives(job, site),
        settings=settings,
        sets_threads="OMP_NUM_THREADS" not in {*site.env, *job.env},
        out=inside(site.scratch, "$SLURM_JOB_NAME-$SLURM_JOB_ID"),
        torchrun=site.launcher == "torchrun",
        this_job=this_job,
        hand_down=_continued(_hand_down(site)),
        max_attempts=job.max_attempts or site.max_attempts,
        command=_continued(_command(job, site)),
    )


def _check_fits(job: Job, site: Site) -> None:
    """Raises ValueError for a job that the site refuses whatever else it says."""
    limits = (
        ("minutes", job.minutes, "max_minutes", site.max_minutes),
        ("nodes", job.nodes, "max_nodes", site.max_nodes),
        ("ranks_per_node", job.ranks_per_node, "gpus.per_node", site.gpus.per_node or None),
    )
    for name, asked, limit, most in limits:
        if most is not None and asked > most:
            found = f"{name}={asked} is more than {limit}={most} of {site.name}"
            # who names no site has this machine
            other = ", or name your cluster: --site perlmutter" if site.name == "local" else ""
            raise ValueError(f"{found}: ask for less{other}")
    if job.max_restarts and site.launcher != "torchrun":
        found = f"max_restarts={job.max_restarts}, but on {site.name} srun starts the ranks"
        raise ValueError(f"{found}, and starts none again: leave it out, or use launcher: torchrun")
    cpus = site.cpus_per_rank * job.ranks_per_node
    if site.cpus.per_node and cpus > site.cpus.per_node:
        asked = f"{job.ranks_per_node} ranks x {site.cpus_per_rank} CPUs = {cpus}"
        has = f"the {site.cpus.per_node} CPUs of a node of {site.name}"
        raise ValueError(f"{asked} are more than {has}: change ranks_per_node or cpus.per_rank")


def _as_comments(notes: Sequence[str], first_word: str = "Note: ") -> list[str]:
    """Lines of comments that fit the page."""
    lines = []
    for note in notes:
        lines += textwrap.wrap(
            note,
            WIDTH,
            initial_indent=f"# {first_word}",
            subsequent_indent="# ",
            break_on_hyphens=False,
        )
    return lines


def _title(job: Job, shape: GridShape | None) -> str:
    title = f"{job.name}: {plural(job.nodes, 'node')} x {plural(job.ranks_per_node, 'rank')}"
    return f"{title}, {shape}" if shape else title


# ---------------------------------------------------------------------------------- the directives


def _directives(job: Job, site: Site) -> list[str]:
    """The #SBATCH lines."""
    rows = (
        *_place(job, site),
        *_size(job, site),
        *_gpus(job, site.gpus, site.launcher == "torchrun"),
        *_limits(job, site),
        *_restart(job),
        *_others(job, site),
    )
    lines = []
    for option, value, comment in rows:
        if value is True:
            lines.append(commented(f"#SBATCH --{option}", comment))
        elif value is not None:
            lines.append(commented(f"#SBATCH --{option}={for_sbatch(str(value))}", comment))
    return lines


def _place(job: Job, site: Site) -> tuple[Row, ...]:
    return (
        ("job-name", job.name, ""),
        ("account", site.account, ""),
        ("partition", site.partition, ""),
        ("qos", site.qos, ""),
        ("reservation", site.reservation, ""),
        ("constraint", site.constraint, ""),
    )


def _size(job: Job, site: Site) -> tuple[Row, ...]:
    if site.launcher == "torchrun":
        cpus = site.cpus_per_rank * job.ranks_per_node
        return (
            ("nodes", job.nodes, ""),
            ("ntasks-per-node", 1, "torchrun, which starts the ranks"),
            ("cpus-per-task", cpus, "the ranks of a node share it"),
        )
    return (
        ("nodes", job.nodes, ""),
        ("ntasks-per-node", job.ranks_per_node, "ranks"),
        ("cpus-per-task", site.cpus_per_rank, ""),
    )


def _gpus(job: Job, gpus: Gpus, torchrun: bool) -> tuple[Row, ...]:
    if not gpus.per_node:
        return ()
    kind = f"{gpus.type}:" if gpus.type else ""
    if gpus.request == "gres":
        return (("gres", f"gpu:{kind}{job.ranks_per_node}", "per node"),)
    one_rank = gpus.request == "gpus-per-task" and not torchrun
    number = 1 if one_rank else job.ranks_per_node
    return ((gpus.request, f"{kind}{number}", ""),)


def _limits(job: Job, site: Site) -> tuple[Row, ...]:
    hours, minutes = divmod(job.minutes, 60)
    log = job.log if site.logs == "." else f"{site.logs.rstrip('/')}/{job.log}"
    return (
        ("mem", site.memory, "per node"),
        ("exclusive", site.exclusive or None, ""),
        ("time", f"{hours:02}:{minutes:02}:00", ""),
        ("output", log, "name and number of the job"),
    )


def _restart(job: Job) -> tuple[Row, ...]:
    if job.resumes:
        return (
            ("open-mode", "append", "a second attempt appends to the same log"),
            ("requeue", True, "after a failed node too"),
            ("signal", f"B:USR1@{job.signal_s}", "to this script, before the time is over"),
        )
    again = "a second attempt would find its folder taken" if job.trains else "it would begin again"
    return (("no-requeue", True, again),)


def _others(job: Job, site: Site) -> list[Row]:
    rows: list[Row] = [("array", job.array, "")]
    if job.dependency:
        rows.append(("dependency", job.dependency, ""))
        rows.append(("kill-on-invalid-dep", "yes", "else the job would wait for ever"))
    if site.mail:
        rows.append(("mail-user", site.mail.user, ""))
        rows.append(("mail-type", ",".join(site.mail.events), ""))
    for option in site.directives:
        name, _, value = option.removeprefix("--").partition("=")
        rows.append((name, value or True, ""))
    return rows


# ------------------------------------------------------------------------------------- the command


def _command(job: Job, site: Site) -> list[str]:
    """The lines of the command that runs on all nodes, from the outside to the inside."""
    lines = [_srun(site)]
    if site.container.kind == "pyxis":
        lines += _pyxis(site)
    if job.resumes:
        lines.append('bash -c "$hand_down" hand_down')
    if _wrapped(site):
        lines.append(_container(site))
    if job.resumes and _wrapped(site):
        # a container's program may set up signals anew for what it starts
        lines.append("""bash -c 'trap "" USR1 TERM; exec "$@"' ignoring""")
    python = expanded(site.python)
    program = f"{python} -m {job.module}"
    if site.launcher == "torchrun":
        ranks = f'--nnodes="$SLURM_NNODES" --nproc-per-node={job.ranks_per_node}'
        lines.append(f"{python} -m torch.distributed.run {ranks}")
        meet = '--rdzv-backend=c10d --rdzv-endpoint="$first_node:$port"'
        lines.append(f'--rdzv-id="$SLURM_JOB_ID" {meet}')
        if job.max_restarts:
            lines.append(f"--max-restarts={job.max_restarts}")
        program = f"-m {job.module}"
    typed = [literal(word) for word in job.typed]
    lines.append(" ".join([program, *typed, *job.added('"$out"')]))
    return lines


def _srun(site: Site) -> str:
    words = ["srun --kill-on-bad-exit=1", '--cpus-per-task="$SLURM_CPUS_PER_TASK"']
    if site.cpus.bind:
        words.append(f"--cpu-bind={site.cpus.bind}")
    if site.cpus.masks and site.launcher == "srun":  # of torchrun, the one task has all cores
        words.append(f"--cpu-bind=mask_cpu:{','.join(site.cpus.masks)}")
    gpus = site.gpus
    if gpus.per_node and gpus.request == "gpus-per-task" and site.launcher == "srun":
        words.append("--gpu-bind=none")  # a rank picks its GPU by its local rank among all
    return " ".join(words)


def _wrapped(site: Site) -> bool:
    """Whether a container's program stands between SLURM and ours; pyxis is part of SLURM."""
    return site.container.kind not in ("none", "pyxis")


def _hand_down(site: Site) -> list[str]:
    """The lines of the command that prints `hand_down.sh`: labcode is where the ranks find it."""
    lines = []
    if site.container.kind == "pyxis":
        lines += ["srun --nodes=1 --ntasks=1", *_pyxis(site)]
    elif _wrapped(site):
        lines.append(_container(site))
    lines.append(f"{expanded(site.python)} -m labcode.slurm.hand_down")
    return lines


def _continued(lines: list[str]) -> str:
    """Lines of one command."""
    return " \\\n    ".join(lines)


# ------------------------------------------------------------------------------------ the container


def _binds(site: Site) -> list[str]:
    """Folders that a container has to see, those that the site names last."""
    needed = ["$PWD"]
    if site.scratch.startswith(("/", "$")):
        needed.append(site.scratch)
    return [*needed, *site.container.binds]


def _both_sides(bind: str) -> str:
    """OUTSIDE:INSIDE for a folder that is the same on both sides."""
    return bind if ":" in bind else f"{bind}:{bind}"


def _options(container: Container) -> list[str]:
    return [expanded(option) for option in container.options]


def _pyxis(site: Site) -> list[str]:
    """The options of srun that pyxis reads."""
    mounts = ",".join(_both_sides(bind) for bind in _binds(site))
    image = f"--container-image={expanded(site.container.image or '')}"
    more = [f"--container-mounts={expanded(mounts)}", *_options(site.container)]
    return [f'{image} --container-workdir="$PWD"', " ".join(more)]


def _container(site: Site) -> str:
    """The program that starts the container, with its options."""
    container = site.container
    image = expanded(container.image or "")
    if container.kind == "shifter":  # sees the site's file systems without being told
        words = ["shifter", f"--image={image}"]
        words += [f"--volume={expanded(_both_sides(bind))}" for bind in container.binds]
        return " ".join([*words, *_options(container)])
    words = [container.kind, "exec"]
    if site.gpus.per_node and site.gpus.vendor == "nvidia":
        words.append("--nv")
    words += [f"--bind {expanded(bind)}" for bind in _binds(site)]
    return " ".join([*words, *_options(container), image])
