"""Checks of lesson 08, tensor parallel. Each assertion's text is a hint."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from labcode.comm.counting import counted, totals
from labcode.comm.grid import Grid
from labcode.config import GPTConfig
from labcode.models import layers
from labcode.models.gpt import GPT
from labcode.models.parallelize import parallelize
from labcode.teach.check import due
from labcode.topology import GridShape
from labcode.units import si


def _off(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


# ---- 8.1


def _pair(rank, function):
    """What a Function does on this rank, forward and backward, and whether it wrote into what it was handed."""
    x = torch.arange(6.0).view(2, 3) + 10 * rank
    grad = torch.ones(2, 3) + rank
    x_before, grad_before = x.clone(), grad.clone()
    x.requires_grad_()
    y = due(function.apply(x, dist.group.WORLD))
    (back,) = torch.autograd.grad(y, x, grad_outputs=grad, allow_unused=True)
    kept = torch.equal(x.detach(), x_before), torch.equal(grad, grad_before)
    return x_before, y.detach(), grad_before, back, kept


def copy_and_reduce(f, g, ranks) -> None:
    """The learner's Functions f (`apply(x, group)`: identity, then a sum) and g (a sum, then identity)."""
    for name, function, sums_forward in (("f", f, False), ("g", g, True)):
        results = ranks.run(_pair, function)
        total_x, total_grad = (sum(result[i] for result in results) for i in (0, 2))
        for rank, (x, y, grad, back, (x_kept, grad_kept)) in enumerate(results):
            who = f"{name} on rank {rank}: "
            assert x_kept, who + "forward wrote into its input: the sum needs a tensor of its own"
            assert grad_kept, (
                who
                + "backward wrote into the gradient it was handed: the sum needs a tensor of its own"
            )
            assert back is not None, who + "no gradient comes back"
            wanted, other = (total_x, x) if sums_forward else (x, total_x)
            hint = (
                "forward has to sum over the ranks"
                if sums_forward
                else "forward is the identity, nothing travels"
            )
            assert not torch.equal(y, other), who + hint
            assert torch.equal(y, wanted), (
                who + f"forward gives {y[0].tolist()}, expected {wanted[0].tolist()}"
            )
            wanted, other = (grad, total_grad) if sums_forward else (total_grad, grad)
            hint = (
                f"backward sums as well, every gradient below is {ranks.n} times too long: each rank has the whole already"
                if sums_forward
                else "backward hands on this rank's own part; the paths through the other ranks are missing"
            )
            assert not torch.equal(back, other), who + hint
            assert torch.equal(back, wanted), (
                who + f"backward gives {back[0].tolist()}, expected {wanted[0].tolist()}"
            )


# ---- 8.2

VOCAB, TOKENS = 83, 12


def _logits(shift):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(TOKENS, VOCAB, dtype=torch.float64, generator=generator) * 3 + shift
    targets = torch.randint(VOCAB, (TOKENS,), generator=generator)
    targets[:2] = torch.tensor(
        [0, VOCAB - 1]
    )  # on the first and on the last rank, whatever their number
    return logits, targets


def _own_loss(rank, loss, shift):
    logits, targets = _logits(shift)
    parts = logits.tensor_split(dist.get_world_size(), -1)
    mine, first = parts[rank].contiguous(), sum(part.shape[-1] for part in parts[:rank])
    before = mine.clone()
    with torch.no_grad(), counted() as calls:
        found = due(loss(mine, targets.clone(), first, dist.group.WORLD))
    return (
        found,
        mine - mine.amax(-1, keepdim=True),
        torch.equal(mine, before),
        sum(call.num_bytes for call in calls),
    )


def vocabulary_loss(loss, ranks) -> None:
    """The learner's `loss(logits, targets, first, group)`: loss per token from logits cut over the vocabulary."""
    for shift in (0.0, 1000.0):
        logits, targets = _logits(shift)
        expected = F.cross_entropy(logits, targets, reduction="none")
        results = ranks.run(_own_loss, loss, shift)
        own_shifted = torch.cat([result[1] for result in results], -1)
        unequal_peaks = F.cross_entropy(own_shifted, targets, reduction="none")
        for rank, (found, _, kept, num_bytes) in enumerate(results):
            who = f"rank {rank}: "
            assert found.shape == expected.shape, (
                who + f"shape {list(found.shape)}, one loss for each of {TOKENS} tokens is due"
            )
            assert found.isfinite().all(), who + (
                f"{found[~found.isfinite()][0].item()} for logits around {shift:.0f}: subtract the maximum before exp"
            )
            apart = _off(found, unequal_peaks) > 1e-9 or ranks.n == 1
            assert apart, (
                who
                + "each rank subtracts a maximum of its own, so their sums have different units: agree on one"
            )
            if _off(found, expected) > 1e-9:
                bad = int((found - expected).abs().argmax())
                raise AssertionError(
                    who
                    + f"token {bad} (target {targets[bad]}): {found[bad]:.4f}, expected {expected[bad]:.4f}; "
                    "which sums need the other ranks, and who has the logit of the target?"
                )
            assert kept, who + "the logits were changed in place: backward will need them"
            assert num_bytes <= 8 * 4 * TOKENS, who + (
                f"{num_bytes / TOKENS / 8:.0f} numbers per token travel; three are enough, the logits stay where they are"
            )


