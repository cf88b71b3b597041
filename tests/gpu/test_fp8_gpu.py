"""FP8 on a GPU that multiplies it: the same products as the emulation, and a training."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from labcode.measure import metrics
from labcode.precision.fp8 import CurrentScaling, Fp8, multiplies_in_fp8

HAS_FP8 = torch.cuda.is_available() and multiplies_in_fp8(torch.device("cuda"))
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_FP8, reason="needs a CUDA device with products in FP8"),
]


def gradients(device):
    """Output and gradients of one layer, in float32 on the CPU."""
    torch.manual_seed(0)
    layer = nn.Linear(256, 512, bias=False)
    model = Fp8(CurrentScaling(), skip=()).convert(nn.Sequential(layer)).to(device)
    x = torch.randn(64, 256).to(device).requires_grad_()
    y = model(x)
    y.backward(torch.linspace(-1e-4, 1e-4, y.numel(), device=device).view_as(y))
    weight = next(model.parameters())
    return [tensor.detach().float().cpu() for tensor in (y, x.grad, weight.grad)]


def test_the_products_of_a_gpu_are_those_of_the_emulation():
    """Sums in another order; a tensor core adds with fewer bits than float32."""
    for found, expected in zip(gradients("cuda"), gradients("cpu")):
        assert torch.allclose(found, expected, rtol=0, atol=2e-3 * expected.abs().max().item())


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_gpt_tiny_learns_in_fp8(tmp_path, recipe):
    command = [sys.executable, "-m", "labcode.train", "gpt_tiny", "--train.dtype", "fp8"]
    command += ["--fp8.recipe", recipe, "--train.steps", "100", "--train.out", "run"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    losses = [row["loss"] for row in metrics.read(tmp_path / "run") if "loss" in row]
    assert losses[-1] < losses[0] - 1
