"""Checks of lesson 16, making it fit."""

import contextlib
import copy
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from course.answer import Exercise, Hint, due
from course.exercises.expect import TOLERANCE, diagnose, distance, refuse, tensor, times
from course.exercises.in_notebook import LOOP, bounded, without
from course.labs.l16_limited import Settings, train_within
from course.labs.l16_plan import CASES, Case, best, candidates, fits, peak_bytes, step_s
from labcode.measure.steps import allocated_bytes
from labcode.models.layers import Block
from labcode.perf.saved_bytes import saved_bytes

# ---- 16.1

CHANGES = {
    "with a peak in its middle": [
        *(("parameters", 100), ("temporary", 80), ("activations", 300), ("temporary", -80)),
        *(("activations", 200), ("gradients", 40), ("temporary", 60), ("temporary", -60)),
        *(("gradients", 50), ("activations", -500), ("gradients", 30)),
    ],
    "that has its peak at its end": [
        *(("parameters", 40), ("activations", 30), ("activations", -30), ("gradients", 35)),
    ],
    "of two micro-batches": [
        *(("parameters", 50), ("activations", 70), ("activations", -70), ("gradients", 45)),
        *(("activations", 70), ("temporary", 10), ("activations", -70), ("temporary", -10)),
    ],
}


def at_peak(answer: Callable[..., Any]) -> None:
    """The learner's `at_peak(changes)`: {purpose: bytes} when their sum is largest."""
    for name, changes in CHANGES.items():
        found = due(answer(list(changes)))
        case = f"a list {name}: "
        if not isinstance(found, Mapping):
            raise Hint(f"{case}return a dict, {{purpose: bytes}}, not {found!r}")
        _check_at_peak(case, changes, {key: value for key, value in found.items() if value})


def _check_at_peak(case: str, changes: list[tuple[str, int]], found: dict[str, Any]) -> None:
    now: Counter[str] = Counter()
    taken: Counter[str] = Counter()
    moments = []
    for purpose, num_bytes in changes:
        now[purpose] += num_bytes
        taken[purpose] += max(num_bytes, 0)
        moments.append({key: value for key, value in now.items() if value})
    sums = [_sum(moment) for moment in moments]
    place = sums.index(max(sums))
    if found == moments[place]:
        return
    alone: Counter[str] = Counter()
    for moment in moments:
        alone |= Counter(moment)  # the larger of the two, for each purpose
    expected = f"in all there are {sums[place]} bytes at the peak"
    mistakes = {
        "this is what is there at its end. Is what you keep of the peak a copy, or is it changed "
        "by the entries that follow?": found == moments[-1],
        "this is the most of each purpose by itself, and they do not have their most at the same "
        f"time: {expected}": found == dict(alone),
        f"this is all that was ever taken, and what was given back is gone: {expected}": (
            found == dict(taken)
        ),
        f"the last entry counts as well: {expected}": (
            found == max(moments[:-1], key=_sum) and place == len(moments) - 1
        ),
        f"there is no purpose {next(iter(set(found) - set(taken)), None)!r} in it": bool(
            set(found) - set(taken)
        ),
    }
    refuse(mistakes, case)
    raise Hint(f"{case}you have {found}, and {expected}: what is there at that moment?")


def _sum(moment: dict[str, int]) -> int:
    return sum(moment.values())


# ---- 16.2

NUM_TOKENS = 22
VOCABULARY = 40


def loss_in_chunks(answer: Any) -> None:
    """The learner's `LossInChunks`, applied as `apply(hidden, weight, targets, num_chunks)`."""
    due(answer)
    for num_chunks in (1, 2, 4, 22):
        for factor in (1.0, 3.0):
            _check_plain_loss(answer, num_chunks, factor)
    for num_chunks in (16, 32):
        _check_chunk_bytes(answer, num_chunks)


