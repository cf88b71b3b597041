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
# other: a larger batch, fused attention, smaller numbers, fewer operations, fewer launches. Each rung helps against one
# kind of cost. One number says which: how many operations of arithmetic there are for each byte. You begin with that
# number, and before each rung you say what it should gain.
#
# ## Goals
#
# - compute the arithmetic intensity of an operation, and say from two numbers of a device how fast it can be;
# - define MFU, and compute it for a step of your own and for a published training run;
# - say why fused attention is faster, and what bfloat16 does to products, memory and weights;
# - write AdamW so that its number of calls does not grow with the number of weights;
# - predict what fusion gains, when compiling pays, and when CUDA graphs do.
#
# **Time**: 250 minutes. Sections 1 to 3 say what a device can do, sections 4 to 8 climb the ladder. Good places for a
# break are after sections 1, 3, 4 and 6. **Needs**: lesson 02 (sections 1 and 2). Everything runs on one core of a CPU.
# Where only a GPU can show something, the lesson shows what an H100 measured with the same code.

# %%
import math

import torch
from torch import nn

from labcode.lab import check, compare, plot
from labcode.models import gpt
from labcode.teach.labs.l03_step import Batches, median_s, new_model, recorded
from labcode.train import roofline

torch.set_num_threads(1)  # a neighbour on the other core disturbs less
CPU = torch.device("cpu")
batches = Batches()
model = new_model()
tokens, targets = batches(0)

# %% [markdown]
# ## 1. The roofline (core, 45 min)
#
# An operation does two things. It **computes**, which is counted in floating-point operations (FLOPs), and it **moves
# numbers** between the memory and the units that compute, which is counted in bytes. A device does both at the same
# time, each at a rate of its own. So the operation takes at least as long as the slower of the two:
#
#     seconds >= max(FLOPs / rate, bytes / bandwidth)
#
# Which of the two it is depends on a single number of the operation, its **arithmetic intensity**: FLOPs for each byte
# that is read or written. And it depends on a single number of the device, rate / bandwidth, which is called the
# **ridge**. If the intensity lies above the ridge, the operation is bound by arithmetic, and faster arithmetic makes it
# faster. If it lies below, the operation is bound by memory: the units that compute wait, and faster ones would only
# wait longer.
#
# For example, an H100's datasheet says 989 TFLOP/s in bfloat16 and 3.35 TB/s, so its ridge is 295 FLOPs for each byte.
# The sum of two float32 tensors computes 1 FLOP for each 12 bytes (two numbers read, one written). Its intensity is
# 0.083, far below any ridge.
#
# Here are the two numbers of your device, measured: the rate of a large matrix product, and the bandwidth of a sum of
# two large tensors.

# %%
from labcode.train.device_speed import device_speed

speed = device_speed(CPU, torch.float32)
ridge = speed.flops_per_s / speed.bytes_per_s
print(f"rate {speed.flops_per_s / 1e9:.0f} GFLOP/s")
print(f"bandwidth {speed.bytes_per_s / 1e9:.0f} GB/s")
print(f"ridge {ridge:.1f} FLOPs for each byte")

# %% [markdown]
# Now the most common large operation of a training step: a **linear layer**, x @ W, for x of shape [T, a] and W of
# shape [a, b], where T is the number of tokens. Each of its T b results is a sum of a products, so it takes 2 T a b
# FLOPs. It reads x and W and writes [T, b]: at least T a + a b + T b numbers, each once.
#
# For few tokens nearly all the bytes are W's, and W has to be read however few tokens there are. So the intensity grows
# with T. With a = b and few tokens it is about 2 T a² / (w a²) = 2 T / w, for numbers of w bytes: half the number of
# tokens in float32.

# %% [markdown] tags=["exercise"]
# ### Exercise 3.1 · From shapes to seconds
#
# Write three functions. Two of them are the sentences above.
#
# 1. `linear_layer` gives the FLOPs and the bytes of x @ W.
# 2. `shortest_s` gives the least seconds that a device needs for so many FLOPs and bytes.
# 3. `tokens_at_the_ridge` gives the smallest whole number of tokens with which the layer is bound by arithmetic. A
#    narrow layer never gets there, because x and the result have bytes as well: then give None. You may search (10,000
#    tokens are far enough) or solve an equation.
#
# About 15 lines together.

# %% tags=["exercise"]
def linear_layer(tokens, inputs, outputs, number_bytes):
    """FLOPs and bytes of x @ W, for x [tokens, inputs] and W [inputs, outputs]."""
    ### BEGIN SOLUTION
    flops = 2 * tokens * inputs * outputs
    numbers = tokens * inputs + inputs * outputs + tokens * outputs
    return flops, numbers * number_bytes
    ### END SOLUTION

def shortest_s(flops, num_bytes, flops_per_s, bytes_per_s):
    """The least seconds that the device needs."""
    ### BEGIN SOLUTION
    return max(flops / flops_per_s, num_bytes / bytes_per_s)
    ### END SOLUTION

def tokens_at_the_ridge(inputs, outputs, number_bytes, flops_per_s, bytes_per_s):
    """The least number of tokens that is bound by arithmetic; None if there is none."""
    ### BEGIN SOLUTION
    per_token_s = 2 * inputs * outputs / flops_per_s
    per_token_s -= (inputs + outputs) * number_bytes / bytes_per_s
    if per_token_s <= 0:
        return None
    weight_s = inputs * outputs * number_bytes / bytes_per_s
    return math.ceil(weight_s / per_token_s)
    ### END SOLUTION

# %% tags=["check"]
check("3.1", linear_layer, shortest_s, tokens_at_the_ridge)

# %% [markdown]
# Let us measure it on your device: a layer with a = b = 4096 in float32, on 1 to 256 tokens.
#
# **Predict.** How many seconds does it take for 1 token, and how many for 256? Compute both from the two numbers above;
# your functions may help.

# %% tags=["predict"]
one_token_s = 4 * 4096**2 / speed.bytes_per_s
many_tokens_s = 256 * 2 * 4096**2 / speed.flops_per_s

# %%
from labcode.teach.progress import status

status("timing a layer on 1 to 256 tokens: about 4 s")
dots = roofline.dots(CPU, torch.float32)
status()
addition, one_token, *_, many_tokens = dots
compare("1 token", one_token_s, one_token.seconds, unit="s", within=2)
compare("256 tokens", many_tokens_s, many_tokens.seconds, unit="s", within=1.5)

# %% [markdown]
# (A product with a single token reads W with another kernel than the sum of two tensors has, and it may reach half of
# that bandwidth. So the first comparison allows a factor of 2, and the second 1.5. The two numbers of the device were
# measured some minutes before the layer. If another program keeps the machine busy in the one moment and not in the
# other, run both cells again.)
#
# The **roofline** is the picture of the rule. The height of a dot is the rate that an operation reaches. On the left
# the roof is intensity · bandwidth, on the right it is the rate. No operation can lie above the true roof. Ours is
# measured, by two operations, so another one may lie a little above it.

