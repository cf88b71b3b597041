"""Answers to the exercises of lesson 16, making it fit."""

import math
import re
from dataclasses import replace

import torch
from answers import Answers
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from labcode.teach.labs import l16_plan as plan
from labcode.teach.labs.l16_limited import Settings

# ---- 16.1 find it in the log

UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def by_one_pattern(log):
    found = re.search(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", log)
    if found is None:
        return None
    return float(found[1]) * UNITS[found[2]]


def by_split(log):
    for line in log.splitlines():
        words = line.replace("Tried", "tried").split("tried to allocate ")
        if len(words) == 2:
            number, unit = words[1].split()[:2]
            return int(float(number) * UNITS[unit.rstrip(".")])
    return None


def two_patterns(log):
    cpu = re.search(r"you tried to allocate (\d+) bytes", log)
    if cpu:
        return int(cpu.group(1))
    cuda = re.search(r"CUDA out of memory. Tried to allocate (\S+) (\w)iB", log)
    if cuda:
        return float(cuda.group(1)) * 1024 ** ("KMG".index(cuda.group(2)) + 1)
    return None


def without_unit(log):
    found = re.search(r"ried to allocate ([\d.]+)", log)
    return float(found[1]) if found else None


def decimal(log):
    found = by_one_pattern(log)
    return found if found is None or "GiB" not in log else found / 2**30 * 1e9


def cpu_alone(log):
    found = re.search(r"you tried to allocate (\d+) bytes", log)
    return int(found[1]) if found else None


def any_number_of_bytes(log):
    found = re.search(r"(\d+) bytes", log)
    return int(found[1]) if found else by_one_pattern(log)


def capacity(log):
    found = re.search(r"capacity of ([\d.]+) GiB", log)
    return float(found[1]) * 2**30 if found else by_one_pattern(log)


def no_kib(log):
    found = re.search(r"[Tt]ried to allocate ([\d.]+) (bytes|MiB|GiB)", log)
    return float(found[1]) * UNITS[found[2]] if found else None


ASKED = Answers(
    solves="asked_bytes",
    takes_ranks=False,
    real=True,
    right={"one pattern": by_one_pattern, "split": by_split, "two patterns": two_patterns},
    wrong={
        "without the unit": (without_unit, "in which unit"),
        "GB for GiB": (decimal, "GiB is 2**30 bytes"),
        "the CPU alone": (cpu_alone, "it returned None, and a number stands there"),
        "any number of bytes": (any_number_of_bytes, "no allocation in it that failed"),
        "the capacity": (capacity, "which of the numbers"),
        "no KiB": (no_kib, "in KiB: it returned None"),
        "zero for none": (lambda log: by_one_pattern(log) or 0, "it returned 0"),
        "a text": (lambda log: by_one_pattern(log) and str(by_one_pattern(log)), "not '"),
    },
)

# ---- 16.2 the peak, with accumulation


def in_the_lesson(parts, count):
    at_loss = parts.activations + 3 * parts.logits
    if count > 1:
        at_loss += parts.weights
    return 3 * parts.weights + max(at_loss, parts.weights)


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


def peak_of(w=3.0, a=1.0, v=3.0, first=0.0, later=1.0, end=1.0):
    def answer(parts, count):
        gradients = (later if count > 1 else first) * parts.weights
        at_loss = a * parts.activations + v * parts.logits + gradients
        return w * parts.weights + max(at_loss, end * parts.weights)

    return answer


PEAK = Answers(
    solves="peak",
    takes_ranks=False,
    real=True,
    right={"in the lesson": in_the_lesson, "moments": by_moments, "a loop": by_loop},
    wrong={
        "gradients always": (peak_of(first=1.0), "no gradient of a weight exists yet"),
        "gradients never": (peak_of(later=0.0), "from the second micro-batch on"),
        "one logits": (peak_of(v=1.0), "three tensors as large as the logits"),
        "no logits": (peak_of(v=0.0), "where are the logits"),
        "no optimizer": (peak_of(w=1.0), "two numbers for each weight"),
        "no maximum": (peak_of(end=0.0), "which is the larger one"),
        "a list": (lambda parts, count: [in_the_lesson(parts, count)], "return one number"),
        "activations times m": (
            lambda parts, count: in_the_lesson(
                parts._replace(activations=count * parts.activations), count
            ),
            "of one micro-batch",
        ),
        "activations over m": (
            lambda parts, count: in_the_lesson(
                parts._replace(activations=parts.activations / count), count
            ),
            "of one micro-batch",
        ),
    },
)

# ---- 16.3 checkpointing


class InTheLesson(torch.autograd.Function):
    """As the solution writes it; the mistakes change one thing each."""

    @staticmethod
    def forward(ctx, block, *inputs):
        ctx.block = block
        ctx.state = torch.get_rng_state()
        ctx.save_for_backward(*inputs)
        return block(*inputs)

    @staticmethod
    def backward(ctx, grad):
        copies = [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]
        state_now = torch.get_rng_state()
        torch.set_rng_state(ctx.state)
        with torch.enable_grad():
            output = ctx.block(*copies)
        torch.set_rng_state(state_now)
        torch.autograd.backward(output, grad)
        return None, *[x.grad for x in copies]


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


class NoRandomState(InTheLesson):
    @staticmethod
    def backward(ctx, grad):
        ctx.state = torch.get_rng_state()
        return InTheLesson.backward(ctx, grad)


class StateNotPutBack(InTheLesson):
    @staticmethod
    def backward(ctx, grad):
        copies = [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]
        torch.set_rng_state(ctx.state)
        with torch.enable_grad():
            output = ctx.block(*copies)
        torch.autograd.backward(output, grad)
        return None, *[x.grad for x in copies]


class GradInForward(InTheLesson):
    @staticmethod
    def forward(ctx, block, *inputs):
        with torch.enable_grad():
            return InTheLesson.forward(ctx, block, *inputs).detach()


class NoGradInBackward(InTheLesson):
    @staticmethod
    def backward(ctx, grad):
        output = ctx.block(*ctx.saved_tensors)
        torch.autograd.backward(output, grad)
        return None, *[x.grad for x in ctx.saved_tensors]


class OnesForTheGradient(InTheLesson):
    @staticmethod
    def backward(ctx, grad):
        return InTheLesson.backward(ctx, torch.ones_like(grad))


class NoneForTheInputs(InTheLesson):
    @staticmethod
    def backward(ctx, grad):
        return tuple(None for _ in InTheLesson.backward(ctx, grad))


class ForgotTheBlock(InTheLesson):
    @staticmethod
    def backward(ctx, grad):
        return InTheLesson.backward(ctx, grad)[1:]


class InCtx(InTheLesson):
    @staticmethod
    def forward(ctx, block, *inputs):
        ctx.inputs = inputs
        return InTheLesson.forward(ctx, block, *inputs)


class TwiceInForward(InTheLesson):
    @staticmethod
    def forward(ctx, block, *inputs):
        block(*inputs)
        torch.set_rng_state(torch.get_rng_state())
        return InTheLesson.forward(ctx, block, *inputs)


class BackwardTwice(InTheLesson):
    @staticmethod
    def backward(ctx, grad):
        return InTheLesson.backward(ctx, 2 * grad)


class AlwaysAGradient(InTheLesson):
    @staticmethod
    def backward(ctx, grad):
        copies = [x.detach().requires_grad_(True) for x in ctx.saved_tensors]
        state_now = torch.get_rng_state()
        torch.set_rng_state(ctx.state)
        with torch.enable_grad():
            output = ctx.block(*copies)
        torch.set_rng_state(state_now)
        torch.autograd.backward(output, grad)
        needs = ctx.needs_input_grad[1:]
        return None, *[x.grad if need else None for x, need in zip(copies, needs)]


class NotDetached(InTheLesson):
    @staticmethod
    def backward(ctx, grad):
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.state)
            output = ctx.block(*ctx.saved_tensors)
            torch.autograd.backward(output, grad)
        return None, *[x.grad for x in ctx.saved_tensors]


class PyTorchsFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, *inputs):
        return CheckpointFunction.forward(ctx, block, True, *inputs)

    @staticmethod
    def backward(ctx, grad):
        return CheckpointFunction.backward(ctx, grad)[1:]


class GivenOn:
    """No checkpointing at all."""

    @staticmethod
    def apply(block, *inputs):
        return block(*inputs)


class PyTorchs:
    @staticmethod
    def apply(block, *inputs):
        return checkpoint(block, *inputs, use_reentrant=False)


CHECKPOINT = Answers(
    solves="Checkpoint",
    takes_ranks=False,
    real=True,
    right={"in the lesson": InTheLesson, "fork_rng": WithFork, "needs_input_grad": WithNeeds},
    wrong={
        "no random state": (NoRandomState, "drop the same numbers"),
        "the state is not put back": (StateNotPutBack, "has moved the generator"),
        "gradients in forward": (GradInForward, "switched on in forward"),
        "no enable_grad": (NoGradInBackward, "no graph"),
        "ones for the gradient": (OnesForTheGradient, "which gradient goes into"),
        "None for the inputs": (NoneForTheInputs, "is missing"),
        "no None for the block": (ForgotTheBlock, "one for each argument of forward"),
        "kept in ctx": (InCtx, "stands in ctx itself"),
        "twice in forward": (TwiceInForward, "twice is enough"),
        "twice the gradient": (BackwardTwice, "2 times as large"),
        "no checkpointing": (GivenOn, "switched on in forward"),
        "PyTorch's": (PyTorchs, "checkpoint is PyTorch's answer"),
        "PyTorch's Function": (PyTorchsFunction, "forward is PyTorch's answer"),
        "every copy needs a gradient": (AlwaysAGradient, "with an input of whole numbers"),
        "not detached": (NotDetached, "begin without a history"),
    },
)

