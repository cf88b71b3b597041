"""A vision transformer for weather: from the state of the atmosphere to the next one; knows nothing of ranks.

Shapes: B samples, C variables, F forcings, Y latitudes, X longitudes, P patch size, S = Y/P * X/P patches, H hidden
features.
"""

import torch
from torch import nn

from labcode.config import ViTConfig, require
from labcode.models.layers import Block, initialize


class ViT(nn.Module):
    """A bidirectional transformer over patches that predicts a change: `next = state + head(norm(blocks(embed(patches))))`.

    The head starts at zero, so that an untrained model is persistence exactly (tomorrow is as today), the baseline to beat.
    It expects fields normalised per variable. Weights: as for `GPT`.

    Source: Dosovitskiy et al. 2020 (arXiv:2010.11929); Lam et al. 2022 (arXiv:2212.12794, GraphCast) for the change.

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
        sizes = (config.hidden_size, config.num_heads, config.ffn)
        self.blocks = nn.ModuleList(
            Block(*sizes, causal=False, dropout=config.dropout) for _ in range(config.num_layers)
        )
        self.norm = nn.LayerNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.patch_outputs)
        if not self.embed.weight.is_meta:
            initialize(self)

    def forward(self, state, x=None, layers=None):
        """The next state; or a part of the way there, for a model that is cut into stages.

        Args:
            state: [B, C+F, Y, X], normalised; the forcings come last.
            x, layers: As those of `GPT`.

        Returns:
            [B, C, Y, X]; [B, S, H] if the last layer is not among `layers`.

        Raises:
            ValueError: The state has another shape than the model was built for.
        """
        config = self.config
        expected = (config.num_variables + (config.num_forcings or 0), config.lat, config.lon)
        if state.dim() != 4 or state.shape[1:] != expected:
            raise ValueError(
                f"state is {list(state.shape)} but this model takes [B, {', '.join(map(str, expected))}]: "
                "change the data, or num_variables, num_forcings, lat and lon of the model"
            )
        layers = layers or range(config.num_layers)
        if layers.start == 0:
            patches = patchify(state, config.patch_size)  # [B, S, (C+F)*P*P]
            positions = torch.arange(patches.shape[1], device=patches.device)
            x = self.dropout(self.embed(patches) + self.positions(positions))  # [B, S, H]
        for number in layers:
            x = self.blocks[number](x)
        if layers.stop < config.num_layers:
            return x
        change = unpatchify(
            self.head(self.norm(x)), config.num_variables, config.lat, config.lon, config.patch_size
        )
        return state[:, : config.num_variables] + change


def patchify(state, patch_size: int):
    """Cuts fields into patches, row by row from the first latitude: [B, C, Y, X] -> [B, S, C*P*P]."""
    batch, variables, lat, lon = state.shape
    p = patch_size
    patches = state.reshape(batch, variables, lat // p, p, lon // p, p)  # [B, C, Y/P, P, X/P, P]
    return patches.permute(0, 2, 4, 1, 3, 5).reshape(
        batch, (lat // p) * (lon // p), variables * p * p
    )


def unpatchify(patches, variables: int, lat: int, lon: int, patch_size: int):
    """Puts patches back in their places, the inverse of `patchify`: [B, S, C*P*P] -> [B, C, Y, X]."""
    p = patch_size
    state = patches.reshape(-1, lat // p, lon // p, variables, p, p)  # [B, Y/P, X/P, C, P, P]
    return state.permute(0, 3, 1, 4, 2, 5).reshape(-1, variables, lat, lon)


def latitude_weights(latitudes):
    """How much a grid row counts: proportional to its area, `w(y) = cos(lat_y) / mean(cos(lat))`.

    Args:
        latitudes: [Y] degrees north, -90 to 90; tensor, array or list.

    Returns:
        [Y] float32, mean 1.

    Raises:
        ValueError: Values beyond the poles.

    Source: Rasp et al. 2020 (WeatherBench, arXiv:2002.00469), eq. 2.
    """
    latitudes = torch.as_tensor(latitudes, dtype=torch.float64)
    if latitudes.abs().max() > 90:
        raise ValueError(f"latitudes reach {latitudes.abs().max():g}: give degrees from -90 to 90")
    weights = latitudes.deg2rad().cos()
    return (weights / weights.mean()).float()


def loss(prediction, target, weights=None):
    """Mean squared error over samples, variables and grid points: `mean(w(y) * (prediction - target)**2)`.

    Args:
        prediction, target: [B, C, Y, X]
        weights: [Y] from `latitude_weights`, on the same device; None: all rows count the same.

    Source: Rasp et al. 2020 (WeatherBench, arXiv:2002.00469), eq. 1, without the root.
    """
    error = (prediction - target).square()
    if weights is None:
        return error.mean()
    return (error * weights.to(error)[:, None]).mean()
