"""Weights of a GPT in files of the Hugging Face GPT-2 format, out of a run and into one.

    DIR/
        model.safetensors    the weights under the names of `GPT2LMHeadModel`
        config.json          their shape

`GPT2LMHeadModel.from_pretrained(DIR)` reads it, and so does `--train.start_from DIR`, on any grid:
each rank maps the file into its memory and copies the boxes of the weights that it has.
"""

import dataclasses
import json
import os
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from labcode.config import GPTConfig
from labcode.files import sync_folder
from labcode.models.gpt2_weights import (
    is_causal_mask,
    is_transposed,
    names_in_gpt2,
    to_gpt2,
    to_gpt2_config,
)
from labcode.parallel.boxes import Box, boxes_of
from labcode.parallel.model import ParallelModel
from labcode.train.checkpoint.folder import read_about, read_index, verify
from labcode.train.checkpoint.tensors import read_whole
from labcode.train.run_folder import CONFIG_NAME

WEIGHTS = "model.safetensors"
MODEL = "model/"  # in front of a weight's name in a checkpoint


def export(run: Path, to: Path) -> str:
    """Write the weights of a run, of its end or else of its newest checkpoint.

    Args:
        run: Folder of the run.
        to: Folder to be made.

    Returns:
        Where the weights are from, as "runs/gpt-001/weights.pt".

    Raises:
        ValueError: It is no run of a GPT that is a GPT-2, or `to` exists.
        DamagedError: The checkpoint is not as it was written.
        OSError: A file cannot be read or written; nothing of it is left.
    Held by: tests/ranks/test_gpt2_files.py
    """
    if to.exists():
        raise ValueError(f"{to} exists: choose another folder")
    config = _model_of(run)
    names_in_gpt2(config)  # refuses before anything is read
    weights, source = _weights_of(run)
    config = dataclasses.replace(config, vocab_size=weights["embed.weight"].shape[0])
    to.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{to.name}-", dir=to.parent))
    try:
        save_file(to_gpt2(config, weights), unfinished / WEIGHTS, metadata={"format": "pt"})
        text = json.dumps(to_gpt2_config(config), indent=2) + "\n"
        (unfinished / CONFIG_NAME).write_text(text)
        unfinished.chmod(0o755)  # that of a folder of mkdtemp is for its owner alone
        os.replace(unfinished, to)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    sync_folder(to.parent)
    return str(source)


def _model_of(run: Path) -> GPTConfig:
    """The shape of the model of a run."""
    path = run / CONFIG_NAME
    try:
        tree = json.loads(path.read_text())
        return GPTConfig(**tree["model"])
    except FileNotFoundError:
        raise ValueError(f"{run} is no run: it has no {CONFIG_NAME}") from None
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"{path} is not that of a GPT: only those have this format") from None


def _weights_of(run: Path) -> tuple[dict[str, torch.Tensor], Path]:
    """The whole weights of a run, and the file or folder that they are from."""
    final = run / "weights.pt"
    if final.is_file():
        return torch.load(final, map_location="cpu", weights_only=True), final
    folder = run / "checkpoints"
    names = sorted(path.name for path in folder.glob("step-*") if path.name[5:].isdigit())
    if not names:
        raise ValueError(f"{run} has neither weights.pt nor a checkpoint: let it come to one")
    newest = folder / names[-1]
    about = read_about(newest)
    verify(newest, about.files, about.files)
    index = read_index(newest, about)
    weights = {}
    for key in index:
        if key.startswith(MODEL):
            weights[key.removeprefix(MODEL)] = read_whole(newest, index, key)
    return weights, newest


class Gpt2File:
    """Weights in a folder of this format, for a model of any grid.

    Args:
        folder: It has `model.safetensors`.

    Raises:
        ValueError: It cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / WEIGHTS
        try:
            self._file = safe_open(self.path, framework="pt")
            found = self._file.keys()
        except (OSError, SafetensorError) as error:
            raise ValueError(f"train.start_from: {self.path} cannot be read: {error}") from None
        self._names = {}
        for name in found:
            self._names[name.removeprefix("transformer.")] = name

    def read_into(self, model: ParallelModel) -> None:
        """Fill this rank's part of every weight; nothing is communicated.

        Raises:
            ValueError: A weight is missing, or has another shape; the model is as it was.
        """
        if not isinstance(model.config, GPTConfig):
            raise ValueError(f"train.start_from: {self.path} is for a GPT, and this is none")
        names = names_in_gpt2(model.config)
        self._check_that_all_are_used(names)
        for ours in model.weights:
            self._check(ours, names[ours], list(model.shardings[ours].shape))
        with torch.no_grad():
            for ours, param in model.weights.items():
                own = torch.empty(param.shape, dtype=param.dtype)
                for box in boxes_of(model.shardings[ours], model.grid):
                    box.view(own).copy_(self._box(names[ours], box))
                param.copy_(own)

    def _check_that_all_are_used(self, names: dict[str, str]) -> None:
        """The first layers of a deeper model are a model too, but not the one that was meant."""
        used = {theirs.removeprefix("transformer.") for theirs in names.values()}
        for name in self._names:
            if name not in used and not is_causal_mask(name):
                raise ValueError(
                    f"{self.path} has {name}, for which this model has no place: is it a GPT-2 of "
                    "as many layers, with a head as model.tie_embeddings says?"
                )

    def _check(self, ours: str, theirs: str, shape: list[int]) -> None:
        bare = theirs.removeprefix("transformer.")
        if bare not in self._names:
            raise ValueError(
                f"{self.path} has no {theirs}, which is {ours} here: "
                "is it a GPT-2 of as many layers, with a head as model.tie_embeddings says?"
            )
        found = list(self._file.get_slice(self._names[bare]).get_shape())
        if is_transposed(theirs):
            found.reverse()
        if found != shape:
            raise ValueError(
                f"{theirs} in {self.path} gives {ours} the shape {found}, and this model has "
                f"{shape}: change the model's sizes"
            )

    def _box(self, theirs: str, box: Box) -> torch.Tensor:
        """A box of a weight, in the shape that it has here; no more of the file is read."""
        place = self._file.get_slice(self._names[theirs.removeprefix("transformer.")])
        ranges = []
        for offset, size in zip(box.offsets, box.sizes):
            ranges.append(slice(offset, offset + size))
        if is_transposed(theirs):
            return place[ranges[1], ranges[0]].t()
        return place[tuple(ranges)]
