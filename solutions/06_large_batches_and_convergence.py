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
# # 06 · Large batches and convergence
#
# Data parallelism makes a step over more samples cheap. That is only worth something if the model then needs fewer
# steps. In this lesson you find out how many samples a step can use: from the noise in its gradients, and from a sweep.
# The same theory says how the learning rate follows the batch, and you compare it with the sweep. An optional section at
# the end has copies of a model that train alone and exchange their weights only now and then.
#
# ## Goals
#
# - tell speed (samples per second) from progress (loss per sample), and measure both;
# - derive the gradient noise scale, and measure it in a data-parallel run that sends one extra number per step;
# - run a sweep over batch and learning rate, and read the critical batch size from it, in samples and in tokens;
# - derive how the best rate follows the batch, and say where the derivation holds;
# - (optional) write the outer step of DiLoCo, and say what it costs to send rarely.
#
# **Time**: 143 minutes, and 30 more for what is optional. Good places for a break are after section 2 and after section
# 3.
#
# **Needs**: lesson 01 (section 6), lesson 04 (sections 1 and 4), lesson 05 (sections 2, 4 and 6).

# %%
import statistics

import numpy as np
import torch
import torch.distributed as dist

from course.lab import Ranks, check, compare, plot
from course.labs import l06_runs
from course.labs import l06_slow_link as slow_link

torch.set_num_threads(1)
ranks = Ranks(4)

# %% [markdown]
# ## 1. Fast is not the same as far (core, 10 min)
#
# We train a small GPT on Shakespeare, character by character: one layer, 32 characters at a time. A **sample** is one
# such window of text, and the **batch** is the number of samples in an optimizer step. Papers on language models count
# the batch in **tokens**: here a token is a character, so a batch of 16 samples is one of 512 tokens.
#
# How long do forward and backward take? Part of the time does not depend on the batch B: Python, and starting each
# operation. The rest is work for each sample. So a simple model is
#
#     t(B) = t0 + t1 · B        and        samples per second = B / t(B)
#
# For a huge batch the speed comes close to 1 / t1 samples per second.
#
# **Predict** with the formula: at which batch, as a multiple of t0 / t1, do you have **half** of that highest speed?

# %% tags=["predict"]
multiple_of_t0_over_t1 = 1  # B / (t0 + t1 B) = 1 / (2 t1) gives B = t0 / t1

# %%
import time

from labcode.models import gpt


def step_s(model, windows, batch):
    """Seconds of forward and backward; the median of 7."""
    inputs, targets = windows[np.arange(batch)]
    times = []
    for _ in range(7):
        started = time.perf_counter()
        gpt.loss(model(inputs), targets).backward()
        times.append(time.perf_counter() - started)
    return statistics.median(times)

# %% [markdown]
# We read the batch with half of the highest speed off the measured speeds, with straight lines between them, and t0 / t1
# off a line through the measured seconds. Both are rough, so a factor of 1.5 is allowed.

# %% tags=["figure"]
from labcode.config import TextData
from labcode.data import text

windows = text.load(TextData(), l06_runs.gpt().model.context_length).train
small_gpt = gpt.GPT(l06_runs.whole_model())
batches = [1, 2, 4, 8, 16, 64, 256]
seconds = [step_s(small_gpt, windows, batch) for batch in batches]
speeds = [batch / s for batch, s in zip(batches, seconds)]  # samples per second
t1, t0 = np.polyfit(batches, seconds, 1, w=1 / np.array(seconds))
half_batch = np.interp(0.5 / t1, speeds, batches)
multiple = half_batch * t1 / t0
compare("half speed, in t0 / t1", multiple_of_t0_over_t1, multiple, within=1.5)
plot.lines(
    {
        "measured": np.array(speeds) / 1000,
        "B / (t0 + t1 B)": [batch / (t0 + t1 * batch) / 1000 for batch in batches],
    },
    x=batches,
    caption="06.batches",
)

# %% [markdown]
# So far everything speaks for a large batch. But the curve says nothing about learning. The next table does: a weather
# ViT like that of lesson 02 has seen the **same 320 samples** with each batch, in 320 steps with batch 1 and in only 20
# with batch 16. Each cell is a mean squared error of fields that were scaled to a variance of 1, averaged over three
# seeds, and the best rate of each batch has a frame. The runs come with the course (`l06_runs.VIT_COMMAND` made them);
# on any machine they give the same losses up to rounding.

# %% tags=["figure"]
weather = l06_runs.shipped("vit")
plot.sweep(weather, caption="06.vit_sweep")

# %% [markdown]
# Look at the framed cells. Up to a batch of 4 the error is nearly the same: the larger batch uses the samples equally
# well, and takes less time. Beyond that, each sample teaches less, at whatever rate. (The frame is never at the edge of
# the table. If it were, the best rate might lie outside, and we would compare rates instead of batches.)
#
# **Takeaway: time to a loss is the samples that it needs, divided by samples per second. A larger batch raises the
# second, and may raise the first as well.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* People read the first figure as an argument for the largest batch that fits into memory. Ask:
# which of the two figures changes on a GPU? (The first, greatly. The second does not.)

# %% [markdown]
# ## 2. How noisy is a gradient? (core, 46 min)
#
# Why does a sample teach less in a large batch? The gradient of a batch is an estimate. The true gradient G would be
# the mean over all text there is. A batch of B samples gives G plus noise. In the picture the black arrow is G, and
# each blue arrow is the gradient of one batch.

# %% tags=["figure"]
plot.gradient_noise(caption="06.gradients")

# %% [markdown]
# The dashed circle shows how long the noise is on average. With one sample it is longer than the gradient itself, and
# some arrows point the wrong way. With 4 the noise is half as long, with 16 a quarter: the mean of B independent
# samples has 1 / B of the variance of one sample. Going from 1 to 4 helps a lot. When all arrows point the same way,
# more samples only repeat what is known.
#
# Noise also makes a gradient **longer**. Suppose that the squared length of G is 20, and that of the gradients of single
# samples 100 on average.
#
# **Predict**, before we have a formula: what is the squared length for batches of 16, on average?

# %% tags=["predict"]
square_of_16 = 20 + 80 / 16  # noise adds 80 to one sample's, and a 16th of that to 16

# %%
# G is a row of 20 ones, and each of its 20 numbers has a variance of 4
gradients = 1 + 2 * torch.randn(5000, 16, 20)
of_batches = gradients.mean(dim=1)
mean_square = of_batches.square().sum(dim=1).mean().item()
compare("|G_16|^2", square_of_16, mean_square, within=1.1, found="simulated")

