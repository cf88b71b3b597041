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
# A real run uses all axes at once: layers are cut over tp, dealt out over pp, and the whole model is copied over dp.
# Whoever starts such a run fills in a form of a few numbers: GPUs, tp, pp, micro-batch, global batch. These numbers
# depend on each other, and a bad choice is seldom an error. The run just uses half of the machine. In this lesson you
# fill in the form, predict how long an iteration takes, submit the run to two nodes, and read its log and its trace.
#
# ## Goals
#
# - get from the number of GPUs, tp, pp and the batch to dp and the number of micro-batches, and back;
# - write the time of an iteration as a function of the layout, and choose a layout with it;
# - submit a hybrid run to two nodes, and read its log line by line;
# - understand a refusal, and say beforehand whether the activations fit.
#
# **Time**: 80 minutes; after section 3, which ends about 50 minutes in, is a good place for a break.
# **Needs**: lessons 08 (grids), 09 (tensor parallel), 12 (pipeline parallel) and 14 (SLURM).

# %%
from labcode import recipes
from labcode.lab import Ranks, check, compare, plot, show_source
from labcode.perf import step
from labcode.teach.exercises import l15
from labcode.teach.labs import emulate
from labcode.teach.labs import l15_hybrid as hybrid_lab
from labcode.topology import GridShape

ranks = Ranks(4, timeout_s=120)

# %% [markdown]
# ## 1. The form
#
# | number | who decides | what it is |
# |---|---|---|
# | world size | what you are given | ranks, one for each GPU |
# | tp, pp | whether the model fits, and how many GPUs a node has | ranks that hold **one** copy of the model: tp · pp |
# | dp | nobody: it is what is left | copies of the model: world size / (tp · pp) |
# | global batch | what the model learns well with | samples of one optimizer step |
# | local batch | follows | samples of one copy: global batch / dp |
# | micro-batch | memory and efficiency | samples that go through a stage together |
# | m | follows | micro-batches of one copy in a step: local batch / micro-batch |
#
# An example: 32 GPUs with tp = 4 and pp = 2. One copy of the model takes 8 GPUs, so there are dp = 4 copies. A global
# batch of 256 gives each copy 64 samples, and with micro-batches of 2 these are m = 32.
#
# **Predict.** 64 GPUs, tp = 8, pp = 4, global batch 512, micro-batch 4. How many copies of the model are there, how
# many samples has each, and how many micro-batches?

# %% tags=["predict"]
copies = 64 / (8 * 4)
samples_of_a_copy = 512 / 2
micro_batches = 512 / 2 / 4

# %% tags=["nbval-check-output"]
form = recipes.with_changes(
    recipes.get("gpt_tiny"),
    {
        "parallel.tp": 8,
        "parallel.pp": 4,
        "train.global_batch": 512,
        "train.micro_batch": 4,
    },
)
shape = form.parallel.shape(world_size=64)
print(shape)
compare("copies of the model, dp", copies, shape.dp, within=1, found="computed")
local_batch = form.train.global_batch // shape.dp
m = form.train.accumulation(shape.dp)
compare("samples of a copy", samples_of_a_copy, local_batch, within=1, found="computed")
compare("micro-batches", micro_batches, m, within=1, found="computed")

# %% [markdown]
# `with_changes` does what `--parallel.tp 8 --parallel.pp 4 ...` does on the command line. Note what was **not** chosen:
# dp. If you are given twice as many nodes in the middle of a project and the batch stays, dp doubles and m halves, and
# nothing else in the form changes.

# %% [markdown] tags=["exercise"]
# ### Exercise 15.1 · The form as a function
#
# Write this arithmetic. Where a division leaves a remainder, raise a `ValueError` that says what does not fit. There
# are two such places: the ranks, and the samples.

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
# **More GPUs, the same batch.** A pipeline of pp stages takes m + pp - 1 turns for m micro-batches (lesson 12), so
# its GPUs work for the share m/(m + pp - 1) of the time. With more copies of the model, there are fewer micro-batches for
# each, and the share becomes smaller.
#
# Narayanan et al. (2021) trained GPT-3 (174.6 billion parameters) with tp = 8, pp = 12, micro-batch 1 and a global
# batch of 1536. On 384 GPUs, which are 4 copies with m = 384, each GPU did 153 TFLOP/s.
#
# **Predict.** On 1536 GPUs, how many TFLOP/s does each GPU do, if only m changes?

