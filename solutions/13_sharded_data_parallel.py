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
# # 13 · ZeRO and FSDP by hand: sharded data parallel
#
# Data parallelism copies the whole model to every rank. All copies hold the same weights, keep the same optimizer state
# and compute the same update. In this lesson you remove the copies, one kind after the other, until nothing is kept
# twice. What you end up with is called ZeRO in DeepSpeed and FSDP in PyTorch. Lesson 13b takes it to real sizes: how
# many tokens hide the messages, what changes over several nodes, and a whole script with PyTorch's FSDP2.
#
# ## Goals
#
# - predict what a rank keeps for weights, gradients and optimizer at each stage of ZeRO, and measure it;
# - write an optimizer whose state is divided over the ranks;
# - count what each stage sends, and say why stages 1 and 2 send no more than DDP;
# - write a layer that keeps a part of its weight and borrows the rest, in forward and in backward.
#
# **Time**: 138 minutes. Good places for a break are after sections 2 and 3. If you came for FSDP2 alone, take section
# 1, the text of section 3 and section 4 (without exercise 13.4), and then lesson 13b. **Needs**: lessons 01 (section 2)
# and 04 (section 1). For sections 2 to 4 also lesson 01 (sections 4 and 6), lesson 04 (section 4) and lesson 05
# (sections 2 and 3).

# %%
import torch
import torch.distributed as dist
from torch import nn

from course.lab import Ranks, check, compare, plot
from labcode.comm.counting import counted
from labcode.models.gpt import GPT
from labcode.parallel.zero.cut import piece_of
from labcode.perf.alpha_beta import bytes_sent

ranks = Ranks(4)


def count(calls, kind):
    """How many of some collectives are of this kind."""
    return sum(call.kind == kind for call in calls)

# %% [markdown]
# ## 1. What data parallelism keeps p times (core, 14 min)
#
# Take a model with N parameters that is trained with AdamW in mixed precision. The matmuls are computed in 16-bit
# numbers, and the optimizer works on 32-bit copies of the weights, the **master weights**. AdamW also keeps two
# averages for each parameter, the first and the second moment. For each parameter a rank keeps
#
# | what | bytes | who needs it |
# |---|---|---|
# | weight | 2 | forward and backward |
# | gradient | 2 | the optimizer, once per step |
# | master weight | 4 | the optimizer |
# | first and second moment | 4 + 4 | the optimizer |
#
# Together that is 16 bytes, 12 of which are the optimizer's. (Megatron-LM by default keeps the gradient of a bfloat16
# weight in 4 bytes, which makes 18.) On p data-parallel ranks the same 16 bytes exist p times. Now look at the last
# column. The optimizer's 12 bytes are needed once per step, for an update that all ranks compute alike. It would be
# enough if **one** of them computed it.
#
# Rajbhandari et al. (2020) shard these bytes over the ranks in three stages. They call it ZeRO, for *zero redundancy
# optimizer*:
#
# - **stage 1** shards the optimizer's state: each rank keeps 12/p bytes of it for each parameter;
# - **stage 2** shards the gradients too: a rank keeps those that its part of the optimizer needs;
# - **stage 3** shards the weights too: a rank keeps its part, and borrows the others when a layer needs them.
#
# The part of a tensor that a rank keeps is its **shard**. In the picture each box is a rank, with the 16 bytes of a
# parameter. The white parts of a box are kept by other ranks.

# %% tags=["figure"]
plot.zero(4, caption="13.stages")

# %% [markdown]
# For example, one billion parameters on 4 ranks take 16 GB on each rank without ZeRO. At stage 1 they take 2 + 2 + 12/4
# = 7 bytes for each parameter, 7 GB.
#
# **Predict.** The first figure of the paper has 7.5 billion parameters on 64 ranks. How many GB does a rank keep
# without ZeRO, and at each of the three stages?

# %% tags=["predict"]
without_gb = 7.5 * 16
stage_1_gb = 7.5 * (4 + 12 / 64)
stage_2_gb = 7.5 * (2 + 14 / 64)
stage_3_gb = 7.5 * (16 / 64)

# %% tags=["nbval-check-output"]
from course.labs import papers

guesses = (without_gb, stage_1_gb, stage_2_gb, stage_3_gb)
for guess, (name, published_gb) in zip(guesses, papers.ZERO_GB.items()):
    compare(f"{name}, GB", guess, published_gb, within=1.07, found="published")

