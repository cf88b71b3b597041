"""The sharded layers against the plain ones they are made from, in float64.

Outputs, input gradients and weight gradients are compared.
"""

import pytest
import torch
from torch import nn

from labcode.parallel.sharding import Shard

TOLERANCE = {"rtol": 0, "atol": 1e-12}
BATCH, TOKENS, HIDDEN, INSIDE, VOCAB = 3, 8, 12, 20, 23  # an odd vocabulary


@pytest.fixture(params=[1, 2, 4])
def pool(request):
    return request.getfixturevalue(f"ranks{request.param}")


def whole_mlp():
    torch.manual_seed(0)
    x = torch.randn(BATCH, TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(BATCH, TOKENS, HIDDEN, dtype=torch.float64)
    up, down = nn.Linear(HIDDEN, INSIDE).double(), nn.Linear(INSIDE, HIDDEN).double()
    return x, weights, up, down


def sharded_mlp(rank, sequence):
    """This rank's output and gradients, and what it communicated forward and backward."""
    import torch.distributed as dist

    from labcode.comm.counting import counted, totals
    from labcode.parallel.tensor import ColumnParallelLinear, RowParallelLinear

    group, p = dist.group.WORLD, dist.get_world_size()
    x, weights, up, down = whole_mlp()
    if sequence:
        x, weights = (tensor.detach().chunk(p, 1)[rank] for tensor in (x, weights))
        x.requires_grad_()
    up, down = (
        ColumnParallelLinear(up, group, sequence=sequence),
        RowParallelLinear(down, group, sequence=sequence),
    )
    with counted() as forward:
        y = down(torch.nn.functional.gelu(up(x)))
    with counted() as backward:
        (y * weights).sum().backward()
    grads = {
        f"{name}.{kind}": p.grad
        for name, m in (("up", up), ("down", down))
        for kind, p in m.named_parameters()
    }
    return y.detach(), x.grad, grads, totals(forward), totals(backward)


@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
def test_column_then_row_equals_the_plain_layers(pool, sequence):
    x, weights, up, down = whole_mlp()
    y = down(torch.nn.functional.gelu(up(x)))
    (y * weights).sum().backward()
    results = pool.run(sharded_mlp, sequence)
    p = len(results)
    for rank, (own_y, own_dx, grads, forward, backward) in enumerate(results):
        expected_y, expected_dx = (
            t.chunk(p, 1)[rank] if sequence else t for t in (y.detach(), x.grad)
        )
        torch.testing.assert_close(own_y, expected_y, **TOLERANCE)
        torch.testing.assert_close(own_dx, expected_dx, **TOLERANCE)
        torch.testing.assert_close(grads["up.weight"], up.weight.grad.chunk(p)[rank], **TOLERANCE)
        torch.testing.assert_close(grads["up.bias"], up.bias.grad.chunk(p)[rank], **TOLERANCE)
        torch.testing.assert_close(
            grads["down.weight"], down.weight.grad.chunk(p, 1)[rank], **TOLERANCE
        )
        if not sequence:
            torch.testing.assert_close(grads["down.bias"], down.bias.grad, **TOLERANCE)
        message = BATCH * TOKENS * HIDDEN * 8  # bytes
        if p == 1:
            assert forward == backward == {}
        elif sequence:
            assert forward == {"all_gather": (1, message), "reduce_scatter": (1, message)}
            assert backward == {"all_gather": (2, 2 * message), "reduce_scatter": (1, message)}
        else:
            assert forward == backward == {"all_reduce": (1, message)}
    if sequence:  # each rank has the bias gradient of its own tokens: the parts add up
        torch.testing.assert_close(
            sum(r[2]["down.bias"] for r in results), down.bias.grad, **TOLERANCE
        )


def largest_saved(rank, gathered):
    """Numbers in the largest activation that a column-parallel layer keeps for backward."""
    import torch.distributed as dist

    from labcode.comm.collectives import all_gather
    from labcode.parallel.tensor import ColumnParallelLinear

    _, _, up, _ = whole_mlp()
    layer = ColumnParallelLinear(up, dist.group.WORLD, sequence=True)
    x = torch.randn(
        BATCH, TOKENS // dist.get_world_size(), HIDDEN, dtype=torch.float64, requires_grad=True
    )
    sizes = []
    keep = torch.autograd.graph.saved_tensors_hooks(
        lambda t: sizes.append(t.untyped_storage().nbytes() // 8) or t, lambda t: t
    )
    with keep:
        if gathered:
            torch.nn.functional.linear(all_gather(x, dist.group.WORLD, 1), layer.weight)
        else:
            layer(x)
    return max(sizes)


def test_sequence_parallel_keeps_only_its_part_for_backward(ranks2):
    whole = BATCH * TOKENS * HIDDEN
    assert ranks2.run(largest_saved, gathered=True) == [whole, whole]
    assert ranks2.run(largest_saved, gathered=False) == [whole // 2, whole // 2]


def attention_of_own_heads(rank, kv_heads):
    import torch.distributed as dist

    from labcode.models.layers import Attention
    from labcode.parallel.tensor import ColumnParallelLinear, RowParallelLinear

    torch.manual_seed(0)
    whole = Attention(16, 8, kv_heads, causal=True).double()
    x = torch.randn(BATCH, TOKENS, 16, dtype=torch.float64)
    expected = whole(x).detach()
    group, sections = dist.group.WORLD, (16, kv_heads * 2, kv_heads * 2)
    whole.qkv = ColumnParallelLinear(whole.qkv, group, sections)
    whole.proj = RowParallelLinear(whole.proj, group)
    return (whole(x) - expected).abs().max().item()


@pytest.mark.parametrize("kv_heads", [8, 4])
def test_attention_over_some_of_the_heads_on_each_rank_equals_the_whole(pool, kv_heads):
    assert max(pool.run(attention_of_own_heads, kv_heads)) < 1e-12


def embedded(rank, sequence):
    import torch.distributed as dist

    from labcode.comm.counting import counted, totals
    from labcode.parallel.tensor import VocabParallelEmbedding

    torch.manual_seed(0)
    whole = nn.Embedding(VOCAB, HIDDEN).double()
    tokens = torch.randint(VOCAB, (BATCH, TOKENS))
    weights = torch.randn(BATCH, TOKENS, HIDDEN, dtype=torch.float64)
    (whole(tokens) * weights).sum().backward()
    p = dist.get_world_size()
    part = VocabParallelEmbedding(whole, dist.group.WORLD, sequence=sequence)
    with counted() as forward:
        x = part(tokens)
    (x * (weights.chunk(p, 1)[rank] if sequence else weights)).sum().backward()
    expected = whole(tokens).chunk(p, 1)[rank] if sequence else whole(tokens)
    gradient = Shard(0).take(whole.weight.grad, rank, p)
    return (
        (x - expected).abs().max().item(),
        (part.weight.grad - gradient).abs().max().item(),
        totals(forward),
    )


@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
def test_an_embedding_cut_over_an_odd_vocabulary_equals_the_whole(pool, sequence):
    kind = "reduce_scatter" if sequence else "all_reduce"
    results = pool.run(embedded, sequence)
    for difference, gradient_difference, forward in results:
        assert max(difference, gradient_difference) < 1e-12
        assert forward == ({kind: (1, BATCH * TOKENS * HIDDEN * 8)} if len(results) > 1 else {})


def cross_entropy(rank, dtype, scale):
    import torch.distributed as dist
    import torch.nn.functional as F

    from labcode.comm.counting import counted, totals
    from labcode.parallel.tensor import vocab_parallel_cross_entropy

    torch.manual_seed(0)
    logits = (
        (torch.randn(BATCH, TOKENS, VOCAB, dtype=torch.float64) * scale).to(dtype).requires_grad_()
    )
    targets = torch.randint(VOCAB, (BATCH, TOKENS))
    targets[0, :3] = -100
    weights = torch.randn(BATCH, TOKENS, dtype=torch.float64)
    wide = logits.to(torch.promote_types(dtype, torch.float32))
    expected = F.cross_entropy(wide.flatten(0, 1), targets.flatten(), reduction="none").view(
        BATCH, TOKENS
    )
    (expected * weights).sum().backward()
    p = dist.get_world_size()
    own = Shard(2).take(logits.detach(), rank, p).requires_grad_()
    with counted() as forward:
        loss = vocab_parallel_cross_entropy(own, targets, dist.group.WORLD, VOCAB)
    with counted() as backward:
        (loss * weights).sum().backward()
    gradient = Shard(2).take(logits.grad, rank, p)
    assert loss.dtype == wide.dtype and own.grad.dtype == dtype
    difference, of_gradients = (
        (loss - expected).abs().max().item(),
        (own.grad - gradient).abs().max().item(),
    )
    return difference, of_gradients, totals(forward), totals(backward)


@pytest.mark.parametrize(
    "dtype, scale, tolerance",
    [
        (torch.float64, 1, 1e-12),
        (torch.float64, 1e4, 1e-9),
        (torch.float32, 1, 1e-5),
        (torch.bfloat16, 1, 1e-2),
    ],
)
def test_the_loss_of_logits_cut_over_the_vocabulary_equals_the_whole(pool, dtype, scale, tolerance):
    for difference, gradient_difference, forward, backward in pool.run(cross_entropy, dtype, scale):
        assert max(difference, gradient_difference) < tolerance
        per_token = BATCH * TOKENS * torch.promote_types(dtype, torch.float32).itemsize
        # three numbers a token, however large the vocabulary
        assert forward == {"all_reduce": (2, 3 * per_token)}
        assert backward == {}


def under_autocast(rank):
    import torch.distributed as dist

    from labcode.parallel.tensor import ColumnParallelLinear

    _, _, up, _ = whole_mlp()
    layer = ColumnParallelLinear(up.float(), dist.group.WORLD, sequence=True)
    x = torch.randn(BATCH, TOKENS, HIDDEN, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    y.float().sum().backward()
    return y.dtype, x.grad.dtype, layer.weight.grad.dtype, layer.bias.grad.dtype


def test_autocast_narrows_the_gathered_product_and_leaves_gradients_wide(ranks2):
    assert set(ranks2.run(under_autocast)) == {
        (torch.bfloat16, torch.float32, torch.float32, torch.float32)
    }


@pytest.mark.parametrize("sections", [None, (7, 3, 3)])
@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_the_parts_of_a_split_join_to_the_whole(sections, parts):
    whole = torch.randn(5, 13, 2)
    split = Shard(1, sections)
    pieces = [split.take(whole, index, parts) for index in range(parts)]
    assert max(p.shape[1] for p in pieces) - min(p.shape[1] for p in pieces) <= len(
        sections or (1,)
    )
    assert torch.equal(split.join(pieces, whole.shape), whole)


def test_frozen_weights_stay_frozen_and_a_missing_bias_stays_missing(ranks2):
    def kinds(rank):
        import torch.distributed as dist

        from labcode.parallel.tensor import ColumnParallelLinear, RowParallelLinear

        frozen = nn.Linear(4, 4, bias=False).requires_grad_(False)
        layers = (
            ColumnParallelLinear(frozen, dist.group.WORLD),
            RowParallelLinear(frozen, dist.group.WORLD),
        )
        return [(layer.weight.requires_grad, layer.bias) for layer in layers]

    assert ranks2.run(kinds) == [[(False, None)] * 2] * 2
