"""Where gradients lie and when the buckets change: DataParallel beyond the first step."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from labcode.comm.counting import counted, totals
from labcode.parallel.buckets import cut_into_buckets
from labcode.parallel.data import DataParallel


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))


def step(model, x):
    model(x).square().mean().backward()
    model.finish_gradient_sync()


def lie_in_buckets(model):
    """Whether each gradient is memory of its bucket, and the bucket's own view."""
    for bucket in model.buckets:
        for param, view in bucket.views.items():
            if param.grad is not view:
                return False
            if view.untyped_storage().data_ptr() != bucket.flat.untyped_storage().data_ptr():
                return False
    return True


def whole_batch():
    generator = torch.Generator().manual_seed(7)
    return torch.randn(8, 4, dtype=torch.float64, generator=generator)


def own(x, rank):
    return x.chunk(dist.get_world_size())[rank]


# ---- views


def after_each_way_of_clearing(rank):
    """{way: (gradients are views, largest difference from one process)}, each over three steps."""

    def to_none(model):
        model.zero_grad(set_to_none=True)

    def to_zero(model):
        model.zero_grad(set_to_none=False)

    def replaced(model):
        for param in model.module.parameters():
            param.grad = torch.zeros_like(param)

    def each_other_way(model):
        for number, param in enumerate(model.module.parameters()):
            param.grad = None if number % 2 else torch.zeros_like(param).t().contiguous().t()

    x = whole_batch()
    found = {}
    for clear in (to_none, to_zero, replaced, each_other_way):
        model = DataParallel(net().double(), dist.group.WORLD, bucket_mb=2e-4)
        alone = net().double()
        alone(x).square().mean().backward()
        for _ in range(3):
            step(model, own(x, rank))
            is_view = lie_in_buckets(model)
            distance = largest_distance(model, alone)
            found.setdefault(clear.__name__, []).append((is_view, distance))
            clear(model)
    return found


def largest_distance(model, alone):
    differences = []
    for ours, theirs in zip(model.module.parameters(), alone.parameters()):
        differences.append((ours.grad - theirs.grad).abs().max().item())
    return max(differences)


def test_gradients_are_views_into_buckets_however_they_were_cleared(ranks2):
    for found in ranks2.run(after_each_way_of_clearing):
        assert len(found) == 4
        for steps in found.values():
            for is_view, distance in steps:
                assert is_view
                assert distance < 1e-15


def accumulated(rank, clears):
    """Distance from one process after two steps of three micro-batches; are they views early?"""
    x = whole_batch()
    model = DataParallel(net().double(), dist.group.WORLD, bucket_mb=2e-4)
    alone = net().double()
    parts = own(x, rank).chunk(2)
    early = []
    for _ in range(2):
        if clears:
            alone.zero_grad()
            model.zero_grad()
        alone(x).square().mean().backward()
        with model.no_sync():
            (model(parts[0]).square().mean() / 2).backward()
        early.append(lie_in_buckets(model))
        (model(parts[1]).square().mean() / 2).backward()
        model.finish_gradient_sync()
    return early, largest_distance(model, alone)


@pytest.mark.parametrize("clears", [True, False])
def test_micro_batches_add_up_inside_the_buckets(ranks2, clears):
    """Without clearing, the average of the first step is part of that of the second."""
    for early, distance in ranks2.run(accumulated, clears):
        assert early == [True, True]
        assert distance < 1e-15


def in_another_layout(rank):
    """A weight whose memory is laid out channels last."""
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 4, 3).double().to(memory_format=torch.channels_last)
    model = DataParallel(conv, dist.group.WORLD)
    torch.manual_seed(1)
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    loss = torch.nn.functional.conv2d(x, conv.weight, conv.bias).square().mean()
    (expected,) = torch.autograd.grad(loss, conv.weight)
    model(own(x, rank)).square().mean().backward()
    model.finish_gradient_sync()
    grad = conv.weight.grad
    return grad.stride() == conv.weight.stride(), (grad - expected).abs().max().item()


def test_a_gradient_is_laid_out_as_its_weight(ranks2):
    for same_strides, distance in ranks2.run(in_another_layout):
        assert same_strides
        assert distance < 1e-15


def refused_backwards(rank):
    """The messages of backwards whose gradients would be lost, or cannot be sent."""
    messages = []
    model = DataParallel(net(), dist.group.WORLD)
    x = torch.ones(2, 4)
    model(x).sum().backward()
    try:
        with model.no_sync():
            model(x).sum().backward()
    except RuntimeError as error:
        messages.append(str(error))
    model.finish_gradient_sync()
    table = DataParallel(nn.Embedding(5, 2, sparse=True), dist.group.WORLD)
    try:
        table(torch.tensor([1])).sum().backward()
    except RuntimeError as error:
        messages.append(str(error))
    return messages


