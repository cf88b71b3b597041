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
# # 12 · Pipeline parallel
#
# Tensor parallelism cuts each layer and talks four times per layer, so it stays inside a node. **Pipeline parallelism** cuts between layers: the first ranks hold the
# first layers, the last ranks the last. Little travels, and it may travel far. The price is waiting: a rank can do nothing until its neighbour has. This lesson is
# about the order of the work, which decides how long the ranks wait and how much they must keep.
#
# ## Goals
#
# - predict the idle time and the memory of four schedules, simulate them, run them, and compare;
# - write the order of 1F1B for one rank, and explain each gap in its time line;
# - split a backward pass in two, and say what that is good for;
# - know what a pipeline sends, what goes wrong, and how to see it before it hangs.
#
# **Time**: 90 minutes. **Needs**: lessons 04 (gradient accumulation) and 09 (tensor parallel).

# %%
import math
from dataclasses import replace

import torch
import torch.nn.functional as F

from labcode.comm.counting import counted
from labcode.comm.grid import Grid
from labcode.config import GPTConfig, ParallelConfig
from labcode.models import gpt, layers
from labcode.models.parallelize import parallelize
from labcode.perf import alpha_beta as comm
from labcode.perf import pipeline
from labcode.perf.pipeline import StageTimes, simulate
from labcode.pool.ranks import RankError, Ranks
from labcode.schedules import Action, check_schedule, schedule
from labcode.teach.check import check, compare
from labcode.teach.exercises import l12
from labcode.teach.figures import plot
from labcode.teach.labs import l12_paced_pipeline as stages
from labcode.teach.labs.l09_shards import adamw_steps
from labcode.topology import GridShape

ranks = Ranks(4)

# %% [markdown]
# ## 1. The naive split
#
# Cut a model of many layers into four **stages** of equal length, one on each rank. Rank 0 runs its layers, sends the output to rank 1, and so on; the last rank
# computes the loss. Backward goes the other way: each rank sends the gradient of its **input** to the rank before.
#
# Call the time of a stage's forward $t_F$ and of its backward $t_B$. Backward computes two gradients, of the input and of the weights, so $t_B \approx 2\,t_F$.
#
# `schedule` gives the order of each rank as plain data. `F0` is the forward of micro-batch 0, `B0` its backward, and a point is a rank that waits. So far there is one
# micro-batch: the whole batch.

# %% tags=["nbval-check-output"]
naive = schedule("gpipe", num_stages=4, num_microbatches=1)
print(naive)
print(stages.table(naive, 4))

# %% [markdown]
# **A fair clock.** Your machine may have two cores for four ranks. Ranks that compute would then wait for a core, not for each other, and no schedule could be seen. So the
# stages of sections 1 to 5 are **emulated**: each action does its arithmetic, which is tiny, and then **sleeps** until its time is up. A sleeping rank needs no core.
# It stands for a rank whose GPU is busy. Everything else is real: processes, messages, waiting, gradients.
#
# Here t_F = 30 ms, and t_B = 60 ms. **Predict.** Which share of the time does a rank of four wait? How long does the step take?

# %% tags=["predict"]
idle_guess = 3 / 4  # (p - 1) / p: one rank works at a time
step_guess = 4 * (0.030 + 0.060)

# %% tags=["figure"]
T = 0.030
results = {}

def run(name, v=1, m=8):
    """Simulate a schedule with v stages on each rank, run it, and keep both time lines and what the ranks report."""
    actions, stage_s = schedule(name, 4 * v, m, 4), StageTimes(T / v, T / v, T / v)
    played = ranks.run(stages.run_schedule, actions, 4 * v, m, stage_s, repeats=3)
    print("gradients equal to one process to 1e-12:", stages.difference(played, 4 * v, m) < 1e-12)
    results[name, m] = simulate(actions, stage_s), stages.timeline(played), played
    return results[name, m]

simulated, measured, _ = run("gpipe", m=1)
compare("share of the time idle", idle_guess, measured.bubble_over_total())
compare("one step", step_guess, measured.total_s, unit="s")
hop_s = (measured.total_s - simulated.total_s) / 6
print(f"a message costs about {1e3 * hop_s:.1f} ms, {hop_s / T:.0%} of a forward")
stages.picture(simulated, measured, title="The whole batch at once",
               alt="One bar after the other runs down the four ranks and up again; at any time three ranks are idle, simulated as measured")

