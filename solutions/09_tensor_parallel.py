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
# # 09 · Tensor parallel
#
# Data parallelism needs ranks that can hold the whole model. With AdamW a parameter takes 16 bytes, so 7 billion of
# them take 112 GB, and an H100 has 80. **Tensor parallelism** cuts the inside of every layer: each rank holds a
# shard of every weight matrix, all ranks of a group work on the same samples at the same time, and they add up their
# partial results. The forward pass follows from how a matmul splits into blocks. The gradients are what goes wrong, so
# the lesson begins with them.
#
# ## Goals
#
# - say why autograd gets an all-reduce wrong, and write the two operators that put it right;
# - write the column-parallel and the row-parallel linear layer, and cut an MLP and an attention with them;
# - predict how many collectives and bytes a layer costs, count them, and say which link they belong on;
# - do the same with PyTorch's DTensor, and know what it does not tell you.
#
# **Time**: 143 minutes, and 42 more for what is optional. Good places for a break are after section 2 and after section
# 4.
#
# **Needs**: lesson 01 (section 2). For section 4 also lesson 01 (section 3) and lesson 08 (section 5); for section 5
# also lesson 08 (sections 2 and 3); for section 6 also lesson 04 (section 1) and lesson 08 (sections 2 and 3).

# %%
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F

from course.lab import Ranks, check, compare, plot
from labcode.comm.collectives import copy_to, reduce_from
from labcode.comm.grid import Grid
from labcode.parallel import tensor

ranks = Ranks(4, timeout_s=15)

# %% [markdown]
# ## 1. What autograd does not know (core, 26 min)
#
# Take the MLP of a transformer layer, two matmuls with a gelu between them: Y = gelu(X A) B. Cut A into blocks of
# columns, A₀, A₁ and so on, and B into as many blocks of rows. For two ranks,
#
# $$Y = \mathrm{gelu}(XA_0)\,B_0 + \mathrm{gelu}(XA_1)\,B_1.$$
#
# Rank r holds A_r and B_r, reads the whole X, and computes one of the terms. One all-reduce adds them up, and every
# rank has Y. Let us do just that on four ranks. Below the MLP lies a small layer that makes X; it is replicated on
# every rank.

# %%
def draw_tensors():
    """Input, target, the layer below, A and B: the same numbers in every process."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(64, 64), (64, 64), (64, 64), (64, 256), (256, 64)]
    drawn = []
    for shape in shapes:
        drawn.append(torch.randn(shape, dtype=torch.float64, generator=generator) / 8)
    return drawn

def mlp_step(rank, p, enter, leave):
    """Y and the gradients on one of p ranks; `leave` is what happens to its term."""
    inputs, target, below, a, b = draw_tensors()
    below.requires_grad_()
    own_a = a.chunk(p, dim=1)[rank].clone().requires_grad_()
    own_b = b.chunk(p, dim=0)[rank].clone().requires_grad_()
    x = inputs @ below
    y = leave(F.gelu(enter(x) @ own_a) @ own_b)
    loss = (y - target).square().mean()
    loss.backward()
    return {"y": y.detach(), "below": below.grad, "a": own_a.grad, "b": own_b.grad}

def unchanged(x):
    return x

def plain_sum(y):
    dist.all_reduce(y.detach())  # in place, on the memory of y
    return y

whole = mlp_step(0, 1, unchanged, unchanged)
plain = ranks.run(mlp_step, 4, unchanged, plain_sum)

# %% [markdown]
# The output is the same as on one process, as we will see. But what about the gradients?
#
# - The gradients of A_r and B_r need X, the rank's own shards and the gradient of Y, and the rank has all of these.
# - The layer below is another matter. X reaches the loss on four paths, one through each rank, and autograd, which runs
#   inside one process, sees only one of them.
#
# How wrong is a gradient that lacks one path? Take two ranks first. The true gradient is a sum u + v, where u
# comes along the path through rank 0 and v along that through rank 1. Rank 0 has u only, so its error is v. Assume
# that both paths contribute about equally much, so that u and v have the same length, and that they are unrelated.
# Two unrelated vectors of many numbers are nearly perpendicular, so Pythagoras holds:
# |u + v|² = |u|² + |v|² = 2 |v|². The relative error is |v| / |u + v| = √(1/2), about 0.71.
#
# **Predict.** Now there are four ranks, and three of four paths are missing. Which relative errors do you expect for
# the gradients of A_r, of B_r and of the layer below?

# %% tags=["predict"]
error_of_a = 0
error_of_b = 0
error_below = math.sqrt(3 / 4)

# %% tags=["nbval-check-output"]
def relative_error(found, expected):
    return ((found - expected).norm() / expected.norm()).item()

def errors(result, rank=0, p=4):
    """Relative errors of the gradients of one rank."""
    return {
        "a": relative_error(result["a"], whole["a"].chunk(p, dim=1)[rank]),
        "b": relative_error(result["b"], whole["b"].chunk(p, dim=0)[rank]),
        "below": relative_error(result["below"], whole["below"]),
    }

found = errors(plain[0])
compare("error of a", error_of_a, round(found["a"], 9), within=1)
compare("error of b", error_of_b, round(found["b"], 9), within=1)
compare("error of the layer below", error_below, found["below"], within=1.1)
print("Y is right:", relative_error(plain[0]["y"], whole["y"]) < 1e-12)
same = torch.equal(plain[0]["below"], plain[1]["below"])
print("ranks 0 and 1 have the same gradient below:", same)

# %% [markdown]
# The gradient below is off by nearly as much as its own length, and it is wrong in a different way on each rank. So
# after one step the copies of the layer below are no longer copies, and nothing says so, because the loss was right.
#
# What should have happened? Follow the tensors in this picture of two ranks.

# %% tags=["figure"]
plot.tensor_parallel_mlp(caption="09.f_and_g")

# %% [markdown]
# - Where the MLP **begins**, one X enters several computations. Forward there is nothing to do. Backward, the gradient
#   of X is the **sum** over all paths. Shoeybi et al. call this operator *f*.
# - Where it **ends**, partial results become one Y: a **sum** in forward. Backward there is nothing to do. Each term of
#   a sum has the gradient of the sum, and every rank has that already, because every rank computed the loss. This is
#   *g*.
#
# The two mirror each other. `plain_sum` above happened to be a correct g: it summed in place on a detached tensor, so
# autograd did not see the sum and handed the gradient on unchanged. What was missing is f.

# %% [markdown] tags=["exercise"]
# ### Exercise 9.1 · f and g
#
# Write both as autograd Functions. `forward` gets a tensor and a group, and may keep something in `ctx` for later.
# `backward` gets the gradient of the output, and returns one gradient for each argument of forward but `ctx`; that of
# the group is `None`.
#
# Note that `dist.all_reduce` works in place, but neither the input of forward nor the gradient that backward is given
# is yours to change. The check uses groups of four and of three ranks.

# %% tags=["exercise"]
class CopyTo(torch.autograd.Function):
    """f: the identity forward, a sum over the group backward."""

    @staticmethod
    def forward(ctx, x, group):
        ### BEGIN SOLUTION
        ctx.group = group
        return x
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad):
        ### BEGIN SOLUTION
        total = grad.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None
        ### END SOLUTION


class ReduceFrom(torch.autograd.Function):
    """g: a sum over the group forward, the identity backward."""

    @staticmethod
    def forward(ctx, x, group):
        ### BEGIN SOLUTION
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad):
        ### BEGIN SOLUTION
        return grad, None
        ### END SOLUTION

# %% tags=["check"]
check("9.1", CopyTo, ReduceFrom, ranks)

# %% [markdown]
# labcode has both as functions, `copy_to(x, group)` and `reduce_from(x, group)`, and from here on we use those. (With
# a **functional collective** neither would need the clone: `torch.distributed._functional_collectives.all_reduce(x,
# "sum", group)` returns a new tensor and leaves its input alone.)
#
# With both, every gradient is right. The last line shows another trap: an all-reduce that sums **backward as well**.
# `torch.distributed.nn.functional.all_reduce` does so. It is deprecated, and its warning recommends the functional
# collective; but outside an autograd Function that one sums both ways, too (in PyTorch 2.13).

# %% tags=["nbval-check-output"]
def f(x):
    return copy_to(x, dist.group.WORLD)

def g(y):
    return reduce_from(y, dist.group.WORLD)

def sum_both_ways(y):
    return reduce_from(copy_to(y, dist.group.WORLD), dist.group.WORLD)

def are_right(results):
    worst = 0
    for rank, result in enumerate(results):
        worst = max(worst, *errors(result, rank).values())
    return worst < 1e-12

right = ranks.run(mlp_step, 4, f, g)
print("with f and g, all gradients are right:", are_right(right))
doubled = ranks.run(mlp_step, 4, f, sum_both_ways)
too_long = doubled[0]["a"].norm() / right[0]["a"].norm()
print(f"with a sum both ways, the gradient of a is {too_long:.4g} times as long")

# %% [markdown]
# All ranks compute the same loss, so each of them hands back the same gradient. Summing these makes every gradient p
# times as long as it should be. A sum both ways is no mistake in itself: it is right where each rank computes a loss of
# its own, and the whole loss is the sum of those.
#
# **Takeaway: where a tensor enters computations that differ by rank, put f; where partial results become one tensor,
# put g. Autograd does not notice if one of them is missing.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Draw the four paths on the board and let the room find the missing sum. What people get wrong in
# 9.1: they sum in place (the check looks at the inputs afterwards), they forget `group=` (which passes where the group
# is all ranks, so the check uses a group of three as well), or they sum in both directions of g. The measured error is
# a little smaller than √(3/4), because the paths are not quite unrelated. Ask: for which loss would the plain
# all-reduce be right? (If nothing that has weights lies below.)

# %% [markdown]
# ## 2. Columns, then rows (core, 45 min)
#
# There are two ways to cut a linear layer X W, named after how W is cut.
#
# | | input | output | part of W, [inputs, outputs] | bias |
# |---|---|---|---|---|
# | **column-parallel** | whole | some features | some columns: [inputs, outputs/p] | [outputs/p] |
# | **row-parallel** | some features | partial sum | some rows: [inputs/p, outputs] | whole |
#
# The output of a column-parallel layer is exactly what a row-parallel layer takes as its input. So the pair needs one
# f before it, one g after it, and nothing in between:

# %% tags=["figure"]
plot.column_then_row(caption="09.mlp")

# %% [markdown]
# One thing confuses everybody once. PyTorch's `nn.Linear` stores the **transpose** of W: its weight is [outputs,
# inputs]. So a column-parallel layer holds some *rows* of the stored tensor, and a row-parallel layer some of its
# *columns*. The names come from the mathematics, X W, and the figures of this lesson follow the names.
#
# From here on our four ranks mostly form two tensor-parallel groups of two, as in a job with dp = 2 and tp = 2. In
# plain PyTorch the group is `init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"].get_group()`. Here is
# an MLP of width 64, with 256 features inside and with biases, and what each of two ranks holds of it.

# %% tags=["by-hand"]
from labcode.models import layers
from labcode.topology import GridShape


def tp_group():
    """This rank's tensor-parallel group: ranks 0 and 1, or ranks 2 and 3."""
    return Grid.create(GridShape(dp=2, tp=2)).group("tp")