def test_a_gradient_that_would_be_lost_or_is_sparse_is_refused(ranks2):
    for second, sparse in ranks2.run(refused_backwards):
        assert second.startswith("a second backward ran before finish_gradient_sync()")
        assert sparse.startswith("the gradient of weight is sparse, and buckets are dense")


# ---- unused and frozen parameters


class Branches(nn.Module):
    """Layers of which a forward uses some."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])

    def forward(self, x, used):
        for number in used:
            x = self.layers[number](x)
        return x


def unused(rank, finds):
    """(gradient of each bias or None, the number of messages), for two steps."""
    torch.manual_seed(0)
    model = DataParallel(Branches(), dist.group.WORLD, find_unused_parameters=finds)
    found = []
    for _ in range(2):
        model.zero_grad()
        used = [0, 1] if rank == 0 else [0]  # layer 2 is used by nobody
        with counted() as calls:
            model(torch.ones(1, 3), used).sum().backward()
            model.finish_gradient_sync()
        grads = [layer.bias.grad for layer in model.module.layers]
        values = [None if grad is None else grad.tolist() for grad in grads]
        found.append((values[1], values[2], totals(calls)["all_reduce"][0]))
    return found


def test_what_one_rank_uses_counts_as_zero_elsewhere_and_what_none_uses_may_stay_alone(ranks2):
    for rank in ranks2.run(unused, False):
        for one, none, messages in rank:
            assert (one, none, messages) == ([0.5] * 3, [0.0] * 3, 1)
    for rank in ranks2.run(unused, True):
        for one, none, messages in rank:
            assert (one, none, messages) == ([0.5] * 3, None, 2)


def frozen_between_steps(rank):
    """Weights after steps in which layers are frozen, unfrozen and cast, and of one process."""
    x = whole_batch()
    model = DataParallel(net().double(), dist.group.WORLD, bucket_mb=2e-4)
    alone = net().double()
    sent_bytes = []
    for trained in ((0, 2, 4), (2, 4), (4,), (0, 2, 4)):
        for module in (model.module, alone):
            for number in (0, 2, 4):
                module[number].requires_grad_(number in trained)
        alone.zero_grad()
        model.zero_grad()
        alone(x).square().mean().backward()
        with counted() as calls:
            step(model, own(x, rank))
        sent_bytes.append(totals(calls)["all_reduce"][1])
        for module in (model.module, alone):
            with torch.no_grad():
                for param in module.parameters():
                    if param.grad is not None:
                        param -= 0.1 * param.grad
    distances = []
    for ours, theirs in zip(model.module.parameters(), alone.parameters()):
        distances.append((ours - theirs).abs().max().item())
    return sent_bytes, max(distances)


def test_layers_may_be_frozen_and_unfrozen_between_steps(ranks2):
    sizes = [4 * 6 + 6, 6 * 6 + 6, 6 * 2 + 2]
    expected = [8 * sum(sizes), 8 * sum(sizes[1:]), 8 * sizes[2], 8 * sum(sizes)]
    for sent_bytes, distance in ranks2.run(frozen_between_steps):
        assert sent_bytes == expected
        assert distance < 1e-15


def changed_too_late(rank):
    messages = []
    model = DataParallel(net(), dist.group.WORLD)
    model(torch.ones(2, 4)).sum().backward()
    model.module[2].bias.requires_grad_(False)
    try:
        model.finish_gradient_sync()
    except RuntimeError as error:
        messages.append(str(error))
    model.module[2].bias.requires_grad_(True)
    model.finish_gradient_sync()
    model.double()
    step(model, torch.ones(2, 4, dtype=torch.float64))  # cast between two steps
    dtypes = {bucket.flat.dtype for bucket in model.buckets}
    return messages, dtypes


def test_a_change_in_the_middle_of_a_step_is_refused_and_one_between_steps_is_not(ranks2):
    for messages, dtypes in ranks2.run(changed_too_late):
        assert len(messages) == 1
        assert messages[0].startswith("2.bias was frozen, unfrozen or moved after the forward")
        assert dtypes == {torch.float64}


def different_modules(rank):
    wide = nn.Linear(3, 3 + rank)
    try:
        DataParallel(wide, dist.group.WORLD)
    except ValueError as error:
        return str(error)


def test_ranks_that_wrap_different_modules_are_refused_on_every_rank(ranks2):
    for message in ranks2.run(different_modules):
        assert message.startswith("rank 0 wraps 2 parameters and rank 1 2, and their names, shapes")
        assert "\n" not in message


# ---- buffers


def statistics(rank, broadcasts):
    """Running means after two training steps on different data, and what evaluation sends."""
    torch.manual_seed(0)
    norm = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
    model = DataParallel(norm, dist.group.WORLD, broadcast_buffers=broadcasts)
    moved = []
    for _ in range(2):
        with counted() as calls:
            with model.no_sync():
                model(torch.full((8, 4), float(rank)) + torch.randn(8, 4)).sum().backward()
            step(model, torch.full((8, 4), float(rank)) + torch.randn(8, 4))
        moved.append([call for call in calls if call.kind == "broadcast"])
    with counted() as calls:
        model.eval()
        model(torch.ones(8, 4))
        model.train()
        with torch.no_grad():
            model(torch.ones(8, 4))
    before_next = norm[0].running_mean.clone()
    step(model, torch.zeros(8, 4))
    return [len(calls) for calls in moved], len(calls), before_next, norm[0].running_mean.clone()


def test_buffers_come_from_the_first_rank_once_per_step_in_training_mode(ranks2):
    first, second = ranks2.run(statistics, True)
    for moved, evaluated, _, _ in (first, second):
        # two dtypes: the statistics, and the number of batches; in step 2 the order as well
        assert moved == [2, 3]
        assert evaluated == 0
    assert not torch.equal(first[2], second[2])  # each has normalised its own data since
    assert torch.allclose(first[3], second[3])  # from equal statistics, with equal data


def test_without_the_broadcast_the_statistics_diverge(ranks2):
    first, second = ranks2.run(statistics, False)
    assert first[0] == second[0] == [0, 1]
    assert not torch.allclose(first[3], second[3])


# ---- order


class Backwards(nn.Module):
    """Layers that forward uses from the last to the first, so that the first is ready first."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(10, 10, bias=False) for _ in range(4)])

    def forward(self, x):
        for layer in reversed(self.layers):
            x = torch.tanh(layer(x))
        return x


