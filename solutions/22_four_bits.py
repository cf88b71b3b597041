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
# # 22 · Short sums, small blocks, four bits
#
# Lesson 18 gave each tensor one scale and accumulated its matmuls in float32. Both are simpler than what large training
# runs do today. The FP8 units of a Hopper GPU keep about 14 bits of a sum, a few huge numbers spoil the scale of a whole
# tensor, and Blackwell GPUs multiply numbers of four bits. In this lesson you emulate the short sum and repair it, and
# you give each tile of a matrix its own scale. Then you write the three ideas with which a model trains in four bits:
# square blocks for weights, stochastic rounding for gradients, and a rotation that mixes the numbers of a block.
#
# ## Goals
#
# - say how many bits of a sum are kept, how the error grows with its length, and what stops it;
# - quantise by tiles of 1 × 128 and squares of 128 × 128, and say which tensor gets which and why;
# - say what NVFP4 can hold, and which gradients it turns into zeros;
# - write stochastic rounding, and predict when it is better than rounding to nearest;
# - write the Hadamard transform, and say in which matmul it may be used;
# - judge a training run in four bits against what another seed changes.
#
# **Time**: 148 minutes. Good places for a break are after sections 2 and 4.
#
# **Needs**: lesson 18 (sections 1, 4, 5, 7, 8).

# %%
import math

import torch

from course.lab import Ranks, check, compare, plot
from course.labs import l22_four_bits as lab
from labcode.precision import formats

ranks = Ranks(2)

# %% [markdown]
# ## 1. A sum of 14 bits (core, 41 min)
#
# Each entry of a matmul y = a bᵀ is a sum of K products. The product of two e4m3 numbers has at most 8 significant
# bits, so it is exact in float32. What matters is how many bits the accumulator keeps.
#
# A tensor core does not add one product after the other. One instruction of a Hopper GPU takes 32 products of FP8 and
# the sum so far. It aligns all of them to the exponent of the **largest** one, as one lines up decimal points before
# adding, and keeps 13 bits after the leading one. Everything further to the right is dropped. This is what DeepSeek-AI
# (2024, sections 3.3.2 and 3.5.2) report; NVIDIA publishes no such detail. We assume that dropping means rounding towards
# zero. Blackwell keeps more: users have measured 25 bits (DeepGEMM, issue 176).
#
# For example, take 3 bits after the leading one, and the terms 12, 1.9, -1.9 and 3.5. The largest is 12 = 8 · 1.5, so
# the last bit that is kept stands for 8 / 2^3 = 1. Each of the terms is cut to an integer, towards zero, and the sum is
# 12 + 1 - 1 + 3 = 15. If the first term were 20, the last bit would stand for 2, and the sum would be
# 20 + 0 - 0 + 2 = 22.

# %% [markdown] tags=["exercise"]
# ### Exercise 22.1 · Cut off where the largest one ends
#
# `terms` is a float64 tensor [.., n]. Return its sums over the last dim, [..], where each sum has its own largest term.
# As in exercise 18.4, `torch.frexp(x)` gives (f, n) with x = f · 2^n and 0.5 ≤ |f| < 1, `torch.ldexp(y, n)` is y · 2^n,
# and `torch.trunc` cuts off towards zero. If all terms are zero, the sum is 0. About 4 lines.

# %% tags=["exercise"]
def add_aligned(terms, fraction_bits):
    """Sums of terms that are cut off where the largest one of each sum ends."""
    ### BEGIN SOLUTION
    largest = terms.abs().amax(-1, keepdim=True)
    _, n = torch.frexp(largest)
    unit = torch.ldexp(torch.ones_like(largest), n - 1 - fraction_bits)
    return (torch.trunc(terms / unit) * unit).sum(-1)
    ### END SOLUTION

# %% tags=["check"]
check("22.1", add_aligned)

# %% [markdown]
# Now the whole matmul. The sum so far takes part in each instruction as the 33rd term. It grows, and so does the unit
# below which the 32 new products are cut off. If all terms are positive, each cut makes the sum smaller, and these
# errors do not average out.
#
# **Predict.** Take positive numbers, so that the sum grows steadily. From K = 1,024 to K = 4,096, how does the relative
# error of the matmul change: "about the same", "twice as large", or "four times as large"?

# %% tags=["predict"]
growth = "four times as large"

# %%
def error_of(length, kind="positive", piece=None):
    """Relative error of a matmul whose sums have 14 bits."""
    a, b = lab.numbers(kind, length)
    truth = a.double() @ b.double().T
    return lab.relative_distance(lab.short_product(a, b, piece), truth)

GROWTHS = {"about the same": 1, "twice as large": 2, "four times as large": 4}
factor = error_of(4096) / error_of(1024)
distance = {words: abs(math.log(factor / size)) for words, size in GROWTHS.items()}
compare("growth", growth, min(distance, key=distance.get), options=GROWTHS)
print(f"from 1,024 to 4,096: {factor:.1f} times as large")

