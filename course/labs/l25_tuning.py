"""Lesson 25: pairs of lines from Shakespeare, a small base model, and numbers beside one process.

The answer to a line is the next line of the same speech in capital letters, and then the separator.
What is compared exactly is computed in float64 with a model that nobody has trained; what is shown
is said by a GPT of two layers that `base` trains for some seconds.

Held by: tests/ranks/test_l25_labs.py
"""

import copy
import functools
import gzip
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from labcode.config import GPTConfig, LoraConfig
from labcode.data.text import SHAKESPEARE
from labcode.data.tokenizer import CharTokenizer
from labcode.models.gpt import GPT, generate, loss
from labcode.models.layers import initialize
from labcode.models.lora import LoraLinear, QLoraLinear, add_adapters

SPEECH = re.compile(r"(?m)^[A-Z][A-Z ]{2,}:\n((?:[^\n]+\n)+)")
LONGEST_PAIR = 90  # characters of both lines
READ = 1_000_000  # characters that the base model is trained on
CONTEXT = 96
BASE_STEPS = 250
BASE_LR = 5e-3
NOT_COUNTED = -100  # `ignore_index` of F.cross_entropy

TokenPair = tuple[list[int], list[int]]
MicroBatch = tuple[torch.Tensor, torch.Tensor]


# ---- pairs


@functools.cache
def text() -> str:
    """All plays that labcode ships."""
    return gzip.decompress(SHAKESPEARE.read_bytes()).decode()


@functools.cache
def tokenizer() -> CharTokenizer:
    """One token for each character; number 0 is the separator, which ends an answer."""
    return CharTokenizer.train(text())


@functools.cache
def pairs() -> list[tuple[str, str]]:
    """[(a line, the next line in capitals)] of all speeches of two short lines."""
    found = []
    for speech in SPEECH.findall(text()):
        lines = speech.splitlines()
        if len(lines) == 2 and len(speech) < LONGEST_PAIR:
            found.append((f"{lines[0]}\n", f"{lines[1].upper()}\n"))
    return found


@functools.cache
def token_pairs() -> list[TokenPair]:
    """The pairs as token numbers, each answer with the separator at its end."""
    encode = tokenizer().encode
    return [(encode(prompt), [*encode(answer), 0]) for prompt, answer in pairs()]


def padded(chosen: Sequence[TokenPair], targets_of: Callable[..., Any]) -> MicroBatch:
    """Pairs as the rows of a batch, filled up to the longest of them.

    Args:
        chosen: B pairs.
        targets_of: `targets_of(prompt, answer)`, the targets of one pair.

    Returns:
        tokens and targets, both [B, S]; at what is filled up targets are -100.
    """
    length = max(len(prompt) + len(answer) for prompt, answer in chosen) - 1
    tokens = torch.zeros(len(chosen), length, dtype=torch.int64)
    targets = torch.full((len(chosen), length), NOT_COUNTED)
    for row, (prompt, answer) in enumerate(chosen):
        own = [*prompt, *answer][:-1]
        tokens[row, : len(own)] = torch.tensor(own)
        targets[row, : len(own)] = torch.tensor(targets_of(prompt, answer))
    return tokens, targets


# ---- models


@functools.cache
def _trained() -> GPT:
    """The base model, trained when it is asked for first."""
    config = GPTConfig(
        vocab_size=tokenizer().vocab_size,
        num_layers=2,
        num_heads=4,
        hidden_size=64,
        context_length=CONTEXT,
    )
    model = initialize(GPT(config), 0)
    read = torch.tensor(tokenizer().encode(text()[:READ]))
    generator = torch.Generator().manual_seed(0)
    adamw = torch.optim.AdamW(model.parameters(), lr=BASE_LR)
    for step in range(BASE_STEPS):
        for group in adamw.param_groups:
            group["lr"] = BASE_LR * min(1.0, (step + 1) / 50) * max(0.1, 1 - step / BASE_STEPS)
        starts = torch.randint(len(read) - CONTEXT - 1, (16,), generator=generator)
        rows = torch.stack([read[start : start + CONTEXT + 1] for start in starts.tolist()])
        adamw.zero_grad()
        loss(model(rows[:, :-1]), rows[:, 1:]).backward()
        adamw.step()
    return model


def base() -> GPT:
    """A copy of a GPT of 2 layers that has read a million characters for 250 steps."""
    return copy.deepcopy(_trained())


def say(model: nn.Module, prompt: str, length: int = 44) -> str:
    """What a model writes after a prompt, up to the separator."""
    tokens = torch.tensor([tokenizer().encode(prompt)])
    generator = torch.Generator().manual_seed(1)
    written = generate(model, tokens, length, temperature=0.5, generator=generator)[0]
    answer = written[tokens.shape[1] :].tolist()
    if 0 in answer:
        answer = answer[: answer.index(0)]
    return tokenizer().decode(answer)


