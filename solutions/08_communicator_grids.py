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
# Until now all ranks did the same: each held the whole model, and they shared out the data. A large model is cut in
# several ways at once. Some ranks hold other layers than the rest, some hold other parts of the same layer, and still
# there are copies that read different data. Every rank then belongs to several groups, and it talks to each of them
# about something else. In this lesson you write the arithmetic that says who belongs to whom, you make the groups, and
# you choose a grid by what it costs.
#
# ## Goals
#
# - turn a rank into coordinates, and find all groups along any axes, for any order of the axes;
# - make the process groups on every rank, and recognise the errors that come from making them carelessly;
# - predict which bytes a step of training sends between nodes, and count them in a real step;
# - choose the sizes and the order of a grid by what they cost.
#
# **Time**: 130 minutes, and 10 more for what is optional. Good places for a break are after section 2 and after
# section 3.
#
# **Needs**: lesson 01 (sections 1 and 3), lesson 04 (section 1).

# %%
import torch
import torch.distributed as dist

from labcode.comm.grid import Grid
from labcode.lab import Ranks, check, compare, plot, show_source
from labcode.recipes import gpt_shape
from labcode.topology import GridShape

ranks = Ranks(4, timeout_s=15)

# %% [markdown]
# ## 1. From one number to coordinates (core, 15 min)
#
# There are four common ways to divide the work, and we call each of them an **axis**. Each has a lesson of its own;
# here it is enough to know what its ranks share out, and what they send each other.
#
# | axis | what its ranks share out | what they send each other |
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
# that number. It works as with a clock, where 3725 seconds are 1 hour, 2 minutes and 5 seconds. The seconds tick
# fastest; when they have gone round, the minutes move on by one. In the same way one axis of the grid ticks fastest.
# The **order** of a grid names the axes from the fastest to the slowest. In `tp-cp-dp-pp`, which is the usual one, tp
# ticks fastest.

# %% tags=["figure"]
shape = GridShape(dp=2, pp=2, tp=4)  # order="tp-cp-dp-pp"
plot.digits(
    shape, title="tp changes at every rank, dp at every fourth, pp at every eighth",
    alt="Sixteen ranks with their coordinates: tp counts 0 to 3 again and again, "
        "dp changes after four ranks and pp after eight",
)

# %% [markdown]
# Let us do one by hand: rank 6. Divide by the size of the fastest axis: 6 = 1 · 4 + **2**, so tp is 2, and 1 is left.
# The next axis is cp with size 1: 1 = 1 · 1 + **0**, so cp is 0 and 1 is left. (The picture leaves cp out, because the
# coordinate of an axis of size 1 is always 0.) Then dp with size 2: 1 = 0 · 2 + **1**, so dp is 1, and 0 is left for
# pp. The picture agrees. Numbers whose digits have different sizes, like these, or like hours, minutes and seconds, are
# called **mixed radix**.
#
# **Predict.** What are the coordinates tp, dp and pp of rank 13? And with which other rank does it add up its
# gradients? That is the rank which agrees with it in everything but dp.

# %% tags=["predict"]
tp_of_13 = 13 % 4
dp_of_13 = 13 // 4 % 2
pp_of_13 = 13 // 8
other_rank = 13 - 4

# %% tags=["nbval-check-output"]
coords = shape.coords(13)
print(coords)
compare("tp of rank 13", tp_of_13, coords["tp"], within=1, found="computed")
compare("dp of rank 13", dp_of_13, coords["dp"], within=1, found="computed")
compare("pp of rank 13", pp_of_13, coords["pp"], within=1, found="computed")
for group in shape.groups("dp"):
    if 13 in group:
        other = group[0]
        compare("other rank along dp", other_rank, other, within=1, found="computed")

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
# ## 2. Groups (core, 20 min)
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
plot.grid(
    shape, color_by="tp", nodes=2,
    alt="Two nodes of eight ranks; each tensor-parallel group is four neighbours "
        "on one node",
)

# %% [markdown]
# How far apart are two neighbours of a group? One step along an axis passes over all the ranks that the faster axes
# fill. This distance is called the **stride** of the axis: the product of the sizes of all faster axes. In the picture
# dp has the stride 4, because tp fills four ranks before dp moves on.
#
# **Predict.** Take other sizes, dp = 4, pp = 2 and tp = 2, and the order `dp-pp-tp-cp`: dp ticks fastest, and tp is
# slower than dp and pp. What is the stride of tp? Which other rank is in the tp group of rank 3?

# %% tags=["predict"]
stride_of_tp = 4 * 2
partner_of_3 = 3 + 4 * 2

