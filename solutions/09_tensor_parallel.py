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
# Data parallelism needs ranks that can hold the whole model. With AdamW a parameter takes 16 bytes, so 7 billion take 112 GB, more than
# most GPUs have. **Tensor parallelism** cuts the inside of every layer: each rank holds a part of each weight matrix, all ranks work on
# the same samples at the same time, and add up their partial results. The arithmetic is simple. The gradients are not.
#
# ## Goals
#
# - say why autograd gets an all-reduce wrong, and write the two operators that cure it;
# - cut an MLP, an attention, an embedding and a loss so that each communicates as little as possible;
# - predict how many collectives and bytes a layer costs, count them, find them in a profile, and say which link they belong on;
# - use PyTorch's `parallelize_module`, and know what it does not tell you.
#
# **Time**: 90 minutes. **Needs**: lessons 01 (all-reduce) and 08 (groups).

# %%
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from labcode.comm.collectives import all_gather, copy_to, reduce_from
from labcode.comm.counting import counted, totals
from labcode.config import GPTConfig
from labcode.models import gpt, layers
from labcode.parallel import tensor
from labcode.parallel.sharding import Shard
from labcode.perf import alpha_beta as comm
from labcode.perf import trace
from labcode.pool.ranks import Ranks
from labcode.teach.check import check, compare
from labcode.teach.exercises import l09
from labcode.teach.figures import plot
from labcode.teach.figures.weights import cuts
from labcode.teach.labs.l09_shards import (
    SeparateAttention,
    adamw_steps,
    count_collectives,
    difference,
)
from labcode.topology import GridShape

# %% [markdown]
# ## 1. What autograd does not know
#
# Take the two matrix products of an MLP, $Y = \mathrm{gelu}(XA)\,B$. Cut $A$ into two halves of columns and $B$ into two halves of rows:
#
# $$Y = \mathrm{gelu}(XA_0)\,B_0 + \mathrm{gelu}(XA_1)\,B_1.$$
#
# Rank $r$ holds $A_r$ and $B_r$, reads the whole $X$ and computes one term. One all-reduce adds the two, and both ranks have $Y$. Let us
# do just that. Below the MLP lies a small layer that makes $X$, and that both ranks hold whole.

# %%
ranks = Ranks(2)

def gradients(rank, p, enter=lambda x: x, leave=lambda y: y):
    """Output and gradients on rank `rank` of `p`; `enter` and `leave` are what happens where the MLP begins and where it ends."""
    torch.manual_seed(0)  # the same numbers in every process
    inputs, target, below = torch.randn(3, 64, 64, dtype=torch.float64) / 8
    a, b = torch.randn(2, 64, 256, dtype=torch.float64) / 8
    own = {"below": below, "a": a.chunk(p, dim=1)[rank], "b": b.chunk(p, dim=1)[rank].T}
    w = {name: part.clone().requires_grad_() for name, part in own.items()}
    y = leave(F.gelu(enter(inputs @ w["below"]) @ w["a"]) @ w["b"])
    (y - target).square().mean().backward()
    return y.detach(), {name: part.grad for name, part in w.items()}

# %% [markdown]
# **Predict.** Two ranks, and `leave` is a plain `dist.all_reduce(y)`. The output is right, so the loss is right. And the gradients of
# $A_r$, of $B_r$, and of the layer below? Write the relative error that you expect of each, 0 if it is right. For the last one: $X$
# reaches the loss on two paths, one through each rank, and autograd runs inside one process. Take the two contributions for equally long
# and independent.

# %% tags=["predict"]
a_error, b_error = 0, 0  # a rank knows all that these need: X, its own parts, and the gradient of Y
below_error = math.sqrt(1 / 2)  # one of two independent vectors is missing: 1/sqrt(2) of their sum

# %%
def plain_sum(y):
    dist.all_reduce(y.detach())  # in place, on the memory of y; with y itself PyTorch does the same and warns once
    return y

def errors(results):
    """{name: relative error of its gradient against one process}, the larger of two ranks."""
    whole = gradients(0, 1)[1]
    parts = {"below": [whole["below"]] * 2, "a": whole["a"].chunk(2, 1), "b": whole["b"].chunk(2, 0)}
    return {name: max(((grads[name] - part).norm() / part.norm()).item() for (_, grads), part in zip(results, parts[name])) for name in parts}

plain = ranks.run(gradients, 2, leave=plain_sum)
print("output equal to one process:", all((y - gradients(0, 1)[0]).abs().max() < 1e-12 for y, _ in plain))
for name, guess in {"a": a_error, "b": b_error, "below": below_error}.items():
    compare(f"relative error of {name}", guess, round(errors(plain)[name], 9))