# %% [markdown]
# No GPU of that time could hold 120 GB. 31.4 GB would fill one with 32 GB, and stage 3 needs 1.9 GB.
# However many ranks there are, stage 1 keeps more than 4 bytes for each parameter, and stage 2 more than 2. So they
# no longer help when the 16-bit weights alone are too large for a device.
#
# The table leaves out activations and the buffers in which messages travel. Neither is sharded by these stages.
#
# **Now our own.** In this lesson everything is float32: 4 bytes for a weight, 4 for its gradient, and 8 for the two
# moments. There are no master weights, because the weights have 32 bits already. The next cell trains a small GPT for
# two steps and adds up what a rank holds between backward and the optimizer.
#
# The model is first made on the **meta device**, where a tensor has a shape and a dtype but no memory. So no rank ever
# holds all of it: `parallelize` gives each rank its own shard, with values. `held_bytes` adds up the memory behind all
# weights, gradients and optimizer tensors, and `counted` notes the collectives. After the optimizer's step
# `gather_parameters()` does what a stage needs so that the next forward finds the new weights. `library` is used in
# section 4, and `replicas` in lesson 13b.

# %% tags=["by-hand"]
from labcode.comm.grid import Grid
from labcode.config import GPTConfig, OptimConfig, ParallelConfig
from labcode.measure.steps import held_bytes
from labcode.models.parallelize import parallelize
from labcode.topology import GridShape
from labcode.train.optim import make_optimizer

CONFIG = GPTConfig(
    vocab_size=512, context_length=16, num_layers=4, num_heads=4, hidden_size=64
)


def two_steps(rank, stage, library="labcode", replicas=1):
    """What this rank holds, and the collectives and the loss of the second step."""
    grid = Grid.create(GridShape(dp=4))
    how = ParallelConfig(
        zero_stage=stage, data_parallel=library, zero_replicas=replicas
    )
    with torch.device("meta"):  # shapes only: parallelize makes the weights
        whole = GPT(CONFIG)
    model = parallelize(whole, grid, how, seed=0)
    adamw = make_optimizer(model.weights.values(), OptimConfig())
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(512, (1, 16), generator=generator)
    for _ in range(2):
        adamw.zero_grad()
        with counted() as calls:
            loss = model.forward_backward([(tokens, tokens)])
            held = held_bytes(model, adamw)
            adamw.step()
            model.gather_parameters()
    # below 1000 bytes travel only numbers such as a count of tokens
    large = [call for call in calls if call.num_bytes >= 1000]
    return sum(held), large, loss.item()

# %%
by_stage = []
for stage in range(4):
    by_stage.append(ranks.run(two_steps, stage))

def bytes_for_each(run):
    """On the rank that holds the most."""
    return max(held for held, _, _ in run) / CONFIG.num_parameters

formulas = ("4 + 4 + 8", "4 + 4 + 8/4", "4 + 4/4 + 8/4", "16/4")
for stage, formula in enumerate(formulas):
    held = bytes_for_each(by_stage[stage])
    print(f"stage {stage}: {held:5.2f} bytes for each parameter, formula: {formula}")

# %% [markdown]
# These are the bytes of the rank that holds the most. They match the formula, because 4 ranks can divide every weight
# of this model evenly. Where they cannot, this rank holds a little more.
#
# **Takeaway: in mixed precision three quarters of what a rank keeps for a parameter belong to the optimizer. Stage 1 of
# ZeRO shards these, stage 2 the gradients as well, stage 3 everything.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* People forget that stage 1 still keeps the whole gradient, and they divide 16 by 64 at every
# stage. Ask here what ZeRO does for plain SGD in float32, and with an 8-bit optimizer; question 2 at the end is this one.

# %% [markdown]
# ## 2. Stage 1: each rank updates its part (core, 40 min)
#
# First we have to say what a rank's shard is. We cut each weight along its first dim, into rows. With R rows and p
# ranks, each rank gets R/p rows, rounded up, until none are left. So the last rank may get fewer rows, or none. For
# example, 7 rows on 4 ranks are 2, 2, 2 and 1, and 5 rows are 2, 2, 1 and 0.

# %% [markdown] tags=["exercise"]
# ### Exercise 13.1 · My rows
#
# Write a function that returns the rows of this rank as a **view**: a tensor that shares the memory of the weight, as a
# slice does. What counts is the rank's number in the group, `dist.get_rank(group)`. One to three lines.

