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
# # 26 · Two fleets: reinforcement learning
#
# In reinforcement learning a model learns from its own answers. One part of a job writes answers, the **generator**.
# Another part, the **learner**, updates the weights so that good answers become more likely. Both have the same
# model, cut in different ways, and after each update the generator needs the new weights. Many bug reports about such
# jobs concern this transfer of weights: a shard is sent as if it were whole, sizes of tp do not match, weights never
# arrive, or the two sides no longer agree on how likely a token is. Most of these mistakes raise no error. You write
# the loss and the way of the weights, bit for bit, and learn which numbers show that something is wrong.
#
# ## Goals
#
# - turn rewards into advantages, and write the clipped loss of GRPO with three ways to average;
# - send weights from one layout to another by boxes, each number once, and predict the bytes;
# - say what a generator that lags behind does to ratios and to rewards, and bound the lag;
# - find from ratios, rewards and differences of weights what is wrong between two fleets.
#
# **Time**: 160 minutes, and 10 more for what is optional. Good places for a break are after section 2, in the middle of
# section 3, before the q, k and v, and after section 3.
#
# **Needs**: lesson 01 (sections 1, 2, 4), lesson 08 (section 1), lesson 09 (sections 1, 2) and lesson 13 (section 1).
# For section 5 also lesson 18 (section 1).

# %%
import torch
import torch.distributed as dist

from course.lab import Ranks, check, compare, plot, yours
from course.labs import l26_two_fleets as lab
from labcode.train import brackets

torch.set_num_threads(1)  # the model is so small that a second core only disturbs
ranks = Ranks(4)

# %% [markdown]
# ## 1. A reward in place of a label (core, 20 min)
#
# In supervised training somebody knows the right token at each place. Often nobody does, but a program can **check** an
# answer: does the proof hold, do the tests pass? Such a check gives a number for the whole answer, its **reward**. It
# does not say which token was wrong.
#
# Our task is small enough for two cores. The prompt opens six brackets, and the answer has to close them in the right
# order and end with a full stop. The reward is 1 for the right answer and 0 for any other. The model is a GPT of two
# layers with 32 features. It has had 90 steps of supervised training, because a model that never gives a right answer
# never gets a reward, and then there is nothing to learn from.
#
# For each prompt the model draws a **group** of 16 answers. `generate` draws token by token and keeps, for each
# new token, the logarithm of its probability. We will need it. `counts` says which tokens belong to the answer: all
# up to and including its first full stop.

# %% tags=["nbval-check-output"]
from labcode.models.generate import generate

model = lab.started()
random = torch.Generator().manual_seed(0)
prompts = brackets.draw_prompts(16, 6, random).repeat_interleave(16, 0)
drawn = generate(model, prompts, 7, generator=random, end=brackets.END)
rewards = brackets.rewards(prompts, drawn.tokens[:, 6:]).view(16, 16)
for number in range(6):
    text = brackets.text(drawn.tokens[number])
    log_p = drawn.log_probs[number].sum().item()
    reward = rewards[0, number].item()
    print(f"{text[:6]}  {text[6:]}  log p {log_p:6.2f}  reward {reward:.0f}")
print(f"right of the first group: {rewards[0].sum():.0f} of 16")
print(f"mean reward of all 256 answers: {rewards.mean():.2f}")

# %% [markdown]
# About half of the answers are right. Which of them should become more likely? A reward of 1 says little by itself: on
# an easy prompt everybody gets it. So an answer is compared with the others of its group. Its **advantage** is its
# reward less the mean reward of the group. GRPO ("group relative policy optimization") divides this by the standard
# deviation of the group, so that all groups have about the same scale:
#
# $$A_i = \frac{R_i - \mathrm{mean}(R)}{\mathrm{std}(R) + 10^{-6}}$$
#
# An answer with a positive advantage will be made more likely, one with a negative advantage less likely. The small
# number in the denominator is for groups whose rewards are all alike: there the advantage is 0, and not 0 / 0. We
# take the standard deviation as `torch.std` computes it, with G - 1 in its denominator, as TRL does, the library of
# Hugging Face for fine-tuning by rewards.
#
# **Predict.** In a group of 16, 12 answers are right. Leave out the sign: how many times as large is a wrong answer's
# advantage as a right one's?

# %% tags=["predict"]
times_as_large = (12 / 16) / (1 - 12 / 16)

# %% tags=["nbval-check-output"]
group = torch.tensor([1.0] * 12 + [0.0] * 4)
above = group - group.mean()
compare("times", times_as_large, (above[-1] / above[0]).abs().item(), within=1)
print(f"right {above[0]:.2f}, wrong {above[-1]:.2f}; their sum is {above.sum():.0f}")

# %% [markdown]
# The advantages of a group add up to zero. What is rare in its group counts most: a single wrong answer among right
# ones, or a single right one among wrong ones.

# %% [markdown] tags=["exercise"]
# ### Exercise 26.1 · Advantages
#
# `rewards` is a tensor [.., G], with the rewards of a group along the last dim. Return the advantages, of the same
# shape, by the formula above. The check has groups of several sizes, and one whose rewards are all alike. One to three
# lines.

# %% tags=["by-hand", "exercise"]
def advantages(rewards):
    """[.., G] -> [.., G]: how much better than its group each answer is."""
    ### BEGIN SOLUTION
    above = rewards - rewards.mean(-1, keepdim=True)
    return above / (rewards.std(-1, keepdim=True) + 1e-6)
    ### END SOLUTION

# %% tags=["check"]
check("26.1", advantages)

# %% [markdown]
# A group whose answers are all right, or all wrong, teaches nothing: all of its advantages are zero, and the work of
# drawing 16 answers is lost. How often does that happen? All prompts have six brackets. If each answer were right
# with a chance of 0.53, all 16 would be alike in $0.53^{16} + 0.47^{16}$ of the groups: 4 of 100,000.
#
# **Predict.** We draw 200 groups. Are those that teach nothing "as rare" as that, within a factor of ten, or "rarer",
# or "far more" frequent?

# %% tags=["predict"]
groups_that_teach_nothing = "far more"

# %% tags=["nbval-check-output"]
more = lab.rewards_of(lab.draw(model, random, num_prompts=200).tokens)
right = more.sum(1)
fraction = ((right == 0) | (right == 16)).double().mean().item()
alike = 0.53**16 + 0.47**16
KINDS = ["as rare", "rarer", "far more"]
kind = "as rare"
if fraction > 10 * alike:
    kind = "far more"
elif fraction < alike / 10:
    kind = "rarer"
compare("they are", groups_that_teach_nothing, kind, options=KINDS)
print(f"{100 * fraction:.1f} of 100 groups teach nothing")
print(f"right answers of 16: from {right.min():.0f} to {right.max():.0f}")

