"""What public tests of a hand-written DDP ask, in the manner of Stanford's CS336, assignment 2.

A wrapped toy model with a frozen parameter, with and without tied weights, is trained on shares of
the data for several steps; after each it must have the weights of one process that sees all data.

Source: github.com/stanford-cs336/assignment2-systems, tests/test_ddp.py: the same questions, asked
anew.
"""

import pytest
import torch
from torch import nn

from labcode.parallel.data import DataParallel

STEPS = 5
SAMPLES = 24


class Toy(nn.Module):
    """Three layers without bias, and a parameter that is not trained."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(10, 10, bias=False)
        self.middle = nn.Linear(10, 50, bias=True)
        self.last = nn.Linear(50, 5, bias=False)
        self.fixed = nn.Parameter(torch.tensor([2.0, 2.0]), requires_grad=False)

    def forward(self, x):
        return self.last(torch.relu(self.middle(torch.relu(self.first(x)))))


class TiedToy(nn.Module):
    """One weight in two layers, with another between them."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(10, 50, bias=False)
        self.middle = nn.Linear(50, 10, bias=False)
        self.again = nn.Linear(10, 50, bias=False)
        self.last = nn.Linear(50, 5, bias=False)
        self.again.weight = self.first.weight
        self.fixed = nn.Parameter(torch.tensor([2.0, 2.0]), requires_grad=False)

    def forward(self, x):
        hidden = torch.relu(self.middle(torch.relu(self.first(x))))
        return self.last(torch.relu(self.again(hidden)))


MODELS = {"toy": Toy, "tied": TiedToy}
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
}


def trained(rank, kind, bucket_mb, optimizer_kind, set_to_none):
    """The weights before wrapping; (name, weight, that of one process) after each step; names."""
    import torch.distributed as dist

    size = dist.get_world_size()
    torch.manual_seed(rank)  # ranks begin differently: the first one's weights must win
    own = MODELS[kind]().double()
    before = [param.detach().clone() for param in own.parameters()]
    wrapped = DataParallel(own, dist.group.WORLD, bucket_mb)
    torch.manual_seed(0)
    alone = MODELS[kind]().double()
    own_optimizer = OPTIMIZERS[optimizer_kind](wrapped.parameters())
    alone_optimizer = OPTIMIZERS[optimizer_kind](alone.parameters())
    torch.manual_seed(1)
    inputs = torch.randn(SAMPLES, 10, dtype=torch.float64)
    targets = torch.randn(SAMPLES, 5, dtype=torch.float64)
    after = []
    for _ in range(STEPS):
        order = torch.randperm(SAMPLES)
        inputs, targets = inputs[order], targets[order]
        alone_optimizer.zero_grad(set_to_none=set_to_none)
        nn.functional.mse_loss(alone(inputs), targets).backward()
        alone_optimizer.step()
        own_optimizer.zero_grad(set_to_none=set_to_none)
        share = nn.functional.mse_loss(wrapped(inputs.chunk(size)[rank]), targets.chunk(size)[rank])
        share.backward()
        wrapped.finish_gradient_sync()
        own_optimizer.step()
        for name, param in alone.named_parameters():
            found = wrapped.module.get_parameter(name)
            after.append((name, found.detach().clone(), param.detach().clone()))
    names = [name for name, _ in wrapped.named_parameters()]
    return before, after, names


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("bucket_mb", [0.0016, 0.0001, 0.01])
@pytest.mark.parametrize("kind", MODELS)
def test_training_on_shares_is_training_in_one_process(
    ranks2, kind, bucket_mb, optimizer, set_to_none
):
    found = ranks2.run(trained, kind, bucket_mb, optimizer, set_to_none)
    (first, *_), (second, *_) = found
    # the two ranks began differently, apart from the fixed parameter
    assert [torch.equal(a, b) for a, b in zip(first, second)].count(True) == 1
    for _, after, names in found:
        assert len(after) == STEPS * len(names)
        assert all(name.startswith("module.") for name in names)
        for name, weight, expected in after:
            torch.testing.assert_close(weight, expected, rtol=0, atol=1e-12, msg=name)
            if name == "fixed":
                assert torch.equal(weight, torch.tensor([2.0, 2.0], dtype=torch.float64))


def messages_of_tied_weights(rank):
    import torch.distributed as dist

    from labcode.comm.counting import counted, totals

    wrapped = DataParallel(TiedToy(), dist.group.WORLD)
    with counted() as calls:
        wrapped(torch.ones(4, 10)).sum().backward()
        wrapped.finish_gradient_sync()
    return totals(calls), wrapped.module.first.weight.grad is wrapped.module.again.weight.grad


def test_tied_weights_have_one_gradient_that_is_sent_once(ranks2):
    num_bytes = (10 * 50 + 50 * 10 + 50 * 5) * 4
    assert ranks2.run(messages_of_tied_weights) == [({"all_reduce": (1, num_bytes)}, True)] * 2