# %% tags=["figure", "nbval-check-output"]
turned = GridShape(dp=4, pp=2, tp=2, order="dp-pp-tp-cp")
first, second = turned.groups("tp")[3]
print("the tp group of rank 3:", [first, second])
compare("stride of tp", stride_of_tp, second - first, within=1, found="computed")
compare("partner of rank 3", partner_of_3, second, within=1, found="computed")
plot.grid(
    turned, color_by="tp", nodes=2,
    alt="Two nodes of eight ranks in the order dp-pp-tp: every tensor-parallel group "
        "has one rank on each node",
)

# %% [markdown]
# In the usual order the tp groups of these sizes would be neighbours: 0 and 1, 2 and 3, and so on. In this order there
# are as many groups, and each rank computes what some rank computed before. But every tp group reaches over both nodes,
# and the four ranks of a dp group are next to each other.
#
# Axes also work **together**. Ranks along cp hold the same weights and see other tokens, just as ranks along dp hold
# the same weights and see other samples. So the gradient of a weight is summed over both. The group for that sum is
# `groups("dp", "cp")`: all ranks that agree in pp and tp.

# %% tags=["nbval-check-output"]
four_axes = GridShape(dp=2, pp=2, cp=2, tp=2)
print("along dp:       ", four_axes.groups("dp"))
print("along dp and cp:", four_axes.groups("dp", "cp"))

# %% [markdown]
# **Takeaway: the order of the axes does not change what is computed, up to rounding, as long as each rank picks its
# data by its dp coordinate. It decides how far apart the members of a group are, and so which groups stay inside a
# node.**

# %% [markdown] tags=["exercise"]
# ### Exercise 8.2 · All groups, along any axes
#
# This function is the heart of every framework for large models; Megatron-LM calls it its rank generator. `order` and
# `sizes` are those of exercise 8.1; you may call your `my_coords` or divide once more. `axes` is a tuple with any number
# of axes: `("tp",)`, `("dp", "cp")`, or even `()`, whose groups are single ranks. Return a list of groups, each of them
# a list of ranks that ascend. The order of the groups is up to you.

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

# %% [markdown]
# Here is how labcode writes it. It goes the other way: it runs through all coordinates that are fixed within a group,
# and computes the ranks from them. So it can compute the members of a single group directly, while a dictionary that is
# filled rank by rank has to look at all ranks, even if there are ten thousand of them and only one group is needed.

# %%
show_source(GridShape.groups)

# %% [markdown] tags=["solution-only"]
# *For the instructor.* The usual mistake in 8.2 is to group by the coordinates along `axes` in place of the others: ask
# what the ranks of a group have in common. With `my_coords` the inner loop is `tuple( coords[axis] for axis in sizes if
# axis not in axes)`.

# %% [markdown]
# ## 3. Make the groups real (core, 30 min)
#
# So far this was arithmetic. `dist.new_group(members)` makes a process group of some ranks. It is itself a collective:
# **all** ranks of the job have to call it, members or not, and in the **same order**. Each rank counts its calls, and
# the count becomes the group's name. Under that name the members leave their addresses in the store (lesson 01, section
# 1) and look for each other's.
#
# <details><summary>Is there a way in which only the members call it?</summary>
#
# Yes, `new_group(members, use_local_synchronization=True)`. PyTorch then makes the name of the members' ranks and of the
# number of groups that each of them is in already. If two members have made different numbers of groups before, their
# names differ and they do not meet. So the order matters here as well.
# </details>
#
# What if the order differs? Suppose that rank 3 makes the dp groups before the tp groups. That happens when code loops
# over a `set` of names of axes, because Python orders the strings of a set differently in each process. Let us do it on
# purpose, with four ranks, dp = 2 and tp = 2. Every rank then adds up the ranks of its groups.

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
# In call 2 rank 2 looks for its tp partner, and finds rank 3, who believes that it has met rank 1 of its dp group. In
# training, activations would be added to gradients. Where the tensors have the same size, nothing stops that.
#
# The second mistake is to leave a rank out. Here rank 3 takes another branch and does not make the dp groups at all.
# The group gives up after 3 seconds.

# %% tags=["raises-exception"] raises="RankError: rank 1: DistStoreError: wait timeout after 3000ms"
from datetime import timedelta


def absent(rank):
    for members in DP_GROUPS:
        if rank != 3:
            dist.new_group(members, timeout=timedelta(seconds=3))

ranks.run(absent)

