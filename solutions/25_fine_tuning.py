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
# # 25 · Fine-tuning on many ranks
#
# Somebody else has trained the model. You have some thousand examples of what it should do, and eight GPUs for a night.
# That is a very frequent multi-GPU job, and it breaks in places where pre-training does not: examples have
# different lengths, so that ranks count different numbers of tokens; most weights are frozen, which sharding has to
# know; and the few that train lie beside weights that tensor parallelism has cut. You write these places: pairs and
# which of their tokens count, packed rows, the loss over all ranks, LoRA, and LoRA under tensor parallelism.
#
# ## Goals
#
# - train on the answer alone, and pack several pairs into one row in which none sees another;
# - compute the mean over the tokens of all ranks and micro-batches, which is not the mean of their means;
# - write a LoRA layer, and say how much of it a rank keeps, in bytes;
# - cut A and B for tensor parallelism, and say whose gradient has to be summed;
# - read the two errors of LoRA under FSDP, and use the sharding that has neither.
#
# **Time**: 161 minutes. Good places for a break are after sections 2 and 4.
#
# **Needs**: lesson 01 (sections 1, 2) and lesson 04 (section 1). For section 3 also lesson 04 (section 4); for section
# 6 also lesson 09 (sections 1, 2); for section 7 also lesson 13 (section 1).

# %%
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from course.lab import Ranks, check, compare, plot, show_source
from course.labs import l25_by_hand as by_hand
from course.labs import l25_tuning as lab

ranks = Ranks(4)

# %% [markdown]
# `by_hand` holds what the exercises of this lesson ask for, written out, and the cells between the exercises use it. So
# they run whether or not you have solved an exercise. `lab` holds what the lesson needs besides: data, a small model,
# and the same computation on one process.
#
# ## 1. Pairs, and a loss on the answer alone (core, 16 min)
#
# A pre-trained model continues a text. Ours is a GPT of two layers that has read a million characters of Shakespeare
# for some seconds. We want something else of it: we say a line, and it answers with a next line, **in capital
# letters**, and then stops. The plays have some thousand speeches of two lines, and these make our pairs: a
# **prompt** and an **answer**. Each answer ends with a **separator**, a token of its own. By it the model says that it
# has finished, as with the `<|endoftext|>` of GPT-2. We count it as the answer's last token.

# %%
base = lab.base()
for prompt, answer in lab.pairs()[:2]:
    print(repr(prompt), "->", repr(answer))
print("the model continues:", repr(lab.say(base, "How now, my love!\n")))

# %% [markdown]
# It knows nothing of answers yet. To train it, we write a pair as one sequence of tokens and let the model predict each
# next token, as always. But we do not want it to learn to write prompts: those come from users. So their tokens do not
# count in the loss. PyTorch's `F.cross_entropy` leaves out each target that is **-100** (its `ignore_index`), and
# divides by the number of those that are left.
#
# Take the prompt `a b` and the answer `X Y Z`. Nothing follows the last token, so four places remain:
#
# | input | a | b | X | Y |
# |---|---|---|---|---|
# | target | -100 | X | Y | Z |
#
# At `b`, the last token of the prompt, the model has to say `X`. So that place counts.
#
# **Predict.** A prompt has 12 tokens and its answer 20. How many places does the pair have, and at how many of them is
# the target -100?

# %% tags=["predict"]
num_places = 12 + 20 - 1
num_not_counted = 12 - 1

# %% tags=["nbval-check-output"]
prompt, answer = list(range(12)), list(range(20, 40))
targets = by_hand.targets_of(prompt, answer)
compare("places", num_places, len(targets), within=1)
compare("not counted", num_not_counted, targets.count(-100), within=1)

# %% [markdown] tags=["exercise"]
# ### Exercise 25.1 · What counts
#
# `prompt` and `answer` are lists of token numbers, of at least one each. Return the targets of the pair as a list. One
# line.

# %% tags=["by-hand", "exercise"]
def targets_of(prompt, answer):
    """The token that comes next at each place; -100 where it is the prompt's."""
    ### BEGIN SOLUTION
    return [-100] * (len(prompt) - 1) + answer
    ### END SOLUTION

# %% tags=["check"]
check("25.1", targets_of)

# %% [markdown]
# Now train with it. `lab.tune` makes 60 steps of AdamW with 16 pairs each, all weights of the model train, and it
# returns the loss on 64 other pairs.

# %%
before = lab.loss_on_others(base, by_hand.targets_of)
tuned = lab.base()
after = lab.tune(tuned, by_hand.targets_of)
print(f"loss of an answer's token: {before:.2f} before, {after:.2f} after")
print("it answers:", repr(lab.say(tuned, "How now, my love!\n")))

# %% [markdown]
# The words are poor, the model is tiny, but it has understood what is wanted: capital letters, and an end. Without the
# separator in the targets a model never learns to stop.
#
# **Takeaway: a pair is one sequence, and the targets of its prompt are -100. The last token of the prompt counts,
# because there the answer begins.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* In 25.1 the usual slip is one -100 too many and the first token of the answer lost, or the
# targets not shifted at all. `transformers` shifts inside of the model, so that its labels have -100 for **each** token
# of the prompt; ask the room why both are the same. (Label i there is the target of place i - 1.)

# %% [markdown]
# ## 2. Packed rows (core, 28 min)
#
# Pairs have different lengths. A batch is a rectangle, so each row is filled up (**padded**) to the longest one, and
# what the model computes there is thrown away. How much is that?

# %% tags=["nbval-check-output"]
from course.labs import l25_by_hand as by_hand
from course.labs import l25_tuning as lab

tokens, targets = lab.padded(lab.token_pairs()[:32], by_hand.targets_of)
real = sum(len(prompt) + len(answer) - 1 for prompt, answer in lab.token_pairs()[:32])
print(f"{real} of {tokens.numel()} places hold a token: {real / tokens.numel():.0%}")

