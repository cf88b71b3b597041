"""ZeRO by hand around any module and any optimizer, against one process, in float64."""

import itertools

import pytest
import torch

STEPS = 5


def make_net(seed):
    """Tied, frozen, uneven and twice-used weights, and a layer list for the units."""
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Linear(5, 7)
            self.layers = nn.ModuleList([nn.Linear(7, 7), nn.Linear(7, 7), nn.Linear(7, 7)])
            self.norm = nn.LayerNorm(7)
            self.scale = nn.Parameter(torch.randn(()))
            self.unused = nn.Parameter(torch.randn(3))
            self.head = nn.Linear(7, 7)
            self.head.weight = self.layers[0].weight  # tied: a layer shares it with the rest
            self.layers[1].bias.requires_grad_(False)

        def forward(self, x):
            x = torch.tanh(self.embed(x))
            for layer in (*self.layers, self.layers[2]):  # the last layer is used twice
                x = x + torch.tanh(layer(x))
            return self.head(self.norm(x)) * self.scale

    torch.manual_seed(seed)
    return Net().double()


def data():
    torch.manual_seed(99)
    x = torch.randn(STEPS, 8, 5, dtype=torch.float64)
    return x, torch.randn(STEPS, 8, 7, dtype=torch.float64)


def optimizer_classes():
    return {
        "AdamW": (torch.optim.AdamW, {"lr": 0.02, "weight_decay": 0.1}),
        "fused AdamW": (torch.optim.AdamW, {"lr": 0.02, "fused": True}),
        "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    }


def trained_alone(optimizer):
    """The whole weights after training in one process."""
    net = make_net(0)
    kind, options = optimizer_classes()[optimizer]
    made = kind([param for param in net.parameters() if param.requires_grad], **options)
    for x, y in zip(*data()):
        torch.nn.functional.mse_loss(net(x), y).backward()
        if net.unused.grad is None:
            net.unused.grad = torch.zeros_like(net.unused)
        made.step()
        made.zero_grad()
    return {name: param.detach() for name, param in net.named_parameters()}


def own_share(tensor, rank, size, accumulation):
    return tensor.chunk(size)[rank].chunk(accumulation)


def trained(rank, stage, optimizer, accumulation=1, **options):
    """The whole weights after training on the ranks of a pool, and whether shards are smaller."""
    import contextlib

    import torch.distributed as dist

    from labcode.parallel.data import DataParallel
    from labcode.parallel.zero import FullyShardedModule, ShardedDataParallel, ShardedOptimizer

    size = dist.get_world_size()
    group = dist.group.WORLD
    net = make_net(rank)  # ranks are seeded differently: rank 0's weights must win
    kind, kwargs = optimizer_classes()[optimizer]
    if stage == 1:
        parallel = DataParallel(net, group, bucket_mb=1e-4)
        params = [param for param in net.parameters() if param.requires_grad]
        made = ShardedOptimizer(params, kind, group, **kwargs)
    else:
        if stage == 2:
            parallel = ShardedDataParallel(net, group, bucket_mb=1e-4, **options)
        else:
            parallel = FullyShardedModule(net, group, **options)
        trainable = [shard for shard in parallel.shards.values() if shard.requires_grad]
        made = kind(trainable, **kwargs)
    for x, y in zip(*data()):
        shares = zip(*(own_share(tensor, rank, size, accumulation) for tensor in (x, y)))
        for number, (inputs, targets) in enumerate(shares):
            whole = number < accumulation - 1 and stage < 3
            with parallel.no_sync() if whole else contextlib.nullcontext():
                loss = torch.nn.functional.mse_loss(parallel(inputs), targets)
                (loss / accumulation).backward()
        parallel.finish_gradient_sync()
        made.step()
        made.zero_grad()
        if stage > 1:
            parallel.gather_parameters()
    if stage == 3:
        return parallel.gather_full_params()
    return {name: param.detach() for name, param in net.named_parameters()}


def assert_equal(results, expected):
    for found in results:
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("optimizer", ["AdamW", "fused AdamW", "SGD"])
def test_a_sharded_optimizer_trains_like_a_whole_one(ranks2, ranks4, optimizer):
    expected = trained_alone(optimizer)
    for pool in (ranks2, ranks4):
        assert_equal(pool.run(trained, 1, optimizer), expected)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("keep_gradients", [True, False])
def test_sharded_gradients_are_those_of_one_process(ranks2, ranks4, accumulation, keep_gradients):
    expected = trained_alone("AdamW")
    for pool in (ranks2, ranks4):
        results = pool.run(trained, 2, "AdamW", accumulation, keep_gradients=keep_gradients)
        assert_equal(results, expected)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(
    "options", [{}, {"prefetch": False}, {"reshard_after_forward": False}], ids=str
)
def test_a_fully_sharded_module_trains_like_a_whole_one(ranks2, ranks4, options, accumulation):
    expected = trained_alone("fused AdamW")
    for pool in (ranks2, ranks4):
        results = pool.run(trained, 3, "fused AdamW", accumulation, **options)
        assert_equal(results, expected)


def unlike(rank):
    """What may not be asked for, and what is told of it."""
    import torch.distributed as dist

    from labcode.parallel.zero import ShardedOptimizer

    try:
        ShardedOptimizer([torch.nn.Parameter(torch.ones(2, 2))], torch.optim.Muon, dist.group.WORLD)
    except ValueError as error:
        return str(error)
    return ""


def test_an_optimizer_that_looks_at_whole_matrices_is_refused(ranks2):
    assert ranks2.run(unlike)[0].startswith("Muon looks at a matrix as a whole")


def rates(rank):
    """A schedule of PyTorch on a sharded optimizer: the change of a weight at each step."""
    import torch.distributed as dist

    from labcode.parallel.zero import ShardedOptimizer

    weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = ShardedOptimizer([weight], torch.optim.SGD, dist.group.WORLD, lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    changes = []
    for _ in range(3):
        before = weight.detach().clone()
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        schedule.step()
        changes.append((before - weight.detach()).tolist())
    return changes


def test_a_schedule_of_the_learning_rate_reaches_the_shards(ranks2):
    for changes in ranks2.run(rates):
        for number, change in enumerate(changes):
            assert change == pytest.approx([0.1**number] * 3)


def half(rank):
    """Whole weights after training with weights gathered in fp16, and what a rank holds."""
    import torch.distributed as dist

    from labcode.parallel.zero import FullyShardedModule

    net = make_net(0).float()
    parallel = FullyShardedModule(net, dist.group.WORLD, compute_dtype=torch.float16)
    trainable = [shard for shard in parallel.shards.values() if shard.requires_grad]
    made = torch.optim.AdamW(trainable, lr=0.02, weight_decay=0.1)
    seen = []
    hook = net.layers[0].register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    for x, y in zip(*data()):
        inputs, targets = (tensor.chunk(dist.get_world_size())[rank].float() for tensor in (x, y))
        torch.nn.functional.mse_loss(parallel(inputs).float(), targets).backward()
        parallel.finish_gradient_sync()
        made.step()
        made.zero_grad()
    hook.remove()
    dtypes = {str(shard.dtype) for shard in parallel.shards.values()}
    return parallel.gather_full_params(), seen[0], dtypes


def test_weights_can_be_gathered_in_half_precision_and_kept_in_full(ranks2):
    expected = trained_alone("AdamW")
    for found, computed_in, kept_in in ranks2.run(half):
        assert computed_in == torch.float16
        assert kept_in == {"torch.float32"}
        for name, value in expected.items():
            torch.testing.assert_close(found[name].double(), value, rtol=0, atol=1e-2, msg=name)


def held(rank, frozen=False):
    """Numbers of weights that are in memory: at rest, in each layer's forward and backward.

    Args:
        frozen: The matrices do not train; the vectors beside them do.
    """
    import torch.distributed as dist
    from torch import nn

    from labcode.parallel.zero import FullyShardedModule

    size = 8

    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(size, size, bias=frozen) for _ in range(5)])

        def forward(self, x):
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x

    whole = Layers()
    for layer in whole.layers:
        layer.weight.requires_grad_(not frozen)
    parallel = FullyShardedModule(whole, dist.group.WORLD)
    whole_layer_bytes = 4 * size * size

    def whole_layers():
        matrices = [unit for unit in parallel.units if unit.params[0].dim() == 2]
        stored = [unit._wholes[0].untyped_storage().nbytes() for unit in matrices]
        return sum(stored) / whole_layer_bytes

    during = []
    for layer in parallel.module.layers:
        layer.register_forward_hook(lambda *_: during.append(whole_layers()))
        trained = layer.bias if frozen else layer.weight
        trained.register_post_accumulate_grad_hook(lambda _: during.append(whole_layers()))
    at_rest = [whole_layers()]
    parallel(torch.ones(2, size)).sum().backward()
    parallel.finish_gradient_sync()
    at_rest.append(whole_layers())
    reads_nan = bool(parallel.module.layers[0].weight.isnan().all())
    matrices = [shard for shard in parallel.shards.values() if shard.dim() == 2]
    own_share = sum(shard.numel() for shard in matrices) / (5 * size * size)
    return at_rest, during, own_share, reads_nan


