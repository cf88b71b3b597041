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
# Tensor parallelism cuts every layer, and its ranks have to communicate several times in each one. That is why it stays
# inside a node. **Pipeline parallelism** cuts the model between its layers: the first rank holds the first layers, the
# last rank the last ones. Little has to be sent, and it may travel far. The price is waiting: a rank can do nothing
# until its neighbour has done its part. In this lesson you write the order in which the ranks work, and the program that
# runs such an order with sends and receives.
#
# ## Goals
#
# - write two schedules, GPipe and 1F1B, and the runner that executes them;
# - predict how long ranks wait and how much they keep, and explain every gap in a time line;
# - recognise a schedule that hangs, and know how to see it before it costs money;
# - say what a pipeline sends, what tied weights need, and which stage sets the pace.
#
# **Time**: 137 minutes, and 58 more for what is optional. Good places for a break are after sections 3 and 6. Sections
# 7 and 8 are two more schedules, and section 9 joins the lessons of this part.
#
# **Needs**: lesson 04 (section 4). For section 3 also lesson 01 (section 4); for section 4 also lesson 10 (section 2);
# for section 6 also lesson 08 (section 2) and lesson 09 (sections 4 and 6); for section 9 also lesson 09 (section 4)
# and lesson 10 (section 2).

# %%
import torch
import torch.distributed as dist

from course.lab import check, compare, plot
from course.labs import l12_paced_pipeline as stages
from course.pool.ranks import Ranks
from labcode.perf.pipeline import StageTimes, bubble_over_ideal, simulate
from labcode.schedules import Action, schedule

ranks = Ranks(4)
STAGE_S = StageTimes(forward_s=0.030, input_s=0.030, weight_s=0.030)

# %% [markdown]
# ## 1. Stages and their messages (core, 12 min)
#
# We cut a model of 16 layers into four **stages** of four layers, one on each rank. A batch goes through them like
# this.

# %% tags=["figure"]
plot.stages(4, 4, caption="12.stages")

# %% [markdown]
# - **F**, the forward of a stage: the rank takes its input x, runs its layers, and sends its output y to the next rank.
#   The first rank takes its input from the data, and the last rank computes the loss.
# - **B**, the backward of a stage: the rank receives the gradient of its output, runs backward through its layers, and
#   sends the gradient of its **input** to the rank before.
#
# Between F and B, a rank has to keep what backward will need. Nothing else is sent: the gradients of the weights stay
# where the weights are.
#
# Call the time of F on one stage $t_F$ and the time of B $t_B$. The backward of a linear layer takes two matmuls where
# its forward takes one, so we take $t_B = 2\,t_F$.
#
# A **schedule** says which rank does what in which order. In labcode it is plain data, a list of actions for each rank.
# Here is the simplest one, printed as a table, where a column is one action and a dot marks a rank that waits.

# %% tags=["nbval-check-output"]
whole_batch = schedule("gpipe", num_stages=4, num_microbatches=1)
print("rank 1 does", whole_batch[1])
print(stages.table(whole_batch, 4))

# %% [markdown]
# `1F0` means stage 1, forward, part 0 of the batch. So far the batch has only one part.
#
# **A fair clock.** Your machine may have two cores for four ranks. If all four computed, they would wait for a core
# rather than for each other, and the schedule would be invisible. So the stages here are **emulated**: each action does
# its arithmetic, which is tiny, and then sleeps until its time is up. A sleeping rank, which needs no core, stands for
# one whose GPU is busy. Everything else is real: the processes, the messages, the waiting and the gradients.
#
# We take 30 ms for F and 60 ms for B. (They stand in `STAGE_S` in the first cell, where B has two halves, as section 7
# explains.)
#
# **Predict.** What fraction of the time does a rank spend waiting?

# %% tags=["predict"]
share_of_waiting = 3 / 4

# %%
naive = stages.play(ranks, "gpipe", 1, STAGE_S)
line = naive.simulated
waiting = line.bubble_over_total()
compare("share of waiting", share_of_waiting, waiting, within=1, found="simulated")
print(f"one step: {1e3 * line.total_s:.0f} ms simulated", end=", ")
print(f"{1e3 * naive.measured.total_s:.0f} ms on the clock")

# %% tags=["figure"]
naive.picture(
    title="One batch at once: four ranks are as slow as one",
    alt="One block after the other runs down the four ranks and up again; "
        "at any time three ranks wait, simulated as measured",
)

# %% [markdown]
# The upper timeline is **simulated**: each action starts as soon as its rank is free and its input is there. The lower
# one was **measured** on the four ranks, as the median of three steps. It is a little longer, because each of the six
# hand-overs costs a message, some Python and the wake-up of a sleeping rank. Your predictions in this lesson are
# compared with the simulation, and the measurement stands below it.

# %% [markdown]
# **Takeaway: if a model is cut into p stages and one batch passes through, the ranks take turns. Each waits for
# (p - 1)/p of the time.** The model fits, and that is all we have gained so far.

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Play it with four people and one sheet of paper before showing the figure. People ask why the
# gradient of the weights is not sent: nobody else has these weights. Others expect $t_B = t_F$; ask them to count the
# matrix products in the backward of y = x A^T.

# %% [markdown]
# ## 2. Micro-batches: GPipe (core, 19 min)
#
# The remedy is to cut the batch into m **micro-batches** and send them one behind the other. While rank 1 works on
# micro-batch 0, rank 0 can already do micro-batch 1. The gradients of the micro-batches add up in `.grad`, as in lesson
# 04, so the step computes the same as before.
#
# The simplest order is that of **GPipe**: each rank first does the forwards of all micro-batches, and then all
# backwards.

# %% [markdown] tags=["exercise"]
# ### Exercise 12.1 · GPipe as data
#
# Write the list of one rank. `Action("F", 2, 5)` is the forward of stage 2 for micro-batch 5. Each rank has one stage,
# which has the same number as the rank, and there are m micro-batches.

# %% tags=["exercise"]
def gpipe_order(rank, m):
    """The actions of one rank: a list of Action(kind, stage, microbatch)."""
    ### BEGIN SOLUTION
    forwards = [Action("F", rank, i) for i in range(m)]
    backwards = [Action("B", rank, i) for i in range(m)]
    return forwards + backwards
    ### END SOLUTION

# %% tags=["check"]
check("12.1", gpipe_order)

# %% [markdown]
# Now take 4 ranks and 8 micro-batches, each of which takes as long as the whole batch of section 1.
#
# **Predict** before we derive it: how many times as long as the step of section 1 does this one take? (An estimate will
# do, so a factor of 1.5 counts as right.) For how many micro-batches does rank 0 have to keep activations at the same
# time?

# %% tags=["predict"]
times_the_first_step = 11 / 4
gpipe_kept = 8

# %%
gpipe = stages.play(ranks, "gpipe", 8, STAGE_S)
line = gpipe.simulated
one_batch = simulate(schedule("gpipe", num_stages=4, num_microbatches=1), STAGE_S)
longer = line.total_s / one_batch.total_s
compare("times as long", times_the_first_step, longer, within=1.5, found="simulated")
compare("kept by rank 0", gpipe_kept, gpipe.kept[0], within=1, found="counted")

# %% tags=["figure"]
gpipe.picture(
    title="GPipe: the bubble is the time to fill and to drain the pipeline",
    alt="The forwards form a slanted block and the backwards one that slants "
        "the other way; ranks wait in the corners and between the two blocks",
)

