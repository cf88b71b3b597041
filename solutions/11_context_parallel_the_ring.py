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
# # 11 · Context parallel: the ring
#
# Some sequences are too long for one GPU, even one at a time: whole books, videos, the weather of a month. Then the
# sequence itself is cut, and each rank holds a part of the tokens from the first layer to the loss. In all of the
# network only attention looks at other tokens, and in this lesson you write an attention that does so without ever
# having the whole sequence in one place: the **ring**.
#
# ## Goals
#
# - merge attention over two blocks of keys, exactly;
# - write ring attention with sends and receives, forward and backward, and predict its bytes;
# - deal out a sequence such that all ranks have the same work under a causal mask;
# - choose between ring, gather and all-to-all, and between context and tensor parallelism.
#
# **Time**: 195 minutes, and 15 more for what is optional. Sections 1 to 3 are the ring forward, 4 and 5 its backward
# and its balance, and the rest compares it with the other ways and with tensor parallelism. Good places for a break are
# after section 3 and after section 5.
#
# **Needs**: lessons 01 (section 4), 09 (section 3), 10 (section 2).

# %%
import math

import torch
import torch.distributed as dist

from labcode.lab import Ranks, check, compare, plot, show_source
from labcode.models import layers
from labcode.parallel import attention_block
from labcode.parallel.context import RingAttention

ranks = Ranks(4, timeout_s=10)

# %% [markdown]
# ## 1. When one sequence is too long (core, 10 min)
#
# Take a GPT of 7 billion parameters and one sequence of 131072 tokens, in 16-bit numbers. Tensor parallelism with
# sequence parallelism fills a node of 8 GPUs. The formulas of lesson 10 (sections 2 and 4) say what each GPU keeps for
# backward.

# %% tags=["nbval-check-output"]
from labcode.perf import memory
from labcode.teach.exercises import l11
from labcode.topology import GridShape
from labcode.units import si


def activation_bytes(shape):
    """What a rank keeps of one sequence, all layers and the loss."""
    terms = memory.model_activations(l11.LONG, shape, batch=1, sequence_parallel=True)
    return sum(terms.values())

long = l11.LONG
tp_8_bytes = activation_bytes(GridShape(tp=8))
print(f"{long.num_layers} layers, hidden size {long.hidden_size}", end=", ")
print(f"{long.num_heads} heads, {long.num_parameters / 1e9:.1f} billion parameters")
print(f"tp = 8: {si(tp_8_bytes, 'B')} of activations on each GPU")

# %% [markdown]
# An H100 has 80 GB, and weights, gradients and optimizer want their part of it: 16 bytes for each parameter (lesson 04,
# section 6), which tensor parallelism cuts by 8. More tensor parallelism would leave the node, and the links between
# nodes are nine times slower (lesson 08, section 4). And it sends in every layer.
#
# **Context parallelism** (cp) is another axis of the grid. Each of p ranks holds S/p of the tokens, everywhere: in the
# embedding, in every norm, in every product, in the loss. Nothing is gathered for a product with a weight, because it
# treats each token by itself. All weights are the same on the ranks of cp, and their gradients are summed over cp, as
# they are summed over data parallel ranks.
#
# **Predict.** Suppose that on a GPU of 40 GB weights, gradients, optimizer and activations may take 30 GB together, and
# that tp stays at 8. How large must cp be at least, as a power of two?

# %% tags=["predict"]
smallest_cp = 8  # 16 * 7.2 / 8 = 14.4 GB stay whole, so 72.4 GB / cp may be 15.6 GB

# %% tags=["nbval-check-output"]
def in_use_bytes(shape):
    """Weights with gradients and optimizer, and activations."""
    weight_bytes = 16 * long.num_parameters / shape.tp
    return weight_bytes + activation_bytes(shape)

fitting = []
for cp in (1, 2, 4, 8, 16):
    used_bytes = in_use_bytes(GridShape(tp=8, cp=cp))
    print(f"tp = 8, cp = {cp:2}: {si(used_bytes, 'B')} in use")
    if used_bytes <= 30e9:
        fitting.append(cp)
compare("smallest cp", smallest_cp, fitting[0], within=1, found="computed")

# %% [markdown]
# With tp = 8 alone this does not fit into 80 GB either. cp divides the activations and nothing else: however large it
# is, the 14.4 GB of the weights stay.
#
# There is one operation that needs other tokens, and that is attention: each query looks at the keys and values of its
# own token and of all before it. There are three ways to bring them together:
#
# - **gather**: every rank collects the keys and values of the whole sequence;
# - **ring**: keys and values travel from rank to rank, and each rank looks at the part that is there;
# - **all-to-all**: the ranks swap, so that each has all tokens of a part of the heads.
#
# The gather is simple, but its keys and values are not cut by p. The ring is the subject of this lesson, and the
# all-to-all stands beside it at the end.
#
# **Takeaway: context parallelism cuts the activations by p. Of all layers only attention has to communicate, and the
# gradients of the weights are summed at the end.**

# %% [markdown]
# ## 2. Attention in blocks (core, 25 min)
#
# If the keys and values pass by in parts, can we compute attention part by part? The trouble is the softmax: its
# denominator is a sum over **all** keys. Look at one query. With the scores s_j over a block of keys,
#
# $$\text{lse} = \log \sum_j e^{s_j}, \qquad o = \sum_j e^{s_j - \text{lse}}\, v_j .$$
#
# Here o is the output of attention over this block alone. The **lse** (log-sum-exp) is the logarithm of its
# denominator. The output alone does not say how large this denominator was, so we keep the lse beside it.
#
# For example, block A has two keys with the scores 0 and 0 and the values 1 and 3. Its denominator is 1 + 1 = 2, so o =
# 2 and lse = log 2. Block B has one key with the score log 2 and the value 8. Its denominator is 2 as well, so o = 8
# and lse = log 2. Over all three keys the weights are 1, 1 and 2 of 4, and the output is (1 + 3 + 16)/4 = 5. That is
# the mean of 2 and 8, because both blocks have the same denominator.
#
# **Predict.** Now the key of block B has the score log 6. What are the output and the lse of both blocks together?

# %% tags=["predict"]
output_of_both = (1 * 1 + 1 * 3 + 6 * 8) / 8
lse_of_both = math.log(8)

# %% [markdown]
# Here is attention over one block, written out. It returns the output **and** the lse. A causal block is one in which
# query i sees the keys 0 to i.

# %% tags=["by-hand"]
def attend(q, k, v, causal):
    """q [.., Q, D], k and v [.., K, D] -> out [.., Q, D], lse [.., Q]"""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    lse = scores.logsumexp(-1)
    out = (scores - lse[..., None]).exp() @ v
    return out, lse

