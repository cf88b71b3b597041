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
# # 10 · Sequence parallel and activation memory
#
# Tensor parallelism divides the weights of a layer by the number of ranks. It does not divide the memory of the layer by
# as much, because a good part of what the layer keeps for its backward pass stays whole on every rank. In this lesson
# you count these bytes, and then you remove the part that stays whole, by cutting the **sequence**.
#
# ## Goals
#
# - read a published scaling result critically: compute its efficiency, and how much of its memory was not cut;
# - say which tensors a layer keeps for backward, and predict their bytes, on one rank and on each of t;
# - write the pair of operations behind sequence parallelism, and the linear layer that keeps only its own tokens;
# - know which gradients have to be summed once the tokens are split, and what happens if nobody does.
#
# **Time**: 132 minutes. Good places for a break are after section 2 and after section 3.
#
# **Needs**: lesson 01 (section 2). For section 2 also lesson 09 (section 2); for sections 3 to 5 also lesson 01
# (section 3) and lesson 09 (sections 1, 2, 3 and 5).

# %%
import torch

from course.lab import Ranks, check, compare, plot
from labcode.comm.grid import Grid
from labcode.config import ParallelConfig
from labcode.models.parallelize import parallelize
from labcode.topology import GridShape

ranks = Ranks(4, timeout_s=10)

# %% [markdown]
# ## 1. A published result, read critically (core, 9 min)
#
# The tutorial *Deep Learning at Scale* of the computing centre NERSC trains a vision transformer on weather data. On
# A100 GPUs with 40 GB the model runs out of memory. So the tutorial cuts each layer over four GPUs with tensor
# parallelism, and uses four times as many GPUs in all. These are the numbers of its logs:
#
# | | 4 GPUs (80 GB) | 16 GPUs (40 GB) |
# |---|---|---|
# | data parallel × tensor parallel | 4 × 1 | 4 × 4 |
# | samples per second, epoch 4 | 93.1 | 125.2 |
# | GB in use on a GPU before training starts | 10.5 | 10.2 |
# | GB in use after forward in the second step | 43.8 | 31.7 |
#
# Each data-parallel copy of the model takes 16 samples in both runs. The log does not say what the 10 GB before training
# are. Tensor parallelism has cut the weights by four, and yet these 10 GB hardly shrink, so most of them must be
# something else: what CUDA, NCCL and the data loader set aside.
#
# The model fits now, and that was the aim. How good is this result? Two numbers tell, and the log prints neither.
#
# The first is the **efficiency**: the speed-up, divided by how many times as many GPUs it took. For example, a job goes
# from 50 to 120 samples per second when it moves from 8 to 24 GPUs. The speed-up is 2.4, it took 3 times the GPUs, and
# so the efficiency is 2.4/3 = 80 %.
#
# The second is the **fraction that stays whole**. Say that a fraction w of the memory stays as it is on each of t ranks,
# and the rest, 1 - w, is divided by t. Then
#
# $$\text{memory afterwards} \,/\, \text{memory before} = w + \frac{1 - w}{t}.$$
#
# For example, two ranks that hold 0.75 of the memory each have w + (1 - w)/2 = 0.75, so half of it is whole.
#
# For the memory, take what has been **added** by then in the two runs. Most of it is what the layers keep for their
# backward, and it is cut over t = 4 ranks.
#
# **Predict**, by looking at the table, before the next cell does the arithmetic: is the efficiency above a half? And is
# more than half of what forward adds whole (here a guess is enough)? Answer `True` or `False`.

# %% tags=["predict"]
efficiency_above_half = False
more_than_half_is_whole = True

# %% tags=["nbval-check-output"]
rate_per_gpu_before = 93.1 / 4
rate_per_gpu_after = 125.2 / 16
forward_before_gb = 43.8 - 10.5
forward_after_gb = 31.7 - 10.2
left = forward_after_gb / forward_before_gb
published_whole = (left * 4 - 1) / (4 - 1)
published_efficiency = rate_per_gpu_after / rate_per_gpu_before

above = published_efficiency > 0.5
more = published_whole > 0.5
compare("efficiency above a half", efficiency_above_half, above, found="published")
compare("more than half is whole", more_than_half_is_whole, more, found="published")
print(f"forward adds {forward_before_gb:.1f} GB on one rank")
print(f"and {forward_after_gb:.1f} GB on each of four")
print(f"efficiency: {published_efficiency:.2f}, fraction whole: {published_whole:.2f}")

# %% [markdown]
# An efficiency of 34 % means that 16 GPUs do the work of little more than five. The log does not say where the rest
# goes. Candidates are the all-reduces of tensor parallelism, gradients that now leave the node, thinner matmuls, and
# everything that four ranks now compute four times. (The 80 GB model of the A100 also has faster memory, so the
# comparison is a little hard on the 16.) If you need the memory, you pay this price; for speed alone, nobody would.
#
# What the model learns is the same: after four epochs the loss on held-out weather is 0.1380 in one run and 0.1379 in
# the other. But more than half of what forward adds is still whole on every rank. The tutorial asks its reader: "Can
# we drop the memory consumed more? What tensors have we left un-partitioned?" That is the question of this lesson.
#
# **Takeaway: a speed-up says little without the number of GPUs beside it. Tensor parallelism makes a model fit, but it
# does not make its activations t times smaller.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* People divide by 16 instead of by 16/4, which compares with one GPU, and they divide the GB in
# use after forward without taking off what was there before. Ask the room what else a log of `nvidia-smi` counts: the
# allocator's reserve, the buffers of NCCL and cuDNN, and the optimizer's state after the first step that the GradScaler
# does not skip (from epoch 2 on the log of the 4 GPUs shows 1.1 GB more).

