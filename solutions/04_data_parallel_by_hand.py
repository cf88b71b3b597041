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
# # 04 · Data parallel by hand
#
# The simplest kind of distributed training rests on one idea: every rank holds the whole model and reads its own part
# of the batch, and the gradients are averaged. In this lesson you write that average, see why the result is the
# training of one process, and meet the mistakes that break this equality without any error message. At the end you
# write a training script of your own, in plain PyTorch, that runs on any number of processes.
#
# ## Goals
#
# - derive why averaged gradients give **the same** training as one process;
# - average gradients over a group, also with shares of different sizes and with accumulation;
# - divide the data between the ranks, and check that it is divided;
# - say what data parallelism keeps on each rank, and where, for that reason, it reaches its limit;
# - write a training script for torchrun, starting from an empty function;
# - write one that needs PyTorch alone, and adds bfloat16, accumulation, validation and checkpoints.
#
# **Time**: 173 minutes. Good places for a break are after section 3 and before the scripts of sections 7 and 8.
# **Needs**: lesson 01 (sections 1 and 2). Question 3 is about section 3 of that lesson.

# %%
import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DistributedSampler

from course.lab import Ranks, check, compare, plot, yours
from labcode.config import GPTConfig, TextData
from labcode.data import sampler, text
from labcode.models import gpt, layers

torch.set_num_threads(1)  # one core for each process, here as on the ranks
ranks = Ranks(4)

# %% [markdown]
# All sections train the same small GPT, which learns Shakespeare, on the same six batches of 16 samples. It computes in
# float64, so that rounding cannot hide a mistake.

# %%
splits = text.load(TextData(), context_length=64)
config = GPTConfig(
    splits.tokenizer.vocab_size,
    num_layers=2,
    num_heads=4,
    hidden_size=64,
    context_length=64,
)
order = sampler.Batches(len(splits.train), global_batch=16)
batches = [splits.train[order.indices(step)] for step in range(6)]

def build(seed=0):
    """The model; the same seed gives the same weights in every process."""
    return layers.initialize(gpt.GPT(config), seed).double()

# %% [markdown]
# `train` makes six steps on one share of each batch. Two functions can be handed to it: `prepare` changes the model
# before the first step, and `average` is called between backward and step.

# %%
def train(rank, p, average=None, prepare=None, seed=0):
    """Losses of six steps on share `rank` of `p`, and the weights after them."""
    model = build(seed)
    if prepare:
        prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    losses = []
    for inputs, targets in batches:
        own_inputs = inputs.chunk(p)[rank]
        own_targets = targets.chunk(p)[rank]
        loss = gpt.loss(model(own_inputs), own_targets)
        optimizer.zero_grad()
        loss.backward()
        if average:
            average(model)  # here the ranks agree
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses), parameters_to_vector(model.parameters()).detach()

# %% [markdown]
# ## 1. The mean of the means (core, 17 min)
#
# The picture shows one training step on four ranks. Each rank has a complete copy of the model, and all copies are
# equal. The batch is cut into four shares, and each rank computes the gradient of its own share. Then one all-reduce
# replaces the four gradients by their mean, every rank takes the same optimizer step, and so the copies stay equal.

# %% tags=["figure"]
plot.data_parallel(4, caption="04.step")

# %% [markdown]
# Why is this the training of one process? The loss of a batch is the mean over its $B$ samples. Cut the batch into $p$
# shares of the same size, and let $L_r$ be the mean over the share of rank $r$. The mean of these means is the mean
# over all samples. For example, four samples with the losses 1, 2, 3 and 6 have the mean 3. Two ranks with (1, 2) and
# (3, 6) have the means 1.5 and 4.5, whose mean is 3 again. Differentiation is linear, so the same holds for gradients:
#
# $$L = \frac1B\sum_i \ell_i = \frac1p \sum_r L_r \qquad\text{and so}\qquad \nabla L = \frac1p \sum_r \nabla L_r.$$
#
# This holds on one condition: the loss of a sample must not depend on the other samples of its batch. Batch
# normalisation violates it, and a GPT has none. To see the equality, we train one process first.

# %% tags=["nbval-check-output"]
from course.labs import l04_by_hand

one_process, _ = train(rank=0, p=1)
print("one process:", " ".join(f"{loss:.3f}" for loss in one_process))

# %% [markdown] tags=["exercise"]
# ### Exercise 4.1 · Average the gradients
#
# Write the function that is called between backward and step. Afterwards every parameter's `.grad` must be the mean
# over the **group**. A parameter that is not trained has `grad` None on all ranks; leave it alone. The check runs your
# function on all four ranks, and then in two groups of two.

# %% tags=["exercise", "by-hand"]
def average_gradients(model, group):
    """Replace every gradient by its mean over the group."""
    ### BEGIN SOLUTION
    for param in model.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad, group=group)
            param.grad /= dist.get_world_size(group)
    ### END SOLUTION

# %% tags=["check"]
check("4.1", average_gradients, ranks)

# %% [markdown]
# The ranks send nothing in forward. After backward each sends its gradients, one number for each parameter of the
# model, however large the batch is. So with a larger batch on each rank, communication takes a smaller fraction of the
# step.
#
# Now the training itself. Each of four ranks takes a quarter of each batch, and all average over `dist.group.WORLD`,
# the group of all ranks. The function that averages is yours if it passed the check, and else labcode's.

