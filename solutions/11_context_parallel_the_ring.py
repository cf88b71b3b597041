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
# Some sequences are too long for one GPU, even one at a time: whole books, videos, a month of weather. Then the
# sequence itself is cut, and each rank holds a part of the tokens from the first layer to the loss. Attention is the
# only layer that looks at other tokens, and in this lesson you write an attention that does so without ever having the
# whole sequence in one place: the **ring**.
#
# ## Goals
#
# - merge attention over two blocks of keys, exactly;
# - write ring attention with sends and receives, forward and backward, count its bytes, and say when they hide;
# - share out a sequence so that every rank has the same work, under a causal mask and with packed documents;
# - choose between ring, gather and all-to-all, and between context and tensor parallelism.
#
# **Time**: 162 minutes, and 25 more for what is optional. Sections 1 to 3 are the ring forward, 4 and 5 its backward
# and its balance, and the rest compares it with the other ways and with tensor parallelism. Good places for a break are
# after section 3 and after section 5.
#
# **Needs**: lessons 01 (section 4), 09 (section 3), 10 (section 2).

# %%
import math

import torch
import torch.distributed as dist

from course.lab import Ranks, check, compare, plot, show_source
from labcode.models import layers
from labcode.parallel import attention_block
from labcode.parallel.context import RingAttention

ranks = Ranks(4, timeout_s=10)

# %% [markdown]
# ## 1. When one sequence is too long (core, 5 min)
#
# Take a GPT of 7 billion parameters and one sequence of 131072 tokens, in 16-bit numbers. The formulas of lesson 10
# (sections 2 and 4) say what is kept for backward: by a single GPU, and by each GPU of a node of 8 with tensor
# parallelism and sequence parallelism. Weights, gradients and optimizer take 16 bytes for each parameter (lesson 04,
# section 6), which tensor parallelism divides by 8.

# %% tags=["nbval-check-output"]
from course.exercises import l11
from labcode.perf import memory
from labcode.runtime.units import si
from labcode.topology import GridShape


def activation_bytes(shape):
    """What a rank keeps of one sequence, all layers and the loss."""
    terms = memory.model_activations(l11.LONG, shape, batch=1, sequence_parallel=True)
    return sum(terms.values())

long = l11.LONG
print(f"{long.num_layers} layers, hidden size {long.hidden_size}", end=", ")
print(f"{long.num_heads} heads, {long.num_parameters / 1e9:.1f} billion parameters")
print("activations of one GPU: ", si(activation_bytes(GridShape()), "B"))
print("tp = 8: of each GPU:    ", si(activation_bytes(GridShape(tp=8)), "B"))
print("and weights, gradients and optimizer:", si(16 * long.num_parameters / 8, "B"))

# %% [markdown]
# An H100 has 80 GB, so this does not fit. More tensor parallelism would leave the node, and the links between nodes have
# a seventh of the rate (lesson 08, section 4). And it sends in every layer.
#
# **Context parallelism** (cp) is another axis of the grid. Each of p ranks holds S/p of the tokens, everywhere: in the
# embedding, in every norm, in every matmul, in the loss. Nothing is gathered for a product with a weight, because it
# treats each token by itself. The weights are replicated over cp, since every rank draws them from the same seed. Their
# gradients are summed over cp, as over data parallel ranks; one all-reduce over both axes does that.
#
# cp divides the activations and nothing else: with cp = 2 they are half as large, and the 14.4 GB of weights, gradients
# and optimizer stay, however large cp is. (Section 8 shards those in another way.)
#
# In attention each query looks at the keys and values of its own token and of all before it. There are three ways to
# bring them together:
#
# - **gather**: every rank collects the keys and values of the whole sequence;
# - **ring**: keys and values travel from rank to rank, and each rank looks at the part that is there;
# - **all-to-all**: the ranks swap, so that each has all tokens of a part of the heads.
#
# The gather is simple, but its keys and values are not divided by p. The ring is the subject of this lesson, and section
# 6 compares it with the other two.
#
# **Takeaway: context parallelism divides the activations by p. Attention alone has to communicate, and the gradients of
# the weights are summed at the end.**

# %% [markdown]
# ## 2. Attention in blocks (core, 17 min)
#
# If the keys and values arrive in parts, can we compute attention part by part? The difficulty is the softmax, whose
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
# PyTorch's `F.scaled_dot_product_attention` returns the output alone. The kernels below it know the lse too, because
# their backward needs it, and `flex_attention` returns it on request (`return_aux=AuxRequest(lse=True)`).

# %% [markdown] tags=["exercise"]
# ### Exercise 11.1 · Online softmax
#
# Write the merge: from the outputs and lse of two blocks of keys, compute those that attention over both blocks would
# give. `out` is [.., Q, D] and `lse` is [.., Q]. Two things may happen, in all rows (queries) or in some of them:
#
# - scores may be in the thousands, where `exp` overflows, in both blocks or in one of them;
# - a row may see no key of the first block, or none of the second, but it always sees a key of one of them. Where it
#   sees none, the block's output is 0 in this row, and its lse is -inf.
#
# (Exercise 3.3 carries such sums through one loop. Here both blocks are finished before they meet.)

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
# labcode's `attention_block.merge` does the same in place.
#
# **Takeaway: attention over a block of keys is its output and its lse. With both, blocks can be merged exactly, in any
# order.**

# %% [markdown]
# ## 3. The ring, forward (core, 40 min)
#
# Each of p ranks has the queries, keys and values of S/p tokens, in the order of the ranks. This layout of the sequence
# is called **contiguous**. In step 0 each rank computes attention over its own keys. Then every rank passes its keys
# and values on to the next rank, and the last rank passes them to the first. In step 1 every rank computes with the
# keys of the rank before it, and so on. After p - 1 messages all parts have been everywhere.

# %% tags=["figure"]
plot.ring_attention(4, caption="11.ring")

# %% [markdown]
# In the picture a row is a rank. Its queries Q stay, and the keys and values K V move down by one row in each step. The
# arrow that leaves at the bottom and the one that enters at the top are one message. The words on the right say what a
# causal mask leaves to do: `half` of the scores on a rank's own keys (a causal block), `all` of them on earlier keys,
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
# The check compares with one process in float64. It also looks at the messages: every message is waited for, a rank
# sends p - 1 parts, all to one neighbour, and while something is computed, at most two received parts are in memory. (A
# part in flight counts, and a slice or a chunk of a part keeps all of it.) About 20 lines.

# %% tags=["exercise", "by-hand"]
from course.labs.l11_by_hand import attend


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
# labcode's ring differs from the solution of the exercise in one point. Its function `_travel` yields one part after the
# other to a loop that computes, and it starts to pass a part on **before** it yields it. So the part travels while the
# loop computes with it, and the next one arrives meanwhile.

# %%
from labcode.parallel import context

show_source(context._travel)

