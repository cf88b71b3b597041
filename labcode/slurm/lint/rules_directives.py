"""Rules about directives: what sbatch reads, what it refuses, which variables it sets."""

import re

from labcode.runtime.suggest import did_you_mean, meant
from labcode.slurm.lint.model import BatchJob, gpus
from labcode.slurm.lint.options import OPTIONS, SRUN_ONLY
from labcode.slurm.lint.parse import directive_options
from labcode.slurm.lint.rule import Facts, Found, collector

RULES, rule = collector()
_AS_WRITTEN = {"comment", "export", "job-name", "wrap"}  # here a `$` does no harm
# options of which sbatch takes one and refuses two: its own messages
_EXCLUDE = (
    ("mem", "mem-per-cpu"),
    ("mem", "mem-per-gpu"),
    ("mem-per-cpu", "mem-per-gpu"),
    ("cpus-per-task", "cpus-per-gpu"),
    ("gpus-per-task", "ntasks-per-gpu"),
    ("ntasks-per-node", "ntasks-per-gpu"),
)
# what sbatch sets in the script only where it was asked for it (OUTPUT ENVIRONMENT VARIABLES in
# slurm.schedmd.com/sbatch.html), and by which options
_TASKS = ("ntasks", "ntasks-per-node", "ntasks-per-gpu")
_SET_BY = {
    "NTASKS": _TASKS,
    "NPROCS": _TASKS,
    "NTASKS_PER_NODE": ("ntasks-per-node",),
    "CPUS_PER_TASK": ("cpus-per-task",),
    "CPUS_PER_GPU": ("cpus-per-gpu",),
    "GPUS": ("gpus",),
    "GPUS_PER_NODE": ("gpus-per-node",),
    "GPUS_PER_TASK": ("gpus-per-task",),
    "MEM_PER_CPU": ("mem-per-cpu",),
    "MEM_PER_GPU": ("mem-per-gpu",),
    "ARRAY_JOB_ID": ("array",),
    "ARRAY_TASK_ID": ("array",),
    "ARRAY_TASK_COUNT": ("array",),
    "ARRAY_TASK_MAX": ("array",),
    "ARRAY_TASK_MIN": ("array",),
}
_ONLY_IN_A_STEP = re.compile(r"STEP_\w+|STEPID|LAUNCH_NODE_IPADDR|SRUN_COMM_\w+")


@rule(
    "S01",
    "this line is a comment: a directive begins with #SBATCH, in capitals and without a space",
    "sbatch reads only lines that begin with exactly #SBATCH; the job runs with the default in "
    "place of what is asked",
    warning=True,
)
def _inert(job: BatchJob, facts: Facts) -> Found:
    first = job.commands[0].line if job.commands else len(job.lines)
    for number, line in enumerate(job.lines[:first], 1):
        # ## is how people switch a directive off; `# sbatch -N 2 train.sh` tells how to submit
        inert = re.match(r"\s*#\s*(\w+)\s+(-.*)", line)
        if inert is None or line.startswith("#SBATCH") or re.match(r"\s*#\s+sbatch", line):
            continue
        if not meant(inert[1], ("SBATCH",)):
            continue
        names = [name for name, _ in directive_options(inert[2])]
        # an alternative to a directive that holds
        if not any(job.first.option(name) for name in names):
            yield number, line.strip()


@rule(
    "S02",
    "directive after the first command: move it to the top",
    "sbatch stops reading at the first line that is neither empty nor a comment; later directives "
    "do nothing",
)
def _late(job: BatchJob, facts: Facts) -> Found:
    for number in job.late:
        yield number, job.lines[number - 1].strip()


@rule(
    "S03",
    "no batch script: begin with #!/bin/bash, and end lines as Unix does (dos2unix)",
    "sbatch refuses a script without #!, and one with DOS line breaks",
)
def _no_script(job: BatchJob, facts: Facts) -> Found:
    if not job.lines[0].startswith("#!"):
        yield 1, job.lines[0].strip()
    for number in [at for at, line in enumerate(job.lines, 1) if line.endswith("\r")][:1]:
        yield number, "carriage return"


@rule(
    "S04",
    "sbatch has no such option",
    "a misspelt directive makes sbatch refuse the script, or an old version pass over it",
)
def _unknown_option(job: BatchJob, facts: Facts) -> Found:
    for directive in job.directives:
        if directive.name in OPTIONS:
            continue
        near = [f"--{name}" for name in meant(directive.name, OPTIONS)]
        if directive.name in SRUN_ONLY:
            yield directive.line, f"--{directive.name} is for srun"
        elif near:  # else it can be of a plugin of the site
            yield directive.line, f"--{directive.name}: {did_you_mean(near).strip()}"


@rule(
    "S05",
    "two directives for one option: keep one",
    "the last one counts, without a word, so the one above it misleads whoever reads the script",
    warning=True,
)
def _twice(job: BatchJob, facts: Facts) -> Found:
    for part in job.components:
        for directive in part.directives:
            last = part.option(directive.name)
            if directive.name == "mail-type":  # these add up
                continue
            if last and last is not directive and last.value != directive.value:
                said = f"--{directive.name}={directive.value}"
                yield directive.line, f"{said}, and in line {last.line} {last.value}"


@rule(
    "S06",
    "a directive is not expanded by the shell: write the value, or give it on the command line of "
    "sbatch",
    "no shell reads #SBATCH lines: a folder named '$HOME' would be needed, and the job ends "
    "without a log",
)
def _variable(job: BatchJob, facts: Facts) -> Found:
    for directive in job.directives:
        if directive.name not in _AS_WRITTEN and re.search(r"\$[A-Za-z({]|^~/", directive.value):
            yield directive.line, f"--{directive.name}={directive.value}"