# %% tags=["figure"]
average_over = yours("4.1", l04_by_hand.average_gradients)

def average(model):
    average_over(model, dist.group.WORLD)

runs = ranks.run(train, 4, average)
rank_losses = [losses for losses, _ in runs]
mean_loss = torch.stack(rank_losses).mean(0)
plot.losses_of_ranks(one_process, rank_losses, mean_loss)

# %% [markdown]
# The ranks see different samples, so their losses scatter. The mean of the four (the crosses) lies on the loss of one
# process (the circles) at each step. A figure in the next section shows how small the difference is.
#
# **Takeaway: with shares of the same size, the mean of the ranks' gradients is the gradient of the whole batch.
# Training on p ranks is training on one, and not an approximation of it.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Wrong answers to 4.1 that the check knows: the sum instead of the mean, division by the world
# size (right on four ranks, wrong on two groups of two), the default group, zeros instead of None (weight decay
# then shrinks a weight that nobody trains), and averaging the **weights**. Averaging weights after the step is worth a
# discussion: with plain SGD it gives the same result, with Adam it does not, because the second moments differ. Ask the
# room: what happens to the optimizer's state? (It is a function of the gradients, so it stays equal as well.)

# %% [markdown]
# ## 2. A common start (core, 10 min)
#
# Averaging gradients keeps equal copies equal. It does not **make** them equal. In section 1 every rank drew the same
# weights, because all used the same seed. Suppose now that each rank uses its own number as the seed. That is sensible
# for dropout, but here somebody forgot that the initial weights are random numbers as well.
#
# **Predict.** The gradients are averaged in each of the six steps. How far apart are the weights of rank 0 and rank 3
# at the end, as a fraction of their distance at the start?

# %% tags=["predict"]
distance_left = 1.0  # all ranks make the same step, from different places

# %% tags=["nbval-check-output"]
from course.labs import l04_by_hand


def average(model):
    l04_by_hand.average_gradients(model, dist.group.WORLD)

def train_with_own_seed(rank, prepare=None):
    return train(rank, 4, average, prepare, seed=rank)

def weights(seed):
    return parameters_to_vector(build(seed).parameters()).detach()

drifted = ranks.run(train_with_own_seed)
distance_before = (weights(seed=0) - weights(seed=3)).norm()
distance_after = (drifted[0][1] - drifted[3][1]).norm()
ratio = distance_after / distance_before
compare("distance that is left", distance_left, ratio, within=1.01)

# %% [markdown]
# Ranks that start apart stay apart, by the same distance: their optimizers have seen the same averages, so each adds
# the same step to its own weights. No later average of gradients mends this, and there is no error. Weight decay, which
# is off here, would shrink the distance along with the weights, but far too slowly to help. The cure is one broadcast
# of rank 0's weights before training.

# %% tags=["nbval-check-output"]
def broadcast_weights(model):
    for param in model.parameters():
        dist.broadcast(param.data, src=0)

mended = ranks.run(train_with_own_seed, broadcast_weights)
print("with a broadcast at the start:", (mended[0][1] - mended[3][1]).norm().item())

# %% tags=["figure"]
one_process, _ = train(rank=0, p=1)
averaged = ranks.run(train, 4, average)
never_averaged = ranks.run(train, 4)
cases = {
    "averaged": averaged,
    "own seeds, then a broadcast": mended,
    "own seeds": drifted,
    "never averaged": never_averaged,
}
plot.off_one_process(cases, one_process)

# %% [markdown]
# The figure shows how far the mean loss of the four ranks is from the loss of one process. The two correct runs differ
# only in the last bits of a float64, because sums are taken in a different order. The two wrong runs are off by more
# than a hundredth of a nat from the second step on. More than thirteen powers of ten lie between right and wrong, yet a
# plot of the losses alone would hardly show it, since all four runs learn.
#
# **Takeaway: equal weights at the start, and the mean gradient in each step. Then every rank holds the model of one
# process, after any number of steps.**

# %% [markdown]
# ## 3. Shares of different sizes (core, 21 min)
#
# The derivation needed shares of the same size. In practice they often differ: the last batch of an epoch is rarely a
# multiple of p, and texts have different lengths, so that the ranks have different numbers of tokens that count.
#
# Suppose rank 0 has 7 of 16 samples, and the other three ranks have 3 each. All samples should have the same weight,
# 1/16, but each rank takes the mean over its own samples, and then the four means are averaged.
#
# **Predict.** How many times as much does a sample of rank 1 weigh as a sample of rank 0?

# %% tags=["predict"]
times_as_much = (1 / 12) / (1 / 28)

# %% [markdown]
# The weight of a sample is the derivative of the result with respect to the loss of that sample, so autograd can tell
# us.

# %% tags=["nbval-check-output"]
shares = [7, 3, 3, 3]

def weights_of_own_samples(rank):
    losses = torch.zeros(shares[rank], requires_grad=True)
    mean_of_this_rank = losses.mean()
    mean_of_this_rank.backward()
    in_mean_of_four = losses.grad / 4
    return in_mean_of_four.tolist()

weights_by_rank = ranks.run(weights_of_own_samples)
measured = weights_by_rank[1][0] / weights_by_rank[0][0]
compare("weight of a sample", times_as_much, measured, within=1.001, found="computed")

# %% tags=["figure"]
plot.sample_weights(weights_by_rank, caption="04.sample_weights")

