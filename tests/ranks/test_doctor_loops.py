"""What `doctor.watch` says of loops as people write them, wrong ones and right ones.

The mistakes are those of public reports; only their facts are here, written anew. On GitHub:
    scale     nanoGPT#206, distillKitPlus#5, bgpt#5, apex#696, pytorch#37359, fairchem#269
    clipping  Lightning#9599 and #9694, pytorch/examples#1196, returnn#1590
    ends      pytorch#33148, PyMarlin#80, snowfall#152 (k2-fsa), Lightning#5243
    samples   pytorch#22584, #25162 and #31771, distributed_tutorial#5 (yangkky)
    alone     pytorch#20611 and #54059, particleflow#233
Right ones as well: gradients that are divided after accumulation (DeepLearningExamples#625), losses
that are multiplied by the number of ranks on purpose (fairseq#494, RL2#11).
"""

import contextlib

import pytest
import torch
import torch.distributed as dist
from test_doctor_false_alarms import (
    SAMPLES,
    TwoHeads,
    examined,
    in_micro_batches,
    layers,
    not_of_time,
    ready,
    samples,
    train,
)
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, Subset

from labcode.doctor.facts import Facts
from labcode.doctor.judge import judge
from labcode.doctor.watch_calls import BACKWARD, EVALUATION, FORWARD, LEFT, Note, Story, mismatch
from labcode.doctor.watch_loop import watch as watched

NUM_RANKS = 2


def is_rank(rank):
    return dist.get_rank() == rank


def gradients(model):
    return [param.grad for param in model.parameters() if param.grad is not None]


def each_step(watch, after_backward=None, loss_of=None, module=None, **options):
    """A plain loop, with something done after backward, or another loss."""
    model, optimizer, loader = ready(module, **options)
    with watch(model, optimizer, loader=loader):
        for inputs, targets in loader:
            optimizer.zero_grad()
            logits = model(inputs)
            loss = loss_of(logits, targets) if loss_of else F.cross_entropy(logits, targets)
            loss.backward()
            if after_backward:
                after_backward(model)
            optimizer.step()


# ---- the scale of the gradient


def loss_divided_by_the_ranks(watch):
    each_step(watch, loss_of=lambda logits, targets: F.cross_entropy(logits, targets) / NUM_RANKS)


def gradients_divided_by_the_ranks(watch):
    def divide(model):
        for gradient in gradients(model):
            gradient /= NUM_RANKS

    each_step(watch, divide)


def gradients_summed_once_more(watch):
    def add(model):
        for gradient in gradients(model):
            dist.all_reduce(gradient)

    each_step(watch, add)


def by_hand_without_a_mean(watch, divide=False):
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(samples(), 4, sampler=DistributedSampler(samples()))
    with watch(model, optimizer, loader=loader):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            for gradient in gradients(model):
                dist.all_reduce(gradient)
                if divide:
                    gradient /= NUM_RANKS
            optimizer.step()


def loss_summed(watch):
    each_step(
        watch, loss_of=lambda logits, targets: F.cross_entropy(logits, targets, reduction="sum")
    )


def accumulate(watch, loss_of, steps_at=4, zeroes=False, scaler=None, finish=None, batch_size=2):
    """Four micro-batches of a step."""
    model, optimizer, loader = ready(batch_size=batch_size)
    with watch(model, optimizer, loader=loader):
        for number, (inputs, targets) in enumerate(loader, start=1):
            is_last = number % steps_at == 0
            if zeroes:
                optimizer.zero_grad()
            with contextlib.nullcontext() if is_last else model.no_sync():
                loss = loss_of(model, inputs, targets)
                (scaler.scale(loss) if scaler else loss).backward()
            if not is_last:
                continue
            if finish:
                finish(model)
            if scaler:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            if not zeroes:
                optimizer.zero_grad()


def quarter(model, inputs, targets):
    return F.cross_entropy(model(inputs), targets) / 4


def whole(model, inputs, targets):
    return F.cross_entropy(model(inputs), targets)


def zero_at_each_micro_batch(watch):
    accumulate(watch, quarter, zeroes=True)


