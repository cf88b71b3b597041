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
# Until now all ranks did the same: each held the whole model, and they divided the data between them. A large model is
# cut in several ways at once. Different ranks hold different layers, or different parts of one layer, and there are also
# copies that read different data. Every rank then belongs to several groups, and exchanges something different with
# each. In this lesson you write the arithmetic that says who belongs to whom, you make the groups, and you choose a grid
# by its cost.
#
# ## Goals
#
# - turn a rank into coordinates, and find all groups along any axes, for any order of the axes;
# - make the process groups on every rank, and recognise the errors that come from making them carelessly;
# - predict which bytes a step of training sends between nodes, and count them in a real step;
# - say how fast a group over several nodes is, and write the all-reduce that uses all of its adapters;
# - choose the sizes and the order of a grid by their cost.
#
# **Time**: 140 minutes. Good places for a break are after section 2 and after section 4.
#
# **Needs**: lesson 01 (sections 1 and 3), lesson 04 (section 1).

# %%
import torch
import torch.distributed as dist

from course.lab import Ranks, check, compare, plot
from labcode.comm.grid import Grid
from labcode.recipes import gpt_shape
from labcode.topology import GridShape

ranks = Ranks(4, timeout_s=15)

# %% [markdown]
# ## 1. From one number to coordinates (core, 18 min)
#
# There are four common ways to divide the work, and we call each of them an **axis**. Each has a lesson of its own;
# here it is enough to know what its ranks divide, and what they send each other.
#
# | axis | what its ranks divide | what they send each other |
# |---|---|---|
# | dp, data parallel | the samples; each has a copy of the weights | the sum of the gradients (lesson 04) |
# | pp, pipeline parallel | the layers, in consecutive **stages** | activations, from each stage to the next |
# | cp, context parallel | the tokens of each sequence | keys and values of the attention |
# | tp, tensor parallel | the inside of each layer | sums of partial results |
#
# The sizes of the axes multiply to the number of ranks. Take two machines with 8 GPUs each, 16 ranks, and the sizes dp
# = 2, pp = 2, cp = 1 and tp = 4. There are two copies of the model, each copy has two stages, and each layer of a stage
# is cut into four parts.
#
# A launcher tells a process one number only: its rank. Its place on every axis, its **coordinates**, must follow from
# that number. It works as on a clock, where 3725 seconds are 1 hour, 2 minutes and 5 seconds. The seconds tick fastest;
# when they have gone round, the minutes move on by one. In the same way one axis of the grid ticks fastest. The
# **order** of a grid names the axes from the fastest to the slowest. In `tp-cp-dp-pp`, the usual one, tp ticks fastest.

# %% tags=["figure"]
shape = GridShape(dp=2, pp=2, tp=4)  # order="tp-cp-dp-pp"
plot.digits(shape, caption="08.digits")

# %% [markdown]
# Let us do one by hand: rank 6. Divide by the size of the fastest axis: 6 = 1 · 4 + **2**, so tp is 2, and 1 is left.
# The next axis is cp with size 1: 1 = 1 · 1 + **0**, so cp is 0 and 1 is left. (The picture leaves cp out, because the
# coordinate of an axis of size 1 is always 0.) Then dp with size 2: 1 = 0 · 2 + **1**, so dp is 1, and 0 is left for
# pp. The picture agrees. Numbers whose digits have different sizes, like these or like hours, minutes and seconds, are
# called **mixed radix**.
#
# **Predict.** The same sizes, but in the order `pp-dp-tp-cp`: pp ticks fastest. What are the coordinates tp, dp and pp
# of rank 13? And with which other rank does it sum its gradients? That is the rank which agrees with it in everything
# but dp.

# %% tags=["predict"]
pp_of_13 = 13 % 2
dp_of_13 = 13 // 2 % 2
tp_of_13 = 13 // 4
other_rank = 13 + 2

# %% tags=["nbval-check-output"]
turned = GridShape(dp=2, pp=2, tp=4, order="pp-dp-tp-cp")
coords = turned.coords(13)
compare("tp of rank 13", tp_of_13, coords["tp"], within=1, found="computed")
compare("dp of rank 13", dp_of_13, coords["dp"], within=1, found="computed")
compare("pp of rank 13", pp_of_13, coords["pp"], within=1, found="computed")
for group in turned.groups("dp"):
    if 13 in group:
        other = sum(group) - 13
        compare("other rank along dp", other_rank, other, within=1, found="computed")
print(coords)

# %% [markdown] tags=["exercise"]
# ### Exercise 8.1 · Coordinates, in any order
#
# Write the division of the example for any sizes and any order. `order` is a text such as `"dp-pp-tp-cp"`, fastest axis
# first. `sizes` is a dictionary, for instance `{"dp": 2, "pp": 2, "cp": 1, "tp": 4}`. Use nothing of `GridShape`: you
# are about to write it.

# %% tags=["exercise"]
def my_coords(rank, sizes, order):
    """The coordinates of a rank, {axis: coordinate}."""
    ### BEGIN SOLUTION
    coords = {}
    for axis in order.split("-"):
        coords[axis] = rank % sizes[axis]
        rank = rank // sizes[axis]
    return coords
    ### END SOLUTION

# %% tags=["check"]
check("8.1", my_coords)

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Most people get it right at once; those who do not have read the order from slow to fast, or
# divide before they take the remainder. Somebody always loops `while rank > 0`, which leaves out the slow axes of the
# low ranks. Ask the room: how would you go back from coordinates to the rank? (Multiply and add, from the slowest axis
# to the fastest. It is Horner's scheme.)

# %% [markdown]
# ## 2. Groups (core, 24 min)
#
# A **group** along an axis holds the ranks that differ along this axis and nowhere else. All their other coordinates
# are the same. So every rank is in exactly one group of each axis, and the groups of an axis together hold every rank
# once.
#
# A launcher fills one machine, called a **node**, before it goes on to the next. The picture shows both nodes. The
# ranks of one tp group have the same colour and the same letter.

# %% tags=["figure"]
shape = GridShape(dp=2, pp=2, tp=4)  # the sixteen ranks of section 1
print("tp groups:", shape.groups("tp"))
print("dp groups:", shape.groups("dp"))
plot.grid(shape, color_by="tp", nodes=2, caption="08.groups")

# %% [markdown]
# How far apart are two neighbours of a group? One step along an axis passes over all the ranks that the faster axes
# fill. This distance is called the **stride** of the axis: the product of the sizes of all faster axes. In the picture
# dp has the stride 4, because tp fills four ranks before dp moves on.
#
# **Predict.** Take other sizes, dp = 4, pp = 2 and tp = 2, and the order `dp-pp-tp-cp`: dp ticks fastest, and tp is
# slower than dp and pp. Which other rank is in the tp group of rank 3?

