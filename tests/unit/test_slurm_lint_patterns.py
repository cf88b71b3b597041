"""Patterns of public batch scripts, each rewritten as the smallest script that has it.

FIRES: what the rules must see. SILENT: what looks like a fault and is none.
"""

import pytest

from labcode.slurm.lint.linter import lint
from labcode.slurm.lint.rules import RULES

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
    "one agent for two nodes": (AGENTS + f"srun -n1 {RUN}\n", ["S23"]),
    "one agent, nnodes as a number": (
        AGENTS + f"srun --ntasks 1 {RUN.replace('$SLURM_NNODES', '2')}\n",
        ["S23"],
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
        ONE + "#SBATCH -c 8 --ntasks-per-node=1\nsrun acorn train $@\n",
        ["S35"],
    ),
    "state of tee": (RANKS + "srun -K python t.py 2>&1 | tee log\n", ["S20"]),
    "state of a later command": (RANKS + "srun -K python t.py\nmv a b\n", ["S20"]),
    "state of a later launch": (RANKS + "srun -K python a.py\nsrun -K python b.py\n", ["S20"]),
    "letters of a directive": ("#!/bin/bash\n#SBATCh --nodes=1\n#SBATCH --time=1\n", ["S01"]),
    "option of srun": ("#!/bin/bash\n#SBATCH --time=10 --cpu-bind=none\n", ["S04"]),
    "agents for each rank": (RANKS + f"srun -K {RUN}\n", ["S24"]),
}