# %% tags=["predict"]
on_1536_gpus = 153 * (96 / (96 + 11)) / (384 / (384 + 11))  # 16 copies, m = 96

# %% tags=["nbval-check-output"]
PUBLISHED = {384: 153, 768: 149, 1536: 141}  # GPUs: TFLOP/s of each
from_bubble = {}
for gpus, speed in PUBLISHED.items():
    m = 1536 // (gpus // (8 * 12))
    share = m / (m + 11)
    from_bubble[gpus] = 153 * share / (384 / (384 + 11))
    print(f"{gpus:5} GPUs: m = {m:3}, bubble gives {from_bubble[gpus]:.0f}", end=", ")
    print("published", speed)
compare(
    "TFLOP/s on 1536 GPUs", on_1536_gpus, PUBLISHED[1536],
    within=1.02, found="published",
)

# %% [markdown]
# One line of arithmetic explains what these authors lost by scaling out, within 2 %. (Their table does not name the
# schedule; the formula of 1F1B fits.)
#
# **Takeaway: you choose tp, pp and the batch, and dp and m follow. More GPUs with the same batch mean fewer
# micro-batches, so a larger bubble.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* 14 minutes. In 15.1 people return floats (`/` for `//`), or test only one of the two remainders.
# Ask: which of the numbers may a cluster change behind your back? (The world size, and with it dp and m.)

# %% [markdown]
# ## 2. Who sits next to whom
#
# From here on we use the smallest run that cuts the model along two axes: tensor 2 × pipeline 2, on two nodes of two
# GPUs. With four GPUs, dp = 1 is left. There are two ways to place it. Either the two ranks of a tensor-parallel pair
# share a node, and the pipeline crosses the nodes, or the other way round. The `order` of the grid decides. In the
# figures a letter and a colour, a or b, mark each tensor-parallel pair.

# %% tags=["figure"]
model = l15.MODEL  # 2 layers, hidden size 64, 32 tokens, float32
inside = GridShape(tp=2, pp=2)  # order tp-cp-dp-pp
across = GridShape(tp=2, pp=2, order="pp-dp-cp-tp")
plot.grid(
    inside, color_by="tp", nodes=2,
    title="tp inside: each pair has a node to itself",
    alt="Two nodes of two ranks; the tensor-parallel pair 0 and 1 is one node, "
        "the pair 2 and 3 the other",
)

# %% tags=["figure"]
plot.grid(
    across, color_by="tp", nodes=2,
    title="tp across: each pair lies on both nodes",
    alt="Two nodes of two ranks; the tensor-parallel pair 0 and 2 lies across the "
        "nodes, and so does the pair 1 and 3",
)

# %% [markdown]
# What does each rank send in one step? Let *act* be the tensor between two layers for one micro-batch: micro-batch ×
# tokens × hidden size × 4 bytes. Our model has 32 tokens and a hidden size of 64, so with a micro-batch of 2 these are
# 2 · 32 · 64 · 4 bytes.
#
# - **tp**: four all-reduces of act in each layer of the stage (lesson 09), and one more: on the first stage for the
#   embedding, on the last one for the head. On a ring of two ranks, an all-reduce sends the tensor once.
# - **pp**: one act to the other stage, forward from the first, backward from the last.
#
# **Predict.** Each stage has one of the two layers, and the global batch is 8, so m = 4. How many bytes does a rank
# send in a step to its tp neighbour, and how many to its pp neighbour?

# %% tags=["predict"]
to_tp_neighbour = 4 * (4 * 1 + 1) * (2 * 32 * 64 * 4)
to_pp_neighbour = 4 * (2 * 32 * 64 * 4)

