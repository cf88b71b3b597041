"""Answers to the exercises of lesson 18, low precision."""

import math
from collections import deque
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
from answers import Answers, changed

from labcode.precision import formats, fp8
from labcode.teach.labs import l18_gpt as lab

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2

# ---- 18.1 the spacing


def by_frexp(x, fraction_bits, smallest_exponent):
    if x == 0:
        return 2.0 ** (smallest_exponent - fraction_bits)
    exponent = max(math.frexp(x)[1] - 1, smallest_exponent)
    return 2.0 ** (exponent - fraction_bits)


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


def log_alone(x, m, least):
    size = max(abs(x), 2.0**least)
    return 2.0 ** (math.floor(math.log2(size)) - m)


def no_minus_one(x, m, least):
    return 2.0 ** (max(math.frexp(x)[1], least) - m)


def no_subnormal(x, m, least):
    return 2.0 ** (math.frexp(x)[1] - 1 - m)


def sign_counts(x, m, least):
    size = max(x, 2.0**least)
    return 2.0 ** (math.floor(math.log2(size)) - m)


def nearest_power(x, m, least):
    size = max(abs(x), 2.0**least)
    return 2.0 ** (round(math.log2(size)) - m)


def wrong_bits(x, m, least):
    return by_frexp(x, m + 1, least)


def e4m3_alone(x, m, least):
    return by_frexp(x, 3, -6)


def zero_forgotten(x, m, least):
    return 2.0 ** (max(math.frexp(x)[1] - 1, least) - m) if x else 2.0 ** (-1 - m)


SPACING = Answers(
    solves="spacing",
    takes_ranks=False,
    right={"frexp": by_frexp, "log2": by_log, "a loop": by_counting},
    wrong={
        "a rounded logarithm": (log_alone, "just below 256"),
        "n for n - 1": (no_minus_one, "the power of two above |x| or the one below"),
        "no subnormal numbers": (no_subnormal, "do not get closer any more"),
        "the sign": (sign_counts, "the sign of x"),
        "rounded exponent": (nearest_power, "above |x| or the one below"),
        "a bit too many": (wrong_bits, "is due"),
        "e4m3 always": (e4m3_alone, "is due"),
        "zero": (zero_forgotten, "zero is smaller"),
    },
)

# ---- 18.2 the cast


def in_frexp(x):
    _, n = torch.frexp(x)
    step = torch.ldexp(torch.ones_like(x), (n - 1).clamp(min=-6) - 3)
    return (torch.round(x / step) * step).clamp(-448, 448)


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


def floor_for_round(x):
    _, n = torch.frexp(x)
    step = torch.ldexp(torch.ones_like(x), (n - 1).clamp(min=-6) - 3)
    return (torch.trunc(x / step) * step).clamp(-448, 448)


def ties_up(x):
    _, n = torch.frexp(x)
    step = torch.ldexp(torch.ones_like(x), (n - 1).clamp(min=-6) - 3)
    return (torch.sign(x) * torch.floor(x.abs() / step + 0.5) * step).clamp(-448, 448)


def never_saturates(x):
    _, n = torch.frexp(x)
    step = torch.ldexp(torch.ones_like(x), (n - 1).clamp(min=-6) - 3)
    return torch.round(x / step) * step


def without_subnormal(x):
    _, n = torch.frexp(x)
    step = torch.ldexp(torch.ones_like(x), n - 1 - 3)
    return (torch.round(x / step) * step).clamp(-448, 448)


def four_bits(x):
    _, n = torch.frexp(x)
    step = torch.ldexp(torch.ones_like(x), (n - 1).clamp(min=-6) - 4)
    return (torch.round(x / step) * step).clamp(-448, 448)


def torchs_own(x):
    return x.to(E4M3).float()


def still_eight_bits(x):
    return x.to(E4M3)


def in_place(x):
    _, n = torch.frexp(x)
    step = torch.ldexp(torch.ones_like(x), (n - 1).clamp(min=-6) - 3)
    return x.div_(step).round_().mul_(step).clamp_(-448, 448)