FIRES |= {
    "one GPU for each task, by the GPUs": (
        "#!/bin/bash\n#SBATCH --time=10 --gpus=8 --ntasks-per-gpu=1 -N1\nsrun -K python t.py\n",
        ["S63"],
    ),
    "one GPU for each task, by binding": (
        RANKS + "#SBATCH --gres=gpu:2\nsrun -K --gpu-bind=single:1 python t.py\n",
        ["S63"],
    ),
    "one GPU for each task, in the step": (
        RANKS + "#SBATCH --gpus-per-node=2\nsrun -K --gpus-per-task=1 python t.py\n",
        ["S63"],
    ),
    "an agent of four ranks that sees one GPU": (
        "#!/bin/bash\n#SBATCH --time=10 --ntasks=1 --gpus-per-task=1\n"
        "srun torchrun --standalone --nproc-per-node=4 train.py\n",
        ["S40"],
    ),
    "one task that nobody asked for, on four GPUs": (
        "#!/bin/bash\n#SBATCH --time=10 --nodes=4 --gpus-per-node=h100:4\nsrun -K python t.py\n",
        ["S41"],
    ),
    "GPUs of the job, fewer than nodes": (
        "#!/bin/bash\n#SBATCH --time=10 --nodes=4 --gpus=2\n",
        ["S62"],
    ),
    "GPUs for each task, and no number of tasks": (
        "#!/bin/bash\n#SBATCH --time=10 --nodes=2 --gpus-per-task=4\n",
        ["S62"],
    ),
    "cores for each task and for each GPU": (
        ONE + "#SBATCH --cpus-per-gpu=8 -c 4\n",
        ["S62"],
    ),
    "more tasks than the nodes have": (RANKS + "#SBATCH --ntasks=8\n", ["S62"]),
    "the signal of a launcher without srun": (
        ONE + "#SBATCH --signal=SIGTERM@120\ntorchrun --standalone --nproc-per-node=2 t.py\n",
        ["S64"],
    ),
    "the signal, in a container without srun": (
        ONE + "#SBATCH --signal=USR2@90\napptainer exec image.sif python train.py\n",
        ["S64"],
    ),
    "one task cancels the array": (
        "#!/bin/bash\n#SBATCH --time=10 --array=1-8%2\nscancel $SLURM_JOB_ID\n",
        ["S65"],
    ),
    "one task requeues by the number of its job": (
        "#!/bin/bash\n#SBATCH --time=10 --array=1-8 --requeue --open-mode=append\n"
        'scontrol requeue "${SLURM_JOBID}"\n',
        ["S65"],
    ),
    "the first component alone": (
        "#!/bin/bash\n#SBATCH --time=10 -N1\n#SBATCH hetjob\n#SBATCH -N2\nsrun -K python t.py\n",
        ["S66"],
    ),
    "tasks that nobody asked for": (
        "#!/bin/bash\n#SBATCH --time=10 --nodes=2\nexport WORLD_SIZE=$SLURM_NTASKS\n",
        ["S67"],
    ),
    "the node list of a step": (
        RANKS + 'HEAD=$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1)\n',
        ["S67"],
    ),
    "the task of no array": (
        "#!/bin/bash\n#SBATCH --time=10 --nodes=1\npython t.py --seed ${SLURM_ARRAY_TASK_ID}\n",
        ["S67"],
    ),
    "a step with more GPUs": (
        RANKS + "#SBATCH --gpus-per-node=2\nsrun -K --gpus-per-node=4 python t.py\n",
        ["S41", "S68"],
    ),
    "a step with more nodes": (RANKS + "srun -K -N 4 -n 4 python t.py\n", ["S68"]),
    "steps in the background": (
        "#!/bin/bash\n#SBATCH --time=10\nsrun -n1 python a.py &\nsrun -n1 python b.py &\nwait\n",
        ["S69"],
    ),
    "a server in the background": (
        "#!/bin/bash\n#SBATCH --time=10\nsrun -n1 vllm serve m &\nsrun -n1 python client.py\n",
        ["S69"],
    ),
    "a monitor on all nodes": (
        RANKS + "srun --ntasks=2 dcgmi dmon &\nsrun -K python t.py\n",
        ["S69"],
    ),
    "one task for each node, which has two": (
        RANKS + "srun --ntasks-per-node=1 cp -r data /tmp\n",
        ["S70"],
    ),
    "a shell that waits for the program": (
        RANKS
        + "#SBATCH --signal=USR1@90\nsrun -K bash -c 'source env.sh; python t.py; rm -r /tmp/x'\n",
        ["S71"],
    ),
    "torchrun gets the signal of the steps": (
        AGENTS + f"#SBATCH --signal=USR1@90\nsrun -K {RUN}\n",
        ["S28", "S51"],
    ),
    "a trap while python runs": (
        ONE + "#SBATCH --signal=B:TERM@90\ntrap 'touch stop' TERM\npython train.py\n",
        ["S27"],
    ),
    "the rank as a word, filled in too early": (
        RANKS + "srun -K python t.py --rank $SLURM_PROCID --world-size $SLURM_NTASKS\n",
        ["S55"],
    ),
    "the GPU of the first task, for all": (
        RANKS + "export CUDA_VISIBLE_DEVICES=$SLURM_LOCALID\nsrun -K python t.py\n",
        ["S55"],
    ),
    "the nodes of the first component": (
        "#!/bin/bash\n#SBATCH --time=10 -N1\n#SBATCH hetjob\n#SBATCH -N2\n"
        f"srun -K --het-group=0,1 {RUN}\n",
        ["S66"],
    ),
    "one log for all tasks of an array": (
        "#!/bin/bash\n#SBATCH --time=10 --array=0-9 --output=out.log\npython t.py\n",
        ["S11"],
    ),
    "a signal that nobody can catch": (
        ONE + "#SBATCH --signal=B:KILL@60\ntrap 'touch x' KILL\npython t.py &\nwait\n",
        ["S15"],
    ),
    "one GPU that is not counted": (
        RANKS + "#SBATCH --gres=gpu\nsrun -K python t.py\n",
        ["S40"],
    ),
    "line ends of Windows": ("#!/bin/bash\r\n#SBATCH --time=10\r\n", ["S03"]),
    "a requeue that a cluster may refuse": (
        '#!/bin/bash\n#SBATCH --time=10 --open-mode=append\nscontrol requeue "$SLURM_JOB_ID"\n',
        ["S12"],
    ),
    "lo on two nodes": (AGENTS + "export NCCL_SOCKET_IFNAME=lo\n", ["S46"]),
    "a fast path that is switched off": (AGENTS + "export NCCL_IB_DISABLE=1\n", ["S46"]),
}