# %% [markdown]
# A sample of rank 0 gets the weight 1/7 in its rank's mean, and this mean gets the weight 1/4, which makes 1/28. A
# sample of the other ranks has 1/12, which is 7/3 times as much.

# %% [markdown] tags=["exercise"]
# ### Exercise 4.2 · Uneven shares
#
# Every rank knows how many samples its gradient is the mean of: `mine`. It does not know the numbers of the others.
# Make every `.grad` the gradient of the mean over **all** samples of the group. You may send more than gradients. Here
# every parameter is trained. A rank may even have no sample: then its `mine` is 0, and its gradients are zeros. The
# check tries 7 + 3 + 3 + 3 samples, two groups of 7 + 3, and 7 + 3 + 0 + 6.

# %% tags=["exercise"]
def average_uneven(model, mine, group):
    """Replace means over `mine` samples by the mean over the group's samples."""
    ### BEGIN SOLUTION
    total = torch.tensor(float(mine))
    dist.all_reduce(total, group=group)
    for param in model.parameters():
        param.grad *= mine / total
        dist.all_reduce(param.grad, group=group)
    ### END SOLUTION

# %% tags=["check"]
check("4.2", average_uneven, ranks)

# %% [markdown]
# With PyTorch's `DistributedDataParallel` (DDP; section 7) you do not write the average yourself: `backward()` sums the
# gradients and divides by the number of ranks, whatever the sizes of their shares. So the weight goes into the loss. If
# a rank multiplies its loss by p · mine / total, DDP's division by p leaves mine / total.

# %%
from torch.nn.parallel import DistributedDataParallel


def gradient(model):
    return torch.cat([param.grad.flatten() for param in model.parameters()])

def gradient_of_ddp(rank, weighted):
    model = DistributedDataParallel(build())
    inputs, targets = batches[0]
    own_inputs = inputs.split(shares)[rank]
    own_targets = targets.split(shares)[rank]
    loss = gpt.loss(model(own_inputs), own_targets)
    if weighted:
        total = torch.tensor(len(own_inputs))
        dist.all_reduce(total)
        loss = loss * dist.get_world_size() * len(own_inputs) / total
    loss.backward()
    return gradient(model)

inputs, targets = batches[0]
model = build()
gpt.loss(model(inputs), targets).backward()
whole = gradient(model)
for weighted in (False, True):
    found = ranks.run(gradient_of_ddp, weighted)[0]
    away = (found - whole).norm() / whole.norm()
    print(f"weighted: {weighted!s:5}  {away:.0e} of its length away from one process")

# %% [markdown]
# **Takeaway: add up sums and counts, and divide once. A mean of means is right only where all counts are equal.** You
# met the same rule in lesson 00, section 2, for a mean over the ranks.

# %% [markdown]
# The rank without samples is easy to get wrong in a training loop. Suppose that rank 3 finds an empty batch and leaves
# the step without calling all-reduce, as a `continue` does.

# %% tags=["raises-exception"] raises="HangError: ranks 0-2 wait in all_reduce ... rank 3 has finished"
def skip_if_empty(rank):
    gradient = torch.ones(2)
    if rank == 3:
        return  # nothing to do
    dist.all_reduce(gradient)

ranks.run(skip_if_empty)

# %% [markdown]
# The others wait. The pool of this notebook notices it after five seconds and says who is missing; on a cluster, the
# job stands still until a time-out, after 10 minutes with NCCL and 30 with gloo (lesson 01, section 7). In a real loop
# it can be worse: rank 3 goes on to the next batch, and its next all-reduce meets the one that the others are still
# making for the batch before. From then on rank 3 is one step ahead, without any error. A rank without samples has to
# take part, with the weight 0. With DDP it has to call backward as well, because DDP sends there.

# %% [markdown] tags=["solution-only"]
# *For the instructor.* In 4.2 people multiply by `mine` and forget to divide by the total (the gradient is then 16
# times as long), or divide by the number of ranks as well. With 7 + 3 + 0 + 6 samples the check finds those who return
# early where `mine` is 0. Ask: what if the gradients of that rank are None and not zeros? (Then it has nothing to send,
# and has to make zeros first.)

# %% [markdown]
# ## 4. Gradient accumulation (core, 18 min)
#
# A batch may be too large for the memory even after it has been divided between the ranks. Then a rank cuts its share
# into m **micro-batches**, runs forward and backward on one after the other, and takes one optimizer step at the end.
# This works because `backward()` **adds** to `.grad`. The picture shows it for four micro-batches.

# %% tags=["figure"]
plot.accumulation(4, caption="04.accumulation")

# %% [markdown]
# It adds; it does not average. The loss of a micro-batch is a mean over its own samples, so the sum of m such gradients
# is m times the gradient of the whole share. Therefore each loss has to be divided by m before backward.
#
# What happens if somebody forgets it? Let us train one step with m = 4, once with the division and once without. For
# SGD, a step is the learning rate times the gradient. Adam divides each number of the gradient by its typical size, and
# in the first step, that is the number's own size.
#
# **Predict.** Without the division, how many times too long is the first step of SGD, and that of AdamW?

# %% tags=["predict"]
sgd_step_too_long = 4.0
adamw_step_too_long = 1.0

