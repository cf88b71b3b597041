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
# This course trains neural networks on many processors at once, and every lab runs for real on the machine in front of
# you. This first lesson shows how a lesson works, how to start four processes that talk to each other, what your machine
# can do, and how to train a small GPT on two processes.
#
# ## Goals
#
# - know how predictions, checks and hints work;
# - start four **ranks** and make them talk;
# - know what this machine offers, in FLOP/s, and what training a large model would take;
# - know why four ranks are not four times faster here, and how much faster they are;
# - launch a training run the way a cluster does, and read its curve and its errors.
#
# **Time**: 63 minutes. A good place for a break is after section 2. **Needs**: PyTorch on one device;
# nothing about distributed training.
#
# The next cell belongs to all sections: run it wherever you begin. It also starts four processes, which section 2
# explains; that takes some seconds.

# %%
import math
import os
import time

import psutil
import torch
import torch.distributed as dist

from course.lab import Ranks, check, compare, hint, plot
from labcode.runtime import hardware

logical_cores = len(hardware.usable_cores())
cores = min(psutil.cpu_count(logical=False) or logical_cores, logical_cores)
ranks = Ranks(4)

# %% [markdown]
# ## 1. How a lesson works (core, 6 min)
#
# A lesson is a series of rounds. Each explains one idea, asks you to **predict** something, runs it, and compares your
# prediction with what was measured. Write your prediction down before you run anything: a wrong prediction teaches you
# more than none, because you learn what you took for granted.
#
# Each question to predict is in a box. In the cell after it, replace the three dots by your answer: a number, or words
# in quotation marks. `compare` then shows it beside what was found. It accepts a number that is close enough: within a
# factor that it names, 2 for example. Where it asks for the exact answer it says "right" or "wrong". Let us try it.
#
# Many processors run two threads at once on each core. The operating system then counts every core twice, and calls
# these the *logical* cores. The comparison accepts both numbers, as it asks for a factor of at most 2.
#
# **Predict.** How many cores can this notebook use? (On your own machine these are all that it has.)

# %% tags=["predict"]
cores_guess = os.cpu_count()

# %%
compare("cores of this machine", cores_guess, logical_cores, within=2, found="counted")

# %% [markdown]
# The other thing you do is write code. An **exercise** gives you a cell to complete, and the cell below it checks what
# you wrote. `check` says "right", "not done yet", or "wrong" with one sentence about what is wrong. When that is not
# enough, type `hint("0.1")` into a cell of your own: each call shows one more hint for exercise 0.1. You cannot break
# anything: run a cell as often as you like, and skip an exercise if you want to. If you have no answer to a question,
# leave the three dots, but run their cell: later cells use its names.
#
# > **Measured times.** Your machine does other things as well, so two measurements of one thing differ, by a tenth or
# > more when it is busy. Every comparison of times says how far they may differ. Where one says "NOT within" and the
# > machine was busy, run its cell again. Numbers of bytes, messages and FLOPs are exact everywhere.
#
# What you have done is kept. This picture counts the exercises that have passed, in this lesson and in all. To see it
# again, run the cell again, or type `python -m labcode` in a terminal.

# %% tags=["figure"]
plot.progress()

# %% [markdown]
# ## 2. Your first four ranks (core, 26 min)
#
# A **rank** is one process of a job, with a number from 0 up. Each has its own memory, its own Python, and on a cluster
# its own GPU. `ranks = Ranks(4)` in the first cell of this notebook has started four of them on this machine and
# connected them. They stay for the whole lesson.
#
# `ranks.run(f)` sends a function to all ranks, runs it on all of them at the same time, and returns the results in rank
# order. If the first parameter of the function is called `rank`, each rank gets its own number there. What a rank
# prints comes back with its number. Here each rank returns the number that the operating system gave to its process,
# the **pid**.

# %% tags=["nbval-check-output"]
def who(rank):
    print(f"I am rank {rank} of {dist.get_world_size()}")
    return os.getpid()

pids = ranks.run(who)
print(len({*pids, os.getpid()}), "processes, with this notebook")

# %% [markdown]
# Nothing is shared between the five processes. A variable that is set on one is unknown to the others, and a tensor
# gets from one to another only if it is **sent**.
#
# Cells that begin with `%%px` run on the ranks, not in this notebook. There the names `rank`, `world_size`, `torch`
# and `dist` exist already. (In a function of your own, `dist.get_rank()` and `dist.get_world_size()` give the first two.)