print("both copies of the layer below get one gradient:", torch.equal(plain[0][1]["below"], plain[1][1]["below"]))

# %% [markdown]
# The output is exact, and so are the gradients of the MLP's own weights. That of the layer below is wrong by about two thirds: a little
# less than for independent paths, where $p$ ranks would give $\sqrt{(p-1)/p}$. And each rank is wrong in its own way, so after one step
# the two copies of the layer below are no longer the same layer. No error; at most one warning in each process that no autograd kernel is
# registered for `allreduce_`, a line among hundreds.
#
# What should have happened? Follow a tensor and count its copies.
#
# - Where the MLP **begins**, one $X$ enters two computations. Forward there is nothing to do. Backward its gradient is the **sum** of
#   both paths. Shoeybi et al. call this operator *f*.
# - Where it **ends**, two partial results become one $Y$: a **sum** forward. Backward there is nothing to do: each term has the gradient
#   of the sum, and each rank has that already, since both computed the loss. This is *g*.
#
# Mirror images. The plain all-reduce was a correct *g* by accident. *f* was missing.

# %% [markdown] tags=["exercise"]
# ### Exercise 9.1 · f and g
#
# Write both as autograd Functions. Two bodies are missing. Careful: `all_reduce` works in place, and neither the input of forward nor the
# gradient that backward is handed is yours to change. A backward returns one gradient for each argument of forward; that of the group is
# `None`.

# %% tags=["exercise"]
class CopyTo(torch.autograd.Function):  # f
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)  # a view: autograd must not see its own input come back

    @staticmethod
    def backward(ctx, grad):
        ### BEGIN SOLUTION
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None
        ### END SOLUTION

class ReduceFrom(torch.autograd.Function):  # g
    @staticmethod
    def forward(ctx, x, group):
        ### BEGIN SOLUTION
        summed = x.clone()
        dist.all_reduce(summed, group=group)
        return summed
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad):
        return grad, None

# %% tags=["check"]
check("9.1", lambda: l09.copy_and_reduce(CopyTo, ReduceFrom, ranks))

# %%
def f(x):
    return copy_to(x, dist.group.WORLD)

def g(y):
    return reduce_from(y, dist.group.WORLD)

right, doubled = (ranks.run(gradients, 2, f, leave) for leave in (g, lambda y: g(f(y))))
print("with f and g, relative errors:", {name: f"{error:.0e}" for name, error in errors(right).items()})
print("sums both ways, length of the gradient of a:", round((doubled[0][1]["a"].norm() / right[0][1]["a"].norm()).item(), 6))

# %% [markdown]
# With `copy_to` and `reduce_from` of `labcode.comm.collectives` all is exact. The last line is a second trap: an all-reduce that sums
# **backward as well**, as `torch.distributed.nn.functional.all_reduce` does. All ranks compute the same loss here, so each hands back the
# same gradient, and every gradient is p times too long.
#
# **Takeaway: where a tensor enters computations that differ by rank, put f; where partial results become one, put g. Autograd will not
# miss either.**
#
# ## 2. Columns, then rows
#
# PyTorch's `nn.Linear` keeps its weight as [outputs, inputs]. Two ways to cut it (the names come from $XA$, where outputs are columns):
#
# | | input | output | weight on a rank | bias on a rank |
# |---|---|---|---|---|
# | **column-parallel** | whole | some features | [outputs/p, inputs] | [outputs/p] |
# | **row-parallel** | some features | partial sum | [outputs, inputs/p] | whole |
#
# What a column-parallel layer gives is just what a row-parallel one wants. So the pair needs one *f* before, one *g* after, and nothing
# between.
#
# **Predict.** An MLP of width 64, inside 256, with biases, over 2 ranks. How many parameters does a rank hold?

# %% tags=["predict"]
held_guess = 128 * 64 + 128 + 64 * 128 + 64  # half of everything but the second bias

# %% tags=["nbval-check-output"]
def shard_mlp(mlp):
    """Put this rank's share in place of the whole layers."""
    mlp.up = tensor.ColumnParallelLinear(mlp.up, dist.group.WORLD)
    mlp.down = tensor.RowParallelLinear(mlp.down, dist.group.WORLD)
    return mlp

def make_mlp():
    return layers.MLP(64, 256)

shapes = ranks.run(lambda: {name: list(param.shape) for name, param in shard_mlp(make_mlp()).named_parameters()})[0]
print(shapes)
compare("parameters on a rank", held_guess, sum(math.prod(shape) for shape in shapes.values()), within=1)
print("exact on each rank:", [max(map(float, errors)) < 1e-12 for errors in ranks.run(difference, make_mlp, shard_mlp)])

