"""The parts of GRPO: advantages, weights of tokens, the clipped loss, and rewards."""

import math

import pytest
import torch

from labcode.train import brackets, grpo


def test_an_advantage_is_measured_against_its_group() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]], dtype=torch.float64)
    found = grpo.advantages(rewards)
    std = rewards[0].std().item()
    assert found[0].tolist() == pytest.approx([x / std for x in (0.5, -0.5, -0.5, 0.5)], rel=1e-5)
    assert found[1].tolist() == [0.0] * 4
    assert grpo.advantages(rewards, by_std=False)[0].tolist() == [0.5, -0.5, -0.5, 0.5]


@pytest.mark.parametrize(
    ("average", "long", "short"),
    [("sequence", 1 / 8, 1 / 2), ("token", 1 / 5, 1 / 5), ("constant", 1 / 8, 1 / 8)],
)
def test_the_weight_of_a_token(average: grpo.Average, long: float, short: float) -> None:
    counts = torch.tensor([[True] * 4, [True, False, False, False]])
    found = grpo.token_weights(counts, average)
    expected = torch.tensor([[long] * 4, [short, 0, 0, 0]], dtype=torch.float64)
    assert torch.allclose(found, expected)


@pytest.mark.parametrize(
    ("ratio", "advantage", "slope"),
    [
        (1.0, 2.0, -2.0),  # on policy: the plain gradient, -A times that of log p
        (1.1, 2.0, -2.2),
        (1.3, 2.0, 0.0),  # has moved where it should: no more
        (0.7, 2.0, -1.4),  # has moved the other way: pulled back
        (0.7, -2.0, 0.0),
        (1.3, -2.0, 2.6),
    ],
)
def test_the_gradient_ends_where_the_ratio_is_clipped(
    ratio: float, advantage: float, slope: float
) -> None:
    old = torch.tensor([[-1.0]], dtype=torch.float64)
    new = (old + math.log(ratio)).requires_grad_()
    ones = torch.ones(1, 1, dtype=torch.float64)
    loss = grpo.policy_loss(new, old, torch.tensor([advantage]), ones, grpo.GRPO())
    loss.backward()
    assert loss.item() == pytest.approx(-min(ratio * advantage, _clipped(ratio) * advantage))
    assert new.grad is not None
    assert new.grad.item() == pytest.approx(slope)


def _clipped(ratio: float) -> float:
    return min(max(ratio, 0.8), 1.2)


def test_the_right_answer_alone_is_rewarded() -> None:
    prompts = torch.tensor([[0, 1, 2]] * 3)
    answered = brackets.answers(prompts)
    assert brackets.text(torch.cat((prompts, answered), 1)[0]) == "([{}])."
    answered[1, 0] = 3
    answered[2, 3] = 5
    assert brackets.rewards(prompts, answered).tolist() == [1.0, 0.0, 0.0]
