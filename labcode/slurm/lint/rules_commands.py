"""Rules about the body of a batch script: how ranks are started, how they meet, how they end."""

import re

from labcode.slurm.lint.parse import Script
from labcode.slurm.lint.rule import Facts, Found, Rule, collector, commands_with

RULES, rule = collector()
_HEAD = "#!/bin/bash\nset -euo pipefail\n"
_TWO = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n"
_HOMES = r"(?<![\w.$}])/(home|Users|global/homes/\w|users|gpfs/home|u)/\w[\w.-]*/"
_RANKS = r"(python|torchrun|torch\.|apptainer|singularity|shifter|bash|\[@\])"


@rule(
    "S20",
    "no strict mode: set -euo pipefail after the directives",
    "the job's state is that of the last command: a failed srun followed by an echo ends as "
    "COMPLETED",
    "#!/bin/bash\nsrun --kill-on-bad-exit=1 python train.py\necho done\n",
    "#!/bin/bash\nset -euo pipefail\nsrun --kill-on-bad-exit=1 python train.py\necho done\n",
)
def _strict(script: Script, facts: Facts) -> Found:
    exits = script.found(r"^set\s.*-\w*e") or re.match(r"#!.*bash.* -\w*e", script.lines[0])
    if script.commands and not (exits and script.found(r"^set\s.*pipefail")):
        yield script.commands[0].line, "set -e and pipefail are not both there"


@rule(
    "S21",
    "srun without --kill-on-bad-exit=1",
    "when one rank dies the others wait for it until the time limit, on nodes that are paid for",
    _HEAD + "srun python train.py\n",
    _HEAD + "srun --kill-on-bad-exit=1 python train.py\n",
)
def _kill(script: Script, facts: Facts) -> Found:
    if "SLURM_KILL_BAD_EXIT=1" in script.text:
        return
    for command in script.sruns:
        listed = command.has(r"\[@\]") and script.found(r"kill-on-bad-exit")
        told = listed or command.has(r"--kill-on-bad-exit|\s-K\b")
        if command.has(_RANKS) and not told:
            yield command.line, command.text[:60]


@rule(
    "S22",
    "the ranks start on the first node alone: start them through srun",
    "a batch script runs on one node; torchrun or python without srun leaves the others idle, and "
    "the launch waits for them",
    _TWO + "torchrun --nnodes=2 train.py\n",
    _TWO + "srun torchrun --nnodes=2 train.py\n",
)
def _first_node(script: Script, facts: Facts) -> Found:
    if not script.multi_node:
        return
    for command in script.torchruns:
        listed = command.has(r"^\w+\+?=\(") or script.found(r"srun\s.*(\[@\]|\$\w)")
        started = command in script.sruns or command.has(r"^(mpirun|mpiexec)")
        if not listed and not started:
            yield command.line, command.text[:60]


@rule(
    "S23",
    "torchrun is told of another number of nodes than the job has",
    "--standalone or --nnodes=1 trains one model on each node, and nobody notices but the loss",
    _TWO + "srun torchrun --standalone --nproc-per-node=2 train.py\n",
    _TWO + 'srun torchrun --nnodes="$SLURM_NNODES" --nproc-per-node=2 train.py\n',
)
def _nnodes(script: Script, facts: Facts) -> Found:
    nodes = script.number("nodes") or 1
    for command in script.torchruns:
        said = re.search(r"--nnodes[= ](\d+)(?![:\d])", command.text)
        if nodes > 1 and command.has(r"--standalone\b"):
            yield command.line, f"--standalone on {nodes} nodes"
        elif said and int(said[1]) != nodes:
            yield command.line, f"--nnodes={said[1]} on {nodes} nodes"


