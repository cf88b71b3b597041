"""The optimizer of the GPT papers, and those for large batches.

AdamW, LAMB or LARS with weight decay on matrices only, warm-up, half a cosine, clipping by the
global norm.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from labcode.config import OptimConfig

# How many kernels an update takes on a GPU: one or a few for all weights, some for each operation,
# or some for each weight. The numbers differ by rounding.
IMPLEMENTATIONS = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "for_loop": {"foreach": False, "fused": False},
}


def make_optimizer(
    params: Iterable[nn.Parameter],
    config: OptimConfig,
    sharded_over: dist.ProcessGroup | None = None,
) -> torch.optim.Optimizer:
    """The optimizer of a config, with weight decay on tensors of two dims or more alone.

    LAMB and LARS move each of these by a length that goes with its own; biases and norms they move
    as Adam and SGD do.

    Args:
        params: The weights; frozen ones are left out.
        config: Rates and decay; how many kernels it takes.
        sharded_over: Divide the optimizer's state over this group with PyTorch's
            ZeroRedundancyOptimizer; None: this rank keeps that of all `params`.

    Raises:
        ValueError: The config names LAMB or LARS, and pytorch-optimizer is not installed.

    Source: Loshchilov and Hutter 2017 (arXiv:1711.05101); Brown et al. 2020 (arXiv:2005.14165),
    appendix B.
    """
    if config.name != "adamw":
        return _make_layerwise(params, config)
    # Chosen by dims, not by name: biases and norms are vectors in every model. ZeRO's rows of a
    # matrix still have two dims, and those of a vector have one.
    trained = [param for param in params if param.requires_grad]
    matrices = [param for param in trained if param.dim() >= 2]
    vectors = [param for param in trained if param.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    options: dict[str, Any] = {"lr": config.lr, "betas": (config.beta1, config.beta2)}
    options |= IMPLEMENTATIONS[config.implementation]
    if sharded_over is not None:
        return ZeroRedundancyOptimizer(
            groups, torch.optim.AdamW, process_group=sharded_over, **options
        )
    return torch.optim.AdamW(groups, **options)


def _make_layerwise(params: Iterable[nn.Parameter], config: OptimConfig) -> torch.optim.Optimizer:
    """LAMB or LARS; neither has a fused kernel, for which foreach stands in."""
    try:
        from labcode.train import layerwise
    except ImportError:
        raise ValueError(
            f"optim.name={config.name} comes with pytorch-optimizer, which is not installed: "
            "pip install 'labcode[optimizers]', or use --optim.name adamw"
        ) from None
    trained = [param for param in params if param.requires_grad]
    matrices = [param for param in trained if param.dim() >= 2]
    vectors = [param for param in trained if param.dim() < 2]
    foreach = config.implementation != "for_loop"
    if config.name == "lars":
        # leaves vectors alone by itself: no decay, no trust ratio
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors}]
        return layerwise.LARS(groups, lr=config.lr, momentum=config.beta1, foreach=foreach)
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0, "adam": True},  # a trust ratio of 1
    ]
    betas = (config.beta1, config.beta2)
    return layerwise.LAMB(groups, lr=config.lr, betas=betas, foreach=foreach)


def learning_rate(step: int, total_steps: int, config: OptimConfig) -> float:
    """The rate of optimizer step `step`, counted from 0.

        warm-up   lr * (step + 1) / warmup_steps
        after     min_lr + (lr - min_lr) * (1 + cos(pi * t)) / 2,   t from 0 to 1 over the rest

    Args:
        step: The number of the step, from 0.
        total_steps: The number of steps of the run.
        config: The settings with the rates of the run's batch (`OptimConfig.for_batch`).

    Source: Loshchilov and Hutter 2016 (arXiv:1608.03983), equation 5, without restarts.
    """
    # step + 1, so that the first step has a rate above 0, and the last of the warm-up the full one
    warmup = min(config.warmup_steps, total_steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    # 0 in the first step after the warm-up, 1 in the last step of the run
    t = (step - warmup) / max(1, total_steps - 1 - warmup)
    half_cosine = (1 + math.cos(math.pi * min(1.0, t))) / 2
    return config.min_lr + (config.lr - config.min_lr) * half_cosine


def clip_gradients(params: Iterable[nn.Parameter], norm: float, max_norm: float) -> None:
    """Scale all gradients down together so that their joint 2-norm is at most `max_norm`.

    Args:
        params: This rank's weights.
        norm: The 2-norm of the whole model's gradient (`ParallelModel.gradient_norm`), so that all
            ranks scale by the same factor.
        max_norm: 0 leaves the gradients as they are.

    Source: Pascanu et al. 2013 (arXiv:1211.5063), section 3.2.
    """
    # PyTorch's clip_grad_norm_ takes the norm of the gradients that it is given: under tp, pp and
    # ZeRO another one on each rank. It also divides by norm + 1e-6; this does not.
    if max_norm and norm > max_norm:
        scale_gradients(params, max_norm / norm)


def scale_gradients(params: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply all gradients of this rank by a factor.

    There may be none: a pipeline stage that is frozen as a whole has no gradient.
    """
    grads = [param.grad for param in params if param.grad is not None]
    if grads:  # foreach raises for an empty list
        torch._foreach_mul_(grads, factor)
