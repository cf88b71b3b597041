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
# # 03 · How fast one device can be
#
# In lesson 02 you found where the time of a step goes. Before you make a step faster, ask how fast it can be. Two
# numbers of a device and one number of an operation say so. With them you read a published ladder of speed-ups, find
# the one rung that the numbers cannot explain, and explain it. Then you write the trick behind that rung. Lesson 03b
# climbs the rest of the ladder.
#
# ## Goals
#
# - compute the arithmetic intensity of an operation, and say from two numbers of a device how fast it can be;
# - define MFU, and compute it for a step of your own and for a published training run;
# - say why fused attention is faster, and write attention that never holds the table of its scores.
#
# **Time**: 111 minutes. Good places for a break are after sections 1 and 2. **Needs**: lesson 02 (section 1). For
# section 2 also lesson 02 (section 2). Everything runs on one core of a CPU. Where only a GPU can show something, the
# lesson shows what an H100 measured with the same code.

# %%
import math

import torch

from course.lab import check, compare, plot
from course.labs.l03_step import Batches, median_s, new_model, recorded
from labcode.measure import roofline
from labcode.models import gpt

torch.set_num_threads(1)  # a neighbour on the other core disturbs less
CPU = torch.device("cpu")
batches = Batches()
model = new_model()
tokens, targets = batches(0)

# %% [markdown]
# ## 1. The roofline (core, 36 min)
#
# An operation does two things: it **computes**, which is counted in floating-point operations (FLOPs), and it **moves
# numbers** between the memory and the compute units, which is counted in bytes. A device does both at the same time,
# each at a rate of its own. So the operation takes at least as long as the slower of the two:
#
#     seconds >= max(FLOPs / rate, bytes / bandwidth)
#
# Which of the two it is depends on a single number of the operation, its **arithmetic intensity**, the FLOPs for each
# byte that is read or written, and on a single number of the device, rate / bandwidth, which is called the **ridge**.
# If the intensity lies above the ridge, the operation is bound by arithmetic, and faster arithmetic makes it faster. If
# it lies below, the operation is bound by memory: the compute units wait, and faster ones would only wait longer.
#
# For example, the datasheet of an H100 SXM says 989 TFLOP/s in bfloat16 and 3.35 TB/s, so its ridge is 295 FLOPs for
# each byte. The sum of two float32 tensors computes 1 FLOP for each 12 bytes, as two numbers are read and one is
# written. Its intensity is 0.083, far below any ridge.
#
# Here are the two numbers of your device, measured: the rate of a large matmul, and the bandwidth of a sum of two large
# tensors.

# %%
from labcode.measure.device_speed import device_speed

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
# For few tokens nearly all the bytes are those of W, which has to be read however few tokens there are. So the
# intensity grows with T. With a = b and few tokens it is about 2 T a² / (w a²) = 2 T / w, for numbers of w bytes: half
# the number of tokens in float32.

# %% [markdown] tags=["exercise"]
# ### Exercise 3.1 · From shapes to seconds
#
# Write three functions, of about 15 lines together. The first two are the sentences above.
#
# 1. `linear_layer` gives the FLOPs and the bytes of x @ W.
# 2. `shortest_s` gives the least seconds that a device needs for so many FLOPs and bytes.
# 3. `tokens_at_the_ridge` gives the smallest whole number of tokens with which the layer is bound by arithmetic. A
#    narrow layer never gets there, because x and the result have bytes as well: then give None. You may search (10,000
#    tokens are far enough) or solve an equation.

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
# Let us measure it on your device: a layer with a = b = 4096 in float32, on 1 to 256 tokens. The **roofline** is the
# picture of the rule. The height of a dot is the rate that an operation reaches. On the left the roof is intensity ·
# bandwidth, on the right it is the rate. No operation can lie above the true roof. Ours is measured by two operations,
# so another one may lie above it: a layer with one token hardly writes anything, and reading alone can be faster.

# %%
from course.progress import status

status("timing a layer on 1 to 256 tokens: about 4 s")
dots = roofline.dots(CPU, torch.float32)
status()

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
    caption="03.roof",
)

# %% [markdown]
# The layer climbs towards the level roof as the tokens grow.
#
# The same dots were measured on an H100, in bfloat16 and for a layer of width 8192 (`benchmarks/on_a_gpu.py`). Its large
# matmul reached 827 TFLOP/s, and the sum of two tensors 2.56 TB/s, less than the datasheet's 989 and 3.35.
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
compare("64 tokens, us", us_for_64, us_by_tokens[64])
compare("4096 tokens, us", us_for_4096, us_by_tokens[4096])
print(device["device"], "with PyTorch", device["torch"])