# %% [markdown]
# And these pairs were chosen to be short. In a data set of instructions, where one answer is a word and the next a
# page, most of a batch can be padding. **Packing** puts pairs one after another into one row instead. Each is called
# a **document** of the row. Three things must then hold, which the picture shows for the pairs `ab -> XY`, `c -> Z`
# and `de -> UVW`:
#
# 1. the **targets** stay those of each pair. No document predicts the first token of the next one;
# 2. the **positions** begin at 0 in each document;
# 3. in attention a token sees the tokens of **its own document** up to itself, and no other.

# %% tags=["figure"]
plot.packed_row([("ab", "XY"), ("c", "Z"), ("de", "UVW")], caption="25.packed")

# %% [markdown]
# The mask at the right is a matrix [S, S] of True and False: row i says whom token i sees. PyTorch's
# `F.scaled_dot_product_attention` takes it as `attn_mask`, and there True means "sees".
#
# **Predict.** A row holds three documents of 5, 3 and 2 places. How many True does its mask have?

# %% tags=["predict"]
num_true = 5 * 6 // 2 + 3 * 4 // 2 + 2 * 3 // 2

# %% tags=["nbval-check-output"]
three = [([1, 2, 3], [4, 5, 6]), ([7, 8], [9, 10]), ([11], [12, 13])]
_, _, _, mask = by_hand.pack(three)
compare("True in the mask", num_true, int(mask.sum()), within=1)

# %% [markdown] tags=["exercise"]
# ### Exercise 25.2 · Pack
#
# `pairs` is a list of pairs (prompt, answer), each a list of token numbers. Return four tensors: the tokens, targets
# and positions of the row, int64 [S], and its mask, bool [S, S]. As above, the last token of each pair predicts nothing
# and is left out.
#
# A way to the mask: give each place the number of its document. `a[:, None] == a[None, :]` compares every element of a
# vector with every other. About 14 lines.

# %% tags=["by-hand", "exercise"]
def pack(pairs):
    """tokens, targets and positions [S], and the mask [S, S] of one row."""
    ### BEGIN SOLUTION
    tokens = []
    targets = []
    positions = []
    documents = []
    for number, (prompt, answer) in enumerate(pairs):
        own = (prompt + answer)[:-1]
        tokens += own
        targets += [-100] * (len(prompt) - 1) + answer
        positions += range(len(own))
        documents += [number] * len(own)
    document = torch.tensor(documents)
    same = document[:, None] == document[None, :]
    mask = same.tril()
    return torch.tensor(tokens), torch.tensor(targets), torch.tensor(positions), mask
    ### END SOLUTION

# %% tags=["check"]
check("25.2", pack)

# %% [markdown]
# Does the model compute the same for a document in a packed row as for the document alone? In labcode's GPT attention
# itself is one small module, `attention.core`, so that we can put one with a mask in its place. `lab.small()` is an
# untrained GPT in float64, in which rounding does not hide anything.

# %% tags=["by-hand"]
class MaskedAttention(nn.Module):
    """Attention in which a token sees what a mask [S, S] allows."""

    def __init__(self, mask):
        super().__init__()
        self.mask = mask

    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)

def with_mask(model, mask):
    """The same model, whose layers all use this mask."""
    for block in model.blocks:
        block.attention.core = MaskedAttention(mask)
    return model

# %% tags=["nbval-check-output"]
chosen = lab.token_pairs()[:3]
alone = lab.documents_alone(lab.small(), chosen)
tokens, targets, positions, mask = by_hand.pack(chosen)
packed = by_hand.with_mask(lab.small(), mask)(tokens[None], positions)
for number, off in enumerate(lab.off_alone(packed, alone)):
    print(f"document {number} as alone to 1e-12: {off < 1e-12}")

# %% [markdown]
# And what if one of the three things is forgotten? First the mask: the row is then one causal sequence, with
# positions that restart. Then the positions: the mask is right, and they run through from 0 to S - 1. For the second
# case take two models, one with **learned** positions, a vector for each position that is added to the token, and one
# with **rotary** ones, which turn queries and keys so that their product depends on the **distance** of two tokens
# alone.
#
# **Predict.** Which documents are still right without the mask: "all", "the first" or "none"? And if the positions run
# through, with learned ones, and with rotary ones?

# %% tags=["predict"]
right_without_mask = "the first"
right_with_learned = "the first"
right_with_rotary = "all"

# %% tags=["nbval-check-output"]
def who_is_right(kind, mask, positions):
    """Which documents of the row are what they are alone."""
    alone = lab.documents_alone(lab.small(kind), chosen)
    logits = by_hand.with_mask(lab.small(kind), mask)(tokens[None], positions)
    right = [off < 1e-12 for off in lab.off_alone(logits, alone)]
    names = {(True, True, True): "all", (True, False, False): "the first"}
    return names.get(tuple(right), "none")

CHOICES = ("all", "the first", "none")
causal = torch.ones_like(mask).tril()
through = torch.arange(len(tokens))
no_mask = who_is_right("learned", causal, positions)
learned = who_is_right("learned", mask, through)
rotary = who_is_right("rotary", mask, through)
compare("without the mask", right_without_mask, no_mask, options=CHOICES)
compare("learned positions", right_with_learned, learned, options=CHOICES)
compare("rotary positions", right_with_rotary, rotary, options=CHOICES)

# %% [markdown]
# Rotary positions forgive it, as long as they stay in the range that the model was trained on. No model forgives a
# missing mask, and no error tells you: it goes on training, with documents that read their neighbours.
#
# A mask of [S, S] is good for understanding. For 32,768 tokens it would have a billion entries, most of them False.
# `F.scaled_dot_product_attention` has to read it all. Other kernels skip what is all False. PyTorch's
# `torch.nn.attention.varlen.varlen_attn` takes the boundaries of the documents, as cumulative lengths (`cu_seq_q` and
# `cu_seq_k`: 0, 5, 8, 10 for the three documents above). It is **not causal by itself**: in PyTorch 2.13 that is
# `window_size=(-1, 0)`. FlexAttention takes a function of batch, head and two places, here `(document[q] ==
# document[k]) & (q >= k)`. Where a framework packs for you, look whether it does that: concatenating texts without a
# mask is called packing, too.
#
# **Takeaway: a packed row needs its own targets, positions and mask. Then each document is what it is alone, up to
# rounding.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* To be expected in 25.2: all pairs concatenated first and shifted afterwards, so that a document
# predicts the first token of the next; a mask without `tril`; positions that begin at 1. Ask: what does a row of many
# short documents cost in attention, beside one long document of the same length? (Each triangle is small: the sum of
# the squares, and not the square of the sum. So ranks with equal numbers of tokens can have unequal work.)

