"""Gradients that are summed over dp in fewer bits: ours, DDP, ZeRO and FSDP2."""

import pytest
import torch

from labcode.config import GPTConfig, ParallelConfig
from labcode.topology import GridShape

LAYOUTS = (
    (GridShape(dp=2), {"data_parallel": "ddp"}),
    (GridShape(dp=2), {"data_parallel": "labcode", "bucket_mb": 1e-2}),
    (GridShape(cp=2), {"data_parallel": "ddp"}),
    (GridShape(dp=2), {"data_parallel": "labcode", "zero_stage": 1}),
    (GridShape(dp=2), {"data_parallel": "labcode", "zero_stage": 2}),
    (GridShape(dp=2), {"data_parallel": "labcode", "zero_stage": 3}),
    (GridShape(dp=2), {"data_parallel": "ddp", "zero_stage": 2}),
    (GridShape(dp=2), {"data_parallel": "ddp", "zero_stage": 3}),
)


def gradients(rank, shape, options, dtype, num_batches):
    """(this rank's gradients, dtype of each, bytes that gradients travel in, by kind)."""
    from labcode.comm.counting import counted, totals
    from labcode.comm.grid import Grid
    from labcode.models.gpt import GPT
    from labcode.models.layers import initialize
    from labcode.models.parallelize import parallelize

    config = GPTConfig(vocab_size=24, context_length=8, num_layers=2, num_heads=4, hidden_size=16)
    grid = Grid.create(shape)
    model = parallelize(
        initialize(GPT(config), 0), grid, ParallelConfig(**options), reduce_dtype=dtype
    )
    generator = torch.Generator().manual_seed(grid.coord("dp"))
    tokens = torch.randint(24, (2 * num_batches, 9), generator=generator)
    batches = [(part[:, :-1], part[:, 1:]) for part in tokens.chunk(num_batches)]
    with counted() as calls:
        model.forward_backward(batches)
    wide = [call for call in calls if call.num_bytes > 200]
    moved = {kind: num_bytes for kind, (_, num_bytes) in totals(wide).items()}
    grads = [param.grad for param in model.weights.values()]
    flat = torch.cat([grad.flatten() for grad in grads])
    return flat, {grad.dtype for grad in grads}, moved


@pytest.mark.parametrize("num_batches", [1, 2])
@pytest.mark.parametrize(("shape", "options"), LAYOUTS, ids=str)
def test_gradients_travel_in_half_the_bytes_and_are_those_of_float32_within_rounding(
    ranks2, shape, options, num_batches
):
    exact = ranks2.run(gradients, shape, options, None, num_batches)
    for dtype in (torch.bfloat16, torch.float16):
        found = ranks2.run(gradients, shape, options, dtype, num_batches)
        for (whole, _, wide_bytes), (rounded, dtypes, narrow_bytes) in zip(exact, found):
            assert dtypes == {torch.float32}
            error = ((rounded - whole).norm() / whole.norm()).item()
            assert 0 < error < 2 * torch.finfo(dtype).eps
            kind = "reduce_scatter" if options.get("zero_stage") else "all_reduce"
            assert narrow_bytes[kind] == wide_bytes[kind] / 2


def test_without_a_dtype_nothing_is_rounded(ranks2):
    shape, options = LAYOUTS[1]
    (one, _, _), _ = ranks2.run(gradients, shape, options, None, 1)
    (same, _, _), _ = ranks2.run(gradients, shape, options, torch.float32, 1)
    assert torch.equal(one, same)
