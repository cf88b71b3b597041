"""Rules about the body of a batch script: how ranks are started, how they meet, how they end."""

import re

from labcode.slurm.lint.launches import ACCELERATE, TORCHRUN, Launch
from labcode.slurm.lint.parse import Script
from labcode.slurm.lint.rule import Facts, Found, Rule, collector, commands_with

RULES, rule = collector()
_HEAD = "#!/bin/bash\nset -euo pipefail\n"
_TWO = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n"
# a folder of homes, /home /private/home /admin/home- /n/home01 /global/homes/a /Users, and whose
_HOMES = r"""(?<![\w.$}:/@-])/(?:
    (?:[\w.-]+/){0,3}?(?:\w*home\w{0,3}|Users|users)(?:/\w)?[/-](?P<home>[A-Za-z][\w.-]*)
    |u/(?P<u>[A-Za-z][\w.-]+)
    |fsx/(?P<fsx>[a-z]+)(?=/)
    |pscratch/sd/\w/(?P<pscratch>[A-Za-z][\w.-]*)
)(?=[/"'\s:,;)]|$)"""
_NOBODYS = """
admin app apps cache checkpoints ckpts code conda containers data dataset datasets ec2-user envs hf
home huggingface images jovyan llm logs ml model models nemo opt output outputs project projects
public pyxis results root scratch shared slurm software src tmp ubuntu user username users venv
work workspace yourname
"""
_NOBODY = frozenset(_NOBODYS.split())
_WORKPLACE = r"^\s*(cd|source|\.)\s|^#SBATCH|conda|env|/bin/|/code/"
# what is no secret, although a name such as TOKEN stands in front
_NO_SECRET = r"(?i)your|xxx|placeholder|changeme|example|dummy|false|true|none|here"


@rule(
    "S20",
    "no strict mode: set -euo pipefail after the directives",
    "the job's state is that of the last command: a failed srun followed by an echo ends as "
    "COMPLETED",
    "#!/bin/bash\nsrun --kill-on-bad-exit=1 python train.py\necho done\n",
    "#!/bin/bash\nset -euo pipefail\nsrun --kill-on-bad-exit=1 python train.py\necho done\n",
    warning=True,
)
def _strict(script: Script, facts: Facts) -> Found:
    if not script.trainings:
        return
    exits = script.found(r"^set\s.*-\w*e|^set\s+-o\s+errexit")
    exits = exits or re.match(r"#!.*bash.* -\w*e", script.lines[0])
    last = script.trainings[-1]
    lost = [step for step in script.trainings if step.end == ";" and _hides(script, step)]
    if last.end == "|" and not script.found(r"\bpipefail\b|PIPESTATUS"):
        yield script.commands[0].line, f"line {last.line} ends with the state of what is behind |"
    elif lost and not exits:
        yield script.commands[0].line, f"line {lost[-1].line} is not the last command"


def _hides(script: Script, launch: Launch) -> bool:
    """Whether commands follow that end well whatever became of the launch, and none asks for it."""
    after = [command for command in script.commands if command.line > launch.line]
    closing = r"^(fi|done|\}|esac|elif|else|wait|exit)\b|^[})]"
    asks = [command for command in after if command.has(r"\$\?|^wait\b")]
    on_its_line = re.search(r"\|\||^\s*(if|while|until)\b|\$\?", launch.text)
    follow = [command for command in after if not command.has(closing)]
    return bool(follow) and not asks and not on_its_line


@rule(
    "S21",
    "srun without --kill-on-bad-exit=1",
    "when one rank dies the others wait for it until the time limit, on nodes that are paid for",
    _TWO + "srun python train.py\n",
    _TWO + "srun --kill-on-bad-exit=1 python train.py\n",
)
def _kill(script: Script, facts: Facts) -> Found:
    if re.search(r"SLURM_KILL_BAD_EXIT=['\"]?1", script.text):
        return
    for step in script.trainings:
        told = step.unknown or {"kill-on-bad-exit", "wait"} & set(step.options)
        if step.by == "srun" and not told and script.tasks_of(step) != 1:
            yield step.line, _from_srun(step)


