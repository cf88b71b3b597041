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
# # 00 · Start here
#
# This course trains neural networks on many processors at once, and every lab runs for real on the machine in front of you.
# This first lesson shows what that machine can do, starts your first four ranks, and trains a small GPT on two of them.

# %% [markdown]
# ## Goals
#
# - know what this machine offers, in FLOP/s, and what training a large model would take;
# - start four **ranks** and make them talk;
# - know why four ranks are not four times faster here, and how much faster they are;
# - launch a training run the way a cluster does, and read its curve and its errors.
#
# **Time**: 30 minutes. **Needs**: PyTorch on one device; nothing about distributed training.
#
# Each lab goes in rounds: an idea, a **prediction** that you write down before you run anything, the run, and the two set side by
# side. A wrong prediction is worth more than a right one, as long as you wrote it down. Run the set-up cell first.

# %%
import math
import os
import time

import psutil
import torch
import torch.distributed as dist

from labcode import hardware, launch
from labcode.config import TextData
from labcode.data import text
from labcode.pool.ranks import Ranks
from labcode.teach.check import check, compare
from labcode.teach.exercises import l00
from labcode.teach.figures import plot
from labcode.teach.progress import following
from labcode.train import metrics
from labcode.units import seconds

# %% [markdown]
# ## 1. What does this machine have?
#
# Training is mostly matrix multiplication, so a machine's worth is the number of floating-point operations it does in a second,
# **FLOP/s**. Two things set it on a CPU: how many cores there are, and how much one core does in a clock cycle.

# %%
cores = os.cpu_count()
memory = psutil.virtual_memory().total
gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print(f"{cores} cores, {memory / 2**30:.0f} GiB of memory, GPUs: {', '.join(gpus) or 'none'}")

# %% [markdown]
# A core with AVX2 instructions has two units that multiply and add 8 numbers each per cycle. That makes 2 * 8 * 2 = 32
# floating-point operations per cycle, and a laptop runs at roughly 3 billion cycles per second. Newer cores do two or four times as
# much per cycle, shared virtual machines often less.
#
# **Predict.** How many FLOP/s do all cores of this machine reach together?

# %% tags=["predict"]
peak_guess = cores * 3e9 * 32

# %% [markdown]
# Now measure. Multiplying two n x n matrices takes n multiplications and n additions for each of the n² results: **2 n³ FLOPs**.
# The first product warms up the threads; of the others we take the median, because other programs disturb this machine as well.