def shard_mlp(mlp):
    """Put this rank's parts in place of the whole layers."""
    mlp.up = tensor.ColumnParallelLinear(mlp.up, tp_group())
    mlp.down = tensor.RowParallelLinear(mlp.down, tp_group())
    return mlp

def make_mlp():
    """64 features in and out, 256 between."""
    return layers.MLP(64, 256)

# %% tags=["nbval-check-output"]
def shapes_on_a_rank():
    mlp = shard_mlp(make_mlp())
    return {name: list(param.shape) for name, param in mlp.named_parameters()}

for name, shape in ranks.run(shapes_on_a_rank)[0].items():
    print(f"{name:12} {shape}")

# %% [markdown]
# Is the sharded MLP still the same function? `difference(make, shard)` builds the whole module and this rank's shard of
# it from the same numbers, and runs both forward and backward on the same input. It returns the largest relative
# differences of the output, of the input's gradient and of the weights' gradients. `is_exact` says whether all three
# are below 1e-12.

# %% tags=["nbval-check-output"]
from course.labs.l09_shards import difference, is_exact

for rank, differences in enumerate(ranks.run(difference, make_mlp, shard_mlp)):
    print(f"rank {rank}: the same as one process: {is_exact(differences)}")

# %% [markdown]
# It is exact, because gelu works on each feature alone and does not care that the other features are elsewhere.
#
# Why not rows first? Then each rank would have only a partial **sum** where gelu needs the whole one, and gelu of a sum
# is not the sum of the gelus: with the partial sums 1 and -1, gelu(1 - 1) = 0, but gelu(1) + gelu(-1) = 0.84 - 0.16.
# The ranks would first have to all-reduce a tensor four times as wide, in the middle of the MLP.
#
# And there is the second bias. It is replicated, and every rank adds it **after** the sum.
#
# **Predict.** Suppose that four ranks add it **before** the sum. By how many biases is the output too large?

# %% tags=["predict"]
biases_too_many = 4 - 1

# %% tags=["nbval-check-output"]
from torch import nn


def biases_too_large():
    torch.manual_seed(0)
    layer = tensor.RowParallelLinear(nn.Linear(256, 64), dist.group.WORLD)
    x = torch.ones(64)
    term = F.linear(x, layer.weight, layer.bias)  # the bias too early
    early = reduce_from(term, layer.group)
    return ((early - layer(x)).sum() / layer.bias.sum()).item()

biases = round(ranks.run(biases_too_large)[0], 2)
compare("biases too many", biases_too_many, biases, within=1)

# %% [markdown] tags=["exercise"]
# ### Exercise 9.2 · The column-parallel layer
#
# Write the layer. `layer` is the whole `nn.Linear`, the same on every rank; `group.rank()` and `group.size()` say
# which shard is this rank's. `layer.bias` may be `None`. Leave `layer` as it is, and keep the shards as `self.weight`
# and `self.bias`:
#
# - each is an `nn.Parameter`, or an optimizer would not find it;
# - each is a copy (`.detach().clone()`), since a slice is only a view and would keep the whole weight in memory.
#
# You may assume that p divides the outputs. Use `copy_to` and `reduce_from`, or your own Functions with `.apply`.

# %% tags=["exercise"]
class MyColumnParallelLinear(nn.Module):
    """This rank's outputs of a linear layer: [.., inputs] to [.., outputs/p]."""

    def __init__(self, layer, group):
        super().__init__()
        ### BEGIN SOLUTION
        p = group.size()
        rank = group.rank()
        self.group = group
        own_weight = layer.weight.detach().chunk(p, dim=0)[rank].clone()
        self.weight = nn.Parameter(own_weight)
        self.bias = None
        if layer.bias is not None:
            own_bias = layer.bias.detach().chunk(p)[rank].clone()
            self.bias = nn.Parameter(own_bias)
        ### END SOLUTION

    def forward(self, x):
        ### BEGIN SOLUTION
        x = copy_to(x, self.group)
        return F.linear(x, self.weight, self.bias)
        ### END SOLUTION