def _from_srun(step: Launch) -> str:
    """The command from its srun on: much may stand before it on the same line."""
    srun = re.search(r"\bsrun\s", step.text)
    begin = srun.start() if srun else 0
    return step.text[begin : begin + 60]


@rule(
    "S22",
    "the ranks start on the first node alone: start them through srun",
    "a batch script runs on one node; torchrun or python without srun leaves the others idle, and "
    "the launch waits for them",
    _TWO + "torchrun --nnodes=2 train.py\n",
    _TWO + "srun torchrun --nnodes=2 --rdzv-endpoint=$HEAD:$PORT train.py\n",
)
def _first_node(script: Script, facts: Facts) -> Found:
    for launch in script.trainings:
        if launch.by or not launch.is_agent or _reaches_nodes(launch):
            continue
        nodes = launch.said("nnodes") or launch.said("num_machines") or ""
        asks = script.nodes is None and re.search(r"SLURM_(NNODES|JOB_NUM_NODES)", nodes)
        if script.directives and (script.multi_node or asks):
            yield launch.line, launch.text[:60]


def _reaches_nodes(launch: Launch) -> bool:
    """Whether a launcher goes to the other nodes by itself, over ssh or MPI."""
    return launch.has(
        r"--(mpirun_hostfile|hostfile|launcher|deepspeed_hostfile|include)[= ]|\s-H\s"
    )


@rule(
    "S53",
    "a program without srun on several nodes: it runs on the first one alone",
    "a batch script runs on one node: the others are paid for and idle",
    _TWO + "python train.py\n",
    _TWO + "srun --kill-on-bad-exit=1 python train.py\n",
    warning=True,
)
def _program_on_first_node(script: Script, facts: Facts) -> Found:
    by_others = [launch for launch in script.launches if launch.by and not _looks(launch)]
    elsewhere = re.search(r"\b(ray|dask|submitit|parsl)\b", "\n".join(_code(script)))
    started = [launch for launch in script.trainings if not launch.is_agent]
    # a program that is told of the job or of its nodes may start the others itself
    starts_steps = (
        r"(launch|submit|slurm|ray|sched|driver|manager|orchestr)\w*\.(py|sh)"
        r"|(?i:slurm|host|mpi|[-_]nodes?\b)"
    )
    if not script.multi_node or by_others or elsewhere or not started:
        return
    last = started[-1]
    trains = last.has(r"(?i)train|tune|main|ddp|fit|gpt|model") or script.gpus_per_node
    if trains and last.has(r"python") and not last.has(starts_steps):
        yield last.line, last.text[:60]


def _looks(launch: Launch) -> bool:
    """Whether a step only asks for something: `$(srun hostname)` or `srun nvidia-smi`."""
    return launch.has(r"^(hostname|nvidia-smi|rocm-smi|echo|env$|date|lscpu|ip)\b")


def _code(script: Script) -> list[str]:
    return [command.text for command in script.commands if not command.has(r"^(echo|printf)\b")]


@rule(
    "S23",
    "torchrun is told of another number of nodes than the job has",
    "--standalone or --nnodes=1 trains one model on each node, and nobody notices but the loss",
    _TWO + "srun torchrun --standalone --nproc-per-node=2 train.py\n",
    _TWO + 'srun torchrun --nnodes="$SLURM_NNODES" --nproc-per-node=2 train.py\n',
)
def _nnodes(script: Script, facts: Facts) -> Found:
    for launch in script.torchruns:
        nodes = script.nodes_of(launch) if launch.by == "srun" else script.nodes
        several = {"nodelist", "relative"} & set(launch.options) or launch.end == "&"
        if several or not nodes:
            continue
        said = re.fullmatch(r"\d+", launch.said("nnodes") or "")
        if nodes > 1 and launch.has(r"--standalone\b"):
            yield launch.line, f"--standalone on {nodes} nodes"
        elif said and int(said[0]) != nodes and not _fewer(script, launch):
            yield launch.line, f"--nnodes={said[0]} on {nodes} nodes"
        elif nodes > 1 and launch.by == "srun" and _silent_about_nodes(script, launch):
            yield launch.line, f"no --nnodes, which is 1, on {nodes} nodes"