# %% [markdown]
# ## 3. A mean over the tokens of all ranks (core, 26 min)
#
# `F.cross_entropy` returns a **mean over the tokens that count**. In pre-training every rank and micro-batch has the
# same number of them, and the mean of such means is the mean over all. Here it is not. Let rank 0 have 30 tokens in its
# answers with a mean loss of 2.0, and rank 1 have 10 with a mean of 4.0.
#
# **Predict.** What is the mean of the two ranks' means, and what is the mean loss of all 40 tokens?

# %% tags=["predict"]
mean_of_means = 3.0
mean_of_tokens = 2.5

# %% tags=["nbval-check-output"]
of_tokens = torch.cat((torch.full((30,), 2.0), torch.full((10,), 4.0)))
means = torch.stack([own.mean() for own in of_tokens.split([30, 10])])
compare("mean of means", mean_of_means, means.mean().item(), within=1)
compare("mean of tokens", mean_of_tokens, of_tokens.mean().item(), within=1)

# %% [markdown]
# In the mean of means a token of rank 1 counts three times as much as one of rank 0. The more a rank or micro-batch
# has to say, the less each of its words counts. So short answers weigh too much, and how much depends on how the pairs
# happen to be dealt out. DDP computes a mean of means: it averages the gradients of the ranks. And so does the usual
# gradient accumulation, which divides each micro-batch's loss by the number of micro-batches.
#
# This was in several training libraries at once. Issue 24725 of `transformers` describes it in July 2023. In October
# 2024 it became known as **the** bug of gradient accumulation: `transformers` fixed it in pull requests 34191 and
# 34198 for the micro-batches of one rank, and in 34373 for several ranks. torchtune (pull request 1875) introduced
# its cure "in honor of the day the ML community first discovered the fact that (x1 / n1) + (x2 / n2) != (x1 + x2) /
# (n1 + n2)".
#
# Here are the tokens that count on our four ranks, each with two micro-batches of two pairs. We have dealt the pairs
# out unfairly on purpose; if they are shuffled, the error is smaller, and still no zero. Rank 3 has got the shortest
# answers, and in its second micro-batch none at all. That happens when prompts are so long that the context ends
# before their answers begin.

# %% tags=["figure"]
from course.labs import l25_by_hand as by_hand
from course.labs import l25_tuning as lab

counts = {}
for rank in range(4):
    own = {}
    for number, (_, targets) in enumerate(lab.micro_batches(rank, by_hand.targets_of)):
        own[f"micro-batch {number}"] = int((targets != -100).sum())
    counts[f"rank {rank}"] = own
plot.bars(counts, caption="25.tokens")

# %% [markdown]
# What we want is one number: L = (sum of the losses of all tokens that count) / N, where N is their number on **all
# ranks** and in **all micro-batches** of the step. How does one get its gradient from DDP?
#
# - N has to be known before the first backward. It takes one all-reduce of one number.
# - A micro-batch's part of L is the **sum** of its losses, divided by N. Backward adds up the parts of the
#   micro-batches in `.grad`, as it always does.
# - DDP then divides the sum over the ranks by the number of ranks, p. We have divided already. So each part is
#   multiplied by p, which undoes it.
#
# A mean over no tokens is 0/0, which is `nan`. A sum over none is 0, and its gradient is zeros.

# %% [markdown] tags=["exercise"]
# ### Exercise 25.3 · The loss of a step
#
# `micro_batches` is a list of (tokens, targets), and `model(tokens)` gives logits [B, S, V]. `group` holds the ranks
# of data parallelism. Call backward for each micro-batch, so that after DDP's **mean over the ranks of the group**
# each gradient is that of L. (The check takes that mean after your function. In a real DDP it happens during
# backward, in each micro-batch or, under `no_sync` (lesson 05), in the last; the result is the same.) Return L
# itself, a number or a tensor, the same on all ranks, for the log. At least one token counts in the step. About 12
# lines.
#
# `F.cross_entropy` wants logits as [B·S, V] and targets as [B·S], and knows `reduction="sum"`. The check runs your
# function on simulated ranks first, in groups of four, six and three, and then on the four real ones.

# %% tags=["by-hand", "exercise"]
def backward_of_step(model, micro_batches, group):
    """Gradients of the mean over all tokens of the group; returns that mean."""
    ### BEGIN SOLUTION
    count = torch.zeros((), dtype=torch.float64)
    for _, targets in micro_batches:
        count += (targets != -100).sum()
    dist.all_reduce(count, group=group)
    total = torch.zeros((), dtype=torch.float64)
    for tokens, targets in micro_batches:
        logits = model(tokens)
        loss = F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), reduction="sum"
        )
        (loss * group.size() / count).backward()
        total += loss.detach()
    dist.all_reduce(total, group=group)
    return total / count
    ### END SOLUTION

# %% tags=["check"]
check("25.3", backward_of_step, ranks)

# %% [markdown]
# Under a real DDP, on the pairs of the figure. `by_means` divides as the usual recipe does, except that an empty
# micro-batch counts as 0, where its mean would make everything `nan`.

# %% tags=["nbval-check-output"]
def by_means(model, micro_batches, group):
    """Each micro-batch by its own mean; DDP averages."""
    total = torch.zeros((), dtype=torch.float64)
    for tokens, targets in micro_batches:
        count = (targets != -100).sum().clamp(min=1)
        loss = F.cross_entropy(
            model(tokens).flatten(0, 1), targets.flatten(), reduction="sum"
        )
        part = loss / count / len(micro_batches)
        part.backward()
        total += part.detach()
    dist.all_reduce(total, group=group)
    return total / group.size()

