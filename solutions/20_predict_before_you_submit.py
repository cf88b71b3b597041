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
# # 20 · Predict before you submit
#
# A job on a thousand GPUs waits in the queue for a day, and then it may stop after a minute because it is out of
# memory. Its time and its memory can be computed beforehand, with formulas that fit on a page. You know most of them
# from earlier lessons. Here you put them together into a tool that tells, for a transformer and a layout of its ranks on
# a cluster, how long a step takes and whether it fits, and you find out how far you can trust it.
#
# ## Goals
#
# - compute the parameters and the FLOPs of a transformer, and get what PyTorch counts;
# - compute the memory of the fullest rank of any layout;
# - say how fast a collective is on nodes full of GPUs;
# - write a model of a step: matmuls, communication, the bubble, and what hides behind what;
# - search all layouts of a cluster, and defend the one that you choose;
# - know how far such predictions are off, on several hundred published runs.
#
# **Time**: 174 minutes, and 36 more for what is optional. Good places for a break are after sections 2, 3 and 4.
#
# **Needs**: lesson 08 (sections 2, 4 and 5), lesson 10 (section 2), lesson 12 (sections 2 and 4), lesson 13 (section
# 1). For section 3 also lesson 15 (section 3). What is taken from other lessons is named where it is used.

# %%
from course.exercises import l20
from course.lab import Ranks, check, compare, plot
from course.labs import l20_plan as lab
from labcode.perf.cluster import load_cluster

ranks = Ranks(2)
GIB = 2**30

# %% [markdown]
# ## 1. Parameters and FLOPs (core, 34 min)
#
# Everything begins with the number of parameters. A block of a GPT has four matrices. With h hidden features, N heads
# for queries, K heads for keys and values (K = N, or fewer that several queries share), and F features inside the MLP,
# the head size is D = h / N, and these are the matrices:
#
# | matrix | rows × columns |
# |---|---|
# | q, k and v in one | (N + 2K) D × h |
# | projection behind the attention | h × h |
# | up | F × h |
# | down | h × F |
#
# Each of these matmuls has a **bias**, one number for each of its outputs. The block's two norms have a weight and a
# bias of h numbers each. Outside of the blocks there are the embedding (a row of h numbers for each token of the
# vocabulary), the positions (a row for each place of the sequence) and a last norm. The head, which computes the logits,
# is the embedding once more: the two are **tied**, and count once.
#
# With K = N and F = 4h the matrices of a block have 3h² + h² + 4h² + 4h² = 12h² parameters. GPT-3, for example, has 96
# layers and h = 12,288. The next cell builds it with labcode's own GPT on PyTorch's device *meta*, which has shapes but
# no memory, and counts.

# %% tags=["nbval-check-output"]
counted = lab.count_weights(lab.GPT3)
print(lab.GPT3)
in_matrices = 12 * 96 * 12_288**2
print(f"by 12 L h²: {in_matrices / 1e9:.1f} billion, counted {counted / 1e9:.1f}")

# %% [markdown]
# What 12 L h² leaves out is less than a hundredth of so large a model. In a small one it is more.

# %% [markdown] tags=["exercise"]
# ### Exercise 20.1 · Count the parameters
#
# Write the exact number for any `lab.Shape`: it has `layers`, `hidden`, `heads`, `kv_heads`, `ffn`, `vocab` and
# `tokens` (of a sample). The check builds real models and compares. 6 to 10 lines.

# %% tags=["exercise"]
def parameters(shape):
    """All parameters of a GPT."""
    ### BEGIN SOLUTION
    hidden = shape.hidden
    head_size = hidden // shape.heads
    qkv = hidden + 2 * shape.kv_heads * head_size
    attention = hidden * qkv + qkv + hidden * hidden + hidden
    mlp = hidden * shape.ffn + shape.ffn + shape.ffn * hidden + hidden
    norms = 4 * hidden
    ends = (shape.vocab + shape.tokens) * hidden + 2 * hidden
    return shape.layers * (attention + mlp + norms) + ends
    ### END SOLUTION

# %% tags=["check"]
check("20.1", parameters)

# %% [markdown]
# Models of the LLaMA family differ in four things: a third matrix in the MLP (it is *gated*), no biases, no table of
# positions, and (the large ones) a head of their own. `labcode.perf.transformer` counts those as well.
#
# Now the arithmetic. A matmul of n tokens with a matrix of w weights takes n · w multiplications and as many additions:
# **2 n w FLOPs**. Backward takes twice as much as forward, because it has two matmuls for each one of forward (lesson 18
# lists them). So each weight of a matmul costs 6 FLOPs for each token.
#
# Attention has two matmuls without any weights: the scores, q kᵀ, and the sum of the values. For a sample of s tokens
# each of them takes 2 s² h FLOPs in each layer, together 4 s² h. A **causal** mask leaves half of the scores, and a
# kernel that skips the other half does half of this work. Published FLOPs mostly count the whole square all the same,
# but not always: Megatron-LM counted it whole in 2021, and its logs count half of it today.
#
# Activation checkpointing (lesson 16) runs the forward of each layer a second time: 4 forwards instead of 3. The head
# is not in a layer, and is not repeated.
#
# The picture shows which fraction of a forward these three parts have, for the sizes of GPT-3, when samples get longer.

# %% tags=["figure"]
sequence_lengths = [2**power for power in range(10, 18)]
forward = {"products of the layers": [], "attention": [], "head": []}
for tokens in sequence_lengths:
    each_token = {
        "products of the layers": 2 * lab.GPT3.layers * lab.products(lab.GPT3),
        "attention": lab.GPT3.layers * 4 * tokens * lab.GPT3.hidden,
        "head": 2 * lab.GPT3.vocab * lab.GPT3.hidden,
    }
    total = sum(each_token.values())
    for name, value in each_token.items():
        forward[name].append(100 * value / total)
plot.lines(forward, x=sequence_lengths, caption="20.lengths")

# %% [markdown]
# At 2,048 tokens attention is small. So the rule of thumb of 6 FLOPs for each parameter and token is within a few
# percent for GPT-3, although it leaves out attention and counts the table of positions, which is only looked up.

# %% [markdown] tags=["exercise"]
# ### Exercise 20.2 · Count the FLOPs
#
# Write the FLOPs of forward and backward for `samples` samples. `lab.products(shape)` is the number of weights of **one
# layer** that are in a matmul. The head is a matmul with `vocab` times `hidden` weights. `causal` counts half of
# attention's square; `checkpointing` is `"none"` or `"full"`. The check also uses PyTorch's own counter. 6 to 8 lines.

# %% tags=["exercise"]
def flops(shape, samples, causal=False, checkpointing="none"):
    """FLOPs of forward and backward."""
    ### BEGIN SOLUTION
    tokens = samples * shape.tokens
    attention = 4 * tokens * shape.tokens * shape.hidden
    if causal:
        attention = attention / 2
    layers = shape.layers * (2 * tokens * lab.products(shape) + attention)
    head = 2 * tokens * shape.vocab * shape.hidden
    forwards_of_layers = 4 if checkpointing == "full" else 3
    return forwards_of_layers * layers + 3 * head
    ### END SOLUTION

# %% tags=["check"]
check("20.2", flops)

# %% [markdown]
# Here are the formulas and what PyTorch counts while a model runs forward and backward.

