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
# # 15 · Hybrid training
#
# A real run uses all axes at once: each layer is sharded over tp, the layers are split into stages over pp, and the
# whole model is replicated over dp. To start such a run you fill in a form of a few numbers: GPUs, tp, pp, micro-batch,
# global batch. These numbers depend on each other, and a bad choice seldom raises an error: the run just uses half of
# the machine. In this lesson you fill in the form, predict how long an iteration takes, submit the run to two nodes,
# and read its log and its trace.
#
# ## Goals
#
# - get from the number of GPUs, tp, pp and the batch to dp and the number of micro-batches, and back;
# - write the time of an iteration as a function of the layout, and choose a layout with it;
# - submit a hybrid run to two nodes, and read its log line by line;
# - understand why a layout is refused, and say beforehand whether the activations fit.
#
# **Time**: 162 minutes. Good places for a break are after sections 2 and 4. **Needs**: lesson 08 (sections 1, 2 and 5),
# lesson 09 (section 4), lesson 12 (sections 2 and 4). For section 3 also lesson 05 (section 2); for section 5 also
# lesson 09 (section 5), lesson 12 (section 5) and lesson 13b (section 7); for sections 6 and 7 also lesson 14 (sections
# 1 and 2).
#
# The first cell starts four ranks for sections 2 to 4, and a SLURM of two nodes for sections 6 and 7.

# %%
from course.exercises import l15
from course.lab import Ranks, check, compare, plot
from course.labs import emulate, l14_cluster
from course.labs import l15_hybrid as hybrid_lab
from labcode import recipes
from labcode.perf import step
from labcode.runtime import combinations
from labcode.topology import GridShape

ranks = Ranks(4, timeout_s=120)
lab = l14_cluster.open_lab("lesson15", nodes=2)
submit = hybrid_lab.Submit(lab)

# %% [markdown]
# ## 1. The form (core, 16 min)
#
# | field | who decides | what it is | in Megatron-LM |
# |---|---|---|---|
# | world size | what you are given | ranks, one for each GPU | `torchrun --nnodes ... --nproc-per-node ...` |
# | tp | whether the model fits, and how many GPUs a node has | ranks that share each layer | `--tensor-model-parallel-size` |
# | pp | whether the model fits | stages of layers; **one** copy of the model takes tp · pp ranks | `--pipeline-model-parallel-size` |
# | dp | nobody: it is what is left | copies of the model: world size / (tp · pp), with context parallelism / (tp · pp · cp) | computed, no flag |
# | global batch | what the model learns well with | samples of one optimizer step | `--global-batch-size` |
# | local batch | follows | samples of one copy: global batch / dp | computed |
# | micro-batch | memory and efficiency | samples that go through a stage together | `--micro-batch-size` |
# | m | follows | micro-batches of one copy in a step: local batch / micro-batch | computed |
# | order | which messages may cross the network | the axis whose ranks are neighbours comes first (section 2) | tp-cp-ep-dp-pp; with `--use-tp-pp-dp-mapping` pp before dp |
#
# An example: 32 GPUs with tp = 4 and pp = 2. One copy of the model takes 8 GPUs, so there are dp = 4 copies. A global
# batch of 256 gives each copy 64 samples, and with micro-batches of 2 these are m = 32. Note what was **not** chosen:
# dp. If you are given twice as many nodes in the middle of a project and the batch stays, dp doubles, and the local
# batch and m halve. Nothing else in the form changes.

# %% [markdown] tags=["exercise"]
# ### Exercise 15.1 · The form as a function
#
# Write this arithmetic. Where a division leaves a remainder, raise a `ValueError` that says what does not fit: this can
# happen to the ranks and to the samples.

# %% tags=["exercise"]
def layout(world, tp, pp, global_batch, micro_batch):
    """(dp, local batch, number of micro-batches), three whole numbers."""
    ### BEGIN SOLUTION
    dp, left_over = divmod(world, tp * pp)
    if left_over:
        raise ValueError(f"{world} ranks are not a multiple of tp*pp = {tp * pp}")
    local_batch, left_over = divmod(global_batch, dp)
    if left_over or local_batch % micro_batch:
        raise ValueError(
            f"{global_batch} samples do not divide by dp={dp} and micro={micro_batch}"
        )
    return dp, local_batch, local_batch // micro_batch
    ### END SOLUTION

# %% tags=["check"]
check("15.1", layout)

# %% [markdown]
# **More GPUs, the same batch.** A pipeline of pp stages takes m + pp - 1 turns for m micro-batches (lesson 12), so its
# GPUs work for the fraction m/(m + pp - 1) of the time. With more copies of the model there are fewer micro-batches for
# each, and this fraction becomes smaller.
#
# Narayanan et al. (2021) timed GPT-3 (174.6 billion parameters) with 96 GPUs for each copy, micro-batch 1 and a global
# batch of 1536. We take the 96 as tp = 8 and pp = 12. On 384 GPUs, which are 4 copies with m = 384, each GPU did 153
# TFLOP/s.
#
# **Predict.** On 1536 GPUs, how many TFLOP/s does each GPU do, if only m changes?

# %% tags=["predict"]
on_1536_gpus = 153 * (96 / (96 + 11)) / (384 / (384 + 11))  # 16 copies, m = 96

# %% tags=["nbval-check-output"]
from course.labs import papers

published = papers.GPT3_TFLOP_PER_S
compare(
    "TFLOP/s on 1536 GPUs", on_1536_gpus, published[1536],
    within=1.01, found="published",
)
for gpus, speed in published.items():
    m = 1536 // (gpus // (8 * 12))
    from_bubble = 153 * (m / (m + 11)) / (384 / (384 + 11))
    print(f"{gpus:5} GPUs: m = {m:3}, bubble gives {from_bubble:.0f}", end=", ")
    print("published", speed)

# %% [markdown]
# One line of arithmetic accounts for what these authors lost by scaling out, within 1 %, although it leaves out the
# messages of dp. (Their table does not say how the 96 GPUs of a copy are divided; tp = 8, pp = 12 and 1F1B are our
# assumption. Three rows of one model are no proof that dp's messages are always hidden.)
#
# **Takeaway: you choose tp, pp and the batch, and dp and m follow. More GPUs with the same batch mean fewer
# micro-batches, so a larger bubble.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* In 15.1 people return floats (`/` for `//`), or test only one of the two remainders. Ask: which
# of the numbers may a cluster change behind your back? (The world size, and with it dp and m.)