# %% tags=["check"]
check("9.2", MyColumnParallelLinear, ranks)

# %% [markdown] tags=["exercise"]
# ### Exercise 9.3 · The row-parallel layer
#
# Now the other one, from an empty cell: a class `MyRowParallelLinear`. As before, it is built from `layer` and `group`,
# its parameters are `weight` and `bias`, and `layer.bias` may be `None`. Its input holds this rank's features, [..,
# inputs/p], and its output is whole.

# %% tags=["exercise"]
### BEGIN SOLUTION
class MyRowParallelLinear(nn.Module):
    """A layer of which this rank has some inputs: [.., inputs/p] to [.., outputs]."""

    def __init__(self, layer, group):
        super().__init__()
        p = group.size()
        rank = group.rank()
        self.group = group
        own_weight = layer.weight.detach().chunk(p, dim=1)[rank].clone()
        self.weight = nn.Parameter(own_weight)
        self.bias = None
        if layer.bias is not None:
            self.bias = nn.Parameter(layer.bias.detach().clone())

    def forward(self, x):
        term = F.linear(x, self.weight)
        y = reduce_from(term, self.group)
        if self.bias is not None:
            y = y + self.bias
        return y
### END SOLUTION

# %% tags=["check"]
check("9.3", MyRowParallelLinear, ranks)

# %% [markdown]
# labcode's own pair is `tensor.ColumnParallelLinear` and `tensor.RowParallelLinear`, which later cells
# use.
#
# **Takeaway: column-parallel, then row-parallel: one all-reduce in forward, one in backward, and nothing in between.
# The second bias is added once, after the sum.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* In 9.2 half of the room cuts dim 1, because "columns" are columns: refer to the transpose.
# Others keep the whole layer as an attribute, so that nothing is saved. In 9.3 the bias goes into `F.linear` out of
# habit. Ask: what would happen to the bias if each rank added bias/p before the sum? (It works in forward; its gradient
# is then 1/p of the true one on every rank, unless that is taken care of as well.)

# %% [markdown]
# ## 3. Attention: whole heads (core, 8 min)
#
# In attention each head computes its softmax by itself. So heads are sharded as features were: the projections to q, k
# and v are column-parallel, and the output projection is row-parallel. But our model, like most, has **one fused
# weight** for the three: the outputs of all queries come first, then those of all keys, then those of all values. Call
# the outputs of one head in q, in k or in v a **piece**.
#
# **Predict.** With four heads there are 12 pieces, in the order q0 q1 q2 q3, k0 and so on to v3. On two ranks, rank 0
# computes the heads 0 and 1. A plain cut in the middle gives it the first six pieces. How many of these six does it
# need?

# %% tags=["predict"]
pieces_needed = 4

# %% tags=["by-hand"]
from labcode.models import layers


def make_attention():
    """4 heads of 16 features, with a causal mask."""
    return layers.Attention(64, 4, causal=True)

# %% tags=["nbval-check-output"]
from course.labs.l09_by_hand import tp_group
from course.labs.l09_shards import difference, is_exact
from labcode.parallel import sharding


def shard_plainly(attention):
    attention.qkv = tensor.ColumnParallelLinear(attention.qkv, tp_group())
    attention.proj = tensor.RowParallelLinear(attention.proj, tp_group())
    return attention

def shard_by_sections(attention):
    sections = (64, 64, 64)  # q, k and v, each cut by itself
    attention.qkv = tensor.ColumnParallelLinear(attention.qkv, tp_group(), sections)
    attention.proj = tensor.RowParallelLinear(attention.proj, tp_group())
    return attention

pieces = [f"{kind}{head}" for kind in "qkv" for head in range(4)]
plain_cut = pieces[:6]
wanted = ["q0", "q1", "k0", "k1", "v0", "v1"]
of_use = set(plain_cut) & set(wanted)
compare("it needs", pieces_needed, len(of_use), within=1, found="counted")
print("a plain cut gives rank 0", " ".join(plain_cut))
for shard in (shard_plainly, shard_by_sections):
    differences = ranks.run(difference, make_attention, shard)[0]
    print(f"{shard.__name__}: the same as one process: {is_exact(differences)}")

# %% [markdown]
# The plain cut has the right shape. The layer takes q0 q1 for queries, q2 q3 for keys and k0 k1 for values, and computes
# a wrong result without any error. By sections, each of q, k and v is cut by itself, and the result is exact. The
# figure shows all weights of a transformer layer on two ranks. Of the biases, which are not drawn, those of qkv and up
# are cut like their columns, and those of proj and down are replicated.

# %% tags=["figure"]
H = 64
thirds = sharding.Shard(0, (H, H, H))
columns = sharding.Shard(0)  # of the stored weight: outputs
rows = sharding.Shard(1)  # of the stored weight: inputs
plot.cuts(
    {
        "qkv\n[H, 3H]": ((3 * H, H), thirds),
        "proj\n[H, H]": ((H, H), rows),
        "up\n[H, 4H]": ((4 * H, H), columns),
        "down\n[4H, H]": ((H, 4 * H), rows),
    },
    parts=2,
    caption="09.cuts",
)

# %% [markdown]
# Models with **grouped queries** have fewer key and value heads than query heads, because several query heads share one
# (Llama 3 has 8 key/value heads at every size). The sections then have different lengths, and nothing else changes as
# long as tp divides the number of key/value heads. With more ranks than that, two ranks hold the same head, and their
# gradients have to be summed as well; labcode does it.
#
# **Takeaway: cut where the computation splits by itself: features of the MLP, heads of the attention. A fused weight
# is cut section by section.**

# %% [markdown]
# ## 4. What it costs (core, 22 min)
#
# A transformer layer has two such pairs of column and row, one in the attention and one in the MLP. Each pair has an f
# and a g.
#
# **Predict.** One layer, B = 8 samples of S = 128 tokens, width H = 256, float32. How many all-reduces are there in
# forward, and how many in backward? How many bytes do their tensors take in all? (`count_collectives(module, x)` runs
# one forward and one backward, and counts the collectives that this rank starts in each, with their bytes.)

# %% tags=["predict"]
all_reduces_forward = 2
all_reduces_backward = 2
bytes_in_all = 4 * (8 * 128 * 256 * 4)

# %% tags=["nbval-check-output"]
from course.labs.l09_by_hand import shard_mlp, tp_group
from course.labs.l09_shards import count_collectives
from labcode.models import layers
from labcode.perf import alpha_beta


def layer_collectives():
    block = layers.Block(256, 4, 1024, causal=True)
    sections = (256, 256, 256)
    attention = block.attention
    attention.qkv = tensor.ColumnParallelLinear(attention.qkv, tp_group(), sections)
    attention.proj = tensor.RowParallelLinear(attention.proj, tp_group())
    block.mlp = shard_mlp(block.mlp)
    return count_collectives(block, torch.randn(8, 128, 256))

forward, backward = ranks.run(layer_collectives)[0]
number_forward, bytes_forward = forward["all_reduce"]
number_backward, bytes_backward = backward["all_reduce"]
counted_bytes = bytes_forward + bytes_backward
compare("forward", all_reduces_forward, number_forward, within=1, found="counted")
compare("backward", all_reduces_backward, number_backward, within=1, found="counted")
compare("bytes", bytes_in_all, counted_bytes, within=1, unit="B", found="counted")