# %%
def roof(flops_per_s, bytes_per_s, dots):
    """Intensities, and the highest rate that each allows."""
    ridge = flops_per_s / bytes_per_s
    intensities = sorted([dot.intensity for dot in dots] + [ridge])
    rates = [min(flops_per_s, bytes_per_s * intensity) for intensity in intensities]
    return intensities, rates

def measured(dots):
    return [dot.intensity for dot in dots], [dot.flops_per_s for dot in dots]

# %% tags=["figure"]
plot.lines(
    {"roof": roof(speed.flops_per_s, speed.bytes_per_s, dots)},
    points={"a linear layer, 1 to 256 tokens": measured(dots[1:]),
            "the sum of two tensors": measured(dots[:1])},
    upright={"ridge": ridge},
    logx=True, logy=True, marks=False,
    xlabel="FLOPs for each byte", ylabel="FLOP/s", title="Your device and its roof",
    alt="A roof that rises with the intensity up to the ridge and is level beyond it; "
        "the sum of two tensors lies at its foot, and the linear layer climbs it from "
        "1 to 256 tokens, below it",
)

# %% [markdown]
# The layer climbs towards the level roof as the tokens grow.
#
# An H100 has measured the same dots, in bfloat16 and for a layer of width 8192 (`benchmarks/on_a_gpu.py`). Its large
# product reached 827 TFLOP/s, and the sum of two tensors 2.56 TB/s, less than the datasheet's 989 and 3.35.
#
# **Predict.** On the H100 the layer takes 47.8 microseconds for one token. How many microseconds does it take for 64
# tokens? And for 4096 tokens? W has 8192² numbers of 2 bytes.

# %% tags=["predict"]
us_for_64 = 47.8
us_for_4096 = 2 * 4096 * 8192**2 / 827e12 * 1e6

# %%
device, gpu = recorded("roofline")
gpu_dots = [roofline.Dot(**row) for row in gpu["dots"]["bfloat16"]]
us_by_tokens = {}
for dot in gpu_dots[1:]:
    us_by_tokens[int(dot.name.split()[-2])] = dot.seconds * 1e6
print(device["device"], "with PyTorch", device["torch"])
compare("64 tokens, us", us_for_64, us_by_tokens[64])
compare("4096 tokens, us", us_for_4096, us_by_tokens[4096])

# %% tags=["figure"]
gpu_speed = gpu["speed"]["bfloat16"]
plot.lines(
    {"roof": roof(gpu_speed["flops_per_s"], gpu_speed["bytes_per_s"], gpu_dots)},
    points={"a linear layer, 1 to 16,384 tokens": measured(gpu_dots[1:]),
            "the sum of two tensors": measured(gpu_dots[:1])},
    upright={"ridge": gpu_speed["flops_per_s"] / gpu_speed["bytes_per_s"]},
    logx=True, logy=True, marks=False,
    xlabel="FLOPs for each byte", ylabel="FLOP/s", title="An H100 in bfloat16",
    alt="On an H100 the linear layer lies on the rising roof from 1 to 256 tokens, and "
        "below the level roof from 512 tokens on, at four fifths of it",
)
print("tokens   ms on your device")
for dot in dots[1:]:
    print(f"{dot.name.split()[-2]:>6} {1e3 * dot.seconds:6.1f}")

# %% [markdown]
# On the H100 64 tokens cost as much as one. On your device the printed times begin to grow much earlier, for two
# reasons. The ridge of a CPU core is so low that a handful of tokens, about twice the ridge in float32, is already
# bound by arithmetic. And the roof says only how fast an operation can be at best: for several tokens a CPU takes
# another kernel than for one, and with so few rows that kernel may stay well below the roof.
#
# Below the ridge, then, more tokens cost next to nothing. This is why a larger batch makes a step cheaper for each
# token until the device is full, and no cheaper beyond. It is also why a model that writes text, one token at a time,
# uses less than a hundredth of the arithmetic of its GPU. The ridge of the H100 is 323 FLOPs for each byte. A CPU core
# is slower than the GPU in both, and most of all in arithmetic.
#
# **Takeaway: an operation is bound by arithmetic if it has more FLOPs for each byte than the ridge of the device, and
# by memory if it has fewer. A linear layer gets there with enough tokens, an elementwise operation never.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* What goes wrong: the bytes of the result are forgotten, the sum of both times is taken for the
# larger one, and `tokens_at_the_ridge` is 2 T / w = ridge solved for T, which forgets x and the result and finds an
# answer where there is none. Ask: how does the ridge change if products become 8-bit and the memory stays? (It doubles
# with the rate, and the intensity doubles with the smaller numbers: the number of tokens stays.)

# %% [markdown]
# ## 2. Your step on the roof, and MFU (core, 35 min)
#
# How much arithmetic is in a whole step? A matrix product of [T, a] and [a, b] takes 2 T a b FLOPs, so a weight costs 2
# FLOPs for each token in forward. Backward takes twice as many, for the gradient of the input and that of the weight. A
# training step with T tokens and N weights takes about **6 N T** FLOPs.
#
# **Predict.** Our model is a small GPT with 1.62 million weights, and a step has 512 tokens. How many FLOPs is that?

# %% tags=["predict"]
flops_guess = 6 * 1.62e6 * 512

# %%
from torch.utils.flop_counter import FlopCounterMode

from labcode.perf.step import device_step
from labcode.teach.labs.l03_step import operations
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
print(f"{seconds * 1e3:.0f} ms, {flops / seconds / 1e9:.0f} GFLOP/s")

# %% [markdown]
# The formula counts a few weights that are only looked up, and leaves out the products within attention. For short
# sequences both are small.
#
# The operations of a step follow each other: large products, which are bound by arithmetic, and many others, which are
# bound by memory. There is a third cost. Each operation has to be started. On a GPU the CPU puts a **kernel** (a
# program for the device) into a queue, which takes some microseconds, however little the kernel has to do. That is a
# **launch**. So a step takes about
#
#     FLOPs / rate  +  bytes of all that is no product / bandwidth  +  operations * launch
#
# (On a GPU the last part counts only when the queue runs empty: section 7. And operations such as `view` and `t` start
# no kernel at all. They only look at a tensor in another way, and cost no more than the call.)
#
# **Predict.** Which is the largest part of our step here: "arithmetic", "bytes" or "launches"? The step has some 220
# operations, and a launch takes about 5 microseconds on a CPU.

# %% tags=["predict"]
largest_part = "arithmetic"

# %%
speed = device_speed(CPU, torch.float32)
parts = device_step(model.config, speed, micro_batch=8)
parts_ms = {
    "arithmetic": parts.matmul_s * 1e3,
    "bytes": parts.memory_s * 1e3,
    "launches": parts.launch_s * 1e3,
}
largest = max(parts_ms, key=lambda name: parts_ms[name])
compare("the largest part", largest_part, largest, found="computed", options=parts_ms)
print(f"together {parts.step_s * 1e3:.0f} ms; measured above: {seconds * 1e3:.0f} ms")

