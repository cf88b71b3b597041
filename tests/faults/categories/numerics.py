"""Numbers that are none: diverging, poisoned weights, the last step; never saved, never silent."""

import random
from functools import partial
from pathlib import Path

from ..cases import BASE, EITHER, REFUSED, WEATHER, Case, Room
from ..injection import on_rank, poison

HOT = ("--optim.warmup_steps=0", "--optim.min_lr=0")
NAMES = ["lr", "finite", "nan", "inf", "clip_norm"]
INFINITE = float("inf")
NAN = float("nan")


def cases(rng: random.Random) -> list[Case]:
    made = []
    for lr in ("1e10", "1e20", "1e30", "1e38", "1e300"):
        for steps in (1, 2, 5):
            for every in (0, 1):
                args = [f"--optim.lr={lr}", f"--train.steps={steps}", *HOT, *_saves(every, 2)]
                answer = EITHER if lr in ("1e10", "1e20") else REFUSED
                ranks = rng.choice([1, 1, 2])
                made.append(_case(f"lr {lr}, {steps} steps, every {every}", args, answer, ranks))
    for lr in ("1e30", "1e38"):
        for steps in (1, 3):
            args = [f"--optim.lr={lr}", f"--train.steps={steps}", *HOT, *_saves(1, 1)]
            made.append(_case(f"vit, lr {lr}, {steps} steps", args, REFUSED, 1, base=WEATHER))
    for where in ("weights", "one weight", "moments"):
        for value in (NAN, INFINITE, -INFINITE):
            for step in (1, 3, 4):
                for keep in (1, 2):
                    ranks = rng.choice([1, 1, 2])
                    args = ["--train.steps=4", *_saves(rng.choice([0, 1, 2]), keep)]
                    patch = partial(poison, step, value, where)
                    if ranks == 2 and rng.random() < 0.5:
                        patch = partial(on_rank, 1, patch)
                    # what the last step leaves in the moments is used by nobody
                    unused = where == "moments" and step == 4
                    made.append(
                        _case(
                            f"{value} in {where} after step {step} of 4, {args[1:]}",
                            args,
                            EITHER if unused else REFUSED,
                            ranks,
                            patch=patch,
                        )
                    )
    for dtype in ("float32", "float64", "bfloat16", "float16"):
        args = [f"--train.dtype={dtype}", "--optim.lr=1e30", "--train.steps=4", *HOT, *_saves(1, 1)]
        made.append(_case(f"lr 1e30 in {dtype}", args, REFUSED, 1))
    return made


def _saves(every: int, keep: int) -> list[str]:
    return [f"--checkpoint.every={every}", f"--checkpoint.keep={keep}"] if every else []


def _case(what: str, args: list[str], answer: str, ranks: int, *, patch=None, base=BASE) -> Case:
    return Case(
        f"{what} on {ranks} ranks",
        ["--train.out=run", *args],
        NAMES,
        answer,
        ranks,
        patch=patch,
        act=partial(_diverge_and_resume, args, patch),
        base=base,
    )


def _diverge_and_resume(args: list[str], patch, room: Room) -> None:
    """Nothing that is not finite is kept; and what is kept can be resumed with a sane rate."""
    answer = room.train("--train.out=run", *args, patch=patch)
    run = room.folder / "run"
    found = not_finite(run)
    if found:
        room.flag("wrong", f"not finite: {found}")
    if run.is_dir() and any("checkpoint.every" in word for word in args):
        sane = [word for word in args if not word.startswith("--optim.")]
        done = room.train("--train.out=run", *sane, "--checkpoint.resume")
        # weights may be finite and of no use
        useless = done.errors and not done.tracebacks and "lr 1e" in room.case.what
        if set(done.codes) != {0} and not useless:
            room.flag("wrong", f"cannot resume with a sane rate: {done.errors or done.codes}")
        found = not_finite(run)
        if found:
            room.flag("wrong", f"not finite after it was resumed: {found}")
    room.answer = answer


def not_finite(run: Path) -> str:
    """The first place in a run's files with a number that is not finite; empty if there is none."""
    import torch

    from labcode.train.checkpoint.folder import read_about, read_index
    from labcode.train.checkpoint.tensors import read_whole

    weights = run / "weights.pt"
    if weights.is_file():
        for name, tensor in torch.load(weights, weights_only=True).items():
            if not torch.isfinite(tensor).all():
                return f"{name} in weights.pt"
    for folder in sorted(run.glob("checkpoints/step-*")):
        index = read_index(folder, read_about(folder))
        for name in index:
            tensor = read_whole(folder, index, name)
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                return f"{name} in {folder.name}"
    return ""