# %% tags=["nbval-check-output"]
from labcode.perf import traffic
from labcode.units import si


def bytes_on_links(shape):
    """{(from, to): bytes} of one real step, without the few bytes of the loss."""
    stepped = ranks.run(emulate.timed_steps, model, shape, 8, 2, repeats=1)
    return emulate.traffic(stepped, at_least=2000)

tp_inside = bytes_on_links(inside)
tp_across = bytes_on_links(across)
to_rank_1 = tp_inside[0, 1]
to_rank_2 = tp_inside[0, 2]
name = "rank 0 to rank 1, tp"
compare(name, to_tp_neighbour, to_rank_1, within=1, unit="B", found="counted")
name = "rank 0 to rank 2, pp"
compare(name, to_pp_neighbour, to_rank_2, within=1, unit="B", found="counted")
print("between the nodes, tp inside:", si(traffic.across_nodes(tp_inside, 2), "B"))
print("between the nodes, tp across:", si(traffic.across_nodes(tp_across, 2), "B"))

# %% [markdown]
# Four processes did a real step, and every message was written down as it left. With tp across the nodes, five times as
# many bytes take the slow way. And they come one by one, **between** two matrix products, so each pays the latency of
# the link as well, and nothing goes on meanwhile.
#
# **Takeaway: for each micro-batch, tp sends four all-reduces of act for every layer of the stage, and one for the
# embedding or the head. pp sends act once or twice. So tp goes inside the node, and pp between nodes.**

# %% [markdown]
# ## 3. How long does an iteration take?
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
# For pp = 1 and 2 this is exact. With more stages it is an estimate: a stage in the middle sends two messages for each
# micro-batch, and has neither the embedding nor the head.
#
# Each message takes the link that its group needs. `cluster.link(group)` is the link inside a node if all ranks of the
# group sit on one, and else the link between nodes.
#
# A laptop has no second node, so we **emulate a cluster** with speeds that are slow enough for any laptop: each matrix
# product takes as long as on a device of 75 MFLOP/s, each message as long as on its link, and the rank **sleeps**
# meanwhile. The link inside the node is nine times as fast as the link between nodes, as NVLink is compared with a common
# network card.

# %% tags=["nbval-check-output"]
from labcode.perf import alpha_beta
from labcode.perf.flops import training_flops_per_sample

cluster = l15.CLUSTER
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
# `alpha_beta.time_s("send", 2, num_bytes, link)` that of a message. The check asks for many layouts. If one point is off,
# it mostly says which; otherwise it prints what each point gives.

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
        pp_link = cluster.link(shape.groups("pp")[0])
        pp_s = alpha_beta.time_s("send", 2, act, pp_link)

    gradient_bytes = 4 * model.num_parameters / model_ranks
    dp_link = cluster.link(shape.groups("dp")[0])
    dp_s = alpha_beta.time_s("all_reduce", shape.dp, gradient_bytes, dp_link)

    return (m + shape.pp - 1) * (compute_s + tp_s + pp_s) + dp_s
    ### END SOLUTION

# %% tags=["check"]
check("15.2", iteration_s)

# %% [markdown]
# labcode's version returns the parts one by one, so that one can see where the time goes:

# %%
show_source(step.iteration_parts)

# %% [markdown]
# Three layouts for a global batch of 8 with micro-batches of 2: plain data parallelism with dp = 4, and the hybrid of
# section 2 in both orders. Plain dp computes without waiting, and has to average the gradients of the whole model over
# the slow link.
#
# **Predict.** Which is the fastest, and which the slowest: `"dp 4"`, `"tp inside"` or `"tp across"`? You may ask your
# function: it takes `model`, one of the layouts `GridShape(dp=4)`, `inside` and `across`, 8, 2, and `cluster`.

# %% tags=["predict"]
fastest = "tp inside"
slowest = "dp 4"