# %% tags=["figure"]
plot.bars(
    parts_ms, ylabel="milliseconds", fmt="{:.1f}",
    title="Where a step of our GPT goes on this CPU, by this sum",
    alt="Of the three parts of a step arithmetic is the longest, then bytes; "
        "launches hardly count on a CPU",
)

# %% [markdown]
# (`device_step` counts the bytes of norms, sums, GELU, softmax and loss in forward and backward, and those of the
# optimizer, which the measured step above does not have.) In this sum no operation is slower than its bytes or FLOPs
# say. Real steps take up to twice as long (`benchmarks/predicted_step.py`). It is enough to see which rung to climb
# first.
#
# How good is a step? Compare the arithmetic that the model needs with what the device could have done in that time.
# This is the **MFU**, model FLOPs utilization (Chowdhery et al. 2022):
#
#     MFU = FLOPs that the model needs / (seconds of the step · peak FLOP/s of the device)
#
# It counts what the model needs, not what was executed. So work that is done twice to save memory (lesson 16, section
# 4) makes it smaller. The peak is that of the datasheet, for the dtype of the products; a CPU has no such number, so
# here we take the measured rate of a large product.

# %%
print(f"MFU of our step: {flops / seconds / speed.flops_per_s:.0%}")

# %% [markdown]
# Now a published training run. The HPC centre NERSC has climbed a ladder with a vision transformer that learns to
# forecast weather, on one A100, with 16 samples in a step. Each bar has all that the bars before it have.

# %% tags=["figure"]
from labcode.teach.labs.l03_step import NERSC_SAMPLES_PER_S

plot.bars(
    NERSC_SAMPLES_PER_S, ylabel="samples/s",
    title="Published: a ViT on one A100 (NERSC, 2024)",
    alt="From the baseline of 8.8 samples per second to 12.6 with four data workers, "
        "13.2 with DALI, 53 with bfloat16, 53 with a fused optimizer and 55 compiled",
)

# %% [markdown]
# The second and the third bar are those of lesson 02: they feed the device. Rates do not add up, but seconds do: 13.19
# samples/s are 16 / 13.19 = 1.21 s for a step, and 53.21 samples/s are 0.30 s.
#
# The model has 12 layers with h = 384 features, and a sample has s = 4,050 tokens. The weights of a layer are 12 h²
# numbers (4 h² of them in attention, 8 h² in the MLP), so its products take 24 h² FLOPs for each token in forward. In
# the core of attention each token meets all s tokens, in two products of 2 s h FLOPs each. For short sequences that is
# little; here it is not.
#
# **Predict.** Which share of the model's FLOPs is in the core of attention? Then compute how many FLOPs a step has
# (forward and backward), and the MFU of the rung "bfloat16". The A100's peak in bfloat16 is 312 TFLOP/s.

# %% tags=["predict"]
share_of_attention = 4 * 4050 / (24 * 384 + 4 * 4050)
step_flops = 3 * 16 * 4050 * 12 * (24 * 384**2 + 4 * 4050 * 384)
mfu_of_bfloat16 = step_flops / (16 / 53.21) / 312e12

# %%
from labcode.teach.labs.l03_step import nersc_forward

with FlopCounterMode(display=False) as counter:
    nersc_forward()  # one sample, on tensors that have shapes and no memory
by_operation = counter.get_flop_counts()["Global"]
forward_flops = counter.get_total_flops()
attention_flops = forward_flops - by_operation[torch.ops.aten.addmm]
counted_flops = 3 * 16 * forward_flops
compare("share of attention", share_of_attention, attention_flops / forward_flops,
        within=1.1, found="counted")
compare("FLOPs of a step", step_flops, counted_flops, unit="FLOP", within=1.1,
        found="counted")
nersc_mfu = {}
for rung, rate in NERSC_SAMPLES_PER_S.items():
    nersc_mfu[rung] = counted_flops * rate / 16 / 312e12
compare("MFU of bfloat16", mfu_of_bfloat16, nersc_mfu["bfloat16"], within=1.1,
        found="counted")

# %% tags=["figure"]
plot.bars(
    {rung: 100 * mfu for rung, mfu in nersc_mfu.items()},
    ylabel="MFU, % of 312 TFLOP/s", fmt="{:.1f}",
    title="The same ladder as MFU",
    alt="The MFU is 4 % for the baseline, 6 % with four workers and with DALI, and 24 "
        "to 25 % from bfloat16 on",
)

# %% [markdown]
# The ladder ends at a quarter of the peak. NERSC has published the samples per second; the MFU is ours, from the FLOPs
# that we counted. (The ladder's first rungs multiply in tf32, a format of section 4, whose peak on the A100 is half as
# high: of that peak, the rung DALI reaches 12 %.)
#
# One thing does not add up. An A100 multiplies bfloat16 at most **twice** as fast as tf32, and the rung bfloat16 is
# **four** times as fast as the one before it. Products alone cannot explain it. Something else must have become faster,
# and it must be a large part of the step. You have just computed which part is large.
#
# **Takeaway: a step is arithmetic, bytes and launches. MFU says how far it is from the device's peak. When a gain is
# larger than the peak explains, look for what else has changed.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* People forget the 3 (forward and backward) or the 16. Ask: what is the MFU of the baseline, and
# is that bad code? (4 %, and half of it is a loader that does not keep up: lesson 02.) Ask also why MFU is fair to
# compare two layouts of one model, and unfair to compare a model of short sequences with one of long ones. (In the
# latter a larger part is attention, which reaches less of the peak.)

# %% [markdown]
# ## 3. Fused attention (core, 25 min)
#
# The core of attention computes scores = q kᵀ, takes their softmax, and multiplies the result with v. Written as
# separate operations, it makes a table of s × s scores for each head. Let d be the size of a head and w the bytes of a
# number. Count for one head, forward:
#
# - two products, each with 2 s² d FLOPs: 4 s² d together;
# - the table is written by the first product, read and written by the softmax, and read by the second product: 4 s²
#   numbers. q, k, v and the output are 4 s d numbers more, which are few if s is large.
#
# So the intensity is about 4 s² d / (4 s² w) = d / w, whatever the length of the sequence is. **Fused** attention
# (FlashAttention, Dao et al. 2022) is one kernel. It goes through the keys in blocks that fit into the memory next to
# the units that compute, keeps running sums there, and never writes the table. It computes as many FLOPs, and moves 4 s
# d numbers. Its intensity is 4 s² d / (4 s d w) = s / w. (How the softmax of a row can be computed in blocks is
# exercise 11.1.)
#
# **Predict.** NERSC's heads have d = 48, and s = 4,050. On the H100, where the ridge is 323 for bfloat16 (w = 2): what
# bounds plain attention, and what fused attention? "arithmetic" or "memory"?

# %% tags=["predict"]
plain_is_bound_by = "memory"
fused_is_bound_by = "arithmetic"

# %%
_, gpu = recorded("roofline")
gpu_speed = gpu["speed"]["bfloat16"]
gpu_ridge = gpu_speed["flops_per_s"] / gpu_speed["bytes_per_s"]

def bound_by(intensity):
    return "arithmetic" if intensity > gpu_ridge else "memory"

