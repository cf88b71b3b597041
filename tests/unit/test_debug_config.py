"""A YAML of debug features is read strictly: each mistake is one line with its number."""

from pathlib import Path

import pytest

from labcode.debug import debug_config

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
    "a number of a layer that is none": (
        RIGHT.replace("[0, 2-3]", "True"),
        "line 5: layer_numbers True: give numbers, '2-5', or all",
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


# ---- what Transformer Engine documents

FRAME = """\
section:
  enabled: True
  layers:
    layer_types: [all]
  transformer_engine:
"""


def features_of(text, folder):
    """The features of one block, from the lines below `transformer_engine:`."""
    (block,) = blocks_of(FRAME + text, folder)
    return block


def entry(gemm=None, tensor=None, **settings):
    names = {"gemm": gemm, "tensor": tensor}
    return {key: name for key, name in names.items() if name} | settings


# {what it shows: (lines, feature, its entries)}, each a form of config_file_structure.rst or of the
# docstrings of debug/features
DOCUMENTED = {
    "lists of products and tensors": (
        "    PerTensorScaling: {enabled: True, gemms: [dgrad], tensors: [weight, gradient]}",
        "PerTensorScaling",
        [entry("dgrad", "weight"), entry("dgrad", "gradient")],
    ),
    "a struct of products with lists of tensors": (
        "    FakeQuant:\n      enabled: True\n      quant_format: FP8E5M2\n      gemms_struct:\n"
        "        - gemm: fprop\n          tensors: [activation, weight]\n"
        "        - gemm: dgrad\n          tensors: [gradient]\n",
        "FakeQuant",
        [
            entry("fprop", "activation", quant_format="FP8E5M2"),
            entry("fprop", "weight", quant_format="FP8E5M2"),
            entry("dgrad", "gradient", quant_format="FP8E5M2"),
        ],
    ),
    "a struct of tensors below a list of products": (
        "    FakeQuant:\n      enabled: True\n      gemms: [wgrad]\n      tensors_struct:\n"
        "        - {tensor: activation, quant_format: FP8E4M3}\n"
        "        - {tensor: gradient, quant_format: FP8E5M2}\n",
        "FakeQuant",
        [
            entry("wgrad", "activation", quant_format="FP8E4M3"),
            entry("wgrad", "gradient", quant_format="FP8E5M2"),
        ],
    ),
    "a struct of tensors inside a struct of products": (
        "    FakeQuant:\n      enabled: True\n      gemms_struct:\n"
        "        - gemm: fprop\n          quant_format: FP8E4M3\n          tensors_struct:\n"
        "            - tensor: weight\n            - {tensor: output, quant_format: FP8E5M2}\n"
        "        - {gemm: wgrad, tensors: [wgrad], quant_format: FP8E5M2}\n",
        "FakeQuant",
        [
            entry("fprop", "weight", quant_format="FP8E4M3"),
            entry("fprop", "output", quant_format="FP8E5M2"),
            entry("wgrad", "wgrad", quant_format="FP8E5M2"),
        ],
    ),
    "tensors outside a struct of products": (
        "    PerTensorScaling:\n      enabled: True\n      tensors: [gradient]\n"
        "      gemms_struct:\n        - gemm: dgrad\n        - gemm: wgrad\n",
        "PerTensorScaling",
        [entry("dgrad", "gradient"), entry("wgrad", "gradient")],
    ),
    "a name twice in a list": (
        "    PerTensorScaling: {enabled: True, gemms: [dgrad, dgrad], tensors: [weight]}",
        "PerTensorScaling",
        [entry("dgrad", "weight"), entry("dgrad", "weight")],
    ),
    "products out of 8 bits, by the name of today": (
        "    DisableQuantizationGEMM: {enabled: True, gemms: [fprop, wgrad]}",
        "DisableQuantizationGEMM",
        [entry("fprop"), entry("wgrad")],
    ),
    "and by the name of 2024": (
        "    DisableFP8GEMM: {enabled: True, gemms: [dgrad]}",
        "DisableQuantizationGEMM",
        [entry("dgrad")],
    ),
    "a whole layer, by the name of 2024": (
        "    DisableFP8Layer: {enabled: True}",
        "DisableQuantizationLayer",
        [entry()],
    ),
    "times of each tensor": (
        "    LogTensorStats:\n      enabled: True\n      stats: [mean]\n      tensors_struct:\n"
        "        - {tensor: activation, freq: 10, start_step: 5, end_step: 100}\n"
        "        - {tensor: dgrad, freq: 2, start_end_list: [[0, 20], [80, 100]]}\n"
        "        - {tensor: weight, stats: [dynamic_range, cur_amax], end_step: null}\n",
        "LogTensorStats",
        [
            entry(None, "activation", stats=["mean"], freq=10, start_step=5, end_step=100),
            entry(None, "dgrad", stats=["mean"], freq=2, start_end_list=[[0, 20], [80, 100]]),
            entry(None, "weight", stats=["dynamic_range", "cur_amax"]),
        ],
    ),
    "statistics of another recipe": (
        "    LogFp8TensorStats:\n      enabled: True\n      tensors: [gradient]\n"
        "      stats: [mxfp8_mse_columnwise, 'fp8_current_scaling_underflows%', scale_inv_max]\n",
        "LogFp8TensorStats",
        [
            entry(
                None,
                "gradient",
                stats=["mxfp8_mse_columnwise", "fp8_current_scaling_underflows%", "scale_inv_max"],
            )
        ],
    ),
    "tensors in files": (
        "    DumpTensors:\n      enabled: True\n      freq: 100\n      tensors_struct:\n"
        "        - {tensor: activation, high_precision_tensor: True, quantized_tensor: True}\n"
        "        - {tensor: wgrad, high_precision_tensor: True, quantized_tensor: False}\n",
        "DumpTensors",
        [
            entry(None, "activation", freq=100, high_precision_tensor=True, quantized_tensor=True),
            entry(None, "wgrad", freq=100, high_precision_tensor=True, quantized_tensor=False),
        ],
    ),
}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_what_transformer_engine_documents_is_read(tmp_path, name):
    text, feature, wanted = DOCUMENTED[name]
    block = features_of(text, tmp_path)
    assert list(block.features) == [feature]
    assert block.entries(feature) == wanted
    assert block.entries("LogNothing") == []


SCALE = "    PerTensorScaling:\n      enabled: True\n"
WRONG_FORMS = {
    "two forms of one list": (
        SCALE + "      tensors: [weight]\n      gemms: [fprop]\n      gemms_struct:\n"
        "        - gemm: dgrad\n",
        "line 7: PerTensorScaling has gemms and gemms_struct: keep one",
    ),
    "a struct that is no list": (
        SCALE + "      gemms_struct: dgrad\n",
        "line 8: PerTensorScaling, gemms_struct: give a list, `- gemm: fprop`",
    ),
    "a product without a name": (
        SCALE + "      gemms_struct:\n        - tensors: [gradient]\n",
        "line 9: an entry of PerTensorScaling, gemms_struct has no `gemm:`",
    ),
    "a product twice": (
        SCALE + "      tensors: [gradient]\n      gemms_struct:\n"
        "        - gemm: dgrad\n        - {gemm: dgrad, margin: 2}\n",
        "line 6: PerTensorScaling gives dgrad gradient two settings, and the first one alone",
    ),
    "a product without tensors": (
        SCALE + "      gemms_struct:\n        - {gemm: dgrad, tensors: [gradient]}\n"
        "        - gemm: wgrad\n",
        "line 6: PerTensorScaling has no `tensors:` for wgrad",
    ),
    "enabled inside": (
        SCALE + "      gemms_struct:\n        - {gemm: dgrad, enabled: True}\n",
        "line 9: unknown key of PerTensorScaling, gemms_struct 'enabled': there are gemm, tensors",
    ),
    "tensors where there are none": (
        "    DisableFP8GEMM: {enabled: True, gemms: [fprop], tensors: [weight]}",
        "line 6: unknown key of DisableFP8GEMM 'tensors': .* gemms_struct",
    ),
    "no format for one of two": (
        "    FakeQuant:\n      enabled: True\n      gemms: [fprop]\n      tensors_struct:\n"
        "        - {tensor: activation, quant_format: FP8E4M3}\n        - tensor: weight\n",
        "line 6: FakeQuant has no `quant_format:` for fprop weight, add it",
    ),
    "an old and a new name": (
        "    DisableFP8Layer: {enabled: True}\n    DisableQuantizationLayer: {enabled: True}\n",
        "line 7: DisableQuantizationLayer stands in block section by its old and by its new name",
    ),
    "a scale for a product that is out of 8 bits": (
        SCALE + "      tensors: [weight]\n      gemms: [fprop]\n"
        "    DisableFP8GEMM: {enabled: True, gemms: [fprop]}\n",
        "line 1: block section gives fprop a scale .* DisableQuantizationGEMM takes that product",
    ),
    "nothing to dump": (
        "    DumpTensors: {enabled: True, tensors: [weight]}",
        "line 6: DumpTensors writes nothing for weight: set high_precision_tensor or",
    ),
    "a recipe's name from the guide's prose": (
        "    LogFp8TensorStats:\n      enabled: True\n      tensors: [weight]\n"
        "      stats: ['current_scaling_underflows%']\n",
        "line 9: .* did you mean fp8_current_scaling_underflows%",
    ),
    "NVFP4": (
        "    LogNvfp4TensorStats: {enabled: True, tensors: [weight], stats: [mse]}",
        "line 6: Transformer Engine has LogNvfp4TensorStats, this course does not: no layer",
    ),
    "blocks of 128": (
        "    LogFp8TensorStats:\n      enabled: True\n      tensors: [weight]\n"
        "      stats: [fp8_block_scaling_mse]\n",
        "line 9: Transformer Engine has fp8_block_scaling_mse, this course does not",
    ),
    "the range of each block": (
        "    LogTensorStats:\n      enabled: True\n      tensors: [weight]\n      stats:\n"
        "        - max_blockwise_dynamic_range: {block_size: 32, dims: 1}\n",
        "line 10: Transformer Engine has max_blockwise_dynamic_range, this course does not",
    ),
    "a format of blocks": (
        "    FakeQuant:\n      enabled: True\n      gemms: [fprop]\n      tensors: [weight]\n"
        "      quant_format: MXFP8E4M3\n",
        "line 10: Transformer Engine has MXFP8E4M3, this course does not: use FP8E4M3",
    ),
}


@pytest.mark.parametrize("name", WRONG_FORMS)
def test_a_wrong_form_is_one_line_with_its_number(tmp_path, name):
    text, message = WRONG_FORMS[name]
    with pytest.raises(ValueError, match=message) as caught:
        features_of(text, tmp_path)
    assert "\n" not in str(caught.value)


def test_layers_of_transformer_engine_are_translated(tmp_path):
    text = RIGHT.replace("[mlp.up, mlp.down]", "[layernorm_mlp.fc1]")
    with pytest.raises(ValueError, match=r"none of the 9 layers .* calls fc1 is mlp\.up here"):
        debug_config.choose(blocks_of(text, tmp_path), LAYERS, tmp_path)


@pytest.mark.parametrize(
    "settings, steps",
    [
        ({}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"freq": 3}, [0, 3, 6]),
        ({"start_step": 2, "end_step": 4}, [2, 3, 4]),
        ({"freq": 2, "start_step": 3}, [4, 6]),
        ({"start_step": 5, "end_step": -1}, [5, 6, 7]),
        ({"freq": 2, "start_end_list": [[0, 2], [5, 6]], "end_step": 1}, [0, 2, 6]),
    ],
)
def test_steps_are_those_of_transformer_engine(settings, steps):
    """Both ends belong to the range, and freq counts from step 0."""
    assert [step for step in range(8) if debug_config.is_due(settings, step)] == steps


@pytest.mark.parametrize(
    "stat, recipe, why",
    [
        ("underflows%", "mxfp8", None),
        ("mxfp8_mse", "fp8_delayed_scaling", None),
        ("mse_columnwise", "mxfp8", None),
        ("overflows%", "fp8_delayed_scaling", None),
        ("overflows%", "fp8_current_scaling", "only a delayed scale"),
        ("fp8_delayed_scaling_mse", "mxfp8", "no history"),
        ("mse_columnwise", "fp8_current_scaling", "one cast"),
        ("scale_inv_min", "mxfp8", "keep no scales"),
    ],
)
def test_a_statistic_fits_the_recipe_of_the_run_or_says_why_not(stat, recipe, why):
    found = debug_config.not_of_recipe(stat, recipe)
    assert found is None if why is None else why in str(found)
