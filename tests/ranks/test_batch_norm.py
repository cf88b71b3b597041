"""BatchNorm over the samples of all ranks, against one process that has them all."""

import copy

import pytest
import torch
from torch import nn

from labcode.comm.counting import counted, totals
from labcode.comm.grid import Grid
from labcode.parallel.batch_norm import WholeBatchNorm, convert
from labcode.topology import GridShape

CHANNELS = 3
# name: (a plain BatchNorm, the shape of a sample behind its channels)
KINDS = {
    "1d": (lambda: nn.BatchNorm1d(CHANNELS), ()),
    "2d": (lambda: nn.BatchNorm2d(CHANNELS, momentum=None), (4, 5)),
    "not affine": (lambda: nn.BatchNorm1d(CHANNELS, affine=False), (6,)),
    "no running statistics": (lambda: nn.BatchNorm1d(CHANNELS, track_running_stats=False), ()),
}
EVEN = {2: (4, 4), 4: (2, 2, 2, 2)}
UNEVEN = {2: (1, 7), 4: (3, 0, 4, 1)}  # a rank without a sample among them


def samples(kind, sizes, seed):
    """The whole batch, off centre so that a careless variance loses digits, and the loss's pull."""
    generator = torch.Generator().manual_seed(seed)
    shape = (sum(sizes), CHANNELS, *KINDS[kind][1])
    whole = 1e4 + torch.randn(shape, generator=generator, dtype=torch.float64)
    pull = torch.randn(shape, generator=generator, dtype=torch.float64)
    return whole, pull


def run(module, x, pull):
    """(output, gradient of x) of one training step; gradients stay in the module."""
    x = x.clone().requires_grad_()
    output = module(x)
    (output * pull).sum().backward()
    return output.detach(), x.grad


def on_shares(rank, kind, sizes):
    """Three steps of a rank: its outputs and gradients, and the module's state at the end."""
    grid = Grid.create(GridShape(dp=len(sizes)))
    group = grid.group("dp")
    torch.manual_seed(0)
    module = nn.Sequential(KINDS[kind][0]().double())
    module = convert(module, group)
    assert isinstance(module[0], WholeBatchNorm)
    found = []
    for step in range(3):
        whole, pull = samples(kind, sizes, step)
        own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        found.append(run(module, whole[own], pull[own]))
    grads = {name: param.grad for name, param in module.named_parameters()}
    module.eval()
    whole, _ = samples(kind, sizes, 9)
    return found, grads, dict(module.named_buffers()), module(whole).detach()