# %%
layouts = {"dp 4": GridShape(dp=4), "tp inside": inside, "tp across": across}
runs = {}
expected_s = {}
measured_s = {}
for name, shape in layouts.items():
    runs[name] = ranks.run(emulate.timed_steps, model, shape, 8, 2, cluster, repeats=1)
    measured_s[name] = emulate.step_s(runs[name])
    expected_s[name] = sum(step.iteration_parts(model, shape, 8, 2, cluster).values())
    compare(name, expected_s[name], measured_s[name], within=2, unit="s")
by_model = sorted(expected_s, key=expected_s.get)
compare("the fastest", fastest, by_model[0], found="computed")
compare("the slowest", slowest, by_model[-1], found="computed")
print("on the clock:", ", ".join(sorted(measured_s, key=measured_s.get)))

# %% tags=["figure"]
bars = {}
for name in layouts:
    bars[name] = {"predicted": expected_s[name], "measured": measured_s[name]}
plot.bars(
    bars, ylabel="seconds of one iteration",
    title="The hybrid is fastest, if tp stays inside the node",
    alt="With eight samples the hybrid with tp inside the node is predicted to take "
        "half of the time of plain data parallelism, and takes two thirds of it; the "
        "hybrid with tp across the nodes comes close to plain data parallelism",
)

# %% [markdown]
# The measured times are somewhat longer, because every message also costs the real processes something, and the hybrids
# send many. The prediction tells more than a stopwatch does: it says where the time goes.

# %% tags=["nbval-check-output"]
for name, shape in layouts.items():
    parts = step.iteration_parts(model, shape, 8, 2, cluster)
    print(f"{name:10}", end="")
    for part, seconds in parts.items():
        print(f"  {part} {seconds:.3f} s", end="")
    print()

# %% [markdown]
# Plain dp spends most of its time on the gradients. So is the hybrid always better? Look at what each time depends on:
# gradients travel once in a **step**, and activations with every **micro-batch**.
#
# **Predict.** The global batch grows from 8 to 256, on the same four GPUs. Which of the three layouts is the fastest
# then?

# %% tags=["predict"]
fastest_with_256 = "dp 4"

# %% tags=["figure", "nbval-check-output"]
sizes = [8, 16, 32, 64, 128, 256]
per_sample_ms = {}
for name, shape in layouts.items():
    per_sample_ms[name] = []
    for size in sizes:
        total_s = sum(step.iteration_parts(model, shape, size, 2, cluster).values())
        per_sample_ms[name].append(1e3 * total_s / size)
last = {name: times[-1] for name, times in per_sample_ms.items()}
best = min(last, key=last.get)
compare("fastest with 256 samples", fastest_with_256, best, found="computed")
plot.lines(
    per_sample_ms, x=sizes, logx=True, from_zero=True,
    xlabel="global batch", ylabel="predicted ms per sample",
    title="Data parallelism pays once a step, the others with each micro-batch",
    alt="Predicted time per sample falls with the batch for all layouts; dp 4 starts "
        "highest, crosses the hybrid between 32 and 64 samples, and ends lowest",
)

# %% [markdown]
# Up to 32 samples the hybrid wins, from 64 on plain data parallelism does. Where the lines cross depends on our numbers.
# That they cross does not.
#
# **Takeaway: an iteration takes (m + pp - 1) · (compute + tp + message) + gradients. Cutting the model buys room, and
# speed at small batches. What is left goes to data parallelism.**

# %% [markdown] tags=["exercise"]
# ### Exercise 15.3 · Choose the layout
#
# Write the function that fills in the form. It is given the GPUs and the batch, and `room_bytes`, the memory that a
# rank has for its share of weights, gradients and optimizer (16 bytes for each parameter). It returns the `GridShape`
# with the shortest iteration. Use `step.iteration_parts(model, shape, global_batch, micro_batch, cluster)`, which you
# saw above: the sum of its values is the time. Four rules:
#
# 1. dp · pp · tp is the number of GPUs, and only powers of two need to be tried.
# 2. tp divides the number of heads, and pp the number of layers.
# 3. The global batch is a multiple of dp · micro-batch.
# 4. 16 · parameters / (tp · pp) fits into the room.

