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
# you. This first lesson shows how a lesson works, what your machine can do, how to start four processes that talk to
# each other, and how to train a small GPT on two of them.
#
# ## Goals
#
# - know how predictions, checks and hints work;
# - know what this machine offers, in FLOP/s, and what training a large model would take;
# - start four **ranks** and make them talk;
# - know why four ranks are not four times faster here, and how much faster they are;
# - launch a training run the way a cluster does, and read its curve and its errors.
#
# **Time**: 40 minutes. **Needs**: PyTorch on one device; nothing about distributed training.

# %%
import math
import os
import time

import torch
import torch.distributed as dist

from labcode.lab import Ranks, check, compare, hint, plot

# %% [markdown]
# ## 1. How a lesson works
#
# A lesson is a series of rounds. Each explains one idea, asks you to **predict** something, runs it, and sets your
# prediction beside what was measured. Write your prediction down before you run anything: a wrong prediction teaches
# you more than none, because you learn what you took for granted.
#
# Each question to predict stands in a box. In the cell after it, replace the three dots with your answer, a number.
# `compare` then shows both numbers. It accepts an answer that is close enough: within a factor that it names, 2 for
# example. Where it asks for the exact number it says "right" or "wrong". Let us try it.
#
# **Predict.** How many cores does the processor of this machine have?

# %% tags=["predict"]
cores_guess = os.cpu_count()

# %%
cores = os.cpu_count()
compare("cores of this machine", cores_guess, cores, within=1, found="counted")

# %% [markdown]
# The other thing you do is write code. An **exercise** gives you a cell to complete, and the cell below it checks what
# you wrote. `check` says "right", "not done yet", or "wrong" with one sentence about what is wrong. When that is not
# enough, type `hint("0.1")` into a cell of your own: each call shows one more hint for exercise 0.1. It works in every
# lesson. You cannot break anything: run a cell as often as you like, and go on without an exercise if you want to. If
# you have no answer to a question, leave the three dots, but run their cell: later cells use its names.
#
# What you have done is kept. This picture shows the exercises of all lessons that you have, and marks those that have
# passed. To see it again, run the cell again, or type `python -m labcode` in a terminal.

# %% tags=["figure"]
plot.progress()

# %% [markdown]
# ## 2. What does this machine have?
#
# Training is mostly matrix multiplication, so we measure a machine by the number of floating-point operations that it
# does in a second, **FLOP/s**. Two things set it on a CPU: how many cores there are, and how much one core does in a
# clock cycle.

# %%
import psutil

from labcode import hardware

memory_bytes = psutil.virtual_memory().total
gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
gpu_names = ", ".join(gpus) or "none"
print(f"{cores} cores, {memory_bytes / 2**30:.0f} GiB of memory, GPUs: {gpu_names}")

# %% [markdown]
# How much a core does in a cycle depends on its kind and on its instructions. PyTorch says which ones it uses here:

# %%
print("processor:", hardware.cpu_name())
print("instructions:", torch.backends.cpu.get_cpu_capability())

# %% [markdown]
# A core with AVX2 instructions has two units, and each of them multiplies and adds 8 numbers of 32 bits in every cycle.
# That makes 2 · 8 · 2 = 32 floating-point operations per cycle. With AVX512 a unit takes 16 numbers at once, and a core
# with two such units does 64. Most of Intel's server cores have two; other cores with AVX512 stay at 32, for example
# AMD's Zen 4, which puts each instruction through units of 8.
#
# A laptop runs at roughly 3 billion cycles per second. Where the name of your processor tells you no more, take this and
# 32 operations per cycle. One thing a machine often does not show: the cores of a virtual machine in a cloud can be half
# cores, two of which share the units of one.
#
# **Predict.** How many FLOP/s do all cores of this machine reach together? (Write the plain number: one GFLOP/s is
# 1e9.)

# %% tags=["predict"]
peak_guess = cores * 3e9 * 32

# %% [markdown]
# Now measure. Multiplying two n × n matrices takes n multiplications and n additions for each of the n² results. That
# is **2 n³ FLOPs**. The first product starts the threads, so we leave it out. Of the others we take the median, because
# other programs disturb this machine as well.

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
compare("matrix product on this CPU", peak_guess, measured_flops, within=2, unit="FLOP/s")

