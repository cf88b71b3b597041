# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 18 · Low precision
#
# A GPU multiplies 16-bit numbers many times as fast as 32-bit ones, and 8-bit numbers twice as fast again. But float16
# turns small gradients into zeros, and eight bits can represent only 256 different values, while a model has millions
# of parameters. In this lesson you find out why training works all the same. Two optional sections are about float16:
# what is lost, and how a scaled loss saves it. The others are about 8 bits: you write the rounding, the scaling, and a
# linear layer whose three matmuls run in 8 bits. Then you train with it, on one process and on four. Lesson 22 goes on
# from there: sums of few bits, scales for tiles, and four bits.
#
# ## Goals
#
# - say what a number format can hold, and how far its numbers are apart;
# - say which gradients underflow in float16 and why, and write the dynamic loss scale that saves them (optional);
# - write the rounding to an 8-bit format by hand, equal to PyTorch's in every bit;
# - write current and delayed scaling, and know what each of them costs;
# - write a linear layer in FP8: forward, input gradient, weight gradient;
# - share the scale over a group of ranks, and know when this is needed;
# - decide which layers of a model stay in higher precision.
#
# **Time**: 160 minutes, and 123 more for what is optional. Good places for a break are after sections 3, 5 and 7.
#
# **Needs**: lesson 03b (section 4). For section 9 also lesson 01 (section 2), lesson 09 (section 2) and lesson 13
# (section 4); for section 11 also lesson 10 (sections 3 and 5).

# %%
import math

import torch

from course.lab import Ranks, check, compare, plot, show_source
from course.labs import l18_gpt as lab
from labcode.precision import fp8

ranks = Ranks(4)
E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2

# %% [markdown]
# ## 1. What a number format can say (core, 19 min)
#
# A floating-point number has a **sign**, an **exponent** that says how large it is, and a **fraction** that says where
# it lies between two powers of two. bfloat16 and float16 divide 16 bits differently. For eight bits, too, there are
# two formats, and their names count the bits: e4m3 has 4 for the exponent and 3 for the fraction (m is for *mantissa*,
# an older word for it), e5m2 has 5 and 2. Our example is e4m3, because it has so few numbers.

# %% tags=["figure"]
plot.formats(
    {"bfloat16": (8, 7), "float16": (5, 10), "e5m2": (5, 2), "e4m3": (4, 3)},
    caption="18.formats",
)

# %% [markdown]
# With 3 bits for the fraction there are 2^3 = 8 numbers from each power of two to the next, at equal distances. From 16
# to 32 these are 16, 18, 20, ... 30, so that the distance, called **spacing**, is 2 there; from 1 to 2 it is 1/8. In
# general, with m bits for the fraction and 2^e ≤ |x| < 2^(e+1):
#
# $$\text{spacing}(x) = 2^{\,e - m}$$
#
# The exponent is limited in both directions. The smallest one of e4m3 is -6, and below 2^-6 the numbers do not get any
# closer: they go down to zero in the same steps of 2^(-6-3) = 2^-9. These last ones are called **subnormal**. At the
# other end, the largest number of e4m3 is 448, and that of e5m2 is 57,344.
#
# Why 448? The exponent goes up to 8, so 256 is the last power of two that the format has, and the numbers from there on
# are 256, 288, 320, ... 448, 480. But the bits of 480 are used for *not a number*. There is no infinity in e4m3, while
# e5m2 has one, like the larger formats.
#
# **Predict.** What is the spacing of e4m3 at x = 100? What is the smallest positive number of e5m2, whose smallest
# exponent is -14? (Give it as a power of two: 2**-7, for example.)

# %% tags=["predict"]
spacing_at_100 = 2**3  # 64 <= 100 < 128, so e is 6, and m is 3
smallest_e5m2 = 2.0**-16  # -14 - 2

# %% tags=["nbval-check-output"]
def all_values(dtype):
    """The finite numbers that 256 patterns of bits stand for, smallest first."""
    patterns = torch.arange(256, dtype=torch.uint8)
    values = patterns.view(dtype).float()
    return values[values.isfinite()].unique()

e4m3_values = all_values(E4M3)
around_100 = e4m3_values[(e4m3_values >= 64) & (e4m3_values < 128)]
step = around_100.diff()[0].item()
compare("spacing at 100", spacing_at_100, step, within=1, found="counted")
e5m2_values = all_values(E5M2)
least = e5m2_values[e5m2_values > 0].min().item()
compare("smallest e5m2", smallest_e5m2, least, within=1, found="counted")
print(f"e4m3 from 64 to 128: {around_100.tolist()}")

# %% [markdown]
# The picture shows the range of each format on a ruler on which every mark is a power of two. More bits for the exponent
# make it longer. More bits for the fraction make the numbers denser, which the ruler does not show.

# %% tags=["figure"]
plot.format_ranges(
    ["float32", "bfloat16", "float16", "e5m2", "e4m3"], caption="18.ranges",
)

# %% [markdown] tags=["exercise"]
# ### Exercise 18.1 · The spacing
#
# Write the formula for a Python number `x`, for any number of bits in the fraction and any smallest exponent. `x` may
# be negative, zero, or so small that it is subnormal. `math.frexp(x)` gives (f, n) with x = f · 2^n and 0.5 ≤ |f| < 1,
# and (0.0, 0) for zero. 3 lines.

# %% tags=["exercise"]
def spacing(x, fraction_bits, smallest_exponent):
    """The distance of the numbers around |x|; at a power of two, of those above it."""
    ### BEGIN SOLUTION
    _, n = math.frexp(x)
    exponent = n - 1 if x != 0 else smallest_exponent
    return 2.0 ** (max(exponent, smallest_exponent) - fraction_bits)
    ### END SOLUTION

# %% tags=["check"]
check("18.1", spacing)

# %% [markdown]
# **Takeaway: the spacing doubles at each power of two. So the rounding error, relative to the number, has the same
# bound for all but the subnormal numbers: half a spacing, 1/16 of the number for e4m3 and 1/8 for e5m2.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* People forget the subnormal numbers and get a spacing that goes to zero. Ask: how many finite
# numbers does e4m3 have? (253 with both zeros counted as one: 256 patterns, two of them not a number, -0 and 0.)

# %% [markdown]
# ## 2. Sixteen bits: what underflows, and why (optional, 46 min)
#
# If you train in bfloat16, as nearly everybody does now on GPUs that have it, go on to section 4. This section is for
# those who have older GPUs (V100, T4) or who meet a `GradScaler` in somebody's code.
#
# Of the two formats of 16 bits, bfloat16 has the exponent of float32 and needs nothing but the autocast of lesson 03b.
# float16 has 8 times as many numbers between 1 and 2, and is the only 16-bit float of NVIDIA's GPUs before the A100
# (2020). Its problem is the range. What is too small for a format becomes 0: it **underflows**.
#
# The small GPT of lesson 03b trains in float16 without trouble, because its gradients are large. Now let the batch be
# accumulated from m = 1024 micro-batches. Each backward then starts from loss / 1024, and all gradients are smaller by
# a factor of 1024.
#
# The trouble begins at the top of the model, before any weight is reached. The loss is the mean over N tokens of -log
# p, where p is the probability that the softmax of the logits gives to the right character. The gradient of the logit
# of the right character is (p - 1) / N, and that of any other character is p / N, with the probability of that one.
# Here a micro-batch has 512 tokens, so that N is 512 · 1024. At first p is about 1/83 for each of the 83 characters.
#
# **Predict.** Anything below 2^-25 = 3.0e-8, half the smallest float16, becomes 0. What fraction of the gradients of
# the logits becomes 0 in the first step: "hardly any", "half" or "nearly all"?

# %% tags=["predict"]
lost_logits = "nearly all"  # 1/83 / (512 * 1024) is 2.3e-8

# %%
from itertools import pairwise

from course.labs.l03_step import Batches, narrow_model
from course.labs.l03b_by_hand import trained
from course.progress import status

batches = Batches()
tokens, targets = batches(0)

# %% tags=["by-hand"]
from course.labs.l03_step import autocast
from labcode.models import gpt


def loss_of(model, batch, dtype):
    """The loss of a batch, computed in this dtype."""
    tokens, targets = batch
    with autocast(dtype):
        return gpt.loss(model(tokens), targets)

def in_one_row(model):
    """All gradients of a model."""
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    return torch.cat([grad.flatten() for grad in grads])

# %%
def gradients(model, dtype, factor):
    """All gradients of `factor * loss`."""
    model.zero_grad()
    loss = loss_of(model, batches(0), dtype)
    (loss * factor).backward()
    return in_one_row(model)

# %%
first = gradients(narrow_model(), torch.float32, 1 / 1024)
model_after, _ = trained(torch.float32, batches)
later = gradients(model_after, torch.float32, 1 / 1024)

logits = narrow_model()(tokens).detach().requires_grad_()
(gpt.loss(logits, targets) / 1024).backward()
SIZES = {
    "logits, first step": logits.grad.flatten(),
    "weights, first step": first,
    "weights, later": later,
}
lost = {}
for what, true in SIZES.items():
    lost[what] = (true.abs() < 2**-25).float().mean().item()
found = lab.part_in_words(lost["logits, first step"])
compare("lost of the logits", lost_logits, found, options=lab.PARTS)
for what, true in SIZES.items():
    coarse = (true.abs() < 2**-14).float().mean().item()
    print(f"{what}: {lost[what]:.0%} become 0, {coarse:.1%} are at most subnormal")

