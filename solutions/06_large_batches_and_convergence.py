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
# You see what the learning rate has to do with it, and at the end you train with messages that are rare.
#
# ## Goals
#
# - tell speed (samples per second) from progress (loss per sample), and measure both;
# - derive the gradient noise scale, and measure it in a data-parallel run with one number more per step;
# - run a sweep over batch and learning rate, and read the critical batch size from it;
# - judge the rules for learning rates by a measurement;
# - write the outer step of DiLoCo, and say what rare messages cost.
#
# **Time**: 170 minutes. Good places for a break are after section 2 and after section 3.
#
# **Needs**: lesson 01 (section 6), lesson 04 (sections 1 and 4), lesson 05 (sections 2, 4 and 6).

# %%
import statistics

import numpy as np
import torch
import torch.distributed as dist

from labcode.lab import Ranks, check, compare, plot, show_source
from labcode.teach.labs import l06_runs
from labcode.teach.labs import l06_slow_link as slow_link

torch.set_num_threads(1)
ranks = Ranks(4)

# %% [markdown]
# ## 1. Fast is not the same as far (core, 15 min)
#
# We train a small GPT on Shakespeare, character by character: one layer, 32 characters at a time. A **sample** is one
# such window of text, and the **batch** is the number of samples in an optimizer step.
#
# How long does a step take? Part of it does not depend on the batch B: Python, starting each operation, and the
# optimizer, which is left out here: what we time is forward and backward. The rest is work for each sample. So a simple
# model is
#
#     t(B) = t0 + t1 · B        and        samples per second = B / t(B)
#
# For a huge batch the speed comes close to 1 / t1 samples per second.
#
# **Predict** with the formula: at which batch, as a multiple of t0 / t1, do you have **half** of that highest speed?

# %% tags=["predict"]
multiple_of_t0_over_t1 = 1  # B / (t0 + t1 B) = 1 / (2 t1) gives B = t0 / t1

# %% tags=["by-hand"]
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
# The batch with half of the highest speed is read off the measured speeds, and t0 / t1 comes from a line through the
# measured seconds. Between two measured batches there is only a straight line, and a busy machine disturbs both. So a
# factor of 1.5 is allowed.

# %% tags=["figure"]
from labcode.config import TextData
from labcode.data import text

windows = text.load(TextData(), l06_runs.gpt().model.context_length).train
small_gpt = gpt.GPT(l06_runs.whole_model())
batches = [1, 2, 4, 8, 16, 64, 256]
seconds = [step_s(small_gpt, windows, batch) for batch in batches]
speeds = [batch / s for batch, s in zip(batches, seconds)]
t1, t0 = np.polyfit(batches, seconds, 1, w=1 / np.array(seconds))
half_batch = np.interp(0.5 / t1, speeds, batches)
multiple = half_batch * t1 / t0
compare("half speed, in t0 / t1", multiple_of_t0_over_t1, multiple, within=1.5)
plot.lines(
    {
        "measured": speeds,
        "t0 + t1 B": [batch / (t0 + t1 * batch) for batch in batches],
    },
    x=batches,
    logx=True,
    logy=True,
    xlabel="batch, samples per step",
    ylabel="samples per second",
    title="A larger batch is faster, until the work itself counts",
    alt="Samples per second grow with the batch and level off, as the model says",
)

# %% [markdown]
# So far everything speaks for a large batch. But the curve says nothing about learning. The next table does: a ViT for
# the weather, like that of lesson 02, has seen the **same 320 samples** with each batch. With batch 1 it made 320 steps
# with them, with batch 16 only 20. Each cell is the mean of three seeds, and the best rate of each batch has a frame.
# The runs come with the course (`l06_runs.VIT_COMMAND` made them); on any machine they give the same losses up to
# rounding.

# %% tags=["figure"]
weather = l06_runs.shipped("vit")
plot.sweep(
    weather,
    title="ViT: validation loss after 320 samples",
    alt="The best loss is 0.113 for batch 1, 0.114 for 4, 0.117 for 8, 0.121 for 16",
)

