'''The exercise of lesson 13 with FSDP2 in a script.

What the learner is given:

    def main(folder, steps, dtype):
        """Train up to `steps`, from the checkpoint in `folder` if there is one."""
        ### BEGIN SOLUTION

    check("13.6", main)
'''

import contextlib
import functools
import io
import json
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from course.answer import Hint
from course.exercises import rehearsal, scripts
from course.exercises.expect import refuse
from course.exercises.scripts import distance
from course.labs import l13_script as lab
from labcode.models.gpt import loss as gpt_loss

SCRIPT = "train_13.py"
HEADER = '''"""The script of lesson 13: FSDP2, with checkpoints that any number of ranks can read.

Start it with: torchrun --nproc-per-node=2 train_13.py 6 bfloat16
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from labcode.models import gpt
from course.labs.l13_script import build_model, micro_batches


'''
FOOTER = f"""

if __name__ == "__main__":
    main(Path("."), int(sys.argv[1]), getattr(torch, sys.argv[2]))
    assert not dist.is_initialized(), "{scripts.LEFT_OPEN}"
"""
CHECKPOINT = "checkpoint"
FIRST = 3  # steps until the checkpoint
ALL = 6
LR = 0.1
MOMENTUM = 0.9
MAX_NORM = 0.6  # the norms of the first two steps are larger, the others are not
EXACT = 1e-5
UNITS = 3  # two blocks, and the rest
MEANINGS = {
    "KeyError: 0": "the optimizer holds parameters that the model no longer has: fully_shard puts "
    "others in their place, so make the optimizer after it",
    "no attribute 'set_requires_gradient_sync'": "the model was not given to fully_shard",
}


def script(main: Callable[..., Any] | str, folder: Path | str = "runs") -> None:
    """The learner's `main(folder, steps, dtype)`, as a file that torchrun starts three times.

    On two ranks, then on one rank from the checkpoint of the two, then on two ranks in bfloat16.

    Args:
        main: The function, or its source.
        folder: Where the file `train_13.py` is written.
    """
    source = scripts.source_of(main)
    path = Path(folder) / SCRIPT
    scripts.write(path, HEADER, source, FOOTER)
    text = path.read_text()
    rehearsed = rehearsal.rehearse(text, str(path.resolve()), 2, FIRST, torch.float32)
    rehearsal.tell("on 2 ranks: ", path.name, rehearsed)
    shutil.rmtree(path.parent / CHECKPOINT, ignore_errors=True)
    in_float32 = _check_training(path)
    _check_resumed(path)
    shutil.rmtree(path.parent / CHECKPOINT)
    _check_bfloat16(path, in_float32)


# ---- on two ranks


def _check_training(path: Path) -> dict[str, list[int]]:
    """The first run; returns what it has sent."""
    case = "on 2 ranks: "
    steps, sent = _run(case, path, FIRST, "float32", nproc=2)
    scatters, _ = sent.get("reduce_scatter", (0, 0))
    other_steps = (
        f"it read the samples of steps {steps}, and {FIRST} steps were asked for: call "
        "micro_batches(step, device) once in each, from step 0 on"
    )
    refuse({other_steps: steps != list(range(FIRST))}, case)
    _check_result(case, _saved(case, path)["model"], FIRST)
    expected = FIRST * UNITS
    mistakes = {
        "all weights are one unit: give each block to fully_shard, and then the model": (
            scatters == FIRST
        ),
        f"{scatters} reduce-scatters for {UNITS} units and {FIRST} steps: the gradients travel "
        "after each micro-batch, and once in a step is enough": (
            scatters == expected * lab.MICRO_BATCHES
        ),
        f"{scatters} reduce-scatters in {FIRST} steps, expected {expected}: the blocks and the "
        "rest of the model are the units, and the gradients travel once in a step": (
            scatters != expected
        ),
    }
    refuse(mistakes, case)
    return sent


def _check_result(case: str, found: dict[str, Tensor], steps: int) -> None:
    """Compare with one process, and name the mistake if another training was done."""
    off = distance(found, reference(steps))
    if off < EXACT:
        return
    for mistake, settings in MISTAKES.items():
        refuse({mistake: distance(found, reference(steps, **settings)) < EXACT}, case)
    raise Hint(
        f"{case}after {steps} steps the weights are {off:.2%} away from those of one process that "
        "reads the same samples: print the loss of each step and the norm of its gradient"
    )


# ---- from a checkpoint


def _check_resumed(path: Path) -> None:
    """One rank resumes where two have stopped."""
    case = "on 1 rank, from the checkpoint of 2: "
    steps, _ = _run(case, path, ALL, "float32", nproc=1)
    expected = list(range(FIRST, ALL))
    mistakes = {
        f"it began anew at step 0, and {FIRST} steps were done: is the checkpoint read, and the "
        "number of steps that stands in it?": steps[:1] == [0],
        f"it read the samples of steps {steps}, expected {expected}": steps != expected,
    }
    refuse(mistakes, case)
    found = _saved(case, path)["model"]
    anew = reference(ALL, first=FIRST)
    lost = reference(ALL, forgets_at=FIRST)
    mistakes = {
        "the steps go on, but from the weights of build_model(): load what was saved": (
            distance(found, anew) < EXACT
        ),
        "the weights are there, but not the optimizer's momentum: the state that was read has to "
        "come back into the optimizer": distance(found, lost) < EXACT,
    }
    refuse(mistakes, case)
    _check_result(case, found, ALL)


