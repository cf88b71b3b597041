"""Anybody's model: what a config.json says, against the counts that its authors publish.

The configs are those of the hub in the fields that matter here, written anew; the counts are those
of the model pages (the number of parameters in the safetensors files) and of the papers.
"""

import json
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labcode.perf.hub_config import FAMILIES, SIZES, NamedModel, of_config, read

LLAMA2_7B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}


def decoder(kind, hidden, layers, heads, kv_heads, ffn, vocab, positions=4096, **others):
    """A config with the usual names."""
    config = {
        "model_type": kind,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
    }
    return {name: value for name, value in config.items() if value is not None} | others


def gpt2(n_embd, n_layer, n_head):
    return {
        "model_type": "gpt2",
        "n_embd": n_embd,
        "n_layer": n_layer,
        "n_head": n_head,
        "n_ctx": 1024,
        "n_positions": 1024,
        "vocab_size": 50257,
    }


MIXTURE = {"num_experts_per_tok": 2, "num_local_experts": 8}
QWEN3_MIXTURE = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
PUBLISHED = {
    "gpt2": (gpt2(768, 12, 12), 124_439_808),
    "gpt2-xl": (gpt2(1600, 48, 25), 1_557_611_200),
    "llama2-7b": (LLAMA2_7B, 6_738_415_616),
    "llama2-70b": (decoder("llama", 8192, 80, 64, 8, 28672, 32000), 68_976_648_192),
    "llama3-8b": (decoder("llama", 4096, 32, 32, 8, 14336, 128256), 8_030_261_248),
    "llama3.2-1b": (
        decoder("llama", 2048, 16, 32, 8, 8192, 128256, tie_word_embeddings=True, head_dim=64),
        1_235_814_400,
    ),
    "mistral-7b": (decoder("mistral", 4096, 32, 32, 8, 14336, 32000), 7_241_732_096),
    "mixtral-8x7b": (
        decoder("mixtral", 4096, 32, 32, 8, 14336, 32000, **MIXTURE),
        46_702_792_704,
    ),
    "qwen2.5-0.5b": (
        decoder("qwen2", 896, 24, 14, 2, 4864, 151936, tie_word_embeddings=True),
        494_032_768,
    ),
    "qwen2.5-7b": (
        decoder("qwen2", 3584, 28, 28, 4, 18944, 152064, tie_word_embeddings=False),
        7_615_616_512,
    ),
    "qwen3-8b": (decoder("qwen3", 4096, 36, 32, 8, 12288, 151936, head_dim=128), 8_190_735_360),
    "qwen3-30b-a3b": (
        decoder("qwen3_moe", 2048, 48, 32, 4, 6144, 151936, head_dim=128, **QWEN3_MIXTURE),
        30_532_122_624,
    ),
    "gemma-7b": (decoder("gemma", 3072, 28, 16, 16, 24576, 256000, head_dim=256), 8_537_680_896),
    "gemma-2-9b": (decoder("gemma2", 3584, 42, 16, 8, 14336, 256000, head_dim=256), 9_241_705_984),
    "pythia-6.9b": (
        decoder("gpt_neox", 4096, 32, 32, None, 16384, 50432, 2048, tie_word_embeddings=False),
        6_857_302_016,
    ),
    "gpt-j-6b": (
        {
            "model_type": "gptj",
            "n_embd": 4096,
            "n_layer": 28,
            "n_head": 16,
            "n_inner": None,
            "n_positions": 2048,
            "rotary_dim": 64,
            "tie_word_embeddings": False,
            "vocab_size": 50400,
        },
        6_050_882_784,
    ),
    "opt-6.7b": (
        {
            "model_type": "opt",
            "hidden_size": 4096,
            "ffn_dim": 16384,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "max_position_embeddings": 2048,
            "vocab_size": 50272,
            "word_embed_proj_dim": 4096,
        },
        6_658_473_984,
    ),
    "falcon-7b": (
        {
            "model_type": "falcon",
            "hidden_size": 4544,
            "num_attention_heads": 71,
            "num_hidden_layers": 32,
            "multi_query": True,
            "num_kv_heads": 71,
            "parallel_attn": True,
            "vocab_size": 65024,
            "max_position_embeddings": 2048,
        },
        6_921_720_704,
    ),
    "falcon-40b": (
        {
            "model_type": "falcon",
            "hidden_size": 8192,
            "num_attention_heads": 128,
            "num_hidden_layers": 60,
            "multi_query": True,
            "new_decoder_architecture": True,
            "num_kv_heads": 8,
            "vocab_size": 65024,
            "max_position_embeddings": 2048,
        },
        41_303_293_952,
    ),
    "phi-2": (decoder("phi", 2560, 32, 32, 32, 10240, 51200, 2048), 2_779_683_840),
    "phi-3-mini": (decoder("phi3", 3072, 32, 32, 32, 8192, 32064), 3_821_079_552),
    "bloom-7b1": (
        {
            "model_type": "bloom",
            "n_embed": 4096,
            "n_layer": 30,
            "num_attention_heads": 32,
            "seq_length": 2048,
            "vocab_size": 250880,
        },
        7_069_016_064,
    ),
    "mpt-7b": (
        {
            "model_type": "mpt",
            "d_model": 4096,
            "n_heads": 32,
            "n_layers": 32,
            "expansion_ratio": 4,
            "max_seq_len": 2048,
            "no_bias": True,
            "attn_config": {"alibi": True, "attn_type": "multihead_attention"},
            "vocab_size": 50432,
        },
        6_649_286_656,
    ),
    "dbrx": (
        {
            "model_type": "dbrx",
            "d_model": 6144,
            "n_heads": 48,
            "n_layers": 40,
            "max_seq_len": 32768,
            "vocab_size": 100352,
            "attn_config": {"kv_n_heads": 8},
            "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
        },
        131_596_523_520,
    ),
    "starcoder2-3b": (
        decoder("starcoder2", 3072, 30, 24, 2, 12288, 49152),
        3_030_371_328,
    ),
    "olmo-2-7b": (decoder("olmo2", 4096, 32, 32, 32, 11008, 100352), 7_298_617_344),
    "llama3.1-405b": (
        decoder("llama", 16384, 126, 128, 8, 53248, 128256, 131072),
        405_853_388_800,
    ),
    "mistral-nemo-12b": (
        decoder("mistral", 5120, 40, 32, 8, 14336, 131072, head_dim=128),
        12_247_782_400,
    ),
    "qwen3-235b-a22b": (
        decoder(
            *("qwen3_moe", 4096, 94, 64, 4, 12288, 151936),
            **QWEN3_MIXTURE | {"moe_intermediate_size": 1536},
            head_dim=128,
            decoder_sparse_step=1,
            mlp_only_layers=[],
        ),
        235_093_634_560,
    ),
    "qwen2-57b-a14b": (
        decoder(
            *("qwen2_moe", 3584, 28, 28, 4, 18944, 151936),
            num_experts=64,
            num_experts_per_tok=8,
            moe_intermediate_size=2560,
            shared_expert_intermediate_size=20480,
        ),
        57_409_106_944,
    ),
    "gemma-2-27b": (
        decoder("gemma2", 4608, 46, 32, 16, 36864, 256000, head_dim=128),
        27_227_128_320,
    ),
    "gemma-3-1b": (
        decoder("gemma3_text", 1152, 26, 4, 1, 6912, 262144, head_dim=256),
        999_885_952,
    ),
    "phi-4": (decoder("phi3", 5120, 40, 40, 10, 17920, 100352), 14_659_507_200),
    "gpt-neox-20b": (
        decoder("gpt_neox", 6144, 44, 64, None, 24576, 50432, 2048, tie_word_embeddings=False),
        20_554_567_680,
    ),
    "bloom-176b": (
        {
            "model_type": "bloom",
            "n_embed": 14336,
            "n_layer": 70,
            "num_attention_heads": 112,
            "vocab_size": 250880,
        },
        176_247_271_424,
    ),
    "falcon-rw-1b": (
        {
            "model_type": "falcon",
            "hidden_size": 2048,
            "num_attention_heads": 32,
            "num_hidden_layers": 24,
            "alibi": True,
            "bias": True,
            "multi_query": False,
            "new_decoder_architecture": False,
            "vocab_size": 50304,
        },
        1_311_625_216,
    ),
    "starcoder": (
        {
            "model_type": "gpt_bigcode",
            "n_embd": 6144,
            "n_head": 48,
            "n_inner": 24576,
            "n_layer": 40,
            "n_positions": 8192,
            "multi_query": True,
            "vocab_size": 49152,
        },
        15_517_456_384,
    ),
    "olmoe-1b-7b": (
        decoder(*("olmoe", 2048, 16, 16, 16, 1024, 50304), num_experts=64, num_experts_per_tok=8),
        6_919_161_856,
    ),
    "gpt-oss-120b": (
        decoder(
            *("gpt_oss", 2880, 36, 64, 8, 2880, 201088),
            head_dim=64,
            num_local_experts=128,
            num_experts_per_tok=4,
            layer_types=["sliding_attention", "full_attention"] * 18,
        ),
        116.83e9,
    ),
    "command-r": (decoder("cohere", 8192, 40, 64, 64, 22528, 256000, 8192), 34_980_831_232),
    "chatglm3-6b": (
        {
            "model_type": "chatglm",
            "hidden_size": 4096,
            "ffn_hidden_size": 13696,
            "kv_channels": 128,
            "num_layers": 28,
            "num_attention_heads": 32,
            "multi_query_attention": True,
            "multi_query_group_num": 2,
            "padded_vocab_size": 65024,
            "seq_length": 8192,
        },
        6_243_584_000,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_has_as_many_weights_as_its_authors_say(name):
    config, published = PUBLISHED[name]
    found = of_config(config, "config.json")
    assert found.shape.num_parameters == pytest.approx(published, rel=5e-3)
    assert all("sequences" in note or "experts" in note for note in found.notes)


@pytest.mark.release
@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_a_family_counts_as_transformers_counts_it(kind):
    """The default model of each family in `transformers`, built without memory for its weights."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", reason="pip install -e '.[hf]'")
    try:
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")
            config = transformers.AutoConfig.for_model(kind)
            model = transformers.AutoModelForCausalLM.from_config(config)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        pytest.skip(f"not in this transformers, or without a default: {error}")
    found = of_config(json.loads(config.to_json_string()), kind, sequence_length=512)
    true = sum(weight.numel() for weight in model.parameters())
    assert found.shape.num_parameters == pytest.approx(true, rel=5e-3)


def test_a_text_model_inside_another_is_counted_with_what_it_leaves_out():
    gemma3 = {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
        },
        "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152},
    }
    found = of_config(gemma3, "config.json")
    # gemma-3-4b: 4.30 billion with 0.42 billion that see
    assert found.shape.num_parameters == pytest.approx(3.88e9, rel=5e-3)
    assert "only the text model" in found.notes[0]
    llava = {"model_type": "llava", "text_config": {"model_type": "llama", "vocab_size": 32064}}
    assert of_config(llava, "x").shape.num_parameters == pytest.approx(6.74e9, rel=5e-3)
    flat = decoder("qwen2_vl", 3584, 28, 28, 4, 18944, 152064, vision_config={"depth": 32})
    assert "only the text model" in of_config(flat, "x").notes[0]


SCOUT = decoder(
    *("llama4_text", 5120, 48, 40, 8, 8192, 202048),
    head_dim=128,
    num_local_experts=16,
    num_experts_per_tok=1,
    intermediate_size_mlp=16384,
    interleave_moe_layer_step=1,
)


def test_experts_in_every_layer_are_counted_and_in_some_layers_refused():
    scout = of_config({"model_type": "llama4", "text_config": SCOUT}, "x").shape
    assert scout.num_parameters == pytest.approx(107_769_861_120, rel=5e-3)  # transformers 5.23
    for others in (
        {"interleave_moe_layer_step": 2},  # Maverick
        {"moe_layer_freq": [0] + [1] * 47},  # Moonlight and others of DeepSeek-V3's kind
        {"first_k_dense_replace": 3},
        {"moe_layer_start_index": 1},  # ERNIE 4.5
    ):
        with pytest.raises(ValueError, match="layers with experts beside layers without"):
            of_config(SCOUT | others, "x")
    inside = decoder(
        *("qwen3_vl_moe_text", 2048, 48, 32, 4, 6144, 151936), head_dim=128, **QWEN3_MIXTURE
    )
    found = of_config({"model_type": "qwen3_vl_moe", "text_config": inside}, "x")
    assert found.shape.num_parameters == pytest.approx(30_532_122_624, rel=5e-3)


def test_a_family_that_is_not_known_counts_as_a_llama_and_says_so():
    found = of_config(LLAMA2_7B | {"model_type": "our_model"}, "x")
    assert found.shape.num_parameters == 6_738_415_616
    assert "model_type 'our_model' is not known here and counts as a Llama" in found.notes[0]


def test_how_long_a_sequence_is():
    long = LLAMA2_7B | {"max_position_embeddings": 131072}
    found = of_config(long, "x")
    assert found.shape.sequence_length == 4096
    assert "where the file allows 131,072" in found.notes[0]
    assert of_config(long, "x", 32768).shape.sequence_length == 32768
    assert of_config(LLAMA2_7B, "x").shape.sequence_length == 2048
    unsaid = of_config(LLAMA2_7B | {"max_position_embeddings": None}, "x")
    assert unsaid.shape.sequence_length == 4096
    assert "the file does not say how many: say yours" in unsaid.notes[0]
    # with learned positions shorter sequences leave the weights as they are, longer ones are not
    short = of_config(gpt2(768, 12, 12), "x", 256)
    assert short.shape.num_parameters == 124_439_808
    with pytest.raises(ValueError, match="has weights for 1024 positions"):
        of_config(gpt2(768, 12, 12), "x", 2048)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "t5", "is_encoder_decoder": True, "d_model": 512}, "an encoder and a deco"),
        ({"model_type": "bert", "hidden_size": 768, "type_vocab_size": 2}, "bert has an encoder"),
        ({"model_type": "distilbert", "dim": 768, "n_heads": 12}, "distilbert has an encoder"),
        ({"model_type": "vit", "architectures": ["ViTForImageClassification"]}, "an encoder"),
        ({"model_type": "clip", "text_config": {"model_type": "clip_text_model"}}, "an encoder"),
        ({"model_type": "mamba", "hidden_size": 768, "state_size": 16}, "no attention"),
        ({"model_type": "rwkv", "hidden_size": 768}, "no attention"),
        (LLAMA2_7B | {"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        (LLAMA2_7B | {"kv_lora_rank": 512, "n_routed_experts": 64}, "a latent attention"),
        (LLAMA2_7B | {"cross_attention_layers": [3, 8]}, "layers of cross-attention"),
        (LLAMA2_7B | {"first_k_dense_replace": 1, "num_experts": 64}, "beside layers without"),
        (LLAMA2_7B | {"model_type": "new", "num_experts": 64}, "has 64 experts, and model_type"),
        (LLAMA2_7B | {"num_local_experts": 8}, "num_experts_per_tok is not known here"),
        (
            LLAMA2_7B | {"num_attention_heads": 33},
            "hidden_size=4096 is not a multiple of num_heads",
        ),
        (LLAMA2_7B | {"num_key_value_heads": 5}, "num_heads=32 is not a multiple of kv_heads=5"),
        (LLAMA2_7B | {"hidden_size": "4096"}, "hidden_size='4096', where a whole number"),
        (LLAMA2_7B | {"hidden_size": -1}, "hidden_size=-1, where a whole number"),
        (LLAMA2_7B | {"intermediate_size": [11008] * 32}, "is a list, one for each layer"),
        (LLAMA2_7B | {"hidden_size": None}, "lacks hidden_size .it begins with model_type"),
        (gpt2(768, 12, 12) | {"n_ctx": None, "n_positions": None}, "add --sequence-length"),
        ({}, "lacks num_hidden_layers, hidden_size, num_attention_heads, vocab_size"),
        ({"peft_type": "LORA", "base_model_name_or_path": "a/b"}, "an adapter .LoRA.: give the co"),
        ({"metadata": {}, "weight_map": {}}, "the index of files of weights"),
        ({"tokenizer_class": "LlamaTokenizer"}, "describes a tokenizer"),
        ({"dim": 4096, "n_layers": 32, "n_heads": 32}, "a params.json of Meta's own format"),
        (
            {"model_type": "opt", "hidden_size": 1024, "word_embed_proj_dim": 512},
            "an embedding narrower than its layers",
        ),
    ],
)
def test_what_is_no_model_that_is_counted_is_one_line(config, message):
    with pytest.raises(ValueError, match=message) as error:
        of_config(config, "config.json")
    assert str(error.value).startswith("config.json")
    assert "\n" not in str(error.value)


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2**40),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.text(max_size=3), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)
KEYS = [name for names in SIZES.values() for name in names]
OTHER_KEYS = ["model_type", "architectures", "layer_types", "attn_config", "expansion_ratio"]
OTHER_KEYS += ["multi_query_attention", "multi_query_group_num", "text_config", "ffn_config"]


@given(st.dictionaries(st.sampled_from(KEYS + OTHER_KEYS), VALUES, max_size=6))
def test_whatever_a_file_holds_is_a_model_or_one_line(changes):
    try:
        assert isinstance(of_config(LLAMA2_7B | changes, "x"), NamedModel)
    except ValueError as error:
        assert "\n" not in str(error)


def test_a_file_or_its_folder_is_read(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA2_7B))
    assert read(file).shape == read(tmp_path).shape == of_config(LLAMA2_7B, "x").shape
    assert read(file).title == f"llama of {file}"


HEADER = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is an empty file"),
        (b'{"hidden_size": 4096', "is not whole JSON: .* in line 1"),
        (b"[1, 2]", "holds a list"),
        (b'"text"', "holds a str"),
        (b"model: llama\n", "is not whole JSON"),
        (len(HEADER).to_bytes(8, "little") + HEADER + bytes(4), "is a safetensors file, not the c"),
        (b"<!DOCTYPE html><html></html>", "a page of HTML, not the config.json"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is a Git LFS pointer"),
        (b"[" * 100_000, "nested too deeply|is not whole JSON"),
    ],
)
def test_a_file_that_is_something_else_is_named(tmp_path, content, message):
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        read(file)
    assert "\n" not in str(error.value)


def test_a_folder_without_a_config_says_what_it_has(tmp_path):
    with pytest.raises(ValueError, match=r"is a folder without config.json .it has nothing."):
        read(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match=r"it has model.safetensors"):
        read(tmp_path)
