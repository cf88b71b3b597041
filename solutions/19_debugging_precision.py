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
# # 19 · Debugging precision across ranks
#
# A run in 8 bits learns less than it should. The loss curve says so, and nothing more. To find out why, you have to look
# at the tensors inside, and on several ranks each rank sees only its part of them. In this lesson you find the reason in
# statistics, repair the run with a few lines of YAML, and write the tools: statistics that are right across ranks, a
# feature of your own, and the search for the first tensor in which two runs differ.
#
# ## Goals
#
# - watch the tensors of a training run on all ranks with one YAML file;
# - reduce the statistics of shards to those of the whole tensor;
# - choose over which ranks statistics are reduced, and say beforehand what each rank's file will hold;
# - find what breaks an FP8 run, and repair it without leaving FP8;
# - name the first tensor in which two runs differ, and the rank it came from.
#
# **Time**: 175 minutes, and 85 more for what is optional. Good places for a break are after section 3, and after
# section 5.
#
# **Needs**: lesson 08 (sections 1 and 2), lesson 09 (section 2), lesson 12 (section 1),
# lesson 18 (sections 1, 5, 6 and 9). For section 11 also lesson 18 (section 11).

# %%
import math
from pathlib import Path

from course.lab import Ranks, check, compare, plot, show_source
from course.labs import l19_runs as lab
from course.labs.l18_gpt import PARTS, part_in_words
from course.progress import status
from labcode.debug import on_layers

ranks = Ranks(4)
GRID = "--parallel.dp 2 --parallel.tp 2"
FP8 = "--train.dtype fp8 --fp8.margin 18"

def train(options, folder, fault=None):
    """What all ranks return after a training run on the grid."""
    status(f"training {options}")
    try:
        return ranks.run(lab.train, f"{GRID} {options}", folder, fault)
    finally:
        status()

# %% [markdown]
# ## 1. A run that learns less (core, 5 min)
#
# The model is a small GPT on four ranks, dp 2 x tp 2. `train` in the cell above does what `python -m labcode.train` does
# with the same options, on ranks that have been started already. We train the model in bfloat16, and then in FP8 with a
# scale that somebody has chosen to be on the safe side: `--fp8.margin 18`.
#
# Lesson 18 had the formula of delayed scaling. The margin leaves room for growth:
#
# $$\text{scale} = \frac{\text{largest number of the format}}{2^{\text{margin}} \cdot \max(\text{history})}$$
#
# With margin 18 a tensor may become 2^18 = 262,144 times larger before it saturates, which sounds very safe.

# %% tags=["figure"]
bf16 = train("--train.dtype bfloat16 --train.steps 50", "runs/bf16")[0]
broken = train(f"{FP8} --train.steps 50", "runs/broken")[0]
print(f"validation loss: bfloat16 {bf16.val_loss:.2f}, FP8 {broken.val_loss:.2f}")
plot.lines(
    {"bfloat16": bf16.losses, "FP8, margin 18": broken.losses},
    x=range(1, 51),
    reference={"frequencies of characters alone": lab.frequencies_loss()},
    caption="19.losses",
)

# %% [markdown]
# The run has not crashed, and nothing is infinite. The dashed line is the loss of a model that knows how often each
# character occurs and nothing else. The run in FP8 learns this much, and little more. In a real project one would now
# try other learning rates, and lose a week.

# %% [markdown]
# ## 2. Statistics of all layers from one YAML (core, 13 min)
#
# Prints in the model, on four ranks, in 8 layers, for three tensors of each, would be a lot, and they would have to be
# taken out again. It is better to describe in a file what is to be looked at. NVIDIA's library `nvdlfw_inspect` reads
# such a file, and the layers of Transformer Engine and of labcode obey it. What can be done to a layer is called a
# **feature**.
#
# A feature may look at six tensors of each linear layer, with the names in the picture. *wgrad* and *dgrad* are also the
# names of the GEMMs that compute these tensors; the forward GEMM is called *fprop*.

# %% tags=["figure"]
plot.watched_layer(caption="19.layer")

# %% [markdown]
# The file consists of blocks. Each has a name of your choice, says which layers it is for, and lists features:

# %% tags=["nbval-check-output"]
look = """
look:                                  # any name
  enabled: True
  layers:
    layer_name_regex_pattern: blocks   # all layers whose name has "blocks" in it
  transformer_engine:                  # whose features these are
    LogFp8TensorStats:
      enabled: True
      tensors: [activation, weight, gradient]
      stats: ["underflows%", "overflows%"]
      freq: 20                         # in steps 0, 20, 40
"""
Path("look.yaml").write_text(look)
print(f"{len(look.splitlines()) - 1} lines for four ranks")

# %% [markdown]
# `underflows%` is the percentage of values that were not zero before the cast and are zero after it. `overflows%` is the
# percentage that was too large. With a scale from the tensor itself nothing is too large, so Transformer Engine has
# `overflows%` for delayed scaling only, and so has labcode. Each rank writes to its own file in `--debug.log_dir`, by
# default `debug` in the run's folder. `--debug.reduce_over dp tp` reduces the counts of all four ranks to one; section 4
# is about this option. All ranks must read the same file, on every node: labcode compares what they have read, and
# refuses to start if one of them differs.
#
# In step 0 a delayed scale has no history yet, and is 1. That step says nothing about the margin, so we look at step 40.
#
# What will the statistics say about the run with margin 18? The largest number of a tensor lands at 448 / 2^18, which
# is a little less than 2^-9. The smallest number of e4m3 above zero is 2^-9, and whatever is less than half of it
# becomes zero. For gradients the format is e5m2: the largest number lands at 57,344 / 2^18, a little less than 2^-2,
# and the smallest number of e5m2 above zero is 2^-16.
#
# **Predict.** How many of the values of an activation or a weight are lost in the cast: "hardly any", "half", or "nearly
# all"? And how many of those of a gradient?

# %% tags=["predict"]
lost_of_activations = "nearly all"  # what is larger than half of the amax is left
lost_of_gradients = "hardly any"  # 14 powers of two are left below the largest

# %% tags=["figure"]
options = f"{FP8} --debug.config look.yaml --debug.reduce_over dp tp --train.steps 41"
train(options, "runs/look")
found = on_layers.read_statistics(Path("runs/look/debug"), 0)
underflows = lab.table(found, "underflows%", 40)
overflows = lab.table(found, "overflows%", 40)

def mean_of_column(table, column):
    return sum(row[column] for row in table) / len(table)

lost_activation = mean_of_column(underflows, 0) / 100
lost_gradient = mean_of_column(underflows, 2) / 100
compare(
    "of activations", lost_of_activations, part_in_words(lost_activation), options=PARTS
)
compare("of gradients", lost_of_gradients, part_in_words(lost_gradient), options=PARTS)
print(f"most overflows: {max(max(row) for row in overflows):g} %")
plot.heatmap(underflows, rows=lab.LAYERS, columns=lab.TENSORS, caption="19.underflows")

# %% [markdown]
# Activations and weights are lost in all layers, while most gradients survive. Nothing overflows anywhere: safety
# against overflow has cost nearly all numbers. The gradient of qkv is an exception: it holds those of queries, keys and
# values under one scale, and the smaller ones are lost. Section 5 shows that the run learns all the same, so such a
# table says where to look, not what the cause is.
#
# The numbers come from the ranks' files. A line has the name of the layer, of the tensor and of the statistic, and the
# step:

# %%
folder = Path("runs/look/debug/nvdlfw_inspect_statistics_logs")
lines = (folder / "nvdlfw_inspect_globalrank-0.log").read_text().splitlines()
for line in lines[-4:]:
    print(*line.split())

# %% [markdown]
# **Takeaway: a loss curve says that something is wrong, and statistics of tensors say where. Look at underflows first,
# with delayed scaling at overflows too, and skip its first step.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* People expect overflow to be the danger. Ask: why does the run learn at all? (Embeddings, norms,
# biases and the head are not in FP8; with the residual path they form a model of single characters.) Ask: what would
# margin 4 do? (Nothing that can be seen: 14 powers of two are left.)

# %% [markdown]
# ## 3. Statistics of shards are not averages (core, 50 min)
#
# The counts of section 2 were easy to reduce, because they add up. Is that so for all statistics? Take six values on
# two ranks: 1, 2, 3 on rank 0, and 11, 12, 13 on rank 1. The mean of the whole is the mean of the two means, as both
# parts have the same size. What about the **standard deviation** (std)? It is the root of M / (n - 1), where M is the
# sum of the squared distances from the mean.
#
# **Predict.** Each part has the std 1. What is the std of all six: about 1, 5.5, or 11?

# %% tags=["predict"]
std_of_all = 5.5  # the values are about 5 from their mean 7

# %% tags=["figure"]
import torch
import torch.distributed as dist

from labcode.debug import moments

parts = {"rank 0": [1.0, 2.0, 3.0], "rank 1": [11.0, 12.0, 13.0]}
whole = torch.tensor(parts["rank 0"] + parts["rank 1"])
compare("std of all six", std_of_all, whole.std().item(), within=1.05, found="computed")
plot.spread_of_parts(parts, caption="19.spread")

