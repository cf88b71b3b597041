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
# # 21 · Capstone: plan it, defend it, run its miniature
#
# Somebody gives you 1,024 GPUs for a few weeks, a model of 70 billion parameters and a budget of tokens. Everything that
# you need to decide how to train it was in the lessons before this one. Here you put it to work: you choose a layout,
# defend it against the alternatives with numbers, write the job's script, do a dry run of one rank on this machine, and
# train a miniature of it on eight ranks.
#
# ## Goals
#
# - turn a step time into days and into MFU, and know who needs which of the two;
# - write down the rules that a layout has to satisfy, and name the one that is broken;
# - defend a layout: find its strongest rivals, and say by which number and which part each of them loses;
# - describe your own cluster in ten lines, and plan for it;
# - check a plan without the cluster, by script, dry run and miniature, and say what each of these can prove;
# - write the page that a reviewer wants: batch, precision, failures, checkpoints, energy.
#
# **Time**: 165 minutes, and 24 more for what is optional. Good places for a break are after section 2, and after
# section 4.
#
# **Needs**: lesson 12 (section 2), lesson 15 (section 3), lesson 20 (sections 1 to 3 and 5). For section 5 also lesson
# 14 (section 2); for section 8 also lesson 17 (section 1).

# %%
from course.lab import check, compare, plot
from course.labs import l20_plan
from course.labs import l21_capstone as lab
from course.labs.l20_plan import Layout
from labcode.slurm.run.submit import submit

DAY_S = 24 * 3600
GIB = 2**30
brief = lab.H100

# %% [markdown]
# ## 1. The brief (core, 16 min)
#
# The whole lesson is about one model: 80 layers of 8,192 features, 64 heads of which 8 have their own keys and values,
# 70 billion parameters. (Llama 3 70B has these sizes, too, but its MLP has a gate, a third matrix, and is 28,672 wide,
# while ours has two matrices and is 44,032 wide.) The first brief asks for 1.4 trillion tokens on 1,024 H100s, eight in
# a node, in at most 24 days. A step has 1,024 samples of 4,096 tokens.

# %% tags=["nbval-check-output"]
weights = l20_plan.parameters(brief.shape)
print(brief.shape)
print(f"{weights / 1e9:.1f} billion parameters")
print(f"{brief.gpus:,} GPUs of {brief.cluster.name}")
print(f"{brief.budget_tokens:.2g} tokens in at most {brief.most_days} days")

# %% [markdown]
# Before any layout, an engineer asks whether the brief is possible at all. All that this takes is the rule of lesson 20:
# 6 FLOPs for each parameter and token. An H100 does 989 TFLOP/s by its datasheet, and large training runs reach about
# 40 % of that. This fraction is the **MFU**, the model FLOPs utilization: the FLOPs that the model needs, over those
# that the GPUs could have done in the same time.
#
# **Predict.** How many days do 1.4 trillion tokens take on 1,024 H100s, with an MFU of 40 %?

# %% tags=["predict"]
days_predicted = 6 * 70e9 * 1.4e12 / (1024 * 989e12 * 0.4) / (24 * 3600)

# %% tags=["nbval-check-output"]
fastest = lab.fitting(brief)[0]
days, mfu = lab.days_and_mfu(brief, fastest.step_s)
compare("days", days_predicted, days, unit="days", within=1.2, found="computed")
print(f"MFU {mfu:.0%}")

# %% [markdown]
# The computed days are `labcode.perf`'s estimate for the best layout that it finds. (Its MFU counts the FLOPs of
# attention, too, which are some 8 % more; by 6 FLOPs for each parameter and token it would be 41 %.) The brief is
# possible, with a week to spare. That week is not generous: of the published runs of lesson 20 one in ten took more
# than 1.27 times the estimate, which would be 21 days, and machines break (lesson 17).

# %% [markdown] tags=["exercise"]
# ### Exercise 21.1 · Days and MFU
#
# Return `(days, mfu)` of a training run whose step takes `step_s` seconds. A brief has `shape` (with `shape.tokens`,
# those of a sample), `gpus`, `global_batch`, `budget_tokens` and `peak_flops_per_s`, that of **one** GPU. `flops(shape,
# samples)` are the FLOPs of forward and backward, as you wrote them in lesson 20. 3 to 5 lines.

# %% tags=["exercise"]
from course.labs.l20_plan import flops


def days_and_mfu(brief, step_s):
    """(days of the whole training, MFU)."""
    ### BEGIN SOLUTION
    steps = brief.budget_tokens / (brief.global_batch * brief.shape.tokens)
    days = steps * step_s / DAY_S
    work = flops(brief.shape, brief.global_batch)
    mfu = work / (step_s * brief.gpus * brief.peak_flops_per_s)
    return days, mfu
    ### END SOLUTION

# %% tags=["check"]
check("21.1", days_and_mfu)

# %% [markdown]
# **Takeaway: first the budget, then the layout. Those who pay ask for days; the MFU tells whether the days are good.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* People divide by the samples of a step instead of its tokens, or take the peak of one GPU for
# that of all. Ask the room: a colleague reports an MFU of 55 % with activation checkpointing. What would you ask?
# (Whether the repeated forward was counted: that is hardware FLOPs utilization, and is larger.)

