"""Context parallelism: the sequence is cut over the ranks of a group, attention joins its parts.

Everything else in a layer treats each token separately and needs no change; only attention looks at
other tokens. There are two ways:

    gather   every rank collects K and V of the whole sequence, and computes its own queries over
             them
    ring     K and V travel from rank to rank; each rank computes its queries over the part that is
             here, and merges the result into what it has

Under a causal mask late queries see more keys than early ones. Of 2p chunks, rank r therefore takes
chunks r and 2p-1-r ("zigzag"): one early, one late, and every rank has the same work. "contiguous"
gives rank r the r-th of p chunks. For p = 2 and a sequence of 8 tokens:

    tokens        0 1 | 2 3 | 4 5 | 6 7        scores that a rank computes under a causal mask
    zigzag        r0    r1    r1    r0         18 on each rank
    contiguous    r0    r0    r1    r1         10 on rank 0, 26 on rank 1

The ring moves on when its slowest rank is done. With (S/p)^2 scores as one unit of time, a step
costs 1/2 under zigzag, p/2 in all. Under "contiguous" the first step costs 1/2 and the others 1,
because some rank always computes a whole block: p - 1/2 in all, nearly twice as long for a large p.

Shapes: B samples, S tokens of the whole sequence, S/p those of this rank (parts may be uneven), N
query heads, K key/value heads (K divides N), D features of a head. p is the size of the group, e
the number of bytes of an element.
Source: the zigzag order is that of the ring-flash-attention project; the idea of giving each rank
early and late tokens is that of Brandon et al. 2023 (arXiv:2311.09431).
Held by: tests/ranks/test_context.py::test_the_parts_cover_the_sequence_once
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from labcode.comm import collectives
from labcode.comm.ring import start_exchange
from labcode.parallel.attention_block import (
    Kernel,
    VisibleBlock,
    count_tokens,
    fastest_kernel,
    merge,
    own_chunks,
    visible_block,
    wide_dtype,
)


def take_own(x: torch.Tensor, group: dist.ProcessGroup, dim: int, layout: str) -> torch.Tensor:
    """This rank's part of a whole tensor along `dim`: `[.., S, ..]` to `[.., S/p, ..]`.

    Communicates: nothing. Its backward leaves zeros where other ranks' tokens are.
    """
    runs = own_chunks(x.shape[dim], dist.get_world_size(group), dist.get_rank(group), layout)
    if count_tokens(runs) == x.shape[dim]:
        return x
    # [.., S, ..] -> [.., S/p, ..], one or two runs joined: a copy. Slices, not index_select: a GPU
    # would have to wait for an index tensor made on the host.
    return torch.cat([x.narrow(dim, run.start, len(run)) for run in runs], dim)


def _tokens_per_rank(length: int, group_size: int, layout: str) -> list[int]:
    """How many of `length` tokens each rank holds."""
    tokens = []
    for rank in range(group_size):
        tokens.append(count_tokens(own_chunks(length, group_size, rank, layout)))
    return tokens


class _ContextAttention(nn.Module):
    """What both ways have in common: the settings of the attention they replace, and S."""

    def __init__(self, core: nn.Module, group: dist.ProcessGroup, layout: str) -> None:
        super().__init__()
        # nn.Module declares its attributes as tensors and modules only
        self.causal = cast(bool, core.causal)
        self.dropout = cast(float, core.dropout)
        self.group = group
        self.layout = layout
        self.length: int | None = None
        own_chunks(0, 1, 0, layout)  # raises for an unknown layout, before a forward would

    def _whole_length(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> int:
        """S, from `.length` if it is set, and else the sum of what the ranks hold.

        Communicates: nothing if `.length` is set; otherwise an all-gather of 8 bytes per rank.
        """
        assert k.shape == v.shape and q.shape[1] % k.shape[1] == 0, (
            f"no attention of {q.shape} over {k.shape}, {v.shape}"
        )
        tokens = q.shape[2]
        assert tokens == k.shape[2], (
            f"{tokens} queries but {k.shape[2]} keys: both are one part of one sequence"
        )
        # Wrong parts would not fail by themselves: the positions of the keys, and so the causal
        # mask, are worked out from S and the layout, and never looked up in the data.
        if self.length is None:
            held = self._ask_all_ranks(tokens, q.device)
            length = sum(held.values())
        else:
            held = {dist.get_rank(self.group): tokens}
            length = self.length
        due = _tokens_per_rank(length, dist.get_world_size(self.group), self.layout)
        if any(due[rank] != tokens for rank, tokens in held.items()):
            raise ValueError(
                f"of {length} tokens in layout {self.layout} the ranks hold {due} "
                f"but {held} (rank: tokens) were found: cut the whole sequence with take_own"
            )
        return length

    def _ask_all_ranks(self, tokens: int, device: torch.device) -> dict[int, int]:
        """{rank: how many tokens it holds}. On a GPU this waits for all work that is queued."""
        own = torch.full((1,), tokens, dtype=torch.int64, device=device)
        found = [torch.zeros_like(own) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(found, own, group=self.group)
        return dict(enumerate(torch.cat(found).tolist()))

    def extra_repr(self) -> str:
        ranks = dist.get_world_size(self.group)
        return f"causal={self.causal}, layout={self.layout!r}, {ranks} ranks"


def tell_length(model: nn.Module, length: int) -> None:
    """Set S for the calls to come: `.length` of every attention that this module put in a model."""
    for module in model.modules():
        if isinstance(module, _ContextAttention):
            module.length = length


class GatherAttention(_ContextAttention):
    """Attention of this rank's queries over K and V from all ranks; replaces a `CoreAttention`.

        out = softmax(q K^T / sqrt(D)) V, with K, V [B, K, S, D] of the whole sequence

    It is simple and sends few messages, which are small where K is much smaller than N. But nothing
    is computed while they travel, and memory does not shrink with p: until its backward is done,
    each rank holds K and V of the whole sequence, `2 B K S D e` bytes, and, if causal, a mask of
    its queries over the keys, about `S^2/(2p)` elements that PyTorch keeps in the dtype of q.
    A mask hides scores after they have been computed. Causal and zigzag, those are `(2p+1)/(2p)` of
    the scores that the ring computes.

    Communicates: forward one all-gather, backward one reduce-scatter, each `2 (p-1) B K S/p D e`
        bytes per rank (of the longest part, where parts are uneven); and 8 bytes per rank for the
        lengths, unless `.length` is set.
    Held by: tests/ranks/test_context.py::test_output_and_gradients_equal_those_of_one_process,
        test_gather_sends_the_bytes_of_its_formula

    Args:
        core: Its `.causal` and `.dropout` are taken over. Each rank drops with its own random
            numbers.
        group: The ranks that share the sequence.
        layout: "zigzag" or "contiguous", as `take_own` cut it.

    Attributes:
        length: S; None: the ranks tell each other their parts in every call, and a GPU has to be
            waited for.

    Raises:
        ValueError: An unknown layout; in forward, parts that are not those of the layout.

    Source: Dubey et al. 2024, Llama 3 (arXiv:2407.21783), section 3.3.2.
    """

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Args: q [B, N, S/p, D]; k, v [B, K, S/p, D]. Returns [B, N, S/p, D]."""
        length = self._whole_length(q, k, v)
        size = dist.get_world_size(self.group)
        runs_of = [own_chunks(length, size, rank, self.layout) for rank in range(size)]
        longest = max(count_tokens(runs) for runs in runs_of)

        kv = torch.stack((k, v))  # [2, B, K, S/p, D]: one collective for both
        # equal parts, as a collective wants them: [2, B, K, longest, D]
        kv = F.pad(kv, (0, 0, 0, longest - k.shape[2]))
        # Its backward is a reduce-scatter: every rank's queries have used the whole K and V, and a
        # key's gradient is the sum over all of them. What is gathered has no name, so that it is
        # gone, once it is in order, before attention needs memory: [2, B, K, p * longest, D]
        whole = _in_order(collectives.all_gather(kv, self.group, 3), runs_of, longest)
        whole_k, whole_v = whole.unbind(0)  # [B, K, S, D]
        if not self.causal:
            return self._attend(q, whole_k, whole_v)

        # One call for each run of positions, two under zigzag. A single call over all own queries
        # would need the keys up to the last of them, and compute scores for the early run that its
        # mask then hides.
        own_runs = runs_of[dist.get_rank(self.group)]
        parts = []
        for run, queries in zip(own_runs, q.split([len(run) for run in own_runs], dim=2)):
            parts.append(self._attend_causally(run, queries, whole_k, whole_v))
        return torch.cat(parts, dim=2)

    def _attend_causally(
        self, run: range, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Attention of the queries at the positions of `run`, over the keys up to its end.

        Scores of later keys are not computed.
        """
        # A mask, not is_causal: PyTorch's flag aligns the triangle with the first key, as if the
        # queries began at position 0. Its price is the mask, and a kernel that takes one.
        query_positions = torch.arange(run.start, run.stop, device=q.device)
        key_positions = torch.arange(0, run.stop, device=q.device)
        visible = key_positions <= query_positions[:, None]  # [len(run), run.stop]
        return self._attend(q, k[:, :, : run.stop], v[:, :, : run.stop], visible)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        dropout = self.dropout if self.training else 0.0
        is_grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, enable_gqa=is_grouped)


def _in_order(
    gathered: torch.Tensor, runs_of: Sequence[Sequence[range]], longest: int
) -> torch.Tensor:
    """The parts of all ranks in the order of the sequence, without their padding.

    Args:
        gathered: [2, B, K, p * longest, D]
        runs_of: The runs of positions of each rank.
        longest: The tokens that each rank has in `gathered`, with padding.

    Returns:
        [2, B, K, S, D]
    """
    # (first position in the sequence, first place in the gathered tensor, length) of each chunk
    pieces = []
    for rank, runs in enumerate(runs_of):
        place = rank * longest
        for run in runs:
            pieces.append((run.start, place, len(run)))
            place += len(run)
    pieces.sort()
    return torch.cat([gathered.narrow(3, place, tokens) for _, place, tokens in pieces], 3)


class RingAttention(_ContextAttention):
    """Attention of this rank's queries over K and V that go round; replaces a `CoreAttention`.

    Each block gives an output and the logarithm of its softmax denominator, and is merged into what
    the blocks before it gave (online softmax):

        lse' = log(exp(lse) + exp(lse_b))      out' = out + exp(lse_b - lse') (out_b - out)

    The part for the next step travels while this one is computed. A rank holds two parts of K and V
    at a time and saves its own q, k, v, out and lse: memory of O(S/p). In the backward K and V go
    round once more. The sums of dK and dV follow them one step behind, and are complete when they
    come home. Statistics and sums are float32 or wider, whatever the dtype of q.

    Communicates: forward p-1 messages of one part of K and V, `2 (p-1) B K S/p D e` bytes per rank;
        backward the same again, and p-1 messages of dK and dV in the wide dtype (4 bytes, or 8), of
        which the last has nothing left to hide behind; and 8 bytes per rank for the lengths, unless
        `.length` is set. Uneven parts travel as they are, without padding.
    Held by: tests/ranks/test_context.py::test_output_and_gradients_equal_those_of_one_process,
        test_ranks_send_the_bytes_of_the_formula,
        test_the_next_part_travels_while_a_block_is_computed

    Args:
        core: Its `.causal` is taken over.
        group: The ranks that share the sequence, a ring in their order.
        layout: "zigzag" or "contiguous", as `take_own` cut it. Both give the right result; causal
            and contiguous, the first rank is idle in most steps while the last one never is.
        kernel: What computes a block; None: the fastest one for the tensors of the call.

    Attributes:
        length: S; None: the ranks tell each other their parts in every call, and a GPU has to be
            waited for.

    Raises:
        ValueError: Dropout on the attention weights; an unknown layout; in forward, parts that are
            not those of the layout.

    Source: Liu et al. 2023 (arXiv:2310.01889); Milakov and Gimelshein 2018 (arXiv:1805.02867) for
        the online softmax; Dao 2023 (arXiv:2307.08691), section 3.1, for the backward from the
        logsumexp alone.
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
        if self.dropout > 0:
            raise ValueError(
                f"ring attention keeps no attention weights to drop but dropout is {self.dropout}: "
                "use GatherAttention (--parallel.context_attention all_gather) or set dropout 0"
            )

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Args: q [B, N, S/p, D]; k, v [B, K, S/p, D]. Returns [B, N, S/p, D]."""
        length = self._whole_length(q, k, v)
        size = dist.get_world_size(self.group)
        rank = dist.get_rank(self.group)
        blocks = []
        for source in range(size):
            blocks.append(visible_block(length, size, rank, source, self.layout, self.causal))
        plan = _RingPlan(
            group=self.group,
            rank=rank,
            size=size,
            tokens=_tokens_per_rank(length, size, self.layout),
            blocks=blocks,
            kernel=self.kernel or fastest_kernel(q, k),
        )
        return _Ring.apply(q, k, v, plan)


class _RingPlan(NamedTuple):
    """All that a trip round the ring needs besides the tensors.

    Args:
        group: The ranks of the ring.
        rank: This one.
        size: p
        tokens: How many tokens each source rank holds.
        blocks: What this rank computes with the keys of each source rank; None: nothing.
        kernel: What computes a block.
    """

    group: dist.ProcessGroup
    rank: int
    size: int
    tokens: list[int]
    blocks: list[VisibleBlock | None]
    kernel: Kernel


class _BlockGrads(NamedTuple):
    """This rank's terms of the gradients, from one block."""

    block: VisibleBlock
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


class _Ring(torch.autograd.Function):
    """Both directions of ring attention, written by hand.

    Left to autograd, the forward would keep every part of K and V that came by, and so hold the
    whole sequence. Here each rank saves its own tensors alone, and the backward sends K and V round
    a second time.

    Autocast is off inside: it would narrow what is wide on purpose.
    """

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: _RingPlan
    ) -> torch.Tensor:
        wide = wide_dtype(q.dtype)
        batch, heads, tokens, head_size = q.shape
        # [B, N, S/p, D] in the memory order of [B, S/p, N, D]: the kernels write their output in
        # this order, and the projection after attention reads it without a copy. It is wide because
        # p blocks are added to it: in bfloat16 each merge would round once more.
        out = q.new_zeros((batch, tokens, heads, head_size), dtype=wide).transpose(1, 2)
        # No key has been seen yet: exp(-inf) = 0 is the sum over none of them.
        lse = q.new_full((batch, heads, tokens), -torch.inf, dtype=wide)  # [B, N, S/p]
        with torch.autocast(q.device.type, enabled=False):
            for source, (k_here, v_here) in _travel(plan, torch.stack((k, v))):
                block = plan.blocks[source]
                if block is None:
                    continue  # all keys of this source are later than all queries of this rank
                queries, keys, causal = block
                out_b, lse_b = plan.kernel.forward(
                    q[:, :, queries], k_here[:, :, keys], v_here[:, :, keys], causal
                )
                # The slices are views, so this changes out and lse. The own block comes first and
                # gives each query at least one key, so an lse of -inf meets a finite lse_b and is
                # never subtracted from another -inf, which would be NaN.
                merge(out[:, :, queries], lse[:, :, queries], out_b, lse_b)
        out = out.to(q.dtype)
        # Kept for backward: this rank's q, k, v, out and lse, O(S/p). The weights of attention are
        # computed again from q, k and lse, as FlashAttention does.
        ctx.plan = plan
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """K and V go round again, and the sums of dK and dV one step behind them.

        For p = 4, on rank r. "K(s)" is the part of source s, "sum(s)" its sum of dK and dV:

            step   here     the sum that this rank adds to
            0      K(r)     sum(r), started as zeros; it stays here
            1      K(r-1)   sum(r-1), started as zeros: this is the first stop of K(r-1)
            2      K(r-2)   sum(r-2), from rank r-1, which was the first to add to it
            3      K(r-3)   sum(r-3), from rank r-1
            after  -        sum(r) from rank r-1, with the terms of all other ranks

        A sum could also travel together with its K and V. It would then have to wait for the terms
        of the block that is being computed. One step behind, it has all the time of the block to
        arrive: it is needed only when the block's own terms are added to it.
        """
        plan = ctx.plan
        q, k, v, out, lse = ctx.saved_tensors
        wide = wide_dtype(q.dtype)
        if dout.stride(-1) != 1:
            # sum() hands down one number, spread by strides of 0, and the fused kernels read
            # the features of a head as neighbours
            dout = dout.contiguous()
        dq = torch.zeros_like(q, dtype=wide)
        own = None  # sum(r), the sum of this rank's own part
        travelling = None  # the sum of the part that was here in the last step
        with torch.autocast(q.device.type, enabled=False):
            for source, kv_here in _travel(plan, torch.stack((k, v))):
                # Start the messages first, so that they travel while the block is computed. Two
                # messages are then under way to the same neighbour, the next K and V and this sum.
                # They carry no tag and match in the order in which they were posted, which is the
                # same on all ranks: `_travel` posts before it yields.
                works = []
                sums = None  # [2, B, K, S/p, D], for the part that is here
                if travelling is not None:
                    works, sums = _pass_on(plan, travelling, kv_here.shape)
                grads = _block_grads(plan, source, dout, q, kv_here, out, lse)
                if grads is not None:
                    dq[:, :, grads.block.queries] += grads.dq
                _wait(works)
                if sums is None:
                    # Not earlier: zeros need not arrive, and the kernel above needs the memory.
                    sums = q.new_zeros(kv_here.shape, dtype=wide)
                if grads is not None:
                    sums[0][:, :, grads.block.keys] += grads.dk
                    sums[1][:, :, grads.block.keys] += grads.dv
                if source == plan.rank:
                    own = sums  # stays: what the others add comes home in the end
                else:
                    travelling = sums
            assert own is not None, "a rank's own part is the first stop of its trip"
            if travelling is not None:
                # Nothing is left to compute meanwhile.
                works, home = _pass_on(plan, travelling, own.shape)
                _wait(works)
                own += home
        dk, dv = own  # [2, B, K, S/p, D] -> two of [B, K, S/p, D]
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


def _block_grads(
    plan: _RingPlan,
    source: int,
    dout: torch.Tensor,
    q: torch.Tensor,
    kv_here: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> _BlockGrads | None:
    """What this rank's queries give to dq, dk and dv over the keys of `source`; None: no block.

    `out` and `lse` are those over all keys. That makes the block's gradients terms of the whole
    sums (see `attention_block`), and no block needs to know of another.
    """
    block = plan.blocks[source]
    if block is None:
        return None
    queries, keys, causal = block
    k_here, v_here = kv_here  # [2, B, K, S/p, D] -> two of [B, K, S/p, D]
    dq, dk, dv = plan.kernel.backward(
        dout[:, :, queries],
        q[:, :, queries],
        k_here[:, :, keys],
        v_here[:, :, keys],
        out[:, :, queries],
        lse[:, :, queries],
        causal,
    )
    return _BlockGrads(block, dq, dk, dv)


def _travel(plan: _RingPlan, kv: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """The parts of K and V as they come by, this rank's own first.

    Parts move from rank to rank + 1, so after `step` steps the part of rank - step is here. The
    next one arrives while the caller uses this one. Both are in memory then, so the caller must not
    keep a part beyond its step.

    Communicates: p-1 messages of one part.

    Args:
        plan: The ring.
        kv: K and V of this rank, [2, B, K, S/p, D].

    Yields:
        (source rank, K and V of its tokens)
    """
    for step in range(plan.size):
        source = (plan.rank - step) % plan.size
        if step + 1 == plan.size:
            yield source, kv  # the last stop: this part has been everywhere
            return
        next_source = (source - 1) % plan.size
        next_shape = (*kv.shape[:3], plan.tokens[next_source], kv.shape[4])
        works, arriving = _pass_on(plan, kv, next_shape)
        yield source, kv
        # The send is waited for as well: `kv` must not be freed before it has left.
        _wait(works)
        kv = arriving


def _pass_on(
    plan: _RingPlan, tensor: torch.Tensor, shape: Sequence[int]
) -> tuple[list[dist.Work], torch.Tensor]:
    """Start to send `tensor` to the next rank and to receive one of `shape` from the one before.

    Returns:
        (the works to wait for, the tensor in which the message arrives)
    """
    arriving = tensor.new_empty(shape)
    to = (plan.rank + 1) % plan.size
    source = (plan.rank - 1) % plan.size
    return start_exchange(tensor, to, arriving, source, plan.group), arriving


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()
