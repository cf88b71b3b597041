"""Answers to the exercises of lesson 04, data parallel by hand."""

import tempfile

import torch
import torch.distributed as dist
from answers import Answers
from torch.nn.parallel import DistributedDataParallel

from labcode.models import gpt
from labcode.teach.exercises import l04
from labcode.teach.labs import l04_by_hand

# ---- 4.1 average the gradients


def sum_then_divide(model, group):
    for param in model.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad, group=group)
            param.grad /= dist.get_world_size(group)


def divide_then_sum(model, group):
    for param in model.parameters():
        if param.grad is None:
            continue
        mean = param.grad / group.size()
        dist.all_reduce(mean, group=group)
        param.grad = mean


def with_gather(model, group):
    for param in model.parameters():
        if param.grad is not None:
            parts = [torch.empty_like(param.grad) for _ in range(group.size())]
            dist.all_gather(parts, param.grad, group=group)
            param.grad.copy_(torch.stack(parts).mean(dim=0))


def all_in_one(model, group):
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat, group=group)
    flat /= group.size()
    for grad, part in zip(grads, flat.split([grad.numel() for grad in grads])):
        grad.copy_(part.view_as(grad))


def only_a_sum(model, group):
    for param in model.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad, group=group)


def divided_by_the_world(model, group):
    for param in model.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad, group=group)
            param.grad /= dist.get_world_size()


def in_the_world(model, group):
    for param in model.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()


def result_thrown_away(model, group):
    for param in model.parameters():
        if param.grad is not None:
            mean = param.grad.clone()
            dist.all_reduce(mean, group=group)
            mean /= group.size()


def averages_weights(model, group):
    for param in model.parameters():
        param.data += param.grad if param.grad is not None else 0
        dist.all_reduce(param.data, group=group)
        param.data /= group.size()


def frozen_forgotten(model, group):
    for param in model.parameters():
        dist.all_reduce(param.grad, group=group)
        param.grad /= group.size()


def starts_all_then_waits(model, group):
    """With handles: right as long as every one is waited for."""
    under_way = []
    for param in model.parameters():
        if param.grad is not None:
            under_way.append((dist.all_reduce(param.grad, group=group, async_op=True), param))
    for work, param in under_way:
        work.wait()
        param.grad /= group.size()


def fills_with_zeros(model, group):
    for param in model.parameters():
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        dist.all_reduce(param.grad, group=group)
        param.grad /= group.size()


def never_waits(model, group):
    for param in model.parameters():
        if param.grad is not None:
            param.grad /= group.size()
            dist.all_reduce(param.grad, group=group, async_op=True)


def divides_before_waiting(model, group):
    for param in model.parameters():
        if param.grad is not None:
            work = dist.all_reduce(param.grad, group=group, async_op=True)
            param.grad /= group.size()
            work.wait()


def stops_at_a_frozen_parameter(model, group):
    for param in model.parameters():
        if param.grad is None:
            break
        dist.all_reduce(param.grad, group=group)
        param.grad /= group.size()


def sends_weights_too(model, group):
    for param in model.parameters():
        dist.broadcast(param.data, group_src=0, group=group)
        if param.grad is not None:
            dist.all_reduce(param.grad, group=group)
            param.grad /= group.size()


def rounded(model, group, dtype=torch.float32):
    for param in model.parameters():
        if param.grad is not None:
            short = param.grad.to(dtype)
            dist.all_reduce(short, group=group)
            param.grad = (short / group.size()).to(param.dtype)


def largest(model, group):
    for param in model.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad, op=dist.ReduceOp.MAX, group=group)


def on_one_rank(model, group):
    for param in model.parameters():
        if param.grad is not None:
            dist.reduce(param.grad, group=group, group_dst=0)
            param.grad /= group.size()


