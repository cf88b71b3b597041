"""Answers to the exercises of lesson 16, making it fit."""

import math
import re

import torch
from answers import Answers, changed

from labcode.teach.labs import l16_plan as plan
from labcode.teach.labs.l16_limited import Settings

# ---- 16.1 find it in the log


def by_split(log):
    units = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    for line in log.splitlines():
        words = line.replace("Tried", "tried").split("tried to allocate ")
        if len(words) == 2:
            number, unit = words[1].split()[:2]
            return int(float(number) * units[unit.rstrip(".")])
    return None


def two_patterns(log):
    cpu = re.search(r"you tried to allocate (\d+) bytes", log)
    if cpu:
        return int(cpu.group(1))
    cuda = re.search(r"CUDA out of memory. Tried to allocate (\S+) (\w)iB", log)
    if cuda:
        return float(cuda.group(1)) * 1024 ** ("KMG".index(cuda.group(2)) + 1)
    return None


ASKED = Answers(
    solves="asked_bytes",
    takes_ranks=False,
    right={"split": by_split, "two patterns": two_patterns},
    wrong={
        "without the unit": (changed(" * units[found[2]] => "), "in which unit"),
        "GB for GiB": (changed("2**30 => 10**9"), "GiB is 2**30 bytes"),
        "the CPU alone": (
            changed("[Tt]ried => you tried"),
            "it returned None, and a number stands there",
        ),
        "any number of bytes": (
            changed("[Tt]ried to allocate => "),
            "no allocation in it that failed",
        ),
        "the last number": (changed("[Tt]ried to allocate => (?s).*"), "which of the numbers"),
        "no KiB": (changed("|KiB|MiB => |MiB"), "in KiB: it returned None"),
        "zero for none": (changed("return None => return 0"), "it returned 0"),
        "a text": (
            changed("float(found[1]) * units[found[2]] => found[1] + found[2]"),
            "return a number, not '6291456bytes'",
        ),
    },
)

# ---- 16.2 the peak, with accumulation


def by_moments(parts, count):
    w, a, v = parts
    already = 0 if count == 1 else w
    return max(w + 2 * w + already + a + 3 * v, w + 2 * w + w)


def by_loop(parts, count):
    gradients = 0.0
    most = 0.0
    for _ in range(count):
        at_loss = 3 * parts.weights + gradients + parts.activations + 3 * parts.logits
        gradients = parts.weights
        most = max(most, at_loss, 3 * parts.weights + gradients)
    return most


PEAK = Answers(
    solves="peak",
    takes_ranks=False,
    right={"moments": by_moments, "a loop": by_loop},
    wrong={
        "gradients always": (
            changed("if num_micro_batches > 1 => if True"),
            "no gradient of a weight exists yet",
        ),
        "gradients never": (
            changed("at_loss += parts.weights => pass"),
            "from the second micro-batch on",
        ),
        "one logits": (
            changed("3 * parts.logits => parts.logits"),
            "three tensors as large as the logits",
        ),
        "no logits": (changed("+ 3 * parts.logits => "), "where are the logits"),
        "no optimizer": (changed("3 * parts.weights => parts.weights"), "two numbers for each"),
        "no maximum": (
            changed("max(at_loss, parts.weights) => at_loss"),
            "which is the larger one",
        ),
        "a list": (
            changed("before + max(at_loss, parts.weights) => [before, at_loss]"),
            "return one number",
        ),
        "activations times m": (
            changed("= parts.activations => = num_micro_batches * parts.activations"),
            "of one micro-batch, and backward frees them",
        ),
        "activations over m": (
            changed("= parts.activations => = parts.activations / num_micro_batches"),
            "of one micro-batch already",
        ),
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

# ---- 16.4 how many layers in a segment


def all_k_loop(num_layers, layer_bytes, input_bytes):
    best = 1
    least = math.inf
    for k in range(1, num_layers + 1):
        kept = -(-num_layers // k) * input_bytes + k * layer_bytes
        if kept < least:
            best, least = k, kept
    return best


def from_above(num_layers, layer_bytes, input_bytes):
    def kept(k):
        return (num_layers + k - 1) // k * input_bytes + k * layer_bytes

    return sorted(range(num_layers, 0, -1), key=kept)[0]


LEAST = "min(range(1, num_layers + 1), key=kept)"
DIVISORS = "[k for k in range(1, num_layers + 1) if num_layers % k == 0]"
CEILING = "math.ceil(num_layers / k)"

SEGMENT = Answers(
    solves="best_segment",
    takes_ranks=False,
    right={"a loop": all_k_loop, "from above": from_above},
    wrong={
        "the square root of L": (
            changed(f"{LEAST} => max(1, round(math.sqrt(num_layers)))"),
            "and another k keeps",
        ),
        "the rule of the root": (
            changed(f"{LEAST} => round(math.sqrt(num_layers * input_bytes / layer_bytes)) or 1"),
            "and another k keeps",
        ),
        "not whole": (
            changed(f"{LEAST} => math.sqrt(num_layers * input_bytes / layer_bytes)"),
            "k is a whole number",
        ),
        "the bytes": (
            changed(f"{LEAST} => min(kept(k) for k in range(1, num_layers + 1))"),
            "k is a whole number",
        ),
        "turned round": (
            changed("* input_bytes + k * layer_bytes => * layer_bytes + k * input_bytes"),
            "and another k keeps",
        ),
        "rounded down": (changed(f"{CEILING} => num_layers // k"), "and another k keeps"),
        "not rounded": (changed(f"{CEILING} => num_layers / k"), "and another k keeps"),
        "divisors alone": (
            changed(f"{LEAST} => min({DIVISORS}, key=kept)"),
            "and another k keeps",
        ),
        "counted from 0": (changed(f"{LEAST} => {LEAST} - 1"), "is not between 1 and L"),
    },
)

# ---- 16.5 make it fit


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
    },
)

ANSWERS = {"16.1": ASKED, "16.2": PEAK, "16.3": CHECKPOINT, "16.4": SEGMENT, "16.5": CHOOSE}
