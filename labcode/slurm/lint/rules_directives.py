"""Rules about the head of a batch script: shebang, `#SBATCH` lines, logs and time."""

import re

from labcode.slurm.lint.parse import OPTIONS, SRUN_ONLY, Script, directive_options
from labcode.slurm.lint.rule import Facts, Found, collector
from labcode.suggest import closest

RULES, rule = collector()
_AS_WRITTEN = {"comment", "export", "job-name", "wrap"}  # here a `$` does no harm


@rule(
    "S01",
    "this line is a comment, not a directive: write #SBATCH, without a space and in capitals",
    "sbatch reads only lines that begin with exactly #SBATCH; the job runs with the default in "
    "place of what is asked",
    "#!/bin/bash\n# SBATCH --nodes=2\n",
    "#!/bin/bash\n#SBATCH --nodes=2\n",
    warning=True,
)
def _inert(script: Script, facts: Facts) -> Found:
    first = script.commands[0].line if script.commands else len(script.lines)
    for number, line in enumerate(script.lines[:first], 1):
        # ## is how people switch a directive off; `# sbatch -N 2 train.sh` tells how to submit
        inert = re.match(r"\s*#(?:\s*(?i:SBATCH)|sbatch)\s+(-.*)", line)
        if inert is None or line.startswith("#SBATCH") or re.match(r"\s*#\s+sbatch", line):
            continue
        names = [name for name, _ in directive_options(inert[1])]
        # an alternative to a directive that holds
        if not any(script.option(name) for name in names):
            yield number, line.strip()


@rule(
    "S02",
    "directive after the first command: move it to the top",
    "sbatch stops reading at the first line that is neither empty nor a comment; later directives "
    "do nothing",
    "#!/bin/bash\nset -e\n#SBATCH --time=10\n",
    "#!/bin/bash\n#SBATCH --time=10\nset -e\n",
)
def _late(script: Script, facts: Facts) -> Found:
    for number in script.late:
        yield number, script.lines[number - 1].strip()


@rule(
    "S03",
    "the first line names no interpreter: begin with #!/bin/bash",
    "sbatch refuses a script without #!",
    "#SBATCH --nodes=2\nhostname\n",
    "#!/bin/bash\n#SBATCH --nodes=2\nhostname\n",
)
def _shebang(script: Script, facts: Facts) -> Found:
    if not script.lines[0].startswith("#!"):
        yield 1, script.lines[0].strip()


@rule(
    "S04",
    "sbatch has no such option",
    "a misspelt directive makes sbatch refuse the script, or an old version pass over it",
    "#!/bin/bash\n#SBATCH --gpu-per-node=4\n",
    "#!/bin/bash\n#SBATCH --gpus-per-node=4\n",
)
def _unknown_option(script: Script, facts: Facts) -> Found:
    for directive in script.directives:
        if directive.name in OPTIONS:
            continue
        match = closest(directive.name, OPTIONS)
        if directive.name in SRUN_ONLY:
            yield directive.line, f"--{directive.name} is for srun"
        elif match:  # else it can be of a plugin of the site
            yield directive.line, f"--{directive.name}: did you mean --{match}?"


@rule(
    "S05",
    "two directives for one option: keep one",
    "the last one counts, without a word, so the one above it misleads whoever reads the script",
    "#!/bin/bash\n#SBATCH --time=10\n#SBATCH -t 20\n",
    "#!/bin/bash\n#SBATCH --time=20\n",
    warning=True,
)
def _twice(script: Script, facts: Facts) -> Found:
    for directive in script.directives:
        last = script.option(directive.name)
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
    "#!/bin/bash\n#SBATCH --output=$HOME/logs/%x-%j.out\n",
    "#!/bin/bash\n#SBATCH --output=logs/%x-%j.out\n",
)
def _variable(script: Script, facts: Facts) -> Found:
    for directive in script.directives:
        if directive.name not in _AS_WRITTEN and re.search(r"\$[A-Za-z({]|^~/", directive.value):
            yield directive.line, f"--{directive.name}={directive.value}"


@rule(
    "S07",
    "lines end as on Windows: convert the file with dos2unix",
    "sbatch refuses a script with DOS line breaks",
    "#!/bin/bash\r\n#SBATCH --nodes=2\r\n",
    "#!/bin/bash\n#SBATCH --nodes=2\n",
)
def _line_ends(script: Script, facts: Facts) -> Found:
    for number, line in enumerate(script.lines, 1):
        if line.endswith("\r"):
            yield number, "carriage return"
            return


