"""What goes wrong between ranks: found while a job runs, or afterwards in its logs.

`python -m labcode.doctor` checks an installation:
software     Python, packages, torch, two ranks that talk
machine      SLURM, ports, names, shared memory, disk
variables    environment variables that bite
checked      what one check has found
all_reduce   what each of the two ranks runs

`python -m labcode.doctor job FILE...` and `nccl FILE...` read logs (`labcode.slurm.log`):
logs         the two commands
nccl_story   what NCCL's log says of a job, in sentences

hang        who waits for whom, while nothing moves: each rank of a run watches for it
standing    where one rank stands: the collective it waits in, and its place in the code
nccl_log    who talks to whom over what, from NCCL's INFO log
nccl_lines  what one line of it says
nccl_graph  ranks, links and communicators as plain data
watch_loop   what is wrong in a training loop, found while it runs: `doctor.watch(...)`
watch_calls  collectives compared before they begin, and which rank did otherwise
watch_gradient  what reaches the gradient of each step that is really taken
watch_loss   with which weight a loss enters it
watch_samples  which samples are drawn, to train and to evaluate
watch_errors  what an error of DDP's reducer means
facts        what one rank notes of a training loop, and one finding
judge        from the facts of all ranks to findings; judge_gradient: about the gradient
"""

from typing import Any


def __getattr__(name: str) -> Any:
    """`doctor.watch`, which needs torch: imported when it is asked for."""
    if name == "watch":
        from labcode.doctor.watch_loop import watch

        return watch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
