"""Answers to the exercises of lesson 04, data parallel by hand."""

import torch
import torch.distributed as dist
from answers import Answers, changed
from torch.nn.parallel import DistributedDataParallel

from course.labs import l04_by_hand
from labcode.models import gpt

# ---- 4.1 average the gradients


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


def starts_all_then_waits(model, group):
    """With handles: right as long as every one is waited for."""
    under_way = []
    for param in model.parameters():
        if param.grad is not None:
            under_way.append((dist.all_reduce(param.grad, group=group, async_op=True), param))
    for work, param in under_way:
        work.wait()
        param.grad /= group.size()


ALL_REDUCE = "dist.all_reduce(param.grad, group=group)"
ASYNC = "dist.all_reduce(param.grad, group=group, async_op=True)"
DIVIDE = "param.grad /= dist.get_world_size(group)"
IF = "        if param.grad is not None:\n"
FOR = "    for param in model.parameters():\n"
SHORT = "short = param.grad.to({}); {}; param.grad = short.double()"
IN_FLOAT32 = SHORT.format("torch.float32", "dist.all_reduce(short, group=group)")
IN_BFLOAT16 = SHORT.format("torch.bfloat16", "dist.all_reduce(short, group=group)")

AVERAGE = Answers(
    solves="average_gradients",
    right={
        "divide, then sum": divide_then_sum,
        "gather": with_gather,
        "all in one": all_in_one,
        "with handles": starts_all_then_waits,
    },
    wrong={
        "only a sum": (
            changed(f"{DIVIDE} => pass"),
            "4 times as long as the mean: the group has 4 ranks",
        ),
        "divided by the world size": (
            changed("get_world_size(group) => get_world_size()"),
            "0.5 times as long as the mean: the group has 2 ranks",
        ),
        "forgets the group": (
            changed("grad, group=group => grad", "get_world_size(group) => get_world_size()"),
            "ranks outside of the group",
        ),
        "result thrown away": (
            changed(
                f"{IF} => {IF}            mean = param.grad.clone()\n",
                "(param.grad, => (mean,",
                "param.grad /= => mean /=",
            ),
            "still has its own gradient",
        ),
        "averages the weights": (
            changed("(param.grad, => (param.data,", "param.grad /= => param.data /="),
            "the weights have changed",
        ),
        "a frozen parameter": (
            changed("if param.grad is not None: => if True:"),
            "one parameter is not trained",
        ),
        "takes what all_reduce returns": (
            changed(
                f"{ALL_REDUCE} => total = {ALL_REDUCE}", "param.grad /= => param.grad = total /"
            ),
            "`all_reduce` itself returns nothing",
        ),
        "calls div on what all_reduce returns": (
            changed(
                f"{ALL_REDUCE} => total = {ALL_REDUCE}",
                f"{DIVIDE} => param.grad = total.div(dist.get_world_size(group))",
            ),
            "`all_reduce` itself returns nothing",
        ),
        "returns of all_reduce as gradients": (
            changed(f"{ALL_REDUCE} => param.grad = {ALL_REDUCE}"),
            "`all_reduce` itself returns nothing",
        ),
        "zeros for a frozen parameter": (
            changed(
                f"{IF} =>         if param.grad is None:\n"
                "            param.grad = torch.zeros_like(param)\n"
                "        if True:\n"
            ),
            "weight decay alone makes it shrink",
        ),
        "never waits": (
            changed(f"{ALL_REDUCE} => {DIVIDE}", f"            {DIVIDE}\n#END => ").changes
            and changed(f"{ALL_REDUCE} => {ASYNC}"),
            "started and 0 waited for",
        ),
        "divides before waiting": (
            changed(
                f"{ALL_REDUCE} => work = {ASYNC}", f"{DIVIDE} => {DIVIDE}\n            work.wait()"
            ),
            "while its all-reduce was under way",
        ),
        "stops at a frozen parameter": (
            changed(
                f"{IF} =>         if param.grad is None:\n            break\n        if True:\n"
            ),
            "rank 0 still has its own gradient in 3280 of 6880 numbers",
        ),
        "labcode's": (
            l04_by_hand.average_gradients,
            "l04_by_hand.average_gradients is labcode's own answer",
        ),
        "sends the weights as well": (
            changed(
                f"{FOR} => {FOR}        dist.broadcast(param.data, group_src=0, group=group)\n"
            ),
            "the weights have changed",
        ),
        "in float32": (
            changed(f"{ALL_REDUCE} => {IN_FLOAT32}"),
            "where do the numbers cease to be float64?",
        ),
        "in bfloat16": (
            changed(f"{ALL_REDUCE} => {IN_BFLOAT16}"),
            "of its length away from the mean: is it rounded on its way",
        ),
        "the largest": (
            changed("grad, group => grad, op=dist.ReduceOp.MAX, group", f"{DIVIDE} => pass"),
            "away from the mean",
        ),
        "on one rank only": (
            changed(f"{ALL_REDUCE} => dist.reduce(param.grad, group=group, group_dst=0)"),
            "rank 1",
        ),
    },
)

