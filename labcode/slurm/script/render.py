"""A job on a site as a batch script that a person can read: `render(job, site) -> str`.

What decides is here, as tables of options; how it reads is in `templates/`. Nothing reaches the shell unquoted: what comes
from the job is taken literally, in what comes from the site a `$NAME` is looked up by the cluster (see `site`).
"""

import re
from pathlib import Path

import jinja2

from labcode.slurm.script.job import Job
from labcode.slurm.script.site import Site

PLAIN = re.compile(
    r"[\w@%+=:,./-]+", re.ASCII
)  # needs no quotes, neither in bash nor on an #SBATCH line
VARIABLE = re.compile(r"(\$[A-Za-z_]\w*|\$\{[A-Za-z_]\w*\})", re.ASCII)
ODD = re.compile(
    r"[^\x20-\x7e\u00a1-\u1fff\u2c00-\ud7ff\U0001f300-\U0001faff]"
)  # controls, odd spaces, typographic signs
COLUMN = 40  # where comments begin
_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    autoescape=False,  # bash, not HTML: each value is quoted below
)


def render(job: Job, site: Site) -> str:
    """The batch script.

    Args:
        job: What to run; it is checked first.
        site: Where.

    Raises:
        ValueError: The job is impossible, or does not fit the site.
    """
    shape = job.check()
    _check_fits(job, site)
    torchrun = site.launcher == "torchrun"
    settings = [
        (name, expanded(setting.value), setting.reason)
        for name, setting in site.env.items()
        if name not in job.env
    ]
    return _TEMPLATES.get_template("job.sh.j2").render(
        job=job,
        site=site,
        title=_title(job, shape),
        directives=[_directive(*row) for row in _directives(job, site)],
        modules=" ".join(map(literal, site.modules)),
        settings=[_commented(f"export {name}={value}", reason) for name, value, reason in settings],
        nccl_debug=job.nccl_debug and literal(job.nccl_debug),
        job_settings=[f"export {name}={literal(value)}" for name, value in job.env.items()],
        threads=None if "OMP_NUM_THREADS" in {*site.env, *job.env} else site.cpus_per_rank,
        own_folder=job.own_folder,
        out=inside(site.scratch, "$SLURM_JOB_NAME-$SLURM_JOB_ID"),
        folder=expanded(site.scratch) if site.container.kind != "none" else None,
        torchrun=torchrun,
        # one job of an array may have the number of the whole array, and scancel would take all of it
        this_job="${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" if job.array else "$SLURM_JOB_ID",
        hands_down=_hands_down(job, site, torchrun),
        ignores=_ignores(job, site, torchrun),
        command=" \\\n    ".join(_command(job, site, torchrun)),
    )


def _check_fits(job, site):
    """Raises ValueError for a job that the site refuses whatever else it says."""
    limits = {
        "minutes": site.max_minutes,
        "nodes": site.max_nodes,
        "ranks_per_node": site.gpus.per_node or None,
    }
    kinds = {"minutes": "max_minutes", "nodes": "max_nodes", "ranks_per_node": "gpus.per_node"}
    for name, most in limits.items():
        if most is not None and getattr(job, name) > most:
            raise ValueError(
                f"{name}={getattr(job, name)} is more than {kinds[name]}={most} of {site.name}: ask for less"
            )
    cpus = site.cpus_per_rank * job.ranks_per_node
    if site.cpus.per_node and cpus > site.cpus.per_node:
        raise ValueError(
            f"{job.ranks_per_node} ranks x {site.cpus_per_rank} CPUs = {cpus} are more than the {site.cpus.per_node} CPUs "
            f"of a node of {site.name}: change ranks_per_node or cpus.per_rank"
        )