# %% [markdown]
# `difference` runs the whole MLP and the rank's share on the same input, forward and backward: equal to rounding. GELU works on each
# feature alone and does not care that half of them are elsewhere.
#
# Rows first would leave a partial **sum** between the layers, and GELU is not linear. And the second bias, which every rank has whole,
# must be added **after** the sum.
#
# **Predict.** (a) Two ranks hold the partial sums 1 and −1; gelu of the sum is gelu(0) = 0. What is the sum of the gelus? (gelu(1) is
# 0.84, and gelu(x) − gelu(−x) = x.) (b) If each rank adds the bias before the sum, by how many biases is the output too large?

# %% tags=["predict"]
sum_of_gelus = 0.84 + (0.84 - 1)
biases_guess = 1  # p - 1

# %% tags=["nbval-check-output"]
def too_large(x_size=128):
    """By how many biases, if it is added before the sum."""
    torch.manual_seed(0)
    row, x = tensor.RowParallelLinear(nn.Linear(2 * x_size, 64), dist.group.WORLD), torch.ones(x_size)
    early = reduce_from(F.linear(x, row.weight, row.bias), row.group)
    return ((early - row(x)).sum() / row.bias.sum()).item()

compare("sum of the gelus", sum_of_gelus, F.gelu(torch.tensor([1.0, -1.0])).sum())
compare("biases too many", biases_guess, round(ranks.run(too_large)[0], 2))

# %% [markdown]
# Rows first would need the sum before GELU may go on: an all-reduce in the middle, of a tensor four times as wide.
#
# **Takeaway: column-parallel, then row-parallel: one sum forward, one backward, nothing between. The second bias is added once, after the
# sum.**
#
# ## 3. Attention: whole heads
#
# Each head computes its softmax alone, so heads are shared out as features were: the projections to q, k and v are column-parallel, the
# output projection is row-parallel. But our model, like most, has **one fused weight**: all rows of the queries, then of the keys, then
# of the values.
#
# **Predict.** Four heads, so 12 blocks of rows. A plain cut in the middle gives rank 0 six of them. How many of these does it need?

# %% tags=["predict"]
needed_guess = 4  # it gets q0 q1 q2 q3 k0 k1 and needs q0 q1 k0 k1 v0 v1

# %% tags=["figure"]
def shard_attention(*sections):
    def shard(attention):
        attention.qkv = tensor.ColumnParallelLinear(attention.qkv, dist.group.WORLD, sections or None)
        attention.proj = tensor.RowParallelLinear(attention.proj, dist.group.WORLD)
        return attention
    return shard

blocks, make_attention = [f"{kind}{head}" for kind in "qkv" for head in range(4)], lambda: layers.Attention(64, 4, causal=True)
got = {"plain": Shard(0), "by sections": Shard(0, (4, 4, 4))}
got = {name: [blocks[i] for i in split.take(torch.arange(12), 0, 2)] for name, split in got.items()}
compare("blocks that rank 0 needs", needed_guess, len(set(got["plain"]) & set(got["by sections"])), within=1)
for name, sections in {"plain": (), "by sections": (64, 64, 64)}.items():
    print(f"{name:11} rank 0 has {' '.join(got[name])}; errors", *ranks.run(difference, make_attention, shard_attention(*sections))[0])
H, thirds = 64, Shard(0, (64, 64, 64))
cuts({"qkv [3H, H]": ((3 * H, H), thirds), "bias": ((3 * H,), thirds), "proj [H, H]": ((H, H), Shard(1)), "bias ": ((H,), None),
      "up [4H, H]": ((4 * H, H), Shard(0)), "bias  ": ((4 * H,), Shard(0)), "down [H, 4H]": ((H, 4 * H), Shard(1)), "bias   ": ((H,), None)},
     parts=2, title="One layer on two ranks",
     alt="The fused weight is cut in each of its three sections, up along its rows, the two output projections along their columns")

# %% [markdown]
# - **A plain cut** has the right shape: the layer reads q0 q1 | q2 q3 | k0 k1, takes queries for keys and keys for values, computes, and
#   is wrong by as much as the values themselves. Nothing fails.
# - **By sections**, each of q, k and v is cut by itself, and the result is exact. The figure shows how the weights of a layer are cut.
#   Grey is whole: the biases that come after a sum, and the norms, which are not drawn.
# - **Grouped-query** attention has fewer key/value heads than query heads, several queries share one. Its sections have different
#   lengths. Llama 3 has 8 key/value heads at every size, so 8 ranks get one each. On 16 ranks two of them hold the same head, as in
#   Megatron-LM, and the sum of the two gradients is one more thing to remember: `labcode` does it, the hand-written cut below does not.
#
# Here 4 query heads and 2 key/value heads work on 2 ranks. On 3 ranks the heads go neither way, and that is said before any process
# group is made.

