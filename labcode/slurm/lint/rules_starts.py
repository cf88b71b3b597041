"""Rules about starts: how ranks are started, how they meet, and whose exit code is the job's."""

import re
from collections.abc import Iterator

from labcode.slurm.lint.launches import ACCELERATE, DEEPSPEED, TORCHRUN, Launch
from labcode.slurm.lint.model import BatchJob, Step
from labcode.slurm.lint.rule import Facts, Found, collector
from labcode.slurm.lint.shell import LATER
from labcode.slurm.variables import Where, judge

RULES, rule = collector()


@rule(
    "S20",
    "no strict mode: set -euo pipefail after the directives",
    "the job's state is that of the last command: a failed srun followed by an echo ends as "
    "COMPLETED",
    warning=True,
)
def _strict(job: BatchJob, facts: Facts) -> Found:
    if not job.trainings:
        return
    exits = job.found(r"^set\s.*-\w*e|^set\s+-o\s+errexit")
    exits = exits or re.match(r"#!.*bash.* -\w*e", job.lines[0])
    last = job.trainings[-1]
    lost = [step for step in job.trainings if step.end == ";" and _hides(job, step)]
    if last.end == "|" and not job.found(r"\bpipefail\b|PIPESTATUS"):
        yield job.commands[0].line, f"line {last.line} ends with the state of what is behind |"
    elif lost and not exits:
        yield job.commands[0].line, f"line {lost[-1].line} is not the last command"


def _hides(job: BatchJob, launch: Step) -> bool:
    """Whether commands follow that end well whatever became of the launch, and none asks for it."""
    after = [command for command in job.commands if command.line > launch.line]
    closing = r"^(fi|done|\}|esac|elif|else|wait|exit)\b|^[})]"
    asks = [command for command in after if command.has(r"\$\?|^wait\b")]
    on_its_line = re.search(r"\|\||^\s*(if|while|until)\b|\$\?", launch.text)
    follow = [command for command in after if not command.has(closing)]
    return bool(follow) and not asks and not on_its_line


@rule(
    "S21",
    "srun without --kill-on-bad-exit=1",
    "when one rank dies the others wait: ten minutes with NCCL, else until the time limit",
    warning=True,
)
def _kill(job: BatchJob, facts: Facts) -> Found:
    if re.search(r"SLURM_KILL_BAD_EXIT=['\"]?1", job.text):
        return
    for step in job.trainings:
        told = step.unknown or {"kill-on-bad-exit", "wait"} & set(step.options)
        if step.by == "srun" and not told and step.tasks != 1:
            yield step.line, step.short


@rule(
    "S22",
    "the ranks start on the first node alone: start them through srun",
    "a batch script runs on one node; torchrun or python without srun leaves the others idle, and "
    "the launch waits for them",
)
def _first_node(job: BatchJob, facts: Facts) -> Found:
    for launch in job.trainings:
        if launch.by or not launch.is_agent or _reaches_nodes(launch):
            continue
        nodes = launch.said("nnodes") or launch.said("num_machines") or ""
        asks = job.first.nodes is None and re.search(r"SLURM_(NNODES|JOB_NUM_NODES)", nodes)
        if job.directives and (job.multi_node or asks):
            yield launch.line, launch.text[:60]


def _reaches_nodes(launch: Launch) -> bool:
    """Whether a launcher goes to the other nodes by itself, over ssh or MPI."""
    return launch.has(
        r"--(mpirun_hostfile|hostfile|launcher|deepspeed_hostfile|include)[= ]|\s-H\s"
    )


@rule(
    "S53",
    "a program without srun: it runs once, on the first node",
    "a batch script is one process on one node: the others are paid for and idle, or the program "
    "waits for them",
    warning=True,
)
def _program_on_first_node(job: BatchJob, facts: Facts) -> Found:
    # srun, mpirun and ssh reach the other nodes; so may a program that is told of the job
    reaches = [step for step in job.launches if step.by and step.trains]
    elsewhere = re.search(r"\b(ray|dask|submitit|parsl)\b", "\n".join(_code(job)))
    started = [step for step in job.trainings if not step.is_agent]
    # a task for each GPU; tasks without GPUs are how people ask for cores
    several = job.first.sizes_tasks and job.first.tasks_per_node == job.first.gpus_per_node != 1
    if not (job.multi_node or several) or reaches or elsewhere or not started:
        return
    last = started[-1]
    if last.has(r"python") and not last.has(r"(?i)slurm|host|mpi|[-_]nodes?\b"):
        yield last.line, last.short