# ---- 4.2 uneven shares


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


WEIGH = "param.grad *= mine / total"

UNEVEN = Answers(
    solves="average_uneven",
    right={
        "sum, then divide": sum_then_divide_by_total,
        "count and gradient together": count_in_the_same_message,
    },
    wrong={
        "mean of means": (
            changed(f"{WEIGH} => param.grad /= group.size()"),
            "that is the mean of the means",
        ),
        "not divided": (changed("mine / total => mine"), "16 times as long as it should be"),
        "divided twice": (
            changed("mine / total => mine / total / group.size()"),
            "0.25 times as long as it should be",
        ),
        "weighed afterwards": (
            changed(f"        {WEIGH}\n => ", f"{ALL_REDUCE} => {ALL_REDUCE}\n        {WEIGH}"),
            "weigh first, then send",
        ),
        "plain sum": (changed(f"{WEIGH} => pass"), "that is the plain sum"),
        "mine forgotten": (
            changed("mine / total => 1 / total"),
            "turns the mean over `mine` samples into a sum?",
        ),
        "divides by mine": (
            changed("mine / total => total / max(mine, 1)"),
            "a rank with few samples counts for more than one with many",
        ),
        "in bfloat16": (
            changed(f"{ALL_REDUCE} => {IN_BFLOAT16}"),
            "is it rounded on its way",
        ),
        "nothing sent": (
            changed(f"{WEIGH} => pass", f"{ALL_REDUCE} => pass"),
            "did anything travel?",
        ),
        "leaves without samples": (
            changed("    total = torch =>     if mine == 0:\n        return\n    total = torch"),
            "with 7 + 3 + 0 + 6 samples: ranks 0, 1 and 3 wait in all_reduce of float32 []",
        ),
        "counts at least one": (
            changed("    total = torch =>     mine = max(mine, 1)\n    total = torch"),
            "with 7 + 3 + 0 + 6 samples: right direction, but 0.941 times as long",
        ),
        "forgets the group": (
            changed(", group=group => "),
            "with 7 + 3 samples: there are gradients of ranks outside of the group in it",
        ),
        "gradients in the world": (
            changed("grad, group=group => grad"),
            "with 7 + 3 samples: there are gradients of ranks outside of the group in it",
        ),
        "divides whole numbers": (
            changed("mine / total => mine // total"),
            "(it is zero everywhere)",
        ),
    },
)

# ---- 4.3 accumulation


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


def mean_of_gradients(model, inputs, targets, m, group):
    """Without `backward()`: asks for the gradients of each micro-batch."""
    params = list(model.parameters())
    for param in params:
        param.grad = torch.zeros_like(param)
    for micro_inputs, micro_targets in zip(inputs.chunk(m), targets.chunk(m)):
        loss = gpt.loss(model(micro_inputs), micro_targets)
        for param, gradient in zip(params, torch.autograd.grad(loss, params)):
            param.grad += gradient / m
    l04_by_hand.average_gradients(model, group)


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


ZERO = "    model.zero_grad()\n"
CHUNKS = "(num_micro_batches) => "
LOOP = "    for some_inputs, some_targets in zip(micro_inputs, micro_targets):\n"
BACKWARD = "        (loss / num_micro_batches).backward()\n"
SEND = "    l04_by_hand.average_gradients(model, group)"
LATER = f"{LOOP} =>     losses = []\n{LOOP}"

