"""Weights go out of a run as a model of `transformers`, and into a run on any grid."""

import json

import pytest
import torch
from test_checkpoint import CONFIG, GRIDS, run

from labcode import recipes
from labcode.run import export

LEARNED = ["--model.positions=learned", "--model.dropout=0.0"]
LAYOUTS = {**GRIDS, "one stage each": {"parallel.pp": 4, "model.num_layers": 4}}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """(folder of a finished run, folder of its weights as a GPT-2)"""
    folder = tmp_path_factory.mktemp("exported")
    args = ["--train.out=run", "--checkpoint.keep=1", "--model.num_layers=4", *LEARNED]
    done = run(*args, cwd=folder)
    assert done.codes == [0], done.err
    assert export.main([str(folder / "run"), str(folder / "gpt2")]) == 0
    return folder / "run", folder / "gpt2"


def test_transformers_reads_it_and_computes_the_same(exported):
    transformers = pytest.importorskip("transformers", reason="pip install -e '.[hf]'")
    from labcode.config import GPTConfig
    from labcode.models.gpt import GPT

    folder, gpt2 = exported
    theirs = transformers.GPT2LMHeadModel.from_pretrained(gpt2, torch_dtype=torch.float64).eval()
    shape = json.loads((folder / "config.json").read_text())["model"]
    shape["vocab_size"] = theirs.config.vocab_size
    ours = GPT(GPTConfig(**shape)).double().eval()
    ours.load_state_dict(torch.load(folder / "weights.pt", weights_only=True))
    tokens = torch.randint(shape["vocab_size"], (3, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=1e-12)


def started(config):
    """The whole weights with which a run of this pool starts."""
    from trained import built

    training = built(config)
    return {name: tensor.clone() for name, tensor in training.model.full_state_dict()}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_starts_from_it_on_any_grid(exported, ranks4, name):
    folder, gpt2 = exported
    changes = {"train.start_from": str(gpt2), "model.num_layers": 4, "model.positions": "learned"}
    config = recipes.with_changes(CONFIG, LAYOUTS[name] | changes)
    expected = torch.load(folder / "weights.pt", weights_only=True)
    found, *_ = ranks4.run(started, config)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


def test_of_a_run_that_has_not_ended_its_newest_checkpoint_is_taken(exported, tmp_path, capsys):
    from safetensors.torch import load_file

    folder, gpt2 = exported
    unfinished = tmp_path / "run"
    unfinished.mkdir()
    (unfinished / "config.json").write_bytes((folder / "config.json").read_bytes())
    (unfinished / "checkpoints").symlink_to(folder / "checkpoints")
    assert export.main([str(unfinished), str(tmp_path / "gpt2")]) == 0
    assert "step-00000006" in capsys.readouterr().out
    found = load_file(tmp_path / "gpt2" / "model.safetensors")
    expected = load_file(gpt2 / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_what_cannot_be_written_is_refused_in_one_line(exported, tmp_path, capsys):
    folder, gpt2 = exported
    empty = tmp_path / "empty"
    empty.mkdir()
    rotary = tmp_path / "rotary"
    rotary.mkdir()
    shape = json.loads((folder / "config.json").read_text())
    shape["model"] |= {"positions": "rotary", "mlp": "swiglu"}
    (rotary / "config.json").write_text(json.dumps(shape))
    cases = {
        (folder, gpt2): "exists: choose another folder",
        (empty, tmp_path / "new"): "is no run: it has no config.json",
        (rotary, tmp_path / "new"): "is no model of the hub",
    }
    for (source, to), words in cases.items():
        assert export.main([str(source), str(to)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert words in line
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--model.num_layers=2"], "says n_layer=4 and this run has model.num_layers=2"),
        (["--model.num_layers=4", "--model.num_heads=4"], "says n_head=2"),
        (["--model.num_layers=4", "--model.hidden_size=32"], "give --model.hidden_size 16"),
        (["--model.num_layers=4", "--model.tie_embeddings=False"], "tie_word_embeddings=True"),
        (["--model.num_layers=4", "--model.positions=rotary"], "gpt2 (positions=learned)"),
        (["--model.num_layers=4", "--model.vocab_size=128"], "its tokens are others"),
    ],
)
def test_weights_that_do_not_fit_are_named(exported, tmp_path, args, words):
    _, gpt2 = exported
    args = [*LEARNED, *args, f"--train.start_from={gpt2}", "--train.out=run", "--train.steps=1"]
    done = run(*args, "--checkpoint.every=0", cwd=tmp_path)
    assert done.codes == [2]
    (line,) = done.errors
    assert words in line
    assert not (tmp_path / "run").exists()


def test_a_folder_that_is_not_there_is_named(tmp_path):
    done = run(*LEARNED, "--train.start_from=nowhere", "--train.out=run", cwd=tmp_path)
    assert done.codes == [2]
    assert "train.start_from: there is no nowhere: " in done.errors[0]


ROTARY = {
    "starcoder2": {"model.num_kv_heads": 2, "model.mlp": "gelu_erf"},
    "llama": {
        "model.norm": "rms",
        "model.mlp": "swiglu",
        "model.bias": False,
        "model.tie_embeddings": False,
        "model.rotary_base": 500000.0,
        "model.dropout": 0.0,
    },
}


def _tokenizer(folder):
    """The path of a tokenizer.json, in a folder."""
    from labcode.data.tokenizer import BPETokenizer

    BPETokenizer.train("to be or not to be " * 20, 280).model.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@pytest.fixture(scope="module", params=ROTARY)
def rotary(request, tmp_path_factory):
    """(options of the model, folder of its finished run, folder of its weights)"""
    folder = tmp_path_factory.mktemp(request.param)
    changes = {"model.num_layers": 4, "model.num_heads": 4, "model.dropout": 0.0}
    changes |= ROTARY[request.param]
    changes["data.tokenizer"] = str(_tokenizer(folder))
    words = [f"--{name}={value}" for name, value in changes.items()]
    done = run("--train.out=run", "--checkpoint.keep=1", *words, cwd=folder)
    assert done.codes == [0], done.err
    assert export.main([str(folder / "run"), str(folder / "hub")]) == 0
    content = json.loads((folder / "hub" / "config.json").read_text())
    assert content["model_type"] == request.param
    own = (folder / "tokenizer.json").read_bytes()
    assert (folder / "hub" / "tokenizer.json").read_bytes() == own
    return changes, folder / "run", folder / "hub"


def test_a_rotary_gpt_is_read_by_transformers(rotary):
    transformers = pytest.importorskip("transformers", reason="pip install -e '.[hf]'")
    from labcode.config import GPTConfig
    from labcode.models.gpt import GPT

    _, folder, there = rotary
    theirs = transformers.AutoModelForCausalLM.from_pretrained(there).eval()
    shape = json.loads((folder / "config.json").read_text())["model"]
    shape["vocab_size"] = theirs.config.vocab_size
    ours = GPT(GPTConfig(**shape)).eval()
    ours.load_state_dict(torch.load(folder / "weights.pt", weights_only=True))
    tokens = torch.randint(shape["vocab_size"], (3, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = theirs(tokens).logits.float()
        torch.testing.assert_close(ours(tokens), found, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", GRIDS)
def test_a_rotary_gpt_starts_from_it_on_any_grid(rotary, ranks4, name):
    changes, folder, there = rotary
    asked = GRIDS[name] | changes | {"train.start_from": str(there)}
    # another path, and the same tokens
    asked["data.tokenizer"] = str(there.parent / "tokenizer.json")
    config = recipes.with_changes(CONFIG, asked)
    expected = torch.load(folder / "weights.pt", weights_only=True)
    found, *_ = ranks4.run(started, config)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