# %% [markdown]
# If prediction and measurement lie within a factor of two, the model of the machine is good enough for what follows. If
# they do not, your cores are of another kind, or half cores, or other programs were busy. Either way the measured
# number is the one to go on with.
#
# A datasheet gives the same number for a GPU. `labcode.hardware` keeps a short table of such peaks, each with its
# source. They hold for numbers of 16 bits (bfloat16), in which large models are trained; the measurement above used 32
# bits, PyTorch's default.

# %% tags=["figure"]
a100 = hardware.find("NVIDIA A100-SXM4-80GB")
h100 = hardware.find("NVIDIA H100 80GB HBM3")
rates = {
    "this CPU": measured_flops,
    "A100": a100.peak_flops_per_s["bfloat16"],
    "H100": h100.peak_flops_per_s["bfloat16"],
}
such_cpus = rates["H100"] / measured_flops
plot.bars(
    rates, ylabel="FLOP/s, log scale", logy=True,
    title=f"By its datasheet an H100 is about {round(such_cpus, -3):,.0f} such CPUs",
    alt="On a log scale the datasheet peaks of A100 and H100 stand far above this CPU",
)

# %% [markdown]
# Training GPT-3 took 3.14e23 FLOPs (Brown et al. 2020, table D.1). Suppose that a GPU reaches 40 % of its peak, which
# is good (Chowdhery et al. 2022 report 46 %, on Google's TPU v4). How long would one machine need, and how long would
# 1024 GPUs?

# %%
gpt3_flops = 3.14e23
day_s = 24 * 3600
h100_flops = 0.4 * h100.peak_flops_per_s["bfloat16"]
machines = {"this CPU": measured_flops, "1 H100": h100_flops, "1024 H100": 1024 * h100_flops}
for name, flops_per_s in machines.items():
    days = gpt3_flops / flops_per_s / day_s
    print(f"{name:10} {days:14,.1f} days = {days / 365:10,.2f} years")

# %% [markdown]
# Time is one reason for many devices, memory is the other. While a model is trained, each of its parameters takes about
# 16 bytes: the parameter itself, its gradient, and what the optimizer keeps for it (Rajbhandari et al. 2020; lesson 04
# counts them). GPT-3 has 175 billion parameters (Brown et al. 2020).

# %% tags=["nbval-check-output"]
gpt3_bytes = 175e9 * 16
print(f"GPT-3 needs {gpt3_bytes / 1e12:.1f} TB, and an H100 has {h100.memory_bytes / 1e9:.0f} GB:")
print(f"{gpt3_bytes / h100.memory_bytes:.0f} of them hold it, before they compute anything")

# %% [markdown]
# One GPU would need 25 years for the computation, and could not even hold the model. With 1024 of them it takes about
# nine days, **if** they lose no time waiting for one another. This "if" is what the course is about: how to divide a
# model and its data over devices, what they must then tell each other, what that costs, and how to predict it before
# the cluster's bill arrives.
#
# **Takeaway: a large model is trained on many devices because it does not fit on one, and because one would take
# decades.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Sections 1 and 2 take 12 minutes. On virtual machines the measured FLOP/s are often a third of
# the prediction: the cores that are sold are half cores (hyper-threads). Ask the room: which of the two reasons, time
# or memory, would remain if GPUs became a thousand times faster?

# %% [markdown]
# ## 3. Your first four ranks
#
# A **rank** is one process of a job, with a number from 0 up. Each has its own memory, its own Python, and on a cluster
# its own GPU. `Ranks(4)` starts four of them on this machine and connects them. It takes about ten seconds. They stay
# for the whole lesson.

# %%
ranks = Ranks(4)
ranks

# %% [markdown]
# `ranks.run(f)` sends a function to all ranks, runs it on all of them at the same time, and returns the results in rank
# order. If the first parameter of the function is called `rank`, each rank gets its own number there. What a rank
# prints comes back with its number.

# %% tags=["nbval-check-output"]
def who(rank):
    print(f"I am rank {rank} of {dist.get_world_size()}")
    return os.getpid()

pids = ranks.run(who)

# %% [markdown]
# Each process of a computer has a number, its **pid**, and each rank returned its own.
#
# **Predict.** Four ranks ran the same function, and this notebook is a process too. How many different pids are there
# among the four ranks and this notebook?