# %% tags=["predict"]
partner_of_3 = 3 + 4 * 2  # the stride of tp is 8

# %% tags=["figure", "nbval-check-output"]
turned = GridShape(dp=4, pp=2, tp=2, order="dp-pp-tp-cp")
first, second = turned.groups("tp")[3]
compare("partner of rank 3", partner_of_3, second, within=1, found="computed")
print("the tp group of rank 3:", [first, second], "so the stride is", second - first)
plot.grid(turned, color_by="tp", nodes=2, caption="08.groups_turned")

# %% [markdown]
# In the usual order the tp groups of these sizes would be neighbours: 0 and 1, 2 and 3, and so on. In this order there
# are as many groups, and the same work is done by other ranks. But every tp group spans both nodes, and the four ranks
# of a dp group are next to each other.
#
# Axes also work **together**. Ranks along cp hold the same weights and see other tokens, just as ranks along dp hold
# the same weights and see other samples. So the gradient of a weight is summed over both. The group for that sum is
# `groups("dp", "cp")`: all ranks that agree in pp and tp.

# %% tags=["nbval-check-output"]
four_axes = GridShape(dp=2, pp=2, cp=2, tp=2)
print("along dp:       ", four_axes.groups("dp"))
print("along dp and cp:", four_axes.groups("dp", "cp"))

# %% [markdown]
# **Takeaway: up to rounding, the order of the axes does not change what is computed, as long as each rank picks its data
# by its dp coordinate. It decides how far apart the members of a group are, and so which groups stay inside a node.**

# %% [markdown] tags=["exercise"]
# ### Exercise 8.2 · All groups, along any axes
#
# This function is the heart of every framework for large models; Megatron-LM calls it its rank generator. `order` and
# `sizes` are those of exercise 8.1; you may call your `my_coords` or divide once more. `axes` is a tuple with any
# number of axes: `("tp",)`, `("dp", "cp")`, or even `()`, whose groups are single ranks. Return a list of groups, each
# of them a list of ranks in ascending order. The order of the groups is up to you. As in exercise 8.1, do not call
# `GridShape`, which has the answer.

# %% tags=["exercise"]
def my_groups(sizes, order, axes):
    """All groups along `axes`: the ranks of a group agree in every other axis."""
    ### BEGIN SOLUTION
    world_size = 1
    for size in sizes.values():
        world_size *= size
    together = {}
    for rank in range(world_size):
        rest = rank
        fixed = ()  # the coordinates along the other axes
        for axis in order.split("-"):
            coord = rest % sizes[axis]
            rest = rest // sizes[axis]
            if axis not in axes:
                fixed += (coord,)
        if fixed not in together:
            together[fixed] = []
        together[fixed].append(rank)
    return list(together.values())
    ### END SOLUTION

# %% tags=["check"]
check("8.2", my_groups)

# %% [markdown] tags=["solution-only"]
# *For the instructor.* The usual mistake in 8.2 is to group by the coordinates along `axes` instead of the others: ask
# what the ranks of a group have in common. `GridShape.groups` goes the other way: it runs through all coordinates that
# are fixed within a group, and so it can compute a single group without looking at all ranks. With `my_coords` the
# inner loop is `tuple( coords[axis] for axis in sizes if axis not in axes)`.

# %% [markdown]
# ## 3. Make the groups real (core, 21 min)
#
# So far this was arithmetic. `dist.new_group(members)` makes a process group of some ranks. It is itself a collective:
# **all** ranks of the job have to call it, members or not, and in the **same order**. Each rank counts its calls, and
# the count becomes the group's name. Under that name the members put their addresses into the store (lesson 01, section
# 1) and look up those of the others.
#
# <details><summary>Is there a way in which only the members call it?</summary>
#
# Yes, `new_group(members, use_local_synchronization=True)`. PyTorch then builds the name from the members' ranks and
# from how many groups each already has. If two members have made different numbers of groups before, their
# names differ and they do not meet. So the order matters here as well.
# </details>
#
# What if the order differs? Suppose that rank 3 makes the dp groups before the tp groups. That happens when code loops
# over a `set` of names of axes, because Python orders the strings of a set differently in each process. Let us do it on
# purpose, with four ranks, dp = 2 and tp = 2. Every rank then sums the rank numbers over its groups.

# %% tags=["nbval-check-output"]
TP_GROUPS = [[0, 1], [2, 3]]
DP_GROUPS = [[0, 2], [1, 3]]

def sum_over(members_of_groups, made, rank):
    """The sum of the ranks over this rank's group."""
    total = torch.tensor(rank)
    for members in members_of_groups:
        if rank in members:
            dist.all_reduce(total, group=made[str(members)])
    return total.item()

def careless(rank):
    in_order = TP_GROUPS + DP_GROUPS
    if rank == 3:
        in_order = DP_GROUPS + TP_GROUPS
    made = {}
    for members in in_order:
        made[str(members)] = dist.new_group(members)
    return {
        "tp": sum_over(TP_GROUPS, made, rank),
        "dp": sum_over(DP_GROUPS, made, rank),
    }

for rank, sums in enumerate(ranks.run(careless)):
    print(f"rank {rank}: {sums}")

# %% [markdown]
# There was no error and no hang. But rank 3 is in the tp group [2, 3], whose sum is 5, and it got 4. Its dp group is
# [1, 3], with the sum 4, and it got 5. This table shows which group each rank made in its four calls:
#
# | call | ranks 0, 1 and 2 | rank 3 | who meets under this name |
# |---|---|---|---|
# | 1 | tp [0, 1] | dp [0, 2] | 0 and 1 |
# | 2 | tp [2, 3] | dp [1, 3] | 2, for its tp group, and 3, for its **dp** group |
# | 3 | dp [0, 2] | tp [0, 1] | 0 and 2 |
# | 4 | dp [1, 3] | tp [2, 3] | 1, for its dp group, and 3, for its **tp** group |
#
# In call 2 rank 2 looks for its tp partner, and finds rank 3, which believes that it has met rank 1 of its dp group. In
# training, activations would be added to gradients, and where the tensors have the same size, nothing stops that.
#
# The second mistake is to leave a rank out. Here rank 3 takes a different branch and does not make the dp groups at all.
# The group gives up after 3 seconds.

# %% tags=["raises-exception"] raises="RankError: rank 1: DistStoreError: wait timeout after 3000ms"
from datetime import timedelta


