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
# # 03b · One device, fast: the rest of the ladder
#
# Lesson 03 has said how fast a step can be, and explained the largest gain of a published ladder. Here you climb the
# rungs one by one: smaller numbers, fewer operations, fewer bytes, fewer launches. Each helps against one kind of cost,
# and before each rung you say what it should gain. The numbers of the sections continue those of lesson 03.
#
# ## Goals
#
# - say what bfloat16 does to matmuls, memory and weights, and which numbers have to stay in 32 bits;
# - predict how many operations an optimizer makes, and what a fused one saves;
# - predict what fusion gains, when compiling pays, and when CUDA graphs do;
# - write AdamW so that its number of calls does not grow with the number of weights.
#
# **Time**: 85 minutes, and 15 more for what is optional. A good place for a break is after section 4. **Needs**:
# lessons 02 (section 1) and 03 (section 1). For sections 5 to 9 also lesson 03 (sections 2 and 3). Everything runs on
# one core of a CPU. Where only a GPU can show something, you see what the same code measured on an H100.

# %%
import math

import torch

from course.lab import check, compare, plot
from course.labs.l03_step import Batches, median_s, new_model, recorded
from labcode.models import gpt

torch.set_num_threads(1)  # a neighbour on the other core disturbs less
CPU = torch.device("cpu")
batches = Batches()
model = new_model()
tokens, targets = batches(0)

# %% [markdown]
# ## 4. What bfloat16 does (core, 24 min)
#
# A floating-point number is ± 1.f · 2^e. One bit is the sign. The bits of the **exponent** e decide how large and how
# small a number can be, its **range**. The bits of the **fraction** f (m of them) decide how close two numbers lie,
# their **spacing**.

# %% tags=["figure"]
plot.formats(
    {"float32": (8, 23), "tf32": (8, 10), "bfloat16": (8, 7), "float16": (5, 10)},
    caption="03b.formats",
)

# %% [markdown]
# Between 2^e and 2^(e+1) there are 2^m numbers, evenly spaced. So their spacing is 2^(e-m). For
# example, between 1 and 2 (e = 0) the bfloat16 numbers lie 2^-7 = 0.0078 apart. A result that is not among them is
# rounded to the nearest one, and from the middle to the neighbour whose last bit is 0. (You write this rounding yourself
# in lesson 18, section 4.)
#
# tf32 is not a format for storing. **Tensor cores** are units of a GPU that only multiply small matrices, many times as
# fast as its other units. In tf32 they read float32 factors, use 10 bits of their fraction, and accumulate in float32.
# NVIDIA's containers switch it on, so NERSC's baseline has it. PyTorch from PyPI leaves it off for matmuls, and
# `torch.set_float32_matmul_precision("high")` switches it on. On the H100 the large matmul of lesson 03, section 1,
# reaches 52 TFLOP/s in float32, 412 in tf32 and 827 in bfloat16.
#
# The environment variable `NVIDIA_TF32_OVERRIDE=0` takes tf32 away from any program that is started with it, because
# NVIDIA's libraries obey it. NERSC ran its rung DALI, of 13.19 samples/s, once more in this way. In a step of 16
# samples the linear layers of that model take 8.6e12 FLOPs, by the counter of lesson 03, section 2. The A100's
# datasheet says 156 TFLOP/s in tf32, and 19.5 in float32.
#
# **Predict.** How many samples/s are left without tf32? The rest of the step is memory traffic and the core of
# attention, whose kernel does not use tf32 (lesson 03, section 3).

# %% tags=["predict"]
# the linear layers alone get slower
without_tf32 = 16 / (16 / 13.19 - 8.6e12 / 156e12 + 8.6e12 / 19.5e12)

# %% tags=["nbval-check-output"]
from course.labs.l03_step import NERSC_WITHOUT_TF32

rate = NERSC_WITHOUT_TF32
compare("without tf32, samples/s", without_tf32, rate, within=1.1, found="published")

# %% [markdown]
# The linear layers alone explain the loss. The core of attention has 14.5e12 FLOPs more, and had it used tf32 as well,
# the same sum would leave 7 samples/s. (Real matmuls stay below both peaks. Nearly all of the difference comes from
# the lower peak, which is the easier one to reach.)
#
# The exponent of float16 has 5 bits, three fewer than the others. So its largest number is about 2^16 = 65,536, and
# what lies below 2^-25 becomes 0 (lesson 18, section 1, draws all these ranges).

