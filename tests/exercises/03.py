"""Answers to the exercises of lesson 03, one device, fast."""

import functools
import math

import torch
from answers import Answers
from torch import nn
from torch.optim.adamw import adamw as adamw_of_torch

from labcode.models import gpt
from labcode.teach.labs import l03_by_hand, l03_race
from labcode.teach.labs.l03_race import Settings

# ---- 3.1 the spacing


def by_floor(x, fraction_bits):
    return 2.0 ** (math.floor(math.log2(abs(x))) - fraction_bits)


def by_frexp(x, fraction_bits):
    _, exponent = math.frexp(x)
    return math.ldexp(1.0, exponent - 1 - fraction_bits)


def by_torch(x, fraction_bits):
    exponent = torch.tensor(abs(x), dtype=torch.float64).log2().floor()
    return (2**exponent / 2**fraction_bits).item()


def by_a_loop(x, fraction_bits):
    power = 1.0
    while power * 2 <= abs(x):
        power *= 2
    while power > abs(x):
        power /= 2
    return power / 2**fraction_bits


def the_same_everywhere(x, fraction_bits):
    return 2.0**-fraction_bits


def times_x(x, fraction_bits):
    return abs(x) * 2.0**-fraction_bits


def without_abs(x, fraction_bits):
    return 2.0 ** (math.floor(math.log2(x)) - fraction_bits)


def half_of_it(x, fraction_bits):
    return by_floor(x, fraction_bits + 1)


def rounded_up(x, fraction_bits):
    return 2.0 ** (math.ceil(math.log2(abs(x))) - fraction_bits)


def cut_to_an_int(x, fraction_bits):
    return 2.0 ** (int(math.log2(abs(x))) - fraction_bits)


def without_return(x, fraction_bits):
    2.0 ** (math.floor(math.log2(abs(x))) - fraction_bits)


def of_ten(x, fraction_bits):
    return 10.0 ** (math.floor(math.log10(abs(x))) - fraction_bits)


def without_an_end(x, fraction_bits):
    power = 1.0
    while power != abs(x):
        power = power / 2 if power > abs(x) else power * 2
    return power / 2**fraction_bits


SPACING = Answers(
    solves="spacing",
    takes_ranks=False,
    real=True,
    right={"floor": by_floor, "frexp": by_frexp, "torch": by_torch, "a loop": by_a_loop},
    wrong={
        "the same everywhere": (the_same_everywhere, "the spacing from 1 to 2; 2 lies above"),
        "times x": (times_x, "does not grow with each x"),
        "without abs": (without_abs, "math domain error"),
        "half of it": (half_of_it, "twice as much is right"),
        "rounded up": (rounded_up, "is your power of two the one below |x|?"),
        "cut to an int": (cut_to_an_int, "from 1 to 2; 0.75 lies below"),
        "without return": (without_return, "is there a `return`?"),
        "without an end": (without_an_end, "does the loop also end for x = 1.5?"),
        "of ten": (of_ten, "the next bfloat16 after"),
        "labcode's own": (l03_by_hand.spacing, "labcode's own answer"),
    },
)

# ---- 3.2 the scaler


class Base:
    def __init__(self, scale=2.0**16, growth_interval=2000):
        self.scale = scale
        self.growth_interval = growth_interval
        self.good_steps = 0


class AsInTheLesson(Base):
    def backward(self, loss):
        (loss * self.scale).backward()

    def unscale(self, params):
        finite = True
        for param in params:
            if param.grad is None:
                continue
            param.grad /= self.scale
            if not param.grad.isfinite().all():
                finite = False
        return finite

    def update(self, finite):
        if finite:
            self.good_steps += 1
            if self.good_steps == self.growth_interval:
                self.scale *= 2
                self.good_steps = 0
        else:
            self.scale /= 2
            self.good_steps = 0


class WithForeach(AsInTheLesson):
    def backward(self, loss):
        loss.backward(gradient=torch.tensor(self.scale))

    def unscale(self, params):
        grads = [param.grad for param in params if param.grad is not None]
        torch._foreach_mul_(grads, 1 / self.scale)
        return bool(torch.stack([grad.isfinite().all() for grad in grads]).all())