# %% [markdown]
# With a sum of K terms of equal size the unit is proportional to K, and each of the K terms loses half a unit on average.
# That is proportional to K² in all, while the sum itself is proportional to K. So the relative error is proportional to
# K. (It is a little more here. A product of two numbers of e4m3 has at most eight bits, so that a short sum, whose unit
# is small, has little to cut off.)
#
# The remedy of DeepSeek-V3 is to end the short sum early. After each **piece** of 128 products it is added to a sum in
# float32, outside of the tensor core, and begins again at zero. cuBLAS does something similar when `torch._scaled_mm`
# is given `use_fast_accum=False`. Transformer Engine calls it `use_split_accumulator`, and leaves it out in forward where
# a tensor has one scale.
#
# **Predict.** With pieces of 128, how large is the error at K = 4,096, as a multiple of the error of a sum that is only
# 128 long?

# %% tags=["predict"]
in_pieces_by_short = 1

# %%
ratio = error_of(4096, piece=128) / error_of(128)
compare("in pieces / 128 long", in_pieces_by_short, ratio, within=1.3)

# %% [markdown]
# The error of each piece is that of a short sum, and the rounding of float32 is negligible beside it. (A factor of 1.3
# is allowed, because the two matmuls have different numbers.)

# %% [markdown] tags=["exercise"]
# ### Exercise 22.2 · The matmul in pieces
#
# `a` is [M, K] and `b` is [N, K], numbers of e4m3 held in float32. Return a bᵀ, [M, N] in float64, as a Hopper GPU
# computes it:
#
# - Go along K in steps of 32. The 32 products of a step and the running sum are the 33 terms for
#   `lab.add_aligned(terms, 13)`, a finished version of yours. Its result is the running sum of the next step.
# - After each `piece` products (a multiple of 32; None: never) the running sum is added to a total in float64, and
#   begins again at zero.
# - K is a multiple of 32, but not necessarily of `piece`.
#
# `a[:, None, start:end] * b[None, :, start:end]` are the products, [M, N, 32]. About 12 lines.

# %% tags=["exercise"]
def short_product(a, b, piece=None):
    """a bᵀ with running sums of 14 bits, which move to float64 after each piece."""
    ### BEGIN SOLUTION
    a, b = a.double(), b.double()
    total = torch.zeros(len(a), len(b), dtype=torch.float64)
    running = torch.zeros_like(total)
    for start in range(0, a.shape[1], 32):
        end = start + 32
        products = a[:, None, start:end] * b[None, :, start:end]
        terms = torch.cat([running[..., None], products], dim=-1)
        running = lab.add_aligned(terms, 13)
        if piece is not None and end % piece == 0:
            total += running
            running = torch.zeros_like(total)
    return total + running
    ### END SOLUTION

# %% tags=["check"]
check("22.2", short_product)

# %% tags=["figure"]
lengths = [128, 256, 512, 1024, 2048, 4096]
curves = {}
for kind in ("positive", "of both signs"):
    curves[f"{kind}, one sum"] = [error_of(length, kind) for length in lengths]
    in_pieces = [error_of(length, kind, piece=128) for length in lengths]
    curves[f"{kind}, pieces of 128"] = in_pieces
plot.lines(curves, x=lengths, caption="22.sums")

# %% [markdown]
# Numbers of both signs cancel, so that the running sum grows more slowly, and the cuts cancel in part as well.
# DeepSeek-AI report a largest relative error of nearly 2 % at K = 4,096 for random matrices. (The figure shows the error
# of the whole matrix, which is smaller than that of its worst entry.)
#
# **Takeaway: a tensor core may accumulate with fewer bits than its result has, and the error grows with the length of
# the sum. Ending the sum every 128 products and adding the pieces in float32 keeps the error at that of a sum of 128.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* The emulation follows the description in DeepSeek's report, not a data sheet: NVIDIA does not
# publish how its tensor cores round. People forget to give the running sum to `add_aligned`, and then the error does not
# grow. Ask: why is bfloat16 not affected? (Its products are summed with more bits: the measured effect is one of FP8 on
# Ada and Hopper.)

# %% [markdown]
# ## 2. A scale for each tile (core, 24 min)
#
# One scale for a tensor puts its largest number at 448. If that number is massive, the others sink to the lower end of
# e4m3. The remedy is to let fewer numbers share a scale. DeepSeek-V3 and the recipe `Float8BlockScaling` of Transformer
# Engine use tiles of 1 × 128 for activations and gradients, and squares of 128 × 128 for weights.

# %% tags=["figure"]
plot.scale_blocks(
    {"one scale": (8, 8), "tiles of 1 x 4": (1, 4), "squares of 4 x 4": (4, 4)},
    caption="22.blocks",
)

