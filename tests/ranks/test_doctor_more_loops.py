"""More loops of public reports under `doctor.watch`: sums, kept gradients, copies, late changes.

Only the facts of the reports are here, written anew. On GitHub:
    sums      transformers#34242, torchtune#1917, tevatron#30, OpenGait#36
    kept      GradCache#25, sentence-transformers#4027
    sending   FunASR#3472, build-nanogpt#30
    emptied   lora#263 (cloneofsimo)
    unfrozen  detectron2#2486, Lightning#20340
    averages  Lightning#17847, VMamba#377
    samples   datasets#5360 (Hugging Face)
    windows   Emotion-LLaMA#140
"""

import contextlib
import copy
import io

import pytest
import torch
import torch.distributed as dist
from test_doctor_false_alarms import layers, ready, samples, train
from test_doctor_loops import BOTH, NUM_RANKS, accumulate, each_step, found_in, gradients, is_rank
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

pytestmark = pytest.mark.release

# ---- sums over the values of all ranks


def over_all_tokens(watch, times, afterwards=False):
    """Four micro-batches; each rank has another number of targets that are not ignored."""
    model, optimizer, loader = ready()
    with watch(model, optimizer, loader=loader):
        batches = [*loader, *loader]
        for begin in range(0, len(batches), 4):
            masked = []
            count = torch.zeros(())
            for inputs, targets in batches[begin : begin + 4]:
                is_left_out = torch.arange(len(targets)) > 1 + dist.get_rank()
                masked.append((inputs, targets.masked_fill(is_left_out, -100)))
                count += (~is_left_out).sum()
            dist.all_reduce(count)
            for number, (inputs, targets) in enumerate(masked):
                with contextlib.nullcontext() if number == 3 else model.no_sync():
                    loss = F.cross_entropy(model(inputs), targets, reduction="sum")
                    (loss if afterwards else loss * times / count).backward()
            if afterwards:
                for gradient in gradients(model):
                    gradient *= times / count
            optimizer.step()
            optimizer.zero_grad()


def tokens_without_the_ranks(watch):
    over_all_tokens(watch, times=1)


def tokens_without_the_ranks_afterwards(watch):
    over_all_tokens(watch, times=1, afterwards=True)


def tokens_times_the_ranks(watch):
    over_all_tokens(watch, times=NUM_RANKS)


def tokens_times_the_ranks_afterwards(watch):
    over_all_tokens(watch, times=NUM_RANKS, afterwards=True)


def mask_of_all_ranks(watch, times=1):
    def of_all(logits, targets):
        mask = (torch.arange(len(targets)) <= 1 + dist.get_rank()).float()
        count = mask.sum()
        dist.all_reduce(count)
        losses = F.cross_entropy(logits, targets, reduction="none")
        return times * (losses * mask).sum() / count

    each_step(watch, loss_of=of_all)


def mask_of_all_ranks_times_the_ranks(watch):
    mask_of_all_ranks(watch, times=NUM_RANKS)


def mask_undivided(watch):
    def of_the_valid(model, inputs, targets):
        mask = (torch.arange(len(targets)) > 0).float()
        losses = F.cross_entropy(model(inputs), targets, reduction="none")
        return (losses * mask).sum() / mask.sum()

    accumulate(watch, of_the_valid)


def unequal_numbers_of_micro_batches(watch):
    model, optimizer, loader = ready()
    size = 1 + dist.get_rank()
    with watch(model, optimizer, loader=loader):
        for inputs, targets in loader:
            optimizer.zero_grad()
            of_all = NUM_RANKS * len(inputs)
            parts = list(zip(inputs.split(size), targets.split(size)))
            for number, (some, some_targets) in enumerate(parts, start=1):
                with contextlib.nullcontext() if number == len(parts) else model.no_sync():
                    loss = F.cross_entropy(model(some), some_targets, reduction="sum")
                    (loss * NUM_RANKS / of_all).backward()
            optimizer.step()


def a_sum_over_samples_and_features(watch):
    def reconstruct(model, inputs, targets):
        return (model(inputs) - 1).square().sum() / len(inputs) / 3

    accumulate(watch, reconstruct, steps_at=3)


def half_a_sum_of_squares(watch):
    each_step(watch, loss_of=lambda logits, targets: 0.5 * (logits - 1).square().mean(1).sum() / 4)


# ---- weights of single values


def kept_gradients(watch):
    """The loss of a whole batch first, then its gradient through one part after the other."""
    model, optimizer, loader = ready(batch_size=8)
    with watch(model, optimizer, loader=loader):
        for inputs, targets in [*loader, *loader]:
            with torch.no_grad():
                outputs = model(inputs)
            outputs.requires_grad_()
            F.cross_entropy(outputs @ outputs.detach().T, torch.arange(len(targets))).backward()
            parts = list(zip(inputs.chunk(4), outputs.grad.chunk(4)))
            for number, (some, kept) in enumerate(parts, start=1):
                with contextlib.nullcontext() if number == len(parts) else model.no_sync():
                    (model(some) * kept).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def a_policy_gradient(watch):
    def weighted(logits, actions):
        log_probs = logits.log_softmax(-1).gather(1, actions[:, None])[:, 0]
        advantages = torch.randn(len(actions)) / len(actions)
        return -(log_probs * advantages).sum()

    each_step(watch, loss_of=weighted)