# %% tags=["nbval-check-output"]
# %%px
secret = rank * 10
print("my secret is", secret)

# %% tags=["nbval-check-output"]
print("does this notebook know the secret?", "secret" in globals())

# %% [markdown]
# Ranks talk through **collectives**: operations that all of them call together. The most important one is the
# **all-reduce**: each rank brings a tensor, `all_reduce` adds the tensors up, and on every rank the sum overwrites what it
# brought. The call itself returns nothing.

# %% tags=["figure"]
plot.collective("all_reduce", 4, caption="00.sum")

# %% [markdown]
# **Predict.** Each rank brings its own number: 0, 1, 2, 3. What does every rank hold afterwards?

# %% tags=["predict"]
sum_guess = 0 + 1 + 2 + 3

# %% tags=["nbval-check-output"]
def add_up(rank):
    x = torch.tensor(float(rank))
    dist.all_reduce(x)
    return x.item()

sums = ranks.run(add_up)
compare("sum on each rank", sum_guess, sums[0], within=1, found="computed")
print(sums)

# %% [markdown]
# **Takeaway: ranks share nothing. What one rank needs from another must be sent, and in a collective all of them take
# part.**

# %% [markdown] tags=["exercise"]
# ### Exercise 0.1 · Deal out the work
#
# Data parallelism begins by dividing a list over the ranks. Complete the function: rank `rank` of `world_size` takes
# its share of the items, as a list. Every item goes to exactly one rank, and the sizes of two shares differ by at most
# one. The items can be anything, numbers or not, and some may be equal. One line is enough.

# %% tags=["exercise"]
def share(items, rank, world_size):
    """The items that belong to this rank, as a list."""
    ### BEGIN SOLUTION
    return items[rank::world_size]
    ### END SOLUTION

# %% tags=["check"]
check("0.1", share)

# %% [markdown]
# There are two hints for it. Here is the first; run the cell again for the second.

# %%
hint("0.1")

# %% [markdown] tags=["exercise"]
# ### Exercise 0.2 · The mean of everything
#
# Each rank holds some numbers, but not equally many. Return the mean over **all** of them, the same on every rank.
# Leave the tensor that you are given as it is. In an all-reduce all ranks must bring tensors of the same size. So think
# first about what each rank has to tell the others, in as few numbers as possible.

# %% tags=["exercise"]
def mean_over_ranks(local):
    """The mean over the values of all ranks; `local` is a 1-D tensor."""
    ### BEGIN SOLUTION
    total = local.sum()
    count = torch.tensor(float(len(local)))
    both = torch.stack([total, count])
    dist.all_reduce(both)
    return both[0] / both[1]
    ### END SOLUTION

# %% tags=["check"]
check("0.2", mean_over_ranks, ranks)

# %% [markdown]
# <details><summary>Why not average the averages?</summary>
#
# A rank with one value would count as much as a rank with four. The same mistake hides in training loops whose last
# batch is smaller on some ranks, and it gives a loss that is only slightly wrong. Lesson 04, section 3, meets it again.
# </details>

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Most of the time goes to the exercises. In 0.1 many write contiguous slices and lose the rest of
# the division; in 0.2 nearly everybody first averages the averages, or calls all_reduce on `local`, whose sizes differ:
# the pool says so at once ("rank 0 called all_reduce of float32 [1], rank 1 of float32 [2]"). Others write `total =
# dist.all_reduce(...)` and compute with None. Ask the room: two numbers, or two calls of all_reduce? (Both are right.
# One call is faster: lesson 01, section 6, says why.)

# %% [markdown]
# ## 3. What does this machine have? (core, 10 min)
#
# Training is mostly matrix multiplication, so we measure a machine by the number of floating-point operations that it
# does in a second, **FLOP/s**. Multiplying two n × n matrices takes n multiplications and n additions for each of the n²
# results. That is **2 n³ FLOPs**. The first product starts the threads, so we leave it out. Of the others we take the
# median.