@rule(
    "S24",
    "several agents of torchrun on a node: one task per node, --ntasks-per-node=1",
    "srun starts each task of the step: every one is an agent that starts all ranks of the node",
    "#!/bin/bash\n#SBATCH --ntasks-per-node=4\nsrun torchrun --nproc-per-node=4 train.py\n",
    "#!/bin/bash\n#SBATCH --ntasks-per-node=1\nsrun torchrun --nproc-per-node=4 train.py\n",
)
def _agents(script: Script, facts: Facts) -> Found:
    for command in script.torchruns:
        said = re.search(r"--ntasks-per-node[= ](\d+)", command.text)
        tasks = int(said[1]) if said else script.number("ntasks-per-node") or 1
        if tasks > 1 and command in script.sruns:
            yield command.line, f"{tasks} agents on each node"


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
        r"(?:\bMASTER_ADDR=|--rdzv[-_]endpoint[= ]|--master[-_]addr[= ])['\"]?([A-Za-z0-9][\w.-]*)"
    )
    for command in script.commands:
        host = re.search(where, command.text)
        if host and (script.multi_node or host[1] not in ("localhost", "127.0.0.1")):
            yield command.line, host[1]


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
    if caught and script.sruns and not script.found(r"(^|[\s;])wait\b"):
        yield script.sruns[-1].line, script.sruns[-1].text[:60]


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
    if script.torchruns and _passed_on(script) and not ignored:
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
    if script.torchruns and _passed_on(script) and not below:
        yield script.torchruns[0].line, "nothing below it is signalled"


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
    for number, line in enumerate(script.lines, 1):
        found = re.search(_HOMES, line)
        if found and not re.match(r"\s*#(?!SBATCH)", line):
            yield number, found[0]


@rule(
    "S32",
    "a container without a bind: name the scratch folder, --bind /scratch (apptainer) or "
    "--container-mounts (pyxis)",
    "inside the container the folder does not exist, or writes go to a layer that is thrown away "
    "with the job",
    _HEAD + "srun -K apptainer exec image.sif python train.py\n",
    _HEAD + 'srun -K apptainer exec --bind "$SCRATCH" image.sif python train.py\n',
)
def _bind(script: Script, facts: Facts) -> Found:
    by_variable = re.search(r"(APPTAINER|SINGULARITY)_BIND(PATH)?=", script.text)
    for command in script.found(r"\b(apptainer|singularity)\s+(\S+\s+)*?(exec|run)\b"):
        if not by_variable and not command.has(r"\s(--bind|-B|--mount)\b"):
            yield command.line, command.text[:60]
    # pyxis: as directives, or as options of srun
    images = [script.option("container-image"), *script.found(r"--container-image")]
    mounts = script.option("container-mounts") or script.found(r"--container-mounts")
    image = next((place for place in images if place), None)
    if image and not mounts:
        yield image.line, "--container-image without --container-mounts"


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
    if (script.number("cpus-per-task") or 1) == 1 or "SRUN_CPUS_PER_TASK=" in script.text:
        return
    listed = script.found(r"^\w+\+?=\(.*--cpus-per-task")
    for command in script.sruns:
        told = listed or command.has(r"\s(--cpus-per-task|-c)\b")
        if command.has(_RANKS) and not told:
            yield command.line, command.text[:60]


# rules that look for one pattern in the commands
RULES += [
    Rule(
        "S26",
        "a fixed port: derive it from the job's number",
        "two jobs on one node want the same port, and the second dies with EADDRINUSE or joins the "
        "first one's ranks",
        _TWO + "export MASTER_PORT=29500\n",
        _TWO + "export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))\n",
        commands_with(
            r"(?:\bMASTER_PORT=['\"]?|--master[-_]port[= ]['\"]?|--rdzv[-_]endpoint[= ]\S*:)"
            r"\d+\b"
        ),
    ),
    Rule(
        "S31",
        "$USER may be unset: use $(id -un)",
        "SLURM need not set it, and in strict mode an unset variable ends the script",
        _HEAD + "OUT=/scratch/$USER\n",
        _HEAD + 'OUT="/scratch/$(id -un)"\n',
        commands_with(r"\$USER\b|\$\{USER\}"),
    ),
    Rule(
        "S33",
        "the results stay on one node: write to a folder that all nodes share",
        "/tmp, /dev/shm and $TMPDIR belong to a node and are emptied after the job",
        _TWO + "srun -K python -m labcode.train gpt_tiny --train.out /tmp/run\n",
        _TWO + 'srun -K python -m labcode.train gpt_tiny --train.out "$SCRATCH/run"\n',
        commands_with(r"--train\.out[= ]['\"]?(/tmp|/dev/shm|\$\{?(SLURM_)?TMPDIR)\b"),
        warning=True,
    ),
    Rule(
        "S34",
        "a secret in the script: read it from a file that only you can read",
        "SLURM keeps every batch script, and administrators and accounting can show it",
        _HEAD + "export HF_TOKEN=hf_abcdef123456\n",
        _HEAD + 'HF_TOKEN=$(cat "$HOME/.hf_token")\nexport HF_TOKEN\n',
        commands_with(r"\b\w*(TOKEN|API_KEY|SECRET|PASSWORD)=(?=['\"]?[^\s$'\"]{6})"),
    ),
]
