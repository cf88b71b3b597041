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

A setting that belongs to products or tensors may stand once for all of them, or for each by itself:

    PerTensorScaling:
      enabled: True
      gemms_struct:
        - gemm: dgrad
          tensors: [gradient]
        - gemm: wgrad
          tensors_struct:
            - tensor: gradient
              margin: 1

`spread` makes one flat entry for each product and tensor of it, whatever the form, and all that
asks what a feature does asks its entries. What a feature takes stands in FEATURES, what Transformer
Engine has and this course has not in ELSEWHERE.

nvdlfw_inspect takes much that it should not: a feature at the top level of a block stands in for
all features of the block, a key that it does not know is ignored, of two equal keys the last one
counts, of two equal products or tensors the first one, and a file that does not exist is a warning.
Here each of these is an error of one line that names the line of the file.

Source: nvdlfw_inspect 0.2.2, config_manager.py and base.py; Transformer Engine 2.20.0.dev0 (commit
    d0067d0 of August 2026), docs/debug/2_config_file_structure.rst and debug/features, for the
    features and their keys.
Held by: tests/unit/test_debug_config.py
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from labcode.runtime.suggest import unknown

NAMESPACE = "transformer_engine"
TENSORS = ("activation", "weight", "gradient", "output", "wgrad", "dgrad")
OPERANDS = ("activation", "weight", "gradient")
GEMMS = ("fprop", "dgrad", "wgrad")
STATS = ("min", "max", "mean", "std", "l1_norm", "l2_norm", "cur_amax", "dynamic_range")
FP8_STATS = ("underflows%", "overflows%", "scale_inv_min", "scale_inv_max", "mse")
FORMATS = ("FP8E4M3", "FP8E5M2")
LAYER_KEYS = ("layer_types", "layer_numbers", "exact_layer_names", "layer_name_regex_pattern")
WHEN = ("freq", "start_step", "end_step", "start_end_list")
# recipes, as statistics name them
DELAYED = "fp8_delayed_scaling"
CURRENT = "fp8_current_scaling"
BLOCKS = "mxfp8"
COLUMNWISE = "_columnwise"


class Takes(NamedTuple):
    """What may stand under a feature, beside `enabled`.

    Args:
        gemms: Whether it names products, by `gemms` or `gemms_struct`.
        tensors: Those that it may name, by `tensors` or `tensors_struct`; empty: it names none.
        needs: Keys that each product or tensor of it must have.
        may: Keys that it may have.
        in_fp8: Whether it needs layers that compute in FP8.
    """

    gemms: bool = False
    tensors: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    may: tuple[str, ...] = ()
    in_fp8: bool = False


FEATURES = {
    "LogTensorStats": Takes(tensors=TENSORS, needs=("stats",), may=WHEN),
    "LogFp8TensorStats": Takes(tensors=OPERANDS, needs=("stats",), may=WHEN, in_fp8=True),
    "DumpTensors": Takes(tensors=TENSORS, may=("high_precision_tensor", "quantized_tensor", *WHEN)),
    "DisableQuantizationGEMM": Takes(gemms=True, in_fp8=True),
    "DisableQuantizationLayer": Takes(in_fp8=True),
    # the margin is labcode's own
    "PerTensorScaling": Takes(gemms=True, tensors=OPERANDS, may=("margin",), in_fp8=True),
    "FakeQuant": Takes(gemms=True, tensors=TENSORS, needs=("quant_format",)),
}
# until February 2026, and still taken
RENAMED = {
    "DisableFP8GEMM": "DisableQuantizationGEMM",
    "DisableFP8Layer": "DisableQuantizationLayer",
}
# what Transformer Engine has and this course has not, by its name or the beginning of it
ELSEWHERE = {
    "LogNvfp4TensorStats": "no layer of it trains in NVFP4",
    "max_blockwise_dynamic_range": "use dynamic_range, which is that of the whole tensor",
    "fp8_block_scaling_": "no layer of it scales blocks of 128, use mxfp8_ or fp8_current_scaling_",
    "mxfp8_scale_inv_": "its block formats keep no scales, use mxfp8_mse",
    "MXFP8E": "use FP8E4M3 or FP8E5M2",
}
# layers of Transformer Engine's TransformerLayer
TE_LAYERS = {
    "fc1": "mlp.up",
    "fc2": "mlp.down",
    "linear_qkv": "attention.qkv",
    "self_attention": "attention",
    "layernorm_mlp": "mlp",
}
# Read as text. Files of features are run when nvdlfw_inspect starts, which needs a YAML that has
# been checked, which needs the names.
REGISTERED = re.compile(r"register_feature\([^)]*\)(?:\s*@[^\n]*)*\s*class\s+(\w+)")


