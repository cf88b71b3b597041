"""Checks of lesson 16, making it fit. The text of each assertion is a hint."""

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint

from labcode.perf.saved_bytes import saved_bytes
from labcode.teach.check import Exercise, due
from labcode.teach.exercises.in_notebook import without
from labcode.teach.labs.l16_limited import Settings, train_within
from labcode.teach.labs.l16_plan import (
    CASES,
    Case,
    best,
    candidates,
    fits,
    peak_bytes,
    step_s,
)

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
    none_where_due = True
    for name, (log, expected) in LOGS.items():
        found = answer(log)
        if found is ...:
            raise NotImplementedError("exercise")
        if expected is None:
            assert found is None, (
                f"{name}: it returned {found!r}, but there is no allocation in it that failed"
            )
            continue
        none_where_due = none_where_due and found is not None
        assert found is not None, f"{name}: it returned None, and a number stands there"
        assert isinstance(found, int | float), f"{name}: return a number, not {found!r}"
        for unit in (2**10, 2**20, 2**30):
            assert not math.isclose(found * unit, expected, rel_tol=1e-3), (
                f"{name}: {found:g} is the number that stands there: in which unit?"
            )
        assert not math.isclose(found, expected * (1e9 / 2**30), rel_tol=1e-3), (
            f"{name}: GiB is 2**30 bytes, not 10**9"
        )
        assert math.isclose(found, expected, rel_tol=1e-6), (
            f"{name}: it returned {found:,.0f} and {expected:,} is due: which of the numbers is "
            "the one that was asked for?"
        )


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


def peak(answer: Callable[..., Any]) -> None:
    """The learner's `peak(parts, num_micro_batches)`: the most bytes within a step."""
    cases = {
        "many tokens": Parts(100.0, 1000.0, 30.0),
        "a large vocabulary": Parts(100.0, 200.0, 400.0),
        "few tokens": Parts(1000.0, 100.0, 30.0),
    }
    for name, parts in cases.items():
        for count in (1, 2, 8):
            found = due(answer(parts, count))
            case = f"{name}, {count} micro-batches: "
            assert isinstance(found, int | float), f"{case}return one number, not {found!r}"
            _of_peak(case, parts, count, found)


def _of_peak(case: str, parts: Parts, count: int, found: float) -> None:
    weights, activations, logits = parts
    kept = 3 * weights
    gradients = weights if count > 1 else 0.0
    expected = kept + max(activations + 3 * logits + gradients, weights)
    at_loss = activations + 3 * logits
    wrong = [
        (
            kept + weights + at_loss,
            "at the first moment no gradient of a weight exists yet in a step of one micro-batch",
        ),
        (
            kept + max(at_loss, weights),
            "from the second micro-batch on, the gradients of the first are there all the time",
        ),
        (kept + at_loss, "there are two moments: which is the larger one here?"),
        (
            kept + max(activations + logits + gradients, weights),
            "the loss holds three tensors as large as the logits",
        ),
        (kept + max(activations + gradients, weights), "where are the logits?"),
        (
            weights + max(at_loss + gradients, weights),
            "AdamW keeps two numbers for each weight from step to step",
        ),
    ]
    if math.isclose(found, expected, rel_tol=1e-6):
        return
    for value, hint in wrong:
        assert not math.isclose(found, value, rel_tol=1e-6), case + hint
    for number in (count, 1 / count):
        scaled = kept + max(number * activations + 3 * logits + gradients, weights)
        assert not math.isclose(found, scaled, rel_tol=1e-6), (
            f"{case}`activations` are those of one micro-batch, and backward frees them before the "
            "next one"
        )
    raise AssertionError(
        f"{case}{found:,.0f} bytes, and {expected:,.0f} are due: what exists at each of the two "
        "moments?"
    )


# ---- 16.3

TOLERANCE = 1e-12
PYTORCHS = (
    torch_checkpoint.checkpoint,
    torch_checkpoint.CheckpointFunction.forward,
    torch_checkpoint.CheckpointFunction.backward,
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
    state: Tensor
    runs: list[bool]


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
        plain = _trial(lambda block, *inputs: block(*inputs), dropout, first, second)
        with without(*PYTORCHS):
            own = _trial(answer.apply, dropout, first, second)
        _of_trial(case, own, plain, dropout)
    _with_tokens(answer)
    _keeps_little(answer)
    _twice(answer)


def _trial(run: Callable[..., Any], dropout: float, first: bool, second: bool) -> _Trial:
    block = _Block(dropout)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, 6, generator=generator, dtype=torch.float64, requires_grad=first)
    scale = torch.randn(6, generator=generator, dtype=torch.float64, requires_grad=second)
    torch.manual_seed(7)
    # an input is seldom a leaf: it comes from the layer before
    output = due(run(block, x * 1.0, scale * 1.0))
    assert isinstance(output, Tensor), f"forward returned a {type(output).__name__}, not a tensor"
    torch.rand(3)  # something else draws between forward and backward
    if output.requires_grad:
        with _second_graph_explained():
            (output**2).sum().backward()
    drawn = torch.rand(4)
    grads = {"x": x.grad, "scale": scale.grad, "up": block.up.grad, "down": block.down.grad}
    return _Trial(output.detach(), grads, drawn, block.runs)