def absent(rank):
    for members in DP_GROUPS:
        if rank != 3:
            dist.new_group(members, timeout=timedelta(seconds=3))

ranks.run(absent)

# %% [markdown]
# The error names rank 1, which is the one that **waited**. The end of the message, which says what each rank did, comes
# from our pool and not from PyTorch. On a cluster the key in the message tells you who is missing. It looks like
# `/0//6//cpu//0/1`, and two of its parts matter:
#
# - `6`, before `cpu`, is the name of the group, which is the number of the call. (The four calls of the cell before
#   count, too.)
# - `1`, at the end, is the number of a member within the group. Each member puts its address under its own number, and
#   this one never came. Member 1 of the group [1, 3] is rank 3.
#
# NCCL waits later, in the first collective of the group, unless `init_process_group` was given a `device_id`, and its
# message is different. But the question is the same: which member of which group never came?
#
# With NCCL there is one more rule, which holds after the groups are made. Every group is a communicator of its own: it
# is created at the latest in its first collective, and takes some GPU memory. If collectives of **several** groups are
# under way at once, all ranks have to start them in one consistent order, across the groups too. Suppose that rank 0
# starts the all-reduce over tp first and then that over dp, and rank 1 of its tp group starts them the other way round.
# Then each may wait for the other, because a collective occupies the GPU until its partners have come. PyTorch's
# documentation of `new_group` calls this "safe concurrent usage". Gloo, which runs here, does not show the mistake.

# %% [markdown] tags=["exercise"]
# ### Exercise 8.3 · Make them all
#
# Write the function that a rank calls to get its groups. `groups_of` is a dictionary that gives for each axis all its
# groups, as exercise 8.2 does: `{"tp": [[0, 1], [2, 3]], "dp": [[0, 2], [1, 3]], ...}`. Return this rank's own process
# group for each axis. Each axis has the same list of groups on all ranks.

# %% tags=["exercise"]
def connect(rank, groups_of):
    """This rank's process group along each axis, {axis: group}."""
    ### BEGIN SOLUTION
    own = {}
    for axis in sorted(groups_of):
        for members in groups_of[axis]:
            group = dist.new_group(members)
            if rank in members:
                own[axis] = group
    return own
    ### END SOLUTION

# %% tags=["check"]
check("8.3", connect, ranks)

# %% [markdown]
# In plain PyTorch you need not write this yourself. `dist.new_subgroups_by_enumeration` makes all groups of a list and
# returns the one of this rank. And `init_device_mesh` makes the groups of all axes of a grid. It takes the sizes and
# names with the **slowest axis first**, and returns a `DeviceMesh`, from which PyTorch's own parallelisms read their
# groups (lesson 09, section 5). `_flatten` makes the group of several axes together; its underscore says that its name
# may still change. On GPUs, pass `"cuda"` instead of `"cpu"`.

# %% tags=["nbval-check-output"]
from torch.distributed.device_mesh import init_device_mesh


def in_plain_pytorch(rank):
    by_list, _ = dist.new_subgroups_by_enumeration(TP_GROUPS)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    made = {
        "tp": by_list,
        "cp": mesh.get_group("cp"),
        "dp": mesh.get_group("dp"),
        "dp and cp": mesh["dp", "cp"]._flatten().get_group(),
    }
    return {name: dist.get_process_group_ranks(group) for name, group in made.items()}

with_cp = GridShape(dp=2, cp=2)  # the usual order: cp ticks faster than dp
for rank, found in enumerate(ranks.run(in_plain_pytorch)):
    same = found["dp"] in with_cp.groups("dp") and found["cp"] in with_cp.groups("cp")
    print(f"rank {rank}: {found}; as GridShape has them: {same}")

# %% [markdown]
# In labcode `Grid.create(shape)` makes the groups of every combination of axes, in one fixed order. It has a
# `DeviceMesh` over the same groups, `grid.mesh`, for those parts of PyTorch that want one. In many jobs some axes have
# size 1. Their groups have one member and are real groups all the same, so that model code never has to ask whether an
# axis is in use.
#
# Some libraries of today split dp in two. In torchtitan, `ParallelDims` has the sizes `dp_replicate` and `dp_shard`:
# weights and optimizer are sharded along dp_shard and replicated along dp_replicate. Both together are called **HSDP**,
# hybrid sharded data parallel (lesson 13). Beside them stand `cp`, `tp`, `pp` and `ep`, and weights are sharded over
# dp_shard and cp as one group.

# %% [markdown]
# **Takeaway: every rank makes every group, in the same order. If one does not, the others hang if you are lucky, and get
# wrong sums if you are not.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Sizes whose product is not the number of ranks are the commonest mistake of all, and the
# cheapest: `Grid.create` says what was computed, what was found, and what to do. Let the room fill in the last column
# of the table before they see it. In 8.3 most write `for axis in groups_of`, and learn from the check that call 1
# differs between the ranks; some make only the groups they are in. That second version can even seem to work here,
# because every rank is in one group of each axis. But [0, 1] and [2, 3] then get the same name, and their members write
# their addresses under the same keys, so it is luck who meets whom.

# %% [markdown]
# ## 4. What crosses between nodes (core, 22 min)
#
# A cluster has two kinds of links. Inside a node, GPUs talk over NVLink. Between nodes each GPU has a network adapter;
# a common one, InfiniBand NDR, carries 400 Gb/s, which is 50 GB/s. labcode keeps such rates in a table, each with its
# source, and this is its entry for nodes of 8 H100. Inside a node it has what collectives reach, which is less than the
# 450 GB/s each way of the datasheet.

# %% tags=["nbval-check-output"]
from labcode.perf.cluster import load_cluster

dgx = load_cluster("dgx-h100")
INSIDE = dgx.inside.beta_bytes_per_s
ADAPTER = dgx.between.beta_bytes_per_s
print(f"inside a node: {INSIDE / 1e9:.0f} GB/s for each GPU, each way")
print(f"between nodes: {ADAPTER / 1e9:.0f} GB/s for each GPU")
print(dgx.source)

# %% [markdown]
# So it pays to count the bytes that leave a node. We begin with a case that is small enough to run here: a GPT of two
# layers on four ranks, dp = 2 and tp = 2, where we take ranks 0 and 1 for one node and ranks 2 and 3 for another. The
# picture shows the rings of both axes in the usual order.

# %% tags=["figure"]
small_grid = GridShape(dp=2, tp=2)
plot.links(small_grid, axes_shown=("tp", "dp"), nodes=2, caption="08.rings")