# %% [markdown]
# The picture shows these gradients, computed in float32, over what float16 can hold; "later" is after 32 steps. The
# height is how many gradients have this size. What lies on the left becomes 0.

# %% tags=["figure"]
plot.gradient_range(
    SIZES | {"later, times 2^16": later * 2**16},
    least=2**-25,
    most=65504,
    caption="18.gradients",
)

# %% [markdown]
# So the right characters are pushed up, but most of the wrong ones are not pushed down at all. All gradients further
# down the model are computed from what is left, and nearly all that are not 0 are subnormal: they have lost digits.
#
# The remedy is to multiply the loss by s before backward. Backward is linear, so all gradients are multiplied by s.
# Before the optimizer they are divided by s in float32. If s is a power of two, nothing is rounded on the way.
#
# How large may s be? The largest float16 is 65,504. For example, with a largest gradient of 0.5 and s = 2^16 the
# largest scaled one is 32,768, which fits, and with s = 2^17 it would be 65,536, which does not.
#
# Here is the largest gradient of our loss itself, not of loss / 1024.

# %%
largest = gradients(narrow_model(), torch.float32, 1).abs().max().item()
print(f"largest gradient: {largest:.4f}")

# %% [markdown]
# **Predict.** What is the largest power of two that fits? Compute it.

# %% tags=["predict"]
largest_scale = 2 ** math.floor(math.log2(65504 / largest))

# %%
fitting = 1
while gradients(narrow_model(), torch.float16, 2 * fitting).isfinite().all():
    fitting *= 2
compare("largest scale", largest_scale, fitting, within=1)

# %% [markdown]
# During training the gradients change, and with them the best s. So it is found by trying, **dynamically**:
#
# - begin large, with 2^16;
# - if any gradient is not finite, skip this update and halve s;
# - after 2000 good steps in a row double s.
#
# A skipped step costs little. It happens a few times at the start, and then about once in 2000 steps.

# %% [markdown] tags=["exercise"]
# ### Exercise 18.2 · A dynamic loss scaler
#
# Write the three methods. `params` may be a generator, such as `model.parameters()`: loop over it once. About 15 lines.
#
# - `backward` computes the gradients of `scale * loss`. The loss itself stays as it is, because it is logged.
# - `unscale` divides every `.grad` by the scale, and returns whether **all** of them are finite. (If one is not, nobody
#   uses the gradients any more.) A parameter that took no part has `.grad` None. `tensor.isfinite()` is
#   False for inf and NaN.
# - `update` gets that answer and changes `scale`, by the rules above.

# %% tags=["exercise"]
class Scaler:
    """A dynamic loss scale."""

    def __init__(self, scale=2.0**16, growth_interval=2000):
        self.scale = scale
        self.growth_interval = growth_interval
        self.good_steps = 0  # in a row

    def backward(self, loss):
        """Compute the gradients of `scale * loss`."""
        ### BEGIN SOLUTION
        (loss * self.scale).backward()
        ### END SOLUTION

    def unscale(self, params):
        """Divide all gradients by the scale; True if all of them are finite."""
        ### BEGIN SOLUTION
        finite = True
        for param in params:
            if param.grad is None:
                continue
            param.grad /= self.scale
            if not param.grad.isfinite().all():
                finite = False
        return finite
        ### END SOLUTION

    def update(self, finite):
        """Halve the scale, count a good step, or double it."""
        ### BEGIN SOLUTION
        if not finite:
            self.scale /= 2
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.scale *= 2
            self.good_steps = 0
        ### END SOLUTION

# %% tags=["check"]
check("18.2", Scaler)

# %% [markdown]
# PyTorch has this as `torch.amp.GradScaler`. labcode's (`labcode/train/loss_scale.py`) decides by the norm of the whole
# gradient: the norm is the same number on each rank, so all ranks skip the same steps without asking each other.
#
# Let us watch PyTorch's scaler at work: 40 steps in float16, now on the loss itself. The scale begins at 2^20, which is
# too large, and is doubled after 8 good steps in a row, so that something happens in so short a time.
#
# **Predict.** You have seen above which scale fits. How many updates are skipped before the first one is made? (The
# batches differ a little, so a factor of 1.3 is allowed.)

# %% tags=["predict"]
left_out = 4  # 2^20, 2^19, 2^18 and 2^17 overflow, 2^16 fits

# %%
model = narrow_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=8)
scales = []
for step in range(40):
    scales.append(scaler.get_scale())
    optimizer.zero_grad()
    loss = loss_of(model, batches(step), torch.float16)
    scaler.scale(loss).backward()
    scaler.step(optimizer)  # leaves the update out if a gradient is not finite
    scaler.update()
    status(f"step {step + 1} of 40")
scales.append(scaler.get_scale())
status()

# %%
falls = [after < before for before, after in pairwise(scales)]
compare("left out at first", left_out, falls.index(False), within=1.3, found="counted")

# %% tags=["figure"]
print(f"left out in all: {sum(falls)} of {len(falls)} updates")
powers = [math.log2(scale) for scale in scales]
plot.lines({"scale": powers}, caption="18.scale")

# %% [markdown]
# If the scale is doubled too early, an update is lost, or a few where the gradients have grown meanwhile. With 2000
# good steps between two attempts that is nothing.
#
# **Takeaway: float16 loses the small gradients, beginning with those of the logits. Multiplying the loss by s moves all
# gradients into the range. s is found by trying: halved after an overflow, doubled after 2000 good steps.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* What goes wrong: `isinf` alone (inf - inf is NaN), a counter that is not reset, `finite` of the
# last parameter only. Ask what happens to a model whose loss is NaN at any scale. (GradScaler halves s for ever and
# skips every step: watch s in your log.)

# %% [markdown]
# ## 3. A training in float16 (optional, 34 min)
#
# A scaler is one part of a step. Now the whole step, with what belongs to it in practice: several micro-batches, and
# **clipping** (if the norm of all gradients is larger than `max_norm`, they are scaled down together to that norm).

# %%
from torch import nn

from course.labs.l03_step import NUM_STEPS, Batches, narrow_model
from course.labs.l18_by_hand import in_one_row, loss_of
from course.progress import status
from labcode.models import gpt

batches = Batches()

# %% [markdown] tags=["exercise"]
# ### Exercise 18.3 · A step in float16
#
# Write the step. It may use the three methods of exercise 18.2; the check brings its own scaler.
#
# - `micro_batches` is a list of (tokens, targets), which stays as it is. The loss of one is `gpt.loss(model(tokens),
#   targets)`, and that of a step is the mean of theirs. Each has a backward of its own, so that only the activations of
#   one are in memory.
# - A step begins without the gradients of the step before.
# - Forward and loss run within `torch.autocast("cpu", dtype=torch.float16)`, backward outside of it.
# - `nn.utils.clip_grad_norm_(params, max_norm)` clips. Where does it belong?
# - If a gradient is not finite, the weights and the optimizer's state stay as they are, and the scaler has to know.
#   What becomes of the gradients of such a step does not matter.
#
# About 10 lines.

# %% tags=["exercise"]
def train_step(model, optimizer, scaler, micro_batches, max_norm):
    """One update from all micro-batches together."""
    ### BEGIN SOLUTION
    optimizer.zero_grad()
    for tokens, targets in micro_batches:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = gpt.loss(model(tokens), targets)
        scaler.backward(loss / len(micro_batches))
    finite = scaler.unscale(model.parameters())
    if finite:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    scaler.update(finite)
    ### END SOLUTION

# %% tags=["check"]
check("18.3", train_step)

# %% [markdown]
# Let us train with loss / 1024 in float32, in float16 alone, and in float16 with PyTorch's scaler. AdamW divides a
# gradient by its own size, so the factor 1/1024 by itself does not keep a model from learning. (It matters a little:
# AdamW's eps is no longer small beside such gradients.)
#
# **Predict.** What happens in 32 steps with float16 alone, compared with float32 and the same loss / 1024: "it
# diverges" (NaN, or the loss rises), "it learns less", or "it learns the same"?

# %% tags=["predict"]
float16_alone = "it learns less"

# %%
def small_step(model, optimizer, scaler, step, dtype):
    """A step on loss / 1024: the loss, and which part of the gradients is 0."""
    optimizer.zero_grad()
    loss = loss_of(model, batches(step), dtype)
    scaler.scale(loss / 1024).backward()
    zeros = (in_one_row(model) == 0).float().mean()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)  # leaves the update out if a gradient is not finite
    scaler.update()
    return loss.item(), zeros.item()

# %%
def trained_small(dtype, scaled):
    """Loss and zeros of each step, trained on loss / 1024."""
    model = narrow_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    losses = []
    zeros = []
    for step in range(NUM_STEPS):
        loss, share = small_step(model, optimizer, scaler, step, dtype)
        losses.append(loss)
        zeros.append(share)
        status(f"{dtype}: step {step + 1} of {NUM_STEPS}")
    return losses, zeros

# %%
small = {}
zeros = {}
cases = {
    "float32": (torch.float32, False),
    "float16": (torch.float16, False),
    "float16 with GradScaler": (torch.float16, True),
}
for label, (dtype, scaled) in cases.items():
    small[label], zeros[label] = trained_small(dtype, scaled)
status()

# %%
ends = {}
for label, losses_of_run in small.items():
    ends[label] = sum(losses_of_run[-5:]) / 5
    first_share = zeros[label][0]
    last_share = zeros[label][-1]
    print(f"{label}: loss {ends[label]:.2f} in the last five steps", end="; ")
    print(f"zeros in the first {first_share:.0%}, in the last {last_share:.0%}")