def _code(job: BatchJob) -> list[str]:
    return [command.text for command in job.commands if not command.has(r"^(echo|printf)\b")]


def _agents(job: BatchJob) -> Iterator[tuple[Step, str, str]]:
    """(Step, nodes that each of its agents says, ranks that it starts) for each step of agents.

    An agent of torchrun or of its relatives starts the ranks of one node, and waits for as many
    agents as it says nodes, one where it says nothing. "" stands for what nobody knows.
    """
    for step in job.trainings:
        if step.by != "srun" or not (step.has(TORCHRUN) or step.has(ACCELERATE)):
            continue
        nodes = step.said("nnodes") or step.said("num_machines")
        silent = step.has_unknown_words or re.search(r"\bPET_NNODES|--config_file", job.text)
        if step.has(r"--standalone\b"):
            nodes = "1"
        elif nodes is None:
            nodes = "" if silent else "1"
        elif re.search(r"SLURM_(NNODES|JOB_NUM_NODES)", nodes):
            nodes = str(step.component.nodes or "")
        yield step, nodes, step.said("nproc_per_node") or step.said("num_processes") or "1"


def _one_of_several(step: Step) -> bool:
    """Whether other steps start the other agents: with a node named, or in a loop, with &."""
    return bool({"nodelist", "relative"} & set(step.options)) or step.end == "&"


@rule(
    "S23",
    "torchrun is told of another number of nodes than have an agent",
    "with --standalone or --nnodes=1 each node trains a model of its own, and nobody notices but "
    "the loss; with more nodes than agents they wait until the rendezvous ends with a time-out",
)
def _nnodes(job: BatchJob, facts: Facts) -> Found:
    for step, nodes, _ in _agents(job):
        there = step.nodes
        if not nodes.isdigit() or not there or _one_of_several(step):
            continue
        if step.tasks == 1 and int(nodes) > 1:
            yield step.line, f"1 agent, which waits for {nodes}: leave out -n"
        elif step.tasks != 1 and int(nodes) != there:
            yield step.line, f"each agent says {nodes}, the step has {there}"


@rule(
    "S74",
    "a launcher that goes to all nodes itself, started by srun on each: start it without srun",
    "each copy starts the ranks of the whole job: the second finds the ports and the GPUs taken",
)
def _launcher_on_each(job: BatchJob, facts: Facts) -> Found:
    for step in job.trainings:
        over_ssh = step.has(DEEPSPEED) and step.has(r"--(hostfile|num_nodes|include|launcher)[= ]")
        itself = over_ssh and not step.has(r"--no_ssh\b")
        itself = itself or step.has(r"^(\S*/)?(mpirun|mpiexec|horovodrun)\s")
        if step.by == "srun" and (step.tasks or 1) > 1 and itself:
            yield step.line, step.short


@rule(
    "S24",
    "several agents of torchrun on a node: one task per node, --ntasks-per-node=1",
    "srun starts each task of the step: every one is an agent that starts all ranks of the node",
)
def _agents_on_a_node(job: BatchJob, facts: Facts) -> Found:
    for step, _, ranks in _agents(job):
        if (step.tasks_per_node or 1) > 1 and ranks != "1":
            yield step.line, f"{step.tasks_per_node} agents on each node, of {ranks} ranks each"


@rule(
    "S55",
    "the rank is filled in before srun starts the tasks: it is 0 on every node",
    "this script runs as task 0 of the first node, so each node says that it is node 0 and the "
    "launch waits for the others; put it in srun bash -c '...'",
)
def _rank_too_early(job: BatchJob, facts: Facts) -> Found:
    taken = r"\$\{?SLURM_(PROCID|NODEID|LOCALID)\b"
    steps = [step for step in job.trainings if step.by == "srun" and step.tasks != 1]
    for step in steps:
        # a rendezvous, also one that stands in a file of accelerate, gives out the ranks itself
        given_out = step.has(_DYNAMIC) or step.has_unknown_words or step.said("config_file")
        filled_in = re.search(rf"\S*{taken}\}}?", step.program)
        if filled_in and not (step.is_agent and given_out):
            yield step.line, filled_in[0]
    for command in job.found(rf"^(export\s.*)?\b\w+=['\"]?{taken}"):
        told = command.match(rf"\b(\w+)=['\"]?{taken}")
        name = told[1] if told else ""
        for step in steps:
            read = name in _READ_BY_PROGRAMS and not step.is_agent
            read = read or re.search(rf"{LATER}\{{?{name}\b", step.program)
            if told and read and not re.search(rf"\b{name}=", step.text):
                yield command.line, told[0]
                break


