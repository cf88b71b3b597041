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
# A real run uses all axes at once: layers are cut over tp, dealt out over pp, and the whole is copied over dp. Whoever starts one fills in a form of a few numbers:
# ranks, tp, pp, micro-batch, global batch. They hang together, and a bad choice is seldom an error. It only costs half of the machine. This lesson fills in the form, predicts how long an
# iteration takes, runs it, and reads the log and the trace.
#
# ## Goals
#
# - get from world size, tp, pp and batch to dp and the number of micro-batches, and back;
# - put each axis on the link it needs, with bytes for each link, predicted and counted;
# - predict the time of an iteration, and when a hybrid beats plain data parallelism;
# - read a training log line by line, find the idle time in a trace, and understand a refusal;
# - submit the run to two nodes, and say before it starts whether its activations fit.
#
# **Time**: 90 minutes. **Needs**: lessons 08 (grids), 09 (tensor parallel), 12 (pipeline parallel) and 14 (SLURM).

# %%
import re
from dataclasses import replace

from labcode import recipes
from labcode.perf import alpha_beta as comm
from labcode.perf import memory
from labcode.perf import step as expected
from labcode.perf import traffic as placement
from labcode.perf.flops import training_flops_per_sample
from labcode.pool.ranks import Ranks
from labcode.teach.check import check, compare
from labcode.teach.exercises import l15
from labcode.teach.figures import plot
from labcode.teach.labs import emulate
from labcode.teach.labs import l12_paced_pipeline as stages
from labcode.teach.labs import l14_cluster as slurm_lab
from labcode.teach.labs import l15_hybrid as hybrid_lab
from labcode.topology import GridShape
from labcode.train import metrics
from labcode.units import si

# %% [markdown]
# ## 1. World size arithmetic
#
# | number | who decides | what it is |
# |---|---|---|
# | world size | what you are given | ranks, one per GPU |
# | tp, pp | whether the model fits, how many GPUs a node has | ranks that hold **one** copy of the model: tp · pp |
# | dp, "data-parallel size" | nobody: it is what is left | copies of the model: world / (tp · pp) |
# | global batch | what learns well (lesson 06) | samples per optimizer step |
# | local batch | follows | samples per copy: global / dp |
# | micro-batch | memory, efficiency | samples that go through a stage together |
# | m | follows | micro-batches per step and copy: local / micro |
#
# **Predict.** 64 GPUs, tp = 8, pp = 4, global batch 512, micro-batch 4. How many copies of the model, how many samples for each, how many micro-batches?

# %% tags=["predict"]
dp_guess = 64 / (8 * 4)
local_guess = 512 / 2
micro_batches_guess = 512 / 2 / 4

