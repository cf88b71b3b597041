"""Checks of lessons 03 and 03b, one device."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.adam import adam as adam_of_torch
from torch.optim.adamw import adamw as adamw_of_torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from course.answer import Exercise, Hint, due
from course.exercises.expect import Table, diagnose, distance, refuse, tensor
from course.exercises.in_notebook import bounded, without
from course.exercises.memory import tensors_in
from course.labs import l03_race
from course.labs.l03_race import Settings
from course.labs.l03_step import operations
from labcode.config import GPTConfig
from labcode.models.gpt import GPT

# ---- 3.1

# tokens, inputs, outputs, bytes of a number
LAYERS = ((1, 6, 10, 4), (5, 8, 3, 2), (64, 512, 2048, 4))
# inputs, outputs, bytes of a number, FLOP/s, bytes/s, the least number of tokens
WIDE = (
    (8192, 8192, 2, 8e14, 2.5e12, 348),
    (4096, 4096, 4, 1e11, 4e10, 6),
    (1024, 256, 4, 1e11, 4e10, 6),
    (1024, 1024, 4, 1e11, 4.4e8, 4051),  # more tokens than features
)
NARROW = (16, 16, 4, 1e11, 1e9)  # x and the result alone keep the memory busy


def roofline(
    layer: Callable[..., Any], shortest: Callable[..., Any], ridge: Callable[..., Any]
) -> None:
    """The learner's `linear_layer`, `shortest_s` and `tokens_at_the_ridge`."""
    for case in LAYERS:
        _check_linear_layer(layer, *case)
    for flops, num_bytes in ((8e9, 1e9), (1e9, 8e9)):
        _check_shortest(shortest, flops, num_bytes)
    for *device, truth in WIDE:
        _check_at_the_ridge(ridge, tuple(device), truth)
    hint = (
        "10,000 tokens are far enough for a search; what does it return if none of them was enough?"
    )
    found = bounded(hint, ridge, *NARROW)
    hint = (
        f"tokens_at_the_ridge{NARROW} is {found}: each further token brings more seconds of bytes "
        "than of FLOPs there, so no number of tokens is enough"
    )
    refuse({hint: found is not None})


def _check_linear_layer(
    answer: Callable[..., Any], tokens: int, inputs: int, outputs: int, width: int
) -> None:
    found = due(answer(tokens, inputs, outputs, width))
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise Hint(f"linear_layer returned {found!r}: give two numbers, FLOPs and bytes")
    flops, num_bytes = found
    case = f"linear_layer({tokens}, {inputs}, {outputs}, {width}): "
    products = tokens * inputs * outputs
    mistakes = {
        "these are the multiplications; who counts the additions?": 1.0 * products,
        "that is a step with backward; here is forward alone": 6.0 * products,
    }
    otherwise = f"the FLOPs are {flops}, expected are {2 * products}"
    diagnose(case, float(flops), float(2 * products), mistakes, otherwise)
    x = float(tokens * inputs)
    weight = float(inputs * outputs)
    out = float(tokens * outputs)
    numbers = x + weight + out
    mistakes = {
        "these are numbers, not bytes": numbers,
        "the result has to be written as well": (x + weight) * width,
        "x has to be read as well": (weight + out) * width,
        "W has to be read once, for all tokens together": (x + tokens * weight + out) * width,
        "these are the bytes of W alone": weight * width,
    }
    otherwise = f"the bytes are {num_bytes}, expected are {numbers * width:.0f}"
    diagnose(case, float(num_bytes), float(numbers * width), mistakes, otherwise)


