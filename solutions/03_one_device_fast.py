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
# # 03 · One device, fast
#
# In lesson 02 you found where the time of a step goes. In this lesson you take it away, one rung of a ladder after the
# other: smaller numbers, fewer operations, less memory traffic, fewer launches. Each rung helps against one kind of
# cost. So before each one you say what it should gain, and then you measure.
#
# ## Goals
#
# - name the three costs of a step (arithmetic, bytes, launches) and say which of them a setting reduces;
# - say what float32, tf32, bfloat16 and float16 can hold, and why weights stay in 32 bits;
# - write a dynamic loss scaler, and a float16 step that uses it in the right order;
# - write AdamW so that its number of calls does not grow with the number of weights;
# - predict what fusion gains, when compiling pays, and when CUDA graphs do.
#
# **Time**: 130 minutes, in two sittings. Sections 1 to 3 are about numbers of 16 bits, sections 4 to 7 about
# everything else. **Needs**: lessons 00 to 02. Everything runs on one core of a CPU. What only a GPU can show is said
# to be so, with published numbers.

# %%
import math

import torch

from labcode.lab import check, compare, plot, show_source
from labcode.models import gpt
from labcode.teach.labs.l03_step import Batches, median_s, new_model, operations
from labcode.teach.progress import status

torch.set_num_threads(1)  # a neighbour on the other core disturbs less
batches = Batches()

# %% [markdown]
# ## 1. What a step is made of
#
# A device spends a step on three things:
#
# - **arithmetic**: the matrix products. Counted in floating-point operations (FLOPs);
# - **bytes**: everything else mostly waits for memory. An addition of two large tensors reads two numbers and writes
#   one for a single FLOP;
# - **launches**: each operation has to be started. On a GPU the processor puts a **kernel** (a program for the device)
#   into a queue, which takes some microseconds, however little the kernel has to do.
#
# | rung | arithmetic | bytes | launches |
# |---|---|---|---|
# | 16-bit products | as many FLOPs, at a higher rate | half, where tensors become 16-bit | as many, or more |
# | fused optimizer | the same | fewer | fewer |
# | torch.compile | the same | fewer | fewer |
# | CUDA graphs | the same | the same | one |
#
# How much does it bring? The HPC centre NERSC has published such a ladder, for a vision transformer that learns to
# forecast weather on one A100 GPU, with 16 samples in a step. Each bar has all that the bars before it have.

# %% tags=["figure"]
A100 = {  # samples/s in the last epoch of each run of NERSC's README
    "baseline": 8.81,
    "4 data workers": 12.58,
    "DALI": 13.19,
    "bfloat16": 53.21,
    "fused Adam": 53.31,
    "torch.compile": 54.98,
}
plot.bars(
    A100, ylabel="samples/s", title="Published: a ViT on one A100 (NERSC, 2024)",
    alt="From the baseline of 8.8 samples per second to 12.6 with four data workers, "
        "13.2 with DALI, 53 with bfloat16, 53 with a fused optimizer and 55 compiled",
)

# %% [markdown]
# The first two rungs are those of lesson 02: they feed the device. The large one is precision. And one rung is hidden:
# the baseline already multiplies in tf32, a format of the next section. With tf32 switched off, the DALI run falls from
# 13.2 to 10.1 samples/s.
#
# Samples per second are hard to compare with a profile, so let us turn them into seconds. With 16 samples in a step,
# 10.1 samples/s are 16 / 10.1 = 1.58 s for a step.
#
# **Predict.** How many seconds does a step take in the baseline and on the last rung? What part of the whole saving (in
# seconds) is due to bfloat16?

# %% tags=["predict"]
baseline_s = 16 / 8.81
last_s = 16 / 54.98
part_of_bfloat16 = (16 / 13.19 - 16 / 53.21) / (16 / 8.81 - 16 / 54.98)

# %% tags=["nbval-check-output"]
step_s = {rung: 16 / rate for rung, rate in A100.items()}
saved_s = step_s["baseline"] - step_s["torch.compile"]
by_bfloat16_s = step_s["DALI"] - step_s["bfloat16"]
compare("baseline", baseline_s, step_s["baseline"], unit="s", found="published")
compare("last rung", last_s, step_s["torch.compile"], unit="s", found="published")
part = by_bfloat16_s / saved_s
compare("part of bfloat16", part_of_bfloat16, part, within=1.1, found="published")

# %% [markdown]
# Three fifths of the saving are precision. The fused optimizer saved next to nothing here, and NERSC says why: this
# model's time is mostly in large matrix products. On another model it is another rung. So you need to know your step.
#
# Here is ours, a small GPT on 8 windows of 64 characters. A matrix product of [T, a] and [a, b] takes 2 T a b FLOPs, so
# a weight costs 2 FLOPs for each token in forward. Backward takes twice as many, for the gradient of the input and that
# of the weight. A training step with T tokens and N weights takes about **6 N T** FLOPs.
#
# **Predict.** Our model has 1.62 million weights, and a step has 512 tokens. How many FLOPs is that?

# %% tags=["predict"]
flops_guess = 6 * 1.62e6 * 512

# %%
model = new_model()
tokens, targets = batches(0)

# %%
from torch.utils.flop_counter import FlopCounterMode

from labcode.hardware import cpu_name
from labcode.perf.step import device_step
from labcode.train.device_speed import device_speed


def forward_backward():
    gpt.loss(model(tokens), targets).backward()

with FlopCounterMode(display=False) as counter:
    forward_backward()
flops = counter.get_total_flops()
seconds = median_s({"step": forward_backward})["step"]
calls = operations(forward_backward)

compare("FLOPs", flops_guess, flops, unit="FLOP", within=1.1, found="counted")
print(f"{sum(calls.values())} operations; the most frequent: {calls.most_common(3)}")
print(f"{cpu_name()}: {seconds * 1e3:.0f} ms, {flops / seconds / 1e9:.0f} GFLOP/s")

# %% [markdown]
# The formula counts a few weights that are only looked up, and leaves out the products within attention. For short
# sequences both are small.
#
# Now we can say how long each of the three costs takes. labcode measures three numbers of a device: the rate of a large
# matrix product, the rate of the memory, and the time of an operation that has nothing to do. Then a step takes about
#
#     FLOPs / rate  +  bytes / bandwidth  +  operations * launch
#
# **Predict.** Which is the largest part of our step here: "arithmetic", "bytes" or "launches"?

# %% tags=["predict"]
largest_part = "arithmetic"