# ---- 16.4 how many layers in a segment


def all_k(num_layers, layer_bytes, input_bytes):
    sizes = {}
    for k in range(1, num_layers + 1):
        sizes[k] = math.ceil(num_layers / k) * input_bytes + k * layer_bytes
    return min(sizes, key=sizes.get)


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


def square_root(num_layers, layer_bytes, input_bytes):
    return max(1, round(math.sqrt(num_layers)))


def not_whole(num_layers, layer_bytes, input_bytes):
    return math.sqrt(num_layers * input_bytes / layer_bytes)


def turned_round(num_layers, layer_bytes, input_bytes):
    return all_k(num_layers, input_bytes, layer_bytes)


def rounded_down(num_layers, layer_bytes, input_bytes):
    sizes = [num_layers // k * input_bytes + k * layer_bytes for k in range(1, num_layers + 1)]
    return 1 + sizes.index(min(sizes))


def from_zero(num_layers, layer_bytes, input_bytes):
    return all_k(num_layers, layer_bytes, input_bytes) - 1


def divisors(num_layers, layer_bytes, input_bytes):
    def kept(k):
        return num_layers // k * input_bytes + k * layer_bytes

    return min([k for k in range(1, num_layers + 1) if num_layers % k == 0], key=kept)


def not_rounded(num_layers, layer_bytes, input_bytes):
    def kept(k):
        return num_layers / k * input_bytes + k * layer_bytes

    return min(range(1, num_layers + 1), key=kept)


def rule_of_the_root(num_layers, layer_bytes, input_bytes):
    return max(1, round(math.sqrt(num_layers * input_bytes / layer_bytes)))


SEGMENT = Answers(
    solves="best_segment",
    takes_ranks=False,
    real=True,
    right={"all k": all_k, "a loop": all_k_loop, "from above": from_above},
    wrong={
        "the square root of L": (square_root, "and another k keeps"),
        "not whole": (not_whole, "k is a whole number"),
        "turned round": (turned_round, "and another k keeps"),
        "rounded down": (rounded_down, "and another k keeps"),
        "divisors alone": (divisors, "and another k keeps"),
        "not rounded": (not_rounded, "and another k keeps"),
        "the rule of the root": (rule_of_the_root, "and another k keeps"),
        "counted from 0": (from_zero, "is not between 1 and L"),
        "always one": (lambda num_layers, layer, inputs: 1, "and another k keeps"),
        "the bytes": (
            lambda num_layers, layer, inputs: float(num_layers * inputs),
            "k is a whole number",
        ),
    },
)

# ---- 16.5 make it fit


def all_settings(case, kinds=("none", "full"), fits=plan.fits, key=plan.step_s):
    found = []
    for micro_batch in range(1, case.global_batch + 1):
        if case.global_batch % micro_batch == 0:
            for kind in kinds:
                for dtype in case.flops_per_s:
                    count = case.global_batch // micro_batch
                    settings = Settings(micro_batch, count, kind, dtype)
                    if fits(case, settings):
                        found.append(settings)
    return min(found, key=lambda settings: key(case, settings))


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


def safe(case):
    return Settings(1, case.global_batch, "full", "float32")


def no_accumulation(case):
    return Settings(case.global_batch)


def smaller_batch(case):
    return Settings(1, 1)


def never_checkpointing(case):
    return all_settings(case, kinds=("none",))


def always_checkpointing(case):
    return all_settings(case, kinds=("full",))


def always_narrow(case):
    def narrow(case, settings):
        return plan.fits(case, settings) and settings.dtype == "bfloat16"

    return all_settings(case, fits=narrow)


def a_tuple(case):
    return 4, 4, "none", "float32"


def without_launches(case):
    def key(case, settings):
        return plan.step_s(case, settings) - settings.num_micro_batches * case.launch_s

    return all_settings(case, key=key)


def as_if_checkpointing_were_free(case):
    def key(case, settings):
        return plan.step_s(case, replace(settings, activation_checkpointing="none"))

    return all_settings(case, key=key)


def for_a_micro_batch(case):
    def key(case, settings):
        return plan.step_s(case, settings) / settings.num_micro_batches

    return all_settings(case, key=key)


def with_more_room(case):
    object.__setattr__(case, "room_bytes", 10**15)
    return all_settings(case)


def only_the_first(case):
    return all_settings(case) if case.about == plan.CASES[0].about else None


CHOOSE = Answers(
    solves="choose",
    takes_ranks=False,
    real=True,
    right={
        "in the lesson": all_settings,
        "from the fastest": from_the_fastest,
        "the largest of each kind": largest_micro_batch,
    },
    wrong={
        "safe": (safe, "times as long as it has to"),
        "no accumulation": (no_accumulation, "out of memory"),
        "a smaller batch": (smaller_batch, "another batch is another training"),
        "never checkpointing": (never_checkpointing, "times as long as it has to"),
        "always checkpointing": (always_checkpointing, "times as long as it has to"),
        "always bfloat16": (always_narrow, "times as long as it has to"),
        "a tuple": (a_tuple, "return Settings"),
        "without launches": (without_launches, "what does each micro-batch cost"),
        "checkpointing free": (as_if_checkpointing_were_free, "what does checkpointing cost"),
        "the time of a micro-batch": (for_a_micro_batch, "that of a whole step"),
        "labcode's": (lambda case: plan.best(case), "l16_plan.best is labcode's own answer"),
        "more room": (with_more_room, "out of memory"),
        "only the first case": (only_the_first, "more: it returned None"),
    },
)

ANSWERS = {"16.1": ASKED, "16.2": PEAK, "16.3": CHECKPOINT, "16.4": SEGMENT, "16.5": CHOOSE}