# %% [markdown]
# Now in general. Each weight's gradient has a variance from sample to sample. The sum of these variances over all
# weights is written tr Σ, and we call it the **variance** of one sample's gradient. Let G_B be the gradient of a batch
# of B samples. For one weight, the entry of G_B has the mean g, which is the entry of G, and a variance of σ² / B, as it
# is the mean of B samples. The mean of a square is the square of the mean plus the variance, here g² + σ² / B. Summed
# over all weights, with E for the mean over many batches:
#
#     E |G_B|² = |G|² + tr Σ / B
#
# So noise can be measured: compare the squared length for a small batch with that for a large one. The difference is
# noise.
#
# The batch at which noise and gradient are equally long is a **gradient noise scale** (McCandlish et al. 2018,
# arXiv:1812.06162, equation 2.9). The paper calls it
#
#     B_simple = tr Σ / |G|²
#
# and in the example it is 80 / 20 = 4 samples. Section 3 says what is simple about it.

# %% [markdown] tags=["exercise"]
# ### Exercise 6.1 · Two equations
#
# Given the mean squared length at two sizes of batch, return |G|² and tr Σ. You have the equation above twice, and two
# unknowns.

# %% tags=["exercise"]
def estimate(small_batch, small_square, big_batch, big_square):
    """(|G|^2, variance) from the squared gradient norms at two sizes of batch."""
    ### BEGIN SOLUTION
    variance = (small_square - big_square) / (1 / small_batch - 1 / big_batch)
    square = big_square - variance / big_batch
    return square, variance
    ### END SOLUTION

# %% tags=["check"]
check("6.1", estimate)

# %% [markdown]
# Where do two sizes come from? Data parallelism has them already. Before the all-reduce each rank holds the gradient of
# its own share, the small batch. After it, all hold the gradient of the whole, the big batch.

# %% [markdown] tags=["exercise"]
# ### Exercise 6.2 · Measure it on the way
#
# Backward has run, and each rank holds its own gradients. Average them over the group, as in lesson 04, section 1, and
# return two numbers: the **mean over the ranks** of the squared norm of their own gradients, and the squared norm of
# the average. Skip weights without a gradient. Beside the gradients, a single number may travel.

# %% tags=["exercise"]
def squares(model, group):
    """(mean |G_small|^2, |G_big|^2); each `.grad` becomes the mean over the group."""
    ### BEGIN SOLUTION
    p = dist.get_world_size(group)
    params = [param for param in model.parameters() if param.grad is not None]
    small = torch.zeros(1, dtype=torch.float64)
    for param in params:
        small += param.grad.double().square().sum()
    dist.all_reduce(small, group=group)
    big = 0.0
    for param in params:
        dist.all_reduce(param.grad, group=group)
        param.grad /= p
        big += param.grad.double().square().sum().item()
    return small.item() / p, big
    ### END SOLUTION

# %% tags=["check"]
check("6.2", squares, ranks)

# %% [markdown]
# The estimate of one step is rough, and |G|² may even come out negative. So we smooth over steps. But which number?
# Suppose that tr Σ is 10 at each of two steps, and the estimates of |G|² are 0.1 and 1.9, so 1 on average. The right
# answer is 10 / 1 = 10. The two ratios are 100 and 5.3, and their mean is 53, because a single estimate of |G|² near
# zero makes its ratio huge. So tr Σ and |G|² are smoothed, and divided last.

# %% [markdown] tags=["exercise"]
# ### Exercise 6.3 · Smooth it
#
# Complete the class. Each step moves a smoothed number towards the measured one by the fraction `1 - keep` of the
# distance, so that a step counts less with every later one. Both numbers start at 0. Why does that not spoil the ratio?

# %% tags=["exercise"]
class Smoothed:
    """A noise scale from many noisy steps."""

    def __init__(self, keep=0.9):
        self.keep = keep
        self.square = 0.0
        self.variance = 0.0

    def add(self, square, variance):
        """Take in what one step says."""
        ### BEGIN SOLUTION
        self.square = self.keep * self.square + (1 - self.keep) * square
        self.variance = self.keep * self.variance + (1 - self.keep) * variance
        ### END SOLUTION

    def noise_scale(self):
        """B_simple, in samples."""
        ### BEGIN SOLUTION
        return self.variance / self.square
        ### END SOLUTION

# %% tags=["check"]
check("6.3", Smoothed)

# %% [markdown]
# (Starting at 0 makes both numbers too small by the same factor, which the ratio cancels.) In labcode a hook sees the
# gradient of each micro-batch, so it also works with accumulation on one GPU. The flag `--train.noise_scale` adds the
# result to the metrics. Here are 225 steps on two ranks at a constant rate. (The rate matters: the lower it is, the
# larger the noise scale, as appendix C of the paper explains.)

# %%
from course.progress import following
from labcode.measure import metrics
from labcode.runtime import launch

options = [f"--{name}={value}" for name, value in l06_runs.GPT_FIELDS.items()]
options += ["--train.steps=225", "--train.global_batch=32", "--train.micro_batch=8"]
options += ["--optim.lr=0.01", "--optim.min_lr=0.01", "--train.eval_every=0"]
options += ["--train.noise_scale", "--train.out=runs/noise", "--train.overwrite"]
with following("training with the noise scale"):
    launch.run("labcode.train", "gpt_tiny", *options, nproc=2)

# %% tags=["figure"]
noisy = [row for row in metrics.read("runs/noise") if "noise_scale" in row]
plot.lines(
    {"noise scale": [row["noise_scale"] for row in noisy]},
    x=[row["step"] for row in noisy],
    caption="06.noise_scale",
)

# %% [markdown]
# At first all samples say the same ("spaces and e are frequent"), so a few are enough. Later G is short, and what is
# left to learn differs from sample to sample.
#
# **Takeaway: the noise scale gives a first hint of how many samples a step can use. It grows during training, and
# measuring it costs one number per step.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* In 6.2 people take the small square after the average, or their own instead of the mean. Ask:
# why may the estimate of |G|² be negative? (It is a difference of two measured numbers. Without a bias it has to miss
# on both sides.)