# %% [markdown]
# Look at the framed cells. Up to a batch of 4 the loss is nearly the same: the larger batch is as good a use of the
# samples, and takes less time. Beyond that, each sample teaches less, at whatever rate. (The frame is never at the edge
# of the table. If it were, the best rate might lie outside, and we would compare rates instead of batches.)
#
# **Takeaway: time to a loss is steps to that loss times seconds per step. A larger batch improves one and may spoil the
# other.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* People read the first figure as an argument for the largest batch that fits into memory. Ask:
# which of the two figures changes on a GPU? (The first, greatly. The second does not.)

# %% [markdown]
# ## 2. How noisy is a gradient? (core, 45 min)
#
# Why does a sample teach less in a large batch? The gradient of a batch is an estimate. The true gradient G would be
# the mean over all text there is. A batch of B samples gives G plus noise. In the picture the black arrow is G, and
# each blue arrow is the gradient of one batch.

# %% tags=["figure"]
plot.gradient_noise(
    alt="Gradients of single samples scatter widely; those of 16 samples nearly agree"
)

# %% [markdown]
# The dashed circle shows how long the noise is on average. With one sample it is longer than the gradient itself, and
# some arrows point the wrong way. With 4 the noise is half as long, with 16 a quarter: the mean of B independent
# samples has a variance of 1 / B. Going from 1 to 4 helps a lot. When all arrows point the same way, more samples only
# repeat what is known.
#
# Now in numbers. Each weight's gradient has a variance from sample to sample. The sum of these variances over all
# weights is written tr Σ, and we call it the **variance** of one sample's gradient. Let G_B be the gradient of a batch
# of B samples. How long is it, on average? Take one weight. Its number in G_B has the mean g, which is its number in G,
# and a variance of σ² / B, as it is the mean of B samples. The mean of a square is the square of the mean plus the
# variance, here g² + σ² / B. Added up over all weights (the letter E in front says *the mean over many batches*):
#
#     E |G_B|² = |G|² + tr Σ / B
#
# Noise makes a gradient **longer**. That is how we can measure it: compare the squared length for a small batch with
# that for a large one. The difference is noise.
#
# The batch at which noise and gradient are equally long is the **gradient noise scale** (McCandlish et al. 2018,
# arXiv:1812.06162, equation 2.9):
#
#     B_noise = tr Σ / |G|²
#
# Example: |G|² = 20 and tr Σ = 80. Then B_noise = 4, and one sample gives 20 + 80 = 100 on average.
#
# **Predict.** What is the mean of |G_16|²?

# %% tags=["predict"]
square_of_16 = 20 + 80 / 16

# %%
# G is a row of 20 ones, and each of its 20 numbers has a variance of 4
gradients = 1 + 2 * torch.randn(5000, 16, 20)
of_batches = gradients.mean(dim=1)
mean_square = of_batches.square().sum(dim=1).mean().item()
compare("|G|^2, 16 samples", square_of_16, mean_square, within=1.05, found="simulated")

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
# Where do two sizes come from? In data parallelism they are there already. Before the all-reduce each rank holds the
# gradient of its own share: the small batch. After it, all hold the gradient of the whole: the big batch.

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
# The estimate of one step is rough; |G|² may even come out negative. So we smooth over steps: keep a part of the old
# value, and add a part of the new one. One question decides whether the result is right: do we smooth the ratio, or
# both numbers?
#
# Suppose that tr Σ is 10 at each of two steps, and the estimates of |G|² are 0.1 and 1.9, so 1 on average. The right
# answer is 10 / 1 = 10.
#
# **Predict.** Is the mean of the two ratios "about right", "too large" or "too small"?

# %% tags=["predict"]
mean_of_ratios = "too large"

# %% tags=["nbval-check-output"]
mean = statistics.mean([10 / 0.1, 10 / 1.9])
print(f"mean of the ratios: {mean:.1f}, and 10 is right")
verdict = "about right"
if mean > 12:
    verdict = "too large"
elif mean < 8:
    verdict = "too small"
WORDS = ("about right", "too large", "too small")
compare("mean of the ratios", mean_of_ratios, verdict, found="computed", options=WORDS)

# %% [markdown]
# A single estimate of |G|² near zero makes its ratio huge. So both numbers are smoothed, and divided last.