def zero_at_each_micro_batch_undivided(watch):
    accumulate(watch, whole, zeroes=True)


def step_at_each_micro_batch(watch):
    accumulate(watch, quarter, steps_at=1)


def undivided_under_a_scaler(watch):
    accumulate(watch, whole, scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))


def undivided_with_a_penalty(watch):
    def with_penalty(model, inputs, targets):
        return whole(model, inputs, targets) + 1e-3 * model.module[0].weight.square().sum()

    accumulate(watch, with_penalty)


def masked_mean_of_each_rank(watch):
    def of_the_valid(logits, targets):
        valid = (torch.arange(len(targets)) <= 2 * dist.get_rank()).float()
        losses = F.cross_entropy(logits, targets, reduction="none")
        return (losses * valid).sum() / valid.sum()

    each_step(watch, loss_of=of_the_valid)


# ---- loss scale, zero_grad


def scaled(watch, clip, fused=False, max_norm=1.0, init_scale=2.0**20):
    model, _, loader = ready()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
    with watch(model, optimizer, loader=loader):
        for inputs, targets in [*loader, *loader]:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = F.cross_entropy(model(inputs), targets)
            scaler.scale(loss).backward()
            if clip == "after":
                scaler.unscale_(optimizer)
            if clip != "never":
                factor = scaler.get_scale() if clip == "scaled" else 1.0
                nn.utils.clip_grad_norm_(model.parameters(), max_norm * factor)
            if clip == "before":
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()


def clip_without_unscale(watch):
    scaled(watch, "without", init_scale=2.0**12)


def clip_before_unscale(watch):
    scaled(watch, "before", init_scale=2.0**12)


def zero_grad_missing(watch):
    model, optimizer, loader = ready()
    with watch(model, optimizer, loader=loader):
        for inputs, targets in loader:
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()


# ---- samples


def set_epoch_missing_without_the_loader(watch):
    model, optimizer, loader = ready()
    with watch(model, optimizer):
        for _ in range(2):
            for inputs, targets in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), targets).backward()
                optimizer.step()


def evaluated(watch, indices=None, finish=None, held_out=13):
    """Training, then accuracy over a held-out set of 13 samples."""
    model, optimizer, loader = ready()
    data = samples(held_out)
    if indices is None:
        held = DataLoader(data, 3, sampler=DistributedSampler(data, shuffle=False))
    else:
        held = DataLoader(Subset(data, indices), 3)
    with watch(model, optimizer, loader=loader):
        train(model, optimizer, loader)
        model.eval()
        counts = torch.zeros(2)
        guesses = []
        with torch.no_grad():
            for inputs, targets in held:
                right = model(inputs).argmax(1) == targets
                counts += torch.tensor([right.sum(), len(right)])
                guesses.append(right)
        (finish or dist.all_reduce)(torch.cat(guesses) if finish else counts)


def an_epoch_that_differs(watch):
    model, optimizer, loader = ready()
    with watch(model, optimizer, loader=loader):
        for epoch in range(3):
            is_other = epoch == 1 and is_rank(1)
            loader.sampler.set_epoch(7 if is_other else epoch)
            for inputs, targets in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), targets).backward()
                optimizer.step()


def results_of_unequal_loaders(watch):
    model, optimizer, loader = ready()
    held = DataLoader(Subset(samples(13), range(dist.get_rank(), 13, NUM_RANKS)), 2)
    held = held if is_rank(0) else DataLoader(samples(4), 2)
    with watch(model, optimizer, loader=loader):
        train(model, optimizer, loader)
        with torch.no_grad():
            for inputs, targets in held:
                dist.all_reduce(F.cross_entropy(model(inputs), targets))
        dist.barrier()


def validation_padded(watch):
    evaluated(watch)


def mean_of_padded_accuracies(watch):
    def mean(right):
        parts = [torch.zeros(()) for _ in range(NUM_RANKS)]
        dist.all_gather(parts, right.float().mean())
        return sum(parts) / NUM_RANKS

    evaluated(watch, finish=mean)


