"""Answers to the exercises of lesson 03, one device, fast."""

import math

import torch
from answers import Answers, changed
from torch import nn
from torch.optim.adamw import adamw as adamw_of_torch

from labcode.models import gpt
from labcode.teach.labs import l03_race
from labcode.teach.labs.l03_race import Settings

# ---- 3.1 the roofline


def layer(tokens, inputs, outputs, number_bytes):
    numbers = inputs * outputs + tokens * (inputs + outputs)
    return tokens * outputs * inputs * 2, number_bytes * numbers


def shortest(flops, num_bytes, flops_per_s, bytes_per_s):
    compute_s = flops / flops_per_s
    memory_s = num_bytes / bytes_per_s
    return compute_s if compute_s > memory_s else memory_s


def by_searching(inputs, outputs, number_bytes, flops_per_s, bytes_per_s):
    for tokens in range(1, 10_000):
        compute_s = 2 * tokens * inputs * outputs / flops_per_s
        numbers = tokens * (inputs + outputs) + inputs * outputs
        if compute_s >= numbers * number_bytes / bytes_per_s:
            return tokens
    return None


def by_intensity(inputs, outputs, number_bytes, flops_per_s, bytes_per_s):
    ridge = flops_per_s / bytes_per_s
    most = 2 * inputs * outputs / ((inputs + outputs) * number_bytes)
    if most <= ridge:
        return None
    low, high = 0, 1
    while 2 * high * inputs * outputs < ridge * number_bytes * (
        high * (inputs + outputs) + inputs * outputs
    ):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        numbers = middle * (inputs + outputs) + inputs * outputs
        if 2 * middle * inputs * outputs >= ridge * number_bytes * numbers:
            high = middle
        else:
            low = middle
    return high


def searches_for_ever(inputs, outputs, number_bytes, flops_per_s, bytes_per_s):
    tokens = 1
    while (
        2 * tokens * inputs * outputs / flops_per_s
        < number_bytes * (tokens * (inputs + outputs) + inputs * outputs) / bytes_per_s
    ):
        tokens += 1
    return tokens


NUMBERS = "numbers = tokens * inputs + inputs * outputs + tokens * outputs"
LONGER = "max(flops / flops_per_s, num_bytes / bytes_per_s)"
LESS = "per_token_s -= (inputs + outputs) * number_bytes / bytes_per_s"
NONE = "if per_token_s <= 0:\n        return None"

ROOFLINE = Answers(
    solves=("linear_layer", "shortest_s", "tokens_at_the_ridge"),
    takes_ranks=False,
    right={
        "by searching": (layer, shortest, by_searching),
        "by intensity": (layer, shortest, by_intensity),
        "a list": (lambda *shape: list(layer(*shape)), shortest, by_searching),
    },
    wrong={
        "no additions": (changed("2 * tokens * inputs => tokens * inputs"), "the additions?"),
        "a whole step": (changed("2 * tokens * inputs => 6 * tokens * inputs"), "forward alone"),
        "no result": (changed(" + tokens * outputs => "), "has to be written as well"),
        "no x": (changed("tokens * inputs + inputs => inputs"), "x has to be read as well"),
        "W for each token": (
            changed("inputs * outputs + tokens => tokens * inputs * outputs + tokens"),
            "once, for all tokens together",
        ),
        "W alone": (changed(f"{NUMBERS} => numbers = inputs * outputs"), "the bytes of W alone"),
        "numbers": (changed("numbers * number_bytes\n => numbers\n"), "are numbers, not bytes"),
        "one number": (changed("return flops, numbers => return numbers"), "give two numbers"),
        "the sum": (
            changed(f"{LONGER} => flops / flops_per_s + num_bytes / bytes_per_s"),
            "do not add up",
        ),
        "the shorter": (changed("return max( => return min("), "when the slower of the two is"),
        "without x": (changed(f"{LESS} => pass"), "leaves out the bytes of x"),
        "rounded down": (changed("math.ceil => math.floor"), "is it rounded down?"),
        "without None": (changed(f"{NONE} => pass"), "no number of tokens is enough"),
        "always None": (changed("per_token_s <= 0 => True"), "it is None, and with enough tokens"),
        "not whole": (
            changed("math.ceil(weight_s / per_token_s) => weight_s / per_token_s"),
            "give a whole number",
        ),
        "without x, rounded": (
            changed(
                "math.ceil(weight_s / per_token_s) => "
                "1 + int(number_bytes * flops_per_s / bytes_per_s / 2)"
            ),
            "leaves out the bytes of x and of the result",
        ),
        "too short a search": (
            changed(
                "return math.ceil(weight_s / per_token_s) => "
                "found = math.ceil(weight_s / per_token_s)\n"
                "    return found if found < 1000 else None"
            ),
            "it is None, and with enough tokens",
        ),
        "for ever": ((layer, shortest, searches_for_ever), "10,000 tokens are far enough"),
        "without return": (changed(f"return {LONGER} => {LONGER}"), "is there a `return`?"),
    },
)