ACCUMULATED = Answers(
    solves="accumulated_gradients",
    right={
        "gradients divided": accumulate_divides_at_the_end,
        "slices": accumulate_by_index,
        "without backward()": mean_of_gradients,
        "a list of losses": changed(
            LATER,
            f"{BACKWARD} =>         losses.append(loss / num_micro_batches)\n"
            "        losses[-1].backward()\n",
        ),
    },
    wrong={
        "not divided by m": (
            changed("(loss / num_micro_batches) => loss"),
            "with 2 micro-batches on 4 ranks: right direction, but 2 times as long",
        ),
        "zero_grad forgotten": (
            changed(f"{ZERO} => "),
            "the gradient of the step before is still in it",
        ),
        "sent after each": (
            changed(f"{SEND} => ", f"{BACKWARD} => {BACKWARD}    {SEND}\n"),
            "with 2 micro-batches on 4 ranks",
        ),
        "no micro-batches": (changed(f"chunk{CHUNKS}chunk(1)"), "the model saw 4 samples at once"),
        "not averaged": (changed(f"{SEND} => "), "that of the rank's own share"),
        "zero_grad in the loop": (
            changed(f"{ZERO} => ", f"{LOOP} => {LOOP}    {ZERO}"),
            "only the last micro-batch is in it",
        ),
        "forgets the group": (
            changed("(model, group) => (model, dist.group.WORLD)"),
            "gradients of ranks outside of the group",
        ),
        "one backward at the end": (
            changed(
                LATER,
                f"{BACKWARD} =>         losses.append(loss / num_micro_batches)\n",
                f"{SEND} =>     sum(losses).backward()\n{SEND}",
            ),
            "the next forward began before",
        ),
        "the mean of stacked losses": (
            changed(
                LATER,
                f"{BACKWARD} =>         losses.append(loss)\n",
                f"{SEND} =>     torch.stack(losses).mean().backward()\n{SEND}",
            ),
            "the next forward began before",
        ),
        "always four parts": (
            changed(f"chunk{CHUNKS}chunk(4)"),
            "called 4 times, with 1, 1, 1, 1 samples",
        ),
        "parts of m samples": (
            changed(f"chunk{CHUNKS}split(num_micro_batches)"),
            "into how many parts do you cut",
        ),
        "with DDP": (with_ddp, "wrapping a model in DDP sends its weights"),
        "only the first": (
            changed(f"{BACKWARD} => {BACKWARD}        break\n"),
            "the model was called once, with 2 samples",
        ),
        "makes a step": (
            changed(f"{SEND} => {SEND}\n    torch.optim.AdamW(model.parameters()).step()"),
            "the step comes after this function",
        ),
        "keeps the graphs of all losses": (
            changed(
                LATER,
                f"{BACKWARD} =>         losses.append(loss / num_micro_batches)\n"
                "        losses[-1].backward(retain_graph=True)\n",
            ),
            "bytes are still kept for the backward of the micro-batches before",
        ),
        "keeps one graph for nothing": (
            changed(".backward() => .backward(retain_graph=True)"),
            "bytes are still kept for the backward of the micro-batches before",
        ),
    },
)

# ---- 4.4 the script: text, as the check reads the source of a function

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


ON_ONE_GPU = """
def main(folder, epochs=2, global_batch=16):
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(dataset, batch_size=global_batch, shuffle=True)
    for epoch in range(epochs):
        total = 0.0
        for inputs, targets in loader:
            loss = gpt.loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch}: loss {total / len(loader):.4f}")
    torch.save(model.state_dict(), folder / "weights.pt")
"""