# %% tags=["nbval-check-output"]
by_rule = 6 * lab.parameters(lab.GPT3) * 2048
by_formula = lab.flops(lab.GPT3, 1)
print(f"a sample of GPT-3: rule of thumb {by_rule:.3g}, formula {by_formula:.3g}")
by_formula = lab.flops(lab.SMALL, 3)
by_pytorch = lab.count_flops(lab.SMALL, 3)
print(f"a small model: formula {by_formula:,.0f}, PyTorch {by_pytorch:,.0f}")

# %% [markdown]
# **Takeaway: a GPT has about 12 L h² parameters, and training costs 6 FLOPs for each parameter and token, 8 with
# checkpointing. Attention adds to this in proportion to the length of a sample.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* People forget that tied means once, and count the table of positions as FLOPs. Ask: at which
# length does attention cost as much as the matmuls of a layer? (4 s h = 24 h², so at s = 6h: 73,728 tokens for GPT-3.)

# %% [markdown]
# ## 2. Bytes (core, 30 min)
#
# The memory of a rank has three parts. The first are its **states**: parameters, gradients, and the optimizer state. In
# mixed precision with Adam these are 2 + 2 + 12 = 16 bytes for each parameter: parameter and gradient in 16 bits, and in
# the optimizer a 32-bit copy of the parameter and two moments. ZeRO (lesson 13) divides the 12 by the ranks of dp at
# stage 1, the gradients' 2 as well at stage 2, and the parameters' 2 at stage 3.
#
# That is one convention of several. Megatron-LM, training in bfloat16, by default keeps gradients in 32 bits: 2 + 4 +
# 12 = 18. A model whose parameters and gradients are in 32 bits takes 4 + 4 + 8 = 16, since it needs no copy. Without
# ZeRO the three are nearly the same. With it they are not: ZeRO-1 leaves each rank 4, 6 or 8 bytes for a parameter.
# FSDP2, as torchtitan uses it, keeps 4 + 4 + 8 too, all of it in shards, and gathers copies of 2 bytes. So say which
# convention you use, and how many bytes a number has that you send (lesson 21, section 2).
#
# The second part are the **activations** (lesson 10). For b samples of s tokens, a block in 16-bit numbers, with an
# attention that never stores its scores and without dropout, keeps
#
# | for whom | numbers for each token and feature |
# |---|---|
# | two norms: their inputs | 2 |
# | q, k and v together, and the MLP's up: their inputs | 2 |
# | attention: q, k, v, and its output, which the projection reads too | 4 |
# | GELU and down: their inputs, with F = 4h | 8 |
#
# That is 16 numbers of 2 bytes: **32 s b h bytes** in each layer. Tensor parallelism with sequence parallelism divides
# all of it by tp. With full checkpointing a layer keeps its input alone, 2 s b h bytes.
#
# In a pipeline (lesson 12) the first stage has up to pp micro-batches in flight, and never more than there are: min(pp,
# m) for m micro-batches. The last stage has one.
#
# The third part is **temporary** (*passing* in the figure below): it is there for a moment, on top of the rest. The last
# stage has the logits, their softmax and its gradient, 2 + 4 + 4 = 10 bytes for each token and entry of the vocabulary;
# tp divides the vocabulary, and so these too. With checkpointing, a layer that is computed again has all 32 s b h bytes
# for this moment. The logits are gone before the first layer is computed again, so the larger of the two counts.
#
# Let us try the first two on a real model on this machine, with 4 layers, h = 256, and 8 samples of 128 tokens. It is in
# float32, so parameter, gradient and two moments are 16 bytes again, and an activation has 4 bytes instead of 2.

# %%
REAL = lab.Shape(
    layers=4, hidden=256, heads=4, kv_heads=4, ffn=1024, vocab=512, tokens=128
)
real_bytes = lab.measured_bytes(REAL, samples=8)
states = 16 * lab.parameters(REAL)
activations = 4 * 2 * 32 * 128 * 8 * 256  # layers, float32, and 32 s b h
print(f"states:      {states:,} bytes, measured {real_bytes['states']:,.0f}")
print(f"activations: {activations:,} bytes, measured {real_bytes['activations']:,.0f}")

# %% [markdown] tags=["exercise"]
# ### Exercise 20.3 · The memory of a rank
#
# A `lab.Layout` has `dp`, `pp`, `tp`, `zero` (the stage, 0 to 3), `micro_batch` (samples at once) and `checkpointing`
# (`"none"` or `"full"`). The fullest rank is on the first stage of the pipeline or on the last one, depending on the
# sizes. Compute the bytes of a rank on each of the two, and return the larger number. It is a sum of three terms:
#
# 1. **States.** A stage has layers / pp layers, and each of them `lab.products(shape)` weights. The first stage has the
#    embedding as well, and the last one the head: either is vocab · hidden weights. (A single stage has both, but they are
#    tied, and count once.) tp divides all of these. `lab.state_bytes(weights, zero, ranks)` gives the states of a rank with
#    so many weights, when ZeRO shards them over so many ranks. Leave out biases, norms and positions.
# 2. **Activations.** For each micro-batch in flight a layer keeps 32 s b h / tp bytes, or 2 s b h / tp with full
#    checkpointing. On the first stage min(pp, m) micro-batches are in flight, on the last one only one.
# 3. **Temporary memory.** With checkpointing, one layer is whole for a moment: count what it has then beyond what it
#    keeps, on either stage. The last stage also has the logits, 10 s b vocab / tp bytes, but not at the same moment: there
#    the larger of the two counts. (A single stage is the last one.)
#
# 15 to 20 lines.

# %% tags=["exercise"]
def memory(shape, layout, global_batch):
    """Bytes of the fullest rank."""
    ### BEGIN SOLUTION
    layers = shape.layers // layout.pp
    weights = layers * lab.products(shape) + shape.vocab * shape.hidden
    states = lab.state_bytes(weights / layout.tp, layout.zero, layout.dp)

    tokens = layout.micro_batch * shape.tokens
    whole = 32 * tokens * shape.hidden / layout.tp
    kept = whole
    if layout.checkpointing == "full":
        kept = 2 * tokens * shape.hidden / layout.tp
    again = whole - kept
    logits = 10 * tokens * shape.vocab / layout.tp

    micro_batches = global_batch // (layout.dp * layout.micro_batch)
    under_way = min(layout.pp, micro_batches)
    first = layers * under_way * kept + again
    last = layers * kept + max(logits, again)
    return states + max(first, last)
    ### END SOLUTION

# %% tags=["check"]
check("20.3", memory)

# %% [markdown]
# Now take a GPT of 13 billion parameters (40 layers, h = 5,120) on 64 GPUs of 80 GB, with one sample of 2,048 tokens at
# a time, in four layouts: dp 64 without ZeRO, with ZeRO-1, and with ZeRO-3; and dp 4 x pp 4 x tp 4.
#
# **Predict.** How many of the four fit? Estimate states and activations roughly.

# %% tags=["predict"]
layouts_that_fit = 3  # 16 bytes for each parameter are 208 GB, 4 bytes are 52

# %% tags=["figure"]
layouts = {
    "dp 64": lab.Layout(dp=64),
    "dp 64, ZeRO-1": lab.Layout(dp=64, zero=1),
    "dp 64, ZeRO-3": lab.Layout(dp=64, zero=3),
    "dp 4, pp 4, tp 4": lab.Layout(dp=4, pp=4, tp=4),
}
parts = {}
for name, layout in layouts.items():
    in_bytes = lab.memory_parts(lab.GPT_13B, layout, global_batch=64)
    parts[name] = {part: value / GIB for part, value in in_bytes.items()}
