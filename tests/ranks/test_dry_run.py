"""One rank of a job of 1,024 on this machine: the real code does what the formulas say."""

from dataclasses import replace

import pytest
import torch.distributed as dist

from labcode.config import GPTConfig
from labcode.perf.one_rank import rank_activation_bytes, rank_calls, rank_parameters
from labcode.run.dry_run import main
from labcode.topology import GridShape

SHAPE = "1024 gpt_10m --model.num_layers 4 --model.num_heads 8 --model.hidden_size 128"
GRID = "--parallel.tp 8 --parallel.pp 4 --train.global_batch 64 --train.micro_batch 1"


def _check_activations(printed: str) -> int:
    """Within 2 % of the formula; how many stages were looked at."""
    kept = [line.split() for line in printed.splitlines() if "activations" in line]
    for _, measured, unit, expected, expected_unit in kept:
        assert unit == expected_unit.rstrip(")")
        assert float(measured) == pytest.approx(float(expected.lstrip("(")), rel=0.02)
    return len(kept)


def test_one_rank_of_1024_does_what_the_formulas_say(capsys):
    assert main(f"{SHAPE} {GRID} --parallel.sequence_parallel".split()) == 0
    printed = capsys.readouterr().out
    assert "dp=32 x pp=4 x cp=1 x tp=8 (tp-cp-dp-pp): 1024 ranks, 2 micro-batches" in printed
    assert printed.count("stage ") == 3
    assert printed.endswith("parameters and communication of code and formula agree\n")
    assert _check_activations(printed) == 3
    assert not dist.is_initialized()


@pytest.mark.release
@pytest.mark.parametrize(
    "words",
    [
        GRID,
        f"{GRID} --model.positions rotary --model.no-tie_embeddings",
        "--parallel.tp 4 --train.micro_batch 1",
    ],
)
def test_other_layouts_too(capsys, words):
    assert main(f"{SHAPE} --train.global_batch 256 {words}".split()) == 0
    _check_activations(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("1024 vit_tiny", "vit_tiny: the dry run knows a GPT only"),
        ("gpt_tiny", "give the number of ranks and a recipe"),
        ("8 gpt_tiny --parallel.cp 2", "no cp and no ZeRO"),
        ("8 gpt_tiny --parallel.dp 3", "but WORLD_SIZE is 8"),
    ],
)
def test_what_cannot_be_run_dry_is_one_line(capsys, words, message):
    assert main(words.split()) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_the_formulas_refuse_what_they_do_not_know():
    model = GPTConfig(vocab_size=96, num_layers=6, num_heads=4, hidden_size=64)
    with pytest.raises(ValueError, match=r"num_layers=6 on .*: exact only where pp divides"):
        rank_parameters(model, GridShape(pp=4), 0)
    options = {"micro_batch": 1, "num_micro_batches": 2, "sequence_parallel": False}
    with pytest.raises(ValueError, match="without cp"):
        rank_calls(model, GridShape(cp=2), 0, **options)
    mixture = replace(model, bias=False, num_experts=4)
    for counted in (rank_calls, rank_activation_bytes):
        with pytest.raises(ValueError, match=r"num_experts=4: what experts get and send"):
            counted(mixture, GridShape(tp=2), 0, **options)
    whole = sum(rank_parameters(model, GridShape(pp=2), stage) for stage in (0, 1))
    # a tied embedding is on both ends
    assert whole == model.num_parameters + 96 * 64