def one_rank_has_fewer_batches(watch):
    data = samples(SAMPLES - 8 * dist.get_rank())
    model, optimizer, _ = ready()
    loader = DataLoader(data, batch_size=4)
    with watch(model, optimizer, loader=loader):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs + dist.get_rank()), targets).backward()
            optimizer.step()
        dist.barrier()


class Bad(torch.utils.data.TensorDataset):
    def __getitem__(self, number):
        if number == 17:
            raise KeyError("no such file")
        return super().__getitem__(number)


def a_sample_that_one_rank_cannot_read(watch):
    each_step(watch, data=Bad(*samples().tensors), shuffle=False)


# ---- one rank does otherwise


def with_a_bad_batch(watch, module=None, skips="backward", rank=1):
    """Rank 1 meets a batch of NaN in its third step, and leaves something out."""
    model, optimizer, loader = ready(module)
    with watch(model, optimizer, loader=loader):
        for number, (inputs, targets) in enumerate(loader):
            is_bad = number == 2 and is_rank(rank)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs + float("nan") if is_bad else inputs), targets)
            if is_bad and skips == "backward":
                continue
            if is_bad and skips == "loop":
                break
            loss.backward()
            if is_bad and skips == "step":
                continue
            optimizer.step()


def skips_backward(watch):
    with_a_bad_batch(watch)


def skips_backward_with_buffers(watch):
    with_a_bad_batch(watch, layers(nn.BatchNorm1d(8)))


class Refusing(nn.Module):
    """Has no memory for one batch, on one rank."""

    def __init__(self):
        super().__init__()
        self.layers = layers()
        self.calls = 0

    def forward(self, inputs):
        self.calls += 1
        if self.calls == 2 and is_rank(1):
            raise MemoryError("out of memory")
        return self.layers(inputs)


def leaves_out_what_does_not_fit(watch):
    model, optimizer, loader = ready(Refusing())
    with watch(model, optimizer, loader=loader):
        for inputs, targets in loader:
            optimizer.zero_grad()
            try:
                loss = F.cross_entropy(model(inputs), targets)
            except MemoryError:
                continue
            loss.backward()
            optimizer.step()


def leaves_the_loop(watch):
    with_a_bad_batch(watch, skips="loop", rank=0)


def brings_nan(watch):
    with_a_bad_batch(watch, skips="nothing")


def skips_the_optimizer(watch):
    model, optimizer, loader = ready()
    with watch(model, optimizer, loader=loader):
        for number, (inputs, targets) in enumerate(loader):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            if not (number == 3 and is_rank(1)):
                optimizer.step()


def rank_0_evaluates_through_the_wrapper(watch):
    model, optimizer, loader = ready(layers(nn.BatchNorm1d(8)))
    with watch(model, optimizer, loader=loader):
        train(model, optimizer, loader, epochs=[0])
        model.eval()
        if is_rank(0):
            with torch.no_grad():
                model(samples().tensors[0])
        dist.barrier()


# ---- around DDP


def other_learning_rates(watch):
    model, _, loader = ready()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + 0.1 * dist.get_rank())
    with watch(model, optimizer, loader=loader):
        train(model, optimizer, loader)


class Changing(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])
        self.calls = 0

    def forward(self, inputs):
        self.calls += 1
        first, second = self.heads
        return first(inputs) if self.calls <= 2 else first(inputs) + second(inputs)


def a_static_graph_changes(watch):
    each_step(watch, module=Changing(), static_graph=True)


def the_module_inside_is_called(watch):
    model, optimizer, loader = ready()
    with watch(model, optimizer, loader=loader):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(model.module(inputs), targets).backward()
            optimizer.step()


def the_last_micro_batch_is_not_sent(watch):
    model, optimizer, loader = ready()
    with watch(model, optimizer, loader=loader):
        for inputs, targets in loader:
            optimizer.zero_grad()
            with model.no_sync():
                F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = layers()

    def forward(self, inputs):
        first = checkpoint(self.layers, inputs.requires_grad_(), use_reentrant=True)
        return first + checkpoint(self.layers, inputs, use_reentrant=True)


def checkpointed_twice(watch):
    each_step(watch, module=Checkpointed(), find_unused_parameters=True)


def checkpointed_twice_without_an_error(watch):
    each_step(watch, module=Checkpointed())