# %% [markdown]
# The error names rank 1, which is the one that **waited**. What each rank did, at the end of the message, is added by
# our pool; a job on a cluster does not tell you. There, the key in the message says who is missing. It looks like
# `/0//6//cpu//0/1`. Two of its parts matter:
#
# - `6`, before `cpu`, is the name of the group, which is the number of the call. The four calls of the cell before
#   count, too.
# - `1`, at the end, is the number of a member within the group. Each member leaves its address under its own number,
#   and this one never came. Member 1 of the group [1, 3] is rank 3.
#
# NCCL waits later, in the first collective of the group, unless `init_process_group` was given a `device_id`; and it
# words it differently. But the question is the same: which member of which group never came?
#
# With NCCL there is one more rule, and it holds after the groups are made. Every group is a communicator of its own: it
# is created at the latest in its first collective, and takes some GPU memory. If collectives of **several** groups are
# under way at once, all ranks have to start them in one consistent order, across the groups too. Suppose that rank 0
# starts the sum over tp first and then that over dp, and rank 1 of its tp group starts them the other way round. Then
# each may wait for the other, because a collective occupies the GPU until its partners have come. PyTorch's
# documentation of `new_group` calls this "safe concurrent usage". Gloo, which runs here, does not show the mistake.

# %% [markdown] tags=["exercise"]
# ### Exercise 8.3 · Make them all
#
# Write the function that a rank calls to get its groups. `groups_of` is a dictionary that gives for each axis all its
# groups, as exercise 8.2 does: `{"tp": [[0, 1], [2, 3]], "dp": [[0, 2], [1, 3]], ...}`. Return this rank's own process
# group for each axis. Careful: each axis has the same list of groups on all ranks, but the dictionary may hold
# the axes in another order on each rank.

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
# may still change. On GPUs the mesh is one of `"cuda"`.

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
# In labcode `Grid.create(shape)` makes the groups of every combination of axes, and goes through them in one fixed
# order. It has a `DeviceMesh` over the same groups, `grid.mesh`, for those parts of PyTorch that want one.
# Three axes have size 1 in many jobs, and their groups have one member. They are real groups all the same, so that
# model code never has to ask whether an axis is in use.
#
# **Predict.** Four ranks, dp = 2, tp = 2, but in the order `dp-tp-cp-pp`. What does rank 1 get as the sum of the ranks
# over its tp group, over its dp group, and over its pp group?

# %% tags=["predict"]
sum_over_tp = 1 + 3
sum_over_dp = 0 + 1
sum_over_pp = 1

# %% tags=["nbval-check-output"]
def sums(rank, shape):
    grid = Grid.create(shape)
    found = {}
    for axis in ("tp", "dp", "pp"):
        total = torch.tensor(rank)
        dist.all_reduce(total, group=grid.group(axis))
        found[axis] = total.item()
    return found

of_rank_1 = ranks.run(sums, GridShape(dp=2, tp=2, order="dp-tp-cp-pp"))[1]
compare("rank 1, sum over tp", sum_over_tp, of_rank_1["tp"], within=1)
compare("rank 1, sum over dp", sum_over_dp, of_rank_1["dp"], within=1)
compare("rank 1, sum over pp", sum_over_pp, of_rank_1["pp"], within=1)

# %% [markdown]
# The third mistake is the most frequent one, and the cheapest, because it is found before any group exists: sizes whose
# product is not the number of ranks. Read what was computed, what was found, and what to do.

# %% tags=["raises-exception"] raises="RankError: rank 0: ValueError: dp*pp*cp*tp = 2*1*1*3 = 6 but WORLD_SIZE is 4"
def too_large():
    Grid.create(GridShape(dp=2, tp=3))

ranks.run(too_large)

# %% [markdown]
# **Takeaway: every rank makes every group, in the same order. If one does not, the others hang when you are lucky, and
# get wrong sums when you are not.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Let the room fill in the last column of the table before they see it. In 8.3 most write `for
# axis in groups_of`, and learn from the check that call 1 differs between the ranks; some make only the groups they are
# in. That second version can even seem to work here, because every rank is in one group of each axis. But [0, 1] and
# [2, 3] then get the same name, and their members write their addresses under the same keys, so it is luck who meets
# whom.

# %% [markdown]
# ## 4. What crosses between nodes (core, 35 min)
#
# A cluster has two kinds of links. Inside a node, GPUs talk over NVLink: on an H100, 450 GB/s in each direction.
# Between nodes, each GPU has a network card; a common one, InfiniBand NDR, carries 400 Gb/s, which is 50 GB/s. So the
# same message takes nine times as long once it leaves the node. It pays to count the bytes that leave it.
#
# We begin with a case that is small enough to run here: a GPT of two layers on four ranks, dp = 2 and tp = 2, and we
# pretend that ranks 0 and 1 are one node and ranks 2 and 3 another. The picture shows the rings of both axes in the
# usual order.

