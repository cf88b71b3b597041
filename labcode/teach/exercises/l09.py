"""Checks of lesson 09, tensor parallelism. The text of each assertion is a hint."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from labcode.comm.counting import Call, counted, totals
from labcode.comm.grid import Grid
from labcode.config import GPTConfig
from labcode.models import layers
from labcode.models.gpt import GPT
from labcode.models.parallelize import parallelize
from labcode.pool.ranks import Ranks
from labcode.teach.check import Exercise, due
from labcode.topology import GridShape
from labcode.units import si

EXERCISES = {
    "9.1": Exercise("two mirror images, and nothing was overwritten"),
    "9.2": Exercise("42 and 41 columns, large logits too, and few bytes"),
    "9.3": Exercise("to the byte, in float32 and in bfloat16"),
    "9.4": Exercise("one sum each way, although x is used twice"),
}


def _relative_error(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


# ---- 9.1


@dataclass(frozen=True)
class _Applied:
    """What a Function did on one rank.

    Args:
        x, y: Input and output of forward, [2, 3].
        grad_y, grad_x: Input and output of backward, [2, 3]; grad_x is None if backward returned
            no gradient.
        x_kept, grad_y_kept: Whether forward and backward left their inputs unchanged.
    """

    x: Tensor
    y: Tensor
    grad_y: Tensor
    grad_x: Tensor | None
    x_kept: bool
    grad_y_kept: bool


def _apply(rank: int, function: type[torch.autograd.Function]) -> _Applied:
    """Run a Function forward and backward on this rank, on numbers that differ between ranks."""
    x = torch.arange(6.0).view(2, 3) + 10 * rank
    grad_y = torch.ones(2, 3) + rank
    x_before = x.clone()
    grad_y_before = grad_y.clone()
    x.requires_grad_()
    y = due(function.apply(x, dist.group.WORLD))
    (grad_x,) = torch.autograd.grad(y, x, grad_outputs=grad_y, allow_unused=True)
    return _Applied(
        x=x_before,
        y=y.detach(),
        grad_y=grad_y_before,
        grad_x=grad_x,
        x_kept=torch.equal(x.detach(), x_before),
        grad_y_kept=torch.equal(grad_y, grad_y_before),
    )


def copy_and_reduce(
    f: type[torch.autograd.Function], g: type[torch.autograd.Function], ranks: Ranks
) -> None:
    """The learner's Functions f (identity, then a sum) and g (a sum, then identity).

    Args:
        f, g: Called as `apply(x, group)`.
        ranks: Where they run.
    """
    for name, function, sums_forward in (("f", f, False), ("g", g, True)):
        results = ranks.run(_apply, function)
        total_x = torch.stack([result.x for result in results]).sum(0)
        total_grad = torch.stack([result.grad_y for result in results]).sum(0)
        for rank, result in enumerate(results):
            who = f"{name} on rank {rank}: "
            assert result.x_kept, (
                who + "forward wrote into its input: the sum needs a tensor of its own"
            )
            assert result.grad_y_kept, who + (
                "backward wrote into the gradient it was handed: the sum needs a tensor of its own"
            )
            assert result.grad_x is not None, who + "no gradient comes back"
            _check_forward(who, result, sums_forward, total_x)
            _check_backward(who, result, result.grad_x, sums_forward, total_grad, ranks.n)


def _check_forward(who: str, result: _Applied, sums_forward: bool, total_x: Tensor) -> None:
    if sums_forward:
        wanted = total_x
        mistaken = result.x
        hint = "forward has to sum over the ranks"
    else:
        wanted = result.x
        mistaken = total_x
        hint = "forward is the identity, nothing travels"
    assert not torch.equal(result.y, mistaken), who + hint
    assert torch.equal(result.y, wanted), who + (
        f"forward gives {result.y[0].tolist()}, expected {wanted[0].tolist()}"
    )


def _check_backward(
    who: str, result: _Applied, grad_x: Tensor, sums_forward: bool, total_grad: Tensor, p: int
) -> None:
    if sums_forward:
        wanted = result.grad_y
        mistaken = total_grad
        hint = (
            f"backward sums as well, every gradient below is {p} times too long: "
            "each rank has the whole already"
        )
    else:
        wanted = total_grad
        mistaken = result.grad_y
        hint = (
            "backward hands on this rank's own part; the paths through the other ranks are missing"
        )
    assert not torch.equal(grad_x, mistaken), who + hint
    assert torch.equal(grad_x, wanted), who + (
        f"backward gives {grad_x[0].tolist()}, expected {wanted[0].tolist()}"
    )


# ---- 9.2

VOCAB = 83  # does not divide by 2 or 4: the last rank has fewer columns
TOKENS = 12
TOLERANCE = 1e-9

VocabularyLoss = Callable[..., Tensor]


@dataclass(frozen=True)
class _OwnLoss:
    """What the learner's loss gave on one rank.

    Args:
        loss: [TOKENS].
        shifted: This rank's logits minus their own maximum, [TOKENS, columns]: what a loss sums
            whose ranks did not agree on one maximum.
        logits_kept: Whether the logits were left unchanged.
        num_bytes: Of all collectives.
    """

    loss: Tensor
    shifted: Tensor
    logits_kept: bool
    num_bytes: int


def _logits(shift: float) -> tuple[Tensor, Tensor]:
    """Whole logits around `shift`, [TOKENS, VOCAB], and targets, [TOKENS]."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(TOKENS, VOCAB, dtype=torch.float64, generator=generator) * 3 + shift
    targets = torch.randint(VOCAB, (TOKENS,), generator=generator)
    # one target on the first rank and one on the last, however many ranks there are
    targets[0] = 0
    targets[1] = VOCAB - 1
    return logits, targets


