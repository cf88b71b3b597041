"""Answers to the exercises of lesson 18, low precision."""

import math
from collections import deque
from functools import partial

import torch
import torch.distributed as dist
from answers import Answers, changed
from torch import nn

from course.labs import l18_gpt as lab
from labcode.models import gpt
from labcode.precision import formats, fp8

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2

# ---- 18.1 the spacing


def by_log(x, m, least):
    """The logarithm is rounded, so that its floor may be one too large."""
    size = max(abs(x), 2.0**least)
    power = 2.0 ** math.floor(math.log2(size))
    return (power / 2 if power > size else power) / 2**m


def by_counting(x, m, least):
    power = 2.0**least
    while power * 2 <= abs(x):
        power *= 2
    return power / 2**m


FREXP = "_, n = math.frexp(x)"

SPACING = Answers(
    solves="spacing",
    takes_ranks=False,
    right={"log2": by_log, "a loop": by_counting},
    wrong={
        "a rounded logarithm": (
            changed(f"{FREXP} => n = math.floor(math.log2(abs(x) or 1)) + 1"),
            "just below 256",
        ),
        "n for n - 1": (changed("n - 1 => n"), "the power of two above |x| or the one below"),
        "no subnormal numbers": (
            changed("max(exponent, smallest_exponent) => exponent"),
            "do not get closer any more",
        ),
        "the sign": (
            changed("frexp(x) => frexp(max(x, 2.0**smallest_exponent))"),
            "the sign of x",
        ),
        "rounded exponent": (
            changed(f"{FREXP} => n = round(math.log2(abs(x) or 1)) + 1"),
            "above |x| or the one below",
        ),
        "a bit too many": (changed("- fraction_bits => - fraction_bits - 1"), "how many steps"),
        "e4m3 always": (
            changed("smallest_exponent) - fraction_bits => -6) - 3"),
            "e5m2, x = 1: it returned 0.125",
        ),
        "zero": (changed(" if x != 0 else smallest_exponent => "), "zero is smaller"),
    },
)

# ---- 18.2 the loss scaler


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


SCALED_LOSS = "(loss * self.scale).backward()"
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
            changed(f"{SCALED_LOSS} => loss.backward()"),
            "multiplied by the scale before",
        ),
        "changes the loss": (
            changed(f"{SCALED_LOSS} => loss *= self.scale\n        loss.backward()"),
            "changed the loss itself",
        ),
        "no backward": (
            changed(f"{SCALED_LOSS} => return loss * self.scale"),
            "there is no gradient",
        ),
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

# ---- 18.3 a step in float16


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

# ---- 18.4 the cast


def of_the_fraction(x):
    """Round the fraction to 4 bits, and the small ones in steps of 2^-9."""
    f, n = torch.frexp(x)
    normal = torch.ldexp(torch.round(f * 16) / 16, n)
    small = torch.round(x * 512) / 512
    found = torch.where(x.abs() < 2**-6, small, normal)
    found = torch.where(found.abs() > 448, torch.copysign(torch.tensor(448.0), x), found)
    return torch.where(x.isnan(), x, found)


def by_adding(x):
    """Adding 1.5 * 2^23 spacings rounds to whole spacings, as float32 has 24 bits."""
    _, n = torch.frexp(x.clamp(-448, 448))
    big = torch.ldexp(torch.full_like(x, 1.5 * 2**23), (n - 1).clamp(min=-6) - 3)
    found = (x.clamp(-448, 448) + big) - big
    return torch.copysign(found.abs().clamp(max=448.0), x)


ROUND = "torch.round(x / spacing)"
SATURATE = "rounded.clamp(-448.0, 448.0)"


def by_log2(x):
    """In float64, so that it is right for all but infinities."""
    exponent = x.abs().double().log2().floor().clamp(min=-6).float()
    spacing = torch.exp2(exponent - 3)
    return (torch.round(x / spacing) * spacing).clamp(-448.0, 448.0)