def optimizer_of_another_model(watch):
    model, _, loader = ready()
    optimizer = torch.optim.SGD(layers().parameters(), lr=0.1)
    with watch(model, optimizer, loader=loader):
        train(model, optimizer, loader)


def optimizer_older_than_the_head(watch):
    module = layers()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module[2] = nn.Linear(8, 3)
    model, _, loader = ready(module)
    with watch(model, optimizer, loader=loader):
        train(model, optimizer, loader)


BOTH = (0, 1)
WRONG = [
    (loss_divided_by_the_ranks, "divided too often", BOTH, "divided by 2 in steps of one backward"),
    (gradients_divided_by_the_ranks, "averaged twice", BOTH, "though it is their mean already"),
    (gradients_summed_once_more, "summed over ranks", BOTH, "the sum over the ranks, not"),
    (by_hand_without_a_mean, "summed over ranks", BOTH, "the sum over the ranks, not"),
    (loss_summed, "summed loss", BOTH, "neither the sum over the whole batch nor the mean"),
    (zero_at_each_micro_batch, "gradients lost", BOTH, "of 4 micro-batches of a step only the la"),
    (zero_at_each_micro_batch_undivided, "gradients lost", BOTH, "of 4 micro-batches of a step"),
    (step_at_each_micro_batch, "divided too often", BOTH, "the loss is divided by 4 in steps of"),
    (undivided_under_a_scaler, "1/m missing", BOTH, "the sum of the micro-batches' means"),
    (undivided_with_a_penalty, "1/m missing", BOTH, "the sum of the micro-batches' means"),
    (masked_mean_of_each_rank, "mean of means", BOTH, "values in small micro-batches count more"),
    (clip_without_unscale, "clipped while scaled", BOTH, "still multiplied by the loss scale"),
    (clip_before_unscale, "clipped while scaled", BOTH, "still multiplied by the loss scale"),
    (zero_grad_missing, "zero_grad missing", BOTH, "the gradients of all steps before"),
    (set_epoch_missing_without_the_loader, "set_epoch forgotten", BOTH, "the same order"),
    (validation_padded, "counted twice", BOTH, "1 sample counts twice: the ranks drew 14 samples"),
    (mean_of_padded_accuracies, "counted twice", BOTH, "the data set has 13"),
    (
        one_rank_has_fewer_batches,
        "skipped call",
        (1,),
        "rank 1 ended after 10 batches, rank 0",
    ),
    (a_sample_that_one_rank_cannot_read, "skipped call", (1,), "ended with KeyError: 'no such fil"),
    (skips_backward, "skipped call", (1,), "forward pass 3, whose output is not finite, without"),
    (skips_backward_with_buffers, "skipped call", (1,), "forward pass 3, whose output is not fin"),
    (
        leaves_out_what_does_not_fit,
        "skipped call",
        (1,),
        "pass 2, which ended in an error, without",
    ),
    (an_epoch_that_differs, "samplers disagree", (1,), "rank 1 shuffles with seed 0 and epoch 7"),
    (
        results_of_unequal_loaders,
        "skipped call",
        (1,),
        "rank 1 ended after 2 batches, rank 0 read 3",
    ),
    (other_learning_rates, "weights drift", BOTH, "though their gradients were the same"),
    (a_static_graph_changes, "graph changes", BOTH, "every step has to use the same parameters"),
    (leaves_the_loop, "skipped call", (0,), "rank 0 made its forward pass 3, whose output is not"),
    (brings_nan, "not finite", (1,), "rank 1 brought it, rank 0 did not"),
    (skips_the_optimizer, "weights drift", (1,), "rank 1 took 5 optimizer steps, rank 0 6"),
    (rank_0_evaluates_through_the_wrapper, "skipped call", (0,), "without gradients that sends"),
    (the_module_inside_is_called, "weights drift", BOTH, "model.module was called"),
    (the_last_micro_batch_is_not_sent, "weights drift", BOTH, "no longer are"),
    (checkpointed_twice, "ready twice", BOTH, "told twice in one backward pass"),
    (checkpointed_twice_without_an_error, "weights drift", BOTH, "no longer are"),
    (optimizer_of_another_model, "other parameters", BOTH, "no parameter of the optimizer belongs"),
    (optimizer_older_than_the_head, "other parameters", BOTH, "old copies of parameters"),
]