# %% tags=["nbval-check-output"]
form = recipes.with_changes(recipes.get("gpt_tiny"), {"parallel.tp": 8, "parallel.pp": 4, "train.global_batch": 512, "train.micro_batch": 4})
shape = form.parallel.shape(world_size=64)
print(shape)
compare("copies of the model, dp", dp_guess, shape.dp, within=1)
compare("samples of a copy", local_guess, form.train.global_batch // shape.dp, within=1)
compare("micro-batches", micro_batches_guess, form.train.accumulation(shape.dp), within=1)

# %% [markdown] tags=["exercise"]
# `with_changes` does what `--parallel.tp 8 --parallel.pp 4 ...` does on the command line. Note what you did **not** choose: dp. Add a node in the middle of a project, and dp grows, m shrinks, and nothing else
# in the form changes.
#
# ### Exercise 15.1 · The form
#
# Write this arithmetic as a function. Where a division leaves a rest, raise a `ValueError` that says so: there are two such places, ranks and samples.

# %% tags=["exercise"]
def my_layout(world, tp, pp, global_batch, micro_batch):
    """(dp, local batch, number of micro-batches), three whole numbers."""
    ### BEGIN SOLUTION
    dp, rest = divmod(world, tp * pp)
    if rest:
        raise ValueError(f"{world} ranks are not a multiple of tp*pp = {tp * pp}")
    if global_batch % (micro_batch * dp):
        raise ValueError(f"{global_batch} samples are not a multiple of micro*dp = {micro_batch * dp}")
    return dp, global_batch // dp, global_batch // dp // micro_batch
    ### END SOLUTION

# %% tags=["check"]
check("15.1", lambda: l15.layout(my_layout))

# %% [markdown]
# **More GPUs, same batch.** A pipeline of p stages takes $m + p - 1$ turns for $m$ micro-batches (lesson 12), so its GPUs work for the share $m/(m+p-1)$ of the time. More copies mean fewer
# micro-batches for each, and a smaller share.
#
# Narayanan et al. trained GPT-3 (174.6 billion parameters) with tp = 8, pp = 12, micro-batch 1 and a global batch of 1536. On 384 GPUs each did 153 TFLOP/s.
#
# **Predict.** The same on 1536 GPUs: how many TFLOP/s does each GPU do? Nothing changes but dp, so m.

# %% tags=["predict"]
tflops_guess = 153 * (96 / (96 + 11)) / (384 / (384 + 11))  # m = 1536 / 16 with 16 copies, 384 with 4

# %% tags=["figure", "nbval-check-output"]
PUBLISHED = {"GPT-3, 175 billion": (8, 12, 1536, {384: 153, 768: 149, 1536: 141}),  # tp, pp, global batch, {GPUs: TFLOP/s of each}
             "530 billion": (8, 35, 2240, {560: 171, 1120: 167, 2240: 159})}
series = {}
for name, (tp, pp, batch, found) in PUBLISHED.items():
    m = {world: batch // (world // (tp * pp)) for world in found}
    shares = [m[world] / (m[world] + pp - 1) for world in found]
    predicted = [next(iter(found.values())) * share / shares[0] for share in shares]
    print(name, {world: f"m = {m[world]}, predicted {value:.0f}, published {found[world]}" for world, value in zip(found, predicted)})
    series |= {f"{name}, published": (list(found), list(found.values())), f"{name}, from m": (list(found), predicted)}
compare("TFLOP/s of a GPU, of 1536", tflops_guess, PUBLISHED["GPT-3, 175 billion"][3][1536], within=1.02)
picture = plot.lines(series, xlabel="GPUs", ylabel="TFLOP/s of each GPU", title="More copies, the same batch",
                     alt="Published speed per GPU falls by 7 to 8 percent from the fewest to the most GPUs; the bubble alone predicts nearly the same fall")
for published in picture.axes[0].lines[::2]:
    published.set(linestyle="none", markersize=9)
picture.axes[0].legend()
picture

# %% [markdown]
# One line of arithmetic explains what these authors lost by scaling out. The first point of each line is theirs; the bubble alone predicts the others within 2 %. (Their table does not name the schedule; 1F1B's
# formula fits.)
#
# Put $m = B\,tp\,p/(N\,b)$ in, with N GPUs, batch B, micro-batch b:
#
# $$\frac{p-1}{m} = \frac{p-1}{p}\cdot\frac{N\,b}{B\,tp}.$$
#
# - A deeper pipeline hardly makes it worse, because it leaves fewer copies.
# - What counts is N b/B: how few micro-batches there are for each GPU.
#
# **Takeaway: tp, pp and the batch are chosen, dp and m follow. More GPUs with the same batch means fewer micro-batches, so a larger bubble.**
#
# ## 2. Who sits next to whom
#
# From here on: tensor 2 × pipeline 2 on two nodes of two GPUs, the smallest run that has everything. Lesson 08 has the rule: tp into the node. Here is why, link by link.

# %% tags=["figure"]
model = l15.MODEL  # 2 layers, hidden size 64, 32 tokens, float32
inside = GridShape(tp=2, pp=2)  # order tp-cp-dp-pp
across = GridShape(tp=2, pp=2, order="pp-dp-cp-tp")
print(f"{model.num_parameters:,} parameters; tp inside the node: groups {inside.groups('tp')}; across: {across.groups('tp')}")
plot.grid(inside, color_by="tp", nodes=2, alt="Two nodes of two ranks; the tensor-parallel pair 0 and 1 is one node, the pair 2 and 3 the other")

# %% [markdown]
# What does each rank send in one step? *act* is what travels between two layers for one micro-batch: micro-batch × tokens × hidden size × 4 bytes. Here, with micro-batch 2, it is 2 · 32 · 64 · 4.
#
# - **tp**: in each layer of the stage 4 all-reduces of *act* (lesson 09), and one more: on the first stage for the embedding, on the last for the head. A ring of two sends each tensor once.
# - **pp**: one *act* to the other stage, forward on the first, backward on the last.
#
# **Predict.** Each stage has one of the two layers. With a global batch of 8, so m = 4: bytes that a rank sends in a step to its tp neighbour, and to its pp neighbour. How many times as many bytes cross between
# the nodes if tp is the axis that crosses?

# %% tags=["predict"]
act = 2 * 32 * 64 * 4
tp_guess = 4 * (4 * 1 + 1) * act  # m times 5 all-reduces
pp_guess = 4 * act
factor_guess = tp_guess / pp_guess

# %% tags=["nbval-check-output"]
ranks = Ranks(4, timeout_s=120)

def links(shape):
    """{(from, to): bytes} of one real step; what the loss sends, a few hundred bytes at a time, is left out."""
    return emulate.traffic(ranks.run(emulate.timed_steps, model, shape, 8, 2, repeats=1), at_least=2000)

sent = {"tp inside the node": links(inside), "tp across": links(across)}
compare("rank 0 to its tp neighbour, 1", tp_guess, sent["tp inside the node"][0, 1], within=1, unit="B")
compare("rank 0 to its pp neighbour, 2", pp_guess, sent["tp inside the node"][0, 2], within=1, unit="B")
crossing = {name: placement.across_nodes(traffic, 2) for name, traffic in sent.items()}
print("between the nodes:", {name: si(size, "B") for name, size in crossing.items()})
compare("times as many", factor_guess, crossing["tp across"] / crossing["tp inside the node"], within=1)

# %% [markdown]
# Four processes did a real step, forward and backward, and every message was written down with its group as it left, the way `comm.counting` does it. The prediction is right to the byte.
#
# The figure shows the bad order. The white lines separate the nodes: what lies top right or bottom left crosses.

# %% tags=["figure"]
matrix = [[sent["tp across"].get((a, b), 0) / 1e3 for b in range(4)] for a in range(4)]
picture = plot.heatmap(matrix, xlabel="to rank", ylabel="from rank", unit="kB in one step", fmt="{:.0f}", title="Order pp-dp-cp-tp, two ranks per node",
                       alt="With pp fastest the small pipeline messages stay inside the nodes and the tensor-parallel ones, five times as large, cross")
for draw in (picture.axes[0].axhline, picture.axes[0].axvline):
    draw(1.5, color="white", lw=3)
picture

# %% [markdown]
# - The factor is 4 L/p + 1 for tp = 2: 5 with one layer for each stage, and with 8 layers in a stage 33 at the ends; in the middle, with neither embedding nor head, 32 *act* stand against 2.
# - The messages of tp come one by one **between** two matrix products. Each also pays the link's latency, and nothing goes on meanwhile.
#
# **Takeaway: per micro-batch and rank, tp sends about 2 (t−1)/t · 4 L/p times act (for tp = 2 the first factor is 1) and pp sends act once or twice. tp goes inside the node, pp between nodes.**
#
# ## 3. How long does an iteration take?
#
# A laptop has no second node, and four ranks on two cores wait for a core, not for each other. So we **emulate a cluster**, with speeds slow enough for any laptop: each matrix product takes as long as on a device of 75 MFLOP/s, each message as
# long as on its link, and the rank **sleeps** meanwhile. Processes, messages, gradients and their order are real. Nothing overlaps.

# %% tags=["nbval-check-output"]
cluster = l15.CLUSTER
flops = training_flops_per_sample(model)
compute_s = flops * 2 / (2 * 2) / cluster.flops_per_s  # a micro-batch of 2 samples on a quarter of the model
reduce_s, send_s = ({where: comm.time_s(kind, 2, 2 * 32 * 64 * 4, getattr(cluster, where)) for where in ("inside", "between")} for kind in ("all_reduce", "send"))
gradients_s = comm.time_s("all_reduce", 4, 4 * model.num_parameters, cluster.between)  # over four ranks, with all weights
print(f"inside {si(cluster.inside.beta_bytes_per_s, 'B/s')}, between {si(cluster.between.beta_bytes_per_s, 'B/s')}; a sample {si(flops, 'FLOP')}")
print(f"one micro-batch on one stage: {1e3 * compute_s:.0f} ms of computing")
for where in ("inside", "between"):
    print(f"{where:8} one all-reduce of act {1e3 * reduce_s[where]:5.1f} ms, one message {1e3 * send_s[where]:5.1f} ms")
print(f"gradients of the whole model over 4 ranks: {1e3 * gradients_s:.0f} ms")

# %% [markdown] tags=["exercise"]
# The link inside is nine times as fast, as NVLink is to a common network card (lesson 08).
#
# ### Exercise 15.2 · The time of an iteration
#
# Say `micro_s` is all that a stage does for one micro-batch: compute, all-reduces of tp, its message to the other stage. `dp_s` is the all-reduce of the gradients. Write the time of one iteration
# of `m` micro-batches over `pp` stages with 1F1B. When nothing overlaps it is one line.

# %% tags=["exercise"]
def my_iteration(m, pp, micro_s, dp_s):
    """Seconds."""
    ### BEGIN SOLUTION
    return (m + pp - 1) * micro_s + dp_s
    ### END SOLUTION

# %% tags=["check"]
check("15.2", lambda: l15.iteration(my_iteration))

# %% [markdown]
# **Predict** for a global batch of 8, with the numbers above:
#
# - **plain dp = 4**: each rank has the whole model and two samples. That is one micro-batch, and four times `compute_s`, since nothing is cut. Then the gradients.
# - **hybrid**, tp 2 × pp 2 with tp inside: m = 4, five all-reduces inside and one message between for each micro-batch.
# - the same with tp **across**.

# %% tags=["predict"]
dp_iteration_guess = 4 * compute_s + gradients_s
inside_iteration_guess = (4 + 1) * (compute_s + 5 * reduce_s["inside"] + send_s["between"])
across_iteration_guess = (4 + 1) * (compute_s + 5 * reduce_s["between"] + send_s["inside"])

# %% tags=["figure"]
layouts = {"dp 4": GridShape(dp=4), "tp inside, pp across": inside, "tp across, pp inside": across}
runs = {name: ranks.run(emulate.timed_steps, model, layout, 8, 2, cluster, repeats=1) for name, layout in layouts.items()}
measured = {name: emulate.step_s(run) for name, run in runs.items()}
for name, guess in zip(layouts, (dp_iteration_guess, inside_iteration_guess, across_iteration_guess)):
    compare(name, guess, measured[name], within=2, unit="s")
parts = {name: expected.iteration_parts(model, layout, 8, 2, cluster) for name, layout in layouts.items()}
plot.bars({name: {"predicted": sum(parts[name].values()), "measured": measured[name]} for name in layouts}, ylabel="seconds of one iteration",
          fmt="{:.2f}", title="Four ranks on two emulated nodes, global batch 8",
          alt="Predicted and measured seconds of three layouts: the hybrid with tensor parallelism inside the node is the shortest")

# %% tags=["nbval-check-output"]
for name, seconds in parts.items():
    total = sum(seconds.values())
    print(f"{name:22}", ", ".join(f"{part} {value / total:.0%}" for part, value in seconds.items() if value), "of the prediction")
print("weights on a rank:", {name: f"{run[0].num_parameters:,}" for name, run in runs.items()})
losses = [run[0].loss for run in runs.values()]
print("losses equal to 1e-4:", max(losses) - min(losses) < 1e-4)

# %% [markdown]
# Measured times are somewhat longer, and more so on a busy machine: each message also costs the real processes something, and the hybrids send many. The prediction also tells where the time goes, which a stopwatch does not. All three compute
# the same. Plain dp spends most of its time on gradients, which have to cross; the bad order spends it on all-reduces of activations.
#
# So the hybrid beats dp? Here, yes. But gradients travel once per **step**, activations with every **sample**. Let the batch grow:

# %% tags=["figure", "nbval-check-output"]
sizes = [8, 16, 32, 64, 128, 256]
per_sample = {name: [1e3 * sum(expected.iteration_parts(model, layout, size, 2, cluster).values()) / size for size in sizes] for name, layout in layouts.items()}
for name, times in per_sample.items():
    print(f"{name:22}", "  ".join(f"{size}: {time:.0f} ms" for size, time in zip(sizes, times)))
plot.lines(per_sample, x=sizes, logx=True, xlabel="global batch", ylabel="ms per sample", title="Which layout is fastest depends on the batch (predicted)",
           alt="Time per sample falls with the batch for all layouts; data parallel starts highest, crosses the hybrid between 32 and 64 samples, and ends lowest")

# %% [markdown]
# Up to 32 samples the hybrid wins, from 64 on plain data parallelism. The crossing depends on our numbers, that there is one does not: dp pays a fixed price per step, the others pay per micro-batch. So the order of the questions is:
#
# 1. Does the model fit on one GPU, with optimizer and activations? Here a rank of the hybrid holds a quarter of the weights.
# 2. If not: tp up to the size of a node, then pp.
# 3. Everything that is left goes to dp, and the batch is as large as learning allows.
#
# **Takeaway: an iteration takes (m + p − 1) · (compute + tp + message) + gradients. tp and pp buy room for the model and speed at small batches; dp takes the rest.**
#
# ## 4. The idle time in the trace
#
# The ranks noted when each action ran. Where a trace has no bar, the rank waits, or its message is on the way.
#
# **Predict.** For the hybrid with tp inside, from the numbers of section 3: which share of the time is a rank neither computing nor in an all-reduce? It is busy for 4 · (`compute_s` + 5 · `reduce_s["inside"]`).

# %% tags=["predict"]
idle_guess = 1 - 4 * (compute_s + 5 * reduce_s["inside"]) / (5 * (compute_s + 5 * reduce_s["inside"] + send_s["between"]))

# %% tags=["figure"]
line = stages.timeline(runs["tp inside, pp across"])
compare("share of the time idle", idle_guess, line.bubble_over_total(), within=1.5)
ideal = expected.time_line(model, inside, 8, 2, cluster)
plot.timeline(stages.bars(ideal, "simulated stage") + stages.bars(line, "measured rank"), xlabel="ms", title="tp 2 x pp 2, four micro-batches",
              alt="Ranks 0 and 1 run the same actions at the same times, ranks 2 and 3 start one forward later; the gaps of the simulated stages reappear")

# %% [markdown] tags=["exercise"]
# Read it in pairs: ranks 0 and 1 are one stage, they do the same at the same time, because each all-reduce makes them wait for each other. Ranks 2 and 3 begin a forward and a message late; ranks 0 and 1 have their long gap
# before the first backward, as in lesson 12. The short gaps between actions are messages under way: in this model a sender waits with its message, on a GPU it would go on.
#
# ### Exercise 15.3 · Find the gaps
#
# A trace is a list of rows `(rank, action, start_s, stop_s)`, in `line.rows`, and ends at `line.total_s`. Write down where a rank does nothing: before its first action, between two, after its last.

# %% tags=["exercise"]
def my_gaps(line, rank):
    """[(start_s, stop_s), ...], in order."""
    ### BEGIN SOLUTION
    gaps, free_since = [], 0.0
    for row in sorted((row for row in line.rows if row.rank == rank), key=lambda row: row.start_s):
        gaps.append((free_since, row.start_s))
        free_since = row.stop_s
    return [*gaps, (free_since, line.total_s)]
    ### END SOLUTION

# %% tags=["check"]
check("15.3", lambda: l15.gaps(my_gaps))

# %% [markdown]
# What makes the idle share smaller? With twice the batch, m = 8, the bubble is one turn of 9 instead of 5: twice the work in 1.8 times the time. Messages are paid with each micro-batch, unless they overlap.
#
# **Takeaway: in a trace, look for the gaps before the bars. A long one at the start, middle or end is the bubble, and more micro-batches shrink its share; short regular ones are messages.**
#
# ## 5. The real program, on two nodes
#
# Now `python -m labcode.train gpt_tiny` with its real data, optimizer and log, on a real SLURM with two nodes (lesson 14). They share your cores. For comparison, plain dp = 4 trains
# first, on the ranks of this notebook.

# %%
lab = slurm_lab.open_lab("lesson13", nodes=2)
submit = hybrid_lab.Submit(lab)
plain = ranks.run(hybrid_lab.plain, {"train.global_batch": 16})[0]
print(hybrid_lab.blank_script())

# %% [markdown] tags=["exercise"]
# That is the script, with blanks; `--ntasks-per-node` is the number of ranks on a node. (A site with GPUs adds a line that asks for them.)
#
# ### Exercise 15.4 · Fill in the form
#
# Two nodes of two GPUs, all to be used; 2 layers, 4 heads.
#
# - A rank has room for a quarter of the layers, not more, and tp stays inside the node.
# - The learning rate belongs to the recipe's global batch, 16.
# - The bubble is at most 1/8 of the work; micro-batches are not smaller than they must be.
#
# Give a dict with `nodes`, `ranks_per_node`, `parallel.tp`, `parallel.pp`, `train.micro_batch`, `train.global_batch`. The check submits the job, and reads in its log who sat where, the grid, the steps and the last loss.

# %% tags=["exercise"]
### BEGIN SOLUTION
my_form = {"nodes": 2, "ranks_per_node": 2, "parallel.tp": 2, "parallel.pp": 2, "train.micro_batch": 2, "train.global_batch": 16}
### END SOLUTION

# %% tags=["check"]
check("15.4", lambda: l15.script(my_form, submit, plain))

# %% [markdown]
# The hybrid and plain dp do the same arithmetic. But the hybrid sends, per step and rank, 8 · (5 + 1) messages and more, each a wait for another process, and plain dp a single all-reduce.
#
# **Predict.** (a) Is a step of the hybrid longer or shorter than one of dp, here, where all share your cores? (b) By how much do their losses differ after 12 steps, in nats?

# %% tags=["predict"]
slower_guess = "longer"  # the same products, and more waits
difference_guess = 0  # same seed, same samples: only sums are reordered

# %%
SIZE = {"nodes": 2, "ranks_per_node": 2, "parallel.tp": 2, "parallel.pp": 2}
done = submit(hybrid_lab.job(SIZE | {"train.micro_batch": 2, "train.global_batch": 16}))
print(*filter(None, done.log.splitlines()), sep="\n")
hybrid = metrics.read(done.out)
for row in hybrid[-2:]:  # of metrics.jsonl
    print({name: float(f"{value:.4g}") for name, value in row.items()})
steps = {name: [row for row in rows if "step_s" in row] for name, rows in {"hybrid": hybrid, "plain": plain}.items()}
print(f"step of the hybrid / of dp: {steps['hybrid'][-1]['step_s'] / steps['plain'][-1]['step_s']:.1f}, predicted: {slower_guess}")

# %% [markdown]
# **Line by line.** The first line is the form, filled in: who computes where, dp, and how a step's samples are cut. Check it first: `n1: 0, 1` is a tensor-parallel pair inside a node. Then come the steps, and last the folder. The
# same numbers, and more, are in `metrics.jsonl`; we printed its last two lines:
#
# | here | in Megatron-LM's log | read it as |
# |---|---|---|
# | `step` | iteration, consumed samples | consumed samples = step · global batch |
# | `loss` | lm loss | of the whole global batch; starts near ln(vocabulary) |
# | `grad_norm` | grad norm | before clipping; a jump announces trouble |
# | `lr` | learning rate | still warming up |
# | `step_s` | elapsed time per iteration | mean since the line before; the first includes the start |
# | `tokens_per_s` | | global batch · tokens / `step_s` |
# | `tokens_per_s_per_rank` | (throughput per GPU, in TFLOP/s) | compare this one between runs of different size |
# | `memory_bytes` | | peak of rank 0 alone: other stages differ |
# | `val_loss` | validation loss | a line of its own |

# %% tags=["nbval-check-output"]
last = steps["hybrid"][-1]
compare("tokens of one step", 16 * 128, round(last["tokens_per_s"] * last["step_s"]), within=1)
off = max(abs(a["loss"] - b["loss"]) for a, b in zip(steps["hybrid"], steps["plain"]))
compare("difference of the losses, nats", difference_guess, round(off, 3), within=1)

# %% [markdown] tags=["exercise"]
# The curves are the same; that is the first thing to check after a change of layout. The hybrid is slower, as it must be on one machine: there is no slow link to avoid, no memory to save, and a price for each message.
#
# ### Exercise 15.5 · Somebody else's log
#
# `iteration 200/ 95000 | consumed samples: 307200 | elapsed time per iteration (ms): 39420 | lm loss: 4.1E+00`
#
# The job has 768 GPUs, tp = 8, pp = 12, micro-batch 1, 2048 tokens per sample, 1F1B. Give global batch, micro-batches per step, tokens per second of one GPU, and the share of the **time** that the bubble takes. (The line is made up, after the
# second row of section 1.)

# %% tags=["exercise"]
### BEGIN SOLUTION
global_batch = 307200 // 200
micro_batches = global_batch // (768 // (8 * 12))
my_reading = (global_batch, micro_batches, global_batch * 2048 / 39.420 / 768, 11 / (micro_batches + 11))
### END SOLUTION

# %% tags=["check"]
check("15.5", lambda: l15.reading(my_reading, iterations=200, samples=307200, step_s=39.420, world=768, tp=8, pp=12, micro=1, tokens=2048))

# %% [markdown]
# **Takeaway: a log line holds the whole form again. Recompute the global batch and the tokens per step from it before you trust any speed.**
#
# ## 6. Broken on purpose
#
# Three forms that do not fit, on four ranks. Guess for each what is wrong, then read: what was computed, what was found, what to do.

# %% tags=["nbval-check-output"]
for changes in ({"parallel.tp": 3}, {"parallel.pp": 4}, {"parallel.tp": 2, "parallel.pp": 2, "train.micro_batch": 3}):
    try:
        recipes.with_changes(recipes.get("gpt_tiny"), changes).check(world_size=4)
    except ValueError as error:
        print(changes, "\n   ", error)

# %% [markdown]
# All three come from plain arithmetic on the config, before any process group exists, and `submit` asks the same before it hands a job to SLURM. Started by hand, all ranks fail alike, and rank 0 says it for all, in one line.
#
# Worse are the mistakes that nobody refuses:
#
# - a wrong **order**: same losses, more bytes on the slow link;
# - a **global batch** that was not meant: in programs that ask for m instead ("gradient accumulation steps") it grows with every node;
# - m **too small**: it runs, with half of the GPUs idle.
#
# **Takeaway: what does not divide is refused in one line. What divides badly runs, so compute dp, m, the bubble and the bytes per link before you submit.**

# %% [markdown]
# ## 7. Out of memory
#
# The micro-batch also decides what a rank keeps for its backward (lesson 09). Take the same hybrid with a global batch of 32, hidden size 32 and a large vocabulary, V = 65,536. Each rank of the **last** stage holds the logits of its
# half of the vocabulary: micro-batch · 128 tokens · V/2 · 4 bytes, and the loss keeps as much.
#
# **Predict.** How many bytes has one such tensor with micro-batch 32, so m = 1? With micro-batch 2, so m = 16? And by how much do the two losses differ, in nats?

# %% tags=["predict"]
logits_32_guess = 32 * 128 * (65536 // 2) * 4
logits_2_guess = logits_32_guess / 16
loss_guess = 0  # the same samples, added up in another order

# %%
WIDE = {"model.vocab_size": 65536, "model.hidden_size": 32}
wide = recipes.with_changes(recipes.get("gpt_tiny"), WIDE).model
losses = {}
for micro, guess in ((2, logits_2_guess), (32, logits_32_guess)):
    kept = memory.model_activations(replace(wide, num_layers=1), GridShape(tp=2), batch=micro, value_bytes=4)
    grown = ranks.run(hybrid_lab.one_step, wide, inside, 32, micro)  # (loss, bytes) of each rank
    losses[micro] = grown[0][0]
    print(f"micro-batch {micro}: to be kept on the last stage {si(sum(kept.values()), 'B')}, of which loss {si(kept['loss'], 'B')}")
    compare("  one tensor, of what is kept", guess, kept["loss"], within=1.01, unit="B")
    print("   ranks grew by at most", *(si(size, "B") for _, size in grown))
compare("difference of the losses", loss_guess, round(abs(losses[2] - losses[32]), 3), within=1)

# %% [markdown]
# The result is the same. With micro-batch 32 the last stage grows by **three** tensors: the backward of the loss has the softmax that was kept, a corrected copy, and the gradient. What
# is kept is not yet the peak. The first stage, with **rank 0**, hardly notices: the log's `memory_bytes` is no warning.
#
# Now the same two as jobs, with a real limit for each rank, a line of the script: `ulimit -d`. Three tensors of micro-batch 32 cannot fit.
#
# **Predict.** With micro-batch 32, which ranks run out of memory, on which node? What do the others say? What becomes of micro-batch 2?

# %% tags=["predict"]
out_of_memory_guess = {2, 3}  # the last stage, on n2; the others lose their peers

# %%
print(f"ulimit -d: {si(hybrid_lab.LIMIT_BYTES, 'B')} for each rank")
ends = {}
for micro in (32, 2):
    form = SIZE | WIDE | {"train.global_batch": 32, "train.steps": 1, "train.micro_batch": micro}
    ends[micro] = submit(hybrid_lab.job(form, name=f"micro{micro}"), hybrid_lab.LIMIT_BYTES)
    print(*hybrid_lab.last_words(ends[micro].log) or [ends[micro].outcome], sep="\n")
died = {int(rank) for rank in re.findall(r"error: rank (\d): .*can't allocate", ends[32].log)}
print("out of memory:", died, " predicted:", out_of_memory_guess)
for size in re.findall(r"you tried to allocate (\d+)", ends[32].log)[:1]:
    compare("bytes that were asked for", logits_32_guess, int(size), within=1, unit="B")
ranks.close()
lab.close()

# %% [markdown]
# **Find the cause.** Each rank that has an error of its own says so in a line. The others have lost their peers: what they say is a
# consequence. Search for the words of memory, not for the first or last error; `rank 3` in that line, or the task in srun's line, says
# who. (Its twin may be ended before it can speak.)
#
# | limit | what the log says |
# |---|---|
# | of a process, on the CPU | `DefaultCPUAllocator: can't allocate memory` |
# | a GPU | `CUDA out of memory. Tried to allocate ...` |
# | `--mem` of a node, with cgroups | `oom_kill`, and state OUT_OF_MEMORY |
# | `--mem` without, as on this cluster | `exceeded memory limit (... > ...), being killed`, with the node; state FAILED, exit code 137 |
#
# **Takeaway: activations grow with the micro-batch, results do not change. Compute the last stage's bytes before you submit, and after a crash search the log for memory, then for its rank and node.**

# %% [markdown]
# ## From here to GPUs and SLURM
#
# | where | start |
# |---|---|
# | 4 GPUs of one machine | `torchrun --nproc-per-node=4 -m labcode.train gpt_10m --parallel.tp 2 --parallel.pp 2 --train.micro-batch 4` |
# | the other order, to measure it | add `--parallel.order pp-dp-cp-tp` |
# | your cluster | `python -m labcode.slurm submit gpt_10m --site perlmutter --nodes 2 --parallel.tp 2 --parallel.pp 2 --train.micro-batch 4 --checkpoint.every 200` |
# | the script alone | the same with `render` or `lint` |
#
# Ranks must fill one node after the other, as `srun --distribution=block` and torchrun do; else `--parallel.order` means nothing. (torchrun sorts the nodes by name as text, n10 before n2; rank 0 need not be on the first.)

# %% [markdown]
# ## Recap
#
# | concept | formula or fact | in labcode |
# |---|---|---|
# | data-parallel size | world / (tp · pp · cp) | `ParallelConfig.shape` |
# | micro-batches | m = global / (dp · micro) | `TrainConfig.accumulation` |
# | bubble / work | (p−1)/m = (p−1)/p · N b/(B tp) | `perf.pipeline` |
# | bytes of tp | per micro-batch 2 (t−1)/t · (4 L/p + 1) act, at the ends | `perf.placement`, `comm.counting` |
# | bytes of pp | per micro-batch act, twice in the middle | `perf.placement` |
# | iteration | (m + p − 1)(compute + tp + message) + gradients | `teach.expected.iteration_parts` |
# | log | tokens/s · step_s = global batch · tokens | `train.metrics` |
# | logits | micro-batch·tokens·V/tp·4 bytes | `perf.memory` |
#
# ## Sources
#
# - Narayanan et al. 2021, arXiv:2104.04473: section 3 (which axis where, batch and bubble), table 2 (TFLOP/s per GPU; its tp and pp as in cli99/llm-analysis).
# - Shoeybi et al. 2019, arXiv:1909.08053: four all-reduces per layer.
# - Korthikanti et al. 2022, arXiv:2205.05198: pipelines with their memory.
# - Megatron-LM, `megatron/training/training.py`: the form of its log line.
# - slurm.schedmd.com: sbatch, cgroup.conf.
# - NVIDIA, datasheets of H100 (2023) and DGX H100 (2022): factor nine.
