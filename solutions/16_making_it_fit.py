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
# Sooner or later a training run stops with the words *out of memory*. Most people then try a smaller batch, and a
# smaller one still. In this lesson you read what the error says, predict what a step needs before it runs, and write
# three techniques that make it need less: a loss in chunks, activation checkpointing, and offload.
#
# ## Goals
#
# - read an out-of-memory error: what it tells you, and what it does not;
# - find out what fills the memory at the peak, and predict it from the parts of a step;
# - know what a smaller micro-batch saves, and what it costs;
# - compute the loss of a large vocabulary without ever holding all logits;
# - write activation checkpointing as an `autograd.Function`, with dropout;
# - decide for each operation of a layer whether its output is kept or computed again.
#
# **Time**: 154 minutes, and 49 more for what is optional. Good places for a break are after section 3 and after section
# 4; section 5 is the heart of the lesson, and takes a sitting of its own. **Needs**: lesson 10 (section 2), lesson 13
# (section 1). Lesson 03b explains bfloat16.

# %%
import math
import os

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from course.lab import check, compare, plot
from labcode.config import GPTConfig
from labcode.models import gpt, layers

os.environ["KINETO_LOG_LEVEL"] = "99"  # the profiler is silent about itself
MIB = 2**20

# %% [markdown]
# All sections use one small GPT and one step of training. `measured_peak` lets PyTorch's profiler record every
# allocation of a tensor, and returns the most bytes that were allocated at once.

# %%
from labcode.measure.steps import allocated_bytes

CPU = torch.device("cpu")
CONFIG = GPTConfig(
    vocab_size=512, context_length=128, num_layers=6, num_heads=4, hidden_size=128
)

def new_model(config=None):
    return layers.initialize(gpt.GPT(config or CONFIG), seed=0)

def whole_loss(model, tokens):
    return gpt.loss(model(tokens[:, :-1]), tokens[:, 1:])

def one_step(model, optimizer, micro_batch, num_micro_batches=1, loss_of=whole_loss):
    """One step of training on random tokens."""
    for _ in range(num_micro_batches):
        tokens = torch.randint(model.config.vocab_size, (micro_batch, 129))
        loss = loss_of(model, tokens)
        (loss / num_micro_batches).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)