# %% [markdown]
# The mean of the two stds is 1, which is wrong. What has to be sent instead of the std? Let a part have n values,
# their mean, and M2, the sum of their squared distances from **that** mean. (The std is the root of M2 / (n - 1).) Now
# merge parts a and b, with d = mean_b - mean_a and n = n_a + n_b. The mean of both lies on the way from mean_a to
# mean_b, the nearer to b the more values b has:
#
# $$\text{mean} = \text{mean}_a + d \cdot \frac{n_b}{n}$$
#
# For M2, every value of a is now measured from a mean that lies d · n_b/n away. This adds n_a (d n_b/n)² to M2_a.
# (The mixed terms add up to zero, as the values of a lie around mean_a.) For b it is n_b (d n_a/n)². Together:
#
# $$M_2 = M_{2,a} + M_{2,b} + d^2 \cdot \frac{n_a n_b^2 + n_b n_a^2}{n^2} = M_{2,a} + M_{2,b} + d^2 \cdot \frac{n_a n_b}{n}$$
#
# In the example M2 = 2 + 2 + 100 · 9/6 = 154, and the std is the root of 154/5, which is 5.55. This is the formula of
# Chan, Golub and LeVeque (1979).

# %% [markdown] tags=["exercise"]
# ### Exercise 19.1 · Merge two parts
#
# `a` and `b` are tuples (n, mean, M2). Return the tuple of the two merged. A part may be empty: (0, 0.0, 0.0). About 7
# lines.

# %% tags=["exercise"]
def combine(a, b):
    """(n, mean, M2) of two parts together."""
    ### BEGIN SOLUTION
    n_a, mean_a, m2_a = a
    n_b, mean_b, m2_b = b
    n = n_a + n_b
    if n == 0:
        return a
    d = mean_b - mean_a
    return n, mean_a + d * n_b / n, m2_a + m2_b + d * d * n_a * n_b / n
    ### END SOLUTION

# %% tags=["check"]
check("19.1", combine)

# %% [markdown]
# Why not send the sum of all x and the sum of all x², which simply add up? The variance would be the mean of x² minus
# the square of the mean, which is the difference of two large numbers when values lie far from zero. Take values around
# 1000 that spread by 0.01, so that their variance is 0.0001. Their squares are about 1,000,000, and float32 with its 24
# bits represents a number of that size to about 0.06:

# %%
torch.manual_seed(0)
x = 1000 + 0.01 * torch.randn(10_000)
squares = moments.measure(x).squares
print(f"M2 / n: {squares / len(x):.5f}")
by_squares = x.square().mean() - x.mean().square()
print(f"mean of the squares minus square of the mean: {by_squares.item():.4f}")

# %% [markdown] tags=["exercise"]
# ### Exercise 19.2 · Statistics over a group
#
# Each rank of `group` has a part of a tensor, `x` (of any shape), and `kept`, what is left of each of its values after
# the cast to 8 bits. Return the same dict on all ranks, with Python numbers, of the whole tensor: `mean`, `std` (which
# divides by n - 1, as `torch.std` does), `min`, `max`, `amax` (the largest |x|), and `underflows%`, the values that were
# not zero and are zero after the cast, in percent of **all** values. Parts may have different sizes, and one of them may
# be empty; the whole tensor has at least two values. Compute in float64. Put a few numbers into a tensor, and send it
# with **one** collective. `min()` and `max()` of an empty tensor raise an error; `math.inf` is larger than every number.
# You may use `combine`. About 20 lines.

# %% tags=["exercise"]
def statistics(x, kept, group):
    """{"mean": ..., "std": ..., ...} of all parts together, the same on all ranks."""
    ### BEGIN SOLUTION
    wide = x.double()
    own = torch.tensor([0.0, 0.0, 0.0, math.inf, -math.inf, 0.0], dtype=torch.float64)
    if x.numel() > 0:
        lost = (kept == 0) & (x != 0)
        own[0] = x.numel()
        own[1] = wide.mean()
        own[2] = (wide - wide.mean()).square().sum()
        own[3] = wide.min()
        own[4] = wide.max()
        own[5] = lost.sum()
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, own, group=group)
    count, mean, squares = 0, 0.0, 0.0
    for row in rows:
        n, part_mean, part_squares = row[:3].tolist()
        total = count + n
        if n > 0:
            distance = part_mean - mean
            mean += distance * n / total
            squares += part_squares + distance**2 * count * n / total
        count = total
    least = min(row[3].item() for row in rows)
    most = max(row[4].item() for row in rows)
    return {
        "mean": mean,
        "std": math.sqrt(squares / (count - 1)),
        "min": least,
        "max": most,
        "amax": max(-least, most),
        "underflows%": 100 * sum(row[5].item() for row in rows) / count,
    }
    ### END SOLUTION

# %% tags=["check"]
check("19.2", statistics, ranks)

# %% [markdown]
# labcode does the same with nine numbers for each tensor (`labcode/debug/moments.py`), and sends those of all
# tensors that a step logs in one message for each group.
#
# **Takeaway: counts, sums, smallest and largest values, and (n, mean, M2) can be reduced. Send these, and compute std
# and percentages at the end. A mean of stds is not the std of anything.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* In 19.2 the common mistakes are: the world instead of the group, a collective inside
# `if x.numel()` (the others wait for ever), five all-reduces with five operations, and percentages averaged over parts
# of different sizes. Ask: which statistic cannot be reduced from a few numbers of each rank? (The median.)

# %% [markdown]
# ## 4. Over which ranks statistics are reduced (core, 32 min)
#
# On a grid there is a choice. Ranks of tp hold different parts of one tensor (or copies of it), ranks of dp see other
# samples, and ranks of pp have other layers. `--debug.reduce_over` names the axes over which statistics are reduced;
# without it each rank writes what it sees itself. Ranks whose statistics are reduced to one form a **reduction group**.
# Each of them has its own file, with the same lines in it. In this run rank 0 is (dp 0, tp 0), rank 1 is (dp 0, tp 1),
# and ranks 2 and 3 are those of dp 1.
#
# Weights have their own rule. Ranks of dp have the same weights, so their statistics need no reduction over dp. Over tp
# they are **always** reduced, whatever `reduce_over` says, unless this is switched off by `--debug.reduce_weights
# false`. Transformer Engine does the same: its linear layers are given their tp group and no other, which is why the
# group for all other tensors has to be named.
#
# We log activations, weights and gradients of one step. Each rank of dp has samples of its own.
#
# **Predict.** How many different files do the four ranks write, if statistics are reduced over none, over tp, over dp,
# and over both? Now only the lines on weights, with `reduce_over` empty: how many different files are there, with the
# rule and without it?

# %% tags=["predict"]
over_none = 4
over_tp = 2  # ranks 0 and 1; ranks 2 and 3
over_dp = 2  # ranks 0 and 2; ranks 1 and 3
over_both = 1
weights_with_the_rule = 1
weights_without = 2  # ranks of tp have different shards, ranks of dp copies

# %%
Path("stats.yaml").write_text("""
stats:
  enabled: True
  layers:
    layer_name_regex_pattern: blocks
  transformer_engine:
    LogTensorStats:
      enabled: True
      tensors: [activation, weight, gradient]
      stats: [min, max, mean, std]
""")

def different_files(folder, word=""):
    """How many different files four ranks have written, by the lines with this word."""
    contents = set()
    for rank in range(4):
        rows = on_layers.read_statistics(Path(folder) / "debug", rank)
        lines = [(name, value) for (name, _), value in rows.items() if word in name]
        contents.add(tuple(lines))
    return len(contents)

ONE = "--debug.config stats.yaml --train.steps 1"
_ = train(ONE, "runs/none")
_ = train(f"{ONE} --debug.reduce_over tp", "runs/tp")
_ = train(f"{ONE} --debug.reduce_over dp", "runs/dp")
_ = train(f"{ONE} --debug.reduce_over dp tp --debug.tensorboard", "runs/both")
_ = train(f"{ONE} --debug.reduce_weights false", "runs/shards")

# %% tags=["nbval-check-output"]
compare("over none", over_none, different_files("runs/none"), within=1, found="counted")
compare("over tp", over_tp, different_files("runs/tp"), within=1, found="counted")
compare("over dp", over_dp, different_files("runs/dp"), within=1, found="counted")
compare("over both", over_both, different_files("runs/both"), within=1, found="counted")
with_rule = different_files("runs/none", "_weight_")
without_rule = different_files("runs/shards", "_weight_")
compare("weights", weights_with_the_rule, with_rule, within=1, found="counted")
compare("weights, no rule", weights_without, without_rule, within=1, found="counted")

# %% tags=["figure"]
from labcode.topology import GridShape

plot.reduction_groups(
    GridShape(tp=2, dp=2),
    [(), ("tp",), ("dp",), ("tp", "dp")],
    caption="19.four_ranks",
)

# %% [markdown]
# tp lies to the right, dp downwards, and ranks with the same letter write files with the same content.
#
# If nothing was reduced during the run, the files of the ranks can still be reduced **afterwards**. They have the mean
# and the std of each part. What they do not have is n. It follows from the shapes: a rank has 4 of the 8 samples, of 64
# tokens each, and the MLP has 256 units, of which 128 are on each rank; outside of it a token has 64 numbers. Then
# M2 = std² (n - 1), and the parts are merged by the formula of section 3. Which ranks hold parts depends on the tensor.
# We take `mlp.down`, the second layer of the first MLP. Each of the four ranks holds a part of its input. The gradient of
# its output is the same on both ranks of tp, so one file of each tp group is enough. And its weight is cut over tp only.
# The parts of the weight are in the files only if the rule has not reduced them, so we take the run with
# `--debug.reduce_weights false`.