def _own_loss(rank: int, loss: VocabularyLoss, shift: float) -> _OwnLoss:
    logits, targets = _logits(shift)
    parts = logits.tensor_split(dist.get_world_size(), -1)
    mine = parts[rank].contiguous()
    first = sum(part.shape[-1] for part in parts[:rank])
    before = mine.clone()
    with torch.no_grad(), counted() as calls:
        found = due(loss(mine, targets.clone(), first, dist.group.WORLD))
    return _OwnLoss(
        loss=found,
        shifted=mine - mine.amax(-1, keepdim=True),
        logits_kept=torch.equal(mine, before),
        num_bytes=sum(call.num_bytes for call in calls),
    )


def vocabulary_loss(loss: VocabularyLoss, ranks: Ranks) -> None:
    """The learner's loss per token, from logits that are cut over the vocabulary.

    Args:
        loss: `loss(logits, targets, first, group)`: [S, V/p] own logits, [S] targets, the number of
            the first own column, the group.
        ranks: Where it runs.
    """
    for shift in (0.0, 1000.0):
        logits, targets = _logits(shift)
        expected = F.cross_entropy(logits, targets, reduction="none")
        results = ranks.run(_own_loss, loss, shift)
        own_shifted = torch.cat([result.shifted for result in results], -1)
        separate_maxima = F.cross_entropy(own_shifted, targets, reduction="none")
        for rank, result in enumerate(results):
            who = f"rank {rank}: "
            _check_shape(who, result.loss, shift, expected)
            separate = _relative_error(result.loss, separate_maxima) <= TOLERANCE and ranks.n > 1
            assert not separate, who + (
                "each rank subtracts a maximum of its own, so their sums have different units: "
                "agree on one"
            )
            _check_values(who, result, targets, expected)


def _check_shape(who: str, found: Tensor, shift: float, expected: Tensor) -> None:
    """One finite number for each token."""
    assert found.shape == expected.shape, who + (
        f"shape {list(found.shape)}, one loss for each of {TOKENS} tokens is due"
    )
    infinite = found[~found.isfinite()]
    assert not len(infinite), who + (
        f"{infinite[0].item()} for logits around {shift:.0f}: subtract the maximum before exp"
    )


def _check_values(who: str, result: _OwnLoss, targets: Tensor, expected: Tensor) -> None:
    """The right numbers, from few bytes, and the logits unchanged."""
    found = result.loss
    worst = int((found - expected).abs().argmax())
    assert _relative_error(found, expected) <= TOLERANCE, who + (
        f"token {worst} (target {targets[worst]}): {found[worst]:.4f}, "
        f"expected {expected[worst]:.4f}; which sums need the other ranks, "
        "and who has the logit of the target?"
    )
    assert result.logits_kept, who + "the logits were changed in place: backward will need them"
    numbers_per_token = result.num_bytes / TOKENS / 8
    assert numbers_per_token <= 4, who + (
        f"{numbers_per_token:.0f} numbers per token travel; three are enough, "
        "the logits stay where they are"
    )


# ---- 9.3


@dataclass(frozen=True)
class _Case:
    """A model whose traffic is counted, and the batch and dtype it runs with."""

    config: GPTConfig
    batch: int
    dtype: torch.dtype

    @property
    def name(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.config.num_layers} layers, batch {self.batch}, {dtype}: "


_SMALL = GPTConfig(65, num_layers=1, num_heads=2, hidden_size=16, context_length=8)
_DEEP = GPTConfig(65, num_layers=3, num_heads=2, hidden_size=32, context_length=12)
_NARROW = GPTConfig(65, num_layers=2, num_heads=2, hidden_size=32, context_length=12)
CASES = (
    _Case(_SMALL, 3, torch.float32),
    _Case(_DEEP, 2, torch.float32),
    _Case(_NARROW, 2, torch.bfloat16),
)


def _counted_step(case: _Case) -> tuple[int, int]:
    """(number, bytes) of the all-reduces over tp of forward, loss and backward of a GPT."""
    grid = Grid.create(GridShape(tp=dist.get_world_size()))
    whole = layers.initialize(GPT(case.config), 0).to(case.dtype)
    model = parallelize(whole, grid)
    tokens = torch.zeros(case.batch, case.config.context_length, dtype=torch.int64)
    with counted() as calls:
        model.loss(model(tokens), tokens).backward()
    return totals(call for call in calls if call.group_size > 1)["all_reduce"]


