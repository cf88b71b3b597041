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
# # 10 · Sequence and context parallel
#
# Tensor parallelism cuts the weights of a layer by the number of ranks. It does not cut its memory by as much, because a good part of what a layer
# keeps for the backward pass stays whole on every rank. This lesson counts these bytes, removes them by cutting the **sequence**, and then goes on to
# sequences that are too long for any single GPU.
#
# ## Goals
#
# - read a published scaling result without being impressed or dismissive: compute its efficiency, and what it left whole;
# - predict the activation bytes of a layer to the byte, with tensor and with sequence parallelism, and measure them;
# - know which gradients have to be summed once tokens are split, and see what happens if they are not;
# - write the merge behind ring attention, and share the work of a causal mask out evenly.
#
# **Time**: 90 minutes. **Needs**: lesson 09 (tensor parallel), lesson 01 (bytes of collectives).

# %%
import contextlib
import time
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F

from labcode.comm.collectives import all_gather, start_all_gather, start_reduce_scatter
from labcode.comm.counting import counted, totals
from labcode.comm.grid import Grid
from labcode.config import GPTConfig, ParallelConfig, TextData, ViTConfig
from labcode.models import gpt, layers, vit
from labcode.models.parallelize import parallelize
from labcode.parallel.context import GatherAttention, RingAttention, take_own
from labcode.perf import alpha_beta as comm
from labcode.perf import memory
from labcode.perf.saved_bytes import saved_bytes
from labcode.pool.ranks import Ranks
from labcode.teach.check import check, compare
from labcode.teach.exercises import l10
from labcode.teach.figures import attention as masks
from labcode.teach.figures import plot
from labcode.topology import GridShape

ranks = Ranks(4)

# %% [markdown]
# ## 1. A published result, worked through
#
# The tutorial *Deep Learning at Scale* of NERSC (2024) trains a vision transformer on weather, hidden size 1024, global batch 64, in mixed precision.
# On A100 GPUs with 40 GB it runs out of memory. So each layer is cut over four GPUs, four times as many in all. Its logs say:
#
# | | 4 GPUs (80 GB) | 16 GPUs (40 GB) |
# |---|---|---|
# | data parallel × tensor parallel | 4 × 1 | 4 × 4 |
# | samples per second, epoch 4 | 93.1 | 125.2 |
# | GB in use on a GPU after forward, from epoch 2 on | 44.9 | 33.2 |
# | the same after the very first forward, before the optimizer has state | 43.8 | 31.7 |
# | GB in use before training starts | 10.5 | 10.2 |
#
# It fits now, and that was the aim. **Predict.** If four times the GPUs did each a quarter of the work and held a quarter of the memory: how many
# samples per second, and how many GB?

# %% tags=["predict"]
rate_guess = 4 * 93.1
memory_guess = 44.9 / 4

# %% tags=["nbval-check-output"]
before = {"gpus": 4, "rate": 93.1, "gb": 44.9, "first_gb": 43.8, "start_gb": 10.5}
after = {"gpus": 16, "rate": 125.2, "gb": 33.2, "first_gb": 31.7, "start_gb": 10.2}
compare("samples per second", rate_guess, after["rate"])
compare("GB on a GPU", memory_guess, after["gb"])
print(f"speed-up {after['rate'] / before['rate']:.2f} with 4 times the GPUs; memory saved {1 - after['gb'] / before['gb']:.0%}, not 75%")

# %% [markdown] tags=["exercise"]
# ### Exercise 10.1 · Two numbers that a log does not print
#
# **Efficiency**: the speed-up divided by how many times as many GPUs it took. And the share $w$ that is still **whole** on each of $t$ ranks: if it stays
# as it is and the rest is cut by $t$, then what is held afterwards is this fraction of what was held before:
#
# $$\text{ratio} = w + \frac{1 - w}{t}.$$
#
# Write both as functions. `before` and `after` are pairs (number of GPUs, samples per second).

# %% tags=["exercise"]
def efficiency(before, after):
    ### BEGIN SOLUTION
    return after[1] / before[1] * before[0] / after[0]
    ### END SOLUTION

def whole_share(ratio, t):
    """The share w that is whole on each of t ranks."""
    ### BEGIN SOLUTION
    return (t * ratio - 1) / (t - 1)
    ### END SOLUTION

# %% tags=["check"]
check("10.1", lambda: l10.published(efficiency, whole_share))

# %% tags=["nbval-check-output"]
per_gpu = [run["rate"] / run["gpus"] for run in (before, after)]
forward_gb = [run["first_gb"] - run["start_gb"] for run in (before, after)]  # what the first forward added
still_there = forward_gb[1] / forward_gb[0]
print(f"a GPU of 16 does {per_gpu[1] / per_gpu[0]:.0%} of what a GPU of 4 does")
print(f"forward adds {forward_gb[0]:.1f} GB on one, {forward_gb[1]:.1f} on each of four: {(still_there - 1 / 4) / (3 / 4):.0%} is whole")

