"""The estimate of a step: its parts, its laws, and what it refuses."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labcode.config import GPTConfig
from labcode.perf.cluster import load_cluster
from labcode.perf.estimate import estimate, fit_scale
from labcode.perf.settings import Settings
from labcode.perf.transformer import load_model
from labcode.perf.two_level import Placement, collective_s
from labcode.topology import GridShape

SELENE = load_cluster("selene")
H100 = load_cluster("dgx-h100")
GPT3 = load_model("gpt3-175b")
LLAMA = load_model("llama3-70b")
MIXTRAL = load_model("mixtral-8x7b")
SIZES = st.sampled_from([1, 2, 4, 8])


def test_gpt3_on_1024_a100s_takes_half_a_minute():
    """Narayanan et al. 2021 and Megatron-LM's README: about 32 s and 138 TFLOP/s a GPU."""
    found = estimate(
        GPT3,
        GridShape(dp=8, pp=16, tp=8),
        SELENE,
        Settings(1536, attention="unfused", dtype="float16", activation_checkpointing="full"),
    )
    assert found.step_s == pytest.approx(32, rel=0.15)
    assert 0.25 < found.mfu < 0.45
    assert found.fits
    assert found.interval_s[0] < found.step_s < found.interval_s[1]


@settings(max_examples=30, deadline=None)
@given(SIZES, SIZES, SIZES, SIZES, st.sampled_from([0, 1, 2, 3]), st.sampled_from([1, 2]))
def test_parts_are_named_positive_and_add_up(dp, pp, cp, tp, zero_stage, micro_batch):
    options = Settings(64, micro_batch, zero_stage=zero_stage, sequence_parallel=tp > 1)
    found = estimate(LLAMA, GridShape(dp, pp, cp, tp), H100, options)
    assert sum(found.parts.values()) == pytest.approx(found.step_s)
    assert sum(found.memory_parts.values()) == pytest.approx(found.memory_bytes)
    assert min(found.parts.values()) >= 0
    assert min(found.memory_parts.values()) >= 0
    assert found.mfu < H100.gpu.matmul_share["bfloat16"]
    # what a larger batch takes beyond this one is work, so a sample gets cheaper
    larger = estimate(LLAMA, GridShape(dp, pp, cp, tp), H100, replace(options, global_batch=128))
    assert found.step_s < larger.step_s < 2 * found.step_s


@settings(max_examples=20, deadline=None)
@given(SIZES, SIZES, st.sampled_from(["none", "operators", "full"]))
def test_a_slower_network_and_more_to_compute_never_help(dp, tp, checkpointing):
    options = Settings(64, activation_checkpointing=checkpointing)
    shape = GridShape(dp=dp, tp=tp, pp=2)
    here = estimate(LLAMA, shape, H100, options).step_s
    slow = replace(H100, between=replace(H100.between, beta_bytes_per_s=1e9))
    assert estimate(LLAMA, shape, slow, options).step_s >= here
    longer = replace(LLAMA, sequence_length=2 * LLAMA.sequence_length)
    assert estimate(longer, shape, H100, options).step_s > here


def test_activation_checkpointing_costs_time_and_saves_memory():
    shape = GridShape(dp=8, tp=8)
    none = estimate(LLAMA, shape, H100, Settings(64))
    full = estimate(LLAMA, shape, H100, Settings(64, activation_checkpointing="full"))
    assert none.parts["checkpointing"] == 0
    # a third of forward and backward, the head left out
    assert 1.2 < full.step_s / none.step_s < 1.4
    assert full.memory_bytes < none.memory_bytes


def test_interleaving_shortens_the_bubble_and_a_pipeline_alone_has_one():
    shape = GridShape(dp=2, pp=8, tp=8)
    plain = estimate(GPT3, shape, SELENE, Settings(128)).parts
    chunks = estimate(GPT3, shape, SELENE, Settings(128, stages_per_rank=4)).parts
    assert chunks["bubble"] < plain["bubble"] / 2
    assert chunks["pp"] > plain["pp"]
    assert estimate(GPT3, GridShape(dp=2, tp=8), SELENE, Settings(128)).parts["bubble"] == 0


def test_a_ring_hides_behind_attention_and_a_gather_does_not():
    shape = GridShape(dp=1, cp=8, tp=8)
    long = replace(LLAMA, sequence_length=131072)
    ring = estimate(long, shape, H100, Settings(8)).parts["cp"]
    gather = estimate(long, shape, H100, Settings(8, context_attention="all_gather")).parts["cp"]
    assert ring < gather


def test_launches_and_what_comes_once_a_step_add_up_where_the_host_computes():
    here = replace(SELENE, launch_s=1e-3, host_computes=True)
    gpu = estimate(LLAMA, GridShape(), replace(here, host_computes=False), Settings(4)).parts
    cpu = estimate(LLAMA, GridShape(), here, Settings(4)).parts
    assert gpu["launch"] < cpu["launch"]
    once = estimate(LLAMA, GridShape(), replace(here, once_s=0.5), Settings(4)).parts
    assert once["optimizer"] == pytest.approx(cpu["optimizer"] + 0.5)
    assert once["launch"] == cpu["launch"]


