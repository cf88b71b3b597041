"""Runs with adapters: what their checkpoints hold, how they resume, and what is left of them."""

import json
import shutil

import pytest
import torch
from test_checkpoint import CONFIG, GRIDS, newest, run, train

from labcode import recipes
from labcode.config import LoraConfig
from labcode.models.lora import is_adapter, merged
from labcode.run import export
from labcode.train.checkpoint.folder import read_about, read_index

LORA = {"lora.rank": 2, "lora.alpha": 4.0}
ARGS = ["--lora.rank=2", "--lora.alpha=4"]


@pytest.mark.parametrize("grid", ["dp 2, tp 2, sequence parallel", "dp 4, ZeRO-3"])
def test_a_resumed_run_is_the_same_bit_for_bit_from_adapters_alone(ranks4, tmp_path, grid):
    config = recipes.with_changes(CONFIG, GRIDS[grid] | LORA)
    (whole_rows, whole), *_ = ranks4.run(train, config, tmp_path, None, 3)
    start = tmp_path / "checkpoints" / "step-00000002"
    index = read_index(start, read_about(start))
    weights = [key for key in index if key.startswith("model/")]
    assert len(weights) == 2 * 4 * 2 and all(map(is_adapter, weights))
    (rows, again), *_ = ranks4.run(train, config, tmp_path, start, 3)
    assert rows == whole_rows[2:]
    assert whole.keys() == again.keys()
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_a_checkpoint_goes_on_in_another_layout(ranks2, ranks4, tmp_path):
    config = recipes.with_changes(CONFIG, {"model.dropout": 0.0} | LORA)
    (_, whole), *_ = ranks2.run(train, config, tmp_path, None, 3)
    start = tmp_path / "checkpoints" / "step-00000002"
    other = recipes.with_changes(config, GRIDS["cp 2, tp 2"])
    (_, again), *_ = ranks4.run(train, other, tmp_path, start, 3)
    torch.testing.assert_close(again, whole, rtol=0, atol=1e-9)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """(folder of a GPT-2 in the hub's files, folder of a run that has tuned it)"""
    folder = tmp_path_factory.mktemp("tuned")
    shape = ["--model.positions=learned", "--model.dropout=0.0"]
    assert run("--train.out=base", "--train.steps=2", *shape, cwd=folder).codes == [0]
    assert export.main([str(folder / "base"), str(folder / "gpt2")]) == 0
    start = f"--train.start_from={folder / 'gpt2'}"
    done = run("--train.out=run", start, *shape, *ARGS, cwd=folder)
    assert done.codes == [0], done.err
    return folder / "gpt2", folder / "run"


def test_a_run_leaves_its_adapters_and_the_model_with_them(tuned):
    gpt2, folder = tuned
    adapters = torch.load(folder / "adapters.pt", weights_only=True)
    assert len(adapters) == 2 * 4 * 2 and all(map(is_adapter, adapters))
    base = torch.load(gpt2.parent / "base" / "weights.pt", weights_only=True)
    found = torch.load(folder / "weights.pt", weights_only=True)
    assert found.keys() == base.keys()
    expected = merged(base | adapters, LoraConfig(rank=2, alpha=4.0))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-15)
    assert not torch.equal(found["blocks.0.mlp.up.weight"], base["blocks.0.mlp.up.weight"])
    assert torch.equal(found["blocks.0.mlp.up.bias"], base["blocks.0.mlp.up.bias"])


def test_a_resumed_run_reads_the_model_from_where_it_began(tuned, ranks2):
    """Steps 3 to 6 once more, from a checkpoint that has no base."""
    gpt2, folder = tuned
    config = recipes.with_changes(
        CONFIG,
        LORA
        | {
            "train.start_from": str(gpt2),
            "model.positions": "learned",
            "model.dropout": 0.0,
            "parallel.tp": 2,
        },
    )
    start = folder / "checkpoints" / "step-00000002"
    (_, again), *_ = ranks2.run(train, config, None, start, 3)
    found = torch.load(folder / "weights.pt", weights_only=True)
    again = merged(again, config.lora)
    torch.testing.assert_close(again, found, rtol=0, atol=1e-9)


def test_another_model_beside_the_same_adapters_is_refused(tuned, ranks1):
    gpt2, folder = tuned
    changes = LORA | {"model.positions": "learned", "model.dropout": 0.0}
    config = recipes.with_changes(CONFIG, changes)
    with pytest.raises(Exception, match=r"was written with train.start_from=.*, this run has None"):
        ranks1.run(newest, config, folder)
    config = recipes.with_changes(config, {"train.start_from": str(gpt2)})
    (found,) = ranks1.run(newest, config, folder)
    assert found.name == "step-00000006"
    config = recipes.with_changes(config, {"lora.alpha": 5.0})
    with pytest.raises(Exception, match=r"was written with lora.alpha=4.0, this run has 5.0"):
        ranks1.run(newest, config, folder)


def test_adapters_go_out_of_a_run_at_its_end_and_before(tuned, tmp_path, capsys):
    from safetensors.torch import load_file

    gpt2, folder = tuned
    assert export.main([str(folder), str(tmp_path / "end"), "--adapter"]) == 0
    assert capsys.readouterr().out.endswith(f"adapters of rank 2, from {folder / 'adapters.pt'}\n")
    content = json.loads((tmp_path / "end" / "adapter_config.json").read_text())
    assert content["base_model_name_or_path"] == str(gpt2) and content["r"] == 2
    found = load_file(tmp_path / "end" / "adapter_model.safetensors")
    assert len(found) == 2 * 4 * 2

    unfinished = tmp_path / "run"
    shutil.copytree(folder, unfinished, ignore=shutil.ignore_patterns("*.pt"))
    assert export.main([str(unfinished), str(tmp_path / "before"), "--adapter"]) == 0
    again = load_file(tmp_path / "before" / "adapter_model.safetensors")
    assert all(torch.equal(found[name], again[name]) for name in found)
    capsys.readouterr()
    assert export.main([str(unfinished), str(tmp_path / "whole")]) == 2
    assert "holds adapters alone: let the run come to its end" in capsys.readouterr().err
    base = gpt2.parent / "base"
    assert export.main([str(base), str(tmp_path / "none"), "--adapter"]) == 2
    assert "has no adapters" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["before", "end", "run"]