class ByTheNorm(AsInTheLesson):
    """The 2-norm of finite gradients is finite, in float64."""

    def unscale(self, params):
        total = 0.0
        for param in params:
            if param.grad is not None:
                param.grad = param.grad / self.scale
                total += param.grad.double().norm().item()
        return math.isfinite(total)


class CountsDown(Base):
    def __init__(self, scale=2.0**16, growth_interval=2000):
        super().__init__(scale, growth_interval)
        self.left = growth_interval

    backward = AsInTheLesson.backward
    unscale = AsInTheLesson.unscale

    def update(self, finite):
        self.left = self.left - 1 if finite else self.growth_interval
        if not finite:
            self.scale *= 0.5
        elif self.left == 0:
            self.scale = 2 * self.scale
            self.left = self.growth_interval


class DoesNotScale(AsInTheLesson):
    def backward(self, loss):
        loss.backward()


class ChangesTheLoss(AsInTheLesson):
    def backward(self, loss):
        loss.backward(gradient=torch.tensor(self.scale))
        with torch.no_grad():
            loss *= self.scale


class NoBackward(AsInTheLesson):
    def backward(self, loss):
        return loss * self.scale


class NotWrittenBack(AsInTheLesson):
    def unscale(self, params):
        finite = True
        for param in params:
            if param.grad is not None:
                grad = param.grad / self.scale
                finite = finite and bool(grad.isfinite().all())
        return finite


class Multiplies(AsInTheLesson):
    def unscale(self, params):
        for param in params:
            if param.grad is not None:
                param.grad *= self.scale
        return True


class OnlyInf(AsInTheLesson):
    def unscale(self, params):
        finite = True
        for param in params:
            if param.grad is not None:
                param.grad /= self.scale
                finite = finite and not param.grad.isinf().any()
        return finite


class OnlyNan(AsInTheLesson):
    def unscale(self, params):
        finite = True
        for param in params:
            if param.grad is not None:
                param.grad /= self.scale
                finite = finite and not param.grad.isnan().any()
        return finite


class OnlyTheLast(AsInTheLesson):
    def unscale(self, params):
        finite = True
        for param in params:
            if param.grad is not None:
                param.grad /= self.scale
                finite = bool(param.grad.isfinite().all())
        return finite


class AnyForAll(AsInTheLesson):
    def unscale(self, params):
        finite = True
        for param in params:
            if param.grad is not None:
                param.grad /= self.scale
                finite = finite and bool(param.grad.isfinite().any())
        return finite


class ReturnsEarly(AsInTheLesson):
    def unscale(self, params):
        for param in params:
            if param.grad is not None:
                param.grad /= self.scale
                return bool(param.grad.isfinite().all())
        return None


class ForgetsNone(AsInTheLesson):
    def unscale(self, params):
        finite = True
        for param in params:
            param.grad /= self.scale
            finite = finite and bool(param.grad.isfinite().all())
        return finite


class SaysNothing(AsInTheLesson):
    def unscale(self, params):
        super().unscale(params)


class GrowsAtOnce(AsInTheLesson):
    def update(self, finite):
        self.scale = self.scale * 2 if finite else self.scale / 2


class GrowsForEver(AsInTheLesson):
    def update(self, finite):
        if not finite:
            self.scale /= 2
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps >= self.growth_interval:
            self.scale *= 2


class NotInARow(AsInTheLesson):
    def update(self, finite):
        if not finite:
            self.scale /= 2
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.scale *= 2
            self.good_steps = 0


class NeverBack(AsInTheLesson):
    def update(self, finite):
        if finite:
            super().update(finite)
        self.good_steps *= finite


class UnscaleUpdates(AsInTheLesson):
    def unscale(self, params):
        finite = super().unscale(params)
        self.update(finite)
        return finite


class UnscaleHalves(AsInTheLesson):
    def unscale(self, params):
        finite = super().unscale(params)
        if not finite:
            self.scale /= 2
        return finite


class UnscaleStartsAnew(AsInTheLesson):
    def unscale(self, params):
        self.good_steps = 0
        return super().unscale(params)


class WholeNumbers(AsInTheLesson):
    def update(self, finite):
        super().update(finite)
        self.scale = float(int(self.scale))