# %% [markdown]
# ### When does a message hide?
#
# Let us compare the two on an emulated link, as in lesson 05, section 4. Four real ranks pass real parts round, but each
# block of attention counts as 20 ms of computation and each message as 15 ms on the link, and a rank that has to wait
# sleeps. The figure shows rank 3, which has a block to compute in every step.

# %%
from course.labs import l11_slow_ring as slow_ring

waiting = slow_ring.forward(ranks, overlapped=False, block_ms=20, message_ms=15)
overlapped = slow_ring.forward(ranks, overlapped=True, block_ms=20, message_ms=15)

# %% tags=["figure"]
slow_ring.draw(
    waiting, overlapped, title="Sent before the block, a message hides behind it"
)

# %% [markdown]
# The ring that waits does one thing after the other: 4 blocks and 3 messages, 4 · 20 + 3 · 15 = 125 ms. In labcode's
# ring each message of 15 ms is over before the block of 20 ms is, and only the blocks count: 4 · 20 = 80 ms.
#
# **Predict.** Now the link is slower and needs 30 ms for a message. How long does labcode's ring take?

# %% tags=["predict"]
overlapped_ms = 3 * 30 + 20  # the last block has no message beside it

# %%
overlapped = slow_ring.forward(ranks, overlapped=True, block_ms=20, message_ms=30)
found_ms = slow_ring.total_ms(overlapped)
compare("it overlaps", overlapped_ms, found_ms, unit="ms", within=1.2)

# %% [markdown]
# With overlap a step takes as long as the longer of its block and its message. (If you like, write your ring in this
# way and run the check of exercise 11.2 again. It accepts both.) So a message costs nothing as long as the block is the
# longer one. When is it? A part of T = S/p tokens with h features takes 4 T h bytes in 16-bit numbers, keys and values
# together. The scores of a full block (`all` in the picture) and their product with the values take 4 T² h FLOPs. That
# makes T FLOPs for each byte that is sent, however wide the model is. Say a GPU reaches Φ FLOP/s in its attention
# kernel, and its link carries β bytes per second. Then a message of forward hides if a part has at least this many
# tokens:
#
# $$T \;\ge\; \frac{\Phi}{\beta}$$
#
# If g query heads share a key head (lesson 09, section 3), K and V have 4 T h/g bytes, and Φ/(g β) tokens are enough.
# Sections 4 and 5 add a factor each, and section 8 puts in the numbers of a GPU.
#
# **Takeaway: in the ring a rank holds, besides its own, at most two parts of K and V at a time, sends p - 1 of them,
# and gets the result of one process. A message hides behind a block if the parts have at least Φ/(g β) tokens.**

# %% [markdown]
# ## 4. The ring, backward (core, 36 min)
#
# If we left backward to autograd, forward would have to keep every part of K and V that it received: the whole sequence.
# So backward is written by hand as well. It needs the formulas of attention's backward, which are those of FlashAttention
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
# Let us check that on one process: cut the keys into two blocks, and add up the terms.

# %% tags=["nbval-check-output"]
from course.labs.l11_by_hand import attend

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
# On the ring, the terms are computed in different places. The queries of a rank stay at home, and so do all terms of its
# dq. But the keys of rank s meet the queries of **all** later ranks, on those ranks. So the sums of dK and dV travel
# with their keys. Each rank adds its own term, and in the end the sums come home.

# %% tags=["figure"]
plot.ring_gradients(4, caption="11.gradients")

# %% [markdown]
# In the picture, d0 is the sum of dK and dV for the keys of rank 0. The filled places say whose terms are in it after
# the step, and the hatched ones belong to ranks that do not see these keys. In step 3, the sum d0 is on rank 3 and is
# complete. One more message brings it home.

# %% [markdown] tags=["exercise"]
# ### Exercise 11.3 · The gradients come home
#
# Write the backward of the ring. All arguments are this rank's parts; `out` and `lse` are those over all keys. Use
# `attend_backward` of the cells above for a block, and `pass_on(x, group)` of exercise 11.2 for messages, which is
# imported here so that you may begin with this section.
#
# The check accepts every way to send them that needs no more than p - 1 messages for K and V and p for their gradients.
# About 15 lines, and no skeleton this time.

# %% tags=["exercise"]
from course.labs.l11_by_hand import pass_on


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
# 16 bits. (They collect p terms one after the other.)

# %% [markdown]
# labcode saves one message. A rank's own term need not travel: it stays at home, and the sum that travels is begun by
# the **next** rank. It then follows its keys one step behind, for p - 1 hops instead of the p hops of the picture.
#
# Let *kv* be the bytes of one rank's K and V together, in 16-bit numbers. In forward each part makes p - 1 hops. In
# backward K and V go round once more, and the sums of their gradients follow them. The sums collect p terms, one after
# the other, so labcode keeps and sends them in 32 bits, as PyTorch's ring does. And backward computes 2.5 times as much
# as forward: five products for each block, where forward has two.
#
# **Predict.** How many times as long as for forward must a part be, so that the messages of backward hide behind its
# blocks too?

# %% tags=["predict"]
times_as_long = (3 + 2 * 3) / 3 / 2.5

# %% [markdown]
# The next cells compare the ring with one process, in float64, and count its bytes in bfloat16, for 4 ranks. `core` is
# the attention of one process, and says whether there is a causal mask. `layout` says which tokens a rank holds; so far
# we know one, contiguous. `take_own` cuts this rank's tokens out of a whole tensor. `saved_bytes` counts what autograd
# keeps (lesson 10, section 2), and `counted` records each message and collective that this process starts.

# %% tags=["by-hand"]
from typing import NamedTuple

from labcode.comm.counting import counted
from labcode.parallel.context import take_own
from labcode.perf import alpha_beta
from labcode.perf.saved_bytes import saved_bytes


class Beside(NamedTuple):
    """An attention over ranks beside that of one process."""

    off: float  # largest difference of output and gradients
    forward_bytes: float  # sent
    backward_bytes: float
    kept_bytes: int

def wire_bytes(calls):
    """Bytes that a rank sends; a collective counts as on a ring."""
    sent = 0
    for call in calls:
        if call.kind != "recv":
            sent += alpha_beta.bytes_sent(call.kind, call.group_size, call.num_bytes)
    return sent

def beside_one_process(rank, attention, layout, dtype, heads=4, key_heads=4):
    """Run both, forward and backward."""
    group = dist.group.WORLD
    core = layers.CoreAttention(causal=True)
    draw = torch.Generator().manual_seed(0)
    wholes = []
    parts = []
    for own_heads in (heads, key_heads, key_heads):  # of q, k and v
        whole = torch.randn(1, own_heads, 1024, 32, generator=draw).to(dtype)
        own = take_own(whole, group, 2, layout)  # [B, heads, S/p, D]
        parts.append(own.requires_grad_())
        wholes.append(whole.requires_grad_())
    expected = core(*wholes)
    expected.square().sum().backward()

    with saved_bytes(core) as saved, counted() as forward:
        out = attention(core, group, layout, *parts)
        kept_bytes = saved.total()
    with counted() as backward:
        out.square().sum().backward()
    differences = [out - take_own(expected, group, 2, layout)]
    for part, whole in zip(parts, wholes):
        differences.append(part.grad - take_own(whole.grad, group, 2, layout))
    off = max(one.abs().max().item() for one in differences)
    return Beside(off, wire_bytes(forward), wire_bytes(backward), kept_bytes)

