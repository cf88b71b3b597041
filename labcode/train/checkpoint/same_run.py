"""Whether a checkpoint is of the run that wants to resume from it."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from labcode.config import Config
from labcode.recipes import field_paths
from labcode.train.checkpoint.folder import About

# What may differ between the run that wrote a checkpoint and the one that resumes from it.
MAY_CHANGE = (
    "name",
    "checkpoint.",
    "optim.",
    "data.cache_dir",
    "debug.",
    "loader.",
    "parallel.",
    "profile.",
    "train.bad_in_",
    "train.compile",
    "train.cuda_graphs",
    "train.eval_",
    "train.log_every",
    "train.micro_batch",
    "train.on_bad_step",
    "train.out",
    "train.overwrite",
    "train.powersgd_",  # of older versions
    "train.sample_device_s",
    "train.sample_tokens",
    "train.slow_factor",
    "train.spike_factor",
    "train.start_from",
    "train.steps",
)


def check_same_run(about: About, folder: Path, config: Config, data_sha256: str) -> None:
    """Compare the run that wrote a checkpoint with this one.

    Args:
        about: What the checkpoint says of itself.
        folder: Folder of the checkpoint.
        config: This run.
        data_sha256: Hash of its data; empty if that is not known.

    Raises:
        ValueError: They differ in more than `MAY_CHANGE`.
    """
    # As it is in the file: there a tuple is a list, and comparing the two would find a change.
    then = as_json(_defaults(config)) | _flat(about.config)
    now = as_json(field_paths(config))
    differing = []
    for name in sorted(now.keys() | then.keys()):
        may_change = name.startswith(MAY_CHANGE)
        if name == "train.start_from" and config.lora.rank:
            may_change = False  # the model beside the adapters is in no checkpoint
        if then.get(name) != now.get(name) and not may_change:
            differing.append(name)
    _check_recipe(then, now, differing, folder)
    if differing:
        name = differing[0]
        raise ValueError(
            f"{folder} was written with {name}={then.get(name)}, "
            f"this run has {now.get(name)}: "
            "resume with the same, or begin again in another train.out"
        )
    # both known: data without a hash must not keep a run from resuming
    if about.data_sha256 and data_sha256 and about.data_sha256 != data_sha256:
        raise ValueError(
            f"the data has changed since {folder} was written "
            f"(its sha256 was {about.data_sha256[:12]}..., now it is "
            f"{data_sha256[:12]}...): put it back, or begin again in another train.out"
        )


def _defaults(config: Config) -> dict[str, Any]:
    """Those of all sections: a field that is newer than the checkpoint had their effect."""
    defaults = {}
    for field in dataclasses.fields(config):
        section = getattr(config, field.name)
        if dataclasses.is_dataclass(section):
            defaults |= field_paths(type(section)(), f"{field.name}.")
    return defaults


def _check_recipe(
    then: dict[str, Any], now: dict[str, Any], differing: Sequence[str], folder: Path
) -> None:
    """Two recipes differ in many fields; their names say it best."""
    if differing and then.get("name") != now["name"]:
        few = ", ".join(differing[:3]) + (", ..." if len(differing) > 3 else "")
        raise ValueError(
            f"{folder} was written by the recipe {then.get('name')}, this run is {now['name']} "
            f"(they differ in {few}): "
            "resume with the same recipe, or begin again in another train.out"
        )


def as_json(value: Any) -> Any:
    """The value as JSON gives it back: tuples become lists."""
    return json.loads(json.dumps(value))


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"train": {"steps": 3}} as {"train.steps": 3}."""
    flat = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat
