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
# # 23 · Mixture of experts
#
# Most large open models are mixtures of experts: each layer has many MLPs, and a token goes through a few of them. In
# this lesson you write the parts that a dense model does not have: the router that chooses, the loss and the bias that
# keep the load even, and the permutation that brings each token to its experts and back. All of it runs in one process.
# Lesson 24 divides the experts over ranks.
#
# ## Goals
#
# - count the parameters of a mixture, all of them and those that one token uses;
# - write a router with its balance loss, and say where its gradient comes from;
# - say what happens to the load without any balance, and write the update of a bias that evens it out;
# - predict how many rows a capacity drops, and how many rows an expert needs to be bound by arithmetic;
# - write the permutation to the experts and back, and check it against the loop over all experts.
#
# **Time**: 104 minutes. A good place for a break is after section 3.
#
# **Needs**: lesson 02 (section 1). For section 4 also lesson 03 (section 1).

# %%
import torch

from course.lab import Ranks, check, compare, plot, show_source, yours
from course.labs import l23_experts as lab
from labcode.models import gpt, moe

ranks = Ranks(2)

# %% [markdown]
# ## 1. More parameters, the same FLOPs (core, 13 min)
#
# A larger model of the same kind, trained on the same tokens, reaches a lower loss. It also costs more: about 6 FLOPs
# for each parameter and token (lesson 02, section 1). That rule holds because in a dense model each token is multiplied
# by each weight.
#
# A **mixture of experts** breaks this link. In place of the MLP of a layer it has E MLPs, the **experts**, and a small
# matrix, the **router**, which chooses k of them for each token. The parameters are those of all E experts. A token
# computes with k of them, so it costs the FLOPs of k. All of them together are the
# **total** parameters of a model; those that one token uses are its **active** ones.
#
# An expert is an ordinary MLP, with H features of a token and F features inside. Those of today's mixtures have a
# **gate**: a third matrix of H × F, whose output multiplies that of the first. So an expert has three matrices of H ×
# F. Take H = 100 and F = 200, 4 layers, 5 experts of which a token uses 2, and 1,000,000 parameters in everything
# else. One expert has 3 · 100 · 200 = 60,000 parameters. The total is 1,000,000 + 4 · 5 · 60,000 = 2,200,000, and
# active are 1,000,000 + 4 · 2 · 60,000 = 1,480,000. The router has only E · H weights in a layer, too few to matter
# here.
#
# **Predict.** Mixtral 8x7B has 32 layers with 8 gated experts, H = 4096 and F = 14336. A token uses 2 experts.
# Attention and embeddings, which are not in the experts, have 1.6 billion parameters. How many billion parameters has
# the model, and how many of them are active?

# %% tags=["predict"]
total_billions = 1.6 + 32 * 8 * 3 * 4096 * 14336 / 1e9
active_billions = 1.6 + 32 * 2 * 3 * 4096 * 14336 / 1e9

# %%
from labcode.config import GPTConfig

mixtral = GPTConfig(
    num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8,
    vocab_size=32000, context_length=4096, tie_embeddings=False,
    positions="rotary", norm="rms", mlp="swiglu", bias=False,
    num_experts=8, experts_per_token=2, expert_ffn_size=14336,
)
with torch.device("meta"):  # shapes without memory
    model = gpt.GPT(mixtral)
total = sum(param.numel() for param in model.parameters())
active = mixtral.num_active_parameters
total, active = total / 1e9, active / 1e9
compare("total, billions", total_billions, total, within=1.02, found="counted")
compare("active, billions", active_billions, active, within=1.05, found="computed")

# %% [markdown]
# So "8x7B" is not 56 billion. Only the MLPs exist eight times; attention, norms and embeddings exist once.
#
# What does "uses" mean, seen from the weights? We send a single character through a small mixture with 8 experts in
# each of 2 layers, of which a character uses 2, and see which experts get a gradient.

# %% tags=["nbval-check-output"]
from labcode.models import layers

small = layers.initialize(gpt.GPT(lab.RUNS["no balance"]), seed=0)
one_character = torch.tensor([[5]])
gpt.loss(small(one_character), one_character).backward()
for name, param in small.named_parameters():
    if name.endswith("experts.up"):
        has_gradient = param.grad.flatten(1).any(1)  # one for each expert
        print(name, has_gradient.nonzero()[:, 0].tolist())
config = lab.RUNS["no balance"]
print(f"{config.num_parameters:,} in all, {config.num_active_parameters:,} active")

# %% [markdown] tags=["exercise"]
# ### Exercise 23.1 · Total and active
#
# Newer models have more and smaller experts. Some also have **shared** experts, through which every token goes, in
# addition to the k that the router chooses. Return (total, active) for a `model` with these fields; leave out the
# router. About 3 lines.
#
# | field | |
# |---|---|
# | `moe_layers` | layers with experts |
# | `hidden_size`, `expert_ffn` | H and F; an expert has three matrices of H × F |
# | `experts`, `top_k` | E and k, in each of these layers |
# | `shared` | shared experts in each of these layers, of the same size |
# | `others` | parameters of everything else |

