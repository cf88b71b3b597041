"""The library behind *Training at Scale*. Importing it imports nothing else: each room is imported by name.

The map, lowest floor first (`tests/unit/test_architecture.py` holds it):

    units files hardware topology model_config layout
    schedules config recipes command launch                  ground, no torch
    perf/       what a step costs, from shapes alone; no torch either
    slurm/      jobs and sites as data, batch scripts, lint, submit, a real SLURM on one machine; no torch either
    comm/       processes, groups, collectives; the pool of ranks
    parallel/   each parallelism written out
    models/     GPT and ViT, which know nothing of ranks; `parallelize` puts them on a grid
    train/      the training loop: `python -m labcode.train gpt_tiny`
    data/       text and weather (beside the floors)      teach/   check and plot, for lessons and tests alone
"""

__version__ = "0.1.0"
