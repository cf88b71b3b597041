"""Rules about the end: where a signal arrives, who catches it, what a requeue hits."""

import re

from labcode.slurm.lint.model import BatchJob, Step
from labcode.slurm.lint.rule import Facts, Found, collector

RULES, rule = collector()


@rule(
    "S12",
    "a requeue that loses something: add --requeue --open-mode=append",
    "the second attempt truncates what the first one wrote, the reason of its end included; and "
    "without --requeue a cluster with JobRequeue=0 refuses the order",
    warning=True,
)
def _append(job: BatchJob, facts: Facts) -> Found:
    asked = job.first.option("requeue")
    by_hand = job.found(r"scontrol requeue")
    if (asked or by_hand) and job.first.value("open-mode") != "append":
        yield asked.line if asked else 1, "no --open-mode=append"
    for command in by_hand if asked is None else []:
        yield command.line, "no --requeue"


@rule(
    "S65",
    "this number stands for the whole array: write ${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}",
    "one task requeues or signals all tasks of the array; SLURM_JOB_ID is no way out, for the last "
    "task has the number of the array",
)
def _whole_array(job: BatchJob, facts: Facts) -> Found:
    number = r"\$\{?SLURM_(?:ARRAY_JOB_ID|JOB_?ID)\}?(?!\w|\}?_)"
    for command in job.found(rf"\b(?:scontrol\s+(?:requeue\w*|hold|suspend)|scancel)\s.*{number}"):
        if job.first.option("array"):
            found = command.match(number)
            yield command.line, found[0] if found else command.text


@rule(
    "S14",
    "the signal before the time limit does not reach the batch script: write --signal=B:USR1@60",
    "without B: SLURM sends it to the steps alone, and the trap of this script never runs",
)
def _signal_to_shell(job: BatchJob, facts: Facts) -> Found:
    asked = job.signal
    if asked and not asked.to_script and job.traps(asked.name):
        yield asked.line, asked.text


@rule(
    "S64",
    "the signal goes to the steps, and this script starts none: no process gets it",
    "the time limit comes without a checkpoint: start the program with srun, or write "
    "--signal=B:USR1@60 and a trap",
)
def _nobody_signalled(job: BatchJob, facts: Facts) -> Found:
    asked = job.signal
    if asked is None or asked.to_script or job.traps(asked.name):
        return
    # what mpirun or a file that is read starts is not known
    if job.trainings and not job.reads_files and not any(step.by for step in job.launches):
        yield asked.line, f"{asked.text}, and line {job.trainings[-1].line} has no srun"


@rule(
    "S15",
    "a signal is asked for and nothing catches it: add a trap",
    "bash dies of the signal at once, the ranks are killed without a checkpoint, and the lead time "
    "is lost",
)
def _no_trap(job: BatchJob, facts: Facts) -> Found:
    asked = job.signal
    # by a trap here, by the program that takes the shell's place, or in a file that is read
    if asked is None or not asked.to_script or job.reads_files:
        return
    if asked.name in ("KILL", "STOP", "9", "19"):
        yield asked.line, f"{asked.text}: no process can catch this one"
    elif not job.traps(asked.name) and not job.found(r"^exec\s|\btrap\b.*\$"):
        yield asked.line, asked.text


@rule(
    "S16",
    "the signal comes no earlier than the job's start: a longer --time or a shorter lead",
    "the job is told to stop as soon as it begins",
)
def _lead(job: BatchJob, facts: Facts) -> Found:
    asked = job.signal
    lead_s = asked.lead_s if asked else None
    if asked and lead_s and job.minutes is not None and lead_s >= job.minutes * 60:
        yield asked.line, f"{lead_s} s before the end of {job.first.value('time')}"


