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
# # 17 · Surviving failures
#
# A long training run on many GPUs does not get by without a failure: Llama 3, on 16,384 GPUs, was interrupted every
# three hours. Since all ranks wait for each other, one broken part stops them all. You cannot prevent this, but you can
# lose little each time, minutes instead of days. In this lesson you find out what a failure costs, write the parts that
# make it cheap, and watch real processes die and come back.
#
# ## Goals
#
# - derive how often to save from two numbers, and predict what failures cost a run of the size of Llama 3;
# - write a checkpoint that is complete or absent, whenever the program is killed;
# - write the loop that finds the newest whole checkpoint and goes on as if nothing had happened;
# - load a checkpoint on another number of GPUs than the one that wrote it;
# - find the rank that a hanging job waits for, the layer where a NaN begins, and the rank whose results are wrong
#   although nothing looks wrong.
#
# **Time**: 171 minutes, and 32 more for what is optional. Good places for a break are after sections 1, 2 and 3.
# **Needs**: lesson 01 (section 1). The boxes of section 4 are parts of weights, as tensor parallelism cuts them (lesson
# 09, section 2). The end of that section trains a layer under FSDP2 (lesson 13b, section 7), and its signals come from
# the job script of lesson 14, section 3. Section 5 comes back to the hang of lesson 14, section 6.

# %%
from pathlib import Path

import torch

from course.lab import check, compare, plot
from course.labs import l17_faulty, l17_run
from labcode.perf import failures

MINUTE = 60.0
HOUR = 60 * MINUTE
DAY = 24 * HOUR

# %% [markdown]
# ## 1. What a failure costs (core, 25 min)
#
# In 2024 Meta published how the training of Llama 3 405B was interrupted (arXiv:2407.21783, section 3.3.4). In 54 days
# on 16,384 GPUs there were 466 interruptions, of which 47 were planned, for new firmware for example, and **419** were
# unexpected. Table 5 of the paper counts their causes:
#
# | cause | interruptions |
# |---|---|
# | faulty GPU | 148 |
# | HBM3, the memory of a GPU | 72 |
# | software | 54 |
# | network switch or cable | 35 |
# | unplanned maintenance of a host | 32 |
# | other parts of a GPU: SRAM, system processor, cooling and sensors | 42 |
# | silent data corruption: wrong results without any error | 6 |
# | the nine other causes | 30 |
#
# Only three of these cases needed much work by hand, and automation handled the rest. What you need from the table is
# the **mean time between failures** of the job, MTBF or $M$: the time divided by the number of failures.

# %% tags=["nbval-check-output"]
mtbf_s = 54 * DAY / 419
print(f"M of the job: {mtbf_s:,.0f} s, which are {mtbf_s / HOUR:.1f} hours")
print(f"of one GPU:   {16384 * mtbf_s / DAY / 365:.1f} years")

# %% [markdown]
# A single GPU, with its share of all the rest, is reliable. It is the number of GPUs that makes a failure an everyday
# event.
#
# How does M depend on that number? A paper of 2025 counts the failures of jobs on two research clusters with A100 GPUs,
# over 11 months (Kokolis et al., arXiv:2410.21680). There a job on one node, with 8 GPUs, ran for 47.7 days until a
# failure, on average.
#
# **Predict.** Suppose that the parts fail independently of each other. How many hours does a job with 1,024 GPUs run
# there until a failure?

# %% tags=["predict"]
mtbf_hours_of_1024 = 47.7 * 24 * 8 / 1024

# %% tags=["nbval-check-output"]
from course.labs import papers

published = papers.HOURS_TO_FAILURE
compare("hours, 1,024 GPUs", mtbf_hours_of_1024, published, found="published")
at_the_rate_of_llama = 16384 * mtbf_s / 1024 / HOUR
print(f"at the rate of Llama 3 it would be {at_the_rate_of_llama:.1f} hours")

# %% [markdown]
# If the parts fail independently, n times as many of them fail n times as often: the MTBF of a job is that of one part,
# divided by the number of parts. Within one cluster this comes close. The rule holds on another cluster, too, but not
# the rate: with the rate of Llama 3, the same 1,024 GPUs would run six times as long. The hardware is different, and so
# are the programs and what is counted as a failure. So take the rule from here and count the failures of your own
# cluster.
#
# After a failure the run goes back to its last **checkpoint**: weights, optimizer, position in the data, random
# numbers, everything that it needs to go on. So there are three costs.
#
# - **Saving.** The ranks stand still for C seconds and write.
# - **Lost work.** What was done since the last checkpoint has to be done again.
# - **Restarting.** It takes R seconds until the failure has been noticed, the node replaced, the ranks started and the
#   checkpoint loaded.
#
# The picture shows the same eight hours of work three times, with the same failures, for C = 60 s and R = 15 minutes.
# (Kokolis et al. give 5 to 20 minutes for R.)

# %% tags=["figure"]
example = {}
for minutes in (120, 30, 5):
    story = failures.simulate(
        8 * HOUR, minutes * MINUTE,
        save_s=60, restart_s=15 * MINUTE, mtbf_s=mtbf_s, seed=5,
    )
    example[f"every {minutes} min"] = story.events
plot.runs(example, caption="17.intervals")

# %% [markdown]
# If you save seldom you lose much work, and if you save often you spend the time on saving. The best interval lies in
# between and can be computed. Let $T$ be the seconds of **work** between two checkpoints, without the standstill for
# saving. The costs below are seconds lost for each second of work.
#
# - In each interval of $T$ seconds, saving takes $C$: it costs $C/T$.
# - A failure comes every $M$ seconds, at any moment of an interval. On average it undoes **half** an interval, $T/2$:
#   it costs $T/(2M)$.
# - Each failure also takes $R$: it costs $R/M$.
#
# $$\text{overhead} \approx \frac{C}{T} + \frac{T}{2M} + \frac{R}{M}$$
#
# The first term falls with $T$, the second one grows, and the third one does not depend on $T$. Young found the best
# interval in 1974.

# %% [markdown] tags=["exercise"]
# ### Exercise 17.1 · The best interval
#
# Write the function that gives the $T$ of the lowest overhead, from C and M.

# %% tags=["exercise"]
def best_interval_s(save_s, mtbf_s):
    """Seconds between checkpoints; all times are in seconds."""
    ### BEGIN SOLUTION
    # the derivative of C/T + T/(2M) is -C/T**2 + 1/(2M), which is zero at
    return (2 * save_s * mtbf_s) ** 0.5
    ### END SOLUTION

# %% tags=["check"]
check("17.1", best_interval_s)

# %% [markdown]
# Now let us use it for Llama 3. We count 14 bytes for each parameter in a checkpoint: 2 for the weight in bf16, 4 for
# the weight in float32 and 4 for each of Adam's two moments. That is 0.35 GB for each GPU, and the paper gives 1 MB to
# 4 GB. The storage of that cluster sustains 2 TB/s, with peaks of 7 TB/s (section 3.3.1 of the paper). If a checkpoint
# is written at the lower of these speeds while the ranks stand still, we know C. Nothing is published about R, so we
# assume 10 minutes.

# %% tags=["nbval-check-output"]
save_s = 405e9 * 14 / 2e12
restart_s = 10 * MINUTE
interval_s = failures.young_interval_s(save_s, mtbf_s)
print(f"C = {save_s:.1f} s, and Young's interval is {interval_s:.0f} s")