# %% tags=["nbval-check-output"]
def length_of_first_step(optimizer_class, divide_by, m=4):
    """How far the weights move in one step with m micro-batches."""
    model = build()
    optimizer = optimizer_class(model.parameters(), lr=1e-3, weight_decay=0.0)
    before = parameters_to_vector(model.parameters()).detach().clone()
    inputs, targets = batches[0]
    for micro_inputs, micro_targets in zip(inputs.chunk(m), targets.chunk(m)):
        loss = gpt.loss(model(micro_inputs), micro_targets)
        (loss / divide_by).backward()
    optimizer.step()
    after = parameters_to_vector(model.parameters()).detach()
    return (after - before).norm()

def times_too_long(optimizer_class):
    wrong = length_of_first_step(optimizer_class, divide_by=1)
    right = length_of_first_step(optimizer_class, divide_by=4)
    return wrong / right

compare("SGD", sgd_step_too_long, times_too_long(torch.optim.SGD), within=1.001)
compare("AdamW", adamw_step_too_long, times_too_long(torch.optim.AdamW), within=1.01)

# %% [markdown]
# With SGD the mistake acts like a learning rate that is four times as high, and you are likely to notice it. AdamW hides
# it, because a constant factor cancels. So it can survive in a script for a long time, until somebody adds gradient
# clipping, which compares the length of the gradient with a fixed number.

# %% [markdown] tags=["exercise"]
# ### Exercise 4.3 · Accumulate, then average once
#
# Compute the gradient of a step with accumulation. `inputs` and `targets` are this rank's share. Cut them into
# `num_micro_batches` parts; all parts have the same size, on all ranks. Afterwards `.grad` must be the mean over all
# samples of all ranks of the group, whatever it held before. Backward follows each forward at once, so that only one
# micro-batch's activations are in memory. The gradients are sent **once**, not after each micro-batch. For that you may
# call labcode's `l04_by_hand.average_gradients(model, group)`. The optimizer step is not part of your function.

# %% tags=["exercise"]
from course.labs import l04_by_hand


def accumulated_gradients(model, inputs, targets, num_micro_batches, group):
    """Fill `.grad` with the mean gradient of the group's whole batch."""
    ### BEGIN SOLUTION
    model.zero_grad()
    micro_inputs = inputs.chunk(num_micro_batches)
    micro_targets = targets.chunk(num_micro_batches)
    for some_inputs, some_targets in zip(micro_inputs, micro_targets):
        loss = gpt.loss(model(some_inputs), some_targets)
        (loss / num_micro_batches).backward()
    l04_by_hand.average_gradients(model, group)
    ### END SOLUTION

# %% tags=["check"]
check("4.3", accumulated_gradients, ranks)

# %% [markdown]
# Dividing by m is right because all micro-batches have the same size. Where they differ, for example in the number of
# tokens that count, section 3 applies again: add up the losses, and divide by the count of the whole step (lesson 07,
# section 6).
#
# **Takeaway: with m micro-batches, divide each loss by m and send the gradients once, at the end.** Lesson 05, section
# 5, shows the same loop for DDP.

# %% [markdown]
# ## 5. Who reads what (core, 10 min)
#
# So far each rank cut its share out of a batch that was already there. In a real run every rank reads for itself, and
# must know which samples are its own. PyTorch's `DistributedSampler` tells it: it shuffles all samples with a seed that
# is the same on all ranks, and rank $r$ takes every $p$-th of them, beginning with number $r$.
#
# To shuffle anew in each **epoch** (one pass over the data), it adds the number of the epoch to the seed. It cannot
# know this number, so you have to tell it: `share.set_epoch(epoch)`. That is easily forgotten. Here are three epochs of
# 16 samples on four ranks, without it and with it.

# %% tags=["figure"]
def epoch_order(epoch, set_epoch, num_samples, p=4):
    """The samples of one epoch: those of rank 0, then those of rank 1, ..."""
    samples = []
    for rank in range(p):
        share = DistributedSampler(range(num_samples), num_replicas=p, rank=rank)
        if set_epoch:
            share.set_epoch(epoch)
        samples += list(share)
    return samples

plot.epochs(epoch_order)

# %% [markdown]
# Each row is an epoch. Without `set_epoch`, every epoch has the same batches in the same order. The rows of epoch 0 are
# the same with and without it, because a sampler that was never told stays at epoch 0.
#
# The other mistake is to have no sampler at all: `DataLoader(dataset, batch_size=4, shuffle=True)` is right in one
# process, and runs on four ranks as well. Like most scripts, this one begins with `torch.manual_seed(0)` on each rank,
# and the loader shuffles with this seed. The data set is the numbers from 0 to 95, so we see what is read.
#
# **Predict.** The global batch should have 16 different samples. How many does it have? And how often is each sample
# read in one epoch, by all ranks together?

# %% tags=["predict"]
different_samples = 4
times_read = 4

# %% tags=["nbval-check-output"]
from torch.utils.data import DataLoader


def batches_without_sampler(rank):
    torch.manual_seed(0)
    loader = DataLoader(range(96), batch_size=4, shuffle=True)
    return [batch.tolist() for batch in loader]

read_in_first_step = []
read_in_epoch = []
for batches_of_rank in ranks.run(batches_without_sampler):
    read_in_first_step += batches_of_rank[0]
    for batch in batches_of_rank:
        read_in_epoch += batch

found = len(set(read_in_first_step))
compare("different samples", different_samples, found, within=1, found="counted")
times = read_in_epoch.count(0)
compare("times sample 0 is read", times_read, times, within=1, found="counted")
print("read in the first step:", read_in_first_step)