# %% [markdown]
# The scales are float32. For each tile of 1 × 128 that is 4 more bytes beside 128, and for a square of 128 × 128 it is
# 4 beside 16,384. All numbers are e4m3 here, those of gradients too: with so many scales the wider e5m2 is not needed.
#
# Let us put three massive numbers into a matrix of 256 × 512 ordinary ones, at (3, 100), (70, 100) and (200, 401). They
# are so large that whatever shares a scale with one of them becomes zero.
#
# **Predict.** What fraction of all numbers becomes zero with tiles of 1 × 128, and what fraction with squares of 128 ×
# 128? (Give fractions, such as 0.1. A matrix of this size has 8 squares.)

# %% tags=["predict"]
lost_with_tiles = 3 * 127 / (256 * 512)
lost_with_squares = 2 / 8  # the first two share a square

# %%
x = lab.with_massive_numbers(1e7)
lost = {}
for name, tile in {"tiles": (1, 128), "squares": (128, 128), "one": (256, 512)}.items():
    lost[name] = (lab.through_tiles(x, *tile) == 0).float().mean().item()
compare("with tiles", lost_with_tiles, lost["tiles"], within=1.1, found="counted")
compare("with squares", lost_with_squares, lost["squares"], within=1.1, found="counted")
print(f"with one scale {lost['one']:.1%} become zero")

# %% [markdown]
# Why squares for weights, then, if tiles lose less? A weight goes into two matmuls, and its sums run along different
# dims: y = x Wᵀ sums along the rows of W, dx = dy W along its columns. A scale can be taken out of a sum only if all
# numbers of a piece share it. So the first matmul needs tiles of 1 × 128 of W, and the second needs tiles of 1 × 128
# of Wᵀ.
#
# **Predict.** Is the cast of the transpose the transpose of the cast, with tiles of 1 × 128? And with squares? Answer
# True or False.

# %% tags=["predict"]
tiles_agree = False
squares_agree = True

# %% tags=["nbval-check-output"]
generator = torch.Generator().manual_seed(0)
w = torch.randn(256, 384, generator=generator)

def agrees(rows, columns):
    """Whether the cast of the transpose is the transpose of the cast."""
    one = lab.through_tiles(w, rows, columns)
    other = lab.through_tiles(w.T, rows, columns).T
    return torch.equal(one, other)

compare("tiles", tiles_agree, agrees(1, 128))
compare("squares", squares_agree, agrees(128, 128))

# %% [markdown]
# Cast by tiles, a weight would have two different values, one in forward and one in backward. Cast by squares it has
# only one. Activations and gradients change with every batch, and massive numbers occur in them. They get the finer
# tiles, and they are cast twice: along the features for y and dx, along the tokens for dW.
#
# The 128 of a tile is also the 128 of a piece in section 1. When a piece ends, its sum leaves the tensor core anyway,
# and is divided by the scales of its two operands on the way.

# %% [markdown] tags=["exercise"]
# ### Exercise 22.3 · Quantise by tiles
#
# `x` is [R, C], and R and C are multiples of `rows` and `columns`. Return the tensor in `torch.float8_e4m3fn`, [R, C],
# and the scales, [R / rows, C / columns] in float32: 448 / amax of each tile, and 1 for a tile of zeros. `x` stays as it
# is, and it may be of any float dtype: compute in float32. About 8 lines, no loop.

# %% tags=["exercise"]
def quantize_tiles(x, rows, columns):
    """(x · scale in e4m3, the scale of each tile)."""
    ### BEGIN SOLUTION
    tiles = x.float().unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    # [R / rows, rows, C / columns, columns]
    amax = tiles.abs().amax((1, 3), keepdim=True)
    scale = torch.where(amax > 0, 448 / amax, 1.0)
    scaled = (tiles * scale).clamp(-448, 448)
    q = scaled.reshape(x.shape).to(torch.float8_e4m3fn)
    return q, scale[:, 0, :, 0]
    ### END SOLUTION

# %% tags=["check"]
check("22.3", quantize_tiles)

# %% [markdown]
# **Takeaway: a massive number spoils what shares its scale. Tiles along the summed dimension keep the damage small, and
# squares give a weight the same values in forward and in backward.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* The scales here are any float32, as in DeepSeek's report. Transformer Engine rounds them down to
# powers of two by default, and on Blackwell always. MXFP8 of lesson 18 is the same idea with blocks of 32 in the
# hardware. Ask: what does a checkpoint or an all-gather of such a weight have to carry? (The scales.)

