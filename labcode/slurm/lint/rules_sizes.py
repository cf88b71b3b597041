"""Rules about sizes: nodes, tasks, GPUs and cores, of the job, of its steps and of the site."""

import math
import re
from pathlib import Path

from labcode.slurm.lint.model import BatchJob, Step, gpus
from labcode.slurm.lint.rule import Facts, Found, collector

RULES, rule = collector()
# labcode's own commands take the device whose number is there, whatever their local rank is
_TAKES_WHAT_IS_THERE = r"labcode\.(train|doctor|pool)"


@rule(
    "S18",
    "say how many tasks each node gets: --ntasks-per-node",
    "--ntasks alone may be placed 3 + 1 on two nodes, and a local rank then has no GPU of its own",
    warning=True,
)
def _placement(job: BatchJob, facts: Facts) -> Found:
    tasks = job.first.option("ntasks")
    if tasks is None or job.first.option("gpus-per-task") or not job.first.gpus_per_node:
        return
    said = job.first.option("ntasks-per-node") or job.first.option("ntasks-per-gpu")
    said_later = any("ntasks-per-node" in step.options for step in job.sruns)
    count = job.first.number("ntasks") or 0
    # each node gets at least one
    if job.multi_node and count > (job.first.nodes or 1) and not said and not said_later:
        yield tasks.line, f"{tasks.value} tasks on {job.first.value('nodes')} nodes"


@rule(
    "S35",
    "srun may not take over --cpus-per-task: say it again, or export SRUN_CPUS_PER_TASK",
    "in SLURM 22.05 and 23.02 a step does not inherit it from sbatch: each rank gets one core, and "
    "its data loader starves",
    warning=True,
)
def _cpus(job: BatchJob, facts: Facts) -> Found:
    if (job.first.number("cpus-per-task") or 1) == 1 or "SRUN_CPUS_PER_TASK" in job.text:
        return
    for step in job.trainings:
        told = {"cpus-per-task", "cpus-per-gpu"} & set(step.options) or step.unknown
        by_hand = re.search(r"none|no\b|mask|map", step.options.get("cpu-bind", ""))
        if step.by == "srun" and not told and not by_hand:
            yield step.line, step.short


@rule(
    "S40",
    "more ranks than GPUs",
    "NCCL refuses two ranks on one GPU",
)
def _ranks_over_gpus(job: BatchJob, facts: Facts) -> Found:
    for step in job.trainings:
        ranks, gpus = _ranks_and_gpus(step)
        if ranks and gpus and ranks > gpus and not step.has(r"--parallel\.share_gpus\b"):
            where = "each task sees" if step.sees_its_own_gpus else "a node has"
            yield step.line, f"{ranks} ranks, {where} {gpus} GPUs"
            return


def _ranks_and_gpus(step: Step) -> tuple[int | None, int | None]:
    """The ranks that share the GPUs which a task sees, and how many these are.

    Where a task sees all of its node, that are the ranks of the node; else its own.
    """
    one_each = not step.is_agent or step.said("nproc_per_node") == "1"
    ranks = step.ranks_per_node
    return 1 if ranks and one_each and step.sees_its_own_gpus else ranks, step.gpus_of_task


@rule(
    "S41",
    "GPUs that no rank uses",
    "they are paid for and idle: one rank uses one GPU; a program that starts a process for each "
    "GPU itself is told so by --ntasks-per-node=1",
    warning=True,
)
def _idle_gpus(job: BatchJob, facts: Facts) -> Found:
    for step in job.trainings:
        ranks, gpus = _ranks_and_gpus(step)
        # one task that was asked for can start more; several do not, nor does SLURM's default
        alone = not step.is_agent and ranks == 1 and step.says_tasks
        divided = [other for other in job.trainings if other is not step]
        if ranks and gpus and ranks < gpus and not alone and not divided:
            found = f"{ranks} ranks, {gpus} GPUs"
            if not step.says_tasks and not step.is_agent:
                found = f"1 task on a node of {gpus} GPUs: say --ntasks-per-node={gpus}"
            yield job.first.line_of("gpus-per-node", "gres", "gpus"), found


@rule(
    "S63",
    "each task sees GPUs of its own alone, and counts them from 0",
    "a program that calls set_device(local rank) ends with 'invalid device ordinal' on every task "
    "but the first: --gpus-per-node in place of it, or device 0 in the program",
    warning=True,
)
def _number_0(job: BatchJob, facts: Facts) -> Found:
    for step in job.trainings:
        several = (step.tasks_per_node or 1) > 1
        if step.by != "srun" or not several or not step.sees_its_own_gpus or step.is_agent:
            continue
        if not step.has(_TAKES_WHAT_IS_THERE) and _by_local_rank(step, facts.folder):
            line = job.first.line_of("gpus-per-task", "ntasks-per-gpu", "gpu-bind")
            in_step = {"gpus-per-task", "ntasks-per-gpu", "gpu-bind"} & set(step.options)
            seen = f"{step.gpus_of_task or 'some'} of them"
            yield step.line if in_step else line, f"{step.tasks_per_node} tasks, each sees {seen}"
            return


def _by_local_rank(step: Step, folder: Path | None) -> bool:
    """Whether the program may choose its device by its local rank: its file says, if there."""
    name = re.search(r"(?<!\S)[^\s$-]\S*\.py\b", step.program)
    file = folder / name[0] if folder and name else None
    if file is None or not file.is_file():
        return True
    text = file.read_text(errors="replace")
    chooses = re.search(r"set_device\(|cuda:\{|device\(\s*[\"']cuda[\"'],\s*[^0\s]", text)
    return bool(chooses and re.search(r"(?i)local_?rank|localid", text))