fit = sum(sum(of_rank.values()) < 80e9 / GIB for of_rank in parts.values())
compare("fit", layouts_that_fit, fit, within=1, found="computed")
plot.bars(parts, caption="20.memory")

# %% [markdown]
# The formulas of this lesson count neither the layers of experts nor the messages of expert parallelism. They also leave
# out what ZeRO-3 gathers (layers, embedding, head), the CUDA context, NCCL's buffers, and memory that the allocator
# cannot use. The lesson's search sets 4 GiB of each GPU aside for these (`lab.RESERVED_BYTES`).
#
# **Takeaway: states are cut by tp, pp and ZeRO; activations by tp, the micro-batch and checkpointing. A pipeline cuts
# states. With 1F1B and m ≥ pp it does not cut the activations of the first stage, where pp micro-batches are in
# flight.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* The usual mistakes: all m micro-batches in flight, or always pp of them; ZeRO-1 that cuts
# everything. Ask: why is the first stage not m times as full? (1F1B: a backward frees what its forward kept.)

# %% [markdown]
# ## 3. Time (core, 50 min)
#
# ### What a GPU reaches
#
# A datasheet states a **peak**. An operation takes the longer of two times: that of its FLOPs, and that of the bytes
# that it reads and writes. The drawing of this is called a **roofline**. Here it is for an A100, with what large matmuls
# and memory *reach* rather than with the peaks.

# %% tags=["figure"]
gpu = load_cluster("selene").gpu
peak = gpu.peak("bfloat16")
reached = gpu.matmul_flops_per_s("bfloat16")
stream = gpu.stream_bytes_per_s
flops_per_byte = [2.0 ** (step / 10) for step in range(-20, 111)]
roof = [min(reached, intensity * stream) / 1e12 for intensity in flops_per_byte]
gelu = 1.0
matmul = 2 * 2048 * 12288 * 12288 / (2 * (2 * 2048 * 12288 + 12288 * 12288))
plot.lines(
    {"reached": roof},
    x=flops_per_byte,
    reference={"peak of the datasheet": peak / 1e12},
    points={
        "elementwise, such as GELU": ([gelu], [gelu * stream / 1e12]),
        "a matmul of GPT-3": ([matmul], [reached / 1e12]),
    },
    caption="20.roofline",
)

# %% [markdown]
# Large matmuls are on the flat part. Elementwise operations are on the slope: each takes little time, but there are
# many. Our model of a step counts only matmuls, at the rate that they reach **within a training run**, where the clock
# drops and operands are not in the cache. labcode uses 85 % of what the best shape reaches alone. It is one of two
# numbers that were chosen with published runs in view, all of them together. (The other is the time of a launch.)
#
# ### What a link reaches
#
# Lessons 01 and 08 had the **alpha-beta model**: a message costs alpha seconds and 1/beta for each byte. A ring
# all-reduce over p ranks sends 2 (p-1) messages through each rank's link, with 2 (p-1)/p times the bytes of the tensor
# in all.
#
# Within a node that is all. Over several nodes, lesson 08 (section 5) derived how fast a group is, as **bus
# bandwidth**, the rate that the links of one ring would need. With n ranks on k nodes it is, by the **rule of two
# levels**,
#
# $$\min\left(\text{inside},\ \text{between} \cdot \frac{n - 1}{k - 1}\right)$$
#
# where *inside* is the link within a node and *between* a GPU's share of the node's adapters. With one rank in each
# node nothing goes over the inside link, and what is left is *between*. Within one node it is *inside*.
#
# For example, let *inside* be 200 GB/s and *between* 20 GB/s. 64 ranks on 8 full nodes have 20 · 63/7 = 180 GB/s. Of 8
# ranks, one in each node, the bus bandwidth is 20 GB/s.
#
# Rings over all adapters are not quite as good: with g ranks in each node they give g · between. On two nodes of the
# example that is 160, where two levels (or NCCL's trees) could have 200, the limit inside. On eight nodes it is 160
# against 180. On four nodes of 8 B200, with 50 GB/s for each GPU, 381.8 were measured (Bekman), where rings would give
# 400 and two levels 517. So on few nodes the rule may promise too much.

# %% [markdown] tags=["exercise"]
# ### Exercise 20.4 · The rule of two levels
#
# `ranks` ranks form a group, and neighbours in it are `stride` ranks apart (lesson 08): with tp = 4, the ranks of a dp
# group are 4 apart. Ranks fill nodes of `cluster.gpus_per_node` in order. `cluster.inside.beta_bytes_per_s` and
# `cluster.between.beta_bytes_per_s` are the two links. Return bytes per second. 6 to 9 lines.

# %% tags=["exercise"]
import math