def measured_peak(model, *batches, loss_of=whole_loss):
    """Bytes: weights, moments, and the most that a step takes beyond them."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    one_step(model, optimizer, 1)  # the moments exist from here on
    held = 3 * 4 * model.config.num_parameters
    def work():
        one_step(model, optimizer, *batches, loss_of=loss_of)
    return held + allocated_bytes(work, CPU).peak

# %% [markdown]
# ## 1. The error, and what it does not say (core, 10 min)
#
# On a cluster a process has a memory limit, and here our GPT gets one. `train_within` trains it in a process of its
# own, and Linux refuses it more memory than `RLIMIT_DATA` allows. (macOS has no such limit, so there the run succeeds.)

# %%
from course.labs.l16_limited import Settings, show_log, train_within

failed = train_within(CONFIG, Settings(micro_batch=16), room_bytes=80 * MIB)
print(f"exit status {failed.exit_status}")
show_log(failed)

# %% [markdown]
# PyTorch's allocator for the CPU says how many bytes it was **asked for** when there were none left, and the folded
# traceback says which line of the program asked. On a GPU the error says more. A user posted this one in public (the
# source is at the end):
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
# The last row is a cache. Asking CUDA for memory is slow, so when a tensor is freed PyTorch keeps its memory for the
# next tensor. Section 7 shows how this cache can get in the way. The advice in the error concerns this row alone: at
# best, all of it becomes usable for the new tensor.
#
# **Predict.** Can the advice help here? Answer "yes" or "no".

# %% tags=["predict"]
advice_can_help = "no"

# %% tags=["nbval-check-output"]
free_gib = 12.73
cached_gib = 9.35
asked_gib = 22.78
at_best_gib = free_gib + cached_gib
found = "yes" if at_best_gib >= asked_gib else "no"
compare("can it help", advice_can_help, found, found="computed", options=("yes", "no"))
print(f"at best {at_best_gib:.2f} GiB are free, and {asked_gib:.2f} GiB are asked for")

# %% [markdown]
# Even if the whole cache were freed, this tensor would not fit. The error prints its advice whether it applies or not,
# so do the sum first.
#
# Neither error says **what fills the rest**. The tensor that was refused may be small: in our log it has a few MiB,
# while 80 MiB are taken. To know what filled the memory, you have to count.
#
# A run can also end without a Python error. When the whole machine, or the job's share of it, has no memory left, the
# **OOM killer** of the operating system ends a process with the signal SIGKILL, number 9. A shell and Docker report
# this as exit status 137, which is 128 + 9; Python's `subprocess` reports -9; SLURM's `sacct` usually shows the state
# OUT_OF_MEMORY with the exit code 0:125. A common cause is a data loader that reads whole files, which has nothing to
# do with the GPU.
#
# On several ranks ask first whether each has a GPU of its own. If all of them took GPU 0, it is full while the others
# are idle, and a smaller batch is no cure (lesson 07, section 9).
#
# **Takeaway: the error names the request that failed, not the memory that was used. Add up the fields before you follow
# the advice.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* People think that the tensor in the error is the problem. Ask: which change would have let the
# public example run? (A smaller tensor: half the batch or patch. 9.08 GiB are really used.)

# %% [markdown]
# ## 2. Where the memory goes in a step (core, 30 min)
#
# PyTorch can record every allocation. On a GPU `torch.cuda.memory._record_memory_history()` does it (section 7). On the
# CPU the profiler does, and labcode adds what each allocation is **for**. `list_changes` returns one entry for each
# piece of memory that is taken or given back. Here are ten entries from the beginning of a step with one sample.

# %%
from course.labs.l16_memory import list_changes, recorded_step

step_of_one = list_changes(recorded_step(new_model(), micro_batch=1))
print(f"{len(step_of_one)} entries")
for purpose, num_bytes in step_of_one[2:12]:
    print(f"{purpose:12} {num_bytes:>10,}")

# %% [markdown] tags=["exercise"]
# ### Exercise 16.1 · What fills the memory at the peak?
#
# Write `at_peak(changes)`. Each entry of the list is (purpose, bytes), and the bytes of what is given back are
# negative. The list begins with what is there before the step. Return a dict: for each purpose the bytes at the moment
# when the sum over all purposes is largest. A purpose with 0 bytes at that moment may be left out. About 8 lines.

# %% tags=["exercise", "by-hand"]
def at_peak(changes):
    """{purpose: bytes} at the moment when their sum is largest."""
    ### BEGIN SOLUTION
    now = {}
    most = {}
    for purpose, num_bytes in changes:
        now[purpose] = now.get(purpose, 0) + num_bytes
        if sum(now.values()) > sum(most.values()):
            most = dict(now)
    return {purpose: size for purpose, size in most.items() if size}
    ### END SOLUTION

# %% tags=["check"]
check("16.1", at_peak)

# %% [markdown]
# Such a list says what filled the memory of a step that has run. Now we want to know it **before** the step runs.
# Lesson 13, section 1, has counted what is there all the time: in float32 without master weights, each parameter has 4
# bytes of weight and 8 of AdamW's moments, and 4 of gradient once backward has made it. Lesson 10, section 2, has
# counted the **activations**: 34 bytes for each token and feature of a layer, in 16-bit numbers with dropout, and the
# scores of attention on top. Our model has no dropout, and its attention is fused and stores no scores. Then 16
# **numbers** are left: the inputs of the two norms (1 + 1); in attention the input of its first matmul, q, k and v, and
# the input of its last matmul (1 + 3 + 1); in the MLP the input of its first matmul, the input of GELU and that of its
# last matmul (1 + 4 + 4). Two more things are needed:
#
# - **logits**: for each token one number for every entry of the vocabulary, in float32. The loss keeps the log-softmax,
#   which is as large, and its backward makes two more tensors of this size: three in all;
# - **temporary** tensors, which live for a few operations. We leave them out of the formula, and see below how large
#   they are.
#
# When is the most memory needed? During forward activations grow. During backward they are freed, and gradients take
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
# **Predict.** Our model has 1.27 million parameters in float32. With 16 samples, its 6 layers keep 16 numbers of 4
# bytes for each of 16 · 128 tokens and 128 features, and the vocabulary has 512 entries. How many MiB are W, A, V and
# the peak?

# %% tags=["predict"]
weights_mib = 1_271_808 * 4 / MIB
activations_mib = 6 * 16 * 4 * 16 * 128 * 128 / MIB
logits_mib = 16 * 128 * 512 * 4 / MIB
peak_mib = 3 * weights_mib + max(activations_mib + 3 * logits_mib, weights_mib)

# %% [markdown]
# `saved_bytes` counts what autograd keeps, by the name of the module that saved it.

# %%
from labcode.perf.saved_bytes import saved_bytes


def kept_by_layers(model):
    """Bytes that the layers keep after a forward of 16 samples."""
    with saved_bytes(model) as saved:
        output = model(torch.randint(512, (16, 128)))
        by_module = saved.by_module()
    del output
    in_blocks = [name for name in by_module if name.startswith("blocks.")]
    return sum(by_module[name] for name in in_blocks)

model = new_model()
of_weights = sum(weight.nbytes for weight in model.parameters())
of_logits = model(torch.randint(512, (16, 128))).nbytes
in_layers_mib = kept_by_layers(model) / MIB
found_mib = measured_peak(model, 16) / MIB
compare("W", weights_mib, of_weights / MIB, unit="MiB", within=1.05)
compare("A", activations_mib, in_layers_mib, unit="MiB", within=1.05)
compare("V", logits_mib, of_logits / MIB, unit="MiB", within=1.05)
compare("peak", peak_mib, found_mib, unit="MiB", within=1.05)

# %% [markdown]
# Here is what labcode's version of your function finds in the list of this step:

# %%
from course.labs import l16_by_hand

timeline = recorded_step(new_model(), micro_batch=16)
for purpose, num_bytes in l16_by_hand.at_peak(list_changes(timeline)).items():
    print(f"{purpose:12} {num_bytes / MIB:6.1f} MiB")

# %% [markdown]
# The log-softmax is among the activations, and the two tensors of the loss's backward are temporary. No gradient of a
# weight is there yet. So three parts and one maximum come close. labcode's `training_moments` follows a step more
# closely, with six moments and all temporary tensors. Here is the same step by that formula.

# %% tags=["figure"]
from labcode.perf.training_memory import training_moments

by_moment = {}
for moment in training_moments(CONFIG, micro_batch=16, data_parallel="none"):
    by_moment[moment.moment] = {name: part / MIB for name, part in moment.parts.items()}
    del by_moment[moment.moment]["buckets"], by_moment[moment.moment]["data"]

plot.bars(by_moment, caption="16.moments")

# %% [markdown]
# A wrapper for data parallelism may take more. PyTorch's DDP copies gradients into **buckets** (lesson 05, section 1),
# which stay there from step to step: one more W at every moment, the peak included. With
# `DistributedDataParallel(model, gradient_as_bucket_view=True)` the gradients live in the buckets, so it is one W
# instead of two.
#
# The recording can be drawn over time, too.

# %% tags=["figure"]
plot.memory_timeline(timeline, caption="16.timeline")

# %% [markdown]
# Memory is highest where forward ends and backward begins. The gradients, in green, begin to grow only then, and they
# are complete when all activations are gone.
#
# The 3 V are right for `whole_loss` above, which gives the logits no name. The usual loop is
#
# ```python
# logits = model(inputs)
# loss = gpt.loss(logits, targets)
# loss.backward()
# ```
#
# The loss keeps the log-softmax and does not need the logits any more, but the name `logits` keeps them alive.

# %%
model = new_model()
tokens = torch.randint(512, (16, 129))

def without_a_name():
    loss = gpt.loss(model(tokens[:, :-1]), tokens[:, 1:])
    loss.backward()
    model.zero_grad(set_to_none=True)

def with_a_name():
    logits = model(tokens[:, :-1])
    loss = gpt.loss(logits, tokens[:, 1:])
    loss.backward()
    model.zero_grad(set_to_none=True)

with_it = allocated_bytes(with_a_name, CPU).peak
extra = with_it - allocated_bytes(without_a_name, CPU).peak
print(f"{extra / MIB:.1f} MiB more with a name")

# %% [markdown]
# It is a fourth V, which `del logits` before `backward` saves. With a large vocabulary this one line is worth
# gigabytes.
#
# **Takeaway: the peak is 3 W plus the larger of two moments. With many tokens that is the moment when the loss's
# backward begins, and activations are most of it.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* In 16.1 people take the most of each purpose by itself, or keep the dict and not a copy of it.
# In the formula they add gradients and activations, which do not exist at the same time in a step of one micro-batch.
# Ask: for which models is V larger than A? (Few layers and a large vocabulary: GPT-2 has 50,257 entries
# for 768 features.)

# %% [markdown]
# ## 3. A smaller micro-batch (core, 7 min)
#
# Divide the micro-batch by m and run m of them one after the other. Their gradients are accumulated, and then the
# optimizer steps once. The mean gradient is the same, so the training is the same (lesson 04, section 4).
#
# **Predict.** With one micro-batch of 16 samples our step has W = 4.9, A = 96 and V = 4 MiB. What is the peak with 16 =
# 4 · 4 samples, in MiB? Think of the moment when the loss's backward begins, in the first micro-batch and in the
# second.

# %% tags=["predict"]
in_four_mib = 4 * 4.9 + 96 / 4 + 3 * 4 / 4

# %%
in_four = measured_peak(new_model(), 4, 4)
compare("peak of 4 x 4", in_four_mib, in_four / MIB, unit="MiB", within=1.05)

# %% [markdown]
# Activations and logits shrink to 1/m. In return, from the second micro-batch on the W bytes of gradients are there
# already when the loss's backward begins:
#
# $$\text{peak} = 4W + (A + 3V) / m$$
#
# Does the run of section 1 fit into its 80 MiB now?

# %%
from course.labs.l16_limited import Settings, train_within

four_times_four = Settings(micro_batch=4, num_micro_batches=4)
fitting = train_within(CONFIG, four_times_four, room_bytes=80 * MIB)
print(f"exit status {fitting.exit_status}")

# %% [markdown]
# It does. What does it cost in time? The matmuls take the same number of FLOPs in all, but each micro-batch launches
# all operations again, and on a GPU a small matmul may no longer fill the device. Accumulation also has a limit: one
# sample cannot be divided, and with a long sequence one sample may be too large.
#
# **Takeaway: accumulation divides activations and logits by m, at the price of W more bytes of gradients at the peak
# and of smaller matmuls. It is the first thing to try, and it ends at one sample.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* People forget the gradients of the first micro-batch: 42 MiB, and it is 47. Ask: why does going
# from 1 to 2 micro-batches not halve even the part beyond 3 W? (The gradients come on top at the moment of the peak.)

# %% [markdown]
# ## 4. The loss in chunks (core, 36 min)
#
# Today's vocabularies have 100,000 to 260,000 entries. With 128,000 of them, 8,192 tokens have logits of 4.2 GB, and
# the loss needs three tensors of that size. They are not inside a layer, so nothing that saves activations of layers
# helps.
#
# But the logits are not all needed at once. The loss is a mean over tokens, and so are its gradients. Split the tokens
# into n chunks, and for each chunk compute the logits, add to the loss, **compute the gradients right away**, and free
# the logits. What stays are two gradients: one as large as the head's input, and one as large as its weight.
#
# The gradient is simple. Let p be the softmax of the logits of a token, and y its target. The derivative of its
# cross-entropy -log p_y with respect to logit j is p_j, and p_j - 1 for j = y. The mean divides by the number of
# **all** tokens, T:
#
# $$\frac{\partial\,\text{loss}}{\partial\,\text{logits}} = \frac{p - \text{onehot}(y)}{T}, \qquad
# \text{logits} = h\,U^{\mathsf T}$$
#
# Here onehot(y) is 1 at the target and 0 elsewhere, h of shape [T, H] is the input of the head, and U of shape
# [vocabulary, H] is its weight. With G for the gradient of the logits, the gradient of h is G U, and that of U is Gᵀ h.
# For example, two entries with p = (0.7, 0.3), y = 0 and T = 10 give G = (-0.03, 0.03).
#
# **Predict.** We give our model a vocabulary of 8,192 entries. Then W = 8.6, A = 96 and V = 64 MiB. What is the peak,
# in MiB, without chunks and with 16 of them? With chunks, two tensors as large as the logits of one chunk exist at
# once, and there is one more tensor of 4 MiB, the gradient of the head's weight, which now exists this early.

# %% tags=["predict"]
all_logits_mib = 3 * 8.6 + 96 + 3 * 64
in_chunks_mib = 3 * 8.6 + 96 + 2 * 64 / 16 + 4

# %% [markdown] tags=["exercise"]
# ### Exercise 16.2 · The loss that never holds all logits
#
# Write it as an autograd Function, `LossInChunks.apply(hidden, weight, targets, num_chunks)`. `hidden` is [T, H],
# `weight` is [vocabulary, H], and `targets` is [T], whole numbers. Return the mean cross-entropy of all T tokens.
#
# - `forward` runs with autograd switched off. Go through the chunks: `hidden.chunk(num_chunks)` gives views of the
#   rows, and the last chunk may be shorter. Compute both gradients by the formulas above and keep them with
#   `ctx.save_for_backward`.
# - `backward` gets the gradient of the loss, one number, which is not 1 if the loss is scaled later. Return one
#   gradient for each argument of forward but `ctx`, and `None` for those that have no gradient.
#
# About 18 lines. `F.cross_entropy(logits, targets, reduction="sum")` sums over the rows. (`F.one_hot` makes whole
# numbers of 8 bytes, twice as many bytes as the logits have. It is enough to subtract 1 at the targets.)

# %% tags=["exercise", "by-hand"]
import torch.nn.functional as F


class LossInChunks(torch.autograd.Function):
    """Mean cross-entropy of `hidden @ weight.T`, a chunk of the rows at a time."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, num_chunks):
        ### BEGIN SOLUTION
        num_tokens = len(targets)
        loss = hidden.new_zeros(())
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight)
        rows = torch.arange(num_tokens)
        for chunk in rows.chunk(num_chunks):
            part = hidden[chunk]
            wanted = targets[chunk]
            logits = part @ weight.T  # [T/n, vocabulary]
            loss += F.cross_entropy(logits, wanted, reduction="sum") / num_tokens
            grad_logits = logits.softmax(dim=-1)
            grad_logits[torch.arange(len(chunk)), wanted] -= 1
            grad_logits /= num_tokens
            grad_hidden[chunk] = grad_logits @ weight
            grad_weight += grad_logits.T @ part
        ctx.save_for_backward(grad_hidden, grad_weight)
        return loss
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad):
        ### BEGIN SOLUTION
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad * grad_hidden, grad * grad_weight, None, None
        ### END SOLUTION