# %% tags=["figure"]
print("tokens   ms on your device")
for dot in dots[1:]:
    print(f"{dot.name.split()[-2]:>6} {1e3 * dot.seconds:6.1f}")
gpu_speed = gpu["speed"]["bfloat16"]
plot.lines(
    {"roof": roof(gpu_speed["flops_per_s"], gpu_speed["bytes_per_s"], gpu_dots)},
    points={"a linear layer, 1 to 16,384 tokens": measured(gpu_dots[1:]),
            "the sum of two tensors": measured(gpu_dots[:1])},
    upright={"ridge": gpu_speed["flops_per_s"] / gpu_speed["bytes_per_s"]},
    caption="03.roof_h100",
)

# %% [markdown]
# On the H100 64 tokens cost as much as one. With 4096 tokens the layer reaches 83 % of the rate of the large matmul;
# we have not looked for the reason. On your device the printed times begin to grow much earlier, for two reasons. The
# ridge of a CPU core is so low that a handful of tokens, about twice the ridge in float32, is already bound by
# arithmetic. And the roof says only how fast an operation can be at best: for several tokens a CPU uses a different
# kernel than for one, and with so few rows that kernel may stay well below the roof.
#
# Below the ridge, then, more tokens cost next to nothing. This is why a larger batch makes a step cheaper per token
# until the device is full, and no cheaper beyond. It is also why a model that writes a single text, one token at a
# time, uses less than a hundredth of the arithmetic of its GPU. The measured ridge of the H100 is 323 FLOPs for each
# byte. A CPU core is slower than the GPU in both, and most of all in arithmetic.
#
# **Takeaway: an operation is bound by arithmetic if it has more FLOPs for each byte than the ridge of the device, and
# by memory if it has fewer. A linear layer gets there with enough tokens, an elementwise operation never.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* What goes wrong: the bytes of the result are forgotten, the sum of both times is taken for the
# larger one, and `tokens_at_the_ridge` is 2 T / w = ridge solved for T, which forgets x and the result and finds an
# answer where there is none. Ask: how does the ridge change if matmuls become 8-bit and the memory stays? (It doubles
# with the rate, and the intensity doubles with the smaller numbers: the number of tokens stays.)

# %% [markdown]
# ## 2. Your step on the roof, and MFU (core, 36 min)
#
# How much arithmetic is in a whole step? A training step with T tokens and N weights takes about **6 N T** FLOPs (lesson
# 02, section 1). Our model is a small GPT with 1.62 million weights, and a step has 512 tokens.

# %%
from torch.utils.flop_counter import FlopCounterMode

from course.labs.l03_step import operations
from labcode.measure.device_speed import device_speed
from labcode.perf.step import device_step


def forward_backward():
    gpt.loss(model(tokens), targets).backward()

with FlopCounterMode(display=False) as counter:
    forward_backward()
flops = counter.get_total_flops()
seconds = median_s({"step": forward_backward})["step"]
calls = operations(forward_backward)

print(f"6 N T: {6 * 1.62e6 * 512 / 1e9:.1f} GFLOP, counted: {flops / 1e9:.1f} GFLOP")
print(f"{sum(calls.values())} operations; the most frequent: {calls.most_common(3)}")
print(f"{seconds * 1e3:.0f} ms, {flops / seconds / 1e9:.0f} GFLOP/s")

# %% [markdown]
# The formula counts a few weights that are only looked up. Both numbers leave out the matmuls within attention, which
# the counter does not see on a CPU (lesson 02, section 1). For short sequences these are few.
#
# The operations of a step follow each other: large matmuls, which are bound by arithmetic, and many others, which are
# bound by memory. There is a third cost: each operation has to be started. On a GPU the CPU puts a **kernel**, which is
# a program for the device, into a queue. Such a **launch** takes some microseconds, however little the kernel has to
# do. So a step takes about
#
#     FLOPs / rate  +  bytes of everything but matmuls / bandwidth  +  operations * launch
#
# On a GPU the last part counts only when the queue runs empty (lesson 03b, section 7). Operations such as `view` and
# `t` start no kernel at all: they only look at a tensor in another way, and cost no more than the call.
#
# **Predict.** Which is the largest part of our step here: "arithmetic", "bytes" or "launches"? By labcode's count,
# everything but matmuls moves about 160 MB. The step has some 220 operations, and a launch takes about 5 microseconds
# on a CPU.

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
for name, milliseconds in parts_ms.items():
    print(f"{name:10} {milliseconds:5.1f} ms")