truth_loss, truth = lab.on_one_process(by_hand.targets_of)
right_loss, right = ranks.run(
    lab.under_ddp, by_hand.backward_of_step, by_hand.targets_of
)[0]
wrong_loss, wrong = ranks.run(lab.under_ddp, by_means, by_hand.targets_of)[0]
off_right = lab.relative_error(right, truth)
off_wrong = lab.relative_error(wrong, truth)
print(f"by tokens: loss right to 1e-12: {abs(right_loss - truth_loss) < 1e-12}")
print(f"by tokens: gradient right to 1e-12: {off_right < 1e-12}")
print(f"mean of means: gradient off by {off_wrong:.0%} of its norm")

# %% [markdown]
# It is exact, with ranks that have many tokens, few, and none in a micro-batch.
#
# Two remarks for your own scripts. A rank whose micro-batch has nothing to count still calls the model and backward:
# DDP's all-reduce happens there, and the others would wait. And labcode's own loop has no such targets at all: its text
# data refuses tokens of -100, so that all ranks always have the same number.
#
# **Takeaway: add up losses, divide by the tokens of all ranks and micro-batches, and multiply by the number of ranks,
# because DDP takes a mean.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* In 25.3 most people forget p, or count the tokens of their own rank only. Some sum over the
# micro-batches rightly and then count each micro-batch over the ranks: right on one rank, wrong as soon as the
# micro-batches differ. Ask: is the mean over tokens the "right" one? (It is a choice: each token counts the same. The
# mean over pairs is another choice. A mean over micro-batches is none: it depends on how pairs are dealt out.)

# %% [markdown]
# ## 4. LoRA by hand (core, 22 min)
#
# Fine-tuning all weights takes as much memory as pre-training: 16 bytes for each weight under AdamW in mixed precision
# (lesson 04, section 6). **LoRA**, low-rank adaptation, freezes all of them, and puts beside a weight W [out, in] two
# thin matrices, the **adapter**: A [r, in] and B [out, r]. r is its **rank**, a small number such as 8 or 16, and has
# nothing to do with the ranks that compute.

# %% tags=["figure"]
plot.adapters({"y = W x + s B A x": {}}, caption="25.adapter")

# %% [markdown]
# The layer computes y = W x + s B (A x), with s = α / r. α is set by hand. The division is to save setting it again
# when r changes (section 4.1 of the paper). For large r it makes the adapter too small, says a later paper, and
# divides by √r ("rsLoRA"). At first **B is zero** and A is random. So training starts exactly from the frozen model.
#
# **Predict.** A layer of Llama 2 7B has a W of 4096 × 4096. How many numbers has its adapter with r = 16, and which
# fraction of W's is that?

# %% tags=["predict"]
num_trained = 16 * (4096 + 4096)
fraction_trained = num_trained / 4096**2

# %% tags=["nbval-check-output"]
from course.labs import l25_by_hand as by_hand
from course.labs import l25_tuning as lab
from labcode.models.lora import LoraLinear

with torch.device("meta"):
    layer = LoraLinear(nn.Linear(4096, 4096, bias=False), rank=16, alpha=32)
trained = sum(param.numel() for param in layer.parameters() if param.requires_grad)
compare("numbers that train", num_trained, trained, within=1)
compare("fraction", fraction_trained, trained / layer.weight.numel(), within=1.05)

# %% [markdown] tags=["exercise"]
# ### Exercise 25.4 · The layer
#
# Complete the class. It is given a whole `nn.Linear`, which may have a bias.
#
# 1. Freeze the layer. Make `self.a` [r, in] and `self.b` [out, r] as `nn.Parameter`, of the dtype of the layer's
#    weight: A random, for instance `torch.randn` divided by the root of `in`; B zero.
# 2. `forward` computes the equation. Multiply x by A first: [.., in] becomes [.., r]. The product B A, as large as W,
#    need not be made.
# 3. `merge`, which is called once, adds s B A to the layer's weight, in place, without autograd. `forward` gives the
#    same as before then, and costs no more than the plain layer. `self.is_merged` is there to tell it.
#
# About 14 lines.

# %% tags=["by-hand", "exercise"]
class Lora(nn.Module):
    """A frozen linear layer with an adapter that trains."""

    def __init__(self, layer, rank, alpha):
        super().__init__()
        self.layer = layer
        self.scale = alpha / rank
        self.is_merged = False
        ### BEGIN SOLUTION
        layer.requires_grad_(False)
        num_out, num_in = layer.weight.shape
        a = torch.randn(rank, num_in, dtype=layer.weight.dtype) / num_in**0.5
        b = torch.zeros(num_out, rank, dtype=layer.weight.dtype)
        self.a = nn.Parameter(a)
        self.b = nn.Parameter(b)
        ### END SOLUTION

    def forward(self, x):
        """[.., in] -> [.., out]"""
        ### BEGIN SOLUTION
        y = self.layer(x)
        if self.is_merged:
            return y
        return y + self.scale * (x @ self.a.T) @ self.b.T
        ### END SOLUTION

    @torch.no_grad()
    def merge(self):
        """Put the adapter into the weight of the layer."""
        ### BEGIN SOLUTION
        self.layer.weight += self.scale * self.b @ self.a
        self.is_merged = True
        ### END SOLUTION

# %% tags=["check"]
check("25.4", Lora)

# %% [markdown]
# Why is one of the two zero, and why not both? The gradient of B is the gradient of y times A x, and that of A goes
# through B.
#
# **Predict.** After the first backward, is the gradient of A "zeros" or "other"? And that of B?

# %% tags=["predict"]
gradient_of_a = "zeros"
gradient_of_b = "other"

# %% tags=["nbval-check-output"]
def kind_of(grad):
    return "other" if grad.any() else "zeros"

torch.manual_seed(0)
layer = by_hand.Lora(nn.Linear(6, 5), rank=2, alpha=4)
layer(torch.randn(3, 6)).square().sum().backward()
compare("A", gradient_of_a, kind_of(layer.a.grad), options=("zeros", "other"))
compare("B", gradient_of_b, kind_of(layer.b.grad), options=("zeros", "other"))