# %% [markdown]
# Four ranks, and no faster than one: the model fits, that is all.
#
# - `simulate` needs no ranks. It starts each action as soon as its rank is free and its input is there. The measured time line, the median of three steps, lies under it.
# - It is a little longer, because a message takes time. There are 6 of them, one after the other; what is over, divided by 6, is the price of a message here, with Python, gloo,
#   and a process that has to wake up.
#
# **Takeaway: cut by layers and pass one batch through: p ranks, the speed of one, and each is idle for (p−1)/p of the time.**
#
# ## 2. Micro-batches
#
# The cure: cut the batch into $m$ **micro-batches** and send them one behind the other. Gradients add up as in lesson 04, so the result is that of the whole batch. **GPipe** does
# all forwards, then all backwards:

# %% tags=["nbval-check-output"]
print(stages.table(schedule("gpipe", 4, 8), 4))

# %% [markdown]
# A column is a tick, one action, however long it takes. The last rank begins $p-1$ forwards late and ends $p-1$ backwards early; between, it never waits. So a step takes
# $(m + p - 1)(t_F + t_B)$, and each rank works for $m\,(t_F + t_B)$ of that. The difference is the **bubble**. Papers divide it by two different times:
#
# $$\frac{\text{bubble}}{\text{work}} = \frac{p-1}{m} \qquad\qquad \frac{\text{bubble}}{\text{whole time}} = \frac{p-1}{m+p-1}$$
#
# Know which one you read. Here $p=4$, $m=8$, and a micro-batch takes as long as section 1's whole batch did: eight times the work. A rank keeps a micro-batch's activations
# from its forward to its backward.
#
# **Predict.** Bubble over work; the step; the most micro-batches that rank 0 keeps at once.

# %% tags=["predict"]
gpipe_guess = 3 / 8
gpipe_step_guess = (8 + 3) * 3 * 0.030
gpipe_kept_guess = 8

# %% tags=["figure"]
simulated, measured, played = run("gpipe")
compare("bubble / work", gpipe_guess, measured.bubble_over_ideal())
compare("one step", gpipe_step_guess, measured.total_s, unit="s")
compare("micro-batches kept by rank 0", gpipe_kept_guess, played[0].peak, within=1)
stages.picture(simulated, measured, title="GPipe, 8 micro-batches",
               alt="Forwards form a slanted block, backwards one that slants the other way; triangles of idle time lie at the corners and between them")

# %% [markdown] tags=["exercise"]
# Eight times the work of section 1 in less than three times the time. The measured bubble is a little larger than the formula's, which knows no
# messages, no process that wakes up late, and no Python between two actions. All of these cost a fixed time, whatever $t_F$ is: on longer stages they count for less.
#
# ### Exercise 12.1 · How many are enough?
#
# Write the fewest micro-batches with which $p$ ranks wait at most a given share of the **whole** time. Then put in 8 ranks and 5 %, and think of what the batch has to be.

# %% tags=["exercise"]
def enough(p, share):
    """A whole number."""
    ### BEGIN SOLUTION
    return math.ceil((p - 1) * (1 - share) / share)
    ### END SOLUTION

# %% tags=["check"]
check("12.1", lambda: l12.enough(enough))

# %% [markdown] tags=["exercise"]
# **Takeaway: the bubble is (p−1)/m of the work. More micro-batches shrink it, and GPipe pays for each of them with memory.**
#
# (Here GPipe is the order alone. The system of that name also recomputes activations: it keeps only the input of each stage, and pays with about one more forward.)
#
# ## 3. One forward, one backward
#
# Why keep all m? Rank 3 has the loss of micro-batch 0 and could go back at once. Then its activations are free before the next forward. **1F1B** does so on each rank:
#
# 1. **Warm-up**: as many forwards as there are ranks behind, p − 1 − r on rank r (not more than m). By then a backward is on its way.
# 2. **Steady state**: one forward and one backward, in turn, until there are no forwards left.
# 3. **Cool-down**: the backwards that are left.
#
# ### Exercise 12.2 · The order of one rank
#
# Write the list of actions of rank `rank` of `p`, for `m` micro-batches, one stage per rank. `Action("F", rank, 3)` is the forward of micro-batch 3. The check plays your
# order for several p and m, then runs it on the four ranks. You cannot make them hang: what could is refused before.

