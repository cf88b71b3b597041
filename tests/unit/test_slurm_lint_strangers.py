"""Scripts that people asked about in public, written anew: the lint names the cause that was found.

Each text has the facts of one report alone. What is said to be wrong there is the expectation; the
right scripts are those that the reports ended with, or that a project gives its users.
"""

import pytest

from labcode.slurm.lint.linter import lint

START = "#!/bin/bash\n#SBATCH --time=04:00:00\n"
HEAD = 'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
PORT = "$((20000 + SLURM_JOB_ID % 9999))"
MEET = f"--rdzv-backend=c10d --rdzv-endpoint=$MASTER_ADDR:{PORT}"

# {what happened: (script, rule, words of what is found)}
WRONG = {
    # pytorch-lightning#20391
    "one task starts, two were expected": (
        "#SBATCH --ntasks=1 --nodes=1 --gres=gpu:2 --ntasks-per-node=2\nsrun -K python fit.py\n",
        "S70",
        "2 on each of 1 nodes, and --ntasks=1 are started",
    ),
    # radical.pilot#2109
    "sbatch gives back a node without a task": (
        "#SBATCH --nodes=2 --ntasks=1 --gres=gpu:4\n"
        + f"{HEAD}srun -K torchrun --nnodes=$SLURM_NNODES --nproc-per-node=4 {MEET} t.py\n",
        "S70",
        "--ntasks=1 on 2 nodes: the job has 1 nodes",
    ),
    # seml#177, datatrove#296, aws-parallelcluster#6482
    "one experiment runs as eight copies": (
        "#SBATCH --nodes=1 --exclusive --gres=gpu:1 --cpus-per-task=8\n"
        "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK\nsrun -K python experiment.py\n",
        "S72",
        "srun -K python experiment.py",
    ),
    # optimas#265
    "four simulations run one after the other, for the GPUs": (
        "#SBATCH --nodes=1 --exclusive --gpus-per-node=4 --ntasks-per-node=4\n"
        "for i in 0 1 2 3; do\n    srun -n 1 --exact -c 16 python sim.py $i &\ndone\nwait\n",
        "S69",
        "it takes all GPUs",
    ),
    # DLA-Future#337
    "two steps run one after the other, for the memory": (
        "#SBATCH --ntasks=2 --mem=16G\nsrun -n1 -c4 python a.py &\nsrun -n1 -c4 python b.py &\n"
        "wait\n",
        "S69",
        "it takes all memory",
    ),
    "a loop of one line": (
        "#SBATCH --ntasks=1\nfor i in 0 1; do srun -n 1 python sim.py $i & done; wait\n",
        "S69",
        "it takes all cores",
    ),
    # DeepSpeedExamples#893
    "two launchers, each for both nodes": (
        "#SBATCH --nodes=2 --ntasks-per-node=1 --gres=gpu:8\n"
        "srun -K bash -c 'deepspeed --num_gpus 8 --num_nodes 2 --hostfile hosts pretrain.py'\n",
        "S74",
        "deepspeed",
    ),
    # mmcv#700, ignite#2051, mmengine#1527, pith-train#91
    "no scontrol in the container": (
        "#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=8\n"
        "srun -K --container-image=pytorch.sqsh bash -c 'export MASTER_ADDR=$(scontrol show "
        "hostnames $SLURM_JOB_NODELIST | head -n1); "
        f"torchrun --nnodes=$SLURM_NNODES {MEET} t.py'\n",
        "S75",
        "scontrol",
    ),
    # pyxis#129, pytorch-lightning#21404
    "no requeue out of the container": (
        "#SBATCH --ntasks=1 --gpus-per-node=1 --requeue --open-mode=append\n"
        "srun --container-image=a.sqsh bash -c 'python t.py || scontrol requeue $SLURM_JOB_ID'\n",
        "S75",
        "scontrol",
    ),
    # cactus#843
    "no srun in the image": (
        "#SBATCH --ntasks=1\napptainer exec --nv a.sif bash -c 'srun -n1 python prepare_all.py'\n",
        "S75",
        "srun",
    ),
    # pyxis#55, pyxis#167
    "the whole script is in the container": (
        "#SBATCH --container-image=a.sqsh --nodes=2 --ntasks-per-node=8 --gpus-per-node=8\n"
        "srun -K python t.py\n",
        "S75",
        "--container-image: this script is in it",
    ),
    # conda#8536, conda#9193, conda#13002, marbits-public#78, veba#195
    "conda works at the prompt and not in the job": (
        "#SBATCH --ntasks=1 --gres=gpu:1\nmodule load cuda\nconda activate env\npython t.py\n",
        "S73",
        "conda activate env",
    ),
    # pytorch-lightning#18950, AdaFace#124, lightning-pose#220
    "four tasks and one process": (
        "#SBATCH --nodes=1 --ntasks-per-node=4 --gres=gpu:4\npython fit.py --gpus 4\n",
        "S53",
        "python fit.py --gpus 4",
    ),
    # awsome-distributed-ai#71
    "the number of GPUs has a type": (
        "#SBATCH --nodes=1 --ntasks-per-node=1 --gpus-per-node=a100:4\n"
        "torchrun --standalone --nproc-per-node=$SLURM_GPUS_PER_NODE t.py\n",
        "S67",
        "SLURM_GPUS_PER_NODE is a100:4",
    ),
    # nccl-tests#300
    "one GPU for each task, by its resources": (
        "#SBATCH --nodes=1 --ntasks=2 --tres-per-task=gres/gpu:a100:1\nsrun -K python reduce.py\n",
        "S63",
        "2 tasks, each sees 1 of them",
    ),
    # gpt-neox#1069
    "an underscore in an option": (
        "#SBATCH --nodes=2 --ntasks_per_node=4\nsrun -K python t.py\n",
        "S04",
        "did you mean --ntasks-per-node?",
    ),
    # a public script of vLLM on two nodes
    "letters of SBATCH in another order": (
        "#SBTACH --mem=100G\n#SBATCH --ntasks=1\nsrun python t.py\n",
        "S01",
        "#SBTACH --mem=100G",
    ),
    "GPUs of the job that are fewer than those of its tasks": (
        "#SBATCH --nodes=2 --gpus=4 --ntasks-per-node=1 --gpus-per-task=4\nsrun -K python t.py\n",
        "S62",
        "2 tasks with 4 have 8",
    ),
}
RIGHT = {
    # accelerate#1645, what worked at last
    "agents one by one, each with its node": "#SBATCH --nodes=2 --ntasks-per-node=1 --gres=gpu:2\n"
    + HEAD
    + "for rank in 0 1; do\nsrun -K -N 1 -n 1 --gres=gpu:2 --exclusive -w ${nodes[rank]} bash -c "
    + '"accelerate launch --num_machines 2 --main_process_ip=$MASTER_ADDR '
    + f'--main_process_port {PORT} --machine_rank $rank t.py" &\ndone\nwait\n',
    # docs.nersc.gov, single-GPU tasks in parallel; fractal-server#572
    "steps that say all they take": "#SBATCH -N 1 --ntasks-per-node=4 --gpus-per-node=4\n"
    "for i in 0 1 2 3; do\n"
    "srun --exact -n 1 --gpus-per-task 1 -c 1 --mem-per-gpu=55G python sim.py $i &\ndone\nwait\n",
    "a loop of one line that waits": "#SBATCH --ntasks=1\n"
    "for i in 0 1; do srun -n 1 python a.py & wait; done\n",
    "a step after the other in a loop": "#SBATCH --ntasks=1\nfor i in 0 1 2 3; do\n"
    "srun -n 1 python sim.py $i &\nwait $!\ndone\n",
    # cloudai#729: taken beside -N by the SLURM there, passed over by 22.05
    "tasks on each node of a step that says its nodes": "#SBATCH -N 2 --ntasks-per-node=8\n"
    "srun -N2 --ntasks-per-node=1 mkdir -p /tmp/x\nsrun -K python t.py\n",
    "as many tasks as the nodes have": "#SBATCH --nodes=2 --ntasks=8 --ntasks-per-node=4\n"
    "srun -K python t.py\n",
    "the address from outside the container": "#SBATCH --nodes=2 --ntasks-per-node=1\n"
    f"{HEAD}srun -K --container-image=a.sqsh bash -c "
    f"'torchrun --nnodes=$SLURM_NNODES --nproc-per-node=8 {MEET} t.py'\n",
    "filled in outside, before the container starts": "#SBATCH --nodes=2 --ntasks-per-node=1\n"
    'srun -K apptainer exec a.sif bash -c "python t.py $(scontrol show hostnames | head -1)"\n',
    "one program in the container": "#SBATCH --container-image=a.sqsh --gpus=1\npython t.py\n",
    "conda by its hook": 'eval "$(conda shell.bash hook)"\nconda activate env\npython t.py\n',
    "conda of a module": "module load miniconda/3\nconda activate env\npython t.py\n",
    "the old way of conda": "source activate env\npython t.py\n",
    # rwth-i6, cedar: tasks are how the site counts cores
    "tasks for cores, beside one GPU": "#SBATCH --ntasks-per-node=4 --gpus-per-node=1\n"
    "python t.py\n",
    "the number of GPUs of this node": "#SBATCH --ntasks-per-node=1 --gpus-per-node=a100:4\n"
    "torchrun --standalone --nproc-per-node=$SLURM_GPUS_ON_NODE t.py\n",
    "one copy on a whole node": "#SBATCH --nodes=1 --ntasks=1 --exclusive -c 8\n"
    "srun -c 8 python t.py\n",
    "deepspeed for one node, on each": "#SBATCH --nodes=2 --ntasks-per-node=1\n"
    "srun -K bash -c 'deepspeed --no_ssh --num_nodes 2 --hostfile hosts --node_rank "
    f"$SLURM_NODEID --master_addr $HEAD --master_port {PORT} t.py'\n",
    # torch/distributed/elastic/multiprocessing/api.py
    "torchrun hands TERM to its ranks": "#SBATCH --ntasks=1 --signal=TERM@300\n"
    "srun torchrun --standalone --nproc-per-node=8 t.py\n",
    "torchrun is told to hand on USR1 as well": "#SBATCH --ntasks=1 --signal=USR1@30\n"
    "export TORCHELASTIC_SIGNALS_TO_HANDLE=SIGTERM,SIGUSR1\n"
    "srun torchrun --standalone --nproc-per-node=8 t.py\n",
    # torchtitan, with what its README asks for
    "one agent on each node": "#SBATCH --ntasks=4 --nodes=4 --gpus-per-task=8 --cpus-per-task=96\n"
    "nodes=( $( scontrol show hostnames $SLURM_JOB_NODELIST ) )\n"
    'head_ip=$(srun --nodes=1 --ntasks=1 -w "${nodes[0]}" hostname --ip-address)\n'
    "export FI_PROVIDER=efa NCCL_SOCKET_IFNAME=eth0,en,eth,em,bond\n"
    "srun -K -c 96 torchrun --nnodes 4 --nproc_per_node 8 --rdzv_backend c10d "
    f'--rdzv_endpoint "$head_ip:{PORT}" -m torchtitan.train\n',
    # the shell on each node, of stas00/ml-engineering
    "ranks filled in on the nodes": "#SBATCH --nodes=2 --ntasks-per-node=8 --gres=gpu:8\n"
    'SRUN_ARGS=" --wait=60 --kill-on-bad-exit=1 --jobid $SLURM_JOB_ID "\nCMD="python -u t.py"\n'
    "set -eo pipefail\n"
    'srun $SRUN_ARGS bash -c "RANK=\\$SLURM_PROCID LOCAL_RANK=\\$SLURM_LOCALID $CMD" | tee log\n',
    # a Ray cluster of vLLM
    "servers on nodes of their own": "#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=4\n"
    'srun -N 1 -n 1 -w "$head" ray start --head --block &\n'
    'srun -N 1 -n 1 --exclude "$head" ray start --address $head:6379 --block &\nsleep 20\n'
    "python serve.py\n",
}


@pytest.mark.parametrize("name", WRONG)
def test_the_cause_that_was_found_is_named(name):
    text, rule, words = WRONG[name]
    found = [problem.message for problem in lint(START + text) if problem.rule == rule]
    assert len(found) == 1, found
    assert words in found[0]


@pytest.mark.parametrize("name", RIGHT)
def test_nothing_is_said_about_a_script_that_works(name):
    assert [str(problem) for problem in lint(START + RIGHT[name])] == []
