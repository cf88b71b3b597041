"""Ring and gather attention on 1, 2 and 4 ranks against one process's attention, in float64."""

import pytest
import torch

from labcode.models.layers import CoreAttention
from labcode.parallel import attention_block
from labcode.parallel.attention_block import (
    PLAIN,
    Kernel,
    fastest_kernel,
    own_chunks,
    visible_block,
)

# name: (B, N, K, S, D); odd lengths make parts of unequal length, and 3 tokens leave some of the 8
# chunks empty
SHAPES = {
    "even": (2, 4, 4, 16, 8),
    "odd": (3, 2, 2, 13, 5),
    "grouped": (3, 6, 2, 22, 7),
    "one key head": (1, 3, 1, 9, 4),
    "few tokens": (1, 2, 1, 3, 2),
}
CASES = [("zigzag", True), ("contiguous", True), ("zigzag", False), ("contiguous", False)]


@pytest.fixture(params=[1, 2, 4])
def pool(request):
    return request.getfixturevalue(f"ranks{request.param}")


def own_positions(length, group_size, rank, layout):
    """Global positions of the tokens that a rank holds, ascending."""
    runs = own_chunks(length, group_size, rank, layout)
    return torch.cat([torch.arange(run.start, run.stop) for run in runs])


def inputs(shape, dtype=torch.float64):
    """The output of the layer's projection, and the gradient of attention's output.

    Their shapes are [B, S, N+2K, D] and [B, S, N, D].
    """
    import torch

    batch, heads, kv_heads, length, head_size = shape
    generator = torch.Generator().manual_seed(0)
    sizes = ((batch, length, heads + 2 * kv_heads, head_size), (batch, length, heads, head_size))
    return [torch.randn(size, dtype=torch.float64, generator=generator).to(dtype) for size in sizes]


def own_leaves(shape, layout, dtype=torch.float64):
    """This rank's q, k, v as the layer hands them over, and its gradient of the output.

    The three are transposed views of one tensor.
    """
    import torch.distributed as dist

    from labcode.parallel import context

    qkv, dout = (context.take_own(x, dist.group.WORLD, 1, layout) for x in inputs(shape, dtype))
    qkv = [x.transpose(1, 2) for x in qkv.split((shape[1], shape[2], shape[2]), dim=2)]
    return [x.detach().requires_grad_() for x in qkv], dout.transpose(1, 2)


def part_of_attention(way, shape, layout, causal, kernel=None, dtype=torch.float64, passes=1):
    """(positions, output, gradients of q, k, v of this rank, whether nothing given was changed)."""
    import torch.distributed as dist

    from labcode.models.layers import CoreAttention
    from labcode.parallel import context
    from labcode.parallel.attention_block import PLAIN

    group = dist.group.WORLD
    extra = {"kernel": PLAIN} if kernel == "plain" else {}
    attention = getattr(context, way)(CoreAttention(causal), group, layout, **extra)
    leaves, dout = own_leaves(shape, layout, dtype)
    kept = [x.detach().clone() for x in (*leaves, dout)]
    for _ in range(passes):
        out = attention(*leaves)
        out.backward(dout)
    untouched = all(x.equal(y) for x, y in zip((*leaves, dout), kept))
    positions = own_positions(shape[3], group.size(), group.rank(), layout)
    return positions, out.detach(), [x.grad for x in leaves], untouched


def whole_attention(shape, causal, dtype=torch.float64):
    """Output and gradients of q, k, v on one process."""
    qkv, dout = (x.transpose(1, 2) for x in inputs(shape, dtype))
    leaves = [x.detach().requires_grad_() for x in qkv.split((shape[1], shape[2], shape[2]), dim=1)]
    out = CoreAttention(causal)(*leaves)
    out.backward(dout)
    return out.detach(), [x.grad for x in leaves]


