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
# # 04 · Data parallel, from hand-written to DDP
#
# Most distributed training is one idea: every rank holds the whole model, reads its own part of the batch, and the gradients are
# averaged. You write it by hand in three lines, prove that it trains like one process, make it fast in two steps, and then
# find each of those steps again inside PyTorch's `DistributedDataParallel`.
#
# ## Goals
#
# - know why averaged gradients give **the same** training as one process, and five ways to lose that without any error message;
# - predict what buckets and overlap save, and say what this machine can and cannot show;
# - count what travels in a step with gradient accumulation, and read DDP's best-known error.
#
# **Time**: 75 minutes. **Needs**: lesson 01 (collectives, the alpha-beta model).

# %%
import contextlib
import math
import os
import time

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.utils import parameters_to_vector

from labcode import recipes
from labcode.comm.timing import call_times
from labcode.config import GPTConfig, TextData
from labcode.data import sampler, text
from labcode.models import gpt, layers
from labcode.models.parallelize import TorchDataParallel
from labcode.parallel.data import DataParallel, make_buckets
from labcode.perf import alpha_beta as comm
from labcode.pool.ranks import Ranks
from labcode.teach.check import check, compare
from labcode.teach.exercises import l04
from labcode.teach.figures import plot
from labcode.teach.labs import l04_slow_link as slow_link

# %% [markdown]
# ## 1. The mean of the means
#
# The loss of a batch is a mean over its $B$ samples. Cut the batch into $p$ equal shares, and let rank $r$ compute the mean $L_r$ over
# its own share. Then, since differentiation is linear,
#
# $$L = \frac1B\sum_i \ell_i = \frac1p \sum_r L_r \qquad\text{and so}\qquad \nabla L = \frac1p \sum_r \nabla L_r.$$
#
# This line is data parallelism. The rest is doing it fast, and not breaking the equality. To see it hold we need a truth: a small GPT
# on Shakespeare in one process, in float64, so that rounding cannot hide a mistake.

# %%
torch.set_num_threads(1)  # one core for each process, here as on the ranks
splits = text.load(TextData(), context_length=64)
config = GPTConfig(splits.tokenizer.vocab_size, num_layers=2, num_heads=4, hidden_size=64, context_length=64)
order = sampler.Batches(len(splits.train), global_batch=16)
batches = [splits.train[order.indices(step)] for step in range(6)]  # [(inputs [16, 64], targets [16, 64]), ...]

def build(seed=0):
    """The model; the same seed gives the same weights in every process."""
    return layers.initialize(gpt.GPT(config), seed).double()

# %% tags=["nbval-check-output"]
def train(rank, p, seed=0, prepare=None, sync=None):
    """Losses of six steps on share `rank` of `p` of each batch, and the weights after them."""
    module = build(seed)
    model = prepare(module) if prepare else module
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3, weight_decay=0.0)
    losses = []
    for inputs, targets in batches:
        loss = gpt.loss(model(inputs.chunk(p)[rank]), targets.chunk(p)[rank])
        optimizer.zero_grad()
        loss.backward()
        if sync:
            sync(model)  # between backward and step: the place where ranks agree
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses), parameters_to_vector(module.parameters()).detach()

truth, _ = train(rank=0, p=1)
print("one process:", " ".join(f"{loss:.3f}" for loss in truth))

# %% [markdown]
# What would a rank learn that never talks to the others? It sees a quarter of each batch, and follows the gradient of that quarter.
#
# **Predict.** How far is the gradient of one quarter from that of the whole batch, as a fraction of the latter's length? Suppose that the
# four quarters agree on nothing: four vectors, equally long, at right angles. Draw two of them first.

# %% tags=["predict"]
error_guess = math.sqrt(3)  # with length 1 each, their mean is 1/2 long, and one of them ends sqrt(3)/2 away from it

# %%
def gradient(model, inputs, targets):
    """Gradient of the mean loss of some samples, all parameters in one vector."""
    model.zero_grad()
    gpt.loss(model(inputs), targets).backward()
    return parameters_to_vector([param.grad for param in model.parameters()])