# %% [markdown]
# ## 2. Who sits next to whom (core, 10 min)
#
# From here on we use the smallest run that cuts the model along two axes: tensor 2 × pipeline 2, on two nodes of two
# GPUs, which leaves dp = 1. There are two ways to place it: the two ranks of a tensor-parallel pair share a node and
# the pipeline crosses the nodes, or the other way round. The `order` of the grid decides: along the axis that it names
# first, neighbours have consecutive ranks (lesson 08, section 1). The figure shows the first way; a letter and a
# colour, a or b, mark each tensor-parallel pair. In the second way each pair has one rank on each node.

# %% tags=["figure"]
model = l15.MODEL  # 2 layers, hidden size 64, 32 tokens, float32
inside = GridShape(tp=2, pp=2)  # order tp-cp-dp-pp
across = GridShape(tp=2, pp=2, order="pp-dp-cp-tp")
plot.grid(inside, color_by="tp", nodes=2, caption="15.inside")

# %% [markdown]
# What does each rank send in one step? Let *act* be the tensor between two layers for one micro-batch: micro-batch ×
# tokens × hidden size × 4 bytes. Our model has 32 tokens and a hidden size of 64, so with a micro-batch of 2 these are
# 2 · 32 · 64 · 4 bytes.
#
# - **tp**: four all-reduces of act in each layer of the stage (lesson 09), and one more: on the first stage for the
#   embedding, on the last one for the head. On a ring of two ranks, an all-reduce sends the tensor once.
# - **pp**: one act to the other stage, forward from the first, backward from the last. Both ranks of a tensor-parallel
#   pair send the same act, because this run has no sequence parallelism; with it each would send 1/tp (lesson 08,
#   section 4).
#
# **Predict.** Each stage has one of the two layers, and the global batch is 8, so m = 4. How many bytes does a rank
# send in a step to its tp neighbour, and how many to its pp neighbour?

# %% tags=["predict"]
to_tp_neighbour = 4 * (4 * 1 + 1) * (2 * 32 * 64 * 4)
to_pp_neighbour = 4 * (2 * 32 * 64 * 4)

# %% tags=["nbval-check-output"]
from labcode.perf import traffic
from labcode.runtime.units import si


def bytes_on_links(shape):
    """{(from, to): bytes} of one real step, without the few bytes of the loss."""
    stepped = ranks.run(emulate.timed_steps, model, shape, 8, 2, repeats=1)
    return emulate.traffic(stepped, at_least=2000)

tp_inside = bytes_on_links(inside)
tp_across = bytes_on_links(across)
to_rank_1 = tp_inside[0, 1]
to_rank_2 = tp_inside[0, 2]
compare(
    "rank 0 to rank 1, tp", to_tp_neighbour, to_rank_1,
    within=1.01, unit="B", found="counted",
)
compare(
    "rank 0 to rank 2, pp", to_pp_neighbour, to_rank_2,
    within=1.01, unit="B", found="counted",
)
print("between the nodes, tp inside:", si(traffic.across_nodes(tp_inside, 2), "B"))
print("between the nodes, tp across:", si(traffic.across_nodes(tp_across, 2), "B"))

# %% [markdown]
# Four processes did a real step, and every message was recorded as it left. With tp across the nodes, five times as
# many bytes take the slow link. They also come one by one, **between** two matmuls, so each message pays the latency of
# the link, and nothing is computed meanwhile.
#
# **Takeaway: for each micro-batch, tp sends four all-reduces of act for every layer of the stage, and one for the
# embedding or the head. pp sends act once or twice. So tp goes inside the node, and pp between nodes.**

# %% [markdown]
# ## 3. How long does an iteration take? (core, 64 min)
#
# Let us add up the time of a step, in the plainest way: nothing overlaps.
#
# 1. **Compute.** Each sample of a micro-batch needs `training_flops_per_sample(model)` FLOPs. The tp · pp ranks of a
#    copy share them evenly.
# 2. **tp.** The model has 4 L + 2 all-reduces of act (L layers, the embedding, the head). A stage has 1/pp of them.
# 3. **pp.** For each micro-batch one message of act. With pp = 1 there is none.
# 4. **Turns.** A *turn* is 1 to 3 for one micro-batch. A stage works for m turns, and waits for pp - 1.
# 5. **dp.** After that, once in a step, the gradients are all-reduced over dp. A rank holds 1/(tp · pp) of the
#    parameters, and each gradient has 4 bytes.
#
# For pp = 1 and 2 this is exact. With more stages it is an estimate, since a stage in the middle sends two messages for
# each micro-batch and has neither the embedding nor the head.
#
# How fast is a message? A collective uses all adapters of its group, so `cluster.link(group)` gives the rate of the
# rule of two levels (lesson 08, section 5), or the link inside a node if the group sits on one. A message of pp goes
# from one rank to one other, so `cluster.message_link(group)` gives the slowest link from a rank of the group to the
# next.
#
# A laptop has no second node, so we **emulate a cluster** that is slow enough for any laptop. Each matmul takes as long
# as on a device of 75 MFLOP/s and each message as long as on its link, and the rank **sleeps** meanwhile. Inside a node
# the link has 4.5 MB/s and 0.2 ms. Between nodes each rank's adapter has 0.5 MB/s and 1 ms, a ninth of that rate, which
# is about the ratio of NVLink to a common network card.

# %% tags=["nbval-check-output"]
from labcode.perf import alpha_beta
from labcode.perf.flops import training_flops_per_sample

model = l15.MODEL
cluster = l15.CLUSTER
inside = GridShape(tp=2, pp=2)
across = GridShape(tp=2, pp=2, order="pp-dp-cp-tp")
flops = training_flops_per_sample(model)
compute_s = flops * 2 / (2 * 2) / cluster.flops_per_s
print(f"one micro-batch of 2 on one stage: {1e3 * compute_s:.0f} ms of computing")
for name, link in (("inside", cluster.inside), ("between", cluster.between)):
    all_reduce_s = alpha_beta.time_s("all_reduce", 2, 2 * 32 * 64 * 4, link)
    send_s = alpha_beta.time_s("send", 2, 2 * 32 * 64 * 4, link)
    print(f"{name:8} all-reduce of act {1e3 * all_reduce_s:5.1f} ms,", end=" ")
    print(f"message of act {1e3 * send_s:5.1f} ms")

# %% [markdown] tags=["exercise"]
# ### Exercise 15.2 · The time of an iteration
#
# Write the five points as a function. `model` has `num_layers`, `hidden_size`, `context_length` (the tokens) and
# `num_parameters`, and `cluster.flops_per_s` is the speed of one rank. `shape.tp`, `shape.pp` and `shape.dp` are the
# sizes of the layout, and `shape.groups("tp")[0]` is one of its tensor-parallel groups.
# `alpha_beta.time_s("all_reduce", p, num_bytes, link)` is the time of an all-reduce over p ranks (0 for p = 1), and
# `alpha_beta.time_s("send", 2, num_bytes, link)` that of a message. All-reduces have `cluster.link(group)`, and pp has
# `cluster.message_link(group)`. The check asks for many layouts. If one point is off, it usually says which.