# %% [markdown]
# ## 2. What a layout has to satisfy (core, 37 min)
#
# A layout has six fields, as in lesson 20: `Layout(dp, pp, tp, zero, micro_batch, checkpointing)`. There you searched for
# layouts. Now you review somebody else's, and say what is wrong with it. These are the rules:
#
# | name | rule |
# |---|---|
# | `gpus` | dp · pp · tp is the number of GPUs |
# | `node` | a tp group stays in one node: tp divides the GPUs of a node (tp = 4 on nodes of 6 crosses) |
# | `heads` | tp divides the key/value heads, `kv_heads` |
# | `ffn` | tp divides the features of the MLP |
# | `layers` | pp divides the layers |
# | `batch` | dp · micro_batch divides the global batch |
# | `memory` | the fullest rank needs at most `brief.room_bytes`, which is 90 % of a GPU's memory |
#
# The last rule has a margin of 10 %, because an estimate of memory is off by several percent, and memory gets
# fragmented in a run of weeks (lesson 16). Memory is not checked for a layout that breaks another rule, since it cannot
# run.
#
# How many bytes does a rank keep of each parameter? That is a convention of the training program, and a plan has to name
# it. Our brief is for the course's own program, whose convention is 4+4+8: a parameter and a gradient of 4 bytes, and two
# moments of the optimizer with 4 bytes each. ZeRO-3 gathers parameters in 4 bytes, too. The end of this section looks at
# other conventions.
#
# There are 380 candidates for our brief that satisfy the first six rules. As in lesson 20, ZeRO-2 is not among them, and
# neither is ZeRO-3 with a pipeline. A stage works on many micro-batches in a step. To keep no more than its shard,
# ZeRO-2 would reduce the gradients after each of them, and ZeRO-3 would gather the parameters for each, where ZeRO-1 does
# either once. DeepSpeed refuses both. FSDP in torchtitan keeps the parameters of a stage gathered for the whole step, and
# PyTorch's pipeline reduces the gradients after the last micro-batch, so that only the optimizer is sharded throughout.
# That is why ZeRO-1 goes with pipelines.
#
# The fastest of these candidates keeps all activations, with only tp = 2 to cut them, so it has no room:

# %% tags=["nbval-check-output"]
candidates = lab.candidates(brief)
first = candidates[0]
fastest = lab.fitting(brief)[0]
print(first.layout)
print(f"needs {first.memory_bytes / GIB:.0f} GiB of {brief.room_bytes / GIB:.0f}")
print(f"{len(lab.fitting(brief))} of {len(candidates)} fit")

# %% [markdown] tags=["exercise"]
# ### Exercise 21.2 · The reviewer
#
# Return the names of the rules that a layout breaks, in any order; an empty list for a valid one. The GPUs of a node
# are `brief.cluster.gpus_per_node`. The memory of the fullest rank is `lab.predicted(layout, brief).memory_bytes`, an
# estimate by `labcode.perf`; it raises an error for a layout that cannot run. 12 to 18 lines.

# %% tags=["exercise"]
def broken_rules(layout, brief):
    """Names of the rules that a layout breaks."""
    ### BEGIN SOLUTION
    shape = brief.shape
    broken = []
    if layout.dp * layout.pp * layout.tp != brief.gpus:
        broken.append("gpus")
    if brief.cluster.gpus_per_node % layout.tp:
        broken.append("node")
    if shape.kv_heads % layout.tp:
        broken.append("heads")
    if shape.ffn % layout.tp:
        broken.append("ffn")
    if shape.layers % layout.pp:
        broken.append("layers")
    if brief.global_batch % (layout.dp * layout.micro_batch):
        broken.append("batch")
    if not broken:
        needed = lab.predicted(layout, brief).memory_bytes
        if needed > brief.room_bytes:
            broken.append("memory")
    return broken
    ### END SOLUTION

# %% tags=["check"]
check("21.2", broken_rules)

# %% [markdown]
# Here are all candidates on the map that you know from lesson 20: seconds to the right, memory upwards. The layouts
# above the dashed line do not leave the margin.

# %% tags=["figure"]
groups = {"no pipeline, ZeRO 0 or 1": [], "ZeRO-3": [], "pipeline": []}
for found in candidates:
    kind = "pipeline" if found.layout.pp > 1 else "no pipeline, ZeRO 0 or 1"
    if found.layout.zero == 3:
        kind = "ZeRO-3"
    groups[kind].append((found.step_s, found.memory_bytes / GIB))
chosen = fastest.layout
named = {
    "the fastest": (first.step_s, first.memory_bytes / GIB),
    "the fastest that fits": (fastest.step_s, fastest.memory_bytes / GIB),
}
plot.layout_map(
    groups, named=named, limit_gib=brief.room_bytes / GIB, caption="21.layouts",
)

# %% tags=["nbval-check-output"]
print(f"{'seconds':>7} {'GiB':>5}  layout")
for found in lab.fitting(brief)[:6]:
    print(f"{found.step_s:7.2f} {found.memory_bytes / GIB:5.1f}  {tuple(found.layout)}")

# %% [markdown]
# The first six that fit lie within some 6 % of each other. The estimate is not precise enough to tell them apart. So
# the work begins with this list: choose among the first ones, and have a reason.
#
# **Takeaway: rules are cheap, so check them all, memory last. Layouts within a few percent of each other are equally
# good by an estimate; something else must decide, such as the memory that they leave.**

# %% [markdown]
# ### Other bytes for a parameter
#
# Lesson 20 counted 2+2+12: parameters and gradients of 2 bytes, and an optimizer that keeps two moments and its own copy
# of the parameter in float32. Here are four conventions. A brief has one of them as `brief.convention`.
#
# | convention | whose | bytes of a parameter | gathered + reduced in | whole on a rank with ZeRO-1 |
# |---|---|---|---|---|
# | 4+4+8 | ours | 16 | 4 + 4 | 8 |
# | 2+2+12 | of the ZeRO paper | 16 | 2 + 2 | 4 |
# | 2+4+12 | Megatron-LM in bfloat16, which adds gradients up in float32 | 18 | 2 + 4 | 6 |
# | FSDP2 | `fully_shard` as torchtitan uses it: parameter, gradient and moments are shards in float32 | 4+4+8 = 16 | 2 + 4 | 6, in a pipeline: the gathered parameter and the sum of the gradients |
#
# **Predict.** We search once more with 2+2+12, and nothing else is changed. Is the fastest layout that fits the
# `"same"`, `"another one with a pipeline"` or `"one without a pipeline"`?