KINDS = ("arithmetic", "memory")
compare("plain", plain_is_bound_by, bound_by(48 / 2), found="computed", options=KINDS)
compare("fused", fused_is_bound_by, bound_by(4050 / 2), found="computed", options=KINDS)

# %% [markdown]
# Here is what the H100 measured for one layer of this shape: 16 samples, 8 heads, 4,050 tokens.

# %%
attention_ms = {}
for row in gpu["attention"]:
    if row["backward"] and "seconds" in row:
        attention_ms[row["dtype"], row["kernel"]] = row["seconds"] * 1e3
print("forward and backward of the core of attention")
for (dtype, kernel), milliseconds in attention_ms.items():
    print(f"{dtype:>10}, {kernel:<24} {milliseconds:5.1f} ms")

# %% [markdown]
# Two things stand out. In bfloat16 the fused kernel is ten times as fast as plain attention, and plain attention gains
# nothing from bfloat16: it waits for memory, and it makes more passes over the table than we have counted, some of them
# in float32. And in 32 bits there is no FlashAttention: PyTorch takes another fused kernel, the memory-efficient one,
# which is seven times as slow as FlashAttention in bfloat16. That is two factors. The memory-efficient kernel itself
# becomes 3.1 times as fast in bfloat16, more than twice, because it does not use tf32 (its two rows in 32 bits are the
# same). And FlashAttention is 2.2 times as fast as it. So the rung bfloat16 also changes the **kernel** of attention,
# not only the dtype of its products.
#
# Does that explain a ladder? The H100 has climbed it as well, with layers of NERSC's sizes. In tf32 a step took 768 ms.
#
# **Predict.** How many milliseconds does the step take in bfloat16? There are 12 layers, and PyTorch takes the fastest
# kernel for each dtype. Suppose that everything but the core of attention takes half of the time that it takes in tf32,
# as the peaks say. How many times as fast is the step?

# %% tags=["predict"]
bfloat16_ms = (768 - 12 * 54.9) / 2 + 12 * 7.9
times_as_fast = 768 / bfloat16_ms

# %%
_, rungs = recorded("ladder")
gpu_step_ms = {row["name"]: row["step_s"] * 1e3 for row in rungs}
compare("step in bfloat16, ms", bfloat16_ms, gpu_step_ms["bfloat16"])
gain = gpu_step_ms["tf32"] / gpu_step_ms["bfloat16"]
compare("times as fast", times_as_fast, gain)

# %% [markdown]
# So the gain of nearly six is mostly attention's: its core took 12 · 54.9 = 659 of the 768 ms. NERSC's code calls the
# same PyTorch function, and its factor of four on an A100 is of the same kind. (We could not measure on an A100.)
#
# Your CPU has a fused kernel as well, in float32.

# %%
SHAPE = (1, 4, 1024, 64)  # batch, heads, tokens, size of a head
cpu_ms = {}
for kernel in ("plain", "fused"):
    cpu_ms[kernel] = roofline.attention_s(kernel, SHAPE, CPU) * 1e3
    print(f"{kernel}: {cpu_ms[kernel]:.1f} ms forward")

# %% [markdown]
# And it saves memory: for backward it keeps q, k, v, the output and one number for each row, where plain attention
# keeps the table. In PyTorch `F.scaled_dot_product_attention` chooses the kernel by dtype, shape and mask. A mask that
# you write out as a tensor, or a dtype without a kernel, sends you back to a slower one without a word;
# `torch.nn.attention.sdpa_kernel(SDPBackend.FLASH_ATTENTION)` as a block around the call makes it an error.
#
# **Takeaway: fusing saves bytes, not FLOPs. Plain attention is bound by memory at any length; fused attention is bound
# by arithmetic if the sequence is long. Know which kernel your attention runs in.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Ask: at which length is fused attention bound by memory on an H100? (s / 2 < 323: below 646
# tokens. Short sequences have small tables anyway.) Ask also why the fused kernel reaches a fifth of the H100's peak
# here. (4 · 16 · 8 · 4050² · 48 FLOPs forward in 2.1 ms are 190 TFLOP/s. PyTorch's kernel is FlashAttention-2, which was
# written for the A100 and reaches 35 % on an H100 at best, by the abstract of FlashAttention-3, arXiv:2407.08608.
# Exponentials are no product, and d = 48 is no size that tensor cores like.)

# %% [markdown]
# ## 4. What bfloat16 does (core, 35 min)
#
# A floating-point number is ± 1.f · 2^e. One bit is the sign. The bits of the **exponent** e decide how large and how
# small a number can be, its **range**. The bits of the **fraction** f (m of them) decide how close two numbers lie,
# their **spacing**.

# %% tags=["figure"]
plot.formats(
    {"float32": (8, 23), "tf32": (8, 10), "bfloat16": (8, 7), "float16": (5, 10)},
    title="bfloat16 keeps the range of float32, float16 keeps more digits",
    alt="float32 has 8 bits of exponent and 23 of fraction, tf32 8 and 10, bfloat16 8 "
        "and 7, float16 5 and 10; each has one bit for the sign",
)

# %% tags=["figure"]
plot.format_ranges(
    ["float32", "bfloat16", "float16"],
    title="The range of each, in powers of two",
    alt="Bars on a logarithmic axis: float32 and bfloat16 reach from about 2^-126 to "
        "2^128 and below that with fewer digits; float16 reaches from 2^-14 to 2^16, "
        "and with fewer digits down to 2^-24",
)

# %% [markdown]
# Between 2^e and 2^(e+1) there are 2^m numbers, evenly spaced. So their spacing is 2^(e-m). For
# example, between 1 and 2 (e = 0) the bfloat16 numbers lie 2^-7 = 0.0078 apart. A result that is not among them is
# rounded to the nearest one. If it lies in the middle, it goes to the neighbour whose last bit is 0. (You write this
# rounding yourself in lesson 18, section 4.)
#
# tf32 is not a format for storing. **Tensor cores** are units of a GPU that do one thing only, products of small
# matrices, many times as fast as its other units. In tf32 they read float32 factors, use 10 bits of their fraction, and
# add up in float32. Containers of NVIDIA switch it on, so NERSC's baseline has it. PyTorch from PyPI leaves it off for
# matrix products: `torch.set_float32_matmul_precision("high")` switches it on. On the H100 the large product of section
# 1 reaches 52 TFLOP/s in float32, 412 in tf32 and 827 in bfloat16.
#
# The environment variable `NVIDIA_TF32_OVERRIDE=0` takes tf32 away from every program, because NVIDIA's libraries obey
# it. NERSC ran its rung DALI, of 13.19 samples/s, once more in this way. In a step of 16 samples the linear layers of
# that model take 8.6e12 FLOPs, by the counter of section 2. The A100's datasheet says 156 TFLOP/s in tf32, and 19.5 in
# float32.
#
# **Predict.** How many samples/s are left without tf32? The rest of the step is the core of attention and memory
# traffic. Section 3 says what tf32 does for the core of attention.