def _check_shortest(answer: Callable[..., Any], flops: float, num_bytes: float) -> None:
    rate = 2e9
    bandwidth = 1e9
    found = float(due(answer(flops, num_bytes, rate, bandwidth)))
    compute_s = flops / rate
    memory_s = num_bytes / bandwidth
    mistakes = {
        "both happen at the same time, so they do not add up": compute_s + memory_s,
        "the device is ready when the slower of the two is": min(compute_s, memory_s),
        "a quotient the other way round has no seconds": rate / flops,
    }
    case = f"shortest_s({flops:g}, {num_bytes:g}, {rate:g}, {bandwidth:g}): "
    truth = max(compute_s, memory_s)
    diagnose(case, found, truth, mistakes, f"it is {found:g} s, expected is {truth:g} s")


def _check_at_the_ridge(answer: Callable[..., Any], device: tuple[Any, ...], truth: int) -> None:
    found = bounded("does the search come to an end?", answer, *device)
    case = f"tokens_at_the_ridge{device}: "
    refuse({"it is None, and with enough tokens arithmetic takes longer": found is None}, case)
    *_, width, rate, bandwidth = device
    of_weights_alone = math.ceil(width * rate / bandwidth / 2)
    without_x = "2 T / w leaves out the bytes of x and of the result, which grow with the tokens"
    mistakes = {
        "one token less is too few: is it rounded down?": truth - 1.0,
        "one token less is enough as well": truth + 1.0,
        without_x: found in (of_weights_alone, of_weights_alone + 1),
    }
    is_whole = float(found) == int(found)
    refuse({f"it is {found}: give a whole number": not is_whole}, case)
    diagnose(case, float(found), float(truth), mistakes, f"it is {found}, expected is {truth}")


# ---- 3.2

MODELS = ((1, 64, 48), (5, 128, 512), (7, 256, 96))  # layers, width, tokens
PEAK_FLOPS_PER_S = 312e12


def transformer_flops(forward: Callable[..., Any], mfu: Callable[..., Any]) -> None:
    """The learner's `flops_of_forward` and `mfu_of_run`; the truth is counted in a GPT."""
    for shape in MODELS:
        _check_forward_flops(forward, shape)
    with_weights, in_attention = _count_forward(*MODELS[1])
    found = float(due(mfu(with_weights, in_attention, 50.0, PEAK_FLOPS_PER_S)))
    of_both = (with_weights + in_attention) * 50.0 / PEAK_FLOPS_PER_S
    mistakes = {
        "that is forward alone: backward takes twice as many FLOPs as forward": of_both,
        "that is backward alone": 2 * of_both,
        "the core of attention is arithmetic that the model needs, too": (
            3 * with_weights * 50.0 / PEAK_FLOPS_PER_S
        ),
        "that is in percent: give a fraction of 1": 300 * of_both,
        "it is the other way round: what the model needs, divided by what the device could do": (
            1 / (3 * of_both)
        ),
    }
    otherwise = f"it is {found:.3g}, expected is {3 * of_both:.3g}"
    diagnose("mfu_of_run at 50 samples/s: ", found, 3 * of_both, mistakes, otherwise)


def _count_forward(num_layers: int, width: int, tokens: int) -> tuple[int, int]:
    """FLOPs of the blocks of a GPT on the meta device: with weights, and in attention."""
    config = GPTConfig(
        vocab_size=16,
        context_length=tokens,
        num_layers=num_layers,
        num_heads=4,
        hidden_size=width,
    )
    with torch.device("meta"):
        blocks = GPT(config).blocks
        x = torch.empty(1, tokens, width)
    with FlopCounterMode(display=False) as counter:
        for block in blocks:
            x = block(x)
    with_weights = 0
    for operation, flops in counter.get_flop_counts()["Global"].items():
        if operation in (torch.ops.aten.addmm, torch.ops.aten.mm):
            with_weights += flops
    return with_weights, counter.get_total_flops() - with_weights