# %% tags=["check"]
check("16.2", LossInChunks)

# %% [markdown]
# Here is the whole step, measured with labcode's version of your Function.

# %%
from dataclasses import replace

from course.labs import l16_by_hand

LARGE = replace(CONFIG, vocab_size=8192)

def input_of_the_head(model, tokens):
    hidden = model.embed(tokens) + model.positions(torch.arange(tokens.shape[1]))
    for block in model.blocks:
        hidden = block(hidden)
    return model.norm(hidden).flatten(0, 1)  # [T, H]

def loss_in_chunks(model, tokens):
    hidden = input_of_the_head(model, tokens[:, :-1])
    targets = tokens[:, 1:].flatten()
    return l16_by_hand.LossInChunks.apply(hidden, model.head.weight, targets, 16)

whole = measured_peak(new_model(LARGE), 16) / MIB
chunked = measured_peak(new_model(LARGE), 16, loss_of=loss_in_chunks) / MIB
compare("all logits", all_logits_mib, whole, unit="MiB", within=1.05)
compare("16 chunks", in_chunks_mib, chunked, unit="MiB", within=1.1)

# %% [markdown]
# The logits have gone from the peak; what we did not count are a few temporary tensors.
#
# Since version 2.13 PyTorch has your Function itself: `linear_cross_entropy` takes the head's input and weight instead
# of logits. With `options` it goes through the rows in chunks, and computes the gradients in forward, as you do. The
# next cell also compares the gradients of both with that of the plain loss.

# %%
def loss_of_pytorch(model, tokens):
    hidden = input_of_the_head(model, tokens[:, :-1])
    targets = tokens[:, 1:].flatten()
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=len(targets) // 16)
    return nn.functional.linear_cross_entropy(
        hidden, model.head.weight, targets, options=options
    )

