"""How many bytes a rank keeps for weights, gradients and optimizer under ZeRO.

With N parameters and p ranks over which they are divided (all numbers in bytes for each parameter;
K are the optimizer's):

    stage      weights     gradients    optimizer    mixed precision, Adam: 2, 2, K = 12; p large
    0          w N         g N          K N          16 N
    1          w N         g N          K N / p       4 N
    2          w N         g N / p      K N / p       2 N
    3          w N / p     g N / p      K N / p       0

Source: Rajbhandari et al. 2019 (arXiv:1910.02054), figure 1 and section 5.
Held by: tests/unit/test_state_memory.py; against measured bytes by
    tests/ranks/test_zero_memory.py, within 3 %
"""

from typing import NamedTuple


class StateBytes(NamedTuple):
    """Bytes of one rank.

    Args:
        weights: Bytes of the model's parameters.
        gradients: Bytes of their gradients.
        optimizer: Bytes of what the optimizer keeps, master weights included.
    """

    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """All three together."""
        return self.weights + self.gradients + self.optimizer


def state_bytes(
    num_parameters: int,
    stage: int,
    ranks: int,
    *,
    weight_bytes: float = 4,
    gradient_bytes: float = 4,
    optimizer_bytes: float = 8,
) -> StateBytes:
    """Bytes that each rank keeps at a stage of ZeRO.

    Args:
        num_parameters: Number of parameters of the model, or of a rank's part of it where tp or pp
            cut it too.
        stage: 0 to 3.
        ranks: Over which everything is divided; under hybrid sharding those of one copy.
        weight_bytes, gradient_bytes: Bytes of one number: 4 in float32, 2 in bfloat16.
        optimizer_bytes: For one parameter: 8 for Adam in float32, 12 with master weights beside
            16-bit ones, 0 for plain SGD.

    Raises:
        ValueError: A stage that does not exist, or no rank.
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage={stage}: ZeRO has the stages 1, 2 and 3, and 0 stands for none")
    if ranks < 1:
        raise ValueError(f"ranks={ranks}: give at least 1")
    part = num_parameters / ranks
    return StateBytes(
        weights=weight_bytes * (part if stage >= 3 else num_parameters),
        gradients=gradient_bytes * (part if stage >= 2 else num_parameters),
        optimizer=optimizer_bytes * (part if stage >= 1 else num_parameters),
    )