def too_large_is_zero(x):
    found = in_frexp(x)
    return torch.where(x.abs() > 448, torch.zeros_like(x), found)


def nan_is_zero(x):
    return in_frexp(x).nan_to_num(0.0, 448.0, -448.0)


def of_scalars(x):
    """Of tensors with one dim alone."""
    return in_frexp(x).flatten()


CAST = Answers(
    solves="to_e4m3",
    takes_ranks=False,
    right={"frexp": in_frexp, "rounds the fraction": of_the_fraction, "adds": by_adding},
    wrong={
        "cut off": (floor_for_round, "cut off instead of rounded"),
        "ties upwards": (ties_up, "equally near"),
        "no saturation": (never_saturates, "the largest number"),
        "no subnormal numbers": (without_subnormal, "below 2^-6"),
        "a bit too many": (four_bits, "is due"),
        "PyTorch's cast": (torchs_own, "use arithmetic alone"),
        "8-bit dtype": (still_eight_bits, "held in float32"),
        "in place": (in_place, "has changed"),
        "too large is zero": (too_large_is_zero, "the largest number"),
        "nan is zero": (nan_is_zero, "nan must stay nan"),
        "flattened": (of_scalars, "became one of"),
        "labcode's own": (partial(formats.cast, to=formats.E4M3), "labcode's own answer"),
    },
)

# ---- 18.3 quantise


def with_where(x, dtype):
    largest = torch.finfo(dtype).max
    amax = x.abs().max().float()
    scale = torch.where(amax > 0, largest / amax, torch.ones_like(amax))
    return (x.float() * scale).to(dtype), scale


def with_if(x, dtype):
    top = torch.finfo(dtype).max
    wide = x.to(torch.float32)
    amax = max(wide.max(), -wide.min())
    scale = torch.tensor(1.0)
    if amax > 0:
        scale = top / amax
    return torch.clamp(wide * scale, min=-top, max=top).to(dtype), scale


def quantized(x, dtype):
    """What wrong answers begin with."""
    return with_where(x, dtype)


def by_norm(x, dtype):
    largest = torch.finfo(dtype).max
    amax = torch.linalg.vector_norm(x.flatten().float(), ord=math.inf)
    scale = largest / amax
    scale = torch.nan_to_num(scale, posinf=1.0)
    q = (x.float() * scale).clamp(-largest, largest).to(dtype)
    return [q, scale]


def largest_not_by_size(x, dtype):
    largest = torch.finfo(dtype).max
    scale = torch.where(x.max() > 0, largest / x.max().float(), torch.tensor(1.0))
    return (x.float() * scale).clamp(-largest, largest).to(dtype), scale


def the_inverse(x, dtype):
    q, scale = quantized(x, dtype)
    return q, 1 / scale


def not_scaled(x, dtype):
    return x.to(dtype), quantized(x, dtype)[1]


def to_one(x, dtype):
    amax = x.abs().max().float()
    scale = torch.where(amax > 0, 1 / amax, torch.tensor(1.0))
    return (x.float() * scale).to(dtype), scale


def zeros_divide(x, dtype):
    largest = torch.finfo(dtype).max
    scale = largest / x.abs().max().float()
    return (x.float() * scale).clamp(-largest, largest).to(dtype), scale


def in_bfloat16(x, dtype):
    amax = x.abs().max()
    scale = torch.where(amax > 0, torch.finfo(dtype).max / amax, torch.ones_like(amax))
    return (x * scale).to(dtype), scale.float()


def always_e4m3(x, dtype):
    return quantized(x, E4M3)


def each_row(x, dtype):
    largest = torch.finfo(dtype).max
    amax = x.abs().amax(-1, keepdim=True).float()
    scale = torch.where(amax > 0, largest / amax, torch.ones_like(amax))
    return (x.float() * scale).clamp(-largest, largest).to(dtype), scale