CAST = Answers(
    solves="to_e4m3",
    takes_ranks=False,
    right={"rounds the fraction": of_the_fraction, "adds": by_adding},
    wrong={
        "cut off": (changed("torch.round => torch.trunc"), "cut off instead of rounded"),
        "ties upwards": (
            changed(f"{ROUND} => torch.sign(x) * torch.floor(x.abs() / spacing + 0.5)"),
            "the even one is expected",
        ),
        "no saturation": (changed(f"{SATURATE} => rounded"), "the largest number"),
        "no subnormal numbers": (changed(".clamp(min=-6) => "), "below 2^-6"),
        "an infinite spacing": (by_log2, "inf / inf is nan"),
        "n for n - 1": (changed("(n - 1) => n"), "Which spacing has your code"),
        "a bit too many": (changed("exponent - 3 => exponent - 4"), "is no number of e4m3"),
        "PyTorch's cast": (
            changed(f"{SATURATE} => x.to(E4M3).float()"),
            "use arithmetic alone",
        ),
        "8-bit dtype": (changed(f"{SATURATE} => x.to(E4M3)"), "held in float32"),
        "in place": (
            changed(f"{ROUND} * spacing => x.div_(spacing).round_().mul_(spacing)"),
            "has changed",
        ),
        "nan is zero": (changed(f"{SATURATE} => {SATURATE}.nan_to_num(0.0)"), "nan must stay nan"),
        "small numbers are set to zero": (
            changed(f"{SATURATE} => torch.where(x.abs() < 2**-10, 0.0, {SATURATE})"),
            "the sign of zero is lost",
        ),
        "flattened": (changed(f"{SATURATE} => {SATURATE}.flatten()"), "expected is [2, 3, 4]"),
        "labcode's own": (partial(formats.cast, to=formats.E4M3), "labcode's own answer"),
    },
)

# ---- 18.5 quantise


def with_if(x, dtype):
    top = torch.finfo(dtype).max
    wide = x.to(torch.float32)
    amax = max(wide.max(), -wide.min())
    scale = torch.tensor(1.0)
    if amax > 0:
        scale = top / amax
    return torch.clamp(wide * scale, min=-top, max=top).to(dtype), scale


def by_norm(x, dtype):
    largest = torch.finfo(dtype).max
    amax = torch.linalg.vector_norm(x.flatten().float(), ord=math.inf)
    scale = largest / amax
    scale = torch.nan_to_num(scale, posinf=1.0)
    q = (x.float() * scale).clamp(-largest, largest).to(dtype)
    return [q, scale]


SCALED = "(x.float() * scale)"
SCALE_OR_1 = "torch.where(amax > 0, largest / amax, torch.ones_like(amax))"

QUANTIZE = Answers(
    solves="quantize",
    takes_ranks=False,
    right={"if": with_if, "a norm": by_norm},
    wrong={
        "max without abs": (changed("x.abs().max() => x.max()"), "negative number"),
        "upside down": (changed("largest / amax => amax / largest"), "way back"),
        "not scaled": (changed(f"{SCALED} => x"), "multiplied by the scale"),
        "to one": (changed("largest / amax => 1 / amax"), "becomes 1"),
        "a division by zero": (
            changed(f"{SCALE_OR_1} => largest / amax"),
            "the scale is inf, expected is 1",
        ),
        "in the dtype of x": (
            changed("max().float() => max()", "dtype), scale => dtype), scale.float()"),
            "in a narrow dtype",
        ),
        "a scale in the dtype of x": (
            changed("max().float() => max()"),
            "the scale is torch.bfloat16, expected is float32",
        ),
        "e4m3 always": (changed("finfo(dtype) => finfo(E4M3)"), "of the other format"),
        "a scale for each row": (
            changed("x.abs().max() => x.abs().amax(-1, keepdim=True)"),
            "one number for the whole tensor",
        ),
        "a Python number": (
            changed("dtype), scale => dtype), scale.item()"),
            "the scale is a float",
        ),
        "dequantised at once": (
            changed(".to(dtype), => .to(dtype).float() / scale,"),
            "the first result is torch.float32",
        ),
        "in place": (changed(f"{SCALED} => x.mul_(scale)"), "has changed"),
        "the scale alone": (
            changed(f"return {SCALED}.to(dtype), => return"),
            "return two things",
        ),
        "any zero counts as zeros": (
            changed("amax > 0 => (x != 0).all()"),
            "a zero among other numbers",
        ),
        "the sum for the amax": (changed("amax > 0 => x.sum() != 0"), "sum is 0"),
        "the finished one": (
            changed(f"return {SCALED}.to(dtype), scale => return lab.quantize(x, dtype)"),
            "labcode's own answer",
        ),
    },
)

