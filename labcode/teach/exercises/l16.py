"""Checks of lesson 16, making it fit."""

import contextlib
import copy
import math
import numbers
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._pytree import tree_leaves

from labcode.perf.saved_bytes import saved_bytes
from labcode.teach.check import Exercise, Hint, due
from labcode.teach.exercises.expect import TOLERANCE, diagnose, distance, refuse, tensor, times
from labcode.teach.exercises.in_notebook import LOOP, bounded, without
from labcode.teach.labs.l16_limited import Settings, train_within
from labcode.teach.labs.l16_plan import CASES, Case, best, candidates, fits, peak_bytes, step_s

# ---- 16.1

LOGS: dict[str, tuple[str, int | None]] = {
    "the CPU's error": (
        "step 11: loss 4.21, 93 ms\n"
        "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't "
        "allocate memory: you tried to allocate 6291456 bytes. Error code 12 (Cannot allocate "
        "memory)\n",
        6291456,
    ),
    "CUDA's error in GiB": (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a "
        "total capacity of 39.39 GiB of which 1.12 GiB is free. Including non-PyTorch memory, this "
        "process has 38.26 GiB memory in use. Of the allocated memory 35.02 GiB is allocated by "
        "PyTorch, and 2.61 GiB is reserved by PyTorch but unallocated.\n",
        3 * 2**29,
    ),
    "CUDA's error in MiB": (
        "epoch 3\n[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 "
        "MiB. GPU 0 has a total capacity of 4.00 GiB of which 2.35 GiB is free.\n",
        20 * 2**20,
    ),
    "CUDA's error in KiB": (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 KiB. GPU 0 has a "
        "total capacity of 4.00 GiB of which 1.12 MiB is free.\n",
        512 * 2**10,
    ),
    "a log without such an error": (
        "allocated 4096 bytes for the data\nstep 3: loss 3.1, 20 ms\nValueError: micro_batch=0\n",
        None,
    ),
    "a process that the kernel has killed": (
        "slurmstepd: error: Detected 1 oom_kill event in StepId=31.0. Some of the step tasks have "
        "been OOM Killed.\n",
        None,
    ),
}


def asked_bytes(answer: Callable[..., Any]) -> None:
    """The learner's `asked_bytes(log)`: what the failed allocation asked for, or None."""
    for name, (log, expected) in LOGS.items():
        case = f"{name}: "
        found = answer(log)
        if found is ...:
            raise NotImplementedError("exercise")
        if expected is None:
            made_up = f"it returned {found!r}, but there is no allocation in it that failed"
            refuse({made_up: found is not None}, case)
            continue
        refuse({"it returned None, and a number stands there": found is None}, case)
        if not isinstance(found, int | float):
            raise Hint(f"{case}return a number, not {found!r}")
        mistakes = {
            f"{found:g} is the number that stands there: in which unit?": (
                found in (expected / 2**10, expected / 2**20, expected / 2**30)
            ),
            "GiB is 2**30 bytes, not 10**9": expected * 1e9 / 2**30,
        }
        otherwise = (
            f"it returned {found:,.0f}, expected is {expected:,}: which of the numbers is the one "
            "that was asked for?"
        )
        diagnose(case, found, expected, mistakes, otherwise, tolerance=1e-6)


# ---- 16.2


class Parts(NamedTuple):
    """Bytes of one rank.

    Args:
        weights: All of them; their gradients take as much, AdamW's moments twice as much.
        activations: What all layers keep for backward.
        logits: One tensor as large as the logits.
    """

    weights: float
    activations: float
    logits: float


PARTS = {
    "many tokens": Parts(100.0, 1000.0, 30.0),
    "a large vocabulary": Parts(100.0, 200.0, 400.0),
    "few tokens": Parts(1000.0, 100.0, 30.0),
}


def peak(answer: Callable[..., Any]) -> None:
    """The learner's `peak(parts, num_micro_batches)`: the most bytes within a step."""
    for name, parts in PARTS.items():
        for count in (1, 2, 8):
            found = due(answer(parts, count))
            case = f"{name}, num_micro_batches={count}: "
            if not isinstance(found, int | float):
                raise Hint(f"{case}return one number, not {found!r}")
            _is_peak(case, parts, count, found)