def quarter_error(model, p=4):
    """Relative error of a quarter's gradient against its whole batch, mean over the batches and quarters."""
    errors = []
    for inputs, targets in batches:
        whole = gradient(model, inputs, targets)
        parts = [gradient(model, *part) for part in zip(inputs.chunk(p), targets.chunk(p))]
        errors += [(part - whole).norm() / whole.norm() for part in parts]
    return torch.stack(errors).mean().item()

# %%
trained = build().float()
optimizer = torch.optim.AdamW(trained.parameters(), lr=3e-3)
for step in range(6, 126):
    gradient(trained, *splits.train[order.indices(step)])
    optimizer.step()
first, later = quarter_error(build()), quarter_error(trained)
compare("error at the first step", error_guess, first)
compare("error after 120 steps", error_guess, later, within=1.5)

# %% [markdown]
# At first all samples say the same: some characters are frequent, most are rare. Later they disagree, and the error goes towards
# $\sqrt{p-1}$, where nothing is left but noise. If a share $s$ of the batch gradient's squared length is noise, the error is
# $\sqrt{s\,(p-1)}$: here $s$ grows from about 5 % to about 60 %. So a rank that nobody corrects starts out nearly right, and drifts.
#
# Now average. Four ranks start; each takes its quarter, and between `backward` and `step` every gradient becomes the mean over all.

# %% tags=["figure"]
def average(model):
    """One all-reduce for each parameter: sum over the ranks, divide by their number."""
    for param in model.parameters():
        total = param.grad.clone()
        dist.all_reduce(total)
        param.grad = total / dist.get_world_size()

ranks = Ranks(4)
runs = ranks.run(train, 4, sync=average)
averaged = torch.stack([losses for losses, _ in runs]).mean(0)
picture = plot.lines({"one process": truth, "mean of 4 ranks": averaged} | {f"rank {r}": runs[r][0] for r in range(4)},
                     x=range(1, 7), xlabel="step", ylabel="loss (nats)", title="Each rank sees its own quarter",
                     alt="Four curves scatter around the loss of one process; their mean lies exactly on it")
picture.axes[0].lines[0].set_linewidth(7)  # wide, so that it can be seen beneath the mean
picture

# %% [markdown]
# The four ranks see different samples, so their losses scatter. Their mean lies on the curve of one process. How exactly? A figure further
# down shows the difference.
#
# First a question about the start. Here every rank draws the same weights from the same seed. Suppose each seeds its generator with its own
# rank, as one does for dropout, and forgets the model.
#
# **Predict.** Gradients are averaged at each step. After six steps, how far apart are the weights of rank 0 and rank 3, as a fraction of
# their distance at the start?

# %% tags=["predict"]
distance_guess = 1.0  # all ranks make the same step, from different places

# %% tags=["nbval-check-output"]
def broadcast(module):
    """Every rank gets the weights of rank 0."""
    for param in module.parameters():
        dist.broadcast(param.data, src=0)
    return module

drifted = ranks.run(lambda rank: train(rank, 4, seed=rank, sync=average))
mended = ranks.run(lambda rank: train(rank, 4, seed=rank, prepare=broadcast, sync=average))
start = [parameters_to_vector(build(seed).parameters()) for seed in (0, 3)]
compare("distance of rank 0 and 3", distance_guess, ((drifted[0][1] - drifted[3][1]).norm() / (start[0] - start[1]).norm()), within=1.01)
print("with a broadcast at the start:", (mended[0][1] - mended[3][1]).norm().item())

# %% tags=["figure"]
alone = ranks.run(train, 4)
cases = {"averaged": runs, "averaged, own seeds": drifted, "own seeds, broadcast": mended, "never averaged": alone}
off = {name: (torch.stack([run[0] for run in case]).mean(0) - truth).abs().clamp(min=1e-17) for name, case in cases.items()}
picture = plot.lines(off, x=range(1, 7), logy=True, xlabel="step", ylabel="difference (nats)",
                     title="Mean loss of 4 ranks against one process",
                     alt="With averaging and equal weights the difference stays below 1e-14, in both other cases it is above 1e-3 from step 2 on")
