"""The arithmetic of a step's memory; the numbers are held by measured peaks in tests/ranks."""

from dataclasses import replace

import pytest

from labcode.config import GPTConfig, ViTConfig
from labcode.perf.training_memory import (
    WIDTHS,
    training_memory,
    training_moments,
    weight_counts,
)
from labcode.topology import GridShape

GPT = GPTConfig(vocab_size=96, context_length=32, num_layers=3, num_heads=4, hidden_size=32)
VIT = ViTConfig(num_variables=3, num_forcings=1, lat=20, lon=40, num_layers=2, hidden_size=64)
MIXTURE = replace(
    GPT,
    norm="rms",
    mlp="swiglu",
    bias=False,
    num_experts=8,
    expert_ffn_size=48,
    shared_ffn_size=16,
    router_bias_rate=0.01,
)
MODELS = {
    "gpt": GPT,
    "rotary, not tied": replace(GPT, positions="rotary", tie_embeddings=False),
    "llama": replace(GPT, positions="rotary", norm="rms", mlp="swiglu", bias=False),
    "fewer kv heads": replace(GPT, num_kv_heads=2, ffn_size=96),
    "vit": VIT,
}


@pytest.mark.parametrize("name", MODELS)
def test_the_weights_are_those_of_the_model_and_tp_cuts_the_matrices(name):
    model = MODELS[name]
    counts = weight_counts(model)
    assert model.num_layers * counts.layer + counts.ends == model.num_parameters
    halves = weight_counts(model, GridShape(tp=2))
    assert counts.layer / 2 < halves.layer < 0.6 * counts.layer


def test_a_rank_has_its_experts_a_part_of_their_features_and_the_whole_router():
    counts = weight_counts(MIXTURE)
    assert MIXTURE.num_layers * counts.layer + counts.ends == MIXTURE.num_parameters
    experts = MIXTURE.num_expert_parameters / MIXTURE.num_layers
    quarter = weight_counts(MIXTURE, GridShape(dp=4, ep=4))
    assert counts.layer - quarter.layer == experts * 3 / 4
    halves = weight_counts(MIXTURE, GridShape(tp=2))
    router = 8 * (32 + 1)
    assert 2 * halves.layer - counts.layer == router + 2 * 32  # and two norms
    with pytest.raises(ValueError, match=r"num_experts=8: the buffers of experts"):
        training_memory(MIXTURE, micro_batch=2)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", WIDTHS)
def test_a_rank_holds_weights_and_moments_throughout_and_the_parts_add_up(name, dtype):
    model = MODELS[name]
    width = 8 if dtype == "float64" else 4
    moments = training_moments(model, micro_batch=2, dtype=dtype)
    for moment in moments:
        assert moment.parameters == width * model.num_parameters
        assert moment.optimizer == 2 * moment.parameters
        assert moment.total == sum(moment.parts.values())
        assert min(moment.parts.values()) >= 0
    assert moments[0].moment == "loss backward"
    assert moments[-1].gradients == moments[-1].parameters and moments[-1].activations == 0
    peak = training_memory(model, micro_batch=2, dtype=dtype)
    assert peak.total == max(moment.total for moment in moments)


def test_accumulation_keeps_the_gradients_and_the_data_of_all_micro_batches():
    one = training_moments(GPT, micro_batch=2)
    four = training_moments(GPT, micro_batch=2, num_micro_batches=4)
    for first, last in zip(one, four, strict=True):
        assert last.gradients == 4 * GPT.num_parameters
        assert last.data == 4 * first.data
        assert last.activations == first.activations


def test_a_plain_model_has_gradients_and_no_buckets():
    plain = training_moments(GPT, micro_batch=2, data_parallel="none")
    with_ddp = training_moments(GPT, micro_batch=2, data_parallel="ddp")
    for alone, averaged in zip(plain, with_ddp, strict=True):
        assert alone.buckets == 0
        assert averaged.total - alone.total == averaged.buckets == 4 * GPT.num_parameters


def test_what_makes_the_peak_depends_on_the_shape():
    vocabulary = replace(GPT, vocab_size=5000)
    many_tokens = replace(GPT, num_layers=12, hidden_size=64, vocab_size=50)
    wide = replace(GPT, hidden_size=512, context_length=4)
    names = [
        training_memory(vocabulary, micro_batch=4).moment,
        training_memory(many_tokens, micro_batch=8).moment,
        training_memory(wide, micro_batch=1).moment,
    ]
    assert names == ["loss backward", "last layer backward", "gradients complete"]


def test_checkpointing_and_tp_each_make_less():
    deep = replace(GPT, num_layers=12, hidden_size=64)
    whole = training_memory(deep, micro_batch=8).total
    options = {"micro_batch": 8, "activation_checkpointing": "full"}
    assert training_memory(deep, **options).total < 0.6 * whole
    options["activation_checkpointing"] = "selective"
    log_sum_exp = 4 * 8 * deep.context_length * deep.num_heads
    assert training_memory(deep, **options).total == whole - 12 * log_sum_exp
    assert training_memory(deep, GridShape(tp=2), micro_batch=8).total < whole


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "dtype='int8': choose float32 or"),
        ({"data_parallel": "horovod"}, "data_parallel='horovod': choose ddp or labcode or none"),
        ({"activation_checkpointing": "some"}, "activation_checkpointing='some': choose none or"),
        ({"shape": GridShape(pp=2)}, "pp=2: a stage holds several micro-batches"),
        (
            {"activation_checkpointing": "selective", "fused_attention": False},
            "'selective' without a fused attention: .* ask for fused_attention=True",
        ),
    ],
)
def test_what_is_not_known_is_refused_in_one_line(options, message):
    with pytest.raises(ValueError, match=message) as caught:
        training_memory(GPT, micro_batch=1, **options)
    assert "\n" not in str(caught.value)