# %% tags=["exercise"]
def own_rows(weight, group):
    """The rows of `weight` that this rank updates: a view, perhaps of 0 rows."""
    ### BEGIN SOLUTION
    each = -(-len(weight) // dist.get_world_size(group))
    first = dist.get_rank(group) * each
    return weight[first : first + each]
    ### END SOLUTION

# %% tags=["check"]
check("13.1", own_rows, ranks)

# %% [markdown]
# labcode's is `piece_of(whole, index, parts)`: the view that rank `index` of `parts` ranks has. From here on you may
# use it.
#
# AdamW treats each number by itself: the new value of a parameter depends on the old one, its gradient and its own two
# moments. So a rank can give its rows to an ordinary AdamW as if they were a whole weight, and the rows get the same
# values as in an update of the whole weight. An optimizer such as Muon looks at a whole matrix and cannot be sharded in
# this way. And to clip gradients by their global norm, as nearly every large run does, each rank adds up the squares of
# its own rows, and one all-reduce of a single number adds these sums.
#
# A step then has three parts:
#
# 1. each rank takes its rows of the averaged gradients;
# 2. an ordinary optimizer updates its rows, which also changes the whole weight, since they share their memory;
# 3. each rank sends its rows to all others, and gets theirs.

# %% [markdown] tags=["exercise"]
# ### Exercise 13.2 · An optimizer of which each rank keeps a part
#
# Write the class. `params` may be the generator `model.parameters()`, which can be iterated only once. The gradients in
# `param.grad` are averaged already. A weight that is frozen or was not used has `None` there and stays as it is in this
# step. So `zero_grad` sets gradients to `None`, as PyTorch's own does, and not to zeros. `make` makes an ordinary
# optimizer from a list of tensors, as in `make = lambda tensors: torch.optim.AdamW(tensors, lr=0.01)`; call it once.
#
# - An optimizer updates the tensors that it was given, from their `.grad`. So your rows need a `.grad` too.
# - `nn.Parameter(view)` is a parameter in the memory of the view; take the view of `param.detach()`.
# - For part 3, let each rank broadcast its rows. `dist.broadcast(tensor, group_src=i, group=group)` sends the
#   tensor of rank i of the group and overwrites that of the others; a tensor of 0 rows is fine. Do this
#   inside `with torch.no_grad():`.
#
# About 15 lines.

# %% tags=["exercise"]
class ShardedOptimizer:
    """Updates `params`, which all ranks hold; each rank keeps the state of its rows."""

    def __init__(self, params, make, group):
        ### BEGIN SOLUTION
        self.params = list(params)
        self.group = group
        self.p = dist.get_world_size(group)
        self.rows = []
        for param in self.params:
            own = piece_of(param.detach(), dist.get_rank(group), self.p)
            self.rows.append(nn.Parameter(own))
        self.inner = make(self.rows)
        ### END SOLUTION

    def step(self):
        """Update all weights, on all ranks."""
        ### BEGIN SOLUTION
        rank = dist.get_rank(self.group)
        for param, rows in zip(self.params, self.rows):
            if param.grad is None:
                rows.grad = None  # not that of an earlier step
            else:
                rows.grad = piece_of(param.grad, rank, self.p)
        self.inner.step()
        with torch.no_grad():
            for param in self.params:
                for owner in range(self.p):
                    part = piece_of(param, owner, self.p)
                    dist.broadcast(part, group_src=owner, group=self.group)
        ### END SOLUTION

    def zero_grad(self):
        """Forget the gradients of the whole weights."""
        ### BEGIN SOLUTION
        for param in self.params:
            param.grad = None
        ### END SOLUTION

# %% tags=["check"]
check("13.2", ShardedOptimizer, ranks)

# %% [markdown]
# labcode's `ShardedOptimizer` begins in the same way. Then it packs the rows of all weights into one message and sends
# them with a single all-gather, for the reason that you found in lesson 05: one large message is faster than a hundred
# small ones. An all-gather needs shards of equal size, so where a rank has fewer rows, its shard is padded with zeros.
#
# PyTorch's own stage 1 is `ZeroRedundancyOptimizer`. It does not cut weights: each whole weight has one rank that keeps
# its state, updates it and broadcasts it. It works in PyTorch 2.13, but a developer of FSDP2 wrote in 2025 that it is
# not maintained (issue 155952). For a long run of your own take FSDP2 (lesson 13b), or Megatron-LM's optimizer of
# section 3. The next cell trains the same model with labcode's `ShardedOptimizer` and with PyTorch's.

# %% tags=["nbval-check-output"]
from torch.distributed.optim import ZeroRedundancyOptimizer

from labcode.parallel.data import DataParallel
from labcode.parallel.zero import optimizer


def zero_by_torch(params):
    return ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=0.01)

def zero_by_labcode(params):
    return optimizer.ShardedOptimizer(
        params, torch.optim.AdamW, dist.group.WORLD, lr=0.01
    )

def after_two_steps(rank, sharded):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
    parallel = DataParallel(model, dist.group.WORLD)
    adamw = sharded(model.parameters())
    for _ in range(2):
        adamw.zero_grad()
        x = torch.full((1, 32), float(rank))
        parallel(x).square().sum().backward()
        parallel.finish_gradient_sync()
        adamw.step()
    return [param.detach() for param in model.parameters()]