@dataclass(frozen=True)
class ConfigBlock:
    """One block of the file: some layers, and what is done to them.

    Args:
        name: Key of the block.
        line: Number of its first line, from 1.
        layers: {key of LAYER_KEYS: value}
        features: {name: settings} of those that are enabled, each by its name of today.
    """

    name: str
    line: int
    layers: Mapping[str, Any]
    features: Mapping[str, Mapping[str, Any]]

    def entries(self, feature: str) -> list[dict[str, Any]]:
        """What a feature is told for each product and tensor; none if the block has it not."""
        return spread(self.features[feature]) if feature in self.features else []

    def chooses(self, layer: str) -> bool:
        """Whether the block is for a layer, by any of the ways in which it may choose.

        Names and types are alternatives to each other; numbers and types must both hold.
        """
        chosen = self.layers
        if "exact_layer_names" in chosen:
            return layer in chosen["exact_layer_names"]
        if "layer_name_regex_pattern" in chosen:
            return re.search(chosen["layer_name_regex_pattern"], layer) is not None
        # exact names and patterns are taken alone, as nvdlfw_inspect takes them
        by_number = _number_matches(layer, chosen.get("layer_numbers", "all"))
        types = chosen.get("layer_types", ["all"])
        by_type = "all" in types or any(kind in layer for kind in types)
        return by_number and by_type