@contextlib.contextmanager
def _second_graph_explained() -> Iterator[None]:
    """PyTorch's error for a second run that is tied to the first one's inputs, with its cause."""
    try:
        yield
    except RuntimeError as error:
        if "through the graph a second time" not in str(error):
            raise
        raise AssertionError(
            "in your `backward`: the backward of the second run went on through the inputs into "
            "the layers before them, which have their own turn. Does every input of the second "
            "run begin without a history?"
        ) from None


def _with_tokens(answer: Any) -> None:
    """A block whose second input is whole numbers, such as tokens: they can have no gradient."""
    table = torch.arange(24, dtype=torch.float64).view(8, 3)
    tokens = torch.tensor([1, 5, 7])

    def block(x: Tensor, places: Tensor) -> Tensor:
        return x * table[places]

    x = torch.ones(3, 3, dtype=torch.float64, requires_grad=True)
    try:
        answer.apply(block, x, tokens).sum().backward()
    except RuntimeError as error:
        if "can require gradients" not in str(error):
            raise
        raise AssertionError(
            "with an input of whole numbers, such as tokens: it can have no gradient. Each copy "
            "is to need one only if its input does"
        ) from None
    assert x.grad is not None and not _far(x.grad, table[tokens]), (
        "with an input of whole numbers, such as tokens: the gradient of the other input is wrong"
    )


def _of_trial(case: str, own: _Trial, plain: _Trial, dropout: float) -> None:
    assert own.runs, f"{case}`block` never ran"
    assert not _far(own.output, plain.output), f"{case}the output is not that of `block(*inputs)`"
    assert not own.runs[0], (
        f"{case}`block` ran with autograd switched on in forward: then everything in it is kept"
    )
    assert len(own.runs) > 1, (
        f"{case}`block` ran once: backward has no activations unless it runs a second time"
    )
    assert len(own.runs) == 2, f"{case}`block` ran {len(own.runs)} times: twice is enough"
    assert own.runs[1], f"{case}the second run has autograd switched off: torch.enable_grad()"
    for name, expected in plain.grads.items():
        found = own.grads[name]
        what = f"the gradient of the parameter `{name}`"
        if name in ("x", "scale"):
            what = f"the gradient of the input `{name}`"
        if expected is None:
            assert found is None, f"{case}{what} is there, and nobody asked for it"
            continue
        assert found is not None, (
            f"{case}{what} is missing: does the second run have inputs with requires_grad, and "
            "does backward return their gradients in the order of forward's arguments?"
        )
        assert found.shape == expected.shape, f"{case}{what} has the shape {list(found.shape)}"
        for times in (2.0, 3.0):
            assert _far(found, times * expected), (
                f"{case}{what} is {times:g} times as large as it should be: is it added up twice?"
            )
        if _far(found, expected) and dropout:
            raise AssertionError(
                f"{case}{what} is wrong: did the second run drop the same numbers as the first one?"
            )
        assert not _far(found, expected), (
            f"{case}{what} is wrong: which gradient goes into the backward of the second run?"
        )
    assert torch.equal(own.state, plain.state), (
        f"{case}after backward the random numbers are others than without checkpointing: the "
        "second run has moved the generator"
    )


def _keeps_little(answer: Any) -> None:
    block = _Block(0.0)
    x = torch.randn(640, 6, dtype=torch.float64, requires_grad=True)
    scale = torch.ones(6, dtype=torch.float64)
    with saved_bytes(block) as saved:
        output = answer.apply(block, x, scale)
        kept = saved.total()
    state = torch.get_rng_state()
    inputs = x.untyped_storage().nbytes() + scale.untyped_storage().nbytes() + state.nbytes
    assert kept <= inputs, (
        f"{kept} bytes are kept, and the inputs with the random state have {inputs}: keep "
        "nothing but the inputs"
    )
    node = output.grad_fn
    held = [value for value in vars(node).values() if isinstance(value, Tensor)]
    for value in list(vars(node).values()):
        if isinstance(value, list | tuple):
            held += [entry for entry in value if isinstance(entry, Tensor)]
    numbers = [value for value in held if value.is_floating_point()]
    assert not numbers, (
        "a tensor of numbers stands in ctx itself: ctx.save_for_backward keeps tensors, so that "
        "autograd notices when one is changed, and frees them in time"
    )


