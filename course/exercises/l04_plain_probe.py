"""What runs on two simulated ranks to look at the five functions of exercise 4.5 one by one.

Each probe calls one function of the learner's cell, and says what is wrong with it, or "". It
makes no call of torch.distributed after that: a rank that the learner's function leaves waiting for
others would meet them there.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset

from course.exercises.simulated import current, here

SAVED = "saved"  # a note: the name of a file that torch.save was given
LOADED = "loaded"  # a note: the arguments of torch.load, by name
STEPS = 3
SAMPLES = 7  # an odd number: two ranks have shares of different lengths
NEAR = 1e-3  # bfloat16 rounds the same values alike, whoever calls it

Names = dict[str, Any]  # of the learner's file


def look(names: Names, name: str) -> str:
    """What is wrong with a function, on each rank, or "".

    Args:
        names: What the cell defines.
        name: Name of the function.
    """
    device = names["join"]()
    return PROBES[name](names, device)


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Within it torch.save and torch.load note on a simulated rank what they are given."""
    save = functools.partial(_note_save, torch.save)
    load = functools.partial(_note_load, torch.load)
    with mock.patch.object(torch, "save", save), mock.patch.object(torch, "load", load):
        yield


def _note_save(
    plain: Callable[..., None], content: Any, f: Any, *args: Any, **options: Any
) -> None:
    here().note(SAVED, Path(getattr(f, "name", f)).name)
    plain(content, f, *args, **options)


def _note_load(plain: Callable[..., Any], *args: Any, **options: Any) -> Any:
    here().note(LOADED, dict(inspect.signature(plain).bind(*args, **options).arguments))
    return plain(*args, **options)


def _noted(kind: str) -> list[Any]:
    """What this rank has noted so far."""
    rank = current()
    assert rank is not None
    return [one.value for one in rank.run.events if (one.rank, one.kind) == (rank.number, kind)]


def _model(device: torch.device) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 4)).to(device)


def _batch(names: Names, number: int) -> list[torch.Tensor]:
    data = names["Rings"](SAMPLES, seed=number)
    return next(iter(DataLoader(data, batch_size=SAMPLES)))


# ---- each function


def _loss_of(names: Names, device: torch.device) -> str:
    model = _model(device)
    seen = []
    model.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    loss = names["loss_of"](model, *_batch(names, 0), device)
    if not isinstance(loss, torch.Tensor) or loss.dim() > 0:
        return f"it gives {loss!s:.60}, expected is one number as a tensor, with its gradient"
    if seen != [torch.bfloat16]:
        return "forward does not run in bfloat16: torch.autocast around the call of the model"
    if loss.dtype != torch.float32:
        return f"the loss is a {loss.dtype}: take it from logits.float(), outside of autocast"
    if not loss.requires_grad:
        return "the loss has no gradient: return the tensor itself"
    return ""


def _train_epoch(names: Names, device: torch.device) -> str:
    micro_batches = names["MICRO_BATCHES"]
    rank = dist.get_rank()
    loader = [_batch(names, 10 * rank + number) for number in range(STEPS * micro_batches)]
    model = DistributedDataParallel(_model(device))
    sends = [0]
    model.register_comm_hook(sends, _count_and_average)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    expected, right_mean = _trained(names, device, loader)
    others = {}
    for text, options in TRAINED_WRONGLY.items():
        others[text], _ = _trained(names, device, loader, **options)
    mean = names["train_epoch"](model, optimizer, loader, device)
    found = nn.utils.parameters_to_vector(model.parameters()).detach()
    for text, other in others.items():
        if _is_near(found, other) and not _is_near(found, expected):
            return text
    if sends[0] > STEPS:
        return (
            f"DDP sends gradients {sends[0]} times in {STEPS} steps: all micro-batches but the "
            "last of a step run inside no_sync(), their forward too"
        )
    if not _is_near(found, expected):
        return (
            "the weights of a rank are not those that the mean of all gradients gives: does the "
            "last micro-batch of each step send, and does the optimizer step after it alone?"
        )
    if not isinstance(mean, float) or not abs(mean - right_mean) <= NEAR * right_mean:
        return (
            f"it returns {mean!s:.12}, and the mean of all losses of all ranks is "
            f"{right_mean:.4f}, each loss as it was before you divided it"
        )
    return ""


def _count_and_average(
    sends: list[int], bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """A hook of DDP that does what DDP does, and counts."""
    sends[0] += 1
    gradient = bucket.buffer() / dist.get_world_size()
    work = dist.all_reduce(gradient, async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])


TRAINED_WRONGLY: dict[str, dict[str, bool]] = {
    "gradients are too large: each loss is divided by MICRO_BATCHES before backward. AdamW hides "
    "it, the check takes SGD": {"divides": False},
    "the gradients of the steps before are still there: optimizer.zero_grad() after each step": {
        "zeroes": False
    },
}


