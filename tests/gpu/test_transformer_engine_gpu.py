"""Lesson 18's layouts of a layer of Transformer Engine, for machines that have the library."""

import pytest
import torch

from course.labs import l18_transformer_engine as with_te

WHY_NOT = with_te.why_not() if torch.cuda.is_available() else "needs a CUDA device"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]

SIZES = with_te.Sizes(hidden_size=256, ffn_hidden_size=1024, num_attention_heads=8)


def gradients(name):
    """Names and norms of this rank's gradients after two steps with delayed scaling."""
    from transformer_engine.common.recipe import DelayedScaling

    from labcode.comm.grid import Grid
    from labcode.topology import GridShape

    device = torch.device("cuda", torch.cuda.current_device())
    grid = Grid.create(GridShape())
    layout = with_te.LAYOUTS[name](grid, SIZES, device=device)
    x, dy = with_te.batch(layout, SIZES, 64, 4, device)
    for _ in range(2):
        with_te.step(layout, x, dy, DelayedScaling(amax_history_len=16))
    norms = {}
    for key, param in layout.module.named_parameters():
        norms[key] = None if param.grad is None else param.grad.norm().item()
    return norms


@pytest.mark.parametrize("name", list(with_te.LAYOUTS))
def test_every_weight_of_a_layer_gets_a_gradient(alone, name):
    (norms,) = alone.run(gradients, name)
    assert norms
    for key, norm in norms.items():
        assert norm is not None and 0 < norm < float("inf"), key


@pytest.mark.parametrize("name", list(with_te.LAYOUTS))
def test_a_step_is_measured(alone, name):
    (step_s,) = alone.run(with_te.measure, name, SIZES, tokens=64, samples=4)
    assert 0 < step_s < 1


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
@pytest.mark.parametrize("name", list(with_te.LAYOUTS))
def test_a_step_on_four_gpus(name):
    from course.pool.ranks import Ranks

    with Ranks(4, device="cuda") as four:
        for step_s in four.run(with_te.measure, name, SIZES, tokens=64, samples=4):
            assert 0 < step_s < 1