# ---- 18.6 delayed scaling


class WithDeque:
    def __init__(self, length, largest, margin=0):
        self.amaxes = deque(maxlen=length)
        self.top = largest * 2.0**-margin

    def scale(self):
        if not self.amaxes or max(self.amaxes) == 0:
            return 1
        return self.top / max(self.amaxes)

    def record(self, amax):
        if amax == amax and amax != math.inf:
            self.amaxes.append(amax)


class WithTensor:
    """A ring of numbers, as Transformer Engine has it."""

    def __init__(self, length, largest, margin=0):
        self.ring = torch.zeros(length, dtype=torch.float64)
        self.at = 0
        self.most = largest / 2**margin

    def scale(self):
        amax = self.ring.max().item()
        return self.most / amax if amax > 0 else 1.0

    def record(self, amax):
        if not math.isfinite(amax):
            return
        self.ring[self.at % len(self.ring)] = amax
        self.at += 1


AMAX = "max(self.history, default=0.0)"
ROOM = "2**self.margin"
NOT_RECORDED = "if not math.isfinite(amax):\n            return"
FORGETS = "self.history = self.history[-self.length:]"

DELAYED = Answers(
    solves="DelayedScaling",
    takes_ranks=False,
    right={"a deque": WithDeque, "a ring": WithTensor},
    wrong={
        "the newest": (
            changed(f"{AMAX} => self.history[-1] if self.history else 0.0"),
            "not the newest",
        ),
        "never forgets": (changed(f"{FORGETS} => pass"), "no longer count"),
        "bad steps count": (changed(f"{NOT_RECORDED} => pass"), "One bad step"),
        "nan counts": (changed("not math.isfinite => math.isinf"), "One bad step"),
        "no margin": (changed(f"{ROOM} * amax => amax"), "Where is the margin"),
        "a margin upwards": (
            changed(f"self.largest / ({ROOM} * amax) => self.largest * {ROOM} / amax"),
            "leave room",
        ),
        "1 + margin": (changed(f"{ROOM} => (1 + self.margin)"), "room for 4 times as much"),
        "zeros": (changed("if amax == 0 => if not self.history"), "division by 0"),
        "one too short": (changed("-self.length: => -self.length + 1:"), "too short"),
        "the inverse": (
            changed(f"self.largest / ({ROOM} * amax) => {ROOM} * amax / self.largest"),
            "way back",
        ),
        "small is nothing": (changed("amax == 0 => amax < 1e-3"), "tiny amaxes"),
        "scale forgets": (
            changed("if amax == 0 => self.history = self.history[1:]\n        if amax == 0"),
            "asked twice",
        ),
        "a bad step as zero": (
            changed(f"{NOT_RECORDED} => if not math.isfinite(amax):\n            amax = 0.0"),
            "takes no place in the history",
        ),
        "None at first": (changed("return 1.0 => return"), "returned None"),
        "one history for all": (
            changed(
                "margin=0) => margin=0, history=[])", "self.history = [] => self.history = history"
            ),
            "two objects share one history",
        ),
        "a loop without an end": (
            changed(f"{FORGETS} => while len(self.history) >= self.length: pass"),
            "does your loop end",
        ),
    },
)