# %% tags=["figure"]
small_grid = GridShape(dp=2, tp=2)
plot.links(
    small_grid, axes_shown=("tp", "dp"), nodes=2, title="Order tp-dp",
    alt="Four ranks on two nodes: the two rings of tp stay inside, those of dp cross",
)

# %% [markdown]
# What is sent along these links in one step of training?
#
# - **dp** makes one all-reduce of the gradients in each step (lesson 04, section 1).
# - **tp** makes four all-reduces in every layer, two in forward and two in backward, one more below the first layer and
#   one above the last. Lesson 09 shows why. What they add up are activations. We call *act* the activations that a rank
#   holds between two layers: samples of the rank × tokens × hidden size numbers.
#
# And in a ring all-reduce over p ranks, each link carries 2 (p - 1)/p times the tensor (lesson 01, section 3). With p =
# 2 that is exactly once the tensor.
#
# Let us do the sum for dp. A rank holds half of each layer, so about half of the weights, and its gradients have 4 bytes
# each. In the picture four links of dp cross, and each carries the gradients of one rank once.

# %% tags=["nbval-check-output"]
import itertools
from collections import Counter
from dataclasses import replace

from labcode.comm.counting import CollectiveSpy
from labcode.config import GPTConfig
from labcode.models import gpt
from labcode.models.parallelize import parallelize
from labcode.perf.traffic import across_nodes, step_traffic
from labcode.teach.labs.l08_costs import crossing_bytes
from labcode.topology import AXES

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
# To check both numbers we run one real step of the model on the four ranks, forward, backward and the sum of the
# gradients, and count. To PyTorch a collective is an operation like any other, and `CollectiveSpy` of labcode is told of
# each one before it starts: of which ranks are in its group, and how many bytes its tensor has. `parallelize` cuts the
# model as you will learn to do it in lesson 09.

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
# `across_nodes(sent, ranks_per_node)` adds up the bytes of the links whose two ends are on different nodes. You will
# write it yourself in exercise 8.4.

# %% tags=["nbval-check-output"]
tp_first = counted_step(small_grid)
dp_first = counted_step(replace(small_grid, order="dp-tp-cp-pp"))
few_bytes = across_nodes(tp_first, 2)
many_bytes = across_nodes(dp_first, 2)
compare("tp-dp", dp_crossing, few_bytes, within=1.1, unit="B", found="counted")
compare("dp-tp", tp_crossing, many_bytes, within=1.02, unit="B", found="counted")
print(f"dp-tp: {many_bytes / few_bytes:.0f} times as many bytes between the nodes")

# %% [markdown]
# Tensor parallelism sends so much more because it sends activations, in every layer and for every sample, while the
# gradients travel once in a step, however many samples there were. The predictions are a little too small. For dp, 8 %
# are missing: the weights of the positions and of the norms are not halved, every rank of tp has all of them. For tp it
# is half a percent: the loss is summed over tp as well.
#
# `step_traffic` of labcode does such sums for all four axes, and gives the bytes of every single link. It leaves out
# the same things, and the two all-reduces of act outside the layers as well.

# %% tags=["nbval-check-output"]
of_axes = step_traffic(small, small_grid, global_batch=BATCH, value_bytes=4)
for axis, link in {"tp": (0, 1), "dp": (0, 2)}.items():
    share = of_axes[axis][link] / tp_first[link]
    print(f"{axis}: step_traffic has {share:.0%} of the bytes that were counted")

# %% [markdown]
# With 2 layers it has 8 of the 10 all-reduces; with 32 layers it has 128 of 130, and norms and positions hardly count.
# So we use it for a model that does not fit here: a GPT with 7 billion parameters, 32 layers and hidden size 4096, on
# the 16 GPUs of section 1, with 256 sequences of 2048 tokens in a step. Activations have 2 bytes now (bfloat16). The
# other two axes send:
#
# - **pp**: act to the next stage in forward, and as much gradient back. With pp = 2 there is one boundary: each rank of
#   the first stage sends act once to its partner in the second, and gets as much back.
# - **cp**: keys and values of the attention. Our grid has cp = 1, so nothing is sent.
#
# **Predict.** In the usual order pp is the slowest axis, so each of the two nodes holds one stage. How many bytes cross
# between the nodes in a step? Count the bytes of act for one rank first: dp = 2 shares out the sequences, and act is
# not divided by tp. Then count the ranks that send.