# %%
OUTCOMES = ("it diverges", "it learns less", "it learns the same")
if not ends["float16"] < small["float16"][0]:
    verdict = "it diverges"
elif ends["float16"] > ends["float32"] + 0.1:
    verdict = "it learns less"
else:
    verdict = "it learns the same"
compare("float16 alone", float16_alone, verdict, options=OUTCOMES)

# %% tags=["figure"]
plot.lines(
    small,
    wide="float32",
    reference={"frequencies of characters alone": batches.frequencies_loss},
    caption="18.float16",
)

# %% [markdown]
# There was no NaN and no error, and the loss falls, thanks to the gradients that are large enough. But fewer and fewer
# of the gradients of the weights survive. More are lost than in section 2, where all were computed in float32 and only
# then compared with float16: here each gradient is computed from others that have already underflowed. They also become
# smaller as the model learns, as the picture there shows. After 32 steps the loss has not even come down to that of a
# model that knows the frequencies of the characters and nothing else. With a scaler hardly a gradient is lost, and the
# curve is that of float32.
#
# **Two mistakes of order.** The first is silent: clipping before unscaling. Take a true norm of 1.5 and max_norm 1,
# with s = 2^16.
#
# **Predict.** What norm reaches the optimizer if you clip first and unscale afterwards?

# %% tags=["predict"]
norm_at_the_optimizer = 1 / 2**16

# %% tags=["nbval-check-output"]
weight = nn.Parameter(torch.zeros(1))
weight.grad = torch.tensor([1.5 * 2**16])  # as a scaled backward leaves it
nn.utils.clip_grad_norm_([weight], 1.0)
weight.grad /= 2**16
compare("norm", norm_at_the_optimizer, weight.grad.norm().item(), within=1.05)

# %% [markdown]
# With plain SGD, training would stand still. AdamW divides a gradient by its own size, so it goes on, but not as it
# should. It adds eps = 1e-8 to the size, which is meant to matter for zeros alone. Let us see what that does to the
# gradients of our model if their norm is 2^-16:

# %%
model = narrow_model()
loss_of(model, batches(0), torch.float32).backward()
gradient = in_one_row(model)
size = gradient.abs() / gradient.norm() * 2**-16
kept = size / (size + 1e-8)
print(f"of {len(size):,} weights half are moved by less than {kept.median():.0%} of lr")

# %% [markdown]
# In the first step AdamW moves a weight by lr, up or down, if eps does not matter. Nothing tells you that these steps
# are too small.
#
# PyTorch catches the second mistake, unscaling in the loop over micro-batches. The next cell ends in its error:

# %% tags=["raises-exception"] raises="RuntimeError: unscale_() has already been called"
model = narrow_model()
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler("cpu")
for batch in (batches(0), batches(1)):
    loss = loss_of(model, batch, torch.float16)
    scaler.scale(loss / 2).backward()
    scaler.unscale_(optimizer)  # belongs after the loop

# %% [markdown]
# The gradients of the first half would be divided by s twice.
#
# **Takeaway: scale, backward, unscale, look whether all is finite, clip, step, update the scale. float16 needs it,
# bfloat16 does not.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* What goes wrong: clipping first, a loss that is not divided by m, the whole body under autocast.
# Ask: why is the learning-rate schedule often one step ahead in float16 logs? (`scheduler.step()` was called for a
# skipped step; PyTorch warns.)

# %% [markdown]
# ## 4. Eight bits: the rounding (core, 13 min)
#
# To **cast** a number to a format means to take the nearest number that the format has. What if two are equally near?
# Always taking the larger one would make sums too large in the long run. The rule is **to nearest, ties to even**: of
# the two, take the one whose last bit is 0. `torch.round` does this with whole numbers: it gives 2 for 2.5 and 4 for
# 3.5.
#
# So the recipe is: divide by the spacing, round to a whole number, multiply by the spacing. For example, x = 21 in e4m3
# has the spacing 2. 21/2 = 10.5 lies between 10 and 11, 10 is even, and so the result is 20. And 27/2 = 13.5 becomes 14,
# so 27 becomes 28.
#
# A number that is too large can become the largest number (it **saturates**), infinite, or *not a number*. In training
# it saturates, because one wrong number is better than a whole tensor of *nan*. PyTorch's own cast to e4m3 has saturated
# since version 2.13, and gave *nan* before; a cast to e5m2 gives *inf*, which that format has. If you clamp first, you
# get the same on every version.

# %% [markdown] tags=["exercise"]
# ### Exercise 18.4 · The cast to e4m3
#
# Write the cast for a float32 tensor of any shape. The result is a float32 tensor whose values are numbers of e4m3.
# What is too large saturates at ±448, infinities too; *nan* stays *nan*, and a small negative number becomes -0.0. Use
# arithmetic alone, without an 8-bit dtype. `torch.frexp(x)` works as `math.frexp` does, and gives (0, 0) for zeros.
# `torch.ldexp(y, n)` is y · 2^n, exactly. About 6 lines.
#
# The check compares 130,000 numbers with PyTorch's cast of clamped numbers, in every bit: every number of the format,
# the middle between any two of them, the float32 next to each of these, tiny ones, huge ones.

# %% tags=["exercise"]
def to_e4m3(x):
    """The nearest numbers of e4m3, ties to even, as float32."""
    ### BEGIN SOLUTION
    _, n = torch.frexp(x)
    exponent = (n - 1).clamp(min=-6)
    spacing = torch.ldexp(torch.ones_like(x), exponent - 3)
    rounded = torch.round(x / spacing) * spacing
    return rounded.clamp(-448.0, 448.0)
    ### END SOLUTION

# %% tags=["check"]
check("18.4", to_e4m3)

# %% [markdown]
# labcode's version, for any format, is `formats.cast` in `labcode/precision/formats.py`.
#
# **Takeaway: a cast is a division, a rounding and a multiplication. It loses at most half a spacing, except at the two
# ends of the range: small numbers become zero, and large ones saturate.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* The mistakes: rounding the exponent up (`log2` and `round`), `floor` for `round`, forgetting
# that a number just below 2^-6 has the spacing of the subnormal ones. `log2().floor()` is off for the float32 directly
# below a power of two, which the check shows. Ask: is the cast of a cast the same? (Yes; float16's, too.)

# %% [markdown]
# ## 5. What is lost where: a scale for each tensor (core, 18 min)
#
# Now real numbers. `lab.tensors()` trains a small GPT for 40 steps and takes three tensors of one linear layer in the
# middle of it: its input, its weight, and the gradient of its output. The picture shows how often each size occurs, on
# the ruler of powers of two. The grey part is what e4m3 can hold.

# %% tags=["figure"]
tensors = lab.tensors()
plot.gradient_range(
    {name: tensor.numpy() for name, tensor in tensors.items()},
    least=2**-10,
    most=448,
    where="e4m3",
    caption="18.tensors",
)

# %% [markdown]
# The largest numbers of this gradient are about 2^-13, and most are around 2^-17.
#
# **Predict.** Whatever is less than half of the smallest number becomes zero. What fraction of the gradient is lost in
# e4m3, whose smallest number is 2^-9: "hardly any", "half", or "nearly all"? And in e5m2, whose smallest number is
# 2^-16?

# %% tags=["predict"]
lost_in_e4m3 = "nearly all"
lost_in_e5m2 = "half"  # what is below 2^-17, the half of 2^-16

# %%
gradient = tensors["gradient of the output"]
in_use = gradient != 0

def share_lost(x, dtype):
    """Of the numbers that are not zero, the fraction that is zero after the cast."""
    return (x.to(dtype).float()[in_use] == 0).float().mean().item()

for name, dtype, guess in (("e4m3", E4M3, lost_in_e4m3), ("e5m2", E5M2, lost_in_e5m2)):
    share = share_lost(gradient, dtype)
    compare(name, guess, lab.part_in_words(share), options=lab.PARTS)
    print(f"{name}: {share:.0%} are lost")
print(f"largest: 2^{math.log2(gradient.abs().max()):.1f}")

# %% [markdown]
# float16 has the same trouble (section 2), and its cure is one number for the whole model, by which the loss is
# multiplied. With eight bits one number is not enough: input, weight and gradient lie in different places on the ruler,
# and so do those of other layers. So every tensor gets a **scale** of its own:
#
# 1. `amax` is the largest |x| of the tensor;
# 2. `scale` = largest number of the format / amax, so that the largest number lands at the end of the range;
# 3. cast `x · scale`, and keep the scale beside the 8-bit tensor;
# 4. to get x back, divide by the scale. This is called **dequantising**.
#
# For example, amax = 0.014 and e4m3 give the scale 448 / 0.014 = 32,000. Here is the same gradient with its own scale:

# %%
scale = 448 / gradient.abs().max()
lost = share_lost(gradient * scale, E4M3)
print(f"with the scale {scale:,.0f}: {lost:.2%} are lost")

# %% [markdown]
# With such a scale only the smallest numbers beside much larger ones can be lost. Both go into the same sums, so the loss
# hurts little. (It hurts when a single number is so large that it sets the scale for all the others: see section 10.)

# %% [markdown] tags=["exercise"]
# ### Exercise 18.5 · Quantise
#
# Return the 8-bit tensor and its scale, a float32 tensor without dims. `dtype` is `torch.float8_e4m3fn` or
# `torch.float8_e5m2`, `torch.finfo(dtype).max` its largest number, and `tensor.to(dtype)` the cast. A tensor of zeros
# has no amax to divide by, so its scale is 1. `x` itself must stay as it is, and it may have any float dtype: compute in
# float32. 4 to 6 lines.