# %% tags=["exercise"]
def total_and_active(model):
    """(all parameters, those that one token uses)."""
    ### BEGIN SOLUTION
    one = model.moe_layers * 3 * model.hidden_size * model.expert_ffn
    always = model.others + model.shared * one
    return always + model.experts * one, always + model.top_k * one
    ### END SOLUTION

# %% tags=["check"]
check("23.1", total_and_active)

# %% [markdown]
# Here it is applied to four published models, beside what their makers say.

# %%
count = yours("23.1", lab.total_and_active)

print("billions of parameters    counted            published")
for name, model in lab.MIXTURES.items():
    total, active = count(model)
    published_total, published_active = lab.PUBLISHED[name]
    counted = f"{total / 1e9:6.1f} and {active / 1e9:4.1f}"
    print(f"{name:24} {counted}    {published_total:6} and {published_active:4}")

# %% [markdown]
# | model | experts | a token uses | total | active | source |
# |---|---:|---:|---:|---:|---|
# | Mixtral 8x7B, 2024 | 8 | 2 | 47 B | 13 B | arXiv:2401.04088 |
# | gpt-oss-120b, 2025 | 128 | 4 | 116.8 B | 5.1 B | arXiv:2508.10925 |
# | Qwen3-235B-A22B, 2025 | 128 | 8 | 235 B | 22 B | arXiv:2505.09388 |
# | DeepSeek-V3, 2024 | 256 and 1 shared | 8 and 1 | 671 B | 37 B | arXiv:2412.19437 |
#
# For gpt-oss the counted 5.7 differ from the published 5.1, because its makers do not count the embedding among the
# active ones: a token reads a single row of it (201,088 · 2880 = 0.58 billion). There is no agreed rule, so say which
# one you use.
#
# **Takeaway: the total parameters of a mixture are those of all experts, and its FLOPs are those of the k experts that
# a token uses. What must be stored, and what must be sent, goes with the total.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* People multiply everything by 8, attention included, and forget the layers. Ask: which of the
# two numbers decides the memory of the optimizer, and which the seconds of a step? (Total and active.) For the room:
# why does the single character give a gradient to exactly two experts of each layer, and to which rows of the router?
# (To the rows of the chosen ones only, as section 2 shows.)

# %% [markdown]
# ## 2. The router (core, 22 min)
#
# The router is one matrix W of E × H. For a token x it gives E numbers, the logits W x, and softmax makes scores of
# them: numbers above 0 that add up to 1. The k experts with the largest scores are chosen, and the output is the
# weighted sum of what they make of x:
#
# $$y = \sum_{e\ \text{chosen}} w_e\ \text{expert}_e(x)$$
#
# Where do the weights come from? For example, take four experts with the logits (2, 1, 0, -1), and k = 2.
#
# - **Softmax first**, as in Switch Transformer: the scores are (0.644, 0.237, 0.087, 0.032), and the weights are 0.644
#   and 0.237. They do not add up to 1.
# - **Divided by their sum**, as in Mixtral: 0.644 / 0.881 = 0.731 and 0.237 / 0.881 = 0.269. That is the same as a
#   softmax of the two largest logits alone, since the denominator of the whole softmax cancels.
#
# The *choice* has no gradient: a small change of a logit changes nothing about who is chosen. The *weights* have one.
# If expert 0 would have lowered the loss, its weight should grow, and the gradient of the weight says so. That is how
# the router learns. If the weights are divided by their sum, it learns only about the experts that were chosen. With
# softmax first the denominator contains all logits, so the others get a gradient as well.
#
# **Predict.** A token has 8 logits, and its weights are divided by their sum. To how many of its 8 logits does the
# output send a gradient, with k = 2? And with k = 1?

# %% tags=["predict"]
with_k_2 = 2
with_k_1 = 0  # a single weight, divided by its sum, is 1 whatever the logits are

# %%
def logits_with_gradient(top_k):
    """How many of a token's 8 logits get a gradient from its output."""
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(8, generator=generator, dtype=torch.float64)
    made = torch.randn(8, 4, generator=generator, dtype=torch.float64)  # by the experts
    logits.requires_grad_()
    largest, chosen = logits.softmax(-1).topk(top_k)
    weights = largest / largest.sum()
    output = (weights[:, None] * made[chosen]).sum(0)
    output.sum().backward()
    return (logits.grad.abs() > 1e-12).sum().item()

compare("logits, k = 2", with_k_2, logits_with_gradient(2), within=1, found="counted")
compare("logits, k = 1", with_k_1, logits_with_gradient(1), within=1, found="counted")