# %% tags=["predict"]
act_7b_bytes = 128 * 2048 * 4096 * 2
usual_order_bytes = 16 * act_7b_bytes  # 8 ranks send forward, 8 send back

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
plot.bars(
    by_cost, ylabel="GB between nodes in one step", fmt="{:.0f}",
    title="Little crosses with tp fastest, very much with tp slowest",
    alt="With tp fastest 34 to 88 gigabytes cross, with tp slowest more than a "
        "thousand; in the middle it depends on the size of the node",
)

# %% [markdown]
# There are 6 orders of tp, dp and pp. On nodes of 8 only the slowest axis crosses, since the two faster ones fill a node
# or half of one. On nodes of 4 the second axis crosses as well wherever the two faster ones have 8 ranks. So an order
# with tp in the middle is good on nodes of 8 and bad on nodes of 4.
#
# What do the bytes cost in time? In a ring, all links carry the same bytes at the same moment, so the **slowest link
# decides**. This function is all we need:

# %% tags=["nbval-check-output"]
NVLINK = 450e9  # bytes per second, each way, for each GPU
INFINIBAND = 50e9

def slowest_link_s(sent):
    """Seconds in which the slowest of these links is busy, on nodes of 8."""
    slowest = 0.0
    for (sender, receiver), num_bytes in sent.items():
        is_inside = sender // 8 == receiver // 8
        speed = NVLINK if is_inside else INFINIBAND
        slowest = max(slowest, num_bytes / speed)
    return slowest

for order in ("tp-cp-dp-pp", "dp-pp-tp-cp"):
    sent = step_traffic(model, replace(shape, order=order), global_batch=256)
    print(f"{order}: tp takes {slowest_link_s(sent['tp']):.2f} s")
flops = 6 * model.num_parameters * 256 * 2048
compute_s = flops / (16 * 0.4 * 989e12)
print(f"computing takes {compute_s:.2f} s")

# %% [markdown]
# (Each parameter takes 6 FLOPs for each token: lesson 02, section 1. We assume that a GPU computes at 40 % of an H100's
# peak of 989 TFLOP/s in bfloat16.) With tp inside the node, its
# communication takes a seventh of the computing time; across nodes it takes longer than the computing. And this time
# can hardly hide behind the computing, because the next matrix product needs the sum. The gradients of dp can travel
# while backward still computes (lesson 05, section 2). These are the best speeds of the links; real runs lose more,
# and latency comes on top.
#
# Which of dp and pp should be the slowest axis? The bytes of pp grow with the batch and those of dp do not, so there is
# a batch at which they are equal. Let us find it. If dp is slowest, 16 links cross, and each carries the gradients of
# an eighth of the model: 16 · P/8 · 4 bytes, with P parameters. If pp is slowest, 16 links carry act, as in your
# prediction. With b sequences in a step, b/2 for each copy, that is 16 · b/2 · 2048 · 4096 · 2 bytes: tokens, hidden
# size, bytes of a number. The next cell solves for the b at which both are equal.

# %% tags=["nbval-check-output"]
dp_bytes = 16 * model.num_parameters / 8 * 4
pp_bytes_per_sequence = 16 / 2 * 2048 * 4096 * 2
print(f"b = {dp_bytes / pp_bytes_per_sequence:.0f} sequences")

# %% [markdown]
# So both choices exist. Llama 3 was trained with dp slowest, in the order TP, CP, PP, DP, because what dp sends can be
# sent before it is needed, while the ranks compute. Megatron-LM's default is `tp-cp-ep-dp-pp`, with pp slowest (ep
# divides the experts of models that have some).
#
# **Takeaway: the bytes between nodes can be predicted before anything runs. Put the axis that sends most inside the
# node. That is tp; whether dp or pp comes last depends on the batch, and on what can be hidden.**

# %% [markdown] tags=["exercise"]
# ### Exercise 8.4 · Find the best order
#
# With four axes there are 24 orders. Write two functions.
#
# 1. `my_crossing` counts what crosses. `sent` says what each link carries, such as `{(0, 1): 4096, (1, 0): 4096}` for
#    two ranks that send each other 4096 bytes. Ranks fill the nodes in order. Do not use `across_nodes`.
# 2. `best_order` tries all orders for the given model, grid, node size and batch, and returns the one with the fewest
#    bytes between nodes, all axes together. `AXES` holds the names of the four axes, and `itertools.permutations(AXES)`
#    gives all their orders. `replace(shape, order=...)` and `step_traffic` you have seen above; leave the other
#    settings of `step_traffic` as they are.

# %% tags=["exercise"]
def my_crossing(sent, ranks_per_node):
    """The bytes of {(sender, receiver): bytes} that cross between nodes."""
    ### BEGIN SOLUTION
    total = 0
    for (sender, receiver), num_bytes in sent.items():
        node_of_sender = sender // ranks_per_node
        node_of_receiver = receiver // ranks_per_node
        if node_of_sender != node_of_receiver:
            total += num_bytes
    return total
    ### END SOLUTION