print(f"together {parts.step_s * 1e3:.0f} ms; measured above: {seconds * 1e3:.0f} ms")

# %% [markdown]
# `device_step` counts the bytes of norms, sums, GELU, softmax and loss in forward and backward, and those of the
# optimizer, which the measured step above does not have. In this sum every operation is as fast as its bytes or FLOPs
# allow; real steps take up to twice as long (`benchmarks/predicted_step.py`). It is enough to see which rung to climb
# first.
#
# How good is a step? Compare the arithmetic that the model needs with what the device could have done in that time.
# This is the **MFU**, model FLOPs utilization (Chowdhery et al. 2022):
#
#     MFU = FLOPs that the model needs / (seconds of the step · peak FLOP/s of the device)
#
# It counts what the model needs, not what was executed. So work that is done twice to save memory (lesson 16, section
# 5) makes it smaller. The peak is that of the datasheet, for the dtype of the matmuls; a CPU has no such number, so
# here we take the measured rate of a large matmul.

# %%
print(f"MFU of our step: {flops / seconds / speed.flops_per_s:.0%}")

# %% [markdown] tags=["exercise"]
# ### Exercise 3.2 · FLOPs of a transformer
#
# 6 N T leaves out the core of attention, which has no weights: each token's query meets the keys of all s tokens, which
# gives s scores, and these weigh the values of all s tokens. For long sequences that is a large part. Write two
# functions, of about 8 lines together.
#
# 1. `flops_of_forward` gives two numbers for forward of one sample: the FLOPs of the matmuls with weights, and those in
#    the core of attention. A layer of width h has four weights of h × h in its attention (for q, k, v and the output),
#    and an MLP from h to 4h and back. Heads divide h among them, and change no FLOPs. Count nothing but matmuls, and
#    leave out what comes before the first layer and after the last.
# 2. `mfu_of_run` gives the MFU of a training run from these two, the samples that it trains in a second, and the peak.

# %% tags=["exercise"]
def flops_of_forward(num_layers, width, tokens):
    """FLOPs of a sample's forward: with weights, and in the core of attention."""
    ### BEGIN SOLUTION
    weights = 12 * width**2
    with_weights = num_layers * tokens * 2 * weights
    scores = 2 * tokens**2 * width
    in_attention = num_layers * 2 * scores  # as many again with the values
    return with_weights, in_attention
    ### END SOLUTION

def mfu_of_run(with_weights, in_attention, samples_per_s, peak_flops_per_s):
    """Which fraction of the peak a training run uses."""
    ### BEGIN SOLUTION
    return 3 * (with_weights + in_attention) * samples_per_s / peak_flops_per_s
    ### END SOLUTION

# %% tags=["check"]
check("3.2", flops_of_forward, mfu_of_run)

# %% [markdown]
# Now a published training run. The HPC centre NERSC has made the training of a vision transformer, which learns to
# forecast weather, faster rung by rung, on one A100 with 16 samples in a step. Each bar has all that the bars before it
# have.

# %% tags=["figure"]
from course.labs.l03_step import NERSC_SAMPLES_PER_S

plot.bars(NERSC_SAMPLES_PER_S, caption="03.nersc_ladder")

# %% [markdown]
# The second and the third bar are those of lesson 02: they feed the device. The model has 12 layers with h = 384
# features, and a sample has s = 4,050 tokens.
#
# **Predict.** Which fraction of the model's FLOPs is in the core of attention? And what is the MFU of the rung
# "bfloat16", at its 53.21 samples/s? The A100's peak in bfloat16 is 312 TFLOP/s. (Your functions may help.)

# %% tags=["predict"]
part_of_attention = 4 * 4050 / (24 * 384 + 4 * 4050)
sample_flops = 3 * 4050 * 12 * (24 * 384**2 + 4 * 4050 * 384)
mfu_of_bfloat16 = sample_flops * 53.21 / 312e12

# %%
from course.labs.l03_step import nersc_forward

with FlopCounterMode(display=False) as counter:
    nersc_forward()  # one sample, on tensors that have shapes and no memory
