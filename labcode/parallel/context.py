"""Context parallelism: the sequence is cut over the ranks of a group, and attention brings its parts together.

Everything else in a layer treats each token apart and needs nothing; only attention looks at other tokens. Two ways:

    gather   every rank collects K and V of the whole sequence, and computes its own queries over them
    ring     K and V travel from rank to rank; each rank computes its queries over the part that is here, and merges

Under a causal mask late queries see more keys than early ones. Of 2p chunks, rank r therefore takes chunk r and chunk
2p-1-r ("zigzag"): one early, one late, the same work for all. "contiguous" gives rank r the r-th of p chunks.

Shapes: B samples, S tokens of the whole sequence, S/p those of this rank (uneven parts allowed), N query heads, K key/value
heads (K divides N), D features of a head. p is the group's size, e the bytes of a number.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from labcode.comm import collectives
from labcode.parallel.attention_block import (
    Block,
    Kernel,
    fastest_kernel,
    merge,
    own_chunks,
    visible_block,
    wide_dtype,
)


def own_positions(length: int, group_size: int, index: int, layout: str) -> torch.Tensor:
    """Global positions of the tokens that rank `index` holds, ascending, int64 `[S/p]` on the CPU.

    Source: the zigzag order is that of the ring-flash-attention project; the idea of giving each rank early and late tokens
        is that of Brandon et al. 2023 (arXiv:2311.09431).
    Held by: tests/ranks/test_context.py::test_the_parts_cover_the_sequence_once
    """
    return torch.cat(
        [torch.arange(run.start, run.stop) for run in own_chunks(length, group_size, index, layout)]
    )


def take_own(x: torch.Tensor, group: dist.ProcessGroup, dim: int, layout: str) -> torch.Tensor:
    """This rank's part of a whole tensor along `dim`: `[.., S, ..]` to `[.., S/p, ..]`.

    Communicates: nothing. Its backward leaves zeros where other ranks' tokens are.
    """
    runs = own_chunks(x.shape[dim], dist.get_world_size(group), dist.get_rank(group), layout)
    if sum(map(len, runs)) == x.shape[dim]:
        return x
    # slices, not index_select: an index tensor made on the host would have to be waited for by a GPU
    return torch.cat([x.narrow(dim, run.start, len(run)) for run in runs], dim)


class _ContextAttention(nn.Module):
    """What both ways have in common: the settings of the attention they replace, and who holds how much."""

    def __init__(self, core: nn.Module, group: dist.ProcessGroup, layout: str) -> None:
        super().__init__()
        self.causal, self.dropout, self.group, self.layout = (
            core.causal,
            core.dropout,
            group,
            layout,
        )
        self.length: int | None = None
        own_chunks(0, 1, 0, layout)  # refuses an unknown layout here, where it enters

    def _length(self, q, k, v):
        """S: as told, or else as the ranks tell each other."""
        size, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        assert k.shape == v.shape and q.shape[1] % k.shape[1] == 0, (
            f"no attention of {q.shape} over {k.shape}, {v.shape}"
        )
        assert q.shape[2] == k.shape[2], (
            f"{q.shape[2]} queries but {k.shape[2]} keys: both are one part of one sequence"
        )
        held = {rank: q.shape[2]}
        if self.length is None:
            found = [torch.zeros(1, dtype=torch.int64, device=q.device) for _ in range(size)]
            dist.all_gather(found, torch.full_like(found[0], q.shape[2]), group=self.group)
            held = dict(enumerate(torch.cat(found).tolist()))
        length = sum(held.values()) if self.length is None else self.length
        due = [sum(map(len, own_chunks(length, size, r, self.layout))) for r in range(size)]
        if any(due[r] != tokens for r, tokens in held.items()):
            raise ValueError(
                f"of {length} tokens in layout {self.layout} the ranks hold {due} "
                f"but {held} (rank: tokens) were found: cut the whole sequence with take_own"
            )
        return length

    def extra_repr(self):
        return (
            f"causal={self.causal}, layout={self.layout!r}, {dist.get_world_size(self.group)} ranks"
        )


def tell_length(model: nn.Module, length: int) -> None:
    """Set `.length` in every attention of a model that this module has put there: S of the calls to come."""
    for module in model.modules():
        if isinstance(module, _ContextAttention):
            module.length = length


class GatherAttention(_ContextAttention):
    """Attention of this rank's queries over K and V gathered from all ranks; replaces a `CoreAttention`.

        out = softmax(q K^T / sqrt(D)) V, with K, V [B, K, S, D] of the whole sequence

    Simple, and few messages; but each rank holds K and V of the whole sequence until its backward is done, `2 B K S D e`
    bytes whatever p is, and causal a mask of its queries over the keys, about `S^2/(2p)` numbers that PyTorch keeps in the
    dtype of q; and nothing is computed while they travel. Where K is much smaller than N, messages are small. A mask hides
    scores after they are computed: causal and zigzag, `(2p+1)/(2p)` of those of the ring.

    Communicates: forward one all-gather, backward one reduce-scatter, each `2 (p-1) B K S/p D e` bytes per rank (of the
        longest part, where parts are uneven); and 8 bytes per rank for the lengths, unless `.length` is set.
    Held by: tests/ranks/test_context.py::test_output_and_gradients_equal_those_of_one_process,
        test_gather_sends_the_bytes_of_its_formula

    Args:
        core: Its `.causal` and `.dropout` are taken over. Each rank drops with its own random numbers.
        group: The ranks that share the sequence.
        layout: "zigzag" or "contiguous", as `take_own` cut it.

    Attributes:
        length: S; None: the ranks tell each other their parts in every call, for which a GPU has to be waited for.

    Raises:
        ValueError: An unknown layout; in forward, parts that are not those of the layout.

    Source: Dubey et al. 2024, Llama 3 (arXiv:2407.21783), section 3.3.2.
    """

    def forward(self, q, k, v):
        """Args: q [B, N, S/p, D]; k, v [B, K, S/p, D]. Returns [B, N, S/p, D]."""
        length = self._length(q, k, v)
        size, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        held = [own_chunks(length, size, r, self.layout) for r in range(size)]
        longest = max(sum(map(len, runs)) for runs in held)
        kv = F.pad(
            torch.stack((k, v)), (0, 0, 0, longest - k.shape[2])
        )  # equal parts, as a collective wants them
        kv = collectives.all_gather(kv, self.group, 3)  # [2, B, K, p * longest, D]
        pieces = []  # (first position in the sequence, first place in the gathered tensor, length) of each chunk
        for r, runs in enumerate(held):
            places = itertools.accumulate((len(run) for run in runs), initial=r * longest)
            pieces += [(run.start, place, len(run)) for run, place in zip(runs, places)]
        kv = torch.cat([kv.narrow(3, place, tokens) for _, place, tokens in sorted(pieces)], 3)
        k, v = kv.unbind(0)  # [B, K, S, D] in the order of the sequence
        if not self.causal:
            return self._attend(q, k, v)
        runs = held[rank]
        parts = zip(runs, q.split([len(run) for run in runs], dim=2))
        return torch.cat([self._attend_causally(run, part, k, v) for run, part in parts], dim=2)

    def _attend_causally(self, run, q, k, v):
        """Queries at the positions of `run`, over the keys up to its end: later ones are not even computed."""
        query, key = (torch.arange(start, run.stop, device=q.device) for start in (run.start, 0))
        return self._attend(q, k[:, :, : run.stop], v[:, :, : run.stop], key <= query[:, None])

    def _attend(self, q, k, v, mask=None):
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(
            q, k, v, mask, dropout, enable_gqa=q.shape[1] != k.shape[1]
        )


class RingAttention(_ContextAttention):
    """Attention of this rank's queries over K and V that travel round the ring of ranks; replaces a `CoreAttention`.

    Each block gives an output and the logarithm of its softmax denominator, and merges into what is there (online softmax):

        lse' = log(exp(lse) + exp(lse_b))      out' = out + exp(lse_b - lse') (out_b - out)

    The part for the next step travels while this one is computed. A rank holds two parts of K and V at a time and saves its
    own q, k, v, out and lse: memory of O(S/p). In the backward K and V go round once more, and behind them the sums of dK
    and dV, which arrive at home complete. Statistics and sums are float32 or wider, whatever the dtype of q.

    Communicates: forward p-1 messages of one part of K and V, `2 (p-1) B K S/p D e` bytes per rank; backward the same again
        and p-1 messages of dK and dV in the wide dtype (4 bytes, or 8), the last of them with nothing left to compute
        meanwhile; and 8 bytes per rank for the lengths, unless `.length` is set. Uneven parts travel as they are.
    Held by: tests/ranks/test_context.py::test_output_and_gradients_equal_those_of_one_process,
        test_ranks_send_the_bytes_of_the_formula, test_the_next_part_travels_while_a_block_is_computed

    Args:
        core: Its `.causal` is taken over.
        group: The ranks that share the sequence, a ring in their order.
        layout: "zigzag" or "contiguous", as `take_own` cut it. Both are right; causal and contiguous, the first rank has
            nothing to do in most steps while the last one never rests.
        kernel: What computes a block; None: the fastest one for the tensors of the call.

    Attributes:
        length: S; None: the ranks tell each other their parts in every call, for which a GPU has to be waited for.

    Raises:
        ValueError: Dropout on the attention weights; an unknown layout; in forward, parts that are not those of the layout.

    Source: Liu et al. 2023 (arXiv:2310.01889); Milakov and Gimelshein 2018 (arXiv:1805.02867) for the online softmax; Dao
        2023 (arXiv:2307.08691), section 3.1, for the backward from the logsumexp alone.
    """

    def __init__(
        self,
        core: nn.Module,
        group: dist.ProcessGroup,
        layout: str,
        *,
        kernel: Kernel | None = None,
    ) -> None:
        super().__init__(core, group, layout)
        self.kernel = kernel
        if core.dropout > 0:
            raise ValueError(
                f"ring attention keeps no attention weights to drop but dropout is {core.dropout}: "
                "use GatherAttention (context gather) or set dropout 0"
            )

    def forward(self, q, k, v):
        """Args: q [B, N, S/p, D]; k, v [B, K, S/p, D]. Returns [B, N, S/p, D]."""
        size, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        length = self._length(q, k, v)
        tokens = [sum(map(len, own_chunks(length, size, r, self.layout))) for r in range(size)]
        blocks = [
            visible_block(length, size, rank, source, self.layout, self.causal)
            for source in range(size)
        ]
        return _Ring.apply(
            q,
            k,
            v,
            _Plan(self.group, rank, size, tokens, blocks, self.kernel or fastest_kernel(q, k)),
        )


class _Plan(NamedTuple):
    """All but the tensors: `tokens` and `blocks` by source rank."""

    group: dist.ProcessGroup
    rank: int
    size: int
    tokens: list[int]
    blocks: list[Block | None]
    kernel: Kernel


class _Ring(torch.autograd.Function):
    """Both directions of ring attention. Autocast is off inside: it would narrow what is wide on purpose."""

    @staticmethod
    def forward(ctx, q, k, v, plan):
        wide = wide_dtype(q.dtype)
        batch, heads, tokens, head_size = q.shape
        # [B, N, S/p, D] in the memory order of [B, S/p, N, D], in which the layer goes on and the kernels write
        out = q.new_zeros((batch, tokens, heads, head_size), dtype=wide).transpose(1, 2)
        lse = q.new_full((batch, heads, tokens), -torch.inf, dtype=wide)
        with torch.autocast(q.device.type, enabled=False):
            for source, (k_here, v_here) in _travel(plan, torch.stack((k, v))):
                if block := plan.blocks[source]:
                    queries, keys, causal = block
                    part = plan.kernel.forward(
                        q[:, :, queries], k_here[:, :, keys], v_here[:, :, keys], causal
                    )
                    merge(out[:, :, queries], lse[:, :, queries], *part)
        out = out.to(q.dtype)
        ctx.plan = plan
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        plan, (q, k, v, out, lse) = ctx.plan, ctx.saved_tensors
        wide = wide_dtype(q.dtype)
        dout = (
            dout if dout.stride(-1) == 1 else dout.contiguous()
        )  # sum() hands down one number, spread by strides of 0
        dq = torch.zeros_like(q, dtype=wide)
        own = travelling = (
            None  # sums of (dk, dv): of this rank's part, and of the part that was here in the last step
        )
        with torch.autocast(q.device.type, enabled=False):
            for source, (k_here, v_here) in _travel(plan, torch.stack((k, v))):
                shape = (2, *k_here.shape)
                # a sum starts as zeros here, for one's own part, and at the first stop of a part; then it follows its part
                works, sums = (
                    ([], None) if travelling is None else _pass_on(plan, travelling, shape)
                )
                grads = None
                if block := plan.blocks[source]:
                    queries, keys, causal = block
                    rows = (x[:, :, queries] for x in (dout, q))
                    columns = (x[:, :, keys] for x in (k_here, v_here))
                    saved = (x[:, :, queries] for x in (out, lse))
                    dq_block, *grads = plan.kernel.backward(*rows, *columns, *saved, causal)
                    dq[:, :, queries] += dq_block
                _wait(works)
                sums = q.new_zeros(shape, dtype=wide) if sums is None else sums
                for total, term in zip(sums, grads or ()):
                    total[:, :, keys] += term
                if source == plan.rank:
                    own = sums  # stays: what the others add to it comes home in the end
                else:
                    travelling = sums
            if travelling is not None:
                works, home = _pass_on(plan, travelling, own.shape)
                _wait(works)
                own += home
        return dq.to(q.dtype), own[0].to(k.dtype), own[1].to(v.dtype), None


def _travel(plan: _Plan, kv: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """(source, K and V of it [2, B, K, S/p, D]) for each stop, one's own first; the next one arrives while one is used."""
    for step in range(plan.size):
        source = (plan.rank - step) % plan.size
        works, arriving = [], None
        if step + 1 < plan.size:
            works, arriving = _pass_on(
                plan, kv, (*kv.shape[:3], plan.tokens[source - 1], kv.shape[4])
            )
        yield source, kv
        _wait(works)
        kv = arriving


def _pass_on(plan, tensor, shape):
    """Send `tensor` to the next rank, receive one of `shape` from the one before: (works to wait for, where it arrives)."""
    arriving = tensor.new_empty(shape)
    ways = ((dist.isend, tensor, plan.rank + 1), (dist.irecv, arriving, plan.rank - 1))
    operations = [
        dist.P2POp(way, x, group=plan.group, group_peer=peer % plan.size)
        for way, x, peer in ways
        if x.numel()
    ]
    return dist.batch_isend_irecv(operations) if operations else [], arriving


def _wait(works):
    for work in works:
        work.wait()
