"""Patterns of public batch scripts, each rewritten as the smallest script that has it.

FIRES: what the rules must see. SILENT: what looks like a fault and is none; each was once reported.
PUBLIC is the trial from which they come: links, findings and judgements, measured once.
"""

from collections import Counter
from pathlib import Path

import pytest
import yaml

from labcode.slurm.lint.linter import lint
from labcode.slurm.lint.rules import RULES

PUBLIC = Path(__file__).with_name("lint_public_scripts.yaml")
JUDGEMENTS = ("right", "arguable", "wrong", "missed")
ONE = "#!/bin/bash\n#SBATCH --time=10 --gpus-per-node=2\n"
TWO = "#!/bin/bash\n#SBATCH --time=10 --nodes=2 --ntasks-per-node={tasks}\n"
AGENTS = TWO.format(tasks=1)
RANKS = TWO.format(tasks=2)
MEET = "--rdzv-backend=c10d --rdzv-endpoint=$HEAD:$((20000 + SLURM_JOB_ID % 9999))"
RUN = f"torchrun --nnodes=$SLURM_NNODES --nproc-per-node=2 {MEET} train.py"

FIRES = {
    "accelerate without srun": (AGENTS + "accelerate launch --num_machines 2 train.py\n", ["S22"]),
    "deepspeed without srun": (AGENTS + "deepspeed --num_nodes 2 train.py\n", ["S22"]),
    "torchrun of SLURM_NNODES without srun": (
        "#!/bin/bash\n#SBATCH --time=10\ntorchrun --nnodes=$SLURM_NNODES --standalone t.py\n",
        ["S22"],
    ),
    "python without srun": (AGENTS + "python train.py\n", ["S53"]),
    "python without srun, the first host asked by srun": (
        AGENTS + 'IP=$(srun -N1 -n1 -w "$H" hostname)\npython train.py\n',
        ["S53"],
    ),
    "one agent for two nodes": (AGENTS + f"srun -n1 {RUN}\n", ["S54"]),
    "one agent, nnodes as a number": (
        AGENTS + f"srun --ntasks 1 {RUN.replace('$SLURM_NNODES', '2')}\n",
        ["S54"],
    ),
    "no --nnodes": (AGENTS + "srun -K torchrun --nproc-per-node=2 train.py\n", ["S23"]),
    "node rank too early": (
        AGENTS + "srun -K torchrun --nnodes 2 --node_rank=$SLURM_NODEID --master_addr=$H t.py\n",
        ["S55"],
    ),
    "node rank too early, in double quotes": (
        AGENTS
        + 'srun -K bash -c "torchrun --nnodes 2 --node_rank $SLURM_PROCID --master_addr $H t.py"\n',
        ["S55"],
    ),
    "node rank too early, by a variable": (
        AGENTS
        + "NODE_RANK=$SLURM_NODEID\n"
        + "srun -K torchrun --nnodes 2 --node_rank=$NODE_RANK --master_addr=$H t.py\n",
        ["S55"],
    ),
    "rank exported by the batch script": (
        RANKS + "export RANK=$SLURM_PROCID\nsrun -K python train.py\n",
        ["S55"],
    ),
    "no rendezvous": (AGENTS + "srun -K torchrun --nnodes=2 train.py\n", ["S56"]),
    "an address and no node rank": (
        AGENTS + "srun -K torchrun --nnodes=2 --master_addr=$HEAD train.py\n",
        ["S56"],
    ),
    "nobody waits": (RANKS + "srun -K python train.py &\necho started\n", ["S57"]),
    "GPUs by hand": (
        ONE + "export CUDA_VISIBLE_DEVICES=0\nsrun -n2 -K python train.py\n",
        ["S58"],
    ),
    "another GPU than the job's": (
        ONE + "CUDA_VISIBLE_DEVICES=3 python train.py\n",
        ["S58"],
    ),
    "megabytes": ("#!/bin/bash\n#SBATCH --time=10 --mem=4\n", ["S59"]),
    "megabytes for a CPU": ("#!/bin/bash\n#SBATCH --time=10 --mem-per-cpu=4\n", ["S59"]),
    "export without ALL": ("#!/bin/bash\n#SBATCH --time=10 --export=HOME,FOO=1\n", ["S60"]),
    "export of srun without ALL": (RANKS + "srun -K --export=FOO=1 python t.py\n", ["S60"]),
    "fixed port of accelerate": (
        ONE + "accelerate launch --main_process_port 29500 train.py\n",
        ["S26"],
    ),
    "fixed port as a default": (ONE + ': "${MASTER_PORT:=12356}"\n', ["S26"]),
    "fixed port as a default of an export": (
        ONE + 'export MASTER_PORT="${MASTER_PORT:-29555}"\n',
        ["S26"],
    ),
    "fixed port by a variable": (
        AGENTS + f"P=29400\nsrun -K {RUN.replace('$((20000 + SLURM_JOB_ID % 9999))', '$P')}\n",
        ["S26"],
    ),
    "all nodes as the address": (
        RANKS + 'export MASTER_ADDR="${SLURM_JOB_NODELIST}"\n',
        ["S61"],
    ),
    "all nodes as the end of a rendezvous": (
        AGENTS + f"srun -K {RUN.replace('$HEAD', '$SLURM_NODELIST')}\n",
        ["S61"],
    ),
    "the default port of the rendezvous": (
        AGENTS
        + "srun -K torchrun --nnodes 2 --rdzv_backend c10d --rdzv_endpoint $(hostname) t.py\n",
        ["S26"],
    ),
    "the default port of torchrun": (ONE + "torchrun --nproc-per-node=2 train.py\n", ["S26"]),
    "home on a cluster's own place": (ONE + "cd /admin/home-alice/code\n", ["S30"]),
    "home, private": (ONE + "source /private/home/alice/env\n", ["S30"]),
    "home on a shared disk": (ONE + "source /fsx/alice/miniconda/bin/activate\n", ["S30"]),
    "cpus, with bash -c": (
        RANKS.replace("--nodes", "--cpus-per-task=4 --nodes") + "srun -K bash -c 'python t.py'\n",
        ["S35"],
    ),
    "cpus and bad exit, with a command in a variable": (
        RANKS.replace("--nodes", "--cpus-per-task=4 --nodes")
        + 'CMD="python t.py \\\n    --x"\nsrun $CMD\n',
        ["S21", "S35"],
    ),
    "bad exit, the program in an array": (
        RANKS + "declare -a ARGS=(\n    --container-image $I # the image\n    "
        '--container-mounts $M\n)\nsrun -l "${ARGS[@]}" python t.py\n',
        ["S21"],
    ),
    "bad exit, behind another command": (RANKS + "clear; srun python t.py 2>&1\n", ["S21"]),
    "cpus, with a program of its own": (
        ONE + "#SBATCH -c 8\nsrun acorn train $@\n",
        ["S35"],
    ),
    "the default port, whatever MASTER_PORT says": (
        ONE + "export MASTER_PORT=$RANDOM\ntorchrun --nproc-per-node=2 train.py\n",
        ["S26"],
    ),
    "state of tee": (RANKS + "srun -K python t.py 2>&1 | tee log\n", ["S20"]),
    "state of a later command": (RANKS + "srun -K python t.py\nmv a b\n", ["S20"]),
    "state of a later launch": (RANKS + "srun -K python a.py\nsrun -K python b.py\n", ["S20"]),
    "letters of a directive": ("#!/bin/bash\n#SBATCh --nodes=1\n#SBATCH --time=1\n", ["S01"]),
    "option of srun": ("#!/bin/bash\n#SBATCH --time=10 --cpu-bind=none\n", ["S04"]),
    "agents for each rank": (RANKS + f"srun -K {RUN}\n", ["S24"]),
    "secret on a command line": (
        ONE + "wandb login 0123456789abcdef0123456789abcdef01234567\n",
        ["S34"],
    ),
}