def gradient_by(loss_of):
    torch.manual_seed(0)
    model = new_model(LARGE)
    loss_of(model, torch.randint(8192, (2, 129))).backward()
    return model.embed.weight.grad

ways = [loss_in_chunks]
if hasattr(nn, "LinearCrossEntropyOptions"):
    ways.append(loss_of_pytorch)
else:
    print(f"linear_cross_entropy needs PyTorch 2.13; this is {torch.__version__}")
plain = gradient_by(whole_loss)
for loss_of in ways:
    peak = measured_peak(new_model(LARGE), 16, loss_of=loss_of) / MIB
    off = (gradient_by(loss_of) - plain).norm() / plain.norm()
    same = "the same" if off < 1e-5 else "another one"
    print(f"{loss_of.__name__:<16} peak {peak:.0f} MiB, gradient {same}")

# %% [markdown]
# The gradients are the same, up to rounding. PyTorch's version takes a little less, because it reuses the memory of one
# chunk for the next and computes the softmax in place. Its backward works in place as well, so it can run only once
# (the option `allow_retain_graph=True` changes that). The Liger Kernel (Hsu et al. 2024) is the same idea, written for
# GPUs.
#
# **Takeaway: a mean over tokens needs no tensor over all tokens. With a large vocabulary, look at the loss before you
# look at the layers.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Mistakes: the mean of the chunks' means (wrong if the last chunk is shorter), the gradient of
# the weight overwritten by each chunk, `grad` of backward forgotten. Ask: what is the best number of chunks? (Enough
# that the logits of one chunk no longer matter; beyond that the matmuls only get smaller.)

# %% [markdown]
# ## 5. Activation checkpointing (core, 58 min)
#
# Backward of a layer needs what its forward computed. We may discard that and compute it **again** when backward
# reaches the layer. All we have to keep is the layer's input.
#
# The picture shows a step of three layers. The boxes say what runs: F1 is the forward of layer 1, B1 its backward,
# which takes twice as long. Below them is what is kept at that time, in numbers for each token and feature. A layer
# keeps 16 of them (section 2), and its input is one of the 16.

# %% tags=["figure"]
plot.activation_checkpointing(num_layers=3, caption="16.checkpointing")

# %% [markdown]
# In the lower row only three inputs are left when forward ends. Then F3 runs once more, now keeping everything, and B3
# uses it. After B3 the activations of layer 3 are freed, and F2 is next. Only one layer has all its activations at a
# time.
#
# **Bytes.** L layers keep 16 L numbers without checkpointing. With it they keep L inputs, and 15 more for the inside of
# the one layer that is being recomputed: L + 15. For example, with L = 24 that is 39 instead of 384.
#
# **Time.** Backward takes two matmuls where forward takes one, so the layers' FLOPs are 1 + 2 = 3 units. Checkpointing
# adds one more forward.
#
# But `checkpoint` stops the second forward **early**, as soon as it has everything that backward needs. The last matmul
# of a layer, `down` in the MLP, computes the layer's output, which backward does not need. It has 4 of the 12 h²
# parameters in the matmuls of a layer (3 for q, k and v, 1 for `proj`, 4 for `up`, 4 for `down`), and so a third of
# their FLOPs.
#
# **Predict.** How many numbers for each token and feature are kept for our 6 layers, without checkpointing and, at the
# worst moment, with it? How many times as many FLOPs are computed, if the second forward is whole, and if it stops
# early?

# %% tags=["predict"]
kept_without = 16 * 6
kept_with = 6 + 15
flops_whole = 4 / 3
flops_early = (3 + 2 / 3) / 3

# %%
from labcode.perf.saved_bytes import saved_bytes


class Checkpointed(nn.Module):
    """A layer with PyTorch's checkpointing around it."""

    def __init__(self, block, **how):
        super().__init__()
        self.block = block
        self.how = how

    def forward(self, *args):
        return checkpoint(self.block, *args, **self.how)

def with_checkpointing(model, use_reentrant=False, **how):
    blocks = nn.ModuleList()
    for block in model.blocks:
        blocks.append(Checkpointed(block, use_reentrant=use_reentrant, **how))
    model.blocks = blocks
    return model

def kept_at_worst(model, blocks):
    """The most that is kept when a layer has run, the first or the second time."""
    tokens = torch.randint(512, (16, 129))
    kept = []
    with saved_bytes(model) as saved:
        for block in blocks:
            block.register_forward_hook(lambda *_: kept.append(saved.total()))
        whole_loss(model, tokens).backward()
    return max(kept) / (16 * 128 * 128 * 4)

plain = new_model()
compare("kept without", kept_without, kept_at_worst(plain, plain.blocks), within=1.05)
model = new_model()
blocks = list(model.blocks)
repeated = with_checkpointing(model, use_reentrant=True)
compare("kept with", kept_with, kept_at_worst(repeated, blocks), within=1.05)

# %% [markdown]
# Here `use_reentrant=True`, the older of two forms, lets our counter see the second run; both forms keep the same. The
# FLOPs can be counted, too.

# %%
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode


def forward_and_backward(model):
    tokens = torch.randint(512, (16, 129))
    whole_loss(model, tokens).backward()
    model.zero_grad(set_to_none=True)

def counted_flops(model):
    with FlopCounterMode(display=False) as counter:
        forward_and_backward(model)
    return counter.get_total_flops()

plain = new_model()
repeated = with_checkpointing(new_model())
of_plain = counted_flops(plain)
of_early = counted_flops(repeated)
with set_checkpoint_early_stop(False):
    of_whole = counted_flops(repeated)
whole = of_whole / of_plain
early = of_early / of_plain
compare("second forward whole", flops_whole, whole, within=1.05, found="counted")
compare("stops early", flops_early, early, within=1.05, found="counted")

# %% [markdown]
# Both are a little below 4/3 and 11/9, because the head is not repeated. The time follows the FLOPs only roughly,
# since norms, GELU and attention are recomputed as well and are not among the matmuls that were counted. The table at
# the end of this section has the time.

# %% [markdown] tags=["exercise"]
# ### Exercise 16.3 · Write it
#
# Write checkpointing as an autograd Function, used as `Checkpoint.apply(block, *inputs)`. As in every Function, its
# `forward` runs with autograd switched off. `block` is any callable that takes the inputs, which are tensors, and
# returns one tensor.
#
# - `forward`: keep the inputs with `ctx.save_for_backward(*inputs)`, the block, and the state of the random numbers,
#   `torch.get_rng_state()`. Return the output.
# - `backward`: for each input make a copy without history, `x.detach().requires_grad_(x.requires_grad)`. Run the
#   block again under `torch.enable_grad()`, with the random numbers of the first run, so that dropout drops the same
#   elements. Afterwards the generator must be in the state that it had before the second run.
# - `torch.autograd.backward(output, grad)` then fills the `.grad` of the copies and adds to the `.grad` of the block's
#   parameters.
# - Return one gradient for each argument of forward but `ctx`: `None` for the block, and for an input that needs none.
#
# About 15 lines. (Autograd calls `backward` only if at least one of the inputs needs a gradient. In the check one
# always does.)

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
# Two things are missing for use on a real model, and PyTorch's `checkpoint` has them. On a **GPU** dropout draws from
# the generator of that GPU, while `torch.get_rng_state()` is that of the CPU alone: the second run would drop other
# elements, without any error. `torch.cuda.get_rng_state()` has to be kept as well. And under **autocast** (lesson 03b,
# section 4) `backward` usually runs outside of the `with` block, so the second run would compute in float32 what the
# first one computed in bfloat16. The state of autocast has to be kept and restored, too. (For a Function,
# `torch.amp.custom_fwd` and `torch.amp.custom_bwd` do that.)
#
# Here is the memory of the same step in three ways: plain, with checkpointing around each layer, and with the four
# micro-batches of section 3.