# %% [markdown]
# With k = 1 a weight that is divided by its own sum is always 1, and the router would not learn from the output at all.
# Switch Transformer, which has k = 1, therefore multiplies by the score itself.
#
# The router also needs to know about experts that are chosen too often. A **balance loss** tells it. T tokens make T
# · k choices. Each is called a **row**: one token on its way to one of its experts (section 5 makes matrices of
# them). Let f_e be the fraction of all choices that fall on expert e, and let P_e be the mean over all tokens of the
# score of e. The loss is
#
# $$L = E \sum_e f_e\,P_e$$
#
# (Fedus et al. 2021, equations 4 to 6, written there for k = 1). With an even load f_e = 1/E, and L = E · Σ P_e / E =
# 1. If all tokens choose the same k experts, with nearly the whole score, L is nearly E / k. The counts f have no
# gradient, but P has: it pushes each score down in proportion to how often its expert was chosen.
#
# The loss is added with a small coefficient such as 0.01. Details differ between programs. The `transformers` library
# (5.23, Mixtral) divides the counts by the number of tokens, not of choices, so its loss is k times as large: k, and
# not 1, with an even load. labcode takes f and P over each sequence, as DeepSeek-V3 does, and averages over the
# sequences. Qwen3 takes them over the whole global batch.
#
# The same router often gets a **z-loss**, the mean of (log Σ exp logit)² (Zoph et al. 2022, equation 5). It keeps the
# logits small, so that their softmax stays accurate in 16 bits.

# %% [markdown] tags=["exercise"]
# ### Exercise 23.2 · A router with its balance loss
#
# `x` is [T, H] and `weight` is [E, H]. Return three things:
#
# 1. the weights [T, k]: softmax over all experts, the k largest, divided by their sum;
# 2. the numbers of the chosen experts [T, k], in the same order;
# 3. the balance loss, one number, with f and P over all T tokens.
#
# `torch.topk` gives values and places; `torch.bincount(numbers, minlength=E)` counts. The check computes in float64.
# About 6 lines.

# %% tags=["exercise"]
def route(x, weight, top_k):
    """(weights [T, k], experts [T, k], balance loss)."""
    ### BEGIN SOLUTION
    num_experts = len(weight)
    scores = torch.softmax(x @ weight.T, dim=-1)
    largest, experts = scores.topk(top_k, dim=-1)
    weights = largest / largest.sum(-1, keepdim=True)
    rows = torch.bincount(experts.flatten(), minlength=num_experts)
    fraction = rows / rows.sum()
    loss = num_experts * (fraction * scores.mean(0)).sum()
    return weights, experts, loss
    ### END SOLUTION

# %% tags=["check"]
check("23.2", route)

# %% [markdown]
# Here is labcode's router. It does not hand its losses on to the end of the model. They are attached to the weights,
# and when backward comes to the weights it adds the gradient of the losses there.

# %%
show_source(moe.Router.forward)

# %% [markdown]
# **Takeaway: the router learns through the weights, never through the choice itself. The balance loss
# E Σ f P is 1 when the load is even, and its gradient flows through the scores alone.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Common mistakes: P over chosen scores only, f from first choices only, a forgotten E, and f
# divided by T instead of T k. Ask: what does the loss do if f and P disagree, with many tokens that only just prefer
# expert 3? (f_3 is large and P_3 is not; the loss is close to 1 and does little. This is why it is slow at first.)
# For the room: why float32 for the router in a bfloat16 model? (Close logits decide who is chosen, and are rounded to
# ties.)

# %% [markdown]
# ## 3. Balance (core, 18 min)
#
# Why should the load be even? An expert that gets hardly any token hardly learns, and its parameters are stored for
# nothing. And where experts are on different GPUs, the step takes as long as the busiest one.
#
# Let us see what a router does when nobody cares. We train three small GPTs on Shakespeare for 200 steps, with 2
# layers of 8 experts and k = 2. One has no balance at all, one has the balance loss with the coefficient 0.01, and
# one has the bias that you will write in a moment. The third also takes its scores from a sigmoid, as DeepSeek-V3
# does, and each run has one start. So look at what each of them does; they are no contest.
#
# **Predict.** What has become of the 8 experts of the second layer *without any balance*, in the mean of the last 20 of
# the 200 steps: "the load stays even", "some experts get almost nothing", or "one expert is chosen by all"? (Almost
# nothing is less than a quarter of an even load. If at least 95 % of the tokens choose one expert, that is the answer,
# whatever the others get.)

# %% tags=["predict"]
without_balance = "some experts get almost nothing"

# %%
trainings = lab.all_trained(ranks)

OUTCOMES = (
    "the load stays even",
    "some experts get almost nothing",
    "one expert is chosen by all",
)

def last_load(run):
    """Each expert's load in the second layer, where 1 is an even load."""
    loads = trainings[run].loads[-20:, 1].mean(0)  # the last 20 steps
    return loads * lab.EXPERTS

load = last_load("no balance")
outcome = OUTCOMES[0]
if load.min() < 0.25:
    outcome = OUTCOMES[1]