ours = ranks.run(after_two_steps, zero_by_labcode)[0]
theirs = ranks.run(after_two_steps, zero_by_torch)[0]
largest = max((a - b).abs().max().item() for a, b in zip(ours, theirs))
print(f"the largest difference between the weights is {largest:.0e}")

# %% [markdown]
# What does this cost? For an all-reduce of N numbers a rank sends 2 (p-1)/p N numbers; for an all-gather it sends
# (p-1)/p N (lesson 01). DDP needs the all-reduce of the gradients. Now the all-gather of the weights comes on top, so a
# rank sends 50 % more than with DDP. The next section saves that part.
#
# **Takeaway: AdamW works number by number, so each rank can update its own rows and send them to the others. The
# optimizer's state shrinks to 1/p.**
#
# This is a good place for a break.

# %% [markdown] tags=["solution-only"]
# *For the instructor.* The most common mistakes: giving `make` whole weights (right numbers, and no memory saved: the
# check counts them), cloning the rows, so that the weight never changes, and `src=` instead of `group_src=`, which is
# right as long as there is only one group. Ask: what would happen to a learning-rate schedule? (It must reach the
# inner optimizer; labcode copies the options in each step.) And clipping? (After the average the whole gradient is on
# each rank at stage 1; from stage 2 on the squares have to be summed over the ranks.)

# %% [markdown]
# ## 3. Stage 2: only my part of the gradients (core, 25 min)
#
# Half of that all-reduce was wasted: a rank needs the averaged gradient of its own rows and of no others. In lesson 01,
# section 4, you wrote an all-reduce as two halves: a **reduce-scatter**, after which each rank holds the sum of its own
# part, and an all-gather. So we take the first half alone. The second half moves behind the optimizer, where it carries
# new weights instead of gradients:
#
# | | after backward | after the optimizer | numbers that a rank sends |
# |---|---|---|---|
# | DDP | all-reduce of gradients | | 2 (p-1)/p N |
# | stage 1, as above | all-reduce of gradients | all-gather of weights | 3 (p-1)/p N |
# | stages 1 and 2 | reduce-scatter of gradients | all-gather of weights | 2 (p-1)/p N |
#
# So **no more bytes** are sent than with DDP.
#
# Equal bytes are not equal time, however. DDP's all-reduce travels while backward computes (lesson 05, section 2). Of
# the two halves only the reduce-scatter still does. The all-gather comes after the optimizer, when nothing is left to
# compute that could hide it. Large runs therefore send the weights in buckets, and each layer of the **next** forward
# waits only for its own: in Megatron-LM this is `--overlap-param-gather`. Lesson 13b, section 5, says how many
# tokens hide it there.
#
# Stage 2 differs from this stage 1 in memory only. Once a bucket of gradients has been sent, the rank keeps the
# averages of its own rows and frees the rest, while backward goes on.
#
# That holds for one micro-batch per step. With m micro-batches (lesson 04, section 4) DDP and stage 1 accumulate whole
# gradients and send them once. At stage 2 there are two ways. A rank may send them in each micro-batch, so that it
# never keeps a whole gradient; then it sends m (p-1)/p N numbers of gradients, and (p-1)/p N of weights. Or it
# accumulates them whole and sends them once; then it keeps as much between the micro-batches as at stage 1. DeepSpeed
# does the first, and its `no_sync` is an error at stages 2 and 3. labcode does the second.
#
# One reduce-scatter for all weights needs parts of equal size, one for each rank. Take 2 ranks, a weight a of 4 rows
# and a weight b of 3 rows. The part for rank 0 holds its rows of a and of b, one behind the other; the part for rank 1
# is padded with a row of zeros:
#
#     to rank 0:  a0 a1 b0 b1        to rank 1:  a2 a3 b2 0

# %% [markdown] tags=["exercise"]
# ### Exercise 13.3 · The average of my rows
#
# Write a function that is called after backward. It sets `rows[i].grad` to the average over the group of this rank's
# rows of `params[i].grad`, and `params[i].grad` to `None`. Here every weight has a gradient. Do it with **one**
# reduce-scatter for all weights: `dist.reduce_scatter(own, parts, group=group)` takes a list of p tensors of equal
# size; tensor j goes to rank j. It writes into `own` the sum of what this rank receives.
#
# - `piece_of(tensor, j, p)` are the rows of rank j, `.flatten()` makes them one-dimensional, and `torch.cat` joins them.
# - The first rank has the most rows, so its part is the longest.
# - `grad.new_zeros(p, length)` are zeros in the dtype of a gradient.
#
# About 15 lines.

