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
# # 16 · Making it fit
#
# Sooner or later a training stops with the words *out of memory*. Often the answer is found by trying: a smaller batch,
# then a smaller one still. In this lesson you read what the error says, you predict what a step needs before it runs,
# and you write the technique that trades time for memory: activation checkpointing.
#
# ## Goals
#
# - find an out-of-memory error in a log, and say what it tells and what it does not;
# - predict the peak of a step from its parts, and the moment at which it occurs;
# - know what a smaller micro-batch costs, and what it saves;
# - write activation checkpointing as an `autograd.Function`, with dropout;
# - fit a given model into a given budget at the best speed.
#
# **Time**: 90 minutes, in two sittings. Sections 1 to 3 (35 minutes) find out where memory goes; section 4 (35 minutes)
# is the core, and a good place to begin anew; sections 5 to 7 (20 minutes) choose.
# **Needs**: lesson 10 (what a layer keeps for backward) and lesson 13 (16 bytes
# for each parameter). Lesson 03 has bfloat16.

# %%
import math
import os

import torch

from labcode import launch
from labcode.lab import check, compare, plot, show_source
from labcode.models import gpt

os.environ["KINETO_LOG_LEVEL"] = "99"  # the profiler is silent about itself
CPU = torch.device("cpu")
MIB = 2**20

# %% [markdown]
# ## 1. The error, and what it does not say
#
# A process that runs on a cluster has a limit. We give a small GPT one here: `train_within` trains it in a process of
# its own, and the operating system refuses that process more memory for its tensors than we say. (Linux calls this
# limit `RLIMIT_DATA`.)

# %%
import re

from labcode.config import GPTConfig
from labcode.teach.labs.l16_limited import Settings, train_within

CONFIG = GPTConfig(
    vocab_size=512, context_length=128, num_layers=6, num_heads=4, hidden_size=128
)
failed = train_within(CONFIG, Settings(micro_batch=16), room_bytes=80 * MIB)
print(f"exit status {failed.exit_status}\n")
print(failed.log)

# %% [markdown]
# The log is long, and most of it is a traceback. Look for the line that begins with `RuntimeError`. PyTorch's allocator
# for the CPU says how many bytes it was **asked for** when there were none left. The traceback above it says which line
# of the program asked.
#
# On a GPU the error says more. This one was posted by a user in public (the source is at the end):
#
#     torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 22.78 GiB.
#     GPU 0 has a total capacity of 31.47 GiB of which 12.73 GiB is free.
#     Including non-PyTorch memory, this process has 18.73 GiB memory in use.
#     Of the allocated memory 9.08 GiB is allocated by PyTorch, and 9.35 GiB is
#     reserved by PyTorch but unallocated. If reserved but unallocated memory is
#     large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True ...
#
# | field | GiB | what it is |
# |---|---|---|
# | tried to allocate | 22.78 | the one tensor for which there was no room |
# | total capacity | 31.47 | of the GPU |
# | free | 12.73 | what nobody on this GPU has taken |
# | in use by this process | 18.73 | the next two rows, and what CUDA itself takes |
# | allocated by PyTorch | 9.08 | tensors that exist now |
# | reserved but unallocated | 9.35 | memory that PyTorch keeps for its next tensors |
#
# The last row is a cache. Asking CUDA for memory is slow, so PyTorch does not give memory back when a tensor is freed,
# and hands it to the next tensor. Section 6 shows how this cache can get in the way. The advice in the error concerns
# this row alone.
#
# **Predict.** How many GiB has the process in use that PyTorch does not account for? And how much would be free for the
# new tensor if all of the cache were given back?

# %% tags=["predict"]
not_pytorch_gib = 18.73 - 9.08 - 9.35
free_at_best_gib = 12.73 + 9.35

# %% tags=["nbval-check-output"]
free_gib, in_use_gib = 12.73, 18.73
allocated_gib, unallocated_gib = 9.08, 9.35
rest_gib = in_use_gib - (allocated_gib + unallocated_gib)
most_gib = free_gib + unallocated_gib
compare("not PyTorch's, GiB", not_pytorch_gib, rest_gib, within=1.05, found="computed")
compare("free at best, GiB", free_at_best_gib, most_gib, within=1.01, found="computed")

# %% [markdown]
# At best 22.08 GiB, and 22.78 were asked for. So the advice in this error cannot help: even without the cache this
# tensor does not fit. The error prints its advice always. Do the sum first.
#
# What neither error says is **who has the rest**. The tensor that was refused is the last straw, and it may be small:
# in our log it is one of a few MiB, while 80 MiB are taken. To know what filled the memory, you have to count.

# %% [markdown] tags=["exercise"]
# ### Exercise 16.1 · Find it in the log
#
# On a cluster you have the log and not the notebook. Write a function that takes the text of a log and returns how many
# bytes the failed allocation asked for, or `None` if the log has no such error. The CPU writes *you tried to allocate
# 6291456 bytes*. CUDA writes *Tried to allocate 22.78 GiB*, or MiB, or KiB. A GiB has 2**30 bytes. About 8 lines.