AVERAGE = Answers(
    check=l04.average_gradients,
    right={
        "sum, then divide": sum_then_divide,
        "divide, then sum": divide_then_sum,
        "gather": with_gather,
        "all in one": all_in_one,
        "with handles": starts_all_then_waits,
    },
    wrong={
        "only a sum": (only_a_sum, "4 times as long as the mean: the group has 4 ranks"),
        "divided by the world size": (divided_by_the_world, "0.5 times as long as the mean"),
        "forgets the group": (in_the_world, "ranks outside of the group"),
        "result thrown away": (result_thrown_away, "still has its own gradient"),
        "averages the weights": (averages_weights, "the weights have changed"),
        "a frozen parameter": (frozen_forgotten, "one parameter is not trained"),
        "zeros for a frozen parameter": (fills_with_zeros, "weight decay alone makes it shrink"),
        "never waits": (never_waits, "started with async_op=True and 0 waited for"),
        "divides before waiting": (divides_before_waiting, "while its all-reduce was under way"),
        "stops at a frozen parameter": (
            stops_at_a_frozen_parameter,
            "rank 0 still has its own gradient in 3280 of 6880 numbers",
        ),
        "labcode's": (
            l04_by_hand.average_gradients,
            "l04_by_hand.average_gradients is labcode's own answer",
        ),
        "sends the weights as well": (sends_weights_too, "the weights have changed"),
        "in float32": (rounded, "of its length away from the mean: is it rounded on its way"),
        "in bfloat16": (
            lambda model, group: rounded(model, group, torch.bfloat16),
            "of its length away from the mean: is it rounded on its way",
        ),
        "the largest": (largest, "away from the mean"),
        "on one rank only": (on_one_rank, "away from the mean, and rank 0 is right"),
    },
)

# ---- 4.2 uneven shares


def weigh_then_sum(model, mine, group):
    total = torch.tensor(float(mine))
    dist.all_reduce(total, group=group)
    for param in model.parameters():
        param.grad *= mine / total
        dist.all_reduce(param.grad, group=group)


def sum_then_divide_by_total(model, mine, group):
    total = torch.tensor([mine])
    dist.all_reduce(total, group=group)
    for param in model.parameters():
        param.grad.mul_(mine)
        dist.all_reduce(param.grad, group=group)
        param.grad.div_(total.item())


def count_in_the_same_message(model, mine, group):
    for param in model.parameters():
        flat = torch.cat([param.grad.flatten() * mine, param.grad.new_tensor([mine])])
        dist.all_reduce(flat, group=group)
        param.grad = (flat[:-1] / flat[-1]).view_as(param)


def mean_of_means(model, mine, group):
    sum_then_divide(model, group)


def not_divided(model, mine, group):
    for param in model.parameters():
        param.grad *= mine
        dist.all_reduce(param.grad, group=group)


def divided_twice(model, mine, group):
    weigh_then_sum(model, mine, group)
    for param in model.parameters():
        param.grad /= group.size()


def weighed_after(model, mine, group):
    total = torch.tensor(float(mine))
    dist.all_reduce(total, group=group)
    for param in model.parameters():
        dist.all_reduce(param.grad, group=group)
        param.grad *= mine / total


def plain_sum(model, mine, group):
    only_a_sum(model, group)


def nothing_sent(model, mine, group):
    for param in model.parameters():
        param.grad *= 1.0


def leaves_without_samples(model, mine, group):
    if mine == 0:
        return
    weigh_then_sum(model, mine, group)


def counts_at_least_one(model, mine, group):
    weigh_then_sum(model, max(mine, 1), group)


def uneven_in_the_world(model, mine, group):
    total = torch.tensor(float(mine))
    dist.all_reduce(total)
    for param in model.parameters():
        param.grad *= mine / total
        dist.all_reduce(param.grad)


def uneven_gradients_in_the_world(model, mine, group):
    total = torch.tensor(float(mine))
    dist.all_reduce(total, group=group)
    for param in model.parameters():
        param.grad *= mine / total
        dist.all_reduce(param.grad)


def mine_forgotten(model, mine, group):
    total = torch.tensor(float(mine))
    dist.all_reduce(total, group=group)
    for param in model.parameters():
        dist.all_reduce(param.grad, group=group)
        param.grad /= total