if load.max() > 0.95 * lab.EXPERTS / lab.TOP_K:
    outcome = OUTCOMES[2]
compare("without balance", without_balance, outcome, options=OUTCOMES)
for run in trainings:
    load = last_load(run)
    starved = (load < 0.25).sum().item()
    print(f"{run:13} busiest {load.max():.1f} times an even load, {starved} starved")
print(f"if all tokens chose it: {lab.EXPERTS / lab.TOP_K:.1f} times an even load")

# %% tags=["figure"]
loads = {}
for run, training in trainings.items():
    loads[run] = training.loads[:, 1]
plot.expert_loads(loads, caption="23.loads")

# %% [markdown]
# Each band is an expert, and its height is the fraction of the rows that it gets. With an even load all bands end on
# the dashed lines. In the first steps the router changes fast, and the load swings in all three runs. Without balance
# the same few experts then keep most of it: an expert that is chosen gets a gradient and becomes a little better, and
# one that is not stays as it is. With the bias no expert starves after about 70 steps, and the load becomes nearly
# even. With the balance loss it swings on, and an expert still falls below a quarter of an even load for some steps
# at a time.
#
# The gradient of the balance loss pulls at the same router weights as that of the language model, and not in the same
# direction. If its coefficient is too small the load is uneven, and if it is too large the choice is worse; 200 steps
# do not show that. Wang et al. (2024) therefore leave the gradient alone and add a **bias** b_e to the score, for the
# choice only:
#
# $$\text{chosen}: \text{the } k \text{ largest of } s_e + b_e, \qquad w_e = \frac{s_e}{\sum_{\text{chosen}} s}$$
#
# After each step the bias of an expert with more rows than the mean goes down by a fixed rate u, and that of an expert
# with fewer rows goes up by u:
#
# $$b_e \leftarrow b_e + u \cdot \text{sign}(\bar{n} - n_e)$$
#
# Here n_e are the rows of expert e in this step and n̄ is their mean. For example, with 3 experts, u = 0.01 and (5,
# 2, 2) rows the mean is 3, and the biases move by (-0.01, +0.01, +0.01). DeepSeek-V3 does this, with scores from a
# sigmoid in place of softmax (equations 12 to 16 of its report), and keeps a very small balance loss for each
# sequence.

# %% [markdown] tags=["exercise"]
# ### Exercise 23.3 · The bias and its update
#
# `scores` is [T, E], each from 0 to 1, and `bias` is [E]. Return the weights [T, k], the chosen experts [T, k], and the
# bias of the next step [E], as a new tensor. The weights do not contain the bias. About 6 lines.

# %% tags=["exercise"]
def choose_with_bias(scores, bias, top_k, rate):
    """(weights [T, k], experts [T, k], the bias of the next step [E])."""
    ### BEGIN SOLUTION
    experts = (scores + bias).topk(top_k, dim=-1).indices
    chosen = scores.gather(-1, experts)
    weights = chosen / chosen.sum(-1, keepdim=True)
    rows = torch.bincount(experts.flatten(), minlength=len(bias)).double()
    step = rate * torch.sign(rows.mean() - rows)
    return weights, experts, bias + step
    ### END SOLUTION

# %% tags=["check"]
check("23.3", choose_with_bias)

# %% [markdown]
# In a step of several micro-batches, or on several ranks, the rows of *all* of them count before the bias moves once.
# labcode's trainer adds them up after the optimizer's step.
#
# **Takeaway: without balance a few experts take most of the tokens and others starve. A balance loss evens the load out
# by a gradient. A bias that is added for the choice alone does so without any gradient.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* The two runs with balance differ in the scores as well (softmax and sigmoid), so the figure is
# no contest between them. With k = 1 the collapse is stronger: at step 30 one expert of the first layer had 85 % of
# the tokens in our trial. The update in the wrong direction is the common mistake, and it makes the collapse faster.
# Ask: why the sign and not the gap itself? (The size of a gap depends on the batch; a fixed step cannot overshoot by
# much.) Ask: is the bias a parameter? (It is stored in checkpoints, and no optimizer may touch it, weight decay
# included.)

# %% [markdown]
# ## 4. Capacity, and how many rows are enough (core, 16 min)
#
# In the first large mixtures each expert had a buffer of fixed size, its **capacity**. For a sequence of S tokens it
# holds
#
# $$C = \lceil c\,S\,k / E \rceil$$
#
# rows, where c is the **capacity factor**: with c = 1 an expert has room for an even load and no more. What does not
# fit is **dropped**: the expert computes nothing for that token, which keeps what its other experts give, and the
# residual. Which rows are dropped is a choice; in labcode first choices go before second ones, and earlier tokens
# before later ones. Fixed sizes were needed for compilers that want to know each shape in advance (Lepikhin et al.
# 2020).
#
# For example, 12 tokens with k = 1 and 3 experts make an even load of 4. With c = 1.25 the capacity is 5. If the
# experts get (8, 3, 1) rows, the first drops 3, and the two others have 2 + 4 = 6 places empty.
#
# **Predict.** 128 tokens with k = 1 choose 8 experts: (40, 26, 20, 14, 12, 8, 6, 2) rows. How many rows are dropped
# with c = 1.25? And with which c is none dropped, the smallest one in steps of 0.25?

