"""The library behind Training at Scale. Importing it imports nothing else: import rooms by name.

A map for newcomers, lowest floor first. A room imports only its own floor and the ones below it,
never in a circle (`tests/unit/test_architecture.py` holds it).

    the ground, without torch
        units files suggest hardware      printing numbers, atomic writes, "did you mean", GPUs
        topology                          which rank is where: the grid (device mesh) as arithmetic
        schedules/                        the schedules of a pipeline as data
        config combinations               the settings of a run, and what cannot be combined in one
        recipes command                   named runs, the command line
        processes launch launch_rank      ending processes; a module under torchrun on this machine
    without torch too
        minislurm/    a real SLURM of several nodes on this machine; stands alone
        slurm/        jobs for SLURM: script/ a job and a site -> sbatch; lint/ what is wrong with
                      one; run/ submit
        perf/         what a step should cost, from shapes alone (saved_bytes and trace measure it);
                      what the profile of a run tells: summary, breakdown, advice, memory_timeline
    with torch
        data/         text and weather, and who reads which sample
        comm/         processes, process groups, collectives: communication and nothing else
        pool/         the ranks behind a notebook, `Ranks(4).run(fn)` and `%%px`
        doctor/       what is wrong with an installation (`python -m labcode.doctor`), with a
                      training loop (watch), a hang, NCCL's log
        parallel/     each parallelism written out, and how weights are sharded
        precision/    formats of few bits, FP8 layers, and who loses precision where
        models/       GPT and ViT, which know nothing of ranks; a plan for each; parallelize()
        train/        the training loop: `python -m labcode.train gpt_tiny`; build, step, loop, and
                      observers/, which look on; checkpoint/, from which a run resumes
        teach/        checks, figures, labs and exercises, for lessons and tests alone

The first cell of a lesson imports `labcode.lab`: ranks, checks, predictions, figures.

Where to start reading: `models/parallelize.py` and `train/loop.py` read like tables of contents.
From the command to the loss: train/__main__.main -> run.run -> loop.fit -> TrainStep ->
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