# %% tags=["nbval-check-output"]
def rounded(x, dtype):
    return torch.tensor(x, dtype=torch.float64).to(dtype).item()

for number in (1.001, 70_000.0, 1e-8):
    in_bfloat16 = rounded(number, torch.bfloat16)
    in_float16 = rounded(number, torch.float16)
    print(f"{number:g}: {in_bfloat16:.6g} in bfloat16, {in_float16:.6g} in float16")

# %% [markdown]
# So bfloat16 loses digits and float16 loses range. A matmul forgives lost digits: it sums many numbers, their rounding
# errors partly cancel, and the device accumulates in float32. An **update** does not forgive. Take a weight of 1.0, and
# subtract 0.001 from it a hundred times.
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
# Each update is less than half the spacing, so each one is rounded away, and after a million updates the weight would
# still be 1. Therefore the weights are kept in float32, as **master weights**, and matmuls use 16-bit copies of them. In
# PyTorch **autocast** does this: within its block, matmuls get 16-bit copies of their factors. What needs digits stays
# in float32: on a GPU autocast has a list of operations that it computes in float32, softmax, the norms and the loss
# among them.
#
# How many weights of our model would be stuck in one step of AdamW? We count by kind, since matrices start with small
# numbers, and the weights of the norms, their **gains**, start at 1.

# %%
def is_gain(name):
    return "norm" in name and name.endswith("weight")

def fractions_that_move(lr):
    """Fractions of the matrices and of the gains, in a step of AdamW in bfloat16."""
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
    of_matrices, of_gains = fractions_that_move(lr)
    told = f"{of_matrices:.0%} of the matrices move, {of_gains:.0%} of the gains"
    print(f"lr {lr:g}: {told}")

# %% [markdown]
# At a learning rate of 1e-3 the matrices move, so the loss falls and nobody notices, while no gain of a norm moves at
# all: it is the weight of 1.0 from the cell before. When the rate falls towards the end of training, more and more of
# the matrices stop as well. Training with weights in bfloat16 alone works, and stops too early.
#
# **What autocast does to memory, loss and speed.** What backward needs is saved in the dtype in which it was computed.
# The factors of matmuls become half as large, while what the norms, softmax and loss save stays as it is. So does the
# tensor that goes from one layer to the next, because each layer adds its result to it, and sums stay in float32. And
# something is added: the 16-bit copies of the weights are kept for backward as well.
#
# **Predict.** How large is what autograd saves with bfloat16 autocast, as a fraction of what it saves in float32?
# Answer "1/2", "between 1/2 and 1", or "1".

# %% tags=["predict"]
saved_part = "between 1/2 and 1"

# %%
from course.labs.l03_step import autocast
from labcode.perf.saved_bytes import saved_bytes


def saved_by_forward(dtype):
    with saved_bytes(model) as saved, autocast(dtype):
        loss = gpt.loss(model(tokens), targets)
        num_bytes = saved.total()
    loss.backward()
    return num_bytes

in_32_bits = saved_by_forward(torch.float32)
in_16_bits = saved_by_forward(torch.bfloat16)
ratio = in_16_bits / in_32_bits
part = "between 1/2 and 1"
if ratio < 0.55:
    part = "1/2"
elif ratio > 0.95:
    part = "1"
compare("saved", saved_part, part, options=("1/2", "between 1/2 and 1", "1"))
print(f"float32 {in_32_bits / 1e6:.1f} MB, bfloat16 {in_16_bits / 1e6:.1f} MB")
print(f"ratio {ratio:.2f}")

# %% [markdown]
# Now the loss. We train a model that is half as wide as ours, so that it takes a few seconds, from the same weights in
# float32 and in bfloat16. `autocast(dtype)` is `torch.autocast("cpu", dtype)`, and does nothing for float32.

# %% tags=["by-hand"]
from course.labs.l03_step import NUM_STEPS, narrow_model
from course.progress import status


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
plot.lines(losses, wide="float32", caption="03b.two_dtypes")