# %% tags=["predict"]
dropped_rows = (40 - 20) + (26 - 20)  # C = 1.25 * 128 / 8 = 20
smallest_factor = 40 / 16

# %%
experts = lab.with_loads([40, 26, 20, 14, 12, 8, 6, 2])

def dropped(factor):
    """How many of the 128 rows labcode's dispatch leaves out."""
    kept = moe.dispatch(experts, num_experts=8, capacity_factor=factor).counts.sum()
    return experts.numel() - kept.item()

factor = 1.0
while dropped(factor) > 0:
    factor += 0.25
compare("dropped rows", dropped_rows, dropped(1.25), within=1, found="counted")
compare("smallest factor", smallest_factor, factor, within=1, found="counted")

# %% [markdown]
# To drop nothing, c must be as large as the busiest expert's load, in multiples of an even one. Then the buffers of
# the other experts are mostly empty. Here are the three trainings of section 3 again: which fraction of the rows of
# the last 20 steps would a capacity drop? (labcode counts the capacity over each sequence; here it is counted over
# the batch.)

# %% tags=["figure"]
trainings = lab.all_trained(ranks)
factors = [1 + 0.1 * number for number in range(31)]
curves = {}
for run, training in trainings.items():
    load = training.loads[-20:, 1]  # of each step and expert, second layer
    too_many = [load - factor / lab.EXPERTS for factor in factors]
    curves[run] = [each.clamp(min=0).sum(1).mean().item() for each in too_many]
plot.lines(curves, x=factors, caption="23.dropped")

# %% [markdown]
# A layer can also be **dropless**: the rows of an expert are however many there are, and one kernel computes all
# experts with their different numbers of rows (Gale et al. 2022). An uneven load then costs time, and no token is lost.
#
# How many rows does an expert need? Its matmuls are linear layers of n rows, and in bfloat16 such a layer has about n
# FLOPs for each byte as long as the bytes of its weights dominate (lesson 03, section 1). The measured ridge of the
# H100 in lesson 03 is 323 FLOPs for each byte, between 827 TFLOP/s and 2.56 TB/s.
#
# **Predict.** An expert gets 64 rows. What fraction of the 827 TFLOP/s does its matmul reach, from 0 to 1?

# %% tags=["predict"]
fraction_of_rate = 64 / 323

# %%
from course.labs.l03_step import recorded
from labcode.measure import roofline

device, gpu = recorded("roofline")
peak = gpu["speed"]["bfloat16"]["flops_per_s"]
rates = {}
for row in gpu["dots"]["bfloat16"][1:]:  # a linear layer, 8192 to 8192
    dot = roofline.Dot(**row)
    rates[int(dot.name.split()[-2])] = dot.flops_per_s
compare("fraction of the rate", fraction_of_rate, rates[64] / peak, within=1.3)
print("rows  fraction of the rate, measured on", device["device"])
for rows, rate in rates.items():
    print(f"{rows:5} {rate / peak:6.2f}")

# %% [markdown]
# (1.3 is allowed, because the rule leaves out the bytes of the rows, and the rate of a kernel varies with its size. The
# 827 are those of the best matmul in lesson 03, which this layer does not reach with any number of rows.)
#
# A dense layer is bound by arithmetic from about 323 tokens at a time on. An expert gets a fraction k / E of all
# rows, so a mixture whose experts are all on one GPU needs E / k times as many. These numbers are computed, not
# measured:

# %%
for name, model in lab.MIXTURES.items():
    tokens = 323 * model.experts / model.top_k
    print(f"{name:16} {tokens:7,.0f} tokens for 323 rows in each expert")

# %% [markdown]
# So a mixture wants many tokens at once. Expert parallelism helps here too: with the experts divided over ranks, each
# expert gets the rows of the tokens of all these ranks (lesson 24).
#
# **Takeaway: a capacity factor c drops what an expert gets beyond c times an even load; dropless layers pay with time
# instead. An expert is bound by arithmetic only with some hundreds of rows, and that takes E / k times as many
# tokens.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* People forget that the capacity counts rows (S k / E), not tokens (S / E). labcode counts it for
# each sequence, so that a layer's result does not depend on how a batch is cut; the figure counts over the batch. Ask:
# what does dropping mean at inference? (The output of a token depends on the other tokens of its batch.)

# %% [markdown]
# ## 5. There and back: a permutation (core, 25 min)
#
# How does one compute this? The definition is a loop over all experts, each of which computes all tokens, and most of
# the results are multiplied by a weight of 0.

