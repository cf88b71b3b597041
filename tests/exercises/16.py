"""Answers to the exercises of lesson 16, making it fit."""

import collections
import itertools
import os
import tempfile
import uuid

import numpy
import torch
import torch.nn.functional as F
from answers import Answers, changed
from torch.utils.checkpoint import CheckpointPolicy

from course.labs import l16_plan as plan
from course.labs.l16_limited import Settings

# ---- 16.1 what fills the memory at the peak


def by_columns(changes):
    """All moments first, then the largest."""
    purposes = []
    for purpose, _ in changes:
        if purpose not in purposes:
            purposes.append(purpose)
    rows = []
    row = numpy.zeros(len(purposes), dtype=int)
    for purpose, num_bytes in changes:
        row[purposes.index(purpose)] += num_bytes
        rows.append(row.copy())
    most = rows[int(numpy.argmax([one.sum() for one in rows]))]
    return dict(zip(purposes, most.tolist()))


def in_two_passes(changes):
    """Where the peak is, then what is there."""
    sums = list(itertools.accumulate(num_bytes for _, num_bytes in changes))
    place = sums.index(max(sums))
    there = collections.Counter()
    for purpose, num_bytes in changes[: place + 1]:
        there[purpose] += num_bytes
    return there


def each_by_itself(changes):
    now = {}
    most = {}
    for purpose, num_bytes in changes:
        now[purpose] = now.get(purpose, 0) + num_bytes
        most[purpose] = max(most.get(purpose, 0), now[purpose])
    return most


def the_largest_entries(changes):
    most = {}
    for purpose, num_bytes in changes:
        most[purpose] = max(most.get(purpose, 0), num_bytes)
    return most


COUNTED = "now[purpose] = now.get(purpose, 0) + num_bytes"

AT_PEAK = Answers(
    solves="at_peak",
    takes_ranks=False,
    right={"columns": by_columns, "two passes": in_two_passes},
    wrong={
        "no copy": (changed("most = dict(now) => most = now"), "what you keep of the peak a copy"),
        "each by itself": (each_by_itself, "the most of each purpose by itself"),
        "the largest entries": (the_largest_entries, "what is there at that moment?"),
        "what is given back": (
            changed("+ num_bytes => + max(num_bytes, 0)"),
            "what was given back is gone",
        ),
        "looks before it counts": (
            changed(
                f"{COUNTED} => pass",
                "most = dict(now) => most = dict(now)\n        " + COUNTED,
            ),
            "the last entry counts as well",
        ),
        "the number": (changed("if size} => if size}, sum(most.values())"), "return a dict"),
        "the sum": (
            changed(
                "return {purpose: size for purpose, size in most.items() if size} => "
                "return sum(most.values())"
            ),
            "return a dict, {purpose: bytes}, not 700",
        ),
        "the last entry of each": (
            changed("now.get(purpose, 0) + num_bytes => num_bytes"),
            "what is there at that moment?",
        ),
        "the end": (
            changed("if sum(now.values()) > sum(most.values()) => if True"),
            "what is there at its end",
        ),
        "the total as well": (
            changed("most = dict(now) => most = now | {'total': sum(now.values())}"),
            "there is no purpose 'total'",
        ),
        "no return": (
            changed("return {purpose: size for purpose, size in most.items() if size} => pass"),
            "returned None",
        ),
    },
)

# ---- 16.2 the loss in chunks