# %% tags=["raises-exception"] raises="ValueError: model.num_kv_heads=2 is neither a multiple nor a divisor of"
from labcode.config import ParallelConfig

print("on 2 ranks, errors:", *ranks.run(difference, lambda: layers.Attention(64, 4, 2, causal=True), shard_attention(64, 32, 32))[0])
ParallelConfig().check(GPTConfig(hidden_size=96, num_heads=6, num_kv_heads=2), GridShape(tp=3))

# %% [markdown]
# **Takeaway: cut where the computation falls apart by itself: features of the MLP, heads of the attention. A fused weight is cut section
# by section.**
#
# ## 4. The vocabulary
#
# The table of the vocabulary, [V, H], is cut along V, which need not be a multiple of p: of 83 characters the first rank takes 42.
#
# - As the **embedding** it turns tokens into vectors. A rank looks up the tokens that it has, takes zeros for the others, and all add up:
#   a *g*.
# - As the **head** it turns vectors into V scores per token, the logits. That is column-parallel: an *f*, then [B, S, V/p] on each rank.
#
# Then the loss. One could gather the logits. But look at what cross-entropy needs of a token's V logits:
#
# $$\ell = \log \sum_v e^{z_v - m} - (z_{target} - m), \qquad m = \max_v z_v.$$
#
# Three numbers: a maximum, a sum, and one logit, which one rank has. Each is an all-reduce of one number per token.
#
# **Predict.** A vocabulary of 50304 (GPT-2's, rounded up), float32, 512 tokens. How many bytes are the gathered logits, how many the
# three numbers (the tensors, not yet what a rank sends), and what is the ratio?

# %% tags=["predict"]
gathered_guess, three_guess = 512 * 50304 * 4, 512 * 3 * 4
ratio_guess = 50304 / 3

# %% tags=["nbval-check-output"]
def both_losses(tokens=512, vocab=50304):
    """Bytes of the collectives with gathered logits and without, and the difference of the losses."""
    torch.manual_seed(0)
    logits, targets = torch.randn(tokens, vocab), torch.randint(vocab, (tokens,))
    own = logits.chunk(2, -1)[dist.get_rank()].contiguous()
    with counted() as gathering:
        gathered = F.cross_entropy(all_gather(own, dist.group.WORLD, dim=-1), targets)
    with counted() as reducing:
        reduced = tensor.vocab_parallel_cross_entropy(own, targets, dist.group.WORLD, vocab).mean()
    return totals(gathering)["all_gather"][1], totals(reducing)["all_reduce"][1], abs(gathered - reduced).item()

gathered, three, apart = ranks.run(both_losses)[0]
compare("bytes of the logits", gathered_guess, gathered, within=1, unit="B")
compare("bytes of three numbers", three_guess, three, within=1, unit="B")
compare("ratio of the tensors", ratio_guess, gathered / three, within=1)
print("same loss:", apart < 1e-5, "  Llama 3's logits of 8192 tokens:", f"{8192 * 128256 * 4 / 1e9:.1f} GB")

# %% [markdown] tags=["exercise"]
# The ratio of the tensors is V/3. (On the wire it is V/6: for the same tensor, a ring's all-reduce sends twice as much as its all-gather.)
# That is half of the gain: gathered logits would also have to **stay** on every rank for backward. With Llama 3's vocabulary of 128256
# that is more than 4 GB for 8192 tokens. (Backward needs nothing from anyone: the gradient of a logit is its softmax, minus one at the
# target.)
#
# **Takeaway: do not gather what you are going to reduce.**
#
# ### Exercise 9.2 · Loss without logits
#
# Write the forward pass. `logits` [T, columns] are this rank's; the first column is number `first` of the whole vocabulary. Return the
# loss of each token. `dist.all_reduce` knows `op=dist.ReduceOp.MAX`.

# %% tags=["exercise"]
def my_loss(logits, targets, first, group):
    """[T] losses, the same on every rank."""
    ### BEGIN SOLUTION
    peak = logits.amax(-1)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
    shifted = logits - peak[:, None]
    column = targets - first
    elsewhere = (column < 0) | (column >= logits.shape[-1])
    target = shifted.gather(-1, column.masked_fill(elsewhere, 0)[:, None])[:, 0].masked_fill(elsewhere, 0)
    both = torch.stack((shifted.exp().sum(-1), target))
    dist.all_reduce(both, group=group)
    return both[0].log() - both[1]
    ### END SOLUTION