# %% tags=["predict"]
lost_s = 8.6e12 / 19.5e12 - 8.6e12 / 156e12  # the linear layers alone get slower
without_tf32 = 16 / (16 / 13.19 + lost_s)

# %% tags=["nbval-check-output"]
from labcode.teach.labs.l03_step import NERSC_WITHOUT_TF32

rate = NERSC_WITHOUT_TF32
compare("without tf32, samples/s", without_tf32, rate, within=1.1, found="published")

# %% [markdown]
# The linear layers alone explain the loss. The core of attention has 14.5e12 FLOPs more, and had it used tf32 as well,
# the same sum would leave 7 samples/s. (Real products stay below both peaks. Nearly all of the difference comes from
# the lower peak, which is the easier one to reach.)
#
# The exponent of float16 has 5 bits, so 32 values. Two of them are reserved, for infinity and for small numbers, and 30
# are left: e goes from -14 to 15. So the largest number is about 2^16. Below 2^-14 there are still **subnormal**
# numbers, evenly spaced by 2^-24 down to 0. What is less than half of the smallest of them becomes 0.
#
# **Predict.** What becomes of 1 + 2^-9 in bfloat16 (m = 7) and in float16 (m = 10)? What becomes of a gradient of 1e-8
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
# 16-bit copies of their factors. What needs digits stays in float32: on a GPU autocast has a list of operations that it
# computes in float32, softmax, the norms and the loss among them.
#
# How many weights of our model would be stuck, in one step of AdamW? We count by kind, since matrices start with small
# numbers, and the gains of norms start with 1.

# %%
def is_gain(name):
    return "norm" in name and name.endswith("weight")

def shares_that_move(lr):
    """Shares of the matrices and of the gains, in a step of AdamW in bfloat16."""
    model = new_model().to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    gpt.loss(model(tokens), targets).backward()
    optimizer.step()
    matrices = []
    gains = []
    for name, param in model.named_parameters():
        has_moved = (param.detach() != before[name]).flatten()
        if is_gain(name):
            gains.append(has_moved)
        elif param.dim() == 2:
            matrices.append(has_moved)
    return torch.cat(matrices).float().mean(), torch.cat(gains).float().mean()

for lr in (1e-3, 1e-4, 1e-5):
    of_matrices, of_gains = shares_that_move(lr)
    told = f"{of_matrices:.0%} of the matrices move, {of_gains:.0%} of the gains"
    print(f"lr {lr:g}: {told}")

# %% [markdown]
# At a learning rate of 1e-3 the matrices move, so the loss falls and nobody notices, while no gain of a norm moves at
# all: it is the weight of 1.0 from the cell before. When the rate falls, towards the end of training, the matrices
# stop one by one. Training with weights in bfloat16 alone works, and stops too early.
#
# **What autocast does to memory, loss and speed.** What backward needs is saved in the dtype in which it was computed.
# The factors of products become half as large. What the norms, softmax and loss save stays as it is. So does the
# tensor that goes from one layer to the next: each layer adds its result to it, and sums stay in float32. And there is
# something new: the 16-bit copies of the weights are kept for backward as well.
#
# **Predict.** How large is what autograd saves with bfloat16 autocast, as a fraction of what it saves in float32?
# Answer by a word: "1/2", "between 1/2 and 1", or "1".

# %% tags=["predict"]
saved_part = "between 1/2 and 1"

# %%
from labcode.perf.saved_bytes import saved_bytes
from labcode.teach.labs.l03_step import autocast


def saved_by_forward(dtype):
    with saved_bytes(model) as saved, autocast(dtype):
        loss = gpt.loss(model(tokens), targets)
        num_bytes = saved.total()
    loss.backward()
    return num_bytes

in_32_bits = saved_by_forward(torch.float32)
in_16_bits = saved_by_forward(torch.bfloat16)
ratio = in_16_bits / in_32_bits
print(f"float32 {in_32_bits / 1e6:.1f} MB, bfloat16 {in_16_bits / 1e6:.1f} MB")
print(f"ratio {ratio:.2f}")
part = "between 1/2 and 1"
if ratio < 0.55:
    part = "1/2"
elif ratio > 0.95:
    part = "1"
compare("saved", saved_part, part, options=("1/2", "between 1/2 and 1", "1"))

# %% [markdown]
# Now the loss. We train the same model from the same weights in float32 and in bfloat16. It is half as wide as ours, so
# that it takes a few seconds. `autocast(dtype)` is `torch.autocast("cpu", dtype)`, and nothing for float32.

# %% tags=["by-hand"]
from labcode.teach.labs.l03_step import NUM_STEPS, narrow_model
from labcode.teach.progress import status