# %% [markdown]
# The two curves agree up to small differences. This is one short run of a small model. Kalamkar et al. trained models
# of several kinds to the end, with weights in float32, and found the same. And time? NVIDIA's GPUs have multiplied
# float16 on tensor cores since 2017, bfloat16 and tf32 since 2020. A CPU may have a unit for bfloat16 too (Intel's AMX,
# or AVX512-BF16). bfloat16 gains where there is such a unit, and section 8 shows what it does to a step here. Large
# layers gain more than small ones, and with long sequences the fused attention kernel gains as well.
#
# **Takeaway: bfloat16 has the range of float32 and 2 to 3 digits. Matmuls forgive that, updates do not. So compute in 16
# bits, and keep weights and optimizer state in 32.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* On a CPU without units for bfloat16 (older ones, and most of Intel's for laptops) the bar of
# section 8 is below 1: let people say what they got there. Ask: does a larger bfloat16 weight get stuck earlier or
# later? (Earlier: the spacing grows with it, and AdamW's update does not.) One remedy is *stochastic rounding*: round
# up with the probability that keeps the mean right.

# %% [markdown]
# ## 5. The optimizer: hundreds of small operations (core, 24 min)
#
# AdamW does this with each weight w, for its gradient g, in step t:
#
#     w = (1 - lr * decay) * w                               decay
#     m = beta1 * m + (1 - beta1) * g                        mean of the gradients
#     v = beta2 * v + (1 - beta2) * g * g                    mean of their squares
#     w = w - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
#
# As a loop over the parameters, the step takes 9 operations for each of them: one counts the step, one is for the decay,
# one for m, two for v, and four for the last line. All are elementwise: few FLOPs, many bytes, many launches. With
# `foreach` each of the 9 takes the **list** of all parameters, and with `fused` one operation does all but count the
# step. Our model has 28 parameters (tensors), and we count the operations of a step.

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
from course.labs.l03_step import operations

gpt.loss(model(tokens), targets).backward()  # a parameter without .grad is left out
HOWS = ("loop", "foreach", "fused")
counts = {how: sum(operations(adamw_of(model, how).step).values()) for how in HOWS}
print(counts)

# %% [markdown] tags=["exercise"]
# ### Exercise 3.4 · AdamW on lists
#
# Write the step with `torch._foreach_*`. These functions take lists of tensors, and do one thing to all of them. As with
# tensors, a name that ends in an underscore writes into its first argument. You need, for instance:
#
# - `torch._foreach_mul_(list, number)`, and `add_`, `div_` alike;
# - `torch._foreach_lerp_(a, b, weight)`: a = a + weight * (b - a);
# - `torch._foreach_addcmul_(a, b, c, number)`: a = a + number * b * c;
# - `torch._foreach_addcdiv_(a, b, c, number)`: a = a + number * b / c;
# - `torch._foreach_sqrt(list)`, which gives a new list.
#
# Work in place, in the order of the formulas, and leave the gradients as they are. About 10 lines. The check compares
# with AdamW in float64, and counts your operations for 4 tensors and for 20: 20 tensors must not take more of them.

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
# What is it worth? That depends on where it runs. On a GPU a foreach operation is one kernel, or a few, for all tensors,
# so it saves launches. It saves no bytes, because each operation still reads and writes all of its lists. The fused
# optimizer saves both: it reads w, g, m and v once and writes w, m and v once. **On a CPU** PyTorch has no kernel for
# lists: a foreach operation is a loop in C++ over the tensors.
#
# **Predict.** How many times as fast as the loop is `fused` here? Count how many numbers the two read and write for each
# weight; the loop makes the operations that you wrote with lists. (The caches of your CPU hold some of the numbers
# between two operations, which helps the loop, and calls from Python slow it down. So a factor of 2 is allowed.)

# %% tags=["predict"]
loop_numbers = 2 + 3 + 2 + 3 + 2 + 2 + 2 + 4  # decay, m, v twice, the last line
fused_speedup = loop_numbers / 7

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
large = optimizer_s["28 large"]
compare("fused", fused_speedup, large["loop"] / large["fused"], within=2)
for label, by_how in optimizer_s.items():
    speedups = {how: f"{by_how['loop'] / s:.1f}" for how, s in by_how.items()}
    print(f"{label:>10} parameters, times as fast as the loop: {speedups}")

# %% [markdown]
# As a loop, the operations read and write 20 numbers for each weight: 2 for the decay, 3 for m, 2 and 3 for v, and 10
# for the last line. The fused optimizer reads and writes 7. It gains on both models, bytes on the one and calls on the
# other. foreach, which is the default on a GPU, gains on a CPU at most what the calls from Python cost.
#
# What this means for a step depends on the model. On the H100 of lesson 03 a step in bfloat16 took 133 ms with the loop,
# 122 ms with foreach and 124 ms with fused: the launches were most of what there was to save.
#
# **Takeaway: an optimizer is memory traffic and launches. foreach saves launches, fused saves bytes as well.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* What goes wrong: decay in the gradient (Adam with L2), eps before the correction, and
# `torch._foreach_sqrt_`, which destroys v. The 10 numbers of the last line: sqrt 2, div 2, add 2, addcdiv 4. Ask: why
# is foreach not the default everywhere? (It needs a temporary copy of all roots at once, the size of the weights.)