# %% [markdown]
# Some prompts are hard for the model and some are easy, and with training most become easy. DAPO, a later recipe on
# top of GRPO, therefore draws more prompts until a batch is full of groups that differ ("dynamic sampling", section
# 3.2 of its paper). Watch the fraction of such groups in your own runs. TRL logs it as `frac_reward_zero_std`.
#
# **Takeaway: a reward counts beside those of its group. What is rare in a group has the largest advantage, and a group
# whose rewards are alike teaches nothing.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* 20 minutes. In 26.1 people take the mean over all prompts (`rewards.mean()`), which is right in
# the first test that one writes, a single group, and wrong for more. Others forget `keepdim`, which for G groups of G
# broadcasts without an error. Ask: why not simply the reward as advantage? (All answers that are right would be pushed
# up, and the wrong ones not down; on easy prompts there is nothing but pushing. A baseline changes no expectation.)

# %% [markdown]
# ## 2. The loss (core, 33 min)
#
# Let $p$ be the probability of a token under the learner, and $p'$ the one under the generator that drew it. Their
# **ratio** is $r = p / p'$. The answers were drawn with $p'$, but we want to know how good answers of the learner
# are. A token that the learner would draw twice as often should count twice. This is **importance weighting**. So
# each token adds $r A$ to what we want to raise, where $A$ is the advantage of its answer. At $r = 1$ the gradient of
# $r A$ is $A$ times the gradient of $\log p$: tokens of good answers become more likely.
#
# One may take several updates from one batch, and then $r$ moves away from 1. How far should it go? The answers say
# little about a model that is far away from the one that drew them. So the gain is **clipped**, as in PPO:
#
# $$\mathrm{gain} = \min\bigl(r A,\ \mathrm{clip}(r,\ 1 - \varepsilon_\mathrm{low},\ 1 + \varepsilon_\mathrm{high})\, A\bigr)$$
#
# Both ε are 0.2 here. The minimum takes the worse of the two. Let A be 1: at r = 1.1 both are 1.1. At r = 3 the first
# is 3 and the second 1.2, so the gain is 1.2, also if r grows further, and there is no gradient any more. (The two ε
# may differ: DAPO takes 0.28 for the upper one.)
#
# Now let A be -1: at r = 0.9 both are -0.9. At r = 3 the first is -3 and the second -1.2. The smaller of these is -3,
# which is not clipped: it changes with r, and so there is a gradient, which pulls r down.
#
# **Predict.** What is the gain for A = 1 and r = 0.5, for A = -1 and r = 1.5, and for A = -1 and r = 0.5? Give a
# list. And for how many of these three is there no gradient?

# %% tags=["predict"]
gains = [0.5, -1.5, -0.8]
without_gradient = 1

# %% tags=["nbval-check-output"]
ratio = torch.tensor([0.5, 1.5, 0.5], requires_grad=True)
advantage = torch.tensor([1.0, -1.0, -1.0])
gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
gain.sum().backward()
compare("gains", gains, [round(one, 4) for one in gain.tolist()], within=1)
compare("without gradient", without_gradient, int((ratio.grad == 0).sum()), within=1)

# %% tags=["figure"]
steps = torch.linspace(0.4, 1.6, 121)
clipped = steps.clamp(0.8, 1.2)
curves = {
    "A = 1": torch.minimum(steps, clipped),
    "A = -1": torch.minimum(-steps, -clipped),
}
plot.lines(curves, x=steps, caption="26.gain")

# %% [markdown]
# So the clip ends only what has **already gone where it should**. A good token that became less likely, or a bad one
# that became more likely, is still pulled back, however far it is. Clip and minimum are not the same thing: without the
# minimum a bad token with r = 3 would have no gradient, and would stay.
#
# The paper of GRPO also subtracts a multiple of a distance, a KL divergence, between the model and the one that
# training began with. Many recipes leave that out, and so do we here.
#
# Now the sum over tokens. A batch has N answers, answer i has $|o_i|$ tokens, and none has more than T. What weight
# does a token get? Three published answers:
#
# | `average` | weight of a token of answer i | |
# |---|---|---|
# | `"sequence"` | $1 / (N\, \lvert o_i \rvert)$ | GRPO: a mean over each answer, then a mean over answers |
# | `"token"` | $1 / \sum_j \lvert o_j \rvert$ | DAPO: a mean over all tokens |
# | `"constant"` | $1 / (N\, T)$ | Dr. GRPO, which also leaves the standard deviation out of the advantage: the same number, whatever the lengths are |
#
# N and the sum run over the answers of **all ranks**, as the tokens in lesson 25, section 3. In TRL the three are
# `loss_type="grpo"`, `"dapo"` and `"dr_grpo"`. In verl, another library for training by rewards,
# `loss_agg_mode` chooses, and `token-mean` is DAPO's.
#
# **Predict.** A batch has two answers, of 4 tokens and of 1 token, and T = 8. What is the weight of one token of the
# long answer in each of the three ways? Give a list in the order of the table.

# %% tags=["predict"]
weights_of_a_token = [1 / 8, 1 / 5, 1 / 16]

# %% tags=["nbval-check-output"]
from labcode.train import grpo

two_answers = torch.arange(8) < torch.tensor([[4], [1]])
found = {}
for average in ("sequence", "token", "constant"):
    found[average] = grpo.token_weights(two_answers, average)[:, 0].tolist()
long_ones = [round(of_answers[0], 4) for of_answers in found.values()]
compare("weights", weights_of_a_token, long_ones, within=1)
for average, (long, short) in found.items():
    print(f"{average:9} long answer {long:.4f}, short answer {short:.4f}")

# %% [markdown]
# With "sequence" the one token of the short answer counts four times as much as a token of the long one. So among wrong
# answers the long ones are punished less for each token, and a model may learn to be wrong at length (Dr. GRPO,
# section 3.1).

# %% [markdown] tags=["exercise"]
# ### Exercise 26.2 · The loss of GRPO
#
# `new` and `old` [B, T] are the log-probabilities of the tokens, under the learner and under the generator; B is N.
# `advantage` [B] has one number for each answer. `counts` [B, T] is True where a token belongs to its answer. Return
# the loss, one number: negative where there is a gain, since an optimizer makes it smaller. A gradient flows to `new`
# alone. `old` and `advantage` may come with a graph; for the loss they are constants, and `detach()` cuts a tensor from
# its graph. About 10 lines.

# %% tags=["by-hand", "exercise"]
def grpo_loss(new, old, advantage, counts, low=0.2, high=0.2, average="token"):
    """[B, T], [B, T], [B], [B, T] -> a number."""
    ### BEGIN SOLUTION
    ratio = torch.exp(new - old.detach())
    clipped = ratio.clamp(1 - low, 1 + high)
    a = advantage.detach()[:, None]
    gain = torch.minimum(ratio * a, clipped * a)
    mask = counts.to(gain.dtype)
    if average == "sequence":
        weights = mask / mask.sum(1, keepdim=True) / len(mask)
    elif average == "token":
        weights = mask / mask.sum()
    else:
        weights = mask / mask.numel()
    return -(weights * gain).sum()
    ### END SOLUTION