def _silent_about_nodes(script: Script, launch: Launch) -> bool:
    told = launch.said("nnodes") or launch.has_unknown_words or "PET_NNODES" in script.text
    return not told and script.tasks_of(launch) != 1


@rule(
    "S54",
    "srun starts fewer agents than torchrun waits for: leave out -n",
    "each agent waits for the others until the rendezvous ends with a time-out",
    _TWO + "srun -n1 torchrun --nnodes=2 train.py\n",
    _TWO + "srun torchrun --nnodes=2 train.py\n",
)
def _few_agents(script: Script, facts: Facts) -> Found:
    for launch in script.torchruns:
        if launch.by == "srun" and _fewer(script, launch):
            nodes = launch.said("nnodes")
            yield launch.line, f"{script.tasks_of(launch)} task, --nnodes={nodes}"


def _fewer(script: Script, launch: Launch) -> bool:
    """Whether a step has fewer tasks than it says nodes; one of several steps may."""
    tasks = script.tasks_of(launch)
    said = launch.said("nnodes") or ""
    if re.search(r"SLURM_(NNODES|JOB_NUM_NODES)", said):
        said = str(script.nodes)
    alone = not {"nodelist", "relative"} & set(launch.options) and launch.end != "&"
    explicit = launch.options.get("ntasks", "").isdigit()
    return bool(alone and explicit and tasks and said.isdigit() and tasks < int(said))


@rule(
    "S24",
    "several agents of torchrun on a node: one task per node, --ntasks-per-node=1",
    "srun starts each task of the step: every one is an agent that starts all ranks of the node",
    "#!/bin/bash\n#SBATCH --ntasks-per-node=4\nsrun torchrun --nproc-per-node=4 train.py\n",
    "#!/bin/bash\n#SBATCH --ntasks-per-node=1\nsrun torchrun --nproc-per-node=4 train.py\n",
)
def _agents(script: Script, facts: Facts) -> Found:
    for launch in script.trainings:
        tasks = script.tasks_per_node_of(launch) or 1
        each = launch.said("nproc_per_node") or launch.said("num_processes")
        one_each = launch.has(TORCHRUN) and each in (None, "1")
        agents = launch.has(TORCHRUN) or launch.has(ACCELERATE)
        if launch.by == "srun" and agents and tasks > 1 and not one_each:
            yield launch.line, f"{tasks} agents on each node"


@rule(
    "S55",
    "the rank is filled in before srun starts the tasks: it is 0 on every node",
    "this script runs as task 0 of the first node, so each node says that it is node 0 and the "
    "launch waits for the others; put it in srun bash -c '...'",
    _TWO + "srun torchrun --nnodes=2 --node-rank=$SLURM_NODEID --master-addr=$HEAD train.py\n",
    _TWO + "srun bash -c 'torchrun --nnodes=2 --node-rank=$SLURM_NODEID --master-addr=$HEAD "
    "train.py'\n",
)
def _rank_too_early(script: Script, facts: Facts) -> Found:
    taken = r"\$\{?SLURM_(PROCID|NODEID|LOCALID)\b"
    for launch in script.trainings:
        if launch.by != "srun" or script.tasks_of(launch) == 1 or launch.has(_DYNAMIC):
            continue
        rank = re.search(rf"--(node|machine)[-_]rank[= ]{taken}", launch.program)
        # the file of accelerate can name a rendezvous that gives out the ranks
        if rank and not launch.has_unknown_words and launch.said("config_file") is None:
            yield launch.line, rank[0]
    exported = script.found(rf"^(export\s.*)?\b(RANK|LOCAL_RANK)=['\"]?{taken}")
    plain = [step for step in script.trainings if step.by == "srun" and not step.is_agent]
    for command in exported:
        rank = re.search(rf"\b(RANK|LOCAL_RANK)=['\"]?{taken}", command.text)
        inside = [step for step in plain if re.search(rf"\b{rank[1]}=", step.text)] if rank else []
        if rank and plain and not inside and script.tasks_of(plain[-1]) != 1:
            yield command.line, rank[0]


# a rendezvous that gives out the ranks itself, or one whose kind stands in a variable
_DYNAMIC = r"rdzv[-_]backend[= ]['\"]?(c10d|etcd|\$)"