def gathered_without_gradient(watch):
    """Each rank has the gradient of its own part only, so the loss is multiplied by the ranks."""

    def contrast(outputs, targets):
        parts = [torch.empty_like(outputs) for _ in range(NUM_RANKS)]
        dist.all_gather(parts, outputs.detach())
        parts[dist.get_rank()] = outputs
        all_outputs = torch.cat(parts)
        logits = all_outputs @ all_outputs.T
        return NUM_RANKS * F.cross_entropy(logits, torch.arange(len(logits)))

    each_step(watch, loss_of=contrast)


def a_gradient_penalty(watch):
    model, optimizer, loader = ready()
    with watch(model, optimizer, loader=loader):
        for inputs, _ in loader:
            inputs = inputs.clone().requires_grad_()
            (slope,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
            penalty = (slope.norm(2, 1) - 1).square().mean()
            loss = model(inputs).mean() - model(torch.randn(4, 6)).mean() + 10 * penalty
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


# ---- what is sent, emptied, scaled


def sent_at_the_first_micro_batch(watch):
    model, optimizer, loader = ready(batch_size=2)
    with watch(model, optimizer, loader=loader):
        for number, (inputs, targets) in enumerate(loader):
            with contextlib.nullcontext() if number % 4 == 0 else model.no_sync():
                (F.cross_entropy(model(inputs), targets) / 4).backward()
            if number % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()


def two_backwards_of_one_forward(watch):
    model, optimizer, loader = ready()
    with watch(model, optimizer, loader=loader):
        for inputs, targets in loader:
            optimizer.zero_grad()
            logits = model(inputs)
            F.cross_entropy(logits, targets).backward(retain_graph=True)
            (0.1 * logits.square().mean()).backward()
            optimizer.step()


def zero_grad_before_the_step(watch):
    model, optimizer, loader = ready()
    with watch(model, optimizer, loader=loader):
        for inputs, targets in loader:
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.zero_grad()
            optimizer.step()


def the_optimizer_steps_without_the_scaler(watch):
    model, _, loader = ready()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu")
    with watch(model, optimizer, loader=loader):
        for inputs, targets in loader:
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(inputs), targets)).backward()
            optimizer.step()


def a_sum_over_1024_values(watch):
    def of_many(logits, targets):
        return F.cross_entropy(logits.repeat(256, 1), targets.repeat(256), reduction="sum") / 3

    each_step(watch, loss_of=of_many)


def smoothed(model, inputs, targets):
    return F.cross_entropy(model(inputs), targets, label_smoothing=0.1)


def label_smoothing_undivided(watch):
    accumulate(watch, smoothed)


def label_smoothing_divided(watch):
    accumulate(watch, lambda model, inputs, targets: smoothed(model, inputs, targets) / 4)


def in_windows_of_four(watch, steps_at_the_end=False, counts_on=False):
    """Six micro-batches in an epoch, each divided by four."""
    model, optimizer, loader = ready()
    with watch(model, optimizer, loader=loader):
        number = 0
        for epoch in range(4):
            loader.sampler.set_epoch(epoch)
            number = number if counts_on else 0
            for place, (inputs, targets) in enumerate(loader, start=1):
                number += 1
                is_end = steps_at_the_end and place == len(loader)
                steps = number % 4 == 0 or is_end
                with contextlib.nullcontext() if steps else model.no_sync():
                    (F.cross_entropy(model(inputs), targets) / 4).backward()
                if steps:
                    optimizer.step()
                    optimizer.zero_grad()


def the_rest_of_an_epoch_is_kept(watch):
    in_windows_of_four(watch)


def a_shorter_step_at_the_end(watch):
    in_windows_of_four(watch, steps_at_the_end=True)


def windows_over_the_ends_of_epochs(watch):
    in_windows_of_four(watch, counts_on=True)


def two_losses_of_one_size(watch):
    def balanced(logits, targets):
        losses = (F.cross_entropy(logits, targets), (logits - 1).square().mean())
        return sum(loss / loss.detach() for loss in losses)

    each_step(watch, loss_of=balanced)


# ---- the model and its copies


def unfrozen_after_wrapping(watch):
    module = layers()
    module[0].requires_grad_(False)
    model, _, loader = ready(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, loader=loader):
        train(model, optimizer, loader, epochs=[0])
        module[0].requires_grad_(True)
        train(model, optimizer, loader, epochs=[1])


