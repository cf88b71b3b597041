"""What lesson 03 counts and races."""

import pytest
import torch

from labcode.teach.exercises import l03
from labcode.teach.labs import l03_race
from labcode.teach.labs.l03_step import Batches, config, median_s, new_model, operations


def test_the_model_has_the_weights_that_the_lesson_says():
    assert round(config().num_parameters / 1e6, 2) == 1.62
    assert len(list(new_model().parameters())) == 28
    assert len(list(new_model(num_layers=24, hidden_size=32).parameters())) == 292


def test_batches_are_the_same_at_each_call():
    batches = Batches()
    tokens, targets = batches(3, size=2)
    again, _ = Batches()(3, size=2)
    assert tokens.shape == (2, 64)
    assert torch.equal(tokens, again)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert tokens.max() < config().vocab_size


def test_operations_are_counted_without_what_computes_nothing():
    x = torch.ones(3)
    found = operations(lambda: (x * 2 + 1).detach().sum().item())
    assert found == {"mul": 1, "add": 1, "sum": 1}


def test_works_are_timed_in_turn():
    done = []
    found = median_s({"a": lambda: done.append("a"), "b": lambda: done.append("b")}, rounds=2)
    assert done == ["a", "b"] * 3
    assert set(found) == {"a", "b"}


@pytest.mark.parametrize("dtype", l03_race.DTYPES)
def test_each_kind_of_training_learns(dtype):
    settings = l03_race.Settings(batch=4, dtype=dtype, optimizer="fused", attention="math")
    batches = Batches()
    trainer = l03_race.Trainer(settings, batches)
    before = trainer.loss(*batches(0)).item()
    for _ in range(4):
        assert trainer.step() > 0
    assert trainer.loss(*batches(0)).item() < before - 0.1


def test_a_speedup_is_steps_times_seconds():
    settings = l03_race.Settings(batch=8, dtype="float16")
    steps = {settings: 50, l03_race.BASELINE: 100}
    found = l03_race.race(settings, steps.get, lambda *_: (1.0, 4.0, 1.25, 1.0, 0.75))
    assert found.speedup == 8
    assert found.saved == pytest.approx(0.2)
    assert found.can_be_saved == pytest.approx(0.4)
    del steps[settings]
    found = l03_race.race(settings, steps.get, lambda *_: (0.5, 4.0, 1.25, 1.0, 0.75))
    assert found.speedup == 0
    assert found.can_be_saved == pytest.approx(0.6)


def test_settings_name_what_can_be_chosen():
    fault = "dtype='int8' is not known: choose one of float32, bfloat16, float16"
    wrong = l03_race.Settings(dtype="int8")
    assert wrong.fault == fault
    with pytest.raises(ValueError, match=fault):
        l03_race.steps_to_target(wrong)
    assert not l03_race.BASELINE.fault


def test_the_truth_of_exercise_3_4_is_adamw_of_torch():
    state = l03._new_state()
    optimizer = torch.optim.AdamW(
        state["weights"],
        lr=l03.LR,
        betas=(l03.BETA1, l03.BETA2),
        eps=l03.EPS,
        weight_decay=l03.DECAY,
    )
    for weight, grad in zip(state["weights"], state["grads"]):
        weight.grad = grad
    for step in (1, 2, 3):
        optimizer.step()
        torch.testing.assert_close(l03._row(state["weights"]), l03.plain_adamw(step)["weights"])
