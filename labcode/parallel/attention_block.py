"""Blocks of attention: which one a rank computes, the kernels, and how blocks are merged.

    s = q k^T / sqrt(D)      lse = log(sum over keys of exp(s))      P = exp(s - lse)      out = P v

    backward, with delta = sum over D of (dout * out):
        dv = P^T dout                  dP = dout v^T
        dS = P * (dP - delta)          dq = dS k / sqrt(D)          dk = dS^T q / sqrt(D)

In the backward, `out` and `lse` may be those of a longer row of keys than this block's. P is then
this block's part of the whole row, and the gradients are this block's terms of the whole sums. That
is all that ring attention needs.

The plain kernel is written to be read, and it holds the whole matrix of scores. The fused kernels
are PyTorch's own flash kernels, which do not. PyTorch treats the functions that return the
logsumexp as private, so each one is used only after it has agreed with the plain kernel on a small
example, on this device, in this dtype, with this head size.

Shapes: B samples, N query heads, K key/value heads (K divides N), Q queries, S keys, D features of
a head.
Source: Dao 2023 (arXiv:2307.08691), algorithms 1 and 2.
Held by: tests/ranks/test_context.py::test_the_fused_kernel_agrees_with_the_plain_one
"""

import math
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F

Tensors2 = tuple[torch.Tensor, torch.Tensor]
Tensors3 = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Layout(NamedTuple):
    """How the sequence is cut over the ranks of a group.

    Args:
        chunks_per_rank: The whole sequence is cut into this many chunks per rank.
        chunks_of: (rank, group size) -> the chunks that the rank holds, in ascending order.
    """

    chunks_per_rank: int
    chunks_of: Callable[[int, int], tuple[int, ...]]


def _zigzag_chunks(rank: int, group_size: int) -> tuple[int, int]:
    return (rank, 2 * group_size - 1 - rank)


def _contiguous_chunk(rank: int, group_size: int) -> tuple[int]:
    return (rank,)


LAYOUTS = {"zigzag": Layout(2, _zigzag_chunks), "contiguous": Layout(1, _contiguous_chunk)}


