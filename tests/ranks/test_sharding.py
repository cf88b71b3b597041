"""One description of how a weight is spread: parts, gradients of copied heads."""

import pytest
import torch

from labcode.comm.grid import Grid
from labcode.config import GPTConfig, ParallelConfig
from labcode.models import gpt
from labcode.models.layers import initialize
from labcode.models.parallelize import parallelize
from labcode.parallel.sharding import ParamSharding, Shard
from labcode.topology import GridShape


def parts(rank):
    """What each rank holds of a weight cut by two axes, and whether it comes back whole."""
    grid = Grid.create(GridShape(dp=2, tp=2))
    whole = torch.arange(30.0).view(10, 3)
    sharding = ParamSharding((10, 3), {"tp": Shard(0, (6, 4)), "dp": Shard(0)})
    own = sharding.own(whole, grid)
    return (
        own,
        torch.equal(sharding.full(own, grid), whole),
        sharding.replicated_over(("dp", "cp", "tp")),
    )


def test_a_weight_is_replicated_over_the_axes_that_do_not_cut_it(ranks4):
    assert {axes for *_, axes in ranks4.run(parts)} == {("cp",)}


def test_a_weight_that_two_axes_cut_comes_back_whole(ranks4):
    results = ranks4.run(parts)
    assert all(same for _, same, _ in results)
    # tp 0 has rows 0-2 and 6-7 of the two sections, dp cuts these five into three and two
    assert results[0][0][:, 0].tolist() == [0.0, 3.0, 6.0]
    assert results[2][0][:, 0].tolist() == [18.0, 21.0]


def test_copies_of_a_section_are_held_by_neighbours():
    shard = Shard(0, sections=(4, 2), copies=(1, 2))
    whole = torch.arange(6)
    parts = [shard.take(whole, index, 4) for index in range(4)]
    assert [part.tolist() for part in parts] == [[0, 4], [1, 4], [2, 5], [3, 5]]
    assert torch.equal(shard.join(parts, (6,)), whole)


UNEVEN = GPTConfig(
    vocab_size=23,
    context_length=13,  # four chunks of unequal length over cp 2
    num_layers=2,
    num_heads=4,
    num_kv_heads=1,  # tp 2 and 4: every rank holds a copy of the one key/value head
    hidden_size=16,
    ffn_size=10,  # unequal parts over tp 4
    positions="rotary",
)


def build():
    return initialize(gpt.GPT(UNEVEN), 0).double()