# %% [markdown]
# What is sent along these links in one step of training?
#
# - **dp** makes one all-reduce of the gradients in each step (lesson 04, section 1).
# - **tp** makes four all-reduces in every layer, two in forward and two in backward. The whole model has two more, one
#   below the first layer and one above the last. Lesson 09 shows why. They sum activations. We call *act* the output of
#   a layer on one rank, which has samples of the rank × tokens × hidden size numbers.
#
# In a ring all-reduce over p ranks, each link carries 2 (p - 1)/p times the tensor (lesson 01, section 3). With p = 2
# that is exactly once the tensor.
#
# Let us do the sum for dp. A rank holds half of each layer, so about half of the weights, and its gradients have 4
# bytes each. In the picture four links of dp cross, and each carries the gradients of one rank once.

# %% tags=["nbval-check-output"]
import itertools
from collections import Counter
from dataclasses import replace

from course.labs.l08_costs import crossing_bytes
from labcode.comm.counting import CollectiveSpy
from labcode.config import GPTConfig
from labcode.models import gpt
from labcode.models.parallelize import parallelize
from labcode.perf.traffic import across_nodes

small = GPTConfig(
    num_layers=2, num_heads=4, hidden_size=64, context_length=128, vocab_size=64
)
BATCH = 32  # sequences in a step, 16 for each of the two copies
gradient_bytes = small.num_parameters / 2 * 4
dp_crossing = 4 * gradient_bytes
print(f"{small.num_parameters:,} parameters")
print(f"the gradients of a rank: {gradient_bytes:,.0f} bytes")
print(f"between the nodes, order tp-dp: {dp_crossing:,.0f} bytes")

# %% [markdown]
# Now the other order, `dp-tp`: dp ticks fastest, ranks 0 and 1 are a dp group, and the four links of tp cross.
#
# **Predict.** How many bytes of tp cross between the nodes in a step then? A number of act has 4 bytes here (float32).
# Count the bytes of act for one rank first, then the all-reduces of the whole model, then the links that cross.

# %% tags=["predict"]
act_bytes = 16 * 128 * 64 * 4
all_reduces = 4 * 2 + 2
tp_crossing = 4 * all_reduces * act_bytes

# %% [markdown]
# To check both sums, ours for dp and yours for tp, we run one real step of the model on the four ranks, with forward,
# backward and the all-reduce of the gradients, and count. labcode's `CollectiveSpy` sees each collective before it
# starts, with the ranks of its group and the bytes of its tensor. `parallelize` cuts the model as you will learn to do
# it in lesson 09.