# %% tags=["figure"]
from course.labs.l16_memory import recorded_step

steps = {
    "plain": recorded_step(new_model(), 16),
    "checkpointed": recorded_step(with_checkpointing(new_model()), 16),
    "4 x 4 samples": recorded_step(new_model(), 4, 4),
}
plot.memory_timeline(steps, caption="16.three_ways")

# %% [markdown]
# (In the lowest panel F is forward, B backward and O the optimizer.) With checkpointing the peak is a third of what it
# was. Forward leaves only the layers' inputs. In backward there is one tooth for each of the six layers, from the last
# to the first, where that layer is computed again; it is drawn as temporary, because it is freed a moment later.
# Accumulation has four peaks with a quarter of the activations, and from the second one on the gradients lie below
# them. The two can be combined.
#
# PyTorch has two forms of checkpointing. `checkpoint(block, *inputs, use_reentrant=True)` is the one that you wrote: a
# Function whose backward starts another backward. `use_reentrant=False` works with **hooks on saved tensors**, the
# subject of section 6. This form can stop the second forward early, works when no input needs a gradient, and supports
# `torch.autograd.grad`. It is the one to use.
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
# The older form refuses it as well, and so does your Function, as long as it keeps its inputs with `save_for_backward`.
# A tensor that is kept as an attribute of `ctx` has no version number to compare: the gradients would be wrong without
# any error, which is why the check refuses it.
#
# **Not every layer.** We may put k layers into a segment and keep only the input of each segment. Then L/k inputs are
# kept, and in backward all activations of one segment of k layers exist at once:
#
# $$\lceil L/k \rceil \cdot \text{input} + k \cdot \text{layer}$$
#
# If input and layer had the same size, the sum L/k + k would be smallest at k = √L: this is the square-root rule of
# Chen et al. (2016). A transformer layer keeps 16 times its input, so its best k is near √(L/16): one layer in a
# segment, for up to 33 layers.
#
# **Not every operation.** Inside a layer, cheap operations are recomputed along with expensive ones. PyTorch can decide
# for each operation, by a **policy**: a function that it calls with every operation of the first forward, and that says
# whether its output is kept. `op` is the operation's name in ATen, PyTorch's library of operations. Here is a policy
# that keeps no output and counts the operations.

# %%
from collections import Counter
from functools import partial

from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)

asked = Counter()

def keep_nothing(ctx, op, *args, **kwargs):
    asked[str(op)] += 1
    return CheckpointPolicy.PREFER_RECOMPUTE

def by_policy(policy):
    """What `checkpoint` takes as its context_fn."""
    return partial(create_selective_checkpoint_contexts, policy)

layer = new_model().blocks[0]
x = torch.randn(16, 128, 128)
checkpoint(layer, x, use_reentrant=False, context_fn=by_policy(keep_nothing))
for name, times in asked.items():
    print(f"{times:2} x {name}")

# %% [markdown]
# The four `addmm` are the matmuls with a weight and a bias: `qkv`, `proj`, `up` and `down`. (A `Linear` without a bias
# is an `mm`.) Most of the others, such as `view` and `transpose`, only view the same memory in another way. Norms, GELU
# and the two sums take a few FLOPs for each number that they compute. A matmul takes two for each feature of its input,
# and attention four for each token that it attends to: hundreds or thousands. So one keeps the outputs of the matmuls
# and of attention, and recomputes the others.
#
# **Predict.** Without checkpointing a layer keeps 16 numbers for each token and feature. How many does it keep when
# only these five outputs and the layer's input are kept? And by what factor does checkpointing multiply the matmul
# FLOPs of the step?

# %% tags=["predict"]
kept_by_operation = 1 + 3 + 1 + 1 + 4 + 1
flops_by_operation = 1

# %%
aten = torch.ops.aten
EXPENSIVE = [
    aten.mm.default,
    aten.addmm.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
]

def kept_by_a_layer(model):
    """Numbers for each token and feature, after forward of the layers."""
    x = torch.randn(16, 128, 128, requires_grad=True)
    outputs = []
    def forward():
        y = x
        for block in model.blocks:
            y = block(y)
        outputs.append(y)
    return allocated_bytes(forward, CPU).left / x.nbytes / len(model.blocks)

# a list of operations is a policy that keeps their outputs
by_list = with_checkpointing(new_model(), context_fn=by_policy(EXPENSIVE))
found = kept_by_a_layer(by_list)
flops = counted_flops(by_list) / counted_flops(new_model())
compare("kept by a layer", kept_by_operation, found, within=1.05)
compare("FLOPs", flops_by_operation, flops, within=1.05, found="counted")

# %% [markdown]
# No matmul runs twice. The outputs of the two norms and of GELU, 1 + 1 + 4 numbers, are no longer kept, and the second
# norm's input is recomputed from the output of `proj`. That would leave 10 of the 16 numbers, and we find 11.

# %% [markdown] tags=["exercise"]
# ### Exercise 16.4 · A policy
#
# So one of the five outputs is kept in vain: backward never needs it. Write the policy that keeps the other four. Then
# a layer keeps 10 numbers, and still neither a matmul nor attention runs twice.
#
# - `args` are the arguments of the operation: (bias, input, weight) for `addmm` and (input, weight) for `mm`. The
#   weight is already transposed here: its shape is [features of the input, features of the output].
# - Attention has another kernel, with another name, on each kind of device. So ask whether `"attention" in str(op)`.
# - Return `CheckpointPolicy.MUST_SAVE` or `CheckpointPolicy.PREFER_RECOMPUTE`. The policy must work for layers of any
#   width, with biases or without.
#
# About 7 lines.

# %% tags=["exercise", "by-hand"]
from torch.utils.checkpoint import CheckpointPolicy

PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]


def policy(ctx, op, *args, **kwargs):
    """Whether the output of op(*args) is kept."""
    ### BEGIN SOLUTION
    if "attention" in str(op):
        return CheckpointPolicy.MUST_SAVE
    if op in PRODUCTS:
        num_in, num_out = args[-1].shape
        if num_in <= num_out:  # `down` alone makes fewer features than it takes
            return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
    ### END SOLUTION