# %% [markdown]
# ## 2. What a layer keeps (core, 38 min)
#
# Between forward and backward, PyTorch keeps the tensors that backward will need. They are called **activations**.
# Which ones are kept follows from the derivative of each operation:
#
# | operation | what its backward reads | so it keeps |
# |---|---|---|
# | linear, y = x Wᵀ | x, for the gradient of W (and W itself, which is there anyway) | its input |
# | norm, GELU | the point at which the derivative is taken | its input |
# | product of two activations | each factor, for the gradient of the other | both inputs |
# | softmax | its result, from which the derivative is computed | its output |
# | dropout | which numbers were dropped | on GPUs a mask, 1 byte for each number |
# | addition | nothing | nothing |
#
# If two operations read the same tensor, it is kept once. For example, the output of a norm is the input of the linear
# layer that follows it. (On CPUs PyTorch's dropout keeps the numbers by which it has multiplied instead of the mask,
# with as many bytes each as the activations have.)
#
# Let us count the MLP block of a layer, with its norm. In formulas we use the small letters of the paper that comes
# below: s tokens, b samples, h hidden features, and t ranks. A tensor [B, S, H], as we write its shape, then has s b h
# numbers. Inside the MLP there are F = 4 h features. The norm keeps its input, 1 · s b h numbers. The
# first linear layer (`up`) keeps the norm's output, again 1. GELU keeps its input, and the second linear layer (`down`)
# keeps GELU's output, and both have 4 h features: 4 + 4.

# %% tags=["figure"]
plot.kept("mlp", caption="10.mlp")

# %% [markdown]
# In 16-bit numbers, 2 bytes each, these are 20 s b h bytes. If there is dropout behind `down`, its mask adds 1 · s b h
# bytes.
#
# Now tensor parallelism cuts the block over t ranks. `up` and `down` have only F/t features on each rank, so what GELU
# and `down` keep is divided by t. But the input of the norm, the input of `up` and the mask have all h features for all
# tokens on **every** rank: they stay whole.

# %% [markdown] tags=["exercise"]
# ### Exercise 10.1 · What does a layer keep?
#
# Count a whole layer in **bytes**, as Korthikanti et al. (2022) did for GPT-3. All numbers have 2 bytes, a mask has 1
# byte for each number. There are a heads, and attention is written out, step by step:
#
# 1. norm, then one linear layer that gives q, k and v (each [B, S, H] over all heads);
# 2. scores = q kᵀ, for each head a table of s × s numbers;
# 3. softmax over each row of the table;
# 4. dropout of the table;
# 5. table times v, which gives [B, S, H] over all heads;
# 6. the linear layer `proj`, dropout, and the addition of x;
# 7. the MLP block as above: norm, `up`, GELU, `down`, dropout, addition.
#
# Return the bytes that one of t ranks keeps, in three parts. `norms` are the inputs of both norms. `attention` begins
# with the input of the linear layer in step 1 and ends with step 6. `mlp` begins with the input of `up`. Tensor
# parallelism gives each rank a/t heads and 4 h/t features of the MLP.

# %% tags=["exercise"]
def layer_bytes(s, b, h, a, t=1):
    """Bytes that one of t ranks keeps: {"norms": .., "attention": .., "mlp": ..}"""
    ### BEGIN SOLUTION
    hidden = 2 * s * b * h  # one tensor of [B, S, H]
    mask = s * b * h
    table = 2 * a * s * s * b  # the scores of all heads
    table_mask = a * s * s * b
    qkv = 3 * hidden
    own_heads = qkv + table + table_mask + table + hidden
    return {
        "norms": 2 * hidden,
        "attention": hidden + own_heads / t + mask,
        "mlp": hidden + 2 * 4 * hidden / t + mask,
    }
    ### END SOLUTION

# %% tags=["check"]
check("10.1", layer_bytes)

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Line by line for attention: input of the linear layer 2 s b h (whole); q, k and v 6 s b h;
# output of the softmax 2 a s² b; mask 1 a s² b; the dropped table, which the product with v reads, 2 a s² b; input of
# `proj` 2 s b h; mask after `proj` 1 s b h (whole). The product q kᵀ keeps q and k, and v is kept by the other product.
# People forget that the dropped table is a tensor of its own, and they cut the masks behind `proj` and `down`. Ask:
# which parts of the list vanish with a fused attention? (Everything with s², in exchange for one number per token and
# head.) Another 15 minutes for the rest of the section.

# %% [markdown]
# Now add your three parts up. On one rank they make 4 + 11 + 19 = 34 bytes for each of s b h, and 5 bytes for each
# number of the tables. On each of t ranks, 4 + 3 + 3 = 10 of the 34 stay whole:
#
# $$\underbrace{s b h \cdot 34 + 5 a s^2 b}_{\text{one rank}} \qquad
# \underbrace{s b h \left(10 + \frac{24}{t}\right) + \frac{5 a s^2 b}{t}}_{\text{each of } t \text{ ranks}}$$
#
# These are equations 1 and 2 of the paper. The second term grows with s². A **fused** attention (FlashAttention, or
# PyTorch's own) computes the tables in small blocks, never stores them, and computes them again in backward. So this
# term is gone today, and what remains are q, k, v, the output, and one number for each token and head.
#
# Our own layers have a fused attention, and no dropout unless you ask for it. Then a layer keeps 16 numbers for each
# token and feature: 2 for the norms, 1 + 3 + 1 for the attention (the input of `qkv`, then q, k and v, then the input
# of `proj`), and 1 + 4 + 4 for the MLP. In 16 bits that is 32 bytes; the other two of the paper's 34 are its two masks.
#
# One can ask autograd what it keeps. `saved_tensors_hooks` calls a function of ours with every tensor that is saved for
# backward. We count every piece of memory once, and leave the weights out. (labcode's `saved_bytes` does the same, and
# says which module keeps what.)

# %% tags=["by-hand"]
from torch.distributed.tensor import DTensor