# %% [markdown] tags=["exercise"]
# ### Exercise 6.3 · Smooth it
#
# Complete the class. The new value of a smoothed number is `keep` times the old one plus `1 - keep` times what was
# measured. Both start at 0; in the ratio that does not matter.

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
        """B_noise, in samples."""
        ### BEGIN SOLUTION
        return self.variance / self.square
        ### END SOLUTION

# %% tags=["check"]
check("6.3", Smoothed)

# %% [markdown]
# In labcode a hook sees the gradient of each micro-batch, so that accumulation counts as well. The flag
# `--train.noise_scale` adds the result to the metrics. Here are 200 steps on two ranks.

# %%
from labcode import launch
from labcode.teach.progress import following
from labcode.train import metrics, noise_scale

show_source(noise_scale.estimate)
options = [f"--{name}={value}" for name, value in l06_runs.GPT_FIELDS.items()]
options += ["--train.steps=200", "--train.global_batch=32", "--train.micro_batch=8"]
options += ["--train.noise_scale", "--train.out=runs/noise", "--train.overwrite"]
with following("training with the noise scale"):
    launch.run("labcode.train", "gpt_tiny", *options, "--train.eval_every=0", nproc=2)

# %% tags=["figure"]
noisy = [row for row in metrics.read("runs/noise") if "noise_scale" in row]
plot.lines(
    {"noise scale": [row["noise_scale"] for row in noisy]},
    x=[row["step"] for row in noisy],
    logy=True,
    xlabel="step",
    ylabel="B_noise, samples",
    title="The noise scale grows while the model learns",
    alt="The noise scale rises from a few samples to dozens during 200 steps",
)

# %% [markdown]
# At first all samples say the same ("spaces and e are frequent"), so few are enough. Later G is short, and what is left
# to learn differs from sample to sample.
#
# **Takeaway: the noise scale says how many samples a step can use. It costs one number per step, and it grows during
# training.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* In 6.2 people take the small square after the average, or their own instead of the mean. Ask:
# why may the estimate of |G|² be negative? (It is a difference of two measured numbers. Without a bias it has to miss
# on both sides.)

# %% [markdown]
# ## 3. The critical batch (core, 35 min)
#
# The noise scale makes a forecast. If a step with an exact gradient gains 1, a step with batch B gains
# 1 / (1 + B_noise / B) (the same paper, equation 2.7). So the number of steps to a given loss is
#
#     S = S_min · (1 + B_crit / B) = S_min + E_min / B          with  E_min = B_crit · S_min
#
# S_min is what a batch without end would need. The samples of the whole training are S · B = E_min + S_min · B, and
# E_min is what the smallest batch would need. The batch **B_crit** where the curve bends is called the critical batch.
# In this theory it is the noise scale, averaged over the run in some way, as that grows.
#
# For example, S_min = 100 steps and B_crit = 40. A batch of 40 then needs 200 steps and 200 · 40 = 8,000 samples: at
# the critical batch you pay twice the least steps and twice the least samples. Far below it, you wait longer for hardly
# fewer samples. Far above it, you pay more samples for hardly fewer steps.
#
# To see it, we need a **sweep**: runs with many batches, each at several learning rates, because a rate that is right
# for one batch is wrong for another. Comparing batches at one rate compares rates.

# %% [markdown] tags=["exercise"]
# ### Exercise 6.4 · A sweep that survives
#
# `steps_to_target(batch, lr)` trains and returns the steps to the target, or None if it was never reached. A run that
# diverges raises `ArithmeticError`. Write the sweep:
#
# 1. Do a run only if `table` has no entry `table[batch, lr]`. Every run that **ends** leaves one, also a run that
#    diverged: then a sweep that was killed goes on with the same table.
# 2. A run that diverged counts as one that never reached the target.
# 3. Return `{batch: (best rate, its steps)}`, without the batches that never reached it. What an earlier call has put
#    into the table counts, too.

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
# goes on where it was killed.

# %%
print(l06_runs.COMMAND)

# %% [markdown]
# It trains our GPT to a validation loss of 2.3, at a rate that is constant after 20 steps of warm-up, with two seeds.
# It took some ten minutes of two cores, so its table comes with the course. At the best rates it needed 1,259 steps
# with batch 4, and 125 with batch 256.
#
# **Predict.** From these two numbers and the formula: how many steps did it need with batch 32?