# %% tags=["check"]
check("16.4", policy)

# %% [markdown]
# It is the output of `down`, which is added to the residual stream and which no other operation reads. `checkpoint`
# stops the second forward before it.
#
# torchtitan, PyTorch's own program for pre-training large models, checkpoints **by operation** by default (class
# `SelectiveAC`, August 2026). It keeps the outputs of attention, of matmuls and of some collectives, which would
# otherwise communicate a second time. But of the matmuls it recomputes every second one. Here is this rule, and all
# variants of our step side by side.

# %%
from course.labs import l16_by_hand
from course.labs.l03_step import median_s


def every_second_matmul():
    """torchtitan's rule, for one layer; it counts matmuls with a bias as well."""
    matmuls = []
    def rule(ctx, op, *args, **kwargs):
        if op in (aten.mm.default, aten.addmm.default):
            matmuls.append(op)
            if len(matmuls) % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        if op in EXPENSIVE:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE
    return create_selective_checkpoint_contexts(rule)

ways = {
    "no checkpointing": new_model(),
    "matmuls and attention": by_list,
    "the same without `down`": with_checkpointing(
        new_model(), context_fn=by_policy(l16_by_hand.policy)
    ),
    "every second matmul": with_checkpointing(
        new_model(), context_fn=every_second_matmul
    ),
    "full": with_checkpointing(new_model()),
}
steps = {name: partial(forward_and_backward, model) for name, model in ways.items()}
took_s = median_s(steps, rounds=5)
print(f"{'':24} kept by a layer   peak MiB   GFLOP   time")
for name, model in ways.items():
    kept = kept_by_a_layer(model)
    gflop = counted_flops(model) / 1e9
    times = took_s[name] / took_s["no checkpointing"]
    peak = measured_peak(model, 16) / MIB
    print(f"{name:24} {kept:15.1f} {peak:10.0f} {gflop:7.2f} {times:6.2f}")

# %% [markdown]
# By operation a layer keeps about a third less. With torchtitan's rule it is more than 40 % less, and one matmul of a
# layer, `proj`, runs twice. Even where no matmul runs twice the step takes longer than without checkpointing, because
# norms and GELU do run twice and PyTorch calls the policy, which is Python, for each operation.
#
# With `torch.compile` the compiler can choose the operations itself, for a budget:
# `torch._functorch.config.activation_memory_budget = 0.5` keeps half of the bytes that it would keep otherwise, and
# recomputes as little as possible. (Our six layers then keep 8.0 numbers: measured with PyTorch 2.13 on a CPU, November
# 2026. Compiling takes 10 to 20 s, so no cell does it here.)
#
# The word *selective* has an older meaning. Korthikanti et al. (2022) recompute only the core of attention, with its
# scores: for GPT-3 this saves 70 % of the activations for 2.7 % more FLOPs. labcode's `selective` is of this kind. A
# fused attention does the same inside its kernel, so there it gains nothing.
#
# **Takeaway: keep the layers' inputs and recompute the rest: L + 15 numbers instead of 16 L, for up to 4/3 of the
# FLOPs. By operation, 10 of a layer's 16 numbers stay, and no matmul is recomputed. Restore the state of the random
# numbers, and never change an input in place.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Mistakes: the block runs with gradients in forward (in a Function that takes
# `torch.enable_grad()`), `detach` is forgotten (the second backward then runs into the first graph), the generator is
# not put back. Ask: why must `backward` not return the gradients of the parameters? (They are no arguments of forward:
# `torch.autograd.backward` adds them to `.grad` directly.) And: what does DDP's hook see? (The same accumulation.)
#
# In 16.4 people compare the weight with [512, 128], which is right for this model alone. Ask: what would be kept of a
# layer with SwiGLU? (Two matmuls instead of `up`, and again not the last one.)

# %% [markdown]
# ## 6. Offload: activations kept elsewhere (optional, 26 min)
#
# What backward needs may also be **moved** out of the device's memory and fetched back: from a GPU to the memory of its
# host. It costs a transfer each way instead of a second forward. The link is usually PCIe with 16 lanes, which carries
# 31.5 GB/s each way in generation 4 (A100) and 63 GB/s in generation 5 (H100). A copy gets about four fifths of that:
# NVIDIA's `nvbandwidth` measured 25 GB/s on an A100 in each direction (the sources are at the end). So count with 25
# and 50 GB/s, and measure your own machine. On an H100 10 GB then take 0.2 s out and 0.2 s back, which may hide behind
# computing.
#
# Autograd has a place for this. `torch.autograd.graph.saved_tensors_hooks(pack, unpack)` is a context manager. In it
# autograd calls `pack(tensor)` for each tensor that an operation saves, and keeps what `pack` returns **instead of**
# the tensor. When backward needs it, `unpack` gets what `pack` has returned, and has to return the tensor.
#
# Here we have no GPU, so our device is the process with its memory, and the place elsewhere is the disk: `pack` writes
# a file and returns its path, and the profiler can measure what is left in memory. (DeepSpeed's ZeRO-Infinity goes as
# far as the disk, too.) Weights are saved for backward as well, but they stay in memory anyway, so there is no point in
# moving them.

# %% [markdown] tags=["exercise"]
# ### Exercise 16.5 · Offload
#
# `stays(tensor)` says whether a tensor belongs to a weight. Return such a tensor from `pack` as it is. For every other
# one, write a file with a unique name into `self.folder`, and return its path.
#
# - `torch.save(tensor, path)` writes the **whole storage** of a tensor, even if the tensor is only a part of it.
#   `tensor.clone()` has a storage of its own.
# - `unpack` gets what `pack` returned. It returns the tensor, `torch.load(path, weights_only=True)`, and removes the
#   file, so that the disk does not fill up in a long run.
#
# About 10 lines.

# %% tags=["exercise", "by-hand"]
class Offload:
    """Keeps on disk what autograd saves, until backward asks for it."""

    def __init__(self, folder, stays):
        self.folder = folder  # a pathlib.Path
        self.stays = stays
        self.num_written = 0

    def pack(self, tensor):
        """What autograd keeps in place of the tensor."""
        ### BEGIN SOLUTION
        if self.stays(tensor):
            return tensor
        path = self.folder / f"{self.num_written}.pt"
        self.num_written += 1
        torch.save(tensor.detach().clone(), path)
        return path
        ### END SOLUTION

    def unpack(self, kept):
        """The tensor, from what `pack` has returned."""
        ### BEGIN SOLUTION
        if isinstance(kept, torch.Tensor):
            return kept
        tensor = torch.load(kept, weights_only=True)
        kept.unlink()
        return tensor
        ### END SOLUTION

# %% tags=["check"]
check("16.5", Offload)

# %% [markdown]
# Now a forward of our step, with labcode's version.
#
# **Predict.** After forward our plain step holds 102 MiB for backward, with the log-softmax. How much of that is still
# in memory with offload: "all", "half" or "next to nothing"? And are the files together "as large" as 102 MiB, "larger"
# or "smaller"? Think of when `pack` is called.