# %% [markdown]
# ## 3. Four bits (core, 8 min)
#
# A number of four bits has a sign, two bits of exponent and one of fraction: e2m1. Its sizes are
#
# $$0,\ 0.5,\ 1,\ 1.5,\ 2,\ 3,\ 4,\ 6$$
#
# **NVFP4** gives every 16 of them a scale, which is a number of e4m3. e4m3 itself reaches from 2^-9 to 448 only, so the
# whole tensor has one float32 scale beside them. Here a number is *divided* by its scale before the cast and multiplied
# afterwards, as Transformer Engine writes it: the scale of a block is amax / 6, so that its largest number lands near
# 6. What lands below 0.25 is nearer to 0 than to 0.5, so whatever is smaller than about amax / 24 becomes zero.
#
# For example, a block has the amax 12. Its scale is 12 / 6 = 2: numbers are halved before the cast and doubled after
# it. 5 becomes 2.5, a tie between 2 and 3, and 2 is the one whose last bit is 0, so 5 becomes 4. And 0.4 becomes 0.2,
# which is nearer to 0 than to 0.5.
#
# In lesson 18 the gradient of the logits showed what a format loses, and it does so here. A token's gradient is p for
# each wrong character and p - 1 for the right one, so that its sum is 0: what is pushed up is taken from the others.
# Take 57 characters with p = 1/57 each. They are four blocks of 16, of which the last is padded with zeros, and the
# right character is in the first.
#
# **Predict.** What is the sum of this gradient after the cast to NVFP4?

# %% tags=["predict"]
sum_after_cast = -15 / 57  # 1/57 is below 56/57 / 24: the fifteen beside it are lost

# %% tags=["nbval-check-output"]
gradient = torch.full((1, 57), 1 / 57)
gradient[0, 3] -= 1
cast = lab.to_nvfp4(gradient)
compare("sum", sum_after_cast, cast.sum().item(), within=1.05, found="computed")
print(f"numbers that became zero: {(cast == 0).sum().item()} of 57")

# %% [markdown]
# In this token the right character is pushed up, and fifteen others are not pushed down for it. The next token does the
# same with other characters, and the error has the same sign each time. A random error averages out over many tokens,
# but this one accumulates. An error that stays in the mean is called a **bias**.
#
# The blocks of this cast run along the characters, as the matmul dx = dy W needs them. For dW = dyᵀ x they run along
# the tokens: a block is what sixteen tokens say about one character. Where it is the right character of one of them,
# the small pushes down of the other fifteen are lost. Blocks by the standard of MXFP8 (lesson 18, section 8) had a bias
# too, a smaller one: there the push up itself came out too small.
#
# **Takeaway: in a block of NVFP4 whatever is less than 1/24 of the largest number becomes zero. Where the small numbers
# all have the same sign, that is a bias, and more tokens do not cure it.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* The last bit of e2m1 is its fraction: 0, 1, 2 and 4 have it 0; 0.5, 1.5, 3 and 6 have it 1. Ask:
# how many bits does a number of NVFP4 take? (4 + 8/16 = 4.5, and one float32 for the tensor.)

# %% [markdown]
# ## 4. Stochastic rounding (core, 23 min)
#
# **Stochastic rounding** picks one of the two neighbours at random, the nearer one more often. With a the neighbour
# below and b the one above:
#
# $$P(b) = \frac{x - a}{b - a}, \qquad \text{so that the mean is} \quad a\,(1 - P) + b\,P = x$$
#
# For example, 2.25 lies between 2 and 3, and becomes 3 with probability 1/4. The mean of many casts is 2.25, where
# rounding to nearest would always give 2.
#
# The price is that a single cast may take the neighbour that is farther away. Let the two neighbours be 1 apart, with x
# a distance d above the lower one. Then the mean squared error of stochastic rounding is d (1 - d), and that of rounding
# to nearest is the smaller of d² and (1 - d)².
#
# **Predict.** How many times larger is the root mean square error of a single stochastic cast than that of one cast to
# nearest? (1, 1.4, or 2.)

# %% tags=["predict"]
stochastic_over_nearest = 1.4  # mean of d(1-d) is 1/6, that of nearest is 1/12

# %%
x = torch.linspace(2, 4, 20_001)[:-1]
generator = torch.Generator().manual_seed(4)

def error_of_mean(num_casts, rounding):
    """Root mean square error of the mean of some casts of each x."""
    mean = torch.zeros_like(x)
    for _ in range(num_casts):
        once = formats.cast(x, formats.E2M1, rounding=rounding, generator=generator)
        mean += once / num_casts
    return (mean - x).square().mean().sqrt().item()

ratio = error_of_mean(1, "stochastic") / error_of_mean(1, "nearest")
compare("one cast", stochastic_over_nearest, ratio, within=1.1)

# %% [markdown]
# So a single stochastic cast is worse, by √2. Now take the mean of n casts, as a sum over many tokens does. Independent
# errors average out, so the stochastic error falls as 1/√n, while the error of rounding to nearest stays as it is: for
# n = 200 it should be √(200 / 2) = 10 times as large.

# %%
ratio = error_of_mean(200, "nearest") / error_of_mean(200, "stochastic")
print(f"mean of 200 casts: to nearest the error is {ratio:.1f} times as large")

# %% [markdown]
# Here is the mean of 200 casts of each x.