def found_in(loop):
    """[(name, ranks, what, whether it is a hint)] of a loop, on this rank."""
    from labcode import doctor

    seen = []

    def watch(*args, **kwargs):
        seen.append(doctor.watch(*args, quiet=True, limit_s=20, **kwargs))
        return seen[-1]

    with contextlib.suppress(RuntimeError, KeyError):
        loop(watch)
    found = [finding for watched in seen for finding in watched.findings]
    found = [finding for finding in found if finding.name != "slow rank"]
    return [(one.name, one.ranks, one.what, one.is_hint) for one in found]


@pytest.mark.parametrize(
    ("loop", "name", "ranks", "what"), WRONG, ids=[row[0].__name__ for row in WRONG]
)
def test_a_wrong_loop_is_told_by_what_it_does(loop, name, ranks, what, ranks2):
    for found in ranks2.run(found_in, loop):
        assert [one[:2] for one in found] == [(name, ranks)], found
        assert what in found[0][2]
        assert found[0][3] == (name == "summed loss")


# ---- right loops


def scaler_leaves_out_the_first_steps(watch):
    scaled(watch, "after", init_scale=2.0**40)


def scaler_with_a_fused_optimizer(watch):
    scaled(watch, "never", fused=True, init_scale=2.0**40)


def clip_to_a_scaled_norm(watch):
    scaled(watch, "scaled", init_scale=2.0**12)


def loss_scaled_by_hand(watch):
    def divide(model):
        for gradient in gradients(model):
            gradient /= 256

    each_step(watch, divide, lambda logits, targets: 256 * F.cross_entropy(logits, targets))


def gradients_divided_after_accumulation(watch):
    def divide(model):
        for gradient in gradients(model):
            gradient /= 4

    accumulate(watch, whole, finish=divide)


def zeroed_without_none(watch):
    model, optimizer, loader = ready(gradient_as_bucket_view=True)
    with watch(model, optimizer, loader=loader):
        for inputs, targets in loader:
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)


def by_hand_with_a_mean(watch):
    by_hand_without_a_mean(watch, divide=True)


def weighted_by_tokens(watch):
    def of_all(logits, targets):
        targets = targets.masked_fill(torch.arange(len(targets)) > 2 * dist.get_rank(), -100)
        count = (targets != -100).sum()
        dist.all_reduce(count)
        total = F.cross_entropy(logits, targets, reduction="sum")
        return total * NUM_RANKS / count

    each_step(watch, loss_of=of_all)


def multiplied_by_the_ranks_on_purpose(watch):
    each_step(watch, loss_of=lambda logits, targets: F.cross_entropy(logits, targets) * NUM_RANKS)


def gradients_of_a_sum_multiplied_afterwards(watch):
    def by_samples(model):
        for gradient in gradients(model):
            gradient *= NUM_RANKS / 8

    def summed(logits, targets):
        return F.cross_entropy(logits, targets, reduction="sum")

    each_step(watch, by_samples, summed)


def half_a_squared_error(watch):
    each_step(
        watch, loss_of=lambda logits, targets: F.mse_loss(logits, torch.ones_like(logits)) / 2
    )