by_operation = counter.get_flop_counts()["Global"]
forward_flops = counter.get_total_flops()
attention_flops = forward_flops - by_operation[torch.ops.aten.addmm]
way = {"within": 1.1, "found": "counted"}
counted_part = attention_flops / forward_flops
compare("fraction in attention", part_of_attention, counted_part, **way)
nersc_mfu = {}
for rung, rate in NERSC_SAMPLES_PER_S.items():
    nersc_mfu[rung] = 3 * forward_flops * rate / 312e12
compare("MFU of bfloat16", mfu_of_bfloat16, nersc_mfu["bfloat16"], **way)
for rung, mfu in nersc_mfu.items():
    print(f"{rung:15} {mfu:4.0%}")

# %% [markdown]
# The ladder ends at a quarter of the peak. NERSC has published the samples per second; the MFU is ours, from the FLOPs
# that we counted. bfloat16 is a format of 16 bits. The ladder's first rungs multiply in tf32: the tensor cores, a GPU's
# units for matmuls, read numbers of 32 bits and use 19 of them. Its peak on the A100 is half as high, and of that peak
# the rung DALI reaches 12 %. (Lesson 03b, section 4, explains both formats.)
#
# One thing does not add up. An A100 multiplies bfloat16 at most **twice** as fast as tf32, but the rung bfloat16 is
# **four** times as fast as the one before it. Matmuls alone cannot explain it. Something else must have become faster,
# and it must be a large part of the step. You have just computed which part is large.
#
# **Takeaway: a step is arithmetic, bytes and launches. MFU says how far it is from the device's peak. When a gain is
# larger than the peak explains, look for what else has changed.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* In exercise 3.2 people count one of attention's two matmuls, or take the tokens once for its s²
# pairs. In the prediction they forget the 3 (forward and backward). Ask: what is the MFU of the baseline, and
# is that bad code? (4 %, and half of it is a loader that does not keep up: lesson 02.) Ask also why MFU is fair to
# compare two layouts of one model, and unfair to compare a model of short sequences with one of long ones. (In the
# latter a larger part is attention, which reaches less of the peak.)

# %% [markdown]
# ## 3. Fused attention (core, 34 min)
#
# The core of attention computes scores = q kᵀ, takes their softmax, and multiplies the result with v. Written as
# separate operations, it makes a table of s × s scores for each head. Let d be the size of a head and w the bytes of a
# number. Count for one head, forward:
#
# - two matmuls, each with 2 s² d FLOPs: 4 s² d together;
# - the table is written by the first matmul, read and written by the softmax, and read by the second matmul: 4 s²
#   numbers. q, k, v and the output are 4 s d numbers more, which are few if s is large.
#
# So the intensity is about 4 s² d / (4 s² w) = d / w, whatever the length of the sequence. **Fused** attention
# (FlashAttention, Dao et al. 2022) is one kernel. It goes through the keys in blocks that fit into the memory next to
# the compute units, keeps running sums there, and never writes the table. It computes as many FLOPs, but moves only 4
# s d numbers, so its intensity is 4 s² d / (4 s d w) = s / w. (That counts k and v once. Each block of queries reads
# them again, which costs little as long as they come from the GPU's cache.)
#
# NERSC's heads have d = 48, and s = 4,050. In bfloat16 (w = 2) the intensity of plain attention is 24 FLOPs for each
# byte, far below the H100's ridge of 323, and that of fused attention is 2,025, far above it. Here is what was measured
# on the H100 for one layer of this shape: 16 samples, 8 heads, 4,050 tokens.

# %%
_, gpu = recorded("roofline")
attention_ms = {}
for row in gpu["attention"]:
    if row["backward"] and "seconds" in row:
        attention_ms[row["dtype"], row["kernel"]] = row["seconds"] * 1e3
print("forward and backward of the core of attention")
for (dtype, kernel), milliseconds in attention_ms.items():
    print(f"{dtype:>10}, {kernel:<24} {milliseconds:5.1f} ms")