# %%
from labcode.debug import moments


def std_afterwards(run, ranks_with_parts, n, tensor):
    """The std of a tensor of `mlp.down`, from files of ranks with n values each."""
    total = moments.Moments()
    for rank in ranks_with_parts:
        found = on_layers.read_statistics(Path(run, "debug"), rank)
        mean = found[f"blocks.0.mlp.down_{tensor}_mean", 0]
        std = found[f"blocks.0.mlp.down_{tensor}_std", 0]
        total = total + moments.Moments(n, mean, std**2 * (n - 1))
    return total.statistic("std")

# %% tags=["nbval-check-output"]
afterwards = {
    "activation": std_afterwards("runs/none", [0, 1, 2, 3], 4 * 64 * 128, "activation"),
    "gradient": std_afterwards("runs/none", [0, 2], 4 * 64 * 64, "gradient"),
    "weight": std_afterwards("runs/shards", [0, 1], 64 * 128, "weight"),
}
in_the_run = on_layers.read_statistics(Path("runs/both/debug"), 0)
for tensor, std in afterwards.items():
    reduced = in_the_run[f"blocks.0.mlp.down_{tensor}_std", 0]
    print(f"{tensor}: as in the run {math.isclose(std, reduced, rel_tol=1e-6)}")

# %% [markdown]
# The two other gradients of a layer, *dgrad* and *wgrad*, can be logged like all other tensors, and the guide of
# Transformer Engine names them for this use: without a reduction group each rank writes those of its own part, for you
# to process later. (Section 11 looks at whether it does.)

# %%
Path("gradients.yaml").write_text("""
gradients:
  enabled: True
  layers:
    layer_name_regex_pattern: blocks
  transformer_engine:
    LogTensorStats:
      enabled: True
      tensors: [weight, activation, dgrad, wgrad]
      stats: [mean, std]
""")
GRADIENTS = "--debug.config gradients.yaml --train.steps 1"
_ = train(f"{GRADIENTS} --debug.reduce_weights false", "runs/parts")
_ = train(f"{GRADIENTS} --debug.reduce_over dp tp", "runs/reduced")

# %% tags=["nbval-check-output"]
for kind in ("weight", "activation", "dgrad", "wgrad"):
    print(f"{kind}: {different_files('runs/parts', f'_{kind}_')} different files")

by_rank = {
    "dgrad": std_afterwards("runs/parts", [0, 1, 2, 3], 4 * 64 * 128, "dgrad"),
    "wgrad": std_afterwards("runs/parts", [0, 1, 2, 3], 64 * 128, "wgrad"),
}
reduced = on_layers.read_statistics(Path("runs/reduced/debug"), 0)
for tensor, std in by_rank.items():
    std_of_run = reduced[f"blocks.0.mlp.down_{tensor}_std", 0]
    print(f"{tensor}: as in the run {math.isclose(std, std_of_run, rel_tol=1e-6)}")

# %% [markdown]
# Only weights are the same on ranks of dp. A wgrad has the shape of the weight, but it comes from the samples of its own
# rank: it is seen before dp averages the gradients. So its statistics over dp are those of the values of all ranks, not
# of their average.
#
# And with **fully sharded data parallelism** (FSDP, or ZeRO-3)? Then each rank of dp keeps a part of every weight, and
# the rule of tp does nothing about it. What counts is when the statistic is taken. The features look at a layer while
# it runs, when its weight has been gathered, and they see wgrad before the reduce-scatter. So both are those of the
# whole tensor, as with DDP. (A loop of your own over `model.parameters()` between two steps would see parts.) The cell
# below trains the same step with ZeRO-3:

# %%
_ = train(f"{ONE} --parallel.zero_stage 3", "runs/fsdp")
dense = on_layers.read_statistics(Path("runs/none/debug"), 0)
sharded = on_layers.read_statistics(Path("runs/fsdp/debug"), 0)
kind = "_weight_"
same = [sharded[key] == dense[key] for key in dense if kind in key[0]]
print(f"lines on weights: {len(same)}, equal to those without ZeRO: {sum(same)}")

# %% [markdown]
# **TensorBoard** draws the same statistics, with `--debug.tensorboard`. Four ranks that write the same curve would draw
# it four times, so only as many ranks write as are needed to have every curve once. Each of them has its own folder.
# Here is how many folders there are for tp 2 x dp 2, reduced over both, and for tp 2 x pp 2, reduced over tp:

# %%
STAGES = "--parallel.dp 1 --parallel.pp 2 --parallel.pipeline_schedule gpipe"
_ = train(f"{ONE} {STAGES} --debug.reduce_over tp --debug.tensorboard", "runs/stages")

# %% tags=["nbval-check-output"]
def folders(run):
    return sorted(path.name for path in Path(run, "debug/tensorboard").iterdir())

print(f"tp 2 x dp 2: {folders('runs/both')}")
print(f"tp 2 x pp 2: {folders('runs/stages')}")
print(f"different files of tp 2 x pp 2: {different_files('runs/stages')}")
name = "blocks.0.mlp.down_activation_std"
in_file = on_layers.read_statistics(Path("runs/both/debug"), 0)[name, 0]
shown = lab.tensorboard("runs/both/debug/tensorboard/stage-0")[name, 0]
print(f"TensorBoard and the file agree: {math.isclose(shown, in_file, rel_tol=1e-6)}")

# %% [markdown]
# One rank of each stage of the pipeline writes, the one with coordinate 0 on every other axis. (Where the documentation
# says "in each pipeline parallel group", it means this.) The ranks of a stage have the same layers, and those of another
# stage have none of them. So the files of two stages are never equal, whatever the axes over which they are reduced.
# With eight ranks, tp 2 x dp 2 x pp 2:

# %% tags=["figure"]
plot.reduction_groups(
    GridShape(tp=2, dp=2, pp=2), [("tp",), ("tp", "dp")], caption="19.eight_ranks",
)

# %% [markdown] tags=["exercise"]
# ### Exercise 19.3 · Who writes the same file
#
# Return the groups of ranks whose files have the same content, as a list of lists of ranks. `over` is a tuple that
# holds "tp", "dp", both or nothing. The ranks are counted as in the picture: tp varies fastest, then dp, then pp. About
# 8 lines.