def _twice(answer: Any) -> None:
    """Two blocks one behind the other, and gradients that are added up over two backwards."""

    def grads(run: Callable[..., Any]) -> list[Tensor]:
        blocks = (_Block(0.0), _Block(0.0))
        x = torch.ones(3, 6, dtype=torch.float64, requires_grad=True)
        scale = torch.ones(6, dtype=torch.float64, requires_grad=True)
        for _ in range(2):
            out = run(blocks[1], run(blocks[0], x, scale), scale)
            out.sum().backward()
        found = [x.grad, scale.grad, blocks[0].up.grad, blocks[1].down.grad]
        return [grad for grad in found if grad is not None]

    own = grads(answer.apply)
    plain = grads(lambda block, *inputs: block(*inputs))
    assert len(own) == len(plain), "two blocks, two backwards: a gradient is missing"
    for found, expected in zip(own, plain):
        assert not _far(found, expected), (
            "two blocks one behind the other, two backwards: a gradient is wrong. Is something "
            "left over from the first one?"
        )


def _far(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape:
        return True
    return bool((found - expected).abs().max() > TOLERANCE * max(1.0, float(expected.abs().max())))


# ---- 16.4

LAYER_AND_INPUT = ((1.0, 1.0), (16.0, 1.0), (34.0, 2.0), (3.0, 1.0), (4.0, 3.0))


def best_segment(answer: Callable[..., Any]) -> None:
    """The learner's `best_segment(num_layers, layer_bytes, input_bytes)`: layers in a segment."""
    for num_layers in (1, 3, 4, 5, 12, 24, 34, 37, 48, 96):
        for layer_bytes, input_bytes in LAYER_AND_INPUT:
            found = due(answer(num_layers, layer_bytes, input_bytes))
            case = f"L = {num_layers}, {layer_bytes:g} and {input_bytes:g} bytes: "
            assert isinstance(found, int), f"{case}it returned {found!r}: k is a whole number"
            assert 1 <= found <= num_layers, f"{case}k = {found} is not between 1 and L"
            sizes = [
                segment_bytes(num_layers, k, layer_bytes, input_bytes)
                for k in range(1, num_layers + 1)
            ]
            own = sizes[found - 1]
            assert math.isclose(own, min(sizes), rel_tol=1e-9), (
                f"{case}k = {found} keeps {own:g} bytes, and another k keeps {min(sizes):g}"
            )


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
            settings = answer(copy.deepcopy(case))  # what an answer does to it stays there
        assert settings is not None, f"{case.about}: it returned None"
        chosen.append(due(settings))
        _of_choice(case, settings)
    if runs_for_real:
        _run(CASES[0], chosen[0])


def _of_choice(case: Case, settings: Any) -> None:
    assert isinstance(settings, Settings), f"return Settings(...), not {settings!r}"
    samples = settings.micro_batch * settings.num_micro_batches
    assert samples == case.global_batch, (
        f"{case.about}: {settings.micro_batch} x {settings.num_micro_batches} samples are {samples}"
        f", and the global batch is {case.global_batch}: another batch is another training"
    )
    assert settings.dtype in case.flops_per_s, f"{case.about}: no dtype {settings.dtype!r} here"
    kinds = ("none", "full")
    assert settings.activation_checkpointing in kinds, (
        f"{case.about}: activation_checkpointing={settings.activation_checkpointing!r}: none or "
        "full"
    )
    needs = peak_bytes(case, settings)
    assert fits(case, settings), (
        f"{case.about}: out of memory, it needs {needs / 2**20:,.0f} MiB and has "
        f"{case.room_bytes / 2**20:,.0f}"
    )
    quickest = step_s(case, best(case))
    own = step_s(case, settings)
    assert quickest / own >= NEARLY_BEST, (
        f"{case.about}: it fits, with {needs / 2**20:,.0f} of {case.room_bytes / 2**20:,.0f} MiB, "
        f"but a step takes {own / quickest:.2f} times as long as it has to{_why(case, settings)}"
    )


def _why(case: Case, settings: Settings) -> str:
    """What has probably been left out: the settings are the best ones without it."""
    fitting = [one for one in candidates(case) if fits(case, one)]

    def launches_free(one: Settings) -> float:
        return step_s(case, one) - one.num_micro_batches * case.launch_s

    def checkpointing_free(one: Settings) -> float:
        return step_s(case, replace(one, activation_checkpointing="none"))

    def one_micro_batch(one: Settings) -> float:
        return step_s(case, one) / one.num_micro_batches

    asked = []
    for seconds, question in (
        (launches_free, "what does each micro-batch cost beyond its products?"),
        (checkpointing_free, "what does checkpointing cost?"),
        (one_micro_batch, "is your time that of a whole step?"),
    ):
        least = min(map(seconds, fitting))
        if math.isclose(seconds(settings), least, rel_tol=1e-9):
            asked.append(question)
    return ": " + " Or ".join(asked) if asked else ""


def _run(case: Case, settings: Settings) -> None:
    outcome = train_within(case.model, settings, case.room_bytes)
    last = outcome.log.strip().splitlines()[-1] if outcome.log.strip() else ""
    assert outcome.fits, f"{case.about}: in a process with this limit it fails: {last[-200:]}"


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