# %% [markdown]
# Eight times the work of section 1 was done in less than three times the time. How long do p ranks wait with m
# micro-batches? Look at the last rank. Its first input has to pass p - 1 ranks, so the rank starts $(p-1)\,t_F$ late.
# From then on it never waits, because one input after the other arrives. At the end the gradient of its last micro-batch
# has to travel back through the other ranks: $(p-1)\,t_B$. Between the two, the last rank works for $m\,(t_F + t_B)$. So
# a step takes
#
# $$(m + p - 1)\,(t_F + t_B).$$
#
# All ranks work equally long, so each waits for $(p-1)\,(t_F + t_B)$. This is the **bubble**. Papers divide it by two
# different times, so check which one a percentage refers to:
#
# $$\frac{\text{bubble}}{\text{work}} = \frac{p-1}{m} \qquad\qquad \frac{\text{bubble}}{\text{whole time}} =
# \frac{p-1}{m+p-1}$$
#
# Here the bubble is 3/8 = 37.5 % of the work, and 3/11 = 27 % of the whole time.

# %% tags=["nbval-check-output"]
print(f"bubble / work, simulated: {gpipe.simulated.bubble_over_ideal():.3f}")

# %% [markdown]
# (On the clock it is a little larger, since the formula knows no hand-overs.)
#
# **Predict.** What is the smallest number of micro-batches with which 8 ranks wait for at most 6 % of the **whole**
# time?

# %% tags=["predict"]
needed = 110  # 7 / (m + 7) <= 0.06 gives m >= 109.7

# %% tags=["nbval-check-output"]
fewest = 1
while simulate(schedule("gpipe", 8, fewest), STAGE_S).bubble_over_total() > 0.06:
    fewest += 1
compare("micro-batches for 6 %", needed, fewest, within=1, found="simulated")

# %% [markdown]
# That is a lot. With one sample in each micro-batch, every data-parallel copy of the model needs a batch of 110
# samples, and GPipe keeps the activations of all 110.
#
# **Takeaway: the bubble is (p - 1)/m of the work. More micro-batches make it smaller, and GPipe pays for each of them
# with memory.** Here GPipe is the name of the order. The system of that name also uses activation checkpointing: it
# keeps only the input of each stage and runs the forward again before the backward.

# %% [markdown] tags=["solution-only"]
# *For the instructor.* The paper draws the backwards from the last micro-batch to the first, and the check takes that
# order too. A common mistake in the prediction is 116, the answer for bubble / work. Ask: does the bubble depend on
# $t_B / t_F$? (Its share does not.)

# %% [markdown]
# ## 3. The runner (core, 37 min)
#
# A list of actions does nothing by itself. A **runner** takes one action after the other, receives what it needs,
# computes, and sends what others need. You write it now. There are three things to know about PyTorch.
#
# 1. **A tensor from another process has no history.** To autograd, what you receive is an ordinary tensor. If you call
#    `x.requires_grad_()` before you run the stage on it, then backward will end there and leave the gradient in
#    `x.grad`. That is the tensor that the rank before waits for.
# 2. **Backward can start in the middle.** `loss.backward()` starts with the number 1. For a tensor y that is not a
#    loss, `y.backward(gradient)` starts with the gradient that you give.
# 3. **A send must not stop the sender.** `dist.send` may block until the receiver takes the message. If two neighbours
#    send to each other at the same moment, both would wait for ever. `dist.isend` starts to send and returns a handle
#    at once. Keep the handles and call their `wait()` when all is done: if you throw a handle away, its message may
#    never arrive. `dist.recv` does wait, and it should: without its input an action cannot start.
#
# The messages carry no label (NCCL does not support the argument `tag`). Two neighbours agree on which message is which
# because each sends its micro-batches in the order in which the other one asks for them.

# %% [markdown] tags=["exercise"]
# ### Exercise 12.2 · Run a schedule
#
# Complete the runner. It runs on each rank of `group`, with this rank's list of actions and this rank's `stage`, a
# module that you call as `stage(x)`. All micro-batches have the same shape, and the stages do not change it.
#
# - Every rank is given all `inputs` and `targets`, but only the first rank may look at `inputs[i]` (on the others use
#   only its shape), and only the last one at `targets[i]`.
# - `loss(y, targets[i])` is the loss of one micro-batch. The loss of the step is the mean over all of them.
# - Gradients are **added** to what stands in the `.grad` of the stage's parameters, as backward does it: the runner may
#   be called twice before the optimizer steps. Nothing is returned.
# - `inputs` and `targets` belong to the caller and stay as they are. Once B has used what its F kept, release it.
# - A message has to be contiguous in memory; `.contiguous()` copies a tensor only if it is not.
# - Ranks are counted within the group: use `group=group` with `group_src=` and `group_dst=`.
#
# The check runs it on all four ranks, and then in two groups of two at the same time. It plays GPipe, and a second
# schedule: that of the next section.

# %% tags=["exercise"]
def run_actions(actions, stage, loss, inputs, targets, group):
    """Run one rank's actions; the gradients are added to the parameters of `stage`."""
    rank = dist.get_rank(group)
    last = dist.get_world_size(group) - 1
    kept = {}  # micro-batch: what its F leaves for its B
    sending = []  # handles of messages that are on their way
    for kind, _, i in actions:
        ### BEGIN SOLUTION
        if kind == "F":
            x = inputs[i]
            if rank > 0:
                x = torch.empty_like(inputs[i])
                dist.recv(x, group=group, group_src=rank - 1)
                x.requires_grad_()
            y = stage(x)
            if rank == last:
                y = loss(y, targets[i]) / len(inputs)
            else:
                message = y.detach().contiguous()
                sending.append(dist.isend(message, group=group, group_dst=rank + 1))
            kept[i] = (x, y)
        if kind == "B":
            x, y = kept.pop(i)
            gradient = None  # a loss needs none
            if rank < last:
                gradient = torch.empty_like(y)
                dist.recv(gradient, group=group, group_src=rank + 1)
            y.backward(gradient)
            if rank > 0:
                message = x.grad.contiguous()
                sending.append(dist.isend(message, group=group, group_dst=rank - 1))
        ### END SOLUTION
    for handle in sending:
        handle.wait()

# %% tags=["check"]
check("12.2", run_actions, ranks)

# %% [markdown]
# Your runner and labcode's differ in one important point: **when** a receive begins. Yours begins when the action needs
# its input. On a CPU with gloo that is right, and only a little slower. But **on NCCL your runner can hang in 1F1B.**
# NCCL processes the messages between two ranks one after the other, in the order in which each rank posted them. In the
# steady state of 1F1B (section 4) two neighbours each have a message for the other, and both post `isend` first and
# `recv` second. If a message is larger than NCCL's buffers, each send waits for a receive that is queued behind the
# other send.
#
# The remedy is to post both together. `dist.batch_isend_irecv` hands a list of sends and receives to NCCL as one
# operation, in which none waits for another. Here ranks 0 and 2 have an activation for the next rank, and ranks 1 and 3
# a gradient for the rank before, as in the steady state. It runs on gloo as well. (On NCCL all ranks of a group must
# take part in its first batch, unless the group has had a collective before.)

# %% tags=["nbval-check-output"]
def meet(rank, neighbours):
    """Send to the neighbour and receive from it, in one batch; says what came."""
    neighbour = neighbours[rank]
    outgoing = torch.full((4, 16), float(rank))
    incoming = torch.empty_like(outgoing)
    both = [
        dist.P2POp(dist.isend, outgoing, neighbour),
        dist.P2POp(dist.irecv, incoming, neighbour),
    ]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    return incoming.unique().tolist()

print("what came to ranks 0 to 3:", ranks.run(meet, {0: 1, 1: 0, 2: 3, 3: 2}))