# %% tags=["predict"]
left_in_memory = "next to nothing"
files_are = "larger"

# %%
import tempfile
from pathlib import Path

from torch.autograd.graph import saved_tensors_hooks

from course.labs.l16_by_hand import Offload as TheOffload


def belongs_to(model):
    """A function that says whether a tensor lies in the memory of a weight."""
    addresses = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    def stays(tensor):
        return tensor.untyped_storage().data_ptr() in addresses
    return stays

model = new_model()
folder = Path(tempfile.mkdtemp())
offload = TheOffload(folder, belongs_to(model))
losses = []

def forward():
    tokens = torch.randint(512, (16, 129))
    with saved_tensors_hooks(offload.pack, offload.unpack):
        losses.append(whole_loss(model, tokens))

left_mib = allocated_bytes(forward, CPU).left / MIB
files_mib = sum(file.stat().st_size for file in folder.iterdir()) / MIB
part = "half"
if left_mib > 90:
    part = "all"
elif left_mib < 10:
    part = "next to nothing"
PARTS = ("all", "half", "next to nothing")
compare("left in memory", left_in_memory, part, options=PARTS)
size = "as large"
if files_mib < 97:
    size = "smaller"
elif files_mib > 107:
    size = "larger"
compare("the files are", files_are, size, options=("smaller", "as large", "larger"))
print(f"in memory {left_mib:.2f} MiB, in files {files_mib:.0f} MiB")

# %% [markdown]
# `pack` is called once for each operation that saves a tensor, so a tensor that two operations save is written twice.
# Here are the peak of the whole step and its time.

# %%
from functools import partial

from course.labs.l03_step import median_s


def offloaded_loss(model, tokens):
    hooks = TheOffload(folder, belongs_to(model))
    with saved_tensors_hooks(hooks.pack, hooks.unpack):
        return whole_loss(model, tokens)

losses[0].backward()  # reads the files of the cell above, and removes them
plain_mib = measured_peak(new_model(), 16) / MIB
offloaded_mib = measured_peak(new_model(), 16, loss_of=offloaded_loss) / MIB
adamw = torch.optim.AdamW(model.parameters(), fused=True)
took_s = median_s({
    "plain": partial(one_step, model, adamw, 16),
    "offloaded": partial(one_step, model, adamw, 16, loss_of=offloaded_loss),
}, rounds=3)
print(f"peak: {plain_mib:.0f} MiB plain, {offloaded_mib:.0f} MiB offloaded")
print(f"time: {took_s['offloaded'] / took_s['plain']:.1f} times as long")

# %% [markdown]
# PyTorch has these hooks for a GPU. `save_on_cpu` moves what autograd saves to the host; with `pin_memory=True` it uses
# memory there that the GPU can copy to and from while it computes:
#
# ```python
# with torch.autograd.graph.save_on_cpu(pin_memory=True):
#     loss = gpt.loss(model(inputs), targets)
# loss.backward()
# ```
#
# It moves weights, too, and it does not prefetch: backward waits for each tensor. Good implementations move only some
# layers and copy on a stream of their own, one layer ahead. The optimizer's state, which is needed once per step, can
# be offloaded as well.
#
# **Takeaway: hooks on saved tensors decide what autograd keeps. Offload trades bytes of the device for bytes over a
# link; do it when checkpointing is not enough, or when the link is idle.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Mistakes: file names made of `id(tensor)` or of the address, which come back; the file is never
# removed; `torch.save` of a view. Ask: what does the version number of section 5 protect here? (Nothing: `pack` writes
# at once, so a later change in place cannot do harm.)

# %% [markdown]
# ## 7. Reserved memory and fragments (core, 8 min)
#
# PyTorch's allocator asks CUDA for a **segment** of memory and cuts it into **blocks**, one for each tensor. A block
# that is freed stays in the cache for the next tensor. A tensor needs **one** free block that is large enough;
# neighbouring free blocks are merged, but a block in use between them keeps them apart. With tensors of ever-changing
# sizes this can happen:

# %% tags=["figure"]
SEGMENTS = [
    [(1.5, True), (2.0, False), (0.5, True)],
    [(1.5, False), (1.0, True), (1.5, False)],
    [(0.5, True), (1.5, False)],
]
plot.fragments(SEGMENTS, 2.5, caption="16.fragments")

# %% [markdown]
# (The dotted parts of the lower row are addresses without memory behind them.) This is **fragmentation**. You recognise
# it by the error: the request is smaller than *reserved but unallocated* and was refused all the same.
#
# `torch.cuda.empty_cache()` gives back to CUDA only those **segments in which no block is in use**, in the picture
# none: one small tensor holds a whole segment. PyTorch itself gives all free segments back before it raises the error,
# so `empty_cache()` after an out-of-memory error is no cure. It helps **another** program, or NCCL, that needs memory
# on the same GPU. One more trap: inside the `except` block the traceback still holds the tensors of the function that
# failed. Leave the block before you try again with a smaller batch.
#
# - **Expandable segments** are the cure for fragments. A segment then is a range of addresses, and memory is mapped
#   behind it in pages. Free pages can be unmapped in one place and mapped in another, as the lower row of the picture
#   shows; tensors never move. Set `PYTORCH_ALLOC_CONF=expandable_segments:True` (`PYTORCH_CUDA_ALLOC_CONF` is the older
#   name, which the error above prints and every release accepts).
# - `torch.cuda.memory_allocated()` counts the blocks in use, `torch.cuda.memory_reserved()` counts the segments, and
#   `nvidia-smi` shows the segments and what is not PyTorch's. So `nvidia-smi` does not tell how much a training run
#   needs.
# - **Not PyTorch's** are CUDA's context, with the code of the kernels, and NCCL's buffers. In the error of section 1
#   the context has 18.73 - 9.08 - 9.35 = 0.30 GiB. NCCL takes its buffers from CUDA directly, for each communicator and
#   when it is first used: a user of 8 H100s reports 1.06 GB beside PyTorch before the first all-to-all and 4.34 GB
#   after it. Leave room for this when you plan: lesson 20 leaves 4 GiB.
# - A **snapshot** has every block with the line of the program that made it. <https://pytorch.org/memory_viz> draws it:
#
# ```python
# torch.cuda.memory._record_memory_history()
# train_step()
# torch.cuda.memory._dump_snapshot("snapshot.pickle")
# ```
#
# On SLURM there are two memories, and two errors:
#
# | | memory of the host | memory of the GPU |
# |---|---|---|
# | limit | `#SBATCH --mem=...`, for all processes of a job on a node together (a *cgroup*) | the capacity of the GPU |
# | error | the OOM killer: state OUT_OF_MEMORY | `torch.OutOfMemoryError`, exit status 1 |
# | what was used | `sacct -o JobID,State,MaxRSS` | `torch.cuda.max_memory_allocated()` |
#
# `MaxRSS` is sampled, so a short peak may be missing in it.
#
# **Takeaway: a request needs one free block that is large enough, however much is free in all. Plan with the bytes that
# are allocated, not with what `nvidia-smi` shows.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Ask who has used `nvidia-smi` to find out how much a training run needs, and who has written
# `empty_cache()` into a loop. (It makes each step slower, and frees nothing that the next step would not use.)