# %%
class BytesOfGroups(CollectiveSpy):
    """Adds up the bytes that are summed in each group, {ranks of the group: bytes}."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def on_collective(self, call, start):
        self.found[call.ranks] += call.num_bytes
        return start()

def one_step(rank, shape):
    """What this rank sends to its right neighbours, {(sender, receiver): bytes}."""
    model = parallelize(gpt.GPT(small), Grid.create(shape))
    samples = BATCH // shape.dp
    tokens = torch.zeros(samples, small.context_length, dtype=torch.int64)
    with BytesOfGroups() as groups:
        model.loss(model(tokens), tokens).backward()
        model.finish_gradient_sync()
    sent = {}
    for members, num_bytes in groups.found.items():
        p = len(members)
        place = members.index(rank)
        right_neighbour = members[(place + 1) % p]
        sent[rank, right_neighbour] = 2 * (p - 1) / p * num_bytes
    return sent

def counted_step(shape):
    links = {}
    for sent in ranks.run(one_step, shape):
        links |= sent
    return links

# %% [markdown]
# `across_nodes(sent, ranks_per_node)` adds up the bytes of the links whose two ends are on different nodes. Ranks fill
# the nodes in order, so the node of a rank is `rank // ranks_per_node`.

# %% tags=["nbval-check-output"]
tp_first = counted_step(small_grid)
dp_first = counted_step(replace(small_grid, order="dp-tp-cp-pp"))
few_bytes = across_nodes(tp_first, 2)
many_bytes = across_nodes(dp_first, 2)
compare("dp-tp", tp_crossing, many_bytes, within=1.02, unit="B", found="counted")
print(f"tp-dp: {dp_crossing:,.0f} bytes by our sum, {few_bytes:,.0f} bytes counted")
print(f"dp-tp: {many_bytes / few_bytes:.0f} times as many bytes between the nodes")

# %% [markdown]
# Tensor parallelism sends so much more because it sends activations, in every layer and for every sample, while the
# gradients travel once in a step, however many samples there were. The predictions are a little too small. For dp, 8 %
# are missing, because the weights of the positions and of the norms are replicated over tp and not halved. For tp it is
# half a percent, because the loss is summed over tp as well.
#
# labcode does such sums for all four axes in `perf.traffic.step_traffic`. We use it for a model that does not fit here:
# a GPT with 7 billion parameters, 32 layers and hidden size 4096, on the 16 GPUs of section 1, with 256 sequences of
# 2048 tokens in a step. Activations have 2 bytes now (bfloat16). The other two axes send:
#
# - **pp**: act to the next stage in forward, and as much gradient back. With pp = 2 there is one boundary between the
#   two stages.
# - **cp**: keys and values of the attention. Our grid has cp = 1, so nothing is sent.
#
# One thing is different from the small model. Training with tp today also means **sequence parallelism** (lesson 10):
# between the layers, each rank of tp holds the activations of its own 1/tp of the tokens and not of all. Then each
# all-reduce of tp becomes a reduce-scatter and an all-gather, which together send the same bytes. But pp sends only
# what a rank holds, act/tp.
#
# **Predict.** In the usual order pp is the slowest axis, so each of the two nodes holds one stage. How many bytes cross
# between the nodes in a step? Count the bytes of act for one rank first: the two copies of dp share the sequences. Then
# count the ranks that send, and what each of them holds.

# %% tags=["predict"]
act_7b_bytes = 128 * 2048 * 4096 * 2
usual_order_bytes = 16 * act_7b_bytes / 4  # 8 ranks send forward, 8 send back

# %% tags=["figure"]
model = gpt_shape("gpt_7b")
shape = GridShape(dp=2, pp=2, tp=4)

crossing_gb = {}
for axes in itertools.permutations(("tp", "dp", "pp")):
    order = "-".join(axes)
    ordered = replace(shape, order=f"{order}-cp")
    crossing_gb[order] = {
        "2 nodes of 8": crossing_bytes(model, ordered, 8, batch=256) / 1e9,
        "4 nodes of 4": crossing_bytes(model, ordered, 4, batch=256) / 1e9,
    }
found = crossing_bytes(model, shape, 8, batch=256)
compare("tp-dp-pp", usual_order_bytes, found, within=1, unit="B", found="computed")
by_cost = dict(sorted(crossing_gb.items(), key=lambda item: sum(item[1].values())))
plot.bars(by_cost, caption="08.orders")

# %% [markdown]
# On nodes of 8 only the slowest axis crosses, since the two faster ones fill a node or half of one. On nodes of 4 the
# second axis crosses as well wherever the two faster ones have 8 ranks. So an order with tp in the middle is good on
# nodes of 8 and bad on nodes of 4.
#
# Which of dp and pp should be the slowest axis? The bytes of pp grow with the batch and those of dp do not, but dp's
# can be sent while the ranks still compute (lesson 05, section 2). Both choices exist: Llama 3 was trained with dp
# slowest, in the order TP, CP, PP, DP, while Megatron-LM's default is `tp-cp-ep-dp-pp`.
#
# That order names a fifth axis. A model of **experts** has many MLPs in a layer, of which each token uses a few, and
# the ranks along **ep** (expert parallel) hold different ones. The sizes do not all multiply, though. The layers of
# experts have a **grid of their own over the same ranks**: ep times the tp inside an expert times pp times the remaining
# copies. Attention uses one grid, the experts the other, and only pp is the same in both (Liu et al. 2025 call it
# parallel folding). Eight ranks can be tp = 2 and dp = 4 for attention, and ep = 8 for the experts.
#
# **Takeaway: the bytes between nodes can be predicted before anything runs. Put the axis that sends most inside the
# node, which is tp. Whether dp or pp comes last depends on the batch, and on what can be hidden.**

# %% [markdown]
# ## 5. How fast a group is (core, 28 min)
#
# What do these bytes cost in time? In a ring all links carry the same bytes at the same moment, so the slowest link
# decides. Take one ring through 8 ranks on two nodes, 0 to 3 and 4 to 7. It leaves the first node from rank 3 and comes
# back to rank 0. Everything that leaves a node goes through the adapter of a single GPU, everything that comes in
# through that of another, and the other two adapters are idle, as in the picture on the left.
#
# NCCL does better. It builds **several rings** through the same ranks, each in a different order, so that each leaves
# the node through a different GPU, and gives each ring its share of the tensor. If a group has g ranks in each node, g
# rings use g adapters. (The arrows of several rings have two heads, because messages go both ways. An adapter sends and
# receives at its full rate at the same time, so we count the bytes in one direction.)
#
# The third way has **two levels**. First a reduce-scatter inside the node leaves each rank with one shard, 1/g of the
# tensor, summed over the node. Then each rank sums its shard with the ranks that hold the same shard in the other nodes,
# by an all-reduce between nodes over its own adapter. Finally an all-gather inside the node puts the shards together.

# %% tags=["figure"]
plot.ways_over_nodes(caption="08.adapters")

# %% [markdown] tags=["exercise"]
# ### Exercise 8.4 · An all-reduce in two levels
#
# Write the third way. `x` is a vector, and the number of ranks in a node divides its length. `inside` is the group of
# the ranks of this node, `between` the group of those ranks, one of each node, that have the same number within their
# group `inside`. Return the sum of `x` over all ranks of all nodes in a new tensor, and leave `x` as it is. A rank may
# send to other nodes what an all-reduce of its shard needs, and no more. About 7 lines.
#
# `dist.reduce_scatter(own, parts, group=...)` takes a list of tensors of equal size, one for each rank of the group. On
# the rank at position i, `own` becomes the sum of everybody's `parts[i]`. `dist.all_gather(parts, own, group=...)` is
# the way back. `list(x.chunk(p))` is such a list of p parts, which are views of `x`.

# %% tags=["exercise", "by-hand"]
def all_reduce_in_two_levels(x, inside, between):
    """[N] -> [N], the sum over all ranks of all nodes."""
    ### BEGIN SOLUTION
    g = inside.size()
    own = torch.empty_like(x.chunk(g)[0])
    dist.reduce_scatter(own, list(x.chunk(g)), group=inside)
    dist.all_reduce(own, group=between)
    total = torch.empty_like(x)
    dist.all_gather(list(total.chunk(g)), own, group=inside)
    return total
    ### END SOLUTION

# %% tags=["check"]
check("8.4", all_reduce_in_two_levels, ranks)

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Many write two all-reduces, first inside and then between. The sum is right, and every adapter
# carries the whole tensor: ask what the ranks of a node have in common after the first one. Others exchange the two
# groups, which is right as well and sends g times as much over the network. Ask the room what NCCL gains by cutting the
# tensor into pieces: the three levels of different pieces run at the same time, so the slowest level decides and not
# their sum.

# %% [markdown]
# Let us measure all three on links of known speed. Four ranks stand for two nodes of two. Each rank has an adapter of 5
# MB/s, and inside a node there are 200 MB/s, so fast that you may leave it out. Every message is really sent, and its
# sender sleeps for as long as such a link would take.
#
# **Predict.** How many seconds does an all-reduce of 4 MB take on one ring, on two rings, and in two levels? Count
# for each way the bytes that go over one adapter, in one direction. A ring over four ranks carries 2 · 3/4 of its
# tensor on each link.

# %% tags=["predict"]
one_ring_s = 2 * 3 / 4 * 4e6 / 5e6
two_rings_s = one_ring_s / 2  # each ring has half of the tensor
two_levels_s = 2 * 1 / 2 * 2e6 / 5e6  # a ring of two, with half of it

# %%
from course.labs import l08_nodes as nodes

one, two, levels = (
    max(ranks.run(nodes.median_s, way))
    for way in (nodes.one_ring, nodes.two_rings, nodes.two_levels)
)
compare("one ring", one_ring_s, one, within=1.3, unit="s")
compare("two rings", two_rings_s, two, within=1.3, unit="s")
compare("two levels", two_levels_s, levels, within=1.3, unit="s")

# %% [markdown]
# (All three take somewhat longer than predicted, because sending also costs time on this machine. In two levels the
# reduce-scatter and the all-gather inside the nodes, which we left out, come on top with 10 ms each. The tolerance of
# 1.3 is for both.)
#
# Now for any group: N bytes on n ranks in k nodes, g = n/k in each. Such times are usually quoted as a rate. The **bus
# bandwidth** is the rate that the links of a single ring would need in order to be as fast: the bytes of one ring,
# 2 (n-1)/n · N, divided by the time. The table has the bytes over each adapter that is used, and this rate:
#
# | way | bytes | bus bandwidth |
# |---|---|---|
# | one ring | 2 (n-1)/n · N | adapter |
# | g rings | 2 (n-1)/n · N/g | g · adapter |
# | two levels | 2 (k-1)/k · N/g | (n-1)/(k-1) · adapter |
#
# The last one follows with n = g k:
#
# $$\frac{2\,(n-1)/n \cdot N}{2\,(k-1)/k \cdot N/g} \cdot \text{adapter} = \frac{n - 1}{k - 1} \cdot \text{adapter}.$$
#
# The levels inside a node take time as well, so it cannot exceed what a collective reaches there. This gives the **rule
# of two levels**:
#
# $$\text{bus bandwidth} = \min\left(\text{inside},\ \frac{n - 1}{k - 1} \cdot \text{adapter}\right)$$
#
# With one rank in each node, n = k, and it is the adapter's rate. On many nodes (n - 1)/(k - 1) approaches g, and rings
# over all adapters are as good. On few nodes the rule promises more than rings can give. Four nodes of 8 B200 with 50
# GB/s for each GPU reached 381.8 GB/s (Bekman): rings would carry 400, two levels 517. So for a group over a few nodes
# g · adapter is the safer count. labcode's planner uses the rule, and so do the lessons on tensor parallelism, sharding
# and planning.
#
# <details><summary>Can an all-reduce be faster than that? Trees, and switches that add</summary>
#
# On two nodes NCCL also has trees, which can exceed the rate of rings. And the rate *inside* is that of rings. Where
# NVSwitch itself reduces (NVLS, or NVLink SHARP), an all-reduce inside a node can have more bus bandwidth than the links
# carry. We do not count on either.
# </details>
#
# Take the grid of section 4 again, dp = 2, pp = 2, tp = 4 on two nodes of 8 H100. In the usual order a tp group stays
# inside a node. In the order `dp-pp-tp-cp` its ranks are `0, 4, 8, 12`, two on each node, and the rule gives min(365,
# 3/1 · 50) = 150 GB/s. With its four ranks on four nodes it would be 50.
#
# The next cell compares these times with that of computing. Each parameter takes 6 FLOPs for each token (lesson 02,
# section 1), and an H100 computes the layers of a transformer at 692 of its 989 TFLOP/s in bfloat16 (lesson 03, section
# 1).

# %% tags=["nbval-check-output"]
from dataclasses import replace

from labcode.perf.cluster import load_cluster
from labcode.perf.two_level import Placement, group_link, placement

dgx = load_cluster("dgx-h100")
shape = GridShape(dp=2, pp=2, tp=4)
inside_rate = group_link(dgx, placement(shape, 8, "tp")).beta_bytes_per_s
turned = replace(shape, order="dp-pp-tp-cp")
turned_rate = group_link(dgx, placement(turned, 8, "tp")).beta_bytes_per_s
spread_rate = group_link(dgx, Placement(ranks=4, per_node=1)).beta_bytes_per_s

model = gpt_shape("gpt_7b")
FLOPS_PER_S = dgx.gpu.layer_flops_per_s("bfloat16")
act_of_rank = 128 * 2048 * 4096 * 2
tp_bytes = 4 * 16 * 2 * 3 / 4 * act_of_rank  # 16 layers of a stage, a ring of 4
compute_s = 6 * model.num_parameters * 256 * 2048 / (16 * FLOPS_PER_S)
print(f"computing:               {compute_s:.2f} s")
print(f"tp inside a node:        {tp_bytes / inside_rate:.2f} s")
print(f"tp with two a node:      {tp_bytes / turned_rate:.2f} s")
print(f"tp with one in a node:   {tp_bytes / spread_rate:.2f} s")

# %% [markdown]
# So the bytes alone do not forbid tp across nodes when several GPUs of each node take part. It stays inside all the
# same, for three reasons. The next matmul needs the sum, so little of this time can be hidden behind computing. Each of
# the all-reduces pays the network's latency. And the adapters are needed for what has no other way, the messages of dp
# and pp.
#
# <details><summary>Two things about real networks: rails, and large NVLink domains</summary>
#
# - **Rails.** In most GPU clusters the adapters with the same number in all nodes are connected to the same switch,
#   called a rail. With tp = 8 inside nodes of 8, the ranks of a dp group or a pp group all have the same number in
#   their nodes, `rank % 8`, so their messages stay on one rail. Messages between rails go through more switches, or
#   over NVLink to the GPU on the other rail first; NCCL does the latter, and calls it PXN.
# - **Large NVLink domains.** In a GB200 NVL72, NVLink connects 72 GPUs in 18 hosts of 4, at 900 GB/s each way (NVIDIA,
#   2024). What this lesson calls a node is then the domain of 72 and not the host: tp = 16 can stay inside, and a job
#   of up to 72 ranks needs no network. Launchers still start 4 ranks on a host.
# </details>
#
# **Takeaway: a group over several nodes can use the adapters of all its ranks: about min(inside, (n-1)/(k-1) ·
# adapter), on few nodes rather g · adapter. The slow case is one rank of the group in each node.**

# %% [markdown]
# ## 6. Choose a grid (core, 20 min)
#
# Now you choose the sizes as well. There are 64 H100 in 8 nodes, a GPT of 13 billion parameters with 40 layers, and 512
# sequences in a step. Three things cost something:
#
# - **Memory.** We count 16 bytes for each parameter: 2 for the weight, 2 for its gradient and 12 for the optimizer,
#   which keeps two averages and a copy of the weight in float32 (Rajbhandari et al. 2020). Frameworks differ in this:
#   Megatron-LM keeps gradients in float32 and counts 18. tp and pp divide the parameters. The 12 bytes of the optimizer
#   are sharded over the ranks of dp and cp, as is usual today; it is called ZeRO stage 1, or a distributed optimizer
#   (lesson 13).
# - **Links.** For each axis the seconds of its messages, by the rule of two levels. Sharding the optimizer costs nothing
#   here: instead of the all-reduce there is a reduce-scatter of gradients and an all-gather of new weights.
# - **Idle stages.** A pipeline of pp stages works on m **micro-batches**, parts of the batch that follow each other
#   through the stages. At first the later stages wait for work, at the end the earlier ones have none. All in all a
#   stage is idle for (pp - 1)/m of the computing time (Narayanan et al. 2021; lesson 12 shows it). With micro-batches
#   of one sequence, m = 512/dp.
#
# `table(costs(...))` prints all three for any grid. Here is one that fills each node with tp and has no pipeline.
# Change it and run the cell as often as you like.

# %% tags=["nbval-check-output"]
from course.labs.l08_costs import cheapest, costs, table

model_13b = gpt_shape("gpt_13b")
trial = GridShape(dp=8, tp=8)
print(table(costs(model_13b, trial, batch=512)))

# %% [markdown] tags=["exercise"]
# ### Exercise 8.5 · A grid for 64 GPUs
#
# Find a grid, `GridShape(dp=.., pp=.., cp=.., tp=.., order=..)`, for which three things hold. A size that you leave out
# is 1, and the order is the usual one. There are several such grids. (pp has to divide the 40 layers.)
#
# 1. it has 64 ranks;
# 2. weights, gradients and optimizer take at most 30 GB on each GPU, so that the rest is left for activations;
# 3. at most 0.30 s are lost, on the links and idle together.

# %% tags=["exercise"]
### BEGIN SOLUTION
my_grid = GridShape(dp=32, pp=2)  # two stages of 4 nodes each
### END SOLUTION

# %% tags=["check"]
check("8.5", my_grid)

# %% [markdown]
# If you have tried some grids, you have noticed that none with tp = 4 or tp = 8 passes, although tp stays inside the
# node. The cost of tp can be written down for any grid. Each rank makes 4 all-reduces in each of its L/pp layers, and
# sends 2 (tp - 1)/tp times act, which has B/dp · S · H numbers of 2 bytes:
#
# $$4 \cdot \frac{L}{pp} \cdot \frac{2\,(tp-1)}{tp} \cdot \frac{B}{dp}\,S H \cdot 2
# = \frac{16\,B S H L\,(tp-1)}{dp \cdot pp \cdot tp} = \frac{16\,B S H L}{N}\,(tp-1).$$
#
# With cp = 1 the product of the three sizes is the number of GPUs, N. So with the same GPUs, model and batch, the cost
# of tp is proportional to tp - 1, even on NVLink. The rule "tensor parallel inside the node" says **where** tp belongs
# and how large it can be, not how large it should be.
#
# What about no tp and no pp at all? With dp = 64 the weights and gradients, 4 bytes for each parameter, are too large
# for 30 GB. But these can be sharded over dp as well: each rank keeps 1/64 of everything, and gathers the weights when
# it needs them. That is ZeRO stage 3, or FSDP, and lesson 13 builds it. It takes one more all-gather, since the weights
# are gathered for forward and again for backward. (We let a rank compute its 8 sequences in one go.)

# %% tags=["nbval-check-output"]
fully_sharded = costs(model_13b, GridShape(dp=64), batch=512, sharded="everything")
print(table(fully_sharded))

# %% [markdown]
# It takes 3.2 GB, a ninth of what dp = 32 with pp = 2 takes (not counting the layers that are gathered at the moment),
# and is about as fast as the best grids of the exercise. (We send gradients in 2 bytes. Programs that sum them in
# float32, as many do, send half as much again or twice as much along dp.) For a dense model of this size on 64 GPUs it
# is what most people do today. Then what do tp and pp still buy?
#
# Take the same model and the same 512 sequences, and more and more GPUs. For each tp we look for the best grid with
# these GPUs, with a sharded optimizer and 30 GB as before, and with cp = 1. Beside them we put sharding everything over
# all GPUs, without tp and pp. It can go up to 512 GPUs, as each needs a sequence.
#
# **Predict.** Which tp loses least on 64, on 256 and on 1,024 GPUs: 1, 2, 4 or 8? Think of what each further GPU is
# used for when tp = 1.

# %% tags=["predict"]
best_on_64 = 1
best_on_256 = 2
best_on_1024 = 4

# %% tags=["figure"]
num_gpus = [64, 128, 256, 512, 1024]
lost_shares = {}
for tp in (1, 2, 4, 8):
    lost_shares[f"tp = {tp}"] = []
    for n in num_gpus:
        grid, found = cheapest(model_13b, n, batch=512, tp=tp, room_bytes=30e9)
        lost_shares[f"tp = {tp}"].append(found.lost_s / found.compute_s)

everything = []
for n in num_gpus[:4]:  # up to 512
    found = costs(model_13b, GridShape(dp=n), batch=512, sharded="everything")
    everything.append(found.lost_s / found.compute_s)

def best_tp(n):
    place = num_gpus.index(n)
    best = min(lost_shares, key=lambda name: lost_shares[name][place])
    return int(best.removeprefix("tp = "))

compare("64 GPUs", best_on_64, best_tp(64), within=1, found="computed")
compare("256 GPUs", best_on_256, best_tp(256), within=1, found="computed")
compare("1,024 GPUs", best_on_1024, best_tp(1024), within=1, found="computed")
lines = {name: (num_gpus, shares) for name, shares in lost_shares.items()}
lines["all sharded over dp"] = (num_gpus[:4], everything)
plot.lines(lines, caption="08.grids")

# %% [markdown]
# Each line says what is lost for one second of computing.
#
# - **With tp = 1 all additional GPUs go to dp.** Its messages take as long as ever, and there is less and less computing
#   beside them. And 30 GB need two stages, with ever fewer micro-batches: at 512 GPUs two for each pipeline, which is
#   idle for half of the computing time, and at 1,024 a single one.
# - **With tp = 8 the line begins high, because of what tp sends.** That shrinks with the number of GPUs as the computing
#   does, so its fraction stays about a half, and the line climbs because of the rest. But tp can use more GPUs without
#   needing more samples.
# - **Sharding everything** is the straight line. Its three collectives take about 0.21 s on any of these numbers of
#   GPUs, and each doubling halves the computing beside them. On 256 GPUs, which compute for 0.49 s, it loses 0.43 where
#   tp = 2 loses 0.33: beyond some 128 GPUs it needs overlap, or tp and pp beside it.
#
# So you add tp and pp when there are more GPUs than the batch can feed, when the messages of dp no longer hide behind
# the little computing of a rank, or when a single layer is too large for a GPU. The rule of Narayanan et al., tensor
# parallel up to the size of a node and pipeline parallel beyond, is from 2021, before it was common to shard weights
# over dp.
#
# **Takeaway: shard the state over dp first. tp belongs inside the node, and costs in proportion to tp - 1 even there:
# take as much of it as memory and the number of samples force you to, and no more.**
#
# What does this small model of cost leave out?
#
# <details><summary>Think of three things, then open</summary>
#
# - **Overlap**: the messages of dp hide behind computing, mostly or wholly, and the all-reduces of tp hardly at all. So
#   this count is unfair to dp, and small tp is even better than it says.
# - **Latency**: many small messages cost more than their bytes.
# - **Memory of activations**, which often decides how large tp and cp have to be (lesson 10).
# - **Thin matrices**: with tp = 8 each matmul is narrower, and reaches less of the GPU's peak.
# - **Uneven stages**: embedding and head belong to one of the stages each (lesson 12).
# </details>

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Let people shout grids and run the table on the projector. In the usual order these pass: dp 32
# pp 2; dp 16 pp 4; dp 8 pp 8; dp 32 tp 2; dp 16 pp 2 tp 2; dp 8 pp 4 tp 2; and with cp = 2 dp 16 pp 2 and dp 8 pp 4.
# The discussion is worth more than the grid: why is pp = 16 refused (40 layers), why does dp = 64 not fit (54 GB), and
# what changes with Megatron's 18 bytes (dp = 32 with pp = 2 needs 41 GB, and no longer fits)? Derive the formula with
# (tp - 1) on the board.

# %%
ranks.close()

# %% [markdown]
# ## 7. From here to GPUs and SLURM (core, 2 min)
#
# `Ranks(4)` computes on the CPU on every machine, where gloo carries the tensors. `Ranks(4, device="cuda")` gives each
# rank a GPU, and a CUDA tensor goes through the same groups over NCCL. In a program that torchrun or srun starts, the
# two lines are `bootstrap.start()` and `Grid.create(shape)`.
#
# Sections 4 to 6 rest on one assumption: **ranks fill the nodes in blocks**, so that a rank's node is `rank // 8`.
# torchrun does that, and so does `srun` by default (`--distribution=block`). With `--distribution=cyclic` it deals the
# ranks out to the nodes in turn; then a tp ring on two nodes crosses at each of its links, and no message says so. On a
# new cluster let every rank print its host once: `srun --nodes=2 --ntasks-per-node=8 bash -c 'echo $SLURM_PROCID
# $(hostname)'`.

# %% [markdown]
# ## Questions (core, 5 min)
#
# **1.** A job has 32 ranks on 4 nodes of 8, dp = 4, pp = 2, tp = 4, in the order `tp-pp-dp-cp`. Do the groups of pp
# cross between nodes?
#
# <details><summary>Answer</summary>
#
# No. tp fills 4 ranks, and pp has the stride 4, so a pp group is r and r + 4, both on one node of 8. dp has the stride
# 8: each of its groups has one rank on every node.
# </details>
#
# **2.** A colleague's job gives other losses than yesterday, and the only change is the order of the axes. Is that
# possible?
#
# <details><summary>Answer</summary>
#
# Up to rounding the losses should be the same, since the order changes only who computes what. If they differ by more,
# something depends on the global rank that should depend on a coordinate: very often it is the part of the data that a
# rank reads, which must follow from its dp coordinate.
# </details>
#
# **3.** tp grows from 4 to 8, dp shrinks from 8 to 4, everything else stays. What happens to the bytes that a rank
# sends along tp, and along dp?
#
# <details><summary>Answer</summary>
#
# Along tp they grow to 7/3 of what they were: they are proportional to tp - 1. Along dp they fall to less than half:
# the rank holds half of the weights it held before, and 2 (p - 1)/p falls from 7/4 to 3/2.
# </details>
#
# **4.** An all-reduce over 16 ranks on two full nodes of 8 H100, and the same over 16 ranks that sit on 16 nodes, one on
# each. How many times as long does the second take, for a large tensor?
#
# <details><summary>Answer</summary>
#
# About 7. On two full nodes the rule gives min(365, 15 · 50) = 365 GB/s: eight adapters carry more than NVLink takes.
# With one rank in each node it is a single adapter, 50 GB/s.
# </details>
#
# **5.** (Lesson 04.) Two ranks of a dp group have 30 and 10 samples in a step. With which weights must their mean
# gradients be averaged?
#
# <details><summary>Answer</summary>
#
# With 30/40 and 10/40, their shares of the samples. The plain mean of the two would count each of the 10 samples three
# times as much as each of the 30.
# </details>

# %% [markdown]
# ## Recap
#
# | concept | formula or fact | in labcode |
# |---|---|---|
# | coordinates | mixed radix, the fastest axis first | `topology.GridShape.coords` |
# | group | the ranks that differ along the given axes only | `GridShape.groups` |
# | stride | product of the sizes of the faster axes | |
# | process groups | all ranks make all groups, in the same order | `comm.grid.Grid` |
# | DeviceMesh | the same groups, slowest axis first | `Grid.mesh` |
# | traffic of tp | 4 all-reduces of act in each layer | `perf.traffic.step_traffic` |
# | between nodes | links whose ends are on different nodes | `perf.traffic.across_nodes` |
# | act that pp sends | act/tp with sequence parallelism | `step_traffic(sequence_parallel=True)` |
# | rate of a group over nodes | min(inside, (n-1)/(k-1) · adapter) | `perf.two_level.group_link` |
# | price of tp | proportional to tp - 1, inside the node too | |
#
# ## Sources
#
# - Narayanan et al. 2021, arXiv:2104.04473, sections 2 and 3: bytes of each axis, idle pipelines, tensor parallel inside
#   nodes. Korthikanti et al. 2022, arXiv:2205.05198, section 4.2: sequence parallelism.
# - NCCL: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html (`NCCL_PXN_DISABLE`, `NCCL_ALGO`); nccl-tests,
#   doc/PERFORMANCE.md, for bus bandwidth. Bekman, Machine Learning Engineering, network:
#   https://github.com/stas00/ml-engineering for 381.8 GB/s and what collectives reach inside a node.
# - NCCL's trees: https://developer.nvidia.com/blog/massively-scale-deep-learning-training-nccl-2-4/; two nodes as a special
#   case of them: https://github.com/NVIDIA/nccl/issues/946
# - Liu et al. 2025, arXiv:2504.14960: a grid of their own for experts. NVIDIA GB200 NVL72, 2024.
# - torchtitan, its mesh: https://github.com/pytorch/torchtitan/blob/main/torchtitan/distributed/parallel_dims.py
# - Llama Team 2024, arXiv:2407.21783, section 3.3.2: order of the axes, context parallel.
# - Megatron-LM, its rank generator and default order:
#   https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/parallel_state.py
# - Rajbhandari et al. 2020, arXiv:1910.02054, sections 3.1 and 5: 16 bytes for each parameter, and who shares them out.
# - NVIDIA H100 datasheet, 2023: NVLink, 900 GB/s both ways together, and the peak in bfloat16. NVIDIA DGX H100
#   datasheet, 2022: 400 Gb/s per GPU.
# - PyTorch: https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.new_group and
#   https://docs.pytorch.org/docs/stable/distributed.html#devicemesh
# - SLURM, `--distribution`: https://slurm.schedmd.com/srun.html