# ---- in bfloat16


def _check_bfloat16(path: Path, in_float32: dict[str, list[int]]) -> None:
    case = "in bfloat16: "
    _, sent = _run(case, path, FIRST, "bfloat16", nproc=2)
    found = _saved(case, path)["model"]
    dtypes = {tensor.dtype for tensor in found.values()}
    others = sorted(str(dtype) for dtype in dtypes - {torch.float32})
    off = distance(found, reference(FIRST))
    gathered = sent["all_gather"][1] / in_float32["all_gather"][1]
    mistakes = {
        f"the weights that the optimizer holds are {', '.join(others)}: they stay in float32, and "
        "only what is gathered is rounded, by the policy": others,
        "the weights are those of a run in float32: does fully_shard get the policy?": off < EXACT,
        "the weights travel in float32: dtype is the param_dtype of the policy": gathered > 0.75,
        "the gradients travel in bfloat16, and their sum loses digits: reduce_dtype": (
            sent["reduce_scatter"][1] != in_float32["reduce_scatter"][1]
        ),
        f"the weights are {off:.0%} away from those in float32": off > 0.05,
    }
    refuse(mistakes, case)


# ---- runs


def _run(
    case: str, path: Path, steps: int, dtype: str, *, nproc: int
) -> tuple[list[int], dict[str, list[int]]]:
    """The steps whose samples rank 0 has read, and {kind: [calls, bytes]} of its collectives."""
    output = scripts.run(case, path, str(steps), dtype, nproc=nproc, counts=True, meanings=MEANINGS)
    read = [int(step) for step in re.findall(r"\[rank 0\] step (\d+)", output)]
    counts = re.findall(r"\[rank 0\] counted (.*)", output)
    return read, json.loads(counts[-1])


def _saved(case: str, path: Path) -> dict[str, Any]:
    """What the checkpoint holds, with whole tensors."""
    folder = path.parent / CHECKPOINT
    no_checkpoint = "there is no checkpoint: dcp.save(..., checkpoint_id=folder / 'checkpoint')"
    refuse({no_checkpoint: not (folder / ".metadata").exists()}, case)
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "whole.pt"
        with contextlib.redirect_stdout(io.StringIO()):
            dcp_to_torch_save(folder, file)
        found = torch.load(file, weights_only=True)
    for name in ("model", "optimizer", "step"):
        refuse({f'the checkpoint has no "{name}"': name not in found}, case)
    expected = lab.build_model().state_dict()
    mistakes = {
        '"model" does not hold the weights of the model: save what get_state_dict gives': (
            found["model"].keys() != expected.keys()
        )
    }
    refuse(mistakes, case)
    return found


MISTAKES: dict[str, dict[str, Any]] = {
    "the weights are those from the start: is the optimizer made of the parameters that the model "
    "has after fully_shard, and are its gradients still there at its step?": {"steps_taken": 0},
    f"the gradients are not clipped to a norm of {MAX_NORM}": {"max_norm": float("inf")},
    "the gradient of a step is the sum over its two micro-batches: divide each loss by their "
    "number": {"loss_scale": 1.0},
    "only the last micro-batch of a step is in its gradient": {"micro_batches": (1,)},
    "the gradients of earlier steps are still in those of the next": {"zero": False},
    f"the optimizer is SGD with lr={LR} and momentum={MOMENTUM}": {"momentum": 0.0},
}


@functools.cache
def reference(
    steps: int,
    *,
    first: int = 0,
    steps_taken: int | None = None,
    forgets_at: int | None = None,
    max_norm: float = MAX_NORM,
    loss_scale: float = 1 / lab.MICRO_BATCHES,
    micro_batches: tuple[int, ...] = tuple(range(lab.MICRO_BATCHES)),
    zero: bool = True,
    momentum: float = MOMENTUM,
) -> dict[str, Tensor]:
    """The weights of one process, or those of one with a mistake.

    Args:
        steps: The step that it ends before.
        first: The step that it begins with.
        steps_taken: How many steps the optimizer makes; None: all.
        forgets_at: Before this step the optimizer loses its state.
        max_norm: Norm to which gradients are clipped.
        loss_scale: Factor of the loss of each micro-batch.
        micro_batches: Which of them it reads.
        zero: Whether gradients are set to zero before a step.
        momentum: Momentum of SGD.
    """
    model = lab.build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=momentum)
    for step in range(first, steps if steps_taken is None else steps_taken):
        if step == forgets_at:
            optimizer.state.clear()
        if zero:
            optimizer.zero_grad()
        tokens = lab.tokens_of(step)
        for number in micro_batches:
            inputs = tokens[number, :, :-1]
            targets = tokens[number, :, 1:]
            (gpt_loss(model(inputs), targets) * loss_scale).backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}