# %%
speed = device_speed(torch.device("cpu"), torch.float32)
parts = device_step(model.config, speed, micro_batch=8)
parts_ms = {
    "arithmetic": parts.matmul_s * 1e3,
    "bytes": parts.memory_s * 1e3,
    "launches": parts.launch_s * 1e3,
}
print(f"matrix products {speed.flops_per_s / 1e9:.0f} GFLOP/s")
print(f"memory {speed.bytes_per_s / 1e9:.0f} GB/s")
print(f"a launch {speed.launch_s * 1e6:.1f} us")
largest = max(parts_ms, key=lambda name: parts_ms[name])
compare("the largest part", largest_part, largest, found="computed")

# %% tags=["figure"]
plot.bars(
    parts_ms, ylabel="milliseconds", fmt="{:.1f}",
    title="Where a step of our GPT goes on this CPU, by the model",
    alt="Of the three parts of a step arithmetic is the longest, then bytes; "
        "launches hardly count on a CPU",
)

# %% [markdown]
# In this sum the operations follow each other, and none is slower than its bytes or FLOPs say. Real steps take up to
# twice as long (`benchmarks/predicted_step.py`). It is enough to see which rung to climb first.
#
# **Takeaway: a step is arithmetic, bytes and launches. A rung that reduces what your step hardly has will gain hardly
# anything.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* 8 minutes. People take the ratio of the rates (53 - 13) / (55 - 9) = 0.87 for the part of
# bfloat16. Rates do not add up, seconds do: it is 0.60. Ask: which rung would be the largest if the data rungs were
# left out? And: why is 8.81 used where the README's text says "around 8.8"? (The bars are the last epoch of each
# log.)

# %% [markdown]
# ## 2. Numbers of 16 bits
#
# A floating-point number is ± 1.f · 2^e. The bits of the **exponent** e decide how large and how small a number can be,
# its **range**. The bits of the **fraction** f decide how close two numbers lie, their **spacing**.

# %% tags=["figure"]
plot.formats(
    {"float32": (8, 23), "tf32": (8, 10), "bfloat16": (8, 7), "float16": (5, 10)},
    title="bfloat16 keeps the range of float32, float16 keeps more digits",
    alt="float32 has 8 bits of exponent and 23 of fraction, tf32 8 and 10, bfloat16 8 "
        "and 7, float16 5 and 10; each has one bit for the sign",
)

# %% [markdown]
# Between 2^e and 2^(e+1) there are 2^f numbers for f bits of fraction, evenly spaced. So their spacing is 2^(e-f). For
# example, between 1 and 2 (e = 0) the bfloat16 numbers lie 2^-7 = 0.0078 apart. A result that is not among them is
# rounded to the nearest one. If it lies in the middle, it goes to the neighbour whose last bit is 0.
#
# tf32 is not a format for storing. **Tensor cores** are units of a GPU that do one thing only, products of small
# matrices, many times as fast as its other units. In tf32 they read float32 factors, use 10 bits of their fraction, and
# add up in float32.

# %% [markdown] tags=["exercise"]
# ### Exercise 3.1 · How far to the next number?
#
# Write a function that gives the distance from |x| to the next larger number of a format with so many bits of fraction.
# x is not 0, it may be negative, and it is not so tiny that the format runs out of exponents. One to three lines.

# %% tags=["exercise"]
def spacing(x, fraction_bits):
    """The distance from |x| to the next larger number."""
    ### BEGIN SOLUTION
    exponent = math.floor(math.log2(abs(x)))
    return 2.0 ** (exponent - fraction_bits)
    ### END SOLUTION

# %% tags=["check"]
check("3.1", spacing)

# %% [markdown]
# The range of float16: exponents go from -14 to 15, so the largest number is about 2^16. Below 2^-14 there are still
# **subnormal** numbers, evenly spaced by 2^-24 down to 0. So the smallest is 2^-24 = 6.0e-8, and what is less than half
# of it becomes 0.
#
# **Predict.** What becomes of 1 + 2^-9 in bfloat16 (f = 7) and in float16 (f = 10)? What becomes of a gradient of 1e-8
# in float16 and of 70,000 in float16? (Write `math.inf` for infinity.)

# %% tags=["predict"]
in_bfloat16 = 1.0
in_float16 = 1 + 2**-9
small_gradient = 0.0
large_gradient = math.inf

# %% tags=["nbval-check-output"]
def rounded(x, dtype):
    return torch.tensor(x, dtype=torch.float64).to(dtype).item()

near_one = 1 + 2**-9
coarse = rounded(near_one, torch.bfloat16)
fine = rounded(near_one, torch.float16)
compare("1 + 2^-9, bfloat16", in_bfloat16, coarse, within=1.0005)
compare("1 + 2^-9, float16", in_float16, fine, within=1.0005)
compare("1e-8, float16", small_gradient, rounded(1e-8, torch.float16), within=1)
compare("70,000, float16", large_gradient, rounded(70_000.0, torch.float16), within=1)
print("1e-8 in bfloat16:", rounded(1e-8, torch.bfloat16))

# %% [markdown]
# So bfloat16 loses digits and float16 loses range. A matrix product forgives lost digits: it adds up many numbers,
# their rounding errors partly cancel, and the device adds in float32. An **update** does not forgive. Take a weight of
# 1.0, and subtract 0.001 from it a hundred times.
#
# **Predict.** What is the weight after 100 updates, in float32 and in bfloat16? (Just below 1 the spacing of bfloat16
# is 2^-8.)

# %% tags=["predict"]
weight_in_float32 = 0.9
weight_in_bfloat16 = 1.0

# %% tags=["nbval-check-output"]
found = {}
for dtype in (torch.float32, torch.bfloat16):
    weight = torch.ones((), dtype=dtype)
    for _ in range(100):
        weight -= 0.001
    found[dtype] = weight.item()
compare("float32", weight_in_float32, found[torch.float32], within=1.01)
compare("bfloat16", weight_in_bfloat16, found[torch.bfloat16], within=1)

# %% [markdown]
# Each update is less than half the spacing, and each one is rounded away. It is not a matter of bad luck: after a
# million updates the weight would still be 1. So the weights are kept in float32, as **master weights**, and 16-bit
# copies of them are made for the products. In PyTorch **autocast** does this: within its block, matrix products get
# 16-bit copies of their factors, and sums that need digits (softmax, the norms, the loss) are computed in float32.
#
# How many weights would be stuck in our model, one step with a learning rate of 1e-4?

# %%
from torch import nn

from labcode.perf.saved_bytes import saved_bytes