# %% tags=["nbval-check-output"]
q = torch.ones(1, 1)
k = torch.tensor([[0.0], [0.0], [math.log(6)]])
v = torch.tensor([[1.0], [3.0], [8.0]])
out, lse = attend(q, k, v, causal=False)
out, lse = out.item(), lse.item()
compare("output, all three keys", output_of_both, out, within=1.01, found="computed")
compare("lse, all three keys", lse_of_both, lse, within=1.02, found="computed")

# %% [markdown]
# PyTorch's `F.scaled_dot_product_attention` returns the output alone. The kernel below it has to know the lse too, for
# its backward, and returns both. On the CPU it has this long name, and its inputs are [B, N, S, D]:

# %% tags=["nbval-check-output"]
import torch.nn.functional as F

draw = torch.Generator().manual_seed(1)
q, k, v = torch.randn(3, 1, 2, 6, 8, generator=draw, dtype=torch.float64)
out, lse = attend(q, k, v, causal=True)
fused = F.scaled_dot_product_attention(q, k, v, is_causal=True)
flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_out, flash_lse = flash(q, k, v, is_causal=True)
print("F.scaled_dot_product_attention:", torch.allclose(fused, out))
print("its kernel: output", torch.allclose(flash_out, out), end=", ")
print("lse", torch.allclose(flash_lse, lse))

# %% [markdown]
# (The underscore says that this function may change. The public way to the lse is PyTorch's `flex_attention`.)

# %% [markdown] tags=["exercise"]
# ### Exercise 11.1 · Online softmax
#
# Write the merge: from the outputs and lse of two blocks of keys, compute those that attention over both blocks would
# give. `out` is [.., Q, D] and `lse` is [.., Q]. Two things may happen, in all rows (queries) or in some of them:
#
# - scores may be in the thousands, where `exp` overflows, in both blocks or in one of them;
# - a row may see no key of the first block, or none of the second, but it always sees a key of one of them. Where it
#   sees none, the block's output is 0 in this row, and its lse is -inf.

# %% tags=["exercise"]
def my_merge(out_a, lse_a, out_b, lse_b):
    """(out, lse) of two blocks of keys together."""
    ### BEGIN SOLUTION
    lse = torch.logaddexp(lse_a, lse_b)
    share_a = (lse_a - lse).exp()
    share_b = (lse_b - lse).exp()
    out = out_a * share_a[..., None] + out_b * share_b[..., None]
    return out, lse
    ### END SOLUTION

# %% tags=["check"]
check("11.1", my_merge)

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Derivation: the numerator of a block is e^lse · o; numerators add up, denominators add up.
# Nearly everybody writes `exp(lse)` first, which the check refuses at scores of 5000. Others weight with lse itself, or
# subtract the first lse, which overflows where the second is larger, or subtract the largest lse of all rows, which
# loses the rows far below it. Ask the room: in which order may blocks be merged? (In any, and in any grouping. That is
# why the ring may start anywhere.)

# %% [markdown]
# labcode's merge works in place, and with a sigmoid in place of two exponentials. With a and b for the two lse, the
# share of block B is e^b / (e^a + e^b) = 1 / (1 + e^(a - b)), which is the sigmoid of b - a. `lerp_` then moves `out`
# by this share towards `out_b`.

# %%
show_source(attention_block.merge)

# %% [markdown]
# **Takeaway: attention over a block of keys is its output and its lse. With both, blocks can be merged exactly, in any
# order.**

# %% [markdown]
# ## 3. The ring, forward (core, 40 min)
#
# Each of p ranks has its queries, keys and values: a piece of S/p tokens, in the order of the ranks. This layout of the
# sequence is called **contiguous**. In step 0 each rank computes attention over its own keys. Then every rank passes
# its keys and values on to the next rank, and the last rank passes them to the first. In step 1 everybody looks at the
# keys of the rank before it, and so on. After p - 1 messages all parts have been everywhere.

# %% tags=["figure"]
plot.ring_attention(
    4,
    title="After three messages every part of K and V has been on every rank",
    alt="In step 0 each rank has its own keys and values; in each step they move on "
        "by one rank, so that in step 3 the keys of rank 0 are on rank 3",
)

# %% [markdown]
# In the picture a row is a rank. Its queries Q stay, and the keys and values K V move down by one row in each step. The
# arrow that leaves at the bottom and the one that comes in at the top are one message. The words on the right say what
# a causal mask leaves to do: `half` of the scores on a rank's own keys (a causal block), `all` of them on earlier keys,
# and `none` on later ones.
#
# **Predict.** In a ring of 8 ranks, whose keys are on rank 2 in step 5? And under the causal mask, with how many of the
# 8 parts does rank 2 compute, its own included?

# %% tags=["predict"]
keys_of_rank = (2 - 5) % 8
parts_looked_at = 3

# %% tags=["nbval-check-output"]
def keys_here(rank, step, p):
    """The keys move on by one rank in each step; follow them."""
    parts = list(range(p))
    for _ in range(step):
        parts = [parts[-1], *parts[:-1]]
    return parts[rank]

in_step_5 = keys_here(2, 5, 8)
earlier_or_own = [step for step in range(8) if keys_here(2, step, 8) <= 2]
looked_at = len(earlier_or_own)
compare("on rank 2 in step 5", keys_of_rank, in_step_5, within=1, found="simulated")
compare("parts for rank 2", parts_looked_at, looked_at, within=1, found="simulated")

# %% [markdown] tags=["exercise"]
# ### Exercise 11.2 · The ring
#
# Write causal attention on a ring, in the contiguous layout of the picture. q, k and v are this rank's parts, [B, N,
# S/p, D] for N heads of D features. Return out [B, N, S/p, D] and lse [B, N, S/p]. Begin with a function that passes
# one tensor on to the next rank and returns what comes from the rank before. You know the tools from lesson 01,
# section 4:
#
# - `dist.P2POp(dist.isend, x, group=group, group_peer=r)` describes a message to rank r of the group, and `dist.irecv`
#   in its place one from rank r;
# - `dist.batch_isend_irecv([send, receive])` starts both and returns a list of works, each with `wait()`.
#
# `torch.stack((k, v))` makes one tensor of two, so that one message is enough. For a block use `attend` of section 2,
# for merging your own function of exercise 11.1 if it is done, or `attention_block.merge(out, lse, out_b, lse_b)`,
# which changes its first two arguments and returns nothing.
#
# The check compares with one process in float64. It also looks at the messages: somebody has waited for each, a rank
# sends p - 1 parts of K and V, all to one neighbour, and there are never more than two parts in memory that have
# arrived. About 20 lines.

