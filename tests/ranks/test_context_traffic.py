"""What `perf.traffic` says of context parallelism, against the bytes that its attention sends."""

import pytest

from labcode.config import GPTConfig
from labcode.perf.traffic import step_traffic
from labcode.topology import GridShape

LAYERS = 3
BATCH = 2
MODEL = GPTConfig(
    vocab_size=11,
    context_length=16,
    num_layers=LAYERS,
    num_heads=4,
    num_kv_heads=2,
    hidden_size=20,
)


def bytes_from_this_rank(way, dtype):
    """{(sender, receiver): bytes} that this rank sends in forward and backward of the attention of
    all layers, and {collective: bytes of the whole tensor}.
    """
    import torch
    import torch.distributed as dist

    from labcode.comm.counting import CollectiveSpy
    from labcode.models.layers import CoreAttention
    from labcode.parallel import context

    class Noting(CollectiveSpy):
        def __init__(self):
            super().__init__()
            self.sent = {}
            self.collectives = {}

        def on_collective(self, call, start):
            if call.name == "send":
                self.sent[call.ranks] = self.sent.get(call.ranks, 0) + call.num_bytes
            elif call.name != "recv":
                before = self.collectives.get(call.name, 0)
                self.collectives[call.name] = before + call.num_bytes
            return start()

    def part(heads):
        tokens = MODEL.context_length // dist.get_world_size()
        shape = (BATCH, heads, tokens, MODEL.head_size)
        return torch.randn(shape, dtype=getattr(torch, dtype), requires_grad=True)

    attention = getattr(context, way)(CoreAttention(True), dist.group.WORLD, "zigzag")
    attention.length = MODEL.context_length
    with Noting() as spy:
        for _ in range(LAYERS):
            q = part(MODEL.num_heads)
            k = part(MODEL.kv_heads)
            v = part(MODEL.kv_heads)
            attention(q, k, v).sum().backward()
    return spy.sent, spy.collectives


@pytest.mark.parametrize(
    ("dtype", "value_bytes"), [("float64", 8), ("float32", 4), ("bfloat16", 2)]
)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_ring_sends_what_the_formula_says_on_each_link(request, num_ranks, dtype, value_bytes):
    pool = request.getfixturevalue(f"ranks{num_ranks}")
    measured = {}
    for sent, collectives in pool.run(bytes_from_this_rank, "RingAttention", dtype):
        measured |= sent
        assert collectives == {}
    shape = GridShape(cp=num_ranks)
    predicted = step_traffic(MODEL, shape, global_batch=BATCH, value_bytes=value_bytes)
    assert measured == predicted["cp"]


@pytest.mark.parametrize(("dtype", "value_bytes"), [("float64", 8), ("bfloat16", 2)])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_gathering_sends_what_the_formula_says(request, num_ranks, dtype, value_bytes):
    """A collective names no links: of n bytes each rank sends (p-1)/p."""
    pool = request.getfixturevalue(f"ranks{num_ranks}")
    predicted = step_traffic(
        MODEL,
        GridShape(cp=num_ranks),
        global_batch=BATCH,
        value_bytes=value_bytes,
        context_attention="all_gather",
    )
    for sent, collectives in pool.run(bytes_from_this_rank, "GatherAttention", dtype):
        assert sent == {}
        assert sorted(collectives) == ["all_gather", "reduce_scatter"]
        on_a_link = sum(collectives.values()) * (num_ranks - 1) / num_ranks
        assert set(predicted["cp"].values()) == {on_a_link}