def _check_forward_flops(answer: Callable[..., Any], shape: tuple[int, int, int]) -> None:
    found = due(answer(*shape))
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise Hint(
            f"flops_of_forward returned {found!r}: give two numbers, of weights and attention"
        )
    num_layers, _, tokens = shape
    with_weights, in_attention = (float(flops) for flops in _count_forward(*shape))
    case = f"flops_of_forward{shape}: "
    of_token = with_weights / tokens
    mistakes = {
        "the FLOPs with weights are those of one token: a sample has many": of_token,
        "these are the multiplications; who counts the additions?": with_weights / 2,
        "that is one layer": with_weights / num_layers,
        "that is a step with backward; here is forward alone": 3 * with_weights,
        "where is the MLP, with its 4 h and back?": with_weights / 3,
        "where is the attention, with its four weights?": with_weights * 2 / 3,
        "the MLP has two weights, each of h × 4h": with_weights * 2 / 3,
    }
    otherwise = f"with weights it is {found[0]:g}, a GPT of this size counts {with_weights:g}"
    diagnose(case, float(found[0]), with_weights, mistakes, otherwise)
    mistakes = {
        "attention has two products, scores and the sum of values, and this is one of them": (
            in_attention / 2
        ),
        "that is one token's attention: each of the s tokens meets s tokens": (
            in_attention / tokens
        ),
        "these are the multiplications in attention; who counts the additions?": in_attention / 2,
        "that is the attention of one layer": in_attention / num_layers,
    }
    otherwise = f"in attention it is {found[1]:g}, a GPT of this size counts {in_attention:g}"
    diagnose(case, float(found[1]), in_attention, mistakes, otherwise)


# ---- 3.3


class Head(NamedTuple):
    """A case: queries, keys, keys in a block, features of a key and of a value, and its scores."""

    queries: int
    keys: int
    block: int
    width: int
    value_width: int
    first: float = 0.0  # about the score of the first key
    last: float = 0.0  # and of the last one; those between lie on a line
    turned: bool = False  # every second query has scores of the other sign

    def __str__(self) -> str:
        scores = f", scores from {self.first:g} to {self.last:g}"
        told = scores if self.first or self.last else ""
        return f"with {self.queries} queries, {self.keys} keys and blocks of {self.block}{told}: "


LARGE_SCORES = Head(6, 9, 2, 4, 4, first=1000.0, last=1000.0)
SMALL_SCORES = Head(6, 9, 2, 4, 4, first=-1000.0, last=-1000.0)
RISING = Head(6, 9, 2, 4, 4, last=2000.0)
FALLING = Head(6, 9, 2, 4, 4, first=2000.0)
TURNED = Head(6, 9, 2, 4, 4, first=1000.0, last=1000.0, turned=True)
HEADS = (
    Head(5, 12, 4, 6, 6),
    Head(7, 10, 3, 4, 5),  # the last block is shorter, and a value wider than a key
    Head(4, 6, 8, 4, 4),  # one block is enough
    LARGE_SCORES,
    SMALL_SCORES,
    RISING,
    FALLING,
    TURNED,
)
LONG = Head(16, 512, 4, 2, 2)  # the table has 8,192 numbers, and k and v have 1,024 each
NOT_FINITE = {  # what is asked where the result has inf or nan
    LARGE_SCORES: "exp(1000) is too large for a float64. What is subtracted from the scores first?",
    SMALL_SCORES: "exp(-1000) is 0, and so is the denominator. With which number does the largest "
    "score begin?",
    RISING: "later blocks have larger scores than the first one. Is what you subtract still the "
    "largest so far?",
    FALLING: "later blocks have smaller scores than the first one. Is what you subtract the "
    "largest so far, or that of the block?",
    TURNED: "one query has scores of 1000, and the next of -1000. Does each have a largest score "
    "of its own?",
}
ORDINARY = (
    "with ordinary scores already: before the first block the largest score is -inf. Is the factor "
    "0 then, or infinite?"
)