# %% tags=["exercise", "by-hand"]
from labcode.teach.labs.l11_by_hand import attend


def pass_on(x, group):
    """Send x to the next rank of the group; returns what the rank before has sent."""
    ### BEGIN SOLUTION
    rank = dist.get_rank(group)
    p = dist.get_world_size(group)
    arrived = torch.empty_like(x)
    send = dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % p)
    receive = dist.P2POp(dist.irecv, arrived, group=group, group_peer=(rank - 1) % p)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
    return arrived
    ### END SOLUTION

def ring_forward(q, k, v, group):
    """out and lse of this rank's queries over all keys that they may see."""
    ### BEGIN SOLUTION
    rank = dist.get_rank(group)
    p = dist.get_world_size(group)
    out, lse = attend(q, k, v, causal=True)
    kv = torch.stack((k, v))
    for step in range(1, p):
        kv = pass_on(kv, group)
        source = (rank - step) % p
        if source < rank:
            out_b, lse_b = attend(q, kv[0], kv[1], causal=False)
            attention_block.merge(out, lse, out_b, lse_b)
    return out, lse
    ### END SOLUTION

# %% tags=["check"]
check("11.2", ring_forward, ranks)

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Most of the time goes to the exercise. The most common mistakes: leaving the loop, or not
# passing on, when there is nothing to see (the next rank then waits: it hangs); the wrong source (rank + step, which is
# right only if parts move the other way); receiving into the tensor that is sent; `dist.get_rank()` without the group,
# which the check finds in the group of ranks 1, 2 and 3. Ask the room: when could the next part already be under way?
# (From the moment this one is here: receive step + 1 while computing step. That is what labcode does.)

# %% [markdown]
# Here is labcode's version. (Look for `_travel` and `merge`; the rest is about dtypes and other layouts.) `_travel`
# yields one part after the other, and starts to pass a part on **before** it yields it, so that it travels while the
# caller computes. And `plan.blocks` says what to compute with each source's keys; section 5 explains why that is more
# than `half`, `all` and `none`.

# %%
from labcode.parallel import context

show_source(context._travel)
show_source(context._Ring.forward)

# %% [markdown]
# Can a message hide behind the computing? A part of T = S/p tokens with h features takes 4 T h bytes in 16-bit numbers,
# keys and values together. The scores of a full block (`all` in the picture) and their product with the values take 4
# T² h operations. That makes T operations for each byte that is sent, however wide the model is. A GPU that does 400 ·
# 10¹² operations per second, on a link of 50 · 10⁹ bytes per second, therefore needs parts of 8000 tokens to compute
# for as long as it sends. If several query heads share a key head (lesson 09, section 3), fewer bytes travel, and fewer
# tokens are enough. In the layout of section 5 each block is only half of a full one, so the parts must have 16000
# tokens. (Backward sends K, V and the sums of their gradients, and computes 2.5 times as much as forward: five products
# for each block where forward has two.)
#
# **Takeaway: in the ring a rank holds, besides its own, at most two parts of K and V at a time, sends p - 1 of them,
# and gets the result of one process. The messages hide behind computing if the parts are long enough.**

# %% [markdown]
# ## 4. The ring, backward (core, 40 min)
#
# If we left backward to autograd, forward would have to keep every part of K and V that came by: the whole sequence. So
# backward is written by hand as well. It needs the formulas of attention's backward, which are those of FlashAttention
# (Dao et al. 2022), and one observation. In the code below, `delta` is the part of the softmax's derivative that comes
# from its denominator.
#
# <details><summary>Where delta comes from</summary>
#
# The weight of key j is P_j = exp(s_j - lse), and the derivative of lse by s_j is P_j. So a change of s_j changes P_j
# itself by P_j, and through the denominator every P_i by -P_i P_j. With dP_j = dout · v_j, the gradient of the score is
#
# $$ds_j = P_j\, dP_j - P_j \sum_i P_i\, dP_i = P_j\, (dP_j - \delta), \qquad
# \delta = \sum_i P_i\, (\text{dout} \cdot v_i) = \text{dout} \cdot \sum_i P_i v_i
# = \text{dout} \cdot \text{out} .$$
#
# The sum runs over all keys, so `out` must be that over all keys as well. The code then multiplies by 1/sqrt(D), which
# is the derivative of a score by q · k.
# </details>
#
# With the whole lse known, P = exp(s - lse) gives the weights of a block **as they are in the whole softmax**: the
# block is a part of the columns of the whole table. All gradients are sums over this table. So each block gives its own
# **terms** of them, and no block needs to know of another:

# %%
def attend_backward(dout, q, k, v, out, lse, causal):
    """Terms of dq, dk and dv from one block; out and lse are those over ALL keys."""
    scale = 1 / math.sqrt(q.shape[-1])
    scores = q @ k.mT * scale
    if causal:
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    weights = (scores - lse[..., None]).exp()  # P
    delta = (dout * out).sum(-1, keepdim=True)
    dscores = weights * (dout @ v.mT - delta) * scale
    return dscores @ k, dscores.mT @ q, weights.mT @ dout

# %% [markdown]
# Let us see that on one process: cut the keys into two blocks, and add up the terms.

# %% tags=["nbval-check-output"]
from labcode.teach.labs.l11_by_hand import attend

draw = torch.Generator().manual_seed(0)
q, k, v, dout = torch.randn(4, 6, 8, generator=draw, dtype=torch.float64)
q, k, v = (x.requires_grad_() for x in (q, k, v))
out, lse = attend(q, k, v, causal=False)
out.backward(dout)

first, second = slice(0, 4), slice(4, 6)
fixed = [x.detach() for x in (out, lse)]
with torch.no_grad():
    of_first = attend_backward(dout, q, k[first], v[first], *fixed, causal=False)
    of_second = attend_backward(dout, q, k[second], v[second], *fixed, causal=False)
dq = of_first[0] + of_second[0]
dk = torch.cat((of_first[1], of_second[1]))
dv = torch.cat((of_first[2], of_second[2]))
print("dq is the sum of the two terms:", torch.allclose(dq, q.grad))
print("dk is that of one block after the other:", torch.allclose(dk, k.grad))
print("and so is dv:", torch.allclose(dv, v.grad))

# %% [markdown]
# On the ring, the terms arise in different places. The queries of a rank stay at home, so all terms of its dq arise
# there. But the keys of rank s meet the queries of **all** later ranks, on those ranks. So the sums of dK and dV travel
# with their keys. Each rank adds its own term, and in the end the sums come home.

# %% tags=["figure"]
plot.ring_gradients(
    4,
    title="After the last step, one more message brings every sum home",
    alt="The sum of the gradients of each rank's keys moves on with the keys and "
        "collects a term on every rank that sees them; after a last message it is "
        "at home",
)