@rule(
    "S27",
    "a trap that has to wait: start the program with & and wait for it",
    "bash runs a trap only after the foreground command, so the signal is heard when the time is "
    "over",
)
def _foreground(job: BatchJob, facts: Facts) -> Found:
    asked = job.signal
    names = {asked.name} if asked and asked.to_script else set()
    caught = any(job.traps(name) for name in names | {"USR1", "USR2"})
    running = [step for step in job.trainings if step.end != "&"]
    if caught and running and not job.found(r"(^|[\s;])wait\b"):
        yield running[-1].line, running[-1].short


@rule(
    "S28",
    "the signal kills torchrun's agent: start it with the signal ignored",
    "the agent does not catch USR1: it dies and takes the ranks along before they save; they have "
    "handlers of their own",
)
def _agent_dies(job: BatchJob, facts: Facts) -> Found:
    ignored = re.search(r"\btrap\s+(--\s+)?[^\w\s$]+\s+(SIG)?USR", job.text)
    for step in _signalled_agents(job)[:1]:
        if not ignored:
            yield step.line, "no trap '' USR1"


@rule(
    "S51",
    "the signal stops at torchrun: let a trap in each task hand it down, as in `pkill -USR1 -P $!`",
    "SLURM signals the processes that it has started, and torchrun's ranks are in process groups "
    "of their own: they hear nothing",
)
def _stops_at_agent(job: BatchJob, facts: Facts) -> Found:
    for step in _signalled_agents(job)[:1]:
        if not re.search(r"\bp?kill\s+(-s\s*|--signal[= ]|-)(SIG)?USR", step.program):
            yield step.line, "nothing below it is signalled"


def _signalled_agents(job: BatchJob) -> list[Step]:
    """The steps of torchrun that get a signal which it does not hand to its ranks.

    Those it does: TERM and its like, what a variable of PyTorch names, and any behind labcode's
    hand_down. The ranks then have 30 s until it kills them (--shutdown-timeout).
    Source: torch/distributed/elastic/multiprocessing/api.py, PContext.start
    """
    if not job.signal_reaches_steps or "labcode.slurm.hand_down" in job.text:
        return []
    name = job.signal.name if job.signal else ""
    if name in ("TERM", "INT", "HUP", "QUIT", "15", "2", "1", "3"):
        return []
    if re.search(rf"\bTORCHELASTIC_SIGNALS_TO_HANDLE=\S*{name}\b", job.text):
        return []
    return [step for step in job.torchruns if step.by == "srun"]


@rule(
    "S71",
    "a shell stands between SLURM and the program, and the signal kills it: exec the program",
    "the signal reaches both: the shell, which has no trap, dies, and SLURM ends the task while "
    "the program saves",
)
def _shell_dies(job: BatchJob, facts: Facts) -> Found:
    if not job.signal_reaches_steps:
        return
    for step in job.trainings:
        file = re.match(r"(?:(?:/\S*/)?(?:bash|sh)\s+)?(\S+\.(?:sh|bash))\b", step.program)
        path = facts.folder / file[1] if facts.folder and file else None
        lines = path.read_text(errors="replace") if path and path.is_file() else step.program
        stays = step.shell_stays or lines is not step.program
        if step.by == "srun" and stays and not re.search(r"\b(trap|exec)\b", lines):
            yield step.line, step.short


@rule(
    "S29",
    "a requeued run begins again: add --checkpoint.resume",
    "each attempt trains from step 0 and none comes to the end",
)
def _resume(job: BatchJob, facts: Facts) -> Found:
    trains = job.found(r"labcode\.train\b")
    if trains and job.found(r"scontrol requeue") and not job.found(r"--checkpoint\.resume\b"):
        yield trains[0].line, "no --checkpoint.resume"


@rule(
    "S52",
    "after a failed node the run begins again: add --checkpoint.every 100",
    "a node that fails says nothing first: without checkpoints on the way all is lost since the "
    "last signal",
    warning=True,
)
def _every(job: BatchJob, facts: Facts) -> Found:
    trains = job.found(r"labcode\.train\b")
    if trains and job.first.option("requeue") and not job.found(r"--checkpoint\.every\b"):
        yield trains[0].line, "no --checkpoint.every"