picture.axes[0].lines[0].set_linewidth(7)
picture

# %% [markdown]
# The averaged runs differ from one process in the last bits only, because sums are taken in another order (an exact 0 is drawn at
# 1e-17). Ranks that start apart **stay** apart, by the same distance: each adds the same step to its own weights. (Weight decay, off
# here, shrinks the distance by one part in many thousands per step.) No later averaging mends that, and no error is raised. A broadcast
# at the start does.
#
# **Takeaway: equal weights at the start, then the mean gradient at each step: by induction every rank holds the model of one process.**

# %% [markdown] tags=["exercise"]
# ### Exercise 4.1 · Uneven shares
#
# The equality needs equal shares. If rank 0 has 7 of 16 samples and the others 3 each, the mean of the means gives a sample on
# rank 0 the weight 1/28 and the others 1/12, where each should have 1/16. The last batch of an epoch does this, and so do
# padded tokens. Every rank knows how many samples are its own, `mine`, and how many there are in `total`. Two lines are missing.

# %% tags=["exercise"]
def average_uneven(model, mine, total):
    """Turns the gradient of the mean over `mine` samples into that of the mean over all `total`, in `param.grad`."""
    for param in model.parameters():
        ### BEGIN SOLUTION
        param.grad *= mine / total
        dist.all_reduce(param.grad)
        ### END SOLUTION

# %% tags=["check"]
check("4.1", lambda: l04.average_uneven(average_uneven, ranks))

# %% [markdown]
# ## 2. Buckets
#
# One all-reduce for each parameter is correct and slow. In lesson 01 a message of $n$ bytes took $\alpha + n/\beta$: a fixed price and
# a price per byte. A transformer has many small parameters, norms and biases, and each pays $\alpha$. Copied one after the
# other into a flat tensor, a **bucket**, they pay it once.
#
# From here on we measure time. A new pool, which replaces the first, has one rank for each of two cores, and the model has a million
# parameters. We take the fastest of many tries, since other programs can only make a call slower, and fit $\alpha$ and $\beta$ to two
# points: 64 small messages in a row, and all gradients in one.