# %% tags=["exercise"]
def my_order(rank, p, m):
    """[Action, ...], F and B of each micro-batch once."""
    ### BEGIN SOLUTION
    forwards, backwards = ([Action(kind, rank, i) for i in range(m)] for kind in "FB")
    warmup = min(p - 1 - rank, m)
    order = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards):
        order += [forward, backward]
    return order + backwards[m - warmup:]
    ### END SOLUTION

# %% tags=["check"]
check("12.2", lambda: l12.one_f_one_b(my_order, ranks))

# %% tags=["nbval-check-output"]
print(stages.table(schedule("1f1b", 4, 8), 4))

# %% [markdown]
# **Predict.** (a) Bubble over work: more, less or the same as with GPipe? (b) How many micro-batches does rank 0 keep now, and how many rank 3? (c) Rank 0 has a gap between
# `F3` and its first backward. How long is it? Follow micro-batch 0 from there.

# %% tags=["predict"]
same_guess = 3 / 8
first_kept_guess, last_kept_guess = 4, 1  # p - r
gap_guess = 3 * 0.060  # (p - 1) t_B

# %% tags=["figure"]
simulated, measured, played = run("1f1b")

def gap_s(line, rank):
    """Between a rank's last forward before its first backward and that backward."""
    rows = [row for row in line.rows if row.rank == rank]
    first = next(i for i, row in enumerate(rows) if row.action.kind == "B")
    return rows[first].start_s - rows[first - 1].stop_s

compare("bubble / work", same_guess, measured.bubble_over_ideal())
for rank, guess in ((0, first_kept_guess), (3, last_kept_guess)):
    compare(f"micro-batches kept by rank {rank}", guess, played[rank].peak, within=1)
compare("gap on rank 0", gap_guess, gap_s(measured, 0), unit="s")
stages.picture(simulated, measured, title="1F1B, 8 micro-batches",
               alt="After the warm-up forwards and backwards alternate; rank 0 has a long gap before its first backward and short ones between its last")

# %% [markdown]
# The bubble is the same, the memory is not: at most p micro-batches, however large m is. That is all that 1F1B wins, and it is much: now m may grow.
#
# The **gap between forward and backward** surprises everyone who sees a first profile. Is something slow? No. Rank $r$ did its $p-r$ forwards in time, and meanwhile micro-batch 0
# travelled to the last rank. It must still come back through all ranks behind $r$: their $p-1-r$ backwards. Until then nothing that rank $r$ may do is left.
# The whole bubble of a rank, piece by piece:
#
# | where | length |
# |---|---|
# | start, nothing has arrived yet | $r\,t_F$ |
# | before the first backward | $(p-1-r)\,t_B$ |
# | between the backwards of the cool-down | $(p-1-r)\,t_F$ |
# | end, the ranks before still work | $r\,t_B$ |
#
# Together $(p-1)(t_F + t_B)$, on each rank.

# %% tags=["nbval-check-output"]
for rank in range(4):
    rows = [row for row in simulated.rows if row.rank == rank]
    start, gap, end = rows[0].start_s, gap_s(simulated, rank), simulated.total_s - rows[-1].stop_s
    parts = {"start": start, "gap": gap, "cool-down": simulated.bubble_s(rank) - start - gap - end, "end": end}
    print(f"rank {rank}:", ", ".join(f"{name} {1e3 * abs(part):3.0f} ms" for name, part in parts.items()))

# %% [markdown]
# Is the memory real? A GPT of 6 layers on four ranks, cut by `parallelize` (section 8). `saved_bytes` of lesson 10 asks autograd what it holds on rank 0 after each forward.
# Your two predictions for rank 0 should hold for its largest value, as a multiple of what one micro-batch needs.

# %% tags=["nbval-check-output"]
from labcode.perf.saved_bytes import saved_bytes

config = GPTConfig(vocab_size=83, context_length=32, num_layers=6, num_heads=4, hidden_size=64)
tokens = torch.randint(83, (5, 8, 2, 33), generator=torch.Generator().manual_seed(0))  # 5 steps of 8 micro-batches of 2 samples
batches = [[(tokens[..., :-1], tokens[..., 1:]) for tokens in step] for step in tokens]

