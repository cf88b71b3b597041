"""Recipes are complete configs; single fields are changed together and checked once."""

import pytest

from labcode import recipes


def test_every_recipe_can_be_built_and_changed_field_by_field():
    for name in recipes.RECIPES:
        config = recipes.get(name)
        assert config.name == name
        assert recipes.with_changes(config, recipes.field_paths(config)) == config


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: recipes.get("gpt_huge"),
            "unknown recipe 'gpt_huge': .*gpt_tiny, gpt_moe_tiny, gpt_10m, vit_tiny",
        ),
        (lambda: recipes.gpt_shape("gpt_2b"), "unknown model shape 'gpt_2b'"),
        (
            lambda: recipes.with_changes(recipes.gpt_tiny(), {"train.stepz": 1}),
            "unknown field train.stepz: did you mean train.steps[?] .* gpt_tiny --help",
        ),
        (
            lambda: recipes.with_changes(recipes.gpt_tiny(), {"name.x": 1}),
            "unknown field name.x: ",
        ),
        (lambda: recipes.with_changes(recipes.gpt_tiny(), {"train": 1}), "unknown field train: "),
    ],
)
def test_what_does_not_exist_is_named_in_one_line(make, message):
    with pytest.raises(ValueError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_fields_that_only_fit_together_are_changed_together():
    changes = {"model.num_heads": 5, "model.hidden_size": 35, "model.positions": "learned"}
    for order in (changes, dict(reversed(changes.items()))):
        model = recipes.with_changes(recipes.gpt_tiny(), order).model
        assert (model.num_heads, model.hidden_size) == (5, 35)
    # resuming needs the folder of the run: two fields of two sections
    both = {"checkpoint.resume": True, "train.out": "run"}
    assert recipes.with_changes(recipes.gpt_tiny(), both).checkpoint.resume


def test_changes_that_do_not_fit_are_refused_by_what_they_make_together():
    with pytest.raises(ValueError, match="hidden_size=36 is not a multiple of num_heads=5"):
        recipes.with_changes(recipes.gpt_tiny(), {"model.num_heads": 5, "model.hidden_size": 36})