def divides_by_mine(model, mine, group):
    total = torch.tensor(float(mine))
    dist.all_reduce(total, group=group)
    for param in model.parameters():
        param.grad *= total / max(mine, 1)
        dist.all_reduce(param.grad, group=group)


def weighed_in_bfloat16(model, mine, group):
    total = torch.tensor(float(mine))
    dist.all_reduce(total, group=group)
    for param in model.parameters():
        short = (param.grad * mine / total).bfloat16()
        dist.all_reduce(short, group=group)
        param.grad = short.double()


UNEVEN = Answers(
    check=l04.average_uneven,
    right={
        "weigh, then sum": weigh_then_sum,
        "sum, then divide": sum_then_divide_by_total,
        "count and gradient together": count_in_the_same_message,
    },
    wrong={
        "mean of means": (mean_of_means, "that is the mean of the means"),
        "not divided": (not_divided, "16 times as long as it should be"),
        "divided twice": (divided_twice, "0.25 times as long as it should be"),
        "weighed afterwards": (weighed_after, "weigh first, then send"),
        "plain sum": (plain_sum, "that is the plain sum"),
        "mine forgotten": (mine_forgotten, "turns the mean over `mine` samples into a sum?"),
        "divides by mine": (
            divides_by_mine,
            "a rank with few samples counts for more than one with many",
        ),
        "in bfloat16": (weighed_in_bfloat16, "is it rounded on its way"),
        "nothing sent": (nothing_sent, "did anything travel?"),
        "leaves without samples": (
            leaves_without_samples,
            "with 7 + 3 + 0 + 6 samples: ranks 0, 1 and 3 wait in all_reduce",
        ),
        "counts at least one": (
            counts_at_least_one,
            "with 7 + 3 + 0 + 6 samples: right direction, but 0.941 times as long",
        ),
        "forgets the group": (
            uneven_in_the_world,
            "with 7 + 3 samples: there are gradients of ranks outside of the group in it",
        ),
        "gradients in the world": (
            uneven_gradients_in_the_world,
            "with 7 + 3 samples: there are gradients of ranks outside of the group in it",
        ),
    },
)

# ---- 4.3 accumulation


def accumulate(model, inputs, targets, m, group, zero=True, divide=True, send_each=False):
    if zero:
        model.zero_grad()
    for micro_inputs, micro_targets in zip(inputs.chunk(m), targets.chunk(m)):
        loss = gpt.loss(model(micro_inputs), micro_targets)
        if divide:
            loss = loss / m
        loss.backward()
        if send_each:
            sum_then_divide(model, group)
    if not send_each:
        sum_then_divide(model, group)


