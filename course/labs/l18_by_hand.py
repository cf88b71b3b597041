"""Solutions that cells of lesson 18 show and use; `make notebooks` writes this."""

from course.labs.l03_step import autocast
from labcode.models import gpt
import torch


def loss_of(model, batch, dtype):
    """The loss of a batch, computed in this dtype."""
    tokens, targets = batch
    with autocast(dtype):
        return gpt.loss(model(tokens), targets)

def in_one_row(model):
    """All gradients of a model."""
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    return torch.cat([grad.flatten() for grad in grads])