# %% tags=["check"]
check("9.2", lambda: l09.vocabulary_loss(my_loss, ranks))

# %% [markdown]
# ## 5. Count, then look
#
# Put together, a layer has two pairs of *f* and *g*, one around the attention and one around the MLP. `counted()` writes down every
# collective that this process starts, whoever starts it, with the bytes of its tensor; `collectives` sorts them into forward and
# backward.
#
# **Predict.** One layer, B = 8 samples of S = 128 tokens, H = 256, float32: how many all-reduces forward, how many backward, and how many
# bytes in all?

# %% tags=["predict"]
forward_guess, backward_guess = 2, 2  # two g, two f
layer_bytes_guess = 4 * (8 * 128 * 256 * 4)

# %% tags=["nbval-check-output"]
def sharded_layer():
    block = layers.Block(256, 4, 1024, causal=True)
    block.attention, block.mlp = shard_attention(256, 256, 256)(block.attention), shard_mlp(block.mlp)
    return block

forward, backward = ranks.run(lambda: count_collectives(sharded_layer(), torch.randn(8, 128, 256)))[0]
compare("all-reduces forward", forward_guess, forward["all_reduce"][0], within=1)
compare("all-reduces backward", backward_guess, backward["all_reduce"][0], within=1)
compare("their bytes", layer_bytes_guess, forward["all_reduce"][1] + backward["all_reduce"][1], within=1, unit="B")

# %% [markdown]
# Four all-reduces of B·S·H numbers in each layer, whatever p is; on a ring a rank sends 2(p − 1)/p of that. How many weights the layer
# has does not matter, only how many activations go through: the opposite of data parallelism.
#
# And the time? We fit the alpha-beta model of lesson 01 to a small and a large message, predict the four all-reduces of 1 MB, and record
# eight profiles of the layer. In a profile, an all-reduce lasts until the **slower** rank has come; so of each we take the fastest; on
# busy cores even that is an upper bound.

# %%
from labcode.comm.timing import call_times


def fastest_s(num_bytes):
    """Seconds of an all-reduce until the last rank is done; the fastest of 30."""
    return min(map(max, zip(*ranks.run(call_times, dist.all_reduce, num_bytes, repeats=30))))

act_bytes = 8 * 128 * 256 * 4
link = comm.fit("all_reduce", 2, [1000, 8 * act_bytes], [fastest_s(1000), fastest_s(8 * act_bytes)])
print(f"alpha {link.alpha_s * 1e6:.0f} us, beta {link.beta_bytes_per_s / 1e9:.2f} GB/s")

# %% tags=["figure"]
def profiles(rank):
    block, x = sharded_layer(), torch.randn(8, 128, 256, requires_grad=True)
    return trace.record(lambda: block(x).square().mean().backward(), 8, f"rank {rank}")

steps = list(zip(*ranks.run(profiles)))  # [(rows of rank 0, rows of rank 1), ...]
sending = [[stop - start for _, label, start, stop in rows if label == "all-reduce"] for step in steps for rows in step]
print("all-reduces in each profile:", {len(one) for one in sending})
compare("four all-reduces", 4 * comm.time_s("all_reduce", 2, act_bytes, link), sum(map(min, zip(*sending))) / 1e3, within=2, unit="s")
shortest = min(steps, key=lambda step: max(row[3] for rows in step for row in rows))
plot.timeline([row for rows in shortest for row in rows], xlabel="ms", title="One layer, forward and backward",
              alt="On both ranks four all-reduces interrupt the computing, two in the forward half and two in the backward half")

# %% [markdown]
# Two forward, two backward, and while one is under way **nothing else happens**: the next product needs the sum. (Gaps without a bar are
# Python, or a busy core.) Data parallelism hides its communication behind backward. And here?
#
# - **In this form** forward can hide nothing; a backward *f* could travel beside the product for the weight's gradient, as in Megatron-LM.
# - **With lesson 10's all-gather and reduce-scatter**, product and message can be cut into chunks that overlap: PyTorch's async tensor
#   parallelism, Megatron-LM's `--tp-comm-overlap`.
#
# So the link decides. Per layer and token, with $12 H^2$ weights, 6 FLOPs each, in bfloat16, without attention's own products:
#
# $$\frac{T_{comm}}{T_{comp}} = \frac{4 \cdot 2\frac{p-1}{p} \cdot 2H / \beta}{72 H^2 / (p\,\Phi)} = \frac{2\,(p-1)\,\Phi}{9\,H\,\beta}$$
#
# **Predict.** H = 4096, p = 8, Φ = 396 TFLOP/s (40 % of an H100's peak): the ratio on NVLink, 450 GB/s, and on InfiniBand, 50 GB/s?