def _is_peak(case: str, parts: Parts, count: int, found: float) -> None:
    weights, activations, logits = parts
    kept = 3 * weights
    at_loss = activations + 3 * logits
    gradients = weights if count > 1 else 0.0
    right = kept + max(at_loss + gradients, weights)

    def with_activations(wrong: float) -> float:
        return kept + max(wrong + 3 * logits + gradients, weights)

    mistakes = {
        "at the first moment no gradient of a weight exists yet in a step of one micro-batch": (
            kept + at_loss + weights
        ),
        "from the second micro-batch on, the gradients of the first are there all the time": (
            kept + max(at_loss, weights)
        ),
        "there are two moments: which is the larger one here?": kept + at_loss,
        "the loss holds three tensors as large as the logits": (
            kept + max(activations + logits + gradients, weights)
        ),
        "where are the logits?": kept + max(activations + gradients, weights),
        "AdamW keeps two numbers for each weight from step to step": right - 2 * weights,
        "`activations` are those of one micro-batch, and backward frees them before the next one": (
            with_activations(count * activations)
        ),
        "`activations` are those of one micro-batch already: why divide them?": (
            with_activations(activations / count)
        ),
    }
    otherwise = (
        f"{found:,.0f} bytes, expected are {right:,.0f}: what exists at each of the two moments?"
    )
    diagnose(case, found, right, mistakes, otherwise, tolerance=1e-6)


# ---- 16.3

PYTORCHS = (
    torch_checkpoint.checkpoint,
    torch_checkpoint.CheckpointFunction.forward,
    torch_checkpoint.CheckpointFunction.backward,
)
MOVED = (
    "after backward the random numbers are others than without checkpointing: the second run has "
    "moved the generator"
)


class _Block(nn.Module):
    """Two inputs, dropout between two products; it counts how often it runs."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.up = nn.Parameter(torch.randn(6, 24, generator=generator, dtype=torch.float64))
        self.down = nn.Parameter(torch.randn(24, 6, generator=generator, dtype=torch.float64))
        self.dropout = nn.Dropout(dropout)
        self.runs: list[bool] = []

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        self.runs.append(torch.is_grad_enabled())
        hidden = self.dropout(torch.tanh(x @ self.up))
        return x + scale * (hidden @ self.down)


class _Trial(NamedTuple):
    """What a forward and a backward have given."""

    output: Tensor
    grads: dict[str, Tensor | None]
    drawn: Tensor  # random numbers, after both
    runs: list[bool]  # of the block: whether autograd was on


def checkpointing(answer: Any) -> None:
    """The learner's `Checkpoint`, an autograd.Function applied as `apply(block, *inputs)`."""
    due(answer)
    cases = {
        "": (0.0, True, True),
        "with dropout, ": (0.5, True, True),
        "with a second input that needs no gradient, ": (0.0, True, False),
        "with a first input that needs no gradient, ": (0.5, False, True),
    }
    for case, (dropout, first, second) in cases.items():
        plain = _trial(_run_plainly, dropout, first, second)
        with without(*PYTORCHS):
            own = _trial(answer.apply, dropout, first, second)
        _runs_twice(case, own, plain)
        _has_gradients(case, own, plain, dropout)
        refuse({MOVED: not torch.equal(own.drawn, plain.drawn)}, case)
    _takes_tokens(answer)
    _keeps_little(answer)
    _adds_up(answer)


def _run_plainly(block: Callable[..., Any], *inputs: Tensor) -> Any:
    return block(*inputs)


def _trial(run: Callable[..., Any], dropout: float, first: bool, second: bool) -> _Trial:
    block = _Block(dropout)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, 6, generator=generator, dtype=torch.float64, requires_grad=first)
    scale = torch.randn(6, generator=generator, dtype=torch.float64, requires_grad=second)
    torch.manual_seed(7)
    # an input is seldom a leaf: it comes from the layer before
    output = due(run(block, x * 1.0, scale * 1.0))
    tensor(output, what="forward returned")
    torch.rand(3)  # something else draws between forward and backward
    if output.requires_grad:
        with _explained():
            (output**2).sum().backward()
    drawn = torch.rand(4)
    grads = {
        "input `x`": x.grad,
        "input `scale`": scale.grad,
        "parameter `up`": block.up.grad,
        "parameter `down`": block.down.grad,
    }
    return _Trial(output.detach(), grads, drawn, block.runs)


