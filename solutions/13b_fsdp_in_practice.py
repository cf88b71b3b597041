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
# # 13b · FSDP in practice: units, tokens, nodes, a script
#
# In lesson 13 a layer borrowed its weight from the other ranks. That is right at any size, and whether it is fast
# depends on three things: how much is borrowed at a time, how many tokens a rank computes with it, and which links it
# travels over. In this lesson you predict each of the three, and then write a script with PyTorch's FSDP2 that any
# number of ranks can continue. The section numbers go on where lesson 13 ended.
#
# ## Goals
#
# - choose units, prefetch and resharding for a model;
# - say how many tokens for each GPU hide the messages, inside a node and across nodes;
# - say when sharding is better than tensor parallelism and when it is not;
# - write a training script with FSDP2 that computes in bfloat16, clips, accumulates, and goes on from its checkpoint.
#
# **Time**: 110 minutes, and 28 more for what is optional. A good place for a break is after section 6. **Needs**:
# lesson 13 (sections 1, 3 and 4). For section 5 also lesson 05 (sections 1 and 4); for section 6 also lesson 08
# (sections 2 and 5) and lesson 09 (section 4); for section 7 also lesson 04 (section 7).

# %%
import torch
import torch.distributed as dist
from torch import nn

from course.lab import Ranks, check, compare, plot
from labcode.comm.counting import counted
from labcode.models.gpt import GPT

ranks = Ranks(4)


def count(calls, kind):
    """How many of some collectives are of this kind."""
    return sum(call.kind == kind for call in calls)

# %% [markdown]
# ## 5. Units, prefetch, and how many tokens hide the messages (core, 38 min)
#
# Three choices are left, and each trades time for memory.
#
# **How large is a unit?** If each weight is a unit of its own, there are many small messages. If the whole model is one
# unit, all weights are whole at the same time and have to fit. In between is one unit for each layer, the usual choice.
#
# **Prefetch.** While a layer computes, the weights of the next one can already travel. Then two units are whole at the
# same time, or arriving.
#
# **Reshard after forward, or not?** If the weights stay whole until backward has used them, they need not be gathered
# again. Then at the end of forward all of them are in memory.
#
# On two cores we cannot see what prefetch gains, because sending occupies the same cores that compute. So the next
# experiment is emulated, as in lesson 05, section 4. The ranks, hooks and collectives are labcode's own. But each layer
# sleeps for as long as a device would compute, and each message arrives as late as over a link that carries one at a
# time. There are 6 layers. Forward of a layer takes 20 ms and backward 40 ms. Gathering a layer's weights takes 15 ms,
# and so does reduce-scattering their gradients. In the picture F and B are forward and backward of a layer. On the
# link, G gathers the weights of a layer, and R reduce-scatters its gradients.

# %%
from course.labs import l13_units as units

speeds = units.Speeds(forward_s=0.020, backward_s=0.040, message_s=0.015)
waiting = units.play(ranks, 6, speeds, prefetch=False)
print(f"without prefetch a step takes {1e3 * waiting.step_s:.0f} ms")

# %% tags=["figure"]
NAMES = {"F": "F forward", "B": "B backward", "G": "G gather", "R": "R reduce-scatter"}

def rows_ms(played):
    return [(lane, label, 1e3 * a, 1e3 * b) for lane, label, a, b in played.spans]

plot.timeline(rows_ms(waiting), names=NAMES, caption="13b.without_prefetch")

# %% [markdown]
# Each layer first waits for its weights. Forward takes 6 · (15 + 20) = 210 ms. In backward the first layer to run waits
# 15 ms and computes 40. Each of the other five finds the link busy with the gradients of the layer before it:
# 15 + 15 + 40 = 70 ms. Together with the last reduce-scatter that is 55 + 5 · 70 + 15 = 420 ms, and the step takes
# 630 ms.
#
# **Predict.** With prefetch, how many ms does the step take? Only the first layer of forward, and the first one of
# backward, has to wait for its weights.

# %% tags=["predict"]
with_prefetch_ms = (15 + 6 * 20) + (15 + 6 * 40 + 15)

# %%
prefetched = units.play(ranks, 6, speeds)
step_ms = 1e3 * prefetched.step_s
compare("step with prefetch, ms", with_prefetch_ms, step_ms, within=1.15)
print("layers whole at once, at most:", prefetched.most_whole)

# %% tags=["figure"]
plot.timeline(rows_ms(prefetched), names=NAMES, caption="13b.with_prefetch")

# %% [markdown]
# Forward takes 15 + 6 · 20 = 135 ms, and backward 15 + 6 · 40 + 15 = 270 ms with the last reduce-scatter: 405 ms. In
# backward the link has 30 ms of work for each 40 ms of computing, so it hides completely. If a message took longer than
# 20 ms, the link would need longer than the device in backward, and set the pace.
#
# Look at the turn from forward to backward: the device waits 15 ms for G6, weights that it has freed a moment ago. So
# torchtitan keeps what forward uses last. There the final norm and the head are one unit, made by `fully_shard([norm,
# head], reshard_after_forward=False)`.
#
# Now all choices side by side.

# %%
choices = {
    "a layer, no prefetch": {"prefetch": False},
    "a layer, prefetch": {},
    "a layer, kept for backward": {"reshard": False},
    "two layers, prefetch": {"layers_per_unit": 2},
    "the whole model": {"layers_per_unit": 6},
}
print("unit                         step   layers whole at once")
for name, options in choices.items():
    played = units.play(ranks, 6, speeds, **options)
    print(f"{name:27} {1e3 * played.step_s:4.0f} ms {played.most_whole:8}")

# %% [markdown]
# Units of one layer with prefetch are nearly as fast as keeping everything, with two layers in memory and not six. With
# units of two layers four are in memory, and each pass begins with a wait that is twice as long. Keeping the weights
# whole saves the first wait of backward, 15 ms, and a third of what the link carries, which matters where the link is
# the bottleneck. The whole model in one unit is slow **and** large: nothing overlaps.
#
# The emulation knows no latency. On a real link each message pays α (lesson 05, section 1), so very small units lose.
# And on a GPU, NCCL's own kernels take some of the SMs while they send.
#
# In PyTorch these choices are `fully_shard(layer)` for each unit and `reshard_after_forward=True` or `False`. In
# backward FSDP2 starts the gather of the next unit by itself. In forward it gathers a unit when the program reaches it,
# on a stream of its own. On a GPU that is early enough as long as Python runs ahead of the GPU. Where it does not,
# `layer.set_modules_to_forward_prefetch([...])` starts the gathers of the listed units earlier.

# %% [markdown] tags=["exercise"]
# ### Exercise 13.5 · Units for a model
#
# Shard a model as torchtitan does before training. `model` has an `embedding`, `layers`, a `norm` and a `head`, which it
# runs in this order. Each layer is a unit, resharded after forward. Norm and head are one unit, which stays whole until
# backward has used it. What is left is the unit of the model. All are sharded over `mesh`. About 4 lines.
#
# The check runs a step on four ranks, where the mesh has two of them, and looks at what it gathers.

# %% tags=["exercise"]
from torch.distributed.fsdp import fully_shard


def shard(model, mesh):
    """Make units of a model, in place."""
    ### BEGIN SOLUTION
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    last = [model.norm, model.head]
    fully_shard(last, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)
    ### END SOLUTION

# %% tags=["check"]
check("13.5", shard, ranks)

# %% [markdown]
# ### How many tokens hide the messages
#
# The times of the emulation were given. On a GPU they come from the width of the model, the tokens and the link. Take a
# transformer layer of width h. It has about 12 h² parameters, 4 h² in the attention and 8 h² in the MLP.
#
# - **To gather them** in numbers of 2 bytes, nearly 24 h² bytes arrive at each rank: all but its own 1/p, however many
#   ranks there are. A link of β bytes/s needs 24 h²/β seconds for them.
# - **Forward** costs two FLOPs for each parameter and each token, a multiplication and an addition. For t tokens on
#   this rank that makes 24 h² t FLOPs, and a GPU of Φ FLOP/s needs 24 h² t/Φ seconds. (The scores of the attention add a
#   few percent in wide models. We leave them out.)
#
# labcode's table of clusters (`labcode/perf/hardware_data`, with its sources) says what an H100 reaches in whole layers,
# which is less than in the large matmul of lesson 03, section 1, and what the links of a node with eight of them carry
# for each GPU.

# %% tags=["nbval-check-output"]
from labcode.perf.cluster import load_cluster

dgx = load_cluster("dgx-h100")
FLOPS_PER_S = dgx.gpu.layer_flops_per_s("bfloat16")
INSIDE = dgx.inside.beta_bytes_per_s
ADAPTER = dgx.between.beta_bytes_per_s
print(f"layers {FLOPS_PER_S / 1e12:.0f} TFLOP/s")
print(f"NVLink {INSIDE / 1e9:.0f} GB/s, one network adapter {ADAPTER / 1e9:.0f} GB/s")

# %% [markdown]
# (NVLink's datasheet says 450 GB/s each way. 365 is what collectives reach.)
#
# Over several nodes it matters how many GPUs of each take part. What a node lacks has to come in from outside **once**.
# If all eight GPUs of a node are in the group, it comes in by eight adapters at the same time, an eighth by each, and
# goes on inside by NVLink (lesson 08, section 5). If only one GPU of each node is in the group, as with tensor
# parallelism inside the nodes, it comes in by one adapter.
#
# **Predict.** From how many tokens on is forward longer than the gather of a layer's weights, inside one node, and with
# one GPU in each node? Over **full** nodes of eight, is it `"as many"` as inside one, `"twice as many"`, or `"eight
# times as many"`? And does a wider model need many more tokens, `"yes"` or `"no"`?

# %% tags=["predict"]
tokens_inside = 692e12 / 365e9
tokens_one_gpu_a_node = 692e12 / 50e9
over_full_nodes = "as many"
wider_needs_more = "no"

# %% [markdown]
# We compare this with a layer of labcode's GPT on the meta device. PyTorch's `FlopCounterMode` counts the FLOPs of each
# operation as it runs, those of the attention scores included.

# %% tags=["nbval-check-output"]
from torch.utils.flop_counter import FlopCounterMode

from labcode.config import GPTConfig


def tokens_needed(width, bytes_per_s, tokens=1024):
    """At which forward of a layer takes as long as to gather its weights."""
    config = GPTConfig(
        vocab_size=512, context_length=tokens, num_layers=1,
        num_heads=width // 128, hidden_size=width,
    )
    with torch.device("meta"):
        layer = GPT(config).blocks[0]
        x = torch.empty(1, tokens, width)
    with FlopCounterMode(display=False) as counter:
        layer(x)
    gather_s = sum(2 * param.numel() for param in layer.parameters()) / bytes_per_s
    forward_s = counter.get_total_flops() / FLOPS_PER_S
    return tokens * gather_s / forward_s