# ---- 3.4 the scaler


class Base:
    def __init__(self, scale=2.0**16, growth_interval=2000):
        self.scale = scale
        self.growth_interval = growth_interval
        self.good_steps = 0


class WithForeach(Base):
    def backward(self, loss):
        loss.backward(gradient=torch.tensor(self.scale))

    def unscale(self, params):
        grads = [param.grad for param in params if param.grad is not None]
        torch._foreach_mul_(grads, 1 / self.scale)
        return bool(torch.stack([grad.isfinite().all() for grad in grads]).all())

    def update(self, finite):
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.scale *= 0.5
        elif self.good_steps % self.growth_interval == 0:
            self.scale = 2 * self.scale


class ByTheNorm(Base):
    """The 2-norm of finite gradients is finite, in float64; counts down."""

    def __init__(self, scale=2.0**16, growth_interval=2000):
        super().__init__(scale, growth_interval)
        self.left = growth_interval

    def backward(self, loss):
        scaled = loss * self.scale
        scaled.backward()

    def unscale(self, params):
        total = 0.0
        for param in params:
            if param.grad is not None:
                param.grad = param.grad / self.scale
                total += param.grad.double().norm().item()
        return math.isfinite(total)

    def update(self, finite):
        self.left = self.left - 1 if finite else self.growth_interval
        if not finite:
            self.scale = self.scale / 2
        elif self.left == 0:
            self.scale = self.scale * 2
            self.left = self.growth_interval


SCALED = "(loss * self.scale).backward()"
DIVIDE = "param.grad /= self.scale"
LOOK = "if not param.grad.isfinite().all():\n                finite = False"
HALVE = "self.scale /= 2"
GROW = "self.scale *= 2\n            self.good_steps = 0"