# %% [markdown]
# In the picture, d0 is the sum of dK and dV for the keys of rank 0. The filled places say whose terms are in it after
# the work of the step. In step 3, the sum d0 is on rank 3 and has everything. One more message brings it home.

# %% [markdown] tags=["exercise"]
# ### Exercise 11.3 · The gradients come home
#
# Write the backward of the ring. All arguments are this rank's parts; `out` and `lse` are those over all keys. Use
# `attend_backward` of the cells above for a block, and `pass_on(x, group)` for messages. It is the function of exercise
# 11.2 and is imported here, so that you may begin with this section.
#
# The check accepts every way to send them that needs no more than p - 1 messages for K and V and p for their gradients.
# About 15 lines, and no skeleton this time.

# %% tags=["exercise"]
from labcode.teach.labs.l11_by_hand import pass_on


def ring_backward(dout, q, k, v, out, lse, group):
    """dq, dk, dv of this rank's tokens, with the terms of all ranks in them."""
    ### BEGIN SOLUTION
    rank = dist.get_rank(group)
    p = dist.get_world_size(group)
    kv = torch.stack((k, v))
    dkv = torch.zeros_like(kv)  # the sums for the keys that are here
    dq = torch.zeros_like(q)
    for step in range(p):
        source = (rank - step) % p
        if source <= rank:
            own = source == rank
            terms = attend_backward(dout, q, kv[0], kv[1], out, lse, causal=own)
            dq += terms[0]
            dkv[0] += terms[1]
            dkv[1] += terms[2]
        if step < p - 1:
            kv = pass_on(kv, group)
        dkv = pass_on(dkv, group)  # after the last step this is the way home
    return dq, dkv[0], dkv[1]
    ### END SOLUTION

# %% tags=["check"]
check("11.3", ring_backward, ranks)

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Most of the time goes to the exercise. The hop that is forgotten is the last one: dq is right,
# dK and dV are complete but those of the neighbour, and the check says so. Some compute out and lse anew for each block
# and use those: then P is the block's own softmax. Ask the room why the sums are kept in float32 where K and V are in
# 16 bits. (They collect p terms one after the other; that makes their messages twice as long.)

# %% [markdown]
# labcode saves one message. A rank's own term needs no journey: it stays at home, and the sum that travels is begun by
# the **next** rank. It then follows its keys one step behind, for p - 1 hops in place of the p hops of the picture. The
# docstring of its backward says where everything is in each step.

# %%
import inspect

from labcode.parallel import context

print(inspect.getdoc(context._Ring.backward))

# %% [markdown]
# Let *kv* be the bytes of one rank's K and V together. In forward each part makes p - 1 hops. In backward it goes round
# once more, and in labcode's version the sums of its gradients make p - 1 hops as well. Here, where everything is in
# float64, they are as large as K and V. In 16-bit training they are twice as large, because labcode keeps sums in 32
# bits.
#
# **Predict.** Take B = 1 sample, N = 4 heads, S = 1024 tokens on p = 4 ranks, D = 32 features in a head, and 8 bytes
# for a number. How many bytes does a rank send in forward and backward together?