# %% [markdown]
# All ranks do the same work, and an epoch takes four times as many steps as it should. (With a different seed on each
# rank, most samples of a step would differ, but an epoch would still read everything four times.) Again there is no
# error, and the loss falls nicely.
#
# If the samples cannot be dealt out evenly, the sampler repeats some from the beginning until all ranks have as many:
# of ten samples on four ranks it makes twelve. In training this does no harm, and equal numbers keep the collectives
# together. A validation, however, would count some samples twice; the script of section 8 avoids it.
#
# labcode's own `data.sampler.Batches` computes the samples of any step from the seed and the number of the step, so it
# needs no epoch, and a run that was stopped resumes with the right samples.
#
# **Takeaway: print the numbers of the samples that each rank reads, for two steps and two epochs. It is the cheapest
# test there is.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* In 4.3 some add up the losses and call backward once at the end: the gradient is right, but all
# activations are in memory together. Ask who has seen a training script without the division by m, and whether it used
# Adam.

# %% [markdown]
# ## 6. What it costs in memory (core, 6 min)
#
# Every rank keeps the whole model. For each parameter, training with Adam in float32 keeps four numbers of 4 bytes: the
# weight, its gradient, and Adam's two moments, which are running means of the gradient and of its square. That makes 16
# bytes a parameter. The activations of a rank's share come on top.
#
# <details><summary>And if it trains in 16 bits?</summary>
#
# It needs 16 bytes as well, as Rajbhandari et al. 2020 count: 2 for the weight, 2 for its gradient, and 4 each for the
# two moments and for a copy of the weight in float32. Megatron-LM can keep the gradient in float32 instead of 16 bits,
# which makes 18.
# </details>
#
# A GPU with 80 GB has room for 80e9 / 16, that is 5 billion parameters at most, if there is nothing else in its memory.
#
# **Predict.** How many parameters fit at most on four such GPUs, with data parallelism?

# %% tags=["predict"]
on_four_gpus = 80e9 / 16

# %% tags=["nbval-check-output"]
from course.labs import l04_by_hand


def bytes_per_parameter(rank, p):
    """What one of p ranks keeps after a step: weights, gradients and AdamW's state."""
    model = build().float()
    optimizer = torch.optim.AdamW(model.parameters())
    inputs, targets = batches[0]
    own_inputs = inputs.chunk(p)[rank]
    own_targets = targets.chunk(p)[rank]
    gpt.loss(model(own_inputs), own_targets).backward()
    if p > 1:
        l04_by_hand.average_gradients(model, dist.group.WORLD)
    optimizer.step()
    kept = 0
    for param in model.parameters():
        moments = optimizer.state[param]
        kept += param.nbytes + param.grad.nbytes
        kept += moments["exp_avg"].nbytes + moments["exp_avg_sq"].nbytes
    return kept / sum(param.numel() for param in model.parameters())

alone = bytes_per_parameter(rank=0, p=1)
by_rank = ranks.run(bytes_per_parameter, 4)
fit_on_four = 80e9 / max(by_rank)
compare("on four GPUs", on_four_gpus, fit_on_four, within=1.1, found="counted")
print(f"bytes for each parameter: {alone} on one rank, {by_rank} on four")

# %% tags=["figure"]
plot.copies(4, caption="04.copies")

# %% [markdown]
# Four GPUs with data parallelism hold no larger model than one, so on such GPUs data parallelism alone ends at a few
# billion parameters. The third part of this course is about what comes next: sharding the matrices inside each layer,
# the sequences, the list of layers, or the optimizer's state, so that each rank keeps only a part.
#
# **Takeaway: data parallelism divides the batch and nothing else. Each rank pays 16 bytes for every parameter.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* A good place to end the first sitting. Ask: which of the 16 bytes could be divided between the
# ranks without changing the layers? (All of them; that is ZeRO.)

# %% [markdown]
# ## 7. A script of your own (core, 37 min)
#
# So far there was a pool of ranks, and the notebook sent functions to it. On a cluster you have a script, and a
# launcher starts it on every rank. The launcher that comes with PyTorch is **torchrun**: `torchrun --nproc-per-node=2
# train.py` starts `train.py` twice and sets these environment variables for each process:
#
# | variable | what it says |
# |---|---|
# | `RANK`, `WORLD_SIZE` | this process's number, and how many there are in the job |
# | `LOCAL_RANK` | its number on this machine: the GPU that it should take |
# | `MASTER_ADDR`, `MASTER_PORT` | where the store is, for the rendezvous of lesson 01, section 1 |
#
# `dist.init_process_group(backend)` reads them and holds the rendezvous. (Guides write `init_method="env://"`, which is
# the default.) You need not write the average of the gradients again: PyTorch's `DistributedDataParallel` (DDP) wraps a
# model, broadcasts its weights from rank 0, and averages the gradients inside `backward()`. The next lesson opens it
# up. You call the wrapped model like the model itself, which is its attribute `.module`.