# %% tags=["exercise"]
def asked_bytes(log):
    """Bytes that the failed allocation asked for; None without such an error."""
    ### BEGIN SOLUTION
    units = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    found = re.search(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", log)
    if found is None:
        return None
    return float(found[1]) * units[found[2]]
    ### END SOLUTION

# %% tags=["check"]
check("16.1", asked_bytes)

# %% [markdown]
# There is a third way to end: the **kernel** kills the process when the whole machine, or the job's share of it, has no
# memory left. No Python error is written then. The exit status is 137, which is 128 + 9, the number of the signal
# SIGKILL. A data loader that reads whole files is a common cause, and a GPU has nothing to do with it.
#
# **Takeaway: the error names the request that failed, not the memory that was used. Add up the fields before you follow
# the advice.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* 12 minutes. People think that the tensor in the error is the problem. Ask: which change would
# have let the public example run? (A smaller tensor: half the batch or patch. 9.08 GiB are really used.)

# %% [markdown]
# ## 2. Where the memory goes in a step
#
# Lesson 13 has counted what is there all the time: for each parameter 4 bytes of weight and 8 of AdamW's moments, and
# 4 of gradient once backward has made it. Lesson 10 has counted the activations: 16 numbers for each token and feature
# of a layer. A step needs two things more:
#
# - **logits**: for each token one number for every entry of the vocabulary, in float32. The loss holds its result, as
#   large as the logits, and its backward makes two more tensors of this size: three in all;
# - **temporary** tensors, which live for a few operations.
#
# When is the most memory needed? During forward activations grow. During backward they go away, and gradients come in
# their place. There are two moments to look at:
#
# 1. **the loss's backward begins**: all activations, three times the logits, and no gradient of a weight yet;
# 2. **backward ends**: all gradients, and no activations.
#
# Let W be the bytes of the weights, A those of all activations, and V those of the logits:
#
# $$\text{peak} = 3W + \max(A + 3V,\; W)$$
#
# The 3W are weights and the two moments. For example, W = 100, A = 500 and V = 50 MiB give 300 + max(650, 100) = 950.
#
# `training_moments` of labcode follows a step more closely, with six moments and all temporary tensors. Here is our
# model with 4 samples.

# %% tags=["figure"]
from labcode.models import layers
from labcode.perf.memory_timeline import memory_timeline
from labcode.perf.training_memory import training_memory, training_moments
from labcode.teach.progress import following
from labcode.train.measure import allocated_bytes

moments = training_moments(CONFIG, micro_batch=4, data_parallel="none")
by_moment = {}
for moment in moments:
    by_moment[moment.moment] = moment.total / MIB

plot.bars(
    by_moment,
    title="The loss's backward needs the most", ylabel="MiB",
    alt="Memory at six moments of a step: highest when the loss's backward begins, "
        "falling to the optimizer, where only weights, gradients and moments are left",
)

# %% [markdown]
# **Predict.** Now with 16 samples. The model has 1.27 million parameters in float32. Its 6 layers keep 16 numbers of
# 4 bytes for each of 16 · 128 tokens and 128 features, and the vocabulary has 512 entries. How many MiB are W, A and V,
# and the peak?

# %% tags=["predict"]
weights_mib = 1_271_808 * 4 / MIB
activations_mib = 6 * 16 * 4 * 16 * 128 * 128 / MIB
logits_mib = 16 * 128 * 512 * 4 / MIB
peak_mib = 3 * weights_mib + max(activations_mib + 3 * logits_mib, weights_mib)

# %%
def new_model(seed=0):
    return layers.initialize(gpt.GPT(CONFIG), seed=seed)

def one_step(model, optimizer, micro_batch, num_micro_batches=1):
    """One step of training on random tokens."""
    for _ in range(num_micro_batches):
        tokens = torch.randint(512, (micro_batch, 129))
        loss = gpt.loss(model(tokens[:, :-1]), tokens[:, 1:])
        (loss / num_micro_batches).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)

def measured_peak(micro_batch, num_micro_batches=1, model=None):
    """Bytes: weights, moments, and the most that a step takes beyond them."""
    model = model or new_model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    one_step(model, optimizer, 1)  # the moments exist from here on
    held = 3 * 4 * CONFIG.num_parameters
    def work():
        one_step(model, optimizer, micro_batch, num_micro_batches)
    return held + allocated_bytes(work, CPU).peak

found_mib = measured_peak(16) / MIB
exact = training_memory(CONFIG, micro_batch=16, data_parallel="none")
w = exact.parameters / MIB
a = exact.activations / MIB
v = exact.logits / MIB / 3  # the loss holds three
compare("W", weights_mib, w, unit="MiB", within=1.01, found="computed")
compare("A", activations_mib, a, unit="MiB", within=1.05, found="computed")
compare("V", logits_mib, v, unit="MiB", within=1.01, found="computed")
compare("peak", peak_mib, found_mib, unit="MiB", within=1.15)
print(f"labcode's formula, with all that is temporary: {exact.total / MIB:.0f} MiB")