def best_order(model, shape, ranks_per_node, global_batch):
    """The order, such as "tp-cp-dp-pp", with the fewest bytes between nodes."""
    ### BEGIN SOLUTION
    best = None
    fewest = float("inf")
    for axes in itertools.permutations(AXES):
        order = "-".join(axes)
        ordered = replace(shape, order=order)
        total = 0
        for sent in step_traffic(model, ordered, global_batch=global_batch).values():
            total += my_crossing(sent, ranks_per_node)
        if total < fewest:
            fewest = total
            best = order
    return best
    ### END SOLUTION

# %% tags=["check"]
check("8.4", my_crossing, best_order)

# %% [markdown]
# Here is labcode's count of what crosses, and `step_traffic`, which says what each axis sends: rings for tp, cp and dp,
# and for pp what goes from stage to stage. Its docstring speaks of cp for the most part, and how K and V travel along
# cp is the subject of lesson 11; skip that for now.

# %%
show_source(across_nodes)
show_source(step_traffic)

# %% [markdown] tags=["solution-only"]
# *For the instructor.* The prediction of the worked example is where the time goes: act of 16 sequences, not of 32, is
# what people forget. In 8.4 some take the distance of two ranks for a difference of nodes, others the largest axis in
# place of the sum, or the bytes of all links; the latter are the same for every order. Ask: why does `cp-tp-dp-pp` cost
# the same as `tp-cp-dp-pp` here? (cp has size 1.)

# %% [markdown]
# ## 5. Choose a grid (core, 20 min)
#
# Now you choose the sizes as well. There are 64 H100 in 8 nodes, a GPT of 13 billion parameters with 40 layers, and 512
# sequences in a step. Three things cost something:
#
# - **Memory.** Weights, gradients and the optimizer take 16 bytes for each parameter (Rajbhandari et al. 2020). tp and
#   pp share the parameters out, dp and cp do not.
# - **Links.** For each axis the seconds of its slowest link, as above.
# - **Idle stages.** A pipeline of pp stages works on m **micro-batches**, parts of the batch that follow each other
#   through the stages. At first the last stages wait for work, at the end the first ones have none. All in all a stage
#   is idle for (pp - 1)/m of the computing time (Narayanan et al. 2021; lesson 12 shows it). With micro-batches of one
#   sequence, m = 512/dp.
#
# `table(costs(...))` prints all three for any grid. Here is the obvious one: tp fills the node, and there is no
# pipeline. Change it and run the cell as often as you like.

# %% tags=["nbval-check-output"]
from labcode.teach.labs.l08_costs import cheapest, costs, table

model_13b = gpt_shape("gpt_13b")
trial = GridShape(dp=8, tp=8)
print(table(costs(model_13b, trial, batch=512)))

# %% [markdown] tags=["exercise"]
# ### Exercise 8.5 · A grid for 64 GPUs
#
# Find a grid, `GridShape(dp=.., pp=.., cp=.., tp=.., order=..)`, for which three things hold. What you leave out is 1,
# or the usual order.
#
# 1. it has 64 ranks;
# 2. memory is at most 60 GB on each GPU;
# 3. at most 0.45 s are lost, on the links and idle together.

# %% tags=["exercise"]
### BEGIN SOLUTION
my_grid = GridShape(dp=4, pp=8, tp=2)  # stages one node apart, tp and dp inside a node
### END SOLUTION

# %% tags=["check"]
check("8.5", my_grid)

# %% [markdown]
# If you have tried some grids, you have noticed that tp = 8 never passes, although it stays inside the node. All grids
# that pass have tp = 1 or tp = 2, and the cheapest of them has no tp at all: dp = 4, pp = 8, cp = 2 loses 0.357 s. Does
# that contradict the rule "tensor parallel inside the node"?
#
# Take two grids that both keep tp inside the node: dp = 4, pp = 8, tp = 2, and dp = 1, pp = 8, tp = 8. Both have 64
# GPUs, the same model and the same 512 sequences.
#
# **Predict.** How many times as long are the links of tp busy with tp = 8 as with tp = 2? Think of the bytes of act on
# a rank, and of the ring's 2 (p - 1)/p.

# %% tags=["predict"]
act_times_as_large = 4  # dp = 1 in place of 4
ring_times_as_much = (2 * 7 / 8) / (2 * 1 / 2)
times_as_long = act_times_as_large * ring_times_as_much