def build():
    return layers.initialize(gpt.GPT(config), 0).double()

def held(rank, name):
    """Largest number of bytes that autograd holds on this rank, over that of one micro-batch."""
    model, found = parallelize(build(), Grid.create(GridShape(pp=4)), ParallelConfig(pipeline_schedule=name)), []
    model.on_action = lambda action, started_s, stopped_s: found.append(saved.total())
    with saved_bytes(model.module) as saved:
        model.forward_backward(batches[0])
    return max(found) / found[0]

compare("GPipe, bytes of rank 0", gpipe_kept_guess, round(ranks.run(held, "gpipe")[0], 3), within=1)
compare("1F1B, bytes of rank 0", first_kept_guess, round(ranks.run(held, "1f1b")[0], 3), within=1)

# %% [markdown]
# **Takeaway: 1F1B has GPipe's bubble and keeps p micro-batches in place of m. Rank 0 keeps the most; its gap before the first backward is the way back.**
#
# ## 4. Interleaved
#
# The bubble is $p-1$ stages long. Make stages shorter! Give each rank $v$ of them: of 16 layers, rank 0 holds 0-1 **and** 8-9. Each stage is $1/v$ as long, and so is the way to the
# last rank. A micro-batch goes round $v$ times. In the table the second stage of a rank is written small, and columns are narrow:

# %% tags=["nbval-check-output"]
print(stages.table(schedule("interleaved", num_stages=8, num_microbatches=8, num_ranks=4), 8))

# %% [markdown]
# Nothing is free. Count the boundaries between ranks: 3 before, 7 now, each crossed twice by every micro-batch. And warm-up is longer:
# $2\,(p-1-r) + (v-1)\,p$ forwards, of stages half as large, and then, as in 1F1B, one more before the first backward. And m has to be a multiple of p.
#
# **Predict.** Bubble over work; messages in a step, of all ranks; the most that rank 0 keeps, in whole stages' worth (v = 2).

# %% tags=["predict"]
interleaved_guess = 3 / (2 * 8)
messages_guess = 7 * 2 * 8
interleaved_kept_guess = (2 * 3 + 4 + 1) / 2

# %% tags=["figure"]
simulated, measured, played = run("interleaved", v=2)
compare("bubble / work", interleaved_guess, measured.bubble_over_ideal())
compare("messages", messages_guess, sum(one.sent[0] for one in played), within=1)
compare("kept by rank 0, whole stages", interleaved_kept_guess, played[0].peak / 2, within=1)
stages.picture(simulated, measured, title="Interleaved, two stages on each rank",
               alt="Bars are half as long, and each rank changes between its two stages; the triangles of idle time are half as large")

# %% [markdown]
# The simulated bubble is half as large. The measured one not quite: there are more than twice as many messages, on actions half as long.
#
# **Takeaway: v stages on each rank divide the bubble by v, and multiply the messages by about v. It pays where a message is short beside a stage.**
#
# ## 5. Nobody waits for a weight's gradient
#
# The backward of a linear layer $y = xA^\top$ computes two things:
#
# - **I**, $dx = dy\,A$: the rank before waits for it;
# - **W**, $dA = dy^\top x$: nobody waits for it, until the optimizer does.
#
# So split B into I and W. A rank sends I's result at once and does W later, when it would be idle. `labcode.parallel.deferred` does this: inside a pipeline each `F.linear`
# leaves the pair (dy, x) to a store, and W works through it.
#
# ### Exercise 12.3 · Two halves
#
# Write both. `grad` is dy, [.., outputs], `x` is [.., inputs], `weight` is [outputs, inputs], as PyTorch keeps it. There may be several leading dims.

# %% tags=["exercise"]
def input_half(grad, weight):
    """dx, [.., inputs]."""
    ### BEGIN SOLUTION
    return grad @ weight
    ### END SOLUTION

def weight_half(grad, x):
    """dA, [outputs, inputs]."""
    ### BEGIN SOLUTION
    return grad.flatten(0, -2).T @ x.flatten(0, -2)
    ### END SOLUTION