def share_that_moves(dtype, lr):
    """Of all weights, in one step of AdamW; the weights themselves have this dtype."""
    model = new_model().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0)
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    gpt.loss(model(tokens), targets).backward()
    optimizer.step()
    after = nn.utils.parameters_to_vector(model.parameters()).detach()
    return (after != before).float().mean().item()

for lr in (1e-3, 1e-4, 1e-5):
    wide = share_that_moves(torch.float32, lr)
    narrow = share_that_moves(torch.bfloat16, lr)
    parts = f"{wide:4.0%} in float32, {narrow:4.0%} in bfloat16"
    print(f"lr {lr:g}: of the weights move {parts}")

# %% [markdown]
# At a learning rate of 1e-3 nobody notices. When the rate falls, at the end of a training, fewer and fewer weights
# move. Pure bfloat16 weights train, and stop too early.
#
# So the weights of our model stay in float32. This is the block in which its products are computed in another dtype.

# %%
def autocast(dtype):
    """The block in which products have this dtype."""
    return torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32)

# %% [markdown]
# **What autocast does to memory, speed and loss.** What backward needs is saved in the dtype in which it was computed.
# The factors of products become half as large. What the norms, softmax and loss save stays as it is. So does the
# tensor that goes from one layer to the next: each layer adds its result to it, and sums stay in float32.
#
# **Predict.** How large is what autograd saves with bfloat16 autocast, as a part of what it saves in float32: 1/2,
# between 1/2 and 1, or 1? Write a number.

# %% tags=["predict"]
saved_ratio = 0.75

# %%
def saved_by_forward(dtype):
    with saved_bytes(model) as saved, autocast(dtype):
        loss = gpt.loss(model(tokens), targets)
        num_bytes = saved.total()
    loss.backward()
    return num_bytes

in_32_bits = saved_by_forward(torch.float32)
in_16_bits = saved_by_forward(torch.bfloat16)
print(f"float32 {in_32_bits / 1e6:.1f} MB, bfloat16 {in_16_bits / 1e6:.1f} MB")
compare("saved", saved_ratio, in_16_bits / in_32_bits, within=1.15)

# %% [markdown]
# Now speed and loss. Speed depends on the device. A GPU since 2017 multiplies float16 on tensor cores, since 2020
# bfloat16 and tf32. A CPU may have a unit for bfloat16 (Intel's AMX, or AVX512-BF16) and none for float16. Then float16
# is converted, and costs time.
#
# Let us train the same model from the same weights in all three. It is half as wide as ours, so that about a quarter of
# the FLOPs is left: where float16 has to be converted, a step takes many times as long as in float32.

# %%
def narrow_model():
    """The GPT of this lesson, with half its width."""
    return new_model(hidden_size=128)

def loss_of(model, step, dtype):
    """The loss of the batch of a step, computed in this dtype."""
    tokens, targets = batches(step)
    with autocast(dtype):
        return gpt.loss(model(tokens), targets)

# %%
NUM_STEPS = 32

def trained(dtype):
    """A trained model, and the loss of each step."""
    model = narrow_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, step, dtype)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        status(f"{dtype}: step {step + 1} of {NUM_STEPS}")
    return model, losses

# %%
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
losses = {}
trained_models = {}
for name, dtype in DTYPES.items():
    trained_models[name], losses[name] = trained(dtype)
status()

# %% tags=["figure"]
plot.lines(
    losses, xlabel="step", ylabel="loss (nats per character)", marks=False,
    title="Three dtypes, one curve", wide="float32",
    alt="The losses of float32, bfloat16 and float16 fall together over 32 steps and "
        "lie on each other",
)

# %% [markdown]
# The curves lie on each other, but for small differences. And time? Here is what your CPU has, and what it makes of one
# layer of our model alone: a linear layer, forward and backward, with the conversions that autocast adds.

# %%
flags = torch.cpu.get_capabilities()
print("units for bfloat16:", flags.get("amx_bf16") or flags.get("avx512_bf16"))
print("units for float16 products:", flags.get("amx_fp16"))

def layer_in(dtype):
    layer = nn.Linear(256, 1024)
    x = torch.randn(512, 256, requires_grad=True)

    def forward_backward():
        with autocast(dtype):
            y = layer(x)
        y.backward(torch.ones_like(y))
    return forward_backward

# %%
layers = {name: layer_in(dtype) for name, dtype in DTYPES.items()}
layer_s = median_s(layers, rounds=20)
layer_gain = {name: layer_s["float32"] / layer_s[name] for name in DTYPES}
print("a layer, as fast as in float32:", end=" ")
print({name: round(gain, 2) for name, gain in layer_gain.items()})

products_ms = parts_ms["arithmetic"]
rest_ms = parts_ms["bytes"] + parts_ms["launches"]
print(f"by section 1: products {products_ms:.0f} ms, all else {rest_ms:.0f} ms")

# %% [markdown]
# Rates do not add up, seconds do. Suppose that all products of a step gain what this layer gains, and that bytes and
# launches stay as they are.
#
# **Predict.** How many times as fast as float32 is then a forward and backward in bfloat16, and in float16? Compute it
# from the numbers above.

# %% tags=["predict"]
bfloat16_speedup = (products_ms + rest_ms) / (
    products_ms / layer_gain["bfloat16"] + rest_ms
)
float16_speedup = (products_ms + rest_ms) / (
    products_ms / layer_gain["float16"] + rest_ms
)

# %%
def work_in(dtype):
    def work():
        with autocast(dtype):
            loss = gpt.loss(model(tokens), targets)
        loss.backward()
    return work

works = {name: work_in(dtype) for name, dtype in DTYPES.items()}
times = median_s(works, rounds=7)
base_s = times["float32"]
compare("bfloat16", bfloat16_speedup, base_s / times["bfloat16"], within=1.7)
compare("float16", float16_speedup, base_s / times["float16"], within=1.7)

# %% [markdown]
# bfloat16 gains where there is a unit for it, and float16 gains nothing on a CPU without one. The whole step gains less
# than the sum says. Softmax, the norms and the loss take longer than their bytes alone, autocast leaves them in
# float32, and it converts what goes in and out. Large layers gain more than small ones: on the A100 of section 1 it was
# a factor of four.
#
# **Takeaway: bfloat16 has the range of float32 and 2 to 3 digits. Products forgive that, updates do not. So compute in
# 16 bits, and keep weights and optimizer in 32.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* 15 minutes. On a CPU without bfloat16 units (most laptops before 2023) the ratios are below 1:
# let people say what they got, and collect capabilities against ratios on the board. Ask: does a larger bfloat16 weight
# get stuck earlier or later? (Earlier: the spacing grows with it, and AdamW's update does not.) One remedy is
# *stochastic rounding*: round up with the probability that keeps the mean right.