# %% tags=["nbval-check-output"]
with_2 = costs(model_13b, GridShape(dp=4, pp=8, tp=2), batch=512)
with_8 = costs(model_13b, GridShape(dp=1, pp=8, tp=8), batch=512)
print(f"tp = 2: {with_2.link_s['tp']:.2f} s, tp = 8: {with_8.link_s['tp']:.2f} s")
ratio = with_8.link_s["tp"] / with_2.link_s["tp"]
compare("times as long", times_as_long, ratio, within=1.001, found="computed")

# %% [markdown]
# Here is the same for any grid. Each rank makes 4 all-reduces in each of its L/pp layers, and sends 2 (tp - 1)/tp times
# act, which has B/dp · S · H numbers of 2 bytes:
#
# $$4 \cdot \frac{L}{pp} \cdot \frac{2\,(tp-1)}{tp} \cdot \frac{B}{dp}\,S H \cdot 2
# = \frac{16\,B S H L\,(tp-1)}{dp \cdot pp \cdot tp} = \frac{16\,B S H L}{N}\,(tp-1).$$
#
# With cp = 1 the product of the three sizes is the number of GPUs, N. So with the same GPUs, model and batch, what tp
# costs is proportional to tp - 1. Each further rank of tp therefore has its price, even on NVLink.
#
# The rule says **where** tp belongs, and how large it can be. It does not say how large it should be. In the exercise,
# pp = 8 and tp = 2 already leave 13 GB of weights and optimizer on each GPU, so a larger tp buys nothing.
#
# When do we need more of it? Take the same model and the same 512 sequences, and more and more GPUs. The picture shows
# for each tp the best grid with these GPUs. (cp shares out the tokens of a sequence and could help as well; here we
# keep it at 1.)

# %% tags=["figure"]
num_gpus = [64, 128, 256, 512, 1024]
lost_shares = {}
for tp in (1, 2, 4, 8):
    lost_shares[f"tp = {tp}"] = []
    for n in num_gpus:
        grid, found = cheapest(model_13b, n, batch=512, tp=tp, room_bytes=60e9)
        lost_shares[f"tp = {tp}"].append(found.lost_s / found.compute_s)
plot.lines(
    lost_shares, x=num_gpus, logx=True, logy=True, xlabel="GPUs, always 512 sequences",
    ylabel="time lost / time computing",
    title="The more GPUs for one batch, the larger the best tp",
    alt="At 64 GPUs tp of 2 or 1 loses least; at 128 and 256 it is 4, from 512 on 8",
)

# %% [markdown]
# Each line says what is lost for one second of computing.
#
# - **With tp = 1 all additional GPUs go to dp.** Then there are fewer micro-batches for each pipeline, and it idles
#   more. The all-reduce of the gradients takes as long as ever, and there is less and less computing beside it. So the
#   line climbs.
# - **With tp = 8 the line begins high, because of what tp sends.** That falls with the number of GPUs as the computing
#   does, so its share stays the same, about 0.25. The line climbs because stages idle longer and dp sends more for each
#   second of computing. tp itself takes more GPUs without asking for more samples.
#
# At 64 GPUs a small tp is best. At 128 and 256 it is tp = 4, though at 128 only just. At 512 tp = 8, which fills the
# node as the rule says, is as good as 4, and at 1024 it is clearly ahead.
#
# The other reason for a large tp is memory: more stages do not make a single layer smaller, and tp does. So the rule of
# Narayanan et al., tensor parallel up to the size of a node and pipeline parallel beyond, is meant for models that have
# to be cut into that many parts. Across nodes the same bytes of tp would take nine times as long.
#
# **Takeaway: tp belongs inside the node, and costs in proportion to tp - 1 even there. Take as much of it as memory and
# the number of samples force you to, and no more.**
#
# What does this small model of cost leave out?
#
# <details><summary>Think of three things, then open</summary>
#
# - **Latency**: many small messages cost more than their bytes.
# - **Overlap**: the gradients of dp hide behind backward; the sums of tp do not.
# - **Memory of activations**, which often decides how large tp and cp have to be (lesson 10).
# - **Thin matrices**: with tp = 8 each product is narrower, and reaches less of the GPU's peak.
# - **Uneven stages**: embedding and head belong to one of the stages each (lesson 12).
# - **Sharded optimizers**: most of the 16 bytes, or all of them, can be divided by dp as well. That is called ZeRO, and
#   lesson 13 is about it.
# </details>

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Let people shout grids and run the table on the projector. Grids that pass: dp 8 pp 8; dp 4 pp 8
# cp 2; dp 4 pp 8 tp 2; dp 2 pp 8 cp 2 tp 2. The best of them, with cp = 2, loses 0.357 s. The discussion is worth more
# than the grid: why is pp = 16 refused (40 layers), and why is dp = 64 impossible (206 GB)? Derive the formula with (tp
# - 1) on the board.