def test_embedding_head_and_loss_are_all_reduced_over_tp_as_well():
    """A layer has four all-reduces of the activations, the ends of the model two and the loss."""
    shape = GridShape(tp=8)
    two = estimate(replace(LLAMA, num_layers=2), shape, H100, Settings(1)).parts["tp"]
    three = estimate(replace(LLAMA, num_layers=3), shape, H100, Settings(1)).parts["tp"]
    layer_s = three - two
    assert 2.5 * layer_s < two < 2.7 * layer_s
    # in a pipeline the embedding is on another stage than the head
    stage = estimate(replace(LLAMA, num_layers=4), GridShape(tp=8, pp=2), H100, Settings(1)).parts
    assert two - stage["tp"] == pytest.approx(layer_s / 4)


def test_experts_over_ep_cost_four_all_to_alls_a_layer_and_spare_gradients():
    """Mixtral on 16 nodes; 45.1 of its 46.7 billion weights are in experts."""
    one = estimate(MIXTRAL, GridShape(dp=128), H100, Settings(256))
    eight = estimate(MIXTRAL, GridShape(dp=128, ep=8), H100, Settings(256))
    assert one.parts["ep"] == 0
    assert one.model_flops == eight.model_flops
    rows = 2 * MIXTRAL.sequence_length * MIXTRAL.hidden_size * 2  # 2 experts, bfloat16
    place = Placement(8, 8)
    each_s = collective_s(H100, "all_to_all", place, rows)
    counts_s = collective_s(H100, "all_to_all", place, 8 * MIXTRAL.experts)
    layers = 2 * MIXTRAL.num_layers  # of two micro-batches
    assert eight.parts["ep"] == pytest.approx(layers * (4 * each_s + counts_s))
    assert eight.parts["dp"] < one.parts["dp"]
    assert eight.parts["optimizer"] < one.parts["optimizer"] / 5
    # each rank has fewer experts, and each of them more tokens
    assert eight.parts["product"] == pytest.approx(one.parts["product"], rel=0.1)
    again = Settings(256, activation_checkpointing="full")
    full = estimate(MIXTRAL, GridShape(dp=128, ep=8), H100, again)
    assert full.parts["ep"] == pytest.approx(layers * (6 * each_s + 2 * counts_s))
    across = estimate(MIXTRAL, GridShape(dp=128, tp=8, ep=8), H100, Settings(256))
    assert across.parts["ep"] > 5 * eight.parts["ep"]


def test_zero_3_gathers_an_expert_from_the_ranks_that_copy_it():
    def parts(ep: int) -> dict[str, float]:
        options = Settings(128, zero_stage=3)
        return dict(estimate(MIXTRAL, GridShape(dp=128, ep=ep), H100, options).parts)

    assert parts(8)["fsdp"] < parts(2)["fsdp"] < parts(1)["fsdp"]


def test_a_dense_model_has_no_part_for_experts():
    assert "ep" not in estimate(LLAMA, GridShape(dp=8, tp=8), H100, Settings(64)).parts
    for model, ep, words in (
        (LLAMA, 2, "ep=2 divides experts, and this model has none"),
        (MIXTRAL, 16, "experts=8 is not divisible by ep=16"),
    ):
        with pytest.raises(ValueError, match=words) as found:
            estimate(model, GridShape(dp=64, ep=ep), H100, Settings(64))
        assert "\n" not in str(found.value)


def test_one_run_calibrates_a_stack():
    assert fit_scale([12.0], [10.0]) == pytest.approx(1.2)
    plain = estimate(LLAMA, GridShape(dp=8, tp=8), H100, Settings(64))
    scaled = estimate(LLAMA, GridShape(dp=8, tp=8), H100, Settings(64), scale=1.2)
    assert scaled.step_s == pytest.approx(1.2 * plain.step_s)
    with pytest.raises(ValueError, match="0 measured and 0 predicted"):
        fit_scale([], [])


def test_the_configs_of_the_course_can_be_estimated_too():
    config = GPTConfig(vocab_size=96, num_layers=2, num_heads=4, hidden_size=64)
    assert estimate(config, GridShape(dp=2), SELENE, Settings(4)).step_s > 0


@pytest.mark.parametrize(
    ("shape", "options", "words"),
    [
        (GridShape(dp=3), Settings(64), r"global_batch=64 is not divisible by micro_batch \* dp=3"),
        (GridShape(tp=3), Settings(64), "num_heads=64 is not divisible by tp=3"),
        (GridShape(cp=3), Settings(64), "sequence_length=8192 is not divisible by cp=3"),
        (GridShape(pp=81), Settings(64), "pp=81 for num_layers=80"),
        (GridShape(), Settings(64, stages_per_rank=2), "stages_per_rank=2 with pp=1"),
        (GridShape(pp=4), Settings(6, stages_per_rank=2), "multiple of pp=4"),
        (GridShape(), Settings(64, activation_checkpointing="some"), "choose one of none"),
        (GridShape(), Settings(64, dtype="int4"), "dtype='int4': choose one of"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(shape, options, words):
    with pytest.raises(ValueError, match=words) as found:
        estimate(LLAMA, shape, H100, options)
    assert "\n" not in str(found.value)