# %% [markdown]
# Four all-reduces of B·S·H numbers in each layer, whatever p is. It does not matter how many parameters the layer has,
# only how many activations go through it. With data parallelism it is the other way round.
#
# And they are hard to hide. The next matmul needs the sum, so in plain code the rank has nothing to compute while an
# all-reduce is in flight. Overlap takes more work: in backward the all-reduce of f can travel while the rank computes
# the weight's gradient, as in Megatron-LM, and a matmul can be cut into pieces, each of which is sent while the next
# one is computed, as in torchtitan's asynchronous tensor parallelism (with the collectives of lesson 10). So what
# decides is the ratio of communication to computation. A layer has 12 H² parameters, 4 H² in the attention and 8 H² in
# the MLP, and each costs 6 FLOPs per token: a multiplication and an addition in forward, and twice as many in backward.
# The p ranks share this work; we leave out the scores of the attention. With GPUs of Φ FLOP/s, links of β bytes/s, and
# activations of 2 bytes, the times for one token give
#
# $$\frac{T_{comm}}{T_{comp}} = \frac{4 \cdot 2\frac{p-1}{p} \cdot 2H / \beta}{72 H^2 / (p\,\Phi)}
# = \frac{2\,(p-1)\,\Phi}{9\,H\,\beta}.$$
#
# There is the factor p - 1 of lesson 08, section 6, again. For Φ we take 692 TFLOP/s, 70 % of an H100's peak, which is
# about what a linear layer alone reached on an H100 in lesson 03, section 1. (Whole training runs, which also wait,
# reach some 40 %.) For example, with H = 4096 and p = 8 on NVLink, on which collectives reach β = 365 GB/s, the ratio
# is 2 · 7 · 692e12 / (9 · 4096 · 365e9) = 0.72. The table of clusters in labcode, `labcode/perf/hardware_data`, has
# these numbers with their sources.
#
# The figure shows the ratio for two widths, on NVLink and with each rank of tp in a node of its own, where it sends
# through one network adapter with β = 50 GB/s.

# %% tags=["figure"]
from labcode.perf.cluster import load_cluster

dgx = load_cluster("dgx-h100")
FLOPS_PER_S = dgx.gpu.layer_flops_per_s("bfloat16")
LINKS = {
    "NVLink": alpha_beta.Link(0, dgx.inside.beta_bytes_per_s),
    "a node each": alpha_beta.Link(0, dgx.between.beta_bytes_per_s),
}
SIZES = {"NVLink": (2, 4, 8), "a node each": (2, 4, 8, 16)}  # a node has 8 GPUs

def ratio(p, hidden, link, tokens=2048):
    communicating = 4 * alpha_beta.time_s("all_reduce", p, tokens * hidden * 2, link)
    computing = 72 * tokens * hidden**2 / p / FLOPS_PER_S
    return communicating / computing

curves = {}
for name, link in LINKS.items():
    for hidden in (4096, 12288):
        ratios = [ratio(p, hidden, link) for p in SIZES[name]]
        curves[f"{name}, H = {hidden}"] = (SIZES[name], ratios)
plot.lines(curves, caption="09.links")

# %% [markdown]
# On NVLink the ratio stays below one up to the 8 GPUs of a node; with a node for each rank it passes one between 2 and
# 4 ranks at H = 4096, and between 4 and 8 at H = 12288. It falls with H, so wide models can be cut further.
#
# What of p = 16 on two **full** nodes? Then eight adapters of each node carry the sum together (lesson 08, section 5),
# 400 GB/s, which is no less than the 365 on NVLink. The ratio goes on as inside a node, to 1.5 at H = 4096 and to 0.5
# at H = 12288. So it is not the bytes alone that keep tp inside the node. An all-reduce over the network also pays the
# network's latency, four times in each layer, and most of these times the rank waits, while the messages of the other
# axes, such as gradients, can hide behind computation. And where NVLink connects more than 8 GPUs, as it does 72 in a
# GB200 NVL72, the node of this rule is that large.
#
# **Takeaway: four all-reduces of B·S·H numbers in each layer, and the computation waits for most of them. Tensor
# parallelism stays inside the node.**

# %% [markdown] tags=["exercise"]
# ### Exercise 9.4 · Llama's MLP
#
# Llama's MLP has three weights: `down(silu(gate(x)) * up(x))`, where `*` multiplies feature by feature, and `F.silu` is
# the function z · sigmoid(z). You are given the **whole** weights as PyTorch stores them, `gate` and `up` [F, H] and
# `down` [H, F], the same on every rank. H is the width of the model, F that inside the MLP, and p divides F. Compute
# the MLP over the group. There is no skeleton, but a list of what the check looks at:
#
# 1. the result is the same as on one process, on every rank of the group;
# 2. each rank does its share of the matmuls and no more;
# 3. one all-reduce in forward, one in backward;
# 4. the gradient of x is right, and so are those of the three weights: a rank has the gradients of its own parts.

# %% tags=["exercise"]
def my_swiglu(x, gate, up, down, group):
    """[.., H] -> [.., H], the same on every rank of the group."""
    ### BEGIN SOLUTION
    p = group.size()
    rank = group.rank()
    own_gate = gate.chunk(p, dim=0)[rank]
    own_up = up.chunk(p, dim=0)[rank]
    own_down = down.chunk(p, dim=1)[rank]
    x = copy_to(x, group)
    inside = F.silu(x @ own_gate.T) * (x @ own_up.T)
    return reduce_from(inside @ own_down.T, group)
    ### END SOLUTION

# %% tags=["check"]
check("9.4", my_swiglu, ranks)

# %% [markdown]
# <details><summary>And Llama's attention?</summary>
#
# Its q, k and v are three layers, so each of them is cut plainly, by whole heads: q, k and v are column-parallel with
# one f in front of all three, and the output is row-parallel. The rotary positions work on each head alone and need
# nothing. With 8 key/value heads tp can be up to 8 without copies.
# </details>

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Typical in 9.4: `copy_to` twice (two sums in backward), or the whole gate on every rank (right
# numbers, no parallelism: the check counts FLOPs). Ask: could gate and up be one fused weight? (Yes, cut by sections.)

# %% [markdown]
# ## 5. The same with DTensor (core, 18 min)
#
# PyTorch's own tensor parallelism needs no new layers. A **DTensor** is a tensor that knows how it is laid out over the
# ranks of a device mesh. Each rank holds a plain tensor, its **local** part, and the layout says what that part is:
#
# - `Replicate()`: every rank holds all of it.
# - `Shard(0)` or `Shard(1)`: the tensor is cut along that dim, and every rank holds one piece.
# - `Partial()`: every rank holds a summand as large as the whole. The tensor is the sum, which nobody has computed yet.

# %% tags=["figure"]
plot.layouts(caption="09.layouts")

# %% [markdown]
# A DTensor needs the device mesh of the ranks that share it, here that of our tensor-parallel groups.

# %% tags=["by-hand"]
from labcode.topology import GridShape


def tp_mesh():
    """The ranks of this rank's tensor-parallel group, as PyTorch wants them."""
    return Grid.create(GridShape(dp=2, tp=2)).mesh["tp"]

# %% [markdown]
# When you compute with DTensors, PyTorch works out the layout of the result, and communicates where it must. For
# example, if x is `Shard(0)` and w is `Replicate()`, each rank has some rows of x and the whole of w, and so it gets
# the same rows of x @ w: the result is `Shard(0)`, and nothing was sent.
#
# **Predict.** X is `Replicate()`, A is `Shard(1)` and B is `Shard(0)`. What layout does X @ A have, and what layout (X
# @ A) @ B? Answer with one of the names above as text, such as `"Shard(0)"`.

# %% tags=["predict"]
layout_of_xa = "Shard(1)"
layout_of_xab = "Partial()"

# %% tags=["nbval-check-output"]
from torch.distributed.tensor import (
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)

from course.labs.l09_shards import spelled


def layout(dtensor):
    placement = dtensor.placements[0]
    if isinstance(placement, Partial):
        return "Partial()"
    if isinstance(placement, Shard):
        return f"Shard({placement.dim})"
    return "Replicate()"

def layouts_of_products():
    mesh = tp_mesh()
    x = distribute_tensor(torch.ones(4, 4), mesh, [Replicate()])
    a = distribute_tensor(torch.ones(4, 8), mesh, [Shard(1)])
    b = distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)])
    xa = x @ a
    xab = xa @ b
    y = xab.redistribute(mesh, [Replicate()])
    summand = xab.to_local()[0, 0].item()
    total = y.to_local()[0, 0].item()
    return layout(xa), layout(xab), summand, total