def tune(
    model: nn.Module, targets_of: Callable[..., Any], steps: int = 60, lr: float = 5e-3
) -> float:
    """Train what is not frozen on pairs, 16 in a step; the loss on 64 others afterwards.

    Args:
        model: A GPT that knows the characters of `tokenizer`.
        targets_of: `targets_of(prompt, answer)`, the targets of one pair.
        steps: How many.
        lr: Of AdamW.
    """
    params = [param for param in model.parameters() if param.requires_grad]
    adamw = torch.optim.AdamW(params, lr=lr, weight_decay=0.0)
    for step in range(steps):
        chosen = token_pairs()[16 * step : 16 * (step + 1)]
        tokens, targets = padded(chosen, targets_of)
        adamw.zero_grad()
        loss(model(tokens), targets).backward()
        adamw.step()
    return loss_on_others(model, targets_of)


@torch.no_grad()
def loss_on_others(model: nn.Module, targets_of: Callable[..., Any]) -> float:
    """The mean loss of a target token of 64 pairs that `tune` does not use."""
    tokens, targets = padded(token_pairs()[-64:], targets_of)
    return loss(model(tokens), targets).item()


def small(positions: str = "learned", num_layers: int = 2) -> GPT:
    """A GPT in float64 that nobody has trained, the same in every process."""
    config = GPTConfig(
        vocab_size=tokenizer().vocab_size,
        num_layers=num_layers,
        num_heads=2,
        hidden_size=16,
        context_length=256,
        positions=positions,  # pyright: ignore[reportArgumentType]
    )
    model = initialize(GPT(config), 0).double()
    with torch.no_grad():
        for param in model.parameters():
            param *= 4.0  # so that a token that is seen or not makes a difference
    return model


# ---- packed rows


def documents_alone(model: nn.Module, chosen: Sequence[TokenPair]) -> list[torch.Tensor]:
    """The logits of each pair by itself, [its tokens - 1, V]."""
    found = []
    for prompt, answer in chosen:
        tokens = torch.tensor([[*prompt, *answer][:-1]])
        found.append(model(tokens)[0].detach())
    return found