# %% [markdown]
# ## 3. The critical batch (core, 45 min)
#
# How much does a step gain? Close to the present weights the loss is like a bowl. A step with the rate ε along the
# gradient of a batch lowers it by ε G·G_B to first order, and the curvature of the bowl takes some of that back. H, the
# **Hessian** or matrix of second derivatives, says how strong the curvature is in each direction. (In section 5 the
# letter H is a number of steps.) Σ is the covariance matrix of one sample's gradient, and tr the sum of a matrix's
# diagonal. On average over batches the gain is
#
#     gain(ε) = ε |G|² − ½ ε² (GᵀHG + tr(HΣ) / B)
#
# Noise adds nothing to the first term, because it points in all directions, but it costs something in the second, and
# less the larger B is. This is a parabola in ε, with its highest point at (the same paper, equations 2.6 to 2.8):
#
#     rate(B) = rate_max / (1 + B_noise / B)
#     gain(B) = gain_max / (1 + B_noise / B)                  with  B_noise = tr(HΣ) / GᵀHG
#
# If the curvature is the same in all directions, H drops out, and B_noise is the B_simple of section 2. No real bowl is
# like that. The paper uses B_simple all the same, as it is so cheap to measure. Averaged over a run, it came to between
# a 20th and 8 times the batch that we look for now (its table 1). The formula for the rate has to wait until section 4.
#
# If each step gains half as much, it takes twice as many steps. So the number of steps to a given loss is
#
#     S = S_min · (1 + B_crit / B) = S_min + E_min / B          with  E_min = B_crit · S_min
#
# S_min is what an infinitely large batch would need. The samples of the whole training are S · B = E_min + S_min · B,
# and E_min is what a tiny batch would need. The batch **B_crit** where the curve bends is called the critical batch. In
# this theory it is the noise scale, averaged over the run because that grows.
#
# For example, S_min = 100 steps and B_crit = 40. A batch of 40 then needs 200 steps and 200 · 40 = 8,000 samples: at
# the critical batch you pay twice the minimum of steps and twice the minimum of samples. Far below it, you wait longer
# for hardly fewer samples. Far above it, you pay more samples for hardly fewer steps.
#
# To see it, we need a **sweep**: runs with many batches, each at several learning rates. A rate that is right for one
# batch is wrong for another, so a comparison of batches at a single rate compares rates.

# %% [markdown] tags=["exercise"]
# ### Exercise 6.4 · A sweep that survives
#
# `steps_to_target(batch, lr)` trains and returns the steps to the target, or None if it was never reached. A run that
# diverges raises `ArithmeticError`. Write the sweep:
#
# 1. Do a run only if `table` has no entry `table[batch, lr]`. Every run that **ends** leaves one, even if it diverged,
#    so that a sweep that was killed can go on with the same table.
# 2. A run that diverged counts as one that never reached the target.
# 3. Return `{batch: (best rate, its steps)}`, without the batches that never reached it. Entries of an earlier call
#    count, too.

# %% tags=["exercise"]
def sweep(batches, rates, steps_to_target, table):
    """{batch: (best rate, its steps)}; `table` keeps the result of each run."""
    ### BEGIN SOLUTION
    for batch in batches:
        for lr in rates:
            if (batch, lr) in table:
                continue
            try:
                table[batch, lr] = steps_to_target(batch, lr)
            except ArithmeticError:
                table[batch, lr] = None
    best = {}
    for (batch, lr), steps in table.items():
        if steps is None:
            continue
        if batch not in best or steps < best[batch][1]:
            best[batch] = (lr, steps)
    return best
    ### END SOLUTION

# %% tags=["check"]
check("6.4", sweep)

# %% [markdown]
# labcode's sweep is one command. Each run is a process of its own, and `results.jsonl` is the table. The same command
# resumes a sweep that was killed.

# %%
print(l06_runs.COMMAND)

# %% [markdown]
# It trains our GPT to a validation loss of 2.3 nats per character (a nat is the unit of a loss with natural
# logarithms), at a rate that is constant after 20 steps of warm-up, with three seeds. (Warm-up means that the rate
# rises from nearly 0 first; section 4 asks what it is good for.) It took some ten minutes on two cores, so its table
# comes with the course. At the best rates it needed 1,254 steps with batch 4, and 107 with batch 1024.
#
# **Predict.** From these two numbers and the formula: how many steps did it need with batch 32?

# %% tags=["predict"]
E_min = (1254 - 107) / (1 / 4 - 1 / 1024)
S_min = 107 - E_min / 1024
steps_of_32 = S_min + E_min / 32

# %% tags=["figure"]
from labcode.run import sweep_table

rows = l06_runs.shipped("gpt")
ways = sweep_table.to_loss(rows, l06_runs.TARGET)
measured_steps = {way.batch: way.steps for way in ways}
compare("steps with batch 32", steps_of_32, measured_steps[32], within=1.15)
plot.sweep(rows, of="steps", target=l06_runs.TARGET, caption="06.gpt_sweep")

# %% [markdown]
# "> 2000" and "> 195" say that at least one of the seeds did not reach the target in its steps: 2,000, or the 195 that
# 200,000 samples make with batch 1024. There are two kinds of this. With batch 4 at 0.001 the runs are merely slow: one
# seed arrived after 1,942 steps, and the others had reached 2.32. With batch 4 at 0.03 the loss never falls below 2.46.
# (The frame of batch 128 is at the edge. But 0.017 needs 136 steps there and 0.03 needs 135, so little can be missing.)

# %% [markdown] tags=["exercise"]
# ### Exercise 6.5 · The verdict
#
# Fit the curve S = S_min + E_min / B. You are given `{batch: steps}`; return S_min and E_min. `np.polyfit(x, y, 1)`
# fits a straight line and returns slope and intercept. With `w=1 / y` errors count relative to y.

# %% tags=["exercise"]
def fit(steps_of):
    """(S_min, E_min) of S = S_min + E_min / B."""
    ### BEGIN SOLUTION
    batches = np.array(list(steps_of))
    steps = np.array(list(steps_of.values()))
    slope, intercept = np.polyfit(1 / batches, steps, 1, w=1 / steps)
    return intercept, slope
    ### END SOLUTION

# %% tags=["check"]
check("6.5", fit)

# %% tags=["figure"]
curve = sweep_table.fit_tradeoff([w.batch for w in ways], [w.steps for w in ways])
critical = curve.critical_batch
print(f"S_min {curve.least_steps:.0f} steps, E_min {curve.least_samples:.0f} samples")
print(f"critical batch {critical:.0f} samples of 32 tokens: {32 * critical:.0f} tokens")
noise = l06_runs.mean_noise_scale("runs/noise")
if noise is not None:
    print(f"noise scale, mean of the run of section 2: {noise:.0f} samples")
plot.steps_against_batch(measured_steps, curve, noise_scale=noise, caption="06.steps")

