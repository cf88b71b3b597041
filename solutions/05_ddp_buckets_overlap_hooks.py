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
# # 05 · DDP: buckets, overlap, hooks
#
# In the last lesson you averaged gradients with one all-reduce for each parameter, after backward. That is correct, and
# slow. In this lesson you make it fast in two steps: you send gradients together, and you send them while backward is
# still computing. At the end you have the core of PyTorch's `DistributedDataParallel`, and section 5 times the two side
# by side.
#
# ## Goals
#
# - predict what it costs to send gradients one by one, all at once, and in buckets;
# - write an all-reduce of buckets, and start it from a hook while backward runs;
# - say what overlap hides, and what it cannot hide;
# - use DDP's own tools: `no_sync`, clipping, communication hooks, and its best-known error.
#
# **Time**: 121 minutes, and 15 more for what is optional. A good place for a break is after section 3. **Needs**:
# lesson 01 (section 2), lesson 04 (section 1). For sections 1 and 4 also lesson 01 (section 6); for section 5 also
# lesson 04 (section 4).

# %%
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from course.lab import Ranks, check, compare, plot, show_source
from labcode import recipes
from labcode.comm.timing import call_times
from labcode.models import gpt, layers

torch.set_num_threads(1)
ranks = Ranks(4)

# %% [markdown]
# All sections use a GPT with a million parameters, and a batch of random tokens.

# %%
model_config = recipes.gpt_shape("gpt_1m", vocab_size=65)
sizes = [param.nbytes for param in gpt.GPT(model_config).parameters()]
gradient_bytes = sum(sizes)
tokens = torch.randint(65, (8, 128), generator=torch.Generator().manual_seed(0))
print(f"{len(sizes)} parameters, {gradient_bytes:,} bytes of gradients")

# %% [markdown]
# ## 1. One message instead of many (core, 23 min)
#
# In lesson 01, section 6, an all-reduce of n bytes on p ranks took 2 (p - 1) α + 2 (p - 1)/p · n/β seconds. α is the
# latency of a message, and β is the bandwidth. The first part is paid once for each all-reduce, however small it is.
# Our GPT has many small parameters: a weight and a bias in every normalisation, and a bias in every linear layer.
# (Llama has no biases, but the weights of its normalisations are small too.) If each gradient travels alone, each of
# them pays the first part.
#
# On four ranks the formula becomes 6 α + 1.5 n/β. Let us measure both parts on this machine, with 64 small messages,
# which cost little more than 6 α each, and with one that is as large as all the gradients of our model together. We
# keep the fastest of four measurements.

# %%
from labcode.parallel.data import make_buckets
from labcode.perf import alpha_beta


