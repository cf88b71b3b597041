"""Sharded data parallelism: no two ranks keep the same bytes.

cut         how tensors are cut over ranks, and travel in one message
optimizer   ZeRO-1 for any model: each rank updates its part of each weight
gradients   ZeRO-1 and 2: each rank gets its part of the averaged gradients
parameters  ZeRO-3: each rank keeps its part of the weights, and borrows the rest for a moment
fsdp        PyTorch's FSDP2 with the interface of ours
"""

from labcode.parallel.zero.gradients import ShardedDataParallel
from labcode.parallel.zero.optimizer import ShardedOptimizer
from labcode.parallel.zero.parameters import FullyShardedModule

__all__ = ["FullyShardedModule", "ShardedDataParallel", "ShardedOptimizer"]