# %% tags=["predict"]
nvlink_guess = 2 * 7 * 396e12 / (9 * 4096 * 450e9)
infiniband_guess = nvlink_guess * 9

# %% tags=["figure"]
LINKS = {"NVLink": comm.Link(0, 450e9), "InfiniBand": comm.Link(0, 50e9)}

def ratio(p, hidden, link, tokens=2048, flops_per_s=396e12):
    return 4 * comm.time_s("all_reduce", p, tokens * hidden * 2, link) / (72 * tokens * hidden**2 / p / flops_per_s)

compare("NVLink, by perf.comm", nvlink_guess, ratio(8, 4096, LINKS["NVLink"]))
compare("InfiniBand, by perf.comm", infiniband_guess, ratio(8, 4096, LINKS["InfiniBand"]))
plot.lines({f"{name}, H = {hidden}": [ratio(p, hidden, link) for p in (2, 4, 8, 16)] for name, link in LINKS.items() for hidden in (4096, 12288)},
           x=(2, 4, 8, 16), logy=True, xlabel="tensor-parallel ranks", ylabel="communicating / computing", reference={"equally long": 1},
           alt="The ratio grows with the ranks; NVLink stays below one up to 16 ranks, InfiniBand reaches one by 4 ranks at width 4096, by 8 at 12288")

# %% [markdown] tags=["exercise"]
# Twice the ranks means half the computing and a little more communication, so the ratio grows with p − 1. It falls with H: wide models
# can be cut further. On InfiniBand a layer of width 4096 communicates longer than it computes from 4 ranks on.
#
# **Takeaway: four all-reduces of B·S·H per layer, in the way of everything. Tensor parallelism stays inside the node.**
#
# ### Exercise 9.3 · The bill of a whole GPT
#
# How many all-reduces does one forward and backward of a whole model make, and how many bytes are their tensors? Go from bottom to top:
# embedding, layers, head, loss (its maximum in one, sum and target together in another). Activations have `value_bytes` each; the loss
# always computes in float32.

# %% tags=["exercise"]
def traffic(config, batch, value_bytes):
    """(number of all-reduces, bytes of their tensors); config has num_layers, hidden_size, context_length, vocab_size."""
    ### BEGIN SOLUTION
    per_token = batch * config.context_length
    act = per_token * config.hidden_size * value_bytes
    pairs = 2 * config.num_layers + 1  # attention and MLP of each layer; the embedding has a g, the head an f
    return 2 * pairs + 2, 2 * pairs * act + 3 * per_token * 4
    ### END SOLUTION

# %% tags=["check"]
check("9.3", lambda: l09.traffic(traffic, ranks))

# %% [markdown]
# ## 6. The same with DTensor
#
# PyTorch's own tensor parallelism needs no new layers. A `DTensor` is a tensor that knows how it is laid out over a `DeviceMesh`:
# `Shard(0)`, `Replicate()`, or `Partial()`, a sum that is still to be made. Each operation works out the layout of its result, and
# communicates where it must. `parallelize_module` turns weights into DTensors by a plan: a style for each name.
#
# Models written for it have separate layers for q, k and v, which can be cut plainly.
#
# **Predict.** (a) All-reduces in the backward of an MLP cut by a plan? (b) Of an attention with q, k and v as three column-parallel
# layers that read the same x?

# %% tags=["predict"]
mlp_guess = 1
separate_guess = 3  # each of the three layers has an f of its own

# %%
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)


def by_plan(plan):
    return lambda module: parallelize_module(module, init_device_mesh("cpu", (2,)), plan)

mlp_plan, fused_plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}, {"qkv": ColwiseParallel(), "proj": RowwiseParallel()}
plan = dict.fromkeys("qkv", ColwiseParallel()) | {"proj": RowwiseParallel()}
enters_once = {"": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())}

# %% tags=["nbval-check-output"]
def backward_sums(make, plan):
    return ranks.run(lambda: count_collectives(by_plan(plan)(make()), torch.randn(2, 16, 64)))[0][1]["all_reduce"][0]

compare("MLP, all-reduces backward", mlp_guess, backward_sums(make_mlp, mlp_plan), within=1)
compare("q, k, v apart", separate_guess, backward_sums(SeparateAttention, plan), within=1)
print("q, k, v apart, x made a DTensor before it branches:", backward_sums(SeparateAttention, plan | enters_once))
for name, case in {"MLP": (make_mlp, mlp_plan), "q, k, v": (SeparateAttention, plan), "fused": (make_attention, fused_plan)}.items():
    print(f"{name:8} exact: {all(float(error) < 1e-12 for error in ranks.run(difference, case[0], by_plan(case[1]))[0])}")