# %% [markdown]
# ## 3. float16 needs a scaled loss
#
# Many GPUs before 2020 have no bfloat16, and float16 has 8 times as many numbers between 1 and 2. Its problem is the
# range. The model trained without trouble, because its gradients are large. Now let the batch be accumulated from m =
# 1024 micro-batches. Each backward then starts from loss / 1024, and all its gradients are 1024 times as small.
# (Large models have small gradients as well: their weights are many, and each has its small part.)
#
# The picture shows the true gradients, computed in float32, over what float16 can hold: those of the first step, and
# those of the model that has trained for 32 steps in section 2.

# %%
def in_one_row(model):
    """All gradients of a model."""
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    return torch.cat([grad.flatten() for grad in grads])

def gradients(model, dtype, factor):
    """All gradients of `factor * loss`."""
    model.zero_grad()
    loss = loss_of(model, 0, dtype)
    (loss * factor).backward()
    return in_one_row(model)

# %%
first = gradients(narrow_model(), torch.float32, 1 / 1024)
later = gradients(trained_models["float32"], torch.float32, 1 / 1024)
for when, true in (("first step", first), ("after 32 steps", later)):
    share = (true.abs() < 2**-25).float().mean().item()
    print(f"{when}: {share:.0%} are less than half of the smallest float16")

# %% tags=["figure"]
plot.gradient_range(
    {"first step": first, "32 steps later": later, "the latter * 2^16": later * 2**16},
    least=2**-25, most=65504,
    title="loss / 1024: a scale moves gradients into the range",
    alt="Without a scale a part of the gradients lies below the smallest float16, and "
        "more of them after 32 steps; times 2^16 nearly all lie within its range",
)

# %% [markdown]
# What lies on the left becomes 0, and a weight without a gradient learns nothing. It gets worse in two ways. The better
# the model, the smaller its gradients. And the picture shows those of weights alone, each a sum over 512 tokens. On the
# way to them backward computes the gradients of activations, for each token by itself, and many are smaller still. Where
# one of those becomes 0, its part is missing in all the weights that it would have reached.
#
# The remedy: multiply the loss by s before backward. Backward is linear, so all gradients are multiplied by s. Divide
# them by s again in float32, before the optimizer. If s is a power of two, nothing is rounded on the way.
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
compare("largest scale", largest_scale, fitting, within=2)

# %% [markdown]
# (Within a factor of two: gradients of activations travel through backward as well, and one of them may be larger than
# those of all weights.)
#
# During a training the gradients change, and with them the best s. So it is found by trying, **dynamically**:
#
# - begin large, with 2^16;
# - if any gradient is not finite, leave out this update, and halve s;
# - after 2000 good steps in a row double s.
#
# A step that is left out costs little. It happens a few times at the start, and then once in 2000 steps or less.

# %% [markdown] tags=["exercise"]
# ### Exercise 3.2 · A dynamic loss scaler
#
# Write the three methods. `params` may be any iterable of parameters, and it can be gone through only once. About 15
# lines.
#
# - `backward` computes the gradients of `scale * loss`. The loss itself stays as it is, because it is logged.
# - `unscale` divides every `.grad` by the scale, in place, and returns whether **all** of them are finite. A parameter
#   that took no part has `.grad` None. `tensor.isfinite()` is False for inf and NaN.
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
check("3.2", Scaler)

# %% [markdown] tags=["exercise"]
# ### Exercise 3.3 · A step in float16
#
# Now the whole step, with what belongs to it in practice: several micro-batches, and **clipping** (if the norm of all
# gradients is larger than `max_norm`, they are scaled down together to that norm). It may use your scaler's three
# methods; the check brings its own scaler.
#
# - `micro_batches` is a list of (tokens, targets), which stays as it is. The loss of a step is the mean of theirs. Each
#   has a backward of its own, so that the activations of one alone lie in memory.
# - A step begins without the gradients of the step before.
# - Forward and loss run within `torch.autocast("cpu", dtype=torch.float16)`, backward outside of it.
# - `nn.utils.clip_grad_norm_(params, max_norm)` clips. Where does it belong?
# - If a gradient is not finite, the weights and the optimizer's state stay as they are, and the scaler has to know.
#
# About 10 lines.

# %% tags=["exercise"]
from torch import nn


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
check("3.3", train_step)

# %% [markdown]
# PyTorch has this as `torch.amp.GradScaler`. Let us train with loss / 1024 in float32, in float16 alone, and in float16
# with PyTorch's scaler. AdamW divides a gradient by its own size, so the factor 1/1024 by itself does not keep a model
# from learning. (It matters a little: AdamW's eps is no longer small beside such gradients.)
#
# **Predict.** What does float16 alone do in 32 steps, beside float32 with the same loss / 1024? "diverge" (NaN, or the
# loss rises), "learn less", or "the same"?

# %% tags=["predict"]
float16_alone = "learn less"

# %%
def small_step(model, optimizer, scaler, step, dtype):
    """A step on loss / 1024: the loss, and which part of the gradients is 0."""
    optimizer.zero_grad()
    loss = loss_of(model, step, dtype)
    scaler.scale(loss / 1024).backward()
    zeros = (in_one_row(model) == 0).float().mean()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)  # leaves the update out if a gradient is not finite
    scaler.update()
    return loss.item(), zeros.item()

# %%
def trained_small(dtype, scaled):
    """Loss and zeros of each step, of a training on loss / 1024."""
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

# %% tags=["figure"]
plot.lines(
    small, xlabel="step", ylabel="loss (nats per character)", marks=False,
    title="loss / 1024: float16 alone learns less", wide="float32",
    reference={"frequencies of characters alone": batches.frequencies_loss},
    alt="float32 and float16 with a scaler fall together, below the loss of "
        "frequencies alone; float16 alone falls more slowly and stays above it",
)

# %%
ends = {}
for label, losses_of_run in small.items():
    ends[label] = sum(losses_of_run[-5:]) / 5
    first_share = zeros[label][0]
    last_share = zeros[label][-1]
    print(f"{label}: loss {ends[label]:.2f} in the last five steps", end="; ")
    print(f"zeros in the first {first_share:.0%}, in the last {last_share:.0%}")