# %% tags=["check"]
check("26.2", grpo_loss)

# %% [markdown]
# Here is a whole step of training by rewards. `by_hand` has the finished exercises, and `yours` takes your loss if it
# was right in this kernel. `lab.log_probs` gives log p of the new tokens from an ordinary forward pass. Read the
# cell: which weights draw an answer, and which give it its `new`?

# %%
from course.labs import l26_by_hand as by_hand
from labcode.models.generate import generate

my_loss = yours("26.2", by_hand.grpo_loss)


def one_step(model, optimizer, random):
    """Draw, reward, update; returns the mean reward and the ratios."""
    prompts = brackets.draw_prompts(16, 6, random).repeat_interleave(16, 0)
    drawn = generate(model, prompts, 7, generator=random, end=brackets.END)
    rewards = brackets.rewards(prompts, drawn.tokens[:, 6:])
    advantage = by_hand.advantages(rewards.view(16, 16)).flatten()
    new = lab.log_probs(model, drawn.tokens)
    loss = my_loss(new, drawn.log_probs, advantage, drawn.counts)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return rewards.mean().item(), lab.ratios(new, drawn.log_probs, drawn.counts)

# %% [markdown]
# **Predict.** Over 60 such steps, what fraction of the tokens, from 0 to 1, has a ratio outside of 0.8 to 1.2, where
# the clip can act? Take the step in which it is largest.

# %% tags=["predict"]
fraction_outside = 0

# %%
from course.progress import status

model = lab.started()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
random = torch.Generator().manual_seed(26)
live = []
outside = []
for step in range(60):
    reward, ratio = one_step(model, optimizer, random)
    live.append(reward)
    outside.append(lab.fraction_outside(ratio))
    status(f"step {step + 1} of 60: reward {reward:.2f}")
compare("fraction outside", fraction_outside, max(outside), within=1)

# %% [markdown]
# None: the generator is the learner itself, each batch is drawn with the newest weights, and there is one update for
# each batch. So every ratio is 1, up to rounding. Clipping begins to matter with a second update from the same batch,
# or with a generator that is behind, which is section 4.
#
# Has it learnt? The figure shows the reward of your run, as means over five steps. The grey area reaches from the
# lowest to the highest of eight runs that were recorded (`python -m course.labs.l26_record`), and differ only in the
# seed of prompts and answers. Yours is a ninth seed, and may leave the area.

# %% tags=["figure"]
yours_now = {"this run": lab.smoothed(live)}
bands = {"eight seeds": lab.band(lag=0)}
plot.lines(yours_now, x=lab.middles(), bands=bands, caption="26.rewards")

# %% [markdown]
# Nobody has shown it a right answer since the supervised steps: it was only told which of its own answers are right.
# Look at the width of the grey area before you compare two methods by one run of each.
#
# **Takeaway: the loss is a weighted mean of clipped ratios times advantages. The clip ends what has gone far enough,
# the minimum lets everything else come back. With one update for each batch and the newest weights all ratios are 1.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* 33 minutes. Wrong answers to 26.2 that pass with one answer, or with answers of one length:
# the mean over all places instead of all tokens that count; `(gain * mask).mean()`; a sum over tokens for "sequence".
# `torch.max` in place of `torch.min` comes from loss formulas with the sign inside. Ask: what is the value of the
# loss at ratio 1 with "constant" weights and answers of one length? (Zero, as advantages add up to zero. The loss
# says nothing here: watch the reward.)

# %% [markdown]
# ## 3. Weights from one layout to another (core, 60 min)
#
# Generating and learning want different layouts. A learner holds gradients and an optimizer's state, so it is cut by
# FSDP, or by tp and pp. A generator should answer fast, and needs room for keys and values. In many jobs both take
# turns on the same GPUs ("colocated"), and weights are handed over in memory. If both are to work at the same time,
# they need separate ranks: two **fleets** in one job. We take that case; the two cuts differ in either.

# %% tags=["figure"]
plot.two_fleets(learners=[0, 1], generators=[2, 3], caption="26.loop")

# %% [markdown]
# After each update the weights go from the learner's cut to the generator's. The picture shows one weight of 24 rows
# and 8 columns. A learner with tp = 3 has 8 rows on each rank, a generator with tp = 2 has 12.

# %% tags=["figure"]
plot.two_cuts(
    (24, 8),
    learner={0: (0, 0, 8, 8), 1: (8, 0, 8, 8), 2: (16, 0, 8, 8)},
    generator={3: [(0, 0, 12, 8)], 4: [(12, 0, 12, 8)]},
    caption="26.cuts",
)

# %% [markdown]
# The part that a rank holds is a **box** of the whole weight: where it begins, and its sizes. What rank 1 has and rank
# 3 needs is the **intersection** of two boxes, which is again a box or nothing. This idea replaces all cases of "tp
# here, FSDP there", rows or columns. It never asks how a layout came about.

# %% tags=["by-hand"]
from typing import NamedTuple


class Box(NamedTuple):
    """A block of a whole weight: where it begins along each dim, and its sizes."""

    offsets: tuple
    sizes: tuple


class Move(NamedTuple):
    """A block that a rank sends to another one; ranks are those of the whole job."""

    source: int
    target: int
    block: Box

# %% [markdown]
# **Predict.** A weight has 24 rows and 8 columns. How many blocks are there to send if tp = 4 cuts its rows on the
# learner, and tp = 3 on the generator? How many, if the learner has 4 ranks that cut the rows, and the generator 2
# that cut the columns?

# %% tags=["predict"]
blocks_4_to_3 = 6
blocks_rows_to_columns = 8

# %% tags=["nbval-check-output"]
from course.labs import l26_by_hand as by_hand


def rows_of(num_ranks, first_rank=0):
    """{rank: its box} of a weight [24, 8] whose rows are cut."""
    each = 24 // num_ranks
    boxes = {}
    for number in range(num_ranks):
        boxes[first_rank + number] = by_hand.Box((number * each, 0), (each, 8))
    return boxes


four, three = rows_of(4), rows_of(3, first_rank=4)
columns = {4: by_hand.Box((0, 0), (24, 4)), 5: by_hand.Box((0, 4), (24, 4))}
moves = by_hand.plan(four, three)
compare("rows to rows", blocks_4_to_3, len(moves), within=1)
to_columns = by_hand.plan(four, columns)
compare("rows to columns", blocks_rows_to_columns, len(to_columns), within=1)
for move in moves:
    first = move.block.offsets[0]
    last = first + move.block.sizes[0] - 1
    print(f"{move.source} -> {move.target}: rows {first} to {last}")

