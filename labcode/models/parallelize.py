"""The one place that knows both a model and the grid: it turns a single-process model into this rank's share."""

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labcode.comm.grid import Grid
from labcode.parallel.data import DataParallel


class TorchDataParallel(DistributedDataParallel):
    """PyTorch's DDP with the interface of ours: its backward returns with the gradients averaged already."""

    def finish_gradient_sync(self) -> None:
        """Nothing is left to do."""


def parallelize(
    model: nn.Module, grid: Grid, *, data_parallel: str = "ddp", bucket_mb: float = 25
) -> DataParallel | TorchDataParallel:
    """Put a model on the grid: every rank of the dp axis gets a copy, with gradients averaged over the axis.

    Args:
        model: A GPT or ViT on this rank's device.
        grid: The grid of the job; its other axes have size 1 in this version.
        data_parallel: "ddp" for PyTorch's DistributedDataParallel, "labcode" for `parallel.data.DataParallel`.
        bucket_mb: Size of a gradient bucket in MB.

    Held by: tests/ranks/test_train.py::test_every_dp_size_trains_like_one_process
    """
    group = grid.group("dp")
    if data_parallel == "labcode":
        return DataParallel(model, group, bucket_mb)
    return TorchDataParallel(model, process_group=group, bucket_cap_mb=bucket_mb)