of_xa, of_xab, summand, total = ranks.run(layouts_of_products)[0]
predictions = {"X A": (layout_of_xa, of_xa), "X A B": (layout_of_xab, of_xab)}
for product, (predicted, found) in predictions.items():
    compare(
        f"layout of {product}", spelled(predicted), found, found="computed",
        options=("Replicate()", "Shard(0)", "Shard(1)", "Partial()"),
    )
print(f"the summand of rank 0 is {summand:g}, the sum is {total:g}")

# %% [markdown]
# That is your MLP in other words: columns give `Shard(1)`, then rows give `Partial()`, and turning a `Partial()` into a
# `Replicate()` is the all-reduce g. In backward, f is the same thing: the gradient of a `Replicate()` that was used
# differently on each rank comes out as `Partial()`, and is summed.
#
# `parallelize_module(module, mesh, plan)` turns the weights of a model into DTensors. The plan names a **style** for
# each layer. A style fixes three layouts: the weight's, the input's and the output's. For linear layers there are two:
#
# | style | weight as stored | input | output |
# |---|---|---|---|
# | `ColwiseParallel()` | `Shard(0)`, the outputs | `Replicate()` | `Shard(-1)`, its features |
# | `RowwiseParallel()` | `Shard(1)`, the inputs | `Shard(-1)`, its features | `Replicate()`, after a sum |
#
# `Shard(-1)` is the last dim. Now our MLP, by hand and by plan, with the same weights.

# %% tags=["nbval-check-output"]
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from course.labs.l09_by_hand import make_attention, make_mlp, shard_mlp
from course.labs.l09_shards import (
    SeparateAttention,
    count_collectives,
    difference,
    is_exact,
)


def mlp_by_plan(mlp):
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(mlp, tp_mesh(), plan)

def number_of_all_reduces(make, shard):
    module = shard(make())
    forward, backward = count_collectives(module, torch.randn(2, 16, 64))
    return forward["all_reduce"][0], backward["all_reduce"][0]

for shard in (shard_mlp, mlp_by_plan):
    differences = ranks.run(difference, make_mlp, shard)[0]
    forward, backward = ranks.run(number_of_all_reduces, make_mlp, shard)[0]
    print(f"{shard.__name__}: exact: {is_exact(differences)}")
    print(f"    all-reduces: {forward} forward, {backward} backward")

# %% [markdown]
# The plan of two lines does what your two classes do.
#
# Models that are written for DTensor have separate layers for q, k and v, which can be cut plainly.
#
# **Predict.** In `SeparateAttention`, three column-parallel layers q, k and v read the same x, and proj is
# row-parallel. Each `ColwiseParallel` layer turns its own input into a DTensor. How many all-reduces are there in
# backward?

# %% tags=["predict"]
sums_in_backward = 3

# %% tags=["nbval-check-output"]
SEPARATE_PLAN = {
    "q": ColwiseParallel(),
    "k": ColwiseParallel(),
    "v": ColwiseParallel(),
    "proj": RowwiseParallel(),
}

def separate_by_plan(attention):
    return parallelize_module(attention, tp_mesh(), SEPARATE_PLAN)

_, backward = ranks.run(number_of_all_reduces, SeparateAttention, separate_by_plan)[0]
compare("sums", sums_in_backward, backward, within=1, found="counted")

# %% [markdown]
# Three: each of the layers has an f of its own, which all-reduces the gradient of x. One all-reduce would do, if each
# rank first added up its three gradients. For that, x must become a DTensor **before** it branches to the three layers,
# and that is what the style `PrepareModuleInput` is for. It leaves the weights of a module alone, and turns its input
# from `input_layouts` into `desired_input_layouts`. In a plan, the name `""` means the module itself, so here the style
# is applied to the input of the whole attention: it takes a plain tensor, which is the same on all ranks
# (`Replicate()`), and passes it on as a DTensor with the same layout.

# %% tags=["nbval-check-output"]
def separate_with_one_f(attention):
    x_enters_once = PrepareModuleInput(
        input_layouts=Replicate(), desired_input_layouts=Replicate()
    )
    plan = SEPARATE_PLAN | {"": x_enters_once}
    return parallelize_module(attention, tp_mesh(), plan)

def fused_by_plan(attention):
    plan = {"qkv": ColwiseParallel(), "proj": RowwiseParallel()}
    return parallelize_module(attention, tp_mesh(), plan)

for make, shard in (
    (SeparateAttention, separate_by_plan),
    (SeparateAttention, separate_with_one_f),
    (make_attention, fused_by_plan),
):
    differences = ranks.run(difference, make, shard)[0]
    _, backward = ranks.run(number_of_all_reduces, make, shard)[0]
    print(f"{shard.__name__}: exact: {is_exact(differences)}, {backward} sums backward")

# %% [markdown]
# The last line is the plain cut of section 3 again: a plan for our fused qkv gives no error, and all numbers are wrong.
# DTensor keeps track of every layout, but it cannot know what the columns **mean**.
#
# Now a whole transformer layer in plain PyTorch: attention and MLP, each with a norm before it and a residual after it.
# A dotted name in a plan reaches a layer inside a module.

# %% tags=["nbval-check-output"]
from torch import nn

from labcode.models import layers


class PlainLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(64)
        self.attention = SeparateAttention(64, 4)
        self.norm2 = nn.LayerNorm(64)
        self.mlp = layers.MLP(64, 256)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))

def layer_by_plan(layer):
    plan = {
        "attention": PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Replicate()
        ),
        "attention.q": ColwiseParallel(),
        "attention.k": ColwiseParallel(),
        "attention.v": ColwiseParallel(),
        "attention.proj": RowwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(),
    }
    return parallelize_module(layer, tp_mesh(), plan)

differences = ranks.run(difference, PlainLayer, layer_by_plan)[0]
forward, backward = ranks.run(number_of_all_reduces, PlainLayer, layer_by_plan)[0]
print(f"exact: {is_exact(differences)}")
print(f"all-reduces: {forward} forward, {backward} backward")