# %% [markdown]
# The fraction of the time that is useful work is called **goodput**. It is 1 / (1 + overhead).
#
# The next cell simulates 54 days of work. It draws the time to the next failure from an **exponential distribution**:
# however long the run has lived already, the next failure is as far away as ever.
#
# **Predict.** At this interval, what costs most: `"saving"`, `"lost work"` or `"restarts"`? And what is the goodput?
# Estimate before you calculate: of the three terms above, one is much larger than the others.

# %% tags=["predict"]
largest_cost = "restarts"
goodput = 0.93

# %% tags=["nbval-check-output"]
import statistics


def simulated(interval_s, save_s):
    """{cost: its mean in eight runs, as a fraction of the work}."""
    found = {"saving": [], "lost work": [], "restarts": []}
    for seed in range(8):
        story = failures.simulate(
            54 * DAY, interval_s, save_s, restart_s, mtbf_s, seed=seed
        )
        work_s = story.seconds("work")
        found["saving"].append(story.seconds("save") / work_s)
        found["lost work"].append(story.seconds("lost") / work_s)
        found["restarts"].append(story.seconds("restart") / work_s)
    return {cost: statistics.mean(parts) for cost, parts in found.items()}

costs = simulated(interval_s, save_s)
largest = max(costs, key=costs.get)
compare("largest cost", largest_cost, largest, found="simulated", options=costs)
compare("goodput", goodput, 1 / (1 + sum(costs.values())), within=1.02,
        found="simulated")
for cost, part in costs.items():
    print(f"{cost:<10} {part:.1%} of the work")
left = 1 / 0.9 - 1 - costs["saving"] - costs["lost work"]
print(f"a goodput of 90 % leaves a restart {left * mtbf_s / MINUTE:.0f} minutes")

# %% [markdown]
# Meta reports that more than 90 % of the time was effective. Our number agrees, but R was a guess. The report limits
# what R can have been: a goodput of 90 % is an overhead of 11 %. If our C is right, saving and lost work take 2 of
# these 11, so at most 9 % of M, which is 16 minutes, is left for each restart. Nobody can do this by hand 419 times,
# which is why it was automated.
#
# Here is the overhead over the interval, with C = 3 s, and with C = 60 s for a cluster with a slower file system.
# Circles were simulated, and diamonds mark Young's interval. The curves also count that work which is done again can be
# lost again, which our sum leaves out and which matters at long intervals (the derivation is below).

# %% tags=["figure"]
minutes = [2 ** (power / 4) for power in range(4, 33)]
lines = {}
circles = ([], [])
young = ([], [])
for seconds in (60, save_s):
    curve = []
    for interval in minutes:
        cost = failures.overhead(interval * MINUTE, seconds, restart_s, mtbf_s)
        curve.append(100 * cost)
    lines[f"C = {seconds:.0f} s"] = (minutes, curve)
    for interval in [4, 8, 16, 32, 64, 128, 256]:
        circles[0].append(interval)
        parts = simulated(interval * MINUTE, seconds)
        circles[1].append(100 * sum(parts.values()))
    best_s = failures.young_interval_s(seconds, mtbf_s)
    young[0].append(best_s / MINUTE)
    young[1].append(100 * failures.overhead(best_s, seconds, restart_s, mtbf_s))
plot.lines(
    lines,
    points={"simulated": circles, "at Young's interval": young},
    caption="17.overhead",
)

# %% [markdown]
# Both minima are **flat**: by the formula, at half or twice the best interval saving and lost work cost only a quarter
# more. What counts is C. At Young's interval, saving and lost work together cost $2\sqrt{C/(2M)}$ of the work, so to
# halve that, C has to shrink to a quarter. This is why large runs save **in the background**: the ranks stand still
# only until the tensors are copied into the memory of their node, and a thread writes the files while training goes on.
# In labcode this is `--checkpoint.in_background`. Such a checkpoint counts only when its files are written; until then,
# a failure leads back to the one before.
#
# <details><summary>The curves of the figure, Daly's formula, and his interval</summary>
#
# A piece of $T + C$ seconds succeeds with probability $e^{-(T+C)/M}$, so it fails $e^{(T+C)/M} - 1$ times on average
# before it succeeds. On average the job runs for $M$ seconds for each failure. So all attempts at this piece, the last
# one included, take $M\left(e^{(T+C)/M} - 1\right)$ seconds, and each failure adds $R$. They yield $T$ seconds of work:
#
# $$\text{overhead} = \frac{(M + R)\,\left(e^{(T+C)/M} - 1\right)}{T} - 1$$
#
# Daly (2006) lets failures come during a restart too, and so has $M e^{R/M}$ in place of $M + R$. The minimum has no
# simple form. His approximation differs from Young's where C is not small beside M:
#
# $$T = \sqrt{2CM}\,\left(1 + \tfrac13 \sqrt{\tfrac{C}{2M}} + \tfrac19 \tfrac{C}{2M}\right) - C$$
# </details>
#
# **Takeaway: save about every $\sqrt{2CM}$ seconds. A short standstill makes saving and lost work cheap, and then the
# restarts are what remains.**
#
# This is a good place for a break.

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Ask first how often a job on 16,384 GPUs fails; guesses go from days to months. The most common
# mistake in 17.1 is to let a failure undo the whole interval, which gives $\sqrt{CM}$; the check says so. Question for
# the room: the failures of a real cluster are not independent (a switch takes 32 nodes with it, a bad node fails
# again). Does this make our numbers too high or too low? (For the same number of failures, too high: those that come
# together undo the same work once. But a node that fails again at once makes the restart longer.) Who looks up table 5
# finds shares in percent beside the counts. They do not fit together everywhere: 148 of 419 are 35 %, where the table
# says 30.1 %. The counts add up to 419.

# %% [markdown]
# ## 2. Whole or not at all (core, 38 min)
#
# A run of weeks writes thousands of checkpoints, and a failure can come while one is being written. What is on the disk
# then? Here is a save as many people first write it: two files, each over the one of the last time.

# %%
def naive_save(folder, step, files):
    for name, content in files.items():
        (folder / name).write_bytes(content)

def files_of(step):
    return {"model.bin": b"%04d" % step * 5000, "optimizer.bin": b"%04d" % step * 9000}

# %% [markdown]
# We save after step 4, and again after step 8. This time the process dies before its second `open`. (The lab only
# pretends: it stops the function at that operation, and ignores what it still tries to do to the disk.)
#
# **Predict.** Of which step is the model on the disk now, and of which step is the optimizer?

# %% tags=["predict"]
step_of_model = 8
step_of_optimizer = 4

# %% tags=["nbval-check-output"]
import hashlib
import json
import os
import shutil

from course.labs import l17_disk
from labcode.runtime.files import sync_folder

folder = Path("runs/naive")
folder.mkdir(parents=True, exist_ok=True)
naive_save(folder, 4, files_of(4))
died_at = l17_disk.killed_in_the_middle(naive_save, folder, 8, files_of(8), at=1)
found = {}
for name in files_of(8):
    found[name] = int((folder / name).read_bytes()[:4])
compare("model", step_of_model, found["model.bin"], within=1)
compare("optimizer", step_of_optimizer, found["optimizer.bin"], within=1)
print("died before:", died_at)