SCALER = Answers(
    solves="Scaler",
    takes_ranks=False,
    real=True,
    right={
        "as in the lesson": AsInTheLesson,
        "foreach": WithForeach,
        "by the norm": ByTheNorm,
        "counts down": CountsDown,
    },
    wrong={
        "does not scale": (DoesNotScale, "multiplied by the scale before"),
        "changes the loss": (ChangesTheLoss, "changed the loss itself"),
        "no backward": (NoBackward, "there is no gradient"),
        "not written back": (NotWrittenBack, "is the result written into `.grad`?"),
        "multiplies": (Multiplies, "divide by the scale, do not multiply"),
        "only inf": (OnlyInf, "True with NaN in the first gradient"),
        "only NaN": (OnlyNan, "True with inf in the first gradient"),
        "only the last": (OnlyTheLast, "True with inf in the first gradient"),
        "any for all": (AnyForAll, "True with inf in the first gradient"),
        "returns early": (ReturnsEarly, "still multiplied by the scale"),
        "forgets None": (ForgetsNone, "NoneType"),
        "says nothing": (SaysNothing, "is there a `return`?"),
        "grows at once": (GrowsAtOnce, "16 after one good step"),
        "grows for ever": (GrowsForEver, "it counts from the start again"),
        "not in a row": (NotInARow, "had to begin the row anew"),
        "never back": (NeverBack, "16 after an overflow"),
        "unscale updates": (UnscaleUpdates, "unscale changed the scale from 2 to 1"),
        "unscale halves": (UnscaleHalves, "unscale changed the scale from 2 to 1"),
        "unscale starts anew": (UnscaleStartsAnew, "Does unscale change what update counts"),
        "whole numbers": (WholeNumbers, "is a scale below 1 rounded"),
        "labcode's own": (l03_by_hand.Scaler, "labcode's own answer"),
    },
)

# ---- 3.3 the step


def a_step(model, optimizer, scaler, micro_batches, max_norm, *, wrong=""):
    m = len(micro_batches)
    if wrong not in ("no zero_grad", "zero_grad after the step"):
        optimizer.zero_grad()
    for tokens, targets in micro_batches:
        if wrong == "zero_grad in the loop":
            optimizer.zero_grad()
        if wrong == "tokens and targets":
            tokens, targets = targets, tokens
        dtype = torch.bfloat16 if wrong == "bfloat16" else torch.float16
        with torch.autocast("cpu", dtype=dtype, enabled=wrong != "no autocast"):
            loss = gpt.loss(model(tokens), targets)
            if wrong == "backward inside":
                scaler.backward(loss / m)
        if wrong == "windows":
            loss = loss / len(tokens)
        elif wrong != "sum":
            loss = loss / m
        if wrong == "plain backward":
            loss.backward()
        elif wrong != "backward inside":
            scaler.backward(loss)
        if wrong == "unscale each":
            finite = scaler.unscale(model.parameters())
        if wrong == "clip each":
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        if wrong == "zeroes its data":
            micro_batches[0][0].zero_()
    if wrong == "clip first":
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    if wrong != "unscale each" and wrong != "never unscale":
        finite = scaler.unscale(model.parameters())
    if wrong == "never unscale":
        finite = True
    if wrong == "each by itself":
        for param in model.parameters():
            nn.utils.clip_grad_norm_([param], max_norm)
    elif wrong not in ("no clip", "clip first", "clip last", "clip each"):
        norm = {"another norm": 1.0, "norm / m": max_norm / m}.get(wrong, max_norm)
        nn.utils.clip_grad_norm_(model.parameters(), norm)
    if finite or wrong == "steps all the same":
        optimizer.step()
        if wrong == "zero_grad after the step":
            optimizer.zero_grad()
    elif wrong == "halves the weights":
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.5)
    elif wrong == "clears the state":
        optimizer.state.clear()
    if wrong == "clip last":
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    if wrong == "update only if finite":
        if finite:
            scaler.update(finite)
    elif wrong == "not finite":
        scaler.update(not finite)
    elif wrong in ("always True", "always False"):
        scaler.update(wrong == "always True")
    elif wrong != "no update":
        scaler.update(finite)


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


def one_backward(model, optimizer, scaler, micro_batches, max_norm):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        losses = [gpt.loss(model(tokens), targets) for tokens, targets in micro_batches]
    scaler.backward(sum(losses) / len(losses))
    finite = scaler.unscale(model.parameters())
    if finite:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    scaler.update(finite)


