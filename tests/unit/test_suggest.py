"""One "did you mean" for all messages."""

import pytest

from labcode.suggest import closest, unknown

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