# %% tags=["check"]
check("12.3", lambda: l12.halves(input_half, weight_half))

# %% tags=["nbval-check-output"]
print(stages.table(schedule("zero_bubble", 4, 8), 4))

# %% [markdown]
# This is ZB-H1 of Qi et al. 2023. It looks like 1F1B with I in place of B. Rank r does each W $r$ micro-batches late: rank 0 fills the gaps between its last I, rank 3 has four W for the end.
# With $m \ge p$ and $t_W \le t_F, t_I$ the bubble is
#
# $$(p-1)\,(t_F + t_I - t_W).$$
#
# Activations are free after **W**, not after I. The schedule never lets a rank keep more than p micro-batches, but on the last ranks it keeps more than 1F1B.
#
# **Predict** for t_F = t_I = t_W = 30 ms: bubble over work; micro-batches kept by rank 0 and by rank 3.

# %% tags=["predict"]
zero_guess = 3 * 1 / (8 * 3)
zero_first_guess, zero_last_guess = 4, 4

# %% tags=["figure"]
simulated, measured, played = run("zero_bubble")
compare("bubble / work", zero_guess, measured.bubble_over_ideal(), within=1.5)
for rank, guess in ((0, zero_first_guess), (3, zero_last_guess)):
    compare(f"micro-batches kept by rank {rank}", guess, played[rank].peak, within=1)
stages.picture(simulated, measured, title="Zero bubble (ZB-H1), 8 micro-batches",
               alt="Weight halves fill the gaps at the end of each rank; only the triangle at the start and a short gap before the first I are left")

# %% [markdown]
# A third of 1F1B's bubble, with the same peak. The name promises more than H1 keeps; the same paper's ZB-H2 comes to about zero with about twice the memory. Three forwards' worth
# of waiting is left, and beside that a few late messages weigh more than before: the smaller the bubble, the more the rest counts.
#
# Now all of them: the formula, the simulator, the simulator with the `hop_s` of section 1 for each message, and the run.

# %% tags=["figure"]
names = {(name, m): f"{name}, m = {m}" for name, m in results}
predicted = {(name, m): pipeline.bubble_over_ideal(name, 4, m, 2 if name == "interleaved" else 1) for name, m in results}
print(f"{'bubble / work':20}formula simulated +messages measured   kept by rank 0 to 3, in stages of a rank")
for (name, m), (simulated, measured, played) in results.items():
    v = 2 if name == "interleaved" else 1
    delayed = simulate(schedule(name, 4 * v, m, 4), StageTimes(T / v, T / v, T / v), message_s=hop_s)
    row = [predicted[name, m], *(line.bubble_over_ideal() for line in (simulated, delayed, measured))]
    print(f"{names[name, m]:18}", *(f"{value:9.4g}" for value in row), "  ", *(one.peak / v for one in played))
plot.bars({names[key]: {"formula": predicted[key], "measured": results[key][1].bubble_over_ideal()} for key in results if key[1] > 1},
          ylabel="bubble / work", fmt="{:.3g}", title="Four ranks, eight micro-batches",
          alt="GPipe and 1F1B have the same bubble, interleaved about half, zero bubble about a third; measured bars are a little longer")

# %% [markdown]
# - **Time**: with `hop_s` for each message the simulator comes close to the run, and is sometimes a little above it. No wonder: `hop_s` is all that section 1 took too long, Python
#   and late processes included; and in a run, a stage that sleeps a little too long counts as work.
# - **Memory** is exact: it follows from the order alone.
#
# **Takeaway: only I is in the way of the others. W fills gaps: a third of the bubble for the memory of 1F1B's first rank, on every rank.**
#
# ## 6. Broken on purpose
#
# A schedule is a promise between ranks: each message has a sender, and nobody waits in a circle. If it is broken, the ranks wait for ever, and a cluster bills for it. So it is
# refused before any rank begins. Here rank 0 wants the gradient of micro-batch 0 before it sends micro-batch 1, and rank 1 wants micro-batch 1 before it gives any gradient.

# %% tags=["raises-exception"] raises="ValueError: rank 0 cannot start 0B0: it waits for 1B0 of rank 1"
wrong = {0: "0F0 0B0 0F1 0B1", 1: "1F0 1F1 1B0 1B1"}
check_schedule({rank: [Action.parse(text) for text in row.split()] for rank, row in wrong.items()}, num_stages=2, num_microbatches=2)