# %% tags=["exercise"]
def iteration_s(model, shape, global_batch, micro_batch, cluster):
    """Seconds of one step, if nothing overlaps."""
    ### BEGIN SOLUTION
    model_ranks = shape.tp * shape.pp
    m = global_batch // (micro_batch * shape.dp)
    act = micro_batch * model.context_length * model.hidden_size * 4

    flops = training_flops_per_sample(model) * micro_batch
    compute_s = flops / model_ranks / cluster.flops_per_s

    all_reduces = (4 * model.num_layers + 2) / shape.pp
    tp_link = cluster.link(shape.groups("tp")[0])
    tp_s = all_reduces * alpha_beta.time_s("all_reduce", shape.tp, act, tp_link)

    pp_s = 0.0
    if shape.pp > 1:
        pp_link = cluster.message_link(shape.groups("pp")[0])
        pp_s = alpha_beta.time_s("send", 2, act, pp_link)

    gradient_bytes = 4 * model.num_parameters / model_ranks
    dp_link = cluster.link(shape.groups("dp")[0])
    dp_s = alpha_beta.time_s("all_reduce", shape.dp, gradient_bytes, dp_link)

    return (m + shape.pp - 1) * (compute_s + tp_s + pp_s) + dp_s
    ### END SOLUTION

# %% tags=["check"]
check("15.2", iteration_s)

# %% [markdown]
# Take three layouts, a global batch of 8 and micro-batches of 2: plain data parallelism with dp = 4, and the hybrid of
# section 2 in both orders.
#
# **Predict.** How many seconds does a step of each take, by your function? The ranks measure it afterwards. We allow a
# factor of 1.4, because each message also costs the real processes some time, and the hybrids send many.

# %% tags=["predict"]
dp_4_s = iteration_s(model, GridShape(dp=4), 8, 2, cluster)
tp_inside_s = iteration_s(model, inside, 8, 2, cluster)
tp_across_s = iteration_s(model, across, 8, 2, cluster)

# %%
layouts = {"dp 4": GridShape(dp=4), "tp inside": inside, "tp across": across}
measured_s = {}
for name, shape in layouts.items():
    timed = ranks.run(emulate.timed_steps, model, shape, 8, 2, cluster, repeats=1)
    measured_s[name] = emulate.step_s(timed)
compare("dp 4", dp_4_s, measured_s["dp 4"], within=1.4, unit="s")
compare("tp inside", tp_inside_s, measured_s["tp inside"], within=1.4, unit="s")
compare("tp across", tp_across_s, measured_s["tp across"], within=1.4, unit="s")

# %% [markdown]
# labcode's version, `step.iteration_parts`, returns the parts one by one:

# %% tags=["nbval-check-output"]
for name, shape in layouts.items():
    parts = step.iteration_parts(model, shape, 8, 2, cluster)
    print(f"{name:10}", end="")
    for part, seconds in parts.items():
        print(f"  {part} {seconds:.3f} s", end="")
    print()

# %% [markdown]
# tp across the nodes is out: its all-reduces cross the network in every layer. The other two take about as long as each
# other.
#
# But is the formula fair? It assumes no overlap, while DDP sends the gradients bucket by bucket as backward still
# computes (lesson 05, section 2). The messages of the hybrid have no such chance in our schedule, since the next matmul
# or the next stage waits for them. So there is a sixth point for dp: in the **last** micro-batch the gradients become
# final, and its backward, two thirds of its computing, can hide their all-reduce.
#
# **Predict.** How many seconds does a step of dp 4 take with overlap? It has one micro-batch; take compute and dp from
# the table above.

# %% tags=["predict"]
overlapped_s = 0.566 + max(0.0, 0.437 - 2 / 3 * 0.566)

# %%
timed = ranks.run(
    emulate.timed_steps, model, GridShape(dp=4), 8, 2, cluster, repeats=1, overlap=True
)
measured_overlap_s = emulate.step_s(timed)
compare("dp 4, overlap", overlapped_s, measured_overlap_s, within=1.3, unit="s")

# %% tags=["figure"]
bars = {}
for name, shape in layouts.items():
    expected_s = sum(step.iteration_parts(model, shape, 8, 2, cluster).values())
    bars[name] = {"predicted": expected_s, "measured": measured_s[name]}
parts = step.iteration_parts(model, layouts["dp 4"], 8, 2, cluster, "overlapped")
expected_s = sum(parts.values())
bars["dp 4, overlap"] = {"predicted": expected_s, "measured": measured_overlap_s}
plot.bars(bars, caption="15.overlap")

# %% [markdown]
# Of the all-reduce only what is longer than that backward remains. The measured step is somewhat longer than predicted:
# nothing travels until the first bucket is full, and each message costs the processes time; hence the tolerance of 1.3.
#
# So as long as the model fits on one GPU, data parallelism with overlap is hard to beat here. When is the hybrid
# faster? Gradients travel once in a **step**, and backward can hide them only if there is enough of it. Activations
# travel with every **micro-batch**.
#
# **Predict.** If a step has only 4 samples, in micro-batches of one, which is faster: `"dp 4"` with overlap, or
# `"dp 2 x pp 2"`? And with 64 samples, in micro-batches of 2?

# %% tags=["predict"]
faster_with_4 = "dp 2 x pp 2"
faster_with_64 = "dp 4"

# %% tags=["nbval-check-output"]
candidates = {"dp 4": GridShape(dp=4), "dp 2 x pp 2": GridShape(dp=2, pp=2)}

def expected(shape, batch, micro_batch, how="overlapped"):
    parts = step.iteration_parts(model, shape, batch, micro_batch, cluster, how)
    return sum(parts.values())

for batch, micro_batch, guess in ((4, 1, faster_with_4), (64, 2, faster_with_64)):
    seconds = {}
    for name, shape in candidates.items():
        seconds[name] = expected(shape, batch, micro_batch)
    found = min(seconds, key=seconds.get)
    compare(f"{batch} samples", guess, found, options=candidates, found="computed")
    for name, step_s in seconds.items():
        print(f"{batch} samples, {name}: {step_s:.3f} s")

# %% tags=["figure"]
batches = [4, 8, 16, 32, 64, 128]
per_sample_ms = {}
for name, shape in (candidates | {"tp 2 x pp 2": inside}).items():
    per_sample_ms[name] = []
    for batch in batches:
        seconds = expected(shape, batch, 1)
        per_sample_ms[name].append(1e3 * seconds / batch)
plot.lines(per_sample_ms, x=batches, caption="15.batches")