# %% [markdown]
# These are the four all-reduces of section 4. The norms are not in the plan: their weights stay plain tensors, whole on
# every rank, and read plain tensors. Lesson 10, section 4, adds the style for them, `SequenceParallel`, which gives
# each rank some of the tokens.
#
# **Takeaway: a plan replaces your own layers, and other parts of PyTorch understand DTensors, such as its distributed
# checkpoints. Count its collectives, and compare it with the whole model once.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Go through the two rows of the table with the MLP on the board, and introduce the other styles
# where they are used. Ask: in the table, which layout would the output of `RowwiseParallel` have if nothing were sent?
# (`Partial()`.)

# %% [markdown]
# ## 6. A whole GPT (core, 19 min)
#
# `parallelize(model, grid)` does to a whole model what we did by hand. It replaces each qkv and up by a column-parallel
# layer, and each proj and down by a row-parallel one. The embedding is cut along the vocabulary, and so is the output
# layer of the model, which computes a score for each token of the vocabulary. That layer is called the **head** (it has
# nothing to do with the heads of the attention), and it becomes column-parallel.
#
# `weights_table` prints the shape of each weight, whole and on this rank. A block is a transformer layer; block 1 looks
# like block 0 and is left out. Here is what rank 0 holds for dp = 2 and tp = 2.

# %%
from course.labs.l09_shards import adamw_steps, weights_table
from labcode.config import GPTConfig
from labcode.data import sampler, text
from labcode.models import gpt, layers
from labcode.models.parallelize import parallelize
from labcode.topology import GridShape

torch.set_num_threads(1)
splits = text.load(text.TextData(), context_length=64)
config = GPTConfig(
    splits.tokenizer.vocab_size, num_layers=2, num_heads=4, hidden_size=64,
    context_length=64,
)
order = sampler.Batches(len(splits.train), global_batch=16)
batches = [splits.train[order.indices(step)] for step in range(15)]

def build(seed=0):
    return layers.initialize(gpt.GPT(config), seed).double()

def described():
    grid = Grid.create(GridShape(dp=2, tp=2))
    return weights_table(parallelize(build(), grid))

print(ranks.run(described)[0])

# %% [markdown]
# Of the 83 rows of `embed.weight`, one for each character of the text, rank 0 has 42. The head is not in the list
# because it is **tied**: it is the same weight as the embedding, so it is cut in the same way. Positions, norms and the
# biases after a sum are replicated. After backward, `finish_gradient_sync` averages all gradients over dp
# (lesson 04, section 1); nothing needs to be summed over tp, because f and g have done that already.
#
# Now we train: 15 steps of AdamW in float64, on one process, on two grids of four ranks, and once more **broken on
# purpose**, with every f forgotten. dp cuts the batch, tp does not: all ranks of a tp group read the same samples.
# `adamw_steps` is the usual loop: loss, backward, `finish_gradient_sync`, step; it returns the losses.
#
# **Predict.** Without f, the gradient of everything below is incomplete at every step. How far does the loss fall in
# these 15 steps, compared with the true run? Answer `"hardly"` (less than a quarter of it), `"about half"` or
# `"about as far"` (more than three quarters). AdamW divides each number of a gradient by its typical size.

# %% tags=["predict"]
how_far = "about as far"

# %%
def forget_f(module):
    """Every column-parallel layer multiplies without f in front."""
    def without_f(x, weight, bias, *rest):
        return F.linear(x, weight, bias)

    for layer in module.modules():
        if isinstance(layer, tensor.ColumnParallelLinear):
            layer.multiply = without_f

def train_on(shape, forgetting=False):
    """The losses of the whole batch, and this rank's copy of a norm."""
    grid = Grid.create(shape)
    model = parallelize(build(), grid)
    if forgetting:
        forget_f(model.module)

    def own_samples(batch):
        return batch.chunk(shape.dp)[grid.coord("dp")]

    losses = adamw_steps(
        model, model.loss, batches, own_samples, model.finish_gradient_sync
    )
    dist.all_reduce(losses, group=grid.group("dp"))
    return losses / shape.dp, model.module.blocks[0].norm1.weight.detach()

truth = adamw_steps(build(), gpt.loss, batches)
other_seed = adamw_steps(build(seed=1), gpt.loss, batches)
runs = {
    "dp=2 x tp=2": ranks.run(train_on, GridShape(dp=2, tp=2)),
    "tp=4": ranks.run(train_on, GridShape(tp=4)),
    "tp=4, f forgotten": ranks.run(train_on, GridShape(tp=4), forgetting=True),
}

# %%
def fall(losses):
    return (losses[0] - losses[-1]).item()

broken_losses, _ = runs["tp=4, f forgotten"][0]
broken_share = fall(broken_losses) / fall(truth)
how_far_found = "about half"
if broken_share < 1 / 4:
    how_far_found = "hardly"
if broken_share > 3 / 4:
    how_far_found = "about as far"
WORDS = ("hardly", "about half", "about as far")
compare("fall without f", how_far, how_far_found, options=WORDS)
print(f"fall without f: {broken_share:.2f} of the true one")
print(f"fall with another seed: {fall(other_seed) / fall(truth):.2f} of it")
for name, of_ranks in runs.items():
    losses, norm = of_ranks[0]
    apart = max((other - norm).abs().max().item() for _, other in of_ranks)
    off = (losses - truth).abs().max().item()
    print(f"{name:18} losses off by {off:.0e}, copies of a norm apart by {apart:.0e}")

# %% tags=["figure"]
losses = {"one process": truth}
for name, of_ranks in runs.items():
    losses[name] = of_ranks[0][0]
plot.lines(losses, x=range(1, 16), wide="one process", caption="09.without_f")

# %% tags=["figure"]
off = {}
for name, of_ranks in runs.items():
    off[name] = (of_ranks[0][0] - truth).abs().clamp(min=1e-17)
plot.lines(off, x=range(1, 16), caption="09.differences")

# %% [markdown]
# The broken run falls as far as the true one; here the one other seed changes the fall more than the mistake does.
# AdamW helps to hide it: in these first steps it uses little more of each number of a gradient than the sign, and a
# sign can be right although paths are missing. The first loss is even exact, because forward is right. (A difference of
# exactly 0 is drawn at 1e-17.)
#
# Two cheap tests find the mistake at once: compare the loss of the **second** step with one process, and compare the
# copies of a weight that is replicated over tp. With f these are equal to the last bit here (on GPUs up to kernels
# whose sums have no fixed order); without it, each rank has its own.
#
# ### Whose samples?
#
# In your own script a sampler gives each rank its samples. PyTorch's `DistributedSampler` (lesson 04, section 5) takes
# rank and number of shards from the **world** unless you say otherwise. With tp you must: there are as many shards of
# the data as copies of the model, and all ranks of a tp group read the same one. NERSC's `train_mp.py` has two lines
# for this, `params.data_num_shards = comm.get_size("dp")` and `params.data_shard_id = comm.get_rank("dp")`.
#
# The next cell trains on dp = 2 and tp = 2 in both ways. With the sampler's defaults, each of the four ranks reads four
# samples of its own.
#
# **Predict.** What shows the mistake: `"an error"`, the `"losses"`, which differ from those of one process by more than
# 1e-9, the `"copies"` of a norm, which differ from rank to rank by as much, or `"losses and copies"`? Remember that the
# embedding is cut along the vocabulary: each rank looks up the tokens that it has, and the vectors are summed over tp.

# %% tags=["predict"]
what_shows_it = "losses"

# %%
from torch.utils.data import DistributedSampler