@pytest.mark.parametrize("frozen", [False, True])
def test_a_rank_holds_its_share_and_one_whole_layer_at_a_time(ranks2, ranks4, frozen):
    for pool, share in ((ranks2, 1 / 2), (ranks4, 1 / 4)):
        for at_rest, during, own_share, reads_nan in pool.run(held, frozen):
            assert at_rest == [0, 0]
            assert max(during) <= 1
            assert len(during) == 10
            assert own_share == share
            assert reads_nan


def sent(rank, stage, frozen=False):
    """{kind: bytes} of what one step of stage 0 to 3 starts, without the broadcast before it.

    Args:
        frozen: The matrices do not train; the biases do.
    """
    import torch.distributed as dist
    from torch import nn

    from labcode.comm.counting import counted, totals
    from labcode.parallel.data import DataParallel
    from labcode.parallel.zero import FullyShardedModule, ShardedDataParallel

    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

        def forward(self, x):
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x

    kinds = {0: DataParallel, 2: ShardedDataParallel, 3: FullyShardedModule}
    layers = Layers()
    for layer in layers.layers:
        layer.weight.requires_grad_(not frozen)
    parallel = kinds[stage](layers, dist.group.WORLD)
    weights = list(parallel.shards.values()) or list(parallel.module.parameters())
    optimizer = torch.optim.SGD(weights, lr=0.1)
    with counted() as calls:
        parallel(torch.ones(2, 8)).sum().backward()
        parallel.finish_gradient_sync()
        optimizer.step()
        parallel.gather_parameters()
    return totals(calls)