def scale_as_number(x, dtype):
    q, scale = quantized(x, dtype)
    return q, scale.item()


def dequantised(x, dtype):
    q, scale = quantized(x, dtype)
    return q.float() / scale, scale


def changes_x(x, dtype):
    q, scale = quantized(x, dtype)
    x *= scale
    return q, scale


def scale_alone(x, dtype):
    return quantized(x, dtype)[1]


def any_zero(x, dtype):
    if not (x != 0).all():
        return x.to(dtype), torch.tensor(1.0)
    return quantized(x, dtype)


def by_the_sum(x, dtype):
    if x.sum() == 0:
        return x.to(dtype), torch.tensor(1.0)
    return quantized(x, dtype)


QUANTIZE = Answers(
    solves="quantize",
    takes_ranks=False,
    right={"where": with_where, "if": with_if, "a norm": by_norm},
    wrong={
        "max without abs": (largest_not_by_size, "negative number"),
        "the inverse scale": (the_inverse, "way back"),
        "not scaled": (not_scaled, "multiplied by the scale"),
        "to one": (to_one, "becomes 1"),
        "a division by zero": (zeros_divide, "the scale is inf"),
        "in the dtype of x": (in_bfloat16, "narrow"),
        "e4m3 always": (always_e4m3, "is due"),
        "a scale for each row": (each_row, "one number for the whole tensor"),
        "a Python number": (scale_as_number, "both must be tensors"),
        "dequantised at once": (dequantised, "is due"),
        "in place": (changes_x, "has changed"),
        "the scale alone": (scale_alone, "return two things"),
        "any zero counts as zeros": (any_zero, "a zero among other numbers"),
        "the sum for the amax": (by_the_sum, "sum is 0"),
        "the finished one": (lab.quantize, "labcode's own answer"),
    },
)

# ---- 18.4 delayed scaling


class WithList:
    def __init__(self, length, largest, margin=0):
        self.length, self.largest, self.margin = length, largest, margin
        self.history = []

    def scale(self):
        amax = max(self.history[-self.length :], default=0)
        return self.largest / amax / 2**self.margin if amax else 1.0

    def record(self, amax):
        if math.isfinite(amax):
            self.history.append(amax)


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


class Newest(WithList):
    def scale(self):
        amax = self.history[-1] if self.history else 0
        return self.largest / amax / 2**self.margin if amax else 1.0


class NeverForgets(WithList):
    def scale(self):
        amax = max(self.history, default=0)
        return self.largest / amax / 2**self.margin if amax else 1.0


class BadStepsCount(WithList):
    def record(self, amax):
        self.history.append(amax)


class NoMargin(WithList):
    def scale(self):
        amax = max(self.history[-self.length :], default=0)
        return self.largest / amax if amax else 1.0


class MarginUpwards(WithList):
    def scale(self):
        amax = max(self.history[-self.length :], default=0)
        return self.largest * 2**self.margin / amax if amax else 1.0


class ZeroDivides(WithList):
    def scale(self):
        if not self.history:
            return 1.0
        return self.largest / max(self.history[-self.length :]) / 2**self.margin


class OneTooShort(WithList):
    def scale(self):
        amax = max(self.history[-self.length + 1 :], default=0)
        return self.largest / amax / 2**self.margin if amax else 1.0


class TwiceTheMargin(WithList):
    def scale(self):
        amax = max(self.history[-self.length :], default=0)
        return self.largest / amax / max(1, 2 * self.margin) if amax else 1.0


class RepeatsTheLast(WithList):
    def record(self, amax):
        if math.isfinite(amax):
            self.history.append(amax)
        elif self.history:
            self.history.append(self.history[-1])


class SmallIsNothing(WithList):
    def scale(self):
        amax = max(self.history[-self.length :], default=0)
        return self.largest / amax / 2**self.margin if amax > 1e-3 else 1.0


class Forgets(WithList):
    def scale(self):
        found = super().scale()
        if len(self.history) >= self.length:
            self.history.pop(0)
        return found