# ---- 8.3

MODELS = (
    (GPTConfig(65, num_layers=1, num_heads=2, hidden_size=16, context_length=8), 3, torch.float32),
    (GPTConfig(65, num_layers=3, num_heads=2, hidden_size=32, context_length=12), 2, torch.float32),
    (
        GPTConfig(65, num_layers=2, num_heads=2, hidden_size=32, context_length=12),
        2,
        torch.bfloat16,
    ),
)


def _counted_step(config, batch, dtype):
    """Number and bytes of the all-reduces that forward, loss and backward of a GPT make over tp."""
    p = dist.get_world_size()
    model = parallelize(layers.initialize(GPT(config), 0).to(dtype), Grid.create(GridShape(tp=p)))
    tokens = torch.zeros(batch, config.context_length, dtype=torch.int64)
    with counted() as calls:
        model.loss(model(tokens), tokens).backward()
    return totals(call for call in calls if call.group_size > 1)["all_reduce"]


def traffic(traffic, ranks) -> None:
    """The learner's `traffic(config, batch, value_bytes)` against what real models send."""
    for config, batch, dtype in MODELS:
        found = due(traffic(config, batch, dtype.itemsize))
        assert isinstance(found, tuple) and len(found) == 2, (
            f"it returned {found!r}: give (how many all-reduces, their bytes)"
        )
        number, num_bytes = due(*found)
        (wanted, wanted_bytes), *_ = ranks.run(_counted_step, config, batch, dtype)
        layers_only = 4 * config.num_layers
        case = f"{config.num_layers} layers, batch {batch}, {str(dtype).removeprefix('torch.')}: "
        assert number != layers_only, (
            case + "the layers alone; embedding, head and loss communicate too"
        )
        assert number == wanted, case + f"{number} all-reduces, the model makes {wanted}"
        act = batch * config.context_length * config.hidden_size * dtype.itemsize
        alike = num_bytes == wanted * act
        assert not alike, (
            case
            + "embedding and head send an activation like the layers, the loss three numbers per token"
        )
        hint = "the numbers of the loss are float32 whatever the model's dtype is"
        per_token = batch * config.context_length
        narrow = (
            num_bytes == wanted_bytes - 3 * per_token * (4 - dtype.itemsize) and dtype.itemsize < 4
        )
        assert not narrow, case + hint
        assert num_bytes == wanted_bytes, (
            case + f"{si(num_bytes, 'B')}, the model sends {si(wanted_bytes, 'B')}"
        )


# ---- 8.4


def _swiglu_weights():
    generator = torch.Generator().manual_seed(5)
    make = lambda *shape: (
        torch.randn(*shape, dtype=torch.float64, generator=generator) / shape[-1] ** 0.5
    )
    return make(6, 16), make(48, 16), make(48, 16), make(16, 48)


def _swiglu_whole(x, gate, up, down):
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def _own_swiglu(swiglu):
    x, gate, up, down = _swiglu_weights()
    x.requires_grad_()
    with counted() as forward:
        y = due(swiglu(x, gate, up, down, dist.group.WORLD))
    with counted() as backward:
        y.square().sum().backward()
    return y.detach(), x.grad, forward, backward


def swiglu(swiglu, ranks) -> None:
    """The learner's `swiglu(x, gate, up, down, group)`: Llama's MLP with one all-reduce each way."""
    x, *weights = _swiglu_weights()
    x.requires_grad_()
    expected = _swiglu_whole(x, *weights)
    expected.square().sum().backward()
    for rank, (y, grad, forward, backward) in enumerate(ranks.run(_own_swiglu, swiglu)):
        who = f"rank {rank}: "
        assert y.shape == expected.shape, (
            who + f"the output is {list(y.shape)}, expected {list(expected.shape)}"
        )
        if ranks.n > 1:
            assert forward, who + "nothing travels forward: is the output a sum over the ranks?"
        assert _off(y, expected.detach()) < 1e-9, who + (
            f"the output is {_off(y, expected.detach()):.0%} off: "
            "which rows of gate and up and which columns of down fit together?"
        )
        assert grad is not None and _off(grad, x.grad) < 1e-9, who + (
            "the output is right, the gradient of x is not: it enters two products on each rank"
        )
        sent = {kind: number for kind, (number, _) in totals(forward).items()}
        assert sent == {"all_reduce": 1}, who + f"forward makes {sent}, one all-reduce is enough"
        sent = {kind: number for kind, (number, _) in totals(backward).items()}
        assert sent == {"all_reduce": 1}, (
            who + f"backward makes {sent}, one all-reduce is enough: where does x enter?"
        )