# %%
if not ends["float16"] < small["float16"][0]:
    verdict = "diverge"
elif ends["float16"] > ends["float32"] + 0.1:
    verdict = "learn less"
else:
    verdict = "the same"
compare("float16 alone", float16_alone, verdict, within=1)

# %% [markdown]
# Nothing failed and nothing was printed: no NaN, no error, and the loss falls, with the gradients that are large
# enough. But fewer and fewer of them are. After 32 steps the loss has not even come down to that of a model that knows
# the frequencies of the characters and nothing else. This is what too small a gradient looks like. With a scaler hardly
# a gradient is lost, and the curve is that of float32.
#
# Here is labcode's scaler. It decides by the norm of the whole gradient, for a reason that comes with several ranks:
# the norm is the same number on each of them, so all leave out the same steps, and nobody has to ask. Two things are
# the other way round than in yours. `update` is told whether the gradient has overflowed, not whether it is finite. And
# `unscale` is given the norm and returns the true one; after an overflow it divides nothing.

# %%
from labcode.train import loss_scale

show_source(loss_scale.LossScaler.unscale)
show_source(loss_scale.LossScaler.update)

# %% [markdown]
# **Two mistakes of order.** The first is silent: clipping before unscaling. Take a true norm of 1.5 and max_norm 1,
# with s = 2^16.
#
# **Predict.** What is the norm that reaches the optimizer, if you clip first and unscale then?

# %% tags=["predict"]
norm_at_the_optimizer = 1 / 2**16

# %% tags=["nbval-check-output"]
weight = nn.Parameter(torch.zeros(1))
weight.grad = torch.tensor([1.5 * 2**16])  # as a scaled backward leaves it
nn.utils.clip_grad_norm_([weight], 1.0)
weight.grad /= 2**16
compare("norm", norm_at_the_optimizer, weight.grad.norm().item(), within=1.01)

# %% [markdown]
# With plain SGD the training would stand still. AdamW hides the mistake, because it divides the factor out again, and
# what remains is that every step is clipped.
#
# The second mistake PyTorch catches. Somebody unscales in the loop over micro-batches:

# %% tags=["raises-exception"] raises="RuntimeError: unscale_() has already been called"
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler("cpu")
for tokens, targets in (batches(0), batches(1)):
    with autocast(torch.float16):
        loss = gpt.loss(model(tokens), targets)
    scaler.scale(loss / 2).backward()
    scaler.unscale_(optimizer)  # belongs after the loop

# %% [markdown]
# The first half would be divided by s twice.
#
# **Takeaway: scale, backward, unscale, look whether all is finite, clip, step, update the scale. float16 needs it,
# bfloat16 does not.**
#
# This is the end of the first sitting.

# %% [markdown] tags=["solution-only"]
# *For the instructor.* 17 minutes. What goes wrong: `isinf` alone (inf - inf is NaN), a counter that is not set back,
# `finite` of the last parameter only, clipping first. Ask: why is the learning-rate schedule often one step ahead in
# float16 logs? (`scheduler.step()` was called for a step that was left out; PyTorch warns.) Ask also what happens to a
# model whose loss is NaN at any scale. (GradScaler halves s for ever and leaves out every step: look at s in your log.)

# %% [markdown]
# ## 4. The optimizer: hundreds of small operations
#
# *The second sitting. In a new kernel, first run four cells of the first sitting: the imports, and those that begin
# with `A100 =`, with `model =` and with `def autocast`.*
#
# AdamW does this with each weight w, for its gradient g, in step t:
#
#     w = (1 - lr * decay) * w                               decay
#     m = beta1 * m + (1 - beta1) * g                        mean of the gradients
#     v = beta2 * v + (1 - beta2) * g * g                    mean of their squares
#     w = w - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
#
# Written as a loop over the parameters, PyTorch takes 9 operations for each of them: one counts the step, one is for
# the decay, one for m, two for v, and four for the last line. All are elementwise: few FLOPs, many bytes, many
# launches.
#
# **Predict.** Our model has 28 parameters (tensors). How many operations does a step take as a loop? And with
# `foreach`, where each of the 9 takes the **list** of all parameters? And with `fused`, where one operation does all
# but count the step?

# %% tags=["predict"]
as_a_loop = 9 * 28
as_foreach = 9
as_fused = 2

# %% tags=["nbval-check-output"]
def adamw_of(model, how):
    params = model.parameters()
    fused = how == "fused"
    foreach = how == "foreach"
    optimizer = torch.optim.AdamW(params, lr=1e-9, fused=fused, foreach=foreach)
    optimizer.step()  # the first step makes the state
    return optimizer

gpt.loss(model(tokens), targets).backward()  # a parameter without .grad is left out
HOWS = ("loop", "foreach", "fused")
counts = {how: sum(operations(adamw_of(model, how).step).values()) for how in HOWS}
compare("loop", as_a_loop, counts["loop"], within=1.05, found="counted")
compare("foreach", as_foreach, counts["foreach"], within=1.2, found="counted")
compare("fused", as_fused, counts["fused"], within=1, found="counted")

# %% [markdown] tags=["exercise"]
# ### Exercise 3.4 · AdamW on lists
#
# Write the step with `torch._foreach_*`: these take lists of tensors, and do one thing to all of them. As with
# tensors, a name that ends in an underscore writes into its first argument. You need, for instance:
#
# - `torch._foreach_mul_(list, number)`, and `add_`, `div_` alike;
# - `torch._foreach_lerp_(a, b, weight)`: a = a + weight * (b - a);
# - `torch._foreach_addcmul_(a, b, c, number)`: a = a + number * b * c;
# - `torch._foreach_addcdiv_(a, b, c, number)`: a = a + number * b / c;
# - `torch._foreach_sqrt(list)`, which gives a new list.
#
# All is in place, in the order of the formulas; the gradients stay as they are. About 10 lines. The check compares with
# AdamW in float64, and counts your operations for 4 tensors and for 20.