# %% [markdown]
# 34 % efficiency: 16 GPUs do the work of little more than five. The log does not say where the rest goes; candidates are the sums between the GPUs (lesson
# 09), gradients that now leave the node, thinner matrix products, and all that four ranks now compute four times. (The 80 GB model also has the faster memory,
# so the comparison is a little hard on the 16.) Who needs the memory pays this price; for speed alone, one would not do it.
#
# And more than half of what forward adds is still whole. The tutorial asks its reader: "Can we drop the memory consumed more? What tensors have we left
# un-partitioned?" Let us answer that.

# %% [markdown]
# **Takeaway: a speed-up without the number of GPUs beside it says little. Tensor parallelism makes a model fit; it does not make it four times smaller or faster.**
#
# ## 2. What a layer keeps
#
# Backward needs the input of each matrix product, each norm and GELU. In numbers per token and hidden feature, for our pre-norm layer with F = 4 H:
#
# | kind | numbers | under tensor parallelism |
# |---|---|---|
# | inputs of the two norms | 2 | whole |
# | their outputs, which `qkv` and `up` read | 2 | whole |
# | q, k, v | 3 | own heads |
# | output of the attention, which `proj` reads | 1 | own heads |
# | input and output of GELU | 4 + 4 | own features |
#
# 16 numbers, 4 of them whole. Korthikanti et al. 2022 count bytes, 2 for each number, and two dropout masks of 1 byte that are whole
# as well: $sbh\,(10 + 24/t)$, plus $5as/h$ cut by $t$ if the attention stores its $s \times s$ scores. Ours is fused and does not.

# %% [markdown]
# `saved_bytes` asks autograd what it saves (`torch.autograd.graph.saved_tensors_hooks`), counts each memory once, leaves the weights out, and notes which
# module saved it. Four ranks run the first layer of a GPT that `parallelize` has cut.
#
# **Predict.** A layer with hidden size 128, 4 samples of 256 tokens, float32. How many bytes does it keep on one rank alone, and how many on each of four?

# %% tags=["predict"]
alone_guess = 16 * (4 * 256 * 128 * 4)
tp_guess = (4 + 12 / 4) * (4 * 256 * 128 * 4)

# %% tags=["figure", "nbval-check-output"]
config = GPTConfig(vocab_size=64, context_length=256, num_layers=1, num_heads=8, hidden_size=128)
KINDS = {"norms: inputs": ("norm1", "norm2"), "norms: outputs": ("attention.qkv", "mlp.up"), "attention": ("attention.core",), "GELU": ("mlp", "mlp.down")}