# %% tags=["predict"]
winner_is = "one without a pipeline"

# %% tags=["nbval-check-output"]
from dataclasses import replace

KINDS_OF_WINNER = ("same", "another one with a pipeline", "one without a pipeline")
other = lab.fitting(replace(brief, convention="2+2+12"))[0].layout
if other == fastest.layout:
    kind = KINDS_OF_WINNER[0]
elif other.pp > 1:
    kind = KINDS_OF_WINNER[1]
else:
    kind = KINDS_OF_WINNER[2]
compare("with 2+2+12", winner_is, kind, found="computed", options=KINDS_OF_WINNER)
print(f"{'bytes':7} {'seconds':>7} {'GiB':>5}  layout")
for convention in lab.CONVENTIONS:
    for found in lab.fitting(replace(brief, convention=convention))[:4]:
        gib = found.memory_bytes / GIB
        print(f"{convention:7} {found.step_s:7.2f} {gib:5.1f}  {tuple(found.layout)}")

# %% [markdown]
# With 2+2+12 ZeRO-3 over 512 ranks wins, with tp 2 and no pipeline, and the layout that won above is now the fourth.
# Three things have changed. What ZeRO-3 gathers and reduces has half the bytes, so it hides behind the matmuls.
# Activations have fewer bytes. And a rank of a pipeline with ZeRO-1 keeps 4 bytes of a parameter whole instead of 8, so
# that even two stages fit. With Megatron's 2+4+12 the winner is a third layout. (It uses ZeRO-3, which Megatron-LM has
# only as Megatron FSDP; its distributed optimizer is ZeRO-1.) FSDP2 has the same list, although it keeps 4+4+8 as our
# program does, because what it sends and what it keeps whole is as wide as in Megatron.
#
# None of the lists is wrong: they are plans for four programs. Before you compare layouts, or believe that somebody
# else's layout is the best for a 70B model, ask for the bytes.
#
# **Takeaway: the bytes of parameter, gradient and optimizer, and the width of what is sent, belong to the plan. Change
# them and the best layout changes.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* People test `heads` instead of `kv_heads`, write tp ≤ GPUs of a node, and call the estimate
# before the other rules, which raises. Question for the room: which of the rules are necessary, and which are only good
# practice? (Memory, gpus and batch are necessary; labcode and Megatron can distribute layers unevenly, and tp across
# nodes runs, slowly.)

# %% [markdown]
# ## 3. The defence (core, 46 min)
#
# "The program said so" convinces nobody. A colleague will propose another layout, and the answer has to be a number. A
# good defence changes **one choice at a time**: the kinds are `tp`, `pp`, `zero`, `micro_batch` and `checkpointing`,
# and dp follows from them. For each kind, look at the **strongest rival**: the fastest candidate that differs from the
# chosen layout in this choice alone. Whether it fits does not matter yet, since somebody will propose it.

# %% [markdown] tags=["exercise"]
# ### Exercise 21.3 · The strongest rivals
#
# `candidates` is a list of `(step_s, memory_bytes, layout)` in any order, as `lab.candidates(brief)` gives it (its
# entries have these names as attributes too). Return a dict: for each kind of `lab.KINDS` the entry of the strongest
# rival. A kind without a rival is left out. Do not change the list. 8 to 12 lines.

# %% tags=["exercise"]
def rivals(chosen, candidates):
    """{kind: the fastest candidate that differs from the chosen layout in it alone}."""
    ### BEGIN SOLUTION
    best = {}
    for candidate in candidates:
        changed = []
        for kind in lab.KINDS:
            if getattr(candidate.layout, kind) != getattr(chosen, kind):
                changed.append(kind)
        if len(changed) != 1:
            continue
        kind = changed[0]
        if kind not in best or candidate.step_s < best[kind].step_s:
            best[kind] = candidate
    return best
    ### END SOLUTION

# %% tags=["check"]
check("21.3", rivals)

# %% [markdown]
# A rival can lose in two ways. If it does not fit, it loses by the GiB that it needs beyond the available room. If it
# fits and is slower, it loses by seconds. And something makes it lose. `lab.predicted(layout, brief)` returns an estimate
# with `step_s` and `parts`, the seconds of each part of a step, and with `memory_bytes` and `memory_parts`, the bytes of
# each part of the memory. The cause is the part that **grew most** from the chosen layout to the rival, not the largest
# one: matmuls (`product`) are the largest part of every layout. If the rival is faster, it does not lose, and the seconds
# are negative.
#
# Some names of parts are new: `elementwise` are norms and the like, `launch` is the time to start kernels, and `fsdp` what
# ZeRO-3 gathers and does not hide. Of the memory, `reserved` is what the software keeps for itself, `gathered` what
# ZeRO-3 has whole at the moment, and `logits` the output of the head.
#
# Our chosen layout has tp = 4, pp = 4 and ZeRO-1. Its rival with eight stages instead of four halves the parameters of
# each rank, so that it leaves more memory.
#
# **Predict.** Which part of the step grows most when 4 stages become 8: `"tp"`, `"bubble"` or `"dp"`? (dp falls from 64
# to 32, so that each replica has 32 micro-batches instead of 16.)

# %% tags=["predict"]
grows_most = "bubble"

# %% tags=["nbval-check-output"]
eight_stages = Layout(32, 8, 4, 1, 1, "none")
chosen = lab.fitting(brief)[0].layout
before = lab.predicted(chosen, brief).parts
after = lab.predicted(eight_stages, brief).parts
growth = lab.growth(before, after)
compare(
    "grows most", grows_most, max(growth, key=growth.get),
    found="computed", options=("tp", "bubble", "dp"),
)
for name, more_s in growth.items():
    if abs(more_s) > 0.01:
        print(f"{name:12} {before[name]:.2f} s -> {after[name]:.2f} s")