# %% [markdown]
# labcode's runner, `labcode/parallel/pipeline.py`, does this for any schedule. It knows the schedules of all ranks, so it
# works out beforehand which messages belong to which moment, and after each action it posts all sends and receives of
# that moment in one batch. So a message also arrives while the rank still computes something else.
#
# **Takeaway: a pipeline needs no magic in autograd. Cut the graph at the boundary with `detach` and `requires_grad_`,
# and send by hand what would have flowed through it.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* What people get wrong, in the order of frequency: the handle of `isend` dropped (the message may
# never leave; the check sees it), `requires_grad_` forgotten (then `x.grad` is None), `dist.send` in place of `isend`
# (GPipe runs, 1F1B hangs: let them see it, it is the best moment of the lesson), `irecv` without `wait()`, the 1/m
# forgotten, a queue in place of a dict (the check also plays GPipe with its backwards from last to first), `inputs[i]`
# used as the buffer or asked for a gradient on rank 0, and `.grad` divided by m at the end (the check also starts with
# gradients from a step before). Ask: why `y.detach()` and not y? (What is sent has no business with the graph; PyTorch
# would send it as well.) Draw the two queues of the hang on NCCL: s(a2) before r(g0) on one side, s(g0) before r(a2) on
# the other.

# %% [markdown]
# ## 4. One forward, one backward (core, 27 min)
#
# GPipe keeps the activations of all m micro-batches. Is that necessary? The last rank has the loss of micro-batch 0
# right after its first forward. It could start its backward at once, and then the activations of this micro-batch would
# be free before the next forward begins. The schedule **1F1B** does this on each rank, in three phases:
#
# 1. **Warm-up**: forwards only, p - 1 - r of them on rank r (and not more than m, of course).
# 2. **Steady state**: one forward and one backward in turn, until there are no forwards left.
# 3. **Cool-down**: the backwards that are left.
#
# Why p - 1 - r? Follow micro-batch 0. It leaves rank r after one forward and then passes the p - 1 - r ranks behind it,
# each of which takes the time of one forward. No backward can arrive in that time, so rank r does p - 1 - r more
# forwards. That makes p - r forwards before the first backward. The last of them already belongs to the steady state,
# and p - 1 - r are left for the warm-up.
#
# With p = 4, rank 3 has no warm-up and does F0 B0 F1 B1 and so on. Rank 2 has a warm-up of one.

# %% [markdown] tags=["exercise"]
# ### Exercise 12.3 · 1F1B as data
#
# Write the list of rank `rank` of p, for m micro-batches. The check plays your schedule for several p and m, and then
# runs it on the four ranks. You cannot make them hang: a schedule that would is refused beforehand, and the check says
# who would wait for whom.

# %% tags=["exercise"]
def one_f_one_b_order(rank, p, m):
    """The actions of one rank, F and B of each micro-batch once."""
    ### BEGIN SOLUTION
    forwards = [Action("F", rank, i) for i in range(m)]
    backwards = [Action("B", rank, i) for i in range(m)]
    warmup = min(p - 1 - rank, m)
    order = forwards[:warmup]
    for i in range(warmup, m):
        order.append(forwards[i])
        order.append(backwards[i - warmup])
    order += backwards[m - warmup:]
    return order
    ### END SOLUTION

# %% tags=["check"]
check("12.3", one_f_one_b_order, ranks)

# %% [markdown]
# **Predict** for 4 ranks and 8 micro-batches:
#
# 1. Is bubble / work `"more"`, `"less"` or `"the same"`, compared with GPipe?
# 2. For how many micro-batches does rank 0 keep activations at the same time now, and for how many does rank 3?
# 3. Rank 0 waits before its first backward. For how many seconds? Follow micro-batch 0 on its way to the last rank and
#    back.

# %% tags=["predict"]
bubble_of_1f1b = "the same"
kept_by_first = 4
kept_by_last = 1
gap_of_rank_0_s = 3 * 0.060

# %%
one_f_one_b = stages.play(ranks, "1f1b", 8, STAGE_S)
line = one_f_one_b.simulated
of_gpipe = simulate(schedule("gpipe", 4, 8), STAGE_S).bubble_over_ideal()
found = stages.in_words(line.bubble_over_ideal(), of_gpipe)
gap_start_s, gap_stop_s = stages.gaps(line, rank=0)["b"][0]
gap_s = gap_stop_s - gap_start_s
kept = one_f_one_b.kept

WORDS = ("more", "less", "the same")
compare("bubble / work", bubble_of_1f1b, found, found="simulated", options=WORDS)
compare("kept by rank 0", kept_by_first, kept[0], within=1, found="counted")
compare("kept by rank 3", kept_by_last, kept[3], within=1, found="counted")
compare("gap on rank 0", gap_of_rank_0_s, gap_s, within=1, unit="s", found="simulated")
print(f"bubble / work on the clock: {one_f_one_b.measured.bubble_over_ideal():.3f}")

# %% tags=["figure"]
one_f_one_b.picture(
    title="1F1B: the same bubble as GPipe, but in other places",
    notes=stages.notes(line, rank=1),
    alt="After the warm-up forwards and backwards alternate; rank 1 waits at its start "
        "(a), before its first backward (b), between its last backwards (c) and at its "
        "end (d)",
)

# %% [markdown]
# The bubble is the same, but the memory is not: a rank keeps at most p micro-batches, however large m is. That is all
# that 1F1B gains over GPipe, and it is a lot, because now m can grow.
#
# The gap before the first backward surprises everyone who looks at a first profile, but nothing is slow there. Rank
# r did its p - r forwards on time. Meanwhile micro-batch 0 reached the last rank, and it has to come back through the
# ranks behind r, which takes p - 1 - r backwards. The inputs of more forwards are there, so rank r could go on with
# them, but then it would have to keep more than p - r micro-batches.
#
# A rank waits in four places, which carry letters in the figure:
#
# | | where | how long |
# |---|---|---|
# | a | at the start: nothing has arrived yet | $r\,t_F$ |
# | b | before the first backward | $(p-1-r)\,t_B$ |
# | c | between the backwards of the cool-down, p - 1 - r times $t_F$ | $(p-1-r)\,t_F$ |
# | d | at the end: the ranks before it still work | $r\,t_B$ |
#
# The gaps c are there because the rank behind does a forward between two backwards while this rank has none left. Add
# the four up, and r cancels: $(p-1)(t_F + t_B)$ on each rank.
#
# Is the memory real? Let us look at a GPT of six layers on four ranks, cut by `parallelize`. `saved_bytes` from lesson
# 10, section 2, asks autograd what it holds on rank 0 after each action. If your prediction for rank 0 is right, 1F1B
# holds at most that many times what one micro-batch needs, and GPipe up to m = 8 times as much.

# %% tags=["by-hand"]
from labcode.config import GPTConfig
from labcode.models import gpt, layers

config = GPTConfig(
    vocab_size=83, context_length=32, num_layers=6, num_heads=4, hidden_size=64
)
generator = torch.Generator().manual_seed(0)
tokens = torch.randint(83, (5, 8, 2, 33), generator=generator)

# five steps of eight micro-batches of two samples; the target is the next token
batches = []
for step in tokens:
    batches.append([(part[:, :-1], part[:, 1:]) for part in step])

def build():
    """The GPT, the same in every process."""
    return layers.initialize(gpt.GPT(config), 0).double()

# %% tags=["nbval-check-output"]
from labcode.comm.grid import Grid
from labcode.config import ParallelConfig
from labcode.models.parallelize import parallelize
from labcode.perf.saved_bytes import saved_bytes
from labcode.topology import GridShape


def held_after_each(rank, name):
    """Bytes that autograd holds after each action, over those of one micro-batch."""
    grid = Grid.create(GridShape(pp=4))
    model = parallelize(build(), grid, ParallelConfig(pipeline_schedule=name))
    held = []

    def look(action, started_s, stopped_s):
        held.append(saved.total())

    model.on_action = look
    with saved_bytes(model.module) as saved:
        model.forward_backward(batches[0])
    return [num_bytes / held[0] for num_bytes in held]

with_gpipe = ranks.run(held_after_each, "gpipe")[0]
with_1f1b = ranks.run(held_after_each, "1f1b")[0]
most = round(max(with_1f1b), 3)
compare("1F1B, bytes of rank 0", kept_by_first, most, within=1, found="counted")
print(f"GPipe holds up to {max(with_gpipe):.0f} times the bytes of one micro-batch")