# %% tags=["exercise"]
def average_own_rows(params, rows, group):
    """The average of this rank's rows, in `rows[i].grad`; whole gradients are freed."""
    ### BEGIN SOLUTION
    p = dist.get_world_size(group)
    length = sum(piece_of(param, 0, p).numel() for param in params)
    parts = params[0].grad.new_zeros(p, length)
    for rank in range(p):
        pieces = [piece_of(param.grad, rank, p).flatten() for param in params]
        numbers = torch.cat(pieces)
        parts[rank, : len(numbers)] = numbers
    own = torch.empty_like(parts[0])
    dist.reduce_scatter(own, list(parts), group=group)
    own /= p
    first = 0
    for param, row in zip(params, rows):
        stop = first + row.numel()
        row.grad = own[first:stop].view_as(row)
        param.grad = None
        first = stop
    ### END SOLUTION

# %% tags=["check"]
check("13.3", average_own_rows, ranks)

# %% [markdown]
# labcode splits this function in two. A hook calls the first half during backward, as in lesson 05, and it starts the
# reduce-scatter. The second half waits for it after backward. At stage 1 the gradients keep their memory, at
# stage 2 it is freed.
#
# **Takeaway: an all-reduce is a reduce-scatter and an all-gather. ZeRO puts the optimizer between the two. Stages 1 and
# 2 save memory, and with one micro-batch per step they send no more bytes than DDP.** Stage 1 does so with many
# micro-batches too, and so it is the usual choice beside a pipeline, which needs many (lesson 15); Megatron-LM calls it
# the *distributed optimizer*.

# %% [markdown] tags=["solution-only"]
# *For the instructor.* What goes wrong: cutting the row of **all** gradients into p parts (a cut of its own, which does
# not match the rows that the optimizer updates), unpacking with the sizes of rank 0, and dividing by the world size.
# Ask: with two micro-batches, which gradients may be freed after the first? (None, if they are sent once per step; all
# but the own rows, if each micro-batch is sent. So stage 2 saves nothing between micro-batches unless it sends in each
# of them.)

# %% [markdown]
# ## 4. Stage 3: borrow the weights (core, 54 min)
#
# A layer needs its whole weight twice in a step: when its forward runs, and when its backward runs. So a rank keeps its
# rows, **gathers** the whole weight for each use, and frees the memory afterwards, which is called **resharding** the
# weight.
#
#     forward     all-gather the weight -> compute -> reshard
#     backward    all-gather the weight again -> compute -> reshard -> reduce-scatter the gradient
#
# In practice weights are not gathered one by one. Those that are gathered together, usually all of one layer, are a
# **unit**. In the picture the weights of the next unit already travel while one computes; lesson 13b is about that.

# %% tags=["figure"]
plot.zero_steps(caption="13.steps")

# %% [markdown]
# After the optimizer nothing has to travel: each rank has updated its rows, and the next forward gathers them. In all
# there are two all-gathers and one reduce-scatter, 3 (p-1)/p N numbers per step, half as much again as with DDP. With m
# micro-batches it is m times as much: labcode, like FSDP2 by default, gathers and reduce-scatters in each of them.
#
# **How to free the memory of a weight.** During forward, autograd saves the weight for backward. So it is not enough to
# drop our own reference, since autograd still holds one. PyTorch's FSDP uses a trick. A tensor is a header (shape,
# dtype) that points to a **storage**, the memory itself, and what autograd has saved points to the same storage. If we
# shrink the storage to 0 bytes, the memory is free, and all headers stay as they are. Before backward we resize the
# storage and fill it, and everything that points to it is right.

# %% tags=["nbval-check-output"]
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from labcode.models.layers import initialize
from labcode.parallel.zero import FullyShardedModule

weight = nn.Parameter(torch.ones(5, 3))
num_bytes = weight.nbytes
x = torch.ones(1, 3, requires_grad=True)
y = F.linear(x, weight)  # autograd saves the weight
weight.untyped_storage().resize_(0)
print("shape", list(weight.shape), "and", weight.untyped_storage().nbytes(), "bytes")
weight.untyped_storage().resize_(num_bytes)
weight.data.copy_(2 * torch.ones(5, 3))  # what stands in it now is new
y.sum().backward()
print("gradient of x", x.grad.tolist())

# %% [markdown]
# Backward has used the values that we filled in later: the gradient of x is 5 · 2 = 10.
#
# Note the `.data`. Autograd counts each change of a tensor, and it refuses to run backward through a weight that was
# changed since forward. A copy into `weight.data` is not counted, but a copy into `weight` or into `weight.detach()` is.
#
# What if somebody reads a weight that is not there?