@rule(
    "S08",
    "no time limit: say --time",
    "without one the partition's default holds, often its maximum (a long queue) or a few minutes "
    "(an early end)",
    "#!/bin/bash\n#SBATCH --nodes=2\nsrun hostname\n",
    "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --time=00:10:00\nsrun hostname\n",
    warning=True,
)
def _no_time(script: Script, facts: Facts) -> Found:
    # without any directive the command line of sbatch says all
    if script.value("time") is None and re.search(r"(?m)^#\s?SBATCH\s", script.text):
        yield 1, "no --time"


@rule(
    "S09",
    "not a time limit: write minutes, H:M:S or D-H:M:S",
    "sbatch refuses it; and 1:30 is one minute and a half, not ninety minutes",
    "#!/bin/bash\n#SBATCH --time=2h\n",
    "#!/bin/bash\n#SBATCH --time=2:00:00\n",
)
def _time_form(script: Script, facts: Facts) -> Found:
    time = script.option("time")
    if time is None or not time.value or time.is_template or "$" in time.value:
        return
    if script.minutes is None:
        yield time.line, time.value


@rule(
    "S10",
    "the log's name lacks the job's number: use %x-%j",
    "the next job of this script overwrites the log of this one, and two at once write into one "
    "file",
    "#!/bin/bash\n#SBATCH --output=train.log\n",
    "#!/bin/bash\n#SBATCH --output=%x-%j.out\n",
    warning=True,
)
def _log_name(script: Script, facts: Facts) -> Found:
    for name in ("output", "error"):
        log = script.option(name)
        if log is None or log.value in ("", "/dev/null") or log.is_template or "$" in log.value:
            continue
        if not re.search(r"%\d*[jJA]", log.value):
            yield log.line, log.value


@rule(
    "S11",
    "the tasks of an array share one log: add %a",
    "all tasks of the array write into one file at once",
    "#!/bin/bash\n#SBATCH --array=0-3\n#SBATCH --output=%x-%A.out\n",
    "#!/bin/bash\n#SBATCH --array=0-3\n#SBATCH --output=%x-%A_%a.out\n",
)
def _array_log(script: Script, facts: Facts) -> Found:
    log = script.option("output")
    if log is None or not script.option("array"):
        return
    if re.search(r"%\d*A", log.value) and not re.search(r"%\d*[ajJ]", log.value):
        yield log.line, log.value


@rule(
    "S12",
    "a requeued job empties its log: add --open-mode=append",
    "the second attempt truncates what the first one wrote, the reason of its end included",
    "#!/bin/bash\n#SBATCH --requeue\n#SBATCH --output=%x-%j.out\n",
    "#!/bin/bash\n#SBATCH --requeue\n#SBATCH --open-mode=append\n#SBATCH --output=%x-%j.out\n",
    warning=True,
)
def _append(script: Script, facts: Facts) -> Found:
    requeue = script.option("requeue")
    requeued = requeue or script.found(r"scontrol requeue")
    if requeued and script.value("open-mode") != "append":
        yield requeue.line if requeue else 1, "no --open-mode=append"


@rule(
    "S13",
    "scontrol requeue without --requeue",
    "where the cluster's default is not to requeue (JobRequeue=0) the order is refused and the "
    "job ends",
    '#!/bin/bash\n#SBATCH --open-mode=append\nscontrol requeue "$SLURM_JOB_ID"\n',
    "#!/bin/bash\n#SBATCH --requeue\n#SBATCH --open-mode=append\nscontrol requeue "
    '"$SLURM_JOB_ID"\n',
    warning=True,
)
def _requeue(script: Script, facts: Facts) -> Found:
    for command in script.found(r"scontrol requeue"):
        if not script.option("requeue"):
            yield command.line, "no --requeue"


@rule(
    "S14",
    "the signal before the time limit does not reach the batch script: write --signal=B:USR1@60",
    "without B: SLURM sends it to the steps alone, and the trap of this script never runs",
    "#!/bin/bash\n#SBATCH --signal=USR1@60\ntrap save USR1\n",
    "#!/bin/bash\n#SBATCH --signal=B:USR1@60\ntrap save USR1\n",
)
def _signal_to_shell(script: Script, facts: Facts) -> Found:
    asked = script.option("signal")
    name = re.match(r"(?:SIG)?([A-Z]+\d?)", asked.value) if asked else None
    if asked and name and script.found(rf"\btrap\b.*\b(SIG)?{name[1]}\b"):
        yield asked.line, asked.value