# ---- 18.7 the linear layer


class ScalesAtTheEnd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        shape = x.shape
        q, s = lab.quantize(x.flatten(0, -2), E4M3)
        p, t = lab.quantize(weight, E4M3)
        ctx.save_for_backward(q, p)
        ctx.scales = (s.item(), t.item())
        ctx.x_dtype = x.dtype
        y = q.float() @ p.float().T / (s * t)
        return y.view(*shape[:-1], -1).to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        q, p = ctx.saved_tensors
        s, t = ctx.scales
        g, u = lab.quantize(dy.flatten(0, -2), E5M2)
        dx = g.float() @ p.float() / (u * t)
        dw = g.float().T @ q.float() / (u * s)
        return dx.view(*dy.shape[:-1], -1).to(ctx.x_dtype), dw


class AsBytes(torch.autograd.Function):
    """Keeps bytes, as what is sent over gloo must be bytes."""

    @staticmethod
    def forward(ctx, x, weight):
        q, s = lab.quantize(x, E4M3)
        p, t = lab.quantize(weight, E4M3)
        ctx.save_for_backward(q.view(torch.uint8), s, p.view(torch.uint8), t)
        return ((q.float() / s) @ (p.float() / t).mT).to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        q, s, p, t = ctx.saved_tensors
        x8 = q.view(E4M3).float() / s
        w8 = p.view(E4M3).float() / t
        g, u = lab.quantize(dy, E5M2)
        g = g.float() / u
        dw = torch.einsum("...o,...i->oi", g, x8)
        return (g @ w8).to(dy.dtype), dw


X8 = "(x8.float() / x_scale)"
W8 = "(w8.float() / w_scale)"
SAVE = "ctx.save_for_backward(x8, x_scale, w8, w_scale)"
SAVED = "x8, x_scale, w8, w_scale = ctx.saved_tensors"
DX = f"dx = gradient @ {W8}"
DW = f"dw = gradient.T @ {X8}"
DY8_AGAIN = """dy8, dy_scale = lab.quantize(rows.T, E5M2)
        dw = (dy8.float() / dy_scale) @"""
LATE_CAST = """x, weight = ctx.saved_tensors
        x8, x_scale = lab.quantize(x, E4M3)
        w8, w_scale = lab.quantize(weight, E4M3)"""

