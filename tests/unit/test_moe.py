"""A mixture of experts on one process, against what the papers write down token by token."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from labcode.models.moe import SCORINGS, MoE, Router, capacity, dispatch


def made(scoring="softmax", top_k=2, num_experts=5, **others):
    """A layer with weights far from zero, in float64."""
    torch.manual_seed(3)
    layer = MoE(6, 4, num_experts, top_k, scoring=scoring, **others).double()
    for param in layer.parameters():
        if param.requires_grad:
            torch.nn.init.normal_(param, std=0.7)
    return layer


def token_by_token(layer, x):
    """y = sum of w_e down_e(act(up_e x)), one token after the other, without any sorting."""
    router = layer.router
    out = torch.zeros_like(x)
    for place in torch.cartesian_prod(torch.arange(x.shape[0]), torch.arange(x.shape[1])):
        token = x[tuple(place)]
        logits = router.weight @ token
        scores = logits.sigmoid() if router.scoring == "sigmoid" else logits.softmax(0)
        chosen = (scores + router.bias).argsort(descending=True)[: router.top_k]
        weights = scores[chosen]
        if router.scoring != "softmax":
            weights = weights / weights.sum()
        for expert, weight in zip(chosen, weights):
            gate, up = (layer.experts.up[expert] @ token).chunk(2)
            made = layer.experts.down[expert] @ (F.silu(gate) * up)
            out[tuple(place)] += weight * made
    return out


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_a_layer_computes_what_is_written_token_by_token(scoring, top_k):
    layer = made(scoring, top_k, bias_rate=0.1)
    layer.router.bias.data = torch.tensor([0.3, 0, -0.2, 0, 0.1], dtype=torch.float64)
    x = torch.randn(2, 7, 6, dtype=torch.float64)
    torch.testing.assert_close(layer(x), token_by_token(layer, x), rtol=0, atol=1e-12)


def test_the_softmax_of_the_chosen_is_the_softmax_divided_by_its_sum():
    router = Router(6, 5, 2, scoring="softmax_of_chosen")
    torch.nn.init.normal_(router.weight)
    x = torch.randn(1, 9, 6)
    weights, experts = router(x)
    logits = x @ router.weight.T
    torch.testing.assert_close(weights, logits.gather(-1, experts).softmax(-1))


def test_a_shared_expert_is_added():
    layer = made(shared_ffn_size=8)
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    out = layer(x)
    shared = layer.shared(x)
    layer.shared = None
    torch.testing.assert_close(out, layer(x) + shared)


def test_gradients_are_those_of_finite_differences():
    layer = made()
    x = torch.randn(1, 4, 6, dtype=torch.float64, requires_grad=True)
    names = ["router.weight", "experts.up", "experts.down"]
    values = [layer.get_parameter(name).detach().requires_grad_() for name in names]

    def output(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values)), (x,))

    assert torch.autograd.gradcheck(output, (x, *values))


# ---- balance


def losses_of(layer, x):
    """The two losses of a router, from the definitions."""
    logits = x @ layer.router.weight.T
    scores = logits.softmax(-1)
    _, experts = layer.router(x)
    num_experts = layer.router.num_experts
    per_sequence = []
    for number in range(len(x)):
        chosen = F.one_hot(experts[number], num_experts).to(x.dtype)  # [S, k, E]
        fraction = chosen.mean((0, 1))
        per_sequence.append(num_experts * (fraction * scores[number].mean(0)).sum())
    balance = torch.stack(per_sequence).mean()
    z_loss = logits.logsumexp(-1).square().mean()
    return balance, z_loss


def test_the_losses_hang_on_the_output_and_have_the_gradients_of_their_definitions():
    layer = made(balance=0.02, z_loss=0.003)
    x = torch.randn(3, 7, 6, dtype=torch.float64, requires_grad=True)
    target = torch.randn(3, 7, 6, dtype=torch.float64)
    layer.router.loss_scale = 4.0
    (layer(x) * target).sum().backward()
    plain = made()
    y = x.detach().clone().requires_grad_()
    balance, z_loss = losses_of(plain, y)
    ((plain(y) * target).sum() + 4 * (0.02 * balance + 0.003 * z_loss)).backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        layer.router.weight.grad, plain.router.weight.grad, rtol=0, atol=1e-12
    )


def test_the_balance_loss_is_1_for_an_even_router_and_grows_when_it_is_not():
    even = Router(4, 4, 1, balance=1.0)
    with torch.no_grad():
        even.weight.copy_(torch.eye(4) * 30)
    x = torch.eye(4)[None].repeat(1, 3, 1)  # each of four tokens has an expert of its own
    even, collapsed = (balance_of(even, tokens) for tokens in (x, x[:, :1].repeat(1, 12, 1)))
    assert even == pytest.approx(1.0)
    assert collapsed == pytest.approx(4.0)


def balance_of(router, x):
    _, experts = router(x)
    scores = (x @ router.weight.T).softmax(-1)
    fraction = router.counts(experts)[0] / experts.numel()
    return router.num_experts * (fraction * scores.mean((0, 1))).sum().item()


def test_rows_are_counted_once_under_activation_checkpointing_and_not_in_evaluation():
    layer = made()
    x = torch.randn(2, 7, 6, dtype=torch.float64, requires_grad=True)
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert layer.router.load.sum() == 2 * 7 * 2
    with torch.no_grad():
        layer(x)
    assert layer.router.load.sum() == 2 * 7 * 2


def test_the_bias_evens_the_load_out():
    """Without it one expert gets nearly all first choices; after some steps none gets half."""
    torch.manual_seed(0)
    layer = made("sigmoid", top_k=1, num_experts=4, bias_rate=0.02)
    x = torch.randn(4, 64, 6, dtype=torch.float64)
    x += 2 * layer.router.weight[1].detach()  # all tokens look like what expert 1 likes
    fractions = []
    for _ in range(200):
        layer(x).sum().backward()
        load = layer.router.load
        fractions.append((load.max() / load.sum()).item())
        layer.router.bias += layer.router.move_of_bias(load)
        layer.router.load = None
    assert fractions[0] > 0.7
    assert fractions[-1] < 0.35


# ---- capacity


def test_first_choices_and_earlier_tokens_come_first():
    experts = torch.tensor([[[0, 1], [0, 1], [1, 0], [0, 2]]])  # [1, 4, 2]
    # C = ceil(1 * 4 * 2 / 4) = 2
    order, counts = dispatch(experts, 4, capacity_factor=1.0)
    assert counts.tolist() == [2, 2, 1, 0]
    # rows are 2 t + j: expert 0 has the first choices of tokens 0 and 1, expert 1 that of token 2
    # and the second one of token 0
    assert order.tolist() == [0, 2, 1, 4, 7]


def test_a_capacity_that_is_large_enough_drops_nothing():
    experts = torch.randint(5, (3, 8, 2))
    whole = dispatch(experts, 5)
    for ours, theirs in zip(dispatch(experts, 5, capacity_factor=5.0), whole):
        assert torch.equal(ours, theirs)


def test_a_dropped_row_adds_nothing():
    layer = made(top_k=1, num_experts=4, capacity_factor=1.0, bias_rate=0.1)
    layer.router.bias[2] = 100.0  # everybody wants expert 2
    x = torch.randn(2, 8, 6, dtype=torch.float64)
    out = layer(x)
    room = capacity(8, 4, 1, 1.0)
    assert room == 2
    assert (out[:, :room] != 0).all() and (out[:, room:] == 0).all()


def test_bad_sizes_are_refused_in_one_line():
    with pytest.raises(ValueError, match="top_k=6 of 5 experts: a token uses from 1 to 5"):
        Router(4, 5, 6)
    with pytest.raises(ValueError, match="give at least 1, or 0 for no capacity"):
        MoE(4, 4, 4, 2, capacity_factor=0.5)
    with pytest.raises(ValueError, match="choose softmax or"):
        Router(4, 5, 2, scoring="tanh")


def test_as_many_flops_as_k_experts():
    """The products are those of k experts and the router, however many experts there are."""
    from torch.utils.flop_counter import FlopCounterMode

    layer = made(top_k=2, num_experts=16)
    x = torch.randn(2, 8, 6, dtype=torch.float64)
    with FlopCounterMode(display=False) as counter:
        layer(x)
    tokens = 16
    assert counter.get_total_flops() == 2 * tokens * (2 * 3 * 6 * 4 + 16 * 6)
    assert math.prod(layer.experts.up.shape) == 16 * 8 * 6