# %% [markdown] tags=["exercise"]
# ### Exercise 26.3 · Boxes
#
# `common(one, other)` gives the box that two boxes of one weight have in common, or None. They have any number of dims,
# the same for both. `inside(part, box, block)` gives the numbers of `block` as a **view** of `part`, the tensor that a
# rank holds of `box`; `block` lies within `box`. Offsets of boxes count in the whole weight, those of a tensor within
# the tensor. `tensor.narrow(dim, first, length)` is a view of some indices along one dim. Five to seven lines each.

# %% tags=["by-hand", "exercise"]
def common(one, other):
    """Two boxes -> the box that both have, or None."""
    ### BEGIN SOLUTION
    offsets = []
    sizes = []
    for dim in range(len(one.offsets)):
        first = max(one.offsets[dim], other.offsets[dim])
        end = min(
            one.offsets[dim] + one.sizes[dim],
            other.offsets[dim] + other.sizes[dim],
        )
        if end <= first:
            return None
        offsets.append(first)
        sizes.append(end - first)
    return Box(tuple(offsets), tuple(sizes))
    ### END SOLUTION


def inside(part, box, block):
    """The numbers of a block, as a view of the part whose box is given."""
    ### BEGIN SOLUTION
    for dim in range(part.dim()):
        first = block.offsets[dim] - box.offsets[dim]
        part = part.narrow(dim, first, block.sizes[dim])
    return part
    ### END SOLUTION

# %% tags=["check"]
check("26.3", common, inside)

# %% [markdown]
# A learner with tp and plain data parallelism on top of it, dp = 2, has each block twice. These **replicas** are the
# same, so it is enough that one of them sends. But not always the same one: the exchange takes as long as the rank
# that has the most to send.

# %% [markdown] tags=["exercise"]
# ### Exercise 26.4 · The plan
#
# `sources` and `targets` are dicts {rank: its box} of one weight. Return a list of `Move(source, target, block)`, so
# that each target gets each number of its box exactly once. Boxes of two sources are either the same (replicas) or
# have nothing in common. Of replicas, let the one send that has the fewest numbers to send so far in this plan, of
# equals the lowest rank: numbers, not blocks, since blocks differ in size. Every rank runs this function by itself,
# and may have filled its dicts in another order, so go through ranks in **sorted** order: then the list is the same
# everywhere. About 12 lines; `common` is yours or `by_hand.common`.

# %% tags=["by-hand", "exercise"]
import math


def plan(sources, targets):
    """{rank: box} of those who send and of those who need -> list of moves."""
    ### BEGIN SOLUTION
    num_sent = dict.fromkeys(sources, 0)
    moves = []
    for target in sorted(targets):
        holders = {}
        for source in sorted(sources):
            block = common(sources[source], targets[target])
            if block is not None:
                holders.setdefault(block, []).append(source)
        for block, replicas in holders.items():
            source = min(replicas, key=num_sent.get)
            num_sent[source] += math.prod(block.sizes)
            moves.append(Move(source, target, block))
    return moves
    ### END SOLUTION

# %% tags=["check"]
check("26.4", plan)

# %% [markdown]
# The plan is arithmetic, and it is made once. What happens after each update is the exchange: each rank looks for the
# moves in which it has a part. A rank may have several others to send to, or to receive from. If it waited for one
# message before it started the next, one slow rank would hold up the others, one after the other. So all are started
# first (`dist.isend` and `dist.irecv` return at once), and then each is waited for, once. Before its `wait()` has
# returned, the tensor of an `irecv` does not hold the message. (With NCCL single sends and receives run one after the
# other, and two ranks could wait for each other. So labcode hands all of them to `dist.batch_isend_irecv` as one list,
# as in lesson 12.)

# %% [markdown] tags=["exercise"]
# ### Exercise 26.5 · The exchange
#
# Every rank calls `exchange(moves, box, part)` with the same moves, its own box, and its own part, a tensor of the
# sizes of the box. A rank that sends reads from its part, one that receives writes into it, and a rank without moves
# does nothing. Start all messages of the rank before you wait for one. What is sent has to be contiguous in memory,
# and so has what is received: receive into a tensor of its own and copy it into the part afterwards. About 14 lines;
# `inside` is yours or `by_hand.inside`.

# %% tags=["by-hand", "exercise"]
import torch
import torch.distributed as dist


def exchange(moves, box, part):
    """Send and receive the blocks of a plan; `part` of a target is filled."""
    ### BEGIN SOLUTION
    rank = dist.get_rank()
    started = []
    arriving = []
    for move in moves:
        if move.source == rank:
            block = inside(part, box, move.block).contiguous()
            started.append(dist.isend(block, move.target))
        if move.target == rank:
            block = torch.empty(move.block.sizes, dtype=part.dtype)
            started.append(dist.irecv(block, move.source))
            arriving.append((move.block, block))
    for work in started:
        work.wait()
    for place, block in arriving:
        inside(part, box, place).copy_(block)
    ### END SOLUTION

# %% tags=["check"]
check("26.5", exchange, ranks)

# %% [markdown]
# A real part need not be one box. Our GPT has a weight of 96 rows: 32 rows of q, then 32 of k, then 32 of v. tp gives
# each rank half of the heads, and so half of **each** of the three. FSDP knows nothing of heads, and cuts the rows in
# the middle. From here on our learner has FSDP over ranks 0 and 1, and our generator tp = 2 on ranks 2 and 3. (FSDP
# cuts along the axis dp, so the learner is `GridShape(dp=2)`.) Both cuts give each rank 48 rows. They are not the
# same rows, and no shape tells.
#
# **Predict.** How many of its 48 rows does rank 2 get from rank 0?

# %% tags=["predict"]
rows_from_0 = 32

# %% [markdown]
# labcode's `reshard` is your plan and your exchange for whole models: several boxes in each part, one message for each
# pair of ranks, and a version that goes with it. `Grid.fleets` cuts a job into fleets, each with a grid of its own.

# %% tags=["nbval-check-output"]
from labcode.comm.grid import Grid
from labcode.topology import GridShape

LEARNER, GENERATOR = GridShape(dp=2), GridShape(tp=2)


def rows_of_qkv():
    """{(source, target): rows of q, k and v of the first layer} of the plan."""
    number, grid = Grid.fleets(LEARNER, GENERATOR)
    model = lab.part_of_model(number == 0, grid)
    rows = {}
    for move in lab.plan_of(model, number == 0):
        if move.name == "blocks.0.attention.qkv.weight":
            way = move.source, move.target
            rows[way] = rows.get(way, 0) + move.write.sizes[0]
    return rows


rows = ranks.run(rows_of_qkv)[0]
compare("rows", rows_from_0, rows[0, 2], within=1)
for (source, target), number in rows.items():
    print(f"{source} -> {target}: {number} rows")

