"""A training of a mixture of experts tells how even the load is, and what of it a token uses."""

import re

import pytest
from faults.forks import train

from labcode import recipes
from labcode.measure import metrics
from labcode.perf.flops import training_flops_per_sample

SIZES = ["--model.num_layers=2", "--model.hidden_size=16", "--model.num_heads=2"]
SIZES += ["--model.context_length=32", "--model.expert_ffn_size=16"]
RUN = ["--train.global_batch=4", "--train.log_every=2", "--train.steps=4", "--train.out=run"]
RUN += ["--train.eval_batches=1", "--train.sample_tokens=0"]


def test_the_log_the_rows_and_tensorboard_tell_the_load(tmp_path):
    args = ["gpt_moe_tiny", *SIZES, *RUN, "--model.expert_capacity=1.25", "--parallel.ep=2"]
    done = train(args, cwd=tmp_path, ranks=2)
    assert done.codes == [0, 0], done.err
    log = done.out[0]
    assert re.search(
        r"[\d,]+ weights, [\d,]+ of them for each token: 2 of 8 experts in each layer, of which a "
        r"rank keeps 4\n",
        log,
    )
    line = r"fullest expert \d\.\d\d x even \| \d+\.\d% of rows dropped \| router loss 0\.\d{4}"
    assert len(re.findall(line, log)) == 2
    rows = [row for row in metrics.read(tmp_path / "run") if "loss" in row]
    assert [row["step"] for row in rows] == [2, 4]
    for row in rows:
        assert 1 <= row["expert_load"] <= 4  # 8 experts, of which a token uses 2
        assert 0 <= row["dropped_share"] < 1
        assert row["router_loss"] > 0
    assert {"expert_load", "dropped_share", "router_loss"} <= metrics.UNITS.keys()
    assert b"expert_load" in next((tmp_path / "run" / "tensorboard").iterdir()).read_bytes()


@pytest.mark.parametrize("frozen", [False, True])
def test_the_flops_of_a_mixture_are_those_that_its_tokens_use(tmp_path, frozen):
    freeze = ["--train.freeze=blocks.*.mlp.experts"] if frozen else []
    done = train(["gpt_moe_tiny", *SIZES, *RUN, *freeze], cwd=tmp_path)
    assert done.codes == [0], done.err
    changes = {"model.num_layers": 2, "model.hidden_size": 16, "model.num_heads": 2}
    changes |= {"model.context_length": 32, "model.expert_ffn_size": 16, "model.vocab_size": 83}
    model = recipes.with_changes(recipes.gpt_moe_tiny(), changes).model
    all_experts = recipes.with_changes(
        recipes.gpt_moe_tiny(), changes | {"model.experts_per_token": 8}
    ).model
    flops = training_flops_per_sample(model)
    idle = 6 * 32 * (model.num_parameters - model.num_active_parameters)
    assert training_flops_per_sample(all_experts) - flops == idle
    if frozen:  # no gradient of the weights of 2 of 8 experts
        flops -= 2 * 32 * model.num_expert_parameters * 2 // 8
    for row in metrics.read(tmp_path / "run"):
        if "flops_per_s" in row:
            assert row["flops_per_s"] == pytest.approx(flops * row["samples_per_s"])