SCALER = Answers(
    solves="Scaler",
    takes_ranks=False,
    right={"foreach": WithForeach, "by the norm": ByTheNorm},
    wrong={
        "does not scale": (
            changed(f"{SCALED} => loss.backward()"),
            "multiplied by the scale before",
        ),
        "changes the loss": (
            changed(f"{SCALED} => loss *= self.scale\n        loss.backward()"),
            "changed the loss itself",
        ),
        "no backward": (changed(f"{SCALED} => return loss * self.scale"), "there is no gradient"),
        "not written back": (
            changed(f"{DIVIDE} => grad = param.grad / self.scale"),
            "is the result written into `.grad`?",
        ),
        "multiplies": (changed("grad /= => grad *="), "divide by the scale, do not multiply"),
        "loops twice": (
            changed("return finite => return all(p.grad.isfinite().all() for p in params)"),
            "A generator gives its items once",
        ),
        "only inf": (
            changed("not param.grad.isfinite().all() => param.grad.isinf().any()"),
            "True with NaN in the first gradient",
        ),
        "only NaN": (
            changed("not param.grad.isfinite().all() => param.grad.isnan().any()"),
            "True with inf in the first gradient",
        ),
        "only the last": (
            changed(f"{LOOK} => finite = bool(param.grad.isfinite().all())"),
            "True with inf in the first gradient",
        ),
        "any for all": (changed(".all() => .any()"), "True with inf in the first gradient"),
        "returns early": (
            changed(f"{LOOK} => return bool(param.grad.isfinite().all())"),
            "still multiplied by the scale",
        ),
        "forgets None": (
            changed("if param.grad is None:\n                continue => pass"),
            "NoneType",
        ),
        "says nothing": (changed("return finite => pass"), "is there a `return`?"),
        "grows at once": (
            changed("self.good_steps == self.growth_interval => finite"),
            "16 after one good step",
        ),
        "grows for ever": (
            changed("good_steps == => good_steps >=", f"{GROW} => self.scale *= 2"),
            "it counts from the start again",
        ),
        "not in a row": (
            changed(f"{HALVE}\n            self.good_steps = 0 => {HALVE}"),
            "had to begin the row anew",
        ),
        "never back": (changed(f"            {HALVE}\n => "), "16 after an overflow"),
        "unscale updates": (
            changed("return finite => self.update(finite)\n        return finite"),
            "unscale changed the scale from 2 to 1",
        ),
        "unscale starts anew": (
            changed("finite = True => finite = True\n        self.good_steps = 0"),
            "Does unscale change what update counts",
        ),
        "whole numbers": (changed(f"{HALVE} => self.scale //= 2"), "is a scale below 1 rounded"),
    },
)

# ---- 3.5 the step


def returns_early(model, optimizer, scaler, micro_batches, max_norm):
    optimizer.zero_grad()
    m = len(micro_batches)
    for tokens, targets in micro_batches:
        with torch.autocast("cpu", torch.float16):
            logits = model(tokens)
            loss = gpt.loss(logits, targets) / m
        scaler.backward(loss)
    if not scaler.unscale(model.parameters()):
        scaler.update(False)
        return
    torch.nn.utils.clip_grad_norm_(list(model.parameters()), max_norm)
    optimizer.step()
    scaler.update(True)


def clips_by_hand(model, optimizer, scaler, micro_batches, max_norm):
    for param in model.parameters():
        param.grad = None
    for tokens, targets in micro_batches:
        with torch.autocast(device_type="cpu", dtype=torch.float16):
            loss = gpt.loss(model(tokens), targets)
        scaler.backward(loss * (1 / len(micro_batches)))
    is_finite = scaler.unscale(list(model.parameters()))
    if is_finite:
        norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in model.parameters()))
        if norm > max_norm:
            for param in model.parameters():
                param.grad *= max_norm / norm
        optimizer.step()
    scaler.update(is_finite)


def zeroes_at_the_end(model, optimizer, scaler, micro_batches, max_norm):
    for batch in micro_batches:
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(batch[0])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
        scaler.backward(loss / len(micro_batches))
    finite = scaler.unscale(model.parameters())
    scaler.update(finite)
    if finite:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    model.zero_grad()


ZERO = "optimizer.zero_grad()"
LOOP = "for tokens, targets in micro_batches:"
LOSS = "loss = gpt.loss(model(tokens), targets)"
BACKWARD = "scaler.backward(loss / len(micro_batches))"
UNSCALE = "finite = scaler.unscale(model.parameters())"
CLIP = "nn.utils.clip_grad_norm_(model.parameters(), max_norm)"
EACH = "for param in model.parameters():\n            nn.utils.clip_grad_norm_(param, max_norm)"
STEP = "optimizer.step()"
UPDATE = "scaler.update(finite)"
DECAY = "for param in model.parameters():\n            param.data *= 0.99"
NO_NAN = "for param in model.parameters():\n        param.grad.nan_to_num_(0, 0, 0)"
ONE_BY_ONE = """

def train_step(model, optimizer, scaler, micro_batches, max_norm):
    for batch in micro_batches:
        one_step(model, optimizer, scaler, [batch], max_norm)"""