# %% [markdown]
# With twice as many stages and twice as many micro-batches the bubble is nearly the same fraction, (pp - 1) / m: 3/16 and
# 7/32. It still grew most. What the layout wins back is dp: each rank has half of the parameters, so only half as many
# gradients are sent. In the end the two are within 2 % of each other.

# %% [markdown] tags=["exercise"]
# ### Exercise 21.4 · The verdict
#
# `chosen` and `rival` are estimates. Return `(amount, unit, part)`:
#
# - if the rival needs more than `room_bytes`: the GiB that are beyond it, `"GiB"`, and the part of `memory_parts` that
#   grew most;
# - otherwise: the seconds that the rival takes longer, `"s"`, and the part of `parts` that grew most.
#
# 10 to 14 lines.

# %% tags=["exercise"]
def verdict(chosen, rival, room_bytes):
    """(by how much the rival loses, "GiB" or "s", which part makes it lose)."""
    ### BEGIN SOLUTION
    if rival.memory_bytes > room_bytes:
        amount = (rival.memory_bytes - room_bytes) / GIB
        unit = "GiB"
        before = chosen.memory_parts
        after = rival.memory_parts
    else:
        amount = rival.step_s - chosen.step_s
        unit = "s"
        before = chosen.parts
        after = rival.parts
    growth = {}
    for name in after:
        growth[name] = after[name] - before[name]
    return amount, unit, max(growth, key=growth.get)
    ### END SOLUTION

# %% tags=["check"]
check("21.4", verdict)

# %% [markdown]
# This is the defence of the chosen layout on the H100s, by labcode's `rivals` and `verdict`.

# %% tags=["nbval-check-output"]
about_chosen = lab.predicted(chosen, brief)
print(f"chosen: {tuple(chosen)}, {about_chosen.step_s:.2f} s")
for kind, rival in lab.rivals(chosen, lab.candidates(brief)).items():
    about_rival = lab.predicted(rival.layout, brief)
    amount, unit, part = lab.verdict(about_chosen, about_rival, brief.room_bytes)
    print(f"{kind:13} {tuple(rival.layout)} loses by {amount:.2f} {unit}: {part}")

# %% [markdown]
# Four of the five do not fit. Two stages instead of four would be faster if they did; the other three would lose either
# way. That is typical: with a good layout it is memory that stops you from going further. The bars show the chosen
# layout beside two others that fit. The one with tp = 8 is not the strongest of its kind, but tp = 2 has no room.

# %% tags=["figure"]
with_tp_8 = lab.predicted(Layout(32, 4, 8, 1, 1, "none"), brief)
checkpointed = lab.predicted(chosen._replace(checkpointing="full"), brief)
plot.step_parts(
    {
        "chosen: tp 4, pp 4": about_chosen.parts,
        "tp 8 instead of 4": with_tp_8.parts,
        "full checkpointing": checkpointed.parts,
    },
    caption="21.rivals",
)

# %% [markdown]
# **Takeaway: a defence has a rival, a number and a part: "tp 8 loses by half a second, and tp is why". If the
# strongest rival wins, you have found a better layout, which is the other use of a defence.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* People return the largest part of the rival, which is always the matmuls, and compare all
# candidates that differ in tp, most of which differ in other choices too. For the room: why does the pp rival with two
# stages not fit? (Each rank has twice the layers: 16 GiB more of parameters, and as many of gradients.)

# %% [markdown]
# ## 4. A cluster of your own (core, 22 min)
#
# Most clusters are smaller, and yours is probably not in labcode's list. `labcode.perf` reads any cluster from a file of
# about ten lines:
#
# | field | what it is |
# |---|---|
# | `[name]` | a table with a name of your choice; the others stand below it |
# | `gpu` | a kind of GPU that labcode knows, in quotes |
# | `gpus_per_node` | how many share a node |
# | `inside_GB_per_s` | bus bandwidth of a collective within a node, in 10⁹ bytes a second |
# | `inside_latency_us` | microseconds of a message within a node |
# | `between_GB_per_s` | what **each GPU** has of its node's network adapters, in 10⁹ bytes a second |
# | `between_latency_us` | microseconds of a message between nodes |
# | `source` | in quotes: where the numbers are from; those who read the plan will ask |
#
# A text is in quotes, a number is not: `gpu = "a100-40gb"`, `gpus_per_node = 8`.

# %% [markdown] tags=["exercise"]
# ### Exercise 21.5 · Ten lines
#
# Write the file for the cluster of a department: four nodes, each with four A100 of 40 GB (`a100-40gb`). nccl-tests on
# one node report a bus bandwidth of 200 GB/s, and 6 µs for a small message. Each node has **two** adapters of 100 Gb/s,
# and between nodes a small message takes 8 µs. The check reads your text as labcode would.

# %% tags=["exercise"]
### BEGIN SOLUTION
my_cluster = """
[faculty]
gpu = "a100-40gb"
gpus_per_node = 4
inside_GB_per_s = 200
inside_latency_us = 6
between_GB_per_s = 6.25
between_latency_us = 8
source = "nccl-tests of one node; two 100 Gb/s adapters a node"
"""
### END SOLUTION

# %% tags=["check"]
check("21.5", my_cluster)

# %% [markdown]
# On its 16 GPUs we plan a GPT of 1.3 billion parameters, with 256 samples of 2,048 tokens a step. One GPU could hold the
# model itself, so the layouts are quite different from those of the 70B.