def off_alone(logits: torch.Tensor, alone: Sequence[torch.Tensor]) -> list[float]:
    """How far each document of a packed row is off what it is alone, relative.

    Args:
        logits: [1, S, V] of the packed row.
        alone: Of `documents_alone`.
    """
    found = []
    for own, truth in zip(logits[0].split([len(each) for each in alone]), alone, strict=True):
        found.append(relative_error(own.detach(), truth))
    return found


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The length of the difference, in lengths of what is expected."""
    return ((found - expected).norm() / expected.norm()).item()


# ---- a step on ranks


def micro_batches(rank: int, targets_of: Callable[..., Any]) -> list[MicroBatch]:
    """Two micro-batches of two pairs; rank 3 has short answers, and in its second batch none."""
    by_length = sorted(token_pairs()[:400], key=_answer_length, reverse=True)
    order = by_length[::-1] if rank == 3 else by_length[10 * rank :]
    found = [padded(order[:2], targets_of), padded(order[2:4], targets_of)]
    if rank == 3:
        tokens, targets = found[1]
        found[1] = tokens, torch.full_like(targets, NOT_COUNTED)
    return found


def _answer_length(pair: TokenPair) -> int:
    return len(pair[1])


def gradient(model: nn.Module) -> torch.Tensor:
    """All gradients of a model behind one another; zeros where there is none."""
    parts = []
    for param in model.parameters():
        grad = torch.zeros_like(param) if param.grad is None else param.grad
        parts.append(grad.flatten())
    return torch.cat(parts).detach()


def under_ddp(rank: int, backward: Callable[..., Any], targets_of: Callable[..., Any]) -> Any:
    """(what `backward` returns, the gradient that DDP leaves) of one step on this rank.

    Args:
        rank: This one.
        backward: `backward(model, micro_batches, group)`.
        targets_of: `targets_of(prompt, answer)`.
    """
    group = dist.group.WORLD
    model = DistributedDataParallel(small(), process_group=group)
    value = backward(model, micro_batches(rank, targets_of), group)
    return float(value), gradient(model)


def on_one_process(targets_of: Callable[..., Any], num_ranks: int = 4) -> Any:
    """(loss, gradient) of one process that has the tokens of all ranks in one sum."""
    model = small()
    total = torch.zeros((), dtype=torch.float64)
    count = 0
    for rank in range(num_ranks):
        for tokens, targets in micro_batches(rank, targets_of):
            counted = int((targets != NOT_COUNTED).sum())
            if counted:
                total = total + counted * loss(model(tokens), targets)
                count += counted
    (total / count).backward()
    return (total / count).item(), gradient(model)


# ---- an MLP with adapters, for tp


class Whole(NamedTuple):
    """A linear layer with its adapter.

    Args:
        weight: W, [out, in]
        lora_a: A, [r, in]
        lora_b: B, [out, r]
    """

    weight: torch.Tensor
    lora_a: torch.Tensor
    lora_b: torch.Tensor


HIDDEN = 16
FFN = 48
RANK = 4
TOKENS = 10
SCALE = 0.5


def mlp_tensors() -> tuple[torch.Tensor, Whole, Whole]:
    """(x [T, H], up, down), the same in every process."""
    generator = torch.Generator().manual_seed(25)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) / 4

    up = Whole(draw(FFN, HIDDEN), draw(RANK, HIDDEN), draw(FFN, RANK))
    down = Whole(draw(HIDDEN, FFN), draw(RANK, FFN), draw(HIDDEN, RANK))
    return draw(TOKENS, HIDDEN), up, down


def mlp_on_ranks(rank: int, make: Callable[..., Any], finish: bool = True) -> dict[str, Any]:
    """Gradients that an MLP with adapters has on this rank, and the shapes of its A and B.

    Args:
        rank: This one.
        make: A class; `make(up, down, scale, group)`.
        finish: Whether its `finish` is called.
    """
    x, up, down = mlp_tensors()
    mlp = make(up, down, SCALE, dist.group.WORLD)
    mlp.forward(x).square().sum().backward()
    if finish:
        mlp.finish()
    found = {}
    for name, parts in (("up", mlp.up), ("down", mlp.down)):
        found[f"{name} A"] = parts[1].grad.clone()
        found[f"{name} B"] = parts[2].grad.clone()
    return found


def mlp_alone() -> dict[str, torch.Tensor]:
    """The gradients of one process."""
    x, up, down = mlp_tensors()
    params = []
    for layer in (up, down):
        params += [layer.lora_a.requires_grad_(), layer.lora_b.requires_grad_()]
    inner = nn.functional.gelu(_with_adapter(x, up))
    _with_adapter(inner, down).square().sum().backward()
    names = ("up A", "up B", "down A", "down B")
    found = {}
    for name, param in zip(names, params, strict=True):
        assert param.grad is not None
        found[name] = param.grad
    return found


def _with_adapter(x: torch.Tensor, layer: Whole) -> torch.Tensor:
    return x @ layer.weight.T + SCALE * (x @ layer.lora_a.T) @ layer.lora_b.T


def whole_gradient(parts: Iterable[torch.Tensor], expected: torch.Tensor) -> torch.Tensor:
    """What ranks hold of one gradient, put together: parts behind one another, or the first copy.

    Args:
        parts: Of each rank, in their order.
        expected: Says which shape the whole one has.
    """
    of_ranks = list(parts)
    if of_ranks[0].shape == expected.shape:
        return of_ranks[0]
    cut = 0 if of_ranks[0].shape[0] != expected.shape[0] else 1
    return torch.cat(of_ranks, cut)


# ---- what is kept, and flat parameters


KEPT = GPTConfig(
    vocab_size=256, num_layers=4, num_heads=4, hidden_size=256, context_length=64
)  # 3.2 million weights
WAYS = ("all weights", "LoRA", "QLoRA")


def model_to_keep(way: str) -> nn.Module:
    """A GPT as it is kept for training: in float32, frozen in bfloat16, or frozen in 4 bits.

    Args:
        way: One of `WAYS`. Adapters have rank 4 and are in float32.
    """
    model: nn.Module = initialize(GPT(KEPT), 0)
    if way == "all weights":
        return model
    add_adapters(model, LoraConfig(rank=4, alpha=8.0), seed=0)
    for param in model.parameters():
        if not param.requires_grad:
            param.data = param.data.bfloat16()
    if way == "QLoRA":
        for name, module in list(model.named_modules()):
            if isinstance(module, LoraLinear):
                model.set_submodule(name, QLoraLinear(module))
    return model


def bytes_kept(way: str) -> int:
    """Bytes of weights, gradients and the optimizer's state after a step of AdamW, counted."""
    model = model_to_keep(way)
    adamw = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad])
    tokens = torch.arange(16)[None]
    with torch.autocast("cpu", torch.bfloat16):
        model(tokens).float().square().mean().backward()
    adamw.step()
    kept = [*model.parameters(), *model.buffers()]
    kept += [param.grad for param in model.parameters() if param.grad is not None]
    for state in adamw.state.values():
        kept += [state["exp_avg"], state["exp_avg_sq"]]
    return sum(tensor.nbytes for tensor in kept)


def flattened(
    use_orig_params: bool, base_dtype: torch.dtype = torch.float32, size: int = 8, rank: int = 2
) -> FullyShardedDataParallel:
    """A layer with an adapter as one unit of PyTorch's first FSDP.

    Args:
        use_orig_params: As FSDP has it.
        base_dtype: Of the frozen weight; the adapter is in float32.
        size: Of the square weight.
        rank: Of the adapter.
    """
    layer = LoraLinear(nn.Linear(size, size, bias=False), rank, alpha=4.0)
    layer.weight.data = layer.weight.data.to(base_dtype)
    return FullyShardedDataParallel(
        layer, device_id=torch.device("cpu"), use_orig_params=use_orig_params
    )


def flat_gradient_numbers(size: int, rank: int) -> int:
    """How many numbers the gradient of the flat parameter has on this rank after backward."""
    unit: Any = flattened(True, size=size, rank=rank)
    unit(torch.ones(1, size)).sum().backward()
    return unit._flat_param.grad.numel()