# %%
show_source(lab.in_a_loop)

# %% [markdown]
# The remedy is to sort. Each token is copied k times, which makes the T · k **rows**: row r belongs to token r // k.
# The rows are sorted by the number of their expert, so that the rows of an expert lie one after the other, and it
# reads them as one matrix. What the experts made is brought back to its token, and added up by the weights.

# %% tags=["figure"]
chosen = [[2, 0], [0, 3], [2, 0], [3, 2], [0, 2]]
plot.expert_rows(chosen, num_experts=4, caption="23.rows")

# %% [markdown]
# For example, 2 tokens with k = 2 choose (1, 0) and (2, 1). In one line the choices are (1, 0, 2, 1), of rows 0 to 3.
# Sorted by expert the rows are 1, 0, 3, 2: that list is the **order**. Their tokens are 1 // 2 = 0, 0, 1 and 1, and the
# experts have 1, 2 and 1 rows.
#
# **Predict.** 3 tokens choose the experts (1, 2), (0, 1) and (2, 1) of 4. To which tokens do the sorted rows belong,
# and how many rows does each of the 4 experts get? Rows of the same expert stay in the order of their numbers. Give
# lists.

# %% tags=["predict"]
tokens_of_rows = [1, 0, 1, 2, 0, 2]
rows_of_experts = [1, 3, 2, 0]