class Inverse(WithList):
    def scale(self):
        amax = max(self.history[-self.length :], default=0)
        return amax * 2**self.margin / self.largest if amax else 1.0


class BadStepCountsAsZero(WithList):
    def record(self, amax):
        self.history.append(amax if math.isfinite(amax) else 0.0)


class NothingAtFirst(WithList):
    def scale(self):
        if self.history:
            return super().scale()
        return None


class Shared(WithList):
    history_of_all: list = []  # noqa: RUF012

    def __init__(self, length, largest, margin=0):
        super().__init__(length, largest, margin)
        self.history = self.history_of_all


DELAYED = Answers(
    solves="DelayedScaling",
    takes_ranks=False,
    right={"a list": WithList, "a deque": WithDeque, "a ring": WithTensor},
    wrong={
        "the newest": (Newest, "not the newest"),
        "never forgets": (NeverForgets, "no longer count"),
        "bad steps count": (BadStepsCount, "bad step"),
        "no margin": (NoMargin, "Where is the margin"),
        "a margin upwards": (MarginUpwards, "leave room"),
        "zeros": (ZeroDivides, "division by 0"),
        "one too short": (OneTooShort, "too short"),
        "the inverse": (Inverse, "way back"),
        "2 * margin": (TwiceTheMargin, "a margin of 3"),
        "a bad step repeats the last": (RepeatsTheLast, "bad steps after"),
        "small is nothing": (SmallIsNothing, "tiny amaxes"),
        "scale forgets": (Forgets, "asked twice"),
        "a bad step as zero": (BadStepCountsAsZero, "is due"),
        "None at first": (NothingAtFirst, "returned None"),
        "one history for all": (Shared, "is due"),
    },
)

# ---- 18.5 the linear layer


def dequantized(x, dtype):
    q, scale = lab.quantize(x, dtype)
    return q.float() / scale


