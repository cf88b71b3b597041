"""The output folder of a run: chosen, or made new; never somebody else's."""

import dataclasses
import itertools
import json
import shutil
from pathlib import Path

from labcode.config import Config
from labcode.files import write_atomically

CONFIG_NAME = "config.json"  # a folder that has it is that of a run


def make_folder(config: Config) -> Path:
    """The output folder, with `config.json` in it; new, or that of the run to be resumed.

    Raises:
        ValueError: `train.out` exists, and neither `train.overwrite` nor `checkpoint.resume` is
            set; or it is not the folder of a run.
        OSError: It cannot be made.
    """
    out = Path(config.train.out) if config.train.out else _next_free(config.name)
    if out.exists():
        _check_replaceable(config, out)
        if not config.checkpoint.resume:
            shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=config.checkpoint.resume)
    if not (out / CONFIG_NAME).exists():
        write_config(config, out)
    return out


def _next_free(name: str) -> Path:
    """runs/NAME-001, or the first number after it that is free."""
    for number in itertools.count(1):
        folder = Path("runs") / f"{name}-{number:03d}"
        if not folder.exists():
            return folder
    raise AssertionError("there is no largest number")


def _check_replaceable(config: Config, out: Path) -> None:
    if not (config.train.overwrite or config.checkpoint.resume):
        raise ValueError(
            f"{out} exists already: choose another train.out, or replace it with --train.overwrite"
        )
    if not (out / CONFIG_NAME).is_file():
        raise ValueError(
            f"{out} is not the folder of a run: nothing was removed, choose another train.out"
        )


def write_config(config: Config, out: Path) -> None:
    """Write `config.json`, which also marks the folder as that of a run."""
    text = json.dumps(dataclasses.asdict(config), indent=2)
    write_atomically(out / CONFIG_NAME, text.encode())