# %% [markdown]
# Three parts and one maximum are close. Most of the memory is activations, as it is for most models that are trained
# with many tokens. That is why the batch is the first thing that people turn down.
#
# One can also watch it. With `--profile.memory` labcode records every allocation of a step, and what it is for. We
# train our model on text for a few steps, and look at step 4.

# %%
SHAPE = [
    "--model.num_layers", 6, "--model.hidden_size", 128, "--train.global_batch", 16,
    "--train.steps", 5, "--train.eval_batches", 1, "--train.sample_tokens", 0,
    "--profile.steps", 4, "--profile.memory",
]
WHOLE = ["--train.out", "runs/whole"]
with following():
    launch.run("labcode.train", "gpt_tiny", *SHAPE, *WHOLE, nproc=1)

# %% tags=["figure"]
plot.memory_timeline(
    memory_timeline("runs/whole"),
    title="Activations rise in forward and fall in backward",
    alt="Memory over one step by what it is for: parameters and optimizer state "
        "throughout, a mountain of activations, gradients that grow while it goes down",
)

# %% [markdown]
# The mountain is highest where forward ends and backward begins. The gradients, in green, begin to grow only then, and
# they are complete when all activations are gone. The logits do not stand out here: this text has less than a fifth of
# the vocabulary that we counted with above. What lives for a few operations is *temporary*.

# %% [markdown] tags=["exercise"]
# ### Exercise 16.2 · The peak, with accumulation
#
# Gradient accumulation runs several micro-batches before the optimizer steps. Their gradients are added up. So from the
# second micro-batch on all gradients are there already when its loss's backward begins, and they stay to the end.
# `parts.weights`, `parts.activations` and `parts.logits` are bytes, those of one micro-batch. Return the peak of the
# step. 4 to 6 lines.

# %% tags=["exercise"]
def peak(parts, num_micro_batches):
    """The most bytes within a step."""
    ### BEGIN SOLUTION
    before = 3 * parts.weights
    at_loss = parts.activations + 3 * parts.logits
    if num_micro_batches > 1:
        at_loss += parts.weights
    return before + max(at_loss, parts.weights)
    ### END SOLUTION

# %% tags=["check"]
check("16.2", peak)

# %% [markdown]
# **Takeaway: the peak is 3 W and the larger of two moments. With many tokens it is the moment when the loss's backward
# begins, and activations are most of it.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* 15 minutes. People add gradients and activations, which do not exist at the same time in a step
# of one micro-batch. Ask: for which models is V larger than A? (Few layers and a large vocabulary: GPT-2 has 50,257
# entries for 768 features.)

# %% [markdown]
# ## 3. A smaller micro-batch
#
# Divide the micro-batch by m and run m of them. The mean gradient is the same, so the training is the same (lesson 04).
# Activations and logits shrink to 1/m. The gradients W are added to the moment of the loss. What does it cost in time?
# The products are the same in number of FLOPs. But each micro-batch starts all operations anew, and small products use
# a device less well.
#
# **Predict.** What is the peak with 16 = 4 · 4 samples, by your formula, in MiB?

# %% tags=["predict"]
in_four_mib = 4 * weights_mib + activations_mib / 4 + 3 * logits_mib / 4

# %%
import statistics
import time

compare("4 x 4", in_four_mib, measured_peak(4, 4) / MIB, unit="MiB", within=1.15)

def median_ms(runs, rounds=3):
    """{name: median ms}; the runs take turns, so that a busy machine is fair to all."""
    times = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - started) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}

model = new_model()
adamw = torch.optim.AdamW(model.parameters(), fused=True)
took = median_ms({
    "1 x 16": lambda: one_step(model, adamw, 16, 1),
    "4 x 4": lambda: one_step(model, adamw, 4, 4),
})
for name, ms in took.items():
    print(f"{name:>6}: {ms / took['1 x 16']:.2f} times as long as 1 x 16")

# %% [markdown]
# How much longer it takes differs from device to device, and on a busy machine from minute to minute. On a GPU it is
# slower as soon as a product no longer fills it. There is an end to it: at one sample nothing is left to divide, and
# with a long sequence one sample may be too large.
#
# **Takeaway: accumulation divides activations and logits by m for the price of smaller products. It is the first thing
# to try, and it ends at one sample.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* 8 minutes. Ask: why does going from 1 to 2 micro-batches not halve even the part beyond 3 W?
# (The gradients come on top at the moment of the peak.)

# %% [markdown]
# ## 4. Activation checkpointing
#
# Backward of a layer needs what its forward computed. We may throw that away and compute it **again** when backward
# comes to the layer. All we have to keep is the layer's input.
#
# The picture shows a step of three layers. The boxes say what runs: F1 is the forward of layer 1, B1 its backward,
# which takes twice as long. Below them stands what is kept at that time, in numbers for each token and feature. A layer
# keeps 16 of them (lesson 10), and its input is one of the 16.

