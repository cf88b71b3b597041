"""The emulated link of lesson 05: it delays, in order, and changes nothing else."""

import itertools

from course.labs.l05_slow_link import schedule, step_ms
from labcode.perf.alpha_beta import Link, time_s

LINK = Link(alpha_s=0.01, beta_bytes_per_s=1e4)


def step(link, bucket_mb=1e-9):
    """Gradients of one step, the link's log, and when the wait began and ended."""
    import time

    import torch
    import torch.distributed as dist
    from torch import nn

    from course.labs.l05_slow_link import NO_DELAY, SlowLink
    from labcode.parallel.data import DataParallel

    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(5, 5, bias=False) for _ in range(3))).double()  # 200 bytes each
    model = DataParallel(net, dist.group.WORLD, bucket_mb)
    loss = model(torch.full((2, 5), 1.0 + dist.get_rank(), dtype=torch.float64)).sum()
    with SlowLink(link or NO_DELAY) as slow:
        loss.backward()
        begin = time.perf_counter()
        model.finish_gradient_sync()
    slow.wait()
    end = time.perf_counter()
    gradients = [param.grad.flatten() for param in net.parameters()]
    return torch.cat(gradients), slow.log, begin, end


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


def both_ways():
    """The fastest of two steps, without overlap and with it."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from course.labs import l05_by_hand
    from course.labs.l05_slow_link import Way, fastest_steps

    def new_net():
        return nn.Sequential(*(nn.Linear(5, 5, bias=False) for _ in range(3))).double()

    def one_each(net):
        return [[param] for param in reversed(list(net.parameters()))]

    plain = new_net()
    hooked = new_net()
    parallel = l05_by_hand.OverlappedDataParallel(hooked, dist.group.WORLD, one_each(hooked))

    def average():
        l05_by_hand.average_buckets(one_each(plain), dist.group.WORLD)

    ones = torch.ones(2, 5, dtype=torch.float64)
    (steps,) = fastest_steps(
        Way(plain, average),
        Way(hooked, parallel.finish_gradient_sync),
        lambda net: net(ones).sum(),
        dist.group.WORLD,
        [LINK],
        repeats=2,
    )
    return steps


def test_a_step_tells_backward_from_waiting_and_when_buckets_travelled(ranks2):
    busy = 3 * time_s("all_reduce", 2, 200, LINK)
    for steps in ranks2.run(both_ways):
        for overlap, step in enumerate(steps):
            assert abs(step.link_s - busy) < 1e-6 and step.wait_s == step.total_s - step.backward_s
            assert (step.sent[0][0] < step.backward_s) == overlap and step.total_s >= step.sent[-1][
                1
            ]
            assert (step.exposed_s < step.link_s) == overlap and step.exposed_s > 0
            lanes = step.lanes()
            assert lanes.backward == [(0.0, step.backward_s * 1e3)]
            assert lanes.sent == [(begin * 1e3, end * 1e3) for begin, end in step.sent]


def test_the_schedule_on_paper():
    assert step_ms(4, 10, 8, overlapped=False) == 4 * 10 + 4 * 8
    assert step_ms(4, 10, 8, overlapped=True) == 4 * 10 + 8
    assert step_ms(4, 10, 15, overlapped=True) == 10 + 4 * 15
    assert step_ms(1, 10, 8, overlapped=True) == step_ms(1, 10, 8, overlapped=False)
    lanes = schedule(2, 3, 1, overlapped=True)
    assert lanes.backward == [(0, 3), (3, 6)] and lanes.sent == [(3, 4), (6, 7)]
