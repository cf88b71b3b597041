"""Many tensors in one flat message: packed, sent, and unpacked where they came from."""

from collections.abc import Callable, Sequence
from typing import Any

import torch


@torch.no_grad()
def in_one_message(
    tensors: Sequence[torch.Tensor], communicate: Callable[..., object], **arguments: Any
) -> None:
    """Give tensors the values that a collective makes of all their numbers, in place.

    One message has one latency, where the tensors of a layer, sent one by one, have dozens. The
    price is a second copy of the tensors while it is under way, and two passes over them.

    Args:
        tensors: Tensors of one dtype and on one device, of any shapes.
        communicate: Changes a flat tensor in place: `dist.all_reduce` or `dist.broadcast`.
        arguments: What it takes beside the tensor.
    """
    flat = torch.cat([tensor.flatten() for tensor in tensors])  # [all their numbers]
    communicate(flat, **arguments)
    sizes = [tensor.numel() for tensor in tensors]
    for tensor, values in zip(tensors, flat.split(sizes), strict=True):
        tensor.copy_(values.view_as(tensor))