SILENT = {
    "port from the job's number": 'export MASTER_PORT="1${SLURM_JOB_ID:0-4}"\n',
    "port by expr": "export MASTER_PORT=$(expr 10000 + $(echo -n $SLURM_JOBID | tail -c 4))\n",
    "port by chance": "export MASTER_PORT=$RANDOM\ntorchrun --master_port $MASTER_PORT t.py\n",
    "port by the first of two": "torchrun --standalone --nproc-per-node=2 train.py\n",
    "a port that nobody uses": "MASTER_PORT=15000\ntorchrun --standalone train.py\n",
    "a trap in a file that is read": "#SBATCH --signal=B:USR1@60\nsource lib/requeue.sh\n",
    "usage in a comment": "# sbatch --nodes=2 this.sh\n",
    "a directive that is switched off": "##SBATCH --nodes=2\n#####SBATCH -p new\n",
    "an alternative in a comment": "# SBATCH --time=20\n",
    "beginning of an option": "#SBATCH --err=%j.err --tasks-per-node=1\n",
    "option of a plugin": "#SBATCH --uenv=pytorch/v2 --environment=my.toml --image=a/b:c\n",
    "mail types add up": "#SBATCH --mail-type=BEGIN\n#SBATCH --mail-type=END\n",
    "to be filled in": "#SBATCH --output={{ log }} --nodes={nodes} --account=<account>\n",
    "the list of one node is its name": "#SBATCH --nodes=1\n"
    "export MASTER_ADDR=$SLURM_JOB_NODELIST\n",
    "the list is taken apart": "#SBATCH --nodes=2\n"
    "nodes=($(scontrol show hostnames $SLURM_JOB_NODELIST))\nexport MASTER_ADDR=${nodes[0]}\n",
    "the first of a list with commas": "#SBATCH --nodes=2\n"
    "export MASTER_ADDR=${SLURM_JOB_NODELIST%%,*}\n",
    "one task on each node": "#SBATCH --nodes=4 --ntasks=4\nsrun -K hostname\n",
    "one task": "#SBATCH --ntasks=1\nsrun python train.py\n",
    "megabytes that are meant": "#SBATCH --mem=16000\n",
    "whole node": "#SBATCH --mem=0\n",
    "all and more": "#SBATCH --export=ALL,FOO=1\n",
    "the last command is the launch": "#SBATCH --nodes=2\nmodule load a\nsrun -K python t.py\n",
    "its state is asked for": "srun -K python t.py\nstatus=$?\necho end\nexit $status\n",
    "user of the job": "mkdir -p /scratch/$USER\n",
    "nobody's home": "cd /home/ubuntu/code\nsource /fsx/apps/env\nls /fsx/data/llama\n",
    "steps in the background": "srun -n1 python a.py &\nsrun -n1 python b.py &\nwait\n",
    "a server in the background": "srun -n1 vllm serve m &\nsrun -n1 python client.py\n",
    "a monitor in the background": "nvidia-smi -l 5 &\npython train.py\n",
    "all GPUs of the node": "#SBATCH --gpus-per-node=4\nexport CUDA_VISIBLE_DEVICES=3,2,1,0\n",
    "GPUs divided": "#SBATCH --gres=gpu:2\nCUDA_VISIBLE_DEVICES=0 python a.py &\n"
    "CUDA_VISIBLE_DEVICES=1 python b.py\nwait\n",
    "the program starts the ranks": "#SBATCH --gpus-per-node=8\nsrun -n1 python train.py\n",
    "tasks for a program of one process": "#SBATCH --ntasks-per-node=28\npython train.py\n",
    "flags in a variable": "#SBATCH --nodes=2\nSRUN_ARGS=' --wait=60 --kill-on-bad-exit=1 '\n"
    'CMD="python train.py"\nsrun $SRUN_ARGS bash -c "$CMD"\n',
    "flags that nobody knows": "#SBATCH --nodes=2\nsrun $SRUN_ARGS -u python train.py\n",
    "files are copied": "#SBATCH --nodes=2 --cpus-per-task=4\n"
    "srun --ntasks-per-node=1 bash -c 'mkdir -p /tmp/a && cp -r b /tmp/a'\n",
    "cores by hand": "#SBATCH --nodes=2 --cpus-per-task=7\n"
    "srun -K --cpu-bind=mask_cpu:fe,fe00 python t.py\n",
    "node rank on the nodes": "#SBATCH --nodes=2\n"
    "srun -K bash -c 'torchrun --nnodes 2 --node_rank $SLURM_PROCID --master_addr $H "
    "--master_port $P t.py'\n",
    "node rank escaped": "#SBATCH --nodes=2\n"
    'L="torchrun --nnodes 2 --node_rank \\$SLURM_PROCID --master_addr $H --master_port $P"\n'
    'srun -K bash -c "$L t.py"\n',
    "node rank that nobody reads": f"#SBATCH --nodes=2\nsrun -K {RUN} --x\n".replace(
        "torchrun", "torchrun --node_rank=$SLURM_NODEID"
    ),
    "agents one by one": "#SBATCH --nodes=2\nfor i in 0 1; do\n"
    f"srun -N1 -n1 -w $node $X_ARGS {RUN} &\ndone\nwait\n",
    "ssh to the nodes": "#SBATCH --nodes=2\ndeepspeed --hostfile=hosts train.py\n",
    "accelerate over MPI": "#SBATCH --nodes=2\n"
    "accelerate launch --num_machines 2 --mpirun_hostfile h train.py\n",
    "a driver that starts the steps": "#SBATCH --nodes=2\n"
    "python run.py --slurm-job $SLURM_JOB_ID\n",
    "ray": "#SBATCH --nodes=2\nsrun -n1 -w $a ray start --head --block &\npython train.py\n",
    "no secret": 'export TOKENIZERS_PARALLELISM=false WANDB_API_KEY="your_wandb_api_key_here"\n',
    "bindings by a module": "module load site-singularity-bindings\n"
    "srun -K -n1 singularity run a.sif python t.py --data /scratch/x\n",
    "InfiniBand off where there is none": "export FI_PROVIDER=efa NCCL_IB_DISABLE=1\n",
    "a launcher that is only shown": 'CMD="torchrun t.py"\necho "srun $CMD"\n',
    "text of another script": "cat <<EOF > job.sh\n#SBATCH --mem=4\nsrun python a.py\nEOF\n",
    "sh": "",
}