def _directives(job, site):
    """(option, value, comment) of each #SBATCH line; lines without a value are left out."""
    torchrun, share = (
        site.launcher == "torchrun",
        " the ranks of a node share it" if site.launcher == "torchrun" else "",
    )
    mail = site.mail
    yield "job-name", job.name, ""
    yield "account", site.account, ""
    yield "partition", site.partition, ""
    yield "qos", site.qos, ""
    yield "reservation", site.reservation, ""
    yield "constraint", site.constraint, ""
    yield "nodes", job.nodes, ""
    yield (
        "ntasks-per-node",
        1 if torchrun else job.ranks_per_node,
        "torchrun, which starts the ranks" if torchrun else "ranks",
    )
    yield (
        "cpus-per-task",
        site.cpus_per_rank * (job.ranks_per_node if torchrun else 1),
        share.strip(),
    )
    yield from _gpus(job, site.gpus, torchrun)
    yield "mem", site.memory, "per node"
    yield "exclusive", True if site.exclusive else None, ""
    yield "time", f"{job.minutes // 60:02}:{job.minutes % 60:02}:00", ""
    yield (
        "output",
        job.log if site.logs == "." else f"{site.logs.rstrip('/')}/{job.log}",
        "name and number of the job",
    )
    yield "open-mode", "append" if job.resumes else None, "a second life goes on in the same log"
    yield (
        ("requeue", True, "after a failed node too")
        if job.resumes
        else ("no-requeue", True, _why_not(job))
    )
    yield (
        "signal",
        f"B:USR1@{job.signal_s}" if job.resumes else None,
        "to this script, before the time is over",
    )
    yield "array", job.array, ""
    yield "dependency", job.dependency, ""
    yield (
        "kill-on-invalid-dep",
        "yes" if job.dependency else None,
        "else the job would wait for ever",
    )
    yield "mail-user", mail and mail.user, ""
    yield "mail-type", mail and ",".join(mail.events), ""
    for option in site.directives:
        name, _, value = option.removeprefix("--").partition("=")
        yield name, value or True, ""


def _why_not(job):
    return "a second life would find its folder taken" if job.trains else "it would begin again"


def _gpus(job, gpus, torchrun):
    if not gpus.per_node:
        return
    kind = f"{gpus.type}:" if gpus.type else ""
    if gpus.request == "gres":
        yield "gres", f"gpu:{kind}{job.ranks_per_node}", "per node"
    else:
        per_task = gpus.request == "gpus-per-task" and not torchrun
        yield gpus.request, f"{kind}{1 if per_task else job.ranks_per_node}", ""


def _directive(option, value, comment):
    if value is None:
        return None
    return _commented(
        f"#SBATCH --{option}" if value is True else f"#SBATCH --{option}={_for_sbatch(str(value))}",
        comment,
    )


def _for_sbatch(value):
    """Quoted as sbatch reads its lines: inside double quotes a backslash takes the next character as it is."""
    return value if PLAIN.fullmatch(value) else '"' + re.sub(r'([\\"])', r"\\\1", value) + '"'


def _command(job, site, torchrun):
    """The lines of the command that runs on all nodes."""
    container = site.container
    srun = ["srun --kill-on-bad-exit=1"]
    srun += ['--cpus-per-task="$SLURM_CPUS_PER_TASK"']
    srun += [f"--cpu-bind={site.cpus.bind}"] if site.cpus.bind else []
    if site.gpus.per_node and site.gpus.request == "gpus-per-task" and not torchrun:
        srun += ["--gpu-bind=none"]
    yield " ".join(srun)
    if container.kind == "pyxis":
        mounts = ",".join(bind if ":" in bind else f"{bind}:{bind}" for bind in _binds(site))
        yield f'--container-image={expanded(container.image)} --container-workdir="$PWD"'
        yield " ".join(
            [f"--container-mounts={expanded(mounts)}", *map(expanded, container.options)]
        )
    if _hands_down(job, site, torchrun):
        yield f'bash -c "$hand_down" {"torchrun" if torchrun else "rank"}'
    if _wrapped(site):
        yield " ".join(_container(site))
    if _ignores(job, site, torchrun):
        yield f"""bash -c 'trap "" USR1; exec "$@"' {"torchrun" if torchrun else "rank"}"""
    if torchrun:
        agent = f"{expanded(site.python)} -m torch.distributed.run"
        yield f'{agent} --nnodes="$SLURM_NNODES" --nproc-per-node={job.ranks_per_node}'
        yield '--rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d --rdzv-endpoint="$first_node:$port"'
    program = f"-m {job.module}" if torchrun else f"{expanded(site.python)} -m {job.module}"
    out = "\0out"  # stands for the variable of the script, and no argument can hold a NUL
    yield " ".join(
        [program, *('"$out"' if word == out else literal(word) for word in job.arguments(out))]
    )