@rule(
    "S56",
    "agents on several nodes and no place to meet: --rdzv-backend=c10d --rdzv-endpoint=$HEAD:$PORT",
    "without one each agent looks for the others on its own machine, or takes itself for the first",
    _TWO + "srun torchrun --nnodes=2 train.py\n",
    _TWO + "srun torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:$PORT train.py\n",
)
def _no_rendezvous(script: Script, facts: Facts) -> Found:
    if re.search(r"\bPET_\w+|--config_file", script.text):
        return
    for launch in script.trainings:
        nodes = launch.said("nnodes") or launch.said("num_machines") or "1"
        several = (nodes.isdigit() and int(nodes) > 1) or (
            script.multi_node and re.search(r"SLURM_(NNODES|JOB_NUM_NODES)", nodes)
        )
        agents = launch.has(TORCHRUN) or launch.has(ACCELERATE)
        if not several or not agents or launch.by != "srun" or launch.has_unknown_words:
            continue
        place = launch.has(
            r"--(rdzv[-_]endpoint|master[-_]addr|main_process_ip)[= ]|rdzv_endpoint="
        )
        if not place:
            yield launch.line, f"{nodes} nodes, no address"
        elif not launch.has(r"rdzv[-_](backend|endpoint)|--(node|machine)[-_]rank"):
            yield (
                launch.line,
                "an address, and no --node-rank: each node takes itself for the first",
            )


@rule(
    "S57",
    "the last step runs in the background and nobody waits: add wait",
    "the job ends with its script, and SLURM kills the steps that still run",
    _TWO + "srun -K python train.py &\n",
    _TWO + "srun -K python train.py &\nwait\n",
)
def _nobody_waits(script: Script, facts: Facts) -> Found:
    if not script.trainings:
        return
    last = script.trainings[-1]
    waiting = r"(^|[\s;&])(wait|fg)\b|sleep\s+(inf|\d+[mhd]|\d{4,})|\b(while|until)\b|tail\s.*--pid"
    later = [command for command in script.commands if command.line >= last.line]
    started = [launch for launch in script.launches if launch.order > last.order]
    busy = [launch for launch in started if launch.end != "&" and _long(launch)]
    if last.end == "&" and not busy and not any(command.has(waiting) for command in later):
        yield last.line, last.text[:60]


def _long(launch: Launch) -> bool:
    """Whether a command may be what the script lives for: a program, another script."""
    return launch.has(r"python|\.sh\b|^\$|torch|vllm|sglang") or bool(launch.by)


@rule(
    "S58",
    "CUDA_VISIBLE_DEVICES by hand: leave it to SLURM",
    "SLURM sets it to the GPUs of the job; other numbers are GPUs of somebody else, or none",
    "#!/bin/bash\n#SBATCH --gres=gpu:2\nexport CUDA_VISIBLE_DEVICES=0\nsrun -K python train.py\n",
    "#!/bin/bash\n#SBATCH --gres=gpu:2\nsrun -K python train.py\n",
    warning=True,
)
def _by_hand(script: Script, facts: Facts) -> Found:
    gpus = script.gpus_per_node
    # alone on the node all of its GPUs are the job's, in whatever order
    whole = gpus is not None and (gpus >= 4 or script.option("exclusive"))
    for command in script.found(r"^(export\s+)?CUDA_VISIBLE_DEVICES=['\"]?\d"):
        told = command.match(r"CUDA_VISIBLE_DEVICES=['\"]?([\d,]+)['\"]?(.*)")
        numbers = [int(number) for number in re.findall(r"\d+", told[1])] if told else []
        every = gpus is not None and sorted(numbers) == list(range(gpus))
        in_front = told is not None and re.match(r"\s+\w", told[2]) is not None
        divided = in_front and gpus is not None and max(numbers) < gpus
        if numbers and not divided and not (whole and every):
            asked = f"{gpus} GPUs" if gpus is not None else "no number of GPUs"
            listed = ",".join(str(number) for number in numbers)
            yield command.line, f"CUDA_VISIBLE_DEVICES={listed}, the job asks for {asked}"