# %% [markdown]
# Both files can be read, so there will never be an error: the run goes on with a model and an optimizer that do not
# belong together. And the checkpoint of step 4, which was good, is gone.
#
# The cure has three steps, and their order matters.

# %% tags=["figure"]
OLD = {"step-4": "whole"}
plot.save_steps(
    {
        "before": OLD,
        "1. write the files, sync\nthem and their folder": {
            **OLD, "step-8.partial": "partial",
        },
        "2. rename the folder,\nsync the one above": {**OLD, "step-8": "whole"},
        "3. remove\nthe oldest": {"step-8": "whole"},
    },
    caption="17.save",
)

# %% [markdown]
# 1. **Write under another name**, `step-00000008.partial`. A reader ignores such folders. Bytes that are "written" are
#    at first in a buffer of Python, then in the memory of the system. `file.flush()` empties the first buffer, and
#    `os.fsync(file.fileno())` waits until the system has put the bytes on the disk. Without it a loss of power can
#    leave a file with the right name and no content. The **name** of a file is stored in its folder, and a folder has
#    to be synced like a file: labcode's `sync_folder(folder)` does that. So when all files are written, sync the
#    `.partial` folder too. Otherwise the content may be on the disk without a name that leads to it.
# 2. **Rename.** `os.replace(old, new)` renames a folder in one step: a program that dies before it leaves the old name,
#    and one that dies after it leaves the new one. The new name is stored in the folder above, which has to be synced
#    next.
# 3. **Remove the oldest**, once the new one has its name.
#
# A disk can also damage a file later, or a copy can be incomplete. So a **checksum** of each file is written with it: a
# number that depends on every byte. `hashlib.sha256(content).hexdigest()` is one.

# %% [markdown] tags=["exercise"]
# ### Exercise 17.2 · An atomic checkpoint
#
# Write `save`. It gets the content of each file as bytes, and makes a folder `step-00000008` of them, with one more
# file: `checksums.json` holds `{"name of a file": "its sha256 in hexadecimal digits", ...}`. Afterwards the `keep`
# newest checkpoints are left, and no temporary folder of this step. Three things may be there already.
#
# - **What a killed attempt has left**, under your temporary name for this step. It must neither stop you nor get into
#   the new checkpoint.
# - **A folder with the final name** of this step. Remove it: yours is the one to keep.
# - **Temporary folders of other steps**, including later ones. They are no checkpoints, and do not count for `keep`.
#
# The check kills your function before each of its operations on the disk, one after the other, and looks at what is
# left. `shutil.rmtree(path)` removes a folder with all its files.