# %% tags=["exercise"]
@torch.no_grad()
def adamw(weights, grads, means, squares, step,
          lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, decay=0.1):
    """One step of AdamW on lists of tensors; `step` counts from 1."""
    ### BEGIN SOLUTION
    torch._foreach_mul_(weights, 1 - lr * decay)
    torch._foreach_lerp_(means, grads, 1 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
    roots = torch._foreach_sqrt(squares)
    torch._foreach_div_(roots, math.sqrt(1 - beta2**step))
    torch._foreach_add_(roots, eps)
    torch._foreach_addcdiv_(weights, means, roots, -lr / (1 - beta1**step))
    ### END SOLUTION

# %% tags=["check"]
check("3.4", adamw)

# %% [markdown]
# What is it worth? That depends on where it runs. On a GPU a foreach operation is one kernel, or a few, for all
# tensors, so it saves launches. It saves no bytes: each operation still reads and writes all of its lists. The fused
# one saves both. It reads w, g, m and v once and writes w, m and v once.
#
# **On a CPU** PyTorch has no such kernel for lists: a foreach operation is a loop in C++ over the tensors.
#
# **Predict.** How many times as fast as the loop is `fused` here? Count bytes: as a loop, the operations above read and
# write 20 numbers for each weight, and fused 7.

# %% tags=["predict"]
fused_speedup = 20 / 7

# %%
wide = new_model()
deep = new_model(num_layers=24, hidden_size=32)  # many small weights
for small_model in (wide, deep):
    for param in small_model.parameters():
        param.grad = torch.ones_like(param)

optimizer_s = {}
for label, kind in (("28 large", wide), ("292 small", deep)):
    works = {how: adamw_of(kind, how).step for how in HOWS}
    optimizer_s[label] = median_s(works, rounds=25)
    loop_s = optimizer_s[label]["loop"]
    shares = {how: f"{loop_s / s:.1f}" for how, s in optimizer_s[label].items()}
    print(f"{label:>10} parameters: as fast as the loop {shares}")
large = optimizer_s["28 large"]
compare("fused", fused_speedup, large["loop"] / large["fused"], within=2.5)

# %% [markdown]
# The fused one gains on both models: bytes on the one, calls on the other. foreach, which is the default on a GPU,
# gains on a CPU at most what the calls from Python cost.
#
# **Takeaway: an optimizer is memory traffic and launches. foreach saves launches, fused saves both.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* 12 minutes. What goes wrong: decay in the gradient (Adam with L2), eps before the correction,
# and `torch._foreach_sqrt_`, which destroys v. The 20 numbers: decay 2, lerp 3, mul 2, addcmul 3, sqrt 2, div 2, add 2,
# addcdiv 4. Ask: why is foreach not the default everywhere? (It needs a temporary copy of
# all roots at once, the size of the weights.)

# %% [markdown]
# ## 5. torch.compile: fewer bytes by fusion
#
# What the fused optimizer has by hand, `torch.compile` does by itself. It records which operations a function makes,
# and writes new kernels in which neighbouring elementwise operations are **fused**: a number is read once, goes
# through all of them in a register, and is written once. On a GPU the kernels are written in Triton, on a CPU in C++.
# Matrix products stay what they are.

# %% tags=["figure"]
plot.fusion(
    ["* 2", "+ 1", "* 0.5", "- 3", "abs", "clamp"],
    title="A chain of operations, one by one and fused",
    alt="One by one each of six operations reads its input from memory and writes its "
        "result back; fused, only the first reads and only the last writes",
)

# %% [markdown]
# Time of such a chain is bytes divided by the rate of the memory, whatever the arithmetic is.
#
# **Predict.** How many times as fast is the fused chain, by this model? For how many calls do you have to use it, until
# 8 s of compiling are paid back, if a call took 2.5 ms and takes 0.5 ms afterwards?

# %% tags=["predict"]
fusion_speedup = 12 / 2
calls_to_pay = 8 / (2.5e-3 - 0.5e-3)

# %%
def chain(x):
    x = x * 2
    x = x + 1
    x = x * 0.5
    x = x - 3
    x = x.abs()
    return x.clamp(max=1)

# %%
from torch._inductor.utils import fresh_cache

from labcode.teach.labs.l03_step import seconds_of

x = torch.randn(2**20)
compiled = torch.compile(chain)
status("compiling: some 10 s, and more where others compute")
with fresh_cache():
    compile_s = seconds_of(lambda: compiled(x))
works = {"one by one": lambda: chain(x), "fused": lambda: compiled(x)}
chain_s = median_s(works, rounds=25)
status()

# %%
gain_s = chain_s["one by one"] - chain_s["fused"]
speedup = chain_s["one by one"] / chain_s["fused"]
compare("fusion", fusion_speedup, speedup, within=3)
compare("calls", calls_to_pay, 8 / 2e-3, within=1.01, found="computed")
print(f"compiled in {compile_s:.0f} s: paid back after", end=" ")
print(f"{compile_s / gain_s:,.0f} calls")

# %% [markdown]
# (`fresh_cache` hides the cache on the disk, where a second run would find the kernel. The model of bytes is rough
# here: the processor keeps a part of the tensors in its caches, and new memory for each result costs time of its
# own.)
#
# A chain like this gains what the bytes say. A whole model gains less, since most of its time is in matrix products.
# When this course was written, a small GPT took 22 to 39 s to compile on two cores of a CPU, and no gain could be
# measured. On NERSC's A100 the last of four epochs gained 3 % (53.3 to 55.0 samples/s). The two before it gained
# nothing, and the first took 57 s in the place of 12.
#
# What `compile` cannot record (a `print`, an `.item()`, a decision by a value) breaks the graph in two, and a new shape
# of the input is a new compilation. So batches should have one shape.
#
# **Takeaway: compiling saves bytes and launches between matrix products. It pays when the time that it saves in all
# steps is more than that of compiling.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* 7 minutes. The measured factor may lie on either side of 6: allocations (page faults) of five
# temporaries make the slow side slower, caches make it faster. Ask: why is dropout + residual + norm a good candidate?
# (Three elementwise or row-wise operations on the widest stream of the layer.)

# %% [markdown]
# ## 6. When launches are the bottleneck
#
# On a CPU an operation is done when its call returns. On a GPU the processor runs ahead: it launches kernels into a
# queue, and the device works through it. As long as kernels take longer than launches, the queue is never empty, and
# launches cost nothing. With short kernels the device waits for the processor.

# %% tags=["figure"]
plot.launches(
    {
        "long kernels: launches are hidden": (5, 12),
        "short kernels: the device waits": (5, 2),
        "short kernels as one graph": (0, 2),
    },
    title="A step takes as long as the slower of the two lanes",
    alt="With long kernels the device is busy all the time; with short ones it waits "
        "for each launch; as a graph, one launch starts all six kernels",
)

# %% [markdown]
# A **CUDA graph** records all launches of a step once. Afterwards a single launch replays all of them, with the same
# kernels on the same addresses. So shapes must not change, inputs are copied into the recorded ones, and nothing in
# the step may ask the device for a value (no `.item()`, and no `if` on a gradient: a loss scaler has to decide on the
# device).
#
# With n kernels, a launch of l and a kernel of k microseconds, a step takes about max(n · l, n · k).
#
# **Predict.** A step has 1000 kernels and a launch takes 5 µs. How long is the step for k = 20 µs, and for k = 2 µs?
# How many times as fast can a graph make each of the two?

# %% tags=["predict"]
long_ms = 1000 * 20e-3
short_ms = 1000 * 5e-3
graph_gain_long = 1.0
graph_gain_short = 5 / 2

# %% tags=["nbval-check-output"]
def step_ms(kernels, launch_us, kernel_us):
    return kernels * max(launch_us, kernel_us) / 1e3

compare("k = 20", long_ms, step_ms(1000, 5, 20), within=1, found="computed")
compare("k = 2", short_ms, step_ms(1000, 5, 2), within=1, found="computed")
long_gain = step_ms(1000, 5, 20) / step_ms(1000, 0, 20)
short_gain = step_ms(1000, 5, 2) / step_ms(1000, 0, 2)
compare("graph, k = 20", graph_gain_long, long_gain, within=1, found="computed")
compare("graph, k = 2", graph_gain_short, short_gain, within=1, found="computed")

# %% [markdown]
# There are no CUDA graphs on a CPU, but the same overhead can be seen: the time of an addition against its size.
# Where the line is flat, all you pay for is the call.

# %%
def addition_us(size):
    """Microseconds of an addition of `size` numbers."""
    a = torch.ones(size)
    b = torch.ones(size)
    out = torch.empty(size)
    repeats = max(1, 2**16 // size)

    def additions():
        for _ in range(repeats):
            torch.add(a, b, out=out)
    return median_s({"add": additions})["add"] / repeats * 1e6

SIZES = [2**power for power in range(0, 23, 2)]
times_us = [addition_us(size) for size in SIZES]

# %% tags=["figure"]
plot.lines(
    {"one addition": times_us}, x=SIZES, logx=True, logy=True,
    xlabel="numbers in the tensor", ylabel="microseconds",
    title="Below some thousand numbers the call is all you pay",
    alt="The time of an addition is flat for small tensors and grows in proportion "
        "to the size for large ones",
)

# %% [markdown]
# Published gains of graphs on GPUs say the same as the model. In the MLPerf 1.0 runs on which PyTorch reported, Mask
# R-CNN on 272 GPUs (with one image on each, so with short kernels) became 1.70 times as fast, and BERT on 4096 GPUs
# 1.12 times. NERSC writes of an earlier model of its tutorial that it "does not benefit much", and recommends graphs
# for models "with more CPU latency issues (e.g. from many small kernel launches)".
#
# **Takeaway: launches cost something only when the kernels are shorter than they are: small models, small batches,
# many GPUs for one batch. Then record them once.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* 6 minutes. Ask: what else helps when launches are the bottleneck? (A larger batch, fused
# operations.) And: why is `loss.item()` in every step bad on a GPU, even without graphs? (The processor waits until the
# queue is empty, and then starts with nothing launched ahead.)

# %% [markdown]
# ## 7. The whole ladder, here
#
# We climb it with our own step: 8 windows, forward, backward and AdamW. Each row has what the rows before it have.
# Beside it stands NERSC's ladder, from the rung where the data are no longer in the way. Both are relative to their
# first rung.

# %%
def step_with(dtype, how):
    model = new_model()
    optimizer = adamw_of(model, how)

    def step():
        optimizer.zero_grad()
        with autocast(dtype):
            loss = gpt.loss(model(tokens), targets)
        loss.backward()
        optimizer.step()
    return step

# %%
rungs = {
    "float32": step_with(torch.float32, "loop"),
    "bfloat16": step_with(torch.bfloat16, "loop"),
    "fused optimizer": step_with(torch.bfloat16, "fused"),
}
here_s = median_s(rungs, rounds=11)
ladder = {}
for rung, seconds in here_s.items():
    ladder[rung] = {"here": here_s["float32"] / seconds}

# %%
published = {"float32": "DALI", "bfloat16": "bfloat16", "fused optimizer": "fused Adam"}
for rung, name in published.items():
    ladder[rung]["A100, published"] = A100[name] / A100["DALI"]
ladder["torch.compile"] = {"A100, published": A100["torch.compile"] / A100["DALI"]}

# %% tags=["figure"]
plot.bars(
    ladder, ylabel="times as fast as the first rung", fmt="{:.1f}",
    title="The same ladder on two devices",
    alt="On the A100 nearly all of the gain of four times comes from bfloat16; here "
        "bfloat16 and the fused optimizer both gain",
)

# %% [markdown]
# The same rungs, and other gains. NERSC's first rung is tf32, not float32, and its model has large matrix products, so
# precision is all. Our step is small, and its optimizer takes a larger part of it. There is no bar for `torch.compile`
# here: section 5 says why. On a GPU `python benchmarks/on_a_gpu.py` measures every rung.
#
# **Takeaway: measure each rung on your own step. A published ladder tells you which rungs there are.**

# %% [markdown] tags=["exercise"]
# ### Exercise 3.5 · Open end: reach a loss in the least time
#
# A training has a goal, not a number of steps. Choose the settings with which our GPT reaches 2.9 nats on windows that
# it does not train on, as soon as possible: `l03_race.Settings(batch, dtype, optimizer, attention)`. The learning rate
# is fixed. The baseline is a batch of 32 in float32 with the loop.
#
# - `batch` is 4, 8, 16 or 32; `dtype` "float32", "bfloat16" or "float16" (with a scaler); `optimizer` "for_loop",
#   "foreach" or "fused"; `attention` "fused" or "math" (plain operations in the place of one kernel).
# - Time is steps × seconds for a step. `l03_race.steps_to_target(settings)` counts the steps, None if 120 are not
#   enough; `l03_race.step_seconds(one, other)` times a step of each. It counts the seconds in which the processor works
#   for this notebook, so a neighbour on the machine hardly matters.
# - Say also how many times as fast as the baseline it will be. Do not try everything: measure the two parts, and
#   multiply.
#
# | | |
# |---|---|
# | reaches the loss | required |
# | dtype, optimizer and attention save at least half of what they can save in a step of your batch | required |
# | at least 3 times as fast as the baseline | required |
# | your prediction within a factor of 2 | required |
#
# For the second row the check times the baseline with your batch, and what the rungs of this lesson make of that, in
# one run with yours. On a CPU without a unit for bfloat16 another dtype may win.

# %% tags=["exercise"]
from labcode.teach.labs import l03_race

### BEGIN SOLUTION
settings = l03_race.Settings(batch=8, dtype="bfloat16", optimizer="fused")
predicted_speedup = 6.0
### END SOLUTION

# %% tags=["check"]
check("3.5", settings, predicted_speedup)

# %% [markdown]
# A batch of 4 has the quickest steps of all, and needs so many more of them that it loses: its gradients are too noisy
# for this learning rate. A batch of 32 needs no fewer steps than one of 8, and each takes longer. So 8 or 16 win on one
# small device. (With other windows the numbers of steps differ by some tens.) Lesson 06 is about where this ends.

# %% tags=["solution-only"]
for batch in (4, 8, 16):
    choice = l03_race.Settings(batch=batch, dtype="bfloat16", optimizer="fused")
    print(f"batch {batch:2}: {l03_race.steps_to_target(choice)} steps")
print(f"the baseline: {l03_race.steps_to_target(l03_race.BASELINE)} steps")

# %% [markdown] tags=["solution-only"]
# *For the instructor.* 10 minutes with section 7. People choose the largest batch, because it has the most samples per
# second. That is the wrong measure: samples are not progress. Others choose batch 4 by the time of a step. Ask: how
# would the winner change on an A100, where a batch of 8 takes as long as one of 64? (Then the larger batch is free.)

# %% [markdown]
# ## 8. From here to GPUs and SLURM
#
# | rung | in labcode | in plain PyTorch |
# |---|---|---|
# | tf32 | `--train.dtype tf32` | `torch.set_float32_matmul_precision("high")` |
# | bfloat16, the default on a GPU | `--train.dtype bfloat16` | `torch.autocast("cuda", torch.bfloat16)` |
# | float16 with a loss scaler | `--train.dtype float16` | and `torch.amp.GradScaler("cuda")` |
# | fused optimizer, the default | `--optim.implementation fused` | `AdamW(..., fused=True)` |
# | compile each layer, or the whole | `--train.compile block`, `model` | `torch.compile(model)` |
# | CUDA graphs | `--train.cuda_graphs` | `torch.cuda.graph`, or `torch.compile(model, mode="reduce-overhead")` |
#
# On a GPU: `python -m labcode.train gpt_10m --train.dtype bfloat16 --train.compile block`. In a job on SLURM the same
# line stands behind `srun --gpus=1`. Measure on a node that you have for yourself, and leave out the first steps:
# they compile, allocate and warm up.
#
# Climb in this order: feed the device (lesson 02), bfloat16, fused optimizer and attention, a batch that fills the
# device, compile. Try CUDA graphs when a profile shows gaps between short kernels.
#
# ## Questions
#
# **1.** A colleague stores a sum of 10,000 losses, each about 3, in bfloat16. What will the sum be?
#
# <details><summary>Answer</summary>
#
# It grows until half the spacing is more than 3: from 1024 to 2048 the spacing is 8, so adding 3 changes nothing. It
# stays near 1024. Sums belong in float32.
# </details>
#
# **2.** In a float16 run the scale falls from 65,536 to 1 within twenty steps, and the loss no longer changes. What
# happened?
#
# <details><summary>Answer</summary>
#
# Every step was left out: some gradient is not finite at any scale. The fault is in the model or in the data (a
# division by zero, the logarithm of 0), not in the range of float16.
# </details>
#
# **3.** A step takes 40 ms, of which 30 ms are matrix products. What can torch.compile gain at most? And a device with
# products 4 times as fast?
#
# <details><summary>Answer</summary>
#
# Compiling can take away at most the other 10 ms: 40 / 30 = 1.33 times as fast. With faster products 40 / (10 + 7.5) =
# 2.3 times; afterwards the 10 ms are more than half, and compiling is worth more than before.
# </details>
#
# **4.** Why does clipping come after unscaling, and after the check for inf?
#
# <details><summary>Answer</summary>
#
# `max_norm` is meant for true gradients. And the norm of a gradient with an inf in it is inf: clipping would multiply
# by 0, which makes the inf NaN and all other gradients 0.
# </details>
#
# **5.** From lesson 01: gradients of N weights are all-reduced over p ranks in bfloat16. How many bytes does a rank
# send?
#
# <details><summary>Answer</summary>
#
# 2 (p-1)/p · N numbers of 2 bytes: 4 (p-1)/p N bytes, half of those in float32.
# </details>
#
# ## Recap
#
# | rung | attacks | gains when | costs |
# |---|---|---|---|
# | bfloat16 autocast | arithmetic, bytes of factors | the device has a unit for it, layers are large | digits |
# | float16 with a scaler | the same | the same, without bfloat16 | range: a scaler, steps left out |
# | foreach optimizer | launches | many small weights, on a GPU | a temporary copy |
# | fused optimizer | launches and bytes | always a little | nothing |
# | torch.compile | bytes, launches | much that is elementwise, one shape | 10 s to minutes |
# | CUDA graphs | launches | kernels shorter than launches | fixed shapes and addresses |
#
# ## Sources
#
# - NERSC, *Deep Learning at Scale Training*, README, "Single GPU performance profiling and optimization" (logs of
#   November 2024, A100 with 40 GB, batch 16): <https://github.com/NERSC/dl-at-scale-training>. The bars are epoch 4 of
#   each log: baseline, 4 workers, DALI, AMP BF16, fused, JIT; 10.1 samples/s is its run with `NVIDIA_TF32_OVERRIDE=0`.
# - NERSC, *SC22 tutorial*, "Using CUDA Graphs (optional)": <https://github.com/NERSC/sc22-dl-tutorial>.
# - Nguyen et al. 2021, *Accelerating PyTorch with CUDA Graphs*, table 1:
#   <https://pytorch.org/blog/accelerating-pytorch-with-cuda-graphs/>.
# - Micikevicius et al. 2017, *Mixed Precision Training*, arXiv:1710.03740: master weights, loss scaling.
# - Kalamkar et al. 2019, *A Study of BFLOAT16 for Deep Learning Training*, arXiv:1905.12322.
# - Loshchilov and Hutter 2017, *Decoupled Weight Decay Regularization*, arXiv:1711.05101, algorithm 2.
# - Kaplan et al. 2020, arXiv:2001.08361, section 2.1: 6 N FLOPs for a token.
# - PyTorch: <https://docs.pytorch.org/docs/stable/amp.html>,
#   <https://docs.pytorch.org/docs/stable/notes/amp_examples.html>.
