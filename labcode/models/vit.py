"""A vision transformer that forecasts the next state of the atmosphere; knows nothing of ranks.

Shapes: B samples, C variables, F forcings, Y latitudes, X longitudes, P patch size, S = Y/P * X/P
patches, H hidden features.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from labcode.config import ViTConfig, require
from labcode.models.layers import Block, initialize

if TYPE_CHECKING:
    import numpy as np


class ViT(nn.Module):
    """A bidirectional transformer over patches that predicts a change.

        next = state + head(norm(blocks(embed(patches))))

    The head starts at zero, so that an untrained model is persistence exactly (tomorrow is like
    today), the baseline to beat. It expects fields normalised per variable. Weights are drawn as
    those of `GPT`.

    Source: Dosovitskiy et al. 2020 (arXiv:2010.11929); Lam et al. 2022 (arXiv:2212.12794,
        GraphCast) for the change.

    Raises:
        ValueError: `num_variables`, `lat` or `lon` is None.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        require(config, "num_variables", "lat", "lon")
        self.config = config
        self.embed = nn.Linear(config.patch_inputs, config.hidden_size)
        self.positions = nn.Embedding(config.sequence_length, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(_block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.patch_outputs)
        if not self.embed.weight.is_meta:
            initialize(self)

    def forward(
        self, state: torch.Tensor, x: torch.Tensor | None = None, layers: range | None = None
    ) -> torch.Tensor:
        """The next state, or the output of some of the layers.

        The second form is for a model that is cut into stages.

        Args:
            state: [B, C+F, Y, X], normalised; the forcings come last.
            x, layers: See `GPT.forward`.

        Returns:
            [B, C, Y, X]; [B, S, H] if the last layer is not among `layers`.

        Raises:
            ValueError: The state has another shape than the model was built for.
        """
        config = self.config
        variables, lat, lon = _state_shape(config)
        self._check_state(state, (variables + (config.num_forcings or 0), lat, lon))
        layers = layers or range(config.num_layers)
        if layers.start == 0:
            patches = patchify(state, config.patch_size)  # [B, S, (C+F)*P*P]
            # looked up by number, not added as a whole, so that cp can cut the numbers
            positions = torch.arange(patches.shape[1], device=patches.device)
            x = self.dropout(self.embed(patches) + self.positions(positions))  # [B, S, H]
        assert x is not None, f"layers {layers} need the output of the layer before them"
        hidden = x
        for number in layers:
            hidden = self.blocks[number](hidden)
        if layers.stop < config.num_layers:
            return hidden
        # A later stage of a pipeline has `state` too, since it is the input of the micro-batch.
        patches = self.head(self.norm(hidden))  # [B, S, C*P*P]
        change = unpatchify(patches, variables, lat, lon, config.patch_size)
        return state[:, :variables] + change

    def _check_state(self, state: torch.Tensor, expected: tuple[int, int, int]) -> None:
        if state.dim() != 4 or state.shape[1:] != expected:
            sizes = ", ".join(map(str, expected))
            raise ValueError(
                f"state is {list(state.shape)} but this model takes [B, {sizes}]: "
                "change the data, or num_variables, num_forcings, lat and lon of the model"
            )


def _block(config: ViTConfig) -> Block:
    return Block(
        config.hidden_size, config.num_heads, config.ffn, causal=False, dropout=config.dropout
    )


def _state_shape(config: ViTConfig) -> tuple[int, int, int]:
    """[C, Y, X]; `ViT` has refused a config in which one of them is None."""
    return cast(tuple[int, int, int], (config.num_variables, config.lat, config.lon))


def patchify(state: torch.Tensor, patch_size: int) -> torch.Tensor:
    """Cut fields into patches, row by row from the first latitude.

    [B, C, Y, X] -> [B, S, C*P*P]
    """
    batch, variables, lat, lon = state.shape
    p = patch_size
    rows = lat // p
    columns = lon // p
    patches = state.reshape(batch, variables, rows, p, columns, p)  # [B, C, Y/P, P, X/P, P]
    patches = patches.permute(0, 2, 4, 1, 3, 5)  # [B, Y/P, X/P, C, P, P]
    # [B, S, C*P*P], a copy: a patch lies in P separate pieces of each of C fields
    return patches.reshape(batch, rows * columns, variables * p * p)


def unpatchify(
    patches: torch.Tensor, variables: int, lat: int, lon: int, patch_size: int
) -> torch.Tensor:
    """Put patches back in their places, the inverse of `patchify`.

    [B, S, C*P*P] -> [B, C, Y, X]
    """
    p = patch_size
    state = patches.reshape(-1, lat // p, lon // p, variables, p, p)  # [B, Y/P, X/P, C, P, P]
    state = state.permute(0, 3, 1, 4, 2, 5)  # [B, C, Y/P, P, X/P, P]
    return state.reshape(-1, variables, lat, lon)  # [B, C, Y, X]


def latitude_weights(latitudes: "torch.Tensor | np.ndarray | Sequence[float]") -> torch.Tensor:
    """How much a grid row counts: in proportion to its area, `w(y) = cos(lat_y) / mean(cos(lat))`.

    Args:
        latitudes: [Y] degrees north, -90 to 90; tensor, array or list.

    Returns:
        [Y] float32, mean 1.

    Raises:
        ValueError: Values beyond the poles.

    Source: Rasp et al. 2020 (WeatherBench, arXiv:2002.00469), eq. 2.
    """
    degrees = torch.as_tensor(latitudes, dtype=torch.float64)
    highest = degrees.abs().max()
    if highest > 90:
        raise ValueError(f"latitudes reach {highest:g}: give degrees from -90 to 90")
    weights = degrees.deg2rad().cos()
    return (weights / weights.mean()).float()


def loss(
    prediction: torch.Tensor, target: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Mean squared error over samples, variables and grid points.

        mean(w(y) * (prediction - target)**2)

    Args:
        prediction: [B, C, Y, X]
        target: [B, C, Y, X]; or [B, C+1, Y, X], in which each sample brings the weights of its own
            rows along as a last field, as crops do, which lie anywhere.
        weights: [Y] from `latitude_weights`, on the same device; None: all rows count the same.

    Source: Rasp et al. 2020 (WeatherBench, arXiv:2002.00469), eq. 1, without the root.
    """
    variables = prediction.shape[1]
    error = (prediction - target[:, :variables]).square()
    if target.shape[1] > variables:
        return (error * target[:, variables:]).mean()
    if weights is None:
        return error.mean()
    return (error * weights.to(error)[:, None]).mean()