def memory_of(tensor):
    """The memory behind a tensor; of a DTensor, what this rank holds."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return tensor.untyped_storage()

def kept_bytes(weights, function, *inputs):
    """The result of function(*inputs), and the bytes kept for its backward."""
    is_weight = {memory_of(weight).data_ptr() for weight in weights}
    kept = {}

    def pack(tensor):
        storage = memory_of(tensor)
        if storage.data_ptr() not in is_weight:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    def unpack(tensor):
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        result = function(*inputs)
    return result, sum(kept.values())

# %% [markdown]
# Let four ranks run the first layer of a GPT that `parallelize` has cut, and count on rank 0. `counted()` lists the
# collectives that a rank starts; we need them in section 4.
#
# **Predict.** The layer has a hidden size of 128, and the batch is 4 samples of 256 tokens, in float32, which has 4
# bytes. How many bytes does each of four ranks keep? What fraction would always remain in our layer, however many ranks
# there are?

# %% tags=["predict"]
each_of_four_bytes = (4 + 12 / 4) * (4 * 256 * 128 * 4)
always_whole_in_ours = 4 / 16

# %% tags=["by-hand"]
from labcode.comm.counting import counted
from labcode.config import GPTConfig
from labcode.models import gpt

config = GPTConfig(
    vocab_size=64, context_length=256, num_layers=1, num_heads=8, hidden_size=128
)

def one_layer(rank, tp, sequence_parallel=False):
    """Bytes that one layer keeps, and the collectives of its forward and backward."""
    grid = Grid.create(GridShape(dp=4 // tp, tp=tp))
    parallel = ParallelConfig(sequence_parallel=sequence_parallel)
    model = parallelize(gpt.GPT(config), grid, parallel)
    layer = model.module.blocks[0]
    tokens = 256 // tp if sequence_parallel else 256
    x = torch.randn(4, tokens, 128, requires_grad=True)
    with counted() as forward:
        y, num_bytes = kept_bytes(layer.parameters(), layer, x)
    with counted() as backward:
        y.sum().backward()
    return num_bytes, forward, backward

# %% tags=["nbval-check-output"]
alone_kept, *_ = ranks.run(one_layer, tp=1)[0]
with_tp_kept, *_ = ranks.run(one_layer, tp=4)[0]
compare("kept by each of four", each_of_four_bytes, with_tp_kept, within=1.02, unit="B")
ours_left = (4 * with_tp_kept - alone_kept) / (3 * alone_kept)  # w of section 1
compare("always whole, ours", always_whole_in_ours, ours_left, within=1.02)

# %% [markdown]
# The picture shows what is left of the 16 numbers on one of four ranks.

# %% tags=["figure"]
plot.kept("layer", 4, caption="10.layer")

# %% [markdown]
# Counting 16 and 7 numbers falls short by less than one percent. What is missing are statistics: the mean and the
# deviation of each token in each norm, and the one number per token and head of the fused attention. `perf.memory`
# names every term, and with them it is right to the byte. In the paper's layer, without the tables, 10 of the 34 bytes
# should remain.

# %% tags=["by-hand"]
from labcode.perf import memory

in_the_paper = GPTConfig(
    num_heads=96, hidden_size=12288, context_length=2048, dropout=0.1
)

def formula_bytes(model_config, tp, sequence_parallel=False, **options):
    """The terms of `perf.memory`, added up."""
    terms = memory.layer_activations(
        model_config, GridShape(tp=tp), sequence_parallel=sequence_parallel, **options
    )
    return sum(terms.values())

# %% tags=["nbval-check-output"]
exact_alone = formula_bytes(config, tp=1, batch=4, value_bytes=4)
exact_with_tp = formula_bytes(config, tp=4, batch=4, value_bytes=4)
print(f"one rank:     formula {exact_alone:,.0f}, measured {alone_kept:,} bytes")
print(f"each of four: formula {exact_with_tp:,.0f}, measured {with_tp_kept:,} bytes")

many = 2**20
paper_alone = memory.paper_layer_bytes(in_the_paper, batch=1, fused_attention=True)
paper_many = memory.paper_layer_bytes(
    in_the_paper, batch=1, tp=many, fused_attention=True
)
print(f"the paper's layer on 2**20 ranks keeps {paper_many / paper_alone:.2f} of it")

# %% [markdown]
# A quarter of our layer stays on every rank, however many ranks you take, and 10/34 = 29 % of the paper's. Does that
# explain the 53 % of the published run? Only partly. Under `torch.autocast` the residual stream, to which every block
# adds its result, stays in float32. So the two numbers that the norms keep have 4 bytes each, and the other 14 have 2
# bytes each, which is 36 bytes in all. The norms' 8 bytes are whole, and so are 2 bytes each for the inputs of `qkv`
# and `up`: 12 of 36, a third.
#
# The tutorial's code keeps more. Its q, k and v are three layers, and autocast makes a 16-bit copy of their input for
# each. Its tensor-parallel layers also add a float32 bias after the matmul, so that GELU's input has 4 bytes. That
# makes 40 bytes on one rank and 16 + 32/4 = 24 on each of four. For its 12 layers, with s = 4050, b = 16 and h = 1024,
# we count 29.7 and 17.8 of the 33.3 and 21.5 GB (the log's GB are 1024³ bytes). In both runs some 3.7 GB are left: the
# two ends of the model, which are not cut, and all else that came into use on the GPU, such as the gradients of the
# first step.
#
# ### A layer of today
#
# The 34 bytes are those of GPT-3's layer, of 2020. A layer of Llama 3 70B (2024) differs in three places. Its norm is
# **RMSNorm**, which divides by the root of the mean square and subtracts no mean. Its MLP is **SwiGLU**, down(silu(gate
# x) · up x), with three matmuls instead of two and F = 3.5 h features inside. And eight query heads share one head of
# keys and values (**grouped queries**), so k and v have h/8 features each. There is no dropout and no bias. The
# next cell writes such a layer, in the proportions of Llama's and with our width of 128. (Llama also turns q and k by
# their positions. That is left out: its backward needs the angles only, which all layers share.)
#
# **Predict.** In 16-bit numbers, with fused attention and every other operation by itself, does this layer keep more
# bytes for each of s b h than the 34 of GPT-3's? Answer `True` or `False`.

# %% tags=["predict"]
keeps_more_than_gpt3 = True

# %% tags=["nbval-check-output"]
import torch.nn.functional as F
from torch import nn

from course.labs.l10_by_hand import kept_bytes


class TodaysLayer(nn.Module):
    def __init__(self, h, features, heads, kv_heads):
        super().__init__()
        self.head_size = h // heads
        kv_features = kv_heads * self.head_size
        self.norm_1 = nn.RMSNorm(h)
        self.q = nn.Linear(h, h, bias=False)
        self.k = nn.Linear(h, kv_features, bias=False)
        self.v = nn.Linear(h, kv_features, bias=False)
        self.proj = nn.Linear(h, h, bias=False)
        self.norm_2 = nn.RMSNorm(h)
        self.gate = nn.Linear(h, features, bias=False)
        self.up = nn.Linear(h, features, bias=False)
        self.down = nn.Linear(features, h, bias=False)

    def attention(self, x):
        q = self.q(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        k = self.k(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        v = self.v(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.proj(y.transpose(1, 2).flatten(2))

    def forward(self, x):
        x = x + self.attention(self.norm_1(x))
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

def numbers_kept(layer, x):
    """Numbers kept for each token and feature."""
    _, num_bytes = kept_bytes(layer.parameters(), layer, x)
    return num_bytes / x.nbytes

x = torch.randn(4, 256, 128, requires_grad=True)
todays = numbers_kept(TodaysLayer(128, 448, heads=8, kv_heads=1), x)
one_norm = numbers_kept(nn.RMSNorm(128), x)
compare("more than GPT-3's 34 bytes", keeps_more_than_gpt3, bool(2 * todays > 34))
print(f"today's layer: {todays:.1f} numbers, in 16 bits {2 * todays:.0f} bytes")
print(f"one RMSNorm on a CPU: {one_norm:.1f} numbers")

# %% [markdown]
# SwiGLU costs more than grouped queries save. Count it: 2 for the norms, 1 for the input of q, k and v, 1 + 1/8 + 1/8
# for q, k and v, 1 for the input of `proj`, 1 for the input of `gate` and `up`, and 4 · 3.5 for the MLP: the results of
# `gate`, silu and `up`, and the input of `down`. That makes 20.25 numbers, or 40.5 bytes. The other two that we
# measured come from RMSNorm, which PyTorch computes on a CPU as a row of small operations, so that it also keeps the
# normalised x. A fused RMSNorm needs its input and one number for each token. A fused SwiGLU computes silu again in
# backward and does not keep its result: 3 · 3.5 instead of 4 · 3.5, which makes 16.75 numbers or 33.5 bytes.
#
# **Takeaway: for each of s b h a layer of GPT-3 keeps 34 bytes in 16-bit numbers, with fused attention and dropout, and
# a layer of today about 40, or 34 if SwiGLU is fused as well. Tensor parallelism cuts what is inside the attention and
# the MLP. The inputs of the norms and of the first matmuls stay whole on every rank, and so do the masks of dropout:
# 10 of GPT-3's 34 bytes, 8 of today's.**

# %% [markdown]
# ## 3. Cut the tokens between the matmuls (core, 40 min)
#
# Between the matmuls of a layer stand norms, dropouts and residual additions. Each of them treats every token by itself.
# So they do not need all tokens in one place, and we can give each rank a shard of the **tokens** there, [B, S/t, H].
# This is **sequence parallelism**.
#
# - Where a block's first matmul begins, the rank needs all tokens: an **all-gather** along the sequence.
# - Where its last one ends, each rank has partial sums for all tokens. They have to be reduced, and each rank needs the
#   sums of its own tokens only: a **reduce-scatter**.
#
# The name stands for three different things:
#
# | who says "sequence parallel" | what is cut by tokens | today also called |
# |---|---|---|
# | Megatron, and this lesson | what lies between the matmuls, within the tp group | sequence parallel |
# | DeepSpeed-Ulysses | the whole layer; an all-to-all turns parts of tokens into parts of heads for attention | context parallel |
# | Li et al. 2021, and ring attention | the whole layer; keys and values go round a ring (lesson 11) | context parallel |

# %% tags=["figure"]
plot.around_a_layer(caption="10.around_a_layer")

# %% [markdown]
# In the picture a square is a tensor on one rank. Its upper half holds the first half of the tokens, which belong to
# rank 0, and its lower half holds those of rank 1. Hatched squares are partial sums.
#
# In backward the gradient flows through the picture from right to left, and each operation turns into the other:
#
# - After an all-gather, **every** rank has used my tokens. So the gradient of my tokens is the sum over all ranks: a
#   reduce-scatter.
# - In a reduce-scatter, my tensor went into the sums of **every** rank. So its gradient consists of the gradients of
#   all these sums: an all-gather.

# %% [markdown] tags=["exercise"]
# ### Exercise 10.2 · The pair
#
# Write both operations. Tensors have the shape [B, S, H], so the tokens are dim 1. Two calls of PyTorch do the
# communication:
#
# - `dist.all_gather(parts, x, group=group)` fills a list of t tensors of the shape of x, one from each rank.
# - `dist.reduce_scatter(own, parts, group=group)` takes t tensors; tensor i goes to rank i. The sum of what this rank
#   receives is written into `own`.
#
# NCCL, which runs on GPUs, needs contiguous tensors. Gloo, which runs here, copies others silently. So call
# `.contiguous()` on x before you make tensors like it, and on what you have cut out; the check looks for it, and passes
# slices as well, both to `forward` and to `backward`. `backward` returns one gradient for each argument of `forward`
# but `ctx`; that of `group` is `None`. Write the two functions first, and use each of them twice. What `forward` stores
# in `ctx`, such as `ctx.group`, `backward` finds there. About 15 lines in all.

# %% tags=["exercise"]
import torch.distributed as dist


def gather_tokens(x, group):
    """[B, S/t, H] to [B, S, H]: the tokens of all ranks, in their order."""
    ### BEGIN SOLUTION
    t = dist.get_world_size(group)
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(t)]
    dist.all_gather(parts, x, group=group)
    return torch.cat(parts, dim=1)
    ### END SOLUTION

def scatter_tokens(x, group):
    """[B, S, H] to [B, S/t, H]: the sum over the ranks, of this rank's tokens."""
    ### BEGIN SOLUTION
    t = dist.get_world_size(group)
    parts = [part.contiguous() for part in x.chunk(t, dim=1)]
    own = torch.empty_like(parts[0])
    dist.reduce_scatter(own, parts, group=group)
    return own
    ### END SOLUTION

class AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ### BEGIN SOLUTION
        ctx.group = group
        return gather_tokens(x, group)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad):
        ### BEGIN SOLUTION
        return scatter_tokens(grad, ctx.group), None
        ### END SOLUTION

class ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ### BEGIN SOLUTION
        ctx.group = group
        return scatter_tokens(x, group)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad):
        ### BEGIN SOLUTION
        return gather_tokens(grad, ctx.group), None
        ### END SOLUTION

# %% tags=["check"]
check("10.2", AllGather, ReduceScatter, ranks)

# %% [markdown]
# `torch.cat` along dim 1 copies all of [B, S, H] once more. Megatron's tensors are [S, B, H], originally for the sake of
# its matmuls. In that layout the shards of the ranks lie one after the other in memory, so no such copy is needed.
#
# There is a trap. An all-gather followed by a linear layer computes the right thing. But the linear layer keeps its
# input for the gradient of its weight, and its input is the **gathered** tensor, [B, S, H]. So two of the four tensors
# that we wanted to cut, the inputs of `qkv` and `up`, are whole again.
#
# The two layers can keep their own tokens if backward **gathers them again**. Keeping only a quarter costs one more
# all-gather for each of the two layers. It can be in flight while the rank computes the gradient of the input, which
# does not need x at all. For that there are two functions in labcode, `start_all_gather` and `start_reduce_scatter`.
# They begin to send and return at once. What they return is a function: call it to wait for the result.