def the_last_loss(model, optimizer, scaler, micro_batches, max_norm):
    optimizer.zero_grad()
    for tokens, targets in micro_batches:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = gpt.loss(model(tokens), targets)
    scaler.backward(loss)
    finite = scaler.unscale(model.parameters())
    if finite:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    scaler.update(finite)


def loss_outside(model, optimizer, scaler, micro_batches, max_norm):
    optimizer.zero_grad()
    for tokens, targets in micro_batches:
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(tokens)
        scaler.backward(gpt.loss(logits, targets) / len(micro_batches))
    finite = scaler.unscale(model.parameters())
    if finite:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    scaler.update(finite)


def steps_each(model, optimizer, scaler, micro_batches, max_norm):
    for batch in micro_batches:
        a_step(model, optimizer, scaler, [batch], max_norm)


def wrong(what):
    return functools.partial(a_step, wrong=what)


STEP = Answers(
    solves="train_step",
    takes_ranks=False,
    real=True,
    right={
        "as in the lesson": a_step,
        "returns early": returns_early,
        "by hand": clips_by_hand,
        "zeroes at the end": zeroes_at_the_end,
    },
    wrong={
        "clip first": (wrong("clip first"), "clipped before they are unscaled"),
        "no clip": (wrong("no clip"), "the gradients are not clipped: their norm is"),
        "clip last": (wrong("clip last"), "clipped after `optimizer.step()`"),
        "clip each": (wrong("clip each"), "clipped before they are unscaled"),
        "another norm": (
            wrong("another norm"),
            "0.952 times that of the mean loss, with max_norm=1e+06",
        ),
        "norm / m": (wrong("norm / m"), "together is 0.167 at the optimizer"),
        "each by itself": (wrong("each by itself"), "what is clipped, and to what?"),
        "sum": (wrong("sum"), "their mean was due"),
        "no zero_grad": (wrong("no zero_grad"), "where do the gradients of a step go?"),
        "zero_grad in the loop": (
            wrong("zero_grad in the loop"),
            "only the last one is in the gradient",
        ),
        "zero_grad after the step": (
            wrong("zero_grad after the step"),
            "gradients of a step go that is left out?",
        ),
        "windows": (wrong("windows"), "1.5 times that of the mean loss"),
        "tokens and targets": (wrong("tokens and targets"), "does it get?"),
        "zeroes its data": (wrong("zeroes its data"), "they are the caller's"),
        "backward inside": (wrong("backward inside"), "runs inside of the autocast block"),
        "loss outside": (loss_outside, "the loss is computed outside of the autocast block"),
        "the last loss": (the_last_loss, "which losses are in it?"),
        "one backward": (one_backward, "the activations of all 3 lie in memory"),
        "no autocast": (wrong("no autocast"), "float32, not float16"),
        "bfloat16": (wrong("bfloat16"), "bfloat16, not float16"),
        "plain backward": (wrong("plain backward"), "`loss.backward()` leaves the loss"),
        "unscale each": (wrong("unscale each"), "gradients are divided twice"),
        "never unscale": (wrong("never unscale"), "never unscaled"),
        "no update": (wrong("no update"), "`scaler.update` was not called"),
        "update only if finite": (wrong("update only if finite"), "too large for ever"),
        "always True": (wrong("always True"), "`scaler.update` got True in step 2"),
        "always False": (wrong("always False"), "`scaler.update` got False in step 1"),
        "not finite": (wrong("not finite"), "got False in step 1, where all gradients were finite"),
        "steps all the same": (wrong("steps all the same"), "inf or NaN afterwards"),
        "halves the weights": (wrong("halves the weights"), "the weights have changed in it"),
        "clears the state": (wrong("clears the state"), "the state of the optimizer"),
        "a step for each": (steps_each, "unscale was called 9 times"),
        "labcode's own": (l03_by_hand.train_step, "labcode's own answer"),
    },
)

# ---- 3.4 AdamW