def train_with_sampler(by_world):
    """This rank's samples, the losses of all ranks, and this rank's copy of a norm."""
    grid = Grid.create(GridShape(dp=2, tp=2))
    parts = {"num_replicas": grid.size("dp"), "rank": grid.coord("dp")}
    if by_world:
        parts = {}
    mine = list(DistributedSampler(range(16), shuffle=False, **parts))
    model = parallelize(build(), grid)

    def own_samples(batch):
        return batch[mine]

    losses = adamw_steps(
        model, model.loss, batches, own_samples, model.finish_gradient_sync
    )
    dist.all_reduce(losses)
    return mine, losses / 4, model.module.blocks[0].norm1.weight.detach()

by_dp = ranks.run(train_with_sampler, by_world=False)
by_world = ranks.run(train_with_sampler, by_world=True)
def differences_of(of_ranks):
    """How far the losses are from those of one process, and the copies of a norm."""
    _, losses, norm = of_ranks[0]
    off = (losses - truth).abs().max().item()
    apart = max((other - norm).abs().max().item() for _, _, other in of_ranks)
    return {"losses": off, "copies": apart}

differences = differences_of(by_world)
differing = [name for name, difference in differences.items() if difference > 1e-9]
KINDS = ("an error", "losses", "copies", "losses and copies")
compare("shows it", what_shows_it, " and ".join(differing), options=KINDS)
for name, of_ranks in {"by dp": by_dp, "by world": by_world}.items():
    found = differences_of(of_ranks)
    share = fall(of_ranks[0][1]) / fall(truth)
    print(f"{name}: samples", *[samples for samples, _, _ in of_ranks])
    print(f"    losses off by {found['losses']:.0e}, copies apart by "
          f"{found['copies']:.0e}, fall {share:.2f} of the true one")

# %% [markdown]
# Nothing stops the run, since all shapes fit. After the embedding both ranks of a tp group have the same X, and so the
# copies of the norms get the same gradient. But this X belongs to no text. Where the two samples have different tokens,
# the sum takes the vector of the one from rank 0 if its token is in the first half of the vocabulary, and that of the
# other from rank 1 if its token is in the second half: two vectors, one or none. The targets are mixed in the same way.
# The model learns from texts that nobody wrote, and the curve falls as a true one does.
#
# The loss of the **first** step gives it away, if you have one process to compare with. If not, compare the batch
# itself once, at the start: gather the inputs over the tp group; all must be equal.
#
# **Takeaway: every grid gives the losses of one process up to rounding. A curve that looks right proves nothing:
# compare numbers, compare the copies, and give a sampler the rank in dp and the size of dp.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* The best moment of the lesson: show the first figure and ask who would have stopped this run.
# Then the second. Section 7 is optional, and its two exercises are good homework.

# %% [markdown]
# ## 7. The vocabulary (optional, 42 min)
#
# The embedding table, [V, H], is often the largest single weight. It is cut along V, which need not be a multiple of p:
# of our 83 characters the first of two ranks takes 42, and the second 41.
#
# - As the **embedding**, it turns tokens into vectors. A rank looks up the tokens that it has, takes a vector of zeros
#   for the others, and all ranks add up: a g.
# - As the **head**, it turns vectors into V scores for each token, the **logits**. That is a column-parallel layer: an
#   f, and then each rank has the logits of its part of the vocabulary, [B, S, V/p].

# %% [markdown] tags=["exercise"]
# ### Exercise 9.5 · The embedding
#
# Write the layer. With p the size of the group and `rank` this rank's number in it, keep this rank's rows,
# `embedding.weight.tensor_split(p)[rank]`, as the parameter `weight`, again as a copy. The first row of a rank is token
# `first` of the vocabulary, where `first` counts the rows of the ranks before it. In `forward`, `tokens` holds numbers
# from 0 to V - 1. `F.embedding(rows, weight)` looks rows up, and `mask[..., None]` gives a mask one more dim.

# %% tags=["exercise"]
from torch import nn


class MyVocabParallelEmbedding(nn.Module):
    """An embedding of which this rank has some rows: [B, S] tokens to [B, S, H]."""

    def __init__(self, embedding, group):
        super().__init__()
        ### BEGIN SOLUTION
        parts = embedding.weight.detach().tensor_split(group.size())
        rank = group.rank()
        self.group = group
        self.weight = nn.Parameter(parts[rank].clone())
        self.first = 0
        for part in parts[:rank]:
            self.first += len(part)
        ### END SOLUTION

    def forward(self, tokens):
        ### BEGIN SOLUTION
        row = tokens - self.first
        elsewhere = (row < 0) | (row >= len(self.weight))
        some_row = row.masked_fill(elsewhere, 0)
        x = F.embedding(some_row, self.weight)
        x = x.masked_fill(elsewhere[..., None], 0)
        return reduce_from(x, self.group)
        ### END SOLUTION

# %% tags=["check"]
check("9.5", MyVocabParallelEmbedding, ranks)

# %% [markdown]
# Then comes the loss. One could gather the logits, so that each rank has all of them. But look at what the
# cross-entropy needs of the V logits z of a token:
#
# $$\ell = \log \sum_v e^{z_v - m} - (z_{target} - m), \qquad m = \max_v z_v.$$
#
# That is three numbers: a maximum, a sum, and a single logit, which one of the ranks has. (The maximum cancels; it is
# subtracted so that no exponential becomes too large.) Each of the three is an all-reduce of one number for each token.
#
# The next cell counts both ways on two ranks, for 512 tokens in float32 and GPT-2's vocabulary, rounded up to 50304.

# %% tags=["nbval-check-output"]
from course.labs.l09_by_hand import tp_group, tp_mesh
from labcode.comm.collectives import all_gather
from labcode.comm.counting import counted, totals


def both_losses(tokens=512, vocab=50304):
    group = tp_group()
    torch.manual_seed(0)
    logits = torch.randn(tokens, vocab)
    targets = torch.randint(vocab, (tokens,))
    own = logits.chunk(2, dim=-1)[group.rank()].contiguous()
    with counted() as gathering:
        gathered = F.cross_entropy(all_gather(own, group, dim=-1), targets)
    with counted() as reducing:
        of_tokens = tensor.vocab_parallel_cross_entropy(own, targets, group, vocab)
    same = torch.allclose(gathered, of_tokens.mean())
    return totals(gathering)["all_gather"][1], totals(reducing)["all_reduce"][1], same

gathered_bytes, reduced_bytes, same = ranks.run(both_losses)[0]
print(f"gathered logits: {gathered_bytes:,} bytes, three numbers: {reduced_bytes:,}")
print("same loss:", same)

# %% [markdown]
# Gathered logits would also have to **stay** on every rank for backward. With Llama 3's vocabulary of 128256 tokens and
# a sequence of 8192 that is 8192 · 128256 · 4 bytes, more than 4 GB.

# %% [markdown] tags=["exercise"]
# ### Exercise 9.6 · Loss without logits
#
# Write the loss of each token. `logits` [T, columns] are this rank's, and the first of its columns is number `first` of
# the whole vocabulary. `targets` [T] holds numbers of the whole vocabulary, the same on every rank. Backward must work
# as well: the sums go through `reduce_from`, whose backward hands the gradient on. The maximum needs no gradient: take
# it from `logits.detach()`, and use `dist.all_reduce` with `op=dist.ReduceOp.MAX`. `z.gather(-1, column[:, None])[:,
# 0]` picks one column in each row.