# %% tags=["figure"]
HEADS_OF_2 = [(first, 0, 16, 32) for first in (0, 32, 64)]
HEADS_OF_3 = [(first, 0, 16, 32) for first in (16, 48, 80)]
plot.two_cuts(
    (96, 32),
    learner={0: (0, 0, 48, 32), 1: (48, 0, 48, 32)},
    generator={2: HEADS_OF_2, 3: HEADS_OF_3},
    names={"q": 32, "k": 32, "v": 32},
    caption="26.qkv",
)

# %% [markdown]
# Now all weights. The generator starts with other random weights, so that nothing can be right by chance. The usual
# way, for comparison, is to collect each weight whole on the learner and to broadcast it to all ranks of the
# generator, which then keep their part. The NCCL engine for weights of vLLM, a server that generates text, works like
# this.
#
# **Predict.** The model has 26,208 numbers of 8 bytes. Nearly all of its weights are cut by tp. How many bytes does a
# rank of the generator receive with boxes, and how many with the broadcast?

# %% tags=["predict"]
bytes_by_boxes = 26208 * 8 / 2
bytes_by_broadcast = 26208 * 8

# %% tags=["nbval-check-output"]
from labcode.comm.counting import counted, totals
from labcode.comm.grid import group_of
from labcode.parallel import reshard


def send_weights(way):
    """(bytes that this rank sends and receives, largest difference from the slices)."""
    number, grid = Grid.fleets(LEARNER, GENERATOR)
    is_learner = number == 0
    model = lab.part_of_model(is_learner, grid)
    moves = lab.plan_of(model, is_learner)
    first_and_generator = group_of([0, 2, 3])
    with counted() as calls:
        if way == "boxes":
            parts = reshard.parts_of(model)
            reshard.exchange(moves, parts, 0, dist.group.WORLD, torch.float64)
        else:
            reshard.gather_and_broadcast(
                model, is_learner, first_and_generator, torch.float64
            )
    whole = lab.started().state_dict()
    off = 0.0 if is_learner else max(lab.slices_off(model, whole).values())
    return totals(calls), off


by_boxes = ranks.run(send_weights, "boxes")
usual = ranks.run(send_weights, "broadcast")
received = by_boxes[2][0]["recv"][1]
broadcast = usual[2][0]["broadcast"][1]
compare("bytes by boxes", bytes_by_boxes, received, unit="B", within=1.1)
compare("bytes by broadcast", bytes_by_broadcast, broadcast, unit="B", within=1.1)
print("largest difference, boxes:", max(off for _, off in by_boxes))
print("largest difference, broadcast:", max(off for _, off in usual))

# %% [markdown]
# Both are equal to the slices of the whole weights **bit for bit**: weights only travel, so there is no rounding, and
# any difference is a mistake. (The tolerance of 1.1 in the comparison is for norms, positions and some biases, which tp
# does not cut, so that each rank needs them whole.) With tp = t on the generator, boxes bring a rank 1/t of what the
# broadcast brings it. At t = 8 and 140 GB of weights that is 17.5 GB in place of 140 GB for each rank, after each
# update.
#
# So why do most frameworks broadcast? It is a few lines, and needs no plan that knows both layouts. vLLM and NeMo-RL,
# NVIDIA's library for training by rewards, have both ways by now; section 7 has their names.
#
# Now the whole loop on two fleets: weights, answers, rewards, update.

# %% tags=["nbval-check-output"]
from labcode.train import grpo


def train_on_two_fleets(steps):
    """The mean reward of each step, and the largest |ratio - 1|."""
    number, grid = Grid.fleets(LEARNER, GENERATOR)
    is_learner = number == 0
    model = lab.part_of_model(is_learner, grid)
    moves = lab.plan_of(model, is_learner)
    optimizer = torch.optim.AdamW(model.weights.values(), lr=1e-3)
    random = torch.Generator().manual_seed(26)
    parts = reshard.parts_of(model)
    rewards, off = [], 0.0
    for step in range(steps):
        reshard.exchange(moves, parts, step, dist.group.WORLD, torch.float64)
        batch = lab.draw_and_share(model, is_learner, step, random)
        reward = lab.rewards_of(batch.tokens)
        rewards.append(reward.mean().item())
        if is_learner:
            with torch.no_grad():
                new = grpo.token_log_probs(model, batch.tokens, 7)
            ratio = lab.ratios(new, batch.log_probs, batch.counts)
            off = max(off, (ratio - 1).abs().max().item())
            grpo.learn(model, optimizer, batch, reward, grpo.GRPO(average="token"))
    return rewards, off


together = ranks.run(train_on_two_fleets, 5)
print("rewards on two fleets:", " ".join(f"{one:.4f}" for one in together[0][0]))
alone = [row.reward for row in lab.train(5, seed=26)]
print("rewards of one alone: ", " ".join(f"{one:.4f}" for one in alone))
print("all ratios are 1 to 1e-12:", together[0][1] < 1e-12)

# %% [markdown]
# The prompts have the same seed, and the rewards are the same: two fleets with different cuts train as one process
# does. And the ratios are 1 to the last digits of float64. Remember this line. It is the first thing to look at in any
# such job, before the first update and after it.
#
# **Takeaway: a part is a box of the whole weight, and what goes from one rank to another is an intersection of boxes.
# Weights arrive bit for bit, each number once; with tp = t the generator's ranks receive 1/t of what a broadcast of
# whole weights brings.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* 60 minutes, the heart of the lesson. In 26.3 the classic is `inside` with offsets of the whole
# weight: right on the rank whose box begins at 0, and on no other. In 26.4 a first version sends each replica's copy,
# so that numbers arrive twice, which changes nothing but the bytes; or it always takes the first replica. In 26.5
# `dist.recv` straight into a view of the part works for rows, and not for columns. Ask: why may every rank make the
# plan for itself? (It is a function of the layouts, if it goes through ranks in sorted order. In the order of a dict
# it would depend on who filled it.)

# %% [markdown]
# ## 4. Versions and lag (core, 14 min)
#
# While the generator draws, the learner waits, and the other way round. Say that drawing takes 6 s, learning 4 s, and
# the exchange of weights 1 s. One after the other, a step takes 11 s. But the generator could draw the next batch while
# the learner learns from this one. Then those answers are drawn with weights that are one update old: the **lag** is 1.
#
# **Predict.** How long does a step take, if drawing and learning happen at the same time, and the exchange after both?

# %% tags=["predict"]
step_s = max(6, 4) + 1

# %% tags=["nbval-check-output"]
from course.labs import l26_two_fleets as lab

compare("step", step_s, lab.simulated_step_s(6, 4, 1), unit="s", within=1)

# %% [markdown]
# More than a third less for one update of lag. With long answers, or with tools that an agent calls, drawing takes far
# longer, and answers that were begun long ago are still on their way while the learner has moved on. What does that do?
# The ratios are no longer 1, and the clip begins to act.
#
# Here are recorded runs with a generator that is 0, 1, 4 and 16 updates behind, eight seeds each. We look at the steps
# from 16 on.
#
# **Predict.** Take the mean of |ratio - 1| over all tokens. How many times as large is it with lag 4 as with lag 1,
# roughly? Twice as much or half as much counts as right here: how far a model moves in four updates depends on
# whether they point the same way.

