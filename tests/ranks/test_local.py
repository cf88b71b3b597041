"""Copies that train alone and meet now and then: local SGD and DiLoCo."""

from functools import partial

import pytest
import torch
from faults import forks
from torch import nn
from torch.nn import functional as F

from labcode.comm.counting import counted, totals
from labcode.comm.grid import Grid
from labcode.config import LocalConfig
from labcode.measure import metrics
from labcode.parallel.data import DataParallel
from labcode.parallel.local import LocalReplica, OuterOptimizer
from labcode.recipes import RECIPES
from labcode.runtime import combinations
from labcode.topology import GridShape


def new_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def share(step, rank):
    """Samples of one rank in one step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    return x, torch.sin(x[:, :2])


def weights_of(model):
    return [param.detach().clone() for param in model.parameters()]


def as_data_parallel(rank):
    """Weights after five steps of SGD: with averaged gradients, and averaged weights."""
    group = Grid.create(GridShape(dp=2)).group("dp")
    plain = DataParallel(new_model(), group)
    local = LocalReplica(new_model())
    outer = OuterOptimizer(local.parameters(), group, lr=1.0, momentum=0.0)
    for replica in (plain, local):
        inner = torch.optim.SGD(replica.parameters(), lr=0.1, weight_decay=0.01)
        for step in range(5):
            x, y = share(step, rank)
            F.mse_loss(replica(x), y).backward()
            replica.finish_gradient_sync()
            inner.step()
            inner.zero_grad()
            if replica is local:
                outer.step()
    return weights_of(plain), weights_of(local)


def test_with_one_step_and_sgd_it_is_data_parallelism(ranks2):
    for plain, local in ranks2.run(as_data_parallel):
        for expected, found in zip(plain, local):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


ROUNDS = 3
STEPS = 4


def inner_steps(model, optimizer, round_number, rank):
    for step in range(STEPS):
        x, y = share(STEPS * round_number + step, rank)
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def diloco(rank, lr, momentum):
    group = Grid.create(GridShape(dp=2)).group("dp")
    model = LocalReplica(new_model())
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    outer = OuterOptimizer(model.parameters(), group, lr, momentum)
    for number in range(ROUNDS):
        inner_steps(model, inner, number, rank)
        outer.step()
    return weights_of(model)


def by_hand(lr, momentum):
    """The training with both copies in one process, Nesterov's step written out."""
    copies = [new_model(), new_model()]
    inner = [torch.optim.AdamW(copy.parameters(), lr=0.01) for copy in copies]
    common = weights_of(copies[0])
    velocity = [torch.zeros_like(weight) for weight in common]
    for number in range(ROUNDS):
        for rank, (copy, optimizer) in enumerate(zip(copies, inner)):
            inner_steps(copy, optimizer, number, rank)
        for place, weight in enumerate(common):
            now = [list(copy.parameters())[place].detach() for copy in copies]
            gone = weight - (now[0] + now[1]) / 2
            velocity[place] = momentum * velocity[place] + gone
            common[place] = weight - lr * (gone + momentum * velocity[place])
            with torch.no_grad():
                for copy in copies:
                    list(copy.parameters())[place].copy_(common[place])
    return common


@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (1.0, 0.0), (0.3, 0.5)])
def test_two_copies_do_what_one_process_does_by_hand(ranks2, lr, momentum):
    expected = by_hand(lr, momentum)
    for found in ranks2.run(diloco, lr, momentum):
        for own, weight in zip(found, expected):
            torch.testing.assert_close(own, weight, rtol=1e-9, atol=1e-12)


def sent(rank):
    """Collectives of four steps with an average at their end, and the bytes of the weights."""
    group = Grid.create(GridShape(dp=2)).group("dp")
    module = new_model()
    module[0].bias.requires_grad_(False)
    model = LocalReplica(module)
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    outer = OuterOptimizer(model.parameters(), group)
    with counted() as while_alone:
        inner_steps(model, inner, 0, rank)
    with counted() as together:
        outer.step()
    trained = [param for param in model.parameters() if param.requires_grad]
    return len(while_alone), totals(together), sum(param.nbytes for param in trained)


def test_bytes_are_those_of_the_weights(ranks2):
    for alone, together, weight_bytes in ranks2.run(sent):
        assert alone == 0
        assert together == {"all_reduce": (1, weight_bytes)}