@torch.no_grad()
def with_foreach(
    weights, grads, means, squares, step,
    lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, decay=0.1, *, wrong="",
):  # fmt: skip
    eps = {"no eps": 0.0, "eps of its own": 1e-6}.get(wrong, eps)
    if wrong == "decay in the gradient":
        grads = torch._foreach_add(grads, weights, alpha=decay)
    elif wrong not in ("no decay", "decay last"):
        torch._foreach_mul_(weights, 1 - (decay if wrong == "decay without lr" else lr * decay))
    torch._foreach_lerp_(means, grads, beta1 if wrong == "beta" else 1 - beta1)
    torch._foreach_mul_(squares, beta2)
    if wrong == "squares the gradients":
        torch._foreach_mul_(grads, grads)
        torch._foreach_add_(squares, grads, alpha=1 - beta2)
    else:
        torch._foreach_addcmul_(squares, grads, grads, value=1 - beta2)
    c1, c2 = 1 - beta1**step, 1 - beta2**step
    if wrong == "no correction":
        c1, c2 = 1, 1
    if wrong == "root in place":
        torch._foreach_sqrt_(squares)
        roots = squares
    else:
        roots = torch._foreach_sqrt(squares)
    if wrong == "eps uncorrected":
        torch._foreach_add_(roots, eps)
        torch._foreach_div_(roots, math.sqrt(c2))
    else:
        torch._foreach_div_(roots, c2 if wrong == "no root" else math.sqrt(c2))
        torch._foreach_add_(roots, eps)
    sign = 1 if wrong == "uphill" else -1
    if wrong == "not in place":
        weights = torch._foreach_addcdiv(weights, means, roots, sign * lr / c1)
    else:
        torch._foreach_addcdiv_(weights, means, roots, sign * lr / c1)
    if wrong == "decay last":
        torch._foreach_mul_(weights, 1 - lr * decay)


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


def bad(what):
    return functools.partial(with_foreach, wrong=what)


def by_torch(
    weights, grads, means, squares, step, lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, decay=0.1
):
    adamw_of_torch(
        weights,
        grads,
        means,
        squares,
        [],
        [torch.tensor(float(step - 1)) for _ in weights],
        foreach=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=lr,
        weight_decay=decay,
        eps=eps,
        maximize=False,
    )


def by_one_fused(
    weights, grads, means, squares, step, lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, decay=0.1
):
    torch._fused_adamw_(
        weights,
        grads,
        means,
        squares,
        [],
        [torch.tensor(float(step)) for _ in weights],
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )


ADAMW = Answers(
    solves="adamw",
    takes_ranks=False,
    real=True,
    right={
        "as in the lesson": with_foreach,
        "copies": without_in_place,
        "by the step size": by_the_step_size,
    },
    wrong={
        "a loop": (a_loop, "without a loop"),
        "decay in the gradient": (bad("decay in the gradient"), "AdamW shrinks the weight itself"),
        "no decay": (bad("no decay"), "where is the decay?"),
        "decay last": (bad("decay last"), "comes before the update"),
        "decay without lr": (bad("decay without lr"), "multiplied by the learning rate"),
        "no correction": (bad("no correction"), "divided by 1 - beta**step"),
        "eps uncorrected": (bad("eps uncorrected"), "after that was corrected"),
        "no root of the correction": (bad("no root"), "sqrt(1 - beta2**step)"),
        "no eps": (bad("no eps"), "all is right but eps: it was called with eps=0.001"),
        "eps of its own": (bad("eps of its own"), "the weights are those of eps=1e-06"),
        "uphill": (bad("uphill"), "uphill"),
        "beta for 1 - beta": (bad("beta"), "the first of `means` begins with"),
        "squares the gradients": (bad("squares the gradients"), "the gradients have changed"),
        "root in place": (bad("root in place"), "the first of `squares` begins with"),
        "not in place": (bad("not in place"), "the first weight is"),
        "labcode's own": (l03_by_hand.adamw, "labcode's own answer"),
        "PyTorch's own": (torch.no_grad()(by_torch), "PyTorch's answer"),
        "PyTorch's fused": (torch.no_grad()(by_one_fused), "PyTorch's whole step"),
    },
)

# ---- 3.5 the race, with a clock that always says the same

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
    solution=False,  # it trains, with a clock of its own
    takes_ranks=False,
    real=True,
    right={
        "all of it": (Settings(batch=8, dtype="bfloat16", optimizer="fused"), 5),
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
        "text": ((Settings(batch=8), "4"), "is a number"),
        "a wrong field": ((Settings(8, "bf16"), 4), "dtype='bf16' is not known: choose one of"),
    },
)

ANSWERS = {"3.1": SPACING, "3.2": SCALER, "3.3": STEP, "3.4": ADAMW, "3.5": RACE}