# %% tags=["exercise"]
def quantize(x, dtype):
    """(x · scale in 8 bits, the scale): amax lands at the end of the range."""
    ### BEGIN SOLUTION
    largest = torch.finfo(dtype).max
    amax = x.abs().max().float()
    scale = torch.where(amax > 0, largest / amax, torch.ones_like(amax))
    return (x.float() * scale).to(dtype), scale
    ### END SOLUTION

# %% tags=["check"]
check("18.5", quantize)

# %% [markdown]
# **Takeaway: an 8-bit tensor consists of 8-bit numbers and one scale. The scale puts the largest number at the end of
# the range. Then a ratio of 2^18 (e4m3) or 2^32 (e5m2) between the largest and the smallest number is enough for nearly
# everything.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* `x.max()` instead of `x.abs().max()` is the classic mistake: it passes for activations behind a
# ReLU. Ask: why does e5m2 exist if e4m3 with a scale is enough here? (Gradients spread wider than activations; FP8's
# authors measured both, and Transformer Engine takes e5m2 for them by default.)

# %% [markdown]
# ## 6. Delayed scaling (core, 22 min)
#
# What `quantize` does is called **current scaling**: the scale of a tensor comes from the tensor itself. The tensor is
# read twice, once for the amax and once for the cast. On a GPU an 8-bit matmul is so fast that the extra pass matters.
# And where several ranks have to use the same scale (section 9), all of them wait for an all-reduce **before each
# matmul**.
#
# **Delayed scaling** takes the scale from the past. Each tensor of each layer has a **history** of the amaxes of its
# last steps. The scale of this step is computed from the largest of them, before the tensor exists, and the amax of this
# step is recorded for later. So each tensor is read only once, and the amaxes of all layers are all-reduced together,
# once per step.
#
# $$\text{scale} = \frac{\text{largest number of the format}}{2^{\text{margin}} \cdot \max(\text{history})}$$
#
# The **margin** leaves room for growth: with margin 1 the next tensor may be twice as large as anything in the history.
#
# The picture shows a history of 4 steps. The amax is 1 at each step but one: at step 6 it is 8.

# %% tags=["figure"]
plot.delayed_scaling(
    [1, 1, 1, 1, 1, 1, 8, 1, 1, 1, 1, 1, 1], history=4, caption="18.delayed",
)

# %% [markdown]
# At step 6 the scale still allows for 1, so everything above 1 saturates. From step 7 on the scale allows for 8, as
# long as the 8 is in the history. During this time the ordinary tensors leave the three upper powers of two unused, and
# lose small numbers at the other end. With a history of 16 steps this would last for 16 steps. With a margin of 3 no
# step would saturate, but those three powers of two would be unused all the time.

# %% [markdown] tags=["exercise"]
# ### Exercise 18.6 · Delayed scaling
#
# Write the class for one tensor. `scale()` is called before the tensor exists, and `record(amax)` after it, with a
# Python number. Before the first record there is no history, and the scale is 1. Three cases occur in practice:
#
# - all amaxes of the history are 0 (a layer that nothing has reached yet): the scale is 1;
# - an amax is *inf* or *nan* (one bad step): it must not spoil the scale of later steps, so it is **not recorded**;
# - only the last `length` amaxes that were recorded count.
#
# About 12 lines.

# %% tags=["exercise"]
class DelayedScaling:
    """The scale of one tensor, from the amaxes of its last steps."""

    def __init__(self, length, largest, margin=0):
        """Remember `length` steps; `largest` is the format's largest number."""
        ### BEGIN SOLUTION
        self.length = length
        self.largest = largest
        self.margin = margin
        self.history = []
        ### END SOLUTION

    def scale(self):
        """For the tensor of this step."""
        ### BEGIN SOLUTION
        amax = max(self.history, default=0.0)
        if amax == 0:
            return 1.0
        return self.largest / (2**self.margin * amax)
        ### END SOLUTION

    def record(self, amax):
        """Remember the amax of this step."""
        ### BEGIN SOLUTION
        if not math.isfinite(amax):
            return
        self.history.append(amax)
        self.history = self.history[-self.length:]
        ### END SOLUTION

# %% tags=["check"]
check("18.6", DelayedScaling)

# %% [markdown]
# Libraries treat a bad step differently. labcode records an amax of 0 for it, so that such a step takes its place in
# the history. Transformer Engine keeps the scale as it was as long as an *inf* is in the history.
#
# **Takeaway: current scaling is exact and reads each tensor twice. Delayed scaling reads it once and assumes that the
# next tensor is like the last ones. After a jump one step saturates, and for as many steps as the history is long small
# numbers are lost.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* People put the amax of this step into the history before they compute its scale, which is
# current scaling. Ask: with a history of 16, for how many steps is the scale small after one jump? (16.) Which margin
# would you take, and what does each bit of it cost? (A bit of range: numbers up to twice as large become zero.
# Transformer Engine's default is 0, with a history of 1024.)

# %% [markdown]
# ## 7. A linear layer and its three matmuls (core, 29 min)
#
# A linear layer without bias computes y = x Wᵀ. Training it takes three matmuls (GEMMs) of the same cost. With the
# gradient of the output, dy:
#
# | matmul | formula | operands |
# |---|---|---|
# | forward | y = x Wᵀ | x, W |
# | input gradient | dx = dy W | dy, W |
# | weight gradient | dW = dyᵀ x | dy, x |

# %% tags=["figure"]
plot.fp8_linear(caption="18.layer")

# %% [markdown]
# Three tensors are quantised, and each is used twice. x and W take e4m3, which is finer, and dy takes e5m2, which has
# the wider range. Our layer accumulates in float32, so that rounding happens only in the casts of the operands. Since
# both operands were multiplied by their scales, the matmul of the 8-bit tensors is too large by both factors:
#
# $$x \, W^T \approx \frac{(x \, s_x)(W s_w)^T}{s_x \, s_w}$$
#
# On a GPU with FP8, `torch._scaled_mm` does this in one call (since PyTorch 2.10 its public form is
# `torch.nn.functional.scaled_mm`). Here we convert the 8-bit numbers to float32 and multiply those, without the speed.
# The tensor cores of Hopper are less exact than this, because they keep about 14 bits of a sum (DeepSeek-AI 2024,
# section 3.3.2); lesson 22, section 1, emulates such sums and shows what libraries do about it.
#
# There is a second gain. Backward needs x and W again. Autograd keeps them in 16 or 32 bits, while our layer keeps only
# the 8-bit tensors. Here are the bytes for an x of 4096 rows of 512 numbers, and a W of 512 by 512:

# %% tags=["nbval-check-output"]
import torch.nn.functional as F

x = torch.randn(4096, 512, requires_grad=True)
w = torch.randn(512, 512, requires_grad=True)
whole = lab.kept_bytes(F.linear, x, w)
in_8_bits = lab.kept_bytes(lab.fp8_linear, x, w)
print(f"kept for backward: float32 {whole:,} bytes, FP8 {in_8_bits:,} bytes")

# %% [markdown]
# A quarter, as expected, plus the two scales. Most of it is x. W in float32 is the parameter itself, which is in memory
# anyway, and its copy in 8 bits comes on top. In a real layer x has many more rows than W, so the gain stays.

# %% [markdown] tags=["exercise"]
# ### Exercise 18.7 · The FP8 linear layer
#
# Write forward and backward of an `autograd.Function`, with current scaling. `lab.quantize` is a finished version of
# your `quantize`. `q.float() / scale` dequantises.
#
# - x is [..., in], W is [out, in]: x may have any number of dims before the last, so flatten them for the matmul, and
#   give the results the shapes that they must have.
# - Keep the 8-bit tensors for backward, not x and W.
# - Matmuls are computed in float32; y, dx and dW have the dtype of x, of x and of W.
# - Quantise dy once, in e5m2.
#
# `ctx.save_for_backward` keeps tensors; anything else can be an attribute of `ctx`. About 25 lines.

# %% tags=["exercise"]
class Fp8Linear(torch.autograd.Function):
    """y = x Wᵀ with all three matmuls of 8-bit operands."""

    @staticmethod
    def forward(ctx, x, weight):
        ### BEGIN SOLUTION
        rows = x.reshape(-1, x.shape[-1])
        x8, x_scale = lab.quantize(rows, E4M3)
        w8, w_scale = lab.quantize(weight, E4M3)
        ctx.save_for_backward(x8, x_scale, w8, w_scale)
        ctx.dtypes = (x.dtype, weight.dtype)
        y = (x8.float() / x_scale) @ (w8.float() / w_scale).T
        return y.to(x.dtype).reshape(*x.shape[:-1], weight.shape[0])
        ### END SOLUTION

    @staticmethod
    def backward(ctx, dy):
        ### BEGIN SOLUTION
        x8, x_scale, w8, w_scale = ctx.saved_tensors
        x_dtype, w_dtype = ctx.dtypes
        rows = dy.reshape(-1, dy.shape[-1])
        dy8, dy_scale = lab.quantize(rows, E5M2)
        gradient = dy8.float() / dy_scale
        dx = gradient @ (w8.float() / w_scale)
        dw = gradient.T @ (x8.float() / x_scale)
        dx = dx.to(x_dtype).reshape(*dy.shape[:-1], w8.shape[1])
        return dx, dw.to(w_dtype)
        ### END SOLUTION

# %% tags=["check"]
check("18.7", Fp8Linear)

