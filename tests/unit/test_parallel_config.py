"""A layout that cannot work is refused in one line, before any process group is made."""

from dataclasses import replace

import pytest

from labcode import recipes
from labcode.config import GPTConfig, ParallelConfig, ViTConfig
from labcode.runtime import combinations
from labcode.topology import GridShape

GPT = GPTConfig(vocab_size=83, context_length=48, num_heads=6, hidden_size=48, num_kv_heads=2)
VIT = ViTConfig(num_variables=2, lat=30, lon=60, patch_size=5, num_heads=4)  # 6 x 12 = 72 patches
MIXTURE = replace(GPT, num_experts=6, expert_ffn_size=20, bias=False)
MANY = {"model.num_experts": 6, "model.bias": False, "train.global_batch": 12}


@pytest.mark.parametrize(
    "model, grid, options, message",
    [
        (GPT, {"tp": 4}, {}, r"model.num_heads=6 is not divisible by parallel.tp=4"),
        (
            GPT,
            {"tp": 3},
            {},
            r"model.num_kv_heads=2 is neither a multiple nor a divisor of parallel.tp=3",
        ),
        (GPTConfig(ffn_size=3), {"tp": 4}, {}, r"model.ffn_size=3 is smaller than parallel.tp=4"),
        (
            GPTConfig(vocab_size=3),
            {"tp": 4},
            {},
            r"model.vocab_size=3 is smaller than parallel.tp=4",
        ),
        (
            GPTConfig(context_length=9),
            {"cp": 5},
            {},
            r"model.context_length=9 is smaller than 2\*parallel.cp = 2\*5",
        ),
        (
            GPTConfig(context_length=25),
            {"tp": 2},
            {"sequence_parallel": True},
            r"=25 is not divisible by cp\*tp = 1\*2",
        ),
        (VIT, {"cp": 5}, {}, r"the number of patches=72 is not divisible by parallel.cp=5"),
        (
            VIT,
            {"cp": 4, "tp": 4},
            {"sequence_parallel": True},
            r"=72 is not divisible by cp\*tp = 4\*4",
        ),
        (
            GPTConfig(dropout=0.1),
            {"cp": 2},
            {},
            r"model.dropout=0.1 with parallel.cp=2: ring attention has no dropout",
        ),
        (GPT, {"dp": 2}, {"zero_stage": 4}, r"parallel.zero_stage=4: give at most 3"),
        (GPT, {"dp": 2}, {"zero_replicas": 2}, r"zero_replicas=2 with parallel.zero_stage=0"),
        (
            GPT,
            {"dp": 4},
            {"zero_stage": 3, "zero_replicas": 3},
            r"parallel.dp=4 is not divisible by parallel.zero_replicas=3",
        ),
        (
            GPTConfig(num_kv_heads=2),
            {"tp": 4, "dp": 2},
            {"zero_stage": 1},
            r"zero_stage=1 with parallel.tp=4 and model.num_kv_heads=2: weights of which ranks",
        ),
        (
            GPT,
            {"pp": 2, "dp": 2},
            {"zero_stage": 2, "pipeline_schedule": "zero_bubble", "data_parallel": "labcode"},
            r"zero_stage=2 with parallel.pipeline_schedule=zero_bubble",
        ),
        (GPT, {"pp": 2, "dp": 2}, {"zero_stage": 3}, r"use --parallel.data_parallel labcode"),
        (
            GPT,
            {"cp": 2, "dp": 2},
            {"zero_stage": 3, "zero_replicas": 2},
            r"zero_replicas=2 with parallel.data_parallel=ddp works for zero_stage 2 and 3 without",
        ),
        (
            GPT,
            {},
            {"context_attention": "star"},
            r"context_attention='star': choose ring or all_gather",
        ),
        (GPT, {"dp": 2, "ep": 2}, {"ep": 2}, r"ep=2 divides experts, and this model has none"),
        (MIXTURE, {"dp": 4, "ep": 4}, {"ep": 4}, r"num_experts=6 is not divisible by parallel.ep"),
        (MIXTURE, {"tp": 6}, {}, r"expert_ffn_size=20 is not divisible by parallel.tp=6"),
        (MIXTURE, {"dp": 2, "ep": 2}, {"ep": 2, "zero_stage": 1}, r"takes all weights of dp for"),
        (
            MIXTURE,
            {"dp": 4, "ep": 2},
            {"ep": 2, "zero_stage": 3, "zero_replicas": 2},
            r"zero_replicas=2 with parallel.ep=2: dp is cut for experts already",
        ),
        (
            replace(MIXTURE, expert_capacity=1.25),
            {"cp": 2},
            {},
            r"expert_capacity=1.25 with parallel.cp=2: which rows of a sequence come first",
        ),
    ],
)
def test_a_layout_that_cannot_work_is_refused_in_one_line(model, grid, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        ParallelConfig(**options).check(model, GridShape(**grid))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "model, grid, options",
    [
        # an odd vocabulary is shared out unevenly
        (GPT, {"tp": 2, "cp": 4}, {"sequence_parallel": True}),
        (GPTConfig(), {"tp": 4, "dp": 3}, {}),
        (GPTConfig(num_kv_heads=2), {"tp": 4}, {}),  # two ranks hold each key/value head
        (GPTConfig(ffn_size=10), {"tp": 4}, {}),
        (GPT, {"cp": 5}, {}),
        (GPTConfig(dropout=0.1), {}, {"activation_checkpointing": "full"}),
        (GPTConfig(dropout=0.1), {"cp": 2}, {"context_attention": "all_gather"}),
        (GPTConfig(dropout=0.1), {"tp": 2}, {"context_attention": "ring"}),
        (VIT, {"cp": 2, "tp": 4}, {"sequence_parallel": True}),
        (VIT, {"dp": 4}, {"zero_stage": 3, "zero_replicas": 2}),
        (
            GPT,
            {"dp": 2, "pp": 2},
            {"zero_stage": 1, "pipeline_schedule": "zero_bubble", "data_parallel": "labcode"},
        ),
        # sizes that come from the data are checked when they are known
        (ViTConfig(), {"cp": 7}, {}),
    ],
)
def test_a_layout_that_works_is_let_through(model, grid, options):
    ParallelConfig(**options).check(model, GridShape(**grid))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"parallel.tp": 3}, "model.num_heads=4 is not divisible"),
        ({"parallel.cp": 3, "model.context_length": 5}, "context_length"),
        (MANY | {"train.compile": "block"}, "leave both off"),
        (MANY | {"optim.name": "lamb"}, "would get one norm together, use adamw"),
        (MANY | {"parallel.ep": 3, "train.noise_scale": True}, "micro-batches of several ranks"),
        (MANY | {"parallel.ep": 3, "local.steps": 2}, "no rank has a whole copy"),
        (
            {"parallel.zero_stage": 1, "checkpoint.every": 5, "train.global_batch": 6},
            "ZeroRedundancyOptimizer, whose state must be gathered on one rank to be saved",
        ),
        (
            {"parallel.pp": 3, "model.num_layers": 2},
            "3*1 stages, but model.num_layers=2: each stage needs a layer",
        ),
    ],
)
def test_a_config_is_refused_before_anything_starts(changes, message):
    with pytest.raises(ValueError, match=message):
        combinations.check(recipes.with_changes(recipes.gpt_tiny(), changes), world_size=3)


def test_what_no_number_of_ranks_mends_is_said_first():
    config = recipes.with_changes(recipes.gpt_tiny(), {"parallel.tp": 3})
    with pytest.raises(ValueError, match=r"by parallel.tp=3: parallel.tp can be 1, 2, 4$"):
        combinations.check(config, world_size=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel.stages_per_rank": 2}, "parallel.stages_per_rank=2 with parallel.pipeline_sch"),
        (
            {
                "parallel.pp": 2,
                "parallel.stages_per_rank": 2,
                "parallel.pipeline_schedule": "interleaved",
                "train.micro_batch": 12,
                "train.global_batch": 36,
                "model.num_layers": 4,
            },
            "3 micro-batches, which are no multiple of parallel.pp=2: change train.micro_batch",
        ),
    ],
)
def test_stages_and_micro_batches_are_named_as_fields(changes, message):
    config = recipes.with_changes(recipes.gpt_tiny(), changes)
    with pytest.raises(ValueError, match=message):
        combinations.check(config, config.parallel.pp)