WRITTEN = Answers(
    solves="main",
    takes_ranks=False,
    real=True,
    right={"in another style": OTHER_STYLE, "by hand": BY_HAND},
    wrong={
        "set_epoch forgotten": (
            changed(
                "        share.set_epoch(epoch)\n => ",
            ),
            "every epoch has the same batches",
        ),
        "everybody prints": (
            changed(
                "        if rank == 0:\n            pr =>         if True:\n            pr",
            ),
            "more than one rank prints",
        ),
        "the loss of rank 0": (
            changed(
                "        dist.all_reduce(mean_loss)\n        mean_loss /= p\n => ",
            ),
            "the mean over all steps and ranks is",
        ),
        "the sum of the losses": (
            changed(
                "        mean_loss /= p\n => ",
            ),
            "on 2 ranks: epoch 0 prints the loss",
        ),
        "global batch on each rank": (
            changed(
                "global_batch // p => global_batch",
            ),
            "each rank reads `global_batch` samples",
        ),
        "no sampler": (
            changed(
                "sampler=share => shuffle=False",
            ),
            "of the first 48 samples that rank 0 reads rank 1 reads 48 too",
        ),
        "saved with DDP": (
            changed(
                "model.module.state => model.state",
            ),
            "begin with `module.`",
        ),
        "everybody saves": (
            changed(
                "    if rank == 0:\n        torch.save =>     if True:\n        torch.save",
            ),
            "let rank 0 alone write files",
        ),
        "saves nothing": (
            changed(
                'torch.save(model.module.state_dict(), folder / "weights.pt") => pass',
            ),
            "there is no file weights.pt",
        ),
        "left open": (
            changed(
                "    dist.destroy_process_group()\n => ",
            ),
            "dist.destroy_process_group()",
        ),
        "no DDP": (
            changed(
                "DistributedDataParallel(build_model().to(device)) => build_model().to(device)",
                "model.module. => model.",
            ),
            "on 2 ranks: rank 0 has learned from its own samples only",
        ),
        "forward past DDP": (
            changed(
                "model(inputs.to => model.module(inputs.to",
            ),
            "on 2 ranks: rank 0 has learned from its own samples only",
        ),
        "another learning rate": (
            changed(
                ", lr=3e-3 => ",
            ),
            "the learning rate is not 3e-3",
        ),
        "zero_grad after backward": (
            changed(
                "            optimizer.zero_grad()\n"
                "            loss.backward()\n"
                " =>"
                "             loss.backward()\n"
                "            optimizer.zero_grad()\n",
            ),
            "the weights are those from the start",
        ),
        "no zero_grad": (
            changed(
                "            optimizer.zero_grad()\n => ",
            ),
            "the gradients of earlier steps are still in",
        ),
        "the optimizer of another model": (
            changed(
                "AdamW(model.parameters() => AdamW(build_model().parameters()",
            ),
            "the weights are those from the start",
        ),
        "two ranks, always": (
            changed(
                "global_batch // p => global_batch // 2",
            ),
            "on 1 rank: all ranks together read half",
        ),
        "a function outside of main": (
            changed(
                "    rank = dist.get_rank()\n =>     rank = which_rank()\n",
            ),
            "the file would not know the name `which_rank`: only `main` is copied",
        ),
        "no rendezvous": (
            changed(
                "dist.init_process_group => str",
            ),
            "process group has not been initialized",
        ),
        "the loss is added up on rank 0": (
            changed(
                "        dist.all_reduce(mean_loss)\n =>         if rank == 0:\n"
                "            dist.all_reduce(mean_loss)\n",
            ),
            "needs has to make it, with one size and dtype. Is one of these calls inside an `if",
        ),
        "a barrier of rank 0": (
            changed(
                '/ "weights.pt") => / "weights.pt")\n        dist.barrier()',
            ),
            "rank 0 waits in barrier (main, line",
        ),
        "the script of one GPU": (ON_ONE_GPU, "no rank joins the others"),
        "every rank shuffles": (
            changed("sampler=share => shuffle=True"),
            "does the DataLoader have a DistributedSampler?",
        ),
    },
)

# ---- 4.5 the script without labcode: the whole cell

SYNC_FLAG = changed(
    "        with nullcontext() if is_last else model.no_sync():\n"
    "            loss = loss_of(model, inputs, targets, device)\n"
    "            (loss / MICRO_BATCHES).backward()\n"
    " => "
    "        if is_last:\n"
    "            loss = loss_of(model, inputs, targets, device)\n"
    "            (loss / MICRO_BATCHES).backward()\n"
    "        else:\n"
    "            with model.no_sync():\n"
    "                loss = loss_of(model, inputs, targets, device)\n"
    "                (loss / MICRO_BATCHES).backward()\n"
)
SUMS_IN_ONE_MESSAGE = changed(
    "    dist.all_reduce(loss_sum)\n    dist.all_reduce(count)\n"
    "    return (loss_sum / count).item(), count.item()\n"
    " => "
    "    both = torch.stack([loss_sum.double(), count.double()])\n"
    "    dist.all_reduce(both)\n"
    "    return (both[0] / both[1]).item(), int(both[1])\n"
)
ALL_VALIDATE_ALL = changed(
    "Subset(data, range(dist.get_rank(), len(data), dist.get_world_size())) => data",
    "    dist.all_reduce(loss_sum)\n    dist.all_reduce(count)\n => ",
)
MAP_TO_CPU = changed(
    "map_location=device, weights_only=True => map_location='cpu'",
    "    unfinished = folder => "
    "    content['note'] = {'torch': str(torch.__version__)}\n    unfinished = folder",
)
A_TUPLE_BY_RENAME = changed(
    """    content = {
        "epochs": epochs_done,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
 =>     content = (epochs_done, model.state_dict(), optimizer.state_dict())
""",
    "os.replace(unfinished, => os.rename(unfinished,",
    """    model.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    return content["epochs"]
 =>     epochs_done, weights, moments = content
    model.load_state_dict(weights)
    optimizer.load_state_dict(moments)
    return epochs_done
""",
)
ATTRIBUTE_OF_DDP = changed(
    "        with nullcontext() if is_last else model.no_sync():\n"
    " =>         model.require_backward_grad_sync = is_last\n        if True:\n"
)
OWN = "Subset(data, range(dist.get_rank(), len(data), dist.get_world_size()))"