EXPLAINED = {
    "through the graph a second time": (
        "in your `backward`: the backward of the second run went on through the inputs into the "
        "layers before them, which have their own turn. Does every input of the second run begin "
        "without a history?"
    ),
    "can require gradients": (
        "with an input of whole numbers, such as tokens: it can have no gradient. Each copy is to "
        "need one only if its input does"
    ),
}


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """What PyTorch says of a second run with the wrong inputs, with its cause."""
    try:
        yield
    except RuntimeError as error:
        refuse({hint: sign in str(error) for sign, hint in EXPLAINED.items()})
        raise


def _runs_twice(case: str, own: _Trial, plain: _Trial) -> None:
    """The block runs in forward without autograd, and in backward with it."""
    mistakes = {
        "`block` never ran": not own.runs,
        "the output is not that of `block(*inputs)`": (
            distance(own.output, plain.output) > TOLERANCE
        ),
        "`block` ran with autograd switched on in forward: then everything in it is kept": (
            own.runs[:1] == [True]
        ),
        "`block` ran once: backward has no activations unless it runs a second time": (
            len(own.runs) == 1
        ),
        f"`block` ran {len(own.runs)} times: twice is enough": len(own.runs) > 2,
        "the second run has autograd switched off: torch.enable_grad()": own.runs[1:] == [False],
    }
    refuse(mistakes, case)


def _has_gradients(case: str, own: _Trial, plain: _Trial, dropout: float) -> None:
    for name, expected in plain.grads.items():
        found = own.grads[name]
        what = f"{case}the gradient of the {name} "
        if expected is None:
            refuse({"is there, and nobody asked for it": found is not None}, what)
            continue
        if found is None:
            raise Hint(
                f"{what}is missing: does the second run have inputs with requires_grad, and does "
                "backward return their gradients in the order of forward's arguments?"
            )
        otherwise = "is wrong: which gradient goes into the backward of the second run?"
        if dropout:
            otherwise = "is wrong: did the second run drop the same numbers as the first one?"
        mistakes = {
            f"has the shape {list(found.shape)}": found.shape != expected.shape,
            "is {times:g} times as large as it should be: is it added up twice?": times(expected),
        }
        diagnose(what, found, expected, mistakes, otherwise)


def _takes_tokens(answer: Any) -> None:
    """A block whose second input is whole numbers, such as tokens: they can have no gradient."""
    table = torch.arange(24, dtype=torch.float64).view(8, 3)
    tokens = torch.tensor([1, 5, 7])

    def block(x: Tensor, places: Tensor) -> Tensor:
        return x * table[places]

    x = torch.ones(3, 3, dtype=torch.float64, requires_grad=True)
    with _explained():
        answer.apply(block, x, tokens).sum().backward()
    case = "with an input of whole numbers, such as tokens: "
    if x.grad is None:
        raise Hint(f"{case}the gradient of the other input is missing")
    diagnose(case, x.grad, table[tokens], {}, "the gradient of the other input is wrong")


def _keeps_little(answer: Any) -> None:
    block = _Block(0.0)
    x = torch.randn(640, 6, dtype=torch.float64, requires_grad=True)
    scale = torch.ones(6, dtype=torch.float64)
    with saved_bytes(block) as saved:
        output = answer.apply(block, x, scale)
        kept = saved.total()
    inputs = x.nbytes + scale.nbytes + torch.get_rng_state().nbytes
    in_ctx = [value for value in tree_leaves(vars(output.grad_fn)) if isinstance(value, Tensor)]
    mistakes = {
        f"{kept} bytes are kept, and the inputs with the random state have {inputs}: keep nothing "
        "but the inputs": kept > inputs,
        "a tensor of numbers stands in ctx itself: ctx.save_for_backward keeps tensors, so that "
        "autograd notices when one is changed, and frees them in time": any(
            value.is_floating_point() for value in in_ctx
        ),
    }
    refuse(mistakes)