# %% [markdown]
# In labcode's version the core is the same. It also has a bias, weights under autocast, and a weight gradient that can
# be put off (lesson 12). A cast has `.rows` and `.columns`, usually the same tensor. They differ only for the block
# scaling of section 8, where a block lies along the dimension that a matmul sums over, and the two matmuls that use a
# tensor sum over different dims.

# %%
show_source(fp8._Fp8Linear)

# %% [markdown]
# Will a model train with operands that are wrong by up to a sixteenth, and those of dy by up to an eighth? Two things
# speak for it. An element of the result is a sum of hundreds of terms whose rounding errors have both signs, so that
# they largely cancel. And an update, which is often a thousandth of its weight, would be lost in 8 bits, but the
# weights that are updated stay in float32.
#
# **Takeaway: a linear layer in FP8 casts three tensors, and each is used in two of the three matmuls. Only the operands
# have 8 bits: accumulation, results, the weights themselves and the optimizer state stay in 16 or 32.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* The core of the lesson. People quantise dy in e4m3, or quantise it twice. They keep x and W for
# backward, which is correct and saves nothing. Ask: which of the three matmuls would you leave in bfloat16 first if
# training became unstable? (The weight gradient: it goes straight into the update. torchao's `rowwise_with_gw_hp` does
# this.)

# %% [markdown]
# ## 8. A model in FP8 (core, 16 min)
#
# `fp8.Fp8(recipe).convert(model)` of labcode converts every linear layer except the last one, the head, which computes
# the logits. It stays in higher precision, as is usual, because its errors go straight into the loss.
#
# We train the same small GPT in five ways, on the same batches (this takes half a minute): in float32, in bfloat16, and
# in FP8 with delayed, current and block scaling. **Block scaling** gives every 32 numbers a scale of their own, a power
# of two. The format is called MXFP8. All its numbers are e4m3 here, those of gradients too, as is the default in
# Transformer Engine.
#
# **Predict.** After 80 steps, by about how much do the losses in bfloat16 and in FP8 differ: "0.5 %", "5 %" or "50 %"?

# %% tags=["predict"]
losses_differ_by = "0.5 %"

# %%
RECIPES = {
    "float32": None,
    "bfloat16": None,
    "FP8, delayed": fp8.DelayedScaling(history_length=16),
    "FP8, current": fp8.CurrentScaling(),
    "FP8, block": fp8.BlockScaling(),
}

def losses_of(name, steps=80):
    """The loss of each step."""
    recipe = RECIPES[name]
    if recipe is None:
        return lab.train(lab.new_model(), steps, bfloat16=name == "bfloat16")
    in_fp8 = fp8.Fp8(recipe)
    model = in_fp8.convert(lab.new_model())
    return lab.train(model, steps, bfloat16=True, after_step=in_fp8.finish_step)

losses = {name: losses_of(name) for name in RECIPES}

# %%
last = {name: sum(values[-20:]) / 20 for name, values in losses.items()}
apart = abs(last["FP8, delayed"] / last["bfloat16"] - 1)
SIZES = {"0.5 %": 0.005, "5 %": 0.05, "50 %": 0.5}
distance = {words: abs(size - apart) for words, size in SIZES.items()}
nearest = min(distance, key=distance.get)
compare("FP8, bfloat16", losses_differ_by, nearest, options=SIZES)
for name, value in last.items():
    print(f"{name:13} {value:.3f}")

# %% tags=["figure"]
differences = {}
for name in ("float32", "FP8, delayed", "FP8, current", "FP8, block"):
    pairs = zip(losses[name], losses["bfloat16"])
    differences[name] = lab.smooth([own - other for own, other in pairs])
other_start = lab.train(lab.new_model(seed=1), 80, bfloat16=True)
pairs = zip(other_start, losses["bfloat16"])
band = [abs(size) for size in lab.smooth([own - other for own, other in pairs])]
plot.lines(
    differences,
    bands={"bfloat16, another start": ([-size for size in band], band)},
    caption="18.differences",
)

# %% [markdown]
# The loss falls by more than a nat and a half, and the differences are about a thousandth of one. The grey band shows
# what another random start changes in bfloat16. It is much wider, except where the losses of the two starts cross, so
# the order of the four lines says nothing about the recipes. That FP8 ends where 16 bits do is what its authors found
# for models of many sizes (Micikevicius et al. 2022). It is no proof for *your* model, so keep an eye on the tensors,
# which is the subject of lesson 19.
#
# Here FP8 is slower than float32, because we emulate it. A GPU that has it multiplies up to twice as fast as in
# bfloat16, by its data sheet. How much of that is left depends on the casts, each of which has to read and write a whole
# tensor. Transformer Engine does a cast in one kernel. By its documentation the linear layers of a model with 5 billion
# parameters (hidden size 4096), casts included, are 1.69 times as fast as in bfloat16 on an H200 NVL with delayed
# scaling, 1.57 times with current scaling, and 1.41 times with a scale for each block of 128. labcode's amax, cast and
# transpose are separate passes: on an H100 (`benchmarks/fp8.py`, forward and backward together) its layer of
# 16,384 × 16,384 takes 0.7 of the time of bfloat16, and one of 4,096 takes four times as long.
#
# ### Which layers suffer
#
# A loss sums up everything. Let us look at single layers: after 40 steps we compute the gradient of each weight in
# float32 and in FP8, and measure how far they are apart, relative to the gradient's norm. This time we also let the head
# compute in FP8, and we try block scaling in two ways. A block is divided by a power of two. The standard of the format,
# by the Open Compute Project (OCP), suggests the one with which the largest number of the block gets the exponent of
# e4m3's largest one, which is 8. Then that number lies between 256 and 512. The other way is to take the smallest power
# of two with which it *fits*.
#
# The largest number of a block is often the gradient of the logit of the right character: (p - 1) / N, where N is the
# number of tokens and a power of two here. At the beginning of training p is about 1/83, so that gradient is 0.988 / N
# in size. The standard's way scales it to 0.988 · 512 = 506, and e4m3 ends at 448.

# %% tags=["figure"]
from labcode.precision import formats

by_the_standard = fp8.BlockScaling(formats.MXFP8_OCP)
variants = {
    "current, head in float32": lab.gradient_errors(fp8.CurrentScaling()),
    "current, head in FP8": lab.gradient_errors(fp8.CurrentScaling(), head_too=True),
    "blocks by the standard": lab.gradient_errors(by_the_standard, head_too=True),
    "blocks that fit": lab.gradient_errors(fp8.BlockScaling(), head_too=True),
}
table = {}
for layer in ("attention.qkv", "attention.proj", "mlp.up", "mlp.down"):
    of_layer = {}
    for name, errors in variants.items():
        of_layer[name] = errors[f"blocks.0.{layer}"]
    table[layer] = of_layer
plot.bars(table, caption="18.head")

# %% [markdown]
# These are the layers of the first block, which backward reaches last. The error of a gradient does not come from its
# own layer alone: backward begins at the head, and what is lost there is missing in all earlier layers.
#
# - With current scaling the gradients of the logits are in e5m2. Between its last power of two, 32,768, and its end it
#   has only four numbers, and most right characters have their gradients there.
# - With blocks by the standard a gradient above 448 saturates. That is the case for each right character whose p is
#   below 1/8: its gradient comes out too small, by up to an eighth. The gradients of weights are off by more than that,
#   because the gradients of a batch's tokens partly cancel, while this error has the same sign in each of them. NVIDIA
#   found that training a language model can diverge from it, and that it does not with scales that fit (Mishra et al.
#   2025). labcode's recipe, like that of Transformer Engine, uses those.
# - With blocks that fit, a head in FP8 costs next to nothing here. Usually it stays in higher precision all the same,
#   because it is one layer of many, and its errors go into all others.
#
# ### How far one scale carries
#
# Our eighty steps of a small model do not decide whether one scale for each tensor is enough. Micikevicius et al.
# (2022) trained models of up to 175 billion parameters with it, with FP8 emulated as here, and got results like those
# in 16 bits. Fishman et al. (2024) trained Llama 2 7B for longer, on accelerators that have FP8. After some 200 billion
# tokens the **outliers** behind its SwiGLU, single features far larger than all others (SwiGLU is a gated MLP, lesson
# 10), had grown until delayed scaling failed and the loss blew up. They cured it by scaling each feature of SwiGLU's
# output before the cast, and then trained as in bfloat16. To cope with outliers, DeepSeek-V3 was trained with a scale
# for every 128 numbers of an activation and for every 128 × 128 numbers of a weight, and with sums in float32
# (DeepSeek-AI 2024). Transformer Engine calls that recipe `Float8BlockScaling`.
#
# **Takeaway: here FP8 with one scale for each tensor trains as bfloat16 does. One long run failed with it until its
# SwiGLU was changed, and others use a scale for each block. What the head loses, all layers lose, so it stays in higher
# precision.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Ask: what would a loss curve look like if FP8 failed? (Usually it leaves bfloat16's late, or it
# spikes; rarely from the start.)