inside = tokens_needed(8192, INSIDE)
one_gpu_a_node = tokens_needed(8192, ADAPTER)
full_nodes = tokens_needed(8192, min(INSIDE, 8 * ADAPTER))
TIMES = {"as many": 1, "twice as many": 2, "eight times as many": 8}
nearest = min(TIMES, key=lambda word: abs(TIMES[word] - full_nodes / inside))
half_as_wide = tokens_needed(4096, INSIDE)
needs_more = "yes" if inside > 1.1 * half_as_wide else "no"
compare("inside a node", tokens_inside, inside, within=1.1, found="counted")
compare(
    "one GPU a node", tokens_one_gpu_a_node, one_gpu_a_node, within=1.1, found="counted"
)
compare("full nodes", over_full_nodes, nearest, options=TIMES, found="counted")
compare(
    "a wider model needs more", wider_needs_more, needs_more,
    found="counted", options=("yes", "no"),
)

# %% [markdown]
# The width falls out: 24 h²/β ≤ 24 h² t/Φ means
#
# $$t \;\ge\; \frac{\Phi}{\beta}$$
#
# tokens for each rank and micro-batch, **whatever the width and however many ranks**: about 1,900 inside a node. Over
# full nodes it is the same, since eight adapters together carry more than NVLink does; with one GPU in each node it is
# about 14,000. In backward there are two messages, gather and reduce-scatter, and twice the FLOPs, so the same t is
# enough. (If gradients are sent in 4 bytes, the reduce-scatter counts twice, and backward asks for 1.5 times as many
# tokens.) The other ways of data parallelism follow from the same two lines:
#
# | what is sent for a layer | bytes | what hides it | tokens needed |
# |---|---|---|---|
# | stage 3: gather | 24 h² | forward of the layer before it | Φ/β in **each** micro-batch |
# | stage 3: gather and reduce-scatter | 48 h² | backward of a layer | Φ/β in **each** micro-batch |
# | data parallel: all-reduce | 48 h² | backward of a layer | Φ/β in the last micro-batch |
# | stages 1 and 2: reduce-scatter | 24 h² | backward of a layer | Φ/(2β) in the last micro-batch |
# | stages 1 and 2: gather after the optimizer | 24 h² | nothing | never hidden |
# | the same, in the next forward (Megatron) | 24 h² | forward of the layer before it | Φ/β in the first micro-batch |
#
# (Stage 2 is here the one that keeps whole gradients until the last micro-batch; see lesson 13, section 3.)
#
# An all-reduce of gradients is as hard to hide as stage 3, but it comes once in a step. With 16 micro-batches its time
# is small beside the other 15, and stage 3 pays in each of them.
#
# The rule is for a layer in which each token uses each weight. In a **mixture of experts** a layer has E MLPs instead of
# one, its experts, and a token goes through k of them. All E are gathered, and only k compute for a token, so for the
# experts' weights the rule asks for E/k times as many tokens.

# %% tags=["figure"]
plot.tokens_that_hide(
    FLOPS_PER_S,
    {"inside a node, or full nodes": INSIDE, "one GPU in each node": ADAPTER},
    caption="13b.tokens",
)

# %% [markdown]
# Below Φ/β tokens the link is busy all the time and sets the pace, so a step takes about Φ/(β t) times as long as its
# computation: with 4,600 tokens and one GPU in each node, three times. Larger micro-batches are the remedy, as far as
# memory allows. Otherwise send fewer bytes over the slow link, which is the subject of section 6.

# %% [markdown]
# **One rule comes with units: every rank runs the same units in the same order.** The next model skips layer 1 on rank
# 1, as might happen if layers are dropped at random.

# %% tags=["raises-exception"] raises="RankError: rank"
from labcode.parallel.zero import FullyShardedModule


class Skipping(nn.Module):
    """Four layers, of which rank 1 leaves out one."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            if dist.get_rank() == 1 and number == 1:
                continue
            x = x + layer(x)
        return x

def skip_a_layer(rank):
    model = FullyShardedModule(Skipping(), dist.group.WORLD, prefetch=False)
    model(torch.ones(2, 8)).sum().backward()
    model.finish_gradient_sync()

ranks.run(skip_a_layer)

# %% [markdown]
# From then on rank 1 was one all-gather ahead of the others. The shapes fitted, so nobody noticed: for a while rank 0
# computed layer 1 with rows of layer 2 in it. The mistake shows only when one rank reduces while the others gather, and
# only because the ranks of this notebook compare their calls. On GPUs such a run hangs, or goes on with wrong numbers.
# Draw such random numbers from a generator that is the same on all ranks.
#
# **Takeaway: one unit for each layer, with prefetch. Then two layers are whole at once, and the messages hide if each
# rank has Φ/β tokens in a micro-batch: about 2,000 on nodes of eight H100 with an adapter for each, and 14,000 if only
# one GPU of each node is in the group.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Ask before the table: which two numbers decide whether it pays to keep the weights? (The link's
# time for a layer in backward, gather and reduce-scatter, against the time of a backward.) People expect "the whole
# model" to be fast because it sends one message. If the machine is busy the times grow by some percent; the order
# stays. Let the room do the table of tokens before they see it. Ask what a GPU of twice the speed does to the rule. (On
# the same link it needs twice the tokens: each generation makes the link the scarcer part.)

# %% [markdown]
# ## 6. Across nodes: hybrid sharding, or tensor parallelism (core, 10 min)
#
# **Hybrid sharding.** Links between nodes are slower than those inside a node. If the ranks of **one node** can hold a
# copy of the model together, shard it over these ranks only, and let every node have its own copy. The gathers and the
# reduce-scatter then stay inside the node. Between the nodes each rank all-reduces the gradients of its own rows with
# the ranks that hold the same rows.

# %% tags=["figure"]
plot.hybrid_sharding(nodes=2, ranks_per_node=4, caption="13b.hybrid")

# %% [markdown]
# How much crosses the boundary of a node? We count numbers that a whole node sends, for n nodes with s ranks each.
#
# - **One copy over all p ranks.** In a ring through all ranks each link carries (p-1)/p N numbers for each of the three
#   collectives, including the one link that leaves the node: 3 (p-1)/p N.
# - **A copy in each node.** Each of the s ranks all-reduces N/s numbers over n ranks, and sends 2 (n-1)/n N/s. The node
#   sends 2 (n-1)/n N.
#
# With many nodes that is two thirds of what the first way sends, and with two nodes less than half of it. What matters
# more is what crosses: only gradients, which can hide behind backward, in rings of n ranks and not of p. Every gather
# that a layer has to wait for stays inside the node.
#
# `two_steps` is that of lesson 13, section 1: it trains the small GPT and notes its collectives.
#
# **Predict.** Our 4 ranks stand for 2 nodes of 2. How many numbers for each parameter does a node send, flat and
# hybrid?

# %% tags=["predict"]
flat_sends = 3 * 3 / 4
hybrid_sends = 2 * 1 / 2

# %% tags=["nbval-check-output"]
from course.labs.l13_by_hand import CONFIG, two_steps
from labcode.comm.grid import Grid
from labcode.perf.traffic import across_nodes, ring
from labcode.topology import GridShape


def sent_to_the_other_node(rank, replicas):
    """Bytes that cross from this rank's node to the other, in rings in rank order."""
    grid = Grid.create(GridShape(dp=4))
    group, copies = grid.split("dp", replicas)
    _, calls, _ = two_steps(rank, 3, replicas=replicas)
    crossing = 0
    for call in calls:
        members = copies if call.kind == "all_reduce" else group
        links = ring(call.kind, dist.get_process_group_ranks(members), call.num_bytes)
        own = {link: sent for link, sent in links.items() if link[0] == rank}
        crossing += across_nodes(own, ranks_per_node=2)
    return crossing