def an_average_of_the_weights(watch):
    model, optimizer, loader = ready(layers(nn.BatchNorm1d(8)))
    with watch(model, optimizer, loader=loader):
        average = torch.optim.swa_utils.AveragedModel(model.module)
        for epoch in range(2):
            train(model, optimizer, loader, epochs=[epoch])
            average.update_parameters(model.module)
        if is_rank(0):
            average.train()
            F.cross_entropy(average(samples().tensors[0]), samples().tensors[1]).backward()
        dist.barrier()


def a_copy_and_a_file_of_the_model(watch):
    model, optimizer, loader = ready()
    with watch(model, optimizer, loader=loader):
        train(model, optimizer, loader)
        for _ in range(2):
            best = copy.deepcopy(model)
            best.module(samples().tensors[0])
            file = io.BytesIO()
            torch.save(model.module, file)
    assert b"labcode" not in file.getvalue()
    file.seek(0)
    torch.load(file, weights_only=False)(samples().tensors[0])


def a_teacher_that_follows(watch):
    student, optimizer, loader = ready()
    teacher = copy.deepcopy(student.module).requires_grad_(False)
    with watch(student, optimizer, loader=loader):
        for inputs, _ in loader:
            views = [inputs + 0.1 * torch.randn_like(inputs) for _ in range(2)]
            guesses = [student(view) for view in views]
            aims = [teacher(view) for view in reversed(views)]
            first, second = (
                F.cosine_similarity(guess, aim).mean() for guess, aim in zip(guesses, aims)
            )
            optimizer.zero_grad()
            (4 - 2 * first - 2 * second).backward()
            optimizer.step()
            for slow, fast in zip(teacher.parameters(), student.module.parameters()):
                slow.data.lerp_(fast.data, 0.01)


class OfDicts(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = layers()

    def forward(self, batch):
        return {"loss": F.cross_entropy(self.layers(batch["inputs"]), batch["targets"])}


def in_dicts(watch, sampler):
    model, optimizer, _ = ready(OfDicts())
    loader = DataLoader(samples(), 4, sampler=sampler)
    with watch(model, optimizer, loader=loader):
        for inputs, targets in loader:
            optimizer.zero_grad()
            model({"inputs": inputs, "targets": targets})["loss"].backward()
            optimizer.step()


def the_same_dicts(watch):
    in_dicts(watch, None)


def dicts_of_shares(watch):
    in_dicts(watch, DistributedSampler(samples()))


WRONG = [
    (tokens_without_the_ranks, "averaged twice", "the number of values on all ranks"),
    (tokens_without_the_ranks_afterwards, "averaged twice", "the number of values on all ranks"),
    (mask_of_all_ranks, "averaged twice", "the number of values on all ranks"),
    (mask_undivided, "1/m missing", "the sum of the micro-batches' means"),
    (label_smoothing_undivided, "1/m missing", "the sum of the micro-batches' means"),
    (sent_at_the_first_micro_batch, "weights drift", "the last backward pass of a step sent noth"),
    (two_backwards_of_one_forward, "weights drift", "or a second one of the same forward pass"),
    (zero_grad_before_the_step, "gradients lost", "nothing of what the backward passes brought"),
    (the_optimizer_steps_without_the_scaler, "loss scale left", "multiplied by the loss scale"),
    (unfrozen_after_wrapping, "changed after wrapping", "parameters were unfrozen after wrapping"),
    (the_same_dicts, "same data", "the same inputs at every forward pass"),
]


@pytest.mark.parametrize(("loop", "name", "what"), WRONG, ids=[row[0].__name__ for row in WRONG])
def test_a_wrong_loop_is_told_by_what_it_does(loop, name, what, ranks2):
    for found in ranks2.run(found_in, loop):
        assert [one[:2] for one in found] == [(name, BOTH)], found
        assert what in found[0][2]


RIGHT = [tokens_times_the_ranks, tokens_times_the_ranks_afterwards]
RIGHT += [mask_of_all_ranks_times_the_ranks, unequal_numbers_of_micro_batches]
RIGHT += [a_sum_over_samples_and_features, half_a_sum_of_squares, a_sum_over_1024_values]
RIGHT += [kept_gradients, a_policy_gradient, gathered_without_gradient, a_gradient_penalty]
RIGHT += [label_smoothing_divided, an_average_of_the_weights, a_copy_and_a_file_of_the_model]
RIGHT += [a_teacher_that_follows, dicts_of_shares, two_losses_of_one_size]
RIGHT += [windows_over_the_ends_of_epochs]


@pytest.mark.parametrize("loop", RIGHT, ids=lambda loop: loop.__name__)
def test_a_right_loop_has_no_findings(loop, ranks2):
    for found in ranks2.run(found_in, loop):
        assert found == []


@pytest.mark.parametrize(
    ("loop", "count"), [(the_rest_of_an_epoch_is_kept, 6), (a_shorter_step_at_the_end, 2)]
)
def test_a_step_of_another_number_of_micro_batches_is_a_hint(loop, count, ranks2):
    for found in ranks2.run(found_in, loop):
        assert [(one[0], one[3]) for one in found] == [("uneven steps", True)]
        assert f"steps of {count} micro-batches, each divided by 4" in found[0][2]