def assert_equal_to_whole(results, shape, causal, dtype=torch.float64, passes=1, **tolerance):
    out, grads = whole_attention(shape, causal, torch.promote_types(dtype, torch.float32))
    for positions, out_part, grad_parts, untouched in results:
        assert untouched and out_part.dtype == dtype
        for part, full in zip((out_part, *grad_parts), (out, *(grad * passes for grad in grads))):
            torch.testing.assert_close(part.to(full.dtype), full[:, :, positions], **tolerance)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "way, kernel", [("RingAttention", None), ("RingAttention", "plain"), ("GatherAttention", None)]
)
def test_output_and_gradients_equal_those_of_one_process(pool, way, kernel, shape):
    for layout, causal in CASES:
        results = pool.run(part_of_attention, way, SHAPES[shape], layout, causal, kernel)
        assert_equal_to_whole(results, SHAPES[shape], causal, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.04)], ids=["float32", "bfloat16"]
)
@pytest.mark.parametrize(
    "way, kernel", [("RingAttention", None), ("RingAttention", "plain"), ("GatherAttention", None)]
)
def test_narrow_numbers_are_right_within_their_precision(ranks4, way, kernel, dtype, tolerance):
    shape = (2, 4, 2, 40, 16)
    results = ranks4.run(part_of_attention, way, shape, "zigzag", True, kernel, dtype)
    assert_equal_to_whole(results, shape, True, dtype, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("way", ["RingAttention", "GatherAttention"])
def test_a_second_backward_adds_to_the_first(ranks2, way):
    results = ranks2.run(part_of_attention, way, SHAPES["odd"], "zigzag", True, passes=2)
    assert_equal_to_whole(results, SHAPES["odd"], True, passes=2, rtol=0, atol=1e-9)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_the_parts_cover_the_sequence_once(layout):
    for length in (0, 1, 7, 13, 16):
        for p in (1, 2, 3, 4):
            parts = [own_positions(length, p, r, layout) for r in range(p)]
            assert sorted(torch.cat(parts).tolist()) == list(range(length))
            chunks = torch.arange(length).tensor_split(2 * p if layout == "zigzag" else p)
            for r, part in enumerate(parts):
                held = (chunks[r], chunks[2 * p - 1 - r]) if layout == "zigzag" else (chunks[r],)
                assert torch.equal(part, torch.cat(held)) and part.dtype == torch.int64


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_the_blocks_are_what_a_causal_mask_shows(layout):
    for length in (1, 5, 13, 16):
        for p in (1, 2, 3, 4):
            seen = torch.zeros(length, length, dtype=torch.int64)
            for rank in range(p):
                for source in range(p):
                    if block := visible_block(length, p, rank, source, layout, True):
                        rows = own_positions(length, p, rank, layout)[block.queries]
                        columns = own_positions(length, p, source, layout)[block.keys]
                        shown = torch.ones(len(rows), len(columns), dtype=torch.int64)
                        seen[rows[:, None], columns] += shown.tril() if block.causal else shown
            assert torch.equal(seen, torch.ones_like(seen).tril())


def counted(rank, layout, causal, shape, dtype):
    """What forward and backward do.

    For each of the two: the scores of each block, the bytes of each message, and the exchanges that
    are under way during each block.
    """
    import torch.distributed as dist

    from labcode.models.layers import CoreAttention
    from labcode.parallel import context
    from labcode.parallel.attention_block import PLAIN, Kernel

    scores, messages, under_way = [], [], []
    unfinished = set()
    original = dist.batch_isend_irecv

    class Watched:
        """One work of an exchange, which is under way until somebody waits for it."""

        def __init__(self, work):
            self.work = work
            unfinished.add(self)

        def wait(self):
            unfinished.discard(self)
            return self.work.wait()

    def count(q, k, causal):
        rows, columns = q.shape[2], k.shape[2]
        scores.append(rows * (rows + 1) // 2 if causal else rows * columns)
        under_way.append(len(unfinished))

    def forward(q, k, v, causal):
        count(q, k, causal)
        return PLAIN.forward(q, k, v, causal)

    def backward(dout, q, k, *rest):
        count(q, k, rest[-1])
        return PLAIN.backward(dout, q, k, *rest)

    def spy(operations):
        messages.extend(
            op.tensor.numel() * op.tensor.element_size() for op in operations if op.op is dist.isend
        )
        return [Watched(work) for work in original(operations)]

    attention = context.RingAttention(
        CoreAttention(causal),
        dist.group.WORLD,
        layout,
        kernel=Kernel("counting", forward, backward),
    )
    leaves, dout = own_leaves(shape, layout, dtype)
    dist.batch_isend_irecv = spy
    try:
        out = attention(*leaves)
        after_forward = [list(record) for record in (scores, messages, under_way)]
        for record in (scores, messages, under_way):
            record.clear()
        out.backward(dout)
    finally:
        dist.batch_isend_irecv = original
    return after_forward, (scores, messages, under_way)


def test_zigzag_gives_every_rank_the_same_scores_and_contiguous_does_not(ranks4):
    shape, p, length = (1, 2, 2, 32, 4), 4, 32
    own, other = (length // p) * (length // p + 1) // 2, (length // p) ** 2 // 2
    for forward, backward in ranks4.run(counted, "zigzag", True, shape, torch.float32):
        assert forward[0] == backward[0] == [own] + (p - 1) * [other]
    contiguous = [
        sum(forward[0])
        for forward, _ in ranks4.run(counted, "contiguous", True, shape, torch.float32)
    ]
    assert contiguous == [own + rank * (length // p) ** 2 for rank in range(p)]
    assert sum(contiguous) == length * (length + 1) // 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
def test_ranks_send_the_bytes_of_the_formula(pool, dtype):
    batch, _, kv_heads, length, head_size = shape = (3, 4, 2, 16, 5)
    p = len(pool)
    part = 2 * batch * kv_heads * (length // p) * head_size  # numbers in K and V of one rank
    wide = max(4, dtype.itemsize)
    for forward, backward in pool.run(counted, "zigzag", True, shape, dtype):
        assert forward[1] == (p - 1) * [part * dtype.itemsize]
        assert sorted(backward[1]) == sorted(
            (p - 1) * [part * dtype.itemsize] + (p - 1) * [part * wide]
        )


def test_uneven_parts_send_their_own_bytes_and_no_padding(ranks4):
    tokens = [len(own_positions(13, 4, r, "zigzag")) for r in range(4)]
    assert len(set(tokens)) > 1
    for rank, (forward, _) in enumerate(
        ranks4.run(counted, "zigzag", True, (1, 1, 1, 13, 5), torch.float64)
    ):
        assert forward[1] == [2 * 5 * 8 * tokens[(rank - step) % 4] for step in range(3)]


def test_the_next_part_travels_while_a_block_is_computed(ranks4):
    """A send and a receive are under way in each step but the last.

    In the backward, those of a sum are too, from step 2 on.
    """
    for forward, backward in ranks4.run(counted, "zigzag", True, (1, 2, 2, 16, 4), torch.float32):
        assert forward[2] == [2, 2, 2, 0]
        # the last sum goes home when all is computed
        assert backward[2] == [2, 2, 4, 2] and len(backward[1]) == 6


def gathered(rank, shape):
    import torch.distributed as dist

    from labcode.comm.counting import counted
    from labcode.models.layers import CoreAttention
    from labcode.parallel import context

    attention = context.GatherAttention(CoreAttention(True), dist.group.WORLD, "zigzag")
    attention.length = shape[3]
    leaves, dout = own_leaves(shape, "zigzag")
    with counted() as calls:
        attention(*leaves).backward(dout)
    return [(call.kind, call.num_bytes) for call in calls]


def test_gather_sends_the_bytes_of_its_formula(pool):
    """One collective each way over K and V of the whole sequence; a rank sends (p-1)/p of it."""
    batch, _, kv_heads, length, head_size = shape = (3, 4, 2, 16, 5)
    whole = 2 * batch * kv_heads * length * head_size * 8
    for calls in pool.run(gathered, shape):
        assert calls == ([("all_gather", whole), ("reduce_scatter", whole)] if pool.n > 1 else [])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_fused_kernel_agrees_with_the_plain_one(dtype):
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.03}[dtype]
    for heads, kv_heads, head_size in ((4, 4, 8), (4, 2, 7)):
        for queries, keys, causal in ((9, 9, True), (4, 9, False), (9, 4, False)):
            torch.manual_seed(0)
            q, dout = torch.randn(2, 3, queries, heads, head_size).to(dtype).transpose(2, 3)
            k, v = torch.randn(2, 3, keys, kv_heads, head_size).to(dtype).transpose(2, 3)
            fused = fastest_kernel(q, k)
            assert fused is attention_block.FUSED["cpu"][0]
            found, expected = fused.forward(q, k, v, causal), PLAIN.forward(q, k, v, causal)
            assert found[1].dtype == expected[1].dtype == attention_block.wide_dtype(dtype)
            found += fused.backward(dout, q, k, v, *found, causal)
            expected += PLAIN.backward(dout, q, k, v, *expected, causal)
            for a, b in zip(found, expected):
                torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_a_kernel_that_is_missing_refuses_or_means_something_else_is_not_used(monkeypatch):
    def missing(*_):
        raise AttributeError("no such function")

    def base_two(q, k, v, causal):
        out, lse = PLAIN.forward(q, k, v, causal)
        return out, lse / torch.log(torch.tensor(2.0))

    bad = (Kernel("missing", missing, missing), Kernel("base two", base_two, PLAIN.backward))
    monkeypatch.setitem(attention_block.FUSED, "cpu", bad)
    attention_block._fastest.cache_clear()
    try:
        assert fastest_kernel(torch.zeros(1, 2, 4, 8), torch.zeros(1, 1, 4, 8)) is PLAIN
    finally:
        attention_block._fastest.cache_clear()


def test_merging_blocks_of_large_scores_overflows_nowhere():
    q, k, v = (
        200 * torch.randn(1, 1, 6, 4, generator=torch.Generator().manual_seed(i)) for i in range(3)
    )
    out, lse = torch.zeros(1, 1, 6, 4), torch.full((1, 1, 6), -torch.inf)
    for keys in (slice(0, 2), slice(2, 6)):
        attention_block.merge(out, lse, *PLAIN.forward(q, k[:, :, keys], v[:, :, keys], False))
    expected = PLAIN.forward(q, k, v, False)
    torch.testing.assert_close((out, lse), expected)


def behaviours(rank):
    """What else has to hold, in one trip: messages of errors, dropout, memory for the backward."""
    import torch
    import torch.distributed as dist

    from labcode.models.layers import CoreAttention
    from labcode.parallel import context
    from labcode.parallel.attention_block import PLAIN

    group, found = dist.group.WORLD, {}

    def message(fn):
        try:
            fn()
        except ValueError as error:
            return str(error)

    found["dropout"] = message(
        lambda: context.RingAttention(CoreAttention(True, 0.1), group, "zigzag")
    )
    found["layout"] = message(lambda: context.GatherAttention(CoreAttention(True), group, "spiral"))
    q = torch.randn(1, 2, 8, 4, requires_grad=True)
    uneven = q[:, :, : 8 - 3 * rank]
    ring = context.RingAttention(CoreAttention(True), group, "contiguous")
    found["parts"] = message(lambda: ring(uneven, uneven, uneven))
    context.tell_length(torch.nn.Sequential(ring), 17)
    found["told"] = message(lambda: ring(uneven, uneven, uneven))

    calls, original = [], dist.all_gather
    ring.length = 16
    dist.all_gather = lambda *args, **kwargs: calls.append(args) or original(*args, **kwargs)
    try:
        out = ring(q, q, q)
        ring.length = None
        found["same"] = torch.equal(out, ring(q, q, q)), len(calls)
    finally:
        dist.all_gather = original

    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: saved.append(x.numel()) or x, lambda x: x
    ):
        ring(q, q, q).sum().backward()  # a gradient of strides 0
    found["saved"] = sum(saved), q.numel()

    torch.manual_seed(rank)
    gather = context.GatherAttention(CoreAttention(False, 0.5), group, "contiguous")
    ones = torch.ones(1, 1, 64, 4)
    dropped, kept = gather(ones, ones, ones), gather.eval()(ones, ones, ones)
    found["drops"] = (
        dropped.std().item() > 0.01,
        abs(dropped.mean().item() - 1) < 0.2,
        torch.allclose(kept, ones),
    )

    plain = context.RingAttention(CoreAttention(True), group, "contiguous", kernel=PLAIN)
    results = []
    for autocast in (False, True):
        q.grad = None
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = plain(q, q, q)
            out.sum().backward()
        results.append((out.detach(), q.grad))
    found["autocast"] = [(a - b).abs().max().item() for a, b in zip(*results)]
    return found


def test_errors_are_one_line_and_the_ring_saves_only_its_own_part(ranks2):
    for found in ranks2.run(behaviours):
        assert "dropout is 0.1" in found["dropout"] and "GatherAttention" in found["dropout"]
        assert found["layout"] == "layout 'spiral' does not exist: choose one of zigzag, contiguous"
        assert (
            "of 13 tokens in layout contiguous the ranks hold [7, 6] but {0: 8, 1: 5}"
            in found["parts"]
        )
        assert "the ranks hold [9, 8]" in found["told"] and "\n" not in found["told"]
        assert found["same"] == (True, 1)
        saved, numel = found["saved"]
        assert saved == 4 * numel + numel // 4  # q, k, v, out and lse, of this rank's tokens
        assert found["drops"] == (True, True, True)
        assert max(found["autocast"]) < 1e-6  # what is wide on purpose stays wide