# %% tags=["predict"]
E_min = (1259 - 125) / (1 / 4 - 1 / 256)
S_min = 125 - E_min / 256
steps_of_32 = S_min + E_min / 32

# %% tags=["figure"]
from labcode.train import sweep_table

rows = l06_runs.shipped("gpt")
ways = sweep_table.to_loss(rows, l06_runs.TARGET)
measured_steps = {way.batch: way.steps for way in ways}
compare("steps with batch 32", steps_of_32, measured_steps[32], within=1.15)
plot.sweep(
    rows,
    of="steps",
    target=l06_runs.TARGET,
    title="GPT: steps to a loss of 2.3",
    alt="At the best rates 1260 steps with batch 4 fall to 125 with batch 256",
)

# %% [markdown] tags=["exercise"]
# ### Exercise 6.5 · The verdict
#
# Fit the curve S = S_min + E_min / B. You are given `{batch: steps}`; return S_min and E_min. `np.polyfit(x, y, 1)`
# fits a straight line and returns slope and intercept. With `w=1 / y` the errors count as parts of y.

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
print(f"S_min {curve.least_steps:.0f}, E_min {curve.least_samples:.0f}, "
      f"critical batch {curve.critical_batch:.0f}")
plot.steps_against_batch(
    measured_steps,
    curve,
    noise_scale=l06_runs.last_noise_scale("runs/noise"),
    title="Steps to a loss of 2.3",
    alt="Measured steps follow the curve; it bends at a critical batch of about 40",
)

# %% [markdown]
# The seven points lie on the curve within some ten percent, although the theory was made for plain gradient descent and
# we train with AdamW. The noise scale of the run of section 2 (the figure has its line if you made that run) comes out
# at the same order of magnitude as the critical batch, not at the same number: the paper, too, finds them equal only up
# to a factor of a few (section 3), and ours still grows at the end of its 200 steps.
#
# **Takeaway: far below the critical batch, twice the ranks need about half the steps. Going from half of it to the
# whole saves a third of the steps (3 S_min against 2 S_min). Far beyond it they need as many as before.**

# %% [markdown]
# What does it cost? Time to the loss is S · t(B), with t(B) from section 1 for one device. Suppose now that you spread
# the batch over devices, 16 samples on each. Then the time per step stays that of 16 (and the all-reduce, which is left
# out here), and the bill grows with the number of devices. Take 2 euros for the hour of a device, or the price on your
# own invoice.
#
# **Predict.** From 1, 2, 4, 8 and 16 devices: with how many is the loss reached soonest, and with how many at the
# lowest price?

# %% tags=["predict"]
soonest = 16
cheapest = 1

# %% tags=["figure"]
from labcode.config import TextData
from labcode.data import text
from labcode.models import gpt
from labcode.teach.labs.l06_by_hand import step_s

windows = text.load(TextData(), l06_runs.gpt().model.context_length).train
step_of_16_s = step_s(gpt.GPT(l06_runs.whole_model()), windows, batch=16)
price_per_hour = 2.0
on_devices = [way for way in ways if way.batch >= 16]
seconds_to_loss = [way.steps * step_of_16_s for way in on_devices]
euros = []
for way, to_loss_s in zip(on_devices, seconds_to_loss):
    devices = way.batch // 16
    euros.append(10_000 * devices * to_loss_s / 3600 * price_per_hour)
