"""DataParallel by hand against one process and against PyTorch's DDP, in float64."""

import pytest
import torch

IMPLEMENTATIONS = ("labcode", "ddp")
BUCKETS_MB = (25, 1e-4, 1e-9)  # all in one, a few, one parameter each


def gradients(rank, implementation, bucket_mb, accumulation):
    """Gradients of one step over this rank's share, and of the whole batch in one process."""
    import contextlib

    import torch
    import torch.distributed as dist
    from torch import nn

    from labcode.parallel.data import DataParallel
    from labcode.parallel.torch_data import TorchDataParallel

    def model(seed):
        torch.manual_seed(seed)
        net = nn.Sequential(
            nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 2)
        ).double()
        net[2].weight = net[2].weight  # used once; the tie below shares a tensor between two layers
        net[2].bias.requires_grad_(False)  # a frozen weight
        net.append(nn.Linear(2, 2).double())
        net.append(nn.Linear(2, 2).double())
        net[6].weight = net[5].weight  # tied weights: one gradient, summed over both uses
        return net

    p = dist.get_world_size()
    torch.manual_seed(99)
    x, y = torch.randn(16, 6, dtype=torch.float64), torch.randn(16, 2, dtype=torch.float64)

    reference = model(0)
    nn.functional.mse_loss(reference(x), y).backward()

    local = model(rank)  # ranks are seeded differently: rank 0's weights must win
    if implementation == "labcode":
        parallel = DataParallel(local, dist.group.WORLD, bucket_mb)
    else:
        parallel = TorchDataParallel(local, process_group=dist.group.WORLD, bucket_cap_mb=bucket_mb)
    mine, targets = x.chunk(p)[rank].chunk(accumulation), y.chunk(p)[rank].chunk(accumulation)
    for number, (inputs, target) in enumerate(zip(mine, targets)):
        last = number == accumulation - 1
        with contextlib.nullcontext() if last else parallel.no_sync():
            (nn.functional.mse_loss(parallel(inputs), target) / accumulation).backward()
    parallel.finish_gradient_sync()
    names = [name for name, param in reference.named_parameters() if param.requires_grad]
    return [
        (name, local.get_parameter(name).grad, reference.get_parameter(name).grad) for name in names
    ]


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("bucket_mb", BUCKETS_MB)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_averaged_gradients_equal_those_of_one_process(
    ranks2, ranks4, implementation, bucket_mb, accumulation
):
    for pool in (ranks2, ranks4):
        for result in pool.run(gradients, implementation, bucket_mb, accumulation):
            for name, ours, expected in result:
                torch.testing.assert_close(
                    ours,
                    expected,
                    rtol=0,
                    atol=1e-12,
                    msg=lambda text, name=name: f"{name}: {text}",
                )


def bucket_sizes(bucket_mb):
    from torch import nn

    from labcode.parallel.data import make_buckets

    # 40 kB each in float32
    net = nn.Sequential(*(nn.Linear(100, 100, bias=False) for _ in range(5)))
    buckets = make_buckets(net, bucket_mb)
    order = [id(param) for bucket in buckets for param in bucket.params]
    return [bucket.num_bytes for bucket in buckets], order == [
        id(p) for p in reversed(list(net.parameters()))
    ]


@pytest.mark.parametrize(
    ("bucket_mb", "sizes"),
    [(25, [200_000]), (0.085, [80_000, 80_000, 40_000]), (0.01, [40_000] * 5)],
)
def test_buckets_fill_from_the_last_layer_up_to_their_size(bucket_mb, sizes):
    assert bucket_sizes(bucket_mb) == (sizes, True)


def uneven_use(rank):
    """Only rank 0 uses the second layer: the others' share of its gradient is zero."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from labcode.parallel.data import DataParallel

    torch.manual_seed(0)
    net = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]).double()
    parallel = DataParallel(net, dist.group.WORLD, bucket_mb=1e-9)
    out = net[0](torch.ones(1, 3, dtype=torch.float64))
    (net[1](out) if rank == 0 else out).sum().backward()
    parallel.finish_gradient_sync()
    return net[1].bias.grad.tolist()


def test_a_layer_that_only_one_rank_uses_does_not_hang_and_counts_as_zero_elsewhere(ranks2):
    assert ranks2.run(uneven_use) == [[0.5] * 3] * 2


def overlap(rank):
    """Which buckets had been sent when the hook of each parameter fired."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from labcode.parallel.data import DataParallel

    net = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    parallel = DataParallel(net, dist.group.WORLD, bucket_mb=1e-9)
    sent = []
    for param in net.parameters():
        param.register_post_accumulate_grad_hook(
            lambda p: sent.append(sum(b.work is not None for b in parallel.buckets))
        )
    parallel(torch.ones(1, 4)).sum().backward()
    parallel.finish_gradient_sync()
    return sent


def test_a_bucket_leaves_while_backward_still_computes(ranks2):
    assert ranks2.run(overlap) == [[1, 2, 3]] * 2


def is_freed():
    """Whether a model and its parameters are gone once nobody uses them any more."""
    import gc
    import weakref

    import torch
    import torch.distributed as dist

    from labcode.parallel.data import DataParallel

    model = DataParallel(torch.nn.Linear(3, 3), dist.group.WORLD)
    model(torch.ones(2, 3)).sum().backward()
    model.finish_gradient_sync()
    left = [weakref.ref(model), weakref.ref(model.module.weight)]
    del model
    gc.collect()
    return [reference() is None for reference in left]


def test_a_model_is_freed_with_its_last_user(ranks2):
    assert ranks2.run(is_freed) == [[True, True]] * 2