# %% tags=["exercise"]
def save(folder, step, files, keep):
    """Write the checkpoint of a step, so that it is complete or absent.

    folder: a Path, which exists; files: {name: bytes}; keep: how many checkpoints stay.
    """
    final = folder / f"step-{step:08d}"
    ### BEGIN SOLUTION
    partial = folder / f"step-{step:08d}.partial"
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir()
    checksums = {}
    for name, content in files.items():
        checksums[name] = hashlib.sha256(content).hexdigest()
    everything = {**files, "checksums.json": json.dumps(checksums).encode()}
    for name, content in everything.items():
        with open(partial / name, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    sync_folder(partial)
    if final.exists():
        shutil.rmtree(final)
    os.replace(partial, final)
    sync_folder(folder)
    whole = [path for path in folder.glob("step-*") if path.suffix == ""]
    for old in sorted(whole)[:-keep]:
        shutil.rmtree(old)
    ### END SOLUTION

# %% tags=["check"]
check("17.2", save)

# %% [markdown]
# What does the reader do with the checksums? Below, one bit of a good checkpoint is changed. The second cell ends in an
# error, and it is meant to.

# %%
folder = Path("runs/damaged")
l17_run.save(folder, 8, files_of(8), keep=2)
file = folder / "step-00000008" / "model.bin"
content = bytearray(file.read_bytes())
content[1000] ^= 1
num_bytes = file.write_bytes(content)

# %% tags=["raises-exception"] raises="DamagedError: step-00000008: model.bin is not as it was written"
l17_run.read(folder / "step-00000008")

# %% [markdown]
# In labcode many ranks write into one folder, each its own files. When all of them are done and have synced the folder,
# rank 0 does steps 2 and 3.
#
# **Takeaway: write under another name, sync files and folder, rename, sync the folder above, and only then remove the
# oldest. The name says that a checkpoint is whole, and checksums prove it.**
#
# This is a good place for a break.

# %% [markdown] tags=["solution-only"]
# *For the instructor.* What people get wrong: only the folder above is synced, and not that of the files; `fsync`
# without `flush` (the check compares the size that was synced with the final one), removing the old checkpoint first
# (with `keep=1` a kill leaves nothing), writing each file atomically but into the final folder (every file is whole,
# the checkpoint is not), and a temporary folder in `/tmp`, which is another disk, so that the "rename" copies. Ask: is
# `os.replace` of a folder atomic on a network file system? (On NFS and Lustre a rename is one operation of the server.
# On object stores there is no rename at all: there one writes a small file last, which says that the others are
# complete.) And: labcode renames an old checkpoint before it removes it (`Checkpoints._complete` in
# `labcode/train/checkpoint/store.py`). Why? (Removing a folder takes many operations, one for each file. A process that
# dies in the middle would leave a folder with the name of a checkpoint, and without some of its files.)

# %% [markdown]
# ## 3. Kill a rank and watch (core, 38 min)
#
# Now to a real failure. torchrun starts the ranks, and with `--max-restarts=1` it starts all of them again if one of
# them dies. The training below runs on two ranks, makes 16 steps and saves every 6 steps. In the first attempt, rank 1
# is killed after step 14, by signal 9, which no process can catch. (`l17_faulty` is `labcode.train` with a fault in it,
# and `l17_faulty.run` starts it under torchrun and prints what the ranks say.)
#
# Two things have to happen. Rank 0 must notice: it waits in an all-reduce for a rank that is gone, and the connection
# between the two breaks. And the second attempt must find out that there was a first one: torchrun keeps a small store
# that outlives the ranks, where the first attempt has left the name of its folder.
#
# **Predict.** From which step does the second attempt resume? How many steps are done a second time?

# %% tags=["predict"]
resumes_from = 12
steps_done_again = 14 - 12

# %%
output = l17_faulty.run(
    "kill:1:14", "--train.steps", 16, "--checkpoint.every", 6,
    "--train.out", "runs/killed", restarts=1,
)

# %%
resumed = l17_faulty.resumed_from(output)
losses = l17_faulty.losses(output)
steps = [step for step, loss in losses]
repeated = len(steps) - len(set(steps))
compare("resumes from step", resumes_from, resumed, within=1, found="counted")
compare("steps done again", steps_done_again, repeated, within=1, found="counted")
of_step_14 = [loss for step, loss in losses if step == 14]
print("loss of step 14, in the first attempt and in the second:", *of_step_14)

# %% [markdown]
# The second attempt computes the same losses as the first one, in all digits that the log shows. For that it is not
# enough to restore the weights: it must read the same samples, with the same optimizer, and any dropout must draw the
# same numbers. On the same grid labcode's training goes on **bit for bit**, and a test holds that.
#
# Restarting all ranks because of one sounds wasteful. But here the others cannot go on: they are in the middle of a
# step in which a part is missing, and gloo has no way to take a rank out of a process group. torchrun can also be
# told that the number of nodes may change: with `--nnodes=3:4` it goes on with three nodes when the fourth one does
# not come back. This is called **elastic**. The run then has another number of ranks, the subject of the next section.
#
# On GPUs there are young ways to keep the processes that are alive. None of them brings back what only the dead rank
# had: either a replica has the same shard of the weights, or all ranks go back to a checkpoint. And with one replica
# fewer, the global batch is smaller, or has to be divided anew.
#
# <details><summary>Three of them (optional)</summary>
#
# - **A smaller group.** `torch.distributed.shrink_group(ranks_to_exclude)`, in the source of PyTorch 2.13, makes a
#   group of the ranks that are left. NCCL can do it from version 2.27 on, and gloo raises a `TypeError`. When the
#   default group shrinks, all other groups are destroyed and have to be made again. If the others are in a collective
#   with the dead rank, this has to be aborted (`SHRINK_ABORT`), which in August 2026 could still hang with NCCL 2.31
#   (https://github.com/pytorch/pytorch/issues/194679).
# - **A restart inside the process.** NVIDIA's Resiliency Extension (NVRx) calls the training function again in the same
#   Python process, which saves the start of Python, CUDA and the containers. Megatron Bridge calls this experimental.
# - **One replica fewer.** With torchft the ranks agree before each step which replicas of data parallelism take part.
#   The others go on without the broken one, and a new one copies their weights when it joins.
#
# </details>

# %% [markdown] tags=["exercise"]
# ### Exercise 17.3 · The restart loop
#
# Write a training run that can be killed at any moment. Each attempt calls the same function, and does not know whether
# it is the first one. You have these tools:
#
# - `l17_run.Training()` makes a fresh run: `.model`, `.optimizer` and `.batches` (whose `.position` is a number); its
#   `.step()` makes one step and returns the loss. The model has dropout, which draws from torch's generator:
#   `torch.get_rng_state()` and `torch.set_rng_state(state)`.
# - `l17_run.write(folder, step, state)` writes a checkpoint as you did in 17.2, and keeps the two newest. `state` is a
#   dictionary of whatever you want to find again.
# - `l17_run.checkpoints(folder)` lists the folders with the name of a checkpoint, the oldest first.
# - `l17_run.read(path)` gives the state back, or raises `l17_run.DamagedError`. Then an older one has to do.
#
# Save after every `every`-th step. Return `{step: loss}` of the steps that **this attempt** has made, counted from 1.
# If there are checkpoints and none of them is whole, stop with `l17_run.DamagedError`: the folder may hold weeks of
# work, which a run that begins again there would overwrite.

# %% tags=["exercise"]
def train(folder, num_steps, every):
    """Train to `num_steps`, from the newest whole checkpoint if there is one."""
    training = l17_run.Training()
    ### BEGIN SOLUTION
    step = 0
    found = l17_run.checkpoints(folder)
    for path in reversed(found):
        try:
            state = l17_run.read(path)
        except l17_run.DamagedError:
            continue
        training.model.load_state_dict(state["model"])
        training.optimizer.load_state_dict(state["optimizer"])
        training.batches.position = state["position"]
        torch.set_rng_state(state["random"])
        step = state["step"]
        break
    if found and step == 0:
        raise l17_run.DamagedError(f"no checkpoint in {folder} is whole")
    losses = {}
    while step < num_steps:
        step += 1
        losses[step] = training.step()
        if step % every == 0:
            state = {
                "model": training.model.state_dict(),
                "optimizer": training.optimizer.state_dict(),
                "position": training.batches.position,
                "random": torch.get_rng_state(),
                "step": step,
            }
            l17_run.write(folder, step, state)
    return losses
    ### END SOLUTION

# %% tags=["check"]
check("17.3", train)

# %% [markdown]
# **Takeaway: every attempt runs the same command. It looks for the newest whole checkpoint, restores all that a step
# reads, and begins at step 1 only if there has never been one.**
#
# This is a good place for a break.

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Nearly everybody forgets one of the four: weights, optimizer, position in the data, random
# numbers. The check names the one that is missing, and nothing else in the run would: the loss goes on falling.
# Question for the room: what happens if a bug kills the run in the same step each time? (`--max-restarts` counts, and
# the job ends. A run without such a limit burns its whole time.)

# %% [markdown]
# ## 4. An end with notice, and another number of GPUs (core, 31 min)
#
# Not every end comes without a warning. A job reaches its time limit, or a job with a higher priority takes its nodes
# away. SLURM calls that **preemption**. In both cases the ranks can get a signal some time before. Before a preemption
# it is `SIGTERM`, if the site grants a grace time. Before the time limit it is `SIGUSR1`, which your script of lesson
# 14, section 3, has asked for and passed on to the ranks.
#
# Each rank remembers the signal, finishes its step, and agrees with the others that this was the last one. Then they
# save and end with exit code 0. Nothing is lost if the **notice** is longer than a step and a save. Otherwise a
# preemption is a failure like any other.
#
# Below, rank 0 gets `SIGUSR1` while it makes step 15. The run saves every 6 steps, as before.

# %%
RESUMABLE = (
    "--train.steps", 20, "--checkpoint.every", 6, "--checkpoint.resume",
    "--train.dtype", "float64",
)
output = l17_faulty.run("signal:0:14", *RESUMABLE, "--train.out", "runs/told")

# %% [markdown]
# (The losses differ from those of section 3 after the first step, because this run computes in float64 and its learning
# rate is scheduled for 20 steps instead of 16.)
#
# When the job comes back, only one GPU may be free instead of two. Here is the same command on one rank, and beside it
# an undisturbed run. (This is a new job, whose torchrun knows of no earlier attempt, so `--checkpoint.resume` tells it
# to look into the folder.)

# %%
output = l17_faulty.run(
    "none", *RESUMABLE, "--train.out", "runs/told", nproc=1, goes_on=True
)
alone = l17_faulty.run("none", *RESUMABLE, "--train.out", "runs/undisturbed", nproc=1)

# %%
from course.labs.l17_boxes import Box, tiles
from labcode.measure import metrics


def losses_of(folder):
    """{step: loss}, with all digits."""
    return {row["step"]: row["loss"] for row in metrics.read(folder) if "loss" in row}

told = losses_of("runs/told")
undisturbed = losses_of("runs/undisturbed")
difference = max(abs(told[step] - undisturbed[step]) for step in range(1, 21))
print(f"{len(told)} losses, and the largest difference is {difference:.0e}")

# %% [markdown]
# It went on from step 15, with half the ranks, and its losses are those of the undisturbed run. They are not the same
# to the last bit, because two ranks sum in a different order than one. How can one rank read what two have written?
#
# With data parallelism alone that is easy, since all ranks hold the same. But in lesson 09, section 2, each rank held a
# shard of every weight. Suppose that four ranks have written the **boxes** of a matrix of 6 rows and 8 columns. Now the
# run comes back on another grid, where a rank needs columns 2 to 4 of all rows.

# %% tags=["figure"]
plot.boxes(tiles((6, 8), 2, 2), Box((0, 2), (6, 3)), caption="17.box")

# %% [markdown]
# A box is given by its **offsets**, where it begins in the whole tensor, and its **sizes**. The reader takes the
# overlap of its box with each box that was written. Along one dim, the ranges $[a, a+m)$ and $[b, b+n)$ overlap between
# the larger begin and the smaller end:
#
# $$\left[\max(a, b),\ \min(a+m,\ b+n)\right)$$
#
# If the end is not after the begin, they do not overlap. In more than one dim two boxes overlap only if they do so in
# **every** dim.
#
# Each element has three positions: one in the whole tensor, one in the box that was written, and one in the box that is
# read, each counted from its own begin. The reader above has the offsets (0, 2), and rank 3 has written a box with the
# offsets (3, 4). Their overlap begins at row 3 and column 4 of the whole tensor. That is (0, 0) in the box of rank 3,
# and (3, 2) in the reader's.

# %% [markdown] tags=["exercise"]
# ### Exercise 17.4 · A resharding loader
#
# Write the loader. `box` is what this rank needs, and `written` lists what is on the disk, as pairs of a box and a
# function `read()` that reads its tensor. Reading is expensive, so read only the boxes that you need, each once. And
# memory is short, so do not return a view of a larger tensor. All numbers are float32.
#
# The check goes through rows, columns, tiles, tensors of one and three dims, and sizes that do not divide.
# `tensor[slice(1, 3), slice(0, 2)]` is `tensor[1:3, 0:2]`, and a tuple of slices works as an index too.

# %% tags=["exercise", "by-hand"]
def reshard(box, written):
    """The tensor of `box`, out of the boxes that others have written."""
    own = torch.empty(box.sizes)
    ### BEGIN SOLUTION
    for theirs, read in written:
        in_own = []
        in_theirs = []
        for dim in range(len(box.sizes)):
            begin = max(box.offsets[dim], theirs.offsets[dim])
            own_end = box.offsets[dim] + box.sizes[dim]
            their_end = theirs.offsets[dim] + theirs.sizes[dim]
            end = min(own_end, their_end)
            own_begin = begin - box.offsets[dim]
            their_begin = begin - theirs.offsets[dim]
            in_own.append(slice(own_begin, own_begin + end - begin))
            in_theirs.append(slice(their_begin, their_begin + end - begin))
        if all(part.stop > part.start for part in in_own):
            own[tuple(in_own)] = read()[tuple(in_theirs)]
    ### END SOLUTION
    return own

# %% tags=["check"]
check("17.4", reshard)

# %% [markdown]
# **The same with PyTorch.** `torch.distributed.checkpoint` (DCP) writes boxes and reads them in this way. Below, four
# ranks train a layer under FSDP2 (lesson 13b, section 7) and save it with its optimizer. Of 7 rows they hold 2, 2, 2
# and 1. Then three ranks read it, with 3, 3 and 1 rows. `dcp.load` fills the tensors of the dict that it is given.

# %%
import shutil

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from course.lab import Ranks
from course.labs.l17_by_hand import reshard as reshard_by_hand


def sharded_layer():
    model = fully_shard(torch.nn.Linear(4, 7, bias=False))
    return model, torch.optim.AdamW(model.parameters())

def rows_of(model, optimizer):
    """This rank's rows of the weight, and of one of its moments."""
    moments = optimizer.state[model.weight]["exp_avg"]
    return model.weight.to_local().detach(), moments.to_local()

def write_with_dcp(rank, folder):
    model, optimizer = sharded_layer()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    return rows_of(model, optimizer)

def read_with_dcp(rank, folder):
    model, optimizer = sharded_layer()
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=weights, optim_state_dict=state
    )
    return rows_of(model, optimizer)