# %% [markdown]
# ## 6. Scatter/gather (optional, 10 min)
#
# Look again at what pp sends in the 7B model of section 4. The four ranks of a tp group all hold the same act, and each
# sends the whole of it to its partner in the next stage: the same numbers cross four times. Megatron-LM can avoid that.
# Each rank of tp sends only its quarter, and in the next stage an all-gather over tp, inside the node, puts act together
# again. Narayanan et al. call it the **scatter/gather optimization**.
#
# Without it, pp and dp send the same number of bytes between nodes at 397 sequences (section 4).
#
# **Predict.** With it, at how many sequences do they?

# %% tags=["predict"]
equal_at = 4 * 397

# %% tags=["figure"]
from labcode.perf.traffic import across_nodes, step_traffic

model = gpt_shape("gpt_7b")
pp_slowest = GridShape(dp=2, pp=2, tp=4, order="tp-cp-dp-pp")
dp_bytes = 16 * model.num_parameters / 8 * 4
batches = [2**k for k in range(5, 13)]

def pp_crossing_gb(batch, scatter_gather):
    sent = step_traffic(
        model, pp_slowest, global_batch=batch, scatter_gather=scatter_gather
    )
    return across_nodes(sent["pp"], 8) / 1e9

shared_per_sequence = pp_crossing_gb(32, True) * 1e9 / 32
found_at = dp_bytes / shared_per_sequence
compare("sequences", equal_at, found_at, within=1.02, found="computed")
plot.lines(
    {
        "pp slowest": [pp_crossing_gb(batch, False) for batch in batches],
        "pp slowest, scatter/gather": [
            pp_crossing_gb(batch, True) for batch in batches
        ],
        "dp slowest": [dp_bytes / 1e9 for _ in batches],
    },
    x=batches, logx=True, logy=True, xlabel="sequences in a step",
    ylabel="GB between nodes",
    title="Scatter/gather moves the break-even from 400 to 1600 sequences",
    alt="The bytes of pp grow with the batch and those of dp do not; they meet at "
        "about 400 sequences, and at 1600 where the ranks of tp share what pp sends",
)

# %%
ranks.close()

# %% [markdown]
# ## 7. From here to GPUs and SLURM (core, 5 min)
#
# `Ranks(4)` computes on the CPU on every machine, where gloo carries the tensors. `Ranks(4, device="cuda")` gives each
# rank a GPU, and a CUDA tensor goes through the same groups over NCCL. In a program that torchrun or srun starts, the
# two lines are `bootstrap.start()` and `Grid.create(shape)`.
#
# All of sections 4 and 5 rests on one assumption: **ranks fill the nodes in blocks**, so that a rank's node is `rank //
# 8`. torchrun does that. So does `srun` by default (`--distribution=block`). With `--distribution=cyclic` it deals the
# ranks out to the nodes in turn; then every tp ring crosses at each of its links, and no message says so. On a new
# cluster let every rank print its host once: `srun --nodes=2 --ntasks-per-node=8 bash -c 'echo $SLURM_PROCID
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
# **4.** Why must every rank call `new_group` for groups in which it is not?
#
# <details><summary>Answer</summary>
#
# The name of a group is the number of the call. A rank that skips a call gives all its later groups other names than
# the rest of the ranks do, and meets the wrong ones or nobody.
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
# | between nodes | a ring over two nodes crosses twice; the slowest link decides | `perf.traffic.across_nodes` |
# | scatter/gather | pp sends 1/tp of act over each link | `step_traffic(scatter_gather=True)` |
# | price of tp | proportional to tp - 1, inside the node too | |
#
# ## Sources
#
# - Narayanan et al. 2021, arXiv:2104.04473, sections 2 to 4: bytes of each axis, idle pipelines, tensor parallel inside
#   nodes, scatter/gather.
# - Llama Team 2024, arXiv:2407.21783, section 3.3.2: order of the axes, context parallel.
# - Megatron-LM, its rank generator and default order:
#   https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/parallel_state.py
# - Rajbhandari et al. 2020, arXiv:1910.02054, section 3.1: 16 bytes for each parameter.
# - NVIDIA H100 datasheet, 2023: NVLink, 900 GB/s both ways together, and the peak in bfloat16. NVIDIA DGX H100
#   datasheet, 2022: 400 Gb/s per GPU.
# - PyTorch: https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.new_group and
#   https://docs.pytorch.org/docs/stable/distributed.html#devicemesh
# - SLURM, `--distribution`: https://slurm.schedmd.com/srun.html
