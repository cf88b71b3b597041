"""One "did you mean" for all messages."""

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


def test_nothing_to_choose_from():
    assert unknown("site", "local", ()) == "unknown site 'local': there are none"
    assert closest("local", ()) is None