def traffic(my_traffic: Callable[[GPTConfig, int, int], tuple[int, int]], ranks: Ranks) -> None:
    """The learner's prediction of what tensor parallelism sends, against what real models send.

    Args:
        my_traffic: `my_traffic(config, batch, value_bytes)` -> (how many all-reduces, their bytes).
        ranks: Where the models run.
    """
    for case in CASES:
        found = due(my_traffic(case.config, case.batch, case.dtype.itemsize))
        assert isinstance(found, tuple) and len(found) == 2, (
            f"it returned {found!r}: give (how many all-reduces, their bytes)"
        )
        number, num_bytes = due(*found)
        wanted, wanted_bytes = ranks.run(_counted_step, case)[0]
        _check_number(case, number, wanted)
        _check_bytes(case, num_bytes, wanted, wanted_bytes)


def _check_number(case: _Case, number: int, wanted: int) -> None:
    assert number != 4 * case.config.num_layers, (
        case.name + "the layers alone; embedding, head and loss communicate too"
    )
    assert number == wanted, case.name + f"{number} all-reduces, the model makes {wanted}"


def _check_bytes(case: _Case, num_bytes: int, wanted: int, wanted_bytes: int) -> None:
    tokens = case.batch * case.config.context_length
    activation_bytes = tokens * case.config.hidden_size * case.dtype.itemsize
    assert num_bytes != wanted * activation_bytes, case.name + (
        "embedding and head send an activation like the layers, the loss three numbers per token"
    )
    if case.dtype.itemsize < 4:
        missing_bytes = 3 * tokens * (4 - case.dtype.itemsize)
        assert num_bytes != wanted_bytes - missing_bytes, (
            case.name + "the numbers of the loss are float32 whatever the model's dtype is"
        )
    assert num_bytes == wanted_bytes, case.name + (
        f"{si(num_bytes, 'B')}, the model sends {si(wanted_bytes, 'B')}"
    )


# ---- 9.4

SwiGLU = Callable[..., Tensor]


def _swiglu_tensors() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [6, 16], gate and up [48, 16], down [16, 48], the same on every rank."""
    generator = torch.Generator().manual_seed(5)

    def draw(rows: int, columns: int) -> Tensor:
        values = torch.randn(rows, columns, dtype=torch.float64, generator=generator)
        return values / columns**0.5

    x = draw(6, 16)
    gate = draw(48, 16)
    up = draw(48, 16)
    down = draw(16, 48)
    return x, gate, up, down


def _whole_swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def _own_swiglu(swiglu: SwiGLU) -> tuple[Tensor, Tensor | None, list[Call], list[Call]]:
    """Output, gradient of x, and what forward and backward sent on this rank."""
    x, gate, up, down = _swiglu_tensors()
    x.requires_grad_()
    with counted() as forward:
        y = due(swiglu(x, gate, up, down, dist.group.WORLD))
    with counted() as backward:
        y.square().sum().backward()
    return y.detach(), x.grad, forward, backward


def _numbers(calls: list[Call]) -> dict[str, int]:
    """{kind: how many}."""
    return {kind: number for kind, (number, _) in totals(calls).items()}


def swiglu(swiglu: SwiGLU, ranks: Ranks) -> None:
    """The learner's MLP of Llama with one all-reduce each way.

    Args:
        swiglu: `swiglu(x, gate, up, down, group)`, with the whole weights.
        ranks: Where it runs.
    """
    x, gate, up, down = _swiglu_tensors()
    x.requires_grad_()
    expected = _whole_swiglu(x, gate, up, down)
    expected.square().sum().backward()
    expected = expected.detach()
    assert x.grad is not None
    for rank, (y, grad, forward, backward) in enumerate(ranks.run(_own_swiglu, swiglu)):
        who = f"rank {rank}: "
        assert y.shape == expected.shape, who + (
            f"the output is {list(y.shape)}, expected {list(expected.shape)}"
        )
        if ranks.n > 1:
            assert forward, who + "nothing travels forward: is the output a sum over the ranks?"
        error = _relative_error(y, expected)
        assert error < TOLERANCE, who + (
            f"the output is {error:.0%} off: "
            "which rows of gate and up and which columns of down fit together?"
        )
        assert grad is not None and _relative_error(grad, x.grad) < TOLERANCE, who + (
            "the output is right, the gradient of x is not: it enters two products on each rank"
        )
        sent = _numbers(forward)
        assert sent == {"all_reduce": 1}, who + f"forward makes {sent}, one all-reduce is enough"
        sent = _numbers(backward)
        assert sent == {"all_reduce": 1}, who + (
            f"backward makes {sent}, one all-reduce is enough: where does x enter?"
        )