numbers = [way.batch // 16 for way in on_devices]
fastest = numbers[seconds_to_loss.index(min(seconds_to_loss))]
compare("soonest", soonest, fastest, within=1, found="computed")
least = numbers[euros.index(min(euros))]
compare("cheapest", cheapest, least, within=1, found="computed")
plot.lines(
    {"a batch of 16, 32, ... 256": (seconds_to_loss, euros)},
    points={
        "1 device": (seconds_to_loss[:1], euros[:1]),
        "16 devices": (seconds_to_loss[-1:], euros[-1:]),
    },
    xlabel="seconds to the loss",
    ylabel="euros for 10,000 such runs",
    title="Time costs money: 16 samples on each device",
    from_zero=True,
    alt="From 1 to 16 devices the time falls to a third and the cost grows sixfold",
)

# %% [markdown]
# Fastest and cheapest are the two ends. The question is which doubling is worth its price. From 1 to 2 devices a third
# of the time goes, for a third more money. The last one, from 8 to 16 devices, nearly doubles the price and saves 4 %
# of the time: this batch of 256 lies far beyond the critical one.

# %% [markdown] tags=["solution-only"]
# *For the instructor.* In 6.4 the usual mistake is `table.get(...) is None`, which repeats failed runs at each restart.
# Ask: which batch would you buy? There is no right answer without a price for your own time, and that is the answer.

# %% [markdown]
# ## 4. The rate follows the batch, but how? (core, 30 min)
#
# Two rules are often quoted for a batch k times as large.
#
# - **Linear**: k times the rate (Goyal et al. 2017, arXiv:1706.02677). k small SGD steps along nearly the same gradient
#   go k times as far as one.
# - **Square root**: √k times the rate. Adam divides by the size of the gradient, noise included. Where noise dominates,
#   that size falls with √k (Malladi et al. 2022, arXiv:2205.10287).
#
# The table has batches from 4 to 256, so k = 64. The best rate of batch 4 is 0.003. (It is decided by one of two seeds:
# at 0.01 the other one arrives sooner, and this one never.) For batch 256 the linear rule says 64 · 0.003 = 0.19, and
# the square root says 8 · 0.003 = 0.024.
#
# **Predict.** Which of them is nearer to the best rate of the sweep, "linear" or "square root"? (The map of section 3
# knows it; try without.)

# %% tags=["predict"]
nearer_rule = "square root"

# %% tags=["nbval-check-output"]
from labcode.train import sweep_table

ways = sweep_table.to_loss(l06_runs.shipped("gpt"), l06_runs.TARGET)
best_rates = {way.batch: way.lr for way in ways}
print("best of the sweep:", best_rates)
found = best_rates[256]
off_by = {"linear": 0.003 * 64 / found, "square root": 0.003 * 8 / found}
print("off by a factor of", {rule: round(factor, 1) for rule, factor in off_by.items()})
compare("the nearer rule", nearer_rule, min(off_by, key=off_by.get), options=off_by)

# %% [markdown]
# The sweep says 0.01 for batch 256: about three times the rate, not 64 times. At 0.19 the linear rule is six times
# above the largest rate of the sweep. It was found for SGD, and far below the critical batch; here we train with AdamW,
# and go far beyond it. The square root, 0.024, lies between two rates of the sweep, 0.01 and 0.03, which are both nearly
# as good (and for batch 128 it is 0.03 that wins): a sweep in steps of three cannot say more.
#
# So a rule gives a place to begin, and may be wrong even there: in the table of the ViT (section 1) the best rate falls
# from batch 4 to batch 16, where 20 steps are all there is. `--optim.lr_rule square_root --optim.reference_batch 16`
# applies a rule. The sweep decides. For very large batches LAMB and LARS (`--optim.name lamb`) let each matrix move in
# proportion to its own length.
#
# What if you change only the batch, or only the rate?
#
# **Predict**, each time by a word: "sooner", "later" (up to twice the steps), "far later", or "never" (in the steps of
# the table). The table of section 3 knows it; try without.
#
# - Batch 256 keeps the rate of batch 4, 0.003. When does it arrive, beside batch 256 at its best rate?
# - Batch 4 gets ten times its rate, 0.03. When does it arrive, beside batch 4 at its best rate?

# %% tags=["predict"]
large_batch_old_rate = "later"
small_batch_high_rate = "never"

# %% tags=["nbval-check-output"]
WHEN = ("sooner", "later", "far later", "never")

def arrival(batch, lr):
    """When the runs of this batch and rate arrive, beside those of the best rate."""
    rows = sweep_table.grouped(l06_runs.shipped("gpt"))[batch, lr]
    steps = [sweep_table.steps_to(row, l06_runs.TARGET) for row in rows]
    if None in steps:
        lowest = [round(min(loss for _, loss in row.val_losses), 2) for row in rows]
        print(f"batch {batch} at {lr}: the lowest losses are {lowest}")
        return "never"
    (best,) = [way.steps for way in ways if way.batch == batch]
    times = statistics.mean(steps) / best
    print(f"batch {batch} at {lr}: {times:.2g} times the steps of the best rate")
    return "sooner" if times < 1 else "later" if times <= 2 else "far later"

compare("large batch", large_batch_old_rate, arrival(256, 0.003), options=WHEN)
compare("small batch", small_batch_high_rate, arrival(4, 0.03), options=WHEN)

# %% [markdown]
# A third of its best rate costs batch 256 some steps. Ten times its best rate keeps batch 4 from arriving at all: its
# losses come to rest above the target, as each step follows the noise of four samples too far.
#
# Two guards are usual at high rates. **Clipping** (lesson 05, section 6) bounds the gradient of a step. It protects
# SGD; a step of AdamW is about as long as the rate says, however long the gradient is. **Warm-up** begins with small
# steps, while Adam's averages are still rough. In all runs of the sweep the rate rose over the first 20 steps. How much
# hangs on that?
#
# **Predict.** Batch 256 trains at a rate of 0.1, ten times its best one in the sweep. When it begins at the full rate,
# it does not come to a loss of 2.3 in 200 steps. Does it come there if the rate rises over the first 100 steps,
# `True` or `False`?

# %% tags=["predict"]
warm_up_helps_it = True

# %% tags=["figure"]
from labcode.teach.progress import status

curves = {}
for steps in (0, 100):
    status(f"training with {steps} steps of warm-up")
    curves[f"{steps} steps of warm-up"] = l06_runs.validated_at_rate(0.1, steps)
status()
lowest = {}
for name, (steps, losses) in curves.items():
    lowest[name] = min(losses)
    print(f"{name}: lowest validation loss {lowest[name]:.2f}, {steps[-1]} steps done")
arrives = lowest["100 steps of warm-up"] <= l06_runs.TARGET
compare("comes to 2.3", warm_up_helps_it, arrives)
plot.lines(
    curves,
    xlabel="step",
    ylabel="validation loss",
    title="GPT, batch 256 at a rate of 0.1, until the target",
    reference={"target": l06_runs.TARGET},
    upright={"full rate after 100 steps": 100},
    alt="Without warm-up the loss stays above 2.4; with 100 steps it falls to 2.3",
)

# %% [markdown]
# The first steps decide. Adam's first step moves every weight by the full rate, whether its gradient is large or tiny.
# At a rate of 0.1 a few such steps carry the model to a place from which it recovers slowly. With warm-up it comes to
# the target in about as many steps as the best run of the sweep; its last 30 steps were at the full rate. So "the best
# rate" is one for a given warm-up. Goyal et al. could use their linear rule up to batches of 8192 with a warm-up over
# five epochs (their section 2.2).

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
#   loss above ln 83 = 4.42. Rates up to 100.
# - `overfits` learns its training text by heart: the training loss ends more than 0.3 below the validation loss, which
#   has risen again from its lowest point. At most 800 steps. A text is learned by heart if it is short:
#   `data.val_fraction` is the share of it that is kept for validation, and training gets the rest.

# %% tags=["exercise"]
### BEGIN SOLUTION
diverges = {"optim.lr": 30.0, "optim.min_lr": 3.0}
overfits = {"data.val_fraction": 0.9995, "optim.lr": 1e-2, "train.steps": 600}
### END SOLUTION

# %% tags=["check"]
check("6.6", diverges, overfits)

# %% [markdown]
# **Takeaway: over a batch 64 times as large the best rate has grown threefold, and it depends on the warm-up. No rule
# replaces a sweep.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Some hold "linear scaling" for a law. Show them the map: the framed cells hardly climb. In 6.6
# clipping and Adam make divergence harder than people expect; that is worth a word.

# %% [markdown]
# ## 5. Fewer messages (core, 35 min)
#
# A larger batch sends fewer gradients for the same samples. There is another way: let each copy of the model make H
# steps on its own samples, and average the **weights** after that. The picture shows both.

# %% tags=["figure"]
plot.local_steps(
    inner_steps=4,
    alt="With averages at each step the network is busy 8 times, with H = 4 twice",
)

# %% [markdown]
# The weights have as many bytes as the gradients. **Predict**: with H = 10, what part of the bytes of data parallelism
# does a step send on average?

# %% tags=["predict"]
part_of_the_bytes = 1 / 10

# %% [markdown]
# The plain average of the weights is **local SGD** (Stich 2018, arXiv:1805.09767). **DiLoCo** (Douillard et al. 2023,
# arXiv:2311.08105) takes one step more. Let w be where all copies began. The difference to their average,
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
# labcode's version sends one row, and lets PyTorch's SGD do the momentum.

# %%
from labcode.config import TextData
from labcode.data import text
from labcode.models import gpt, layers
from labcode.parallel.local import OuterOptimizer
from labcode.teach.progress import status

show_source(OuterOptimizer.step)

# %% [markdown]
# Now four copies train the small GPT for 200 steps with 8 samples each. They meet after every step, after every H, or
# never. DiLoCo has the paper's rate 0.7 and momentum 0.9; the gentle one has a momentum of 0.3. The inner optimizer is
# AdamW in all of them, and each copy keeps its own averages. (So "each step" averages weights. It is close to data
# parallelism, which averages gradients, but not the same.)

# %%
def train_apart(rank, every, lr, momentum, steps=200):
    """(validation loss, bytes sent) of copies that meet after every so many steps."""
    torch.set_num_threads(1)
    model = layers.initialize(gpt.GPT(l06_runs.whole_model()), 0)
    splits = text.load(TextData(), 32)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    outer = OuterOptimizer(model.parameters(), dist.group.WORLD, lr, momentum)
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
    "each step": (1, 1.0, 0.0),
    "local SGD, H = 10": (10, 1.0, 0.0),
    "DiLoCo, H = 10": (10, 0.7, 0.9),
    "gentle DiLoCo, H = 10": (10, 0.7, 0.3),
    "local SGD, H = 50": (50, 1.0, 0.0),
    "never": (1000, 1.0, 0.0),
}
apart = {}
for name, way in ways_to_meet.items():
    status(f"training: {name}")
    apart[name] = ranks.run(train_apart, *way)[0]