# %% [markdown]
# ## 9. One scale for several ranks (core, 36 min)
#
# A tensor is often spread over ranks, and then each rank knows only the amax of its own part. Take fully sharded data
# parallelism (lesson 13): before each layer an all-gather makes the whole weight out of shards. In 8 bits it moves half
# the bytes of bfloat16. But if each rank has cast its shard with its own scale, the gathered tensor is a patchwork.
# Suppose that the amax is 0.5 on rank 0 and 2 on rank 1. The scales are 448 / 0.5 = 896 and 448 / 2 = 224, and
# dequantising the whole tensor with 896 makes the numbers of rank 1 four times too small.
#
# So the ranks first agree on one amax, the largest of all, by an all-reduce of 4 bytes with the operation MAX. The ranks
# that do this together are the **amax reduction group**. labcode calls it `group`, and Transformer Engine
# `amax_reduction_group` (`fp8_group` in older versions). All ranks that hold parts or copies of the same tensor belong
# to it:
#
# | axis | what it does to x, W, dy | why the ranks share a scale |
# |---|---|---|
# | tp | cuts W and some of x and dy | parts may be gathered in 8 bits; results are those of one process |
# | fsdp | cuts W; other samples, as dp | shards may be gathered in 8 bits |
# | dp | other samples: other x and dy | all copies of a layer compute alike, and a checkpoint has one history |
# | pp | other layers | they share none |
#
# The next cell counts the all-reduces of one step of a model with 48 linear layers, which have 3 tensors each:

# %% tags=["nbval-check-output"]
import torch.distributed as dist

from labcode.comm.counting import counted


def count_all_reduces(recipe):
    """(number of all-reduces, their bytes) of a step of a model with 48 layers."""
    layers = [torch.nn.Linear(8, 8) for _ in range(48)]
    in_fp8 = fp8.Fp8(recipe, dist.group.WORLD, skip=())
    model = in_fp8.convert(torch.nn.Sequential(*layers))
    x = torch.ones(4, 8, requires_grad=True)
    with counted() as calls:
        model(x).sum().backward()
        in_fp8.finish_step()
    return len(calls), sum(call.num_bytes for call in calls)

for recipe in (fp8.DelayedScaling(), fp8.CurrentScaling()):
    num_calls, num_bytes = ranks.run(count_all_reduces, recipe)[0]
    name = type(recipe).__name__
    print(f"{name:15} {num_calls:4} all-reduces, {num_bytes} bytes in all")

# %% [markdown] tags=["exercise"]
# ### Exercise 18.8 · The amaxes of a group
#
# `amaxes` is a list of tensors without dims, those of this rank. Return a list with the largest of each over the group,
# in the same order. There may be hundreds of them, so use **one** collective of tensors. (A function that sends Python
# objects, such as `all_gather_object`, makes two: it sends their size first.) The given tensors stay as they are. 3 to 5
# lines.

# %% tags=["exercise"]
def reduce_amaxes(amaxes, group):
    """The largest of each amax over the group."""
    ### BEGIN SOLUTION
    together = torch.stack(amaxes)
    dist.all_reduce(together, op=dist.ReduceOp.MAX, group=group)
    return list(together)
    ### END SOLUTION

# %% tags=["check"]
check("18.8", reduce_amaxes, ranks)

# %% [markdown] tags=["exercise"]
# ### Exercise 18.9 · Gather a weight in 8 bits
#
# Each rank of the group has the same number of rows of a weight. Return the whole weight as a tensor of
# `torch.float8_e4m3fn`, and its scale. It must equal what a single process would get by quantising the whole weight.
# You may send one byte for each number, and a few for the amax. gloo does not know 8-bit floats: `q.view(torch.uint8)`
# shows the same bytes as whole numbers, and `.view(torch.float8_e4m3fn)` turns them back. As in exercise 18.5, a weight
# of nothing but zeros has the scale 1, and amax and scale are computed in float32. About 10 lines.

# %% tags=["exercise"]
def gather_fp8(shard, group):
    """(the whole weight in e4m3, its scale) from the rows of all ranks."""
    ### BEGIN SOLUTION
    amax = shard.abs().max().float()
    dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
    scale = torch.finfo(torch.float8_e4m3fn).max / amax
    if amax == 0:
        scale = torch.ones_like(amax)
    own = (shard.float() * scale).to(torch.float8_e4m3fn).view(torch.uint8)
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own, group=group)
    return torch.cat(parts).view(torch.float8_e4m3fn), scale
    ### END SOLUTION

# %% tags=["check"]
check("18.9", gather_fp8, ranks)

# %% [markdown]
# What happens without a group? First we look at the loss of the first step, with current scaling, on four ranks that
# are used in three ways: DDP, where each rank has a quarter of the samples; tensor parallelism, where each has a
# quarter of each weight; and FSDP, where each has a quarter of the samples, and gathers each weight before casting it.
#
# **Predict.** In how many of the three ways is the loss that of one process, up to the order of sums: 0, 1, 2 or 3?
# First if all ranks share their scales, and then if each rank has its own.

# %% tags=["predict"]
equal_if_shared = 3
equal_if_not = 0

# %% tags=["nbval-check-output"]
in_fp8 = fp8.Fp8(fp8.CurrentScaling())
(loss_of_one,) = lab.train(in_fp8.convert(lab.new_model()), 1)

differences = {}

def equal_losses(share):
    """In how many layouts the first loss is that of one process."""
    count = 0
    for layout in ("DDP", "TP", "FSDP"):
        loss = ranks.run(lab.first_loss, layout, share)[0]
        differences[layout] = loss - loss_of_one
        is_equal = abs(differences[layout]) < 2e-6
        print(f"{layout:5} shared by {share:5} the loss of one process: {is_equal}")
        count += is_equal
    return count

compare("shared by all", equal_if_shared, equal_losses("all"), within=1)
compare("by none", equal_if_not, equal_losses("none"), within=1)

# %% [markdown]
# With shared scales a tensor in 8 bits has the same values, whichever rank holds a part of it. Without them each part
# is rounded to its own grid: under DDP and FSDP these are parts of x, under tensor parallelism parts of W as well. The
# loss is off by this much, of 4.4 nats:

# %%
for layout, difference in differences.items():
    print(f"{layout:5} {difference:+.1e}")

# %% [markdown]
# The roundings are different, but no worse. (Block scaling needs none of this: a block lies on one rank, together with
# its scale.)
#
# Now delayed scaling. We train on dp 2 x tp 2, and look at the scale of one tensor: the input of an MLP's second layer,
# which tp cuts. Ranks 0 and 1 are one tp group, ranks 2 and 3 the other.
#
# **Predict.** How many different scales are there on the four ranks if they share none? If the ranks of tp share theirs?
# If all do?

# %% tags=["predict"]
without_sharing = 4
shared_over_tp = 2
shared_over_all = 1

# %% tags=["nbval-check-output"]
for share, guess in {
    "none": without_sharing, "tp": shared_over_tp, "all": shared_over_all,
}.items():
    scales = ranks.run(lab.scale_on_a_grid, share)
    compare(f"share {share}", guess, len(set(scales)), within=1, found="counted")

# %% [markdown]
# No error is raised in any of the three cases. But a run that is to be continued on other ranks, or compared with one
# process, needs one history. By default labcode shares scales over all ranks that have the same layers, and it refuses
# to save a checkpoint when scales differ.
#
# **Takeaway: scales belong to tensors, and tensors are spread over ranks. Reduce the amax over all ranks that have
# parts or copies of the tensor: with delayed scaling this is one small all-reduce a step.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* A forgotten `group=` and SUM instead of MAX are the usual mistakes. Ask: why may dp be left out
# of the group more easily than tp? (No tensor is gathered over dp in 8 bits; gradients are averaged in 16 or 32 bits.)

# %% [markdown]
# ## 10. Open end: a format for each tensor (optional, 26 min)
#
# ### One number that is much too large
#
# Large language models have **outliers**: single features that are up to twenty times larger than all others (Dettmers
# et al. 2022). At a few places they also have **massive activations**, single numbers that are a thousand times larger
# or more (Sun et al. 2024). The amax of such a tensor is that of the outlier. What is left for the others?
#
# With **int8** the 255 values lie at equal distances. If the outlier is 1000 and the others are about 1, then the
# distance is 1000/127 = 7.9, and every ordinary number becomes 0. In e4m3 the distances shrink with the numbers. (The
# error that we measure is the mean of |x̂ - x| / |x|, where x̂ is what becomes of x.)
#
# **Predict.** One feature of 512 is 1000 times larger than the others. By this measure, how much of the ordinary
# numbers is lost in e4m3 with one scale for the tensor: `"a few percent"`, `"a third"`, or `"all of it"`, as in int8?
# (A number may be 448 / 2^-6 = 28,672 times smaller than the largest one and still have all its 3 bits.)

# %% tags=["predict"]
error_in_e4m3 = "a few percent"

# %%
sizes = [1, 10, 100, 1_000, 10_000, 100_000, 1_000_000]
errors = {name: [] for name in ("int8", "e4m3", "mxfp8", "nvfp4")}
for size in sizes:
    x = lab.with_outlier(size)
    ordinary = x.abs() < x.abs().max()
    for name, values in errors.items():
        cast = lab.OPTIONS[name].cast
        values.append(lab.relative_error(x, cast(x), ordinary))

before, with_1000 = errors["e4m3"][0], errors["e4m3"][3]
LOST = {"a few percent": 0.03, "a third": 0.33, "all of it": 1.0}
distance = {answer: abs(lost - with_1000) for answer, lost in LOST.items()}
nearest = min(distance, key=distance.get)
compare("e4m3, 1000", error_in_e4m3, nearest, options=LOST)
print(f"e4m3: {before:.3f} without an outlier, {with_1000:.3f} with one of 1000")

# %% tags=["figure"]
plot.lines(errors, x=sizes, caption="18.outlier")