# %% tags=["exercise"]
def best_layout(model, world, global_batch, micro_batch, cluster, room_bytes):
    """The GridShape with the shortest iteration among those that fit."""
    ### BEGIN SOLUTION
    best = None
    best_s = float("inf")
    for tp in (1, 2, 4, 8, 16, 32, 64):
        for pp in (1, 2, 4, 8, 16, 32, 64):
            if world % (tp * pp) or model.num_heads % tp or model.num_layers % pp:
                continue
            dp = world // (tp * pp)
            if global_batch % (dp * micro_batch):
                continue
            if 16 * model.num_parameters / (tp * pp) > room_bytes:
                continue
            shape = GridShape(dp=dp, pp=pp, tp=tp)
            parts = step.iteration_parts(
                model, shape, global_batch, micro_batch, cluster
            )
            if sum(parts.values()) < best_s:
                best = shape
                best_s = sum(parts.values())
    return best
    ### END SOLUTION

# %% tags=["check"]
check("15.3", best_layout)

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Sections 2 and 3 take 36 minutes with both exercises. In 15.2 people forget to divide the
# all-reduces by pp, or the gradients by tp · pp, or put dp inside the turns: the check names the point. Ask: what would
# overlap change? (The gradients could travel during backward; the message of pp during the next micro-batch. Then the
# formula is an upper bound.)

# %% [markdown]
# ## 4. The idle time in the trace
#
# Each rank noted when its actions ran. Where a row has no block, the rank waits, or its message is on the way.
#
# **Predict** for the hybrid with tp inside: for which share of the time is a rank **not** busy with computing and tp?
# Section 3 printed the parts: a rank is busy for `compute` + `tp` out of the sum of all parts.

# %% tags=["predict"]
idle_share = 1 - (0.566 + 0.081) / (0.566 + 0.081 + 0.135 + 0.196)

# %% tags=["figure"]
from labcode.teach.labs import l12_paced_pipeline as stages

expected_line = step.time_line(model, inside, 8, 2, cluster)
measured_line = stages.timeline(runs["tp inside"])
expected_share = expected_line.bubble_over_total()
name = "share of the time idle"
compare(name, idle_share, expected_share, within=1.02, found="simulated")
print(f"on the clock: {measured_line.bubble_over_total():.2f}")
plot.pipeline(
    {"simulated stages": expected_line, "measured ranks": measured_line},
    lanes={"simulated stages": "stage"},
    title="tp 2 x pp 2: ranks of one stage work in step",
    alt="Ranks 0 and 1 run the same actions at the same times, ranks 2 and 3 start one "
        "forward later; the gaps of the two simulated stages reappear in the ranks",
)

# %% [markdown]
# Read the lower part in pairs. Ranks 0 and 1 are one stage: each all-reduce makes them wait for each other, so they do
# the same at nearly the same time. Ranks 2 and 3 begin one forward and one message later. Ranks 0 and 1 have their long gap
# before the first backward, as in lesson 12. The short gaps between two blocks are messages on their way: in this
# emulated cluster a sender waits until its message has left, and on a GPU it would go on.
#
# **Takeaway: a long gap at the start, in the middle or at the end is the bubble, and more micro-batches shrink its
# share. Short regular gaps are messages.**

# %% [markdown]
# ## 5. The real program, on two nodes
#
# Now `python -m labcode.train gpt_tiny`, with its real data, optimizer and log, on a real SLURM with two nodes (lesson
# 14). The nodes share your cores. For comparison, plain dp = 4 trains first, on the ranks of this notebook. Then you see
# the script of the job, with blanks. `--ntasks-per-node` is the number of ranks on a node. (The GPUs of these nodes are
# emulated and the ranks compute on the CPU, so the script asks for none.)

# %%
from labcode.teach.labs import l14_cluster as slurm_lab
from labcode.train import metrics

lab = slurm_lab.open_lab("lesson15", nodes=2)
submit = hybrid_lab.Submit(lab)
plain = ranks.run(hybrid_lab.plain, {"train.global_batch": 16})[0]
print(hybrid_lab.blank_script())