flat = ranks.run(sent_to_the_other_node, 1)
hybrid = ranks.run(sent_to_the_other_node, 2)
each_node = 2 * 4 * CONFIG.num_parameters  # 2 nodes, 4 bytes for a number
numbers = [sum(sent) / each_node for sent in (flat, hybrid)]
compare("flat", flat_sends, numbers[0], within=1.1, found="counted")
compare("hybrid", hybrid_sends, numbers[1], within=1.1, found="counted")

# %% [markdown]
# (The flat one is a little below the formula, because the root is gathered only once.) The price is memory: a rank keeps
# 16/s bytes for each parameter instead of 16/p. With FSDP2 this is a mesh of two dims, which must have names. The model
# is replicated over the first dim and sharded over the second:
#
#     mesh = init_device_mesh("cuda", (nodes, 8), mesh_dim_names=("copies", "shards"))
#     fully_shard(layer, mesh=mesh)
#
# **Or tensor parallelism?** Tensor parallelism shards the weights as well, and none of them travel: it sends activations
# (lesson 09, section 4). Which is less? Take a transformer layer of width h and T tokens, which p ranks process
# together.
#
# - Tensor parallelism makes 4 all-reduces for a layer, 2 in forward and 2 in backward, each of T · h numbers. A rank
#   sends 4 · 2 (p-1)/p T h = 8 (p-1)/p T h.
# - Stage 3 moves the 12 h² parameters of the layer three times. A rank sends 36 (p-1)/p h².
#
# The factor (p-1)/p is the same on both sides, so they are equal when 8 T h = 36 h², at T = 4.5 h. For h = 8192 that is
# at about 37,000 tokens, 4,600 for each of 8 ranks. With a larger batch ZeRO sends less, and with a smaller one tensor
# parallelism does: when a fixed batch is spread over more and more GPUs, and in inference.
#
# Bytes are not everything. ZeRO's messages can be prefetched; those of tensor parallelism are waited for, so they stay
# inside a node. On the other hand, data parallelism needs at least one sequence for each rank, and tensor parallelism
# shards the activations too. Large runs use both: tensor parallelism in the node, and sharding over the data-parallel
# ranks, as Llama 3 did.
#
# **Takeaway: with many tokens on each rank shard the weights; with few use tensor parallelism. The bytes are equal at
# 4.5 h tokens for the group.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* What people forget: the all-reduce between copies, and that with one node there is nothing
# between nodes. Ask: what would change with 4 micro-batches in a step? (Stage 3 gathers and reduce-scatters for each of
# them, four times as much. Stage 1 sends once, and so does labcode's stage 2, which then keeps whole gradients; one
# that frees them sends five parts instead of two.)