shutil.rmtree("runs/dcp", ignore_errors=True)
with Ranks(4) as writers:
    rows_written = writers.run(write_with_dcp, "runs/dcp")
with Ranks(3) as readers:
    rows_read = readers.run(read_with_dcp, "runs/dcp")

# %% [markdown]
# The files are under `runs/dcp`, one for each writer, and `.metadata` says which boxes are where, by their offsets and
# sizes. We compare DCP with labcode's version of the loader of exercise 17.4, which gets the rows of the four writers
# and each reader's box.

# %% tags=["nbval-check-output"]
def boxes_of_rows(parts):
    """(box, read) of each rank's rows of one matrix."""
    found = []
    first = 0
    for part in parts:
        found.append((Box((first, 0), tuple(part.shape)), part.clone))
        first += len(part)
    return found

metadata = dcp.FileSystemReader("runs/dcp").read_metadata()
for part in metadata.state_dict_metadata["model.weight"].chunks:
    print("written: offsets", tuple(part.offsets), "sizes", tuple(part.sizes))

for place, what in enumerate(("weight", "moments")):
    written = boxes_of_rows([rows[place] for rows in rows_written])
    same = []
    for box, read in boxes_of_rows([rows[place] for rows in rows_read]):
        same.append(torch.equal(reshard_by_hand(box, written), read()))
    print(f"{what}: each reader has the same by DCP and by hand: {all(same)}")

# %% [markdown]
# `dcp.async_save` writes in the background: it returns as soon as the tensors are copied into the memory of the host.
# On GPUs it needs a process group that has gloo beside NCCL, made with `init_process_group("cpu:gloo,cuda:nccl")`. DCP
# syncs its files and gives `.metadata` its name last. It compares no checksums when it reads, and removes no old
# checkpoints, so a good part of section 2 is still yours.
#
# labcode uses DCP as well, and tells it which boxes a rank has. There may be several: of a fused query, key and value
# weight, a rank of tensor parallelism has some rows of each third.
#
# What about the other parts of the state? The optimizer's moments have the shape of their weights, and the same boxes.
# The position in the data is one number, since labcode's sampler counts global batches, not those of a rank. Only the
# random state of dropout cannot be carried over: two ranks had two generators, and one rank has one. So on another grid
# a run goes on with the same data and the same weights, but sums are computed in a different order and dropout draws
# different numbers. In float64 and without dropout the losses agree to 1e-9.
#
# **Takeaway: a checkpoint that stores boxes with their offsets in the whole tensor can be read on any grid. A reader
# intersects its box with each of them.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* The classic mistake in 17.4 is to mix up the three positions: forgetting to subtract its own
# offset works for the first rank only. The next is `<=` instead of `<`, which reads every neighbour. Question for the
# room: 512 ranks read a checkpoint of 512 files, each box meets two of them; how many reads does the file system see,
# and what would it see if every rank read everything? (1,024 against 262,144.)

# %% [markdown]
# ## 5. Failures that do not end the run (core, 33 min)
#
# ### Nobody dies, and nothing moves
#
# A rank that is dead is easy to notice. One that hangs is not: all others wait for it, in a call that may take ten
# minutes or more to give up. Lesson 14, section 6, shows how to find it afterwards, with stacks and PyTorch's **flight
# recorder**. In labcode's training each rank has a thread that watches whether its main thread makes progress. When
# nothing moves, these threads compare the flight recorders of all ranks and say in one line which rank waits for which.
#
# Below, rank 1 reads its data from a slow disk before step 5, for nine seconds. The watch reports after a third of the
# time-out, here after five.

# %%
output = l17_faulty.run(
    "stuck:1:4", "--train.steps", 6, "--parallel.collective_timeout_s", 15,
    "--train.out", "runs/stuck",
)
waits, missing = l17_faulty.who_waits(output)
print(f"in short: rank {waits} waits for rank {missing}")