def a_step(rank, shape, config):
    """This rank's loss, the norm, and how far each weight is from one process after a step."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(23, (4, 14), generator=generator)
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[0, :9] = -100  # the first sample counts less than the others
    targets[3, :4] = -100

    whole = build()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.5)
    expected = gpt.loss(whole(inputs), targets)
    expected.backward()
    expected_norm = torch.nn.utils.get_total_norm([p.grad for p in whole.parameters()])
    optimizer.step()

    grid = Grid.create(shape)
    model = parallelize(build(), grid, config)
    per_rank = 4 // shape.dp
    first = grid.coord("dp") * per_rank
    batches = []
    for number in range(first, first + per_rank):  # micro-batches of one sample
        batches.append((inputs[number : number + 1], targets[number : number + 1]))
    loss = model.forward_backward(batches)
    torch.distributed.all_reduce(loss, group=grid.group("dp"))
    norm = model.gradient_norm()
    torch.optim.SGD(model.module.parameters(), lr=0.5).step()
    off = [abs(loss / shape.dp - expected).item(), abs(norm - expected_norm).item()]
    trained = whole.state_dict()
    for name, weight in model.full_state_dict():
        off.append((weight - trained[name]).abs().max().item())
    return max(off)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        (GridShape(tp=4), {}),
        (GridShape(dp=2, tp=2), {}),
        (GridShape(dp=4), {"data_parallel": "labcode"}),
        (GridShape(cp=2, tp=2), {"context_attention": "all_gather"}),
        (GridShape(dp=2, cp=2), {}),
        (GridShape(cp=2, pp=2), {}),
        (GridShape(pp=2, tp=2), {"pipeline_schedule": "zero_bubble"}),
    ],
    ids=str,
)
def test_uneven_sizes_copied_heads_and_ignored_targets_give_the_step_of_one_process(
    ranks4, shape, options
):
    """Fewer key/value heads than tp, an MLP and a sequence that do not divide, unequal numbers of
    targets over dp and over micro-batches."""
    assert max(ranks4.run(a_step, shape, ParallelConfig(**options))) < 1e-9


def deferred_under_sequence_parallel(rank):
    """Names of the weights whose gradient an I leaves to its W."""
    from labcode.parallel.deferred import WeightGradientStore, finish

    config = GPTConfig(vocab_size=23, context_length=8, num_layers=1, num_heads=4, hidden_size=16)
    model = parallelize(
        initialize(gpt.GPT(config), 0).double(),
        Grid.create(GridShape(tp=2)),
        ParallelConfig(sequence_parallel=True, data_parallel="labcode"),
    )
    tokens = torch.arange(8)[None]
    with model.no_sync():
        model.loss(model(tokens), tokens).backward()
    expected = {name: param.grad.clone() for name, param in model.module.named_parameters()}
    model.zero_grad()
    store = WeightGradientStore()
    with model.no_sync():
        with store.watching():
            loss = model.loss(model(tokens), tokens)
        with store.later() as waiting:
            loss.backward()
    names = {id(param): name for name, param in model.module.named_parameters()}
    left = sorted(names[id(item.weight)] for item in waiting)
    finish(waiting)
    off = 0.0
    for name, param in model.module.named_parameters():
        off = max(off, (param.grad - expected[name]).abs().max().item())
    return left, off


def test_zero_bubble_defers_the_gathered_layers_too(ranks2):
    for left, off in ranks2.run(deferred_under_sequence_parallel):
        assert left == [
            "blocks.0.attention.proj.weight",
            "blocks.0.attention.qkv.weight",
            "blocks.0.mlp.down.weight",
            "blocks.0.mlp.up.weight",
            "embed.weight",  # the head, tied to it
        ]
        assert off < 1e-12


def checkpointed_dropout(rank, sequence_parallel):
    """The gradients with dropout, without and with activation checkpointing."""
    config = GPTConfig(
        vocab_size=23, context_length=8, num_layers=2, num_heads=4, hidden_size=16, dropout=0.3
    )
    found = []
    for kind in ("none", "selective", "full"):
        parallel = ParallelConfig(
            sequence_parallel=sequence_parallel, activation_checkpointing=kind
        )
        with torch.device("meta"):
            model = gpt.GPT(config)
        model = parallelize(
            model, Grid.create(GridShape(tp=2)), parallel, seed=5, dtype=torch.float64
        )
        tokens = torch.arange(8)[None]
        for _ in range(2):  # twice: the streams are where they were after the first backward
            model.forward_backward([(tokens, tokens)])
        grads = [param.grad.flatten() for param in model.module.parameters()]
        found.append(torch.cat(grads))
    return found


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_activation_checkpointing_repeats_the_dropout(ranks2, sequence_parallel):
    for plain, *repeated in ranks2.run(checkpointed_dropout, sequence_parallel):
        for grads in repeated:
            torch.testing.assert_close(grads, plain, rtol=0, atol=1e-12)


def second_backward(rank):
    import torch.distributed as dist
    from torch import nn

    from labcode.parallel.data import DataParallel

    model = DataParallel(nn.Linear(3, 2), dist.group.WORLD)
    x = torch.ones(4, 3)
    model(x).sum().backward()
    with pytest.raises(RuntimeError, match="a second backward ran before finish_gradient_sync"):
        model(x).sum().backward()
    model.finish_gradient_sync()
    with model.no_sync():
        model(x).sum().backward()
    model(x).sum().backward()
    model.finish_gradient_sync()
    return True


def test_a_second_backward_before_the_sync_is_refused_and_not_lost(ranks2):
    assert ranks2.run(second_backward) == [True, True]


def messages_of_a_step(rank):
    """(number, bytes) of all-reduces over dp and cp in one backward."""
    from labcode.comm.counting import counted, totals

    config = GPTConfig(vocab_size=23, context_length=8, num_layers=1, num_heads=4, hidden_size=16)
    model = parallelize(
        initialize(gpt.GPT(config), 0),
        Grid.create(GridShape(dp=2, cp=2)),
        ParallelConfig(data_parallel="labcode"),
    )
    tokens = torch.arange(8)[None]
    with counted() as calls:
        model.forward_backward([(tokens, tokens)])
    gradient_bytes = sum(4 * param.numel() for param in model.module.parameters())
    large = [call for call in calls if call.kind == "all_reduce" and call.num_bytes > 1000]
    return len(large), totals(large)["all_reduce"][1] - gradient_bytes


def test_gradients_that_are_partial_over_dp_and_cp_travel_once(ranks4):
    assert ranks4.run(messages_of_a_step) == [(1, 0)] * 4
