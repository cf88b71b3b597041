"""Solutions that cells of lesson 09 show and use; `make notebooks` writes this."""

from labcode.comm.grid import Grid
from labcode.models import layers
from labcode.parallel import tensor
from labcode.topology import GridShape


def tp_group():
    """This rank's tensor-parallel group: ranks 0 and 1, or ranks 2 and 3."""
    return Grid.create(GridShape(dp=2, tp=2)).group("tp")

def shard_mlp(mlp):
    """Put this rank's parts in place of the whole layers."""
    mlp.up = tensor.ColumnParallelLinear(mlp.up, tp_group())
    mlp.down = tensor.RowParallelLinear(mlp.down, tp_group())
    return mlp

def make_mlp():
    """64 features in and out, 256 between."""
    return layers.MLP(64, 256)


def make_attention():
    """4 heads of 16 features, with a causal mask."""
    return layers.Attention(64, 4, causal=True)


def tp_mesh():
    """The ranks of this rank's tensor-parallel group, as PyTorch wants them."""
    return Grid.create(GridShape(dp=2, tp=2)).mesh["tp"]