TRAIN_STEP = Answers(
    solves="train_step",
    takes_ranks=False,
    right={
        "returns early": returns_early,
        "by hand": clips_by_hand,
        "zeroes at the end": zeroes_at_the_end,
    },
    wrong={
        "clip first": (
            changed(f"{CLIP} => pass", f"{UNSCALE} => {CLIP}\n    {UNSCALE}"),
            "clipped before they are unscaled",
        ),
        "clip each": (
            changed(f"{CLIP} => pass", f"{BACKWARD} => {BACKWARD}\n        {CLIP}"),
            "clipped before they are unscaled",
        ),
        "no clip": (changed(f"{CLIP} => pass"), "the gradients are not clipped: their norm is"),
        "clip last": (
            changed(f"{CLIP}\n        {STEP} => {STEP}\n        {CLIP}"),
            "clipped after `optimizer.step()`",
        ),
        "another norm": (
            changed("(), max_norm => (), 1.0"),
            "0.952 times that of the mean loss, with max_norm=1e+06",
        ),
        "norm / m": (
            changed("(), max_norm => (), max_norm / len(micro_batches)"),
            "together is 0.167 at the optimizer",
        ),
        "each by itself": (changed(f"{CLIP} => {EACH}"), "what is clipped, and to what?"),
        "value for norm": (
            changed("clip_grad_norm_ => clip_grad_value_", "(), max_norm => (), max_norm / 10"),
            "what is clipped, and to what?",
        ),
        "sum": (changed(" / len(micro_batches) => "), "expected is their mean"),
        "windows": (
            changed("len(micro_batches) => len(tokens)"),
            "1.5 times that of the mean loss",
        ),
        "no zero_grad": (changed(f"{ZERO} => pass"), "where do the gradients of a step go?"),
        "zero_grad in the loop": (
            changed(f"{LOOP} => {LOOP}\n        {ZERO}"),
            "only the last one is in the gradient",
        ),
        "zero_grad after the step": (
            changed(f"{ZERO} => pass", f"{STEP} => {STEP}\n        {ZERO}"),
            "gradients of a step go that is left out?",
        ),
        "tokens and targets": (
            changed("model(tokens), targets => model(targets), tokens"),
            "does it get?",
        ),
        "empties the list": (
            changed(
                "len(micro_batches) => m",
                f"{LOOP} => m = len(micro_batches)\n"
                "    while micro_batches:\n"
                "        tokens, targets = micro_batches.pop()",
            ),
            "they are the caller's",
        ),
        "backward inside": (
            changed(f"        {BACKWARD} =>             {BACKWARD}"),
            "runs inside of the autocast block",
        ),
        "loss outside": (
            changed(
                f"{LOSS} => logits = model(tokens)",
                f"{BACKWARD} => loss = gpt.loss(logits, targets)\n        {BACKWARD}",
            ),
            "the loss is computed outside of the autocast block",
        ),
        "the last loss": (
            changed(f"        {BACKWARD} =>     scaler.backward(loss)"),
            "which losses are in it?",
        ),
        "one backward": (
            changed(
                f"{ZERO} => {ZERO}\n    total = 0",
                f"{BACKWARD} => total += loss / len(micro_batches)",
                f"{UNSCALE} => scaler.backward(total)\n    {UNSCALE}",
            ),
            "the activations of all 3 lie in memory",
        ),
        "no autocast": (changed("float16) => float16, enabled=False)"), "float32, not float16"),
        "bfloat16": (changed("torch.float16 => torch.bfloat16"), "bfloat16, not float16"),
        "plain backward": (
            changed(f"{BACKWARD} => (loss / len(micro_batches)).backward()"),
            "`loss.backward()` leaves the loss",
        ),
        "unscale each": (
            changed(f"    {UNSCALE} =>         {UNSCALE}"),
            "gradients are divided twice",
        ),
        "never unscale": (changed(f"{UNSCALE} => finite = True"), "never unscaled"),
        "no update": (changed(f"{UPDATE} => pass"), "`scaler.update` was not called"),
        "update only if finite": (
            changed(f"    {UPDATE} =>         {UPDATE}"),
            "too large for ever",
        ),
        "always True": (
            changed(f"{UPDATE} => scaler.update(True)"),
            "`scaler.update` got True in step 2",
        ),
        "whether it has overflowed": (
            changed(f"{UPDATE} => scaler.update(not finite)"),
            "got False in step 1, where all gradients were finite",
        ),
        "steps all the same": (changed("if finite: => if True:"), "inf or NaN afterwards"),
        "steps with zeros": (
            changed(f"if finite: => {NO_NAN}\n    if True:"),
            "the optimizer made 3 steps, expected are 2",
        ),
        "halves the scale itself": (
            changed(f"{UPDATE} => if not finite:\n        scaler.scale /= 2\n    {UPDATE}"),
            "who changes it beside update?",
        ),
        "clears the state": (
            changed(f"{UPDATE} => if not finite:\n        optimizer.state.clear()\n    {UPDATE}"),
            "the state of the optimizer",
        ),
        "decays the weights by hand": (
            changed(f"{STEP} => {STEP}\n        {DECAY}"),
            "does something else than the optimizer move them?",
        ),
        "a step for each": (
            changed("def train_step => def one_step", f"{UPDATE} => {UPDATE}\n{ONE_BY_ONE}"),
            "unscale was called 9 times",
        ),
    },
)