def _adds_up(answer: Any) -> None:
    """Two blocks one behind the other, and gradients that are added up over two backwards."""
    own = _twice_backward(answer.apply)
    for found, expected in zip(own, _twice_backward(_run_plainly)):
        case = "two blocks one behind the other, two backwards: "
        refuse({"a gradient is missing": found is None}, case)
        otherwise = "a gradient is wrong. Is something left over from the first one?"
        diagnose(case, found, expected, {}, otherwise)


def _twice_backward(run: Callable[..., Any]) -> list[Any]:
    first = _Block(0.0)
    second = _Block(0.0)
    x = torch.ones(3, 6, dtype=torch.float64, requires_grad=True)
    scale = torch.ones(6, dtype=torch.float64, requires_grad=True)
    for _ in range(2):
        run(second, run(first, x, scale), scale).sum().backward()
    return [x.grad, scale.grad, first.up.grad, second.down.grad]


# ---- 16.4

LAYER_AND_INPUT = ((1.0, 1.0), (16.0, 1.0), (34.0, 2.0), (3.0, 1.0), (4.0, 3.0))


def best_segment(answer: Callable[..., Any]) -> None:
    """The learner's `best_segment(num_layers, layer_bytes, input_bytes)`: layers in a segment."""
    for num_layers in (1, 3, 4, 5, 12, 24, 34, 37, 48, 96):
        for layer_bytes, input_bytes in LAYER_AND_INPUT:
            found = due(bounded(LOOP, answer, num_layers, layer_bytes, input_bytes))
            case = f"L = {num_layers}, {layer_bytes:g} and {input_bytes:g} bytes: "
            if not isinstance(found, numbers.Integral):
                raise Hint(f"{case}it returned {found!r}: k is a whole number")
            kept = {}
            for k in range(1, num_layers + 1):
                kept[k] = segment_bytes(num_layers, k, layer_bytes, input_bytes)
            refuse({f"k = {found} is not between 1 and L": found not in kept}, case)
            least = min(kept.values())
            more = f"k = {found} keeps {kept[found]:g} bytes, and another k keeps {least:g}"
            refuse({more: kept[found] > least * (1 + 1e-9)}, case)


def segment_bytes(num_layers: int, k: int, layer_bytes: float, input_bytes: float) -> float:
    """What is kept at the worst moment with k layers in a segment.

    Source: Chen et al. 2016 (arXiv:1604.06174), section 4.
    """
    return math.ceil(num_layers / k) * input_bytes + k * layer_bytes


# ---- 16.5

NEARLY_BEST = 0.85


def choose(answer: Callable[..., Any], runs_for_real: bool = True) -> None:
    """The learner's `choose(case)`: in every case by the formulas, then one of them for real."""
    chosen = []
    for case in CASES:
        with without(best):
            # what an answer does to its copy stays there
            settings = bounded(LOOP, answer, copy.deepcopy(case))
        none = "it returned None: is there a `return`? Some settings do fit"
        refuse({none: settings is None}, f"{case.about}: ")
        chosen.append(due(settings))
        _is_good(case, settings)
    if runs_for_real:
        _fits_for_real(CASES[0], chosen[0])


