"""Configs refuse what cannot work before anything starts.

Each says in one line what to change.
"""

import pytest

from labcode.config import GPTConfig, ParallelConfig, TextData, TrainConfig, ViTConfig, WeatherData


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: GPTConfig(hidden_size=64, num_heads=3),
            "hidden_size=64 is not a multiple of num_heads=3",
        ),
        (
            lambda: GPTConfig(num_heads=4, num_kv_heads=3),
            "num_heads=4 is not a multiple of num_kv_heads=3",
        ),
        (lambda: GPTConfig(hidden_size=36, num_heads=4, positions="rotary"), "head size 9 is odd"),
        (lambda: GPTConfig(dropout=1.0), "dropout=1.0"),
        (lambda: ViTConfig(lat=91), "lat=91 is not a multiple of patch_size=5"),
        (lambda: TextData(val_fraction=1.0), "val_fraction=1.0"),
        (lambda: WeatherData(variables=()), "variables is empty"),
        (lambda: TrainConfig(steps=0), "steps=0"),
        (
            lambda: TrainConfig(global_batch=30, micro_batch=8).accumulation(2),
            r"micro_batch\*dp = 8\*2 = 16",
        ),
        (lambda: TrainConfig(global_batch=2).accumulation(4), "not a multiple"),
        (
            lambda: TrainConfig(global_batch=16).accumulation(3),
            "global_batch=16 is not a multiple of dp=3: .*train.global_batch to 18",
        ),
        (
            lambda: ParallelConfig(tp=3, dp=2).shape(8),
            r"2\*1\*1\*3 = 6 but WORLD_SIZE is 8: .* launch 6 ranks",
        ),
        (lambda: ParallelConfig(tp=3).shape(4), "= 3 but WORLD_SIZE is 4"),
        (lambda: ParallelConfig(ep=4).shape(6), "parallel.dp=6 is not divisible by ep=4"),
        (
            lambda: GPTConfig(num_experts=4, experts_per_token=5, bias=False),
            "experts_per_token=5 with model.num_experts=4",
        ),
        (
            lambda: GPTConfig(num_experts=4, expert_capacity=0.5, bias=False),
            "expert_capacity=0.5: below 1 rows are dropped",
        ),
        (lambda: GPTConfig(num_experts=4), "experts have no biases here"),
        (
            lambda: GPTConfig(num_experts=4, bias=False, dropout=0.1),
            "dropout=0.1: experts have no dropout",
        ),
    ],
)
def test_impossible_values_are_refused_in_one_line(make, message):
    with pytest.raises(ValueError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_dp_takes_the_ranks_that_the_other_axes_leave():
    assert ParallelConfig(tp=2).shape(8).dp == 4
    assert ParallelConfig().shape(1).dp == 1


def test_accumulation_keeps_the_global_batch():
    for dp in (1, 2, 4):
        train = TrainConfig(global_batch=32, micro_batch=4)
        assert train.accumulation(dp) * 4 * dp == 32
    assert TrainConfig(global_batch=32).accumulation(4) == 1