def _operands(head: Head) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v; v is a slice of a wider tensor, as it is after a common projection."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(head.queries, head.width, generator=generator, dtype=torch.float64)
    k = torch.randn(head.keys, head.width, generator=generator, dtype=torch.float64)
    v = torch.randn(head.keys, 2 * head.value_width, generator=generator, dtype=torch.float64)
    if head.first or head.last:  # one feature gives the scores, and the others tell them apart
        q[:, 0] = 1.0
        k[:, 0] += torch.linspace(head.first, head.last, head.keys) * math.sqrt(head.width)
    if head.turned:
        q[::2] *= -1
    return q, k, v[:, : head.value_width]


Mistake = Literal[
    "",
    "numerator kept",
    "denominator kept",
    "both kept",
    "factor after adding",
    "divided in each block",
    "not divided",
]


def blockwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block: int,
    mistake: Mistake = "",
    *,
    scale: float | None = None,
    num_keys: int | None = None,
) -> Tensor:
    """Attention by running sums, right or with a mistake.

    Args:
        q: [queries, width].
        k: [keys, width].
        v: [keys, value width].
        block: Keys at a time.
        mistake: One of the mistakes that people make with the sums; "" is right.
        scale: Scale of the scores; None: 1/sqrt(width).
        num_keys: Number of keys that are seen; None: all.

    Source: Dao et al. 2022 (arXiv:2205.14135), algorithm 1.
    Held by: tests/unit/test_l03_labs.py
    """
    largest = q.new_full((len(q), 1), -math.inf)
    denominator = q.new_zeros(len(q), 1)
    numerator = q.new_zeros(len(q), v.shape[1])
    for start in range(0, len(k) if num_keys is None else num_keys, block):
        scores = q @ k[start : start + block].T * (scale or 1 / math.sqrt(q.shape[1]))
        now = torch.maximum(largest, scores.amax(dim=1, keepdim=True))
        weights = torch.exp(scores - now)
        factor = torch.exp(largest - now)
        largest = now
        if mistake == "factor after adding":
            denominator = (denominator + weights.sum(dim=1, keepdim=True)) * factor
            numerator = (numerator + weights @ v[start : start + block]) * factor
            continue
        if mistake not in ("denominator kept", "both kept"):
            denominator = denominator * factor
        if mistake not in ("numerator kept", "both kept"):
            numerator = numerator * factor
        denominator = denominator + weights.sum(dim=1, keepdim=True)
        numerator = numerator + weights @ v[start : start + block]
        if mistake == "divided in each block":
            numerator = numerator / denominator
    is_divided = mistake in ("not divided", "divided in each block")
    return numerator if is_divided else numerator / denominator


def _softmax_of_each_block(q: Tensor, k: Tensor, v: Tensor, block: int) -> Tensor:
    """[blocks, queries, value width]: as if there were no other keys."""
    scores = [q @ part.T / math.sqrt(q.shape[1]) for part in k.split(block)]
    pairs = zip(scores, v.split(block), strict=True)
    return torch.stack([score.softmax(dim=1) @ part for score, part in pairs])