# %% tags=["raises-exception"] raises="RuntimeError: setStorage: sizes"
y = F.linear(x, weight)
weight.untyped_storage().resize_(0)
y.sum().backward()

# %% [markdown]
# "Out of bounds for storage of size 0": this is what you get if you forget to gather in backward. It is a lucky case.
# Other operations do not look before they read, and then the process dies. (If a rank dies in an exercise, the next
# call starts new ones.) So labcode goes one step further: while a weight is away, the parameter shows NaN in the same
# shape.

# %% tags=["nbval-check-output"]
weight.untyped_storage().resize_(num_bytes)  # so that you may look at it again

def read_between_steps(rank):
    model = FullyShardedModule(nn.Linear(3, 2), dist.group.WORLD)
    return model.module.weight.tolist()

print(ranks.run(read_between_steps)[0])

# %% [markdown] tags=["exercise"]
# ### Exercise 13.4 · A linear layer that borrows its weight
#
# Complete the layer. It has no bias: y = x Wᵀ, as `F.linear(x, W)` computes it. `rows` is what this rank keeps and what
# the optimizer updates. `weight` is whole while it is used, and has no memory at other times. Five methods are yours:
#
# - `reshard` frees the memory, and `gather` allocates it again and fills it from the **present** rows of all ranks, with
#   one all-gather. `dist.all_gather(parts, own, group=group)` writes the tensor `own` of rank j into `parts[j]`. All
#   must have the same size, so you need rows of zeros again. Joined and without these rows they are the weight.
# - `forward` computes with the whole weight and reshards. A function that is registered with
#   `y.register_hook(function)` is called in backward with the gradient of y, before backward reaches this layer. Under
#   `torch.no_grad()` y has no gradient (`y.requires_grad` is False), and then no hook can be registered.
# - `before_backward` is the function to register there. It returns nothing.
# - `gradient_ready` is called in backward when `weight.grad` is there (lesson 05). It **adds** the average of this
#   rank's rows to `rows.grad`, as backward accumulates gradients; the first time `rows.grad` is None. Use one
#   `dist.reduce_scatter`. Neither a whole gradient nor a whole weight may be left.
#
# Between uses nothing may hold the whole weight, or rows of other ranks: no attribute, and not autograd, which keeps
# the inputs of an operation for backward.
#
# The check looks at the methods in this order: at `gather` and `reshard` first, then at `forward`, then at backward,
# then at two layers in training. As long as the next one is open, it says "not done yet" and what is right so far.
# About 30 lines.