# %% [markdown] tags=["exercise"]
# ### Exercise 10.3 · Gather again
#
# Write all-gather and linear layer as one Function that keeps only its own part of x. For y = x Wᵀ with all tokens in
# x, and with `grad` the gradient of y:
#
# - the gradient of x is `grad @ weight`. Each rank has some of the output features only, so its product is a partial sum.
#   It has to be summed over the ranks, and each rank needs the tokens of its own part of x: a reduce-scatter.
# - the gradient of W is `grad_rows.T @ x_rows`, over the rows of all S tokens. `flatten(0, 1)` turns [B, S, H] into
#   rows.
#
# Use `start_all_gather(x, group, 1)` and `start_reduce_scatter(x, group, 1)`. The check looks at the numbers, at what is
# still in memory after forward, and at the bytes that are sent. It does not look at whether the messages hide behind
# the matmuls. About 10 lines.

# %% tags=["exercise"]
import torch.nn.functional as F

from labcode.comm.collectives import start_all_gather, start_reduce_scatter


class GatherAgain(torch.autograd.Function):
    """x [B, S/t, H], weight [F/t, H] -> [B, S, F/t], keeping this part of x alone."""

    @staticmethod
    def forward(ctx, x, weight, group):
        ### BEGIN SOLUTION
        ctx.save_for_backward(x, weight)
        ctx.group = group
        whole = start_all_gather(x, group, 1)()
        return F.linear(whole, weight)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad):
        ### BEGIN SOLUTION
        x, weight = ctx.saved_tensors
        wait_for_x = start_all_gather(x, ctx.group, 1)
        grad_whole = grad @ weight  # x may travel meanwhile
        whole = wait_for_x()
        wait_for_own = start_reduce_scatter(grad_whole, ctx.group, 1)
        grad_weight = grad.flatten(0, 1).T @ whole.flatten(0, 1)
        return wait_for_own(), grad_weight, None
        ### END SOLUTION

# %% tags=["check"]
check("10.3", GatherAgain, ranks)

# %% [markdown] tags=["solution-only"]
# *For the instructor.* The mistake of 10.2 is to give back one's own part of one's own gradient. That is right where
# all ranks compute the same afterwards, and wrong here. The mistake of 10.3 is to multiply before gathering, as every
# rank has a different weight. Ask the room: in which order should the two messages and the two products of backward go, and
# why does labcode wait for x before it sends the gradient? (Two buffers of [B, S, H] at the peak instead of three.)

# %% [markdown]
# With a plain all-gather, `qkv` and `up` would each keep 1 instead of 1/4 of the 16 numbers of a whole layer. That makes
# 5.5 on each of four ranks instead of 4. labcode's form of your Function is `gathered_linear`.
#
# **Takeaway: between the matmuls a rank keeps its own tokens. An all-gather before each block and a reduce-scatter
# after it replace f and g, and the first layer of a block gathers again in backward.**

# %% [markdown]
# ## 4. The whole layer (core, 17 min)
#
# What does all this cost on the wire? Call the bytes that a rank sends in one all-gather of a [B, S, H] tensor a
# **unit**. A reduce-scatter costs one unit as well, and an all-reduce, which is both, costs two (lesson 01). A layer
# has an attention block and an MLP block.
#
# - **Tensor parallelism**: an all-reduce for each block forward (g), and one backward (f). That makes 2 · 2 = 4 units
#   forward and 4 backward, 8 in all.
# - **With sequence parallelism**: count them yourself. The lower half of the picture in section 3 shows the forward of
#   one block. Backward mirrors it, and then there is what exercise 10.3 has added.
#
# **Predict.** How many times as many bytes as with tensor parallelism alone does a rank send: forward, and in all?

# %% tags=["predict"]
forward_ratio = 4 / 4
in_all_ratio = (4 + 4 + 2) / 8

# %% tags=["nbval-check-output"]
from course.labs.l10_by_hand import one_layer
from labcode.perf import alpha_beta


def wire_bytes(calls):
    """Bytes that a rank sends for some collectives, each on a ring."""
    sent = 0
    for call in calls:
        sent += alpha_beta.bytes_sent(call.kind, call.group_size, call.num_bytes)
    return sent

with_tp = ranks.run(one_layer, tp=4)[0]
with_sequence = ranks.run(one_layer, tp=4, sequence_parallel=True)[0]
with_tp_kept, tp_forward, tp_backward = with_tp
sequence_kept, forward, backward = with_sequence
sent_before = wire_bytes(tp_forward + tp_backward)
sent_now = wire_bytes(forward + backward)
forward_counted = wire_bytes(forward) / wire_bytes(tp_forward)
in_all_counted = sent_now / sent_before
compare("sent forward", forward_ratio, forward_counted, within=1, found="counted")
compare("sent in all", in_all_ratio, in_all_counted, within=1, found="counted")
print(f"kept by each: {sequence_kept:,} bytes; with tp alone {with_tp_kept:,}")