@rule(
    "S43",
    "the script starts another number of ranks than the job says",
    "half of the ranks wait for peers that nobody starts",
)
def _world(job: BatchJob, facts: Facts) -> Found:
    if facts.world_size and job.world_size and job.world_size != facts.world_size:
        yield job.first.line_of("nodes"), f"{job.world_size} ranks, the job says {facts.world_size}"


@rule(
    "S66",
    "this reaches or counts the first component of a heterogeneous job alone",
    "the other components are paid for and idle, or the ranks wait for peers that nobody starts",
)
def _het_group(job: BatchJob, facts: Facts) -> Found:
    if len(job.components) == 1:
        return
    for step in job.trainings:
        count = re.search(r"\$\{?SLURM_(JOB_NUM_NODES|NNODES|NTASKS)\b", step.program)
        if count and re.search(r"[,-]", step.options.get("het-group", "")):
            yield step.line, count[0]
    told = [step for step in job.sruns if "het-group" in step.options or step.unknown]
    if not told and " : " not in job.text:
        for step in job.trainings:
            if step.by == "srun":
                yield step.line, f"no --het-group, and {len(job.components)} components"


@rule(
    "S68",
    "a step that is larger than the job",
    "srun refuses it, and nothing is started",
)
def _larger(job: BatchJob, facts: Facts) -> Found:
    for step in job.sruns:
        nodes = step.options.get("nodes", "")
        has = step.component.number("nodes")
        if nodes.isdigit() and has and int(nodes) > has:
            yield step.line, f"{nodes} nodes of {has}"
        asked = gpus(step.options.get("gpus-per-node")) or gpus(step.options.get("gres"))
        there = step.component.gpus_per_node
        if asked and there and asked > there:
            yield step.line, f"{asked} GPUs on a node of {there}"


@rule(
    "S70",
    "an option that is passed over: the number of tasks has been said, and comes first",
    "more or fewer tasks start than it looks: sbatch leaves out nodes without a task, and sets "
    "SLURM_NTASKS, which srun takes for -n",
)
def _passed_over(job: BatchJob, facts: Facts) -> Found:
    for part in job.components:
        tasks = part.number("ntasks") or 0
        nodes = part.number("nodes") or 0
        on_each = part.number("ntasks-per-node")
        line = part.line_of("ntasks")
        if 0 < tasks < nodes:
            yield line, f"--ntasks={tasks} on {nodes} nodes: the job has {tasks} nodes"
        elif on_each and 0 < tasks < nodes * on_each:
            yield line, f"{on_each} on each of {nodes} nodes, and --ntasks={tasks} are started"
    for step in job.sruns:
        on_each = step.options.get("ntasks-per-node", "")
        inherits = "ntasks" not in step.options and step.component.sizes_tasks
        if not inherits or not on_each.isdigit() or not step.nodes or not step.tasks:
            continue
        if step.tasks != int(on_each) * step.nodes and not step.is_agent:  # agents: S24
            found = f"{on_each} on each of {step.nodes} nodes, and {step.tasks} are started"
            yield step.line, f"{found}: say --ntasks in the step"


@rule(
    "S72",
    "nobody says how many tasks, and srun starts as many as there is room for: say --ntasks",
    "a step that says only the cores of a task fills the nodes that the job has whole: several "
    "copies of the program write the same files",
)
def _copies(job: BatchJob, facts: Facts) -> Found:
    for step in job.trainings:
        if step.fills_nodes:
            yield step.line, step.short


@rule(
    "S69",
    "two steps at once on the same nodes: the second waits until the first has ended",
    "since SLURM 20.11 a step has its nodes to itself ('step creation temporarily disabled, "
    "retrying'): say --overlap, or --exact with the cores, the memory and the GPUs of each",
)
def _at_once(job: BatchJob, facts: Facts) -> Found:
    running: list[Step] = []
    for step in job.sruns:
        # a wait between them, the other branch of an if, another turn of a loop
        between = r"(^|[\s;&])wait\b|^(else|elif|fi|done|esac|\}|\S+\))(?=[\s;]|$)"
        ends = [command.line for command in job.found(between)]
        if running and any(running[-1].line <= line < step.line for line in ends):
            running = []
        beside = [other for other in running if other.component is step.component]
        if step.end == "&" and not beside and job.in_loop(step):
            beside = [step]
        taken = sum(other.nodes or 0 for other in (*beside, step))
        if beside and step.takes_whole and taken > (step.component.nodes or math.inf):
            yield step.line, f"beside line {beside[0].line}: it takes all {step.takes_whole}"
            return
        if step.end == "&" and step.takes_whole:
            running.append(step)


@rule(
    "S47",
    "more than the site has",
    "sbatch refuses the job, as with 'Requested node configuration is not available', or it stays "
    "pending with PartitionTimeLimit",
)
def _site(job: BatchJob, facts: Facts) -> Found:
    gpus_by = ("gpus-per-node", "gres", "gpus-per-task", "gpus")
    for names, asked, most, unit in (
        (("time",), job.minutes, facts.max_minutes, "minutes"),
        (("nodes",), job.first.number("nodes"), facts.max_nodes, "nodes"),
        (gpus_by, job.first.gpus_per_node, facts.gpus_per_node, "GPUs on a node"),
    ):
        if asked and most and asked > most:
            yield job.first.line_of(*names), f"{asked:g}, the site's limit is {most:g} {unit}"