@dataclass
class _Reader:
    """The file while it is checked.

    Args:
        path: Path for messages.
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
            # the composed tree and not `yaml.safe_load`, which keeps the last of equal keys without
            # a word
            key = str(key_node.value)
            if key in first:
                raise self.fail(
                    key_node,
                    f"{key} stands in {what} a second time, after line {first[key]}, and the last "
                    "one alone would count: keep one of them",
                )
            first[key] = key_node.start_mark.line + 1
            yield key, key_node, value

    def block(self, name: str, key_node: yaml.Node, node: yaml.Node) -> ConfigBlock | None:
        """A block; None if it is not enabled."""
        what = f"block {name}"
        found: dict[str, yaml.Node] = {}
        for key, own, value in self.items(node, what):
            if key in FEATURES or key in RENAMED or key in self.own_features:
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
        features: dict[str, Any] = {}
        for name_given, own, value in self.items(found[NAMESPACE], f"{NAMESPACE} of {what}"):
            feature = RENAMED.get(name_given, name_given)
            if feature in features:
                raise self.fail(
                    own,
                    f"{feature} stands in {what} by its old and by its new name: keep one of them",
                )
            settings = self._feature(name_given, feature, own, value)
            if settings is not None:
                features[feature] = settings
        made = ConfigBlock(name, key_node.start_mark.line + 1, layers, features)
        contradiction = _contradiction(made)
        if contradiction:
            raise self.fail(key_node, f"{what} {contradiction}")
        return made if enabled else None

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
            if type(part) is int or part == "all" or re.fullmatch(r"\d+-\d+", str(part)):
                continue
            raise self.fail(node, f"layer_numbers {part!r}: give numbers, '2-5', or all")

    def _feature(
        self, given: str, name: str, own: yaml.Node, node: yaml.Node
    ) -> dict[str, Any] | None:
        """The settings of a feature; None if it is not enabled.

        Args:
            given: Name of the feature in the file.
            name: Name that the feature has today.
            own: Place of the feature in the file.
            node: What stands under it.
        """
        if name in self.own_features:
            # whatever it takes is between its author and the feature
            settings = _value(node)
            return settings if isinstance(settings, dict) and settings.get("enabled") else None
        if name not in FEATURES:
            raise self.fail(own, _not_here(given) or self._unknown_feature(given))
        settings = self._level(given, node, FEATURES[name], ("enabled",), FEATURES[name].gemms)
        if "enabled" not in settings:
            raise self.fail(own, f"{given} has no `enabled:`, add it")
        self._check_entries(given, own, settings, FEATURES[name])
        return settings if settings["enabled"] else None

    def _unknown_feature(self, given: str) -> str:
        return unknown("feature", given, [*FEATURES, *self.own_features])

    def _level(
        self, what: str, node: yaml.Node, takes: Takes, first: tuple[str, ...], gemms: bool
    ) -> dict[str, Any]:
        """The settings of a feature, of one of its products, or of one of its tensors.

        Args:
            what: Words for messages.
            node: A mapping.
            takes: What the feature takes; without tensors inside a tensor.
            first: The key that makes this level, "enabled", "gemm" or "tensor".
            gemms: Whether products are named at this level.
        """
        keys = list(first)
        if gemms:
            keys += ["gemms", "gemms_struct"]
        if takes.tensors and first != ("tensor",):
            keys += ["tensors", "tensors_struct"]
        keys += [*takes.needs, *takes.may]
        feature = what.partition(",")[0]
        found: dict[str, Any] = {}
        for key, own, value in self.items(node, what):
            if key not in keys:
                listed = [each for each in keys if each != "enabled"]
                raise self.fail(own, unknown(f"key of {what}", key, keys, listed=listed))
            if key in ("gemms_struct", "tensors_struct"):
                one = key.removesuffix("s_struct")
                found[key] = self._struct(f"{feature}, {key}", value, takes, one)
            else:
                setting = self._setting(feature, key, value, takes)
                if setting is not None:
                    found[key] = setting
        for many in ("gemms", "tensors"):
            if {many, f"{many}_struct"} <= set(found):
                raise self.fail(node, f"{what} has {many} and {many}_struct: keep one of them")
        for key in first:
            if key != "enabled" and key not in found:
                raise self.fail(node, f"an entry of {what} has no `{key}:`, add it")
        return found

    def _struct(self, what: str, node: yaml.Node, takes: Takes, one: str) -> list[dict[str, Any]]:
        """A list of products or of tensors, each with its settings."""
        if not isinstance(node, yaml.SequenceNode):
            raise self.fail(node, f"{what}: give a list, `- {one}: {_first(one, takes)}` and so on")
        return [self._level(what, part, takes, (one,), gemms=False) for part in node.value]

    def _check_entries(
        self, given: str, own: yaml.Node, settings: Mapping[str, Any], takes: Takes
    ) -> None:
        """Each product and tensor has what it needs, and no two settings."""
        seen: dict[tuple[str, ...], dict[str, Any]] = {}
        for entry in spread(settings):
            names = [entry[one] for one in ("gemm", "tensor") if one in entry]
            of = f" for {' '.join(names)}" if names else ""
            if takes.gemms and "gemm" not in entry:
                raise self.fail(own, f"{given} has no `gemms:`, add it")
            if takes.tensors and "tensor" not in entry:
                raise self.fail(own, f"{given} has no `tensors:`{of}, add it")
            for key in takes.needs:
                if key not in entry:
                    raise self.fail(own, f"{given} has no `{key}:`{of}, add it")
            if seen.setdefault(tuple(names), entry) != entry:
                raise self.fail(
                    own,
                    f"{given} gives {' '.join(names)} two settings, and the first one alone would "
                    "count: keep one of them",
                )
            dumps = entry.get("high_precision_tensor") or entry.get("quantized_tensor")
            if given == "DumpTensors" and not dumps:
                raise self.fail(
                    own,
                    f"{given} writes nothing{of}: set high_precision_tensor or quantized_tensor "
                    "to True",
                )

    def _setting(self, feature: str, key: str, node: yaml.Node, takes: Takes) -> Any:
        """The value of one key; None where it says that its default is meant."""
        value = _value(node)
        if key in ("enabled", "high_precision_tensor", "quantized_tensor"):
            return self._flag(node, f"{key} of {feature}")
        if key in WHEN and value is None:
            return None
        if key == "start_end_list":
            if not isinstance(value, list) or not all(_is_pair(pair) for pair in value):
                raise self.fail(node, "start_end_list: give pairs of steps, [[0, 10], [50, 60]]")
            return value
        if key in (*WHEN, "margin"):
            # a bool is an int in Python, and `margin: True` would be 1
            least = -1 if key == "end_step" else int(key == "freq")
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise self.fail(node, f"{key}: {value}: give a whole number of at least {least}")
            return value
        choices = _choices(feature, key, takes)
        if key in ("gemm", "tensor", "quant_format"):
            if value not in choices:
                raise self.fail(node, _not_here(value) or unknown(key, str(value), choices))
            return value
        if not isinstance(node, yaml.SequenceNode):
            raise self.fail(node, f"{key} of {feature} is a list: write [{value}]")
        for part, name in zip(node.value, value, strict=True):
            shown = next(iter(name)) if isinstance(name, dict) and name else name
            if shown is not name or name not in choices:
                listed = FP8_STATS if feature == "LogFp8TensorStats" and key == "stats" else None
                text = unknown(f"name in {key}", str(shown), choices, listed=listed)
                raise self.fail(part, _not_here(shown) or text)
        return value

    def _flag(self, node: yaml.Node, what: str) -> bool:
        value = _value(node)
        if not isinstance(value, bool):
            raise self.fail(node, f"{what} is {value!r}: give True or False")
        return value


def read(path: Path, feature_dir: Path | None = None) -> list[ConfigBlock]:
    """The enabled blocks of a file.

    Args:
        path: The YAML.
        feature_dir: A folder with features of the user's own, whose names are then known too.

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