# %%
def matmul_flops_per_s(n=1024, repeats=9):
    a, b = torch.randn(n, n), torch.randn(n, n)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - start)
    return 2 * n**3 / sorted(times[1:])[repeats // 2]

measured_flops = matmul_flops_per_s()
compare("matrix product on this CPU", peak_guess, measured_flops, within=2, unit="FLOP/s")

# %% [markdown]
# If prediction and measurement lie within a factor of two, the model of the machine is good enough for what follows. A datasheet gives the same
# number for a GPU. `labcode.hardware` keeps a short table of such peaks, each with its source; the largest ones need numbers of 16
# bits (bfloat16), which is what large models are trained in.

# %% tags=["figure"]
rates = {"this CPU": measured_flops}
for name in ("NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3"):
    rates[name.split()[1].split("-")[0]] = hardware.find(name).peak_flops_per_s["bfloat16"]
plot.bars(rates, ylabel="FLOP/s, log scale", logy=True, title="Measured here, datasheet peaks there",
          alt="On a log scale the datasheet peaks of A100 and H100 stand thousands of times above this CPU")

# %% [markdown]
# Training GPT-3 took 3.14e23 FLOPs (Brown et al. 2020, table D.1). Suppose a GPU reaches 40 % of its peak, which is good. How long
# would one machine need, and how long would a thousand GPUs?

# %%
gpt3_flops = 3.14e23
year = 365 * 24 * 3600
h100 = rates["H100"] * 0.4
for what, rate in {"this CPU": measured_flops, "1 H100": h100, "1024 H100": 1024 * h100}.items():
    print(f"{what:10} {gpt3_flops / rate / year:12,.2f} years")

# %% [markdown]
# One GPU would need a working life. A thousand need days, **if** they lose no time waiting for one another. That "if" is this
# course: how to divide a model and its data, what must be communicated, what it costs, and how to predict all that before the
# cluster's bill arrives.
#
# **Takeaway: large models are trained on many devices because one would take decades. Everything else is about not wasting them.**

# %% [markdown]
# ## 2. Your first four ranks
#
# A **rank** is one process of a job, with a number from 0 up. Each has its own memory, its own Python, and on a cluster its own GPU.
# `Ranks(4)` starts four of them on this machine and connects them. It takes about ten seconds, once; they stay for the whole lesson.

# %%
ranks = Ranks(4)
ranks

# %% [markdown]
# `ranks.run(f)` sends a function to all ranks, runs it on all of them at the same time, and returns the results in rank order. The
# first parameter, if it is called `rank`, tells the function who it is. What it prints comes back with the rank's number.

# %% tags=["nbval-check-output"]
def who(rank):
    print(f"I am rank {rank} of {dist.get_world_size()}")
    return os.getpid()

pids = ranks.run(who)

# %% [markdown]
# **Predict.** Four ranks ran the same function, and this notebook is a process too. How many different process numbers (pids) are
# there among the four ranks and this notebook?

# %% tags=["predict"]
pids_guess = 5

# %% tags=["nbval-check-output"]
compare("different processes", pids_guess, len({*pids, os.getpid()}), within=1)

# %% [markdown]
# Five processes: nothing is shared between them. A variable set on one is unknown to the others, and a tensor gets from one to
# another only if it is **sent**. Cells that begin with `%%px` run on the ranks in place of this notebook; there the names `rank`,
# `world_size`, `torch` and `dist` exist already.

# %% tags=["nbval-check-output"]
# %%px
secret = rank * 10
print("my secret is", secret)

# %% tags=["nbval-check-output"]
print("does this notebook know the secret?", "secret" in globals())

# %% [markdown]
# Ranks talk through **collectives**: operations that all of them call together. The most important one is `all_reduce`. Each rank
# brings a tensor, they are added up, and every rank gets the sum, in place.
#
# **Predict.** Each rank brings its own number: 0, 1, 2, 3. What does every rank hold afterwards?

# %% tags=["predict"]
sum_guess = 0 + 1 + 2 + 3

# %% tags=["nbval-check-output"]
def add_up(rank):
    x = torch.tensor(float(rank))
    dist.all_reduce(x)
    return x.item()

sums = ranks.run(add_up)
print(sums)
compare("sum on each rank", sum_guess, sums[0], within=1)

# %% tags=["figure"]
plot.collective("all_reduce", 4, alt="Before all_reduce each rank holds its own part, afterwards every rank holds the sum of all")

# %% [markdown]
# **Takeaway: ranks share nothing. What one knows and another needs must be sent, and in a collective all of them take part.**

# %% [markdown] tags=["exercise"]
# ### Exercise 0.1 · Deal out the work
#
# Data parallelism begins by dividing a list over the ranks. Complete the function: rank `rank` of `world_size` takes its share, every
# item goes to exactly one rank, and no rank gets more than one item more than another. One line is enough.

# %% tags=["exercise"]
def share(items, rank, world_size):
    """The items that belong to this rank."""
    ### BEGIN SOLUTION
    return items[rank::world_size]
    ### END SOLUTION

# %% tags=["check"]
check("0.1", lambda: l00.my_share(share))

# %% [markdown] tags=["exercise"]
# ### Exercise 0.2 · The mean of everything
#
# Each rank holds some numbers, and not equally many. Return the mean over **all** of them, the same on every rank. Two quantities
# have to travel. The tensor you are given is not yours to change.

# %% tags=["exercise"]
def mean_over_ranks(local):
    """The mean over the values of all ranks; `local` is a 1-D tensor."""
    ### BEGIN SOLUTION
    both = torch.stack([local.sum(), torch.tensor(float(len(local)))])
    dist.all_reduce(both)
    return both[0] / both[1]
    ### END SOLUTION

# %% tags=["check"]
check("0.2", lambda: l00.distributed_mean(mean_over_ranks, ranks))

# %% [markdown]
# <details><summary>Why not average the averages?</summary>
#
# A rank with one value would count as much as a rank with four. The same mistake hides in training loops whose last batch is
# smaller on some ranks, and it gives a loss that is only slightly wrong. Lesson 04 meets it again.
# </details>

# %% [markdown]
# ## 3. Are four ranks four times as fast?
#
# Four processes do not make four cores. If the work is arithmetic, ranks share what the machine has. On a cluster each rank has its own
# GPU and this question goes away; on one machine it is the first thing to know before any measurement.
#
# **Predict.** Rank 0 multiplies matrices alone, then all four do so at once. How many times longer does each take in company?

# %% tags=["predict"]
slowdown_guess = max(1, 4 / cores)

# %%
def busy(rank, working):
    """Seconds for 20 matrix products while the first `working` ranks compute; one thread each."""
    a = torch.randn(512, 512)
    dist.barrier()
    start = time.perf_counter()
    if rank < working:
        for _ in range(20):
            a @ a
    return time.perf_counter() - start

alone, two, four = (sorted(ranks.run(busy, w)[0] for _ in range(5))[2] for w in (1, 2, 4))
compare("4 ranks at once, against 1", slowdown_guess, four / alone, within=1.5)

# %% tags=["figure"]
plot.bars({"1 rank": 1, "2 ranks": alone / two * 2, "4 ranks": alone / four * 4}, ylabel="work per second, 1 rank = 1",
          reference={f"{cores} cores": cores}, title="Ranks share the cores",
          alt="Total work per second rises with the ranks until there are as many as cores, then it stays")

# %% [markdown]
# Total work rises until every core is busy and then stays level, or falls a little, because processes that outnumber the cores
# interrupt each other. So on this machine the labs show **what is computed and sent**, exactly; where time depends on having a
# device per rank, the text says so and gives the formula for one.
#
# **Takeaway: more ranks than cores do not add speed. Count first what the ranks share, then read a timing.**

# %% [markdown]
# ## 4. A real training run
#
# Notebooks are for understanding; training runs are programs. `python -m labcode.train gpt_tiny` trains a small GPT on the characters
# of Shakespeare. A launcher called **torchrun** starts it once per rank and tells each process its rank through environment
# variables. `launch.run` does that from Python, streams what the ranks print, and raises an error if one of them fails.
#
# The text is cut into **tokens**: here one token for each character that occurs in it, and one for the mark between two plays.

# %% tags=["nbval-check-output"]
splits = text.load(TextData(), context_length=128)
vocabulary = splits.tokenizer.vocab_size
print(f"{vocabulary} different tokens, {len(splits.train):,} windows of 128 tokens to train on")

# %% [markdown]
# An untrained model knows nothing: to it each of these tokens is about equally likely. The loss is the mean of -ln p, where p is the
# probability that the model gave to the token that really came.
#
# **Predict.** What is the loss of the first step?

# %% tags=["predict"]
loss_guess = math.log(vocabulary)

# %%
with following():
    done = launch.run("labcode.train", "gpt_tiny", "--train.steps", "80", "--train.log_every", "1", "--train.eval_every", "20",
                      "--train.sample_tokens", "0", "--train.out", "runs/start", "--train.overwrite", nproc=2)
print(f"2 ranks, 80 steps, {seconds(done.seconds)} with starting and stopping")
rows = metrics.read("runs/start")
compare("loss of the first step, nats", loss_guess, rows[0]["loss"], within=1.05)

# %% [markdown]
# The metrics are lines of JSON, one for each logged step, so that any tool can read them. The same numbers are in TensorBoard: open
# its tile in JupyterLab's launcher while a run is going. The dashed line is the **unigram entropy**: the best loss of a model that
# knows how often each character occurs and ignores the context. Below it, the model uses what came before.

# %% tags=["figure"]
unigram = splits.train.unigram_entropy()
plot.curves({"training": rows, "held-out text": [row | {"loss": row["val_loss"]} for row in rows if "val_loss" in row]},
            reference={"unigram entropy": unigram}, title="gpt_tiny on two ranks",
            alt="The loss falls from about 4.4 nats, passes the unigram entropy and keeps falling; held-out text follows it")

# %% [markdown]
# In eighty steps it passes below the dashed line. The whole recipe takes about a minute on two cores and ends with a sample
# that has Shakespeare's layout: speakers in capitals, short lines. Try it in a terminal:
#
#     torchrun --nproc-per-node=2 -m labcode.train gpt_tiny
#
# **Takeaway: a launcher starts one process per rank; the program learns from its environment who it is. The first loss should be
# ln(vocabulary), and a run that starts elsewhere has a bug.**

# %% [markdown] tags=["exercise"]
# ### Exercise 0.3 · Another vocabulary
#
# GPT-2 uses 50,257 tokens. What is the first loss of an untrained GPT-2, in nats?

# %% tags=["exercise"]
### BEGIN SOLUTION
gpt2_first_loss = -math.log(1 / 50257)
### END SOLUTION

# %% tags=["check"]
check("0.3", lambda: l00.first_loss(gpt2_first_loss))

# %% [markdown]
# ## 5. Broken on purpose
#
# With four processes there are four places to fail, and the one that fails first is rarely the one whose message you see first: the
# others wait for it, lose the connection, and complain as well. Here rank 2 finds a bad value while the others already wait for it.

# %% tags=["raises-exception"] raises="RankError: rank 2: ValueError: my batch holds a NaN"
def fragile(rank):
    if rank == 2:
        raise ValueError("my batch holds a NaN")
    dist.barrier()

ranks.run(fragile)

# %% [markdown]
# Read the line that begins with **RankError**: it names the rank that failed first and that rank's own error, not the broken
# connections that followed. Below it stands where on that rank it happened. Tools on a cluster do not all do you this favour; lesson
# 01 shows what the raw messages look like. The pool is usable again at once:

# %% tags=["nbval-check-output"]
print(ranks.run(add_up))
ranks.close()

# %% [markdown]
# **Takeaway: in a distributed job look for the first error of the first rank. Everything after it is an echo.**

# %% [markdown]
# ## From here to GPUs and SLURM
#
# The program does not change; what starts it does. With GPUs, each rank takes one and talks over NCCL, and the arithmetic is in
# bfloat16; without, ranks use CPU cores and gloo. `labcode.comm.bootstrap` decides that, in one place.
#
# | where | start | who tells the rank |
# |---|---|---|
# | one process | `python -m labcode.train gpt_tiny` | nobody: rank 0 of 1 |
# | 8 GPUs of one machine | `torchrun --nproc-per-node=8 -m labcode.train gpt_tiny` | torchrun: `RANK`, `WORLD_SIZE` |
# | SLURM | `srun --ntasks-per-node=8 python -m labcode.train gpt_tiny` in a job | SLURM: `SLURM_PROCID`, `SLURM_NTASKS` |

# %% [markdown]
# ## Recap
#
# | concept | formula or fact | in labcode |
# |---|---|---|
# | matrix product | 2 n³ FLOPs | `hardware` has the peaks |
# | rank | one process, own memory | `pool.ranks.Ranks`, `comm.bootstrap` |
# | collective | all ranks call it, or all wait | `comm.collectives` |
# | first loss | ln(vocabulary) | `python -m labcode.train` |
# | launcher | one process per rank | `launch.run` |
#
# ## Where to go
#
# | lesson | question it answers |
# |---|---|
# | 01 processes and collectives | what do ranks say to each other, and what does it cost? |
# | 04 data parallel | how do many ranks train one model, and why is the result the same? |
# | 07 communicator grids | who talks to whom when there are several kinds of parallelism? |
#
# Take them in this order. `README.md` has the map of the whole course.

# %% [markdown]
# ## Sources
#
# - Brown et al. 2020, *Language Models are Few-Shot Learners*, arXiv:2005.14165, table D.1: training compute of GPT-3.
# - Chowdhery et al. 2022, *PaLM*, arXiv:2204.02311, appendix B: what share of the peak a good training run reaches.
# - Peaks of GPUs: NVIDIA's datasheets, named next to each number in `labcode/hardware.py`.
# - torchrun and its environment variables: docs.pytorch.org/docs/stable/elastic/run.html.