@pytest.mark.parametrize("name", FIRES)
def test_the_pattern_is_seen_and_nothing_else_is_said(name):
    text, expected = FIRES[name]
    assert sorted({problem.rule for problem in lint(text)}) == expected


@pytest.mark.parametrize("name", SILENT)
def test_nothing_is_said_about_what_only_looks_like_a_fault(name):
    shell = "sh" if name == "sh" else "bash"
    text = f"#!/bin/{shell}\n#SBATCH --time=10\n{SILENT[name]}"
    assert [str(problem) for problem in lint(text)] == []


def test_each_new_rule_has_a_pattern():
    seen = {rule for _, rules in FIRES.values() for rule in rules}
    assert {f"S{number}" for number in range(53, 61)} <= seen


def test_the_table_of_the_trial_adds_up():
    trial = yaml.safe_load(PUBLIC.read_text())
    numbers = {rule.number for rule in RULES}
    links = set()
    for name, told in trial["sets"].items():
        total: Counter[str] = Counter()
        for script in trial["scripts"]:
            if script["set"] != name:
                continue
            links.add(script["link"])
            owner, repository, blob, commit, *_ = script["link"].split("/")[3:]
            assert owner and repository and blob == "blob" and len(commit) == 40
            judged = script["judged"]
            found = Counter({rule: len(lines) for rule, lines in script["findings"].items()})
            assert set(found) <= numbers
            counted = judged["right"] + judged["arguable"] + judged["wrong"]
            assert sum(found.values()) == counted, script["link"]
            total.update({judgement: judged[judgement] for judgement in JUDGEMENTS})
            total["scripts"] += 1
        assert total == Counter(told["after"] | {"scripts": told["scripts"]})
    assert len(links) == len(trial["scripts"]) >= 30