def trained(dtype, batches):
    """A narrow model after 32 steps, and the loss of each step."""
    model = narrow_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses = []
    for step in range(NUM_STEPS):
        tokens, targets = batches(step)
        optimizer.zero_grad()
        with autocast(dtype):
            loss = gpt.loss(model(tokens), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        status(f"{dtype}: step {step + 1} of {NUM_STEPS}")
    status()
    return model, losses

# %%
losses = {}
for name in ("float32", "bfloat16"):
    _, losses[name] = trained(getattr(torch, name), batches)

# %% tags=["figure"]
plot.lines(
    losses, xlabel="step", ylabel="loss (nats per character)", marks=False,
    title="Two dtypes, one curve", wide="float32",
    alt="The losses of float32 and bfloat16 fall together over 32 steps, one on the "
        "other",
)

# %% [markdown]
# The curves lie on each other, but for small differences. And time? GPUs have multiplied float16 on tensor cores since
# 2017, bfloat16 and tf32 since 2020. A CPU may have a unit for bfloat16 (Intel's AMX, or AVX512-BF16). Here is what
# yours has, and what it makes of one layer of our model alone: a linear layer, forward and backward, with the
# conversions that autocast adds.

# %%
flags = torch.cpu.get_capabilities()
print("units for bfloat16:", flags.get("amx_bf16") or flags.get("avx512_bf16"))

def layer_in(dtype):
    layer = nn.Linear(256, 1024)
    x = torch.randn(512, 256, requires_grad=True)

    def forward_backward():
        with autocast(dtype):
            y = layer(x)
        y.backward(torch.ones_like(y))
    return forward_backward

# %%
from labcode.perf.step import device_step
from labcode.train.device_speed import device_speed


def work_in(dtype):
    def work():
        with autocast(dtype):
            loss = gpt.loss(model(tokens), targets)
        loss.backward()
    return work

layers = {"float32": layer_in(torch.float32), "bfloat16": layer_in(torch.bfloat16)}
layer_s = median_s(layers, rounds=20)
layer_gain = layer_s["float32"] / layer_s["bfloat16"]
print(f"in bfloat16 a layer takes {1 / layer_gain:.2g} times as long", end=", ")
print(f"so layer_gain is {layer_gain:.2f}")

parts = device_step(model.config, device_speed(CPU, torch.float32), micro_batch=8)
products_ms = parts.matmul_s * 1e3
float32_ms = median_s({"float32": work_in(torch.float32)})["float32"] * 1e3
print(f"forward and backward in float32 take {float32_ms:.0f} ms", end=", ")
print(f"of which products take {products_ms:.0f} ms (section 2)")

# %% [markdown]
# Suppose that all products of a step gain what this layer gains, and that all else takes as long as in float32.
#
# **Predict.** How many times as fast, then, is forward and backward in bfloat16 as in float32? Compute it from the
# three numbers above. (Rates do not add up, seconds do. The sum leaves out that autocast converts other tensors than
# those of one layer as well. So it promises a little too much, and the comparison allows a factor of 1.4.)

# %% tags=["predict"]
bfloat16_speedup = float32_ms / (products_ms / layer_gain + float32_ms - products_ms)

# %%
works = {"float32": work_in(torch.float32), "bfloat16": work_in(torch.bfloat16)}
times = median_s(works, rounds=7)
measured_speedup = times["float32"] / times["bfloat16"]
compare("bfloat16", bfloat16_speedup, measured_speedup, within=1.4)

# %% [markdown]
# bfloat16 gains where there is a unit for it. Large layers gain more than small ones, and long sequences gain the fused
# kernel of section 3 as well.
#
# **Takeaway: bfloat16 has the range of float32 and 2 to 3 digits. Products forgive that, updates do not. So compute in
# 16 bits, and keep weights and optimizer in 32.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* On a CPU without bfloat16 units (most laptops before 2023) the ratio is below 1: let people say
# what they got, and collect capabilities against ratios on the board. Ask: does a larger bfloat16 weight get stuck
# earlier or later? (Earlier: the spacing grows with it, and AdamW's update does not.) One remedy is *stochastic
# rounding*: round up with the probability that keeps the mean right.

# %% [markdown]
# ## 5. The optimizer: hundreds of small operations (core, 30 min)
#
# AdamW does this with each weight w, for its gradient g, in step t:
#
#     w = (1 - lr * decay) * w                               decay
#     m = beta1 * m + (1 - beta1) * g                        mean of the gradients
#     v = beta2 * v + (1 - beta2) * g * g                    mean of their squares
#     w = w - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
#
# As a loop over the parameters, the step takes 9 operations for each of them: one counts the step, one is for
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

# %% tags=["by-hand"]
def adamw_of(model, how):
    """AdamW of PyTorch as a "loop", as "foreach" or "fused", after its first step."""
    params = model.parameters()
    fused = how == "fused"
    foreach = how == "foreach"
    optimizer = torch.optim.AdamW(params, lr=1e-9, fused=fused, foreach=foreach)
    optimizer.step()  # it makes the state
    return optimizer

# %% tags=["nbval-check-output"]
from labcode.teach.labs.l03_step import operations

gpt.loss(model(tokens), targets).backward()  # a parameter without .grad is left out
HOWS = ("loop", "foreach", "fused")
counts = {how: sum(operations(adamw_of(model, how).step).values()) for how in HOWS}
compare("loop", as_a_loop, counts["loop"], within=1.05, found="counted")
compare("foreach", as_foreach, counts["foreach"], within=1.2, found="counted")
compare("fused", as_fused, counts["fused"], within=1, found="counted")

# %% [markdown] tags=["exercise"]
# ### Exercise 3.2 · AdamW on lists
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
# AdamW in float64, and counts your operations for 4 tensors and for 20: there must be no more of them.

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
check("3.2", adamw)

# %% [markdown]
# What is it worth? That depends on where it runs. On a GPU a foreach operation is one kernel, or a few, for all
# tensors, so it saves launches. It saves no bytes: each operation still reads and writes all of its lists. The fused
# one saves both. It reads w, g, m and v once and writes w, m and v once.
#
# **On a CPU** PyTorch has no such kernel for lists: a foreach operation is a loop in C++ over the tensors.
#
# **Predict.** How many times as fast as the loop is `fused` here? Count bytes: as a loop, the operations above read and
# write 20 numbers for each weight, and fused 7. (The caches of your CPU hold a part of the numbers between two
# operations, which helps the loop, and calls from Python hold it up. So the comparison allows a factor of 2.)

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
compare("fused", fused_speedup, large["loop"] / large["fused"], within=2)

# %% [markdown]
# The fused one gains on both models: bytes on the one, calls on the other. foreach, which is the default on a GPU,
# gains on a CPU at most what the calls from Python cost.
#
# How much of a step that is depends on the model. The H100 of section 3 had a step of 133 ms in bfloat16 with the loop,
# of 122 ms with foreach and of 124 ms with fused: the launches were most of what there was to save.
#
# **Takeaway: an optimizer is memory traffic and launches. foreach saves launches, fused saves bytes as well.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* What goes wrong: decay in the gradient (Adam with L2), eps before the correction, and
# `torch._foreach_sqrt_`, which destroys v. The 20 numbers: decay 2, lerp 3, mul 2, addcmul 3, sqrt 2, div 2, add 2,
# addcdiv 4. Ask: why is foreach not the default everywhere? (It needs a temporary copy of all roots at once, the size
# of the weights.)

# %% [markdown]
# ## 6. torch.compile: fewer bytes by fusion (core, 15 min)
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
# The intensity of such a chain is far below the ridge: its time is its bytes, divided by the bandwidth.
#
# **Predict.** How many times as many bytes does the chain read and write one by one, as it does when fused? We count
# them, and then see what the clock says.

# %% tags=["predict"]
times_as_many_bytes = 12 / 2

# %%
def chain(x):
    x = x * 2
    x = x + 1
    x = x * 0.5
    x = x - 3
    x = x.abs()
    return x.clamp(max=1)

# %%
from torch.utils._python_dispatch import TorchDispatchMode


class CountBytes(TorchDispatchMode):
    """Counts what each operation reads and writes."""

    num_bytes = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        for tensor in (*args, result):
            if isinstance(tensor, torch.Tensor):
                self.num_bytes += tensor.nbytes
        return result

x = torch.randn(2**20)
with CountBytes() as counted:
    y = chain(x)
bytes_fused = x.nbytes + y.nbytes
ratio = counted.num_bytes / bytes_fused
compare("bytes", times_as_many_bytes, ratio, within=1.01, found="counted")

# %%
from torch._inductor.utils import fresh_cache

from labcode.teach.labs.l03_step import seconds_of
from labcode.teach.progress import status

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
print(f"by the clock, fused is {speedup:.1f} times as fast")
print(f"compiled in {compile_s:.0f} s: paid back after", end=" ")
print(f"{compile_s / gain_s:,.0f} calls")

# %% [markdown]
# (`fresh_cache` hides the cache on the disk, where a second run would find the kernel.)
#
# The clock need not agree with the bytes, because on a CPU two things come between: the caches hold a part of the
# tensors, which helps the single operations, and new memory for each result costs them time. A whole model gains less,
# since most of its time is in matrix products. When this course was written, a small GPT took 22 to 39 s to compile on
# two cores of a CPU, and no gain could be measured. On NERSC's A100 the first of four epochs, in which the model is
# compiled, took 57 s instead of 12. The next two gained nothing, for a reason that its log does not say, and the
# last gained 3 % (53.3 to 55.0 samples/s). On the H100 of section 3 a step became 1.14 times as fast.
#
# What `compile` cannot record (by default a `print`, an `.item()`, a decision by a value) breaks the graph in two. A
# second shape of the input is a second compilation, which by default makes that size variable; further shapes then need
# none. Batches of one shape avoid both.
#
# **Takeaway: compiling saves bytes and launches between matrix products. It pays when the time that it saves in all
# steps is more than that of compiling.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* The measured factor may lie on either side of 6: allocations (page faults) of five temporaries
# make the slow side slower, caches make it faster. Ask: why is dropout + residual + norm a good candidate? (Three
# elementwise or row-wise operations on the widest stream of the layer.)

# %% [markdown]
# ## 7. When launches are the bottleneck (core, 15 min)
#
# On a CPU an operation is done when its call returns. On a GPU the CPU runs ahead: it launches kernels into a queue,
# and the GPU works through it. As long as kernels take longer than launches, the queue is never empty, and launches
# cost nothing. With short kernels the GPU waits for the CPU.

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
# **Predict.** A step has 1000 kernels and each launch takes 5 µs. How many milliseconds is the step long if a kernel
# takes 20 µs, and if it takes 2 µs? How many times as fast can a graph make each of the two? (Its one launch hardly
# counts.) Below, a loop plays the two lanes of the picture.

# %% tags=["predict"]
long_ms = 1000 * 20e-3
short_ms = 1000 * 5e-3
graph_gain_long = 1.0
graph_gain_short = 5 / 2

# %% tags=["nbval-check-output"]
def played_ms(launch_us, kernel_us, kernels=1000):
    """The CPU launches one kernel after another; the GPU runs each when it can."""
    launched_us = 0
    done_us = 0
    for _ in range(kernels):
        launched_us += launch_us
        done_us = max(done_us, launched_us) + kernel_us
    return done_us / 1e3

long_step_ms = played_ms(5, 20)
short_step_ms = played_ms(5, 2)
compare("long kernels, ms", long_ms, long_step_ms, within=1.01, found="simulated")
compare("short kernels, ms", short_ms, short_step_ms, within=1.01, found="simulated")
long_gain = played_ms(5, 20) / played_ms(0, 20)
short_gain = played_ms(5, 2) / played_ms(0, 2)
compare("graph, long", graph_gain_long, long_gain, within=1.01, found="simulated")
compare("graph, short", graph_gain_short, short_gain, within=1.01, found="simulated")

# %% [markdown]
# So a step takes about as long as the slower of the two lanes: n launches or n kernels. There are no CUDA graphs on a
# CPU, but the same overhead can be seen: the time of an addition against its size. Where the line is flat, all you pay
# for is the call. (It is less than a launch of section 2, in which there are a module and autograd as well.)

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
# With several ranks a graph can hold their messages too: NCCL's collectives are recorded like kernels. Launching such a
# graph is then a collective itself, so every rank of each group has to launch the graph of the same recording. NERSC
# recommends it for large runs with several groups of ranks, where a late launch on one rank makes the others wait.
#
# **Takeaway: launches cost time only when kernels are shorter than launches: small models, small batches, many GPUs for
# one batch. Then record them once.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Ask: what else helps when launches are the bottleneck? (A larger batch, fused operations.) And:
# why is `loss.item()` in every step bad on a GPU, even without graphs? (The processor waits until the queue is empty,
# and then starts with nothing launched ahead.)

# %% [markdown]
# ## 8. The whole ladder, here (core, 30 min)
#
# We climb it with our own step: 8 windows, forward, backward and AdamW. Each row has what the rows before it have.
# Beside it stand NERSC's ladder, from the rung where the data are no longer in the way, and that of the H100. Each is
# relative to its first rung, which is float32 here and tf32 on both GPUs. The first two rungs of this lesson have no bar.
# The batch stays as it is, and attention calls the same function in all bars: on the GPUs its fast kernel comes with
# bfloat16 (section 3). Exercise 3.3 lets you choose both.

# %%
from labcode.teach.labs.l03_by_hand import adamw_of
from labcode.teach.labs.l03_step import NERSC_SAMPLES_PER_S, autocast


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
    "float32 or tf32": step_with(torch.float32, "loop"),
    "bfloat16": step_with(torch.bfloat16, "loop"),
    "fused optimizer": step_with(torch.bfloat16, "fused"),
}
here_s = median_s(rungs, rounds=11)
ladder = {}
for rung, seconds in here_s.items():
    ladder[rung] = {"here": here_s["float32 or tf32"] / seconds}