# %% [markdown]
# With 4 samples a rank of dp 4 has one of them, and its backward is too short to hide the gradients of the whole model.
# With the pipeline each rank has half of the gradients, and the two copies are neighbours inside a node. With more
# samples the all-reduce stays the same, and there is more computing to hide it.
#
# On GPUs the limit is stated in tokens. Lesson 13b, section 5, has the rule: a GPU of Φ FLOP/s in a group of bus
# bandwidth β hides its all-reduce from about Φ/β tokens in its last micro-batch on, if gradients travel in 2 bytes. On
# nodes of eight H100 with an adapter for each GPU that is some 2,000 tokens, also over several full nodes, and 14,000
# if only one GPU of each node shares the gradient.
#
# In practice another question comes first: **does it fit?** For most models a whole copy on each GPU does not. Then
# there are two ways. One is to cut the model, over tp and pp. The other is to shard it over dp with FSDP (lesson 13): a
# rank keeps 1/dp of weights, gradients and optimizer and gathers the weights of a layer when it needs them. It sends
# 1.5 times as much as an all-reduce, in **each** micro-batch, and nearly all of that can hide behind the computing of
# the same micro-batch.
#
# With a pipeline one usually shards the optimizer alone, ZeRO stage 1. Of the 16 bytes of a parameter (2+2+12, lesson
# 08) a rank then keeps 4 + 12/dp, and it sends as much as plain dp, once in a step. The higher stages do not suit a
# pipeline: stage 2 would reduce the gradients after each of the m micro-batches, and stage 3 would gather the weights
# for each. DeepSpeed refuses both, and torchtitan's FSDP keeps the weights of a stage gathered for the whole step.
# (Exercise 15.3 leaves ZeRO-1 out to stay short, so its pipelines need more memory than in practice.)

# %% tags=["nbval-check-output"]
for batch, micro_batch in ((4, 1), (8, 2), (64, 2), (64, 16)):
    seconds = expected(GridShape(dp=4), batch, micro_batch, how="sharded")
    print(f"FSDP, {batch:2} samples, micro-batches of {micro_batch:2}: {seconds:.3f} s")

# %% [markdown]
# With 8 samples FSDP takes 0.655 s. DDP with overlap takes 0.625 s and needs four times the memory for weights,
# gradients and optimizer. FSDP does best with **large micro-batches**, as the last two lines show: with 64 samples, one
# micro-batch of 16 on each rank hides all messages, at the price of memory for activations. So a sensible order to try
# is: DDP while a copy fits; then FSDP, as long as a rank has Φ/β tokens in a micro-batch; and tp inside the node and pp
# when it has fewer, or when a layer is too large.
#
# **Takeaway: an iteration takes (m + pp - 1) · (compute + tp + message), plus the part of the gradients' all-reduce
# that backward does not hide. What is cut and what is sharded decides which layouts fit, and among those overlap
# decides.**

# %% [markdown] tags=["exercise"]
# ### Exercise 15.3 · Choose the layout
#
# Write the function that fills in the form. It is given the GPUs and the batch, and `room_bytes`, the memory that a
# rank has for its share of weights, gradients and optimizer (here 16 bytes for each parameter). It returns two things:
# the `GridShape` with the shortest iteration, and how it is data parallel, `"overlapped"` (DDP) or `"sharded"` (FSDP).
# `step.iteration_parts(model, shape, global_batch, micro_batch, cluster, how)` gives the parts of the time, as above.
# The loops are given, and what is in them is yours. Five rules:
#
# 1. dp · pp · tp is the number of GPUs.
# 2. tp divides the number of heads, and pp the number of layers.
# 3. The global batch is a multiple of dp · micro-batch.
# 4. Overlapped, nothing is sharded over dp, and 16 · parameters / (tp · pp) is at most `room_bytes`.
# 5. Sharded, pp is 1, so that weights are not gathered for each of many micro-batches, and 16 · parameters / (tp · dp)
#    is at most `room_bytes`.
#
# In each case at least one layout fits. Leave the order of the grid as it is by default.

# %% tags=["exercise"]
def best_layout(model, world, global_batch, micro_batch, cluster, room_bytes):
    """(GridShape, "overlapped" or "sharded"), the fastest that fits."""
    best = None
    best_s = float("inf")
    for tp in (1, 2, 4, 8, 16, 32, 64):
        for pp in (1, 2, 4, 8, 16, 32, 64):
            ### BEGIN SOLUTION
            if world % (tp * pp) or model.num_heads % tp or model.num_layers % pp:
                continue
            dp = world // (tp * pp)
            if global_batch % (dp * micro_batch):
                continue
            shape = GridShape(dp=dp, pp=pp, tp=tp)
            for how in ("overlapped", "sharded"):
                if how == "sharded" and pp > 1:
                    continue
                parts_of_model = tp * (dp if how == "sharded" else pp)
                if 16 * model.num_parameters / parts_of_model > room_bytes:
                    continue
                parts = step.iteration_parts(
                    model, shape, global_batch, micro_batch, cluster, how
                )
                if sum(parts.values()) < best_s:
                    best = (shape, how)
                    best_s = sum(parts.values())
            ### END SOLUTION
    return best

# %% tags=["check"]
check("15.3", best_layout)

# %% [markdown] tags=["solution-only"]
# *For the instructor.* In 15.2 people forget to divide the all-reduces by pp, or the gradients by tp · pp, or put dp
# inside the turns: the check names the point. Ask: what else could overlap? (The message of pp travels during the next
# micro-batch, and parts of tp's behind other products: asynchronous tensor parallelism. Then the formula is an upper
# bound for the hybrid too.)

# %% [markdown]
# ## 4. The idle time in the trace (core, 8 min)
#
# We run the hybrid with tp inside the node once more, with m = 4. Each rank records when its actions run. Where a row
# has no block, the rank waits, or its message is on the way.
#
# **Predict.** The bubble of lesson 12 is (pp - 1)/(m + pp - 1) of the time, here 1/5. Besides, each of the m + pp - 1 =
# 5 turns has 142 ms of computing, 20 ms of tp and one message of 34 ms between the nodes (section 3). For which
# fraction of the time is a rank **not** busy with computing and tp?

# %% tags=["predict"]
idle_fraction = 1 - 4 * (142 + 20) / (5 * (142 + 20 + 34))

# %% tags=["figure"]
from course.labs import l12_paced_pipeline as stages

model = l15.MODEL
cluster = l15.CLUSTER
inside = GridShape(tp=2, pp=2)
timed = ranks.run(emulate.timed_steps, model, inside, 8, 2, cluster, repeats=1)
measured_line = stages.timeline(timed)
measured_idle = measured_line.bubble_over_total()
compare("fraction of time idle", idle_fraction, measured_idle, within=1.15)
measured_step_s = emulate.step_s(timed)
expected_step_s = sum(step.iteration_parts(model, inside, 8, 2, cluster).values())
print(f"the step took {measured_step_s / expected_step_s:.2f} times what was simulated")
expected_line = step.time_line(model, inside, 8, 2, cluster)
plot.pipeline(
    {"simulated stages": expected_line, "measured ranks": measured_line},
    lanes={"simulated stages": "stage"},
    caption="15.schedule",
)