# %% [markdown]
# The nine points lie within a few percent of the curve, although the theory was made for plain gradient descent and we
# train with AdamW. The noise scale, averaged over the run of section 2 (batch 32 at a rate of 0.01, as in the sweep), is
# of the same order of magnitude, and less than half of the critical batch. (The figure has its line if you made that
# run.)
#
# How large is a critical batch elsewhere?
#
# | model | tokens in a batch | how it is known |
# |---|---|---|
# | this GPT | 1,400 is critical | the sweep |
# | the largest of Kaplan et al. 2020 | 1 to 2 million are critical at the end | noise scale (arXiv:2001.08361, section 1.1) |
# | GPT-3, 175 billion parameters | begins with 32,000 and takes 3.2 million | guided by the noise scale (arXiv:2005.14165, 2.3 and appendix B) |
# | OLMo, 1 and 7 billion | near 0 at the start, then up to 17 million are critical, and it levels off | runs that branch off with other batches (arXiv:2505.23971) |
# | Llama 3, 405 billion | 4 million, 8 after 252 million tokens, 16 after 2.87 trillion | as trained (arXiv:2407.21783, section 3.4.1) |
# | DeepSeek-V3 | 13 million at first, 63 from 469 billion tokens on | as trained (arXiv:2412.19437, section 4.2) |
#
# What does it depend on? Zhang et al. 2024 (arXiv:2410.21676) varied one thing at a time: the critical batch grows with
# the amount of data, and hardly with the size of the model. That fits section 2, where the noise scale grows along a
# run. It is also a reason for the **batch ramp-up** of GPT-3, Llama 3 and DeepSeek-V3: they begin with a small batch and
# enlarge it, because the batch that is right at the end would waste samples at the beginning. (Meta names the stability
# of early training as well.) With a ramp-up OLMo 1B took 43 % fewer steps to a slightly better loss (Merrill et al.
# 2025). The same authors found the noise scale too small by several orders of magnitude. So take it as a hint, and let
# runs decide.
#
# **Takeaway: far below the critical batch, twice the ranks need about half the steps. Going from half of it to the
# whole saves a third of the steps (2 S_min instead of 3 S_min). Far beyond it they need as many as before.**

# %% [markdown]
# What does it cost? Suppose that you spread the batch over devices, 16 samples on each. Then a step always takes as
# long as one of 16 samples (and the all-reduce, which is left out here). So the time is proportional to the steps, and
# the bill to devices times steps.