def test_what_each_stage_sends(ranks2):
    num_bytes = 3 * (8 * 8 + 8) * 4
    (ddp, *_), (two, *_), (three, *_) = (ranks2.run(sent, stage) for stage in (0, 2, 3))
    assert ddp == {"all_reduce": (1, num_bytes)}
    assert two == {"reduce_scatter": (1, num_bytes), "all_gather": (1, num_bytes)}
    assert three == {"all_gather": (6, 2 * num_bytes), "reduce_scatter": (3, num_bytes)}


def test_no_gradient_of_a_frozen_weight_is_sent(ranks2):
    num_bytes = 3 * (8 * 8 + 8) * 4
    bias_bytes = 3 * 8 * 4
    (three, *_) = ranks2.run(sent, 3, frozen=True)
    assert three == {"all_gather": (12, 2 * num_bytes), "reduce_scatter": (3, bias_bytes)}


def broken_then_whole(rank):
    """The gradients of this rank's rows after a backward that raised, and those without it."""
    import torch.distributed as dist

    from labcode.parallel.zero import FullyShardedModule

    x, y = data()
    found = []
    for breaks in (True, False):
        parallel = FullyShardedModule(make_net(0), dist.group.WORLD)
        if breaks:
            output = parallel(x[0])
            hook = parallel.module.layers[1].weight.register_hook(raising)
            with pytest.raises(ZeroDivisionError):
                torch.nn.functional.mse_loss(output, y[0]).backward()
            hook.remove()
            parallel.zero_grad()
        torch.nn.functional.mse_loss(parallel(x[1]), y[1]).backward()
        parallel.finish_gradient_sync()
        found.append(
            [shard.grad.clone() for shard in parallel.shards.values() if shard.grad is not None]
        )
    return found


def raising(_gradient):
    raise ZeroDivisionError


def test_after_a_backward_that_raised_the_next_one_is_whole(ranks2):
    for after, without in ranks2.run(broken_then_whole):
        assert len(after) == len(without) > 5
        for found, expected in zip(after, without):
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


def accumulated(rank, stage, **options):
    """Gradients after two backwards, a finish after each, and a third finish without a backward."""
    import torch.distributed as dist

    from labcode.parallel.zero import FullyShardedModule, ShardedDataParallel

    kind = {2: ShardedDataParallel, 3: FullyShardedModule}[stage]
    parallel = kind(make_net(rank), dist.group.WORLD, **options)
    for x, y in itertools.islice(zip(*data()), 2):
        inputs, targets = (tensor.chunk(dist.get_world_size())[rank] for tensor in (x, y))
        torch.nn.functional.mse_loss(parallel(inputs), targets).backward()
        parallel.finish_gradient_sync()
    parallel.finish_gradient_sync()
    return {name: shard.grad for name, shard in parallel.shards.items() if shard.requires_grad}


@pytest.mark.parametrize(
    ("stage", "options"), [(2, {"keep_gradients": True}), (2, {}), (3, {})], ids=str
)
def test_gradients_add_up_until_they_are_zeroed(ranks2, stage, options):
    net = make_net(0)
    for x, y in itertools.islice(zip(*data()), 2):
        torch.nn.functional.mse_loss(net(x), y).backward()
    net.unused.grad = torch.zeros_like(net.unused)
    results = ranks2.run(accumulated, stage, **options)
    for name, param in net.named_parameters():
        if param.requires_grad:
            rows = torch.cat([grads[name].reshape(-1) for grads in results])
            torch.testing.assert_close(rows, param.grad.reshape(-1), rtol=0, atol=1e-12, msg=name)


