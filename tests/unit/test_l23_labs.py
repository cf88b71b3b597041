"""Lesson 23: the published counts, the finished exercises, and the trainings that it shows."""

import pytest
import torch

from course.labs import l23_experts as lab
from labcode.models import moe


@pytest.mark.parametrize("name", lab.MIXTURES)
def test_counts_are_those_that_the_makers_publish(name):
    total, active = lab.total_and_active(lab.MIXTURES[name])
    published_total, published_active = lab.PUBLISHED[name]
    assert total / 1e9 == pytest.approx(published_total, rel=0.01)
    embedding = 201_088 * 2880 if name == "gpt-oss-120b" else 0  # which its makers do not count
    assert (active - embedding) / 1e9 == pytest.approx(published_active, rel=0.02)


def test_the_finished_router_is_that_of_the_library():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, 9, 6, generator=generator, requires_grad=True)
    router = moe.Router(6, 5, 2, scoring="softmax_of_chosen", balance=0.5)
    torch.nn.init.normal_(router.weight, generator=generator)
    weights, experts = router(x)
    weights.square().sum().backward()
    y = x.detach()[0].requires_grad_()
    own, numbers, loss = lab.route(y, router.weight.detach(), 2)
    (own.square().sum() + 0.5 * loss).backward()
    assert torch.equal(experts[0], numbers)
    torch.testing.assert_close(weights[0], own)
    torch.testing.assert_close(x.grad[0], y.grad)


def test_the_finished_bias_moves_as_that_of_the_library():
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(1, 12, 6, generator=generator)
    router = moe.Router(6, 5, 2, scoring="sigmoid", bias_rate=0.03)
    torch.nn.init.normal_(router.weight, generator=generator)
    router.bias.data = torch.randn(5, generator=generator)
    weights, experts = router(x)
    scores = (x[0] @ router.weight.T).sigmoid()
    own, numbers, moved = lab.choose_with_bias(scores, router.bias, 2, 0.03)
    assert torch.equal(experts[0], numbers)
    torch.testing.assert_close(weights[0], own)
    load = router.counts(experts).sum(0)
    torch.testing.assert_close(moved, router.bias + router.move_of_bias(load).float())


def test_the_way_through_the_experts_is_the_loop_over_all():
    generator = torch.Generator().manual_seed(3)
    layer = moe.Experts(4, 3, 5)
    for param in layer.parameters():
        torch.nn.init.normal_(param, generator=generator)
    x = torch.randn(7, 4, generator=generator)
    weights = torch.rand(7, 2, generator=generator)
    experts = torch.rand(7, 5, generator=generator).topk(2).indices

    def one(number):
        def mlp(rows):
            counts = torch.zeros(5, dtype=torch.int64)
            counts[number] = len(rows)
            return layer.mlps(rows, counts)

        return mlp

    found = lab.through_experts(x, weights, experts, layer.mlps, 5)
    truth = lab.in_a_loop(x, weights, experts, [one(number) for number in range(5)])
    torch.testing.assert_close(found, truth)


def test_given_loads_are_those_of_the_experts():
    experts = lab.with_loads([5, 0, 3])
    assert experts.shape == (1, 8, 1)
    assert torch.bincount(experts.flatten(), minlength=3).tolist() == [5, 0, 3]


def test_a_training_has_a_loss_and_a_load_for_each_step():
    training = lab.trained("bias", steps=3)
    assert len(training.losses) == 3
    assert training.loads.shape == (3, 2, lab.EXPERTS)
    assert torch.allclose(training.loads.sum(-1), torch.ones(3, 2))