def own_chunks(length: int, group_size: int, index: int, layout: str) -> list[range]:
    """The runs of global positions that rank `index` holds, in ascending order.

    The sequence is cut as `torch.tensor_split` does it: if the length is not divisible, the first
    chunks get one token more. With more chunks than tokens some runs are empty.

    Raises:
        ValueError: A layout that does not exist.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r} does not exist: choose one of {', '.join(LAYOUTS)}")
    chunks_per_rank, chunks_of = LAYOUTS[layout]
    # `longer` chunks have base + 1 tokens, and those come first
    base, longer = divmod(length, chunks_per_rank * group_size)
    runs = []
    for chunk in chunks_of(index, group_size):
        # each of the longer chunks before this one moves it by one token
        start = chunk * base + min(chunk, longer)
        stop = (chunk + 1) * base + min(chunk + 1, longer)
        runs.append(range(start, stop))
    return runs


def count_tokens(runs: Iterable[range]) -> int:
    """How many tokens there are in some runs of positions."""
    return sum(len(run) for run in runs)


class VisibleBlock(NamedTuple):
    """Which of a rank's queries see which keys of a source.

    Every one of these queries sees every one of these keys, unless the block is causal.

    Args:
        queries: A slice of the rank's own queries.
        keys: A slice of the source's keys.
        causal: Query i sees keys 0..i only; this is the block of a rank's own keys.
    """

    queries: slice
    keys: slice
    causal: bool


def visible_block(
    length: int, group_size: int, rank: int, source: int, layout: str, causal: bool
) -> VisibleBlock | None:
    """What `rank` computes while it holds K and V of `source`; None: nothing there is visible.

    Zigzag and causal: all queries see the first half of an earlier rank's keys, and the second half
    of the queries sees all keys of a later rank. Every step therefore costs every rank the same,
    `(S/p)^2 / 2` scores.

    Held by: tests/ranks/test_context.py::
        test_zigzag_gives_every_rank_the_same_scores_and_contiguous_does_not
    """
    mine = [run for run in own_chunks(length, group_size, rank, layout) if run]
    theirs = [run for run in own_chunks(length, group_size, source, layout) if run]
    if not mine or not theirs:
        return None  # more ranks than tokens
    if rank == source or not causal:
        # Own queries over own keys. Under zigzag these are two runs with a gap between them, and a
        # plain triangle over both is still right: it asks only which token comes first.
        return VisibleBlock(slice(0, None), slice(count_tokens(theirs)), causal)

    # Chunks never overlap, so a query sees either a whole chunk or nothing of it. Of my chunks the
    # last ones see anything, of theirs the first ones are seen, so that each is one slice. For p =
    # 4, rank 2 has the chunks 2 and 5:
    #
    #     source 1, chunks 1 and 6    all queries over the keys of 1
    #     source 3, chunks 3 and 4    the queries of 5 over all keys
    seeing = [run for run in mine if run.start >= theirs[0].stop]
    seen = [run for run in theirs if run.stop <= mine[-1].start]
    if not seeing or not seen:
        return None
    assert seeing[0].start >= seen[-1].stop, "off the diagonal a block is visible as a whole"
    blind_queries = count_tokens(mine) - count_tokens(seeing)
    return VisibleBlock(slice(blind_queries, None), slice(count_tokens(seen)), causal=False)


class Kernel(NamedTuple):
    """One way to compute a block.

    Args:
        name: Name for people.
        forward: (q [B, N, Q, D], k, v [B, K, S, D], causal) -> out [B, N, Q, D], lse [B, N, Q] in
            `wide_dtype`. causal: query i sees keys 0..i; Q = S then.
        backward: (dout, q, k, v, out, lse, causal) -> dq, dk, dv in the shapes of q, k and v.
    """

    name: str
    forward: Callable[..., Tensors2]
    backward: Callable[..., Tensors3]


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of softmax statistics and of sums over blocks: float32; float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def merge(out: torch.Tensor, lse: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor) -> None:
    """Merge a block over further keys into `out` and `lse`, in place (online softmax).

        lse' = log(exp(lse) + exp(lse_b))      out' = out + exp(lse_b - lse') (out_b - out)

    An `lse` that has not seen any key yet is -inf.

    Args:
        out, out_b: [B, N, Q, D]
        lse, lse_b: [B, N, Q]

    Source: Milakov and Gimelshein 2018 (arXiv:1805.02867), section 3.1, for the merging of partial
        sums.
    """
    # exp(lse_b - lse') = exp(lse_b) / (exp(lse) + exp(lse_b)) is this sigmoid, in which neither
    # exponential can overflow. With lse = -inf it is 1, and out becomes out_b exactly.
    share = torch.sigmoid(lse_b - lse)
    out.lerp_(out_b.to(out.dtype), share[..., None])  # [B, N, Q, 1] beside [B, N, Q, D]
    torch.logaddexp(lse, lse_b, out=lse)


# ---- the plain kernel


def _plain_scores(q: torch.Tensor, k: torch.Tensor, causal: bool) -> torch.Tensor:
    """The scores, [B, K, N/K, Q, S].

    Query head n reads key head n // (N/K), so the query heads of one group are neighbours.
    """
    q = q.unflatten(1, (k.shape[1], -1))  # [B, N, Q, D] -> [B, K, N/K, Q, D]
    # k[:, :, None] is [B, K, 1, S, D]: the product repeats it for the N/K query heads of a group,
    # without a copy
    scores = q @ k[:, :, None].mT / math.sqrt(q.shape[-1])
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores


def _plain_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Tensors2:
    dtype = q.dtype
    wide = wide_dtype(dtype)
    v = v.to(wide)
    scores = _plain_scores(q.to(wide), k.to(wide), causal)
    lse = scores.logsumexp(-1, keepdim=True)  # [B, K, N/K, Q, 1]
    out = (scores - lse).exp() @ v[:, :, None]  # [B, K, N/K, Q, D]
    # [B, K, N/K, Q, D] -> [B, N, Q, D] and [B, K, N/K, Q, 1] -> [B, N, Q]
    return out.flatten(1, 2).to(dtype), lse.squeeze(-1).flatten(1, 2)


def _plain_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
) -> Tensors3:
    dtype = q.dtype
    dout, q, k, v, out = (x.to(wide_dtype(dtype)) for x in (dout, q, k, v, out))
    groups = (k.shape[1], -1)
    scores = _plain_scores(q, k, causal)  # [B, K, N/K, Q, S], computed a second time
    p = (scores - lse.unflatten(1, groups)[..., None]).exp()  # [B, K, N/K, Q, S]
    # sum over S of P * dP, for the whole row of keys, from `out` alone. So it is right for a block
    # of a longer row as well, whose other keys are not here.
    delta = (dout * out).sum(-1, keepdim=True).unflatten(1, groups)  # [B, K, N/K, Q, 1]
    dout = dout.unflatten(1, groups)  # [B, K, N/K, Q, D]
    q = q.unflatten(1, groups)  # [B, K, N/K, Q, D]
    ds = p * (dout @ v[:, :, None].mT - delta) / math.sqrt(q.shape[-1])
    dq = (ds @ k[:, :, None]).flatten(1, 2)  # [B, K, N/K, Q, D] -> [B, N, Q, D]
    # a key head collects from all query heads that read it: [B, K, N/K, S, D] -> [B, K, S, D]
    dk = (ds.mT @ q).sum(2)
    dv = (p.mT @ dout).sum(2)
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


PLAIN = Kernel("plain", _plain_forward, _plain_backward)


# ---- PyTorch's fused kernels, brought to one signature


def _cpu_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Tensors2:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)


def _cpu_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
) -> Tensors3:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse, 0.0, causal
    )


def _flash_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Tensors2:
    k, v = _one_per_query_head(q, k, v)
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]


def _flash_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
) -> Tensors3:
    kv_heads = k.shape[1]
    k, v = _one_per_query_head(q, k, v)
    # state of the random numbers of dropout, which is off
    seed = torch.zeros(2, dtype=torch.int64, device=q.device)
    offset = torch.zeros(1, dtype=torch.int64, device=q.device)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        dout,
        q,
        k,
        v,
        out,
        lse.contiguous(),
        None,  # cumulative lengths, for sequences packed into one
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        causal,
        seed,
        offset,
    )
    return dq, _summed_by_group(dk, kv_heads), _summed_by_group(dv, kv_heads)


def _efficient_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Tensors2:
    k, v = _one_per_query_head(q, k, v)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, None, True, 0.0, causal
    )
    return out, lse[..., : q.shape[2]]  # the kernel rounds its rows up to a multiple of 32


def _efficient_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
) -> Tensors3:
    kv_heads = k.shape[1]
    queries = q.shape[2]
    k, v = _one_per_query_head(q, k, v)
    # the rounded-up rows get the weight exp(s - inf) = 0
    lse = F.pad(lse, (0, -queries % 32), value=math.inf)
    # state of the random numbers of dropout, which is off
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    offset = torch.zeros((), dtype=torch.int64, device=q.device)
    dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        dout,
        q,
        k,
        v,
        None,  # no bias on the scores
        out,
        lse.contiguous(),
        seed,
        offset,
        0.0,
        (True, True, True, False),  # gradients of q, k and v, but of no bias
        causal,
    )
    return dq, _summed_by_group(dk, kv_heads), _summed_by_group(dv, kv_heads)


def _one_per_query_head(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors2:
    """K and V repeated for each query head that reads them, [B, N, S, D].

    Not every GPU kernel knows groups of query heads.
    """
    if k.shape[1] == q.shape[1]:
        return k, v
    queries_per_kv = q.shape[1] // k.shape[1]
    return k.repeat_interleave(queries_per_kv, 1), v.repeat_interleave(queries_per_kv, 1)


def _summed_by_group(grad: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """The backward of `_one_per_query_head`: [B, N, S, D] -> [B, K, S, D], in `wide_dtype`."""
    if grad.shape[1] == kv_heads:
        return grad
    groups = grad.unflatten(1, (kv_heads, -1))  # [B, K, N/K, S, D]
    return groups.sum(2, dtype=wide_dtype(grad.dtype)).to(grad.dtype)


# {kind of device: the fused kernels that it may have, the fastest first}
FUSED: dict[str, tuple[Kernel, ...]] = {
    "cpu": (Kernel("flash", _cpu_forward, _cpu_backward),),
    "cuda": (
        Kernel("flash", _flash_forward, _flash_backward),  # float16 and bfloat16
        Kernel("memory-efficient", _efficient_forward, _efficient_backward),  # float32 too
    ),
}


# ---- the choice of a kernel


def fastest_kernel(q: torch.Tensor, k: torch.Tensor) -> Kernel:
    """The first fused kernel that works for tensors like these, or the plain one.

    Args:
        q: [B, N, Q, D]
        k: [B, K, S, D]
    """
    return _fastest(q.device.type, q.dtype, q.shape[-1], q.shape[1] != k.shape[1])


@lru_cache
def _fastest(device: str, dtype: torch.dtype, head_size: int, grouped: bool) -> Kernel:
    # The examples have two query heads, so one key/value head makes them grouped.
    kv_heads = 1 if grouped else 2
    for kernel in FUSED.get(device, ()):
        if _agrees(kernel, device, dtype, head_size, kv_heads):
            return kernel
    return PLAIN


def _agrees(kernel: Kernel, device: str, dtype: torch.dtype, head_size: int, kv_heads: int) -> bool:
    """Whether a kernel runs and gives the numbers of the plain kernel, on two small examples."""
    for queries, keys, causal in ((4, 4, True), (3, 5, False)):
        query_shape = (1, 2, queries, head_size)
        key_shape = (1, kv_heads, keys, head_size)
        q = _example(1, query_shape, device, dtype)
        dout = _example(2, query_shape, device, dtype)
        k = _example(3, key_shape, device, dtype)
        v = _example(4, key_shape, device, dtype)
        try:
            found = _forward_backward(kernel, dout, q, k, v, causal)
        except (RuntimeError, TypeError, AttributeError):
            return False  # no such function, another signature, or it refuses
        expected = _forward_backward(PLAIN, dout, q, k, v, causal)
        if not _is_close(found, expected):
            return False
    return True


def _example(seed: int, shape: tuple[int, ...], device: str, dtype: torch.dtype) -> torch.Tensor:
    """Some values, but no random ones: a model that draws random numbers must not notice."""
    steps = torch.arange(seed, seed + math.prod(shape), device=device)
    return steps.mul(0.7).sin().view(shape).to(dtype)


def _forward_backward(
    kernel: Kernel,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
) -> tuple[torch.Tensor, ...]:
    """Both directions of a kernel: out, lse, dq, dk, dv."""
    out, lse = kernel.forward(q, k, v, causal)
    return (out, lse, *kernel.backward(dout, q, k, v, out, lse, causal))


def _is_close(found: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> bool:
    """Whether all shapes and numbers are the same.

    The tolerance is far above rounding, and far below what another meaning would give, such as a
    logarithm to the base of 2.
    """
    for a, b in zip(found, expected):
        if a.shape != b.shape:
            return False
        if not torch.allclose(a.to(b.dtype), b, rtol=0.05, atol=0.05):
            return False
    return True