def _wrapped(site):
    """Whether a program of the container stands between SLURM and ours; pyxis is part of SLURM."""
    return site.container.kind not in ("none", "pyxis")


def _hands_down(job, site, torchrun):
    """Whether the ranks are not what SLURM starts and signals, but below it."""
    return job.resumes and (torchrun or _wrapped(site))


def _ignores(job, site, torchrun):
    """Whether what runs has to ignore the signal by itself: `hand_down` sees to it on this side of a container alone."""
    return job.resumes and (_wrapped(site) or not torchrun)


def _binds(site):
    """Folders that a container has to see, beside those that the site names."""
    return ["$PWD", *([site.scratch] if site.scratch[0] in "/$" else []), *site.container.binds]


def _container(site):
    container = site.container
    if container.kind == "shifter":  # sees the file systems of the site by itself
        yield f"shifter --image={expanded(container.image)}"
        yield from (
            f"--volume={expanded(bind if ':' in bind else f'{bind}:{bind}')}"
            for bind in container.binds
        )
        yield from map(expanded, container.options)
        return
    yield f"{container.kind} exec"
    if site.gpus.per_node and site.gpus.vendor == "nvidia":
        yield "--nv"
    yield from (f"--bind {expanded(bind)}" for bind in _binds(site))
    yield from map(expanded, container.options)
    yield expanded(container.image)


def literal(text: str) -> str:
    """A word of bash that is this text and nothing else, in the plainest quotes that ShellCheck has no question about."""
    if PLAIN.fullmatch(text):
        return text
    if ODD.search(text):  # $'...': control characters and typographic quotes as their bytes
        return "$'" + ODD.sub(_as_bytes, re.sub(r"([\\'])", r"\\\1", text)) + "'"
    return '"' + _inside_quotes(text) + '"' if re.search(r"[$`'\\]", text) else f"'{text}'"


def expanded(text: str) -> str:
    """A word of bash in which a `$NAME` or `${NAME}` is looked up and everything else is literal."""
    if not VARIABLE.search(text):
        return literal(text)
    pieces = VARIABLE.split(text)  # literal, $NAME, literal, $NAME, ..., literal
    if ODD.search(text):
        return "".join(
            f'"{piece}"' if at % 2 else literal(piece) for at, piece in enumerate(pieces) if piece
        )
    return (
        '"'
        + "".join(piece if at % 2 else _inside_quotes(piece) for at, piece in enumerate(pieces))
        + '"'
    )


def inside(folder: str, name: str) -> str:
    """A word of bash for the path `folder/name`; variables in both are looked up."""
    return expanded(f"{folder.rstrip('/')}/{name}")


def _inside_quotes(text):
    return re.sub(r'([\\"$`])', r"\\\1", text)


def _as_bytes(match):
    return {"\n": "\\n", "\t": "\\t"}.get(match[0]) or "".join(
        f"\\x{byte:02x}" for byte in match[0].encode()
    )


def _commented(line, comment):
    return f"{line:{COLUMN}} # {comment}" if comment else line


def _title(job, shape):
    title = f"{job.name}: {_count(job.nodes, 'node')} x {_count(job.ranks_per_node, 'rank')}"
    return f"{title}, {shape}" if shape else title


def _count(number, what):
    return f"{number} {what}{'' if number == 1 else 's'}"
