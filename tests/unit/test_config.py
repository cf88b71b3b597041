"""Configs refuse what cannot work before anything starts, each with one line that says what to change."""

import io
import sys

import pytest

from labcode import hardware, recipes, units
from labcode.config import GPTConfig, ParallelConfig, TextData, TrainConfig, ViTConfig, WeatherData
from labcode.train import cli


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: GPTConfig(hidden_size=64, num_heads=3),
            "hidden_size=64 is not a multiple of num_heads=3",
        ),
        (
            lambda: GPTConfig(num_heads=4, num_kv_heads=3),
            "num_heads=4 is not a multiple of num_kv_heads=3",
        ),
        (lambda: GPTConfig(hidden_size=36, num_heads=4, positions="rotary"), "head size 9 is odd"),
        (lambda: GPTConfig(dropout=1.0), "dropout=1.0"),
        (lambda: ViTConfig(lat=91), "lat=91 is not a multiple of patch_size=5"),
        (lambda: TextData(val_fraction=1.0), "val_fraction=1.0"),
        (lambda: WeatherData(variables=()), "variables is empty"),
        (lambda: TrainConfig(steps=0), "steps=0"),
        (
            lambda: TrainConfig(global_batch=30, micro_batch=8).accumulation(2),
            r"micro_batch\*dp = 8\*2 = 16",
        ),
        (lambda: TrainConfig(global_batch=2).accumulation(4), "not a multiple"),
        (
            lambda: ParallelConfig(tp=3, dp=2).shape(8),
            r"2\*1\*1\*3 = 6 but WORLD_SIZE is 8: .* launch 6 ranks",
        ),
        (lambda: ParallelConfig(tp=3).shape(4), "= 3 but WORLD_SIZE is 4"),
        (
            lambda: recipes.get("gpt_huge"),
            "unknown recipe 'gpt_huge': .*gpt_tiny, gpt_10m, vit_tiny",
        ),
        (lambda: recipes.gpt_shape("gpt_2b"), "unknown model shape 'gpt_2b'"),
        (
            lambda: recipes.with_changes(recipes.gpt_tiny(), {"train.stepz": 1}),
            "no field 'train.stepz': .*steps",
        ),
        (lambda: recipes.with_changes(recipes.gpt_tiny(), {"name.x": 1}), "no field 'name.x'"),
    ],
)
def test_impossible_values_are_refused_in_one_line(make, message):
    with pytest.raises(ValueError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_dp_takes_the_ranks_that_the_other_axes_leave():
    assert ParallelConfig(tp=2).shape(8).dp == 4
    assert ParallelConfig().shape(1).dp == 1


def test_accumulation_keeps_the_global_batch():
    for dp in (1, 2, 4):
        train = TrainConfig(global_batch=32, micro_batch=4)
        assert train.accumulation(dp) * 4 * dp == 32
    assert TrainConfig(global_batch=32).accumulation(4) == 1


def test_every_recipe_can_be_built_and_changed_field_by_field():
    for name in recipes.RECIPES:
        config = recipes.get(name)
        assert config.name == name
        assert recipes.with_changes(config, recipes.field_paths(config)) == config


def test_the_command_line_overrides_single_fields():
    config = cli.parse(
        ["gpt_tiny", "--train.steps", "7", "--parallel.tp", "2", "--model.positions", "rotary"]
    )
    expected = {"train.steps": 7, "parallel.tp": 2, "model.positions": "rotary"}
    assert config == recipes.with_changes(recipes.gpt_tiny(), expected)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["gpt_tini"], "did you mean gpt_tiny"),
        (
            ["gpt_tiny", "--train.step", "3"],
            "unknown field --train.step: did you mean --train.steps",
        ),
        (
            ["gpt_tiny", "--nonsense", "3"],
            "unknown field --nonsense: there are checkpoint, data, model",
        ),
        (["gpt_tiny", "--train.steps", "x"], "--train.steps: .*'x'"),
        (["gpt_tiny", "--train.steps", "-3"], "steps=-3: give a number above 0"),
        (["gpt_tiny", "--model.positions", "none"], r"'none'.*learned.*rotary"),
        (["gpt_tiny", "--checkpoint.keep", "0"], "keep=0: give a number above 0"),
        (["gpt_tiny", "--checkpoint.every", "-1"], "every=-1: give the steps between checkpoints"),
        (
            ["gpt_tiny", "--checkpoint.resume"],
            "checkpoint.resume needs the folder of the run: name it with train.out",
        ),
        (
            ["gpt_tiny", "--checkpoint.resume", "--train.out", "x", "--train.overwrite"],
            "continues the run in train.out, and .* choose one",
        ),
        (
            ["vit_tiny", "--model.num_heads", "5"],
            "hidden_size=128 is not a multiple of num_heads=5",
        ),
    ],
)
def test_a_wrong_command_line_gives_one_line_that_says_what_exists(args, message):
    with pytest.raises(cli.UsageError, match=message) as caught:
        cli.parse(args)
    assert "\n" not in str(caught.value)


def test_help_lists_every_field_of_the_recipe(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.parse(["gpt_tiny", "--help"])
    assert not stop.value.code
    text = capsys.readouterr().out
    for path in recipes.field_paths(recipes.gpt_tiny()):
        assert "--" + path.replace("_", "-") in text


def test_help_without_a_recipe_lists_the_recipes(capsys):
    with pytest.raises(SystemExit):
        cli.parse([])
    text = capsys.readouterr().out
    assert all(name in text for name in recipes.RECIPES)


def test_mfu_is_a_fraction_of_a_known_peak_and_never_a_guess():
    assert hardware.mfu(989e12 / 2, "NVIDIA H200", "bfloat16") == pytest.approx(0.5)
    assert hardware.mfu(1e12, "NVIDIA H200", "int4") is None
    assert (
        hardware.mfu(1e12, "NVIDIA H100 PCIe", "bfloat16") is None
    )  # a slower card than the H100 of the table
    assert all(device.source for device in hardware.DEVICES.values())


def test_units_print_what_a_person_reads():
    assert units.si(1.75e11) == "175 G"
    assert units.si(9.89e14, "FLOP/s") == "989 TFLOP/s"
    assert units.binary_bytes(3 * units.GIB) == "3.00 GiB"
    assert units.binary_bytes(12) == "12 B"
    assert [units.seconds(t) for t in (3.2e-3, 65, 7800)] == ["3.2 ms", "1 min 05 s", "2 h 10 min"]


def test_the_line_is_the_same_on_a_terminal_that_knows_only_ascii(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    with pytest.raises(
        cli.UsageError, match=r"^unknown field --train.step: did you mean --train.steps"
    ):
        cli.parse(["gpt_tiny", "--train.step", "3"])
    with pytest.raises(cli.UsageError, match=r"invalid literal for int.. with base 10: 'x'$"):
        cli.parse(["gpt_tiny", "--train.steps", "x"])
