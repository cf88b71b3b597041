"""The command line of the planner, in this process."""

import json
import re
from dataclasses import replace

import pytest

from labcode import recipes
from labcode.perf.cli import main

GPT3 = ["--model", "gpt3-175b", "--cluster", "selene", "--global-batch", "1536"]
LLAMA_7B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}
SMALL = ["--model", "gpt_tiny", "--vocab-size", "84", "--cluster", "selene", "--global-batch", "16"]


def test_an_estimate_shows_parts_that_add_up(capsys):
    grid = ["--dp", "8", "--pp", "16", "--tp", "8", "--checkpointing", "full"]
    assert main(["estimate", *GPT3, *grid, "--attention", "unfused"]) == 0
    printed = capsys.readouterr().out
    assert "dp=8 x pp=16 x cp=1 x tp=8 (tp-cp-dp-pp): 1024 ranks" in printed
    assert "fits into 79.2 GiB" in printed
    shares = []
    for line in printed.splitlines():
        words = line.split()
        if "%" in words and "#" in line:
            shares.append(float(words[words.index("%") - 1]))
    # those of time and those of memory
    assert sum(shares) == pytest.approx(200, abs=1)


def test_a_plan_is_a_table(capsys):
    assert main(["plan", *SMALL, "--gpus", "4", "--top", "3"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"layouts that fit, 0 that do not; on \d+ grids, of each the fast", printed)
    assert "dp x pp x cp x tp" in printed
    rows = [line for line in printed.splitlines() if " x " in line]
    assert len(rows) == 1 + 3


def test_a_comparison_has_a_line_for_each_cluster_and_size(capsys):
    words = ["compare", "--model", "llama3-8b", "--global-batch", "64", "--gpus", "1,16"]
    assert main([*words, "--cluster", "selene,dgx-h100"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("nothing fits") == 2
    assert "samples/s" in printed


@pytest.fixture
def llama(tmp_path) -> str:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA_7B))
    return str(file)


def test_whether_it_fits_is_answered_in_words_for_each_number_of_gpus(capsys, llama):
    assert main(["fits", "--model", llama, "--gpus", "4,8", "--gpu", "a100-40gb"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("6.74 billion weights, sequences of 2,048 tokens") == 2
    assert "on 4 x a100-40gb, 39.4 GiB each: 16 bytes a weight" in printed
    assert (
        "It fits with ZeRO-3 (FSDP), without activation checkpointing, micro-batch 1: " in printed
    )
    assert "How fast: python -m labcode.perf plan " in printed
    assert main(["fits", "--model", llama, "--gpus", "1", "--gpu", "24gb", "--state", "fsdp"]) == 0
    assert "It does not fit: " in capsys.readouterr().out


def test_a_file_and_numbers_can_be_planned(capsys, llama):
    where = ["--cluster", "a100-40gb-roce", "--gpus", "8", "--global-batch", "32", "--top", "1"]
    assert main(["plan", "--model", llama, *where]) == 0
    from_file = capsys.readouterr().out
    assert "that fit" in from_file
    numbers = ["--layers", "32", "--hidden", "4096", "--heads", "32", "--vocab", "32000"]
    assert main(["plan", *numbers, "--sequence-length", "2048", *where]) == 0
    assert capsys.readouterr().out == from_file
    # fewer bytes a weight leave room for more layouts
    assert main(["plan", "--model", llama, *where, "--state", "bf16"]) == 0
    assert int(capsys.readouterr().out.split()[0]) > int(from_file.split()[0])


def test_what_was_taken_for_granted_is_said_beside_the_table(capsys, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA_7B | {"model_type": "ours"}))
    words = ["estimate", "--model", str(file), "--cluster", "selene", "--global-batch", "8"]
    assert main(words) == 0
    assert "model_type 'ours' is not known here and counts as a Llama" in capsys.readouterr().err


def test_of_a_mixture_is_shown_what_a_token_uses_and_ep(capsys):
    mixtral = ["--model", "mixtral-8x7b", "--cluster", "dgx-h100", "--global-batch", "64"]
    assert main(["estimate", *mixtral, "--dp", "64", "--ep", "8", "--zero", "1"]) == 0
    printed = capsys.readouterr()
    assert "46.7 billion weights, 12.9 billion of them for each token" in printed.out
    assert "dp=64 x pp=1 x cp=1 x tp=1, ep=8 of dp" in printed.out
    assert "\nep " in printed.out
    assert printed.err.startswith("a router that spreads tokens evenly is taken for granted")
    assert main(["plan", *mixtral, "--gpus", "16"]) == 0
    assert ", ep 8 " in capsys.readouterr().out
    recipe = ["--model", "gpt_moe_tiny", *SMALL[2:]]
    assert main(["estimate", *recipe, "--dp", "8", "--ep", "4"]) == 0
    model = replace(recipes.gpt_moe_tiny().model, vocab_size=84)
    sizes = f"{model.num_parameters:,} weights, {model.num_active_parameters:,} of them for each"
    assert sizes in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["fits", "--model", "gpt2-xl", "--gpus", "8", "--gpu", "24gb", "--dtype", "float32"],
            "add --state float32",
        ),
        (["pln"], "unknown command 'pln': did you mean plan?"),
        (["--plan"], "--plan is a command and no option: python -m labcode.perf plan"),
        (["--gpus", "8"], "--gpus stands behind a command: python -m labcode.perf fits --gpus"),
        (["llama3-8b"], "a command comes before llama3-8b: python -m labcode.perf fits --model "),
        (["fits", "--modle", "x"], "unknown option --modle: did you mean --model?"),
        (["fits", "--gpus", "8"], "--gpu missing: "),
        (["fits", "--gpus", "8", "--gpu", "24gb"], "--model missing: give gpt2-124m"),
        (["fits", "--model", "llama2-7b", "--gpus", "8", "--gpu", "a10"], "unknown GPU 'a10'"),
        (["fits", "--model", "llama2-7b", "--gpus", "0", "--gpu", "24gb"], "whole numbers above 0"),
        (
            ["fits", "--layers", "2", "--gpus", "8", "--gpu", "24gb"],
            "also needs --hidden, --heads, --vocab-size, --sequence-length",
        ),
        (
            ["fits", "--model", "gpt2-xl", "--heads", "3", "--gpus", "8", "--gpu", "24gb"],
            "--model gpt2-xl and --heads: a model has its own sizes",
        ),
        (
            ["calibrate", "--out", "/nowhere/x.toml"],
            "there is no folder /nowhere",
        ),
        (["estimate", *SMALL, "--micro-batch", "0"], "--micro-batch: '0' is not a whole number"),
        (["calibrate", "--rnaks", "2"], "unknown option --rnaks: did you mean --ranks?"),
        (
            ["plan", *SMALL[:-4], "--cluster", "selen", "--global-batch", "16", "--gpus", "4"],
            "selene",
        ),
        (["plan", *SMALL, "--gpus", "7"], "no grid of 7 GPUs"),
        (["plan", "--model", "gpt_tny", *SMALL[4:], "--gpus", "4"], "did you mean gpt_tiny"),
        (["plan", "--model", "gpt_tiny", *SMALL[4:], "--gpus", "4"], "add --vocab-size"),
        (["compare", *SMALL, "--gpus", "4,x"], "--gpus 4,x: give whole numbers"),
        (["estimate", *SMALL, "--dp", "4", "--ep", "3"], "dp=4 is not divisible by ep=3"),
        (["estimate", *SMALL, "--dp", "2", "--ep", "2"], "this model has none: leave ep at 1"),
        (["estimate", *SMALL, "--tp", "3"], "num_heads=4 is not divisible by tp=3"),
        (["estimate", *SMALL[:-3], "b200-efa", *SMALL[-2:]], "memory_share is unknown"),
    ],
)
def test_what_is_wrong_is_one_line(capsys, words, message):
    assert main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ") and message in printed.err
    assert printed.err.count("\n") == 1


def test_without_a_command_the_help_is_shown(capsys):
    assert main([]) == 0
    assert "calibrate" in capsys.readouterr().out