@pytest.mark.parametrize("sizes", ["even", "uneven"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_shares_give_what_one_process_gives(request, ranks, kind, sizes):
    pool = request.getfixturevalue(f"ranks{ranks}")
    shares = (EVEN if sizes == "even" else UNEVEN)[ranks]
    if kind == "no running statistics" and sizes == "uneven":
        shares = tuple(max(1, size) for size in shares)  # it communicates in evaluation as well
    answers = pool.run(on_shares, kind, shares)

    module = nn.Sequential(KINDS[kind][0]().double())
    for step in range(3):
        expected = run(module, *samples(kind, shares, step))
        for part in (0, 1):
            found = torch.cat([answer[0][step][part] for answer in answers])
            torch.testing.assert_close(found, expected[part], rtol=1e-9, atol=1e-9)
    for name, param in module.named_parameters():
        found = sum(answer[1][name] for answer in answers)
        torch.testing.assert_close(found, param.grad, rtol=1e-9, atol=1e-8)
    module.eval()
    evaluated = module(samples(kind, shares, 9)[0])
    for answer in answers:
        for name, buffer in module.named_buffers():
            torch.testing.assert_close(answer[2][name], buffer, rtol=1e-9, atol=0)
        if module[0].track_running_stats:
            torch.testing.assert_close(answer[3], evaluated, rtol=1e-9, atol=1e-9)


def in_halves(rank):
    """Statistics of two groups of two, each with numbers of its own."""
    grid = Grid.create(GridShape(dp=2, tp=2))
    module = convert(nn.BatchNorm1d(1, momentum=1.0), grid.group("dp"))
    with counted() as calls:
        module(torch.full((4, 1), float(grid.coord("tp"))) + grid.coord("dp")).sum().backward()
    return grid.coord("tp"), float(module.running_mean), totals(calls)


def test_a_sub_group_has_its_own_statistics_and_sends_what_is_said(ranks4):
    for tp_coord, mean, sent in ranks4.run(in_halves):
        assert mean == pytest.approx(tp_coord + 0.5)
        assert sent["all_gather"][0] == 1 and sent["all_reduce"] == (1, 2 * 4)


def per_rank(rank):
    """What plain BatchNorm makes of two samples a rank, and what the whole batch would give."""
    torch.manual_seed(0)
    whole = torch.randn(8, 1)
    own = whole[2 * rank : 2 * rank + 2]
    plain = nn.BatchNorm1d(1, momentum=1.0)
    ours = convert(copy.deepcopy(plain), Grid.create(GridShape(dp=4)).group("dp"))
    plain(own)
    ours(own)
    return float(plain.running_mean), float(ours.running_mean), float(whole.mean())


def test_without_it_ranks_disagree_about_the_mean(ranks4):
    plain, ours, whole = zip(*ranks4.run(per_rank))
    assert len({round(mean, 6) for mean in plain}) == 4
    assert ours == pytest.approx(whole, abs=1e-6)


def one_value(rank):
    module = convert(nn.BatchNorm1d(2), Grid.create(GridShape(dp=2)).group("dp"))
    try:
        module(torch.ones(1 - rank, 2))
    except ValueError as error:
        return str(error)
    return ""


def test_a_single_value_has_no_variance(ranks2):
    for message in ranks2.run(one_value):
        assert message.startswith("all ranks together have 1 value of each channel")


def unchanged(rank):
    """What a converted module keeps: weights, mode, and the tensors an optimizer holds."""
    plain = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.ReLU()).eval()
    weight = plain[1].weight
    names = list(plain.state_dict())
    made = convert(plain, Grid.create(GridShape(dp=1)).group("dp"))
    return made[1].weight is weight, made[1].training, names == list(made.state_dict())


def test_conversion_keeps_weights_mode_and_names(ranks1):
    assert ranks1.run(unchanged) == [(True, False, True)]


def in_bfloat16(rank):
    """Ours and a plain BatchNorm on 16-bit inputs with more values than that dtype can count."""
    group = Grid.create(GridShape(dp=2)).group("dp")
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(602, 2, generator=generator).bfloat16()
    plain = nn.BatchNorm1d(2, momentum=1.0)
    ours = convert(copy.deepcopy(plain), group)
    own = slice(301 * rank, 301 * rank + 301)
    expected = run(plain, whole, whole)
    found = run(ours, whole[own], whole[own])
    differences = []
    for part in (0, 1):
        assert found[part].dtype == expected[part].dtype
        differences.append(float((found[part] - expected[part][own]).abs().max()))
    return differences, float((ours.running_var - plain.running_var).abs().max())


def test_inputs_of_16_bits_have_statistics_of_32(ranks2):
    for (output, grad), running in ranks2.run(in_bfloat16):
        assert output < 0.02 and grad < 0.02  # one step of a bfloat16 near 4
        assert running < 1e-5


class _TwoNames(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.BatchNorm1d(3)
        self.again = self.first


def two_names(rank):
    made = convert(_TwoNames(), Grid.create(GridShape(dp=1)).group("dp"))
    return made.first is made.again and isinstance(made.again, WholeBatchNorm)


def test_a_module_with_two_names_stays_one(ranks1):
    assert ranks1.run(two_names) == [True]


def second_derivative(rank):
    module = convert(nn.BatchNorm1d(1).double(), Grid.create(GridShape(dp=1)).group("dp"))
    x = torch.randn(4, 1, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad((module(x) ** 3).sum(), x, create_graph=True)
    try:
        grad.sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_second_derivative_is_refused(ranks1):
    (message,) = ranks1.run(second_derivative)
    assert "once_differentiable" in message
