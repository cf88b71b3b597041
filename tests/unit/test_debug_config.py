"""A YAML of debug features is read strictly: each mistake is one line with its number."""

from pathlib import Path

import pytest

from labcode.precision import debug_config

RIGHT = """\
stats:
  enabled: True
  layers:
    layer_types: [mlp.up, mlp.down]
    layer_numbers: [0, 2-3]
  transformer_engine:
    LogTensorStats:
      enabled: True
      tensors: [activation, wgrad]
      stats: [mean, std]
      freq: 2
"""
LAYERS = [f"blocks.{n}.{kind}" for n in range(4) for kind in ("attention.qkv", "mlp.up")]
LAYERS.append("head")


def blocks_of(text, folder):
    path = folder / "debug.yaml"
    path.write_text(text)
    return debug_config.read(path)


def test_layers_are_chosen_by_number_and_type(tmp_path):
    (block,) = blocks_of(RIGHT, tmp_path)
    chosen = debug_config.choose([block], LAYERS, tmp_path)
    assert list(chosen) == ["blocks.0.mlp.up", "blocks.2.mlp.up", "blocks.3.mlp.up"]
    assert block.features["LogTensorStats"]["stats"] == ["mean", "std"]


@pytest.mark.parametrize(
    "layers, number",
    [
        ("exact_layer_names: [head]", 1),
        ("layer_name_regex_pattern: 'mlp|head'", 5),
        ("layer_types: [all]", 9),
        ("layer_numbers: 2", 2),
    ],
)
def test_every_way_to_choose(tmp_path, layers, number):
    own = "layer_types: [mlp.up, mlp.down]\n    layer_numbers: [0, 2-3]"
    (block,) = blocks_of(RIGHT.replace(own, layers), tmp_path)
    assert len(debug_config.choose([block], LAYERS, tmp_path)) == number


FEATURE = "    LogTensorStats:\n      enabled: True\n"
WRONG = {
    "a feature at the top level": (
        RIGHT + "  LogTensorStats:\n    enabled: True\n  FakeQuant:\n    enabled: True\n",
        "line 12: LogTensorStats stands at the top level of block stats, .* put it under",
    ),
    "a wrong key": (
        RIGHT.replace("stats: [", "type: ["),
        "line 10: unknown key of LogTensorStats 'type': there are tensors, .*stats",
    ),
    "a key twice": (
        RIGHT + "      freq: 3\n",
        "line 12: freq stands in LogTensorStats a second time, after line 11",
    ),
    "a feature twice": (RIGHT + FEATURE, "line 12: LogTensorStats stands in .* second time"),
    "a wrong statistic": (
        RIGHT.replace("std]", "sdt]"),
        "line 10: unknown name in stats 'sdt': did you mean std",
    ),
    "a wrong tensor": (RIGHT.replace("wgrad", "wgard"), "line 9: .* did you mean wgrad"),
    "a wrong feature": (
        RIGHT.replace("LogTensorStats", "LogTensorStat"),
        "line 7: unknown feature 'LogTensorStat': did you mean LogTensorStats",
    ),
    "a wrong way to choose": (
        RIGHT.replace("layer_types", "layer_type"),
        "line 4: unknown key of layers of block stats 'layer_type': did you mean layer_types",
    ),
    "no enabled": (
        RIGHT.replace("  enabled: True\n  layers", "  layers"),
        "line 1: .*no `enabled:`",
    ),
    "no stats": (RIGHT.replace("      stats: [mean, std]\n", ""), "line 7: .* has no `stats:`"),
    "a wrong frequency": (RIGHT.replace("freq: 2", "freq: 0"), "line 11: freq: 0: give"),
    "a broken pattern": (
        RIGHT.replace("layer_types: [mlp.up, mlp.down]", "layer_name_regex_pattern: '('"),
        "line 4: '\\(' is no pattern",
    ),
    "no YAML": ("stats: [", "line 1|line 2: no YAML"),
    "an empty file": ("", "is empty"),
    "nothing enabled": (
        RIGHT.replace("enabled: True\n  layers", "enabled: no\n  layers"),
        "no block",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_one_line_with_its_number(tmp_path, name):
    text, message = WRONG[name]
    with pytest.raises(ValueError, match=message) as caught:
        blocks_of(text, tmp_path)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_layers_that_do_not_fit_are_errors(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.yaml does not exist: name the YAML"):
        debug_config.read(Path("nowhere.yaml"))
    none = blocks_of(RIGHT.replace("[0, 2-3]", "[7]"), tmp_path)
    with pytest.raises(ValueError, match="line 1: block stats chooses none of the 9 layers"):
        debug_config.choose(none, LAYERS, tmp_path)
    two = blocks_of(RIGHT + RIGHT.replace("stats:\n", "more:\n", 1), tmp_path)
    with pytest.raises(ValueError, match=r"line 12: blocks stats and more both choose blocks\.0"):
        debug_config.choose(two, LAYERS, tmp_path)