# %% tags=["predict"]
ring_bytes = (3 + 3 + 3) * (2 * 1 * 4 * (1024 // 4) * 32 * 8)

# %% [markdown]
# The next cell sets attention on the ring beside that of one process. `core` is the attention of one process, and says
# whether there is a causal mask. `layout` says which tokens a rank holds; so far we know one, contiguous. `take_own`
# cuts this rank's tokens out of a whole tensor. `saved_bytes` counts what autograd keeps (lesson 10, section 2), and
# `counted` writes down each message and collective that this process starts.

# %% tags=["by-hand"]
from labcode.comm.counting import counted
from labcode.parallel.context import take_own
from labcode.perf import alpha_beta
from labcode.perf.saved_bytes import saved_bytes


def wire_bytes(calls):
    """Bytes that a rank sends; a collective counts as on a ring."""
    sent = 0
    for call in calls:
        if call.kind != "recv":
            sent += alpha_beta.bytes_sent(call.kind, call.group_size, call.num_bytes)
    return sent

def beside_one_process(rank, attention, layout, query_heads=4):
    """(largest difference of output and gradients, bytes sent, bytes kept)"""
    group = dist.group.WORLD
    core = layers.CoreAttention(causal=True)
    draw = torch.Generator().manual_seed(0)
    wholes = []
    parts = []
    for heads in (query_heads, 4, 4):  # of q, k and v
        whole = torch.randn(1, heads, 1024, 32, dtype=torch.float64, generator=draw)
        own = take_own(whole, group, 2, layout)  # [B, heads, S/p, D]
        parts.append(own.requires_grad_())
        wholes.append(whole.requires_grad_())
    expected = core(*wholes)
    expected.square().sum().backward()

    with saved_bytes(core) as saved, counted() as calls:
        out = attention(core, group, layout, *parts)
        kept_bytes = saved.total()
        out.square().sum().backward()
    differences = [out - take_own(expected, group, 2, layout)]
    for part, whole in zip(parts, wholes):
        differences.append(part.grad - take_own(whole.grad, group, 2, layout))
    off = max(one.abs().max().item() for one in differences)
    return off, wire_bytes(calls), kept_bytes

# %% tags=["nbval-check-output"]
def with_ring(core, group, layout, q, k, v):
    ring = RingAttention(core, group, layout)
    ring.length = 1024  # S; without it the ranks would ask each other
    return ring(q, k, v)

kv_bytes = 2 * torch.empty(1, 4, 1024 // 4, 32, dtype=torch.float64).nbytes
of_rank_3 = ranks.run(beside_one_process, with_ring, "contiguous")[3]
off, sent_bytes, kept_bytes = of_rank_3
print(f"output and gradients of one process to 1e-12: {off < 1e-12}")
print(f"kept for backward on rank 3: {kept_bytes / kv_bytes:.2f} kv")
how = {"unit": "B", "within": 1.01, "found": "counted"}
compare("the ring sends", ring_bytes, sent_bytes, **how)

# %% [markdown]
# What is kept belongs to the rank's own tokens: q, k, v and the output make 2 kv, and the lse a little more.
#
# **Takeaway: backward sends K and V round once more, and the sums of their gradients with them. Each rank adds its
# term, and a sum is complete when it comes home.**

# %% [markdown]
# ## 5. Who does the work under a causal mask (core, 30 min)
#
# Token 1000 looks at a thousand keys, token 1 at one. So in the contiguous layout the ranks have different work. The
# picture shows the mask for four ranks, in 8 × 8 tiles: rows are queries, columns are keys, and the labels on the right
# and below name the rank that holds them. The colour says which rank computes a tile, and the number in it is the step
# of the ring in which its keys are there.

# %% tags=["figure"]
plot.causal(
    4, ("contiguous",),
    title="Later ranks have more tiles",
    alt="The causal mask in the contiguous layout: rank 3 has a broad band of tiles, "
        "rank 0 a small corner",
)

# %% [markdown]
# Count a full tile as 1 and a half one as 1/2. Rank 1 has 1 + 1 + 1 + 1 tiles on the keys of rank 0, and 1 + 2 · 1/2 on
# its own: 6 in all.
#
# **Predict.** How many times as much work does rank 3 have as rank 0? And how many times as much as it would have with
# perfect sharing, where each rank has a quarter of all tiles?

# %% tags=["predict"]
last_to_first = 14 / 2
last_to_fair = 14 / ((2 + 6 + 10 + 14) / 4)

# %% tags=["nbval-check-output"]
from labcode.teach.figures import attention as masks


def tiles_of_ranks(layout):
    """How many tiles each rank computes; one on the diagonal is half a tile."""
    work = [0.0] * 4
    for (query, key), (owner, _) in masks.tiles(4, layout).items():
        work[owner] += 0.5 if query == key else 1.0
    return work

tiles = tiles_of_ranks("contiguous")
fair = sum(tiles) / 4
last, first = tiles[3], tiles[0]
compare("rank 3 / rank 0", last_to_first, last / first, within=1.03, found="counted")
compare("rank 3 / fair share", last_to_fair, last / fair, within=1.03, found="counted")

# %% [markdown]
# The others cannot run ahead: a rank gets its next part only when the rank before it has sent it, so in each step
# everybody waits for the slowest. In every step but the first some rank has a full block. So the whole ring takes as
# long as rank 3, 1.75 times what it need take, and rank 0 does nothing in most of the steps.
#
# The cure is to deal out the tokens in another way. Cut the sequence into 2p chunks in place of p pieces, and give each
# rank **two** of them. Attention does not mind which tokens a rank holds, as long as it knows their positions.

# %% [markdown] tags=["exercise"]
# ### Exercise 11.4 · Deal the chunks
#
# Write two functions.
#
# `my_chunks(rank, p)` returns the two of the chunks 0 to 2p - 1 that a rank holds, such that all ranks have the same
# work. Chunk c sees all chunks before it and half of itself, which is c + 1/2 chunks of keys.
#
# `my_block(rank, source, tokens)` says what a rank has to compute while the keys of `source` are there. Rank and source
# hold `tokens` tokens each: two chunks of the same size, the earlier one first. Return a slice of the rank's queries, a
# slice of the source's keys, and whether the block is causal. In a block that is not causal, each of these queries sees
# each of these keys. For example, with the whole of both and nothing hidden it is `(slice(0, tokens), slice(0, tokens),
# False)`, and the early chunk of the queries alone is `slice(0, tokens // 2)`. It may help to draw the tiles of two
# ranks.
#
# The check builds the mask for p = 2, 3 and 4. Every visible score must be computed once and no hidden one, and in
# each step all ranks must have the same number of scores.

# %% tags=["exercise"]
def my_chunks(rank, p):
    """The two chunks, of 2p, that this rank holds."""
    ### BEGIN SOLUTION
    return rank, 2 * p - 1 - rank
    ### END SOLUTION

def my_block(rank, source, tokens):
    """(slice of queries, slice of keys, causal)"""
    ### BEGIN SOLUTION
    half = tokens // 2
    everything = slice(0, tokens)
    if source == rank:
        return everything, everything, True
    if source < rank:
        return everything, slice(0, half), False
    return slice(half, tokens), everything, False
    ### END SOLUTION

# %% tags=["check"]
check("11.4", my_chunks, my_block)

# %% [markdown]
# With an early and a late chunk on each rank, the ring is balanced. This layout is called **zig-zag** (`"zigzag"` in
# code). Look for rank 0 on both sides, and count the tiles of one step.

# %% tags=["figure"]
plot.causal(
    4,
    title="With zig-zag all ranks have the same number of tiles in each step",
    alt="On the left rank 3 has a broad band and rank 0 a corner; "
        "on the right, zig-zag, each rank has a short and a long row of tiles",
)

# %% tags=["nbval-check-output"]
print("tiles, contiguous:", tiles_of_ranks("contiguous"))
print("tiles, zig-zag:   ", tiles_of_ranks("zigzag"))

# %% [markdown]
# labcode writes `my_block` for any layout and for parts of uneven size. Of the queries it takes the chunks that see any
# of the source's keys, and of the keys the chunks that any of the rank's queries see.

# %%
show_source(attention_block.visible_block)

# %% [markdown]
# Does the clock agree with the tiles? Four ranks share two cores here, so we ask each process how long it has computed,
# not how long it took. We time the whole ring in both layouts, and one block of the same size, causal and not.

# %%
import time


def median_ms(work, *inputs):
    """Milliseconds that this rank computes; the median of seven calls."""
    times_ms = []
    for _ in range(7):
        dist.barrier()
        start_s = time.thread_time()
        work(*inputs)
        times_ms.append(1e3 * (time.thread_time() - start_s))
    return sorted(times_ms)[3]

def compute_ms(rank, layout):
    """One forward of the ring."""
    core = layers.CoreAttention(causal=True)
    ring = RingAttention(core, dist.group.WORLD, layout)
    ring.length = 4096
    q, k, v = torch.randn(3, 1, 4, 4096 // 4, 32)
    return median_ms(ring, q, k, v)

def block_ms(rank, causal):
    """One block in the kernel that the ring uses here."""
    q, k, v = torch.randn(3, 1, 4, 4096 // 4, 32)
    kernel = attention_block.fastest_kernel(q, k)
    return median_ms(kernel.forward, q, k, v, causal)

contiguous_ms = ranks.run(compute_ms, "contiguous")
zigzag_ms = ranks.run(compute_ms, "zigzag")
of_fair = contiguous_ms[3] / (sum(zigzag_ms) / 4)
of_first = contiguous_ms[3] / contiguous_ms[0]
print(f"rank 3 / fair share: {of_fair:.2f}, and 1.75 by the tiles")
print(f"rank 3 / rank 0: {of_first:.1f}, and 7 by the tiles")
of_full = ranks.run(block_ms, True)[0] / ranks.run(block_ms, False)[0]
print(f"a causal block takes {of_full:.2f} of the time of a full one")

# %% tags=["figure"]
by_rank = {}
for rank in range(4):
    by_rank[f"rank {rank}"] = {
        "contiguous": contiguous_ms[rank], "zig-zag": zigzag_ms[rank]
    }
plot.bars(
    by_rank, ylabel="ms computing, 4096 tokens", fmt="{:.0f}",
    title="Zig-zag gives all ranks the same time",
    alt="Contiguous, the time grows from rank 0 to rank 3; "
        "with zig-zag all four ranks compute for about the same time",
)

# %% [markdown]
# Zig-zag is even, and contiguous is not, but rank 0 takes far longer than a seventh of rank 3. One reason is the last
# line above the figure: rank 0 computes only the causal block of its own keys, and for this kernel half of the scores
# are about three quarters of the time. The other is passing on K and V, which costs every rank the same.
#
# Positions travel with their tokens: labcode's `take_own` cuts inputs, targets and positions in the same way. A vision
# transformer has no causal mask, so the contiguous layout shares its work evenly.
#
# **Takeaway: equal tokens are not equal work. Under a causal mask, give each rank an early and a late chunk.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* `my_chunks` is quick; `my_block` is the point. Draw the rows of rank 1 and the columns of rank 2
# for p = 4: of its queries only the late chunk (6) sees rank 2's keys (2 and 5), and it sees both. There is a second
# right answer, from the middle outwards: rank r holds p - 1 - r and p + r, and the two cases swap. Ask the room what
# striped attention does (rank r holds the tokens r, r + p, r + 2p and so on): it is balanced as well, but every block
# has a mask.

# %% [markdown]
# ## 6. The other ways (core, 25 min)
#
# **Gather.** Each rank all-gathers K and V, and backward reduce-scatters their gradients: p - 1 parts each way. There
# are few messages, but each rank keeps K and V of the whole sequence. Llama 3 was trained in this way: the largest one
# has 8 key/value heads for 128 query heads, so K and V are small (Llama Team 2024, section 3.3.2).
#
# **All-to-all** (DeepSpeed Ulysses). Attention treats each **head** by itself. So before attention the ranks swap: each
# gives away its tokens of the heads that are not its own, and gets all tokens of its own heads. Then it computes
# ordinary attention over the whole sequence, for N/p heads. Afterwards the output is swapped back. In the picture, the
# colour and the number of a square name the rank that holds these tokens of this head.

# %% tags=["figure"]
plot.ulysses(
    4,
    title="One all-to-all turns own tokens into own heads, another one back",
    alt="Before attention each rank holds a row, its tokens of all heads; an "
        "all-to-all turns it into a column, all tokens of its head, and a second one "
        "turns it back",
)

# %% [markdown]
# In plain PyTorch a swap is one call of `dist.all_to_all_single`, which cuts the first dim of a tensor into p pieces,
# sends piece r to rank r, and puts what arrives in the order of the ranks. So the pieces have to stand in front, and
# afterwards the ranks' tokens have to stand side by side.

# %% tags=["nbval-check-output"]
from labcode.comm.collectives import all_to_all


def to_own_heads(x, group):
    """My tokens of all heads [B, N, S/p, D] -> all tokens of my heads [B, N/p, S, D]"""
    p = dist.get_world_size(group)
    for_ranks = x.unflatten(1, (p, -1)).permute(1, 0, 2, 3, 4).contiguous()
    from_ranks = torch.empty_like(for_ranks)  # [p, B, N/p, S/p, D]
    dist.all_to_all_single(from_ranks, for_ranks, group=group)
    return from_ranks.permute(1, 2, 0, 3, 4).flatten(2, 3)

def same_swap(rank):
    """Whether labcode's all-to-all from dim 1 (heads) to dim 2 (tokens) is the same."""
    x = torch.randn(2, 8, 6, 3)
    theirs = all_to_all(x, dist.group.WORLD, 1, 2)
    return torch.equal(to_own_heads(x, dist.group.WORLD), theirs)

print("labcode's all_to_all swaps in the same way:", ranks.run(same_swap))

# %% [markdown]
# `dist.all_to_all_single` has no backward, and labcode's `all_to_all` has one: the swap the other way. With it, the
# all-to-all and the gather are these few lines.

# %%
from labcode.parallel.context import GatherAttention
from labcode.teach.labs.l11_by_hand import beside_one_process


def with_ulysses(core, group, layout, q, k, v):
    """q, k, v [B, heads, S/p, D] -> [B, N, S/p, D]"""
    own_heads = [all_to_all(x, group, 1, 2) for x in (q, k, v)]  # [B, heads/p, S, D]
    out = core(*own_heads)
    return all_to_all(out, group, 2, 1)

def with_gather(core, group, layout, q, k, v):
    gather = GatherAttention(core, group, layout)
    gather.length = 1024
    return gather(q, k, v)

# %% [markdown]
# (The all-to-all runs in the contiguous layout, since it has all tokens of a head in their order.) How much is sent?
# Forward swaps q, k, v and the output, and backward swaps their gradients. In an all-to-all a rank
# keeps 1/p of its tensor and sends the rest. Let g be the number of query heads for each key/value head: 1 in a plain
# model, more with grouped queries (lesson 09, section 3), and 16 in the largest Llama 3. K and V have kv/2 bytes each,
# and q and the output have g times as much each.
#
# **Predict**, for p = 4 and in units of kv: what does a rank send in forward and backward with the gather, and with the
# all-to-all, if every head has its own K and V (g = 1)? And which of the two sends less for g = 4: `"gather"` or
# `"all-to-all"`?

# %% tags=["predict"]
gather_kv = 3 + 3
ulysses_kv = 2 * (3 / 4) * (1 / 2 + 1 / 2 + 1 / 2 + 1 / 2)
less_for_g_4 = "gather"  # 2 * (3 / 4) * (4 / 2 + 1 / 2 + 1 / 2 + 4 / 2) = 7.5, above 6

# %% tags=["nbval-check-output"]
kv_bytes = 2 * torch.empty(1, 4, 1024 // 4, 32, dtype=torch.float64).nbytes
ways = {"gather": (with_gather, "zigzag"), "all-to-all": (with_ulysses, "contiguous")}
sent_kv = {}
for g in (1, 4):
    for name, (way, layout) in ways.items():
        off, sent, kept = ranks.run(beside_one_process, way, layout, 4 * g)[3]
        sent_kv[g, name] = sent / kv_bytes
        print(f"g = {g}, {name:10} sends {sent / kv_bytes:.2f} kv", end=", ")
        print(f"rank 3 keeps {kept / kv_bytes:.2f}; right to 1e-12: {off < 1e-12}")

is_less = sent_kv[4, "gather"] < sent_kv[4, "all-to-all"]
less = "gather" if is_less else "all-to-all"
found = sent_kv[1, "gather"]
compare("gather, g = 1", gather_kv, found, within=1, unit="kv", found="counted")
found = sent_kv[1, "all-to-all"]
compare("all-to-all, g = 1", ulysses_kv, found, within=1, unit="kv", found="counted")
options = ("gather", "all-to-all")
compare("less for g = 4", less_for_g_4, less, found="counted", options=options)

# %% [markdown]
# What the gather keeps is K and V of the whole sequence (4 kv here), its own q and output, and something that the
# formula of section 1 does not count: a **mask**. Its queries meet keys of all positions at once, and PyTorch keeps the
# mask in the dtype of q, about S²/(2 p) numbers. Here these are another 2.25 kv on rank 3, and they grow with S².
#
# | | ring | gather | all-to-all |
# |---|---|---|---|
# | sends, in kv | 3 (p - 1) | 2 (p - 1) | 2 (g + 1)(p - 1)/p |
# | the same for p = 4: g = 1, 4, 16 | 9, 9, 9 | 6, 6, 6 | 3, 7.5, 25.5 |
# | keeps, in kv | g + 1 | p + g, and the mask | g + 1 |
# | can hide behind computing | yes, block by block | hardly | hardly |
# | number of ranks | any | any | what divides the number of key/value heads |
# | causal mask | needs zig-zag | needs zig-zag | is balanced by itself |
#
# (In 16-bit training the ring sends 4 (p - 1), see section 4.) Zig-zag cuts the sequence into 2p chunks. Where its
# length is not a multiple of 2p, labcode makes some chunks one token longer than others.
#
# kv belongs to S/p tokens. So with more ranks the bytes of the all-to-all shrink, and those of the other two stay about
# the same. The all-to-all sends less than the gather from p = g + 2 on. Its limit is the number of heads: p may be at
# most 8 for Llama 3, where g + 2 is 18. Tensor parallelism cuts the heads as well, so tp · cp cannot be larger than
# their number. All-to-all and ring are combined in practice: all-to-all inside a node, and a ring between nodes.
#
# labcode's ring never holds a whole row of attention weights. To drop some of them, its blocks would have to draw the
# same random numbers again in backward, which it does not do. It says so:

# %% tags=["raises-exception"] raises="RankError: rank 0: ValueError: ring attention keeps no attention weights to drop"
def ring_with_dropout(rank):
    core = layers.CoreAttention(causal=True, dropout=0.1)
    return RingAttention(core, dist.group.WORLD, "zigzag")

ranks.run(ring_with_dropout)

# %% [markdown]
# **Takeaway: ring, gather and all-to-all give the same numbers. The ring takes any number of ranks, and hides its
# messages where the parts are long enough. The all-to-all sends least where every head has its own K and V, and needs
# heads. The gather is simple, keeps all keys, and sends least where many query heads share a key head.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* People forget that the all-to-all sends four tensors forward and four backward, or count whole
# tensors in place of (p - 1)/p of them. Ask the room how the gather could do without the mask. (With a kernel that
# takes positions, or block by block with the merge, as the ring does.)

# %% [markdown]
# ## 7. A whole GPT, and how to choose (core, 10 min)
#
# `parallelize` puts all of it into a model. Here are five steps of training in float64 on four ranks, beside one
# process. In the last line the sums over cp are forgotten: each rank updates with the terms of its own tokens alone,
# so the copies of the weights drift apart, while the ring goes on to mix keys and values from all of them.

# %% tags=["nbval-check-output"]
from labcode.comm.grid import Grid
from labcode.config import ParallelConfig
from labcode.models.parallelize import parallelize
from labcode.teach.labs import l10_small_gpt as small
from labcode.topology import GridShape


def losses_without_sum(rank, count):
    """As `small.losses_on_grid` with cp = 4, but gradients stay on their rank."""
    model = parallelize(
        small.build(torch.float64), Grid.create(GridShape(cp=4)), ParallelConfig()
    )
    with model.no_sync():  # the sum over cp travels with the average over dp
        return list(small.steps(model, model.loss, count))

expected = torch.tensor(small.losses_of_one_process(5))

def report(name, losses):
    off = (torch.tensor(losses) - expected).abs().max().item()
    note = "" if off < 1e-12 else f", off by {off:.3f} of {expected[-1]:.3f}"
    print(f"{name:22} the losses of one process to 1e-12: {off < 1e-12}{note}")

four = GridShape(cp=4)
mixed = GridShape(cp=2, tp=2)
gathering = ParallelConfig(context_attention="all_gather")
along = ParallelConfig(sequence_parallel=True)
report("cp 4, ring", ranks.run(small.losses_on_grid, four, ParallelConfig(), 5)[0])
report("cp 4, gather", ranks.run(small.losses_on_grid, four, gathering, 5)[0])
report("cp 2, tp 2 + sequence", ranks.run(small.losses_on_grid, mixed, along, 5)[0])
report("cp 4, sum forgotten", ranks.run(losses_without_sum, 5)[0])

# %% [markdown]
# | | tp + sequence parallel | cp, ring |
# |---|---|---|
# | cuts weights and optimizer | yes | not by itself; sharded data parallelism (lesson 13) can cut them over dp × cp |
# | cuts activations | yes | yes |
# | a rank sends per layer, forward and backward | 10 (t - 1)/t · [B, S, H] in 16 bits | 2 (p - 1) kv in 16 bits, and (p - 1) kv in 32 (the sums) |
# | can hide | only partly | most of it, behind long blocks |
# | limit | heads, and the size of a node | parts that are too short to hide a message |
#
# So use as much tp with sequence parallelism as the model needs, up to the size of a node, then cp where one sequence
# is still too long, and dp with what is left.

# **Takeaway: tp first, because it cuts weights and activations; cp where the activations of one sequence are still too
# large.**

# %% [markdown]
# ## 8. Open end: 131072 tokens (optional, 15 min)

# %% [markdown] tags=["exercise"]
# ### Exercise 11.5 · Choose a grid
#
# The GPT of section 1, with 8 sequences of 131072 tokens in a step, on 64 GPUs in nodes of 8. Choose a
# `GridShape(dp=.., cp=.., tp=.., order=..)` with pp = 1. Sequence parallelism is on. The 8 sequences are dealt out over
# dp, and a rank of dp takes its own one after the other, so that the activations are those of one. Three things are
# asked:
#
# 1. Weights (16 bytes for each parameter, with gradients and optimizer) and activations take at most 60 GB of a GPU.
# 2. tp and cp together take at most 20 % of the computing time, if nothing hides.
# 3. dp divides the 8 sequences.
#
# Links are those of lesson 08, section 4: 450 GB/s inside a node, 50 GB/s between nodes, and the order of the axes
# decides which groups lie inside one. `l11.costs(shape)` says what a grid costs, so try several. It computes, with S =
# 131072, H = 4096 and 32 layers:
#
# - weights: 16 bytes · 7.2 · 10⁹/tp; activations as in section 1;
# - a tensor between two layers: A = 2 bytes · S · H/cp;
# - sent for tp, by one GPU for one sequence: 32 · 10 (tp - 1)/tp · A;
# - sent for cp: 32 · (cp - 1) · 4 · 2 A/tp, where 2 A/tp is kv, once in forward, once in backward, and twice for the
#   sums in 32 bits;
# - computing: all operations of the step, at 40 % of an H100's peak.
#
# Afterwards ask yourself what this model of the costs leaves out.

# %%
from labcode.teach.exercises import l11
from labcode.topology import GridShape

tried = GridShape(dp=8, cp=1, tp=8)
for name, value in l11.costs(tried).items():
    print(f"{name:15} {value:6.1f}")

# %% tags=["exercise"]
### BEGIN SOLUTION
my_grid = GridShape(dp=4, cp=2, tp=8)  # tp fills a node, cp halves the activations
### END SOLUTION

# %% tags=["check"]
check("11.5", my_grid)

# %% [markdown]
# <details><summary>What the model leaves out</summary>
#
# The ring hides behind computing, the collectives of tp hide less. A causal mask halves the work of attention.
# Activation checkpointing (lesson 16) trades activations for time, sharded data parallelism (lesson 13) cuts the 16
# bytes, over cp as well, and fewer key/value heads make the ring cheaper. And the gradients of the weights are summed
# over dp and cp once in a step.
# </details>

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Only dp = 4, cp = 2, tp = 8 passes, with tp faster than cp and dp. Let the room first say which
# axis has to cut the weights (tp: 16 bytes · 7.2 · 10⁹/8 = 14 GB) and which one is left for the activations.

# %% [markdown]
# ## 9. From here to GPUs and SLURM (core, 5 min)
#
# | where | start |
# |---|---|
# | 4 GPUs of one machine | `torchrun --nproc-per-node=4 -m labcode.train gpt_tiny --parallel.cp 4 --model.context_length 1024` |
# | the gather | add `--parallel.context_attention all_gather` |
# | SLURM, inside a job of two nodes | `srun --nodes=2 --ntasks-per-node=8 python -m labcode.train gpt_10m --parallel.cp 2 --parallel.tp 2` |
#
# Under `srun`, export `MASTER_ADDR` (the first node) and `MASTER_PORT` first, or the ranks do not know where to meet.
# Lesson 04, section 7, explains these variables, and lesson 14, section 2, writes such a script.
#
# On GPUs the same class takes PyTorch's fused kernels for its blocks, after it has compared them with the plain one on
# a small example. PyTorch has context parallelism too, `context_parallel` in `torch.distributed.tensor.experimental`.
# It gathers K and V, unless you ask with `set_rotate_method("alltoall")` for a ring, each step of which is an
# all-to-all (torch 2.13). It is a prototype, and does not run on a CPU, so it is not beside ours here.
#
# ## Questions (core, 10 min)
#
# **1.** In the ring of exercise 11.2, rank 0 has nothing to see in the steps 1 to 3. Why may it not stop after step 0?
#
# <details><summary>Answer</summary>
#
# Rank 1 waits for a message from rank 0 in every step, so it would hang. Under a causal mask in the contiguous layout
# it does not need the contents: a part that rank 0 passes on after step 0 comes from a later rank, and the ranks that
# it still visits come before that rank. So **all** ranks could agree to stop sending such parts, but one rank alone may
# not. With zig-zag every part is needed everywhere.
# </details>
#
# **2.** You double the number of ranks of a ring and keep S. How do the bytes that a rank sends change, and how does
# its work?
#
# <details><summary>Answer</summary>
#
# A part is half as large, and there are 2p - 1 hops in place of p - 1. So the bytes stay about the same, 3 (p - 1)/p
# times the K and V of the whole sequence. The work of a rank halves. Messages become harder to hide, since the
# operations for each byte are in proportion to S/p.
# </details>
#
# **3.** A model has 32 query heads and 8 key/value heads, and trains with tp = 4. How large can cp be with all-to-all,
# and how large with a ring?
#
# <details><summary>Answer</summary>
#
# Each rank of tp has 2 key/value heads, so the all-to-all can share them over 2 ranks, unless heads are copied. A ring
# takes any number of ranks.
# </details>
#
# **4.** From lesson 10: with cp = 4, for which weights does a rank have only a part of the gradient? And with tp = 4
# and sequence parallelism?
#
# <details><summary>Answer</summary>
#
# With cp all weights are shared by ranks that see different tokens, so all gradients are summed. With sequence
# parallelism it is only what stands outside the products: norms, positions, and biases after a reduce-scatter.
# </details>
#
# ## Recap
#
# | concept | formula or fact | in labcode |
# |---|---|---|
# | merge of two blocks | weights e^(lse of the block)/e^(lse of both) | `parallel.attention_block.merge` |
# | ring, forward | p - 1 messages of K and V; source = (rank - step) mod p | `parallel.context.RingAttention` |
# | ring, backward | K and V go round once more, and dK, dV after them: 3 (p - 1) kv in all | `parallel.context.RingAttention` |
# | zig-zag | chunks r and 2p - 1 - r | `parallel.context.take_own` |
# | gather | 2 (p - 1) kv, keeps all keys | `parallel.context.GatherAttention` |
# | all-to-all | 2 (g + 1)(p - 1)/p kv with g query heads for each key/value head; needs heads | `comm.collectives.all_to_all` |
#
# ## Sources
#
# - Liu et al. 2023, *Ring Attention with Blockwise Transformers*, arXiv:2310.01889.
# - Milakov and Gimelshein 2018, *Online normalizer calculation for softmax*, arXiv:1805.02867; Dao et al. 2022,
#   *FlashAttention*, arXiv:2205.14135; Dao 2023, arXiv:2307.08691: backward from the lse alone.
# - Brandon et al. 2023, *Striped Attention*, arXiv:2311.09431: balance under a causal mask. Zig-zag:
#   <https://github.com/zhuzilin/ring-flash-attention>.
# - Jacobs et al. 2023, *DeepSpeed Ulysses*, arXiv:2309.14509: the all-to-all.
# - Llama Team 2024, *The Llama 3 Herd of Models*, arXiv:2407.21783: the gather.
# - Fang and Zhao 2024, *USP*, arXiv:2405.07719: all-to-all and ring together.

# %%
ranks.close()
