"""The labs of lesson 26: two fleets train as one process, and each patient has what it should."""

import math

import pytest
import torch
import torch.distributed as dist

from course.labs import l26_by_hand as by_hand
from course.labs import l26_two_fleets as lab
from labcode.comm.grid import Grid
from labcode.parallel import reshard
from labcode.train import grpo


def test_the_loss_of_the_lesson_is_that_of_the_library():
    random = torch.Generator().manual_seed(1)
    old = -torch.rand(4, 5, generator=random, dtype=torch.float64)
    new = old + torch.randn(4, 5, generator=random, dtype=torch.float64) / 3
    advantage = torch.randn(4, generator=random, dtype=torch.float64)
    counts = torch.arange(5) < torch.tensor([[5], [2], [1], [3]])
    for average in ("sequence", "token", "constant"):
        options = grpo.GRPO(average=average)
        weights = grpo.token_weights(counts, average)
        expected = grpo.policy_loss(new, old, advantage, weights, options)
        found = by_hand.grpo_loss(new, old, advantage, counts, average=average)
        torch.testing.assert_close(found, expected)
    rewards = torch.tensor([[1.0, 0, 0], [1, 1, 1]])
    assert torch.equal(by_hand.advantages(rewards), grpo.advantages(rewards))


def test_recorded_runs_are_those_of_train():
    runs = lab.recorded()
    assert sorted(runs) == list(lab.LAGS)
    assert all(len(of_lag) == 8 and len(of_lag[0]) == lab.STEPS for of_lag in runs.values())
    for found, row in zip(lab.train(3, seed=2, lag=1), runs[1][1][:3], strict=True):
        assert found == pytest.approx(row, abs=2e-5)


def test_what_the_text_says_of_lag():
    off = {lag: lab.mean_of(lag, "off") for lag in lab.LAGS}
    assert off[0] < 1e-4
    assert off[1] < off[4] < off[16]
    last = {lag: lab.mean_rewards(lag)[-1] for lag in lab.LAGS}
    assert last[16] < 0.5 < last[4] < last[0]
    early = {lag: lab.mean_rewards(lag)[6] for lag in lab.LAGS}
    assert early[16] < early[4] < early[1]
    ends = {lag: sorted(lab.rewards_by_seed(lag)[:, -1].tolist()) for lag in (0, 1)}
    assert min(ends[0]) > 0.7
    assert max(ends[1][:2]) < 0.2 and min(ends[1][2:4]) > 0.5 and max(ends[1][2:4]) < 0.6
    assert min(ends[1][4:]) > 0.7


@pytest.mark.parametrize(("draw_s", "learn_s", "exchange_s"), [(6, 4, 1), (2, 5, 0.5), (3, 3, 0)])
def test_drawing_and_learning_at_the_same_time(draw_s, learn_s, exchange_s):
    found = lab.simulated_step_s(draw_s, learn_s, exchange_s)
    assert math.isclose(found, max(draw_s, learn_s) + exchange_s)


def test_dtypes_disagree_as_the_text_says():
    exact, _ = lab.disagreement("float64", "float64")
    apart, _ = lab.disagreement("float32", "bfloat16")
    alike, _ = lab.disagreement("bfloat16", "bfloat16")
    assert exact < 1e-12
    assert alike < apart
    assert 0.02 < apart < 0.5


def test_kernel_and_packing_round_and_a_missing_mask_does_not():
    for dtype, rounding in (("float64", 1e-12), ("float32", 1e-4), ("bfloat16", 0.3)):
        ways = lab.attention_ways(dtype)
        off = {way: ratio.log().abs().max().item() for way, ratio in ways.items()}
        assert off["another kernel"] < rounding
        assert off["packed"] < rounding
        assert off["packed, no mask"] > 1


def rewards_on_two_fleets(steps):
    number, grid = Grid.fleets(lab.LEARNER, lab.GENERATOR)
    is_learner = number == 0
    model = lab.part_of_model(is_learner, grid)
    moves = lab.plan_of(model, is_learner)
    optimizer = torch.optim.AdamW(model.weights.values(), lr=lab.LEARNING_RATE)
    random = torch.Generator().manual_seed(26)
    world = dist.group.WORLD
    assert world is not None
    rewards = []
    for step in range(steps):
        parts = reshard.parts_of(model)
        reshard.exchange(moves, parts, step, world, torch.float64)
        batch = lab.draw_and_share(model, is_learner, step, random)
        reward = lab.rewards_of(batch.tokens)
        rewards.append(reward.mean().item())
        if is_learner:
            grpo.learn(model, optimizer, batch, reward, grpo.GRPO(average="token"))
    return rewards


def test_two_fleets_have_the_rewards_of_one_process(ranks4):
    alone = [row.reward for row in lab.train(3, seed=26)]
    assert ranks4.run(rewards_on_two_fleets, 3) == [alone] * 4


def test_each_patient_has_what_the_table_says(ranks4):
    charts = {name: ranks4.run(lab.patient, name) for name in ("healthy", "X", "Y", "Z")}
    off = {name: chart[0].off for name, chart in charts.items()}
    rewards = {name: chart[0].rewards for name, chart in charts.items()}
    assert max(off["healthy"]) < 1e-12
    assert min(off["X"]) > 0.1
    assert off["Y"][0] < 1e-12 < min(off["Y"][1:])
    assert max(off["Z"][:2]) < 1e-12 < min(off["Z"][2:])
    assert len(set(rewards["Y"])) == 1
    assert len(set(rewards["Z"])) == 2
    for rank in (2, 3):
        wrong = {}
        for name, chart in charts.items():
            differences = chart[rank].differences
            wrong[name] = {key for key, value in differences.items() if value > 0}
        everything = set(charts["Z"][rank].differences)
        assert wrong["healthy"] == set()
        assert wrong["X"] == {key for key in everything if key.endswith("qkv.weight")}
        assert wrong["Z"] == everything
        assert wrong["X"] < wrong["Y"] < wrong["Z"]
        assert "embed.weight" not in wrong["Y"]