def orders(rank):
    """Buckets as numbers of layers, after each of three steps; sent during backward; broadcasts."""
    torch.manual_seed(0)
    # 400 bytes a weight: one in the first bucket, two in the others
    model = DataParallel(Backwards(), dist.group.WORLD, bucket_mb=0.00085, first_bucket_mb=0.0004)
    number_of = {layer.weight: number for number, layer in enumerate(model.module.layers)}
    found = []
    for _ in range(3):
        with counted() as calls:
            loss = model(torch.ones(2, 10)).sum()
            broadcasts = totals(calls).get("broadcast", (0, 0))
            loss.backward()
            while_computing = sum(bucket.work is not None for bucket in model.buckets)
            model.finish_gradient_sync()
        cut = [[number_of[param] for param in bucket.params] for bucket in model.buckets]
        found.append((cut, broadcasts, while_computing))
    return found


def test_after_the_first_step_buckets_follow_the_order_in_which_gradients_came(ranks2):
    for first, second, third in ranks2.run(orders):
        assert first == ([[3], [2, 1], [0]], (0, 0), 3)
        assert second == ([[0], [1, 2], [3]], (1, 4 * 8), 3)  # four int64
        assert third == ([[0], [1, 2], [3]], (0, 0), 3)


def disagreeing(rank):
    """The order of buckets where ranks see different ones, and the average all the same."""
    torch.manual_seed(0)
    module = Branches().double()
    model = DataParallel(module, dist.group.WORLD, bucket_mb=1e-9)
    grads = []
    for _ in range(3):
        model.zero_grad()
        used = [0, 1, 2] if rank == 0 else [2, 1, 0]
        model(torch.ones(1, 3, dtype=torch.float64), used).sum().backward()
        model.finish_gradient_sync()
        grads.append(torch.cat([param.grad.flatten() for param in module.parameters()]))
    names = {param: name for name, param in module.named_parameters()}
    return [names[bucket.params[0]] for bucket in model.buckets], torch.stack(grads)


def test_ranks_that_see_different_orders_take_that_of_the_first(ranks2):
    (first, one), (second, other) = ranks2.run(disagreeing)
    assert first == second
    assert [name.split(".")[1] for name in first] == ["2", "2", "1", "1", "0", "0"]
    assert torch.equal(one, other)
    assert torch.allclose(one, one[0])


def test_the_first_bucket_is_smaller_and_each_holds_one_dtype():
    def sizes(params, *limits):
        cut = cut_into_buckets(params, *limits)
        return [[param.numel() for param in bucket] for bucket in cut]

    params = [nn.Parameter(torch.zeros(100)) for _ in range(5)]  # 400 bytes each
    assert sizes(params, 0.0012) == [[100] * 3, [100] * 2]
    assert sizes(params, 0.0012, 0.0004) == [[100], [100] * 3, [100]]
    assert sizes(params, 0.0004, 1) == [[100]] * 5  # a first bucket is never larger
    assert sizes(params, 1e-9, 1e-9) == [[100]] * 5
    mixed = [params[0], nn.Parameter(torch.zeros(50, dtype=torch.float64)), params[1]]
    assert sizes(mixed, 25) == [[100], [50], [100]]