# %% tags=["predict"]
times_as_far = 4

# %% tags=["nbval-check-output"]
off = {lag: lab.mean_of(lag, "off") for lag in lab.LAGS}
compare("times", times_as_far, off[4] / off[1], within=2)
for lag in lab.LAGS:
    outside = lab.mean_of(lag, "outside")
    print(f"lag {lag:2}: mean |ratio - 1| {off[lag]:.3f}, outside {outside:.3f}")

# %% tags=["figure"]
series = {f"lag {lag}": lab.mean_rewards(lag) for lag in lab.LAGS}
bands = {"lag 0, eight seeds": lab.band(0)}
plot.lines(series, x=lab.middles(), bands=bands, caption="26.lag")

# %% [markdown]
# The reward is that of the answers drawn, so with lag 16 the first 16 steps show the model before any update. Then more
# than a fifth of its tokens lie outside of the clip's range, and sixty steps have brought nothing. Lag 4 falls to 0.36
# at first; from there it rises about as fast as the others, and it ends at 0.63. Lag 1 rises even faster than no lag,
# and then its mean falls. But a mean can hide what single runs do. Here are the eight of lag 1.

# %% tags=["figure"]
runs = lab.rewards_by_seed(1).tolist()
single = {f"seed {seed}": run for seed, run in enumerate(runs)}
plot.lines(single, x=lab.middles(), caption="26.runs")

# %% tags=["nbval-check-output"]
for lag in (0, 1):
    ends = sorted(run[-1].item() for run in lab.rewards_by_seed(lag))
    print(f"lag {lag}: the runs end at", " ".join(f"{end:.2f}" for end in ends))

# %% [markdown]
# With lag 1 four runs end near 0.77, as most do without a lag. Two fell below 0.5 and end at 0.57, and two have collapsed.
# Eight runs are too few for a rate, but no run has collapsed without a lag. The mean showed a slight loss for all.
#
# So the lag has to be **known** and **bounded**. In labcode a version travels with the weights, and goes with every
# batch. `check_lag` refuses what is too old. It is cheap, and finds a generator that is no longer sent weights. Weights
# that arrive and are wrong it does not find; section 6 does. The next cell raises its error on purpose.

# %% tags=["raises-exception"] raises="StaleError: version 3 of the weights is 4 updates behind"
from labcode.parallel import reshard

reshard.check_lag(version=3, newest=7, max_lag=1)

# %% [markdown]
# The same bound is `max_trajectory_age_steps` in NeMo-RL and `max_staleness` in TRL's AsyncGRPO.
#
# **Takeaway: a lag of one hides the shorter of drawing and learning, and some runs become unstable. Ratios tell how
# stale answers are. Let a version travel with the weights and with each batch, and refuse what is too old.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* 14 minutes. Ask: where would you see a generator that never gets weights, without versions? (The
# reward stays flat although the loss has gradients, and |ratio - 1| grows from step to step without an end.)

# %% [markdown]
# ## 5. Do both agree on a token? (core, 15 min)
#
# Before the first update both fleets have the same weights. Then all ratios should be 1, and in float64 they were.
# Large jobs compute in bfloat16, with other kernels on either side. bfloat16 keeps 8 bits of a number, so each result
# is off by up to 2⁻⁸, or 0.4 %, of its size (lesson 18). A log-probability here is a difference of logits of a few
# units, and two layers of such roundings stand before it.
#
# **Predict.** The learner computes in float32 and the generator in bfloat16. What is the largest difference of two
# log-probabilities of a token, over 7,000 tokens: about "0.000001", "0.1" or "10"?

# %% tags=["predict"]
largest_difference = "0.1"

# %% tags=["nbval-check-output"]
import math

from course.labs import l26_two_fleets as lab

PAIRS = [
    ("float64", "float64"),
    ("float64", "float32"),
    ("float32", "bfloat16"),
    ("bfloat16", "bfloat16"),
]
off = {}
found = {}
for pair in PAIRS:
    off[pair], found[pair] = lab.disagreement(*pair)
powers = {"0.000001": -6, "0.1": -1, "10": 1}
measured = math.log10(off["float32", "bfloat16"])
nearest = min(powers, key=lambda text: abs(powers[text] - measured))
compare("largest difference", largest_difference, nearest, options=powers)

# %%
print("learner   generator  largest |log p - log p'|   mean |ratio - 1|")
for (learner, generator), ratio in found.items():
    largest = off[learner, generator]
    print(f"{learner:9} {generator:9}  {largest:10.0e} {lab.mean_off(ratio):26.0e}")

# %% [markdown]
# In bfloat16 on both sides they agree better, but not to the last digit: the generator computes one token at a time,
# with keys and values that it has kept, and the learner all tokens at once. The products have other shapes, and sums
# are added in another order.
#
# The same holds within one fleet. A learner may use another attention kernel. And it may **pack** answers: put them
# one behind the other in a single row, each up to its end, so that nothing is computed for empty places. A mask then
# keeps them apart, and the positions of each begin at 0. Here are the log-probabilities of 64 answers in these ways,
# beside those of a padded batch in PyTorch's fused kernel; in the last line somebody has forgotten the mask.

# %%
print("dtype     learner          largest |log p - log p'|   mean |ratio - 1|")
for dtype in ("float32", "bfloat16"):
    for way, ratio in lab.attention_ways(dtype).items():
        largest = ratio.log().abs().max().item()
        print(f"{dtype:9} {way:16} {largest:10.0e} {lab.mean_off(ratio):26.0e}")

# %% [markdown]
# A kernel and packing round in another order, and no more: in float32 that is about 0.000001, and in bfloat16 at most
# some hundredths, as in the table above. Only without the mask, where each answer reads those before it, the ratios
# are far from 1, and in float32 as far as in bfloat16. That is how to tell: **compute once in float32**. A difference
# that goes away was rounding, and one that stays is a mistake.
#
# For larger models the mean of |log p - log p'| is near 0.01, which need be no bug. In issue 64 of vime, a framework
# for training by rewards, it was 0.011 for 4 billion parameters between Megatron and vLLM, and stayed there for 30
# steps. In the same job with another server it grew from 0.011 to 0.036, which was taken for a sign of a mistake.
#
# Why does it matter? The ratio now holds two things: how far the learner has moved, which the clip is for, and how
# differently the two compute. For a token that is little. But some losses weigh a whole **answer** by the product of
# its tokens' ratios, as TRL's correction does if nothing else is chosen. If 100 differences of 0.012 all have the
# same sign, the product is exp(1.2), about 3.3. So a maintainer of TRL explains exploding ratios in issue 4772.
#
# Two cures are in use. One keeps the two things apart: before the update the learner computes `old` once more by
# itself, so that the clip compares learner with learner. A second ratio, of that `old` to the generator's, multiplies
# the loss, and is cut off at a cap ("truncated importance sampling"), or set to zero above it. TRL and verl have
# both. The other cure is to let both sides compute alike, bit for bit ("batch invariant" kernels).
#
# One more source of wrong ratios is the **temperature**, a number by which logits are divided before the softmax. If
# one side reports log p at another temperature, all ratios are off (TRL, issue 4159).
#
# **Takeaway: before an update the ratio is 1 if both fleets compute alike. A small, steady difference is dtype and
# kernels. A large or growing one, or one that stays in float32, is a mistake in weights, versions, masks or
# temperature.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* 15 minutes. Ask: the learner computes log-probs of tokens that were drawn at temperature 0.6,
# and forgets to divide its logits. What would the ratios look like? (Far from 1 from the first step on, and always to
# the same side for likely tokens; TRL issue 4159.)