# %% [markdown]
# Read the message from its end: the two links of the circle, what each rank is at and whom it waits for. Either rank can break the circle:
# rank 1 with `1B0` before `1F1`, or rank 0 with `0F1` before `0B0`.
#
# The second kind of failure comes in the middle of a step: a stage raises, out of memory or a bad shape. The other ranks wait for its output. What do they say?

# %%
import time


class Broken(torch.nn.Module):
    def forward(self, x, inputs=None):
        raise ValueError("this stage expects 17 features, not 16")

begin = time.perf_counter()
try:
    ranks.run(stages.run_schedule, schedule("1f1b", 4, 8), 4, 8, stages={2: Broken()})
except RankError as error:
    print(f"after {time.perf_counter() - begin:.1f} s: {error}")

# %% [markdown]
# One message: the rank, the stage, the action, the reason. Rank 3 waits for an activation and rank 1 for a gradient, and both are told to stop; the pool goes on with a new process
# group. `torchrun` also ends the others when one fails. Without either, they would only say after their time-out that somebody did not answer.
#
# **Takeaway: check a schedule as data, where it costs nothing; at run time the first error is the one to read, and it names the stage.**
#
# ## 7. PyTorch's runner
#
# `torch.distributed.pipelining` has the same schedules. A `PipelineStage` wraps a module; the schedule object is also the runner. Does it compute the same gradients, from the
# same stages?

# %% tags=["nbval-check-output"]
from torch.distributed import pipelining

from labcode.parallel import torch_schedules


def theirs(rank, make, v, m=8):
    """{stage: gradient} of this rank, by PyTorch's runner."""
    own = {number: stages.Stage(number) for number in range(rank, 4 * v, 4)}
    wrapped = [pipelining.PipelineStage(module, number, 4 * v, torch.device("cpu")) for number, module in own.items()]
    runner = make(wrapped if v > 1 else wrapped[0], m, loss_fn=F.mse_loss)
    x, y = (part.flatten(0, 1) for part in stages.batches(m))  # it cuts the batch itself
    runner.step(*([x] if rank == 0 else []), **({"target": y} if rank == 3 else {}))
    return {number: module.gradient() for number, module in own.items()}

for make, v in ((pipelining.ScheduleGPipe, 1), (pipelining.Schedule1F1B, 1), (pipelining.ScheduleInterleaved1F1B, 2)):
    whole, found = stages.gradients(4 * v, 8), ranks.run(theirs, make, v)
    off = max((grad - whole[number]).abs().max() for own in found for number, grad in own.items())
    print(f"{make.__name__:24} gradients of one process to 1e-12: {off < 1e-12}")

# %% [markdown]
# Now the other way: PyTorch also keeps a schedule as a list of actions, writes them as we do (`1F3`), and has a validator. `torch_schedules.validate` puts ours through it. Then
# we give both validators a schedule in which rank 1 does its first forward **twice**.

# %% tags=["nbval-check-output"]
for name, v in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1)):
    lowered = torch_schedules.validate(schedule(name, 4 * v, 8, 4), 4 * v, 8)
    print(f"{name:12} accepted by PyTorch, with {sum('SEND' in str(action) for row in lowered.values() for action in row)} sends")
doubled = schedule("1f1b", 4, 8)
doubled[1].insert(1, doubled[1][0])
for validate in (torch_schedules.validate, check_schedule):
    try:
        validate(doubled, 4, 8)
        print(f"{validate.__module__}: nothing wrong")
    except ValueError as error:
        print(f"{validate.__module__}: {error}")

# %% [markdown]
# PyTorch's counts with sets (torch 2.13), and a set does not grow by what it has already. Such a rank would compute a micro-batch twice and send it twice.
#
# - **Messages**: for several stages per rank PyTorch makes a list of sends and receives from the schedule; its GPipe and 1F1B are hand-written loops. Ours derives both ends of a
#   message from one table of ticks.
# - **Shapes**: PyTorch finds them out by itself, and can cut a model by tracing it. Ours is short enough to read.
#
# **Takeaway: a schedule is data, and data can be checked by two programs that know nothing of each other.**
#
# ## 8. A whole GPT
#
# Three things are new in a real model:
#
# - **Tied embeddings**: the table of the vocabulary is the first layer and the last, so the first **and** the last stage hold it. Each sees a part of its gradient, and the two
#   parts are summed after backward.
# - **Uneven stages**: 6 layers do not go into 4.
# - **Other axes**: each stage may be cut by tp, copied by dp.
#
# Five steps of AdamW in float64, against one process. In the last line the sum over the tied weight is forgotten.