PLAIN = Answers(
    solves="run",
    takes_ranks=False,
    real=True,
    right={
        "two branches": SYNC_FLAG,
        "sum and count in one message": SUMS_IN_ONE_MESSAGE,
        "every rank validates all": ALL_VALIDATE_ALL,
        "read to the CPU first": MAP_TO_CPU,
        "a tuple, by os.rename": A_TUPLE_BY_RENAME,
        "the attribute of DDP": ATTRIBUTE_OF_DDP,
    },
    wrong={
        "imports labcode": (
            changed("import os\n => import os\nfrom labcode.runtime.units import GIB\n"),
            "the script imports labcode",
        ),
        "a name of another cell": (
            changed("F.cross_entropy => gpt.loss"),
            "the file would not know the name `gpt`",
        ),
        "in float32": (
            changed("with torch.autocast(device.type, dtype=torch.bfloat16): => if True:"),
            "forward does not run in bfloat16",
        ),
        "sends every micro-batch": (
            changed("with nullcontext() if is_last else model.no_sync(): => if True:"),
            "DDP sends gradients 6 times in 3 steps",
        ),
        "writes over the checkpoint": (
            changed(
                "torch.save(content, unfinished) => torch.save(content, folder / CHECKPOINT)",
                "    os.replace(unfinished, folder / CHECKPOINT)\n => ",
            ),
            "leaves half a checkpoint",
        ),
        "never sends": (
            changed("nullcontext() if is_last else model.no_sync() => model.no_sync()"),
            "does the last micro-batch of each step send",
        ),
        "a sampler for validation": (
            changed(
                f"    own = {OWN}\n =>     own = data\n",
                "DataLoader(own, batch_size=16) => "
                "DataLoader(own, 16, sampler=DistributedSampler(own, shuffle=False))",
                "    count = torch.tensor(len(own), device=device)\n => "
                "    count = torch.tensor(0, device=device)\n",
                "* len(inputs)\n => * len(inputs)\n            count += len(inputs)\n",
            ),
            "it counts 8 samples of 7 on two ranks",
        ),
        "the loss of rank 0's samples": (
            changed("    dist.all_reduce(loss_sum)\n => "),
            "add up sums and counts over all ranks, and divide once",
        ),
        "the count of rank 0": (
            changed("    dist.all_reduce(count)\n => "),
            "it counts 4 samples of 7 on two ranks",
        ),
        "the mean of rank 0": (
            changed("    dist.all_reduce(mean)\n => "),
            "and the mean of all losses of all ranks is",
        ),
        "a step for each micro-batch": (
            changed("        if is_last:\n =>         if True:\n"),
            "does the optimizer step after it alone",
        ),
        "begins anew": (
            changed('return content["epochs"] => return 0'),
            "it returns 0 after 3 epochs",
        ),
        "without the optimizer": (
            changed('    optimizer.load_state_dict(content["optimizer"])\n => '),
            "the optimizer's state is not the one that was saved",
        ),
        "without the weights": (
            changed('    model.load_state_dict(content["model"])\n => '),
            "the weights are not those that were saved",
        ),
        "one epoch too many": (
            changed('return content["epochs"] => return content["epochs"] + 1'),
            "it returns 4 after 3 epochs",
        ),
        "saves the DDP object": (
            changed("save(folder, epoch + 1, model, => save(folder, epoch + 1, wrapped,"),
            "begin with `module.`",
        ),
        "everybody saves": (
            changed("    if dist.get_rank() != 0:\n        return\n => "),
            "let rank 0 alone",
        ),
        "everybody prints": (
            changed("if dist.get_rank() == 0: => if True:"),
            "more than one rank prints",
        ),
        "losses not divided": (
            changed("(loss / MICRO_BATCHES).backward() => loss.backward()"),
            "each loss is divided by MICRO_BATCHES before backward",
        ),
        "forward outside of no_sync": (
            changed(
                "        with nullcontext() if is_last else model.no_sync():\n"
                "            loss = loss_of(model, inputs, targets, device)\n"
                " =>         loss = loss_of(model, inputs, targets, device)\n"
                "        with nullcontext() if is_last else model.no_sync():\n"
            ),
            "DDP sends gradients 6 times in 3 steps",
        ),
        "the mean of divided losses": (
            changed("total += loss.detach() => total += loss.detach() / MICRO_BATCHES"),
            "each loss as it was before you divided it",
        ),
        "no zero_grad": (
            changed("            optimizer.zero_grad()\n => "),
            "the gradients of the steps before are still there",
        ),
        "samples stay where they are": (
            changed("inputs.to(device) => inputs", "targets.to(device) => targets"),
            "samples stay on the CPU",
        ),
        "autocast without a dtype": (
            changed("torch.autocast(device.type, dtype=torch.bfloat16) => torch.autocast('cpu')"),
            "autocast without a dtype is bfloat16 on a CPU and float16 on a GPU",
        ),
        "the loss in bfloat16": (
            changed("logits.float() => logits"),
            "the loss is a torch.bfloat16: take it from logits.float()",
        ),
        "any pickle": (
            changed("weights_only=True => weights_only=False"),
            "runs whatever code somebody has put into the file",
        ),
        "to the GPU that wrote": (
            changed("map_location=device, => "),
            "without map_location each rank reads to the GPU that has written the file",
        ),
        "the folder is not used": (
            changed(
                "os.replace(unfinished, folder / CHECKPOINT) => os.replace(unfinished, CHECKPOINT)"
            ),
            "is in the folder where the script runs",
        ),
        "validation with graphs": (
            changed("with torch.no_grad(): => if True:"),
            "forward keeps all that backward would need",
        ),
        "a count with a point": (
            changed("count.item()\n => float(count)\n"),
            "as a whole number",
        ),
        "left open": (
            changed("    dist.destroy_process_group()\n => "),
            "the process group is still there at the end",
        ),
        "a name that torch does not have": (
            changed("return F.cross_entropy => return F.crossentropy"),
            "has no attribute 'crossentropy' (line 51 of your cell, in loss_of: `return F.cross",
        ),
        "an error behind the first step": (
            changed("count.item()\n => count[0].item()\n"),
            "(line 83 of your cell, in validate: `return (loss_sum / count)",
        ),
        "a sum on rank 0": (
            changed(
                "    dist.all_reduce(mean)\n => "
                "    if dist.get_rank() == 0:\n        dist.all_reduce(mean)\n"
            ),
            "rank 0 waits in all_reduce of float32 [] (train_epoch, line 68), rank 1 has finished",
        ),
        "a barrier of rank 0": (
            changed(
                "folder / CHECKPOINT)\n\n\ndef load => "
                "folder / CHECKPOINT)\n    dist.barrier()\n\n\ndef load"
            ),
            "rank 0 waits in barrier (save, line 98), rank 1 has finished",
        ),
        "ranks of run that do not meet": (
            changed(
                "    dist.destroy_process_group() => "
                "    if dist.get_rank() == 0:\n        dist.barrier()\n"
                "    dist.destroy_process_group()"
            ),
            "(lines are those of your cell) rank 0 waits in barrier (run, line 131)",
        ),
        "a loop without an end": (
            changed(
                "    mean = total / len(loader)\n => "
                "    while dist.get_rank() == 0:\n        pass\n    mean = total / len(loader)\n"
            ),
            "train_epoch did not come to an end",
        ),
    },
)

ANSWERS = {"4.1": AVERAGE, "4.2": UNEVEN, "4.3": ACCUMULATED, "4.4": WRITTEN, "4.5": PLAIN}