# %% tags=["figure"]
steps_on = {way.batch // 16: way.steps for way in ways if 16 <= way.batch <= 256}
times = {devices: steps / steps_on[1] for devices, steps in steps_on.items()}
bills = {devices: devices * part for devices, part in times.items()}
for devices, part in times.items():
    bill = bills[devices]
    print(f"{devices:2} devices: {part:.2f} of the time, {bill:.2f} of the bill")
plot.speed_and_price(times, bills, caption="06.time_and_price")

# %% [markdown]
# The fastest run and the cheapest one are the two ends. The question is which doubling is worth its price. From 1 to 2
# devices more than a third of the time is saved, for a quarter more device hours. The last one, from 8 to 16 devices,
# costs 79 % more and saves a tenth of the time: a batch of 256 lies far beyond the critical one.

# %% [markdown] tags=["solution-only"]
# *For the instructor.* In 6.4 the usual mistake is `table.get(...) is None`, which repeats failed runs at each restart.
# Ask: which batch would you buy? There is no right answer without a price for your own time, and that is the answer.

# %% [markdown]
# ## 4. The rate follows the batch, but how? (core, 36 min)
#
# Two rules are often quoted for a batch k times as large.
#
# - **Linear**: k times the rate (Goyal et al. 2017, arXiv:1706.02677). k small SGD steps along nearly the same gradient
#   go k times as far as one.
# - **Square root**: √k times the rate, for Adam (Malladi et al. 2022, arXiv:2205.10287).
#
# Section 3 has a formula for SGD, the highest point of the parabola:
#
#     rate(B) = rate_max / (1 + B_noise / B)
#
# Far below the noise scale it is rate_max · B / B_noise, which is the linear rule. Far above it is rate_max, however
# large the batch: when the gradient is known already, a better estimate of it allows no longer step.
#
# What changes with Adam? It divides the gradient of each weight by the square root of v, an average of that gradient's
# square, and section 2 says how large the square is: g² + σ² / B. Let us assume that the noise is the same multiple of
# the gradient for each weight. Then the square is g² (1 + B_noise / B).
#
# To compare this with the sweep we need **the** rate of a batch. The one with the fewest steps depends on chance, as
# its neighbours are often nearly as good. So we call a rate **good** for a batch if it needs at most 10 % more steps
# than the best one, and take the middle (the geometric mean) of the good ones. From one rate of this sweep to the next
# it is a factor of 1.8 or so, and no sweep knows the best rate better than that.
#
# **Predict.** The table has batches from 4 to 1024. The linear rule says 256 times the rate for the last of them, the
# square root says 16 times. By which factor does the middle of the good rates grow for AdamW, with a B_noise of 44?

# %% tags=["predict"]
# the step is rate / √v, and √v holds the root of 1 + B_noise / B: one such root is left
growth_of_the_rate = ((1 + 44 / 4) / (1 + 44 / 1024)) ** 0.5

# %% tags=["figure"]
from labcode.run import sweep_table

rows = l06_runs.shipped("gpt")
good = sweep_table.good_rates(rows, l06_runs.TARGET, slack=1.1)
middle = {batch: statistics.geometric_mean(rates) for batch, rates in good.items()}
growth = middle[1024] / middle[4]
compare("the rate grows by a factor of", growth_of_the_rate, growth, within=1.8)

ways = sweep_table.to_loss(rows, l06_runs.TARGET)
curve = sweep_table.fit_tradeoff([w.batch for w in ways], [w.steps for w in ways])
batches = np.array(list(good))
measured = np.array(list(middle.values()))
for_sgd = 1 / (1 + curve.critical_batch / batches)
for_adam = for_sgd**0.5
rate_max = statistics.geometric_mean(measured / for_adam)
factors = measured / (rate_max * for_adam)
print(f"rate_max {rate_max:.4f}; measured over formula for AdamW:", factors.round(2))
plot.rates_against_batch(
    good,
    {
        "formula for AdamW": rate_max * for_adam,
        "formula for SGD": rate_max * for_sgd,
        "square root, from batch 4": middle[4] * (batches / 4) ** 0.5,
        "linear rule, from batch 4": middle[4] * batches / 4,
    },
    caption="06.rates",
)

# %% [markdown]
# The best step is as long as SGD's. So rate / √v is the rate of SGD, and √v cancels one root of the denominator:
#
#     rate(B) = rate_max / √(1 + B_noise / B)
#
# This has one free number, rate_max; B_noise is the critical batch from section 3. From 4 to 1024 the rate grows by a
# factor of 3.4. The sweep says 3.2 by the middle of the good rates, and 3 to 6 if "good" is stricter than 10 % or only
# the best rates count. The formula explains both why the square root is right for small batches and why the frames in
# the map of section 3 stop climbing. Up to 128 this sweep could not tell it from the square root. At 1024 the square
# root is five times too high, and the linear rule 80 times.
#
# Where does it not fit? In the middle the good rates are up to 1.3 times those of the formula, at both ends 0.8 times;
# both are less than one step of the sweep. That may be chance, or more. Li et al. 2024 (arXiv:2405.14578) replace Adam
# by the sign of the gradient and keep the curvature between weights: then the best rate rises with the square root,
# peaks at a noise scale, and falls. McCandlish et al. have a power between 0.5 and 1 instead of our root (appendix
# E.2). And in the table of the ViT (section 1) the best rate falls from batch 4 to 16, where 20 steps are all there is.
# So a rule gives a place to begin: `--optim.lr_rule square_root --optim.reference_batch 16` applies one. The sweep
# decides.
#
# And if only one of the two changes? The map of section 3 shows it. Batch 256 at 0.003, which is good for batch 4, needs
# 190 steps instead of 121. Batch 4 at 0.017, which is good for batch 256, never reaches the target: its losses settle at
# 2.4, as each step follows the noise of four samples too far.

# %% [markdown]
# ### A spike
#
# Two safeguards are common at high rates. The first is **clipping**, which bounds the gradient of a step (lesson 05,
# section 6). Does AdamW need it? It keeps two averages for each weight: m of its gradient, with β1 = 0.9, and v of the
# square, with β2 = 0.999 in PyTorch. Each step adds a fraction 1 − β of the new value, and moves the weight by rate · m
# / √v.
#
# **Predict.** After thousands of steps one gradient is 1,000 times as long as all others. How many rates long is the
# step that it makes?

# %% tags=["predict"]
spiked_step = 0.1 * 1000 / (0.001**0.5 * 1000)  # what it adds to m, and to √v

# %%
def lengths_of_steps(beta2, spike_at=5000, steps=5200):
    """Lengths of AdamW's steps of one weight, in rates; one gradient is 1000."""
    weight = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    adamw = torch.optim.AdamW([weight], lr=1, betas=(0.9, beta2), weight_decay=0)
    drawn = torch.Generator().manual_seed(0)
    signs = 2.0 * torch.randint(2, (steps, 1), generator=drawn) - 1
    lengths = []
    for step in range(steps):
        weight.grad = signs[step].double() * (1000 if step == spike_at else 1)
        before = weight.item()
        adamw.step()
        lengths.append(abs(weight.item() - before))
    return lengths

by_beta2 = {beta2: lengths_of_steps(beta2) for beta2 in (0.95, 0.999)}
compare("step with the spike, in rates", spiked_step, by_beta2[0.999][5000])
for beta2, lengths in by_beta2.items():
    usual = statistics.mean(lengths[4000:5000])
    later = statistics.mean(lengths[5100:])
    print(f"beta2 {beta2}: usually {usual:.2f} rates, {lengths[5000]:.2f} with the "
          f"spike, {later:.3f} from 100 steps after it")

# %% [markdown]
# A spike that dwarfs all before it moves a weight by (1 − β1) / √(1 − β2) rates, however large it is: 3.2 with
# PyTorch's 0.999, and 0.45 with the 0.95 of our recipe. So one step does little harm. What follows does: for some ten
# steps m points where the spike pointed, and as long as v remembers it, for several times 1 / (1 − β2) steps, all other
# gradients of this weight count for next to nothing. That is a reason to clip even with AdamW. Our recipe, GPT-3 and
# DeepSeek-V3 do, at a norm of 1.0.

# %% [markdown]
# ### Warm-up
#
# The second safeguard is **warm-up**: the rate rises from nearly 0 over the first steps. The usual explanation is that
# Adam's averages are still rough then. Those of our recipe reach back some 20 steps, as β2 is 0.95, and in all runs of
# the sweep the rate rose over 20 steps.
#
# **Predict.** Batch 256 trains at a rate of 0.1, ten times a good one. When it begins at the full rate, it does not
# reach a loss of 2.3 in 200 steps. Does it with a warm-up of 20 steps, `True` or `False`? With one of 100 steps?

# %% tags=["predict"]
comes_with_20 = False
comes_with_100 = True

# %%
from course.progress import status
from labcode.config import TextData
from labcode.data import text
from labcode.models import gpt, layers


def train_at(rank, schedules, seed=2):
    """(Losses every 10 steps, size of a weight after 20) at the rates of a rank."""
    if rank >= len(schedules):
        return None
    torch.set_num_threads(1)
    splits = text.load(TextData(), 32)
    model = layers.initialize(gpt.GPT(l06_runs.whole_model()), seed)
    adamw = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    drawn = torch.Generator().manual_seed(seed)
    held_out, held_out_targets = splits.val[np.arange(256)]
    losses = []
    for step, rate in enumerate(schedules[rank], 1):
        adamw.param_groups[0]["lr"] = rate
        picked = torch.randint(len(splits.train), (256,), generator=drawn).numpy()
        inputs, targets = splits.train[picked]
        gpt.loss(model(inputs), targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad()
        if step % 10 == 0:
            with torch.no_grad():
                losses.append(gpt.loss(model(held_out), held_out_targets).item())
        if step == 20:
            params = model.parameters()
            matrices = [param.flatten() for param in params if param.dim() > 1]
            size = torch.cat(matrices).square().mean().sqrt().item()
    return losses, size

# %% [markdown]
# Four trainings run at once, one on each rank: without a warm-up, with one of 20 and one of 100 steps, and without one
# at a third of the rate.

# %%
steps = np.arange(1, 201)
schedules = {
    "0.1 at once": np.full(200, 0.1),
    "0.1 after 20 steps": 0.1 * np.minimum(1, steps / 20),
    "0.1 after 100 steps": 0.1 * np.minimum(1, steps / 100),
    "0.03 at once": np.full(200, 0.03),
}
status("training at four schedules")
found = ranks.run(train_at, list(schedules.values()))
status()
curves = {}
for name, (losses, _) in zip(schedules, found):
    curves[name] = (steps[9::10], losses)
TARGET = l06_runs.TARGET
compare("20 steps", comes_with_20, min(curves["0.1 after 20 steps"][1]) <= TARGET)
compare("100 steps", comes_with_100, min(curves["0.1 after 100 steps"][1]) <= TARGET)
for name, (losses, size) in zip(schedules, found):
    print(f"{name:20} lowest loss {min(losses):.2f}, weights after 20 steps {size:.2f}")

# %% tags=["figure"]
plot.lines(curves, reference={"target": TARGET}, caption="06.beginnings")

# %% [markdown]
# A warm-up over 20 steps changes next to nothing, so rough averages are not the reason here. A third of the rate helps
# more. But the rate is not simply too high: the run with 100 steps of warm-up is at 0.1 from step 100 on, and goes on
# learning. (Seeds 1 to 4 say the same.) The printed sizes show a part of what happens. The weights begin at 0.02, and
# Adam moves each of them by about the rate in a step. After 20 steps at 0.1 they are more than 20 times as large; with
# 100 steps of warm-up they grow more slowly. Why that helps, these runs do not say.
#
# So what warm-up does here is not to wait for Adam's averages. It keeps the rate below what the model tolerates at the
# time, and that rises as the model learns: at step 100 the rate of 0.1 does no harm any more. Kalra and Barkeshli 2024
# (arXiv:2406.09405) come to the same conclusion for SGD and Adam: the gain of a warm-up is that the model tolerates a
# higher rate, as it has reached places where the loss has less curvature. Goyal et al. could use their linear rule up to
# batches of 8192 with a warm-up over five epochs (their section 2.2). A "good rate" is one for a given warm-up.

# %% [markdown]
# ### And a decay
#
# After the warm-up most recipes let the rate fall along half a wave of a **cosine**, often to a tenth. PyTorch has such
# schedules as objects beside the optimizer; the loop calls `schedule.step()` after each `optimizer.step()`. `LambdaLR`
# takes a function of your own, from the step 0, 1, 2, ... to a factor of the rate. `SequentialLR` joins ready-made
# pieces. The next cell writes the same schedule in both ways and looks at the rate of each step.

# %%
import math

from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    SequentialLR,
)


def factor(step):
    """100 steps up, then a cosine from 1 to a tenth over the next 100."""
    if step < 100:
        return (step + 1) / 100
    wave = (1 + math.cos(math.pi * (step - 100) / 100)) / 2
    return 0.1 + 0.9 * wave

def by_function(adamw):
    return LambdaLR(adamw, factor)

def in_pieces(adamw):
    up = LinearLR(adamw, start_factor=1 / 100, total_iters=99)
    down = CosineAnnealingLR(adamw, T_max=100, eta_min=0.01)
    return SequentialLR(adamw, [up, down], milestones=[100])

def rates_of(make_schedule):
    """The rates of 200 steps at a rate of 0.1."""
    adamw = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=0.1)
    schedule = make_schedule(adamw)
    rates = []
    for _ in range(200):
        rates.append(adamw.param_groups[0]["lr"])
        adamw.step()
        schedule.step()
    return np.array(rates)