# %% tags=["nbval-check-output"]
faculty = lab.own_cluster(lab.CLUSTER_TEXT)
small_brief = lab.Brief(
    lab.GPT_1B, faculty, gpus=16, global_batch=256, budget_tokens=26e9, most_days=7
)
at_home = lab.fitting(small_brief)[0]
home_days, home_mfu = lab.days_and_mfu(small_brief, at_home.step_s)
print(at_home.layout)
print(f"{at_home.step_s:.2f} s a step, {home_days:.1f} days, MFU {home_mfu:.0%}")
for name, part_s in lab.predicted(at_home.layout, small_brief).parts.items():
    if part_s > 0.01:
        print(f"{name:12} {part_s:.3f} s")
travel_s = lab.travel_s(at_home.layout, small_brief)
print(f"gradients and parameters are sent for {travel_s:.3f} s in all")

# %% [markdown]
# The winner is plain data parallelism with ZeRO-1: no tp, no pipeline. Its dp part is the time that the gradients and the
# new parameters take after the last backward has ended; the rest of their communication is hidden behind it.
#
# Somebody finds out that one of the network's switches works at a quarter of its rate.
#
# **Predict.** How many times as long does a step of this layout take then, about: 1.1, 1.5 or 4 times? (The last backward
# hides gradients as far as it reaches: lesson 20, section 3.)

# %% tags=["predict"]
times_as_long = 1.5  # three times 0.316 s come on top of 1.66 s, and little of it hides

# %% tags=["nbval-check-output"]
slow_brief = lab.Brief(
    lab.GPT_1B, lab.with_network(faculty, 1 / 4), gpus=16, global_batch=256,
    budget_tokens=26e9, most_days=7,
)
slow = lab.predicted(at_home.layout, slow_brief)
ratio = slow.step_s / at_home.step_s
TIMES = (1.1, 1.5, 4)
nearest = min(TIMES, key=lambda times: abs(times - ratio))
compare("times as long", times_as_long, nearest, options=TIMES, found="computed")
print(f"{slow.step_s:.2f} s, {ratio:.2f} times as long")
better = lab.fitting(slow_brief)[0]
print(f"the best one now: {better.layout}, {better.step_s:.2f} s")

# %% [markdown]
# The part dp is more than five times as long: before, the last backward hid most of the gradients, and now it
# hides only as much as it is long. So the choice changes. The new winner keeps as little as possible, to have room for
# 16 samples at once. Then it has a single micro-batch in each step, and ZeRO-3, which gathers the parameters for each
# micro-batch, gathers them only once for forward and once for backward. Most of this hides behind the matmuls.
#
# **Takeaway: write your cluster down, and plan again when it changes. Here the network decided, and not the GPU.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Everybody forgets one of the two divisions: by 8 bits, by the GPUs of a node. Let people bring
# the numbers of their own cluster (`nvidia-smi topo -m`, `ibstat`, nccl-tests) and change the text.

# %% [markdown]
# ## 5. The script (core, 5 min)
#
# Back to the 70B. The chosen layout becomes a job of 128 nodes with eight ranks each. The profile of the cluster names
# the planner's cluster, so that the script begins with a prediction (lesson 14 has the rest of it).

# %% tags=["nbval-check-output"]
from labcode.slurm.lint.linter import lint
from labcode.slurm.script.render import render

site = lab.site()
chosen = lab.fitting(brief)[0].layout
job = lab.job(chosen, brief)
script = render(job, site)
print("\n".join(script.splitlines()[:24]))
problems = lint(script, site, job)
errors = [problem for problem in problems if problem.severity == "error"]
print(f"...\nthe linter finds {len(errors)} errors")

# %% [markdown]
# The header has the same memory as our estimate, and an interval for the step: in 8 of 10 published runs it lay between
# 0.94 and 1.27 times the prediction.
#
# A colleague submits the layout without ZeRO. It would wait in the queue for days, and die within a minute.
# (`here=True` asks for this machine instead of a queue. It does not get that far.)

# %% tags=["raises-exception"] raises="ValueError: predicted 94.5 GiB on a GPU of 79.1: the job would run out of memory"
too_full = lab.job(chosen._replace(zero=0), brief)
submit(too_full, site, here=True)

# %% [markdown]
# `submit` refuses it before it is in the queue. If you know better, add `--force`.
#
# **Takeaway: a prediction in the script's header costs nothing, and later it shows what was expected.**

# %% [markdown]
# ## 6. One rank of 1,024, dry (core, 6 min)
#
# Does the code do what the plan assumes? Lesson 15 could submit to two nodes, but nobody lends you 128 nodes for a test.
# A **dry run** executes the real code of one rank on this machine, with two stand-ins: a process group that has 1,024
# ranks and sends nothing, and tensors that have a shape but no numbers. The parameters, the collectives and what is kept
# for backward are those of the cluster. It takes about a quarter of a minute.
#
# We take rank 0, which is on the first stage of the pipeline. It has 20 of the 80 layers, cut by tp = 4, so about a
# sixteenth of the parameters. With sequence parallelism (lesson 10) each layer has two **reduce-scatters** in forward,
# after attention and after the MLP, and two in backward, where forward had gathered. The embedding of the first stage
# adds one to forward. The rank runs 16 micro-batches in each step, so there should be 16 · (4 · 20 + 1) = 1,296
# reduce-scatters.

# %% tags=["nbval-check-output"]
from labcode.perf.one_rank import rank_calls
from labcode.run.dry_run import dry_run

model = l20_plan.config(brief.shape)
chosen = lab.fitting(brief)[0].layout
shape = l20_plan.grid(chosen)
how = {"micro_batch": 1, "num_micro_batches": 16, "sequence_parallel": True}
ran = dry_run(model, shape, rank=0, **how)

print(f"{ran.parameters:,} parameters")
expected = rank_calls(model, shape, 0, **how)
print(f"{'started':>7} {'formula':>7}")
for (kind, num_bytes, group), number in sorted(ran.calls.items()):
    by_formula = expected[kind, num_bytes, group]
    size = f"{num_bytes / 2**20:.3g} MiB" if num_bytes > 1024 else f"{num_bytes} bytes"
    print(f"{number:7} {by_formula:7}  {kind} of {size} over {group} ranks")
