"""NVIDIA DALI as what reads, turns and normalises weather. The package is optional."""

import importlib
from typing import Any

import torch

from labcode.config import LoaderConfig


class DaliSource:
    """Batches of a DALI pipeline.

    Raises:
        ValueError: DALI is not installed.
    """

    def __init__(self, reader: Any, config: LoaderConfig, device: torch.device) -> None:
        try:
            importlib.import_module("nvidia.dali")
        except ImportError as error:
            raise ValueError(
                "loader.backend=dali needs the package nvidia-dali: "
                "pip install labcode[dali], or use --loader.backend torch"
            ) from error
        raise ValueError("loader.backend=dali is not there yet: use --loader.backend torch")

    def begin(self, step: int) -> None:
        """The next batch is that of this step."""

    def next(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The batch of the next step."""
        return []

    def close(self) -> None:
        """End the pipeline."""