# %% tags=["predict"]
pids_guess = 5

# %% tags=["nbval-check-output"]
different = len({*pids, os.getpid()})
compare("different processes", pids_guess, different, within=1, found="counted")

# %% [markdown]
# Five processes, and nothing is shared between them. A variable that is set on one is unknown to the others, and a
# tensor gets from one to another only if it is **sent**.
#
# Cells that begin with `%%px` run on the ranks, not in this notebook. There the names `rank`, `world_size`, `torch`
# and `dist` exist already.

# %% tags=["nbval-check-output"]
# %%px
secret = rank * 10
print("my secret is", secret)

# %% tags=["nbval-check-output"]
print("does this notebook know the secret?", "secret" in globals())

# %% [markdown]
# Ranks talk through **collectives**: operations that all of them call together. The most important one is `all_reduce`.
# Each rank brings a tensor, they are added up, and every rank gets the sum: it overwrites what the rank brought. The
# call itself returns nothing.

# %% tags=["figure"]
plot.collective(
    "all_reduce", 4,
    alt="Before all_reduce each rank holds its own part, afterwards every rank holds the sum of all",
)

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
print(sums)
compare("sum on each rank", sum_guess, sums[0], within=1, found="computed")

# %% [markdown]
# **Takeaway: ranks share nothing. What one knows and another needs must be sent, and in a collective all of them take
# part.**

# %% [markdown] tags=["exercise"]
# ### Exercise 0.1 · Deal out the work
#
# Data parallelism begins by dividing a list over the ranks. Complete the function: rank `rank` of `world_size` takes
# its share of the items, as a list. Every item goes to exactly one rank, and no rank gets more than one item more than
# another. The items can be anything, numbers or not, and some may be equal. One line is enough.

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
# Each rank holds some numbers, and not equally many. Return the mean over **all** of them, the same on every rank.
# Leave the tensor that you are given as it is.
#
# In a collective all ranks must bring tensors of the same size. So think first about what each rank has to tell the
# others, in as few numbers as possible.

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
# batch is smaller on some ranks, and it gives a loss that is only slightly wrong. Lesson 04 meets it again.
# </details>

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Section 3 takes 13 minutes with both exercises. In 0.1 many write contiguous slices and lose the
# rest of the division; in 0.2 nearly everybody first averages the averages, or calls all_reduce on `local`, whose sizes
# differ: the pool says so at once ("rank 0 called all_reduce of float32 [1], rank 1 of float32 [2]"). Others write
# `total = dist.all_reduce(...)` and compute with None. Ask the room: two numbers, or two calls of all_reduce? (Both are right. One call is faster: lesson 01 says why.)

# %% [markdown]
# ## 4. Are four ranks four times as fast?
#
# Four processes do not make four cores. If the work is arithmetic, the ranks share what the machine has. On a cluster
# each rank has its own GPU, and this question goes away. On one machine it is the first thing to know before any
# measurement.
#
# In the next experiment rank 0 multiplies matrices, first alone, then together with one other rank, then with all four
# at once. Each rank uses one core at a time, as `Ranks` starts it with `OMP_NUM_THREADS=1`, which torchrun does too:
# one thread for arithmetic. While there are at least as many cores as ranks that compute, these do not disturb each
# other. When there are fewer, they take turns: two ranks on one core get half of its time each.
#
# **Predict.** How many times as long does rank 0 take when all four compute, compared with rank 0 alone?

# %% tags=["predict"]
slowdown_guess = max(1, 4 / cores)

# %% [markdown]
# `dist.barrier()` returns when all ranks have called it, so all of them start together. Each measurement is made five
# times, and we take the one in the middle.

# %%
def busy(rank, working):
    """Seconds for 20 matrix products while the first `working` ranks compute."""
    a = torch.randn(512, 512)
    dist.barrier()
    start = time.perf_counter()
    if rank < working:
        for _ in range(20):
            a @ a
    return time.perf_counter() - start

def median_of_rank_0(working):
    times = []
    for _ in range(5):
        times.append(ranks.run(busy, working)[0])
    return sorted(times)[2]

alone_s = median_of_rank_0(1)
two_s = median_of_rank_0(2)
four_s = median_of_rank_0(4)
compare("4 ranks at once, against 1", slowdown_guess, four_s / alone_s, within=1.5)