# %% [markdown]
# ## 7. A script of your own with FSDP2 (core, 58 min)
#
# In lesson 13, section 4, `fully_shard` trained a model in a few lines. A real training run needs five things more.
#
# **Precision.** `MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)` says in which dtype the
# weights of a unit are gathered and used, and in which its gradients are reduced over the ranks. The rows that a rank
# keeps stay as the model was built, in float32: they are the master weights of lesson 13, section 1. Their gradients
# are float32 too. So a rank keeps 4 + 4 + 8 = 16 bytes for each of its parameters, as many as in the table there, and
# the 16-bit weights exist only while a unit is whole. The all-gathers send 2 bytes for each number, and the
# reduce-scatters send 4, so backward needs the 1.5 times as many tokens of section 5. If you leave `reduce_dtype` out,
# gradients are sent and reduced in the dtype they were computed in. Here that is bfloat16: 2 bytes, but a sum over many
# ranks loses digits.
#
# Without a policy, and with `model.bfloat16()` before `fully_shard`, a rank keeps 2 + 2 + 2 + 2 = 8 bytes, since
# AdamW's two averages have the dtype of the weight. There is no master copy then, and updates that are small beside
# their weight are rounded away (lesson 03b, section 4).
#
# **Micro-batches.** With several backward passes per step, the gradients need to be sent only in the last one.
# `model.set_requires_gradient_sync(False)` holds the reduce-scatters back until it is called with True. The price is
# memory: until then every rank keeps whole gradients, as at stage 1, in `reduce_dtype`, here 4 bytes for each parameter
# of the model.
#
# **What a unit may hold.** A tied weight, which two modules share, belongs to one unit. In our GPT the embedding and
# the head share theirs, and both are left to the root; `fully_shard([model.embed, model.head])` would make one unit of
# the two. A unit may hold frozen weights beside trained ones: they are gathered, and have no gradient to send. The
# trained weights of a unit must have one dtype. Buffers are neither sharded nor cast, and FSDP2 never sends them.
#
# **Clipping.** A weight is now a DTensor, a tensor of which each rank has some rows, and so is its gradient. So
# `nn.utils.clip_grad_norm_(model.parameters(), 1.0)` is written as on one process: it adds up the squares of all ranks.
# Be careful with norms that you compute yourself, though. `weight.norm()` is a DTensor too, each rank has its **part**
# of it, and `.item()` shows that part alone. `weight.norm().full_tensor()` is the norm; it is a collective, so all
# ranks must call it.
#
# **Checkpoints.** No rank has the whole model, and none needs it: with `torch.distributed.checkpoint` (DCP) each rank
# writes its rows. A file beside them says which rows lie where, so a job with another number of ranks finds its own.
# (For other tools, `HuggingFaceStorageWriter`, given to `dcp.save` as `storage_writer`, writes safetensors files.)
#
# **Names that you will meet elsewhere.** `CPUOffloadPolicy()`, given as `offload_policy`, keeps rows, gradients and
# optimizer in the memory of the host. The GPU then holds only the units in use, and each of them crosses PCIe.
# ZeRO-Infinity goes one step further, to NVMe disks. ZeRO++ saves bytes between nodes: it gathers weights in 8 bits,
# keeps a second copy of them in each node for backward (in FSDP2 `reshard_after_forward=8`, on nodes of 8), and sends
# gradients in 4 bits.
#
# We look at the first three on our four ranks. A hook records the dtype that a weight has while it is used.

# %% tags=["nbval-check-output"]
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from course.labs.l13_by_hand import CONFIG
from labcode.models import gpt
from labcode.models.layers import initialize


def sharded(policy):
    model = initialize(GPT(CONFIG), seed=0)
    for layer in model.blocks:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)

def dtypes(rank, tokens):
    """Of a weight in use, of the rows that are kept, and of their gradient."""
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
    model = sharded(policy)
    norm = model.blocks[0].norm1
    used = []
    norm.register_forward_hook(lambda *_: used.append(norm.weight.dtype))
    gpt.loss(model(tokens), tokens).backward()
    return used[0], norm.weight.dtype, norm.weight.grad.dtype

tokens = torch.randint(512, (1, 16), generator=torch.Generator().manual_seed(0))
in_use, kept, gradient = ranks.run(dtypes, tokens)[0]
print(f"while it is used: {in_use}, kept: {kept}, gradient: {gradient}")

# %% [markdown]
# This is what PyTorch says of the embedding as a unit of its own, while the head, with the same weight, stays in the
# root. (Since version 2.13 it looks for this.)

# %% tags=["raises-exception"] raises="RankError: rank 0: ValueError: Parameter 'embed.weight' is shared"
def embedding_apart(rank, tokens):
    model = initialize(GPT(CONFIG), seed=0)
    fully_shard(model.embed)
    fully_shard(model)
    return model(tokens)

ranks.run(embedding_apart, tokens)

# %% [markdown]
# **The older FSDP.** Many scripts still use `FullyShardedDataParallel`, FSDP1. It joins all weights of a unit, end to
# end, into one long `FlatParameter` and gives each rank an equal slice of it, which may begin in the middle of a
# weight. One tensor has one dtype and is either frozen or not, so all weights of a unit have to agree in both. (With
# `use_orig_params=True` the model shows its weights again, as parts of the flat one, and some may be frozen.) A
# wrapping policy finds the units, here every `Block`. The guide of Transformer Engine does so with
# `transformer_layer_cls={te.TransformerLayer}`, for layers that have no parallelism of their own (lesson 18, section
# 11, has that code for FSDP1 and FSDP2). FSDP2 cuts each weight by itself. The same layer in both:

# %% tags=["nbval-check-output"]
import functools

from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from labcode.models.layers import Block


def kept_of_a_layer(rank):
    """What this rank keeps of the first layer, with FSDP1 and with FSDP2."""
    find_blocks = functools.partial(
        transformer_auto_wrap_policy, transformer_layer_cls={Block}
    )
    older = FullyShardedDataParallel(
        initialize(GPT(CONFIG), seed=0),
        auto_wrap_policy=find_blocks,
        device_id=torch.device("cpu"),
    )
    flat = {name: list(p.shape) for name, p in older.blocks[0].named_parameters()}
    newer = sharded(MixedPrecisionPolicy())
    cut = {}
    for name, param in newer.blocks[0].named_parameters():
        cut[name] = list(param.to_local().shape)
    return flat, cut

flat, cut = ranks.run(kept_of_a_layer)[1]
print("FSDP1, rank 1:", flat)
print("FSDP2, rank 1:", cut)