# %% [markdown]
# A memory profile of the first stage shows these bytes over time. We draw them where the simulation has the actions.

# %% tags=["figure"]
def over_time(name, held):
    """(ms, held) of rank 0, where each of its actions starts and where it stops."""
    simulated = simulate(schedule(name, 4, 8), STAGE_S)
    actions = [bar for bar in simulated.rows if bar.rank == 0]
    times = [0.0]
    heights = [0.0]
    for bar, after in zip(actions, held):
        times += [1e3 * bar.start_s, 1e3 * bar.stop_s]
        heights += [heights[-1], after]
    return times, heights

plot.lines(
    {"GPipe": over_time("gpipe", with_gpipe), "1F1B": over_time("1f1b", with_1f1b)},
    caption="12.memory",
)

# %% [markdown]
# The flat piece of 1F1B is gap b: nothing is kept and nothing is freed while the first micro-batch is on its way back.
# GPipe's is longer by the time that its last micro-batch takes to reach the last rank, 90 ms.
#
# **Takeaway: 1F1B has GPipe's bubble, but keeps at most p micro-batches instead of m. The first rank keeps the most,
# and in its long gap before the first backward it waits for micro-batch 0 to come back.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Common mistakes in 12.3: a warm-up of p - r (then the first backward comes one forward late and
# the rank keeps one micro-batch more), a warm-up of r (the wrong end of the pipeline: it hangs), m smaller than the
# warm-up. Ask the room: who keeps the most, and who has the logits? (The first; the last. Section 6.)

# %% [markdown]
# ## 5. PyTorch's own pipeline, and broken on purpose (core, 10 min)
#
# PyTorch has pipelines as well, in `torch.distributed.pipelining`. A `PipelineStage` wraps a module, and a schedule
# object is also the runner: it cuts the batch into micro-batches by itself and finds out the shapes of the messages. The
# first rank gives it the inputs, the last one the targets.

# %%
import torch.nn.functional as F
from torch.distributed import pipelining


def theirs(rank, make, **options):
    """The gradient of this rank's stage, by PyTorch's runner."""
    module = stages.Stage(rank)
    wrapped = pipelining.PipelineStage(module, rank, 4, torch.device("cpu"))
    runner = make(wrapped, n_microbatches=8, loss_fn=F.mse_loss, **options)
    inputs, targets = stages.batches(8)
    if rank == 0:
        runner.step(inputs.flatten(0, 1))
    elif rank == 3:
        runner.step(target=targets.flatten(0, 1))
    else:
        runner.step()
    return module.gradient()

# %% tags=["nbval-check-output"]
expected = stages.gradients(4, 8)

def are_expected(gradients, factor=1):
    """Whether all ranks have `factor` times the gradients of one process, to 1e-12."""
    off = 0.0
    for number, gradient in enumerate(gradients):
        difference = gradient - factor * expected[number]
        off = max(off, difference.abs().max().item())
    return off < 1e-12

for make in (pipelining.ScheduleGPipe, pipelining.Schedule1F1B):
    right = are_expected(ranks.run(theirs, make))
    print(f"{make.__name__}: the gradients of one process: {right}")
unscaled = ranks.run(theirs, pipelining.Schedule1F1B, scale_grads=False)
print("with scale_grads=False 8 times as large:", are_expected(unscaled, factor=8))

# %% [markdown]
# PyTorch adds up the gradients of the micro-batches and at the end divides them by m, because `scale_grads` is True by
# default. This is right for a loss that is a mean. If your loss divides by m already, switch it off. (PyTorch can also
# cut a model into stages by tracing it.)
#
# PyTorch and labcode both keep a schedule as lists of actions, so it can be checked before any rank begins. A schedule
# is a contract between ranks: every message has a sender, and no ranks wait for each other in a cycle. If it is broken,
# the run deadlocks, and the cluster charges for it.
#
# Here rank 0 wants the gradient of micro-batch 0 before it sends micro-batch 1, and rank 1 wants micro-batch 1 before
# it gives any gradient.

# %%
import re

from labcode.schedules import check_schedule

wrong = {
    0: [Action.parse(text) for text in ("0F0", "0B0", "0F1", "0B1")],
    1: [Action.parse(text) for text in ("1F0", "1F1", "1B0", "1B1")],
}

# %% [markdown]
# **Predict.** Each rank goes on as far as it can. At which action does rank 0 get stuck, and at which does rank 1?

# %% tags=["predict"]
rank_0_stands_at = "0B0"
rank_1_stands_at = "1F1"

# %% tags=["nbval-check-output"]
try:
    check_schedule(wrong, num_stages=2, num_microbatches=2)
except ValueError as error:
    stands_at = dict(re.findall(r"rank (\d) at (\w+)", str(error)))
for rank, predicted in {0: rank_0_stands_at, 1: rank_1_stands_at}.items():
    compare(
        f"rank {rank} stands at", predicted, stands_at[str(rank)],
        found="simulated", options=[str(action) for action in wrong[rank]],
    )

# %% [markdown]
# The whole message of the check:

# %% tags=["raises-exception"] raises="ValueError: rank 0 cannot start 0B0: it waits for 1B0 of rank 1"
check_schedule(wrong, num_stages=2, num_microbatches=2)

# %% [markdown]
# The message says for each rank where it is stuck and whom it waits for. Either rank can break the cycle: rank 1 by doing
# `1B0` before `1F1`, or rank 0 by doing `0F1` before `0B0`.
#
# The second kind of failure comes in the middle of a step: a stage runs out of memory, or gets a bad shape, and the
# other ranks wait for its output. What do they report?

# %%
import time

from course.pool.ranks import RankError


class Broken(torch.nn.Module):
    def forward(self, x, inputs=None):
        raise ValueError("this stage expects 17 features, not 16")

began_s = time.perf_counter()
try:
    ranks.run(stages.run_schedule, schedule("1f1b", 4, 8), 4, 8, stages={2: Broken()})
except RankError as error:
    print(f"after {time.perf_counter() - began_s:.1f} s: {error}")

# %% [markdown]
# One message arrives, with the rank, the stage, the action and the reason. The other ranks were waiting for an
# activation or a gradient, and the pool stopped them. `torchrun` does the same: when one process fails, it ends the
# others. Without such a parent they would wait for their timeout and then report that somebody did not answer.
#
# **Takeaway: check a schedule while it is data, because that costs nothing. At run time, the first error is the one to
# read, and it should name the stage and the action.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Draw the cycle as two arrows. PyTorch has a validator too. That of torch 2.13 collects the actions
# in sets, so it accepts a rank that does one forward twice; labcode's refuses it.

# %% [markdown]
# ## 6. A whole GPT (core, 14 min)
#
# A real model brings two new things.
#
# - **Tied embeddings.** In many models the embedding table is used twice: it maps tokens to vectors at the start, and
#   vectors to logits at the end. So the first **and** the last stage hold a copy of it. Each sees only a part of its
#   gradient, so the two parts have to be summed after backward.
# - **Uneven stages.** Six layers cannot be dealt out evenly to four ranks, and the ends of the model cost time as well.
#
# In plain PyTorch the sum takes three lines: a group of the first and the last rank, which all ranks of the pipeline
# have to create together, and after backward, on these two ranks, an all-reduce of the gradient.
#
# ```python
# ends = dist.new_group([0, last])  # once, on every rank
# if rank in (0, last):
#     dist.all_reduce(weight.grad, group=ends)  # after each backward
# ```
#
# The next cell trains the GPT of section 4 for five steps of AdamW in float64, and compares it with one process. labcode
# does the sum by itself. With `tied="by hand"` we use these three lines instead, and with `tied="forgotten"` nobody
# forms the sum.

# %%
from course.labs.l09_shards import adamw_steps
from course.labs.l12_by_hand import batches, build
from labcode.comm.counting import counted
from labcode.comm.grid import Grid
from labcode.config import ParallelConfig
from labcode.models import gpt
from labcode.models.parallelize import parallelize
from labcode.perf import alpha_beta
from labcode.topology import GridShape