class Flat(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        q, s = lab.quantize(x, E4M3)
        p, t = lab.quantize(weight, E4M3)
        ctx.save_for_backward(q, s, p, t)
        ctx.x_dtype = x.dtype
        return torch.nn.functional.linear(q.float() / s, p.float() / t).to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        q, s, p, t = ctx.saved_tensors
        g = dequantized(dy, E5M2)
        dx = g @ (p.float() / t)
        dw = torch.einsum("...o,...i->oi", g, q.float() / s)
        return dx.to(ctx.x_dtype), dw


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
        g = dequantized(dy, E5M2)
        dw = g.reshape(-1, g.shape[-1]).T @ x8.reshape(-1, x8.shape[-1])
        return (g @ w8).to(dy.dtype), dw


def layer(x8, w8, dy8, keep=None, grads=None):
    """A layer whose three casts and gradients can be spoilt."""
    seen = SimpleNamespace()  # and not ctx: what is kept there is checked

    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            q, s = lab.quantize(x, E4M3)
            p, t = lab.quantize(weight, E4M3)
            if keep is None:
                ctx.save_for_backward(q, s, p, t)
            else:
                keep(ctx, x, weight, q, s, p, t)
            seen.pair = (q.float() / s, p.float() / t)
            seen.given = (x.detach().float(), weight.detach())
            a = seen.pair[0] if x8 else seen.given[0]
            b = seen.pair[1] if w8 else seen.given[1]
            return (a @ b.T).to(x.dtype)

        @staticmethod
        def backward(ctx, dy):
            g = dequantized(dy, dy8) if dy8 else dy.float()
            if grads is not None:
                return grads(seen, g, dy)
            dx = g @ seen.pair[1]
            dw = g.flatten(0, -2).T @ seen.pair[0].flatten(0, -2)
            return dx.to(dy.dtype), dw

    return Layer


def full_weight_in_dx(ctx, g, dy):
    dw = g.flatten(0, -2).T @ ctx.pair[0].flatten(0, -2)
    return (g @ ctx.given[1]).to(dy.dtype), dw


def full_x_in_dw(ctx, g, dy):
    dw = g.flatten(0, -2).T @ ctx.given[0].flatten(0, -2)
    return (g @ ctx.pair[1]).to(dy.dtype), dw


def transposed_dw(ctx, g, dy):
    dw = ctx.pair[0].flatten(0, -2).T @ g.flatten(0, -2)
    return (g @ ctx.pair[1]).to(dy.dtype), dw


def first_dim_alone(ctx, g, dy):
    dw = g.flatten(0, -2).T @ ctx.pair[0].flatten(0, -2)
    return (g @ ctx.pair[1]).flatten(0, -2).to(dy.dtype), dw


def scale_left(ctx, g, dy):
    dw = g.flatten(0, -2).T @ ctx.pair[0].flatten(0, -2)
    return (1000 * g @ ctx.pair[1]).to(dy.dtype), dw


def keeps_x(ctx, x, weight, q, s, p, t):
    ctx.save_for_backward(x, weight)


def keeps_x_on_ctx(ctx, x, weight, q, s, p, t):
    ctx.save_for_backward(q, s, p, t)
    ctx.also = x


def keeps_both(ctx, x, weight, q, s, p, t):
    ctx.save_for_backward(q, s, p, t, q.clone())


def keeps_none(ctx, x, weight, q, s, p, t):
    ctx.save_for_backward(s, t)


class QuantizesTwice(Flat):
    @staticmethod
    def backward(ctx, dy):
        q, s, p, t = ctx.saved_tensors
        dx = dequantized(dy, E5M2) @ (p.float() / t)
        g = dequantized(dy.flatten(0, -2).T, E5M2)
        return dx.to(ctx.x_dtype), g @ (q.float() / s).flatten(0, -2)


class InTheDtypeOfX(Flat):
    @staticmethod
    def forward(ctx, x, weight):
        y = Flat.forward(ctx, x, weight)
        q, s, p, t = ctx.to_save if hasattr(ctx, "to_save") else ctx.saved_tensors
        x8 = (q.float() / s).to(x.dtype)
        w8 = (p.float() / t).to(x.dtype)
        return torch.nn.functional.linear(x8, w8).to(y.dtype)


class DividesTooLate(Flat):
    @staticmethod
    def forward(ctx, x, weight):
        q, s = lab.quantize(x, E4M3)
        p, t = lab.quantize(weight, E4M3)
        ctx.save_for_backward(q, s, p, t)
        ctx.x_dtype = x.dtype
        product = (q.float() @ p.float().T).to(x.dtype)
        return product / (s * t).to(x.dtype)


class Unscaled(Flat):
    @staticmethod
    def forward(ctx, x, weight):
        q, s = lab.quantize(x, E4M3)
        p, t = lab.quantize(weight, E4M3)
        ctx.save_for_backward(q, s, p, t)
        ctx.x_dtype = x.dtype
        return (q.float() @ p.float().T).to(x.dtype)


class NoReturn(Flat):
    @staticmethod
    def forward(ctx, x, weight):
        Flat.forward(ctx, x, weight)


class InFloat32(Flat):
    @staticmethod
    def forward(ctx, x, weight):
        return Flat.forward(ctx, x, weight).float()


LINEAR = Answers(
    solves="Fp8Linear",
    takes_ranks=False,
    right={"einsum": Flat, "scales at the end": ScalesAtTheEnd, "bytes": AsBytes},
    wrong={
        "no cast at all": (layer(False, False, None), "full precision"),
        "x is not quantised": (layer(False, True, E5M2), "is x quantised"),
        "the weight is not quantised": (layer(True, False, E5M2), "is the weight quantised"),
        "dy is not quantised": (layer(True, True, None), "dy is not quantised"),
        "dy in e4m3": (layer(True, True, E4M3), "e5m2 is due"),
        "dx of the whole weight": (
            layer(True, True, E5M2, grads=full_weight_in_dx),
            "the weight is not quantised",
        ),
        "dW of the whole x": (layer(True, True, E5M2, grads=full_x_in_dw), "x is not quantised"),
        "dW transposed": (layer(True, True, E5M2, grads=transposed_dw), "another shape"),
        "dx flattened": (layer(True, True, E5M2, grads=first_dim_alone), "another shape"),
        "a scale left in dx": (layer(True, True, E5M2, grads=scale_left), "which scales"),
        "keeps x": (layer(True, True, E5M2, keep=keeps_x), "is kept for backward"),
        "keeps one twice": (layer(True, True, E5M2, keep=keeps_both), "8-bit numbers are kept"),
        "keeps x on ctx as well": (
            layer(True, True, E5M2, keep=keeps_x_on_ctx),
            "is kept for backward",
        ),
        "keeps them on ctx": (layer(True, True, E5M2, keep=keeps_none), "attributes of ctx"),
        "dy quantised twice": (QuantizesTwice, "2 times"),
        "product in bfloat16": (InTheDtypeOfX, "rounded more than once"),
        "divided too late": (DividesTooLate, "rounded more than once"),
        "scales not divided out": (Unscaled, "divided out"),
        "no return": (NoReturn, "returned None"),
        "float32 always": (InFloat32, "and x is"),
    },
)

# ---- 18.6 the amaxes of a group


def gathered(amaxes, group):
    own = torch.tensor([amax.item() for amax in amaxes])
    all_of_them = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(all_of_them, own, group=group)
    return torch.stack(all_of_them).max(0).values


def one_by_view(amaxes, group):
    flat = torch.cat([amax.reshape(1) for amax in amaxes])
    work = dist.all_reduce(flat, dist.ReduceOp.MAX, group, async_op=True)
    work.wait()
    return tuple(flat[i] for i in range(len(amaxes)))


INTO_THE_GIVEN = """for amax, largest in zip(amaxes, together):
        amax.copy_(largest)
    return amaxes"""

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
        "the world": (changed(", group=group => "), "with ranks 0, 1, 2 and 3 it is right"),
        "one for all tensors": (
            changed("list(together) => [together.max() for _ in amaxes]"),
            "each tensor keeps",
        ),
        "nothing sent": (
            changed("together = => return list(amaxes)\n    together ="),
            "of this rank alone",
        ),
        "one number": (changed("list(together) => together.max()"), "one amax for each of"),
        "no return": (changed("return list(together) => list(together)"), "returned None"),
        "labcode's own": (fp8.reduced_amaxes, "labcode's own answer"),
    },
)

