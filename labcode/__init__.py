"""The library behind Training at Scale. Importing it imports nothing else: import rooms by name.

A map for newcomers. A room imports only its own floor and lower ones, never in a circle
(`tests/unit/test_architecture.py` holds it).

    to be read, in this order
        topology      which rank is where: the grid (device mesh) as arithmetic
        schedules/    the schedules of a pipeline as data
        comm/         process groups and collectives: communication and nothing else
        parallel/     each parallelism written out, and how weights are sharded
        models/       GPT and ViT, which know nothing of ranks; a plan for each; parallelize()
        precision/    formats of few bits, and FP8 layers
        train/        build, step and loop of a training; observers/ watch it, checkpoint/ keeps it
    what runs it, not needed to understand it
        config recipes                    the settings of a run, and runs with a name
        runtime/      processes, how they find each other and agree; command line, files, units
        data/         text and weather, and who reads which sample
        measure/      seconds by part, memory, metrics, and which rank is slow
        debug/        features on chosen layers, records of a step, and where two runs depart
        run/          from a config to a finished run: folder, attempts, failures, sweeps
    tools, useful without the course
        perf/         what a step should cost, from shapes alone, and what a profile tells
        slurm/        jobs for SLURM: script/ a job and a site -> sbatch; lint/ what is wrong with
                      one; run/ submit
        doctor/       what is wrong with an installation, with a training loop, a hang, NCCL's log
        minislurm/    a real SLURM of several nodes on this machine; stands alone

Beside it, `course/` is the machine that teaches: checks, figures, labs, and the ranks behind a
notebook. Nothing here imports it, but for the door `python -m labcode`.

perf, slurm, minislurm, config, topology and schedules import no torch.

Where to start reading: `models/parallelize.py` and `train/loop.py` read like tables of contents.
From the command to the loss: train/__main__.main -> run/run.run -> loop.fit -> TrainStep ->
ParallelModel.forward_backward -> gpt_plan.gpt_loss -> tensor.vocab_parallel_cross_entropy.
"""

import importlib.util
import sys
from types import TracebackType

__version__ = "0.1.0"


def _say_what_is_missing(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """In place of the traceback of a Python that is not the one of the course: one line."""
    if not isinstance(error, ModuleNotFoundError):
        sys.__excepthook__(kind, error, traceback)
        return
    print(
        f"error: this Python has no {error.name} ({sys.executable}): in the folder of the course, "
        "`make setup` once, and `source .venv/bin/activate` in each terminal",
        file=sys.stderr,
    )


# the system's Python: whatever it lacks, the answer is the same
if importlib.util.find_spec("torch") is None:
    sys.excepthook = _say_what_is_missing