def train(rank, shape, config, tied="by labcode"):
    """Losses, all weights, and this rank's copy of the tied weight if it has one."""
    model = parallelize(build(), Grid.create(shape), config)
    if tied != "by labcode":
        stages.forget_tied_weights(model)
    ends = dist.new_group([0, 3])
    optimizer = torch.optim.AdamW(model.module.parameters(), lr=3e-3)
    own = dict(model.module.named_parameters())
    copy = own.get("embed.weight", own.get("head.weight"))
    losses = []
    for step in batches:
        optimizer.zero_grad()
        losses.append(model.forward_backward(step))
        if tied == "by hand" and rank in (0, 3):
            dist.all_reduce(copy.grad, group=ends)
        optimizer.step()
    return torch.stack(losses), dict(model.full_state_dict()), copy

# one process sees the same batches uncut
uncut = []
for step in batches:
    inputs, targets = zip(*step)
    uncut.append((torch.cat(inputs), torch.cat(targets)))
whole = build()
true_losses = adamw_steps(whole, gpt.loss, uncut)

# %% tags=["nbval-check-output"]
def held_to_one_process(name, *options):
    results = ranks.run(train, *options)
    losses, weights, first_copy = results[0]
    last_copy = results[-1][2]
    off = (losses - true_losses).abs()
    weights_off = 0.0
    for key, weight in whole.state_dict().items():
        weights_off = max(weights_off, (weights[key] - weight).abs().max().item())
    print(name)
    print(f"    first loss right: {off[0] < 1e-12}, all losses: {off.max() < 1e-12}")
    print("    weights:", weights_off < 1e-12, end=", ")
    print("tied copies equal:", torch.equal(first_copy, last_copy))

pp4 = GridShape(pp=4)
held_to_one_process("pp 4, 1F1B", pp4, ParallelConfig())
held_to_one_process("pp 2, dp 2, layers 4 + 2", GridShape(dp=2, pp=2),
                    ParallelConfig(layers_per_stage=(4, 2)))
held_to_one_process("pp 4, summed by hand", pp4, ParallelConfig(), "by hand")
held_to_one_process("pp 4, sum forgotten", pp4, ParallelConfig(), "forgotten")

# %% [markdown]
# Without the sum, the first loss is right, because the weights are still right. The next losses are wrong, and the two
# copies drift apart. Nothing fails and nothing warns.
#
# **What travels?** For each micro-batch, a tensor [B, S, H] crosses each boundary between stages and its gradient comes
# back, whatever the stages hold. For comparison: tensor parallelism makes four all-reduces of the same size in each
# layer, and one each for the embedding and the head (lesson 09, sections 4 and 6). On a ring, an all-reduce sends 2 (p
# - 1)/p of its tensor; we count the calls and their tensors, and take the bytes from this formula.
#
# Here [B, S, H] is 2 · 32 · 64 numbers of 8 bytes, and there are 6 layers.
#
# **Predict.** How many bytes does a rank send for each micro-batch: an inner rank of pp = 4, and any rank of tp = 4?

# %% tags=["predict"]
sent_by_pp = 2 * (2 * 32 * 64 * 8)
sent_by_tp = (4 * 6 + 2) * 2 * 3 / 4 * (2 * 32 * 64 * 8)

# %% tags=["nbval-check-output"]
def sent_bytes(rank, shape, kind):
    """Bytes that this rank sends by `kind` of message for one micro-batch."""
    model = parallelize(build(), Grid.create(shape))
    with counted() as calls:
        model.forward_backward(batches[0])
    total = 0
    for call in calls:
        if call.kind == kind:
            total += alpha_beta.bytes_sent(call.kind, call.group_size, call.num_bytes)
    return total / len(batches[0])

pp_bytes = ranks.run(sent_bytes, GridShape(pp=4), "send")[1]
tp_bytes = ranks.run(sent_bytes, GridShape(tp=4), "all_reduce")[1]
name = "pp = 4, an inner rank"
compare(name, sent_by_pp, pp_bytes, within=1, unit="B", found="counted")
compare("tp = 4", sent_by_tp, tp_bytes, within=1.01, unit="B", found="counted")
print(f"tensor parallelism sends {tp_bytes / pp_bytes:.0f} times as much")

# %% [markdown]
# (The small remainder at tp is the loss.) With more layers the ratio grows further. And a rank of a pipeline does not
# wait until what it sends has arrived. So pp is the axis that may leave the node.
#
# **Who gets fewer layers?** In the steady state all ranks go at the pace of the slowest stage. The head, which turns
# vectors into logits, has V · H parameters, and a layer has 12 H². For the vocabulary of GPT-2 and H = 2048 the head
# costs as much as V · H / (12 H²) = 50257 / (12 · 2048), or about two layers. Take 14 layers on 4 ranks, with the head
# on the last one.
#
# - Divided as evenly as possible, the stages have 4, 4, 3 and 3 layers, so the last rank has 3 + 2 = 5 units of work.
# - Another way would be 4, 4, 4 and 2.
#
# **Predict.** With m = 16 micro-batches, how many times as long does a step take with the first split as with the
# second? To a first approximation a step takes (m + p - 1) times the slowest stage.

# %% tags=["predict"]
times_as_long = 5 / 4

# %% tags=["nbval-check-output"]
def step_units(layers_of_ranks, head=2):
    """How long a step of 1F1B takes, in forwards of one layer."""
    units = list(layers_of_ranks)
    units[-1] += head
    times = [StageTimes(work, work, work) for work in units]
    return simulate(schedule("1f1b", 4, 16), times).total_s

ratio = step_units((4, 4, 3, 3)) / step_units((4, 4, 4, 2))
compare("even, against balanced", times_as_long, ratio, within=1.1, found="simulated")

# %% [markdown]
# The ratio is a little less than 5/4, because only the m micro-batches go at the pace of the slowest stage. While the
# pipeline fills and drains, each of the other stages is passed once.
#
# Memory may call for another split. With 1F1B the first rank keeps p micro-batches and the last rank only one, but the
# last rank has the logits, [B, S, V]. Llama 3 takes one layer from the first stage and one from the last.
#
# **Takeaway: for each micro-batch, a pipeline sends one tensor of B · S · H numbers over each boundary in each
# direction, which is little enough for most links. Balance the stages, sum what is tied, and compare with one
# process.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Ask: how would you notice in production that the tied sum is missing? (Compare the two copies
# once in a while: one all-reduce of a checksum.)

# %% [markdown]
# ## 7. Half of a backward can wait (optional, 30 min)
#
# The backward of a linear layer, $y = x A^\top$, computes two things, and only one of them is urgent.

# %% tags=["figure"]
plot.halves(caption="12.halves")

# %% [markdown] tags=["exercise"]
# ### Exercise 12.4 · Defer the weight gradient
#
# Write a linear layer whose backward does I at once and leaves W for later. `SplitLinear.apply(x, weight, later)` gives
# `y`. Its backward returns the gradient of x, and appends **a function without arguments** to the list `later`. When
# that function is called, it computes the gradient of the weight and adds it to `weight.grad`.
# Several forwards may run before the first backward, each with a list of its own.
#
# `x` is [.., inputs] with one or more leading dims, and `weight` is [outputs, inputs], as PyTorch keeps it. Find the two
# matrix products from the shapes. `backward` returns one value for each argument of `forward` (`ctx` does not count),
# and None for what gets no gradient from here. Whoever calls the function does so under `torch.no_grad()`.