# %% [markdown]
# ## 6. A clinic (core, 12 min)
#
# Three colleagues have trained four steps on two fleets as ours, each with one mistake, and have then sent the
# weights once more. No error was raised, all shapes fit, and nobody has looked at versions. Each step has the same
# prompts and the same random numbers. These are the numbers: the mean of |ratio - 1| and the reward of each step; and
# for both ranks of the generator how far some of their weights are from the right slice of the learner's weights: the
# norm of the difference, divided by the norm of the slice. "0" means bit for bit equal. The first one is healthy.
#
# | name | what could be wrong |
# |---|---|
# | `"shard"` | of some weights a learner's shard is sent as if it were the part that the receiver needs |
# | `"adapters"` | the learner trains adapters (LoRA), and they are not merged into the weights that are sent |
# | `"stale"` | the weights that arrive are those of an earlier update |
# | `"dtype"` | the generator computes in bfloat16 |
# | `"temperature"` | the generator's log-probs are those of another temperature |
# | `"half"` | one of the generator's two ranks is left out when weights are sent |
#
# An adapter is a pair of thin matrices, A and B, beside a weight W that stays as it is (lesson 25); the model uses
# W + s B A. B is zero at first.

# %% tags=["nbval-check-output"]
from course.labs import l26_two_fleets as lab

for name in ("healthy", "X", "Y", "Z"):
    print(name)
    for line in lab.told(ranks.run(lab.patient, name)):
        print("  ", line)

# %% [markdown] tags=["exercise"]
# ### Exercise 26.6 · What do they have?
#
# Write a dict that gives each patient, X, Y and Z, one of the names from the table. Ask of each: is the first ratio 1?
# Which weights differ, on which ranks, by how much? Does the reward move?

# %% tags=["exercise"]
### BEGIN SOLUTION
diagnoses = {"X": "shard", "Y": "adapters", "Z": "stale"}
### END SOLUTION

# %% tags=["check"]
check("26.6", diagnoses)

# %% [markdown]
# X is the nasty one. As the figure in section 3 shows, an FSDP shard of q | k | v has as many rows as the part that
# tp needs, so nothing complains. They are other rows.
#
# In Y the learner sends W and keeps its adapters to itself: what generates never changes, only matrices with an adapter
# differ, and the reward stands still. In Z nothing is sent after the first update: all weights differ, by as much as
# the later updates have moved them.
#
# In a job of your own, do what was done here: once after the first exchange, and once some updates later, compare
# each weight of each rank of the generator with the learner's, bit for bit. A norm of each whole weight would not
# have found X's mistake: all rows are there, only on the wrong ranks.
#
# **Takeaway: ratios at step 0 find wrong weights, ratios later find old ones, and the list of weights that differ says
# which mistake it is.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* 12 minutes. "dtype" and "temperature" change no weight of the generator at all. "half" would
# show on one rank alone. Y's first ratio is 1, since an adapter adds nothing at first; its reward is the same in all
# steps, to the last digit, because what generates never changes. TRL's issue 2856 was of this kind; TRL merges
# adapters before it sends.

# %% [markdown]
# ## 7. Plain PyTorch (optional, 10 min)
#
# PyTorch knows boxes too. A `DTensor` is a tensor with a mesh and placements such as `Shard(0)`, and
# torch.distributed.checkpoint (DCP) stores, for each rank, a box with its offsets. Who loads with other placements
# gets the intersections.
#
# Within **one** mesh `redistribute` changes placements. Let each fleet by itself turn a weight of 24 rows and 8
# columns from rows into columns, and count what is sent.

# %% tags=["nbval-check-output"]
from torch.distributed.tensor import Shard, distribute_tensor

from labcode.comm.counting import counted, totals
from labcode.comm.grid import Grid
from labcode.topology import GridShape

WHOLE = torch.arange(24.0 * 8).view(24, 8)


def rows_to_columns():
    """(numbers of this rank's columns that are wrong, what was called)."""
    number, grid = Grid.fleets(GridShape(dp=2), GridShape(tp=2))
    axis = "dp" if number == 0 else "tp"
    rows = distribute_tensor(WHOLE, grid.mesh[axis], [Shard(0)])
    with counted() as calls:
        columns = rows.redistribute(placements=[Shard(1)]).to_local()
    expected = WHOLE.chunk(2, 1)[grid.coord(axis)]
    return int((columns != expected).sum()), totals(calls)


for rank, (wrong, calls) in enumerate(ranks.run(rows_to_columns)):
    for kind, (number, num_bytes) in calls.items():
        print(f"rank {rank}: {wrong} wrong, {number} {kind} of {num_bytes} B")

# %% [markdown]
# The 768 bytes are the whole weight. A rank has half of it, so 384 bytes arrive. With boxes 192 would be enough: it
# needs half of the weight, and has half of that already. On a CPU DTensor gathers and cuts, since it assumes that gloo
# has no all-to-all; on GPUs it calls one (`shard_dim_alltoall` in PyTorch 2.13).
#
# Between disjoint fleets there is no common mesh, and so there are two ways: `full_tensor()` and a broadcast, or DCP.
# We let the same weight go through a folder, from rows on ranks 0 and 1 to columns on ranks 2 and 3.
#
# **Predict.** How many of the 24 · 8 numbers of the weight will be wrong on the ranks 2 and 3, and what is the shape
# of the part of rank 3, as a list?

# %% tags=["predict"]
wrong_numbers = 0
shape_on_rank_3 = [24, 4]

# %% tags=["nbval-check-output"]
import tempfile

import torch.distributed.checkpoint as dcp