with_decay = rates_of(by_function)
apart = np.abs(with_decay - rates_of(in_pieces)).max()
print(f"largest difference of the two ways: {apart:.0e}")
for step in (1, 50, 100, 150, 200):
    print(f"rate of step {step:3}: {with_decay[step - 1]:.4f}")

# %% [markdown]
# (`LinearLR` counts 99 steps from the first rate to the last one, which makes 100 rates.) Now we train with this
# schedule and compare it with the run above that stays at 0.1 after its 100 steps. Up to step 100 the two are the same.
#
# **Predict.** From step 110 on there are ten losses of each run. In how many of the ten is the run with the falling
# rate lower?

# %% tags=["predict"]
times_lower = 10

# %%
status("training with a decay")
decayed, _ = ranks.run(train_at, [with_decay])[0]
status()
stayed = curves["0.1 after 100 steps"][1]
lower = [one < other for one, other in zip(decayed[10:], stayed[10:])]
compare("times lower", times_lower, sum(lower), within=1.3)
print("step     rate   decayed   stays at 0.1")
for step in range(100, 201, 20):
    loss, other = decayed[step // 10 - 1], stayed[step // 10 - 1]
    print(f"{step:4} {with_decay[step - 1]:8.3f} {loss:9.2f} {other:14.2f}")

# %% [markdown]
# While the rate falls, the loss falls faster than at the constant rate, as one hopes: smaller steps follow the noise of
# a batch less. This is one seed and 200 steps, so it says which way a decay works here and not how much it is worth. The
# recipe of our trainings has both, `warmup_steps` up and then a cosine down to `min_lr`:

# %%
print(l06_runs.gpt().optim)

# %% [markdown] tags=["exercise"]
# ### Exercise 6.6 · Break it
#
# Invent two trainings of the small GPT, each as a dict of fields that differ from its recipe: `{"optim.lr": 1e-2}` is
# one. The check makes 400 steps with a batch of 16; what the recipe says of the optimizer is printed above. All fields
# are listed by `python -m labcode.train gpt_tiny --help`. The check trains both.
#
# - `diverges` changes fields of `optim` alone, and ends worse than guessing one of the text's 83 characters: a training
#   loss above ln 83 = 4.42. Rates may be at most 100.
# - `overfits` learns its training text by heart: the training loss ends more than 0.3 below the validation loss, which
#   has risen again from its lowest point. You may set `train.steps`, up to 800. A text is learned by heart if it is
#   short: `data.val_fraction` is the fraction of it that is kept for validation, and training gets the rest.

# %% tags=["exercise"]
### BEGIN SOLUTION
diverges = {"optim.lr": 30.0, "optim.min_lr": 3.0}
overfits = {"data.val_fraction": 0.9995, "optim.lr": 1e-2, "train.steps": 600}
### END SOLUTION

# %% tags=["check"]
check("6.6", diverges, overfits)

# %% [markdown]
# Two notes reach beyond the batch. The best rate depends on the **width** of a model, too: a rate that was found on a
# narrow model is too high for a wide one. muP (Yang et al. 2022, arXiv:2203.03466) scales
# initial weights and rates with the width so that the best rate carries over. And the critical batch depends on the
# **optimizer**: Adam's critical batch is much larger than that of SGD with momentum (Zhang et al. 2019,
# arXiv:1907.04164). LAMB and LARS (`--optim.name lamb`) let each matrix move in proportion to its own length. Shampoo
# (arXiv:1802.09568), SOAP (arXiv:2409.11321) and Muon (arXiv:2502.16982, `torch.optim.Muon`) treat the gradient of a
# matrix as a whole, and Muon was found to use its samples well at batches far beyond AdamW's critical one (Shah et al.
# 2025, arXiv:2505.02222).
#
# **Takeaway: far below the critical batch the best rate of AdamW grows with the square root of the batch, far beyond it
# hardly at all. A good rate is one for a given warm-up. A formula gives the place to begin, and a sweep decides.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Some take "linear scaling" for a law. Show them the last figure but one: on these axes the
# linear rule leaves the page. In the prediction of the rate people forget that v holds noise as well. The growth from 4
# to 1024 is 12 / 1.043 = 11.5 for SGD, and its root, 3.4, for AdamW. In 6.6 clipping and Adam make divergence harder
# than people expect; that is worth a word.

# %% [markdown]
# ## 5. Fewer messages (optional, 30 min)
#
# A larger batch sends fewer gradients for the same samples. There is another way: let each copy of the model make H
# steps on its own samples, and average the **weights** after that. The picture shows both.

# %% tags=["figure"]
plot.local_steps(inner_steps=4, caption="06.local_steps")

# %% [markdown]
# At the top is what lesson 05 built: gradients travel during backward, and here the link is still busy after it. Weights
# can only travel when the last of H steps is done. They have as many bytes as the gradients, so on average a step sends
# 1 / H of the bytes.
#
# The plain average of the weights is **local SGD** (Stich 2018, arXiv:1805.09767). **DiLoCo** (Douillard et al. 2023,
# arXiv:2311.08105) goes one step further. Let w be the weights from which all copies began. The difference to their
# average,
#
#     g = w − mean of the copies,
#
# is treated as a gradient, the outer gradient, for an outer optimizer with momentum μ and rate η:
#
#     v ← μ v + g            w ← w − η (g + μ v)
#
# This kind of momentum, which looks one step ahead, is called Nesterov's. With η = 1 and μ = 0 this is local SGD again.

# %% [markdown] tags=["exercise"]
# ### Exercise 6.7 · DiLoCo's outer step
#
# `__init__` is given: `common` holds the weights from which all copies began, and `velocity` holds v. Write `step`.
# When it returns, every copy in the group has the same new weights, and the object is ready for the next H steps.

# %% tags=["exercise"]
class OuterStep:
    """Brings the copies of a model together, after each has trained alone."""

    def __init__(self, model, group, lr, momentum):
        self.params = list(model.parameters())
        self.group = group
        self.lr = lr
        self.momentum = momentum
        self.common = [param.detach().clone() for param in self.params]
        self.velocity = [torch.zeros_like(param) for param in self.params]

    @torch.no_grad()
    def step(self):
        """One outer step of all copies in the group."""
        ### BEGIN SOLUTION
        p = dist.get_world_size(self.group)
        for param, common, velocity in zip(self.params, self.common, self.velocity):
            gone = common - param
            dist.all_reduce(gone, group=self.group)
            gone /= p
            velocity.mul_(self.momentum).add_(gone)
            common -= self.lr * (gone + self.momentum * velocity)
            param.copy_(common)
        ### END SOLUTION

# %% tags=["check"]
check("6.7", OuterStep, ranks)

# %% [markdown]
# Now four copies train the small GPT for 200 steps with 8 samples each. They meet after every step, after every H, or
# never. labcode's `OuterOptimizer` takes the outer step; it sends one row and leaves the momentum to PyTorch's SGD.
# DiLoCo has the paper's outer rate of 0.7 and momentum of 0.9. The inner optimizer is always AdamW, and each copy keeps
# its own averages. (So "each step" averages weights, which is close to data parallelism, but not the same.)
#
# How far does an outer step go? If the outer gradient is the same g again and again, v settles at g / (1 − μ), and a
# step at η (g + μ v) = η g / (1 − μ), where the copies went as far as g on average.
#
# **Predict.** All copies train with an inner rate of 0.01, which section 4 found good. Is DiLoCo at H = 10 "better" or
# "worse" than local SGD at H = 10?

# %% tags=["predict"]
diloco_is = "worse"  # 0.7 / (1 - 0.9) = 7 times 0.01 is far above a good rate

# %%
from course.progress import status
from labcode.config import TextData
from labcode.data import text
from labcode.models import gpt, layers
from labcode.parallel.local import OuterOptimizer


def train_apart(rank, every, outer_lr, momentum, inner_lr, steps=200):
    """(validation loss, bytes sent) of copies that meet after every so many steps."""
    torch.set_num_threads(1)
    model = layers.initialize(gpt.GPT(l06_runs.whole_model()), 0)
    splits = text.load(TextData(), 32)
    inner = torch.optim.AdamW(model.parameters(), lr=inner_lr)
    outer = OuterOptimizer(model.parameters(), dist.group.WORLD, outer_lr, momentum)
    drawn = torch.Generator().manual_seed(rank)
    sent_bytes = 0
    for step in range(1, steps + 1):
        picked = torch.randint(len(splits.train), (8,), generator=drawn).numpy()
        inputs, targets = splits.train[picked]
        gpt.loss(model(inputs), targets).backward()
        inner.step()
        inner.zero_grad()
        if step % every == 0:
            outer.step()
            sent_bytes += sum(param.nbytes for param in model.parameters())
    inputs, targets = splits.val[np.arange(256)]
    with torch.no_grad():
        return gpt.loss(model(inputs), targets).item(), sent_bytes

ways_to_meet = {
    "each step": (1, 1.0, 0.0, 0.01),
    "local SGD, H = 10": (10, 1.0, 0.0, 0.01),
    "DiLoCo, H = 10": (10, 0.7, 0.9, 0.01),
    "the same, inner rate 0.003": (10, 0.7, 0.9, 0.003),
    "local SGD, H = 50": (50, 1.0, 0.0, 0.01),
    "never": (1000, 1.0, 0.0, 0.01),
}
apart = {}
for name, way in ways_to_meet.items():
    status(f"training: {name}")
    apart[name] = ranks.run(train_apart, *way)[0]
status()
losses = {name: loss for name, (loss, _) in apart.items()}
difference = losses["DiLoCo, H = 10"] - losses["local SGD, H = 10"]
verdict = "worse" if difference > 0 else "better"
compare("DiLoCo, inner rate 0.01", diloco_is, verdict, options=("better", "worse"))

# %% tags=["figure"]
sent = apart["DiLoCo, H = 10"][1] / apart["each step"][1]
print(f"H = 10 sends {sent:.2f} of the bytes")
plot.bars(losses, caption="06.four_copies")

# %% [markdown]
# With the paper's values an outer step goes η / (1 − μ) = 7 times as far as the copies went on average. So DiLoCo at
# the inner rate of the others moves the common weights about as a rate of 0.07 would, and does worse than copies that
# never meet. At a third of that rate it is among the others: what counts is how far the common weights go. With a tenth
# of the messages, local SGD loses a little, and it still helps to meet every 50 steps. The numbers differ from seed to
# seed, and so does the order of neighbouring bars.
#
# The paper has H = 500, so that an outer gradient is the sum of 500 steps. There an outer rate of 0.7 with a momentum
# of 0.9 was the best that was tried. Eight copies learned as well as synchronous training on as many samples, with 500
# times fewer messages, and it hardly mattered whether they began with a trained model or from scratch (its figure 3).
# With larger models DiLoCo compares better still (Charles et al. 2025, arXiv:2503.09799). A setting belongs to its H,
# its rates and its model, so do not copy one without a sweep.
#
# What is it worth in time? On a fast network, nothing. So we emulate a slow one, as in lesson 05, section 4: a link
# between two cities, with α = 5 ms and 5 MB/s. A ring on four ranks needs 6 α + 1.5 n/β for an all-reduce of n bytes
# (lesson 01, section 6). The model of the next cells has `slow_link.weight_bytes()` bytes of weights, and as many of
# gradients. So this is how long a step of data parallelism uses the link:

# %%
link_s = 6 * 5e-3 + 1.5 * slow_link.weight_bytes() / 5e6
print(f"{1e3 * link_s:.0f} ms")

# %% [markdown]
# The race has three runners: data parallelism, and local SGD with H = 5 and H = 20. Each rank takes 4 samples a step.
# They make 40, 160 and 340 steps, which takes them about as long.

# %% tags=["figure"]
status("training over a slow link")
curves = slow_link.race(ranks)
status()
plot.loss_against_cost(curves, caption="06.two_cities")

# %%
for steps in (40, 160):
    for name, curve in curves.items():
        if steps in curve.steps:
            loss = curve.losses[curve.steps.index(steps)]
            print(f"after {steps:3} steps: {loss:.2f} nats per character, {name}")

# %% [markdown]
# In the same seconds local SGD learns more, because it computes while data parallelism waits. Grey is where all three
# still run. On the right it needs a fraction of the bytes for the same loss. The printed lines compare equal numbers of
# **steps**, and there it is the other way round: copies that meet more often have the lower loss.
#
# **Takeaway: copies that meet every H steps send 1/H of the bytes. After equally many steps they are a little behind;
# on a slow link they make so many more steps that they win.**

# %%
ranks.close()

# %% [markdown] tags=["solution-only"]
# *For the instructor.* The sign of the outer gradient is the classic mistake, then `common` that is not moved on. Ask:
# which state does each copy keep for itself? (Adam's averages. They are never sent.)

# %% [markdown]
# ## From here to GPUs and SLURM (core, 2 min)
#
# | what | start |
# |---|---|
# | the noise scale on 8 GPUs | `torchrun --nproc-per-node=8 -m labcode.train gpt_10m --train.noise_scale` |
# | a rule for the rate | add `--optim.lr_rule square_root --optim.reference_batch 64` |
# | 4 nodes of 4 GPUs, 16 samples on each GPU | `python -m labcode.slurm submit gpt_10m --site my.yaml --nodes 4 --train.global_batch 256 --optim.lr_rule square_root --optim.reference_batch 64`; the same with 1 node and batch 64, and with 16 nodes and batch 1024, with steps for the same number of samples |
# | LAMB | add `--optim.name lamb` (with `labcode[optimizers]`) |
# | a sweep on one GPU, a run at a time | `python -m labcode.run.sweep gpt_10m --sweep.batch 32,64,128 --sweep.lr 1e-3,3e-3,1e-2 --sweep.samples 64000` |
# | inside a SLURM job | `srun --ntasks=1 python -m labcode.run.sweep ...`, submitted again to resume |
#
# ## Questions (core, 4 min)
#
# **1.** The noise scale of a run is 2000 samples, and the batch is 500. Your cluster doubles. What do you expect?
#
# <details><summary>Answer</summary>
#
# If the noise scale is the critical batch, from 1 + 2000 / 500 = 5 times S_min to 1 + 2000 / 1000 = 3 times: 60 % of
# the steps, and 20 % more samples. In section 3 it was less than half of it; then the second batch gains even more.
# </details>
#
# **2.** Somebody compares batches 32 and 1024 at the same rate and finds that large batches train badly. What is
# missing?
#
# <details><summary>Answer</summary>
#
# The best rate for each batch. The comparison mixes two effects. Shallue et al. 2018 (arXiv:1811.03600) tuned each
# batch by itself in 168,160 trainings, and found no evidence that large batches generalize worse.
# </details>
#
# **3.** Why is the noise scale measured before clipping?
#
# <details><summary>Answer</summary>
#
# Clipping changes the length of the big gradient and not that of the small ones, and lengths are what is compared.
# </details>
#
# **4.** From lesson 05, and after section 5: gradients can travel while backward goes on. Can the average of the
# weights, too?
#
# <details><summary>Answer</summary>
#
# Not in the loop that you wrote: the copies wait for all of it, though only every H steps. Variants of DiLoCo send
# while the next steps run, and apply what has come some steps late (Douillard et al. 2025, *Streaming DiLoCo*,
# arXiv:2501.18512).
# </details>
#
# ## Recap
#
# | concept | formula or fact | in labcode |
# |---|---|---|
# | speed | B / (t0 + t1 B) samples per second | metrics `samples_per_s` |
# | noise | E abs(G_B)² = abs(G)² + tr Σ / B | `train.noise_scale.estimate` |
# | noise scale | B_simple = tr Σ / abs(G)², smoothed first, divided last | `--train.noise_scale` |
# | critical batch | S = S_min + E_min / B, B_crit = E_min / S_min | `run.sweep_table.fit_tradeoff` |
# | rate and batch | SGD: rate_max / (1 + B_noise / B); AdamW: the root of that denominator | `--optim.lr_rule`, `run.sweep` |
# | a spike and AdamW | a step of (1 − β1) / √(1 − β2) rates, then short ones for long: clip | `--optim.clip_norm` |
# | warm-up | the rate that a model tolerates rises as it learns | `--optim.warmup_steps` |
# | rare messages | 1 / H of the bytes, outer Nesterov | `parallel.local.OuterOptimizer` |
#
# ## Sources
#
# - McCandlish et al. 2018, *An Empirical Model of Large-Batch Training*, arXiv:1812.06162: gain and rate of a step,
#   noise scale (section 2.2, appendices A.1, C and E.2), the curve of steps and samples (equation 2.11).
# - Kaplan et al. 2020, arXiv:2001.08361; Zhang et al. 2024, *How Does Critical Batch Size Scale in Pre-training?*,
#   arXiv:2410.21676; Merrill et al. 2025, *Critical Batch Size Revisited*, arXiv:2505.23971.
# - Goyal et al. 2017, *Accurate, Large Minibatch SGD*, arXiv:1706.02677: the linear rule, and warm-up.
# - Malladi et al. 2022, *On the SDEs and Scaling Rules for Adaptive Gradient Algorithms*, arXiv:2205.10287: the square
#   root; Li et al. 2024, *Surge Phenomenon in Optimal Learning Rate and Batch Size Scaling*, arXiv:2405.14578.
# - Kalra and Barkeshli 2024, *Why Warmup the Learning Rate?*, arXiv:2406.09405.
# - You et al. 2019, *Large Batch Optimization for Deep Learning*, arXiv:1904.00962: LAMB.
# - Stich 2018, *Local SGD Converges Fast and Communicates Little*, arXiv:1805.09767.
# - Douillard et al. 2023, *DiLoCo*, arXiv:2311.08105; Charles et al. 2025, *Scaling Laws for DiLoCo*, arXiv:2503.09799.
