"""Files that are there whole or not at all."""

import io
import os
from pathlib import Path

import torch


def write_atomically(path: Path, content: bytes) -> None:
    """Write beside the target and rename: a full disk or a kill leaves the old file, or none."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def save_weights(model: torch.nn.Module, path: Path) -> None:
    """The model's state dict, for `torch.load(path, weights_only=True)`."""
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    write_atomically(path, buffer.getvalue())
