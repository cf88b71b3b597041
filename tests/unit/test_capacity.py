"""What no memory holds is refused before anything is made, with both numbers; nothing else is."""

from dataclasses import replace

import pytest
import torch

from labcode import recipes
from labcode.config import ParallelConfig
from labcode.run import capacity
from labcode.run.capacity import check_memory
from labcode.runtime import hardware
from labcode.runtime.bootstrap import Place, World
from labcode.runtime.combinations import Resolved
from labcode.topology import GridShape

GPT_RUN = recipes.with_changes(recipes.gpt_tiny(), {"model.vocab_size": 83})
VIT_RUN = recipes.vit_tiny()
VIT_MODEL = replace(VIT_RUN.model, num_variables=4, num_forcings=2, lat=90, lon=180)


def needed(config=GPT_RUN, model=None, shape=None, ranks=1, **options):
    """The predicted bytes of a rank: the least memory that is not refused, found by halving."""
    model = model or config.model
    resolved = Resolved(config, shape or GridShape())
    low, high = 0, 2**60
    while low + 1 < high:
        middle = (low + high) // 2
        try:
            check_memory(model, resolved, ranks, middle, **options)
            high = middle
        except ValueError:
            low = middle
    return high / ranks


def test_sizes_that_no_memory_holds_are_refused_with_both_numbers():
    changes = {"model.hidden_size": 200_000, "model.num_layers": 96}
    config = recipes.with_changes(GPT_RUN, changes)
    with pytest.raises(ValueError) as caught:
        check_memory(config.model, Resolved(config, GridShape(dp=2)), 2, 25_200_000_000)
    assert str(caught.value) == (
        "the run needs at least 737 TB on each of 2 ranks, which share 25.2 GB of memory: "
        "lower model.vocab_size, model.hidden_size or model.num_layers, "
        "or use more nodes with parallel.tp or parallel.pp"
    )
    with pytest.raises(ValueError, match=r"at least 737 TB on a rank, which has [\d.]+ [GT]B of"):
        check_memory(config.model, Resolved(config, GridShape()), 1)


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"model.vocab_size": 2**31 - 1}, "lower train.micro_batch, .* or model.vocab_size"),
        ({"model.num_layers": 1000, "model.hidden_size": 32_768}, "lower model.vocab_size"),
        ({"model.context_length": 2**31 - 1}, "lower train.micro_batch, model.context_length or"),
        ({"train.global_batch": 2 * 10**9, "train.micro_batch": 20_000}, "lower train.global"),
        ({"train.global_batch": 2**31 - 1}, "lower train.micro_batch, model.context_length or"),
    ],
)
def test_the_fields_of_the_largest_part_are_named(changes, fields):
    config = recipes.with_changes(GPT_RUN, changes)
    with pytest.raises(ValueError, match=fields) as caught:
        check_memory(config.model, Resolved(config, GridShape()), 1, 10**12)
    assert "\n" not in str(caught.value)


def test_a_permutation_of_too_many_samples_is_refused():
    check_memory(GPT_RUN.model, Resolved(GPT_RUN, GridShape()), 1, 10**9, num_samples=10**7)
    with pytest.raises(ValueError, match="at least 8"):
        check_memory(GPT_RUN.model, Resolved(GPT_RUN, GridShape()), 1, 10**9, num_samples=10**9)


@pytest.mark.parametrize("dtype, value_bytes", [("float32", 4), ("bfloat16", 4), ("float64", 8)])
def test_a_weight_takes_four_numbers(dtype, value_bytes):
    config = recipes.with_changes(GPT_RUN, {"train.dtype": dtype, "train.global_batch": 1})
    large = replace(config.model, vocab_size=10**6)
    # one sample of 128 tokens over a million words: less than their weights
    weights = 4 * value_bytes * large.num_parameters
    assert needed(config, large) == pytest.approx(weights, rel=1e-3)