# %% tags=["exercise"]
def my_loss(logits, targets, first, group):
    """[T] losses, the same on every rank of the group."""
    ### BEGIN SOLUTION
    peak = logits.detach().amax(-1)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
    shifted = logits - peak[:, None]
    own_sum = shifted.exp().sum(-1)
    column = targets - first
    elsewhere = (column < 0) | (column >= logits.shape[-1])
    some_column = column.masked_fill(elsewhere, 0)
    own_target = shifted.gather(-1, some_column[:, None])[:, 0]
    own_target = own_target.masked_fill(elsewhere, 0)
    denominator = reduce_from(own_sum, group)
    target = reduce_from(own_target, group)
    return denominator.log() - target
    ### END SOLUTION

# %% tags=["check"]
check("9.6", my_loss, ranks)

# %% [markdown]
# PyTorch has both of them too. In a plan, an embedding that is cut along the vocabulary is
# `RowwiseParallel(input_layouts=Replicate())`: its weight is stored as [V, H], so the rows of the table are `Shard(0)`.
# The loss is no style but a context: within `with loss_parallel():`, `F.cross_entropy` accepts logits that are a
# DTensor, `Shard(-1)`, and does not gather them. Backward has to run inside it as well. Does it give the same numbers
# as ours?

# %% tags=["nbval-check-output"]
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel


def loss_by_dtensor():
    mesh = tp_mesh()
    torch.manual_seed(0)
    logits = torch.randn(512, 1000, dtype=torch.float64)
    targets = torch.randint(1000, (512,))
    own = logits.chunk(2, dim=-1)[mesh.get_local_rank()].contiguous()
    as_dtensor = DTensor.from_local(own, mesh, [Shard(-1)])
    with loss_parallel(), counted() as calls:
        loss = F.cross_entropy(as_dtensor, targets)
    expected = F.cross_entropy(logits, targets)
    return torch.allclose(loss.to_local(), expected), totals(calls)["all_reduce"]

same, (number, num_bytes) = ranks.run(loss_by_dtensor)[0]
print(f"same loss: {same}; {number} all-reduces, {num_bytes} bytes")
print(f"three numbers for each token are {512 * 3 * 8} bytes")

# %% [markdown]
# **Takeaway: do not gather what you are going to reduce. Three numbers for each token replace V of them.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* 9.5: people forget to mask after the lookup (the tokens of others then add the vector of row 0),
# or do not shift by `first`. 9.6: a maximum of each rank's own is the classical mistake, and the check names it;
# another is `dist.all_reduce` on the sums, whose loss is right and whose gradient does not exist.

# %%
ranks.close()

# %% [markdown]
# ## 8. From here to GPUs and SLURM (core, 2 min)
#
# | where | start |
# |---|---|
# | 2 GPUs of one machine | `torchrun --nproc-per-node=2 -m labcode.train gpt_tiny --parallel.tp 2` |
# | 8 GPUs, dp = 2 | `torchrun --nproc-per-node=8 -m labcode.train gpt_tiny --parallel.tp 4` |
# | SLURM, inside a job of two nodes | `srun --nodes=2 --ntasks-per-node=8 python -m labcode.train gpt_tiny --parallel.tp 4` |
#
# What tp leaves over goes to dp, and tp is the fastest axis, so it stays inside the node. (Under `srun`, export
# `MASTER_ADDR` and `MASTER_PORT` first, the variables of lesson 04; lesson 14 writes such a script.) In real runs two
# more things matter. The matmuls become thin, and below some width they no longer keep a GPU busy. And norms, dropout
# and residuals are still replicated, with all their activations; lesson 10 removes that. As long as it is replicated,
# dropout must draw the **same** numbers on all ranks of tp, and inside the attention different ones.

# %% [markdown]
# ## Questions (core, 3 min)
#
# **1.** A model has dropout between the MLP's second layer and the residual, after g. Each rank draws its own random
# numbers. What happens?
#
# <details><summary>Answer</summary>
#
# After g all ranks hold the same tensor. With different masks they no longer do, so the copies of everything that
# follows differ, although every collective is right. There the ranks of tp need the same random numbers. DTensor counts
# on it as well: give all ranks of a pipeline stage the same seed. (If they differ, PyTorch 2.13 copies the random state
# of rank 0, and warns that this is deprecated.)
# </details>
#
# **2.** Why is there no f in front of the row-parallel layer?
#
# <details><summary>Answer</summary>
#
# Its input is not one tensor that several ranks use: each rank has its own features, and is the only one to use them.
# So the gradient of these features is complete on that rank.
# </details>
#
# **3.** Somebody cuts the fused qkv of a model plainly, trains it from the start on 2 ranks, and the loss falls well.
# What is wrong?
#
# <details><summary>Answer</summary>
#
# It trains another network: on each rank other pieces serve as queries, keys and values, and it may learn like that.
# But its weights fit no other value of tp, and no published checkpoint can be loaded.
# </details>
#
# **4.** (Lesson 08.) With 16 ranks, dp = 2, tp = 8 and the order `dp-tp-pp-cp`, which ranks are the tp group of rank 0,
# and why is that a bad idea on nodes of 8?
#
# <details><summary>Answer</summary>
#
# 0, 2, 4, ..., 14. Half of them are on the other node, so the four all-reduces of every layer cross between nodes.
# </details>

# %% [markdown]
# ## Recap
#
# | concept | formula or fact | in labcode |
# |---|---|---|
# | f | forward nothing, backward a sum | `comm.collectives.copy_to` |
# | g | forward a sum, backward nothing | `comm.collectives.reduce_from` |
# | f forgotten | error below about √((p-1)/p); copies drift apart, the loss falls all the same | |
# | column, then row | one f, one g, bias after the sum | `parallel.tensor` |
# | attention | whole heads, section by section | `parallel.sharding.Shard` |
# | per layer | 4 all-reduces of B·S·H numbers | `comm.counting` |
# | link | communicating / computing = 2 (p-1) Φ / (9 H β) | `perf.alpha_beta` |
# | DTensor | Replicate, Shard, Partial; a style for each layer | `Grid.mesh` |
# | loss | 3 numbers for each token, not V | `vocab_parallel_cross_entropy` |
# | whole model | table of modules | `models.parallelize` |
#
# ## Sources
#
# - Shoeybi et al. 2019, arXiv:1909.08053, section 3: f, g, MLP, attention, loss.
# - Narayanan et al. 2021, arXiv:2104.04473, section 3: inside the node.
# - Ainslie et al. 2023, arXiv:2305.13245: grouped queries. Llama Team 2024, arXiv:2407.21783, table 3: its heads;
#   `vocab_size` in the `config.json` of its published models: 128256.
# - Shazeer 2020, arXiv:2002.05202: the MLP of exercise 9.4.
# - Rajbhandari et al. 2020, arXiv:1910.02054, section 3.1: 16 bytes for each parameter.
# - NVIDIA H100 datasheet, 2023: bfloat16, NVLink. DGX H100 datasheet, 2022: 400 Gb/s. NVIDIA GB200 NVL72, 2024.
# - Megatron-LM, <https://github.com/NVIDIA/Megatron-LM>, `megatron/core/tensor_parallel/layers.py`: the all-reduce of f
#   beside the weight's gradient.
# - NERSC, *Deep Learning at Scale*, <https://github.com/NERSC/dl-at-scale-training>: the two lines for a sampler.
# - PyTorch team 2024, asynchronous tensor parallelism in torchtitan:
#   https://discuss.pytorch.org/t/distributed-w-torchtitan-introducing-async-tensor-parallelism-in-pytorch/209487
# - PyTorch: https://docs.pytorch.org/docs/stable/distributed.tensor.html and
#   https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html