# %%
_, gpu_rungs = recorded("ladder")
h100 = {row["name"]: row["samples_per_s"] for row in gpu_rungs}
PUBLISHED = {
    "float32 or tf32": ("DALI", "tf32"),
    "bfloat16": ("bfloat16", "bfloat16"),
    "fused optimizer": ("fused Adam", "fused optimizer"),
    "torch.compile": ("torch.compile", "compiled"),
}
for rung, (on_a100, on_h100) in PUBLISHED.items():
    gains = ladder.setdefault(rung, {})
    gains["A100"] = NERSC_SAMPLES_PER_S[on_a100] / NERSC_SAMPLES_PER_S["DALI"]
    gains["H100"] = h100[on_h100] / h100["tf32"]

# %% tags=["figure"]
plot.bars(
    ladder, ylabel="times as fast as the first rung", fmt="{:.2g}",
    title="The same ladder on three devices",
    alt="On the A100 nearly all of the gain of four times comes from bfloat16, and on "
        "the H100 of seven times; what it makes of the step here depends on the CPU",
)

# %% [markdown]
# The rungs are the same, and what they gain differs. NERSC's model has long sequences, so the kernel of attention decides. Ours are short,
# so on a CPU with a unit for bfloat16 it is the products that gain, and on one without it the bar of bfloat16 is far
# below 1: PyTorch has no fast product of 16-bit numbers for it. There is no bar for `torch.compile` here: section 6 says
# why. On your GPU `python benchmarks/on_a_gpu.py` measures every rung.
#
# **Takeaway: measure each rung on your own step. A published ladder tells you which rungs there are.**

# %% [markdown] tags=["exercise"]
# ### Exercise 3.3 · Open end: reach a loss in the least time
#
# A training run has a goal, not a number of steps. Choose the settings with which our GPT reaches 2.9 nats on windows
# that it does not train on, as soon as possible: `l03_race.Settings(batch, dtype, optimizer, attention)`. The learning
# rate is fixed. The baseline, `l03_race.BASELINE`, is a batch of 32 in float32 with the loop and fused attention.
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
# | your dtype, optimizer and attention save at least half of the time that this lesson's rungs save in a step of your batch | required |
# | at least 3 times as fast as the baseline | required |
# | your prediction within a factor of 2 | required |
#
# For the second row the check times, in one run with yours, the baseline with your batch and what the rungs make of
# it. On a CPU without a unit for bfloat16 another dtype may win, and float16 may take ten times as long.