# %% [markdown]
# B moves in the first step, and from the second one on A does as well. If both were zero, neither would ever move.
#
# Now the model of section 1, with an adapter beside the four linear layers of each block. labcode's `add_adapters`
# freezes a whole model and does that.

# %%
from labcode.config import LoraConfig
from labcode.models.lora import add_adapters

everything = lab.base()
beside = add_adapters(lab.base(), LoraConfig(rank=4, alpha=8), seed=0)
for name, model in {"all weights": everything, "adapters": beside}.items():
    num = sum(param.numel() for param in model.parameters() if param.requires_grad)
    loss = lab.tune(model, by_hand.targets_of)
    print(f"{name:12}{num:8,} numbers train, loss {loss:.2f} on other pairs")
print("with adapters:", repr(lab.say(beside, "How now, my love!\n")))

# %% [markdown]
# **Takeaway: LoRA trains r (in + out) numbers beside each frozen weight. B is zero at first, so that training begins at
# the model; merged, an adapter costs nothing.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* In 25.4 people multiply by alpha and forget r, drop the bias, or merge and go on adding the
# adapter. Ask: our model is tiny, so the adapters are a large fraction of it; why is it less than 1 % in a large one?
# (r (in + out) grows with the width, in · out with its square.)

# %% [markdown]
# ## 5. What a rank keeps (core, 18 min)
#
# In mixed precision with AdamW a weight that trains takes 16 bytes, in either of the usual ways:
#
# | | weight | gradient | averages of AdamW |
# |---|---|---|---|
# | weights in float32, as in our model | 4 | 4 | 8 |
# | weights in bfloat16, with a copy in float32 | 2 + 4 | 2 | 8 |
#
# A frozen weight has no gradient and no optimizer's state: 2 bytes in bfloat16 are all.
# **QLoRA** keeps the frozen weights in 4 bits each. Let us look at these bits first.
#
# Four bits name one of 16 values. Weights are about normally distributed, so the 16 values of **NF4** ("4-bit
# NormalFloat") lie close together around zero and far apart outside. Each block of 64 weights is divided by its largest
# absolute value, and each weight becomes the number of the nearest of the 16 values.

# %% tags=["nbval-check-output"]
from labcode.precision import nf4

values = nf4.values()
print(" ".join(f"{value:.2f}" for value in values.tolist()))
block = torch.tensor([0.02, -0.5, 0.11, 1.0, -0.24, 0.0]) * 0.03
largest = block.abs().max()
codes = (block[:, None] / largest - values).abs().argmin(1)
print("weights  ", [round(value, 4) for value in block.tolist()])
print("codes    ", codes.tolist())
print("read back", [round(value, 4) for value in (values[codes] * largest).tolist()])

# %% [markdown]
# Two codes make a byte. The largest values of the blocks, the **scales**, are kept too: in 8 bits each, and for each
# 256 scales there is one number of 4 bytes by which they are divided, and one mean for the whole weight, 4 bytes as
# well. That second quantization, of the scales, is QLoRA's "double quantization".
#
# **Predict.** How many bytes does a weight of 1024 × 1024 take in NF4?

# %% tags=["predict"]
nf4_bytes = 1024 * 1024 // 2 + 1024 * 1024 // 64 + 4 * 1024 * 1024 // 64 // 256 + 4

# %% tags=["nbval-check-output"]
weight = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0)) * 0.02
in_nf4 = nf4.quantize(weight)
compare("bytes", nf4_bytes, in_nf4.num_bytes, unit="B", within=1)
off = ((nf4.dequantize(in_nf4) - weight).norm() / weight.norm()).item()
print(f"{8 * in_nf4.num_bytes / weight.numel():.3f} bits a weight, off by {off:.0%}")

# %% [markdown]
# NF4 is a table of 16 values, and no GPU multiplies the numbers of places in a table. (The four bits of lesson 22 are
# another format.) So a layer expands its W to 16 bits, multiplies, and throws it away, in
# forward and again in backward. So at any time one expanded weight is in memory, and not all of them. The adapter
# beside it trains with the rounded W in place.
#
# Now add it up for a real model: a GPT with N weights, P of them in the linear layers of its blocks, and adapters
# beside those with n numbers. What trains, be it all weights or the adapters, is in float32. For LoRA the frozen
# weights are in bfloat16. For QLoRA those P are in NF4, and the rest (embeddings, norms, biases, and the last layer,
# which gives the logits) stays in bfloat16.

# %% tags=["nbval-check-output"]
from course.labs import l25_tuning as lab

model = lab.model_to_keep("LoRA")
frozen = [param for param in model.parameters() if not param.requires_grad]
N = sum(param.numel() for param in frozen)
P = 4 * 12 * 256**2
n = sum(param.numel() for param in model.parameters()) - N
print(f"N = {N:,}   P = {P:,}   n = {n:,}")

# %% [markdown]
# **Predict.** How many MB are weights, gradients and optimizer: if all weights train, for LoRA, and for QLoRA with
# 0.516 bytes for each weight in NF4? An estimate on paper is good enough.

# %% tags=["predict"]
full_mb = 16 * 3.2
lora_mb = 2 * 3.2 + 16 * 0.066
qlora_mb = 0.516 * 3.15 + 2 * 0.1 + 16 * 0.066

# %% tags=["nbval-check-output"]
guesses = (full_mb, lora_mb, qlora_mb)
for way, guess in zip(lab.WAYS, guesses):
    kept_mb = lab.bytes_kept(way) / 1e6
    compare(way, guess, kept_mb, unit="MB", within=1.1, found="counted")

# %% [markdown]
# What is still missing is the memory of activations. It hardly becomes smaller: backward goes through the frozen
# layers all the same, to get to the adapters below. So with a large batch LoRA may save little. Ask labcode whether
# Llama 2 7B fits on a GPU of 24 GB. (`python -m labcode.perf fits --model llama2-7b --gpus 1 --gpu 24gb --lora 16
# --four-bit` says the same, and more.)