# what programs read of their environment, to know who they are
_READ_BY_PROGRAMS = {"RANK", "LOCAL_RANK", "NODE_RANK", "CUDA_VISIBLE_DEVICES"}
# a rendezvous that gives out the ranks itself, or one whose kind stands in a variable
_DYNAMIC = r"rdzv[-_]backend[= ]['\"]?(c10d|etcd|\$)"


@rule(
    "S56",
    "agents on several nodes and no place to meet: --rdzv-backend=c10d --rdzv-endpoint=$HEAD:$PORT",
    "without one each agent looks for the others on its own machine, or takes itself for the first",
)
def _no_rendezvous(job: BatchJob, facts: Facts) -> Found:
    if re.search(r"\bPET_\w+|--config_file", job.text):
        return
    for step, nodes, _ in _agents(job):
        if not nodes.isdigit() or int(nodes) == 1 or step.has_unknown_words:
            continue
        address = r"--(rdzv[-_]endpoint|master[-_]addr|main_process_ip)[= ]|rdzv_endpoint="
        if not step.has(address):
            yield step.line, f"{nodes} nodes, no address"
        elif not step.has(r"rdzv[-_](backend|endpoint)|--(node|machine)[-_]rank"):
            yield step.line, "an address, and no --node-rank: each node takes itself for the first"


@rule(
    "S57",
    "the last step runs in the background and nobody waits: add wait",
    "the job ends with its script, and SLURM kills the steps that still run",
)
def _nobody_waits(job: BatchJob, facts: Facts) -> Found:
    if not job.trainings or job.trainings[-1].end != "&":
        return
    last = job.trainings[-1]
    waiting = r"(^|[\s;&])(wait|fg)\b|sleep\s+(inf|\d+[mhd]|\d{4,})|\b(while|until)\b|tail\s.*--pid"
    later = [command for command in job.commands if command.line >= last.line]
    # a program, another step or another script, which the job may live for
    busy = [step for step in job.launches if step.order > last.order and step.end != "&"]
    lives = any(step.by or step.has(r"python|\.sh\b|^\$") for step in busy)
    if not lives and not any(command.has(waiting) for command in later):
        yield last.line, last.short


@rule(
    "S58",
    "CUDA_VISIBLE_DEVICES by hand: leave it to SLURM",
    "SLURM sets it to the GPUs of the job; other numbers are GPUs of somebody else, or none",
    warning=True,
)
def _by_hand(job: BatchJob, facts: Facts) -> Found:
    gpus = job.first.gpus_per_node
    if gpus is None:
        return
    for command in job.found(r"^(export\s+)?CUDA_VISIBLE_DEVICES=['\"]?\d"):
        told = command.match(r"CUDA_VISIBLE_DEVICES=['\"]?([\d,]+)['\"]?(\s+\w)?")
        numbers = sorted(int(number) for number in told[1].split(",") if number) if told else []
        of_one_program = told is not None and told[2] is not None and numbers[-1] < gpus
        if numbers and numbers != list(range(gpus)) and not of_one_program:
            listed = ",".join(str(number) for number in numbers)
            yield command.line, f"CUDA_VISIBLE_DEVICES={listed}, the job has {gpus} GPUs"


@rule(
    "S25",
    "a fixed address to meet at: take the first host of the job",
    'the script works on that machine alone; HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" '
    "| head -n 1)",
)
def _fixed_host(job: BatchJob, facts: Facts) -> Found:
    for command, host in job.meeting_places(r"([A-Za-z0-9][\w.-]*)"):
        if job.multi_node or host not in ("localhost", "127.0.0.1"):
            yield command.line, host


@rule(
    "S61",
    "all nodes in place of one address to meet at: take the first host of the job",
    "SLURM writes the nodes of a job as n[1-3], which is no host's name: the ranks wait for each "
    'other until a time-out; HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
)
def _list_of_nodes(job: BatchJob, facts: Facts) -> Found:
    nodes = r"SLURM_(?:JOB_|STEP_)?NODELIST"
    whole = rf"(\${nodes}(?!\w)|\$\{{{nodes}\}})(?=['\":;&\s]|$)"
    for command, raw in job.meeting_places(whole):
        if job.multi_node:  # the list of a single node is its name
            yield command.line, raw