# %% [markdown]
# The line names the function in which rank 1 was, and it came before the time-out. The watch does not stop the run,
# since a slow rank may arrive after all, as it did here. If it does not, the collective gives up after
# `--parallel.collective_timeout_s`, the ranks end with this line as their error, and torchrun starts them again. So the
# time-out is a part of R, and it should be minutes, not the half hour that is PyTorch's default for gloo (for NCCL it
# is ten minutes).
#
# ### A rank is slow
#
# A **straggler** is a rank that works but is slow: a hot GPU has lowered its clock, a network card has a bad cable,
# another job uses the same disk. Since all ranks wait for the slowest, one GPU that is 20 % slower makes a job of
# thousands of GPUs nearly 20 % slower, and no line of the log says so. To find it, measure in each rank how long it
# **computes** in a step, without the waiting in collectives. There the slow rank has the longest time, while the time
# of whole steps is the same on all. Then take its node out, like one that has failed.
#
# ### The run goes on with wrong numbers
#
# The third kind of failure does not even slow the run down. Somewhere a number becomes infinite, or NaN ("not a
# number"), and with the next all-reduce every rank has it. The cause may be a learning rate, a sample, a bug, or broken
# hardware. Let us break a memory cell: in a GPT of four blocks we flip **one bit** of one weight, the highest bit of
# the exponent, in `blocks.1.mlp.up`.

# %%
from labcode.config import GPTConfig
from labcode.models.gpt import GPT
from labcode.models.layers import initialize

config = GPTConfig(vocab_size=65, context_length=32, hidden_size=64)
model = initialize(GPT(config), seed=0)
weight = model.blocks[1].mlp.up.weight
before = weight[3, 5].item()
with torch.no_grad():
    weight.view(torch.int32)[3, 5] ^= 1 << 30
print(f"the weight was {before:.3g}, and is {weight[3, 5].item():.3g}")

# %% [markdown]
# The largest number of float32 is about 3.4e38. The broken weight is smaller, so it is still finite. Its layer
# multiplies it by activations of about 1 and sums; the next layer, `down`, multiplies by weights of about 0.02. Then
# comes the layer norm of block 2. It subtracts the mean from its input $x$ and divides by the standard deviation,
# $\sqrt{\operatorname{mean}((x - \bar x)^2)}$.
#
# **Predict.** Which module is the first whose output is not finite: `"blocks.1.mlp.up"`, `"blocks.1.mlp.down"` or
# `"blocks.2.norm1"`?

# %% tags=["predict"]
first_that_is_not_finite = "blocks.2.norm1"

# %% tags=["nbval-check-output"]
def largest_outputs(model, tokens):
    """{module: the largest absolute value of its output}, in forward's order."""
    largest = {}

    def hook_of(name):
        def hook(module, inputs, output):
            largest[name] = output.abs().max().item()
        return hook

    hooks = []
    for name, module in model.named_modules():
        is_leaf = not list(module.children())
        if is_leaf:
            hooks.append(module.register_forward_hook(hook_of(name)))
    with torch.no_grad():
        model(tokens)
    for hook in hooks:
        hook.remove()
    return largest

tokens = torch.arange(128).reshape(4, 32) % 65
largest = largest_outputs(model, tokens)
is_finite = {name: value - value == 0 for name, value in largest.items()}
first = next(name for name, finite in is_finite.items() if not finite)
compare("first not finite", first_that_is_not_finite, first, found="measured")
names = list(largest)
for name in names[names.index("blocks.1.norm2") : names.index(first) + 1]:
    print(f"{name:<24} {largest[name]:.1e}")

# %% [markdown]
# A deviation of $10^{34}$ is finite, but its square is infinite in float32. By the formula the standard deviation would
# then be infinite and the output 0. But on a CPU PyTorch sums the squares in pieces and combines them, and on the way
# infinity is multiplied by 0, which is NaN.
#
# The module that shows the first NaN is not the broken one. So look not for the first NaN but for the first **jump**:
# three lines earlier, at `up`, the output grew by 36 orders of magnitude. Keep such a table of a healthy step, and
# compare.
#
# ### Nobody notices
#
# A NaN is easy to see. Most hardware errors are not: a number is wrong, and still an ordinary number. This is called
# **silent data corruption**. It was the cause of 6 interruptions in section 1, and Google expected one event every week
# or two while it trained Gemini (arXiv:2312.11805, section 3).
#
# Let us cause one. Four ranks of data parallelism start with the same weights, and each takes a batch of its own. The
# GPU of rank 2 multiplies wrongly: in each forward pass, one of the 32,768 outputs of `blocks.1.mlp.up` has a flipped
# bit. This time it is the highest bit of the **mantissa**, so the number is wrong by at most a half. The ranks average
# their gradients, and each makes its step of AdamW.
#
# **Predict.** After this step, does rank 2 have different weights from the other ranks?

# %% tags=["predict"]
rank_2_has_different_weights = False

# %%
import torch.distributed as dist

from course.lab import Ranks
from course.labs import l17_silent


def one_wrong_output(module, inputs, output):
    """A forward hook: one output has the highest bit of its mantissa flipped."""
    output = output.clone()
    output.data.view(torch.int32)[0, 3, 5] ^= 1 << 22
    return output

def model_of(rank, broken_rank):
    model = l17_silent.small_gpt()
    if rank == broken_rank:
        model.blocks[1].mlp.up.register_forward_hook(one_wrong_output)
    return model