# %% tags=["exercise"]
class SplitLinear(torch.autograd.Function):
    """y = x A^T; backward gives dx and leaves dA to a function in `later`."""

    @staticmethod
    def forward(ctx, x, weight, later):
        ### BEGIN SOLUTION
        ctx.save_for_backward(x, weight)
        ctx.weight = weight  # the parameter itself, which has the .grad
        ctx.later = later
        return x @ weight.T
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad):
        ### BEGIN SOLUTION
        x, weight = ctx.saved_tensors
        param = ctx.weight

        def weight_half():
            grad_weight = grad.flatten(0, -2).T @ x.flatten(0, -2)
            if param.grad is None:
                param.grad = grad_weight
            else:
                param.grad += grad_weight

        ctx.later.append(weight_half)
        return grad @ weight, None, None
        ### END SOLUTION

# %% tags=["check"]
check("12.4", SplitLinear)

# %% [markdown]
# What is it good for? Look again at the gaps of 1F1B on rank 0: before its first backward it waits $(p-1)\,t_B$ (gap
# b), and in the cool-down p - 1 times $t_F$ (gaps c). Now split B into I and W, which take $t_I$ and $t_W$, as
# labcode's linear layer does inside a pipeline:
#
# - The way back takes only $t_I$ for each rank, as W can wait. So gap b shrinks to $(p-1)\,t_I$.
# - Into each of the p - 1 gaps c rank 0 puts a W, so that only $t_F - t_W$ is left of each.
#
# Together, with $t_W$ no longer than $t_F$ and $t_I$, the bubble is
#
# $$(p-1)\,(t_I + t_F - t_W).$$
#
# The other ranks have other gaps of the same sum, as in section 4. Rank r has only p - 1 - r gaps in its cool-down, so
# it has to defer r more Ws to the end than rank 0, which ends with one. This schedule is called **ZB-H1** (Qi et al.
# 2023; ZB for zero bubble).
#
# And the memory? W needs the inputs of the linear layers and the gradients of their outputs, so these are free only
# after **W**. Attention scores and the input of GELU are needed by I alone, and are free after it. We count a
# micro-batch as kept until its W. Rank r of 1F1B keeps p - r micro-batches.
#
# **Predict** for 4 ranks, 8 micro-batches, and $t_F = t_I = t_W$ = 30 ms: how many seconds shorter is the step than that
# of 1F1B, and how many micro-batches do rank 0 and rank 3 keep?

# %% tags=["predict"]
shorter_s = 3 * (0.030 + 0.060) - 3 * 0.030  # the work is the same
zero_kept_by_first = 4 - 0 + 0
zero_kept_by_last = 4 - 3 + 3

# %%
split = stages.play(ranks, "zero_bubble", 8, STAGE_S)
of_1f1b_s = simulate(schedule("1f1b", 4, 8), STAGE_S).total_s
difference_s = of_1f1b_s - split.simulated.total_s
kept = split.kept
compare("shorter by", shorter_s, difference_s, within=1, unit="s", found="simulated")
compare("kept by rank 0", zero_kept_by_first, kept[0], within=1, found="counted")
compare("kept by rank 3", zero_kept_by_last, kept[3], within=1, found="counted")
print(f"bubble / work, simulated: {split.simulated.bubble_over_ideal():.3f}")
print(f"bubble / work on the clock: {split.measured.bubble_over_ideal():.3f}")

# %% tags=["figure"]
split.picture(
    title="ZB-H1: weight halves fill the gaps at the end",
    alt="After the first input half no rank waits any more: weight halves stand "
        "where 1F1B has its gaps, and four of them stand at the end of rank 3",
)

# %% [markdown]
# The bubble is a third of 1F1B's, and no rank keeps more than rank 0 did before. The same paper's ZB-H2 comes close to
# zero, with about twice the memory: it does more forwards in gap b. In PyTorch the schedules of this kind are
# `ScheduleInterleavedZeroBubble`, `ScheduleZBVZeroBubble`, and `ScheduleDualPipeV` after DeepSeek's DualPipe
# (DeepSeek-AI 2024). They need several stages on each rank (section 8).
#
# **Takeaway: only the input half of a backward holds others up. The weight half can fill gaps. If F, I and W take
# equally long, this leaves a third of the bubble, at the price that every rank keeps as much as the first one.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* In 12.4 the usual mistakes are to compute the product in backward and to put only the addition
# off (nothing is won, the check counts FLOPs), to overwrite `.grad`, and `grad.mT @ x` without the sum over samples.
# Ask: what else reads the activations in W, and why is GELU not split? (It has no weights: all of its backward is I.)

# %% [markdown]
# ## 8. Shorter stages: interleaved (optional, 28 min)
#
# There is another way to shrink the bubble. It is p - 1 stages long, so let us make the stages shorter. Give each rank v
# stages instead of one: of 16 layers on four ranks, rank 0 holds layers 0-1 **and** layers 8-9. Each stage takes 1/v of
# the time, and so does the way to the last rank, so the bubble is (p - 1)/(v m) of the work. In PyTorch this is
# `ScheduleInterleaved1F1B`.
#
# A micro-batch now passes through all ranks v times. The ranks take the micro-batches in groups of p: first p of them
# through their first stage, then the same p through the second, and so on. When the p-th one has entered, the first one
# is back. That is why the published schedule needs m to be a multiple of p. (PyTorch's also takes some other m.)
#
# How long is the warm-up of rank r? Count the forwards before its first backward:
#
# - Before micro-batch 0 enters the rank's last stage, p micro-batches have gone through each of the v - 1 stages before:
#   that is (v - 1) p forwards.
# - Then it needs p - 1 - r more, one for each rank behind it, as in 1F1B.
# - The published schedule takes another p - 1 - r. They give each message on the way back some time to travel.
#
# Together $2\,(p-1-r) + (v-1)\,p$. Then comes the first forward of the steady state, and after it the first backward.
# What are the extra p - 1 - r good for? The simulator can play both, with hand-overs that take no time and with slower
# ones.

# %% tags=["nbval-check-output"]
half_s = stages.part_of(STAGE_S, 2)
published = schedule("interleaved", num_stages=8, num_microbatches=8, num_ranks=4)
shorter = stages.with_shorter_warmup(published, stages_per_rank=2)
print("bubble / work     published   without the extra forwards")
for message_s in (0, 0.001, 0.003):
    with_extra = simulate(published, half_s, message_s=message_s).bubble_over_ideal()
    without = simulate(shorter, half_s, message_s=message_s).bubble_over_ideal()
    print(f"{1e3 * message_s:.0f} ms a message {with_extra:12.4f} {without:12.4f}")

# %% [markdown]
# If messages take no time, the extra forwards gain nothing. With slow messages they do.
#
# **Predict** for p = 4, m = 8 and v = 2:
#
# 1. How many seconds does the step take, with 30 ms each for F, I and W of all layers of a rank?
# 2. With 1F1B there are 3 boundaries between ranks, and each micro-batch crosses each of them twice: 48 messages. How
#    many are there now?
# 3. How many micro-batches does rank 0 keep, counted in whole ranks' worth of layers? (One stage is half of that.)

# %% tags=["predict"]
interleaved_step_s = 8 * 0.090 + 3 * 0.090 / 2  # work, and three half stages
interleaved_messages = 7 * 2 * 8
interleaved_kept = (2 * 3 + 4 + 1) / 2

# %%
interleaved = stages.play(ranks, "interleaved", 8, STAGE_S, stages_per_rank=2)
line = interleaved.simulated
step_s = line.total_s
num_messages = interleaved.messages
kept = interleaved.kept[0]
compare("one step", interleaved_step_s, step_s, within=1, unit="s", found="simulated")
compare("messages", interleaved_messages, num_messages, within=1, found="counted")
compare("kept by rank 0", interleaved_kept, kept, within=1, found="counted")
print(f"bubble / work, simulated: {line.bubble_over_ideal():.3f}")
print(f"bubble / work on the clock: {interleaved.measured.bubble_over_ideal():.3f}")

# %% tags=["figure"]
interleaved.picture(
    title="Interleaved: two half stages on each rank, and half the bubble",
    alt="Blocks are half as long, and each rank changes between its first stage "
        "(full colour) and its second (pale); ranks wait half as long as with 1F1B",
)

