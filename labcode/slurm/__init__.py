"""SLURM for real: what to run, where, the script for it, and a multi-node cluster on one machine to prove it. No torch.

    job         what to run: recipe and overrides, nodes, ranks per node, time
    site        one YAML file per cluster (`slurm/sites/`): account, partition, GPU request, launcher, modules, folders
    render      job and site -> a batch script a person would be glad to read (`templates/`)
    rules lint  numbered rules, each with its reason, for these scripts and anybody's
    client      sbatch, squeue, scontrol, scancel, sinfo, each with a time limit
    submit      submit and follow a job; `local` runs it without SLURM, one agent per emulated node
    nccl        who talks to whom over what, from NCCL's INFO log
    cluster/    a real slurmctld, slurmd and munge on this machine, each node a host of its own: `slurm/cluster up`

`python -m labcode.slurm render|lint|submit|status|cancel RECIPE --site NAME`
"""