SILENT = {
    "all GPUs are seen in spite of --gpus-per-task": "#SBATCH --ntasks=4 --gpus-per-task=1\n"
    "srun -K --gpu-bind=none python t.py\n",
    "one task on each node has its own GPUs": "#SBATCH --nodes=2 --ntasks-per-node=1\n"
    f"#SBATCH --gpus-per-task=2\nsrun -K {RUN}\n",
    "the course's training takes the GPU that is there": "#SBATCH --ntasks=4 --gpus-per-task=1\n"
    "srun -K python -m labcode.train gpt_tiny\n",
    "the signal goes to the ranks": "#SBATCH --nodes=2 --ntasks-per-node=2\n"
    "#SBATCH --signal=USR1@90\nsrun -K python t.py\n",
    "srun hands the signal on": "#SBATCH --nodes=2 --ntasks-per-node=2\n"
    "#SBATCH --signal=B:USR1@90\ntrap 'kill -USR1 $step' USR1\nsrun -K python t.py &\nstep=$!\n"
    "wait $step || wait $step\n",
    "the program takes the script's place": "#SBATCH --signal=B:USR1@90\nexec python train.py\n",
    "what mpirun does is not known": "#SBATCH --signal=USR1@90\nmpirun python train.py\n",
    "a shell that the program replaces": "#SBATCH --ntasks=2 --signal=USR1@90\n"
    "srun -K bash -c 'source env.sh; exec python t.py'\n",
    "one task of the array": "#SBATCH --array=0-3 --requeue --open-mode=append\n"
    'scontrol requeue "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"\n',
    "a job without an array": "#SBATCH --requeue --open-mode=append\n"
    'scontrol requeue "$SLURM_JOB_ID"\n',
    "both components": "#SBATCH --nodes=1\n#SBATCH hetjob\n#SBATCH --nodes=2\n"
    "srun -K --het-group=0 python a.py : --het-group=1 python b.py\n",
    "a variable with a default": "#SBATCH --nodes=2\n"
    "export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-4}\n",
    "a variable that is asked for": '#SBATCH --nodes=2\nif [ -n "$SLURM_ARRAY_TASK_ID" ]; then\n'
    "echo $SLURM_ARRAY_TASK_ID\nfi\n",
    "a variable of the tasks, filled in there": "#SBATCH --nodes=2 --ntasks-per-node=2\n"
    "srun -K bash -c 'echo $SLURM_STEP_NODELIST; exec python t.py'\n",
    "a monitor that shares": "#SBATCH --nodes=2 --ntasks-per-node=2\n"
    "srun --overlap --ntasks-per-node=2 nvidia-smi -l 5 &\nsrun -K --overlap python t.py\n",
    "each step on its node": "#SBATCH --nodes=2\nsrun -N1 -n1 python a.py &\n"
    "srun -N1 -n1 python b.py &\nwait\n",
    "one step after the other": "srun -n1 python a.py &\nwait\nsrun -n1 python b.py\n",
    "two branches": "if [ $1 ]; then\nsrun -n1 python a.py &\nelse\nsrun -n1 python b.py &\nfi\n"
    "wait\n",
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
    # the younger ones have theirs in test_slurm_lint_strangers.py
    young = {rule.number for rule in RULES if 53 <= int(rule.number[1:]) < 72}
    assert young <= seen


def test_a_shell_in_a_file_is_read_where_the_file_is_there(tmp_path):
    text = RANKS + "#SBATCH --signal=USR1@90\nsrun -K bash run.sh\n"
    script = tmp_path / "run.sh"
    for lines, rules in (
        ("source env.sh\npython t.py\n", ["S71"]),
        ("source env.sh\nexec python t.py\n", []),
        ("trap 'kill -USR1 $!' USR1\npython t.py &\nwait\n", []),
    ):
        script.write_text(lines)
        assert [problem.rule for problem in lint(text, folder=tmp_path)] == rules
    assert lint(text) == []


def test_a_program_that_takes_device_0_may_have_a_gpu_of_its_own(tmp_path):
    text = "#!/bin/bash\n#SBATCH --time=10 --ntasks=4 --gpus-per-task=1\nsrun -K python fit.py\n"
    program = tmp_path / "fit.py"
    chooses = "local = int(os.environ['SLURM_LOCALID'])\n"
    for line, rules in (
        ("torch.cuda.set_device(local)\n", ["S63"]),
        ('device = torch.device(f"cuda:{local}")\n', ["S63"]),
        ('device = torch.device("cuda", 0)\n', []),
    ):
        program.write_text(chooses + line)
        assert [problem.rule for problem in lint(text, folder=tmp_path)] == rules