# %% tags=["nbval-check-output"]
from labcode.perf import fits
from labcode.perf.hub_config import NamedModel
from labcode.perf.settings import Settings
from labcode.perf.transformer import load_model

llama = NamedModel("llama2-7b", load_model("llama2-7b"))
SETTINGS = {
    "all weights": Settings(1),
    "LoRA": Settings(1, adapter_rank=16),
    "QLoRA": Settings(1, adapter_rank=16, four_bit=True),
}
for way, settings in SETTINGS.items():
    told = fits.answer(llama, 1, fits.gpu_memory("24gb"), state="mixed", base=settings)
    print(f"{way:12}{told.splitlines()[3]}")

# %% [markdown]
# **Takeaway: a frozen weight takes 2 bytes, or 0.516 in NF4, and one that trains takes 16. Activations stay as they
# were.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Ask: with eight GPUs, does ZeRO-1 help LoRA? (Hardly: it shards the optimizer's state of the few
# adapters. ZeRO-3 does, because it shards the frozen weights.)

# %% [markdown]
# ## 6. LoRA under tensor parallelism (core, 32 min)
#
# Lesson 09 cut an MLP in two ways. A **column-parallel** layer has some of the output features on each rank: W is cut
# along `out`, x enters whole through f (`copy_to`), whose backward is an all-reduce. A **row-parallel** layer has some
# of the input features: W is cut along `in`, each rank computes a partial sum, and g (`reduce_from`) adds them up.
#
# Now each W has A [r, in] and B [out, r] beside it. A rank needs no more of them than its part of the layer uses.
#
# **Predict.** Which matrix is cut in a column-parallel layer, and which in a row-parallel one: "A", "B" or "both"?

# %% tags=["predict"]
cut_in_column = "B"
cut_in_row = "A"

# %% tags=["nbval-check-output"]
from course.labs import l25_by_hand as by_hand
from course.labs import l25_tuning as lab
from labcode.models.lora import LoraLinear
from labcode.parallel.lora import LoraColumnParallelLinear, LoraRowParallelLinear


def cut_matrices(parallel):
    """"A" or "B" or "both": which has another shape on a rank than as a whole."""
    whole = LoraLinear(nn.Linear(16, 16), rank=4, alpha=4)
    own = parallel(whole, dist.group.WORLD)
    names = []
    for name, matrix in {"A": "lora_a", "B": "lora_b"}.items():
        if getattr(own, matrix).shape != getattr(whole, matrix).shape:
            names.append(name)
    return "both" if len(names) == 2 else "".join(names)

column = ranks.run(cut_matrices, LoraColumnParallelLinear)[0]
row = ranks.run(cut_matrices, LoraRowParallelLinear)[0]
compare("column-parallel", cut_in_column, column, options=("A", "B", "both"))
compare("row-parallel", cut_in_row, row, options=("A", "B", "both"))

# %% tags=["figure"]
PANELS = {
    "column-parallel": {"W": "rows", "B": "rows"},
    "row-parallel": {"W": "columns", "A": "columns"},
}
plot.adapters(PANELS, num_ranks=2, caption="25.shards")

# %% [markdown]
# A rank of the column-parallel layer computes some of the output features. They are rows of B, and each of them needs
# the whole A x. A rank of the row-parallel layer has some of the input features. They are columns of A, and its part of
# A x goes to every output feature.
#
# In both layers the product of a rank's A and B is just its part of B A, as W's part is of W. So an adapter can be
# merged without a message.
#
# The two products of a row-parallel layer are both partial sums, W_i x_i and B (A_i x_i). One g after their sum serves
# both, and forward needs no further message.
#
# In backward one matrix of each pair is the odd one. It is **whole** on each rank, but its gradient is not:
#
# - **A of the column-parallel layer** gets its gradient through B. Rank i has the rows B_i alone, so its gradient of A
#   is what comes through these rows. The whole gradient is the **sum over the ranks**.
# - **B of the row-parallel layer** is multiplied with A_i x_i. The gradient of B is the gradient of y times that, and
#   so again a part. Sum over the ranks.
#
# If nobody sums, each rank updates its copy by another gradient. The copies drift apart, with no error and a loss that
# falls. A matrix that is cut has the whole gradient of its part. And the gradient of x is complete as well: layer and
# adapter both take x after f, whose backward sums over the ranks what comes back from the two of them.

# %% [markdown] tags=["exercise"]
# ### Exercise 25.5 · An MLP with adapters over a group
#
# Complete the class for `y = down(F.gelu(up(x)))`, where up is column-parallel and down row-parallel. Each of `up` and
# `down` is given whole, as (W, A, B), tensors without gradients. Rank number i of the group keeps part i.
#
# 1. In `__init__` set `self.up` and `self.down` to (W, A, B) of this rank. Copy each of the six with `clone()`, also
#    what stays whole, and let A and B require a gradient.
# 2. `forward(x)` takes the whole x [T, H] on each rank and returns the whole y. `x @ w.T` multiplies by a W of [out,
#    in]; `copy_to(x, group)` is f, and `reduce_from(x, group)` is g.
# 3. `finish()` is called after backward. Then the `.grad` of each A and B must be that of one process.
#
# About 16 lines. As in 25.3, the check simulates groups of four, six and three ranks before it asks the real ones.

# %% tags=["by-hand", "exercise"]
from labcode.comm.collectives import copy_to, reduce_from