# %% [markdown]
# Everything that is kept is now divided by four. Forward sends the same 4 units as before. Backward sends 4 + 2 = 6,
# because each of the two blocks gathers once more: 10 units instead of 8, a quarter more. On GPUs the additional
# all-gather may hide behind a matmul. Let us put our measurements beside the formula, here for a layer of GPT-3.

# %% tags=["figure"]
from course.labs.l10_by_hand import formula_bytes, in_the_paper

sizes = (1, 2, 4, 8, 16, 32)

def kept_share(tp, sequence_parallel):
    """Of what one rank alone keeps, by the formula, for a layer of GPT-3."""
    now = formula_bytes(in_the_paper, tp, sequence_parallel, batch=1)
    return now / formula_bytes(in_the_paper, 1, batch=1)

alone_kept, *_ = ranks.run(one_layer, tp=1)[0]
measured = {
    "tp, ours, measured": ([4], [with_tp_kept / alone_kept]),
    "tp + sequence, ours, measured": ([4], [sequence_kept / alone_kept]),
}
formulas = {
    "tp, GPT-3, formula": (sizes, [kept_share(t, False) for t in sizes]),
    "tp + sequence, GPT-3, formula": (sizes, [kept_share(t, True) for t in sizes]),
}
plot.lines(formulas | measured, reference={"10/34": 10 / 34}, caption="10.kept")

# %% [markdown]
# (Our layer has no dropout masks, so it levels off at 4/16, and its point for tensor parallelism lies a little below
# the curve of GPT-3.)
#
# In the published run of section 1, 33.3 GB were added on one rank. If all of it were divided by four, a GPU would have
# 19 GB in use instead of 32, with the 10.2 GB from before. By the count of section 2, with (16 + 32)/4 = 12 bytes for
# each of s b h and 3.7 GB that are not cut, it would be some 23. This is a prediction; no log that we know of shows it.
#
# How much is it in a large model? Take the sizes of Llama 3 70B: 80 layers of h = 8192, and one sequence of 8192 tokens.
# The next cell computes what all layers keep, for our layer with its 16 numbers and for the layer of today with its
# 20.25. In both, 4 numbers stay whole with tensor parallelism alone.

# %% tags=["nbval-check-output"]
s_h_layers = 8192 * 8192 * 80  # b = 1
print("GB in 16-bit numbers: one rank, tp 8, tp 8 and sequence parallel")
for name, numbers in {"our layer": 16, "layer of today": 20.25}.items():
    with_tp = 4 + (numbers - 4) / 8
    gb = [2 * kept * s_h_layers / 1e9 for kept in (numbers, with_tp, numbers / 8)]
    print(f"{name:14} {gb[0]:6.0f} {gb[1]:6.0f} {gb[2]:6.1f}")

# %% [markdown]
# One sequence keeps more than two GPUs with 80 GB could hold, before a single weight. With tp 8 alone it still fills
# most of such a GPU. Sequence parallelism leaves an eighth.
#
# ### The same with DTensor
#
# DTensor has a style for norms and dropout, `SequenceParallel`: the weights stay whole, and input and output are
# `Shard(1)`. Here that is the layout of an **activation**, whose dim 1 in [B, S, H] is the tokens; in the table of lesson
# 09, section 5, it was that of a weight. In the plan below everything outside `up` and `down` is `Shard(1)`. So `up` is
# told that its input comes as `Shard(1)`, and `down` that its output leaves as `Shard(1)`.
#
# The numbers are right, but what does the plan keep? Count an MLP block of our width on four ranks, in tensors of [B,
# S, H]: the input of the norm 1/4, the input of GELU 4/4 and that of `down` 4/4. The input of `up` is the question.
# Either the gathered tensor stays, or PyTorch gathers again in backward.
#
# **Predict.** How many tensors of [B, S, H] does each rank keep: 2.5 or 3.25?

# %% tags=["predict"]
kept_by_the_plan = 3.25

# %% tags=["nbval-check-output"]
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from course.labs.l10_by_hand import kept_bytes
from labcode.comm.counting import counted, totals


class PlainBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(128)
        self.up = nn.Linear(128, 512)
        self.down = nn.Linear(512, 128)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))

PLAN = {
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1)),
}