# %% [markdown] tags=["exercise"]
# ## 8. Open end: make it fit, at the best speed (optional, 23 min)
#
# ### Exercise 16.6 · Choose
#
# Given a model, a global batch and a memory budget, choose micro-batch, accumulation, checkpointing and dtype. `case`
# has `model`, `global_batch`, `room_bytes`, `flops_per_s` (a dict: dtype to what the device reaches) and `launch_s`
# (what each micro-batch costs beyond its matmuls). Return `Settings(micro_batch, num_micro_batches,
# activation_checkpointing, dtype)`: the kind of checkpointing is "none" or "full", the dtype a key of `flops_per_s`.
#
# - **Bytes**: `plan.peak_bytes(case, settings)` is labcode's formula. It must not exceed the room.
# - **Seconds**: 6 FLOPs for each parameter and token, 8 with checkpointing "full", at the rate of the dtype; and
#   `launch_s` for each micro-batch.
# - `micro_batch` times `num_micro_batches` is the global batch, always.
#
# The check goes through six cases, whose rates and launch times are made up: lesson 03 measures those of a machine. In
# each the settings must fit, and reach at least 85 % of the best speed by this model of the time. The first case is
# then run for real, in a process that gets this much memory and no more. About 15 lines.

# %% tags=["exercise"]
from course.labs import l16_plan as plan
from course.labs.l16_limited import Settings


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
check("16.6", choose)

# %% tags=["solution-only"]
print(f"{'':44} {'samples':>8}  {'checkpoint':10} {'dtype':8}  {'of room':>7}")
for case in plan.CASES:
    settings = plan.best(case)
    share = plan.peak_bytes(case, settings) / case.room_bytes
    samples = f"{settings.num_micro_batches} x {settings.micro_batch}"
    print(f"{case.about:44} {samples:>8}", end="  ")
    print(f"{settings.activation_checkpointing:10} {settings.dtype:8}  {share:7.0%}")

# %% [markdown]
# There is no one rule. Where a micro-batch costs little, smaller ones are better than a second forward. Where
# each of them costs much, or one sample is too large already, checkpointing wins. And 16-bit numbers help only where
# they are fast.

# %% [markdown] tags=["solution-only"]
# *For the instructor.* People take the smallest micro-batch, "to be safe": it fits and fails in speed. Ask
# how many of the six cases would change with a fused loss, which never stores the logits.

# %% [markdown]
# ## From here to GPUs and SLURM (core, 2 min)
#
# | what | start |
# |---|---|
# | checkpointing of each layer | `python -m labcode.train gpt_10m --parallel.activation_checkpointing full` |
# | of the core of attention, where its kernel is not fused | `--parallel.activation_checkpointing selective` |
# | memory over a step, by what it is for | `--profile.steps 10:13 --profile.memory` |
# | 16-bit matmuls | `--train.dtype bfloat16` |
# | ZeRO-1 | `--parallel.zero_stage 1` |
#
# ## Questions (core, 3 min)
#
# **1.** A log says: tried to allocate 3 GiB; 1 GiB free; 6 GiB reserved but unallocated. What do you try first?
#
# <details><summary>Answer</summary>
#
# `expandable_segments:True`. There are 6 GiB in the cache, in pieces of which none is large enough.
# </details>
#
# **2.** A model has 4 layers and a vocabulary of 250,000. Checkpointing of all layers saves little. Why, and what
# helps?
#
# <details><summary>Answer</summary>
#
# The logits are the largest part, and they are not inside a layer. A loss in chunks helps, or a smaller micro-batch.
# </details>
#
# **3.** From lesson 13: a run is out of memory right before the optimizer's step, with one sample. Checkpointing or
# ZeRO?
#
# <details><summary>Answer</summary>
#
# ZeRO. At that moment no activations exist; weights, gradients and moments fill the memory.
# </details>
#
# ## Recap
#
# Look for the largest part first, and take the technique for that part. Checkpointing does nothing for weights, and
# ZeRO nothing for activations.
#
# | technique | shrinks | by | costs |
# |---|---|---|---|
# | accumulation | activations, logits | a factor of m | smaller matmuls; gradients at the peak |
# | `del logits` | logits | V of 4 V | nothing |
# | loss in chunks | logits | nearly all of 3 V | smaller matmuls |
# | full checkpointing | activations | L + 15 numbers instead of 16 L | up to 4/3 of the FLOPs |
# | every k-th layer | activations | L/k + 16 k instead of 16 L | up to 4/3 of the FLOPs |
# | checkpointing by operation | activations | 10 instead of 16 | norms and GELU once more |
# | fused attention, or its core recomputed | scores | all of them | a few percent of the FLOPs |
# | offload | activations | all that is moved | two transfers |
# | bfloat16 by autocast (lesson 03b) | activations | nearly half | rounding; a narrow copy of the weights |
# | ZeRO-1 | moments | a factor of p | no more bytes, but weights are gathered after the step (lesson 13) |
# | expandable segments | fragments | | hardly any time |
#
# ## Sources
#
# - Chen et al. 2016, *Training Deep Nets with Sublinear Memory Cost*, arXiv:1604.06174: section 4.
# - Korthikanti et al. 2022, arXiv:2205.05198: section 5, the core of attention.
# - torchtitan's policy:
#   <https://github.com/pytorch/torchtitan/blob/b5bcd76/torchtitan/distributed/activation_checkpoint.py>.
# - The memory budget of the compiler: `torch/_functorch/config.py` of PyTorch 2.13, and
#   <https://pytorch.org/blog/activation-checkpointing-techniques/>.
# - Kaplan et al. 2020, arXiv:2001.08361: 6 FLOPs for each parameter and token.
# - Hsu et al. 2024, *Liger Kernel*, arXiv:2410.10989: a loss whose gradients are made in forward. PyTorch's:
#   <https://docs.pytorch.org/docs/2.13/generated/torch.nn.functional.linear_cross_entropy.html>.
# - Rajbhandari et al. 2021, *ZeRO-Infinity*, arXiv:2104.07857: offload.
# - The error of section 1: <https://github.com/murong-xu/CADS/issues/4>.
# - PCIe: <https://truenas.com/docs/references/performance/interconnectdatarates/> (what 16 lanes carry),
#   <https://github.com/NVIDIA/nvbandwidth/issues/53> (A100, measured). NCCL's buffers:
#   <https://github.com/NVIDIA/nccl/issues/1685> (H100), <https://github.com/NVIDIA/nccl/issues/964> (A100: 544 to 688
#   MB for each group).
# - PyTorch: <https://docs.pytorch.org/docs/stable/checkpoint.html>,
#   <https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management>,
#   <https://docs.pytorch.org/tutorials/intermediate/autograd_saved_tensors_hooks_tutorial.html>.