# %% tags=["exercise"]
class BorrowingLinear(nn.Module):
    """y = x W^T; each rank of the group keeps its rows of W, and borrows the others."""

    def __init__(self, weight, group):
        super().__init__()
        self.group = group
        self.p = dist.get_world_size(group)
        own = piece_of(weight, dist.get_rank(group), self.p)
        self.rows = nn.Parameter(own.clone())
        self.weight = nn.Parameter(weight.clone())
        self.num_bytes = self.weight.nbytes
        self.weight.register_post_accumulate_grad_hook(self.gradient_ready)
        self.reshard()

    def reshard(self):
        """Give the memory of the whole weight back."""
        ### BEGIN SOLUTION
        self.weight.untyped_storage().resize_(0)
        ### END SOLUTION

    def gather(self):
        """Make the weight whole, from the rows of all ranks."""
        ### BEGIN SOLUTION
        each = -(-len(self.weight) // self.p)
        own = self.rows.new_zeros(each, self.rows.shape[1])
        own[: len(self.rows)] = self.rows.detach()
        parts = [torch.empty_like(own) for _ in range(self.p)]
        dist.all_gather(parts, own, group=self.group)
        self.weight.untyped_storage().resize_(self.num_bytes)
        self.weight.data.copy_(torch.cat(parts)[: len(self.weight)])
        ### END SOLUTION

    def forward(self, x):
        """x W^T; afterwards the weight has no memory."""
        ### BEGIN SOLUTION
        self.gather()
        y = F.linear(x, self.weight)
        self.reshard()
        if y.requires_grad:
            y.register_hook(self.before_backward)
        return y
        ### END SOLUTION

    def before_backward(self, grad):
        """Called with the gradient of y, before backward reaches this layer."""
        ### BEGIN SOLUTION
        self.gather()
        ### END SOLUTION

    def gradient_ready(self, weight):
        """Called when `weight.grad` is there: leave the average of our rows."""
        ### BEGIN SOLUTION
        each = -(-len(weight) // self.p)
        whole = weight.grad.new_zeros(self.p * each, weight.shape[1])
        whole[: len(weight)] = weight.grad
        weight.grad = None
        self.reshard()
        own = torch.empty_like(whole[:each])
        dist.reduce_scatter(own, list(whole.split(each)), group=self.group)
        mean = own[: len(self.rows)] / self.p
        if self.rows.grad is None:
            self.rows.grad = mean
        else:
            self.rows.grad += mean
        ### END SOLUTION

# %% tags=["check"]
check("13.4", BorrowingLinear, ranks)

# %% [markdown]
# labcode does the same for a whole unit, and starts the all-gather so early that it travels while something else
# computes.
#
# **Predict.** Our GPT has four layers, each of which is a unit. What is outside of them is one more unit, the **root**:
# the embeddings, the last norm, and the head, which shares its weight with the embedding of the tokens. At stage 3, how
# many all-gathers does a step make, and how many reduce-scatters? (The root is used first and last, so labcode gathers
# it once and keeps it until backward is done.)

# %% tags=["predict"]
num_all_gathers = 2 * 4 + 1
num_reduce_scatters = 4 + 1

# %% tags=["nbval-check-output"]
from course.labs.l13_by_hand import CONFIG, two_steps

stages = []
for stage in range(4):
    stages.append(ranks.run(two_steps, stage))
_, at_stage_3, _ = stages[3][0]
gathers = count(at_stage_3, "all_gather")
scatters = count(at_stage_3, "reduce_scatter")
compare("all-gathers", num_all_gathers, gathers, within=1, found="counted")
compare("reduce-scatters", num_reduce_scatters, scatters, within=1, found="counted")

# %% [markdown]
# And here is PyTorch's **FSDP2** beside ours. `fully_shard(layer)` makes a unit of a layer. It cuts each weight along
# its first dim too. Both train the same GPT on the same tokens.

# %% tags=["nbval-check-output"]
fsdp2 = ranks.run(two_steps, 3, "ddp")  # PyTorch's own at stage 3
runs = {"no ZeRO": stages[0], "stage 1": stages[1], "stage 2": stages[2]}
runs |= {"stage 3": stages[3], "FSDP2": fsdp2}
print("          all-reduce  reduce-scatter all-gather      sent  loss of rank 0")
for name, run in runs.items():
    _, calls, loss = run[0]
    sizes = [bytes_sent(c.kind, c.group_size, c.num_bytes) for c in calls]
    numbers = sum(sizes) / 4
    print(f"{name:8}", end=" ")
    for kind in ("all_reduce", "reduce_scatter", "all_gather"):
        print(f"{count(calls, kind):12}", end=" ")
    print(f"{numbers / CONFIG.num_parameters:9.2f} N {loss:10.4f}")

# %% [markdown]
# The losses are the same in all five. "Sent" is in numbers for each parameter: 2 · 3/4 = 1.5 without ZeRO and at stages
# 1 and 2, and close to 3 · 3/4 = 2.25 at stage 3. Ours sends a little less, because it gathers the root once, and
# `parallelize` tells FSDP2 to reshard the root after forward too, so that FSDP2 gathers it twice. (By default FSDP2
# reshards each layer after forward and keeps the root, as ours does.)
#
# In these runs `parallelize` has done the work. This is how FSDP2 is used without labcode, in a script of your own.
# Each layer becomes a unit, then the whole model. The optimizer is made only after that, because `model.parameters()`
# now gives this rank's rows. Ours is used in the same way, except for one line after backward. Both are compared with
# one process that trains on the samples of all four ranks.

# %%
def by_torch(model):
    for layer in model.blocks:
        fully_shard(layer)
    return fully_shard(model)

def by_hand(model):
    return FullyShardedModule(model, dist.group.WORLD)

def losses(model, tokens):
    """Of three steps on these samples."""
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for _ in range(3):
        adamw.zero_grad()
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        loss.backward()
        if isinstance(model, FullyShardedModule):
            model.finish_gradient_sync()  # FSDP2 waits at the end of backward
        adamw.step()
        found.append(loss.item())
    return torch.tensor(found)

def on_its_sample(rank, shard, samples):
    model = initialize(GPT(CONFIG), seed=0)
    return losses(shard(model), samples[rank : rank + 1])

# %% tags=["nbval-check-output"]
samples = torch.randint(512, (4, 16), generator=torch.Generator().manual_seed(0))
model = initialize(GPT(CONFIG), seed=0)
print("one process", losses(model, samples))
for name, shard in {"by hand    ": by_hand, "FSDP2      ": by_torch}.items():
    of_ranks = torch.stack(ranks.run(on_its_sample, shard, samples))
    print(name, of_ranks.mean(dim=0))

# %% [markdown]
# The mean of the four ranks is the loss of one process, step after step. On GPUs the same lines run under `torchrun`,
# with the samples on the GPU: `fully_shard` finds the GPU of each rank and moves the weights there. A model too large
# for one device is made on the meta device; after `fully_shard`, `model.to_empty(device=...)` gives memory to this
# rank's rows, and then your script fills in their values. Lesson 13b, section 7, turns this into a whole script, with
# mixed precision and checkpoints.
#
# **Takeaway: stage 3 keeps 1/p of everything. It gathers each unit twice and sends half as much again as data
# parallelism.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Most of the time goes to the exercise. Let people write `gather` and `reshard` first and run the
# check. The usual trouble: `copy_` before `resize_` (outside of the check it kills the rank), `detach()` where `.data`
# is needed, no hook under `no_grad`, and a new tensor in `weight.data`. That last one gives right numbers and frees
# nothing, because autograd holds the tensor of forward. Ask: why is the hook on y, and not a backward hook of the
# module? (It has to run before the backward of this layer, and only a hook on its output's gradient does.)

# %% [markdown]
# ## From here to GPUs and SLURM (core, 2 min)
#
# | where | start |
# |---|---|
# | 4 GPUs of one machine, stage 1 | `torchrun --nproc-per-node=4 -m labcode.train gpt_10m --parallel.zero_stage 1` |
# | FSDP2; and ours instead of it | `--parallel.zero_stage 3`; and `--parallel.data_parallel labcode` |
#
# Lesson 13b has the lines for hybrid sharding and for several nodes under SLURM.

# %%
ranks.close()

# %% [markdown]
# ## Questions (core, 3 min)
#
# **1.** Somebody logs `model.layers[0].weight.norm()` between two steps under stage 3. What may they see?
#
# <details><summary>Answer</summary>
#
# Not the norm: the weight is not there. labcode gives NaN. FSDP2 gives a DTensor, whose `.item()` is without any
# warning the norm of this rank's rows. `.full_tensor()` gives the right one. It is a collective, so if only rank 0
# logs, rank 0 waits for the others until the time-out.
# </details>
#
# **2.** What does ZeRO at stage 1 save with plain SGD in float32, and what with AdamW whose two moments take one byte each?
#
# <details><summary>Answer</summary>
#
# With plain SGD nothing: it has no state, and float32 weights need no master copy. With 8-bit moments and a master copy
# the optimizer has 4 + 1 + 1 = 6 bytes for each parameter instead of 12, so stage 1 saves half as much.
# </details>
#
# **3.** From lesson 05: DDP starts the all-reduce of a bucket as soon as its gradients are there. Can stage 1 start the
# all-gather of the weights as early?
#
# <details><summary>Answer</summary>
#
# No. New weights exist only after the optimizer's step, and with clipping that waits for the norm of **all** gradients.
# So the all-gather can hide only behind the forward of the next step.
# </details>
#
# ## Recap
#
# | stage | a rank keeps, of 16 N bytes | sends, in numbers | collectives | in labcode |
# |---|---|---|---|---|
# | 0 (DDP) | 16 N | 2 (p-1)/p N | all-reduce | `parallel.data.DataParallel` |
# | 1 | (4 + 12/p) N | 2 (p-1)/p N | reduce-scatter, all-gather | `parallel.zero.ShardedDataParallel`, or `ShardedOptimizer` after any DDP |
# | 2 | (2 + 14/p) N | 2 (p-1)/p N | the same | `parallel.zero.ShardedDataParallel` |
# | 3 | 16/p N, and the units in use | 3 (p-1)/p N | two all-gathers, reduce-scatter | `parallel.zero.FullyShardedModule` |
#
# "Sends" is for one micro-batch in a step. With m of them stages 0 and 1 send the same once; stage 2 that frees its
# gradients in each sends (m + 1) (p-1)/p N, and stage 3 sends 3 m (p-1)/p N.
#
# ## Sources
#
# - Rajbhandari et al. 2020, *ZeRO*, arXiv:1910.02054: the three stages and the first figure; volumes in section 7.
# - Zhao et al. 2023, *PyTorch FSDP*, arXiv:2304.11277: units and storage.
# - Megatron Core, *Distributed Optimizer*,
#   <https://docs.nvidia.com/megatron-core/developer-guide/latest/user-guide/features/dist_optimizer.html>.
# - DeepSpeed sends in each micro-batch at stage 2: <https://github.com/deepspeedai/DeepSpeed/issues/373>; its `no_sync`
#   is an error then: <https://github.com/deepspeedai/DeepSpeed/issues/6793>.
# - PyTorch: <https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html>. `ZeroRedundancyOptimizer` is not
#   maintained: <https://github.com/pytorch/pytorch/issues/155952>.