# %% [markdown] tags=["exercise"]
# The MLP costs what ours does. The attention pays three times: each layer sums by itself. If x becomes a DTensor **before** it branches,
# the three partial gradients are added on each rank first, and one sum is left: same numbers, and no warning in either case. And a plan
# for our fused qkv makes the plain cut of section 3: no error, all wrong. DTensor keeps exact books of layouts; what the rows **mean** it
# cannot know.
#
# **Takeaway: count the collectives of a plan, and compare it with the whole model once. What you get for it: no layers of your own, and
# tensors that FSDP2 and distributed checkpoints understand.**
#
# ### Exercise 9.4 · Llama's MLP
#
# - It has three weights: `down(silu(gate(x)) * up(x))`.
# - Given the whole weights, [F, H], [F, H] and [H, F], compute it over the group, each rank with its own parts only, with **one**
#   all-reduce forward and one backward. Use `copy_to` and `reduce_from`.
# - Then go on: what about its attention, with three layers, rotary positions and 8 key/value heads?

# %% tags=["exercise"]
def my_swiglu(x, gate, up, down, group):
    """[.., H] -> [.., H], the same on every rank."""
    ### BEGIN SOLUTION
    rank, p = group.rank(), group.size()
    x = copy_to(x, group)
    inside = F.silu(x @ gate.chunk(p)[rank].T) * (x @ up.chunk(p)[rank].T)
    return reduce_from(inside @ down.chunk(p, dim=1)[rank].T, group)
    ### END SOLUTION

# %% tags=["check"]
check("9.4", lambda: l09.swiglu(my_swiglu, ranks))

# %% [markdown]
# ## 7. A whole GPT
#
# `parallelize(model, grid)` does to a model what we did by hand. It goes through a table that says which module becomes what. Four ranks
# now, and first the table, with the weights of rank 0 when tp = 2.

# %%
from labcode.comm.grid import Grid
from labcode.data import sampler, text
from labcode.models.parallelize import parallelize

torch.set_num_threads(1)
ranks = Ranks(4)
splits = text.load(text.TextData(), context_length=64)
config = GPTConfig(splits.tokenizer.vocab_size, num_layers=2, num_heads=4, hidden_size=64, context_length=64)
batches = [splits.train[sampler.Batches(len(splits.train), global_batch=16).indices(step)] for step in range(15)]

def build():
    return layers.initialize(gpt.GPT(config), 0).double()

described = ranks.run(lambda: parallelize(build(), Grid.create(GridShape(dp=2, tp=2))).describe())[0]
print(*(line for line in described.splitlines() if not line.startswith("blocks.1")), sep="\n")

# %% [markdown]
# Of `embed.weight` [83, 64] rank 0 has 42 rows. The head is not in the list: it is tied, it is the same weight. Positions, norms and the
# biases after a sum are whole on every rank; the last column comes alive in lesson 10.
#
# Now train: one process, then grids of four ranks; 15 steps of AdamW in float64. dp cuts the batch, tp does not: all ranks of a tp group
# read the same samples. And one run is **broken on purpose**: every *f* is forgotten.
#
# **Predict.** Without *f*, the gradient of everything below is incomplete at each step. How far does the loss fall in 15 steps, as a
# share of the fall of the true run?

# %% tags=["predict"]
fall_guess = 0.9  # AdamW divides by the length of a gradient anyway, and a part of it points about the same way

# %%
def forget_f(module):
    for layer in module.modules():
        if isinstance(layer, tensor.ColumnParallelLinear):
            layer.multiply = lambda x, weight, bias, *rest: F.linear(x, weight, bias)

def train_on(shape, change=lambda module: None):
    """Losses of the whole batch, and this rank's copy of a norm."""
    grid = Grid.create(shape)
    model = parallelize(build(), grid)
    change(model.module)
    losses = adamw_steps(model, model.loss, batches, lambda x: x.chunk(shape.dp)[grid.coord("dp")], model.finish_gradient_sync)
    dist.all_reduce(losses, group=grid.group("dp"))
    return losses / shape.dp, model.module.blocks[0].norm1.weight.detach()

# %%
truth = adamw_steps(build(), gpt.loss, batches)
runs = {"dp=2 x tp=2": ranks.run(train_on, GridShape(dp=2, tp=2)), "tp=4": ranks.run(train_on, GridShape(tp=4)),
        "tp=4, f forgotten": ranks.run(train_on, GridShape(tp=4), forget_f)}