# %% [markdown]
# Two things stand out. In bfloat16 the fused kernel is ten times as fast as plain attention, and plain attention gains
# nothing from bfloat16. It is PyTorch's backend `MATH`, which turns q, k and v into float32 and keeps the table in
# float32, and which makes more passes over it than we have counted. And in 32 bits there is no FlashAttention: PyTorch
# uses another fused kernel, the memory-efficient one, which takes seven times as long as FlashAttention in bfloat16.
# The memory-efficient kernel itself becomes 3.1 times as fast in bfloat16, more than twice: in 32 bits it makes each
# matmul of three in tf32, and so its two rows there are the same. And FlashAttention is another 2.2 times as fast. So
# the rung bfloat16 also changes the **kernel** of attention, not only the dtype of its matmuls.
#
# Does that explain a ladder? It was climbed on the H100 as well, with layers of NERSC's sizes. In tf32 a step took 768
# ms.
#
# **Predict.** How many milliseconds does the step take in bfloat16? There are 12 layers, and PyTorch uses the fastest
# kernel for each dtype. Suppose that everything but the core of attention takes half of the time that it takes in tf32,
# as the peaks say.

# %% tags=["predict"]
bfloat16_ms = (768 - 12 * 54.9) / 2 + 12 * 7.9

# %%
_, rungs = recorded("ladder")
gpu_step_ms = {row["name"]: row["step_s"] * 1e3 for row in rungs}
compare("step in bfloat16, ms", bfloat16_ms, gpu_step_ms["bfloat16"])
gain = gpu_step_ms["tf32"] / gpu_step_ms["bfloat16"]
print(f"{gain:.1f} times as fast as in tf32")

# %% [markdown]
# So the gain of nearly six is mostly attention's: its core took 12 · 54.9 = 659 of the 768 ms. NERSC's code calls the
# same PyTorch function, and its factor of four on an A100 is of the same kind. (We could not measure on an A100.)
#
# How can a softmax be computed before all its scores are there? Take one query. Its output is a weighted mean of the
# values, with the weights exp(score). To keep exp from overflowing, the largest score m is subtracted everywhere, which
# cancels in the mean:
#
# $$ y = \frac{\sum_j e^{s_j - m}\, v_j}{\sum_j e^{s_j - m}} $$
#
# Go through the keys block by block, and keep the largest score, the numerator and the denominator so far. When a new
# block brings a larger score m', both sums were made with the old m. One factor corrects them, exp(m - m'), since
# exp(s - m) · exp(m - m') = exp(s - m').
#
# For example, with the scores 1 and 3 in the first block and 5 in the second: after the first block m = 3, and the
# denominator is exp(-2) + 1 = 1.135. The second block brings m' = 5, so it becomes 1.135 · exp(-2) + 1 = 1.154.

# %% [markdown] tags=["exercise"]
# ### Exercise 3.3 · Attention without the table
#
# Write the forward of attention for one head, without a mask, in about 12 lines. `q` is [n, d], `k` is [s, d] and `v` is
# [s, e]. The scores are q kᵀ / √d, and the result is [n, e]. Take `block` keys at a time; the last block may be
# shorter. Neither the table of scores nor a whole row of it may ever exist. A copy of q, k or v is fine.

# %% tags=["exercise"]
def attention_in_blocks(q, k, v, block):
    """softmax(q k^T / sqrt(d)) v, with `block` keys at a time."""
    ### BEGIN SOLUTION
    largest = q.new_full((len(q), 1), -math.inf)
    denominator = q.new_zeros(len(q), 1)
    numerator = q.new_zeros(len(q), v.shape[1])
    for start in range(0, len(k), block):
        stop = start + block
        scores = q @ k[start:stop].T / math.sqrt(q.shape[1])
        now = torch.maximum(largest, scores.amax(dim=1, keepdim=True))
        weights = torch.exp(scores - now)
        factor = torch.exp(largest - now)
        denominator = denominator * factor + weights.sum(dim=1, keepdim=True)
        numerator = numerator * factor + weights @ v[start:stop]
        largest = now
    return numerator / denominator
    ### END SOLUTION

# %% tags=["check"]
check("3.3", attention_in_blocks)

# %% [markdown]
# FlashAttention is this loop, for a block of queries at a time, written so that a block of q, k, v and scores never
# leaves the memory next to the compute units. (Lesson 11 merges the results of such blocks across ranks.) It saves
# memory as well. For backward it keeps q, k, v, the result and one number for each row, m + ln of the denominator, from
# which the weights of a block can be computed again; plain attention keeps the table.
#
# In PyTorch `F.scaled_dot_product_attention` chooses the kernel by dtype, shape, mask and GPU. A mask that you write
# out as a tensor, or a dtype without a kernel, silently gives you a slower one. Inside the context
# `torch.nn.attention.sdpa_kernel(SDPBackend.FLASH_ATTENTION)` that becomes an error.
#
# **Takeaway: fusing saves bytes, not FLOPs. Plain attention is bound by memory at any length; fused attention is bound
# by arithmetic if the sequence is long. Know which kernel your attention runs in.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* In exercise 3.3 people correct only one of the two sums, or begin the largest score with 0.
# Ask: at which length is fused attention bound by memory on an H100? (s / 2 < 323: below 646 tokens. Short sequences
# have small tables anyway.) Ask also why the fused kernel reaches a fifth of the H100's peak here. (4 · 16 · 8 · 4050²
# · 48 FLOPs forward in 2.1 ms are 190 TFLOP/s. PyTorch's kernel is FlashAttention-2, which was written for the A100 and
# reaches 35 % on an H100 at best, by the abstract of FlashAttention-3, arXiv:2407.08608. Exponentials are not matmuls,
# and d = 48 is no size that tensor cores like.)

