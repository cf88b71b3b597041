"""Checkpoints as people have them: read, or refused in one line that says what to do."""

import argparse
import json
import pickle
import shutil

import pytest
import torch
from safetensors.torch import save_file

from labcode import recipes
from labcode.config import GPTConfig
from labcode.data.tokenizer import BPETokenizer, CharTokenizer
from labcode.models import hub
from labcode.models.gpt import GPT
from labcode.train.checkpoint.hub_files import HubCheckpoint

V = 48
MODEL = GPTConfig(
    vocab_size=V, num_layers=2, num_heads=4, hidden_size=16, context_length=24, positions="learned"
)
RUN = recipes.with_changes(
    recipes.gpt_tiny(), {"model.positions": "learned", "train.start_from": "x"}
)
# as nanoGPT saves them
ARGS = {
    "n_layer": 2,
    "n_head": 4,
    "n_embd": 16,
    "block_size": 24,
    "bias": True,
    "vocab_size": V,
    "dropout": 0.2,
}


@pytest.fixture(scope="module")
def weights():
    torch.manual_seed(0)
    return hub.state_dict(MODEL, GPT(MODEL).state_dict())


@pytest.fixture
def folder(tmp_path, weights):
    """A folder as the hub has them."""
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    write_config(tmp_path)
    return tmp_path


def write_config(folder, **changes):
    content = hub.config_json(MODEL) | changes
    (folder / "config.json").write_text(json.dumps(content))


def opened(path, model=MODEL, config=RUN, tokenizer=None):
    found = HubCheckpoint(path)
    found.check(config, model, tokenizer)
    return found


def refusal(path, model=MODEL, config=RUN, tokenizer=None):
    with pytest.raises(ValueError) as caught:
        opened(path, model, config, tokenizer)
    line = str(caught.value)
    assert line.startswith("train.start_from")
    assert "\n" not in line
    return line


# ---- what is read


def as_hub(folder, weights):
    save_file(weights, folder / "model.safetensors")


def as_bare_model(folder, weights):
    bare = {name.removeprefix("transformer."): value for name, value in weights.items()}
    save_file(bare, folder / "model.safetensors")


def as_bin(folder, weights):
    tied = {"lm_head.weight": weights["transformer.wte.weight"]}
    torch.save(weights | tied, folder / "pytorch_model.bin")


def as_old_bin(folder, weights):
    masks = {"transformer.h.0.attn.bias": torch.ones(1, 1, 24, 24).tril()}
    path = folder / "pytorch_model.bin"
    torch.save(weights | masks, path, _use_new_zipfile_serialization=False)