# %%
def train(rank, shape, config, tied=True):
    """Losses, all weights, and this rank's copy of the tied weight if it has one."""
    model, losses = parallelize(build(), Grid.create(shape), config), []
    model.shardings = {name: replace(place, tied=place.tied and tied) for name, place in model.shardings.items()}
    optimizer = torch.optim.AdamW(model.module.parameters(), lr=3e-3)
    for step in batches:
        optimizer.zero_grad()
        losses.append(model.forward_backward(step))
        optimizer.step()
    own = dict(model.module.named_parameters())
    return torch.stack(losses), dict(model.full_state_dict()), own.get("embed.weight", own.get("head.weight"))

# %% tags=["nbval-check-output"]
whole = build()
truth = adamw_steps(whole, gpt.loss, [tuple(map(torch.cat, zip(*step))) for step in batches])  # the batch uncut
runs = {"pp 4, 1F1B": (GridShape(pp=4), ParallelConfig()), "pp 4, zero bubble": (GridShape(pp=4), ParallelConfig(pipeline_schedule="zero_bubble", layers_per_stage=(1, 2, 2, 1))),
        "pp 2, dp 2, layers 4 + 2": (GridShape(dp=2, pp=2), ParallelConfig(layers_per_stage=(4, 2))),
        "pp 2, tp 2, interleaved": (GridShape(pp=2, tp=2), ParallelConfig(pipeline_schedule="interleaved", stages_per_rank=3)),
        "pp 4, tied sum forgotten": (GridShape(pp=4), ParallelConfig(), False)}
for name, options in runs.items():
    (losses, found, first), *_, (_, _, last) = ranks.run(train, *options)
    off = max((found[key] - weight).abs().max() for key, weight in whole.state_dict().items())
    copies = "" if "tp" in name else f"; tied copies equal: {torch.equal(first, last)}"
    same = (losses - truth).abs() < 1e-12
    print(f"{name:25} to 1e-12: first loss {same[0]}, all {same.all()}, weights {off < 1e-12}{copies}")

# %% [markdown]
# Forget the sum, and the first loss is right, the next ones are wrong, and the two copies drift apart. Nothing fails. It is the bug of lesson 09 again, in another place.
#
# What travels? Between two stages [B, S, H] forward, its gradient backward, for each micro-batch, whatever the stage holds. Tensor parallelism sends all-reduces of the same size,
# four in each layer, one for the embedding, one for the head. Here act = 2 · 32 · 64 · 8 bytes, 6 layers.
#
# **Predict.** Bytes that a rank sends per micro-batch: an inner rank of pp = 4, and any rank of tp = 4. (A ring's all-reduce sends $2\frac{p-1}{p}$ of its tensor.)

# %% tags=["predict"]
pp_guess = 2 * (2 * 32 * 64 * 8)
tp_guess = (4 * 6 + 2) * 2 * 3 / 4 * (2 * 32 * 64 * 8)

# %% tags=["nbval-check-output"]
def sends(rank, shape):
    """Bytes that this rank sends for activations and their gradients, per micro-batch."""
    model = parallelize(build(), Grid.create(shape))
    with counted() as calls:
        model.forward_backward(batches[0])
    kind = "send" if shape.pp > 1 else "all_reduce"
    return sum(comm.bytes_sent(call.kind, call.group_size, call.num_bytes) for call in calls if call.kind == kind) / len(batches[0])

pp_bytes, tp_bytes = (ranks.run(sends, shape)[1] for shape in (GridShape(pp=4), GridShape(tp=4)))
compare("pp = 4, an inner rank", pp_guess, pp_bytes, within=1, unit="B")
compare("tp = 4", tp_guess, tp_bytes, within=1.01, unit="B")
print(f"tensor parallelism sends {tp_bytes / pp_bytes:.0f} times as much")