# %% [markdown]
# This is the argument for floating point in 8 bits: it needs no cure for outliers of a thousand. Blocks go further,
# because an outlier spoils only the other numbers of its own block. That is why formats of 4 bits have blocks. **NVFP4**
# is one: numbers of 4 bits, a scale for each block of 16, which is a number of e4m3, and one float32 for the whole
# tensor, which puts the largest of those scales at the end of their range. At a million NVFP4 fails as well: the scales
# of its blocks reach as far as e4m3 does, and those of the other blocks become zero. (MXFP8's scales are powers of two,
# from 2^-127 on.)
#
# **Takeaway: in e4m3 an outlier of a thousand costs the other numbers little, and one of a hundred thousand more than
# half.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Most of the room expects e4m3 to fail at an outlier of 1000, as int8 does.

# %% [markdown] tags=["exercise"]
# ### Exercise 18.10 · Choose
#
# `options` is a dict from the name of a format to an object with `.bits` (for each number, with its part of the scales)
# and `.cast(x)`, which returns what x is after quantising and dequantising. There are NVFP4, int8, e4m3, e5m2, MXFP8 and
# bfloat16. Return the name of the one with the fewest bits whose error is at most `most_error`; of two with the same
# number of bits, the one with the smaller error; and `None` if there is none. With x̂ for what becomes of x, the error is
# the mean of
#
# $$\frac{|\hat x_i - x_i|}{|x_i|}$$
#
# over all numbers of x that are not zero, and 0 if all of them are. The check has ordinary numbers, an outlier, numbers
# that spread over 40 powers of two, a tensor of zeros, and one with *nan* in it, for which no format is right. About 12
# lines.

# %% tags=["exercise"]
def choose(x, options, most_error):
    """The cheapest format that is good enough for x; None: there is none."""
    ### BEGIN SOLUTION
    best = None
    for name, option in options.items():
        used = x != 0
        error = 0.0
        if used.any():
            error = ((option.cast(x) - x)[used] / x[used]).abs().mean().item()
        good_enough = error <= most_error  # never true of nan
        if good_enough and (best is None or (option.bits, error) < best[:2]):
            best = (option.bits, error, name)
    return best[2] if best else None
    ### END SOLUTION

# %% tags=["check"]
check("18.10", choose)

# %% tags=["nbval-check-output"]
bounds = (0.25, 0.03, 0.005)
print(f"{'':22}" + "".join(f"{bound:>10.1%}" for bound in bounds))
for name, x in lab.cases().items():
    chosen = [lab.cheapest(x, bound) for bound in bounds]
    print(f"{name:22}" + "".join(f"{choice!s:>10}" for choice in chosen))

# %% [markdown]
# Where an error of 25 % is allowed, four bits with a scale for each block are enough for all but the widest of these
# tensors. At 3 % the tensor decides: e4m3 for ordinary numbers, int8 for numbers that are spread evenly, blocks where
# there is an outlier or a wide spread. At half a percent all but zeros need 16 bits. Which error may be allowed is
# answered only by training: in section 8 errors of some percent in every operand changed nothing that could be seen.

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Comparisons with *nan* are False, so a loop that asks `error > most_error` accepts a ruined
# tensor. Ask for a case in which int8 beats e4m3. (Numbers spread evenly and without outliers: its relative error is
# then smaller.)

# %% [markdown]
# ## 11. The same in Transformer Engine (optional, 17 min)
#
# Transformer Engine, NVIDIA's library, has all this in its own layers, which run on NVIDIA GPUs only. Here is code that
# puts one of them on our grid. It runs where the library is installed; elsewhere you can read it and recognise the ideas
# of this lesson. The layouts are those of its guide *Multi-GPU training*, and the names those of version 2.20. Each
# process must have exactly one GPU.
#
# **Data parallel.** `te.TransformerLayer` is a whole block: attention, MLP and their norms. Around it is DDP, as around
# any other model.

# %%
import torch.distributed as dist

from course.labs import l18_transformer_engine as with_te
from labcode.comm.grid import Grid
from labcode.topology import GridShape

show_source(with_te.plain_layer)
show_source(with_te.data_parallel)
show_source(with_te.step)

# %% [markdown]
# `te.autocast` is given the recipe and the amax group, and inside the `with` the layers compute in FP8. With delayed
# scaling the amaxes of forward are reduced over that group when the `with` ends, all in one message, with MAX, as in
# exercise 18.8. Those of backward follow at the end of backward, which stands outside the `with`.
#
# **Tensor and sequence parallel.** A batch can be divided among no more ranks than it has samples. The features of a
# layer, of which there are usually more, can be divided further, and then each rank keeps only a part of the weights.
# The price is communication of activations in every layer (lesson 09, section 4). Therefore the guide takes the GPUs of
# a node as a tp group, and the GPUs with the same place on all nodes as a dp group, which is the order of our grids
# (lesson 08, section 4). The layer has more arguments now.

# %%
show_source(with_te.tensor_parallel)
show_source(with_te.sum_shared_gradients)

# %% [markdown]
# | argument | what it does |
# |---|---|
# | `set_parallel_mode=True` | in attention and in the MLP the first matmul is cut by columns, the second by rows (lesson 09, section 2) |
# | `tp_group` | the ranks that have parts of the weights; the layer communicates with them by itself |
# | `sequence_parallel=True` | between the matmuls each rank holds its own tokens only, [S/t, B, H] (lesson 10, section 3) |
# | `params_dtype` | in which dtype the weights lie; weights in bfloat16 need a float32 copy in the optimizer |
# | `device` | where the weights are made |
#
# Two things are left to you. The weights of norms, and biases behind a matmul that is cut by rows, see the tokens of one
# rank only, so their gradients have to be summed over tp (lesson 10, section 5). Transformer Engine marks these weights
# as `sequence_parallel` and goes no further, nor does the code of the guide. The other thing is the amax group.
#
# Before a matmul that is cut by columns, the tokens of all ranks of tp are gathered, and Transformer Engine gathers them
# in 8 bits. With delayed scaling no scale travels with them. Each rank uses its own for all of them: *Assume scaling
# factors are identical across ranks*, says a comment there (`_all_gather_fp8`). The next cell does the same on
# dp 2 x tp 2, where ranks 0 and 1 are one tp group, ranks 2 and 3 the other. The tokens are random, and one number among
# the first of them is large, as a massive activation is (section 10).
#
# **Predict.** Suppose that the amax group is the dp group, as under data parallelism. How many different scales are
# there on the four ranks? And what fraction of the tokens that a rank gathers does it read with a wrong scale: 0, 1/2
# or 1?

# %% tags=["predict"]
scales_shared_over_dp = 2
part_read_wrong = 1 / 2

# %%
rows = torch.randn(64, 4, 64, generator=torch.Generator().manual_seed(0))
rows[0, 0, 10] = 30.0  # [S, B, H]


def gathered(axes):
    """This rank's scale, and the error of each half of the tokens that it gathers."""
    grid = Grid.create(GridShape(dp=2, tp=2))
    samples = rows.chunk(2, dim=1)[grid.coord("dp")]
    halves = samples.chunk(2)
    own = halves[grid.coord("tp")]
    amax = own.abs().max()
    dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=grid.group(*axes))
    scale = 448 / amax
    sent = (own * scale).to(E4M3).view(torch.uint8)
    received = [torch.empty_like(sent) for _ in range(2)]
    dist.all_gather(received, sent, group=grid.group("tp"))
    errors = []
    for half, in_8_bits in zip(halves, received):
        read = in_8_bits.view(E4M3).float() / scale
        errors.append(((read - half).norm() / half.norm()).item())
    return scale.item(), errors

# %% tags=["nbval-check-output"]
def outcome(axes):
    """How many scales there are, and which part of the tokens is read wrong."""
    scales = set()
    wrong = []
    for scale, errors in ranks.run(gathered, axes):
        scales.add(scale)
        wrong += [error > 0.1 for error in errors]
    return len(scales), sum(wrong) / len(wrong)

num_scales, wrong = outcome(("dp",))
compare("scales", scales_shared_over_dp, num_scales, within=1, found="counted")
compare("read wrong", part_read_wrong, wrong, within=1, found="counted")
for axes in (("dp",), ("tp",), ("dp", "tp")):
    num_scales, wrong = outcome(axes)
    group = " x ".join(axes)
    print(f"amax group {group:7}: {num_scales} different, {wrong:.0%} read wrong")

_, (theirs, own) = ranks.run(gathered, ("dp",))[1]
print(f"over dp, rank 1: error {own:.1%} in its own half, {theirs:.0%} in the other")

# %% [markdown]
# Ranks 0 and 2 agree, and ranks 1 and 3 agree, but no rank agrees with the one whose tokens it reads, and no error is
# raised. So the amax group must contain the tp group. The guide says so, "either directly or as a subset of a larger
# distributed group", and Transformer Engine recommends all of dp and tp, as in `tensor_parallel` above. The guide's own
# code passes `data_parallel_group` here. There it does no harm, since its dp group and its tp group hold the same
# single GPU. Copied as it stands to two GPUs or more, it gives the first line above. (With current scaling the layer
# reduces the amax of such tensors over `tp_group` by itself.)
#
# **Fully sharded.** The layer is plain again, and the wrapper shards the weights. Here is FSDP1, as in the guide, and
# then FSDP2 (lesson 13b, section 7):

# %%
show_source(with_te.fully_sharded_1)
show_source(with_te.fully_sharded_2)