# %% tags=["figure"]
sizes = torch.linspace(0, 6.5, 131)
means = {}
for name, rounding in {"to nearest": "nearest", "stochastic": "stochastic"}.items():
    mean = torch.zeros_like(sizes)
    for _ in range(200):
        once = formats.cast(sizes, formats.E2M1, rounding=rounding, generator=generator)
        mean += once / 200
    means[name] = mean.tolist()
plot.lines(means, x=sizes.tolist(), wide="stochastic", caption="22.casts")

# %% [markdown] tags=["exercise"]
# ### Exercise 22.4 · The stochastic cast
#
# Write the cast to e2m1 for a float32 tensor of any shape. `chance` has the same shape and holds random numbers from 0
# to 1: use each once, for the number at its place, and draw none yourself. The result is float32. What is larger than 6
# saturates. The spacing of e2m1 is 0.5 below 2, 1 from 2 to 4, and 2 from 4 on. About 6 lines.
#
# The check casts each of its numbers 4,096 times, with evenly spread values of `chance`. It tests that the results are
# only the two neighbours, and that their mean is right.

# %% tags=["exercise"]
def to_e2m1(x, chance):
    """One of the two numbers of e2m1 next to each x, so that the mean is x."""
    ### BEGIN SOLUTION
    size = x.abs()
    spacing = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    steps = size / spacing
    below = torch.floor(steps)
    goes_up = chance < steps - below
    rounded = (below + goes_up) * spacing
    return torch.copysign(rounded.clamp(max=6.0), x)
    ### END SOLUTION

# %% tags=["check"]
check("22.4", to_e2m1)

# %% [markdown]
# Here is the gradient of section 3 again, cast stochastically 1,000 times. Its sum is 0 on average:

# %%
gradient = torch.full((1, 57), 1 / 57)
gradient[0, 3] -= 1
nearest = lab.to_nvfp4(gradient).sum().item()
generator = torch.Generator().manual_seed(5)
sums = []
for _ in range(1000):
    once = lab.to_nvfp4(gradient, stochastic=True, generator=generator)
    sums.append(once.sum().item())
print(f"mean of the sums: {sum(sums) / 1000:+.3f}; to nearest: {nearest:+.3f}")

# %% [markdown]
# **Takeaway: stochastic rounding makes each cast worse by √2, and the mean right. It is for gradients, which are summed
# over many tokens and steps. Forward needs the smaller error of a single cast, and rounds to nearest.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* People draw with `torch.rand` inside, or use one random number for the whole tensor: then all
# errors of a step point the same way. On several ranks the random numbers must be independent for what is reduced, and
# equal for what is held twice, or copies drift apart. Ask: where else does stochastic rounding help? (Weights kept in
# bfloat16 without a float32 copy: updates below half a spacing would be lost for ever.)

# %% [markdown]
# ## 5. Rotating a block (core, 21 min)
#
# One large number in a block of 16 sets the scale of fifteen others. The remedy is to replace the 16 numbers, before the
# cast, by 16 linear combinations of them that spread the large one over all. This must not change the result of the
# matmul.
#
# Multiplying by an orthogonal matrix, one with Q Qᵀ = I, changes no length. We call it a **rotation**. If both operands
# are rotated along the dimension that the matmul sums over, the rotations cancel:
#
# $$(A\,Q)\,(B\,Q)^T = A\,Q\,Q^T B^T = A\,B^T$$
#
# The **Hadamard matrix**, scaled to Q below, is a rotation that mixes evenly, since all its entries have the same size.
# It is built by doubling:
#
# $$H_1 = (1), \qquad H_{2n} = \begin{pmatrix} H_n & H_n \\ H_n & -H_n \end{pmatrix}, \qquad Q = H_{16} / \sqrt{16}$$
#
# For example, with 4 numbers and H₄ / 2 the row (8, 0, 0, 0) becomes (4, 4, 4, 4): the 8 is spread, and the length is 8
# before and after. In a block of 16 a single 24 becomes sixteen numbers of size 6.
#
# What if the numbers of a block are all alike, (3, 3, ... 3)? H would collect them into one large number. So each
# position first gets a sign, + or -, drawn once for the whole training run. This is the *random* Hadamard transform,
# x' = (x · signs) H / 4. The picture shows an ordinary block with one large number, before and after.

# %% tags=["figure"]
block = torch.randn(1, 16, generator=torch.Generator().manual_seed(3))
block[0, 5] = 12.0
after = lab.rotated(block)
plot.lines(
    {"before the rotation": block[0].tolist(), "after it": after[0].tolist()},
    x=list(range(16)),
    caption="22.rotation",
)

# %% [markdown] tags=["exercise"]
# ### Exercise 22.5 · The random Hadamard transform
#
# `x` is [.., n], and n is a multiple of 16. `signs` is [16], of 1 and -1. Return (x · signs) H / 4 for each block of 16
# neighbours along the last dim, in the shape of x. Make H yourself. About 6 lines.