def bus_bytes_per_s(cluster, ranks, stride):
    """The rate that the links of one ring would need."""
    ### BEGIN SOLUTION
    per_node = max(1, cluster.gpus_per_node // stride)
    nodes = math.ceil(ranks / per_node)
    inside = cluster.inside.beta_bytes_per_s
    if nodes == 1:
        return inside
    between = cluster.between.beta_bytes_per_s * (ranks - 1) / (nodes - 1)
    if per_node == 1:
        return between
    return min(inside, between)
    ### END SOLUTION

# %% tags=["check"]
check("20.4", bus_bytes_per_s)

# %% [markdown]
# ### What a step is made of
#
# The picture shows a step on four stages with 8 micro-batches. A box is forward and backward of one micro-batch on one
# stage: its matmuls, the all-reduces of tp, and the messages to the neighbours. (Where forward and backward lie within
# the step depends on the schedule; how long the step takes does not.)

# %% tags=["figure"]
plot.step_anatomy(stages=4, micro_batches=8, caption="20.anatomy")

# %% [markdown]
# A stage is busy for m boxes and waits for pp - 1: together (m + pp - 1) boxes (lesson 12). Then the gradients are
# reduced. Lesson 15 wrote this down for a small model. For a large one there are three things to add:
#
# - **Checkpointing** repeats forward, and so its two all-reduces in each layer: 6 instead of 4.
# - **ZeRO-3** sends parameters and gradients in every micro-batch: two all-gathers of the parameters and a
#   reduce-scatter of the gradients, which is as much as 1.5 all-reduces. They **hide** behind the matmuls and tp's
#   all-reduces of the same micro-batch: as long as they take no longer than those, they cost no time of their own. They
#   are not quite free, because NCCL keeps some of the GPU's multiprocessors busy; labcode takes 15 % of the hidden
#   time, which is Calculon's number for links inside a node (for those between nodes it has 2 %). At the end of the
#   step nothing is left to do.
# - **Without ZeRO-3** the gradients are sent once in a step, and the backward of the **last** micro-batch hides them
#   (lesson 15): at most two thirds of its matmuls. With ZeRO-1 or 2 the gradients take a reduce-scatter, half of the
#   communication; the other half is the all-gather of the new parameters, which comes after the optimizer and hides
#   behind nothing here. (Some programs hide it in the next forward.) The same 15 % count.
#
# For example, a micro-batch computes for 100 ms, and sending its parameters and gradients takes 140 ms. Then 100 ms are
# hidden and 40 ms are not, and the box takes 100 + 40 + 0.15 · 100 = 155 ms. If sending takes 60 ms, the box takes 109.

# %% [markdown] tags=["exercise"]
# ### Exercise 20.5 · The time of a step
#
# Return the seconds of a step. `lab.flops` is a finished version of yours, and so is `lab.parameters`. Attention counts
# as a whole square here, so leave `causal` as it is. `layout.checkpointing` is a text, `"none"` or `"full"`.
#
# 1. Matmuls of a micro-batch on a stage: its FLOPs / (tp · pp) / `cluster.flops_per_s`.
# 2. tp: in each layer of the stage 4 all-reduces (6 with `"full"`) of 2 · b · s · h bytes;
#    `lab.all_reduce_s(cluster, ranks, stride, num_bytes)` is their time, 0 for one rank. tp's ranks are neighbours.
# 3. dp: an all-reduce of the rank's gradients, 2 bytes for each of parameters / (tp · pp). The ranks of dp are tp apart.
#    The matmuls of the last backward can hide it: at most two thirds of those of a micro-batch, and not tp's
#    all-reduces. ZeRO-1 and 2 send as much, and can hide the first half of it. ZeRO-3 sends 1.5 times as much in each
#    micro-batch instead, and behind the matmuls and tp's all-reduces of that micro-batch it hides as much as they take;
#    not behind the messages of pp. What is hidden costs 15 % of its time.
# 4. pp: if there is a pipeline, two messages in each box, of 2 · b · s · h / tp bytes;
#    `lab.send_s(cluster, layout, num_bytes)` is the time of one.
# 5. m + pp - 1 boxes.
#
# 20 to 30 lines.

# %% tags=["exercise"]
def step_s(shape, layout, global_batch, cluster):
    """Seconds of a step."""
    ### BEGIN SOLUTION
    dp, pp, tp, zero, micro_batch, checkpointing = layout
    micro_batches = global_batch // (dp * micro_batch)

    work = lab.flops(shape, micro_batch, checkpointing=checkpointing)
    products_s = work / (tp * pp) / cluster.flops_per_s
    box_s = products_s

    act = 2 * micro_batch * shape.tokens * shape.hidden
    all_reduces = 6 if checkpointing == "full" else 4
    each_s = lab.all_reduce_s(cluster, tp, 1, act)
    box_s += all_reduces * shape.layers / pp * each_s

    gradients = 2 * lab.parameters(shape) / (tp * pp)
    dp_s = lab.all_reduce_s(cluster, dp, tp, gradients)
    if zero == 3:
        hidden_s = min(box_s, 1.5 * dp_s)
        box_s += 1.5 * dp_s - hidden_s + 0.15 * hidden_s
        dp_s = 0.0
    else:
        can_hide_s = dp_s if zero == 0 else dp_s / 2
        hidden_s = min(can_hide_s, 2 / 3 * products_s)
        dp_s += 0.15 * hidden_s - hidden_s

    if pp > 1:
        box_s += 2 * lab.send_s(cluster, layout, act / tp)
    return (micro_batches + pp - 1) * box_s + dp_s
    ### END SOLUTION

# %% tags=["check"]
check("20.5", step_s)

# %% [markdown]
# What this model leaves out (elementwise operations, Python, cold caches) goes into one more number, the **scale** of a
# software: measured over predicted, from one run. It is good for runs of the same software on the same kind of device.
# Section 8 measures it on this machine, and lesson 21 uses it.
#
# **Takeaway: a step is (m + pp - 1) boxes and a tail. Its rates are those that are reached, not those of the datasheet;
# one number, fitted to one run of yours, takes care of most of what is left out.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* People take the adapter's rate for all groups across nodes, and are wrong by a factor of 8. In
# 20.5 the order of the terms matters: what ZeRO-3 hides behind has to be complete before `min`. Ask: why does ZeRO-1
# hide less than no ZeRO, although both send as much? (Its all-gather waits for the optimizer.)

# %% [markdown]
# ## 4. Published runs (core, 12 min)
#
# ### GPT-3 on 1,024 GPUs
#
# Megatron-LM's README reports a run of GPT-3 with 175 billion parameters on 1,024 A100s. Its layout is dp = 8, pp =
# 16, tp = 8, and a step takes 1,536 samples in micro-batches of one, with full checkpointing. How long did a step
# take? Compute it by hand:
#
# 1. FLOPs: 8 for each parameter and token (checkpointing!), 2,048 tokens in a sample;
# 2. over 1,024 GPUs at 312 TFLOP/s (the peak), times 0.87 (what large matmuls reach), times 0.85 (within a training run);
# 3. the bubble: (pp - 1) / m of this, with m = 1,536 / 8 micro-batches;
# 4. tp: 6 all-reduces in each of the 6 layers of a stage, for 192 + 15 boxes; one of them, of 50 MB at 220 GB/s, takes
#    2 · 7/8 · 50 MB / 220 GB/s = 0.4 ms.
#
# **Predict.** How many seconds does a step take? (dp and the optimizer are left out, so a factor of 1.5 is allowed.)

# %% tags=["predict"]
flops_of_a_step = 8 * 175e9 * 2048 * 1536
products_s = flops_of_a_step / 1024 / (312e12 * 0.87 * 0.85)
bubble_s = 15 / 192 * products_s
tp_s = 6 * 6 * (192 + 15) * 0.4e-3
gpt3_step_s = products_s + bubble_s + tp_s

# %%
from labcode.perf import accuracy, estimate

run = lab.gpt3_run()
compare(
    "a step of GPT-3", gpt3_step_s, run.step_s, unit="s", within=1.5, found="published"
)
by_labcode_s = accuracy.predicted_s(run)
print(f"labcode.perf says {by_labcode_s:.1f} s; published are {run.step_s:.1f} s by")
print(run.source)

# %% [markdown]
# Five lines of arithmetic come within a third of the measured time, and stay below it. They leave out
# attention and the elementwise operations, dp and the optimizer, and matmuls that tp has cut do not reach the rate of
# the best shape. labcode's estimate names each part:

# %% tags=["figure"]
found = estimate.estimate(run.model, run.shape, run.cluster, run.settings)
parts = {name: part_s for name, part_s in found.parts.items() if part_s > 0.05}
plot.bars(dict(sorted(parts.items(), key=lambda part: -part[1])), caption="20.gpt3")

# %% [markdown]
# Attention was not fused in 2021: it wrote its scores to memory, which costs time that does not appear in the FLOPs.
#
# ### All of them
#
# One run proves little. labcode ships several hundred published runs with their sources. The table below gives the
# errors over all runs whose step time is known: the median, and the 90th percentile (nine of ten runs are off by
# less). For comparison it has a simple rule of thumb: every training run reaches 45 % of the peak.
#
# **Regret** is what a user would pay. Inside one sweep (same model, GPUs and batch) each predictor picks the layout
# that it finds fastest, and the regret is how much longer this one took than the fastest one that was measured.

# %%
errors = lab.errors()
print(f"{'':36} {'runs':>5} {'median':>8} {'p90':>8} {'regret':>8}")
for name, error in errors.items():
    numbers = f"{error.median:8.1%} {error.p90:8.1%} {error.regret:8.1%}"
    print(f"{name:36} {error.runs:5} {numbers}")

# %% [markdown]
# Read this table critically:
#
# - The predictor is told which software a source used, and on which network. You may not know this of a run that you
#   read about.
# - Two constants were chosen with these runs in view: 85 % above, and the time of a launch. Neither was chosen for one
#   run.
# - "One factor a stack" is fitted on the other runs of the same source, GPU and precision, never on the run itself.
# - A tenth of the runs are off by more than the p90, some for reasons that no formula covers: a slow node, a data
#   loader that could not keep up, a time that was read off a plot.
# - The rule of 45 % predicts the same time for all layouts with the same checkpointing. Where layouts tie, the first
#   one in the source's table is taken, and whether that is a good one says nothing about the rule.
# - The regret is a mean over all sweeps, and a few bad picks make up most of it. Here are the five worst:

# %%
good, of_all = lab.good_picks()
print(f"best pick, or within a tenth of it: {good} of {of_all} sweeps")
for line in lab.worst_picks():
    print(line)

# %% [markdown]
# Four of the five are runs with ZeRO-3, all of one paper of 2021. The likely reason is the software. labcode.perf
# computes ZeRO-3 as it is done today, with one all-gather a layer, hidden behind the layer before. DeepSpeed's ZeRO-3
# of that spring gathered each parameter by itself and waited for it. One of these steps took four times as long as
# predicted, and section 8 looks for the missing time. Ask whether the planner knows the program that you will run.
#
# And memory? It is predicted too low for most published runs, by what the software takes besides its tensors. Section
# 8 has three that ran out of memory, and the prediction would have sent one of them to a GPU that was too small. So
# leave room, as lesson 21 does with a tenth of the GPU.
#
# **Takeaway: trust a clear gap between layouts more than their seconds, and calibrate with one run of your own before
# you promise a date.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Let the room vote on the seconds of GPT-3 before anybody computes. Ask: whose planner would have
# picked the right layout in 2021? (One that knew how DeepSpeed gathered then. The formula is not what was wrong.)

# %% [markdown]
# ## 5. Search (core, 32 min)
#
# ### Thresholds first
#
# A search tells which layout is the best, but not why. Three thresholds of earlier lessons tell beforehand where it
# will end. Φ is the rate at which a GPU computes, and β the bus bandwidth of a group.
#
# | question | threshold | derived in |
# |---|---|---|
# | how many tokens of a micro-batch hide ZeRO-3? | Φ/β | lesson 13b, section 5 |
# | up to which tp does a layer compute longer than it sends? | (tp - 1) < 9 h β / (2 Φ), with β inside a node | lesson 09, section 4 |
# | how many micro-batches keep the bubble below a tenth? | m ≥ 10 (pp - 1) | lesson 12, section 2 |
#
# Take a GPT of 39 billion parameters with h = 8,192 on 128 A100s, 16 nodes of 8 with 220 GB/s inside and 6.25 GB/s of
# network for each GPU. Our model of a step has Φ = 0.869 · 0.85 · 312 = 230 TFLOP/s.
#
# **Predict.** How many samples of 2,048 tokens does a micro-batch need, so that ZeRO-3 over all 128 ranks hides its
# messages? The rule of two levels gives β. (A number with decimals will do: do not round it.)

# %% tags=["predict"]
bus_rate = min(220e9, 6.25e9 * 127 / 15)
samples_needed = 230e12 / bus_rate / 2048

# %% tags=["nbval-check-output"]
a100 = lab.cluster("jean-zay-a100")
exposed = {}
for micro_batch in (1, 2, 4):
    layout = lab.Layout(dp=128, zero=3, micro_batch=micro_batch)
    parts = lab.step_parts(lab.GPT_39B, layout, 512, a100)
    exposed[micro_batch] = parts["fsdp"] / parts["product"]
enough = min(size for size, share in exposed.items() if share < 0.2)
compare("samples", samples_needed, enough, within=1.1, found="computed")
for micro_batch, share in exposed.items():
    print(f"{micro_batch} samples: ZeRO-3 adds {share:.0%} to the matmuls")

largest_tp = 1 + 9 * 8192 * 220e9 / (2 * a100.flops_per_s)
print(f"tp inside a node sends less than it computes up to tp = {largest_tp:.0f}")

# %% [markdown]
# Two samples are enough, if there is room for their activations. (The 16 % that are left are the price of what is
# hidden, and a small rest.) Within nodes of 8 A100s tp is bound by computing, but each further rank costs 1/35 of the
# matmuls' time. (In a domain of 72 GPUs this limit would matter.) A pipeline of 4 stages needs 30 micro-batches. So we
# expect that the search prefers ZeRO-3 with two samples where they fit, and otherwise a pipeline with as many
# micro-batches as the batch allows. Section 6 shows what it finds for exactly this case.
#
# ### All layouts
#
# A layout is a choice of six things. For each divisor tp of the GPUs, each divisor pp of what is left, every micro-batch
# that divides a replica's samples, and so on, there are a few hundred or thousand layouts. Each takes microseconds to
# compute, so there is no need to guess: compute them all.

# %% tags=["nbval-check-output"]
selene = lab.cluster("selene")
legal = lab.legal(lab.GPT_7B, selene, gpus=16, global_batch=32)
print(f"{len(legal)} layouts of a 7B GPT are legal on 16 GPUs")

# %% [markdown] tags=["exercise"]
# ### Exercise 20.6 · The search
#
# Return a list of `(seconds, bytes, layout)` for every legal `lab.Layout` that fits, the fastest first. Legal is:
#
# - dp · pp · tp is the number of GPUs; tp ≤ `cluster.gpus_per_node`;
# - tp divides `kv_heads` and `ffn`, pp divides `layers`, dp · micro_batch divides the batch;
# - the stage of ZeRO is one of `lab.stages_of_zero(dp, pp)`; checkpointing is `"none"` or `"full"`. (In our model stage
#   2 takes as long as stage 1, and ZeRO-3 in a pipeline would gather each stage's weights for every micro-batch: to
#   keep the list short, neither is in it.)
#
# It fits if its memory and `lab.RESERVED_BYTES` are at most `cluster.memory_bytes`. Ask for the memory **first**, and
# compute no time for what does not fit. `lab.memory`, `lab.step_s` and `lab.divisors(number)` are ready. 15 to 20
# lines.

# %% tags=["exercise"]
def search(shape, cluster, gpus, global_batch):
    """[(seconds, bytes, layout)], the fastest first."""
    ### BEGIN SOLUTION
    found = []
    for tp in lab.divisors(gpus):
        if tp > cluster.gpus_per_node or shape.kv_heads % tp or shape.ffn % tp:
            continue
        for pp in lab.divisors(gpus // tp):
            dp = gpus // (tp * pp)
            if shape.layers % pp or global_batch % dp:
                continue
            for micro_batch in lab.divisors(global_batch // dp):
                for zero in lab.stages_of_zero(dp, pp):
                    for kind in ("none", "full"):
                        layout = lab.Layout(dp, pp, tp, zero, micro_batch, kind)
                        needed = lab.memory(shape, layout, global_batch)
                        if needed + lab.RESERVED_BYTES > cluster.memory_bytes:
                            continue
                        seconds = lab.step_s(shape, layout, global_batch, cluster)
                        found.append((seconds, needed, layout))
    return sorted(found)
    ### END SOLUTION

# %% tags=["check"]
check("20.6", search)

# %% [markdown]
# labcode's own search has more to choose from: context parallelism, the order of axes, interleaved stages, one more
# kind of checkpointing. It counts every part of a step. Does it prefer another layout? We run both searches for a GPT of
# 13 billion parameters on 16 GPUs, and estimate with labcode what **our** choice would cost.

# %%
from labcode.perf import plan

ours = lab.search(lab.GPT_13B, selene, gpus=16, global_batch=64)[0]
theirs = plan.plan(
    lab.transformer(lab.GPT_13B),
    load_cluster("selene"),
    gpus=16,
    global_batch=64,
    settings=lab.settings(lab.Layout(), 64),
)
best = theirs.ranked[0]
ours_s, _ = lab.by_labcode(lab.GPT_13B, ours.layout, 64, load_cluster("selene"))
print("ours:  ", ours.layout)
print("theirs:", best.shape, "micro-batch", best.settings.micro_batch)
print(f"ours takes {ours_s / best.step_s:.2f} times as long")

# %% [markdown]
# One case proves little. On another cluster, or with other sizes, the two may choose differently: change `selene` and
# the numbers above, and look.
#
# **Takeaway: try every layout, memory first. Most of what a simple model of a step leaves out costs nearly the same in
# all layouts, so it often ranks them well. Section 4 shows how well labcode's larger model ranks published ones.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* The usual mistakes: tp across nodes, batches that do not divide, only powers of two. Ask what a
# layout that is legal here and still a bad idea looks like. (tp on 8 ranks of a small model: matmuls too small to keep
# a GPU busy, which our model does not know, and labcode's does.)

# %% [markdown]
# ## 6. Maps and curves (core, 10 min)
#
# Each layout is a point: seconds to the right, memory upwards. This is the map of the GPT of section 5 with 39 billion
# parameters on 128 A100s. The dashed line is the memory that the GPU has for tensors. The best layouts are on the line
# at the lower left, the **Pareto front**: no other one is both faster and smaller.

# %% tags=["figure"]
a100 = lab.cluster("jean-zay-a100")
legal = lab.legal(lab.GPT_39B, a100, gpus=128, global_batch=512)
groups = {"no pipeline, ZeRO 0 or 1": [], "ZeRO-3": [], "pipeline": []}
for layout in legal:
    needed_GiB = lab.memory(lab.GPT_39B, layout, 512) / GIB
    seconds = lab.step_s(lab.GPT_39B, layout, 512, a100)
    kind = "pipeline" if layout.pp > 1 else "no pipeline, ZeRO 0 or 1"
    if layout.zero == 3:
        kind = "ZeRO-3"
    groups[kind].append((seconds, needed_GiB))
fitting = lab.search(lab.GPT_39B, a100, 128, 512)
named = {}
for title, entry in {
    "the fastest that fits": fitting[0],
    "the smallest": min(fitting, key=lambda found: found.memory_bytes),
}.items():
    named[title] = (entry.step_s, entry.memory_bytes / GIB)
plot.layout_map(
    groups,
    named=named,
    limit_gib=(a100.memory_bytes - lab.RESERVED_BYTES) / GIB,
    caption="20.layouts",
)

# %% tags=["nbval-check-output"]
for entry in lab.search(lab.GPT_39B, a100, 128, 512)[:3]:
    print(f"{entry.step_s:.2f} s  {tuple(entry.layout)}")

# %% [markdown]
# The fastest that fits is the layout that the thresholds named: ZeRO-3 over all ranks, two samples at a time. The
# second and third on the list are within 3 % of it. Along the front seconds are traded for memory.
#
# What happens with more GPUs? **Strong scaling** keeps the batch: the same step, faster. **Weak scaling** lets
# the batch grow with the GPUs: as many samples for each. For each number of GPUs we search again, and compute which
# fraction of the best layout's step is arithmetic that the model needs. The largest part of the rest is its **limit**:
#
# - `tp`, `pipeline` (the bubble and messages) and `dp` (gradients, and what ZeRO-3 sends): communication;
# - `memory`: checkpointing, which computes again what there is no room to keep;
# - `products`: the arithmetic itself, when hardly anything else is left.
#
# **Predict.** The batch is 1,024 samples, for 8 to 2,048 GPUs. Which limit comes at the right end: `"tp"`, `"dp"` or
# `"pipeline"`?

# %% tags=["predict"]
limit_at_the_end = "pipeline"

# %% tags=["figure"]
sizes = [8, 16, 32, 64, 128, 256, 512, 1024, 2048]
strong = lab.scaling(lab.GPT_13B, a100, sizes, lambda gpus: 1024)
weak = lab.scaling(lab.GPT_39B, a100, sizes, lambda gpus: 2 * gpus)
compare(
    "strong, 2,048 GPUs", limit_at_the_end, strong[-1].limit,
    found="computed", options=("tp", "dp", "pipeline"),
)
print(f"2,048 GPUs: {strong[-1].layout}")
curves = {}
for name, points in {
    "strong: 13B, 1,024 samples": strong, "weak: 39B, 2 samples a GPU": weak,
}.items():
    curves[name] = [(point.gpus, point.efficiency, point.limit) for point in points]
plot.scaling(curves, caption="20.scaling")

# %% [markdown]
# With a fixed batch there is less and less work for each GPU, while the gradients stay as large as they are. In the end
# there is less than one sample for each GPU, so several GPUs have to share a replica: tp inside the node, and a
# pipeline beyond it, which has ever fewer micro-batches to fill it. With a growing batch the fraction falls slowly: the
# rule of two levels gives less with more nodes, and has a floor. At the left end of the weak curve memory is the limit:
# 39 billion parameters on 8 GPUs leave no room, and the forward of the layers is computed twice. (A batch cannot grow
# for ever: lesson 06 shows what it costs in samples.)
#
# **Takeaway: the best layout changes with the number of GPUs. Search again for each, and name its limit: it shows what
# more money should buy.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Ask for each point of the curves what would help: a faster network, more memory, a larger batch,
# another schedule. Interleaved stages (lesson 12) are what our search does not have.

# %% [markdown] tags=["exercise"]
# ## 7. Open end: plan it, and defend it (optional, 16 min)
#
# ### Exercise 20.7 · Your plan
#
# Plan the 39B GPT (`l20.TASK_SHAPE`) on 128 GPUs of `a100`, the cluster of section 6, with a batch of 512. Tomorrow's
# samples will be longer, so leave **22 GiB** free, beside what is reserved. Then defend the plan. These four names are
# judged, and whatever else you compute on the way is yours:
#
# - `layout`: your `lab.Layout`; it may take at most 3 % longer than the best one that leaves as much free;
# - `memory_gib`: GiB of the fullest rank, without what is reserved;
# - `limit`: which of `tp`, `pipeline`, `dp` and `memory` costs most; `lab.losses(shape, layout, global_batch, cluster)`
#   gives the seconds of each;
# - `lost_share`: the fraction of the step that this limit takes, between 0 and 1.
#
# The rubric checks itself: legal, fits, fast, memory, limit, share.

# %%
a100 = lab.cluster("jean-zay-a100")

# %% tags=["exercise"]
### BEGIN SOLUTION
room = a100.memory_bytes - lab.RESERVED_BYTES - 22 * GIB
candidates = lab.search(l20.TASK_SHAPE, a100, 128, 512)
chosen = next(entry for entry in candidates if entry.memory_bytes <= room)
layout = chosen.layout
memory_gib = chosen.memory_bytes / GIB
lost = lab.losses(l20.TASK_SHAPE, layout, 512, a100)
limit = max(lost, key=lost.get)
lost_share = lost[limit] / chosen.step_s
### END SOLUTION

# %% tags=["check"]
check("20.7", layout, memory_gib, limit, lost_share)

# %% [markdown]
# Talk about it with somebody: what would you choose if the network were four times as fast, and why?

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Several layouts pass. A good defence names the runner-up: four stages lose less in the bubble
# and more in dp. With a network that is four times as fast the gradients cost less, and fewer stages win.

# %% [markdown]
# ## 8. A run of your own, and published ones that went wrong (optional, 20 min)
#
# ### Measured here
#
# Does the model of section 3 hold on this machine? Two ranks measure together how fast a large matmul is and how long
# all-reduces take. That makes a "cluster" of two. A small model's step does not consist of matmuls alone, so we need one
# more number, the **scale** of this software: measured over predicted, from **one** run on one rank. Then we predict
# another run, with more samples, on two ranks. The two share the cores of this machine, so a factor of 2 is as good as
# it gets.

# %%
REAL = lab.Shape(  # the model of section 2
    layers=4, hidden=256, heads=4, kv_heads=4, ffn=1024, vocab=512, tokens=128
)

def both_runs(rank):
    """What the machine can do, and the steps of two runs."""
    machine = lab.measure_machine(rank)
    alone_s = lab.measured_step_s(REAL, samples=4, average=False)
    together_s = lab.measured_step_s(REAL, samples=8, average=True)
    return machine, alone_s, together_s

machine, alone_s, together_s = ranks.run(both_runs)[0]
print(f"a matmul on each rank: {machine.flops_per_s / 1e9:.0f} GFLOP/s")
here = lab.Cluster(
    "this machine", machine.flops_per_s, 8 * GIB, 2, machine.link, machine.link
)
predicted_alone_s = lab.step_s(REAL, lab.Layout(micro_batch=4), 4, here)
scale = alone_s / predicted_alone_s
print(f"the run on one rank took {scale:.2f} times as long as predicted")
with_dp = lab.Layout(dp=2, micro_batch=8)
predicted_s = scale * lab.step_s(REAL, with_dp, 16, here)
print(f"predicted {1e3 * predicted_s:.0f} ms, measured {1e3 * together_s:.0f} ms")

# %% [markdown]
# The scale stands for everything that the model leaves out: elementwise operations, Python, cold caches. It is larger
# for a small model on a CPU than for a large one on a GPU. (The all-reduce here is of 4 bytes for each gradient, not
# of 2; it is a small part of this step.) Such a number is good for runs of the **same** software on the same kind of
# device, and for nothing else.
#
# ### One that took four times as long as predicted
#
# Megatron-LM's paper of 2021 compares its pipeline with ZeRO-3: GPT-3 on 1,536 A100s, one sample on each. A rank
# gathers each layer's parameters before its forward, and again before its backward. DeepSpeed's ZeRO-3 of that spring
# gathered **each parameter by itself, and waited for it**. Biases and norms stayed whole, so that 4 matrices in each of
# 96 layers were gathered. A ring over p ranks has p - 1 rounds, and each of them takes at least alpha, however few bytes
# there are. labcode.perf has 6.1 µs for a round on this cluster, so the latencies of these gathers alone take
# 96 · 2 · 4 · 1535 · 6.1 µs.

# %% tags=["nbval-check-output"]
zero3 = lab.zero3_of_2021()
with_latencies_s = zero3.predicted_s + zero3.latency_s
print(f"a layer at a time, hidden:  {zero3.predicted_s:5.1f} s predicted")
print(f"latencies of the gathers:   {zero3.latency_s:5.1f} s")
print(f"both together:              {with_latencies_s:5.1f} s predicted")
print(f"                            {zero3.measured_s:5.1f} s measured")
print(f"tp 8, pp 12 instead:        {zero3.other_predicted_s:5.1f} s predicted")
print(f"                            {zero3.other_s:5.1f} s measured")

# %% [markdown]
# A planner that knows only today's ZeRO-3 picks it, and the job takes three times as long as with the pipeline. With
# the latencies the pick would be right. But most of the measured time is still not explained: the bytes were not hidden
# either, and the paper does not say how fast that software sent them.
#
# **Takeaway: over thousands of ranks a ring's latency is milliseconds, and messages that are waited for add up.**
#
# ### Two that ran out of memory
#
# NVIDIA's teaching notebook for Megatron-LM trains a GPT of 12 layers (h = 768, 32 heads, 1,024 tokens, float32) on
# V100s with 16 GB. With 2 samples at a time it fitted, with a peak of about 10 GB in its profile. With 32 it stopped:
# *tried to allocate 512 MiB; 13.90 GiB allocated*. Its attention is not fused, so that each layer keeps its table of
# scores: s × s numbers for each sample and head.

# %% tags=["nbval-check-output"]
import torch

for attempt in lab.attempts_on_v100():
    samples = attempt.micro_batch
    table = torch.empty(samples, 32, 1024, 1024, device="meta")  # without its memory
    total = sum(attempt.parts.values()) / GIB
    outcome = "ran out of memory" if attempt.out_of_memory else "fitted"
    print(f"{samples} samples: {table.nbytes / GIB:.2f} GiB for a table of scores,")
    print(f"   predicted for the whole rank {total:.0f} GiB of 15.8: it {outcome}")

# %% [markdown]
# With 32 samples the tables of four layers alone are more than the GPU has, and with dropout each layer keeps the table
# and its mask besides. A fused attention helps, or a smaller micro-batch, at the price of smaller matmuls. (One number
# of the message does not fit: 512 MiB is the table of 4 samples. With 4 at a time instead of 32, the prediction is
# 21 GiB, and the outcome the same.)
#
# A larger one, from BigScience's search for the layout of BLOOM: 72 layers with h = 14,336 on 384 A100s with 80 GB, dp
# = 48, tp = 8, no pipeline, ZeRO-1, full checkpointing. It was out of memory. The states alone explain why: some 180
# billion parameters over 8 ranks, with 2 bytes each for parameters and gradients, and 12 for the optimizer, which ZeRO-1
# divides.

# %% tags=["nbval-check-output"]
bloom = lab.Shape(72, 14336, 112, 112, 4 * 14336, 250880, 2048)
tried = lab.Layout(dp=48, tp=8, zero=1, checkpointing="full")
parts = lab.memory_parts(bloom, tried, global_batch=2016)
a100 = lab.cluster("jean-zay-a100")
print(f"the states have {parts['states'] / GIB:.1f} GiB", end=", ")
print(f"and the GPU has {a100.memory_bytes / GIB:.1f}")

# %% [markdown]
# ZeRO-1 divides the optimizer state by 48, and leaves parameters and gradients whole. A pipeline or more tp cuts them.
#
# ### A ViT that tp made smaller, but not by much
#
# NERSC's tutorial trains a vision transformer on weather: 12 layers, h = 1024, 4,050 patches in a sample, 16 samples at
# a time on each of 4 A100s, with PyTorch's autocast. On GPUs with 40 GB it ran out of memory. On 80 GB it used 44.9 GiB,
# and with tp = 4 on 16 GPUs, dp = 4 as before, still 33.2.
#
# Under autocast the residual stream stays in float32, and matmuls read bfloat16. (The error message agrees: a norm asked
# for 254 MiB. Its output has 16 · 4050 · 1024 numbers of 4 bytes, 253.1 MiB, which the allocator rounds up to a multiple
# of 2 MiB.) So for each patch and feature a layer keeps 2 inputs of norms with 4 bytes each, and with 2 bytes each 2
# outputs of norms, q, k, v, the output of attention, and the MLP's 4 hidden numbers before and after the GELU. Tensor
# parallelism divides q, k, v, the output of attention and the hidden numbers. The rest is whole on every rank.
#
# **Predict.** How many GiB do the 12 layers keep, without tp and with tp = 4? (Count the `numbers` of one h for each
# patch of all samples and layers, and for each of them the bytes that are whole and those that tp divides.)

# %% tags=["predict"]
numbers = 12 * 16 * 4050 * 1024  # layers, samples, patches, features
whole_bytes = 2 * 4 + 2 * 2
divided_bytes = (3 + 1 + 4 + 4) * 2
without_tp_GiB = numbers * (whole_bytes + divided_bytes) / 2**30
with_tp_GiB = numbers * (whole_bytes + divided_bytes / 4) / 2**30

# %% tags=["nbval-check-output"]
for run, guess in zip(lab.vit_runs(), (without_tp_GiB, with_tp_GiB)):
    kept_GiB = run.parts["activations"] / GIB
    compare(f"tp {run.tp}", guess, kept_GiB, unit="GiB", within=1.05, found="computed")
    total_GiB = sum(run.parts.values()) / GIB
    print(f"   whole rank: predicted {total_GiB:.1f} GiB, published", end=" ")
    print(f"{run.memory_bytes / GIB:.1f}")
    print(f"   a step: predicted {run.predicted_s:.2f} s, published {run.step_s:.2f}")

# %% [markdown]
# With tp = 4 the layers keep half, and more ranks would not help much: 12 of the 36 bytes are whole. Sequence
# parallelism (lesson 10) would divide them. The totals are another matter. They are 11 and 15 GiB too small, and a user
# of labcode.perf would have sent the job to the GPUs with 40 GB. What is missing does not shrink with tp, so it is
# neither states nor what the layers keep. The error message tells a part of it: 7.7 GiB were in use **beside** PyTorch,
# where labcode.perf reserves 4. The page does not say what the rest is.
#
# The times are too short as well, on 4 GPUs by 13 %. On 16 the prediction is less than half of what was measured: by
# the formulas 4 times the GPUs are 2.6 times as fast, and in truth they were 1.3 times. Where those 16 GPUs lost their
# time we do not know. A profile would show it (lesson 02).
#
# **Takeaway: compute the states first. If they do not fit, nothing else matters. And leave room, because a stack takes
# more memory beside its tensors than most formulas count.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Memory is predicted too low on most published runs, by what a stack reserves: one number of GiB
# for each stack repairs most of it (`benchmarks/planner.py` prints both). Uncalibrated, half of BigScience's
# out-of-memory runs are found. Ask: which error is worse, a refused run that fits or an accepted one that does not?

# %%
ranks.close()

# %% [markdown]
# ## From here to GPUs and SLURM (core, 2 min)
#
# | what | start |
# |---|---|
# | one layout | `python -m labcode.perf estimate --model gpt3-175b --cluster selene --dp 8 --tp 8 --global-batch 64` |
# | every layout | `python -m labcode.perf plan --model llama3-70b --cluster dgx-h100 --gpus 1024 --global-batch 1024` |
# | several sizes | `python -m labcode.perf compare --model llama3-8b --cluster selene --gpus 8,64 --global-batch 64` |
# | measure this machine | `python -m labcode.perf calibrate --ranks 2 --out this_machine.toml` |
#
# Your own cluster is a file of ten lines, which `--cluster my.toml` reads:
#
#     [mine]
#     gpu = "a100-80gb"
#     gpus_per_node = 4
#     inside_GB_per_s = 220
#     inside_latency_us = 6
#     between_GB_per_s = 12.5
#     between_latency_us = 7
#     source = "two 200 Gb/s adapters a node; nccl-tests of one node"
#
# The two rates inside and between are what `nccl-tests` measures on one node, and a quarter of what your four GPUs'
# adapters have together. What you do not know, leave out: labcode refuses an estimate that needs it, and says what is
# missing. On a cluster, run one short job first, divide its step time by the prediction, and give the ratio as
# `--scale`.
#
# ## Questions (core, 4 min)
#
# **1.** A layout fits with 2 GiB to spare by the formulas. Would you submit it for a week?
#
# <details><summary>Answer</summary>
#
# Not without a short trial. What a stack reserves differs by several GiB from one to the next, and fragments grow over
# time (lesson 16). Calibrate the memory with one run, or leave more room.
# </details>
#
# **2.** Why does 45 % of the peak rank layouts so badly, even where its seconds are not far off?
#
# <details><summary>Answer</summary>
#
# It gives nearly the same time to every layout of a sweep, as the FLOPs are the same. Layouts differ in the bubble and in
# communication, which it leaves out.
# </details>
#
# **3.** An all-reduce over 64 ranks on 8 nodes is nearly as fast as one within a node, although the adapter has a
# tenth of the rate. Why?
#
# <details><summary>Answer</summary>
#
# Inside a node the numbers are added up first, so that each GPU's adapter carries an eighth of them, between 8 nodes
# instead of 64 ranks: the rule gives 63/7 = 9 times the adapter's rate.
# </details>
#
# **4.** From lesson 12: what halves the bubble without changing the number of stages?
#
# <details><summary>Answer</summary>
#
# Twice as many micro-batches; or two shorter stages on each rank (interleaved), which doubles the messages.
# </details>
#
# ## Recap
#
# | | |
# |---|---|
# | parameters | about 12 L h², and (vocabulary + positions) h |
# | FLOPs | 6 for each parameter and token, 8 with checkpointing; attention 12 L s² h for a sample |
# | states | 16 bytes for each parameter; ZeRO divides 12, 14 or all 16 of them |
# | activations | 32 s b h / tp bytes for each layer; with checkpointing 2 s b h / tp |
# | in flight | min(pp, m) micro-batches on the first stage |
# | temporary | 10 s b V / tp of logits, or a layer that is computed again |
# | bus bandwidth | min(inside, between · (n-1)/(k-1)) |
# | a step | (m + pp - 1) boxes, and a tail |
# | trust | the order of layouts more than their seconds |
#
# ## Sources
#
# - Narayanan et al. 2021, *Efficient Large-Scale Language Model Training on GPU Clusters*, arXiv:2104.04473:
#   parameters, FLOPs, the bubble, and table 2: ZeRO-3 against the pipeline.
# - Rajbhandari et al. 2019, *ZeRO*, arXiv:1910.02054: the states, figure 1.
# - Korthikanti et al. 2022, *Reducing Activation Recomputation*, arXiv:2205.05198: bytes of activations.
# - Zhao et al. 2023, *PyTorch FSDP*, arXiv:2304.11277: what hides behind what.
# - Williams et al. 2009, *Roofline*, doi:10.1145/1498765.1498785.
# - Isaev et al. 2023, *Calculon*: <https://github.com/calculon-ai/calculon>: multiprocessors that collectives keep
#   busy (`processor_usage` in `systems/a100_80g.json`).
# - NVIDIA, *nccl-tests*: <https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md>: bus bandwidth.
# - NVIDIA, *Megatron-LM*: <https://github.com/NVIDIA/Megatron-LM>: GPT-3 on 1,024 A100s;
#   `megatron/training/training.py`: half of attention's square.
# - DeepSpeed, issue 1069, <https://github.com/deepspeedai/DeepSpeed/issues/1069>: one all-gather for each parameter, in
#   2021. Parameters below `stage3_param_persistence_threshold`, 100,000 numbers, stay whole.
# - NERSC, *Deep learning at scale*: <https://github.com/NERSC/dl-at-scale-training>: the ViT, its memory and its times.
# - BigScience, *chronicles*: <https://github.com/bigscience-workshop/bigscience>: the sweep, and what ran out of
#   memory.
# - NVIDIA Deep Learning Institute, notebook on multi-node Megatron-LM: the GPT of 12 layers on V100s.
# - Bekman, *Machine Learning Engineering*: <https://github.com/stas00/ml-engineering>: 271 of 312 TFLOP/s on an A100,
#   and the all-reduce on four nodes of B200.
# - The published runs, each with its source: `labcode/perf/hardware_data/published_runs.csv`.
