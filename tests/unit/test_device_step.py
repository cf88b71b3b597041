"""The arithmetic of a step on one device; benchmarks/predicted_step.py holds it to the clock."""

from dataclasses import replace

import pytest

from labcode.config import GPTConfig, ViTConfig
from labcode.perf.flops import training_flops_per_sample
from labcode.perf.step import (
    OPTIMIZER_PASSES,
    DeviceSpeed,
    device_step,
    launches_per_micro_batch,
)

GPT = GPTConfig(vocab_size=96, context_length=32, num_layers=3, num_heads=4, hidden_size=32)
VIT = ViTConfig(num_variables=3, num_forcings=1, lat=20, lon=40, num_layers=2, hidden_size=64)
SPEED = DeviceSpeed(flops_per_s=1e11, bytes_per_s=1e10, launch_s=5e-6)
NOTHING = 1e30  # so fast that it takes no time


@pytest.mark.parametrize("model", [GPT, VIT], ids=["gpt", "vit"])
def test_each_part_is_a_count_over_a_speed(model):
    step = device_step(model, SPEED, micro_batch=4)
    assert step.matmul_s == 4 * training_flops_per_sample(model) / 1e11
    assert step.launch_s == launches_per_micro_batch(model) * 5e-6
    assert step.step_s == step.matmul_s + step.memory_s + step.launch_s
    only_memory = DeviceSpeed(NOTHING, SPEED.bytes_per_s, 1 / NOTHING)
    assert device_step(model, only_memory, micro_batch=4).step_s == pytest.approx(step.memory_s)


def test_bytes_grow_with_the_tokens_and_the_optimizer_is_there_once():
    one = device_step(GPT, SPEED, micro_batch=1).memory_s
    two = device_step(GPT, SPEED, micro_batch=2).memory_s
    optimizer_s = OPTIMIZER_PASSES * GPT.num_parameters * 4 / 1e10
    assert two - optimizer_s == pytest.approx(2 * (one - optimizer_s))
    accumulated = device_step(GPT, SPEED, micro_batch=1, num_micro_batches=2)
    assert accumulated.memory_s == pytest.approx(two)
    assert accumulated.launch_s == 2 * device_step(GPT, SPEED, micro_batch=2).launch_s


def test_one_layer_counted_by_hand():
    more = replace(GPT, num_layers=4)
    tokens, hidden = 32, 32
    norms_and_sums = 2 * (5 + 6) * hidden
    gelu = 5 * 4 * hidden
    join = 2 * 3 * hidden
    biases = 3 * hidden + hidden + 4 * hidden + hidden
    scores = 6 * 4 * tokens
    moved = 4 * tokens * (norms_and_sums + gelu + join + biases + scores)
    moved += OPTIMIZER_PASSES * 4 * (more.num_parameters - GPT.num_parameters)
    found = device_step(more, SPEED, micro_batch=1).memory_s
    assert found - device_step(GPT, SPEED, micro_batch=1).memory_s == pytest.approx(moved / 1e10)


def test_what_makes_more_operations_and_what_makes_fewer_bytes():
    plain = launches_per_micro_batch(GPT)
    assert launches_per_micro_batch(replace(GPT, positions="rotary")) > plain
    assert launches_per_micro_batch(GPT, autocast=True) > plain
    narrow = device_step(GPT, SPEED, micro_batch=8, value_bytes=2)
    assert narrow.memory_s < device_step(GPT, SPEED, micro_batch=8).memory_s
    tiny = device_step(replace(GPT, context_length=4), SPEED, micro_batch=1)
    assert tiny.launch_s > tiny.matmul_s + tiny.memory_s, "launches are the bottleneck"


def test_experts_move_and_launch_what_a_token_and_a_loop_need():
    mixture = replace(
        GPT, bias=False, mlp="swiglu", num_experts=8, experts_per_token=2, expert_ffn_size=48
    )
    as_wide = replace(mixture, num_experts=0, ffn_size=96)
    assert launches_per_micro_batch(mixture) > launches_per_micro_batch(as_wide) + 3 * 3 * 8
    one = device_step(mixture, SPEED, micro_batch=1)
    more = device_step(replace(mixture, num_experts=16), SPEED, micro_batch=1)
    # what a token uses stays, but for the router's larger product
    router = 3 * 3 * 2 * 8 * mixture.hidden_size * mixture.context_length / SPEED.flops_per_s
    assert more.matmul_s - one.matmul_s == pytest.approx(router)
    assert one.memory_s > device_step(as_wide, SPEED, micro_batch=1).memory_s
