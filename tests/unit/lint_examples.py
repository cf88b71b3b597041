"""For each rule about batch scripts one in which it finds a fault, and one in which it does not."""

from labcode.slurm.lint.rule import Facts

FACTS = {
    "S43": Facts(world_size=8),
    "S47": Facts(max_minutes=1440),
}

EXAMPLES = {
    "S01": (
        "#!/bin/bash\n# SBATCH --nodes=2\n",
        "#!/bin/bash\n#SBATCH --nodes=2\n",
    ),
    "S02": (
        "#!/bin/bash\nset -e\n#SBATCH --time=10\n",
        "#!/bin/bash\n#SBATCH --time=10\nset -e\n",
    ),
    "S03": (
        "#SBATCH --nodes=2\nhostname\n",
        "#!/bin/bash\n#SBATCH --nodes=2\nhostname\n",
    ),
    "S04": (
        "#!/bin/bash\n#SBATCH --gpu-per-node=4\n",
        "#!/bin/bash\n#SBATCH --gpus-per-node=4\n",
    ),
    "S05": (
        "#!/bin/bash\n#SBATCH --time=10\n#SBATCH -t 20\n",
        "#!/bin/bash\n#SBATCH --time=20\n",
    ),
    "S06": (
        "#!/bin/bash\n#SBATCH --output=$HOME/logs/%x-%j.out\n",
        "#!/bin/bash\n#SBATCH --output=logs/%x-%j.out\n",
    ),
    "S08": (
        "#!/bin/bash\n#SBATCH --nodes=2\nsrun hostname\n",
        "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --time=00:10:00\nsrun hostname\n",
    ),
    "S09": (
        "#!/bin/bash\n#SBATCH --time=2h\n",
        "#!/bin/bash\n#SBATCH --time=2:00:00\n",
    ),
    "S11": (
        "#!/bin/bash\n#SBATCH --array=0-3\n#SBATCH --output=%x-%A.out\n",
        "#!/bin/bash\n#SBATCH --array=0-3\n#SBATCH --output=%x-%A_%a.out\n",
    ),
    "S12": (
        "#!/bin/bash\n#SBATCH --requeue\n#SBATCH --output=%x-%j.out\n",
        "#!/bin/bash\n#SBATCH --requeue\n#SBATCH --open-mode=append\n#SBATCH --output=%x-%j.out\n",
    ),
    "S14": (
        "#!/bin/bash\n#SBATCH --signal=USR1@60\ntrap save USR1\n",
        "#!/bin/bash\n#SBATCH --signal=B:USR1@60\ntrap save USR1\n",
    ),
    "S15": (
        "#!/bin/bash\n#SBATCH --signal=B:USR1@60\nsrun python train.py\n",
        "#!/bin/bash\n#SBATCH --signal=B:USR1@60\ntrap save USR1\nsrun python train.py &\nwait\n",
    ),
    "S16": (
        "#!/bin/bash\n#SBATCH --signal=B:USR1@60\n#SBATCH --time=1\ntrap save USR1\n",
        "#!/bin/bash\n#SBATCH --signal=B:USR1@60\n#SBATCH --time=10\ntrap save USR1\n",
    ),
    "S18": (
        "#!/bin/bash\n#SBATCH --nodes=2 --gpus-per-node=2\n#SBATCH --ntasks=4\n",
        "#!/bin/bash\n#SBATCH --nodes=2 --gpus-per-node=2\n#SBATCH --ntasks-per-node=2\n",
    ),
    "S20": (
        "#!/bin/bash\nsrun --kill-on-bad-exit=1 python train.py\necho done\n",
        "#!/bin/bash\nset -euo pipefail\nsrun --kill-on-bad-exit=1 python train.py\necho done\n",
    ),
    "S21": (
        "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\nsrun python train.py\n",
        "#!/bin/bash\n"
        "#SBATCH --nodes=2\n"
        "#SBATCH --ntasks-per-node=1\n"
        "srun --kill-on-bad-exit=1 python train.py\n",
    ),
    "S22": (
        "#!/bin/bash\n"
        "#SBATCH --nodes=2\n"
        "#SBATCH --ntasks-per-node=1\n"
        "torchrun --nnodes=2 train.py\n",
        "#!/bin/bash\n"
        "#SBATCH --nodes=2\n"
        "#SBATCH --ntasks-per-node=1\n"
        "srun torchrun --nnodes=2 --rdzv-endpoint=$HEAD:$PORT train.py\n",
    ),
    "S23": (
        "#!/bin/bash\n"
        "#SBATCH --nodes=2\n"
        "#SBATCH --ntasks-per-node=1\n"
        "srun torchrun --standalone --nproc-per-node=2 train.py\n",
        "#!/bin/bash\n"
        "#SBATCH --nodes=2\n"
        "#SBATCH --ntasks-per-node=1\n"
        'srun torchrun --nnodes="$SLURM_NNODES" --nproc-per-node=2 train.py\n',
    ),
    "S24": (
        "#!/bin/bash\n#SBATCH --ntasks-per-node=4\nsrun torchrun --nproc-per-node=4 train.py\n",
        "#!/bin/bash\n#SBATCH --ntasks-per-node=1\nsrun torchrun --nproc-per-node=4 train.py\n",
    ),
    "S25": (
        "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\nexport MASTER_ADDR=gpu017\n",
        "#!/bin/bash\n"
        "#SBATCH --nodes=2\n"
        "#SBATCH --ntasks-per-node=1\n"
        'HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
        'export MASTER_ADDR="$HEAD"\n',
    ),
    "S26": (
        "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\nexport MASTER_PORT=29500\n",
        "#!/bin/bash\n"
        "#SBATCH --nodes=2\n"
        "#SBATCH --ntasks-per-node=1\n"
        "export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))\n",
    ),
    "S27": (
        "#!/bin/bash\n#SBATCH --signal=B:USR1@60\ntrap save USR1\nsrun -K python train.py\n",
        "#!/bin/bash\n"
        "#SBATCH --signal=B:USR1@60\n"
        "trap save USR1\n"
        "srun -K python train.py &\n"
        "wait $!\n",
    ),
    "S28": (
        "#!/bin/bash\n"
        "#SBATCH --signal=B:USR1@60\n"
        "trap 'scancel --signal=USR1 $SLURM_JOB_ID' USR1\n"
        "srun torchrun train.py &\n"
        "wait\n",
        "#!/bin/bash\n"
        "#SBATCH --signal=B:USR1@60\n"
        "trap 'scancel --signal=USR1 $SLURM_JOB_ID' USR1\n"
        "(trap '' USR1; exec srun torchrun train.py) &\n"
        "wait\n",
    ),
    "S29": (
        "#!/bin/bash\n"
        "set -euo pipefail\n"
        "#\n"
        "srun -K python -m labcode.train gpt_tiny &\n"
        'wait || scontrol requeue "$SLURM_JOB_ID"\n',
        "#!/bin/bash\n"
        "set -euo pipefail\n"
        "#\n"
        "srun -K python -m labcode.train gpt_tiny --train.out runs/a --checkpoint.resume &\n"
        'wait || scontrol requeue "$SLURM_JOB_ID"\n',
    ),
    "S35": (
        "#!/bin/bash\n#SBATCH --cpus-per-task=8\nsrun -K python train.py\n",
        "#!/bin/bash\n"
        "#SBATCH --cpus-per-task=8\n"
        'srun -K --cpus-per-task="$SLURM_CPUS_PER_TASK" python train.py\n',
    ),
    "S40": (
        "#!/bin/bash\n"
        "#SBATCH --nodes=2\n"
        "#SBATCH --ntasks-per-node=4\n"
        "#SBATCH --gpus-per-node=2\n"
        "srun -K python train.py\n",
        "#!/bin/bash\n"
        "#SBATCH --nodes=2\n"
        "#SBATCH --ntasks-per-node=2\n"
        "#SBATCH --gpus-per-node=2\n"
        "srun -K python train.py\n",
    ),
    "S41": (
        "#!/bin/bash\n"
        "#SBATCH --nodes=2\n"
        "#SBATCH --ntasks-per-node=2\n"
        "#SBATCH --gpus-per-node=4\n"
        "srun -K python train.py\n",
        "#!/bin/bash\n"
        "#SBATCH --nodes=2\n"
        "#SBATCH --ntasks-per-node=4\n"
        "#SBATCH --gpus-per-node=4\n"
        "srun -K python train.py\n",
    ),
    "S43": (
        "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=2\nsrun -K python train.py\n",
        "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4\nsrun -K python train.py\n",
    ),
    "S46": (
        "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n"
        "export NCCL_P2P_DISABLE=1\nexport NCCL_SHM_DISABLE=1\n",
        "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\nexport NCCL_DEBUG=INFO\n",
    ),
    "S47": (
        "#!/bin/bash\n#SBATCH --time=2-00:00:00\n",
        "#!/bin/bash\n#SBATCH --time=12:00:00\n",
    ),
    "S51": (
        "#!/bin/bash\n"
        "#SBATCH --signal=B:USR1@60\n"
        "trap 'scancel --signal=USR1 $SLURM_JOB_ID' USR1\n"
        "(trap '' USR1; exec srun torchrun train.py) &\n"
        "wait\n",
        "#!/bin/bash\n"
        "#SBATCH --signal=B:USR1@60\n"
        "trap 'scancel --signal=USR1 $SLURM_JOB_ID' USR1\n"
        'srun bash -c \'trap "" USR1; torchrun train.py & trap "pkill -USR1 -P $!" USR1; '
        "wait $! || wait $!' &\n"
        "wait\n",
    ),
    "S52": (
        "#!/bin/bash\n#SBATCH --requeue\nsrun -K python -m labcode.train gpt_tiny "
        "--checkpoint.resume\n",
        "#!/bin/bash\n#SBATCH --requeue\nsrun -K python -m labcode.train gpt_tiny "
        "--checkpoint.resume --checkpoint.every 100\n",
    ),
    "S53": (
        "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\npython train.py\n",
        "#!/bin/bash\n"
        "#SBATCH --nodes=2\n"
        "#SBATCH --ntasks-per-node=1\n"
        "srun --kill-on-bad-exit=1 python train.py\n",
    ),
    "S55": (
        "#!/bin/bash\n"
        "#SBATCH --nodes=2\n"
        "#SBATCH --ntasks-per-node=1\n"
        "srun torchrun --nnodes=2 --node-rank=$SLURM_NODEID --master-addr=$HEAD train.py\n",
        "#!/bin/bash\n"
        "#SBATCH --nodes=2\n"
        "#SBATCH --ntasks-per-node=1\n"
        "srun bash -c 'torchrun --nnodes=2 --node-rank=$SLURM_NODEID --master-addr=$HEAD "
        "train.py'\n",
    ),
    "S56": (
        "#!/bin/bash\n"
        "#SBATCH --nodes=2\n"
        "#SBATCH --ntasks-per-node=1\n"
        "srun torchrun --nnodes=2 train.py\n",
        "#!/bin/bash\n"
        "#SBATCH --nodes=2\n"
        "#SBATCH --ntasks-per-node=1\n"
        "srun torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:$PORT train.py\n",
    ),
    "S57": (
        "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\nsrun -K python train.py &\n",
        "#!/bin/bash\n"
        "#SBATCH --nodes=2\n"
        "#SBATCH --ntasks-per-node=1\n"
        "srun -K python train.py &\n"
        "wait\n",
    ),
    "S58": (
        "#!/bin/bash\n"
        "#SBATCH --gres=gpu:2\n"
        "export CUDA_VISIBLE_DEVICES=0\n"
        "srun -K python train.py\n",
        "#!/bin/bash\n#SBATCH --gres=gpu:2\nsrun -K python train.py\n",
    ),
    "S59": (
        "#!/bin/bash\n#SBATCH --mem=4\n",
        "#!/bin/bash\n#SBATCH --mem=4G\n",
    ),
    "S60": (
        "#!/bin/bash\n#SBATCH --export=HF_HOME\n",
        "#!/bin/bash\n#SBATCH --export=ALL,HF_HOME\n",
    ),
    "S61": (
        "#!/bin/bash\n"
        "#SBATCH --nodes=2\n"
        "#SBATCH --ntasks-per-node=1\n"
        "export MASTER_ADDR=$SLURM_JOB_NODELIST\n",
        "#!/bin/bash\n"
        "#SBATCH --nodes=2\n"
        "#SBATCH --ntasks-per-node=1\n"
        'HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
        'export MASTER_ADDR="$HEAD"\n',
    ),
    "S62": (
        "#!/bin/bash\n#SBATCH --mem=64G\n#SBATCH --mem-per-cpu=4G\n",
        "#!/bin/bash\n#SBATCH --mem-per-cpu=4G\n",
    ),
    "S63": (
        "#!/bin/bash\n"
        "#SBATCH --ntasks-per-node=8\n"
        "#SBATCH --gpus-per-task=1\n"
        "srun -K python train.py\n",
        "#!/bin/bash\n"
        "#SBATCH --ntasks-per-node=8\n"
        "#SBATCH --gpus-per-node=8\n"
        "srun -K python train.py\n",
    ),
    "S64": (
        "#!/bin/bash\n#SBATCH --signal=USR1@60\npython train.py\n",
        "#!/bin/bash\n#SBATCH --signal=USR1@60\nsrun python train.py\n",
    ),
    "S65": (
        "#!/bin/bash\n"
        "#SBATCH --array=0-3 --requeue --open-mode=append\n"
        'srun -K python train.py || scontrol requeue "$SLURM_ARRAY_JOB_ID"\n',
        "#!/bin/bash\n"
        "#SBATCH --array=0-3 --requeue --open-mode=append\n"
        "srun -K python train.py || scontrol requeue "
        '"${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"\n',
    ),
    "S66": (
        "#!/bin/bash\n"
        "#SBATCH --nodes=1\n"
        "#SBATCH hetjob\n"
        "#SBATCH --nodes=2\n"
        "srun -K python train.py\n",
        "#!/bin/bash\n"
        "#SBATCH --nodes=1\n"
        "#SBATCH hetjob\n"
        "#SBATCH --nodes=2\n"
        "srun -K --het-group=0,1 python train.py\n",
    ),
    "S67": (
        "#!/bin/bash\n#SBATCH --nodes=2\nset -u\nexport OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK\n",
        "#!/bin/bash\n"
        "#SBATCH --nodes=2\n"
        "#SBATCH --cpus-per-task=4\n"
        "set -u\n"
        "export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK\n",
    ),
    "S68": (
        "#!/bin/bash\n"
        "#SBATCH --nodes=2\n"
        "#SBATCH --ntasks-per-node=1\n"
        "srun -K --nodes=4 python train.py\n",
        "#!/bin/bash\n"
        "#SBATCH --nodes=2\n"
        "#SBATCH --ntasks-per-node=1\n"
        "srun -K --nodes=2 python train.py\n",
    ),
    "S69": (
        "#!/bin/bash\nsrun nvidia-smi -l 5 &\nsrun python train.py\n",
        "#!/bin/bash\nsrun --overlap nvidia-smi -l 5 &\nsrun --overlap python train.py\n",
    ),
    "S70": (
        "#!/bin/bash\n"
        "#SBATCH --nodes=2 --ntasks-per-node=8\n"
        "srun -K --ntasks-per-node=1 python a.py\n",
        "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=8\nsrun -K --ntasks=2 python a.py\n",
    ),
    "S71": (
        "#!/bin/bash\n"
        "#SBATCH --signal=B:USR1@60\n"
        "trap 'scancel --signal=USR1 $SLURM_JOB_ID' USR1\n"
        "srun bash -c 'cd run; python train.py; echo end' &\n"
        "wait\n",
        "#!/bin/bash\n"
        "#SBATCH --signal=B:USR1@60\n"
        "trap 'scancel --signal=USR1 $SLURM_JOB_ID' USR1\n"
        "srun bash -c 'cd run; exec python train.py' &\n"
        "wait\n",
    ),
    "S72": (
        "#!/bin/bash\n#SBATCH --nodes=1 --exclusive -c 8\nsrun -K -c 8 python a.py\n",
        "#!/bin/bash\n#SBATCH --nodes=1 --exclusive -c 8\nsrun -K -n 1 -c 8 python a.py\n",
    ),
    "S73": (
        "#!/bin/bash\nmodule load cuda\nconda activate env\npython a.py\n",
        "#!/bin/bash\nsource /opt/conda/etc/profile.d/conda.sh\nconda activate env\npython a.py\n",
    ),
    "S74": (
        "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=1\nsrun -K mpirun python a.py\n",
        "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=1\nmpirun python a.py\n",
    ),
    "S75": (
        "#!/bin/bash\nsrun --container-image=a.sqsh bash -c 'scontrol requeue $SLURM_JOB_ID'\n",
        "#!/bin/bash\nsrun --container-image=a.sqsh python a.py\nscontrol requeue $SLURM_JOB_ID\n",
    ),
}