# ---- 18.7 gather in 8 bits


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
        "still bytes": (changed(f"{VIEW_BACK} => torch.cat(parts)"), "expected is"),
        "bytes as numbers": (
            changed(f"{VIEW_BACK} => {CAST_BACK}"),
            "are wrong after dequantising",
        ),
        "the shard alone": (changed("cat(parts) => cat([own])"), "expected is [32, 6]"),
        "backwards": (changed("cat(parts) => cat(parts[::-1])"), "order of the ranks"),
        "the world": (
            changed(", group=group => ", "get_world_size(group) => get_world_size()"),
            "with ranks 0, 1, 2 and 3 it is right",
        ),
        "the inverse scale": (changed("e4m3fn), scale => e4m3fn), 1 / scale"), "upside down"),
    },
)

# ---- 18.8 a format for each tensor


def error_of(option, x):
    used = x != 0
    if not used.any():
        return 0.0
    return ((option.cast(x) - x)[used] / x[used]).abs().mean().item()


def by_loop(x, options, most_error):
    best = None
    for name, option in options.items():
        error = error_of(option, x)
        if error <= most_error and (best is None or (option.bits, error) < best[:2]):
            best = (option.bits, error, name)
    return None if best is None else best[2]


def by_sorting(x, options, most_error):
    rows = sorted((o.bits, error_of(o, x), name) for name, o in options.items())
    for _, error, name in rows:
        if not math.isnan(error) and error <= most_error:
            return name
    return None