# %% [markdown]
# The upper part is a simulation of the formula. The real step is longer, and so are its blocks, because each message
# costs the processes some milliseconds that the emulated links do not have. Busy and idle times grow alike, so the
# fraction agrees better than the seconds do.
#
# Read the lower part in pairs. Ranks 0 and 1 are one stage, and each all-reduce makes them wait for each other, so they
# do the same at nearly the same time. Ranks 2 and 3 begin one forward and one message later. Ranks 0 and 1 have their
# longest gap before the first backward, as in lesson 12, and further ones where they wait for the other stage. The
# short gaps between two blocks are messages on their way: in this emulated cluster a sender waits until its message has
# left, where a GPU would go on.
#
# **Takeaway: a long gap at the start, in the middle or at the end is the bubble, and with more micro-batches it is a
# smaller fraction of the step. Short regular gaps are messages.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Ask: how does the figure change with m = 16? (The long gap keeps its length and is a smaller
# fraction of the step.)

# %% [markdown]
# ## 5. The same mesh in plain PyTorch (core, 12 min)
#
# PyTorch has a part for each axis, and you know them all: `init_device_mesh` makes the groups, `parallelize_module`
# shards the layers (lesson 09, section 5), `PipelineStage` and `Schedule1F1B` run the stages (lesson 12, section 5),
# and `fully_shard` averages the gradients over dp (lesson 13b, section 7). The script below puts them together for a
# small model of two blocks. Read it with these points in mind.
#
# - The mesh has the axes in the order pp, dp, tp. PyTorch fills it row by row, so the **last** axis has consecutive
#   ranks: tp inside the node, as with our order tp-cp-dp-pp.
# - Every rank initialises the whole model from one seed and keeps the blocks of its own stage. A large model would be
#   built on the meta device, so that no rank ever holds all of it.
# - tp comes before dp: `parallelize_module` makes DTensors of the weights, and `fully_shard` shards each rank's part
#   further. With more than one stage `reshard_after_forward` is off; otherwise a rank would gather its weights anew for
#   every micro-batch, forward and backward. So a rank holds the weights and the growing gradients of its stage whole
#   during the step. Gradients are reduce-scattered once, after the last backward, and only the optimizer stays sharded.
# - `DistributedDataParallel` refuses DTensors. With tp = 1 and no `parallelize_module`,
#   `DDP(own, process_group=mesh.get_group("dp"))` takes the place of the two calls of `fully_shard`. (PyTorch 2.13 also
#   has `torch.distributed._composable.replicate_with_fsdp.replicate`, data parallelism without sharding for DTensors;
#   the underscore says that it may still change.)
# - The first stage gets the inputs, the last one the targets. The schedule cuts both into micro-batches, and divides
#   the gradients by m at the end.

# %%
MESH = '''import sys
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 64)
        self.down = nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


pp, dp, tp = map(int, sys.argv[1:])
device = torch.device("cpu")  # on GPUs "cuda", and torch.cuda.set_device first
mesh = init_device_mesh(device.type, (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))
pp_coord = mesh.get_local_rank("pp")
dp_coord = mesh.get_local_rank("dp")

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
blocks = nn.Sequential(Block(), Block())
num_blocks = len(blocks) // pp
own = blocks[pp_coord * num_blocks : (pp_coord + 1) * num_blocks]
for block in own:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(block, mesh["tp"], plan)
    fully_shard(block, mesh=mesh["dp"], reshard_after_forward=pp == 1)
fully_shard(own, mesh=mesh["dp"], reshard_after_forward=pp == 1)

stage = PipelineStage(own, pp_coord, pp, device, group=mesh.get_group("pp"))
schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=F.mse_loss)
optimizer = torch.optim.SGD(own.parameters(), lr=0.1)

for step in range(5):
    generator = torch.Generator().manual_seed(step)
    batch = torch.randn(2, 16, 16, generator=generator)
    inputs, targets = batch.chunk(dp, dim=1)[dp_coord]
    given = [inputs] if pp_coord == 0 else []
    if pp_coord < pp - 1:
        schedule.step(*given)
    else:
        losses = []
        schedule.step(*given, target=targets, losses=losses)
        loss = torch.stack(losses).mean().detach()
        dist.all_reduce(loss, group=mesh.get_group("dp"))
        if dp_coord == 0 and mesh.get_local_rank("tp") == 0:
            print(f"step {step}: loss {loss.item() / dp:.9f}")
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
'''

# %% [markdown]
# torchrun starts it twice: on one process, where every axis has size 1, and on eight.
#
# **Predict.** Which rank of the eight prints the losses?

# %% tags=["predict"]
rank_that_prints = 4  # pp = 1, dp = 0, tp = 0: 1 * 2 * 2

# %%
import re
from pathlib import Path

from labcode.runtime import launch

Path("runs/mesh.py").write_text(MESH)
outputs = {}
losses = []
for sizes in ((1, 1, 1), (2, 2, 2)):
    pp, dp, tp = sizes
    output = launch.run("runs.mesh", *sizes, nproc=pp * dp * tp, echo=False).output
    outputs[f"pp {pp} x dp {dp} x tp {tp}"] = output
    losses.append(re.findall(r"loss (\S+)", output))
printing = int(re.search(r"\[rank (\d)\]", output)[1])
compare("rank that prints", rank_that_prints, printing, within=1)
for name, output in outputs.items():
    print(f"{name}\n{output}")
print("the same losses:", losses[0] == losses[1])

# %% [markdown]
# The reference is the same script on one process. Keep such a run for every script of your own: a wrong layout seldom
# raises an error, and the first five losses show it. Nine decimal places agree because the script computes in float64;
# in float32 some six would, in bfloat16 two or three.
#
# **Takeaway: in PyTorch a layout is one mesh. Take the blocks of the stage, shard its layers over tp, then the weights
# over dp, and compare the losses with those of one process.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Ask what a rank holds of `up.weight` with pp 2 x dp 2 x tp 2: half of the rows by tp, and half
# of these by dp. Somebody will write `DDP(own)` around DTensors: it raises `NotImplementedError: Operator
# c10d.broadcast_.default does not have a sharding strategy registered`.