def block_by_plan(rank):
    mesh = Grid.create(GridShape(tp=4)).mesh["tp"]
    block = parallelize_module(PlainBlock(), mesh, PLAN)
    x = torch.randn(4, 256 // 4, 128, requires_grad=True)
    y, num_bytes = kept_bytes(block.parameters(), block, x)
    with counted() as backward:
        y.sum().backward()
    return num_bytes, totals(backward), block.norm.weight.grad.placements

by_plan_kept, by_plan_backward, norm_layout = ranks.run(block_by_plan)[0]
one_tensor_bytes = 4 * 256 * 128 * 4  # [4, 256, 128] in float32
by_plan_tensors = by_plan_kept / one_tensor_bytes
compare("kept by the plan", kept_by_the_plan, by_plan_tensors, within=1.02)
print("backward:", by_plan_backward)
print("layout of the gradient of the norm's weight:", norm_layout)

# %% [markdown]
# The gathered tensor stays. Backward has one all-gather, for the gradient of the output, and does not gather the input
# again. The input of attention is gathered in the same way. So, by the same count for both halves, the plan sends 8 units
# for a layer, as tensor parallelism does, and keeps 5.5 of 16 numbers where our layers keep 4. Activation checkpointing
# (lesson 16) removes this tensor as well, together with others.
#
# ### Broken on purpose
#
# A length that the ranks cannot share evenly is refused before anything runs:

# %% tags=["raises-exception"] raises="RankError: rank 0: ValueError: model.context_length=250 is not divisible by"
from labcode.config import GPTConfig
from labcode.models import gpt


def cut_250_tokens():
    odd = GPTConfig(
        vocab_size=64, context_length=250, num_layers=1, num_heads=8, hidden_size=128
    )
    grid = Grid.create(GridShape(tp=4))
    return parallelize(gpt.GPT(odd), grid, ParallelConfig(sequence_parallel=True))

ranks.run(cut_250_tokens)

# %% [markdown]
# **Takeaway: sequence parallelism divides the rest of the activations by t, for a quarter more bytes. Where there is
# tensor parallelism, there is little reason to leave it out.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* For the sequence-parallel count people forget the second all-gather, or they count it for every
# linear layer: it belongs to `qkv` and `up` alone, which begin a block. Let the room count with the picture: for each
# block, two collectives forward, the same two mirrored, and one more. Let them guess what the plan keeps before they
# count; most expect PyTorch to gather again.

# %% [markdown]
# ## 5. Weights that several ranks share (core, 24 min)
#
# Something has changed that no shape shows. The weight of a norm is replicated. Before, every rank normalised all tokens,
# and each had the whole gradient of that weight. Now each rank normalises a quarter of the tokens, and has the gradient
# **of those**. The true gradient is the sum over the ranks, and somebody has to form it.
#
# `parallelize` records for each weight how it is sharded, and over which axes its gradient is only a part of the whole
# one, `partial_over`. This is the table `shardings`, and `finish_gradient_sync` reads nothing else. (DTensor keeps such
# a record, too: in section 4 it printed the layout `Partial(sum)` for the gradient of the norm's weight.)
#
# We train twice for 20 steps: once as it should be, and once with `tp` deleted from the table `shardings`, so that
# nobody forms the sums.
#
# **Predict** (a guess is enough). How far apart are the two loss curves at most: more than a tenth of what the loss falls
# in 20 steps (`True`), or less (`False`)?

# %% tags=["predict"]
larger_than_a_tenth = False

# %%
from dataclasses import replace

from course.labs import l10_small_gpt as small


def train(rank, forget):
    """The losses of 20 steps, and this rank's norms after each step, as one vector."""
    grid = Grid.create(GridShape(tp=4))
    model = parallelize(small.build(), grid, ParallelConfig(sequence_parallel=True))
    if forget:
        for name, sharding in model.shardings.items():
            model.shardings[name] = replace(sharding, partial_over=())
    norms = [w for name, w in model.module.named_parameters() if "norm" in name]
    losses = []
    copies = [torch.cat([w.detach() for w in norms])]
    for loss in small.steps(model, model.loss, 20, model.finish_gradient_sync):
        losses.append(loss)
        copies.append(torch.cat([w.detach() for w in norms]))
    return torch.tensor(losses), torch.stack(copies)

# %% tags=["figure"]
right = ranks.run(train, forget=False)
wrong = ranks.run(train, forget=True)
right_losses, right_copies = right[0]
wrong_losses, wrong_copies = wrong[0]
difference = (right_losses - wrong_losses).abs().max()
fall = right_losses[0] - right_losses[-1]
is_larger = bool(difference > fall / 10)
compare("differs by more than a tenth", larger_than_a_tenth, is_larger)

_, right_on_rank_3 = right[3]
_, wrong_on_rank_3 = wrong[3]
apart = {
    "rank 0 from its start, no sum": (wrong_copies - wrong_copies[0]).norm(dim=1),
    "rank 0 from rank 3, no sum": (wrong_copies - wrong_on_rank_3).norm(dim=1),
    "rank 0 from rank 3, with the sum": (right_copies - right_on_rank_3).norm(dim=1),
}
plot.lines(apart, caption="10.norms")

# %% [markdown]
# Here the losses of the two runs stay within a tenth of their fall, and nobody would notice that in a curve: AdamW
# divides a constant factor, such as a quarter of the sum, out of the gradient again. Yet in the second run four ranks
# train four different sets of norms, each on its own quarter of the positions, and a checkpoint holds only one of the
# four sets. A loss curve is no test of a parallel program. Two other things are: compare the **copies** of two ranks,
# which must be equal to the last bit, and compare with **one process** in float64, as we do now.

# %% tags=["nbval-check-output"]
expected = torch.tensor(small.losses_of_one_process(5))
for name, on in (("tp 4", False), ("tp 4 + sequence", True)):
    parallel = ParallelConfig(sequence_parallel=on)
    found = ranks.run(small.losses_on_grid, GridShape(tp=4), parallel, 5)[0]
    off = (torch.tensor(found) - expected).abs().max().item()
    print(f"{name}: the losses of one process to 1e-12: {off < 1e-12}")

# %% [markdown] tags=["exercise"]
# ### Exercise 10.4 · Open end: a sequence-parallel MLP
#
# Put everything together: the MLP block of a layer, with tensor and sequence parallelism. x holds this rank's tokens,
# [B, S/t, H], and so does the result,
#
# $$y = x + \text{down}(\text{gelu}(\text{up}(\text{norm}(x)))).$$
#
# `weights` is a dict with this rank's `up` [F/t, H], `up_bias` [F/t] and `down` [H, F/t], and with `norm_weight`,
# `norm_bias` and `down_bias`, which are whole. Each of them becomes a parameter of your module under the name that it
# has in the dict (`register_parameter`). You may use your own Functions, or labcode's `gathered_linear(x, weight, bias,
# group)` and `scatter_sequence(x, group)`, and `F.layer_norm` and `F.gelu`. About 20 lines, and only the heads of the
# methods are given.
#
# The check asks four things of your class:
#
# 1. y and the gradient of x are those of one process.
# 2. After `finish_gradient_sync()`, every weight has the gradient that it has in one process.
# 3. For all S tokens nothing is kept but the input and the output of GELU, which have F/t features. For its own tokens
#    a rank may keep what it likes.
# 4. It works in any group.

# %% tags=["exercise"]
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from labcode.parallel.sequence import gathered_linear, scatter_sequence


class SequenceParallelMLP(nn.Module):
    """The MLP block of a layer, on this rank's tokens."""

    def __init__(self, weights, group):
        ### BEGIN SOLUTION
        super().__init__()
        self.group = group
        for name, weight in weights.items():
            self.register_parameter(name, nn.Parameter(weight))
        ### END SOLUTION

    def forward(self, x):
        ### BEGIN SOLUTION
        h = F.layer_norm(x, x.shape[-1:], self.norm_weight, self.norm_bias)
        h = gathered_linear(h, self.up, self.up_bias, self.group)  # [B, S, F/t]
        h = F.linear(F.gelu(h), self.down)  # [B, S, H], partial sums
        h = scatter_sequence(h, self.group)  # [B, S/t, H]
        return x + h + self.down_bias
        ### END SOLUTION

    def finish_gradient_sync(self):
        """After backward: make every weight's gradient that of all tokens."""
        ### BEGIN SOLUTION
        for param in (self.norm_weight, self.norm_bias, self.down_bias):
            dist.all_reduce(param.grad, group=self.group)
        ### END SOLUTION

# %% tags=["check"]
check("10.4", SequenceParallelMLP, ranks)

# %% [markdown]
# **Takeaway: where ranks hold the same weight and see different tokens, its gradient is a sum over these ranks. If you
# forget the sum, the loss will not tell you.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* In 10.4 nearly everybody writes `F.linear(h, self.down, self.down_bias)` before the
# reduce-scatter first, which adds the bias t times, and many forget that `down_bias` then belongs to the shared
# weights. Summing the gradients of `up` and `down` as well is the other frequent mistake. Ask the room which of the
# biases of attention are shared in the same way. (`proj`'s, not `qkv`'s.) The losses of the two runs differ by a few
# hundredths at most: let people say beforehand what they would have noticed in their own project.

# %% [markdown]
# ## 6. From here to GPUs and SLURM (core, 2 min)
#
# | where | start |
# |---|---|
# | 4 GPUs of one machine | `torchrun --nproc-per-node=4 -m labcode.train gpt_tiny --parallel.tp 4 --parallel.sequence_parallel` |
# | SLURM, inside a job of one node | `srun --nodes=1 --ntasks-per-node=8 python -m labcode.train gpt_10m --parallel.tp 2 --parallel.sequence_parallel` |
#
# `gpt_10m` has 6 heads, which 8 ranks cannot share: tp has to divide the heads. What tp leaves over goes to dp, here 4.
# (Under `srun`, export `MASTER_ADDR` and `MASTER_PORT` first, the variables of lesson 04; lesson 14 writes such a
# script.)
#
# On a GPU, `torch.cuda.max_memory_allocated()` counts more than activations: weights, gradients, optimizer state, and
# buffers that live for a moment. Compare differences, as section 1 did.
#
# Transformer Engine's layer is told all this in three arguments, `te.TransformerLayer(..., set_parallel_mode=True,
# tp_group=..., sequence_parallel=True)`; lesson 18, section 11, has the code, and what it leaves to you.
#
# One more thing changes once ranks hold different tokens: randomness. Ranks that hold the **same** activations must
# drop the same features, or their copies differ. Ranks that hold **shards** need different draws, or token 0 and token
# S/t lose the same features in every step. `parallelize` gives each dropout that works on a shard its own stream of
# random numbers.
#
# ## Questions (core, 2 min)
#
# **1.** A layer of GPT-3 has h = 12288, a = 96 and s = 2048. How large is the term with s² beside the 34 s b h, if
# attention stores its tables?
#
# <details><summary>Answer</summary>
#
# 5 a s² b/(34 s b h) = 5 · 96 · 2048/(34 · 12288) = 2.35. The tables take more than twice as much as everything else.
# That is why nobody stores them any more.
# </details>
#
# **2.** Why is the bias of `up` not among the shared weights?
#
# <details><summary>Answer</summary>
#
# It is cut: each rank has the bias of its own features, and adds it after the all-gather, to all tokens. So its
# gradient is complete. The bias of `down` is added after the reduce-scatter, to a rank's own tokens.
# </details>
#
# **3.** From lesson 09: with tensor parallelism alone, what goes wrong if f is left out, and what does the loss show?
#
# <details><summary>Answer</summary>
#
# Without the all-reduce in backward, each rank passes on only its own part of the gradient to the layers below. The
# copies of what lies below drift apart, and the loss still falls. It is the same kind of mistake as a forgotten sum
# here.
# </details>
#
# ## Recap
#
# | concept | formula or fact | in labcode |
# |---|---|---|
# | efficiency | speed-up / times as many GPUs | |
# | fraction that stays whole | ratio = w + (1 - w)/t | |
# | a layer of GPT-3 keeps, 16-bit | 34 s b h + 5 a s² b | `perf.memory.paper_layer_bytes` |
# | with tensor parallelism | s b h (10 + 24/t) + 5 a s² b/t | `perf.memory` |
# | with sequence parallelism | 1/t of everything | `perf.memory` |
# | measured | what autograd keeps | `perf.saved_bytes` |
# | the plan of DTensor, t = 4 | keeps the gathered input: 5.5 of 16 numbers, 8 units | |
# | the pair | all-gather and reduce-scatter, each the other's backward | `comm.collectives` |
# | gather again | 10 units instead of 8 | `parallel.sequence.gathered_linear` |
# | shared weights | sum over the ranks that see other tokens | `parallel.sharding`, `partial_over` |
#
# ## Sources
#
# - Korthikanti et al. 2022, *Reducing activation recomputation in large transformer models*, arXiv:2205.05198: the
#   bytes of a layer (section 4.1), sequence parallelism (section 4.2), gathering again.
# - Shoeybi et al. 2019, *Megatron-LM*, arXiv:1909.08053: f and g.
# - Llama Team 2024, *The Llama 3 Herd of Models*, arXiv:2407.21783, table 3: the sizes of the layer of today.
# - Shazeer 2020, *GLU variants improve transformer*, arXiv:2002.05202: SwiGLU.
# - Li et al. 2021, *Sequence Parallelism*, arXiv:2105.13120, and Jacobs et al. 2023, *DeepSpeed Ulysses*,
#   arXiv:2309.14509: the other two meanings of the name.
# - NERSC, *Deep Learning at Scale*, <https://github.com/NERSC/dl-at-scale-training>: the logs of section 1; its code
#   for the count of section 2 (`train_mp.py`, `networks/vit.py`, `distributed/layers.py`, `config/ViT.yaml`).
# - Narayanan et al. 2021, arXiv:2104.04473, section 4.2: why Megatron's tensors are [S, B, H].
# - Dao et al. 2022, *FlashAttention*, arXiv:2205.14135: attention that stores no tables.
# - Which memory an A100 has: NVIDIA's datasheet of 2021, 1555 GB/s with 40 GB and 2039 GB/s with 80 GB.

# %%
ranks.close()
