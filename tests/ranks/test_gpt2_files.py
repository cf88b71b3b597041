"""Weights go out of a run as a GPT-2 of `transformers`, and into a run on any grid."""

import json

import pytest
import torch
from test_checkpoint import CONFIG, GRIDS, run

from labcode import recipes
from labcode.train import export

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
    shape["model"]["positions"] = "rotary"
    (rotary / "config.json").write_text(json.dumps(shape))
    cases = {
        (folder, gpt2): "exists: choose another folder",
        (empty, tmp_path / "new"): "is no run: it has no config.json",
        (rotary, tmp_path / "new"): "a GPT-2 has learned positions",
    }
    for (source, to), words in cases.items():
        assert export.main([str(source), str(to)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert words in line
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--model.num_layers=2"], "has h.2.attn.c_attn.bias, for which this model has no place"),
        (["--model.num_layers=6"], "has no transformer.h.4."),
        (["--model.num_layers=4", "--model.hidden_size=32"], "change the model's sizes"),
        (["--model.num_layers=4", "--model.tie_embeddings=False"], "has no lm_head.weight"),
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
    assert "train.start_from: nowhere/model.safetensors cannot be read" in done.errors[0]
