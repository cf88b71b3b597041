"""Jobs for SLURM: the script for what is to run, its faults, and the way to its end. No torch.

    script/    Job: recipe, nodes, ranks, time.  Site: a cluster as data.  render(job, site) -> str
    lint/      lint(text, site, job) -> [Problem]: numbered rules with reasons, for any script
    run/       submit(job, site) -> handle with wait() and log(), on SLURM or on this machine
    log/       what a job printed: what failed first, and what only followed
    variables  what settings of NCCL, PyTorch, gloo and SLURM mean together
    sites/     one YAML profile per cluster; package data, `slurm/sites` is a link to it
    cli        `python -m labcode.slurm render|lint|submit|status|cancel RECIPE --site NAME`
    examples   the scripts that are committed in `slurm/`

A real SLURM on this machine to try all of it is `labcode.minislurm` (`slurm/cluster up 2`).
"""