# %% [markdown]
# With FSDP1 a rank keeps one slice of 12,496 numbers, a quarter of the layer. Rank 0's takes the first three weights,
# 64 + 64 + 12,288 numbers, and 80 numbers of the fourth, a bias of 192. Rank 1's begins in the middle of that bias.
# With FSDP2 each weight keeps its name, and each rank has some of its rows. What changes in a script:
#
# | FSDP1 | FSDP2 |
# |---|---|
# | `auto_wrap_policy=` with `transformer_auto_wrap_policy` | `fully_shard(layer)` for each layer, then `fully_shard(model)` |
# | `ShardingStrategy.FULL_SHARD`, `SHARD_GRAD_OP` | `reshard_after_forward=True`, `False` |
# | `ShardingStrategy.HYBRID_SHARD` | a mesh of two dims |
# | `with model.no_sync():` | `model.set_requires_gradient_sync(False)` |
# | `model.clip_grad_norm_(1.0)` | `nn.utils.clip_grad_norm_(model.parameters(), 1.0)` |
# | `sync_module_states=True` | nothing: all ranks start from the same weights, or load a checkpoint |

# %% [markdown]
# **Predict.** The GPT has four layers and the root, five units. A step has two micro-batches. How many reduce-scatters
# does it make if every backward sends gradients, and how many if only the last one does?

# %% tags=["predict"]
scatters_each_time = 2 * 5
scatters_at_the_end = 5

# %% tags=["nbval-check-output"]
def scatters_in_a_step(rank, tokens, each_time):
    model = sharded(MixedPrecisionPolicy())
    with counted() as calls:
        for number in range(2):
            model.set_requires_gradient_sync(each_time or number == 1)
            gpt.loss(model(tokens), tokens).backward()
    return count(calls, "reduce_scatter")

each_time = ranks.run(scatters_in_a_step, tokens, True)[0]
at_the_end = ranks.run(scatters_in_a_step, tokens, False)[0]
compare("each time", scatters_each_time, each_time, within=1, found="counted")
compare("at the end", scatters_at_the_end, at_the_end, within=1, found="counted")

# %% [markdown]
# This is how DCP saves and loads. `get_state_dict(model, optimizer)` returns two dicts whose tensors are this rank's
# rows, with the names that one process would have. `dcp.save` writes a dict of such dicts (and of numbers) into a
# folder; all ranks call it. To read, make the same dict first: `dcp.load` **fills** it, tensor by tensor, with the rows
# that this rank has now. Most of these tensors are those of the model and the optimizer themselves. `set_state_dict`
# brings back the rest too: the optimizer's settings, and whatever is a copy.
#
#     import torch.distributed.checkpoint as dcp
#     from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
#
#     weights, state = get_state_dict(model, optimizer)
#     saved = {"model": weights, "optimizer": state, "step": 0}
#     dcp.load(saved, checkpoint_id=folder)  # fills it; dcp.save writes it
#     set_state_dict(
#         model,
#         optimizer,
#         model_state_dict=saved["model"],
#         optim_state_dict=saved["optimizer"],
#     )

# %% [markdown] tags=["exercise"]
# ### Exercise 13.6 · Train, stop, and go on with another number of ranks
#
# Complete `main`. It runs on every rank. `folder` is a `pathlib.Path`, `steps` is the total number of steps, and `dtype`
# is the one to compute in. `build_model()` returns a GPT of two blocks, `model.blocks`, in float32.
#
# 1. **Join**, as in exercise 4.4: with GPUs first the device of this rank, from `LOCAL_RANK`; then the process group.
# 2. **Model.** Unlike DDP, FSDP2 sends nothing at the start: each rank keeps its rows of the model it was given, so all
#    have to start from the same weights. `build_model()` takes care of that. Each block is a unit, then the model;
#    `dtype` in the all-gathers, float32 in the reduce-scatters.
# 3. **Optimizer.** `torch.optim.SGD` with `lr=0.1` and `momentum=0.9`. (AdamW divides by the size of the gradient, so
#    that a gradient twice as large as it should be would not show.)
# 4. **Resume.** If `folder / "checkpoint"` exists, read it: model, optimizer, and how many steps are done.
# 5. **Loop** over the steps that are left, counted from 0. `micro_batches(step, device)` returns this rank's part of
#    the two micro-batches of a step, each as `(inputs, targets)`. Their gradients together are the mean over both; they
#    travel once. `gpt.loss(logits, targets)` is the mean cross-entropy. Clip to a norm of 0.6.
# 6. **Save** `{"model": ..., "optimizer": ..., "step": steps}` into `folder / "checkpoint"`, and leave. (DCP warns that
#    it writes over the older checkpoint. Here that is meant; lesson 17, section 2, does it better.)
#
# The file knows the names that the cell below imports, and `torch`, `dist`, `nn`, `F`, `gpt`, `fully_shard` and
# `MixedPrecisionPolicy`; anything else that you need must be imported inside `main`.
#
# The check writes the function to `runs/train_13.py` and starts it three times: three steps on two ranks, then up to
# six steps on **one** rank from this checkpoint, then three steps in bfloat16. It compares the weights in the
# checkpoint with those of one process without FSDP, and counts reduce-scatters and bytes. About 30 lines. The check
# takes about 20 seconds.

# %% tags=["exercise"]
import os

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from course.labs.l13_script import build_model, micro_batches