# %% [markdown]
# The simulated bubble is half as large. The measured one is more than half: there are more than twice as many messages,
# and the actions between them are half as long.

# %% [markdown]
# **Takeaway: v stages on each rank divide the bubble by v and multiply the messages by about v. It pays where a message
# takes little time compared with a stage.**

# %% [markdown] tags=["exercise"]
# ### Exercise 12.5 · Open end: choose before you submit
#
# In practice you measure how long F, I and W take on your stages and how long a message takes, and you know how much
# memory is left. Then you choose a schedule. Write the function that does so. It returns one of the `CANDIDATES` as
# `(name, v)`: the one with the shortest step among those that keep at most `most` micro-batches (in whole ranks' worth
# of layers) on every rank. `stage_s` is what all layers of one rank take for one micro-batch: a `StageTimes` with
# `forward_s`, `input_s` and `weight_s`, as in section 1.
#
# You have `schedule(name, num_stages, m, p)` and `simulate(actions, stage_s, message_s=...)`, whose `stage_s` is that
# of one stage. A simulation has `total_s` and `peak_microbatches()`: the most that any rank keeps, counted in stages.
# With v stages on a rank, each is 1/v of its layers. The check asks six things:
#
# 1. With little memory, the choice fits.
# 2. With more memory and a fast link, the choice is faster.
# 3. With a slow link, the messages count.
# 4. When m is not a multiple of p, the choice is still possible.
# 5. The choice goes by the times of F, I and W that it was given.
# 6. It works for another number of ranks.

# %% tags=["exercise"]
CANDIDATES = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 4),
    ("zero_bubble", 1),
]

def choose(p, m, stage_s, message_s, most):
    """The (name, v) with the shortest step that keeps at most `most` micro-batches."""
    ### BEGIN SOLUTION
    best = None
    best_s = float("inf")
    for name, v in CANDIDATES:
        if name == "interleaved" and m % p != 0:
            continue
        one_stage_s = StageTimes(
            stage_s.forward_s / v, stage_s.input_s / v, stage_s.weight_s / v
        )
        found = simulate(schedule(name, p * v, m, p), one_stage_s, message_s=message_s)
        if found.peak_microbatches() / v <= most and found.total_s < best_s:
            best = (name, v)
            best_s = found.total_s
    return best
    ### END SOLUTION

# %% tags=["check"]
check("12.5", choose)

# %% [markdown] tags=["solution-only"]
# *For the instructor.* What people forget: to divide the times by v (then interleaved never wins), to divide the peak
# by v (then it never fits), and that `schedule` refuses m that is no multiple of p. Ask: why does GPipe beat 1F1B in
# the simulator on a slow link, if memory allows? (In 1F1B every backward waits for a message that was sent just before;
# in GPipe the messages have been under way for a long time. On the clock of this lesson it does not show.)

# %% [markdown]
# ## 9. Part III on one page: what to choose first (core, 9 min)
#
# You now know four ways to use many GPUs: data, tensor (with sequence), context and pipeline parallelism. Lesson 13
# adds a fifth, **sharded data parallelism**, also called FSDP: data-parallel ranks that divide the parameters, their
# gradients and the optimizer state among themselves. A sixth, expert parallelism, needs a mixture of experts, a model
# whose layers have many MLPs of which each token uses a few; it puts these MLPs on different ranks. Which comes first?
# The order follows from what each costs.
#
# 1. **Does the model fit on one GPU?** Then use data parallelism only. It sends more bytes than a pipeline: about twice
#    the gradients, for 1.7 billion parameters in 16 bits some 7 GB. But it sends them once per step and can hide them
#    behind backward, it has no bubble, and the model stays as it is.
# 2. **If not, shard it over the data-parallel ranks**, as long as each GPU has enough tokens. The model's code still
#    stays as it is. Half as many bytes again are sent, and in each micro-batch. Lesson 13b, section 5, derives how many
#    tokens it takes to hide them behind computation.
# 3. **With fewer tokens, use tensor parallelism**, as little as needed, and never beyond the GPUs that NVLink joins:
#    here a node of 8. Add sequence parallelism: it sends a quarter more bytes, and they can hide behind computation
#    (lesson 10).
# 4. **If the activations of one sequence do not fit** even so, use context parallelism.
# 5. **If the parameters need more than one node** and the traffic of sharding cannot be hidden between nodes, use
#   pipeline parallelism there, with m several times p. It does not go well with step 2: each micro-batch would gather
#   the weights again.
# 6. **All GPUs that are left are data parallel.**
#
# Let us turn steps 1, 3 and 5 into a rule and see whether it gives what people really used before step 2 was common. In
# bfloat16 with Adam, Megatron keeps 18 bytes for each parameter: 16 bits for the parameter itself, and 32 bits each for
# its gradient, its master copy and Adam's two moments. Let these 18 bytes take at most three quarters of a GPU's 80 GB;
# the rest is for activations.
#
# Narayanan et al. (2021, Table 1) published how they trained ten GPT models on A100 with 80 GB, in nodes of 8 and
# without sharding.
#
# **Predict** by hand, with tp and pp as powers of two: how did they cut the model of 39.1 billion parameters?

# %% tags=["predict"]
choice_for_39_billion = (8, 2)  # 704 GB: over 8 ranks 88 GB each, over 16 ranks 44 GB

# %%
BYTES_PER_PARAMETER = 2 + 4 * 4
ROOM = 0.75 * 80e9

def first_choice(num_parameters):
    """(tp, pp): tensor parallel inside the node of 8, then stages, in powers of two."""
    tp = 1
    pp = 1
    while BYTES_PER_PARAMETER * num_parameters / (tp * pp) > ROOM:
        if tp < 8:
            tp *= 2
        else:
            pp *= 2
    return tp, pp

# %% tags=["nbval-check-output"]
from course.labs import papers
from labcode.config import GPTConfig

_, _, _, tp, pp, _ = papers.MEGATRON_LAYOUTS[4]  # 39.1 billion parameters
compare("tp and pp", choice_for_39_billion, (tp, pp), found="published")
print("parameters  GPUs  our tp, pp  published   dp  m, 1 sequence each  bubble / work")
for hidden, num_layers, gpus, tp, pp, sequences in papers.MEGATRON_LAYOUTS:
    shape = GPTConfig(
        vocab_size=51200, context_length=2048, num_layers=num_layers, num_heads=8,
        hidden_size=hidden,
    )
    ours = first_choice(shape.num_parameters)
    dp = gpus // (tp * pp)
    m = sequences // dp
    bubble = bubble_over_ideal("1f1b", pp, m)
    print(f"{shape.num_parameters / 1e9:8.1f} e9 {gpus:5} {ours!s:>11}", end=" ")
    print(f"{(tp, pp)!s:>10} {dp:4} {m:19} {bubble:14.2f}")