# %% tags=["figure"]
work_per_s = {"1 rank": 1, "2 ranks": 2 * alone_s / two_s, "4 ranks": 4 * alone_s / four_s}
plot.bars(
    work_per_s, ylabel="work per second, 1 rank = 1",
    reference={f"{cores} cores": cores},
    title="Ranks share the cores",
    alt="Total work per second rises with the ranks until there are as many as cores, then it stays",
)

# %% [markdown]
# The work of all ranks together rises until every core is busy. More ranks then add next to nothing. With more ranks
# than cores the total can even fall a little, because the ranks interrupt each other. A bar that ends a little above or
# below the dashed line is within the noise of such a measurement.
#
# A bar that ends far above the line means that other programs were running. Every process that wants to compute gets
# its turn, so on a busy machine four ranks together get a larger share of the cores than one rank does. Run the
# measurement again when the machine is quiet.
#
# So on this machine the labs show **what is computed and sent**, and that is exact. Where the time depends on a device
# for each rank, the text says so, and gives the formula.
#
# **Takeaway: more ranks than cores do not add speed. Count first what the ranks share, then read a timing.**

# %% [markdown]
# ## 5. A real training run
#
# Notebooks are for understanding; training runs are programs. `python -m labcode.train gpt_tiny` trains a small GPT on
# the characters of Shakespeare. A launcher called **torchrun** starts it once for each rank, and tells each process its
# rank through environment variables. `launch.run` does that from Python, and raises an error if one of the ranks fails.
#
# The text is cut into **tokens**: here one token for each different character, and one for the mark between two plays.
# The model reads 128 of them at a time, and after each one it predicts the next.

# %% tags=["nbval-check-output"]
from labcode import launch
from labcode.config import TextData
from labcode.data import text
from labcode.teach.progress import following
from labcode.train import metrics
from labcode.units import seconds

splits = text.load(TextData(), context_length=128)
vocabulary = splits.tokenizer.vocab_size
print(f"{vocabulary} different tokens")

# %% [markdown]
# The **loss** is the mean of -ln p, where p is the probability that the model gave to the token that really came. (The
# natural logarithm makes its unit the *nat*.) An untrained model knows nothing: to it each token is about equally
# likely.
#
# For example, with 10 tokens in all, each has the probability 1/10, and the loss is -ln(1/10) = ln 10 = 2.3.
#
# **Predict.** What is the loss of the first step here? And what would it be for GPT-2, which knows 50,257 tokens?

# %% tags=["predict"]
loss_guess = math.log(vocabulary)
gpt2_loss_guess = math.log(50257)

# %%
with following():
    done = launch.run(
        "labcode.train", "gpt_tiny",
        "--train.steps", "80", "--train.log_every", "1", "--train.eval_every", "20",
        "--train.sample_tokens", "0", "--train.out", "runs/start", "--train.overwrite",
        nproc=2,
    )
print(f"2 ranks, 80 steps, {seconds(done.seconds)} with starting and stopping")
rows = metrics.read("runs/start")
compare("loss of the first step", loss_guess, rows[0]["loss"], within=1.05, unit="nat")

# %% [markdown]
# We do not train GPT-2 here, but an untrained model is easily made up: it gives every token the same number. PyTorch's
# own loss then says what it costs.

# %%
equally_likely = torch.zeros(1, 50257)
any_token = torch.tensor([42])
gpt2_loss = torch.nn.functional.cross_entropy(equally_likely, any_token).item()
compare(
    "GPT-2 before training", gpt2_loss_guess, gpt2_loss,
    within=1.01, unit="nat", found="computed",
)

# %% [markdown]
# The metrics of the run are lines of JSON, one for each logged step, so that any tool can read them. The same numbers
# are in TensorBoard: open its tile in JupyterLab's launcher while a run is going. The dashed line is the **unigram
# entropy**: the best loss of a model that knows how often each character occurs, and ignores the context. Below it, the
# model uses what came before.

# %% tags=["figure"]
held_out = []
for row in rows:
    if "val_loss" in row:
        held_out.append(row | {"loss": row["val_loss"]})