@rule(
    "S25",
    "a fixed address to meet at: take the first host of the job",
    'the script works on that machine alone; HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" '
    "| head -n 1)",
    _TWO + "export MASTER_ADDR=gpu017\n",
    _TWO + 'HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\nexport '
    'MASTER_ADDR="$HEAD"\n',
)
def _fixed_host(script: Script, facts: Facts) -> Found:
    where = (
        r"(?:\bMASTER_ADDR=|--(?:rdzv[-_]endpoint|master[-_]addr|main_process_ip)[= ])['\"]?"
        r"([A-Za-z0-9][\w.-]*)"
    )
    said = [(command, re.search(where, command.text)) for command in script.commands]
    last = [command for command in script.commands if command.has(r"\bMASTER_ADDR=")]
    for command, host in said:
        if host is None or command.has(r"^(echo|printf)\b"):
            continue
        corrected = command in last and command is not last[-1]
        here = host[1] in ("localhost", "127.0.0.1")
        if not corrected and (script.multi_node or not here):
            yield command.line, host[1]


@rule(
    "S61",
    "all nodes in place of one address to meet at: take the first host of the job",
    "SLURM writes the nodes of a job as n[1-3], which is no host's name: the ranks wait for each "
    'other until a time-out; HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
    _TWO + "export MASTER_ADDR=$SLURM_JOB_NODELIST\n",
    _TWO + 'HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\nexport '
    'MASTER_ADDR="$HEAD"\n',
)
def _list_of_nodes(script: Script, facts: Facts) -> Found:
    nodes = r"SLURM_(?:JOB_|STEP_)?NODELIST"
    where = (
        r"(?:\bMASTER_ADDR=|--(?:rdzv[-_]endpoint|master[-_]addr|main_process_ip)[= ])['\"]?"
        rf"(\${nodes}(?!\w)|\$\{{{nodes}\}})(?=['\":;&\s]|$)"
    )
    last = [command for command in script.commands if command.has(r"\bMASTER_ADDR=")]
    for command in script.commands:
        raw = command.match(where)
        if raw is None or command.has(r"^(echo|printf)\b"):
            continue
        corrected = command in last and command is not last[-1]
        # the list of a single node is its name
        if script.multi_node and not corrected:
            yield command.line, raw[1]


@rule(
    "S27",
    "a trap that has to wait: start srun with & and wait for it",
    "bash runs a trap only after the foreground command, so the signal is heard when the time is "
    "over",
    "#!/bin/bash\n#SBATCH --signal=B:USR1@60\ntrap save USR1\nsrun --kill-on-bad-exit=1 python "
    "train.py\n",
    "#!/bin/bash\n#SBATCH --signal=B:USR1@60\ntrap save USR1\nsrun --kill-on-bad-exit=1 python "
    "train.py &\nwait $!\n",
)
def _foreground(script: Script, facts: Facts) -> Found:
    caught = script.found(r"\btrap\s+['\"]?\w.*\b(SIG)?(USR1|USR2|TERM)\b")
    steps = [step for step in script.trainings if step.by == "srun"]
    if caught and steps and not script.found(r"(^|[\s;])wait\b"):
        yield steps[-1].line, _from_srun(steps[-1])


@rule(
    "S28",
    "the signal kills torchrun's agent: start it with the signal ignored",
    "the agent does not catch USR1: it dies and takes the ranks along before they save; they have "
    "handlers of their own",
    "#!/bin/bash\n#SBATCH --signal=B:USR1@60\ntrap 'scancel --signal=USR1 $SLURM_JOB_ID' USR1\n"
    "srun torchrun train.py &\nwait\n",
    "#!/bin/bash\n#SBATCH --signal=B:USR1@60\ntrap 'scancel --signal=USR1 $SLURM_JOB_ID' USR1\n"
    "(trap '' USR1; exec srun torchrun train.py) &\nwait\n",
)
def _agent_dies(script: Script, facts: Facts) -> Found:
    ignored = re.search(r"\btrap\s+(--\s+)?[^\w\s$]+\s+(SIG)?USR1", script.text)
    if script.torchruns and _passed_on(script) and not (ignored or _hands_down(script)):
        yield script.torchruns[0].line, "no trap '' USR1"