# %% [markdown]
# The rule gives the published layout for nine of the ten models. For the tenth it says 32 stages; the model has 105
# layers, which 32 does not divide, and they took 35. So one line about memory explains most of such a table. What it
# leaves out:
#
# - **Sharding**, step 2. Sharded over the data-parallel ranks, the 18 bytes of many of these models fit with less tp or
#   pp.
# - **Long sequences.** The models here have 2048 tokens. When sequences are so long that the activations of a single one
#   do not fit, cp comes next after tp.
# - **The links.** On a node with slow links, tp = 2 with more stages can be faster than tp = 8, as you saw when you
#   chose a grid in lesson 08.
#
# | the model's state (18 bytes a parameter) | GPUs | choose first |
# |---|---|---|
# | fits on one GPU | any number | dp |
# | does not, and each GPU has enough tokens in a micro-batch | any number | sharded dp |
# | fits on one node of 8, with fewer tokens | 8 | tp with sequence parallelism, up to 8 |
# | fits on one node of 8, with fewer tokens | more than 8 | the same tp, and dp between the nodes |
# | does not fit on a node, with fewer tokens | several nodes | tp 8, pp until it fits, dp with the rest; m at least 4 pp |
# | any, and the activations of one sequence do not fit | | as above, and cp before you add stages |
#
# The second row is that of lessons 13 and 13b, and the other four of the first five follow from the rule above. That m
# should be at least 4 pp is from the GPipe paper (section 2.3), whose authors found the bubble negligible from there on;
# by our formula it is then less than a quarter of the work. The last row follows the order of Llama 3's axes, from the
# fastest links to the slowest: tensor, context, pipeline, data (Llama Team 2024, section 3.3.2).
#
# **Takeaway: memory decides how far a model has to be cut. The tokens of a GPU and the speed of the links decide along
# which axis. What is left goes to data parallelism.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Ask for the row of a 7 billion model on 64 GPUs before showing the table. (126 GB: sharded over 64
# ranks it is 2 GB each, so tp is not needed for memory. Without sharding tp 4, dp 16: 32 GB each.) Ask who would use tp
# all the same. (Those with a small batch: 64 GPUs with 2,000 tokens each are 128,000 tokens in a step.)

# %% [markdown]
# ## 10. From here to GPUs and SLURM (core, 6 min)
#
# | where | start |
# |---|---|
# | 4 GPUs of one machine | `torchrun --nproc-per-node=4 -m labcode.train gpt_10m --parallel.pp 4 --train.micro_batch 4` |
# | another schedule | add `--parallel.pipeline_schedule zero_bubble`, or `--parallel.pipeline_schedule interleaved --parallel.stages_per_rank 2 --model.num_layers 8` (each of the 8 stages needs a layer) |
# | SLURM, inside a job of two nodes | `srun --nodes=2 --ntasks-per-node=4 python -m labcode.train gpt_10m --parallel.pp 2 --parallel.tp 2` |
# | what two of its ranks do, as a trace | add `--profile.steps 4:6 --profile.ranks 0 2 --profile.memory` (lesson 02, section 6, reads it) |
#
# (Under `srun`, export `MASTER_ADDR` and `MASTER_PORT` first, the variables of lesson 04, section 7; lesson 14,
# section 2, writes such a script.) In the default order of the grid, pp is the slowest axis, so it is the one that
# crosses the nodes. The number of micro-batches is the batch of a data-parallel rank divided by `micro_batch`.
#
# On GPUs the stages really compute. A backward then has two halves (section 7), I for the gradients of the inputs and W
# for those of the weights. W rarely takes as long as I, because attention itself has no weights: all of its backward is
# I. For each token of a layer of width h, in sequences of S tokens with a causal mask, W costs 24 h² FLOPs
# and I costs 24 h² + 4 h S. With S = h that makes W 6/7 of I. `model.on_action` is told when each action ran: put the
# times of your stages into `simulate`, and choose before you submit.
#
# **A form to fill in.** Two nodes have two GPUs each. Tensor parallelism of 2 inside a node and a pipeline of 2 between
# them use all four, so there is one copy of the model, dp = 1. An NVIDIA course therefore sets the global batch to the
# size of one micro-batch. Take micro-batches of 2 samples.
#
# **Predict.** What fraction of the time does each GPU wait if the global batch is 2? What is the smallest global batch
# with which the bubble is at most 1/8 of the work?

# %% tags=["predict"]
share_of_waiting = 1 / 2
smallest_batch = 2 * 8

# %% tags=["nbval-check-output"]
one_batch = simulate(schedule("1f1b", 2, 1), STAGE_S)
waiting = one_batch.bubble_over_total()
m = 1
while simulate(schedule("1f1b", 2, m), STAGE_S).bubble_over_ideal() > 1 / 8:
    m += 1
compare("waiting, m = 1", share_of_waiting, waiting, within=1, found="simulated")
compare("global batch", smallest_batch, 2 * m, within=1, found="simulated")

# %% [markdown]
# With dp = 1, a global batch of one micro-batch means m = 1, the pipeline of section 1, in which the two stages take
# turns. It runs and it trains, and half of each GPU's time is wasted. So the form reads
#
#     --parallel.tp 2 --parallel.pp 2 --train.micro_batch 2 --train.global_batch 16
#
# and lesson 15, section 6, runs it on two nodes.

# %%
ranks.close()

# %% [markdown]
# ## Questions (core, 3 min)
#
# **1.** A pipeline of 8 ranks has 32 micro-batches with 1F1B. Somebody doubles the number of ranks and leaves the batch
# as it is. What happens to bubble / work?
#
# <details><summary>Answer</summary>
#
# It grows from 7/32 = 22 % to 15/32 = 47 %. The work of each rank halves, and the number of stages to fill doubles.
# </details>
#
# **2.** In a profile of 1F1B, rank 0 is idle for a long time before its first backward. Which number in the profile tells
# you whether this is normal?
#
# <details><summary>Answer</summary>
#
# The time of one backward. The gap should be (p - 1) times that, plus the messages. If it is longer, some stage behind
# is slower than the others.
# </details>
#
# **3.** From lesson 04: m micro-batches are accumulated and each rank divides its loss by m. What would go wrong without
# the division, and would Adam notice?
#
# <details><summary>Answer</summary>
#
# The gradients would be m times as large. Adam divides by the size of the gradient, so its steps would hardly change.
# Clipping would act already when the true gradient is m times smaller than the limit, weight decay that is part of the
# loss would count less, and SGD would take steps that are m times as long.
# </details>
#
# ## Recap
#
# | schedule | bubble / work | rank 0 keeps | in labcode |
# |---|---|---|---|
# | one batch | p - 1 | 1 (all of the batch) | `schedule("gpipe", p, 1)` |
# | GPipe | (p - 1)/m | m | `schedules.orders` |
# | 1F1B | (p - 1)/m | p | `schedules.orders` |
# | zero bubble, ZB-H1 | (p - 1)(t_F + t_I - t_W)/(m t) | p, as every rank does | `parallel.deferred` |
# | interleaved | (p - 1)/(v m) | p (1 + (p - 1)/(p v)) | `schedules.orders` |
#
# Here t = t_F + t_I + t_W. `perf.pipeline.simulate` plays a schedule, `parallel.pipeline` runs it, and
# `schedules.check_schedule` refuses what would hang. A tied weight is summed over the first and the last stage. For each
# micro-batch and boundary, 2 B · S · H numbers travel.
#
# ## Sources
#
# - Huang et al. 2019, *GPipe*, arXiv:1811.06965.
# - Narayanan et al. 2019, *PipeDream*, doi 10.1145/3341301.3359646: one forward, one backward, without a pause between
#   steps. With all backwards before the optimizer's step, as here: Narayanan et al. 2020, arXiv:2006.09503
#   (*PipeDream-Flush*).
# - Narayanan et al. 2021, arXiv:2104.04473: 1F1B and interleaved in section 2.2, the layouts of ten models in Table 1.
# - Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.3: memory when interleaved.
# - Qi et al. 2023, *Zero Bubble Pipeline Parallelism*, arXiv:2401.10241.
# - DeepSeek-AI 2024, *DeepSeek-V3 Technical Report*, arXiv:2412.19437: DualPipe.
# - Llama Team 2024, arXiv:2407.21783, section 3.3: uneven stages, and the order of the axes.
# - 18 bytes for each parameter: Megatron Core, *Distributed Optimizer*,
#   <https://docs.nvidia.com/megatron-core/developer-guide/latest/user-guide/features/dist_optimizer.html>.
# - NVIDIA DLI, *Multi-Node Distributed Training Strategies*, exercise 3.6: the form of section 10.
# - PyTorch: <https://docs.pytorch.org/docs/stable/distributed.pipelining.html>, and what it says on `isend` and
#   `batch_isend_irecv`: <https://docs.pytorch.org/docs/stable/distributed.html>.
