"""Which model is meant, and what is said of one that is not known."""

import json

import pytest

from labcode.perf.find_model import described, find_model, from_numbers, in_words
from labcode.perf.nearest import nearest, size_in_name
from labcode.perf.transformer import load_model, published_sizes

SIZES = published_sizes()


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("llama-7b", 7e9),
        ("Llama-2-7b-hf", 7e9),
        ("Qwen2.5-0.5B-Instruct", 0.5e9),
        ("opt-1.3b", 1.3e9),
        ("gpt2-124m", 124e6),
        ("mixtral-8x7b-v0.1", 56e9),
        ("gpt-1t", 1e12),
        ("gpt2-xl", None),
        ("phi-2", None),
        ("bert-base", None),
    ],
)
def test_a_name_may_tell_the_size(name, weights):
    assert size_in_name(name) == weights


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("llama-7b", "llama2-7b"),
        ("llama2-7B", "llama2-7b"),
        ("llama3-71b", "llama3-70b"),
        ("llama-65b", "llama3-70b"),
        ("vicuna-13b", "llama2-13b"),
        ("falcon-180b", "bloom-176b"),
        ("gpt2-xll", "gpt2-xl"),
        ("grok-9000b", None),
        ("tiny-1m", None),
    ],
)
def test_the_nearest_model_is_near_in_size(name, meant):
    assert nearest(name, SIZES) == meant


@pytest.mark.parametrize("billions", [0.1, 0.5, 1.3, 3, 7, 14, 32, 65, 120, 180, 405, 671, 1000])
def test_what_is_suggested_is_never_another_order_of_size(billions):
    meant = nearest(f"anything-{billions}b", SIZES)
    if meant is not None:
        weights = SIZES[meant]
        assert weights is not None
        assert 1 / 3 < weights / (billions * 1e9) < 3


def test_an_unknown_model_is_one_line():
    with pytest.raises(ValueError, match="the nearest in size is bloom-176b; there are gpt2"):
        find_model("falcon-180b")
    with pytest.raises(
        ValueError, match=r"did you mean llama2-7b.* path of a config.json of the h"
    ):
        find_model("llama-7b")
    with pytest.raises(ValueError, match="none has nearly that size"):
        load_model("grok-9000b")
    with pytest.raises(ValueError, match=r"the hub is not asked.* nearly its size, llama2-7b"):
        find_model("meta-llama/Llama-2-7b-hf")
    with pytest.raises(ValueError, match=r"no file nowhere.json: .* names gpt2-124m, .* gpt_tiny"):
        find_model("nowhere.json")


def test_a_file_and_its_numbers_are_the_same_model(tmp_path):
    file = tmp_path / "config.json"
    config = {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
    }
    file.write_text(json.dumps(config))
    numbers = {"layers": 32, "hidden": 4096, "heads": 32}
    told = from_numbers(numbers, vocab_size=32000, sequence_length=4096)
    assert told.shape == find_model(str(file)).shape == load_model("llama2-7b")
    assert described(told).startswith("a model like llama: 6.74 billion weights, sequences of 4,0")
    gpt = from_numbers(
        {"layers": 12, "hidden": 768, "heads": 12},
        like="gpt2",
        vocab_size=50257,
        sequence_length=1024,
    )
    assert gpt.shape.num_parameters == 124_439_808


def test_numbers_that_are_missing_are_named():
    with pytest.raises(ValueError, match="also needs --heads, --sequence-length;"):
        from_numbers({"layers": 2, "hidden": 64}, vocab_size=100, sequence_length=None)
    with pytest.raises(ValueError, match="unknown family 'lama': did you mean llama"):
        from_numbers({}, like="lama", vocab_size=None, sequence_length=None)


def test_a_known_model_with_other_sequences_and_another_vocabulary():
    found = find_model("llama2-7b", sequence_length=512, vocab_size=32001)
    assert (found.shape.sequence_length, found.shape.outputs) == (512, 32001)
    short = find_model("gpt2-xl", sequence_length=256)
    assert short.shape.num_parameters == load_model("gpt2-xl").num_parameters
    with pytest.raises(ValueError, match="gpt2-xl has weights for 1024 positions"):
        find_model("gpt2-xl", sequence_length=2048)


def test_of_experts_is_said_how_many_a_token_meets():
    told = described(find_model("mixtral-8x7b"))
    assert "46.7 billion weights, 12.9 billion of them for each token" in told


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (950, "950"),
        (124_439_808, "124 million"),
        (999_900_000, "1 billion"),
        (6_738_415_616, "6.74 billion"),
        (1_008_000_000_000, "1.01 trillion"),
    ],
)
def test_weights_in_words(weights, words):
    assert in_words(weights) == words
