"""In which numbers a run computes, and what each of them needs of the device.

    train.dtype    weights    matrix products      besides
    float32        float32    float32
    tf32           float32    float32, of whose    a GPU from Ampere on; between 23 bits of fraction
                              factors 10 bits of   in memory and 10 in the product
                              the fraction count
    bfloat16       float32    bfloat16             by autocast
    float16        float32    float16              by autocast; the loss is scaled (`loss_scale`)
    float64        float64    float64
    fp8            float32    float8 in the linear layers (`precision.fp8`); all
                              other products in bfloat16, by autocast
    auto           bfloat16 on a GPU, float32 on a CPU

Source: docs.pytorch.org/docs/stable/notes/cuda.html (TF32), docs.pytorch.org/docs/stable/amp.html.
"""

from dataclasses import dataclass

import torch

from labcode.config import TrainConfig

AMPERE = (8, 0)  # the first compute capability with TF32


@dataclass(frozen=True)
class Precision:
    """The dtypes of a run.

    Args:
        name: The name in `train.dtype`, never "auto".
        matmul: The dtype of matrix products.
        wide: The dtype of the weights, of floating-point data, and of all that autocast leaves
            alone.
    """

    name: str
    matmul: torch.dtype
    wide: torch.dtype

    @property
    def autocast(self) -> torch.dtype | None:
        """What autocast makes of the factors of a matrix product; None: it is not used."""
        return None if self.matmul == self.wide else self.matmul

    @property
    def scales_loss(self) -> bool:
        """Whether small gradients would be lost without a loss scale."""
        return self.matmul == torch.float16


def check_device(settings: TrainConfig, device: torch.device) -> None:
    """Check that a device can do what a run asks of it.

    Raises:
        ValueError: It cannot, in one line.
    """
    pick_precision(settings.dtype, device)
    if settings.cuda_graphs and device.type != "cuda":
        raise ValueError(
            f"train.cuda_graphs on a {device.type}: only GPUs have CUDA graphs, leave it out"
        )


def pick_precision(name: str, device: torch.device) -> Precision:
    """The dtypes for a name of `train.dtype`.

    Raises:
        ValueError: The device does not have them.
    """
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    if name == "fp8":
        return Precision(name, torch.bfloat16, torch.float32)
    if name == "tf32":
        _check_tf32(device)
        return Precision(name, torch.float32, torch.float32)
    # The names that are left are those of torch's dtypes. 16 bits are for products alone: as a
    # weight, 1 + 0.001 would be 1 in bfloat16, and the update would be lost.
    matmul = getattr(torch, name)
    wide = torch.float64 if matmul == torch.float64 else torch.float32
    return Precision(name, matmul, wide)


def _check_tf32(device: torch.device) -> None:
    if device.type != "cuda":
        raise ValueError(
            f"train.dtype=tf32 on a {device.type}: only GPUs have TF32, use --train.dtype float32"
        )
    if torch.cuda.get_device_capability(device) < AMPERE:
        raise ValueError(
            f"train.dtype=tf32 on a {torch.cuda.get_device_name(device)}: GPUs have TF32 from "
            "Ampere on, use --train.dtype float32"
        )


def set_matmul_precision(precision: Precision, device: torch.device) -> None:
    """Let float32 products on a GPU use TF32, or not; a CPU is left as it is.

    This is a setting of the whole process, so each run sets it again. PyTorch has two interfaces
    for it. The newer one, `torch.backends.cuda.matmul.fp32_precision`, makes the older one raise
    whenever it is asked, and torch.compile asks it (pytorch issue 166387). This one sets both.
    """
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if precision.name == "tf32" else "highest")