# %% [markdown] tags=["exercise"]
# ### Exercise 4.4 · Write the script
#
# Complete `main`, which runs on every rank. `folder` is a `pathlib.Path`. `build_model()` returns a small GPT, with new
# random weights each time, and `dataset` holds 96 pairs of inputs and targets. You need 25 to 30 lines, and most of
# them you know from one process.
#
# 1. **Join.** If `torch.cuda.is_available()`, this rank's device is `torch.device("cuda", local_rank)`, with the number
#    that `os.environ["LOCAL_RANK"]` holds as a string. First `torch.cuda.set_device` makes it the current one, or else
#    all ranks of a machine begin with something on GPU 0; then `dist.init_process_group("nccl", device_id=device)`.
#    Without GPUs the device is the CPU, and the backend is "gloo".
# 2. **Model.** `build_model()`, moved to the device, and **then** wrapped: `DistributedDataParallel(model)`. AdamW with
#    `lr=3e-3`.
# 3. **Data.** A `DistributedSampler(dataset)`, which shuffles, and a `DataLoader` that gets it as `sampler=`. All ranks
#    together read `global_batch` samples in a step; how many does one rank read?
# 4. **Loop.** In each epoch `set_epoch`, then for each batch: move inputs and targets to the device, forward and loss
#    with `gpt.loss(model(inputs), targets)`, `zero_grad`, backward, step.
# 5. **Log.** After each epoch rank 0 alone prints a line such as `epoch 0: loss 3.1234`. The number is the mean over
#    all steps and **all ranks**.
# 6. **End.** Rank 0 alone saves the weights of the model inside DDP: `torch.save(..., folder / "weights.pt")` of its
#    `state_dict()`. All ranks leave: `dist.destroy_process_group()`.
#
# The check writes your function to a file `runs/train_04.py`, below the imports of this cell and those of `torch`,
# `dist`, `gpt` and `DistributedSampler`. Only `main` is copied: whatever else you import or define has to stand inside
# it. The check starts the file with `labcode.runtime.launch`, which calls torchrun, on one and on two ranks, and compares the
# final weights with those that one process must get. This takes about half a minute.
#
# Without GPUs the check can try only the CPU. So read your script once more and ask what it does on a machine with four
# GPUs: is the backend "nccl"? Does each rank take a GPU of its own? Are the model, the inputs **and** the targets on
# it before forward is called?

# %% tags=["exercise"]
import os

from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from course.labs.l04_script import build_model, dataset