# %%
def matmul_flops_per_s(n=1024, repeats=9):
    a = torch.randn(n, n)
    b = torch.randn(n, n)
    a @ b
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - start)
    median = sorted(times)[repeats // 2]
    return 2 * n**3 / median

measured_flops = matmul_flops_per_s()
memory_bytes = psutil.virtual_memory().total
gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
gpu_names = ", ".join(gpus) or "none"
print(f"{cores} cores, which the operating system counts as {logical_cores}")
print(f"{memory_bytes / 2**30:.0f} GiB of memory, GPUs: {gpu_names}")
print(f"all cores together: {measured_flops / 1e9:.0f} GFLOP/s")

# %% [markdown]
# A datasheet gives the same number for a GPU. `labcode.runtime.hardware` keeps a short table of such peaks, each with its
# source. They hold for numbers of 16 bits (bfloat16), in which large models are trained; the measurement above used 32
# bits, PyTorch's default. One TFLOP/s is 1,000 GFLOP/s, and one PFLOP/s is a thousand TFLOP/s.

# %% tags=["figure"]
a100 = hardware.find("NVIDIA A100-SXM4-80GB")
h100 = hardware.find("NVIDIA H100 80GB HBM3")
tflops = {
    "this CPU": measured_flops / 1e12,
    "A100": a100.peak_flops_per_s["bfloat16"] / 1e12,
    "H100": h100.peak_flops_per_s["bfloat16"] / 1e12,
}
such_cpus = round(tflops["H100"] / tflops["this CPU"], -3)
plot.bars(tflops, cpus=f"{such_cpus:,.0f}", caption="00.peaks")

# %% [markdown]
# Training GPT-3 took 3.14e23 FLOPs (Brown et al. 2020, table D.1). How long would one machine need, and how long would
# 1024 GPUs? For the CPU we take what we have measured. For a GPU we take 40 % of the datasheet's peak, which is what a
# good training run reaches (Grattafiori et al. 2024 report 38 to 43 % for Llama 3 405B, on up to 16,384 H100).

# %%
gpt3_flops = 3.14e23
day_s = 24 * 3600
h100_flops = 0.4 * h100.peak_flops_per_s["bfloat16"]
machines = {
    "this CPU": measured_flops,
    "1 H100": h100_flops,
    "1024 H100": 1024 * h100_flops,
}
for name, flops_per_s in machines.items():
    days = gpt3_flops / flops_per_s / day_s
    print(f"{name:10} {days:14,.1f} days = {days / 365:10,.2f} years")

# %% [markdown]
# Time is one reason for many devices, and memory is the other. While a model is trained, each of its parameters takes
# about 16 bytes: the parameter itself, its gradient, and what the optimizer keeps for it (Rajbhandari et al. 2020;
# lesson 04, section 6, counts them). GPT-3 has 175 billion parameters (Brown et al. 2020).

# %% tags=["nbval-check-output"]
gpt3_bytes = 175e9 * 16
gpt3_tb = gpt3_bytes / 1e12
h100_gb = h100.memory_bytes / 1e9
num_h100 = gpt3_bytes / h100.memory_bytes
print(f"GPT-3 needs {gpt3_tb:.1f} TB, and an H100 has {h100_gb:.0f} GB:")
print(f"{num_h100:.0f} of them hold it, before they compute anything")

# %% [markdown]
# One GPU would need 25 years for the computation, and could not even hold the model. With 1024 of them it takes about
# nine days, **if** they lose no time waiting for one another. Do they? NVIDIA has timed the training of ten models on 32
# to 3,072 A100, the larger models on more GPUs, and published the FLOP/s that they reached (Narayanan et al. 2021,
# table 1).
#
# **Predict.** 32 of the GPUs do 4.4e15 FLOP/s together. How many do 3,072 of them do, 96 times as many?

# %% tags=["predict"]
of_3072_gpus = 96 * 4.4e15

# %% tags=["nbval-check-output"]
from labcode.perf import published

num_gpus = []
flops_of_all = []
for run in published.rows():
    if run["source_key"] == "narayanan21_t1":
        num_gpus.append(int(run["n_gpus"]))
        flops_of_all.append(num_gpus[-1] * float(run["value"]) * 1e12)
compare("3,072 GPUs", of_3072_gpus, flops_of_all[-1], unit="FLOP/s", found="published")

# %% tags=["figure"]
of_one = flops_of_all[0] / num_gpus[0]
in_proportion = [of_one * number for number in num_gpus]
plot.lines(
    {"published": flops_of_all, "in proportion to 32 GPUs": in_proportion},
    x=num_gpus,
    caption="00.scaling",
)

# %% [markdown]
# Each of the 3,072 GPUs does even more than each of the 32: the larger models have larger matrix products, which run more
# efficiently, and that outweighs the waiting. It took three ways of dividing the work at once, chosen well. On 1,536 GPUs
# they reached 141 TFLOP/s per GPU with one model, and a different choice reached 44 with the same model (table 2). This
# is what the course is about: how to divide a model and its data over devices, what they must then tell each other, what
# that costs, and how to predict it before the cluster's bill arrives.
#
# **Takeaway: a large model is trained on many devices because it does not fit on one, and because one would take
# decades.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* On virtual machines the measured FLOP/s can be half or a third of what cores and clock promise,
# because what is sold as a core is a hyper-thread. Ask the room: which of the two
# reasons, time or memory, would remain if GPUs became a thousand times faster?

# %% [markdown]
# ## 4. Are four ranks four times as fast? (core, 7 min)
#
# Four processes do not make four cores. On a cluster each rank has its own GPU, and this question goes away. On one
# machine the ranks share the cores, which is the first thing to know before any measurement.
#
# In the next experiment rank 0 multiplies matrices, first alone, then together with one other rank, then with all four
# at once. Each rank computes with one thread, and so on one core at a time, because `Ranks` starts it with
# `OMP_NUM_THREADS=1`, as torchrun does. As long as there are at least as many cores as ranks that compute, these hardly
# disturb each other. When there are fewer, they take turns: two ranks on one core get half of its time each. What counts
# are the cores themselves, not the logical ones: two threads on one core share its units.
#
# **Predict.** How many times as long does rank 0 take when all four compute, compared with rank 0 alone? (This machine
# has the number of cores that section 3 prints; here it is called `cores`.)

# %% tags=["predict"]
slowdown_guess = max(1, 4 / cores)

# %% [markdown]
# `dist.barrier()` returns when all ranks have called it, so all of them start together. Each measurement is made seven
# times, in turn with the others, and we take the median.

# %%
import statistics


def busy(rank, working):
    """Seconds for 20 matrix products while the first `working` ranks compute."""
    a = torch.randn(512, 512)
    dist.barrier()
    start = time.perf_counter()
    if rank < working:
        for _ in range(20):
            a @ a
    return time.perf_counter() - start

alone = []  # seconds
two = []
four = []
for _ in range(7):
    alone.append(ranks.run(busy, 1)[0])
    two.append(ranks.run(busy, 2)[0])
    four.append(ranks.run(busy, 4)[0])
alone_s = statistics.median(alone)
two_s = statistics.median(two)
four_s = statistics.median(four)
compare("4 ranks at once, against 1", slowdown_guess, four_s / alone_s, within=1.5)

# %% tags=["figure"]
work_per_s = {
    "1 rank": 1,
    "2 ranks": 2 * alone_s / two_s,
    "4 ranks": 4 * alone_s / four_s,
}
plot.bars(work_per_s, reference={f"{cores} cores": cores}, caption="00.cores")

# %% [markdown]
# The work of all ranks together rises until every core is busy. More ranks then add little. If the bars stay well below
# the line, something else ran on the machine, or what it calls cores are really threads that share one.
#
# So on this machine the labs show **what is computed and sent**, and that is exact. Where the time depends on a device
# for each rank, the text says so, and gives the formula.
#
# **Takeaway: more ranks than cores do not add speed. Count first what the ranks share, then read a timing.**

# %% [markdown]
# ## 5. A real training run (core, 7 min)
#
# Notebooks are for understanding; training runs are programs. `python -m labcode.train gpt_tiny` trains a small GPT on
# the characters of Shakespeare. PyTorch's launcher, **torchrun**, starts it once for each rank, and tells each process
# its rank through environment variables. `launch.run` calls torchrun from Python, and raises an error if one of the
# ranks fails. Any script can be started in this way: section 1 of lesson 01 writes one in plain PyTorch, of six lines.
#
# The text is cut into **tokens**: here one token for each different character, and one for the mark between two plays.
# The model reads 128 of them at a time, and after each one it predicts the next.

# %% tags=["nbval-check-output"]
from course.progress import following
from labcode.config import TextData
from labcode.data import text
from labcode.measure import metrics
from labcode.runtime import launch
from labcode.runtime.units import seconds

splits = text.load(TextData(), context_length=128)
vocabulary = splits.tokenizer.vocab_size
print(f"{vocabulary} different tokens")

# %% [markdown]
# The **loss** is the mean of -ln p, where p is the probability that the model gave to the token that really came. Its
# unit is the *nat*, because of the natural logarithm. To an untrained model each token is about equally likely.
#
# **Predict.** What is the loss of the first step?

# %% tags=["predict"]
loss_guess = math.log(vocabulary)  # each token has the probability 1 / vocabulary

# %%
with following():
    done = launch.run(
        "labcode.train", "gpt_tiny",
        "--train.steps", "80", "--train.log_every", "1", "--train.eval_every", "20",
        "--train.sample_tokens", "0", "--train.out", "runs/start", "--train.overwrite",
        nproc=2,
    )
rows = metrics.read("runs/start")
compare("loss of the first step", loss_guess, rows[0]["loss"], within=1.05, unit="nat")
print(f"2 ranks, 80 steps, {seconds(done.seconds)} with starting and stopping")

# %% [markdown]
# The first loss is about ln(vocabulary), the loss of a model that knows nothing. The metrics of the run are lines of
# JSON, one for each logged step, so that any tool can read them. The same numbers are in TensorBoard: open its tile in
# JupyterLab's launcher while a run is going. The dashed line in the picture is the **unigram entropy**: the best loss of
# a model that knows how often each token occurs, and ignores the context. Below it, the model uses what came before.

# %% tags=["figure"]
held_out = []
for row in rows:
    if "val_loss" in row:
        held_out.append(row | {"loss": row["val_loss"]})
plot.curves(
    {"training": rows, "held-out text": held_out},
    reference={"unigram entropy": splits.train.unigram_entropy()},
    caption="00.first_training",
)

# %% [markdown]
# In eighty steps the loss falls well below the dashed line. The whole recipe has 1500 steps, takes one to two minutes
# on two cores, and ends with a sample that has Shakespeare's layout: speakers in capitals, short lines. Try it in a
# terminal:
#
#     torchrun --nproc-per-node=2 -m labcode.train gpt_tiny
#
# First torchrun warns that it sets `OMP_NUM_THREADS` to 1. Each rank then computes with one thread, as in section 4, and
# here that is right. The last line but one of the run says where the time of a step went, and how much "of the matmul
# rate" the training reached: its FLOP/s, divided by those of a large matrix product that is timed when the run starts.
#
# **Takeaway: a launcher starts one process per rank, and each process learns its rank from its environment. The first
# loss should be about the logarithm of the vocabulary's size; a run that starts far from it usually has a bug.**

# %% [markdown]
# ## 6. Broken on purpose (core, 3 min)
#
# With four processes there are four places to fail. The message that you see first is often not that of the rank that
# failed first: the others wait for it, lose the connection, and complain as well. Here rank 2 finds a bad value while
# the others are already waiting for it.

# %% tags=["raises-exception"] raises="RankError: rank 2: ValueError: my batch holds a NaN"
def fragile(rank):
    if rank == 2:
        raise ValueError("my batch holds a NaN")
    dist.barrier()

ranks.run(fragile)

# %% [markdown]
# Read the line that begins with **RankError**. It names the rank that failed first, and that rank's own error, not the
# broken connections that followed. Below it is the line where it happened on that rank. On a cluster, torchrun ends its
# log with the rank that it saw fail first, below "Root Cause (first observed failure)"; `srun` alone does not sort the
# messages. Lesson 01, section 7, shows how they look. The failed call has ended all four processes. The next call starts
# new ones in a fraction of a second, and says what was lost with the old ones:

# %% tags=["nbval-check-output"]
def still_here(rank):
    dist.barrier()
    return f"rank {rank} is here"

print(ranks.run(still_here))

# %% [markdown]
# **Takeaway: in a distributed job look for the earliest error, on whichever rank it is. What comes after it is usually
# an echo.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Ask the room what the curve would look like with four ranks instead of two. (The same: the
# recipe divides one batch over the ranks, and lesson 04 shows why that changes nothing.) Show the first lines of a real
# job log with an echo, if you have one.

# %% [markdown]
# ## From here to GPUs and SLURM (core, 1 min)
#
# The program does not change; what starts it does. With GPUs, each rank takes one, and the ranks talk through NVIDIA's
# library NCCL; without, they use CPU cores and a library called gloo.
#
# | where | start | who tells the rank |
# |---|---|---|
# | one process | `python -m labcode.train gpt_tiny` | nobody: rank 0 of 1 |
# | 8 GPUs of one machine | `torchrun --nproc-per-node=8 -m labcode.train gpt_tiny` | torchrun: `RANK`, `WORLD_SIZE` |
# | SLURM | `srun --ntasks-per-node=8 python -m labcode.train gpt_tiny` in a job | SLURM: `SLURM_PROCID`, `SLURM_NTASKS` |
#
# The ranks also need an address at which they meet. torchrun sets it, in `MASTER_ADDR` and `MASTER_PORT`. Under SLURM
# the job script has to set both (lesson 14, section 2). PyTorch's own `dist.init_process_group` reads `RANK`,
# `WORLD_SIZE` and these two, and knows nothing of SLURM. So a plain script that `srun` starts has to set `RANK` from
# `SLURM_PROCID` and `WORLD_SIZE` from `SLURM_NTASKS` first. `labcode.train` reads the numbers of either.
#
# ## Questions (core, 3 min)
#
# **1.** A matrix product of two 4096 × 4096 matrices takes 0.7 s on a machine. How many FLOP/s is that?
#
# <details><summary>Answer</summary>
#
# 2 · 4096³ = 137 billion operations in 0.7 s: about 196 GFLOP/s.
# </details>
#
# **2.** A `%%px` cell says `if rank == 1: batch_size = 64`. What is `batch_size` on rank 0 afterwards?
#
# <details><summary>Answer</summary>
#
# It does not exist there. Ranks share no variables; a rank that needs the number must be sent it.
# </details>
#
# **3.** A run with 50,257 tokens starts with a loss of 14. Is that bad luck?
#
# <details><summary>Answer</summary>
#
# No. A model that knows nothing has a loss of ln 50257 = 10.8. At 14 it is worse than guessing: it is sure of the wrong
# tokens. Look at how the weights are initialised, and whether the targets belong to the inputs.
# </details>
#
# ## Recap
#
# | concept | formula or fact | in labcode |
# |---|---|---|
# | matrix product | 2 n³ FLOPs | `hardware` has the peaks |
# | why many devices | time, and 16 bytes for each parameter | |
# | rank | one process, own memory | `course.pool.ranks.Ranks`, `runtime.bootstrap` |
# | collective | all ranks call it, or all wait | `comm.collectives` |
# | first loss | ln(vocabulary) | `python -m labcode.train` |
# | launcher | one process per rank | `launch.run` |
#
# ## Where to go
#
# Lesson 01 shows what ranks say to each other, and what it costs. You need not read the whole course from the first
# lesson to the last. Here is what needs what.
#
# ![The lessons in their six parts; an arrow leads from a lesson to each
# one that needs it](../images/course_map.svg)
#
# [The map in full size](../images/course_map.svg)
#
# `python -m labcode ways` prints ways through the course for one goal each, such as a DDP script of your own, with the
# sections that they take and their minutes. `COURSE.md` has them below the map. `python -m labcode way ddp` takes one of
# them: from then on `python -m labcode` says which section of that way comes next. If you get eight GPUs on Monday, take
# the way `monday`.
#
# You can begin a lesson at any of its sections, or go on there the next day: run the cells above section 1, and then
# those of the section. The heading of a section says how long it takes, and whether it is core or optional.
#
# ## Sources
#
# - Brown et al. 2020, *Language Models are Few-Shot Learners*, arXiv:2005.14165, table D.1: training compute of GPT-3.
# - Rajbhandari et al. 2020, *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models*, arXiv:1910.02054,
#   section 3.1: 16 bytes for each parameter.
# - Grattafiori et al. 2024, *The Llama 3 Herd of Models*, arXiv:2407.21783, table 4: 38 to 43 % of the peak of an H100.
# - Narayanan et al. 2021, *Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM*,
#   arXiv:2104.04473, tables 1 and 2, and section 5.1: why the larger models reach more for each GPU.
# - Peaks of GPUs: NVIDIA's datasheets, named next to each number in `labcode/runtime/hardware.py`.
# - torchrun and its environment variables: docs.pytorch.org/docs/stable/elastic/run.html. Its report of failures:
#   docs.pytorch.org/docs/stable/elastic/errors.html.

# %%
ranks.close()