class TunedMLP:
    """An MLP whose two layers have an adapter, cut over a group."""

    def __init__(self, up, down, scale, group):
        self.scale = scale
        self.group = group
        p = group.size()
        number = group.rank()
        ### BEGIN SOLUTION
        w, a, b = up
        own_w = w.chunk(p, 0)[number].clone()
        own_b = b.chunk(p, 0)[number].clone()
        self.up = (own_w, a.clone().requires_grad_(), own_b.requires_grad_())
        w, a, b = down
        own_w = w.chunk(p, 1)[number].clone()
        own_a = a.chunk(p, 1)[number].clone()
        self.down = (own_w, own_a.requires_grad_(), b.clone().requires_grad_())
        ### END SOLUTION

    def product(self, x, w, a, b):
        """W x + s B A x, with what of each this rank has."""
        return x @ w.T + self.scale * (x @ a.T) @ b.T

    def forward(self, x):
        """[T, H] -> [T, H]"""
        ### BEGIN SOLUTION
        x = copy_to(x, self.group)
        inner = F.gelu(self.product(x, *self.up))
        return reduce_from(self.product(inner, *self.down), self.group)
        ### END SOLUTION

    def finish(self):
        """After backward: every gradient is that of one process."""
        ### BEGIN SOLUTION
        dist.all_reduce(self.up[1].grad, group=self.group)
        dist.all_reduce(self.down[2].grad, group=self.group)
        ### END SOLUTION

# %% tags=["check"]
check("25.5", TunedMLP, ranks)

# %% [markdown]
# Here are the gradients of four ranks beside one process, with the sums and without them.

# %% tags=["nbval-check-output"]
truth = lab.mlp_alone()
for finish in (True, False):
    of_ranks = ranks.run(lab.mlp_on_ranks, by_hand.TunedMLP, finish)
    right = []
    for name, expected in truth.items():
        found = lab.whole_gradient([each[name] for each in of_ranks], expected)
        if lab.relative_error(found, expected) < 1e-9:
            right.append(name)
    print("with the sums:" if finish else "without:      ", ", ".join(right))

# %% [markdown]
# How much do these sums send?
#
# **Predict.** Our MLP goes from 16 features to 48 and back to 16, with r = 4, and its numbers have 8 bytes. It has just
# been given 10 tokens. How many bytes does `finish` put into all-reduces on each rank?

# %% tags=["predict"]
finish_bytes = 8 * (4 * 16 + 4 * 16)

# %% tags=["nbval-check-output"]
from labcode.comm.counting import counted


def bytes_of_finish():
    x, up, down = lab.mlp_tensors()
    mlp = by_hand.TunedMLP(up, down, lab.SCALE, dist.group.WORLD)
    mlp.forward(x).sum().backward()
    with counted() as calls:
        mlp.finish()
    return sum(call.num_bytes for call in calls)

compare("bytes", finish_bytes, ranks.run(bytes_of_finish)[0], unit="B", within=1)
show_source(LoraRowParallelLinear.forward)

# %% [markdown]
# That is r · in numbers for up's A and r · out for down's B, once in a step, however many tokens the step has. `peft`
# has chosen otherwise for Megatron-LM's layers: it sums inside of the adapter in each forward or backward, r numbers
# for **each token**, and then no gradient is partial.
#
# The source above is labcode's row-parallel layer. It names B in its attribute `partial`, and the sum happens where
# all partial gradients are summed, together with those of the norms under sequence parallelism.
#
# **Takeaway: where W is cut along its outputs, B is cut; where it is cut along its inputs, A is. The other matrix is
# whole on every rank, its gradient is partial, and one all-reduce over tp in a step makes it whole.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* People often put an f in front of A **and** sum in `finish`; each is right, both together count
# p times. Others leave out both because "A is the same on all ranks". Ask: after one step without the sums, whose
# weights differ between ranks, and does the loss show it? (Only the whole matrices; the loss is computed by all ranks
# together and looks healthy.)

# %% [markdown]
# ## 7. Sharded: two errors, and a way around them (core, 14 min)
#
# The frozen model is what takes the memory, so one wants to shard it: ZeRO-3, or FSDP. PyTorch's first FSDP
# (`FullyShardedDataParallel`) concatenates all weights of a unit, such as a block of the model, into **one flat
# parameter** and cuts that. A parameter either requires a gradient or does not, and it has one dtype. A unit
# with an adapter has both kinds. This cell is broken on purpose.

# %% tags=["raises-exception"] raises="RankError: rank 0: ValueError: Must flatten tensors with uniform `requires_grad`"
from course.labs import l25_by_hand as by_hand
from course.labs import l25_tuning as lab

ranks.run(lab.flattened, use_orig_params=False)

# %% [markdown]
# People have asked about this error again and again (issue 1702 of `peft`, issues 100945 and 104690 of PyTorch).
# `use_orig_params=True` accepts the mixture, and then the second error comes, if the base is kept in bfloat16 and the
# adapter in float32.

# %% tags=["raises-exception"] raises="RankError: rank 0: ValueError: Must flatten tensors with uniform dtype"
ranks.run(lab.flattened, use_orig_params=True, base_dtype=torch.bfloat16)

# %% [markdown]
# And with one dtype? Then it works, but the flat parameter requires a gradient as a whole.
#
# **Predict.** A unit has a W of 64 × 64 and an adapter of rank 2, and lies on four ranks. How many numbers has the
# gradient that FSDP keeps of it on a rank? (Only 2 · 2 · 64 numbers of the unit train.)

# %% tags=["predict"]
flat_gradient = (64 * 64 + 2 * 2 * 64) / 4

# %% tags=["nbval-check-output"]
kept = ranks.run(lab.flat_gradient_numbers, 64, 2)[0]
compare("numbers", flat_gradient, kept, within=1)

# %% [markdown]
# The memory for gradients that LoRA was to save is not saved. (Who has to stay with the first FSDP wraps adapters in
# units of their own: `peft` has an auto-wrap policy for it, `fsdp_auto_wrap_policy`.) `fully_shard`, PyTorch's second
# FSDP, cuts **each parameter by itself**: a frozen one stays frozen, has no gradient, and may have another dtype than
# those that train. In labcode's ZeRO-3 a frozen weight has no gradient either. Here is a small GPT with adapters
# under `fully_shard`, beside one process that has the samples of all four ranks. (All samples have 23 targets that
# count, so this time the mean of the ranks' losses is the loss of all.)

# %% tags=["nbval-check-output"]
from torch.distributed.fsdp import fully_shard

from labcode.config import LoraConfig
from labcode.models.lora import add_adapters