def the_last_accumulation_is_shorter(watch):
    model, optimizer, loader = ready(data=samples(44), batch_size=2)
    with watch(model, optimizer, loader=loader):
        for number, (inputs, targets) in enumerate(loader):
            parts = min(4, len(loader) - number // 4 * 4)
            is_last = number % 4 == 3 or number == len(loader) - 1
            with contextlib.nullcontext() if is_last else model.no_sync():
                (F.cross_entropy(model(inputs), targets) / parts).backward()
            if is_last:
                optimizer.step()
                optimizer.zero_grad()


class Perturbing(torch.optim.SGD):
    """Sharpness-aware: the gradient at a place nearby, from two backward passes."""

    def first(self):
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["before"] = param.detach().clone()
                param.data.add_(param.grad, alpha=0.01)

    def second(self):
        for group in self.param_groups:
            for param in group["params"]:
                param.data.copy_(self.state[param]["before"])
        self.step()


def sharpness_aware(watch):
    model, _, loader = ready()
    optimizer = Perturbing(model.parameters(), lr=0.1)

    def backward(inputs, targets):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()

    with watch(model, optimizer, loader=loader):
        for inputs, targets in loader:
            for half in (optimizer.first, optimizer.second):
                backward(inputs, targets)
                half()


def two_optimizers(watch):
    model, _, loader = ready()
    halves = [
        torch.optim.SGD(model.module[0].parameters(), lr=0.1),
        torch.optim.AdamW(model.module[2].parameters(), lr=1e-3),
    ]
    with watch(model, halves, loader=loader):
        for number, (inputs, targets) in enumerate(loader):
            F.cross_entropy(model(inputs), targets).backward()
            halves[0].step()
            halves[0].zero_grad()
            if number % 2:
                for gradient in gradients(model.module[2]):
                    gradient /= 2
                halves[1].step()
                halves[1].zero_grad()


def adversaries(watch):
    """Two models that alternate, each under a watch of its own; real and made on one line."""
    torch.manual_seed(0)
    maker = DDP(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6)))
    critic = DDP(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)))
    torch.manual_seed(dist.get_rank())
    of_maker = torch.optim.Adam(maker.parameters(), lr=1e-3)
    of_critic = torch.optim.Adam(critic.parameters(), lr=1e-3)
    data = samples()
    loader = DataLoader(data, 4, sampler=DistributedSampler(data))
    judged = F.binary_cross_entropy_with_logits
    with watch(critic, of_critic, loader=loader), watch(maker, of_maker, loader=loader):
        for inputs, _ in loader:
            of_critic.zero_grad()
            made = maker(torch.randn(4, 4))
            for images, is_real in ((inputs, 1.0), (made.detach(), 0.0)):
                judged(critic(images), torch.full((4, 1), is_real)).backward()
            of_critic.step()
            of_maker.zero_grad()
            judged(critic(made), torch.ones(4, 1)).backward()
            of_maker.step()


def several_tasks_of_one_batch(watch):
    model, optimizer, loader = ready(TwoHeads())
    with watch(model, optimizer, loader=loader):
        for inputs, targets in loader:
            optimizer.zero_grad()
            for noise in (0.0, 0.1):
                one, other = model(inputs + noise)
                (F.cross_entropy(one, targets) + F.cross_entropy(other, targets)).backward()
            optimizer.step()


def compiled_around_ddp(watch):
    model, optimizer, loader = ready()
    model = torch.compile(model, backend="eager")
    with watch(model, optimizer, loader=loader):
        train(model, optimizer, loader)


def compiled_inside_ddp(watch):
    model, optimizer, loader = ready(torch.compile(layers(), backend="aot_eager"))
    with watch(model, optimizer, loader=loader):
        train(model, optimizer, loader)


def compiled_in_place(watch):
    module = layers()
    module.compile(backend="aot_eager")
    model, optimizer, loader = ready(module)
    with watch(model, optimizer, loader=loader):
        train(model, optimizer, loader)


def evaluated_in_shares(watch):
    evaluated(watch, indices=range(dist.get_rank(), 13, NUM_RANKS))


def evaluated_whole_on_each_rank(watch):
    evaluated(watch, indices=range(13))


def evaluated_and_cut(watch):
    def gather_and_cut(right):
        parts = [torch.empty_like(right) for _ in range(NUM_RANKS)]
        dist.all_gather(parts, right)
        return torch.stack(parts, 1).flatten()[:13].float().mean()

    evaluated(watch, finish=gather_and_cut)


def evaluated_in_objects(watch):
    def gather(right):
        parts = [None] * NUM_RANKS
        dist.all_gather_object(parts, right.tolist())

    evaluated(watch, finish=gather)