def by_min(x, options, most_error):
    good = [name for name, option in options.items() if error_of(option, x) <= most_error]
    return min(good, key=lambda n: (options[n].bits, error_of(options[n], x)), default=None)


def least_error(x, options, most_error):
    good = [name for name, option in options.items() if error_of(option, x) <= most_error]
    return min(good, key=lambda name: error_of(options[name], x), default=None)


def first_good(x, options, most_error):
    for name, option in sorted(options.items(), key=lambda pair: pair[1].bits):
        if error_of(option, x) <= most_error:
            return name
    return None


def nan_is_good(x, options, most_error):
    good = []
    for name, option in options.items():
        error = error_of(option, x)
        if error > most_error:
            continue
        good.append((option.bits, error, name))
    return min(good)[2] if good else None


def zeros_are_nan(x, options, most_error):
    good = []
    for name, option in options.items():
        error = ((option.cast(x) - x) / x)[x != 0].abs().mean()
        if error <= most_error:
            good.append((option.bits, error.item(), name))
    return min(good)[2] if good else None


def by_norm_of_all(x, options, most_error):
    good = []
    for name, option in options.items():
        error = (option.cast(x) - x).norm() / x.norm()
        if error <= most_error or x.norm() == 0:
            good.append((option.bits, error.item(), name))
    return min(good)[2] if good else None


def mean_over_all(x, options, most_error):
    good = []
    for name, option in options.items():
        ratio = torch.where(x != 0, (option.cast(x) - x) / x, torch.zeros_like(x))
        error = ratio.abs().mean().item()
        if error <= most_error:
            good.append((option.bits, error, name))
    return min(good)[2] if good else None


def e4m3_for_all(x, options, most_error):
    return "e4m3"


def the_bits(x, options, most_error):
    name = by_loop(x, options, most_error)
    return None if name is None else options[name].bits


def by_all_of_labcode(x, options, most_error):
    return by_loop(x, lab.OPTIONS, most_error)


def takes_options_away(x, options, most_error):
    name = by_loop(x, options, most_error)
    options.clear()
    return name


def without_zeros(x, options, most_error):
    used = x[x != 0]
    if used.numel() == 0:
        return by_loop(x, options, most_error)
    used = used[: used.numel() // 32 * 32]
    return by_loop(used, options, most_error)


def below_the_bound(x, options, most_error):
    good = []
    for name, option in options.items():
        error = lab.relative_error(x, option.cast(x))
        if error < most_error:
            good.append((option.bits, error, name))
    return min(good)[2] if good else None


def bfloat16_if_none(x, options, most_error):
    return by_loop(x, options, most_error) or "bfloat16"


CHOOSE = Answers(
    solves="choose",
    takes_ranks=False,
    real=True,
    right={"a loop": by_loop, "sorted": by_sorting, "min": by_min},
    wrong={
        "the least error": (least_error, "are enough"),
        "the first of those with the same bits": (first_good, "smaller error"),
        "nan passes": (nan_is_good, "no format is good enough"),
        "zeros": (zeros_are_nan, "zeros"),
        "another error": (by_norm_of_all, "ordinary numbers"),
        "a mean over the zeros too": (mean_over_all, "two of three are zeros"),
        "e4m3 always": (e4m3_for_all, "e4m3"),
        "labcode's options": (by_all_of_labcode, "options of other names"),
        "options cleared": (takes_options_away, "belongs to the caller"),
        "without zeros": (without_zeros, "one of sixteen"),
        "below the bound": (below_the_bound, "zeros, at most 0"),
        "the bits": (the_bits, "return one of"),
        "bfloat16 if none": (bfloat16_if_none, "no format is good enough"),
    },
)

ANSWERS = {
    "18.1": SPACING,
    "18.2": CAST,
    "18.3": QUANTIZE,
    "18.4": DELAYED,
    "18.5": LINEAR,
    "18.6": REDUCE,
    "18.7": GATHER,
    "18.8": CHOOSE,
}