def main(folder, steps, dtype):
    """Train up to `steps`, from the checkpoint in `folder` if there is one."""
    ### BEGIN SOLUTION
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")

    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    model = build_model().to(device)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    done = 0
    checkpoint = folder / "checkpoint"
    if checkpoint.exists():
        weights, state = get_state_dict(model, optimizer)
        saved = {"model": weights, "optimizer": state, "step": 0}
        dcp.load(saved, checkpoint_id=checkpoint)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=saved["model"],
            optim_state_dict=saved["optimizer"],
        )
        done = saved["step"]

    for step in range(done, steps):
        optimizer.zero_grad()
        batches = micro_batches(step, device)
        for number, (inputs, targets) in enumerate(batches):
            is_last = number == len(batches) - 1
            model.set_requires_gradient_sync(is_last)
            loss = gpt.loss(model(inputs), targets) / len(batches)
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.6)
        optimizer.step()

    weights, state = get_state_dict(model, optimizer)
    saved = {"model": weights, "optimizer": state, "step": steps}
    dcp.save(saved, checkpoint_id=checkpoint)
    dist.destroy_process_group()
    ### END SOLUTION

# %% tags=["check"]
check("13.6", main)

# %% [markdown]
# In the folder `runs` beside this notebook, `torchrun --nproc-per-node=2 train_13.py 12 bfloat16` goes on from the
# checkpoint that the check has left; with 8 GPUs the same file runs as `--nproc-per-node=8`. labcode has checkpoints of
# its own, which also survive a rank that dies while it writes; lesson 17, sections 2 and 4, is about these.
#
# **Takeaway: shard the blocks, then the model, then make the optimizer. A policy sets the dtypes of messages, gradients
# are sent once per step, and each rank saves its rows, which any number of ranks can read.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Typical: the optimizer made before `fully_shard` (it holds the old parameters, and nothing is
# learned); `model.bfloat16()` instead of the policy (there are no master weights then); `saved["step"]` forgotten, so
# that the data begins anew; the loss divided after `backward`. Ask: what does `set_requires_gradient_sync(False)` cost
# in memory at 70 billion parameters on 64 GPUs? (A rank then holds gradients of all parameters, 2 or 4 bytes each: 140
# GB or more. So with large models one sends each time.) Ask also why the loop can be the same on one rank. (Groups of
# one are real.)

# %% [markdown]
# ## 8. Open end: choose a layout before you submit (optional, 28 min)
#
# The numbers of lesson 13, section 1, and of section 6 are enough to choose how a model is divided before a job is
# submitted.

# %% [markdown] tags=["exercise"]
# ### Exercise 13.7 · Choose a layout
#
# Given a model and a cluster, choose a stage and over how many ranks a copy is divided. `situation` has
# `num_parameters`, `num_layers`, `nodes`, `ranks_per_node`, `room_bytes` (what a rank can keep), `inside_bytes_per_s`
# (a link between two ranks of a node) and `between_bytes_per_s` (the link of a node to the others). The candidates are
# `layouts.candidates(situation)`, a list of `(stage, ranks_of_a_copy)`: each stage over all ranks, and stage 3 over
# the ranks of a node.
#
# Return the one that sends for the shortest time among those that fit, with its costs:
# `Layout(stage, ranks_of_a_copy, kept_bytes, sending_s)`. Count like this, in mixed precision:
#
# - **Kept**: `state_bytes(num_parameters, stage, ranks_of_a_copy, **mixed).total`, and at stage 3 the whole 16-bit
#   weights of two layers on top, the one in use and the next. All layers are equally large.
# - **Sent**: weights and gradients travel as 2 bytes. Over p' ranks of a copy, 2 (p'-1)/p' · 2N bytes at stages 0 to 2
#   and 3 (p'-1)/p' · 2N at stage 3. If the copy reaches over several nodes, the slower of the two links counts, else
#   the one inside. If each node has a copy and there are n > 1 nodes, 2 (n-1)/n · 2N bytes follow between the nodes.
# - Nothing hides behind computing, and latency is left out.
#
# The check goes through nine situations, from 1 billion parameters on 4 nodes to 70 billion on 64 nodes, with slow and
# fast links, large nodes, a single node, and a model of few layers. In each it asks whether your layout fits, whether
# its costs are right, and whether another one that fits is faster.

# %% tags=["exercise"]
from course.labs import l13_layouts as layouts
from labcode.perf.state_memory import state_bytes

Layout = layouts.Layout
mixed = {"weight_bytes": 2, "gradient_bytes": 2, "optimizer_bytes": 12}


def choose(situation):
    """The Layout that sends for the shortest time among those that fit."""
    ### BEGIN SOLUTION
    message_bytes = 2 * situation.num_parameters
    everyone = situation.nodes * situation.ranks_per_node
    fitting = []
    for stage, p in layouts.candidates(situation):
        kept = state_bytes(situation.num_parameters, stage, p, **mixed).total
        collectives = 2
        if stage == 3:
            collectives = 3
            kept += 2 * message_bytes / situation.num_layers
        link = situation.inside_bytes_per_s
        if p > situation.ranks_per_node:
            link = min(link, situation.between_bytes_per_s)
        sending_s = collectives * (p - 1) / p * message_bytes / link
        copies = everyone // p
        if copies > 1:
            across = 2 * (copies - 1) / copies * message_bytes
            sending_s += across / situation.between_bytes_per_s
        if kept <= situation.room_bytes:
            fitting.append(Layout(stage, p, kept, sending_s))
    return min(fitting, key=lambda layout: layout.sending_s)
    ### END SOLUTION

# %% tags=["check"]
check("13.7", choose)

# %% [markdown]
# This is what labcode chooses in the nine situations.

# %% tags=["nbval-check-output"]
print("                                    stage  ranks of a copy    keeps     sends")
for situation in layouts.CASES:
    best = layouts.best(situation)
    print(f"{situation.about:35} {best.stage:5} {best.ranks_of_a_copy:16}", end=" ")
    print(f"{best.kept_bytes / 1e9:6.1f} GB {best.sending_s:7.2f} s")