def _inputs(num_tokens: int, vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, 6, generator=generator, dtype=dtype)
    weight = torch.randn(vocabulary, 6, generator=generator, dtype=dtype)
    targets = torch.randint(vocabulary, (num_tokens,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def _check_plain_loss(answer: Any, num_chunks: int, factor: float) -> None:
    hidden, weight, targets = _inputs(NUM_TOKENS, VOCABULARY, torch.float64)
    plain = nn.functional.cross_entropy(hidden @ weight.T, targets)
    (factor * plain).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    truths = {"hidden": hidden.grad, "weight": weight.grad}
    hidden.grad = None
    weight.grad = None
    loss = due(answer.apply(hidden, weight, targets, num_chunks))
    case = f"{NUM_TOKENS} tokens in {num_chunks} chunk{'s' if num_chunks > 1 else ''}: "
    tensor(loss, (), f"{case}forward returned")
    mistakes: dict[str, Any] = {
        "the loss is that of all tokens added up: it has to be their mean": NUM_TOKENS * plain,
        f"the loss is {num_chunks} times the mean over all tokens": num_chunks * plain,
    }
    question = "does each chunk add to it, and by what is the sum divided?"
    if NUM_TOKENS % num_chunks:
        question = "the last chunk is shorter, so chunks do not count alike"
    otherwise = f"the loss is {plain.item():.4f}, and yours is {loss.item():.4f}: {question}"
    diagnose(case, loss, plain, mistakes, otherwise)
    if not loss.requires_grad:
        raise Hint("the loss has no history: is it the result of LossInChunks.apply?")
    try:
        (factor * loss).backward()
    except RuntimeError as error:
        hint = "a gradient has another shape: does backward return them in forward's order?"
        refuse({hint: "invalid gradient at index" in str(error)})
        raise
    if factor != 1:
        case = f"with {factor:g} times the loss, "
    for name, truth in truths.items():
        found = hidden.grad if name == "hidden" else weight.grad
        what = f"{case}the gradient of `{name}` is "
        if found is None:
            raise Hint(f"{what}missing: in which order does backward return them?")
        refuse({f"[{', '.join(map(str, found.shape))}]": found.shape != truth.shape}, what)
        mistakes = {
            "that of the loss itself: what does backward get as `grad`?": truth / factor,
            "{times:.3g} times as large as it should be": times(truth),
        }
        otherwise = (
            "wrong: is the softmax less 1 at the target, and does each chunk add to the gradient "
            "of the weight?"
        )
        diagnose(what, found, truth, mistakes, otherwise)


def _check_chunk_bytes(answer: Any, num_chunks: int) -> None:
    """No tensor is as large as all logits, and the tensors of one chunk are gone with the next."""
    num_tokens = 1024
    vocabulary = 512
    hidden, weight, targets = _inputs(num_tokens, vocabulary, torch.float32)
    largest = _Largest()

    def work() -> None:
        answer.apply(hidden, weight, targets, num_chunks).backward()

    with largest:
        work()
    of_a_chunk = 4 * num_tokens * vocabulary // num_chunks
    rows = num_tokens // num_chunks
    shape = ", ".join(map(str, largest.shape))
    mistakes = {
        f"with {num_chunks} chunks of {rows} rows there was a tensor of the shape [{shape}]; the "
        f"logits of a chunk are [{rows}, {vocabulary}]": largest.size > 1.1 * rows * vocabulary,
    }
    refuse(mistakes)
    peak = allocated_bytes(work, torch.device("cpu")).peak
    ends = 3 * (hidden.nbytes + weight.nbytes)
    at_once = (peak - ends) / of_a_chunk
    kept = (
        f"{at_once:.0f} tensors as large as the logits of a chunk exist at once: what keeps those "
        "of the chunks before?"
    )
    refuse({kept: at_once > 8})


class _Largest(TorchDispatchMode):
    """The tensor with the most numbers that an operation has made."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0
        self.shape: tuple[int, ...] = ()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.numel() > self.size:
                self.size = leaf.numel()
                self.shape = tuple(leaf.shape)
        return result


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
        _check_runs_twice(case, own, plain)
        _check_gradients(case, own, plain, dropout)
        refuse({MOVED: not torch.equal(own.drawn, plain.drawn)}, case)
    _check_tokens(answer)
    _check_kept_bytes(answer)
    _check_sum(answer)


def _run_plainly(block: Callable[..., Any], *inputs: Tensor) -> Any:
    return block(*inputs)


def _trial(run: Callable[..., Any], dropout: float, first: bool, second: bool) -> _Trial:
    block = _Block(dropout)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, 6, generator=generator, dtype=torch.float64, requires_grad=first)
    scale = torch.randn(6, generator=generator, dtype=torch.float64, requires_grad=second)
    torch.manual_seed(7)
    torch.rand(2)  # so that the seed alone does not tell the state of the generator
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
    "different than None at position": (
        "backward returns one gradient for each argument of forward but `ctx`, in their order: the "
        "block is the first of them, and it has none"
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


def _check_runs_twice(case: str, own: _Trial, plain: _Trial) -> None:
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


def _check_gradients(case: str, own: _Trial, plain: _Trial, dropout: float) -> None:
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


def _check_tokens(answer: Any) -> None:
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


def _check_kept_bytes(answer: Any) -> None:
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


def _check_sum(answer: Any) -> None:
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

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default)
NUM_LAYERS = 2
WIDTH = 48
KEPT = 10  # numbers for each token and feature of a layer: its input, 3, 1, 1 and 4
SAVES = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
CHEAP = (
    "the output of {names} is kept, {kept:.0f} numbers in all for each token and feature, and "
    "{expected} are enough: what takes few FLOPs is cheap to compute again"
)


class _Step(NamedTuple):
    """Forward and backward of some layers.

    Args:
        ran: How often each expensive operation ran, by what it is called in a hint.
        kept: After forward, in numbers for each token and feature of a layer.
        answers: What the policy said: {operation: its answers}.
    """

    ran: Counter[str]
    kept: float
    answers: dict[Any, list[Any]]


def policy(answer: Callable[..., Any]) -> None:
    """The learner's `policy(ctx, op, *args, **kwargs)` for selective checkpointing."""
    due(answer)
    cases = {f"in layers of {WIDTH} features, ": True, "in layers without biases, ": False}
    for case, bias in cases.items():
        plain = _step(None, bias)
        own = _step(answer, bias)
        for op, values in own.answers.items():
            _check_policy(f"{case}for {op}: ", values)
        twice = own.ran - plain.ran
        for name in twice:
            raise Hint(f"{case}{name} runs again in backward: is its output kept?")
        _check_ten_kept(case, own)


def _check_policy(case: str, values: list[Any]) -> None:
    for value in values:
        if not isinstance(due(value), CheckpointPolicy | bool):
            raise Hint(f"{case}it returned {value!r}, expected is one of CheckpointPolicy's")


def _check_ten_kept(case: str, own: _Step) -> None:
    if own.kept < KEPT + 0.5:
        return
    saved = []
    for op, values in own.answers.items():
        is_saved = any(value in (True, *SAVES) for value in values)
        if is_saved and not op.is_view and not _is_expensive(op):
            saved.append(str(op))
    if saved:
        names = ", ".join(saved)
        raise Hint(case + CHEAP.format(names=names, kept=own.kept, expected=KEPT))
    raise Hint(
        f"{case}{own.kept:.0f} numbers are kept for each token and feature, and {KEPT} are enough: "
        "of which product does nothing in backward need the output?"
    )


def _step(answer: Callable[..., Any] | None, bias: bool) -> _Step:
    """Run it, under the policy or without checkpointing."""
    torch.manual_seed(0)
    layers = [Block(WIDTH, 3, 4 * WIDTH, causal=True) for _ in range(NUM_LAYERS)]
    for layer in layers:
        for module in layer.modules():
            if isinstance(module, nn.Linear) and not bias:
                module.register_parameter("bias", None)
    x = torch.randn(2, 32, WIDTH, requires_grad=True)
    answers: dict[Any, list[Any]] = {}

    def asked(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        assert answer is not None
        try:
            value = answer(ctx, op, *args, **kwargs)
        except IndexError as error:
            raise Hint(
                f"for {op}, which has {len(args)} arguments, the policy asks for one more"
            ) from error
        answers.setdefault(op, []).append(value)
        return value

    def work() -> Tensor:
        hidden = x
        for layer in layers:
            if answer is None:
                hidden = layer(hidden)
            else:
                contexts = partial(create_selective_checkpoint_contexts, asked)
                hidden = torch_checkpoint.checkpoint(
                    layer, hidden, use_reentrant=False, context_fn=contexts
                )
        return hidden

    ran = _Expensive()
    with ran:
        work().sum().backward()
    outputs = []
    left = allocated_bytes(lambda: outputs.append(work()), torch.device("cpu")).left
    return _Step(ran.counted, left / (NUM_LAYERS * x.nbytes), answers)


def _is_expensive(op: Any) -> bool:
    return op in PRODUCTS or "attention" in str(op)


class _Expensive(TorchDispatchMode):
    """Counts the products, by the shape of their last factor, and the kernels of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS:
            name = str(func.overloadpacket).removeprefix("aten.")
            self.counted[f"`{name}` with a weight of {list(args[-1].shape)}"] += 1
        elif "attention" in str(func):
            self.counted["attention"] += 1
        return func(*args, **(kwargs or {}))


# ---- 16.5

NO_REFERENCE = (
    "{left:,} bytes of activations are still in memory when forward has ended: what keeps a "
    "tensor alive? `pack` returns a path, and self keeps no tensor"
)


class _Half(nn.Module):
    """Saves one tensor for two operations, a part of a larger tensor, and a mask."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.up = nn.Parameter(torch.randn(8, 32, generator=generator, dtype=torch.float64))
        self.down = nn.Parameter(torch.randn(16, 8, generator=generator, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        left, right = (x @ self.up).chunk(2, dim=-1)
        gated = torch.tanh(left) * right
        kept = torch.where(gated > 0, gated, 0.1 * gated)
        return (kept * kept) @ self.down


def offloading(answer: Any) -> None:
    """The learner's `Offload(folder, stays)`, whose `pack` and `unpack` are hooks of autograd."""
    due(answer)
    model = _Half()
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}

    def stays(tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in weights

    (model(x) ** 2).mean().backward()
    plain = _grads_of(model)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        hooks = answer(folder, stays)
        _check_one_moved(hooks, folder, model)
        for case in ("", "in the second step: "):
            _check_step_moved(case, hooks, folder, model, x)
            for weight, (found, expected) in zip(("up", "down"), zip(_grads_of(model), plain)):
                about = f"{case}the gradient of `{weight}` is "
                otherwise = "wrong: does each tensor have a file of its own, and is it read back?"
                diagnose(about, found, expected, {}, otherwise)


def _grads_of(model: nn.Module) -> list[Any]:
    found = [weight.grad for weight in model.parameters()]
    model.zero_grad(set_to_none=True)
    return found


def _check_one_moved(hooks: Any, folder: Path, model: nn.Module) -> None:
    """A weight stays, and parts of a tensor go to files and come back."""
    weight = next(model.parameters()).detach().t()
    given = due(hooks.pack(weight))
    refuse({"`pack` wrote a weight into a file: does `stays` decide?": any(folder.rglob("*"))})
    try:
        back = hooks.unpack(given)
    except (AttributeError, TypeError) as error:
        raise Hint("`unpack` fails for a weight, which `pack` has returned as it is") from error
    refuse({"`unpack` returned something else for a weight": back is not weight})
    whole = torch.arange(40_000, dtype=torch.float32).view(200, 200)
    for part in (whole[:, 3:7], whole[3:7]):
        _check_part_moved(hooks, folder, part)


def _check_part_moved(hooks: Any, folder: Path, part: Tensor) -> None:
    """Columns or rows of a larger tensor, which go to a file alone and come back."""
    kept = due(hooks.pack(part))
    files = list(folder.rglob("*"))
    num_bytes = sum(file.stat().st_size for file in files)
    held = [leaf for leaf in tree_leaves(kept) if isinstance(leaf, Tensor)]
    mistakes = {
        "`pack` returned a tensor that should have gone to a file": bool(held),
        "`pack` wrote no file into self.folder": not files,
        f"`pack` wrote {num_bytes:,} bytes for a tensor of {part.nbytes:,}: it is a part of a "
        "larger one, and all of that was written": num_bytes > part.nbytes + 16_000,
    }
    refuse(mistakes)
    back = hooks.unpack(kept)
    tensor(back, part.shape, "`unpack` returned")
    mistakes = {
        f"`unpack` returned {back.dtype}, the tensor had {part.dtype}": back.dtype != part.dtype,
        "`unpack` returned other numbers": not torch.equal(back, part),
        "the file is still there after `unpack`": any(folder.rglob("*")),
    }
    refuse(mistakes)


def _check_step_moved(case: str, hooks: Any, folder: Path, model: nn.Module, x: Tensor) -> None:
    losses = []

    def forward() -> None:
        with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
            losses.append((model(x) ** 2).mean())

    left = allocated_bytes(forward, torch.device("cpu")).left
    # the loss itself, and constants of some bytes
    refuse({NO_REFERENCE.format(left=left): left > 4096}, case)
    try:
        losses[0].backward()
    except FileNotFoundError as error:
        raise Hint(
            f"{case}a file is gone when backward asks for it: does each tensor have a file of its "
            "own?"
        ) from error
    num_files = len(list(folder.rglob("*")))
    refuse({f"{num_files} files are left after backward": num_files > 0}, case)


# ---- 16.6

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
        _check_good(case, settings)
    if runs_for_real:
        _check_fits_for_real(CASES[0], chosen[0])


def _check_good(case: Case, settings: Any) -> None:
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


def _check_fits_for_real(case: Case, settings: Settings) -> None:
    outcome = train_within(case.model, settings, case.room_bytes)
    last = outcome.log.strip().rpartition("\n")[2]
    fails = f"{case.about}: in a process with this limit it fails: {last[-200:]}"
    refuse({fails: not outcome.fits})


EXERCISES = {
    "16.1": Exercise(
        check=at_peak,
        praise="what is there at the moment when most is there",
        hints=(
            "Go through the list with a dict of what is there now. Each entry changes one purpose.",
            "Whenever the sum is larger than ever before, keep what is there: "
            "as a copy, because the dict goes on changing.",
        ),
    ),
    "16.2": Exercise(
        check=loss_in_chunks,
        praise="the loss and both gradients of the whole, and one chunk of logits at a time",
        hints=(
            "Of each chunk you need: its logits, its share of the loss, the gradient of its "
            "logits, and from that the gradients of its rows and of the weight.",
            "The gradient of the logits is their softmax, less 1 at the target of each row, "
            "divided by the number of all tokens.",
            "The chain rule goes on in backward: the gradient of the loss is one number, by which "
            "what you have kept is multiplied.",
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
        check=policy,
        praise="10 numbers of a layer are kept, and no product is computed twice",
        hints=(
            "Which of a layer's operations take many FLOPs? Of these the output is kept, of all "
            "others it is not.",
            "Which product comes last in a layer? What tells the shape of its weight from those "
            "of the other three?",
        ),
    ),
    "16.5": Exercise(
        check=offloading,
        praise="nothing but weights is left in memory, and the gradients are the same",
        hints=(
            "What does `unpack` need, to find the tensor again? That is what `pack` returns.",
            "A name of its own: count the files that you have written.",
            "In `unpack` you get either a weight or a path: isinstance tells them apart.",
        ),
    ),
    "16.6": Exercise(
        check=choose,
        praise="it fits, it keeps the global batch, and nothing that fits is much faster",
        hints=(
            "Go through all divisors of the global batch, both dtypes, and both kinds of "
            "checkpointing: a list of all settings first.",
            "Throw out what does not fit, then take the one with the shortest step.",
        ),
    ),
}