plot.curves(
    {"training": rows, "held-out text": held_out},
    reference={"unigram entropy": splits.train.unigram_entropy()},
    ylabel="loss [nat]", title="gpt_tiny on two ranks",
    alt="The loss falls from about 4.4 nats, passes the unigram entropy and keeps falling; "
        "held-out text follows it",
)

# %% [markdown]
# In eighty steps the loss falls well below the dashed line. The whole recipe has 1500 steps, takes one to two minutes
# on two cores, and ends with a sample that has Shakespeare's layout: speakers in capitals, short lines. Try it in a
# terminal:
#
#     torchrun --nproc-per-node=2 -m labcode.train gpt_tiny
#
# **Takeaway: a launcher starts one process per rank, and each process learns its rank from its environment. The first
# loss should be about the logarithm of the vocabulary's size; a run that starts far from it usually
# has a bug.**

# %% [markdown]
# ## 6. Broken on purpose
#
# With four processes there are four places to fail. The rank that fails first is rarely the one whose message you see
# first: the others wait for it, lose the connection, and complain as well. Here rank 2 finds a bad value while the
# others already wait for it.

# %% tags=["raises-exception"] raises="RankError: rank 2: ValueError: my batch holds a NaN"
def fragile(rank):
    if rank == 2:
        raise ValueError("my batch holds a NaN")
    dist.barrier()

ranks.run(fragile)

# %% [markdown]
# Read the line that begins with **RankError**. It names the rank that failed first, and that rank's own error, not the
# broken connections that followed. Below it is the line where it happened on that rank. Tools on a cluster do not all
# do you this favour; lesson 01 shows what the raw messages look like. The ranks can be used again at once:

# %% tags=["nbval-check-output"]
print(ranks.run(add_up))
ranks.close()

# %% [markdown]
# **Takeaway: in a distributed job look for the first error of the first rank. What comes after it is usually an echo.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Sections 4 to 6 take 15 minutes. Ask the room what the curve would look like with four ranks
# instead of two. (The same: the recipe divides one batch over the ranks, and lesson 04 shows why that changes nothing.)
# Show the first lines of a real job log with an echo, if you have one.

# %% [markdown]
# ## From here to GPUs and SLURM
#
# The program does not change; what starts it does. With GPUs, each rank takes one, and the ranks talk through NCCL,
# NVIDIA's library for that; without, they use CPU cores and a library called gloo. `labcode.comm.bootstrap` decides
# this in one place.
#
# | where | start | who tells the rank |
# |---|---|---|
# | one process | `python -m labcode.train gpt_tiny` | nobody: rank 0 of 1 |
# | 8 GPUs of one machine | `torchrun --nproc-per-node=8 -m labcode.train gpt_tiny` | torchrun: `RANK`, `WORLD_SIZE` |
# | SLURM | `srun --ntasks-per-node=8 python -m labcode.train gpt_tiny` in a job | SLURM: `SLURM_PROCID`, `SLURM_NTASKS` |
#
# ## Questions
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
# It does not exist there. Ranks share no variables; whoever needs the number must be sent it.
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
# | rank | one process, own memory | `pool.ranks.Ranks`, `comm.bootstrap` |
# | collective | all ranks call it, or all wait | `comm.collectives` |
# | first loss | ln(vocabulary) | `python -m labcode.train` |
# | launcher | one process per rank | `launch.run` |
#
# ## Where to go
#
# Lesson 01 shows what ranks say to each other, and what it costs. `COURSE.md` has the map of the whole course, with the
# lessons that each one needs, and short ways for one goal each.
#
# You can begin a lesson in the middle, or go on there the next day: click on the cell that you want to run, and choose
# *Run > Run All Above Selected Cell*. Open exercises stop nothing.
#
# ## Sources
#
# - Brown et al. 2020, *Language Models are Few-Shot Learners*, arXiv:2005.14165, table D.1: training compute of GPT-3.
# - Rajbhandari et al. 2020, *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models*, arXiv:1910.02054,
#   section 3.1: 16 bytes for each parameter.
# - Chowdhery et al. 2022, *PaLM*, arXiv:2204.02311, appendix B: what share of the peak a good training run reaches.
# - Peaks of GPUs: NVIDIA's datasheets, named next to each number in `labcode/hardware.py`.
# - torchrun and its environment variables: docs.pytorch.org/docs/stable/elastic/run.html.
