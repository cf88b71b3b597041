"""Whatever is given to a field, there is a config or one line that names the field.

On the command line and from Python, for every field of every recipe.
"""

import dataclasses
import json
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labcode import recipes
from labcode.config import (
    CheckpointConfig,
    Config,
    GPTConfig,
    LoaderConfig,
    OptimConfig,
    ParallelConfig,
    TextData,
    TrainConfig,
    ViTConfig,
    WeatherData,
)
from labcode.runtime import command, fields

NUMBERS = (
    0,
    1,
    -1,
    2,
    257,
    10**20,
    2**63,
    2**64,
    -(2**63),
    10**400,
    1e300,
    1e-300,
    1e-320,
    0.5,
    1.0,
)
WORDS = (
    "",
    " ",
    "\n",
    "a\nb",
    "\0",
    "\x1b[31m",
    "\udc80",
    "\u2028",
    "a\u00a0b",
    "1e3",
    "1e400",
    "0x10",
    "\u0661",
    "1_000",
    " 5 ",
    "5.0",
    "nan",
    "inf",
    "-inf",
    "None",
    "none",
    "True",
    "yes",
    "x" * 5000,
    "9" * 5000,
    "-",
    "~nobody_here/x",
    "..",
    "/",
)
OBJECTS = (b"bytes", [], [1], (), ("a", "a"), {}, object(), np.int64(3), np.float32(2), np.nan, 3j)


def written(number):
    """A number as a person types it; Python writes no integer of more than 4300 digits."""
    return repr(number)


numbers = st.one_of(
    st.sampled_from(NUMBERS), st.integers(), st.floats(allow_nan=True, allow_infinity=True)
)
words = st.one_of(st.sampled_from(WORDS), numbers.map(written), st.text(max_size=8))
values = st.one_of(
    numbers,
    words,
    st.none(),
    st.booleans(),
    st.sampled_from(OBJECTS),
    st.lists(numbers | words, max_size=3).map(tuple),
)


def check_line(error, path):
    """One line that can be shown, and names the field as it is written."""
    line = str(error)
    assert path in line, line
    assert line.isprintable() and len(line) < 500, line


@pytest.mark.parametrize("name", recipes.RECIPES)
@settings(max_examples=60)
@given(value=values)
def test_any_value_is_taken_or_refused_in_one_line_that_names_the_field(name, value):
    recipe = recipes.get(name)
    for path in recipes.field_paths(recipe):
        try:
            config = recipes.with_changes(recipe, {path: value})
        except ValueError as error:
            check_line(error, path)
            continue
        # what is taken can be written into config.json
        json.dumps(dataclasses.asdict(config), allow_nan=False)


@pytest.mark.parametrize("name", recipes.RECIPES)
@settings(max_examples=60)
@given(typed=st.lists(words, max_size=3), joined=st.booleans())
def test_any_words_are_taken_or_refused_in_one_line_that_names_the_field(name, typed, joined):
    first, *others = typed or [""]
    for path in recipes.field_paths(recipes.get(name)):
        option = [f"--{path}={first}", *others] if joined else [f"--{path}", *typed]
        if any(word in command.HELP for word in option):
            continue
        try:
            command.parse([name, *option])
        except command.UsageError as error:
            another = any(word.startswith("--") for word in option[1:])  # which does not exist
            check_line(error, "" if another else path)


SECTIONS = {
    "data": [TextData, WeatherData],
    "model": [GPTConfig, ViTConfig],
    "optim": [OptimConfig],
    "parallel": [ParallelConfig],
    "train": [TrainConfig],
    "checkpoint": [CheckpointConfig],
    "loader": [LoaderConfig],
}