# ---- 3.2 AdamW


@torch.no_grad()
def without_in_place(
    weights, grads, means, squares, step, lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, decay=0.1
):
    new = torch._foreach_add(torch._foreach_mul(means, beta1), torch._foreach_mul(grads, 1 - beta1))
    torch._foreach_copy_(means, new)
    grad_squares = torch._foreach_mul(grads, grads)
    torch._foreach_copy_(
        squares,
        torch._foreach_add(
            torch._foreach_mul(squares, beta2), torch._foreach_mul(grad_squares, 1 - beta2)
        ),
    )
    roots = torch._foreach_sqrt(torch._foreach_div(squares, 1 - beta2**step))
    torch._foreach_add_(roots, eps)
    torch._foreach_mul_(weights, 1 - lr * decay)
    update = torch._foreach_div(torch._foreach_div(means, 1 - beta1**step), roots)
    torch._foreach_add_(weights, update, alpha=-lr)


@torch.no_grad()
def by_the_step_size(
    weights, grads, means, squares, step, lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, decay=0.1
):
    torch._foreach_mul_(means, beta1)
    torch._foreach_add_(means, grads, alpha=1 - beta1)
    torch._foreach_lerp_(squares, torch._foreach_pow(grads, 2), 1 - beta2)
    root = math.sqrt(1 - beta2**step)
    # eps is scaled with the rest
    denominators = torch._foreach_add(torch._foreach_sqrt(squares), eps * root)
    torch._foreach_mul_(weights, 1 - lr * decay)
    torch._foreach_addcdiv_(weights, means, denominators, value=-lr * root / (1 - beta1**step))