class ByAutograd(torch.autograd.Function):
    """A graph of one chunk at a time, gone before the next one."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, num_chunks):
        head = weight.detach().requires_grad_()
        grads = []
        total = 0.0
        for part, wanted in zip(hidden.chunk(num_chunks), targets.chunk(num_chunks)):
            rows = part.detach().requires_grad_()
            with torch.enable_grad():
                share = F.cross_entropy(rows @ head.T, wanted, reduction="sum") / len(targets)
            share.backward()
            total += share.detach()
            grads.append(rows.grad)
        ctx.save_for_backward(torch.cat(grads), head.grad)
        return total

    @staticmethod
    def backward(ctx, grad):
        of_hidden, of_weight = ctx.saved_tensors
        return of_hidden * grad, of_weight * grad, None, None


class InBackward(torch.autograd.Function):
    """The logits of each chunk are computed twice; forward keeps the inputs alone."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, num_chunks):
        ctx.save_for_backward(hidden, weight, targets)
        ctx.rows = -(-len(targets) // num_chunks)
        nats = 0
        for begin in range(0, len(targets), ctx.rows):
            logits = hidden[begin : begin + ctx.rows] @ weight.T
            wanted = targets[begin : begin + ctx.rows, None]
            nats = nats + (logits.logsumexp(1) - logits.gather(1, wanted)[:, 0]).sum()
        return nats / len(targets)

    @staticmethod
    def backward(ctx, grad):
        hidden, weight, targets = ctx.saved_tensors
        of_hidden = []
        of_weight = 0
        for begin in range(0, len(targets), ctx.rows):
            part = hidden[begin : begin + ctx.rows]
            share = (part @ weight.T).softmax(1)
            wanted = targets[begin : begin + ctx.rows, None]
            share.scatter_add_(1, wanted, -torch.ones_like(wanted, dtype=share.dtype))
            share *= grad / len(targets)
            of_hidden.append(share @ weight)
            of_weight = of_weight + share.T @ part
        return torch.cat(of_hidden), of_weight, None, None


MEAN_OF_A_CHUNK = 'reduction="sum") / num_tokens => reduction="mean") / num_chunks'
RETURNED = "return grad * grad_hidden, grad * grad_weight, None, None"

LOSS = Answers(
    solves="LossInChunks",
    takes_ranks=False,
    right={
        "by autograd": ByAutograd,
        "again in backward": InBackward,
        "one_hot": changed(
            "grad_logits[torch.arange(len(chunk)), wanted] -= 1 => "
            "grad_logits = grad_logits - F.one_hot(wanted, len(weight))"
        ),
    },
    wrong={
        "the mean of the means": (changed(MEAN_OF_A_CHUNK), "the last chunk is shorter"),
        "a sum of means": (
            changed('reduction="sum") / num_tokens => reduction="mean")'),
            "2 times the mean",
        ),
        "a sum": (changed('reduction="sum") / num_tokens => reduction="sum")'), "added up"),
        "the gradient of a sum": (
            changed("grad_logits /= num_tokens => pass"),
            "22 times as large",
        ),
        "without the target": (
            changed("grad_logits[torch.arange(len(chunk)), wanted] -= 1 => pass"),
            "less 1 at the target",
        ),
        "written over": (
            changed("grad_weight += grad_logits.T @ part => grad_weight = grad_logits.T @ part"),
            "each chunk add",
        ),
        "grad forgotten": (
            changed(f"{RETURNED} => return grad_hidden, grad_weight, None, None"),
            "what does backward get",
        ),
        "in the wrong order": (
            changed(f"{RETURNED} => return grad * grad_weight, grad * grad_hidden, None, None"),
            "in forward's order",
        ),
        "all logits": (
            changed(
                "for chunk in => every = hidden @ weight.T\n        for chunk in",
                "part @ weight.T => every[chunk]",
            ),
            "of the shape [1024, 512]",
        ),
        "the mean over the vocabulary": (
            changed("return loss => return loss * num_tokens / len(weight)"),
            "by what is the sum divided?",
        ),
        "chunks of 64": (
            changed("rows.chunk(num_chunks) => rows.split(64)"),
            "the logits of a chunk are [32, 512]",
        ),
        "logits in a list": (
            changed(
                "for chunk in => every = []\n        for chunk in",
                "ctx.save_for => ctx.every = every\n        ctx.save_for",
                "grad_hidden[chunk] = => every.append(logits)\n            grad_hidden[chunk] =",
            ),
            "exist at once",
        ),
        "no return": (changed("return loss => pass"), "returned None"),
    },
)

# ---- 16.3 checkpointing


class WithFork(torch.autograd.Function):
    """fork_rng puts the generator back."""

    @staticmethod
    def forward(ctx, block, *inputs):
        ctx.save_for_backward(*inputs, torch.get_rng_state())
        ctx.block = block
        return block(*inputs)

    @staticmethod
    def backward(ctx, *grads):
        *inputs, state = ctx.saved_tensors
        copies = []
        for x in inputs:
            copy = x.detach()
            copy.requires_grad = x.requires_grad
            copies.append(copy)
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(state)
            output = ctx.block(*copies)
        output.backward(*grads)
        return (None, *(x.grad for x in copies))


class WithNeeds(torch.autograd.Function):
    """needs_input_grad says which inputs want a gradient."""

    @staticmethod
    def forward(ctx, block, *inputs):
        ctx.block, ctx.state = block, torch.get_rng_state()
        ctx.save_for_backward(*inputs)
        with torch.no_grad():
            return block(*inputs)

    @staticmethod
    def backward(ctx, grad):
        copies = []
        for x, needs in zip(ctx.saved_tensors, ctx.needs_input_grad[1:]):
            copies.append(x.detach().clone().requires_grad_(needs))
        with torch.random.fork_rng(devices=[]):
            torch.random.set_rng_state(ctx.state)
            with torch.set_grad_enabled(True):
                output = ctx.block(*copies)
        output.backward(grad)
        found = [None]
        for x in copies:
            found.append(x.grad)
        return tuple(found)


RUN_AGAIN = """with torch.enable_grad():
            output"""

CHECKPOINT = Answers(
    solves="Checkpoint",
    takes_ranks=False,
    right={"fork_rng": WithFork, "needs_input_grad": WithNeeds},
    wrong={
        "no random state": (
            changed("torch.set_rng_state(ctx.state) => pass"),
            "drop the same numbers",
        ),
        "the seed for the state": (
            changed(
                "torch.get_rng_state()\n        ctx.save => torch.initial_seed()\n        ctx.save",
                "torch.set_rng_state(ctx.state) => torch.manual_seed(ctx.state)",
            ),
            "drop the same numbers",
        ),
        "the state is not put back": (
            changed("torch.set_rng_state(state_now) => pass"),
            "has moved the generator",
        ),
        "gradients in forward": (
            changed(
                "return block(*inputs) => with torch.enable_grad():\n"
                "            return block(*inputs).detach()"
            ),
            "switched on in forward",
        ),
        "no enable_grad": (changed(f"{RUN_AGAIN} => output"), "no graph"),
        "ones for the gradient": (
            changed("(output, grad) => (output, torch.ones_like(output))"),
            "which gradient goes into",
        ),
        "twice the gradient": (
            changed("(output, grad) => (output, 2 * grad)"),
            "2 times as large",
        ),
        "None for the inputs": (changed("[x.grad for => [None for"), "is missing"),
        "no None for the block": (
            changed(
                "return None, *[x.grad for x in copies] => return tuple(x.grad for x in copies)"
            ),
            "one for each argument of forward",
        ),
        "kept in ctx": (
            changed(
                "ctx.save_for_backward(*inputs) => ctx.inputs = inputs",
                "ctx.saved_tensors => ctx.inputs",
            ),
            "stands in ctx itself",
        ),
        "twice in forward": (
            changed("return block(*inputs) => block(*inputs)\n        return block(*inputs)"),
            "twice is enough",
        ),
        "PyTorch's": (
            changed(
                "return block(*inputs) => return checkpoint(block, *inputs, use_reentrant=False)"
            ),
            "checkpoint is PyTorch's answer",
        ),
        "every copy needs a gradient": (
            changed("requires_grad_(x.requires_grad) => requires_grad_()"),
            "with an input of whole numbers",
        ),
        "not detached": (
            changed("x.detach().requires_grad_(x.requires_grad) => x"),
            "begin without a history",
        ),
    },
)

# ---- 16.4 a policy

SAVE = CheckpointPolicy.MUST_SAVE
AGAIN = CheckpointPolicy.PREFER_RECOMPUTE


def by_names(ctx, op, *args, **kwargs):
    """True and False are policies, too."""
    name = op.name()
    if "mm" in name:
        weight = args[1] if name == "aten::mm" else args[2]
        return weight.shape[0] <= weight.shape[1]
    return "scaled_dot_product" in name


def by_the_input(ctx, op, *args, **kwargs):
    """What is not kept: products of a wide input, and all that is cheap."""
    if op is torch.ops.aten.addmm.default:
        _, x, weight = args
    elif op is torch.ops.aten.mm.default:
        x, weight = args
    else:
        return SAVE if "attention" in str(op) else AGAIN
    return AGAIN if x.size(-1) > weight.size(-1) else CheckpointPolicy.PREFER_SAVE


SAVES_ALL = "return CheckpointPolicy.PREFER_RECOMPUTE => return CheckpointPolicy.MUST_SAVE"
NARROWS = "if num_in <= num_out: => "

POLICY = Answers(
    solves="policy",
    takes_ranks=False,
    right={"names": by_names, "the input": by_the_input},
    wrong={
        "five outputs": (changed(f"{NARROWS}if True:"), "of which product does nothing"),
        "the wrong one": (
            changed(f"{NARROWS}if num_in != num_out:"),
            "`addmm` with a weight of [48, 48] runs again",
        ),
        "the other way round": (
            changed(f"{NARROWS}if num_in > num_out:"),
            "with a weight of [48, 144] runs again",
        ),
        "this model alone": (
            changed(f"{NARROWS}if (num_in, num_out) != (512, 128):"),
            "in layers of 48 features, 11 numbers",
        ),
        "no attention": (
            changed('"attention" in str(op) => False'),
            "attention runs again",
        ),
        "attention alone": (changed("if op in PRODUCTS => if False"), "runs again in backward"),
        "biases alone": (
            changed("if op in PRODUCTS => if op is torch.ops.aten.addmm.default"),
            "in layers without biases, `mm`",
        ),
        "the third argument": (
            changed("args[-1].shape => args[2].shape"),
            "for aten.mm.default, which has 2 arguments",
        ),
        "everything": (changed(SAVES_ALL), "native_layer_norm"),
        "GELU as well": (
            changed('"attention" in str(op) => "attention" in str(op) or "gelu" in str(op)'),
            "the output of aten.gelu.default is kept, 14 numbers",
        ),
        "nothing": (
            changed("CheckpointPolicy.MUST_SAVE => CheckpointPolicy.PREFER_RECOMPUTE"),
            "runs again in backward: is its output kept?",
        ),
        "words": (
            changed("CheckpointPolicy.PREFER_RECOMPUTE => 'again'"),
            "it returned 'again'",
        ),
        "no return": (
            changed("return CheckpointPolicy.PREFER_RECOMPUTE => pass"),
            "returned None",
        ),
    },
)

# ---- 16.5 offload


class ByNumpy:
    """Bytes in a file, and what they are beside the path."""

    def __init__(self, folder, stays):
        self.folder = folder
        self.stays = stays

    def pack(self, tensor):
        if self.stays(tensor):
            return "weight", tensor
        number, name = tempfile.mkstemp(dir=self.folder)
        os.close(number)
        numpy.save(name + ".npy", tensor.detach().numpy())
        os.remove(name)
        return "file", name + ".npy"

    def unpack(self, kept):
        kind, value = kept
        if kind == "weight":
            return value
        array = numpy.load(value)
        os.remove(value)
        return torch.from_numpy(array)


class WithUuid:
    """Names that nobody has to count, and one copy for all that is not contiguous."""

    def __init__(self, folder, stays):
        self.folder, self.stays = folder, stays

    def pack(self, tensor):
        if not self.stays(tensor):
            path = os.path.join(self.folder, uuid.uuid4().hex)
            with open(path, "wb") as file:
                torch.save(torch.empty_like(tensor).copy_(tensor).detach(), file)
            return path
        return tensor

    def unpack(self, kept):
        if not isinstance(kept, str):
            return kept
        with open(kept, "rb") as file:
            tensor = torch.load(file, weights_only=True)
        os.unlink(kept)
        return tensor


PATH = 'self.folder / f"{self.num_written}.pt"'

OFFLOAD = Answers(
    solves="Offload",
    takes_ranks=False,
    right={"numpy": ByNumpy, "uuid": WithUuid},
    wrong={
        "the whole memory": (changed("tensor.detach().clone() => tensor.detach()"), "a part of a"),
        "contiguous": (
            changed("tensor.detach().clone() => tensor.detach().contiguous()"),
            "a part of a",
        ),
        "no look at the type": (
            changed("if isinstance(kept, torch.Tensor): => if False:"),
            "`unpack` fails for a weight",
        ),
        "weights as well": (changed("if self.stays(tensor): => if False:"), "does `stays` decide"),
        "nothing moves": (changed("if self.stays(tensor): => if True:"), "should have gone"),
        "one name for all": (changed(f"{PATH} => self.folder / 'saved.pt'"), "a file of its own"),
        "named by its place": (
            changed(f'{PATH} => self.folder / f"{{tensor.data_ptr()}}.pt"'),
            "a file of its own",
        ),
        "files stay": (changed("kept.unlink() => pass"), "still there after `unpack`"),
        "no return": (changed("return path => pass"), "returned None"),
        "kept in self": (
            changed(
                "self.num_written = 0 => self.num_written = 0\n        self.all = []",
                "return path => self.all.append(tensor)\n        return path",
            ),
            "are still in memory",
        ),
        "in 16 bits": (
            changed("tensor.detach().clone() => tensor.detach().bfloat16()"),
            "`unpack` returned torch.bfloat16",
        ),
        "the path": (
            changed("tensor = torch.load(kept, weights_only=True) => tensor = kept"),
            "a PosixPath",
        ),
    },
)

# ---- 16.6 make it fit


def from_the_fastest(case):
    for settings in sorted(plan.candidates(case), key=lambda one: plan.step_s(case, one)):
        if plan.peak_bytes(case, settings) <= case.room_bytes:
            return settings
    return None


def largest_micro_batch(case):
    """Of those without checkpointing and of those with it the largest, then the faster one."""
    found = []
    for kind in ("none", "full"):
        for dtype in case.flops_per_s:
            for micro_batch in range(case.global_batch, 0, -1):
                if case.global_batch % micro_batch:
                    continue
                settings = Settings(micro_batch, case.global_batch // micro_batch, kind, dtype)
                if plan.fits(case, settings):
                    found.append(settings)
                    break
    return min(found, key=lambda settings: plan.step_s(case, settings))


def on_paper(answer, ranks):
    """The check cell, without the training in a process with a limit."""
    return answer, False


CHOICE = "return quickest"
KINDS = '(("none", 6), ("full", 8))'
RATES = "case.flops_per_s.items()"
SECONDS = "products_s + count * case.launch_s"

CHOOSE = Answers(
    solves="choose",
    takes_ranks=False,
    cell=on_paper,
    right={
        "from the fastest": from_the_fastest,
        "the largest of each kind": largest_micro_batch,
    },
    wrong={
        "safe": (
            changed(f'{CHOICE} => return Settings(1, case.global_batch, "full")'),
            "times as long as it has to",
        ),
        "no accumulation": (
            changed(f"{CHOICE} => return Settings(case.global_batch)"),
            "out of memory",
        ),
        "a smaller batch": (
            changed(f"{CHOICE} => return Settings(1, 1)"),
            "another batch is another training",
        ),
        "never checkpointing": (
            changed(f'{KINDS} => [("none", 6)]'),
            "times as long as it has to",
        ),
        "always checkpointing": (
            changed(f'{KINDS} => [("full", 8)]'),
            "times as long as it has to",
        ),
        "always bfloat16": (
            changed(f'{RATES} => [("bfloat16", case.flops_per_s["bfloat16"])]'),
            "times as long as it has to",
        ),
        "room not looked at": (changed("if fits and step_s => if step_s"), "out of memory"),
        "without launches": (
            changed(f"{SECONDS} => products_s"),
            "what does each micro-batch cost",
        ),
        "checkpointing free": (
            changed('("full", 8) => ("full", 6)'),
            "what does checkpointing cost",
        ),
        "the time of a micro-batch": (
            changed(f"{SECONDS} => products_s / count + case.launch_s"),
            "that of a whole step",
        ),
        "a tuple": (
            changed(f"{CHOICE} => {CHOICE}.micro_batch, quickest.num_micro_batches"),
            "return Settings",
        ),
        "three sizes alone": (
            changed("range(1, case.global_batch + 1) => (4, 8, 16)"),
            "48 GiB: it returned None",
        ),
        "labcode's": (
            changed(f"{CHOICE} => return plan.best(case)"),
            "l16_plan.best is labcode's own answer",
        ),
        "labcode's itself": (plan.best, "l16_plan.best is labcode's own answer"),
    },
)

ANSWERS = {
    "16.1": AT_PEAK,
    "16.2": LOSS,
    "16.3": CHECKPOINT,
    "16.4": POLICY,
    "16.5": OFFLOAD,
    "16.6": CHOOSE,
}