# %% tags=["figure"]
plot.activation_checkpointing(
    num_layers=3,
    alt="Two rows of boxes with what is kept below: everything kept rises to 48 and "
        "falls again; with checkpointing each forward runs twice, and 18 are kept",
)

# %% [markdown]
# In the lower row nothing but three inputs is left when forward ends. Then F3 runs once more, now keeping everything,
# and B3 uses it. After B3 the inside of layer 3 is gone, and F2 is next. Only one layer is ever whole.
#
# **Bytes.** L layers keep 16 L numbers without checkpointing. With it they keep L inputs, and 15 more for the inside of
# the one layer that is being repeated: L + 15. For example, with L = 24: 384 against 39.
#
# **Time.** Backward computes two products where forward computes one. So a step is 1 + 2 = 3 parts, and one more
# forward makes 4: 4/3 of the time.
#
# **Predict.** How many numbers for each token and feature are kept for our 6 layers, without checkpointing and with it?
# How many times as long do forward and backward take?

# %% tags=["predict"]
kept_without = 16 * 6
kept_with = 6 + 15
times_as_long = 4 / 3

# %%
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from labcode.perf.memory import model_activations
from labcode.perf.memory_timeline import memory_timeline
from labcode.perf.saved_bytes import saved_bytes
from labcode.teach.progress import following
from labcode.train.measure import allocated_bytes


def with_checkpointing(model):
    """Put PyTorch's checkpointing around each layer."""
    for block in model.blocks:
        inner = block.forward
        def forward(*args, inner=inner):
            return checkpoint(inner, *args, use_reentrant=False)
        block.forward = forward
    return model

def kept_numbers(model):
    """What the layers keep after forward, for each token and feature."""
    tokens = torch.randint(512, (16, 128))
    with saved_bytes(model) as saved:
        output = model(tokens)
        kept = saved.total()
    ends = model_activations(CONFIG, batch=16, value_bytes=4)
    outside = ends["final norm"] + ends["head input"] + 16 * 128 * 8
    del output
    return (kept - outside) / (16 * 128 * 128 * 4)

plain = new_model()
repeated = with_checkpointing(new_model())
in_all = kept_numbers(plain)
inputs = kept_numbers(repeated)
compare("kept without", kept_without, in_all, within=1.05)
print(f"with checkpointing {inputs:.2f} are kept when forward ends: the inputs")
at_worst = (inputs - 1) + in_all / 6  # one of the six layers is whole
compare("kept with", kept_with, at_worst, within=1.05)

# %%
def forward_and_backward(model):
    tokens = torch.randint(512, (16, 129))
    gpt.loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
    model.zero_grad(set_to_none=True)

took = median_ms({
    "plain": lambda: forward_and_backward(plain),
    "checkpointed": lambda: forward_and_backward(repeated),
})
found = took["checkpointed"] / took["plain"]
compare("times as long", times_as_long, found, within=1.5)

# %% [markdown] tags=["exercise"]
# ### Exercise 16.3 · Write it
#
# Write checkpointing as an autograd Function, used as `Checkpoint.apply(block, *inputs)`. Its `forward` runs with
# autograd switched off; that is what a Function does. The inputs are tensors, and the block returns one tensor.
#
# - `forward`: keep the inputs with `ctx.save_for_backward(*inputs)`, the block, and the state of the random numbers,
#   `torch.get_rng_state()`. Return the output.
# - `backward`: make a copy of each input that has no history, `x.detach().requires_grad_(x.requires_grad)`. Run the
#   block again under `torch.enable_grad()`, with the random numbers of the first run, so that dropout drops the same.
#   Afterwards the generator must be as if the second run had not been.
# - `torch.autograd.backward(output, grad)` then fills the `.grad` of the copies and adds to the `.grad` of the block's
#   parameters, as a backward does.
# - Return one gradient for each argument of forward but `ctx`: `None` for the block, and for an input that needs none.
#
# (A Function is repeated in backward only if one of its tensor inputs needs a gradient. In the check one always does.)
# About 20 lines.

# %% tags=["exercise"]
class Checkpoint(torch.autograd.Function):
    """Runs `block(*inputs)`, keeps the inputs alone, and runs it again in backward."""

    @staticmethod
    def forward(ctx, block, *inputs):
        ### BEGIN SOLUTION
        ctx.block = block
        ctx.state = torch.get_rng_state()
        ctx.save_for_backward(*inputs)
        return block(*inputs)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad):
        ### BEGIN SOLUTION
        copies = []
        for x in ctx.saved_tensors:
            copies.append(x.detach().requires_grad_(x.requires_grad))
        state_now = torch.get_rng_state()
        torch.set_rng_state(ctx.state)
        with torch.enable_grad():
            output = ctx.block(*copies)
        torch.set_rng_state(state_now)
        torch.autograd.backward(output, grad)
        return None, *[x.grad for x in copies]
        ### END SOLUTION