status()

# %% tags=["figure"]
every_bytes = apart["each step"][1]
ten_bytes = apart["DiLoCo, H = 10"][1]
compare("part of the bytes", part_of_the_bytes, ten_bytes / every_bytes, within=1,
        found="counted")
plot.bars(
    {name: loss for name, (loss, _) in apart.items()},
    ylabel="validation loss",
    title="Four copies, 200 steps of 8 samples each",
    alt="Local SGD is close to meeting at each step; DiLoCo with momentum 0.9 is worse",
)

# %% [markdown]
# With a tenth of the messages, local SGD loses a little, and it still helps to meet every 50 steps. The numbers differ
# from seed to seed, and so does the order of neighbouring bars.
#
# DiLoCo with the paper's values does badly **here**, worse even than copies that never meet. If the outer gradients
# point the same way again and again, momentum multiplies their sum by 1 / (1 - μ). So η / (1 - μ) says how far the
# common weights go, measured by the average of the copies: 0.7 / 0.1 = 7 times as far with the paper's values, and 0.7
# / 0.7 = 1 with the gentle ones, which is why these do as well as local SGD. In 200 steps there are only 20 outer ones,
# all of them early, where the loss falls fast and the direction changes. The paper makes hundreds of inner steps
# between two outer ones, and begins with a model that is trained already. Do not take over a setting without a sweep.
#
# What is it worth in time? On a fast network, nothing. So we emulate a slow one, as in lesson 05, section 4: a link
# between two cities, with α = 5 ms and 5 MB/s. A ring on four ranks needs 6 α + 1.5 n/β for an all-reduce of n bytes
# (lesson 01, section 6). The model of the next cells has `slow_link.weight_bytes()` bytes of weights, and as many of
# gradients. So this is how long a step of data parallelism uses the link:

# %%
link_s = 6 * 5e-3 + 1.5 * slow_link.weight_bytes() / 5e6
print(f"{1e3 * link_s:.0f} ms")

# %% [markdown]
# The race has three runners: data parallelism, and DiLoCo with H = 5 and H = 20, both with an outer rate of 0.7 and a
# momentum of 0.5. Each rank takes 4 samples a step. They make 40, 120 and 180 steps.

# %% tags=["figure"]
status("training over a slow link")
curves = slow_link.race(ranks)
status()
plot.loss_against_cost(
    curves,
    title="Four ranks over a link between two cities",
    alt="In the same time and with fewer bytes DiLoCo reaches a lower loss",
)

# %% [markdown]
# DiLoCo learns more in the same seconds, because it computes while data parallelism waits. On the right it needs a
# fraction of the bytes for the same loss. Beware of one thing: in the bars above all ways made the same number of
# **steps**, and there meeting at each step was the best.
#
# **Takeaway: copies that meet every H steps send 1/H of the bytes. Step for step they lose something by it; on a slow
# link they make so many more steps that they win.**

# %%
ranks.close()

# %% [markdown] tags=["solution-only"]
# *For the instructor.* The sign of the outer gradient is the classic mistake, then `common` that is not moved on. Ask:
# which state does each copy keep for itself? (Adam's averages. They are never sent.)

