"""One "did you mean" for all messages."""

import importlib

import pytest

from labcode.runtime.suggest import closest, did_you_mean, meant, unknown

RECIPES = ("gpt_tiny", "gpt_10m", "vit_tiny")


def test_a_misspelled_name_is_answered_with_the_one_that_was_meant():
    assert unknown("recipe", "gpt_tny", RECIPES) == (
        "unknown recipe 'gpt_tny': did you mean gpt_tiny? there are gpt_tiny, gpt_10m, vit_tiny"
    )


def test_a_name_like_no_other_gets_the_list_alone():
    assert unknown("recipe", "x", RECIPES) == (
        "unknown recipe 'x': there are gpt_tiny, gpt_10m, vit_tiny"
    )


def test_fields_stand_without_quotes_and_a_long_list_can_be_cut():
    known = ("train.steps", "train.lr", "model.hidden_size")
    message = unknown("field", "train.step", known, listed=known[:2], quoted=False)
    assert message == (
        "unknown field train.step: did you mean train.steps? there are train.steps, train.lr"
    )


def test_behind_a_suggestion_a_command_stands_in_place_of_a_long_list():
    many = [f"train.field_{letter}" for letter in "abcdefghi"]
    message = unknown("field", "train.steps", [*many, "train.step"], quoted=False, all_in="x -h")
    assert message == "unknown field train.steps: did you mean train.step? x -h lists all"
    message = unknown("field", "train.zzz", many, quoted=False, all_in="x -h")
    assert message == f"unknown field train.zzz: there are {', '.join(many)}"
    assert unknown("recipe", "gpt_tny", RECIPES, all_in="x -h").endswith(", ".join(RECIPES))


FIELDS = ("data.bpe_vocab_size", "model.num_layers", "optim.lr", "profile.steps", "train.steps")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("lr", "optim.lr"),
        ("train.lr", "optim.lr"),
        ("--lr", "--optim.lr"),
        ("num_layer", "model.num_layers"),
        ("vocab_size", "data.bpe_vocab_size"),
        ("profil.steps", "profile.steps"),
        ("train.stepz", "train.steps"),
        ("optim.rl", "optim.lr"),
        ("optim.zzz", None),
        ("trian.steps", "train.steps"),
        ("dropout", None),
        ("step_time", None),
        ("bpe", "data.bpe_vocab_size"),
        ("model.num", "model.num_layers"),
    ],
)
def test_of_a_dotted_name_the_last_part_counts_first(typed, meant):
    dashes = "--" if typed.startswith("--") else ""
    assert closest(typed, [dashes + field for field in FIELDS]) == meant


def test_nothing_to_choose_from():
    assert unknown("site", "local", ()) == "unknown site 'local': there are none"
    assert closest("local", ()) is None


GPUS = ("v100-16gb", "v100-32gb", "a100-40gb", "h100-80gb", "h100-96gb", "h200", "b200")


@pytest.mark.parametrize(
    ("typed", "names"),
    [
        ("h100", ["h100-80gb", "h100-96gb"]),  # and not h200, which is more alike
        ("H100", ["h100-80gb", "h100-96gb"]),
        ("v100", ["v100-16gb", "v100-32gb"]),
        ("A100-40", ["a100-40gb"]),
        ("H200", ["h200"]),
        ("h", []),
        ("h1000", ["h100-80gb"]),  # begins none: likeness
    ],
)
def test_what_begins_with_the_word_comes_before_what_is_alike(typed, names):
    assert meant(typed, GPUS) == names
    assert closest(typed, GPUS) == (names[0] if len(names) == 1 else None)


def test_all_that_a_word_begins_are_named():
    question = "did you mean h100-80gb or h100-96gb? there are"
    assert unknown("GPU", "H100", GPUS).startswith(f"unknown GPU 'H100': {question}")
    assert did_you_mean(["a", "b", "c"]) == "did you mean a, b or c? "
    many = [f"gpt_{number}" for number in range(9)]
    assert len(meant("gpt", many)) <= 1


@pytest.mark.parametrize(
    ("typed", "dtype"),
    [("fp16", "float16"), ("half", "float16"), ("bf16", "bfloat16"), ("FP32", "float32")],
)
def test_a_dtype_goes_by_other_names(typed, dtype):
    assert meant(typed, ("auto", "float32", "bfloat16", "float16", "fp8")) == [dtype]
    assert meant(typed, ("softmax", "sigmoid")) == []


@pytest.mark.parametrize(
    "words",
    [
        "labcode.run.export runs/gpt_tiny-01 out",
        "labcode.measure.profile runs/gpt_tiny-01",
        "labcode.run.scaling runs/gpt_tiny-01",
        "labcode.debug.bisect runs/gpt_tiny-01 runs/gpt_tiny-001",
    ],
)
def test_every_command_that_takes_a_run_says_which_one_is_near(
    words, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "gpt_tiny-001"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    module, *arguments = words.split()
    assert importlib.import_module(module).main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "did you mean runs/gpt_tiny-001?" in line


def test_words_that_others_shorten_or_add_lead_to_the_name():
    known = ("--sequence-length", "--heads", "--kv-heads", "--attention", "--global-batch", "--top")
    assert meant("--max_seq_len", known) == ["--sequence-length"]
    assert meant("--num-attention-heads", known) == ["--heads"]
    assert meant("--batch", known) == ["--global-batch"]
    assert meant("--precision", known) == []