# %% tags=["exercise"]
def same_file(tp, dp, pp, over):
    """Ranks with the same file, [[0, 1], [2, 3]] for example."""
    ### BEGIN SOLUTION
    groups = {}
    for rank in range(tp * dp * pp):
        place = {"tp": rank % tp, "dp": rank // tp % dp, "pp": rank // (tp * dp)}
        key = tuple(place[axis] for axis in place if axis not in over)
        groups.setdefault(key, []).append(rank)
    return list(groups.values())
    ### END SOLUTION

# %% tags=["check"]
check("19.3", same_file)

# %% [markdown]
# Which choice is the right one? Reduce over all axes if you want to compare with one process or with another grid, and
# over none if you suspect a single rank: one faulty GPU of 64 is hidden in their mean. (The largest and the smallest
# value of the group may show it, but not whose they are.) Reduce over tp if you suspect the data, because samples
# differ between ranks of dp.
#
# Features that **change** a tensor, such as a scale of its own (section 5), do so on each rank for its own part, and no
# option changes that.
#
# **Takeaway: statistics are equal within a reduction group. Those of weights are reduced over tp by default, all others
# over the axes that you name, and none over pp.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Ask: which lines are equal on ranks 0 and 1 even over none? (Weights by the rule, and tensors
# that tp copies: the input of qkv and of the MLP's first layer, the output and its gradient of proj and of the second
# layer.) Such a copy is counted once in a group, or it would count twice.

# %% [markdown]
# ## 5. Repair it in the YAML (core, 30 min)
#
# Back to the run of section 1. Of course one could set the margin to 0. But in a run of weeks one often wants to
# change only some layers, and to find out which of them suffer. These features change what a layer does in FP8:
#
# | feature | what it does | settings |
# |---|---|---|
# | DisableQuantizationLayer | all three matmuls of the layer run without FP8 | none |
# | DisableQuantizationGEMM | the named matmuls run without FP8 | gemms |
# | PerTensorScaling | the named operands of the named matmuls get a scale from their own amax, as in current scaling | gemms, tensors, margin (default 0; labcode's own) |
# | FakeQuant | the named matmuls run without FP8, and the named tensors are rounded as FP8 would round them | gemms, tensors, quant_format |
#
# The first two got these names in February 2026, as they are not for FP8 alone. Their old names, `DisableFP8Layer` and
# `DisableFP8GEMM`, are deprecated, but still accepted. FakeQuant shows what a cast does to a run, one tensor at a time,
# both in a layer that is in FP8 and in one that is not.
#
# `gemms` is a list of matmuls: `fprop` for y = x Wᵀ, `dgrad` for dx = dy W, `wgrad` for dW = dyᵀ x. Each operand goes
# into two of them. Where matmuls differ in their tensors or settings, `gemms_struct` names each by itself:
#
# ```yaml
# FakeQuant:
#   enabled: True
#   gemms_struct:
#     - gemm: fprop
#       tensors: [weight]
#       quant_format: FP8E4M3
#     - gemm: dgrad
#       tensors: [gradient]
#       quant_format: FP8E5M2
# ```
#
# A file with a mistake is refused before the first step, with the number of the line. (nvdlfw_inspect alone ignores a
# wrong key silently.) The next cell has such a file, and ends in that error.

# %% tags=["raises-exception"] raises="RankError: rank 0: ValueError: wrong.yaml, line 7: unknown feature"
wrong = """
wrong:
  enabled: True
  layers:
    layer_name_regex_pattern: blocks
  transformer_engine:
    LogFp8Stats:
      enabled: True
"""
Path("wrong.yaml").write_text(wrong)
train(f"{FP8} --debug.config wrong.yaml --train.steps 1", "runs/wrong")

# %% [markdown]
# Which layers hold the run back, and which of their matmuls? **Bisection** tells. With everything out of FP8 the run
# learns. Put one half back, then the other, and see which of them harms it; then go on inside that half. First the
# layers: only attention in FP8, and only the MLP.

# %%
ALL = ["fprop", "dgrad", "wgrad"]

def loss_without(layers, gemms):
    """The validation loss after 30 steps, with matmuls of some layers out of FP8."""
    Path("bisect.yaml").write_text(f"""
bisect:
  enabled: True
  layers:
    layer_name_regex_pattern: {layers}
  transformer_engine:
    DisableQuantizationGEMM:
      enabled: True
      gemms: {gemms}
""")
    options = f"{FP8} --debug.config bisect.yaml --train.steps 30"
    return train(options, "runs/bisect")[0].val_loss

halves = {
    "nothing in FP8": loss_without("blocks", ALL),
    "attention": loss_without("mlp", ALL),
    "MLP": loss_without("attention", ALL),
}
for name, loss in halves.items():
    print(f"{name}: {loss:.2f}")

# %% [markdown]
# Attention may stay in FP8: alone, it raises the loss by only 0.03 here. So we leave it there, and put the matmuls of
# the MLP back one by one. Look at the table of section 2 once more: which tensors survive nearly whole, and which
# operands does each matmul have?
#
# **Predict.** Which single GEMM of the MLP does most harm in FP8: "fprop", "dgrad", or "wgrad"?

# %% tags=["predict"]
product_at_fault = "fprop"  # both of its operands have lost nearly everything

# %%
products = {
    "fprop": loss_without("mlp", ["dgrad", "wgrad"]),
    "dgrad": loss_without("mlp", ["fprop", "wgrad"]),
    "wgrad": loss_without("mlp", ["fprop", "dgrad"]),
}

# %% tags=["figure"]
compare("most harm", product_at_fault, max(products, key=products.get), options=ALL)
bars = dict(halves)
for name, loss in products.items():
    bars[f"attention, {name} of MLP"] = loss
plot.bars(
    bars,
    reference={"frequencies of characters alone": lab.frequencies_loss()},
    caption="19.six_runs",
)

# %% [markdown]
# In the MLP's fprop, an activation that has lost nearly everything is multiplied by a weight that has too. In dgrad and
# wgrad one operand is the gradient, most of which survives. Attention suffers the same losses, and the run tolerates
# them: only a run can say what a lost value is worth.
#
# Begin such a search from the run that learns. From the other end it may find nothing: with only fprop out of FP8 in
# all layers, the other two GEMMs together still hold this run back.
#
# The fault of this run, a wrong setting, was made for the lesson. In the long runs that have been published the cause
# grew by itself. Fishman et al. (2024) trained a model of 7 billion parameters in FP8, which diverged after 200 billion
# tokens, and traced the cause to the MLP: outliers in the product of the two branches of SwiGLU came and went from one
# step to the next, so that a delayed scale did not fit them. A model of our size shows nothing of this in a minute, but
# the search is the same.

# %% [markdown] tags=["exercise"]
# ### Exercise 19.4 · Four lines that repair the run
#
# Write the YAML as text. With it, the run must learn as in bfloat16, **every matmul of every layer must still run in
# FP8**, and each tensor that is nearly all lost in the table of section 2 must be repaired in all of its matmuls. The
# frame is that of `wrong` above: a block with a name, `enabled`, `layers` and `transformer_engine`, and below it the four
# lines that repair the run. The check trains 50 steps on the four ranks.

# %% tags=["exercise"]
### BEGIN SOLUTION
mend_yaml = """
mend:
  enabled: True
  layers:
    layer_name_regex_pattern: blocks
  transformer_engine:
    PerTensorScaling:
      enabled: True
      tensors: [activation, weight]
      gemms: [fprop, dgrad, wgrad]
"""
### END SOLUTION

# %% tags=["check"]
check("19.4", mend_yaml, ranks)

# %% [markdown]
# Here is the curve of a run that labcode's own four lines have repaired, beside that of bfloat16.

# %% tags=["figure"]
options = f"{FP8} --debug.config {lab.mend_file()} --train.steps 50"
mended = train(options, "runs/mended")[0]
bf16 = train("--train.dtype bfloat16 --train.steps 50", "runs/bf16")[0]
print(f"validation loss: bfloat16 {bf16.val_loss:.2f}, FP8 {mended.val_loss:.2f}")
plot.lines(
    {"bfloat16": bf16.losses, "FP8, scales of their own": mended.losses},
    x=range(1, 51),
    reference={"frequencies of characters alone": lab.frequencies_loss()},
    caption="19.own_scales",
)

# %% [markdown]
# The gradients kept their delayed scale with margin 18, and the run learns all the same, although those of qkv lose many
# of their values, the small ones beside much larger ones. A scale from the tensor itself costs a second pass over it
# (lesson 18), so use one only where it is needed.
#
# **Takeaway: features change single operands of single matmuls. Use them to find out what repairs a run, and then put
# that change into the recipe.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* The bisection finds the same matmul with three seeds. With only fprop out of FP8 in all layers
# the loss after 50 steps is 3.09, with only dgrad 3.29, with only wgrad 3.57: from that end one would blame none of
# them. Measured on one machine after 50 steps: bfloat16 2.63, FP8 3.16, repaired 2.66; activation alone 2.71, weight
# alone 3.27, both but only in fprop 3.08. Ask why the weight alone does not help. (The matmul has two operands; if the
# other is zeros, the result is zero.)

# %% [markdown]
# ## 6. What the number of ranks changes (optional, 20 min)
#
# Up to rounding, a run on many ranks gives the same result as on one, and so do the statistics of section 4. With
# features that change a tensor this need not hold.
#
# **Scales of shards.** With delayed scaling the ranks that have parts or copies of one tensor share its amax (lesson
# 18, section 9), and cast with one scale. PerTensorScaling and FakeQuant take the amax of what is on this rank, and send
# nothing. `LogFp8TensorStats` shows both scales, as 1 / scale: `scale_inv_max` is that of the run's own cast. Prefixed
# with the name of a recipe, it says what that recipe would do: `fp8_current_scaling_scale_inv_max` is the scale from the
# rank's own tensor, which PerTensorScaling would use.
#
# We train two steps on tp 4. tp cuts the weight of `mlp.up` into four parts, and its input is copied to all four ranks
# (lesson 09). `--debug.reduce_weights false` lets each rank write what it has.
#
# **Predict.** How many different scales do the four ranks have for this weight: with delayed scaling, and from each
# rank's own tensor? And how many for its input, from each rank's own tensor?

# %% tags=["predict"]
scales_delayed = 1
scales_of_parts = 4
scales_of_copies = 1  # the same numbers have the same amax

# %%
Path("scales.yaml").write_text("""
scales:
  enabled: True
  layers:
    layer_types: [mlp.up]
  transformer_engine:
    LogFp8TensorStats:
      enabled: True
      tensors: [activation, weight]
      stats: [scale_inv_max, fp8_current_scaling_scale_inv_max]
""")
TP_4 = "--parallel.dp 1 --parallel.tp 4"
SCALES = "--debug.config scales.yaml --debug.reduce_weights false"
_ = train(f"{TP_4} --train.dtype fp8 {SCALES} --train.steps 2", "runs/scales")

def on_each_rank(name):
    """A statistic of the second step in the files of the four ranks."""
    folder = Path("runs/scales/debug")
    return [on_layers.read_statistics(folder, rank)[name, 1] for rank in range(4)]

OWN = "fp8_current_scaling_scale_inv_max"
delayed = on_each_rank("blocks.0.mlp.up_weight_scale_inv_max")
own = on_each_rank(f"blocks.0.mlp.up_weight_{OWN}")
copies = on_each_rank(f"blocks.0.mlp.up_activation_{OWN}")

# %% tags=["nbval-check-output"]
compare("delayed", scales_delayed, len(set(delayed)), within=1, found="counted")
compare("own, parts", scales_of_parts, len(set(own)), within=1, found="counted")
compare("own, copies", scales_of_copies, len(set(copies)), within=1, found="counted")

# %% tags=["figure"]
plot.bars(
    {f"rank {rank}": 1e6 * value for rank, value in enumerate(own)},
    reference={"delayed scaling, all ranks": 1e6 * delayed[0]},
    caption="19.four_parts",
)

# %% [markdown]
# (The delayed scale comes from the step before, when the largest value was a little smaller.)
#
# Different scales round to different numbers. How much does that matter? FakeQuant in float32 isolates the effect: all
# weights are rounded to e4m3, and everything else is exact to 24 bits. The four ranks are laid out with tp 1, 2 and 4,
# and the rest of them is dp. The weights and the 8 samples of the first step are the same.
#
# **Predict.** The loss of the first step is 4.44. How far apart are the losses of the three layouts, about: "1e-7",
# "1e-4", or "0.1"? First without FakeQuant, and then with it.

# %% tags=["predict"]
apart_without = "1e-7"  # sums in another order, in float32
apart_with_fake_quant = "1e-4"  # the weights are rounded to other numbers

# %%
Path("rounded.yaml").write_text("""
rounded:
  enabled: True
  layers:
    layer_name_regex_pattern: blocks
  transformer_engine:
    FakeQuant:
      enabled: True
      gemms: [fprop, dgrad]
      tensors: [weight]
      quant_format: FP8E4M3
""")

def first_losses(options):
    """{tp: the loss of the first step} on four ranks."""
    losses = {}
    for tp in (1, 2, 4):
        layout = f"--parallel.dp {4 // tp} --parallel.tp {tp}"
        one_step = f"{layout} --train.steps 1 {options}"
        losses[tp] = train(one_step, "runs/layouts")[0].losses[0]
    return losses

IN_FLOAT32 = "--train.dtype float32"
exact = first_losses(IN_FLOAT32)
rounded = first_losses(f"{IN_FLOAT32} --debug.config rounded.yaml")

# %%
SIZES = ("1e-7", "1e-4", "0.1")

def apart(losses):
    """How far apart they are, as the nearest of the three answers."""
    distance = max(losses.values()) - min(losses.values())

    def factor(size):
        return abs(math.log(distance / float(size)))

    return min(SIZES, key=factor)

compare("without", apart_without, apart(exact), options=SIZES)
compare("with FakeQuant", apart_with_fake_quant, apart(rounded), options=SIZES)
for tp in (1, 2, 4):
    print(f"tp {tp}: float32 {exact[tp]:.6f}, weights as in e4m3 {rounded[tp]:.6f}")

# %% [markdown]
# The rounding itself moves the loss by 0.0006 or 0.0007, and the layout by about a fifth of that. Both are small, but
# not as small as the rounding of float32: two runs with PerTensorScaling or FakeQuant on different numbers of GPUs are
# two different runs. For the same reason lesson 18 trains with one scale for all parts.
#
# DisableQuantizationGEMM and DisableQuantizationLayer have no scale, so they do the same on many GPUs as on one. Here
# are both kinds of feature in FP8 runs, in which everything else is computed in bfloat16. (These runs have current
# scaling, where Transformer Engine would refuse PerTensorScaling: it has this feature for delayed scaling only.)

# %%
Path("disabled.yaml").write_text("""
disabled:
  enabled: True
  layers:
    layer_name_regex_pattern: blocks
  transformer_engine:
    DisableFP8Layer:  # its old name
      enabled: True
""")
Path("own_scales.yaml").write_text("""
own_scales:
  enabled: True
  layers:
    layer_name_regex_pattern: blocks
  transformer_engine:
    PerTensorScaling:
      enabled: True
      gemms: [fprop]
      tensors: [activation, weight]
""")
IN_FP8 = "--train.dtype fp8 --fp8.recipe current"
in_8_bits = {
    "bfloat16": first_losses("--train.dtype bfloat16"),
    "DisableQuantizationLayer": first_losses(f"{IN_FP8} --debug.config disabled.yaml"),
    "scales that all ranks share": first_losses(IN_FP8),
    "PerTensorScaling": first_losses(f"{IN_FP8} --debug.config own_scales.yaml"),
}
for name, losses in in_8_bits.items():
    shown = ", ".join(f"{loss:.6f}" for loss in losses.values())
    spread = max(losses.values()) - min(losses.values())
    print(f"{name:27} {shown}, apart by {spread:.1e}")

# %% [markdown]
# With DisableQuantizationLayer the loss is that of bfloat16 on each layout, which differs a little from one layout to
# the next, as sums are made in another order. With a scale for each shard the three runs are farther apart than with
# scales that all ranks share.
#
# **Micro-batches.** A step with four micro-batches calls each layer four times. Its statistics cover the whole step: a
# weight, which stays the same during the step, counts once, and everything else is accumulated over the micro-batches.
#
# Let each rank of dp have micro-batches of one sample. One run has one of them in a step, and the other has four, so
# four times as many samples. `l1_norm` is the sum of |x|. Remember that a step's loss is the mean over its samples, so
# with four micro-batches the loss of each is divided by four before backward.
#
# **Predict.** By which factor does `l1_norm` grow from one micro-batch to four: of an activation, of a weight, and of
# the gradient of an output?

# %% tags=["predict"]
growth_activation = 4
growth_weight = 1
growth_gradient = 1  # four times as many values, each a quarter as large

# %%
Path("sizes.yaml").write_text("""
sizes:
  enabled: True
  layers:
    layer_types: [mlp.down]
  transformer_engine:
    LogTensorStats:
      enabled: True
      tensors: [activation, weight, gradient]
      stats: [l1_norm]
""")
SIZES_OF = "--debug.config sizes.yaml --train.micro_batch 1 --train.steps 1"
_ = train(f"{SIZES_OF} --train.global_batch 2", "runs/one")
_ = train(f"{SIZES_OF} --train.global_batch 8", "runs/four")
one = on_layers.read_statistics(Path("runs/one/debug"), 0)
four = on_layers.read_statistics(Path("runs/four/debug"), 0)

# %%
expected = {
    "activation": growth_activation,
    "weight": growth_weight,
    "gradient": growth_gradient,
}
for tensor, factor in expected.items():
    key = (f"blocks.1.mlp.down_{tensor}_l1_norm", 0)
    compare(tensor, factor, four[key] / one[key], within=1.2)

# %% [markdown]
# (A factor of 1.2 is allowed, as the samples are not the same.)
#
# **Takeaway: a scale from each rank's own tensor is a scale for each shard, so it makes a run depend on the number of
# GPUs. In a step with micro-batches weights count once, and everything else is accumulated.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Measured on one machine: losses 4.440263, 4.440264, 4.440264 without FakeQuant, and 4.439634,
# 4.439702, 4.439559 with it. In FP8, over four seeds, PerTensorScaling is two to four times as far apart as scales that
# are shared. After 20 steps the three are 0.1 apart, since small differences grow in training. Ask: would
# `mean` of the activation grow too? (No: it is divided by the number of values, which grows as well.)

# %% [markdown]
# ## 7. A feature of your own (optional, 21 min)
#
# The existing features answer common questions. For your own question you write a class. The library calls its method
# `inspect_tensor` for each tensor that the YAML names:
#
# - `config`: the settings below the feature's name in the YAML, with whatever keys you choose;
# - `layer_name`, `tensor_name`, `iteration` (the number of the step);
# - `tensor`: this rank's part, [B, S, H] for an activation, with H numbers for each token on this rank.
#
# `MetricLogger.log_scalar(name, value, iteration)` writes a line into this rank's file, and to TensorBoard.
#
# The base class `Feature` reads from the YAML for which tensors the method is called, and `@api_method` marks it as one
# that the library calls. Here is an example that counts zeros:

# %%
from nvdlfw_inspect.logging import MetricLogger
from nvdlfw_inspect.registry import api_method

from labcode.debug.feature import Feature


class CountZeros(Feature):
    """How many values of a tensor are exactly 0, in every step."""

    @api_method
    def inspect_tensor(
        self, config, layer_name, *, tensor_name, tensor, iteration, **others
    ):
        zeros = (tensor == 0).sum().item()
        MetricLogger.log_scalar(f"{layer_name}_{tensor_name}_zeros", zeros, iteration)

# %% [markdown]
# To be used, it must be registered under its name in a file of the folder that `--debug.feature_dir` names. The next
# cell writes such a file; look at its head. The YAML then names the feature like any other.

# %% tags=["nbval-check-output"]
file = lab.write_feature(CountZeros, "features")
print(file.read_text())

# %% [markdown]
# The model's activation function is GELU, which is x · Φ(x), where Φ(x) is the fraction of the standard normal
# distribution that lies below x. ReLU, which older models have, is the larger of x and 0.
#
# **Predict.** What fraction of the values that go into `blocks.0.mlp.down` is exactly zero: none (0), or about a half
# (0.5)?

# %% tags=["predict"]
share_of_zeros = 0  # far below 0 Φ is tiny, and nowhere 0

# %%
Path("zeros.yaml").write_text("""
zeros:
  enabled: True
  layers:
    layer_name_regex_pattern: mlp.down
  transformer_engine:
    CountZeros:
      enabled: True
      tensors: [activation]
""")
ZEROS = "--debug.config zeros.yaml --debug.feature_dir features"
_ = train(f"{ZEROS} --train.steps 1 --train.dtype float32", "runs/zeros")

# %% tags=["nbval-check-output"]
counted = on_layers.read_statistics(Path("runs/zeros/debug"), 0)
zeros = counted["blocks.0.mlp.down_activation_zeros", 0]
compare("zeros", share_of_zeros, zeros, within=1, found="counted")
for (name, _), value in counted.items():
    print(f"{name}: {value:.0f}")

# %% [markdown] tags=["exercise"]
# ### Exercise 19.5 · Dead units
#
# A **unit** of an MLP is one entry of the last dim of the activation that goes into its second layer. A unit is called
# *dead* here if its size |x| is below `config["below"]` at every token of every sample, so that it does nothing. Log the
# percentage of the units of this rank that are dead, in the steps that are multiples of `config["freq"]`, under the name
# LAYER_TENSOR_dead%, such as `blocks.0.mlp.down_activation_dead%`. Your code becomes a file of its own: use nothing but
# torch, MetricLogger and the arguments. 5 to 8 lines.

# %% tags=["exercise"]
class DeadUnits(Feature):
    """How many units, in percent, are small at every token."""

    @api_method
    def inspect_tensor(
        self, config, layer_name, *, tensor_name, tensor, iteration, **others
    ):
        ### BEGIN SOLUTION
        if iteration % config["freq"] != 0:
            return
        largest = tensor.abs().flatten(0, -2).amax(0)
        dead = largest < config["below"]
        share = 100 * dead.float().mean().item()
        name = f"{layer_name}_{tensor_name}_dead%"
        MetricLogger.log_scalar(name, share, iteration)
        ### END SOLUTION

# %% tags=["check"]
check("19.5", DeadUnits, ranks)

# %% [markdown]
# Each rank of tp has its own units, so the number of this rank is right for them. Ranks of dp have the same units and
# other samples, so a unit that is dead here may live there. To be right over dp as well, a feature first takes the
# largest size of each unit over the group, with an all-reduce of the operation MAX. labcode gives the method the
# reduction group as `group`, which is among `others` above. (Transformer Engine gives it the group of tp only.)
#
# **Takeaway: a question about a tensor is a class with one method. The YAML says where it looks.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* The usual mistake is to count values, not units. Ask: what would a rank do if its feature called
# a collective in a step in which another rank does not? (Wait: `freq` must be the same on all ranks, which is why all
# read one YAML.)

# %% [markdown]
# ## 8. The first tensor that differs (core, 30 min)
#
# Statistics find what is wrong with a format. They do not find a bug that makes numbers a little wrong: a kernel with
# an error, a rank with an old library, a tensor that is added twice. Then the question is a different one. Given two
# runs with the same seed, one right and one wrong, **in which tensor do they first differ?** Nearly everything after it
# is wrong too, as a consequence, and tells you nothing new.
#
# With `--debug.record_steps 1` each rank writes the tensors of the first step, in the order in which they are computed,
# each with its place in the whole: which samples, which tokens, which numbers of a token. So runs on different grids
# can be compared, and the rank that was wrong first can be named. (Transformer Engine's `DumpTensors` writes tensors
# too, of the layers and steps that the YAML names, and does not compare them. labcode obeys it as well.)
#
# We plant a fault: on rank 1, the gradient of the input of `blocks.1.mlp.down` is too large by one part in a thousand.
# The matmul dx = dy W is wrong, and forward is right.
#
# **Predict.** Does the loss of the first step differ, `True` or `False`? On how many ranks is the gradient of that
# input different? It goes back through the MLP's activation function and its first layer, after which tp reduces the
# partial results of its two ranks, 0 and 1 (lesson 09). On how many ranks is the gradient different after that
# reduction?

# %% tags=["predict"]
loss_differs = False  # the fault is in backward
ranks_before_the_sum = 1
ranks_after_the_sum = 2  # the sum goes to both ranks of the tp group

# %%
from labcode.debug import bisect

RECORD = "--debug.record_steps 1 --train.steps 1 --train.dtype float32"
fault = lab.Fault(rank=1, layer="blocks.1.mlp.down", product="grad_input", factor=1.001)
right = train(RECORD, "runs/right")[0]
faulty = train(RECORD, "runs/faulty", fault)[0]
rows = bisect.compare(Path("runs/right"), Path("runs/faulty"))
departing = {f"{row.kind} of {row.name}": row.ranks for row in rows if row.departs}

compare("the loss differs", loss_differs, right.losses != faulty.losses)
before = departing["gradient of the input of blocks.1.mlp.down"]
compare("before the sum", ranks_before_the_sum, len(before), within=1, found="counted")
after = departing["gradient of the output of blocks.1.norm2"]
compare("after the sum", ranks_after_the_sum, len(after), within=1, found="counted")

# %% [markdown]
# By how much may a tensor differ without being wrong? Two runs on different grids add in another order, and round
# differently, so there is a **bound** for each tensor. The error of a part is measured relative to the norm of the
# **whole** tensor, scaled to the number of values in the part:
#
# $$\text{error} = \frac{\lVert b - a \rVert}{\lVert \text{whole} \rVert \cdot \sqrt{n_{\text{part}} / n_{\text{whole}}}}$$
#
# Here a and b are the part in the first and in the second run, ‖ ‖ is the root of the sum of squares, and n counts
# values. (Why not relative to the norm of the part? A small value may be the sum of large ones that nearly cancel, and
# then its rounding error is as large as theirs.)
#
# A number that is not finite is never within the bound. Mind that `<`, `<=`, `>`, `>=` and `==` with *nan* are always
# False.

# %% [markdown] tags=["exercise"]
# ### Exercise 19.6 · The first difference
#
# `rows` is a list of tensors in the order in which they are computed. Each row has a name, `whole` (the tensor of the
# first run), and `parts`: {rank: (where, part)}. `part` is what this rank holds in the second run, and `whole[where]` is
# what it should be (`where` is a tuple of slices). Return (name, list of ranks) of the first tensor with a part whose
# error is not within `bound`, or None if there is none. A part of a tensor of zeros is right if it is exactly zero. About
# 14 lines.

# %% tags=["exercise"]
def first_departure(rows, bound):
    """(name, ranks) of the first tensor that departs; None: none does."""
    ### BEGIN SOLUTION
    for name, whole, parts in rows:
        to_blame = []
        for rank, (where, part) in parts.items():
            difference = (part - whole[where]).norm().item()
            size = whole.norm().item() * math.sqrt(part.numel() / whole.numel())
            within = difference <= bound * size  # False if one of them is nan
            if not within:
                to_blame.append(rank)
        if to_blame:
            return name, to_blame
    return None
    ### END SOLUTION

# %% tags=["check"]
check("19.6", first_departure)

# %% [markdown]
# labcode's tool does this for recorded runs: `python -m labcode.debug.bisect runs/right runs/faulty`. Its bound
# comes from the precision of the two runs and grows with the root of the number of multiplications behind a tensor, as
# independent rounding errors do. The next cells call the same functions.

# %% tags=["nbval-check-output"]
print(bisect.report(rows).splitlines()[-1])

# %% tags=["figure"]
errors = [max(row.error, 1e-9) for row in rows]
names = [f"{row.kind} of {row.name}" for row in rows]
bounds = [row.bound for row in rows]
first = [row.departs for row in rows].index(True)
backward = [row.kind.startswith("gradient") for row in rows].index(True)
plot.lines(
    {"error": errors, "bound": bounds},
    points={"the first above its bound": ([first], [errors[first]])},
    upright={"backward begins": backward},
    tensor=names[first],
    caption="19.tensors",
)

# %% [markdown]
# (Errors of zero are drawn at 10^-9.) Nearly all tensors after the first one are wrong too. The exceptions are gradients
# of weights that backward had computed before it came to the fault; they are at the end of the list.
#
# **Predict.** Now compare the right run with one in bfloat16, which keeps 8 significant bits of every operand.
# Does `bisect` name a tensor, `True` or `False`?

# %% tags=["predict"]
names_a_tensor = False  # its bound is that of the coarser precision

# %%
train(RECORD.replace("float32", "bfloat16"), "runs/rounded")
rows = bisect.compare(Path("runs/right"), Path("runs/rounded"))
departs = bisect.first_departure(rows) is not None
compare("a tensor departs", names_a_tensor, departs)
worst = max(rows, key=lambda row: row.error / row.bound)
print(f"nearest to its bound: {worst.error:.1e} of {worst.bound:.1e}")

# %% [markdown]
# That no tensor is named does not mean that all is well. A bound as wide as this one would also hide the fault above,
# one part in a thousand. So record in float32 when you look for a fault.
#
# **Takeaway: record one step of a run that is right and of one that is not, and look at the first tensor above the
# bound of rounding. Everything after it is a consequence.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Mistakes in 19.6: the largest error instead of the first one, `error > bound` (False for nan), one
# rank named where two differ, the error of the part relative to its own norm. Ask: why only the first step? (After it
# Adam has turned the rounding of small gradients into updates of full size: lr times a sign.)

# %% [markdown]
# ## 9. Not a number (core, 8 min)
#
# In 16 and in 32 bits one value that is not finite makes the loss *nan* within one step. A matmul spreads it over a row,
# attention over a sample, and the loss over everything. In FP8 it may do worse: a cast that saturates turns an infinity
# into the largest number of its format (exercise 18.4). With each of labcode's recipes the FP8 layer then gives finite
# results in forward and backward: the run goes on, wrong, without any message. So we look in float32.
#
# Let the forward GEMM of `blocks.1.mlp.up` on rank 3 (dp 1, tp 1) return infinity everywhere.
#
# **Predict.** Gradients are averaged over dp at the end of the step. On how many of the four ranks is there a gradient
# that is not finite?

# %% tags=["predict"]
ranks_with_bad_gradients = 4

# %%
fault = lab.Fault(rank=3, layer="blocks.1.mlp.up", product="forward", factor=math.inf)
PROBE = "--debug.probe --train.steps 1 --train.dtype float32"
results = train(PROBE, "runs/nan", fault)

# %% tags=["nbval-check-output"]
bad = sum(result.num_bad_gradients > 0 for result in results)
compare("with bad gradients", ranks_with_bad_gradients, bad, within=1, found="counted")

# %% [markdown]
# All four have them, and all four report a loss of *nan*. Where did it begin? `--debug.probe` tells:

# %%
(line,) = [text for text in results[0].said.splitlines() if "first tensor" in text]
print(line.replace(": ", ":\n  ", 1).replace("; ", ";\n  "))

# %% [markdown]
# (The training counts its steps from 1, and the files of statistics from 0.)
#
# In a good step the probe costs one all-reduce of one number. A bad step is run once more, and now the probe looks at
# every tensor. It checks the GEMM of each rank **before** tp reduces the partial results, because afterwards all ranks
# of the group have the bad values. There is no common clock, so "first" is decided by order: forward before backward,
# then the stage of the pipeline, then how many tensors a rank has seen before.
#
# On GPUs PyTorch has a coarser check of its own. With `TORCH_NCCL_NAN_CHECK=1` a rank stops at the first collective to
# which it would bring a *nan*; an infinity passes. That names the rank and the step, but not the GEMM. In
# PyTorch 2.14 `TORCH_DIST_NAN_CHECK=1` does it with every backend.
#
# **Takeaway: after the step every rank has nan. Look for the first tensor, before the next collective has spread it.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Ask: what if all inputs of the named matmul are finite, as here? (The matmul itself is to blame:
# hardware, or a kernel.) And if one input was not? (Then it would have been named.)

# %% [markdown] tags=["exercise"]
# ## 10. Open end: a diagnosis that writes its own YAML (optional, 27 min)
#
# ### Exercise 19.7 · From statistics to the cure
#
# `found` is what `debug.read_statistics` returns: {(name, step): value}, with names such as
# `blocks.0.mlp.up_weight_underflows%` and `blocks.0.mlp.up_weight_overflows%`. Return the text of a YAML that
# repairs the run, by this rubric, which the check applies to eight logs:
#
# 1. a tensor is lost if **more than 5 %** of it underflow in the **last** step of the log;
# 2. each lost tensor gets PerTensorScaling, in all three matmuls;
# 3. no other tensor gets it;
# 4. no layer stands in two blocks, no two blocks have the same name, and nothing leaves FP8;
# 5. names of layers may contain `_`, and `blocks.1` is not `blocks.11`;
# 6. if nothing is lost, the text is empty.
#
# `layers:` may hold `exact_layer_names: [blocks.0.mlp.up]` instead of a pattern. About 22 lines.

# %% tags=["exercise"]
def diagnose(found):
    """The text of a YAML that gives each lost tensor a scale of its own."""
    ### BEGIN SOLUTION
    end = "_underflows%"
    last = max(step for _, step in found)
    lost = {}
    for (name, step), percent in found.items():
        if step == last and name.endswith(end) and percent > 5:
            layer, _, tensor = name.removesuffix(end).rpartition("_")
            lost.setdefault(layer, []).append(tensor)
    lines = []
    for number, (layer, tensors) in enumerate(lost.items()):
        lines += [
            f"mend_{number}:",
            "  enabled: True",
            "  layers:",
            f"    exact_layer_names: [{layer}]",
            "  transformer_engine:",
            "    PerTensorScaling:",
            "      enabled: True",
            f"      tensors: [{', '.join(tensors)}]",
            "      gemms: [fprop, dgrad, wgrad]",
        ]
    return "\n".join(lines)
    ### END SOLUTION

# %% tags=["check"]
check("19.7", diagnose)

# %% [markdown]
# Then use it to repair the run of section 2:
#
# ```python
# found = on_layers.read_statistics(Path("runs/look/debug"), 0)
# Path("own.yaml").write_text(diagnose(found))
# train(f"{FP8} --debug.config own.yaml --train.steps 50", "runs/own")[0].val_loss
# ```

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Applied to the log of section 2 it also gives scales to the gradients of qkv, and the run comes to about
# 2.67. A further question for those who are quick: when is a lost value no loss? (When the others of its sum are much
# larger. The statistic to look at then is `mse`.)

# %% [markdown]
# ## 11. The calls of Transformer Engine (optional, 17 min)
#
# labcode's command calls `nvdlfw_inspect` for you. In a training loop with Transformer Engine you call it yourself. The
# code below trains the layer of lesson 18, section 11, on dp x tp, with the features of `look.yaml`. It is there to be
# read: no cell calls it, and it has been run with a stand-in for the library only.

# %%
import nvdlfw_inspect.api as debug_api
import torch
import torch.distributed as dist
from nvdlfw_inspect.utils import gather_along_first_dim

from course.labs import l19_transformer_engine as with_te
from labcode.comm.grid import Grid
from labcode.topology import GridShape

show_source(with_te.train_with_features)

# %% [markdown]
# | Transformer Engine | labcode | what it does |
# |---|---|---|
# | `initialize` | `--debug.config`, `--debug.feature_dir`, `--debug.log_dir` | reads the YAML, and the features of the folders. Every rank calls it, with the same file, before the first layer is made; afterwards Transformer Engine raises an error |
# | `default_logging_enabled=True` | always | each rank has a file of its own, beside TensorBoard as well |
# | `tb_writer` | `--debug.tensorboard` | the ranks that have one write to TensorBoard: one in each stage of the pipeline is enough |
# | `set_tensor_reduction_group` | `--debug.reduce_over dp tp` | over which ranks statistics are reduced, except those of weights. It is called before the first step: a tensor keeps the group with which it was first seen |
# | `set_weight_tensor_tp_group_reduce` | `--debug.reduce_weights` | whether statistics of weights are reduced over the layer's tp group; by default they are |
# | `infer_and_assign_layer_names` | the names in the model | names the layers after their modules; without it they are `Layer_1`, `Layer_2`, ... |
# | `te.autocast`, once `te.fp8_autocast` | `--fp8.recipe`, `--fp8.share` | FP8 inside the `with`; the amax group must contain the tp group (lesson 18, section 11) |
# | `step` | the loop calls it | ends a step, with all of its micro-batches |
#
# `nvdlfw_inspect` runs without Transformer Engine, too. It has one feature of its own, a `LogTensorStats` for tensors
# that you pass to it, which is written in the YAML without `transformer_engine:` above it. It asks for the group at every
# call. Let each of our four ranks log a tensor that holds its own number, in four steps, each with another group: the
# rank itself, its tp group, its dp group, and all ranks. (`quietly` leaves out what the library prints about itself, and
# closes its files.)
#
# **Predict.** Which mean does rank 1 write in each of these steps? It is (dp 0, tp 1), as in section 4.

# %% tags=["predict"]
mean_over_none = 1  # its own number
mean_over_tp = 0.5  # ranks 0 and 1
mean_over_dp = 2  # ranks 1 and 3
mean_over_both = 1.5

# %%
Path("numbers.yaml").write_text("""
numbers:
  enabled: True
  layers:
    layer_types: [any_layer]
  LogTensorStats:
    enabled: True
    tensors: [activation]
    stats: [mean]
    freq: 1
""")
GROUPS = [(), ("tp",), ("dp",), ("dp", "tp")]

def log_own_number(folder):
    """Four steps of one rank, each of them reduced over another group."""
    grid = Grid.create(GridShape(dp=2, tp=2))
    debug_api.initialize(
        config_file="numbers.yaml",
        log_dir=folder,
        default_logging_enabled=True,
    )
    number = torch.tensor([float(dist.get_rank())])
    for axes in GROUPS:
        debug_api.set_tensor_reduction_group(grid.group(*axes))
        debug_api.log_tensor_stats("any_layer", tensor_name="activation", tensor=number)
        debug_api.step()
    debug_api.end_debug()

_ = ranks.run(with_te.quietly, log_own_number, "runs/numbers")

# %% tags=["nbval-check-output"]
files = sorted(Path("runs/numbers/nvdlfw_inspect_statistics_logs").iterdir())
lines = files[1].read_text().splitlines()
means = [float(line.split("value=")[1]) for line in lines]
compare("over none", mean_over_none, means[0], within=1)
compare("over tp", mean_over_tp, means[1], within=1)
compare("over dp", mean_over_dp, means[2], within=1)
compare("over both", mean_over_both, means[3], within=1)
print(*[file.name for file in files], sep="\n")

# %% [markdown]
# And if nobody sets a group? The guide of Transformer Engine says two things: that statistics are then reduced over all
# ranks of the run (on its page about the set-up), and that with None each rank has its own (on its page about
# distributed training). Its code hands the group to `gather_along_first_dim` of `nvdlfw_inspect`, which hands it to a
# collective of torch.
#
# **Predict.** If the group is None, over how many of our four ranks is the mean taken?

# %% tags=["predict"]
come_together = 4  # torch takes None for the group of all ranks

# %%
def gathered(value):
    """What comes together of this rank's number and others, if the group is None."""
    number = torch.tensor([value[dist.get_rank()]])
    return gather_along_first_dim(number, process_group=None)[0].tolist()

numbers = ranks.run(with_te.quietly, gathered, [0.0, 1.0, 2.0, 3.0])[0]
of_stages = ranks.run(with_te.quietly, gathered, [1.0, 1.0, 101.0, 101.0])[0]

# %% tags=["nbval-check-output"]
compare("come together", come_together, len(numbers), within=1, found="counted")
print(f"mean over two stages: {sum(of_stages) / len(of_stages):g}")

# %% [markdown]
# All of them. To have the statistics of single ranks, give each rank a group of its own, as `grid.group()` did above.
# With a pipeline, None also leads to wrong numbers. Transformer Engine reduces tensor by tensor, in the order in which a
# rank has seen them, and the first layer of one stage is not that of the other. Suppose that ranks 0 and 1 have a layer
# with activations of 1, and ranks 2 and 3 another layer, with activations of 101. These are the numbers behind the last
# line: both layers would get the mean 51, which is that of neither, and no error is raised. With a group for each stage
# this cannot happen.
#
# **When lines are written.** Here is how many lines rank 0 of a labcode run has written after backward of a step, and
# after `step()`, which the loop calls at its end:

# %% tags=["nbval-check-output"]
Path("moments.yaml").write_text("""
moments:
  enabled: True
  layers:
    layer_types: [mlp.down]
  transformer_engine:
    LogTensorStats:
      enabled: True
      tensors: [activation, weight, gradient]
      stats: [l1_norm]
""")
num_lines = ranks.run(lab.lines_written, "moments.yaml", "runs/moments")[0]
print(num_lines)

# %% [markdown]
# The sums wait for `step()`, so that micro-batches can be added to them, and so that all tensors of a step are sent in
# one message. Transformer Engine's guide says that lines on activations are written when the `with` of the autocast
# ends, and those on gradients after backward. In its source, that of 2.20.0.dev0 of August 2026, they wait for
# `debug_api.step()` as well. So a loop of your own that never calls `debug_api.step()` writes nothing, and a run that
# breaks off within a step leaves no line of that step.
#
# **Names of layers.** The patterns of this lesson match nothing in a `TransformerLayer`, because its layers have other
# names:
#
# | labcode | `TransformerLayer`, behind its own name |
# |---|---|
# | `attention.qkv` | `self_attention.layernorm_linear_qkv` or `linear_qkv`; from `infer_and_assign_layer_names` `layernorm_qkv` or `qkv` |
# | `attention.proj` | `self_attention.proj` |
# | `mlp.up` | `layernorm_mlp.fc1` |
# | `mlp.down` | `layernorm_mlp.fc2` |
#
# **Takeaway: initialize before the first layer, the same file on every rank, a reduction group for each stage of the
# pipeline, and `step` after the last micro-batch. Without a group the statistics are those of all ranks.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* `train_with_features` has been run with a stand-in for the library only
# (`tests/ranks/test_l19_transformer_engine.py`). What is said of None, of the 51, of micro-batches and of the moment at
# which lines are written was seen by running the Python files of `transformer_engine/debug` of 2.20.0.dev0 on four CPU
# ranks, with empty classes for the compiled parts. Ask: what happens if the file of one rank has fewer layers than those
# of the others? (The others wait for it in the reduction: hence the same file on every rank.)

# %%
ranks.close()

# %% [markdown]
# ## From here to GPUs and SLURM (core, 3 min)
#
# | what | start |
# |---|---|
# | statistics of all layers | `python -m labcode.train gpt_tiny --train.dtype fp8 --debug.config look.yaml` |
# | reduced over a grid | add `--debug.reduce_over dp tp` |
# | curves | add `--debug.tensorboard` |
# | your own features | add `--debug.feature_dir features` |
# | record the first step | `python -m labcode.train gpt_tiny --debug.record_steps 1` |
# | compare two runs | `python -m labcode.debug.bisect runs/a runs/b` |
# | look for nan | `python -m labcode.train gpt_tiny --debug.probe` |
# | on SLURM | `python -m labcode.slurm submit gpt_10m --site perlmutter --nodes 2 --train.dtype fp8 --debug.config look.yaml` |
#
# The YAML is that of Transformer Engine, and on GPUs its layers read the same file. labcode accepts what its guide
# describes: features with `gemms_struct` and `tensors_struct`, `DumpTensors`, and statistics of another recipe than the
# run's, such as `mxfp8_underflows%` in a run with delayed scaling, which says whether MXFP8 would lose less. Four things
# exist in Transformer Engine only, and a file that has them is refused in one line that says so: `LogNvfp4TensorStats`,
# `max_blockwise_dynamic_range`, statistics of `fp8_block_scaling`, and the scales of MXFP8. `overflows%` is refused where
# scaling is not delayed, by both libraries. Section 11 has the names of its calls and of its layers.
#
# On a cluster, the file and the folder of the logs must be where all nodes see them. Each rank writes its own file, so
# 1,024 ranks write 1,024 files: choose a `freq` of 100 or more, and few layers.
#
# With statistics of all layers every 10 steps a run takes 5 to 8 % longer on two cores (`benchmarks/debug.py`).
# Recording a step writes every activation to the disk: one step of a small model, never a whole run.
#
# ## Questions (core, 4 min)
#
# **1.** Rank 0 reports an std of 1.0, rank 1 one of 3.0, with equal numbers of values. What is the std of both
# together?
#
# <details><summary>Answer</summary>
#
# It depends on the means. If they are equal it is the root of (1 + 9)/2, which is 2.2 (for large n). The farther apart
# the means are, the larger it is.
# </details>
#
# **2.** `underflows%` of an activation is 90 in step 0 and 0.1 in step 20, with delayed scaling. Is this a fault?
#
# <details><summary>Answer</summary>
#
# No. In the first step there is no history, and the scale is 1. From the second step on the scale fits.
# </details>
#
# **3.** A run on 64 ranks of dp has a faulty GPU that computes wrong values on rank 17. Which reduction would you choose
# to find it?
#
# <details><summary>Answer</summary>
#
# None: then the line of rank 17 stands out from the other 63, which differ a little, as their samples do. Reduced over
# dp, it is one 64th of a mean; the largest value of the group may show that some rank is wrong, but not which.
# </details>
#
# **4.** Two runs differ first in the *weight* of the first layer, before any matmul. What happened?
#
# <details><summary>Answer</summary>
#
# They did not start from the same weights: another seed, another checkpoint, or one that was not read on all ranks.
# </details>
#
# **5.** From lesson 09: in `down(act(up(x)))` under tensor parallelism, which activations are cut over tp, and which
# are copies on all ranks of tp?
#
# <details><summary>Answer</summary>
#
# The input of `up` and the output of `down` are copies. The output of `up`, which is the input of `down` after the
# activation function, is cut by units. So the statistics of the former are the same on each rank of tp, and those
# of the latter are not.
# </details>
#
# ## Recap
#
# | | |
# |---|---|
# | a block of the YAML | name, enabled, layers, transformer_engine: features |
# | first look | `underflows%`, with delayed scaling `overflows%`, not in step 0 |
# | two parts | n, mean, M2; M2 = M2_a + M2_b + d² n_a n_b / n |
# | reduction group | its ranks write the same lines; weights over tp by default; none over pp |
# | repair | PerTensorScaling, DisableQuantizationGEMM and -Layer: by layer, matmul, operand |
# | your own feature | a class with `inspect_tensor`, in `--debug.feature_dir` |
# | two runs | the first tensor above the bound of rounding, and its ranks |
# | nan | `--debug.probe`: module, tensor, rank, before the sum of tp |
#
# ## Sources
#
# - Chan, Golub and LeVeque 1979, *Updating Formulae and a Pairwise Algorithm for Computing Sample Variances*, Stanford
#   STAN-CS-79-773: <https://i.stanford.edu/pub/cstr/reports/cs/tr/79/773/CS-TR-79-773.pdf>.
# - Transformer Engine, *Precision debug tools*:
#   <https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/debug.html>: features, distributed behaviour.
# - Transformer Engine 2.20.0.dev0, August 2026, `docs/debug` (the two pages of section 11 are `3_api_debug_setup` and
#   `4_distributed`) and `transformer_engine/debug`: reduction groups, micro-batches, when lines are written.
# - NVIDIA, *nvidia-dlfw-inspect*: <https://github.com/NVIDIA/nvidia-dlfw-inspect>: the library that reads the YAML.
# - Higham and Mary 2019, *A New Approach to Probabilistic Rounding Error Analysis*, SIAM J. Sci. Comput. 41(5),
#   DOI 10.1137/18M1226312: why the bound grows with a square root.
# - PyTorch 2.14, *Debugging environment variables*:
#   <https://docs.pytorch.org/docs/2.14/debugging_environment_variables.html>: the two checks for *nan*.
# - Micikevicius et al. 2022, *FP8 Formats for Deep Learning*, arXiv:2209.05433.
# - Fishman, Chmiel, Banner and Soudry 2024, *Scaling FP8 training to trillion-token LLMs*, arXiv:2409.12517.