# %% [markdown]
# ## From here to GPUs and SLURM (core, 5 min)
#
# | what | start |
# |---|---|
# | the noise scale on 8 GPUs | `torchrun --nproc-per-node=8 -m labcode.train gpt_10m --train.noise_scale` |
# | a rule for the rate | add `--optim.lr_rule square_root --optim.reference_batch 64` |
# | LAMB | add `--optim.name lamb` (with `labcode[optimizers]`) |
# | a sweep on one GPU, a run at a time | `python -m labcode.train.sweep gpt_10m --sweep.batch 32,64,128 --sweep.lr 1e-3,3e-3,1e-2 --sweep.samples 64000` |
# | inside a SLURM job | `srun --ntasks=1 python -m labcode.train.sweep ...`, submitted again to resume |
#
# ## Questions (core, 5 min)
#
# **1.** The noise scale of a run is 2000 samples, and the batch is 500. Your cluster doubles. What do you expect?
#
# <details><summary>Answer</summary>
#
# From 1 + 2000 / 500 = 5 times S_min to 1 + 2000 / 1000 = 3 times: 60 % of the steps, and 20 % more samples.
# </details>
#
# **2.** Somebody compares batches 32 and 1024 at the same rate and finds that large batches train badly. What is
# missing?
#
# <details><summary>Answer</summary>
#
# The best rate for each batch. The comparison mixes two effects.
# </details>
#
# **3.** Why is the noise scale measured before clipping?
#
# <details><summary>Answer</summary>
#
# Clipping changes the length of the big gradient and not that of the small ones, and lengths are what is compared.
# </details>
#
# **4.** From lesson 05: gradients can travel while backward goes on. Can the average of the weights, too?
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
# | noise scale | tr Σ / abs(G)², smoothed first, divided last | `--train.noise_scale` |
# | critical batch | S = S_min + E_min / B, B_crit = E_min / S_min | `train.sweep_table.fit_tradeoff` |
# | rate and batch | grows slowly with AdamW: sweep it | `--optim.lr_rule`, `train.sweep` |
# | rare messages | 1 / H of the bytes, outer Nesterov | `parallel.local.OuterOptimizer` |
#
# ## Sources
#
# - McCandlish et al. 2018, *An Empirical Model of Large-Batch Training*, arXiv:1812.06162: noise scale (section 2.2,
#   appendix A.1), the curve of steps and samples (equation 2.11).
# - Goyal et al. 2017, *Accurate, Large Minibatch SGD*, arXiv:1706.02677: the linear rule, and warm-up.
# - Malladi et al. 2022, *On the SDEs and Scaling Rules for Adaptive Gradient Algorithms*, arXiv:2205.10287: the square
#   root.
# - You et al. 2019, *Large Batch Optimization for Deep Learning*, arXiv:1904.00962: LAMB.
# - Stich 2018, *Local SGD Converges Fast and Communicates Little*, arXiv:1805.09767.
# - Douillard et al. 2023, *DiLoCo*, arXiv:2311.08105.
