"""Which dtypes a run computes in, and which of them a device refuses."""

import pytest
import torch

from labcode.train.precision import Precision, pick_precision, set_matmul_precision

CPU = torch.device("cpu")
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize(
    ("name", "expected", "autocast", "scales_loss"),
    [
        ("auto", Precision("float32", F32, F32), None, False),
        ("float32", Precision("float32", F32, F32), None, False),
        ("bfloat16", Precision("bfloat16", BF16, F32), BF16, False),
        ("float16", Precision("float16", F16, F32), F16, True),
        ("float64", Precision("float64", F64, F64), None, False),
        ("fp8", Precision("fp8", BF16, F32), BF16, False),
    ],
)
def test_weights_are_float32_or_wider_whatever_the_products_are(
    name, expected, autocast, scales_loss
):
    found = pick_precision(name, CPU)
    assert found == expected
    assert (found.autocast, found.scales_loss) == (autocast, scales_loss)


def test_auto_is_bfloat16_on_a_gpu():
    assert pick_precision("auto", torch.device("cuda", 0)).autocast == BF16


def test_a_cpu_has_no_tf32():
    with pytest.raises(ValueError, match=r"^train\.dtype=tf32 on a cpu: only GPUs have TF32, use "):
        pick_precision("tf32", CPU)


def test_the_setting_of_the_process_is_made_for_gpus_alone_and_in_both_interfaces():
    before = torch.get_float32_matmul_precision()
    try:
        set_matmul_precision(Precision("tf32", F32, F32), CPU)
        assert torch.get_float32_matmul_precision() == before
        set_matmul_precision(Precision("tf32", F32, F32), torch.device("cuda", 0))
        # it would raise if only the newer interface had been told
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
        set_matmul_precision(Precision("float32", F32, F32), torch.device("cuda", 0))
        assert torch.backends.cuda.matmul.fp32_precision == "ieee"
    finally:
        torch.set_float32_matmul_precision(before)
