"""Random numbers on a grid: the same where ranks hold the same activations, different ones where each holds its part.

Dropout draws from the generator of the process. Ranks of tp compute the residual stream twice, and must drop the same
features in it, or their copies would differ. Of the attention heads each rank has its own, and drawing the same numbers
for all would drop the same places in different heads, which is a weaker noise than that of one process. So a process
has two streams: its generator, seeded alike on the ranks that hold the same activations, and a `Stream` of its own,
which `DrawApart` puts in place while one module runs.
Source: Megatron-LM, `megatron/core/tensor_parallel/random.py`.
Held by: tests/ranks/test_parallelize.py::test_dropout_draws_alike_where_replicated_and_apart_where_sharded
"""

import hashlib
from contextlib import contextmanager

import torch
from torch import nn


def seed_for(seed: int, **coords: int) -> int:
    """A seed for the given coordinates, such as `seed_for(0, dp=1, cp=0)`; other coordinates, other numbers."""
    text = f"{seed}/" + ",".join(f"{axis}={coord}" for axis, coord in sorted(coords.items()))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


class Stream:
    """A sequence of random numbers beside that of the process.

    Args:
        seed: Where it starts.
        device: Whose generator it stands in for.
    """

    def __init__(self, seed: int, device: torch.device):
        self.generator = _generator(device)
        own = torch.Generator(self.generator.device).manual_seed(seed)
        self.state = own.get_state()

    @contextmanager
    def in_place(self):
        """Within it the process draws from this stream; the next time it goes on where it stopped."""
        outer = self.generator.get_state()
        self.generator.set_state(self.state)
        try:
            yield
        finally:
            self.state = self.generator.get_state()
            self.generator.set_state(outer)


class DrawApart(nn.Module):
    """A module that draws its random numbers from a stream of its own. Holds no weights of its own."""

    def __init__(self, module: nn.Module, stream: Stream):
        super().__init__()
        self.module, self.stream = module, stream

    def forward(self, *args):
        """As that of the module."""
        with self.stream.in_place():
            return self.module(*args)


def _generator(device):
    if device.type == "cuda":
        torch.cuda.init()  # the generators exist only then
        return torch.cuda.default_generators[
            torch.cuda.current_device() if device.index is None else device.index
        ]
    return torch.default_generator