@rule(
    "S15",
    "a signal is asked for and nothing catches it: add a trap",
    "bash dies of the signal at once, the ranks are killed without a checkpoint, and the lead time "
    "is lost",
    "#!/bin/bash\n#SBATCH --signal=B:USR1@60\nsrun python train.py\n",
    "#!/bin/bash\n#SBATCH --signal=B:USR1@60\ntrap save USR1\nsrun python train.py &\nwait\n",
)
def _no_trap(script: Script, facts: Facts) -> Found:
    asked = script.option("signal")
    name = re.match(r"R?B:(?:SIG)?(\w+)", asked.value) if asked else None
    if asked is None or name is None:
        return
    # by a trap here, by the program that takes the shell's place, or in a file that is read
    caught = rf"\btrap\b.*\b(SIG)?{name[1]}\b|^exec\s|\btrap\b.*\$"
    elsewhere = r"^(source|\.)\s+(?!\S*(env|conda|profile|bashrc|setup|module))\S+\.(sh|bash)\b"
    if not script.found(caught) and not script.found(elsewhere):
        yield asked.line, asked.value


@rule(
    "S16",
    "the signal comes no earlier than the job's start: a longer --time or a shorter lead",
    "the job is told to stop as soon as it begins",
    "#!/bin/bash\n#SBATCH --time=1\n#SBATCH --signal=B:USR1@60\ntrap save USR1\n",
    "#!/bin/bash\n#SBATCH --time=10\n#SBATCH --signal=B:USR1@60\ntrap save USR1\n",
)
def _lead(script: Script, facts: Facts) -> Found:
    asked = script.option("signal")
    lead = re.search(r"@(\d+)", asked.value) if asked else None
    if asked and lead and script.minutes is not None and int(lead[1]) >= script.minutes * 60:
        yield asked.line, f"{lead[1]} s before the end of {script.value('time')}"


@rule(
    "S17",
    "afterok for ever: add --kill-on-invalid-dep=yes",
    "when the job it waits for fails, this one stays pending with DependencyNeverSatisfied until "
    "somebody cancels it",
    "#!/bin/bash\n#SBATCH --dependency=afterok:123\n",
    "#!/bin/bash\n#SBATCH --dependency=afterok:123\n#SBATCH --kill-on-invalid-dep=yes\n",
    warning=True,
)
def _dependency(script: Script, facts: Facts) -> Found:
    asked = script.option("dependency")
    if asked and "afterok" in asked.value and script.value("kill-on-invalid-dep") != "yes":
        yield asked.line, asked.value


@rule(
    "S18",
    "say how many tasks each node gets: --ntasks-per-node",
    "--ntasks alone may be placed 3 + 1 on two nodes, and a local rank then has no GPU of its own",
    "#!/bin/bash\n#SBATCH --nodes=2 --gpus-per-node=2\n#SBATCH --ntasks=4\n",
    "#!/bin/bash\n#SBATCH --nodes=2 --gpus-per-node=2\n#SBATCH --ntasks-per-node=2\n",
    warning=True,
)
def _placement(script: Script, facts: Facts) -> Found:
    tasks = script.option("ntasks")
    if tasks is None or script.option("gpus-per-task") or not script.gpus_per_node:
        return
    said = script.option("ntasks-per-node") or script.option("ntasks-per-gpu")
    said_later = any("ntasks-per-node" in step.options for step in script.sruns)
    count = script.number("ntasks") or 0
    # each node gets at least one
    if script.multi_node and count > (script.nodes or 1) and not said and not said_later:
        yield tasks.line, f"{tasks.value} tasks on {script.value('nodes')} nodes"


@rule(
    "S59",
    "memory without a unit is in MB: write 4G",
    "the job has a few megabytes and is killed as soon as Python starts",
    "#!/bin/bash\n#SBATCH --mem=4\n",
    "#!/bin/bash\n#SBATCH --mem=4G\n",
)
def _megabytes(script: Script, facts: Facts) -> Found:
    for name, enough in (("mem", 256), ("mem-per-cpu", 64), ("mem-per-gpu", 1024)):
        asked = script.option(name)
        if asked is None or not re.fullmatch(r"0*[1-9]\d*", asked.value):
            continue
        if name == "mem" and script.gpus_per_node:
            enough = 1024
        if (script.number(name) or 0) <= enough:
            yield asked.line, f"--{name}={asked.value}"


@rule(
    "S60",
    "--export with a list and without ALL: write --export=ALL,NAME",
    "the job sees these variables and SLURM's own and no other: not PATH, not those of the modules "
    "and of the environment",
    "#!/bin/bash\n#SBATCH --export=HF_HOME\n",
    "#!/bin/bash\n#SBATCH --export=ALL,HF_HOME\n",
    warning=True,
)
def _export(script: Script, facts: Facts) -> Found:
    asked = script.option("export")
    told = [(asked.line, asked.value)] if asked else []
    told += [
        (step.line, step.options["export"]) for step in script.sruns if "export" in step.options
    ]
    for line, value in told:
        names = value.split(",")
        known = re.match(r"[A-Za-z_]\w*(=|$)", names[0])
        if known and not {"ALL", "NONE", "NIL"} & {name.upper() for name in names}:
            yield line, f"--export={value}"