print("all agree" if ran.calls == expected else "they do not agree")

# %% [markdown]
# Every collective that the rank starts is in the formula, with the same size and the same group. There are more
# all-gathers than reduce-scatters because only a part of each input is kept, and backward gathers it once more. (The
# all-reduce of 400 MiB over 2 ranks is the gradient of the tied embedding, which the first and the last stage both have.)
# The dry run leaves out the average of gradients over dp, and ZeRO's optimizer.
#
# **Takeaway: a dry run proves that code and plan count the same things. It cannot say how long they take.**

# %% [markdown]
# ## 7. The miniature (core, 12 min)
#
# Now with real numbers. A **miniature** uses all axes of the plan, each with two ranks, and its ZeRO-1: tp = 2, pp = 2
# and dp = 2 are eight processes, which this machine can start. The model is `gpt_tiny`. It tells nothing about the speed
# of a 70B model, but it runs the same code, through the same groups, in the same order.
#
# A second run with tp = 2 and dp = 4 has no pipeline and no ZeRO. Both begin with the same parameters and see the same
# samples, so their losses should be the same, to four digits.

# %%
NO_PIPELINE = "--parallel.tp 2 --parallel.dp 4"
MINIATURE = (
    "--parallel.tp 2 --parallel.pp 2 --parallel.dp 2 --train.micro_batch 2 "
    "--parallel.data_parallel labcode --parallel.zero_stage 1"
)

chosen = lab.fitting(brief)[0].layout
print(f"the miniature: {lab.miniature(chosen)}")
here = lab.measure_here()
reference = lab.train_here("reference", NO_PIPELINE)
miniature = lab.train_here("miniature", MINIATURE)

# %% tags=["nbval-check-output"]
gap = lab.largest_gap(reference.losses, miniature.losses)
print(f"the losses are the same to four digits: {gap < 1e-4}")

# %% [markdown]
# A pipeline that mixed up two micro-batches, a tp group with the wrong ranks, or an optimizer that updates another
# rank's part would show here. Sums are made in another order, so the last digits differ.
#
# And the time? `measure_here` has measured this machine with eight ranks at work: matmuls, attention, memory, each
# collective, and what Python takes for an operation and for a step. The result is a cluster file like yours, which the
# estimate reads. What the estimate leaves out goes into one factor, as for any software stack. The run without a pipeline
# gives this factor, measured over predicted, and the miniature is predicted with it: we **calibrate** the estimate.

# %% tags=["figure"]
reference_s = lab.predicted_here(NO_PIPELINE, here).step_s
miniature_s = lab.predicted_here(MINIATURE, here).step_s
factor = reference.step_s / reference_s
with_factor_ms = 1e3 * factor * miniature_s
print(f"with the factor {with_factor_ms:.0f} ms, measured {1e3 * miniature.step_s:.0f}")
plot.bars(
    {
        "no pipeline": {
            "predicted": 1e3 * reference_s,
            "with the factor": 1e3 * factor * reference_s,
            "measured": 1e3 * reference.step_s,
        },
        "miniature": {
            "predicted": 1e3 * miniature_s,
            "with the factor": with_factor_ms,
            "measured": 1e3 * miniature.step_s,
        },
    },
    caption="21.run",
)

# %% [markdown]
# On a quiet machine the calibrated prediction is within a few tens of percent. If eight ranks share fewer cores, the
# miniature may be faster than predicted: a rank that waits in the pipeline's bubble leaves its core to another one, which
# no GPU does.
#
# | | what it can prove | what it cannot |
# |---|---|---|
# | estimate | which layouts are worth a try | seconds to better than some 25 % |
# | script and linter | that SLURM and the cluster understand the job | that the job is wise |
# | dry run | parameters, collectives and bytes of a rank, exactly | time, the sums over dp, ZeRO |
# | miniature | that tp, pp, dp and ZeRO-1 work together: the same losses | the speed, and what only large numbers show |
# | one short job on the cluster | the factor of your software stack | that node 97 is sound |
#
# **Takeaway: prove with the cheapest thing that can fail. Each of these five finds faults that cost more in the next.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* The factor was 0.9 on two cores. It would be far from 1 if `calibrate` did not measure what
# Python takes, which is much of a step of a model with 0.1 million parameters. For the room: which fault does none of
# the five find? (Wrong data, a learning rate that is too high, a GPU that miscomputes: lessons 06, 17 and 19.)

# %% [markdown]
# ## 8. What else a reviewer asks (core, 15 min)
#
# A layout is one line of a plan. Those who pay for 1,024 GPUs ask for the others:
#
# - **Does the batch still help?** 1,024 samples of 4,096 tokens are 4.2 million tokens. Lesson 06 has the rule: up to the
#   critical batch more samples save steps, far beyond it hardly any; it grows during a run. Llama 3 405B began with 4
#   million tokens and ended with 16 million (section 3.4.1 of the paper). So 4.2 million is about where a larger model
#   began.
# - **Which precision?** Matmuls in bfloat16. FP8 would make them faster, and lesson 18 shows what it needs.
# - **What breaks?** Llama 3's run on 16,384 H100s had 419 unexpected interruptions in 54 days (table 5 of the paper).
# - **What does saving cost?** A checkpoint has the parameters and both moments, 12 bytes a parameter here. Suppose that
#   the file system takes 20 GB/s from all ranks together; ask your site for its own number. A restart takes 10 minutes.
#
# **Predict.** How many failures will our run see, if it is interrupted as often as Llama 3's? (Failures are proportional
# to GPUs and to days.) And how much longer does it take because of failures and saving, with the best interval between
# checkpoints: about 3 %, 10 % or 30 %?

# %% tags=["predict"]
failures_guess = 419 * (1024 * 17) / (16384 * 54)
longer_percent = 3