@rule(
    "S51",
    "the signal stops at torchrun: let a trap in each task hand it down, as in `pkill -USR1 -P $!`",
    "scancel signals the processes that SLURM has started; with process tracking by cgroups the "
    "ranks below hear nothing",
    "#!/bin/bash\n#SBATCH --signal=B:USR1@60\ntrap 'scancel --signal=USR1 $SLURM_JOB_ID' USR1\n"
    "(trap '' USR1; exec srun torchrun train.py) &\nwait\n",
    "#!/bin/bash\n#SBATCH --signal=B:USR1@60\ntrap 'scancel --signal=USR1 $SLURM_JOB_ID' USR1\n"
    'srun bash -c \'trap "" USR1; torchrun train.py & trap "pkill -USR1 -P $!" USR1; wait $! || '
    "wait $!' &\nwait\n",
)
def _stops_at_agent(script: Script, facts: Facts) -> Found:
    below = re.search(r"\b(pkill|kill)\s+(-s\s*|--signal[= ]|-)(SIG)?USR1", script.text)
    if script.torchruns and _passed_on(script) and not (below or _hands_down(script)):
        yield script.torchruns[0].line, "nothing below it is signalled"


def _hands_down(script: Script) -> bool:
    """Whether labcode's own hand_down stands before what srun starts."""
    return "labcode.slurm.hand_down" in script.text


def _passed_on(script: Script) -> bool:
    """Whether a signal is asked for and the script passes it on to the steps."""
    scancels = script.found(r"scancel\s.*(--signal|-s)[= ]?\"?(SIG)?USR1")
    return script.option("signal") is not None and bool(scancels)


@rule(
    "S29",
    "a requeued run begins again: add --checkpoint.resume",
    "each attempt trains from step 0 and none comes to the end",
    _HEAD
    + '#\nsrun -K python -m labcode.train gpt_tiny &\nwait || scontrol requeue "$SLURM_JOB_ID"\n',
    _HEAD + "#\nsrun -K python -m labcode.train gpt_tiny --train.out runs/a --checkpoint.resume &\n"
    'wait || scontrol requeue "$SLURM_JOB_ID"\n',
)
def _resume(script: Script, facts: Facts) -> Found:
    trains = script.found(r"labcode\.train\b")
    if trains and script.found(r"scontrol requeue") and not script.found(r"--checkpoint\.resume\b"):
        yield trains[0].line, "no --checkpoint.resume"


@rule(
    "S52",
    "after a failed node the run begins again: add --checkpoint.every 100",
    "a node that fails says nothing first: without checkpoints on the way all is lost since the "
    "last signal",
    "#!/bin/bash\n#SBATCH --requeue\nsrun -K python -m labcode.train gpt_tiny "
    "--checkpoint.resume\n",
    "#!/bin/bash\n#SBATCH --requeue\nsrun -K python -m labcode.train gpt_tiny --checkpoint.resume "
    "--checkpoint.every 100\n",
    warning=True,
)
def _every(script: Script, facts: Facts) -> Found:
    trains = script.found(r"labcode\.train\b")
    if trains and script.option("requeue") and not script.found(r"--checkpoint\.every\b"):
        yield trains[0].line, "no --checkpoint.every"


@rule(
    "S30",
    "somebody's home folder in the script: use $HOME, or a path relative to $SLURM_SUBMIT_DIR",
    "the script works for one person only",
    _HEAD + "cd /home/alice/course\n",
    _HEAD + 'cd "$SLURM_SUBMIT_DIR"\n',
    warning=True,
)
def _home(script: Script, facts: Facts) -> Found:
    seen: set[str] = set()
    for number, line in enumerate(script.lines, 1):
        if re.match(r"\s*#(?!SBATCH)", line):
            continue
        found = re.search(_HOMES, line, re.VERBOSE)
        if found is None:
            continue
        owner = next(name for name in found.groups() if name).lower()
        # on /fsx lie data as well: only where somebody works
        data = found["fsx"] and not re.search(_WORKPLACE, line)
        if owner in _NOBODY or owner.startswith("your") or data or found[0] in seen:
            continue
        seen.add(found[0])
        yield number, found[0]


