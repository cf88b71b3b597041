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
# # 08 · Communicator grids
#
# A large model is cut in several ways at once: copies of it read different data, its layers are spread over GPUs, and each layer is cut as
# well. Every rank then belongs to several groups, and talks to each about something else. This lesson is about who belongs to whom, and
# about a choice that costs no line of model code and can cost most of the speed: which ranks are neighbours.
#
# ## Goals
#
# - turn a rank into coordinates and back, and name the members of any group;
# - say what the **order** of a grid changes, and what it does not;
# - predict how many bytes of a training step cross between nodes, and count them in a real run;
# - recognise what happens when ranks make their groups in different orders.
#
# **Time**: 60 minutes. **Needs**: lesson 01 (the ring all-reduce and its bytes).

# %%
import itertools
import time
from collections import Counter
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from labcode.comm import ring
from labcode.comm.grid import Grid
from labcode.config import GPTConfig
from labcode.perf import traffic as placement
from labcode.perf.flops import training_flops_per_sample
from labcode.pool.ranks import Ranks
from labcode.recipes import gpt_shape
from labcode.teach.check import check, compare
from labcode.teach.exercises import l08
from labcode.teach.figures import plot
from labcode.topology import AXES, GridShape
from labcode.units import si

# %% [markdown]
# ## 1. From one number to coordinates
#
# Four ways to divide the work, four **axes**. Each has a lesson of its own; here it is enough to know what they divide.
#
# | axis | what its ranks share out | what they say to each other |
# |---|---|---|
# | dp, data parallel | the samples; the weights are copies | sum of the gradients |
# | pp, pipeline parallel | the layers, in consecutive **stages** | activations, from stage to stage |
# | cp, context parallel | the tokens of each sequence | keys and values of the attention |
# | tp, tensor parallel | the inside of each layer | sums of partial results |
#
# The sizes multiply to the number of ranks. Two machines with 8 GPUs each may be dp = 2, pp = 2, cp = 1, tp = 4: two copies of the model,
# each of two stages, each layer cut in four.

# %% [markdown]
# All that a launcher tells a process is one number, its rank. The coordinates are in it, as hours, minutes and seconds are in a count
# of seconds. The **order** says which axis ticks fastest. In `tp-cp-dp-pp`, tp does: ranks 0, 1, 2, 3 differ in tp only. Then cp moves
# on, then dp, then pp. With the sizes in capitals,
#
# $$\text{rank} = tp + TP\,(cp + CP\,(dp + DP \cdot pp)).$$
#
# **Predict.** In the grid above, what are the coordinates of rank 13? And with which other rank does it sum its gradients: the rank
# that agrees with it in everything but dp?

# %% tags=["predict"]
tp_guess, dp_guess, pp_guess = 13 % 4, 13 // 4 % 2, 13 // 8  # 13 = 1 + 4 * (1 + 2 * 1)
partner_guess = 13 - 4

# %% tags=["nbval-check-output"]
shape = GridShape(dp=2, pp=2, tp=4)  # order="tp-cp-dp-pp"
coords = shape.coords(13)
print(coords)
for axis, guess in {"tp": tp_guess, "dp": dp_guess, "pp": pp_guess}.items():
    compare(f"{axis} coordinate of rank 13", guess, coords[axis], within=1)
compare("the other rank of its dp group", partner_guess, shape.rank(**coords | {"dp": 0}), within=1)

# %% [markdown]
# A **group** along an axis holds the ranks that differ in this axis alone. Fix all other coordinates, let one run: that is a group. So every
# rank is in exactly one group of each axis, and the groups of an axis together hold every rank once: they are a **partition** of the
# world. A launcher fills one machine, called a **node**, before it goes on to the next; in the picture, ranks of one tp group have the
# same colour and letter.

# %% tags=["figure", "nbval-check-output"]
for axis in ("tp", "dp", "pp"):
    groups = shape.groups(axis)
    once = sorted(itertools.chain(*groups)) == list(range(shape.world_size))
    print(f"{axis}: {len(groups)} groups, every rank once: {once}:", *groups)
plot.grid(shape, color_by="tp", nodes=2, alt="Two nodes of eight ranks; each tensor-parallel group is four neighbours on one node")