# %% [markdown]
# ## 6. The real program, on two nodes (core, 30 min)
#
# Now `python -m labcode.train gpt_tiny`, with its real data, optimizer and log, runs on a real SLURM with two nodes
# (lesson 14, sections 1 and 2), which share your cores. For comparison, plain dp = 4 trains first, on the ranks of this
# notebook. Then you see the script of the job, with blanks; `--ntasks-per-node` is the number of ranks on a node. The
# ranks compute on the CPU, so the script asks for no GPUs. It leaves out the options that make the run short: 12 steps,
# a line of the log for every third of them, and no evaluation between.

# %%
from labcode.measure import metrics

plain = ranks.run(hybrid_lab.plain, {"train.global_batch": 16})[0]
print(hybrid_lab.blank_script())

# %% [markdown] tags=["exercise"]
# ### Exercise 15.4 · Fill in the script
#
# There are two nodes of two GPUs, and all of them are to be used. The model has 2 layers and 4 heads.
#
# - A rank has room for half of the model. Cut it into exactly two parts, between its layers.
# - The learning rate was chosen for a global batch of 16: keep it.
# - The bubble is at most 1/8 of the work.
#
# Give a dict with the six blanks: `nodes`, `ranks_per_node`, `parallel.tp`, `parallel.pp`, `train.micro_batch` and
# `train.global_batch`. The check submits the job, and reads in its log which rank was on which node, the grid, the
# steps and the last loss. This takes up to two minutes.

# %% tags=["exercise"]
### BEGIN SOLUTION
my_form = {
    "nodes": 2,
    "ranks_per_node": 2,
    "parallel.tp": 1,
    "parallel.pp": 2,
    "train.micro_batch": 1,
    "train.global_batch": 16,
}
### END SOLUTION

# %% tags=["check"]
check("15.4", my_form, submit, plain)

# %% [markdown] tags=["exercise"]
# ### Exercise 15.5 · Cut it twice
#
# Now a rank has room for a **quarter** of the model. Fill in the script for the hybrid of section 2. (NVIDIA's workshop
# on Megatron-LM ends with the same form: 2 nodes, 4 GPUs.)
#
# - Two stages of layers, and each layer shared by the two ranks of a node.
# - The global batch stays 16.
# - The bubble is at most 1/8 of the work. Of the micro-batch sizes that achieve this take the **largest**: it makes the
#   fewest messages.
#
# Give a dict with the same six blanks. The check submits the job, has three of its steps recorded, and compares the
# last loss with that of plain dp.

# %% tags=["exercise"]
### BEGIN SOLUTION
my_hybrid = {
    "nodes": 2,
    "ranks_per_node": 2,
    "parallel.tp": 2,
    "parallel.pp": 2,
    "train.micro_batch": 2,
    "train.global_batch": 16,
}
### END SOLUTION

# %% tags=["check"]
check("15.5", my_hybrid, submit, plain)

# %% [markdown]
# All four ranks make one copy, so dp = 1. The workshop then sets the global batch to one micro-batch, so m = 1, and
# with two stages each rank waits for half of the time (lesson 12, section 10): the form runs, and half of the machine
# is lost.
#
# Here is the log of the hybrid, beside the losses of plain dp.

# %%
form = {"nodes": 2, "ranks_per_node": 2, "parallel.tp": 2, "parallel.pp": 2}
form |= {"train.micro_batch": 2, "train.global_batch": 16}
done = submit(hybrid_lab.job(form | hybrid_lab.RECORDED))
for line in done.log.splitlines():
    if line.strip():
        print(line)
hybrid = metrics.read(done.out)
hybrid_steps = [row for row in hybrid if "step_s" in row]
plain_steps = [row for row in plain if "step_s" in row]
for one, other in zip(hybrid_steps, plain_steps):
    print(f"step {one['step']:2}: hybrid {one['loss']:.4f}, dp {other['loss']:.4f}")
ratio = hybrid_steps[-1]["step_s"] / plain_steps[-1]["step_s"]
print(f"step of the hybrid / of dp: {ratio:.1f}")

# %% [markdown]
# Read it line by line. The first line is the form, filled in: which rank computes where, the grid, and how the samples
# of a step are cut. Check it first. `n1: 0, 1` is a tensor-parallel pair inside a node. Then come the steps. (The
# percentage is the MFU of lesson 03, section 2, small with gpt_tiny.) Last comes the folder, whose `metrics.jsonl`
# holds more numbers:
#
# | here | in Megatron-LM's log | read it as |
# |---|---|---|
# | `step` | iteration, consumed samples | consumed samples = step · global batch |
# | `loss` | lm loss | of the whole global batch, with the natural logarithm; starts near ln(vocabulary), here ln 83 = 4.42 |
# | `grad_norm` | grad norm | before clipping; a jump announces trouble |
# | `lr` | learning rate | still warming up |
# | `step_s` | elapsed time per iteration | mean since the line before; the first may include the start |
# | `tokens_per_s_per_rank` | beside it: throughput per GPU, in TFLOP/s | the `tokens/s` printed above are of all ranks together; compare this one between runs of different size |
# | `memory_bytes` | | peak of rank 0 alone: other stages differ |
# | `loss_scale`, `overflows` | loss scale, number of skipped iterations | 1.0 and 0 unless the run is in float16 |
# | none | number of nan iterations | has to be 0 |
# | `val_loss` | validation loss | a line of its own |

# %% [markdown]
# The losses are the same, since both layouts do the same arithmetic, and that is the first thing to check after a
# change of layout. The hybrid is slower here: on one machine there is no slow link to avoid and no memory to save, and
# it sends many small messages in each step, where plain dp makes a single all-reduce.
#
# `--profile.steps 4:7` recorded three steps of rank 0 for PyTorch's profiler, as in lesson 02, section 6. `python -m
# labcode.measure.profile` and the folder of the run print what the recording says:

# %%
from labcode.perf.summary import summary

print(summary(done.out, rows=5))