def silent_step(rank, broken_rank):
    """This rank's loss and gradient norm, and a checksum of its weights afterwards."""
    model = model_of(rank, broken_rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss = l17_silent.backward(model, batch=rank)
    gradients = [weight.grad for weight in model.parameters()]
    norm = torch.nn.utils.get_total_norm(gradients).item()
    for gradient in gradients:
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    optimizer.step()
    return loss, norm, l17_silent.checksum(model.parameters())

four_ranks = Ranks(4)
rows = four_ranks.run(silent_step, 2)
checksums = [row[2] for row in rows]
differ = checksums[2] != checksums[0]
compare("different weights", rank_2_has_different_weights, differ)
for rank, (loss, norm, weights) in enumerate(rows):
    print(f"rank {rank}: loss {loss:.3f}, gradient norm {norm:.3f}, weights {weights}")

# %% [markdown]
# The all-reduce has given the wrong gradient to all ranks, so they all have the same wrong weights, and there is no
# error. Its loss and norm do not give rank 2 away either: they lie between those of the others, which differ because
# the batches do. So what can be compared over the ranks of data parallelism?
#
# - **Checksums of the weights** after the step are equal on healthy ranks, to the bit. They find a rank whose own
#   memory is broken, or that has missed an update. They do not find what went wrong before the all-reduce.
# - **Gradient norms before the all-reduce** show a large error: if the highest bit of the exponent were flipped here,
#   only the norm of rank 2 would be NaN. They do not show a small one.
# - **The same batch on two ranks** must give the same gradients, to the bit, if the computation is deterministic. (On
#   GPUs this takes `torch.use_deterministic_algorithms(True)` and GPUs of one type.) It finds every error that shows
#   in one of the two runs, however small, but costs a second forward and backward pass, so it is done once in many
#   steps, or when something looks odd. Google found such hardware by replaying steps. Megatron can run a step again,
#   too, and Megatron Bridge calls that experimental.
#
# When a pair of ranks disagrees, which of the two is broken?

# %% [markdown] tags=["exercise"]
# ### Exercise 17.5 · The broken rank
#
# Each of p ranks computes the gradients of two batches: first its own, then the one of the rank before it. Rank 0 takes
# the batch of the last rank. So every batch is computed by two ranks. `own[r]` is the checksum of what rank r has found
# for batch r, and `again[r]` of what it has found for batch r - 1.
#
# When two ranks disagree about a batch, both are suspected. Return a list of the ranks that are suspected most often,
# in ascending order, and `[]` if all agree. (A broken GPU may also compute a batch correctly. Then two ranks are left,
# and the next check has to decide.)

# %% tags=["exercise", "by-hand"]
def suspects(own, again):
    """The ranks that take part in the most disagreements."""
    ### BEGIN SOLUTION
    num_ranks = len(own)
    times_suspected = [0] * num_ranks
    for batch in range(num_ranks):
        second = (batch + 1) % num_ranks
        if own[batch] != again[second]:
            times_suspected[batch] += 1
            times_suspected[second] += 1
    most = max(times_suspected)
    if most == 0:
        return []
    return [rank for rank in range(num_ranks) if times_suspected[rank] == most]
    ### END SOLUTION

# %% tags=["check"]
check("17.5", suspects)

# %% [markdown]
# Here is the replay on the four ranks with labcode's version, for each rank that may be broken:

# %% tags=["nbval-check-output"]
from course.labs.l17_by_hand import suspects as suspects_by_hand


def replay(rank, broken_rank):
    """Checksums of the gradients: of this rank's batch, and of the one before."""
    model = model_of(rank, broken_rank)
    found = []
    for batch in (rank, (rank - 1) % dist.get_world_size()):
        l17_silent.backward(model, batch)
        found.append(l17_silent.checksum(weight.grad for weight in model.parameters()))
    return found

for broken_rank in (None, 0, 1, 2, 3):
    own, again = zip(*four_ranks.run(replay, broken_rank))
    print(f"broken: {broken_rank}, suspected: {suspects_by_hand(own, again)}")
four_ranks.close()

# %% [markdown]
# With two ranks the answer would be both of them: two copies show that something is wrong, and only a third one shows
# where. On real nodes that were taken out of service for such errors, most of the errors in the gradients were small.
# The models still ended with different weights, and some had a spike of the loss (arXiv:2502.12340).
#
# ### What should a run do by itself?
#
# - **Stop**, before it writes a checkpoint. labcode looks at the gradient norm in each step, which is one number that
#   is the same on all ranks, and at every weight and every moment of the optimizer before it saves. A checkpoint with
#   a NaN is worse than none, because it takes the place of a good one.
# - **Skip** the step: do not apply the gradient, and take the next batch. This helps only against a single bad sample
#   or overflow.
# - **Roll back** to a checkpoint before the spike, and skip the batches around it. That was done for PaLM, where the
#   loss jumped about 20 times: back to about 100 steps before the jump, and 200 to 500 batches skipped
#   (arXiv:2204.02311, section 5.1). The last checkpoint may be too late, if it was written after the trouble had begun.
#
# In labcode, `--train.on_bad_step` is one of `stop`, `skip` and `rollback`, and `--train.spike_factor` says from which
# multiple of its median a gradient norm counts as a spike. Such a rule needs a limit, since a run that skips every
# second step learns little and reports no error: `--train.bad_in_a_row` and `--train.bad_in_all`.
#
# **Takeaway: find a hang by comparing which collectives each rank has called, a NaN by looking for the first jump, and
# silent corruption by computing the same batch on two ranks. A NaN must never get into a checkpoint.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Ask before the NaN hunt: what happens if the same bit flips in `attention.proj`? (The output of
# its block is huge, and finite; the norms after it divide by its size. The loss is wrong, and nothing is NaN.) In 17.5
# people forget the pair of the last rank and rank 0, or return both ranks of every pair. Ask what the exercise returns
# if two ranks are broken. (With neighbours, both, or more; the assumption of one broken rank is part of the method.)

# %% [markdown]
# ## 6. A plan for a cluster (optional, 32 min)
#
# Now all of it together. Here is a cluster, made up for this exercise, and the training that it is for: a model of 70
# billion parameters, of which a checkpoint holds 12 bytes each, the weight and two moments in float32.

# %% tags=["nbval-check-output"]
from course.labs import l17_plan

site = l17_plan.SITE
print(f"GPUs of the job                     {site.gpus:,}")
print(f"MTBF of one GPU, as in section 1    {site.gpu_mtbf_s / DAY / 365:.1f} years")
print(f"preemptions by other jobs           {site.preemptions_per_day:g} a day")
print(f"notice before a preemption          {site.notice_s:g} s")
print(f"restart                             {site.restart_s / MINUTE:g} minutes")
print(f"one checkpoint                      {site.checkpoint_bytes / 1e9:.0f} GB")
print(f"your disk quota                     {site.quota_bytes / 1e9:,.0f} GB")
print(f"all ranks together write            {site.write_bytes_per_s / 1e9:g} GB/s")
print(f"the site lets one job write         {site.max_writing:.0%} of the time")
print("a save in the background")
print(f"    stands still while it copies    {site.copy_s:g} s")
print(f"    write time / blocking one       {site.background_write_factor:g}")
print(f"    training slows down by          {site.slowdown:.0%} meanwhile")

# %% [markdown]
# There are two kinds of save.
#
# | | blocking | background |
# |---|---|---|
# | the ranks stand still | until the files are written | until the tensors are in the memory of the nodes |
# | the files take | bytes / speed of writing | 1.5 times as long |
# | meanwhile training | stands still | loses 10 % of its speed |
# | the checkpoint counts | when its files are written | when its files are written |
#
# At a preemption the ranks make a blocking save. If the notice is long enough for it, no work is lost, and we do not
# count it at all.

# %% [markdown] tags=["exercise"]
# ### Exercise 17.6 · Your plan
#
# Decide how this run is to be saved, and say what it will cost. `make_plan` returns a dictionary:
#
# - `"kind"`: `"blocking"` or `"background"`;
# - `"interval_s"`: the time between two checkpoints;
# - `"keep"`: how many checkpoints stay on the disk while the next one is written, at least two;
# - `"mtbf_s"`: the mean time between ends of **any** kind at which work is lost;
# - `"overhead"`: what failures and saving will cost in all, as a fraction of the work.
#
# `site` has the numbers that were printed, under the names that the cell above uses. An interval is counted in seconds
# of training, without the standstill. The check simulates your plan over 60 days of work, shows what it costs, and
# compares it with what you expected. It passes if the site allows the plan, no other plan is more than 15 % cheaper,
# and your overhead is within 15 %; then the same for the `site` of two other clusters, with other numbers.

# %% tags=["exercise"]
def make_plan(site):
    """How to save on this cluster, and what it costs."""
    ### BEGIN SOLUTION
    save_s = site.checkpoint_bytes / site.write_bytes_per_s
    ends_per_day = site.gpus * DAY / site.gpu_mtbf_s
    if site.notice_s < save_s:
        ends_per_day += site.preemptions_per_day
    mean_s = DAY / ends_per_day

    write_s = site.background_write_factor * save_s
    standstill_s = site.copy_s + site.slowdown * write_s  # of the training's time
    young_s = failures.young_interval_s(standstill_s, mean_s)
    allowed_s = write_s / site.max_writing - site.copy_s
    interval_s = max(young_s, allowed_s)

    saving = standstill_s / interval_s
    lost = (interval_s / 2 + write_s) / mean_s
    restarting = site.restart_s / mean_s
    return {
        "kind": "background",
        "interval_s": interval_s,
        # one more lies there while it is written
        "keep": int(site.quota_bytes // site.checkpoint_bytes) - 1,
        "mtbf_s": mean_s,
        "overhead": saving + lost + restarting,
    }
    ### END SOLUTION

# %% tags=["check"]
check("17.6", make_plan)

# %% [markdown]
# Look at the three parts of the cost. Half of it is restarts now, which no interval can change. This is what large runs
# do about it, and about the rest:
#
# | | what it shortens | how |
# |---|---|---|
# | spare nodes | the restart R | some nodes of the job are up and idle; one takes the place of a broken one |
# | health checks | a second failure right after the first | each node runs matmuls and collectives for a minute before the ranks start |
# | a time-out of minutes | the restart R | a hang is noticed in minutes and not after half an hour |
# | restart in the job | the restart R | torchrun starts the ranks again without giving the nodes back to SLURM |
# | checkpoints in the memory of a peer | C, and the lost work | each node keeps a copy of a neighbour's state (the system GEMINI of 2023, not Google's model) |
# | restart in the process | the restart R | Python and CUDA are not started again (NVRx, section 3) |
# | recovery in each step | the lost work, and R | the other replicas go on, and a new one copies their weights (torchft) |
#
# **Takeaway: first make saves cheap, then choose the interval, then shorten the restart. And count preemptions
# too, not only broken hardware.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Good as homework, too. Most plans forget the preemptions (the notice of 30 s is shorter than the
# save of 42 s), or add the two times instead of the two rates. Young's interval would be about 13 minutes here, and
# the site allows 21: the flat minimum makes that cheap. Ask what a notice of 60 s would change. (Preemptions would lose
# no work, the MTBF would be 25 hours, and each preemption would still cost a save and a restart.)

# %% [markdown]
# ## 7. From here to GPUs and SLURM (core, 3 min)
#
# Nothing changes but the numbers. A job that survives needs all of these at once:
#
#     python -m labcode.slurm submit gpt_tiny --site my.yaml --nodes 4 \
#         --checkpoint.every 500 --checkpoint.keep 3 --checkpoint.in_background
#
# The script passes on the signals of SLURM, requeues the job, and resumes in the same folder (lesson 14). Put the
# checkpoints on a file system that all nodes see, and read C from the log. On GPUs, `in_background` copies into pinned
# memory of the node, so check that it has room for each rank's weights and optimizer. gloo notices a dead peer by its
# connection. NCCL often does not: over sockets and InfiniBand it usually reports a remote error, but inside a node it
# may wait until its watchdog's time-out. So set `--parallel.collective_timeout_s` to a few times your longest pause
# between two collectives, which may be a step, a blocking save or the compilation of the first step.
#
# Before you trust any of this, disturb a training run on purpose. This command, given in the folder of the course,
# kills, stops and starves the ranks of a run by a seeded plan, damages its checkpoints and fills its disk. Then it
# compares losses and weights with those of an undisturbed run, bit for bit:
#
#     python -m tests.faults chaos gpt_tiny --faults 20 --seed 1
#
# ## Questions (core, 3 min)
#
# **1.** Somebody saves into `latest.pt.tmp` and renames it to `latest.pt`, without `fsync`. The process is killed, but
# the machine stays up. Is the file whole? And what if the power fails?
#
# <details><summary>Answer</summary>
#
# After a kill it is: bytes that were given to the system survive the process. After a loss of power the name may be
# there without the bytes, and the previous checkpoint, which had the same name, is gone.
# </details>
#
# **2.** A run resumes with the right weights, optimizer and random numbers, but begins its data again. The loss falls
# even faster than before. Why is that no good sign?
#
# <details><summary>Answer</summary>
#
# It sees samples that it has seen already, and remembers them: the training loss becomes too low, and the validation
# loss does not. The samples that should have come are never seen.
# </details>
#
# **3.** From lesson 14: why does `scontrol requeue` keep the number of the job, and what in this lesson depends on it?
#
# <details><summary>Answer</summary>
#
# It is the same job, which starts again. The folder of the run has this number in its name, so all attempts find the
# checkpoints of the earlier ones.
# </details>
#
# ## Recap
#
# | concept | fact | in labcode |
# |---|---|---|
# | MTBF of a job | that of one GPU, divided by their number; the rate differs from cluster to cluster | `perf.failures` |
# | best interval | about $\sqrt{2CM}$ | `perf.failures.young_interval_s` |
# | atomic checkpoint | write aside, sync files and folder, rename, sync above, then remove | `train.checkpoint` |
# | restart | all ranks again, newest whole checkpoint | `run.attempts`, `launch` |
# | notice | finish the step, save, end with 0 | `train.signals` |
# | another grid | boxes with their offsets in the whole tensor, intersected | `parallel.boxes` |
# | hang | compare the collectives that each rank has called | `doctor.hang` |
# | NaN | look for the first jump; never save it | `train.finite` |
# | silent corruption | the same batch on two ranks, bit for bit | |
#
# ## Sources
#
# - Young 1974, A first order approximation to the optimum checkpoint interval: doi:10.1145/361147.361115.
# - Daly 2006, A higher order estimate of the optimum checkpoint interval for restart dumps:
#   doi:10.1016/j.future.2004.11.016.
# - Grattafiori et al. 2024, The Llama 3 Herd of Models: arXiv:2407.21783, sections 3.3.1 (storage) and 3.3.4, table 5.
# - Kokolis et al. 2025, Revisiting Reliability in Large-Scale Machine Learning Research Clusters: arXiv:2410.21680.
# - Silent data corruption: Gemini Team 2023, arXiv:2312.11805, section 3; Ma et al. 2025, Understanding Silent Data
#   Corruption in LLM Training, arXiv:2502.12340.
# - Chowdhery et al. 2022, PaLM: arXiv:2204.02311, section 5.1 (loss spikes).
# - Jiang et al. 2024, MegaScale: arXiv:2402.15627, section 5.2 (finding the rank that hangs).
# - Wang et al. 2023, *Gemini: fast failure recovery with in-memory checkpoints*: doi:10.1145/3600006.3613145.
# - torchft, recovery in each step: https://github.com/meta-pytorch/torchft.
# - NVIDIA Resiliency Extension: https://github.com/NVIDIA/nvidia-resiliency-ext; how mature each of its parts is, and
#   running a step again: https://docs.nvidia.com/nemo/megatron-bridge/0.4.0/training/resiliency.html.
# - torchrun, restarts and elastic runs: https://docs.pytorch.org/docs/stable/elastic/run.html; SLURM's grace time:
#   https://slurm.schedmd.com/preempt.html.
# - torch.distributed.checkpoint: https://docs.pytorch.org/docs/stable/distributed.checkpoint.html.
# - How LayerNorm joins partial variances on a CPU:
#   https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/cpu/moments_utils.h.
# - What is on the disk after a crash: https://man7.org/linux/man-pages/man2/fsync.2.html,
#   https://man7.org/linux/man-pages/man2/rename.2.html.
