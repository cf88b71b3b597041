"""What lessons 03 and 03b count and race."""

import pytest
import torch
import torch.nn.functional as F

from course.exercises import l03
from course.labs import l03_race
from course.labs.l03_step import (
    NERSC_VIT,
    Batches,
    config,
    median_s,
    nersc_forward,
    new_model,
    operations,
    recorded,
)
from labcode.measure import roofline


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


@pytest.mark.parametrize("head", l03.HEADS, ids=str)
def test_the_truth_of_exercise_3_2_is_attention_of_torch(head):
    q, k, v = l03._operands(head)
    ours = l03.blockwise(q, k, v, head.block)
    theirs = F.scaled_dot_product_attention(q[None], k[None], v[None])[0]
    torch.testing.assert_close(ours, theirs)


def test_the_truth_of_exercise_3_3_is_adamw_of_torch():
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


def test_a_dot_counts_each_operand_once(monkeypatch):
    monkeypatch.setattr(roofline, "LONG_ENOUGH_S", 0.0)
    monkeypatch.setitem(roofline.WIDTH, "cpu", 8)
    monkeypatch.setitem(roofline.TOKENS, "cpu", (1, 4))
    addition, one, four = roofline.dots(torch.device("cpu"), torch.bfloat16)
    assert (addition.flops, addition.num_bytes) == (64, 3 * 64 * 2)
    assert (one.flops, one.num_bytes) == (2 * 64, 2 * (64 + 2 * 8))
    assert four.intensity == 4 * 2 * 64 / (2 * (64 + 4 * 2 * 8))
    assert four.flops_per_s == four.flops / four.seconds


def test_attention_is_the_same_in_each_kernel_of_a_cpu():
    for kernel in ("plain", "fused"):
        for backward in (False, True):
            shape = (1, 2, 8, 4)
            assert roofline.attention_s(kernel, shape, torch.device("cpu"), backward=backward) > 0


def test_what_a_gpu_has_measured_is_what_the_lesson_shows():
    device, found = recorded("roofline")
    assert device["device"] == "NVIDIA H100 80GB HBM3"
    dots = [roofline.Dot(**row) for row in found["dots"]["bfloat16"]]
    assert dots[0].name == "addition" and dots[1].name == "linear layer, 1 tokens"
    _, rungs = recorded("ladder")
    assert {"tf32", "bfloat16", "fused optimizer", "compiled"} <= {row["name"] for row in rungs}


def test_the_published_model_has_the_sizes_that_the_lesson_says():
    assert (NERSC_VIT.hidden_size, NERSC_VIT.num_layers) == (384, 12)
    assert NERSC_VIT.sequence_length == 4050
    assert nersc_forward().device.type == "meta"