# %% [markdown]
# The small rest at tp is the loss. With more layers the ratio grows. And a rank that sends goes on with the next micro-batch. So pp is the axis that may leave the node.
#
# ### Exercise 12.4 · Who gets fewer layers?
#
# The slowest stage sets the pace. The head has V·H weights, a layer 12·H²: it costs as much as V/(12 H) layers, two for GPT-2's vocabulary and H = 2048. Deal 14 layers out over
# 4 ranks, 16 micro-batches of 1F1B, the head on the last rank; the embedding costs nothing. `l12.step_units(layers)` says how long a step takes. Then go on: which stage would you
# relieve if **memory** were short?

# %% tags=["exercise"]
### BEGIN SOLUTION
my_layers = (4, 4, 4, 2)  # four units everywhere
### END SOLUTION

# %% tags=["check"]
check("12.4", lambda: l12.layers(my_layers))

# %% tags=["nbval-check-output"]
even = [len(layers) for layers in ParallelConfig().stage_layers(14, 4)]
print(f"head: {50257 / (12 * 2048):.1f} layers; as even as they go, {even}: {l12.step_units(even):.0f} units a step")
ranks.close()

# %% [markdown]
# <details><summary>And if memory is short?</summary>
#
# Under 1F1B the first rank keeps p micro-batches, the last keeps one: relieve the first. But the last has the logits, [B, S, V]. Llama 3 takes one layer from the first stage and one
# from the last.
# </details>
#
# **Takeaway: a pipeline sends B·S·H per boundary and direction, little enough for any link. Balance the stages, sum what is tied, compare with one process.**
#
# ## From here to GPUs and SLURM
#
# | where | start |
# |---|---|
# | 4 GPUs of one machine | `torchrun --nproc-per-node=4 -m labcode.train gpt_10m --parallel.pp 4 --train.micro-batch 4` |
# | another schedule | `--parallel.pipeline_schedule zero_bubble`; `--parallel.pipeline_schedule interleaved --parallel.stages-per-rank 2 --parallel.pp 2` |
# | SLURM, inside a job of two nodes | `srun --nodes=2 --ntasks-per-node=4 python -m labcode.train gpt_10m --parallel.pp 2 --parallel.tp 2` |
#
# In the default order pp is the slowest axis, so it crosses the nodes. (Under `srun`, export `MASTER_ADDR` and `MASTER_PORT` first, as in lesson 04.) The number of
# micro-batches is the batch of a dp rank divided by `micro-batch`. On GPUs stages really compute, and t_W is rarely equal to t_I. `model.on_action` is told when each action
# ran: put the times of your stages into `simulate`, and choose before you submit.

# %% [markdown]
# ## Recap
#
# | schedule | bubble / work | rank 0 keeps | in labcode |
# |---|---|---|---|
# | naive | p − 1 | 1 (all of the batch) | `schedule("gpipe", p, 1)` |
# | GPipe | (p−1)/m | m | `labcode.schedules` |
# | 1F1B | (p−1)/m | p | `labcode.schedules` |
# | interleaved | (p−1)/(v m) | p (1 + (p−1)/(p v)) | `labcode.schedules` |
# | zero bubble, H1 | (p−1)(t_F + t_I − t_W)/(m t) | p, as every rank | `parallel.deferred` |
#
# Here t = t_F + t_I + t_W. `perf.pipeline` simulates, `parallel.pipeline` runs, `schedules.check_schedule` refuses; a tied weight is summed over first and last stage
# (`parallel.weights`); 2 B·S·H travel per micro-batch and boundary.
#
# ## Sources
#
# - Huang et al. 2019, *GPipe*, arXiv:1811.06965.
# - Narayanan et al. 2019, *PipeDream*, doi 10.1145/3341301.3359646.
# - Narayanan et al. 2021, arXiv:2104.04473, section 2.2: 1F1B, interleaved.
# - Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.3: memory when interleaved.
# - Qi et al. 2023, *Zero Bubble Pipeline Parallelism*, arXiv:2401.10241.
# - Llama Team 2024, arXiv:2407.21783, section 3.3: uneven stages.
# - docs.pytorch.org: `torch.distributed.pipelining`.