@rule(
    "S32",
    "a container without a bind: name the scratch folder, --bind /scratch (apptainer) or "
    "--container-mounts (pyxis)",
    "inside the container the folder does not exist, or writes go to a layer that is thrown away "
    "with the job",
    _HEAD + "srun -K apptainer exec image.sif python train.py --out $SCRATCH/run\n",
    _HEAD
    + 'srun -K apptainer exec --bind "$SCRATCH" image.sif python train.py --out $SCRATCH/run\n',
    warning=True,
)
def _bind(script: Script, facts: Facts) -> Found:
    if re.search(
        r"(?i)_BIND(PATH)?=|bind\w*\b.*\bmodule|module\s+load.*bind|_MOUNTS=", script.text
    ):
        return
    # by default a container has the home folder, the present one and /tmp
    outside = (
        r"[= ](\$\{?(SCRATCH|WORK|PROJECT|DATA|FLASH)\w*"
        r"|/(scratch|work|project|data|lustre|gpfs)\w*/)"
    )
    for launch in script.launches:
        used = re.search(r"\b(apptainer|singularity)\s+(\S+\s+)*?(exec|run)\s(.*)", launch.program)
        if used is None or re.search(
            r"\s(--bind|-B|--mount|--home|-H)\b|\s-B\S|\$\w*ARGS", f" {used[4]}"
        ):
            continue
        inside = used[4].partition(".sif ")[2]
        if re.search(outside, f" {inside}"):
            yield launch.line, launch.text[:60]
    # pyxis: as directives, or as options of srun
    directive = script.option("container-image")
    mounts = script.option("container-mounts") or "container-mounts" in script.text
    by_step = [step for step in script.trainings if "container-image" in step.options]
    if mounts or "container-mount-home" in script.text:
        return
    if directive:
        yield directive.line, "--container-image without --container-mounts"
    elif by_step and not by_step[0].unknown:
        yield by_step[0].line, "--container-image without --container-mounts"


@rule(
    "S35",
    "srun does not take over --cpus-per-task: say it again, or export SRUN_CPUS_PER_TASK",
    "since SLURM 22.05 a step does not inherit it from sbatch: each rank gets one core, and its "
    "data loader starves",
    "#!/bin/bash\n#SBATCH --cpus-per-task=8\nsrun -K python train.py\n",
    '#!/bin/bash\n#SBATCH --cpus-per-task=8\nsrun -K --cpus-per-task="$SLURM_CPUS_PER_TASK" '
    "python train.py\n",
    warning=True,
)
def _cpus(script: Script, facts: Facts) -> Found:
    if (script.number("cpus-per-task") or 1) == 1 or "SRUN_CPUS_PER_TASK" in script.text:
        return
    for step in script.trainings:
        told = {"cpus-per-task", "cpus-per-gpu"} & set(step.options) or step.unknown
        by_hand = re.search(r"none|no\b|mask|map", step.options.get("cpu-bind", ""))
        if step.by == "srun" and not told and not by_hand:
            yield step.line, _from_srun(step)


@rule(
    "S26",
    "a fixed port: derive it from the job's number",
    "two jobs on one node want the same port, and the second dies with EADDRINUSE or joins the "
    "first one's ranks",
    _TWO + "export MASTER_PORT=29500\n",
    _TWO + "export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))\n",
    warning=True,
)
def _port(script: Script, facts: Facts) -> Found:
    ports = set()
    own = [launch.has(r"--standalone\b") for launch in script.trainings]
    for command in script.commands:
        port = command.match(_FIXED_PORT)
        # --standalone finds a free port, whatever the variable says
        if port is None or command.has(r"^(echo|printf)\b") or (own and all(own)):
            continue
        number = next(part for part in port.groups() if part)
        if number not in ports:
            yield command.line, port[0].strip()
        ports.add(number)
    for launch in script.trainings:
        number = _port_of(script, launch)
        if number and number not in ports:
            yield launch.line, f"its port is {number}"
        ports.add(number)


