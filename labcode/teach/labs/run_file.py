"""Runs a learner's script on one rank of `launch.run`: python -m labcode.teach.labs.run_file FILE

Each rank draws other random numbers, as on a cluster where nobody has set a seed: a model that is
not given to all ranks by rank 0 then shows. Ranks that wait for each other in vain give up after
`PATIENCE`, and not after half an hour, PyTorch's default. A rank but the first that saves a file is
stopped: all ranks would write the same file at the same time, which goes well often enough for
nobody to notice.
"""

import functools
import os
import runpy
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from labcode.comm.bootstrap import read_environment

PATIENCE = timedelta(seconds=15)


def main(path: str) -> None:
    """Run the file as `__main__`, in its own folder."""
    rank = read_environment().rank
    torch.manual_seed(rank)
    torch.set_num_threads(1)
    os.chdir(Path(path).resolve().parent)
    sys.argv = [path]
    impatient = functools.partial(dist.init_process_group, timeout=PATIENCE)
    dist.init_process_group = impatient
    if rank != 0:
        torch.save = _refuse_to_save
    runpy.run_path(Path(path).name, run_name="__main__")


def _refuse_to_save(*_: Any, **__: Any) -> None:
    raise RuntimeError("a rank that is not rank 0 calls torch.save: let rank 0 alone write files")


if __name__ == "__main__":
    main(sys.argv[1])