fall, broken_fall = ((losses[0] - losses[-1]).item() for losses in (truth, runs["tp=4, f forgotten"][0][0]))
compare("fall without f", fall_guess, broken_fall / fall, within=1.5)
for name, run in runs.items():
    copies = max((copy - run[0][1]).abs().max() for _, copy in run)
    print(f"{name:18} largest difference of a loss {(run[0][0] - truth).abs().max():.0e}, between copies of a norm {copies:.0e}")

# %% tags=["figure"]
losses = {"one process": truth} | {name: run[0][0] for name, run in runs.items()}
picture = plot.lines(losses, x=range(1, 16),
                     xlabel="step", ylabel="loss (nats)", title="A GPT on four ranks",
                     alt="Both grids lie on the curve of one process; the run without f falls beside it, as far down")
picture.axes[0].lines[0].set_linewidth(7)  # wide, so that it can be seen beneath the others
picture

# %% tags=["figure"]
off = {name: (loss - truth).abs().clamp(min=1e-17) for name, loss in losses.items()}
picture = plot.lines(off, x=range(1, 16), logy=True, xlabel="step", ylabel="difference (nats)", title="Loss against one process",
                     reference={"allowed: 1e-9": 1e-9},
                     alt="Both grids differ from one process by less than 1e-12, the run without f by 1e-3 and more from the second step on")
legend = picture.axes[0].get_legend()
legend.set_loc("upper left")
legend.set_bbox_to_anchor((1, 1))  # beside the axes
picture

# %% [markdown]
# The broken curve falls about as far as the true one, perhaps a little less or more. It would pass for another seed. Its first loss is
# even exact, since forward is right. (An exact 0 is drawn at 1e-17; one process, compared with itself, lies there throughout.) Two cheap
# tests find the bug at once: the loss of the **second** step against one process, and the copies of a weight that every rank of tp holds.
# With *f* these are equal to the bit; without, each rank has its own.
#
# **Takeaway: every grid gives the losses of one process to rounding. A curve that looks right proves nothing: compare numbers, and
# compare the copies.**

# %%
ranks.close()

# %% [markdown]
# ## From here to GPUs and SLURM
#
# | where | start |
# |---|---|
# | 2 GPUs of one machine | `torchrun --nproc-per-node=2 -m labcode.train gpt_tiny --parallel.tp 2` |
# | 8 GPUs, dp = 2 | `torchrun --nproc-per-node=8 -m labcode.train gpt_tiny --parallel.tp 4` |
# | SLURM, inside a job of two nodes | `srun --nodes=2 --ntasks-per-node=8 python -m labcode.train gpt_tiny --parallel.tp 4` |
#
# What tp leaves over goes to dp, and tp is the fastest axis, so it stays inside the node. (Under `srun`, export `MASTER_ADDR` and
# `MASTER_PORT` first, as in lesson 04.) In real runs two things grow in weight. Products become thin, and below some width a GPU is no
# longer busy. And norms, dropout and residuals are still whole on every rank, with all their activations: lesson 10 removes that. Dropout
# there must draw the **same** numbers on all ranks of tp, and inside attention different ones.

# %% [markdown]
# ## Recap
#
# | concept | formula or fact | in labcode |
# |---|---|---|
# | f | forward nothing, backward a sum | `comm.collectives.copy_to` |
# | g | forward a sum, backward nothing | `comm.collectives.reduce_from` |
# | f forgotten | wrong below, √((p−1)/p) for independent paths; copies drift | |
# | column, then row | one f, one g, bias after the sum | `parallel.tensor` |
# | attention | whole heads, section by section | `parallel.sharding.Shard` |
# | loss | 3 numbers per token, not V | `vocab_parallel_cross_entropy` |
# | per layer | 4 all-reduces of B·S·H | `comm.counting` |
# | link | 2 (p−1) Φ / (9 H β) | `perf.comm` |
# | whole model | table of modules | `models.parallelize` |
#
# ## Sources
#
# - Shoeybi et al. 2019, arXiv:1909.08053, section 3: f, g, MLP, attention, loss.
# - Narayanan et al. 2021, arXiv:2104.04473, section 3: inside the node.
# - Ainslie et al. 2023, arXiv:2305.13245: grouped queries. Llama Team 2024, arXiv:2407.21783, table 3: its heads.
# - Shazeer 2020, arXiv:2002.05202: the MLP of exercise 9.4.
# - Rajbhandari et al. 2020, arXiv:1910.02054, section 3.1: 16 bytes.
# - NVIDIA H100 datasheet, 2023: bfloat16, NVLink. DGX H100 datasheet, 2022: 400 Gb/s.
# - docs.pytorch.org: `torch.distributed.tensor.parallel`, `torch.profiler`; discuss.pytorch.org/t/209487: async tensor parallelism.
