"""Runs a learner's script on a rank of `launch.run`: python -m course.labs.run_file FILE ...

Each rank draws other random numbers, as on a cluster where nobody has set a seed: a model that is
not given to all ranks by rank 0 then shows. Ranks that wait for each other in vain give up after
`PATIENCE`, and not after half an hour, PyTorch's default. A rank but the first that saves a file is
stopped: all ranks would write the same file at the same time, which goes well often enough for
nobody to notice. (torch.distributed.checkpoint gives torch.save streams of its own, which it may.)

With --counted before FILE rank 0 prints at the end which collectives it has started: "counted
{kind: [calls, bytes]}" as JSON. Not for DDP: what is counted belongs to Python, also DDP's buckets,
and a rank that frees its model right after an all-reduce may then wait forever. The thread of gloo
wants Python's lock to free a bucket, and the process, which has the lock, waits for that thread
(PyTorch 2.13: 7 of 26 runs of two ranks).
"""

import contextlib
import functools
import json
import os
import runpy
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from labcode.comm.counting import counted, totals
from labcode.runtime.bootstrap import read_environment

COUNTED = "--counted"
PATIENCE = timedelta(seconds=30)  # on a busy machine a rank may come many seconds later


def main(*words: str) -> None:
    """Run the file as `__main__`, in its own folder, with these arguments."""
    counts = words[0] == COUNTED
    path, *args = words[1:] if counts else words
    rank = read_environment().rank
    torch.manual_seed(rank)
    torch.set_num_threads(1)
    os.chdir(Path(path).resolve().parent)
    sys.argv = [path, *args]
    impatient = functools.partial(dist.init_process_group, timeout=PATIENCE)
    dist.init_process_group = impatient
    if rank != 0:
        torch.save = functools.partial(_save, torch.save)
    with counted() if counts else contextlib.nullcontext([]) as calls:
        runpy.run_path(Path(path).name, run_name="__main__")
    if counts and rank == 0:
        print("counted", json.dumps(totals(calls)))


def _save(save: Callable[..., None], content: Any, f: Any, *args: Any, **options: Any) -> None:
    """`torch.save`, but for files."""
    if isinstance(f, (str, os.PathLike)):
        raise RuntimeError(
            "a rank that is not rank 0 calls torch.save: let rank 0 alone write files"
        )
    save(content, f, *args, **options)


if __name__ == "__main__":
    main(*sys.argv[1:])