LINEAR = Answers(
    solves="Fp8Linear",
    takes_ranks=False,
    right={"scales at the end": ScalesAtTheEnd, "bytes": AsBytes},
    wrong={
        "no cast at all": (changed(f"{X8} @ {W8}.T => rows.float() @ weight.T"), "full precision"),
        "x is not quantised": (changed(f"y = {X8} => y = rows.float()"), "is x quantised"),
        "the weight is not quantised": (changed(f"{W8}.T => weight.T"), "is the weight quantised"),
        "forward in e5m2": (changed("E4M3 => E5M2"), "forward takes e4m3"),
        "dy is not quantised": (
            changed("dy8.float() / dy_scale => rows.float()"),
            "dx is not right: dy is not quantised",
        ),
        "dy in e4m3": (changed("E5M2 => E4M3"), "dy is in e4m3, expected is e5m2"),
        "dx of the whole weight": (
            changed(f"{SAVE} => {SAVE}\n        ctx.w = weight", f"{DX} => dx = gradient @ ctx.w"),
            "dx is not right: the weight is not quantised",
        ),
        "dW of the whole x": (
            changed(
                f"{SAVE} => {SAVE}\n        ctx.x = rows",
                f"{X8}\n        dx = => ctx.x\n        dx =",
            ),
            "dW is not right: x is not quantised",
        ),
        "dW transposed": (changed(f"{DW} => dw = {X8}.T @ gradient"), "another shape"),
        "dx flattened": (
            changed(".reshape(*dy.shape[:-1], w8.shape[1]) => "),
            "another shape",
        ),
        "a scale left in dx": (changed(f"{DX} => dx = gradient @ w8.float()"), "which scales"),
        "scales not divided out": (
            changed(f"{X8} @ {W8}.T => x8.float() @ w8.float().T"),
            "which scales",
        ),
        "keeps x and the weight": (
            changed(f"{SAVE} => ctx.save_for_backward(rows, weight)", f"{SAVED} => {LATE_CAST}"),
            "is kept for backward",
        ),
        "keeps x on ctx as well": (
            changed(f"{SAVE} => {SAVE}\n        ctx.x = x"),
            "is kept for backward",
        ),
        "keeps it transposed as well": (
            changed(
                f"{SAVE} => ctx.save_for_backward(x8, x_scale, w8, w_scale, w8.T.contiguous())",
                f"{SAVED} => x8, x_scale, w8, w_scale, _ = ctx.saved_tensors",
            ),
            "8-bit numbers are kept",
        ),
        "keeps them on ctx": (
            changed(
                f"{SAVE} => ctx.kept = (x8, x_scale, w8, w_scale)",
                "ctx.saved_tensors => ctx.kept",
            ),
            "attributes of ctx",
        ),
        "dy quantised twice": (changed(f"dw = gradient.T @ => {DY8_AGAIN}"), "2 times"),
        "product in the dtype of x": (
            changed(f"{X8} @ {W8}.T => {X8}.to(x.dtype) @ {W8}.to(x.dtype).T"),
            "rounded more than once",
        ),
        "no return": (changed("return y.to => y.to"), "returned None"),
        "float32 always": (changed("y.to(x.dtype) => y"), "expected is torch.bfloat16"),
        "the finished one": (lab._Fp8Linear, "labcode's own answer"),
    },
)

# ---- 18.8 the amaxes of a group


def gathered(amaxes, group):
    own = torch.tensor([amax.item() for amax in amaxes])
    all_of_them = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(all_of_them, own, group=group)
    return list(torch.stack(all_of_them).max(0).values)


def one_by_view(amaxes, group):
    flat = torch.cat([amax.reshape(1) for amax in amaxes])
    work = dist.all_reduce(flat, dist.ReduceOp.MAX, group, async_op=True)
    assert work is not None
    work.wait()
    return tuple(flat[i] for i in range(len(amaxes)))


INTO_THE_GIVEN = """for amax, largest in zip(amaxes, together):
        amax.copy_(largest)
    return amaxes"""


def as_objects(amaxes, group):
    of_ranks = [None] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, [amax.item() for amax in amaxes], group=group)
    return [torch.tensor(max(column)) for column in zip(*of_ranks)]


REDUCE = Answers(
    solves="reduce_amaxes",
    right={"all-gather": gathered, "async": one_by_view},
    wrong={
        "does not wait": (
            changed("group=group => group=group, async_op=True"),
            "1 all-reduce started and 0 waited for",
        ),
        "sum": (changed("MAX => SUM"), "the sums over the ranks"),
        "mean": (
            changed("MAX => SUM", "list(together) => list(together / group.size())"),
            "the means over the ranks",
        ),
        "one after the other": (
            changed("dist.all_reduce(together, => for one in together: dist.all_reduce(one,"),
            "put all of them into one",
        ),
        "into the given tensors": (
            changed(f"return list(together) => {INTO_THE_GIVEN}"),
            "have changed",
        ),
        "the world": (changed(", group=group => "), "with ranks 0-3 it is right"),
        "one for all tensors": (
            changed("list(together) => [together.max() for _ in amaxes]"),
            "each tensor keeps",
        ),
        "nothing sent": (
            changed("together = => return list(amaxes)\n    together ="),
            "of this rank alone",
        ),
        "one number": (
            changed("list(together) => together.max()"),
            "return a list of 5 tensors, not a Tensor",
        ),
        "no return": (changed("return list(together) => list(together)"), "returned None"),
        "labcode's own": (fp8.reduced_amaxes, "labcode's own answer"),
        "a tensor": (
            changed("list(together) => together"),
            "return a list of 5 tensors, not a Tensor",
        ),
        "as objects": (as_objects, "a function that sends Python objects sends their size first"),
    },
)