def _is_good(case: Case, settings: Any) -> None:
    """It keeps the global batch, fits, and is nearly the fastest that does."""
    if not isinstance(settings, Settings):
        raise Hint(f"return Settings(...), not {settings!r}")
    about = f"{case.about}: "
    samples = settings.micro_batch * settings.num_micro_batches
    kind = settings.activation_checkpointing
    mistakes = {
        f"{settings.micro_batch} x {settings.num_micro_batches} samples are {samples}, and the "
        f"global batch is {case.global_batch}: another batch is another training": (
            samples != case.global_batch
        ),
        f"no dtype {settings.dtype!r} here": settings.dtype not in case.flops_per_s,
        f"activation_checkpointing={kind!r}: none or full": kind not in ("none", "full"),
    }
    refuse(mistakes, about)
    needs = f"{peak_bytes(case, settings) / 2**20:,.0f}"
    room = f"{case.room_bytes / 2**20:,.0f}"
    too_large = f"out of memory, it needs {needs} MiB and has {room}"
    refuse({too_large: not fits(case, settings)}, about)
    as_long = step_s(case, settings) / step_s(case, best(case))
    if as_long > 1 / NEARLY_BEST:
        raise Hint(
            f"{about}it fits, with {needs} of {room} MiB, but a step takes {as_long:.2f} times as "
            f"long as it has to{_why(case, settings)}"
        )


def _without_launches(case: Case, one: Settings) -> float:
    return step_s(case, one) - one.num_micro_batches * case.launch_s


def _with_free_checkpointing(case: Case, one: Settings) -> float:
    return step_s(case, replace(one, activation_checkpointing="none"))


def _of_a_micro_batch(case: Case, one: Settings) -> float:
    return step_s(case, one) / one.num_micro_batches


QUESTIONS = {  # {what has probably been left out: the seconds without it}
    "what does each micro-batch cost beyond its products?": _without_launches,
    "what does checkpointing cost?": _with_free_checkpointing,
    "is your time that of a whole step?": _of_a_micro_batch,
}


def _why(case: Case, settings: Settings) -> str:
    """The questions by whose seconds these settings are the best."""
    fitting = [one for one in candidates(case) if fits(case, one)]
    asked = []
    for question, seconds in QUESTIONS.items():
        least = min(seconds(case, one) for one in fitting)
        if math.isclose(seconds(case, settings), least, rel_tol=1e-9):
            asked.append(question)
    return ": " + " Or ".join(asked) if asked else ""


def _fits_for_real(case: Case, settings: Settings) -> None:
    outcome = train_within(case.model, settings, case.room_bytes)
    last = outcome.log.strip().rpartition("\n")[2]
    fails = f"{case.about}: in a process with this limit it fails: {last[-200:]}"
    refuse({fails: not outcome.fits})


EXERCISES = {
    "16.1": Exercise(
        check=asked_bytes,
        praise="one number from each of the two allocators, and none from a log that has none",
        hints=(
            "Which words stand directly before the number, in the error of the CPU and in that of "
            "CUDA?",
            "re.search(pattern, log) gives a match or None; match[1] is the first group.",
            "GiB is 2**30 bytes, MiB is 2**20 and KiB is 2**10.",
        ),
    ),
    "16.2": Exercise(
        check=peak,
        praise="the larger of the two moments, with the gradients where they belong",
        hints=(
            "Write down what exists at the two moments: when the loss's backward begins, and when "
            "the last gradient is there.",
            "With several micro-batches, when do the gradients of the first one go away?",
        ),
    ),
    "16.3": Exercise(
        check=checkpointing,
        praise="inputs alone are kept, and the gradients are the same to the last bit",
        hints=(
            "In forward autograd is switched off already. What do you need to keep to run `block` "
            "a second time?",
            "A second run needs tensors of its own: `x.detach()`, with requires_grad as it was in "
            "`x`. Where do their gradients stand after `torch.autograd.backward`?",
            "torch.get_rng_state() before the first run, torch.set_rng_state(...) before the "
            "second. What has to happen with the state of the generator afterwards?",
        ),
    ),
    "16.4": Exercise(
        check=best_segment,
        praise="the best number of layers for any depth and any two sizes",
        hints=(
            "With k layers in a segment there are L/k segments, rounded up. Of each the input is "
            "kept, and one segment at a time is whole.",
            "There are only L values of k: you may try them all.",
        ),
    ),
    "16.5": Exercise(
        check=choose,
        praise="it fits, it keeps the global batch, and nothing that fits is much faster",
        hints=(
            "Go through all divisors of the global batch, both dtypes, and both kinds of "
            "checkpointing: a list of all settings first.",
            "Throw out what does not fit, then take the one with the shortest step.",
        ),
    ),
}
