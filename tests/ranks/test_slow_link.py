"""The simulated link of lesson 04: it delays, in order, and changes nothing else."""

import itertools

from labcode.perf.comm import Link, time_s

LINK = Link(alpha_s=0.01, beta_bytes_per_s=1e4)


def step(link, bucket_mb=1e-9):
    """Gradients of one step, the link's log, and when the wait began and ended."""
    import time

    import torch
    import torch.distributed as dist
    from torch import nn

    from labcode.parallel.data import DataParallel
    from labcode.teach.slow_link import SlowLink

    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(5, 5, bias=False) for _ in range(3))).double()  # 200 bytes each
    model = DataParallel(net, dist.group.WORLD, bucket_mb)
    log = SlowLink(model, link).log if link else []
    model(torch.full((2, 5), 1.0 + dist.get_rank(), dtype=torch.float64)).sum().backward()
    begin = time.perf_counter()
    model.finish_gradient_sync()
    return torch.cat([p.grad.flatten() for p in net.parameters()]), log, begin, time.perf_counter()


def test_buckets_follow_one_another_for_the_time_of_the_model_and_the_wait_lasts_until_then(ranks2):
    for _, log, begin, end in ranks2.run(step, LINK):
        assert len(log) == 3
        for start, stop in log:
            assert abs(stop - start - time_s("all_reduce", 2, 200, LINK)) < 1e-6
        assert all(later[0] >= earlier[1] for earlier, later in itertools.pairwise(log))
        assert log[0][0] < begin and end >= log[-1][1]  # the first left during backward


def test_the_gradients_are_those_without_the_link(ranks2):
    slow, plain = ranks2.run(step, LINK), ranks2.run(step, None)
    assert all((a[0] == b[0]).all() for a, b in zip(slow, plain))
