"""Solutions that cells of lesson 03b show and use; `make notebooks` writes this."""

from course.labs.l03_step import NUM_STEPS
from course.labs.l03_step import autocast
from course.labs.l03_step import narrow_model
from course.progress import status
from labcode.models import gpt
import torch


def trained(dtype, batches):
    """A narrow model after 32 steps, and the loss of each step."""
    model = narrow_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses = []
    for step in range(NUM_STEPS):
        tokens, targets = batches(step)
        optimizer.zero_grad()
        with autocast(dtype):
            loss = gpt.loss(model(tokens), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        status(f"{dtype}: step {step + 1} of {NUM_STEPS}")
    status()
    return model, losses


def adamw_of(model, how):
    """AdamW of PyTorch as a "loop", as "foreach" or "fused", after its first step."""
    params = model.parameters()
    fused = how == "fused"
    foreach = how == "foreach"
    optimizer = torch.optim.AdamW(params, lr=1e-9, fused=fused, foreach=foreach)
    optimizer.step()  # it makes the state
    return optimizer