def _trained(
    names: Names,
    device: torch.device,
    loader: list[list[torch.Tensor]],
    *,
    divides: bool = True,
    zeroes: bool = True,
) -> tuple[torch.Tensor, float]:
    """(weights after the epoch, mean loss of all ranks), without DDP."""
    micro_batches = names["MICRO_BATCHES"]
    model = _model(device)
    losses = []
    for number, (inputs, targets) in enumerate(loader, 1):
        loss = names["loss_of"](model, inputs, targets, device)
        (loss / micro_batches if divides else loss).backward()
        losses.append(loss.detach())
        if number % micro_batches:
            continue
        with torch.no_grad():
            for param in model.parameters():
                assert param.grad is not None
                mean = param.grad / dist.get_world_size()
                dist.all_reduce(mean)
                param -= 0.5 * mean
                if zeroes:
                    param.grad = None
    total = torch.stack(losses).mean() / dist.get_world_size()
    dist.all_reduce(total)
    return nn.utils.parameters_to_vector(model.parameters()).detach(), total.item()


def _is_near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found - expected).norm() <= NEAR * expected.norm())


def _validate(names: Names, device: torch.device) -> str:
    data = names["Rings"](SAMPLES, seed=5)
    model = _model(device)
    with_gradient = []

    def look(*_: Any) -> None:
        with_gradient.append(torch.is_grad_enabled())

    model.register_forward_hook(look)
    result = names["validate"](model, data, device)
    if not isinstance(result, tuple) or len(result) != 2:
        return f"it gives {result!s:.60}, expected are the mean loss and the number of samples"
    loss, count = result
    with torch.no_grad():
        inputs, targets = next(iter(DataLoader(data, batch_size=SAMPLES)))
        expected = names["loss_of"](model, inputs, targets, device).item()
    if not isinstance(count, int) or count != SAMPLES:
        return (
            f"it counts {count} samples of {SAMPLES} on two ranks: each sample once, all ranks "
            "together, as a whole number"
        )
    if not isinstance(loss, float) or not abs(loss - expected) <= NEAR * expected:
        return (
            f"it gives the loss {loss!s:.12}, and the mean over all {SAMPLES} samples is "
            f"{expected:.4f}: add up sums and counts over all ranks, and divide once"
        )
    if any(with_gradient[:-1]):
        return "forward keeps all that backward would need: with torch.no_grad()"
    if not model.training:
        return "the model stays in evaluation mode: model.train() afterwards"
    return ""


FOLDER = Path("probed")  # of the checkpoint; each rehearsal has a new one
EPOCHS_DONE = 3


def _saved(names: Names, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """What the learner's `save` was given after some epochs."""
    FOLDER.mkdir(exist_ok=True)
    model, optimizer = _stepped(names, device, seed=1)
    names["save"](FOLDER, EPOCHS_DONE, model, optimizer)
    return model, optimizer


def _save(names: Names, device: torch.device) -> str:
    _saved(names, device)
    checkpoint = names["CHECKPOINT"]
    written = _noted(SAVED)
    if dist.get_rank() != 0:
        return "more than one rank writes: let rank 0 alone do it" if written else ""
    if Path(checkpoint).exists():
        return f"{checkpoint} is in the folder where the script runs, not in the one it is given"
    if not (FOLDER / checkpoint).exists():
        return f"there is no file {checkpoint} in the folder that it is given"
    if checkpoint in written:
        return (
            "a run that is killed while it saves leaves half a checkpoint: write to another name, "
            "then os.replace"
        )
    return ""


def _load(names: Names, device: torch.device) -> str:
    model, optimizer = _saved(names, device)
    dist.barrier()
    other, other_optimizer = _stepped(names, device, seed=2)
    epochs = names["load"](FOLDER, other, other_optimizer, device)
    if epochs != EPOCHS_DONE:
        return (
            f"it returns {epochs} after {EPOCHS_DONE} epochs: all ranks read the file, and the "
            "number in it"
        )
    for options in _noted(LOADED):
        if options.get("weights_only") is False:
            return "weights_only=False runs whatever code somebody has put into the file"
        if options.get("map_location") is None:
            return (
                "without map_location each rank reads to the GPU that has written the file: "
                "map_location=device"
            )
    mine = nn.utils.parameters_to_vector(model.parameters())
    if not torch.equal(nn.utils.parameters_to_vector(other.parameters()), mine):
        return "the weights are not those that were saved"
    saved = optimizer.state_dict()["state"]
    found = other_optimizer.state_dict()["state"]
    if any(not torch.equal(found[at]["exp_avg"], saved[at]["exp_avg"]) for at in saved):
        return "the optimizer's state is not the one that was saved"
    return ""


def _stepped(
    names: Names, device: torch.device, seed: int
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer after a step."""
    torch.manual_seed(seed)
    model = names["build_model"]().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs, _ = next(iter(DataLoader(Subset(names["Rings"](4, seed=seed), range(4)), 4)))
    model(inputs.to(device)).square().mean().backward()
    optimizer.step()
    return model, optimizer


PROBES: dict[str, Callable[[Names, torch.device], str]] = {
    "loss_of": _loss_of,
    "train_epoch": _train_epoch,
    "validate": _validate,
    "save": _save,
    "load": _load,
}
NEEDS = {"train_epoch": "loss_of", "validate": "loss_of", "load": "save"}