def accumulate_divides_at_the_end(model, inputs, targets, m, group):
    for param in model.parameters():
        param.grad = None
    for micro_inputs, micro_targets in zip(inputs.split(len(inputs) // m), targets.chunk(m)):
        gpt.loss(model(micro_inputs), micro_targets).backward()
    for param in model.parameters():
        param.grad /= m * group.size()
        dist.all_reduce(param.grad, group=group)


def accumulate_by_index(model, inputs, targets, m, group):
    model.zero_grad(set_to_none=False)
    size = len(inputs) // m
    for number in range(m):
        part = slice(number * size, (number + 1) * size)
        loss = gpt.loss(model(inputs[part]), targets[part])
        loss.backward(torch.tensor(1 / m, dtype=loss.dtype))
    for param in model.parameters():
        dist.all_reduce(param.grad, group=group)
        param.grad.div_(dist.get_world_size(group))


def without_micro_batches(model, inputs, targets, m, group):
    model.zero_grad()
    gpt.loss(model(inputs), targets).backward()
    sum_then_divide(model, group)


def not_averaged_over_ranks(model, inputs, targets, m, group):
    model.zero_grad()
    for micro_inputs, micro_targets in zip(inputs.chunk(m), targets.chunk(m)):
        (gpt.loss(model(micro_inputs), micro_targets) / m).backward()


def zero_in_the_loop(model, inputs, targets, m, group):
    for micro_inputs, micro_targets in zip(inputs.chunk(m), targets.chunk(m)):
        model.zero_grad()
        (gpt.loss(model(micro_inputs), micro_targets) / m).backward()
    sum_then_divide(model, group)


def accumulate_in_the_world(model, inputs, targets, m, group):
    accumulate(model, inputs, targets, m, dist.group.WORLD)


def mean_of_gradients(model, inputs, targets, m, group):
    """Without `backward()`: asks for the gradients of each micro-batch."""
    params = list(model.parameters())
    for param in params:
        param.grad = torch.zeros_like(param)
    for micro_inputs, micro_targets in zip(inputs.chunk(m), targets.chunk(m)):
        loss = gpt.loss(model(micro_inputs), micro_targets)
        for param, gradient in zip(params, torch.autograd.grad(loss, params)):
            param.grad += gradient / m
    sum_then_divide(model, group)


def one_backward_at_the_end(model, inputs, targets, m, group):
    model.zero_grad()
    total = 0.0
    for micro_inputs, micro_targets in zip(inputs.chunk(m), targets.chunk(m)):
        total = total + gpt.loss(model(micro_inputs), micro_targets) / m
    total.backward()
    sum_then_divide(model, group)


def mean_of_stacked_losses(model, inputs, targets, m, group):
    model.zero_grad()
    losses = []
    for micro_inputs, micro_targets in zip(inputs.chunk(m), targets.chunk(m)):
        losses.append(gpt.loss(model(micro_inputs), micro_targets))
    torch.stack(losses).mean().backward()
    sum_then_divide(model, group)


def always_four_parts(model, inputs, targets, m, group):
    accumulate(model, inputs, targets, 4, group)


def one_sample_each(model, inputs, targets, m, group):
    accumulate(model, inputs, targets, len(inputs), group)


def splits_into_parts_of_m(model, inputs, targets, m, group):
    model.zero_grad()
    for micro_inputs, micro_targets in zip(inputs.split(m), targets.split(m)):
        (gpt.loss(model(micro_inputs), micro_targets) / m).backward()
    sum_then_divide(model, group)


def makes_a_step(model, inputs, targets, m, group):
    accumulate(model, inputs, targets, m, group)
    torch.optim.AdamW(model.parameters()).step()


def with_ddp(model, inputs, targets, m, group):
    """As DDP's documentation has it."""
    model.zero_grad()
    wrapped = DistributedDataParallel(model, process_group=group)
    *first, last = zip(inputs.chunk(m), targets.chunk(m))
    with wrapped.no_sync():
        for micro_inputs, micro_targets in first:
            (gpt.loss(wrapped(micro_inputs), micro_targets) / m).backward()
    micro_inputs, micro_targets = last
    (gpt.loss(wrapped(micro_inputs), micro_targets) / m).backward()


def only_the_first(model, inputs, targets, m, group):
    model.zero_grad()
    (gpt.loss(model(inputs.chunk(m)[0]), targets.chunk(m)[0])).backward()
    sum_then_divide(model, group)


ACCUMULATED = Answers(
    check=l04.accumulated_gradients,
    right={
        "loss divided": accumulate,
        "gradients divided": accumulate_divides_at_the_end,
        "slices": accumulate_by_index,
        "without backward()": mean_of_gradients,
    },
    wrong={
        "not divided by m": (
            lambda model, x, y, m, group: accumulate(model, x, y, m, group, divide=False),
            "with 2 micro-batches on 4 ranks: right direction, but 2 times as long",
        ),
        "zero_grad forgotten": (
            lambda model, x, y, m, group: accumulate(model, x, y, m, group, zero=False),
            "the gradient of the step before is still in it",
        ),
        "sent after each": (
            lambda model, x, y, m, group: accumulate(model, x, y, m, group, send_each=True),
            "with 2 micro-batches on 4 ranks",
        ),
        "no micro-batches": (without_micro_batches, "the model saw 4 samples at once"),
        "not averaged": (not_averaged_over_ranks, "that of the rank's own share"),
        "zero_grad in the loop": (zero_in_the_loop, "only the last micro-batch is in it"),
        "forgets the group": (accumulate_in_the_world, "gradients of ranks outside of the group"),
        "one backward at the end": (one_backward_at_the_end, "the next forward began before"),
        "the mean of stacked losses": (mean_of_stacked_losses, "the next forward began before"),
        "always four parts": (always_four_parts, "called 4 times, with 1, 1, 1, 1 samples"),
        "one sample each": (one_sample_each, "called 4 times, with 1, 1, 1, 1 samples"),
        "parts of m samples": (splits_into_parts_of_m, "into how many parts do you cut"),
        "with DDP": (with_ddp, "wrapping a model in DDP sends its weights"),
        "only the first": (only_the_first, "the model was called once, with 2 samples"),
        "makes a step": (makes_a_step, "the step comes after this function"),
    },
)

# ---- 4.4 the script: text, as the check reads the source of a function

SCRIPT = """
def main(folder, epochs=2, global_batch=16):
    on_gpus = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpus else "gloo")
    rank = dist.get_rank()
    p = dist.get_world_size()
    device = torch.device("cpu")
    if on_gpus:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    model = DistributedDataParallel(build_model().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    share = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=global_batch // p, sampler=share)
    for epoch in range(epochs):
        share.set_epoch(epoch)
        total = torch.zeros((), device=device)
        for inputs, targets in loader:
            loss = gpt.loss(model(inputs.to(device)), targets.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        mean = total / len(loader)
        dist.all_reduce(mean)
        mean /= p
        if rank == 0:
            print(f"epoch {epoch}: loss {mean.item():.4f}")
    if rank == 0:
        torch.save(model.module.state_dict(), folder / "weights.pt")
    dist.destroy_process_group()
"""

OTHER_STYLE = """
def main(folder, epochs=2, global_batch=16):
    rank = int(os.environ["RANK"])
    size = int(os.environ["WORLD_SIZE"])
    where = "cpu"
    if torch.cuda.is_available():
        where = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(where)
    dist.init_process_group(backend="gloo" if where == "cpu" else "nccl")
    try:
        net = build_model().to(where)
        ddp = DistributedDataParallel(net)
        adam = torch.optim.AdamW(net.parameters(), lr=0.003)
        sampler = DistributedSampler(dataset, num_replicas=size, rank=rank)
        batches = DataLoader(dataset, global_batch // size, sampler=sampler, drop_last=True)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            losses = []
            for x, y in batches:
                adam.zero_grad()
                loss = gpt.loss(ddp(x.to(where)), y.to(where))
                loss.backward()
                adam.step()
                losses.append(loss.detach())
            mean = torch.stack(losses).mean()
            dist.reduce(mean, dst=0)
            if rank == 0:
                print(f"epoch {epoch}: loss {mean / size:.4f}", flush=True)
        if rank == 0:
            torch.save(net.state_dict(), Path(folder) / "weights.pt")
    finally:
        dist.destroy_process_group()
"""

BY_HAND = '''
def main(folder, epochs=2, global_batch=16):
    """Without DDP: everything that lesson 04 taught."""
    dist.init_process_group()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank())
        device = torch.device("cuda", dist.get_node_local_rank())
    model = build_model().to(device)
    for param in model.parameters():
        dist.broadcast(param.data, src=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    share = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=global_batch // dist.get_world_size(), sampler=share)
    for epoch in range(epochs):
        share.set_epoch(epoch)
        total = 0.0
        for inputs, targets in loader:
            loss = gpt.loss(model(inputs.to(device)), targets.to(device))
            optimizer.zero_grad()
            loss.backward()
            for param in model.parameters():
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
            optimizer.step()
            dist.all_reduce(loss.detach_())
            total += loss.item() / dist.get_world_size()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {total / len(loader):.4f}")
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), folder / "weights.pt")
    dist.destroy_process_group()
'''


def with_change(old, new):
    assert old in SCRIPT
    return SCRIPT.replace(old, new)


def check_script(source, ranks):
    """`l04.script` of a function whose source is given."""
    with tempfile.TemporaryDirectory() as folder:
        l04.script(source, folder)


WRITTEN = Answers(
    check=check_script,
    right={"DDP": SCRIPT, "in another style": OTHER_STYLE, "by hand": BY_HAND},
    wrong={
        "set_epoch forgotten": (
            with_change("        share.set_epoch(epoch)\n", ""),
            "every epoch has the same batches",
        ),
        "everybody prints": (
            with_change(
                "        if rank == 0:\n            pr", "        if True:\n            pr"
            ),
            "more than one rank prints",
        ),
        "the loss of rank 0": (
            with_change("        dist.all_reduce(mean)\n        mean /= p\n", ""),
            "the mean over all steps and ranks is",
        ),
        "the sum of the losses": (
            with_change("        mean /= p\n", ""),
            "on 2 ranks: epoch 0 prints the loss",
        ),
        "global batch on each rank": (
            with_change("global_batch // p", "global_batch"),
            "each rank reads `global_batch` samples",
        ),
        "no sampler": (
            with_change("sampler=share", "shuffle=False"),
            "on 1 rank: the samples are not shuffled",
        ),
        "saved with DDP": (
            with_change("model.module.state", "model.state"),
            "begin with `module.`",
        ),
        "everybody saves": (
            with_change(
                "    if rank == 0:\n        torch.save", "    if True:\n        torch.save"
            ),
            "let rank 0 alone write files",
        ),
        "saves nothing": (
            with_change('torch.save(model.module.state_dict(), folder / "weights.pt")', "pass"),
            "there is no file weights.pt",
        ),
        "left open": (
            with_change("    dist.destroy_process_group()\n", ""),
            "dist.destroy_process_group()",
        ),
        "no DDP": (
            with_change(
                "DistributedDataParallel(build_model().to(device))", "build_model().to(device)"
            ).replace("model.module.", "model."),
            "on 2 ranks: rank 0 has learned from its own samples only",
        ),
        "forward past DDP": (
            with_change("model(inputs.to", "model.module(inputs.to"),
            "on 2 ranks: rank 0 has learned from its own samples only",
        ),
        "another learning rate": (with_change(", lr=3e-3", ""), "the learning rate is not 3e-3"),
        "zero_grad after backward": (
            with_change(
                "            optimizer.zero_grad()\n            loss.backward()\n",
                "            loss.backward()\n            optimizer.zero_grad()\n",
            ),
            "the weights are those from the start",
        ),
        "no zero_grad": (
            with_change("            optimizer.zero_grad()\n", ""),
            "the gradients of earlier steps are still in",
        ),
        "the optimizer of another model": (
            with_change("AdamW(model.parameters()", "AdamW(build_model().parameters()"),
            "the weights are those from the start",
        ),
        "two ranks, always": (
            with_change("global_batch // p", "global_batch // 2"),
            "on 1 rank: all ranks together read half",
        ),
        "the CPU only": (
            with_change('"nccl" if on_gpus else "gloo"', '"gloo"'),
            "with GPUs it would use gloo",
        ),
        "no device": (
            with_change(
                '        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))\n'
                "        torch.cuda.set_device(device)\n",
                '        device = torch.device("cuda")\n',
            ),
            "which one would a rank take",
        ),
        "the batches stay on the CPU": (
            with_change("model(inputs.to(device)), targets.to(device))", "model(inputs), targets)"),
            "here, without GPUs, all is right; with GPUs, the batches would stay on the CPU",
        ),
        "the targets stay on the CPU": (
            with_change("targets.to(device))", "targets)"),
            "with GPUs, what a batch holds besides `inputs` would stay on the CPU",
        ),
        "a function outside of main": (
            with_change("    rank = dist.get_rank()\n", "    rank = which_rank()\n"),
            "the file would not know the name `which_rank`: only `main` is copied",
        ),
        "no rendezvous": (
            with_change("dist.init_process_group", "str"),
            "process group has not been initialized",
        ),
    },
)

ANSWERS = {"4.1": AVERAGE, "4.2": UNEVEN, "4.3": ACCUMULATED, "4.4": WRITTEN}