# %% [markdown]
# ## From here to GPUs and SLURM (core, 2 min)
#
# `python benchmarks/on_a_gpu.py` measures the roof, the layer and the attention of this lesson on your GPU; in a job on
# SLURM put `srun --gpus=1` in front of it. A training run (`python -m labcode.train gpt_10m`) prints its MFU. For your
# own, take the peak of the dtype in which your matmuls run, without sparsity: datasheets often quote the peak with
# sparsity, which is twice as high.
#
# ## Questions (core, 3 min)
#
# **1.** A new GPU has twice the arithmetic of the old one, and 1.4 times its bandwidth. What happens to the number of
# tokens with which a linear layer is bound by arithmetic?
#
# <details><summary>Answer</summary>
#
# The ridge grows by 2 / 1.4 = 1.43, and the tokens with it: 2 T / w has to reach the ridge.
# </details>
#
# **2.** A colleague reports an MFU of 70 % for a model with long sequences, and uses 6 N T for the FLOPs. Is the true
# MFU higher or lower?
#
# <details><summary>Answer</summary>
#
# Higher. 6 N T leaves out the matmuls within attention, which grow with the length of the sequence, so too few FLOPs
# are divided by the time.
# </details>
#
# **3.** From lesson 02: the profiler shows a step of 100 ms, of which the device waits 40 for the next batch. Which of
# the three parts of section 2 do you make smaller first?
#
# <details><summary>Answer</summary>
#
# None of them: waiting for data is no part of that sum. Feed the device first. Afterwards the sum says what the other
# 60 ms are.
# </details>
#
# ## Recap
#
# | question | formula | here |
# |---|---|---|
# | how fast can an operation be? | max(FLOPs / rate, bytes / bandwidth) | the roofline |
# | what is it bound by? | FLOPs for each byte against rate / bandwidth | a linear layer: about 2 T / w |
# | how much is in a step? | 6 N T, and the matmuls of attention | `FlopCounterMode`, on a CPU without attention |
# | how good is a step? | FLOPs / (seconds · peak) | MFU |
# | why is fused attention faster? | s / w instead of d / w FLOPs for each byte | the table of scores is never written |
#
# ## Sources
#
# - PyTorch, `torch.nn.functional.scaled_dot_product_attention`: "For math backend, all intermediates are kept in
#   torch.float"; the memory-efficient kernel's matmuls in float32: `OpMultiplyAddFastF32` in its
#   `mem_eff_attention/gemm_kernel_utils.h`.
# - Williams, Waterman and Patterson 2009, *Roofline*, doi:10.1145/1498765.1498785: the rule of section 1.
# - He 2022, *Making Deep Learning Go Brrrr From First Principles*: <https://horace.io/brrr_intro.html>.
# - Chowdhery et al. 2022, *PaLM*, arXiv:2204.02311, section 4.1: MFU.
# - Dao et al. 2022, *FlashAttention*, arXiv:2205.14135; Milakov and Gimelshein 2018, arXiv:1805.02867: the running
#   softmax.
# - NVIDIA, *H100 Tensor Core GPU* and *A100 Tensor Core GPU*, datasheets: peaks and bandwidths.
# - NERSC, *Deep Learning at Scale Training*, README, "Single GPU performance profiling and optimization" (logs of
#   November 2024, A100 with 40 GB, batch 16): <https://github.com/NERSC/dl-at-scale-training>. The bars are epoch 4 of
#   each log: baseline, 4 workers, DALI, AMP BF16, fused, JIT. The sizes of the model are those of its
#   `config/ViT.yaml`.
# - Kaplan et al. 2020, arXiv:2001.08361, section 2.1: 6 N FLOPs for a token.