# %% tags=["nbval-check-output"]
from labcode.perf import failures

weights = l20_plan.parameters(brief.shape)
days, _ = lab.days_and_mfu(brief, lab.fitting(brief)[0].step_s)
mtbf_s = 54 * DAY_S * 16384 / 419 / brief.gpus
checkpoint_bytes = 12 * weights
save_s = checkpoint_bytes / 20e9
interval_s = failures.daly_interval_s(save_s, mtbf_s)
longer = failures.overhead(interval_s, save_s, restart_s=600, mtbf_s=mtbf_s)
num_failures = days * DAY_S / mtbf_s
compare("failures", failures_guess, num_failures, within=1.2, found="computed")
nearest = min((3, 10, 30), key=lambda percent: abs(percent - 100 * longer))
compare("longer by, %", longer_percent, nearest, options=(3, 10, 30), found="computed")
print(f"checkpoint {checkpoint_bytes / 1e9:.0f} GB, saved in {save_s:.0f} s")
print(f"a failure every {mtbf_s / 3600:.0f} hours")
print(f"a checkpoint every {interval_s / 60:.0f} minutes")
print(f"{longer:.1%}")

# %% [markdown]
# (That failures are proportional to GPUs, and that your machines are as good as Meta's, is an assumption. Lesson 17 shows
# clusters that are worse.) A few percent are less than the spread of the estimate. Nodes are another matter: a broken one
# is away for days, and the job needs all 128. We count each failure as a broken node. That is cautious: of Llama 3's 419
# interruptions, 54 were software and 35 the network.

# %% tags=["nbval-check-output"]
repair_days = 3
away = repair_days * DAY_S / mtbf_s
total_days = days * (1 + longer)
node_kw = 10.2  # the most that a DGX H100 takes, by its datasheet
energy_mwh = brief.gpus / 8 * node_kw * total_days * 24 / 1000
print(f"{total_days:.1f} days with failures and saving, in jobs of 24 hours")
print(f"{away:.1f} nodes are away at any time, if a repair takes {repair_days} days")
print(f"{brief.gpus * total_days * 24:,.0f} GPU hours")
print(f"at most {energy_mwh:.0f} MWh for the nodes; cooling and network come on top")

# %% [markdown]
# So the plan asks for 132 nodes instead of 128, since more than one is often away, for some eighteen jobs in a row that
# each resume from the last checkpoint (lesson 14, `--dependency` or requeue), and for somebody who reads the log every
# day. The price is the GPU hours times what your site charges.
#
# **The page.** Write the plan down, as a page that somebody can read in three minutes, with these parts: the brief in
# two sentences; the layout with its bytes of a parameter; seconds, days and MFU, and the interval in which they will lie;
# memory of the fullest rank and what is left; the two strongest rivals with number and part; batch and precision;
# checkpoints, failures and spare nodes; GPU hours and energy; what you will measure in the first hour, and which number
# would make you stop. Give it to a colleague, who may ask three questions.
#
# **Takeaway: a plan is a page. The layout is one paragraph of it.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Pages are best exchanged in pairs; each writes the three questions under the other's page. What
# is nearly always missing: the convention of bytes, the unit of MFU's peak, and the number at which one would stop. A
# good one: "if the first 20 steps take more than 1.27 times 4.3 s, we stop and profile". Nobody checks the page but its
# reader, on purpose.

# %% [markdown] tags=["exercise"]
# ## 9. Open end: your plan (optional, 24 min)
#
# ### Exercise 21.6 · Plan it, and defend it
#
# The second brief, `lab.TASK`: the same 70B model on 1,024 **A100s** with 80 GB, whose network has an eighth of the
# H100s' rate; 600 billion tokens in at most 25 days. Choose a layout and defend it. Your own functions, or labcode's
# (`lab.fitting`, `lab.candidates`, `lab.rivals`, `lab.verdict`, `lab.predicted`, `lab.days_and_mfu`), do the
# arithmetic: which layout is yours to decide. Return
#
# - `layout`: your `Layout`, one of `lab.candidates(task)`, at most 5 % slower than the best one that fits;
# - `defence`: a dict with `"step_s"`, `"memory_gib"` (of the fullest rank), `"days"`, and `"rivals"`: a list of **two**
#   tuples `(layout, amount, unit, part)`, the strongest rivals of two different kinds, both of which lose.
#
# The rubric has nine points: *legal, fits, fast, step_s, memory_gib, days, rival 1, rival 2, two kinds*. The check says
# which are done, and what is missing in the others. 12 to 18 lines.

# %% tags=["exercise"]
def my_plan(task):
    """(layout, defence) for a brief."""
    ### BEGIN SOLUTION
    layout = Layout(dp=32, pp=8, tp=4, zero=1, micro_batch=1, checkpointing="none")
    mine = lab.predicted(layout, task)
    days, _ = lab.days_and_mfu(task, mine.step_s)
    strongest = lab.rivals(layout, lab.candidates(task))
    defended = []
    for kind in ("tp", "checkpointing"):
        other = strongest[kind].layout
        about = lab.predicted(other, task)
        amount, unit, part = lab.verdict(mine, about, task.room_bytes)
        defended.append((other, amount, unit, part))
    defence = {
        "step_s": mine.step_s,
        "memory_gib": mine.memory_bytes / GIB,
        "days": days,
        "rivals": defended,
    }
    return layout, defence
    ### END SOLUTION

# %% tags=["check"]
check("21.6", my_plan)

# %% [markdown]
# Then tell it to somebody in two minutes: the brief, the layout, the two rivals, and what you would measure in the
# first hour on the cluster.

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Eight layouts pass. The one that was best on the H100s just misses (5.2 %): its 64 replicas have
# twice the gradients to send over a network with an eighth of the rate. Let two groups with different layouts defend
# them against each other; the memory that they leave is a good argument for the slower ones.