# %% [markdown]
# The layer has no tp group, because it would cut weights that FSDP cuts already. The policy makes each layer a unit of
# its own; Transformer Engine's example says that without it FSDP1 ends in an illegal memory access. Weights are gathered
# in bfloat16 here, and each rank casts them for itself. But x and dy belong to different samples on each rank, so the
# amax group is that of dp, as under DDP.
#
# The guide is older than version 2.20, and some names in it have changed. `te.fp8_autocast` still works, with a
# warning.
#
# | the guide | Transformer Engine 2.20 |
# |---|---|
# | `te.fp8_autocast(fp8_recipe=, fp8_group=)` | `te.autocast(recipe=, amax_reduction_group=)` |
# | `speedometer(..., fp8_autocast_kwargs=)` | `speedometer(..., autocast_kwargs=)` |
# | `torchrun --nprocs_per_node=4` | `torchrun --nproc-per-node=4`; the other, with an s, is refused |
# | `init_process_group("nccl", init_method="file:///tmp/rdzv", ...)` | ranks that meet in a file, which must not be left over from an earlier run; torchrun gives them an address, and `init_process_group("nccl")` is enough (lesson 01, section 1) |
#
# Four lines of the guide need care. `attention_mask=None` is the default and can be left out, and `parallel_transformer`
# in its last line is a misprint for `data_parallel_transformer`. `rank=LOCAL_RANK` is right on one node only; on two
# nodes there would be two ranks 0. And `new_group([LOCAL_RANK])` gives each process a group of its own. Here is what a
# reduction over such groups does on four ranks. (All ranks make all groups, in the same order, as PyTorch demands.)

# %% tags=["nbval-check-output"]
def reduce_alone():
    """This rank's number, summed over a group in which this rank is alone."""
    rank = dist.get_rank()
    groups = [dist.new_group([member]) for member in range(dist.get_world_size())]
    number = torch.tensor(rank)
    dist.all_reduce(number, group=groups[rank])
    return number.item()

print(ranks.run(reduce_alone))

# %% [markdown]
# Each rank gets back its own number. Nothing has been summed, and no error is raised. With such a group DDP averages no
# gradients, and delayed scaling reduces no amaxes: a wrong group leaves each rank silently by itself.
#
# **A step, measured.** The sizes are those of the guide: hidden size 4096, 2048 tokens, 4 samples on each rank. (On a
# CPU this code has been tested with a stand-in for the library only.)

# %%
show_source(with_te.measured_step_s)

why_not = with_te.why_not()
if why_not:
    print(f"No step is measured on this machine. {why_not}")
else:
    gpus = torch.cuda.device_count()
    with Ranks(gpus, device="cuda") as on_gpus:
        for layout in with_te.LAYOUTS:
            step_s = max(on_gpus.run(with_te.measure, layout))
            print(f"{layout:16} on {gpus} GPUs: {1e3 * step_s:.1f} ms")

# %% [markdown]
# **Takeaway: in Transformer Engine the layer is given the tp group, and autocast the amax group. Ranks that gather in 8
# bits must share the scale, so the second contains the first.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* The code of this section has been run on a CPU with a stand-in for the library only
# (`tests/ranks/test_l18_transformer_engine.py`), not with the library; `tests/gpu/test_transformer_engine_gpu.py` waits
# for a machine that has it. Ask: why does current scaling need no group from autocast? (The layer itself knows which
# tensors are gathered, and over which group.)

# %%
ranks.close()

# %% [markdown]
# ## From here to GPUs and SLURM (core, 3 min)
#
# | what | start |
# |---|---|
# | float16 with a dynamic loss scale | `python -m labcode.train gpt_10m --train.dtype float16` |
# | FP8 with delayed scaling | `python -m labcode.train gpt_10m --train.dtype fp8` |
# | another recipe | `--fp8.recipe current`, or `block` for MXFP8 |
# | a longer history, a margin | `--fp8.history_length 1024 --fp8.margin 1` |
# | scales shared over tp alone, or not at all | `--fp8.share tp`, `--fp8.share none` |
# | layers that stay in bfloat16 | `--fp8.skip head down` |
# | on SLURM | `python -m labcode.slurm submit gpt_10m --site perlmutter --nodes 2 --train.dtype fp8` |
#
# With delayed and current scaling labcode calls `torch._scaled_mm` on NVIDIA's GPUs from Ada and Hopper on, where the
# sides of a matrix are multiples of 16, with the same scales and formats. `block`, and everything elsewhere, is emulated:
# on an H100 blocks take 13 to 18 times as long as bfloat16 (`benchmarks/results/fp8_cuda.json`). Transformer Engine has
# the same recipes under the names `DelayedScaling`, `Float8CurrentScaling` and `MXFP8BlockScaling`. It has two more,
# which labcode does not train with: `Float8BlockScaling` (the blocks of DeepSeek-V3) and `NVFP4BlockScaling`.
#
# ## Questions (core, 4 min)
#
# **1.** In a float16 run the scale falls from 65,536 to 1 within twenty steps, and the loss no longer changes. What
# happened?
#
# <details><summary>Answer</summary>
#
# Every step was skipped: some gradient is not finite at any scale. The fault is in the model or in the data (a
# division by zero, the logarithm of 0), not in the range of float16.
# </details>
#
# **2.** Why does FP8 with one scale for each tensor take two formats, and which tensor gets which?
#
# <details><summary>Answer</summary>
#
# Activations and weights get e4m3, which is finer. Gradients spread wider, and get e5m2: with one more bit for the
# exponent there are 32 powers of two between its largest and its smallest number instead of 18. With a scale for each
# block, e4m3 has range enough for the numbers of one block, and all three get it.
# </details>
#
# **3.** A tensor grows tenfold in one step. What happens with current scaling, and what with delayed scaling?
#
# <details><summary>Answer</summary>
#
# Current scaling sees it and takes a smaller scale. Delayed scaling saturates in this step, and then has a smaller
# scale for as many steps as its history is long.
# </details>
#
# **4.** Does FP8 make a model's weights and optimizer state smaller?
#
# <details><summary>Answer</summary>
#
# Not as we have used it: weights and moments stay in float32, and only the operands that are kept for backward and the
# messages that are sent in 8 bits become smaller. But it can: where a model is made under `quantized_model_init`,
# Transformer Engine keeps its weights in FP8, with a float32 copy in the optimizer, and DeepSeek-V3 kept its moments in
# bfloat16.
# </details>
#
# **5.** From lesson 13: fully sharded data parallelism moves each weight twice a step in all-gathers. What does FP8
# change?
#
# <details><summary>Answer</summary>
#
# Each number takes one byte instead of two. The ranks have to agree on the amax of each weight first; exercise 18.8
# sends those of all weights in one all-reduce.
# </details>
#
# ## Recap
#
# | | |
# |---|---|
# | spacing | 2^(e - m): doubles at each power of two |
# | float16 | largest 65,504, smallest 2^-24: multiply the loss by s, divide the gradients by s, then clip |
# | dynamic loss scale | half after an overflow, whose step is skipped; twice after 2000 good steps |
# | e4m3 | largest 448, smallest 2^-9, error at most 1/16 from 2^-6 on |
# | e5m2 | largest 57,344, smallest 2^-16, error at most 1/8 |
# | scale | largest number / (2^margin · amax), one for each tensor |
# | current scaling | amax of the tensor itself; two passes; an all-reduce for each operand whose scale is shared |
# | delayed scaling | largest amax of the history; one pass; one all-reduce a step |
# | block scaling | a scale for each 32 numbers; no all-reduce |
# | three matmuls | y = x Wᵀ, dx = dy W, dW = dyᵀ x |
# | amax group | all ranks with parts or copies of the tensor |
#
# ## Sources
#
# - Micikevicius et al. 2022, *FP8 Formats for Deep Learning*, arXiv:2209.05433: the two formats, training in them.
# - Micikevicius et al. 2017, *Mixed Precision Training*, arXiv:1710.03740: loss scaling.
# - NVIDIA H100 datasheet, 2023: 1,979 TFLOP/s in FP8 and 989 in bfloat16, without sparsity.
# - Transformer Engine, *Using FP8 with Transformer Engine*:
#   <https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/examples/fp8_primer.html>: delayed scaling.
# - PyTorch, pull requests 163856 (`scaled_mm`) and 178817 (casts to e4m3 that saturate).
# - Rouhani et al. 2023, *Microscaling Data Formats for Deep Learning*, arXiv:2310.10537: MXFP8.
# - Mishra et al. 2025, *Recipes for Pre-training LLMs with MXFP8*, arXiv:2506.08027: scales that fit.
# - DeepSeek-AI 2024, *DeepSeek-V3 Technical Report*, arXiv:2412.19437, section 3.3: scales for blocks, 14 bits.
# - Fishman et al. 2024, *Scaling FP8 Training to Trillion-Token LLMs*, arXiv:2409.12517: SwiGLU's outliers.
# - Transformer Engine 2.20.0.dev0, `docs/features/low_precision_training`, August 2026: recipes, speedups, split accumulators.
# - Transformer Engine, *Multi-GPU training*, now part of
#   <https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/examples/advanced_optimizations.html>; names and
#   behaviour of section 11 from the source of 2.20.0.dev0 (`pytorch/quantization.py`, `pytorch/distributed.py`,
#   `pytorch/module/linear.py`, `examples/pytorch/fsdp`).
# - Dettmers et al. 2022, *LLM.int8()*, arXiv:2208.07339: outliers.
# - Sun et al. 2024, *Massive Activations in Large Language Models*, arXiv:2402.17762.
# - Gupta et al. 2015, arXiv:1502.02551: stochastic rounding, which `formats.cast` has too.