# %% tags=["exercise"]
def hadamard(x, signs):
    """Each 16 neighbours of the last dim, with their signs, rotated by H / 4."""
    ### BEGIN SOLUTION
    h = torch.ones(1, 1)
    while len(h) < 16:
        h = torch.cat([torch.cat([h, h], dim=1), torch.cat([h, -h], dim=1)])
    blocks = x.unflatten(-1, (-1, 16)) * signs
    return (blocks @ (h / 4)).flatten(-2)
    ### END SOLUTION

# %% tags=["check"]
check("22.5", hadamard)

# %% [markdown]
# Does it help? We compute the weight gradient dW = dyᵀ x in NVFP4, rounded to nearest, with and without the rotation,
# for three pairs of tensors:
#
# - **ordinary**: random numbers;
# - **large numbers**: of these 2 in 100 are 20 times as large;
# - **the head**: input and gradient of the last layer of a GPT after 80 steps, whose gradient is that of the logits.
#
# **Predict.** For which pair does the rotation lower the error most: "ordinary", "large numbers" or "the head"?

# %% tags=["predict"]
helps_most = "the head"

# %%
def error_of_product(dy, x, rotate, stochastic=False):
    """Relative error of dyᵀ x with both operands in NVFP4."""
    of_gradient, of_input = (rotate(dy.T), rotate(x.T))
    chance = torch.Generator().manual_seed(6)
    q = lab.to_nvfp4(of_gradient, stochastic=stochastic, generator=chance)
    return lab.relative_distance(q @ lab.to_nvfp4(of_input).T, dy.T @ x)

generator = torch.Generator().manual_seed(8)
ordinary = torch.randn(2, 512, 128, generator=generator)
is_large = torch.rand(2, 512, 128, generator=generator) < 0.02
pairs = {
    "ordinary": ordinary,
    "large numbers": torch.where(is_large, 20 * ordinary, ordinary),
    "the head": lab.operands_of_the_head(),
}
errors = {}
gains = {}
for name, (dy, x) in pairs.items():
    plain = error_of_product(dy, x, torch.clone)
    with_rotation = error_of_product(dy, x, lab.rotated)
    errors[name] = (plain, with_rotation)
    gains[name] = plain / with_rotation
compare("helps most", helps_most, max(gains, key=gains.get), options=tuple(pairs))
for name, (plain, with_rotation) in errors.items():
    print(f"{name:14} error {plain:.3f}, with the rotation {with_rotation:.3f}")

# %% [markdown]
# Large numbers by themselves are no trouble for a floating-point format: each is rounded relative to its own size, and
# the small ones beside it count for little in the matmul. There the rotation even costs something, since it spreads
# the error of the large number as well. It helps where many small numbers share one sign, as in the gradient of the
# logits, where losing them was a bias. After the rotation they are no longer small beside their neighbours.
#
# Stochastic rounding cures the same bias. Here is the head with it:

# %%
dy, x = pairs["the head"]
alone = error_of_product(dy, x, torch.clone, stochastic=True)
both = error_of_product(dy, x, lab.rotated, stochastic=True)
print(f"the head, stochastic: {alone:.3f}, stochastic and rotated: {both:.3f}")

# %% [markdown]
# With stochastic rounding, the rotation gains nothing more in our small model. In the large one that NVIDIA trained it
# did, and their recipe has both.
#
# In which matmul may it be used? Both operands must be rotated along the summed dimension. In y = x Wᵀ and dx = dy W
# one operand is the weight, and rotated for each it would no longer have the same values in both. dW = dyᵀ x sums over
# the tokens and does not involve the weight. So Transformer Engine rotates only the operands of the weight gradient.
#
# **Takeaway: a rotation of both operands along the summed dimension cancels in the matmul. Before a cast it mixes each
# block, so that small numbers are not lost beside a large one. Of our three pairs it helped only the one where that
# loss was a bias. It is used for the weight gradient only.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* H with all signs 1 passes on most data; ask for the block (3, ... 3). People divide by 16, the
# size of the matrix, instead of √16. Ask: why 16 and not the whole row? (The rotation should stay within a block of
# the format, and its cost grows with the size.)

# %% [markdown]
# ## 6. A training in four bits (core, 24 min)
#
# Now all of it in one linear layer. Here are the three matmuls of lesson 18, and what each operand gets:
#
# | matmul | sum over | operands in NVFP4 |
# |---|---|---|
# | y = x Wᵀ | features in | x in rows, to nearest; W by squares of 16 × 16, to nearest |
# | dx = dy W | features out | dy in rows, stochastically; the same W |
# | dW = dyᵀ x | tokens | dyᵀ and xᵀ rotated, in rows; dyᵀ stochastically, xᵀ to nearest |

