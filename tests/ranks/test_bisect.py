"""Two runs are compared tensor by tensor, on any grid, and the first one that departs is named."""

import re

import pytest
from faults.forks import train

from labcode import recipes
from labcode.debug import bisect

CHANGES = {
    "model.num_layers": 2,
    "model.num_heads": 2,
    "model.hidden_size": 16,
    "model.context_length": 8,
    "train.global_batch": 4,
    "train.eval_batches": 1,
    "train.steps": 2,
    "train.dtype": "float64",
}
DOWN = "blocks.1.mlp.down"


def record(changes, folder, fault=None):
    """Record step 1 of a run; on rank 1 a product of a layer may be wrong by one part in 1000."""
    from dataclasses import replace
    from pathlib import Path

    import torch.distributed as dist
    from trained import built

    from labcode.debug.record import Recorder

    rank = dist.get_rank()
    config = recipes.with_changes(recipes.gpt_tiny(), CHANGES | changes)
    training = built(config)
    if fault is not None and rank == 1:
        name, which = fault
        module = training.model.module.get_submodule(name)
        right = getattr(module.product, which)

        def wrong(*args):
            return right(*args) * 1.001

        module.product = replace(module.product, **{which: wrong})
    recorder = Recorder(training.model, Path(folder), training.precision.name)
    batches = training.loader.take(0)
    with recorder.step(1, batches):
        training.model.forward_backward(batches)
    training.close()


@pytest.fixture(scope="module")
def reference(ranks2, tmp_path_factory):
    folder = tmp_path_factory.mktemp("dp")
    ranks2.run(record, {"parallel.dp": 2}, str(folder))
    return folder


LAYOUTS = {
    "tp with parts of the sequence": {
        "parallel.tp": 2,
        "parallel.sequence_parallel": True,
        "train.micro_batch": 1,
    },
    "cp": {"parallel.cp": 2},
    "pp": {"parallel.pp": 2, "train.micro_batch": 1, "parallel.pipeline_schedule": "gpipe"},
    "ZeRO-3": {"parallel.zero_stage": 3, "parallel.data_parallel": "labcode"},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_does_not_depart_in_float64(ranks2, reference, tmp_path, layout):
    ranks2.run(record, LAYOUTS[layout], str(tmp_path))
    rows = bisect.compare(reference, tmp_path)
    assert max(row.error for row in rows) < 1e-9
    assert bisect.first_departure(rows) is None  # nor by its bound
    kinds = {row.kind for row in rows}
    assert {"weight", "output", "gradient of the output", "gradient"} <= kinds
    assert len(rows) > 60


def test_a_fault_in_backward_on_a_rank_of_tp_is_named(ranks2, reference, tmp_path):
    ranks2.run(record, {"parallel.tp": 2}, str(tmp_path), (DOWN, "grad_input"))
    departure = bisect.first_departure(bisect.compare(reference, tmp_path))
    assert (departure.kind, departure.name) == ("gradient of the input", DOWN)
    assert departure.ranks == (1,)
    assert 5e-4 < departure.error < 2e-3


def test_a_fault_in_forward_is_named_on_four_ranks(ranks4, reference, tmp_path):
    changes = {"parallel.dp": 2, "parallel.tp": 2}
    ranks4.run(record, changes, str(tmp_path), ("blocks.0.mlp.up", "forward"))
    departure = bisect.first_departure(bisect.compare(reference, tmp_path))
    assert (departure.kind, departure.name) == ("output", "blocks.0.mlp.up")
    assert departure.ranks == (1,)


@pytest.mark.release
def test_bfloat16_departs_from_float32_by_rounding_alone(tmp_path, capsys):
    args = ["gpt_tiny", "--debug.record_steps", "1", "--train.steps", "1", "--train.eval_batches"]
    for dtype in ("float32", "bfloat16", "wrong"):
        own = [*args, "1", "--train.dtype", dtype.replace("wrong", "float32"), "--train.out", dtype]
        own += ["--train.seed", "1"] if dtype == "wrong" else []
        assert train(own, cwd=tmp_path).codes == [0]
    runs = [str(tmp_path / name) for name in ("float32", "bfloat16", "wrong")]
    assert bisect.main(runs[:2]) == 0
    assert "no tensor departs by more than its bound" in capsys.readouterr().out
    assert bisect.main(runs[::2]) == 1
    told = capsys.readouterr().out.splitlines()[-1]
    assert re.match("the first tensor that departs: weight of embed.weight, on rank 0 of", told)
    assert bisect.main([runs[0], str(tmp_path)]) == 2
    assert "record the same one in both" in capsys.readouterr().err