# %%
experts = torch.tensor([[[1, 2], [0, 1], [2, 1]]])  # a batch of one sequence
order, counts = moe.dispatch(experts, num_experts=4)
compare("tokens of rows", tokens_of_rows, order // 2, found="computed")
compare("rows of experts", rows_of_experts, counts, found="computed")

# %% [markdown] tags=["exercise"]
# ### Exercise 23.4 · To the experts and back
#
# `x` is [T, H], `weights` and `experts` are [T, k], and `num_experts` is E. `mlps(rows, counts)` computes all
# experts: it takes [T k, H] rows that are sorted by expert and how many rows each of the E experts has, and returns
# what they made, [T k, H] in the same order. Return each token's weighted sum, [T, H]. Call `mlps` once.
#
# The check compares with the loop over all experts, output and gradients, in float64, with experts that get no token
# and with all tokens at one. About 8 lines.

# %% tags=["exercise"]
def through_experts(x, weights, experts, mlps, num_experts):
    """Each token's weighted sum of what its experts make of it, [T, H]."""
    ### BEGIN SOLUTION
    top_k = experts.shape[1]
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=num_experts)
    done = mlps(x[order // top_k], counts)
    back = done[order.argsort()]  # in the order of the choices again
    parts = back.view(len(x), top_k, -1) * weights[..., None]
    return parts.sum(1)
    ### END SOLUTION

# %% tags=["check"]
check("23.4", through_experts)

# %% [markdown]
# **Predict.** With 8 experts and k = 2, how many times as many FLOPs does the loop over all experts need?

# %% tags=["predict"]
times_as_many = 4

# %%
from torch.utils.flop_counter import FlopCounterMode

from labcode.models.layers import activation

layer = moe.Experts(hidden_size=64, ffn_size=96, num_experts=8)
generator = torch.Generator().manual_seed(5)
for param in layer.parameters():
    torch.nn.init.normal_(param, std=0.1, generator=generator)
x = torch.randn(200, 64, generator=generator)
weights, experts, _ = lab.route(x, torch.randn(8, 64, generator=generator), top_k=2)

def expert_mlp(number):
    """One expert of the layer, as a function of its rows."""
    def mlp(rows):
        inside = activation(rows @ layer.up[number].T, "swiglu")
        return inside @ layer.down[number].T
    return mlp

expert_mlps = [expert_mlp(number) for number in range(8)]
with FlopCounterMode(display=False) as of_loop:
    in_loop = lab.in_a_loop(x, weights, experts, expert_mlps)
with FlopCounterMode(display=False) as of_sorted:
    in_order = lab.through_experts(x, weights, experts, layer.mlps, 8)
ratio = of_loop.get_total_flops() / of_sorted.get_total_flops()
compare("times as many FLOPs", times_as_many, ratio, within=1, found="counted")
print(f"largest difference of the results: {(in_loop - in_order).abs().max():.0e}")

# %% [markdown]
# **In plain PyTorch.** `torch.nn.functional.grouped_mm` multiplies each group of rows by the matrix of its group, in
# one call; `offs` are the places where the groups end. `index_add` brings the rows back. PyTorch 2.13 documents it
# for bfloat16 on GPUs, and it also computes on a CPU, in float32 as well.

# %%
from torch.nn import functional as F


def plain_pytorch(x, weights, experts, up, down):
    """A dropless layer of gated experts, forward."""
    top_k = experts.shape[1]
    order = experts.flatten().argsort(stable=True)
    tokens = order // top_k
    counts = torch.bincount(experts.flatten(), minlength=len(up))
    ends = counts.cumsum(0).to(torch.int32)
    inside = F.grouped_mm(x[tokens], up.transpose(1, 2), offs=ends)
    gate, value = inside.chunk(2, dim=-1)
    done = F.grouped_mm(F.silu(gate) * value, down.transpose(1, 2), offs=ends)
    weighted = done * weights.flatten()[order, None]
    return torch.zeros_like(x).index_add(0, tokens, weighted)

generator = torch.Generator().manual_seed(6)
x = torch.randn(1, 200, 64, generator=generator)
layer = moe.MoE(64, 96, num_experts=8, top_k=2, scoring="softmax_of_chosen")
for param in layer.parameters():
    torch.nn.init.normal_(param, std=0.1, generator=generator)
weights, experts = layer.router(x)
ours = layer(x)[0]
theirs = plain_pytorch(
    x[0], weights[0], experts[0], layer.experts.up, layer.experts.down
)
print(f"largest difference: {(ours - theirs).abs().max():.0e} (0, or a last bit)")

# %% [markdown]
# labcode's way back differs. On a GPU `index_add` adds the rows of a token in any order, so the last bits change from
# run to run. labcode gathers the rows of each token and adds them up in the order of its choices:

# %%
show_source(moe.combine)

# %% [markdown]
# **Takeaway: sorted by expert, the rows of each expert are one matrix. The way back is the inverse permutation, and the
# weighted sum over a token's k rows. It is exactly the loop over all experts, with k / E of its FLOPs.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* What goes wrong: `order % T` for `order // k`, `minlength` forgotten (the last expert has no
# rows), weights in the order of the choices multiplied with sorted rows, and `out[tokens] += rows`, which keeps one row
# of each token. Ask: why is the gradient of the sort right, if a sort has none? (It is a permutation of rows; indexing
# has the inverse as its backward.) This sort is what an all-to-all needs in lesson 24: rows for one rank lie together.

# %% [markdown]
# ## 6. A mixture beside a dense model (core, 5 min)
#
# Does it pay? The recipe `gpt_moe_tiny` has 2 layers of 8 experts with F = 96, and a token uses 2 of them. The fair
# comparison is a dense model with the same **active** parameters, whose MLPs are as large as 2 experts: F = 192. Apart
# from the router it needs the same FLOPs for each token.

# %% tags=["nbval-check-output"]
from dataclasses import replace

from labcode import recipes

mixture = replace(recipes.get("gpt_moe_tiny").model, vocab_size=83)
dense = replace(mixture, num_experts=0, ffn_size=2 * 96)
print(f"mixture: {mixture.num_parameters:,}")
print(f"active:  {mixture.num_active_parameters:,}")
print(f"dense:   {dense.num_parameters:,}")

# %% [markdown]
# Both were trained on Shakespeare's characters for 1,500 steps, each from two starts, that is from two different sets
# of random weights and orders of the batches. That takes some minutes each on a CPU, so the losses here are recorded.
# In 1,500 steps a model reads 3 million of the text's 5 million characters. We call one of the two models **ahead**
# if both of its starts end with a lower validation loss than both starts of the other. A third line, "dense, same
# total", has one start of a dense model with as many parameters as the whole mixture. Nothing so far decides this
# question: it is a guess.
#
# **Predict.** After 1,500 steps, which is ahead: "mixture", "dense" or "neither"?

# %% tags=["predict"]
ahead = "neither"

# %%
ends = {}
for run, by_seed in lab.RECORDED.items():
    ends[run] = [losses[-1] for losses in by_seed.values()]
of_mixture, of_dense = ends["mixture"], ends["dense, same active"]
found = "neither"
if max(of_mixture) < min(of_dense):
    found = "mixture"
if max(of_dense) < min(of_mixture):
    found = "dense"
answers = ("mixture", "dense", "neither")
compare("ahead", ahead, found, options=answers)
for run, losses in ends.items():
    print(f"{run:19}", ", ".join(f"{loss:.3f}" for loss in losses))

# %% tags=["figure"]
curves = {}
for run, by_seed in lab.RECORDED.items():
    for seed, losses in by_seed.items():
        curves[f"{run}, start {seed}"] = losses
plot.lines(curves, x=lab.RECORDED_STEPS, caption="23.recorded")

# %% [markdown]
# The mean of the mixture's two starts is 0.011 nats lower, and the two starts of each model differ by more than twice
# as much, so these runs show no advantage. In so short a training more parameters help little: even the dense model
# with the same *total* parameters (F = 768, one start), which needs three times the FLOPs for each token, ends only
# 0.04 nats below the mean of the dense model with the same active parameters. What mixtures gain, they gain where
# more parameters help: Fedus et al. report that Switch Transformers, built from T5-Base and T5-Large, train up to
# seven times as fast with the same computing resources.
#
# **Takeaway: a mixture is compared with a dense model of the same active parameters, since both need the same FLOPs.
# Two starts say what chance alone changes, and a gap has to be seen beside it.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* The commands: `python -m labcode.train gpt_moe_tiny --train.seed 0`, and with
# `--model.num_experts 0 --model.ffn_size 192` for the dense model. Each of the 8 experts sees a quarter of the rows,
# so after 1,500 steps it has learned from as many as the dense MLP after 375. Ask: which comparison would be unfair?
# (The same total parameters: such a dense model needs several times the FLOPs for each token.)

# %% [markdown]
# ## From here to GPUs and SLURM (core, 1 min)
#
# On one GPU nothing changes: `python -m labcode.train gpt_moe_tiny` trains a mixture, and `--model.num_experts`,
# `--model.experts_per_token`, `--model.router_balance`, `--model.router_bias_rate` and `--model.expert_capacity` are
# what this lesson is about. On several ranks, started by torchrun or by the generated SLURM script, `--parallel.ep 4`
# divides the experts over four ranks; lesson 24 writes that by hand. In Megatron-LM the options are `--num-experts`,
# `--moe-router-topk` and `--moe-aux-loss-coeff`, which is 0 if you do not give it. For the bias they are
# `--moe-router-enable-expert-bias` with `--moe-router-score-function sigmoid`; `--moe-router-bias-update-rate` is u.
#
# ## Questions (core, 4 min)
#
# **1.** A mixture has 16 experts of which a token uses 2. You double the number of experts and halve F. What changes in
# the total, and what in the active parameters?
#
# <details><summary>Answer</summary>
#
# The total stays, and the active parameters of the experts halve, unless k is doubled as well. Many small experts
# with a larger k are what Qwen3 and DeepSeek-V3 have.
# </details>
#
# **2.** The counts f in the balance loss have no gradient. How can the loss change the load?
#
# <details><summary>Answer</summary>
#
# Through P. The gradient with respect to the score of expert e is proportional to f_e, so that the scores of busy
# experts are pushed down more than those of idle ones, until other experts are chosen.
# </details>
#
# **3.** Somebody adds the bias of section 3 to the weights as well. What goes wrong?
#
# <details><summary>Answer</summary>
#
# An expert with a large bias would be mixed in with a large weight, although the router thinks little of it. The output
# of the layer would jump with each move of a bias.
# </details>
#
# **4.** Why does an expert that was never chosen not come back by itself?
#
# <details><summary>Answer</summary>
#
# Where the weights are divided by their sum, the output sends no gradient to it, nor to its row of the router. It comes
# back only if the logits of others fall below its own, or by the balance loss, or by a bias.
# </details>
#
# **5.** From lesson 03: a dense linear layer is bound by arithmetic from some 300 tokens on. Why does a mixture with
# E = 128 and k = 4 need about 10,000?
#
# <details><summary>Answer</summary>
#
# What counts is the number of rows of one expert. It gets k / E of the rows, 1 / 32 here, and its weights have to be
# read for those few.
# </details>

# %%
ranks.close()

# %% [markdown]
# ## Recap
#
# | | |
# |---|---|
# | total, active | parameters of all experts; those that one token uses |
# | router | scores softmax(W x); the k largest, divided by their sum, are the weights |
# | gradient | through the weights of the chosen experts; the choice has none |
# | balance loss | E Σ f P, times about 0.01; 1 when the load is even |
# | bias | added to the scores for the choice alone; moves by ± u after each step |
# | capacity | C = ceil(c S k / E) rows; more are dropped; dropless: as many as come |
# | rows an expert needs | some hundreds on an H100; E / k times as many tokens |
# | dispatch, combine | rows sorted by expert; the inverse permutation, and a weighted sum |
#
# ## Sources
#
# - Shazeer et al. 2017, *Outrageously Large Neural Networks*, arXiv:1701.06538: the layer.
# - Fedus et al. 2021, *Switch Transformers*, arXiv:2101.03961, section 2.2: capacity factor, balance loss.
# - Lepikhin et al. 2020, *GShard*, arXiv:2006.16668: capacity, algorithm 1.
# - Zoph et al. 2022, *ST-MoE*, arXiv:2202.08906, equation 5: the z-loss.
# - Gale et al. 2022, *MegaBlocks*, arXiv:2211.15841: dropless.
# - Wang et al. 2024, *Auxiliary-Loss-Free Load Balancing*, arXiv:2408.15664: the bias.
# - DeepSeek-AI 2024, *DeepSeek-V3 Technical Report*, arXiv:2412.19437, equations 12 to 20.
# - Jiang et al. 2024, *Mixtral of Experts*, arXiv:2401.04088.
# - Qwen Team 2025, *Qwen3 Technical Report*, arXiv:2505.09388.
# - OpenAI 2025, *gpt-oss-120b & gpt-oss-20b Model Card*, arXiv:2508.10925.
# - `transformers` 5.23, `models/mixtral/modeling_mixtral.py`: `load_balancing_loss_func`.
