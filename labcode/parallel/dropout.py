"""Random numbers on a grid: the same where ranks hold the same activations, different where not.

Dropout draws from the generator of the process. Ranks of tp compute the residual stream twice and
must drop the same features in it, or their copies would differ. Of the attention heads each rank
has its own; if all drew the same numbers, they would drop the same places in different heads, which
is a weaker noise than that of one process. So a process has two streams of random numbers: its own
generator, seeded equally on the ranks that hold the same activations, and an `RngStream`, which
`IsolatedRng` puts in place while one module runs.

Source: Megatron-LM, `megatron/core/tensor_parallel/random.py` (CudaRNGStatesTracker).
Held by: tests/ranks/test_parallelize.py::
    test_dropout_draws_alike_where_replicated_and_apart_where_sharded
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


def seed_for(seed: int, **coords: int) -> int:
    """A seed for the given coordinates, such as `seed_for(0, dp=1, cp=0)`.

    Other coordinates give other random numbers.
    """
    places = ",".join(f"{axis}={coord}" for axis, coord in sorted(coords.items()))
    # A hash and not seed + rank: seed 0 on rank 1 would draw what seed 1 draws on rank 0.
    digest = hashlib.sha256(f"{seed}/{places}".encode()).digest()
    # 63 bits: manual_seed does not take all of 64
    return int.from_bytes(digest[:8], "big") >> 1


class RngStream:
    """A sequence of random numbers beside that of the process.

    Args:
        seed: Seed that it starts from.
        device: The device whose generator it stands in for.

    Attributes:
        state: The current state of the stream, as a generator gives it; may be set.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self.generator = _generator(device)
        self.state = torch.Generator(self.generator.device).manual_seed(seed).get_state()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within it the process draws from this stream, from where it stopped last time."""
        # Modules draw from the generator of the process and cannot be given another one, so its
        # state is exchanged.
        outer = self.generator.get_state()
        self.generator.set_state(self.state)
        try:
            yield
        finally:
            self.state = self.generator.get_state()
            self.generator.set_state(outer)

    @contextmanager
    def replayed_from(self, state: torch.Tensor) -> Iterator[None]:
        """Within it the stream repeats what it gave from `state` on; after it nothing has changed.

        For activation checkpointing: the second forward has to drop what the first one dropped.
        """
        later = self.state
        self.state = state
        try:
            yield
        finally:
            self.state = later


class IsolatedRng(nn.Module):
    """A module that draws its random numbers from a stream of its own."""

    def __init__(self, module: nn.Module, stream: RngStream) -> None:
        super().__init__()
        self.module = module
        self.stream = stream

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        """What the module does."""
        with self.stream.in_place():
            return self.module(*args)


def _generator(device: torch.device) -> torch.Generator:
    if device.type != "cuda":
        return torch.default_generator
    torch.cuda.init()  # the generators exist only then
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]