# %% [markdown]
# Stages 0 to 2 send the same, so the smallest one that fits is as good as any. Stage 3 is chosen when they no longer
# fit, and hybrid sharding when a node is large enough for a copy and the links between nodes are slow. On nodes of 8
# it rarely pays here: a copy in a node takes 16/8 = 2 bytes for each parameter, and the two layers. Over many ranks
# stage 2 keeps little more than 2 bytes too, so where hybrid sharding fits, stage 2 mostly fits as well and sends less.
# That is so with one micro-batch in a step and without activations. With several, stage 2 either sends gradients in
# each of them or keeps them whole.

# %% [markdown] tags=["solution-only"]
# *For the instructor.* What people forget: the two borrowed layers, the all-reduce between copies, and that with one
# node there is nothing between nodes.

# %% [markdown]
# ## From here to GPUs and SLURM (core, 2 min)
#
# | where | start |
# |---|---|
# | FSDP2 on 4 GPUs of one machine | `torchrun --nproc-per-node=4 -m labcode.train gpt_10m --parallel.zero_stage 3` |
# | hybrid sharding, two copies | `--parallel.zero_stage 3 --parallel.zero_replicas 2` |
# | with tensor parallelism | `--parallel.zero_stage 3 --parallel.tp 2` |
# | SLURM, inside a job of two nodes | `srun --nodes=2 --ntasks-per-node=4 python -m labcode.train gpt_10m --parallel.zero_stage 3` |
#
# (Under `srun`, export `MASTER_ADDR` and `MASTER_PORT` first, the variables of lesson 04; lesson 14 writes such a
# script.) On a GPU the memory that a step really needs is `torch.cuda.max_memory_allocated()`; the report of a run
# shows it. It is more than the table of lesson 13 says, by the activations, the units that are whole, and the buffers
# in which messages travel. In a profile of a good run the all-gathers lie below the layers before them; gaps before
# each layer mean that the link is too slow, or that nothing is prefetched.

# %%
ranks.close()

# %% [markdown]
# ## Questions (core, 2 min)
#
# **1.** With stage 3, doubling the batch of each rank makes a step take less than twice as long. Why?
#
# <details><summary>Answer</summary>
#
# What is sent depends on the weights alone. Below Φ/β tokens the link sets the pace, and computing may grow behind it
# for free. Only above does the step grow with the batch.
# </details>
#
# **2.** A script makes `optimizer = torch.optim.AdamW(model.parameters())` and then calls `fully_shard(model)`. It runs
# without an error, and the loss does not fall. Why?
#
# <details><summary>Answer</summary>
#
# `fully_shard` has replaced the parameters by new ones, DTensors. The optimizer holds the old ones, which never get a
# gradient, so its step changes nothing. Shard first, then make the optimizer.
# </details>
#
# **3.** From lesson 12: why do pipeline and stage 3 not go well together?
#
# <details><summary>Answer</summary>
#
# A pipeline needs many micro-batches, and each forward and backward of each of them gathers the weights of a rank's
# part of the pipeline again. Keep them whole after forward, as torchtitan does where there is a pipeline, or use
# stage 1.
# </details>
#
# ## Recap
#
# | choice | in memory | on the link | in FSDP2 |
# |---|---|---|---|
# | a unit for each layer, prefetched | two layers whole at once | hidden from Φ/β tokens for each rank and micro-batch on | `fully_shard(layer)` |
# | weights kept after forward | all layers whole | a third less | `reshard_after_forward=False` |
# | hybrid, s ranks hold a copy | 16/s N bytes, and two units | between nodes 2 (n-1)/n N numbers for a node | a mesh of two dims |
# | bfloat16 policy | 16/p N bytes, master weights among them | 2 bytes in gathers, 4 in reduce-scatters | `MixedPrecisionPolicy` |
# | gradients sent once in a step | whole gradients between micro-batches | one reduce-scatter of each unit | `set_requires_gradient_sync` |
#
# Against tensor parallelism the bytes are equal at T = 4.5 h tokens for the group.
#
# ## Sources
#
# - Zhao et al. 2023, *PyTorch FSDP*, arXiv:2304.11277: units, prefetch; hybrid sharding in section 3.2.2.
# - Liang et al. 2024, *TorchTitan*, arXiv:2410.06511: FSDP2.
# - Korthikanti et al. 2022, arXiv:2205.05198: 12 h² weights of a layer and what tensor parallelism sends.
# - Llama Team 2024, arXiv:2407.21783, section 3.3.2: tensor parallelism and FSDP together.
# - Rajbhandari et al. 2021, *ZeRO-Infinity*, arXiv:2104.07857; Wang et al. 2023, *ZeRO++*, arXiv:2306.10209.
# - NVIDIA H100 datasheet, 2023: 989 TFLOP/s in bfloat16, NVLink with 900 GB/s both ways together; DGX H100 datasheet,
#   2022: 400 Gb/s for each GPU.
# - PyTorch: <https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html>,
#   <https://docs.pytorch.org/docs/stable/distributed.checkpoint.html> and, for prefetch
#   (written for FSDP1), <https://docs.pytorch.org/docs/stable/notes/fsdp.html>. Tied weights in one unit:
#   <https://github.com/pytorch/torchtitan/issues/2817>.
# - torchtitan, `apply_fsdp_to_decoder` in `torchtitan/distributed/fsdp.py` (in older versions in
#   `torchtitan/models/llama3`): the unit that is kept, and pipelines.