def one_layer(rank, tp, sequence=False):
    """What one layer keeps on this rank, {module: bytes}, and the collectives of its forward and backward."""
    layer = parallelize(gpt.GPT(config), Grid.create(GridShape(dp=4 // tp, tp=tp)), ParallelConfig(sequence_parallel=sequence)).module.blocks[0]
    x = torch.randn(4, 256 // tp if sequence else 256, 128, requires_grad=True)
    with saved_bytes(layer) as saved, counted() as forward:
        y = layer(x)
    kept = saved.by_module()
    with counted() as backward:
        y.sum().backward()
    return kept, forward, backward

alone, tensor = (ranks.run(one_layer, tp)[0] for tp in (1, 4))
compare("kept by one rank alone", alone_guess, sum(alone[0].values()), within=1.02, unit="B")
compare("kept by each of four", tp_guess, sum(tensor[0].values()), within=1.02, unit="B")
plot.bars({kind: {name: sum(kept[0][part] for part in parts) / 1e6 for name, kept in {"one rank": alone, "each of tp = 4": tensor}.items()}
           for kind, parts in KINDS.items()}, ylabel="MB kept for backward", fmt="{:.2f}",
          alt="What norms read and write is as large on each of four ranks as on one; attention and GELU shrink to a quarter")

# %% [markdown]
# The small rest is statistics: mean and deviation of each token in each norm, one number per token and head of the attention. `labcode.perf.memory`
# names every term; the next cell holds it against the measurement. With more ranks attention and GELU go to zero, and the norms stay: a quarter of everything
# here, 10/34 = 29 % in the paper's count.
#
# Is that the 53 % of the published run? In mixed precision the stream between the layers stays float32: a norm's input has 4 bytes, what a product reads has
# 2. Then (2·4 + 2·2)/36 = 33 % of a layer is whole. Our ViT, in mixed precision, with its two ends:

# %% tags=["nbval-check-output"]
for name, (kept, *_), shape in (("one rank", alone, GridShape()), ("tp = 4", tensor, GridShape(tp=4))):
    print(f"{name:9} formula {sum(memory.layer_activations(config, shape, batch=4, value_bytes=4).values()):,.0f} measured {sum(kept.values()):,} bytes")
weather = ViTConfig(num_variables=4, lat=40, lon=80, hidden_size=128, num_layers=4, num_heads=8)

def kept_per_sample(rank, tp):
    """Bytes that one sample more keeps, in mixed precision; copies of weights, made once, drop out."""
    model, kept = parallelize(vit.ViT(weather), Grid.create(GridShape(dp=4 // tp, tp=tp))), []
    for batch in (1, 2):
        state = torch.randn(batch, 4, weather.lat, weather.lon)
        with saved_bytes(model.module) as saved, torch.autocast("cpu", torch.bfloat16):
            loss = vit.loss(model(state), state)
        kept.append(saved.total())
        del loss  # alive until here: without it autograd would let go of everything
    return kept[1] - kept[0]

left = ranks.run(kept_per_sample, 4)[0] / ranks.run(kept_per_sample, 1)[0]
print(f"tp = 4 leaves {left:.0%} of our ViT's activations, so {(4 * left - 1) / 3:.0%} are whole; published {still_there:.0%} and {(4 * still_there - 1) / 3:.0%}")

# %% [markdown]
# Norms, patches and prediction make 38 % in our ViT. The published run has more that is whole. A log cannot tell what: it counts all that is in use on
# the GPU, with the allocator's reserve, buffers of libraries, and whatever that model keeps and ours does not.
#
# **Takeaway: tensor parallelism cuts what lies inside the attention and the MLP. What lies between them, all ranks keep in full.**
#
# ## 3. Cut what lies between
#
# A norm, a dropout, an addition treat each token apart. So give each rank of tp a part of the **tokens** there: `[B, S/t, H]`. Where a product
# begins, all tokens are needed: an all-gather. Where it ends, partial sums are added, and each rank wants its tokens only: a reduce-scatter.
#
# | | into a column-parallel product | out of a row-parallel product |
# |---|---|---|
# | tensor parallel | nothing; backward all-reduce | all-reduce; backward nothing |
# | + sequence parallel | all-gather; backward reduce-scatter | reduce-scatter; backward all-gather |
#
# An all-reduce **is** a reduce-scatter and an all-gather (lesson 01). So far, the same bytes.

# %% [markdown]
# One trap. An all-gather followed by a linear layer computes the right thing. But what does the linear layer keep for the gradient of its weight? Its input: the
# gathered one. `labcode.parallel.sequence.gathered_linear` keeps its own tokens. See what that saves, and what it does in backward.

# %% tags=["nbval-check-output"]
from labcode.parallel.sequence import gathered_linear


def gather_and_multiply(rank, multiply):
    """Bytes kept by all-gather and product on this rank, and the collectives of its backward."""
    layer = torch.nn.Linear(128, 32)
    x = torch.randn(4, 256 // 4, 128, requires_grad=True)
    with saved_bytes(layer) as saved:
        y = multiply(x, layer.weight, layer.bias, dist.group.WORLD)
    kept = saved.total()
    with counted() as backward:
        y.sum().backward()
    return kept, totals(backward)

plain = ranks.run(gather_and_multiply, lambda x, weight, bias, group: F.linear(all_gather(x, group, 1), weight, bias))[0]
for name, (kept, backward) in {"plain": plain, "gathered_linear": ranks.run(gather_and_multiply, gathered_linear)[0]}.items():
    print(f"{name:16} keeps {kept:,} bytes; backward: {backward}")

# %% [markdown] tags=["exercise"]
# A quarter is kept. The price is a second all-gather in backward. It can travel while the rank computes the gradient of the input, which does not need it.
#
# ### Exercise 10.2 · Gather again
#
# Write this operation. `start_all_gather(x, group, dim)` and `start_reduce_scatter(x, group, dim)` begin to communicate and return a function that waits and
# gives the result. The sequence is dim 1. For `y = x @ weight.T`: the input's gradient is `grad @ weight`, summed over the ranks; the weight's is the rows of
# `grad`, transposed, times the rows of the whole x (`flatten(0, 1)` makes rows).

# %% tags=["exercise"]
class GatherAgain(torch.autograd.Function):
    """x [B, S/p, H], weight [F/p, H] -> [B, S, F/p], keeping x alone."""

    @staticmethod
    def forward(ctx, x, weight, group):
        ### BEGIN SOLUTION
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return F.linear(start_all_gather(x, group, 1)(), weight)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad):
        ### BEGIN SOLUTION
        x, weight = ctx.saved_tensors
        finish = start_all_gather(x, ctx.group, 1)
        own = start_reduce_scatter(grad @ weight, ctx.group, 1)
        grad_weight = grad.flatten(0, 1).T @ finish().flatten(0, 1)
        return own(), grad_weight, None
        ### END SOLUTION

# %% tags=["check"]
check("10.2", lambda: l10.gathers_again(GatherAgain, ranks))

# %% [markdown]
# Now the whole layer. Call a ring's all-gather or reduce-scatter of B·S·H numbers one **unit**; an all-reduce is two. Per layer tensor parallelism pays
# 2 all-reduces forward and 2 backward. With sequence parallelism: 2 all-gathers and 2 reduce-scatters forward, the mirror image backward, and 2 all-gathers
# again.
#
# **Predict.** What does a rank keep now? And how do its bytes on the wire compare with plain tensor parallelism, forward, and forward and backward together?

# %% tags=["predict"]
sequence_guess = 16 * (4 * 256 * 128 * 4) / 4
forward_ratio_guess = (2 + 2) / (2 * 2)
both_ratio_guess = (4 + 4 + 2) / (4 + 4)

# %% tags=["nbval-check-output"]
def wire(calls):
    """Bytes that a rank sends, with ring algorithms."""
    return sum(comm.bytes_sent(call.kind, call.group_size, call.num_bytes) for call in calls)

sequence = ranks.run(one_layer, 4, sequence=True)[0]
compare("kept by each of four", sequence_guess, sum(sequence[0].values()), within=1.02, unit="B")
compare("sent forward, ratio", forward_ratio_guess, wire(sequence[1]) / wire(tensor[1]), within=1)
compare("sent in all, ratio", both_ratio_guess, wire(sequence[1] + sequence[2]) / wire(tensor[1] + tensor[2]), within=1)

# %% tags=["figure"]
large = GPTConfig(num_heads=96, hidden_size=12288, context_length=2048, dropout=0.1)  # as in the paper: dropout, two bytes a number

def kept(tp, sequence):
    return sum(memory.layer_activations(large, GridShape(tp=tp), batch=1, sequence_parallel=sequence).values())

two = [ranks.run(one_layer, 2, along)[0] for along in (False, True)]
ours = {"ours": (alone, two[0], tensor), "ours, + sequence": (alone, two[1], sequence)}
ours = {name: ((1, 2, 4), [sum(run[0].values()) / sum(alone[0].values()) for run in runs]) for name, runs in ours.items()}
sizes = (1, 2, 4, 8, 16, 32)
lines = {name: [kept(t, along) / kept(1, False) for t in sizes] for name, along in (("tensor parallel", False), ("+ sequence parallel", True))}
picture = plot.lines(lines | ours, x=sizes, logx=True, xlabel="ranks of tp", ylabel="kept by a rank, one rank = 1", reference={"10 / 34": 10 / 34},
                     title="A layer of GPT-3 175B (formula, lines) and ours (measured, points)",
                     alt="With tensor parallelism alone the curve flattens at 0.29; with sequence parallelism it falls as one over t; the points lie on the curves or just below")
axes, handles = picture.axes[0], picture.axes[0].get_legend().legend_handles
axes.set_xticks(sizes, sizes)
axes.minorticks_off()
for formula in (*axes.lines[:2], *handles[:2]):
    formula.set_marker("")
for points in (*axes.lines[2:4], *handles[2:4]):
    points.set_linestyle("none")
picture

# %% [markdown]
# Everything is cut by four. Forward costs the same bytes, backward half as much again, which can travel behind a product. (Ours has no dropout masks: its floor is
# 1/4.) In the published run the first forward added 33.3 GB; cut by four, beside the 10.2 GB from before, that would be about 19 GB in place of 32. A prediction: no
# log that we know of shows it.
#
# **Takeaway: sequence parallelism cuts the rest of the activations by t, for a quarter more bytes. With tp there is little reason to leave it out.**
#
# ## 4. Shared weights
#
# The weight of a norm is whole on every rank. Before, every rank normalised all tokens and had its whole gradient. Now it sees a quarter of the tokens, and has
# the gradient **of those**. The true one is the sum over the ranks.
#
# **Predict.** How far is a rank's part from the sum, as a fraction of the sum's length?
#
# - if all four parts are the same, 3/4 is missing;
# - if they are independent and equally long, $\sqrt{3/4}$.

# %% tags=["predict"]
part_guess = (3 / 4) ** 0.5  # four quarters of a text: independent?

# %%
from labcode.data import sampler, text

splits = text.load(TextData(), context_length=64)
small = GPTConfig(splits.tokenizer.vocab_size, num_layers=2, num_heads=4, hidden_size=32, context_length=64)
order = sampler.Batches(len(splits.train), global_batch=8)
batches = [splits.train[order.indices(step)] for step in range(20)]  # [(inputs [8, 64], targets [8, 64]), ...]

def build(dtype=torch.float32):
    return layers.initialize(gpt.GPT(small), seed=0).to(dtype)

def steps(model, loss_of, count, sync=lambda: None):
    """Train; gives the loss of each step after the step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for inputs, targets in batches[:count]:
        loss = loss_of(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        sync()
        optimizer.step()
        yield loss.item()

# %%
def part_error(rank):
    """Distance of this rank's gradients of norms and late biases from their sums, and how all weights are sharded."""
    model = parallelize(build(), Grid.create(GridShape(tp=4)), ParallelConfig(sequence_parallel=True))
    shared = [param for name, param in model.module.named_parameters() if "tp" in model.shardings[name].partial_over]
    model.loss(model(batches[0][0]), batches[0][1]).backward()
    part = torch.cat([param.grad.flatten() for param in shared])
    model.finish_gradient_sync()  # sums what is shared
    total = torch.cat([param.grad.flatten() for param in shared])
    return ((part - total).norm() / total.norm()).item(), model.shardings

errors, (places, *_) = zip(*ranks.run(part_error))
compare("error of a part, mean", part_guess, sum(errors) / 4, within=1.05)
for name, place in places.items():
    if "blocks.0" in name or "positions" in name:
        print(f"{name:32}{'cut over tp' if place.shards else 'whole':13}gradient summed over {', '.join(place.partial_over)}")

# %% [markdown]
# Nearer to 3/4: at the first step all quarters of the text pull norms and biases almost the same way. A part is then roughly a quarter of the sum, and AdamW
# divides such a factor out again. Remember that when you see the loss.
#
# Summed over tp is every weight that is whole on ranks that see different tokens: norms, positions, biases that are added after a reduce-scatter. (Over cp all
# are: section 5. Here cp has size 1.) `finish_gradient_sync` reads this table, `shardings`, and nothing else.
#
# Now train twice, 20 steps: once with the table, and once with `tp` deleted from its last column. What would you expect to notice in the loss?

# %% tags=["figure"]
def train(rank, shape, count, forget="", dtype=torch.float32, **options):
    """The losses, and after each step the norms and biases that this rank holds whole, in one vector."""
    model = parallelize(build(dtype), Grid.create(shape), ParallelConfig(**options))
    for name, place in model.shardings.items():
        model.shardings[name] = replace(place, partial_over=tuple(axis for axis in place.partial_over if axis != forget))
    whole = [param for name, param in model.module.named_parameters() if not model.shardings[name].shards and param.dim() == 1]
    losses, weights = [], [torch.cat([param.detach() for param in whole])]
    with model.no_sync() if forget == "cp" else contextlib.nullcontext():  # the sum over cp travels with the average over dp
        for loss in steps(model, model.loss, count, model.finish_gradient_sync):
            losses.append(loss)
            weights.append(torch.cat([param.detach() for param in whole]))
    return torch.tensor(losses, dtype=torch.double), torch.stack(weights)

good, bad = (ranks.run(train, GridShape(tp=4), 20, forget, sequence_parallel=True) for forget in ("", "tp"))
print(f"largest difference of the losses {(good[0][0] - bad[0][0]).abs().max():.3f} nats; they fell from {good[0][0][0]:.2f} to {good[0][0][-1]:.2f}")
lengths = {"apart, sum forgotten": bad[0][1] - bad[3][1], "apart, with the sum": good[0][1] - good[3][1], "way since the start": bad[0][1] - bad[0][1][0]}
picture = plot.lines({name: x.norm(dim=1) for name, x in lengths.items()}, xlabel="step", ylabel="length", title="Norms and biases of rank 0 against rank 3",
                     marks=False, alt="Without the sum the copies of two ranks part at once, by half of what they move or more; with it they stay equal")
picture.axes[0].set_xticks(range(0, 21, 5))
picture

# %% [markdown]
# The losses look the same. Yet four ranks train four sets of norms, each on its own quarter of the positions, and whoever saves the model saves one of them.
# Compare the **copies** of two ranks, equal to the last bit or not, or compare with one process in float64, as section 7 does. A loss curve is no test.
#
# **Takeaway: where ranks hold the same weight and see different tokens, its gradient is a sum over them. Forget it, and the loss stays silent.**
#
# ## 5. Long sequences
#
# Sequence parallelism gathers all tokens inside every product. **Context parallelism** cuts the sequence everywhere, over an axis of its own: a rank holds
# `[B, S/p, ..]` from the tokens to the loss. Only attention looks at other tokens; its queries need the keys and values of other ranks. Two ways:
#
# - **gather**: every rank collects all K and V. Few messages; but K and V of the whole sequence lie on every rank.
# - **ring**: K and V travel from rank to rank. Each rank computes its queries over the part that is there, sends it on, and merges the results.

# %% [markdown] tags=["exercise"]
# Can softmax be merged? For one query over a block of keys, let $s_j$ be the scores, $\text{lse} = \log \sum_j e^{s_j}$, and
# $o = \sum_j e^{s_j - \text{lse}}\, v_j$ the output over this block. Two blocks have two denominators; $e^{\text{lse}}$ tells how much each counts.
#
# ### Exercise 10.3 · Online softmax
#
# Write the merge: the output and the lse that attention over both blocks together would give. `out` is `[.., Q, D]`, `lse` is `[.., Q]`. Scores may be in the
# thousands, where `exp` overflows; and a block in which nothing is visible has lse = −∞.

# %% tags=["exercise"]
def my_merge(out_a, lse_a, out_b, lse_b):
    """(out, lse) of two blocks of keys together."""
    ### BEGIN SOLUTION
    lse = torch.logaddexp(lse_a, lse_b)
    share_a, share_b = (lse_a - lse).exp(), (lse_b - lse).exp()
    return out_a * share_a[..., None] + out_b * share_b[..., None], lse
    ### END SOLUTION

# %% tags=["check"]
check("10.3", lambda: l10.merge(my_merge))

# %% [markdown]
# Now both ways on four ranks, in float64, against attention over the whole sequence in one process: output and gradients. Let *kv* be the bytes of one rank's K and
# V: $2\,B N \tfrac{S}{p} D \cdot 8$, with B = 1, N = 4, S = 1024, D = 32. In the ring a part makes $p-1$ hops forward; backward it goes round once more,
# and behind it travel the sums of its gradients. The gather is an all-gather forward and a reduce-scatter backward.
#
# **Predict.** How many bytes does a rank send in forward and backward together?

# %% tags=["predict"]
ring_guess = (3 + 3 + 3) * (2 * 4 * 256 * 32 * 8)
gather_guess = (3 + 3) * (2 * 4 * 256 * 32 * 8)

# %% tags=["nbval-check-output"]
def attention(rank, way):
    """Largest difference from attention in one process, bytes sent, bytes kept."""
    group, core = dist.group.WORLD, layers.CoreAttention(causal=True)
    whole = torch.randn(3, 1, 4, 1024, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    part = take_own(whole.detach(), group, 3, "zigzag").requires_grad_()  # q, k, v [3, B, N, S/p, D]
    expected, cut = core(*whole), way(core, group, "zigzag")
    expected.square().sum().backward()
    cut.length = 1024
    with saved_bytes(cut) as saved, counted() as calls:
        out = cut(*part)
        kept = saved.total()
        out.square().sum().backward()
    pairs = ((out, take_own(expected, group, 2, "zigzag")), (part.grad, take_own(whole.grad, group, 3, "zigzag")))
    return max((a - b).abs().max().item() for a, b in pairs), wire(call for call in calls if call.kind != "recv"), kept

for way, guess in ((RingAttention, ring_guess), (GatherAttention, gather_guess)):
    off, sent, kept = ranks.run(attention, way)[3]
    compare(f"{way.__name__}, bytes sent", guess, sent, within=1, unit="B")
    print(f"    equal to one process to 1e-12: {off < 1e-12}; kept for backward: {kept / (2 * 4 * 256 * 32 * 8):.1f} kv")

# %% [markdown]
# The ring sends half as much again (more in bfloat16, where its sums are float32). It keeps what belongs to its own tokens: q, k, v, output (2 kv), lse. A gathering
# rank keeps K and V of everybody as well, p kv, and masks for its queries. A block of the ring is $(S/p)^2$ of work for $S/p$ of bytes: long sequences hide what travels. Llama 3 gathers
# all the same: with 8 key/value heads for 128 query heads K and V are small (Llama Team 2024, section 3.3.2).
#
# **Takeaway: context parallelism cuts every activation by p. Only attention communicates, and the lse makes the ring exact.**
#
# ## 6. Who does the work under a causal mask
#
# Token 1000 looks at a thousand keys, token 1 at one. Cut the sequence into $p$ pieces in a row, and:
#
# - the last rank has most of the work;
# - in a ring everybody waits for the slowest in every step.
#
# **Predict.** Four ranks. Count scores in units of $(S/4)^2$; a rank's own block is half visible. How many times the work of the first rank has the last one? And how
# many times as long as with perfect sharing does it compute?

# %% tags=["predict"]
last_to_first_guess = 3.5 / 0.5
last_to_fair_guess = 3.5 / (4 * 4 / 2 / 4)

# %% [markdown]
# The picture shows the mask in 8 × 8 tiles, coloured by the rank that computes them. The number in a tile is the step of the ring in which its keys are there. On
# the right the 8 chunks are dealt out otherwise: each rank has an early and a late one. Look for rank 0 on both sides, then count the tiles of one step.

# %% tags=["figure", "nbval-check-output"]
def work(layout):  # tiles of each rank; one on the diagonal counts half
    tiles = masks.tiles(4, layout)
    return [sum(0.5 if query == key else 1 for (query, key), (owner, _) in tiles.items() if owner == rank) for rank in range(4)]

row, dealt = work("contiguous"), work("zigzag")
print("tiles by rank, in a row:", row, " zig-zag:", dealt)
compare("last rank / first rank", last_to_first_guess, row[3] / row[0], within=1)
compare("last rank / fair share", last_to_fair_guess, row[3] / dealt[3], within=1)
masks.causal(4, alt="On the left rank 3 has a broad band and rank 0 a corner; on the right each rank has a short and a long row of tiles")

# %% tags=["figure"]
def compute_ms(rank, layout, tokens=4096, repeats=7):
    """Median of the milliseconds that this rank computes in one forward of ring attention, without waiting."""
    ring = RingAttention(layers.CoreAttention(causal=True), dist.group.WORLD, layout)
    ring.length, times = tokens, []
    q, k, v = torch.randn(3, 1, 4, tokens // 4, 32)
    for _ in range(repeats):
        dist.barrier()
        start = time.thread_time()  # two cores share four ranks: the wall would show nothing
        ring(q, k, v)
        times.append(1e3 * (time.thread_time() - start))
    return sorted(times)[repeats // 2]

ms = {"in a row": ranks.run(compute_ms, "contiguous"), "zig-zag": ranks.run(compute_ms, "zigzag")}
compare("last rank / fair share", last_to_fair_guess, ms["in a row"][3] / (sum(ms["zig-zag"]) / 4), within=1.5)
plot.bars({f"rank {r}": {name: by_rank[r] for name, by_rank in ms.items()} for r in range(4)}, ylabel="ms computing, 4096 tokens", fmt="{:.0f}",
          alt="In a row the time grows from rank 0 to rank 3; with zig-zag all four ranks compute for about the same time")

# %% [markdown] tags=["exercise"]
# On the processor's clock the bars follow the tiles. Rank 0 is not quite as idle as its share says: passing on K and V, and merging, cost everybody the same.
#
# ### Exercise 10.4 · Deal the chunks
#
# Write the assignment: of the chunks 0 to 2p−1, the two that a rank holds, such that under a causal mask all ranks have the same work. Chunk $c$ sees
# $c + \tfrac12$ chunks of keys.

# %% tags=["exercise"]
def my_chunks(rank, p):
    """The two chunks, of 2p, that this rank holds."""
    ### BEGIN SOLUTION
    return rank, 2 * p - 1 - rank
    ### END SOLUTION

# %% tags=["check"]
check("10.4", lambda: l10.chunks(my_chunks))

# %% [markdown]
# Positions travel with their tokens: `take_own` cuts inputs, targets and positions alike. A ViT has no mask; there consecutive pieces are fair.
#
# **Takeaway: equal tokens are not equal work. Under a causal mask, an early and a late chunk for each rank make both equal.**
#
# ## 7. A whole GPT
#
# `parallelize` does all of it at once. First what it refuses: 250 tokens over four ranks of tp. Read what was found, and what to do.
#
# Then five steps of training in float64 on each grid, against one process. In the last line the sums over cp are forgotten, and over cp **every** weight is
# shared: each rank trains a GPT of its own on a quarter of the tokens.

# %% tags=["raises-exception"] raises="RankError: rank 0: ValueError: model.context_length=250 is not divisible by"
ranks.run(lambda: parallelize(gpt.GPT(replace(config, context_length=250)), Grid.create(GridShape(tp=4)), ParallelConfig(sequence_parallel=True)))

# %% tags=["nbval-check-output"]
truth = torch.tensor(list(steps(build(torch.float64), gpt.loss, 5)), dtype=torch.double)
grids = {"tp 4": (GridShape(tp=4), {}), "tp 4 + sequence": (GridShape(tp=4), {"sequence_parallel": True}),
         "cp 4, ring": (GridShape(cp=4), {}), "cp 4, gather": (GridShape(cp=4), {"context_attention": "all_gather"}),
         "cp 2, tp 2 + sequence": (GridShape(cp=2, tp=2), {"sequence_parallel": True}), "cp 4, sum forgotten": (GridShape(cp=4), {"forget": "cp"})}
for name, (shape, options) in grids.items():
    losses, _ = ranks.run(train, shape, 5, dtype=torch.float64, **options)[0]
    off = (losses - truth).abs().max().item()
    print(f"{name:23} losses of one process to 1e-12: {off < 1e-12}" + (f", off by more than 0.01: {off > 0.01}" if "forget" in options else ""))

# %% [markdown]
# A length must be a multiple of cp·tp for sequence parallelism, while zig-zag takes any; what does not fit is refused before anything runs. What fits gives the losses
# of one process.
#
# Last, dropout. Ranks that hold the **same** activations must drop the same features, or their copies differ. Ranks that hold **parts** need different draws: with
# equal seeds, token 0 and token S/4 lose the same features in every step, and what should be independent noise repeats itself.
#
# **Predict.** Dropout with probability 0.1. In which share of the places do the masks of two ranks agree, with equal seeds and with independent ones?

# %% tags=["predict"]
equal_guess = 1.0
apart_guess = 0.9**2 + 0.1**2

# %% tags=["nbval-check-output"]
from labcode.parallel.dropout import IsolatedRng, RngStream, seed_for


def dropped(rank, apart):  # where this rank's part of the sequence loses features
    torch.manual_seed(0)
    drop, stream = torch.nn.Dropout(0.1), RngStream(seed_for(0, tp=rank), torch.device("cpu"))
    return (IsolatedRng(drop, stream) if apart else drop)(torch.ones(64, 128)) == 0

for name, guess, apart in (("equal seeds", equal_guess, False), ("streams of their own", apart_guess, True)):
    drawn = ranks.run(dropped, apart)
    compare(f"agree, {name}", guess, (drawn[0] == drawn[1]).double().mean(), within=1.02)

# %% [markdown]
# `parallelize` puts a stream of its own around each dropout that works on a part. (Ring attention has no dropout on its weights: it never holds them. It says so.)
#
# **Takeaway: parity in float64 and equal copies are the two tests of every grid. Randomness needs a rule as well: alike where ranks hold the same, apart where they hold parts.**
#
# ## 8. How to choose
#
# | | tp + sequence parallel | cp, ring |
# |---|---|---|
# | cuts weights and optimizer | yes | not by itself; sharded data parallelism (lesson 13) can cut them over dp × cp |
# | cuts activations | yes | yes |
# | bytes a rank sends per layer, act = S/cp tokens | 10 (t−1)/t act | 2 (p−1) own K and V in 16 bits, (p−1) their sums in 32 |
# | can hide | the second gather; more if cut into chunks (async TP, lesson 09) | most, behind long blocks |
# | limit | heads, the size of a node | chunks that are too short |

# %% [markdown] tags=["exercise"]
# So: tp with sequence parallelism up to the size of a node; cp where one sequence is still too long; dp with what is left.
#
# ### Exercise 10.5 · 131072 tokens
#
# A GPT of 7 billion parameters, 8 sequences of 131072 tokens per step, 64 GPUs in nodes of 8. Choose dp, cp and tp (pp = 1, sequence parallelism on) such that
# weights and activations take at most 60 GB of each GPU, and tp and cp together at most 20 % of the computing time, if nothing hides. Links and order are those of
# lesson 08: tp fastest, 450 GB/s inside a node, 50 GB/s between nodes. `l10.costs(shape)` says what a grid costs. Afterwards argue with it: what does it leave out?

# %% tags=["exercise"]
### BEGIN SOLUTION
my_grid = GridShape(dp=4, cp=2, tp=8)  # tp fills a node, so weights fit; cp = 2 halves the activations, its ring joins two nodes
### END SOLUTION

# %% tags=["check"]
check("10.5", lambda: l10.design(my_grid))

# %%
print({name: round(value, 1) for name, value in l10.costs(GridShape(dp=8, cp=1, tp=8)).items()})
ranks.close()

# %% [markdown]
# <details><summary>What the model leaves out</summary>
#
# The ring hides behind computing, sums of tp hide less. A causal mask halves the work of attention. Recomputation (lesson 16) trades activations for time,
# sharded data parallelism (lesson 13) cuts the 16 bytes (over cp as well), and fewer key/value heads make the ring cheaper.
# </details>
#
# ## From here to GPUs and SLURM
#
# | where | start |
# |---|---|
# | 4 GPUs of one machine | `torchrun --nproc-per-node=4 -m labcode.train gpt_tiny --parallel.tp 4 --parallel.sequence-parallel` |
# | long sequences | `--parallel.cp 4 --model.context-length 1024`; add `--parallel.context_attention all_gather` for the other way |
# | SLURM, inside a job | `srun --nodes=2 --ntasks-per-node=8 python -m labcode.train gpt_10m --parallel.cp 2 --parallel.tp 2` |
#
# The tensors of this notebook stay on the CPU. In training the same classes run on GPUs, where the ring takes PyTorch's fused kernels.
# `torch.cuda.max_memory_allocated()` counts more than activations. PyTorch has `torch.distributed.tensor.experimental.context_parallel`; it is not beside ours
# because it does not run on a CPU (torch 2.13: no sharding rule for its attention there). With dropout on a CPU, PyTorch's attention keeps its scores, and masks
# are as wide as what they drop: `fused_attention=False`, `mask_bytes=4` in `perf.memory`.

# %% [markdown]
# ## Recap
#
# | concept | formula or fact | in labcode |
# |---|---|---|
# | share that is whole | ratio = w + (1 − w)/t | |
# | a layer keeps | sbh (10 + 24/t), 16-bit, fused attention | `perf.memory` |
# | + sequence parallel | sbh 34/t | `perf.memory` |
# | measured | saved tensors | `train.profile.saved_bytes` |
# | gather again | 10 units in place of 8 | `parallel.sequence` |
# | shared weights | sum over ranks with other tokens | `parallel.weights` |
# | ring attention | merge by lse, 3 (p − 1) kv | `parallel.context` |
# | zig-zag | an early and a late chunk each | `parallel.context` |
# | dropout | apart where ranks hold parts | `parallel.dropout` |
#
# ## Sources
#
# - NERSC, *Deep Learning at Scale*, github.com/NERSC/dl-at-scale-training, README: logs of section 1.
# - NVIDIA A100 datasheet, 2021: memory, 1555 and 2039 GB/s.
# - Korthikanti et al. 2022, arXiv:2205.05198: activation bytes, sequence parallelism.
# - Dao et al. 2022, arXiv:2205.14135; Milakov and Gimelshein 2018, arXiv:1805.02867: online softmax.
# - Liu et al. 2023, *Ring Attention*, arXiv:2310.01889.
# - Brandon et al. 2023, *Striped Attention*, arXiv:2311.09431: balance; zig-zag: github.com/zhuzilin/ring-flash-attention.
# - Llama Team 2024, arXiv:2407.21783.
# - torchtitan, `distributed/parallel_dims.py`: `dp_shard_cp`.
