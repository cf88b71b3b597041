"""What a run trains with, on a rank of a pool."""

import torch
import torch.distributed as dist

from labcode.comm.grid import Grid
from labcode.runtime import combinations
from labcode.runtime.bootstrap import Place, World
from labcode.train.build import build
from labcode.train.checkpoint.store import Checkpoints
from labcode.train.tasks import make_task


def world():
    """This rank, as a run sees it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return World(Place(rank, size, rank, size), torch.device("cpu"), "gloo")


def built(config, start=None):
    """The `Training` of a config on all ranks of the pool, from a checkpoint or from its start."""
    here = world()
    resolved = combinations.resolve(config, here.world_size)
    return build(resolved, here, Grid.create(resolved.shape), make_task(config), start)


def checkpoints_of(training, out):
    """Those of a run with this folder."""
    return Checkpoints(training.config, training.grid, out, training.task.data_sha256)