# %% [markdown]
# Rank 0 is on the first stage. "Exposed communication" is the time in which it computes nothing and is in a collective
# or waits for a message. In the line of parts, "communication" is mostly waiting for the other stage, the gap between
# forward and backward of section 4. The all-reduces of tp lie inside forward and backward, and are `_Pair`,
# `_PairBackward` and `c10d::allreduce_` in the table. (Four ranks share your cores here, so a rank often waits for one
# that has no core just then.)
#
# A profiler shows all this waiting as communication, since it sees only a rank in a receive. So in the trace of a
# pipeline compare it with the bubble first, which is 1/9 of the step here. The recommendation in the last line does not
# take the bubble into account. (`--profile.memory` also records what a stage holds meanwhile; lesson 12, section 4, has
# the picture.)
#
# We run labcode instead of Megatron-LM, which is made for GPUs. NVIDIA's workshop starts its `pretrain_gpt.py` with the
# flags of section 1. It reads tokens from memory-mapped files, `--data-path` and `--split 949,50,1` for training,
# validation and test.
#
# **Another program's log.** Here is a line in the style of Megatron-LM (made up, after the row of 768 GPUs in section
# 1):
#
#     iteration 200/ 95000 | consumed samples: 307200 | elapsed time per iteration (ms): 39420 | lm loss: 4.1
#
# The job has 768 GPUs with tp = 8, pp = 12, micro-batch 1, 1F1B, and 2048 tokens in a sample. What is the global batch?
# How many micro-batches does a copy do in a step, and how large is the bubble? How many tokens does one GPU process in
# a second? Work it out before you open the answer.
#
# <details><summary>Answer</summary>
#
# The global batch is 307200 / 200 = 1536. There are dp = 768 / (8 · 12) = 8 copies, so m = 1536 / 8 = 192, and the
# bubble is 11 / (192 + 11) = 5.4 % of the whole time. One GPU processes 1536 · 2048 / 39.42 / 768 = 103.9 tokens per
# second.
#
# And a real one, of the workshop's plain data parallelism on 4 V100 in two nodes: iteration 100, consumed samples 800,
# 537.3 ms, learning rate 5.822E-05. With 1,024 tokens in a sample one GPU processes 8 · 1024 / 0.5373 / 4 = 3,812
# tokens/s.
# The rate falls from 6e-5 to 6e-6 by a cosine over 800 iterations, 8 of them warm-up: 6e-6 + 2.7e-5 · (1 + cos(π ·
# 92/792)) = 5.822e-5. Its profile has 48.5 % in communication and 41.7 % in kernels.
# </details>
#
# **Takeaway: from a log line and the layout you can recompute global batch, m, bubble and tokens per GPU. Do it before
# you trust any speed.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* In 15.4 the wrong forms are instructive: micro-batch 2, the answer of those who forget that
# there are two copies, has a bubble of 1/4; 4 ranks on one node find no GPUs. Ask: which number of the log would have
# shown that two jobs of two ranks ran instead of one of four? (The first line: 2 ranks.)

# %% [markdown]
# ## 7. Broken on purpose (core, 15 min)
#
# Here are three forms that do not fit on four ranks. Say what is wrong with each before you run the cell. Each error
# gives the rule, the value found, and the remedy.

# %% tags=["nbval-check-output"]
recipe = recipes.get("gpt_tiny")
for changes in (
    {"parallel.tp": 3},
    {"parallel.pp": 4},
    {"parallel.tp": 2, "parallel.pp": 2, "train.micro_batch": 3},
):
    try:
        config = recipes.with_changes(recipe, changes)
        combinations.check(config, world_size=4)
    except ValueError as error:
        print(changes, "\n   ", error)

# %% [markdown]
# All three come from plain arithmetic on the config, before any process exists, and `submit` does the same arithmetic
# before it hands a job to SLURM. Worse are the mistakes that nobody refuses:
#
# - a wrong **order**: the same losses, and more bytes on the slow link;
# - a **global batch** that was not meant: in programs that ask for m instead ("gradient accumulation steps"), it grows
#   with every node;
# - an m that is **too small**: the job runs, and its GPUs wait for most of the time.
#
# **Up to the limit.** Where plain dp is enough, a larger micro-batch makes larger matmuls and fewer messages for each
# sample, so one raises it until memory runs out. (With m = 1 the global batch rises with it.) The next cells do so with
# one copy of a GPT of six layers. `train_within` trains it in a process of its own, with 80 MiB for its tensors.
# `peak_bytes` computes the bytes beforehand; lesson 16 derives it, and has the remedies. Here are its first two rows.

# %% tags=["nbval-check-output"]
from course.labs import l16_plan as plan
from course.labs.l16_limited import Settings, train_within

MIB = 2**20
case = plan.CASES[0]
for micro_batch in (1, 2):
    peak_mib = plan.peak_bytes(case, Settings(micro_batch)) / MIB
    print(f"micro-batch {micro_batch}: {peak_mib:.1f} MiB")

# %% [markdown]
# **Predict.** Micro-batches of 1, 2, 4, 8, 16 and 32 are tried. Which is the last one that trains within 80 MiB? Some
# of the bytes belong to the weights and do not grow.

# %% tags=["predict"]
last_that_fits = 8  # 7 MiB for each sample, and 14.5 for the rest

# %%
rows = []
for micro_batch in (1, 2, 4, 8, 16, 32):
    settings = Settings(micro_batch)
    tried = train_within(case.model, settings, room_bytes=80 * MIB, num_steps=4)
    rows.append((micro_batch, plan.peak_bytes(case, settings) / MIB, tried))
    if not tried.fits:
        break
fitting = [micro_batch for micro_batch, _, tried in rows if tried.fits]
compare("last that fits", last_that_fits, fitting[-1], within=1)
print("micro-batch  computed MiB  samples/s")
for micro_batch, peak_mib, tried in rows:
    rate = f"{1e3 * micro_batch / tried.step_ms:.0f}" if tried.fits else "out of memory"
    print(f"{micro_batch:11} {peak_mib:13.1f}  {rate}")

# %% [markdown]
# The bytes grow by the same 6.9 MiB for each sample, and the formula names the row at which the run ends. The rate
# grows little here, since 128 tokens already keep one core busy. A GPU needs far more of them (lesson 03), and there
# the rate rises with the micro-batch at first. So measure both columns, and stop where the rate stops rising: with pp a
# larger micro-batch also makes a larger bubble. NVIDIA's workshop goes from 2 samples to 4 by its text and to 32 by its
# script (lesson 20, section 8), on GPUs of 16 GB, and ends as our last row does. Its text also says that the global
# batch is micro-batch × TP_SIZE; it means dp.
#
# **Out of memory on four ranks.** In the hybrid, tensor 2 × pipeline 2, the ranks do not need the same memory. Take a
# global batch of 32 as one micro-batch, samples of 128 tokens, hidden size 32, a vocabulary of 65,536 and numbers of 4
# bytes. Each rank may allocate 1.5 GB. The job fails after up to two minutes, and its log names the size of the tensor
# that no longer fits.
#
# **Predict.** How many bytes does a rank try to allocate? Think of the largest tensor that a rank makes. And the ranks
# of which stage run out of memory, 0 or 1?

