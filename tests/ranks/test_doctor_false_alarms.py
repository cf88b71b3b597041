"""The doctor says nothing about loops that are right, however they are written."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SAMPLES = 48  # of 6 numbers and one of 3 classes


def not_of_time(findings):
    """What they say, without "slow rank".

    Where another program takes one of the cores, one of these ranks is slow indeed, and it is right
    to say so. When it is said and when it is not, `tests/unit/test_doctor_slow_rank.py` holds with
    seconds that are given.
    """
    return [str(finding) for finding in findings if finding.name != "slow rank"]


def samples(num=SAMPLES):
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(num, 6, generator=generator)
    targets = torch.randint(3, (num,), generator=generator)
    return TensorDataset(inputs, targets)


def layers(*more):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), *more, nn.ReLU(), nn.Linear(8, 3))


def ready(module=None, data=None, batch_size=4, drop_last=False, shuffle=True, **options):
    """(wrapped model, optimizer, loader) of a plain script."""
    data = data or samples()
    model = DDP(module or layers(), **options)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    sampler = DistributedSampler(data, shuffle=shuffle)
    loader = DataLoader(data, batch_size=batch_size, sampler=sampler, drop_last=drop_last)
    return model, optimizer, loader


def train(model, optimizer, loader, epochs=range(2), clip=None):
    for epoch in epochs:
        loader.sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()


def plain(watch):
    model, optimizer, loader = ready()
    with watch(model, optimizer, loader=loader):
        next(iter(loader))  # a look at one batch
        train(model, optimizer, loader)


def in_micro_batches(watch, module=None, parts=3):
    model, optimizer, loader = ready(module)
    with watch(model, optimizer, loader=loader):
        for epoch in range(4):
            loader.sampler.set_epoch(epoch)
            for number, (inputs, targets) in enumerate(loader, start=1):
                is_last = number % parts == 0
                with contextlib.nullcontext() if is_last else model.no_sync():
                    (F.cross_entropy(model(inputs), targets) / parts).backward()
                if is_last:
                    optimizer.step()
                    optimizer.zero_grad()


def batch_norm_in_micro_batches(watch):
    # within a step DDP broadcasts no buffers
    in_micro_batches(watch, layers(nn.BatchNorm1d(8)))


def micro_batches_in_float16(watch):
    model, optimizer, loader = ready()
    scaler = torch.amp.GradScaler("cpu")
    with watch(model, optimizer, loader=loader):
        for number, (inputs, targets) in enumerate([*loader, *loader], start=1):
            is_last = number % 2 == 0
            with contextlib.nullcontext() if is_last else model.no_sync():
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = F.cross_entropy(model(inputs), targets) / 2
                scaler.scale(loss).backward()
            if is_last:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()


def two_mean_losses(watch):
    model, optimizer, loader = ready()
    with watch(model, optimizer, loader=loader):
        for inputs, targets in loader:
            optimizer.zero_grad()
            with model.no_sync():
                F.cross_entropy(model(inputs), targets).backward()
            F.mse_loss(model(inputs + 0.1), model.module(inputs).detach()).backward()
            optimizer.step()


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.heads = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])

    def forward(self, inputs):
        return [head(inputs) for head in self.heads]


def a_backward_for_each_head(watch):
    # one message: DDP sends when the last part has its gradients
    model, optimizer, loader = ready(TwoHeads())
    with watch(model, optimizer, loader=loader):
        for inputs, targets in loader:
            optimizer.zero_grad()
            for logits in model(inputs):
                F.cross_entropy(logits, targets).backward()
            optimizer.step()


class OneOfTwo(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.heads = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])
        self.calls = 0

    def forward(self, inputs):
        self.calls += 1
        return self.heads[self.calls % 2](inputs)


def a_branch_in_each_micro_batch(watch):
    # in a step all weights are used, in no backward pass they are
    model, optimizer, loader = ready(OneOfTwo(), find_unused_parameters=True)
    with watch(model, optimizer, loader=loader):
        for number, (inputs, targets) in enumerate([*loader, *loader]):
            with model.no_sync() if number % 2 == 0 else contextlib.nullcontext():
                (F.cross_entropy(model(inputs), targets) / 2).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()


def unused_weights(watch):
    model, optimizer, loader = ready(OneOfTwo(), find_unused_parameters=True)
    with watch(model, optimizer, loader=loader):
        train(model, optimizer, loader)


def unused_weights_in_a_static_graph(watch):
    class Half(OneOfTwo):
        def forward(self, inputs):
            return self.heads[0](inputs)

    model, optimizer, loader = ready(Half(), static_graph=True)
    with watch(model, optimizer, loader=loader):
        train(model, optimizer, loader)


def synchronised_batch_norm(watch):
    from labcode.parallel.batch_norm import convert

    module = convert(layers(nn.BatchNorm1d(8)), dist.group.WORLD)
    model, optimizer, loader = ready(module, broadcast_buffers=False)
    with watch(model, optimizer, loader=loader):
        train(model, optimizer, loader)


def without_shuffling(watch):
    model, optimizer, loader = ready(shuffle=False)
    with watch(model, optimizer, loader=loader):
        for _ in range(3):
            for inputs, targets in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), targets).backward()
                optimizer.step()


def an_uneven_last_batch(watch):
    model, optimizer, loader = ready(data=samples(43))
    with watch(model, optimizer, loader=loader):
        train(model, optimizer, loader)


def dropping_the_last_batch(watch):
    model, optimizer, loader = ready(data=samples(43), drop_last=True)
    with watch(model, optimizer, loader=loader):
        train(model, optimizer, loader)


def join(watch, *more):
    data = samples(24 + 10 * dist.get_rank())
    model = DDP(layers(*more))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data, batch_size=4)
    with watch(model, optimizer, loader=loader), model.join():
        for inputs, targets in loader:
            inputs = inputs + dist.get_rank()
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()


def join_with_batch_norm(watch):
    join(watch, nn.BatchNorm1d(8))


def a_frozen_part(watch):
    module = layers()
    module[0].requires_grad_(False)
    model, optimizer, loader = ready(module)
    with watch(model, optimizer, loader=loader):
        train(model, optimizer, loader)


def clipping(watch):
    model, optimizer, loader = ready()
    with watch(model, optimizer, loader=loader):
        train(model, optimizer, loader, clip=0.1)


def rank_0_evaluates_and_saves_alone(watch):
    model, optimizer, loader = ready(layers(nn.BatchNorm1d(8)))
    held_out = DataLoader(samples(), batch_size=8)
    with watch(model, optimizer, loader=loader):
        for epoch in range(2):
            train(model, optimizer, loader, epochs=[epoch])
            if dist.get_rank() == 0:
                model.module.eval()
                with torch.no_grad():
                    for inputs, targets in held_out:
                        F.cross_entropy(model.module(inputs), targets)
                model.module.train()
                torch.save(model.state_dict(), "weights.pt")
            dist.barrier()


def all_evaluate_through_the_wrapper(watch):
    # without gradients DDP does not broadcast buffers before the next forward pass
    model, optimizer, loader = ready(layers(nn.BatchNorm1d(8)))
    with watch(model, optimizer, loader=loader):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            with torch.no_grad():
                model(inputs)


def collectives_of_unequal_parts(watch):
    model, optimizer, loader = ready()
    with watch(model, optimizer, loader=loader):
        train(model, optimizer, loader, epochs=[0])
        rank = dist.get_rank()
        sends = [1, 2] if rank == 0 else [3, 4]
        receives = [1, 3] if rank == 0 else [2, 4]
        received = torch.empty(sum(receives))
        dist.all_to_all_single(received, torch.ones(sum(sends)), receives, sends)


def dropout_with_one_seed(watch):
    # all ranks draw the same masks, in the model; nothing is augmented
    model, optimizer, loader = ready(layers(nn.Dropout(0.5)))
    with watch(model, optimizer, loader=loader):
        train(model, optimizer, loader)


class Jittered(TensorDataset):
    def __getitem__(self, number):
        inputs, targets = super().__getitem__(number)
        return inputs + 0.1 * torch.randn(()), targets


def augmentation_seeded_by_rank(watch):
    model, optimizer, loader = ready(data=Jittered(*samples().tensors))
    torch.manual_seed(dist.get_rank())
    with watch(model, optimizer, loader=loader):
        train(model, optimizer, loader)


LOOPS = (plain, in_micro_batches, batch_norm_in_micro_batches, two_mean_losses)
LOOPS += (micro_batches_in_float16,)
LOOPS += (a_backward_for_each_head, a_branch_in_each_micro_batch, unused_weights)
LOOPS += (unused_weights_in_a_static_graph, synchronised_batch_norm, without_shuffling)
LOOPS += (an_uneven_last_batch, dropping_the_last_batch, join, join_with_batch_norm)
LOOPS += (a_frozen_part, clipping, rank_0_evaluates_and_saves_alone)
LOOPS += (all_evaluate_through_the_wrapper, collectives_of_unequal_parts)
LOOPS += (dropout_with_one_seed, augmentation_seeded_by_rank)


def examined(loop, folder):
    """What the doctor says of a loop, and how many steps it has seen."""
    from labcode import doctor

    seen = []

    def watch(*args, **kwargs):
        seen.append(doctor.watch(*args, quiet=True, limit_s=20, **kwargs))
        return seen[0]

    with contextlib.chdir(folder):
        loop(watch)
    (watched,) = seen
    return not_of_time(watched.findings), len(watched.facts.syncs)


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_a_correct_loop_has_no_findings(loop, ranks2, tmp_path):
    for findings, num_steps in ranks2.run(examined, loop, str(tmp_path)):
        assert findings == []
        assert num_steps >= 4


def trained(rank, recipe, changes):
    """A recipe through the loop of `labcode.train`, with the watch around it."""
    from trained import built

    from labcode import doctor, recipes
    from labcode.run import run

    config = recipes.with_changes(recipes.get(recipe), changes)
    training = built(config)
    with doctor.watch(training.model.replica, training.optimizer, quiet=True) as watched:
        run.train(training)
    return not_of_time(watched.findings), watched.facts.syncs


STEPS = {"train.steps": 8, "train.eval_every": 4, "train.eval_batches": 1, "train.sample_tokens": 0}
RUNS = {
    "gpt_tiny": STEPS | {"train.micro_batch": 4, "train.global_batch": 16},
    "vit_tiny": STEPS | {"model.num_layers": 1, "model.hidden_size": 16, "model.num_heads": 2},
}


@pytest.mark.parametrize("replica", ["ddp", "labcode"])
@pytest.mark.parametrize("recipe", RUNS)
def test_the_recipes_have_no_findings(recipe, replica, ranks2):
    changes = RUNS[recipe] | {"parallel.data_parallel": replica}
    for findings, syncs in ranks2.run(trained, recipe, changes):
        assert findings == []
        assert syncs == [1] * 8