# %% [markdown] tags=["exercise"]
# ### Exercise 15.4 · Fill in the script
#
# There are two nodes of two GPUs, and all of them are to be used. The model has 2 layers and 4 heads.
#
# - A rank has room for half of the model. It is cut no further than that, and between its layers, not through them.
# - The learning rate belongs to the recipe's global batch, 16.
# - The bubble is at most 1/8 of the work.
#
# Give a dict with the six blanks: `nodes`, `ranks_per_node`, `parallel.tp`, `parallel.pp`, `train.micro_batch` and
# `train.global_batch`. The check submits the job, and reads in its log who sat where, the grid, the steps and the last
# loss. This takes up to two minutes.

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

# %% [markdown]
# Now the same with the hybrid of section 2, tensor 2 × pipeline 2 with tp inside the node, and micro-batches of 2. It does
# the same arithmetic as plain dp. But it sends many small messages in each step, and plain dp one all-reduce.
#
# **Predict.** Is a step of the hybrid `"longer"` or `"shorter"` than one of plain dp here, where all ranks share your
# cores? And do their losses differ by 0.001 nats or more in any line of the log, `"yes"` or `"no"`?

# %% tags=["predict"]
step_of_the_hybrid = "longer"
losses_differ = "no"

# %%
SIZE = {"nodes": 2, "ranks_per_node": 2, "parallel.tp": 2, "parallel.pp": 2}
done = submit(hybrid_lab.job(SIZE | {"train.micro_batch": 2, "train.global_batch": 16}))
for line in done.log.splitlines():
    if line.strip():
        print(line)
hybrid = metrics.read(done.out)
hybrid_steps = [row for row in hybrid if "step_s" in row]
plain_steps = [row for row in plain if "step_s" in row]
ratio = hybrid_steps[-1]["step_s"] / plain_steps[-1]["step_s"]
print(f"step of the hybrid / of dp: {ratio:.1f}")
found = "longer" if ratio > 1 else "shorter"
compare("a step of the hybrid is", step_of_the_hybrid, found)

# %% [markdown]
# Read it line by line. The first line is the form, filled in: who computes where, the grid, and how the samples of a step
# are cut. Check it first. `n1: 0, 1` is a tensor-parallel pair inside a node. Then come the steps, and last the folder,
# whose `metrics.jsonl` holds more numbers:
#
# | here | in Megatron-LM's log | read it as |
# |---|---|---|
# | `step` | iteration, consumed samples | consumed samples = step · global batch |
# | `loss` | lm loss | of the whole global batch; starts near ln(vocabulary) |
# | `grad_norm` | grad norm | before clipping; a jump announces trouble |
# | `lr` | learning rate | still warming up |
# | `step_s` | elapsed time per iteration | mean since the line before; the first includes the start |
# | `tokens_per_s_per_rank` | throughput per GPU, in TFLOP/s | the `tokens/s` printed above are of all ranks together; compare this one between runs of different size |
# | `memory_bytes` | | peak of rank 0 alone: other stages differ |
# | `val_loss` | validation loss | a line of its own |

# %% tags=["nbval-check-output"]
differences = []
for one, other in zip(hybrid_steps, plain_steps):
    differences.append(abs(one["loss"] - other["loss"]))
found = "yes" if max(differences) >= 0.001 else "no"
compare("0.001 nats apart, or more", losses_differ, found)

# %% [markdown]
# The losses are the same, and that is the first thing to check after a change of layout. The hybrid is slower, as it
# must be on one machine: there is no slow link to avoid and no memory to save.
#
# **Somebody else's log.** Here is a line in the style of Megatron-LM (made up, after the row of 768 GPUs in section 1):
#
#     iteration 200/ 95000 | consumed samples: 307200 | elapsed time per iteration (ms): 39420 | lm loss: 4.1
#
# The job has 768 GPUs with tp = 8, pp = 12, micro-batch 1, 1F1B, and 2048 tokens in a sample.
#
# **Predict.** What is the global batch? How many micro-batches does a copy do in a step? How many tokens does one GPU
# process in a second?