# ---- in a training

GPT = ["gpt_tiny", "--model.num_layers=1", "--model.num_heads=2", "--model.hidden_size=16"]
GPT += ["--model.context_length=32", "--train.global_batch=8", "--train.log_every=1"]
GPT += ["--train.eval_batches=1", "--train.sample_tokens=0", "--train.out=run"]
GPT += ["--train.dtype=float64", "--train.steps=12"]


def trained(folder, *args, ranks):
    folder.mkdir()
    done = forks.train([*GPT, *args], cwd=folder, ranks=ranks)
    assert set(done.codes) == {0}, done.err
    rows = metrics.read(folder / "run")
    losses = [row["loss"] for row in rows if "loss" in row]
    return losses, torch.load(folder / "run" / "weights.pt", weights_only=True)


def test_one_copy_that_takes_the_average_as_it_is_trains_as_without(tmp_path):
    plain, weights = trained(tmp_path / "plain", ranks=1)
    alone = ("--local.steps=5", "--local.outer_lr=1", "--local.outer_momentum=0")
    losses, found = trained(tmp_path / "local", *alone, ranks=1)
    assert losses == pytest.approx(plain, rel=1e-9)
    for name, weight in weights.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-9, atol=1e-12)


def test_a_copy_may_be_two_ranks_of_tp(tmp_path):
    expected, weights = trained(tmp_path / "dp", "--local.steps=5", ranks=2)
    losses, found = trained(tmp_path / "tp", "--local.steps=5", "--parallel.tp=2", ranks=4)
    assert losses == pytest.approx(expected, rel=1e-9)
    assert expected[-1] < expected[0]
    for name, weight in weights.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-9, atol=1e-12)


def nan_on(rank):
    """A patch: in step 6 one rank's part of the weights gets a NaN."""
    import torch
    import torch.distributed as dist

    from labcode.train.step import TrainStep

    original = TrainStep.__call__

    def step(self):
        done = original(self)
        if self.training.steps_done == 6 and dist.get_rank() == rank:
            name = "blocks.0.mlp.up.weight"
            with torch.no_grad():
                self.training.model.weights[name].view(-1)[0] = float("nan")
        return done

    TrainStep.__call__ = step


@pytest.mark.parametrize(("ranks", "tp"), [(2, 1), (4, 2)])
def test_a_copy_that_diverges_ends_the_run_on_every_rank(tmp_path, ranks, tp):
    args = [*GPT, "--local.steps=4", f"--parallel.tp={tp}", "--train.log_every=4"]
    done = forks.train(args, cwd=tmp_path, ranks=ranks, patch=partial(nan_on, ranks - 1))
    assert done.codes == [2] * ranks, done.err
    assert "not finite" in done.err[0]
    assert not done.hung and done.tracebacks == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel": {"pp": 2}}, "local.steps=4 with pp 2, cp 1"),
        ({"parallel": {"zero_stage": 1}}, "local.steps=4 with parallel.zero_stage=1"),
        ({"checkpoint": {"every": 4}}, "local.steps=4 with checkpoints"),
        ({"train": {"on_bad_step": "skip"}}, "train.on_bad_step=skip"),
        ({"train": {"dtype": "float16"}}, "train.dtype=float16"),
        ({"train": {"reduce_dtype": "bfloat16"}}, "no gradients travel"),
        (
            {"optim": {"lr_rule": "linear", "reference_batch": 8}},
            "local.steps=4 with optim.lr_rule=linear",
        ),
        ({"parallel": {"data_parallel": "labcode"}}, "leave it at ddp"),
        ({"train": {"noise_scale": True}}, "local.steps=4 with train.noise_scale"),
        ({"train": {"eval_every": 6}}, "give a multiple of local.steps"),
    ],
)
def test_what_has_no_meaning_with_copies_that_train_alone_is_refused(changes, message):
    from dataclasses import replace

    config = replace(RECIPES["gpt_tiny"](), local=LocalConfig(steps=4))
    for section, fields in changes.items():
        config = replace(config, **{section: replace(getattr(config, section), **fields)})
    with pytest.raises(ValueError, match=message) as caught:
        combinations.check(config, 4)
    assert "\n" not in str(caught.value)