def as_two_files(folder, weights):
    names = sorted(weights)
    parts = {
        "model-00001-of-00002.safetensors": names[:9],
        "model-00002-of-00002.safetensors": names[9:],
    }
    for file, own in parts.items():
        save_file({name: weights[name] for name in own}, folder / file)
    index = {name: file for file, own in parts.items() for name in own}
    text = json.dumps({"metadata": {"total_size": 0}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)


def as_two_bins(folder, weights):
    index = {}
    for number, name in enumerate(sorted(weights)):
        index[name] = f"pytorch_model-0000{1 + number % 2}-of-00002.bin"
    for file in set(index.values()):
        torch.save({name: weights[name] for name in index if index[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))


def as_ddp(folder, weights):
    torch.save({f"module.{name}": value for name, value in weights.items()}, folder / "model.pt")


def as_trainer(folder, weights):
    content = {"model_state_dict": weights, "optimizer": {"state": {}}, "epoch": 3, "loss": 1.5}
    torch.save(content, folder / "checkpoint.pth")


def as_lightning(folder, weights):
    content = {
        "state_dict": {f"model.{name}": value for name, value in weights.items()},
        "pytorch-lightning_version": "2.4.0",
        "epoch": 1,
        "hparams_name": "kwargs",
    }
    torch.save(content, folder / "epoch=1-step=500.ckpt")


def as_attribute(folder, weights):
    content = {f"net.{name}": value for name, value in weights.items()}
    torch.save({"module": {"state_dict": content}, "global_step": 3}, folder / "last.ckpt")


def as_half(folder, weights):
    half = {name: value.half() for name, value in weights.items()}
    save_file(half, folder / "model.safetensors")


def as_compiled(folder, weights):
    content = {f"_orig_mod.{name}": value for name, value in weights.items()}
    save_file(content, folder / "model.safetensors")


FORMS = {
    "hub": as_hub,
    "bare model": as_bare_model,
    "bin": as_bin,
    "old bin": as_old_bin,
    "two files": as_two_files,
    "two bins": as_two_bins,
    "ddp": as_ddp,
    "a trainer's own": as_trainer,
    "lightning": as_lightning,
    "the attribute of a module, nested twice": as_attribute,
    "float16": as_half,
    "compiled": as_compiled,
}


@pytest.mark.parametrize("form", FORMS)
def test_files_as_the_hub_and_trainers_write_them_are_read(tmp_path, weights, form):
    write_config(tmp_path)
    FORMS[form](tmp_path, weights)
    found = opened(tmp_path)._tensors
    expected = {hub.bare_name(name): value for name, value in weights.items()}
    assert found.keys() - {"lm_head.weight"} == expected.keys()
    for name, value in expected.items():
        read = found[name].read((slice(None),) * value.dim())
        assert torch.equal(read, value.to(read.dtype)), name


def test_a_file_may_be_named_in_place_of_its_folder(folder):
    by_file, by_folder = opened(folder / "model.safetensors"), opened(folder)
    assert by_file.path == by_folder.path
    assert by_file._tensors.keys() == by_folder._tensors.keys()
    assert by_file.described == by_folder.described


def nanogpt(folder, weights, args=ARGS, prefix="_orig_mod."):
    tensors = {f"{prefix}{name}": value for name, value in weights.items()}
    content = {
        "model": tensors,
        "optimizer": {"state": {}, "param_groups": []},
        "model_args": args,
        "iter_num": 2000,
        "best_val_loss": torch.tensor(1.4697),
        "config": {"dataset": "shakespeare_char", "learning_rate": 1e-3},
    }
    torch.save(content, folder / "ckpt.pt")


def test_nanogpt_has_its_description_in_the_file(tmp_path, weights):
    nanogpt(tmp_path, weights)
    exact = GPTConfig(**(vars(MODEL) | {"mlp": "gelu_erf"}))
    opened(tmp_path, exact)
    line = refusal(tmp_path)
    assert line.endswith(
        "says model_type=nanogpt (mlp=gelu_erf) and this run has model.mlp=gelu: "
        "give --model.mlp gelu_erf"
    )
    nanogpt(tmp_path, weights, ARGS | {"bias": False})
    assert "says bias=False and this run has model.bias=True: give --model.bias False" in refusal(
        tmp_path, exact
    )
    nanogpt(tmp_path, weights, ARGS | {"use_rmsnorm": True})
    assert "has use_rmsnorm=True, unlike nanoGPT's" in refusal(tmp_path, exact)
    nanogpt(tmp_path, weights, {"dim": 288, "n_layers": 6, "n_heads": 6})
    assert "is a checkpoint of llama2.c: convert it there" in refusal(tmp_path, exact)


# ---- what a description says that the run does not


@pytest.mark.parametrize(
    ("there", "words"),
    [
        ({"n_head": 2}, "says n_head=2 and this run has model.num_heads=4: give --model.num_heads"),
        ({"n_layer": 3}, "n_layer=3 and this run has model.num_layers=2"),
        ({"n_positions": 1024}, "n_positions=1024 and this run has model.context_length=24"),
        ({"n_inner": 32}, "n_inner=32 and this run has model.ffn_size=None: give --model.ffn_size"),
        ({"layer_norm_epsilon": 1e-6}, "give --model.norm_epsilon 1e-06"),
        ({"activation_function": "gelu"}, "activation_function=gelu and this run has model.mlp"),
        ({"activation_function": "relu"}, "config.json: activation_function='relu': GPT computes"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        ({"tie_word_embeddings": False}, "give --model.tie_embeddings False"),
        ({"vocab_size": 50257}, "says vocab_size=50257 and this run has model.vocab_size=48"),
        ({"model_type": "opt"}, "config.json: model_type='opt': the models that a GPT can be"),
        ({"n_head": 2, "n_layer": 12}, "give --model.num_layers 12 --model.num_heads 2"),
    ],
)
def test_another_description_is_refused(folder, there, words):
    write_config(folder, **there)
    assert words in refusal(folder)


def test_what_is_no_part_of_the_function_is_left_alone(folder):
    told = hub.describe(hub.config_json(MODEL)).fields
    right = [
        {"attn_pdrop": 0.1, "resid_pdrop": 0.0},
        {"torch_dtype": "bfloat16", "transformers_version": "4.41.0"},
        {"n_ctx": 24, "task_specific_params": {}, "summary_type": "cls_index"},
        {"activation_function": "gelu_new"},
        {"layer_norm_epsilon": 0.00001},
        {"n_inner": 64},
        {"use_cache": False, "reorder_and_upcast_attn": False},
    ]
    for content in right:
        write_config(folder, **content)
        described = opened(folder).described
        assert described.fields == told | ({"ffn_size": 64} if "n_inner" in content else {})
        for same in ({"vocab_size": None}, {"num_kv_heads": 4, "dropout": 0.5}):
            assert described.differences(GPTConfig(**(vars(MODEL) | same))) == {}


def test_a_rotary_model_may_have_a_shorter_context(tmp_path):
    model = GPTConfig(vocab_size=V, num_layers=1, num_heads=2, hidden_size=16, positions="rotary")
    save_file(hub.state_dict(model, GPT(model).state_dict()), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(hub.config_json(model)))
    opened(tmp_path, GPTConfig(**(vars(model) | {"context_length": 64})))
    wrong = GPTConfig(**(vars(model) | {"rotary_base": 5e5}))
    assert "rope_theta=10000.0 and this run has model.rotary_base=500000.0" in refusal(
        tmp_path, wrong
    )


# ---- tokenizers


@pytest.fixture(scope="module")
def bpe():
    return BPETokenizer.train("to be or not to be, that is the question " * 20, 280)


def test_token_numbers_mean_the_same(folder, bpe):
    bpe.model.save(str(folder / "tokenizer.json"))
    characters = CharTokenizer.train("abc")
    line = refusal(folder)  # before the text is read
    assert "has a tokenizer of its own (tokenizer.json)" in line
    assert f"give --data.tokenizer {folder}/tokenizer.json" in line
    assert refusal(folder, tokenizer=characters) == line
    of_text = recipes.with_changes(RUN, {"data.tokenizer": "bpe"})
    opened(folder, config=of_text)  # not known yet
    opened(folder, config=of_text, tokenizer=bpe)
    other = BPETokenizer.train("quite another text, with others words in it " * 20, 280)
    assert "(data.tokenizer=bpe)" in refusal(folder, config=of_text, tokenizer=other)
    own = recipes.with_changes(RUN, {"data.tokenizer": str(folder / "tokenizer.json")})
    opened(folder, config=own)
    opened(folder, config=own, tokenizer=bpe)


def test_an_older_tokenizer_is_converted(folder):
    (folder / "vocab.json").write_text("{}")
    (folder / "merges.txt").write_text("")
    line = refusal(folder)
    assert "AutoTokenizer.from_pretrained" in line
    assert f"--data.tokenizer {folder}/tokenizer.json" in line


# ---- what is no checkpoint that can be read


def touch(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([".metadata", "__0_0.distcp", "__1_0.distcp"], "format_utils dcp_to_torch"),
        (["__0_0.distcp"], "without its .metadata"),
        (["pytorch_model_fsdp_0/.metadata", "optimizer_0/.metadata"], "accelerate merge-weights"),
        (
            ["zero_to_fp32.py", "latest", "global_step500/mp_rank_00_model_states.pt"],
            "is a checkpoint of DeepSpeed: python",
        ),
        (["mp_rank_00_model_states.pt"], "run zero_to_fp32.py, which lies one folder up"),
        (["latest_checkpointed_iteration.txt", "iter_0000100/x"], "is a checkpoint of Megatron-LM"),
        (["consolidated.00.pth", "params.json", "tokenizer.model"], "is Llama as Meta writes it"),
        (["adapter_config.json", "adapter_model.safetensors"], "merge_and_unload"),
        (["llama-2-7b.Q4_K_M.gguf"], "in llama.cpp's format (GGUF)"),
        (["flax_model.msgpack", "config.json"], "weights of Flax"),
        (["tf_model.h5", "config.json"], "from_tf=True"),
        (["snapshots/607a30d/config.json", "refs/main"], "is a folder of the hub's cache"),
        (["checkpoint-500/config.json", "checkpoint-1000/config.json"], "name one of them"),
        (["weights.pt", "metrics.jsonl"], "python -m labcode.run.export"),
        (
            ["lit_model.pth", "model_config.yaml", "config.json"],
            "is a checkpoint of LitGPT: litgpt",
        ),
        (["mp_rank_00_000/model_optim_rng.pt"], "is one step of a checkpoint of Megatron-LM"),
        (["step-1000/.metadata", "step-1000/__0_0.distcp"], "PyTorch: name one of them"),
        (["model-00001-of-00002.safetensors"], "without their index: copy it again"),
        (["config.json", "README.md"], "there is README.md, config.json: name the file"),
    ],
)
def test_another_format_is_named_with_the_command_that_converts_it(tmp_path, names, words):
    touch(tmp_path, *names)
    assert words in refusal(tmp_path)


def test_a_name_of_the_hub_is_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    from pathlib import Path

    line = refusal(Path("openai-community/gpt2"))
    assert "hf download openai-community/gpt2 --local-dir DIR" in line
    assert "hf download" not in refusal(tmp_path / "nowhere")


def test_weights_without_a_description_are_refused(folder):
    (folder / "config.json").unlink()
    assert "has no config.json, and weights alone do not say how many heads" in refusal(folder)
    (folder / "config.json").write_text("{")
    assert "not a config.json" in refusal(folder)


def test_damaged_files_are_said_to_be(folder, weights):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert "it is damaged, or only a part of it" in refusal(folder)
    path.write_bytes(b"")
    assert "is an empty file, not a file of weights" in refusal(folder)
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 548105171\n")
    assert "is a Git LFS pointer" in refusal(folder)
    path.write_text("<!DOCTYPE html><html><body>Not found</body></html>")
    assert "is a page of HTML" in refusal(folder)
    path.unlink()
    as_two_files(folder, weights)
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors is missing, which the index names" in refusal(folder)
    one = folder / "model-00001-of-00002.safetensors"
    assert "is one of several files that hold the weights: name the folder" in refusal(one)


def test_an_index_of_other_files_is_refused(tmp_path, weights):
    write_config(tmp_path)
    as_two_files(tmp_path, weights)
    first = tmp_path / "model-00001-of-00002.safetensors"
    lost = sorted(weights)[:2]
    save_file({name: weights[name] for name in sorted(weights)[2:9]}, first)
    assert f"names {lost[0]} and 1 more, which its files have not" in refusal(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_rounded_weights_are_refused(folder, weights, dtype):
    rounded = {name: value.to(dtype) for name, value in weights.items()}
    save_file(rounded, folder / "model.safetensors")
    assert "take the original weights, of 16 or 32 bits" in refusal(folder)
    torch.save(rounded, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert f"has the dtype {str(dtype).removeprefix('torch.')}, which is no weight" in refusal(
        folder
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[1]", "holds a list, and a config.json is names and values"),
        ('"gpt2"', "holds a str"),
        ({"n_embd": "16"}, "config.json: model.hidden_size='16' is not a whole number"),
        ({"model_type": "llama", "rope_scaling": [1]}, "config.json: "),
    ],
)
def test_a_config_of_other_kinds_of_values_is_one_line(folder, content, words):
    if isinstance(content, str):
        (folder / "config.json").write_text(content)
    else:
        write_config(folder, **content)
    assert words in refusal(folder)


class Evil:
    def __reduce__(self):
        return (print, ("run!",))


def test_nothing_of_a_pickle_is_run(tmp_path, weights, capsys):
    write_config(tmp_path)
    for content in (weights | {"x": Evil()}, {"model": weights, "args": argparse.Namespace(lr=1)}):
        torch.save(content, tmp_path / "pytorch_model.bin")
        assert "holds Python objects beside numbers" in refusal(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"a": Evil()}))
    assert "pytorch_model.bin" in refusal(tmp_path)
    assert "run!" not in capsys.readouterr().out


def test_a_file_without_weights_by_name_is_refused(tmp_path):
    write_config(tmp_path)
    torch.save(torch.ones(3), tmp_path / "pytorch_model.bin")
    assert "holds a Tensor and no weights by name" in refusal(tmp_path)
    torch.save({"epoch": 3, "loss": 0.1}, tmp_path / "pytorch_model.bin")
    assert "has no weights by name, but epoch, loss" in refusal(tmp_path)


def test_other_weights_than_the_description_has_are_named(folder, weights):
    path = folder / "model.safetensors"
    save_file({name: value for name, value in weights.items() if "h.1.mlp" not in name}, path)
    assert "missing h.1.mlp.c_fc.bias, h.1.mlp.c_fc.weight" in refusal(folder)
    save_file(weights | {"score.weight": torch.ones(2)}, path)
    assert "missing none; unexpected score.weight" in refusal(folder)
    save_file(weights | {"lm_head.weight": torch.ones(V, 16)}, path)
    assert "lm_head.weight differs from the embedding" in refusal(folder)


def test_the_first_of_two_forms_is_taken(folder, weights):
    shutil.copy(folder / "config.json", folder / "config.json.bak")
    torch.save({"other": torch.ones(1)}, folder / "pytorch_model.bin")
    assert opened(folder).path.name == "model.safetensors"