@pytest.mark.parametrize(
    ("path", "value", "advice"),
    [
        ("loader.workers", -1, "give the number of processes, or 0 for none"),
        ("loader.prefetch", 0, "give a number above 0"),
        ("loader.backend", "tf", "choose torch or dali"),
        ("train.seed", -1, "give a number from 0 to 18446744073709551615"),
        ("train.seed", 2**64, "give at most 18446744073709551615"),
        ("train.steps", 2**63, "give at most 9223372036854775807"),
        ("train.global_batch", 2**31, "give at most 2147483647"),
        ("train.micro_batch", 0, "give a number above 0"),
        ("train.sample_tokens", -1, "must not be negative"),
        ("train.out", "", "is empty: give a value or leave it out (a shell variable may not be"),
        ("train.out", "a\nb", "has a line break or another character that cannot be printed"),
        ("train.out", "x" * 5000, "has 5000 characters: give at most 4096"),
        ("train.steps", 2.5, "train.steps=2.5 is not a whole number"),
        ("train.steps", True, "train.steps=True is not a whole number"),
        ("train.steps", None, "train.steps=None is not a whole number"),
        ("train.steps", [3], "train.steps is a list: give a whole number"),
        ("train.overwrite", 1, "train.overwrite=1 is not true or false"),
        (
            "train.dtype",
            "float8",
            "choose auto or float32 or tf32 or bfloat16 or float16 or float64 or fp8",
        ),
        ("checkpoint.keep", 10**400, "checkpoint.keep=a number of 400 digits: give at most"),
        ("optim.lr", math.nan, "give a finite number"),
        ("optim.lr", math.inf, "give a finite number"),
        ("optim.lr", 0, "give a number above 0"),
        ("optim.min_lr", math.nan, "give a finite number"),
        ("optim.min_lr", 1.0, "optim.min_lr=1.0 is larger than optim.lr=0.001: change one"),
        ("optim.weight_decay", math.inf, "give a finite number"),
        ("optim.weight_decay", 1e10, "give at most 1000"),
        ("optim.clip_norm", math.nan, "give a finite number"),
        ("optim.clip_norm", math.inf, "give a finite number"),
        ("optim.beta1", 1.5, "give a probability from 0 to below 1"),
        ("optim.beta2", 1.0, "give a probability from 0 to below 1"),
        ("optim.beta2", math.nan, "give a finite number"),
        ("optim.warmup_steps", -1, "must not be negative"),
        ("parallel.bucket_mb", math.nan, "give a finite number"),
        ("parallel.bucket_mb", 1e300, "give at most 1000000"),
        ("parallel.tp", 0, "give a number above 0"),
        ("parallel.order", "tp-tp", "name each of dp, pp, cp, tp once"),
        ("parallel.layers_per_stage", (), "is empty: give a number for each stage, or None"),
        ("parallel.layers_per_stage", (1, 0), "parallel.layers_per_stage=0: give a number above"),
        ("data.path", "", "is empty"),
        ("data.cache_dir", "", "is empty"),
        ("data.bpe_vocab_size", 10**20, "give at most 1000000"),
        ("data.val_fraction", math.nan, "give a finite number"),
        ("data.variables", ("t2m", "u10", "t2m"), "data.variables has 't2m' more than once"),
        ("data.variables", ("t2m", ""), "is empty"),
        ("data.variables", (), "is empty: name at least one"),
        ("model.dropout", math.nan, "give a finite number"),
        ("model.context_length", 10**12, "give at most 2147483647"),
        ("model.num_layers", 10**6, "give at most 1000"),
        ("model.num_forcings", -1, "must not be negative"),
    ],
)
def test_what_is_out_of_range_is_told_its_range(path, value, advice):
    section, name = path.split(".")
    kinds = [kind for kind in SECTIONS[section] if name in kind.__dataclass_fields__]
    for kind in kinds:
        with pytest.raises(ValueError) as caught:
            kind(**{name: value})
        check_line(caught.value, path)
        assert advice in str(caught.value)


def test_the_name_of_a_run_is_part_of_the_name_of_a_folder():
    for name in ("a/b", "x" * 101):
        with pytest.raises(ValueError, match=r"^name=.*without a slash"):
            dataclasses.replace(recipes.gpt_tiny(), name=name)


def test_sections_are_of_their_kind():
    with pytest.raises(ValueError, match=r"^data is a GPTConfig: give TextData or WeatherData$"):
        Config("x", GPTConfig(), GPTConfig())


def test_numbers_of_other_libraries_become_those_of_python():
    made = TrainConfig(steps=np.int64(7), out="x")
    assert type(made.steps) is int and made == TrainConfig(steps=7, out="x")
    rates = OptimConfig(lr=np.float32(0.5), min_lr=Fraction(1, 4), clip_norm=1)
    assert type(rates.lr) is float and rates == OptimConfig(lr=0.5, min_lr=0.25, clip_norm=1.0)
    assert WeatherData(variables=["t2m"]) == WeatherData(variables=("t2m",))


def test_a_number_as_large_as_torch_and_numpy_take():
    import torch

    seed = 2**64 - 1
    assert TrainConfig(seed=seed).seed == seed
    torch.Generator().manual_seed(seed)
    np.random.PCG64([seed, 2**63 - 1])


def test_far_too_many_micro_batches_are_refused_at_once():
    with pytest.raises(ValueError, match=r"^train.global_batch=2147483647 over 1 ranks of dp is"):
        TrainConfig(global_batch=2**31 - 1, micro_batch=1).accumulation(1)
    assert TrainConfig(global_batch=100_000, micro_batch=1).accumulation(1) == 100_000


def test_a_line_is_cut_and_shows_no_control_character():
    assert fields.shown("a\nb") == "'a\\nb'"
    assert fields.shown("x" * 100) == "'" + "x" * 59 + "..."
    assert fields.shown(-(10**5000)) == "a number of 5000 digits"
    assert fields.shown(0.1) == "0.1"