# ---- 18.9 gather in 8 bits


def shared_scale(shard, group):
    amax = shard.abs().max().float()
    dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
    return torch.where(amax > 0, 448 / amax, torch.ones(()))


def into_one_tensor(shard, group):
    scale = shared_scale(shard, group)
    own = (shard.float() * scale).clamp(-448, 448).to(E4M3).view(torch.int8)
    whole = own.new_empty(group.size() * own.shape[0], own.shape[1])
    dist.all_gather(list(whole.chunk(group.size())), own, group=group)
    return whole.view(E4M3), scale.item()


def by_broadcasts(shard, group):
    scale = shared_scale(shard, group)
    parts = []
    for number in range(group.size()):
        part = (shard.float() * scale).to(E4M3).view(torch.uint8).clone()
        dist.broadcast(part, group_src=number, group=group)
        parts.append(part.view(E4M3).float())
    return torch.cat(parts).to(E4M3), scale


QUANTIZE_FIRST = """q, own = lab.quantize(shard, torch.float8_e4m3fn)
    shard = q.float() / own
    amax ="""
CAST_OWN = "(shard.float() * scale).to(torch.float8_e4m3fn)"
VIEW_BACK = "torch.cat(parts).view(torch.float8_e4m3fn)"
CAST_BACK = "torch.cat(parts).to(torch.float8_e4m3fn)"

GATHER = Answers(
    solves="gather_fp8",
    right={"into one tensor": into_one_tensor, "broadcasts": by_broadcasts},
    wrong={
        "nothing for zeros": (changed("if amax == 0 => if False"), "the whole weight is zeros"),
        "own scale first": (changed(f"amax = shard => {QUANTIZE_FIRST} shard"), "more than once"),
        "its own dtype": (changed(".float() => "), "in float32"),
        "tiny is zero": (changed("amax == 0 => amax < 1e-5"), "448 / amax"),
        "does not wait": (
            changed("own, group=group => own, group=group, async_op=True"),
            "1 all-gather started and 0 waited for",
        ),
        "zeros of this rank alone": (changed("amax == 0 => shard.abs().max() == 0"), "expected is"),
        "its own scale": (changed("(amax, => (amax.clone(),"), "of this rank's shard"),
        "the shared scale too late": (
            changed(f"{CAST_OWN} => lab.quantize(shard, torch.float8_e4m3fn)[0]"),
            "are wrong after dequantising",
        ),
        "not scaled": (changed("(shard.float() * scale) => shard"), "are wrong after dequantising"),
        "in float32": (
            changed(
                f"{CAST_OWN}.view(torch.uint8) => shard.float() * scale",
                "cat(parts).view => cat(parts).to",
            ),
            "bytes travel",
        ),
        "in bfloat16": (
            changed(
                f"{CAST_OWN}.view(torch.uint8) => {CAST_OWN}.bfloat16()",
                f"{VIEW_BACK} => {CAST_BACK}",
            ),
            "bytes travel",
        ),
        "8-bit floats": (changed(".view(torch.uint8) => "), "Invalid scalar type"),
        "converted, not viewed": (
            changed(f"{CAST_OWN}.view(torch.uint8) => {CAST_OWN}.to(torch.uint8)"),
            "converts the numbers",
        ),
        "converted there and back": (
            changed(
                f"{CAST_OWN}.view(torch.uint8) => {CAST_OWN}.to(torch.uint8)",
                f"{VIEW_BACK} => {CAST_BACK}",
            ),
            "converts the numbers",
        ),
        "sum of the amaxes": (changed("ReduceOp.MAX => ReduceOp.SUM"), "sum of all amaxes"),
        "still bytes": (changed(f"{VIEW_BACK} => torch.cat(parts)"), "expected is"),
        "bytes as numbers": (
            changed(f"{VIEW_BACK} => {CAST_BACK}"),
            "are wrong after dequantising",
        ),
        "the shard alone": (changed("cat(parts) => cat([own])"), "expected is [32, 6]"),
        "backwards": (changed("cat(parts) => cat(parts[::-1])"), "order of the ranks"),
        "the world": (
            changed(", group=group => ", "get_world_size(group) => get_world_size()"),
            "with ranks 0-3 it is right",
        ),
        "the inverse scale": (changed("e4m3fn), scale => e4m3fn), 1 / scale"), "upside down"),
    },
)