def choose(
    blocks: Sequence[ConfigBlock], layers: Sequence[str], path: Path
) -> dict[str, ConfigBlock]:
    """{layer: its block} of the layers that one of the blocks chooses.

    Args:
        blocks: The blocks of the file.
        layers: Names of all linear layers of the whole model.
        path: Path for messages.

    Raises:
        ValueError: Two blocks choose one layer, or a block chooses none.
    """
    chosen: dict[str, ConfigBlock] = {}
    for block in blocks:
        own = [layer for layer in layers if block.chooses(layer)]
        if not own:
            shown = ", ".join(layers[:4])
            raise ValueError(
                f"{path}, line {block.line}: block {block.name} chooses none of the "
                f"{len(layers)} layers ({shown} ...): change its layers{_translated(block, layers)}"
            )
        for layer in own:
            if layer in chosen:
                raise ValueError(
                    f"{path}, line {block.line}: blocks {chosen[layer].name} and {block.name} both "
                    f"choose {layer}: a layer belongs to one block, put their features together"
                )
            chosen[layer] = block
    return chosen


def spread(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The settings of a feature, one flat entry for each product and tensor that it names.

    `{"gemms": ["fprop", "dgrad"], "margin": 1}` is `{"gemm": "fprop", "margin": 1}` and
    `{"gemm": "dgrad", "margin": 1}`. What stands further inside replaces what stands outside.
    """
    entries = [{key: value for key, value in settings.items() if key != "enabled"}]
    for one, many in (("gemm", "gemms"), ("tensor", "tensors")):
        found = []
        for entry in entries:
            names = entry.pop(many, None)
            parts = entry.pop(f"{many}_struct", None)
            if parts is None and names is not None:
                parts = [{one: name} for name in names]
            found += [entry] if parts is None else [entry | part for part in parts]
        entries = found
    return entries


def is_due(entry: Mapping[str, Any], step: int) -> bool:
    """Whether a feature is at work in a step: a multiple of freq, from start to end, both included.

    Source: Transformer Engine, debug/features/utils/__init__.py, `next_enabled_iter`.
    """
    # multiples of freq itself, and not of the distance from start_step
    if step % entry.get("freq", 1) != 0:
        return False
    start_end = [entry.get("start_step", 0), entry.get("end_step", -1)]
    for start, end in entry.get("start_end_list", [start_end]):
        if start <= step and (step <= end or end == -1):
            return True
    return False


class Fp8Statistic(NamedTuple):
    """A statistic of LogFp8TensorStats, whose name is RECIPE_NAME_columnwise.

    Args:
        recipe: The recipe whose cast is inspected; "": that of the run.
        name: One of FP8_STATS.
        columnwise: Whether it is the cast for sums along columns, of formats with blocks.
    """

    recipe: str
    name: str
    columnwise: bool


def _fp8_statistics() -> dict[str, Fp8Statistic]:
    """All that there are, by their names in the YAML.

    Source: Transformer Engine, debug/features/log_fp8_tensor_stats.py: overflows are those of
        delayed scaling alone, columns those of formats with blocks.
    """
    found = {}
    for recipe in ("", DELAYED, CURRENT, BLOCKS):
        for name in FP8_STATS:
            if name == "overflows%" and recipe not in ("", DELAYED):
                continue
            if name.startswith("scale_inv") and recipe == BLOCKS:
                continue
            whole = f"{recipe}_{name}" if recipe else name
            found[whole] = Fp8Statistic(recipe, name, False)
            if recipe in ("", BLOCKS) and name != "overflows%":
                found[whole + COLUMNWISE] = Fp8Statistic(recipe, name, True)
    return found


FP8_STATISTICS = _fp8_statistics()


def not_of_recipe(stat: str, recipe: str) -> str | None:
    """Why a run of a recipe cannot have a statistic of LogFp8TensorStats; None: it can.

    Args:
        stat: Name of the statistic in the YAML.
        recipe: DELAYED, CURRENT or BLOCKS.
    """
    asked = FP8_STATISTICS[stat]
    if asked.recipe == DELAYED and recipe != DELAYED:
        return "a delayed scale comes from the steps before, and this run keeps no history of them"
    if asked.name == "overflows%" and recipe != DELAYED:
        return "only a delayed scale can be too large for its tensor"
    if asked.columnwise and (asked.recipe or recipe) != BLOCKS:
        return "rows and columns are one cast where a tensor has one scale"
    if asked.name.startswith("scale_inv") and (asked.recipe or recipe) == BLOCKS:
        return ELSEWHERE["mxfp8_scale_inv_"]
    return None


def _contradiction(block: ConfigBlock) -> str | None:
    """Two features of a block that cannot both have their way with one product; None: all can."""
    without = {entry["gemm"]: "FakeQuant" for entry in block.entries("FakeQuant")}
    for entry in block.entries("DisableQuantizationGEMM"):
        without.setdefault(entry["gemm"], "DisableQuantizationGEMM")
    if "DisableQuantizationLayer" in block.features:
        without = dict.fromkeys(GEMMS, "DisableQuantizationLayer") | without
    for entry in block.entries("PerTensorScaling"):
        if entry["gemm"] in without:
            return (
                f"gives {entry['gemm']} a scale by PerTensorScaling, and "
                f"{without[entry['gemm']]} takes that product out of FP8: keep one of them"
            )
    return None


def _choices(feature: str, key: str, takes: Takes) -> Sequence[str]:
    """The values that a key may have, or those of which it may have a list."""
    if key in ("gemm", "gemms"):
        return GEMMS
    if key in ("tensor", "tensors"):
        return takes.tensors
    if key == "quant_format":
        return FORMATS
    return list(FP8_STATISTICS) if feature == "LogFp8TensorStats" else STATS


def _first(one: str, takes: Takes) -> str:
    return GEMMS[0] if one == "gemm" else takes.tensors[0]


def _not_here(name: object) -> str | None:
    """The line on what Transformer Engine has and this course has not; None: neither has it."""
    for known, instead in ELSEWHERE.items():
        if str(name).startswith(known):
            return f"Transformer Engine has {name}, this course does not: {instead}"
    return None


def _translated(block: ConfigBlock, layers: Sequence[str]) -> str:
    """Which layer is meant by a name of Transformer Engine's TransformerLayer, or nothing."""
    asked = str(block.layers)
    for theirs, ours in TE_LAYERS.items():
        if theirs in asked and any(ours in layer for layer in layers):
            return f"; what Transformer Engine calls {theirs} is {ours} here"
    return ""


def _value(node: yaml.Node) -> Any:
    # A composed node knows its line, and not its value: the way back through text gives it. Slow,
    # for a file of some dozen lines.
    return yaml.safe_load(yaml.serialize(node))


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(x, int) for x in value)


def _number_matches(layer: str, numbers: object) -> bool:
    wanted = numbers if isinstance(numbers, list) else [numbers]
    if "all" in wanted:
        return True
    # the first number of a name is that of the layer
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
