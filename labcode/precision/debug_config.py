"""Checks a YAML of debug features before nvdlfw_inspect sees it. No torch.

The file is the one that drives Transformer Engine:

    log_the_mlp:
      enabled: True
      layers:
        layer_types: [mlp.up, mlp.down]
      transformer_engine:
        LogTensorStats:
          enabled: True
          tensors: [activation, gradient]
          stats: [mean, std, l2_norm]
          freq: 10

nvdlfw_inspect takes much that it should not: a feature at the top level of a block stands in for
all features of the block, a key that it does not know is ignored, of two equal keys the last one
counts, and a file that does not exist is a warning. Here each of these is an error of one line that
names the line of the file.

Source: nvdlfw_inspect 0.2.2, config_manager.py; Transformer Engine, user guide, "Precision debug
    tools", for the features and their keys.
Held by: tests/unit/test_debug_config.py
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from labcode.suggest import unknown

NAMESPACE = "transformer_engine"
TENSORS = ("activation", "weight", "gradient", "output", "wgrad", "dgrad")
OPERANDS = ("activation", "weight", "gradient")
GEMMS = ("fprop", "dgrad", "wgrad")
STATS = ("min", "max", "mean", "std", "l1_norm", "l2_norm", "cur_amax", "dynamic_range")
FP8_STATS = ("underflows%", "overflows%", "scale_inv_min", "scale_inv_max", "mse")
FORMATS = ("FP8E4M3", "FP8E5M2")
LAYER_KEYS = ("layer_types", "layer_numbers", "exact_layer_names", "layer_name_regex_pattern")
WHEN = ("freq", "start_step", "end_step", "start_end_list")
# what may stand under each feature, beside `enabled`
FEATURES: dict[str, tuple[str, ...]] = {
    "LogTensorStats": ("tensors", "tensors_struct", "stats", *WHEN),
    "FakeQuant": ("tensors", "gemms", "quant_format"),
    "LogFp8TensorStats": ("tensors", "tensors_struct", "stats", *WHEN),
    "DisableFP8GEMM": ("gemms",),
    "DisableFP8Layer": (),
    "PerTensorScaling": ("tensors", "gemms", "margin"),
}
# those that change or watch a layer which computes in FP8
FOR_FP8 = ("LogFp8TensorStats", "DisableFP8GEMM", "DisableFP8Layer", "PerTensorScaling")
CHOICES = {
    ("LogTensorStats", "tensors"): TENSORS,
    ("LogTensorStats", "stats"): STATS,
    ("FakeQuant", "tensors"): OPERANDS,
    ("FakeQuant", "gemms"): GEMMS,
    ("LogFp8TensorStats", "tensors"): OPERANDS,
    ("LogFp8TensorStats", "stats"): FP8_STATS,
    ("DisableFP8GEMM", "gemms"): GEMMS,
    ("PerTensorScaling", "tensors"): OPERANDS,
    ("PerTensorScaling", "gemms"): GEMMS,
}
NEEDED = {
    "LogTensorStats": ("stats",),
    "FakeQuant": ("tensors", "gemms", "quant_format"),
    "LogFp8TensorStats": ("stats",),
    "DisableFP8GEMM": ("gemms",),
    "DisableFP8Layer": (),
    "PerTensorScaling": ("tensors", "gemms"),
}
REGISTERED = re.compile(r"register_feature\([^)]*\)(?:\s*@[^\n]*)*\s*class\s+(\w+)")


@dataclass(frozen=True)
class Block:
    """One block of the file: some layers, and what is done to them.

    Args:
        name: Its key.
        line: Where it begins, from 1.
        layers: {key of LAYER_KEYS: value}
        features: {name: settings} of those that are enabled.
    """

    name: str
    line: int
    layers: Mapping[str, Any]
    features: Mapping[str, Mapping[str, Any]]

    def chooses(self, layer: str) -> bool:
        """Whether the block is for a layer, by any of the ways in which it may choose.

        Names and types are alternatives to each other; numbers and types must both hold.
        """
        chosen = self.layers
        if "exact_layer_names" in chosen:
            return layer in chosen["exact_layer_names"]
        if "layer_name_regex_pattern" in chosen:
            return re.search(chosen["layer_name_regex_pattern"], layer) is not None
        by_number = _number_matches(layer, chosen.get("layer_numbers", "all"))
        types = chosen.get("layer_types", ["all"])
        by_type = "all" in types or any(kind in layer for kind in types)
        return by_number and by_type


@dataclass
class _Reader:
    """The file while it is checked.

    Args:
        path: For messages.
        own_features: Names of features that the user wrote.
    """

    path: Path
    own_features: Sequence[str] = field(default_factory=list)

    def fail(self, node: yaml.Node, text: str) -> ValueError:
        return ValueError(f"{self.path}, line {node.start_mark.line + 1}: {text}")

    def items(self, node: yaml.Node, what: str) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
        """(key, its node, the node of the value) of a mapping without equal keys."""
        if not isinstance(node, yaml.MappingNode):
            raise self.fail(node, f"{what} is no mapping: give `key: value` lines, indented")
        first: dict[str, int] = {}
        for key_node, value in node.value:
            key = str(key_node.value)
            if key in first:
                raise self.fail(
                    key_node,
                    f"{key} stands in {what} a second time, after line {first[key]}, and the last "
                    "one alone would count: keep one of them",
                )
            first[key] = key_node.start_mark.line + 1
            yield key, key_node, value

    def block(self, name: str, key_node: yaml.Node, node: yaml.Node) -> Block | None:
        """A block; None if it is not enabled."""
        what = f"block {name}"
        found: dict[str, yaml.Node] = {}
        for key, own, value in self.items(node, what):
            if key in FEATURES or key in self.own_features:
                raise self.fail(
                    own,
                    f"{key} stands at the top level of {what}, where one feature silently replaces "
                    f"the others: put it under {NAMESPACE}:",
                )
            if key not in ("enabled", "layers", NAMESPACE):
                known = ("enabled", "layers", NAMESPACE)
                raise self.fail(own, unknown(f"key of {what}", key, known))
            found[key] = value
        for key in ("enabled", "layers", NAMESPACE):
            if key not in found:
                raise self.fail(key_node, f"{what} has no `{key}:`, add it")
        enabled = self._flag(found["enabled"], f"enabled of {what}")
        layers = self._layers(found["layers"], what)
        features = {}
        for feature, own, value in self.items(found[NAMESPACE], f"{NAMESPACE} of {what}"):
            settings = self._feature(feature, own, value)
            if settings is not None:
                features[feature] = settings
        line = key_node.start_mark.line + 1
        return Block(name, line, layers, features) if enabled else None

    def _layers(self, node: yaml.Node, what: str) -> dict[str, Any]:
        layers: dict[str, Any] = {}
        for key, own, value in self.items(node, f"layers of {what}"):
            if key not in LAYER_KEYS:
                raise self.fail(own, unknown(f"key of layers of {what}", key, LAYER_KEYS))
            layers[key] = _value(value)
            if key == "layer_name_regex_pattern":
                try:
                    re.compile(str(layers[key]))
                except re.error as error:
                    raise self.fail(value, f"{layers[key]!r} is no pattern, {error}") from None
            elif key == "layer_numbers":
                self._check_numbers(value, layers[key])
            elif not isinstance(layers[key], list):
                raise self.fail(value, f"{key} is a list: write [{layers[key]}]")
        if not layers:
            raise self.fail(node, f"layers of {what} is empty: give {' or '.join(LAYER_KEYS)}")
        return layers

    def _check_numbers(self, node: yaml.Node, value: object) -> None:
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, int) or part == "all" or re.fullmatch(r"\d+-\d+", str(part)):
                continue
            raise self.fail(node, f"layer_numbers {part!r}: give numbers, '2-5', or all")

    def _feature(self, name: str, own: yaml.Node, node: yaml.Node) -> dict[str, Any] | None:
        """The settings of a feature; None if it is not enabled."""
        if name in self.own_features:
            settings = _value(node)
            return settings if isinstance(settings, dict) and settings.get("enabled") else None
        if name not in FEATURES:
            raise self.fail(own, unknown("feature", name, [*FEATURES, *self.own_features]))
        given = {}
        for key, key_node, value in self.items(node, name):
            if key not in ("enabled", *FEATURES[name]):
                raise self.fail(key_node, unknown(f"key of {name}", key, FEATURES[name]))
            given[key] = self._setting(name, key, value)
        if "enabled" not in given:
            raise self.fail(own, f"{name} has no `enabled:`, add it")
        if {"tensors", "tensors_struct"} <= set(given):
            raise self.fail(own, f"{name} has tensors and tensors_struct: keep one of them")
        for key in NEEDED[name]:
            if key not in given and "tensors_struct" not in given:
                raise self.fail(own, f"{name} has no `{key}:`, add it")
        if "tensors_struct" in FEATURES[name] and not {"tensors", "tensors_struct"} & set(given):
            raise self.fail(own, f"{name} has no `tensors:`, add it")
        return given if given["enabled"] else None

    def _setting(self, feature: str, key: str, node: yaml.Node) -> Any:
        value = _value(node)
        if key == "enabled":
            return self._flag(node, f"enabled of {feature}")
        if key == "tensors_struct":
            return self._struct(feature, node)
        if key == "start_end_list":
            if not isinstance(value, list) or not all(_is_pair(pair) for pair in value):
                raise self.fail(node, "start_end_list: give pairs of steps, [[0, 10], [50, 60]]")
            return value
        if key in (*WHEN, "margin"):
            least = -1 if key == "end_step" else int(key == "freq")
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise self.fail(node, f"{key}: {value}: give a whole number of at least {least}")
            return value
        if key == "quant_format":
            if value not in FORMATS:
                raise self.fail(node, unknown("quant_format", str(value), FORMATS))
            return value
        if not isinstance(value, list):
            raise self.fail(node, f"{key} of {feature} is a list: write [{value}]")
        choices = CHOICES[feature, key]
        assert isinstance(node, yaml.SequenceNode)
        for part in node.value:
            if part.value not in choices:
                raise self.fail(part, unknown(f"name in {key}", str(part.value), choices))
        return value

    def _struct(self, feature: str, node: yaml.Node) -> list[dict[str, Any]]:
        if not isinstance(node, yaml.SequenceNode):
            raise self.fail(node, "tensors_struct: give a list, `- tensor: activation` and so on")
        entries = []
        keys = ("tensor", *(key for key in FEATURES[feature] if not key.startswith("tensors")))
        for part in node.value:
            entry = {}
            for key, own, value in self.items(part, "an entry of tensors_struct"):
                if key not in keys:
                    raise self.fail(own, unknown("key of tensors_struct", key, keys))
                if key == "tensor":
                    entry[key] = _value(value)
                    choices = CHOICES[feature, "tensors"]
                    if entry[key] not in choices:
                        raise self.fail(value, unknown("tensor", str(entry[key]), choices))
                else:
                    entry[key] = self._setting(feature, key, value)
            for key in ("tensor", "stats"):
                if key not in entry:
                    raise self.fail(part, f"an entry of tensors_struct has no `{key}:`, add it")
            entries.append(entry)
        return entries

    def _flag(self, node: yaml.Node, what: str) -> bool:
        value = _value(node)
        if not isinstance(value, bool):
            raise self.fail(node, f"{what} is {value!r}: give True or False")
        return value


def read(path: Path, feature_dir: Path | None = None) -> list[Block]:
    """The enabled blocks of a file.

    Args:
        path: The YAML.
        feature_dir: With features of the user's own, whose names are then known, too.

    Raises:
        ValueError: What is wrong, in one line with its number.
    """
    if not path.is_file():
        raise ValueError(f"{path} does not exist: name the YAML with debug.config")
    try:
        root = yaml.compose(path.read_text())
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ValueError(f"{path}, line {line}: no YAML, {error.problem}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path} is no YAML: {str(error).splitlines()[0]}") from None
    if root is None:
        raise ValueError(f"{path} is empty: give at least one block")
    reader = _Reader(path, _own_features(feature_dir))
    blocks = []
    for name, key_node, node in reader.items(root, "the file"):
        block = reader.block(name, key_node, node)
        if block is not None:
            blocks.append(block)
    if not blocks:
        raise ValueError(f"{path}: no block is enabled, set one to `enabled: True`")
    return blocks


def choose(blocks: Sequence[Block], layers: Sequence[str], path: Path) -> dict[str, Block]:
    """{layer: its block} of the layers that one of the blocks chooses.

    Args:
        blocks: Of the file.
        layers: Names of all linear layers of the whole model.
        path: For messages.

    Raises:
        ValueError: Two blocks choose one layer, or a block chooses none.
    """
    chosen: dict[str, Block] = {}
    for block in blocks:
        own = [layer for layer in layers if block.chooses(layer)]
        if not own:
            shown = ", ".join(layers[:4])
            raise ValueError(
                f"{path}, line {block.line}: block {block.name} chooses none of the "
                f"{len(layers)} layers ({shown} ...): change its layers"
            )
        for layer in own:
            if layer in chosen:
                raise ValueError(
                    f"{path}, line {block.line}: blocks {chosen[layer].name} and {block.name} both "
                    f"choose {layer}: a layer belongs to one block, put their features together"
                )
            chosen[layer] = block
    return chosen


def _value(node: yaml.Node) -> Any:
    return yaml.safe_load(yaml.serialize(node))


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(x, int) for x in value)


def _number_matches(layer: str, numbers: object) -> bool:
    wanted = numbers if isinstance(numbers, list) else [numbers]
    if "all" in wanted:
        return True
    found = re.search(r"\.(\d+)\.", layer)
    if found is None:
        return False
    number = int(found[1])
    for part in wanted:
        first, _, last = str(part).partition("-")
        if int(first) <= number <= int(last or first):
            return True
    return False


def _own_features(folder: Path | None) -> list[str]:
    """The names of the features that the files of a folder register."""
    if folder is None:
        return []
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: name one with debug.feature_dir")
    names = []
    for file in sorted(folder.rglob("*.py")):
        names += REGISTERED.findall(file.read_text())
    return names