# %% [markdown] tags=["exercise"]
# ### Exercise 22.6 · The three matmuls
#
# `x` is [T, H], `w` is [F, H], `dy` is [T, F]. Return y, dx and dw by the table.
#
# - `quantize(matrix)` returns the matrix as NVFP4 holds it, with its blocks along its **rows**, rounded to nearest.
#   `quantize(matrix, stochastic=True)` rounds stochastically, `quantize(matrix, square=True)` has a scale for each
#   square of 16 × 16.
# - `rotate(matrix)` is the random Hadamard transform along the rows.
# - The matmuls themselves are plain `@`. Quantise the weight once.
#
# About 6 lines.

# %% tags=["exercise"]
def products(x, w, dy, quantize, rotate):
    """(y, dx, dw) of a linear layer, with all operands in four bits."""
    ### BEGIN SOLUTION
    weight = quantize(w, square=True)
    y = quantize(x) @ weight.T
    dx = quantize(dy, stochastic=True) @ weight
    of_gradient = quantize(rotate(dy.T), stochastic=True)
    of_input = quantize(rotate(x.T))
    return y, dx, of_gradient @ of_input.T
    ### END SOLUTION

# %% tags=["check"]
check("22.6", products)

# %% [markdown]
# We train the small GPT of lesson 18 for 120 steps. In bfloat16 we do so three times, from different random weights,
# which we call **starts** 0, 1 and 2. In four bits all linear layers take part, including the head:
#
# - **to nearest**: every cast is rounded to nearest, and nothing is rotated;
# - **stochastic gradients**;
# - **stochastic and rotated**: the recipe of the table;
# - **the head in bfloat16**: the recipe, and the last layer left out of it.
#
# **Predict.** Which of the four ends farthest above bfloat16 with the same start?

# %% tags=["predict"]
farthest = "to nearest"

# %%
from course.labs.l18_gpt import smooth

losses = lab.all_trained(ranks)

def end_of(run, seed=0):
    """The mean loss of the last 40 steps, in nats per character."""
    return sum(losses[run, seed][-40:]) / 40

gaps = {}
for run in lab.RUNS:
    if run != "bfloat16":
        gaps[run] = end_of(run) - end_of("bfloat16")
compare("farthest", farthest, max(gaps, key=gaps.get), options=tuple(gaps))
for run, gap in gaps.items():
    print(f"{run:22} {gap:+.3f} nats beside bfloat16")
for seed in (1, 2):
    gap = end_of("bfloat16", seed) - end_of("bfloat16")
    print(f"bfloat16, start {seed} {gap:+.3f}")

# %% [markdown]
# A difference of losses means something only beside what changes by chance alone. The grey band is the distance of the
# two other starts of bfloat16 from the first, up and down.

# %% tags=["figure"]
own = losses["bfloat16", 0]

def beside(run, seed):
    """Loss of a run minus that of bfloat16 from start 0, the mean of 40 steps."""
    return smooth([a - b for a, b in zip(losses[run, seed], own)], 40)

others = [beside("bfloat16", seed) for seed in (1, 2)]
band = [max(abs(a), abs(b)) for a, b in zip(*others)]
plot.lines(
    {run: beside(run, 0)[40:] for run in gaps},
    x=list(range(40, lab.STEPS)),
    bands={"bfloat16, other starts": ([-b for b in band[40:]], band[40:])},
    caption="22.runs",
)

# %% [markdown]
# Rounding to nearest is outside the band in the whole figure. The other three stay within it or at its edge: from two
# runs with different starts nobody could tell them from bfloat16. Small differences show only in a comparison from the
# *same* start, repeated from another one:

# %%
for seed in (0, 1):
    of_bfloat16 = end_of("bfloat16", seed)
    nearest = end_of("to nearest", seed) - of_bfloat16
    chance = end_of("stochastic gradients", seed) - of_bfloat16
    print(f"start {seed}: nearest {nearest:+.3f}, stochastic gradients {chance:+.3f}")

# %% [markdown]
# From both starts stochastic rounding recovers most of what rounding to nearest loses. Leaving the head, whose gradients
# are those of section 3, in bfloat16 recovers a part of the rest, from the one start that we tried. With stochastic
# rounding the rotation changes little here, as in section 5.
#
# This is one minute of training on a model of 100,000 parameters. NVIDIA (2025) trained one of 12 billion, a hybrid of
# Mamba and transformer, on 10 trillion tokens with this recipe, with 16 % of the linear layers in bfloat16. They report
# a loss close to that of FP8, and a worse one if any one part is left out. A long run of a large model may not forgive
# what a short run of a small one does.
#
# **What stays in higher precision**, in published recipes: embeddings, the head, normalisations, the softmax of
# attention, routers of experts, the first and last few blocks, and the float32 copy of the weights in the optimizer.
# All of these are cheap, or their errors go into everything else.
#
# **Takeaway: in four bits it mattered most here that the rounding of gradients has no bias. Weights get square blocks,
# gradients are rounded stochastically, the operands of the weight gradient are rotated, and the head stays in higher
# precision. Judge a recipe from the same start, beside a band of other starts.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Both gaps are the same from the two starts, to about three thousandths of a nat. Ask what a
# longer run would show: the gap of a bias grows as the true gradients become small beside it. People quantise `dy` and
# transpose afterwards: the blocks then lie along the features, and the scales cannot be taken out of the sum.