# %% [markdown]
# ## 6. torch.compile: fewer bytes by fusion (core, 12 min)
#
# What somebody wrote by hand for the fused optimizer, `torch.compile` does by itself. It records the operations of a
# function, and writes new kernels in which neighbouring elementwise operations are **fused**: a number is read once,
# goes through all of them in a register, and is written once. On a GPU the kernels are written in Triton, on a CPU in
# C++. Matmuls stay what they are.

# %% tags=["figure"]
plot.fusion(["* 2", "+ 1", "* 0.5", "- 3", "abs", "clamp"], caption="03b.chain")

# %% [markdown]
# The intensity of such a chain is far below the ridge: its time is its bytes, divided by the bandwidth.
#
# **Predict.** How many times as many bytes does the chain move as single operations as it does fused? We count them, and
# then see what the clock says.

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

from course.labs.l03_step import seconds_of
from course.progress import status

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
# The clock need not agree with the bytes. On a CPU the caches hold a part of the tensors, which helps the single
# operations, and new memory for each result costs them time. A whole model gains less, since most of its time goes into
# matmuls. On two cores of a CPU our smallest GPT took 20 s to compile, and gained 2 % (`benchmarks/README.md`, "A step
# with every option off and on"). On NERSC's A100 the first of four epochs, in which the model is compiled, took 57 s
# instead of 12. The next two gained nothing, for a reason that its log does not say, and the last gained 3 % (53.3 to
# 55.0 samples/s). On the H100 a step became 1.14 times as fast.
#
# What `compile` cannot record (by default a `print`, an `.item()`, a branch on a value) breaks the graph in two. A
# second shape of the input means a second compilation, which by default makes that size variable, so that further
# shapes need none. Batches of one shape avoid both.
#
# **Takeaway: compiling saves bytes and launches between matmuls. It pays when all steps together save more time than
# compiling takes.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* The measured factor may lie on either side of 6: allocations (page faults) of five temporaries
# make the slow side slower, caches make it faster. Ask: why is dropout + residual + norm a good candidate? (Three
# elementwise or row-wise operations on the widest stream of the layer.)

# %% [markdown]
# ## 7. When launches are the bottleneck (core, 10 min)
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
    caption="03b.launches",
)

# %% [markdown]
# A **CUDA graph** records all launches of a step once. Afterwards a single launch replays all of them, with the same
# kernels on the same addresses. So shapes must not change, inputs are copied into the recorded ones, and nothing in
# the step may ask the device for a value: no `.item()`, and no `if` on a gradient.
#
# **Predict.** A step has 1000 kernels of 2 µs each, and a launch takes 5 µs. How many times as fast can a graph make it?
# (Its one launch hardly counts.) Below, a loop plays the two lanes of the picture.

# %% tags=["predict"]
graph_gain = 5 / 2

# %% tags=["nbval-check-output"]
def played_ms(launch_us, kernel_us, kernels=1000):
    """The CPU launches one kernel after another; the GPU runs each when it can."""
    launched_us = 0
    done_us = 0
    for _ in range(kernels):
        launched_us += launch_us
        done_us = max(done_us, launched_us) + kernel_us
    return done_us / 1e3

gain = played_ms(5, 2) / played_ms(0, 2)
compare("with a graph", graph_gain, gain, within=1.01, found="simulated")
for kernel_us in (2, 20):
    one_by_one = played_ms(5, kernel_us)
    as_a_graph = played_ms(0, kernel_us)
    print(f"kernels of {kernel_us} us: {one_by_one} ms, as a graph {as_a_graph} ms")

# %% [markdown]
# So a step takes about as long as the slower of the two lanes, n launches or n kernels, and in this model a graph
# gains nothing where kernels are the longer ones.
#
# This is how labcode makes the recording, in the first step with `--train.cuda_graphs`. A few steps on a side stream
# warm up libraries and allocator; then `torch.cuda.graph` captures one forward and backward, whose kernels are recorded
# and not run. They read the inputs of that call from then on, so before each replay the new batch is copied into them.
# Without a GPU this code cannot run, and it was not run here: you only read it.