def _port_of(script: Script, launch: Launch) -> str | None:
    """The port of a launcher where it is always the same, variables filled in."""
    endpoint = launch.said("rdzv_endpoint")
    told = endpoint or launch.said("master_port") or launch.said("main_process_port")
    if told is not None:
        fixed = re.search(r"(?:^|:)(\d{3,5})$", told)
        host = re.fullmatch(r"\$\([^:]*\)|[a-z][\w.-]*", told)
        # without a port the rendezvous takes its default
        return fixed[1] if fixed else "29400" if host and endpoint else None
    silent = launch.has(TORCHRUN) and not launch.has(r"--standalone\b|--rdzv[-_]|--master[-_]")
    alone = script.option("exclusive") or script.multi_node
    return None if not silent or alone or launch.has_unknown_words else "29500"


_FIXED_PORT = (
    r"(?:\bMASTER_PORT=|--(?:master|main_process)[-_]port(?:=|\s+))['\"]?"
    r"(?:\$\{MASTER_PORT:?[-=]['\"]?)?([1-9]\d{2,4})\s*\}?['\"]?(?![\w$%{.])"
    r"|\$\{MASTER_PORT:?[-=]['\"]?([1-9]\d{2,4})\s*['\"]?\}"
    r"|rdzv[-_]endpoint[= ]\S*?:([1-9]\d{2,4})(?![\w$%{.])"
)


@rule(
    "S31",
    "$USER may be unset: use $(id -un)",
    "SLURM need not set it, and in strict mode an unset variable ends the script",
    "#!/bin/bash\n#SBATCH --export=NONE\nset -u\nOUT=/scratch/$USER\n",
    '#!/bin/bash\n#SBATCH --export=NONE\nset -u\nOUT="/scratch/$(id -un)"\n',
    warning=True,
)
def _user(script: Script, facts: Facts) -> Found:
    strict = script.found(r"^set\s.*-\w*u|^set\s+-o\s+nounset")
    asked = script.value("export")
    bare = asked is not None and not asked.upper().startswith("ALL")
    used = script.found(r"\$USER\b|\$\{USER\}")
    if strict and bare and used:
        yield used[0].line, used[0].text[:60]


# rules that look for one pattern in the commands
RULES += [
    Rule(
        "S33",
        "the results stay on one node: write to a folder that all nodes share",
        "/tmp, /dev/shm and $TMPDIR belong to a node and are emptied after the job",
        _TWO + "srun -K python -m labcode.train gpt_tiny --train.out /tmp/run\n",
        _TWO + 'srun -K python -m labcode.train gpt_tiny --train.out "$SCRATCH/run"\n',
        commands_with(r"--train\.out[= ]['\"]?(/tmp|/dev/shm|\$\{?(SLURM_)?TMPDIR)\b"),
        warning=True,
    ),
]


@rule(
    "S34",
    "a secret in the script: read it from a file that only you can read",
    "SLURM keeps every batch script, and administrators and accounting can show it",
    _HEAD + "export HF_TOKEN=hf_abcdef123456\n",
    _HEAD + 'HF_TOKEN=$(cat "$HOME/.hf_token")\nexport HF_TOKEN\n',
)
def _secret(script: Script, facts: Facts) -> Found:
    named = (
        r"\b\w*(?:TOKEN|API_KEY|APIKEY|SECRET|SECRET_KEY|ACCESS_KEY|PASSWORD)=['\"]?([^\s'\"$]+)"
    )
    given = r"(?:wandb\s+login\s+(?:--\S+\s+)*|--token[= ]|login\s+--token\s+)['\"]?([\w-]+)"
    for command in script.commands:
        for pattern in (named, given):
            found = command.match(pattern)
            if found and _is_secret(found[1]):
                yield command.line, found[0].partition("=")[0].strip()[:40]
                break


def _is_secret(value: str) -> bool:
    known = re.match(r"(hf_|sk-|ghp_|gho_|xox|AKIA)\w", value)
    letters_and_digits = re.search(r"[A-Za-z]", value) and re.search(r"\d", value)
    long = len(value) >= 16 and re.fullmatch(r"[\w+/=.-]+", value)
    return bool((known or (long and letters_and_digits)) and not re.search(_NO_SECRET, value))