# %% [markdown]
# ## From here to GPUs and SLURM (core, 3 min)
#
# labcode trains in FP8 with one scale for each tensor or with the blocks of MXFP8 (`--fp8.recipe`, lesson 18). It does
# not train with tiles of 128 or with NVFP4; what you have seen here is an emulation. Transformer Engine has both.
# torchao has training in NVFP4 as a prototype since version 0.18, and torchtitan uses it.
#
# | here | Transformer Engine 2.20 | needs |
# |---|---|---|
# | pieces of 128 | `MMParams(use_split_accumulator=True)`, for recipes with one scale a tensor | Ada, Hopper |
# | tiles and squares of 128 | `Float8BlockScaling()`; scales are powers of two by default | Hopper; emulated by MXFP8 on Blackwell |
# | four bits | `NVFP4BlockScaling()` | Blackwell |
# | without stochastic rounding, Hadamard transform or square blocks | `disable_stochastic_rounding`, `disable_rht`, `disable_2d_quantization` | |
#
# By its documentation NVFP4 makes the linear layers of a model with 5 billion parameters 2.03 times as fast as bfloat16
# on a B300, casts included, and MXFP8 1.44 times. We have not measured either.
#
# ## Questions (core, 4 min)
#
# **1.** Why does the error of a sum of 14 bits grow with K, while the error that the casts to e4m3 make does not?
#
# <details><summary>Answer</summary>
#
# The unit below which terms are cut off grows with the running sum. The error of a cast is relative to each number, and
# so is that of the sum of the casts.
# </details>
#
# **2.** Why may a scale belong to a tile of 1 × 128 but not to single numbers?
#
# <details><summary>Answer</summary>
#
# It has to be taken out of a sum, so all numbers of a piece of the sum must share it. And a scale for each number would
# take as many bytes as float32 itself.
# </details>
#
# **3.** Why is an activation rounded to nearest and a gradient stochastically?
#
# <details><summary>Answer</summary>
#
# A gradient is summed over tokens and steps, so what counts is the mean. In forward no such sum averages out the larger
# error of a stochastic cast, and a single cast to nearest is better by √2.
# </details>
#
# **4.** Somebody rotates x and W for y = x Wᵀ, and only W for dx = dy W. What goes wrong?
#
# <details><summary>Answer</summary>
#
# In dx the rotation does not cancel: the sum runs over the output features, and dy was not rotated. The gradient is
# that of another network.
# </details>
#
# **5.** From lesson 18: a scale for each tensor has to be shared over ranks that hold parts of it. What has to be shared
# with NVFP4?
#
# <details><summary>Answer</summary>
#
# Only the one float32 of the whole tensor, where parts are gathered in four bits. The scale of a block is stored with
# its block.
# </details>
#
# ## Recap
#
# | | |
# |---|---|
# | sum of 14 bits | terms are cut off below the end of the largest; relative error grows with K |
# | piece | 128 products, then on to a sum in float32 |
# | tile, square | 1 × 128 for activations and gradients, 128 × 128 for weights |
# | NVFP4 | 0 to 6 in eight sizes; e4m3 scale for 16 numbers, float32 for the tensor; 4.5 bits |
# | bias | an error that stays in the mean |
# | stochastic rounding | up with probability (x - a) / (b - a); √2 worse once, right on average |
# | Hadamard | (x · signs) H / 4 on both operands cancels in the matmul; for dW |
# | band of starts | what other random weights alone change |
#
# ## Sources
#
# - DeepSeek-AI 2024, *DeepSeek-V3 Technical Report*, arXiv:2412.19437, sections 3.3 and 3.5: sums of 14 bits, pieces,
#   tiles.
# - NVIDIA 2025, *Pretraining Large Language Models with NVFP4*, arXiv:2509.25149: square blocks, stochastic rounding,
#   random Hadamard transforms, 12 billion parameters on 10 trillion tokens.
# - Transformer Engine 2.20.0.dev0, `docs/features/low_precision_training`, August 2026: recipes, layouts, speedups.
# - Gupta et al. 2015, *Deep Learning with Limited Numerical Precision*, arXiv:1502.02551: stochastic rounding.
# - torchao, release notes of 0.18.0, and torchtitan, pull request 3914, 2026: training in NVFP4.
# - DeepGEMM, issue 176: <https://github.com/deepseek-ai/DeepGEMM/issues/176>: bits of a sum on Blackwell.
# - OCP, *Microscaling Formats (MX) Specification 1.0*, 2023: e2m1.