class _Memory(TorchDispatchMode):
    """What operations make: names, sizes, and how many numbers existed at a time, at most."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self.names: set[str] = set()
        self.sizes: set[int] = set()
        self._made: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for one in tensors_in((args, kwargs)):  # what was there before counts nothing
            self._made.setdefault(StorageWeakRef(one.untyped_storage()), 0)
        result = func(*args, **(kwargs or {}))
        self.names.add(str(func))
        for one in tensors_in(result):
            storage = one.untyped_storage()
            num_numbers = storage.nbytes() // one.element_size()
            self._made.setdefault(StorageWeakRef(storage), num_numbers)
            self.sizes.add(one.numel())
        alive = [size for piece, size in self._made.items() if not piece.expired()]
        self.most = max(self.most, sum(alive))
        return result


def attention(answer: Callable[..., Any]) -> None:
    """The learner's `attention_in_blocks(q, k, v, block)`."""
    for head in HEADS:
        _check_attention(answer, head)
    q, k, v = _operands(LONG)
    with _Memory() as memory:
        answer(q, k, v, LONG.block)
    table = LONG.queries * LONG.keys
    own = "scaled_dot_product_attention is PyTorch's own: write it with products, exp and sums"
    is_torchs = any("scaled_dot_product" in name for name in memory.names)
    whole = (
        f"with {LONG.queries} queries and {LONG.keys} keys, {memory.most:,} numbers that your code "
        f"has made were there at one time, and the table of all scores has {table:,}: which scores "
        "does the next block of keys still need?"
    )
    row = (
        f"something with {LONG.keys} numbers is made, as many as there are keys: that is a whole "
        f"row of the table. Take {LONG.block} keys at a time, as `block` says"
    )
    refuse({own: is_torchs, whole: memory.most > table // 2, row: LONG.keys in memory.sizes})


def _check_attention(answer: Callable[..., Any], head: Head) -> None:
    case = str(head)
    q, k, v = _operands(head)
    before = [operand.clone() for operand in (q, k, v)]
    found = due(bounded("does the loop over the blocks end?", answer, q, k, v, head.block))
    tensor(found, (head.queries, head.value_width))
    changed = any(not torch.equal(*pair) for pair in zip((q, k, v), before, strict=True))
    refuse({"q, k or v has changed: they belong to the caller": changed}, case)
    not_finite = f"the result has inf or nan, {NOT_FINITE.get(head, ORDINARY)}"
    refuse({not_finite: not bool(torch.isfinite(found).all())}, case)
    arguments = (q, k, v, head.block)
    of_blocks = _softmax_of_each_block(*arguments)
    whole_blocks = head.keys // head.block * head.block
    late = "a block with a larger score comes, and "
    mistakes: dict[str, Any] = {
        "the scores are not divided by the root of the features of a key": blockwise(
            *arguments, scale=1.0
        ),
        "the scores are divided by the features of a key, and not by their root": blockwise(
            *arguments, scale=1 / head.width
        ),
        f"{late}both sums so far were made with the old largest score: which factor sets them "
        "right?": blockwise(*arguments, "both kept"),
        f"{late}only the numerator is set right": blockwise(*arguments, "denominator kept"),
        f"{late}only the denominator is set right": blockwise(*arguments, "numerator kept"),
        "the factor is for what was summed before this block, and it meets the block as well: what "
        "comes first?": blockwise(*arguments, "factor after adding"),
        "each block divides: the numerator is divided once, when all keys are in it": blockwise(
            *arguments, "divided in each block"
        ),
        "the numerator is there: what is it divided by?": blockwise(*arguments, "not divided"),
        f"the last {head.keys - whole_blocks} keys are not there: the last block may be shorter": (
            blockwise(*arguments, num_keys=whole_blocks) if 0 < whole_blocks < head.keys else False
        ),
        "each block has a softmax of its own, and their mean is taken: a block with larger scores "
        "must weigh more": of_blocks.mean(dim=0),
        "each block has a softmax of its own, and they are added: the weights of a query must sum "
        "to 1 over all keys": of_blocks.sum(dim=0),
        "only the last block is there: are the sums carried on?": of_blocks[-1],
    }
    diagnose(case, found, blockwise(*arguments), mistakes)


# ---- 3.4

SHAPES = ((3, 4), (5,), (2, 2, 2), (1,))
LR = 0.02
BETA1 = 0.8
BETA2 = 0.9
EPS = 1e-3
DECAY = 0.3
SHRINK = 1 - LR * DECAY
IN_GRADIENT = (
    "the decay went into the gradient, as in Adam with L2: AdamW shrinks the weight itself, by the "
    "factor 1 - lr * decay"
)
NOT_EPS = f"all is right but eps: it was called with eps={EPS:g}, and the weights are those of eps"
MISTAKES: dict[str, dict[str, float]] = {  # what `plain_adamw` is given
    IN_GRADIENT: {"l2": DECAY, "shrink": 1},
    "the weights do not shrink: where is the decay?": {"shrink": 1},
    "the decay comes before the update, not after it": {"shrink": 1, "shrink_after": SHRINK},
    "the decay is multiplied by the learning rate: 1 - lr * decay": {"shrink": 1 - DECAY},
    "both averages begin at 0: where are they divided by 1 - beta**step?": {"of_1": 0, "of_2": 0},
    "`means` begins at 0: where is it divided by 1 - beta1**step?": {"of_1": 0},
    "`squares` begins at 0: where is it divided by 1 - beta2**step?": {"of_2": 0},
    "eps is added to the root, not under it": {"eps": 0, "eps_under": EPS},
    "eps is added to the root after that was corrected, not before": {"eps": 0, "eps_before": EPS},
    "under the root stands the corrected average: outside of it the correction is "
    "sqrt(1 - beta2**step)": {"power": 1},
    "the weights go uphill: look at the sign of the update": {"sign": 1},
    f"{NOT_EPS}=0. Where is it added?": {"eps": 0},
    f"{NOT_EPS}=1e-08. Where is it added?": {"eps": 1e-8},
}


def plain_adamw(
    num_steps: int,
    *,
    l2: float = 0.0,
    shrink: float = SHRINK,
    shrink_after: float = 1.0,
    of_1: float = BETA1,
    of_2: float = BETA2,
    eps: float = EPS,
    eps_under: float = 0.0,
    eps_before: float = 0.0,
    power: float = 0.5,
    sign: float = -1.0,
) -> dict[str, Tensor]:
    """The weights, means and squares after some steps, each in one row.

    Args:
        num_steps: Steps since the beginning.
        l2: Decay that goes into the gradient.
        shrink: Factor of the weights before the update.
        shrink_after: Factor of the weights after the update.
        of_1: Beta of the correction of the means; 0 corrects nothing.
        of_2: Beta of the correction of the squares; 0 corrects nothing.
        eps: Added to the corrected root.
        eps_under: Added to the corrected squares.
        eps_before: Added to the root that is not corrected.
        power: Exponent of the correction, which stands outside of the root.
        sign: Sign of the update.

    Source: Loshchilov and Hutter 2017 (arXiv:1711.05101), algorithm 2.
    Held by: tests/unit/test_l03_labs.py
    """
    weights, grads, means, squares = map(_row, _new_state().values())
    for step in range(1, num_steps + 1):
        used = grads + l2 * weights
        means = BETA1 * means + (1 - BETA1) * used
        squares = BETA2 * squares + (1 - BETA2) * used * used
        correction = 1 - of_2**step
        root = (squares + eps_under * correction).sqrt() + eps_before
        update = means / (1 - of_1**step) / (root / correction**power + eps)
        weights = shrink_after * (shrink * weights + sign * LR * update)
    return {"weights": weights, "means": means, "squares": squares}


def _new_state(repeats: int = 1) -> dict[str, list[Tensor]]:
    """What `adamw` is given, by name: lists of tensors, all of the same shapes."""
    generator = torch.Generator().manual_seed(0)
    state: dict[str, list[Tensor]] = {"weights": [], "grads": [], "means": [], "squares": []}
    for name, tensors in state.items():
        for shape in SHAPES * repeats:
            numbers = torch.zeros(shape, dtype=torch.float64)
            if name in ("weights", "grads"):
                numbers.normal_(generator=generator)
            tensors.append(numbers)
    return state


def _row(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def adamw(answer: Callable[..., Any]) -> None:
    """The learner's `adamw(weights, grads, means, squares, step, ...)`."""
    state = _new_state()
    with without(adam_of_torch, adamw_of_torch):
        for step in (1, 2, 3):
            _one_step(answer, state, step)
            _check_adamw(state, step)
    few, many = (_count(answer, repeats) for repeats in (1, 5))
    hint = (
        f"{len(SHAPES)} tensors take {few} operations, and {5 * len(SHAPES)} take {many}: each "
        "`torch._foreach_` operation takes a whole list, without a loop"
    )
    refuse({hint: few != many})


def _one_step(answer: Callable[..., Any], state: dict[str, list[Tensor]], step: int) -> None:
    answer(*state.values(), step, lr=LR, beta1=BETA1, beta2=BETA2, eps=EPS, decay=DECAY)


def _count(answer: Callable[..., Any], repeats: int) -> int:
    """Operations of one step."""
    state = _new_state(repeats)
    counted = operations(lambda: _one_step(answer, state, 1))
    hint = "a fused operation is PyTorch's whole step: write it with `torch._foreach_` operations"
    refuse({hint: any("fused" in name for name in counted)})
    return sum(counted.values())


def _check_adamw(state: dict[str, list[Tensor]], step: int) -> None:
    case = f"after step {step}: "
    found = {name: _row(tensors) for name, tensors in state.items()}
    truth = plain_adamw(step)
    before = plain_adamw(step - 1)
    hint = (
        "the gradients have changed: an operation with an underscore at the end of its name writes "
        "into its first argument"
    )
    refuse({hint: not torch.equal(found["grads"], _row(_new_state()["grads"]))}, case)
    mistakes = {hint: plain_adamw(step, **how)["weights"] for hint, how in MISTAKES.items()}
    refuse({IN_GRADIENT: mistakes[IN_GRADIENT]}, case, found["weights"])  # it changes all three
    swapped = (
        "lerp_(a, b, weight) goes from a by this part towards b: which weight keeps beta1 of a?"
    )
    overwritten = (
        "torch._foreach_sqrt_ writes the roots into `squares`: the next step needs the squares"
    )
    slips: dict[str, Table] = {}
    slips["means"] = {swapped: torch.lerp(before["means"], found["grads"], BETA1)}
    roots = truth["squares"].sqrt()
    corrected = roots / math.sqrt(1 - BETA2**step)
    as_roots = [distance(found["squares"], x) for x in (roots, corrected, corrected + EPS)]
    slips["squares"] = {overwritten: min(as_roots) < 1e-9}
    for name in ("means", "squares"):
        as_before = f"`{name}` are as before: they have to change in place"
        mistakes_of = {as_before: before[name], **slips[name]}
        otherwise = (
            f"the first of `{name}` begins with {found[name][0]:.6g}, expected is "
            f"{truth[name][0]:.6g}"
        )
        diagnose(case, found[name], truth[name], mistakes_of, otherwise)
    as_before = "the weights are as before: they have to change in place"
    mistakes = {as_before: before["weights"], **mistakes}
    otherwise = (
        f"the first weight is {found['weights'][0]:.6g}, expected is {truth['weights'][0]:.6g}"
    )
    diagnose(case, found["weights"], truth["weights"], mistakes, otherwise)


# ---- 3.5

LEAST_SPEEDUP = 3.0
LEAST_PART = 0.5  # of what can be saved with the same batch
NOISE = 0.05  # of the time of a step
WITHIN = 2.0


def race(
    settings: Any,
    predicted_speedup: Any,
    measure: Callable[[Settings], l03_race.Race] = l03_race.race,
) -> None:
    """The learner's settings and how many times as fast as the baseline they will be.

    Args:
        settings: Settings that the learner chose.
        predicted_speedup: The speed-up that the learner expects, a number or a tensor.
        measure: Compares settings with the baseline; the tests give one that needs no clock.
    """
    if not isinstance(settings, Settings):
        raise Hint(f"settings is {settings!r}: give l03_race.Settings(batch=..., dtype=..., ...)")
    expected = predicted_speedup
    if isinstance(expected, Tensor):
        expected = expected.tolist()
    if not isinstance(expected, int | float) or not expected > 0:
        raise Hint(f"predicted_speedup is {expected!r}: give a number such as 1.5")
    only_batch = replace(l03_race.BASELINE, batch=settings.batch)
    mistakes = {
        settings.fault: bool(settings.fault),
        "these are the settings of the baseline: change some": settings == l03_race.BASELINE,
        f"beside the batch of {settings.batch} these are the settings of the baseline: what makes "
        "a step quicker that has the same windows?": settings == only_batch,
    }
    refuse(mistakes)
    found = measure(settings)
    is_quickest = found.step_s <= (1 + NOISE) * found.least_s
    is_quick = is_quickest or found.saved >= LEAST_PART * found.can_be_saved
    saves = f"your step saves {found.saved:.0%} of the baseline's time"
    if found.saved < 0:
        saves = f"your step takes {-found.saved:.0%} longer than that of the baseline"
    mistakes = {
        f"the loss is still above {l03_race.TARGET} after {l03_race.MOST_STEPS} steps: these steps "
        "are quick, but there are too many of them": found.steps is None,
        f"with a batch of {settings.batch}, {saves} by the other three fields, and "
        f"{found.can_be_saved:.0%} can be saved on this processor: which of the three have you "
        "measured?": not is_quick,
        f"{found.speedup:.2f} times as fast as the baseline, and {LEAST_SPEEDUP} are asked for: it "
        f"takes {found.steps} steps where the baseline takes {found.baseline_steps}, each "
        f"{found.step_s / found.baseline_step_s:.2f} times as long. Which of the two is in the "
        "way?": found.speedup < LEAST_SPEEDUP,
        f"{found.speedup:.2f} times as fast as the baseline, fast enough; you expected "
        f"{expected:.3g}, which is off by more than a factor of {WITHIN:g}": not (
            1 / WITHIN <= found.speedup / expected <= WITHIN
        ),
    }
    refuse(mistakes)


EXERCISES = {
    "3.1": Exercise(
        check=roofline,
        praise="FLOPs, bytes, the slower of the two, and the tokens at which they change places",
        hints=(
            "each of the tokens * outputs results is a sum of `inputs` products; each operand is "
            "read once, and the result is written once",
            "write the seconds of the FLOPs and those of the bytes as functions of the tokens: "
            "both are straight lines. What is the slope of each?",
        ),
    ),
    "3.2": Exercise(
        check=transformer_flops,
        praise="products with weights, and attention, which grows with the square of the tokens",
        hints=(
            "a product of [T, a] and [a, b] takes 2 T a b FLOPs. Write down every product of a "
            "layer with its three sizes, those of attention as well",
            "over all heads together the scores are a product of [s, h] and [h, s]",
        ),
    ),
    "3.3": Exercise(
        check=attention,
        praise="softmax(q k^T / sqrt(d)) v, for scores of 1000 too, a block of them at a time",
        hints=(
            "write it for one block first: scores, their largest, weights, the two sums. What "
            "would a second block need from the first?",
            "with which numbers do the largest score and the two sums begin, so that the first "
            "block needs no case of its own?",
            "in which order: the new largest score, the factor, then both sums, then remember the "
            "new largest",
        ),
    ),
    "3.4": Exercise(
        check=adamw,
        praise="the weights of torch.optim.AdamW, with as many calls for 100 tensors as for one",
        hints=(
            "write it for one tensor first, in place: `mul_`, `lerp_`, `addcmul_`, `addcdiv_`; "
            "then put `torch._foreach_` before each name",
            "`torch._foreach_sqrt` without the last underscore gives a new list: which of the "
            "tensors must stay as they are?",
        ),
    ),
    "3.5": Exercise(
        check=race,
        praise="at the target in less than a third of the time, not by the batch alone, and you "
        "knew how much it would be",
        hints=(
            "a time is steps times seconds for a step. Which field changes which of the two?",
            "`l03_race.steps_to_target(settings)` and `l03_race.step_seconds(one, other)` tell "
            "you both",
        ),
    ),
}