@rule(
    "S08",
    "no time limit: say --time",
    "without one the partition's default holds, often its maximum (a long queue) or a few minutes "
    "(an early end)",
    warning=True,
)
def _no_time(job: BatchJob, facts: Facts) -> Found:
    # without any directive the command line of sbatch says all
    if job.first.value("time") is None and re.search(r"(?m)^#\s?SBATCH\s", job.text):
        yield 1, "no --time"


@rule(
    "S09",
    "not a time limit: write minutes, H:M:S or D-H:M:S",
    "sbatch refuses it; and 1:30 is one minute and a half, not ninety minutes",
)
def _time_form(job: BatchJob, facts: Facts) -> Found:
    time = job.first.option("time")
    if time is None or not time.value or time.is_template or "$" in time.value:
        return
    if job.minutes is None:
        yield time.line, time.value


@rule(
    "S11",
    "the tasks of an array share one log: add %a",
    "all tasks of the array write into one file at once",
)
def _array_log(job: BatchJob, facts: Facts) -> Found:
    log = job.first.option("output")
    if log is None or not job.first.option("array"):
        return
    if not re.search(r"%\d*[ajJ]", log.value) and not log.is_template:
        yield log.line, log.value


@rule(
    "S59",
    "memory without a unit is in MB: write 4G",
    "the job has a few megabytes and is killed as soon as Python starts",
)
def _megabytes(job: BatchJob, facts: Facts) -> Found:
    for name, enough in (("mem", 256), ("mem-per-cpu", 64), ("mem-per-gpu", 1024)):
        asked = job.first.option(name)
        if asked is None or not re.fullmatch(r"0*[1-9]\d*", asked.value):
            continue
        if name == "mem" and job.first.gpus_per_node:
            enough = 1024
        if (job.first.number(name) or 0) <= enough:
            yield asked.line, f"--{name}={asked.value}"


@rule(
    "S60",
    "--export with a list and without ALL: write --export=ALL,NAME",
    "the job sees these variables and SLURM's own and no other: not PATH, not those of the modules "
    "and of the environment",
    warning=True,
)
def _export(job: BatchJob, facts: Facts) -> Found:
    asked = job.first.option("export")
    told = [(asked.line, asked.value)] if asked else []
    told += [(step.line, step.options["export"]) for step in job.sruns if "export" in step.options]
    for line, value in told:
        names = value.split(",")
        known = re.match(r"[A-Za-z_]\w*(=|$)", names[0])
        if known and not {"ALL", "NONE", "NIL"} & {name.upper() for name in names}:
            yield line, f"--export={value}"


@rule(
    "S62",
    "options that sbatch does not take together",
    "sbatch refuses the script at once",
)
def _together(job: BatchJob, facts: Facts) -> Found:
    for part in job.components:
        for one, other in _EXCLUDE:
            asked = part.option(other)
            if asked and part.option(one):
                yield asked.line, f"--{one} and --{other}: keep one"
        alone = part.option("gpus-per-task")
        if alone and part.option("nodes") and not part.sizes_tasks and not part.option("gpus"):
            yield alone.line, "--gpus-per-task without a number of tasks: say --ntasks"
        tasks = part.number("ntasks")
        on_each = part.number("ntasks-per-node")
        nodes = part.number("nodes") if (part.value("nodes") or "").isdigit() else None
        if tasks and on_each and nodes and tasks > nodes * on_each:
            most = f"{nodes} nodes of {on_each} tasks have {nodes * on_each}"
            yield part.line_of("ntasks"), f"--ntasks={tasks}, and {most}"
        in_all = gpus(part.value("gpus"))
        each = gpus(part.value("gpus-per-task"))
        if in_all and nodes and in_all < nodes:
            yield part.line_of("gpus"), f"--gpus={in_all} are those of the job, on {nodes} nodes"
        elif in_all and each and part.tasks and in_all != each * part.tasks:
            need = f"{part.tasks} tasks with {each} have {each * part.tasks}"
            yield part.line_of("gpus"), f"--gpus={in_all} are those of the job, and {need}"


@rule(
    "S67",
    "this variable is not set in this script, or is no number",
    "SLURM sets it only where the option is given, or only in the tasks that srun starts: it is "
    "empty here, and in strict mode (set -u) the script ends; and it repeats what the option says",
    warning=True,
)
def _not_set(job: BatchJob, facts: Facts) -> Found:
    sized = ("nodes", "ntasks", "ntasks-per-node")
    if not any(
        job.first.option(name) for name in sized
    ):  # then the command line of sbatch says all
        return
    for name, command in job.expanded("SLURM_"):
        asked = _SET_BY.get(name)
        said = {directive.name for directive in job.directives}
        if asked and not set(asked) & said:
            yield command.line, f"SLURM_{name} needs --{asked[0]}"
        elif _ONLY_IN_A_STEP.fullmatch(name):
            yield command.line, f"SLURM_{name} exists in the tasks of a step alone"
    per_node = job.first.value("gpus-per-node") or ""
    for step in job.trainings:
        counted = re.search(r"SLURM_GPUS_PER_NODE\b(?!#)", step.said("nproc_per_node") or "")
        if counted and ":" in per_node:
            yield step.line, f"{counted[0]} is {per_node}: take SLURM_GPUS_ON_NODE"