# %% [markdown]
# ## From here to GPUs and SLURM (core, 2 min)
#
# | what | start |
# |---|---|
# | every layout of a brief, here of Llama 3 70B | `python -m labcode.perf plan --model llama3-70b --cluster dgx-h100 --gpus 1024 --global-batch 1024` |
# | on your own cluster | `python -m labcode.perf plan --model gpt2-124m --cluster my.toml --gpus 16 --global-batch 256` |
# | one rank, dry | `python -m labcode.run.dry_run 1024 gpt_10m --parallel.tp 2 --parallel.pp 2 --train.global_batch 512` |
# | the script | `python -m labcode.slurm render gpt_10m --site perlmutter --nodes 2 --ranks-per-node 4` |
# | the miniature | `torchrun --nproc-per-node 4 -m labcode.train gpt_tiny --parallel.tp 2 --parallel.pp 2 --train.micro_batch 4` |
#
# On a cluster the first job is a short one: 20 steps of the plan's layout. Its step time over the prediction is the
# factor of your stack (`--scale`). Then plan again with it, and look whether the order of the first ten has changed.
#
# ## Questions (core, 4 min)
#
# **1.** Two layouts are 2 % apart by the estimate. One leaves 12 GiB free, the other 36. Which do you take?
#
# <details><summary>Answer</summary>
#
# The one that leaves 36 GiB. The estimate cannot tell 2 % apart, and an out-of-memory error in the second week costs
# more than 2 %.
# </details>
#
# **2.** Why is a rival that differs in two choices no good in a defence?
#
# <details><summary>Answer</summary>
#
# It may lose by one change although the other one would win. Only with one change at a time do you know what made it
# lose.
# </details>
#
# **3.** The miniature runs well and the big job hangs in its first step. What could the miniature not show?
#
# <details><summary>Answer</summary>
#
# Anything that needs several nodes: a network interface that is down, a firewall, wrong NCCL settings, a node that is
# slower than the others. Lesson 14 tells how to find it.
# </details>
#
# **4.** From lesson 13: which states does ZeRO-1 cut, and why does our 70B need it although tp and pp already cut the
# parameters into 16?
#
# <details><summary>Answer</summary>
#
# The optimizer's states, over dp. Of 16 bytes for each parameter they are half here (two moments in float32): for 4.5
# billion parameters on each rank they take 33 GiB, and with ZeRO-1 over 64 replicas half a GiB.
# </details>
#
# ## Recap
#
# The course up to here, a line for each lesson:
#
# | lesson | what stays |
# |---|---|
# | 01 | a ring all-reduce sends 2 (n-1)/n of the bytes, however many ranks there are |
# | 02, 03 | one device first: data, profile, precision |
# | 04, 05 | gradients are averaged in buckets, while backward still computes |
# | 06, 07 | a larger batch is another training; most faults of data parallelism are silent |
# | 08 | ranks are a grid; the axis that talks most gets the neighbours |
# | 09, 10 | tp cuts matrices, two all-reduces a layer each way; sequence parallelism cuts the rest |
# | 11 | the ring carries keys and values round; long samples fit |
# | 12 | the bubble is (pp-1)/m |
# | 13 | ZeRO cuts states over dp: 12, 14 or all 16 bytes of a parameter, where they are 2+2+12 |
# | 14, 15 | a job is a script; a layout is a form of a few numbers |
# | 16 | memory has parts; checkpointing buys some back with a third more arithmetic |
# | 17 | machines break: save, resume, lose little |
# | 18, 19 | fewer bits are faster where the range holds; compare ranks to find where it does not |
# | 20 | time and memory can be computed before the job is submitted |
# | 21 | a plan is a choice with its rivals, and checks that get more expensive step by step |
#
# **Where to go next.** Read a real stack with what you know now: torchtitan's `parallelize_llama` is our
# `parallelize`, and Megatron-LM's schedules are those of lesson 12. Then take a job of yours, predict it, run it, and
# look for the part that is off.
#
# ## Sources
#
# - Hoffmann et al. 2022, *Training Compute-Optimal Large Language Models*, arXiv:2203.15556: 20 tokens for each weight.
# - Chowdhery et al. 2022, *PaLM*, arXiv:2204.02311: MFU, section 4.1.
# - Narayanan et al. 2021, *Efficient Large-Scale Language Model Training on GPU Clusters*, arXiv:2104.04473: which axis
#   belongs where.
# - Korthikanti et al. 2022, *Reducing Activation Recomputation*, arXiv:2205.05198: sequence parallelism.
# - Rajbhandari et al. 2019, *ZeRO*, arXiv:1910.02054.
# - Llama Team 2024, *The Llama 3 Herd of Models*, arXiv:2407.21783: 38 to 43 % of the peak on up to 16,384 H100s; table 5,
#   interruptions; section 3.4.1, the batch in tokens.
# - Daly 2006, doi:10.1016/j.future.2004.11.016: the interval between checkpoints. NVIDIA DGX H100 datasheet, 2022: 10.2 kW.
# - PyTorch, *torchtitan*: <https://github.com/pytorch/torchtitan>; its FSDP in a pipeline and its dtypes:
#   `fsdp_reshard_after_forward`, `mixed_precision_param` and `mixed_precision_reduce` in
#   <https://github.com/pytorch/torchtitan/blob/b5bcd76/torchtitan/config/configs.py>. DeepSpeed's refusal:
#   <https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/runtime/pipe/engine.py>.
# - NVIDIA, *Megatron-LM*: <https://github.com/NVIDIA/Megatron-LM>; bytes of a parameter with its distributed optimizer:
#   <https://docs.nvidia.com/megatron-core/developer-guide/latest/distrib_optimizer.html>; Megatron FSDP:
#   <https://docs.nvidia.com/megatron-core/developer-guide/nightly/user-guide/features/megatron_fsdp.html>.