# %% [markdown] tags=["exercise"]
# **Takeaway: a rank is a number in mixed radix. Its digits say which part of the work it does; the ranks that differ in one digit are the
# group that talks about that axis.**
#
# ### Exercise 8.1 · The way back
#
# Write the formula for the default order as code: the rank at given coordinates. One line. Sizes are `shape.tp`, `shape.cp` and so on.

# %% tags=["exercise"]
def my_rank(shape, tp, cp, dp, pp):
    """The rank at these coordinates in the order tp-cp-dp-pp."""
    ### BEGIN SOLUTION
    return tp + shape.tp * (cp + shape.cp * (dp + shape.dp * pp))
    ### END SOLUTION

# %% tags=["check"]
check("8.1", lambda: l08.rank_of(my_rank))

# %% [markdown] tags=["exercise"]
# ### Exercise 8.2 · Groups from coordinates
#
# Now the groups, for any order, from `shape.coords(rank)` and `itertools` (or a dictionary), without `shape.groups`. The ranks of a group ascend;
# the order of the groups is up to you. Three or four lines.

# %% tags=["exercise"]
def my_groups(shape, axis):
    """All groups along `axis` as lists of ranks."""
    ### BEGIN SOLUTION
    def others(rank):
        return [coord for name, coord in shape.coords(rank).items() if name != axis]
    together = itertools.groupby(sorted(range(shape.world_size), key=others), key=others)
    return [list(members) for _, members in together]
    ### END SOLUTION

# %% tags=["check"]
check("8.2", lambda: l08.groups_of(my_groups))

# %% [markdown]
# ## 2. The same sizes in another order
#
# How far apart are two neighbours of a group? One step along an axis passes over all ranks that the faster axes fill. That distance is the
# axis's **stride**: the product of the sizes of all faster axes.
#
# **Predict.** Keep dp = 2, pp = 2, tp = 4, but let dp tick fastest and tp slowest: `dp-pp-tp-cp`. What is the stride of tp, and what is
# the last member of the tp group of rank 0?

# %% tags=["predict"]
stride_guess = 2 * 2
last_guess = 3 * 4

# %% tags=["figure", "nbval-check-output"]
turned = replace(shape, order="dp-pp-tp-cp")
first = turned.groups("tp")[0]
print("tp group of rank 0:", first)
compare("stride of tp", stride_guess, first[1] - first[0], within=1)
compare("last member", last_guess, first[-1], within=1)
plot.grid(turned, color_by="tp", nodes=2, alt="The same two nodes in the order dp-pp-tp: every tensor-parallel group has two ranks on each node")

# %% [markdown]
# Same sizes, same number of groups, same arithmetic in each. The training run gives the same losses. What changes is where the members
# sit: now every tp group reaches over both nodes, while the dp pairs, 0 and 1, 2 and 3, are next to each other.
#
# Axes also act **together**. Ranks along cp hold the same weights and see other tokens, just as ranks along dp see other samples. So a
# weight's gradient is summed over both: over `groups("dp", "cp")`, the ranks that agree in pp and tp.

# %% tags=["nbval-check-output"]
four_axes = GridShape(dp=2, pp=2, cp=2, tp=2)
print("dp:       ", four_axes.groups("dp"))
print("dp and cp:", four_axes.groups("dp", "cp"))

# %% [markdown]
# **Takeaway: the order never changes what is computed. It changes the distance between the members of a group, and so which groups stay
# inside a node.**

# %% [markdown]
# ## 3. Two kinds of links
#
# A cluster is a **two-level topology**. Inside a node, GPUs talk over NVLink: on an H100, 450 GB/s in each direction. Between nodes,
# each GPU has a network card; a common one, InfiniBand NDR, carries 400 Gb/s, which is 50 GB/s. So the same message takes nine
# times as long once it leaves the node.
#
# So count the bytes that cross. Take a GPT of GPT-3's family with 7 billion parameters, and a step of 256 sequences. *act* is the activation
# that a rank holds between two layers for its samples: samples × tokens × hidden size × 2 bytes (bfloat16). Gradients have 4 bytes.
#
# | axis | what is sent in one step |
# |---|---|
# | tp | for each layer 4 ring all-reduces of *act*: 2 forward, 2 backward (Narayanan et al. 2021) |
# | cp | for each layer the keys and values forward, their gradients backward |
# | pp | *act* to the next stage, as much gradient back |
# | dp | one ring all-reduce of the gradients of the rank's own weights |