def main(folder, epochs=2, global_batch=16):
    """What each rank runs."""
    ### BEGIN SOLUTION
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    rank = dist.get_rank()
    p = dist.get_world_size()

    model = DistributedDataParallel(build_model().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    share = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=global_batch // p, sampler=share)

    for epoch in range(epochs):
        share.set_epoch(epoch)
        total = torch.zeros((), device=device)
        for inputs, targets in loader:
            loss = gpt.loss(model(inputs.to(device)), targets.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        mean_loss = total / len(loader)
        dist.all_reduce(mean_loss)
        mean_loss /= p
        if rank == 0:
            print(f"epoch {epoch}: loss {mean_loss.item():.4f}")

    if rank == 0:
        torch.save(model.module.state_dict(), folder / "weights.pt")
    dist.destroy_process_group()
    ### END SOLUTION

# %% tags=["check"]
check("4.4", main)

# %% [markdown]
# This is a complete training script. To run it outside the notebook, open a terminal in the folder `runs` beside
# this notebook (right click on the folder, *Open in Terminal*): `torchrun --nproc-per-node=2 train_04.py` starts the
# file that the check has written. It runs unchanged on a cluster where labcode is installed, because it imports
# `build_model` and `dataset` from there. On several nodes the file and `folder` have to be on a disk that all nodes see.
#
# **Takeaway: join, take a device, wrap the model, give each rank its samples, let rank 0 speak and save, leave.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Most of the time goes to the script. Typical: a script for the CPU only; printing on all ranks;
# printing the loss of rank 0 only (the check compares it with the mean); saving `model.state_dict()`, whose names all
# begin with `module.`; a batch of `global_batch` on every rank; `set_epoch` forgotten; building the DDP before moving
# the model. For the discussion: which lines would change for a model that does not fit on one GPU?

# %% [markdown]
# ## 8. A script without labcode (core, 50 min)
#
# The script of section 7 still imports its model and its data from labcode. At work nobody has labcode, and a script
# does more: it computes in bfloat16, accumulates, validates, and resumes from a checkpoint. Here is its frame, with a
# model and data of a few lines that you can replace by your own. You have met each part on one process or in this
# lesson. This is what several ranks change about it:
#
# - **bfloat16.** `torch.autocast(device.type, dtype=torch.bfloat16)` rounds copies of weights and activations for the
#   matmuls. Weights, gradients and the optimizer stay in float32, and so does what DDP sends.
# - **Accumulation.** Within `model.no_sync()`, a context of the DDP object, backward sends nothing and the gradients
#   add up in `.grad`. The last micro-batch of a step runs outside it, and its backward sends the sum. Forward has to be
#   inside the context as well.
# - **Validation.** `DistributedSampler` repeats samples until all shares are equal, so some would count twice. Take
#   every p-th sample with `Subset(data, range(rank, len(data), p))` instead, add up losses and counts, and divide once.
#   Call `model.module`, the model inside DDP, and not the DDP object: DDP may send in forward too, for example the
#   statistics of a BatchNorm, and ranks with different numbers of batches would then wait for each other.
# - **Checkpoint.** Rank 0 saves. A job can be killed in the middle of saving, so the new file is first written under
#   another name, and then `os.replace` replaces the old one by it. All ranks load, each to its own device.
#   `weights_only=True` reads tensors and numbers, and runs no code that somebody has put into the file.

# %% [markdown] tags=["exercise"]
# ### Exercise 4.5 · Training in plain PyTorch
#
# Write the five functions that are open, each of 2 to 15 lines; `run` shows how they are called. `model` in `validate`,
# `save` and `load` is the model itself, without DDP, and `folder` is a `pathlib.Path`. You may check after each
# function: those that are written are tried by themselves, on two simulated ranks, within seconds.
#
# 1. `loss_of` gives the mean loss of some samples. Forward runs under autocast, and the loss itself in float32.
# 2. `train_epoch` takes an optimizer step after every `MICRO_BATCHES` batches; the loader has a multiple of that number.
#    Each loss is divided by `MICRO_BATCHES`, and the gradients are sent once in a step. It returns the mean of all
#    losses of all ranks.
# 3. `validate` returns the mean loss over all samples of `data`, and how many samples all ranks have counted together.
# 4. `save` writes the number of epochs that are done, the model's state dict and the optimizer's.
# 5. `load` reads them back and returns the number of epochs, or 0 where there is no checkpoint.
#
# When all are right, the check writes the whole cell to the file `runs/train_plain.py`. torchrun starts it on one rank
# for four epochs, on two ranks for two, and then on two ranks again, which have to resume from the checkpoint. The
# losses must be the same within 1 %; rounding to bfloat16 moves them by 0.1 to 0.5 %. This takes about half a minute.
# Read it once more for what only a GPU would show: what is moved to `device`, and what is read to it?

# %% tags=["exercise"]
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

GLOBAL_BATCH = 32  # samples of a step, on all ranks together
MICRO_BATCHES = 2
CHECKPOINT = "plain.pt"


class Rings(Dataset):
    """Points of a plane, and the number of the ring in which each lies."""

    def __init__(self, num_samples, seed):
        generator = torch.Generator().manual_seed(seed)
        self.points = torch.randn(num_samples, 2, generator=generator)
        self.rings = (2 * self.points.norm(dim=1)).long().clamp(max=3)

    def __len__(self):
        return len(self.points)

    def __getitem__(self, number):
        return self.points[number], self.rings[number]


def build_model():
    hidden = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
    return nn.Sequential(hidden, nn.Linear(64, 4))


def join():
    """Meet the other ranks; returns the device of this one."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def loss_of(model, inputs, targets, device):
    """The mean loss of some samples; forward in bfloat16."""
    ### BEGIN SOLUTION
    with torch.autocast(device.type, dtype=torch.bfloat16):
        logits = model(inputs.to(device))
    return F.cross_entropy(logits.float(), targets.to(device))
    ### END SOLUTION


def train_epoch(model, optimizer, loader, device):
    """Train on this rank's share, in DDP; returns the mean loss of all ranks."""
    ### BEGIN SOLUTION
    total = torch.zeros((), device=device)
    for number, (inputs, targets) in enumerate(loader, 1):
        is_last = number % MICRO_BATCHES == 0
        with nullcontext() if is_last else model.no_sync():
            loss = loss_of(model, inputs, targets, device)
            (loss / MICRO_BATCHES).backward()
        total += loss.detach()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    mean = total / len(loader)
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()
    ### END SOLUTION


def validate(model, data, device):
    """(mean loss, number of samples) over all ranks. `model` is the one inside DDP."""
    ### BEGIN SOLUTION
    own = Subset(data, range(dist.get_rank(), len(data), dist.get_world_size()))
    loss_sum = torch.zeros((), device=device)
    count = torch.tensor(len(own), device=device)
    model.eval()
    with torch.no_grad():
        for inputs, targets in DataLoader(own, batch_size=16):
            loss_sum += loss_of(model, inputs, targets, device) * len(inputs)
    model.train()
    dist.all_reduce(loss_sum)
    dist.all_reduce(count)
    return (loss_sum / count).item(), count.item()
    ### END SOLUTION


def save(folder, epochs_done, model, optimizer):
    """Rank 0 writes the checkpoint; it is there whole, or the older one is."""
    ### BEGIN SOLUTION
    if dist.get_rank() != 0:
        return
    content = {
        "epochs": epochs_done,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    unfinished = folder / f"{CHECKPOINT}.tmp"
    torch.save(content, unfinished)
    os.replace(unfinished, folder / CHECKPOINT)
    ### END SOLUTION


def load(folder, model, optimizer, device):
    """The number of epochs that are done, with the state after them in place."""
    ### BEGIN SOLUTION
    path = folder / CHECKPOINT
    if not path.exists():
        return 0
    content = torch.load(path, map_location=device, weights_only=True)
    model.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    return content["epochs"]
    ### END SOLUTION


def run(folder, epochs):
    """On each rank: train up to `epochs`, from the checkpoint if there is one."""
    device = join()
    model = build_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    epochs_done = load(folder, model, optimizer, device)
    wrapped = DistributedDataParallel(model)  # rank 0's weights go to all
    train_set = Rings(256, seed=0)
    share = DistributedSampler(train_set)
    batch_of_rank = GLOBAL_BATCH // MICRO_BATCHES // dist.get_world_size()
    loader = DataLoader(train_set, batch_size=batch_of_rank, sampler=share)
    for epoch in range(epochs_done, epochs):
        share.set_epoch(epoch)
        train_loss = train_epoch(wrapped, optimizer, loader, device)
        loss, count = validate(model, Rings(101, seed=1), device)
        if dist.get_rank() == 0:
            losses = f"train {train_loss:.4f} validation {loss:.4f}"
            print(f"epoch {epoch}: {losses} of {count}")
        save(folder, epoch + 1, model, optimizer)
    dist.destroy_process_group()

# %% tags=["check"]
check("4.5", run)

# %% [markdown]
# The file is yours now. `torchrun --nproc-per-node=2 train_plain.py 4` starts it in the folder `runs`, and with `8`
# instead of `4` it goes on from there. Replace `build_model` by your model, `Rings` by your data, and the loss in
# `loss_of` by yours. A script for a long run has more:
#
# | what a production script adds | section |
# |---|---|
# | workers that read ahead of the GPU | lesson 02, sections 4 and 5 |
# | a profile of some steps | lesson 02, section 6 |
# | a fused optimizer and `torch.compile` | lesson 03b, sections 5 and 6 |
# | gradients that are clipped over all micro-batches | lesson 05, section 6 |
# | warm-up, and a learning rate that fits the batch | lesson 06, section 4 |
# | curves: `SummaryWriter(folder)` on rank 0, and `writer.add_scalar("loss/train", train_loss, epoch)` | `torch.utils.tensorboard`; lesson 00, section 5, looks at them |
# | the arguments of DDP, and a loss scale for float16 | lesson 07, section 9 |
# | a job script, and an end before the time limit | lesson 14, sections 2 and 3 |
# | several checkpoints, checked when they are read | lesson 17, section 2 |
# | an alarm for a hang and for a loss that is not a number | lesson 17, section 5 |
# | a model that does not fit on one GPU | lesson 13b, section 7 |
#
# **Takeaway: a DDP script is the script of one process with six additions: join, wrap, shares, `no_sync`, sums over the
# ranks in what is logged, and one rank that writes.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* What goes wrong most: the optimizer steps inside `no_sync`, or every micro-batch is inside it,
# and the ranks drift apart without an error; the mean of the ranks' validation losses; `DistributedSampler` for
# validation, which counts 102 samples of 101; a checkpoint without the optimizer's moments, after which the loss is
# some percent higher for epochs. Ask: what does a checkpoint in the middle of an epoch need besides? (The position in
# the epoch, and the states of the random number generators where there is dropout.)

# %% [markdown]
# ## From here to GPUs and SLURM (core, 1 min)
#
# | where | start |
# |---|---|
# | 8 GPUs of one machine | `torchrun --nproc-per-node=8 train_04.py` |
# | two machines with 8 GPUs each, on each of them | `torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 train_04.py` |
# | SLURM | the sbatch script of lesson 14, section 2, does the same, with `srun` |
# | the course's own training program | `torchrun --nproc-per-node=8 -m labcode.train gpt_tiny` |
#
# On two machines the line is the same on both, and HOST is the name of one of them. NCCL replaces gloo where there are
# GPUs, and nothing else changes.
#
# ## Questions (core, 3 min)
#
# **1.** Four ranks compute the accuracy of their own validation samples and average the four numbers. When is this
# wrong?
#
# <details><summary>Answer</summary>
#
# When the ranks have different numbers of samples, which is usual, as a validation set is rarely a multiple of p. Add
# up the correct answers and the numbers of samples, and divide once.
# </details>
#
# **2.** You go from 4 to 8 ranks and leave the batch **of each rank** as it is. Is it still the training of one
# process? Of which?
#
# <details><summary>Answer</summary>
#
# Yes, of one process with a batch that is twice as large. The global batch has changed, and with it the best learning
# rate. To keep the training as it was, halve the batch of each rank.
# </details>
#
# **3.** From lesson 01, section 3: the gradients of a model of 1 GB are averaged on 8 ranks with a ring. How many bytes
# does each rank send?
#
# <details><summary>Answer</summary>
#
# 2 · 7/8 · 1 GB = 1.75 GB in each step.
# </details>
#
# ## Recap
#
# | concept | formula or fact | in labcode |
# |---|---|---|
# | mean of the means | ∇L = 1/p Σ ∇L_r, for shares of the same size | `parallel.data.DataParallel` |
# | equal start | averaging gradients does not shrink a distance at the start: broadcast | `DataParallel()` |
# | uneven shares | sums and counts travel, one division | `train.loop`, validation |
# | accumulation | divide each loss by m, send once | `train.loop` |
# | sampling | one shuffle, disjoint shares, a new one each epoch | `data.sampler.Batches` |
# | memory | 16 bytes a parameter on every rank | `perf.memory` |
#
# ## Sources
#
# - Goyal et al. 2017, *Accurate, Large Minibatch SGD*, arXiv:1706.02677, section 3: pitfalls of distributed SGD, among
#   them what the loss is divided by when gradients are added up, and shuffling.
# - Li et al. 2020, *PyTorch Distributed: Experiences on Accelerating Data Parallel Training*, arXiv:2006.15704: what
#   DDP does.
# - Rajbhandari et al. 2020, *ZeRO*, arXiv:1910.02054, section 3.1: where the 16 bytes of mixed-precision training come
#   from. The 18 of Megatron-LM: NVIDIA, *Megatron Core Developer Guide*, "Distributed Optimizer",
#   docs.nvidia.com/megatron-core/developer-guide.
# - Kingma and Ba 2015, *Adam*, arXiv:1412.6980, section 2.1: its steps do not depend on the scale of the gradients.
# - torchrun and its variables: <https://docs.pytorch.org/docs/stable/elastic/run.html>.

# %%
ranks.close()