def with_ring(core, group, layout, q, k, v):
    """labcode's ring in place of `core`."""
    ring = RingAttention(core, group, layout)
    ring.length = 1024  # S; without it the ranks would ask each other
    return ring(q, k, v)

# %% tags=["nbval-check-output"]
from torch.utils.flop_counter import FlopCounterMode


def operations(compute, *inputs):
    """FLOPs of the products of a block, as PyTorch counts them."""
    with FlopCounterMode(display=False) as counter:
        compute(*inputs, causal=False)
    return counter.get_total_flops()

exact = ranks.run(beside_one_process, with_ring, "contiguous", torch.float64)[3]
short = ranks.run(beside_one_process, with_ring, "contiguous", torch.bfloat16)[3]
kv_bytes = 2 * torch.empty(1, 4, 1024 // 4, 32, dtype=torch.bfloat16).nbytes

x = torch.zeros(16, 8)
forward_work = operations(attend, x, x, x)
backward_work = operations(attend_backward, x, x, x, x, x, torch.zeros(16))
more_work = backward_work / forward_work
more_bytes = short.backward_bytes / short.forward_bytes
sent_bytes = short.forward_bytes + short.backward_bytes
how = {"within": 1.01, "found": "counted"}
compare("times as long", times_as_long, more_bytes / more_work, **how)
print(f"the ring sends {sent_bytes / kv_bytes:.0f} kv in forward and backward")
print(f"output and gradients of one process to 1e-12: {exact.off < 1e-12}")
print(f"kept for backward on rank 3: {short.kept_bytes / kv_bytes:.2f} kv")

# %% [markdown]
# In all a rank sends 4 (p - 1) kv. (In float64 the sums are no wider than K and V, and it is 3 (p - 1).) Backward sends
# three times the bytes of forward for 2.5 times the FLOPs, so it needs parts of 1.2 Φ/(g β) tokens, and that is the case
# that decides. Only the last message of the sums has nothing left to hide behind.
#
# What is kept belongs to the rank's own tokens: q, k, v and the output make 2 kv, and the lse, in 32 bits, a little
# more.
#
# **Takeaway: backward sends K and V round once more, and the sums of their gradients with them. Each rank adds its
# term, and a sum is complete when it comes home. Forward and backward send 4 (p - 1) kv, and parts must be 1.2 times as
# long as for forward alone.**

# %% [markdown]
# ## 5. Who does the work under a causal mask (core, 24 min)
#
# Token 1000 looks at a thousand keys, token 1 at one. So in the contiguous layout the ranks have different work. The
# picture shows the mask for four ranks, in 8 × 8 tiles: rows are queries, columns are keys, and the labels on the right
# and below name the rank that holds them. The colour says which rank computes a tile, and the number in it is the step
# of the ring in which its keys are there.

# %% tags=["figure"]
plot.causal(4, ("contiguous",), caption="11.contiguous")

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
from course.figures import attention as masks


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
# long as rank 3, 1.75 times as long as it should, and rank 0 does nothing in most of the steps.
#
# The remedy is to distribute the tokens in another way. Cut the sequence into 2p chunks instead of p, and give each rank
# **two** of them. Attention works with any choice of tokens, as long as it knows their positions.

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
# False)`, and the early chunk of the queries alone is `slice(0, tokens // 2)`. It helps to draw the tiles of two ranks,
# say the queries of rank 1 and the keys of rank 2 on p = 4 ranks.
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
plot.causal(4, caption="11.zigzag")

# %% tags=["nbval-check-output"]
print("tiles, contiguous:", tiles_of_ranks("contiguous"))
print("tiles, zig-zag:   ", tiles_of_ranks("zigzag"))

# %% [markdown]
# Each block is now half a full one, on every rank and in every step. Its message is as long as before, so parts must be
# twice as long to hide it: 2 · 1.2 Φ/(g β) tokens.
#
# labcode's `take_own` cuts inputs, targets and positions in the same way. A vision transformer has no causal mask, so the
# contiguous layout already balances its work.
#
# **Takeaway: equal tokens are not equal work. Under a causal mask, give each rank an early and a late chunk. Its blocks
# are half as large, so parts must be twice as long to hide a message.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* `my_chunks` is quick; `my_block` is the point. Draw the rows of rank 1 and the columns of rank 2
# for p = 4: of its queries only the late chunk (6) sees rank 2's keys (2 and 5), and it sees both. There is a second
# right answer, from the middle outwards: rank r holds p - 1 - r and p + r, and the two cases swap. Ask the room what
# striped attention does (rank r holds the tokens r, r + p, r + 2p and so on): it is balanced as well, but every block
# has a mask.

# %% [markdown]
# ## 6. The other ways (core, 13 min)
#
# **Gather.** Each rank all-gathers K and V, and backward reduce-scatters their gradients. There are few messages, and a
# rank then has the keys of the whole sequence, whatever the mask. Llama 3 was trained in this way, and its authors give
# two reasons: masks such as the one of section 7 are easier to support, and the messages are small, because with grouped
# queries K and V are much smaller than q (Llama Team 2024, section 3.3.2). The largest model has 8 key/value heads for
# its 128 query heads.
#
# **All-to-all** (DeepSpeed Ulysses). Attention treats each **head** by itself. So before attention the ranks swap: each
# sends its tokens of the other ranks' heads, and receives all tokens of its own heads. Then it computes ordinary
# attention over the whole sequence, for N/p heads. Afterwards the output is swapped back. In the picture, the colour and
# the number of a square name the rank that holds these tokens of this head.

# %% tags=["figure"]
plot.ulysses(4, caption="11.ulysses")

# %% [markdown]
# labcode's `all_to_all(x, group, 1, 2)` is such a swap: it cuts dim 1, the heads, into p pieces, sends piece r to rank
# r, and puts what arrives side by side in dim 2, the tokens. `dist.all_to_all_single` does the sending, and the
# backward is the swap the other way. With it, the all-to-all and the gather are these few lines.

# %%
from course.labs.l11_by_hand import beside_one_process, with_ring
from labcode.comm.collectives import all_to_all
from labcode.parallel.context import GatherAttention


def with_ulysses(core, group, layout, q, k, v):
    """q [B, N, S/p, D], k and v [B, key heads, S/p, D] -> [B, N, S/p, D]"""
    own_heads = [all_to_all(x, group, 1, 2) for x in (q, k, v)]  # [B, heads/p, S, D]
    out = core(*own_heads)
    return all_to_all(out, group, 2, 1)

def with_gather(core, group, layout, q, k, v):
    gather = GatherAttention(core, group, layout)
    gather.length = 1024
    return gather(q, k, v)

# %% [markdown]
# (The all-to-all runs in the contiguous layout, since it has all tokens of a head in their order.) How much is sent?
# Forward swaps q, k, v and the output, and backward swaps their gradients. In an all-to-all a rank keeps 1/p of its
# tensor and sends the rest. Take a given model, and let g be the number of query heads for each key/value head: 1 in a
# plain model, more with grouped queries (lesson 09, section 3), and 16 in the largest Llama 3. The unit is *kv*, the
# bytes of one rank's K and V **for g = 1**. So K and V have kv/(2 g) bytes each, and q and the output have kv/2 each,
# whatever g is.
#
# **Predict**, for p = 4 and in units of kv: what does a rank send in forward and backward with the all-to-all, for g = 1?
# And which sends less for g = 4: `"gather"` or `"all-to-all"`?

# %% tags=["predict"]
ulysses_kv = 2 * (3 / 4) * (1 / 2 + 1 / 2 + 1 / 2 + 1 / 2)
less_for_g_4 = "gather"  # 6/4 = 1.5, and 2 * (3 / 4) * (1 / 2 + 1 / 8 + 1 / 8 + 1 / 2)

# %% tags=["nbval-check-output"]
kv_bytes = 2 * torch.empty(1, 16, 1024 // 4, 32, dtype=torch.bfloat16).nbytes
ways = {
    "ring": (with_ring, "zigzag"),
    "gather": (with_gather, "zigzag"),
    "all-to-all": (with_ulysses, "contiguous"),
}
sent_kv = {}
rows = []
for g in (1, 4):
    for name, (way, layout) in ways.items():
        heads = {"heads": 16, "key_heads": 16 // g}
        exact = ranks.run(beside_one_process, way, layout, torch.float64, **heads)[3]
        short = ranks.run(beside_one_process, way, layout, torch.bfloat16, **heads)[3]
        sent_kv[g, name] = (short.forward_bytes + short.backward_bytes) / kv_bytes
        rows.append((g, name, short.kept_bytes / kv_bytes, exact.off < 1e-12))

is_less = sent_kv[4, "gather"] < sent_kv[4, "all-to-all"]
less = "gather" if is_less else "all-to-all"
found = sent_kv[1, "all-to-all"]
compare("all-to-all, g = 1", ulysses_kv, found, within=1, unit="kv", found="counted")
options = ("gather", "all-to-all")
compare("less for g = 4", less_for_g_4, less, found="counted", options=options)
for g, name, kept_kv, is_right in rows:
    print(f"g = {g}, {name:10} sends {sent_kv[g, name]:5.2f} kv", end=", ")
    print(f"rank 3 keeps {kept_kv:.2f}; right to 1e-12: {is_right}")

# %% [markdown]
# | for a given model, in kv of g = 1 | ring | gather | all-to-all |
# |---|---|---|---|
# | sends | 4 (p - 1)/g | 2 (p - 1)/g | 2 (1 + 1/g)(p - 1)/p |
# | the same for p = 4: g = 1, 4, 16 | 12, 3, 0.75 | 6, 1.5, 0.38 | 3, 1.9, 1.6 |
# | keeps | 1 + 1/g | 1 + p/g | 1 + 1/g |
# | can hide behind computing | yes, block by block | hardly | hardly |
# | number of ranks | any | any | a divisor of the number of key/value heads, or of the query heads with copies |
# | causal mask | needs zig-zag | needs zig-zag | is balanced by itself |
#
# With grouped queries all three send less. The ring and the gather send K and V alone, so they gain the whole factor g;
# the all-to-all also swaps q and the output, which stay. kv belongs to S/p tokens. So with more ranks the bytes of the
# all-to-all shrink, and those of the other two stay about the same: it sends less than the gather from p = g + 2 on.
#
# The gather keeps K and V of the whole sequence, unless they are gathered again in backward. labcode's
# `GatherAttention` also keeps a **mask** in the dtype of q, about S²/(2 p) numbers, which the formula does not count.
# That is a weakness of this class and not of the gather: FlexAttention keeps four entries for each tile of 128 × 128
# scores. At S = 131072 these are four million on all ranks together, instead of nine billion numbers.
#
# The limit of the all-to-all is the number of heads: for Llama 3 p may be at most 8. Above that K and V are **copied**
# until each rank has a head of them, as NVIDIA's VILA does, and the limit is the 128 query heads. Tensor parallelism
# cuts the heads as well, so tp · cp cannot be larger than their number. In practice all-to-all and ring are combined,
# in a grid of their own (Fang and Zhao 2024). Take two nodes of 4 GPUs and g = 1. The 4 GPUs of a node swap heads, which
# costs 3 kv over the fast links. Then K and V of each quarter of the heads go round the two nodes, 4 kv over a slow link
# of its own. One ring over all 8 would send 28 kv over each of the two slow links that it crosses.
#
# Zig-zag cuts the sequence into 2p chunks. Where its length is not a multiple of 2p, labcode makes some chunks one
# token longer than others. Transformer Engine's ring needs equal parts of an even length, with and without a causal
# mask. So NERSC, which cuts 4,050 patches into parts of 1,013 and 1,011, pads all of them to 1,014. A padded place has
# a key too: without a mask that hides it, it takes a share of every softmax.
#
# labcode's ring never holds a whole row of attention weights. To drop some of them, its blocks would have to draw the
# same random numbers again in backward, which it does not do. It refuses:

# %% tags=["raises-exception"] raises="RankError: rank 0: ValueError: ring attention keeps no attention weights to drop"
def ring_with_dropout(rank):
    core = layers.CoreAttention(causal=True, dropout=0.1)
    return RingAttention(core, dist.group.WORLD, "zigzag")

ranks.run(ring_with_dropout)

# %% [markdown]
# **Takeaway: ring, gather and all-to-all give the same numbers. The ring takes any number of ranks, and hides its
# messages where the parts are long enough. The all-to-all sends least where every head has its own K and V, and needs
# heads. The gather is simple, takes any mask, keeps all keys, and sends least where many query heads share a key
# head.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* People forget that the all-to-all sends four tensors forward and four backward, or count whole
# tensors instead of (p - 1)/p of them. Ask the room what a gather sends that keeps its own K and V alone and gathers
# again in backward. (3 (p - 1) instead of 2 (p - 1), still less than the ring. But it holds all keys for a while.)

# %% [markdown]
# ## 7. Packed documents (core, 6 min)
#
# A training sequence of 131072 tokens is rarely one text. Usually documents are **packed**, one after the other, until
# the sequence is full, and a **document mask** lets a token look only at earlier tokens of its own document. The authors
# of Llama 3 found it important for very long sequences (Llama Team 2024, section 3.2).
#
# Here are the tiles of zig-zag again, for five documents in one sequence: one of four chunks, and four of one chunk
# each.

# %% tags=["figure"]
plot.causal(4, ("zigzag",), documents=(4, 1, 1, 1, 1), caption="11.documents")

# %% [markdown]
# **Predict.** How many times a fair share does the busiest rank compute?

# %% tags=["predict"]
busiest_to_fair = (3 + 1 / 2 + 1 / 2) / ((4 * 1 / 2 + 6 + 4 * 1 / 2) / 4)

# %% tags=["nbval-check-output"]
from course.figures import attention as masks

work = [0.0] * 4
for (query, key), (owner, _) in masks.tiles(4, "zigzag", (4, 1, 1, 1, 1)).items():
    work[owner] += 0.5 if query == key else 1.0
found = max(work) / (sum(work) / 4)
compare("busiest / fair share", busiest_to_fair, found, within=1.02, found="counted")
print("tiles of each rank:", work)

# %% [markdown]
# Zig-zag pairs a token that sees few keys with one that sees many, and it assumes that the late one sees many. Under a
# document mask that is wrong: what counts is the position of a token **in its document**. There are two remedies. One
# can deal out each document separately, two chunks of it to every rank. Or one can sort blocks of tokens by their work,
# and deal them back and forth. The first is the proposal of WLB-LLM (Wang et al. 2025), which uses it where documents
# are long, since small pieces make kernels slow. PyTorch has both, and section 9 measures what they reach.
#
# **Takeaway: with packed documents zig-zag is not balanced. Deal out each document separately, or blocks by their work.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Let the room find rank 3 in the figure: it holds the last chunk of the long document and one of
# the short ones. Ask when no layout needs a ring at all. (When documents are short and each fits on one rank:
# contiguous and whole. The mask then hides all that comes from other ranks, but a plain ring would send it
# nevertheless.)

# %% [markdown]
# ## 8. A whole GPT, a ViT, and how to choose (core, 16 min)
#
# `parallelize` puts all of this into a model. Here are five steps of training in float64 on four ranks, beside one
# process. The last two lines are mistakes. In one the sums over cp are forgotten: each rank updates with the terms of
# its own tokens alone. In the other each rank draws its weights from a seed of its own.

# %% tags=["nbval-check-output"]
from course.labs import l10_small_gpt as small
from labcode.comm.grid import Grid
from labcode.config import ParallelConfig
from labcode.models.parallelize import parallelize
from labcode.topology import GridShape


def losses_without_sum(rank, count):
    """As `small.losses_on_grid` with cp = 4, but gradients stay on their rank."""
    model = parallelize(
        small.build(torch.float64), Grid.create(GridShape(cp=4)), ParallelConfig()
    )
    with model.no_sync():  # the sum over cp travels with the average over dp
        return list(small.steps(model, model.loss, count))

def losses_of_own_seeds(rank, count):
    """The same with the sums, but each rank begins with weights of its own."""
    model = parallelize(
        small.build(torch.float64), Grid.create(GridShape(cp=4)), ParallelConfig()
    )
    drawn = layers.initialize(small.build(torch.float64), seed=rank)
    with torch.no_grad():
        for param, value in zip(model.parameters(), drawn.parameters()):
            param.copy_(value)
    return list(small.steps(model, model.loss, count, model.finish_gradient_sync))

expected = torch.tensor(small.losses_of_one_process(5))

def report(name, losses):
    off = (torch.tensor(losses) - expected).abs().max().item()
    note = "" if off < 1e-12 else f", off by {off:.3f} of {expected[-1]:.3f}"
    print(f"{name:22} the losses of one process to 1e-12: {off < 1e-12}{note}")

four = GridShape(cp=4)
mixed = GridShape(cp=2, tp=2)
copies = GridShape(cp=2, dp=2)
gathering = ParallelConfig(context_attention="all_gather")
along = ParallelConfig(sequence_parallel=True)
by_ddp = ParallelConfig(data_parallel="ddp")
report("cp 4, ring", ranks.run(small.losses_on_grid, four, ParallelConfig(), 5)[0])
report("cp 4, gather", ranks.run(small.losses_on_grid, four, gathering, 5)[0])
report("cp 2, tp 2 + sequence", ranks.run(small.losses_on_grid, mixed, along, 5)[0])
report("cp 2, dp 2, DDP", ranks.run(small.losses_on_grid, copies, by_ddp, 5)[0])
report("cp 4, sum forgotten", ranks.run(losses_without_sum, 5)[0])
report("cp 4, seeds differ", ranks.run(losses_of_own_seeds, 5)[0])

# %% [markdown]
# Neither mistake raises an error, and the losses are only a little off: without a run on one process nobody would
# notice. The weights of a model are **shared** over cp, and two things follow from that.
#
# **They have to start equal.** With seeds that differ, the queries of one model meet the keys of three others. All
# ranks then apply the same sum of gradients, so their weights stay as different as they were. labcode draws all weights
# from one seed. For a model that comes with weights, it also sends those of the first rank of dp × cp to the others, as
# DDP does when it is made.
#
# **Their gradients are terms of a sum.** NERSC's tutorial marks such weights (`mark_for_reduction = ["cp"]`), and a
# communication hook of DDP (lesson 05, section 5) makes one more all-reduce for them, over cp. One all-reduce is enough:
# over the group of dp × cp, divided by the number of copies dp and not by the number of ranks. This is the hook that
# labcode gives to PyTorch's DDP in the line "cp 2, dp 2". Its `num_shares` is dp.

# %%
from labcode.parallel import torch_data

show_source(torch_data._sum_then_divide)

# %% [markdown]
# A vision transformer has long sequences too: the patches of a large map. Here is one with 32 patches. It has no causal
# mask, so the layout is contiguous and the work is even. The last two grids differ in the **order** of the axes. Suppose
# that a node has two GPUs, so that ranks 0 and 1 share the fast link.

# %% tags=["nbval-check-output"]
from course.labs.l11_by_hand import wire_bytes
from labcode.comm.counting import counted
from labcode.config import ViTConfig
from labcode.models import vit

draw = torch.Generator().manual_seed(0)
maps = torch.randn(5, 2, 2, 4, 20, 40, generator=draw, dtype=torch.float64)
pairs = [(states, targets) for states, targets in maps]  # each [B, C, Y, X]


def small_vit():
    config = ViTConfig(
        num_variables=4, num_forcings=0, lat=20, lon=40,
        num_layers=2, num_heads=4, hidden_size=32,
    )
    return layers.initialize(vit.ViT(config), seed=0).double()

def vit_on_grid(rank, shape, pairs):
    """(Losses, bytes of a step's forward and backward that go over cp, and over tp)"""
    model = parallelize(small_vit(), Grid.create(shape), ParallelConfig())
    states, targets = pairs[0]
    with counted() as calls, model.no_sync():
        model.loss(model(states), targets).backward()
    over_cp = wire_bytes([call for call in calls if call.kind == "send"])
    over_tp = wire_bytes([call for call in calls if call.kind == "all_reduce"])
    finish = model.finish_gradient_sync
    losses = list(small.steps(model, model.loss, 5, finish, pairs))
    return losses, over_cp, over_tp

expected_vit = torch.tensor(list(small.steps(small_vit(), vit.loss, 5, None, pairs)))
for shape in (four, mixed, GridShape(cp=2, tp=2, order="cp-tp-dp-pp")):
    losses, over_cp, over_tp = ranks.run(vit_on_grid, shape, pairs)[0]
    off = (torch.tensor(losses) - expected_vit).abs().max().item()
    print(f"cp {shape.cp}, tp {shape.tp}, {shape.order}: as one process {off < 1e-12}")
    print(f"    cp: ranks {shape.groups('cp')[0]} {over_cp / 1e3:.0f} kB", end=", ")
    print(f"tp: ranks {shape.groups('tp')[0]} {over_tp / 1e3:.0f} kB")

# %% [markdown]
# The order changes no number. It decides which messages leave the node: the 49 kB of cp with tp first, and the 66 kB of
# tp with cp first.
#
# Which axis should divide the activations of a long sequence, tp or cp? Call A the bytes of a [B, S, H] tensor in 16-bit
# numbers. With tp and sequence parallelism a GPU sends 10 (t - 1)/t · A for each layer in forward and backward (lesson
# 10, section 4). With cp and a ring it is 4 (p - 1) kv/g, as counted above, where kv stands for K and V of S/p tokens
# in a plain model. Both keep the same activations: 72.4 GB with 8 ranks in our case.
#
# kv is 2 A/p, so the ring sends 8 (p - 1)/p · A/g: with the same number of ranks, 0.8/g of the bytes of tp. The next cell
# counts both on four ranks.

# %% tags=["nbval-check-output"]
from labcode.config import GPTConfig
from labcode.models.gpt import GPT


def sent_for_a_layer(rank, shape, key_heads):
    """Bytes that this rank sends for a layer: a model of 4 against one of 2 layers."""
    sent = {}
    for num_layers in (2, 4):
        config = GPTConfig(
            vocab_size=64, context_length=256, num_layers=num_layers,
            num_heads=16, num_kv_heads=key_heads, hidden_size=64,
        )
        how = ParallelConfig(sequence_parallel=shape.tp > 1)
        gpt = GPT(config).to(torch.bfloat16)
        model = parallelize(gpt, Grid.create(shape), how, seed=0)
        tokens = torch.zeros(1, 256, dtype=torch.int64)
        with counted() as calls, model.no_sync():
            model.loss(model(tokens), tokens).backward()
        sent[num_layers] = wire_bytes(calls)
    return (sent[4] - sent[2]) / 2

for g in (1, 4):
    by_tp = ranks.run(sent_for_a_layer, GridShape(tp=4), 16 // g)[0]
    by_cp = ranks.run(sent_for_a_layer, GridShape(cp=4), 16 // g)[0]
    print(f"cp / tp, g = {g}: {by_cp / by_tp:.2f}")

# %% [markdown]
# NERSC has measured both on 16 A100, four to a node: a ViT with hidden size 1024 on maps of 4,050 patches, 64 samples
# in a step, dp 4 with tp 4 in one run and with cp 4 in the other. Its tp goes **without** sequence parallelism. Its cp
# gathers K and V (section 6). tp cuts the weights, and cp does not.
#
# **Predict.** Which of the two runs is faster, and which takes less memory of a GPU: `"tp"` or `"cp"`?

# %% tags=["predict"]
faster_at_nersc = "cp"
less_memory_at_nersc = "cp"

# %% tags=["nbval-check-output"]
from course.labs import papers

samples_per_s = papers.NERSC_SAMPLES_PER_S
gib_in_use = papers.NERSC_GIB_IN_USE
WAYS = ("tp", "cp")
faster = max(WAYS, key=samples_per_s.get)
less = min(WAYS, key=gib_in_use.get)
compare("faster", faster_at_nersc, faster, found="published", options=WAYS)
compare("less memory", less_memory_at_nersc, less, found="published", options=WAYS)
for name, rate in samples_per_s.items():
    print(f"{name:23} {rate:5.1f} samples/s, {gib_in_use[name]} GiB in use")

# %% [markdown]
# In NERSC's code tp makes six all-reduces of a [B, S, H] tensor for each layer, two in forward and four in backward,
# because q, k and v are three matmuls. On 4 ranks these are 9 A, and the gather sends 3 A. Without sequence parallelism
# each rank of tp also computes and keeps the norms and the sums of all tokens. cp leaves the 151 million weights of the
# layers whole, which at 16 bytes each are 1.8 GB more than with tp, and takes less memory even so. The third row is tp
# with the layers of Transformer Engine, which fuse operations: in these runs the library gains nearly as much as the
# axis.
#
# cp sends less, and most of it hides, if the parts are long enough: by sections 4 and 5, 2 · 1.2 Φ/(g β) tokens. Here
# are the numbers for nodes of eight H100, from labcode's table of clusters. Shah et al. (2024) say that
# FlashAttention-2 reaches 35 % of an H100's peak, and FlashAttention-3 1.5 to 2 times as much; for Φ we take 35 % and
# 65 %. β is a GPU's share of NVLink or of the network.

# %% tags=["nbval-check-output"]
from labcode.perf.cluster import load_cluster

dgx = load_cluster("dgx-h100")
for kernel in ("flash2", "flash3"):
    flops_per_s = dgx.gpu.attention_flops_per_s(kernel, "bfloat16")
    print(f"{kernel}: {flops_per_s / 1e12:.0f} TFLOP/s, parts for g = 1 and g = 8:")
    for name, link in (("inside a node", dgx.inside), ("between nodes", dgx.between)):
        tokens = 2 * 1.2 * flops_per_s / link.beta_bytes_per_s
        print(f"    {name}: {tokens:6,.0f} and {tokens / 8:5,.0f} tokens")

# %% [markdown]
# Our 131072 tokens make parts of 16384 on 8 ranks. Inside a node the messages hide with either kernel; between nodes
# they hide with grouped queries (g = 8), and with g = 1 hardly or not. One published measurement has short parts: on
# TPUs, with Llama 2 7B, 2048 tokens to a part and g = 1, a step took 16.4 s with a ring and 8.8 s with a gather
# (MaxText, pull request 4687).
#
# And the weights? tp shards them, and cp by itself does not. For years that was a reason to begin with tp. But sharded
# data parallelism (FSDP, lesson 13) shards weights, gradients and optimizer over **all** ranks that hold the same
# weights, those of dp and of cp: on 64 GPUs the 115 GB of our model become 1.8 GB each. Its messages hide if a rank has
# some 2000 tokens in a micro-batch (lesson 13b, section 5), and with long sequences it has more. So:
#
# 1. FSDP over dp × cp shards the weights.
# 2. If one sequence is still too long, take cp inside the node, **before tp**, and beyond the node while the parts are
#    long enough for the ring to hide. torchtitan has trained Llama 3.1 8B with 262144 tokens on 8 H100 of 96 GB with cp 8
#    and tp 1, with full activation checkpointing.
# 3. Take tp where that is not enough: parts too short for a ring, too few tokens on each rank for FSDP to hide (many GPUs
#    and a given batch), or a layer whose gathered weights are too large. For its sequences of 131072 tokens the largest
#    Llama 3 had tp 8 and cp 16 on 16384 GPUs (Llama Team 2024, table 4).
#
# The order of the axes follows: what hides least comes first and lies on NVLink, tp if there is any, then cp. For long
# sequences in scientific models Subramanian et al. (2024) compare such grids with a performance model.
#
# **Takeaway: FSDP over dp × cp shards the weights. Then cp inside the node comes before tp, once the parts are long
# enough for the ring to hide: it sends 0.8/g of the bytes for the same memory.**

# %% [markdown]
# ## 9. PyTorch's own, and an open end (optional, 25 min)
#
# PyTorch can deal out packed documents too (section 7), with classes whose names begin with an underscore. Such a **load
# balancer** gives an order of the tokens, which is then cut into p equal parts. Let us measure what each of them
# reaches. (PTRR stands for processing-time-based round-robin, which is the sorting by work. It takes FlexAttention's
# mask, and blocks of 128 tokens.)

# %% tags=["nbval-check-output"]
from torch.distributed.tensor.experimental import _attention as of_torch
from torch.nn.attention.flex_attention import create_block_mask

lengths = [2048, 512, 512, 512, 512]
document = torch.repeat_interleave(torch.tensor(lengths))  # of each token: 0, 0, .. 4
keys_seen = torch.cat([torch.arange(1, length + 1) for length in lengths])


def visible(batch, head, query, key):
    """FlexAttention asks for each query and key."""
    return (document[query] == document[key]) & (key <= query)

block_mask = create_block_mask(visible, None, None, 4096, 4096, device="cpu")
balancers = {
    "zig-zag": of_torch._HeadTailLoadBalancer(4096, 4, "cpu"),
    "per document": of_torch._PerDocumentHeadTailLoadBalancer([lengths], 4, "cpu"),
    "PTRR": of_torch._PTRRLoadBalancer(block_mask, 4),
}
print(f"PyTorch {torch.__version__.split('+')[0]}")
for name, balancer in balancers.items():
    order = balancer._generate_indices()[0]
    scores = keys_seen[order].view(4, -1).sum(1)  # of each rank
    times_fair = (scores.max() / scores.double().mean()).item()
    print(f"{name:13} the busiest rank computes {times_fair:.2f} times a fair share")

# %% [markdown]
# Dealing out each document separately should give 1.00, and in this version it does not. The balancer lists the chunks
# document by document, and the cut into p equal parts then gives the whole long document to ranks 0 and 1. Every number
# of the model stays right, and only the clock shows it. PyTorch's main branch has listed them rank by rank since July
# 2026 (pull request 189902, not in 2.13). In exercise 11.5 below you write it yourself.
#
# Attention over such parts is a plan for `parallelize_module`, as in lesson 09, section 5. Its kind `FLEX` gathers K
# and V and leaves the mask to FlexAttention. `_context_parallel_shard` cuts tensors in the balancer's order. Here it is
# beside one process, forward alone, since FlexAttention has no backward on a CPU.

# %% tags=["nbval-check-output"]
import warnings

import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import flex_attention


class FlexAttention(torch.nn.Module):
    def forward(self, q, k, v, block_mask):
        return flex_attention(q, k, v, block_mask=block_mask)

def pytorchs_own(rank, lengths):
    """How far its output is from that of one process."""
    warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
    tokens = torch.arange(sum(lengths))
    document = torch.repeat_interleave(torch.tensor(lengths))
    draw = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 4, len(tokens), 32, generator=draw)
    sees = (document[:, None] == document) & (tokens <= tokens[:, None])
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=sees)

    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    kind = of_torch._ContextParallel.AttentionType.FLEX
    plan = of_torch._ContextParallel(seq_dim=2, attention_type=kind)
    attention = parallelize_module(FlexAttention(), mesh, plan)
    balancer = of_torch._PerDocumentHeadTailLoadBalancer([lengths], 4, "cpu")
    cut = [q, k, v, expected, tokens]
    q, k, v, expected, own = of_torch._context_parallel_shard(
        mesh, cut, [2, 2, 2, 2, 0], balancer
    )
    gathered = balancer._generate_indices()[0]  # the order in which keys arrive

    def visible(batch, head, query, key):
        query = own[query]
        key = gathered[key]
        return (document[query] == document[key]) & (key <= query)

    mask = create_block_mask(visible, None, None, len(own), len(tokens), device="cpu")
    out = attention(q, k, v, mask)
    return (out - expected).abs().max().item()

off = max(ranks.run(pytorchs_own, [512, 128, 128, 128, 128]))
print(f"PyTorch's own gives the output of one process to 1e-5: {off < 1e-5}")

# %% [markdown]
# The other kind, `SDPA`, replaces `F.scaled_dot_product_attention` by a gather, or by a ring after
# `set_rotate_method("alltoall")`. It knows no document mask, and it has kernels for GPUs alone, so it does not run
# here. The public `context_parallel` is older: "we will deprecate this API once the new API is widely used", says its
# source (torch 2.13). torchtitan moved to the new functions in January 2026 (pull request 2144) and has had Ulysses
# beside them since September 2026 (pull request 4450).
#
# **Takeaway: measure what a balancer reaches. A wrong one changes no number but the time.**

# %% [markdown] tags=["exercise"]
# ### Exercise 11.5 · Deal packed documents
#
# Documents of the given lengths follow one another in a packed sequence. Write `my_shares(lengths, p)`, which says what
# each of p ranks holds under a document mask. Return a list of p lists, one for each rank, of pieces (start,
# stop): the tokens from `start` to `stop - 1` of the packed sequence. Three things are asked:
#
# 1. Each token belongs to exactly one rank.
# 2. All ranks hold the same number of tokens.
# 3. All ranks compute the same number of scores, to 2 %. A token sees its document up to itself, so the third token of
#    a document makes 3 scores.
#
# Every length is a multiple of 2p. For example, for `lengths = [8]` and p = 2 a right answer is `[[(0, 2), (6, 8)],
# [(2, 6)]]`. Several ways lead there. About 10 lines.

# %% tags=["exercise"]
def my_shares(lengths, p):
    """For each rank the pieces (start, stop) that it holds."""
    ### BEGIN SOLUTION
    shares = [[] for _ in range(p)]
    start = 0
    for length in lengths:
        size = length // (2 * p)
        for rank in range(p):
            for chunk in (rank, 2 * p - 1 - rank):
                first = start + chunk * size
                shares[rank].append((first, first + size))
        start += length
    return shares
    ### END SOLUTION

# %% tags=["check"]
check("11.5", my_shares)

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Most begin with zig-zag over the whole sequence, and the check says which rank is the busiest.
# Then many forget where a document begins. Ask the room what to do with lengths that are no multiple of 2p. (Pad them,
# or deal the rest of a document token by token.) And ask when dealing each document for itself is a bad idea. (When
# chunks become shorter than the tiles of the kernel, 128 tokens: each tile is then computed whole for a few scores.
# WLB-LLM chooses between the two ways for each sequence.)

# %% [markdown]
# ## 10. From here to GPUs and SLURM (core, 2 min)
#
# | where | start |
# |---|---|
# | 4 GPUs of one machine | `torchrun --nproc-per-node=4 -m labcode.train gpt_tiny --parallel.cp 4 --model.context_length 1024` |
# | the gather | add `--parallel.context_attention all_gather` |
# | cp fastest in the order of ranks | add `--parallel.order cp-tp-dp-pp` |
# | a vision transformer, without a causal mask | `torchrun --nproc-per-node=4 -m labcode.train vit_tiny --parallel.cp 4` |
# | SLURM, inside a job of two nodes | `srun --nodes=2 --ntasks-per-node=8 python -m labcode.train gpt_10m --parallel.cp 2 --parallel.tp 2` |
#
# (Under `srun`, export `MASTER_ADDR` and `MASTER_PORT` first, the variables of lesson 04, section 7; lesson 14, section
# 2, writes such a script.)
#
# On GPUs the same class takes PyTorch's fused kernels for its blocks, after it has compared them with the plain one on
# a small example. labcode's ring and gather know no document mask; for packed documents use what section 9 shows.
#
# ## Questions (core, 3 min)
#
# **1.** In the ring of exercise 11.2, rank 0 has nothing to see in the steps 1 to 3. Why may it not stop after step 0?
#
# <details><summary>Answer</summary>
#
# Rank 1 waits for a message from rank 0 in every step, so it would hang. Under a causal mask in the contiguous layout
# rank 1 does not need the contents: a part that rank 0 passes on after step 0 comes from a later rank, and the ranks
# that this part still visits come before that rank. So **all** ranks could agree to stop sending such parts, but one
# rank alone may not. With zig-zag every part is needed everywhere.
# </details>
#
# **2.** You double the number of ranks of a ring and keep S. How do the bytes that a rank sends change, and how does
# its work?
#
# <details><summary>Answer</summary>
#
# A part is half as large, and there are 2p - 1 hops instead of p - 1. So the bytes stay about the same, 4 (p - 1)/p
# times the K and V of the whole sequence. The work of a rank halves. Messages become harder to hide, since the
# operations for each byte are in proportion to S/p.
# </details>
#
# **3.** From lesson 09: a model has 32 query heads and 8 key/value heads, and trains with tp = 4. How large can cp be
# with all-to-all, and how large with a ring?
#
# <details><summary>Answer</summary>
#
# Each rank of tp has 2 key/value heads, so the all-to-all can share them over 2 ranks. If key/value heads are copied,
# the 8 query heads of each rank of tp are the limit, and cp may be 8. A ring takes any number of ranks.
# </details>
#
# ## Recap
#
# | concept | formula or fact | in labcode |
# |---|---|---|
# | merge of two blocks | weights e^(lse of the block)/e^(lse of both) | `parallel.attention_block.merge` |
# | ring, forward | p - 1 messages of K and V; source = (rank - step) mod p | `parallel.context.RingAttention` |
# | ring, backward | K and V go round once more, and dK, dV in 32 bits after them: 4 (p - 1) kv in all | `parallel.context.RingAttention` |
# | messages hide | parts of Φ/(g β) tokens; 1.2 times as many for backward, twice as many with zig-zag | |
# | zig-zag | chunks r and 2p - 1 - r | `parallel.context.take_own` |
# | packed documents | the same for each document, or blocks of tokens dealt by their work | |
# | gather | 2 (p - 1) kv, keeps all keys, takes any mask | `parallel.context.GatherAttention` |
# | all-to-all | 2 (1 + 1/g)(p - 1)/p of kv for g = 1; needs heads | `comm.collectives.all_to_all` |
# | tp or cp | for the same memory a ring sends 0.8/g of the bytes of tp | |
#
# ## Sources
#
# - Liu et al. 2023, *Ring Attention with Blockwise Transformers*, arXiv:2310.01889.
# - Milakov and Gimelshein 2018, *Online normalizer calculation for softmax*, arXiv:1805.02867; Dao et al. 2022,
#   *FlashAttention*, arXiv:2205.14135; Dao 2023, arXiv:2307.08691: backward from the lse alone.
# - Brandon et al. 2023, *Striped Attention*, arXiv:2311.09431: balance under a causal mask. Zig-zag:
#   <https://github.com/zhuzilin/ring-flash-attention>.
# - Jacobs et al. 2023, *DeepSpeed Ulysses*, arXiv:2309.14509: the all-to-all.
# - Llama Team 2024, *The Llama 3 Herd of Models*, arXiv:2407.21783: document masks (3.2), the gather (3.3.2), and the
#   grids (table 4).
# - Fang and Zhao 2024, *USP*, arXiv:2405.07719: all-to-all and ring together. Copied key/value heads:
#   <https://github.com/NVlabs/VILA>, `_ExpandKVFunction`.
# - Wang et al. 2025, *WLB-LLM*, arXiv:2503.17924 (OSDI 2025): each document dealt for itself, and when not.
# - PyTorch 2.13, `torch/distributed/tensor/experimental/_context_parallel`, and the balancer's repair:
#   <https://github.com/pytorch/pytorch/pull/189902>. The entries of a mask: `BlockMask` in
#   `torch/nn/attention/flex_attention.py`.
# - torchtitan: <https://github.com/pytorch/torchtitan/pull/2144>, <https://github.com/pytorch/torchtitan/pull/4450>,
#   and Llama 3.1 8B with cp in `benchmarks/llama3_h100_202412_torchtitan.md`, table 2.
# - NERSC, *Deep Learning at Scale*: a ViT under cp, weights marked for reduction, and the hook in
#   `distributed/mappings.py`, <https://github.com/NERSC/dl-at-scale-training>. The runs on 16 GPUs and the padding for
#   Transformer Engine: its newest edition, *SC25*, logs of November 2025, third epoch,
#   <https://github.com/NERSC/sc25-dl-tutorial>. Parts of an even length: Transformer Engine,
#   `transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py`.
# - MaxText: <https://github.com/AI-Hypercomputer/maxtext/pull/4687>: ring, gather and Ulysses side by side.
# - Shah et al. 2024, *FlashAttention-3*, arXiv:2407.08608: what both kernels reach on an H100 (abstract).
# - Subramanian et al. 2024, *Comprehensive Performance Modeling and System Design Insights for Foundation Models*,
#   arXiv:2410.00273.

# %%
ranks.close()