@rule(
    "S26",
    "a fixed port: derive it from the job's number",
    "two jobs on one node want the same port, and the second dies with EADDRINUSE or joins the "
    "first one's ranks",
    warning=True,
)
def _port(job: BatchJob, facts: Facts) -> Found:
    ports = set()
    own = [launch.has(r"--standalone\b") for launch in job.trainings]
    for command in job.commands:
        port = command.match(_FIXED_PORT)
        # --standalone finds a free port, whatever the variable says
        if port is None or command.has(r"^(echo|printf)\b") or (own and all(own)):
            continue
        number = next(part for part in port.groups() if part)
        if number not in ports:
            yield command.line, port[0].strip()
        ports.add(number)
    for launch in job.trainings:
        options = ("rdzv_endpoint", "master_port", "main_process_port")
        told = [launch.said(name) or "" for name in options]
        fixed = re.search(r"(?:^|:)(\d{3,5})$", max(told, key=len))
        if fixed and fixed[1] not in ports:
            yield launch.line, f"its port is {fixed[1]}"
            ports.add(fixed[1])


_FIXED_PORT = (
    r"(?:\bMASTER_PORT=|--(?:master|main_process)[-_]port(?:=|\s+))['\"]?"
    r"(?:\$\{MASTER_PORT:?[-=]['\"]?)?([1-9]\d{2,4})\s*\}?['\"]?(?![\w$%{.])"
    r"|\$\{MASTER_PORT:?[-=]['\"]?([1-9]\d{2,4})\s*['\"]?\}"
    r"|rdzv[-_]endpoint[= ]\S*?:([1-9]\d{2,4})(?![\w$%{.])"
)


@rule(
    "S73",
    "conda activate without conda's shell function: source .../etc/profile.d/conda.sh first",
    "a batch script is no login shell, and functions of the submitting shell are not handed down: "
    "'Run conda init before conda activate', and Python is another one",
    warning=True,
)
def _conda(job: BatchJob, facts: Facts) -> Found:
    if re.match(r"#!.*\s-\w*[il]|#!.*--login", job.lines[0]):
        return
    for command in job.commands:
        # a file that is read, a hook, a module or a tool of the site may define it
        if command.has(
            r"^(source|\.|eval|spack|uenv)\s|^(module|ml)\s.*(conda|python|forge|restore)"
        ):
            return
        if command.has(r"^(conda|mamba|micromamba)\s+activate\b"):
            yield command.line, command.text
            return


@rule(
    "S75",
    "a command of SLURM in a container, where it is not: run it in this script, outside",
    "images have no scontrol, srun or sbatch: the address of the first node stays empty, nothing "
    "is requeued, no step starts; hand variables in from outside",
    warning=True,
)
def _in_a_container(job: BatchJob, facts: Facts) -> Found:
    for asked in (job.first.option("container-image"), job.first.option("container-name")):
        inside = job.found(r"^(\w+=)?(\$\()?" + _OF_SLURM) if asked else []
        if inside:
            yield inside[0].line, f"--{asked.name if asked else ''}: this script is in it"
            return
    for command in job.found(_CONTAINER):
        # what a text for another shell, in single quotes or escaped, asks for
        later = " ".join(re.findall(r"'[^']*'|\\\$\([^)]*|(?:&&|\|\||;)[^;|&]*[\"']", command.text))
        found = re.search(rf"(?:[\s('\"]){_OF_SLURM}", later)
        if found:
            yield command.line, found[0].strip(" ('\"")


_OF_SLURM = r"(?:srun|scontrol|sbatch|squeue|scancel|sacct)\s"
_CONTAINER = (
    r"\bsrun\s.*--container-(?:image|name)|\b(?:singularity|apptainer|shifter|podman-hpc|docker)\s"
    r"+(?:exec|run|--image)"
)


@rule(
    "S46",
    "variables that, together, do not do what they seem to",
    "what each setting of NCCL, PyTorch, gloo and SLURM means beside the others: "
    "labcode/slurm/variables.py",
    warning=True,
)
def _variables(job: BatchJob, facts: Facts) -> Found:
    env: dict[str, str] = {}
    lines: dict[str, int] = {}
    for command in job.found(r"^export\s"):
        for name, value in re.findall(
            r"(?<!\S)(\w+)=['\"]?([^\s'\"$`]+)['\"]?(?!\S)", command.text
        ):
            env[name] = value
            lines[name] = command.line
    where = Where(nodes=job.first.nodes, interfaces=facts.interfaces or None)
    for meaning in judge(env, where):
        if not set(meaning.names) & set(facts.environment):  # the site has its reasons
            yield lines[meaning.names[0]], f"{meaning.text}; {meaning.cure}"