def test_a_prediction_is_below_what_a_step_needs():
    """The lower bound of the recipes, against the tensors that a step has at least."""
    for config, model_config in ((GPT_RUN, GPT_RUN.model), (VIT_RUN, VIT_MODEL)):
        weights = model_config.num_parameters
        assert 16 * weights <= needed(config, model_config) < 64 * weights


@pytest.mark.parametrize(
    "sizes", [{"tp": 2}, {"pp": 2}, {"dp": 2}, {"cp": 2}, {"pp": 2, "tp": 2}, {"dp": 4}]
)
def test_a_node_holds_what_its_ranks_hold(sizes):
    """All the ranks together hold at least the model, once for each copy."""
    shape = GridShape(**sizes)
    sizes_of_model = {"model.vocab_size": 10**5, "model.hidden_size": 1024}
    few_tokens = {"model.context_length": 16, "train.global_batch": 4}
    config = recipes.with_changes(GPT_RUN, sizes_of_model | few_tokens)
    copies = shape.dp * shape.cp
    model_bytes = 16 * config.model.num_parameters
    whole = needed(config, shape=shape, ranks=shape.world_size) * shape.world_size
    assert 0.99 * copies * model_bytes < whole < 2.1 * copies * model_bytes
    # one rank to a node: the least of them
    assert needed(config, shape=shape) <= whole / shape.world_size + 1


def test_the_place_in_a_pipeline_with_the_least_to_hold_counts():
    config = replace(
        recipes.with_changes(GPT_RUN, {"model.num_layers": 5, "model.vocab_size": 100_000}),
        parallel=ParallelConfig(pp=3, layers_per_stage=(1, 3, 1)),
    )
    layer = 12 * 64 * 64 + 13 * 64
    least = 16 * 3 * layer  # the middle one has no vocabulary
    assert needed(config, shape=GridShape(pp=3)) == pytest.approx(least, rel=0.5)


def test_the_memory_of_a_node_is_shared_and_that_of_a_gpu_is_not(monkeypatch):
    place = Place(world_size=4, local_world_size=4)
    on_cpu = World(place, torch.device("cpu"), "gloo")
    ranks, num_bytes = capacity.shared_memory(on_cpu)
    assert ranks == 4 and num_bytes == hardware.memory_bytes()
    on_gpu = World(place, torch.device("cuda", 0), "nccl")
    properties = type("Properties", (), {"total_memory": 80 * 10**9})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert capacity.shared_memory(on_gpu) == (1, 80 * 10**9)
    assert capacity.shared_memory(on_gpu, share_gpus=True) == (2, 80 * 10**9)


def test_a_rank_of_ep_holds_its_own_experts_alone():
    mixture = recipes.with_changes(
        recipes.gpt_moe_tiny(), {"model.vocab_size": 83, "model.expert_ffn_size": 4096}
    )
    experts = mixture.model.num_expert_parameters
    for ep in (2, 8):
        less = needed(mixture, shape=GridShape(dp=8)) - needed(
            mixture, shape=GridShape(dp=8, ep=ep)
        )
        assert less == pytest.approx(16 * (experts - experts / ep), rel=1e-6)
    # what ZeRO divides is divided already
    sharded = replace(mixture, parallel=ParallelConfig(zero_stage=3))
    whole = needed(sharded, shape=GridShape(dp=8))
    assert needed(sharded, shape=GridShape(dp=8, ep=4)) == pytest.approx(whole, abs=2)


def test_a_model_that_is_frozen_beside_adapters_is_counted_once():
    config = recipes.with_changes(GPT_RUN, {"model.hidden_size": 4096, "model.num_heads": 8})
    adapted = recipes.with_changes(config, {"lora.rank": 8})
    weights = 4 * config.model.num_parameters
    assert needed(adapted) == pytest.approx(weights, rel=0.01)
    assert needed(config) == pytest.approx(4 * weights, rel=0.01)  # gradients and two moments