# %% tags=["check"]
check("16.3", Checkpoint)

# %% [markdown]
# This is the step of section 2 once more, with checkpointing around each layer.

# %%
FULL = ["--parallel.activation_checkpointing", "full", "--train.out", "runs/again"]
with following():
    launch.run("labcode.train", "gpt_tiny", *SHAPE, *FULL, nproc=1)

# %% tags=["figure"]
plot.memory_timeline(
    memory_timeline("runs/again"),
    title="With checkpointing: one layer at a time",
    alt="Memory over one step with checkpointing: a low line of layer inputs in "
        "forward, then one tooth for each layer that is computed again in backward",
)

# %% [markdown]
# The peak is a third of what it was. Forward leaves a low line of layer inputs behind. In backward you see one peak for
# each of the six layers, from the last to the first: that layer is computed again. It is drawn as temporary, because it
# is gone a moment later.
#
# PyTorch has both forms. `checkpoint(block, *inputs, use_reentrant=True)` is the one that you wrote: a Function whose
# backward starts another backward. `use_reentrant=False` works with **hooks on saved tensors**: functions that autograd
# calls when an operation keeps a tensor, and again when backward asks for it. This form can stop the second forward as
# soon as it has what backward needs, works when no input needs a gradient, and lets `torch.autograd.grad` through. It
# is the one to use. labcode wraps it so that its own random numbers are repeated as well.
#
# What if someone changes an input **in place** after the block has used it? Then the second run would compute something
# else. Tensors that are kept with `save_for_backward` have a version number, and autograd compares it. The next cell
# ends in an error, and it is meant to. Read its last line.

# %% tags=["raises-exception"] raises="RuntimeError: one of the variables needed for gradient computation has been modified"
weight = torch.ones(3, requires_grad=True)

def sine(x):
    return torch.sin(weight * x)

def gradient_after_a_change(run):
    """The gradient of the weight, when x is doubled in place after its use."""
    weight.grad = None
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True) * 1.0
    y = run(x)
    x.mul_(2)
    y.sum().backward()
    return weight.grad

gradient_after_a_change(lambda x: checkpoint(sine, x, use_reentrant=False))

# %% [markdown]
# The older form refuses it as well. But a checkpoint that keeps its input as an attribute of `ctx` has no version
# number to compare:

# %% tags=["nbval-check-output"]
class KeepsItInCtx(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.x = x  # and not save_for_backward
        return sine(x)

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            copy = ctx.x.detach().requires_grad_()
            output = sine(copy)
        torch.autograd.backward(output, grad)
        return copy.grad

x = torch.tensor([1.0, 2.0, 3.0])
silent = gradient_after_a_change(KeepsItInCtx.apply)
print("right: ", (x * torch.cos(x)).tolist())
print("silent:", silent.tolist())

# %% [markdown]
# It gives wrong gradients and says nothing. That is why the check of your Function refuses it.
#
# **Not every layer.** Checkpointing each layer keeps L inputs and one layer whole. We may put k layers into a segment,
# and keep the input of each segment only. Then L/k inputs are kept, and in backward one segment of k layers is whole at
# once:
#
# $$\lceil L/k \rceil \cdot \text{input} + k \cdot \text{layer}$$
#
# (The input of the segment that is whole is counted twice here; it is small.) If input and layer took the same, the sum
# L/k + k would be smallest at k = √L: this is the square-root rule of Chen et al. (2016). A transformer layer is 16
# times as large as its input, and so its best k is near √(L/16). With the rounding up of the formula it is 1 for up to
# 33 layers: most models put one layer into a segment.

# %% [markdown] tags=["exercise"]
# ### Exercise 16.4 · How many layers in a segment
#
# Return the k, a whole number from 1 to L, that keeps the fewest bytes by the formula above. 3 to 6 lines.

# %% tags=["exercise"]
def best_segment(num_layers, layer_bytes, input_bytes):
    """The number of layers in a segment with which the fewest bytes are kept."""
    ### BEGIN SOLUTION
    def kept(k):
        return math.ceil(num_layers / k) * input_bytes + k * layer_bytes

    return min(range(1, num_layers + 1), key=kept)
    ### END SOLUTION

# %% tags=["check"]
check("16.4", best_segment)

# %% [markdown]
# Let us measure it where the rule applies: a chain of 36 layers, each of which keeps only as much as its input.
#
# **Predict.** Which k needs the least memory, and how many tensors of the size of the input are kept then?

# %% tags=["predict"]
best_k = 6
tensors_kept = 36 / 6 + 6

# %%
class Tanh(nn.Module):
    def forward(self, x):
        return torch.tanh(x)

def peak_of_a_chain(k, num_layers=36, size=2**18):
    """The most tensors of the size of the input at once, in forward and backward."""
    segments = [nn.Sequential(*[Tanh() for _ in range(k)])] * (num_layers // k)
    def work():
        x = torch.ones(size, requires_grad=True)
        for segment in segments:
            x = checkpoint(segment, x, use_reentrant=False)
        x.sum().backward()
    return allocated_bytes(work, CPU).peak / (4 * size)

tensors = {k: peak_of_a_chain(k) for k in (1, 2, 3, 4, 6, 9, 12, 18, 36)}
compare("best k", best_k, min(tensors, key=tensors.get), within=1.5)
compare("tensors kept", tensors_kept, min(tensors.values()), within=1.4)

# %% tags=["figure"]
plot.lines(
    {"measured": (list(tensors), list(tensors.values())),
     "36/k + k": (list(tensors), [36 / k + k for k in tensors])},
    xlabel="layers in a segment, k", ylabel="tensors kept", from_zero=True,
    title="Memory is smallest near the square root of 36",
    alt="Tensors kept against layers in a segment: high for 1 and for 36, "
        "lowest near 6, measured and by the formula",
)

# %% [markdown]
# (What is measured is a little more than the formula: the gradients that travel back are tensors, too.)
#
# **Selective checkpointing** repeats only what is large and cheap. Korthikanti et al. (2022) repeat the core of
# attention: the s × s tables of lesson 10, which counts their terms. They are 5 a s² b bytes of a layer's 34 s b h + 5
# a s² b, and take few FLOPs. For GPT-3 this saves 70 % of the activations for 2.7 % more FLOPs. A fused attention does
# just that inside its kernel: it never stores the table. PyTorch can be told to use the plain kernel,
# `SDPBackend.MATH`, which does store it.
#
# The table has s numbers for each token and head, in float32 as everything here. That makes a · s / h numbers for each
# token and feature: with 16 heads, 2,048 tokens and 1,024 features they are 32, twice as many as all the rest.
#
# **Predict.** Our model has a = 4, s = 128 and h = 128. How many numbers does a layer keep with the plain kernel, and
# how many with the plain kernel and selective checkpointing?

# %% tags=["predict"]
plain_kernel = 16 + 4 * 128 / 128
selective = 16

# %%
def repeat_the_core(model):
    """Put checkpointing around the core of attention of each layer."""
    for block in model.blocks:
        core = block.attention.core
        inner = core.forward
        def forward(*args, inner=inner):
            return checkpoint(inner, *args, use_reentrant=False)
        core.forward = forward
    return model

def kept_of_a_layer(model, kernel):
    with sdpa_kernel(kernel):
        return kept_numbers(model) / CONFIG.num_layers

repeats_core = repeat_the_core(new_model())
in_plain = kept_of_a_layer(plain, SDPBackend.MATH)
in_selective = kept_of_a_layer(repeats_core, SDPBackend.MATH)
in_fused = kept_of_a_layer(plain, SDPBackend.FLASH_ATTENTION)
compare("plain kernel", plain_kernel, in_plain, within=1.05)
compare("plain kernel, selective", selective, in_selective, within=1.05)
compare("fused kernel", selective, in_fused, within=1.05)

# %% [markdown]
# With a fused attention the selective kind has hardly anything left to save. It matters where the fused kernel cannot
# be used: with attention dropout on a CPU, or with a mask of one's own.
#
# **Takeaway: keep the inputs, repeat the rest: L + 15 for 16 L, and 4/3 of the time. Repeat the same random numbers,
# and never change an input in place.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* 35 minutes. Mistakes: the block runs with gradients in forward (in a Function that takes
# `torch.enable_grad()`), `detach` is forgotten (the second backward then runs into the first graph), the generator is
# not put back. Ask: why must `backward` not return the gradients of the parameters? (They are no arguments of forward:
# `torch.autograd.backward` adds them to `.grad` directly.) And: what does DDP's hook see? (The same accumulation.)

# %% [markdown]
# ## 5. Precision and optimizer
#
# The other parts of the peak can be made smaller as well. For N parameters, A bytes of float32 activations, and p
# ranks:
#
# | change | weights, gradients, moments | activations | price |
# |---|---|---|---|
# | none: AdamW, float32 | 16 N | A | |
# | bfloat16 by autocast | 16 N, and 2 N of narrow copies | a little more than A/2 | rounding (lesson 03) |
# | SGD with momentum | 12 N | A | another optimizer: other rates, often worse |
# | SGD | 8 N | A | the same |
# | ZeRO-1 on p ranks | (8 + 8/p) N | A | none to speak of (lesson 13) |
# | ZeRO-3 on p ranks | 16/p N, two layers, embedding and head | A | half as much again is sent |
#
# **Predict.** A model of one billion parameters has 20 GB of activations in float32. How many GB does a rank need for
# parameters, gradients, moments and activations, with AdamW alone, and with ZeRO-1 on 8 ranks? (Take the sum of all.)

# %% tags=["predict"]
alone_gb = 16 + 20
zero_gb = 8 + 8 / 8 + 20

# %% tags=["nbval-check-output"]
billions = 1.0
activations_gb = 20.0
in_one = 16 * billions + activations_gb
on_eight = (8 + 8 / 8) * billions + activations_gb
compare("alone", alone_gb, in_one, within=1, found="computed")
compare("ZeRO-1 on 8", zero_gb, on_eight, unit="GB", within=1, found="computed")

# %%
from labcode.perf.training_memory import training_memory

for dtype in ("float32", "bfloat16"):
    for kind in ("none", "full"):
        memory = training_memory(
            CONFIG, micro_batch=16, dtype=dtype, activation_checkpointing=kind,
            data_parallel="none",
        )
        print(f"{dtype:>9}, checkpointing {kind:>4}:", end=" ")
        print(f"{memory.total / MIB:5.0f} MiB, highest at: {memory.moment}")

# %% [markdown]
# What helps depends on which part is the largest. Checkpointing does nothing for weights, ZeRO nothing for activations.
#
# **Takeaway: look at the largest part first, and take the technique for that part.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* 4 minutes. Ask: why does autocast not halve the activations? (The residual stream stays float32,
# and narrow copies of the weights are kept.)

# %% [markdown]
# ## 6. Reserved memory, fragments, and offload
#
# A GPU's allocator keeps what is freed, in blocks. A block that is partly in use cannot be given back. With tensors of
# ever-changing sizes there may be 9 GiB of free pieces of which none is large enough. This is **fragmentation**: the
# *reserved but unallocated* of section 1 is large, and the request is smaller than it.
#
# - `torch.cuda.memory_allocated()` counts tensors, `torch.cuda.memory_reserved()` counts the blocks, and `nvidia-smi`
#   shows the blocks and CUDA's own. So `nvidia-smi` does not tell how much a training needs.
# - `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True` lets blocks grow in place, by mapping more memory behind them. It
#   helps where sizes change from step to step.
# - `torch.cuda.memory._record_memory_history()` and `_dump_snapshot(file)` write down every block with the line of the
#   program that made it; <https://pytorch.org/memory_viz> draws them.
#
# **Offload** moves the optimizer's state, or activations, to the memory of the host and back. It costs a transfer over
# PCIe, the bus between a computer and its GPU, in each step. If the link has 25 GB/s, ten GB take 0.4 s each way. Do it
# when nothing else is left.
#
# On SLURM there are two memories, and two errors:
#
# | | memory of the host | memory of the GPU |
# |---|---|---|
# | limit | `#SBATCH --mem=...` (the kernel counts all processes of a job together, in a *cgroup*) | the GPU |
# | error | the kernel kills: exit status 137, state OUT_OF_MEMORY | `torch.OutOfMemoryError`, exit status 1 |
# | what was used | `sacct -o JobID,State,MaxRSS` | `torch.cuda.max_memory_allocated()` |
#
# `MaxRSS` is sampled, so a short peak may be missing in it. Lesson 14 shows where these lines stand in a job's output.
#
# **Predict.** A log says: tried to allocate 2.26 GiB; 6.00 total; 3.03 free. Is this fragmentation, or too large a
# tensor? Answer with "fragments", "too large" or "neither".

# %% tags=["predict"]
verdict = "neither"

# %% tags=["nbval-check-output"]
compare("verdict", verdict, "neither", found="computed")

# %% [markdown]
# By these numbers there was room: 3.03 GiB were free. This is from a public issue as well (the source is at the end).
# The numbers of such an error are those of the moment after the failure, and of this GPU as a whole. Another process
# may have come and gone; a driver may keep back what it reports as free. An error that does not add up is one to
# measure again.

# %% [markdown] tags=["solution-only"]
# *For the instructor.* 4 minutes. Ask who has used `nvidia-smi` to find out how much a training needs.

# %% [markdown] tags=["exercise"]
# ## 7. Open end: make it fit, at the best speed
#
# ### Exercise 16.5 · Choose
#
# Given a model, a global batch and a budget, choose micro-batch, accumulation, checkpointing and dtype. `case` has
# `model`, `global_batch`, `room_bytes`, `flops_per_s` (a dict: dtype to what the device reaches) and `launch_s` (what
# each micro-batch costs beyond its products). Return `Settings(micro_batch, num_micro_batches,
# activation_checkpointing, dtype)`.
#
# - **Bytes**: `plan.peak_bytes(case, settings)` is labcode's formula. It must not exceed the room.
# - **Seconds**: 6 FLOPs for each parameter and token, 8 with checkpointing "full", at the rate of the dtype; and
#   `launch_s` for each micro-batch.
# - `micro_batch` times `num_micro_batches` is the global batch, always.
#
# The check goes through six cases, whose rates and launch times are made up: lesson 03 measures those of a machine. In
# each the settings must fit, and must reach at least 85 % of the best speed by this
# model of the time. (The clock of a busy machine decides nothing.) The first case is then run for real, in a process
# that gets this much memory and no more. About 15 lines.

# %% tags=["exercise"]
from labcode.teach.labs import l16_plan as plan
from labcode.teach.labs.l16_limited import Settings


def choose(case):
    """The fastest Settings that fit."""
    ### BEGIN SOLUTION
    tokens = case.global_batch * case.model.context_length
    quickest = None
    shortest_s = math.inf
    for micro_batch in range(1, case.global_batch + 1):
        if case.global_batch % micro_batch:
            continue
        count = case.global_batch // micro_batch
        for kind, flops in (("none", 6), ("full", 8)):
            for dtype, rate in case.flops_per_s.items():
                settings = Settings(micro_batch, count, kind, dtype)
                products_s = flops * case.model.num_parameters * tokens / rate
                step_s = products_s + count * case.launch_s
                fits = plan.peak_bytes(case, settings) <= case.room_bytes
                if fits and step_s < shortest_s:
                    quickest = settings
                    shortest_s = step_s
    return quickest
    ### END SOLUTION

# %% tags=["check"]
check("16.5", choose)

# %% [markdown]
# Here is what labcode chooses, and why.

# %%
show_source(plan.best)
show_source(plan.step_s)

# %% tags=["nbval-check-output"]
print(f"{'':44} {'samples':>8}  {'checkpoint':10} {'dtype':8}  {'of room':>7}")
for case in plan.CASES:
    settings = plan.best(case)
    share = plan.peak_bytes(case, settings) / case.room_bytes
    samples = f"{settings.num_micro_batches} x {settings.micro_batch}"
    print(f"{case.about:44} {samples:>8}", end="  ")
    print(f"{settings.activation_checkpointing:10} {settings.dtype:8}  {share:7.0%}")

# %% [markdown]
# There is no one rule. Where a micro-batch costs little, smaller ones are better than computing everything twice. Where
# each of them costs much, or one sample is too large already, checkpointing wins. And 16-bit numbers help only where
# they are fast.

# %% [markdown] tags=["solution-only"]
# *For the instructor.* 11 minutes. People take the smallest micro-batch, "to be safe": it fits and fails in speed. Ask
# how many of the six cases would change with a fused loss, which never stores the logits.

# %% [markdown]
# ## From here to GPUs and SLURM
#
# | what | start |
# |---|---|
# | checkpointing of each layer | `python -m labcode.train gpt_10m --parallel.activation_checkpointing full` |
# | of the core of attention | `--parallel.activation_checkpointing selective` |
# | memory over a step, by what it is for | `--profile.steps 10:13 --profile.memory` |
# | 16-bit products | `--train.dtype bfloat16` |
# | ZeRO-1 | `--parallel.zero_stage 1` |
#
# ## Questions
#
# **1.** A log says: tried to allocate 3 GiB; 1 GiB free; 6 GiB reserved but unallocated. What do you try first?
#
# <details><summary>Answer</summary>
#
# `expandable_segments:True`. There are 6 GiB in the cache, in pieces of which none is large enough.
# </details>
#
# **2.** A model has 4 layers and a vocabulary of 250,000. Checkpointing of all layers saves little. Why?
#
# <details><summary>Answer</summary>
#
# The logits are the largest part, and they are not inside a layer. A smaller micro-batch or a loss in parts helps.
# </details>
#
# **3.** Why does checkpointing take 4/3 of the time and not 2 times as long?
#
# <details><summary>Answer</summary>
#
# Only forward is repeated, and forward is a third of forward and backward.
# </details>
#
# **4.** From lesson 13: a run is out of memory right before the optimizer's step, with one sample. Checkpointing or
# ZeRO?
#
# <details><summary>Answer</summary>
#
# ZeRO. At that moment no activations exist; weights, gradients and moments fill the memory.
# </details>
#
# ## Recap
#
# | technique | makes smaller | by | costs |
# |---|---|---|---|
# | accumulation | activations, logits | 1/m | smaller products, gradients at the peak |
# | full checkpointing | activations | L + 15 for 16 L | 4/3 of the time |
# | every k-th layer | activations | L/k + 16 k for 16 L | 4/3 of the time |
# | selective | scores of attention | all of them | a few percent; nothing left with a fused attention |
# | bfloat16 | activations | nearly 1/2 | rounding |
# | ZeRO-1 | moments | 1/p | nothing to speak of |
# | expandable segments | the cache | | nothing to speak of |
#
# ## Sources
#
# - Chen et al. 2016, *Training Deep Nets with Sublinear Memory Cost*, arXiv:1604.06174: section 4.
# - Korthikanti et al. 2022, arXiv:2205.05198: sections 4 to 6, selective checkpointing.
# - Kaplan et al. 2020, arXiv:2001.08361: 6 FLOPs for each parameter and token.
# - The error of section 1: <https://github.com/murong-xu/CADS/issues/4>; that of section 6:
#   <https://github.com/pytorch/pytorch/issues/59778>.
# - PyTorch: <https://docs.pytorch.org/docs/stable/checkpoint.html>,
#   <https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management>.
