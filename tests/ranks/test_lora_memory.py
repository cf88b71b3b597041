"""What a rank keeps of a frozen model and of the adapters beside it, against the formula."""

import pytest
from test_zero_memory import MODEL, SLACK, held

from labcode.config import LoraConfig, ParallelConfig
from labcode.perf.layout_memory import layout_memory
from labcode.perf.settings import STATES, Settings
from labcode.perf.transformer import Transformer
from labcode.topology import GridShape

RANK = 4
LAYOUTS = [
    (GridShape(dp=2), 0, "ddp"),
    (GridShape(dp=2), 1, "labcode"),
    (GridShape(dp=2), 2, "labcode"),
    (GridShape(dp=2), 3, "labcode"),
    (GridShape(dp=2), 3, "ddp"),
    (GridShape(tp=2), 0, "labcode"),
]


@pytest.mark.parametrize(("shape", "stage", "by"), LAYOUTS, ids=str)
def test_frozen_weights_have_no_gradient_and_no_state(ranks2, shape, stage, by):
    parallel = ParallelConfig(tp=shape.tp, zero_stage=stage, data_parallel=by)
    settings = Settings(2, zero_stage=stage, adapter_rank=RANK, **STATES["float32"])
    parts = layout_memory(Transformer.of(MODEL), shape, settings)
    for weights, gradients, optimizer in ranks2.run(
        held, parallel, MODEL, shape, LoraConfig(rank=RANK)
    ):
        assert weights == pytest.approx(parts["weights"], rel=SLACK)
        assert gradients == pytest.approx(parts["gradients"], rel=SLACK)
        assert optimizer == pytest.approx(parts["optimizer"], rel=SLACK)
        assert gradients < 0.2 * weights