def adapted():
    return add_adapters(lab.small(), LoraConfig(rank=3, alpha=6), seed=0).double()

def losses(model, tokens):
    """Of three steps; only the adapters are given to the optimizer."""
    params = [param for param in model.parameters() if param.requires_grad]
    adamw = torch.optim.AdamW(params, lr=1e-2)
    found = []
    for _ in range(3):
        adamw.zero_grad()
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        adamw.step()
        found.append(loss.item())
    return torch.tensor(found, dtype=torch.float64)

def on_its_sample(rank, samples):
    model = adapted()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    found = losses(model, samples[rank : rank + 1])
    frozen = [param for param in model.parameters() if not param.requires_grad]
    return found, sum(param.grad is not None for param in frozen)

samples = torch.randint(60, (4, 24), generator=torch.Generator().manual_seed(0))
of_ranks = ranks.run(on_its_sample, samples)
mean = torch.stack([found for found, _ in of_ranks]).mean(0)
off = (mean - losses(adapted(), samples)).abs().max().item()
print(f"three losses as on one process to 1e-9: {off < 1e-9}")
print(f"frozen weights with a gradient: {of_ranks[0][1]}")

# %% [markdown]
# ### The checkpoint
#
# What is worth saving are the adapters; the frozen model can be downloaded again. In labcode a weight
# belongs to an adapter if the last part of its name is `lora_a` or `lora_b`:

# %% tags=["nbval-check-output"]
from labcode.models.lora import is_adapter

weights = adapted().state_dict()
own = {name: value for name, value in weights.items() if is_adapter(name)}
print(list(own)[:2], f"and {len(own) - 2} more of {len(weights)} tensors")

# %% [markdown]
# labcode's checkpoints hold just these, and are read again on any number of ranks. `python -m labcode.run.export RUN
# DIR --adapter` writes `adapter_model.safetensors` and `adapter_config.json`, as `peft` reads them. A test of the
# course lets `peft` itself read such a folder: in float64, what it computes is what the merged weights compute, to
# 1e-12.
#
# **Takeaway: one flat parameter has one dtype and one requires_grad. Per-parameter sharding has neither problem. The
# optimizer gets the adapters alone, and so does the checkpoint.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Ask: what happens if all parameters are given to AdamW, frozen ones as well? (Nothing bad: it
# skips what has no gradient. But a frozen weight that once had one, from a flat parameter, would be decayed.)

# %% [markdown]
# ## From here to GPUs and SLURM (core, 2 min)
#
# `torchrun --nproc-per-node=4 -m labcode.train gpt_tiny --lora.rank 8 --train.start_from RUN` trains adapters beside
# the weights of an earlier run, and srun starts the same on several nodes. It goes with each kind of parallelism:
# `--parallel.tp 2`, `--parallel.zero_stage 3`, or pipeline stages, of which one may be frozen as a whole. On GPUs
# nothing of this lesson changes. With a model of some billion weights, begin with LoRA on a single GPU, if `fits`
# says that it fits: then p GPUs are plain data parallelism with small messages, since only the gradients of adapters
# travel.
#
# ## Questions (core, 3 min)
#
# **1.** Your loss falls as it should, but a colleague with twice as many micro-batches of half the size gets another
# curve. What do you look at first?
#
# <details><summary>Answer</summary>
#
# Whether the loss is divided by the tokens of the whole step, or each micro-batch by its own.
# </details>
#
# **2.** A packed row has the right mask, and positions that run through. Which models are wrong?
#
# <details><summary>Answer</summary>
#
# Those with learned positions. With rotary ones only distances count, and inside of a document they are right.
# </details>
#
# **3.** Why does the gradient of B in a row-parallel layer need a sum over tp, although every rank has the whole B?
#
# <details><summary>Answer</summary>
#
# On each rank it is multiplied with A_i x_i, which is a part of A x. The gradient is the part that belongs to it.
# </details>
#
# **4.** From lesson 13: which stage of ZeRO helps LoRA most, and why do the stages 1 and 2 help little?
#
# <details><summary>Answer</summary>
#
# Stage 3, which shards the weights: the frozen ones are nearly everything. Optimizer's state and gradients belong to
# the few adapters.
# </details>
#
# ## Recap
#
# | | |
# |---|---|
# | pair | one sequence; targets of the prompt are -100, the last token of the prompt counts |
# | packed row | own targets, positions from 0, a mask of triangles; each document as alone |
# | loss of a step | p · (sum of losses) / (tokens of all ranks and micro-batches), then DDP's mean |
# | LoRA | y = W x + (α / r) B A x, B zero at first; r (in + out) numbers train |
# | bytes | 16 for what trains, 2 for a frozen weight, 0.516 in NF4 |
# | column-parallel | B cut, A whole, gradient of A summed over tp |
# | row-parallel | A cut, B whole, gradient of B summed over tp |
# | FSDP | one flat parameter mixes; `fully_shard` cuts each by itself |
#
# ## Sources
#
# - Hu et al. 2021, *LoRA*, arXiv:2106.09685, section 4.1.
# - Kalajdzievski 2023, *A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA*, arXiv:2312.03732: rsLoRA.
# - Dettmers et al. 2023, *QLoRA*, arXiv:2305.14314, section 3 and appendix E: NF4 and double quantization.
# - transformers, issue 24725: <https://github.com/huggingface/transformers/issues/24725>, and pull requests 34191:
#   <https://github.com/huggingface/transformers/pull/34191>, 34198:
#   <https://github.com/huggingface/transformers/pull/34198> and 34373:
#   <https://github.com/huggingface/transformers/pull/34373>: the mean of means, in micro-batches and over devices.
# - torchtune, pull request 1875: <https://github.com/meta-pytorch/torchtune/pull/1875>: the same.
# - peft, issue 1702: <https://github.com/huggingface/peft/issues/1702>, and PyTorch, issues 100945:
#   <https://github.com/pytorch/pytorch/issues/100945> and 104690: <https://github.com/pytorch/pytorch/issues/104690>:
#   flat parameters and LoRA.

# %%
ranks.close()
