"""Solutions that cells of lesson 10 show and use; `make notebooks` writes this."""

from labcode.comm.counting import counted
from labcode.comm.grid import Grid
from labcode.config import GPTConfig
from labcode.config import ParallelConfig
from labcode.models import gpt
from labcode.models.parallelize import parallelize
from labcode.perf import memory
from labcode.topology import GridShape
from torch.distributed.tensor import DTensor
import torch


def memory_of(tensor):
    """The memory behind a tensor; of a DTensor, what this rank holds."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return tensor.untyped_storage()

def kept_bytes(weights, function, *inputs):
    """The result of function(*inputs), and the bytes kept for its backward."""
    is_weight = {memory_of(weight).data_ptr() for weight in weights}
    kept = {}

    def pack(tensor):
        storage = memory_of(tensor)
        if storage.data_ptr() not in is_weight:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    def unpack(tensor):
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        result = function(*inputs)
    return result, sum(kept.values())


config = GPTConfig(
    vocab_size=64, context_length=256, num_layers=1, num_heads=8, hidden_size=128
)

def one_layer(rank, tp, sequence_parallel=False):
    """Bytes that one layer keeps, and the collectives of its forward and backward."""
    grid = Grid.create(GridShape(dp=4 // tp, tp=tp))
    parallel = ParallelConfig(sequence_parallel=sequence_parallel)
    model = parallelize(gpt.GPT(config), grid, parallel)
    layer = model.module.blocks[0]
    tokens = 256 // tp if sequence_parallel else 256
    x = torch.randn(4, tokens, 128, requires_grad=True)
    with counted() as forward:
        y, num_bytes = kept_bytes(layer.parameters(), layer, x)
    with counted() as backward:
        y.sum().backward()
    return num_bytes, forward, backward


in_the_paper = GPTConfig(
    num_heads=96, hidden_size=12288, context_length=2048, dropout=0.1
)

def formula_bytes(model_config, tp, sequence_parallel=False, **options):
    """The terms of `perf.memory`, added up."""
    terms = memory.layer_activations(
        model_config, GridShape(tp=tp), sequence_parallel=sequence_parallel, **options
    )
    return sum(terms.values())