def rank_0_looks_at_a_batch_alone(watch):
    # a forward pass of DDP without buffers sends nothing
    model, optimizer, loader = ready()
    with watch(model, optimizer, loader=loader):
        train(model, optimizer, loader)
        if is_rank(0):
            F.cross_entropy(model(samples().tensors[0]), samples().tensors[1]).item()
        train(model, optimizer, loader, epochs=[2])


def a_bad_batch_is_replaced(watch):
    model, optimizer, loader = ready()
    with watch(model, optimizer, loader=loader):
        for number, (inputs, targets) in enumerate(loader):
            optimizer.zero_grad()
            logits = model(inputs + float("nan") if number == 2 and is_rank(1) else inputs)
            if not logits.isfinite().all():
                logits = model(inputs)
            F.cross_entropy(logits, targets).backward()
            optimizer.step()


def a_bad_batch_is_left_out_together(watch):
    model, optimizer, loader = ready()
    with watch(model, optimizer, loader=loader):
        for number, (inputs, targets) in enumerate(loader):
            optimizer.zero_grad()
            loss = F.cross_entropy(
                model(inputs + float("nan") if number == 2 and is_rank(1) else inputs), targets
            )
            is_bad = (~loss.isfinite()).float()
            dist.all_reduce(is_bad, dist.ReduceOp.MAX)
            if not is_bad:
                loss.backward()
                optimizer.step()


def two_loaders_with_epochs_of_their_own(watch):
    model, optimizer, loader = ready()
    other = DataLoader(samples(24), 4, sampler=DistributedSampler(samples(24)))
    with watch(model, optimizer):
        for epoch in range(2):
            for batches in (loader, other):
                train(model, optimizer, batches, epochs=[epoch])


def with_a_closure(watch):
    model, _, loader = ready()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    with watch(model, optimizer, loader=loader):
        for inputs, targets in loader:

            def closure(inputs=inputs, targets=targets):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(inputs), targets)
                loss.backward()
                return loss

            for _ in range(2):
                optimizer.step(closure)


def averaged_now_and_then(watch):
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    model, optimizer, loader = ready()
    alone, _ = dist.new_subgroups(1)
    state = local.PostLocalSGDState(None, alone, start_localSGD_iter=2)
    model.register_comm_hook(state, local.post_localSGD_hook)
    averager = PeriodicModelAverager(period=4, warmup_steps=2)
    with watch(model, PostLocalSGDOptimizer(optimizer, averager), loader=loader):
        train(model, optimizer, loader)


RIGHT = (
    averaged_now_and_then,
    scaler_leaves_out_the_first_steps,
    scaler_with_a_fused_optimizer,
    clip_to_a_scaled_norm,
)
RIGHT += (loss_scaled_by_hand, gradients_divided_after_accumulation, zeroed_without_none)
RIGHT += (by_hand_with_a_mean, weighted_by_tokens, half_a_squared_error)
RIGHT += (multiplied_by_the_ranks_on_purpose, gradients_of_a_sum_multiplied_afterwards)
RIGHT += (the_last_accumulation_is_shorter, sharpness_aware, two_optimizers, adversaries)
RIGHT += (compiled_around_ddp, compiled_inside_ddp, compiled_in_place, evaluated_in_shares)
RIGHT += (evaluated_whole_on_each_rank, evaluated_and_cut, evaluated_in_objects)
RIGHT += (rank_0_looks_at_a_batch_alone, a_bad_batch_is_replaced, with_a_closure)
RIGHT += (a_bad_batch_is_left_out_together, two_loaders_with_epochs_of_their_own)


@pytest.mark.parametrize("loop", RIGHT, ids=lambda loop: loop.__name__)
def test_a_right_loop_has_no_findings(loop, ranks2):
    for found in ranks2.run(found_in, loop):
        # that it could send less often is no mistake, and only said
        assert [one[:3] for one in found if not one[3]] == []
        if loop is not adversaries:
            assert found == []


def without_no_sync(watch):
    model, optimizer, loader = ready(batch_size=2)
    with watch(model, optimizer, loader=loader):
        for number, (inputs, targets) in enumerate(loader, start=1):
            (F.cross_entropy(model(inputs), targets) / 4).backward()
            if number % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize("loop", [without_no_sync, several_tasks_of_one_batch])