# %%
from course.lab import show_source
from labcode.train.cuda_graph import GraphedStep

show_source(GraphedStep._record)

# %% [markdown]
# Published gains of graphs on GPUs agree with the model. In the MLPerf 1.0 runs on which PyTorch reported, Mask
# R-CNN on 272 GPUs (with one image on each, so with short kernels) became 1.70 times as fast, and BERT on 4096 GPUs
# 1.12 times. NERSC writes of an earlier model of its tutorial that it "does not benefit much", and recommends graphs
# for models "with more CPU latency issues (e.g. from many small kernel launches)".
#
# With several ranks (lesson 01) a graph can hold their messages too: NCCL's collectives are recorded like kernels.
# Launching such a graph is then a collective itself, so every rank of each group has to launch the graph of the same
# recording. NERSC recommends it for large runs with several groups of ranks, where a late launch on one rank makes the
# others wait.
#
# **Takeaway: launches cost time only when kernels are shorter than launches: small models, small batches, many GPUs for
# one batch. Then record them once.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Ask: what else helps when launches are the bottleneck? (A larger batch, fused operations.) And:
# why is `loss.item()` in every step bad on a GPU, even without graphs? (The processor waits until the queue is empty,
# and then starts with nothing launched ahead.)

# %% [markdown]
# ## 8. The whole ladder, here (core, 8 min)
#
# We climb it with our own step: 8 windows, forward, backward and AdamW. Each rung includes those before it. Beside ours
# stand NERSC's ladder, from the rung where the data are no longer in the way, and that of the H100. Each is relative to
# its first rung, which is float32 here and tf32 on both GPUs. Lesson 03's larger batch has no bar, since the batch stays
# as it is. And attention calls the same function in all bars: on the GPUs its fast kernel comes with bfloat16 (lesson
# 03, section 3). Exercise 3.5 lets you choose both.

# %%
from course.labs.l03_step import NERSC_SAMPLES_PER_S, autocast
from course.labs.l03b_by_hand import adamw_of


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
plot.bars(ladder, caption="03b.three_devices")

# %% [markdown]
# The rungs are the same, and what they gain differs. NERSC's model has long sequences, so the attention kernel decides.
# Ours are short, so on a CPU with a unit for bfloat16 it is the matmuls that gain, and on one without it the bar of
# bfloat16 is far below 1, because PyTorch has no fast 16-bit matmul for it. There is no bar for `torch.compile` here,
# for the reason in section 6. (NERSC climbed the rung in float16 too, with a GradScaler, and reached over 53 samples/s
# in both formats; it thinks that bfloat16 may have a slight edge, as no loss is scaled.) On your GPU `python
# benchmarks/on_a_gpu.py` measures every rung.
#
# **Takeaway: measure each rung on your own step. A published ladder tells you which rungs there are.**

# %% [markdown]
# ## 9. Open end: reach a loss in the least time (optional, 15 min)
#
# The ladder counts samples per second. What you want is a loss.

# %% [markdown] tags=["exercise"]
# ### Exercise 3.5 · The least time
#
# A training run has a goal, not a number of steps. Choose the settings with which our GPT reaches 2.9 nats on windows
# that it does not train on, as soon as possible: `l03_race.Settings(batch, dtype, optimizer, attention)`. The learning
# rate is fixed. The baseline, `l03_race.BASELINE`, is a batch of 32 in float32 with the loop and fused attention.
#
# - `batch` is 4, 8, 16 or 32; `dtype` "float32", "bfloat16" or "float16" (with a scaler); `optimizer` "for_loop",
#   "foreach" or "fused"; `attention` "fused" or "math" (plain operations instead of one kernel).
# - Time is steps × seconds for a step. `l03_race.steps_to_target(settings)` counts the steps, None if 120 are not
#   enough; `l03_race.step_seconds(one, other)` times a step of each. It counts the seconds in which the processor works
#   for this notebook, so a neighbour on the machine hardly matters.
# - Say also how many times as fast as the baseline it will be. Do not try everything: measure the two parts, and
#   multiply.
#
# | | |
# |---|---|
# | reaches the loss | required |
# | your dtype, optimizer and attention save at least half of the time that the rungs of 03 and 03b save in a step of your batch | required |
# | at least 3 times as fast as the baseline | required |
# | your prediction within a factor of 2 | required |
#
# For the second row the check times, in one run with yours, the baseline with your batch and what the rungs make of
# it. On a CPU without a unit for bfloat16 a different dtype may win, and float16 may take ten times as long.