# %%
def all_reduces_s(rank, sizes):
    """Seconds for all-reduces of these sizes in bytes, one after the other; the fastest of 30 tries."""
    def send(x):
        for part in x.split([size // 4 for size in sizes]):
            dist.all_reduce(part)
    return min(call_times(send, sum(sizes), repeats=30))

ranks = Ranks(2)
million = recipes.gpt_shape("gpt_1m", vocab_size=config.vocab_size)
separate = [param.numel() * 4 for param in gpt.GPT(million).parameters()]
N = sum(separate)
times = [max(ranks.run(all_reduces_s, [1000] * 64)) / 64, max(ranks.run(all_reduces_s, [N]))]
link = comm.fit("all_reduce", 2, [1000, N], times)
print(f"{len(separate)} parameters, {N:,} bytes; alpha {link.alpha_s * 1e6:.0f} us, beta {link.beta_bytes_per_s / 1e9:.2f} GB/s")

# %% [markdown]
# **Predict.** On two ranks a ring all-reduce of $n$ bytes is 2 messages and $n$ bytes, so it takes `2 * alpha + n / beta`. How many times
# faster than one all-reduce for each parameter is a single one for all N bytes? Use the numbers above.

# %% tags=["predict"]
def seconds_for(messages):
    return messages * 2 * link.alpha_s + N / link.beta_bytes_per_s

gain_guess = seconds_for(len(separate)) / seconds_for(1)

# %% tags=["figure"]
model = gpt.GPT(million)
layouts = [[bucket.num_bytes for bucket in make_buckets(model, mb)] for mb in (1e-9, 0.1, 0.3, 0.5, 1, 2, 25)]
measured = [max(ranks.run(all_reduces_s, sizes)) * 1e3 for sizes in layouts]
modelled = [sum(comm.time_s("all_reduce", 2, size, link) for size in sizes) * 1e3 for sizes in layouts]
compare("gain of one bucket", gain_guess, measured[0] / measured[-1], within=2)
plot.lines({"measured": measured, "alpha-beta model": modelled}, x=[len(sizes) for sizes in layouts], logx=True,
           xlabel="all-reduces per step", ylabel="ms per step",
           alt="Time for all gradients grows with the number of all-reduces, in the measurement as in the model")

# %% [markdown]
# All points move the same bytes. What grows to the right is the number of fixed prices, so a handful of large buckets costs
# little more than one. The model has two numbers and gloo more than two habits (it treats medium sizes in its own way), so a factor of
# two at single points is no surprise.
# PyTorch's default is 25 MB: the faster the network, the larger a message must be to fill it.
#
# **Takeaway: the same bytes in fewer messages. `labcode.parallel.data.make_buckets` cuts the gradients, in the order in which backward
# finishes them: the last layer first.**

# %% [markdown] tags=["exercise"]
# ### Exercise 4.2 · Fill the buckets
#
# Given the sizes of the parameters in the order of the forward pass, return lists of their indices, one list for each bucket. Go from the
# last parameter to the first. A bucket takes the next one as long as it then holds at most `limit` bytes; a parameter larger than
# that has a bucket of its own. With sizes `[10, 10, 10]` and limit 25: `[[2, 1], [0]]`.

# %% tags=["exercise"]
def assign(sizes, limit):
    """Indices into `sizes`, bucket by bucket, the last parameter first."""
    ### BEGIN SOLUTION
    buckets, filled = [], 0
    for index in reversed(range(len(sizes))):
        if not buckets or filled + sizes[index] > limit:
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        filled += sizes[index]
    return buckets
    ### END SOLUTION

# %% tags=["check"]
check("4.2", lambda: l04.assign(assign))

# %% [markdown]
# ## 3. Overlap
#
# Why in that order? Backward goes from the last layer to the first, so the last layer's gradient is ready while most work is still
# ahead. A **hook** on each parameter fires when its gradient is complete; with the last hook of a bucket the bucket leaves, and
# backward goes on meanwhile. With $k$ equal buckets, backward time $T_b$ and communication time $T_c$, the step waits
#
# $$T_{wait} = \max\left(\tfrac{T_c}{k},\; T_c - \tfrac{k-1}{k}\,T_b\right)$$
#
# because the last bucket leaves only when backward ends. One bucket hides nothing; many pay $\alpha$ often: hence 25 MB.

# %% [markdown]
# On one machine gloo moves bytes with the very cores that compute, so the two take each other's time. A network card does not. To see both,
# `SlowLink` lets each all-reduce run and then count as under way for as long as 1 Gbit/s Ethernet needs: who waits
# for it **sleeps**, and the core is free.
#
# **Predict.** The million parameters make 5 buckets of at most 1 MB. If backward takes at least as long as the link, what share of the
# communication time is hidden behind it?

# %% tags=["predict"]
hidden_guess = 1 - 1 / 5

# %%
ethernet, only_gloo = comm.Link(alpha_s=50e-6, beta_bytes_per_s=125e6), comm.Link(0, math.inf)
tokens = torch.randint(config.vocab_size, (6, 128), generator=torch.Generator().manual_seed(0))

def timed_step(rank, overlap, link):
    """The fastest of 16 steps: backward, waiting, and when each bucket was on the link."""
    model = DataParallel(layers.initialize(gpt.GPT(million), 0), dist.group.WORLD, bucket_mb=1)
    return slow_link.fastest_step(model, lambda: gpt.loss(model(tokens), tokens), link, overlap, repeats=16)

# %% tags=["figure"]
after, overlapped = (ranks.run(timed_step, overlap, ethernet)[0] for overlap in (False, True))
compare("share that is hidden", hidden_guess, 1 - overlapped.wait_s / overlapped.link_s)
gloo = [ranks.run(timed_step, overlap, only_gloo)[0].total_s * 1e3 for overlap in (False, True)]
print(f"gloo alone, {os.cpu_count()} cores: {gloo[0]:.1f} ms sent after backward, {gloo[1]:.1f} ms overlapped")
plot.timeline(after.rows("after") + overlapped.rows("overlap"), xlabel="ms since backward began", title="1 Gbit/s, rank 0",
              alt="Sent after backward the five buckets make the core wait; sent during backward only the last one does")

# %% [markdown]
# On the slow link the step waits for one bucket and a little copying (much more only if other programs held the core: run it again).
# With gloo alone, the printed line, little is gained, or some even
# lost: copying needs a core, and with a rank on every core none is free. Idle cores help. A cluster helps most, where network cards move the
# bytes: on 32 GPUs overlap made ResNet-50 faster by 38 % and BERT by 35 % with NCCL, by 27 % and 22 % with gloo (Li et al. 2020,
# section 5.1).
#
# **Takeaway: overlap hides all but the last bucket, if something other than the computing core moves the bytes.**

# %% [markdown]
# ## 4. DistributedDataParallel
#
# You have now built what PyTorch calls DDP. Where it does each step, in `torch/nn/parallel/distributed.py` and, in C++,
# `torch/csrc/distributed/c10d/reducer.cpp`:
#
# | step | `labcode.parallel.data` | DDP |
# |---|---|---|
# | equal weights | broadcast in `DataParallel()` | constructor: `_sync_module_states` |
# | buckets, last first | `make_buckets` | `_compute_bucket_assignment_by_size`; made anew after the first step, in the order in which gradients came |
# | a gradient is ready | hook, `_gradient_ready` | `Reducer::autograd_hook` |
# | send in one order | wait for the buckets before | `Reducer::mark_bucket_ready` |
# | wait, hand out | `finish_gradient_sync()` | `Reducer::finalize_backward`, before `backward()` returns |
# | only add up | `no_sync()` | `no_sync()`: `require_backward_grad_sync` |

# %%
def step_s(rank, wrap):
    """Seconds of the fastest forward, backward and synchronisation."""
    model = wrap(layers.initialize(gpt.GPT(million), 0))
    def step(_):
        gpt.loss(model(tokens), tokens).backward()
        model.finish_gradient_sync()  # does nothing for DDP, which has waited already
    return min(call_times(step, num_bytes=0, repeats=8))

def same_losses(wrap):
    """Whether two ranks, seeded differently, train like one process."""
    runs = ranks.run(lambda rank: train(rank, 2, seed=rank, prepare=wrap, sync=lambda model: model.finish_gradient_sync()))
    return bool((torch.stack([losses for losses, _ in runs]).mean(0) - truth).abs().max() < 1e-12)

ours, theirs = lambda m: DataParallel(m, dist.group.WORLD, 0.5), lambda m: TorchDataParallel(m, bucket_cap_mb=0.5)
for name, wrap in {"by hand": ours, "DDP": theirs}.items():
    print(f"{name:8} equal to one process to 1e-12: {same_losses(wrap)}   {min(ranks.run(step_s, wrap)) * 1e3:5.1f} ms a step")

# %% [markdown]
# Both give the losses of one process, although the ranks were seeded differently: the constructor broadcasts. The times are
# close; DDP's hooks are C++ and ours are Python, which shows most with many small buckets.
#
# One thing remains. If the batch does not fit into memory, a rank adds up the gradients of several **micro-batches** before it steps. Sums
# can be sent once, at the end: inside `no_sync()` backward only adds.
#
# **Predict.** DDP, 4 micro-batches, gradients of N bytes (round 2). How many bytes does a rank give to all-reduces per optimizer step, without
# `no_sync()` and with it?

# %% tags=["predict"]
bytes_without, bytes_with = 4 * N, N

# %% tags=["nbval-check-output"]
def count(sent, bucket):
    """A communication hook: DDP calls it in place of its own all-reduce; this one takes note and does the same."""
    sent.append(bucket.buffer().nbytes)
    return allreduce_hook(dist.group.WORLD, bucket)

def accumulate(rank, quiet, micro_batches=4):
    """Bytes of each bucket sent in one optimizer step."""
    sent, model = [], TorchDataParallel(gpt.GPT(million), bucket_cap_mb=1)
    model.register_comm_hook(sent, count)
    with model.no_sync() if quiet else contextlib.nullcontext():
        for _ in range(micro_batches - 1):
            gpt.loss(model(tokens), tokens).backward()
    gpt.loss(model(tokens), tokens).backward()
    return sent

compare("bytes without no_sync()", bytes_without, sum(ranks.run(accumulate, False)[0]), within=1, unit="B")
compare("bytes with no_sync()", bytes_with, sum(ranks.run(accumulate, True)[0]), within=1, unit="B")

# %% [markdown] tags=["exercise"]
# **Takeaway: with m micro-batches, `no_sync()` around all but the last sends 1/m of the bytes.** Forward belongs inside it too: DDP decides
# there whether the coming backward will send.
#
# ### Exercise 4.3 · The last one sends
#
# A training loop numbers its micro-batches 1, 2, ..., `accumulation` and runs each inside the context that this function returns.
# Outside `no_sync()` a context that does nothing is needed: `contextlib.nullcontext()`. One line.

# %% tags=["exercise"]
def context(model, number, accumulation):
    """What micro-batch `number` runs in, so that gradients travel once."""
    ### BEGIN SOLUTION
    return model.no_sync() if number < accumulation else contextlib.nullcontext()
    ### END SOLUTION

# %% tags=["check"]
check("4.3", lambda: l04.last_only(context, ranks))

# %% [markdown]
# ## 5. Who reads what
#
# So far each rank took its share of a batch that was there. In real training each reads for itself, and must know which samples are its
# own. PyTorch's `DistributedSampler` shuffles with a seed that all ranks share, plus the number of the **epoch** (one pass over the data),
# and rank $r$ takes every $p$-th sample. You tell it the epoch with `set_epoch`.
#
# **Predict.** Two mistakes. (a) No sampler: both ranks shuffle alike and read the same 8 samples. How many different samples are in a
# "global batch of 16"? (b) In two shuffles of 1000 samples, how many stand in the same place, on average, with `set_epoch`?

# %% tags=["predict"]
different_guess = 8
same_place_guess = 1  # each of the 1000 has a chance of 1/1000

# %% tags=["figure"]
def epoch_order(epoch, set_epoch, num_samples, p=4):
    """The samples of one epoch: those of rank 0, then those of rank 1, ..."""
    samplers = [torch.utils.data.DistributedSampler(range(num_samples), num_replicas=p, rank=rank) for rank in range(p)]
    for one in samplers:
        if set_epoch:
            one.set_epoch(epoch)
    return [sample for one in samplers for sample in one]

orders = torch.tensor([epoch_order(epoch, True, 1000) for epoch in range(200)])
compare("same place, with set_epoch", same_place_guess, (orders[1:] == orders[:-1]).sum(1).double().mean())
settings = [(epoch, set_epoch) for set_epoch in (False, True) for epoch in range(3)]
plot.heatmap([epoch_order(epoch, set_epoch, 16) for epoch, set_epoch in settings],
             rows=[f"epoch {epoch}{', set_epoch' if set_epoch else ''}" for epoch, set_epoch in settings],
             xlabel="4 samples each: rank 0, 1, 2, 3", columns=[f"r{i // 4}" for i in range(16)], unit="sample",
             alt="Without set_epoch three epochs have the same row of sample numbers, with it three different rows")

# %% tags=["nbval-check-output"]
copies = ranks.run(lambda: train(0, 2, sync=average))[0][0]  # both ranks read the share of rank 0
half = train(0, 2)[0]  # one process that reads only that share
print("two ranks with the same samples equal one process with half the batch:", bool((copies - half).abs().max() < 1e-12))
seen = torch.cat(ranks.run(lambda: batches[0][0].chunk(2)[0])).unique(dim=0)
compare("different samples in a step", different_guess, len(seen), within=1)
for p in (1, 2, 4):
    parts = [sampler.Batches(1000, 16, dp_size=p, dp_coord=coord).indices(step=70) for coord in range(p)]
    print(f"labcode, step 70, p={p}:", *(" ".join(map(str, part)) for part in parts), sep=" | ")

# %% [markdown]
# Without `set_epoch` every epoch is the same row: the same batches in the same order. Without a sampler two ranks do the same work
# twice, and train on half the batch. Both times the loss falls nicely.
#
# `DistributedSampler` repeats samples when their number is not a multiple of $p$. `labcode.data.sampler.Batches` leaves the rest of an
# epoch out and computes any step directly, so a run resumes where it stopped; read from left to right, its global batch is the same for
# every number of ranks.
#
# **Takeaway: print the sample numbers of each rank once, for two epochs. It is the cheapest test there is.**

# %% [markdown]
# ## 6. Scaling on this machine
#
# A pool of four ranks, and the six steps of round 1 with DDP on the first 1, 2 and 4 of them, one thread for each rank. The global batch is
# always 16 samples (**strong scaling**). The time of a step is $T(p) = T_1 / \min(p, \text{cores}) + T_{wait}$: ranks cannot use cores
# that are not there.
#
# **Predict.** Look at `os.cpu_count()` first. How many times faster than one are 2 and 4 ranks, if communication is free?

# %% tags=["predict"]
cores = os.cpu_count()
speedup_2, speedup_4 = min(2, cores), min(4, cores)

# %% tags=["figure"]
from labcode.comm.grid import Grid
from labcode.topology import GridShape

ranks, fastest, last = Ranks(4), {}, {}

def scaled(rank, p):
    """Seconds of the fastest step of `train` on the first `p` ranks, and its losses."""
    group = Grid.create(GridShape(dp=p, pp=4 // p)).group("dp")  # ranks 0 to p-1; lesson 08 explains how
    if rank < p:
        times = []  # of the clock, one in each step
        watched = {"sync": lambda model: times.append(time.perf_counter())}
        watched["prepare"] = lambda module: TorchDataParallel(module, process_group=group)
        runs = [train(rank, p, **watched) for _ in range(2)]
        return torch.tensor(times, dtype=torch.double).diff().min().item(), runs[0][0]

for p in (1, 2, 4) * 4:  # in turns, so that a disturbance meets all of them
    times, losses = zip(*ranks.run(scaled, p)[:p])
    fastest[p], last[p] = min(max(times), fastest.get(p, math.inf)), f"{sum(losses)[-1] / p:.10f}"
print("ms a step:", {p: round(seconds * 1e3, 1) for p, seconds in fastest.items()}, " loss of the last step:", last)
compare("speed-up of 2 ranks", speedup_2, fastest[1] / fastest[2])
compare("speed-up of 4 ranks", speedup_4, fastest[1] / fastest[4], within=1.5)
plot.bars({f"p = {p}": fastest[1] / fastest[p] for p in fastest}, ylabel="speed-up", reference={"cores": os.cpu_count()},
          alt="Speed-up over one rank for 1, 2 and 4 ranks, with the number of cores as a dashed line")

# %% [markdown]
# The losses are the same, they only come sooner. **Efficiency** is the speed-up divided by the number of ranks. With a core for each
# rank it stays below 1 by what communication, memory traffic and Python cost; beyond the cores it falls as cores / p, and ranks that wait
# for each other's turn lose more. With a GPU for each, DDP scales nearly linearly to 256 GPUs (Li et al. 2020), as long as the share
# of each takes long enough to hide $T_{wait}$.
#
# **Takeaway: before you measure scaling, count the devices. Compare with one rank on one device, at the same global batch.**

# %% [markdown]
# ## Broken on purpose
#
# Some models do not use every parameter in every step: layers dropped at random, experts without a token, a head for a task that is not in
# this batch. Here rank 1 leaves out the last block. Its gradients never become ready, so their bucket never leaves. With one option of
# DDP it works; what happens without, and on which rank?

# %% tags=["raises-exception"] raises="RankError: rank 1: RuntimeError: Expected to have finished reduction in the prior iteration"
def drop_a_layer(rank, **options):
    model = TorchDataParallel(build(), **options)
    if rank == 1:
        model.module.blocks[-1].forward = lambda x, rotation: x  # leaves out what the block does
    for inputs, targets in batches[:2]:
        gpt.loss(model(inputs), targets).backward()

print("with find_unused_parameters:", ranks.run(drop_a_layer, find_unused_parameters=True))
ranks.run(drop_a_layer)

# %% [markdown]
# The other ranks hang in their first backward, waiting for a bucket. Rank 1 does not notice until its **second** forward, and says so:
# "Expected to have finished reduction in the prior iteration". Two useful parts follow. The cure, `find_unused_parameters=True`: DDP then
# walks the graph after each forward and counts what is missing as zero, which costs time. And the indices of the parameters
# without a gradient: positions in `list(model.parameters())`. Look whether they surprise you before you silence the error; often a
# layer was simply forgotten in `forward`.

# %% [markdown] tags=["exercise"]
# ### Exercise 4.4 · Half the bytes
#
# Write a communication hook that sends gradients in bfloat16. DDP calls `compress(group, bucket)` with what you registered, here the group,
# and the full bucket; the second parameter must be called `bucket`. Average over the group, return a `Future` of the mean
# (`all_reduce(..., async_op=True).get_future().then(...)`; its value is a list of one tensor). Then go on: train 200 steps with and
# without it, keep the rounding error and add it to the next gradient, or send the largest tenth only.

# %% tags=["exercise"]
def compress(group, bucket):
    """A Future of `bucket.buffer()` averaged over the group, sent in bfloat16."""
    ### BEGIN SOLUTION
    full = bucket.buffer()
    half = (full / group.size()).bfloat16()
    work = dist.all_reduce(half, group=group, async_op=True)
    return work.get_future().then(lambda done: full.copy_(done.value()[0]))
    ### END SOLUTION

# %% tags=["check"]
check("4.4", lambda: l04.compress(compress, ranks))

# %%
ranks.close()

# %% [markdown]
# ## From here to GPUs and SLURM
#
# | where | start |
# |---|---|
# | 8 GPUs of one machine | `torchrun --nproc-per-node=8 -m labcode.train gpt_tiny` |
# | with the hand-written one | add `--parallel.data_parallel labcode` |
# | other buckets | add `--parallel.bucket_mb 50` |
# | SLURM, inside a job | `srun --nodes=2 --ntasks-per-node=8 python -m labcode.train gpt_tiny` |
#
# Each rank takes a GPU, NCCL replaces gloo, and the code of this lesson does not change; `Ranks(2)` takes GPUs too if there are two. Under
# `srun` every rank must know where to meet: export `MASTER_ADDR` (a node of the job) and `MASTER_PORT` first; if you forget, the error says
# so. From a notebook, `labcode.launch.run("labcode.train", "gpt_tiny", nproc=2)` is the first line on two ranks.

# %% [markdown]
# ## Recap
#
# | concept | formula or fact | in labcode |
# |---|---|---|
# | mean of the means | ∇L = 1/p Σ ∇L_r, equal shares only | `parallel.data.DataParallel` |
# | a rank alone | error √(s (p-1)), s the share of noise | |
# | equal start | distance never shrinks: broadcast | `DataParallel()` |
# | buckets | k fixed prices, the same bytes | `make_buckets`, `perf.comm` |
# | overlap | waits max(Tc/k, Tc - Tb (k-1)/k) | `_gradient_ready`, `finish_gradient_sync` |
# | accumulation | 1/m of the bytes | `no_sync`, `train.loop` |
# | sampling | one shuffle, disjoint shares, new each epoch | `data.sampler.Batches` |
# | scaling | T₁ / min(p, devices) + wait | `python -m labcode.train` |
#
# ## Sources
#
# - Li et al. 2020, *PyTorch Distributed: Experiences on Accelerating Data Parallel Training*, arXiv:2006.15704: buckets, overlap,
#   `no_sync`, and the measurements quoted above.
# - Goyal et al. 2017, *Accurate, Large Minibatch SGD*, arXiv:1706.02677, section 2.3: pitfalls of distributed SGD, among them uneven
#   shares and shuffling.
# - McCandlish et al. 2018, *An Empirical Model of Large-Batch Training*, arXiv:1812.06162: signal and noise in gradients.
# - `DistributedDataParallel`, `DistributedSampler` and communication hooks: docs.pytorch.org.