def test_what_only_costs_bytes_is_a_hint(loop, ranks2):
    for found in ranks2.run(found_in, loop):
        assert [(one[0], one[3]) for one in found] == [("no_sync missing", True)]


def test_the_right_loops_are_seen(ranks2, tmp_path):
    # "no finding" would mean little if no step had been noted
    for loop in (in_micro_batches, weighted_by_tokens, half_a_squared_error):
        for findings, num_steps in ranks2.run(examined, loop, str(tmp_path)):
            assert num_steps >= 4 and not not_of_time(findings)


# ---- who differs, of several


def notes(*calls, **of_rank_2):
    """What four ranks say at one moment; rank 2 is told apart by its story."""
    stories = [Story(passes=1, batches=5) for _ in calls]
    stories[2] = Story(**{"passes": 1, "batches": 5} | of_rank_2)
    return [Note(call, story) for call, story in zip(calls, stories)]


SAID = {
    "another order": (
        notes(
            "all_reduce [3] float32", "all_reduce [3] float32", "barrier", "all_reduce [3] float32"
        ),
        "calls do not match",
        "ranks 0, 1 and 3 call all_reduce [3] float32, rank 2 calls barrier",
    ),
    "an error": (
        notes(BACKWARD, BACKWARD, LEFT, BACKWARD, error="OSError: 21.png is truncated"),
        "skipped call",
        "rank 2 ended with OSError: 21.png is truncated; ranks 0, 1 and 3 are at the backward",
    ),
    "a batch left out, long ago": (
        notes(
            BACKWARD, BACKWARD, "barrier", BACKWARD, skipped=1, last_skipped="its forward pass 4"
        ),
        "skipped call",
        "rank 2 made its forward pass 4 without a backward pass, unlike ranks 0",
    ),
    "an early end": (
        notes(BACKWARD, BACKWARD, "barrier", BACKWARD, batches=4, ended=True),
        "skipped call",
        "the loader of rank 2 ended after 4 batches, ranks 0, 1 and 3 read",
    ),
    "evaluation alone": (
        notes("barrier", "barrier", EVALUATION, "barrier", ended=True),
        "skipped call",
        "rank 2 is at a forward pass without gradients that sends buffers",
    ),
    "it left": (
        notes(FORWARD, FORWARD, LEFT, FORWARD),
        "skipped call",
        "rank 2 left the loop before",
    ),
}


@pytest.mark.parametrize("case", SAID)
def test_of_four_ranks_the_one_that_differs_is_named(case):
    said, name, what = SAID[case]
    found, told, ranks, _ = mismatch(said)
    assert (found, ranks) == (name, [2])
    assert what in told


def test_what_is_no_optimizer_is_refused_in_one_line():
    with pytest.raises(
        ValueError, match=r"was given a StepLR for the optimizer: give it the torch"
    ):
        watched(layers(), object.__new__(torch.optim.lr_scheduler.StepLR))


def test_the_next_epoch_of_a_rank_is_no_early_end():
    said = notes(BACKWARD, BACKWARD, "barrier", BACKWARD, ended=True)
    for note in said[:2]:
        note.story.passes = 2
    assert "ended after" not in mismatch(said)[1]


def test_a_parameter_that_one_rank_does_not_use_is_named():
    unused = {"unused": 2, "unused_names": ["b.weight", "b.bias"]}
    facts = [Facts(0, 2, finds_unused=False), Facts(1, 2, finds_unused=False, **unused)]
    # that rank meets the error, and the others may never answer
    for known in (facts, facts[1:]):
        (finding,) = judge(known)
        assert (finding.name, finding.ranks) == ("unused parameters", (1,))
        assert "b.weight, b.bias took no part in a step on this rank" in finding.what


def test_nothing_is_said_of_a_gradient_when_a_rank_is_missing():
    step = {"passes": [], "dropped": [], "stale": True, "local": [1.0], "arrived": [0.5]}
    steps = [[step | {"finite": True, "max_norm": 0.0, "scaled": 1.0}] * 4]
    names = [finding.name for finding in judge([Facts(0, 2, steps=steps)])]
    assert "not finite" not in names and "summed loss" not in names