def through_a_folder(folder):
    """(numbers that are wrong, shape) on a rank that loads; None on one that saves."""
    number, grid = Grid.fleets(GridShape(dp=2), GridShape(tp=2))
    axis, dim = ("dp", 0) if number == 0 else ("tp", 1)
    start = WHOLE if number == 0 else torch.zeros_like(WHOLE)
    weight = distribute_tensor(start, grid.mesh[axis], [Shard(dim)])
    if number == 0:
        dcp.save({"w": weight}, checkpoint_id=folder, process_group=grid.group("dp"))
    dist.barrier()
    if number == 0:
        return None
    dcp.load({"w": weight}, checkpoint_id=folder, process_group=grid.group("tp"))
    expected = WHOLE.chunk(2, 1)[grid.coord("tp")]
    own = weight.to_local()
    return int((own != expected).sum()), list(own.shape)


with tempfile.TemporaryDirectory() as folder:
    loaded = ranks.run(through_a_folder, folder)
compare("wrong numbers", wrong_numbers, loaded[2][0] + loaded[3][0], within=1)
compare("shape on rank 3", shape_on_rank_3, loaded[3][1])

# %% [markdown]
# A folder is slow and safe: it needs no plan, no group of both fleets, and it outlives a fleet that dies. Here is what
# the same things are called elsewhere:
#
# | here | where | name there |
# |---|---|---|
# | weights from learner to generator | NeMo-RL | refit; `refit_transport: nccl_reshard` sends shards (experimental, not of all weights) |
# | | vLLM | weight transfer: `init_weight_transfer_engine`, `update_weights` |
# | boxes, each number once | vLLM | the M2N engine (M ranks to N others): the learner sends its shards, and whole weights only where a name is not known |
# | gather and broadcast | vLLM | the NCCL backend; TRL sends `full_tensor()` of each weight |
# | | TorchRL, PyTorch's library | `vLLMUpdater`, which is told `vllm_tp_size` |
# | lag | NeMo-RL, TRL | `max_trajectory_age_steps`; `max_staleness` |
# | adapters | TRL | `merge_adapter()` before weights are sent |
#
# **Takeaway: DCP finds the boxes for you, through a folder. Production stacks have both ways, a broadcast of whole
# weights and shards to shards; know which one yours uses.**
#
# ## From here to GPUs and SLURM (core, 2 min)
#
# On GPUs labcode's `reshard` sends with NCCL. Fleets are neighbours in the order of ranks, so let whole nodes be
# learners, and others generators: `Grid.fleets` gives the first ranks to the first fleet, and SLURM fills node by
# node. Weights cross the network once for each update. For a rank of the generator that takes the size of its part,
# divided by the bandwidth of its network card. Large stacks start fleets as separate jobs, or as actors of Ray, which
# are processes that one Python program starts on many nodes, rather than as one `srun`; then the group of both is
# made by address and port, and a rank of a fleet that dies does not take the other one along.
#
# ## Questions (core, 4 min)
#
# **1.** All rewards of a batch are 1. What are the loss and its gradient?
#
# <details><summary>Answer</summary>
#
# Zero: each advantage is zero, whatever the model is.
# </details>
#
# **2.** The learner has tp = 4 and dp = 2, the generator tp = 2. How many blocks of a weight that tp cuts by rows are
# sent?
#
# <details><summary>Answer</summary>
#
# Four: each rank of the generator needs two of the four shards, and each shard is sent by one of its two replicas.
# </details>
#
# **3.** The mean of |ratio - 1| is 0.3 at the first step, before any update, and 0.3 at all later ones. Weights,
# versions or computation?
#
# <details><summary>Answer</summary>
#
# Not versions: there is none before. It is too large for dtype and kernels. Look for wrong weights, a wrong mask, or
# another temperature on one side.
# </details>
#
# **4.** Why do weights arrive bit for bit, when losses of two layouts agree to rounding only?
#
# <details><summary>Answer</summary>
#
# Nothing is added up on the way. Losses are sums, and each layout adds in another order.
# </details>
#
# **5.** From lesson 13: what does a rank of FSDP hold between two steps, and why is that not what a generator with tp
# needs, although both have 1/p of the numbers?
#
# <details><summary>Answer</summary>
#
# A 1/p of the rows of each weight, which it gathers before it computes. A rank of tp needs its heads and its columns,
# of which some weights are cut along dim 1, and q, k and v each by themselves.
# </details>
#
# ## Recap
#
# | | |
# |---|---|
# | advantage | reward less the mean of the group, divided by its std; 0 where all are alike |
# | loss | minimum of ratio and clipped ratio, times the advantage; averaged by sequence, by token or by a constant |
# | fleets | learner and generator on disjoint ranks, each with a grid of its own |
# | box | offsets and sizes of a part in the whole weight; what travels is an intersection |
# | plan | each number once to each rank that needs it; replicas share the sending |
# | bytes | with tp = t a generator's rank receives 1/t of the weights, not all |
# | version and lag | travel with weights and batches; too old is refused |
# | ratio before an update | 1 if both compute alike; else wrong weights, a wrong mask, dtype or temperature |
#
# ## Sources
#
# - Shao et al. 2024, *DeepSeekMath*, arXiv:2402.03300, section 4.1: GRPO.
# - Schulman et al. 2017, *Proximal Policy Optimization Algorithms*, arXiv:1707.06347, section 3: the clipped objective.
# - Yu et al. 2025, *DAPO*, arXiv:2503.14476, sections 3.1 to 3.3: clip-higher, dynamic sampling, the mean over tokens.
# - Liu et al. 2025, *Understanding R1-Zero-Like Training* (Dr. GRPO), arXiv:2503.20783, section 3: the bias of lengths.
# - vLLM, weight transfer: <https://docs.vllm.ai/en/latest/training/weight_transfer/>, and an example with FSDP2 on two
#   ranks and tp = 2 on two others: <https://docs.vllm.ai/en/latest/examples/rl/rlhf_m2n/>.
# - NeMo-RL, ways of a refit: <https://docs.nvidia.com/nemo/rl/latest/guides/refit.html>, and async GRPO:
#   <https://docs.nvidia.com/nemo/rl/0.8.0/guides/async-grpo.html>.
# - TRL, merged adapters and the transfer of weights: <https://github.com/huggingface/trl/issues/5975>; flat rewards
#   with adapters: <https://github.com/huggingface/trl/issues/2856>; staleness:
#   <https://github.com/huggingface/trl/pull/7017>.
# - TorchRL, vLLMUpdater: <https://docs.pytorch.org/rl/stable/reference/generated/torchrl.collectors.llm.vLLMUpdater.html>.
# - Ratios that are not 1: TRL <https://github.com/huggingface/trl/issues/4772> and, with another temperature,
#   <https://github.com/huggingface/trl/issues/4159>; vime, made of slime with vLLM as its generator,
# <https://github.com/vllm-project/vime/issues/64>; the correction in verl:
# <https://github.com/verl-project/verl/pull/2953>.
# - Sizes of tp that differ: <https://github.com/verl-project/verl/pull/4876>.

# %%
ranks.close()