# %% tags=["exercise"]
from course.labs import l03_race

### BEGIN SOLUTION
settings = l03_race.Settings(batch=8, dtype="float32", optimizer="fused")
if torch.cpu.get_capabilities().get("avx512_bf16"):  # chips with AMX have it too
    settings = l03_race.Settings(batch=8, dtype="bfloat16", optimizer="fused")
predicted_speedup = 6.0
### END SOLUTION

# %% tags=["check"]
check("3.5", settings, predicted_speedup)

# %% [markdown]
# On these windows a batch of 4, which has the quickest steps of all, needs so many more of them that it loses to 8 and
# 16: its gradients are probably too noisy for this learning rate. A batch of 32 needs no fewer steps than one of 8, and
# each takes longer. So 8 or 16 win here. With other windows the steps of small batches differ by some tens, so this one
# run does not say which of the two is better. Lesson 06 is about where this ends.

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
# ## From here to GPUs and SLURM (core, 2 min)
#
# | rung | in labcode | in plain PyTorch |
# |---|---|---|
# | tf32 | `--train.dtype tf32` | `torch.set_float32_matmul_precision("high")` |
# | bfloat16, the default on a GPU | `--train.dtype bfloat16` | `torch.autocast("cuda", torch.bfloat16)` |
# | float16, on GPUs that lack bfloat16 (lesson 18, section 2) | `--train.dtype float16` | and `torch.amp.GradScaler("cuda")` |
# | fused optimizer, the default | `--optim.implementation fused` | `AdamW(..., fused=True)` |
# | compile each layer, or the whole | `--train.compile block`, `model` | `torch.compile(model)` |
# | CUDA graphs | `--train.cuda_graphs` | `torch.cuda.graph`, or `torch.compile(model, mode="reduce-overhead")` |
#
# On a GPU: `python -m labcode.train gpt_10m --train.dtype bfloat16 --train.compile block`. In a job on SLURM the same
# line follows `srun --gpus=1`. Measure on a node that you have for yourself, and leave out the first steps:
# they compile, allocate and warm up.
#
# Climb in this order: feed the device (lesson 02), bfloat16 with the fused kernel of attention, a batch that fills the
# device, the fused optimizer, compile. Try CUDA graphs when a profile shows gaps between short kernels.
#
# ## Questions (core, 5 min)
#
# **1.** A colleague stores a sum of 10,000 losses, each about 3, in bfloat16. What will the sum be?
#
# <details><summary>Answer</summary>
#
# It grows until half the spacing is more than 3: from 1024 to 2048 the spacing is 8, so adding 3 changes nothing. It
# stays near 1024. Sums belong in float32.
# </details>
#
# **2.** A step takes 40 ms, of which 30 ms are matmuls. How many times as fast can torch.compile make it at most? And
# how many times as fast is it, without torch.compile, on a device with matmuls 4 times as fast?
#
# <details><summary>Answer</summary>
#
# Compiling can take away at most the other 10 ms: 40 / 30 = 1.33 times as fast. With faster matmuls 40 / (10 + 7.5) =
# 2.3 times; afterwards the 10 ms are more than half, and compiling is worth more than before.
# </details>
#
# **3.** From lesson 03: a step is bound by memory. Which of the rungs of this lesson help, and which do not?
#
# <details><summary>Answer</summary>
#
# What takes bytes away helps: numbers of 16 bits, a fused optimizer, compiling. Faster matmuls and CUDA graphs do not:
# the former shorten a part that is not the largest, the latter one that is hidden.
# </details>
#
# ## Recap
#
# | rung | attacks | gains when | costs |
# |---|---|---|---|
# | bfloat16 autocast | arithmetic, bytes of factors | the device has a unit for it, layers are large | digits |
# | foreach optimizer | launches | many small weights, on a GPU | a temporary copy |
# | fused optimizer | launches and bytes | the optimizer is a visible part of the step | nothing |
# | torch.compile | bytes, launches | much that is elementwise, one shape | 10 s to minutes |
# | CUDA graphs | launches | kernels shorter than launches | fixed shapes and addresses |
#
# ## Sources
#
# - He 2022, *Making Deep Learning Go Brrrr From First Principles*: <https://horace.io/brrr_intro.html>.
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
# - PyTorch: <https://docs.pytorch.org/docs/stable/amp.html>,
#   <https://docs.pytorch.org/docs/stable/notes/amp_examples.html>.