# %% tags=["predict"]
their_batch = 307200 / 200
their_m = their_batch / (768 / (8 * 12))
their_tokens_per_s = their_batch * 2048 / 39.420 / 768

# %% tags=["nbval-check-output"]
m = 1536 // 8  # dp = 768 / (8 * 12) = 8
compare("global batch", their_batch, 307200 // 200, within=1, found="computed")
compare("micro-batches of a copy", their_m, m, within=1, found="computed")
of_one_gpu = 1536 * 2048 / 39.420 / 768
name = "tokens/s of one GPU"
compare(name, their_tokens_per_s, of_one_gpu, within=1.02, found="computed")
print(f"bubble / whole time: {11 / (m + 11):.1%}")

# %% [markdown]
# **Takeaway: a log line holds the whole form again. Recompute the global batch and the tokens of a step from it before
# you trust any speed.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* 20 minutes with section 4. In 15.4 the wrong forms are instructive: micro-batch 2, the answer of
# who forgets that there are two copies, has a bubble of 1/4; 4 ranks on one node find no GPUs. Ask: which number of the log
# would have shown that two jobs of two ranks ran in place of one of four? (The first line: 2 ranks.)

# %% [markdown]
# ## 6. Broken on purpose
#
# Three forms that do not fit on four ranks. Guess for each one what is wrong, and then read what was computed, what was
# found, and what to do.

# %% tags=["nbval-check-output"]
recipe = recipes.get("gpt_tiny")
for changes in (
    {"parallel.tp": 3},
    {"parallel.pp": 4},
    {"parallel.tp": 2, "parallel.pp": 2, "train.micro_batch": 3},
):
    try:
        recipes.with_changes(recipe, changes).check(world_size=4)
    except ValueError as error:
        print(changes, "\n   ", error)

# %% [markdown]
# All three come from plain arithmetic on the config, before any process exists, and `submit` asks the same before it
# hands a job to SLURM. Worse are the mistakes that nobody refuses:
#
# - a wrong **order**: the same losses, and more bytes on the slow link;
# - a **global batch** that was not meant: in programs that ask for m instead ("gradient accumulation steps"), it grows
#   with every node;
# - an m that is **too small**: the job runs, and its GPUs wait for most of the time.
#
# **Out of memory.** The micro-batch also decides what a rank keeps for its backward. Take the hybrid with a global batch
# of 32, hidden size 32 and a large vocabulary, V = 65,536. A rank that has the head holds the logits of its half of
# the vocabulary: micro-batch · 128 tokens · V/2 numbers of 4 bytes.
#
# **Predict.** How many bytes do these logits take with micro-batch 32, and how many with micro-batch 2? When memory is
# short, the ranks of which stage run out of it, 0 or 1?

# %% tags=["predict"]
logits_of_32 = 32 * 128 * (65536 // 2) * 4
logits_of_2 = logits_of_32 / 16
stage_out_of_memory = 1

# %% tags=["nbval-check-output"]
import re
from dataclasses import replace

from labcode.perf import memory
from labcode.units import si

WIDE = {"model.vocab_size": 65536, "model.hidden_size": 32}
wide = recipes.with_changes(recipe, WIDE).model
for micro_batch, predicted in ((32, logits_of_32), (2, logits_of_2)):
    kept = memory.model_activations(
        replace(wide, num_layers=1), GridShape(tp=2), batch=micro_batch, value_bytes=4
    )
    name = f"logits, micro-batch {micro_batch}"
    compare(name, predicted, kept["loss"], within=1.01, unit="B", found="computed")
    print(f"all that the last stage keeps: {si(sum(kept.values()), 'B')}")

# %% [markdown]
# What is kept is not yet the peak: the backward of the loss has three such tensors at once, the softmax that was kept, a
# corrected copy, and the gradient. Now the same two as jobs, with a real limit of memory for each rank. This
# takes up to four minutes.

# %%
print(f"the limit is {si(hybrid_lab.LIMIT_BYTES, 'B')} for each rank")
logs = {}
for micro_batch in (32, 2):
    form = SIZE | WIDE | {"train.global_batch": 32, "train.steps": 1}
    form["train.micro_batch"] = micro_batch
    job = hybrid_lab.job(form, name=f"micro{micro_batch}")
    done = submit(job, hybrid_lab.LIMIT_BYTES)
    logs[micro_batch] = done.log
    for line in hybrid_lab.last_words(done.log) or [done.outcome]:
        print(line)
died = set()
for rank in re.findall(r"error: rank (\d): .*can't allocate", logs[32]):
    died.add(int(rank))
print("out of memory:", *sorted(died))
stages_of_died = {inside.coords(rank)["pp"] for rank in died}
found = stages_of_died.pop() if len(stages_of_died) == 1 else stages_of_died
compare("stage out of memory", stage_out_of_memory, found, within=1)

ranks.close()
lab.close()

# %% [markdown]
# Each rank that has an error of its own says so in a line. The others have lost their peers, and what they say is a
# consequence. So search the log for the words of memory, not for the first or the last error. (The twin of a rank that
# died may be ended before it can speak.) Rank 0 hardly notices, as it is on the first stage. `memory_bytes` in the log is
# rank 0's alone, so it gives no warning.
#
# | limit | what the log says |
# |---|---|
# | of a process, on the CPU | `DefaultCPUAllocator: can't allocate memory` |
# | a GPU | `CUDA out of memory. Tried to allocate ...` |
# | `--mem` of a node, with cgroups | `oom_kill`, and state OUT_OF_MEMORY |
#
# **Takeaway: what does not divide is refused in one line, and what divides badly runs. Compute dp, m, the bubble and the
# bytes of the last stage before you submit.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* 10 minutes. Ask: why does the loss not depend on the micro-batch? (The same samples are added up
# in another order.)

# %% [markdown]
# ## 7. From here to GPUs and SLURM
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
# ## Questions
#
# **1.** You have 256 GPUs, tp = 8, pp = 4, global batch 1024 and micro-batch 2. What are dp and m, and what is bubble /
# work?
#
# <details><summary>Answer</summary>
#
# dp = 256/32 = 8, m = 1024/(8 · 2) = 64, bubble / work = 3/64 = 5 %.
# </details>
#
# **2.** The same job gets 512 GPUs and keeps its batch. What changes?
#
# <details><summary>Answer</summary>
#
# dp = 16 and m = 32. The bubble is 3/32 = 9 % of the work. The all-reduce of the gradients has as many bytes as before.
# </details>
#
# **3.** Two runs have the same losses and different speeds. Name two fields of the form that can explain it.
#
# <details><summary>Answer</summary>
#
# The order of the grid, and the micro-batch. Also tp and pp at the same global batch: none of them changes the
# arithmetic.
# </details>
#
# **4.** From lesson 12: why does m have to be several times pp?
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
# | bytes of tp | for each micro-batch (4 L + 2)/pp all-reduces of act | `perf.traffic`, `comm.counting` |
# | bytes of pp | for each micro-batch act, twice in the middle | `perf.traffic` |
# | iteration | (m + pp - 1)(compute + tp + message) + gradients | `perf.step.iteration_parts` |
# | log | tokens/s of all ranks · step_s = global batch · tokens | `train.metrics` |
# | logits | micro-batch · tokens · V/tp · 4 bytes | `perf.memory` |
#
# ## Sources
#
# - Narayanan et al. 2021, arXiv:2104.04473: section 3 (which axis where, batch and bubble), table 2 (TFLOP/s per GPU).
# - Shoeybi et al. 2019, arXiv:1909.08053: four all-reduces for each layer.
# - Korthikanti et al. 2022, arXiv:2205.05198: pipelines with their memory.
# - Megatron-LM, `megatron/training/training.py`: the form of its log line,
#   <https://github.com/NVIDIA/Megatron-LM>.
# - SLURM: <https://slurm.schedmd.com/sbatch.html>.
# - NVIDIA, datasheets of H100 (2023) and DGX H100 (2022): the factor of nine between the links.
