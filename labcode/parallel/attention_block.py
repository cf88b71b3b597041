"""Blocks of attention: which one a rank computes, its kernels, and the logsumexp by which blocks are merged.

    s = q k^T / sqrt(D)      lse = log(sum over keys of exp(s))      P = exp(s - lse)      out = P v

    backward, with delta = sum over D of (dout * out):
        dv = P^T dout      dP = dout v^T      dS = P * (dP - delta)      dq = dS k / sqrt(D)      dk = dS^T q / sqrt(D)

`out` and `lse` of the backward may be those of a longer row of keys than this block's: then P is this block's part of the
whole row, and the gradients are this block's terms of the whole sums. That is all that ring attention needs.

The plain kernel is made to be read, and holds the whole matrix of scores. The fused ones are PyTorch's own flash kernels,
which do not; PyTorch counts the functions that return the logsumexp as private, so one is used only after it has agreed
with the plain kernel on a small example, on this device, in this dtype, with this head size.

Shapes: B samples, N query heads, K key/value heads (K divides N), Q queries, S keys, D features of a head.
Source: Dao 2023 (arXiv:2307.08691), algorithms 1 and 2.
Held by: tests/ranks/test_context.py::test_the_fused_kernel_agrees_with_the_plain_one
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F

# layout: (chunks of the whole sequence per rank, the chunks that rank r of p holds, in ascending order)
LAYOUTS = {"zigzag": (2, lambda r, p: (r, 2 * p - 1 - r)), "contiguous": (1, lambda r, p: (r,))}


def own_chunks(length: int, group_size: int, index: int, layout: str) -> list[range]:
    """The runs of global positions that rank `index` holds; chunks as `torch.tensor_split` cuts them, the first ones longer.

    Raises:
        ValueError: A layout that does not exist.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r} does not exist: choose one of {', '.join(LAYOUTS)}")
    per_rank, chunks_of = LAYOUTS[layout]
    base, longer = divmod(length, per_rank * group_size)
    return [
        range(c * base + min(c, longer), (c + 1) * base + min(c + 1, longer))
        for c in chunks_of(index, group_size)
    ]


class Block(NamedTuple):
    """Which of a rank's queries see which keys of a source: all of one see all of the other, or causally (its own)."""

    queries: slice
    keys: slice
    causal: bool


def visible_block(
    length: int, group_size: int, rank: int, source: int, layout: str, causal: bool
) -> Block | None:
    """What `rank` computes while it holds K and V of `source`; None: nothing there is visible.

    Zigzag and causal: of an earlier rank all queries see the first half of the keys, of a later rank the second half of the
    queries sees all keys, so that every step costs every rank the same, `(S/p)^2 / 2` scores.

    Held by: tests/ranks/test_context.py::test_zigzag_gives_every_rank_the_same_scores_and_contiguous_does_not
    """
    mine, theirs = (
        [run for run in own_chunks(length, group_size, r, layout) if run] for r in (rank, source)
    )
    if not mine or not theirs:
        return None  # more ranks than tokens
    seeing, seen = mine, theirs
    if causal and rank != source:
        seeing = [run for run in mine if run.start >= theirs[0].stop]  # the last chunks of mine
        seen = [run for run in theirs if run.stop <= mine[-1].start]  # the first chunks of theirs
        if not seeing or not seen:
            return None
        assert seeing[0].start >= seen[-1].stop, "off the diagonal a block is visible as a whole"
    hidden_queries = sum(map(len, mine)) - sum(map(len, seeing))
    return Block(slice(hidden_queries, None), slice(sum(map(len, seen))), causal and rank == source)


class Kernel(NamedTuple):
    """One way to compute a block.

    Args:
        name: For people.
        forward: (q [B, N, Q, D], k, v [B, K, S, D], causal) -> out [B, N, Q, D], lse [B, N, Q] in `wide_dtype`.
            causal: query i sees keys 0..i; Q = S then.
        backward: (dout, q, k, v, out, lse, causal) -> dq, dk, dv in the shapes of q, k and v.
    """

    name: str
    forward: Callable
    backward: Callable


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of softmax statistics and of sums over blocks: float32, or float64 for float64 inputs."""
    return torch.promote_types(dtype, torch.float32)


def merge(out: torch.Tensor, lse: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor) -> None:
    """Take a block over further keys in, in place: online softmax. An `lse` that has seen no key is -inf.

        lse' = log(exp(lse) + exp(lse_b))      out' = out + exp(lse_b - lse') (out_b - out)

    Args:
        out, out_b: [B, N, Q, D]
        lse, lse_b: [B, N, Q]

    Source: Milakov and Gimelshein 2018 (arXiv:1805.02867), section 3.1, for the merging of partial sums.
    """
    share = torch.sigmoid(
        lse_b - lse
    )  # exp(lse_b - lse'), without the overflow of either exponential
    out.lerp_(out_b.to(out.dtype), share[..., None])
    torch.logaddexp(lse, lse_b, out=lse)


def _plain_scores(q, k, causal):
    """[B, K, N/K, Q, S]: query head n belongs to key head n // (N/K), so the heads of one group lie together."""
    q = q.unflatten(1, (k.shape[1], -1))  # [B, N, Q, D] -> [B, K, N/K, Q, D]
    scores = q @ k[:, :, None].mT / math.sqrt(q.shape[-1])
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores


def _plain_forward(q, k, v, causal):
    dtype, wide = q.dtype, wide_dtype(q.dtype)
    q, k, v = q.to(wide), k.to(wide), v.to(wide)
    scores = _plain_scores(q, k, causal)
    lse = scores.logsumexp(-1, keepdim=True)  # [B, K, N/K, Q, 1]
    out = (scores - lse).exp() @ v[:, :, None]  # [B, K, N/K, Q, D]
    return out.flatten(1, 2).to(dtype), lse.squeeze(-1).flatten(1, 2)


def _plain_backward(dout, q, k, v, out, lse, causal):
    dtype, wide = q.dtype, wide_dtype(q.dtype)
    dout, q, k, v, out = (x.to(wide) for x in (dout, q, k, v, out))
    groups = (k.shape[1], -1)
    p = (
        _plain_scores(q, k, causal) - lse.unflatten(1, groups)[..., None]
    ).exp()  # [B, K, N/K, Q, S]
    delta = (dout * out).sum(-1, keepdim=True).unflatten(1, groups)  # [B, K, N/K, Q, 1]
    dout, q = dout.unflatten(1, groups), q.unflatten(1, groups)  # [B, K, N/K, Q, D]
    ds = p * (dout @ v[:, :, None].mT - delta) / math.sqrt(q.shape[-1])
    dq = (ds @ k[:, :, None]).flatten(1, 2)
    dk, dv = (
        (ds.mT @ q).sum(2),
        (p.mT @ dout).sum(2),
    )  # a key head collects from all query heads that read it
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


PLAIN = Kernel("plain", _plain_forward, _plain_backward)


def _cpu_forward(q, k, v, causal):
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)