def fastest_round_s(message_bytes):
    """Seconds of one round of all-reduces of these sizes."""
    numels = [size // 4 for size in message_bytes]

    def send_four_rounds(row):
        for _ in range(4):
            for part in row.split(numels):
                dist.all_reduce(part)

    return min(call_times(send_four_rounds, sum(message_bytes), repeats=4)) / 4

def rounds_s(rank, layouts):
    return [fastest_round_s(message_bytes) for message_bytes in layouts]

small_s, large_s = ranks.run(rounds_s, [[1000] * 64, [gradient_bytes]])[0]
fitted_s = [small_s / 64, large_s]
link = alpha_beta.fit("all_reduce", 4, [1000, gradient_bytes], fitted_s)
print(f"alpha {link.alpha_s * 1e6:.0f} us, so 6 alpha is {6e3 * link.alpha_s:.1f} ms")
print(f"all gradients in one message: {1e3 * large_s:.1f} ms")

# %% [markdown]
# The time that the large message takes beyond 6 α is that of its bytes, 1.5 n/β. It is the difference between two
# measured times, so it is rough, but good enough for the calculation below. For the bandwidth of the machine take the
# longer messages of lesson 01, section 6.
#
# **Predict** with `link.alpha_s`, `link.beta_bytes_per_s` and `len(sizes)`: by this formula, how many times as long
# as a single all-reduce of all gradients does it take to send each gradient in an all-reduce of its own? Begin with
# what the bytes cost in either case, 1.5 n/β. (Your answer is compared with the formula. The measurement stands below
# it and in the figure: on a busy machine it can differ by a factor of two or three.)

# %% tags=["predict"]
all_bytes_s = 1.5 * gradient_bytes / link.beta_bytes_per_s
one_by_one_s = len(sizes) * 6 * link.alpha_s + all_bytes_s
all_at_once_s = 6 * link.alpha_s + all_bytes_s
times_as_long = one_by_one_s / all_at_once_s

# %% tags=["figure"]
layouts = []
model_ms = []
for bucket_mb in (1e-9, 0.1, 0.3, 1, 25):
    buckets = make_buckets(gpt.GPT(model_config), bucket_mb)
    message_bytes = [bucket.num_bytes for bucket in buckets]
    predicted_s = [alpha_beta.time_s("all_reduce", 4, n, link) for n in message_bytes]
    layouts.append(message_bytes)
    model_ms.append(1e3 * sum(predicted_s))

number_of_messages = [len(message_bytes) for message_bytes in layouts]
measured_ms = [1e3 * seconds for seconds in ranks.run(rounds_s, layouts)[0]]
ratio = model_ms[0] / model_ms[-1]
compare("one by one, against one", times_as_long, ratio, within=1.02, found="computed")
print(f"measured: {measured_ms[0] / measured_ms[-1]:.1f} times as long")
plot.lines(
    {"measured": measured_ms, "alpha-beta model": model_ms},
    x=number_of_messages,
    caption="05.messages",
)

# %% [markdown]
# All points in the figure send the same bytes, cut into more messages towards the right. Most milliseconds are saved on
# the way from 64 messages to a handful, and a single message is faster still. Why not always send one message? The next
# section answers that. In any case we need a way to send several gradients together.
#
# Gradients that travel together are called a **bucket**. The picture shows six gradients in three buckets: those of a
# bucket are copied into one row, the row is all-reduced, and its parts are copied back.

# %% tags=["figure"]
example_sizes = [10, 4, 12, 6, 10, 8]
plot.buckets(example_sizes, [[5, 4], [3, 2], [1, 0]], limit=20, caption="05.buckets")

# %% [markdown]
# Buckets are filled from the last parameter to the first, because backward reaches the last one first.
# A bucket takes the next gradient if it then holds no more than a given amount. In the picture the gradients have 10,
# 4, 12, 6, 10 and 8 numbers from left to right, and the limit is 20. So 8 and 10 make 18, and the next 6 would be too
# much. With a limit of 30 there would be two messages, of 8 + 10 + 6 = 24 and 12 + 4 + 10 = 26 numbers.

# %% [markdown] tags=["exercise"]
# ### Exercise 5.1 · One all-reduce for each bucket
#
# Given the buckets, as lists of parameters, replace every gradient by its mean over the group, with **one** all-reduce
# for each bucket. Four tools do the work:
#
# - `tensor.flatten()` makes a row of a tensor, and `torch.cat` joins rows into one;
# - `row.split(numbers)` cuts a row into parts with these numbers of elements;
# - `part.view_as(tensor)` gives a part the shape of a tensor;
# - `tensor.copy_(other)` writes other numbers into a tensor.

# %% tags=["exercise", "by-hand"]
def average_buckets(buckets, group):
    """Replace every gradient by its mean over the group, a bucket at a time."""
    ### BEGIN SOLUTION
    p = dist.get_world_size(group)
    for bucket in buckets:
        row = torch.cat([param.grad.flatten() for param in bucket])
        dist.all_reduce(row, group=group)
        row /= p
        numbers = [param.numel() for param in bucket]
        for param, mean in zip(bucket, row.split(numbers)):
            param.grad.copy_(mean.view_as(param))
    ### END SOLUTION

# %% tags=["check"]
check("5.1", average_buckets, ranks)

# %% [markdown]
# **Takeaway: the same bytes in fewer messages are cheaper. What you save is the latency of the messages that you do not
# send.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Typical: assigning to a local name instead of copying into `.grad`, dividing before and after,
# and giving `split` bytes instead of numbers. Ask: how much memory does the row cost? (As much as its gradients, for a
# moment. DDP avoids it with `gradient_as_bucket_view=True`, and labcode always: there the gradients live inside the
# buckets.)

# %% [markdown]
# ## 2. Send while you compute (core, 10 min)
#
# If one message is cheapest, why not always send one? Because it can leave only when the last gradient is there.
#
# Backward goes through the layers from the last to the first. When it leaves a layer, that layer's gradients are final:
# nothing that happens later in this backward can change them. (A weight that is used twice, like an embedding that is
# also the output layer, is final only when backward has left both places.) So they could already travel while backward
# computes the other layers. This is called **overlap**.
#
# The picture shows one step of a model whose gradients travel in four buckets, without overlap and with it. Backward
# needs 10 ms for the part of the model whose gradients are in one bucket, and the link needs 8 ms to all-reduce a
# bucket. The row *core* is what a rank computes: B1 is backward of the last layers and B4 that of the first ones. In the
# row *link*, 1 to 4 are their buckets.

# %% tags=["figure"]
from course.labs import l05_slow_link as slow_link

slow_link.draw_overlap(
    4, compute_ms=10, send_ms=8, title="Overlap hides all buckets but the last"
)

# %% [markdown]
# Let us work it out for the picture.
#
# - **Without overlap**, sending starts when backward is done. That makes 4 · 10 + 4 · 8 = 72 ms.
# - **With overlap**, the first bucket is ready after 10 ms and has arrived at 18 ms, before the next one is ready at 20
#   ms. So the link always waits for backward. Only the last bucket is still under way when backward ends. That
#   makes 4 · 10 + 8 = 48 ms.
#
# Now the link is slower, and needs 15 ms for each bucket.
#
# **Predict.** How long does the step take without overlap, and how long with it, in ms? Before you run it, say to
# yourself who waits for whom.

# %% tags=["predict"]
without_overlap_ms = 4 * 10 + 4 * 15
with_overlap_ms = 10 + 4 * 15  # the link is busy from the first bucket on

# %% tags=["nbval-check-output"]
after_ms = slow_link.step_ms(4, compute_ms=10, send_ms=15, overlapped=False)
during_ms = slow_link.step_ms(4, compute_ms=10, send_ms=15, overlapped=True)
compare("without overlap", without_overlap_ms, after_ms, within=1, found="simulated")
compare("with overlap", with_overlap_ms, during_ms, within=1, found="simulated")

# %% tags=["figure"]
slow_link.draw_overlap(
    4, compute_ms=10, send_ms=15, title="The slow link is busy from the first bucket on"
)

# %% [markdown]
# If sending is the slower of the two, the link is busy all the time after the first bucket, and the core waits at the
# end. In both cases the shorter activity is hidden behind the longer one, except for the time of a single bucket.
#
# This decides the size of a bucket. It has to be large enough that its latency does not matter, and small enough that
# the first one leaves early and the last one is short.
#
# **Takeaway: with overlap a step takes about as long as the slower of computing and sending, and not as long as both
# together.**

# %% [markdown]
# ## 3. A hook on every gradient (core, 28 min)
#
# How does a bucket learn that it is full, in the middle of `backward()`? PyTorch can call a function of yours whenever
# a parameter's `.grad` has its final value: a *post-accumulate-grad hook*. You register it with
# `param.register_post_accumulate_grad_hook(function)`, and it is called with the parameter. In the next cell each
# parameter has a hook that prints its name.

# %% tags=["nbval-check-output"]
import functools

from labcode.parallel.data import Bucket


def tell(name, param):
    print("ready:", name)

two_layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
for name, param in two_layers.named_parameters():
    hook = functools.partial(tell, name)  # a call of hook(param) is tell(name, param)
    param.register_post_accumulate_grad_hook(hook)
two_layers(torch.ones(1, 2)).sum().backward()

# %% [markdown]
# The last layer (`1.`) comes first, as expected. The hook of a weight that is used twice is called once, when backward
# has left both places.
#
# And how is an all-reduce started without waiting for it? With `async_op=True`, `dist.all_reduce` returns a handle at
# once, and the tensor travels in the background. You must not touch the tensor until the handle's method `wait()` has
# returned. With gloo it holds the sum then. With NCCL, `wait()` returns at once: it only makes the current CUDA stream
# wait. What you launch on this stream afterwards sees the sum, and the CPU goes on meanwhile.

# %% [markdown] tags=["exercise"]
# ### Exercise 5.2 · Write DDP
#
# Complete the class. It sends every bucket as soon as the last of its gradients is ready.
#
# 1. `__init__` is given. `buckets` holds lists of parameters, the last layer first. Each parameter has a hook that
#    calls `gradient_ready` with the number of its bucket. `missing[number]` is how many gradients of this bucket are
#    still to come.
# 2. `gradient_ready` is yours. Count the gradient. If its bucket is now complete, join the bucket's gradients into one
#    row and start its all-reduce, **without waiting**. Keep in `under_way` what you will need later.
# 3. `finish_gradient_sync` is yours. It is called after backward. When it returns, every `.grad` is the mean over the
#    group, and the object is ready for the next step.
#
# The check trains a GPT for three steps on four ranks, and on two groups of two, and compares every gradient with that
# of one process. It also looks at **when** you send and wait.

# %% tags=["exercise", "by-hand"]
class OverlappedDataParallel:
    """Averages the gradients of `module` over `group` while backward runs."""

    def __init__(self, module, group, buckets):
        self.module = module
        self.group = group
        self.buckets = buckets
        self.missing = [len(bucket) for bucket in buckets]
        self.under_way = []
        for number, bucket in enumerate(buckets):
            hook = functools.partial(self.gradient_ready, number)
            for param in bucket:
                param.register_post_accumulate_grad_hook(hook)

    def gradient_ready(self, number, param):
        """A gradient of bucket `number` is final: send the bucket if it is complete."""
        ### BEGIN SOLUTION
        self.missing[number] -= 1
        if self.missing[number] == 0:
            bucket = self.buckets[number]
            row = torch.cat([other.grad.flatten() for other in bucket])
            work = dist.all_reduce(row, group=self.group, async_op=True)
            self.under_way.append((work, row, bucket))
        ### END SOLUTION

    def finish_gradient_sync(self):
        """Wait for all buckets and put the means into `.grad`."""
        ### BEGIN SOLUTION
        p = dist.get_world_size(self.group)
        for work, row, bucket in self.under_way:
            work.wait()
            row /= p
            numbers = [param.numel() for param in bucket]
            for param, mean in zip(bucket, row.split(numbers)):
                param.grad.copy_(mean.view_as(param))
        self.under_way.clear()
        self.missing = [len(bucket) for bucket in self.buckets]
        ### END SOLUTION

# %% tags=["check"]
check("5.2", OverlappedDataParallel, ranks)

# %% [markdown]
# labcode's `Bucket` has three methods for this: `send` and `receive` do what yours do, and `adopt` saves a copy. A
# bucket keeps its row, `flat`, from step to step, and a view of it for each parameter: its part of the row, in the
# parameter's shape. The hook calls `adopt`, which copies a new gradient into its view and makes the view the
# parameter's `.grad`. From then on the gradient lies in the row, so nothing has to be joined or copied back. `send`
# divides before the sum, because in 16 bits a sum of many large gradients could overflow, and it takes zeros for a
# parameter that has no gradient.

# %%
show_source(Bucket.adopt)
show_source(Bucket.send)

# %% [markdown]
# One thing is still missing, and a GPT does not show it. Your class sends a bucket as soon as it is complete, and
# collectives are matched by their order. If one rank finished bucket 2 before bucket 1, and another rank the other way
# round, then the first rank's bucket 2 would be added to the second rank's bucket 1. In a GPT this does not happen,
# because all ranks go through the same layers in the same order. In a model with branches, it can. So labcode lets a
# bucket wait until all buckets before it have been sent.
#
# **Takeaway: a hook sees each gradient when it is final, a bucket leaves with its last gradient, and all ranks send in
# the same order.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* The exercise takes half of the time. The most common mistakes: waiting inside the hook (right
# numbers, no overlap; the check says so), dividing by the world size, forgetting to set `missing` back (the second step
# then sends nothing), keeping the entries of the previous step, and sending with the first gradient of a bucket instead
# of the last. Some send all buckets when the very last gradient is there: the numbers are right, and the check says how
# many gradients went by meanwhile. Ask the room: what happens if one rank skips a layer?

# %% [markdown]
# ## 4. What overlap gains (core, 10 min)
#
# On this machine gloo moves the bytes with the same cores that compute, so communication and computation take time from
# each other. To see overlap at work here, we use an **emulated link**: each all-reduce runs as always, and it counts as
# under way until Ethernet with 1 Gbit/s would have delivered it. A rank that waits for it sleeps, so its core is free
# meanwhile. Two of our four ranks take part, one for each of two cores. Your function of exercise 5.1 sends after
# backward, and your class of exercise 5.2 during it. If one of them has not passed its check, labcode's is used instead.
#
# **Predict.** The million parameters make five buckets of at most 1 MB, all of about the same size. Suppose that
# backward takes longer than sending. What fraction of the time of sending is **not** hidden behind backward?

# %% tags=["predict"]
exposed_fraction = 1 / 5

# %%
import functools
import math
import os

from course.lab import yours
from course.labs import l05_by_hand
from course.labs import l05_slow_link as slow_link
from labcode.parallel.data import make_buckets
from labcode.perf import alpha_beta

ethernet = alpha_beta.Link(alpha_s=50e-6, beta_bytes_per_s=125e6)
only_gloo = alpha_beta.Link(alpha_s=0, beta_bytes_per_s=math.inf)
average = yours("5.1", l05_by_hand.average_buckets)
Overlapped = yours("5.2", l05_by_hand.OverlappedDataParallel)

def new_model():
    """A GPT, and its parameters in buckets of at most 1 MB."""
    model = layers.initialize(gpt.GPT(model_config), 0)
    return model, [bucket.params for bucket in make_buckets(model, 1)]

def loss(model):
    return gpt.loss(model(tokens), tokens)

def timed_steps(rank, links):
    """For each link the fastest of 12 steps on ranks 0 and 1, sent after and during."""
    pair = dist.new_group([0, 1])
    if rank > 1:
        return None
    plain, buckets = new_model()
    after = slow_link.Way(plain, functools.partial(average, buckets, pair))
    wrapped, buckets = new_model()
    parallel = Overlapped(wrapped, pair, buckets)
    during = slow_link.Way(wrapped, parallel.finish_gradient_sync)
    return slow_link.fastest_steps(after, during, loss, pair, links, repeats=12)

on_ethernet, on_gloo = ranks.run(timed_steps, [ethernet, only_gloo])[0]

# %% tags=["figure"]
after, overlapped = on_ethernet
exposed = overlapped.exposed_s / overlapped.link_s  # exposed: after backward
compare("fraction that is not hidden", exposed_fraction, exposed)
plot.overlap(
    {"sent after backward": after.lanes(), "sent during backward": overlapped.lanes()},
    caption="05.overlap",
)

# %%
print("emulated Ethernet:")
print(f"  sent after backward  {1e3 * after.total_s:.1f} ms")
print(f"  sent during backward {1e3 * overlapped.total_s:.1f} ms")
print(f"gloo alone, on {os.cpu_count()} cores:")
print(f"  sent after backward  {1e3 * on_gloo.after.total_s:.1f} ms")
print(f"  sent during backward {1e3 * on_gloo.overlapped.total_s:.1f} ms")

# %% [markdown]
# On the emulated link only one bucket is still under way when backward ends. (A gap in the upper row *link* is gloo's
# own time: `average_buckets` waits for each all-reduce before it starts the next.) With gloo alone there is little to
# gain, because copying needs a core, and with a rank on every core none is free. GPUs lie in between. Network cards
# carry the bytes between nodes, but NCCL's all-reduce is a kernel: it copies and adds on the GPU itself, and takes some
# of the SMs and of the memory bandwidth from backward. On 32 GPUs with NCCL, overlap made the training of ResNet-50
# faster by 38 % and that of BERT by 35 % (Li et al. 2020, section 5.1).
#
# Would a single all-reduce just before the optimizer's step do instead of DDP? The weights would be the same, and it
# pays the latency once. But it cannot begin before backward ends, so it costs what "sent after backward" costs: on the
# emulated Ethernet the whole time of sending, where DDP leaves one bucket of it.
#
# Everything but the last bucket is hidden only if backward takes longer than sending. The time of sending is fixed by
# the model, and backward gets longer with each token of the batch. Lesson 13b, section 5, turns this into a rule for
# the tokens that each GPU needs to hide the communication.
#
# **Takeaway: overlap gains as far as something other than the computing cores moves the bytes, and up to the time of
# backward.**

# %% [markdown]
# ## 5. PyTorch's DDP (core, 21 min)
#
# Everything that you have written is in PyTorch's DDP as well. Here is where, in `torch/nn/parallel/distributed.py`
# and, in C++, in `torch/csrc/distributed/c10d/reducer.cpp`.
#
# | step | `labcode.parallel.data` | DDP |
# |---|---|---|
# | equal weights | a broadcast in `DataParallel()` | `_sync_module_states` in the constructor |
# | buckets, last parameter first | `make_buckets`; made anew after the first step, in the order in which the gradients came | `_compute_bucket_assignment_by_size`; one bucket in the first step, then made anew in the same way; with `find_unused_parameters=True` never made anew |
# | a gradient is ready | `_gradient_ready` | `Reducer::autograd_hook` |
# | send in one order | wait for the buckets before | `Reducer::mark_bucket_ready` |
# | wait, hand out the means | `finish_gradient_sync()` | `Reducer::finalize_backward`, before `backward()` returns (with NCCL only the CUDA stream waits) |
# | only add up | `no_sync()` | `no_sync()` |
#
# One rule differs: DDP closes a bucket once it has **reached** the limit, so a bucket may be larger than that. Take the
# six gradients of section 1 and a limit of 30 numbers. DDP's first message would hold 8 + 10 + 6 + 12 = 36, and the
# second the other 14. If you leave `bucket_cap_mb` alone, the limit is 25 MiB, and 1 MiB for the bucket that leaves
# first. The table says when this holds: from the second step on, because in the first one DDP does not know yet in
# which order the gradients come.

# %%
import contextlib

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from course.lab import yours
from course.labs import l05_by_hand
from labcode.parallel.data import DataParallel, make_buckets

Overlapped = yours("5.2", l05_by_hand.OverlappedDataParallel)

def step_s(rank, wrap):
    """Seconds of the fastest forward, backward and average."""
    model, finish = wrap(layers.initialize(gpt.GPT(model_config), 0))

    def step(_):
        gpt.loss(model(tokens), tokens).backward()
        finish()

    return min(call_times(step, num_bytes=0, repeats=6))

def by_hand(module):
    """The class of exercise 5.2."""
    buckets = [bucket.params for bucket in make_buckets(module, 0.5)]
    parallel = Overlapped(module, dist.group.WORLD, buckets)
    return module, parallel.finish_gradient_sync

def by_labcode(module):
    model = DataParallel(module, dist.group.WORLD, bucket_mb=0.5)
    return model, model.finish_gradient_sync

def nothing():
    """DDP has waited for its buckets when backward returns."""

def by_pytorch(module):
    return DistributedDataParallel(module, bucket_cap_mb=0.5), nothing

WAYS = {"exercise 5.2": by_hand, "labcode": by_labcode, "DDP": by_pytorch}
for name, wrap in WAYS.items():
    print(f"{name:12} {1e3 * max(ranks.run(step_s, wrap)):.1f} ms a step")

# %% [markdown]
# The three are close. On ranks that share cores such times vary from run to run, so this is no ranking. But in some
# forty lines you have written something that takes about as long as PyTorch's own.
#
# Now to **`no_sync`**. With gradient accumulation (lesson 04, section 4), DDP would send after every micro-batch.
# Inside the context `model.no_sync()`, backward only adds. Forward belongs inside as well, because that is where DDP
# decides whether the coming backward will send. The next cell has the usual loop. With `quiet=False` it leaves
# `no_sync` out.

# %%
def accumulate(model, micro_batches, quiet=True):
    """Gradients of one optimizer step; only the last backward sends."""
    m = len(micro_batches)
    for number, micro_batch in enumerate(micro_batches, start=1):
        keeps_still = quiet and number < m
        context = model.no_sync() if keeps_still else contextlib.nullcontext()
        with context:
            loss = gpt.loss(model(micro_batch), micro_batch)
            (loss / m).backward()

# %% [markdown]
# To count the bytes, we register a **communication hook**: a function that DDP calls for each bucket instead of its own
# all-reduce.
#
# **Predict.** Four micro-batches, and gradients of `gradient_bytes` bytes. How many bytes does a rank hand to
# all-reduces per optimizer step, without `no_sync()`, and with it around the first three?

# %% tags=["predict"]
bytes_without = 4 * gradient_bytes
bytes_with = gradient_bytes

# %% tags=["nbval-check-output"]
def count(sent, bucket):
    """A communication hook that notes the bytes, and does what DDP would do."""
    sent.append(bucket.buffer().nbytes)
    return default_hooks.allreduce_hook(dist.group.WORLD, bucket)

def bytes_sent(rank, quiet):
    """Bytes of all buckets that were sent in one optimizer step."""
    sent = []
    model = DistributedDataParallel(gpt.GPT(model_config), bucket_cap_mb=1)
    model.register_comm_hook(sent, count)
    accumulate(model, tokens.chunk(4), quiet)
    return sum(sent)

without_no_sync = ranks.run(bytes_sent, False)[0]
with_no_sync = ranks.run(bytes_sent, True)[0]
exact = {"within": 1, "unit": "B", "found": "counted"}
compare("bytes without no_sync()", bytes_without, without_no_sync, **exact)
compare("bytes with no_sync()", bytes_with, with_no_sync, **exact)

# %% [markdown]
# A hook also sees where a bucket lies. In labcode a gradient lies in the row of its bucket (section 3). DDP keeps rows
# and gradients apart, unless you say `gradient_as_bucket_view=True`. The cell adds up all memory in which a row or a
# gradient lies, and counts shared memory once.

# %% tags=["nbval-check-output"]
def keep(rows, bucket):
    """A communication hook that keeps the row, and does what DDP would do."""
    rows.append(bucket.buffer())
    return default_hooks.allreduce_hook(dist.group.WORLD, bucket)

def bytes_held(rank, as_view):
    """Bytes of the memory of all rows and gradients after a step."""
    rows = []
    model = DistributedDataParallel(
        gpt.GPT(model_config), gradient_as_bucket_view=as_view
    )
    model.register_comm_hook(rows, keep)
    gpt.loss(model(tokens), tokens).backward()
    memory = {}
    for tensor in rows + [param.grad for param in model.parameters()]:
        storage = tensor.untyped_storage()
        memory[storage.data_ptr()] = storage.nbytes()
    return sum(memory.values())

for as_view in (False, True):
    held = ranks.run(bytes_held, as_view)[0]
    print(f"gradient_as_bucket_view={as_view}: {held / gradient_bytes:.2f}", end=" ")
    print("times the bytes of the gradients")

# %% [markdown]
# With views each gradient exists once. But `optimizer.zero_grad()` sets `.grad` to None, and with it the view is gone:
# in the next backward autograd makes a new tensor, and DDP copies it into the row. With `zero_grad(set_to_none=False)`
# the views stay, and nothing is copied. The price of views is that `detach_()` on a gradient is an error.

# %% [markdown] tags=["exercise"]
# ### Exercise 5.3 · `no_sync` for your class
#
# Write `no_sync` for the class of exercise 5.2. Within `with model.no_sync():`, a backward sends nothing. The first
# backward after it sends the sum of all of them. How can the hook know? Give it a flag to look at.
#
# `QuietDataParallel` inherits from labcode's version of exercise 5.2, so `super().gradient_ready(number, param)` does
# what you wrote there. `contextlib.contextmanager` turns a function into a context: the code before `yield` runs when
# the `with` block begins, and the code after it when the block ends. Think of a backward that raises an error: the error
# has to reach the caller, and the next step has to send again.

# %% tags=["exercise"]
class QuietDataParallel(l05_by_hand.OverlappedDataParallel):
    """Overlapped data parallelism that can add up gradients without sending them."""

    sends = True

    def gradient_ready(self, number, param):
        """As in exercise 5.2, but only if gradients are to be sent."""
        ### BEGIN SOLUTION
        if self.sends:
            super().gradient_ready(number, param)
        ### END SOLUTION

    @contextlib.contextmanager
    def no_sync(self):
        """Within it, backward only adds to `.grad`."""
        ### BEGIN SOLUTION
        self.sends = False
        try:
            yield
        finally:
            self.sends = True
        ### END SOLUTION

# %% tags=["check"]
check("5.3", QuietDataParallel, ranks)

# %% [markdown]
# **Takeaway: with m micro-batches and `no_sync` around all but the last, 1/m of the bytes is sent. Forward belongs
# inside it.**

# %% [markdown]
# ## 6. Clipping (core, 19 min)
#
# Most training scripts limit the length of the gradient: if the 2-norm of all gradients together, $\|g\|$, is larger
# than a maximum $c$, every gradient is multiplied by $c/\|g\|$ (Pascanu et al. 2013). With data parallelism there is a
# right and a wrong moment for it. After the average, all ranks hold the same gradient, compute the same norm, and scale
# by the same factor. Before the average, each rank clips its own gradient, with its own factor.
#
# For example, rank 0 has the gradient (3, 0) and rank 1 has (-1, 0), and c = 1. The mean is (1, 0), which is just
# allowed.
#
# **Predict.** Now both ranks clip first. What is the first number of the mean?

# %% tags=["predict"]
mean_of_clipped = 0.0

# %% tags=["nbval-check-output"]
def clip(gradient, max_norm=1.0):
    return gradient * min(1.0, max_norm / gradient.norm().item())

rank_gradients = [torch.tensor([3.0, 0.0]), torch.tensor([-1.0, 0.0])]
clipped = [clip(gradient) for gradient in rank_gradients]
mean = torch.stack(clipped).mean(dim=0)
compare("first of the mean", mean_of_clipped, mean[0], within=1, found="computed")

# %% tags=["figure"]
plot.clipping([3, -1], max_norm=1, caption="05.clipping")

# %% [markdown]
# Clipped first, the gradients are (1, 0) and (-1, 0), and their mean is zero: the step has disappeared, although the
# mean of the gradients was within the limit.

# %% [markdown] tags=["exercise"]
# ### Exercise 5.4 · Clip by the global norm
#
# Write a step of training for the class of exercise 5.2: forget the old gradients, then forward and backward of this
# rank's share, the average, clipping to `max_norm` by the norm of the gradients of **all** parameters together, then
# the optimizer. Return the norm before clipping. `model.module` is the model itself, and `gpt.loss(logits, targets)` is
# the loss. Compute the norm yourself.

# %% tags=["exercise"]
def clipped_step(model, optimizer, inputs, targets, max_norm):
    """One optimizer step with clipped gradients; returns the norm before clipping."""
    ### BEGIN SOLUTION
    optimizer.zero_grad()
    gpt.loss(model.module(inputs), targets).backward()
    model.finish_gradient_sync()
    squares = [param.grad.square().sum() for param in model.module.parameters()]
    norm = torch.stack(squares).sum().sqrt()
    if norm > max_norm:
        for param in model.module.parameters():
            param.grad *= max_norm / norm
    optimizer.step()
    return norm
    ### END SOLUTION

# %% tags=["check"]
check("5.4", clipped_step, ranks)

# %% [markdown]
# PyTorch has this as `torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)`. With data parallelism that is all,
# because after the average every rank holds the whole gradient. If the **parameters** are sharded over the ranks as
# well, as later in this course, each rank sees only a part of the gradient, and the squares of these parts have to be
# summed over the ranks before the root is taken.
#
# **Takeaway: first the average, then the norm, then the step.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* In 5.3 the flag is often not set back if backward raises: `try` and `finally`, without an
# `except` that swallows the error. Others count a gradient down before they look at the flag. In 5.4 people clip every
# parameter by its own norm (the direction changes), clip before the average, or return the norm after clipping. Ask:
# what does a communication hook that compresses do to the norm?

# %% [markdown]
# ## 7. Broken on purpose (core, 4 min)
#
# Some models do not use every parameter in every step: layers that are dropped at random, experts that no token was
# sent to, a head for a task that is not in this batch. Here rank 1 skips the last block. Its gradients never become
# ready, so their bucket never leaves.

# %% tags=["raises-exception"] raises="RankError: rank 1: RuntimeError: Expected to have finished reduction in the prior iteration"
def leave_out(hidden, rotation):
    """Instead of a block, which is given the rotation of its positions (here None)."""
    return hidden

def skip_a_block(rank, **options):
    model = DistributedDataParallel(gpt.GPT(model_config), **options)
    if rank == 1:
        model.module.blocks[-1].forward = leave_out
    for _ in range(2):
        gpt.loss(model(tokens), tokens).backward()
    return "two steps done"

print(ranks.run(skip_a_block, find_unused_parameters=True))
ranks.run(skip_a_block)

# %% [markdown]
# The other ranks hang in their first backward, waiting for the bucket. Rank 1 notices nothing until its **second**
# forward, where DDP finds that not all gradients of the step before were ready. Two parts of its long message help.
#
# - It names the cure, `find_unused_parameters=True`. DDP then walks through the graph after each forward and counts
#   missing gradients as zero, which costs time in every step.
# - It lists the indices of the parameters without a gradient. They count the parameters with `requires_grad=True`, in
#   the order of `model.parameters()`. With `TORCH_DISTRIBUTED_DEBUG=INFO` in the environment it names them. Look at
#   them before you silence the error: often somebody has forgotten to call a layer.

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Ask: why does rank 1 not hang like the others? (DDP begins to wait when the last bucket is
# complete. On rank 1 it never is.)

# %% [markdown]
# ## 8. Open end: half the bytes (optional, 15 min)
#
# In section 5 a communication hook counted bytes. It can also change them.

# %% [markdown] tags=["exercise"]
# ### Exercise 5.5 · Open end: half the bytes
#
# Write a communication hook that sends gradients in bfloat16, which has 2 bytes instead of 4. DDP calls it with what
# you registered (here the group) and the bucket, and expects a `Future`: an object that will hold the result when it
# has arrived. The second parameter must be called `bucket`. The rubric of the check:
#
# 1. Only bfloat16 travels, and so half of the bytes.
# 2. The result is the mean over the group, to two or three digits.
# 3. Nothing waits inside the hook. `work.get_future().then(function)` calls your function when the all-reduce is done,
#    with a future whose `value()` is a list with the tensor.

# %% tags=["exercise", "by-hand"]
def compress(group, bucket):
    """A Future of `bucket.buffer()` averaged over the group, sent in bfloat16."""
    ### BEGIN SOLUTION
    full = bucket.buffer()
    half = (full / group.size()).bfloat16()
    work = dist.all_reduce(half, group=group, async_op=True)
    return work.get_future().then(lambda done: full.copy_(done.value()[0]))
    ### END SOLUTION

# %% tags=["check"]
check("5.5", compress, ranks)

# %% [markdown]
# PyTorch has this hook. With GPUs and NCCL you would write:
#
# ```python
# from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
#
# model = DistributedDataParallel(module)
# model.register_comm_hook(None, default_hooks.bf16_compress_hook)  # None: all ranks
# ```
#
# A PyTorch that was built without CUDA refuses this hook, by its name: `TypeError: BF16 all reduce communication hook
# required CUDA 11+ and NCCL 2.10+ ...`. But gloo can add bfloat16, so a function of another name that calls the hook
# works here. The cell compares both hooks with DDP's own all-reduce.

# %%
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from course.labs import l05_by_hand


def pytorch_hook(group, bucket):
    return default_hooks.bf16_compress_hook(group, bucket)

def gradient_with(rank, hook):
    """The gradient of DDP with a communication hook; None: with its own all-reduce."""
    model = DistributedDataParallel(layers.initialize(gpt.GPT(model_config), 0))
    if hook is not None:
        model.register_comm_hook(dist.group.WORLD, hook)
    own_tokens = tokens.roll(rank, dims=1)
    gpt.loss(model(own_tokens), own_tokens).backward()
    return torch.cat([param.grad.flatten() for param in model.parameters()])

in_float32 = ranks.run(gradient_with, None)[0]
ours = ranks.run(gradient_with, l05_by_hand.compress)[0]
pytorchs = ranks.run(gradient_with, pytorch_hook)[0]
for name, found in {"ours": ours, "PyTorch's": pytorchs}.items():
    away = (found - in_float32).norm() / in_float32.norm()
    print(f"{name:10} {away:.1e} of its length away from the mean in float32")
print("ours and PyTorch's are equal:", torch.equal(ours, pytorchs))

# %% [markdown] tags=["solution-only"]
# *For the instructor.* For those who have time. People return the tensor instead of a Future, or the Future of
# `all_reduce`, whose value is a list. For those who go on: keep the rounding error of each step and add it to the next
# gradient before rounding (error feedback), and compare the losses of 200 steps.

# %% [markdown]
# ## From here to GPUs and SLURM (core, 2 min)
#
# | where | start |
# |---|---|
# | 8 GPUs of one machine | `torchrun --nproc-per-node=8 -m labcode.train gpt_tiny` |
# | with the class of `labcode.parallel.data` instead of DDP | add `--parallel.data_parallel labcode` |
# | with other buckets | add `--parallel.bucket_mb 50` |
# | SLURM, inside a job | `srun --ntasks-per-node=8 python -m labcode.train gpt_tiny` |
#
# With a GPU for each rank, DDP scales nearly linearly to 256 GPUs (Li et al. 2020, abstract), as long as each rank
# computes long enough to hide the sending (lesson 13b, section 5).
#
# ## Questions (core, 4 min)
#
# **1.** A link is twice as fast as before. Should buckets be larger or smaller?
#
# <details><summary>Answer</summary>
#
# Larger. Latency and bandwidth cost the same at p α β bytes (lesson 01, section 6), and β has doubled.
# </details>
#
# **2.** Why does DDP make new buckets after the first step?
#
# <details><summary>Answer</summary>
#
# In the first step it learns the order in which gradients really become ready, which need not be the reverse order of
# `parameters()`. With buckets in this order, each one is complete as early as possible. (With
# `find_unused_parameters=True` it keeps the first ones, because the order may differ from step to step.)
# </details>
#
# **3.** You accumulate 8 micro-batches with `no_sync` around the first 7, and somebody moves the forward of each
# micro-batch out of the `with` block. What changes?
#
# <details><summary>Answer</summary>
#
# DDP sends after every micro-batch again, because it decides in forward. The step sends eight times the bytes. The
# results are the same up to rounding: averaging once more what is already the same on all ranks does not change it, and
# each new share is averaged once. Only the time or the bytes show it.
# </details>
#
# **4.** From lesson 04, section 4: with AdamW, does it matter for the training whether the gradients are averaged or
# only added up?
#
# <details><summary>Answer</summary>
#
# Hardly: but for the small ε in the denominator, Adam's steps do not depend on a constant factor of the gradients. With
# clipping it matters, because the limit is a fixed length.
# </details>
#
# ## Recap
#
# | concept | formula or fact | in labcode |
# |---|---|---|
# | one message | saves 2 (p - 1) α for each message that is not sent | `parallel.data.make_buckets` |
# | overlap | hides the shorter activity, up to one bucket | `DataParallel._gradient_ready` |
# | order | all ranks send their buckets in the same order | `DataParallel._gradient_ready` |
# | accumulation | `no_sync` around all micro-batches but the last, forward included | `DataParallel.no_sync` |
# | clipping | average, then the norm, then the step | `train.optim.clip_gradients` |
# | unused parameters | a bucket that never leaves | `DataParallel` counts them as zero |
#
# ## Sources
#
# - Li et al. 2020, *PyTorch Distributed: Experiences on Accelerating Data Parallel Training*, arXiv:2006.15704:
#   buckets, overlap, `no_sync`, and the measurements quoted above.
# - Pascanu, Mikolov, Bengio 2013, *On the difficulty of training recurrent neural networks*, arXiv:1211.5063, section
#   3.2: clipping by the norm.
# - Hooks and DDP: <https://docs.pytorch.org/docs/stable/notes/ddp.html>,
#   <https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html>; views, and when they are copied:
#   `gradient_as_bucket_view` and `batched_grad_copy` in the docstring of `DistributedDataParallel` (PyTorch 2.13).
# - NCCL's collectives are kernels: <https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/overview.html>.

# %%
ranks.close()