# %% tags=["exercise"]
from labcode.teach.labs import l03_race

### BEGIN SOLUTION
settings = l03_race.Settings(batch=8, dtype="float32", optimizer="fused")
if torch.cpu.get_capabilities().get("avx512_bf16"):  # chips with AMX have it too
    settings = l03_race.Settings(batch=8, dtype="bfloat16", optimizer="fused")
predicted_speedup = 6.0
### END SOLUTION

# %% tags=["check"]
check("3.3", settings, predicted_speedup)

# %% [markdown]
# A batch of 4 has the quickest steps of all, and needs so many more of them that it loses to 8 and 16: its gradients
# are too noisy for this learning rate. A batch of 32 needs no fewer steps than one of 8, and each takes longer. So 8 or
# 16 win on one small device. (With other windows the numbers of steps differ by some tens.) Lesson 06 is about where
# this ends.

# %% tags=["solution-only"]
for batch in (4, 8, 16):
    choice = l03_race.Settings(batch=batch, dtype=settings.dtype, optimizer="fused")
    print(f"batch {batch:2}: {l03_race.steps_to_target(choice)} steps")
print(f"the baseline: {l03_race.steps_to_target(l03_race.BASELINE)} steps")

# %% [markdown] tags=["solution-only"]
# *For the instructor.* People choose the largest batch, because it has the most samples per second. That is the wrong
# measure: samples are not progress. Others choose batch 4 by the time of a step. Ask: how would the winner change on an
# A100, where a batch of 8 takes as long as one of 64? (Then the larger batch is free.)

# %% [markdown]
# ## 9. From here to GPUs and SLURM (core, 5 min)
#
# | rung | in labcode | in plain PyTorch |
# |---|---|---|
# | tf32 | `--train.dtype tf32` | `torch.set_float32_matmul_precision("high")` |
# | bfloat16, the default on a GPU | `--train.dtype bfloat16` | `torch.autocast("cuda", torch.bfloat16)` |
# | float16, without bfloat16 (lesson 18, section 2) | `--train.dtype float16` | and `torch.amp.GradScaler("cuda")` |
# | fused optimizer, the default | `--optim.implementation fused` | `AdamW(..., fused=True)` |
# | compile each layer, or the whole | `--train.compile block`, `model` | `torch.compile(model)` |
# | CUDA graphs | `--train.cuda_graphs` | `torch.cuda.graph`, or `torch.compile(model, mode="reduce-overhead")` |
#
# On a GPU: `python -m labcode.train gpt_10m --train.dtype bfloat16 --train.compile block`. In a job on SLURM the same
# line stands behind `srun --gpus=1`. Measure on a node that you have for yourself, and leave out the first steps:
# they compile, allocate and warm up.
#
# Climb in this order: feed the device (lesson 02), bfloat16 with the fused kernel of attention, a batch that fills the
# device, the fused optimizer, compile. Try CUDA graphs when a profile shows gaps between short kernels.
#
# ## Questions (core, 15 min)
#
# **1.** A colleague stores a sum of 10,000 losses, each about 3, in bfloat16. What will the sum be?
#
# <details><summary>Answer</summary>
#
# It grows until half the spacing is more than 3: from 1024 to 2048 the spacing is 8, so adding 3 changes nothing. It
# stays near 1024. Sums belong in float32.
# </details>
#
# **2.** A step takes 40 ms, of which 30 ms are matrix products. How many times as fast can torch.compile make it at
# most? And how many times as fast is it, without torch.compile, on a device with products 4 times as fast?
#
# <details><summary>Answer</summary>
#
# Compiling can take away at most the other 10 ms: 40 / 30 = 1.33 times as fast. With faster products 40 / (10 + 7.5) =
# 2.3 times; afterwards the 10 ms are more than half, and compiling is worth more than before.
# </details>
#
# **3.** A colleague finds that a linear layer takes as long for 8 tokens as for 64, and wants to file a bug. What do
# you say?
#
# <details><summary>Answer</summary>
#
# The layer is bound by memory: its weights have to be read for one token as for 64. Below the ridge more tokens cost
# next to nothing. It is a reason to process more of them at once.
# </details>
#
# **4.** From lesson 01: gradients of N weights are all-reduced over p ranks in bfloat16. How many bytes does a rank
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
# | a larger batch | bytes of the weights | the intensity lies below the ridge | memory |
# | fused attention | bytes of the table of scores | sequences are long | a dtype and a mask that it knows |
# | bfloat16 autocast | arithmetic, bytes of factors | the device has a unit for it, layers are large | digits |
# | foreach optimizer | launches | many small weights, on a GPU | a temporary copy |
# | fused optimizer | launches and bytes | the optimizer is a visible part of the step | nothing |
# | torch.compile | bytes, launches | much that is elementwise, one shape | 10 s to minutes |
# | CUDA graphs | launches | kernels shorter than launches | fixed shapes and addresses |
#
# ## Sources
#
# - Williams, Waterman and Patterson 2009, *Roofline*, doi:10.1145/1498765.1498785: the rule of section 1.
# - He 2022, *Making Deep Learning Go Brrrr From First Principles*: <https://horace.io/brrr_intro.html>.
# - Chowdhery et al. 2022, *PaLM*, arXiv:2204.02311, section 4.1: MFU.
# - Dao et al. 2022, *FlashAttention*, arXiv:2205.14135.
# - NVIDIA, *H100 Tensor Core GPU* and *A100 Tensor Core GPU*, datasheets: peaks and bandwidths.
# - NERSC, *Deep Learning at Scale Training*, README, "Single GPU performance profiling and optimization" (logs of
#   November 2024, A100 with 40 GB, batch 16): <https://github.com/NERSC/dl-at-scale-training>. The bars are epoch 4 of
#   each log: baseline, 4 workers, DALI, AMP BF16, fused, JIT; so is the rung DALI without tf32. The sizes of the model
#   are those of its `config/ViT.yaml`.
# - NVIDIA, NCCL user guide, "Using NCCL with CUDA Graphs":
#   <https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/cudagraph.html>.
# - NERSC, *SC22 tutorial*, "Using CUDA Graphs (optional)": <https://github.com/NERSC/sc22-dl-tutorial>.
# - Nguyen et al. 2021, *Accelerating PyTorch with CUDA Graphs*, table 1:
#   <https://pytorch.org/blog/accelerating-pytorch-with-cuda-graphs/>.
# - Micikevicius et al. 2017, *Mixed Precision Training*, arXiv:1710.03740: master weights.
# - Kalamkar et al. 2019, *A Study of BFLOAT16 for Deep Learning Training*, arXiv:1905.12322.
# - Loshchilov and Hutter 2017, *Decoupled Weight Decay Regularization*, arXiv:1711.05101, algorithm 2.
# - Kaplan et al. 2020, arXiv:2001.08361, section 2.1: 6 N FLOPs for a token.
# - PyTorch: <https://docs.pytorch.org/docs/stable/amp.html>,
#   <https://docs.pytorch.org/docs/stable/notes/amp_examples.html>.