def looked_between(rank, **options):
    """Gradients of a step in which the model runs without gradients before its backward."""
    import torch.distributed as dist

    from labcode.parallel.zero import FullyShardedModule

    parallel = FullyShardedModule(make_net(rank), dist.group.WORLD, **options)
    x, y = (tensor[0].chunk(dist.get_world_size())[rank] for tensor in data())
    loss = torch.nn.functional.mse_loss(parallel(x), y)
    with torch.no_grad():
        parallel(x)
    loss.backward()
    parallel.finish_gradient_sync()
    return {name: shard.grad for name, shard in parallel.shards.items() if shard.requires_grad}


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}], ids=str)
def test_a_forward_without_gradients_may_run_between_forward_and_backward(ranks2, options):
    net = make_net(0)
    x, y = (tensor[0] for tensor in data())
    torch.nn.functional.mse_loss(net(x), y).backward()
    net.unused.grad = torch.zeros_like(net.unused)
    results = ranks2.run(looked_between, **options)
    for name, param in net.named_parameters():
        if param.requires_grad:
            rows = torch.cat([grads[name].reshape(-1) for grads in results])
            torch.testing.assert_close(rows, param.grad.reshape(-1), rtol=0, atol=1e-12, msg=name)


CLIP_NORM = 1.2  # of some steps, not of all


def trained_as_one_writes_it(rank, inside):
    """The whole weights after training, an optimizer being made of what `parameters()` gives.

    Args:
        inside: The optimizer is made of those of a module that holds the sharded one.
    """
    import torch.distributed as dist

    from labcode.parallel.zero import FullyShardedModule

    parallel = FullyShardedModule(make_net(rank), dist.group.WORLD)
    model = torch.nn.Sequential(parallel) if inside else parallel
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    for x, y in zip(*data()):
        inputs, targets = (tensor.chunk(dist.get_world_size())[rank] for tensor in (x, y))
        model.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        parallel.finish_gradient_sync()
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        square = torch.stack([grad.square().sum() for grad in grads]).sum()
        dist.all_reduce(square)
        torch._foreach_mul_(grads, (CLIP_NORM / square.sqrt()).clamp(max=1).item())
        optimizer.step()
    return parallel.gather_full_params()


@pytest.mark.parametrize("inside", [False, True])
def test_an_optimizer_made_of_its_parameters_trains_a_fully_sharded_module(ranks2, inside):
    net = make_net(0)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02, weight_decay=0.1)
    norms = []
    for x, y in zip(*data()):
        net.zero_grad()
        torch.nn.functional.mse_loss(net(x), y).backward()
        net.unused.grad = torch.zeros_like(net.unused)
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in trained_of(net)]))
        torch._foreach_mul_(
            [p.grad for p in trained_of(net)], (CLIP_NORM / norms[-1]).clamp(max=1).item()
        )
        optimizer.step()
    assert min(norms) < CLIP_NORM < max(norms)
    expected = {name: param.detach() for name, param in net.named_parameters()}
    assert_equal(ranks2.run(trained_as_one_writes_it, inside), expected)


def trained_of(net):
    return [param for param in net.parameters() if param.requires_grad]


def told_of(rank):
    """What a fully sharded module says that it has, and whether it takes its state back."""
    import torch.distributed as dist

    from labcode.parallel.zero import FullyShardedModule

    parallel = FullyShardedModule(make_net(0), dist.group.WORLD)
    named = dict(parallel.named_parameters())
    assert all(named[name] is shard for name, shard in parallel.shards.items())
    assert dict(parallel.module.named_parameters()) == named
    state = parallel.state_dict()
    for name, shard in named.items():
        assert torch.equal(state[name], shard)
    kept = {name: tensor.clone() for name, tensor in state.items()}
    for shard in parallel.parameters():
        shard.data.zero_()
    parallel.load_state_dict(kept)
    holder = torch.nn.Sequential(parallel)
    holder.load_state_dict(holder.state_dict())
    return list(named), list(state), parallel.gather_full_params()


def test_a_fully_sharded_module_tells_of_its_rows_under_the_names_of_the_module(ranks2):
    net = make_net(0)
    for names, keys, wholes in ranks2.run(told_of):
        assert names == [name for name, _ in net.named_parameters()]
        assert keys == list(net.state_dict())
        for name, param in net.named_parameters():
            assert torch.equal(wholes[name], param), name