# %% tags=["predict"]
bytes_of_the_tensor = 32 * 128 * (65536 // 2) * 4  # logits of half the vocabulary
stage_out_of_memory = 1

# %%
import re

form = {"nodes": 2, "ranks_per_node": 2, "parallel.tp": 2, "parallel.pp": 2}
form |= {"model.vocab_size": 65536, "model.hidden_size": 32}
form |= {"train.global_batch": 32, "train.micro_batch": 32, "train.steps": 1}
ended = submit(hybrid_lab.job(form, name="micro32"), hybrid_lab.LIMIT_BYTES)

asked = re.findall(r"error: rank (\d): .*you tried to allocate (\d+)", ended.log)
died = {int(rank) for rank, _ in asked}
stages = {GridShape(tp=2, pp=2).coords(rank)["pp"] for rank in died}
if asked:
    sizes = [int(size) for _, size in asked]
    compare("bytes", bytes_of_the_tensor, max(sizes), within=1.01, unit="B")
    compare("stage out of memory", stage_out_of_memory, max(stages), within=1)
print(ended.outcome.state)
for line in hybrid_lab.last_words(ended.log):
    print("   ", line)
print("out of memory: ranks", *sorted(died))

ranks.close()
lab.close()

# %% [markdown]
# The largest tensor is the **logits**. Only the last stage has the head, and tp shards it, so a rank has the logits of
# its half of the vocabulary: micro-batch · 128 tokens · V/2 numbers. One such tensor would fit. But the loss has two
# of this size at once in forward, the logits and their softmax, and three in backward: the softmax that was kept, a
# corrected copy of it, and the gradient. Which of the requests is refused depends on what else the process holds. With
# micro-batch 2 each has a sixteenth of the bytes, and the same 32 samples pass in 16 turns.
#
# Each rank that has an error of its own says so in a line (`1F0` and `1B0` are forward and backward of micro-batch 0 on
# stage 1). The others have lost their peers, and their messages, if there are any, are consequences. So search the log
# for the words about memory, not for the first or the last error. Rank 0 is on the first stage, and `memory_bytes` in
# the log is rank 0's alone, so it gives no warning.
#
# | limit | what the log says |
# |---|---|
# | of a process, on the CPU | `DefaultCPUAllocator: can't allocate memory` |
# | a GPU | `CUDA out of memory. Tried to allocate ...` |
# | `--mem` of a node, with cgroups | `oom_kill`, and state OUT_OF_MEMORY |
#
# `sacct` says FAILED for the first two: to SLURM they are programs that end with an error. The state above is
# labcode's, which looks for these words in the log.
#
# **Takeaway: sizes that do not divide are refused in one line, and sizes that divide badly run. Compute dp, m, the
# bubble and the bytes of the last stage before you submit.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Ask: why does the loss not depend on the micro-batch? (The same samples are added up in another
# order.)

# %% [markdown]
# ## 8. From here to GPUs and SLURM (core, 3 min)
#
# | where | start |
# |---|---|
# | 4 GPUs of one machine | `torchrun --nproc-per-node=4 -m labcode.train gpt_10m --parallel.tp 2 --parallel.pp 2 --train.micro_batch 4` |
# | the other order, to measure it | add `--parallel.order pp-dp-cp-tp` |
# | your cluster | `python -m labcode.slurm submit gpt_10m --site perlmutter --nodes 2 --parallel.tp 2 --parallel.pp 2 --train.micro_batch 4 --checkpoint.every 200` |
# | the script alone | the same with `render` or `lint` |
#
# Ranks must fill one node after the other, as `srun --distribution=block` and torchrun do. Otherwise `--parallel.order`
# means nothing.
#
# ## Questions (core, 4 min)
#
# **1.** A job with tp = 8, pp = 4, a global batch of 1024 and micro-batches of 2 gets 512 GPUs instead of 256. What
# happens to dp, m, bubble / work, and the bytes that a rank sends for its gradients?
#
# <details><summary>Answer</summary>
#
# dp goes from 256/32 = 8 to 16, m from 1024/(8 · 2) = 64 to 32, and bubble / work from 3/64 = 5 % to 3/32 = 9 %. The
# gradients of a rank have as many bytes as before. In the ring of their all-reduce a rank sends 2 · 15/16 times these
# bytes, where it was 2 · 7/8 times: 7 % more.
# </details>
#
# **2.** Two runs of one model on the same GPUs have the same losses, up to rounding, and one takes twice as long for a
# step. In which fields of the form (section 1) may they differ, and in which not?
#
# <details><summary>Answer</summary>
#
# In the order, in the micro-batch, and in tp and pp, with the dp and m that follow from them. These decide which rank
# computes what, and when, and what travels on which link. They cannot differ in the global batch, which decides over
# how many samples a step averages, and so changes the losses.
# </details>
#
# **3.** From lesson 12: why does m have to be several times pp?
#
# <details><summary>Answer</summary>
#
# The bubble is (pp - 1)/m of the work. With m = 4 pp it is less than a quarter.
# </details>
#
# ## Recap
#
# | concept | formula or fact | in labcode |
# |---|---|---|
# | data-parallel size | world / (tp · pp · cp) | `ParallelConfig.shape` |
# | micro-batches | m = global batch / (dp · micro-batch) | `TrainConfig.accumulation` |
# | in plain PyTorch | `init_device_mesh`, `parallelize_module`, `fully_shard`, `PipelineStage` | `models.parallelize` |
# | bytes of tp | for each micro-batch (4 L + 2)/pp all-reduces of act | `perf.traffic`, `comm.counting` |
# | bytes of pp | for each micro-batch act, twice in the middle | `perf.traffic` |
# | iteration | (m + pp - 1)(compute + tp + message) + what is not hidden of the gradients | `perf.step.iteration_parts` |
# | gradients with overlap | all-reduce - 2/3 of the last micro-batch's computing, at least 0 | |
# | FSDP | 1.5 all-reduces in each micro-batch, behind its computing | |
# | log | tokens/s of all ranks · step_s = global batch · tokens | `measure.metrics` |
# | logits | micro-batch · tokens · V/tp · 4 bytes | `perf.memory` |
#
# ## Sources
#
# - Narayanan et al. 2021, arXiv:2104.04473: section 3 (which axis where, batch and bubble), table 2 (TFLOP/s per GPU).
# - Shoeybi et al. 2019, arXiv:1909.08053: four all-reduces for each layer.
# - Korthikanti et al. 2022, arXiv:2205.05198: pipelines with their memory.
# - Megatron-LM, `megatron/training/training.py`: the form of its log line; `megatron/training/arguments.py`: its flags,
#   <https://github.com/NVIDIA/Megatron-LM>.
# - ZeRO and pipelines: DeepSpeed, `PipelineEngine` in
#   <https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/runtime/pipe/engine.py>; torchtitan,
#   `fsdp_reshard_after_forward` in <https://github.com/pytorch/torchtitan/blob/b5bcd76/torchtitan/distributed/fsdp.py>.
# - PyTorch: <https://docs.pytorch.org/docs/stable/distributed.pipelining.html>,
#   <https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html>,
#   <https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html>.
# - SLURM: <https://slurm.schedmd.com/sbatch.html>.
# - NVIDIA, datasheets of H100 (2023) and DGX H100 (2022): the factor of nine between the links.