# ---- 18.10 a format for each tensor


def error_of(option, x):
    used = x != 0
    if not used.any():
        return 0.0
    return ((option.cast(x) - x)[used] / x[used]).abs().mean().item()


def by_sorting(x, options, most_error):
    rows = sorted((o.bits, error_of(o, x), name) for name, o in options.items())
    for _, error, name in rows:
        if not math.isnan(error) and error <= most_error:
            return name
    return None


def by_min(x, options, most_error):
    good = [name for name, option in options.items() if error_of(option, x) <= most_error]
    return min(good, key=lambda n: (options[n].bits, error_of(options[n], x)), default=None)


RATIO = "(option.cast(x) - x)[used] / x[used]"
MEAN = f"({RATIO}).abs().mean().item()"
IS_BETTER = "(option.bits, error) < best[:2]"
CHOICE = "return best[2] if best else None"

CHOOSE = Answers(
    solves="choose",
    takes_ranks=False,
    right={"sorted": by_sorting, "min": by_min},
    wrong={
        "the least error": (changed(f"{IS_BETTER} => error < best[1]"), "are enough"),
        "the first of those with the same bits": (
            changed(f"{IS_BETTER} => option.bits < best[0]"),
            "has as many bits and",
        ),
        "nan passes": (
            changed("error <= most_error => not error > most_error"),
            "no format is good enough",
        ),
        "zeros": (changed("if used.any() => if True"), "zeros, at most"),
        "another error": (
            changed(f"{MEAN} => ((option.cast(x) - x).norm() / x.norm()).item()"),
            "by the mean of |x̂ - x| / |x|",
        ),
        "a mean over the zeros too": (
            changed(".abs().mean().item() => .abs().sum().item() / x.numel()"),
            "two of three are zeros",
        ),
        "labcode's options": (
            changed("options.items() => lab.OPTIONS.items()"),
            "options of other names",
        ),
        "without zeros": (
            changed(f"{RATIO} => option.cast(x[used]) / x[used] - 1"),
            "pad it to a multiple",
        ),
        "without zeros, cut to whole blocks": (
            changed(
                "used = x != 0 => x = x[x != 0][: x.count_nonzero() // 32 * 32]; used = x != 0"
            ),
            "one of sixteen",
        ),
        "below the bound": (changed("error <= most => error < most"), "zeros, at most 0"),
        "the bits": (changed("return best[2] => return best[0]"), "expected is one of"),
        "bfloat16 if none": (changed("else None => else 'bfloat16'"), "no format is good enough"),
        "the finished one": (
            changed(f"{CHOICE} => return lab.cheapest(x, most_error)"),
            "labcode's own answer",
        ),
    },
)

ANSWERS = {
    "18.1": SPACING,
    "18.2": SCALER,
    "18.3": TRAIN_STEP,
    "18.4": CAST,
    "18.5": QUANTIZE,
    "18.6": DELAYED,
    "18.7": LINEAR,
    "18.8": REDUCE,
    "18.9": GATHER,
    "18.10": CHOOSE,
}