def _cpu_backward(dout, q, k, v, out, lse, causal):
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse, 0.0, causal
    )


def _flash_forward(q, k, v, causal):
    k, v = _one_per_query_head(q, k, v)
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]


def _flash_backward(dout, q, k, v, out, lse, causal):
    heads = k.shape[1]
    k, v = _one_per_query_head(q, k, v)
    seed, offset = (
        torch.zeros(n, dtype=torch.int64, device=q.device) for n in (2, 1)
    )  # of dropout, which is off
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        dout,
        q,
        k,
        v,
        out,
        lse.contiguous(),
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        causal,
        seed,
        offset,
    )
    return dq, *_summed_by_group(dk, dv, heads)


def _efficient_forward(q, k, v, causal):
    k, v = _one_per_query_head(q, k, v)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, None, True, 0.0, causal
    )
    return out, lse[..., : q.shape[2]]  # the kernel rounds its rows up to a multiple of 32


def _efficient_backward(dout, q, k, v, out, lse, causal):
    heads, queries = k.shape[1], q.shape[2]
    k, v = _one_per_query_head(q, k, v)
    lse = F.pad(
        lse, (0, -queries % 32), value=math.inf
    )  # exp(s - inf) = 0: what the rounded-up rows weigh
    seed, offset = (torch.zeros((), dtype=torch.int64, device=q.device) for _ in range(2))
    dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        dout,
        q,
        k,
        v,
        None,
        out,
        lse.contiguous(),
        seed,
        offset,
        0.0,
        (True, True, True, False),
        causal,
    )
    return dq, *_summed_by_group(dk, dv, heads)


def _one_per_query_head(q, k, v):
    """K and V repeated for each query head that reads them, [B, N, S, D]: not every GPU kernel knows groups."""
    return (
        x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], 1)
        for x in (k, v)
    )


def _summed_by_group(dk, dv, heads):
    """The backward of `_one_per_query_head`: [B, N, S, D] -> [B, K, S, D], added in `wide_dtype`."""
    if dk.shape[1] == heads:
        return dk, dv
    return (
        x.unflatten(1, (heads, -1)).sum(2, dtype=wide_dtype(x.dtype)).to(x.dtype) for x in (dk, dv)
    )


# which fused kernels a kind of device may have, the fastest first
FUSED = {
    "cpu": (Kernel("flash", _cpu_forward, _cpu_backward),),
    "cuda": (
        Kernel("flash", _flash_forward, _flash_backward),  # float16 and bfloat16
        Kernel("memory-efficient", _efficient_forward, _efficient_backward),  # float32 too
    ),
}


def fastest_kernel(q: torch.Tensor, k: torch.Tensor) -> Kernel:
    """The first fused kernel that works for tensors like these, or the plain one.

    Args:
        q: [B, N, Q, D]
        k: [B, K, S, D]
    """
    return _fastest(q.device.type, q.dtype, q.shape[-1], q.shape[1] != k.shape[1])


@lru_cache
def _fastest(device, dtype, head_size, grouped):
    for kernel in FUSED.get(device, ()):
        if _agrees(kernel, device, dtype, head_size, 1 if grouped else 2):
            return kernel
    return PLAIN


def _agrees(kernel, device, dtype, head_size, kv_heads):
    """Whether a kernel runs and gives the plain kernel's numbers, to far above rounding and far below another meaning."""

    def values(seed, *shape):  # no random numbers: a model that draws them must not notice
        return (
            torch.arange(seed, seed + math.prod(shape), device=device)
            .mul(0.7)
            .sin()
            .view(shape)
            .to(dtype)
        )

    for queries, keys, causal in ((4, 4, True), (3, 5, False)):
        q, dout = (values(i, 1, 2, queries, head_size) for i in (1, 2))
        k, v = (values(i, 1, kv_heads, keys, head_size) for i in (3, 4))
        try:
            out, lse = kernel.forward(q, k, v, causal)
            found = (out, lse, *kernel.backward(dout, q, k, v, out, lse, causal))
        except (
            RuntimeError,
            TypeError,
            AttributeError,
        ):  # no such function, another signature, or refused
            return False
        out, lse = PLAIN.forward(q, k, v, causal)
        expected = (out, lse, *PLAIN.backward(dout, q, k, v, out, lse, causal))
        if any(
            a.shape != b.shape or not torch.allclose(a.to(b.dtype), b, rtol=0.05, atol=0.05)
            for a, b in zip(found, expected)
        ):
            return False
    return True