# %%
model = gpt_shape("gpt_7b")
NVLINK, INFINIBAND = 450e9, 50e9  # bytes per second, each way, per GPU; see Sources
ORDERS = ["-".join(order) for order in itertools.permutations(("tp", "dp", "pp"))]
SHAPES = {order: replace(shape, order=f"{order}-cp") for order in ORDERS}

def crossing(shape, ranks_per_node=8, batch=256):
    """{axis: bytes that cross between nodes in one step}."""
    traffic = placement.step_traffic(model, shape, global_batch=batch)
    return {axis: placement.across_nodes(sent, ranks_per_node) for axis, sent in traffic.items()}

print(f"{si(model.num_parameters)} parameters, {model.num_layers} layers, hidden size {model.hidden_size}, {model.context_length} tokens")

# %% [markdown]
# A ring over p ranks sends 2 (p − 1)/p times the tensor over each of its p links (lesson 01). Sorted by node, a ring over two nodes
# crosses **twice**: once over, once back. All its other links stay inside.
#
# **Predict.** In the order `tp-pp-dp`, ranks r and r + 8 hold the same eighth of the weights and sum its gradients: eight rings of two. How many
# bytes cross in a step? In the order `dp-pp-tp`, four tp rings of four cross; a stage has 16 layers, each of the two copies reads 128
# sequences. How many times as many bytes cross?

# %% tags=["predict"]
dp_crossing_guess = 16 * (2 * 1 / 2) * model.num_parameters / 8 * 4  # 16 crossing links, each carries the rank's gradients once
tp_crossing_guess = 8 * (2 * 3 / 4) * (4 * 16) * (128 * 2048 * 4096 * 2)  # 8 crossing links, 4 all-reduces in 16 layers, act
factor_guess = tp_crossing_guess / dp_crossing_guess

# %% tags=["nbval-check-output"]
for order, ordered in SHAPES.items():
    print(f"{order}: ", "   ".join(f"{axis} {si(size, 'B')}" for axis, size in crossing(ordered).items() if size))
worst, good = (sum(crossing(SHAPES[order]).values()) for order in ("dp-pp-tp", "tp-pp-dp"))
compare("bytes that cross, tp-pp-dp", dp_crossing_guess, good, within=1.01, unit="B")
compare("dp-pp-tp, times as many", factor_guess, worst / good, within=1.01)

# %% [markdown]
# On two nodes only the **slowest** axis crosses: the faster ones fill a node before it ticks. Tensor parallelism sends by far the most, because it
# sends activations in every layer and for every sample, while gradients travel once per step and only stage boundaries send activations
# along pp. With smaller nodes more axes have to cross. The picture shows the same 16 ranks on two nodes of 8 and on four nodes of 4.

# %% tags=["figure"]
both = {order: {f"{16 // n} nodes of {n}": sum(crossing(ordered, n).values()) / 1e9 for n in (8, 4)} for order, ordered in SHAPES.items()}
plot.bars(both, ylabel="GB between nodes in one step, log scale", logy=True, fmt="{:.0f}", title="7 billion parameters on 16 GPUs",
          alt="With tp fastest 34 to 88 gigabytes cross, with tp slowest more than a thousand; in the middle it depends on the size of the node")

# %% [markdown]
# An order with tp in the middle is good on nodes of 8 and bad on nodes of 4: there a node holds the fastest axis and half of tp. With tp
# fastest, nothing of tp ever crosses as long as tp fits into a node. Hence the rule of Narayanan et al.: tensor parallel up to the size of
# a node, pipeline and data parallel across nodes.
#
# What do bytes cost? In a ring all links carry the same bytes at the same time, so the **slowest link decides**: the same ring takes nine
# times as long when it leaves the node. With the peak speeds of the links, the seconds of tp are:

# %% tags=["nbval-check-output"]
def link_seconds(shape, ranks_per_node=8, batch=256):
    """{axis: seconds that its slowest link is busy in one step}."""
    node, seconds = [rank // ranks_per_node for rank in range(shape.world_size)], {}
    for axis, sent in placement.step_traffic(model, shape, global_batch=batch).items():
        times = [size / (NVLINK if node[a] == node[b] else INFINIBAND) for (a, b), size in sent.items()]
        seconds[axis] = max(times, default=0.0)
    return seconds

outside, inside = link_seconds(SHAPES["dp-pp-tp"]), link_seconds(SHAPES["tp-pp-dp"])
computing = training_flops_per_sample(model) * 256 / 16 / (0.4 * 989e12)
print(f"tp inside the node {inside['tp']:.2f} s, outside {outside['tp']:.2f} s; computing at 40 % of an H100's peak {computing:.2f} s")

# %% [markdown]
# With tp inside the node, its traffic is an eighth of the computing time; outside, it takes longer than the computing. And it cannot hide: the next
# matrix product needs the sum. The gradients of dp can travel while backward still computes (lesson 04). These are the links' best
# speeds, so real runs lose more, and latency comes on top.
#
# Which of dp and pp should be slowest? Both need few bytes, but they depend on the batch in different ways.

# %% tags=["figure"]
batches = [2**k for k in range(5, 13)]
plot.lines({f"{axis} slowest": [sum(crossing(SHAPES[order], batch=b).values()) / 1e9 for b in batches]
            for axis, order in {"tp": "dp-pp-tp", "dp": "tp-pp-dp", "pp": "tp-dp-pp"}.items()},
           x=batches, logx=True, logy=True, xlabel="sequences per step", ylabel="GB between nodes", title="Two nodes of 8",
           alt="Bytes of tp and pp grow with the batch, those of dp do not; pp and dp meet at about four hundred sequences")

# %% [markdown] tags=["exercise"]
# Activations grow with the batch, gradients do not. Both choices exist: Megatron-LM's default has pp slowest (`tp-cp-ep-dp-pp`; ep divides
# experts), Llama 3 was trained with dp slowest (`TP, CP, PP, DP`), because dp's traffic can be sent ahead of need.
#
# **Takeaway: put the axis that sends most into the node. Tensor parallel comes first in the order; whether dp or pp comes last depends on the
# batch, and on what can hide.**
#
# ### Exercise 8.3 · Find the order
#
# With four axes there are 24 orders. Write a function that returns one with the fewest bytes between nodes, by trying them all.
# `itertools.permutations(AXES)`, `replace(shape, order=...)`, `placement.step_traffic` and `placement.across_nodes` are all you need.

# %% tags=["exercise"]
def best_order(model, shape, ranks_per_node, global_batch):
    """An order such as "tp-cp-dp-pp" for which the fewest bytes of a step cross between nodes."""
    ### BEGIN SOLUTION
    def cost(order):
        step = placement.step_traffic(model, replace(shape, order=order), global_batch=global_batch)
        return sum(placement.across_nodes(sent, ranks_per_node) for sent in step.values())
    return min(map("-".join, itertools.permutations(AXES)), key=cost)
    ### END SOLUTION

# %% tags=["check"]
check("8.3", lambda: l08.best_order(best_order, model))

# %% [markdown]
# ## 4. Now run it
#
# `GridShape` is arithmetic. `Grid.create(shape)` makes the groups real: every rank calls it and gets one process group for each combination of
# axes. To see who is with whom, let every rank bring its own number and sum it over each of its groups.
#
# **Predict.** Four ranks, dp = 2, tp = 2, default order. What does rank 3 get as the sum over its tp group, and over its dp group?

# %% tags=["predict"]
tp_sum_guess = 2 + 3
dp_sum_guess = 1 + 3

# %% tags=["nbval-check-output"]
ranks = Ranks(4, timeout_s=15)

def sums(rank, shape):
    """Sum of the ranks over this rank's group along each axis."""
    grid, found = Grid.create(shape), {}
    for axis in ("tp", "dp", "pp"):
        total = torch.tensor(rank)
        dist.all_reduce(total, group=grid.group(axis))
        found[axis] = total.item()
    return found

small_grid = GridShape(dp=2, tp=2)
by_rank = ranks.run(sums, small_grid)
print(*by_rank, sep="\n")
compare("rank 3, sum over tp", tp_sum_guess, by_rank[3]["tp"], within=1)
compare("rank 3, sum over dp", dp_sum_guess, by_rank[3]["dp"], within=1)

# %% [markdown]
# The sum over pp is the rank itself: a group of one is a real group, so that model code never has to ask whether an axis is in use.
#
# PyTorch has a grid too, the `DeviceMesh`. It takes sizes and names, **slowest axis first**, and its own tensor parallelism and FSDP read
# their groups from it. `grid.mesh` is one with the groups of our grid. Beside it, one that PyTorch makes itself:

# %% tags=["nbval-check-output"]
def both_meshes(shape):
    """Our mesh and PyTorch's: the array of ranks, and this rank's groups."""
    names, ours = shape.axes[::-1], Grid.create(shape).mesh
    theirs = init_device_mesh(ours.device_type, [shape.size(axis) for axis in names], mesh_dim_names=names)
    return [(mesh.mesh.squeeze().tolist(), [dist.get_process_group_ranks(mesh.get_group(axis)) for axis in ("tp", "dp")])
            for mesh in (ours, theirs)]

for rank, (ours, theirs) in enumerate(ranks.run(both_meshes, small_grid)):
    print(f"rank {rank}: mesh {ours[0]}, tp and dp groups {ours[1]}; the same as PyTorch's: {ours == theirs}")

# %% [markdown]
# Now count the bytes. Pretend that ranks 0, 1 sit on one node and ranks 2, 3 on another, and **replay** a step of a small GPT: its
# all-reduces along tp and dp, tensors of the true sizes, through the hand-written ring of lesson 01, which returns the bytes that it hands to
# `isend`. Whoever sends to the other node also sleeps as long as a network of 5 MB/s would need.

# %%
small = GPTConfig(num_layers=2, num_heads=4, hidden_size=64, context_length=128, vocab_size=64)
BATCH, SLOW = 32, 5e6  # sequences per step; bytes per second of the emulated network

def replay(rank, shape):
    """The tp and dp traffic of one step: {(from, to): bytes} and seconds."""
    grid, sent = Grid.create(shape), Counter()
    act = torch.zeros(BATCH // shape.dp, small.context_length, small.hidden_size)
    gradients = torch.zeros(small.num_parameters // shape.tp)
    dist.barrier()
    start = time.perf_counter()
    for axis, tensor, times in (("tp", act, 4 * small.num_layers), ("dp", gradients, 1)):
        members = dist.get_process_group_ranks(grid.group(axis))
        right = members[(members.index(rank) + 1) % len(members)]
        for _ in range(times):
            sent[rank, right] += (num_bytes := ring.all_reduce(tensor, grid.group(axis)))
            time.sleep(num_bytes / SLOW if rank // 2 != right // 2 else 0)
    return sent, time.perf_counter() - start

# %% [markdown]
# **Predict.** How many bytes cross between the two nodes in one step, with tp fastest (`tp-dp`) and with dp fastest (`dp-tp`)? All numbers are
# float32, 4 bytes. A ring of two ranks sends the whole tensor once over each of its links; in either order two rings, so four links, cross. And how long
# does a step take if everything inside a node costs nothing and the four links work at the same time?

# %% tags=["predict"]
good_bytes_guess = 4 * (small.num_parameters / 2 * 4)  # the gradients of half the weights
bad_bytes_guess = 4 * (4 * 2) * (16 * 128 * 64 * 4)    # 4 all-reduces in each of 2 layers; act of 16 sequences
good_s_guess, bad_s_guess = good_bytes_guess / 4 / SLOW, bad_bytes_guess / 4 / SLOW

# %%
orders = {"tp-dp": small_grid, "dp-tp": replace(small_grid, order="dp-tp-cp-pp")}
runs = {name: [ranks.run(replay, ordered) for _ in range(3)] for name, ordered in orders.items()}
counted = {name: sum((sent for sent, _ in run[0]), Counter()) for name, run in runs.items()}
good_s, bad_s = (sorted(max(s for _, s in run) for run in of_order)[1] for of_order in runs.values())  # the median of three
compare("one step, tp-dp", good_s_guess, good_s, within=2, unit="s")
compare("one step, dp-tp", bad_s_guess, bad_s, within=1.5, unit="s")
print(f"dp-tp takes {bad_s / good_s:.0f} times as long as tp-dp")

# %% tags=["nbval-check-output"]
compare("bytes between nodes, tp-dp", good_bytes_guess, placement.across_nodes(counted["tp-dp"], 2), within=1, unit="B")
compare("bytes between nodes, dp-tp", bad_bytes_guess, placement.across_nodes(counted["dp-tp"], 2), within=1, unit="B")
for name, ordered in orders.items():
    step = placement.step_traffic(small, ordered, global_batch=BATCH, value_bytes=4)
    predicted = sum((Counter(sent) for sent in step.values()), Counter())
    print(f"{name}: on each of {len(predicted)} links the predicted bytes: {counted[name] == predicted}")

# %% [markdown]
# The bytes are exact, link by link. The step of the bad order comes close to its prediction, because the slow link decides. The good order takes
# somewhat longer than predicted: copying inside a node and starting messages cost something on cores that the ranks share, and the
# prediction called that nothing. The network is a sleep here, so the seconds check the bookkeeping and not a wire; the bytes are real.
#
# Who sent how much to whom, in the bad order? The white lines separate the nodes: top left and bottom right stay inside.

# %% tags=["figure"]
matrix = [[counted["dp-tp"][a, b] / 1e6 for b in range(4)] for a in range(4)]
picture = plot.heatmap(matrix, xlabel="to rank", ylabel="from rank", unit="MB in one step", fmt="{:.2g}", title="Order dp-tp, two ranks per node",
                       alt="Four by four ranks: with dp fastest the large tensor-parallel messages lie outside the two squares of the nodes")
for draw in (picture.axes[0].axhline, picture.axes[0].axvline):
    draw(1.5, color="white", lw=3)
picture

# %% [markdown]
# **Takeaway: one string, the order, decides over the bytes between nodes. They can be predicted to the byte before anything runs.**

# %% [markdown]
# ## 5. Broken on purpose
#
# Making groups is itself a collective: `dist.new_group(members)` has to be called by **all** ranks of the job, members or not, in the **same
# order**. Each rank counts its calls, and that number is the group's name, under which the members look for each other in the store.
#
# Suppose rank 3 makes the dp groups before the tp groups. That happens when code loops over a `set` of axis names: Python's order of strings in
# a set differs from process to process.

# %% tags=["nbval-check-output"]
def careless(rank):
    tp, dp = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    made = {str(members): dist.new_group(members) for members in (dp + tp if rank == 3 else tp + dp)}
    found = {}
    for axis, groups in {"tp": tp, "dp": dp}.items():
        total = torch.tensor(rank)
        dist.all_reduce(total, group=made[str(next(members for members in groups if rank in members))])
        found[axis] = total.item()
    return found

print(*ranks.run(careless), sep="\n")

# %% [markdown]
# No error, no hang; but compare rank 3 with the sums above: 4 and 5 in place of 5 and 4. Its group `[1, 3]` is the second it made, as `[2, 3]` is for
# the others. So its dp group met rank 2's tp group under one name, and its tp group rank 1's dp group. In training it would add
# activations to gradients, and where sizes agree nothing stops it. `Grid.create` goes through the axes in one fixed order.
#
# The second mistake is to leave a rank out. Here rank 3 took another branch and makes no dp groups. The time-out is 3 seconds; PyTorch's default is
# 10 minutes with NCCL and 30 with gloo.

# %% tags=["raises-exception"] raises="RankError: rank 1: DistStoreError: wait timeout after 3000ms"
def absent(rank):
    for members in ([0, 2], [1, 3]):
        if rank != 3:
            dist.new_group(members, timeout=timedelta(seconds=3))

ranks.run(absent)

# %% [markdown]
# The error names rank 1, the one that **waited**. Who is missing stands in the key (with gloo): the number before `cpu` is the name of the group,
# and `0/1` is the address that its member 1 should have left for member 0. Member 1 of `[1, 3]` is rank 3. With NCCL the text
# differs, the question is the same: which member of which group never came?
#
# The third mistake is the most frequent and the cheapest, because it is found before any group exists: sizes that do not multiply to the
# number of ranks. Read what was computed, what was found, and what to do.

# %% tags=["raises-exception"] raises="RankError: rank 0: ValueError: dp*pp*cp*tp = 2*1*1*3 = 6 but WORLD_SIZE is 4"
ranks.run(lambda: Grid.create(GridShape(dp=2, tp=3)))

# %% [markdown] tags=["exercise"]
# **Takeaway: every rank makes every group, in the same order. A rank that does not, hangs the others if you are lucky, and gives wrong sums
# if you are not.**
#
# ### Exercise 8.4 · Design a grid
#
# 64 H100 in 8 nodes of 8, a GPT of 13 billion parameters (40 layers, 40 heads, 2048 tokens), 512 sequences per step. Choose sizes and order:
#
# - weights, gradients and optimizer, 16 bytes per parameter over tp × pp (Rajbhandari et al. 2020), take at most 60 GB per GPU;
# - a pipeline idles (pp − 1)/m of the computing time, about 3.4 s, with m = 512/dp micro-batches of one sequence (Narayanan et al. 2021);
# - idle time plus the seconds of all slowest links stay below 0.45 s.
#
# The check prints what your grid costs. Afterwards argue with it: what does this model leave out that would change your choice?

# %% tags=["exercise"]
### BEGIN SOLUTION
my_grid = GridShape(dp=4, pp=8, tp=2)  # 13 GB per GPU; stages one node apart, tp and dp inside a node
### END SOLUTION

# %% tags=["check"]
check("8.4", lambda: l08.design(my_grid))

# %%
ranks.close()

# %% [markdown]
# <details><summary>What the model leaves out</summary>
#
# Latency: many small messages cost more than their bytes. Overlap: dp's gradients hide behind backward, tp's sums do not. Memory of
# activations, which often decides over tp and cp. Small matrices: with tp = 8 each product is thinner and reaches less of the peak.
# Uneven stages: embedding and head belong to somebody. Lessons 09 to 13 meet these one by one.
# </details>
#
# ## From here to GPUs and SLURM
#
# On a machine with four GPUs, `Ranks(4)` takes one each. The tensors of this lesson stay on the CPU, where gloo carries them; a CUDA tensor goes through
# the same groups over NCCL, and section 5 then ends in NCCL's own errors. In a program started by torchrun or srun the lines are
# `bootstrap.start()` and `Grid.create(shape)`.
#
# All of section 3 rests on one assumption: **ranks fill the nodes in blocks**, so that node = rank // 8. torchrun does that. So does `srun`
# by default (`--distribution=block`); with `--distribution=cyclic` it deals ranks out to the nodes in turn, every tp ring crosses at each of its links, and
# no message says so. On a new cluster, let every rank print its host name once: `srun --nodes=2 --ntasks-per-node=8 bash -c 'echo $SLURM_PROCID $(hostname)'`.

# %% [markdown]
# ## Recap
#
# | concept | formula or fact | in labcode |
# |---|---|---|
# | coordinates | mixed radix, fastest axis first | `topology.GridShape` |
# | group | differ in the given axes only | `GridShape.groups` |
# | stride | product of the faster sizes | |
# | between nodes | a ring over two nodes crosses twice | `perf.placement` |
# | tp per layer | 4 all-reduces of activations | `perf.placement` |
# | ring across nodes | the slowest link decides | |
# | process groups | all ranks, the same order | `comm.grid.Grid` |
# | DeviceMesh | the same groups, slowest first | `Grid.mesh` |
#
# ## Sources
#
# - Narayanan et al. 2021, arXiv:2104.04473, sections 2 and 3: bytes per axis, idle pipelines, tensor parallel inside nodes.
# - Llama Team 2024, arXiv:2407.21783, section 3.3.2: order of the axes, context parallel.
# - Megatron-LM, `megatron/core/parallel_state.py`: `RankGenerator`, default order.
# - Rajbhandari et al. 2020, arXiv:1910.02054, section 3.1: 16 bytes per parameter.
# - NVIDIA H100 datasheet, 2023: NVLink, 900 GB/s both ways together. NVIDIA DGX H100 datasheet, 2022: 400 Gb/s per GPU.
# - docs.pytorch.org: `new_group`, `DeviceMesh`. slurm.schedmd.com/srun.html: `--distribution`.