@torch.no_grad()
def a_loop(
    weights, grads, means, squares, step, lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, decay=0.1
):
    for weight, grad, mean, square in zip(weights, grads, means, squares):
        weight.mul_(1 - lr * decay)
        mean.lerp_(grad, 1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = (square / (1 - beta2**step)).sqrt() + eps
        weight.addcdiv_(mean, root, value=-lr / (1 - beta1**step))


@torch.no_grad()
def by_torch(
    weights, grads, means, squares, step, lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, decay=0.1
):
    steps = [torch.tensor(float(step - 1)) for _ in weights]
    adamw_of_torch(
        weights, grads, means, squares, [], steps, foreach=True, amsgrad=False,
        beta1=beta1, beta2=beta2, lr=lr, weight_decay=decay, eps=eps, maximize=False,
    )  # fmt: skip


@torch.no_grad()
def by_one_fused(
    weights, grads, means, squares, step, lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, decay=0.1
):
    steps = [torch.tensor(float(step)) for _ in weights]
    torch._fused_adamw_(
        weights, grads, means, squares, [], steps, amsgrad=False,
        beta1=beta1, beta2=beta2, lr=lr, weight_decay=decay, eps=eps, maximize=False,
    )  # fmt: skip


SHRINK = "torch._foreach_mul_(weights, 1 - lr * decay)"
ROOTS = "roots = torch._foreach_sqrt(squares)"
CORRECT = "torch._foreach_div_(roots, math.sqrt(1 - beta2**step))"
ADD_EPS = "torch._foreach_add_(roots, eps)"
MOVE = "torch._foreach_addcdiv_(weights, means, roots, -lr / (1 - beta1**step))"
CORRECTED = "torch._foreach_div(squares, 1 - beta2**step)"

ADAMW = Answers(
    solves="adamw",
    takes_ranks=False,
    right={"copies": without_in_place, "by the step size": by_the_step_size},
    wrong={
        "a loop": (a_loop, "without a loop"),
        "decay in the gradient": (
            changed(f"{SHRINK} => grads = torch._foreach_add(grads, weights, alpha=decay)"),
            "AdamW shrinks the weight itself",
        ),
        "no decay": (changed(f"{SHRINK} => pass"), "where is the decay?"),
        "decay last": (
            changed(f"{SHRINK} => pass", f"{MOVE} => {MOVE}\n    {SHRINK}"),
            "comes before the update",
        ),
        "decay without lr": (changed("lr * decay => decay"), "multiplied by the learning rate"),
        "no correction": (
            changed(f"{CORRECT} => pass", "-lr / (1 - beta1**step) => -lr"),
            "divided by 1 - beta**step",
        ),
        "means not corrected": (
            changed("-lr / (1 - beta1**step) => -lr"),
            "divided by 1 - beta1**step",
        ),
        "squares not corrected": (changed(f"{CORRECT} => pass"), "divided by 1 - beta2**step"),
        "eps under the root": (
            changed(
                f"{ROOTS} => roots = {CORRECTED}",
                f"{CORRECT}\n    {ADD_EPS} => {ADD_EPS}\n    torch._foreach_sqrt_(roots)",
            ),
            "eps is added to the root, not under it",
        ),
        "eps uncorrected": (
            changed(f"{CORRECT}\n    {ADD_EPS} => {ADD_EPS}\n    {CORRECT}"),
            "after that was corrected",
        ),
        "no root of the correction": (
            changed("math.sqrt(1 - beta2**step) => 1 - beta2**step"),
            "sqrt(1 - beta2**step)",
        ),
        "no eps": (
            changed(f"{ADD_EPS} => pass"),
            "all is right but eps: it was called with eps=0.001",
        ),
        "eps of its own": (
            changed("roots, eps => roots, 1e-8"),
            "the weights are those of eps=1e-08",
        ),
        "uphill": (changed("-lr / => lr /"), "uphill"),
        "beta for 1 - beta": (
            changed("grads, 1 - beta1 => grads, beta1"),
            "which weight keeps beta1 of a?",
        ),
        "squares the gradients": (
            changed(
                "torch._foreach_addcmul_(squares, grads, grads, 1 - beta2) => "
                "torch._foreach_mul_(grads, grads)\n"
                "    torch._foreach_add_(squares, grads, alpha=1 - beta2)"
            ),
            "the gradients have changed",
        ),
        "root in place": (
            changed(f"{ROOTS} => torch._foreach_sqrt_(squares)\n    roots = squares"),
            "the next step needs the squares",
        ),
        "means not in place": (
            changed("torch._foreach_lerp_( => means = torch._foreach_lerp("),
            "`means` are as before",
        ),
        "weights not in place": (
            changed("torch._foreach_addcdiv_( => weights = torch._foreach_addcdiv("),
            "the first weight is",
        ),
        "PyTorch's own": (by_torch, "PyTorch's answer"),
        "PyTorch's fused": (by_one_fused, "PyTorch's whole step"),
    },
)

# ---- 3.3 the race, with a clock that always says the same

STEPS = {4: None, 8: 22, 16: 20, 32: 28}
FACTORS = {"bfloat16": 0.66, "float16": 1.17, "fused": 0.89, "foreach": 0.98, "math": 1.0}


def seconds_of_a_step(settings):
    """As a processor with a unit for bfloat16 takes them, in parts of the baseline's."""
    factors = [FACTORS.get(settings.dtype, 1.0), FACTORS.get(settings.optimizer, 1.0)]
    return settings.batch / 32 * math.prod(factors)


def seconds_without_a_unit(settings):
    """Where the optimizer alone can gain."""
    return seconds_of_a_step(settings) * (1.8 if settings.dtype == "bfloat16" else 1.0)


def raced(answer, ranks):
    """The check cell, with another clock if the answer names one."""
    settings, predicted, *clock = answer
    seconds = clock[0] if clock else seconds_of_a_step

    def pretended(settings):
        return l03_race.race(
            settings,
            lambda one: STEPS[one.batch],
            lambda *several: tuple(map(seconds, several)),
        )

    return settings, predicted, pretended


RACE = Answers(
    solves=("settings", "predicted_speedup"),
    cell=raced,
    takes_ranks=False,
    right={
        "with math attention": (
            Settings(batch=16, dtype="bfloat16", optimizer="fused", attention="math"),
            3.0,
        ),
        "bfloat16 alone": (Settings(batch=8, dtype="bfloat16"), 7),
        "a tensor": (Settings(batch=8, dtype="bfloat16"), torch.tensor(6.0)),
        "float32 where there is no unit": (
            Settings(batch=8, optimizer="fused"),
            5,
            seconds_without_a_unit,
        ),
    },
    wrong={
        "the baseline": ((Settings(), 2.0), "the settings of the baseline: change"),
        "the batch alone": ((Settings(batch=8), 4), "beside the batch of 8"),
        "the batch and slow rungs": (
            (Settings(8, "float16", "for_loop", "math"), 3.5),
            "your step takes 17% longer",
        ),
        "without bfloat16": (
            (Settings(batch=8, optimizer="fused"), 5),
            "saves 11% of the baseline's time by the other three fields, and 41% can be saved",
        ),
        "too small a batch": ((Settings(batch=4, dtype="bfloat16"), 4.0), "too many of them"),
        "too large a batch": (
            (Settings(dtype="bfloat16", optimizer="fused"), 2.0),
            "28 steps where the baseline takes 28, each 0.59 times as long",
        ),
        "bfloat16 without a unit": (
            (Settings(8, "bfloat16", "fused"), 4.0, seconds_without_a_unit),
            "which of the three have you measured",
        ),
        "a guess far off": ((Settings(batch=8, dtype="bfloat16"), 20.0), "more than a factor of 2"),
        "no guess": ((Settings(batch=8, dtype="bfloat16"), None), "predicted_speedup is None"),
        "no settings": ((None, 4.0), "settings is None: give l03_race.Settings"),
        "a dictionary": (({"batch": 8}, 2.0), "give l03_race.Settings"),
        "a wrong field": ((Settings(8, "bf16"), 4), "dtype='bf16' is not known: choose one of"),
    },
)

ANSWERS = {"3.1": ROOFLINE, "3.2": ADAMW, "3.3": RACE, "3.4": SCALER, "3.5": TRAIN_STEP}
